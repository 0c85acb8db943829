"""Optimizers that made steps before ``initialize``, fp64 models, and closures."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from castwise.bridges.compat.apex import amp, optimizers
from tests.soak import each_value

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, 1e-2, eps=1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2, eps=1e-4),
    "FusedLAMB": lambda p: optimizers.FusedLAMB(p, 1e-2),
    "FusedNovoGrad": lambda p: optimizers.FusedNovoGrad(p, 1e-2),
}


def batch(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=draw).to(dtype), torch.randn(8, 2, generator=draw)


def train(run: Callable[[Tensor], Tensor], optimizer: Any, steps: range, dtype: torch.dtype) -> None:
    for step in steps:
        x, y = batch(step, dtype)
        optimizer.zero_grad()
        functional.mse_loss(run(x).to(torch.float32), y).backward()
        optimizer.step()


def begun(kind: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    """Return a model and its optimizer after two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)).to(dtype)
    optimizer = OPTIMIZERS[kind](model.parameters())
    train(model, optimizer, range(2), dtype)
    return model, optimizer


def moved_by_hand(kind: str, model: nn.Module, optimizer: Any, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    """Return copies of the model and optimizer in another format; torch casts the state when loading."""
    model = copy.deepcopy(model).to(dtype)
    other = OPTIMIZERS[kind](model.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return model, other


def go_on(model: nn.Module, optimizer: Any) -> list[Tensor]:
    for step in range(2, 5):
        x, y = batch(step)
        optimizer.zero_grad()
        with amp.scale_loss(functional.mse_loss(model(x), y), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    return [p.detach() for p in amp.master_params(optimizer)]


def state_dtypes(optimizer: Any) -> set[torch.dtype]:
    """Return the dtypes of state tensors that have a dimension."""
    return {
        value.dtype
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.dim()
    }


# --- optimizers with state ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_o3_takes_the_state_of_an_optimizer_along(kind: str) -> None:
    model, optimizer = begun(kind)
    by_hand, other = moved_by_hand(kind, model, optimizer, torch.float16)
    amp.initialize(model, optimizer, opt_level="O3", verbosity=0)
    assert state_dtypes(optimizer) == {torch.float16}
    train(by_hand, other, range(2, 5), torch.float16)
    got = go_on(model, optimizer)
    assert all(bool(p.isfinite().all()) for p in got)
    assert all(torch.equal(p, q) for p, q in zip(got, by_hand.parameters(), strict=True))


@each_value()
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_other_levels_keep_it_as_it_was(kind: str, level: str) -> None:
    model, optimizer = begun(kind)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    after = optimizer.state_dict()["state"]
    for index, entry in before.items():
        for name, value in entry.items():
            assert torch.equal(torch.as_tensor(after[index][name]), torch.as_tensor(value)), name
    assert state_dtypes(optimizer) == {torch.float32}
    go_on(model, optimizer)


# --- fp64 models --------------------------------------------------------------------------------------------


@each_value()
@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_fp64_models_become_what_the_level_stores(kind: str, level: str) -> None:
    """The result is the same as with a conversion to fp32 first, including the optimizer's state."""
    model, optimizer = begun(kind, torch.float64)
    by_hand, other = moved_by_hand(kind, model, optimizer, torch.float32)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    got = go_on(model, optimizer)
    assert torch.float64 not in {p.dtype for p in model.parameters()} | state_dtypes(optimizer)
    if level == "O0":
        train(by_hand, other, range(2, 5), torch.float32)
        want = [p.detach() for p in by_hand.parameters()]
    else:
        amp.initialize(by_hand, other, opt_level=level, verbosity=0)
        want = go_on(by_hand, other)
    assert all(torch.equal(p, q) for p, q in zip(got, want, strict=True))


@pytest.mark.parametrize("options", [{"opt_level": "O1"}, {"opt_level": "O0", "cast_model_type": False}])
def test_levels_that_cast_no_model_refuse_fp64(options: dict[str, Any]) -> None:
    model, optimizer = begun("SGD", torch.float64)
    with pytest.raises(TypeError, match=r"Received torch\.DoubleTensor"):
        amp.initialize(model, optimizer, verbosity=0, **options)
    assert {p.dtype for p in model.parameters()} == {torch.float64}


# --- closures -----------------------------------------------------------------------------------------------


def evaluate(model: nn.Module, optimizer: Any, factor: float = 1.0) -> Callable[[], Tensor]:
    x, y = batch(0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y) * factor
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return loss

    return closure


def lbfgs() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    return model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)


def test_o1_runs_a_closure_without_casts_as_apex_does() -> None:
    """Training is bitwise equal to fp32, since a loss scale that is a power of two is undone exactly."""
    model, optimizer = lbfgs()
    x, y = batch(0)

    def plain() -> Tensor:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(3):
        want_loss = optimizer.step(plain)
    want = [p.detach() for p in model.parameters()]
    model, optimizer = amp.initialize(*lbfgs(), opt_level="O1", verbosity=0)
    for _ in range(3):
        loss = optimizer.step(evaluate(model, optimizer))
        assert model(x).dtype is torch.float16  # casts are off only inside the step
    assert loss.dtype is torch.float32
    assert torch.equal(loss, want_loss)
    assert all(torch.equal(p.detach(), q) for p, q in zip(model.parameters(), want, strict=True))
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 12


@pytest.mark.parametrize(
    "options", [{"opt_level": "O0"}, {"opt_level": "O0", "loss_scale": "dynamic"}, {"opt_level": "O3"}]
)
def test_levels_without_masters_take_closures(options: dict[str, Any]) -> None:
    model, optimizer = begun("SGD")
    amp.initialize(model, optimizer, verbosity=0, **options)
    losses = [float(optimizer.step(evaluate(model, optimizer)).detach()) for _ in range(5)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_after_an_overflow_a_closure_is_refused_until_that_step_is_skipped(level: str) -> None:
    model, optimizer = begun("SGD")
    amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    before = [p.detach().clone() for p in model.parameters()]
    evaluate(model, optimizer, float("inf"))()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Currently, Amp does not support closure use with optimizers"):
            optimizer.step(evaluate(model, optimizer))
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    optimizer.step(evaluate(model, optimizer))
    assert not torch.equal(model[0].weight, before[0])


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_a_closure_whose_gradients_overflow_changes_no_weight(level: str) -> None:
    """In Apex the step was made and the weights became NaN."""
    model, optimizer = begun("SGD")
    amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(
        RuntimeError, match=r"overflowed inside the step; the loss scale is 32768\.0 now\. Step again"
    ):
        optimizer.step(evaluate(model, optimizer, float("inf")))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    optimizer.step(evaluate(model, optimizer))
    assert not torch.equal(model[0].weight, before[0])


def test_o2_refuses_closures() -> None:
    model, optimizer = begun("SGD")
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with pytest.raises(RuntimeError, match="Currently, Amp does not support closure use with optimizers"):
        optimizer.step(lambda: None)
