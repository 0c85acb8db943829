"""The pages in docs/ and README.md match the code: tables and generated pages cannot become outdated."""

from __future__ import annotations

import dataclasses
import re
import runpy
import shlex
import tomllib
from pathlib import Path

import pytest
import torch
import typer

from castwise.commands import cli
from castwise.core.plans.plan import PRESETS, LossScale, Plan
from castwise.core.plans.rules import BASES, RULES, base_table
from tests.fresh import run_interpreter, run_python

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
]


NOTEBOOKS = [f"docs/{name}.md" for name in ("start", "tuning")]
END = "<end of an example>"


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def table(page: str, heading: str) -> list[dict[str, str]]:
    """Return the rows of the first table below a heading, by column."""
    after = read(page).split(f"\n## {heading}\n", 1)[1]
    lines = re.search(r"(?:^\|.*\n)+", after, re.MULTILINE).group().splitlines()
    columns, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(columns, row, strict=True)) for row in rows]


def code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def blocks(page: str) -> list[str]:
    """Return the Python examples of a page."""
    return [code for code, _ in examples(page)]


def examples(page: str) -> list[tuple[str, str | None]]:
    """Return the Python examples of a page, each with its documented output: the text block right below it."""
    found = re.findall(
        r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", read(page), re.MULTILINE | re.DOTALL
    )
    return [(code, said or None) for code, said in found]


def prints(output: str, said: str) -> bool:
    """Return whether an output matches a page, where ``...`` matches anything in a line, and alone in a line any lines."""
    lines = re.sub(r"(?m)^\\\.\\\.\\\.(?=\\?$)", "(?s:.*)", re.escape(said.strip()))
    return re.fullmatch(lines.replace(r"\.\.\.", ".*"), output.strip()) is not None


# --- examples and links -------------------------------------------------------------------------------------


def test_the_readme_opens_with_an_example_that_runs_as_pasted(tmp_path: Path) -> None:
    first = blocks("README.md")[0]
    assert len([line for line in first.splitlines() if line.strip()]) <= 15
    assert re.fullmatch(
        r"loss \d\.\d+ under bf16-mixed: .*\n", run_interpreter(first, tmp_path, "-W", "error")
    )


PASTED = [page for page in PAGES if page != "README.md" and page not in NOTEBOOKS and blocks(page)]


@pytest.mark.parametrize("page", PASTED)
def test_examples_run_as_pasted_and_print_what_the_page_says(page: str, tmp_path: Path) -> None:
    """Examples run in sequence in one process, with warnings as errors. test_site.py runs the notebooks."""
    shown = examples(page)
    outputs = run_python("".join(f"{code}\nprint({END!r})\n" for code, _ in shown), tmp_path, strict=True)
    for (code, said), output in zip(shown, outputs.split(END), strict=False):
        assert said is None or prints(output, said), f"{page}: {code}prints:\n{output}"


def test_an_output_that_is_not_what_a_page_says_is_noticed() -> None:
    assert prints("loss 0.19\nof 3 steps\n", "loss 0...\nof 3 steps\n")
    for said in ("loss 0.18\nof 3 steps", "loss 0.19", "loss 0.19\nof ...", "loss...steps"):
        assert prints("loss 0.19\nof 3 steps\n", said) is (said == "loss 0.19\nof ...")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print(json)", "NameError: name 'json' is not defined"),
        ("import warnings\nwarnings.warn('old')", "UserWarning: old"),
        ("raise SystemExit('no')", "no"),
    ],
)
def test_an_example_that_does_not_run_is_noticed(code: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=said):
        run_python(code, tmp_path, strict=True)
    known = "import os, sys\nprint('castwise' in sys.modules, 'torch' in sys.modules, os.getcwd(), __name__)"
    assert run_python(known, tmp_path).split() == ["False", "True", str(tmp_path.resolve()), "__main__"]


def test_every_example_in_python_is_one_that_runs() -> None:
    for page in PAGES:
        kinds = set(re.findall(r"^```(\S+)", read(page), re.MULTILINE))
        assert kinds <= {"python", "text", "sh", "console"}, page
    assert len(blocks("README.md")) == 1


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", read(page)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        other = (ROOT / page).parent / name if name else ROOT / page
        assert other.exists(), f"{page} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", other.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{page} links to {target}; {name} has {sorted(slugs)}"


def test_what_castwise_is_quoted_to_say_it_says() -> None:
    """Each quoted phrase in troubleshooting's tables has three consecutive words that occur in a string of the package."""
    files = (ROOT / "src" / "castwise").rglob("*.py")
    joined = re.sub(r'["\']\s+f?["\']', "", "\n".join(path.read_text(encoding="utf-8") for path in files))
    source = re.sub(r"\{[^{}]*\}", "{}", joined)
    shown = [("they say", row) for row in table("docs/troubleshooting.md", "No speed-up")]
    shown += [("what you see", row) for row in table("docs/troubleshooting.md", "What errors say")]
    phrases = [phrase for column, row in shown for phrase in code(row[column])]
    assert len(phrases) > 12
    for phrase in phrases:
        words = re.sub(r"'[^']*'|\b[bf]+p?\d\d and \w+", "{}", phrase).split()
        runs = [" ".join(words[start : start + 3]) for start in range(max(1, len(words) - 2))]
        assert any(run in source for run in runs), f"castwise does not say {phrase!r}"


# --- generated pages ----------------------------------------------------------------------------------------


