"""``colossalai.utils.checkpointing``: save and resume a training, with castwise's checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from castwise import Amp
from castwise.bridges.compat.coverage import missing_attribute
from castwise.core.checkpoint import load, newest, save
from castwise.errors import StateError

__all__ = ["load_checkpoint", "save_checkpoint"]
__getattr__ = missing_attribute("colossalai.utils")


def _session(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """The arguments for ``castwise.checkpoint`` from an engine's model and optimizer."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    parts = list(inner) if isinstance(inner, nn.ModuleList) and Amp.of(inner) is None else [inner]
    amp = Amp.of(parts[0])
    if amp is None:
        raise StateError(
            "save_checkpoint and load_checkpoint take the model of an engine (engine.model): this model was not prepared by "
            "colossalai.initialize or convert_to_amp"
        )
    optimizers = () if optimizer is None else getattr(optimizer, "optimizer", optimizer)
    return {"model": parts, "optimizers": optimizers, "amp": amp}


def save_checkpoint(
    file: str | os.PathLike[str],
    epoch: int,
    model: nn.Module,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    **kwargs: Any,
) -> None:
    """Save an engine's model and optimizer, from all ranks, so that they resume under any mode and layout.

    Args:
        file: A folder; a castwise checkpoint appears in it complete or not at all. Two epochs are kept.
        epoch: Number of the epoch.
        model: ``engine.model``.
        optimizer: ``engine.optimizer``.
        lr_scheduler: A scheduler to save too.
        kwargs: Further JSON values and tensors to save.
    """
    extra = {"lr_scheduler": None if lr_scheduler is None else lr_scheduler.state_dict(), **kwargs}
    save(file, epoch, **_session(model, optimizer), extra=extra)


def load_checkpoint(
    file: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    **kwargs: Any,
) -> int:
    """Continue from the newest complete checkpoint of a folder, or from ``folder/step-...``; returns its epoch.

    ``kwargs`` are accepted and ignored: a matching checkpoint loads under any layout.

    Raises:
        FileNotFoundError: There is no complete checkpoint.
    """
    found: Any = Path(file)
    if not found.name.startswith("step-"):
        found = newest(file)
        if not found:
            raise FileNotFoundError(f"load_checkpoint({str(file)!r}): no complete checkpoint there")
    loaded = load(found, **_session(model, optimizer))
    if lr_scheduler is not None and loaded.extra and loaded.extra.get("lr_scheduler"):
        lr_scheduler.load_state_dict(loaded.extra["lr_scheduler"])
    return loaded.step
