"""Records of single steps on disk, each in a folder that is whole or not there.

A record is written as a checkpoint is (:mod:`castwise.checkpoint.folder`): into a hidden folder that gets its name at the
end, tensors as plain bytes, all else as JSON, each file with its crc32, nothing a pickle. Where the weights are large and a
checkpoint of them exists, the record holds hard links to the checkpoint's files, so that deleting the checkpoint takes
nothing from it, and of the weights only what differs; of weights in shards each rank writes what differs in its own.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from castwise.core import _torch
from castwise.core.checkpoint import storage, values
from castwise.core.checkpoint.folder import (
    LOOKS,
    MANIFEST,
    VALUES,
    Draft,
    look,
    read_manifest,
    read_values,
    wrong_files,
)
from castwise.core.checkpoint.saving import finish
from castwise.core.checkpoint.storage import need
from castwise.core.checkpoint.tree import check, decode, encode
from castwise.core.ranks import ALONE, Ranks
from castwise.core.ranks.pieces import is_dtensor
from castwise.errors import CheckpointError

BASE = "base"
"""Folder in a record of the checkpoint that it counts on."""


@dataclass(frozen=True)
class Base:
    """A complete checkpoint, and the bytes of a model's tensors in it."""

    path: Path
    manifest: Mapping[str, Any]
    saved: values.Values

    @classmethod
    def newest(cls, folder: Path) -> Base | None:
        """The newest checkpoint of a folder whose files have the sizes that they should; None where there is none."""
        for _ in range(LOOKS):
            listed = look(folder)
            for _, path, _ in listed:
                manifest = read_manifest(path)
                if isinstance(manifest, dict) and not wrong_files(
                    path, manifest["files"].items(), checksums=False
                ):
                    with contextlib.suppress(CheckpointError):  # a save may have deleted it since
                        return cls.at(path)
            if look(folder) == listed:
                break
        return None

    @classmethod
    def at(cls, path: Path) -> Base:
        """A checkpoint that was found to be one.

        Raises:
            CheckpointError: It is none any more.
        """
        manifest = read_manifest(path)
        if isinstance(manifest, str):
            raise CheckpointError(f"the checkpoint {path} {manifest}")
        return cls(path, manifest, values.read(path, manifest))

    def read(self, name: str, like: Tensor | None = None) -> Tensor | None:
        """A tensor of the model as it was saved; None where there is none of that name, or none like a given one.

        Like a DTensor it is cut as that one is, and of it this rank's piece is read.
        """
        entry = self.saved.tensors.get(f"model.{name}")
        if entry is None:
            return None
        if like is not None and (tuple(like.shape) != tuple(entry.shape) or like.dtype is not entry.dtype):
            return None
        if like is not None and is_dtensor(like):
            tensor = torch.empty_like(like.detach())
        else:
            tensor = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        storage.read(self.path, self.saved.tensors, {f"model.{name}": tensor})
        return tensor

    def link(self, folder: Path) -> None:
        """Have the checkpoint's files under a second name, which takes no space.

        Raises:
            OSError: Another file system, or one without hard links.
        """
        folder.mkdir()
        for name in (MANIFEST, *self.manifest["files"]):
            os.link(self.path / name, folder / name)


