"""Regions entered by hand also apply when backward recomputes a checkpointed part, wherever backward is called."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import castwise
from castwise import Plan
from castwise.core.casting import frames, kernels
from tests.here import DEVICE

X = torch.linspace(-1, 1, 16).reshape(4, 4)
P = Plan(compute="bf16", ops={"sigmoid": "fp32"})


class Piece:
    """A function to checkpoint that records the dtype of each run."""

    def __init__(self) -> None:
        self.runs: list[torch.dtype] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.sigmoid(x @ x)
        self.runs.append(y.dtype)
        return y


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_plain_backward_after_the_region(reentrant: bool) -> None:
    by_plan, native = Piece(), Piece()
    region = castwise.autocast(P, device_type=DEVICE)
    x = X.clone().requires_grad_()
    with set_checkpoint_early_stop(False):
        with region:
            loss = checkpoint(by_plan, x, use_reentrant=reentrant).sum()
        with castwise.autocast("bf16", device_type=DEVICE):
            other = checkpoint(native, x, use_reentrant=reentrant).float().sum()
        (loss + other).backward()
    assert by_plan.runs == [torch.float32, torch.float32]
    assert native.runs == [torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize("reentrant", [False, True])
def test_regions_inside_regions(reentrant: bool) -> None:
    outer, inner = Piece(), Piece()
    p = castwise.autocast(P, device_type=DEVICE)
    q = castwise.autocast(Plan(compute="bf16", ops={"sigmoid": "as_is", "log": "fp32"}), device_type=DEVICE)
    x = X.clone().requires_grad_()
    with set_checkpoint_early_stop(False):
        with p:
            y = checkpoint(outer, x, use_reentrant=reentrant)
            with q:
                y = y + checkpoint(inner, x, use_reentrant=reentrant)
        y.sum().backward()
    assert outer.runs == [torch.float32] * 2
    assert inner.runs == [torch.bfloat16] * 2


INNER: dict[str, Callable[[], Any]] = {
    "native": lambda: castwise.autocast("bf16", device_type=DEVICE),
    "torch's": lambda: torch.autocast(DEVICE, dtype=torch.bfloat16),
    "off": lambda: torch.autocast(DEVICE, enabled=False),
    "fp32": lambda: castwise.autocast("fp32", device_type=DEVICE),
    "another override": lambda: castwise.autocast(
        Plan(compute="bf16", ops={"sigmoid": "as_is"}), device_type=DEVICE
    ),
}


@pytest.mark.parametrize("inner", INNER.values(), ids=INNER.keys())
@pytest.mark.parametrize("open_still", [False, True], ids=["left", "open"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_part_is_recomputed_as_it_ran_whichever_block_is_open_meanwhile(
    inner: Any, open_still: bool, reentrant: bool
) -> None:
    """A part is recomputed as it ran. A device runs backward on its own thread, where no region is open."""
    pieces = Piece(), Piece(), Piece()

    def part(piece: Piece) -> torch.Tensor:
        out: torch.Tensor = checkpoint(piece, x, use_reentrant=reentrant)
        return out.float()

    x = X.clone().requires_grad_()
    with set_checkpoint_early_stop(False):
        with castwise.autocast(P, device_type=DEVICE):
            loss = part(pieces[0])
            with inner():
                loss = loss + part(pieces[1])
            loss = (loss + part(pieces[2])).sum()
            if open_still:
                loss.backward()
        if not open_still:
            loss.backward()
    for piece in pieces:
        assert len(piece.runs) == 2
        assert len(set(piece.runs)) == 1


def test_a_backward_that_raised_leaves_no_region_behind() -> None:
    def fail(_: torch.Tensor) -> None:
        raise ZeroDivisionError

    model = torch.nn.Linear(4, 4)
    with castwise.Amp(P, device=DEVICE) as amp:
        amp.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        model.weight.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            amp.backward(model(X).sum())
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            assert torch.sigmoid(X @ X).dtype is torch.bfloat16


@pytest.mark.parametrize("own", ["bf16", "bf16-mixed", torch.bfloat16], ids=str)
@pytest.mark.parametrize("open_still", [False, True], ids=["left", "open"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_plain_block_that_a_part_opens_itself_is_plain_when_it_is_recomputed(
    reentrant: bool, open_still: bool, own: Any
) -> None:
    inner = Piece()

    def part(x: torch.Tensor) -> torch.Tensor:
        with castwise.autocast(own, device_type=DEVICE):
            return inner(x)

    x = X.clone().requires_grad_()
    with set_checkpoint_early_stop(False):
        with castwise.autocast(P, device_type=DEVICE):
            loss = checkpoint(part, x, use_reentrant=reentrant).float().sum()
            if open_still:
                loss.backward()
        if not open_still:
            loss.backward()
    assert inner.runs == [torch.bfloat16] * 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_of_blocks_that_begin_together_the_inner_one_counts(reentrant: bool) -> None:
    piece, x = Piece(), X.clone().requires_grad_()
    with set_checkpoint_early_stop(False):
        with (
            castwise.autocast(
                Plan(compute="bf16", ops={"sigmoid": "as_is", "sin": "fp32"}), device_type=DEVICE
            ),
            castwise.autocast(P, device_type=DEVICE),
        ):
            loss = checkpoint(piece, x, use_reentrant=reentrant).float().sum()
        loss.backward()
    assert piece.runs == [torch.float32] * 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_kernels_of_a_block_that_is_gone_are_there_for_its_backward_and_no_longer(reentrant: bool) -> None:
    piece, weight = Piece(), torch.nn.Parameter(X.clone())
    optimizer = torch.optim.SGD([weight], 0.1)
    with set_checkpoint_early_stop(False):
        with castwise.autocast(P, device_type=DEVICE):
            loss = checkpoint(piece, weight, use_reentrant=reentrant).float().sum()
        gc.collect()
        assert "sigmoid" in kernels.registered(DEVICE)
        loss.backward()
    assert piece.runs == [torch.float32] * 2
    for _ in range(frames._STEPS):
        assert "sigmoid" in kernels.registered(DEVICE)
        optimizer.step()
    assert "sigmoid" not in kernels.registered(DEVICE)
    with castwise.autocast(P, device_type=DEVICE), torch.no_grad():
        piece(X)
    assert "sigmoid" not in kernels.registered(DEVICE)
