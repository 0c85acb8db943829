"""The suite detects faults: with any one fix removed, a life fails.

A fault is a context manager that makes castwise behave as before the fix. For each fault, `FAULTS` names a life that
must fail under it and passes without it; lives in random order must find it as well.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis.errors import FlakyFailure
from torch import nn
from torch.optim import Optimizer

from castwise.core import _torch
from castwise.core.session import Amp
from castwise.core.session.undo import UndoLog
from castwise.errors import CastwiseError, StateError
from tests.lifecycle.life import Life, living, must_break
from tests.lifecycle.test_lifecycle import of_kind, play
from tests.soak import some

CALLERS = ("castwise.core.session", "castwise.core.model.borders", "castwise.core.session.fused")
"""Modules that add entries to the undo log."""
Fault = Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def instead(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute by `make(former)`."""
    former = vars(owner)[name]
    setattr(owner, name, make(former))
    try:
        yield
    finally:
        setattr(owner, name, former)


def prepare_without_a_way_back() -> contextlib.AbstractContextManager[None]:
    """Make a refused `prepare` leave the parameters low."""

    def make(prepare: Any) -> Any:
        def fault(self: Amp, model: nn.Module, *optimizers: Any, **options: Any) -> Any:
            try:
                return prepare(self, model, *optimizers, **options)
            except CastwiseError:
                for parameter in model.parameters():
                    parameter.data = parameter.data.bfloat16()
                raise

        return fault

    return instead(Amp, "prepare", make)


def a_log_that_forgets(entry: str) -> Fault:
    """Return a fault that makes the undo log of `prepare` lose the entries of one kind, which must exist."""

    @contextlib.contextmanager
    def fault() -> Iterator[None]:
        forgotten = []

        def make(add: Any) -> Any:
            def forget(self: Any, *args: Any) -> Any:
                function = args[0] if add.__name__ == "callback" else args[1]
                name = getattr(getattr(function, "func", function), "__qualname__", "")
                if entry in name and sys._getframe(1).f_globals["__name__"].startswith(CALLERS):
                    forgotten.append(name)
                    return function
                return add(self, *args)

            return forget

        with instead(UndoLog, "callback", make), instead(UndoLog, "on", make):
            yield
        assert forgotten, f"the undo log has no entry named {entry!r}; use a current name here"

    return fault


def close_that_keeps(what: str) -> Fault:
    """Return a fault that makes `close()` leave one thing as the plan set it."""

    def fault() -> contextlib.AbstractContextManager[None]:
        def make(close: Any) -> Any:
            def closing(self: Amp) -> None:
                models, known = self._members.models, self._members.optimizers
                close(self)
                for model in models:
                    for parameter in model.parameters():
                        if what == "frozen low" and not parameter.requires_grad:
                            parameter.data = parameter.data.bfloat16()
                        if what == "grad_dtype":
                            parameter.grad_dtype = None
                        if what == "memory format" and parameter.dim() == 4:
                            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
                    if what == "load hooks":
                        model._register_load_state_dict_pre_hook(lambda *args: None)
                for optimizer in known:
                    if what == "fused":
                        optimizer.defaults["fused"] = True

            return closing

        return instead(Amp, "close", make)

    return fault


def borders_that_do_not_unwind() -> contextlib.AbstractContextManager[None]:
    """Leave borders only through torch's hooks, which run after an `Exception` but not after other exceptions."""
    return instead(_torch.calls, "guard_calls", lambda former: lambda *args: None)


def strangers_welcome() -> contextlib.AbstractContextManager[None]:
    """Make `step` accept any optimizer."""

    def make(step: Any) -> Any:
        def fault(self: Amp, *optimizers: Optimizer, **options: Any) -> Any:
            try:
                return step(self, *optimizers, **options)
            except StateError:
                for optimizer in optimizers:
                    optimizer.step()

        return fault

    return instead(Amp, "step", make)


