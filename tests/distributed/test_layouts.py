"""One plan on every layout: each trains like one process, and all ranks skip the same steps."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from castwise import Plan
from tests.distributed import model
from tests.distributed.model import BATCH, LOSS, Net, Options, Trace
from tests.distributed.world import World
from tests.soak import each_value, every, examples, pairs, some

LOSS_SCALE = "+loss_scale.init=4096"  # 65536 overflows fp16 on a quarter batch, whose gradients are larger
REGIONS = "bf16-mixed+regions.blocks.0=fp32+ops.gelu=fp32"

COMPILES = "+compile=default"

TOLERANCE = {
    # Relative for losses and norms, absolute for weights, which move by 0.4. Sums are computed in another order and
    # rounded in other places, over 50 steps with momentum.
    "fp32": (1e-5, 1e-4, 1e-5),
    "fp16": (1e-2, 3e-2, 2e-3),
    "bf16": (0.1, 0.25, 1.5e-2),
    "true": (0.1, 0.25, 4e-2),
}


SHORT = 0.25
"""Share of the tolerance for 12 steps, in which rounding uses at most a ninth of it."""


def tolerance(plan: Any) -> tuple[float, float, float]:
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    if plan.stores_low and not plan.keeps_masters:
        return TOLERANCE["true"]
    return TOLERANCE[plan.compute]


@functools.cache
def _alone(plan: str, steps: int, max_norm: float | None, accumulate: int, frozen: bool) -> Trace:
    return model.alone(plan, Options(steps=steps, max_norm=max_norm, accumulate=accumulate, frozen=frozen))


def close(got: list[float], want: list[float], relative: float) -> None:
    assert len(got) == len(want)
    for step, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a == pytest.approx(b, rel=relative), f"step {step}"


def check(world: World, layout: str, plan: str, options: Options, share: float = 1.0) -> list[Trace]:
    """Compare a run on a layout with one process, within a share of the tolerance; return every rank's trace."""
    traces = world.run(model.train, layout, plan, options)
    want = _alone(
        plan.replace(COMPILES, ""), options.steps, options.max_norm, options.accumulate, options.frozen
    )
    loss, norm, weight = (share * each for each in tolerance(plan))
    (losses,) = {tuple(trace.losses) for trace in traces if not math.isnan(trace.losses[-1])}
    close(list(losses), want.losses, loss)
    for trace in traces:
        if options.max_norm is not None:
            close(trace.norms, want.norms, norm)
            assert trace.norms == traces[0].norms
        assert trace.skipped == want.skipped
        assert trace.scale == want.scale
        assert trace.weights.keys() == want.weights.keys()
        for name, value in want.weights.items():
            torch.testing.assert_close(trace.weights[name], value, atol=weight, rtol=0, msg=name)
            assert torch.equal(trace.weights[name], traces[0].weights[name]), name
    return traces


ONE = ["ddp", "fsdp", "tp", "hand", "pp"]
FOUR = ["dp.tp", "ddp.hand", "fsdp.tp", "ddp.pp", "fsdp.pp", "tp.pp", "hand.pp"]
PLANS = ["fp32", "fp16-mixed", "bf16-master", "fp16-master", "bf16-true", "O1", REGIONS]
"""Each layout runs two of these in turn; ``make soak`` runs every preset for fifty steps."""


@each_value()
@pytest.mark.parametrize(("layout", "plan"), pairs(ONE, PLANS, 2))
def test_two_processes_train_like_one(two: World, layout: str, plan: str) -> None:
    long = plan == "fp16-master"
    check(two, layout, plan, Options(steps=50 if long else 12), 1.0 if long else SHORT)


@pytest.mark.parametrize(
    ("layout", "plan"), some(pairs(FOUR, ["fp16-mixed", "fp16-master", "bf16-master"]), 2)
)
def test_four_processes_train_like_one(four: World, layout: str, plan: str) -> None:
    steps = examples(6, 12)
    check(
        four, layout, plan + (LOSS_SCALE if plan.startswith("fp16") else ""), Options(steps=steps), steps / 12
    )


