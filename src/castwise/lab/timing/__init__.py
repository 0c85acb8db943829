"""Time and memory of steps, measured robustly on a noisy machine.

:mod:`~castwise.lab.timing.stats` (pure statistics), :mod:`~castwise.lab.timing.timing` (interleaved rounds),
:mod:`~castwise.lab.timing.runners` (a workload's step under a plan), :mod:`~castwise.lab.timing.memory` (peaks, each in its own
process) and :mod:`~castwise.lab.timing.environment` (what a result was measured on). Properties of a device:
:mod:`~castwise.lab.timing.rates` (by format), :mod:`~castwise.lab.timing.matrix_units` (by its name and flags) and
:mod:`~castwise.lab.timing.limits` (where a step's time goes).
"""
