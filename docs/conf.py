"""How the pages of this folder become a site: ``make docs``. They stay readable as they are, on a code host."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE.parent / "scripts"
NOTEBOOKS = runpy.run_path(str(SCRIPTS / "notebooks.py"))
sys.path.insert(0, str(HERE.parent / "src"))

import castwise  # noqa: E402

project = "castwise"
author = "the castwise contributors"
version = release = castwise.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "castwise"
html_show_sphinx = False
html_copy_source = False
highlight_language = "text"  # what a block is in, it says
myst_heading_anchors = 4  # links between pages are those of a code host
autodoc_typehints = "none"  # types are in the signatures
autodoc_member_order = "bysource"
nitpicky = True  # a docstring that names what is not on the page fails the build
nitpick_ignore_regex = [
    (r"py:\w+", r"(collections|nn|pathlib|torch)\..*|Optimizer|ParallelStyle|Tensor")
]  # of others
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Source"]


def navigation(index: str, pages: set[str]) -> str:
    """The tables of contents that the index stands for: one for each heading, of the pages linked below it.

    Args:
        index: Text of index.md.
        pages: Names of all pages; those that the index does not link come last.
    """
    told = []
    for title, body in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", index, re.MULTILINE | re.DOTALL):
        linked = [name for name in re.findall(r"\]\(([\w-]+)\.md\)", body) if name in pages]
        pages = pages - set(linked)
        if linked:
            told.append((title, linked))
    told += [("More", sorted(pages))] if pages else []
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(linked) + "\n```\n"
        for title, linked in told
    )


def on_site(app: Sphinx, name: str, source: list[str]) -> None:
    """What the site has instead of a page, or beside it."""
    if name == "index":
        source[0] += navigation(source[0], app.env.found_docs - {"index"})
    if name in NOTEBOOKS["NAMES"]:
        title, rest = source[0].split("\n", 1)
        source[0] = f'{title}\n\n<p><a href="{name}.ipynb" download>This page as a notebook</a></p>\n{rest}'
    if name == "api":
        source[0] = runpy.run_path(str(SCRIPTS / "api_page.py"))["reference"]()
    # what else a repository has, folders and pages for contributors, is not on the site
    source[0] = re.sub(r"\[([^\]]+)\]\(\.\./([\w/]+(?:\.md)?)(?:#[\w-]+)?\)", r"\1 (`\2`)", source[0])


def finish(app: Sphinx, failure: Exception | None) -> None:
    """Put the notebooks beside their pages."""
    if failure is None and app.builder.format == "html":
        NOTEBOOKS["write"](Path(app.outdir))


def without_types(
    _app: Sphinx, what: str, _name: str, _obj: object, _options: object, lines: list[str]
) -> None:
    """Tell napoleon that results and properties begin with no type: it takes what is before a colon for one."""
    starts = [0] * (what == "property") + [
        number + 1 for number, line in enumerate(lines) if line.strip() in ("Returns:", "Yields:")
    ]
    for start in starts:
        words = lines[start].lstrip()
        lines[start] = f"{lines[start].removesuffix(words)}: {words}"


def setup(app: Sphinx) -> None:
    """What sphinx-build calls."""
    app.connect("source-read", on_site)
    app.connect("build-finished", finish)
    app.connect("autodoc-process-docstring", without_types, priority=400)  # napoleon's is 500
