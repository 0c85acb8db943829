"""Patches Lightning, so that Fabric's optimizers reach the plug-in and FSDP strategies say why they refuse the plug-in."""

from __future__ import annotations

import functools
from typing import Any

from lightning import Fabric
from lightning.fabric.strategies import fsdp
from lightning.pytorch import strategies

from castwise.bridges.trainers.lightning.precision import CastwisePrecision
from castwise.errors import CastwiseError


class StrategyError(CastwiseError, TypeError):
    """Raised if a Lightning strategy accepts only Lightning's own precision plug-in."""


def install() -> None:
    """Patch the set-up methods of Fabric, and the precision setters of both ``FSDPStrategy`` classes.

    This runs once, when the package is imported.
    """
    for name in ("setup", "setup_module", "setup_optimizers"):
        _tell_of_setup(name)
    _say_what_to_use(fsdp.FSDPStrategy, "precision")
    _say_what_to_use(strategies.FSDPStrategy, "precision_plugin")


def _tell_of_setup(name: str) -> None:
    call = getattr(Fabric, name)

    @functools.wraps(call)
    def told(fabric: Fabric, *args: Any, **kwargs: Any) -> Any:
        precision = fabric.strategy.precision
        if isinstance(precision, CastwisePrecision):
            return precision._set_up(fabric, call, args, kwargs)
        return call(fabric, *args, **kwargs)

    setattr(Fabric, name, told)


def _say_what_to_use(strategy: type, name: str) -> None:
    setting = vars(strategy)[name]

    def put(self: Any, precision: Any) -> None:
        if isinstance(precision, CastwisePrecision):
            raise StrategyError(
                f"{precision}: {strategy.__name__} accepts only Lightning's own FSDPPrecision as its precision plug-in. Shard with FSDP2 instead: "
                "strategy=ModelParallelStrategy(...), and precision.fully_shard(model, mesh=device_mesh['data_parallel']) where the model is "
                "parallelized"
            )
        setting.fset(self, precision)

    setattr(strategy, name, setting.setter(put))
