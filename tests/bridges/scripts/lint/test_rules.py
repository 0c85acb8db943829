"""Each rule reports its fault in faulty scripts and nothing in the same scripts when corrected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from castwise.bridges.scripts.lint import lint
from castwise.bridges.scripts.lint.explore import Exploration
from castwise.bridges.scripts.lint.texts import RULES
from castwise.commands.cli import app
from castwise.errors import LintError
from tests.soak import SOAKING, some

ROOT = Path(__file__).parents[4]
CORPUS = Path(__file__).with_name("corpus")
HEAD = """\
import torch
from torch import nn
import torch.nn.functional as F
device = "cuda"
model = nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
criterion = nn.CrossEntropyLoss()
"""
LOOP = """\
scaler = torch.amp.GradScaler()
for x, y in loader:
    with torch.autocast(device, dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
FAULTS: dict[str, tuple[str, str, int]] = {
    # rule: the script, text in the faulty line, number of faulty lines
    "fp16-on-cpu": (HEAD + LOOP.replace("device, dtype", '"cpu", dtype'), "torch.autocast", 1),
    "cuda-hard-coded": (
        HEAD.replace('"cuda"', '"cuda" if torch.cuda.is_available() else "cpu"')
        + LOOP.replace("autocast(device,", 'autocast("cuda",').replace("GradScaler()", 'GradScaler("cuda")'),
        "cuda",
        2,
    ),
    "scaler-with-bf16": (HEAD + LOOP.replace("float16", "bfloat16"), "GradScaler", 1),
    "clip-before-unscale": (
        HEAD + LOOP.replace("    scaler.unscale_(optimizer)\n", ""),
        "clip_grad_norm_",
        1,
    ),
    "scaler-not-updated": (HEAD + LOOP.replace("    scaler.update()\n", ""), "scaler.step", 1),
    "step-on-scaled-gradients": (
        HEAD
        + LOOP
        .replace("    scaler.unscale_(optimizer)\n", "")
        .replace("    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n", "")
        .replace("scaler.step(optimizer)", "optimizer.step()"),
        "optimizer.step",
        1,
    ),
    "scaler-in-the-loop": (
        HEAD
        + LOOP.replace("scaler = torch.amp.GradScaler()\n", "").replace(
            "loader:\n", "loader:\n    scaler = torch.amp.GradScaler()\n"
        ),
        "GradScaler",
        1,
    ),
    "scaler-not-saved": (
        HEAD
        + LOOP
        + 'torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")\n',
        "torch.save",
        1,
    ),
    "low-weights-without-masters": (
        HEAD.replace("nn.Linear(4, 4)", "nn.Linear(4, 4).to(torch.bfloat16)")
        + "for x, y in loader:\n    F.cross_entropy(model(x).float(), y).backward()\n    optimizer.step()\n",
        "bfloat16",
        1,
    ),
    "loss-in-fp16": (
        HEAD.replace(
            "optimizer = torch.optim.AdamW(model.parameters())", "model.half()\nparams = model.parameters()"
        )
        + "loss = criterion(model(x), y)\nloss.backward()\n",
        "criterion(model",
        1,
    ),
}


def said(text: str, folder: Path) -> list[tuple[str, int]]:
    (folder / "train.py").write_text(text)
    return [(one.rule, one.line) for one in Exploration(folder / "train.py").faults()]


@pytest.mark.parametrize("rule", FAULTS)
def test_a_fault_is_found_in_its_line(rule: str, tmp_path: Path) -> None:
    text, place, count = FAULTS[rule]
    found = said(text, tmp_path)
    assert {name for name, _ in found} == {rule}
    assert len(found) == count
    assert all(place in text.splitlines()[line - 1] for _, line in found)


def test_every_rule_has_a_fault() -> None:
    assert set(RULES) == FAULTS.keys() | {path.stem for path in CORPUS.glob("*.txt")} - {"sound"}


def test_the_right_loop_is_right(tmp_path: Path) -> None:
    assert said(HEAD + LOOP, tmp_path) == []


@pytest.mark.parametrize(
    "text",
    [
        # saved scaler, device chosen at run time, masters from a library, frozen model, model for inference
        HEAD + LOOP + 'torch.save({"o": optimizer.state_dict(), "s": scaler.state_dict()}, "last.pt")\n',
        HEAD.replace('"cuda"', '"cuda" if torch.cuda.is_available() else "cpu"') + LOOP,
        "import deepspeed\n" + FAULTS["low-weights-without-masters"][0],
        FAULTS["low-weights-without-masters"][0].replace(
            "optimizer =", "model.requires_grad_(False)\noptimizer ="
        ),
        "import torch\nmodel = torch.nn.Linear(2, 2).half().cuda()\nmodel(x)\n",
        FAULTS["low-weights-without-masters"][0].replace("optimizer =", "model.float()\noptimizer ="),
        HEAD + "def train(scaler, loss):\n    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n",
        HEAD.replace(
            "device =",
            "if torch.cuda.is_available():\n    ctx = torch.autocast('cuda')\nelse:\n    ctx = open('cpu')\ndevice =",
        ),
        HEAD + LOOP.replace("    scaler.update()\n", "    finish(scaler)\n"),
        # positional arguments, and ``step()`` of an object that is no optimizer
        HEAD.replace('"cuda"', '"cuda" if torch.cuda.is_available() else "cpu"')
        + LOOP.replace("torch.autocast(device, dtype=torch.float16)", "torch.cuda.amp.autocast(fp16)"),
        HEAD
        + "schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)\n"
        + LOOP.split("    scaler.unscale_")[0]
        + "    schedule.step()\n",
        # the same name in two functions
        "import torch\ndef serve():\n    model = torch.nn.Linear(2, 2).half()\n"
        "def train():\n    model = make()\n    optimizer = torch.optim.SGD(model.parameters())\n    optimizer.step()\n",
    ],
)
def test_what_may_be_right_is_let_be(text: str, tmp_path: Path) -> None:
    assert said(text, tmp_path) == []


@pytest.mark.parametrize(
    "line",
    [
        "model = AutoModel.from_pretrained('x', torch_dtype=torch.bfloat16)",
        "model = AutoModel.from_pretrained('x', dtype='bfloat16')",
        "model = nn.Linear(4, 4)\nmodel.bfloat16()",
        "model = nn.Linear(4, 4).half().cuda()",
        "model = nn.Linear(4, 4).to(device, torch.float16)",
    ],
)
def test_ways_to_store_a_model_low(line: str, tmp_path: Path) -> None:
    text = FAULTS["low-weights-without-masters"][0].replace(
        "model = nn.Linear(4, 4).to(torch.bfloat16)", line
    )
    assert [rule for rule, _ in said(text, tmp_path)] == ["low-weights-without-masters"]


ON_PURPOSE = {
    ("test_files.py", "checkpoint-rounded"),
    ("test_borders.py", "backward-inside-autocast"),
    ("test_emulation.py", "backward-inside-autocast"),
}
"""Faults that tests have on purpose, besides fp16 on a CPU."""


def test_no_false_alarm_on_published_scripts() -> None:
    published = [
        *(ROOT / "examples").rglob("*.py"),
        *some((ROOT / "bench").rglob("*.py"), 4),
        *(ROOT / "tests" / "bridges" / "run" / "published").glob("*.txt"),
        *(ROOT / "tests" / "bridges" / "compat").rglob("*_scripts/*.py"),
        *some((ROOT / "tests").rglob("test_*.py"), 60),
    ]
    assert len(published) > 25
    alarms = [(path, one) for path in published for one in lint(path).findings]
    others = [
        (str(path), one)
        for path, one in alarms
        if "tests" not in path.parts
        or (one.rule != "fp16-on-cpu" and (path.name, one.rule) not in ON_PURPOSE)
    ]
    assert others == []


def test_scripts_that_were_written_to_be_hard_hold_the_faults_that_they_hold() -> None:
    corpus = (ROOT / "tests" / "bridges" / "scripts" / "migrate" / "corpus").glob(
        "torch_*.txt" if SOAKING else "torch_clip*.txt"
    )
    found = {(path.name, one.line, one.rule) for path in corpus for one in lint(path).findings}
    # the scripts use the CPU so that they can run here
    others = {each for each in found if each[2] != "fp16-on-cpu"}
    assert others == {("torch_clip_scaled.txt", 16, "clip-before-unscale")}


def test_the_folder_of_a_project_and_files_that_are_no_python(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAULTS["clip-before-unscale"][0])
    (tmp_path / "old.py").write_text("from torch import half\nprint 'one step of Python 2'\n")
    (tmp_path / "other.py").write_text("print 'nothing of ours'\n")
    found = lint(tmp_path)
    assert [(one.path.name, one.rule) for one in found.findings] == [("train.py", "clip-before-unscale")]
    assert [path.name for path, _ in found.problems] == ["old.py"]
    assert found.looked_at == 3
    assert found.to_dict()["findings"][0]["instead"].startswith("scaler.unscale_(optimizer)")
    with pytest.raises(LintError, match="there is no file or folder"):
        lint(tmp_path / "none")


def test_the_command(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAULTS["scaler-with-bf16"][0])
    ran = CliRunner().invoke(app, ["doctor", "--lint", str(script)])
    assert ran.exit_code == 1
    assert "scaler-with-bf16" in ran.output
    assert "1 precision problem" in ran.output
    script.write_text(HEAD + LOOP)
    ran = CliRunner().invoke(app, ["doctor", "--lint", str(script), "--json"])
    assert ran.exit_code == 0
    assert json.loads(ran.stdout)["findings"] == []


def test_it_imports_no_torch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD + LOOP)
    code = f"import sys; from castwise.bridges.scripts.lint import lint; assert not lint({str(script)!r}).findings; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_comment_in_the_line_switches_rules_off(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    text = FAULTS["clip-before-unscale"][0]
    line = "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    for comment, left in (
        ("# castwise: ignore", 0),
        ("# castwise: ignore[clip-before-unscale]", 0),
        ("# castwise: ignore[scaler-not-saved, clip-before-unscale]", 0),
        ("# castwise: ignore[scaler-not-saved]", 1),
    ):
        script.write_text(text.replace(line, f"{line}  {comment}"))
        assert len(lint(script).findings) == left, comment


