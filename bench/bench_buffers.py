"""Measure the cost of the copies from which a skipped step restores buffers that its forward made non-finite.

The loop of the README runs with its copies of floating-point buffers and without them. The loop without copies runs
twice, so that the table also shows the noise of the method. Blocks of steps are interleaved, and ratios are formed
within rounds. On a CPU the ratios are of CPU time, which other processes affect less. ``copies_us`` is the time of
the copies of one window (the time between two updates of the loss scale), timed alone, and ``share`` is that time
divided by the time of a step. ``resnet`` has BatchNorms, the GPT has no floating-point buffer, and the MLP, with and
without BatchNorms, is dispatch-bound.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import castwise
from architectures import ARCHITECTURES
from castwise.core.model.borders import root_of
from castwise.core.session.amp import SessionView
from castwise.lab.timing.stats import paired_speedup
from castwise.lab.workloads.workload import Workload, find_workload
from common import Results, arguments, check_losses_agree
from loops import Loop, readme_loop, start

PLANS = ("fp32", "bf16-mixed")


def without_copies(model: nn.Module) -> None:
    """Turn off the copies of a prepared model's buffers."""
    root = root_of(model)
    assert root is not None
    root.begin = root.loaded = None


def training(workload: Workload, plan: str, device: torch.device, copies: bool) -> tuple[nn.Module, Loop]:
    """Return the model and the training loop of a workload under a plan."""
    model, optimizer, batch = _started(workload, device)
    amp = castwise.Amp(plan, device=device)
    model, optimizer = amp.prepare(model, optimizer)
    if not copies:
        without_copies(model)
    return model, readme_loop(amp, optimizer, lambda: workload.loss(model, batch))


def _started(workload: Workload, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    if workload.name not in ARCHITECTURES:
        return start(workload, device)
    torch.manual_seed(0)
    model = workload.model().to(device)
    batch = {name: tensor.to(device) for name, tensor in next(iter(workload.batches(0))).items()}
    return model, workload.optimizer(model.parameters()), batch


def mlp(norms: bool, plan: str, device: torch.device, copies: bool) -> tuple[nn.Module, Loop]:
    """Return a model with six layers of width 32 and its training loop, with batches of 8 and SGD."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(5):
        layers += [nn.Linear(32, 32), *([nn.BatchNorm1d(32)] if norms else []), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(32, 32)).to(device)
    x, y = (torch.randn(8, 32, device=device) for _ in range(2))
    amp = castwise.Amp(plan, device=device)
    model, optimizer = amp.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
    if not copies:
        without_copies(model)
    return model, readme_loop(amp, optimizer, lambda: nn.functional.mse_loss(model(x), y))


def _seconds(device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time()
    torch.accelerator.synchronize(device)
    return time.perf_counter()


def raced(
    loops: dict[str, Loop], steps: int, rounds: int, device: torch.device, end: float
) -> dict[str, list[float]]:
    """Return the seconds per step in each round, by loop; odd rounds run the loops in reverse order."""
    times: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(-1, rounds):  # round -1 is a warm-up
        order = [*loops][:: 1 if number % 2 else -1]
        for name in order:
            start = _seconds(device)
            loops[name].run(steps)
            if number >= 0:
                times[name].append((_seconds(device) - start) / steps)
        if number >= 5 and time.monotonic() > end:
            break
    return times


def copying(model: nn.Module, device: torch.device) -> float:
    """Return the seconds that the copies of one window take, timed alone."""
    amp = castwise.Amp.of(model)
    root = root_of(model)
    assert amp is not None
    assert root is not None
    buffers, times = SessionView(amp).window.buffers, []
    for _ in range(20):
        start = _seconds(device)
        for _ in range(100):
            buffers.end_window(amp)  # type: ignore[arg-type]
            root.begin(True)
        times.append((_seconds(device) - start) / 100)
    return statistics.median(times)


def main() -> None:
    """Measure and write ``results/buffers-<device>.json``."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=54)
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(1)
    makes: dict[str, tuple[Callable[..., tuple[nn.Module, Loop]], int]] = {
        "resnet": (partial(training, ARCHITECTURES["resnet"]()), 1),
        "gpt": (partial(training, find_workload("gpt")), 1),
        "MLP": (partial(mlp, False), 100),
        "MLP with BatchNorm": (partial(mlp, True), 100),
    }
    parts = [(name, plan) for name in makes for plan in PLANS]
    with Results("buffers", device, __doc__, options.budget) as results:
        for number, (name, plan) in enumerate(parts):
            make, steps = makes[name]
            seconds = results.share(len(parts) - number)
            end = time.monotonic() + seconds if seconds is not None else float("inf")
            with results.part(f"{name}, {plan}"):
                made = {
                    label: make(plan, device, label == "with copies")
                    for label in ("without copies", "without copies, again", "with copies")
                }
                loops = {label: loop for label, (_, loop) in made.items()}
                times = raced(loops, steps, options.rounds, device, end)
                losses = {label: loop.losses[-1] for label, loop in loops.items()}
                check_losses_agree(losses, 0.02, loops["with copies"].losses[0])
                alone = copying(made["with copies"][0], device)
                for label, seen in times.items():
                    ratio = paired_speedup(times["without copies"], seen)
                    step = statistics.median(seen)
                    row = {
                        "model": name, "plan": plan, "loop": label, "rounds": len(seen), "step_us": 1e6 * step,
                        "ratio": 1 / ratio.value, "low": 1 / ratio.high, "high": 1 / ratio.low,
                    }  # fmt: skip
                    if label == "with copies":
                        row |= {"copies_us": 1e6 * alone, "share": alone / step}
                    results.add(row)


if __name__ == "__main__":
    main()
