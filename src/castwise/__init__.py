"""Automatic mixed precision for PyTorch: find a precision plan by experiment, apply it in any training loop, watch the run."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from castwise.commands.jobs.bench import bench
    from castwise.commands.jobs.tune import TuneResult, tune
    from castwise.core.casting import (
        autocast,
        custom_bwd,
        custom_fwd,
        fp32_function,
        lower_function,
        widest_function,
    )
    from castwise.core.masters import AveragedModel
    from castwise.core.plans.plan import LossScale, Plan, Region
    from castwise.core.scaler import GradScaler, StepResult
    from castwise.core.serve import bake, export
    from castwise.core.session import Amp
    from castwise.errors import CastwiseError
    from castwise.lab.inspect.compare import compare
    from castwise.lab.inspect.comparison import Comparison
    from castwise.lab.inspect.forecast import Forecast, forecast
    from castwise.lab.inspect.mismatch import Mismatch, mismatch
    from castwise.lab.inspect.nonfinite import FirstNonfinite, first_nonfinite
    from castwise.lab.inspect.operators import OperatorTable, operator_table
    from castwise.lab.parity.parity import ParityResult, parity
    from castwise.lab.serve.parity import OutputParity, output_parity
    from castwise.lab.watch import Monitor
    from castwise.lab.watch.recorder import Recorder
    from castwise.lab.watch.recovery import Recovery
    from castwise.lab.watch.replay import Replay, replay
    from castwise.lab.workloads.workload import Workload

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
    "OutputParity",
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
    "bake",
    "bench",
    "compare",
    "custom_bwd",
    "custom_fwd",
    "export",
    "first_nonfinite",
    "forecast",
    "fp32_function",
    "lower_function",
    "mismatch",
    "operator_table",
    "output_parity",
    "parity",
    "replay",
    "tune",
    "widest_function",
]

_HOME = {
    name: home
    for home, names in {
        "core.casting": "autocast custom_bwd custom_fwd fp32_function lower_function widest_function",
        "errors": "CastwiseError",
        "lab.inspect.compare": "compare",
        "lab.inspect.comparison": "Comparison",
        "lab.inspect.mismatch": "Mismatch mismatch",
        "lab.inspect.forecast": "Forecast forecast",
        "lab.inspect.nonfinite": "FirstNonfinite first_nonfinite",
        "lab.inspect.operators": "OperatorTable operator_table",
        "commands.jobs.bench": "bench",
        "commands.jobs.tune": "tune",
        "commands.jobs.tune_result": "TuneResult",
        "core.masters": "AveragedModel",
        "lab.watch": "Monitor",
        "lab.watch.recorder": "Recorder",
        "lab.watch.recovery": "Recovery",
        "lab.watch.replay": "Replay replay",
        "lab.parity.parity": "ParityResult parity",
        "lab.serve.parity": "OutputParity output_parity",
        "core.plans.plan": "LossScale Plan Region",
        "core.scaler": "GradScaler StepResult",
        "core.serve": "bake export",
        "core.session": "Amp",
        "lab.workloads.workload": "Workload",
    }.items()
    for name in names.split()
}
_MOVED = {
    "casting": "core.casting",
    "checkpoint": "core.checkpoint",
    "cli": "commands.cli",
    "compat": "bridges.compat",
    "inspection": "lab.inspect",
    "integrations": "bridges.trainers",
    "lint": "bridges.scripts.lint",
    "masters": "core.masters",
    "measure": "lab.timing",
    "migrate": "bridges.scripts.migrate",
    "monitor": "lab.watch",
    "numerics": "lab.parity",
    "parallel": "core.parallel",
    "plans": "core.plans",
    "ranks": "core.ranks",
    "scaler": "core.scaler",
    "schemas": "core.schemas",
    "serving": "lab.serve",
    "session": "core.session",
    "updates": "core.masters.updates",
    "workload": "lab.workloads.workload",
    "workloads": "lab.workloads",
}
"""Maps module paths that the docs give, or gave in the past, to the modules to which they lead.

``castwise.ranks.ALONE`` works after ``import castwise``, and ``import castwise.checkpoint`` imports the module itself."""


class _Moved:
    """An import hook that finds the module for a path in :data:`_MOVED`."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        package, _, rest = name.partition(".")
        room, _, below = rest.partition(".")
        if package != "castwise" or room not in _MOVED:
            return None
        home = ".".join(filter(None, ("castwise", _MOVED[room], below)))
        if importlib.util.find_spec(home) is None:
            return None
        return importlib.machinery.ModuleSpec(name, _Alias(home))


class _Alias(importlib.abc.Loader):
    """A loader that returns the module at another path, so that both paths name the same module."""

    def __init__(self, home: str) -> None:
        self._home = home

    def create_module(self, spec: object) -> Any:
        module = importlib.import_module(self._home)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: Any) -> None:
        name, module.__spec__ = (
            module.__spec__.name,
            self._spec,
        )  # the import system has replaced the module's own spec by the spec of the other path
        package, _, child = name.rpartition(".")
        if child in vars(sys.modules[package]):
            sys.modules[package] = _Holder(package)


class _Holder(types.ModuleType):
    """A stand-in for the package while a module is imported that has the name of a public object of the package.

    It keeps the import from overwriting the public object.
    """

    def __init__(self, package: str) -> None:
        vars(self).update(_package=package, _inner=sys.modules[package])

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_inner"], name)

    def __setattr__(self, name: str, value: object) -> None:
        sys.modules[vars(self)["_package"]] = vars(self)["_inner"]


sys.meta_path.insert(0, _Moved())  # before the finder that looks in folders


if not TYPE_CHECKING:  # otherwise a type checker would accept every wrong name as Any

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used, so that ``import castwise`` is cheap."""
        if name in _MOVED:
            return importlib.import_module(f"castwise.{name}")
        if name not in _HOME:
            raise AttributeError(f"module 'castwise' has no attribute {name!r}; it has {', '.join(__all__)}")
        value = getattr(importlib.import_module(f"castwise.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
