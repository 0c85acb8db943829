"""Compare fp32, hand-written torch.autocast (with GradScaler in fp16 training) and castwise on ``sine``.

Training and inference are measured. On a GPU the job is that of AMD's publication (512 x 512, fp16). On a CPU it is
smaller and in bf16, because fp16 convolutions are far slower than fp32 ones there. Times are from interleaved rounds,
and peak memory is from torch's allocator, in a separate process for each plan.

Source: "Automatic mixed precision in PyTorch using AMD GPUs", ROCm blogs, 2024: 1.86x and 49.8 % less memory in
training, 1.48x and 49.8 % in inference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import castwise
from castwise import Plan
from castwise.lab.timing.memory import measure_memory
from castwise.lab.workloads.workload import Workload, find_workload
from common import Results, arguments, compare, show
from loops import Loop, start, training_by_castwise, training_by_hand


class Inference(Loop):
    """A loop of calls of a model in evaluation mode."""

    def __init__(self, model: nn.Module, inputs: torch.Tensor, dtype: torch.dtype | None) -> None:
        super().__init__(lambda: inputs)
        self.model, self.inputs, self.dtype = model.eval(), inputs, dtype

    def run(self, steps: int) -> None:
        """Call the model ``steps`` times."""
        device = self.inputs.device.type
        with torch.inference_mode():
            for _ in range(steps):
                if self.dtype is None:
                    self.model(self.inputs)
                else:
                    with torch.autocast(device, dtype=self.dtype):
                        self.model(self.inputs)


def inference_by_hand(workload: Workload, device: torch.device, dtype: torch.dtype | None) -> Inference:
    """Return a loop with the model under torch.autocast, or in fp32."""
    model, _, batch = start(workload, device)
    return Inference(model, batch[0], dtype)


def inference_by_castwise(workload: Workload, device: torch.device, plan: Plan) -> Inference:
    """Return a loop with the model prepared by castwise for inference only."""
    model, _, batch = start(workload, device)
    castwise.Amp(plan, device=device).prepare(model.eval(), inference=True)
    return Inference(model, batch[0], None)


def main() -> None:
    """Measure and write ``results/sine-<device>.json``."""
    parser = arguments(__doc__)
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
        f"castwise {name}-mixed": Plan.preset(f"{name}-mixed"),
        f"castwise {name}-mixed, channels_last": Plan.parse(f"{name}-mixed+memory_format=channels_last"),
    }
    hand = f"torch.autocast {name} by hand"
    kinds: dict[str, list[tuple[str, Callable[[], Loop]]]] = {
        "training": [
            ("fp32", partial(training_by_hand, workload, device, torch.float32)),
            (hand, partial(training_by_hand, workload, device, dtype)),
            *(
                (label, partial(training_by_castwise, workload, plan, device))
                for label, plan in plans.items()
            ),
        ],
        "inference": [
            ("fp32", partial(inference_by_hand, workload, device, None)),
            (hand, partial(inference_by_hand, workload, device, dtype)),
            *(
                (label, partial(inference_by_castwise, workload, device, plan))
                for label, plan in plans.items()
            ),
        ],
    }
    with Results("sine", device, __doc__, options.budget) as results:
        for number, (what, builders) in enumerate(kinds.items()):
            with results.part(what):
                results.add(*rows_of(what, size, builders, options.rounds, device, results.share(3 - number)))
        torch.cuda.empty_cache()  # frees memory for the next processes; does nothing without a GPU
        base = None
        for label, plan in {"fp32": Plan.preset("fp32"), **plans}.items():
            with results.part(f"memory of {label}"):
                memory = measure_memory(spec, plan, device)
                base = memory if label == "fp32" else base
                for row in results.rows:
                    if row.get("loop") == label:
                        kind = f"{row['what']}_peak_bytes"
                        row["peak_bytes"] = getattr(memory, kind)
                        row["less_memory"] = 1 - row["peak_bytes"] / getattr(base, kind) if base else None
                        show(row)
                results.save()


def rows_of(
    what: str,
    size: int,
    builders: list[tuple[str, Callable[[], Loop]]],
    rounds: int,
    device: torch.device,
    seconds: float | None,
) -> list[dict[str, Any]]:
    """Race one kind of loop; return the speedup of each over fp32 and the final training loss."""
    built: dict[str, Loop] = {}

    def kept(label: str, build: Callable[[], Loop]) -> Loop:
        built[label] = build()
        return built[label]

    rows = []
    for row in compare(
        [(label, partial(kept, label, build)) for label, build in builders],
        rounds=rounds,
        steps=2 if device.type == "cpu" else 20,
        device=device,
        unit="ms",
        seconds=seconds,
    ):
        if "ratio" in row:
            low, high = row.pop("low"), row.pop("high")
            row |= {"speedup": 1 / row.pop("ratio"), "low": 1 / high, "high": 1 / low}
        final = built[row["loop"]].losses[-1:] if row["loop"] in built else []
        rows.append({"what": what, "size": size, **row, "final_loss": final[0] if final else None})
    return rows


if __name__ == "__main__":
    main()
