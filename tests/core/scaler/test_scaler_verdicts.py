"""The result of a gradient check applies to the checked gradients only, whatever their kind."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import castwise
from castwise.errors import NonFiniteError
from tests.core.scaler.test_scaler_guard import UNSCALED, Run, X
from tests.here import DEVICE
from tests.soak import each_value

NAN = float("nan")
PLANS = [*UNSCALED, "fp16-mixed+loss_scale.init=4.0"]


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    torch.set_default_dtype(request.param)
    try:
        yield request.param
    finally:
        torch.set_default_dtype(torch.float32)


def a_run(plan: str) -> Run:
    run = Run(plan)
    run.backward()
    return run


@each_value(2)
@pytest.mark.parametrize("way", ["step", "joint", "by itself", "unscale_", "clip", "norm", "closure"])
@pytest.mark.parametrize("plan", PLANS)
def test_another_default_dtype(plan: str, way: str) -> None:
    """The default dtype changes between steps: flags and factors stay fp32."""
    run = a_run(plan)
    amp, optimizer = run.amp, run.optimizer
    assert not amp.step(optimizer).skipped
    torch.set_default_dtype(torch.float64)
    try:
        for factor in (1.0, NAN):
            before = copy.deepcopy(run.model.state_dict())
            run.backward(factor)
            if way == "unscale_":
                amp.unscale_(optimizer)
            elif way == "clip":
                amp.clip_grad_norm_(optimizer, 1.0)
            if way == "by itself":
                if amp.scaler.is_enabled():
                    amp.unscale_(optimizer)
                optimizer.step()
            elif way == "joint":
                amp.step(run.another()[1], optimizer)
            elif way == "closure":

                def closure(factor: float = factor) -> Any:
                    run.backward(factor)
                    return 0.0

                amp.step(optimizer, closure=closure)
            else:
                amp.step(optimizer, **({"max_norm": 1.0} if way == "norm" else {}))
            after = run.model.state_dict()
            assert all(torch.equal(before[key], after[key]) for key in before) == (factor != 1.0), factor
    finally:
        torch.set_default_dtype(torch.float32)


class Complex(nn.Module):
    """A complex parameter beside a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Parameter(torch.complex(torch.ones(3), torch.zeros(3)))
        self.real = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.wave * x).abs().sum() + (self.real * x).sum()


class Conjugated(Complex):
    """Gets a complex gradient with torch's lazy conjugation bit."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (self.wave.conj() * torch.complex(x, x)).real.sum()
        return found + (self.real * x).sum()


@pytest.mark.parametrize("kind", [Complex, Conjugated])
@pytest.mark.parametrize("factor", [1.0, NAN])
@pytest.mark.parametrize("plan", ["fp32", "bf16-mixed", "fp16-mixed+loss_scale.init=4.0"])
def test_complex_gradients(plan: str, factor: float, kind: type[Complex]) -> None:
    model, alone = kind(), kind()
    optimizer, plain = (torch.optim.SGD(m.parameters(), 0.5) for m in (model, alone))
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model, optimizer)
    amp.backward(model(torch.arange(3.0)) * factor)
    assert amp.step(optimizer).skipped == (factor != 1.0)
    if factor == 1.0:
        alone(torch.arange(3.0)).backward()
        plain.step()
    assert torch.equal(model.wave, alone.wave)
    assert torch.equal(model.real, alone.real)


@pytest.mark.parametrize("factor", [1.0, NAN])
def test_gradients_that_share_their_memory(factor: float) -> None:
    """An expanded gradient cannot be written in place, and does not have to be."""
    run = Run("bf16-mixed")
    for parameter in run.model.parameters():
        parameter.grad = torch.full((), factor).expand_as(parameter)
    assert run.amp.step(run.optimizer).skipped == (factor != 1.0)


# --- results of checks for steps that were abandoned -------------------------------------------------------


class Planted(Exception):
    """Raised inside an optimizer's step."""


def fail(*_: Any) -> None:
    raise Planted


@each_value()
@pytest.mark.parametrize("bad_first", [False, True])
@pytest.mark.parametrize("norm", [None, 1.0])
@pytest.mark.parametrize("plan", ["fp32", "bf16-mixed", "bf16-master"])
def test_a_verdict_does_not_outlive_a_step_that_failed(
    plan: str, norm: float | None, bad_first: bool
) -> None:
    """The first of two optimizers raises in its step; the user's own backward then makes other gradients."""
    run = Run(plan)
    weight, other = run.another()
    run.backward(NAN if bad_first else 1.0)
    weight.grad = torch.ones_like(weight, dtype=weight.grad_dtype)
    hook = other.register_step_pre_hook(fail)
    if bad_first:
        hook.remove()
        run.amp.scaler.take = fail  # type: ignore[assignment, method-assign]
    with pytest.raises(Planted):
        run.amp.step(other, run.optimizer, max_norm=norm)
    hook.remove()
    vars(run.amp.scaler).pop("take", None)
    run.optimizer.zero_grad()
    (run.model(X).pow(2).mean() * (1.0 if bad_first else NAN)).backward()
    assert run.amp.step(run.optimizer).skipped is not bad_first
    assert all(parameter.isfinite().all() for parameter in run.model.parameters())


