"""Whether finalists step with the fused optimizer: by the time of its own part of a step, and for all of them alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import pytest
import torch
from tests.tuning.test_choices import CPU, workload
from torch import nn

import castwise
from castwise import Plan, Workload
from castwise.errors import DeviceError
from castwise.measure.steps import TrainingRun
from castwise.measure.timing import Lap
from castwise.tuning import final
from castwise.tuning.axes import as_raced
from castwise.tuning.contest import Contest
from castwise.tuning.fusing import saves_time
from castwise.tuning.search import Search, Settings
from castwise.tuning.state import AUTOCAST, FP32

FUSED = Plan.parse("fp32+optimizer=fused")


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params)


def deep() -> nn.Module:
    """Its optimizer takes the better half of a step: 64 small tensors, an operator for each of its lines."""
    return nn.Sequential(nn.Linear(16, 4), *(nn.Linear(4, 4) for _ in range(30)), nn.Linear(4, 16))


DEEP = dataclasses.replace(workload(), model=deep, optimizer=adamw)


def asked(job: Workload, then: Callable[[Search], None] = lambda _search: None) -> tuple[bool, Search]:
    search = Search(job, CPU, Settings(formats=("fp32", "bf16")))
    search._refer()
    search.contest = Contest(job, CPU)
    then(search)
    with search.home, search.contest:
        return saves_time(search, FP32), search


def test_an_optimizer_that_gains_by_its_fused_kernel_is_fused_and_its_times_are_told() -> None:
    saves, search = asked(DEEP)
    assert saves
    (note,) = search.notes
    assert note.startswith("AdamW takes ")
    assert "% less of the whole, so that the final compared plans with optimizer=fused" in note


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda params: torch.optim.RMSprop(params),
        lambda params: torch.optim.AdamW(params, fused=True),
    ],
    ids=["without a fused kernel", "fused already"],
)
def test_where_there_is_nothing_to_fuse_no_step_is_run(
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
) -> None:
    saves, search = asked(dataclasses.replace(DEEP, optimizer=optimizer))
    assert not saves
    assert search.contest is not None
    assert not search.contest.steps


@pytest.mark.parametrize(
    ("given_s", "fused_s", "saves"),
    [
        ([0.4] * 8, [0.2] * 8, True),
        ([0.4] * 8, [0.399] * 8, False),  # 0.25 % of the step
        ([0.4] * 8, [0.41] * 8, False),
        ([0.4, 0.8] * 4, [0.4, 0.4, 0.8, 0.8] * 2, False),  # by luck, if at all
        ([0.4], [0.2], False),  # of one round nobody knows
        ([], [], False),  # it cannot run
    ],
)
def test_what_is_saved_counts_where_it_is_known_to_be_a_hundredth_of_the_step(
    given_s: list[float], fused_s: list[float], saves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Contest, "updates", lambda *_: [Lap(list(given_s)), Lap(list(fused_s))])

    def raced(search: Search) -> None:
        assert search.contest is not None
        search.contest.entries[FP32].times_s[:] = [1.0] * 8

    found, search = asked(DEEP, raced)
    assert found == saves
    assert (FUSED in search.passed_over) == (not saves and bool(given_s))


def test_a_kernel_that_cannot_run_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise DeviceError("no kernel")

    monkeypatch.setattr("castwise.session.apply.fuse", refuses)
    saves, search = asked(DEEP)
    assert not saves
    assert search.contest is not None
    assert "no kernel" in search.contest.entries[FUSED].reason


def test_timing_an_optimizer_leaves_no_hook_and_changes_no_step() -> None:
    timed, plain = (TrainingRun(DEEP, FP32, CPU) for _ in range(2))
    with timed.timing_updates() as taken:
        timed.block(2)
        assert len(taken) == 2
        assert all(seconds > 0.0 for seconds in taken)
    timed.block(1)
    assert len(taken) == 2
    plain.block(3)
    assert timed.losses == plain.losses


@pytest.mark.parametrize("fuses", [True, False])
def test_finalists_are_fused_all_or_none(fuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(final, "ROUNDS", 3)
    monkeypatch.setattr("castwise.tuning.fastest.saves_time", lambda *_: fuses)
    monkeypatch.setattr("castwise.tuning.fastest.gives_back", lambda *_: False)
    result = castwise.tune(
        DEEP, device="cpu", formats=("fp32", "bf16"), budget_s=20, memory=False, fresh=True
    )
    rows = {Plan.parse(row.plan): row for row in result.evidence.candidates}
    raced = {plan for plan, row in rows.items() if row.rounds and row.speedup} - {FP32, AUTOCAST}
    assert {plan.optimizer for plan in raced} <= {"fused" if fuses else "as_given"}
    assert any(as_raced(plan) == FP32 for plan in raced) == fuses
    for plan in raced & {run for run in rows if run.optimizer == "fused"}:
        twin = as_raced(plan)
        if twin in rows and twin not in (FP32, AUTOCAST):
            assert rows[twin].reason == final.ran_as(plan)
