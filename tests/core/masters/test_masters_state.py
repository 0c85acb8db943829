"""Optimizer state is handed over, restrided, saved and loaded; weights move into and out of masters."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from castwise.core.masters import Master, attach, attachment_of, fp32_state_dict, master_of, restride_state
from tests.core.masters.test_masters_gradients import Tied, backward, held, prepared
from tests.core.masters.test_masters_optimizers import Net, Weights, batches, lower, train
from tests.here import DEVICE
from tests.soak import each_value


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.to(self.conv.weight.dtype)).float()


def images(count: int) -> list[Tensor]:
    return [
        torch.randn(2, 3, 6, 6, generator=torch.Generator(DEVICE).manual_seed(seed)) for seed in range(count)
    ]


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Tensor]) -> None:
    for x in data:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# --- strides ------------------------------------------------------------------------------------------------


@pytest.mark.cpu  # GPU kernels refuse it
def test_torch_itself_goes_wrong_where_strides_differ() -> None:
    """Shows why restride_state exists; if this fails on a new torch, remove restride_state.

    Fused AdamW on a CPU with contiguous moments from earlier steps and channels_last weights.
    """
    results = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = Conv()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        fit(model, optimizer, images(2))
        model.to(memory_format=torch.channels_last)
        fit(model, optimizer, images(2))
        results.append(model.conv.weight.detach().clone())
    assert (results[0] - results[1]).abs().max() > 1e-3


@pytest.mark.parametrize("fused", [False, True])
def test_state_is_restrided_when_the_memory_format_changes_with_the_plan(fused: bool) -> None:
    """A run that switches to channels_last and masters midway equals one with contiguous masters."""
    results = []
    for channels_last in (False, True):
        torch.manual_seed(0)
        model = Conv()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        fit(model, optimizer, images(2))
        if channels_last:
            model.to(memory_format=torch.channels_last)
        former = lower(model, torch.bfloat16)
        attach(optimizer, model, originals=former)
        for master, parameter in zip(held(optimizer), model.parameters(), strict=True):
            assert master.stride() == parameter.stride()
            assert optimizer.state[master]["exp_avg"].stride() == master.stride()
        fit(model, optimizer, images(3))
        results.append([m.detach().clone() for m in held(optimizer)])
    for a, b in zip(*results, strict=True):
        # bf16 convolutions in two memory layouts add in different orders: some gradients differ by a bf16 step
        # (0.8 %), and Adam moves each weight by at most lr per step.
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3)


@pytest.mark.parametrize("fused", [False, True])
def test_masters_and_state_follow_a_memory_format_changed_later(fused: bool) -> None:
    """The user calls ``model.to(memory_format=...)`` between two steps; the result is exact because the gradients are
    given.
    """
    results = []
    for channels_last in (False, True):
        torch.manual_seed(0)
        model = Conv()
        former = lower(model, torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        attach(optimizer, model, originals=former)
        for step in range(4):
            if step == 2 and channels_last:
                model.to(memory_format=torch.channels_last)
            for parameter in model.parameters():
                grad = torch.randn(parameter.shape, generator=torch.Generator(DEVICE).manual_seed(step))
                parameter.grad = torch.empty_like(parameter, dtype=torch.float32).copy_(grad)
            optimizer.step()
        results.append([m.detach().clone() for m in held(optimizer)])
        assert torch.equal(model.conv.weight.detach(), results[-1][0].bfloat16())
    for a, b in zip(*results, strict=True):
        # Vectorised and remainder elements of a kernel may contract differently: one rounding of values near 0.1.
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


def test_restride_state_serves_plain_parameters() -> None:
    """Without masters too: fp32 weights become channels_last after the first steps."""
    results = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = Conv()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        fit(model, optimizer, images(2))
        model.to(memory_format=torch.channels_last)
        restride_state(optimizer)
        fit(model, optimizer, images(2))
        results.append(model.conv.weight.detach().clone())
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_state_loaded_in_another_memory_format_is_restrided() -> None:
    """load_state_dict keeps the strides of the file."""
    torch.manual_seed(0)
    model = Conv()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    fit(model, optimizer, images(2))
    saved = copy.deepcopy(optimizer.state_dict())
    other = Conv().to(memory_format=torch.channels_last)
    former = lower(other, torch.bfloat16)
    loaded = torch.optim.AdamW(other.parameters(), fused=True)
    attach(loaded, other, originals=former)
    loaded.load_state_dict(saved)
    master = held(loaded)[0]
    assert loaded.state[master]["exp_avg"].stride() == other.conv.weight.stride()
    assert torch.equal(loaded.state[master]["exp_avg"], saved["state"][0]["exp_avg"])


# --- plan switches ------------------------------------------------------------------------------------------

STATEFUL: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "muon": lambda p: torch.optim.Muon(p, lr=0.01),
}


@pytest.mark.parametrize("make", STATEFUL.values(), ids=STATEFUL.keys())
@pytest.mark.parametrize("trained", [torch.float32, torch.bfloat16], ids=str)
def test_existing_state_is_handed_over(make: Any, trained: torch.dtype) -> None:
    """After steps without masters, in fp32 or entirely in bf16, all state is in fp32 and belongs to the master."""
    torch.manual_seed(0)
    model = Weights().to(trained)
    optimizer = make(list(model.parameters()))
    train(model, optimizer, 3)
    before = [copy.deepcopy(dict(optimizer.state[p])) for p in model.parameters()]
    former = lower(model, torch.bfloat16)
    attach(optimizer, model, originals=former)
    assert len(optimizer.state) == len(before)
    for master, old in zip(held(optimizer), before, strict=True):
        assert isinstance(master, Master)
        assert torch.equal(master.detach(), former[master.stored].float())
        for key, value in old.items():
            now = optimizer.state[master][key]
            if isinstance(value, Tensor):
                assert now.dtype is torch.float32
                assert torch.equal(now, value.float())
            else:
                assert now == value
    train(model, optimizer, 2)


def test_lbfgs_history_is_handed_over() -> None:
    """LBFGS keeps its flat lists of directions in the state of the first parameter."""
    model = Weights().to(torch.bfloat16)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    x = batches(1)[0]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    optimizer.step(closure)
    attach(optimizer, model)
    state = optimizer.state[held(optimizer)[0]]
    assert state["old_dirs"]
    assert {t.dtype for t in [*state["old_dirs"], *state["old_stps"], state["d"]]} == {torch.float32}
    optimizer.step(closure)


@pytest.mark.parametrize("write_back", [False, True])
def test_detach_puts_the_models_parameters_back(write_back: bool) -> None:
    """Training continues without masters."""
    model, optimizer = prepared(Net)
    train(model, optimizer, 3)
    masters = [m.detach().clone() for m in held(optimizer)]
    moments = [optimizer.state[m]["exp_avg"].clone() for m in held(optimizer)]
    backward(model)
    attachment = attachment_of(optimizer)
    assert attachment is not None
    attachment.detach(write_back=write_back)
    assert attachment_of(optimizer) is None
    for parameter, own, master, moment in zip(
        held(optimizer), model.parameters(), masters, moments, strict=True
    ):
        assert parameter is own
        assert master_of(own) is None
        assert own.grad is not None
        assert own.grad.dtype is own.dtype
        if write_back:
            assert torch.equal(own.detach(), master)
        else:
            assert torch.equal(own.detach(), master.to(own.dtype))
        state = optimizer.state[own]["exp_avg"]
        assert state.dtype is own.dtype
        assert torch.equal(state, moment.to(own.dtype))
    optimizer.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, 2)
    assert all(not torch.equal(b, p.detach()) for b, p in zip(before, model.parameters(), strict=True))
    attach(optimizer, model)
    train(model, optimizer, 1)


# --- optimizer state dicts ----------------------------------------------------------------------------------


def saved_and_loaded(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@each_value()
@pytest.mark.parametrize("make", STATEFUL.values(), ids=STATEFUL.keys())
@pytest.mark.parametrize("through", ["optimizer", "distributed", "distributed-whole", "distributed-flat"])
def test_a_run_continues_bit_for_bit(make: Any, through: str) -> None:
    """A run saved and loaded into new objects trains on as if uninterrupted, with momentum in fp32."""

    def build() -> tuple[Weights, torch.optim.Optimizer]:
        model = Weights()
        former = lower(model, torch.bfloat16)
        optimizer = make(list(model.parameters()))
        attach(optimizer, model, originals=former)
        return model, optimizer

    options = StateDictOptions(
        full_state_dict=through == "distributed-whole",
        flatten_optimizer_state_dict=through == "distributed-flat",
    )
    torch.manual_seed(0)
    model, optimizer = build()
    train(model, optimizer, 3)
    weights = saved_and_loaded(fp32_state_dict(model))
    if through == "optimizer":
        state = saved_and_loaded(optimizer.state_dict())
    else:
        state = saved_and_loaded(get_optimizer_state_dict(model, optimizer, options=options))
        if through == "distributed":
            assert set(state["state"]) == {"a.weight", "b.weight"}

    torch.manual_seed(1)
    other, loaded = build()
    other.load_state_dict(weights)
    if through == "optimizer":
        loaded.load_state_dict(state)
    else:
        set_optimizer_state_dict(other, loaded, state, options=options)
    for a, b in zip(held(optimizer), held(loaded), strict=True):
        assert torch.equal(a.detach(), b.detach())
        assert optimizer.state[a].keys() == loaded.state[b].keys()
        for key, value in optimizer.state[a].items():
            if isinstance(value, Tensor):
                assert loaded.state[b][key].dtype is torch.float32
                assert torch.equal(loaded.state[b][key], value)
    train(model, optimizer, 3)
    train(other, loaded, 3)
    for a, b in zip(held(optimizer), held(loaded), strict=True):
        assert torch.equal(a.detach(), b.detach())


def test_distributed_state_dicts_of_model_and_optimizer_together() -> None:
    """get_state_dict and set_state_dict work with fp32 BatchNorm beside the masters and a frozen parameter."""
    model, optimizer = prepared(Net)
    train(model, optimizer, 2)
    weights, state = get_state_dict(model, optimizer)
    other, loaded = prepared(Net)
    train(other, loaded, 1)
    set_state_dict(other, loaded, model_state_dict=weights, optim_state_dict=state)
    for a, b in zip(held(optimizer), held(loaded), strict=True):
        assert torch.equal(optimizer.state[a]["exp_avg"], loaded.state[b]["exp_avg"])
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.detach(), b.detach())


def test_state_of_a_plain_fp32_run_loads() -> None:
    """A checkpoint of any plan loads into any other, and back."""
    torch.manual_seed(0)
    plain = Weights()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    train(plain, optimizer, 3)
    model, other = prepared()
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model.load_state_dict(plain.state_dict())
    for p, m in zip(plain.parameters(), held(other), strict=True):
        assert torch.equal(p.detach(), m.detach())
        assert torch.equal(optimizer.state[p]["exp_avg"], other.state[m]["exp_avg"])
    optimizer.load_state_dict(other.state_dict())
    plain.load_state_dict(fp32_state_dict(model))


# --- weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("through", ["model", "submodule", "wrapper"])
@pytest.mark.parametrize("assign", [False, True])
def test_loading_weights_gives_masters_their_full_values(assign: bool, through: str) -> None:
    """The masters are not rounded, and the optimizer keeps updating the model's own parameters."""
    model, optimizer = prepared()
    train(model, optimizer, 2)
    torch.manual_seed(5)
    fresh = {key: torch.randn_like(value) for key, value in Weights().state_dict().items()}
    parameters = list(model.parameters())
    if through == "model":
        model.load_state_dict(fresh, assign=assign)
    elif through == "submodule":
        model.a.load_state_dict({"weight": fresh["a.weight"]}, assign=assign)
        model.b.load_state_dict({"weight": fresh["b.weight"]}, assign=assign)
    else:
        nn.Sequential(model).load_state_dict(
            {f"0.{key}": value for key, value in fresh.items()}, assign=assign
        )
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    optimizer.step()  # no gradients: only takes over what was changed by hand
    for key, parameter in model.named_parameters():
        master = master_of(parameter)
        assert master is not None
        assert torch.equal(master.detach(), fresh[key])
        assert torch.equal(parameter.detach(), fresh[key].bfloat16())
    train(model, optimizer, 1)
    assert not torch.equal(model.a.weight.detach(), fresh["a.weight"].bfloat16())