def test_a_verdict_does_not_outlive_a_step_that_failed_under_a_loss_scale() -> None:
    """After unscaling, the first of two optimizers raises in its step; the user's own backward then makes other
    gradients.
    """
    run = Run("fp16-mixed+loss_scale.init=8")
    weight, other = run.another()
    run.amp.backward(run.model(X).pow(2).mean() + weight.sum())
    other.register_step_pre_hook(fail)
    with pytest.raises(Planted):
        run.amp.step(other, run.optimizer)
    run.optimizer.zero_grad()
    (run.model(X).pow(2).mean() * NAN).backward()
    assert run.amp.step(run.optimizer).skipped
    assert all(parameter.isfinite().all() for parameter in run.model.parameters())


@pytest.mark.parametrize("then", [1.0, NAN])
@pytest.mark.parametrize("way", ["unscale_", "clip_grad_norm_"])
@pytest.mark.parametrize("plan", ["fp32", "bf16-mixed", "bf16-master"])
def test_a_verdict_goes_with_its_gradients(plan: str, way: str, then: float) -> None:
    """The user checks gradients, clears them without a step, and makes others with a plain backward."""
    run = a_run(plan)
    run.backward(NAN if then == 1.0 else 1.0)
    getattr(run.amp, way)(run.optimizer, *([1.0] if way != "unscale_" else []))
    run.optimizer.zero_grad()
    (run.model(X).pow(2).mean() * then).backward()
    assert run.amp.step(run.optimizer).skipped == (then != 1.0)


@pytest.mark.parametrize("plan", PLANS)
def test_a_step_inside_a_step_is_guarded(plan: str) -> None:
    """A hook steps another optimizer: each step is checked, wherever it is called."""
    run = Run(plan)
    weight, other = run.another()
    run.backward()
    if run.amp.scaler.is_enabled():
        run.amp.backward(weight.sum())
        run.amp.unscale_(other)
    weight.grad = torch.full_like(weight, NAN, dtype=weight.grad_dtype)
    run.optimizer.register_step_post_hook(lambda *_: other.step())
    run.amp.step(run.optimizer)
    assert weight.tolist() == [1.0, 1.0]
    assert run.amp.skipped_steps == 1


@pytest.mark.parametrize("direct", [False, True])
def test_a_step_that_raised_counts_as_skipped(direct: bool) -> None:
    run = Run("bf16-mixed", patience=3)
    for time in range(3):
        run.backward(NAN)
        step = run.optimizer.step if direct else lambda: run.amp.step(run.optimizer)
        if time < 2:
            step()
        else:
            with pytest.raises(NonFiniteError):
                step()
    assert run.amp.skipped_steps == 3


def test_a_norm_that_overflows_is_told_apart() -> None:
    """Clipping by a non-finite norm of finite gradients skips the step, and the error names that cause."""
    run = a_run("fp32")
    run.amp.close()
    run = Run("fp32", nonfinite="raise")
    for parameter in run.model.parameters():
        parameter.grad = torch.full_like(parameter, 1e30)
    with pytest.raises(NonFiniteError, match="or are finite while their norm overflows"):
        run.amp.step(run.optimizer, max_norm=1.0)


# --- copies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_a_copy_of_a_scaler_looks_for_itself(plan: str, how: Any) -> None:
    """It does not share the flag memory of the original."""
    run = a_run(plan)
    run.amp.step(run.optimizer)
    if run.amp.scaler.is_enabled():
        run.amp.scaler.update()
    other = how(run.amp.scaler)
    for factor in (1.0, NAN):
        for parameter in run.model.parameters():
            parameter.grad = torch.full_like(parameter, factor)
        if other.is_enabled():
            other.scale(torch.ones(()))
        assert other.take(run.optimizer).skipped == (factor != 1.0)
        other.update()


def test_a_result_that_steps_share_cannot_be_written_to() -> None:
    run = a_run("bf16-mixed")
    with pytest.raises(AttributeError):
        run.amp.step(run.optimizer).grad_norm = torch.ones(())  # type: ignore[misc]
