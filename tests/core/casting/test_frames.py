"""The stack of frames after interruptions, failures and calls out of order."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import castwise
from castwise import Plan
from castwise.core.casting import frames, kernels
from castwise.core.casting.backward import current_frame
from castwise.core.casting.frames import Frame
from castwise.errors import StateError
from tests.here import DEVICE

X = torch.linspace(-1, 1, 16).reshape(4, 4)
SIGMOID = Plan(compute="bf16", ops={"sigmoid": "fp32"})


def state() -> tuple[object, ...]:
    """Return all of torch's and castwise's autocast state on this thread."""
    devices = ("cpu", "cuda", "xpu", "mps", "maia", "hpu", "ipu")
    return (
        *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices),
        torch.is_autocast_cache_enabled(),
        frames.depth(),
        current_frame(),
        frames.thread.state.weights,
    )


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = state()
    yield
    assert state() == before


class Hooks:
    """Acts like a border: pushes a frame for the duration of a module's forward."""

    def __init__(self, module: nn.Module, frame: Frame, root: bool = True) -> None:
        self.frame, self.root = frame, root
        self.seen: list[int] = []
        module.register_forward_pre_hook(self.enter)
        module.register_forward_hook(self.leave, always_call=True)

    def enter(self, module: nn.Module, args: Any) -> None:
        frames.push(self.frame, self, self.root)
        self.seen.append(frames.depth())

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        frames.leave(self)


