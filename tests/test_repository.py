"""The repository itself: what readers, installers and reviewers rely on without checking."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
import types
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor

import castwise
from castwise.core.extras import EXTRAS
from tests.fresh import run_interpreter, run_python

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "castwise"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def tracked() -> list[Path]:
    """Return every file under version control."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs git and a checkout: this tree is an unpacked archive")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


# --- private torch API --------------------------------------------------------------------------------------

ALLOWED_PRIVATE = {
    "torch.nn.modules.batchnorm._BatchNorm",  # the common base of BatchNorm1d to 3d; there is no public one
    "torch.nn.modules.conv._ConvNd",  # likewise for convolutions
}


def private_torch(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield uses of names with a leading underscore that are reached through torch: ``(line, dotted name)``."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    known[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    yield from _private(node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield from _private(node.lineno, f"{node.module}.{alias.name}")
    inside = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if id(node) in inside:
            continue  # part of a longer chain, which is checked
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in known:
            yield from _private(inner.lineno, ".".join([known[inner.id], *reversed(parts)]))


def _private(line: int, dotted: str) -> Iterator[tuple[int, str]]:
    parts = dotted.split(".")
    hidden = any(part.startswith("_") and not part.endswith("__") for part in parts)
    if hidden and not any(f"{dotted}.".startswith(f"{allowed}.") for allowed in ALLOWED_PRIVATE):
        yield line, dotted


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import torch\ntorch._C._get_privateuse1_backend_name()", "torch._C._get_privateuse1_backend_name"),
        ("import torch._dynamo", "torch._dynamo"),
        ("import torch._inductor.config as config", "torch._inductor.config"),
        ("from torch._inductor import config", "torch._inductor.config"),
        ("from torch import _foreach_mul_", "torch._foreach_mul_"),
        ("from torch import nn\nnn.functional._verify_batch_size", "torch.nn.functional._verify_batch_size"),
        ("import torch.nn.functional as F\nF._pad_circular", "torch.nn.functional._pad_circular"),
        ("import torch\nprint(torch.__version__, torch.nn.modules.conv._ConvNd)", None),
        ("import torch\nself._C = torch.cuda", None),
    ],
)
def test_the_search_for_private_torch_api_finds_it(line: str, found: str | None) -> None:
    assert {name for _, name in private_torch(ast.parse(line))} == ({found} if found else set())


def hidden(owner: object) -> frozenset[str]:
    """Return the names with one leading underscore of an object or class of torch."""
    return frozenset(name for name in dir(owner) if name.startswith("_") and not name.startswith("__"))


@functools.cache
def hidden_in_torch() -> frozenset[str]:
    """Return these names for the torch objects that castwise uses."""
    one = torch.zeros(1)
    owners = (
        torch.Tensor, nn.Parameter, nn.Linear(1, 1), nn.MultiheadAttention(2, 1), nn.LSTM(1, 1), nn.BatchNorm1d(1),
        torch.optim.SGD([one], 0.1), torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler("cpu"),
        torch.autocast("cpu"), torch.compile(nn.Linear(1, 1)), nn.parallel.DistributedDataParallel, DTensor, FSDPModule,
        PipelineStage, Schedule1F1B, torch.autograd.Function, torch.ops.aten.mm.default, torch.ops.aten.mm,
        torch.utils.data.DataLoader, torch.utils.hooks.RemovableHandle,
    )  # fmt: skip
    return frozenset[str]().union(*map(hidden, owners)) | {"_step_supports_amp_scaling"}


def private_attributes(tree: ast.AST, module: types.ModuleType | None = None) -> Iterator[tuple[int, str]]:
    """Yield uses of private attributes of torch objects: ``(line, expression)``.

    A class's own attributes may have any name, unless a torch base class has that name too.
    """

    def visit(node: ast.AST, inherited: frozenset[str]) -> Iterator[tuple[int, str]]:
        if isinstance(node, ast.ClassDef):
            cls = getattr(module, node.name, None)
            bases = cls.__mro__ if isinstance(cls, type) else ()
            theirs = [base for base in bases if base.__module__.partition(".")[0] == "torch"]
            inherited = frozenset[str]().union(*map(hidden, theirs))
            if issubclass(nn.Module, tuple(theirs) or (int,)):
                inherited |= hidden(nn.Module())
        owner: ast.AST | None = None
        if isinstance(node, ast.Attribute):
            owner, name = node.value, node.attr
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "setattr", "hasattr", "delattr")
            and len(node.args) > 1
            and isinstance(node.args[1], ast.Constant)
        ):
            owner, name = node.args[0], str(node.args[1].value)
        if owner is not None:
            own = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
            if name in (inherited if own else hidden_in_torch()):
                yield node.lineno, ast.unparse(node)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inherited)

    return visit(tree, frozenset())


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("scaler._scale", 1),
        ("tensor._version + module._forward_hooks[0]", 2),
        ("getattr(model, '_orig_mod', None)", 1),
        ("class Mine:\n    def f(self):\n        return self._scale, self._mine", 0),
        ("class Plain(nn.Module):\n    def f(self):\n        return self._buffers, self._mine", 1),
        ("other._mine", 0),
    ],
)
def test_the_search_for_private_attributes_finds_them(line: str, found: int) -> None:
    module = types.ModuleType("planted")
    exec("from torch import nn\nclass Mine: ...\nclass Plain(nn.Module): ...", vars(module))
    assert len([*private_attributes(ast.parse(line), module)]) == found


