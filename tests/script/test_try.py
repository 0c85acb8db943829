"""``castwise try``: a script's first steps under several plans, side by side, with nothing of its own overwritten."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.fresh import SOURCE, run_python
from tests.processes import Forked

from castwise.errors import CastwiseError, UnknownNameError
from castwise.script import race, try_script

DIGITS = (Path(__file__).with_name("published") / "digits.txt").read_text()


def _run(given: tuple[Connection, list[str]]) -> None:
    from castwise.cli import main

    pipe, words = given
    os.environ[race.ADDRESS] = str(pipe.fileno())
    main(words)


class _Process:
    """A fork as a ``Popen``."""

    def __init__(self, forked: Forked) -> None:
        self._forked = forked

    def wait(self, timeout: float = 60.0) -> int:
        return self._forked.wait(timeout)


@pytest.fixture(autouse=True)
def forks(monkeypatch: pytest.MonkeyPatch) -> list[Forked]:
    """Scripts run in forks of a process that has imported torch."""
    started: list[Forked] = []

    def start(
        name: str, script: str, arguments: Sequence[str], is_module: bool, folder: Path, log: Path
    ) -> Any:
        here, there = Pipe()
        words = ["run", "--plan", name, *(["-m"] if is_module else []), script, *arguments]
        with there:
            started.append(Forked(_run, (there, words), folder, log))
        out, err = log.with_name(f"{log.name}.out"), log.with_name(f"{log.name}.err")
        log.symlink_to(err)
        assert out.name
        return race._Child(name, _Process(started[-1]), here, log)  # type: ignore[arg-type]

    monkeypatch.setattr(race, "_started", start)
    monkeypatch.setattr(race, "BLOCK_S", 0.0)  # a step a block
    return started


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def losses_of(text: str) -> list[float]:
    return [float(line.rpartition(" ")[2]) for line in text.splitlines() if "Train Epoch" in line]


def test_every_plan_takes_the_same_steps_and_fp32_those_of_the_script(
    here: Path, forks: list[Forked]
) -> None:
    (here / "train.py").write_text(DIGITS)
    words = ["--epochs", "9", "--log-interval", "1"]
    plain = run_python(f"import sys\nsys.argv = ['', *{words}]\n" + DIGITS, here)
    result = try_script("train.py", words, plans=["fp32", "bf16-mixed", "fp16-mixed"], rounds=3)
    assert [(row.plan, row.status, row.skipped) for row in result.plans] == [
        ("fp32", "ok", 0), ("bf16-mixed", "ok", 0), ("fp16-mixed", "ok", 0),
    ]  # fmt: skip
    assert result.plans[0].final_loss == losses_of(plain)[result.steps - 1]
    assert result.rounds == 3
    for row in result.plans[1:]:
        assert row.final_loss != result.plans[0].final_loss
        assert row.final_loss == pytest.approx(result.plans[0].final_loss, rel=0.5)
        assert row.speedup is not None
        assert row.speedup.n == 3
    assert all(fork.code is not None for fork in forks)


def test_nothing_of_the_scripts_is_overwritten(here: Path) -> None:
    text = "open('log.txt', 'a').write('x')\n" + DIGITS
    (here / "train.py").write_text(text)
    (here / "log.txt").write_text("mine")
    try_script("train.py", ["--epochs", "1"], plans=["fp32"], rounds=1)
    assert sorted(path.name for path in here.iterdir()) == ["log.txt", "train.py"]
    assert (here / "log.txt").read_text() == "mine"
    try_script("train.py", ["--epochs", "1"], plans=["fp32"], rounds=1, in_place=True)
    assert (here / "log.txt").read_text() == "minex"


def test_a_plan_that_fails_has_a_row_with_its_last_words(here: Path) -> None:
    text = DIGITS.replace(
        "        x = F.relu(self.conv1(x))",
        "        x = F.relu(self.conv1(x))\n        assert x.dtype is torch.float32, 'low'",
    )
    (here / "train.py").write_text(text)
    result = try_script("train.py", plans=["fp32", "bf16-mixed"], rounds=2)
    assert [(row.status, row.reason) for row in result.plans] == [
        ("ok", ""),
        ("failed", "AssertionError: low"),
    ]
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(result.table())
    assert "bf16-mixed failed: AssertionError: low" in console.export_text()
    console.file.close()


@pytest.mark.parametrize(
    ("text", "said"),
    [("print('done')", "no step of an optimizer was seen; its last words: castwise run: no model"), ("1 / 0", "seen; its last words: ZeroDivisionError")],
)  # fmt: skip
def test_a_script_without_a_step_is_one_sentence(text: str, said: str, here: Path) -> None:
    (here / "train.py").write_text(text)
    with pytest.raises(CastwiseError, match=said):
        try_script("train.py", plans=["fp32", "bf16-mixed"])


def test_bad_input_is_refused_before_anything_runs(
    here: Path, forks: list[Forked], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CastwiseError, match=r"castwise run 'train.py': does not exist; allowed"):
        try_script("train.py")
    (here / "train.py").write_text(DIGITS)
    with pytest.raises(UnknownNameError, match="bf16-mixd"):
        try_script("train.py", plans=["bf16-mixd"])
    monkeypatch.setattr(race, "LARGEST_BYTES", 10)
    with pytest.raises(CastwiseError, match="--in-place"):
        try_script("train.py")
    assert not forks


def test_from_the_command_line(here: Path) -> None:
    (here / "train.py").write_text(DIGITS)
    done = subprocess.run(
        [sys.executable, "-m", "castwise", "try", "--plans", "fp32,bf16-mixed", "--rounds", "2", "train.py", "--epochs", "60"],
        cwd=here, capture_output=True, text=True, env={"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "train.py, its first" in done.stdout
    assert "bf16-mixed" in done.stdout
    assert torch.__version__ in done.stdout
