"""Worlds of processes for all tests in this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.distributed.world import World


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests if torch is built without torch.distributed."""
    if not dist.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="this torch is built without torch.distributed"))


def _world(size: int) -> Iterator[World]:
    world = World(size)
    yield world
    world.close()


@pytest.fixture(scope="session")
def two() -> Iterator[World]:
    """Provide two processes."""
    yield from _world(2)


@pytest.fixture(scope="session")
def four() -> Iterator[World]:
    """Provide four processes."""
    yield from _world(4)


@pytest.fixture(scope="session")
def eight() -> Iterator[World]:
    """Provide eight processes."""
    yield from _world(8)
