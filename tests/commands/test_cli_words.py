"""Any odd argument gives a sentence, never a traceback or Python's own error message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

from castwise import Amp
from castwise.commands.cli import app
from castwise.commands.jobs.layout import Layout
from castwise.errors import CastwiseError, PlanError, WorkloadError
from castwise.lab.workloads.workload import find_workload

COMMANDS: Any = typer.main.get_command(app).commands  # type: ignore[attr-defined]
NEEDS = {"replay": ["gone"], "migrate": ["gone"], "schema": ["gone"], "run": ["gone.py"], "try": ["gone.py"]}
"""Further arguments of a command; the others get a workload that does not exist, so nothing runs."""
ODD = ["", " ", ",", "99999999999999999999", "-1", "nan", "\udcff", ".", "a\x00b", "x" * 5000]
PYTHONS = (
    "IndexError",
    "TypeError",
    "UnicodeEncodeError",
    "AttributeError",
    "KeyError",
    "OverflowError",
    "Traceback",
    "ValueError:",
)


def valued() -> list[tuple[str, str]]:
    """Return all options of all commands that take a value, as pairs of command and option."""
    return [
        (name, max(option.opts, key=len))
        for name, command in COMMANDS.items()
        for option in command.params
        if option.param_type_name == "option" and not option.is_flag
    ]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("command", "option"), valued())
def test_every_option_given_something_odd_ends_in_a_sentence(command: str, option: str) -> None:
    for odd in ODD:
        _refused(command, [f"{option}={odd}", *NEEDS.get(command, ["gone"])])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_argument_given_something_odd_ends_in_a_sentence(command: str) -> None:
    Path("folder").mkdir()
    for odd in (
        *ODD,
        "folder",
        "/",
        "..",
        ".:x",
        "..:",
        ":x",
        "os:path",
        "os:nope",
        "a b:c",
        "\udcff:x",
        "\udcff.py:x",
        "os.:x",
    ):
        if odd not in ("-1", ".", "folder", "/", ".."):
            _refused(command, [odd])


def _refused(command: str, words: list[str]) -> None:
    said = CliRunner().invoke(app, [command, *words])
    assert said.exit_code in (1, 2), (words, said.output)
    assert said.exception is None or isinstance(said.exception, SystemExit), (words, said.exception)
    assert not any(name in said.output for name in PYTHONS), (words, said.output)


WORDS: dict[str, tuple[list[str], str]] = {
    "try without plans": (
        ["try", "--plans", "", "s.py"],
        "--plans '' names no plan; give one or more, such as fp32,bf16-mixed",
    ),
    "bench without plans": (["bench", "sine", "--plans", ","], "--plans ',' names no plan"),
    "a long seed": (["train", "sine", "--seed", "99999999999999999999"], "is not a seed"),
    "a seed below zero": (["tune", "sine", "--seed", "-1"], "is not a seed"),
    "bytes as a path": (["train", "sine", "--out", "\udcff/o"], "is not valid text"),
    "a layout": (
        ["train", "sine", "--layout", "x"],
        "layout 'x': no dimension is given. Allowed: single, dp2",
    ),
    "no layout": (
        ["train", "sine", "--layout", ""],
        "layout '': no dimension is given. Allowed: single, dp2",
    ),
    "a module": (["bench", ".:x"], "'.' is not a module name"),
    "bytes as a file": (["bench", "\udcff.py:x"], "is not valid text"),
}


@pytest.mark.parametrize("what", WORDS)
def test_words_that_name_what_is_wrong(what: str) -> None:
    words, text = WORDS[what]
    said = CliRunner().invoke(app, words)
    assert said.exit_code in (1, 2)
    assert text in " ".join(said.stderr.replace("│", " ").split()), said.stderr
    assert not [path for path in Path().rglob("*") if path.is_file()]


def test_a_local_variable_is_not_offered_as_a_workload() -> None:
    Path("my_job.py").write_text(
        "from castwise import Workload\ndef make():\n    j = Workload('x')\n    return j\n"
    )
    with pytest.raises(WorkloadError, match=r"my_job\.py:attribute$"):
        find_workload("my_job.py")
    Path("other.py").write_text("from castwise import Workload\nmine = Workload('x')\n")
    with pytest.raises(WorkloadError, match=r"such as other\.py:mine$"):
        find_workload("other.py")


@pytest.mark.parametrize("text", ["", "x", "xx"])
def test_an_empty_layout(text: str) -> None:
    with pytest.raises(PlanError, match="no dimension is given"):
        Layout.parse(text)


def test_what_is_no_optimizer_and_no_loss() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Amp("bf16-mixed", device="cpu") as amp:
        amp.prepare(model, optimizer)
        for wrong in (1.0, None, [optimizer], model):
            with pytest.raises(PlanError, match=r"is not an optimizer\. .*max_norm=1\.0"):
                amp.step(optimizer, wrong)  # type: ignore[arg-type]
        with pytest.raises(
            CastwiseError, match=r"the loss is a dict; .*Add its losses, or pass each separately"
        ):
            amp.backward({"one": model(torch.ones(1, 2)).sum()})  # type: ignore[arg-type]
