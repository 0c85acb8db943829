"""Time and memory of steps, robust to a noisy machine.

:mod:`~castwise.measure.stats` (pure statistics), :mod:`~castwise.measure.timing` (interleaved rounds),
:mod:`~castwise.measure.steps` (a workload's step under a plan), :mod:`~castwise.measure.memory` (peaks in a process
of their own) and :mod:`~castwise.measure.environment` (what a result was measured on). What a device is like:
:mod:`~castwise.measure.rates` (by format), :mod:`~castwise.measure.matrix_units` (by its name and flags) and
:mod:`~castwise.measure.limits` (where a step's time goes).
"""
