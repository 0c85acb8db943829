"""A monitor reports sudden changes between samples and collapses; sound training raises no alarm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, MultiStepLR, OneCycleLR

import castwise
from castwise.lab.watch import Monitor
from tests.here import DEVICE

AT = 300
STEPS = 700
CLASSES = 8


class Net(nn.Module):
    """A model with an embedding, ReLU layers with normalization and dropout, and a sigmoid gate."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.first = nn.Linear(16 + 16, 32)
        self.norm = nn.LayerNorm(32)
        self.second = nn.Linear(32, 32)
        self.gate = nn.Linear(32, 32)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(32, CLASSES)
        self.detached = False

    def forward(self, x: Tensor, token: Tensor) -> Tensor:
        h = functional.relu(self.norm(self.first(torch.cat([x, self.embed(token)], 1))))
        if self.detached:
            h = h.detach()
        h = functional.relu(self.second(h)) * torch.sigmoid(self.gate(h))
        out: Tensor = self.head(self.drop(h))
        return out


@dataclass
class Run:
    """A training run; ``at`` is called before each step and may change anything."""

    plan: str = "bf16-mixed"
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.AdamW(params, 2e-3)
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    at: Callable[[Run, int], object] = lambda run, step: None
    dropout: float = 0.0
    noise: float = 0.3
    accumulate: int = 1
    clip: float | None = None
    steps: int = STEPS
    seed: int = 0
    scale: float = 1.0
    wrong: bool = False
    tokens: int = 50
    alarms: list[tuple[str, int]] = field(default_factory=list)

    def train(self) -> Run:
        torch.manual_seed(self.seed)
        self.net = Net(self.dropout)
        self.made = self.optimizer(self.net.parameters())
        scheduler = None if self.schedule is None else self.schedule(self.made)
        amp = castwise.Amp(self.plan, device=DEVICE, patience=10**6)
        amp.prepare(self.net, self.made)
        generator = torch.Generator(DEVICE).manual_seed(self.seed + 1)
        teacher = torch.randn(16, CLASSES, generator=generator)
        by_token = torch.randn(50, CLASSES, generator=generator)
        with Monitor(amp) as self.monitor:
            for step in range(1, self.steps + 1):
                self.at(self, step)
                for _ in range(self.accumulate):
                    x = torch.randn(32, 16, generator=generator)
                    token = torch.randint(0, self.tokens, (32,), generator=generator)
                    noise = self.noise * torch.randn(32, CLASSES, generator=generator)
                    y = (x @ teacher + by_token[token] + noise).argmax(1)
                    if self.wrong:
                        y = (y + 3) % CLASSES
                    loss = functional.cross_entropy(self.net(x * self.scale, token), y)
                    amp.backward(loss / self.accumulate)
                amp.step(self.made, max_norm=self.clip)
                self.made.zero_grad()
                if scheduler is not None:
                    scheduler.step()
        self.loss = float(loss.detach())
        self.alarms = [(alarm.kind, alarm.step) for alarm in self.monitor.alarms]
        amp.close()
        return self


# --- changes that must be reported ----------------------------------------------------------------------------


def once(change: Callable[[Run], object], step: int = AT) -> Callable[[Run, int], object]:
    return lambda run, now: change(run) if now == step else None


def rate(factor: float) -> Callable[[Run], object]:
    def change(run: Run) -> None:
        for group in run.made.param_groups:
            group["lr"] *= factor

    return change


def write(name: str, value: Callable[[Tensor], object]) -> Callable[[Run], object]:
    def change(run: Run) -> None:
        with torch.no_grad():
            for path, parameter in run.net.named_parameters():
                if path.startswith(name):
                    value(parameter)

    return change


def lose(run: Run) -> None:
    for group in run.made.param_groups:
        group["params"] = [p for p in group["params"] if p not in set(run.net.first.parameters())]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.05, momentum=0.9)


