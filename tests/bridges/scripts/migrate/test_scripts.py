"""Whole scripts: the result of each, the findings listed, and a check that it trains as before.

``scripts/NAME.before.txt`` is a script, ``NAME.after.txt`` the result and ``NAME.list.txt`` the list of findings.
"""

from __future__ import annotations

import ast
import io
import tokenize
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from castwise.bridges.scripts.migrate.rewriting import rewrite
from tests.soak import every

SCRIPTS = Path(__file__).parent / "scripts"
NAMES = sorted(path.name.removesuffix(".before.txt") for path in SCRIPTS.glob("*.before.txt"))
RUN = [name for name in NAMES if name.startswith("torch_")]


def read(name: str, part: str) -> str:
    return (SCRIPTS / f"{name}.{part}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_what_becomes_of_a_script(name: str) -> None:
    after, findings = rewrite(read(name, "before"))
    assert after == read(name, "after")
    assert "".join(f"{f.line}: {f.kind}: {f.text}\n" for f in findings) == read(name, "list")


@every(2, 1)
@pytest.mark.parametrize("name", NAMES)
def test_migrating_twice_changes_nothing_more(name: str) -> None:
    after = read(name, "after")
    ast.parse(after)
    assert rewrite(after)[0] == after


def _comments(text: str) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


@pytest.mark.parametrize("name", NAMES)
def test_every_comment_survives(name: str) -> None:
    assert _comments(read(name, "after")) == _comments(read(name, "before"))


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_castwise_that_is_written_exists(name: str) -> None:
    import castwise

    for node in ast.walk(ast.parse(read(name, "after"))):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "castwise"
        ):
            assert node.attr in castwise.__all__ or node.attr == "compat"


def _run(text: str) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "__main__"}
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # torch's deprecated names
        exec(compile(text, "script", "exec"), space)
    return space


@pytest.mark.parametrize("name", RUN)
def test_a_script_trains_as_it_did(name: str) -> None:
    """Losses, loss scales and weights are bitwise equal."""
    before, after = _run(read(name, "before")), _run(read(name, "after"))
    assert "castwise" in read(name, "after")
    assert len(before["losses"]) == len(after["losses"]) > 2
    assert after["losses"] == before["losses"]
    assert after["scales"] == before["scales"]
    for model in (key for key, value in before.items() if isinstance(value, torch.nn.Module)):
        want, got = before[model].state_dict(), after[model].state_dict()
        assert all(torch.equal(got[key], value) for key, value in want.items())


def test_scripts_that_run_skip_steps() -> None:
    """Otherwise the comparison of loss scales would test nothing."""
    skipped = [name for name in RUN if len(set(_run(read(name, "before"))["scales"])) > 1]
    assert len(skipped) >= 5
