"""Colossal-AI's modes on all layouts, including those that its documentation excludes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.bridges.compat import colossalai_cases as cases
from tests.distributed.world import World
from tests.soak import each_value, every, pairs

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")

TOLERANCE = {"none": 1e-5, "torch": 2e-3, "apex-O1": 2e-3, "apex-O2": 2e-3, "naive": 2e-3}
"""Absolute tolerance for weights; sums have another order and other roundings."""
LAYOUTS = ["data", "hand", "tensor", "pipeline", "zero"]
SCALED = [mode for mode in cases.MODES if mode != "none"]


@pytest.fixture(scope="module")
def two() -> Iterator[World]:
    world = World(2)
    yield world
    world.close()


@functools.cache
def alone(mode: str) -> dict[str, Tensor]:
    return cases.alone(mode)


def check(mode: str, answers: list[Any]) -> None:
    want = alone(mode)
    for weights, _, _ in answers:
        assert weights.keys() == want.keys()
        for name, value in want.items():
            torch.testing.assert_close(weights[name], value, atol=TOLERANCE[mode], rtol=0, msg=name)
            assert torch.equal(weights[name], answers[0][0][name]), name


@each_value()
@pytest.mark.parametrize(("layout", "mode"), pairs(LAYOUTS, cases.MODES, 3))
def test_two_processes_train_like_one(two: World, layout: str, mode: str) -> None:
    answers = two.run(cases.train, layout, mode)
    if (layout, mode) == ("zero", "none"):
        check("naive", answers)  # ZeRO alone means fp16 with masters, as in Colossal-AI
        return
    check(mode, answers)
    for _, returned, scale in answers:
        assert scale == (1.0 if mode == "none" else cases.SCALE)
        if mode == "naive":
            assert all(done is True and norm > 0 for done, norm in returned)
            assert returned == answers[0][1]
        else:
            assert returned == [None] * cases.STEPS


@each_value()
@pytest.mark.parametrize(
    ("layout", "mode"), pairs([layout for layout in LAYOUTS if layout != "data"], SCALED, 2)
)
def test_an_infinity_on_one_rank_skips_the_step_on_both(two: World, layout: str, mode: str) -> None:
    answers = two.run(cases.train, layout, mode, 1)
    for weights, returned, scale in answers:
        assert scale == cases.SCALE / 2
        for name, value in answers[0][0].items():
            assert torch.isfinite(value).all()
            assert torch.equal(weights[name], value), name
        if mode == "naive":
            assert [done for done, _ in returned] == [True, True, False, True, True, True]
            assert returned[2] == (False, None)
    # the skipped step makes a difference
    assert any(
        not torch.allclose(value, answers[0][0][name], atol=TOLERANCE[mode], rtol=0)
        for name, value in alone(mode).items()
    )


@each_value()
@pytest.mark.parametrize(
    ("layout", "mode"),
    pairs(["data", "tensor", "pipeline", "zero"], ["none", "torch", "apex-O1", "naive"], 2),
)
def test_accumulated_batches_are_one(two: World, layout: str, mode: str) -> None:
    """Losses are divided by 2, and only the second of two batches makes a step."""
    if (layout, mode) == ("zero", "none"):
        pytest.skip("ZeRO alone is the naive plan")
    answers = two.run(cases.train, layout, mode, None, 2)
    check(mode, answers)
    for _, returned, _ in answers:
        assert returned[0::2] == [None] * cases.STEPS
        assert mode != "naive" or all(done for done, _ in returned[1::2])


def test_groups_lie_as_colossal_ai_lays_them(two: World) -> None:
    data = two.run(cases.groups, {})
    tensor = two.run(cases.groups, {"tensor": {"size": 2, "mode": "1d"}})
    pipeline = two.run(cases.groups, {"pipeline": 2, "tensor": 1})
    for rank in range(2):
        assert data[rank]["DATA"] == (rank, 2, True)
        assert data[rank]["TENSOR"] == (0, 1, False)
        assert (
            tensor[rank]["TENSOR"] == tensor[rank]["PARALLEL_1D"] == tensor[rank]["MODEL"] == (rank, 2, True)
        )
        assert tensor[rank]["DATA"] == (0, 1, True)
        assert pipeline[rank]["PIPELINE"] == (rank, 2, True)
        assert (pipeline[rank]["first"], pipeline[rank]["last"]) == (rank == 0, rank == 1)
        assert data[rank]["first"]
        assert data[rank]["last"]
        assert data[rank]["next"] == 1 - rank
        assert data[rank]["ranks"] == [0, 1]
        assert data[rank]["epochs"] == 3


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ({"pipeline": 3}, "pipeline=3 times tensor=1 does not divide the 2 processes"),
        ({"tensor": {"size": 2, "mode": "2d"}}, "allowed modes: '1d'"),
        ({"pipeline": "two"}, "Allowed: a whole number >= 1"),
    ],
)
def test_layouts_that_cannot_be(parallel: dict[str, Any], said: str) -> None:
    world = World(2)
    try:
        with pytest.raises(AssertionError, match=said):
            world.run(cases.groups, parallel)
    finally:
        world.close()


def test_a_loader_gives_each_rank_its_part_in_a_new_order_each_epoch(two: World) -> None:
    first, second = two.run(cases.loader, True)
    for epoch in range(2):
        assert sorted(first[epoch] + second[epoch]) == list(range(20))
    assert first[0] != first[1]
    assert two.run(cases.loader, False) == [[list(range(20))] * 2] * 2


def test_gradients_that_some_ranks_have_are_averaged_with_zeros(two: World) -> None:
    for grads, untouched, half in two.run(cases.averaged):
        assert grads == [0.5] * 3
        assert untouched
        assert half == 4.0


@every(2)
@pytest.mark.parametrize("mode", ["torch", "naive"])
def test_a_trainer_runs_a_pipeline(two: World, mode: str) -> None:
    """Losses are the same with one stage per rank and with two."""
    losses = []
    for chunks, order in ((1, [0, 1, 2, 3, 4]), (2, [0, 2, 1, 3, 4])):
        first, last = two.run(cases.trainer_in_a_pipeline, mode, chunks)
        assert first["names"] + last["names"] == [str(layer) for layer in order]
        assert first["steps"] == last["steps"] == 6
        assert first["metrics"] == {"train": {}, "test": {}}
        losses.append([last["metrics"][kind]["Loss"] for kind in ("train", "test")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert 0 < losses[0][1] < losses[0][0] * 1.5
