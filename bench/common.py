"""What every benchmark here shares: its options, races within a budget, and a result file that is written row by row."""

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

os.environ["CASTWISE_CACHE_DIR"] = ""  # every search is made anew

RESULTS = Path(__file__).parent / "results"
UNITS = {"us": 1e6, "ms": 1e3}


def arguments(what: str | None) -> argparse.ArgumentParser:
    """A parser with the options ``--device`` and ``--budget``."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget", type=float, help="seconds after which no further round begins")
    return parser


class Results:
    """The rows of one benchmark, in ``results/<name>-<device type>.json`` as soon as they are known.

    A part that fails becomes a row with its ``error``, and those after it go on; the benchmark then ends non-zero. The file
    says ``"finished": false`` until the end, so that one that was ended by force shows it.

    Args:
        name: Of the benchmark.
        device: That is measured.
        what: What was done, for a reader of the file.
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
        """Seconds for the next of ``parts`` parts that are still to come; None without a budget."""
        return None if self._end is None else max(0.0, self._end - time.monotonic()) / parts

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Keep a failure of this part from the others."""
        try:
            yield
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            self.add({"part": name, "error": sentence(error)})

    def add(self, *rows: dict[str, Any]) -> None:
        """Print rows and write the file; one with an ``error`` counts as a failure."""
        self.rows += rows
        for row in rows:
            show(row)
            if "error" in row:
                self._failed.append(str(row.get("loop", row.get("part"))))
        self.save()

    def save(self) -> None:
        """Write the file, after rows were changed."""
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
    """Race loops that do the same arithmetic, the first as the baseline.

    Args:
        loops: Names, and what builds each; a loop keeps ``losses``, one per block.
        rounds: Rounds to race.
        steps: Steps per block.
        device: That is waited for.
        unit: Of the time of a step, ``us`` or ``ms``.
        seconds: After which no further rounds begin; at least one for each loop is run.
        relative: How far apart the losses of the last block that all have trained may be, relative to the first one.

    Returns:
        Per loop its median time, and its time relative to the baseline's with an interval; or its ``error``.

    Raises:
        SystemExit: The losses differ, so that speeds say nothing.
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
        # of the last block that all have trained: one that is far slower leaves the race early
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
    """A race of so many rounds as the seconds allow: it stops where each loop has come first equally often."""
    end = math.inf if seconds is None else time.monotonic() + seconds
    return race(
        runners, rounds=rounds, steps=steps, device=device,
        is_over=lambda done: done % max(2, len(runners)) == 0 and time.monotonic() >= end,
    )  # fmt: skip


def check_losses_agree(losses: Mapping[str, float], relative: float, start: float = 0.0) -> None:
    """Refuse to report speeds of loops that do not compute the same thing.

    Args:
        losses: Where each loop has come to.
        relative: How far apart they may be.
        start: Where all began: what has nearly vanished is compared with this.

    Raises:
        SystemExit: Naming the losses.
    """
    values = list(losses.values())
    if not max(values) - min(values) <= relative * max(abs(values[0]), abs(start)):
        raise SystemExit(
            f"the losses differ by more than {relative:.0%}, so their speeds say nothing: {dict(losses)}"
        )


def sentence(error: BaseException) -> str:
    """An error's type and first line, without the machine's paths."""
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
    fresh.replace(path)  # whoever is ended here leaves the file before it whole
    return path


def write(name: str, device: torch.device, what: str | None, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Print all rows of a benchmark at its end and store them."""
    for row in rows:
        show(row)
    path = store(name, device, what, rows)
    print(f"wrote bench/results/{path.name}")
    return path