def optimizers_of_nothing_welcome() -> contextlib.AbstractContextManager[None]:
    """Make `prepare` accept optimizers that hold no parameter of the model."""

    def make(prepare: Any) -> Any:
        def fault(self: Amp, model: nn.Module, *optimizers: Any, **options: Any) -> Any:
            own = set(map(id, model.parameters()))
            kept = [
                o
                for o in optimizers
                if not isinstance(o, Optimizer)
                or own.intersection(
                    id(getattr(p, "stored", p)) for group in o.param_groups for p in group["params"]
                )
            ]
            return prepare(self, model, *kept, **options)

        return fault

    return instead(Amp, "prepare", make)


def compiled_runs_forgotten() -> contextlib.AbstractContextManager[None]:
    """Make `prepare` miss that a module has run compiled."""

    def make(prepare: Any) -> Any:
        def fault(self: Amp, model: nn.Module, *optimizers: Any, **options: Any) -> Any:
            try:
                return prepare(self, model, *optimizers, **options)
            except StateError as error:
                if "compile" not in str(error):
                    raise
                return model

        return fault

    return instead(Amp, "prepare", make)


def amps_that_do_not_pickle() -> contextlib.AbstractContextManager[None]:
    """Make pickling an `Amp` fail with Python's own error."""

    @contextlib.contextmanager
    def fault() -> Iterator[None]:
        former = vars(Amp).get("__reduce_ex__")

        def reduce(self: Amp, protocol: Any) -> Any:
            raise TypeError("cannot pickle 'weakref.ReferenceType' object")

        Amp.__reduce_ex__ = reduce  # type: ignore[assignment,method-assign]
        try:
            yield
        finally:
            if former is None:
                del Amp.__reduce_ex__
            else:
                Amp.__reduce_ex__ = former  # type: ignore[method-assign]

    return fault()


def a_getter_that_closes_the_window() -> contextlib.AbstractContextManager[None]:
    """Make `get_scale()` change the scale, as the update at the end of a window does."""

    def make(get_scale: Any) -> Any:
        def fault(self: Amp, name: str = "loss") -> float:
            self._window.open()
            return float(get_scale(self, name))

        return fault

    return instead(Amp, "get_scale", make)


def scaled_steps_unnoticed() -> contextlib.AbstractContextManager[None]:
    """Remove all hooks before an optimizer's step except those of masters, which do not decide about refusals."""

    class Nothing:
        def remove(self) -> None:
            pass

    def make(register: Any) -> Any:
        def fault(self: Optimizer, hook: Any) -> Any:
            name = getattr(getattr(hook, "func", hook), "__module__", "")
            return register(self, hook) if "masters" in name else Nothing()

        return fault

    return instead(Optimizer, "register_step_pre_hook", make)


def refused(how: str, line: str = "bf16-mixed") -> Callable[[Life], None]:
    """Return a life with a refused `prepare`."""

    def script(life: Life) -> None:
        life.refuse(how, line)
        life.step()

    return script


def once(line: str, *events: str) -> Callable[[Life], None]:
    """Return a life that prepares, steps, runs the named events and closes."""

    def script(life: Life) -> None:
        life.prepare(line)
        life.step()
        for event in events:
            getattr(life, event)()
        life.close()

    return script


def interrupted(life: Life) -> None:
    """Run a life with an interrupted forward."""
    life.prepare("bf16-mixed")
    life.interrupt("keyboard", 1)


def looked_at(life: Life) -> None:
    """Run a life that reads everything between two steps of one window."""
    life.prepare("fp16-mixed+loss_scale.interval=1")
    life.step(together=False, getters=True)
    life.step(together=False, getters=True)


def warm(line: str) -> Callable[[Life], None]:
    """Return a life in which the optimizer has state before the plan is prepared, and trains on after close."""

    def script(life: Life) -> None:
        life.step()
        once(line)(life)
        life.step()

    return script


