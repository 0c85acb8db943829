"""The table and the page of a forecast, from a record made by hand."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from castwise.core.plans.plan import Plan
from castwise.lab.inspect.forecast import Forecast, RegionForecast, TensorForecast
from castwise.lab.inspect.forecast_result import Spread
from castwise.lab.parity.casts import Cast
from castwise.lab.parity.gradient_range import Histogram, ScaleRange
from castwise.report.show import page as show_page
from castwise.report.show import table
from tests.report.browser import CHROMIUM, DRIVER, Browser, browser
from tests.report.conftest import ENVIRONMENT
from tests.report.pages import read

FORMATS = ("fp16", "bf16", "fp8_e4m3")


def tensor(
    kind: Any, kept: bool = False, largest: float = 8.0, overflow: float = 0.0, scale: float | None = None
) -> TensorForecast:
    histogram = Histogram("", -6, (1, 4, 9, 16, 25, 16, 9, 4, 1), 3)
    casts = [
        Cast("fp16", None, overflow, 0.01, 0.2, 0.02, 0.0),
        Cast("bf16", None, 0.0, 0.0, 0.0, 0.002, 0.0),
    ]
    if scale is not None:
        casts.append(Cast("fp16", scale, 0.0, 0.001, 0.0, 0.0003, 0.0))
    if kind != "updates":
        casts += [
            Cast("fp8_e4m3", None, 0.5, 0.1, 0.1, 0.3, 0.1),
            Cast("fp8_e4m3", "tensor", 0.0, 0.1, 0.00002, 0.03, 0.0),
        ]
    return TensorForecast(kind, kept, 88, 0, largest, histogram, tuple(casts))


def make(count: int = 3, name: str = "layers") -> dict[str, Any]:
    """Return a record of regions, of which the first overflows fp16."""
    reason = "3.1 % of the activations overflow; the largest is 1.2e+05"
    scales = ScaleRange(0.5, 1e-6, 0.06, 131072.0, 8192.0)
    regions = tuple(
        RegionForecast(
            f"{name}.{at}", "Linear",
            (tensor("weights"), tensor("activations", overflow=0.031 if at == 0 else 0.0, largest=1.2e5 if at == 0 else 8.0),
             tensor("activations", kept=True), tensor("gradients", scale=8192.0), tensor("updates")),
            scales, {}, {"fp16": reason} if at == 0 else {}, {}, ("bf16",) if at else (),
        )
        for at in range(count)
    )  # fmt: skip
    return Forecast(
        "GPT", Plan.preset("bf16-mixed"), FORMATS, f"fp16 holds {count - 1} of {count} regions, not {name}.0 ({reason}).",
        "The plan holds them.", "bf16-mixed", regions, scales, 8192.0, 4, 10,
        {"fp16": Spread((f"{name}.0",), (f"{name}.1",), gradients=True)}, ("A <note>.",), ENVIRONMENT,
    ).to_dict()  # fmt: skip


def told(record: dict[str, Any], width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(table(record))
    return out.getvalue()


def test_the_table_says_what_holds_and_why_not_and_names_the_plan() -> None:
    said = told(make(40))
    assert "fp16 holds 39 of 40 regions" in " ".join(said.split())
    assert "Plan: bf16-mixed" in said
    assert "and 28 more regions" in said
    assert "layers.0" in said
    assert re.search(r"layers\.0 +no +holds +holds +fp32", said)
    assert re.search(r"layers\.1 +reached +holds +holds +bf16", said)
    assert "The plan holds them." in said
    assert "overflow" in said.split("Why not")[1]
    assert "A <note>." in said
    assert max(map(len, said.splitlines())) <= 80


def test_the_page_has_a_row_per_region_and_kind_and_needs_nothing_from_elsewhere() -> None:
    page = show_page(make())
    said = read(page, scripts=1)
    assert page.count("<tr data-kind") == 3 * 5
    assert page.count("hidden><td") == 3  # tensors that the plan keeps in fp32 are hidden at first
    for words in (
        "layers.2",
        "3.1 % overflow",
        "20 % dropped",
        "less than 0.01 % become 0",
        "A <note>.",
        "0.06 to 131,072",
        "reached by inf from layers.0",
        "Linear; fp32 under the plan",
    ):
        assert words in said, words
    marked = re.findall(r'<td data-label="(\w+)" class="cell \w+ bad"', page)
    assert marked == ["fp16"]


def test_every_histogram_is_a_valid_svg_with_the_ranges_of_all_formats() -> None:
    page = show_page(make(1))
    pictures = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(pictures) == 5
    for picture in pictures:
        root = ET.fromstring(picture)
        assert root.get("role") == "img"
        assert len(root.findall("rect")) == 2 * len(FORMATS)
        widths = [float(rect.get("width", "nan")) for rect in root.findall("rect")]
        assert all(width >= 0 for width in widths)
    # The loss scale moves fp16's range down by 13 powers of two; fp8's ends at the tensor's largest value.
    ends = [
        max(float(r.get("x")) + float(r.get("width")) for r in ET.fromstring(p).findall("rect"))
        for p in pictures
    ]
    assert all(0 <= end <= 240 for end in ends)
    of_fp16 = [
        [float(r.get("x")) for r in ET.fromstring(p).findall("rect[@class='strip fp16']")]
        for p in (pictures[0], pictures[3])
    ]
    assert of_fp16[1][0] < of_fp16[0][0]


def test_a_forecast_without_anything_has_a_page_too() -> None:
    record = Forecast(
        "GPT",
        Plan.preset("bf16-mixed"),
        ("bf16",),
        "bf16 holds all 0 regions.",
        "",
        None,
        (),
        None,
        1.0,
        1,
        3,
        {},
        (),
        ENVIRONMENT,
    ).to_dict()
    assert "bf16 holds all 0 regions." in read(show_page(record), scripts=1)
    assert "bf16 holds all 0 regions." in told(record)


def test_names_that_are_markup_stay_text() -> None:
    name = "<script>alert(1)</script>"
    assert name not in show_page(make(1, name)).replace('data-bars="', "")
    assert name in read(show_page(make(1, name)), scripts=1)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_is_javascript(tmp_path: Path) -> None:
    script = re.search(r"<script>(.*?)</script>", show_page(make()), re.DOTALL)
    assert script is not None
    (tmp_path / "page.js").write_text(script[1])
    subprocess.run([str(shutil.which("node")), "--check", tmp_path / "page.js"], check=True)


# --- in a browser -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


SHOWN = "return [...document.querySelectorAll('#regions tbody tr')].filter(r => r.getClientRects().length).map(r => r.cells[0].textContent + '|' + r.dataset.kind)"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver on the PATH")
def test_the_page_filters_sorts_and_rescales_and_fits_every_width(window: Browser, tmp_path: Path) -> None:
    page = tmp_path / "forecast.html"
    page.write_text(show_page(make(12, "backbone.encoder.layers." * 3)), encoding="utf-8")
    for width in (360, 768, 1280):
        for dark in (False, True):
            window.show(page, width, dark=dark)
            assert window.run("return document.documentElement.scrollWidth") <= width
            assert len(window.run(SHOWN)) == 12 * 4  # hidden rows stay hidden in the narrow layout
    window.run(
        "const k = document.getElementById('kind'); k.value = 'gradients'; k.dispatchEvent(new Event('input'))"
    )
    assert len(window.run(SHOWN)) == 12
    cell = "return document.querySelector('tr[data-kind=gradients] td.fp16').textContent"
    before = window.run(cell)
    window.run(
        "const s = document.getElementById('scale'); s.value = -14; s.dispatchEvent(new Event('input'))"
    )
    after = window.run(cell)
    assert "subnormal" in after
    assert after != before
    window.run(
        "document.getElementById('kind').value = ''; const b = document.getElementById('bad'); b.checked = true; b.dispatchEvent(new Event('input'))"
    )
    assert len(window.run(SHOWN)) == 1
    window.run("document.getElementById('bad').click()")
    window.run("document.querySelector('th button[data-column=\"3\"]').click()")
    assert window.run(SHOWN)[0].endswith("activations")
    assert window.messages() == []
