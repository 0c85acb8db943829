"""``inspect``: several tools that examine a workload's numerics, one after another."""

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
"""Functions by tool name, in running order; non-finite values come first, since they explain the other results."""


class ToolResult(Protocol):
    """Interface of a tool's result."""

    def table(self, *, verbose: bool) -> RenderableType:
        """Text for a person: complete, or the answer with its evidence."""

    def to_dict(self) -> dict[str, Any]:
        """Data for a program."""

    def save(self, folder: Path) -> Any:
        """Write the record and the page, and return the page's path or the paths of all files."""


@dataclass(frozen=True)
class InspectResult:
    """Results of all tools.

    Attributes:
        workload: Name of the workload.
        plan: The inspected plan.
        results: Results by tool.
        failed: Tools that failed, and why.
    """

    workload: str
    plan: Plan
    results: Mapping[str, ToolResult]
    failed: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """The records of all tools."""
        return {
            "kind": "inspect",
            "version": RECORD_VERSION,
            "workload": self.workload,
            "plan": str(self.plan),
            "results": {name: result.to_dict() for name, result in self.results.items()},
            "failed": dict(self.failed),
        }

    def table(self, *, verbose: bool = True) -> RenderableType:
        """The results of all tools for ``rich.print``: complete, or what fits on a screen."""
        from rich.console import Group
        from rich.rule import Rule
        from rich.text import Text

        parts: list[RenderableType] = []
        for name, result in self.results.items():
            parts += [Rule(name, align="left"), result.table(verbose=verbose), Text()]
        parts += [Text(f"{name}: {why}", "yellow") for name, why in self.failed.items()]
        return Group(*parts)

    def save(self, folder: Path) -> list[Path]:
        """Write each tool's record and page into a folder, and return the paths of the files."""
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
    """Examine a workload's numerics under a plan.

    Args:
        workload: A workload, or its name.
        only: Tools to run, from :data:`TOOLS`.
        plan: Plan to inspect. ``forecast`` assumes the casts of this plan, or its own default if the plan computes only
            in fp32.
        against: Plan with which ``compare`` compares ``plan``.
        formats: Formats for ``forecast``; by default all.
        device: By default the available accelerator, else the CPU.
        seed: Seed of weights, data and random draws.
        progress: True shows the running tool on standard error; a function is called with events.

    Returns:
        The result of each tool. If several tools run, a failure of one does not affect the others.

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
                **({} if chosen.formats.isdisjoint(LOW) else {"plan": chosen}),  # else the tool's default: fp32 casts nothing
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