def test_private_torch_api_has_one_home() -> None:
    """Changes in a new torch release can then be handled in one package."""
    uses = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in SOURCE.rglob("*.py")
        if path.parent.name != "_torch" and path.name != "__main__.py"
        for tree in [ast.parse(path.read_text(encoding="utf-8"))]
        for line, name in (*private_torch(tree), *private_attributes(tree, module_of(path)))
    ]
    assert not uses, "private torch API belongs into src/castwise/core/_torch/:\n" + "\n".join(uses)


FACTORIES = {
    "arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones", "rand", "randint",
    "randn", "randperm", "tensor", "zeros",
}  # fmt: skip
PARAMETERS = {"digits.py": 1}
"""Workload files whose modules create parameters on the user's default device, and how many they create."""


def without_device(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield tensors that are created on the user's default device: ``(line, call)``."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and (node.func.value.id, node.func.attr in FACTORIES) == ("torch", True)
            and not any(keyword.arg in ("device", None) for keyword in node.keywords)
        ):
            yield node.lineno, ast.unparse(node)


def test_every_tensor_is_made_on_a_device_that_is_named() -> None:
    """A user's ``torch.set_default_device`` does not move tensors that castwise keeps on the host."""
    assert [
        *without_device(ast.parse("torch.zeros(2)\ntorch.zeros(2, device=d)\ntorch.zeros(2, **like)"))
    ] == [(1, "torch.zeros(2)")]
    found = {
        path: calls
        for path in SOURCE.rglob("*.py")
        if (calls := [*without_device(ast.parse(path.read_text(encoding="utf-8")))])
        and len(calls) != PARAMETERS.get(path.name)
    }
    assert not found


def module_of(path: Path) -> types.ModuleType:
    """Import the module of a file in the package."""
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))


# --- what importing costs -----------------------------------------------------------------------------------


