"""A training stops under one layout and plan and resumes under another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from castwise.core import checkpoint
from tests.distributed import model
from tests.distributed.model import Options, Trace
from tests.distributed.test_layouts import LOSS_SCALE, TOLERANCE, close
from tests.distributed.world import World
from tests.soak import every, pairs, soaks

HALF = 6


def first_half(rank: int, size: int, layout: str, plan: str, folder: str) -> Trace:
    """Train six steps and save a checkpoint."""
    run = model.make(layout, plan, Options(steps=HALF))
    trace = run.train()
    checkpoint.save(folder, HALF, model=run.modules, optimizers=run.optimizer, amp=run.amp)
    run.amp.close()
    return trace


def second_half(rank: int, size: int, layout: str, plan: str, folder: str) -> Trace:
    """Overwrite the weights, load the checkpoint and train six more steps."""
    run = model.make(layout, plan, Options(steps=2 * HALF))
    for parameter in run.model.parameters():
        torch.nn.init.zeros_(parameter)
    loaded = checkpoint.load(
        checkpoint.newest(folder), model=run.model, optimizers=run.optimizer, amp=run.amp
    )
    trace = run.train(first=loaded.step)
    run.amp.close()
    return trace


@every(2)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("fsdp", "O2"), ("single", "bf16-mixed")),
        (("hand", "fp16-master"), ("fsdp", "fp16-mixed")),
        (("tp", "bf16-master"), ("hand", "fp16-master")),
        (("pp", "fp16-mixed"), ("ddp", "bf16-master")),
        (("ddp", "fp32"), ("pp", "fp16-master")),
        (("single", "fp16-master"), ("tp", "fp32")),
    ],
    ids=lambda value: "-".join(value),
)
def test_what_stops_under_one_layout_goes_on_under_another(
    two: World, tmp_path: Path, before: tuple[str, str], after: tuple[str, str]
) -> None:
    """The losses, norms and weights equal twelve steps in one process."""
    options = Options(steps=2 * HALF)
    want = model.alone(after[1], options)
    for half, (layout, plan) in ((first_half, before), (second_half, after)):
        if layout == "single":
            traces = [half(0, 1, layout, plan, str(tmp_path))]
        else:
            traces = two.run(half, layout, plan, str(tmp_path))
    formats = {
        "bf16" if "bf16" in plan else "fp32" if plan == "fp32" else "fp16" for _, plan in (before, after)
    }
    loss, norm, weight = max(TOLERANCE[name] for name in formats)
    (losses,) = {tuple(t.losses) for t in traces if t.losses[-1] == t.losses[-1]}
    close(list(losses), want.losses[HALF:], loss)
    close(traces[0].norms, want.norms[HALF:], norm)
    for name, value in want.weights.items():
        torch.testing.assert_close(traces[0].weights[name], value, atol=weight, rtol=0, msg=name)


def test_several_stages_of_a_pipeline_on_one_process(two: World, tmp_path: Path) -> None:
    """The stages together have the keys of one model."""
    two.run(interleaved_half, str(tmp_path))
    traces = [second_half(0, 1, "single", "bf16-master", str(tmp_path))]
    want = model.alone("bf16-master", Options(steps=2 * HALF))
    close(traces[0].losses, want.losses[HALF:], TOLERANCE["bf16"][0])


def interleaved_half(rank: int, size: int, folder: str) -> None:
    """Train six steps with two stages per process and save a checkpoint."""
    run = model.make("pp", "fp16-mixed", Options(steps=HALF, schedule="interleaved"))
    run.train()
    checkpoint.save(folder, HALF, model=run.modules, optimizers=run.optimizer, amp=run.amp)
    run.amp.close()


@soaks  # otherwise two resume as two, and eight train in test_layouts.py
def test_eight_processes_go_on_as_two(eight: World, two: World, tmp_path: Path) -> None:
    """First data, hand-written tensor and pipeline parallelism together, then sharded data parallelism."""
    plan = "fp16-master" + LOSS_SCALE
    eight.run(first_half, "ddp.hand.pp", plan, str(tmp_path))
    traces = two.run(second_half, "fsdp", plan, str(tmp_path))
    want = model.alone(plan, Options(steps=2 * HALF))
    close(traces[0].losses, want.losses[HALF:], TOLERANCE["fp16"][0])


@every(2, 1)
@pytest.mark.parametrize(
    ("layout", "plan"), pairs(["ddp", "fsdp", "tp", "hand", "pp"], ["fp16-master", "bf16-mixed"])
)
def test_resuming_changes_no_bit(two: World, tmp_path: Path, layout: str, plan: str) -> None:
    whole = two.run(uninterrupted, layout, plan)
    two.run(first_half, layout, plan, str(tmp_path))
    for got, want in zip(two.run(second_half, layout, plan, str(tmp_path)), whole, strict=True):
        assert got.norms == want.norms[HALF:]
        for name, value in want.weights.items():
            assert torch.equal(got.weights[name], value), name


def uninterrupted(rank: int, size: int, layout: str, plan: str) -> Trace:
    """Train all twelve steps."""
    return model.train(rank, size, layout, plan, Options(steps=2 * HALF))
