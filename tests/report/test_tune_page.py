"""The page of a search, its pictures and its tables."""

from __future__ import annotations

import dataclasses
import functools
import html
import io
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from castwise.core.plans.formats import FORMATS
from castwise.lab.parity.gradient_range import ScaleRange
from castwise.lab.timing.stats import Ratio
from castwise.report import show, tune, tune_plots
from castwise.report.grids import Grid
from castwise.report.plots import draw
from castwise.report.show import table, write
from castwise.report.words import pasted
from tests.report.evidence import CHOSEN, make_bare, make_candidate, make_damage, make_evidence, make_record
from tests.report.pages import read
from tests.soak import every, some

FIGURES = ["scatter", "gradients", "gradients_by_region", "regions"]


@functools.cache
def shown() -> str:
    """Return the page of the record, cached."""
    return show.page(make_record())


def drawn(record: dict[str, Any]) -> dict[str, Any]:
    return draw(tune.PICTURES, record)


def test_a_page_can_be_drawn_of_a_speed_without_an_interval() -> None:
    """Regression: after a final of one round the page failed, and the plan was lost with it."""
    rows = [
        dataclasses.replace(row, speedup=dataclasses.replace(row.speedup, low=0.0, high=math.inf))
        if row.speedup
        else row
        for row in make_evidence().candidates
    ]
    assert tune_plots._scatter(make_record(make_evidence(candidates=tuple(rows)))) is not None


def test_a_plan_that_was_not_timed_has_no_row_among_the_speeds() -> None:
    untimed = [make_candidate(f"fp32+ops.exp{i}=fp32", None, parity=make_damage(0.0)) for i in range(2)]
    why = "timed module by module, it is no faster than fp32"
    passed = make_candidate("fp16-mixed", None, "rejected", reason=why)
    record = make_record(make_evidence(candidates=(*make_evidence().candidates, *untimed, passed)))
    speeds, *others = (part for part in tune.lines(record) if isinstance(part, Grid))
    assert speeds.title == "Speed"
    bare = [row.cells[0] for row in speeds.rows if row.cells[1] == "-"]
    assert all(name.startswith(("fp32, as it is", "bf16-mixed, one-line autocast")) for name in bare)
    assert not any(one.name in str(tune.plan_grid(record).rows) for one in untimed)
    (grid,) = (grid for grid in others if grid.title.endswith(" other plans"))
    outcomes = {row.cells[1]: row for row in grid.rows}
    assert "and 1 other" in outcomes["sound but not timed"].cells[0]
    assert "timed module by module, it is no faster than fp32" in [row.cells[-1] for row in grid.rows]
    assert "sound but not timed" in read(show.page(record))


def test_what_compiling_takes_stands_beside_the_step_in_the_terminal_too() -> None:
    one = make_candidate("bf16-mixed+compile=default", 0.06, compile_s=54.0, pays_after_steps=1234)
    for candidates, expected in (((one,), True), ((), False)):
        record = make_record(make_evidence(candidates=(*make_evidence().candidates, *candidates)))
        speeds = next(part for part in tune.lines(record) if isinstance(part, Grid))
        assert ("compiling" in speeds.header) == expected
        assert (
            any("54.0 s, pays off after 1,234 steps" in map(str, row.cells) for row in speeds.rows)
            == expected
        )


def test_opens_with_the_answer_and_holds_what_decides() -> None:
    record, page = make_record(), shown()
    said = read(page)
    places = [
        said.index(words)
        for words in (
            record["answer"],
            *record["why"],
            "Paste into your",
            "amp.prepare(model, optimizer)",
            "Plans compared",
            "7 other plans, and why",
            "rejected",
            "not tried",
            "95 % intervals",
            "How to repeat",
        )
    ]
    assert places == sorted(places)
    for words in (
        "1.79x", "1.73 to 1.84", "1.30x", "736 MiB", "26 % less than fp32", "damage 0.0031 (0.0019-0.0053)",
        "gradient bias 0.31 in stages.2.blocks.1.norm", "out of memory", "no <TF32> on a CPU", "69x the time in fp16",
        "stages.*.blocks.*.pwconv*", "Linear x18", "-8.60 ms", "0.34 (fail)", "0.0014 / 0.0008",
        "a loss scale from 29.8 to 163,760", "starts with a loss scale of 16,384", "The plan is not worse than fp32",
        "its <memory> is that of fp32", "castwise tune convnext --out out", 'castwise.Plan.load("plan.json")',
        "castwise.Amp(", CHOSEN.digest, "0123456789ab", "Test CPU 9000 <fast>", "a small ConvNeXt on <random>",
    ):  # fmt: skip
        assert words in said, words
    assert 'name="viewport"' in page
    assert "prefers-color-scheme: dark" in page