TROUBLE: dict[str, tuple[Run, int]] = {
    "learning rate times 3000": (Run(at=once(rate(3000))), 10),
    "learning rate times 100": (Run(at=once(rate(100))), 10),
    "learning rate times 300, sgd": (Run(at=once(rate(300)), optimizer=sgd), 10),
    "labels switched": (Run(at=once(lambda run: setattr(run, "wrong", True))), 10),
    "inputs of the other sign": (Run(at=once(lambda run: setattr(run, "scale", -1.0))), 10),
    "weights times 30": (Run(at=once(write("second", lambda p: p.mul_(30)))), 100),
    "weights drawn anew": (Run(at=once(write("", lambda p: nn.init.normal_(p, 0.0, 0.5)))), 100),
    "weights zero": (Run(at=once(write("", lambda p: p.zero_()))), 100),
    "weights of the first layer zero": (Run(at=once(write("first", lambda p: p.zero_()))), 100),
    "clip removed": (
        Run(clip=0.05, optimizer=lambda params: torch.optim.SGD(params, 5.0), at=once(lambda run: setattr(run, "clip", None))), 100,
    ),
    "dead ReLUs": (Run(at=once(write("norm.bias", lambda p: p.fill_(-100.0)))), 100),
    "dead ReLUs of a large step": (Run(at=once(write("second.bias", lambda p: p.fill_(-1e3)))), 100),
    "saturated sigmoid": (Run(at=once(write("gate.bias", lambda p: p.fill_(-200.0)))), 100),
    "detach": (Run(at=once(lambda run: setattr(run.net, "detached", True))), 100),
    "the optimizer lost parameters": (Run(at=once(lose)), 100),
    "the optimizer lost all parameters but one": (
        Run(at=once(lambda run: run.made.param_groups[0].update(params=[run.net.head.bias]))), 100,
    ),
    "learning rate 0": (Run(at=once(rate(0.0))), 10),
    "learning rate 0 from the start": (Run(optimizer=lambda params: torch.optim.AdamW(params, 0.0)), -AT + 10),
}  # fmt: skip
"""For each case, the training run and the most steps between the change and the alarm."""


BY_THE_LOSS = ("labels switched", "inputs of the other sign", "weights of the first layer zero")
"""Cases detected from the loss of each step, which is read only on a CPU; on a GPU reading would synchronise. A run whose first
layer is zeroed recovers within a few steps, and is not seen in the samples of a device."""


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.cpu) if c in BY_THE_LOSS else c for c in TROUBLE]
)
def test_a_change_is_seen(case: str) -> None:
    run, within = TROUBLE[case]
    run.steps = AT + within
    run.train()
    assert run.alarms, (case, run.loss)
    first = min(step for _, step in run.alarms)
    early = AT + within < AT
    assert early or first >= AT, run.alarms
    assert first <= AT + within, run.alarms


# --- sound training -------------------------------------------------------------------------------------------


def thaw(run: Run, step: int) -> None:
    run.net.first.requires_grad_(step > AT)


def freeze(run: Run, step: int) -> None:
    run.net.first.requires_grad_(step < AT)


SOUND: dict[str, Run] = {
    "adamw": Run(),
    "another seed": Run(seed=5),
    "fp16-mixed": Run(plan="fp16-mixed", steps=400),
    "bf16-master": Run(plan="bf16-master"),
    "fp32": Run(plan="fp32"),
    "sgd": Run(optimizer=sgd),
    "warm-up": Run(schedule=lambda o: LambdaLR(o, lambda step: min(1.0, step / 400))),
    "cosine decay to zero": Run(schedule=lambda o: CosineAnnealingLR(o, 400), steps=400),
    "linear decay to zero, and on": Run(
        schedule=lambda o: LambdaLR(o, lambda step: max(0.0, 1 - step / 300))
    ),
    "tenfold drops": Run(schedule=lambda o: MultiStepLR(o, [AT, 500])),
    "one cycle": Run(schedule=lambda o: OneCycleLR(o, 1e-2, total_steps=STEPS + 1)),
    "dropout": Run(dropout=0.4),
    "a frozen part": Run(at=lambda run, step: run.net.first.requires_grad_(False)),
    "a part unfrozen late": Run(at=thaw),
    "a part frozen late": Run(at=freeze),
    "sparse embeddings": Run(tokens=3),
    "accumulation": Run(accumulate=4, steps=400),
    "clipping": Run(clip=0.5),
    "noiseless data": Run(noise=0.0),
    "noisy data": Run(noise=5.0),
    "large learning rate": Run(optimizer=lambda params: torch.optim.AdamW(params, 1e-2)),
    "a long run": Run(steps=3000),
}


@pytest.mark.parametrize("case", SOUND)
def test_a_sound_training_raises_no_alarm(case: str) -> None:
    assert not SOUND[case].train().alarms


def test_a_fit_without_noise_whose_gradients_vanish_is_sound() -> None:
    """The run is a linear regression that converges to the last bit."""
    torch.manual_seed(0)
    net, x = nn.Linear(8, 2), torch.randn(64, 8)
    y = x @ torch.randn(8, 2)
    amp, made = castwise.Amp("fp32", device=DEVICE), torch.optim.SGD(net.parameters(), 0.2)
    amp.prepare(net, made)
    with Monitor(amp) as monitor:
        for _ in range(2000):
            amp.backward(functional.mse_loss(net(x), y))
            amp.step(made)
            made.zero_grad()
    assert not monitor.alarms
