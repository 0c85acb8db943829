"""``tune``: finds by experiment the fastest plan that keeps the numerics."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from castwise.commands.jobs import Event, Progress, heard, make_folder
from castwise.commands.jobs.tune_result import TuneResult
from castwise.core.casting import default_device_type
from castwise.core.model.arrival import widen_for
from castwise.core.session.process import find_device
from castwise.errors import WorkloadError
from castwise.lab.parity.batches import endless
from castwise.lab.parity.parity import device_of
from castwise.lab.passes.isolation import copied, unspoilt
from castwise.lab.result import finite
from castwise.lab.search import index
from castwise.lab.search.axes import FORMATS
from castwise.lab.search.context import Context, Journal, Say, Settings
from castwise.lab.search.record import evidence
from castwise.lab.search.search import run
from castwise.lab.search.state import Search
from castwise.lab.timing.ranks import lockstep
from castwise.lab.workloads.workload import Workload, find_workload, users_code

__all__ = ["TuneResult", "tune"]


def tune(
    workload: Workload | str | None = None,
    *,
    model: nn.Module | None = None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    batches: Any = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    formats: Sequence[str] = FORMATS,
    goal: str = "time",
    accumulate: int = 1,
    world_size: int | None = None,
    compile: str | bool = "never",
    warmup_steps: int = 0,
    verify_steps: int = 0,
    verify_seeds: int = 8,
    budget_s: float = 170.0,
    memory: bool = True,
    device: torch.device | str | None = None,
    seed: int = 0,
    fresh: bool = False,
    out: str | os.PathLike[str] | None = None,
    progress: Progress | bool | None = None,
) -> TuneResult:
    """Find the fastest precision plan whose gradients match fp32's within the noise of the data.

    Give a workload, or a model, a loss, batches and an optimizer. Everything runs on copies: when it returns or fails,
    the model, random states and process-wide settings are unchanged, and training continues as without it.

    If torch.distributed is initialised, call it on every rank with the same arguments: all ranks search in lockstep, on
    the same batches (no seed per rank is needed), and get the same plan. All ranks measure at the same time; the
    slowest time, the largest peak and the worst damage count. A candidate that fails on one rank fails on all. Only
    rank 0 reports progress and writes ``out``.

    Args:
        workload: A workload, or its name: ``gpt``, ``file.py:attribute``.
        model: Instead of a workload: a module in any state of training. If it is partly or wholly stored in bf16 or
            fp16, it is widened to the fp32 baseline, and the model as given gets its own row.
        loss: ``loss(model, batch)`` -> scalar tensor; it must call the model that it is given.
        batches: A sequence, a re-iterable such as a DataLoader, or ``batches(seed)`` -> iterator.
        optimizer: ``optimizer(params)`` -> Optimizer; its step is timed too.
        formats: Formats the plan may use: ``fp32``, ``tf32``, ``bf16``, ``fp16``; formats that the device lacks are
            left out.
        goal: ``time``: the fastest sound plan. ``memory``: the sound plan with the smallest peak. ``numerics``: for the
            one low format given, the plan with the fewest regions in fp32, whatever its speed here.
        accumulate: Microbatches accumulated per update.
        world_size: Number of data-parallel ranks that average gradients; by default the number of calling ranks.
        compile: Whether the plan may compile the model: ``never`` (or False); ``auto``: if that is faster; ``always``
            (or True): the best finalist that compiles. Finalists are compiled in separate processes, as far as the
            budget allows. Numerics are tested uncompiled first; compiled gradients are then compared with the
            uncompiled ones.
        warmup_steps: Number of fp32 steps before the numerics are tested a second time; 0 for no second test.
        verify_steps: Number of steps of the final training runs that compare the plan with fp32; 0 for none.
        verify_seeds: Number of pairs of such runs, at least 2; about 20 show small differences.
        budget_s: Approximate time limit in seconds; work that does not fit is left out, and the evidence says so.
        memory: Measure peak memory too (one process per plan).
        device: By default the model's device, or for a workload the available accelerator, else the CPU.
        seed: Seed of weights, data, dither and random draws.
        fresh: Search even if an earlier search had the same model, optimizer, loss, data, code, device and versions.
            Otherwise the evidence of that search is returned at once, marked as such, unless it had a smaller budget
            and left something open for that reason. A plan found on another device, with other versions, with other
            code or with a smaller budget becomes a candidate from the start. Results are kept in the user's cache
            folder, or in ``CASTWISE_CACHE_DIR``; an empty value turns the cache off.
        out: Folder for the files of ``.save(folder)``, created at once. They are written at the end, or when the search
            is interrupted or fails after its first stage, as on the command line.
        progress: True shows the command line's progress on standard error; a function is called with events.

    Returns:
        The result: ``.plan``, ``.answer``, ``.table()``, ``.save(folder)``, and ``.files``, the files written to
        ``out``.

    Raises:
        PlanError: An argument is out of range, or ``out`` cannot be written to.
        Exception: ``progress`` raised it.
        WorkloadError: The workload cannot be found or tuned: the loss has no gradient, or the batches are unusable.
        NonFiniteError: fp32 itself gives a non-finite loss or gradients.
        StateError: The budget is too small for any result, ranks differ, or a rank has left.
        RankError: Work that every plan needs failed on some ranks.
        DeviceError: The device does not exist.

    Source: docs/tuning.md.
    """
    with (
        lockstep("tune") as ranks,
        heard(progress, stages=True) as tell,
        contextlib.ExitStack() as at_end,
    ):
        if world_size is None:
            world_size = ranks.size
        if goal == "numerics" and tuple(formats) == FORMATS:
            formats = ("bf16",)
        settings = Settings(
            formats, goal, accumulate, world_size, compile, warmup_steps, verify_steps, verify_seeds, budget_s,
            memory, seed,
        )  # fmt: skip
        found, spec, where = _workload(workload, model, loss, batches, optimizer, device)
        ranks.alike("tune", **dataclasses.asdict(settings), workload=found.name, device=where.type)
        folder = None if out is None or ranks.rank else Path(out)
        if folder is not None:
            make_folder(folder, "tune(out=)")  # at once, before there are results to lose
        opened = _Opened(found.batches)
        journal = Journal(ranks)
        at_end.callback(opened.close)
        with _kept(model):
            job = index.job_of(found, where, settings)
        known, elsewhere = ranks.at("earlier results").same(
            (None, []) if job is None or fresh else index.find(job, where, settings)
        )
        if known is not None:
            return _written(TuneResult(*known), folder)
        reopened = dataclasses.replace(found, batches=opened)
        search = Search(Context(reopened, where, settings, spec, ranks, elsewhere, journal=journal))
        at_end.callback(vars(search).clear)  # it is in reference cycles and holds models and batches
        journal.say = _teller(search, tell)
        try:
            with users_code(f"workload {found.name!r} failed"), _kept(model):
                run(search)
        except BaseException as error:
            if folder is not None and (search.begun is not None or isinstance(error, KeyboardInterrupt)):
                _note_files(error, lambda: _result(search).save(folder))
            raise
        ranks.alike("tune", plan=str(search.choice.plan), digest=search.choice.plan.digest)
        result = _result(search)
        if job is not None and search.complete and ranks.rank == 0:
            index.keep(job, where, result.plan, result.to_dict())
        return _written(result, folder)


def _kept(model: nn.Module | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if model is None else unspoilt(model, "tune")


class _Opened:
    """A workload's batches; their iterators are closed after the search, since a DataLoader's hold worker processes.

    Pickles as the plain batches, for other processes.
    """

    def __init__(self, batches: Callable[[int], Iterator[Any]]) -> None:
        self._batches = batches
        self._open: weakref.WeakSet[Generator[Any]] = weakref.WeakSet()

    def __call__(self, seed: int) -> Iterator[Any]:
        made = _through(self._batches, seed)
        self._open.add(made)
        return made

    def __reduce__(self) -> Any:
        return _itself, (self._batches,)

    def close(self) -> None:
        for one in list(self._open):
            one.close()


def _through(batches: Callable[[int], Iterator[Any]], seed: int) -> Generator[Any]:
    yield from batches(seed)


def _itself(batches: Any) -> Any:
    return batches


def _written(result: TuneResult, folder: Path | None) -> TuneResult:
    if folder is None:
        return result
    try:
        return dataclasses.replace(result, files=result.save(folder))
    except KeyboardInterrupt as error:  # a finished search has more results to lose than an interrupted one
        _note_files(error, lambda: result.save(folder))
        raise


def _note_files(error: BaseException, save: Callable[[], Sequence[Path]]) -> None:
    """Save the results so far, and note on the error where they are, or why saving failed."""
    try:
        paths = save()
    except Exception as failed:
        error.add_note(f"The results so far could not be written: {type(failed).__name__}: {failed}")
    else:
        error.add_note("The results so far were written to " + ", ".join(str(path) for path in paths[:3]))


def _teller(search: Search, tell: Progress) -> Say:
    """Report a search's progress to a user's function, on rank 0 only."""

    def say(stage: str, subject: str, done: int, total: int) -> None:
        if search.context.ranks.rank == 0:
            parts = (subject, search.known(), f"{max(0.0, search.context.left_here_s()):.0f} s left")
            tell(Event(stage, "", done, total, "; ".join(part for part in parts if part)))

    return say


def _result(search: Search) -> TuneResult:
    record = evidence(search)
    chosen = next(c for c in record.candidates if c.plan == record.plan)
    provenance = {
        "by": f"castwise {record.environment.castwise}",
        "goal": record.goal,
        "workload": record.workload,
        "device": record.environment.device,
        "torch": record.environment.torch,
        "date": record.environment.date,
        "answer": record.answer,
        "speedup": chosen.speedup.value if chosen.speedup is not None else None,
        "damage": finite(chosen.parity.value) if chosen.parity is not None else None,
        "complete": record.complete,
    }
    if search.begun is not None and search.begun.arrived:
        provenance["widen"] = widen_for(search.choice.plan, search.begun.model)
    return TuneResult(dataclasses.replace(search.choice.plan, provenance=provenance), record)


def _workload(
    workload: Workload | str | None, model: Any, loss: Any, batches: Any, optimizer: Any, device: Any
) -> tuple[Workload, str | None, torch.device]:
    parts = {"model": model, "loss": loss, "batches": batches, "optimizer": optimizer}
    if workload is not None:
        given = [name for name, value in parts.items() if value is not None]
        if given:
            raise WorkloadError(f"tune(workload, {given[0]}=...): give a workload or its parts, not both")
        where = find_device("tune", device, default_device_type())
        if isinstance(workload, str):
            return find_workload(workload), workload, where
        if not isinstance(workload, Workload):
            hint = "; pass a module as model=" if isinstance(workload, nn.Module) else ""
            raise WorkloadError(
                f"tune({type(workload).__name__}): give a castwise.Workload, the name of a workload, or a workload's parts{hint}"
            )
        return workload, None, where
    missing = [name for name, value in parts.items() if value is None]
    if missing:
        raise WorkloadError(
            f"tune(): {', '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing; give model=, loss=, batches= and "
            "optimizer=, or a workload"
        )
    if not isinstance(model, nn.Module):
        raise WorkloadError(f"tune(model={type(model).__name__}): give the torch.nn.Module itself")
    original = copied(model, "tune")
    made = Workload(
        name=type(model).__name__,
        model=lambda: copy.deepcopy(original),
        optimizer=optimizer,
        batches=endless(batches, "tune"),
        loss=loss,
        description=f"A {type(model).__name__} given as an object.",
    )
    return made, None, find_device("tune", device, str(device_of(model)))
