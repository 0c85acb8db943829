"""Kinds of ``batches`` that parity accepts, and kinds that it refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from castwise.errors import WorkloadError
from castwise.lab.parity.batches import endless, same_batch
from tests.here import DEVICE


def _first(batches: Any, count: int, seed: int = 0) -> list[Any]:
    return list(islice(endless(batches, "parity")(seed), count))


@pytest.mark.parametrize("sequence", [[1, 2, 3], (1, 2, 3), range(1, 4)])
def test_sequences_begin_again(sequence: Any) -> None:
    assert _first(sequence, 7) == [1, 2, 3, 1, 2, 3, 1]


def test_a_loader_begins_again() -> None:
    loader = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2)
    assert [batch[0].tolist() for batch in _first(loader, 4)] == [[0, 1], [2, 3], [4, 5], [0, 1]]


@pytest.mark.parametrize(
    "own",
    [
        # DataLoader's default generator is on the CPU, which fails if the default device is another.
        pytest.param(False, marks=pytest.mark.cpu),
        True,
    ],
)
def test_a_shuffled_loader_is_shuffled_anew(own: bool) -> None:
    torch.manual_seed(0)
    draw = torch.Generator(DEVICE).manual_seed(0) if own else None
    loader = DataLoader(TensorDataset(torch.arange(64.0)), batch_size=64, shuffle=True, generator=draw)
    one, two = _first(loader, 2)
    assert sorted(one[0].tolist()) == sorted(two[0].tolist())
    assert one[0].tolist() != two[0].tolist()
    if own:
        again = _first(loader, 2)  # it starts from the loader's state, which was left alone
        assert [batch[0].tolist() for batch in again] == [one[0].tolist(), two[0].tolist()]


def test_a_loader_over_an_iterable_dataset_begins_again() -> None:
    class Numbers(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    assert [int(batch) for batch in _first(DataLoader(Numbers()), 5)] == [0, 1, 2, 0, 1]


def test_a_function_is_given_the_seed_and_called_again_when_it_ends() -> None:
    seeds: list[int] = []

    def make(seed: int) -> Iterator[int]:
        seeds.append(seed)
        return iter([seed, seed + 1])

    assert _first(make, 5, seed=7) == [7, 8, 7, 8, 7]
    assert seeds == [7, 7, 7]


def test_a_function_without_end_is_called_once() -> None:
    def make(seed: int) -> Iterator[int]:
        while True:
            yield seed

    assert _first(make, 100, seed=3) == [3] * 100


def test_two_iterators_of_one_sequence_do_not_share_their_place() -> None:
    make = endless([1, 2, 3], "parity")
    one, two = make(0), make(0)
    assert [next(one), next(one), next(two), next(one), next(two)] == [1, 2, 1, 3, 2]


def test_an_iterator_is_refused_and_not_consumed() -> None:
    given = iter([1, 2, 3])
    text = (
        "tune: batches is an iterator (list_iterator), which can be consumed only once; give a "
        "sequence, a DataLoader or a function batches(seed) -> iterator"
    )
    with pytest.raises(WorkloadError, match=f"^{re.escape(text)}$"):
        endless(given, "tune")
    assert list(given) == [1, 2, 3]


def test_a_generator_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"^parity: batches is an iterator \(generator\), which"):
        endless((n for n in range(3)), "parity")


@pytest.mark.parametrize(
    ("given", "kind"),
    [(torch.ones(3), "Tensor"), ("ab", "str"), (b"ab", "bytes"), (None, "NoneType"), (3, "int")],
)
def test_what_is_no_collection_of_batches_is_refused(given: Any, kind: str) -> None:
    text = f"parity: batches is {kind}; give a sequence of batches, a DataLoader or a function batches(seed) -> iterator"
    with pytest.raises(WorkloadError, match=f"^{re.escape(text)}$"):
        endless(given, "parity")


@pytest.mark.parametrize("empty", [[], (), lambda _seed: iter(())])
def test_no_batch_at_all_is_an_error_and_no_endless_loop(empty: Any) -> None:
    text = "parity: batches is empty; give at least one batch, better 16 or more"
    with pytest.raises(WorkloadError, match=f"^{re.escape(text)}$"):
        _first(empty, 1)


def test_a_function_that_returns_no_iterator_is_refused_in_words() -> None:
    with pytest.raises(WorkloadError, match=r"^parity: batches\(0\) returned int; "):
        _first(lambda _seed: 3, 1)


def test_a_function_that_takes_no_seed_is_refused_in_words() -> None:
    with pytest.raises(WorkloadError, match=r"^parity: batches\(0\) failed"):
        _first(lambda: iter([1]), 1)


# --- equal batches --------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Any
    y: Any


def test_batches_with_the_same_values_are_the_same() -> None:
    x, y = torch.randn(3), torch.tensor([1, 2])
    for wrap in (lambda a, b: (a, b), lambda a, b: {"x": a, "y": [b]}, Pair):
        assert same_batch(wrap(x, y), wrap(x.clone(), y.clone()))
        assert not same_batch(wrap(x, y), wrap(x + 1, y))
        assert not same_batch(wrap(x, y), wrap(x, y + 1))


def test_shape_and_dtype_tell_batches_apart() -> None:
    assert not same_batch(torch.zeros(2), torch.zeros(3))
    assert not same_batch(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert not same_batch((torch.zeros(2),), (torch.zeros(2), torch.zeros(2)))


def test_batches_without_tensors_are_the_same_only_as_one_object() -> None:
    batch = object()
    assert same_batch(batch, batch)
    assert not same_batch(["a"], ["b"])


def _order(loader: Any, look: Any = None) -> list[float]:
    """Return the values of two epochs; after each batch take one batch from ``look``, if given."""
    seen = []
    for _ in range(2):
        for (batch,) in loader:
            seen += batch.flatten().tolist()
            if look is not None:
                next(look)
    return seen


@pytest.mark.parametrize(
    "make",
    [
        lambda data: DataLoader(data, 4, shuffle=True, generator=torch.Generator(DEVICE).manual_seed(3)),
        lambda data: DataLoader(
            data, 4, sampler=RandomSampler(data, generator=torch.Generator(DEVICE).manual_seed(3))
        ),
        lambda data: DataLoader(
            data,
            batch_sampler=BatchSampler(
                WeightedRandomSampler([1.0] * 12, 12, generator=torch.Generator(DEVICE).manual_seed(3)),
                4,
                drop_last=True,
            ),
        ),
        lambda data: DataLoader(data, 4, shuffle=False, num_workers=1, persistent_workers=True),
    ],
    ids=["generator", "sampler", "batch sampler", "persistent workers"],
)
def test_a_loader_is_left_to_whoever_goes_through_it(make: Any) -> None:
    data = TensorDataset(torch.arange(12.0, device="cpu"))  # on the CPU, because workers are forked
    alone = _order(make(data))
    loader = make(data)
    look = endless(loader, "parity")(0)
    assert _order(loader, look) == alone
    own = [
        one
        for (batch,), _ in zip(endless(make(data), "parity")(0), range(6), strict=False)
        for one in batch.tolist()
    ]
    assert sorted(own[:12]) == sorted(alone[:12])
    if loader.num_workers == 0:
        assert own[:12] == alone[:12]  # both start from the same generator state
