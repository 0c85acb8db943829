"""The session counts updates lost to rounding, without changing the training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import castwise
from castwise.core.session.dropped import DroppedUpdates
from tests.here import DEVICE

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, 1e-2, momentum=0.9, weight_decay=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, 1e-4, amsgrad=True),
    "fused adamw": lambda params: torch.optim.AdamW(params, 1e-4, fused=True),
    "adamw for loop": lambda params: torch.optim.AdamW(params, 1e-4, foreach=False),
    "rmsprop": lambda params: torch.optim.RMSprop(params, 1e-4),
    "adagrad": lambda params: torch.optim.Adagrad(params, 1e-3),
    "nadam": lambda params: torch.optim.NAdam(params, 1e-4),
    "adafactor": lambda params: torch.optim.Adafactor(params, 1e-2),
    "muon": lambda params: torch.optim.Muon(params, 1e-3),
    "rprop": lambda params: torch.optim.Rprop(params, 1e-4),
}


class Noisy(torch.optim.Optimizer):
    """A custom optimizer with its own options, which draws random numbers in its step."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})
        self.noise = 0.1

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * (p.grad + self.noise * torch.randn_like(p.grad)))


class Wrapping(Noisy):
    """Steps another optimizer, so stepping a copy of it would step the original too."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params)
        self.inner = torch.optim.SGD(params, 0.1)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(48, 32, bias=False).bfloat16()


def run(amp: castwise.Amp, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator(DEVICE).manual_seed(1)
    for _ in range(steps):
        amp.backward((model(torch.randn(4, 48, generator=generator)) - 1).square().mean())
        amp.step(optimizer)
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_share_is_that_of_a_step_made_in_fp32(kind: str) -> None:
    """The share equals that computed from fp32 copies of parameter, state and optimizer that take the same steps."""
    model = layer()
    optimizer = OPTIMIZERS[kind](model.parameters())
    amp = castwise.Amp("bf16-true", device=DEVICE)
    amp.prepare(model, optimizer)
    moved, square, lost = 0, 0.0, 0.0
    generator = torch.Generator(DEVICE).manual_seed(1)
    for step in (1, 2, 3, 4, 5):
        amp.backward((model(torch.randn(4, 48, generator=generator)) - 1).square().mean())
        wide = nn.Parameter(model.weight.detach().float())
        assert model.weight.grad is not None
        wide.grad = model.weight.grad.float()
        twin = OPTIMIZERS[kind]([wide])
        for name, value in optimizer.state.get(model.weight, {}).items():
            low = isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16
            twin.state[wide][name] = value.float() if low else copy.deepcopy(value)
        twin.step()
        before = model.weight.detach().clone()
        amp.step(optimizer)
        optimizer.zero_grad()
        if step in (1, 2, 4):
            squares = (wide.detach() - before.float()).double().square()
            moved += int((squares != 0).sum())
            square += float(squares.sum())
            lost += float(squares[model.weight == before].sum())
    assert 0.0 < lost <= square
    assert amp.dropped_updates == pytest.approx(lost / square)
    assert f"{lost / square:.1%} of the updates ({moved:,} measured at 3 of 5 steps)" in amp.summary()
    assert "'bf16-master'" in amp.summary()


@pytest.mark.parametrize("make", [*OPTIMIZERS.values(), Noisy], ids=[*OPTIMIZERS, "own"])
def test_the_run_does_not_notice(
    make: Callable[[Any], torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for watched in (True, False):
        if not watched:
            monkeypatch.setattr(DroppedUpdates, "follow", lambda *_: None)
        model = layer()
        optimizer = make(model.parameters())
        with castwise.Amp("bf16-true", device=DEVICE) as amp:
            amp.prepare(model, optimizer)
            torch.manual_seed(2)
            run(amp, model, optimizer, 9)
            assert (amp.dropped_updates is not None) is watched
            assert "not measured" not in amp.summary()
            state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
            found.append((model.weight.detach().clone(), torch.get_rng_state(), state))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert len(found[0][2]) == len(found[1][2])
    assert all(map(torch.equal, found[0][2], found[1][2]))


def test_a_scheduler_and_several_groups_are_followed() -> None:
    """A group with learning rate zero has no updates to lose."""
    model = nn.ModuleList([layer(), layer()])
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[1].parameters()}], 1e-5
    )
    amp = castwise.Amp("bf16-true", device=DEVICE)
    amp.prepare(model, optimizer)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5)
    amp.backward(sum(part(torch.randn(4, 48).bfloat16()).float().square().mean() for part in model))
    amp.step(optimizer)
    scheduler.step()
    assert amp._dropped.moved <= model[1].weight.numel()
    assert amp.dropped_updates is not None
    assert amp.dropped_updates > 0.9


@pytest.mark.parametrize("numel", [5_000_000, 1_000])
def test_a_look_takes_pieces_of_what_is_large(numel: int) -> None:
    model = nn.Embedding(numel // 10, 10).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    amp = castwise.Amp("bf16-true", device=DEVICE)
    amp.prepare(model, optimizer)
    amp.backward(model.weight.float().square().sum() * 1e-4)
    amp.step(optimizer)
    assert 0 < amp._dropped.moved <= 80_000


@pytest.mark.parametrize("plan", ["fp32", "bf16-mixed", "bf16-master", "fp16-master"])
def test_nothing_is_looked_at_where_masters_or_fp32_take_the_updates(plan: str) -> None:
    model = layer().float()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with castwise.Amp(plan, device=DEVICE) as amp:
        amp.prepare(model, optimizer)
        run(amp, model, optimizer, 2)
        assert amp.dropped_updates is None
        assert "dropped" not in amp.summary()


def test_what_cannot_be_stepped_beside_itself_is_named() -> None:
    for make, why in ((Wrapping, "holds inner, a SGD"), (torch.optim.LBFGS, "evaluates the loss")):
        model = layer()
        optimizer = make(model.parameters())
        inner = copy.deepcopy(optimizer.inner.state_dict()) if make is Wrapping else None
        amp = castwise.Amp("bf16-true", device=DEVICE)
        amp.prepare(model, optimizer)
        if make is Wrapping:
            run(amp, model, optimizer, 1)
            assert optimizer.inner.state_dict() == inner
        else:

            def closure(amp: Any = amp, model: Any = model, optimizer: Any = optimizer) -> Any:
                optimizer.zero_grad()
                loss = (model(torch.ones(4, 48)) - 1).square().mean()
                amp.backward(loss)
                return loss

            amp.step(optimizer, closure=closure)
        assert amp.dropped_updates is None
        assert f"not measured for {make.__name__}: " in amp.summary()
        assert why in amp.summary()


def test_close_takes_the_looks_off() -> None:
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    amp = castwise.Amp("bf16-true", device=DEVICE)
    amp.prepare(model, optimizer)
    amp.close()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


class Signs(torch.optim.Optimizer):
    """Moves every element by the learning rate, and keeps the rounding error in one of the known ways."""

    def __init__(self, params: Any, way: str, lr: float = 1e-4, *, everywhere: bool = False) -> None:
        super().__init__(params, {"lr": lr})
        self.way = way
        self.everywhere = everywhere  # compensate in every format, not only in low precision

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                    self.update(p, -group["lr"] * p.grad.float().sign())

    def update(self, p: torch.Tensor, by: torch.Tensor) -> None:
        low, state, before = p.dtype is not torch.float32, self.state[p], p.clone()
        if self.way == "sped":  # keeps the sum of updates as momentum, not the sum of what rounding drops
            p.copy_(p.float() + state.setdefault("speed", torch.zeros_like(p.float())).mul_(0.9).add_(by))
        elif (not low and not self.everywhere) or self.way == "dropped":
            p.copy_(p.float() + by)
        elif self.way == "kahan":
            lost = state.setdefault("lost", torch.zeros_like(p))
            lost += by.to(p.dtype)
            p += lost
            lost += before - p
        elif self.way == "textbook":
            excess = state.setdefault("excess", torch.zeros_like(p))
            wanted = by.to(p.dtype) - excess
            p += wanted
            excess.copy_((p - before) - wanted)
        elif self.way == "copy":
            p.copy_(state.setdefault("wide", p.float()).add_(by))
        elif self.way == "bits":
            steps = torch.ldexp(torch.full_like(by, 2.0**-7), p.float().frexp()[1] - 1) / 254
            bits = state.setdefault("bits", torch.zeros(p.shape, dtype=torch.int8))
            wide = p.float() + bits.float() * steps + by
            p.copy_(wide)
            bits.copy_(((wide - p.float()) / steps).round().clamp(-127, 127))
        elif self.way == "random":
            bits = (p.float() + by).view(torch.int32)
            p.copy_(((bits + torch.randint_like(bits, 1 << 16)) & -(1 << 16)).view(torch.float32))


@pytest.mark.parametrize("lr", [1e-5, 1e-4, 1e-2])
@pytest.mark.parametrize(
    ("way", "everywhere"),
    [(way, everywhere) for way in ("kahan", "textbook", "copy") for everywhere in (False, True)]
    + [("random", False), ("bits", False)],
)
def test_optimizers_that_keep_what_rounding_drops_are_not_accused(
    way: str, everywhere: bool, lr: float
) -> None:
    """Includes optimizers that keep it in every format; their fp32 step applies everything kept so far."""
    model = layer()
    optimizer = Signs(model.parameters(), way, lr, everywhere=everywhere)
    amp = castwise.Amp("bf16-true", device=DEVICE)
    amp.prepare(model, optimizer)
    run(amp, model, optimizer, 16)
    assert amp.dropped_updates is not None
    assert amp.dropped_updates < 0.01
    assert ("no update is lost to rounding to bf16 (" in amp.summary()) == (amp.dropped_updates == 0)


@pytest.mark.parametrize("way", ["dropped", "sped"])
@pytest.mark.parametrize("lr", [1e-5, 3e-5])
def test_those_that_keep_nothing_still_are(lr: float, way: str) -> None:
    model = layer()
    optimizer = Signs(model.parameters(), way, lr)
    amp = castwise.Amp("bf16-true", device=DEVICE)
    amp.prepare(model, optimizer)
    run(amp, model, optimizer, 16)
    assert amp.dropped_updates is not None
    assert amp.dropped_updates > 0.7
    assert "use fp32 masters to keep them: the plan 'bf16-master'" in amp.summary()


def test_what_was_taken_for_lost_is_given_back() -> None:
    """Stochastic rounding whose first updates are too small to show; they are no longer counted as lost later."""
    model = layer()
    optimizer = Signs(model.parameters(), "random", 1e-9)
    amp = castwise.Amp("bf16-true", device=DEVICE)
    amp.prepare(model, optimizer)
    run(amp, model, optimizer, 2)
    assert amp.dropped_updates == 1.0
    optimizer.param_groups[0]["lr"] = 1e-4
    run(amp, model, optimizer, 6)
    assert amp.dropped_updates == 0.0
    assert all(lost == 0 for _, lost in amp._dropped.by_parameter.values())


def test_whole_numbers_are_not_called_quantised() -> None:
    model = layer().float()
    model.register_parameter("steps", nn.Parameter(torch.arange(5), requires_grad=False))
    amp = castwise.Amp("bf16-mixed", device=DEVICE)
    amp.prepare(model, torch.optim.SGD([model.weight], 1e-2))
    assert "5 parameters in int64, frozen" in amp.summary()
    assert "quantised" not in amp.summary()


def test_the_summary_says_how_a_model_arrived_and_is_stored() -> None:
    model = nn.ModuleDict({"base": layer().requires_grad_(False), "head": nn.Linear(32, 4).bfloat16()})
    model["base"].register_parameter(
        "packed", nn.Parameter(torch.ones(7, dtype=torch.uint8), requires_grad=False)
    )
    model["own"] = nn.Linear(3, 2, bias=False)
    model["frozen"] = layer().requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-2)
    amp = castwise.Amp("bf16-mixed", device=DEVICE)
    amp.prepare(model, optimizer, widen=True)
    said = amp.summary()
    assert said.startswith(f"bf16-mixed on {DEVICE}: autocasts to bf16")
    assert "7 parameters quantised" in said
    assert "132 parameters in fp32 that arrived in bf16" in said
    assert "6 parameters in fp32," in said
    assert "3,072 parameters in bf16 as they arrived, frozen" in said
    assert "widened by 264 B" in said
    with castwise.Amp("bf16-master", device=DEVICE) as other:
        model = layer()
        other.prepare(model, torch.optim.SGD(model.parameters(), 1e-2))
        assert "1,536 parameters in bf16 with fp32 masters as they arrived" in other.summary()
