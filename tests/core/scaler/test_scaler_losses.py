"""A scale per named loss: gradients are never added at different scales, and each overflow is attributed to its loss."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import castwise
from castwise import GradScaler
from castwise.core.scaler import from_apex, to_apex
from castwise.errors import LossScaleError, StateError
from tests.here import DEVICE

INF = float("inf")


def test_gradients_of_two_losses_are_brought_to_one_scale() -> None:
    p = nn.Parameter(torch.ones(4))
    q = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([p, q], 0.0)
    scaler = GradScaler(DEVICE, init_scale=8.0)
    scaler._losses.get("b").scale.fill_(1024.0)
    for name, factor in (("a", 1.0), ("b", 10.0), ("a", 100.0)):
        scaler.backward((p * factor).sum() + (q.sum() if name == "b" else 0.0), name, params=[p, q])
    scaler.unscale_(optimizer)
    assert torch.equal(p.grad, torch.full((4,), 111.0))
    assert torch.equal(q.grad, torch.ones(4))


@pytest.mark.parametrize(("broken", "want"), [("a", (4.0, 8.0)), ("b", (8.0, 4.0)), ("", (8.0, 8.0))])
@pytest.mark.parametrize("order", list(itertools.permutations("ab")))
def test_each_loss_moves_by_its_own_outcome(
    broken: str, want: tuple[float, float], order: tuple[str, ...]
) -> None:
    p = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([p], 0.0)
    scaler = GradScaler(DEVICE, init_scale=8.0)
    for name in order:
        scaler.backward((p * (float("inf") if name == broken else 1.0)).sum(), name, params=lambda: [p])
    scaler.step(optimizer)
    assert scaler.result_of(optimizer).skipped == bool(broken)
    scaler.update()
    assert (scaler.get_scale("a"), scaler.get_scale("b")) == want


def test_named_losses_in_windows_of_their_own() -> None:
    p = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([p], 1.0)
    scaler = GradScaler(DEVICE, init_scale=8.0)
    scaler._losses.get("b").scale.fill_(2.0)
    scaler.scale(p.sum(), "b").backward()
    assert torch.equal(p.grad, torch.full((4,), 2.0))
    scaler.step(optimizer)
    assert torch.equal(p.detach(), torch.zeros(4))  # unscaled by b's own scale
    scaler.update()
    optimizer.zero_grad()
    fused = torch.optim.AdamW([p], 1.0, weight_decay=0.0, fused=True)
    scaler.scale(p.sum(), "b").backward()
    scaler.step(fused)
    assert torch.allclose(p.detach(), -torch.ones(4))
    assert torch.equal(p.grad, torch.ones(4))  # a fused step leaves unscaled gradients
    scaler.update()


def test_scale_refuses_a_second_loss_in_a_window() -> None:
    scaler = GradScaler(DEVICE)
    scaler.scale(torch.ones(()), "a")
    with pytest.raises(StateError, match=r"scaler\.backward"):
        scaler.scale(torch.ones(()), "b")


def test_named_losses_survive_saving() -> None:
    scaler = GradScaler(DEVICE, init_scale=8.0, hysteresis=2)
    scaler.scale(torch.ones(()))
    scaler._losses.get("b").scale.fill_(2.0)
    other = GradScaler(DEVICE, hysteresis=2)
    other.load_state_dict(scaler.state_dict())
    assert other.get_scale("b") == 2.0
    assert other.state_dict() == scaler.state_dict()


WINDOW = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(-8, 8), st.integers(0, 3)), min_size=1, max_size=6
)


@settings(max_examples=60)
@given(window=WINDOW, exponents=st.tuples(*[st.integers(-6, 20)] * 3), clear=st.booleans())
def test_any_mixture_of_losses_is_unscaled_exactly(
    window: list[tuple[str, int, int]], exponents: tuple[int, int, int], clear: bool
) -> None:
    """With integer factors and powers of two as scales every sum is exact, so the gradients must be exact."""
    p, q = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([p, q], 0.0)
    scaler = GradScaler(DEVICE, init_scale=2.0)
    for name, exponent in zip("abc", exponents, strict=True):
        scaler._losses.get(name).scale.fill_(2.0**exponent)
    want = [0.0, 0.0]
    for name, factor, reached in window:  # bit 0: reaches p; bit 1: reaches q
        loss = sum((x.sum() * factor for i, x in enumerate((p, q)) if reached >> i & 1), torch.zeros(()))
        if reached:
            scaler.backward(loss, name, params=[p, q])
            want = [w + factor * (reached >> i & 1) for i, w in enumerate(want)]
    if scaler._losses.is_first("d"):
        return  # no loss had gradients
    scaler.unscale_(optimizer)
    for parameter, value in zip((p, q), want, strict=True):
        got = torch.zeros(4) if parameter.grad is None else parameter.grad
        assert torch.equal(got, torch.full((4,), value))


@pytest.mark.sparse
@pytest.mark.parametrize("order", [1, -1], ids=["sparse first", "dense first"])
def test_sparse_and_dense_gradients_of_one_weight_add_up(order: int) -> None:
    """A tied embedding: one loss looks it up, another uses it as a matrix."""
    weight = nn.Parameter(torch.ones(4, 2))
    scaler = GradScaler(DEVICE, init_scale=8.0)
    looked_up = nn.functional.embedding(torch.tensor([1, 1]), weight, sparse=True).sum()
    for name, loss in zip("ab", (looked_up, (3 * weight).sum())[::order], strict=True):
        scaler.backward(loss, name, params=[weight])
    scaler.unscale_(torch.optim.SGD([weight], 0.1))
    assert weight.grad is not None
    assert weight.grad.to_dense().tolist() == [[3, 3], [5, 5], [3, 3], [3, 3]]


def test_an_overflow_counts_although_its_gradients_were_cleared() -> None:
    """As in a GAN: one network steps and clears before the other's loss is scaled in the same window."""
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    first, second = torch.optim.SGD([p], 0.1), torch.optim.SGD([q], 0.1)
    scaler = GradScaler(DEVICE, init_scale=8.0)
    scaler.backward((p * INF).sum(), "a", params=[p, q])
    scaler.step(first)
    first.zero_grad()
    scaler.backward(q.sum(), "b", params=[p, q])
    scaler.step(second)
    assert (scaler.result_of(first).skipped, scaler.result_of(second).skipped) == (True, False)
    assert torch.equal(q.detach(), torch.full((2,), 0.9))
    scaler.update()
    assert (scaler.get_scale("a"), scaler.get_scale("b")) == (4.0, 8.0)


