"""Automatic mixed precision for PyTorch: the plan chosen by experiment, applied in any loop, watched while it runs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from castwise.casting import (
        autocast,
        custom_bwd,
        custom_fwd,
        fp32_function,
        lower_function,
        widest_function,
    )
    from castwise.errors import CastwiseError
    from castwise.inspection.nonfinite import FirstNonfinite, first_nonfinite
    from castwise.jobs.bench import bench
    from castwise.jobs.tune import TuneResult, tune
    from castwise.masters import AveragedModel
    from castwise.monitor.recorder import Recorder
    from castwise.monitor.recovery import Recovery
    from castwise.monitor.replay import Replay, replay
    from castwise.numerics.parity import ParityResult, parity
    from castwise.plans.plan import LossScale, Plan, Region
    from castwise.scaler import GradScaler, StepResult
    from castwise.session import Amp
    from castwise.workload import Workload

__version__ = "0.1.0"
__all__ = [
    "Amp",
    "AveragedModel",
    "CastwiseError",
    "FirstNonfinite",
    "GradScaler",
    "LossScale",
    "ParityResult",
    "Plan",
    "Recorder",
    "Recovery",
    "Region",
    "Replay",
    "StepResult",
    "TuneResult",
    "Workload",
    "autocast",
    "bench",
    "custom_bwd",
    "custom_fwd",
    "first_nonfinite",
    "fp32_function",
    "lower_function",
    "parity",
    "replay",
    "tune",
    "widest_function",
]

_HOME = {
    name: home
    for home, names in {
        "casting": "autocast custom_bwd custom_fwd fp32_function lower_function widest_function",
        "errors": "CastwiseError",
        "inspection.nonfinite": "FirstNonfinite first_nonfinite",
        "jobs.bench": "bench",
        "jobs.tune": "tune",
        "jobs.tune_result": "TuneResult",
        "masters": "AveragedModel",
        "monitor.recorder": "Recorder",
        "monitor.recovery": "Recovery",
        "monitor.replay": "Replay replay",
        "numerics.parity": "ParityResult parity",
        "plans.plan": "LossScale Plan Region",
        "scaler": "GradScaler StepResult",
        "session": "Amp",
        "workload": "Workload",
    }.items()
    for name in names.split()
}


if not TYPE_CHECKING:  # or a checker would take every wrong name for Any

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used: ``import castwise`` itself costs next to nothing."""
        if name not in _HOME:
            raise AttributeError(f"module 'castwise' has no attribute {name!r}; it has {', '.join(__all__)}")
        value = getattr(importlib.import_module(f"castwise.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
