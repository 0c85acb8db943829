"""Programs modelled on public ones: each is migrated, compiled, imported, and trained beside its original.

``corpus/NAME.txt`` is a program. ``# file:`` begins a file, ``# becomes:`` names the outcome, ``# says:`` gives listed
text, and ``# run: no`` means that the program cannot train here. Originals for Apex or Colossal-AI, and programs that
stay as they are, also run on the drop-in, through ``castwise.compat.install()``, because the test is about imports.
``corpus/library.py`` is on the import path of all programs and imports Apex itself.
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

import castwise.bridges.compat
from castwise.bridges.compat.apex import amp
from castwise.bridges.compat.apex.amp._amp_state import AmpState
from castwise.bridges.scripts.migrate import Migration, migrate
from tests.soak import some

CORPUS = Path(__file__).parent / "corpus"
NAMES = sorted(path.stem for path in CORPUS.glob("*.txt"))
ALONE = {
    "apex_by_text", "apex_patched_by_text", "apex_scaler_class", "torch_and_apex", "torch_scaler_later",
}  # fmt: skip
"""Programs that are the only ones to cover some line of the sources."""
DEALT = sorted({*some(NAMES, 2), *ALONE})
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


def nodes(folder: Path) -> Iterator[tuple[Path, ast.AST]]:
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield path, node


def train(folder: Path, *, served: bool) -> dict[str, Any]:
    """Run a program like ``python main.py``, then remove its modules and the casts of Apex's O1."""
    before = set(sys.modules)
    sys.path[:0] = [str(folder), str(CORPUS)]
    state = amp._amp_state
    if served:
        castwise.bridges.compat.install()
    try:
        torch.manual_seed(0)
        with warnings.catch_warnings(action="ignore"):  # warnings of the original libraries
            return runpy.run_path(str(folder / "main.py"))
    finally:
        castwise.bridges.compat.uninstall()
        if state.handle is not None:
            state.handle._deactivate()
        vars(state).clear()
        vars(state).update(vars(AmpState()))
        del sys.path[:2]
        for module in set(sys.modules) - before:
            home = Path(str(getattr(sys.modules[module], "__file__", "")))
            if {folder, CORPUS} & set(home.parents):
                del sys.modules[module]


@dataclasses.dataclass
class Program:
    name: str
    before: Path
    after: Path
    result: Migration

    @property
    def becomes(self) -> str:
        return head(self.name, "becomes")

    @property
    def texts(self) -> dict[Path, str]:
        return {path: path.read_text(encoding="utf-8") for path in sorted(self.after.rglob("*.py"))}


@pytest.fixture(scope="module", params=DEALT)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Program:
    before, after = (tmp_path_factory.mktemp(request.param) for _ in range(2))
    for folder in (before, after):
        unpack(request.param, folder)
    return Program(request.param, before, after, migrate(after, write=True))


def test_there_are_many() -> None:
    assert len(NAMES) >= 70
    assert sum(head(name, "run") != "no" for name in NAMES) >= 60


def test_what_becomes_of_a_program(program: Program) -> None:
    program.result.check()
    text = "".join(program.texts.values())
    library = re.search(r"castwise\.compat(\.apex|\.colossalai| import|\.install)", text)
    became = "drop-in" if library else "swapped" if program.result.changed else "stays"
    assert became == program.becomes
    findings = [finding for file in program.result.files for finding in file.findings]
    kinds = {finding.kind for finding in findings}
    assert ("kept" in kinds) is (became != "stays")
    assert "left" in kinds or became != "stays"
    assert any(head(program.name, "says") in finding.text for finding in findings)
    assert became != "stays" or not program.result.changed
    assert migrate(program.after).changed == ()


def test_half_a_program_is_finished_by_a_second_run(program: Program, tmp_path: Path) -> None:
    """A killed first run leaves only some of the files migrated."""
    done = {file.path.relative_to(program.after): file for file in program.result.changed}
    if len(done) < 2:
        pytest.skip("a single file cannot be half written")
    for one in done:
        for is_done in (True, False):
            folder = tmp_path / f"{one.as_posix().replace('/', '-')}-{is_done}"
            unpack(program.name, folder)
            for path in (path for path in done if (path == one) is is_done):
                (folder / path).write_text(done[path].after, encoding="utf-8")
            migrate(folder, write=True)
            assert {path: (folder / path).read_text(encoding="utf-8") for path in done} == {
                path: file.after for path, file in done.items()
            }


def test_every_import_is_there_or_listed(program: Program) -> None:
    listed = {
        file.path: " ".join(finding.text for finding in file.findings if finding.kind == "left")
        for file in program.result.files
    }
    served = any("castwise.compat.install(" in text for text in program.texts.values())
    for path, node in nodes(program.after):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        names = [alias.name for alias in node.names]
        for module in [node.module or ""] if isinstance(node, ast.ImportFrom) else names:
            library = module.partition(".")[0]
            if library in FOREIGN and not (served and library == "apex"):
                assert module in listed[path] or f"imports of {library} stay" in listed[path]
            elif module.startswith(("castwise", "apex")):
                found = importlib.import_module(f"castwise.compat.{module}" if library == "apex" else module)
                for name in names if isinstance(node, ast.ImportFrom) and names != ["*"] else []:
                    assert hasattr(found, name) or importlib.import_module(f"{found.__name__}.{name}")


def test_a_program_trains_as_it_did(program: Program) -> None:
    """Losses, loss scales and weights are bitwise equal."""
    if head(program.name, "run") == "no":
        pytest.skip("needs a GPU, several processes or a part that the drop-in lacks")
    want = train(program.before, served=True)
    got = train(program.after, served=program.becomes == "stays")
    assert len(want["losses"]) >= 5
    assert got["losses"] == want["losses"]
    assert got.get("scales") == want.get("scales")
    for name in (key for key, value in want.items() if isinstance(value, torch.nn.Module)):
        weights = got[name].state_dict()
        assert all(torch.equal(weights[key], value) for key, value in want[name].state_dict().items())