# Key: number of the promise and what is broken. Value: the fault, the life that finds it, its kind and its optimizers.
# `a_log_that_forgets` names entries of the undo log of `castwise.core.session`, `borders_that_do_not_unwind` names a
# function, and `scaled_steps_unnoticed` removes hooks before `optimizer.step()` that are not the masters'. If these are
# renamed in the sources, the faults fail and must be updated.
FAULTS: dict[str, tuple[Fault, Callable[[Life], None], str, str]] = {
    "6 prepare without a way back": (prepare_without_a_way_back, refused("typo"), "plain", "sgd"),
    "6 forgets the settings": (a_log_that_forgets("Claim.close"), refused("fails halfway"), "plain", "sgd"),
    "6 forgets the borders": (a_log_that_forgets("install"), refused("fails halfway"), "plain", "sgd"),
    "6 forgets how tensors were stored": (a_log_that_forgets("_as_before"), refused("fails halfway"), "conv", "sgd"),
    "6 forgets the masters": (a_log_that_forgets("detach"), refused("interrupted halfway"), "plain", "sgd"),
    "7 forgets the borders": (a_log_that_forgets("install"), once("O1"), "plain", "sgd"),
    "7 forgets how tensors were stored": (a_log_that_forgets("_as_before"), once("bf16-true"), "plain", "sgd"),
    "7 forgets the masters": (a_log_that_forgets("detach"), once("fp16-master"), "plain", "sgd"),
    "7 forgets the state of optimizers": (a_log_that_forgets("follow_state"), warm("bf16-true"), "plain", "adamw"),
    "7 forgets fused kernels": (
        a_log_that_forgets("fuse"), once("fp16-mixed+loss_scale.interval=2+optimizer=fused"), "plain", "adamw"),
    "7 forgets whose the model is": (a_log_that_forgets("WeakKeyDictionary.pop"), once("bf16-mixed"), "plain", "sgd"),
    "7 close keeps frozen parameters low": (close_that_keeps("frozen low"), once("bf16-master"), "frozen", "sgd"),
    "7 close keeps grad_dtype": (close_that_keeps("grad_dtype"), once("fp16-master"), "plain", "sgd"),
    "7 close keeps the memory format": (
        close_that_keeps("memory format"), once("bf16-mixed+memory_format=channels_last"), "conv", "sgd"),
    "7 close keeps load hooks": (close_that_keeps("load hooks"), once("bf16-master"), "plain", "sgd"),
    "8 borders that do not unwind": (borders_that_do_not_unwind, interrupted, "plain", "sgd"),
    "9 strangers step": (strangers_welcome, once("bf16-mixed", "step_of_a_stranger"), "plain", "sgd"),
    "9 optimizers of nothing": (optimizers_of_nothing_welcome, refused("stranger"), "plain", "sgd"),
    "10 compiled runs forgotten": (compiled_runs_forgotten, Life.compile_first, "plain", "sgd"),
    "10 an Amp that does not pickle": (amps_that_do_not_pickle, once("bf16-mixed", "copy"), "plain", "sgd"),
    "11 a getter that closes the window": (a_getter_that_closes_the_window, looked_at, "plain", "two"),
    "12 scaled steps unnoticed": (
        scaled_steps_unnoticed, once("fp16-mixed+loss_scale.interval=2", "step_on_scaled"), "plain", "sgd"),
}  # fmt: skip


PLANS = (
    "O1",
    "bf16-true",
    "fp16-master",
    "fp32+fp32_matmul=ieee+fp32_conv=ieee",
    "fp16-mixed+loss_scale.interval=1+optimizer=fused",
    "bf16-mixed+memory_format=channels_last",
)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Free the Amps after each test; what a fault left registered or claimed ends with them."""
    yield
    gc.collect()


@pytest.mark.parametrize("name", FAULTS)
def test_a_life_finds_each_fault(name: str) -> None:
    fault, script, kind, optimizer = FAULTS[name]
    with living(kind, optimizer) as life:
        script(life)
    with fault():
        must_break(script, kind, optimizer)


@pytest.mark.parametrize("name", some(FAULTS, 8))
def test_lives_in_random_order_find_each_fault(name: str) -> None:
    """Runs lives of the given kind under plans of every sort; `test_lifecycle` shows that they pass without the fault.

    The test stops at the first life that finds the fault. Which lives run depends on the constants of all imported
    modules.
    """
    fault, _, kind, _ = FAULTS[name]
    # Under a fault, traces of one life end only at a garbage collection, so a second run of the same life may pass.
    # Hypothesis calls that flaky.
    with fault(), pytest.raises((AssertionError, RuntimeError, FlakyFailure)):
        play(of_kind(kind, PLANS), 300, 14)