def test_a_fault_of_another_file_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(
        "from torch.nn.utils import clip_grad_norm_ as clip\n"
        "def update(scaler, optimizer, loss, model):\n"
        "    scaler.scale(loss).backward()\n"
        "    clip(model.parameters(), 1.0)\n"
        "    scaler.step(optimizer)\n"
        "    scaler.update()\n"
    )
    loop = LOOP.split("    scaler.scale")[0] + "    update(scaler, optimizer, loss, model)\n"
    (tmp_path / "train.py").write_text("from engine import update\n" + HEAD + loop)
    for path in (tmp_path, tmp_path / "train.py"):
        assert [(one.path.name, one.line, one.rule) for one in lint(path).findings] == [
            ("engine.py", 4, "clip-before-unscale")
        ]


def test_a_script_that_never_ends_or_calls_itself_is_checked(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        HEAD
        + "def again(n):\n    again(n - 1)\n    return again(n)\n"
        + "while True:\n    again(3)\n"
        + "    while True:\n        pass\n"
        + FAULTS["clip-before-unscale"][0].removeprefix(HEAD)
    )
    assert [one.rule for one in lint(script).findings] == ["clip-before-unscale"]


@pytest.mark.parametrize(
    "text",
    [
        "values = [1]\n" + "values += values\nvalues.extend(values)\n" * 40,
        "values = [1]\n" + "values = [*values, *values]\n" * 40,
        "f0 = lambda: model(1)\n"
        + "".join(f"f{n} = lambda: f{n - 1}() + f{n - 1}()\n" for n in range(1, 40)),
        "table = {" + ", ".join(f"'k{n}': {n}" for n in range(5000)) + "}\n" + "use(table)\n" * 2000,
        "from . import *\nfrom .. import x\nfrom ....far import *\nfrom train import *\n",
        "table = {[1]: 2, {}: 3, **other}\ntable[[1]] = 3\ntable.get({})\ndict = len\ndict(a=1)\n",
    ],
    ids=["a list adds itself", "a list doubles", "lambdas double", "a large table", "imports", "odd keys"],
)
def test_values_that_grow_and_odd_code_end_soon(text: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD + text + FAULTS["clip-before-unscale"][0].removeprefix(HEAD))
    checked = lint(script)
    assert checked.problems == ()
    assert [one.rule for one in checked.findings] == ["clip-before-unscale"]


