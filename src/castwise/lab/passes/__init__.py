"""A pass: a copy of a model runs forward and backward under a plan, with observers, and without side effects.

``passes``: the copy, the plan on it, the loss, its backward, and the gradients. ``observers``: observe operators and module
calls. ``isolation``: restores random numbers, process-wide settings and a model that a loss may change. ``draws``: repeats
one pass's random draws in another. ``emulation``: fp16 on a CPU.
"""
