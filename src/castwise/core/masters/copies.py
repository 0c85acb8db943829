"""Warn about averages of weights (EMA, SWA) that are stored in bf16 or fp16, where rounding drops most updates.

``copy.deepcopy`` of a prepared model and ``clone`` of its parameters make copies in bf16 or fp16 without fp32
masters. Most averages of weights start as such a copy (``torch.optim.swa_utils.AveragedModel``, ema_pytorch,
torch_ema, diffusers' ``EMAModel``). torch does not report that their updates are lost. So castwise watches these
copies for writes.

Other averages start as ``p.detach().clone()`` or as a copy of a ``state_dict``, or are created anew at each step.
These are searched for among all tensors of the process, at a few steps.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from castwise.core import _torch
from castwise.core.masters.originals import is_low

_watched: Any = WeakTensorKeyDictionary()
_replaced: Any = WeakTensorKeyDictionary()
_told: Any = WeakTensorKeyDictionary()
"""The parameters for whose copies the user has been warned."""
_clones: list[_Clone] = []
_MANY = 1000
"""If there are more entries for clones than this, those of clones that no longer exist are removed.

Some models clone weights in their forward, so each call adds entries."""
_near: list[_Near] = []
"""The tensors close to a parameter that the last search found."""
_made_anew: list[Tensor] = []
"""The tensors that are the new value of an average which is created anew at each step."""

_SEARCHED = (3, 4, 30, 31, 300, 301)
"""The steps of an optimizer before which all tensors of the process are searched.

They come in pairs, to find averages that are created anew at each step. The later pairs find averages that start after a
warmup."""
_NEAR = 0.5
"""A tensor counts as near a parameter if its distance is below this fraction of the parameter's norm."""
_AT_ONCE = 256
"""The number of tensors whose distances from all parameters of their shape are computed at once."""
_SAMPLE = 64
"""The number of elements by which a tensor is compared with a parameter."""


@dataclass
class _Clone:
    """A clone of a parameter that is watched for writes. It is known by its memory.

    The tensor itself may be gone while an alias of it still exists, as after ``p.clone().detach()``.
    """

    memory: _torch.tensors.WeakMemory
    source: TensorWeakRef
    written: int
    changes: int = 0


@dataclass
class _Near:
    """A tensor whose values are close to a parameter's, with sampled elements of the tensor and of the parameter."""

    memory: _torch.tensors.WeakMemory
    source: TensorWeakRef
    values: Tensor
    weights: Tensor
    eps: float
    """The machine epsilon of the tensor's format, to which an average is rounded."""

    def is_followed_by(self, values: Tensor, weights: Tensor) -> bool:
        """Whether another tensor is the next value of an average, whose last value was this tensor.

        This tensor must be gone, and the new elements must be between this tensor's elements and the parameter's. A
        copy of the parameter, current or from the last search, is not an average.

        Args:
            values: Sampled elements of the other tensor.
            weights: The same elements of the parameter now.
        """
        ulp = weights.abs() * self.eps
        low, high = torch.minimum(self.values, weights) - ulp, torch.maximum(self.values, weights) + ulp
        return (
            self.memory.tensor() is None
            and not any(torch.equal(values, kept) for kept in (weights, self.weights))
            and bool(((low <= values) & (values <= high)).all())
        )


def watch(copied: Tensor, source: Tensor) -> None:
    """Watch for writes to a copy that ``copy.deepcopy`` has just made of a parameter with an fp32 master."""
    if not copied.is_inference():  # an inference tensor cannot be trained, and counts no writes
        _watched[copied] = (TensorWeakRef(source), _torch.tensors.versions([copied])[0])


def watch_clone(clone: Tensor, source: Tensor) -> None:
    """Watch for writes to a clone of a parameter with an fp32 master."""
    if clone.is_inference():
        return
    if len(_clones) > _MANY:
        _clones[:] = [known for known in _clones if known.memory.tensor() is not None]
    memory = _torch.tensors.WeakMemory(clone)
    _clones.append(_Clone(memory, TensorWeakRef(source), memory.version))


