"""A pass: a copy of a model runs forward and backward under a plan, inside of whatever observes it, and leaves no trace.

``passes``: the copy, the plan on it, the loss and its backward, and the gradients. ``observers``: what sees operators and calls of
modules. ``isolation``: random numbers, settings of the process and a model that a loss may touch are put back. ``draws``:
one pass's random numbers in another. ``emulation``: fp16 on a CPU.
"""
