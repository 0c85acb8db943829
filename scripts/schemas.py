"""Write src/castwise/core/schemas/*.schema.json from the dataclasses of plans and evidence."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from castwise.core.plans.plan import LossScale, Plan, Region
from castwise.core.plans.rules import RULES
from castwise.core.schemas import NAMES, PLAN_VERSION, RECORD_VERSION
from castwise.lab.search.evidence import Evidence

FOLDER = Path(__file__).parent.parent / "src" / "castwise" / "core" / "schemas"
FORMATS = {"enum": ["fp64", "fp32", "bf16", "fp16", None]}
RULE = {"enum": list(RULES)}
LIMITS: dict[str, dict[str, Any]] = {
    "pattern": {"minLength": 1, "maxLength": 1000},
    "init": {"exclusiveMinimum": 0},
    "growth": {"exclusiveMinimum": 1},
    "backoff": {"exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "interval": {"minimum": 1},
    "hysteresis": {"minimum": 1},
    "floor": {"exclusiveMinimum": 0},
    "ceiling": {"exclusiveMinimum": 0},
}
"""Limits for fields of a plan's parts, which their types do not express."""


def text(name: str) -> str:
    """Return a schema as the text of its file."""
    made = {"plan": plan_schema, "evidence": evidence_schema}[name]()
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def plan_schema() -> dict[str, Any]:
    """Return the schema of ``Plan.from_json``'s input; if it allows two forms, ``Plan.to_json`` writes the first."""
    said = described(Plan)
    region, scale = part(Region), part(LossScale)
    for name in ("compute", "params"):
        region["properties"][name] = described_as(FORMATS, described(Region)[name])
    region["not"] = {"properties": {name: {"const": None} for name in ("compute", "params")}}
    inner = {key: value for key, value in region.items() if key != "required"}
    inner["properties"] = {key: value for key, value in region["properties"].items() if key != "pattern"}
    choices = [form for form in FORMATS["enum"] if form is not None]
    special: dict[str, dict[str, Any]] = {
        "regions": {
            "anyOf": [
                {"type": "array", "items": {"$ref": "#/$defs/Region"}},
                {"type": "object", "additionalProperties": {"anyOf": [{"enum": choices}, inner]}},
            ]
        },
        "ops": {
            "anyOf": [
                {
                    "type": "array",
                    "items": {"type": "array", "prefixItems": [{"type": "string"}, RULE], "minItems": 2, "maxItems": 2},
                },
                {"type": "object", "additionalProperties": RULE},
            ]
        },
        "loss_scale": {"anyOf": [{"$ref": "#/$defs/LossScale"}, {"type": "null"}]},
        "provenance": {"type": ["object", "null"]},
    }  # fmt: skip
    properties: dict[str, Any] = {"version": version(PLAN_VERSION)}
    for field in dataclasses.fields(Plan):
        allowed = field.metadata.get("allowed") or field.metadata.get("formats")
        kind = {"enum": list(allowed)} if allowed else special[field.name]
        properties[field.name] = described_as(kind, said[field.name])
    return {
        **head("plan", PLAN_VERSION, Plan), "type": "object", "properties": properties, "additionalProperties": False,
        "$defs": {"Region": region, "LossScale": scale},
    }  # fmt: skip


def part(cls: type) -> dict[str, Any]:
    """Return the schema of a part of a plan: missing fields have their defaults, unknown fields are not allowed."""
    made = record(cls, {}, finite=True)
    for name in made["properties"]:
        made["properties"][name] |= LIMITS.get(name, {})
    made["required"] = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
    return {**made, "additionalProperties": False}


def evidence_schema() -> dict[str, Any]:
    """Return the schema of ``TuneResult.to_dict``'s output."""
    parts: dict[str, Any] = {}
    made = record(Evidence, parts)
    extra = {"kind": {"const": "tune"}, "version": version(RECORD_VERSION)}
    passes = described_as({"type": "integer"}, summary(Evidence.passes))
    return {
        **head("evidence", RECORD_VERSION, Evidence), "type": "object",
        "properties": {**extra, **made["properties"], "passes": passes},
        "required": [*extra, *made["required"], "passes"],
        "$defs": dict(sorted(parts.items())),
    }  # fmt: skip


def head(name: str, number: int, cls: type) -> dict[str, Any]:
    """Return the first entries of a schema."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:castwise:schema:{name}:{number}",
        "title": f"{name}.json of castwise, version {number}",
        "description": summary(cls),
    }


def version(number: int) -> dict[str, Any]:
    """Return the schema of a file's version number."""
    return {"const": number, "description": "Of the schema that the file follows."}


def record(cls: type, parts: dict[str, Any], finite: bool = False) -> dict[str, Any]:
    """Return the schema of a dataclass as an object.

    Args:
        cls: The dataclass.
        parts: Receives the schemas of the dataclasses in its fields, by name.
        finite: Whether all its numbers are finite; otherwise null stands for a number that JSON cannot represent.
    """
    hints, said = typing.get_type_hints(cls), described(cls)
    fields = [field.name for field in dataclasses.fields(cls)]
    properties = {name: described_as(form(hints[name], parts, finite), said.get(name, "")) for name in fields}
    return {"type": "object", "properties": properties, "required": fields}


def form(hint: Any, parts: dict[str, Any], finite: bool) -> dict[str, Any]:
    """Return the schema of a type."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if dataclasses.is_dataclass(hint):
        name = hint.__name__
        if name not in parts:
            parts[name] = {}
            parts[name] = {"description": summary(hint), **record(hint, parts, finite)}
        return {"$ref": f"#/$defs/{name}"}
    if origin is typing.Literal:
        return {"enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        some = [form(one, parts, finite) for one in inner if one is not type(None)]
        if all("enum" in one for one in some):
            some = [{"enum": [value for one in some for value in one["enum"]]}]
        none = [{"type": "null"}] if type(None) in inner else []
        if none and len(some) == 1 and "type" in some[0]:
            kinds = some[0]["type"]
            return some[0] | {
                "type": sorted({*([kinds] if isinstance(kinds, str) else kinds), "null"}, key="null".__eq__)
            }
        return some[0] if len(some + none) == 1 else {"anyOf": [*some, *none]}
    if origin is tuple:
        assert inner[1:] == (...,), hint
        return {"type": "array", "items": form(inner[0], parts, finite)}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": form(inner[1], parts, finite)}
    if hint is float:
        return {"type": "number" if finite else ["number", "null"]}
    return {"type": {str: "string", int: "integer", bool: "boolean"}[hint]}


def described_as(kind: dict[str, Any], text: str) -> dict[str, Any]:
    """Return a schema with a description, if there is one."""
    return {**kind, "description": text} if text else dict(kind)


def summary(value: Any) -> str:
    """Return the first paragraph of the docstring of a class or a property, in plain text."""
    return plain((inspect.getdoc(value) or "").partition("\n\n")[0])


def described(cls: type) -> dict[str, str]:
    """Return the descriptions of a class's attributes from its docstring."""
    lines = (inspect.getdoc(cls) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", lines, re.MULTILINE)
    return {name: plain(text) for name, text in found}


def plain(text: str) -> str:
    """Return a docstring's text on one line, with code in single backticks."""
    return re.sub(r":\w+:`([^`]+)`", r"`\1`", " ".join(text.split()).replace("``", "`"))


if __name__ == "__main__":
    for name in NAMES:
        path = FOLDER / f"{name}.schema.json"
        path.write_text(text(name), encoding="utf-8")
        print(f"wrote {path.name}")
