"""The chosen plan is tested again after some training steps, since trained weights differ from initial ones."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn

import castwise
from castwise import Plan, Workload
from castwise.lab.search.axes import AUTOCAST, FP32
from castwise.lab.search.context import Context, Settings
from castwise.lab.search.evidence import Stage, Verification
from castwise.lab.search.record import evidence
from castwise.lab.search.reference import refer
from castwise.lab.search.repair import NumericsSearch, Repair
from castwise.lab.search.search import _may_warm_up, _second_look, _warmup
from castwise.lab.search.state import Choice, Search
from tests.here import DEVICE

TRAINED = Verification(58, 8, 0.1, 0.2, 0.0106, 0.0005, "not worse")


class Shifted(nn.Module):
    """A linear layer minus its bias: exact in fp32, but a low format loses the output once the bias is large."""

    def __init__(self) -> None:
        super().__init__()
        self.shifted, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.shifted(x) - self.shifted.bias)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    bias: Tensor = model.shifted.bias  # type: ignore[union-attr, assignment]
    return model(batch).square().mean() - 1e-3 * bias.mean()


def batches(seed: int) -> Iterator[Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    while True:
        yield torch.randn(32, 16, generator=generator, device=DEVICE)


def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD that moves the bias by thousands although its gradient is negligible beside the others."""
    weight, bias, *last = params
    return torch.optim.SGD([{"params": [bias], "lr": 1e8}, {"params": [weight, *last]}], lr=1e-2)


GROWS = Workload("grows", Shifted, optimizer, batches, loss)


def looked(job: Workload = GROWS, chosen: Choice = Choice(AUTOCAST)) -> Search:
    search = Search(Context(job, torch.device(DEVICE), Settings(("fp32", "bf16"), warmup_steps=4)))
    search.begun = refer(search.context)
    search.choice = dataclasses.replace(chosen, verified=search.reference.numerics.find(chosen.plan))
    assert search.choice.verified is not None
    assert search.choice.verified.verdict == "pass"
    search.warmed = 4
    _second_look(search)
    return search


def test_what_trained_weights_break_is_repaired_and_nothing_that_was_known_of_the_plan_before_stays() -> None:
    search = looked(chosen=Choice(AUTOCAST, verification=TRAINED))
    assert search.choice.plan == Plan.parse("bf16-mixed+regions.shifted=fp32")
    assert search.choice.verified is not None
    assert search.choice.verified.verdict == "pass"
    assert set(search.choice.kept) == {"shifted"}
    assert search.choice.verification is None  # the runs were of the plan before the repair
    assert search.journal.refusal(AUTOCAST).startswith("after 4 steps: ")
    assert "pass" in search.journal.notes[-1]


@pytest.mark.parametrize(("steps", "kept"), [(0, False), (4, True), (None, True)])
def test_the_search_for_regions_tests_trained_weights_too(steps: int | None, kept: bool) -> None:
    """By default, after as many steps as are cheap."""
    result = castwise.tune(
        GROWS, goal="numerics", formats=("bf16",), warmup_steps=steps, device=DEVICE, budget_s=60, fresh=True
    )
    assert (result.plan == Plan.parse("bf16-mixed+regions.shifted=fp32")) is kept or (
        steps is None and result.plan.compute == "fp32"  # so many steps may leave nothing to repair
    )
    assert any("weights after" in sentence for sentence in result.evidence.why) or result.plan == FP32


@pytest.mark.parametrize(("step_s", "warmed", "taken"), [(0.0, 300, 300), (0.02, 0, 3), (0.2, 0, 2)])
def test_steps_that_are_too_slow_for_a_second_look_are_few(step_s: float, warmed: int, taken: int) -> None:
    search = Search(Context(GROWS, torch.device(DEVICE), Settings(("fp32", "bf16"), budget_s=10.0)))
    calls: list[int] = []

    def step() -> None:
        calls.append(1)
        time.sleep(step_s)

    assert _warmup(search, step) == warmed
    assert len(calls) == taken


@pytest.mark.parametrize(
    ("pass_s", "asked", "may"), [(0.01, None, True), (0.5, None, False), (0.5, 7, True), (0.01, 0, False)]
)
def test_a_job_with_slow_passes_is_not_built_for_a_second_look(
    pass_s: float, asked: int | None, may: bool
) -> None:
    search = Search(
        Context(GROWS, torch.device(DEVICE), Settings(("fp32", "bf16"), budget_s=10.0, warmup_steps=asked))
    )
    search.journal.stages.append(Stage("reference", 10 * pass_s, 10))
    assert _may_warm_up(search) is may


def flipped(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield classes of which one in two hundred is wrong: a probability of exactly 1 then has no gradient."""
    generator = torch.Generator("cpu").manual_seed(seed)
    while True:
        x = torch.randn(64, 16, generator=generator, device="cpu")
        y = (x.sum(1) > 0) ^ (torch.rand(64, generator=generator, device="cpu") < 0.005)
        yield x, y.float()[:, None]


def test_damage_that_trained_weights_do_in_a_few_batches_is_found_and_its_source_alone_repaired() -> None:
    job = Workload(
        "probabilities",
        model=lambda: nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1), nn.Sigmoid()),
        optimizer=lambda params: torch.optim.Adam(params, lr=3e-3),
        batches=flipped,
        loss=lambda model, batch: nn.functional.binary_cross_entropy(model(batch[0]).float(), batch[1]),
    )
    result = castwise.tune(
        job,
        goal="numerics",
        formats=("bf16",),
        device=DEVICE,
        budget_s=60,
        warmup_steps=300,
        fresh=True,
        memory=False,
    )
    assert str(result.plan) == "bf16-mixed+regions.3=fp32"
    assert any(
        note.startswith("The gradient test after 300 fp32 steps: pass") for note in result.evidence.notes
    )


def test_where_no_repair_passes_the_plan_is_fp32_and_another_plans_damage_is_not_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(NumericsSearch, "verify", NumericsSearch.find)
    monkeypatch.setattr(
        NumericsSearch, "repair", lambda _self, plan, *_args, **_options: Repair(plan, {"shifted": "why"})
    )
    search = looked()
    assert search.choice == Choice()
    assert FP32 not in search.parity
    row = next(row for row in evidence(search).candidates if row.plan == "fp32")
    assert row.parity is None
    assert not any(region.reason for region in evidence(search).regions)


def test_a_plan_that_passes_again_stays_with_all_that_is_known_of_it() -> None:
    quiet = dataclasses.replace(GROWS, loss=lambda model, batch: model(batch).square().mean())
    search = looked(quiet, Choice(AUTOCAST, verification=TRAINED))
    assert (search.choice.plan, search.choice.verification) == (AUTOCAST, TRAINED)
    assert not search.journal.fates
