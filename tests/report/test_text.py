"""The text of reports, from numbers with a known meaning."""

from __future__ import annotations

import html
import io
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from castwise.commands.jobs.bench_result import PlanResult, Timing
from castwise.lab.timing.rates import grade_of
from castwise.lab.timing.stats import paired_speedup, summarise
from castwise.report import bench, plots, words
from castwise.report.grids import Grid, terminal
from castwise.report.show import table, write

Make = Callable[..., dict[str, Any]]
Row = Callable[..., PlanResult]


def test_imports_no_torch() -> None:
    code = (
        "import sys, castwise.report.show; "
        "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules or 'rich' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (12.34, "12.3 s"),
        (1.0, "1.00 s"),
        (0.0125, "12.5 ms"),
        (0.1234, "123 ms"),
        (3.21e-6, "3.21 us"),
        (4e-9, "4.00 ns"),
    ],
)
def test_times(seconds: float, said: str) -> None:
    assert words.time(seconds) == said


@pytest.mark.parametrize(
    ("count", "said"),
    [(512, "512 B"), (2**20, "1.00 MiB"), (150 * 2**20, "150 MiB"), (3.5 * 2**30, "3.50 GiB")],
)
def test_bytes(count: float, said: str) -> None:
    assert words.size(count) == said


def test_the_answer_names_the_fastest_plan_with_interval_memory_and_loss(record: Make, row: Row) -> None:
    made = record(row("bf16-mixed", 0.05, 0.202, peak=60 * 2**20), row("bf16-true", 0.08, 0.2))
    assert bench.headline(made) == (
        "On this machine bf16-mixed trains sine 2.00x as fast as fp32 (95 % interval 1.90 to 2.10) with 40 % less peak "
        "memory; its final loss is 0.002 higher, 1 % of fp32's."
    )


def test_plans_that_the_rounds_do_not_tell_apart_are_said_to_be_level(record: Make, row: Row) -> None:
    made = record(row("bf16-mixed", 0.05, 0.2), row("bf16-master", 0.05, 0.2), row("O1", 0.06, 0.2))
    assert bench.headline(made).endswith("bf16-master cannot be distinguished from it in speed.")


def test_of_level_plans_the_first_asked_for_is_the_answer(record: Make, row: Row) -> None:
    first = row("bf16-mixed", 0.0501, 0.2)
    rounds = tuple(0.0501 + 0.001 * (-1) ** n for n in range(12))
    first = replace(first, training=replace(first.training, starts_s=(rounds,)))
    made = record(first, row("O1", 0.07, 0.2), row("bf16-true", 0.05, 0.2))
    assert (made["best"], made["level_with_best"]) == ("bf16-mixed", ["bf16-true"])
    said = bench.headline(made)
    assert said.startswith("On this machine bf16-mixed trains sine 2.00x as fast")
    assert said.endswith("bf16-true cannot be distinguished from it in speed.")


def test_a_tie_with_the_baseline_is_said_as_a_tie(record: Make, row: Row) -> None:
    said = bench.headline(record(row("bf16-mixed", 0.098, 0.2)))
    assert said.startswith(
        "On this machine no plan that learns as well trains sine measurably faster than fp32."
    )
    assert "bf16-mixed ties with fp32: it is 1.02x as fast (95 % interval 0.969 to 1.07)" in said


@pytest.mark.parametrize(
    ("times_s", "said", "cell"),
    [
        ([(0.10, 0.07)], "One round does not show whether bf16-mixed or fp32 is faster; 6 or more may. bf16-mixed is 1.43x as fast (no interval)", "1.43x (no interval)"),
        ([(0.10, 0.07), (0.10, 0.065)], "2 rounds do not show whether bf16-mixed or fp32 is faster; 6 or more may. bf16-mixed is 1.48x as fast (95 % interval 0.926 to", ""),
        ([(0.10, 0.09), (0.10, 0.08), (0.10, 0.1)], "3 rounds do not show whether bf16-mixed or fp32 is faster", ""),
    ],
)  # fmt: skip
def test_few_rounds_give_no_direction_unless_they_agree_closely(
    times_s: list[tuple[float, float]], said: str, cell: str, record: Make, row: Row
) -> None:
    before, after = zip(*times_s, strict=True)
    ratio = paired_speedup(before, after)
    timing = Timing(summarise(after), ratio, (after,))
    made = record(row("bf16-mixed", 0.07, 0.2, training=timing))
    assert made["best"] is None
    assert said in bench.headline(made)
    assert cell in str(bench.grids(made)[0].rows[1].cells)
    assert grade_of(ratio) == "no gain"
    agreed = Timing(
        summarise([0.07] * 3), paired_speedup([0.1, 0.1, 0.1], [0.0701, 0.07, 0.0699]), ((0.07,) * 3,)
    )
    assert "bf16-mixed trains sine 1.43x as fast as fp32 (95 % interval 1.4" in bench.headline(
        record(row("bf16-mixed", 0.07, 0.2, training=agreed))
    )


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [(1.0001, 1.2, "1.0001 to 1.20"), (0.8, 0.9999, "0.800 to 0.9999"), (1.0, 1.2, "1.00 to 1.20"), (0.97, 1.05, "0.970 to 1.05")],
)  # fmt: skip
def test_an_interval_without_1_does_not_look_as_if_it_had_it(low: float, high: float, said: str) -> None:
    assert words.interval({"low": low, "high": high}) == said