def _bytes(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A copy of a tensor's bytes: ``[elements, bytes of an element]``."""
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().reshape(-1, plain.element_size()).copy()


def difference(tensor: Tensor, base: Tensor) -> Tensor:
    """What makes a tensor of another of its shape and dtype, exactly: the bytes that differ, packed.

    Sign, exponent and the first bits of a weight seldom change from one checkpoint to the next; bytes of one place stand
    together, where they pack well.
    """
    changed = (_bytes(tensor) ^ _bytes(base)).T.copy()
    return torch.frombuffer(bytearray(zlib.compress(changed.tobytes(), 1)), dtype=torch.uint8)


def restored(packed: Tensor, base: Tensor) -> Tensor:
    """Undo :func:`difference`.

    Raises:
        ValueError: It is not one for a tensor of this size.
    """
    try:
        # no more than is wanted is unpacked: a small file may claim to hold a large one
        data = zlib.decompressobj().decompress(packed.numpy().tobytes(), base.nbytes + 1)
    except zlib.error as error:
        raise ValueError(f"a difference is damaged: {error}") from None
    if len(data) != base.nbytes:
        raise ValueError("a difference is of another size")
    changed = np.frombuffer(data, dtype=np.uint8).reshape(base.element_size(), -1).T
    whole = torch.from_numpy(_bytes(base) ^ changed).reshape(-1)
    return whole.view(base.dtype).reshape(base.shape)


def write(
    folder: Path,
    step: int,
    content: Mapping[str, Any],
    weights: Mapping[str, Any],
    about: Mapping[str, Any],
    base: Base | None = None,
    group: Any = ALONE,
) -> Path:
    """Write a record as ``folder/step-00000123``; one that is there of that step is replaced. A collective of the group.

    Args:
        folder: Made where there is none; the same on all ranks.
        step: Number of the record.
        content: Nested values that :func:`castwise.checkpoint.tree.encode` takes, of this rank.
        weights: By name, as a checkpoint has them; of a DTensor this rank's piece is written. What all ranks hold whole is
            taken from the lowest that gives any.
        about: For the manifest: ``castwise``, ``torch``, ``plan``, ``digest``.
        base: A checkpoint that the weights may be told by, the same on all ranks.
        group: The ranks whose record it is, as for :class:`~castwise.ranks.Ranks`.

    Raises:
        CheckpointError: A value that cannot be written, or a disk that takes no more; nothing is left of it then.
    """
    draft = Draft(folder.absolute(), step)
    ranks = Ranks(group, CheckpointError)
    giver = next((at for at, gives in enumerate(ranks.gather(bool(weights))) if gives), 0)
    if ranks.rank != giver:
        weights = {
            name: value for name, value in weights.items() if isinstance(value, Tensor) and is_dtensor(value)
        }
    tensors: dict[str, Tensor] = {}

    def trees() -> tuple[Any, Any]:
        kept = dict(weights)
        pieces: dict[str, Any] = {}
        for name, value in weights.items():
            was = base.read(name, value) if base is not None and isinstance(value, Tensor) else None
            if was is not None and value.numel():
                kept[name], piece = _told(name, value, was)
                pieces |= {} if piece is None else {name: piece}
        own = encode({"content": dict(content), "pieces": pieces}, f"rank.{ranks.rank}", tensors)
        return own, encode(kept, "weights", tensors)

    parts = ranks.to_first(ranks.each(trees))
    index = storage.lay_out(tensors, ranks)
    stage = ranks.each(lambda: storage.Stage(tensors, index, ranks.rank, copied=False))
    values = {
        "ranks": [own for own, _ in parts],
        "weights": parts[giver][1] if parts else {},
        "tensors": {name: entry.to_json() for name, entry in index.items()},
    }
    ranks.first(lambda: draft.begin(values))

    def link() -> None:
        try:
            if base is not None and ranks.rank == 0:
                base.link(draft.partial / BASE)
        except OSError as error:
            raise draft.not_written(f"{type(error).__name__}: {error}") from error

    try:
        ranks.each(link)
        finish(draft, stage, {**about, "world_size": ranks.size}, None, ranks)
    except BaseException:
        if ranks.rank == 0:
            draft.abandon()
        raise
    return draft.path


def _told(name: str, value: Tensor, was: Tensor) -> tuple[Any, Any]:
    """A weight by what a checkpoint has of it, where that takes less than the weight; and, of a DTensor, this rank's piece."""
    here, there = storage.local_of(value), storage.local_of(was)
    same = np.array_equal(_bytes(here), _bytes(there))
    if is_dtensor(value):
        return ("base", name), None if same else (*_torch.local_box(value), difference(here, there))
    if same:
        return ("base", name), None
    packed = difference(here, there)
    return ("difference", name, packed) if packed.nbytes < 0.9 * there.nbytes else value, None


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """A record, whoever wrote it: manifest, content by rank, and weights. All of it is checked, and nothing is executed.

    Raises:
        CheckpointError: It is damaged, unfinished, or no record.
    """
    manifest = read_manifest(path)
    reason = manifest if isinstance(manifest, str) else wrong_files(path, sorted(manifest["files"].items()))
    if isinstance(manifest, str) or reason:
        raise CheckpointError(f"replay({str(path)!r}): {reason}. Allowed: a record that a Recorder wrote.")
    try:
        found = read_values(path, manifest)
        need(
            isinstance(found, dict) and found.keys() == {"ranks", "weights", "tensors"},
            "not of a record's parts",
        )
        sizes = {name: about["size"] for name, about in manifest["files"].items() if name != VALUES}
        index = storage.read_index(found["tensors"], sizes)
        check([found["ranks"], found["weights"]], index)
        tensors = {
            name: torch.empty(entry.shape, dtype=entry.dtype, device="cpu") for name, entry in index.items()
        }
        storage.read(path, index, tensors)
        contents, weights = (decode(found[part], tensors.__getitem__) for part in ("ranks", "weights"))
        need(
            isinstance(contents, list)
            and len(contents) == manifest["world_size"]
            and isinstance(weights, dict)
            and all(isinstance(own, dict) and own.keys() == {"content", "pieces"} for own in contents)
            and all(isinstance(part, dict) for own in contents for part in own.values()),
            "not of content and weights",
        )
        base = _base_of(path) if any(map(_is_told, weights.values())) else None
        weights = {name: _whole(value, base) for name, value in weights.items()}
        for own in contents:
            for name, piece in own["pieces"].items():
                _put(weights.get(name), piece)
    except (ValueError, OSError) as error:  # CheckpointError among them
        raise CheckpointError(f"replay({str(path)!r}): it is damaged, or no record: {error}") from None
    return dict(manifest), [own["content"] for own in contents], weights


def _is_told(value: Any) -> bool:
    return isinstance(value, tuple)


def _base_of(path: Path) -> Base:
    manifest = read_manifest(path / BASE)
    wrong = manifest if isinstance(manifest, str) else wrong_files(path / BASE, manifest["files"].items())
    if isinstance(manifest, str) or wrong:
        raise ValueError(f"the checkpoint that it counts on {wrong}")
    return Base.at(path / BASE)


def _whole(value: Any, base: Base | None) -> Any:
    if not _is_told(value):
        return value
    need(
        base is not None
        and len(value) == (3 if value[0] == "difference" else 2)
        and value[0] in ("base", "difference")
        and isinstance(value[1], str),
        "a weight is told in no known way",
    )
    assert base is not None
    was = base.read(value[1])
    if was is None:
        raise ValueError(f"the checkpoint that it counts on has no {value[1]!r}")
    return was if value[0] == "base" else restored(value[2], was)


def _put(whole: Any, piece: Any) -> None:
    """Make one rank's piece of a checkpoint's weight what it was."""
    need(
        isinstance(whole, Tensor)
        and isinstance(piece, tuple)
        and len(piece) == 3
        and all(isinstance(part, tuple) and len(part) == whole.dim() for part in piece[:2])
        and all(type(n) is int and n >= 0 for part in piece[:2] for n in part)
        and all(o + n <= size for o, n, size in zip(*piece[:2], whole.shape, strict=True))
        and isinstance(piece[2], Tensor),
        "a piece of a weight is none",
    )
    offsets, sizes, packed = piece
    box = whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
    box.copy_(restored(packed, box))
