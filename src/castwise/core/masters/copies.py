"""Copies of parameters that have masters, watched for averages that a low format would swallow.

``copy.deepcopy`` of a prepared model and ``clone`` of its parameters are stored low and have no masters: an average of
weights (``torch.optim.swa_utils.AveragedModel``, ema_pytorch, torch_ema, diffusers' ``EMAModel``) begins as one of the two.
As such it loses most of its movement to rounding, and nothing in torch says so.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from castwise.core import _torch
from castwise.core.masters.originals import is_low

_watched: Any = WeakTensorKeyDictionary()
_clones: list[_Clone] = []
_MANY = 1000
"""Clones after which those that are gone are let go of: models that clone weights in their forward make some at every call."""


@dataclass
class _Clone:
    """A clone: an alias of it may be all that is left, as of ``p.clone().detach()``."""

    memory: _torch.WeakMemory
    source: TensorWeakRef
    written: int
    changes: int = 0


def watch(copied: Tensor, source: Tensor) -> None:
    """Remember a copy that ``copy.deepcopy`` has just made of a parameter with a master."""
    if not copied.is_inference():  # which cannot be trained, and counts no writes
        _watched[copied] = (TensorWeakRef(source), _torch.versions([copied])[0])


def watch_clone(clone: Tensor, source: Tensor) -> None:
    """Remember what ``clone`` has just made of a parameter with a master."""
    if clone.is_inference():
        return
    if len(_clones) > _MANY:
        _clones[:] = [known for known in _clones if known.memory.tensor() is not None]
    memory = _torch.WeakMemory(clone)
    _clones.append(_Clone(memory, TensorWeakRef(source), memory.version))


def is_watched(copied: Tensor) -> bool:
    """Whether a parameter is such a copy."""
    return bool(_watched) and copied in _watched


def is_being_copied() -> bool:
    """Whether the ``__reduce_ex__`` that calls this was called by :mod:`copy`, and not for a pickle."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_name == "__reduce_ex__" or _home(frame).startswith("castwise.")
    ):
        frame = frame.f_back
    return frame is not None and _home(frame) == "copy"


def _home(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def excuse(parameter: Tensor) -> None:
    """Do not watch a copy any more: it was given values of its own."""
    _watched.pop(parameter, None)


def look_at_copies() -> None:
    """Warn once where a copy was written and is neither a copy any more nor trained with masters of its own.

    A clone is taken for an average when it was written before two looks and is near to the parameter: other uses of clones, as
    memory or to try something, come to one of the two.
    """
    written = next(_written_copies(), None) if _watched else None
    if written is None and _clones:
        written = next(_written_clones(), None)
    if written is not None:
        _watched.clear()
        _clones.clear()
        warnings.warn(
            f"A copy of a prepared model is updated, and its parameters are stored in {written.dtype} without masters: "
            "updates that are small against the weights are lost, as those of an average (EMA, SWA) are. Average with "
            "castwise.AveragedModel(model, ...), which holds fp32 and reads the masters.",
            stacklevel=3,
        )


def _written_copies() -> Iterator[Tensor]:
    for copied, (reference, version) in list(_watched.items()):
        source, now = reference(), _torch.versions([copied])[0]
        if source is None or not is_low(copied):
            excuse(copied)
        elif now != version:
            if not _is_copy(copied, source):
                yield copied
            _watched[copied] = (reference, now)  # the model's weights were copied over


def _written_clones() -> Iterator[Tensor]:
    for known in list(_clones):
        now, source = known.memory.version, known.source()
        clone = known.memory.tensor()
        if source is None or clone is None or clone.shape != source.shape:
            _clones.remove(known)
        elif now != known.written:
            known.written = now
            known.changes = 0 if _is_copy(clone, source) else known.changes + 1
            if known.changes > 1 and _is_near(clone, source):
                yield clone


def _is_copy(copied: Tensor, source: Tensor) -> bool:
    return copied.shape == source.shape and torch.equal(copied.detach(), source.detach().to(copied.device))


def _is_near(clone: Tensor, source: Tensor) -> bool:
    values = source.detach().to(clone.device, torch.float32)
    return bool((clone.float() - values).norm() < values.norm() / 2)
