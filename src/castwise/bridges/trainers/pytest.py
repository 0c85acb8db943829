"""A pytest plug-in with ``assert_precision_safe``, a function and a fixture that tests whether a plan still fits a model.

A plan is chosen once, but the model keeps changing. A test that uses the fixture fails when the plan no longer fits the model.
pytest loads this module whenever castwise is installed. The module therefore imports neither torch nor other castwise modules
before the first call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import pytest

if TYPE_CHECKING:
    import castwise

__all__ = ["PrecisionNotShown", "PrecisionUndecided", "PrecisionUnsafe", "assert_precision_safe"]

MAX_TRIED = 12


class PrecisionNotShown(AssertionError):
    """The base class of both errors of :func:`assert_precision_safe`: a plan did not pass its test.

    Attributes:
        result: The result of the test, a :class:`castwise.ParityResult`.
    """

    def __init__(self, message: str, result: castwise.ParityResult) -> None:
        super().__init__(message)
        self.result = result


class PrecisionUnsafe(PrecisionNotShown):
    """Raised if the plan fails, because its gradients can be told apart from those of fp32."""


class PrecisionUndecided(PrecisionNotShown):
    """Raised if the test cannot decide whether the plan is safe."""


def assert_precision_safe(
    model: Any,
    loss: Callable[[Any, Any], Any],
    batches: Any,
    plan: Any,
    *,
    undecided: Literal["fail", "skip"] = "fail",
    max_tried: int = MAX_TRIED,
    seed: int = 0,
    record: Callable[[str, object], None] | None = None,
    **options: Any,
) -> castwise.ParityResult:
    """Assert, by :func:`castwise.parity`, that a plan's gradients cannot be told apart from those of fp32.

    A plan decides the formats in which a model computes and stores its weights. Use this in a test, so that the test
    fails when a change of the model makes the plan unsafe.

    The model and all random generators are restored afterwards, also after an error. All random draws start from
    ``seed``, including those of a shuffling DataLoader. The same model, data and machine thus give the same result
    each time.

    Args:
        model: A torch.nn.Module in fp32, in any state of training.
        loss: A function ``loss(model, batch)`` that returns a scalar tensor.
        batches: A sequence of batches, a DataLoader, or a function ``batches(seed)`` that returns an iterator. The
            plan can pass only after 29 batches, or after all if fewer exist.
        plan: A :class:`castwise.Plan`, the name of a preset, or the path of a ``plan.json``.
        undecided: What happens if the test cannot decide. ``fail`` raises :class:`PrecisionUndecided`. ``skip`` skips
            the test.
        max_tried: The largest number of module classes that are tried in fp32 after a failure, to find the class that
            makes the plan fail.
        seed: The seed of all random draws.
        record: pytest's ``record_property``, which adds the result to pytest's reports. The fixture passes a function
            like this.
        **options: Options of :func:`castwise.parity`: ``optimizer``, ``accumulate``, ``world_size``, ``microbatches``
            and ``device``.

    Returns:
        The result of the test, which has passed.

    Raises:
        PrecisionUnsafe: The plan fails. The message says which modules have inaccurate gradients, how far above the
            limit they are, and what to try.
        PrecisionUndecided: The test cannot decide. The message says what would help.
        CastwiseError: :func:`castwise.parity` cannot test the model, the batches or the plan.
        ValueError: ``undecided`` is neither ``fail`` nor ``skip``.
    """
    __tracebackhide__ = True
    if undecided not in ("fail", "skip"):
        raise ValueError(f"assert_precision_safe: undecided={undecided!r}; give 'fail' or 'skip'")
    import castwise

    def test(of: Any) -> castwise.ParityResult:
        with _seeded(seed):
            return castwise.parity(model, loss, batches, of, seed=seed, **options)

    result = test(plan)
    if record is not None:
        record("castwise", f"{result.verdict} at {result.severity:.2g} times the limit: {result.plan}")
    if result.verdict == "fail":
        raise PrecisionUnsafe(_said(result, _cures(result, model, test, max_tried)), result)
    if result.verdict == "undecided":
        message = _said(result, _more(result))
        if undecided == "skip":
            pytest.skip(message)
        raise PrecisionUndecided(message, result)
    return result


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed all random generators inside a ``with`` block, and restore their states afterwards."""
    import torch

    numpy = sys.modules.get("numpy")  # if NumPy is not imported, nothing draws random numbers from it
    python, arrays = random.getstate(), numpy and numpy.random.get_state()
    device = torch.accelerator.current_accelerator() or torch.device("cuda")
    with torch.random.fork_rng(range(torch.accelerator.device_count()), device_type=device.type):
        torch.manual_seed(seed)
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            if numpy:
                numpy.random.set_state(arrays)