class Model(nn.Module):
    """Calls a function or another module."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


def raising(error: BaseException) -> Any:
    def inner(x: torch.Tensor) -> None:
        raise error

    return inner


FRAMES = {"native": None, "override": SIGMOID}


def frame(plan: Plan | None = SIGMOID) -> Frame:
    if plan is None:
        return kernels.frame_of(DEVICE, torch.bfloat16)
    return castwise.autocast(plan, device_type=DEVICE)._frame


INTERRUPTS = [KeyboardInterrupt(), SystemExit(1), asyncio.CancelledError(), ZeroDivisionError()]


@pytest.mark.parametrize("plan", FRAMES.values(), ids=FRAMES.keys())
@pytest.mark.parametrize("error", INTERRUPTS, ids=lambda e: type(e).__name__)
def test_an_interrupted_forward_ends_where_the_next_begins(error: BaseException, plan: Plan | None) -> None:
    inner = Model(raising(error))
    broken = Model(inner)
    hooks = [Hooks(broken, frame(plan)), Hooks(inner, frame(plan), root=False)]
    whole = Model(lambda x: frames.depth())
    Hooks(whole, frame(plan))
    for _ in range(2):
        with pytest.raises(type(error)):
            broken(X)
        assert whole(X) == 1
    with pytest.raises(type(error)):
        broken(X)
    with castwise.autocast("bf16", device_type=DEVICE):
        assert frames.depth() == 1
    assert [h.seen for h in hooks] == [[1] * 3, [2] * 3]


@pytest.mark.parametrize("plan", ["bf16-mixed", SIGMOID], ids=FRAMES.keys())
def test_an_interrupted_forward_of_a_prepared_model(plan: Any) -> None:
    failing = Model(lambda x: x)
    model = nn.Sequential(nn.Linear(4, 4), failing)
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    want = model(X)
    failing.inner = raising(KeyboardInterrupt())
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            model(X)
        assert frames.depth() == 0
    failing.inner = lambda x: x
    assert torch.equal(model(X), want)
    amp.close()


def test_an_interrupt_that_forward_itself_catches() -> None:
    inner = Model(raising(KeyboardInterrupt()))
    Hooks(inner, frame(None), root=False)

    def catching(x: torch.Tensor) -> tuple[torch.dtype, int]:
        with pytest.raises(KeyboardInterrupt):
            inner(x)
        with castwise.autocast(DEVICE, enabled=False):
            return (x @ x).dtype, frames.depth()

    model = Model(catching)
    Hooks(model, frame())
    assert model(X) == (torch.float32, 2)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("caught", [True, False])
def test_a_hook_that_raises_before_a_call_from_within_has_entered(first: bool, caught: bool) -> None:
    """If a hook raises, the surrounding call goes on under the plan, and no autocast is left on after it."""

    class Calls(nn.Linear):
        def step(self, x: torch.Tensor) -> torch.dtype:
            with (
                torch.autocast(DEVICE, torch.float16),
                contextlib.suppress(ValueError if caught else KeyError),
            ):
                self(x)
            return (x @ x).dtype

    def raises(*_: Any) -> None:
        raise ValueError("mine")

    model = Calls(4, 4)
    if first:
        model.register_forward_pre_hook(raises)
    with castwise.Amp("bf16-mixed", device=DEVICE) as amp:
        amp.prepare(model, methods=("step",))
        if not first:
            model.register_forward_pre_hook(raises)
        if caught:
            assert model.step(torch.ones(4, 4)) is torch.bfloat16
        else:
            with pytest.raises(ValueError, match="mine"):
                model.step(torch.ones(4, 4))
        assert not torch.is_autocast_enabled(DEVICE)
        assert frames.depth() == 0


def test_an_interrupt_inside_a_region_ends_with_the_region() -> None:
    broken = Model(raising(KeyboardInterrupt()))
    Hooks(broken, frame())
    with pytest.raises(KeyboardInterrupt), castwise.autocast(SIGMOID, device_type=DEVICE):
        broken(X)
    assert frames.depth() == 0


def test_a_forward_inside_a_forward_is_not_taken_for_interrupted() -> None:
    inner = Model(lambda x: (frames.depth(), (x @ x).dtype))
    Hooks(inner, frame(None))

    def around(x: torch.Tensor) -> Any:
        with castwise.autocast(DEVICE, enabled=False):
            assert (x @ x).dtype is torch.float32
            return inner(x), (x @ x).dtype, frames.depth()

    outer = Model(around)
    Hooks(outer, frame())
    assert outer(X) == ((3, torch.bfloat16), torch.float32, 2)


def test_a_thread_that_was_interrupted_leaves_the_others_alone() -> None:
    broken = Model(raising(SystemExit(1)))
    Hooks(broken, frame())

    def work() -> None:
        with pytest.raises(SystemExit):
            broken(X)

    with castwise.autocast(SIGMOID, device_type=DEVICE):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert frames.depth() == 1
        assert torch.sigmoid(X.bfloat16()).dtype is torch.float32


def test_a_push_that_fails_half_way_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(code: int) -> None:
        if code:
            raise KeyboardInterrupt

    with castwise.autocast("fp16", device_type=DEVICE, cache_enabled=False):
        before = state()
        monkeypatch.setattr(frames._torch.dynamo, "set_guard_code", failing)
        with pytest.raises(KeyboardInterrupt), castwise.autocast(SIGMOID, device_type=DEVICE):
            raise AssertionError("never entered")
        assert state() == before
        assert (X @ X).dtype is torch.float16


def test_regions_may_be_left_in_another_order() -> None:
    a = castwise.autocast(SIGMOID, device_type=DEVICE)
    b = castwise.autocast("fp16", device_type=DEVICE)
    a.__enter__()
    b.__enter__()
    a.__exit__(None, None, None)
    assert (X @ X).dtype is torch.float16
    assert torch.sigmoid(X.bfloat16()).dtype is torch.bfloat16
    b.__exit__(None, None, None)
    assert (X @ X).dtype is torch.float32
    assert frames.depth() == 0


def test_a_generator_that_ends_inside_a_region_of_another_device() -> None:
    def generator() -> Iterator[int]:
        with castwise.autocast("fp16", device_type=DEVICE):
            yield 1

    before, other = torch.get_autocast_dtype(DEVICE), "xpu" if DEVICE == "cuda" else "cuda"
    running = generator()
    next(running)
    with castwise.autocast("fp16", device_type=other):
        running.close()
        assert not torch.is_autocast_enabled(DEVICE)
        assert torch.get_autocast_dtype(DEVICE) is before
        assert torch.is_autocast_enabled(other)


def test_a_region_that_was_never_entered_here() -> None:
    region = castwise.autocast("bf16", device_type=DEVICE)
    with pytest.raises(StateError, match="on another thread than the one that entered it"):
        region.__exit__(None, None, None)
    with region:
        failures: list[BaseException] = []

        def elsewhere() -> None:
            try:
                region.__exit__(None, None, None)
            except StateError as error:
                failures.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert failures
        assert (X @ X).dtype is torch.bfloat16
