"""The cost of a step per parameter and per module, in function calls: times would depend on the machine."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import castwise
from castwise.core import _torch
from castwise.core.session import undo
from tests.here import DEVICE

Step = Callable[[], object]


class Vectors(nn.Module):
    """A model of parameters only: two operators use them, however many there are."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList([nn.Parameter(torch.full((2,), 0.1)) for _ in range(size)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([*self.vectors.parameters()]) * x


class Beside(nn.Module):
    """A model of parallel modules."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(2, 2) for _ in range(size)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts])


def calls(run: Callable[[], object]) -> Counter[str]:
    """Count the Python and C function calls during a run, by name."""
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, what: Any) -> None:
        if event == "call":
            found[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            found[what.__qualname__] += 1

    gc.collect()  # so that finalizers of other tests are not counted
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def growth(make: Callable[[int], Step]) -> float:
    """Return how many calls a step makes per additional parameter or module."""
    counts = []
    for size in (100, 200):
        step = make(size)
        for _ in range(5):  # some of the first steps check for mistakes
            step()
        counts.append(min(calls(step).total() for _ in range(3)))  # later checks for mistakes occur at random
    return (counts[1] - counts[0]) / 100


def by_castwise(plan: str, kind: Any, size: int, **options: Any) -> Step:
    model = kind(size)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, foreach=True)
    amp = castwise.Amp(plan, device=DEVICE, **options)
    amp.prepare(model, optimizer)
    x = torch.ones(2)

    def step() -> None:
        amp.backward(model(x if kind is Beside else x.repeat(size)).square().mean())
        amp.step(optimizer)
        optimizer.zero_grad()

    return step


def by_hand(plan: str, kind: Any, size: int) -> Step:
    model = kind(size)
    low = plan.startswith(("bf16-master", "bf16-true"))
    if low:
        model.bfloat16()
    params = [*model.parameters()]
    wide = [p.detach().float() for p in params] if plan.startswith("bf16-master") else params
    optimizer = torch.optim.SGD(wide, 0.01, momentum=0.9, foreach=True)
    x = torch.ones(2, dtype=torch.bfloat16 if low else torch.float32)
    scaler = torch.amp.GradScaler(DEVICE, 1024.0, enabled=plan.startswith("fp16"))

    def step() -> None:
        dtype = torch.float16 if plan.startswith("fp16") else torch.bfloat16
        with torch.autocast(DEVICE, dtype, enabled=not low):
            loss = model(x if kind is Beside else x.repeat(size)).float().square().mean()
        scaler.scale(loss).backward()
        if wide is not params:
            for master, parameter in zip(wide, params, strict=True):
                master.grad = parameter.grad.float()
        scaler.step(optimizer)
        scaler.update()
        if wide is not params:
            torch._foreach_copy_([p.detach() for p in params], wide)
            model.zero_grad()
        optimizer.zero_grad()

    return step


@pytest.mark.cpu  # torch's default device adds its own calls
@pytest.mark.parametrize("kind", [Vectors, Beside])
@pytest.mark.parametrize(
    "plan", ["bf16-mixed", "bf16-true", "bf16-master", "fp16-mixed+loss_scale.init=1024"]
)
def test_a_step_calls_no_more_functions_per_parameter_than_the_loop_by_hand(plan: str, kind: Any) -> None:
    """At most a tenth more, so parameters and modules cost about what they cost without castwise."""
    ours = growth(lambda size: by_castwise(plan, kind, size))
    hand = growth(lambda size: by_hand(plan, kind, size))
    assert 0 < ours <= 1.1 * hand


@pytest.mark.cpu  # torch's default device adds its own calls
@pytest.mark.parametrize(("kind", "most"), [(Vectors, (450, 150)), (Beside, (1350, 400))])
def test_preparing_and_closing_walk_over_parameters_a_fixed_number_of_times(
    kind: Any, most: tuple[int, int]
) -> None:
    """The number of calls per parameter, or per module with two parameters, does not depend on the model's size."""
    counts: list[tuple[int, int]] = []
    for size in (5, 100, 200, 400):
        model = kind(size)
        optimizer = torch.optim.SGD(model.parameters(), 0.01, foreach=True)
        amp = castwise.Amp("bf16-master", device=DEVICE)
        prepared = calls(functools.partial(amp.prepare, model, optimizer)).total()
        counts.append((prepared, calls(amp.close).total()))
    for few, some, many, limit in zip(*counts[1:], most, strict=True):
        assert many - some == pytest.approx(2 * (some - few), rel=0.02)
        assert (many - some) / 200 <= limit


