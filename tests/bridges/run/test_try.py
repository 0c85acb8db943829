"""``castwise try``: the first steps of a script under several plans, without overwriting its files."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from castwise.bridges.run import copies, race, try_script
from castwise.errors import CastwiseError, UnknownNameError
from tests.fresh import SOURCE, run_python
from tests.processes import Forked
from tests.soak import each_value

DIGITS = (Path(__file__).with_name("published") / "digits.txt").read_text()


pytestmark = pytest.mark.usefixtures("forks")


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


@pytest.mark.parametrize("step", [0, 2, 4])
def test_a_script_that_fails_under_one_plan_fails_there_alone(step: int, here: Path) -> None:
    """The failure is in the first step, during warm-up, or in a timed round."""
    text = DIGITS.replace(
        "        x = F.relu(self.conv1(x))",
        "        self.calls = getattr(self, 'calls', 0) + 1\n        x = F.relu(self.conv1(x))\n"
        f"        assert x.dtype is torch.float32 or self.calls <= {step}, 'late'",
    )
    (here / "train.py").write_text(text)
    result = try_script(
        "train.py", ["--epochs", "9"], plans=["fp32", "bf16-mixed", "fp32+optimizer=fused"], rounds=4
    )
    assert [(row.status, row.reason) for row in result.plans] == [
        ("ok", ""), ("failed", "AssertionError: late"), ("ok", "")
    ]  # fmt: skip
    assert result.rounds == 4


@each_value()
@pytest.mark.parametrize("caught", ["Exception", "BaseException"])
@pytest.mark.parametrize("gone", [False, True])
def test_a_script_that_catches_all_errors_ends_too(caught: str, gone: bool, here: Path) -> None:
    (here / "train.py").write_text(
        "import torch\nm = torch.nn.Linear(2, 2)\no = torch.optim.SGD(m.parameters(), 0.1)\nwhile True:\n"
        f"    try:\n        m(torch.ones(1, 2)).sum().backward(); o.step()\n    except {caught}: pass\n"
    )
    child = race._started("fp32", "train.py", (), here, False, here / "log")
    child.wait()
    assert child.last is not None
    if gone:
        child.pipe.close()
    else:
        child.pipe.send(0)
    assert child.process.wait(20) == 0


def test_a_copy_of_the_working_folder_is_what_the_script_finds(here: Path, tmp_path: Path) -> None:
    """Links into the folder lead into the copy and links out of it stay; pipes, and the copy itself, are left out."""
    (here / "data").mkdir()
    (here / "data/x").write_text("x")
    (tmp_path / "else").mkdir()
    (here / ".git").mkdir()
    (here / "__pycache__").mkdir()
    os.mkfifo(here / "pipe")
    for name, to in {
        "in": "data",
        "in-by-path": here / "data",
        "out": "../else",
        "broken": "nowhere",
    }.items():
        (here / name).symlink_to(to)
    scratch = here / "data/scratch"
    scratch.mkdir()
    made = copies.copied(scratch / "0", scratch)
    leads = {path.name: path.resolve() for path in made.iterdir()}
    assert leads == {
        "data": made / "data", "in": made / "data", "in-by-path": made / "data", "out": tmp_path / "else", ".git": here / ".git",
        "broken": made / "nowhere",
    }  # fmt: skip
    assert [path.name for path in (made / "data").iterdir()] == ["x"]
    assert copies.into_copy([f"--out={here}/runs", "x", str(tmp_path)], made) == [
        f"--out={made}/runs",
        "x",
        str(tmp_path),
    ]
    assert (
        copies.script_in_copy(str(here / "a/train.py")) == copies.script_in_copy("a/train.py") == "a/train.py"
    )
    assert copies.script_in_copy("../train.py") == str(tmp_path / "train.py")


def test_a_full_disk_is_one_sentence(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (here / "x").write_text("x")
    monkeypatch.setattr(copies.shutil, "copy2", full)
    with pytest.raises(CastwiseError, match=r"cannot be copied into .*No space left on device.*TMPDIR"):
        try_script("x")


def test_a_plan_that_fails_has_a_row_with_its_last_words(here: Path) -> None:
    text = DIGITS.replace(
        "        x = F.relu(self.conv1(x))",
        "        x = F.relu(self.conv1(x))\n        assert x.dtype is torch.float32, 'low'",
    )
    (here / "train.py").write_text("import sys\nprint('castwise run: the script', file=sys.stderr)\n" + text)
    result = try_script("train.py", plans=["fp32", "bf16-mixed"], rounds=2)
    notes = [row.notes for row in result.plans]
    assert notes == [
        ("Net trains under fp32",),
        ("Net trains under bf16-mixed",),
    ]  # no output of the script
    assert [(row.status, row.reason) for row in result.plans] == [
        ("ok", ""),
        ("failed", "AssertionError: low"),
    ]
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(result.table())
    said = console.export_text()
    assert "bf16-mixed failed: AssertionError: low" in said
    assert "not finite" not in said
    console.file.close()


@pytest.mark.parametrize(
    ("text", "said"),
    [("print('done')", "the script made no optimizer step. Its last output: the script trained no model"), ("1 / 0", "made no optimizer step. Its last output: ZeroDivisionError"),
     ("open('../x')", "ran in a copy of the working folder"),
     ("try:\n    open('../x')\nexcept OSError as e:\n    raise RuntimeError('no data') from e", "ran in a copy of the working folder")],
)  # fmt: skip
def test_a_script_without_a_step_is_one_sentence(text: str, said: str, here: Path) -> None:
    (here / "train.py").write_text(text)
    with pytest.raises(CastwiseError, match=said):
        try_script("train.py", plans=["fp32", "bf16-mixed"])


def test_bad_input_is_refused_before_anything_runs(
    here: Path, forks: list[Forked], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CastwiseError, match=r"castwise try 'train.py': does not exist; allowed"):
        try_script("train.py")
    (here / "train.py").write_text(DIGITS)
    with pytest.raises(UnknownNameError, match="bf16-mixd"):
        try_script("train.py", plans=["bf16-mixd"])
    monkeypatch.setattr(copies, "LARGEST_BYTES", 10)
    with pytest.raises(CastwiseError, match="--in-place"):
        try_script("train.py")
    assert not forks


def test_from_the_command_line(here: Path) -> None:
    (here / "train.py").write_text(
        "import torch\nm = torch.nn.Linear(8, 4)\no = torch.optim.SGD(m.parameters(), 0.1)\n"
        "for _ in range(100_000):\n    o.zero_grad(); m(torch.randn(16, 8)).square().mean().backward(); o.step()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "castwise", "try", "--plans", "bf16-mixed", "--rounds", "1", "--verbose", "train.py"],
        cwd=here, capture_output=True, text=True, env={"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "train.py, its first" in done.stdout
    assert "bf16-mixed" in done.stdout
    assert torch.__version__ in done.stdout


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere getrusage gives the peak of the process itself"
)
def test_memory_is_that_of_the_script_whatever_its_parent_holds(tmp_path: Path) -> None:
    ballast = torch.ones(3 << 26)  # 0.75 GiB
    said = run_python(
        "from castwise.bridges.run.gate import peak_of_process\nprint(peak_of_process())", tmp_path
    )
    assert 2**26 < int(said) < ballast.nbytes
