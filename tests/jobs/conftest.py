"""Shared by the tests of jobs."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def tiny() -> str:
    """Path of the tiny workloads, for ``f"{tiny}:mlp"``."""
    return str(Path(__file__).with_name("tiny_workloads.py"))
