"""Time and memory of steps, robust to a noisy machine.

:mod:`~castwise.lab.timing.stats` (pure statistics), :mod:`~castwise.lab.timing.timing` (interleaved rounds),
:mod:`~castwise.lab.timing.runners` (a workload's step under a plan), :mod:`~castwise.lab.timing.memory` (peaks in a process
of their own) and :mod:`~castwise.lab.timing.environment` (what a result was measured on). What a device is like:
:mod:`~castwise.lab.timing.rates` (by format), :mod:`~castwise.lab.timing.matrix_units` (by its name and flags) and
:mod:`~castwise.lab.timing.limits` (where a step's time goes).
"""
