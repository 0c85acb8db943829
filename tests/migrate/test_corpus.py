"""Programs in the forms that public ones have: each migrated, compiled, imported, and trained beside its original.

``corpus/NAME.txt`` is a program: ``# file:`` begins a file of it, ``# becomes:`` says what comes of it, ``# says:`` what is
listed, ``# run: no`` that it cannot train here. The original of one for Apex or Colossal-AI runs on the drop-in too, by
``castwise.compat.install()``: its imports are what is tested.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
import runpy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import castwise.compat
from castwise.compat.apex import amp
from castwise.compat.apex.amp._amp_state import AmpState
from castwise.migrate import Migration, migrate

CORPUS = Path(__file__).parent / "corpus"
NAMES = sorted(path.stem for path in CORPUS.glob("*.txt"))
FOREIGN = ("apex", "colossalai", "amp_C")


def head(name: str, word: str) -> str:
    found = re.search(
        rf"^# {word}: (.*)$", (CORPUS / f"{name}.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    return found[1] if found else ""


def unpack(name: str, folder: Path) -> None:
    text = (CORPUS / f"{name}.txt").read_text(encoding="utf-8")
    _, *files = re.split(r"^# file: (.*)\n", text, flags=re.MULTILINE)
    for path, content in zip(files[::2], files[1::2], strict=True):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content, encoding="utf-8")


def imports(folder: Path) -> Iterator[tuple[Path, ast.Import | ast.ImportFrom]]:
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                yield path, node


def train(folder: Path) -> dict[str, Any]:
    """Run a program as ``python main.py`` would, and forget its modules and what Apex's O1 left in force."""
    before = set(sys.modules)
    sys.path[:0] = [str(folder), str(CORPUS)]
    state = amp._amp_state
    try:
        torch.manual_seed(0)
        with warnings.catch_warnings(
            action="ignore"
        ):  # those of the libraries that the programs were written for
            return runpy.run_path(str(folder / "main.py"))
    finally:
        if state.handle is not None:
            state.handle._deactivate()
        vars(state).clear()
        vars(state).update(vars(AmpState()))
        del sys.path[:2]
        for module in set(sys.modules) - before:
            if Path(str(getattr(sys.modules[module], "__file__", ""))).parent in (
                folder,
                CORPUS,
                folder / "project",
            ):
                del sys.modules[module]


@dataclasses.dataclass
class Program:
    name: str
    before: Path
    after: Path
    result: Migration


@pytest.fixture(scope="module", params=NAMES)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Program:
    before, after = (tmp_path_factory.mktemp(request.param) for _ in range(2))
    for folder in (before, after):
        unpack(request.param, folder)
    return Program(request.param, before, after, migrate(after, write=True))


def test_there_are_many() -> None:
    assert len(NAMES) >= 60


def test_what_becomes_of_a_program(program: Program) -> None:
    program.result.check()
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(program.after.rglob("*.py")))
    became = "session" if "castwise.Amp(" in text else "drop-in" if "castwise.compat" in text else "stays"
    assert became == head(program.name, "becomes")
    findings = [finding for file in program.result.files for finding in file.findings]
    kinds = {finding.kind for finding in findings}
    assert ("kept" in kinds) is (became == "drop-in")
    assert "left" in kinds or became != "stays"
    assert any(head(program.name, "says") in finding.text for finding in findings)
    assert migrate(program.after).changed == ()


def test_every_import_is_there_or_listed(program: Program) -> None:
    listed = {
        file.path: " ".join(finding.text for finding in file.findings if finding.kind == "left")
        for file in program.result.files
    }
    for path, node in imports(program.after):
        names = [alias.name for alias in node.names]
        for module in [node.module or ""] if isinstance(node, ast.ImportFrom) else names:
            if module.partition(".")[0] in FOREIGN:
                assert module in listed[path]
            elif module.startswith("castwise"):
                found = importlib.import_module(module)
                for name in names if isinstance(node, ast.ImportFrom) and names != ["*"] else []:
                    assert hasattr(found, name) or importlib.import_module(f"{module}.{name}")


def test_a_program_trains_as_it_did(program: Program) -> None:
    """The same losses, to the last digit."""
    if head(program.name, "run") == "no":
        pytest.skip("it needs a GPU, processes, or what the drop-in does not have")
    castwise.compat.install()
    try:
        want = train(program.before)
    finally:
        castwise.compat.uninstall()
    got = train(program.after)
    assert len(want["losses"]) >= 5
    assert got["losses"] == want["losses"]
    assert got.get("scales") == want.get("scales")
