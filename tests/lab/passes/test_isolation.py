"""Experiments leave no trace, and one seed determines every random generator."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import castwise
from castwise.errors import WorkloadError
from castwise.lab.passes.isolation import copied, seed_all, undisturbed
from castwise.lab.passes.regions import find_parts
from tests.here import DEVICE


def _state() -> tuple[object, ...]:
    return (
        random.getstate(),
        tuple(np.random.get_state()[1]),  # type: ignore[arg-type]
        tuple(torch.get_rng_state().tolist()),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        torch.is_grad_enabled(),
    )


def _disturb() -> None:
    seed_all(99)
    random.random()
    np.random.rand(3)
    torch.rand(3)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark


def test_everything_is_given_back() -> None:
    before = _state()
    with undisturbed():
        _disturb()
        assert _state() != before
    assert _state() == before


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_everything_is_given_back_after_a_failure(error: type[BaseException]) -> None:
    before = _state()

    def fail() -> None:
        with undisturbed():
            _disturb()
            raise error

    with pytest.raises(error):
        fail()
    assert _state() == before


def test_deterministic_algorithms_that_the_user_wants_stay_wanted() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with undisturbed():
            torch.use_deterministic_algorithms(False)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_gradients_flow_inside_whatever_the_mode_outside() -> None:
    with torch.no_grad():
        with undisturbed():
            assert torch.is_grad_enabled()
            assert (torch.ones(1, requires_grad=True) * 2).requires_grad
        assert not torch.is_grad_enabled()


def test_gradients_flow_inside_inference_mode() -> None:
    with torch.inference_mode():
        with undisturbed():
            assert (torch.ones(1, requires_grad=True) * 2).requires_grad
        assert torch.is_inference_mode_enabled()


def test_ambient_autocast_is_off_inside_and_on_again_outside() -> None:
    """The reference is fp32, so the caller's autocast region must not apply to it."""
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        with undisturbed():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
        assert torch.is_autocast_enabled(DEVICE)


def test_random_numbers_go_on_as_if_nothing_had_been() -> None:
    seed_all(5)
    want = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    seed_all(5)
    with undisturbed():
        _disturb()
    assert [random.random(), float(np.random.rand()), float(torch.rand(()))] == want


def test_a_seed_settles_python_numpy_and_torch() -> None:
    def draw(seed: int) -> tuple[float, float, float]:
        seed_all(seed)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    assert draw(1) == draw(1)
    assert all(a != b for a, b in zip(draw(1), draw(2), strict=True))
    draw(2**32 - 1)  # the largest seed that all three generators accept


# --- the caller's model ------------------------------------------------------------------------------------------


class Own(nn.Module):
    """A module that changes its mode, attributes and buffers in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("cache", None)
        self.calls = 0
        self.known: dict[str, int] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.eval()
        self.calls += 1
        self.known["calls"] = self.calls
        self.count = self.count + 1
        self.cache = x.detach()
        self.mean += 1
        self.register_buffer("late", x.detach(), persistent=False)
        return self.layer(x)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def _batches(_seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield torch.randn(16, 8), torch.randint(4, (16,))


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def _parity(model: nn.Module, loss: Any = _loss, **more: Any) -> Any:
    return castwise.parity(model, loss, **{"batches": _batches, "plan": "bf16-mixed", **more})


def _tune(model: nn.Module, loss: Any = _loss, **more: Any) -> Any:
    more.pop("plan", None)
    return castwise.tune(
        model=model,
        loss=loss,
        **{"batches": _batches, "optimizer": _sgd, "budget_s": 10.0, "memory": False, **more},
    )


CALLS = pytest.mark.parametrize("call", [_parity, _tune])


@CALLS
@pytest.mark.parametrize("steps", [False, True])
def test_a_loss_of_the_model_itself_is_refused_and_the_model_is_as_it_was(call: Any, steps: bool) -> None:
    model = Own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attributes = [dict(vars(module)) for module in model.modules()]
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def loss(_copy: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        found = _loss(model, batch)
        if steps:
            optimizer.zero_grad()
            found.backward()
            optimizer.step()
        return found

    with pytest.raises(
        WorkloadError, match=r"a backward reaches the original Own.*must call the model that it is"
    ):
        call(model, loss)
    assert [vars(module) for module in model.modules()] == attributes
    assert model.known == {}
    assert model.training
    assert {name: id(b) for name, b in model.named_buffers()} == {name: id(b) for name, b in buffers.items()}
    assert not any(b.any() for b in model.buffers())
    assert all(torch.equal(weights[name], p) and p.grad is None for name, p in model.named_parameters())
    _loss(model, next(_batches())).backward()  # backward on the original is allowed again


def test_a_model_that_does_not_call_itself_may_do_as_it_likes() -> None:
    model = Own()
    assert _parity(model, optimizer=_sgd)
    assert (model.calls, model.training, model.cache) == (0, True, None)


@CALLS
@pytest.mark.parametrize("model", [nn.LazyLinear(4), nn.Sequential(nn.Linear(8, 4), nn.LazyBatchNorm1d())])
def test_a_model_without_shapes_is_refused(call: Any, model: nn.Module) -> None:
    with pytest.raises(
        WorkloadError, match="has no shape yet, since the model is lazy; run it once on a batch"
    ):
        call(model)


@CALLS
def test_batches_that_fail_are_named(call: Any) -> None:
    def broken(_seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        yield next(_batches())
        raise ValueError("the disk is gone")

    with pytest.raises(
        WorkloadError, match=r"batches failed: ValueError: the disk is gone \(test_isolation.py, line"
    ):
        call(nn.Linear(8, 4), batches=broken)


def _broken(params: Any) -> Any:
    raise ValueError("no such rate")


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (
            _sgd(nn.Linear(8, 4).parameters()),
            r"optimizer must be a function, such as lambda params: .*, got SGD",
        ),
        (lambda _params: None, r"optimizer\(params\) returned NoneType, not a torch.optim.Optimizer"),
        (_broken, r"optimizer\(params\) failed: ValueError: no such rate \(test_isolation.py, line"),
    ],
)
def test_what_is_no_optimizer_is_named(optimizer: Any, text: str) -> None:
    with pytest.raises(WorkloadError, match=f"^parity: {text}"):
        _parity(nn.Linear(8, 4), optimizer=optimizer)


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("how", ["scripted", "traced", "scripted inside"])
def test_a_copy_of_a_model_with_a_scripted_part_can_be_trained(how: str) -> None:
    """A plain deep copy of a ScriptModule has no leaves, which optimizers refuse."""

    def build(device: Any = "cpu") -> nn.Module:
        torch.manual_seed(0)
        part: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        part = torch.jit.trace(part, torch.ones(1, 4)) if how == "traced" else torch.jit.script(part)
        inner = nn.Sequential(nn.Linear(4, 4), part) if how == "scripted inside" else part
        return nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(4, 3)).to(device)

    model = build(DEVICE)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    twin = copied(model, "tune")
    optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    twin(torch.ones(2, 4, device=DEVICE)).square().sum().backward()
    optimizer.step()
    after = list(twin.parameters())
    assert all(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert all(map(torch.equal, before, model.parameters()))
    assert [parameter.grad for parameter in model.parameters()] == [None] * len(before)
    parts = find_parts(twin, lambda: twin(torch.ones(2, 4, device=DEVICE)))  # a warning would be an error
    assert {"0", "2"} <= {part.pattern for part in parts}
