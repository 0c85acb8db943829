"""Lives in random order: no sequence of events leaves an unwanted trace.

`CASTWISE_LIVES=500` runs 500 longer lives per kind, different ones each time, and searches for the shortest that fails.
By default there are few, the same each time.
"""

from __future__ import annotations

import os
import sys
import zlib
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    get_state_machine_test,
    initialize,
    precondition,
    rule,
)

from tests.lifecycle.kinds import KINDS, OPTIMIZERS
from tests.lifecycle.life import ERRORS, GETTERS, PLANS, REFUSALS, Life
from tests.soak import every

LIVES = int(os.environ.get("CASTWISE_LIVES", "0"))


def is_prepared(machine: Any) -> bool:
    """Return whether a plan is on the model."""
    return machine.life is not None and machine.life.prepared


def is_plain(machine: Any) -> bool:
    """Return whether no plan is on the model."""
    return machine.life is not None and not machine.life.prepared


class Lives(RuleBasedStateMachine):
    """Runs the events of a `Life`, whose checks may fail."""

    kinds: tuple[str, ...] = tuple(KINDS)
    plans: tuple[str, ...] = PLANS

    def __init__(self) -> None:
        super().__init__()
        self.life: Any = None
        self.compiled = False

    @initialize(
        data=st.data(),
        optimizer=st.sampled_from(list(OPTIMIZERS)),
        warm=st.booleans(),
        prepared=st.booleans(),
    )
    def begin(self, data: st.DataObject, optimizer: str, warm: bool, prepared: bool) -> None:
        self.life = Life(data.draw(st.sampled_from(self.kinds), "kind"), optimizer)
        if warm:
            self.life.step()  # gives the optimizers state
        if prepared:
            self.life.prepare(data.draw(st.sampled_from(self.plans), "plan"))

    @precondition(is_plain)
    @rule(data=st.data())
    def prepare(self, data: st.DataObject) -> None:
        self.life.prepare(data.draw(st.sampled_from(self.plans), "plan"))

    @rule(how=st.sampled_from(REFUSALS), line=st.sampled_from(PLANS))
    def refuse(self, how: str, line: str) -> None:
        self.life.refuse(how, line)

    @rule(max_norm=st.sampled_from([None, 0.5]))
    def step(self, max_norm: float | None) -> None:
        self.life.step(True, max_norm)

    @rule(max_norm=st.sampled_from([None, 0.5]))
    def step_one_by_one(self, max_norm: float | None) -> None:
        self.life.step(False, max_norm)

    @precondition(is_prepared)
    @rule(max_norm=st.sampled_from([None, 0.5]))
    def step_looked_at(self, max_norm: float | None) -> None:
        self.life.step(False, max_norm, getters=True)

    @precondition(is_prepared)
    @rule(together=st.booleans(), max_norm=st.sampled_from([None, 0.5]))
    def step_that_overflows(self, together: bool, max_norm: float | None) -> None:
        self.life.step(together, max_norm, overflow=True)

    @rule(number=st.integers(0, 20))
    def write_through_data(self, number: int) -> None:
        self.life.write_through_data(number)

    @rule(number=st.integers(0, 20))
    def mark(self, number: int) -> None:
        self.life.mark(number)

    @precondition(is_prepared)
    @rule(together=st.booleans(), max_norm=st.sampled_from([None, 0.5]))
    def step_that_is_poisoned(self, together: bool, max_norm: float | None) -> None:
        self.life.step(together, max_norm, poison=True)

    @precondition(is_prepared)
    @rule()
    def step_of_a_stranger(self) -> None:
        self.life.step_of_a_stranger()

    @precondition(is_prepared)
    @rule()
    def step_on_scaled(self) -> None:
        self.life.step_on_scaled()

    @precondition(is_prepared)
    @rule()
    def step_on_replaced(self) -> None:
        self.life.step_on_replaced()

    @precondition(is_prepared)
    @rule(overflow=st.booleans(), set_to_none=st.booleans())
    def leave_out(self, overflow: bool, set_to_none: bool) -> None:
        self.life.leave_out(overflow, set_to_none)

    @precondition(lambda self: is_plain(self) and not self.compiled)
    @rule()
    def compile_first(self) -> None:
        self.compiled = True  # once per life, because it is slow
        self.life.compile_first()

    @precondition(is_plain)
    @rule()
    def by_closure(self) -> None:
        self.life.by_closure()

    @rule()
    def evaluate(self) -> None:
        self.life.evaluate()

    @rule(which=st.sampled_from(list(ERRORS)), where=st.integers(0, 7))
    def interrupt(self, which: str, where: int) -> None:
        self.life.interrupt(which, where)

    @precondition(is_prepared)
    @rule(which=st.sampled_from(GETTERS))
    def get(self, which: str) -> None:
        self.life.get(which)

    @precondition(is_prepared)
    @rule()
    def copy(self) -> None:
        self.life.copy()

    @rule()
    def save(self) -> None:
        self.life.save()

    @rule()
    def load(self) -> None:
        self.life.load()

    @precondition(is_prepared)
    @rule()
    def close(self) -> None:
        self.life.close()

    def teardown(self) -> None:
        if self.life is None:
            return
        try:
            if sys.exc_info()[0] is None:  # after a failure, report only that one
                self.life.end()
        finally:
            self.life.bury()


def play(machine: type[Lives], lives: int, events: int) -> None:
    """Run that many lives with that many events each, the same in every run."""
    phases = [Phase.generate, *([Phase.shrink] if LIVES else [])]  # shrinking a life takes minutes
    test = get_state_machine_test(
        machine,
        settings=settings(
            max_examples=LIVES or lives,
            stateful_step_count=(2 if LIVES else 1) * events,
            database=None,
            deadline=None,
            phases=phases,
            suppress_health_check=list(HealthCheck),
            print_blob=False,
            report_multiple_bugs=False,
        ),
    )
    if not LIVES:
        test = seed(zlib.crc32("".join(machine.kinds).encode()))(test)
    test()


def of_kind(kind: str, plans: tuple[str, ...] = PLANS) -> type[Lives]:
    """Return the state machine for models of one kind."""
    return type("Lives", (Lives,), {"kinds": (kind,), "plans": plans})


@every(2)
@pytest.mark.parametrize("kind", KINDS)
def test_lives_in_any_order(kind: str) -> None:
    play(of_kind(kind), 12, 16)


@pytest.mark.slow
def test_lives_of_a_llama() -> None:
    pytest.importorskip("transformers")
    play(of_kind("llama"), 4, 10)
