"""Gradients that contain the loss scale and are replaced or cleared by other code."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import castwise
from castwise.core import _torch
from castwise.errors import LossScaleError, StateError
from tests.here import DEVICE
from tests.soak import each_value

PLANS = ["fp16-mixed", "fp16-master", "O1", "O2", "fp16-true+loss_scale.init=1024"]


class Net(nn.Module):
    """Parameters in another order than the optimizer's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(self.a(x)))


def make(plan: str, model: nn.Module | None = None) -> tuple[castwise.Amp, nn.Module, torch.optim.Optimizer]:
    model = Net() if model is None else model
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.SGD([{"params": some} for some in (decayed, others) if some], 1.0)
    # This scale causes no overflow.
    plan += "" if "init" in plan or "bf16" in plan else "+loss_scale.init=1024"
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model, optimizer)
    return amp, model, optimizer


def backward(amp: castwise.Amp, model: nn.Module, by: str) -> None:
    loss = model(torch.ones(2, 4)).square().mean()
    amp.backward(loss) if by == "backward" else amp.scale(loss).backward()


def with_grad(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.grad is not None]


def one_by_one(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[nn.Module], None]:
    def replace(model: nn.Module) -> None:
        for parameter in with_grad(model):
            parameter.grad = change(parameter.grad)

    return replace


def merged(model: nn.Module) -> None:
    """Compute all new gradients before setting them, as gradient surgery does."""
    grads = [parameter.grad for parameter in with_grad(model)]
    fresh = [0.5 * (grad + grad.sign()) for grad in grads]
    for parameter, grad in zip(with_grad(model), fresh, strict=True):
        parameter.grad = grad


def flat(model: nn.Module) -> None:
    """Replace the gradients by views of one new buffer, as compression and bucketed reductions do."""
    buffer = torch.cat([parameter.grad.flatten() for parameter in with_grad(model)])
    for parameter in with_grad(model):
        part, buffer = buffer.split([parameter.numel(), buffer.numel() - parameter.numel()])
        parameter.grad = part.view_as(parameter)


def hidden_first(model: nn.Module) -> None:
    """Clear one gradient, as when a layer is frozen, and replace the others."""
    model.a.weight.grad = None
    one_by_one(torch.Tensor.clone)(model)


def twice(model: nn.Module) -> None:
    for _ in range(2):
        one_by_one(torch.Tensor.clone)(model)
        gc.collect()


REPLACED = {
    "cloned": one_by_one(torch.Tensor.clone),
    "scaled": one_by_one(lambda grad: grad * 0.5),
    "finite": one_by_one(torch.nan_to_num),
    "kept": one_by_one(lambda grad: grad.detach().clone()),
    "merged": merged,
    "flat": flat,
    "hidden": hidden_first,
    "twice": twice,
}


@each_value(2)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("by", ["backward", "scale"])
@pytest.mark.parametrize("how", REPLACED)
@pytest.mark.parametrize("who", ["own", "stranger"])
def test_what_replaces_scaled_gradients_is_not_stepped(plan: str, by: str, how: str, who: str) -> None:
    amp, model, optimizer = make(plan)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    backward(amp, model, by)
    REPLACED[how](model)
    if who == "own":
        with pytest.raises(
            StateError, match=r"SGD\.step\(\): (its gradients were replaced|the loss scale is still in)"
        ):
            optimizer.step()
    else:
        stranger = torch.optim.SGD(model.parameters(), 1.0)
        with pytest.raises(
            StateError, match=r"SGD\.step\(\): (the loss scale is still in|.* is stored in float16)"
        ):
            stranger.step()
    for call in (amp.step, amp.unscale_):
        with pytest.raises(StateError, match=r"were changed since the backward, or replaced"):
            call(optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    # Follow the advice in the errors.
    model.zero_grad()
    backward(amp, model, by)
    amp.unscale_(optimizer)
    REPLACED[how](model)
    assert amp.step(optimizer)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
    amp.close()


def test_one_gradient_alone_is_owned_too() -> None:
    amp, model, optimizer = make("fp16-mixed", nn.Linear(4, 1, bias=False))
    amp.backward(model(torch.ones(2, 4)).square().mean())
    model.weight.grad = model.weight.grad.clone()
    with pytest.raises(StateError, match=r"were replaced after amp\.backward.*optimizer\.zero_grad\(\)"):
        optimizer.step()


def by_hand(model: nn.Module, order: Callable[[Iterable[Any]], Iterable[Any]]) -> None:
    for parameter in order(list(model.parameters())):
        parameter.grad = None


CLEARED: dict[str, Callable[[nn.Module, torch.optim.Optimizer], None]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer, zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "model, zeros": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "parts": lambda model, optimizer: [part.zero_grad() for part in model.children()] and None,
    "around": lambda model, optimizer: nn.Sequential(model).zero_grad(set_to_none=False),
    "hand": lambda model, optimizer: by_hand(model, iter),
    "hand, backwards": lambda model, optimizer: by_hand(model, reversed),
    "another optimizer": lambda model, optimizer: torch.optim.Adam(model.parameters()).zero_grad(
        set_to_none=False
    ),
}


@each_value(2)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("by", ["backward", "scale"])
@pytest.mark.parametrize("how", CLEARED)
@pytest.mark.parametrize("then", ["set", "copied", "computed"])
def test_gradients_of_ones_own_are_stepped_once_the_others_are_cleared(
    plan: str, by: str, how: str, then: str
) -> None:
    """Reptile, federated averaging and evolution strategies do this."""
    amp, model, optimizer = make(plan)
    for _ in range(2):
        backward(amp, model, by)
        CLEARED[how](model, optimizer)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        if then == "computed":
            model(torch.ones(2, 4)).sum().backward()
        else:
            for parameter in model.parameters():
                delta = torch.full_like(parameter, 0.125, dtype=parameter.grad_dtype or parameter.dtype)
                if then == "copied" and parameter.grad is not None:
                    parameter.grad.copy_(delta)
                else:
                    parameter.grad = delta
        optimizer.step()
        if then != "computed":
            for was, parameter in zip(before, model.parameters(), strict=True):
                torch.testing.assert_close(parameter.detach(), was - 0.125, rtol=1e-3, atol=1e-3)
        model.zero_grad()
    amp.close()


def test_zeros_by_hand_are_at_any_scale() -> None:
    amp, model, optimizer = make("fp16-mixed")
    amp.backward(model(torch.ones(2, 4)).square().mean())
    for parameter in model.parameters():
        parameter.grad.zero_()
    optimizer.step()


def test_replaced_gradients_are_not_scaled_a_second_time() -> None:
    """A factor applied to the gradients between two backward passes is kept."""
    amp, model, optimizer = make("fp16-mixed+loss_scale.init=64")
    plain = Net()
    for factor in (1.0, 0.5):
        for which, run in ((model, amp.backward), (plain, torch.Tensor.backward)):
            if factor != 1.0:
                for parameter in which.parameters():
                    parameter.grad = parameter.grad * factor
            run(which(torch.ones(2, 4)).square().mean())
    amp.unscale_(optimizer)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-2, atol=1e-3)


