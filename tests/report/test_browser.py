"""The page of a search in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from castwise.commands.jobs.tune_result import TuneResult
from castwise.core.plans.plan import Plan
from castwise.lab.search.evidence import Evidence
from tests.report.browser import CHROMIUM, DRIVER, Browser, browser
from tests.report.evidence import make_bare, make_candidate, make_evidence
from tests.soak import pairs, some

pytestmark = [
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver on the PATH"
    ),
    pytest.mark.slow,
]

WIDTHS = (360, 768, 1280)
SIZES = """return {
  page: document.documentElement.scrollWidth, window: window.innerWidth,
  charts: [...document.querySelectorAll('svg')].map(s => { const r = s.getBoundingClientRect(); return [r.width, r.height]; }),
  outside: [...document.querySelectorAll('main *')].filter(e => {
    const r = e.getBoundingClientRect();
    return !e.closest('svg, .scroll') && r.width > 0 && r.right > window.innerWidth + 0.5;
  }).map(e => e.outerHTML.slice(0, 80)),
  ink: getComputedStyle(document.body).color, paper: getComputedStyle(document.body).backgroundColor,
}"""


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def seen(window: Browser, page: Path, width: int, *, dark: bool = False) -> dict[str, Any]:
    window.show(page, width, dark=dark)
    found: dict[str, Any] = window.run(SIZES)
    assert window.messages() == []
    assert found["window"] == width
    assert found["page"] <= width
    assert found["outside"] == []
    return found


def saved(evidence: Evidence, folder: Path) -> Path:
    return TuneResult(Plan.parse(evidence.plan), evidence).save(folder)[0]


@pytest.mark.parametrize(("width", "dark"), pairs(some(WIDTHS, 2), [True, False]))
def test_the_page_fits_shows_its_charts_and_says_nothing_to_the_console(
    window: Browser, tmp_path: Path, width: int, dark: bool
) -> None:
    found = seen(window, saved(make_evidence(), tmp_path), width, dark=dark)
    assert len(found["charts"]) == 4
    assert all(across > 250 and down > 150 for across, down in found["charts"])
    light = sum(map(int, found["paper"].removeprefix("rgb(").removesuffix(")").split(","))) > 384
    assert light is not dark


@pytest.mark.parametrize("width", some(WIDTHS, 3))
def test_long_names_and_many_rows_fit_with_every_fold_open(
    window: Browser, tmp_path: Path, width: int
) -> None:
    long = "backbone." * 12 + "attention"
    full = make_evidence()
    rows = full.candidates + tuple(
        make_candidate(f"bf16-mixed+regions.{long}{i}=fp32", 0.09, "rejected", reason=f"bias in {long}")
        for i in range(20)
    )
    evidence = make_evidence(
        candidates=rows, workload=long, answer=long, notes=(long,), command=f"castwise tune {long}"
    )
    page = saved(evidence, tmp_path)
    page.write_text(page.read_text(encoding="utf-8").replace("<details>", "<details open>"), encoding="utf-8")
    seen(window, page, width)


@pytest.mark.parametrize("width", some(WIDTHS, 3))
def test_a_page_of_almost_nothing_fits_too(window: Browser, tmp_path: Path, width: int) -> None:
    assert seen(window, saved(make_bare(), tmp_path), width)["charts"] == []


def test_the_check_of_the_console_would_notice(window: Browser, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text('<main><p style="width: 900px">wide</p></main><script>console.error("trouble")</script>')
    window.show(page, 360)
    assert any("trouble" in message for message in window.messages())


def test_the_check_of_the_width_would_notice(window: Browser, tmp_path: Path) -> None:
    page = saved(make_bare(), tmp_path)
    text = page.read_text(encoding="utf-8")
    wide = '<div style="width: 500px">wide</div></main>'
    assert "</main>" in text
    page.write_text(text.replace("</main>", wide), encoding="utf-8")
    with pytest.raises(AssertionError):
        seen(window, page, 360)
