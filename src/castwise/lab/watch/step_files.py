"""Write and read records of single training steps on disk, each in a folder that is complete or absent.

A record is written like a checkpoint (:mod:`castwise.checkpoint.folder`), into a hidden folder that is renamed at the end.
Tensors are stored as plain bytes and everything else as JSON, without pickle, and each file has its crc32. The record includes
the weights. Each rank writes its own shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from castwise.core.checkpoint import storage
from castwise.core.checkpoint.folder import (
    VALUES,
    Draft,
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


def write(
    folder: Path,
    step: int,
    content: Mapping[str, Any],
    weights: Mapping[str, Any],
    about: Mapping[str, Any],
    group: Any = ALONE,
) -> Path:
    """Write a record as ``folder/step-00000123``. All ranks must call this together.

    An existing record of the same step is replaced.

    Args:
        folder: The folder of records, which is created if needed; equal on all ranks.
        step: Number of the record.
        content: Nested values of this rank, of types that :func:`castwise.checkpoint.tree.encode` accepts.
        weights: Weights by name, as in a checkpoint. Of a DTensor, this rank's shard is written. Replicated values are taken
            from the lowest rank that provides any.
        about: Entries for the manifest: ``castwise``, ``torch``, ``plan``, ``digest``.
        group: The ranks that write the record, as for :class:`~castwise.ranks.Ranks`.

    Raises:
        CheckpointError: A value cannot be written, or the disk is full. Nothing of the record remains then.
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
        own = encode(dict(content), f"rank.{ranks.rank}", tensors)
        return own, encode(dict(weights), "weights", tensors)

    parts = ranks.to_first(ranks.each(trees))
    index = storage.lay_out(tensors, ranks)
    stage = ranks.each(lambda: storage.Stage(tensors, index, ranks.rank, copied=False))
    values = {
        "ranks": [own for own, _ in parts],
        "weights": parts[giver][1] if parts else {},
        "tensors": {name: entry.to_json() for name, entry in index.items()},
    }
    ranks.first(lambda: draft.begin(values))

    try:
        finish(draft, stage, {**about, "world_size": ranks.size}, None, ranks)
    except BaseException:
        if ranks.rank == 0:
            draft.abandon()
        raise
    return draft.path


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """Read a record from any source, check all of it, and execute nothing.

    Returns:
        The manifest, the content of each rank, and the weights.

    Raises:
        CheckpointError: The record is damaged or incomplete, or it is not a record.
    """
    manifest = read_manifest(path)
    reason = manifest if isinstance(manifest, str) else wrong_files(path, sorted(manifest["files"].items()))
    if isinstance(manifest, str) or reason:
        raise CheckpointError(f"replay({str(path)!r}): {reason}. Allowed: a record that a Recorder wrote.")
    try:
        found = read_values(path, manifest)
        need(
            isinstance(found, dict) and found.keys() == {"ranks", "weights", "tensors"},
            "ranks, weights or tensors are missing",
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
            and all(isinstance(own, dict) for own in contents),
            "the content of a rank or the weights are missing",
        )
    except (ValueError, OSError) as error:  # CheckpointError is one of these
        raise CheckpointError(
            f"replay({str(path)!r}): the record is damaged, or this is not a record: {error}"
        ) from None
    return dict(manifest), contents, weights
