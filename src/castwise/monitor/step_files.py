"""Records of single steps on disk, each in a folder that is whole or not there.

A record is written as a checkpoint is (:mod:`castwise.checkpoint.folder`): into a hidden folder that gets its name at the
end, tensors as plain bytes, all else as JSON, each file with its crc32, nothing a pickle. Where the weights are large and a
checkpoint of them exists, the record holds hard links to the checkpoint's files, so that deleting the checkpoint takes
nothing from it, and of the weights only what differs.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from castwise.checkpoint import storage, values
from castwise.checkpoint.folder import (
    MANIFEST,
    VALUES,
    Draft,
    candidates,
    read_manifest,
    read_values,
    wrong_files,
)
from castwise.checkpoint.saving import finish
from castwise.checkpoint.storage import need
from castwise.checkpoint.tree import check, decode, encode
from castwise.errors import CheckpointError
from castwise.ranks import ALONE, Ranks
from castwise.ranks.pieces import is_dtensor

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
        for _, path in candidates(folder):
            manifest = read_manifest(path)
            if isinstance(manifest, dict) and not wrong_files(
                path, manifest["files"].items(), checksums=False
            ):
                return cls.at(path, manifest)
        return None

    @classmethod
    def at(cls, path: Path, manifest: Mapping[str, Any]) -> Base:
        """A checkpoint that was found to be one."""
        return cls(path, manifest, values.read(path, manifest))

    def read(self, name: str, like: torch.Size | None = None) -> Tensor | None:
        """A tensor of the model as it was saved; None where there is none of that name, or of that shape."""
        entry = self.saved.tensors.get(f"model.{name}")
        if entry is None or (like is not None and tuple(like) != tuple(entry.shape)):
            return None
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
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
        base: A checkpoint that the weights may be told by, unless they are DTensors.
        group: The ranks whose record it is, as for :class:`~castwise.ranks.Ranks`.

    Raises:
        CheckpointError: A value that cannot be written, or a disk that takes no more; nothing is left of it then.
    """
    draft = Draft(folder.absolute(), step)
    ranks = Ranks(group, CheckpointError)
    cut = any(isinstance(value, Tensor) and is_dtensor(value) for value in weights.values())
    givers = [at for at, gives in enumerate(ranks.gather(bool(weights))) if gives]
    if not cut and givers and ranks.rank != givers[0]:
        weights, base = {}, None
    tensors: dict[str, Tensor] = {}

    def trees() -> tuple[Any, Any]:
        kept = (
            weights if base is None else {name: _told(name, value, base) for name, value in weights.items()}
        )
        return encode(dict(content), f"rank.{ranks.rank}", tensors), encode(dict(kept), "weights", tensors)

    parts = ranks.to_first(ranks.each(trees))
    index = storage.lay_out(tensors, ranks)
    stage = ranks.each(lambda: storage.Stage(tensors, index, ranks.rank, copied=False))
    first = parts[0 if cut or not givers else givers[0]] if parts else ([], [])
    values = {
        "ranks": [own for own, _ in parts],
        "weights": first[1],
        "tensors": {name: entry.to_json() for name, entry in index.items()},
    }
    ranks.first(lambda: draft.begin(values))

    def link() -> None:
        try:
            if base is not None:
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


def _told(name: str, value: Any, base: Base) -> Any:
    """A weight by what a checkpoint has of it, where that takes less than the weight."""
    was = base.read(name, value.shape) if isinstance(value, Tensor) and value.numel() else None
    if was is None or was.dtype is not value.dtype:
        return value
    if np.array_equal(_bytes(value), _bytes(was)):
        return ("base", name)
    packed = difference(value, was)
    return ("difference", name, packed) if packed.nbytes < 0.9 * was.nbytes else value


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
        tensors = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in index.items()}
        storage.read(path, index, tensors)
        contents, weights = (decode(found[part], tensors.__getitem__) for part in ("ranks", "weights"))
        need(
            isinstance(contents, list)
            and len(contents) == manifest["world_size"]
            and all(isinstance(part, dict) for part in (*contents, weights)),
            "not of content and weights",
        )
        base = _base_of(path) if any(map(_is_told, weights.values())) else None
        weights = {name: _whole(value, base) for name, value in weights.items()}
    except (ValueError, OSError) as error:  # CheckpointError among them
        raise CheckpointError(f"replay({str(path)!r}): it is damaged, or no record: {error}") from None
    return dict(manifest), contents, weights


def _is_told(value: Any) -> bool:
    return isinstance(value, tuple)


def _base_of(path: Path) -> Base:
    manifest = read_manifest(path / BASE)
    wrong = manifest if isinstance(manifest, str) else wrong_files(path / BASE, manifest["files"].items())
    if isinstance(manifest, str) or wrong:
        raise ValueError(f"the checkpoint that it counts on {wrong}")
    return Base.at(path / BASE, manifest)


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
