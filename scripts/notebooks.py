"""Write the documentation pages that are also notebooks, from their Markdown, with jupytext.

    python scripts/notebooks.py FOLDER [--execute NAME ...]

The site offers the notebooks beside its pages; ``make docs`` writes them there. They are not committed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from pathlib import Path

import jupytext
import nbformat

DOCS = Path(__file__).resolve().parents[1] / "docs"
NAMES = ("start", "tuning")


def notebook(name: str) -> nbformat.NotebookNode:
    """Return a page as a notebook, with links to the pages of the site."""
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    book = jupytext.reads(re.sub(r"(\]\([\w-]+)\.md", r"\1.html", text), fmt="md")
    book.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return book


def write(folder: Path, *, execute: Collection[str] = ()) -> None:
    """Write all notebooks into a folder, and run those in ``execute`` there; this fails if a cell fails."""
    for name in NAMES:
        book = notebook(name)
        if name in execute:
            import nbclient

            nbclient.NotebookClient(
                book, timeout=300, resources={"metadata": {"path": str(folder)}}
            ).execute()
        nbformat.write(book, folder / f"{name}.ipynb")


if __name__ == "__main__":
    write(Path(sys.argv[1]), execute=sys.argv[3:])
