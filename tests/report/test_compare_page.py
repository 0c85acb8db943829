"""A comparison in the terminal and as a page, and the page in a real browser."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from castwise.lab.inspect.compare import compare
from castwise.lab.inspect.comparison import Comparison
from castwise.report.compare_plots import _by_end
from tests.lab.inspect.faults import Stack, batch, loss
from tests.report.browser import CHROMIUM, DRIVER, Browser, browser
from tests.soak import every


@pytest.fixture(scope="module")
def found() -> Comparison:
    torch.set_num_threads(1)
    model = Stack(layers=4, at=2, fault=("out", 2, True))
    return compare(model, loss, batch(), "fp32", "bf16-mixed", tries=1)


@pytest.fixture(scope="module")
def page(found: Comparison, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return found.save(tmp_path_factory.mktemp("page"))


def test_the_table_says_where_the_error_is_born(found: Comparison) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(found.table())
    said = console.export_text()
    assert "an error arises in layers.2.second, backward" in " ".join(said.split())
    assert max(map(len, said.splitlines())) <= 80
    assert "bf16-mixed; layers.2.second in fp32" in " ".join(said.split())


def test_the_file_has_all_of_it(found: Comparison, page: Path) -> None:
    record = json.loads((page.parent / "compare.json").read_text(encoding="utf-8"))
    assert record["birthplaces"] == [["layers.2.second", 0]]
    assert len(record["calls"]) == len(found.calls)
    assert record["losses"] == list(found.losses)
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 2
    assert all(call.path in text for call in found.calls)
    assert not re.search(r"""(?:src|href)=["'](?!#|data:)""", text)


def test_errors_of_torchs_own_kernels_are_folded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.Linear(64, 4))
    draw = torch.Generator().manual_seed(1)
    many = torch.randn(1024, 8, generator=draw), torch.randint(4, (1024,), generator=draw)
    found = compare(model, loss, many, "fp32", "bf16-true", tries=0)

    def said(**how: bool) -> str:
        console = Console(width=100, record=True, file=io.StringIO())
        console.print(found.table(**how))
        return " ".join(console.export_text().split())

    line = "In 1 module errors come from rounding inside torch's own kernels, up to"
    assert line in said()
    assert "table(verbose=True) lists them" in said()
    assert " kernel " not in said()
    assert " kernel " in said(verbose=True)
    page = found.save(tmp_path)
    text = page.read_text(encoding="utf-8").replace("&#39;", "'")
    assert re.search(rf"<details>\s*<summary>{re.escape(line)}", text)
    record = json.loads((tmp_path / "compare.json").read_text(encoding="utf-8"))
    assert (record["birthplaces"], record["in_kernels"]) == ([], [["1", 0]])
    assert next(call for call in record["calls"] if call["path"] == "1")["backward"]["excess"] > 4.0


def test_the_picture_has_calls_in_the_order_in_which_they_end(found: Comparison) -> None:
    ended = [call["path"] for call in _by_end(found.to_dict()["calls"])]
    assert ended[:5] == ["take", "layers.0.norm", "layers.0.first", "layers.0.second", "layers.0"]
    assert ended[-3:] == ["give", "", "(loss)"]


# --- in a browser -----------------------------------------------------------------------------------------------

in_a_browser = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver on the PATH"
)
ROWS = """
const rows = [...document.querySelectorAll('section[data-name=backward] tbody tr')].filter(row => !row.hidden);
return rows.map(row => [row.cells[0].childNodes[0].textContent.trim(), row.getBoundingClientRect().height > 0]);
"""


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def rows(window: Browser, change: str = "") -> list[Any]:
    found: list[Any] = window.run(
        f"const section = document.querySelector('section[data-name=backward]'); {change}; {ROWS}"
    )
    return found


@every(2)
@in_a_browser
@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1280])
def test_rows_filter_and_sort_at_every_width(
    window: Browser, found: Comparison, page: Path, width: int
) -> None:
    window.show(page, width, dark=width == 360)
    assert window.messages() == []
    assert window.run("return document.documentElement.scrollWidth") <= width
    assert len(rows(window)) == len(found.calls)
    few = rows(
        window,
        "const i = section.querySelector('input'); i.value = 'layers.2'; i.dispatchEvent(new Event('input'))",
    )
    assert {name.split(".")[1] for name, _ in few} == {"2"}
    assert all(shown for _, shown in few)
    assert "4 of" in window.run(
        "return document.querySelector('section[data-name=backward] [role=status]').textContent"
    )
    by = "const s = section.querySelector('select'); s.value = '4'; s.dispatchEvent(new Event('change'))"
    assert rows(window, by)[0][0] == "layers.2.second"
    back = by.replace("'4'", "''")
    assert next(name for name, _ in rows(window, back)) == "layers.2"
