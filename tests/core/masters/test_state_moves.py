"""Optimizer state moves to new keys; an interrupt at any point leaves it under the old key or the new one."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch

from castwise import Amp
from tests.core.masters.test_undo import trained_net
from tests.soak import every


class Tracer:
    """Raises KeyboardInterrupt at given line events, counted over all functions of one name, including torch's."""

    def __init__(self, name: str, numbers: set[int]) -> None:
        self.name, self.numbers, self.seen = name, numbers, 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        inside: FrameType | None = frame
        for _step in range(3):
            if inside is not None and inside.f_code.co_name == self.name:
                return self.line
            inside = inside.f_back if inside is not None else None
        return None

    def line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self.seen += 1
            if self.seen in self.numbers:
                raise KeyboardInterrupt
        return self.line


def interrupt(function: Callable[[], object], name: str, *numbers: int) -> int:
    """Call a function and interrupt it at the given line events.

    Returns:
        How many line events there were.
    """
    tracer = Tracer(name, set(numbers))
    former = sys.gettrace()
    gc.disable()  # callbacks run by the garbage collector swallow interrupts
    sys.settrace(tracer)
    try:
        function()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(former)
        gc.enable()
    return tracer.seen


@every(2)
@pytest.mark.parametrize("again", [0, 1, 2, 3])
def test_no_state_is_lost_where_its_key_changes(again: int) -> None:
    """Interrupts at each line, including those of ``Tensor.__hash__``, and again soon after."""
    number = 1
    while True:
        model, optimizer = trained_net()
        want = {name: optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters()}
        amp = Amp("bf16-master")
        amp.prepare(model, optimizer)
        seen = interrupt(amp.close, "move_state", number, number + again)
        amp.close()
        assert len(optimizer.state) == len(want)
        for name, parameter in model.named_parameters():
            assert torch.equal(optimizer.state[parameter]["exp_avg"], want[name]), (number, name)
            assert any(key is parameter for key in optimizer.state)
        if seen < number:
            break
        number += 1
    assert number > 5


def test_no_state_is_lost_where_prepare_is_interrupted() -> None:
    """Interrupts while prepare hands the state to the masters and while it hands it back."""
    for number in range(1, 200):
        model, optimizer = trained_net()
        want = {name: optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters()}
        seen = interrupt(partial(Amp("bf16-master").prepare, model, optimizer), "move_state", number)
        if seen < number:
            break
        for name, parameter in model.named_parameters():
            assert torch.equal(optimizer.state[parameter]["exp_avg"], want[name]), (number, name)
            assert any(key is parameter for key in optimizer.state)
    assert 5 < number < 199


def test_a_gradient_stays_where_prepare_is_interrupted() -> None:
    """Interrupts while the gradient becomes fp32."""
    for number in range(1, 300):
        model, optimizer = trained_net()
        model(torch.ones(2, 8)).sum().backward()
        want = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        seen = interrupt(partial(Amp("bf16-master").prepare, model, optimizer), "adopt", number)
        if seen < number:
            break
        assert [p.grad is not None for p in model.parameters()] == [True] * len(want), number
        for parameter, grad in zip(model.parameters(), want, strict=True):
            assert parameter.grad is not None
            assert torch.allclose(parameter.grad, grad, rtol=1e-2), number
    assert 3 < number < 299
