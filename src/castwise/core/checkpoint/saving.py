"""Write a checkpoint, so that it appears complete or not at all."""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from castwise.core.checkpoint import storage
from castwise.core.checkpoint.contents import collect, merge
from castwise.core.checkpoint.folder import Draft
from castwise.core.checkpoint.names import joined
from castwise.core.ranks import Ranks
from castwise.core.session import Amp
from castwise.errors import CheckpointError


class Saving:
    """The result of :func:`save`: a checkpoint that has been written or is being written in the background.

    Attributes:
        step: The number of the checkpoint.
        path: The path that the checkpoint has once it is complete.
    """

    def __init__(self, step: int, path: Path, future: Future[None]) -> None:
        self.step, self.path = step, path
        self._future = future
        self._seen = False

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` would return immediately.

        It may become true on one rank before it does on another. Ranks must therefore agree before they act on it.
        """
        return self._future.done()

    def wait(self) -> Path:
        """Wait until the checkpoint is complete on this rank, and return its path.

        The method runs no collective in the process groups that the training uses.

        Raises:
            CheckpointError: The checkpoint could not be written. The previous checkpoint is then still the newest.
        """
        self._seen = True
        self._future.result()
        return self.path

    def __repr__(self) -> str:
        return f"Saving(step={self.step}, path={str(self.path)!r}, done={self.done})"


_last: Saving | None = None
"""The last save. Only one save runs at a time: the next call of :func:`save`, ``newest`` or ``load`` waits for it."""


def settle() -> None:
    """Wait until a save in the background has ended, and warn if it has failed and the failure was not reported yet."""
    error = None if _last is None else _last._future.exception()
    if _last is not None and error is not None and not _last._seen:
        _last._seen = True
        warnings.warn(f"the checkpoint of step {_last.step} was not saved: {error}", stacklevel=3)


def save(
    folder: str | os.PathLike[str],
    step: int,
    *,
    model: nn.Module | Sequence[nn.Module],
    optimizers: Optimizer | Iterable[Optimizer] = (),
    amp: Amp,
    extra: Any = None,
    asynchronous: bool = False,
    keep: int | None = 2,
    process_group: Any = None,
) -> Saving:
    """Save a training run as the folder ``folder/step-00000123``, which appears complete or not at all.

    A checkpoint has the weights, the optimizer state, the loss scale and the states of the random generators. All
    ranks must call this function together, between two steps. Each rank writes its shards. Data that several ranks
    have in common (replicated weights, buffers) is written by the lowest of these ranks. A rank of a pipeline passes
    the part of the model that it has. If a step is saved again, the new checkpoint replaces the former checkpoint.

    Args:
        folder: A folder that only this training uses, on a file system that all ranks see. The first rank's process
            locks the folder until the process ends or saves into another folder.
        step: The number of the checkpoint, 0 or above.
        model: A model that ``amp`` prepared. It may be wrapped in DistributedDataParallel, ``torch.compile`` or
            FSDP2. If this rank has several stages of a pipeline, pass a list of them.
        optimizers: The optimizers that update the model, in the same order as for :func:`load`.
        amp: The :class:`castwise.Amp` that prepared the model.
        extra: Any other values to save: None, bool, int, float, str, tensors, and lists, tuples and dicts of these.
            The first rank's value is saved, but every rank must pass the tensors in it.
        asynchronous: Whether to return as soon as the tensors are copied to host memory, and write in the background.
            After the last save, call :meth:`Saving.wait` before the process ends.
        keep: The number of complete checkpoints to keep, including this checkpoint. Older ones are deleted.
            Checkpoints of later steps are not counted and stay. None keeps all.
        process_group: The ranks that save together. None stands for all ranks.

    Returns:
        A :class:`Saving`, whose ``wait()`` returns the path. If ``asynchronous`` is False, the checkpoint is already
        complete.

    Raises:
        CheckpointError: Something cannot be saved or written, or another process saves into the folder. The previous
            checkpoint is then still the newest.
    """
    global _last
    settle()
    ranks = Ranks(process_group, CheckpointError)
    ranks.meet(None)
    ranks.each(lambda: _check(step, keep, amp))
    draft = Draft(Path(folder).absolute(), step)
    contents = ranks.each(lambda: collect(joined(model), as_list(optimizers), amp, extra, ranks))
    index = storage.lay_out(contents.tensors, ranks)
    stage = ranks.each(lambda: storage.Stage(contents.tensors, index, ranks.rank, copied=asynchronous))
    values = {**merge(contents, ranks), "tensors": {name: entry.to_json() for name, entry in index.items()}}
    later = ranks.first(lambda: draft.begin(values))
    if later is not None and ranks.rank == 0:
        warnings.warn(
            f"save(step={step}): {later} is of a later step and stays the newest; delete it if training went back to an earlier step",
            stacklevel=2,
        )
    about = {
        "castwise": importlib.import_module("castwise").__version__,
        "torch": torch.__version__,
        "plan": str(amp.plan),
        "digest": amp.plan.digest,
        "world_size": ranks.size,
    }
    if asynchronous:
        future = _background().submit(finish, draft, stage, about, keep, ranks.duplicate("saving"))
    else:
        finish(draft, stage, about, keep, ranks)
        future = Future()
        future.set_result(None)
    saving = Saving(step, draft.path, future)
    _last = saving
    return saving


def as_list(optimizers: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """Return one or several optimizers as a list."""
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


def _check(step: int, keep: int | None, amp: Amp) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**18:
        raise CheckpointError(f"save(step={step!r}) is not allowed. Allowed: a whole number, 0 or above.")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise CheckpointError(
            f"save(keep={keep!r}) is not allowed. Allowed: a whole number, 1 or above, or None to keep all."
        )
    if not isinstance(amp, Amp):
        raise CheckpointError(
            f"save(amp={type(amp).__name__}) is not allowed. Allowed: the castwise.Amp that has prepared the model."
        )


@functools.cache
def _background() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="castwise-checkpoint")


def finish(draft: Draft, stage: storage.Stage, about: dict[str, Any], keep: int | None, ranks: Ranks) -> None:
    """Write the tensors, give the checkpoint its name, and delete older checkpoints. All ranks must call this.

    Raises:
        CheckpointError: The checkpoint could not be written and was removed. Or the checkpoint is complete, but the disk
            did not confirm its name, or an older checkpoint could not be deleted.
    """
    try:
        parts = ranks.every(lambda: stage.write(draft.partial))
        files = {name: measured for part in parts for name, measured in part.items()}
        ranks.first(lambda: draft.publish(about, files))
    except CheckpointError as error:
        ranks.first(draft.abandon)  # all ranks get here, or none
        raise draft.not_written(str(error)) from error
    for task, trouble in (
        (draft.confirm, "the disk has not confirmed the rename, which a power failure may undo"),
        (lambda: draft.prune(keep), "an earlier checkpoint could not be deleted"),
    ):
        try:
            ranks.first(task)
        except CheckpointError as error:
            raise CheckpointError(
                f"save(step={draft.step}): {draft.path} is complete, but {trouble}: {error}"
            ) from error
