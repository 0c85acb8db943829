"""The JSON schemas of plans and evidence match what castwise reads and writes."""

from __future__ import annotations

import copy
import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from castwise.core.plans.plan import PRESETS, LossScale, Plan, Region
from castwise.core.schemas import NAMES, schema
from castwise.errors import PlanError, UnknownNameError
from tests.report.evidence import make_record
from tests.schemas import check

ROOT = Path(__file__).parents[2]
RICH = Plan(
    compute="fp16",
    regions=(Region("a.*", compute="fp32"), Region("type:B", params="fp64")),
    ops=(("exp", "fp32"), ("mylib::op", "as_is")),
    loss_scale=LossScale(floor=None, ceiling=2.0**20, dynamic=False),
    provenance={"by": "hand", "inside": {"figures": [1, 2.5, None]}},
)


@pytest.mark.parametrize("name", NAMES)
def test_the_schema_is_that_of_the_dataclasses(name: str) -> None:
    text = runpy.run_path(str(ROOT / "scripts" / "schemas.py"))["text"](name)
    written = (ROOT / "src" / "castwise" / "core" / "schemas" / f"{name}.schema.json").read_text(
        encoding="utf-8"
    )
    assert written == text, "run python scripts/schemas.py"
    assert (
        schema(name)["$id"] == f"urn:castwise:schema:{name}:{schema(name)['properties']['version']['const']}"
    )


def test_every_field_of_a_plan_and_of_evidence_says_what_it_is() -> None:
    """Every field has a description, except those of dataclasses that evidence shares with other records."""
    for name, own in {"plan": ("Region", "LossScale"), "evidence": ("Candidate",)}.items():
        found = schema(name)
        parts = {"": found} if name == "plan" else {}
        parts |= {part: found["$defs"][part] for part in own}
        silent = [
            f"{part}.{field}"
            for part, of in parts.items()
            for field, value in of["properties"].items()
            if not value.get("description")
        ]
        assert not silent


@pytest.mark.parametrize("plan", [*PRESETS.values(), RICH], ids=str)
def test_plans_are_written_by_the_schema(plan: Plan, tmp_path: Path) -> None:
    check("plan", json.loads(plan.to_json()))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_evidence_is_written_by_the_schema() -> None:
    check("evidence", make_record())


TAKEN: list[dict[str, Any]] = [
    {},
    {"version": 1, "compute": "fp32"},
    {"regions": {"a.*": "fp32", "b": {"params": "fp32"}}},
    {"regions": [{"pattern": "a", "compute": "fp32"}]},
    {"ops": {"exp": "fp32"}},
    {"loss_scale": {"init": 1024}, "provenance": {"by": "me"}},
]
REFUSED: list[dict[str, Any]] = [
    {"version": 2},
    {"version": "1"},
    {"version": True},
    {"version": None},
    {"compute": "bf17"},
    {"comptue": "bf16"},
    {"params": "fp16"},
    {"regions": [{"pattern": "", "compute": "fp32"}]},
    {"regions": [{"pattern": "a"}]},
    {"regions": [{"compute": "fp32"}]},
    {"regions": [{"pattern": "a", "compute": None, "params": None}]},
    {"regions": {"a": "fp8"}},
    {"regions": "a"},
    {"ops": [["exp"]]},
    {"ops": [["exp", "fp31"]]},
    {"ops": {"exp": None}},
    {"loss_scale": {"growth": 1}},
    {"loss_scale": {"backoff": 1}},
    {"loss_scale": {"interval": 0}},
    {"loss_scale": {"scale": 2.0}},
    {"loss_scale": 1024},
    {"provenance": "me"},
]


@pytest.mark.parametrize("values", TAKEN, ids=json.dumps)
def test_what_the_schema_of_plans_allows_is_read(values: dict[str, Any]) -> None:
    check("plan", values)
    Plan.from_json(json.dumps(values))


@pytest.mark.parametrize("values", REFUSED, ids=json.dumps)
def test_what_the_schema_of_plans_refuses_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        check("plan", values)
    with pytest.raises(PlanError):
        Plan.from_json(json.dumps(values))


def test_a_plan_of_another_version_says_what_to_do() -> None:
    with pytest.raises(PlanError, match=r"version=2 is not allowed\. Allowed: 1\. Update castwise"):
        Plan.from_json('{"version": 2, "later": 1}')


def test_a_field_that_the_schema_of_evidence_does_not_know_is_noticed() -> None:
    """The schema check that every test's evidence goes through detects an unknown field."""
    for where in (lambda record: record, lambda record: record["candidates"][0]):
        for change in (lambda part: part.update(new=1), lambda part: part.pop("plan")):
            record = copy.deepcopy(make_record())
            change(where(record))
            with pytest.raises(AssertionError, match=r"new|plan"):
                check("evidence", record)


def test_another_name_is_refused() -> None:
    with pytest.raises(
        UnknownNameError, match=r"schema\('record'\): no such schema. Allowed: plan, evidence"
    ):
        schema("record")
