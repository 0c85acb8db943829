"""Run a copy of a model forward and backward under a plan, observe the run, and leave no side effects.

Such a run is called a *pass*. ``passes`` copies the model, applies the plan, runs loss and backward, and collects gradients.
``observers`` observes operators and module calls. ``isolation`` restores random numbers, process-wide settings, and a model
that a loss may change. ``draws`` repeats the random draws of one pass in another. ``choices`` compares the discrete choices
(indices, masks) of two passes. ``regions`` finds the parts of a model for which a format can be chosen. ``emulation`` emulates
fp16 products on a CPU.
"""