def test_stages_are_sharded_by_the_regions_that_they_have(four: World) -> None:
    check(four, "fsdp.pp", REGIONS, Options(steps=4))


def test_a_compiled_stage_in_ddp(four: World) -> None:
    check(four, "ddp.pp", "fp16-mixed" + LOSS_SCALE, Options(steps=4, compile=True))


@pytest.mark.parametrize("layout", some(["ddp.hand.pp", "fsdp.tp.pp"], 2))
def test_eight_processes_train_like_one(eight: World, layout: str) -> None:
    steps = examples(4, 8)
    check(eight, layout, "fp16-master" + LOSS_SCALE, Options(steps=steps), steps / 8)


@pytest.mark.parametrize(
    ("schedule", "plan"), pairs(["gpipe", "1f1b", "interleaved"], ["fp16-mixed", "fp16-master"])
)
def test_every_schedule_scales_its_losses_inside(two: World, schedule: str, plan: str) -> None:
    check(two, "pp", plan, Options(steps=12, schedule=schedule))


@pytest.mark.parametrize(("layout", "plan"), pairs(some(ONE, 4), ["fp16-mixed+ops.gelu=fp32", "bf16-master"]))
def test_compiled(two: World, layout: str, plan: str) -> None:
    check(two, layout, plan, Options(steps=6, compile=True))


@pytest.mark.skipif(
    not hasattr(torch.compiler, "set_default_backend"), reason="this torch can compile only with Inductor"
)
@pytest.mark.parametrize(
    ("layout", "plan"), pairs(some(ONE[1:] + ONE[:1], 4), ["fp16-mixed+ops.gelu=fp32", "bf16-master"])
)
def test_compiled_by_the_plan(two: World, layout: str, plan: str) -> None:
    check(two, layout, plan + COMPILES, Options(steps=6))


@every(2)
@pytest.mark.parametrize(("layout", "plan"), pairs(ONE, ["fp16-mixed+ops.gelu=fp32", "fp16-master"]))
def test_activation_checkpointing(two: World, layout: str, plan: str) -> None:
    check(two, layout, plan, Options(steps=6, checkpointed=True))


@every(2)
@pytest.mark.parametrize(("layout", "plan"), pairs(ONE, ["fp16-master", "fp32"]))
def test_accumulation(two: World, layout: str, plan: str) -> None:
    """DDP accumulates in no_sync; zero_grad alternates between None and zeros."""
    check(two, layout, plan, Options(steps=12, accumulate=2))


@every(2)
@pytest.mark.parametrize(("plan", "hook"), pairs(["fp32", "fp16-mixed", "bf16-master"], ["bf16", "fp16"]))
def test_compressed_gradients(two: World, hook: str, plan: str) -> None:
    """Compression rounds to the format it sends, so the tolerance is that format's; it must change the losses."""
    traces = two.run(model.train, "ddp", plan, Options(steps=12, hook=hook))
    want = _alone(plan, 12, 1.0, 1, False)
    loss, norm, weight = (max(a, b) for a, b in zip(TOLERANCE[hook], tolerance(plan), strict=True))
    close(traces[0].losses, want.losses, loss)
    close(traces[0].norms, want.norms, norm)
    for name, value in want.weights.items():
        torch.testing.assert_close(traces[1].weights[name], value, atol=weight, rtol=0)
    plain = two.run(model.train, "ddp", plan, Options(steps=12))
    # Its gradients are sent in bf16 anyway.
    assert traces[0].losses != plain[0].losses or plan == "bf16-master"


# --- ranks that do different things ----------------------------------------------------------------------------


@each_value()
@pytest.mark.parametrize(("layout", "plan"), list(itertools.product([*ONE, "manual"], PLANS)))
def test_a_half_that_trains_nothing(two: World, layout: str, plan: str) -> None:
    """In a pipeline, this half is everything that one rank has."""
    check(two, layout, plan, Options(steps=6, frozen=True), SHORT)


