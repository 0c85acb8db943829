"""The seed's job: ``sine`` in training and inference, fp32, torch.autocast (+ GradScaler for fp16) by hand, and castwise.

On a GPU it is run as AMD published it (512 x 512, fp16); on a CPU smaller, in bf16, where fp16 convolutions are far
slower than fp32. Time from interleaved rounds, peak memory from torch's own allocator in a process per plan.

Source: "Automatic mixed precision in PyTorch using AMD GPUs", ROCm blogs, 2024: 1.86x and 49.8 % less memory in
training, 1.48x and 49.8 % in inference.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import castwise
from bench_overhead import Loop
from castwise import Plan
from castwise.measure.memory import measure_memory
from castwise.measure.stats import paired_speedup
from castwise.measure.timing import paired, race
from castwise.workload import Workload, find_workload
from common import write


def start(
    workload: Workload, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, ...]]:
    """The same weights and data for every loop."""
    torch.manual_seed(0)
    model = workload.model().to(device)
    return (
        model,
        workload.optimizer(model.parameters()),
        tuple(t.to(device) for t in next(workload.batches(0))),
    )


def training_by_hand(workload: Workload, device: torch.device, dtype: torch.dtype) -> Loop:
    """torch.autocast around forward and loss, GradScaler in fp16; fp32 without either."""
    model, optimizer, batch = start(workload, device)
    low = dtype is not torch.float32
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)

    def step() -> torch.Tensor:
        with torch.autocast(device.type, dtype=dtype if low else torch.bfloat16, enabled=low):
            loss = workload.loss(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    return Loop(step)


def training_by_castwise(workload: Workload, device: torch.device, plan: Plan) -> Loop:
    """The loop of the README."""
    model, optimizer, batch = start(workload, device)
    amp = castwise.Amp(plan, device=device)
    amp.prepare(model, optimizer)

    def step() -> torch.Tensor:
        loss = workload.loss(model, batch)
        amp.backward(loss)
        amp.step(optimizer)
        optimizer.zero_grad()
        return loss

    return Loop(step)


class Inference(Loop):
    """Calls of a model in evaluation mode."""

    def __init__(self, model: nn.Module, inputs: torch.Tensor, dtype: torch.dtype | None) -> None:
        super().__init__(lambda: inputs)
        self.model, self.inputs, self.dtype = model.eval(), inputs, dtype

    def run(self, steps: int) -> None:
        """Predict some times."""
        device = self.inputs.device.type
        with torch.inference_mode():
            for _ in range(steps):
                if self.dtype is None:
                    self.model(self.inputs)
                else:
                    with torch.autocast(device, dtype=self.dtype):
                        self.model(self.inputs)


def main() -> None:
    """Measure and write ``results/sine-<device>.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--size", type=int, default=0)
    options = parser.parse_args()
    device = torch.device(options.device)
    gpu = device.type != "cpu"
    size = options.size or (512 if gpu else 128)
    name, dtype = ("fp16", torch.float16) if gpu else ("bf16", torch.bfloat16)
    spec = f"sine?size={size}"
    workload = find_workload(spec)
    plans = {
        "fp32": Plan.preset("fp32"),
        f"castwise {name}-mixed": Plan.preset(f"{name}-mixed"),
        f"castwise {name}-mixed, channels_last": Plan.parse(f"{name}-mixed+memory_format=channels_last"),
    }
    training: list[tuple[str, Loop]] = [("fp32", training_by_hand(workload, device, torch.float32))]
    training.append((f"torch.autocast {name} by hand", training_by_hand(workload, device, dtype)))
    inputs = next(workload.batches(0))[0].to(device)
    inference: list[tuple[str, Loop]] = [("fp32", Inference(start(workload, device)[0], inputs, None))]
    inference.append((f"torch.autocast {name} by hand", Inference(start(workload, device)[0], inputs, dtype)))
    for label, plan in list(plans.items())[1:]:
        training.append((label, training_by_castwise(workload, device, plan)))
        model = start(workload, device)[0].eval()
        castwise.Amp(plan, device=device).prepare(model, inference=True)
        inference.append((label, Inference(model, inputs, None)))
    memory = {label: measure_memory(spec, plan, device) for label, plan in plans.items()}
    rows = []
    for what, loops in (("training", training), ("inference", inference)):
        laps = race(loops, rounds=options.rounds, steps=20 if gpu else 2, device=device)
        for label, loop in loops:
            speedup = paired_speedup(*paired(laps["fp32"], laps[label]))
            times = sorted(t for t in laps[label].times_s if t is not None)
            row: dict[str, object] = {
                "what": what, "size": size, "loop": label, "step_ms": 1e3 * times[len(times) // 2],
                "speedup": speedup.value, "low": speedup.low, "high": speedup.high,
                "final_loss": loop.losses[-1] if what == "training" else None,
            }  # fmt: skip
            if label in memory:
                peak = getattr(memory[label], f"{what}_peak_bytes")
                row |= {
                    "peak_bytes": peak,
                    "less_memory": 1 - peak / getattr(memory["fp32"], f"{what}_peak_bytes"),
                }
            rows.append(row)
    write("sine", device, __doc__, rows)


if __name__ == "__main__":
    main()
