"""Look up the rules that say how the inputs of an operator are cast: base tables, and a plan's overrides of them.

An operator has ATen's base name without the overload (``exp``, ``layer_norm``), and an in-place operator has the name
with its underscore (``exp_``). Custom operators are named ``namespace::name``. A rule holds for every overload. An
operator without a row in the table is not changed: its inputs are not cast. If it calls other operators (``einsum``
calls ``bmm``), those follow their own rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Final, Literal, cast, get_args

import torch

from castwise.core import _torch, devices
from castwise.core.plans import tables
from castwise.core.plans.tables import Rule
from castwise.core.plans.text import close_matches
from castwise.errors import PlanError, UnknownNameError

__all__ = [
    "BASES",
    "RULES",
    "UNFUSED",
    "Row",
    "Rule",
    "advice",
    "base_table",
    "check_rule",
    "describe",
    "meetings",
    "operator_overloads",
    "overrides",
    "stored_low",
]

RULES: Final[tuple[Rule, ...]] = get_args(Rule)
"""The rules that an operator can have.

- ``lower`` casts floating inputs to the compute format.
- ``fp32`` casts them to fp32.
- ``widest`` casts them to the widest floating format among them (fp16 with bf16 gives fp32).
- ``as_is`` casts nothing, neither inputs of this operator nor those of operators that it calls.
- ``unfused`` casts floating inputs to the compute format, and runs separate operators instead of one kernel. It is for
  operators in `UNFUSED`.
- ``banned`` raises an error if the operator is called, except from another operator's kernel.
"""

UNFUSED: Final = ("scaled_dot_product_attention",)
"""Operators that the rule ``unfused`` can split into parts."""

BASES: Final = ("native", "cuda", "apex", "none")
"""The base tables, from which a plan takes the rules of operators.

