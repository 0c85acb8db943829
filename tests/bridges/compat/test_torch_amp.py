"""castwise's classes with the arguments of torch.cuda.amp and torch.cpu.amp, and checks of their types."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.cpu.amp import autocast_mode, grad_scaler

import castwise
from castwise.bridges.compat.torch_amp import cpu, cuda


def test_objects_are_recognised_as_torchs_and_as_castwises() -> None:
    for scaler in (cpu.GradScaler(), pickle.loads(pickle.dumps(cpu.GradScaler()))):
        assert isinstance(scaler, grad_scaler.GradScaler)
        assert isinstance(scaler, castwise.GradScaler)
        assert isinstance(scaler, cpu.GradScaler)
    assert isinstance(cpu.autocast(), autocast_mode.autocast)
    assert isinstance(cpu.autocast(), castwise.autocast)
    assert issubclass(cuda.GradScaler, torch.cuda.amp.GradScaler)
    assert issubclass(cuda.autocast, torch.cuda.amp.autocast)


def test_arguments_by_place() -> None:
    scaler = cpu.GradScaler(8.0, 4.0, 0.25, 3, True, hysteresis=2)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (
        4.0,
        0.25,
        3,
    )
    assert scaler.policy.hysteresis == 2
    assert not cpu.GradScaler(8.0, 4.0, 0.25, 3, False).is_enabled()
    block = cpu.autocast(False, torch.float16, False)
    assert (block._enabled, block.fast_dtype, block._cache_enabled) == (False, torch.float16, False)
    assert cpu.autocast().fast_dtype is torch.bfloat16


def test_plans_are_taken_in_place_of_a_dtype() -> None:
    x = torch.ones(2, 2)
    with cpu.autocast(dtype="bf16-mixed+ops.exp=lower"):
        assert x.exp().dtype is torch.bfloat16


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_cuda_they_are_off_as_torchs_are() -> None:
    for make in (
        torch.cuda.amp.autocast,
        cuda.autocast,
        functools.partial(castwise.autocast, "cuda", torch.float16),
    ):
        with pytest.warns() as warned:
            block = make()
        assert any("CUDA is not available" in str(one.message) for one in warned)
        with block:
            assert not torch.is_autocast_enabled("cuda")
    for scaler_of in (torch.cuda.amp.GradScaler, cuda.GradScaler):
        with pytest.warns() as warned:
            assert not scaler_of().is_enabled()
        assert any("CUDA is not available" in str(one.message) for one in warned)


@pytest.mark.gpu
def test_with_cuda_they_cast_to_fp16() -> None:
    linear, x = nn.Linear(2, 2).cuda(), torch.ones(2, 2, device="cuda")
    with cuda.autocast():
        assert linear(x).dtype is torch.float16
    with cuda.autocast(dtype=torch.bfloat16):
        assert linear(x).dtype is torch.bfloat16
    assert cuda.GradScaler().is_enabled()


_LINEAR = nn.Linear(4, 4)
_BLOCK = cpu.autocast()
_HALF = functools.partial(cpu.autocast, dtype=torch.float16)


def _made_inside(x: torch.Tensor) -> torch.Tensor:
    with cpu.autocast(dtype=torch.float16):
        return _LINEAR(x)


def _made_outside(x: torch.Tensor) -> torch.Tensor:
    with _BLOCK:
        return _LINEAR(x)


def _partly_applied(x: torch.Tensor) -> torch.Tensor:
    with _HALF():
        return _LINEAR(x)


@cpu.autocast()
def _decorated(x: torch.Tensor) -> torch.Tensor:
    return _LINEAR(x)


@pytest.mark.parametrize("function", [_made_inside, _made_outside, _partly_applied, _decorated])
def test_compiled_code_casts_as_eager_code_does(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(2, 4)
    want = function(x)
    got = torch.compile(function, backend="aot_eager", fullgraph=True)(x)
    assert got.dtype is want.dtype is not torch.float32
    assert torch.equal(got, want)


def _train(scaler: Any, autocast: Any, state: dict[str, Any] | None) -> tuple[list[Any], dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if state is not None:
        scaler.load_state_dict(state)
    said: list[Any] = []
    for step in range(8):
        optimizer.zero_grad()
        with autocast(dtype=torch.float16):
            loss = model(torch.randn(8, 16)).square().mean()
        scaler.scale(loss * (float("inf") if step == 4 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        said += [loss.item(), scaler.get_scale(), model.weight.tolist()]
    return said, scaler.state_dict()


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_states_load_in_both_directions_and_train_alike() -> None:
    """Training is bitwise equal, with skipped steps, also after loading a state that the other class saved."""
    torchs = grad_scaler.GradScaler, autocast_mode.autocast
    ours = cpu.GradScaler, cpu.autocast
    options = {"init_scale": 2.0**20, "growth_interval": 2}
    want, saved = _train(torchs[0](**options), torchs[1], None)
    got, saved_here = _train(ours[0](**options), ours[1], None)
    assert got == want
    assert saved_here == saved
    assert len(set(want[1::3])) > 2
    assert _train(ours[0](), ours[1], saved) == _train(torchs[0](), torchs[1], saved_here)
