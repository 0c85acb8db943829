"""What every benchmark here shares: the result file and the check that comes before any speed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from castwise.measure.environment import environment

RESULTS = Path(__file__).parent / "results"


def check_losses_agree(losses: Mapping[str, float], relative: float) -> None:
    """Refuse to report speeds of loops that do not compute the same thing.

    Raises:
        SystemExit: Naming the losses.
    """
    values = list(losses.values())
    if not max(values) - min(values) <= relative * abs(values[0]):
        raise SystemExit(
            f"the losses differ by more than {relative:.0%}, so their speeds say nothing: {dict(losses)}"
        )


def write(name: str, device: torch.device, what: str | None, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Print the rows and write them with the environment to ``results/<name>-<device type>.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{device.type}.json"
    record = {
        "what": (what or "").strip(),
        "environment": dataclasses.asdict(environment(device)),
        "rows": list(rows),
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print("  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()))
    print(f"wrote bench/results/{path.name}")
    return path
