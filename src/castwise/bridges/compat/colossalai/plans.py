"""Translate the options of Colossal-AI's three AMP modes to castwise plans.

A pure function: a mode and a mapping of options in, a :class:`castwise.Plan` out. Options are accepted under the names
in Colossal-AI's documentation and those in its code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from castwise import LossScale, Plan, Region
from castwise.bridges.compat.apex.amp.properties import LEVELS, Properties
from castwise.errors import PlanError, UnknownNameError

__all__ = ["Recipe", "apex_recipe", "fp32_recipe", "naive_recipe", "recipe_of", "torch_recipe"]

_FLOOR: Final = LossScale().floor


@dataclass(frozen=True)
class Recipe:
    """The translation of a mode and its options.

    Attributes:
        plan: The plan.
        mode: ``torch``, ``apex``, ``naive``, or ``none`` if the configuration asks for no AMP.
        covers_loss: Whether the criterion runs under the plan too, as in the original mode.
        clip_grad_norm: Largest norm of the gradients, 0 for no clipping; an option of the naive mode.
        verbose: Log the scale when it changes.
        counts_zeros: The naive optimizer's ``step`` also returns how many gradient elements are zero.
    """

    plan: Plan
    mode: str
    covers_loss: bool = False
    clip_grad_norm: float = 0.0
    verbose: bool = False
    counts_zeros: bool = False


def fp32_recipe() -> Recipe:
    """No AMP: nothing is cast, and norms are still computed over all ranks."""
    return Recipe(Plan(compute="fp32", output="as_is"), "none")


def recipe_of(mode: Any, options: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe of ``fp16 = dict(mode=mode, **options)``; the mode is a member of ``AMP_TYPE`` or its value.

    Raises:
        PlanError: A mode or a value is not allowed.
        UnknownNameError: The mode does not have an option.
    """
    makers = {"torch": torch_recipe, "apex": apex_recipe, "naive": naive_recipe}
    name = getattr(mode, "value", mode)
    if name not in makers:
        raise PlanError(
            f"fp16 = dict(mode={mode!r}): not an AMP mode. Allowed: AMP_TYPE.TORCH, AMP_TYPE.APEX, AMP_TYPE.NAIVE."
        )
    return makers[name](dict(options or {}))


class _Options:
    """The options of one mode, removed one by one as they are read."""

    def __init__(self, mode: str, given: dict[str, Any]) -> None:
        self.mode = mode
        self.given = dict(given)
        self.known: list[str] = []

    def take(self, *names: str, default: Any = None) -> Any:
        """Remove and return the value of an option under any of its names; two names with different values are an error."""
        self.known += names
        found = {name: self.given.pop(name) for name in names if name in self.given}
        if len({repr(value) for value in found.values()}) > 1:
            raise PlanError(
                f"AMP_TYPE.{self.mode}: {' and '.join(f'{k}={v!r}' for k, v in found.items())} are two spellings of one "
                "option with different values; keep one of them."
            )
        return next(iter(found.values()), default)

    def done(self) -> None:
        """Refuse the options that are left."""
        for name in self.given:
            close = difflib.get_close_matches(name, self.known, n=2)
            hint = f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""
            raise UnknownNameError(
                f"AMP_TYPE.{self.mode}: no option {name!r}{hint}. Allowed: {', '.join(self.known)}."
            )

    def low_format(self) -> str:
        """The format to use instead of fp16, if the user names one."""
        return _format(f"AMP_TYPE.{self.mode}: dtype", self.take("dtype", default="fp16"), "fp16", "bf16")


def _format(option: str, value: Any, *allowed: str) -> str:
    """A plan's name for a format that is given by that name, by torch's name or by dtype."""
    with contextlib.suppress(PlanError):
        name = Plan(compute=value).compute
        if name in allowed:
            return name
    raise PlanError(f"{option}={value!r} is not allowed. Allowed: {', '.join(allowed)}.")


def torch_recipe(options: dict[str, Any]) -> Recipe:
    """``AMP_TYPE.TORCH``: CUDA's autocast lists, on every device, and torch's scaler.

    ``enabled=False`` disables scaling but not autocast; ``dtype`` (fp16 or bf16) is an addition of castwise.
    """
    given = _Options("TORCH", options)
    init = float(given.take("init_scale", default=2.0**16))
    scale = LossScale(
        init=init,
        growth=given.take("growth_factor", default=2.0),
        backoff=given.take("backoff_factor", default=0.5),
        interval=given.take("growth_interval", default=2000),
        floor=_floor(None, init),
    )
    enabled = given.take("enabled", default=True)
    low = given.low_format()
    given.done()
    plan = Plan(compute=low, rules="cuda", output="as_is", loss_scale=scale if enabled else None)
    return Recipe(plan, "torch", covers_loss=True)


