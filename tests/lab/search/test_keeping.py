"""Finalists keep freed host memory only if page faults cost time; the race always keeps it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import castwise
from castwise import Plan, Workload
from castwise.core.heap import HEAP, can_keep
from castwise.lab.search import final, keeping
from castwise.lab.search.axes import AUTOCAST, FP32, as_raced, complexity, numerics_of
from castwise.lab.search.contest import Contest
from castwise.lab.search.context import Context, Settings
from castwise.lab.search.finalists import run_as
from castwise.lab.search.keeping import keeping_saves
from castwise.lab.search.starts import race_final
from castwise.lab.search.state import Search
from castwise.lab.timing.processes import Home
from castwise.lab.timing.runners import TrainingRun
from castwise.lab.timing.served import belong_to
from tests.here import DEVICE
from tests.lab.search.test_choices import CPU, sgd, workload
from tests.searches import short_finals

KEPT, KEPT_FP32 = (Plan.parse(f"{name}+host_memory=keep") for name in ("bf16-mixed", "fp32"))

needs_glibc = pytest.mark.skipif(not can_keep(), reason="the C library is not glibc")


pytestmark = pytest.mark.cpu  # only host memory can be kept, which matters for work on CPUs


class Wide(nn.Module):
    """A model that allocates and frees blocks of 24 MiB, which the heap can keep."""

    MIB = 24

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        _ = [torch.ones(self.MIB << 18) for _ in range(4)]
        return self.layer(x)


class Wider(Wide):
    """A model with blocks of 40 MiB, which always go back to the system."""

    MIB = 40


def batches(seed: int) -> Iterator[Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    while True:
        yield torch.randn(8, 4, generator=generator, device=DEVICE)


WIDE = Workload("wide", Wide, sgd, batches, lambda model, batch: model(batch).square().mean())


def asked(job: Workload, device: torch.device = CPU) -> tuple[bool, list[str]]:
    search = Search(Context(job, device, Settings(formats=("fp32", "bf16"))))
    with search.context.home:
        return keeping_saves(search.context, FP32) > 0.0, search.journal.notes


@needs_glibc
def test_page_faults_are_seen_in_a_process_of_the_plans_own_and_told() -> None:
    costs, (note,) = asked(WIDE)
    assert costs
    said = r"In a process of its own, fp32 met ([\d,]+) page faults per step, and ([\d,]+) when it .* saves at least \d+ % of"
    found = re.match(said, note)
    assert found, note
    given, kept = (int(number.replace(",", "")) for number in found.groups())
    assert given > kept  # the difference varies: one block that moves adds a thousand faults per step
    assert asked(workload()) == (False, [])


@needs_glibc
def test_page_faults_that_keeping_memory_does_not_spare_do_not_count() -> None:
    assert asked(dataclasses.replace(WIDE, model=Wider)) == (False, [])


def lives(pipe: object, line: str) -> list[str]:
    """Return this process's heap setting at four points: before a run, once built, in a block of steps, after."""
    plan = Plan.parse(line)
    belong_to(plan)
    seen = [HEAP.host_memory]
    run = TrainingRun(workload(), plan, CPU)
    seen.append(HEAP.host_memory)
    run.before(1)
    seen.append(HEAP.host_memory)
    run.after()
    run.close()
    return [*seen, HEAP.host_memory]


@needs_glibc
@pytest.mark.parametrize("line", ["fp32", "fp32+host_memory=keep"])
def test_a_process_of_a_plans_own_keeps_memory_for_good(line: str) -> None:
    """Otherwise each block of steps would begin by faulting in the memory that the last one returned."""
    with Home() as home, contextlib.closing(home.start(lives, line)) as process:
        assert process.answer(60.0) == [Plan.parse(line).host_memory] * 4


@needs_glibc
def test_in_one_process_each_plan_keeps_its_own_blocks_alone() -> None:
    seen = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(HEAP.host_memory)
        return model(batch).square().mean()

    job = Workload("wide", Wide, sgd, batches, loss)
    plans = ["fp32", "fp32+host_memory=keep"]
    castwise.bench(
        job, device=DEVICE, plans=plans, steps=6, starts=0, rounds=2, memory=False, inference=False
    )
    assert {"keep", "as_given"} == set(seen)
    assert 0.3 < seen.count("keep") / len(seen) < 0.7
    assert HEAP.host_memory == "as_given"


@needs_glibc
def test_the_race_keeps_memory_whichever_plan_runs_and_the_final_does_not() -> None:
    """The final does not keep memory, even if it has to run in the same process."""
    seen: dict[str, set[str]] = {}
    stays = threading.Lock()

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with stays:
            seen.setdefault(search.journal.now, set()).add(HEAP.host_memory)
        return model(batch).square().mean()

    search = Search(
        Context(Workload("wide", Wide, sgd, batches, loss), CPU, Settings(formats=("fp32", "bf16")))
    )
    contest = search.race = Contest(search.context.workload, CPU)
    with search.context.home, contest:
        search.journal.now = "race"
        contest.halve([AUTOCAST])
        search.journal.now = "final"
        decided = race_final(search.context, contest, [AUTOCAST], math.inf)
    assert not decided.apart
    assert decided.times_s
    assert seen == {"race": {"keep"}, "final": {"as_given"}}
    assert HEAP.host_memory == "as_given"


