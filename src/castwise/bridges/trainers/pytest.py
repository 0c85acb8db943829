"""Test that a precision plan still fits its model: ``assert_precision_safe``, a function and a fixture.

A plan is chosen once, but the model keeps changing. A test with the fixture fails in CI when the plan no longer fits.
pytest loads this module whenever castwise is installed, so it imports neither torch nor other castwise modules before
the first call.
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
    """Base of the two errors: a plan did not pass.

    Attributes:
        result: Result of the parity test.
    """

    def __init__(self, message: str, result: castwise.ParityResult) -> None:
        super().__init__(message)
        self.result = result


class PrecisionUnsafe(PrecisionNotShown):
    """The plan's gradients are distinguishable from fp32's."""


class PrecisionUndecided(PrecisionNotShown):
    """The parity test is undecided: the plan is not known to be safe or unsafe."""


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
    """Assert that a plan's gradients are indistinguishable from fp32's, with :func:`castwise.parity`.

    The model and all random generators are restored when it returns or raises. All random draws start from ``seed``,
    including those of a shuffling DataLoader, so the same model, data and machine give the same result each time.

    Args:
        model: A torch.nn.Module in fp32, in any state of training.
        loss: ``loss(model, batch)`` -> scalar tensor.
        batches: A sequence of batches, a DataLoader, or ``batches(seed)`` -> iterator. A pass needs 29 batches, or all
            that exist.
        plan: A :class:`castwise.Plan`, the name of a preset, or the path of a ``plan.json``.
        undecided: Outcome of an undecided test: ``fail`` with :class:`PrecisionUndecided`, or ``skip``.
        max_tried: Largest number of module kinds that are tried in fp32 after a failure, to find the faulty kind.
        seed: Seed of all random draws.
        record: pytest's ``record_property``, which adds the result to its reports; the fixture passes it.
        **options: Options of :func:`castwise.parity`: ``optimizer``, ``accumulate``, ``world_size``, ``microbatches``,
            ``device``.

    Returns:
        The result, which passed.

    Raises:
        PrecisionUnsafe: The plan fails; the message says which modules are damaged, how far above the limit, and what
            to try.
        PrecisionUndecided: The test is undecided; the message says what would help.
        CastwiseError: The model, batches or plan cannot be tested, as for :func:`castwise.parity`.
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
    """Seed all random generators for a block, and restore their states afterwards."""
    import torch

    numpy = sys.modules.get("numpy")  # if it is not imported, nothing draws from it
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
    """The result as text, with suggestions."""
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
    """Suggestions that may decide an undecided result."""
    more = "; a larger number of batches with more varied data" if result.more else ""
    return [
        f"Undecided after {result.microbatches} microbatches. {result.next_step.rstrip('.')}{more}; or undecided='skip'."
    ]


def _cures(
    result: castwise.ParityResult, model: Any, test: Callable[[Any], castwise.ParityResult], max_tried: int
) -> list[str]:
    """Suggestions for a failed result: the first kind of module that makes the plan pass if kept in fp32."""
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
        with contextlib.suppress(castwise.CastwiseError):  # a kind whose forward never runs
            if found := test(cured):
                return [
                    f"With {name} in fp32 the plan passes: damage is {found.damage.value:.2g}.",
                    f"Try: adding Region({pattern!r}, compute='fp32') to the plan's regions, or rewriting {name} so that it can be "
                    f"computed in {plan.compute}; {search}",
                ]
    tried = min(max_tried, len(kinds))
    return [f"No single kind of module makes the plan pass in fp32 ({tried} tried). Try: {search}"]


def _kinds(model: Any) -> list[tuple[str, str]]:
    """Kinds of modules as region patterns with descriptions: user classes before torch's, small before large."""
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
    """Fixture for :func:`assert_precision_safe` with seeded random generators; results go into the test report."""

    def record(name: str, value: object) -> None:
        # does what record_property does; that warns under --junitxml, before the test, for all report families but old ones
        request.node.user_properties.append((name, value))

    with _seeded(0):
        yield functools.partial(assert_precision_safe, record=record)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how far each plan is from its limit, also for tests that passed."""
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
