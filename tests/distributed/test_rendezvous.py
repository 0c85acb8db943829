"""Restarted processes find each other in a store that still has entries of earlier processes."""

from __future__ import annotations

import datetime
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from castwise.core.parallel.rendezvous import _attempt
from castwise.errors import StateError
from tests.fresh import run_python
from tests.soak import every

RANKS = 3


def start(store: Any, ranks: Collection[int]) -> list[str | Exception]:
    """Run ranks in threads that look for each other; return each result or error."""

    def one(rank: int) -> str | Exception:
        try:
            return _attempt(store, rank, RANKS)
        except (StateError, RuntimeError) as error:
            return error

    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(one, ranks))


def test_each_start_has_a_name_of_its_own() -> None:
    store = dist.HashStore()
    names = [start(store, range(RANKS)) for _ in range(3)]
    assert all(isinstance(name, str) and all_.count(name) == RANKS for all_ in names for name in all_)
    assert len({all_[0] for all_ in names}) == 3


@every(2)
@pytest.mark.parametrize("ended", [(1,), (1, 2), (0,), (0, 1), (0, 2)])
def test_ranks_that_ended_while_they_looked_for_each_other_are_not_met(ended: tuple[int, ...]) -> None:
    """Entries that earlier ranks left in the store are ignored, whichever ranks had come."""
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=0.3))
    before = start(store, ended)
    store.set_timeout(datetime.timedelta(seconds=60))
    again = start(store, range(RANKS))
    assert isinstance(again[0], str)
    assert again.count(again[0]) == RANKS
    assert again[0] not in before


def test_who_did_not_come_is_named() -> None:
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=0.3))
    with pytest.raises(
        StateError, match=r"1 of 3 ranks have not arrived within 0:00:00.3.*first of them rank 2;.*timeout="
    ):
        raise next(found for found in start(store, (0, 1)) if isinstance(found, Exception))


def test_a_process_without_torchrun_is_a_group_by_itself(tmp_path: Path) -> None:
    code = """
import datetime, os, torch, torch.distributed as dist
from castwise.parallel import init_process_group
for name in ("RANK", "WORLD_SIZE"):
    os.environ.pop(name, None)
init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
number = torch.ones(1)
dist.all_reduce(number)
print(dist.get_rank(), dist.get_world_size(), number.item(), flush=True)
os._exit(0)
"""
    assert run_python(code, tmp_path) == "0 1 1.0\n"
