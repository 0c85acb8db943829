"""Plan: the whole precision decision of a training run as one frozen value.

A plan is plain data. It is hashable, prints as one line that :meth:`Plan.parse` reads back, round-trips through
JSON and has a digest that is the same in every process. What it says is carried out elsewhere.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import quote, unquote

import torch

from castwise.errors import PlanError, UnknownNameError
from castwise.formats import FORMATS, LOW, Format, get_format
from castwise.rules import BASES, check_rule

__all__ = ["PRESETS", "LossScale", "Plan", "Region", "as_plan"]

_REGION_FORMATS: Final = ("fp64", "fp32", "bf16", "fp16")
_FP32_MODES: Final = ("as_is", "ieee", "tf32", "bf16")


def _close(value: object, options: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(value), list(options), n=2)
    return f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""


def _one_of(call: str, value: object, allowed: tuple[str, ...]) -> str:
    """``value`` if it is allowed, else the error that every field of a fixed choice shares."""
    if not isinstance(value, str) or value not in allowed:
        raise PlanError(
            f"{call}={value!r}: not allowed{_close(value, allowed)}. Allowed: {', '.join(allowed)}."
        )
    return value


def _format_name(call: str, value: object, allowed: tuple[str, ...]) -> str:
    """The name of a format that was given by name or by dtype."""
    if isinstance(value, (torch.dtype, Format)) or (isinstance(value, str) and value not in allowed):
        try:
            value = get_format(value).name
        except UnknownNameError:
            pass  # _one_of says it better: it knows the field and which formats it takes
    return _one_of(call, value, allowed)


@dataclass(frozen=True)
class Region:
    """A part of a model with a format of its own.

    Attributes:
        pattern: Glob over module paths (``encoder.layers.*.norm``), or ``type:`` and a glob over the names of a
            module's class and its bases (``type:BatchNorm*``).
        compute: Format the region runs in, whatever surrounds it: fp64, fp32, bf16, fp16, or None for the plan's.
        params: Format its parameters are stored in: the same choice.

    Raises:
        PlanError: An empty pattern, a format that a region cannot have, or neither format given.
    """

    pattern: str
    compute: str | None = None
    params: str | None = None

    def __post_init__(self) -> None:
        call = f"Region({self.pattern!r})"
        if not isinstance(self.pattern, str) or not self.pattern.removeprefix("type:"):
            raise PlanError(
                f"{call}: the pattern is empty. Allowed: a glob over module paths such as 'encoder.*.norm', or 'type:' "
                "and a glob over class names such as 'type:BatchNorm*'."
            )
        for name in ("compute", "params"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _format_name(f"{call}: {name}", value, _REGION_FORMATS))
        if self.compute is None and self.params is None:
            raise PlanError(
                f"{call}: neither compute nor params is given. Give one of {', '.join(_REGION_FORMATS)} for at least one."
            )

    @property
    def is_type(self) -> bool:
        """Whether the pattern is matched against class names instead of module paths."""
        return self.pattern.startswith("type:")

    @property
    def glob(self) -> str:
        """The pattern without its ``type:``."""
        return self.pattern.removeprefix("type:")


@dataclass(frozen=True)
class LossScale:
    """How the loss is scaled to keep fp16 gradients out of underflow.

    The defaults are those of ``torch.amp.GradScaler``, with one difference: a floor. torch lets the scale fall
    to zero, where it stays and training silently stops; at the floor castwise says so instead.

    Attributes:
        init: First scale.
        growth: Factor on the scale after ``interval`` steps with finite gradients, > 1.
        backoff: Factor on the scale after a step with non-finite gradients, between 0 and 1.
        interval: Steps with finite gradients before the scale grows.
        hysteresis: Steps with non-finite gradients before the scale shrinks; 1 shrinks at once.
        floor: Smallest scale, or None. The default is fp16's smallest normal number: a scale below it would
            push even a gradient of 1 out of fp16's full precision.
        ceiling: Largest scale, or None.
        dynamic: False keeps ``init`` throughout.

    Raises:
        PlanError: A number out of its range.
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
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise PlanError(f"LossScale({name}={value!r}): not a number. Allowed: {self._range(name)}.")
            # 2**16 and 65536.0 are one plan with one digest.
            object.__setattr__(self, name, float(value))
            if not math.isfinite(value) or value <= 0:
                raise PlanError(f"LossScale({name}={value!r}): out of range. Allowed: {self._range(name)}.")
        for name in ("interval", "hysteresis"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise PlanError(f"LossScale({name}={value!r}): out of range. Allowed: {self._range(name)}.")
        if not isinstance(self.dynamic, bool):
            raise PlanError(f"LossScale(dynamic={self.dynamic!r}): not allowed. Allowed: True, False.")
        for name, good in (
            ("growth", self.growth > 1),
            ("backoff", self.backoff < 1),
            ("floor", self.floor is None or self.floor <= self.init),
            ("ceiling", self.ceiling is None or self.ceiling >= self.init),
        ):
            if not good:
                raise PlanError(
                    f"LossScale({name}={getattr(self, name)!r}): out of range. Allowed: {self._range(name)}."
                )

    def _range(self, name: str) -> str:
        return {
            "init": "a finite number > 0",
            "growth": "a finite number > 1",
            "backoff": "a number between 0 and 1",
            "interval": "a whole number of steps >= 1",
            "hysteresis": "a whole number of steps >= 1",
            "floor": f"None, or a number > 0 and at most init={self.init!r}",
            "ceiling": f"None, or a finite number of at least init={self.init!r}",
        }[name]


class _Record(Mapping[str, Any]):
    """A read-only mapping of JSON values, nested ones frozen too: what a plan keeps of its provenance."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = {str(key): _freeze(value) for key, value in items.items()}

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(_thaw(self))


def _freeze(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _Record(value)
    return tuple(map(_freeze, value)) if isinstance(value, (list, tuple)) else value


def _thaw(value: Any) -> Any:
    """Plain JSON values of a field: mappings as dicts, tuples as lists."""
    if isinstance(value, (Region, LossScale)):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _thaw(item) for key, item in value.items()}
    return [_thaw(item) for item in value] if isinstance(value, (list, tuple)) else value


def _choice(default: str, *allowed: str) -> Any:
    return field(default=default, metadata={"allowed": allowed})


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The whole precision decision of a training run.

    Two plans that decide the same are equal, hash alike and have one digest, whoever measured them:
    ``provenance`` takes no part in that and is not printed.

    Attributes:
        compute: What ``lower`` operators run in: fp32, bf16 or fp16 (a dtype is taken too).
        params: How the model stores its parameters: ``fp32``, or ``compute`` for the compute format, which also
            casts floating inputs to it.
        master: ``fp32``: the optimizer works on fp32 copies of the parameters that are stored low. ``none``: it
            works on them directly.
        regions: Parts with formats of their own; the last that matches a module wins. A list, or a mapping from
            pattern to compute format or to Region's fields, is taken too.
        rules: Base table of operator rules, one of `castwise.rules.BASES`; ``none`` casts no operator.
        ops: Pairs of operator and rule on top of the base table, sorted. A list or a mapping is taken too. That
            the operators exist is checked where the plan is carried out, because their libraries may be
            imported later.
        fp32_matmul: What fp32 matrix products may use inside: ``as_is`` (the process's setting), ieee, tf32, bf16.
        fp32_conv: The same for convolutions.
        memory_format: ``as_is`` or ``channels_last``.
        optimizer: ``as_given`` or ``fused``.
        output: Format of a prepared model's floating outputs: ``fp32`` or ``as_is``.
        loss_scale: How the loss is scaled, or None. Any compute format may have one.
        provenance: Who measured the plan, on what, with which result: any mapping of JSON values.

    Raises:
        PlanError: A value that its field does not take, or fields that contradict one another.
    """

    compute: str = field(default="bf16", metadata={"formats": ("fp32", *LOW)})
    params: str = _choice("fp32", "fp32", "compute")
    master: str = _choice("fp32", "fp32", "none")
    regions: tuple[Region, ...] = ()
    rules: str = _choice("native", *BASES)
    ops: tuple[tuple[str, str], ...] = ()
    fp32_matmul: str = _choice("as_is", *_FP32_MODES)
    fp32_conv: str = _choice("as_is", *_FP32_MODES)
    memory_format: str = _choice("as_is", "as_is", "channels_last")
    optimizer: str = _choice("as_given", "as_given", "fused")
    output: str = _choice("fp32", "fp32", "as_is")
    loss_scale: LossScale | None = None
    provenance: Mapping[str, Any] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if "formats" in f.metadata:
                value = _format_name(f"Plan: {f.name}", value, f.metadata["formats"])
            elif "allowed" in f.metadata:
                value = _one_of(f"Plan: {f.name}", value, f.metadata["allowed"])
            elif f.name == "regions":
                value = _regions(value)
            elif f.name == "ops":
                value = _ops(value)
            elif f.name == "loss_scale" and value is not None:
                value = (
                    value if isinstance(value, LossScale) else _from_mapping(LossScale, value, "loss_scale")
                )
            elif f.name == "provenance" and value is not None:
                value = _provenance(value)
            object.__setattr__(self, f.name, value)
        self._check_together()

    def _check_together(self) -> None:
        low_region = any(region.params in LOW for region in self.regions)
        if self.master == "none" and not (self.stores_low or low_region):
            raise PlanError(
                f"Plan: master='none' with params={self.params!r} and compute={self.compute!r}: no parameter is stored low, "
                "so there is no fp32 copy to leave out. Use master='fp32', which then keeps nothing twice, or "
                "params='compute' with compute bf16 or fp16."
            )
        if self.ops and not (self.compute in LOW or any(region.compute in LOW for region in self.regions)):
            raise PlanError(
                f"Plan: ops={self.ops!r} with compute='fp32': operators are only cast where something computes in bf16 or "
                "fp16. Use compute='bf16' or 'fp16', or leave ops out."
            )
        if self.compute in LOW and self.params == "fp32" and not (self.autocasts or self.regions):
            raise PlanError(
                f"Plan: compute={self.compute!r} with params='fp32', rules='none' and no ops: nothing would run in "
                f"{self.compute}. Use rules='native' (or cuda, apex), params='compute', or compute='fp32'."
            )

    # --- what a plan amounts to ------------------------------------------------------------------------------

    @property
    def compute_dtype(self) -> torch.dtype:
        """The compute format as a torch dtype."""
        return FORMATS[self.compute].dtype

    @property
    def stores_low(self) -> bool:
        """Whether the model's parameters are stored in bf16 or fp16 (outside regions that say otherwise)."""
        return self.params == "compute" and self.compute in LOW

    @property
    def keeps_masters(self) -> bool:
        """Whether the optimizer keeps fp32 masters of parameters stored low, in the model or in a region."""
        return self.master == "fp32" and (
            self.stores_low or any(region.params in LOW for region in self.regions)
        )

    @property
    def autocasts(self) -> bool:
        """Whether operators are cast by rule in the plan's own compute format."""
        return self.compute in LOW and (self.rules != "none" or bool(self.ops))

    @property
    def formats(self) -> frozenset[str]:
        """Names of the formats that something computes in: the plan's and its regions'."""
        return frozenset({self.compute, *(region.compute for region in self.regions if region.compute)})

    def summary(self) -> str:
        """The plan in a sentence, for reports and messages."""
        how = {
            "native": "by torch.autocast's own rules",
            "cuda": "by CUDA's rules",
            "apex": "by Apex O1's rules",
            "none": "by no rules but its own",
        }[self.rules]
        parts = [f"computes in {self.compute}"]
        if self.autocasts:
            parts[0] = f"autocasts to {self.compute} {how}"
            if self.ops:
                parts[0] += f" with {len(self.ops)} operator{'s' * (len(self.ops) > 1)} of its own"
        if self.stores_low:
            masters = "fp32 masters in the optimizer" if self.keeps_masters else "no masters"
            parts.append(f"stores parameters in {self.compute} with {masters}")
        else:
            parts.append("stores parameters in fp32")
        if self.regions:
            parts.append(
                f"has {len(self.regions)} region{'s' * (len(self.regions) > 1)} with formats of their own"
            )
        modes = {"products": self.fp32_matmul, "convolutions": self.fp32_conv}
        parts += [f"lets fp32 {what} use {mode}" for what, mode in modes.items() if mode != "as_is"]
        if self.memory_format != "as_is":
            parts.append(f"lays tensors out {self.memory_format}")
        if self.optimizer == "fused":
            parts.append("uses the fused optimizer")
        if self.output == "as_is":
            parts.append("returns outputs as they come")
        if self.loss_scale is not None:
            kind = "scales the loss from" if self.loss_scale.dynamic else "scales the loss by"
            parts.append(f"{kind} {self.loss_scale.init:g}")
        return ", ".join(parts[:-1]) + " and " + parts[-1] + "."

    # --- names and text --------------------------------------------------------------------------------------

    @classmethod
    def preset(cls, name: str) -> Plan:
        """The preset of that name, see `PRESETS`.

        Raises:
            UnknownNameError: No such preset.
        """
        try:
            return PRESETS[name]
        except (KeyError, TypeError):
            raise UnknownNameError(
                f"Plan.preset({name!r}): no such preset{_close(name, PRESETS)}. Allowed: {', '.join(PRESETS)}, or the path "
                "of a plan.json."
            ) from None

    def __str__(self) -> str:
        candidates = [(_items(self, base), name) for name, base in PRESETS.items() if _extends(self, base)]
        items, name = min(candidates, key=lambda candidate: len(candidate[0]))
        return "+".join([name, *items])

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Read a plan back from its one-line form.

        The form is a preset name and then any number of ``+field=value``: ``bf16-mixed+output=as_is``,
        ``bf16-mixed+ops.exp=fp32``, ``bf16-mixed+regions.encoder.*.norm=fp32``,
        ``bf16-true+regions.type:BatchNorm*=params:fp32``, ``fp16-mixed+loss_scale.interval=1000``. In module
        patterns any character outside ``A-Za-z0-9_.*?[]!:/-`` is written as ``%XX``, as in a URL; so the line never
        holds a comma or a blank. ``bf16`` and ``fp16`` alone mean autocasting to them.

        Args:
            text: Such as ``str(plan)`` gives.

        Returns:
            The plan, without provenance.

        Raises:
            UnknownNameError: No such preset or field.
            PlanError: A malformed line or a value that its field does not take.
        """
        if not isinstance(text, str):
            raise PlanError(
                f"Plan.parse({text!r}): not a string. Give a preset name or what str(plan) gives."
            )
        base, *items = text.strip().split("+")
        plan = PRESETS.get(f"{base}-mixed", None) if base in LOW else None
        changes: dict[str, Any] = {}
        plan = cls.preset(base) if plan is None else plan
        for item in items:
            _apply(plan, changes, item, text)
        return dataclasses.replace(plan, **changes)

    # --- JSON ------------------------------------------------------------------------------------------------

    def _canonical(self) -> str:
        values = {f.name: _thaw(getattr(self, f.name)) for f in dataclasses.fields(self) if f.compare}
        return json.dumps(values, sort_keys=True, separators=(",", ":"))

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hex, of the plan's canonical JSON without provenance: the same in every process."""
        return hashlib.sha256(self._canonical().encode()).hexdigest()

    def to_json(self) -> str:
        """The plan as JSON text, provenance included."""
        values = {f.name: _thaw(getattr(self, f.name)) for f in dataclasses.fields(self)}
        return json.dumps(values, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan from JSON text; fields that it leaves out keep their defaults.

        Raises:
            UnknownNameError: A key that no plan, region or loss scale has.
            PlanError: Malformed JSON, or a value that its field does not take.
        """
        return cls._from_json(text, "Plan.from_json")

    @classmethod
    def _from_json(cls, text: str, call: str) -> Plan:
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(
                f"{call}: not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}. Mend it there, or write "
                "the file anew with plan.save(path)."
            ) from None
        try:
            return _from_mapping(cls, values, "a plan")
        except PlanError as error:
            raise type(error)(f"{call}: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, provenance included.

        Raises:
            OSError: The file cannot be written.
        """
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan from a file that :meth:`save` wrote or a hand did.

        Raises:
            UnknownNameError: A key that no plan, region or loss scale has.
            PlanError: A file that cannot be read, malformed JSON, or a value that its field does not take.
        """
        call = f"Plan.load({str(path)!r})"
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise PlanError(
                f"{call}: cannot be read: {why}. Give the path of a file that plan.save(path) wrote."
            ) from None
        return cls._from_json(text, call)


def _from_mapping(cls: Any, values: object, what: str) -> Any:
    """A Plan, Region or LossScale from JSON values, refusing keys that it does not have."""
    names = [f.name for f in dataclasses.fields(cls)]
    if not isinstance(values, Mapping):
        raise PlanError(f"{what}: {values!r} is not a mapping. Allowed: a mapping with {', '.join(names)}.")
    for key in values:
        if key not in names:
            raise UnknownNameError(
                f"{what}: unknown field {key!r}{_close(key, names)}. Allowed: {', '.join(names)}."
            )
    if cls is Region and "pattern" not in values:
        raise PlanError(
            f"{what}: {dict(values)!r} has no pattern. Give one, such as 'encoder.*.norm' or 'type:BatchNorm*'."
        )
    return cls(**values)


def _regions(value: object) -> tuple[Region, ...]:
    if isinstance(value, Mapping):
        value = [
            {"pattern": pattern, **format} if isinstance(format, Mapping) else Region(pattern, compute=format)
            for pattern, format in value.items()
        ]
    if not isinstance(value, (list, tuple)):
        raise PlanError(
            f"Plan: regions={value!r}: not allowed. Allowed: a sequence of Region, or a mapping by pattern."
        )
    return tuple(
        item if isinstance(item, Region) else _from_mapping(Region, item, "Plan: regions") for item in value
    )


def _ops(value: object) -> tuple[tuple[str, str], ...]:
    if isinstance(value, Mapping):
        value = list(value.items())
    if not isinstance(value, (list, tuple)):
        raise PlanError(
            f"Plan: ops={value!r}: not allowed. Allowed: pairs of operator and rule, or a mapping."
        )
    rules: dict[str, str] = {}
    for pair in value:
        if not (isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(x, str) for x in pair)):
            raise PlanError(f"Plan: ops has {pair!r}: not allowed. Allowed: a pair such as ('exp', 'fp32').")
        op, rule = pair
        check_rule(op, rule)
        op = op.removeprefix("aten::")
        if rules.setdefault(op, rule) != rule:
            raise PlanError(
                f"Plan: ops gives {op!r} two rules, {rules[op]!r} and {rule!r}. Keep one of them."
            )
    return tuple(sorted(rules.items()))


def _provenance(value: object) -> _Record:
    if not isinstance(value, Mapping):
        raise PlanError(f"Plan: provenance={value!r}: not allowed. Allowed: a mapping of JSON values.")
    _check_json(value, "provenance")
    return _Record(value)


def _check_json(value: object, path: str) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise PlanError(
                    f"Plan: {path} has the key {key!r}, which JSON cannot hold. Allowed: strings."
                )
            _check_json(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_json(item, f"{path}[{index}]")
    elif not (value is None or isinstance(value, (str, int, float))) or (
        isinstance(value, float) and not math.isfinite(value)
    ):
        raise PlanError(
            f"Plan: {path}={value!r} is nothing JSON can hold. Allowed: strings, finite numbers, True, False, None, and "
            "lists and mappings of them; write the rest as a string."
        )


# --- the one-line form -----------------------------------------------------------------------------------------

_PATTERN_SAFE: Final = ".*?[]!:/-_"


def _extends(plan: Plan, base: Plan) -> bool:
    """Whether the items of the one-line form can make ``plan`` of ``base``: they only ever add regions."""
    return plan.regions[: len(base.regions)] == base.regions


def _items(plan: Plan, base: Plan) -> list[str]:
    """What to write after the name of ``base`` to get ``plan``."""
    items: list[str] = []
    for f in dataclasses.fields(plan):
        value, before = getattr(plan, f.name), getattr(base, f.name)
        if value == before or not f.compare:
            continue
        if f.name == "regions":
            items += map(_region_item, value[len(before) :])
        elif f.name == "ops":
            items += [f"ops.{op}={rule}" for op, rule in value]
        elif f.name == "loss_scale":
            items += _loss_scale_items(value, before)
        else:
            items.append(f"{f.name}={value}")
    return items


def _region_item(region: Region) -> str:
    formats = [f"{name}:{value}" for name in ("compute", "params") if (value := getattr(region, name))]
    text = "/".join(formats) if region.params else str(region.compute)
    return f"regions.{quote(region.pattern, safe=_PATTERN_SAFE, errors='surrogatepass')}={text}"


def _loss_scale_items(value: LossScale | None, before: LossScale | None) -> list[str]:
    if value is None:
        return ["loss_scale=none"]
    start = before or LossScale()
    if value == start:
        return ["loss_scale=default"]
    return [
        f"loss_scale.{f.name}={_number(getattr(value, f.name))}"
        for f in dataclasses.fields(value)
        if getattr(value, f.name) != getattr(start, f.name)
    ]


def _number(value: float | None) -> str:
    # "1e+20" would end the item at its plus sign.
    return "none" if value is None else str(value).lower().replace("e+", "e").removesuffix(".0")


def _apply(plan: Plan, changes: dict[str, Any], item: str, text: str) -> None:
    """Add what one ``field=value`` of the one-line form says to ``changes``."""
    call = f"Plan.parse({text!r})"
    name, equals, value = item.rpartition("=")
    if not equals or not value:
        raise PlanError(
            f"{call}: {item!r} is not of the form field=value. Write for example bf16-mixed+ops.exp=fp32."
        )
    name, _, rest = name.partition(".")
    simple = [f.name for f in dataclasses.fields(plan) if f.metadata]

    def so_far(name: str) -> Any:
        return changes.get(name, getattr(plan, name))

    if name in simple and not rest:
        changes[name] = value
    elif name == "ops" and rest:
        changes["ops"] = (*(pair for pair in so_far("ops") if pair[0] != rest), (rest, value))
    elif name == "regions" and rest:
        formats = dict(part.split(":", 1) if ":" in part else ("compute", part) for part in value.split("/"))
        region = {"pattern": unquote(rest, errors="surrogatepass"), **formats}
        changes["regions"] = (*so_far("regions"), _from_mapping(Region, region, f"{call}: {item!r}"))
    elif name == "loss_scale" and not rest and value in ("none", "default"):
        changes["loss_scale"] = None if value == "none" else LossScale()
    elif name == "loss_scale" and rest:
        fields = _thaw(so_far("loss_scale") or LossScale())
        changes["loss_scale"] = fields | {rest: _read_number(value)}
    elif name == "loss_scale":
        raise PlanError(
            f"{call}: {item!r}: not allowed. Allowed: loss_scale=none, loss_scale=default, loss_scale.init=1024."
        )
    else:
        names = [*simple, "ops.OPERATOR", "regions.PATTERN", "loss_scale", "loss_scale.FIELD"]
        raise UnknownNameError(
            f"{call}: no field in {item!r}{_close(name, names)}. Allowed: {', '.join(names)}."
        )


def _read_number(value: str) -> Any:
    """None, a truth value or a number; what is none of these is left for LossScale to refuse."""
    words = {"none": None, "true": True, "false": False}
    if value in words:
        return words[value]
    if re.fullmatch(r"\d+", value):
        return int(value)
    try:
        return float(value)
    except ValueError:
        return value


def _presets() -> Iterator[tuple[str, Plan]]:
    batch_norm = (Region("type:_BatchNorm", params="fp32"),)
    yield "fp32", Plan(compute="fp32")
    yield "tf32", Plan(compute="fp32", fp32_matmul="tf32", fp32_conv="tf32")
    for low, scale in (("bf16", None), ("fp16", LossScale())):
        yield f"{low}-mixed", Plan(compute=low, loss_scale=scale)
        yield f"{low}-master", Plan(compute=low, params="compute", regions=batch_norm, loss_scale=scale)
        yield f"{low}-true", Plan(compute=low, params="compute", master="none", rules="none")
    apex = LossScale(ceiling=2.0**24)
    half = Plan(compute="fp16", params="compute", rules="none")
    yield "O0", Plan(compute="fp32")
    yield "O1", Plan(compute="fp16", rules="apex", loss_scale=apex)
    yield "O2", dataclasses.replace(half, regions=batch_norm, loss_scale=apex)
    yield "O3", dataclasses.replace(half, master="none")
    yield "naive", dataclasses.replace(half, loss_scale=LossScale(interval=1000, hysteresis=2))


PRESETS: Final[Mapping[str, Plan]] = MappingProxyType(dict(_presets()))
"""Every preset by name. ``O0`` is ``fp32`` and ``O3`` is ``fp16-true`` under Apex's names."""


def as_plan(value: Plan | str | os.PathLike[str] | torch.dtype) -> Plan:
    """A plan, from whatever a user may name one by.

    Args:
        value: A plan, a preset name or other text for `Plan.parse`, the path of a plan.json, or a format to
            autocast to, by name or dtype (``bf16`` and ``torch.bfloat16`` mean ``bf16-mixed``).

    Returns:
        The plan.

    Raises:
        UnknownNameError: No such preset, and no file of that name.
        PlanError: A value that names no plan, or a file that holds none.
    """
    if isinstance(value, Plan):
        return value
    if isinstance(value, torch.dtype):
        name = {torch.float32: "fp32", torch.bfloat16: "bf16-mixed", torch.float16: "fp16-mixed"}.get(value)
        if name is None:
            raise PlanError(
                f"as_plan({value!r}): no plan computes in it. Allowed: torch.float32, torch.bfloat16, torch.float16."
            )
        return PRESETS[name]
    if isinstance(value, os.PathLike):
        return Plan.load(value)
    if not isinstance(value, str):
        raise PlanError(
            f"as_plan({value!r}): a {type(value).__name__} names no plan. Allowed: a Plan, a preset name "
            f"({', '.join(PRESETS)}), the path of a plan.json, or a dtype."
        )
    if value.endswith(".json") or os.sep in value or Path(value).is_file():
        return Plan.load(value)
    if value in ("float32", "bfloat16", "float16"):
        return as_plan(get_format(value).dtype)
    return Plan.parse(value)
