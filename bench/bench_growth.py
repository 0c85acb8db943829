"""Measure how the overhead of castwise grows with the number of parameters, modules, regions and accumulated batches.

The models have many tiny parts and run on one CPU thread, so that nearly all of the time is call overhead: parameters
of 8 elements that two operators use, pairs of a linear layer and a GELU of width 8, such pairs of which some are fp32
regions, and an MLP that accumulates the gradients of several batches. Each is trained by the loop of the README and
by a hand-written loop that casts the same tensors: with autocast (disabled in regions, ``float()`` where the plan
overrides GELU), GradScaler, low weights, or low weights with fp32 copies that the optimizer updates. The optimizer is
SGD with momentum and foreach kernels. The hand-written loop does not check for non-finite gradients; castwise does,
which is its default. Steps of the two alternate, and ratios are formed within pairs. All times are CPU times of the
thread, which other processes affect less. ``prepare_s`` and ``close_s``, the seconds of ``prepare`` and ``close``,
are the best of three.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

import castwise
from castwise.lab.timing.stats import paired_speedup
from common import RESULTS, Results, arguments, check_losses_agree
from loops import Loop

WIDTH = 8
PARAMETERS = 10, 100, 1_000, 10_000
MODULES = 10, 100, 1_000, 5_000
REGIONS = 1, 10, 100, 1_000
ACCUMULATIONS = 1, 8, 64
GELU, SCALE = "+ops.gelu=fp32", 1024.0
SCALED = f"fp16-mixed+loss_scale.init={SCALE:g}"
PLANS = "bf16-mixed", "bf16-true", "bf16-master"
CASES = {
    "parameters": (PARAMETERS, (*PLANS, SCALED)),
    "modules": (MODULES, (*PLANS, "bf16-mixed" + GELU)),
    "regions": (REGIONS, ("bf16-mixed",)),
    "accumulations": (ACCUMULATIONS, (*PLANS, SCALED)),
}
SECONDS = 5.0
"""Seconds of measurement per case."""
FEWEST, MOST = 6, 400
"""The smallest and the largest number of pairs of steps in a race."""
WARM = 4
"""Number of steps before the race, because castwise checks for mistakes in some of the first steps."""


class Vectors(nn.Module):
    """Parameters without modules around them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList([nn.Parameter(torch.randn(WIDTH)) for _ in range(size)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return all parameters times ``x``, ``[parameters, 8]``."""
        return torch.stack([*self.vectors.parameters()]) * x


class Pair(nn.Module):
    """A linear layer and a GELU.

    ``by_hand`` selects what the hand-written loop computes in fp32: nothing, ``gelu``, or the whole pair (``region``).
    """

    def __init__(self, by_hand: str = "") -> None:
        super().__init__()
        self.linear, self.by_hand = nn.Linear(WIDTH, WIDTH), by_hand

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, 8]`` to ``[batch, 8]``."""
        if self.by_hand == "region":
            with torch.autocast(x.device.type, enabled=False):
                return nn.functional.gelu(self.linear(x.float()))
        x = self.linear(x)
        return nn.functional.gelu(x.float() if self.by_hand == "gelu" else x)


def build(what: str, size: int, plan: str, hand: bool) -> nn.Module:
    """Build a model, with the same weights for the hand-written loop and for castwise's."""
    torch.manual_seed(0)
    if what == "parameters":
        return Vectors(size)
    if what == "accumulations":
        layers = [layer for _ in range(5) for layer in (nn.Linear(32, 32), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(32, 32))
    regions = size if what == "regions" else 0
    count = max(REGIONS) if what == "regions" else size
    kinds = ["region" if i < regions else "gelu" if GELU in plan else "" for i in range(count)]
    return nn.Sequential(*(Pair(kind if hand else "") for kind in kinds))


def sgd(params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer that every loop uses."""
    return torch.optim.SGD(params, 1e-3, momentum=0.9, foreach=True)


def by_castwise(model: nn.Module, x: torch.Tensor, times: int, plan: castwise.Plan) -> Loop:
    """Return the loop of the README, with ``times`` backward passes per step."""
    optimizer = sgd(model.parameters())
    amp = castwise.Amp(plan, device=x.device)
    amp.prepare(model, optimizer)

    def step() -> torch.Tensor:
        for _ in range(times):
            loss = model(x).square().mean() / times
            amp.backward(loss)
        amp.step(optimizer)
        optimizer.zero_grad()
        return loss

    return Loop(step)


def by_hand(model: nn.Module, x: torch.Tensor, times: int, plan: castwise.Plan) -> Loop:
    """Return a loop with the same arithmetic, written as users write it."""
    dtype = torch.float16 if plan.compute == "fp16" else torch.bfloat16
    if plan.stores_low:
        model, x = model.to(dtype), x.to(dtype)
    params = [*model.parameters()]
    low = [p.detach() for p in params]
    wide = [p.float() for p in low] if plan.keeps_masters else params
    optimizer = sgd(wide)
    scaler = torch.amp.GradScaler(x.device.type, SCALE, enabled=plan.loss_scale is not None)

    def step() -> torch.Tensor:
        for _ in range(times):
            with torch.autocast(x.device.type, dtype, enabled=not plan.stores_low):
                loss = model(x).float().square().mean() / times
            scaler.scale(loss).backward()
        if plan.keeps_masters:
            for master, parameter in zip(wide, params, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
        scaler.step(optimizer)
        scaler.update()
        if plan.keeps_masters:
            torch._foreach_copy_(low, wide)
            model.zero_grad()
        optimizer.zero_grad()
        return loss

    return Loop(step)


def training(what: str, size: int, line: str, device: torch.device, hand: bool) -> Loop:
    """Return a loop that has already run its warm-up steps."""
    model = build(what, size, line, hand).to(device)
    x = torch.randn(4, 32 if what == "accumulations" else WIDTH, device=device)
    x = x[0] if what == "parameters" else x
    regions = [castwise.Region(str(i), compute="fp32") for i in range(size if what == "regions" else 0)]
    plan = dataclasses.replace(castwise.Plan.parse(line), regions=tuple(regions))
    loop = (by_hand if hand else by_castwise)(model, x, size if what == "accumulations" else 1, plan)
    loop.run(WARM)
    return loop


def race(what: str, size: int, line: str, device: torch.device, seconds: float) -> dict[str, Any]:
    """Race the hand-written loop and castwise's, step by step in turns."""
    loops = [training(what, size, line, device, hand) for hand in (True, False)]
    times: tuple[list[float], list[float]] = [], []
    end = time.monotonic() + seconds
    while len(times[0]) < FEWEST or (len(times[0]) < MOST and time.monotonic() < end):
        first = len(times[0]) % 2
        for which in (first, 1 - first):
            begun = time.thread_time()
            loops[which].step()
            times[which].append(time.thread_time() - begun)
    for loop in loops:
        loop.run(1)
    check_losses_agree(
        {"by hand": loops[0].losses[-1], "castwise": loops[1].losses[-1]}, 0.05, loops[0].losses[0]
    )
    speedup = paired_speedup(*times)
    hand, ours = (1e3 * statistics.median(each) for each in times)
    return {
        "pairs": len(times[0]), "by_hand_ms": hand, "castwise_ms": ours,
        "ratio": 1 / speedup.value, "low": 1 / speedup.high, "high": 1 / speedup.low,
    }  # fmt: skip


def preparing(size: int, line: str, device: torch.device) -> dict[str, float]:
    """Return the seconds of ``prepare`` and ``close``, each the best of three."""
    prepared, closed = [], []
    for _ in range(3):
        model = Vectors(size).to(device)
        optimizer, amp = sgd(model.parameters()), castwise.Amp(line, device=device)
        begun = time.thread_time()
        amp.prepare(model, optimizer)
        prepared.append(time.thread_time() - begun)
        begun = time.thread_time()
        amp.close()
        closed.append(time.thread_time() - begun)
    return {"prepare_s": min(prepared), "close_s": min(closed)}


def main() -> None:
    """Measure and write ``results/growth-<device>.json``."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--only", default="", help="race cases with this text in their names; keep other rows"
    )
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(1)
    every = {"prepare": (PARAMETERS, PLANS)} | CASES
    cases = [(what, size, line) for what, (sizes, lines) in every.items() for size in sizes for line in lines]
    names = ["{1} {0} under {2}".format(*case) for case in cases]
    file = RESULTS / f"growth-{device.type}.json"
    with Results("growth", device, __doc__, options.budget) as results:
        if options.only and file.exists():
            known = {name_of(row): row for row in json.loads(file.read_text(encoding="utf-8"))["rows"]}
            results.rows += [known[name] for name in names if name in known and options.only not in name]
        chosen = [(name, case) for name, case in zip(names, cases, strict=True) if options.only in name]
        for number, (name, (what, size, line)) in enumerate(chosen):
            with results.part(name):
                share = results.share(len(chosen) - number)
                measured = (
                    preparing(size, line, device)
                    if what == "prepare"
                    else race(what, size, line, device, SECONDS if share is None else share)
                )
                results.add({"part": what, "size": size, "plan": line} | measured)
        results.rows.sort(key=lambda row: names.index(name_of(row)) if "size" in row else len(names))


def name_of(row: dict[str, Any]) -> str:
    """Return the name of a row's case."""
    return "{size} {part} under {plan}".format(**row) if "size" in row else row["part"]


if __name__ == "__main__":
    main()
