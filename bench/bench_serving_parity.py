"""Planted failures of served models: does ``output_parity`` fail them, and pass their sound twins and sound models?

Each case of ``bench/planted/serving.py`` is tested under ``bf16-mixed`` and ``fp16-mixed``, and so is its sound twin, with two
seeds of batches. The small models of ``bench/architectures.py``, of ``transformers`` configurations, are sound models. They are
trained for a few steps, since statistics of BatchNorm and scales of layers are not those of a served model before. They are
tested under four presets.

``judged`` says whether a failure is planted: the relative error of the outputs, computed here from the outputs alone, to be
compared with that of the sound twin. ``blamed`` lists the parts that ``OutputTest.blame`` names first, as many as have to run in
fp32 for the plan to pass.

Offsets from 1 to 64, which take no bits to six, show what a multiple of the floor means for decisions.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import castwise
from architectures import ARCHITECTURES
from castwise import Plan, Workload
from castwise.lab.passes.regions import exempt
from castwise.lab.result import plain
from castwise.lab.serve.comparison import OutputTest
from castwise.lab.serve.result import OutputParity
from common import Results, arguments
from planted.serving import CASES, OFFSETS, Case, graded

BATCHES = 16
STEPS = 40
SEEDS = (0, 1)
PRESETS = ("bf16-mixed", "fp16-mixed", "bf16-true", "fp16-true")


def _of(result: OutputParity) -> dict[str, Any]:
    worst = result.worst
    return {
        "verdict": result.verdict,
        "by": worst.by,
        "times": worst.times,
        "low": worst.low,
        "high": worst.high,
        "relative_error": worst.error,
        "floor": worst.floor,
        "changed": worst.changed,
        "changed_by_rounding": worst.changed_by_rounding,
    }


def _error(model: nn.Module, low: str, batches: Sequence[Any], device: torch.device) -> float:
    """Return the relative error of a model's outputs under a plan, with changed booleans as errors of 1."""

    def outputs(module: nn.Module) -> Tensor:
        out = [module(*batch) for batch in batches]
        tensors = [each if isinstance(each, Tensor) else each["kept"] for each in out]
        return torch.cat([tensor.flatten().double() for tensor in tensors])

    model = model.to(device)
    with torch.no_grad():
        fp32 = outputs(model)
        served = copy.deepcopy(model)
        castwise.Amp(f"{low}-mixed", device=device).prepare(served, inference=True)
        delta = outputs(served) - fp32
    return float(delta.norm() / fp32.norm())


def planted(case: Case, seed: int, device: torch.device) -> list[dict[str, Any]]:
    """Test a case and its twin in both formats."""
    rows = []
    for sound in (True, False):
        given = case.batches(sound, seed)
        test = OutputTest(case.model(sound), lambda model, batch: model(*batch), given, device, seed=seed)
        test.reference(BATCHES)
        for low in ("bf16", "fp16"):
            plan = Plan.preset(f"{low}-mixed")
            fragile = not sound and low in case.formats
            row = {
                "case": case.name,
                "twin": "sound" if sound else "planted",
                "format": low,
                "seed": seed,
                "fragile": fragile,
                **_of(test.test(plan)),
                "judged": _error(case.model(sound), low, test.seen[:4], device),
            }
            if fragile:
                row["blamed"] = _blamed(test, plan)
            rows.append(plain(row))
    return rows


def _blamed(test: OutputTest, plan: Plan) -> list[str] | None:
    """Return the parts that are blamed first, as many as cure the plan; None if three do not."""
    names = [name for name, _ in test.blame(plan)[:3]]
    for count in range(1, len(names) + 1):
        if test.test(exempt(plan, test.parts(), names[:count])).verdict == "pass":
            return names[:count]
    return None


def graded_case(size: float, device: torch.device) -> list[dict[str, Any]]:
    """Test an offset in both formats, with more batches, since few decisions change."""
    case = graded(size)
    test = OutputTest(case.model(False), lambda model, batch: model(*batch), case.batches(False), device)
    test.reference(4 * BATCHES)
    return [
        plain({"case": case.name, "twin": "graded", "format": low, "fragile": False})
        | plain(_of(test.test(Plan.preset(f"{low}-mixed"))))
        for low in ("bf16", "fp16")
    ]


def sound_model(name: str, workload: Workload, device: torch.device) -> list[dict[str, Any]]:
    """Train a model for a few steps and test it under each preset."""
    torch.manual_seed(0)
    model = workload.model().to(device)
    optimizer = workload.optimizer(model.parameters())
    batches = workload.batches(1)
    for _ in range(STEPS):
        batch = {key: value.to(device) for key, value in next(batches).items()}
        workload.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    test = OutputTest(model.eval(), lambda model, batch: model(**batch), workload.batches(2), device)
    test.reference(BATCHES)
    return [
        {
            "case": name,
            "twin": "model",
            "format": preset,
            "fragile": False,
            **_of(test.test(Plan.preset(preset))),
        }
        for preset in PRESETS
    ]


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Count over all rows."""
    fragile = [row for row in rows if row["fragile"]]
    out: dict[str, Any] = {
        "case": "all",
        "planted": len(fragile),
        "planted_fail": sum(row["verdict"] == "fail" for row in fragile),
        "planted_pass": sum(row["verdict"] == "pass" for row in fragile),
        "cured_by_first_blamed": sum(len(row["blamed"] or ()) == 1 for row in fragile),
        "cured_by_blamed": sum(row["blamed"] is not None for row in fragile),
        "least_times_planted": min(row["times"] for row in fragile if row["times"] is not None),
        "least_judged_of_twin": min(
            row["judged"] / twin["judged"]
            for row in fragile
            for twin in rows
            if all(twin.get(key) == row[key] for key in ("case", "format", "seed"))
            and twin["twin"] == "sound"
            and twin["judged"]
            and row["judged"] is not None
        ),
    }
    kinds = {
        "twins": [row for row in rows if row["twin"] == "sound"],
        "harmless": [row for row in rows if row["twin"] == "planted" and not row["fragile"]],
        "models": [row for row in rows if row["twin"] == "model"],
    }
    for name, group in kinds.items():
        out |= {
            name: len(group),
            f"{name}_pass": sum(row["verdict"] == "pass" for row in group),
            f"{name}_fail": sum(row["verdict"] == "fail" for row in group),
            f"most_times_{name}": max(row["times"] for row in group),
            f"most_high_{name}": max(row["high"] for row in group),
        }
    return out


def main() -> None:
    """Run all cases and models."""
    options = arguments(__doc__).parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with Results("serving-parity", device, __doc__, options.budget) as results:
        for case in CASES:
            for seed in SEEDS:
                with results.part(f"{case.name}, seed {seed}"):
                    results.add(*planted(case, seed, device))
        for size in OFFSETS:
            with results.part(f"offset {size:g}"):
                results.add(*graded_case(size, device))
        for name, make in ARCHITECTURES.items():
            with results.part(name):
                results.add(*sound_model(name, make(), device))
        results.add(summary([row for row in results.rows if "verdict" in row]))


if __name__ == "__main__":
    main()
