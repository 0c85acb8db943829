"""Measure the overhead of a Monitor during training.

The models are the dispatch-bound MLP of bench_overhead (6 layers of width 32, batch 8, SGD), on which every
microsecond of Python shows, and the built-in 4-layer GPT, with one thread each. Blocks with and without a monitor at
its defaults are interleaved. A block has as many steps as lie between two samples, so each block contains one sample.
Ratios are formed within rounds, and the loop without a monitor runs twice. ``every=1`` shows the cost of a single
sample. Audits are timed alone, after a first audit that runs the whole parity test, and ``share`` spreads an audit
over the steps between two audits.

``--part changes`` instead trains a small classifier for 700 steps with a sudden change at step 300, and reports the
step of the first alarm. Sound training runs, for example with warm-up, decay to zero or a layer that is unfrozen
late, count false alarms.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.lab.watch import test_changes

import castwise
from bench_overhead import build
from castwise.lab.watch.monitor import AUDIT_EVERY, EVERY
from castwise.lab.workloads.workload import find_workload
from common import Results, arguments, compare
from loops import Loop, readme_loop, start

AUDITS = 5
PLANS = ("bf16-mixed", "fp16-mixed")


def mlp(device: torch.device, plan: str) -> tuple[castwise.Amp, Any, Callable[[], torch.Tensor], Any, Any]:
    """Return the session, the optimizer, a function for the loss of a step, and the loss and batches for audits."""
    model, optimizer, x, y = build(device)
    amp = castwise.Amp(plan, device=device)
    amp.prepare(model, optimizer)
    loss_fn = nn.MSELoss()

    def loss(net: nn.Module, batch: Any) -> torch.Tensor:
        return loss_fn(net(batch[0]), batch[1])

    return amp, optimizer, partial(loss, model, (x, y)), loss, [(x, y)]


def gpt(device: torch.device, plan: str) -> tuple[castwise.Amp, Any, Callable[[], torch.Tensor], Any, Any]:
    """Return the same for the built-in GPT."""
    workload = find_workload("gpt")
    model, optimizer, batch = start(workload, device, None)
    amp = castwise.Amp(plan, device=device)
    amp.prepare(model, optimizer)
    return amp, optimizer, lambda: workload.loss(model, batch), workload.loss, workload.batches


def watched(make: Callable[..., Any], device: torch.device, plan: str, every: int | None) -> Loop:
    """Return the loop of the README, with a monitor unless ``every`` is None."""
    amp, optimizer, loss_of, _, _ = make(device, plan)
    if every is not None:
        castwise.Monitor(amp, every=every)
    return readme_loop(amp, optimizer, loss_of)


def audits(make: Callable[..., Any], device: torch.device, plan: str) -> tuple[float, list[float]]:
    """Return the seconds of the first audit and of each later audit."""
    amp, optimizer, loss_of, loss, batches = make(device, plan)
    with castwise.Monitor(amp, loss=loss, batches=batches) as monitor:
        loop = readme_loop(amp, optimizer, loss_of)
        for _ in range(3):
            loop.step()
        for _ in range(AUDITS):
            monitor.audit()
    first, *others = [audit.time_s for audit in monitor.audits]
    assert {audit.verdict for audit in list(monitor.audits)[1:]} == {"sound"}, monitor.audits
    return first, others


def changes(budget: float | None) -> None:
    """Find when changes raise an alarm and how many sound runs do; write ``results/monitor-changes-cpu.json``."""
    with Results("monitor-changes", torch.device("cpu"), __doc__, budget) as results:
        for case, (run, _) in test_changes.TROUBLE.items():
            with results.part(case):
                alarms = run.train().alarms
                results.add({
                    "case": case, "change_at": 1 if "from the start" in case else test_changes.AT,
                    "alarm_at": min((step for _, step in alarms), default=None), "kinds": sorted({kind for kind, _ in alarms}),
                })  # fmt: skip
        false = 0
        for case, run in test_changes.SOUND.items():
            with results.part(case):
                alarms = run.train().alarms
                false += bool(alarms)
                results.add({"case": case, "sound": True, "steps": run.steps, "alarms": alarms})
        results.add({"case": "all", "sound": len(test_changes.SOUND), "false_alarms": false})


def main() -> None:
    """Measure and write ``results/monitor-<device>.json``."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=54)
    parser.add_argument("--part", choices=("costs", "changes"), default="costs")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(1)
    if options.part == "changes":
        changes(options.budget)
        return
    jobs = [("MLP", mlp, "us"), ("GPT", gpt, "ms")]
    parts = [(job, plan, kind) for job in jobs for plan in PLANS for kind in ("default", "sample", "audit")]
    step_s: dict[tuple[str, str], float] = {}
    with Results("monitor", device, __doc__, options.budget) as results:
        for number, ((name, make, unit), plan, kind) in enumerate(parts):
            if name == "GPT" and plan == "fp16-mixed" and device.type == "cpu":
                continue  # CPUs compute fp16 products tens of times slower, so nobody trains in fp16 on them
            with results.part(f"{name}, {plan}, {kind}"):
                share = results.share(len(parts) - number)
                if kind == "audit":
                    first, others = audits(make, device, plan)
                    each, step = statistics.median(others), step_s[name, plan]
                    results.add({
                        "job": name, "plan": plan, "audit_s": each, "first_audit_s": first, "in_steps": each / step,
                        "every": AUDIT_EVERY, "share": each / (AUDIT_EVERY * step),
                    })  # fmt: skip
                    continue
                every = EVERY if kind == "default" else 1
                off = partial(watched, make, device, plan, None)
                rows = compare(
                    [
                        ("without", off),
                        ("without, again", off),
                        (f"every={every}", partial(watched, make, device, plan, every)),
                    ],
                    rounds=options.rounds,
                    steps=EVERY if kind == "default" else (EVERY if name == "MLP" else 2),
                    device=device,
                    unit=unit,
                    seconds=share if share is not None else 25,
                    relative=0.0,
                )
                step_s[name, plan] = rows[0][f"step_{unit}"] / {"us": 1e6, "ms": 1e3}[unit]
                results.add(*({"job": name, "plan": plan} | row for row in rows))


if __name__ == "__main__":
    main()
