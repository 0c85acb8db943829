"""Progress without a terminal: lines, each printed at once."""

from __future__ import annotations

import io
import sys

import pytest

from castwise.commands.jobs import Event
from castwise.report import progress
from castwise.report.progress import bars


class Log(io.StringIO):
    """A text stream that records the flushed text."""

    def __init__(self) -> None:
        super().__init__()
        self.flushed = ""

    def flush(self) -> None:
        self.flushed = self.getvalue()


def stderr(monkeypatch: pytest.MonkeyPatch) -> Log:
    made = Log()
    monkeypatch.setattr(sys, "stderr", made)
    return made


def test_stages_are_told_when_they_begin_and_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    log = stderr(monkeypatch)
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with bars(stages=True) as shown:
        shown(Event("reference", "", 0, 1, "90 s left"))
        assert log.flushed == "   0 s  reference  90 s left\n"
        now = 103.0
        shown(Event("reference", "", 1, 1, "87 s left"))
        shown(Event("race", "", 0, 1, "[/b] building"))
        assert log.flushed.splitlines()[1:] == ["   3 s  race  [/b] building"]
        now = 104.0
        shown(Event("race", "", 3, 8, "too soon"))
        now = 103.0 + progress.EVERY_S
        shown(Event("race", "", 4, 8, "x" * 300))
    assert log.flushed.splitlines()[2:] == ["  13 s  race  " + "x" * 300]


def test_bars_are_told_when_they_begin_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    log = stderr(monkeypatch)
    with bars() as shown:
        for done in range(5):
            shown(Event("training", "fp32", done, 4))
        assert [line.partition(" s  ")[2] for line in log.flushed.splitlines()] == [
            "training fp32  0/4", "training fp32  4/4",
        ]  # fmt: skip
