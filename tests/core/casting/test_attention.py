"""The rule ``unfused`` computes the same attention as matrix products and a softmax."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import castwise
from castwise import Plan
from castwise.errors import PlanError
from tests.here import DEVICE

UNFUSED = Plan(compute="bf16", ops={"scaled_dot_product_attention": "unfused"})
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "a boolean mask": {"attn_mask": torch.arange(9 * 9).view(9, 9).remainder(5) > 1},
    "a mask that hides a row": {"attn_mask": torch.arange(9)[:, None].expand(9, 9) > 0},
    "an additive mask": {"attn_mask": torch.linspace(-2.0, 2.0, 81).view(9, 9)},
    "a mask per sample": {"attn_mask": (torch.arange(2 * 9) % 7 > 0).view(2, 1, 1, 9)},
    "shared heads": {"enable_gqa": True},
    "a scale": {"scale": 0.4},
}


def tensors(groups: int = 1) -> list[Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    shapes = [(2, 6, 9, 16)] + [(2, 6 // groups, 9, 16)] * 2
    return [torch.randn(s, generator=generator).requires_grad_() for s in shapes]


def gradients(plan: Plan | None, given: list[Tensor], **options: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    if plan is None:
        given = [t.detach().double().requires_grad_() for t in given]
        options = {
            k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
            for k, v in options.items()
        }
        out = functional.scaled_dot_product_attention(*given, **options)
    else:
        with castwise.autocast(plan):
            out = functional.scaled_dot_product_attention(*given, **options)
    return out, torch.autograd.grad(out.double().sin().sum(), given)


def error(got: Tensor, truth: Tensor) -> float:
    got, truth = got.detach().double(), truth.detach()
    return float((got - truth).norm() / truth.norm())


@pytest.mark.parametrize("case", CASES)
def test_it_is_as_near_to_fp64_as_torchs_own_kernel(case: str) -> None:
    given = tensors(2 if case == "shared heads" else 1)
    truth, true_gradients = gradients(None, given, **CASES[case])
    theirs, their_gradients = gradients(Plan.preset("bf16-mixed"), given, **CASES[case])
    ours, our_gradients = gradients(UNFUSED, given, **CASES[case])
    assert ours.dtype is torch.bfloat16
    assert error(ours, truth) < 3 * error(theirs, truth) + 1e-3
    for got, other, true in zip(our_gradients, their_gradients, true_gradients, strict=True):
        assert error(got, true) < 3 * error(other, true) + 1e-3


def test_dropout_drops_and_rescales() -> None:
    torch.manual_seed(0)
    value = torch.ones(1, 1, 64, 8)
    query = torch.zeros(1, 1, 64, 8)
    with castwise.autocast(UNFUSED):
        out = functional.scaled_dot_product_attention(query, query, value, dropout_p=0.5)
    assert 0.9 < float(out.float().mean()) < 1.1
    assert float(out.float().std()) > 0.05


def test_nothing_runs_fused_inside() -> None:
    given = tensors()
    with torch.profiler.profile(acc_events=True) as profiled:
        gradients(UNFUSED, given)
    ran = {event.key for event in profiled.key_averages()}
    assert "aten::bmm" in ran
    assert not any("flash" in name for name in ran)


def test_compiled_it_is_the_same() -> None:
    given = tensors()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with castwise.autocast(UNFUSED):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    eager = attend(*given)
    compiled = torch.compile(attend, backend="aot_eager")(*given)
    assert torch.equal(compiled, eager)


def test_other_operators_are_refused_in_words() -> None:
    with pytest.raises(
        PlanError,
        match=r"ops=\('softmax', 'unfused'\): it cannot be unfused. Allowed for unfused: scaled_dot_product_attention.",
    ):
        Plan(compute="bf16", ops={"softmax": "unfused"})