``native`` has the lists of torch.autocast for the current device, and ``cuda`` its lists for CUDA, on any device.
``apex`` has the lists of Apex's opt level O1. With ``none``, no operator is cast.
"""

_OPERATOR_NAME: Final = re.compile(r"(?:[A-Za-z_]\w*::)?[A-Za-z_]\w*", re.ASCII)
_UNLISTED: Final = "torch.autocast casts it on this device and the plan's table does not"
_NEWER: Final = "castwise's tables do not list it, and torch.autocast casts it on this device"
_CHOSEN: Final = "the plan sets this rule"
_WHOLE: Final = "its kernel calls an in-place operator that is banned only for direct calls"


@dataclass(frozen=True)
class Row:
    """The rule by which the inputs of one operator are cast.

    Attributes:
        op: The ATen base name of the operator, its in-place name, or ``namespace::name``.
        rule: One of `RULES`. Or ``native`` in the table of torch.autocast for a device, for an operator that is newer than
            castwise's tables: the kernel that torch has registered for it casts its inputs.
        reason: Why the operator has this rule, as part of a sentence.
        only_low: Whether the rule holds only for some inputs. ``banned`` then raises only if a floating input is bf16
            or fp16, as Apex does, and ``lower`` casts only in this case. ``widest`` then casts only if the first
            input is neither, since norms accept a bf16 or fp16 input with fp32 weights.
        opaque: Whether the rule also covers the operators that this operator calls, as in torch.autocast. False only
            in `overrides`, for an operator that the device's native list casts and CUDA's table does not list. Such
            an operator is not cast itself, and the operators that it calls are looked up one by one, as on CUDA.
        message: The error message of a ban in place of castwise's, for rules that another library made.
    """

    op: str
    rule: Rule | Literal["native"]
    reason: str
    only_low: bool = False
    opaque: bool = True
    message: str = ""


@cache
def base_table(base: str, device_type: str) -> Mapping[str, Row]:
    """Return the rules by which operators are cast, from one of the base tables of castwise.

    A plan takes its operator rules from a base table, such as that of torch.autocast or of Apex. The result has only
    operators of the installed torch.

    Args:
        base: The name of the table, one of `BASES`: ``native``, ``cuda``, ``apex`` or ``none``.
        device_type: A device type that torch.autocast accepts. The table ``native`` depends on it.

    Returns:
        The `Row` of each operator, by the operator's name. Operators without a row are not changed.

    Raises:
        UnknownNameError: ``base`` or ``device_type`` is not known.
    """
    call = f"base_table({base!r}, {device_type!r})"
    _check_name(call, "base table", base, BASES)
    if not devices.has_autocast(device_type):
        _check_name(call, "device type", device_type, devices.autocast_types())
    if base == "none":
        table: dict[str, Row] = {}
    elif base == "native" and device_type == "cpu":
        table = _rows(tables.CPU)
    else:
        table = _rows(tables.APEX if base == "apex" else tables.CUDA)
        if base != "apex":
            # One table serves all devices, and versions of torch that add and remove operators and their autocast kernels.
            there = _registered(device_type if base == "native" else "cuda")
            table = {op: row for op, row in table.items() if op in there or op in tables.CUDA_ONLY}
        if device_type != "cuda":
            table = {op: row for op, row in table.items() if op not in tables.CUDA_ONLY}
            if base != "native":
                table |= _rows(tables.RNN_STAND_INS)
            elif device_type == "mps":
                table |= _rows(tables.MPS_DIFFERS)
    if base in ("native", device_type):
        newer = {op for op in _registered(device_type) - table.keys() if "::" not in op}
        table |= {op: Row(op, "native", _NEWER) for op in sorted(newer)}
    return _there(table)


def describe(base: str, device_type: str) -> tuple[Row, ...]:
    """Return the rules of :func:`base_table` as a tuple, sorted by rule and then by the operator's name.

    Args:
        base: The name of the table, one of `BASES`.
        device_type: A device type that torch.autocast accepts.

    Raises:
        UnknownNameError: ``base`` or ``device_type`` is not known.
    """
    rows = base_table(base, device_type).values()
    return tuple(sorted(rows, key=lambda row: ((*RULES, "native").index(row.rule), row.op)))


def check_rule(op: str, rule: str) -> None:
    """Raise if a plan's rule for an operator can never work.

    Whether the operator exists is not checked.

    Raises:
        UnknownNameError: No such rule.
        PlanError: No operator can have the name, the rule would cast inputs of an in-place operator, or the rule is
            ``unfused`` and the operator does not support it.
    """
    call = f"ops=({op!r}, {rule!r})"
    _check_name(call, "rule", rule, RULES)
    if not _OPERATOR_NAME.fullmatch(op):
        raise PlanError(
            f"{call}: {op!r} is not an operator name. Allowed: an ATen base name without overload (exp, "
            "layer_norm), an in-place name (exp_), or namespace::name."
        )
    if rule == "unfused" and op.removeprefix("aten::") not in UNFUSED:
        raise PlanError(
            f"{call}: it cannot be unfused. Allowed for unfused: {', '.join(UNFUSED)}. For {op!r} use lower, fp32, widest "
            "or as_is."
        )
    if _is_in_place(op) and rule not in ("as_is", "banned"):
        raise PlanError(
            f"{call}: an in-place operator keeps its tensor's format, so the cast would be lost. Allowed: "
            f"as_is, banned. Set the rule for {op[:-1]!r} and call that instead."
        )


def advice(op: str) -> str:
    """Return text that says what to do instead of calling a banned operator.

    :func:`check_rule` accepts all rules that the text suggests.
    """
    if _is_in_place(op):
        return (
            f"Call {op[:-1]!r} instead, which leaves its input unchanged, or give the plan "
            f'ops=(("{op}", "as_is"),) to round the result to the format of the input.'
        )
    return f'To run it in fp32, give the plan ops=(("{op}", "fp32"),); other rules: lower, widest, as_is.'


def operator_overloads(name: str) -> tuple[_torch.operators.OpOverload, ...]:
    """Return the overloads to which a rule for an operator applies.

    Returns:
        For a plain name, every overload on tensors that writes to none of its arguments; for an in-place name,
        the overloads that write to their first argument.

    Raises:
        UnknownNameError: The installed torch has no such operator.
        PlanError: The operator has no such overload: all of them write to their arguments, or none takes
            tensors.
    """
    # Custom operators appear and disappear with their libraries; ATen's stay.
    return _aten_overloads(name) if _split(name)[0] == "aten" else _overloads(name)


def overrides(base: str, ops: Iterable[tuple[str, str]], device_type: str) -> Mapping[str, Row]:
    """Return the operator rules in which a plan differs from torch.autocast on a device.

    Args:
        base: The name of the plan's base table, one of `BASES`.
        ops: Pairs of operator and rule that replace rows of the base table. If an operator is in several pairs, the
            last pair counts.
        device_type: A device type that torch.autocast accepts.

    Returns:
        The `Row` of each operator, by the operator's name. It is empty if torch.autocast already applies all rules.
        It is also empty for the table ``none`` without ``ops``, for which the caller does not enable autocast. With
        ``ops``, the table ``none`` disables every row of the native table.

    Raises:
        UnknownNameError: A base table, device type, rule or operator is not known.
        PlanError: A rule in ``ops`` could never work. See `check_rule`.
    """
    return _overrides(base, tuple((op, rule) for op, rule in ops), device_type)


@cache
def _overrides(base: str, ops: tuple[tuple[str, str], ...], device_type: str) -> Mapping[str, Row]:
    native = base_table("native", device_type)
    table = dict(base_table(base, device_type))
    if base == "none" and not ops:
        return MappingProxyType(table)
    for op in native.keys() - table.keys():
        # Apex patches Python functions, so it cannot change what an operator calls internally; on CUDA the
        # operators called by one without a row are looked up one by one.
        table[op] = Row(op, "as_is", _UNLISTED, opaque=base != "cuda")
    for name, rule in ops:
        check_rule(name, rule)
        operator_overloads(name)
        op = name.removeprefix("aten::")
        table[op] = Row(op, cast("Rule", rule), _CHOSEN)
    for op, used in tables.USE_IN_PLACE.items():
        if any(table[name].rule == "banned" for name in used if name in table):
            table.setdefault(op, Row(op, "as_is", _WHOLE))
    return MappingProxyType({op: row for op, row in sorted(table.items()) if _differs(row, native.get(op))})


_MEETS: Final = "its kernel refuses a mix of fp32 and low tensors"


@cache
def meetings(device_type: str) -> Mapping[str, Row]:
    """Return the operator rules for a module that combines an fp32 table of its own with bf16 or fp16 tensors.

    Operators that would refuse the mixture get all inputs in the compute format. Factorisations and solvers, whose bf16
    and fp16 kernels are missing or wrong, run in fp32 and return fp32. No other operator is cast.
    """
    native = base_table("native", device_type)
    table = {op: Row(op, "as_is", _UNLISTED) for op, row in native.items() if row.rule != "widest"}
    low = [op for op, row in native.items() if row.rule == "lower"]
    table |= {op: Row(op, "lower", _MEETS, only_low=True) for op in (*low, *tables.REFUSES.split())}
    table |= {op: row for op, row in _rows(tables.STORED_LOW).items() if row.rule == "fp32"}
    table["cdist"] = Row("cdist", "widest", _MEETS)  # it has no low kernel on CPUs
    return _there(table)


@cache
def stored_low(base: str, device_type: str) -> Mapping[str, Row]:
    """Return the operator rules that a plan needs beyond its base table if it stores parameters in bf16 or fp16.

    Base tables assume fp32 weights. Some operators that they do not list refuse bf16 or fp16 weights with fp32 inputs.
    These operators get both in the wider format, as if the weights were stored in it. Others have no bf16 and fp16
    kernels, or wrong ones, and run in fp32. No other operator is cast.
    """
    table = base_table(base, device_type)
    rows = _rows(tables.STORED_LOW)
    listed = {op for op, row in table.items() if row.rule != "as_is"}
    return _there({op: row for op, row in rows.items() if op not in listed})


@cache
def _registered(device_type: str) -> set[str]:
    """Return the operators that have an autocast kernel on a device type, by their names without overloads."""
    names = _torch.dispatcher.autocast_registrations(device_type)
    return {name.removeprefix("aten::").partition(".")[0] for name in names}


def _there(table: Mapping[str, Row]) -> Mapping[str, Row]:
    """Return the rules of a table whose operators exist in the installed torch."""
    return MappingProxyType({op: row for op, row in table.items() if _packet(op) is not None})


def _differs(row: Row, native: Row | None) -> bool:
    if native is not None:
        return (row.rule, row.only_low) != (native.rule, native.only_low)
    # Without a native row an operator is not cast anyway. An as_is row then matters only if it calls operators that are
    # cast. The tables list such rows only, so just a rule of the plan is checked here.
    listed = row.rule != "as_is" or row.reason != _CHOSEN
    return listed or any(
        _torch.dispatcher.is_dispatched(op) and _torch.operators.is_composite(op)
        for op in operator_overloads(row.op)
    )


def _rows(groups: Iterable[tables.Group]) -> dict[str, Row]:
    table: dict[str, Row] = {}
    for group in groups:
        for op in group.ops.split():
            assert op not in table, f"two rows for {op}"
            table[op] = Row(op, group.rule, group.reason, group.only_low)
    return table


def _split(op: str) -> tuple[str, str]:
    namespace, _, base = op.rpartition("::")
    return namespace or "aten", base


def _packet(op: str) -> Any:
    """Return torch's object with all overloads of an operator, or None if the installed torch does not have it."""
    namespace, base = _split(op)
    return getattr(getattr(torch.ops, namespace), base, None)


