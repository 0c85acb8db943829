"""The brief answer: one screen of 80 columns, answer first; the rest is for --verbose and the page."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from castwise.bridges.run.race import Tried, TryResult
from castwise.commands.jobs.bench_result import PlanResult
from castwise.lab.timing.stats import Ratio, Summary
from castwise.report import bench, show, tried, tune
from tests.report.conftest import ENVIRONMENT
from tests.report.evidence import make_bare, make_candidate, make_evidence, make_record

Rows = Callable[..., PlanResult]
LONG = "bf16-mixed+regions.stages.*.dwconv=fp32+memory_format=channels_last"
WORDS = "bf16-mixed; stages.*.dwconv in fp32; channels_last"


def screen(record: dict[str, Any], verbose: bool = False) -> list[str]:
    text = io.StringIO()
    Console(file=text, width=80, color_system=None).print(show.table(record, verbose))
    return [line.rstrip() for line in text.getvalue().rstrip().splitlines()]


def joined(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


DOUBT = (
    "Undecided after 6 starts, because the machine is too noisy: bf16-master; head in fp32; channels_last may be up to 8 % faster than the chosen plan. "
    "A longer --budget, and an idle machine, would decide it."
)


@pytest.mark.parametrize(
    "undecided",
    [(), (DOUBT,), (DOUBT, "Peak memory of 3 plans was not measured: the time ran out.", DOUBT)],
)
@pytest.mark.parametrize("complete", [True, False])
def test_a_search_fits_and_its_answer_comes_first(undecided: tuple[str, ...], complete: bool) -> None:
    rows = tuple(dataclasses.replace(row, words=row.words or row.name) for row in make_evidence().candidates)
    rows = (dataclasses.replace(rows[0], words=WORDS), *rows[1:])
    found = make_evidence(
        candidates=rows, undecided=undecided, complete=complete, settings={"compile": "never"}
    )
    record = make_record(found)
    said = screen(record)
    assert len(said) <= 24  # one more line, for the paths of the files, fits too
    assert joined(said).startswith(found.answer)
    assert "amp = castwise.Amp(" in "\n".join(said)
    assert "--compile auto" in joined(said)
    assert "rejected" not in joined(said)
    assert len(screen(record, verbose=True)) > 2 * len(said)


def test_a_search_that_ended_at_once_is_said_too() -> None:
    said = screen(make_record(make_bare()))
    assert said[0].startswith("The search ended early.")


def test_warnings_alone_have_their_colour() -> None:
    found = make_evidence(undecided=("Peak memory was not measured.",))
    styles = {line.text: line.style for line in tune.lines(make_record(found)) if hasattr(line, "style")}
    assert styles["Peak memory was not measured."] == "yellow"
    assert styles[found.notes[0]] == ""


@pytest.mark.parametrize("count", [1, 5, 12])
def test_a_bench_fits(count: int, record: Callable[..., dict[str, Any]], row: Rows, lost: Rows) -> None:
    rows = [row(f"plan-{n}", 0.05 + n / 1000, 0.2) for n in range(count)]
    said = screen(record(*rows, lost("fp16-mixed", "failed", "out of memory")))
    assert len(said) <= 24
    assert joined(said).startswith("On this machine plan-0 trains sine")
    more = count + 2 - bench.MOST
    assert (f"and {more} more plans" in said) is (more > 0)


def _tried(**changes: Any) -> TryResult:
    step = Summary(0.01, 0.009, 0.011, 8)
    rows = (
        Tried("fp32", "fp32", step=step, final_loss=1.0, peak_bytes=10**6),
        Tried("bf16-mixed", "bf16-mixed", step=step, speedup=Ratio(1.5, 1.4, 1.6, 0.95, 8), final_loss=1.0, notes=("said",)),
        Tried(LONG, WORDS, step=step, speedup=Ratio(2.5, 2.4, 2.6, 0.95, 8), final_loss=1.0),
        Tried("fp16-mixed", "fp16-mixed", status="failed", reason="out of memory"),
    )  # fmt: skip
    return TryResult(**{
        "script": "train.py",
        "steps": 20,
        "rounds": 8,
        "environment": ENVIRONMENT,
        "plans": rows,
        **changes,
    })


def test_a_tried_script_fits() -> None:
    result = _tried()
    said = screen(result.to_dict())
    assert len(said) <= 15
    assert joined(said).startswith(f"train.py runs 2.50x (2.40-2.60) as fast under {WORDS} as under fp32.")
    assert "said" not in joined(said)
    assert "bf16-mixed: said" in screen(result.to_dict(), verbose=True)


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        (slice(0, 1), "runs under fp32; give --plans more than one plan to compare them"),
        (slice(0, 4, 3), "no other plan ran, so none is known to be faster than fp32"),
        (slice(3, 4), "did not run under fp16-mixed"),
    ],
)
def test_what_a_script_cannot_show_is_said(keep: slice, said: str) -> None:
    assert said in tried.headline(_tried(plans=_tried().plans[keep]).to_dict())


def test_a_candidate_without_words_has_its_name() -> None:
    """Evidence of earlier versions has no ``words``."""
    found = make_evidence(
        candidates=(make_candidate("bf16-mixed", 0.07), make_candidate("fp32", 0.1, "baseline"))
    )
    assert "bf16-mixed, one-line" in joined(screen(make_record(found)))
