"""Write tensors to files as plain bytes, and read them by an index of their positions.

Each rank writes one file, such as ``rank-00000.safetensors``, whose header lets other programs read the weights.
castwise does not read the header. It reads an index, which gives the position of each piece of a tensor and is stored
with the values that are not tensors. The index is checked before anything else is read.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from castwise.core import _torch
from castwise.core.ranks import Ranks
from castwise.core.ranks.pieces import is_dtensor
from castwise.errors import CheckpointError

_SAFE: Final = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_OTHER: Final = (torch.complex128, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
"""The dtypes without a name in safetensors headers, whose tensors are declared there as bytes."""
_DTYPES: Final = {str(dtype).removeprefix("torch."): dtype for dtype in (*_SAFE, *_OTHER)}
_ALIGNED: Final = 16
_LARGEST: Final = 1 << 48
"""A number of elements that no tensor has, and that is small enough for products of it not to overflow."""

Sizes = tuple[int, ...]


class Piece(NamedTuple):
    """A box of elements of a tensor that is stored in one file.

    ``start`` is the position of its first byte, counted from the end of the file's header. ``offsets`` and ``sizes``
    give the box in the tensor.
    """

    file: str
    start: int
    offsets: Sizes
    sizes: Sizes


@dataclass(frozen=True)
class Entry:
    """A saved tensor and the pieces in which it is stored. No piece is empty, and together they cover the tensor."""

    dtype: torch.dtype
    shape: Sizes
    pieces: Sequence[Piece]

    def to_json(self) -> dict[str, Any]:
        """Return the entry as JSON that :func:`read_index` reads."""
        return {"dtype": str(self.dtype).removeprefix("torch."), "shape": self.shape, "pieces": self.pieces}


Index = dict[str, Entry]


class _Held(NamedTuple):
    """A description of the part of a tensor that one rank holds: the whole tensor's shape, and the part's box in it."""

    name: str
    dtype: torch.dtype
    shape: Sizes
    offsets: Sizes
    sizes: Sizes


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, sharing its memory, or the tensor itself if it is no DTensor."""
    return _torch.distributed.local_tensor(tensor) if is_dtensor(tensor) else tensor


def _held(name: str, tensor: Tensor) -> _Held:
    local = local_of(tensor)
    if (
        type(local) is not Tensor
        or local.layout is not torch.strided
        or local.dtype not in _DTYPES.values()
        or local.is_meta
    ):
        raise CheckpointError(
            f"save: {name} is a {type(local).__qualname__} of {local.dtype} on {local.device} ({local.layout}), which cannot be "
            f"saved. Allowed: plain tensors with values, of {', '.join(_DTYPES)}."
        )
    return _Held(name, tensor.dtype, tuple(tensor.shape), *_torch.distributed.local_box(tensor))


def lay_out(tensors: Mapping[str, Tensor], ranks: Ranks) -> Index:
    """Decide which rank writes which pieces of which tensors, and at which positions. All ranks must call this.

    A rank writes its shards of DTensors, and its other tensors whole. A piece that several ranks hold is written by the
    lowest of them.

    Raises:
        CheckpointError: Something cannot be saved, or tensors of one name differ between ranks.
    """
    parts = ranks.to_first(ranks.each(lambda: [_held(name, tensor) for name, tensor in tensors.items()]))
    return ranks.first(lambda: _arrange(parts))


def _arrange(parts: Sequence[Sequence[_Held]]) -> Index:
    index: Index = {}
    seen = set()
    for rank, held in enumerate(parts):
        mine = []
        for one in held:
            known = index.setdefault(one.name, Entry(one.dtype, one.shape, []))
            if (known.dtype, known.shape) != (one.dtype, one.shape):
                raise CheckpointError(
                    f"save: {one.name} is {known.dtype} {list(known.shape)} on one rank and {one.dtype} {list(one.shape)} on rank "
                    f"{rank}; give tensors that differ between ranks different names"
                )
            box = (one.name, one.offsets, one.sizes)
            if math.prod(one.sizes) and box not in seen:
                seen.add(box)
                mine.append(one)
        start = 0
        # the widest numbers first, so that each starts at a multiple of its size
        for one in sorted(mine, key=lambda one: -one.dtype.itemsize):
            piece = Piece(f"rank-{rank:05d}.safetensors", start, one.offsets, one.sizes)
            index[one.name].pieces.append(piece)  # type: ignore[attr-defined]  # a list, in this function
            start += _bytes(one.dtype, one.sizes)
    return index


