"""A reader of pages that returns the text and checks that the page is well formed and self-contained."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "br", "img", "link", "hr", "input", "wbr"}


class Reader(HTMLParser):
    """A parser that collects text and fails on tags that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.links += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)


def read(page: str, scripts: int = 0) -> str:
    """Return the page's text; check that tags nest, it has ``scripts`` scripts and loads nothing external."""
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    assert all(link.startswith(("#", "data:")) for link in reader.links)
    assert page.count("<script") == scripts
    assert "<script src" not in page
    assert not re.search(r"url\((?!#)", page)
    return " ".join("".join(reader.text).split())
