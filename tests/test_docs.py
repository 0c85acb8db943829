"""The pages of docs/ and README.md say what the code does: tables and generated pages cannot drift from it."""

from __future__ import annotations

import dataclasses
import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch
import typer

from castwise import cli
from castwise.plan import PRESETS, LossScale, Plan
from castwise.rules import BASES, RULES

ROOT = Path(__file__).parent.parent


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def table(page: str, heading: str) -> list[dict[str, str]]:
    """The rows of the first table below a heading, by column."""
    after = read(page).split(f"\n## {heading}\n", 1)[1]
    lines = re.search(r"(?:^\|.*\n)+", after, re.MULTILINE).group().splitlines()
    columns, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(columns, row, strict=True)) for row in rows]


def code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


# --- generated pages ----------------------------------------------------------------------------------------


def test_the_page_of_rules_is_current() -> None:
    if not torch.__version__.startswith("2.13."):
        pytest.skip(f"the page is torch 2.13's, and this is {torch.__version__}, which has other operators")
    page = runpy.run_path(str(ROOT / "scripts" / "rules_page.py"))["page"]
    assert read("docs/rules.md") == page(), "run python scripts/rules_page.py"


def test_the_page_of_the_api_is_current() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "api_page.py"))["page"]
    assert read("docs/api.md") == page(), "run python scripts/api_page.py"


# --- tables written by hand ---------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["README.md", "docs/concepts.md"])
def test_tables_of_presets_say_what_the_presets_are(page: str) -> None:
    rows = {name: row for row in table(page, "Presets") for name in code(row["preset"])}
    assert rows.keys() == PRESETS.keys()
    for name, row in rows.items():
        plan = PRESETS[name]
        said = list(row.values())
        computes, stored = said[1], said[2]
        masters, scale = row.get("fp32 masters", row.get("masters")), row["loss scale"]
        assert computes.startswith(plan.compute), name
        assert ("TF32" in computes) == (plan.fp32_matmul == "tf32"), name
        assert stored.startswith(plan.compute if plan.params == "compute" else "fp32"), name
        assert ("BatchNorm" in stored) == bool(plan.regions), name
        expected = {"yes", "fp32"} if plan.keeps_masters else {"none", "no"} if plan.stores_low else {""}
        assert masters in expected, name
        assert ("dynamic" in scale) == (plan.loss_scale is not None), name
        assert ("hysteresis" in scale) == (plan.loss_scale is not None and plan.loss_scale.hysteresis > 1)
        if plan.compute == "fp32":
            assert row.get("operator rules", "") == "", name
        elif "operator rules" in row:
            assert row["operator rules"] == plan.rules, name
        else:
            words = {"native": "torch.autocast's rules", "apex": "Apex's lists", "none": "throughout"}
            assert words[plan.rules] in computes, name


def test_the_table_of_fields_has_every_field_and_value_of_a_plan() -> None:
    rows = {row["field"].strip("`"): row for row in table("docs/concepts.md", "A plan and its fields")}
    fields = {f.name: f for f in dataclasses.fields(Plan)}
    assert list(rows) == list(fields)
    for name, field in fields.items():
        allowed = field.metadata.get("allowed") or field.metadata.get("formats")
        if allowed and rows[name]["values"] != "the same":
            assert sorted(code(rows[name]["values"])) == sorted(allowed), name


def test_the_tables_of_rules_and_bases_are_complete() -> None:
    text = read("docs/concepts.md")
    for name in (*RULES, *BASES):
        assert f"\n| `{name}` |" in text, name


def test_the_table_of_loss_scale_has_its_fields() -> None:
    rows = table("docs/concepts.md", "Loss scale and windows")
    assert {name for row in rows for name in code(row["field of `LossScale`"])} == {
        f.name for f in dataclasses.fields(LossScale)
    }


# --- commands -----------------------------------------------------------------------------------------------

PAGES = ["README.md", "Makefile", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]


def commands_shown(page: str) -> list[str]:
    """What follows ``castwise`` in the shell's blocks and the inline code of a page."""
    text = read(page)
    if page == "Makefile":
        return re.findall(r"^\t\$\(BIN\)/castwise (.*)$", text, re.MULTILINE)
    blocks = re.findall(r"^```(?:console|sh)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    shown = [line for block in blocks for line in re.findall(r"^(?:\$ )?castwise (.*)$", block, re.MULTILINE)]
    return shown + re.findall(r"`castwise ([a-z]+(?: [^`|]*)?)`", text)


def test_commands_are_found() -> None:
    assert "bench sine --plans fp32,bf16-mixed,bf16-master" in commands_shown("README.md")
    assert len(commands_shown("Makefile")) == 2
    assert {"doctor", "doctor gpt"} <= set(commands_shown("docs/cli.md"))


@pytest.mark.parametrize("page", PAGES)
def test_commands_shown_exist_with_their_options(page: str) -> None:
    commands = typer.main.get_command(cli.app).commands
    for line in commands_shown(page):
        name, *words = shlex.split(line, comments=True)
        assert name in commands, line
        known = {option for parameter in commands[name].params for option in parameter.opts}
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known, line
        if "--plans" in words:
            for plan in words[words.index("--plans") + 1].split(","):
                if not plan.endswith(".json"):
                    Plan.parse(plan)


def test_the_makefile_has_the_targets_shown() -> None:
    targets = set(re.findall(r"^([a-z]+):", read("Makefile"), re.MULTILINE))
    shown = {
        name
        for page in ("README.md", "CONTRIBUTING.md")
        for name in re.findall(r"(?:`|^\$ )make ([a-z]+)", read(page), re.MULTILINE)
    }
    assert {"demo", "test", "lint", "bench", "gpu"} <= shown <= targets
