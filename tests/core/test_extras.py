"""castwise works with only torch, NumPy and rich, and names the extra to install when a library is missing."""

from __future__ import annotations

import ast
import json
import re
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from castwise.core.extras import EXTRAS, left_out, needs
from tests.fresh import run_python

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "castwise"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CORE = {"torch", "numpy", "rich"}

CORE_WORKS = """
    import sys
    for library in {missing!r}:
        sys.modules[library] = None
    import torch, castwise
    from torch import nn

    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = [torch.randn(16, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(8)]

    def loss(model, batch):
        return model(batch).square().mean()

    with castwise.Amp("fp16-mixed", device="cpu") as amp:
        amp.prepare(model, optimizer)
        for batch in batches:
            amp.backward(loss(model, batch))
            amp.step(optimizer, max_norm=1.0)
            optimizer.zero_grad()
    scaler = castwise.GradScaler("cpu")
    scaler.scale(loss(model, batches[0])).backward()
    scaler.step(optimizer)
    scaler.update()
    workload = castwise.Workload(
        name="mine", model=lambda: nn.Linear(4, 1), optimizer=lambda params: torch.optim.SGD(params, 0.1),
        batches=lambda seed: iter(batches * 100), loss=loss,
    )
"""
WITHOUT = {
    "typer": (
        "from castwise.commands.cli import main\nmain(['--version'])",
        'castwise: the command line needs typer, which is not installed. Install it with: pip install "castwise[cli]"\nexit 1\n',
    ),
    "libcst": (
        "from castwise.bridges.scripts.migrate import migrate\nmigrate('train.py')",
        'MissingLibraryError: migrate needs libcst, which is not installed. Install it with: pip install "castwise[migrate]"\n',
    ),
    "sklearn": (
        "next(castwise.lab.workloads.workload.find_workload('digits').batches(0))",
        "MissingLibraryError: workload 'digits' needs sklearn, which is not installed. "
        'Install it with: pip install "castwise[workloads]"\n',
    ),
    "tensorboard": (
        "from castwise.commands.jobs.train import train\nprint(train(workload, 'fp32', steps=2, out='o', device='cpu').files)",
        'LeftOutWarning: left out: the log for TensorBoard needs tensorboard, which is not installed. Install it with: pip install "castwise[tensorboard]"\n'
        "('metrics.jsonl', 'model.pt', 'curves.png')\n",
    ),
    "matplotlib": (
        "from castwise.commands.jobs.train import train\nprint(train(workload, 'fp32', steps=2, out='o', device='cpu').files)",
        'LeftOutWarning: left out: curves.png needs matplotlib, which is not installed. Install it with: pip install "castwise[report]"\n'
        "('metrics.jsonl', 'tensorboard', 'model.pt')\n",
    ),
    "jinja2": (
        "found = castwise.bench(workload, ['fp32'], steps=8, rounds=1, starts=0, memory=False, inference=False, device='cpu')\n"
        "print([str(path) for path in found.save('o')])",
        'LeftOutWarning: left out: bench.html with its pictures needs jinja2, which is not installed. Install it with: pip install "castwise[report]"\n'
        "['o/bench.json']\n",
    ),
    "cloudpickle": (
        "from castwise.lab.timing.processes import portable, received\nprint(received(portable('sine')).name)\nportable(workload)",
        "sine\nNotThereError: workload 'mine' cannot be sent to another process (",
    ),
}
SAY = """
    import traceback, warnings
    warnings.showwarning = lambda message, category, *_: print(f"{{category.__name__}}: {{message}}")
    sys.stderr = sys.stdout
    try:
        exec({code!r})
    except SystemExit as end:
        print(f"exit {{end.code}}")
    except Exception as error:
        print(f"{{type(error).__name__}}: {{error}}")
"""


def without(*missing: str, code: str, folder: Path) -> str:
    """Run a short training and then the code, with the given libraries missing; return the output."""
    lines = textwrap.dedent(CORE_WORKS).format(missing=missing) + textwrap.dedent(SAY).format(code=code)
    return run_python(lines, folder)


@pytest.mark.parametrize("library", EXTRAS)
def test_without_a_library_one_can_train_and_what_needs_it_says_what_installs_it(
    library: str, tmp_path: Path
) -> None:
    code, said = WITHOUT[library]
    assert without(library, code=code, folder=tmp_path).startswith(said)


def test_without_typer_an_error_is_json_where_json_is_asked_for(tmp_path: Path) -> None:
    code = "from castwise.commands.cli import main\nmain(['doctor', '--json'])"
    _, error, end = without("typer", code=code, folder=tmp_path).splitlines()
    assert json.loads(error)["error"]["message"].endswith('pip install "castwise[cli]"')
    assert end == "exit 1"


