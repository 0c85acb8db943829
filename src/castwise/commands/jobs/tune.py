"""``tune``, which finds by experiment the fastest plan whose gradients match fp32's."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from castwise.commands.jobs import Event, Progress, heard, make_folder
from castwise.commands.jobs.tune_result import TuneResult
from castwise.core.casting import default_device_type
from castwise.core.model.arrival import widen_for
from castwise.core.model.copying import copy_of
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
from castwise.lab.workloads.workload import Workload, find_workload, no_loss, no_optimizer, users_code

__all__ = ["TuneResult", "tune"]


def tune(
    workload: Workload | str | None = None,
    *,
    model: nn.Module | None = None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    batches: Any = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    outputs: Callable[[nn.Module, Any], Any] | None = None,
    formats: Sequence[str] = FORMATS,
    goal: str = "time",
    accumulate: int = 1,
    world_size: int | None = None,
    compile: str | bool = "never",
    warmup_steps: int | None = None,
    verify_steps: int = 0,
    verify_seeds: int = 8,
    budget_s: float = 170.0,
    memory: bool = True,
    device: torch.device | str | None = None,
    seed: int = 0,
    batch_sizes: Sequence[int] = (),
    fresh: bool = False,
    out: str | os.PathLike[str] | None = None,
    progress: Progress | bool | None = None,
) -> TuneResult:
    """Find the fastest precision plan whose gradients match those of fp32 within the noise of the data.

    A plan decides the formats in which a model computes and stores its weights. Pass either a workload, or a model, a
    loss, batches and an optimizer. The search works on copies. Afterwards, also after an error, the model, the random
    generators and process-wide settings are unchanged. Training continues as if no search had been made.

    If torch.distributed is initialised, call this function on every rank with the same arguments. All ranks then
    search together, on the same batches (no seed per rank is needed), and get the same plan. All ranks measure at the
    same time. The result uses the slowest time, the largest peak memory and the largest gradient error of all ranks.
    A plan that fails on one rank fails on all. Only rank 0 reports progress and writes ``out``.

    Args:
        workload: A :class:`castwise.Workload`, or the name of a workload, such as ``gpt`` or ``file.py:attribute``.
        model: Instead of a workload, a module in any state of training. If its parameters are stored in bf16 or fp16,
            plans are compared with an fp32 copy of the model. The unchanged model then has its own row in the table.
        loss: A function ``loss(model, batch)`` that returns a scalar tensor. It must call the model that it is given.
        batches: A sequence of batches, an iterable that can be iterated again (such as a DataLoader), or a function
            ``batches(seed)`` that returns an iterator.
        optimizer: A function ``optimizer(params)`` that returns an optimizer. The optimizer's step is timed too.
        outputs: With ``goal="inference"``, a function ``outputs(model, batch)`` that returns the outputs to serve. By
            default the model is called as the loss calls it, or, without a loss, with the batch as its arguments.
        formats: The formats that the plan may use: ``fp32``, ``tf32``, ``bf16`` and ``fp16``. Formats that the device
            lacks are left out.
        goal: The aim of the search. ``time`` finds the fastest plan whose gradients match those of fp32. ``memory``
            finds such a plan with the smallest peak memory. ``numerics`` finds the plan with the fewest modules in
            fp32, whatever its speed. It is for a single low-precision format, which ``formats`` names. ``inference``
            finds the fastest plan for a model that is not trained any more. Its outputs must be as good as those of
            fp32. No optimizer and no loss are needed. See docs/serve.md.
        accumulate: The number of microbatches that are accumulated for an optimizer step.
        world_size: The number of data-parallel ranks that average gradients. By default it is the number of calling
            ranks.
        compile: Whether the plan may compile the model. ``never`` (or False) does not compile. ``auto`` compiles if
            that is faster. ``always`` (or True) chooses among the plans that compile. The best plans are compiled in
            separate processes, as far as the budget allows. Gradients are first tested without compiling. The
            compiled gradients are then compared with those.
        warmup_steps: The number of fp32 steps after which the gradients are tested a second time, since trained weights
            can round differently. With None, it is as many steps as take about 3 % of the budget, at most 300, and if
            fewer than 50 fit, there is no second test. With 0, gradients are tested only once.
        verify_steps: The number of steps of the final training runs, which compare the plan with fp32. With 0, no
            such runs are made.
        verify_seeds: The number of pairs of such runs, at least 2. About 20 pairs show small differences.
        budget_s: The approximate time limit in seconds. Work that does not fit is left out, and the evidence says so.
        memory: Whether to measure peak memory too, in a separate process for each plan.
        device: The device of the search. By default it is the model's device. For a workload, it is the available
            accelerator, otherwise the CPU.
        seed: The seed of weights, data and all random draws.
        batch_sizes: With ``goal="inference"``, the numbers of samples per call at which latencies are measured. Batches
            are joined or cut along the first dimension of their tensors. By default the batches are used as they are.
        fresh: Whether to search even if an earlier search had the same model, optimizer, loss, data, code, device and
            versions. If False, the result of that search is returned at once, and says so. But if that search left
            something open because of a smaller budget, a new search is made. A plan that was found on another device,
            with other versions or code, or with a smaller budget is tried from the start. Results are kept in the
            user's cache folder, or in the folder that ``CASTWISE_CACHE_DIR`` names. An empty value turns the cache
            off.
        out: A folder for the files that ``.save(folder)`` writes, which is created at once. The files are written at
            the end, or when the search is interrupted or fails after its first stage.
        progress: True shows the command line's progress on standard error. A function is called with
            ``castwise.commands.jobs.Event`` records.

    Returns:
        The result, with ``.plan``, ``.answer``, ``.table()``, ``.save(folder)`` and ``.files``, the files that were
        written to ``out``.

    Raises:
        PlanError: An argument is out of range, or ``out`` cannot be written to.
        Exception: ``progress`` raised it.
        WorkloadError: The workload cannot be found, its loss has no gradient, or its batches are unusable.
        NonFiniteError: The loss or gradients are not finite in fp32 itself.
        StateError: The budget is too small for any result, the arguments differ between ranks, or a rank has left the
            search.
        RankError: Work that every plan needs has failed on some ranks.
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
            memory, seed, tuple(batch_sizes),
        )  # fmt: skip
        found, spec, where = _workload(
            workload,
            {"model": model, "loss": loss, "batches": batches, "optimizer": optimizer, "outputs": outputs},
            goal, device,
        )  # fmt: skip
        ranks.alike("tune", **dataclasses.asdict(settings), workload=found.name, device=where.type)
        folder = None if out is None or ranks.rank else Path(out)
        if folder is not None:
            make_folder(folder, "tune(out=)")  # before there are results that an unusable folder would lose
        opened = _Opened(found.batches)
        journal = Journal(ranks)
        if goal == "inference" and model is not None and model.training:
            journal.notes.append(
                "The model is in training mode. It was measured in evaluation mode, without dropout and with BatchNorm's running "
                "averages; call model.eval() before you serve it."
            )
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
        at_end.callback(
            vars(search).clear
        )  # frees models and batches, which the search holds in reference cycles
        journal.say = _teller(search, tell)
        try:
            with users_code(f"workload {found.name!r} failed"), _kept(model):
                run(search)
        except BaseException as error:
            begun = search.first is not None
            if folder is not None and (begun or isinstance(error, KeyboardInterrupt)):
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
    """Wraps a workload's function ``batches(seed)``, and closes all its iterators when the search ends.

    The iterators of a DataLoader may hold worker processes. For other processes, the object is pickled as the plain function.
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
    except (
        KeyboardInterrupt
    ) as error:  # save again, so that an interrupt does not lose the results of a finished search
        _note_files(error, lambda: result.save(folder))
        raise


def _note_files(error: BaseException, save: Callable[[], Sequence[Path]]) -> None:
    """Save the results so far, and add a note to the error that says where they are, or why saving failed."""
    try:
        paths = save()
    except Exception as failed:
        error.add_note(f"The results so far could not be written: {type(failed).__name__}: {failed}")
    else:
        error.add_note("The results so far were written to " + ", ".join(str(path) for path in paths[:3]))


def _teller(search: Search, tell: Progress) -> Say:
    """Return a function that passes the progress of a search on to the user's progress function, on rank 0 only."""

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
    if search.first is not None and search.arrived:
        provenance["widen"] = widen_for(search.choice.plan, search.first.model, serves=search.serves)
    return TuneResult(dataclasses.replace(search.choice.plan, provenance=provenance), record)


def _workload(
    workload: Workload | str | None, parts: Mapping[str, Any], goal: str, device: Any
) -> tuple[Workload, str | None, torch.device]:
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
    needed = ("model", "batches") if goal == "inference" else ("model", "loss", "batches", "optimizer")
    missing = [name for name in needed if parts[name] is None]
    if missing:
        raise WorkloadError(
            f"tune(): {', '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing; give "
            f"{', '.join(f'{name}=' for name in needed[:-1])} and {needed[-1]}=, or a workload"
        )
    model = parts["model"]
    if not isinstance(model, nn.Module):
        raise WorkloadError(f"tune(model={type(model).__name__}): give the torch.nn.Module itself")
    original = copied(model, "tune")
    made = Workload(
        name=type(model).__name__,
        model=lambda: copy_of(original),
        optimizer=parts["optimizer"] or no_optimizer,
        batches=endless(parts["batches"], "tune"),
        loss=parts["loss"] or no_loss,
        outputs=parts["outputs"],
        description=f"A {type(model).__name__} given as an object.",
    )
    return made, None, find_device("tune", device, str(device_of(model)))
