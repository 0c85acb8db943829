"""Turn batches as users give them (a sequence, a data loader, a function of a seed) into an endless iterator for each seed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from castwise.core import _torch
from castwise.core.casting.trees import tensors_in
from castwise.errors import WorkloadError
from castwise.lab.workloads.workload import Workload


def endless(batches: Any, call: str) -> Callable[[int], Iterator[Any]]:
    """Turn given batches into ``batches(seed)``, an endless iterator: batches that end start again.

    Args:
        batches: A sequence, a re-iterable (a DataLoader), or a function from a seed to an iterator.
        call: The caller, for errors.

    Raises:
        WorkloadError: An iterator that can be consumed only once, or an object of another kind.
    """
    if callable(batches):
        return functools.partial(_again, batches, call)
    if isinstance(batches, Iterator):
        raise WorkloadError(
            f"{call}: batches is an iterator ({type(batches).__name__}), which can be consumed only once; give a "
            "sequence, a DataLoader or a function batches(seed) -> iterator"
        )
    if isinstance(batches, (Tensor, str, bytes)) or not isinstance(batches, Iterable):
        raise WorkloadError(
            f"{call}: batches is {type(batches).__name__}; give a sequence of batches, a DataLoader or a function "
            "batches(seed) -> iterator"
        )
    if isinstance(batches, DataLoader):
        return functools.partial(_again_aside, batches, call)
    return functools.partial(_again, lambda _seed: iter(batches), call)


def epochs_of(workload: Workload) -> Workload:
    """Return the workload with batches that start again when they end, for runs of more steps than one epoch has."""
    return dataclasses.replace(workload, batches=endless(workload.batches, f"workload {workload.name!r}"))


def _again_aside(loader: Any, call: str, seed: int) -> Iterator[Any]:
    """Iterate over a data loader without end, and without changing its generators and workers for other users.

    The iterator has its own generator state, which starts from the loader's state and goes on from epoch to epoch.
    """
    generators = _generators(loader)
    state = [generator.get_state() for generator in generators]
    return _again(lambda _seed: _aside(loader, generators, state), call, seed)


def _aside(loader: Any, generators: list[torch.Generator], mine: list[Tensor]) -> Iterator[Any]:
    """Iterate over one epoch. ``mine`` has the states of the generators for it, and afterwards those for the next."""
    going: Iterator[Any] | None = None
    while True:
        theirs = [generator.get_state() for generator in generators]
        for generator, state in zip(generators, mine, strict=True):
            generator.set_state(state)
        try:
            if going is None:
                with _torch.optimizers.other_workers(loader):
                    going = iter(loader)
            batch = next(going, _END)
        finally:
            mine[:] = [generator.get_state() for generator in generators]
            for generator, state in zip(generators, theirs, strict=True):
                generator.set_state(state)
        if batch is _END:
            return
        yield batch


_END = object()


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the random generators of a data loader and its samplers, without repetition."""
    found: dict[int, torch.Generator] = {}
    seen: dict[int, Any] = {}
    look: list[Any] = [loader]
    while look:
        one = look.pop()
        if one is not None and id(one) not in seen:
            seen[id(one)] = one
            drawn = getattr(one, "generator", None)
            if isinstance(drawn, torch.Generator):
                found[id(drawn)] = drawn
            look += [getattr(one, name, None) for name in ("sampler", "batch_sampler")]
    return list(found.values())


def _again(make: Callable[[int], Any], call: str, seed: int) -> Iterator[Any]:
    while True:
        got = False
        for batch in _iterator(make, seed, call):
            got = True
            yield batch
        if not got:
            raise WorkloadError(f"{call}: batches is empty; give at least one batch, better 16 or more")


def _iterator(make: Callable[[int], Any], seed: int, call: str) -> Iterator[Any]:
    try:
        made = make(seed)
    except TypeError as error:
        raise WorkloadError(
            f"{call}: batches({seed}) failed with TypeError: {error}; it must take a seed and return an iterator"
        ) from error
    if not isinstance(made, Iterable):
        raise WorkloadError(
            f"{call}: batches({seed}) returned {type(made).__name__}; it must return an iterator over batches"
        )
    return iter(made)


def same_batch(one: Any, other: Any) -> bool:
    """Whether two batches hold the same values; the comparison waits for the device."""
    mine, theirs = tensors_in(one), tensors_in(other)
    if one is other:
        return True
    return (
        bool(mine)
        and len(mine) == len(theirs)
        and all(
            a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b.to(a.device))
            for a, b in zip(mine, theirs, strict=True)
        )
    )


def period(batches: Sequence[Any]) -> int | None:
    """Return the number of batches after which the batches repeat in the same order; None if they do not.

    The comparison waits for the device.
    """
    again = next((at for at, batch in enumerate(batches) if at and same_batch(batches[0], batch)), None)
    if again is None or not all(
        same_batch(batches[at % again], batches[at]) for at in range(again, len(batches))
    ):
        return None
    return again
