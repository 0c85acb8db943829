"""Write a plan as one line of text, and read it back, with pure functions on plain values.

The line is the name of a preset and then any number of ``+field=value``, in this grammar::

    line   = preset { "+" item }
    item   = FIELD "=" VALUE
           | "ops." OPERATOR "=" RULE
           | "regions." PATTERN "=" ( FORMAT | "params:" FORMAT | "compute:" FORMAT "/params:" FORMAT )
           | "loss_scale=none" | "loss_scale=default" | "loss_scale." FIELD "=" NUMBER

Patterns are percent-encoded as in a URL, except for the characters of module paths and globs. So a line never holds a
comma or a blank, and several lines fit on a command line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import quote, unquote

from castwise.core.plans.text import close_matches, shown
from castwise.errors import PlanError, UnknownNameError

Values = Mapping[str, Any]
"""The fields of a plan as in JSON: regions and the loss scale are mappings, and ops are pairs."""

_PATTERN_SAFE: Final = ".*?[]!:/-_"
_BAD_ESCAPE: Final = re.compile("%(?![0-9A-Fa-f]{2})")
_NUMBER: Final = re.compile("-?[0-9.]+(e-?[0-9]+)?", re.IGNORECASE)
"""The numbers that a line may have. Python itself accepts more, such as 1_0 and the digits of other scripts."""
_WORDS: Final = {"none": None, "true": True, "false": False}


def write_line(plan: Values, presets: Mapping[str, Values], loss_scale: Values) -> str:
    """Write a plan as one line: the name of the preset that gives the shortest line, and the differences from it.

    A plan that equals a preset is written as that preset's name. If it equals several, the first of them is taken.

    Args:
        plan: The fields of the plan, without provenance.
        presets: The fields of every preset, without provenance. At least one preset must have no regions.
        loss_scale: The fields of a default loss scale.
    """
    lines = [
        [name, *_items(plan, base, loss_scale)]
        for name, base in presets.items()
        if plan["regions"][: len(base["regions"])] == base["regions"]  # items only ever add regions
    ]
    shortest = min(lines, key=len)
    return "+".join(shortest)


def read_line(text: str, base: Values, loss_scale: Values) -> dict[str, Any]:
    """Read a plan from its one-line form, and return its fields.

    Args:
        text: The line.
        base: The fields of the preset with which the line begins.
        loss_scale: The fields of a default loss scale.

    Returns:
        All fields of the plan. Whether their values are allowed is not checked.

    Raises:
        UnknownNameError: No such field.
        PlanError: An item is not of the form ``field=value``, a field or an operator is given twice, or a pattern is
            wrongly escaped.
    """
    values = {**base, "regions": [*base["regions"]]}
    ops = dict(base["ops"])
    given: dict[str, str] = {}
    for item in text.strip().split("+")[1:]:
        path, _, value = item.rpartition("=")
        if not path or not value:
            raise PlanError(
                f"Plan.parse({shown(text)}): {shown(item)} is not of the form field=value. Write for example "
                "bf16-mixed+output=as_is or bf16-mixed+ops.exp=fp32."
            )
        name, _, rest = path.partition(".")
        former = given.get(path)
        if name == "loss_scale":  # loss_scale=none stands alone; loss_scale=default may be followed by fields
            whole = (
                i for p, i in given.items() if p.startswith(name) and (not rest or i == "loss_scale=none")
            )
            former = former or next(whole, None)
        if former is not None and name != "regions":  # the last matching region wins
            raise PlanError(
                f"Plan.parse({shown(text)}): {shown(former)} and {shown(item)} set the same thing. Leave one of them out."
            )
        given[path] = item
        if name == "regions" and rest:
            values["regions"].append(_read_region(text, item, rest, value))
        elif name == "ops" and rest:
            ops[rest] = value
        elif name == "loss_scale" and rest:
            values["loss_scale"] = {**(values["loss_scale"] or loss_scale), rest: _read_number(value)}
        elif name == "loss_scale" and value in ("none", "default"):
            values["loss_scale"] = None if value == "none" else dict(loss_scale)
        elif isinstance(values.get(name), str) and not rest:
            values[name] = value
        else:
            raise _unknown(text, item, path, base)
    return {**values, "ops": [list(pair) for pair in ops.items()]}


def _read_region(text: str, item: str, pattern: str, value: str) -> dict[str, str]:
    formats = [part if ":" in part else f"compute:{part}" for part in value.split("/")]
    if len({part.split(":")[0] for part in formats}) < len(formats):
        raise PlanError(
            f"Plan.parse({shown(text)}): {shown(item)} sets one thing twice. Write regions.{pattern[:100]}=fp32 for the "
            "compute format, =params:fp32 for storage, or =compute:fp32/params:fp32 for both."
        )
    try:
        if _BAD_ESCAPE.search(pattern):
            raise ValueError
        pattern = unquote(pattern, errors="surrogatepass")
    except ValueError:
        raise PlanError(
            f"Plan.parse({shown(text)}): {shown(item)} has a percent sign that does not begin an escaped UTF-8 character. "
            f"Write %25 for the sign "
            "itself, and other characters as urllib.parse.quote does."
        ) from None
    return {"pattern": pattern, **dict(part.split(":", 1) for part in formats)}


def _items(plan: Values, base: Values, loss_scale: Values) -> list[str]:
    """Return the items, such as ``ops.exp=fp32``, that a line of ``plan`` has after the name of the preset ``base``."""
    items: list[str] = []
    for name, value in plan.items():
        if value == base[name]:
            continue
        if name == "regions":
            items += map(_region, value[len(base[name]) :])
        elif name == "ops":
            items += (f"ops.{op}={rule}" for op, rule in value)
        elif name == "loss_scale":
            items += _loss_scale(value, base[name] or loss_scale)
        else:
            items.append(f"{name}={value}")
    return items


def _region(region: Values) -> str:
    pattern = quote(region["pattern"], safe=_PATTERN_SAFE, errors="surrogatepass")
    formats = [f"{name}:{region[name]}" for name in ("compute", "params") if region[name]]
    return f"regions.{pattern}={'/'.join(formats) if region['params'] else region['compute']}"


def _loss_scale(value: Values | None, start: Values) -> Iterable[str]:
    if value is None:
        return ["loss_scale=none"]
    changed = [f"loss_scale.{name}={_number(item)}" for name, item in value.items() if item != start[name]]
    return changed or ["loss_scale=default"]


def _number(value: float | None) -> str:
    # "1e+20" would end the item at its plus sign.
    return str(value).lower().replace("e+", "e").removesuffix(".0")


def _read_number(value: str) -> Any:
    """Return the number, True, False or None that a text stands for.

    Any other text is returned unchanged, and LossScale rejects it later.
    """
    if value in _WORDS:
        return _WORDS[value]
    for kind in (int, float) if _NUMBER.fullmatch(value) else ():
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def _unknown(text: str, item: str, path: str, base: Values) -> PlanError:
    forms = {"ops": "ops.OPERATOR", "regions": "regions.PATTERN", "loss_scale": "loss_scale.FIELD"}
    if path in forms:
        return PlanError(
            f"Plan.parse({shown(text)}): {shown(item)} is not allowed. Allowed: {forms[path]}=VALUE, such as "
            "ops.exp=fp32, regions.head=fp32 or loss_scale.init=1024; and loss_scale=none or "
            "loss_scale=default."
        )
    names = [forms.get(name, name) for name in base]
    return UnknownNameError(
        f"Plan.parse({shown(text)}): no field {shown(path)}{close_matches(path, names)}. Allowed: {', '.join(names)}."
    )
