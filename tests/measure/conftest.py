"""Shared by the tests of measurement."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture
def tiny() -> str:
    """Path of the tiny workloads, for ``f"{tiny}:mlp"``."""
    return str(Path(__file__).parent.parent / "jobs" / "tiny_workloads.py")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Keep torch from spinning on cores that other tests use."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
