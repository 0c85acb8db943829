"""The result of a search."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.report.evidence import CHOSEN, make_bare, make_candidate, make_damage, make_evidence

from castwise.commands.jobs.tune import _written
from castwise.commands.jobs.tune_result import TuneResult
from castwise.core.plans.plan import Plan
from castwise.report import plots


@pytest.fixture
def result() -> TuneResult:
    return TuneResult(CHOSEN, make_evidence())


def printed(result: TuneResult, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(result.table())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_saves_the_page_first_then_plan_evidence_and_pictures(result: TuneResult, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "out"
    paths = result.save(folder)
    assert [path.name for path in paths[:3]] == ["report.html", "plan.json", "evidence.json"]
    assert {path.suffix for path in paths[3:]} == {".png"}
    assert sorted(folder.iterdir()) == sorted(paths)
    assert Plan.load(folder / "plan.json") == CHOSEN
    data = json.loads((folder / "evidence.json").read_text(encoding="utf-8"))
    assert data["answer"] == result.answer
    assert data["passes"] == 71
    assert data["candidates"][0]["parity"]["value"] == 0.0031


def test_infinite_damage_is_written_as_null(result: TuneResult) -> None:
    rows = [row for row in result.to_dict()["candidates"] if row["name"] == "fp16-mixed"]
    assert rows[0]["parity"]["value"] is None
    assert result.evidence.candidates[9].parity == make_damage(math.inf) or rows[0]["parity"]["bias"] is None
    json.loads(result.to_json(), parse_constant=lambda name: pytest.fail(name))


def test_an_interrupted_search_saves_too(tmp_path: Path) -> None:
    paths = TuneResult(Plan.preset("fp32"), make_bare()).save(tmp_path)
    assert [path.name for path in paths] == ["report.html", "plan.json", "evidence.json"]
    assert json.loads(paths[2].read_text(encoding="utf-8"))["complete"] is False


def test_a_search_that_is_interrupted_as_it_is_written_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times, draw = itertools.count(), plots.draw

    def interrupted(*args: Any) -> Any:
        if next(times) == 0:
            raise KeyboardInterrupt
        return draw(*args)

    monkeypatch.setattr(plots, "draw", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        _written(TuneResult(Plan.preset("fp32"), make_bare()), tmp_path)
    assert caught.value.__notes__[0].startswith("The results so far were written to")
    assert {"report.html", "plan.json", "evidence.json"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_and_marks_the_plan(result: TuneResult, width: int) -> None:
    out = printed(result, width)
    assert all(len(line) <= width for line in out.splitlines())
    assert " ".join(out.split()).startswith(result.answer)
    marked = [line for line in out.splitlines() if line.strip().startswith("> ")]
    assert len(marked) == 2
    assert "56.0" in marked[0]
    assert "1.79x" in marked[0]
    assert "0.0031" in marked[1]
    for piece in (*str(CHOSEN).split("+"), "±1.1 ms", "(1.73-1.84)", "(0.0019-0.0053)"):
        assert piece in out  # not broken across lines
    said = " ".join(out.split())
    for words in (
        "out of memory",
        "Conv2d x9",
        "not worse than fp32",
        "7 other plans",
        "not tried",
        "castwise.Amp(",
    ):
        assert words in said, words


def test_the_table_cuts_a_long_list_of_rejected_plans() -> None:
    many = tuple(make_candidate(f"p{i}", None, "rejected", reason=f"not faster {i}") for i in range(30))
    out = printed(TuneResult(CHOSEN, make_evidence(candidates=many)), 80)
    assert "and 18 more in evidence.json" in out


def test_square_brackets_are_no_markup() -> None:
    full = make_evidence()
    first = dataclasses.replace(full.candidates[0], name="a[red]b", reason="[bold]")
    assert "a[red]b" in printed(TuneResult(CHOSEN, make_evidence(candidates=(first,), answer="[red]x")), 80)
