"""Run the tests and benchmarks that need a GPU, in parts: ``python bench/gpu.py test``, ``core`` and ``tune``.

The tests are first those marked ``gpu``, then all tests that ``make test DEVICE=sim`` runs, on the GPU. The script
uses the torch of the interpreter that runs it. Each file or folder of tests and each benchmark has its own process
and a share of the remaining time, so that one that fails, hangs or breaks the device's context does not affect the
others. Each result is written to ``bench/results`` as soon as it is known. Failures are listed at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
NEEDS = {"test": ("pytest",), "core": (), "tune": ("numpy",)}
"""Packages that a part needs besides torch."""
CORE = ("overhead", "sine", "master", "compat")
LARGE = "gpt?layers=8&width=2048&context=512&batch=16"
"""A GPT with 400 million parameters, large enough for a modern GPU; a smaller one would be dispatch-bound."""
TUNED = {"cuda": ("sine", "gpt?layers=6&width=768", LARGE), "cpu": ("sine", "gpt", "digits")}
ROUNDS_SHARE, SEARCH_SHARE = 0.5, 0.4
"""Shares of a benchmark's time: for rounds (the rest: imports and memory), and for a search (the rest: races)."""
MINUTES = {"test": 60.0, "core": 8.0, "tune": 8.0}
"""Time limit of each part, in minutes."""
OUTCOME = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b")


@dataclass
class Job:
    """One process of a part: its name, its command, and its budget option with the share of its time for this option."""

    name: str
    command: list[str]
    budget: tuple[str, float] | None = None


def jobs(part: str, device: str) -> list[Job]:
    """Return the jobs of a part."""
    if part == "core":
        return [
            Job(
                name,
                [str(BENCH / f"bench_{name}.py"), "--device", device],
                ("--budget", ROUNDS_SHARE),
            )
            for name in CORE
        ]
    if part == "tune":
        script = str(BENCH / "bench_tune.py")
        return [
            Job(
                name,
                [
                    script,
                    "--device",
                    device,
                    "--only",
                    name,
                    "--searches",
                    "1",
                    "--short",
                    "0",
                    "--starts",
                    "3",
                ],
                ("--budget", SEARCH_SHARE),
            )
            for name in TUNED[device]
        ]
    marked = {
        path: text
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "pytest.mark.gpu" in (text := path.read_text(encoding="utf-8"))
    }
    # Files with GPU tests only take longest, so they come last and get all the remaining time.
    files = sorted(marked, key=lambda path: "pytestmark = pytest.mark.gpu" in marked[path])
    # The project's own options need plugins, so they are dropped. Warnings that occur only on a GPU are not errors.
    options = ["-v", "-rfE", "--tb=short", "-o", "addopts=", "-o", "faulthandler_timeout=40", "-W", "default"]
    marked_ones = [
        Job(name, ["-m", "pytest", *options, "-m", "gpu", name])
        for name in (str(path.relative_to(ROOT)) for path in files)
    ]
    return marked_ones + [
        Job(f"{folder}/", ["-m", "pytest", *options, "-m", "not gpu", folder]) for folder in on_devices()
    ]


def on_devices() -> list[str]:
    """Return the folders of tests that concern devices, as listed in the Makefile."""
    makefile = ROOT / "Makefile"
    if not makefile.is_file():
        return []
    listed = makefile.read_text(encoding="utf-8").replace("\\\n", " ")
    words = next(line for line in listed.splitlines() if line.startswith("ON_DEVICES :=")).partition("=")[2]
    return words.split()


def unfit(part: str, device: str) -> str | None:
    """Return one sentence that says why a part cannot start; None if it can."""
    missing = [name for name in ("torch", *NEEDS[part]) if importlib.util.find_spec(name) is None]
    if missing:
        names = " ".join(missing)
        return (
            f"{sys.executable} has no {' and no '.join(missing)}: {sys.executable} -m pip install {names} (where there is no "
            f"network: pip download --dest wheels {names} elsewhere, with the same Python and system, then "
            f"pip install --no-index --find-links wheels {names} here)"
        )
    import torch

    version = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])
    if version < (2, 11):
        return f"{sys.executable} has torch {torch.__version__}, and castwise needs 2.11 or later"
    if device == "cuda" and not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} of {sys.executable} finds no GPU; name an interpreter whose torch does: "
            "make gpu PYTHON_GPU=python3, or pass --device cpu to try this script"
        )
    return None


