"""Translates the options of Colossal-AI's three AMP modes to a :class:`castwise.Plan`.

The translation depends on nothing but the mode and its options. An option is accepted under its name in Colossal-AI's
documentation and under its name in Colossal-AI's code.
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
    """What an AMP mode and its options mean in castwise.

    Attributes:
        plan: The castwise plan, which says in which formats the model is stored and computed.
        mode: ``torch``, ``apex``, ``naive``, or ``none`` if the configuration asks for no AMP.
        covers_loss: Whether the criterion is cast under the plan too, as in Colossal-AI's mode.
        clip_grad_norm: The global norm to which gradients are clipped, or 0 for no clipping. Only the naive mode has this
            option.
        verbose: Whether a line is logged when a step is skipped.
        counts_zeros: Whether the naive optimizer's ``step`` also returns how many gradient elements are zero.
    """

    plan: Plan
    mode: str
    covers_loss: bool = False
    clip_grad_norm: float = 0.0
    verbose: bool = False
    counts_zeros: bool = False


def fp32_recipe() -> Recipe:
    """Return the recipe for training without AMP: nothing is cast. Gradient norms are still computed over all ranks."""
    return Recipe(Plan(compute="fp32", output="as_is"), "none")


def recipe_of(mode: Any, options: Mapping[str, Any] | None = None) -> Recipe:
    """Return the recipe for the configuration ``fp16 = dict(mode=mode, **options)``.

    The mode is a member of ``AMP_TYPE`` or the value of such a member.

    Raises:
        PlanError: There is no such mode, or the value of an option is not allowed.
        UnknownNameError: The mode has no option of a given name.
    """
    makers = {"torch": torch_recipe, "apex": apex_recipe, "naive": naive_recipe}
    name = getattr(mode, "value", mode)
    if name not in makers:
        raise PlanError(
            f"fp16 = dict(mode={mode!r}): not an AMP mode. Allowed: AMP_TYPE.TORCH, AMP_TYPE.APEX, AMP_TYPE.NAIVE."
        )
    return makers[name](dict(options or {}))


class _Options:
    """The options of an AMP mode. Reading an option removes it, so that unknown options are left at the end."""

    def __init__(self, mode: str, given: dict[str, Any]) -> None:
        self.mode = mode
        self.given = dict(given)
        self.known: list[str] = []

    def take(self, *names: str, default: Any = None) -> Any:
        """Remove an option and return its value. The option may be given under any of ``names``.

        Raises:
            PlanError: The option is given under two names with different values.
        """
        self.known += names
        found = {name: self.given.pop(name) for name in names if name in self.given}
        if len({repr(value) for value in found.values()}) > 1:
            raise PlanError(
                f"AMP_TYPE.{self.mode}: {' and '.join(f'{k}={v!r}' for k, v in found.items())} are two spellings of one "
                "option with different values; keep one of them."
            )
        return next(iter(found.values()), default)

    def done(self) -> None:
        """Raise UnknownNameError if options are left that were not read."""
        for name in self.given:
            close = difflib.get_close_matches(name, self.known, n=2)
            hint = f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""
            raise UnknownNameError(
                f"AMP_TYPE.{self.mode}: no option {name!r}{hint}. Allowed: {', '.join(self.known)}."
            )

    def low_format(self) -> str:
        """Read the option ``dtype``: the format of low-precision computation, ``fp16`` (the default) or ``bf16``."""
        return _format(f"AMP_TYPE.{self.mode}: dtype", self.take("dtype", default="fp16"), "fp16", "bf16")


def _format(option: str, value: Any, *allowed: str) -> str:
    """Return castwise's name of a format, which may be given as that name, as torch's name or as a dtype.

    Raises:
        PlanError: The format is not among ``allowed``.
    """
    with contextlib.suppress(PlanError):
        name = Plan(compute=value).compute
        if name in allowed:
            return name
    raise PlanError(f"{option}={value!r} is not allowed. Allowed: {', '.join(allowed)}.")


def torch_recipe(options: dict[str, Any]) -> Recipe:
    """Return the recipe of ``AMP_TYPE.TORCH``: autocast and a loss scale, as ``torch.amp`` does on CUDA.

    CUDA's lists of operators to cast are used on every device. ``enabled=False`` disables the loss scale but not autocast.
    castwise adds the option ``dtype``, which is fp16 or bf16.
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
    """Return the recipe of ``AMP_TYPE.NAIVE``: the whole model in fp16, with fp32 master weights and fp32 outputs.

    BatchNorm is in fp16 too. ``initial_scale`` is 2**16 by default, as in Colossal-AI's code; its documentation shows 2**32.
    castwise adds the option ``dtype``, which is fp16 or bf16.
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
    every = (
        Region("**", params=low),
    )  # buffers, such as BatchNorm's statistics, are stored low too, as in Colossal-AI
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
    """Return the recipe of ``AMP_TYPE.APEX``, whose options are the arguments of ``apex.amp.initialize``."""
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
    """Return the smallest allowed loss scale, which is ``value`` if that is given.

    Otherwise it is the smaller of castwise's default floor and the initial scale ``init``.
    Colossal-AI lets the scale fall to zero, after which every step is skipped.
    """
    if value:
        return float(value)
    return None if _FLOOR is None else min(_FLOOR, init)


def _boolean(name: str, value: Any) -> bool:
    if value in (True, "True"):
        return True
    if value in (None, False, "False"):
        return False
    raise PlanError(f"AMP_TYPE.APEX: {name}={value!r} is not allowed. Allowed: True, False, 'True', 'False'.")