def test_an_overflow_at_the_windows_scale_shrinks_that() -> None:
    """Each loss is finite at its own scale, but one overflows at the other's; the skipping must end."""
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], 0.0)
    scaler = GradScaler(DEVICE, init_scale=2.0**100)
    scaler._losses.get("b").scale.fill_(1.0)
    skipped = []
    for _ in range(80):
        scaler.backward(p.sum(), "a", params=[p])
        scaler.backward((p * 1e30).sum(), "b", params=[p])
        scaler.step(optimizer)
        skipped.append(scaler.result_of(optimizer).skipped)
        scaler.update()
        optimizer.zero_grad()
    assert skipped[0]
    assert not skipped[-1]
    assert scaler.get_scale("b") == 1.0


def test_a_scale_set_by_hand_is_the_windows_and_the_others_still_move() -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], 0.1)
    scaler = GradScaler(DEVICE, init_scale=8.0)
    scaler.backward(p.sum(), "a", params=[p])
    scaler.backward((p * INF).sum(), "b", params=[p])
    scaler.step(optimizer)
    scaler.update(2.0)
    assert (scaler.get_scale("a"), scaler.get_scale("b")) == (2.0, 4.0)
    scaler.update(16.0)  # no window is open, so it sets the default loss
    assert (scaler.get_scale(), scaler.get_scale("a")) == (16.0, 2.0)


def test_the_first_loss_of_a_window_costs_no_look_at_the_parameters() -> None:
    p = nn.Parameter(torch.ones(2))
    scaler = GradScaler(DEVICE, init_scale=8.0)

    def params() -> Any:
        raise AssertionError("looked")

    scaler.backward(p.sum(), "a", params=params)
    scaler.backward(p.sum(), "a", params=params)
    assert torch.equal(p.grad, torch.full((2,), 16.0))
    with pytest.raises(AssertionError, match="looked"):
        scaler.backward(p.sum(), "b", params=params)


def test_gradients_set_aside_come_back_when_a_backward_fails() -> None:
    p = nn.Parameter(torch.ones(2))
    scaler = GradScaler(DEVICE, init_scale=8.0)
    scaler.backward(p.sum(), "a", params=[p])
    with pytest.raises(RuntimeError, match="does not require grad"):
        scaler.backward(torch.ones(()), "b", params=[p])
    assert torch.equal(p.grad, torch.full((2,), 8.0))


