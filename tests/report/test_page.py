"""The page of a bench and its pictures."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from castwise.commands.jobs.bench_result import PlanResult
from castwise.report.bench import PICTURES, headline
from castwise.report.plots import draw
from castwise.report.show import page as show_page
from castwise.report.show import write
from castwise.report.train import plot_curves
from tests.report.pages import read

Row = Callable[..., PlanResult]
Make = Callable[..., dict[str, Any]]


@pytest.fixture
def full(record: Make, row: Row, lost: Row) -> dict[str, Any]:
    mixed = row("bf16-mixed", 0.05, 0.202, peak=60 * 2**20, metrics={"accuracy": 0.9})
    wave = [[0.0, 0.5, 1.0]] * 3
    return record(
        mixed,
        lost("fp16-mixed", "stopped", "stopped: 69x slower than fp32"),
        lost("tf32", "unsupported", "no <TF32> here"),
        images={"target": wave, "fp32": wave, "bf16-mixed": wave},
    )


def test_opens_with_the_answer_and_needs_nothing_from_elsewhere(full: dict[str, Any]) -> None:
    page = show_page(full)
    said = read(page)
    assert said.index(headline(full)) < said.index("Speed")
    for words in (
        "a <wave>",
        "no <TF32> here",
        "69x slower than fp32",
        "0123456789ab",
        "castwise bench sine",
        "accuracy",
    ):
        assert words in said
    assert 'name="viewport"' in page
    assert "prefers-color-scheme: dark" in page


def test_has_every_picture_as_a_valid_svg_in_the_pages_colours(full: dict[str, Any]) -> None:
    page = show_page(full)
    pictures = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(pictures) == 4
    for picture in pictures:
        root = ET.fromstring(picture)
        assert root.get("role") == "img"
        assert root.get("viewBox")
        assert root.get("width") is None
        assert "#010203" not in picture
        assert "currentColor" in picture
    assert "stopped: 69x slower than fp32" in pictures[0]
    assert "cannot run here" in pictures[0]


def test_same_record_same_page(full: dict[str, Any]) -> None:
    assert show_page(full) == show_page(full)


def test_writes_the_page_and_a_png_per_picture(full: dict[str, Any], tmp_path: Path) -> None:
    paths = write(full, tmp_path / "bench.html")
    assert [path.name for path in paths] == [
        "bench.html",
        "time.png",
        "memory.png",
        "loss.png",
        "prediction.png",
    ]
    assert sorted(tmp_path.iterdir()) == sorted(paths)


def test_leaves_out_pictures_that_have_no_numbers(record: Make, row: Row) -> None:
    without = {"inference": None, "memory": None}
    base = row("fp32", 0.1, 0.2, base_s=None, **without)
    made = record(row("bf16-mixed", 0.05, 0.2, **without), base=base)
    assert list(draw(PICTURES, made)) == ["time", "loss"]


def test_bars_are_as_long_as_the_numbers(full: dict[str, Any]) -> None:
    figures = draw(PICTURES, full)
    training, inference = figures["time"].axes
    assert [bar.get_width() for bar in training.patches] == [0.1, 0.05]
    assert [bar.get_width() for bar in inference.patches] == pytest.approx([0.1 / 3, 0.05 / 3])
    assert [label.get_text() for label in training.get_yticklabels()] == [
        "fp32",
        "bf16-mixed",
        "fp16-mixed",
        "tf32",
    ]
    peaks = [[bar.get_width() / 2**20 for bar in axes.patches] for axes in figures["memory"].axes]
    assert peaks == [[100, 60], [25, 15], [50, 30]]


def test_a_bar_much_longer_than_the_baselines_is_cut_and_says_so(record: Make, row: Row) -> None:
    figure = draw(PICTURES, record(row("fp16-mixed", 0.9, 0.2), row("O1", 0.2, 0.2)))["time"]
    axes = figure.axes[0]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([0.1, 0.3, 0.2])
    assert [text.get_text() for text in axes.texts] == ["100 ms", "//", "900 ms, 0.111x", "200 ms, 0.500x"]


def test_curves_have_gaps_where_a_loss_was_not_finite(full: dict[str, Any]) -> None:
    full["plans"][1]["losses"] = [1.0, None, 0.01]
    (axes,) = draw(PICTURES, full)["loss"].axes
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert lines["fp32"] == [1.0, 0.5, 0.2]
    assert lines["bf16-mixed"][::2] == [1.0, 0.01]
    assert lines["bf16-mixed"][1] != lines["bf16-mixed"][1]
    assert axes.get_yscale() == "log"


def test_predictions_share_the_targets_scale(full: dict[str, Any]) -> None:
    full["images"]["bf16-mixed"] = [[5.0, None]]
    axes = [a for a in draw(PICTURES, full)["prediction"].axes if a.images]
    assert [a.get_title(loc="left") for a in axes] == ["target", "fp32", "bf16-mixed"]
    assert {a.images[0].get_clim() for a in axes} == {(0.0, 1.0)}


@pytest.mark.parametrize("scaled", [False, True])
def test_training_curves(scaled: bool, tmp_path: Path) -> None:
    records = [{"step": 5 * n, "loss": 1 / n, "loss_scale": 65536.0 if scaled else None} for n in range(1, 9)]
    path = plot_curves(records, tmp_path / "curves.png")
    assert path.read_bytes().startswith(b"\x89PNG")
