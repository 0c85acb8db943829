"""Refuse or tell of code of a model that runs after the call has returned, and so outside of the plan, as a generator's does."""

from __future__ import annotations

import contextlib
import inspect
import types
import warnings
from collections.abc import Iterator
from typing import Any

from castwise.core.plans.formats import LOW
from castwise.core.plans.plan import Plan
from castwise.errors import StateError


@contextlib.contextmanager
def _session() -> Iterator[None]:
    yield


_Session = type(_session())
"""The type of what a method returns that ``contextlib.contextmanager`` decorates."""
_OBJECTS: tuple[type, ...] = (
    types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, _Session, map, filter, zip,
)  # fmt: skip
"""Types of objects that may run code after the call that returned them."""
_FUNCTIONS = {
    "generator": inspect.isgeneratorfunction,
    "coroutine": inspect.iscoroutinefunction,
    "async generator": inspect.isasyncgenfunction,
}


def matters(plan: Plan) -> bool:
    """Whether code computes something else outside of the plan, because the plan has a low format."""
    return not plan.formats.isdisjoint(LOW)


def kind_of(function: Any) -> str:
    """Say what a function is whose code runs only after its call has returned; empty for any other."""
    return next((kind for kind, is_kind in _FUNCTIONS.items() if is_kind(function)), "")


def refuse(name: str, function: Any) -> None:
    """Raise if the code of a function runs only after its call has returned.

    Args:
        name: The caller and the function, for the error.
        function: The function, as its class holds it.

    Raises:
        StateError: It is a generator or a coroutine.
    """
    if kind := kind_of(function):
        raise StateError(
            f"{name} is a {kind}: its code runs after the call has returned, and so outside of the plan. Put what it computes at "
            f"each turn into a method, name that in methods=, and call it from the {kind}."
        )


def told(model: str, output: Any) -> bool:
    """Warn of an object in an output that may run code of the model later, and return whether there was one.

    Args:
        model: The name of the model's class.
        output: What the model returned. Only it and what a tuple, list or dict holds directly are looked at.

    Warns:
        UserWarning: There is such an object.
    """
    inner = (
        output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    )
    for value in (output, *inner):
        if isinstance(value, _OBJECTS):
            warnings.warn(
                f"This {model}, which is prepared, returns a {type(value).__name__.strip('_')}: code of the model that it runs later "
                "runs outside of the plan. If there is any, put it into a method, name that in prepare(methods=...), and call it "
                "from there.",
                stacklevel=4,
            )
            return True
    return False
