"""``colossalai.utils.checkpointing``: saves and resumes a training, in castwise's checkpoint format."""

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
    """Return the arguments for castwise's checkpoint functions that belong to an engine's model and optimizer."""
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
    """Save the model and the optimizer of an engine, from all ranks together.

    The training can be resumed in another AMP mode and with another parallel layout.

    Args:
        file: The folder of the checkpoints. A checkpoint appears in the folder complete or not at all. The checkpoints
            of the last two epochs are kept.
        epoch: The number of the epoch.
        model: The model of the engine, ``engine.model``.
        optimizer: The optimizer of the engine, ``engine.optimizer``.
        lr_scheduler: A learning-rate scheduler to save too.
        kwargs: Further values to save, which may be JSON values and tensors.
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
    """Load the newest complete checkpoint of a folder, and return the number of its epoch.

    Args:
        file: The folder of the checkpoints, or the path ``folder/step-...`` of one checkpoint.
        model: The model of the engine, ``engine.model``.
        optimizer: The optimizer of the engine, ``engine.optimizer``.
        lr_scheduler: The learning-rate scheduler to load too.
        kwargs: Accepted and ignored, since a checkpoint that fits the model loads under any parallel layout.

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
