"""Fixtures of the timing tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny() -> str:
    """Return the path of the tiny workloads, for ``f"{tiny}:mlp"``."""
    return str(Path(__file__).parents[2] / "commands" / "jobs" / "tiny_workloads.py")
