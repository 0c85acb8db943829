"""Define the plan, which holds every decision about the precision of a training run in one frozen value.

A plan is plain data. It is hashable, prints as one line that :meth:`Plan.parse` reads back, round-trips through JSON,
and has a digest that is the same in every process. Other modules apply it to a model.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast

import torch

from castwise.core.plans.formats import FORMATS, LOW, get_format
from castwise.core.plans.line import read_line, write_line
from castwise.core.plans.parts import (
    FrozenMapping,
    LossScale,
    Region,
    format_name,
    from_mapping,
    one_of,
    to_json,
)
from castwise.core.plans.rules import BASES, check_rule
from castwise.core.plans.text import DEEPEST, close_matches, nested_deeper, read_json, shown
from castwise.core.schemas import PLAN_VERSION
from castwise.errors import PlanError, UnknownNameError

__all__ = ["PRESETS", "LossScale", "Plan", "Region", "as_plan"]

_LONGEST: Final = 1 << 24
"""The size in bytes of the largest file that is read: far more than any plan has, far less than memory."""
_FP32_MODES: Final = ("as_is", "ieee", "tf32", "bf16")
_COMPILE_MODES: Final = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""The modes of torch.compile, by torch's names."""


def _choice(default: str, *allowed: str) -> Any:
    return field(default=default, metadata={"allowed": allowed})


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All decisions about the precision of a training run, in one immutable object.

    A plan says in which numeric format operators compute, in which format parameters are stored, and whether the loss
    is scaled. Pass it to :class:`~castwise.Amp`. Start from a preset with :meth:`preset`, read a plan from text with
    :meth:`parse`, or set the fields directly::

        plan = castwise.Plan(compute="bf16", ops={"exp": "fp32"})
        amp = castwise.Amp(plan)

    Two plans are equal and have the same hash if all fields except ``provenance`` are equal. ``str(plan)`` is a
    one-line form that :meth:`parse` reads.

    An operator rule says how the floating inputs of an operator are cast before it runs. ``lower`` casts them to the
    format of the field ``compute``. ``fp32`` casts them to fp32, and ``widest`` to the widest format among them.
    ``as_is`` casts nothing. ``unfused`` casts as ``lower`` does and runs attention as separate operators. ``banned``
    raises an error.

    Attributes:
        compute: The format in which operators with the rule ``lower``, such as matrix products and convolutions,
            compute: ``fp32``, ``bf16`` or ``fp16``. A dtype is accepted too.
        params: The format in which the parameters of the model are stored. ``fp32`` stores them in fp32. ``compute``
            stores them in the format of the field ``compute``. If the plan casts no operators, ``compute`` also casts
            the floating inputs of the model to that format.
        master: Which weights the optimizer updates if parameters are stored in bf16 or fp16. ``fp32`` updates fp32
            copies of the parameters, called master weights. ``none`` updates the parameters directly.
        regions: The parts of the model that have formats of their own, as a tuple of ``Region`` objects. If several
            match a module, the last one applies. A list is accepted too, and so is a mapping from pattern to compute
            format or to a mapping of Region's fields.
        rules: The table from which operators get their rules: ``native``, ``cuda``, ``apex`` or ``none``. ``native``
            has the lists of ``torch.autocast`` for the current device, and ``cuda`` its lists for CUDA on any device.
            ``apex`` has the lists of Apex's level O1. With ``none``, operators are not cast.
        ops: Rules of single operators that replace those of the table, as sorted pairs of operator name and rule. A
            list or a mapping is accepted too. Whether the operators exist is checked when the plan is applied, since
            libraries with custom operators may be imported after the plan is created.
        fp32_matmul: The format that matrix products of fp32 tensors may use internally: ``as_is``, ``ieee``, ``tf32``
            or ``bf16``. ``as_is`` keeps the setting of the process.
        fp32_conv: The format that convolutions of fp32 tensors may use internally, with the same values as
            ``fp32_matmul``.
        memory_format: The memory format of 4-d parameters. ``as_is`` keeps it, and ``channels_last`` changes it.
        optimizer: ``as_given`` keeps the optimizer's kernel, and ``fused`` switches the optimizer to torch's fused
            kernel.
        compile: The mode of ``torch.compile`` with which a prepared model is compiled: ``default``,
            ``reduce-overhead``, ``max-autotune`` or ``max-autotune-no-cudagraphs``. ``as_given`` does not compile the
            model.
        host_memory: ``as_given``, or ``keep`` to let the process reuse the freed memory of host tensors instead of
            returning it to the system. ``keep`` is in effect while the plan is applied, and works only with glibc.
        output: The format of the floating outputs of a prepared model. ``fp32`` casts them to fp32, and ``as_is`` does
            not cast them.
        loss_scale: The ``LossScale`` that describes how the loss is scaled, or None to not scale it. It is allowed with
            every compute format. A mapping of its fields is accepted too.
        provenance: Notes on the origin of the plan, such as the hardware on which it was measured and the results. Any
            mapping of JSON values is accepted, or None.

    Raises:
        UnknownNameError: A rule, or a key of a mapping, does not exist.
        PlanError: A value is not allowed for its field, or two fields contradict each other.
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
    compile: str = field(
        default="as_given", metadata={"allowed": ("as_given", *_COMPILE_MODES), "later": True}
    )
    host_memory: str = field(default="as_given", metadata={"allowed": ("as_given", "keep"), "later": True})
    output: str = _choice("fp32", "fp32", "as_is")
    loss_scale: LossScale | None = None
    provenance: Mapping[str, Any] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Validate every field, and normalise equivalent spellings."""
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if "formats" in f.metadata:
                value = format_name(f"Plan: {f.name}", value, f.metadata["formats"])
            elif "allowed" in f.metadata:
                value = one_of(f"Plan: {f.name}", value, f.metadata["allowed"])
            elif f.name == "regions":
                value = _regions(value)
            elif f.name == "ops":
                value = _ops(value)
            elif f.name == "loss_scale" and not (value is None or isinstance(value, LossScale)):
                value = from_mapping(LossScale, value, "Plan: loss_scale")
            elif f.name == "provenance" and value is not None:
                if not isinstance(value, Mapping):
                    raise PlanError(
                        f"Plan: provenance={shown(value)} is not allowed. Allowed: None, a mapping."
                    )
                if nested_deeper(value, DEEPEST - 1):
                    raise PlanError(
                        f"Plan: provenance is nested more than {DEEPEST - 1} levels deep. Write the deeper levels as a string."
                    )
                value = FrozenMapping(value)
            object.__setattr__(self, f.name, value)
        self._check_together()

    def _check_together(self) -> None:
        """Raise if fields contradict each other, so that one of them would silently have no effect."""
        low_regions = [region for region in self.regions if region.params in LOW]
        if self.master == "none" and not (self.stores_low or low_regions):
            raise PlanError(
                f"Plan: master='none' with compute={self.compute!r} and params={self.params!r}: no parameter "
                "is stored low, so there is no fp32 copy to leave out. Use master='fp32', which makes no copy here, or "
                "params='compute' with compute bf16 or fp16."
            )
        if self.ops and self.formats.isdisjoint(LOW):
            raise PlanError(
                f"Plan: ops={shown(self.ops)} with compute='fp32': a plan that computes only in fp32 "
                "casts no operators. Use compute='bf16' or 'fp16', or leave ops out."
            )
        if self.compute in LOW and not (self.autocasts or self.stores_low or self.regions):
            raise PlanError(
                f"Plan: compute={self.compute!r} with params='fp32', rules='none' and no ops: nothing would "
                f"run in {self.compute}. Use rules native, cuda or apex, or params='compute', or "
                "compute='fp32'."
            )

    # --- properties derived from the fields -------------------------------------------------------------------

    @property
    def compute_dtype(self) -> torch.dtype:
        """The format of the field ``compute`` as a torch dtype."""
        return FORMATS[self.compute].dtype

    @property
    def stores_low(self) -> bool:
        """Whether the plan stores the parameters of the model in bf16 or fp16.

        A region with its own ``params`` may store its parameters in another format.
        """
        return self.params == "compute" and self.compute in LOW

    @property
    def keeps_masters(self) -> bool:
        """Whether the optimizer keeps fp32 copies of parameters, called master weights, and updates those.

        This is the case if ``master`` is ``fp32``, and the model or a region stores parameters in bf16 or fp16.
        """
        return self.master == "fp32" and (
            self.stores_low or any(region.params in LOW for region in self.regions)
        )

    @property
    def lacks_masters(self) -> bool:
        """Whether parameters of the model or of a region are stored in bf16 or fp16 without fp32 master weights."""
        return self.master == "none" and (
            self.stores_low or any(region.params in LOW for region in self.regions)
        )

    @property
    def autocasts(self) -> bool:
        """Whether operators outside all regions are cast to bf16 or fp16 by their rules."""
        return self.compute in LOW and (self.rules != "none" or bool(self.ops))

    @property
    def formats(self) -> frozenset[str]:
        """The names of the formats in which the plan and its regions compute."""
        return frozenset({self.compute, *(region.compute for region in self.regions if region.compute)})

    def summary(self) -> str:
        """Return one sentence that describes the plan, for reports and messages."""
        parts = [f"computes in {self.compute}"]
        if self.autocasts:
            whose = {"native": "torch.autocast's", "cuda": "CUDA's", "apex": "Apex O1's", "none": "no"}[
                self.rules
            ]
            parts = [f"autocasts to {self.compute} by {whose} rules"]
        if self.ops:
            parts[0] += f" and {len(self.ops)} operator rule{'s' * (len(self.ops) > 1)} of its own"
        if self.stores_low:
            masters = "fp32 masters" if self.keeps_masters else "no masters"
            parts.append(f"stores parameters in {self.compute} with {masters}")
        else:
            parts.append("stores parameters in fp32")
        if self.regions:
            parts.append(f"has other formats for {len(self.regions)} region{'s' * (len(self.regions) > 1)}")
        fp32_modes = {"products": self.fp32_matmul, "convolutions": self.fp32_conv}
        parts += [f"runs fp32 {what} in {mode}" for what, mode in fp32_modes.items() if mode != "as_is"]
        if self.memory_format != "as_is":
            parts.append(f"stores tensors as {self.memory_format}")
        if self.optimizer == "fused":
            parts.append("fuses the optimizer")
        if self.compile != "as_given":
            parts.append("compiles the model" + (f" ({self.compile})" if self.compile != "default" else ""))
        if self.host_memory == "keep":
            parts.append("keeps freed host memory")
        if self.output == "as_is":
            parts.append("returns outputs uncast")
        if self.loss_scale is not None:
            verb = "from" if self.loss_scale.dynamic else "always by"
            parts.append(f"scales the loss {verb} {self.loss_scale.init:g}")
        return f"{', '.join(parts[:-1])} and {parts[-1]}"

    # --- names and text -------------------------------------------------------------------------------------

    @classmethod
    def preset(cls, name: str) -> Plan:
        """Return a preset, which is a plan with a name such as ``bf16-mixed`` or ``fp16-master``.

        ``castwise.plans.plan.PRESETS`` contains all presets by name.

        Args:
            name: The name of the preset.

        Raises:
            UnknownNameError: There is no preset of this name. The message lists all names.
        """
        try:
            return PRESETS[name]
        except (KeyError, TypeError):
            raise UnknownNameError(
                f"Plan.preset({shown(name)}): no such preset{close_matches(name, PRESETS)}. Allowed: "
                f"{', '.join(PRESETS)}. Any other plan is named by the path of its plan.json."
            ) from None

    def __str__(self) -> str:
        """Write the plan as one line that :meth:`parse` reads back, in the grammar of `castwise.core.plans.line`."""
        return write_line(_values(self), _preset_values(), to_json(LossScale()))

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Read a plan from its one-line form, which ``str(plan)`` returns.

        Args:
            text: The name of a preset, followed by any number of changes of the form ``+field=value``. Examples are
                ``bf16-mixed+ops.exp=fp32``, ``fp16-mixed+loss_scale.interval=1000``,
                ``bf16-mixed+regions.encoder.*.norm=fp32`` and ``bf16-true+regions.type:BatchNorm*=params:fp32``.
                ``bf16`` and ``fp16`` in place of the preset mean ``bf16-mixed`` and ``fp16-mixed``. The grammar is in
                the documentation of `castwise.core.plans.line`.

        Returns:
            The plan. Its ``provenance`` is None, since the one-line form does not contain it.

        Raises:
            UnknownNameError: The preset or a field does not exist.
            PlanError: The text is malformed, or a value is not allowed for its field.
        """
        if not isinstance(text, str):
            raise PlanError(
                f"Plan.parse({shown(text)}): not text. Give a preset name or the text of str(plan)."
            )
        name = text.strip().partition("+")[0]
        base = cls.preset(f"{name}-mixed" if name in LOW else name)
        return cls._from_values(
            f"Plan.parse({shown(text)})", read_line(text, _values(base), to_json(LossScale()))
        )

    # --- JSON -----------------------------------------------------------------------------------------------

    @cached_property
    def digest(self) -> str:
        """The SHA-256 hash of the plan as a hexadecimal string, which identifies the plan in every process.

        It is computed from the JSON of all fields except ``provenance``, so equal plans have equal digests.
        """
        decided = _values(self)
        for f in dataclasses.fields(self):
            if f.metadata.get("later") and decided[f.name] == f.default:
                del decided[f.name]  # so that a plan keeps the digest that it had before this field existed
        canonical = json.dumps(decided, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def to_json(self) -> str:
        """Return the plan as JSON text, including ``provenance``.

        The text follows version 1 of the JSON Schema that ``castwise.schemas.schema("plan")`` returns.
        """
        values = {"version": PLAN_VERSION, **_values(self), "provenance": to_json(self.provenance)}
        return json.dumps(values, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan from JSON text, as :meth:`to_json` returns it.

        Args:
            text: A JSON object with the fields of a plan. Missing fields get their default values.

        Returns:
            The plan, including ``provenance``.

        Raises:
            UnknownNameError: A key is not a field of a plan, region or loss scale.
            PlanError: The JSON is malformed, or a value is not allowed for its field.
        """
        return cls._from_json("Plan.from_json", text)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file, including ``provenance``.

        Args:
            path: The path of the file, which is overwritten if it exists.
        """
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan from a JSON file.

        Args:
            path: The path of a file that :meth:`save` has written or that was written by hand.

        Returns:
            The plan, including ``provenance``.

        Raises:
            UnknownNameError: A key is not a field of a plan, region or loss scale.
            PlanError: The file cannot be read, the JSON is malformed, or a value is not allowed for its field.
        """
        call = f"Plan.load({shown(os.fsdecode(path))})"
        try:
            text = _read(path)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise PlanError(
                f"{call}: cannot read it: {why}. Give the path of a file that plan.save(path) wrote."
            ) from None
        return cls._from_json(call, text)

    @classmethod
    def _from_json(cls, call: str, text: str) -> Plan:
        if not isinstance(text, str):
            raise PlanError(f"{call}: {shown(text)} is not text. Give the text of plan.to_json().")
        try:
            values = read_json(text)
        except ValueError as error:
            raise PlanError(
                f"{call}: {error}. Correct the file, or write the plan again with plan.save(path)."
            ) from None
        if isinstance(values, Mapping) and "version" in values:
            values = dict(values)
            version = values.pop("version")
            if type(version) is not int or version != PLAN_VERSION:
                raise PlanError(
                    f"{call}: version={shown(version)} is not allowed. Allowed: {PLAN_VERSION}. Update castwise if a newer one "
                    "wrote the plan, or leave version out."
                )
        return cls._from_values(call, values)

    @classmethod
    def _from_values(cls, call: str, values: object) -> Plan:
        try:
            return cast("Plan", from_mapping(cls, values, "a plan"))
        except PlanError as error:
            raise type(error)(f"{call}: {error}") from None


def _read(path: str | os.PathLike[str]) -> str:
    with open(path, "rb") as file:  # raises ValueError for a path that no file can have
        data = file.read(_LONGEST + 1)
    if len(data) > _LONGEST:
        raise ValueError(f"it has more than {_LONGEST:,} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None


def _values(plan: Plan) -> dict[str, Any]:
    """Return the fields of a plan as JSON values, without provenance."""
    return {f.name: to_json(getattr(plan, f.name)) for f in dataclasses.fields(plan) if f.compare}


@cache
def _preset_values() -> dict[str, dict[str, Any]]:
    return {name: _values(plan) for name, plan in PRESETS.items()}


def _regions(value: object) -> tuple[Region, ...]:
    if isinstance(value, Mapping):
        value = [
            {"pattern": pattern, **item} if isinstance(item, Mapping) else Region(pattern, compute=item)
            for pattern, item in value.items()
        ]
    if not isinstance(value, (list, tuple)):
        raise PlanError(
            f"Plan: regions={shown(value)} is not allowed. Allowed: a sequence of Region, or a mapping by pattern."
        )
    return tuple(
        item if isinstance(item, Region) else from_mapping(Region, item, "Plan: a region") for item in value
    )


def _ops(value: object) -> tuple[tuple[str, str], ...]:
    if isinstance(value, Mapping):
        value = list(value.items())
    if not isinstance(value, (list, tuple)):
        raise PlanError(
            f"Plan: ops={shown(value)} is not allowed. Allowed: pairs of operator and rule, or a mapping."
        )
    rules: dict[str, str] = {}
    for pair in value:
        if not isinstance(pair, (list, tuple)) or [type(part) for part in pair] != [str, str]:
            raise PlanError(
                f"Plan: ops has {shown(pair)}, which is not allowed. Allowed: pairs such as ('exp', 'fp32')."
            )
        op, rule = pair[0].removeprefix("aten::"), pair[1]
        check_rule(op, rule)
        if rules.setdefault(op, rule) != rule:
            raise PlanError(
                f"Plan: ops gives {op!r} two rules, {rules[op]!r} and {rule!r}. Keep one of them."
            )
    return tuple(sorted(rules.items()))


def _presets() -> Iterator[tuple[str, Plan]]:
    batch_norm = (Region("type:_BatchNorm", params="fp32"),)
    scales = {"bf16": None, "fp16": LossScale()}
    yield "fp32", Plan(compute="fp32")
    yield "tf32", Plan(compute="fp32", fp32_matmul="tf32", fp32_conv="tf32")
    for low, scale in scales.items():
        yield f"{low}-mixed", Plan(compute=low, loss_scale=scale)
    for low, scale in scales.items():
        yield f"{low}-master", Plan(compute=low, params="compute", regions=batch_norm, loss_scale=scale)
    for low in scales:
        yield f"{low}-true", Plan(compute=low, params="compute", master="none", rules="none")
    apex_scale = LossScale(ceiling=2.0**24)
    half = Plan(compute="fp16", params="compute", rules="none")
    yield "O0", Plan(compute="fp32")
    yield "O1", Plan(compute="fp16", rules="apex", loss_scale=apex_scale)
    yield "O2", dataclasses.replace(half, regions=batch_norm, loss_scale=apex_scale)
    yield "O3", dataclasses.replace(half, master="none")
    yield "naive", dataclasses.replace(half, loss_scale=LossScale(interval=1000, hysteresis=2))


PRESETS: Final[Mapping[str, Plan]] = MappingProxyType(dict(_presets()))
"""Every preset, by name. ``O0`` equals ``fp32`` and ``O3`` equals ``fp16-true``; these are Apex's names for them."""


_AUTOCASTING_TO: Final = {torch.float32: "fp32", torch.bfloat16: "bf16-mixed", torch.float16: "fp16-mixed"}


def with_rule(plan: Plan, op: str, rule: str) -> Plan:
    """Return a copy of a plan with a rule for an operator, in place of any rule that the plan has for it.

    Raises:
        PlanError: The rule could never work.
    """
    ops = {name.removeprefix("aten::"): given for name, given in plan.ops}
    return dataclasses.replace(plan, ops=tuple({**ops, op: rule}.items()))


def as_plan(value: Plan | str | os.PathLike[str] | torch.dtype) -> Plan:
    """Return the plan that a value stands for: a preset's name, other text, a path or a dtype.

    Args:
        value: A plan, the name of a preset, other text that `Plan.parse` reads, the path of a ``plan.json``, or a
            format to autocast to. A format is a name or a dtype: ``bf16`` and ``torch.bfloat16`` both mean
            ``bf16-mixed``.

    Returns:
        The plan. A plan is returned unchanged.

    Raises:
        UnknownNameError: The value is neither the name of a preset nor of a file.
        PlanError: The value does not name a plan, or the file has no plan.
    """
    if isinstance(value, Plan):
        return value
    if isinstance(value, os.PathLike):
        return Plan.load(value)
    if isinstance(value, torch.dtype):
        preset = _AUTOCASTING_TO.get(value)
        if preset is None:
            raise PlanError(
                f"as_plan({shown(value)}): no plan computes in this format. Allowed: "
                f"{', '.join(map(str, _AUTOCASTING_TO))}."
            )
        return PRESETS[preset]
    if not isinstance(value, str):
        raise PlanError(
            f"as_plan({shown(value)}): {type(value).__name__} is not a plan. Allowed: a Plan, a preset name "
            f"({', '.join(PRESETS)}), the path of a plan.json, or a dtype."
        )
    if value in ("float32", "bfloat16", "float16"):
        return as_plan(get_format(value).dtype)
    name = value.strip().partition("+")[0]
    is_path = value.endswith(".json") or os.sep in name or os.path.isfile(value)
    return Plan.load(value) if is_path and name not in (*PRESETS, *LOW) else Plan.parse(value)
