"""Write docs/scaling.md: the effects of a plan on 8, 64 and 1024 GPUs, derived from measurements on two processes.

    python scripts/scaling_page.py

Bytes per parameter are those of ``bench/results/parallel-cpu.json``; the page states link speeds and latencies.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "scaling.md"
RESULTS = ROOT / "bench" / "results" / "parallel-cpu.json"

PARAMETERS = 7e9
SIZES = (8, 64, 1024)
NVLINK, NETWORK = 450e9, 50e9
"""Bytes per second, direction and GPU: NVLink 4 within a machine of 8 GPUs, InfiniBand NDR (400 Gbit/s) between them."""
HOP_S = 10e-6
"""Assumed seconds for one hop of a small all-reduce; a tree takes 2 log2(n) hops."""
LAYERS = 32
"""Number of blocks, which FSDP2 gathers one at a time."""


def rows(part: str, record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the measured rows of one part."""
    return [row for row in record["rows"] if row["part"] == part]


def speed(gpus: int) -> float:
    """Return the bandwidth of the slowest link of a ring, in bytes per second."""
    return NVLINK if gpus <= 8 else NETWORK


def sent_s(layout: str, operators: dict[str, int], parameters: float, gpus: int) -> float:
    """Return the seconds that a step's collectives take on the links.

    A ring moves (n-1)/n of the bytes, and twice that for an all-reduce.
    """
    share = (gpus - 1) / gpus
    total = sum(
        amount * (2 if name.startswith("allreduce") else 1)
        for name, amount in operators.items()
        if amount > 64
    )
    return share * total / parameters * PARAMETERS / speed(gpus)


def held_gb(layout: str, plan: str, per_parameter: float, gpus: int) -> float:
    """Return the gigabytes of weights, masters, gradients and Adam's state on one GPU."""
    if layout == "ddp":
        return per_parameter * PARAMETERS / 1e9
    gathered = (
        (4 if plan in ("fp32", "bf16-mixed") else 2) * PARAMETERS / LAYERS * 2
    )  # one in use, one being gathered
    # the measurement has two processes, each with half of the state
    return (2 * per_parameter * PARAMETERS / gpus + gathered) / 1e9


