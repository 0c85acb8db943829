"""``forecast``: predict from an fp32 run what low formats would do to a model's numbers.

Weights, activations, gradients and updates of each region are cast to each format and back. The forecast gives the shares that
overflow, underflow or lose digits, and for fp16 the loss scales at which gradients neither overflow nor underflow. No device that
computes in the formats is needed.

One run under the plan shows which numbers the plan keeps in fp32. A tensor that autocast leaves in fp32 and never casts when it is
used is listed as *kept* and does not count against a format.

The forecast is about ranges only. Whether a format has enough digits for the gradients is tested by :func:`castwise.parity`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from castwise.core.plans.formats import FORMATS, LOW, get_format
from castwise.core.plans.plan import Plan, as_plan
from castwise.core.session.process import find_device
from castwise.errors import PlanError, WorkloadError, check_count
from castwise.lab.inspect.forecast_result import Forecast, RegionForecast, Spread, TensorForecast
from castwise.lab.inspect.forecast_run import Run
from castwise.lab.parity.batches import endless
from castwise.lab.parity.parity import device_of, made
from castwise.lab.parity.probes import Prober
from castwise.lab.parity.together import together
from castwise.lab.parity.updates import Training, one_update
from castwise.lab.timing.environment import environment

__all__ = ["FORECAST", "MICROBATCHES", "Forecast", "RegionForecast", "Spread", "TensorForecast", "forecast"]

FORECAST = ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2")
"""Formats that can be forecast."""
MICROBATCHES = 4


def forecast(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    batches: Any,
    formats: Sequence[str] = FORECAST,
    *,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    plan: Plan | str = "bf16-mixed",
    microbatches: int = MICROBATCHES,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> Forecast:
    """Forecast from a run in fp32 what low-precision formats would do to a model's numbers.

    Use this before training in a lower precision, also for formats that the device lacks. For each module and format,
    the function counts how many values would overflow, become 0 or lose digits. A plan decides which tensors would be
    cast.

    The function works on copies. The model, the random generators and process-wide settings are unchanged when it
    returns or fails. Compiled models run uncompiled.

    If the model is in DistributedDataParallel or sharded by FSDP2, all its ranks must call this function together.
    Each rank passes its own batches. All ranks get one forecast over all batches. The gradients in it are those of a
    rank's own batch, before they are averaged.

    Args:
        model: The model, in any training state. Its training and evaluation modes are kept. Tensors stored in bf16 or
            fp16 are converted to fp32. A sharded model is copied whole on every rank.
        loss: A function ``loss(model, batch)`` that returns a scalar tensor in fp32.
        batches: A sequence of batches, an iterable that can be iterated again, or a function ``batches(seed)`` that
            returns an iterator.
        formats: Any of ``fp16``, ``bf16``, ``fp8_e4m3`` and ``fp8_e5m2``. Each fp8 tensor has its own scale. All fp16
            gradients share one loss scale.
        optimizer: A function ``optimizer(params)`` that returns an optimizer. It makes a few steps on a copy, so that
            the updates can be observed. Without it, updates are not forecast.
        plan: The plan that decides which tensors are cast, whatever its format. It must compute in bf16 or fp16.
            ``bf16-mixed+rules=cuda`` shows on a CPU what autocasting casts on a GPU. ``bf16-true`` keeps nothing in
            fp32.
        microbatches: The number of microbatches that each rank runs.
        device: The device of the run. By default it is the device of the model's parameters.
        seed: The seed of random draws. If ``batches`` is a function, it is called with this seed too.

    Returns:
        The forecast. Its main parts are ``.answer``, ``.recommendation``, ``.scales``, ``.regions``, ``.table()`` and
        ``.save(folder)``.

    Raises:
        WorkloadError: The loss is not differentiable, the batches or the optimizer cannot be used, or the model is
            not in fp32.
        NonFiniteError: The loss or a gradient is not finite in fp32 itself.
        PlanError: A format cannot be forecast, the plan computes in fp32, or a number is out of its range.
        DeviceError: The device cannot run the plan.
    """

    def given() -> tuple[Plan, tuple[str, ...]]:
        chosen, names = as_plan(plan), _format_names(formats)
        if chosen.formats.isdisjoint(LOW):
            raise PlanError(
                f"forecast(plan={str(chosen)!r}): this plan casts nothing to a low format; give a plan that computes in bf16 or fp16, such as "
                "'bf16-mixed'"
            )
        check_count("forecast", "microbatches", microbatches, 1)
        return chosen, names

    with together(model, "forecast", what="the model, its loss or its optimizer") as ranks:
        chosen, names = ranks.alike("forecast", ("plan", "formats"), given)
        where = ranks.each(lambda: find_device("forecast", device, str(device_of(ranks.model))))
        make = ranks.each(lambda: endless(batches, "forecast"))

        def begun() -> Run:
            prober = Prober(
                ranks.model, loss, make(seed), where, seed=seed, call="forecast", dither="fp32",
                first=ranks.rank * microbatches,
            )  # fmt: skip
            return Run(prober, chosen, [FORMATS[name] for name in names], ranks)

        def updates() -> Iterator[tuple[str, Tensor, Tensor]]:
            if optimizer is not None:
                _check_steps(made(optimizer, ranks.model, "forecast"))
                training = Training(ranks.model, loss, make(seed), optimizer, where, seed)
                with contextlib.closing(training):
                    yield from one_update(training)

        run = ranks.each(begun)
        run.run(microbatches, updates)
        return run.forecast(environment(where))


def _check_steps(optimizer: torch.optim.Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        kind = type(optimizer).__name__
        raise WorkloadError(
            f"forecast: {kind}.step() needs a closure, so its updates cannot be computed from one gradient; leave optimizer= "
            f"out, or give an optimizer that steps without a closure, such as AdamW"
        )


def _format_names(formats: Sequence[str]) -> tuple[str, ...]:
    given = [formats] if isinstance(formats, str) else list(formats)
    names = tuple(dict.fromkeys(get_format(name).name for name in given))
    if not names or set(names) - set(FORECAST):
        raise PlanError(
            f"forecast(formats={formats!r}): give one or more formats; allowed: {', '.join(FORECAST)}"
        )
    return names
