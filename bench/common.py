"""Code shared by the benchmarks: options, races within a budget, and result files that are written row by row."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import re
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from castwise.lab.timing.environment import environment
from castwise.lab.timing.stats import paired_speedup
from castwise.lab.timing.timing import Lap, paired, race

os.environ["CASTWISE_CACHE_DIR"] = ""  # no search uses stored results

RESULTS = Path(__file__).parent / "results"
UNITS = {"us": 1e6, "ms": 1e3}


def arguments(what: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options ``--device`` and ``--budget``."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget", type=float, help="seconds after which no new round starts")
    return parser


class Results:
    """The rows of one benchmark, which are written to ``results/<name>-<device type>.json`` as soon as they are known.

    A part that fails becomes a row with its ``error``, and the next parts still run; the benchmark then exits with a
    non-zero status. The file says ``"finished": false`` until the end, which shows if the benchmark was killed.

    Args:
        name: Name of the benchmark.
        device: The device to measure.
        what: Description of the benchmark for readers of the file.
        budget_s: Seconds for all parts together, from now.
    """

    def __init__(
        self, name: str, device: torch.device, what: str | None, budget_s: float | None = None
    ) -> None:
        self._name, self._device, self._what = name, device, what
        self._end = None if budget_s is None else time.monotonic() + budget_s
        self._failed: list[str] = []
        self.rows: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        store(self._name, self._device, self._what, self.rows)
        print(f"wrote bench/results/{self._name}-{self._device.type}.json")
        if self._failed:
            raise SystemExit(f"failed: {', '.join(self._failed)}")

    def share(self, parts: int) -> float | None:
        """Return the seconds for the next part if ``parts`` parts remain; None without a budget."""
        return None if self._end is None else max(0.0, self._end - time.monotonic()) / parts

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Catch a failure of this part, so that the other parts still run."""
        try:
            yield
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            self.add({"part": name, "error": sentence(error)})

    def add(self, *rows: dict[str, Any]) -> None:
        """Print rows and write the file; a row with an ``error`` counts as a failure."""
        self.rows += rows
        for row in rows:
            show(row)
            if "error" in row:
                self._failed.append(str(row.get("loop", row.get("part"))))
        self.save()

    def save(self) -> None:
        """Write the file after a change of rows."""
        store(self._name, self._device, self._what, self.rows, finished=False)


def compare(
    loops: Sequence[tuple[str, Callable[[], Any]]],
    *,
    rounds: int,
    steps: int,
    device: torch.device,
    unit: str,
    seconds: float | None = None,
    relative: float | None = None,
) -> list[dict[str, Any]]:
    """Race loops that do the same arithmetic; the first loop is the baseline.

    Args:
        loops: For each loop a name and a function that builds it; a loop keeps ``losses``, one per block.
        rounds: Number of rounds.
        steps: Steps per block.
        device: The device, which is synchronized.
        unit: Unit of the time of a step, ``us`` or ``ms``.
        seconds: Seconds after which no new rounds start; at least one round for each loop is run.
        relative: Largest relative difference of the losses of the last block that all loops have run.

    Returns:
        For each loop its median time, and its time relative to the baseline's with an interval; or its ``error``.

    Raises:
        SystemExit: The losses differ, so the speeds cannot be compared.
    """
    runners: dict[str, Any] = {}
    laps: dict[str, Lap] = {}
    for name, build in loops:
        try:
            runners[name] = build()
        except Exception as error:  # the others can still be compared
            laps[name] = Lap(error=error)
    laps |= race_within(list(runners.items()), rounds=rounds, steps=steps, device=device, seconds=seconds)
    well = {name: runner for name, runner in runners.items() if laps[name].error is None}
    if relative is not None and well:
        # compare the last block that all have run, because a far slower loop is stopped early
        last = min(len(runner.losses) for runner in well.values()) - 1
        losses = {name: runner.losses[last] for name, runner in well.items()}
        check_losses_agree(losses, relative, next(iter(well.values())).losses[0])
    rows: list[dict[str, Any]] = []
    for name, _ in loops:
        lap = laps[name]
        row: dict[str, Any] = {"loop": name}
        times = [t for t in lap.times_s if t is not None]
        if lap.error is not None:
            traceback.print_exception(lap.error)
            row["error"] = sentence(lap.error)
        elif lap.slowdown is not None:
            row["slowdown"] = lap.slowdown
        elif times:
            row[f"step_{unit}"] = UNITS[unit] * statistics.median_high(times)
            if loops[0][0] in well:
                speedup = paired_speedup(*paired(laps[loops[0][0]], lap))
                row |= {"ratio": 1 / speedup.value, "low": 1 / speedup.high, "high": 1 / speedup.low}
        rows.append(row)
    return rows


def race_within(
    runners: Sequence[tuple[str, Any]],
    *,
    rounds: int,
    steps: int,
    device: torch.device,
    seconds: float | None,
) -> dict[str, Lap]:
    """Race loops for as many rounds as the seconds allow; stop only when each loop has been first equally often."""
    end = math.inf if seconds is None else time.monotonic() + seconds
    return race(
        runners, rounds=rounds, steps=steps, device=device,
        is_over=lambda done: done % max(2, len(runners)) == 0 and time.monotonic() >= end,
    )  # fmt: skip


def check_losses_agree(losses: Mapping[str, float], relative: float, start: float = 0.0) -> None:
    """Check that loops computed the same thing, so that their speeds can be compared.

    Args:
        losses: The last loss of each loop.
        relative: Largest allowed relative difference.
        start: The first loss. The difference is relative to the larger of this and the last loss of the first loop.

    Raises:
        SystemExit: The losses differ; the message has them.
    """
    values = list(losses.values())
    if not max(values) - min(values) <= relative * max(abs(values[0]), abs(start)):
        raise SystemExit(
            f"the losses differ by more than {relative:.0%}, so their speeds cannot be compared: {dict(losses)}"
        )


def sentence(error: BaseException) -> str:
    """Return an error's type and first line, without the folders of paths."""
    first = re.sub(r"(?:/[^/\s]+)+/", "", (str(error).splitlines() or [""])[0])
    return f"{type(error).__name__}: {first[:300]}"


def show(row: Mapping[str, Any]) -> None:
    """Print a row."""
    print(
        "  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True
    )


def store(
    name: str,
    device: torch.device,
    what: str | None,
    rows: Sequence[Mapping[str, Any]],
    finished: bool = True,
) -> Path:
    """Write rows with the environment to ``results/<name>-<device type>.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{device.type}.json"
    record = {
        "what": (what or "").strip(),
        "environment": dataclasses.asdict(environment(device)),
        **({} if finished else {"finished": False}),
        "rows": list(rows),
    }
    fresh = path.with_suffix(".part")
    fresh.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)  # if the process is killed, the old file stays intact
    return path


def write(name: str, device: torch.device, what: str | None, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Print and store all rows of a finished benchmark."""
    for row in rows:
        show(row)
    path = store(name, device, what, rows)
    print(f"wrote bench/results/{path.name}")
    return path
