"""Define the parts of a plan: its regions, its loss scale, and its provenance."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import torch

from castwise.core.plans.formats import Format, get_format
from castwise.core.plans.text import LARGEST, close_matches, shown
from castwise.errors import PlanError, UnknownNameError

_REGION_FORMATS: Final = ("fp64", "fp32", "bf16", "fp16")
_LONGEST_PATTERN: Final = 1_000
_UNWRITTEN: Final = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_MOST_STEPS: Final = 2**63 - 1
"""The largest number of steps that a tensor on a device can count."""


@dataclass(frozen=True)
class Region:
    """A part of a model for which a plan sets a format of its own, such as all norm layers in fp32.

    Pass regions in the field ``regions`` of a :class:`~castwise.Plan`::

        keep_norms = castwise.Region("encoder.layers.*.norm", compute="fp32")
        plan = castwise.Plan(compute="bf16", regions=(keep_norms,))

    Attributes:
        pattern: The modules that belong to the region, as a glob over module paths such as ``encoder.layers.*.norm``.
            ``*`` matches within one level of the path, and ``**`` matches across levels. A pattern that begins with
            ``type:``, such as ``type:BatchNorm*``, matches the names of a module's class and its base classes.
            Everything inside a matching module belongs to the region too, unless another region matches it.
        compute: The format in which the region computes: fp64, fp32, bf16 or fp16. A dtype is accepted too. The region
            uses it whatever the format of the surrounding modules is. None uses the format of the plan.
        params: The format in which the parameters of the region are stored: fp64, fp32, bf16 or fp16. A dtype is
            accepted too. With None, they are stored in the format ``compute`` of the region if the plan has
            ``params="compute"`` or ``rules="none"``, or if the region computes in fp64. Otherwise they stay fp32.

    Raises:
        PlanError: The pattern is empty, has more than 1,000 characters, or contains control characters. Or a format is
            not allowed for a region, or neither ``compute`` nor ``params`` is given.
    """

    pattern: str
    compute: str | None = None
    params: str | None = None

    def __post_init__(self) -> None:
        call = f"Region({shown(self.pattern)})"
        if isinstance(self.pattern, str) and len(self.pattern) > _LONGEST_PATTERN:
            raise PlanError(
                f"{call}: the pattern has {len(self.pattern):,} characters. Allowed: at most {_LONGEST_PATTERN:,}; write '*' or '**' "
                "for a part of it."
            )
        if not isinstance(self.pattern, str) or not self.glob:
            fault = "is empty" if isinstance(self.pattern, str) else "is not text"
            raise PlanError(
                f"{call}: the pattern {fault}. Allowed: a glob over module paths such as 'encoder.*.norm', "
                "or 'type:' and a glob over class names such as 'type:BatchNorm*'."
            )
        if _UNWRITTEN.search(self.pattern):
            raise PlanError(
                f"{call}: the pattern has a control character, such as NUL or the end of a line, or half a surrogate pair. "
                "Allowed: the characters of module names, '*', '?' and '.'; '?' stands for any single character except a dot."
            )
        for name in ("compute", "params"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, format_name(f"{call}: {name}", value, _REGION_FORMATS))
        if self.compute is None and self.params is None:
            raise PlanError(
                f"{call}: neither compute nor params is given. Give at least one of them as one of "
                f"{', '.join(_REGION_FORMATS)}."
            )

    @property
    def is_type(self) -> bool:
        """Whether the pattern is matched against class names instead of module paths."""
        return self.pattern.startswith("type:")

    @property
    def glob(self) -> str:
        """The pattern without the prefix ``type:``."""
        return self.pattern.removeprefix("type:")


@dataclass(frozen=True)
class LossScale:
    """Describes how the loss is scaled, so that fp16 gradients do not underflow.

    It is the field ``loss_scale`` of a :class:`~castwise.Plan`. Before the backward pass the loss is multiplied by the
    scale, and before the step the gradients are divided by it. A step whose gradients are infinite or NaN is skipped.

    The defaults are those of ``torch.amp.GradScaler``, except for ``floor``. In torch the scale can fall to zero, after
    which every step is skipped. In castwise an error is raised if gradients still overflow at the smallest allowed
    scale.

    Attributes:
        init: The first scale.
        growth: The factor, above 1, by which the scale grows after ``interval`` steps in a row with finite gradients.
        backoff: The factor, between 0 and 1, by which the scale shrinks after ``hysteresis`` steps with infinite or NaN
            gradients.
        interval: The number of steps in a row with finite gradients before the scale grows.
        hysteresis: The number of steps with infinite or NaN gradients before the scale shrinks. With 1, it shrinks at
            the first of these steps. The steps need not follow each other, and the count starts again only when the
            scale grows.
        floor: The smallest scale, or None for no limit. At the default of 2**-14, a gradient overflows only if it is
            above 1e9 (65504 * 2**14) before scaling. No scale can prevent that.
        ceiling: The largest scale, or None for no limit.
        dynamic: Whether the scale changes. With False it stays at ``init``.

    Raises:
        PlanError: A number is outside its range.
    """

    init: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    hysteresis: int = 1
    floor: float | None = 2.0**-14
    ceiling: float | None = None
    dynamic: bool = True

    def __post_init__(self) -> None:
        for name in ("init", "growth", "backoff", "floor", "ceiling"):
            value = getattr(self, name)
            if value is None and name in ("floor", "ceiling"):
                continue
            number = _finite(value)
            if number is None or number <= 0:
                raise self._error(name)
            # stored as a float, so that 2**16 and 65536.0 give equal plans with one digest
            object.__setattr__(self, name, number)
        for name in ("interval", "hysteresis"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_STEPS:
                raise self._error(name)
        for name, good in (
            ("growth", self.growth > 1),
            ("backoff", self.backoff < 1),
            ("floor", self.floor is None or self.floor <= self.init),
            ("ceiling", self.ceiling is None or self.ceiling >= self.init),
            ("dynamic", isinstance(self.dynamic, bool)),
        ):
            if not good:
                raise self._error(name)

    def _error(self, name: str) -> PlanError:
        allowed = {
            "init": "a finite number > 0",
            "growth": "a finite number > 1",
            "backoff": "a number > 0 and < 1",
            "interval": "a whole number of steps >= 1 and < 2**63",
            "hysteresis": "a whole number of steps >= 1 and < 2**63",
            "floor": f"None, or a number > 0 and at most init={shown(self.init)}",
            "ceiling": f"None, or a finite number of at least init={shown(self.init)}",
            "dynamic": "True, False",
        }
        return PlanError(
            f"LossScale({name}={shown(getattr(self, name))}) is not allowed. Allowed: {allowed[name]}."
        )


class FrozenMapping(Mapping[str, Any]):
    """A read-only, hashable mapping of JSON values; nested mappings and lists are frozen too.

    Raises:
        PlanError: A key or a value cannot be represented in JSON; the error names it by ``path``.
    """

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Any], path: str = "provenance") -> None:
        for key in items:
            if not isinstance(key, str):
                raise PlanError(
                    f"Plan: {path} has the key {shown(key)}, which cannot be a key in JSON. Allowed: strings."
                )
        self._items = {key: _freeze(value, f"{path}.{key}") for key, value in items.items()}

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(to_json(self))


def to_json(value: Any) -> Any:
    """Convert a field of a plan to values that ``json`` can write: mappings to dicts, and tuples to lists."""
    if isinstance(value, (Region, LossScale)):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    return [to_json(item) for item in value] if isinstance(value, tuple) else value


def from_mapping(cls: Any, values: object, what: str) -> Any:
    """Create a Plan, Region or LossScale from a mapping of its fields.

    Args:
        cls: The class to create.
        values: The mapping.
        what: How error messages call the mapping.

    Raises:
        UnknownNameError: A key is not a field.
        PlanError: ``values`` is not a mapping, a key is missing, or a value is not allowed for its field.
    """
    fields = dataclasses.fields(cls)
    names = [f.name for f in fields]
    if not isinstance(values, Mapping):
        raise PlanError(
            f"{what} {shown(values)} is not a mapping. Allowed: one with the keys {', '.join(names)}."
        )
    for key in values:
        if key not in names:
            raise UnknownNameError(
                f"{what} has no field {shown(key)}{close_matches(key, names)}. Allowed: {', '.join(names)}."
            )
    for f in fields:
        if f.default is dataclasses.MISSING and f.name not in values:
            raise PlanError(f"{what} {shown(dict(values))} has no {f.name}. Add it.")
    return cls(**values)


def one_of(call: str, value: object, allowed: tuple[str, ...]) -> str:
    """Return ``value`` if it is one of the allowed names.

    ``call`` names the field in the error, which has the same form for all fields with a fixed choice of values.

    Raises:
        PlanError: The value is not an allowed name.
    """
    if not isinstance(value, str) or value not in allowed:
        raise PlanError(
            f"{call}={shown(value)} is not allowed{close_matches(value, allowed)}. Allowed: {', '.join(allowed)}."
        )
    return value


def format_name(call: str, value: object, allowed: tuple[str, ...]) -> str:
    """Return the name of a format that is given by name or by dtype, if this format is allowed.

    Raises:
        PlanError: The format is not an allowed one.
    """
    if isinstance(value, (torch.dtype, Format, str)) and value not in allowed:
        # an unknown format is left to one_of, whose error names the field and its allowed formats
        with suppress(UnknownNameError):
            value = get_format(value).name
    return one_of(call, value, allowed)


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _freeze(value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        return FrozenMapping(value, path)
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(item, f"{path}[{index}]") for index, item in enumerate(value))
    if (
        value is None
        or isinstance(value, (str, bool))
        or (isinstance(value, int) and abs(value) < LARGEST)
        or (isinstance(value, float) and math.isfinite(value))
    ):
        return value
    raise PlanError(
        f"Plan: {path}={shown(value)} cannot be written as JSON. Allowed: strings, finite numbers of up to "
        "1,000 digits, True, False, None, and lists and mappings of them. Write anything else as a string."
    )