def test_loading_part_of_the_weights() -> None:
    """strict=False leaves the other weights alone, and torch reports missing keys as usual."""
    model, _ = prepared()
    kept = master_of(model.b.weight).detach().clone()  # type: ignore[union-attr]
    result = model.load_state_dict({"a.weight": torch.ones(16, 8), "more": torch.ones(1)}, strict=False)
    assert result.missing_keys == ["b.weight"]
    assert result.unexpected_keys == ["more"]
    assert (master_of(model.a.weight) == 1).all()
    assert torch.equal(master_of(model.b.weight).detach(), kept)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match=r"size mismatch for a\.weight"):
        model.load_state_dict({"a.weight": torch.ones(2), "b.weight": torch.ones(4, 16)})


def test_fp32_state_dict_has_the_models_own_keys_and_nothing_low() -> None:
    """Includes both tied keys and the buffers, keeps integers, and loads into a plain fp32 model."""
    model, optimizer = prepared(Tied)
    model.register_buffer("scale", torch.ones(2, dtype=torch.bfloat16))
    model.register_buffer("count", torch.ones(2, dtype=torch.int64))
    train(model, optimizer, 2)
    state = fp32_state_dict(model)
    assert state.keys() == model.state_dict().keys()
    assert state["embed.weight"] is state["head.weight"]
    assert type(state["embed.weight"]) is Tensor
    assert not state["embed.weight"].requires_grad
    assert torch.equal(state["embed.weight"], held(optimizer)[0].detach())
    assert state["scale"].dtype is torch.float32
    assert state["count"].dtype is torch.int64
    plain = Tied()
    plain.load_state_dict({k: v for k, v in state.items() if k not in ("scale", "count")})
    assert torch.equal(plain.head.weight.detach(), state["head.weight"])
    assert next(iter(fp32_state_dict(model, prefix="x."))).startswith("x.")