def test_other_plans_are_one_folded_table_without_empty_columns() -> None:
    page = shown()
    assert page.count("<details>") == 1
    assert "<details><summary>7 other plans, and why none was chosen" in page
    assert page.index("fp16-true") > page.index("<details>")
    assert tune.other_grid(make_record()).header == ("plan", "outcome", "vs fp32", "damage")
    bare = tuple(
        dataclasses.replace(row, speedup=None, parity=None)
        if row.status in ("rejected", "not tried")
        else row
        for row in make_evidence().candidates
    )
    assert tune.other_grid(make_record(make_evidence(candidates=bare))).header == ("plan", "outcome")


@pytest.mark.parametrize(
    ("low", "high", "told"),
    [(0.9, 1.9, "as fast"), (1.2, 1.5, "1.34x"), (0.3, 3.6, "not known"), (1.0049, 1.5, "as fast")],
)
def test_a_tile_says_no_more_than_the_answer(low: float, high: float, told: str) -> None:
    rows = make_evidence().candidates
    first = dataclasses.replace(rows[0], speedup=Ratio(1.34, low, high, 0.95, 3))
    label, value, _ = tune.facts(make_record(make_evidence(candidates=(first, *rows[1:]))))[0]
    assert (label, value) == ("speed over fp32", told)


def test_only_what_is_open_has_the_colour_of_a_warning() -> None:
    found = make_evidence(undecided=("Peak memory was not measured.",))
    page = show.page(make_record(found))
    assert "<li>Peak memory was not measured.</li>" in page
    assert 'class="notes"' not in show.page(make_record())
    assert '<p class="why-so">bf16-mixed stores nothing low' in page


def test_fp32_and_autocast_are_always_rows_and_ties_are_one() -> None:
    rows = make_evidence().candidates
    lost = [dataclasses.replace(r, status="not tried") if r.plan == "bf16-mixed" else r for r in rows]
    said = tune.plan_grid(make_record(make_evidence(candidates=tuple(lost))))
    names = [row.cells[0] for row in said.rows]
    assert names == [
        str(CHOSEN), "bf16-mixed+optimizer=fused", "bf16-mixed, one-line autocast", "fp32, as it is",
        "2 tied plans",
    ]  # fmt: skip
    (tie,) = said.where("tie").rows
    assert tie.cells[1:3] == ("55.9-56.1 ms", "1.78-1.79x")
    assert tie.why == (
        "bf16-mixed+memory_format=channels_last\nbf16-mixed+memory_format=channels_last+optimizer=fused"
    )
    one = tuple(r for r in rows if r.name != "bf16-mixed+memory_format=channels_last")
    (tie,) = tune.plan_grid(make_record(make_evidence(candidates=one))).where("tie").rows
    assert tie.cells[0] == "bf16-mixed+memory_format=channels_last+optimizer=fused"


def test_the_level_of_intervals_is_said_once() -> None:
    record = make_record(make_evidence(verification=None))
    for said in (read(show.page(record)), terminal(record)):
        assert said.count("95 %") == 1


@pytest.mark.parametrize(
    "plan", [str(CHOSEN), "fp32", f"bf16-mixed+regions.{'long.' * 30}x=fp32+optimizer=fused"]
)
def test_what_is_to_be_pasted_runs_and_breaks_at_plus(plan: str) -> None:
    lines = pasted(plan).splitlines()
    assert max(map(len, (line for line in lines if "long" not in line))) <= 80
    seen: list[str] = []

    class Amp:
        def __init__(self, plan: str) -> None:
            seen.append(plan)

        def prepare(self, *things: object) -> tuple[object, ...]:
            return things

    exec("\n".join(lines), {"castwise": SimpleNamespace(Amp=Amp), "model": 1, "optimizer": 2})
    assert seen == [plan]


def test_has_every_picture_as_a_valid_svg_in_the_pages_colours() -> None:
    page = shown()
    assert re.findall(r'<figure id="(\w+)">', page) == FIGURES
    pictures = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(pictures) == len(FIGURES)
    for picture in pictures:
        root = ET.fromstring(picture)
        assert root.get("role") == "img"
        assert root.get("viewBox")
        assert root.get("width") is None
        assert "#010203" not in picture
        assert "currentColor" in picture


def test_same_record_same_page() -> None:
    assert show.page(make_record()) == shown()


def test_writes_the_page_and_a_png_per_picture(tmp_path: Path) -> None:
    paths = write(make_record(), tmp_path / "report.html")
    assert [path.name for path in paths] == ["report.html", *(f"{name}.png" for name in FIGURES)]
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths[1:])


# --- records with little data -------------------------------------------------------------------------------


