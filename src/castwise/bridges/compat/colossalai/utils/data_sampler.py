"""``colossalai.utils.data_sampler``: data loaders that give each data parallel rank a different part of the data."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from castwise.bridges.compat.colossalai.context import ParallelMode
from castwise.bridges.compat.colossalai.core import global_context as gpc
from castwise.bridges.compat.colossalai.utils.cuda import get_current_device

__all__ = ["DataParallelSampler", "get_dataloader"]


class DataParallelSampler(DistributedSampler[Any]):
    """torch's ``DistributedSampler`` for the data parallel ranks. With ``shuffle``, each iteration has a new order."""

    def __init__(
        self, dataset: Dataset[Any], shuffle: bool = False, seed: int = 0, drop_last: bool = False
    ) -> None:
        super().__init__(
            dataset,
            num_replicas=gpc.get_world_size(ParallelMode.DATA),
            rank=gpc.get_local_rank(ParallelMode.DATA),
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )

    def __iter__(self) -> Iterator[Any]:
        order = super().__iter__()
        self.set_epoch(self.epoch + 1)
        return order


def get_dataloader(
    dataset: Dataset[Any],
    shuffle: bool = False,
    seed: int = 1024,
    add_sampler: bool = True,
    drop_last: bool = False,
    pin_memory: bool = False,
    num_workers: int = 0,
    **kwargs: Any,
) -> DataLoader[Any]:
    """Return a ``torch.utils.data.DataLoader`` that reads a different part of the data on each data parallel rank.

    Args:
        dataset: The data.
        shuffle: Whether the order is random and differs in each epoch.
        seed: The seed of the sampler and of the worker processes.
        add_sampler: Whether the data is divided among the ranks. With False, every rank reads all data.
        drop_last: Whether a last batch that is not full is left out.
        pin_memory: Whether batches are copied to pinned memory. It has an effect only if there is an accelerator.
        num_workers: The number of worker processes.
        kwargs: Further arguments of ``DataLoader``.
    """
    common = {
        "drop_last": drop_last,
        "pin_memory": pin_memory and get_current_device().type != "cpu",  # torch warns elsewhere
        "num_workers": num_workers,
        "worker_init_fn": functools.partial(_seed_worker, seed),
        **kwargs,
    }
    if add_sampler and gpc.get_world_size(ParallelMode.DATA) > 1:
        sampler = DataParallelSampler(dataset, shuffle=shuffle, seed=seed, drop_last=drop_last)
        return DataLoader(dataset, sampler=sampler, **common)
    return DataLoader(dataset, shuffle=shuffle, **common)


def _seed_worker(seed: int, worker: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
