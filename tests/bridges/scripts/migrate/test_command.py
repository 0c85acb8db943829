"""``castwise migrate``: what it prints, and its exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from castwise.commands.cli import app

LOOP = """\
import torch
from torch.amp import GradScaler, autocast

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for batch in torch.randn(100, 4, 8).cuda():
    optimizer.zero_grad()
    with autocast("cuda"):
        loss = model(batch).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
BEFORE = "from apex import amp\nfrom apex.RNN import LSTM\n\namp.init()\n"
KEPT = (
    "castwise.compat.apex runs this script as it is written; docs/compat.md#apex lists for each name whether it works, "
    "differs or is absent"
)


def test_it_shows_a_diff_and_lists_what_is_left(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(BEFORE)
    done = CliRunner().invoke(app, ["migrate", str(file)])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[:2] == [f"--- {file}", f"+++ {file} (castwise)"]
    assert lines[3:7] == [
        "-from apex import amp",
        "+from castwise.compat.apex import amp",
        " from apex.RNN import LSTM",
        " ",
    ]
    assert f"{file}:1: kept: {KEPT}" in lines
    assert f"{file}:2: left: castwise.compat has no apex.RNN: use the recurrent layers of torch.nn" in lines
    assert lines[-1] == "Would rewrite 1 of 1 file; --write rewrites them (1 line left to you)"
    assert file.read_text() == BEFORE


def test_it_writes_when_asked(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(BEFORE)
    done = CliRunner().invoke(app, ["migrate", str(tmp_path), "--write"])
    assert done.exit_code == 0, done.output
    assert "Rewrote 1 of 1 file (1 line left to you)" in done.stdout
    assert file.read_text() == BEFORE.replace("from apex import", "from castwise.compat.apex import")


def test_a_file_that_cannot_be_migrated_is_code_1_and_the_others_are_shown(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(BEFORE)
    (tmp_path / "bad.py").write_text("from apex import amp\nif:\n")
    done = CliRunner().invoke(app, ["migrate", str(tmp_path)])
    assert done.exit_code == 1
    assert "+from castwise.compat.apex import amp" in done.stdout
    assert done.stderr.startswith("castwise: migrate: ")
    assert "bad.py cannot be parsed as Python: line 2" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_readme_shows_what_it_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old_script.py").write_text(LOOP)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["migrate", "old_script.py"])
    readme = (Path(__file__).parents[4] / "README.md").read_text(encoding="utf-8")
    assert f"$ castwise migrate old_script.py\n{done.stdout.rstrip()}\n```" in readme


def test_no_path_and_no_such_path(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["migrate"]).exit_code == 2
    done = CliRunner().invoke(app, ["migrate", str(tmp_path / "gone")])
    assert done.exit_code == 1
    assert "there is no file or folder" in done.stderr


def test_it_does_without_torch(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(BEFORE)
    code = (
        "import sys\nfrom castwise.commands.cli import main\n"
        f"try:\n    main(['migrate', {str(file)!r}])\nexcept SystemExit as end:\n    print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-2:] == ["0", "False"]
