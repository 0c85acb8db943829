"""Test every plan on every distributed layout, and training whose processes are killed repeatedly.

This is run by ``make soak``.

``layouts``: each layout with each preset and with regions and operator rules. Variants are eager and compiled, with
and without activation checkpointing and gradient clipping, with accumulation, with other pipeline schedules, and with
a frozen half of the model. Custom loops sum gradients by hand, before or after unscaling and with a rank that has no
batch, or average weights. Each run is compared with one process, as in ``tests/distributed/test_layouts.py``.
``kills``: ``castwise train`` under torchrun's elastic restarts, with a process killed at random moments. The final
weights must equal those of an undisturbed run bit for bit. ``own``: the same for the example in docs/parallel.md.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.distributed import kills, model
from tests.distributed.model import Options, Trace
from tests.distributed.test_layouts import LOSS_SCALE, REGIONS, tolerance
from tests.distributed.world import World

from castwise.core.plans.plan import PRESETS, Plan
from common import write

LAYOUTS = {
    2: ("ddp", "fsdp", "tp", "hand", "pp", "manual", "local"),
    4: ("dp.tp", "ddp.hand", "fsdp.tp", "fsdp.hand", "ddp.pp", "fsdp.pp", "tp.pp", "hand.pp"),
    8: ("ddp.hand.pp", "fsdp.tp.pp"),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unclipped": {"max_norm": None},
    "compiled": {"compile": True},
    "checkpointed": {"checkpointed": True},
    "accumulated": {"accumulate": 2},
    "gpipe": {"schedule": "gpipe"},
    "interleaved": {"schedule": "interleaved"},
    "frozen": {"frozen": True},
    "idle": {"idle": True},
    "late": {"idle": True, "late": True},
}
STEPS = 6
LONG = 50
"""Number of steps of the plain variant on two processes; ``make test`` trains this long under one plan only."""


KILLED = {"kills": (kills.Training, kills.STEPS, 5), "own": (kills.OwnLoop, 3000, 0)}
"""The killed training, its number of steps, and extra restarts, since gloo's teardown sometimes aborts."""


def fits(layout: str, plan: str, variant: str, size: int) -> bool:
    """Return whether a variant is run on a layout.

    On four processes most plans run only the plain variant, and on eight processes all plans do.
    """
    pipeline = "pp" in layout.split(".")
    if layout == "local":  # ranks that clip separately do not match one process
        return variant == "unclipped"
    if variant in ("idle", "late") and layout != "manual":
        return False
    if size > 2 and variant != "plain" and (size > 4 or plan not in ("fp16-mixed", "fp16-master", REGIONS)):
        return False
    if variant in ("gpipe", "interleaved"):
        return (
            pipeline and "ddp" not in layout
        )  # plain torch 2.13 fails with DDP too: several forwards run before a backward
    return not (variant == "accumulated" and pipeline)


def worst(traces: list[Trace], want: Trace, plan: str) -> tuple[float, str]:
    """Return the largest distance from the run of one process, in tolerances, and the quantity that has it.

    The distance is infinite if the ranks differ, or if the skipped steps or the loss scale do.
    """
    loss, norm, weight = tolerance(plan)
    found: list[tuple[float, str]] = [(0.0, "")]
    for trace in traces:
        if trace.skipped != want.skipped or trace.scale != want.scale:
            return math.inf, "skips"
        for name, value in want.weights.items():
            if not torch.equal(trace.weights[name], traces[0].weights[name]):
                return math.inf, f"ranks differ in {name}"
            found.append((float((trace.weights[name] - value).abs().max()) / weight, name))
        for a, b in zip(trace.losses, want.losses, strict=True):
            if not math.isnan(a):
                found.append((abs(a - b) / abs(b) / loss, "loss"))
        for a, b in zip(trace.norms, want.norms, strict=True):
            if not math.isnan(b):
                found.append((abs(a - b) / b / norm, "norm"))
    return max(found)


def layouts() -> Iterator[dict[str, Any]]:
    """Yield a row for each layout, plan and variant."""
    plans = [*PRESETS, REGIONS]
    references: dict[Any, Trace] = {}
    for size, names in LAYOUTS.items():
        world = World(size)
        for layout, plan, variant in itertools.product(names, plans, VARIANTS):
            if not fits(layout, plan, variant, size) or plan == "tf32":
                continue
            full = plan
            if Plan.parse(plan).loss_scale is not None and Plan.parse(plan).loss_scale.dynamic:
                full += LOSS_SCALE
            steps = LONG if size == 2 and variant == "plain" else STEPS
            options = Options(steps=steps, **VARIANTS[variant])
            key = (full, steps, options.max_norm, options.accumulate, options.frozen)
            if key not in references:
                references[key] = model.alone(full, options)
            try:
                distance, where = worst(world.run(model.train, layout, full, options), references[key], full)
            except AssertionError as error:
                distance, where = math.inf, str(error).strip().splitlines()[-1][:300]
            row = {
                "part": "layouts", "processes": size, "layout": layout, "plan": plan, "variant": variant,
                "distance": distance if math.isfinite(distance) else None, "where": where, "ok": distance <= 1.0,
            }  # fmt: skip
            if not row["ok"]:
                print("FAILED", row, flush=True)
            yield row
        world.close()


def killed(
    part: str, what: type[kills.Training | kills.OwnLoop], steps: int, spare: int, times: int, seed: int
) -> dict[str, Any]:
    """Kill a training's processes at random moments and compare the final weights with those of an undisturbed run."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        quiet = what(Path(folder) / "quiet", steps=steps)
        quiet.run()
        with what(Path(folder) / "noisy", steps=steps, forks=False) as noisy:
            noisy.start(restarts=times + spare)
            moments = []
            while len(moments) < times and noisy.running():
                before = noisy.steps_made()
                if draw.random() < 0.8:  # otherwise kill during the start
                    deadline = time.monotonic() + 60
                    while (
                        noisy.running() and noisy.steps_made() in (0, before) and time.monotonic() < deadline
                    ):
                        time.sleep(0.01)
                time.sleep(draw.uniform(0.0, 1.5))
                moment = noisy.kill_one(draw)
                if moment is not None:
                    moments.append(moment)
                    print(f"kill {len(moments)}: {moment}", flush=True)
            code = noisy.wait()
        same = code == 0 and noisy.weights_equal(quiet)
        return {
            "part": part, "seed": seed, "kills": len(moments), "moments": moments, "exit_code": code,
            "weights_equal": same, "ok": same,
        }  # fmt: skip


def main() -> None:
    """Run all parts and write ``results/soak-PART-cpu.json`` for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", choices=[*KILLED, "layouts"], default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    failed = 0
    for part in (*KILLED, "layouts") if options.part is None else (options.part,):
        rows = (
            [killed(part, *KILLED[part], options.kills, options.seed)] if part in KILLED else list(layouts())
        )
        write(f"soak-{part}", torch.device("cpu"), __doc__, rows)
        failed += sum(not row["ok"] for row in rows)
        print(f"{part}: {len(rows)} cases, {failed} failed so far")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