def surroundings(device: str) -> dict[str, str]:
    """Return the environment variables of each process."""
    return os.environ | {
        "CASTWISE_TEST_DEVICE": device,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONUNBUFFERED": "1",
        # these tests need no installed pytest plugins and no options from the environment
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": "",
    }


def environment(device: str) -> dict[str, Any] | None:
    """Return the description of the device; a separate process reads it, so that this process never uses the device."""
    code = (
        "import dataclasses, json, sys; from castwise.lab.timing.environment import environment; "
        "print(json.dumps(dataclasses.asdict(environment(sys.argv[1]))))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, device], cwd=ROOT, env=surroundings(device),
            text=True, stdout=subprocess.PIPE, check=True, timeout=60,
        )  # fmt: skip
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None  # every job will fail for the same reason and report it
    return json.loads(done.stdout) | {"command": " ".join(["gpu.py", *sys.argv[1:]])}


def run(job: Job, limit_s: float, device: str) -> dict[str, Any]:
    """Run a job to its end or its time limit, print its output, and return its outcome as a row."""
    budget = [job.budget[0], f"{job.budget[1] * limit_s:.0f}"] if job.budget else []
    print(f"--- {job.name} (at most {limit_s:.0f} s)", flush=True)
    began = time.monotonic()
    outcomes: dict[str, list[str]] = {}
    process = subprocess.Popen(
        [sys.executable, *job.command, *budget], cwd=ROOT, env=surroundings(device), text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip

    def read() -> None:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            if found := OUTCOME.match(line):
                outcomes.setdefault(found[2].lower(), []).append(found[1])

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        code = process.wait(limit_s)
        how = "ok" if code == 0 else f"failed (exit {code})"
    except subprocess.TimeoutExpired:
        how = f"ended after {limit_s:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):  # the process and its children
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join(5.0)
    row: dict[str, Any] = {"job": job.name, "outcome": how, "seconds": round(time.monotonic() - began, 1)}
    for kind, names in outcomes.items():
        row[kind] = len(names) if kind in ("passed", "skipped") else names
    return row


def main() -> int:
    """Run one part; return the exit status: 1 if a job failed, 2 if the part could not start."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=list(NEEDS))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--minutes", type=float, help="time limit for the whole part")
    parser.add_argument(
        "--only", default="", help="comma-separated names of jobs, in the order in which to run them"
    )
    options = parser.parse_args()
    end = time.monotonic() + 60.0 * (options.minutes or MINUTES[options.part])
    if reason := unfit(options.part, options.device):
        print(reason, file=sys.stderr)
        return 2
    known = {job.name: job for job in jobs(options.part, options.device)}
    asked = [name for name in options.only.split(",") if name] or list(known)
    if not known.keys() >= set(asked):
        parser.error(f"--only {options.only}: the jobs of {options.part} are {list(known)}")
    chosen = [known[name] for name in asked]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the running job too

    rows: list[dict[str, Any]] = []
    record = {"environment": environment(options.device), "finished": False, "rows": rows}
    path = BENCH / "results" / f"gpu-{options.part}-{options.device}.json"
    path.parent.mkdir(exist_ok=True)
    for number, job in enumerate(chosen):
        left = end - time.monotonic()
        rows.append(
            run(job, left / (len(chosen) - number), options.device)
            if left > 0
            else {"job": job.name, "outcome": "no time left"}
        )
        record["finished"] = len(rows) == len(chosen)
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print("---")
    for row in rows:
        print("  ".join(f"{key}={value}" for key, value in row.items()))
    return int(any(row["outcome"] != "ok" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
