"""The weights of served models: written after prepare, and shared by several models."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import castwise
from castwise.errors import PlanError, StateError
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


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("write", [_load, _copy, _add])
@pytest.mark.parametrize("plan", ["bf16-mixed", "fp16-true"])
def test_close_says_which_weights_were_written_while_they_were_low(
    plan: str, write: Callable[[nn.Module, nn.Module], None], keep: bool
) -> None:
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().half())
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model, inference=True, keep_originals=keep)
    write(model, make(seed=1))
    now = [parameter.clone() for parameter in model.parameters()]
    if keep and write is _load:  # which keeps what it loads
        amp.close()
        assert all(map(torch.equal, model.parameters(), make(seed=1).parameters()))
        return
    with pytest.warns(
        UserWarning, match=r"0\.weight.* were written while they were stored low for inference"
    ):
        amp.close()
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())
    assert all(torch.equal(a.float(), b) for a, b in zip(now, model.parameters(), strict=True))


def heads() -> tuple[nn.Module, nn.Module]:
    """Two models with one encoder."""
    both = make(8)
    torch.manual_seed(1)
    return nn.Sequential(both, nn.Linear(8, 2).to(DEVICE)).eval(), nn.Sequential(
        both, nn.Linear(8, 3).to(DEVICE)
    ).eval()


@pytest.mark.parametrize(
    "plan",
    [
        "fp32",
        "bf16-mixed",
        "bf16-true",
        "fp16-mixed",
        "fp16-mixed+ops.gelu=fp32",
        "bf16-true+regions.0.2=fp32",
    ],
)
def test_models_of_one_session_may_share_a_module(plan: str) -> None:
    want = []
    for number in range(2):  # each alone
        model = heads()[number]
        with castwise.Amp(plan, device=DEVICE) as amp, torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            want.append(amp.prepare(model, inference=True)(X))
            amp.close()
    amp = castwise.Amp(plan, device=DEVICE)
    first, second = (amp.prepare(model, inference=True) for model in heads())
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(first(X), want[0])
            assert torch.equal(second(X), want[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        amp.close()
    for model in (first, second):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert model(X).dtype is model[0](X).dtype is torch.float32


TRAINED = "trained "


def prepare(amp: castwise.Amp, model: nn.Module, how: str) -> None:
    if how.startswith(TRAINED):
        amp.prepare(model.train(), torch.optim.AdamW(model.parameters()))
    else:
        amp.prepare(model, inference=True, keep_originals=True)


SHARES = [
    ("bf16-mixed", "bf16-mixed", "has stored 0.0.weight in bf16, which its close"),
    ("bf16-true", "bf16-true", "has stored"),
    ("bf16-mixed", "fp16-mixed", "stores 0.0.weight in bf16, which this plan keeps in fp32"),
    ("fp32", "bf16-mixed", "needs 0.0.weight in fp32, which this plan stores in bf16"),
    ("fp32", "fp16-true", "needs 0.0.weight in fp32"),
    ("bf16-mixed", "bf16-mixed+regions.0.0=fp32", "needs 0.0.weight in bf16, which this plan stores in fp32"),
    ("bf16-mixed+regions.0.0=fp32", "bf16-mixed", "needs 0.0.weight in fp32, which this plan stores in bf16"),
    ("bf16-mixed+regions.0.2=fp32", "bf16-mixed+regions.0.2=fp32", "has stored"),
    ("fp32", "fp32+regions.0.2=bf16", "the two plans do not cast alike at the entry of 0.2"),
    ("fp32+regions.0.2=bf16", "fp32", "do not cast alike at the entry of 0.2"),
    ("fp32+regions.0.2=bf16", "fp32+regions.0.2=fp16", "do not cast alike at the entry of 0.2"),
    (TRAINED + "bf16-mixed", "bf16-mixed", "needs 0.0.weight in fp32, which this plan stores in bf16"),
    (TRAINED + "fp32", "bf16-true", "needs 0.0.weight in fp32"),
    ("bf16-mixed", TRAINED + "bf16-mixed", "stores 0.0.weight in bf16, which this plan keeps in fp32"),
]


@pytest.mark.parametrize(("plan", "other", "said"), SHARES)
def test_what_would_change_a_model_that_is_prepared_is_refused(plan: str, other: str, said: str) -> None:
    first, second = heads()
    amps = [castwise.Amp(how.removeprefix(TRAINED), device=DEVICE) for how in (plan, other)]
    prepare(amps[0], first, plan)
    want, before = first.eval()(X), {name: p.dtype for name, p in first.named_parameters()}
    with pytest.raises(
        StateError, match=r"prepare: this Sequential shares 0\.0\.weight.* that Amp.* has prep"
    ) as error:
        prepare(amps[1], second, other)
    assert said in str(error.value)
    assert torch.equal(first(X), want)
    assert {name: p.dtype for name, p in first.named_parameters()} == before
    amps[0].close()
    assert {p.dtype for p in second.parameters()} == {torch.float32}
    assert second.eval()(X).dtype is torch.float32


@pytest.mark.parametrize("plan", ["fp32", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("part_first", [True, False])
def test_a_model_and_a_part_of_it_are_not_both_prepared(plan: str, part_first: bool) -> None:
    whole, _ = heads()
    part = whole[0]
    first, second = (part, whole) if part_first else (whole, part)
    with castwise.Amp(plan, device=DEVICE) as amp:
        amp.prepare(first, inference=True, keep_originals=True)
        for again in (amp, castwise.Amp(plan, device=DEVICE)):
            with pytest.raises(StateError, match="one is a part of the other"):
                again.prepare(second, inference=True)
    assert whole(X).dtype is part(X).dtype is torch.float32


def test_models_of_two_sessions_may_share_what_neither_changes() -> None:
    first, second = heads()
    one, two = (
        castwise.Amp("bf16-mixed", device=DEVICE),
        castwise.Amp("fp16-mixed+loss_scale=none", device=DEVICE),
    )
    one.prepare(first, torch.optim.SGD(first.parameters(), 0.1))
    two.prepare(second, torch.optim.SGD(second[1].parameters(), 0.1))
    assert first(X).dtype is second(X).dtype is torch.float32
    one.close()
    two.close()


def test_a_weight_that_loading_replaced_is_named() -> None:
    model = make()
    state = {"0.weight": torch.ones(8, 8, device=DEVICE)}
    amp = castwise.Amp("bf16-true", device=DEVICE)
    amp.prepare(model, inference=True)
    model.load_state_dict(state, assign=True, strict=False)
    with pytest.raises(
        RuntimeError, match=r"castwise: 0\.weight is not the parameter .* stored in torch.float32"
    ):
        model(X)
    with pytest.warns(UserWarning, match="rounded for inference"):
        amp.close()


@pytest.mark.parametrize("how", ["heads", "teacher first", "teacher last", "changed"])
@pytest.mark.parametrize(
    "plan", ["bf16-master", "fp16-master+loss_scale=none", "O2", "bf16-true", "bf16-mixed", "fp32"]
)
def test_shared_weights_that_are_not_trained_come_back_exactly(plan: str, how: str) -> None:
    first, second = heads()
    first[0].requires_grad_(False)
    before = [parameter.clone() for parameter in first[0].parameters()]
    amp = castwise.Amp(plan, device=DEVICE)
    low = "mixed" in plan and how == "teacher last"  # the teacher's weights would be cast once
    calls = {
        "one": lambda: amp.prepare(first, torch.optim.SGD(first[1].parameters(), 0.1)),
        "two": lambda: amp.prepare(second, torch.optim.SGD(second[1].parameters(), 0.1)),
        "served": lambda: amp.prepare(second, inference=True, keep_originals=True),
    }
    order = {"teacher first": ("served", "one"), "teacher last": ("one", "served")}.get(how, ("one", "two"))
    if low:
        with pytest.raises((StateError, PlanError)):
            [calls[name]() for name in order]
    else:
        for name in order:
            calls[name]()
        first(X), second(X)
        if how == "changed":
            amp.change("fp32")
    amp.close()
    assert all(map(torch.equal, first[0].parameters(), before))


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("plan", ["bf16-master", "fp16-master+loss_scale=none"])
def test_masters_of_a_model_that_was_served_before_come_back(plan: str, keep: bool) -> None:
    first, second = heads()
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(second, inference=True, keep_originals=keep)
    optimizer = torch.optim.SGD(first.parameters(), 0.1)
    amp.prepare(first, optimizer)
    for _ in range(3):
        amp.backward(first(X).square().mean())
        amp.step(optimizer)
        optimizer.zero_grad()
    want = {name: value.clone() for name, value in amp.model_state_dict(first).items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* were rounded for inference")  # second's own head
        amp.close()
    assert all(torch.equal(value, want[name]) for name, value in first.state_dict().items())


@pytest.mark.parametrize("plan", ["bf16-master", "bf16-true+ops.gelu=fp32", "bf16-mixed", "O2+ops.gelu=fp32"])
def test_a_loss_of_one_head_is_no_call_past_the_other(plan: str) -> None:
    first, second = heads()
    amp = castwise.Amp(plan, device=DEVICE)
    optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in (first, second[1])]
    for model, optimizer in zip((first, second), optimizers, strict=True):
        amp.prepare(model.train(), optimizer)
    for model in (first, first, second, first, second, second):
        amp.backward(model(X).float().square().mean())
        amp.step(*optimizers)
        for optimizer in optimizers:
            optimizer.zero_grad()
    amp.close()


def test_nothing_is_said_of_weights_that_loading_replaced_or_that_were_cast_back() -> None:
    model, values = make(), make(seed=1)
    amp = castwise.Amp("bf16-mixed", device=DEVICE)
    amp.prepare(model, inference=True)
    model.load_state_dict(values.state_dict(), assign=True)
    amp.close()  # a warning would be an error
    kept = make()
    before = [parameter.clone() for parameter in kept.parameters()]
    amp.prepare(kept, inference=True, keep_originals=True)
    kept.float()
    amp.close()
    assert all(map(torch.equal, kept.parameters(), before))
