"""List the plans that a search starts from: every combination of the settings that apply to a whole training step.

These settings are the compute format, the storage of the parameters (with or without masters), the precision inside fp32
products, and the memory format. There are few combinations, so all of them are tried in a race on real steps. Whether to use
the fused optimizer is decided separately (:mod:`castwise.lab.search.fusing`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import torch

from castwise.core.plans.formats import LOW
from castwise.core.plans.plan import PRESETS, Plan
from castwise.core.plans.rules import UNFUSED, base_table
from castwise.core.session.fused import can_fuse, fuses_low, is_fused
from castwise.core.session.process import check_device
from castwise.errors import DeviceError, PlanError

FP32 = PRESETS["fp32"]
AUTOCAST = PRESETS["bf16-mixed"]
FORMATS = ("fp32", "tf32", *LOW)
"""Formats that a search may choose from, simplest first."""


def check_formats(formats: Iterable[str], goal: str) -> tuple[str, ...]:
    """Return the formats that the user allows, without duplicates, in the order of ``FORMATS``.

    fp32 is always included. With ``goal="numerics"`` the result is one low format (bf16 or fp16) alone.

    Raises:
        PlanError: A name is not a format, or ``numerics`` did not get exactly one low format.
    """
    given = (formats,) if isinstance(formats, str) else tuple(formats)
    for name in given:
        if name not in FORMATS:
            raise PlanError(f"tune(formats={given!r}): {name!r} is not one of {', '.join(FORMATS)}")
    if goal == "numerics":
        low = [name for name in dict.fromkeys(given) if name in LOW]
        if len(low) != 1:
            raise PlanError(
                f"tune(goal='numerics', formats={given!r}): give the one low format that the model is to run in, "
                "formats=('bf16',) or ('fp16',)"
            )
        return tuple(low)
    if not given:
        raise PlanError(f"tune(formats=()): give at least one of {', '.join(FORMATS)}")
    return tuple(name for name in FORMATS if name in given or name == "fp32")


def whole_step_plans(
    formats: Sequence[str],
    device: torch.device,
    optimizer: torch.optim.Optimizer | None,
    *,
    has_images: bool,
    goal: str = "time",
    used: Iterable[str] = (),
    sparse: bool = False,
) -> tuple[list[Plan], dict[str, str]]:
    """Return every combination of the settings of a whole step that the device supports.

    Args:
        formats: As returned by :func:`check_formats`.
        device: The device that the model will run on.
        optimizer: The user's optimizer, on the model's parameters; None for inference.
        has_images: Whether the model has convolutions over images, so that channels_last matters.
        goal: ``memory`` also tries low parameters without masters, and uses the fused optimizer where possible except in fp32.
            ``time`` also tries unfused attention. ``inference`` tries plans that store everything low instead of plans with
            masters, and unfused attention.
        used: Operators that the model runs, as returned by :func:`~castwise.lab.passes.regions.operators_used`.
        sparse: Whether some gradients are sparse; no fused optimizer kernel accepts sparse gradients.

    Returns:
        The plans, simplest first, and the reason for each format that is left out.
    """
    numerics: list[Plan] = []
    dropped: dict[str, str] = {}

    def consider(name: str, plan: Plan) -> None:
        try:
            check_device(plan, device.type)
        except DeviceError as error:
            dropped[name] = f"not supported by this device: {error}"
            return
        numerics.append(plan)

    for name in formats:
        if name == "fp32":
            consider("fp32", PRESETS["fp32"])
            if device.type == "cpu" and "bf16" in formats:
                consider("fp32_matmul=bf16", Plan(compute="fp32", fp32_matmul="bf16"))
        elif name == "tf32":
            consider("tf32", PRESETS["tf32"])
        else:
            consider(name, PRESETS[f"{name}-mixed"])
            if goal != "inference":
                consider(name, PRESETS[f"{name}-master"])
            if goal in ("memory", "inference"):
                consider(name, PRESETS[f"{name}-true"])
    # fused attention wins on GPUs; on a CPU its backward in a low format may be slower than separate operators
    unfused = [
        (op, "unfused")
        for op in UNFUSED
        if op in set(used) and goal in ("time", "inference") and device.type != "cuda"
    ]
    if unfused:
        numerics += [dataclasses.replace(p, ops=(*p.ops, *unfused)) for p in numerics if p.autocasts]
    layouts = ("as_is", "channels_last") if has_images else ("as_is",)
    plans = [
        dataclasses.replace(plan, memory_format=layout)
        for plan, layout in itertools.product(numerics, layouts)
    ]
    if (
        goal == "memory"
        and optimizer is not None
        and can_fuse(optimizer)
        and not is_fused(optimizer)
        and not sparse
    ):
        # the fused kernel never holds more memory than the loop it replaces
        low = fuses_low(optimizer, device.type)
        plans = [
            PRESETS["fp32"],
            *(
                plan if plan.lacks_masters and not low else dataclasses.replace(plan, optimizer="fused")
                for plan in plans
            ),
        ]
    return sorted(plans, key=complexity), dropped


_MADE_OF = {
    "cross_entropy_loss": "nll_loss_forward", "group_norm": "native_group_norm", "layer_norm": "native_layer_norm",
    "log_softmax": "_log_softmax", "mse_loss": "mse_loss", "rms_norm": "_fused_rms_norm", "softmax": "_softmax",
}  # fmt: skip
"""Norms, softmax and losses, which autocast's tables keep in fp32 for caution. Each is mapped to the operator that it calls
below autocast."""


def with_operators_as_is(plan: Plan, used: Iterable[str], device_type: str) -> Plan | None:
    """Return a bf16 or fp16 plan in which norms, softmax and losses keep the dtype of their inputs, without a cast to fp32.

    Return None if the plan is not in such a format or does not use torch.autocast's own table. Return None too if that table
    casts none of the operators that the model uses.
    """
    if plan.compute not in LOW or plan.rules != "native":
        return None
    seen = set(used)
    table = base_table("native", device_type)
    named = {op for op, _ in plan.ops}
    ops = [
        (op, "as_is")
        for op, below in _MADE_OF.items()
        if below in seen and op in table and table[op].rule == "fp32" and op not in named
    ]
    return dataclasses.replace(plan, ops=(*plan.ops, *ops)) if ops else None


def complexity(plan: Plan, served: str = "") -> float:
    """Return how complicated a plan is for a reader; 0 for fp32. Of equally good plans a search chooses the simplest.

    Extra regions and operator overrides count most. A low format, low storage and compiling count less; compiling changes no
    gradients, but takes time at each start. The memory format, the fused optimizer and kept host memory count almost nothing.

    ``served`` is the format in which a model is stored that is not trained any more; empty for a training. Such a model loses no
    updates, so low storage adds nothing: a model that is low as a whole is simpler than one with casts between its operators,
    and simplest is a model that stays in its format.
    """
    usual = next(
        (p.regions for p in PRESETS.values() if (p.compute, p.params) == (plan.compute, plan.params)), ()
    )
    apart = set(plan.regions).difference(usual)
    out = 2.0 * (plan.compute != (served or "fp32")) + (plan.compute == "fp16")
    low = plan.params != "fp32"
    out += plan.autocasts if served else 2.0 * low + (low and plan.master == "none")
    out += plan.rules not in ("native", "none")
    out += (plan.fp32_matmul != "as_is") + (plan.fp32_conv not in ("as_is", plan.fp32_matmul))
    out += 2.0 * len(plan.ops)
    out += 4.0 + len(apart) if apart else 0.0
    out += plan.compile != "as_given"
    free = (plan.memory_format != "as_is", plan.optimizer != "as_given", plan.host_memory != "as_given")
    return out + 0.25 * sum(free)


def numerics_of(plan: Plan) -> Plan:
    """Return the *numerics* of a plan: only the settings that affect gradients, with all others at their defaults.

    Two plans with the same numerics compute the same gradients. They may differ in memory format, optimizer kernel, host memory
    and compiling.
    """
    return dataclasses.replace(as_raced(plan), memory_format="as_is")


def storage_of(plan: Plan) -> tuple[str, str]:
    """Return the formats in which a plan stores parameters and masters."""
    return (plan.compute if plan.stores_low else "fp32", plan.master)


def uncompiled(plan: Plan) -> Plan:
    """Return the same plan without compiling."""
    return dataclasses.replace(plan, compile="as_given")


def as_trained(plan: Plan) -> Plan:
    """Return the plan without the settings that do not affect training: compiling, and keeping freed host memory."""
    return dataclasses.replace(plan, compile="as_given", host_memory="as_given")


def as_raced(plan: Plan) -> Plan:
    """Return the plan as it runs in the race, where all plans share a process.

    It is not compiled, uses the optimizer kernel that the user gave, and does not keep freed host memory.
    """
    return dataclasses.replace(as_trained(plan), optimizer="as_given")


def run_with(plan: Plan, how: Plan) -> Plan:
    """Return a plan with another plan's optimizer kernel and host memory; neither changes gradients."""
    return dataclasses.replace(plan, optimizer=how.optimizer, host_memory=how.host_memory)


def name_of(plan: Plan) -> str:
    """Return the preset's name if the plan is a preset, else the plan's line."""
    return next((name for name, preset in PRESETS.items() if preset == plan), str(plan))
