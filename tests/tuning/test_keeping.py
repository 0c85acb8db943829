"""Whether finalists keep memory: only where page faults cost anything, and then the fastest comes as it is, too."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from tests.tuning.test_choices import CPU, sgd, workload
from torch import Tensor, nn

import castwise
from castwise import Plan, Workload
from castwise.heap import can_keep
from castwise.tuning import final, keeping
from castwise.tuning.axes import as_raced, complexity, numerics_of
from castwise.tuning.keeping import gives_back
from castwise.tuning.search import Settings
from castwise.tuning.state import AUTOCAST, FP32, SearchState

KEPT = Plan.parse("bf16-mixed+host_memory=keep")

needs_glibc = pytest.mark.skipif(not can_keep(), reason="the C library is not glibc")


class Wide(nn.Module):
    """Makes a tensor of 40 MiB and drops it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        torch.ones(10 << 20)
        return self.layer(x)


def batches(seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(8, 4, generator=generator)


WIDE = Workload("wide", Wide, sgd, batches, lambda model, batch: model(batch).square().mean())


def asked(job: Workload, device: torch.device = CPU) -> bool:
    search = SearchState(job, device, Settings(formats=("fp32", "bf16")))
    with search.home:
        return gives_back(search, FP32)


@needs_glibc
def test_page_faults_are_seen_in_a_process_of_the_plans_own() -> None:
    assert asked(WIDE)
    assert not asked(workload())


def broken(_model: nn.Module, _batch: Tensor) -> Tensor:
    raise RuntimeError("no")


@pytest.mark.parametrize("why", ["device", "library", "process", "loss"])
def test_where_it_cannot_be_known_nothing_is_kept(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The final says what a loss raises, and that a workload cannot leave this process."""
    if why == "library":
        monkeypatch.setattr(keeping, "can_keep", lambda: False)
    job = Workload("wide", Wide, sgd, batches, broken) if why == "loss" else WIDE
    if why == "process":
        stays = threading.Lock()
        job = Workload("wide", Wide, sgd, batches, lambda model, batch: (stays, model(batch).mean())[1])
    assert not asked(job, torch.device("meta") if why == "device" else CPU)


def test_keeping_changes_no_numerics_and_is_nearly_free() -> None:
    assert as_raced(KEPT) == numerics_of(KEPT) == AUTOCAST
    assert complexity(AUTOCAST) < complexity(KEPT) < complexity(AUTOCAST) + 1.0


def test_one_line_autocast_can_be_chosen_as_it_is_where_a_slower_tie_keeps_nothing() -> None:
    """It runs in the final anyway."""
    search = SearchState(workload(), CPU, Settings(formats=("fp32", "bf16")))
    other = Plan.parse("bf16-mixed+optimizer=fused")
    kept = [Plan.parse(f"{plan}+host_memory=keep") for plan in (other, AUTOCAST)]
    assert keeping.keeping(search, [other, AUTOCAST], other) == [*kept, other, AUTOCAST]
    assert not search.passed_over


@needs_glibc
@pytest.mark.parametrize("doubt", ["", "gradients in doubt"])
def test_what_is_in_doubt_is_so_with_kept_memory_too(doubt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def sound(search: SearchState, _plans: object) -> tuple[list[Plan], list[Plan]]:
        search.reasons.update({AUTOCAST: doubt} if doubt else {})
        return ([FP32], [AUTOCAST]) if doubt else ([FP32, AUTOCAST], [])

    monkeypatch.setattr(final, "ROUNDS", 3)
    monkeypatch.setattr("castwise.tuning.fastest._sound", sound)
    monkeypatch.setattr("castwise.tuning.fastest.likeliest", lambda *_: [FP32, AUTOCAST])
    monkeypatch.setattr("castwise.tuning.fastest.gives_back", lambda *_: True)
    result = castwise.tune(
        workload(), device="cpu", formats=("fp32", "bf16"), budget_s=20, memory=False, fresh=True
    )
    row = next(row for row in result.evidence.candidates if Plan.parse(row.plan) == KEPT)
    if doubt and row.status != "chosen":
        assert (row.status, row.reason) == ("rejected", doubt)
    assert row.speedup is not None


@needs_glibc
@pytest.mark.parametrize("keeps", [True, False])
def test_finalists_keep_memory_beside_the_fastest_as_it_is(
    keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(final, "ROUNDS", 3)
    monkeypatch.setattr("castwise.tuning.fastest.gives_back", lambda *_: keeps)
    result = castwise.tune(
        workload(), device="cpu", formats=("fp32", "bf16"), budget_s=20, memory=False, fresh=True
    )
    raced = {Plan.parse(row.plan) for row in result.evidence.candidates if row.rounds and row.speedup}
    kept = {plan for plan in raced if plan.host_memory == "keep"}
    assert bool(kept) == keeps
    if keeps:
        assert len({as_raced(plan) for plan in kept} & raced) >= 1
        others = [row for row in result.evidence.candidates if "keeps freed memory there" in row.reason]
        assert all(as_raced(Plan.parse(row.plan)).host_memory == "as_given" for row in others)
