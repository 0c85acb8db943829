"""``inspect``, which runs several tools that examine the numerics of a workload, one after another."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from castwise.commands.jobs import Event, Progress, heard
from castwise.core.extras import left_out
from castwise.core.plans.formats import LOW
from castwise.core.plans.plan import Plan, as_plan
from castwise.core.plans.text import close_matches
from castwise.core.schemas import RECORD_VERSION
from castwise.core.session.process import find_device
from castwise.errors import CastwiseError, PlanError, sentence
from castwise.lab.passes.isolation import seed_all, undisturbed
from castwise.lab.workloads.workload import Workload, find_workload, next_batch, users_code

if TYPE_CHECKING:
    from rich.console import RenderableType

TOOLS: Mapping[str, str] = {
    "nonfinite": "castwise.lab.inspect.nonfinite:first_nonfinite",
    "operators": "castwise.lab.inspect.operators:operator_table",
    "compare": "castwise.lab.inspect.compare:compare",
    "forecast": "castwise.lab.inspect.forecast:forecast",
}
"""The tools by name, each with its module and function, in the order in which they run.

``nonfinite`` comes first, since non-finite values explain the other results.
"""


class ToolResult(Protocol):
    """The interface of a tool's result."""

    def table(self, *, verbose: bool) -> RenderableType:
        """Return the result for a person, complete if ``verbose``, else shortened to the answer and its evidence."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values, for a program."""

    def save(self, folder: Path) -> Any:
        """Write the result as JSON and as a page, and return the page's path or the paths of all files."""


@dataclass(frozen=True)
class InspectResult:
    """The results of the tools that ``castwise inspect`` has run.

    Attributes:
        workload: The name of the workload.
        plan: The inspected plan.
        results: The results by the name of the tool.
        failed: The reasons of failures by the name of the tool.
    """

    workload: str
    plan: Plan
    results: Mapping[str, ToolResult]
    failed: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return the results of all tools as JSON values."""
        return {
            "kind": "inspect",
            "version": RECORD_VERSION,
            "workload": self.workload,
            "plan": str(self.plan),
            "results": {name: result.to_dict() for name, result in self.results.items()},
            "failed": dict(self.failed),
        }

    def table(self, *, verbose: bool = True) -> RenderableType:
        """Return the results of all tools for ``rich.print``, complete if ``verbose``, else what fits on a screen."""
        from rich.console import Group
        from rich.rule import Rule
        from rich.text import Text

        parts: list[RenderableType] = []
        for name, result in self.results.items():
            parts += [Rule(name, align="left"), result.table(verbose=verbose), Text()]
        parts += [Text(f"{name}: {why}", "yellow") for name, why in self.failed.items()]
        return Group(*parts)

    def save(self, folder: Path) -> list[Path]:
        """Write each tool's result into a folder, as JSON and as a page, and return the paths of the files."""
        for name, result in self.results.items():
            with left_out(f"{name}.html"):
                result.save(folder)
        names = [f"{name}.{kind}" for name in self.results for kind in ("html", "json")]
        return [path for path in (folder / name for name in names) if path.exists()]


def inspect(
    workload: Workload | str,
    *,
    only: Sequence[str] = tuple(TOOLS),
    plan: Plan | str = "bf16-mixed",
    against: Plan | str = "fp32",
    formats: Sequence[str] = (),
    device: torch.device | str | None = None,
    seed: int = 0,
    progress: Progress | bool | None = None,
) -> InspectResult:
    """Examine the numerics of a workload under a plan, with the tools of :data:`TOOLS`.

    Args:
        workload: A :class:`castwise.Workload`, or the name of a workload.
        only: The names of the tools to run.
        plan: The plan to inspect. The tool ``forecast`` assumes that the casts are those of this plan. If the plan computes
            only in fp32, it assumes the casts of its default plan.
        against: The plan with which the tool ``compare`` compares ``plan``.
        formats: The formats that the tool ``forecast`` considers; by default all.
        device: By default the available accelerator, else the CPU.
        seed: The seed of weights, data and random draws.
        progress: True shows the running tool on standard error. A function is called with
            ``castwise.commands.jobs.Event`` records.

    Returns:
        The result of each tool. If several tools run, the failure of a tool does not affect the others.

    Raises:
        PlanError: A tool does not exist.
        CastwiseError: The workload cannot be found or run, or the only tool failed.
    """
    chosen, other = as_plan(plan), as_plan(against)
    for name in only:
        if name not in TOOLS:
            raise PlanError(
                f"inspect(only={name!r}): no such tool{close_matches(name, TOOLS)}. Allowed: {', '.join(TOOLS)}."
            )
    if not only:
        raise PlanError(f"inspect(only=()): no tool is named. Allowed: {', '.join(TOOLS)}.")
    found = find_workload(workload) if isinstance(workload, str) else workload
    from castwise.core.casting import default_device_type

    where = find_device("inspect", device, default_device_type())
    with heard(progress) as tell, undisturbed(), users_code(f"workload {found.name!r} failed"):
        seed_all(seed)
        model = found.model().to(where)
        batch = next_batch(found, found.batches(seed), 0)
        asked: Mapping[str, Callable[[Any], ToolResult]] = {
            "nonfinite": lambda run: run(model, found.loss, batch, chosen, device=where, seed=seed),
            "operators": lambda run: run(model, found.loss, batch, chosen, device=where, seed=seed),
            "compare": lambda run: run(model, found.loss, batch, other, chosen, device=where, seed=seed),
            "forecast": lambda run: run(
                model, found.loss, found.batches, optimizer=found.optimizer, device=where, seed=seed,
                **({} if chosen.formats.isdisjoint(LOW) else {"plan": chosen}),  # else forecast's default: fp32 casts nothing
                **({"formats": tuple(formats)} if formats else {}),
            ),
        }  # fmt: skip
        results, failed = {}, {}
        for name in (tool for tool in TOOLS if tool in only):
            tell(Event("inspecting", name, 0, 1))
            try:
                results[name] = asked[name](_tool(name))
            except CastwiseError as error:
                if len(only) == 1:
                    raise
                failed[name] = sentence(error)
            tell(Event("inspecting", name, 1, 1))
        if not results:
            raise PlanError("inspect: " + "; ".join(f"{name}: {why}" for name, why in failed.items()))
    return InspectResult(found.name, chosen, results, failed)


def _tool(name: str) -> Callable[..., ToolResult]:
    home, _, function = TOOLS[name].partition(":")
    tool: Callable[..., ToolResult] = getattr(importlib.import_module(home), function)
    return tool
