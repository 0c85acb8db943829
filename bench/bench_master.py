"""Parameters stored in bf16 with fp32 masters, against torch.autocast by hand, on a character-level GPT.

4 layers of width 384, both with fused AdamW; time from interleaved rounds, peak memory of one training step from torch's
own allocator, each in a process of its own. ``by hand`` is the loop that PyTorch's documentation gives.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import nn

import castwise
from bench_overhead import Loop
from castwise import Plan
from castwise.measure.memory import measure_memory
from castwise.measure.stats import paired_speedup
from castwise.measure.timing import paired, race
from castwise.workload import Workload, find_workload
from common import check_losses_agree, write

SPEC = "gpt?layers=4&width=384&heads=6"
FUSED = Plan.parse("bf16-mixed+optimizer=fused")
MASTER = Plan.parse("bf16-master+optimizer=fused")


def fused(parameters: object) -> torch.optim.Optimizer:
    """The optimizer of every loop."""
    return torch.optim.AdamW(parameters, 1e-3, weight_decay=0.01, fused=True)  # type: ignore[arg-type]


def start(workload: Workload, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer, object]:
    """The same weights and data for every loop."""
    torch.manual_seed(0)
    model = workload.model().to(device)
    batches = workload.batches(0)
    batch = tuple(tensor.to(device) for tensor in next(batches))
    return model, fused(model.parameters()), batch


def by_hand(workload: Workload, device: torch.device) -> Loop:
    """torch.autocast around forward and loss."""
    model, optimizer, batch = start(workload, device)

    def step() -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = workload.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Loop(step)


def by_plan(plan: Plan) -> Callable[[Workload, torch.device], Loop]:
    """The loop of the README under a plan."""

    def build(workload: Workload, device: torch.device) -> Loop:
        model, optimizer, batch = start(workload, device)
        amp = castwise.Amp(plan, device=device)
        model, optimizer = amp.prepare(model, optimizer)

        def step() -> torch.Tensor:
            loss = workload.loss(model, batch)
            amp.backward(loss)
            amp.step(optimizer)
            optimizer.zero_grad()
            return loss

        return Loop(step)

    return build


def main() -> None:
    """Measure and write ``results/master-<device>.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    device = torch.device(options.device)
    workload = find_workload(SPEC)
    count = sum(p.numel() for p in workload.model().parameters())
    loops = [
        ("torch.autocast by hand", by_hand(workload, device)),
        ("castwise bf16-mixed", by_plan(FUSED)(workload, device)),
        ("castwise bf16-master", by_plan(MASTER)(workload, device)),
    ]
    laps = race(loops, rounds=options.rounds, steps=options.steps, device=device)
    check_losses_agree({name: loop.losses[-1] for name, loop in loops}, relative=0.05)
    rows: list[dict[str, object]] = []
    for name, _ in loops:
        speedup = paired_speedup(*paired(laps[loops[0][0]], laps[name]))
        times = sorted(t for t in laps[name].times_s if t is not None)
        rows.append({
            "loop": name,
            "step_ms": 1e3 * times[len(times) // 2],
            "ratio": 1 / speedup.value,
            "low": 1 / speedup.high,
            "high": 1 / speedup.low,
        })
    for spec, what in ((SPEC, "activations dominate"), (SPEC + "&batch=1&context=16", "parameters dominate")):
        peaks = {}
        for name, plan in (("bf16-mixed", FUSED), ("bf16-master", MASTER)):
            peaks[name] = measure_memory(spec, plan, device, seed=0, inference=False).training_peak_bytes
        rows.append({
            "memory": what,
            "workload": spec,
            "parameters": count,
            "mixed_bytes": peaks["bf16-mixed"],
            "master_bytes": peaks["bf16-master"],
            "bytes_per_parameter_above": (peaks["bf16-master"] - peaks["bf16-mixed"]) / count,
        })
    write("master", device, __doc__, rows)


if __name__ == "__main__":
    main()
