"""Answer ``goal="numerics"``: find the smallest set of regions to keep in fp32 for one low format, ignoring speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from castwise.core.plans.plan import PRESETS, Plan
from castwise.lab.parity.parity import ParityResult
from castwise.lab.passes.regions import Part, exempt
from castwise.lab.search.axes import numerics_of
from castwise.lab.search.repair import Repair
from castwise.lab.search.state import Choice, Search

ATTEMPTS = 3
"""Number of plans that are tested on fresh batches before the answer is fp32."""


def find_exemptions(search: Search) -> None:
    """Find the regions that must stay in fp32, and record the resulting plan as the search's choice.

    ``settings.formats`` names the one low format in which the rest of the model runs.
    """
    (low,), journal = search.context.settings.formats, search.journal
    plan = search.scaled(PRESETS[f"{low}-mixed"])
    with journal.stage("all low"):
        found = search.find(plan)
    repair = Repair(plan)
    if found is None or found.verdict != "pass":
        journal.refuse(plan, search.why(plan, found))
        with journal.stage("regions"):
            repair = search.repaired(plan, found)
    for attempt in range(ATTEMPTS):
        with journal.stage("verification"):
            result = search.reference.numerics.verify(repair.plan)
        search.parity[numerics_of(repair.plan)] = result
        if repair.keeps_all(search.reference.parts):
            journal.refuse(repair.plan, "every part of the model would be in fp32")
            break
        if result.verdict == "pass":
            search.choice = Choice(repair.plan, result, repair.kept)
            return
        journal.refuse(repair.plan, search.why(repair.plan, result))
        if attempt < ATTEMPTS - 1:
            with journal.stage("regions"):
                repair = _widened(search.reference.parts, plan, repair.kept, result)
    if repair.keeps_all(search.reference.parts):
        said = (
            f"{low} was not shown to be sound unless every part of the model stays in fp32; the plan is fp32."
        )
    elif result.verdict == "fail":
        said = f"No set of regions made {low} pass; the plan is fp32."
    else:
        said = (
            f"{low} was not shown to be sound with any set of fp32 regions that was tried; the test of the last set is undecided: "
            f"{result.reason}. The plan is fp32."
        )
    journal.notes.append(said)
    search.choice = Choice()


def _widened(parts: Sequence[Part], base: Plan, kept: Mapping[str, str], result: ParityResult) -> Repair:
    """Keep more parts of the model in fp32 because the plan failed on fresh batches.

    The next part is the one whose parameters show the most damage. If there is none, half of the remaining parts are kept.
    """
    for path in (*result.owners, *(region.path for region in result.worst(len(result.regions)))):
        part = next((p for p in parts if path in p.paths and p.pattern not in kept), None)
        if part is not None:
            more = {part.pattern: "on fresh batches most of the damage is in its parameters"}
            break
    else:
        rest = [p.pattern for p in parts if p.pattern not in kept]
        more = dict.fromkeys(rest[: max(1, len(rest) // 2)], "the plan fails if this is not in fp32")
    kept = {**kept, **more}
    return Repair(exempt(base, parts, kept), kept)