def search(step: int, parameters: Sequence[Tensor], master_of: Callable[[Tensor], object]) -> None:
    """Search all tensors of the process for possible averages of parameters, and watch for writes to them.

    A possible average has the format of a parameter with an fp32 master, is close to it, and has memory of its own.
    The search takes place only before some steps of an optimizer.

    Args:
        step: Number of the step that follows.
        parameters: The parameters with masters.
        master_of: Returns the master of any model's parameter, or None.
    """
    if step not in _SEARCHED:
        return
    alike: dict[Any, list[Tensor]] = {}
    # Vectors are left out, since they may be close by chance: a norm's running statistics are close to its weight.
    for parameter in parameters:
        if parameter.dim() > 1 and not hasattr(parameter, "device_mesh") and parameter not in _told:
            alike.setdefault((parameter.shape, parameter.dtype, parameter.device), []).append(parameter)
    if not alike:
        _near.clear()
        return
    tensors = [(thing, _address(thing)) for thing in _torch.tensors.living(Tensor)]
    known = {address for tensor, address in tensors if tensor.requires_grad and master_of(tensor) is not None}
    known |= {tensor.data_ptr() for clone in _clones if (tensor := clone.memory.tensor()) is not None}
    sought: dict[Any, dict[int, tuple[Tensor, int]]] = {}
    for tensor, address in tensors:
        if not address or address in known or type(tensor) not in (Tensor, nn.Parameter):
            continue
        if (kind := (tensor.shape, tensor.dtype, tensor.device)) in alike:
            sought.setdefault(kind, {})[id(tensor)] = tensor, address
    # A trained parameter of any model is not an average. A teacher's parameter may require gradients but has no ``grad``.
    # ``grad`` is read only for candidates, since a backward on another thread may be writing it.
    addresses = {address for those in sought.values() for _, address in those.values()}
    known = {address for tensor, address in tensors if address in addresses and _is_trained(tensor)}
    before = _near if step - 1 in _SEARCHED else []
    found: list[_Near] = []
    for kind, those in sought.items():
        candidates = [tensor for tensor, address in those.values() if address not in known]
        for tensor, values, source, weights in _nearest(candidates, alike[kind]):
            memory = _torch.tensors.WeakMemory(tensor)
            _clones.append(_Clone(memory, TensorWeakRef(source), memory.version))
            found.append(_Near(memory, TensorWeakRef(source), values, weights, torch.finfo(tensor.dtype).eps))
            if any(known.source() is source and known.is_followed_by(values, weights) for known in before):
                _made_anew.append(tensor)
    _near[:] = found


def _is_trained(tensor: Tensor) -> bool:
    return tensor.requires_grad and (not tensor.is_leaf or tensor.grad is not None)


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, or 0 if the tensor has none or does not count writes."""
    try:
        counts = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_inference())
        return tensor.data_ptr() if counts else 0
    except RuntimeError:  # a tensor being traced, or not initialised
        return 0


def _sample(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:_SAMPLE].float()


def _nearest(
    candidates: Sequence[Tensor], parameters: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield the tensors that are near a parameter of their shape, with their samples, the nearest parameter, and its sample.

    A model of many equal layers has as many candidates as parameters, so all distances are computed together, in chunks.
    """
    if not candidates:
        return
    weights = torch.stack([*map(_sample, parameters)])
    sizes = weights.norm(dim=1)
    for start in range(0, len(candidates), _AT_ONCE):
        some = candidates[start : start + _AT_ONCE]
        values = torch.stack([*map(_sample, some)])
        # relative to the parameter; NaN, which also comes from a parameter of zeros, is never near
        distances, nearest = (torch.cdist(values, weights) / sizes).nan_to_num(math.inf).min(dim=1)
        near = (distances < _NEAR).tolist()
        for index, at in enumerate(nearest.tolist()):
            if near[index]:
                yield some[index], values[index].clone(), parameters[at], weights[at].clone()


def is_watched(copied: Tensor) -> bool:
    """Whether a parameter is a copy that :func:`watch` watches."""
    return bool(_watched) and copied in _watched


def is_being_copied() -> bool:
    """Whether the calling ``__reduce_ex__`` was called by :mod:`copy` rather than for a pickle."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_name == "__reduce_ex__" or _home(frame).startswith("castwise.")
    ):
        frame = frame.f_back
    return frame is not None and _home(frame) == "copy"


def _home(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def note_replaced(copied: Tensor) -> None:
    """Count a replacement of a copy's ``data`` as a write to the copy, except for the first replacement.

    torch does not count such a replacement. The first replacement may be a move of the copy to a device.
    """
    if copied in _replaced:
        torch.autograd.graph.increment_version(copied)
    _replaced[copied] = True


def excuse(parameter: Tensor) -> None:
    """Stop watching a copy, for example since other values were loaded into it."""
    if _watched:
        _watched.pop(parameter, None)


def look_at_copies() -> None:
    """Warn once if a watched copy or clone seems to be an average of weights whose updates are rounded away.

    A copy counts as an average if it was written, differs from its parameter, and is not trained with fp32 masters. A
    clone counts as an average if it was written before two calls of this function and is near its parameter. Other
    uses of clones, such as a saved state or a trial step, do not meet both conditions.
    """
    written = _made_anew[0] if _made_anew else next(_written_copies(), None) if _watched else None
    if written is None and _clones:
        written = next(_written_clones(), None)
    if written is not None:
        sources = [reference() for reference, _ in _watched.values()] + [known.source() for known in _clones]
        _told.update((source, True) for source in sources if source is not None)
        _watched.clear()
        _clones.clear()
        _made_anew.clear()
        warnings.warn(
            f"A copy of a prepared model is being updated, and its parameters are stored in {written.dtype} without masters: "
            "updates that are small relative to the weights are lost, such as those of an average (EMA, SWA). Average with "
            "castwise.AveragedModel(model, ...), which is kept in fp32 and reads the masters.",
            stacklevel=3,
        )


def _written_copies() -> Iterator[Tensor]:
    for copied, (reference, version) in list(_watched.items()):
        source, now = reference(), _torch.tensors.versions([copied])[0]
        if source is None or not is_low(copied):
            excuse(copied)
        elif now != version:
            if not _is_copy(copied, source):
                yield copied
            _watched[copied] = (reference, now)  # the write was a copy of the model's weights


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
    return bool((clone.float() - values).norm() < _NEAR * values.norm())
