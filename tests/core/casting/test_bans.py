"""Bans apply to operators that the user's code calls, and the plan that their error message advises works."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
import torch

import castwise
from castwise import Plan
from castwise.core.devices import autocast_types
from castwise.core.plans.rules import BASES, base_table
from castwise.errors import BannedOperatorError
from tests.here import DEVICE
from tests.soak import each_value

LOW = torch.linspace(0.1, 0.9, 16).reshape(4, 4).bfloat16()
APEX = Plan(compute="bf16", rules="apex")
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "binary_cross_entropy": (LOW,),
    "cumprod_": (0,),
    "cumsum_": (0,),
    "pow_": (2,),
    "renorm_": (2, 0, 1.0),
}
BANNED = sorted(
    (base, op)
    for base in BASES
    for op, row in base_table(base, DEVICE).items()
    if row.rule == "banned"
    and (DEVICE == "cpu" or op != "binary_cross_entropy")  # torch itself bans it there
)


def call(op: str, value: torch.Tensor = LOW) -> torch.Tensor:
    function = getattr(torch.ops.aten, op)
    out: torch.Tensor = function((value + 1 if op == "acosh_" else value).clone(), *ARGUMENTS.get(op, ()))
    return out


@each_value()
@pytest.mark.parametrize(("base", "op"), BANNED)
def test_what_a_ban_advises_is_a_plan_that_runs(base: str, op: str) -> None:
    with (
        castwise.autocast(Plan(compute="bf16", rules=base), device_type=DEVICE),
        pytest.raises(BannedOperatorError) as raised,
    ):
        call(op)
    text = str(raised.value)
    [advised] = re.findall(r"ops=(\(\(.*?\),\))", text)
    others = re.findall(r"other rules: (.*)\.", text)
    rules = others[0].split(", ") if others else []
    for ops in (ast.literal_eval(advised), *(((op, rule),) for rule in rules)):
        with castwise.autocast(Plan(compute="bf16", rules=base, ops=ops), device_type=DEVICE):
            assert torch.isfinite(call(op)).all()
    if op.endswith("_"):
        assert f"Call {op[:-1]!r} instead" in text
        with castwise.autocast(Plan(compute="bf16", rules=base), device_type=DEVICE):
            assert call(op[:-1] + "_", LOW.float()).dtype is torch.float32


def test_what_is_banned_on_other_devices_has_the_same_advice() -> None:
    for base in BASES:
        for device in autocast_types():
            for op, row in base_table(base, device).items():
                if row.rule == "banned":
                    Plan(compute="bf16", rules=base, ops=((op, "as_is" if op.endswith("_") else "fp32"),))


MODES = {"grad": torch.enable_grad, "no grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
@pytest.mark.parametrize("plan", [APEX, Plan(compute="bf16", ops={"exp_": "banned"})], ids=["apex", "ours"])
def test_operators_that_use_a_banned_one_inside_run(plan: Plan, mode: Any) -> None:
    x = LOW.clone().requires_grad_()
    truth = torch.logsumexp(LOW.double(), 0)
    with mode(), castwise.autocast(plan, device_type=DEVICE):
        out = torch.logsumexp(x, 0)
        other = torch.logsumexp(x.double(), 0)
        with pytest.raises(BannedOperatorError, match=r"aten::exp_ .*Call 'exp' instead"):
            LOW.clone().exp_()
    torch.testing.assert_close(out.double(), truth, rtol=2**-7, atol=0)  # one rounding to bf16
    torch.testing.assert_close(other, truth)
    if out.requires_grad:
        out.float().sum().backward()
        assert x.grad is not None


def test_a_custom_operator_may_use_what_its_callers_may_not() -> None:
    @torch.library.custom_op("castwise_test_bans::inside", mutates_args=())
    def inside(x: torch.Tensor) -> torch.Tensor:
        return x.clone().exp_()

    with castwise.autocast(APEX, device_type=DEVICE):
        assert inside(LOW).dtype is torch.bfloat16