def _bytes(dtype: torch.dtype, sizes: Sizes) -> int:
    return math.prod(sizes) * dtype.itemsize


class Stage:
    """The pieces of tensors that this rank writes, as :func:`lay_out` has decided.

    With ``copied``, the constructor copies the tensors to host memory, so that training may change them at once.
    """

    def __init__(self, tensors: Mapping[str, Tensor], index: Index, rank: int, *, copied: bool) -> None:
        self._name = f"rank-{rank:05d}.safetensors"
        mine = [
            (piece.start, name, entry, piece)
            for name, entry in index.items()
            for piece in entry.pieces
            if piece.file == self._name
        ]
        self._header: dict[str, Any] = {}
        self._tensors: list[Tensor] = []
        for start, name, entry, piece in sorted(mine, key=lambda one: one[0]):
            box = ",".join(f"{o}:{o + n}" for o, n in zip(piece.offsets, piece.sizes, strict=True))
            size = _bytes(entry.dtype, piece.sizes)
            self._header[name if piece.sizes == entry.shape else f"{name}[{box}]"] = {
                "dtype": _SAFE.get(entry.dtype, "U8"),
                "shape": piece.sizes if entry.dtype in _SAFE else [size],
                "data_offsets": [start, start + size],
            }
            local = local_of(tensors[name]).detach()
            self._tensors.append(local.to("cpu", copy=True) if copied else local)

    def write(self, folder: Path) -> dict[str, dict[str, Any]]:
        """Write this rank's file into a folder.

        Returns:
            The name of the file, mapped to its size in bytes and its crc32. Empty if this rank has nothing to write.
        """
        if not self._tensors:
            return {}
        header = json.dumps(self._header).encode()
        header += b" " * (-(8 + len(header)) % _ALIGNED)
        crc = size = 0
        with open(folder / self._name, "xb") as file:
            for data in (len(header).to_bytes(8, "little"), header, *map(_raw, self._tensors)):
                file.write(data)
                crc, size = zlib.crc32(data, crc), size + memoryview(data).nbytes
            file.flush()
            os.fsync(file.fileno())
        return {self._name: {"size": size, "crc32": f"{crc:08x}"}}


def _raw(tensor: Tensor) -> Any:
    plain = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy()


# --- reading ------------------------------------------------------------------------------------------------


def read_index(value: Any, files: Mapping[str, int]) -> Index:
    """Convert untrusted JSON to an index of tensors, and check it.

    Args:
        value: The JSON.
        files: The names of the files with tensors, and their sizes in bytes.

    Raises:
        CheckpointError: The JSON is not an index, its pieces are not inside these files, or they do not make up their
            tensors.
    """
    if not isinstance(value, dict):
        raise CheckpointError("the index of tensors is not a mapping")
    used = dict.fromkeys(files, 0)
    index: Index = {}
    for name, item in value.items():
        try:
            index[name] = entry = _entry(item)
            for piece in entry.pieces:
                need(piece.file in files, "a piece is in a file that the checkpoint does not have")
                size = _bytes(entry.dtype, piece.sizes)
                used[piece.file] += size
                need(8 + piece.start + size <= files[piece.file], "a piece ends beyond the end of its file")
                need(used[piece.file] <= files[piece.file], "pieces are larger than their file")
        except ValueError as error:
            raise CheckpointError(f"the index of tensors is wrong at {name[:200]!r}: {error}") from None
    return index


def need(good: bool, otherwise: str) -> None:
    """Raise ValueError with the message ``otherwise`` unless ``good`` is true."""
    if not good:
        raise ValueError(otherwise)


def _numbers(value: Any) -> Sizes:
    good = isinstance(value, list) and all(type(one) is int and 0 <= one < _LARGEST for one in value)
    need(good, "a shape or an offset is not a list of integers")
    return tuple(value)


