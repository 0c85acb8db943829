"""The way in which the tests of this folder start scripts under ``castwise try``."""

from __future__ import annotations

import pytest

from tests.processes import Forked
from tests.tries import forked_tries


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> list[Forked]:
    """Run scripts in forks of a process that has imported torch; return the list of forks."""
    return forked_tries(monkeypatch)