def test_fp32_state_dict_sees_weights_written_through_data() -> None:
    """It compares values, so a checkpoint always holds the weights that the model runs with."""
    model, _ = prepared()
    model.a.weight.data[0] = 5.0
    state = fp32_state_dict(model)
    assert (state["a.weight"][0] == 5).all()
    assert not torch.equal(state["a.weight"][1:], state["a.weight"][1:].bfloat16().float())


def test_masters_of_two_models_are_told_apart_by_name() -> None:
    """A name that occurs in both models gets a position as prefix; another process finds masters by name."""
    models = [Weights(), Weights()]
    former = lower(models[0], torch.bfloat16) | lower(models[1], torch.bfloat16)
    optimizer = torch.optim.SGD([models[0].a.weight, models[1].a.weight, models[1].b.weight], lr=0.1)
    attachment = attach(optimizer, models[0], originals=former)
    attach(optimizer, models[1])
    state = attachment.state_dict()
    assert list(state) == ["0.a.weight", "1.a.weight", "b.weight"]
    for value, master in zip(state.values(), held(optimizer), strict=True):
        assert torch.equal(value, master.detach())


def test_nan_written_by_hand_reaches_the_master() -> None:
    """NaN differs from every value, including itself, but is taken over like any other."""
    model, optimizer = prepared()
    with torch.no_grad():
        model.a.weight[0, 0] = torch.nan
    optimizer.step()
    assert held(optimizer)[0][0, 0].isnan()
    assert held(optimizer)[0].isnan().sum() == 1


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD])
def test_numbers_in_the_state_keep_their_format_when_the_masters_go(
    kind: type[torch.optim.Optimizer],
) -> None:
    """Torch keeps them in fp32 beside low-precision parameters: in bf16, a product of momenta would stop changing."""
    model = Weights()
    former = lower(model, torch.bfloat16)
    optimizer = kind(model.parameters(), lr=0.01)
    attach(optimizer, model, originals=former)
    train(model, optimizer, 3)
    attachment_of(optimizer).detach(write_back=False)
    numbers = [v for state in optimizer.state.values() for v in state.values() if v.dim() == 0]
    assert numbers
    assert all(value.dtype is torch.float32 for value in numbers)
    assert all(v.dtype is torch.bfloat16 for s in optimizer.state.values() for v in s.values() if v.dim())
