"""Measure the time and memory of training steps robustly on a noisy machine.

- :mod:`~castwise.lab.timing.stats` compares times with pure statistics.
- :mod:`~castwise.lab.timing.timing` times candidates in interleaved rounds.
- :mod:`~castwise.lab.timing.runners` runs a workload's step under a plan.
- :mod:`~castwise.lab.timing.apart` and :mod:`~castwise.lab.timing.processes` run each plan in its own process.
- :mod:`~castwise.lab.timing.ranks` lets the ranks of a process group measure together.
- :mod:`~castwise.lab.timing.memory` measures peak memory, for each plan in its own process.
- :mod:`~castwise.lab.timing.environment` describes what a result was measured on.
- :mod:`~castwise.lab.timing.rates` measures a device's speed by format.
- :mod:`~castwise.lab.timing.matrix_units` tells a device's matrix units from its name and flags.
- :mod:`~castwise.lab.timing.limits` finds out where a step's time goes.
"""