def test_a_search_that_was_interrupted_at_once_still_has_a_page() -> None:
    record = make_record(make_bare())
    page = show.page(record)
    said = read(page)
    assert "The search ended early." in said
    assert "interrupted or ran out of time" in said
    assert "<svg" not in page
    assert "Plans compared" not in said
    assert "castwise tune convnext --out out" in said


@every(2, 1)
@pytest.mark.parametrize(
    ("field", "empty"),
    some([
        (field.name, None if field.default is None else {} if field.name == "settings" else ())
        for field in dataclasses.fields(make_evidence())
        if field.name in ("regions", "histograms", "scale", "floor", "repeat", "stages", "verification",
                          "candidates", "settings", "notes")
    ], 3),
)  # fmt: skip
def test_every_part_may_be_missing(field: str, empty: object) -> None:
    read(show.page(make_record(make_evidence(**{field: empty}))))


def test_rows_may_hold_nothing_but_names() -> None:
    full = make_evidence()
    bare = [dataclasses.replace(make_candidate(c.name, None, c.status), plan=c.plan) for c in full.candidates]
    regions = [type(r)(r.pattern, r.kind, r.modules, r.parameters, r.format) for r in full.regions]
    record = make_record(make_evidence(candidates=tuple(bare), regions=tuple(regions), histograms=()))
    page = show.page(record)
    assert "None" not in read(page)
    assert "<svg" not in page
    assert tune.facts(record) == []


def test_a_search_for_numerics_alone_has_damage_and_no_times() -> None:
    one = dataclasses.replace(make_candidate("bf16-mixed", None, "chosen"), parity=make_damage(0.004))
    record = make_record(make_evidence(goal="numerics", plan="bf16-mixed", candidates=(one,)))
    assert list(drawn(record)) == ["gradients", "gradients_by_region", "regions"]
    assert tune.facts(record) == [
        ("gradients", "pass", "damage 0.004 (0.0024-0.0068), the relative error of an update")
    ]


def test_when_fp32_is_best_its_numbers_are_shown() -> None:
    rows = (
        make_candidate("fp32", 0.1, "baseline"),
        make_candidate("bf16-mixed", 0.2, "rejected", reason="not faster"),
    )
    record = make_record(make_evidence(plan="fp32", candidates=rows, answer="fp32 is best"))
    assert ("a training step", "100 ms", "12 rounds in 12 starts") in tune.facts(record)


# --- text ---------------------------------------------------------------------------------------------------

SAID = "relative error of an update"


def terminal(record: dict[str, Any]) -> str:
    """Return the terminal's text as one line."""
    console = Console(width=100, file=io.StringIO())
    console.print(table(record))
    return " ".join(console.file.getvalue().split())


@every(2, 1)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"candidates": ()},
        {"regions": ()},
        {"candidates": (), "repeat": 0.02},
        {"regions": (), "repeat": 0.02},
    ],
    ids=["everything", "no plans", "no regions", "regions and a remark", "plans and a remark"],
)
def test_damage_is_introduced_where_it_is_printed(changes: dict[str, Any]) -> None:
    """Text that mentions damage also explains it, so the docs are not needed."""
    record = make_record(make_evidence(**changes))
    for said in (read(show.page(record)), terminal(record)):
        assert SAID in said or "damage" not in said.lower()


def test_pictures_of_damage_say_what_it_is() -> None:
    figures = drawn(make_record())
    assert SAID in figures["scatter"].axes[0].get_ylabel()
    assert SAID in figures["regions"].axes[0].get_title() + figures["regions"].axes[0].get_xlabel()


def cells(grid: Grid) -> list[dict[str, str]]:
    """Return a dict per row with the text of each column and the status."""
    return [{**dict(zip(grid.header, row.cells, strict=True)), "status": row.status} for row in grid.rows]


def test_rows_of_plans() -> None:
    record = make_record()
    grids = (tune.plan_grid(record), tune.other_grid(record))
    rows = {row["plan"]: row for grid in grids for row in cells(grid)}
    best, base, broken, none = (rows[name] for name in (str(CHOSEN), "fp32, as it is", "fp16-mixed", "tf32"))
    assert (best["status"], best["training step"], best["vs fp32"]) == (
        "chosen",
        "56.0 ±1.1 ms",
        "1.79x (1.73-1.84)",
    )
    assert (best["peak memory"], best["parity"], best["loss"]) == ("736 MiB (-26 %)", "pass", "2.346")
    assert (base["vs fp32"], base["peak memory"]) == ("1", "1000 MiB")
    assert (broken["outcome"], broken["damage"]) == ("rejected", "not finite")
    assert {none[name] for name in ("vs fp32", "damage")} == {"-"}


