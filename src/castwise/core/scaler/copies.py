"""Copy buffers of a model, compare them with their copies, and restore those that became non-finite."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn

from castwise.core import _torch
from castwise.core.scaler.result import Restored

Table = dict[str, Tensor | None]
"""The dict in which a module stores its buffers (``module._buffers``)."""
_FORMATS = frozenset((
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
))  # fmt: skip


class Copies:
    """Holds copies of buffers of one model that share a device and a dtype, concatenated in one tensor."""

    def __init__(self) -> None:
        self.tables: list[Table] = []
        self.keys: list[str] = []
        self.names: tuple[str, ...] = ()
        self._ids: list[int] = []

    def add(self, table: Table, key: str, name: str) -> None:
        """Add a buffer to those to copy.

        Args:
            table: The dict in which its module stores it.
            key: Its key in the dict.
            name: Its name in the model.
        """
        self.tables.append(table)
        self.keys.append(key)
        self.names += (name,)

    def _now(self) -> list[Any]:
        return [*map(dict.get, self.tables, self.keys)]

    def lay_out(self) -> None:
        """Allocate memory for copies of the current buffers."""
        buffers = self._now()
        values = [*map(values_of, buffers)]
        device, self._dtype = values[0].device, buffers[0].dtype
        self._plain = all(map(operator.is_, buffers, values))
        self._flat_ones = self._plain and values[0].dim() == 1
        self._shapes, self._sizes = [one.shape for one in values], [one.numel() for one in values]
        self._ids = [*map(id, buffers)]
        with torch.inference_mode(
            False
        ):  # in inference mode torch would make tensors that cannot be written later
            self._flat = torch.empty(sum(self._sizes), dtype=values[0].dtype, device=device)
            self.copies = self._pieces(self._flat)
            self._lengths = torch.tensor(self._sizes, device=device)
            self._ends = nn.functional.pad(self._lengths.cumsum(0), (1, 0))
        self._chosen: tuple[Tensor, list[Tensor]] | None = None

    def _pieces(self, flat: Tensor) -> list[Tensor]:
        return [piece.view(shape) for piece, shape in zip(flat.split(self._sizes), self._shapes, strict=True)]

    def fits(self, buffer: Tensor | None, copy: Tensor) -> bool:
        """Whether a buffer still has the device, dtype and shape of its copy."""
        if buffer is None or buffer.dtype is not self._dtype or not is_kept(buffer):
            return False
        values = values_of(buffer)
        return values.shape == copy.shape and values.device == copy.device

    def copy(self) -> bool:
        """Copy the current values of all buffers; return False if a buffer no longer fits its copy."""
        now = self._now()
        ids = [*map(id, now)]
        if ids != self._ids:
            if not all(map(self.fits, now, self.copies)):
                return False
            self._ids = ids
        if self._flat_ones and sum(map(Tensor.numel, now)) == self._flat.numel():
            torch.cat(now, out=self._flat)
            return True
        try:
            _torch.tensors.copy_each(self.copies, now if self._plain else [*map(values_of, now)])
        except RuntimeError:  # a buffer was resized in place
            return False
        return True

    def copy_sound(self) -> None:
        """Copy the current values of the buffers that did not become non-finite.

        Nothing is copied if a buffer no longer fits its copy.
        """
        now = self._now()
        if all(map(self.fits, now, self.copies)):
            flat = torch.cat([values_of(buffer).reshape(-1) for buffer in now])
            self._flat.copy_(torch.where(self._spread(self._worse(flat)), self._flat, flat))
            self._ids = [*map(id, now)]

    def has_new_nan(self) -> Tensor:
        """Return a 0-dim bool tensor on the device: whether a buffer holds a NaN where its copy holds none."""
        flat = torch.cat([
            (values_of(buffer) if self.fits(buffer, copy) else copy).reshape(-1)
            for buffer, copy in zip(self._now(), self.copies, strict=True)
        ])
        return (_numbers(flat, self._dtype).isnan() & ~_numbers(self._flat, self._dtype).isnan()).any()

    def put_back(self, flag: Tensor | None) -> list[Restored]:
        """Restore buffers that became non-finite; see :meth:`Buffers.put_back`."""
        now = self._now()
        fitting = [True] * len(now)
        if [*map(id, now)] != self._ids:
            fitting = [*map(self.fits, now, self.copies)]
        # Written through .data: an autograd graph may have saved a buffer, and its backward would raise if the buffer's
        # version had changed.
        values = [
            (buffer if self._plain else values_of(buffer)).data if fits else copy
            for buffer, copy, fits in zip(now, self.copies, fitting, strict=True)
        ]
        flat = torch.cat(values if self._flat_ones else [one.reshape(-1) for one in values])
        worse = self._worse(flat)
        found: list[Restored] = []
        if flag is None:
            for at, is_worse in enumerate(worse.tolist()):
                if is_worse:
                    values[at].copy_(self.copies[at])
                    found.append(((self.names[at],), None))
        else:
            worse &= flag.to(worse.device) > 0
            if self._chosen is None:
                chosen = torch.empty_like(self._flat)
                self._chosen = chosen, self._pieces(chosen)
            torch.where(self._spread(worse), self._flat, flat, out=self._chosen[0])
            places = [at for at, fits in enumerate(fitting) if fits]
            _torch.tensors.copy_each([values[at] for at in places], [self._chosen[1][at] for at in places])
            found.append((self.names, worse))
        if not all(fitting) and (flag is None or bool(flag > 0)):
            for at, buffer in enumerate(now):
                if not fitting[at] and self._replace(at, buffer):
                    found.append(((self.names[at],), None))
        return found

    def _worse(self, flat: Tensor) -> Tensor:
        """Return a bool tensor with an element for each buffer: whether the buffer became non-finite since it was copied.

        That is the case if an element is non-finite where the copy is finite, or NaN where the copy is infinite.
        """
        new, old = _numbers(flat, self._dtype), _numbers(self._flat, self._dtype)
        worse = (~new.isfinite() & old.isfinite()) | (new.isnan() & ~old.isnan())
        counts = nn.functional.pad(worse.cumsum(0, dtype=torch.int32), (1, 0))
        return counts[self._ends].diff() > 0

    def _spread(self, by_buffer: Tensor) -> Tensor:
        """Expand a tensor with one value for each buffer to one value for each element of the concatenated buffers."""
        return by_buffer.repeat_interleave(self._lengths, output_size=self._flat.numel())

    def _replace(self, at: int, buffer: Tensor | None) -> bool:
        """Replace a buffer whose shape or dtype has changed by its copy, if the buffer is non-finite and the copy finite.

        Returns:
            Whether the buffer was replaced.
        """
        copy = self.copies[at]
        if buffer is None or not is_kept(buffer) or _is_finite(buffer):
            return False
        if not bool(_numbers(copy, self._dtype).isfinite().all()):
            return False
        whole = copy.clone()
        self.tables[at][self.keys[at]] = (
            torch.view_as_complex(whole) if self._dtype.is_complex else whole.view(self._dtype)
        )
        return True


def empty_again(table: Table, key: str) -> bool:
    """Set a buffer that was None before to None again, if it is non-finite now. Waits for the device.

    Returns:
        Whether the buffer was set to None.
    """
    buffer = table[key]
    if buffer is None or not is_kept(buffer) or _is_finite(buffer):
        return False
    table[key] = None
    return True


def is_kept(buffer: Tensor) -> bool:
    """Whether a buffer can be copied: it has a floating dtype, is dense, and has memory of its own for each element."""
    if type(buffer) is not Tensor and not hasattr(buffer, "placements"):  # DTensors have placements
        return False
    if buffer.dtype not in _FORMATS or not _torch.tensors.is_dense(buffer) or buffer.is_meta:
        return False
    if _torch.tensors.is_transformed(buffer):
        return False
    spread = any(not step and size > 1 for step, size in zip(buffer.stride(), buffer.shape, strict=True))
    return not (spread or buffer.is_conj() or buffer.is_neg() or buffer.is_inference())


def values_of(buffer: Tensor) -> Tensor:
    """Return the values of a buffer on this rank, as a view of real numbers, or of bytes for an fp8 buffer."""
    if hasattr(buffer, "placements"):
        buffer = _torch.distributed.local_tensor(buffer)
    if buffer.is_complex():
        return torch.view_as_real(buffer)
    return buffer.view(torch.uint8) if buffer.itemsize == 1 else buffer


def _numbers(values: Tensor, dtype: torch.dtype) -> Tensor:
    """View the result of :func:`values_of` in a dtype for which ``isfinite`` exists."""
    return values.view(dtype).float() if values.dtype is torch.uint8 else values


def _is_finite(buffer: Tensor) -> bool:
    return bool(_numbers(values_of(buffer), buffer.dtype).isfinite().all())


def has_nan(buffer: Tensor) -> bool:
    """Whether an element of a buffer is NaN. Waits for the device."""
    return bool(_numbers(values_of(buffer), buffer.dtype).isnan().any())