def _entry(item: Any) -> Entry:
    need(
        isinstance(item, dict) and item.keys() == {"dtype", "shape", "pieces"},
        "an entry does not consist of dtype, shape and pieces",
    )
    need(isinstance(item["dtype"], str) and item["dtype"] in _DTYPES, "no such dtype")
    dtype, shape = _DTYPES[item["dtype"]], _numbers(item["shape"])
    need(isinstance(item["pieces"], list), "pieces are not a list")
    pieces = []
    for one in item["pieces"]:
        need(
            isinstance(one, list) and len(one) == 4 and isinstance(one[0], str),
            "a piece does not have four parts",
        )
        piece = Piece(one[0], _numbers([one[1]])[0], _numbers(one[2]), _numbers(one[3]))
        need(piece.start % dtype.itemsize == 0, "a piece begins in the middle of a number")
        need(
            len(piece.offsets) == len(piece.sizes) == len(shape), "a piece has the wrong number of dimensions"
        )
        need(0 not in piece.sizes, "a piece is empty")
        ends = (o + n for o, n in zip(piece.offsets, piece.sizes, strict=True))
        need(
            all(end <= size for end, size in zip(ends, shape, strict=True)),
            "a piece extends beyond the tensor",
        )
        pieces.append(piece)
    need(
        sum(math.prod(piece.sizes) for piece in pieces) == math.prod(shape) < _LARGEST,
        "pieces do not cover the tensor",
    )
    need(not _overlapping(pieces), "pieces overlap")
    return Entry(dtype, shape, tuple(pieces))


def _overlapping(pieces: Sequence[Piece]) -> bool:
    """Whether any two pieces of a tensor share an element.

    The pieces are sorted by their first dimension. Each is compared only with the following pieces that begin before it
    ends.
    """
    ordered = sorted(pieces, key=lambda piece: piece.offsets)
    for number, one in enumerate(ordered):
        for other in ordered[number + 1 :]:
            if one.offsets and other.offsets[0] >= one.offsets[0] + one.sizes[0]:
                break
            if _common(one.offsets, one.sizes, other) is not None:
                return True
    return False


def _common(offsets: Sizes, sizes: Sizes, piece: Piece) -> list[tuple[int, int]] | None:
    """Return the elements that a box and a piece share, as a range for each dimension, or None if they share none."""
    spans = [
        (max(o, p), min(o + n, p + m))
        for o, n, p, m in zip(offsets, sizes, piece.offsets, piece.sizes, strict=True)
    ]
    return None if any(low >= high for low, high in spans) else spans


def read(folder: Path, index: Index, into: Mapping[str, Tensor]) -> None:
    """Read saved tensors, or this process's shards of them, from files. Each rank may call this on its own.

    Args:
        folder: The folder with the files.
        index: The positions of the saved tensors.
        into: The tensors to read into, by name. They must have the saved shapes.

    Raises:
        CheckpointError: A file is shorter than the index says.
    """
    wanted: dict[str, list[tuple[Piece, Entry, Tensor, Sizes, list[tuple[int, int]]]]] = {}
    for name, tensor in into.items():
        offsets, sizes = _torch.distributed.local_box(tensor)
        local = local_of(tensor)
        for piece in index[name].pieces:
            spans = _common(offsets, sizes, piece)
            if spans is not None:
                wanted.setdefault(piece.file, []).append((piece, index[name], local, offsets, spans))
    for file_name, jobs in wanted.items():
        with open(folder / file_name, "rb") as file:
            begin = 8 + min(int.from_bytes(file.read(8), "little"), _LARGEST)
            for piece, entry, local, offsets, spans in sorted(jobs, key=lambda job: job[0].start):
                # Whole rows are read, since a range of the first dimension is one range of bytes.
                low, high = spans[0] if spans else (0, 1)
                rows = (high - low, *piece.sizes[1:]) if spans else ()
                first = (low - piece.offsets[0]) * _bytes(entry.dtype, piece.sizes[1:]) if spans else 0
                data = torch.empty(_bytes(entry.dtype, rows), dtype=torch.uint8, device="cpu")
                file.seek(begin + piece.start + first)
                if file.readinto(data.numpy()) != data.numel():  # type: ignore[arg-type]
                    raise CheckpointError(f"{file_name} ends before its tensors do")
                values = (data.ne(0) if entry.dtype is torch.bool else data.view(entry.dtype)).view(rows)
                for dim, ((a, b), p) in enumerate(zip(spans[1:], piece.offsets[1:], strict=True), start=1):
                    values = values.narrow(dim, a - p, b - a)
                box = tuple(slice(a - o, b - o) for (a, b), o in zip(spans, offsets, strict=True))
                with torch.no_grad():
                    local[box].copy_(values)