@each_value()
@pytest.mark.parametrize("max_norm", [1.0, None])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("idle", [True, False])
@pytest.mark.parametrize("plan", PLANS)
def test_gradients_summed_by_hand(
    two: World, plan: str, idle: bool, late: bool, max_norm: float | None
) -> None:
    """The sum comes before or after unscaling; optionally one rank has no batch in every other step."""
    if plan.startswith("fp16"):
        plan += LOSS_SCALE
    check(two, "manual", plan, Options(steps=8, idle=idle, late=late, max_norm=max_norm), SHORT)


@pytest.mark.parametrize("plan", some(PLANS, 2))
def test_weights_that_are_averaged_after_each_step(two: World, plan: str) -> None:
    """Ranks decide together, but step with their own gradients."""
    check(two, "local", plan, Options(steps=6, max_norm=None), 1.0)


@each_value()
@pytest.mark.parametrize(("layout", "plan"), list(itertools.product(["ddp", "manual", "local"], PLANS)))
def test_pairs_of_ranks_train_apart(four: World, layout: str, plan: str) -> None:
    """An infinity on rank 0 skips the step of its pair, not of the other pair."""
    options = Options(steps=6, max_norm=None, plant=0, pairs=True)
    traces = four.run(model.train, layout, plan, options)
    want = _alone(plan, 6, None, 1, False)
    *_, weight = tolerance(plan)
    for trace in traces[:2]:
        assert trace.skipped == [False, False, True, False, False, False]
    for trace in traces[2:]:
        assert trace.skipped == want.skipped
        assert trace.scale == want.scale
        for name, value in want.weights.items():
            torch.testing.assert_close(trace.weights[name], value, atol=weight, rtol=0, msg=name)
    for first, second in (traces[:2], traces[2:]):
        assert first.scale == second.scale
        assert all(torch.equal(value, second.weights[name]) for name, value in first.weights.items())


# --- one rank finds an infinity --------------------------------------------------------------------------------


def oracle(skipped: int, steps: int, fused: bool) -> dict[str, Tensor]:
    """Train in fp64 with plain torch, leaving one step out."""
    net: Net = model.build().double()
    optimizer = model.optimizer_of(net.parameters(), Options(fused=fused))
    for step in range(steps):
        x, y = model.batch(step)
        LOSS(net(x.double()), y.double()).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if step != skipped:
            optimizer.step()
        optimizer.zero_grad()
    return dict(net.state_dict())


@each_value()
@pytest.mark.parametrize(
    ("layout", "plan", "when", "fused"),
    [
        (*where, *how)
        for where, how in pairs(
            list(itertools.product(ONE, ["fp16-mixed", "fp16-master"])),
            list(itertools.product(["step", "unscaled", "late"], [False, True])),
        )
    ],
)
def test_an_infinity_on_one_rank_skips_the_step_on_all(
    two: World, layout: str, plan: str, when: str, fused: bool
) -> None:
    """``step`` finds it when unscaling, an earlier ``unscale_`` finds it, or, if placed afterwards, the norm does."""
    options = Options(steps=6, plant=1, fused=fused, unscale_first=when != "step", plant_late=when == "late")
    traces = two.run(model.train, layout, plan, options)
    want = oracle(2, 6, fused)
    for trace in traces:
        assert trace.skipped == [False, False, True, False, False, False]
        assert trace.scale == 32768.0
        for name, value in want.items():
            torch.testing.assert_close(trace.weights[name].double(), value, atol=2e-3, rtol=0)
            assert torch.equal(trace.weights[name], traces[0].weights[name]), name


@every(2, 1)
@pytest.mark.parametrize("layout", ONE)
def test_an_infinity_on_one_rank_without_clipping(two: World, layout: str) -> None:
    for trace in two.run(model.train, layout, "fp16-mixed", Options(steps=4, plant=0, max_norm=None)):
        assert trace.skipped == [False, False, True, False]
        assert trace.scale == 32768.0


def test_batches_divide() -> None:
    """The batch size fits the layouts used above."""
    assert BATCH % 8 == 0