def test_a_pipe_with_the_name_of_a_script_is_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train.py")
    assert lint(tmp_path).looked_at == 0


def test_an_ignore_comment_behind_a_form_feed(tmp_path: Path) -> None:
    text = HEAD + "\f\n" + FAULTS["clip-before-unscale"][0].removeprefix(HEAD)
    line = next(each for each in text.split("\n") if "clip_grad" in each)
    script = tmp_path / "train.py"
    script.write_text(text.replace(line, f"{line}  # castwise: ignore"))
    assert lint(script).findings == ()


@pytest.mark.parametrize(
    "command", [["run", "--plan", "fp32"], ["try", "--plans", "fp32"], ["doctor", "--lint"]]
)
def test_commands_name_each_finding_once_in_a_line(command: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("loader = range(0)\n" + FAULTS["clip-before-unscale"][0].replace('"cuda"', '"cpu"').replace("float16", "bfloat16"))  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-m", "castwise", *command, str(script)], capture_output=True, text=True, check=False
    )
    said = [line for line in (ran.stdout + ran.stderr).splitlines() if "clip-before-unscale" in line]
    assert len(said) == 1
    assert f"{script}:14: error: clip-before-unscale: " in said[0]


def test_run_names_the_command_that_lists_the_rest_of_many_findings(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    step = "    scaler.scale(model(x).sum()).backward()\n    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    scaler.step(optimizer)\n    scaler.update()\n"
    script.write_text(HEAD + 'scaler = torch.amp.GradScaler("cpu")\nfor x in range(0):\n' + 25 * step)
    ran = subprocess.run(
        [sys.executable, "-m", "castwise", "run", str(script)], capture_output=True, text=True, check=True
    )
    said = ran.stderr.splitlines()
    assert sum("clip-before-unscale" in line for line in said) == 20
    assert f"castwise run: 5 more precision problems are listed by castwise doctor --lint {script}" in said
