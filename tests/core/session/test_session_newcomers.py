"""After close, parts added after ``prepare`` have the format of the rest, and the model runs and trains."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import castwise
from tests.here import DEVICE
from tests.soak import every

CHANGES: dict[str, Callable[[nn.Sequential], object]] = {}


def change(function: Callable[[nn.Sequential], object]) -> Callable[[nn.Sequential], object]:
    CHANGES[function.__name__] = function
    return function


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the doubled input."""
        return x * 2

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input for which :meth:`forward` gives ``x``."""
        return x / 2


@change
def weight_norm(model: nn.Sequential) -> None:
    parametrizations.weight_norm(model[0])


@change
def weight_norm_put_on_and_taken_off(model: nn.Sequential) -> None:
    weight_norm(model)
    parametrize.remove_parametrizations(model[0], "weight")


@change
def spectral_norm(model: nn.Sequential) -> None:
    parametrizations.spectral_norm(model[0])


@change
def spectral_norm_put_on_and_taken_off(model: nn.Sequential) -> None:
    spectral_norm(model)
    parametrize.remove_parametrizations(model[0], "weight")


@change
def parametrized_put_on_and_taken_off(model: nn.Sequential) -> None:
    parametrize.register_parametrization(model[0], "weight", Doubled())
    parametrize.remove_parametrizations(model[0], "weight")


@change
def pruned(model: nn.Sequential) -> None:
    prune.l1_unstructured(model[0], "weight", 0.3)


@change
def pruned_for_good(model: nn.Sequential) -> None:
    pruned(model)
    prune.remove(model[0], "weight")


@change
def an_adapter_merged(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach() + 0.01)


@change
def tied(model: nn.Sequential) -> None:
    model[2].weight = model[0].weight


@change
def a_module_replaced_by_a_copy(model: nn.Sequential) -> None:
    model[2] = copy.deepcopy(model[2])


@change
def a_module_added_in_the_models_format(model: nn.Sequential) -> None:
    model.append(nn.Linear(8, 8, dtype=model[0].weight.dtype))


@change
def a_module_in_fp32(model: nn.Sequential) -> None:
    model[2] = nn.Linear(8, 8)


@change
def frozen(model: nn.Sequential) -> None:
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)


def make() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


@every(2)
@pytest.mark.parametrize("plan", ["bf16-master", "O2", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_closed_model_is_in_one_format_and_trains(name: str, plan: str) -> None:
    """The old optimizer and a new one can train it."""
    model, optimizer = make()
    x = torch.ones(2, 8)
    with castwise.Amp(plan, device=DEVICE) as amp:
        amp.prepare(model, optimizer)
        amp.backward(model(x).square().mean())
        amp.step(optimizer)
        optimizer.zero_grad()
        CHANGES[name](model)
    for part in (*model.parameters(), *model.buffers()):
        assert part.dtype is torch.float32
        assert part.grad_dtype in (None, torch.float32)
    for closed in (optimizer, torch.optim.AdamW(model.parameters())):
        model(x).square().mean().backward()
        closed.step()
        closed.zero_grad()


def test_a_model_that_arrived_low_stays_so() -> None:
    """Also if the plan stores it in the other low format."""
    model, optimizer = make()
    model.bfloat16()
    with castwise.Amp("fp16-master", device=DEVICE) as amp:
        amp.prepare(model, optimizer)
        weight_norm_put_on_and_taken_off(model)
        assert model[0].weight.dtype is torch.float16
    assert {part.dtype for part in model.parameters()} == {torch.bfloat16}


def test_what_is_in_other_formats_than_the_plans_is_left() -> None:
    """An added fp16 or fp64 part in a bf16 model was the user's choice."""
    model, optimizer = make()
    with castwise.Amp("bf16-master", device=DEVICE) as amp:
        amp.prepare(model, optimizer)
        model.register_buffer("mask", torch.ones(3, dtype=torch.float16))
        model.register_buffer("sums", torch.ones(3, dtype=torch.float64))
    assert model.get_buffer("mask").dtype is torch.float16
    assert model.get_buffer("sums").dtype is torch.float64


def test_state_of_newcomers_follows() -> None:
    """Without masters, the optimizer state has the parameters' low format."""
    model, optimizer = make()
    x = torch.ones(2, 8)
    with castwise.Amp("bf16-true", device=DEVICE) as amp:
        amp.prepare(model, optimizer)
        model.append(nn.Linear(8, 8, dtype=torch.bfloat16))
        optimizer.add_param_group({"params": list(model[3].parameters())})
        amp.backward(model(x).square().mean())
        amp.step(optimizer)
        optimizer.zero_grad()
        assert optimizer.state[model[3].weight]["exp_avg"].dtype is torch.bfloat16
    assert optimizer.state[model[3].weight]["exp_avg"].dtype is torch.float32
    model(x).square().mean().backward()
    optimizer.step()
