"""Copies of parameters that have masters, watched for averages that a low format would swallow.

``copy.deepcopy`` of a prepared model, which ``torch.optim.swa_utils.AveragedModel`` makes too, is stored low and has
no masters. As an average of weights it loses most of its movement to rounding, and nothing in torch says so.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from castwise import _torch
from castwise.masters.originals import is_low
from castwise.masters.parameter import master_of

_watched: Any = WeakTensorKeyDictionary()


def watch(module: nn.Module, memo: dict[int, Any]) -> None:
    """Remember the copies that ``copy.deepcopy`` has just made of parameters with masters."""
    for _, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        copied = memo.get(id(parameter))
        if isinstance(copied, Tensor) and master_of(parameter) is not None:
            _watched[copied] = (TensorWeakRef(parameter), _torch.versions([copied])[0])


def excuse(parameter: Tensor) -> None:
    """Do not watch a copy any more: it was given values of its own."""
    _watched.pop(parameter, None)


def look_at_copies() -> None:
    """Warn once where a copy was written and is neither a copy any more nor trained with masters of its own."""
    if not _watched:
        return
    for copied, (reference, version) in list(_watched.items()):
        source, now = reference(), _torch.versions([copied])[0]
        if source is None or not is_low(copied) or master_of(copied) is not None:
            excuse(copied)
        elif now != version:
            if copied.shape == source.shape and torch.equal(
                copied.detach(), source.detach().to(copied.device)
            ):
                _watched[copied] = (reference, now)  # the model's weights were copied over
                continue
            _watched.clear()
            warnings.warn(
                f"A copy of a prepared model is updated, and its parameters are stored in {copied.dtype} without masters: "
                "updates that are small against the weights are lost, as those of an average (EMA, SWA) are. Average with "
                "castwise.AveragedModel(model, ...), which holds fp32 and reads the masters.",
                stacklevel=3,
            )
            return