def test_no_garbage_is_collected_while_a_model_is_prepared_or_closed() -> None:
    """A garbage collection visits all objects of the process; preparing 10,000 parameters would start several."""
    model = Vectors(500)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, foreach=True)
    amp = castwise.Amp("bf16-master", device=DEVICE)
    begun: list[str] = []

    def note(phase: str, info: Any) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None:
            frame = frame.f_back
            if frame.f_code.co_name in ("apply", "_undo"):
                begun.append(phase)

    gc.callbacks.append(note)
    try:
        amp.prepare(model, optimizer)
        amp.close()
    finally:
        gc.callbacks.remove(note)
    assert not begun
    assert gc.isenabled()


def test_closing_turns_the_collector_on_after_an_interrupt_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The collector is on again wherever the interrupt came, and stays off if it was off before."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    model = nn.Linear(2, 2)
    amp = castwise.Amp("bf16-mixed", device=DEVICE)
    with monkeypatch.context() as patch:
        patch.setattr(undo, "_resume_collector", interrupted)
        with pytest.raises(KeyboardInterrupt):
            amp.prepare(model)
    amp.close()
    assert gc.isenabled()
    gc.disable()
    try:
        amp.prepare(model)
        amp.close()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_second_trained_model_does_not_cost_a_walk_through_the_graph_at_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With two models in turn, each backward uses only one of them. Checks for bypassed models become rare but do not
    end.
    """
    looks = 0
    walk = _torch.autograd.uses_of_leaves

    def counted(outputs: Any) -> Any:
        nonlocal looks
        looks += 1
        return walk(outputs)

    monkeypatch.setattr(_torch.autograd, "uses_of_leaves", counted)
    steps = [by_castwise("bf16-mixed", Beside, 2) for _ in range(2)]
    for _ in range(200):
        for step in steps:
            step()
    assert 4 < looks < 60  # in 400 backward passes; which of them are checked is random


def beside_another() -> tuple[Callable[[bool], None], Callable[[], None]]:
    """Return a step of a prepared model, which is called or bypassed, and a step of another model."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    amp = castwise.Amp("bf16-mixed", device=DEVICE)
    amp.prepare(model, optimizer)
    x = torch.ones(2)

    def step(called: bool) -> None:
        amp.backward((model(x) if called else model.forward(x)).sum())
        amp.step(optimizer)
        optimizer.zero_grad()

    return step, by_castwise("bf16-mixed", Beside, 2)


def test_a_model_that_is_passed_by_is_noticed_after_long_turns_of_another() -> None:
    """Skipped checks return: 1 of 64 backward passes is checked, whichever model it belongs to."""
    step, other = beside_another()
    for called in (True, False):
        with contextlib.nullcontext() if called else pytest.warns(UserWarning, match="was not called"):
            for _ in range(600):
                step(called)
                other()


def test_a_model_that_is_passed_by_in_one_of_five_turns_is_noticed() -> None:
    """The skipped checks do not always fall on the same turn."""
    step, other = beside_another()
    for _ in range(10):
        step(True)
    for _ in range(300):
        other()

    def turns() -> None:
        for turn in range(1000):
            step(False) if turn % 5 == 0 else other()

    with pytest.warns(UserWarning, match="was not called"):
        turns()


def test_the_guard_calls_few_functions() -> None:
    """Compares a step that checks gradients with one that does not: in a step of 0.2 ms every call counts."""
    counts = []
    for nonfinite in ("allow", "skip"):
        step = by_castwise("bf16-mixed", Beside, 2, nonfinite=nonfinite)
        for _ in range(5):
            step()
        # The fewest of several steps: some steps, drawn at random, also look for mistakes.
        counts.append(min(calls(step).total() for _ in range(4)))
    assert counts[1] - counts[0] <= (
        30 if DEVICE == "cpu" else 120
    )  # torch's default device makes a function call per operator call