def page() -> str:
    """Return the page's text."""
    record = json.loads(RESULTS.read_text(encoding="utf-8"))
    wire = list(rows("wire", record))
    count = {row["layout"]: row["bytes_per_step"] / row["bytes_per_parameter"] for row in wire}
    measured = [
        f"| {name(row)} | {row['bytes_per_parameter']:.2f} | {row['held_bytes_per_parameter']:.2f} |"
        for row in wire
    ]
    memory = ["| layout and plan | " + " | ".join(f"{n} GPUs" for n in SIZES) + " |", "|---" * 4 + "|"]
    times = list(memory)
    for row in wire:
        cells = [held_gb(row["layout"], row["plan"], row["held_bytes_per_parameter"], n) for n in SIZES]
        memory.append(f"| {name(row)} | " + " | ".join(f"{value:.1f}" for value in cells) + " |")
        seconds = [sent_s(row["layout"], row["by_operator"], count[row["layout"]], n) for n in SIZES]
        times.append(f"| {name(row)} | " + " | ".join(f"{1e3 * value:.0f}" for value in seconds) + " |")
    agreement = " | ".join(f"{1e6 * 2 * math.log2(n) * HOP_S:.0f}" for n in SIZES)
    share = " | ".join(
        f"{2 * math.log2(n) * HOP_S / sent_s('fsdp', fsdp(wire)['by_operator'], count['fsdp'], n):.3%}"
        for n in SIZES
    )
    scaling = [
        f"| {row['layout']} | {row['plan']} | {row['processes']} | {row['step_ms']:.0f} ({row['low_ms']:.0f}-{row['high_ms']:.0f}) |"
        for row in rows("scaling", record)
    ]
    asking = [
        f"| {row['processes']} | {row['part'].removeprefix('agreement').strip(', ') or 'not clipped'} | {row['step_us']:.0f} | "
        f"{row['ratio']:.2f} ({row['low']:.2f}-{row['high']:.2f}) |"
        for row in record["rows"]
        if row["part"].startswith("agreement") and row["loop"] == "agreeing" and row["processes"] > 1
    ]
    beside = [
        f"| {row['loop']} | {row['step_us']:.0f} | {row['ratio']:.3f} ({row['low']:.3f}-{row['high']:.3f}) |"
        for row in rows("overhead", record)
    ]
    environment = record["environment"]
    return f"""# What a plan changes on many GPUs

A *plan* says in which format a model is stored and computed. This page shows what a plan changes in memory, communication and time on many GPUs. The first part was measured on an {environment["device"]}, {environment["cores"]} cores, gloo, torch {environment["torch"]}
([parallel-cpu.json](../bench/results/parallel-cpu.json), `python bench/bench_parallel.py`). The numbers for many GPUs are derived from it, not measured. `python scripts/scaling_page.py` writes this page.

## Measured

This table compares castwise with plain DistributedDataParallel and GradScaler on a model so small that only overhead counts (fp16, two processes):

| loop | step, us | ratio |
|---|---|---|
{chr(10).join(beside)}

Under DistributedDataParallel castwise sends nothing. If gradients can differ between ranks, the ranks exchange one number of 4 bytes per step to step or skip together. The ratios, on the same small model, are relative to ranks that do not exchange it:

| processes | | step, us | ratio |
|---|---|---|---|
{chr(10).join(asking)}

These figures are for gloo over loopback. Four processes share two cores. Clipping adds no second message.

The next table shows the bytes per parameter and step that one process passes to collectives, and the bytes per parameter that it holds in weights, masters (fp32 copies of low weights), gradients and Adam's state (two processes, a GPT, `AdamW`):

| layout and plan | sent | held |
|---|---|---|
{chr(10).join(measured)}

The next table shows the time of a step of that GPT at a fixed global batch size. Each process has one thread. The machine has two cores, so one process uses only one core, and four processes share two:

| layout | plan | processes | step, ms (quartiles) |
|---|---|---|---|
{chr(10).join(scaling)}

## Derived

The derived figures assume a model of {PARAMETERS / 1e9:.0f} billion parameters in {LAYERS} blocks, on machines with 8 GPUs each: NVLink 4 at {NVLINK / 1e9:.0f} GB/s per direction within a machine, InfiniBand NDR at {NETWORK / 1e9:.0f} GB/s per GPU between machines (both as specified by the
vendors). A ring moves (n-1)/n of the bytes of a gather or scatter, and twice that for an all-reduce.

Memory in gigabytes per GPU, without activations, under FSDP2 with two gathered blocks:

{chr(10).join(memory)}

Communication time per step in milliseconds, without overlap with computation:

{chr(10).join(times)}

The exchange of the flag is one all-reduce of 4 bytes with 2 log2(n) hops. At an assumed {HOP_S * 1e6:.0f} us per hop it takes:

| | {" | ".join(f"{n} GPUs" for n in SIZES)} |
|---|---|---|---|
| microseconds per step | {agreement} |
| as a share of the step's communication time (FSDP2, bf16-master) | {share} |

In summary, `bf16-mixed` changes neither the memory of weights and state nor the bytes sent; it only computes faster. `bf16-master` halves the bytes that DistributedDataParallel sends and that FSDP2 gathers. If weights are not sharded, it takes 2 more bytes of memory per parameter. Under FSDP2 the shards are the
masters, so it takes no extra memory. The exchange of the flag is negligible at all of these sizes.
"""


def fsdp(wire: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of FSDP2 under bf16-master."""
    return next(row for row in wire if row["layout"] == "fsdp" and row["plan"] == "bf16-master")


def name(row: dict[str, Any]) -> str:
    """Return a row's layout and plan as text."""
    sent = f", sent in {row['compressed']}" if row["compressed"] else ""
    return f"{row['layout']}, {row['plan']}{sent}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
