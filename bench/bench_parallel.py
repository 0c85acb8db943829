"""Measure the overhead and the communication of castwise in distributed training.

``overhead``: a dispatch-bound MLP (6 layers of width 32, 8 samples per process, SGD, one thread) under
DistributedDataParallel, with hand-written GradScaler and with castwise, whose ranks need no extra message there.
Blocks of steps are interleaved, all processes start each block together, and the time of a block is that of the
slowest process.
``agreement``: the same model in a setting in which gradients can differ between ranks, with and without the one
message per step by which ranks agree, and with and without gradient clipping.
``wire``: bytes that one process passes to collectives in one step of a small GPT, by layout and plan, and bytes
that it holds in weights, masters, gradients and Adam's state.
``scaling``: the time of a step of that GPT at a fixed global batch size, by number of processes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import castwise
from bench_overhead import build
from castwise.core.ranks import ALONE
from castwise.lab.timing.ranks import lockstep
from castwise.lab.timing.stats import paired_speedup
from castwise.lab.timing.timing import paired, race
from castwise.lab.workloads.workload import find_workload
from common import check_losses_agree, write
from loops import Loop, readme_loop

GPT = "gpt?layers=4&width=128&context=64&batch=16"
PLANS = ("fp32", "bf16-mixed", "bf16-master", "bf16-true")


# --- overhead and agreement ------------------------------------------------------------------------------------


def by_hand(device: torch.device) -> Loop:
    """Return a loop with DistributedDataParallel and GradScaler, as in PyTorch's documentation."""
    model, optimizer, x, y = build(device)
    ddp = nn.parallel.DistributedDataParallel(model)
    scaler = torch.amp.GradScaler(device.type)
    loss_fn = nn.MSELoss()

    def step() -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.float16):
            loss = loss_fn(ddp(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    return Loop(step)


def by_castwise(device: torch.device) -> Loop:
    """Return the same loop with castwise instead of GradScaler."""
    model, optimizer, x, y = build(device)
    amp = castwise.Amp("fp16-mixed", device=device)
    amp.prepare(model, optimizer)
    ddp = nn.parallel.DistributedDataParallel(model)
    loss_fn = nn.MSELoss()
    return readme_loop(amp, optimizer, lambda: loss_fn(ddp(x), y))


def agreeing(device: torch.device, max_norm: float | None, asks: bool) -> Loop:
    """Return a loop without a wrapper, so that no gradient is averaged; the ranks communicate if ``asks`` is true."""
    model, optimizer, x, y = build(device)
    amp = castwise.Amp("fp16-mixed", device=device, group=None if asks else ALONE)
    amp.prepare(model, optimizer)
    loss_fn = nn.MSELoss()

    def step() -> torch.Tensor:
        loss = loss_fn(model(x), y)
        amp.backward(loss)
        amp.step(optimizer, max_norm=max_norm)
        optimizer.zero_grad()
        return loss

    return Loop(step)


def compare(
    part: str, loops: list[tuple[str, Loop]], rounds: int, steps: int, device: torch.device
) -> list[dict[str, Any]]:
    """Race loops on all ranks at once; the first loop is the baseline."""
    with lockstep("bench_parallel") as ranks:
        laps = race(loops, rounds=rounds, steps=steps, device=device, ranks=ranks)
    check_losses_agree({name: loop.losses[-1] for name, loop in loops}, relative=0.02)
    base = laps[loops[0][0]]
    rows = []
    for name, _ in loops:
        speedup = paired_speedup(*paired(base, laps[name]))
        times = sorted(t for t in laps[name].times_s if t is not None)
        rows.append({
            "part": part,
            "processes": dist.get_world_size(),
            "loop": name,
            "step_us": 1e6 * times[len(times) // 2],
            "ratio": 1 / speedup.value,
            "low": 1 / speedup.high,
            "high": 1 / speedup.low,
        })
    return rows


# --- the wire --------------------------------------------------------------------------------------------------


class Wire(TorchDispatchMode):
    """A counter of the bytes that this process passes to collectives and sends, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the bytes of a collective, then run the operator."""
        name = str(func)
        if name.startswith(("c10d", "_c10d")) and "wait" not in name and "barrier" not in name:
            tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
            if (
                "gather" in name or "scatter" in name
            ):  # the arguments are the whole tensor and a shard; count the whole
                tensors = [max(tensors, key=lambda t: t.numel())]
            self.bytes[name.split(".")[1]] += sum(t.numel() * t.element_size() for t in tensors)
        return func(*args, **(kwargs or {}))


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of this process's weights, masters, gradients and optimizer state; shared memory counts once."""
    tensors: list[Any] = list(model.parameters())
    tensors += [p for group in optimizer.param_groups for p in group["params"]]
    tensors += [p.grad for p in tensors if p.grad is not None]
    tensors += [
        v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()
    ]
    local = [t.to_local() if hasattr(t, "to_local") else t.detach() for t in tensors]
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in local}.values())


def gpt_step(
    layout: str, plan: str, hook: str | None, device: torch.device
) -> tuple[Callable[[], None], Callable[[], int], int]:
    """Return a step of the GPT on a layout, a function for the bytes that this process holds, and the parameter count."""
    workload = find_workload(GPT)
    torch.manual_seed(0)
    model = workload.model().to(device)
    count = sum(p.numel() for p in model.parameters())
    amp = castwise.Amp(plan, device=device)
    if layout == "fsdp":
        blocks = [m for m in model.modules() if type(m).__name__ == "Block"]
        mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
        amp.fully_shard(model, blocks=blocks, mesh=mesh)
    optimizer = workload.optimizer(model.parameters())
    amp.prepare(model, optimizer)
    call: nn.Module = model
    if layout == "ddp":
        call = nn.parallel.DistributedDataParallel(model)
        if hook is not None:
            call.register_comm_hook(None, getattr(castwise.parallel, f"compress_to_{hook}"))
    batches = workload.batches(0)
    size, rank = dist.get_world_size(), dist.get_rank()

    def step() -> None:
        batch = torch.utils._pytree.tree_map(lambda t: t.chunk(size)[rank].to(device), next(batches))
        optimizer.zero_grad()
        loss = workload.loss(call, batch)
        amp.backward(loss)
        amp.step(optimizer, max_norm=1.0)

    return step, lambda: held(model, optimizer), count


def wire(device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each layout and plan with the bytes per step."""
    rows = []
    cases = [("ddp", plan, None) for plan in PLANS] + [("ddp", "bf16-mixed", "bf16")]
    cases += [("fsdp", plan, None) for plan in PLANS]
    for layout, plan, hook in cases:
        step, bytes_held, count = gpt_step(layout, plan, hook, device)
        step()
        step()
        counter = Wire()
        with counter:
            step()
        total = sum(counter.bytes.values())
        rows.append({
            "part": "wire",
            "processes": dist.get_world_size(),
            "layout": layout,
            "plan": plan,
            "compressed": hook,
            "bytes_per_step": total,
            "bytes_per_parameter": total / count,
            "held_bytes_per_parameter": bytes_held() / count,
            "by_operator": dict(counter.bytes),
        })
    return rows


def scaling(device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each layout and plan with the time of a step at a fixed global batch size."""
    rows = []
    for layout in ("ddp", "fsdp"):
        for plan in ("fp32", "bf16-mixed"):
            step, _, _ = gpt_step(layout, plan, None, device)

            class Steps(Loop):
                def run(self, steps: int, step: Callable[[], None] = step) -> None:
                    for _ in range(steps):
                        step()

            loops = [("steps", Steps(lambda: torch.zeros(())))]
            with lockstep("bench_parallel") as ranks:
                laps = race(loops, rounds=8, steps=4, device=device, ranks=ranks)
            times = sorted(t for t in laps["steps"].times_s if t is not None)
            rows.append({
                "part": "scaling",
                "processes": dist.get_world_size(),
                "layout": layout,
                "plan": plan,
                "step_ms": 1e3 * times[len(times) // 2],
                "low_ms": 1e3 * times[len(times) // 4],
                "high_ms": 1e3 * times[3 * len(times) // 4],
            })
    return rows


# --- processes -------------------------------------------------------------------------------------------------


def work(rank: int, size: int, folder: str, options: argparse.Namespace) -> None:
    """Run all measurements for one number of processes."""
    torch.set_num_threads(1)
    device = torch.device(options.device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=size)
    rows: list[dict[str, Any]] = []
    if size == 2 or device.type == "cuda":
        loops = [
            ("DDP and GradScaler by hand", by_hand(device)),
            ("by hand, again", by_hand(device)),
            ("castwise", by_castwise(device)),
        ]
        rows += compare("overhead", loops, options.rounds, options.steps, device)
        rows += wire(device)
    for max_norm in (None, 1.0):
        part = "agreement" if max_norm is None else "agreement, clipped"
        loops = [("apart", agreeing(device, max_norm, False)), ("agreeing", agreeing(device, max_norm, True))]
        rows += compare(part, loops, options.rounds // 2, options.steps // 2, device)
    rows += scaling(device)
    if rank == 0:
        torch.save(rows, f"{folder}/rows.pt")
    dist.barrier()
    os._exit(0)  # gloo's own teardown sometimes aborts


def main() -> None:
    """Measure and write ``results/parallel-<device>.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=42)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    sizes = (torch.cuda.device_count(),) if options.device == "cuda" else (1, 2, 4)
    rows: list[dict[str, Any]] = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(work, (size, folder, options), size)
            rows += torch.load(f"{folder}/rows.pt", weights_only=True)
    write("parallel", torch.device(options.device), __doc__, rows)


if __name__ == "__main__":
    main()
