"""A `close()` that is interrupted anywhere and called again ends as an uninterrupted one does."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from tests.core.masters.test_undo import interrupted
from tests.lifecycle.life import check
from tests.lifecycle.photograph import of_model, of_optimizers, of_process
from tests.lifecycle.test_second import Pair
from tests.soak import SOAKING, every, pairs

PLANS = (
    "bf16-master",
    "fp16-master+optimizer=fused",
    "bf16-true",
    "O2",
    "fp16-mixed+loss_scale.interval=2+optimizer=fused",
    "bf16-master+memory_format=channels_last+ops.exp=fp32+fp32_matmul=ieee",
)


def life(line: str, kind: str) -> Pair:
    """Return two models prepared and trained by one session."""
    pair = Pair(line, kind)
    pair.begin()
    pair.amp.prepare(pair.second, pair.other)
    pair.steps(1, pair.second, pair.other)
    return pair


def picture(pair: Pair) -> dict[str, Any]:
    """Record what close must restore, without what differs between two lives."""
    seen = {
        **of_process(),
        **{f"first {key}": value for key, value in of_model(pair.first).items()},
        **{f"second {key}": value for key, value in of_model(pair.second).items()},
        **of_optimizers([pair.optimizer, pair.other]),
    }
    return {key: v for key, v in seen.items() if "identity" not in key and ": parameters" not in key}


def trains(pair: Pair) -> None:
    """Train both models in fp32 with their own optimizers."""
    for model, optimizer in ((pair.first, pair.optimizer), (pair.second, pair.other)):
        optimizer.zero_grad()
        model(pair.kind.batch(5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class Interrupted:
    """An entry that is interrupted a number of times, before or after it has run."""

    def __init__(self, entry: Callable[[], object], when: str, times: int) -> None:
        self.entry, self.when, self.left = entry, when, times

    def __call__(self) -> None:
        if self.when == "after" or not self.left:
            self.entry()
        if self.left:
            self.left -= 1
            raise KeyboardInterrupt


@pytest.mark.parametrize("line", PLANS)
def test_a_session_that_is_dropped_with_its_models_ends_at_once(line: str) -> None:
    """It has no reference cycle, so its settings in the process do not wait for a garbage collection."""
    gc.collect()
    gc.disable()
    try:
        pair = life(line, "plain")
        session = weakref.ref(pair.amp)
        del pair
        assert session() is None
    finally:
        gc.enable()


@every(2)
@pytest.mark.parametrize(("line", "kind"), pairs(PLANS, ["plain", "frozen", "conv"]))
def test_a_close_interrupted_at_an_entry_of_its_log(line: str, kind: str) -> None:
    """Interrupts come before or after an entry, once or twice. Each entry gets one of these for one kind, in a soak
    all.
    """
    alone = life(line, kind)
    alone.amp.close()
    want = picture(alone)
    count = len(life(line, kind).amp._undo._entries)
    assert count > 5
    turn = ["plain", "frozen", "conv"].index(kind)
    for way, (when, times) in enumerate((("before", 1), ("after", 1), ("after", 2))):
        for index in range(count) if SOAKING else range(3 * turn + way, count, 9):
            pair = life(line, kind)
            entries = pair.amp._undo._entries
            entries[index] = Interrupted(entries[index], when, times)
            with pytest.raises(KeyboardInterrupt):
                pair.amp.close()
            if times == 1:  # the interrupt is raised at the end
                assert not entries
            pair.amp.close()
            check(
                want,
                picture(pair),
                f"close interrupted {when} entry {index} of {count}, {times} times, and closed again",
            )
            assert not entries
            trains(pair)


@every(2, 1)
@pytest.mark.parametrize(
    ("line", "step"), [("bf16-master", 11), ("bf16-true", 13), (PLANS[-1], 19), (PLANS[-2], 17)]
)
def test_a_close_interrupted_at_a_line(line: str, step: int) -> None:
    """Interrupts come inside entries, as Ctrl-C does."""
    alone = life(line, "frozen")
    alone.amp.close()
    want = picture(alone)
    number = 1
    while True:
        pair = life(line, "frozen")
        with interrupted(number) as tracer:
            pair.amp.close()
        if tracer.left > 0:
            break
        pair.amp.close()
        check(want, picture(pair), f"close interrupted at line {number}, and closed again")
        trains(pair)
        number += step if SOAKING else 3 * step
    assert number > 50