def naive_recipe(options: dict[str, Any]) -> Recipe:
    """``AMP_TYPE.NAIVE``: everything in fp16, BatchNorm too, with fp32 masters and outputs.

    ``initial_scale`` is 2**16 by default, as in the code; the documentation shows 2**32. ``dtype`` (fp16 or bf16) is
    an addition of castwise.
    """
    given = _Options("NAIVE", options)
    init = float(given.take("initial_scale", "init_scale", default=2.0**16))
    scale = LossScale(
        init=init,
        growth=given.take("growth_factor", default=2.0),
        backoff=given.take("backoff_factor", default=0.5),
        interval=given.take("growth_interval", default=1000),
        hysteresis=max(1, given.take("hysteresis", "hysterisis", default=2)),
        floor=_floor(given.take("min_scale"), init),
        ceiling=given.take("max_scale") or None,
        dynamic=bool(given.take("dynamic_grad_scale", default=True)),
    )
    low = given.low_format()
    every = (Region("**", params=low),)  # buffers and statistics included, as in the original
    recipe = Recipe(
        dataclasses.replace(Plan.preset("naive"), compute=low, loss_scale=scale, regions=every),
        "naive",
        clip_grad_norm=float(given.take("clip_grad_norm", "clip_grad", default=0.0) or 0.0),
        verbose=bool(given.take("verbose", default=False)),
        counts_zeros=bool(given.take("log_num_zeros_in_grad", default=False)),
    )
    given.done()
    return recipe


_CASTS: Final = ("fp32", "fp16", "bf16")


def apex_recipe(options: dict[str, Any]) -> Recipe:
    """``AMP_TYPE.APEX``: the keywords of ``apex.amp.initialize``."""
    given = _Options("APEX", options)
    level = given.take("opt_level", default="O1")
    if level not in LEVELS:
        raise PlanError(
            f"AMP_TYPE.APEX: opt_level={level!r} is not allowed. Allowed: {', '.join(sorted(LEVELS))}, with the letter O and not "
            "the digit zero."
        )
    enabled = given.take("enabled", default=True)
    properties = Properties()
    properties.set_level(level)
    chosen = properties.options
    for name, default in chosen.items():
        if name not in ("enabled", "opt_level"):
            value = given.take(name)
            chosen[name] = default if value is None else value
    outputs = given.take("cast_model_outputs")
    given.take("num_losses")
    verbose = given.take("verbosity", default=1) > 0
    scale = _apex_scale(
        chosen["loss_scale"], given.take("min_loss_scale"), given.take("max_loss_scale", default=2.0**24)
    )
    given.done()
    if not enabled:
        return Recipe(fp32_recipe().plan, "apex")
    plan = _apex_plan(level, chosen, scale, outputs)
    return Recipe(plan, "apex", covers_loss=plan.autocasts, verbose=verbose)


def _apex_plan(level: str, chosen: dict[str, Any], scale: LossScale | None, outputs: Any) -> Plan:
    kept = _boolean("keep_batchnorm_fp32", chosen["keep_batchnorm_fp32"])
    cast = chosen["cast_model_type"]
    low = "fp32" if cast in (None, False) else _format("AMP_TYPE.APEX: cast_model_type", cast, *_CASTS)
    if chosen["patch_torch_functions"]:
        for name in ("keep_batchnorm_fp32", "master_weights"):
            if chosen[name] is not None:
                raise PlanError(
                    f"AMP_TYPE.APEX: {name}={chosen[name]!r} is not allowed with patch_torch_functions=True, which "
                    f"keeps the model's weights in fp32. Leave {name} out, or use opt_level='O2'."
                )
        if level != "O1" or low == "fp16":
            raise PlanError(
                f"AMP_TYPE.APEX: opt_level={level!r}, cast_model_type={cast!r} with patch_torch_functions=True: functions are "
                f"cast (O1) or the model is cast (O0, O2, O3), not both. Use opt_level='O1' without "
                "cast_model_type, or leave patch_torch_functions out."
            )
        return Plan(compute="fp16" if low == "fp32" else low, rules="apex", output="as_is", loss_scale=scale)
    if low == "fp32":
        return Plan(compute="fp32", loss_scale=scale)
    outputs = (
        "fp32"
        if outputs is None
        else _format("AMP_TYPE.APEX: cast_model_outputs", outputs, "None", "fp32", low)
    )
    return Plan(
        compute=low,
        params="compute",
        rules="none",
        master="fp32" if chosen["master_weights"] else "none",
        regions=(Region("**", params=low), *((Region("type:_BatchNorm", params="fp32"),) if kept else ())),
        output="fp32" if outputs == "fp32" else "as_is",
        loss_scale=scale,
    )


def _apex_scale(value: Any, smallest: Any, largest: Any) -> LossScale | None:
    if value != "dynamic":
        return None if float(value) == 1.0 else LossScale(init=float(value), floor=None, dynamic=False)
    ceiling = float(largest)
    init = min(ceiling, 2.0**16)
    if smallest is not None:
        init = max(init, float(smallest))
    return LossScale(init=init, floor=_floor(smallest, init), ceiling=ceiling)


def _floor(value: Any, init: float) -> float | None:
    """The floor of castwise; the originals let the scale fall to zero, after which every step is skipped."""
    if value:
        return float(value)
    return None if _FLOOR is None else min(_FLOOR, init)


def _boolean(name: str, value: Any) -> bool:
    if value in (True, "True"):
        return True
    if value in (None, False, "False"):
        return False
    raise PlanError(f"AMP_TYPE.APEX: {name}={value!r} is not allowed. Allowed: True, False, 'True', 'False'.")
