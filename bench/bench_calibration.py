"""Calibrate the thresholds of the parity test: damage against final loss, in formats from bf16 down to a 1-bit mantissa.

Operands and results of matrix products and convolutions, forward and backward, are rounded to n bits of mantissa: in
one run to nearest, in another towards zero, which is biased. For each format, the damage of the gradient test is
measured both plain and in units of Adam's steps, with new weights and with trained ones. Training runs in the format
are paired by seed with fp32 runs. The difference of their mean losses over the last fifth of the steps is given in
margins. A margin is the larger of the standard deviation of fp32's loss over seeds and 0.25 % of that loss.
``harmful`` means that the lower 95 % bound of the difference is above the margin, ``harmless`` that the upper bound
is below it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from castwise import Workload
from castwise.core._torch.tensors import OperatorMode
from castwise.core.casting.trees import map_tensors
from castwise.lab.parity.damage import Grams, estimate
from castwise.lab.parity.probes import REFERENCE, Prober
from castwise.lab.search.pairs import judge_losses
from castwise.lab.workloads.workload import find_workload
from common import write

PRODUCTS = {
    "addmm", "baddbmm", "bmm", "convolution", "convolution_backward", "mm",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
}  # fmt: skip
WORKLOADS = {
    "gpt?layers=2&width=64&context=32&batch=8": 120,
    "digits?width=8&batch=32": 100,
    "sine?size=24": 120,
}
BITS = (7, 5, 4, 3, 2, 1)
RELATIVE = 0.0025


def rounded(tensor: Tensor, bits: int, towards_zero: bool) -> Tensor:
    """Round an fp32 tensor to ``bits`` bits of mantissa, with the exponent range of fp32."""
    if tensor.dtype is not torch.float32:
        return tensor
    drop = 23 - bits
    raw = tensor.contiguous().view(torch.int32)
    if not towards_zero:
        raw = raw + ((1 << (drop - 1)) - 1) + ((raw >> drop) & 1)  # to nearest, ties to even
    return ((raw >> drop) << drop).view(torch.float32).view_as(tensor)


class Coarse(OperatorMode):
    """A mode that computes products in a format with few bits."""

    def __init__(self, bits: int, towards_zero: bool) -> None:
        super().__init__()
        self._bits = bits
        self._towards_zero = towards_zero

    def handle(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Round operands and results of products."""
        if op.overloadpacket.__name__ not in PRODUCTS:
            return op(*args, **kwargs)

        def cut(value: Any) -> Any:
            return map_tensors(lambda t: rounded(t, self._bits, self._towards_zero), value)

        return cut(op(*cut(args), **kwargs))


def run(
    workload: Workload, seed: int, steps: int, mode: contextlib.AbstractContextManager[Any]
) -> tuple[float, float, nn.Module]:
    """Train; return the loss before the first step, the mean of the last fifth, and the model."""
    torch.manual_seed(seed)
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())
    losses = []
    with mode:
        for batch in itertools.islice(workload.batches(seed), steps):
            loss = workload.loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses[0], statistics.fmean(losses[-steps // 5 :]), model


def damage(workload: Workload, model: nn.Module, bits: int, towards_zero: bool) -> tuple[float, float]:
    """Return the damage, plain and in units of Adam's steps."""
    batches: Iterator[Any] = workload.batches(977)
    prober = Prober(model, workload.loss, batches, torch.device("cpu"), call="calibration")
    prober.extend(8)
    floor = prober.grams(prober.floor(range(4)))
    dead = {
        n for n, g in floor.items() if g.error.trace() > 1e-4 * g.signal.trace() or not g.signal.trace() > 0
    }
    with Coarse(bits, towards_zero):
        probe = prober.probe(REFERENCE, range(8))
    plain = estimate(Grams.total(prober.grams(probe).values())).value
    weighted = prober.grams(probe, prober.preconditioner())
    return plain, estimate(Grams.total([g for n, g in weighted.items() if n not in dead])).value


def main() -> None:
    """Run the grid, with more seeds where a few do not decide."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--few", type=int, default=5)
    parser.add_argument("--many", type=int, default=20)
    options = parser.parse_args()
    if options.device != "cpu":
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    for name, steps in WORKLOADS.items():
        workload = find_workload(name)
        reference: list[tuple[float, float]] = []
        models: dict[int, nn.Module] = {}

        def fp32(seeds: int, workload: Workload = workload, steps: int = steps, known: list[tuple[float, float]] = reference,
                 models: dict[int, nn.Module] = models) -> list[tuple[float, float]]:  # fmt: skip
            for seed in range(len(known), seeds):
                start, end, models[seed] = run(workload, seed, steps, contextlib.nullcontext())
                known.append((start, end))
            return known[:seeds]

        for bits, towards_zero in itertools.product(BITS, (False, True)):
            ends: list[float] = []
            for seeds in (options.few, options.many):
                for seed in range(len(ends), seeds):
                    end = run(workload, seed, steps, Coarse(bits, towards_zero))[1]
                    ends.append(end if math.isfinite(end) else 1e3)
                starts, base = zip(*fp32(seeds), strict=True)
                margin = max(statistics.stdev(base), RELATIVE * abs(statistics.fmean(base)))
                found = judge_losses(base, ends, steps, margin)
                if found.verdict != "not shown":
                    break
            torch.manual_seed(0)
            fresh, fresh_adam = damage(workload, workload.model(), bits, towards_zero)
            warm, warm_adam = damage(workload, models[0], bits, towards_zero)
            rows.append({
                "workload": name, "mantissa_bits": bits, "rounding": "towards zero" if towards_zero else "nearest",
                "damage_fresh": fresh, "damage_trained": warm, "adam_fresh": fresh_adam, "adam_trained": warm_adam,
                "fp32_start": statistics.fmean(starts), "fp32_loss": statistics.fmean(base), "loss_difference": found.difference,
                "difference_in_margins": found.difference / found.margin, "margin": found.margin,
                "detectable_in_margins": found.detectable / found.margin, "seeds": len(ends),
                "verdict": {"not worse": "harmless", "worse": "harmful"}.get(found.verdict, "not shown"),
            })  # fmt: skip
            print(rows[-1], flush=True)
    torch.set_num_threads(threads)
    worst = [max(float(str(r["damage_fresh"])), float(str(r["damage_trained"]))) for r in rows]
    adam = [max(float(str(r["adam_fresh"])), float(str(r["adam_trained"]))) for r in rows]
    harmful = [i for i, r in enumerate(rows) if r["verdict"] == "harmful"]
    summary = {
        "workload": "all",
        "smallest_harmful_damage": min((worst[i] for i in harmful), default=None),
        "smallest_harmful_adam": min((adam[i] for i in harmful), default=None),
        "largest_harmless_damage": max(
            (worst[i] for i, r in enumerate(rows) if r["verdict"] == "harmless"), default=None
        ),
        "largest_harmless_adam": max(
            (adam[i] for i, r in enumerate(rows) if r["verdict"] == "harmless"), default=None
        ),
    }
    write("calibration", torch.device("cpu"), __doc__, [*rows, summary])


if __name__ == "__main__":
    main()
