"""The judge of the first suite, which trains a plan and fp32 and compares the losses.

It shares no code with the gradient test or the search: a plan fails if its training does.

A plan *fails* if a loss is not finite, if castwise raises an error such as a failing loss scale, if more than a tenth
of the steps are skipped (skips in the first fifth do not count), or if its loss over the last fifth, averaged over
seeds, is worse than fp32's by more than the margin. The margin is the larger of the standard deviation of fp32's loss
over seeds and 3 % of that loss. The plan and fp32 train from the same weights on the same data.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import torch

import castwise
from castwise import Amp, Plan, Workload

STEPS = 120
SEEDS = 3
RELATIVE = 0.03


@dataclass(frozen=True)
class Sentence:
    """The judge's verdict on a plan.

    Attributes:
        fails: Whether the plan fails in training.
        why: The reason, as a clause.
        reference: fp32's loss over the last fifth, mean over seeds.
        loss: The same of the plan.
        margin: How much worse the plan's loss may be.
    """

    fails: bool
    why: str
    reference: float
    loss: float
    margin: float


def train(workload: Workload, plan: Plan, seed: int, steps: int = STEPS) -> tuple[float, int]:
    """Train; return the mean loss of the last fifth and how many steps after the first fifth were skipped."""
    torch.manual_seed(seed)
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())
    batches = workload.batches(seed)
    losses, skipped = [], 0
    with Amp(plan, device="cpu") as amp:
        amp.prepare(model, optimizer)
        for step in range(steps):
            loss = workload.loss(model, next(batches))
            try:
                amp.backward(loss)
                result = amp.step(optimizer)
            except castwise.CastwiseError:
                return math.inf, steps
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            skipped += result.skipped and step >= steps // 5
    return statistics.fmean(losses[-steps // 5 :]), skipped


def reference(workload: Workload, seeds: int = SEEDS, steps: int = STEPS) -> list[float]:
    """Train in fp32 and return the loss of each seed."""
    return [train(workload, Plan.preset("fp32"), seed, steps)[0] for seed in range(seeds)]


def judge(workload: Workload, plan: Plan, fp32: list[float], steps: int = STEPS) -> Sentence:
    """Judge a plan by its training."""
    runs = [train(workload, plan, seed, steps) for seed in range(len(fp32))]
    mean = statistics.fmean(fp32)
    margin = max(statistics.stdev(fp32), RELATIVE * abs(mean))
    loss = statistics.fmean(end for end, _ in runs)
    skipped = max(count for _, count in runs)
    if not math.isfinite(loss):
        return Sentence(True, "its loss is not finite", mean, math.inf, margin)
    if skipped > 0.1 * steps:
        return Sentence(True, f"{skipped} of {steps} steps were skipped", mean, loss, margin)
    if loss - mean > margin:
        return Sentence(
            True, f"its loss is worse by {(loss - mean) / margin:.1f} margins", mean, loss, margin
        )
    return Sentence(False, "", mean, loss, margin)