@pytest.mark.parametrize(
    ("starts", "said"), [(0, "of all plans in one process; speeds"), (3, "over 3 starts of every plan, each in a separate process")]
)  # fmt: skip
def test_a_table_says_where_its_times_are_from_and_why_they_need_not_give_its_speeds(
    starts: int, said: str, record: Make, row: Row
) -> None:
    note = bench.interval_note(record(row("bf16-mixed", 0.07, 0.2), starts=starts))
    assert said in note
    assert "not the ratio of two medians" in note


def test_plans_that_their_starts_do_not_tell_apart_are_level(record: Make, row: Row) -> None:
    def started(name: str, *steps_s: float) -> PlanResult:
        made = row(name, steps_s[0], 0.2)
        assert made.training is not None
        return replace(made, training=replace(made.training, starts_s=tuple((s,) * 4 for s in steps_s)))

    lucky = started("bf16-mixed", 0.05, 0.07, 0.06)
    for others, level in (((0.06, 0.05, 0.07), ["bf16-master"]), ((0.1, 0.141, 0.119), [])):
        made = record(lucky, started("bf16-master", *others), starts=3)
        assert made["level_with_best"] == level


def test_a_slower_plan_is_not_recommended(record: Make, row: Row) -> None:
    said = bench.headline(record(row("fp16-mixed", 0.2, 0.2)))
    assert "measurably faster than fp32. fp16-mixed comes closest: it is 0.500x as fast" in said


def test_the_fastest_plan_is_not_the_answer_if_it_does_not_learn(record: Make, row: Row) -> None:
    made = record(row("bf16-true", 0.03, 0.6), row("bf16-mixed", 0.05, 0.21))
    said = bench.headline(made)
    assert said.startswith("On this machine bf16-mixed trains")
    assert said.endswith("bf16-true learned visibly less than fp32 in the same steps.")
    assert "bf16-true learned visibly less than fp32 in the same steps." in bench.notes(made)


def test_a_loss_that_is_not_finite_is_behind_and_said(record: Make, row: Row) -> None:
    nan = math.nan
    made = record(
        row("fp16-true", 0.03, 0.2, losses=(1.0, nan, nan), final_loss=nan, final_loss_difference=nan)
    )
    assert made["behind"] == ["fp16-true"]
    assert "its final loss is not finite" in bench.headline(made)
    assert bench.grids(made)[2].rows[1].cells[1] == "not finite"


def test_the_answer_when_nothing_could_be_measured(record: Make, lost: Row) -> None:
    said = bench.headline(record(lost("tf32", "unsupported", "no TF32 here")))
    assert said == "On this machine fp32 is the only plan that could be measured on sine. tf32: no TF32 here."


def test_the_answer_when_the_baseline_was_lost(record: Make, row: Row, lost: Row) -> None:
    made = record(row("bf16-mixed", 0.05, 0.2), base=lost("fp32", "failed", "out of memory"))
    assert (
        bench.headline(made)
        == "fp32 did not finish on sine, so nothing can be compared with it: out of memory."
    )


def test_rows_without_numbers_say_why(record: Make, row: Row, lost: Row) -> None:
    made = record(
        lost("fp16-mixed", "stopped", "stopped: 69x slower than fp32"),
        lost("tf32", "unsupported", "no TF32 here"),
        lost("O3", "failed", "FloatingPointError: x"),
    )
    speed = bench.grids(made)[0]
    assert [line.cells[1:3] for line in speed.rows[1:]] == [
        ("stopped", "69x slower than fp32"),
        ("unsupported", ""),
        ("failed", ""),
    ]
    assert [line.status for line in speed.rows] == ["ok", "stopped", "unsupported", "failed"]
    assert bench.notes(made) == [
        "fp16-mixed was stopped: 69x slower than fp32.",
        "tf32, unsupported: no TF32 here",
        "O3, failed: FloatingPointError: x",
    ]


