"""What ``import castwise`` adds to ``import torch``, in interpreters that have only just started.

Each interpreter imports torch, and then castwise as far as a program does: the package by itself, the session that trains,
every public name. Which of these comes first turns from round to round; what torch's own import takes, beside which they are
judged, is from the same interpreters. ``cpu_ms`` is the processor's time of it, which other work on the machine moves less than the
clock's. Bytecode is there already, as it is for any but the first import.
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
    """What importing torch took in an interpreter, what ``added`` took after it, and the processor's time of that."""
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(added=added)],
        env={**os.environ, "PYTHONPATH": SOURCE, "PYTHONDONTWRITEBYTECODE": ""},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    times: list[float] = json.loads(done.stdout)
    return times


def main() -> None:
    """Measure, and write the rows."""
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
