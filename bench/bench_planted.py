"""Test whether the search finds the one fragile module of a model and keeps no sound module in fp32.

Every case and its sound twin are searched with ``goal="numerics"``, for bf16 and for fp16 separately, so that speed
cannot hide the answer. The plan is then trained against fp32 and judged by code that the search does not use. The
counts are: plans that fail in training; planted modules that were kept in fp32, if the case is fragile in that
format; and sound modules that were kept in fp32. ``parity`` also tests the low format applied to the whole model.

There are three suites. ``first`` (``bench/planted/cases.py``, ``judge.py``) was written after the search and
alongside it. ``held-out`` (``models.py``, ``paired.py``), with a stricter judge, was committed before any search or
test had run on it. ``discrete`` (``discrete.py``, with the same judge) plants its faults in random draws, indices and
masks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

import castwise
from castwise import Plan, Region, Workload
from castwise.core.model.resolve import assign
from common import RESULTS, write
from planted import cases, discrete, judge, models, paired


@dataclass(frozen=True)
class Subject:
    """A case of a suite.

    Attributes:
        suite: ``first``, ``held-out`` or ``discrete``.
        name: Name of the case.
        formats: The formats in which training fails because of the fragile module.
        fragile: Path of the fragile module.
        others: Paths of the modules that no plan needs to exempt.
        make: Makes the workload, sound or not.
        reference: Trains in fp32; the result is an argument of ``fails``.
        fails: Returns whether a plan fails in training, its loss, fp32's loss and the margin.
    """

    suite: str
    name: str
    formats: Sequence[str]
    fragile: str
    others: tuple[str, ...]
    make: Callable[[bool], Workload]
    reference: Callable[[Workload], object]
    fails: Callable[[Workload, Plan, object], dict[str, object]]


def subjects(suite: str) -> Iterator[Subject]:
    """Yield the cases of a suite."""

    def first(workload: Workload, plan: Plan, base: object) -> dict[str, object]:
        assert isinstance(base, list)
        says = judge.judge(workload, plan, base)
        return {"fails": says.fails, "loss": says.loss, "fp32_loss": says.reference, "margin": says.margin}

    def held_out(workload: Workload, plan: Plan, base: object) -> dict[str, object]:
        assert isinstance(base, list)
        says = paired.judge(workload, plan, reference=base)
        return {
            "fails": says.fails,
            "loss": says.plan_loss,
            "fp32_loss": says.fp32_loss,
            "margin": says.margin,
        }

    if suite == "first":
        for case in cases.CASES:
            others = tuple(path for path in case.units() if path != case.fragile)
            yield Subject(
                suite, case.name, case.formats, case.fragile, others, case.workload, judge.reference, first
            )
    else:
        for other in {"held-out": models, "discrete": discrete}[suite].CASES:
            yield Subject(
                suite, other.name, other.formats, other.fragile, tuple(models.sound_modules(other)), other.make,
                paired.train_fp32, held_out,
            )  # fmt: skip


def kept(subject: Subject, plan: Plan) -> set[str]:
    """Return the modules of a case that a plan keeps in fp32."""
    paths = {subject.fragile, *subject.others}
    if plan.compute == "fp32":
        return paths
    assigned = assign(subject.make(False).model(), plan.regions)
    out = set()
    for path in paths:
        at = path
        while at not in assigned and at:
            at = at.rpartition(".")[0]
        if at in assigned and assigned[at].compute == "fp32":
            out.add(path)
    return out


def run(subject: Subject, sound: bool, low: str, base: object) -> dict[str, object]:
    """Search one model in one format, and judge the plan that the search chooses."""
    workload = subject.make(sound)
    result = castwise.tune(workload, goal="numerics", formats=(low,), device="cpu", memory=False)
    exempted = kept(subject, result.plan)
    fragile = not sound and low in subject.formats
    says = subject.fails(workload, result.plan, base)
    everywhere = Plan.preset(f"{low}-mixed")
    cured = dataclasses.replace(everywhere, regions=(Region(subject.fragile, compute="fp32"),))
    torch.manual_seed(0)
    found = castwise.parity(
        workload.model(), workload.loss, workload.batches, everywhere, optimizer=workload.optimizer
    )
    own = set() if sound else {subject.fragile}  # in a twin this module is sound too
    return {
        "suite": subject.suite,
        "case": subject.name,
        "twin": "sound" if sound else "planted",
        "format": low,
        "fragile": fragile,
        "plan": str(result.plan),
        "plan_fails": says["fails"],
        "planted_kept": subject.fragile in exempted,
        "sound_kept": len(exempted - own),
        "sound_regions": len({subject.fragile, *subject.others} - own),
        "passes": result.evidence.passes,
        "all_low_fails": subject.fails(workload, everywhere, base)["fails"],
        "cure_fails": subject.fails(workload, cured, base)["fails"] if fragile else None,
        "parity": found.verdict,
        **{k: v for k, v in says.items() if k != "fails"},
    }


def summary(suite: str, rows: Sequence[dict[str, object]]) -> dict[str, object]:
    """Return the counts over a suite."""
    fragile = [row for row in rows if row["fragile"]]
    twins = [row for row in rows if row["twin"] == "sound"]
    return {
        "suite": suite,
        "case": "all",
        "plans": len(rows),
        "plans_that_fail": sum(bool(row["plan_fails"]) for row in rows),
        "planted": len(fragile),
        "planted_kept": sum(bool(row["planted_kept"]) for row in fragile),
        "suite_shows_failure": sum(bool(row["all_low_fails"]) for row in fragile),
        "sound_regions": sum(int(str(row["sound_regions"])) for row in fragile + twins),
        "sound_regions_kept": sum(int(str(row["sound_kept"])) for row in fragile + twins),
        "parity_misses": sum(row["parity"] == "pass" for row in fragile),
        "parity_fails_a_twin": sum(row["parity"] == "fail" for row in twins),
        "most_passes": max(int(str(row["passes"])) for row in rows),
    }


def main() -> None:
    """Run suites; the rows of other suites in the result file stay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--suite", default="first,held-out,discrete", help="comma-separated names")
    parser.add_argument("--only", default="", help="comma-separated names of cases; nothing is written")
    options = parser.parse_args()
    if options.device != "cpu":
        return  # the suites are about formats, not devices
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for suite in options.suite.split(","):
        rows: list[dict[str, object]] = []
        for subject in subjects(suite):
            if options.only and subject.name not in options.only.split(","):
                continue
            for sound in (False, True):
                base = subject.reference(subject.make(sound))
                for low in ("bf16", "fp16"):
                    rows.append(run(subject, sound, low, base))
                    print(" ".join(f"{k}={v}" for k, v in rows[-1].items()), flush=True)
        print(summary(suite, rows), flush=True)
        if not options.only:
            path = RESULTS / "planted-cpu.json"
            old = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
            others = [row for row in old if row.get("suite") not in (None, suite)]
            write("planted", torch.device("cpu"), __doc__, [*others, *rows, summary(suite, rows)])
    torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
