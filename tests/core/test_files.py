"""Result files are either written completely or left unchanged."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from castwise.core.files import write_whole


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_whole(path, "{}\n")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_whole(path, "x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "{}\n"
    assert [one.name for one in tmp_path.iterdir()] == ["result.json"]


def test_text_and_bytes_are_written_as_they_are(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "\udcff é", errors="backslashreplace")
    write_whole(tmp_path / "b", b"\x00\xff")
    assert (tmp_path / "a").read_text(encoding="utf-8") == "\\udcff é"
    assert (tmp_path / "b").read_bytes() == b"\x00\xff"