def test_replaced_gradients_come_to_a_scale_of_one_at_close() -> None:
    amp, model, _ = make("fp16-mixed")
    plain = Net()
    amp.backward(model(torch.ones(2, 4)).square().mean())
    one_by_one(torch.Tensor.clone)(model)
    amp.close()
    plain(torch.ones(2, 4)).square().mean().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-2, atol=1e-3)


class Wrapper(torch.optim.Optimizer):
    """A wrapper like Opacus' DPOptimizer: never runs torch's constructor, and step replaces each gradient first."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base

    param_groups = property(lambda self: self.base.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.base.state)  # type: ignore[assignment]
    defaults = property(lambda self: self.base.defaults)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad + 0.25
        return self.base.step()


@pytest.mark.parametrize("plan", ["fp16-mixed", "fp16-master"])
def test_a_wrapper_that_replaces_gradients_in_its_step(plan: str) -> None:
    model = Net()
    base = torch.optim.SGD(model.parameters(), 1.0)
    wrapper = Wrapper(base)
    amp = castwise.Amp(plan, device=DEVICE)
    with pytest.raises(StateError, match="prepare the optimizer inside it"):
        amp.prepare(model, wrapper)
    amp.prepare(model, base)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    backward(amp, model, "backward")
    with pytest.raises(
        StateError, match=r"SGD\.step\(\): (its gradients were replaced|the loss scale is still)"
    ):
        wrapper.step()
    assert all(map(torch.equal, before, model.parameters()))
    model.a.weight.grad_sample = torch.ones(2, 4, 4)
    with pytest.raises(StateError, match=r"per-sample gradients \(grad_sample\).*'bf16-mixed'"):
        amp.unscale_(base)
    amp.close()


@pytest.mark.sparse
def test_sparse_gradients_that_are_replaced() -> None:
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    amp = castwise.Amp("fp16-mixed+loss_scale.init=1024", device=DEVICE)
    amp.prepare(model, optimizer)
    for _ in range(2):  # torch replaces the first sparse tensor by a new one
        amp.backward(model(torch.tensor([1, 2])).square().mean())
    assert amp.step(optimizer)
    optimizer.zero_grad()
    amp.backward(model(torch.tensor([1, 2])).square().mean())
    one_by_one(torch.Tensor.clone)(model)
    with pytest.raises(StateError, match="replaced"):
        optimizer.step()


def test_nobody_is_told_of_clearing_when_the_last_session_has_gone() -> None:
    for _ in range(3):  # objects held by the sessions' hooks are freed last
        gc.collect()
    before = len(_torch.optimizers.clearing._looks)
    first, *_ = make("fp16-mixed")
    second, *held = make("bf16-mixed")
    assert hasattr(nn.Module.zero_grad, "__wrapped__")
    first.close()
    assert len(_torch.optimizers.clearing._looks) == before + 1
    alive = weakref.ref(second)
    del second, held
    gc.collect()
    assert alive() is None
    assert len(_torch.optimizers.clearing._looks) == before
    if not before:
        assert not hasattr(nn.Module.zero_grad, "__wrapped__")


def test_a_compiled_function_may_clear_gradients() -> None:
    amp, model, optimizer = make("fp16-mixed")

    @torch.compile(backend="eager")
    def clear() -> None:
        model.zero_grad()
        optimizer.zero_grad()

    for _ in range(2):
        amp.backward(model(torch.ones(2, 4)).square().mean())
        clear()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    amp.close()


# --- gradients that are returned, and set by hand -----------------------------------------------------------------


def _set(model: nn.Module, grads: Iterable[torch.Tensor]) -> None:
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        parameter.grad = grad


def _by_autograd(amp: castwise.Amp, model: nn.Module) -> list[torch.Tensor]:
    loss = model(torch.ones(2, 4)).square().mean()
    return [*torch.autograd.grad(amp.scale(loss), [*model.parameters()])]


def _by_func(amp: castwise.Amp, model: nn.Module) -> list[torch.Tensor]:
    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return amp.scale(torch.func.functional_call(model, params, (torch.ones(2, 4),)).square().mean())

    return [*torch.func.grad(loss)(dict(model.named_parameters())).values()]


@pytest.mark.parametrize("by", [_by_autograd, _by_func])
def test_gradients_that_a_scaled_loss_returned_hold_the_scale(by: Any) -> None:
    amp, model, optimizer = make("fp16-mixed+loss_scale.init=64")
    plain = Net()
    for again in range(3):
        _set(model, by(amp, model))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(
            StateError, match=r"the loss scale is still in its gradients|still held the loss scale"
        ):
            optimizer.step()
        assert all(map(torch.equal, before, model.parameters()))
        plain.load_state_dict(model.state_dict())
        plain(torch.ones(2, 4)).square().mean().backward()
        assert not amp.step(optimizer).skipped
        for was, parameter, other in zip(before, model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(was - parameter, other.grad, rtol=0.02, atol=1e-3)
        plain.zero_grad()
        if again:
            optimizer.zero_grad()
    amp.close()


def test_returned_gradients_may_be_added_to_others_at_the_same_scale() -> None:
    amp, model, optimizer = make("fp16-mixed+loss_scale.init=64")
    before = model.b.bias.detach().clone()
    for _ in range(2):
        backward(amp, model, "backward")
    held = model.b.bias.grad.clone()
    for parameter, grad in zip(model.parameters(), _by_autograd(amp, model), strict=True):
        parameter.grad += grad
    amp.step(optimizer)
    torch.testing.assert_close(before - model.b.bias, 1.5 * held / 64)


def test_whoever_asks_for_the_scale_divides_by_it() -> None:
    amp, model, optimizer = make("fp16-mixed+loss_scale.init=64")
    for first in (True, False):
        before = model.b.bias.detach().clone()
        inverse = 1 / amp.get_scale() if first else None
        grads = _by_autograd(amp, model)
        inverse = inverse or 1 / amp.get_scale()
        _set(model, [grad * inverse for grad in grads])
        optimizer.step()
        torch.testing.assert_close(before - model.b.bias, grads[-1] / 64)
        optimizer.zero_grad()


def test_a_gradient_of_inputs_alone_leaves_pseudo_gradients_free() -> None:
    amp, model, optimizer = make("fp16-mixed+loss_scale.init=64")
    x = torch.ones(2, 4, requires_grad=True)
    torch.autograd.grad(amp.scale(model(x).square().mean()), x)
    _set(model, [torch.ones_like(parameter) for parameter in model.parameters()])
    before = model.b.bias.detach().clone()
    optimizer.step()
    assert torch.equal(before - 1, model.b.bias)


@pytest.mark.parametrize("clear", [True, False])
def test_true_gradients_set_by_hand_are_stepped_and_move_the_scale(clear: bool) -> None:
    """Gradient surgery and first-order meta-learning do this; each round sets all gradients, cleared or not."""
    amp, model, optimizer = make("fp16-mixed+loss_scale.init=65536")
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 1e-6
    for _ in range(12):
        loss = model(torch.ones(2, 4)).square().mean()
        _set(model, amp.grad(loss * 64, [*model.parameters()]))
        optimizer.step()
        if clear:
            optimizer.zero_grad()
    assert 0 < amp.skipped_steps < 12
    assert amp.get_scale() == 65536 / 2**amp.skipped_steps
    backward(amp, model, "backward")  # adds to gradients that contain no scale
    amp.unscale_(optimizer)
    assert model.b.bias.grad.abs().max() < 1e3


def test_true_gradients_that_never_are_finite_end_in_an_error() -> None:
    amp, model, optimizer = make("fp16-mixed+loss_scale.init=1+loss_scale.floor=1")
    for last in [False] * 9 + [True]:
        _set(model, amp.grad(model(torch.ones(2, 4)).sum() * float("nan"), [*model.parameters()]))
        with pytest.raises(LossScaleError) if last else contextlib.nullcontext():
            optimizer.step()
