"""Determine up to which sequence position a plan was tested, since a format's error in positions grows with their size.

bf16 does not distinguish 256 from 257, so positions computed in bf16 go wrong only in long sequences. A model's use of
positions is observed in its forward pass: tables whose first rows the model takes (embeddings, rotary caches, masks), and
positions made by ``torch.arange`` or given as input. A number counts as a sequence length if a dimension of the batch, other than
the batch size, has this size, one more or one less. Uses of positions that are not recognised are not reported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from castwise.core.casting.trees import tensors_in
from castwise.lab.passes.observers import Args, Kwargs, Observer, Run

SHORTEST = 8
"""Sequences shorter than this are not taken for positions."""


@dataclass
class Positions:
    """The sequence positions that one forward pass of a model uses.

    Attributes:
        length: Number of positions in the batch; 0 if none were seen.
        tables: For each buffer or parameter of which the model takes the first rows, its number of rows, by name.
    """

    length: int = 0
    tables: dict[str, int] = field(default_factory=dict)

    @property
    def note(self) -> str:
        """A sentence that says up to which position a plan was tested; empty if no later positions are known."""
        longer = {name: size for name, size in self.tables.items() if size > self.length}
        if not self.length or (self.tables and not longer):
            return ""
        why = "" if not longer else " ({} has {})".format(*max(longer.items(), key=lambda item: item[1]))
        return (
            f"Tested at positions 0 to {self.length - 1}, those of the sample: later positions{why} were not tested. "
            "For longer sequences give longer batches."
        )


class PositionWatch(Observer):
    """Observes which sequence positions a model's forward pass uses, and records them in ``found``."""

    def __init__(self, found: Positions, model: nn.Module, batch: Any) -> None:
        self._found = found
        given = tensors_in(batch)
        sizes = {size + more for t in given for size in t.shape[1:] for more in (-1, 0, 1)}
        self._lengths = {size for size in sizes if size >= SHORTEST} - {t.shape[0] for t in given if t.dim()}
        self._names = {
            place: name
            for name, t in (*model.named_parameters(), *model.named_buffers())
            if (place := _place(t))
        }
        for tensor in given:
            self._take(self._row(tensor), 0, "")

    def modules(self, model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
        """Return only the model itself."""
        return (("", model),)

    def operator(self, run: Run, op: Any, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator; inside a call of the model, record the positions that it uses."""
        out = run(op, args, kwargs)
        if not any(call.path == "" for call in self.running):
            return out
        name = op.overloadpacket.__name__
        if name == "arange":
            self._take(out.numel(), 0, "")
        elif name == "slice":
            given = dict(zip(("self", "dim", "start", "end", "step"), args, strict=False)) | kwargs
            table, dim = given["self"], given.get("dim", 0)
            if not given.get("start") and given.get("step", 1) == 1:
                self._take(out.shape[dim], table.shape[dim], self._name(table))
        elif name in ("embedding", "index_select"):
            table, indices = args[0], args[-1 if name == "index_select" else 1]
            dim = args[1] if name == "index_select" else 0
            self._take(self._row(indices), table.shape[dim], self._name(table))
        elif name == "index":
            for dim, indices in enumerate(args[1]):
                if indices is not None:
                    self._take(self._row(indices), args[0].shape[dim], self._name(args[0]))
        return out

    def _name(self, table: Tensor) -> str:
        return self._names.get(_place(table), "?")

    def _row(self, indices: Tensor) -> int:
        """Return the length of the last dimension if integers count up from 0 along it; otherwise 0."""
        if indices.is_floating_point() or indices.dtype is torch.bool or not indices.dim():
            return 0
        length = indices.shape[-1]
        row = torch.arange(length, device=indices.device)
        return length if length and bool((indices == row).all()) else 0

    def _take(self, length: int, rows: int, name: str) -> None:
        """Record that positions up to a length were used; if ``name`` is not empty, in a table with this name and number of rows."""
        if length in self._lengths and name != "?":
            self._found.length = max(self._found.length, length)
            if name:
                self._found.tables[name] = max(rows, self._found.tables.get(name, 0))


def _place(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, which its views share; 0 if the tensor has no ordinary storage."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
