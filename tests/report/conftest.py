"""Bench records made by hand, for which the correct report is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from castwise.commands.jobs.bench_result import BenchResult, PlanResult, Timing
from castwise.lab.timing.environment import Environment
from castwise.lab.timing.memory import Memory
from castwise.lab.timing.stats import Ratio, Summary
from tests.report import evidence

ENVIRONMENT = Environment(
    device="Test CPU", device_type="cpu", cores=2, threads=1, capability="AVX512", torch="2.13.0", python="3.11.7",
    castwise="0.1.0", commit="0123456789ab", system="Linux x86_64", command="castwise bench sine",
    date="2026-01-02T03:04:05+00:00",
)  # fmt: skip


def _timing(step_s: float, base_s: float | None, width: float = 0.05) -> Timing:
    speed = None
    if base_s is not None:
        value = base_s / step_s
        speed = Ratio(value, value * (1 - width), value * (1 + width), 0.95, 12)
    rounds = tuple(step_s * (1 + 0.002 * (number % 3)) for number in range(12))
    return Timing(Summary(step_s, step_s * 0.98, step_s * 1.02, 12), speed, (rounds,))


def make_row(
    name: str,
    step_s: float,
    final: float,
    *,
    peak: int = 100 * 2**20,
    base_s: float | None = 0.1,
    **changes: Any,
) -> PlanResult:
    """Return a complete row, against a baseline of 0.1 s per step with a final loss of 0.2."""
    row: dict[str, Any] = {
        "training": _timing(step_s, base_s), "inference": _timing(step_s / 3, None if base_s is None else base_s / 3),
        "memory": Memory(peak, peak // 4, peak // 2, "m"), "losses": (1.0, 0.5, final), "final_loss": final,
        "final_loss_difference": final - 0.2,
    }  # fmt: skip
    return PlanResult(name, name, "d" * 64, "ok", **{**row, **changes})


def make_lost(name: str, status: str, reason: str) -> PlanResult:
    """Return a row without numbers."""
    return PlanResult(name, name, "d" * 64, status, reason)


def make_record(*rows: PlanResult, base: PlanResult | None = None, **changes: Any) -> dict[str, Any]:
    """Return a record of a baseline and the given rows."""
    base = make_row("fp32", 0.1, 0.2, base_s=None) if base is None else base
    made: dict[str, Any] = {
        "workload": "sine", "description": "a <wave>", "baseline": "fp32", "steps": 50, "rounds": 12, "starts": 0, "seed": 0,
        "environment": ENVIRONMENT, "plans": (base, *rows), "images": {},
    }  # fmt: skip
    return BenchResult(**{**made, **changes}).to_dict()


@pytest.fixture
def record() -> Callable[..., dict[str, Any]]:
    """Return the function that makes a record of a baseline and given rows."""
    return make_record


@pytest.fixture
def row() -> Callable[..., PlanResult]:
    """Return the function that makes a complete row."""
    return make_row


@pytest.fixture
def lost() -> Callable[..., PlanResult]:
    """Return the function that makes a row without numbers."""
    return make_lost


@pytest.fixture
def make_strange() -> Callable[[Sequence[str]], list[dict[str, Any]]]:
    """Return a function that makes a bench record and a search record in which everything has the given names."""

    def make(names: Sequence[str]) -> list[dict[str, Any]]:
        all_of_it = " ".join(names)
        images = {name: [[0.0, 1.0]] for name in ("target", *names)}
        bench = make_record(
            *(make_row(name, 0.05, 0.2, metrics={name: 1.0}) for name in names), make_lost(all_of_it, "stopped", all_of_it),
            workload=all_of_it, images=images,
        )  # fmt: skip
        full = evidence.make_evidence()
        tune = evidence.make_evidence(
            workload=all_of_it, answer=all_of_it, notes=(all_of_it,),
            candidates=tuple(replace(c, name=f"x+regions.{name}=fp32") for c, name in zip(full.candidates, names, strict=False)),
            regions=tuple(replace(full.regions[0], pattern=name, bias=0.5, format="fp32") for name in names),
            histograms=tuple(replace(full.histograms[0], pattern=name) for name in names),
        )  # fmt: skip
        return [bench, evidence.make_record(tune)]

    return make
