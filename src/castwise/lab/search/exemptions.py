"""``goal="numerics"``: the smallest set of regions to keep in fp32 for one low format, whatever the speed here."""

from __future__ import annotations

from castwise.core.plans.plan import PRESETS, Plan
from castwise.lab.parity.parity import ParityResult
from castwise.lab.search.axes import FP32
from castwise.lab.search.regions import exempt
from castwise.lab.search.state import SearchState

ATTEMPTS = 3
"""Plans that are tried on fresh batches before the answer is fp32."""


def find_exemptions(search: SearchState) -> None:
    """Find the regions and settle the plan; ``settings.formats`` names the one low format."""
    (low,) = search.settings.formats
    plan = search.scaled(PRESETS[f"{low}-mixed"])
    with search.stage("all low"):
        found = search.find(plan)
    if found is not None and found.verdict == "pass":
        sound = plan
    else:
        search.refuse(plan, search.why(plan, found))
        with search.stage("regions"):
            sound = search.repaired(plan, found)
    for attempt in range(ATTEMPTS):
        with search.stage("verification"):
            result = search.reference.numerics.verify(sound)
        search.findings[sound] = result
        if result.verdict == "pass":
            search.settle(sound, result, search.kept)
            return
        search.refuse(sound, search.why(sound, result))
        if attempt < ATTEMPTS - 1:
            with search.stage("regions"):
                sound = _widened(search, plan, result)
    search.notes.append(
        f"No set of regions made {low} pass; the plan is fp32."
        if result.verdict == "fail"
        else f"No set of regions that was tried is shown to be sound in {low}, and the last is not shown to be unsound: {result.reason}. "
        "The plan is fp32."
    )
    search.settle(FP32, None)


def _widened(search: SearchState, base: Plan, result: ParityResult) -> Plan:
    """Keep one more part in fp32: the one whose parameters show the most damage, else half of what is left."""
    kept = search.kept
    owners = [name.rpartition(".")[0] for name in result.stopped]
    for path in (*owners, *(region.path for region in result.worst(len(result.regions)))):
        part = next((p for p in search.reference.parts if path in p.paths and p.pattern not in kept), None)
        if part is not None:
            kept[part.pattern] = "damage on fresh batches shows most in its parameters"
            break
    else:
        rest = [p.pattern for p in search.reference.parts if p.pattern not in kept]
        kept.update(dict.fromkeys(rest[: max(1, len(rest) // 2)], "the plan fails without it"))
    return exempt(base, search.reference.parts, kept)
