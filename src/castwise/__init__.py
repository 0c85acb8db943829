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
    from castwise.inspection.compare import compare
    from castwise.inspection.comparison import Comparison
    from castwise.inspection.forecast import Forecast, forecast
    from castwise.inspection.mismatch import Mismatch, mismatch
    from castwise.inspection.nonfinite import FirstNonfinite, first_nonfinite
    from castwise.inspection.operators import OperatorTable, operator_table
    from castwise.jobs.bench import bench
    from castwise.jobs.tune import TuneResult, tune
    from castwise.masters import AveragedModel
    from castwise.monitor import Monitor
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
    "Comparison",
    "FirstNonfinite",
    "Forecast",
    "GradScaler",
    "LossScale",
    "Mismatch",
    "Monitor",
    "OperatorTable",
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
    "compare",
    "custom_bwd",
    "custom_fwd",
    "first_nonfinite",
    "forecast",
    "fp32_function",
    "lower_function",
    "mismatch",
    "operator_table",
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
        "inspection.compare": "compare",
        "inspection.comparison": "Comparison",
        "inspection.mismatch": "Mismatch mismatch",
        "inspection.forecast": "Forecast forecast",
        "inspection.nonfinite": "FirstNonfinite first_nonfinite",
        "inspection.operators": "OperatorTable operator_table",
        "jobs.bench": "bench",
        "jobs.tune": "tune",
        "jobs.tune_result": "TuneResult",
        "masters": "AveragedModel",
        "monitor": "Monitor",
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
_ROOMS = ("checkpoint", "compat", "errors", "integrations", "masters", "parallel", "ranks")
"""Whose own names the docs give: ``castwise.ranks.ALONE`` is there after ``import castwise``."""


if not TYPE_CHECKING:  # or a checker would take every wrong name for Any

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used: ``import castwise`` itself costs next to nothing."""
        if name in _ROOMS:
            return importlib.import_module(f"castwise.{name}")
        if name not in _HOME:
            raise AttributeError(f"module 'castwise' has no attribute {name!r}; it has {', '.join(__all__)}")
        value = getattr(importlib.import_module(f"castwise.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
