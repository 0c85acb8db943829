"""Casts outside of any region. tests/compat compares them with Apex itself."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import castwise
from castwise import Plan
from castwise.core.casting import AmbientAutocast
from castwise.errors import BannedOperatorError, PlanError, StateError
from tests.here import DEVICE

O1 = Plan(compute="bf16", rules="apex")
X = torch.ones(2, 2)


def test_all_code_is_cast_until_it_is_left() -> None:
    casts = AmbientAutocast(O1, DEVICE)
    for _ in range(2):  # it can be entered again
        assert not casts.entered
        assert (X @ X).dtype is torch.float32
        casts.enter()
        assert casts.entered
        with pytest.raises(StateError, match=f"is already active on '{DEVICE}'; leave it first"):
            AmbientAutocast(O1, DEVICE).enter()
        assert (X @ X).dtype is torch.bfloat16
        with casts.suspended():
            assert (X @ X).dtype is torch.float32
        casts.leave()
    casts.leave()  # a second leave() has no effect


def test_the_backward_of_a_function_in_python_is_cast_too() -> None:
    seen = []

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen.append((gradient @ gradient).dtype)
            return gradient

    weight = torch.ones(2, 2, requires_grad=True)
    casts = AmbientAutocast(O1, DEVICE)
    casts.enter()
    Identity.apply(weight).sum().backward()
    casts.leave()
    Identity.apply(weight).sum().backward()
    assert seen == [torch.bfloat16, torch.float32]


def test_a_ban_says_what_the_library_says() -> None:
    probability = torch.full((2,), 0.5).bfloat16()
    for messages, said in (
        ({"binary_cross_entropy": "use another"}, "^use another$"),
        (None, "under a plan that bans it"),
    ):
        casts = AmbientAutocast(O1, DEVICE, messages=messages)
        casts.enter()
        try:
            with pytest.raises(BannedOperatorError, match=said):
                torch.nn.functional.binary_cross_entropy(probability, probability)
        finally:
            casts.leave()


def test_it_is_left_where_it_was_entered() -> None:
    casts, found = AmbientAutocast(O1, DEVICE), []

    def leave() -> None:
        with pytest.raises(StateError, match="must end on the thread that began them") as error:
            casts.leave()
        found.append(error)

    casts.enter()
    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert len(found) == 1
    with castwise.autocast("bf16", device_type=DEVICE):
        leave()
    assert casts.entered
    casts.leave()


def test_a_plan_that_casts_nothing_is_refused() -> None:
    with pytest.raises(
        PlanError, match="this plan casts no operators; give a plan whose compute is bf16 or fp16"
    ):
        AmbientAutocast(Plan(compute="fp32"), DEVICE)