def test_the_page_of_rules_is_current() -> None:
    if not torch.__version__.startswith("2.13."):
        pytest.skip(f"the page is torch 2.13's, and this is {torch.__version__}, which has other operators")
    page = runpy.run_path(str(ROOT / "scripts" / "rules_page.py"))["page"]
    assert read("docs/rules.md") == page(), "run python scripts/rules_page.py"


def test_the_page_of_many_gpus_is_current() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "scaling_page.py"))["page"]
    assert read("docs/scaling.md") == page(), "run python scripts/scaling_page.py"


def test_tables_of_measurements_are_current_and_name_their_files() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "results_page.py"))
    for name in script["PAGES"]:
        assert read(name) == script["page"](name), "run python scripts/results_page.py"
    marked = [name for page in script["PAGES"] for name in re.findall(r"results:(\w+):start", read(page))]
    assert set(marked) == set(script["TABLES"])


def test_the_page_of_the_api_is_current() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "api_page.py"))["page"]
    assert read("docs/api.md") == page(), "run python scripts/api_page.py"


def test_the_page_of_drop_ins_is_current() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "compat_page.py"))["page"]
    assert read("docs/compat.md") == page(), "run python scripts/compat_page.py"


# --- tables written by hand ---------------------------------------------------------------------------------


def test_tables_of_presets_say_what_the_presets_are() -> None:
    rows = {name: row for row in table("docs/concepts.md", "Presets") for name in code(row["preset"])}
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


def test_diagrams_say_what_the_tables_and_defaults_say() -> None:
    columns = re.findall(
        r'class="name"[^>]*>(\w+)</text>\n<text[^>]*>[^<]*</text>\n<text[^>]*>([^<]*)<',
        read("docs/img/dispatch.svg"),
    )
    assert {rule for rule, _ in columns} == {"lower", "fp32", "widest", "as_is"}
    for rule, said in columns:
        names, _, device = said.partition(" (on a ")
        for device_type in ("cpu",) if device else ("cpu", "cuda"):
            rules = base_table("native", device_type)
            for name in names.split(", "):
                assert (rules[name].rule if name in rules else "as_is") == rule, (device_type, name)
    default = LossScale()
    text = read("docs/img/scaling.svg")
    assert f"after {default.interval} in a row" in text
    assert (default.growth, default.backoff, default.hysteresis) == (2.0, 0.5, 1)
    assert "S doubles" in text
    assert "S halves" in text


# --- commands -----------------------------------------------------------------------------------------------


def commands_shown(page: str) -> list[list[str]]:
    """Return the words after ``castwise`` in the shell blocks and inline code of a page, or in the Makefile."""
    text = read(page)
    if page == "Makefile":
        shown = re.findall(r"^\t\$\(BIN\)/castwise (.*)$", text, re.MULTILINE)
    else:
        shell = re.findall(r"^```(?:console|sh)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        shown = [
            line
            for block in shell
            for line in re.findall(r"^(?:\$ )?(?:torchrun .*-m )?castwise (.*)$", block, re.MULTILINE)
        ]
        shown += re.findall(r"`castwise ([a-z]+ [^`|A-Z]*)`", text)
    return [shlex.split(line, comments=True) for line in shown]


def test_commands_shown_are_understood() -> None:
    known = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    shown = [line for page in (*PAGES, "Makefile") for line in commands_shown(page)]
    assert {name for name, *_ in shown} == set(known)
    assert len(commands_shown("Makefile")) == 2
    for name, *words in shown:
        context = known[name].make_context(name, list(words), resilient_parsing=False)
        plans = str(context.params.get("plans") or context.params.get("plan") or "fp32")
        for plan in plans.split(","):
            assert plan.endswith(".json") or Plan.parse(plan), f"{name} {words}"


def test_the_makefile_has_the_targets_shown() -> None:
    targets = set(re.findall(r"^([a-z]+):", read("Makefile"), re.MULTILINE))
    shown = {
        name
        for page in ("README.md", "CONTRIBUTING.md")
        for name in re.findall(r"(?:`|^\$ )make ([a-z]+)", read(page), re.MULTILINE)
    }
    assert {"demo", "test", "lint", "bench", "gpu"} <= shown <= targets


def test_every_room_is_in_the_listing_in_the_order_of_the_layers() -> None:
    """CONTRIBUTING lists every package and its modules; importing modules come after the modules they import."""
    listing = re.search(r"^src/castwise/\n((?:  .*\n)+)", read("CONTRIBUTING.md"), re.MULTILINE).group(1)
    listed: dict[str, list[str]] = {"castwise": []}
    for line in listing.splitlines():
        name = line.split()[0].rstrip("/")
        floor = "castwise" if not line.startswith("    ") else f"castwise.{listed['castwise'][-1]}"
        listed.setdefault(floor, []).append(name)
    pyproject = tomllib.loads(read("pyproject.toml"))
    contracts = pyproject["tool"]["importlinter"]["contracts"]
    layers = {c["containers"][0]: c["layers"] for c in contracts if c["type"] == "layers"}
    for floor, names in listed.items():
        rooms = {
            path.name
            for path in (ROOT / "src" / floor.replace(".", "/")).iterdir()
            if (path.suffix == ".py" and path.stem not in ("__init__", "__main__"))
            or (path / "__init__.py").exists()
        }
        assert set(names) == rooms
        level = {
            room: depth for depth, layer in enumerate(layers[floor]) for room in re.findall(r"\w+", layer)
        }
        depths = [level[name.removesuffix(".py")] for name in names]
        assert depths == sorted(depths, reverse=True), floor
    assert {floor for floor in layers if floor.count(".") == 1} - {"castwise.report"} == listed.keys() - {
        "castwise"
    }
