"""Compare the duration of a search with that of a search by the code of another commit, on the jobs of ``bench_tune``.

Searches alternate between the commits, and each runs in its own process. ``--before`` is a working tree of the other
commit (``git worktree add``), with its own ``src`` and ``bench``. Both searches have the same budget, start without a
stored plan, and are timed from the call of ``castwise.tune`` to its result. ``stages`` has the seconds of each stage
of a search.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from architectures import ARCHITECTURES
from bench_tune import BUILT_IN
from common import Results, arguments

_SEARCH = """
import inspect, json, sys, time
import castwise
from architectures import ARCHITECTURES
if __name__ == "__main__":
    name, device, budget_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
    fresh = {"fresh": True} if "fresh" in inspect.signature(castwise.tune).parameters else {}
    workload = ARCHITECTURES[name]() if name in ARCHITECTURES else name
    begin = time.perf_counter()
    result = castwise.tune(workload, device=device, budget_s=budget_s, memory=False, **fresh)
    took_s = time.perf_counter() - begin
    stages = {stage.name: stage.time_s for stage in result.evidence.stages}
    print(json.dumps({"s": took_s, "plan": str(result.plan), "stages": stages, "commit": result.evidence.environment.commit}))
"""
HERE = pathlib.Path(__file__).resolve().parents[1]


def search(tree: pathlib.Path, name: str, device: torch.device, budget_s: float) -> dict[str, Any]:
    """Run one search by the code of a working tree and return its result."""
    found = subprocess.run(
        [sys.executable, "-c", _SEARCH, name, str(device), str(budget_s)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tree / "src", tree / "bench")))},
        cwd=tree, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    row: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return row


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the median times over the jobs, and the median ratio of the time now to the time before."""
    return {
        "workload": "all",
        "median_before_s": statistics.median(row["before"]["s"] for row in rows),
        "median_s": statistics.median(row["now"]["s"] for row in rows),
        "median_share": statistics.median(row["now"]["s"] / row["before"]["s"] for row in rows),
        "sooner": sum(row["now"]["s"] < row["before"]["s"] for row in rows),
        "workloads": len(rows),
    }


def main() -> None:
    """Measure and write ``results/sooner-<device>.json``."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--before", type=pathlib.Path, required=True, help="a working tree of the other commit"
    )
    parser.add_argument("--only", help="names of jobs, separated by commas")
    given = parser.parse_args()
    names = given.only.split(",") if given.only else [*BUILT_IN[given.device], *ARCHITECTURES]
    device = torch.device(given.device)
    rows: list[dict[str, Any]] = []
    with Results("sooner", device, __doc__, given.budget) as results:
        for number, name in enumerate(names):
            trees = {"before": given.before.resolve(), "now": HERE}
            turns = list(trees) if number % 2 else list(trees)[::-1]
            found = {which: search(trees[which], name, device, 100.0) for which in turns}
            rows.append({"workload": name, **found})
            results.add(rows[-1])
        results.add(summary(rows))


if __name__ == "__main__":
    main()
