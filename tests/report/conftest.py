"""A bench's record made by hand, so that what the report should say is known."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

ENVIRONMENT = {
    "device": "Test CPU", "device_type": "cpu", "cores": 2, "threads": 1, "capability": "AVX512", "torch": "2.13.0",
    "python": "3.11.7", "castwise": "0.1.0", "commit": "0123456789ab", "system": "Linux x86_64",
    "command": "castwise bench sine", "date": "2026-01-02T03:04:05+00:00",
}  # fmt: skip


def _timing(step_s: float, base_s: float | None, width: float = 0.05) -> dict[str, Any]:
    speed = None
    if base_s is not None:
        value = base_s / step_s
        speed = {
            "value": value,
            "low": value * (1 - width),
            "high": value * (1 + width),
            "level": 0.95,
            "n": 12,
        }
    rounds = [step_s * (1 + 0.002 * (number % 3)) for number in range(12)]
    step = {"median_s": step_s, "q1_s": step_s * 0.98, "q3_s": step_s * 1.02, "n": 12}
    return {"step": step, "speedup": speed, "rounds_s": rounds}


def make_row(
    name: str, step_s: float, final: float, *, peak: int = 100 * 2**20, base_s: float | None = 0.1
) -> dict[str, Any]:
    """A row that is in order, against a baseline of 0.1 s per step with a final loss of 0.2."""
    return {
        "name": name, "plan": name, "digest": "d" * 64, "status": "ok", "reason": "",
        "training": _timing(step_s, base_s), "inference": _timing(step_s / 3, None if base_s is None else base_s / 3),
        "memory": {"training_peak_bytes": peak, "inference_peak_bytes": peak // 4, "saved_bytes": peak // 2, "method": "m"},
        "notes": [], "losses": [1.0, 0.5, final], "final_loss": final, "final_loss_difference": final - 0.2,
        "skipped_steps": 0, "metrics": {},
    }  # fmt: skip


def make_lost(name: str, status: str, reason: str) -> dict[str, Any]:
    """A row without numbers."""
    return {
        "name": name, "plan": name, "digest": "d" * 64, "status": status, "reason": reason, "training": None,
        "inference": None, "memory": None, "notes": [], "losses": [], "final_loss": None,
        "final_loss_difference": None, "skipped_steps": 0, "metrics": {},
    }  # fmt: skip


@pytest.fixture
def record() -> Callable[..., dict[str, Any]]:
    """Makes a record of a baseline and the rows given."""

    def make(*rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
        base = make_row("fp32", 0.1, 0.2, base_s=None)
        made = {
            "kind": "bench", "version": 1, "workload": "sine", "description": "a <wave>", "baseline": "fp32", "steps": 50,
            "rounds": 12, "seed": 0, "environment": ENVIRONMENT, "plans": [base, *rows], "images": {},
        }  # fmt: skip
        return copy.deepcopy({**made, **changes})

    return make


@pytest.fixture
def row() -> Callable[..., dict[str, Any]]:
    """Makes a row that is in order."""
    return make_row


@pytest.fixture
def lost() -> Callable[..., dict[str, Any]]:
    """Makes a row without numbers."""
    return make_lost