def test_rows_of_regions_mark_what_is_exempt() -> None:
    rows = cells(tune.region_grid(make_record()))
    assert [row["status"] for row in rows] == ["", "exempt", "exempt", "", ""]
    assert [row["time gained"] for row in rows[:2]] == ["7.00 ms (2.40x)", "-8.60 ms (0.590x)"]
    assert {rows[4][name] for name in ("time gained", "bias / noise", "alone", "gradients")} == {"-"}


def test_the_plans_own_format_counts_even_where_most_regions_differ() -> None:
    regions = tuple(
        dataclasses.replace(r, format="fp32" if i else "bf16") for i, r in enumerate(make_evidence().regions)
    )
    rows = tune.region_grid(make_record(make_evidence(regions=regions))).rows
    assert [row.status for row in rows] == ["", *["exempt"] * 4]


def test_an_empty_range_of_loss_scales_is_said() -> None:
    scales = ScaleRange(4e4, 1e-12, 6e4, 1.6, 0.125)
    assert "No loss scale lets fp16 hold both" in " ".join(
        tune.scale_sentences(make_record(make_evidence(scale=scales)))
    )


# --- pictures -----------------------------------------------------------------------------------------------


def test_drawn_ranges_are_those_of_the_formats() -> None:
    below = drawn(make_record(make_evidence(scale=None)))["gradients"].axes[1]
    bars = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in below.patches]
    known = FORMATS["fp8_e4m3"]
    ends = (known.smallest_normal, known.max), (known.smallest_subnormal, known.smallest_normal)
    assert bars[-2:] == [pytest.approx([math.log2(end) for end in pair]) for pair in ends]


def test_the_scatter_marks_the_chosen_plan_and_the_lines() -> None:
    (axes,) = drawn(make_record())["scatter"].axes
    points = {
        c.get_label(): c.get_offsets().tolist() for c in axes.collections if not c.get_label().startswith("_")
    }
    assert points["chosen"] == [pytest.approx([0.1 / 0.056, 0.0031])]
    assert len(points["sound"]) == len(points["tie"]) == 2
    assert len(points["rejected"]) == 3
    assert {0.01, 0.1} <= {line.get_ydata()[0] for line in axes.lines}
    words = [text.get_text() for text in axes.texts]
    assert "◂ 0.0145x, not finite" in words
    assert {"passes below 0.01", "fails above 0.1"} <= set(words)


def test_the_histogram_sums_regions_and_the_loss_scale_moves_fp16() -> None:
    figure = drawn(make_record())["gradients"]
    top, below = figure.axes
    assert sum(bar.get_height() for bar in top.patches) == pytest.approx(100)
    assert [text.get_text() for text in below.texts] == [
        "bf16",
        "fp16",
        "fp16, loss x 2¹⁴",
        "fp8_e5m2",
        "fp8_e4m3",
    ]
    edges = math.log2(FORMATS["fp16"].smallest_subnormal), math.log2(FORMATS["fp16"].max)
    assert sorted(line.get_xdata()[0] for line in top.lines) == [edge - 14 for edge in edges]
    starts = [bar.get_x() for bar in below.patches if bar.get_alpha() == 0.45]
    assert starts[1:3] == [-14, -28]
    plain = drawn(make_record(make_evidence(scale=None)))["gradients"]
    assert [text.get_text() for text in plain.axes[1].texts] == ["bf16", "fp16", "fp8_e5m2", "fp8_e4m3"]
    assert not plain.axes[0].lines


def test_pictures_of_many_regions_keep_the_extremes() -> None:
    full = make_evidence()
    many = tuple(
        dataclasses.replace(full.histograms[0], pattern=f"blocks.{i}", lowest=-60 + i) for i in range(40)
    )
    regions = tuple(
        dataclasses.replace(full.regions[0], pattern=f"r{i}", bias=1e-6 * (i + 1)) for i in range(40)
    )
    figures = drawn(make_record(make_evidence(histograms=many, regions=regions)))
    shown = [label.get_text() for label in figures["gradients_by_region"].axes[0].get_yticklabels()]
    assert shown == [f"blocks.{i}" for i in (*range(8), *range(32, 40))]
    assert len(figures["regions"].axes[0].get_yticklabels()) == tune_plots.REGIONS


def test_words_of_the_record_cannot_become_markup() -> None:
    evil = "<script>alert(1)</script>"
    full = make_evidence()
    region = dataclasses.replace(full.regions[0], pattern=evil, reason=evil, bias=0.5)
    candidate = dataclasses.replace(full.candidates[0], name=evil, reason=evil)
    histogram = dataclasses.replace(full.histograms[0], pattern=evil)
    page = show.page(
        make_record(
            make_evidence(
                workload=evil, description=evil, answer=evil, notes=(evil,), command=evil, regions=(region,),
                candidates=(candidate,), histograms=(histogram, full.histograms[1]),
            )
        )
    )  # fmt: skip
    assert "<script" not in page
    assert html.escape(evil) in page
