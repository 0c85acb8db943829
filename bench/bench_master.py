"""Parameters stored in bf16 with fp32 masters, against torch.autocast by hand, on a character-level GPT.

4 layers of width 384, both with fused AdamW; time from interleaved rounds, peak memory of one training step from torch's
own allocator, each in a process of its own. ``by hand`` is the loop that PyTorch's documentation gives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

import castwise
from bench_overhead import Loop
from castwise import Plan
from castwise.measure.memory import measure_memory
from castwise.workload import Workload, find_workload
from common import Results, arguments, compare

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


def by_plan(plan: Plan, workload: Workload, device: torch.device) -> Loop:
    """The loop of the README under a plan."""
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


def main() -> None:
    """Measure and write ``results/master-<device>.json``."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    device = torch.device(options.device)
    workload = find_workload(SPEC)
    count = sum(p.numel() for p in workload.model().parameters())
    loops: list[tuple[str, Callable[[], Loop]]] = [
        ("torch.autocast by hand", partial(by_hand, workload, device)),
        ("castwise bf16-mixed", partial(by_plan, FUSED, workload, device)),
        ("castwise bf16-master", partial(by_plan, MASTER, workload, device)),
    ]
    with Results("master", device, __doc__, options.budget) as results:
        with results.part("time"):
            rows = compare(
                loops,
                rounds=options.rounds,
                steps=options.steps,
                device=device,
                unit="ms",
                seconds=results.share(2),
                relative=0.05,
            )
            results.add(*rows)
        for spec, what in (
            (SPEC, "activations dominate"),
            (SPEC + "&batch=1&context=16", "parameters dominate"),
        ):
            with results.part(f"memory where {what}"):
                mixed, master = (
                    measure_memory(spec, plan, device, seed=0, inference=False).training_peak_bytes
                    for plan in (FUSED, MASTER)
                )
                results.add({
                    "memory": what,
                    "workload": spec,
                    "parameters": count,
                    "mixed_bytes": mixed,
                    "master_bytes": master,
                    "bytes_per_parameter_above": (master - mixed) / count,
                })


if __name__ == "__main__":
    main()
