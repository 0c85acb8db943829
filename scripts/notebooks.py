"""Write the pages that are notebooks too, from their Markdown: jupytext pairs the two.

    python scripts/notebooks.py FOLDER [--execute]

The site offers them beside its pages, ``make docs`` writes them there. Nothing of them is committed.
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import jupytext
import nbformat

DOCS = Path(__file__).resolve().parents[1] / "docs"
NAMES = ("start", "tuning")


def notebook(name: str) -> nbformat.NotebookNode:
    """A page as a notebook, whose links lead to the pages of the site."""
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    book = jupytext.reads(re.sub(r"(\]\([\w-]+)\.md", r"\1.html", text), fmt="md")
    book.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return book


def write(folder: Path, *, execute: bool = False) -> None:
    """All of them into a folder; with ``execute`` as they have run there, at once, which fails where a cell does."""
    books = {name: notebook(name) for name in NAMES}
    if execute:
        asyncio.run(_execute(list(books.values()), folder))
    for name, book in books.items():
        nbformat.write(book, folder / f"{name}.ipynb")


async def _execute(books: list[nbformat.NotebookNode], folder: Path) -> None:
    from nbclient import NotebookClient

    place = {"metadata": {"path": str(folder)}}
    await asyncio.gather(
        *(NotebookClient(book, timeout=300, resources=place).async_execute() for book in books)
    )


if __name__ == "__main__":
    write(Path(sys.argv[1]), execute="--execute" in sys.argv)
