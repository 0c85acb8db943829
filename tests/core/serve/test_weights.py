"""The weights of served models: written after prepare, and shared by several models."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import castwise
from castwise.errors import PlanError
from tests.here import DEVICE

X = torch.linspace(-1, 1, 32, device=DEVICE).reshape(4, 8)


def make(outputs: int = 4, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, outputs)).to(DEVICE).eval()


def _load(model: nn.Module, values: nn.Module) -> None:
    model.load_state_dict(values.state_dict())


@torch.no_grad()
def _copy(model: nn.Module, values: nn.Module) -> None:
    for parameter, value in zip(model.parameters(), values.parameters(), strict=True):
        parameter.copy_(value)


@torch.no_grad()
def _add(model: nn.Module, values: nn.Module) -> None:
    for parameter, value in zip(model.parameters(), values.parameters(), strict=True):
        parameter.add_(value, alpha=0.5)


@pytest.mark.parametrize("write", [_load, _copy, _add])
@pytest.mark.parametrize("plan", ["bf16-mixed", "fp16-true"])
def test_close_says_which_weights_were_written_while_they_were_low(
    plan: str, write: Callable[[nn.Module, nn.Module], None]
) -> None:
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().half())
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model, inference=True)
    write(model, make(seed=1))
    now = [parameter.clone() for parameter in model.parameters()]
    with pytest.warns(UserWarning, match=r"0\.weight.* were written while they were stored for inference"):
        amp.close()
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())
    assert all(torch.equal(a.float(), b) for a, b in zip(now, model.parameters(), strict=True))


@pytest.mark.parametrize("sessions", [1, 2])
@pytest.mark.parametrize("plan", ["bf16-mixed", "bf16-true", "fp16-mixed", "fp16-mixed+ops.gelu=fp32"])
def test_models_may_share_a_module(plan: str, sessions: int) -> None:
    def models() -> tuple[nn.Module, nn.Module]:
        both = make(8)
        torch.manual_seed(1)
        heads = nn.Linear(8, 2).to(DEVICE), nn.Linear(8, 3).to(DEVICE)
        return nn.Sequential(both, heads[0]).eval(), nn.Sequential(both, heads[1]).eval()

    want = []
    for number in range(2):  # each alone
        model = models()[number]
        with castwise.Amp(plan, device=DEVICE) as amp, torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            want.append(amp.prepare(model, inference=True)(X))
            amp.close()
    amps = [castwise.Amp(plan, device=DEVICE) for _ in range(sessions)]
    first, second = models()
    amps[0].prepare(first, inference=True)
    amps[-1].prepare(second, inference=True)
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(first(X), want[0])
            assert torch.equal(second(X), want[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for amp in reversed(amps):
            amp.close()
    for model in (first, second):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert model(X).dtype is torch.float32


def test_a_module_that_is_served_in_the_other_low_format_is_refused() -> None:
    shared = make(8)
    first, second = nn.Sequential(shared).eval(), nn.Sequential(shared).eval()
    with castwise.Amp("bf16-mixed", device=DEVICE) as amp, castwise.Amp("fp16-mixed", device=DEVICE) as other:
        amp.prepare(first, inference=True)
        with pytest.raises(
            PlanError, match=r"prepare\(inference=True\): .*0\.0\.weight.* stored in bf16.*widen='all'"
        ):
            other.prepare(second, inference=True)
        with pytest.warns(UserWarning, match="for inference"):
            amp.close()
