"""``castwise try`` with scripts that are forks of a process that has imported torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from castwise.bridges.run import race
from tests.processes import Forked


def _run(given: tuple[Connection, list[str]]) -> None:
    from castwise.commands.cli import main

    pipe, words = given
    os.environ[race.ADDRESS] = str(pipe.fileno())
    main(words)


class _Process:
    """A fork with the interface of ``Popen``."""

    def __init__(self, forked: Forked) -> None:
        self._forked = forked

    def wait(self, timeout: float = 60.0) -> int:
        return self._forked.wait(timeout)

    def poll(self) -> int | None:
        return self._forked.code


def forked_tries(monkeypatch: pytest.MonkeyPatch) -> list[Forked]:
    """Make ``castwise try`` start forks; return the list of them, filled as they start."""
    started: list[Forked] = []

    def start(
        name: str, script: str, arguments: Sequence[str], folder: Path, is_module: bool, log: Path
    ) -> Any:
        here, there = Pipe()
        words = ["run", "--plan", name, *(["-m"] if is_module else []), script, *arguments]
        with there:
            started.append(Forked(_run, (there, words), folder, log))
        out, err = log.with_name(f"{log.name}.out"), log.with_name(f"{log.name}.err")
        log.symlink_to(err)
        assert out.name
        return race._Child(name, _Process(started[-1]), here, log)  # type: ignore[arg-type]

    monkeypatch.setattr(race, "_started", start)
    monkeypatch.setattr(race, "end", lambda process, grace_s: process.wait(10))
    monkeypatch.setattr(race, "BLOCK_S", 0.0)  # one step per block
    return started
