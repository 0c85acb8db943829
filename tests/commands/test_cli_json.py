"""``--json`` prints each command's answer and each error as one object on standard output."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

import castwise
import castwise.commands.jobs.doctor
from castwise.commands.cli import app, main
from castwise.core.plans.plan import Plan
from castwise.lab.timing.rates import kernels
from castwise.lab.workloads.workload import find_workload
from tests.fresh import SOURCE
from tests.processes import Forked
from tests.schemas import check
from tests.tries import forked_tries

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
WITHOUT = {"run"}
"""Commands whose standard output belongs to another program."""

PRINTS = f"""import os, sys
sys.path.insert(0, {str(Path(__file__).with_name("jobs"))!r})
from tiny_workloads import mlp, replace
def loss(model, batch):
    print("from the workload")
    os.system("echo from a process of the workload")
    return mlp.loss(model, batch)
def fails(model, batch):
    raise KeyError("target")
job, bad, quiet = replace(mlp, loss=loss), replace(mlp, loss=fails), replace(mlp, name="quiet")
"""
SCRIPT = """
import torch
print("from the script")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4000):
    model(torch.ones(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
WORKS = {
    "bench": ("prints.py:job", "--plans", "fp32", "--steps", "5", "--rounds", "2", "--starts", "1", "--no-memory", "--no-inference"),
    "doctor": (),
    "inspect": ("prints.py:job", "--only", "nonfinite,operators"),
    "migrate": ("old.py",),
    "replay": ("steps", "--workload", "prints.py:job"),
    "schema": ("plan",),
    "train": ("prints.py:job", "--steps", "3"),
    "try": ("--plans", "fp32", "--rounds", "1", "script.py"),
    "tune": ("prints.py:job", "--goal", "numerics", "--no-memory"),
}  # fmt: skip
FAILS = {
    "bench": (("prints.py:bad",), "WorkloadError", "KeyError: 'target'"),
    "doctor": (("nowhere",), "WorkloadError", "workload 'nowhere' not found"),
    "inspect": (("prints.py:bad", "--only", "operators"), "WorkloadError", "KeyError: 'target'"),
    "migrate": (("gone.py",), "MigrateError", "there is no file or folder"),
    "replay": (("gone",), "CheckpointError", "there is no complete record"),
    "schema": (("plans",), "UnknownNameError", "Allowed: plan, evidence"),
    "train": (("prints.py:bad",), "WorkloadError", "KeyError: 'target'"),
    "try": (("gone.py",), "CastwiseError", "gone.py"),
    "tune": (("prints.py:job", "--budget", "1"), "StateError", "too short; a search needs"),
}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in its own folder, which holds the commands' input files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    monkeypatch.setattr(
        castwise.commands.jobs.doctor,
        "doctor",
        functools.partial(castwise.commands.jobs.doctor.doctor, small=True),
    )
    monkeypatch.setattr("castwise.lab.timing.rates.kernels", lambda *_, **__: kernels("cpu", small=True)[:1])
    Path("prints.py").write_text(PRINTS)
    Path("script.py").write_text(SCRIPT)
    Path("old.py").write_text("from apex import amp\nfrom apex.RNN import LSTM\n")


def record() -> None:
    """Record a step of the job in the folder ``steps``."""
    job = find_workload("prints.py:job")
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    amp = castwise.Amp("bf16-mixed", device="cpu")
    amp.prepare(model, optimizer)
    recorder = castwise.Recorder(amp, model, "steps")
    recorder.write()
    amp.backward(job.loss(model, next(recorder.batches(job.batches(0)))))
    amp.step(optimizer)


def run(command: str, *words: str) -> Result:
    if command == "replay" and "steps" in words:
        record()
    # castwise's own options precede the script.
    return CliRunner().invoke(app, [command, "--json", *words])


def one_object(text: str) -> dict[str, Any]:
    """Parse the output; check that it is one JSON object without NaN or infinity."""

    def none(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    found = json.loads(text, parse_constant=none)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_it_and_is_tried_here(command: str) -> None:
    has = any("--json" in parameter.opts for parameter in COMMANDS[command].params)
    assert has is (command not in WITHOUT)
    assert (command in WORKS) is (command in FAILS) is has


@pytest.mark.parametrize("command", WORKS)
def test_the_answer_is_one_object(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forked_tries(monkeypatch)
    done = run(command, *WORKS[command])
    assert done.exit_code == 0, done.stderr
    found = one_object(done.stdout)
    assert "error" not in found
    assert (found["kind"], found["version"]) == (command, 1)
    if command == "schema":
        assert found["schema"]["$id"].startswith("urn:castwise:schema:plan:")
    assert all(Path(path).exists() for path in found.get("wrote", []))
    assert bool(found.get("wrote")) is (command in ("bench", "inspect", "train", "tune"))
    record = next((path for path in found.get("wrote", []) if path.endswith((f"{command}.json", "result.json", "evidence.json"))), None)  # fmt: skip
    if record is not None:
        assert {**json.loads(Path(record).read_text()), "wrote": found["wrote"]} == found
    if command == "tune":
        plan = next(path for path in found["wrote"] if path.endswith("plan.json"))
        assert str(Plan.load(plan)) == found["plan"]
        check("evidence", {key: value for key, value in found.items() if key != "wrote"})


@pytest.mark.parametrize("command", FAILS)
def test_an_error_is_one_object_too_with_the_sentence_on_standard_error(command: str) -> None:
    words, kind, said = FAILS[command]
    done = run(command, *words)
    assert done.exit_code == 1
    error = one_object(done.stdout)["error"]
    assert (error["type"], error["exit_code"]) == (kind, 1)
    assert said in error["message"]
    assert f"castwise: {error['message']}\n" in done.stderr


@pytest.mark.parametrize("command", [*FAILS, "nonsense"])
def test_what_is_not_understood_is_one_object_too(command: str) -> None:
    done = run(command, *(("--rounds", "nonsense") if command == "try" else ("--nonsense",)))
    assert done.exit_code == 2
    error = one_object(done.stdout)["error"]
    assert error["exit_code"] == 2
    assert ("integer" if command == "try" else "onsense") in error["message"]
    assert "Usage" in done.stderr


def test_files_that_cannot_be_migrated_stand_beside_those_that_can() -> None:
    Path("bad.py").write_text("from apex import amp\nif:\n")
    done = run("migrate", ".")
    assert done.exit_code == 1
    found = one_object(done.stdout)
    assert {file["path"]: bool(file["problem"]) for file in found["files"]} == {
        "bad.py": True,
        "old.py": False,
    }
    assert found["error"]["type"] == "MigrateError"
    left = next(file for file in found["files"] if file["path"] == "old.py")
    assert "+from castwise.compat.apex import amp" in left["diff"]
    assert left["findings"][-1]["kind"] == "left"


@pytest.mark.parametrize("command", ["bench", "train"])
def test_nothing_else_reaches_standard_output(command: str) -> None:
    """Output of the workload, and of processes started by it or by castwise, goes to standard error."""
    process = Forked(main, (command, "--json", *WORKS[command]), Path.cwd(), Path("said"), COLUMNS="400")
    assert process.wait(120) == 0, process.said("err")
    assert one_object(process.said("out"))["kind"] == command
    assert "from the workload" in process.said("err")
    assert "from a process of the workload" in process.said("err")


def test_an_interrupt_is_told_and_keeps_its_code() -> None:
    # This workload starts no shell, since os.system ignores interrupts.
    words = ("tune", "--json", "prints.py:quiet", "--budget", "100", "--no-memory")
    process = Forked(main, words, Path.cwd(), Path("said"))
    try:
        deadline = time.monotonic() + 120
        err = Path("said.err")
        while time.monotonic() < deadline and not (err.exists() and " s  " in err.read_text()):
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(120) == 130
    finally:
        process.end()
    error = one_object(process.said("out"))["error"]
    assert (error["exit_code"], error["message"].splitlines()[0]) == (130, "interrupted")
