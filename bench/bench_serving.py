"""Inference of the plan that ``castwise.tune(goal="inference")`` chooses, against fp32, autocast and cast weights by hand.

Each job is tuned once. Then the grid that a user would try by hand is timed with the tuned plan, in turns in one process: fp32, one
line of ``torch.autocast`` in bf16, and the model cast to bf16, each with contiguous tensors and, for models of images, with
channels_last. With ``--compiled`` the fastest of each of the three is compiled too, and so are plans of the search.
``tuned_over_best`` is the tuned plan's speed over the fastest loop by hand whose outputs passed the test of outputs;
``search_s`` the seconds of the search. ``recipe`` compares the model that castwise prepares under ``bf16-true`` with
``model.bfloat16()``, and under ``bf16-mixed`` with cast weights of the products inside ``torch.autocast``: a ratio above 1 means that
castwise takes longer. ``peak_bytes`` is the peak memory of a call, weights included.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import castwise
from architectures import ARCHITECTURES, HELD_OUT
from bench_tune import BUILT_IN
from castwise import Plan, Workload
from castwise.core.casting.trees import cast_floating, to_device
from castwise.lab.timing.memory import peak_bytes
from castwise.lab.timing.runners import InferenceRun, build_model, served
from castwise.lab.timing.stats import Ratio, paired_speedup
from castwise.lab.timing.timing import paired
from castwise.lab.workloads.workload import find_workload
from common import Results, arguments, race_within

LOW = torch.bfloat16
ROUNDS, STEPS, SECONDS = 24, 4, 40.0
PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d)


class ByHand:
    """Calls a model as users write it: in fp32, under autocast, or with weights cast to bf16.

    Args:
        workload: The job.
        device: The device.
        how: ``fp32``, ``autocast``, ``cast`` (``model.bfloat16()``) or ``products`` (autocast, with cast weights of products).
        layout: The memory format.
        compiled: Whether the model is compiled.
    """

    def __init__(
        self,
        workload: Workload,
        device: torch.device,
        how: str,
        layout: torch.memory_format,
        compiled: bool = False,
    ) -> None:
        model = build_model(workload, device, 0).eval()
        batch = to_device(next(iter(workload.batches(0))), device)
        if layout == torch.channels_last:
            model = model.to(memory_format=layout)
        call = served(workload, model, batch)
        if how == "cast":
            model.to(LOW)
            hook = functools.partial(_cast_inputs, dtype=LOW)
            model.register_forward_pre_hook(hook, with_kwargs=True)
        if how == "products":
            for module in model.modules():
                if isinstance(module, PRODUCTS):
                    module.to(LOW)
        if compiled:
            model.compile()
        low = how in ("autocast", "products")
        self.model, self._call = model, call
        self._around: Callable[[], Any] = (
            (lambda: torch.autocast(device.type, LOW)) if low else contextlib.nullcontext
        )

    def before(self, steps: int) -> None:
        """Nothing to prepare."""

    def run(self, steps: int) -> None:
        """Call the model."""
        with torch.inference_mode(), self._around():
            for _ in range(steps):
                self._call()

    def after(self) -> None:
        """Nothing to clean up."""

    def block(self, steps: int) -> None:
        """Call the model, for the measurement of memory."""
        self.run(steps)

    def close(self) -> None:
        """Release the model."""
        del self.model, self._call


def _cast_inputs(_module: nn.Module, args: Any, kwargs: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    return cast_floating(args, dtype), cast_floating(kwargs, dtype)


def over(laps: dict[str, Any], name: str, base: str) -> Ratio | None:
    """Return the speed of a loop over another's; None if one failed."""
    if laps[name].error is not None or laps[base].error is not None:
        return None
    return paired_speedup(*paired(laps[base], laps[name]))


def peak(build: Callable[[], Any], device: torch.device) -> int | None:
    """Return the peak memory of a call in bytes; None if the loop fails."""
    try:
        return peak_bytes(build, device)
    except Exception:
        return None