def test_cells(record: Make, row: Row) -> None:
    skipping = row("fp16-mixed", 0.05, 0.19, peak=51 * 2**20, skipped_steps=2, metrics={"accuracy": 0.97})
    speed, memory, learning = bench.grids(record(skipping))
    assert speed.header == ("plan", "training step", "vs fp32", "inference", "vs fp32")
    assert speed.rows[0].cells == ("fp32", "100 ±2 ms", "", "33.3 ±0.7 ms", "")
    assert speed.rows[1].cells == (
        "fp16-mixed",
        "50.0 ±1.0 ms",
        "2.00x (1.90-2.10)",
        "16.7 ±0.3 ms",
        "2.00x (1.90-2.10)",
    )
    assert memory.rows[1].cells == ("fp16-mixed", "51.0 MiB (-49 %)", "12.8 MiB (-49 %)", "25.5 MiB (-49 %)")
    assert learning.header == ("plan", "final loss", "vs fp32", "skipped steps", "accuracy")
    assert learning.rows[1].cells == ("fp16-mixed", "0.19", "-0.01 (-5.0 %)", "2", "0.97")


def test_a_bench_without_inference_and_memory_has_no_columns_for_them(record: Make, row: Row) -> None:
    without = {"inference": None, "memory": None}
    base = row("fp32", 0.1, 0.2, base_s=None, **without)
    made = record(row("bf16-mixed", 0.05, 0.2, **without), base=base)
    assert [grid.title for grid in bench.grids(made)] == ["Speed", "Learning"]
    assert bench.grids(made)[0].header == ("plan", "training step", "vs fp32")
    assert "memory" not in bench.headline(made)


def test_the_terminal_keeps_square_brackets(record: Make, row: Row, lost: Row) -> None:
    made = record(row("bf16-mixed; a[0].*: fp32", 0.05, 0.2), lost("x", "failed", "E: shape [2, 3]"))
    with open("/dev/null", "w", encoding="utf-8") as nowhere:
        console = Console(width=160, record=True, file=nowhere)
        console.print(table(made))
        said = console.export_text()
    assert "bf16-mixed; a[0].*: fp32" in said
    assert "shape [2, 3]" in said
    assert "castwise 0.1.0 at 0123456789ab" in said


# --- names ----------------------------------------------------------------------------------------------------

STRANGE = r"$\frac{$", "[/x]", "[red]", "a b", "{y}", "%s", "<b>"
"""Names that a module may have, with a special meaning to matplotlib, rich, str.format or a browser."""


def test_names_on_an_axis_are_whole_and_begin_lines_where_a_person_would() -> None:
    line = "bf16-mixed+memory_format=channels_last+regions.stages.*.blocks.*.dwconv=fp32"
    assert plots.folded(line).split("\n") == [
        "bf16-mixed", "+memory_format", "=channels_last", "+regions.stages.*", ".blocks.*.dwconv", "=fp32",
    ]  # fmt: skip
    assert plots.folded("a" * 40).split("\n") == ["a" * 18, "a" * 18, "a" * 4]
    assert plots.folded("stem") == "stem"


def test_strange_names_are_printed_and_drawn_as_they_are(
    make_strange: Callable[..., Any], tmp_path: Path
) -> None:
    for record in make_strange(STRANGE):
        console = Console(width=200, file=io.StringIO())
        console.print(table(record))
        paths = write(record, tmp_path / f"{record['kind']}.html")
        assert len(paths) > 1
        for said in (console.file.getvalue(), html.unescape(paths[0].read_text(encoding="utf-8"))):
            for name in STRANGE:
                assert name in said.replace(" +", "+"), name


@pytest.mark.parametrize("width", [80, 120])
def test_no_part_of_a_plan_is_broken_in_a_terminal(record: Make, row: Row, width: int) -> None:
    plan = "bf16-mixed+memory_format=channels_last+optimizer=fused"
    made = record(row(plan, 0.05, 0.202, peak=60 * 2**20, metrics={"accuracy": 0.9, "held_out_loss": 0.5}))
    console = Console(width=width, file=io.StringIO())
    console.print(table(made))
    said = console.file.getvalue()
    assert all(len(line) <= width for line in said.splitlines())
    for part in ("bf16-mixed", "+memory_format=channels_last", "+optimizer=fused"):
        assert said.count(part) >= 3, part  # once per table


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_terminal_leaves_columns_out_and_breaks_names_at_dots(width: int) -> None:
    names = ["encoder.layers.11.attention.output_projection", "encoder.layers.2.mlp"]
    rows = [{"module": name, "seen": "1.23e-05", "spare": "77 %", "count": "1,024"} for name in names]
    columns = {name: name for name in ("module", "seen", "spare", "count")}
    console = Console(width=width, file=io.StringIO())
    console.print(terminal([Grid.of("Title", rows, columns, spare=("spare",))]))
    said = console.file.getvalue()
    assert max(map(len, said.splitlines())) <= width
    assert said.count("1.23e-05") == said.count("1,024") == 2
    assert ("77 %" in said) is ("No room for: spare" not in said) is (width > 40)
    parts = [line.split()[0] for line in said.splitlines() if line.strip() and line.split()[0][0] in "e._"]
    assert "".join(parts) == "".join(names)
    assert len(parts) == {40: 4, 60: 3, 80: 2}[width]
