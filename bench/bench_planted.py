"""Planted failures: does the search find the one fragile place of a model, and leave sound ones alone?

Every case of ``bench/planted`` is searched with ``goal="numerics"``, for bf16 and for fp16 apart, so that speed cannot
hide the answer; so is its sound twin. A plan is then judged by training it against fp32 (``bench/planted/judge.py``), which
shares no code with the search. Counted are: plans that fail the judge; planted places that were kept in fp32, where the
case is fragile in that format; and regions that were kept though they are sound.
"""

from __future__ import annotations

import argparse
import dataclasses

import torch

import castwise
from castwise import Plan, Region
from castwise.regions import assign
from common import write
from planted.cases import CASES, Case
from planted.judge import judge, reference


def kept_units(case: Case, plan: Plan) -> set[str]:
    """Units of the model that a plan keeps in fp32."""
    if plan.compute == "fp32":
        return set(case.units())
    model = case.workload(sound=False).model()
    assigned = assign(model, plan.regions)
    out = set()
    for path in case.units():
        at = path
        while at not in assigned and at:
            at = at.rpartition(".")[0]
        if at in assigned and assigned[at].compute == "fp32":
            out.add(path)
    return out


def run(case: Case, sound: bool, low: str, fp32: list[float]) -> dict[str, object]:
    """Search one model in one format, and judge what comes of it."""
    workload = case.workload(sound)
    result = castwise.tune(workload, goal="numerics", formats=(low,), device="cpu", memory=False)
    kept = kept_units(case, result.plan)
    fragile = not sound and low in case.formats
    says = judge(workload, result.plan, fp32)
    untouched = judge(workload, Plan.preset(f"{low}-mixed"), fp32)
    cured = dataclasses.replace(Plan.preset(f"{low}-mixed"), regions=(Region(case.fragile, compute="fp32"),))
    return {
        "case": case.name,
        "twin": "sound" if sound else "planted",
        "format": low,
        "fragile": fragile,
        "plan": str(result.plan),
        "plan_fails": says.fails,
        "planted_kept": case.fragile in kept,
        "sound_kept": len(kept - {case.fragile}) if not sound else len(kept),
        "sound_regions": len(case.units()) - (0 if sound else 1),
        "passes": result.evidence.passes,
        "all_low_fails": untouched.fails,
        "cure_fails": judge(workload, cured, fp32).fails if fragile else None,
        "loss": says.loss,
        "fp32_loss": says.reference,
        "margin": says.margin,
    }


def main() -> None:
    """Run the suite."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", default="", help="names of cases, between commas")
    options = parser.parse_args()
    if options.device != "cpu":
        return  # the suite is about formats, not devices
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    for case in CASES:
        if options.only and case.name not in options.only.split(","):
            continue
        for sound in (False, True):
            fp32 = reference(case.workload(sound))
            for low in ("bf16", "fp16"):
                rows.append(run(case, sound, low, fp32))
                print(" ".join(f"{k}={v}" for k, v in list(rows[-1].items())[:11]), flush=True)
    fragile = [row for row in rows if row["fragile"]]
    twins = [row for row in rows if row["twin"] == "sound"]
    summary = {
        "case": "all",
        "plans": len(rows),
        "plans_that_fail": sum(bool(row["plan_fails"]) for row in rows),
        "planted": len(fragile),
        "planted_kept": sum(bool(row["planted_kept"]) for row in fragile),
        "suite_shows_failure": sum(bool(row["all_low_fails"]) for row in fragile),
        "sound_regions": sum(int(str(row["sound_regions"])) for row in fragile + twins),
        "sound_regions_kept": sum(int(str(row["sound_kept"])) for row in fragile + twins),
        "most_passes": max(int(str(row["passes"])) for row in rows),
    }
    torch.set_num_threads(threads)
    if not options.only:
        write("planted", torch.device("cpu"), __doc__, [*rows, summary])
    print(summary)


if __name__ == "__main__":
    main()
