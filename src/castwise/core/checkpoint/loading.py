"""Find the newest checkpoint, and load a checkpoint under the plan and layout of ranks of the save or under others."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from castwise.core.checkpoint.folder import LOOKS, Skipped, is_being_saved, look, read_manifest, wrong_files
from castwise.core.checkpoint.names import joined
from castwise.core.checkpoint.restore import Restore
from castwise.core.checkpoint.saving import as_list, settle
from castwise.core.ranks import Ranks
from castwise.core.session import Amp
from castwise.errors import CheckpointError


@dataclass(frozen=True)
class Found:
    """The result of :func:`newest`. It is false in an ``if`` statement when no complete checkpoint was found.

    Attributes:
        path: The path of the checkpoint. None if no checkpoint was found.
        step: The number of the checkpoint. -1 if no checkpoint was found.
        skipped: The folders of later steps that were skipped, and why. They are incomplete, or not checkpoints.
        manifest: The contents of the checkpoint's manifest: plan, world size, versions, files.
    """

    path: Path | None = None
    step: int = -1
    skipped: tuple[Skipped, ...] = ()
    manifest: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __bool__(self) -> bool:
        return self.path is not None


@dataclass(frozen=True)
class Loaded:
    """The result of :func:`load`.

    Attributes:
        path: The path of the checkpoint.
        step: The number of the checkpoint.
        extra: The value that was passed to :func:`save` as ``extra``. Its tensors are on the CPU.
        plan: The plan under which the checkpoint was saved, in its one-line text form.
        world_size: The number of ranks that saved the checkpoint.
        random_state: Whether the random generators continue from the saved states. They do if as many ranks load as
            saved.
        skipped: The same as in :class:`Found`. Empty if :func:`load` was called with a path.
    """

    path: Path
    step: int
    extra: Any
    plan: str
    world_size: int
    random_state: bool
    skipped: tuple[Skipped, ...] = ()


def newest(folder: str | os.PathLike[str], *, checksums: bool = True, process_group: Any = None) -> Found:
    """Find the newest complete checkpoint of a folder.

    All ranks get the same result. If this process is saving a checkpoint, the call waits until the save has ended. If
    another process saves meanwhile, the result was the newest checkpoint at some moment during the call. A checkpoint
    that is not finished yet is skipped without a warning.

    Args:
        folder: The ``folder`` that was passed to :func:`save`. It need not exist.
        checksums: Whether to compare the crc32 of every file. The ranks share this work and read the checkpoint once,
            at 1 to 4 GB/s per rank if the disk is as fast. If False, only sizes are compared, without reading the
            files.
        process_group: The ranks that search together. None stands for all ranks.

    Returns:
        The checkpoint, which :func:`load` accepts. It is false in an ``if`` statement when no complete checkpoint was
        found. Its attribute ``skipped`` lists the skipped folders.

    Warns:
        UserWarning: A folder was skipped. The first rank gives a warning for each such folder.
    """
    settle()
    ranks = Ranks(process_group, CheckpointError)
    ranks.meet(None)
    for _ in range(LOOKS):
        skipped: list[Skipped] = []
        unfinished: set[Path] = set()
        found = Found()
        listed = ranks.first(lambda: look(Path(folder)))
        for step, path, _ in listed:
            manifest = _verified(path, ranks, checksums)
            if isinstance(manifest, dict):
                found = Found(path, step, tuple(skipped), manifest)
                break
            skipped.append(Skipped(path, manifest))
            if is_being_saved(path):
                unfinished.add(path)
        if ranks.first(functools.partial(_is_as_it_was, Path(folder), listed, len(skipped), found)):
            break
    if ranks.rank == 0:
        for passed in skipped:
            if passed.path not in unfinished:
                warnings.warn(
                    f"newest({os.fspath(folder)!r}): skipped {passed.path.name}: {passed.reason}",
                    stacklevel=2,
                )
    return found if found else Found(skipped=tuple(skipped))


def _is_as_it_was(folder: Path, listed: Sequence[Any], passed_over: int, found: Found) -> bool:
    """Whether the folder that :func:`newest` searched is unchanged since then, so that its result still holds.

    Args:
        folder: The folder, which need not exist.
        listed: What :func:`look` returned before the search.
        passed_over: How many entries of ``listed`` were skipped.
        found: The result of the search.
    """
    now = look(folder)
    return all(one in now for one in listed[: passed_over + 1]) if found else now == listed


def _verified(path: Path, ranks: Ranks, checksums: bool) -> dict[str, Any] | str:
    manifest = ranks.first(lambda: read_manifest(path))
    if isinstance(manifest, str):
        return manifest
    files = sorted(manifest["files"].items())
    reasons = ranks.every(lambda: wrong_files(path, files[ranks.rank :: ranks.size], checksums=checksums))
    return next((reason for reason in reasons if reason is not None), manifest)


def load(
    checkpoint: str | os.PathLike[str] | Found,
    *,
    model: nn.Module | Sequence[nn.Module],
    optimizers: Optimizer | Iterable[Optimizer] = (),
    amp: Amp,
    accept: Callable[[Any], None] | None = None,
    process_group: Any = None,
) -> Loaded:
    """Restore a training run from a checkpoint: weights, optimizer state, loss scale and random generators.

    All ranks must call this function together, after ``prepare``. With the plan and the layout over ranks of the
    save, training resumes bit for bit. Under another plan, the saved fp32 weights become the weights, or the fp32
    master weights if the plan stores weights in bf16 or fp16 and keeps an fp32 copy for the optimizer. The loss scale
    is kept if both plans have a loss scale. Under another layout, each rank reads the parts that it needs.

    Loading executes no code from the checkpoint, so its source need not be trusted. All ranks check the whole
    checkpoint before anything is changed. If a module or an optimizer still refuses something, the load is undone on
    all ranks.

    During the load, weights and optimizer state take twice their memory on the device. Copies of the former weights
    take host memory, as does the state of optimizers with custom loading code.

    Saved options that a torch optimizer does not have are refused. If another version of torch saved them, they are
    left out.

    Args:
        checkpoint: The result of :func:`newest`, or the path of a checkpoint, which is verified first.
        model: The prepared model, as for :func:`save`.
        optimizers: The optimizers, as for :func:`save`. Without optimizers, saved optimizer state is ignored. The
            options that select a kernel (``fused``, ``foreach``) are not loaded.
        amp: The :class:`castwise.Amp` that prepared the model.
        accept: A function that is called with the saved ``extra`` before anything is changed. It can refuse the
            checkpoint by raising an exception.
        process_group: The ranks that load together. None stands for all ranks.

    Returns:
        The checkpoint's path, step and plan, and its ``extra``.

    Raises:
        CheckpointError: The checkpoint is damaged, is not accepted, or does not fit. If it does not fit, the message
            names all differences.
    """
    settle()
    ranks = Ranks(process_group, CheckpointError)
    found = checkpoint if isinstance(checkpoint, Found) else Found(Path(checkpoint))
    path = found.path
    if path is None:
        raise CheckpointError(
            "load: newest(folder) found no complete checkpoint; call load only if the result of newest is true, and otherwise train from the start"
        )
    # newest() has compared all contents, so here the sizes suffice to detect files that changed since.
    manifest = _verified(path, ranks, checksums=not isinstance(checkpoint, Found))
    if isinstance(manifest, str):
        raise CheckpointError(
            f"load({str(path)!r}): {manifest}. Allowed: a complete checkpoint, such as newest(folder) finds."
        )
    restore = ranks.each(lambda: Restore(path, manifest, joined(model), as_list(optimizers), amp, ranks))
    restore.check(ranks)
    try:
        ranks.each(restore.read)
        extra = ranks.each(restore.extra)
        if accept is not None:
            ranks.each(lambda: accept(extra))
        ranks.each(restore.apply)
    except BaseException as error:
        restore.undo()
        if not isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"load({str(path)!r}): nothing was changed: {' '.join(str(error).split())}"
        ) from error
    return Loaded(
        path=path,
        step=manifest["step"],
        extra=extra,
        plan=manifest["plan"],
        world_size=manifest["world_size"],
        random_state=restore.same_ranks,
        skipped=found.skipped,
    )
