"""Measure the overhead of castwise over a hand-written torch.amp loop.

The model is a dispatch-bound MLP (6 layers of width 32, batch 8, SGD, one thread on a CPU), on which every
microsecond of Python shows. Each pair of loops does the same arithmetic; blocks of steps are interleaved, and ratios
are formed within rounds. The hand-written loop runs twice, so that the table also shows the noise of the method.
Accelerate and Lightning Fabric are measured too if they are installed. The cost of the guard against non-finite
gradients is measured on the same MLP and on the built-in 4-layer GPT, against ``nonfinite="allow"``. For comparison,
the cost of the cheapest hand-written guard is measured on the MLP.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import castwise
from castwise.lab.workloads.workload import find_workload
from common import Results, arguments, compare
from loops import Loop, readme_loop, training_by_castwise

WIDTH, LAYERS, BATCH, RATE = 32, 6, 8, 0.01


def build(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    """Build the model, the optimizer and the data, with the same weights and data for every loop."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS - 1):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    return (
        model,
        optimizer,
        torch.randn(BATCH, WIDTH, device=device),
        torch.randn(BATCH, WIDTH, device=device),
    )


def by_hand(dtype: torch.dtype, device: torch.device, scaled: bool = False, guarded: bool = False) -> Loop:
    """Return the loop of PyTorch's documentation: torch.autocast around forward and loss, and GradScaler for fp16.

    ``guarded`` checks that gradients are finite with only torch's own operator, the least cost of any guard.
    """
    model, optimizer, x, y = build(device)
    loss_fn = nn.MSELoss()
    scaler = torch.amp.GradScaler(device.type) if scaled else None
    params, one = list(model.parameters()), torch.ones((), device=device)

    def step() -> torch.Tensor:
        with torch.autocast(device.type, dtype=dtype):
            loss = loss_fn(model(x), y)
        if scaler is None:
            loss.backward()
            if guarded:
                flag = torch.zeros((), device=device)
                torch._amp_foreach_non_finite_check_and_unscale_([p.grad for p in params], flag, one)
            if not guarded or flag.item() == 0:
                optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        return loss

    return Loop(step)


def by_castwise(plan: Any, device: torch.device, nonfinite: str = "skip") -> Loop:
    """Return the loop of the README."""
    model, optimizer, x, y = build(device)
    amp = castwise.Amp(plan, device=device, nonfinite=nonfinite)
    model, optimizer = amp.prepare(model, optimizer)
    loss_fn = nn.MSELoss()
    return readme_loop(amp, optimizer, lambda: loss_fn(model(x), y))


def by_accelerate(device: torch.device) -> Loop:
    """Return a loop with Hugging Face Accelerate in bf16."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=device.type == "cpu")
    model, optimizer, x, y = build(device)
    model, optimizer = accelerator.prepare(model, optimizer)
    loss_fn = nn.MSELoss()

    def step() -> torch.Tensor:
        loss = loss_fn(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Loop(step)


def by_fabric(device: torch.device) -> Loop:
    """Return a loop with Lightning Fabric in bf16-mixed."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator=device.type, devices=1, precision="bf16-mixed")
    model, optimizer, x, y = build(device)
    model, optimizer = fabric.setup(model, optimizer)
    loss_fn = nn.MSELoss()

    def step() -> torch.Tensor:
        loss = loss_fn(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Loop(step)


def main() -> None:
    """Measure and write ``results/overhead-<device>.json``."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=54)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(1)
    groups: dict[str, list[tuple[str, Callable[[], Loop]]]] = {}
    for name, dtype, scaled in (("bf16", torch.bfloat16, False), ("fp16", torch.float16, True)):
        hand = partial(by_hand, dtype, device, scaled)
        groups[name] = [
            ("torch.amp by hand", hand),
            ("torch.amp by hand, again", hand),
            (f"castwise {name}-mixed", partial(by_castwise, f"{name}-mixed", device)),
        ]
    gpt = find_workload("gpt?lr=1e-4")
    for model, make in (("MLP", by_castwise), ("GPT", partial(training_by_castwise, gpt))):
        allow, skip = (partial(make, "bf16-mixed", device, nonfinite=way) for way in ("allow", "skip"))
        groups[f"bf16, guard on the {model}"] = [
            ("castwise, nonfinite='allow'", allow),
            ("castwise, nonfinite='allow', again", allow),
            ("castwise, nonfinite='skip'", skip),
        ]
    hand = partial(by_hand, torch.bfloat16, device)
    groups["bf16, a guard by hand on the MLP"] = [
        ("torch.amp by hand", hand),
        ("torch.amp by hand, again", hand),
        ("torch.amp by hand, guarded", partial(hand, guarded=True)),
    ]
    # Other libraries run in separate races: what a loop leaves in the CPU caches affects the time of the next loop.
    for package, label, build_loop in (
        ("accelerate", "Accelerate", by_accelerate),
        ("lightning", "Lightning Fabric", by_fabric),
    ):
        if importlib.util.find_spec(package):
            hand = partial(by_hand, torch.bfloat16, device)
            groups[f"bf16, {label}"] = [("torch.amp by hand", hand), (label, partial(build_loop, device))]
    with Results("overhead", device, __doc__, options.budget) as results:
        for number, (name, loops) in enumerate(groups.items()):
            with results.part(name):
                rows = compare(
                    loops,
                    rounds=options.rounds,
                    steps=options.steps if "GPT" not in name else max(1, options.steps // 100),
                    device=device,
                    unit="us",
                    seconds=results.share(len(groups) - number),
                    relative=0.02,
                )
                results.add(*({"format": name} | row for row in rows))


if __name__ == "__main__":
    main()
