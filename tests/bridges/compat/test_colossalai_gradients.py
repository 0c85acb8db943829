"""``optimizer.backward`` leaves true gradients in ``.grad`` in the Apex mode, and scaled ones in the others."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from castwise.bridges.compat.colossalai.amp import (
    AMP_TYPE,
    convert_to_amp,
    convert_to_apex_amp,
    convert_to_torch_amp,
)
from castwise.bridges.compat.colossalai.engine.gradient_accumulation import accumulate_gradient

NORM = 0.2
RATE = 0.05
TOLERANCE = 4e-3
"""Tolerance: relative for norms, absolute for weights that change by 0.1; fp16 has 11 bits."""
LOSS = nn.functional.mse_loss
LEVELS: dict[str, dict[str, Any]] = {
    "O1": {},
    "O2": {"opt_level": "O2"},
    "O2 at a fixed scale": {"opt_level": "O2", "loss_scale": 1024.0},
    "O2 in bf16": {"opt_level": "O2", "cast_model_type": torch.bfloat16},
}


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), RATE, momentum=0.9)


def batches(count: int = 10) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 32, 8, generator=generator)
    return [(x, torch.stack([x[:, :4].sum(1), x[:, 0], x[:, 2].abs(), x[:, 3]], 1)) for x in inputs]


def true_grads(model: nn.Module, *data: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Return the summed gradients of some batches, in fp64."""
    twin = copy.deepcopy(model).double()
    for x, y in data:
        LOSS(twin(x.double()), y.double()).backward()
    return [p.grad for p in twin.parameters()]


def norm_of(grads: Any) -> float:
    return float(nn.utils.get_total_norm([grad.double() for grad in grads]))


@pytest.fixture
def apex() -> Iterator[Any]:
    """Yield a function that calls ``convert_to_apex_amp`` on a new model; close the sessions afterwards."""
    made: list[Any] = []

    def convert(**options: Any) -> tuple[nn.Module, Any]:
        model = build()
        model, optimizer = convert_to_apex_amp(model, sgd(model), options)
        made.append(optimizer)
        return model, optimizer

    yield convert
    for optimizer in made:
        optimizer.amp.close()


def error_of(grads: list[Tensor], want: list[Tensor]) -> float:
    """Return the relative norm of the difference."""
    return norm_of(got.double() - true for got, true in zip(grads, want, strict=True)) / norm_of(want)


@pytest.mark.parametrize("level", LEVELS)
def test_the_apex_mode_leaves_true_gradients(apex: Any, level: str) -> None:
    """``clip_grad_norm_`` gets the true norm, on the model's parameters and on the optimizer's."""
    model, optimizer = apex(**LEVELS[level])
    x, y = batches()[0]
    want = true_grads(build(), (x, y))
    assert optimizer.loss_scale >= 1024.0
    optimizer.backward(LOSS(model(x).float(), y))
    assert optimizer.loss_scale >= 1024.0
    for params in (list(model.parameters()), [p for g in optimizer.param_groups for p in g["params"]]):
        assert error_of([p.grad for p in params], want) < (3e-2 if "bf16" in level else TOLERANCE)
    before = norm_of(want)
    assert before > 2 * NORM
    clipped = nn.utils.clip_grad_norm_(model.parameters(), NORM)
    assert float(clipped) == pytest.approx(before, rel=3e-2 if "bf16" in level else TOLERANCE)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_loop_that_clips_by_hand_trains_as_in_fp64(apex: Any, level: str) -> None:
    model, optimizer = apex(**LEVELS[level])
    twin = build().double()
    reference = sgd(twin)
    for x, y in batches():
        optimizer.zero_grad()
        optimizer.backward(LOSS(model(x).float(), y))
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        reference.zero_grad()
        LOSS(twin(x.double()), y.double()).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), NORM)
        reference.step()
    start = dict(build().named_parameters())
    moved = max(float((p - start[name]).detach().abs().max()) for name, p in twin.named_parameters())
    assert moved > 0.1
    weights = optimizer.amp.model_state_dict(model)
    for name, value in twin.named_parameters():
        torch.testing.assert_close(weights[name].double(), value, atol=TOLERANCE, rtol=0, msg=name)