@pytest.mark.sparse
def test_sparse_gradients_of_two_losses() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    dense = nn.Parameter(torch.ones(2))
    scaler = GradScaler(DEVICE, init_scale=8.0)
    scaler._losses.get("b").scale.fill_(2.0)
    everything = [*table.parameters(), dense]
    scaler.backward(table(torch.tensor([1])).sum() + dense.sum(), "a", params=everything)
    scaler.backward(table(torch.tensor([1, 2])).sum(), "b", params=everything)
    assert table.weight.grad.to_dense().tolist() == [[0, 0], [16, 16], [8, 8], [0, 0]]
    assert dense.grad.tolist() == [8, 8]


@pytest.mark.parametrize("plan", ["fp16-mixed", "fp16-master", "fp16-true+loss_scale.init=8", "naive"])
def test_losses_keep_apart_under_every_plan_with_a_scale(plan: str) -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with castwise.Amp(plan if "=" in plan else plan + "+loss_scale.init=8", device=DEVICE) as amp:
        amp.prepare(model, optimizer)
        assert amp.scaler is not None
        amp.scaler._losses.get("b").scale.fill_(2.0)
        for name, factor in (("a", 1), ("b", 2), ("a", 4)):
            amp.backward(factor * model(torch.ones(1, 2)).sum(), name)
        amp.unscale_(optimizer)
        assert optimizer.param_groups[0]["params"][0].grad.float().tolist() == [[7, 7], [7, 7]]


def test_a_loss_at_its_floor_is_named() -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], 0.1)
    scaler = GradScaler(DEVICE, init_scale=8.0, floor=1.0, patience=2)

    def train(steps: int) -> None:
        for _ in range(steps):
            scaler.backward(p.sum(), "a", params=[p])
            scaler.backward((p * INF).sum(), "b", params=[p])
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    train(3)
    with pytest.raises(LossScaleError, match="the loss scale of 'b' is at its floor, 1"):
        train(1)
    assert scaler.get_scale("a") == 8.0


def test_saving_in_the_middle_of_a_window_changes_nothing() -> None:
    scaler = GradScaler(DEVICE, init_scale=8.0)
    scaler._losses.get("b").scale.fill_(2.0)
    before = scaler.scale(torch.ones(()), "b")
    pickle.loads(pickle.dumps(scaler))
    scaler.state_dict()
    scaler.next_state(True)
    scaler.get_scale()
    assert scaler.scale(torch.ones(()), "b") == before == 2.0


def test_a_loss_first_used_after_loading_starts_as_without_saving() -> None:
    """The initial scale comes from the scaler, not from another loss's saved scale."""
    scaler = GradScaler(DEVICE, init_scale=8.0, hysteresis=3)
    scaler.load_state_dict({
        **scaler.state_dict(),
        "scale": 2.0,
        "_growth_tracker": 5,
        "hysteresis_tracker": 2,
    })
    scaler.scale(torch.ones(()), "b")  # before the default loss is used
    assert scaler.get_scale("b") == 8.0
    state = scaler.state_dict()
    assert (state["scale"], state["_growth_tracker"], state["hysteresis_tracker"]) == (2.0, 5, 2)
    assert state["losses"] == {"b": {"scale": 8.0, "_growth_tracker": 0, "hysteresis_tracker": 0}}


def test_asking_for_a_loss_does_not_make_one() -> None:
    scaler = GradScaler(DEVICE, init_scale=8.0)
    assert scaler.get_scale("lsos") == 8.0
    scaler.next_state(True, "lsos")
    assert "losses" not in scaler.state_dict()


def test_the_order_of_losses_survives_uses_in_another_order() -> None:
    """Apex identifies loss scalers by position."""
    saved = from_apex({f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": i} for i in range(4)})
    scaler = GradScaler(DEVICE)
    scaler.load_state_dict(saved)
    for name in ("loss3", "loss1"):
        scaler.scale(torch.ones(()), name)
        scaler.load_state_dict(scaler.state_dict())
    scaler.scale(torch.ones(()), "loss2")
    assert [entry["loss_scale"] for entry in to_apex(scaler.state_dict()).values()] == [1, 2, 4, 8]


def test_a_list_of_losses_is_one_backward() -> None:
    """``scale`` accepts a list as well."""
    weight = nn.Parameter(torch.ones(2))
    scaler = GradScaler(DEVICE, init_scale=8.0)
    scaler.backward([weight.sum(), 2 * weight.sum()], params=[weight])  # type: ignore[arg-type]
    assert weight.grad is not None
    assert weight.grad.tolist() == [24.0, 24.0]
