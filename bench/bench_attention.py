"""Compare attention in bf16 by torch's fused kernel and by separate operators (the rule ``unfused``).

The two run forward and backward in interleaved rounds. For each shape ``[batch, heads, length, width]``, a row has
the median time of each, the ratio of the times with its 95 % interval, and the largest error of the output and the
gradients against fp64, relative to their norm.
"""

from __future__ import annotations

import argparse
import math
import statistics
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

import castwise
from castwise import Plan
from castwise.lab.timing.stats import paired_speedup
from castwise.lab.timing.timing import Calls, race
from common import write

SHAPES = ((8, 4, 128, 64), (8, 6, 128, 32), (8, 3, 145, 64), (2, 4, 512, 64), (1, 4, 1024, 64))
PLANS = {
    "fused": Plan.preset("bf16-mixed"),
    "unfused": Plan(compute="bf16", ops={"scaled_dot_product_attention": "unfused"}),
}
PER_ROUND = 5


def attend(plan: Plan | None, given: list[Tensor], weight: Tensor, causal: bool, device: str) -> list[Tensor]:
    """Return the output and the gradients of the three inputs; without a plan, compute in the format of the inputs."""
    if plan is None:
        out = functional.scaled_dot_product_attention(*given, is_causal=causal)
    else:
        with castwise.autocast(plan, device_type=device):
            out = functional.scaled_dot_product_attention(*given, is_causal=causal)
    return [out.detach(), *torch.autograd.grad(out, given, weight.to(out.dtype))]


def error(found: list[Tensor], truth: list[Tensor]) -> float:
    """Return the largest error of the tensors, each relative to the norm of the true tensor."""
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True))


def row(shape: tuple[int, ...], causal: bool, rounds: int, device: torch.device) -> dict[str, object]:
    """Measure one shape."""
    torch.manual_seed(0)
    given = [torch.randn(shape, device=device).requires_grad_() for _ in range(3)]
    weight = torch.randn(shape, device=device)
    wide = [t.detach().double().requires_grad_() for t in given]
    truth = attend(None, wide, weight.double(), causal, device.type)
    errors = {
        name: error(attend(plan, given, weight, causal, device.type), truth) for name, plan in PLANS.items()
    }
    loops = [
        (name, Calls(partial(attend, plan, given, weight, causal, device.type)))
        for name, plan in PLANS.items()
    ]
    laps = race(loops, rounds=rounds, steps=PER_ROUND, device=device, hopeless=math.inf)
    times = {name: lap.checked() for name, lap in laps.items()}
    ratio = paired_speedup(times["fused"], times["unfused"])
    return {
        "shape": "x".join(map(str, shape)), "causal": causal,
        **{f"{name}_ms": 1e3 * statistics.median(t) for name, t in times.items()},
        "speedup": ratio.value, "speedup_low": ratio.low, "speedup_high": ratio.high,
        **{f"{name}_error": e for name, e in errors.items()},
    }  # fmt: skip


def main() -> None:
    """Measure and write ``results/attention-<device>.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    device = torch.device(options.device)
    rows = [row(shape, causal, options.rounds, device) for shape in SHAPES for causal in (False, True)]
    write("attention", device, __doc__, rows)


if __name__ == "__main__":
    main()