def test_what_colossal_ais_own_test_holds(apex: Any) -> None:
    """Gradients are scaled in the torch mode and not in the Apex mode; after the step they are unscaled in both."""
    scale = 1280
    by_apex, apex_optimizer = apex(opt_level="O1", loss_scale=scale)
    by_torch = build()
    by_torch, torch_optimizer, _ = convert_to_torch_amp(
        by_torch, sgd(by_torch), amp_config={"init_scale": scale, "enabled": True}
    )
    x = batches()[0][0]
    torch_optimizer.backward(by_torch(x).mean())
    apex_optimizer.backward(by_apex(x).mean())
    pairs = list(zip(by_torch.parameters(), by_apex.parameters(), strict=True))
    for a, b in pairs:
        torch.testing.assert_close(a.grad, b.grad * scale, rtol=1e-2, atol=1e-2)
    torch_optimizer.step()
    apex_optimizer.step()
    for a, b in pairs:
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    torch_optimizer.amp.close()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_add_up_unscaled(apex: Any, level: str) -> None:
    """Gradients accumulate over several backward passes, and over steps without ``zero_grad``."""
    model, optimizer = apex(**LEVELS[level])
    model.eval()
    data = batches()
    start = build().eval()
    for count in (1, 2, 3):
        x, y = data[count - 1]
        optimizer.backward(LOSS(model(x).float(), y))
        want = true_grads(start, *data[:count])
        assert error_of([p.grad for p in model.parameters()], want) < TOLERANCE
    optimizer.step()
    held = [p.grad.double().clone() for p in model.parameters()]
    stepped = copy.deepcopy(build().eval())
    stepped.load_state_dict({k: v.clone() for k, v in optimizer.amp.model_state_dict(model).items()})
    x, y = data[3]
    optimizer.backward(LOSS(model(x).float(), y))
    want = [grad + more for grad, more in zip(held, true_grads(stepped, (x, y)), strict=True)]
    assert error_of([p.grad for p in model.parameters()], want) < TOLERANCE


def test_accumulation_divides_and_leaves_true_gradients(apex: Any) -> None:
    model, inner = apex()
    model.eval()
    data = batches(2)
    optimizer, *_ = accumulate_gradient(model, inner, None, 2)
    for x, y in data:
        optimizer.zero_grad()
        optimizer.backward(LOSS(model(x).float(), y))
    want = [grad / 2 for grad in true_grads(build().eval(), *data)]
    assert error_of([p.grad for p in model.parameters()], want) < TOLERANCE
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    after = [p.detach() for p in model.parameters()]
    assert error_of([(a - b) / RATE for a, b in zip(before, after, strict=True)], want) < TOLERANCE


@pytest.mark.parametrize("where", [0, 1])
def test_an_overflow_in_any_pass_of_several_skips_the_step(apex: Any, where: int) -> None:
    model, optimizer = apex(opt_level="O2")
    before = [p.detach().clone() for p in model.parameters()]
    scale = optimizer.loss_scale
    for index, (x, y) in enumerate(batches(2)):
        optimizer.backward(LOSS(model(x * (1e6 if index == where else 1)).float(), y))
    nn.utils.clip_grad_norm_(model.parameters(), NORM)
    optimizer.step()
    assert optimizer.loss_scale == scale / 2
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
    optimizer.zero_grad()
    x, y = batches()[0]
    optimizer.backward(LOSS(model(x).float(), y))
    optimizer.step()
    assert not all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))


def test_the_gradient_of_an_output_is_a_true_one(apex: Any) -> None:
    """Colossal-AI's Apex mode scales only losses, so a given output gradient is unscaled."""
    model, optimizer = apex()
    x, y = batches()[0]
    output = model(x)
    grad = torch.autograd.grad(LOSS(output.float(), y), output, retain_graph=True)[0]
    optimizer.backward_by_grad(output, grad)
    assert error_of([p.grad for p in model.parameters()], true_grads(build(), (x, y))) < TOLERANCE
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    moved = [(was - p.detach()) / RATE for p, was in zip(model.parameters(), before, strict=True)]
    assert error_of(moved, true_grads(build(), (x, y))) < TOLERANCE


@pytest.mark.parametrize(
    "options", [{"enabled": False}, {"opt_level": "O0"}, {"opt_level": "O2", "loss_scale": 1.0}]
)
def test_without_a_scale_there_is_nothing_to_undo(apex: Any, options: dict[str, Any]) -> None:
    model, optimizer = apex(**options)
    x, y = batches()[0]
    optimizer.backward(LOSS(model(x).float(), y))
    assert error_of([p.grad for p in model.parameters()], true_grads(build(), (x, y))) < TOLERANCE
    optimizer.step()


@pytest.mark.parametrize("mode", [AMP_TYPE.TORCH, AMP_TYPE.NAIVE])
def test_the_other_modes_leave_scaled_ones(mode: AMP_TYPE) -> None:
    """Colossal-AI does the same; ``optimizer.clip_grad_norm`` and the configured clipping unscale first."""
    model = build()
    name = "init_scale" if mode is AMP_TYPE.TORCH else "initial_scale"
    model, optimizer, criterion = convert_to_amp(model, sgd(model), LOSS, mode, {name: 256.0})
    x, y = batches()[0]
    optimizer.backward(criterion(model(x), y))
    want = [256.0 * grad for grad in true_grads(build(), (x, y))]
    assert error_of([p.grad for p in model.parameters()], want) < TOLERANCE
    optimizer.clip_grad_norm(model, NORM)
    grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
    assert norm_of(grads) == pytest.approx(NORM, rel=TOLERANCE)
    optimizer.step()
    optimizer.amp.close()