def imported(path: Path, modules: Collection[str]) -> set[str]:
    """Return the castwise modules that a file imports anywhere."""
    out = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            out |= {name if name in modules else node.module for name in names}
        elif isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names}
    return out & set(modules)


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside functions and for types count: to understand one file of a cycle, one has to read all of them."""
    files = {
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in SOURCE.rglob("*.py")
    }
    graph = {name: imported(path, files) - {name} for name, path in files.items()}
    graphlib.TopologicalSorter(graph).prepare()
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter({**graph, "castwise.errors": {"castwise"}}).prepare()


def test_importing_castwise_imports_nothing_else(tmp_path: Path) -> None:
    code = """
        import sys
        before = set(sys.modules)
        import castwise
        new = set(sys.modules) - before
        print(sorted(name for name in new if name.partition(".")[0] not in sys.stdlib_module_names))
    """
    assert run_interpreter(textwrap.dedent(code), tmp_path) == "['castwise']\n"


def test_a_training_loop_imports_no_library_of_the_commands_and_no_drop_in(tmp_path: Path) -> None:
    heavy = [*EXTRAS, "accelerate", "click", "lightning", "pydantic", "rich", "transformers"]
    code = f"""
        import sys, torch, castwise
        for name in castwise.__all__:
            getattr(castwise, name)
        layer = torch.nn.Linear(2, 2)
        castwise.Amp("bf16-mixed", device="cpu").prepare(layer, torch.optim.SGD(layer.parameters(), 0.1))
        print([name for name in {heavy!r} if name in sys.modules])
        print([name for name in sys.modules if name.startswith("castwise.compat")])
    """
    assert run_python(textwrap.dedent(code), tmp_path) == "[]\n[]\n"


def test_training_imports_no_room_that_measures_or_reports(tmp_path: Path) -> None:
    code = """
        import sys, castwise
        castwise.Amp, castwise.GradScaler, castwise.autocast, castwise.Plan
        print(*{name.removeprefix("castwise.") for name in sys.modules if name.startswith("castwise.")})
    """
    rooms = set(run_python(textwrap.dedent(code), tmp_path).split())
    assert "core.session" in rooms
    assert {room.split(".")[0] for room in rooms} == {"core", "errors"}
    assert "core.checkpoint" not in rooms


# --- the public face ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", castwise.__all__)
def test_every_public_name_says_what_it_is(name: str) -> None:
    doc = getattr(castwise, name).__doc__
    assert doc, f"castwise.{name} has no docstring"
    assert not doc.startswith(f"{name}("), f"castwise.{name} has the docstring that dataclass makes"


def test_public_names_are_listed_once_and_in_order() -> None:
    assert castwise.__all__ == sorted(set(castwise.__all__))
    assert set(castwise.__all__) < set(dir(castwise))
    with pytest.raises(AttributeError, match=r"module 'castwise' has no attribute 'autocats'; it has Amp, "):
        castwise.autocats  # noqa: B018 - the access is the test


def test_what_the_docs_name_is_there_after_import_castwise() -> None:
    code = "import castwise; print(castwise.ranks.ALONE, castwise.errors.PlanError.__name__, castwise.checkpoint.newest.__name__)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.split() == ["castwise.ranks.ALONE", "PlanError", "newest"]


def test_the_program_that_a_type_checker_reads_uses_every_public_name() -> None:
    text = (ROOT / "tests" / "typed_use.py").read_text(encoding="utf-8")
    unused = [name for name in castwise.__all__ if not re.search(rf"\bcastwise\.{name}\b", text)]
    assert not unused
    assert "tests/typed_use.py" in (ROOT / "Makefile").read_text(encoding="utf-8")


# --- documents about the code -------------------------------------------------------------------------------

HARD_ROOMS = ("casting", "masters", "ranks", "scaler", "session")
GUIDES = [ROOT / "CONTRIBUTING.md", *sorted(SOURCE.rglob("README.md"))]


def missing(text: str, *folders: Path) -> list[str]:
    """Return files, and ``file.py::name`` in them, that a text names in backticks and that do not exist.

    Args:
        text: Markdown.
        folders: Where paths may begin, besides the root of the repository and the package.
    """
    named = re.findall(r"`([\w./-]+\.(?:py|md|toml))(?:::([\w.]+))?`", text)
    assert sum(bool(name) for _, name in named) == text.count(".py::"), "a name that cannot be looked up"
    out = []
    for path, name in named:
        file = next((base / path for base in (ROOT, SOURCE, *folders) if (base / path).is_file()), None)
        if file is None or (name and not defines(ast.parse(file.read_text(encoding="utf-8")), name)):
            out.append(f"{path}::{name}" if name else path)
    return out


def defines(tree: ast.Module | ast.ClassDef, name: str) -> bool:
    """Return whether there is a function or class of this name; ``Class.method`` for a method."""
    first, _, rest = name.partition(".")
    return any(
        node.name == first and (not rest or (isinstance(node, ast.ClassDef) and defines(node, rest)))
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    )


def test_the_search_for_names_that_do_not_exist_finds_them() -> None:
    bad = [
        "tests/test_none.py",
        "core/scaler/window.py::Windows",
        "core/scaler/window.py::Window.opens",
        "a/b.md",
    ]
    good = [
        "tests/core/plans/test_plan.py::test_frozen",
        "core/scaler/window.py::Window.open",
        "core/model/resolve.py",
        "README.md",
    ]
    assert missing(" ".join(f"`{name}`" for name in (*bad, *good))) == bad


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_guide_names_exists(guide: Path) -> None:
    """CONTRIBUTING and the package READMEs name files, functions and tests, which must be updated when they move."""
    assert not missing(guide.read_text(encoding="utf-8"), guide.parent)


@pytest.mark.parametrize("room", HARD_ROOMS)
def test_a_hard_room_says_what_holds_what_bites_and_which_test_shows_it(room: str) -> None:
    text = (SOURCE / "core" / room / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 48, "half a page"
    for heading in ("What holds", "What bites"):
        points = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0].split("\n- ")[1:]
        assert points
        for point in points:
            assert "`tests/" in point, f"no test shows: {point}"


# --- releases -----------------------------------------------------------------------------------------------


def test_news_fragments_are_of_a_known_type() -> None:
    known = {entry["directory"] for entry in PROJECT["tool"]["towncrier"]["type"]}
    fragments = [path for path in (ROOT / "changes").iterdir() if not path.name.startswith(".")]
    assert fragments
    for path in fragments:
        slug, kind, suffix = path.name.split(".")
        assert re.fullmatch(r"[a-z0-9-]+", slug), path.name
        assert kind in known, f"{path.name}: {kind!r} is none of {sorted(known)}"
        assert suffix == "md", path.name
        text = path.read_text(encoding="utf-8")
        assert text.strip().endswith("."), f"{path.name}: not a sentence"
        assert text.count("\n") == 1, f"{path.name}: more than one line"


def test_every_development_tool_has_its_version_pinned() -> None:
    pinned = {
        line.partition("==")[0].lower()
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    }
    extras = PROJECT["project"]["optional-dependencies"]
    asked = [*PROJECT["project"]["dependencies"], *itertools.chain(*extras.values())]
    names = {re.split(r"[\[<>=~!;]", requirement)[0].lower() for requirement in asked}
    assert names - pinned == {"torch", "castwise"}
    assert "torch" not in pinned, "make installs torch first; a second pin could pull another build"


def test_every_exempted_warning_says_why() -> None:
    lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    start = lines.index("filterwarnings = [")
    entries = lines[start + 1 : lines.index("]", start)]
    assert entries[0].strip() == '"error",'
    for before, line in itertools.pairwise(entries):
        if not line.strip().startswith("#"):
            assert before.strip().startswith("#"), f"no reason above {line.strip()}"


# --- what the repository must not contain -------------------------------------------------------------------

# Split into pieces, because this file is tracked too.
MACHINE_PATH = re.compile(
    r"(?<![\w.$)}/~-])/(?:wor" + r"k|roo" + r"t|hom" + r"e|User" + r"s)/(?!joe/)"
)  # tests use the placeholder name joe
REGISTRY = re.compile(r"py" + r"pi\.org|python" + r"hosted|download\.py" + r"torch|npm" + r"js")


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("see /ro" + "ot/x", True),
        ('"/ho' + 'me/me/a"', True),
        ("src/wo" + "rk/a", False),
        ("./ho" + "me/a", False),
    ],
)
def test_the_search_for_machine_paths_finds_them(text: str, bad: bool) -> None:
    assert bool(MACHINE_PATH.search(text)) is bad


def test_no_tracked_file_names_a_machine_or_a_registry() -> None:
    found = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture
        for pattern in (MACHINE_PATH, REGISTRY):
            found += [f"{path.relative_to(ROOT)}: {match.group()}" for match in pattern.finditer(text)]
    assert not found, "\n".join(found)


# --- checks for every change --------------------------------------------------------------------------------


def test_ci_runs_the_linters_and_the_tests_and_nothing_else() -> None:
    path = ROOT / ".ci" / "run"
    assert os.access(path, os.X_OK)
    commands = [
        line
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.strip() and not line.startswith("#")
    ]
    assert commands == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "make lint test"]


@pytest.mark.parametrize(
    ("former", "now"),
    [
        ("checkpoint", "core.checkpoint"),
        ("compat.apex.amp.frontend", "bridges.compat.apex.amp.frontend"),
        ("integrations.pytest", "bridges.trainers.pytest"),
        ("inspection.compare", "lab.inspect.compare"),
        ("monitor", "lab.watch"),
        ("numerics.parity", "lab.parity.parity"),
        ("plans.plan", "core.plans.plan"),
        ("workload", "lab.workloads.workload"),
    ],
)
def test_former_paths_name_the_same_modules(former: str, now: str, tmp_path: Path) -> None:
    """Covers plain import, import from, attribute access and pickles."""
    package, _, last = f"castwise.{former}".rpartition(".")
    code = f"""
        import importlib, pickle, sys
        import castwise.{former}
        from {package} import {last} as one
        import castwise.{now}
        real = sys.modules["castwise.{now}"]
        assert sys.modules["castwise.{former}"] is real is importlib.import_module("castwise.{former}")
        assert real.__name__ == real.__spec__.name == "castwise.{now}"
        name, held = next((name, held) for name, held in vars(real).items() if callable(held) and name.isidentifier())
        assert pickle.loads(f"ccastwise.{former}\\n{{name}}\\n.".encode()) is held
    """
    run_python(textwrap.dedent(code), tmp_path)


def test_a_former_path_puts_nothing_over_a_name_of_its_package(tmp_path: Path) -> None:
    """``apex.amp._amp_state`` is a module and also an object of the same name in the package."""
    code = """
        import sys
        import castwise.compat.apex as apex
        from castwise.compat.apex.amp._amp_state import _amp_state
        from castwise.compat.apex import amp
        assert amp._amp_state is _amp_state
        assert sys.modules["castwise.compat.apex.amp"] is amp
    """
    run_python(textwrap.dedent(code), tmp_path)
