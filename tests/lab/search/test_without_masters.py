"""Plans without masters are recommended only if updates and training show that they train like fp32."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

import castwise
from castwise import Plan, Workload
from castwise.core import _torch
from castwise.lab.search.axes import whole_step_plans
from castwise.lab.search.evidence import Candidate
from tests.here import DEVICE
from tests.lab.parity.test_updates import data, loss, mlp
from tests.searches import short_finals

CPU = torch.device(DEVICE)
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    short_finals(monkeypatch, 2)


def lightest(make: Make, *formats: str, budget_s: float = 150.0) -> castwise.TuneResult:
    job = Workload("plain", mlp, make, data, loss)
    return castwise.tune(job, device=DEVICE, goal="memory", formats=formats, budget_s=budget_s, fresh=True)


def true_row(result: castwise.TuneResult) -> Candidate:
    rows = [row for row in result.evidence.candidates if Plan.parse(row.plan).lacks_masters]
    row = next(row for row in rows if row.peak_bytes is not None)
    if DEVICE == "cuda" and row.reason.startswith("takes as much memory"):
        pytest.skip(
            "the model is too small to save memory beside cuBLAS workspaces, so the plan is not trained"
        )
    return row


def test_adam_at_a_low_rate_is_not_trained_without_masters() -> None:
    result = lightest(lambda p: torch.optim.Adam(p, lr=3e-4), "fp32", "bf16")
    assert not result.plan.lacks_masters
    row = true_row(result)
    assert row.status == "rejected"
    assert "rounding loses" in row.reason


def test_an_optimizer_that_fails_in_fp16_is_not_trained_in_it() -> None:
    result = lightest(lambda p: torch.optim.Adam(p, lr=1e-2), "fp16")
    assert not result.plan.lacks_masters
    row = true_row(result)
    assert row.status == "rejected"
    assert re.search("non-finite at step|times as far as in fp32", row.reason)


def test_a_sound_plan_without_masters_is_chosen_after_long_training_runs() -> None:
    result = lightest(lambda p: torch.optim.Adam(p, lr=1e-2), "fp32", "bf16")
    assert result.plan.lacks_masters
    trained = result.evidence.verification
    assert trained is not None
    assert trained.verdict == "not worse"
    assert trained.steps > 100


def test_without_time_for_training_runs_it_is_not_chosen_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("castwise.lab.search.sound.TRAINING_SHARE", 0.0)
    result = lightest(lambda p: torch.optim.Adam(p, lr=1e-2), "fp32", "bf16")
    assert not result.plan.lacks_masters
    assert "training runs" in true_row(result).reason
    assert "stores parameters without masters, and there was no time" in " ".join(result.evidence.undecided)


def test_a_learning_rate_of_zero_shows_nothing() -> None:
    result = lightest(lambda p: torch.optim.Adam(p, lr=0.0), "fp32", "bf16")
    assert not result.plan.lacks_masters
    assert "whose learning rate is above 0" in true_row(result).reason


@pytest.mark.cpu  # only the CPU kernel has this fault, before torch 2.14
@pytest.mark.parametrize(("mended", "sgd"), [(False, "as_given"), (True, "fused")])
def test_sgd_is_not_fused_where_its_kernel_leaves_low_parameters_unchanged(
    monkeypatch: pytest.MonkeyPatch, mended: bool, sgd: str
) -> None:
    monkeypatch.setattr(_torch.optimizers, "fused_sgd_updates_low", lambda: mended)

    def plans(make: Make) -> list[Plan]:
        found, _ = whole_step_plans(
            ("fp32", "bf16"), CPU, make(mlp().parameters()), has_images=False, goal="memory"
        )
        return [plan for plan in found if plan.lacks_masters]

    assert [plan.optimizer for plan in plans(lambda p: torch.optim.SGD(p, lr=0.1))] == [sgd]
    assert [plan.optimizer for plan in plans(lambda p: torch.optim.Adam(p, lr=0.1))] == ["fused"]