def broken(_model: nn.Module, _batch: Tensor) -> Tensor:
    raise RuntimeError("no")


@pytest.mark.parametrize("why", ["device", "library", "process", "loss"])
def test_where_it_cannot_be_known_nothing_is_kept(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of the loss, and workloads that cannot run in another process, are reported by the final instead."""
    if why == "library":
        monkeypatch.setattr(keeping, "can_keep", lambda: False)
    job = Workload("wide", Wide, sgd, batches, broken) if why == "loss" else WIDE
    if why == "process":
        stays = threading.Lock()
        job = Workload("wide", Wide, sgd, batches, lambda model, batch: (stays, model(batch).mean())[1])
    assert asked(job, torch.device("meta") if why == "device" else CPU) == (False, [])


@needs_glibc
def test_one_process_whose_heap_has_no_holes_is_no_answer_however_short_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: by chance, one of nine searches of `gpt` of 30 s each lost 5 % of speed."""
    given = iter([0.0, 9e4])
    monkeypatch.setattr(
        keeping,
        "_faults",
        lambda _search, _sent, plans: [
            (0.0 if plan.host_memory == "keep" else next(given), 0.01) for plan in plans
        ],
    )
    monkeypatch.setattr(keeping, "SHARE", 0.0)
    assert asked(WIDE, CPU)[0]
    assert next(given, None) is None


@needs_glibc
def test_what_there_is_no_time_for_is_not_tried_and_that_is_said() -> None:
    search = Search(Context(WIDE, CPU, Settings(formats=("fp32", "bf16"), budget_s=60.0)))
    search.journal.start -= 50.0
    with search.context.home:
        assert not keeping_saves(search.context, FP32)
    (note,) = search.journal.undecided
    assert note == "The page faults that kept memory would save were not counted: the time ran out."


def test_keeping_changes_no_numerics_and_is_nearly_free() -> None:
    assert as_raced(KEPT) == numerics_of(KEPT) == AUTOCAST
    assert complexity(AUTOCAST) < complexity(KEPT) < complexity(AUTOCAST) + 1.0


def test_who_keeps_memory_does_not_race_itself_as_it_is() -> None:
    search = Search(Context(workload(), CPU, Settings(formats=("fp32", "bf16"))))
    other = Plan.parse("bf16-master")
    kept = [Plan.parse(f"{plan}+host_memory=keep") for plan in (other, AUTOCAST)]
    assert run_as(search.journal, [other, AUTOCAST, FP32], KEPT) == [*kept, KEPT_FP32]
    assert search.journal.fates == {other: final.ran_as(kept[0]), AUTOCAST: final.ran_as(KEPT)}
    layout = Plan.parse("fp32+memory_format=channels_last")
    assert run_as(search.journal, [layout, FP32], KEPT) == [Plan.parse(f"{layout}+host_memory=keep")]


def test_what_runs_beside_its_twin_that_keeps_memory_says_why_it_cannot_be_chosen() -> None:
    """Autocast is timed even if its twin that keeps memory is the candidate."""
    times = [
        [[seconds * (1.0 + luck * (s - 1))] * 3 for s in range(3)]
        for seconds, luck in ((2.0, 0.0), (1.0, 0.05), (0.99, 0.0))
    ]
    found = final.Final([FP32, AUTOCAST, KEPT], times_s=times, choice={FP32, KEPT})
    assert found.fate(AUTOCAST, KEPT) == final.ran_as(KEPT)
    assert (shown := found.fate(FP32, KEPT)) is not None
    assert shown.kind == "worse"
    both = final.Final([FP32, AUTOCAST, KEPT], times_s=times, choice={FP32, AUTOCAST, KEPT})
    assert (raced := both.fate(AUTOCAST, KEPT)) is not None
    assert raced.kind == "worse"


@needs_glibc
@pytest.mark.parametrize("keeps", [True, False])
def test_finalists_keep_memory_and_race_no_longer_as_they_are(
    keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_finals(monkeypatch, 2)
    monkeypatch.setattr("castwise.lab.search.fastest.keeping_saves", lambda *_: 0.04 * keeps)
    result = castwise.tune(
        workload(), device=DEVICE, formats=("fp32", "bf16"), budget_s=20, memory=False, fresh=True
    )
    raced = {Plan.parse(row.plan) for row in result.evidence.candidates if row.rounds and row.speedup}
    kept = {plan for plan in raced if plan.host_memory == "keep"}
    assert bool(kept) == keeps
    if keeps:
        assert raced <= {FP32, AUTOCAST, *kept}
        reasons = {Plan.parse(row.plan): row.reason for row in result.evidence.candidates}
        twins = {as_raced(plan) for plan in kept} - {FP32, AUTOCAST, Plan.parse(str(result.plan))}
        assert all(
            reasons[plan].startswith("timed in the final with other settings, as ") for plan in twins
        ), reasons
