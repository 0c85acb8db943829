"""The site that ``make docs`` builds from docs/, and the pages that are also notebooks."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.fresh import SOURCE
from tests.report.browser import CHROMIUM, DRIVER, Browser, browser
from tests.soak import SOAKING, some
from tests.test_docs import NOTEBOOKS, ROOT, examples, prints

pytestmark = [
    pytest.mark.skipif(find_spec("sphinx") is None, reason="needs the extra castwise[docs]"),
    pytest.mark.slow,
]
EXECUTED = some([Path(page).stem for page in NOTEBOOKS], 2)
PAGES = sorted(path.stem for path in (ROOT / "docs").glob("*.md"))
SOME = ["api", "how-it-works", "index", "rules"]
NARROW = some(PAGES, 5)
UNSEARCHED = """
import sys
from sphinx.builders.html import StandaloneHTMLBuilder
from sphinx.cmd.build import main
StandaloneHTMLBuilder.search = False
sys.exit(main(sys.argv[1:]))
"""
OWN = {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, **OWN},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> None:
    with process:
        _, said = process.communicate()
    assert process.returncode == 0, said


def build(source: Path, folder: Path, *pages: str) -> None:
    """Read all pages and write the named ones without a search index, or all pages if none is named."""
    how = ("-c", UNSEARCHED) if pages else ("-m", "sphinx")
    words = [str(source), str(folder), *(str(source / f"{page}.md") for page in pages)]
    finish(start(*how, "--quiet", "--fail-on-warning", "--keep-going", *words))


@pytest.fixture(scope="module", autouse=True)
def notebooks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """Run the notebooks in a process while the site is built and tested, because their searches take long."""
    folder = tmp_path_factory.mktemp("notebooks")
    process = start(str(ROOT / "scripts" / "notebooks.py"), str(folder), "--execute", *EXECUTED)
    yield folder, process
    with process:
        process.terminate()  # no effect if it has ended


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the pages that are tested, which halves the time; test_docs.py checks the links of the others."""
    folder = tmp_path_factory.mktemp("site")
    written = {*NARROW, *SOME, *(Path(page).stem for page in NOTEBOOKS)}
    build(ROOT / "docs", folder, *(() if SOAKING else written))
    return folder


def test_every_page_is_in_the_navigation_and_nothing_comes_from_elsewhere(site: Path) -> None:
    index = (site / "index.html").read_text(encoding="utf-8")
    tree = re.search(r'<div class="sidebar-tree">(.*?)</div>', index, re.DOTALL).group(1)
    linked = set(re.findall(r'href="([\w-]+)\.html"', tree))
    assert linked == {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    headings = re.findall(
        r"^## (.*)$", (ROOT / "docs" / "index.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert re.findall(r'class="caption-text">(.*?)<', tree)[: len(headings)] == headings
    for page in site.glob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=\"([^\"]*)\"", text)
        assert loaded
        assert not [address for address in loaded if "//" in address], page.name


def test_docstrings_stand_on_the_page_of_the_api_without_leftover_markup(site: Path) -> None:
    text = (site / "api.html").read_text(encoding="utf-8")
    names = runpy.run_path(str(ROOT / "scripts" / "api_page.py"))["SECTIONS"].values()
    for name in (name for group in names for name in group):
        assert f'id="castwise.{name}"' in text, name
    plain = re.sub(r"<[^>]*>", "", text)
    assert "Type:The" not in plain
    assert not re.findall(r":(?:class|func|meth|attr):`[^`]*`|\bArgs:", plain)


def test_a_page_that_leads_nowhere_fails_the_build(tmp_path: Path) -> None:
    broken = {
        "[another](missing.md)": "missing.md",
        "[a heading](#not-there)": "not-there",
        "![a picture](img/missing.svg)": "missing.svg",
        "```{eval-rst}\n.. autofunction:: castwise.no_such\n```": "no_such",
        "```{eval-rst}\n:class:`castwise.NoClass`\n```": "castwise.NoClass",
    }
    source = tmp_path / "docs"
    source.mkdir()
    (source / "index.md").write_text("# A page\n\n" + "\n\n".join(broken), encoding="utf-8")
    conf = (ROOT / "docs" / "conf.py").read_text(encoding="utf-8")
    (source / "conf.py").write_text(
        conf.replace("Path(__file__)", f"Path({str(ROOT / 'docs' / 'conf.py')!r})")
    )
    with pytest.raises(AssertionError) as failed:
        build(source, tmp_path / "site")
    assert not [said for said in broken.values() if said not in str(failed.value)], failed.value


# --- in a browser -------------------------------------------------------------------------------------------

CUT = """return {
  page: document.documentElement.scrollWidth, window: window.innerWidth,
  outside: [...document.querySelectorAll('.content *')].filter(e => {
    const r = e.getBoundingClientRect();
    const inside = e.closest('.table-wrapper, .highlight, svg, .sig, .math');
    return !inside && r.width > 0 && r.right > window.innerWidth + 0.5;
  }).map(e => e.outerHTML.slice(0, 80)),
  stuck: [...document.querySelectorAll('.table-wrapper, .highlight pre')].filter(
    e => e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflowX !== 'auto').length,
  pictures: [...document.querySelectorAll('.content img')].map(e => e.complete && e.naturalWidth > 0),
  paper: getComputedStyle(document.body).backgroundColor,
}"""


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver on the PATH")
@pytest.mark.parametrize(
    ("width", "shown"), [(360, NARROW), (768, some(SOME, 2)), (1280, some(SOME[1:] + SOME[:1], 2))]
)
def test_nothing_is_cut_at_any_width_and_the_console_is_silent(
    window: Browser, site: Path, width: int, shown: list[str]
) -> None:
    for number, page in enumerate(shown):
        dark = number % 2 == 0
        window.show(site / f"{page}.html", width, dark=dark)
        found = window.run(CUT)
        assert window.messages() == [], page
        assert found["window"] == width
        assert found["page"] <= width, (page, found)
        assert found["outside"] == [], page
        assert found["stuck"] == 0, page
        assert all(found["pictures"]), page
        light = sum(map(int, re.findall(r"\d+", found["paper"])[:3])) > 384
        assert light is not dark, page


# --- notebooks, which have run meanwhile -------------------------------------------------------------------------


def test_notebooks_run_and_print_what_their_pages_say(
    notebooks: tuple[Path, subprocess.Popen[str]], site: Path
) -> None:
    executed, process = notebooks
    finish(process)
    for page in NOTEBOOKS:
        name = f"{Path(page).stem}.ipynb"
        book = json.loads((executed / name).read_text(encoding="utf-8"))
        cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
        shown = examples(page)
        assert ["".join(cell["source"]) for cell in cells] == [code.strip() for code, _ in shown]
        for cell, (_, said) in zip(cells, shown, strict=True) if Path(page).stem in EXECUTED else ():
            assert all(output.get("name") == "stdout" for output in cell["outputs"]), cell["outputs"]
            printed = "".join(line for output in cell["outputs"] for line in output["text"])
            assert said is None or prints(printed, said), printed
        offered = json.loads((site / name).read_text(encoding="utf-8"))
        assert [cell["source"] for cell in offered["cells"]] == [cell["source"] for cell in book["cells"]]
        assert f'href="{name}"' in (site / page.split("/")[1].replace(".md", ".html")).read_text(
            encoding="utf-8"
        )
        for target in re.findall(r"\]\(([\w-]+)\.html", json.dumps(offered)):
            assert target in PAGES, f"{name} links to {target}"
