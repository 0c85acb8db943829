"""Measure the import time that ``import castwise`` adds to ``import torch``, in new interpreters.

Each interpreter imports torch and then one of three amounts of castwise: the package alone, ``castwise.Amp``, or
every public name. The order of the three rotates from round to round. For comparison, the time of ``import torch`` is
measured in the same interpreters. ``cpu_ms`` is the CPU time of the added import, which other work on the machine
affects less than wall time. The bytecode is already compiled, as for every import but the first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import torch

from castwise.lab.timing import stats
from common import Results, arguments

ADDED = {
    "import castwise": "import castwise",
    "castwise.Amp": "import castwise; castwise.Amp",
    "every public name": "import castwise; [getattr(castwise, name) for name in castwise.__all__]",
}
CODE = """
import json, time
start = time.perf_counter()
import torch
between, busy = time.perf_counter(), time.process_time()
{added}
print(json.dumps([between - start, time.perf_counter() - between, time.process_time() - busy]))
"""
ROUNDS = 9
SOURCE = str(Path(__file__).parent.parent / "src")


def seconds(added: str) -> list[float]:
    """Return the seconds of ``import torch`` and of ``added`` in a new interpreter, and the CPU seconds of ``added``."""
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(added=added)],
        env={**os.environ, "PYTHONPATH": SOURCE, "PYTHONDONTWRITEBYTECODE": ""},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    times: list[float] = json.loads(done.stdout)
    return times


def main() -> None:
    """Measure and write ``results/import-cpu.json``."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    chosen = parser.parse_args()
    with Results("import", torch.device("cpu"), __doc__) as results:
        for added in ADDED.values():
            seconds(added)  # writes bytecode
        found: dict[str, list[list[float]]] = {name: [] for name in ADDED}
        for number in range(chosen.rounds):
            names = list(ADDED)[number % len(ADDED) :] + list(ADDED)[: number % len(ADDED)]
            for name in names:
                found[name].append(seconds(ADDED[name]))
        for name, pairs in found.items():
            took = stats.summarise([added for _, added, _ in pairs])
            results.add(
                {
                    "part": name, "rounds": len(pairs), "added_ms": 1e3 * took.median_s, "quartiles_ms": [1e3 * took.q1_s, 1e3 * took.q3_s],
                    "torch_ms": 1e3 * median(of_torch for of_torch, _, _ in pairs), "cpu_ms": 1e3 * median(busy for _, _, busy in pairs),
                }
            )  # fmt: skip


if __name__ == "__main__":
    main()
