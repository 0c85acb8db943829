"""Tensors to files and back, by torch.distributed.checkpoint."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from castwise.checkpoint.ranks import Ranks
from castwise.errors import CheckpointError

__all__ = ["read", "read_metadata", "start_writing", "write"]

METADATA = ".metadata"
"""DCP's own file about the tensors."""


def write(tensors: Mapping[str, Tensor], folder: Path, ranks: Ranks) -> None:
    """Write tensors, each rank its own shards; what several ranks hold is written by the lowest.

    Args:
        tensors: By name, of which the part before the first dot is the name of a group.
        folder: A new folder.
        ranks: Those that write; all of them call this.
    """
    writer = FileSystemWriter(folder)
    if ranks.alone:
        _write_alone(_nested(tensors), writer)
    else:
        dcp_save(_nested(tensors), storage_writer=writer, planner=_save_planner(), process_group=ranks.group)


def start_writing(tensors: Mapping[str, Tensor], folder: Path, ranks: Ranks) -> Callable[[], Any]:
    """Copy tensors to host memory and write them in the background.

    Args:
        tensors: As for :func:`write`; they may change as soon as this returns.
        folder: A new folder.
        ranks: Those that write; their group does nothing else until the writing is over.

    Returns:
        What waits for the writing and raises its errors; call it in a thread.
    """
    writer = FileSystemWriter(folder)
    if ranks.alone:
        # async_save warns, in its thread, that there is no process group.
        return functools.partial(_write_alone, writer.stage(_nested(tensors)), writer)
    future: Any = async_save(
        _nested(tensors), storage_writer=writer, planner=_save_planner(), process_group=ranks.group
    )
    return future.result  # type: ignore[no-any-return]


def _save_planner() -> DefaultSavePlanner:
    # The buffers of a replicated model differ between ranks, and torch's DDP goes by those of the first; by default
    # DCP would take some of one rank and some of another, by size.
    return DefaultSavePlanner(dedup_save_to_lowest_rank=True)


def _nested(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """By group, so that DCP's own tools see ``{"model": {...}, "optimizer": {...}}``."""
    out: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        group, _, rest = name.partition(".")
        out.setdefault(group, {})[rest] = tensor
    return out


def _write_alone(state: dict[str, Any], writer: FileSystemWriter) -> None:
    """``dcp.save`` for one process, without its warning that there is only one."""
    planner = _save_planner()
    planner.set_up_planner(state, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    results = writer.write_data(plan, planner)
    results.wait()
    writer.finish(metadata, [results.value()])


def read_metadata(folder: Path) -> Metadata:
    """DCP's description of the tensors in a folder, read without running what a pickle may hold.

    Raises:
        CheckpointError: It cannot be read, or names anything but DCP's own types.
    """
    try:
        return _Reader(folder).read_metadata()
    except (OSError, EOFError, AttributeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{folder / METADATA}: not DCP's metadata: {error}") from error


def read(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Read tensors, or the shards that this process holds of them. Not a collective.

    Args:
        folder: Where :func:`write` has written.
        into: Tensors of the sizes saved, by name; written to.
    """
    if not into:
        return
    reader = _Reader(folder)
    metadata = reader.read_metadata()
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(into), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, True)
    plan: LoadPlan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    with torch.no_grad():
        reader.read_data(plan, planner).wait()


class _Reader(FileSystemReader):
    """DCP's reader, with metadata that only DCP's own types are made from."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with Path(self.path, METADATA).open("rb") as file:
            found = _Unpickler(file).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"holds a {type(found).__name__}")
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _Unpickler(pickle.Unpickler):
    """Knows the types that DCP writes, and nothing else."""

    _ALLOWED = frozenset({
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
    })  # fmt: skip

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)

    def find_class(self, module: str, name: str) -> Any:
        of_dcp = (
            module == dcp_metadata.__name__ == getattr(getattr(dcp_metadata, name, None), "__module__", "")
        )
        a_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if of_dcp or a_dtype or (module, name) in self._ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"names {module}.{name}, which DCP does not write")
