"""Worlds of processes for all tests of the folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.distributed.world import World


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip where torch has no distributed part."""
    if not dist.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="this torch is built without torch.distributed"))


def _world(size: int) -> Iterator[World]:
    world = World(size)
    yield world
    world.close()


@pytest.fixture(scope="session")
def two() -> Iterator[World]:
    """Two processes."""
    yield from _world(2)


@pytest.fixture(scope="session")
def four() -> Iterator[World]:
    """Four processes."""
    yield from _world(4)


@pytest.fixture(scope="session")
def eight() -> Iterator[World]:
    """Eight processes."""
    yield from _world(8)