def row(
    workload: Workload | str, name: str, device: torch.device, budget_s: float, compiled: bool
) -> dict[str, Any]:
    """Tune a job and time the plan in turns with the loops by hand."""
    begin = time.perf_counter()
    found = castwise.tune(
        workload, goal="inference", device=device, budget_s=budget_s, fresh=True, compile="auto" if compiled else "never"
    )  # fmt: skip
    search_s = time.perf_counter() - begin
    job = find_workload(workload) if isinstance(workload, str) else workload
    images = any(isinstance(module, nn.Conv2d) for module in build_model(job, device, 0).modules())
    layouts = {"": torch.contiguous_format, **({", channels_last": torch.channels_last} if images else {})}
    builds: dict[str, Callable[[], Any]] = {
        f"{how}{said}": functools.partial(ByHand, job, device, how, layout)
        for how in ("fp32", "autocast", "cast")
        for said, layout in layouts.items()
    }
    builds["products"] = functools.partial(ByHand, job, device, "products", torch.contiguous_format)
    for plan in ("bf16-mixed", "bf16-true"):
        builds[f"castwise {plan}"] = functools.partial(InferenceRun, job, Plan.parse(plan), device)
    builds["tuned"] = functools.partial(InferenceRun, job, found.plan, device)
    runs: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for loop, build in builds.items():
        try:
            runs[loop] = build()
            runs[loop].block(1)
        except Exception as error:
            runs.pop(loop, None)
            failed[loop] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    if compiled:
        laps = race_within(
            list(runs.items()), rounds=ROUNDS // 4, steps=STEPS, device=device, seconds=SECONDS / 2
        )
        for how in ("fp32", "autocast", "cast"):
            here = [
                loop for loop in runs if loop.split(",")[0] == how and over(laps, loop, "fp32") is not None
            ]
            fastest = max(here, key=lambda loop: _value(over(laps, loop, "fp32")))
            layout = next(layout for said, layout in layouts.items() if f"{how}{said}" == fastest)
            made = f"{fastest}, compiled"
            builds[made] = functools.partial(ByHand, job, device, how, layout, compiled=True)
            runs[made] = builds[made]()
            runs[made].block(2)
    laps = race_within(list(runs.items()), rounds=ROUNDS, steps=STEPS, device=device, seconds=SECONDS)
    for run in runs.values():
        run.close()
    verdicts = {one.plan: one.parity.verdict for one in found.evidence.candidates if one.parity is not None}
    sound = {"autocast": verdicts.get("bf16-mixed"), "cast": verdicts.get("bf16-true")}
    grid = [
        loop
        for loop in runs
        if loop.split(",")[0] in ("fp32", *(how for how, verdict in sound.items() if verdict != "fail"))
    ]
    speeds = {loop: over(laps, loop, "fp32") for loop in runs}
    best = max(grid, key=lambda loop: _value(speeds[loop]))
    return {
        "workload": name, "plan": str(found.plan), "search_s": search_s, "complete": found.evidence.complete,
        "best": best, **_told("tuned_over_best", over(laps, "tuned", best)), **_told("over_fp32", speeds["tuned"]),
        **_told("over_autocast", over(laps, "tuned", "autocast") if "autocast" in runs else None),
        "recipe": {
            plan: _inverse(over(laps, f"castwise {plan}", how))
            for plan, how in (("bf16-true", "cast"), ("bf16-mixed", "products"))
            if how in runs and f"castwise {plan}" in runs
        },
        "speeds": {loop: None if ratio is None else ratio.value for loop, ratio in speeds.items()},
        "outputs": verdicts, "failed": failed,
        "peak_bytes": {loop: peak(builds[loop], device) for loop in ("fp32", "autocast", "tuned")},
    }  # fmt: skip


def _value(ratio: Ratio | None) -> float:
    return 0.0 if ratio is None else ratio.value


def _told(name: str, ratio: Ratio | None) -> dict[str, float]:
    return {} if ratio is None else {name: ratio.value, f"{name}_low": ratio.low, f"{name}_high": ratio.high}


def _inverse(ratio: Ratio | None) -> Sequence[float] | None:
    return None if ratio is None else [1 / ratio.value, 1 / ratio.high, 1 / ratio.low]


def main() -> None:
    """Measure and write ``results/serving-<device>.json``, or ``serving-compiled-<device>.json`` with ``--compiled``."""
    parser = arguments(__doc__)
    parser.add_argument("--search", type=float, default=60.0, help="seconds of each search")
    parser.add_argument("--only", help="names of jobs, separated by commas")
    parser.add_argument("--compiled", action="store_true", help="compile the fastest loops and plans, too")
    given = parser.parse_args()
    device = torch.device(given.device)
    known = ARCHITECTURES | HELD_OUT
    names = given.only.split(",") if given.only else [*BUILT_IN[device.type], *known]
    title = "serving-compiled" if given.compiled else "serving"
    with Results(title, device, __doc__, given.budget) as results:
        for name in names:
            with results.part(name):
                workload = known[name]() if name in known else name
                results.add(row(workload, name, device, given.search, given.compiled))


if __name__ == "__main__":
    main()