def test_a_command_says_in_a_sentence_what_it_leaves_out(tmp_path: Path) -> None:
    code = "from castwise.commands.cli import main\nmain(['train', 'sine?size=16&hidden=8', '--steps', '2', '--out', 'o', '--device', 'cpu'])"
    said = without("matplotlib", "tensorboard", code=code, folder=tmp_path)
    for what, library, extra in (
        ("the log for TensorBoard", "tensorboard", "tensorboard"),
        ("curves.png", "matplotlib", "report"),
    ):
        assert f"\ncastwise: left out: {what} needs {library}, which is not installed. Install it with: pip install \"castwise[{extra}]\"\n" in f"\n{said}"  # fmt: skip
    assert "Warning" not in said
    assert "Wrote\n  o/result.json\n  o/metrics.jsonl\n  o/model.pt\nexit 0\n" in said


def test_without_all_of_them_one_can_tune_and_race_ones_own_objects(tmp_path: Path) -> None:
    code = """
        tuned = castwise.tune(
            model=nn.Linear(4, 1), loss=lambda model, batch: loss(model, batch), batches=batches,
            optimizer=workload.optimizer, goal="numerics", formats=("bf16",), memory=False, device="cpu", out="tuned",
        )
        print(tuned.plan.compute, sorted(path.name for path in tuned.files))
        raced = castwise.bench(workload, ["fp32"], steps=8, rounds=1, starts=2, memory=False, inference=False, device="cpu")
        print(raced.notes[0])
    """
    said = without(*EXTRAS, code=textwrap.dedent(code), folder=tmp_path)
    assert "left out: report.html with its pictures needs" in said
    assert "bf16 ['evidence.json', 'plan.json']\n" in said
    assert (
        "All plans were timed once, in one process: workload 'mine' cannot be sent to another process" in said
    )
    assert 'or let cloudpickle send it: pip install "castwise[tune]"' in said


def test_the_cache_lies_where_the_system_wants_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from castwise.lab.search import index

    monkeypatch.delenv("CASTWISE_CACHE_DIR")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    for platform, folder in {
        "linux": ".cache/castwise", "darwin": "Library/Caches/castwise", "win32": "AppData/Local/castwise/Cache",
    }.items():  # fmt: skip
        monkeypatch.setattr(sys, "platform", platform)
        assert index.folder() == tmp_path / folder / "plans"
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert index.folder() == tmp_path / "x" / "castwise" / "plans"


def test_what_fails_while_it_is_imported_is_not_taken_for_missing() -> None:
    with pytest.raises(ImportError, match=r"^broken$"), needs("this"):
        raise ImportError("broken", name="elsewhere")
    with pytest.raises(ImportError, match=r"^old$"), left_out("this"):
        raise ImportError("old")


# --- the lists agree ----------------------------------------------------------------------------------------


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=~!;]", requirement)[0].lower() for requirement in requirements}


def test_every_extra_brings_the_libraries_that_are_said_to_come_with_it() -> None:
    extras = PROJECT["optional-dependencies"]
    distribution = {"sklearn": "scikit-learn"}
    brought: dict[str, set[str]] = {}
    for library, extra in EXTRAS.items():
        brought.setdefault(extra, set()).add(distribution.get(library, library))
    assert brought == {extra: names(extras[extra]) for extra in brought}
    assert extras["all"] == [f"castwise[{','.join(sorted(brought))}]"]
    assert names(PROJECT["dependencies"]) == CORE


def test_every_library_that_is_imported_is_one_of_them() -> None:
    """Every imported library belongs to an extra, except in the trainer bridges: their users have the libraries."""
    own = sys.stdlib_module_names | CORE | {"castwise"}
    found = {
        name
        for path in SOURCE.rglob("*.py")
        if SOURCE / "bridges" / "trainers" not in path.parents
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in (
            [alias.name for alias in node.names] if isinstance(node, ast.Import)
            else [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        )
    }  # fmt: skip
    assert {name.partition(".")[0] for name in found} - own == set(EXTRAS) - {"tensorboard"}
    assert "torch.utils.tensorboard" in found


@pytest.mark.parametrize("page", ["README.md", "docs/install.md"])
def test_pages_say_how_to_install_each(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert "castwise[all]" in text
    if page == "docs/install.md":
        for extra in sorted(set(EXTRAS.values())):
            assert f"`castwise[{extra}]`" in text