def _said(result: castwise.ParityResult, advice: list[str]) -> str:
    """Return the table of a result as text, followed by the limits and the lines of ``advice``."""
    import io

    from rich.console import Console

    text = io.StringIO()
    Console(file=text, width=100, color_system=None).print(result.table())
    plain, adam = result.lines
    line = f"To pass, damage must stay below {plain:g}" + (
        f", and below {adam:g} in the units of Adam's steps." if adam else "."
    )
    rows = [row.rstrip() for row in text.getvalue().splitlines()]
    said = [row for row, before in zip(rows, ["", *rows], strict=False) if row or before]
    return "\n".join([*said, line, "", *advice])


def _more(result: castwise.ParityResult) -> list[str]:
    """Return lines that suggest how an undecided test may become decided."""
    more = "; a larger number of batches with more varied data" if result.more else ""
    return [
        f"Undecided after {result.microbatches} microbatches. {result.next_step.rstrip('.')}{more}; or undecided='skip'."
    ]


def _cures(
    result: castwise.ParityResult, model: Any, test: Callable[[Any], castwise.ParityResult], max_tried: int
) -> list[str]:
    """Return lines that suggest what to do about a plan that failed.

    Classes of modules are tried in fp32 one after the other, until the plan passes. The first class that helps is suggested.
    """
    import castwise

    plan, search = result.plan, "`castwise tune` finds the fastest plan that passes."
    if result.stopped:
        kept = ", ".join(sorted({name.rpartition(".")[0] or name for name in result.stopped}))
        return [f"Try: keeping the state of {kept} in fp32 with a region that has params='fp32'; {search}"]
    if result.lost_updates is not None and result.damage.value < result.lines[0]:
        return [f"Try: fp32 masters (master='fp32'), or storing parameters in fp32; {search}"]
    kinds = _kinds(model)
    for pattern, name in kinds[:max_tried]:
        cured = dataclasses.replace(plan, regions=(*plan.regions, castwise.Region(pattern, compute="fp32")))
        with contextlib.suppress(castwise.CastwiseError):  # raised for modules whose forward never runs
            if found := test(cured):
                return [
                    f"With {name} in fp32 the plan passes: damage is {found.damage.value:.2g}.",
                    f"Try: adding Region({pattern!r}, compute='fp32') to the plan's regions, or rewriting {name} so that it can be "
                    f"computed in {plan.compute}; {search}",
                ]
    tried = min(max_tried, len(kinds))
    return [f"No single kind of module makes the plan pass in fp32 ({tried} tried). Try: {search}"]


def _kinds(model: Any) -> list[tuple[str, str]]:
    """Return the classes of a model's modules, as pairs of a region pattern and a description.

    Modules without submodules come first, then the user's classes before torch's, then small modules before large ones.
    """
    containers = ("Sequential", "ModuleList", "ModuleDict")
    kinds: dict[type, list[tuple[str, int]]] = {}
    for path, module in model.named_modules():
        if path and type(module).__name__ not in containers:
            kinds.setdefault(type(module), []).append((path, len(list(module.modules()))))

    def order(kind: type) -> tuple[bool, bool, int]:
        size = max(inside for _, inside in kinds[kind])
        return size > 1, kind.__module__.startswith("torch."), size

    return [
        (places[0][0], f"{places[0][0]} ({kind.__name__})")
        if len(places := kinds[kind]) == 1
        else (f"type:{kind.__name__}", f"{kind.__name__} ({len(places)} of them, such as {places[0][0]})")
        for kind in sorted(kinds, key=order)
    ]


@pytest.fixture(name="assert_precision_safe")
def _assert_precision_safe(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Provide :func:`assert_precision_safe` as a fixture. Random generators are seeded, and results go into the test report."""

    def record(name: str, value: object) -> None:
        # Does what record_property does. Under --junitxml, that fixture warns for the newer report families.
        request.node.user_properties.append((name, value))

    with _seeded(0):
        yield functools.partial(assert_precision_safe, record=record)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print, for each tested plan, how far its gradients are from the limit, also for tests that passed."""
    lines = [
        f"{report.nodeid}: {line}"
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, line in report.user_properties
        if name == "castwise"
    ]
    if lines:
        terminalreporter.section("precision plans")
        for line in lines:
            terminalreporter.line(line)