def _is_in_place(op: str) -> bool:
    return op.endswith("_") and not op.endswith("__")


def _overloads(name: str) -> tuple[_torch.operators.OpOverload, ...]:
    packet = _packet(name)
    if packet is None:
        raise UnknownNameError(_unknown(name))
    wanted = "in_place" if _is_in_place(name) else "functional"
    overloads = (getattr(packet, overload) for overload in packet.overloads())
    found = tuple(overload for overload in overloads if _torch.operators.overload_kind(overload) == wanted)
    if not found:
        raise PlanError(
            f"operator {name!r}: every overload of it writes to its arguments or takes no tensor, so no rule "
            "applies to it. Set a rule for the operator that computes the value."
        )
    return found


_aten_overloads = cache(_overloads)


def _unknown(name: str) -> str:
    """Return the error message for an operator that the installed torch does not have, with a suggestion."""
    namespace, base = _split(name)
    start = f"operator {name!r}: not registered in torch {torch.__version__}"
    if namespace == "aten" and base in tables.FUNCTIONS:
        return f"{start}. torch.nn.functional.{base} runs as {tables.FUNCTIONS[base]}: name that instead."
    known = sorted({_split(op)[1].partition(".")[0] for op in _torch.operators.operator_names(namespace)})
    start += close_matches(base, known)
    if namespace == "aten":
        return (
            f"{start}. Allowed: an ATen base name such as exp or layer_norm, an in-place name such as exp_, "
            "or namespace::name of a custom operator whose library is imported."
        )
    have = (
        f"{namespace!r} has {', '.join(known[:8])}" if known else f"nothing is registered under {namespace!r}"
    )
    return f"{start}; {have}. Import the library that registers it first."


def _check_name(call: str, what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UnknownNameError(
            f"{call}: no such {what} {value!r}{close_matches(value, allowed)}. Allowed: {', '.join(allowed)}."
        )
