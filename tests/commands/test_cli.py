"""The command line: its output streams, its files, and its exit codes for bad input."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

import castwise
from castwise.commands.cli import app, main
from castwise.commands.cli.terminal import Answer, show_plainly
from castwise.commands.jobs import Event
from castwise.report.progress import bars
from castwise.report.show import table
from tests.processes import Forked, started_by
from tests.report.evidence import make_record
from tests.soak import each_value

TINY = str(Path(__file__).with_name("jobs") / "tiny_workloads.py")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run each test in its own folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _run(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def _process(*words: str) -> Forked:
    """Start a process that runs ``castwise`` in the test's folder."""
    return Forked(main, words, Path.cwd(), Path("said"), COLUMNS="400")


# --- valid input ----------------------------------------------------------------------------------------------


def test_version() -> None:
    result = _run("--version")
    assert (result.exit_code, result.stdout.strip()) == (0, f"castwise {castwise.__version__}")


@pytest.mark.parametrize(
    "words", [("--help",), ("bench", "--help"), ("train", "--help"), ("doctor", "--help"), ("tune", "--help")]
)
def test_help(words: tuple[str, ...]) -> None:
    result = _run(*words)
    assert result.exit_code == 0
    assert "Usage" in result.stdout


def test_bench_prints_its_table_and_where_it_wrote(own_folder: Path) -> None:
    result = _run(
        "bench", f"{TINY}:mlp", "--plans", "bf16-mixed, bf16-mixed+ops.relu=fp32", "--steps", "8", "--rounds", "2",
        "--no-memory", "--no-inference", "--verbose",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "Speed" in result.stdout
    folder = Path("runs/bench-mlp")
    assert f"  {folder}/bench.html\n  {folder}/bench.json" in result.stdout
    record = json.loads((folder / "bench.json").read_text())
    assert [row["name"] for row in record["plans"]] == ["fp32", "bf16-mixed", "bf16-mixed; relu in fp32"]
    assert all(row["inference"] is None and row["memory"] is None for row in record["plans"])
    assert "training fp32" in result.stderr
    assert "training" not in result.stdout.partition("Speed")[0]


def test_bench_takes_plan_files(own_folder: Path) -> None:
    castwise.Plan.preset("bf16-true").save("mine.json")
    result = _run(
        "bench",
        f"{TINY}:mlp",
        "--plans",
        "mine.json",
        "--steps",
        "5",
        "--rounds",
        "1",
        "--no-memory",
        "--out",
        "o",
    )
    assert result.exit_code == 0, result.stderr
    record = json.loads(Path("o/bench.json").read_text())
    assert record["plans"][1]["plan"] == "bf16-true"
    assert record["plans"][1]["inference"] is not None


def test_train_prints_its_outcome_and_where_it_wrote(own_folder: Path) -> None:
    result = _run("train", f"{TINY}:mlp", "--plan", "fp16-mixed", "--steps", "5")
    assert result.exit_code == 0, result.stderr
    assert "mlp under fp16-mixed: loss 0." in result.stdout
    folder = Path("runs/train-mlp")
    for name in ("result.json", "metrics.jsonl", "tensorboard", "model.pt", "curves.png"):
        assert f"  {folder / name}\n" in result.stdout
        assert (folder / name).exists()
    assert "5/5" in result.stderr
    assert "scale 65536, skipped 0" in result.stderr
    assert "steps/s" in result.stderr


def test_names_in_brackets_are_no_markup(own_folder: Path) -> None:
    result = _run("train", f"{TINY}:bracketed", "--steps", "2")
    assert result.exit_code == 0, result.stderr
    assert "[/x] under bf16-mixed: loss 0." in result.stdout


class Terminal:
    """Replacements of standard output and error with a given encoding."""

    def __init__(self, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._streams = {}
        for name in ("stdout", "stderr"):
            self._streams[name] = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
            monkeypatch.setattr(sys, name, self._streams[name])

    def said(self, name: str) -> str:
        stream = self._streams[name]
        stream.flush()
        return stream.buffer.getvalue().decode(stream.encoding)  # type: ignore[attr-defined, no-any-return]


STRANGE = f"""import sys
sys.path.insert(0, {str(Path(TINY).parent)!r})
from tiny_workloads import mlp, replace
def loss(model, batch):
    raise KeyError("ü層")
named = replace(mlp, name="ü層±\\udcff")
raises = replace(named, loss=loss)
"""


@each_value()
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("bench", "strange.py:named", "--steps", "8", "--rounds", "2", "--no-memory", "--out", "o"), 0, "o/bench.html"),
        (("train", "strange.py:named", "--steps", "2", "--out", "o"), 0, "under bf16-mixed: loss"),
        (("train", "strange.py:raises", "--out", "o"), 1, "(strange.py, line 5, in loss)"),
        (("doctor", "層.py:named"), 1, "there is no such file: ?.py"),
        (("bench", "--help"), 0, "Usage"),
    ],
)  # fmt: skip
def test_what_a_terminal_cannot_show_ends_no_command(
    encoding: str, words: tuple[str, ...], code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("strange.py").write_text(STRANGE)
    terminal = Terminal(encoding, monkeypatch)
    with pytest.raises(SystemExit) as end:
        main(words)
    assert (end.value.code or 0) == code, terminal.said("stderr")
    assert said in terminal.said("stderr" if code else "stdout")


def test_every_answer_and_its_progress_can_be_shown_in_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    record = make_record()
    terminal = Terminal("ascii", monkeypatch)
    show_plainly()
    shown = Answer(json=False)
    shown.give(lambda: record, lambda console: console.print(table(record)), lambda: [Path("o/é")])
    with bars(stages=True) as tell:
        tell(Event("parity", "", 0, 1, "± …"))
    assert "+-" in terminal.said("stdout")
    assert "  o/?\n" in terminal.said("stdout")
    assert "+- ..." in terminal.said("stderr")


@pytest.mark.parametrize("command", ["bench", "train"])
def test_a_reader_that_leaves_hears_nothing_and_loses_no_file(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "stderr", errors := io.StringIO())
    gone = open(writer, "w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", gone)
    with contextlib.closing(gone), pytest.raises(SystemExit) as end:
        main((command, f"{TINY}:mlp", "--steps", "4", "--out", "o"))
    assert end.value.code == 1
    assert "castwise:" not in errors.getvalue()
    assert Path("o/bench.json" if command == "bench" else "o/result.json").exists()


# --- bad input --------------------------------------------------------------------------------------------------

RAISES = f"""import sys
sys.path.insert(0, {str(Path(TINY).parent)!r})
from tiny_workloads import mlp, replace
def loss(model, batch):
    raise KeyError("target")
job = replace(mlp, loss=loss)
"""
NOT_DONE = [
    (("train", "snie"), "workload 'snie' not found (did you mean 'sine'?)"),
    (("bench", "snie"), "workload 'snie' not found (did you mean 'sine'?)"),
    (("train", "sine?sise=3"), "no option 'sise'"),
    (("train", "gone.py:job"), "there is no such file"),
    (("train", "broken.py:job"), "broken.py, line 2: ZeroDivisionError: division by zero"),
    (("bench", "broken.py:job"), "broken.py, line 2: ZeroDivisionError: division by zero"),
    (("train", "gone.jobs:job"), "there is no module 'gone'"),
    (("train", f"{TINY}:gone"), "no attribute 'gone'"),
    (("train", f"{TINY}:nn"), "expected a castwise.Workload"),
    (("train", f"{TINY}:mlp", "--plan", "bf16-mixd"), "did you mean 'bf16-mixed'"),
    (("bench", f"{TINY}:mlp", "--plans", "fp32,bf16-mixd"), "did you mean 'bf16-mixed'"),
    (("train", f"{TINY}:mlp", "--plan", "bad.json"), "compute='bf17' is not allowed"),
    (("bench", f"{TINY}:mlp", "--plans", "not.json"), "not.json"),
    (("train", f"{TINY}:mlp", "--plan", "gone.json"), "Plan.load('gone.json'): cannot read it"),
    (("train", f"{TINY}:mlp", "--plan", "bf16-mixed+ops.expp=fp32"), "operator 'expp'"),
    (("train", f"{TINY}:mlp", "--plan", "bf16-mixed+regions.nowhere=fp32"), "no module of Sequential matches"),
    (("train", f"{TINY}:mlp", "--plan", "tf32", "--device", "cpu"), "no TF32"),
    (("train", f"{TINY}:not_scalar"), "returned a tensor of shape [32, 1]"),
    (("bench", f"{TINY}:not_scalar"), "returned a tensor of shape [32, 1]"),
    (("train", f"{TINY}:nan_data"), "in batch[0] (256 of 256 values)"),
    (("bench", f"{TINY}:nan_data"), "is nan in fp32"),
    (("train", f"{TINY}:three"), "ended after 3 batches"),
    (("train", f"{TINY}:mlp", "--steps", "0"), "train(steps=0): needs a whole number >= 1"),
    (("bench", f"{TINY}:mlp", "--steps", "1"), "needs steps >="),
    (("train", f"{TINY}:mlp", "--out", "broken.py"), "--out: File exists: 'broken.py'; give a writable folder"),
    (("bench", f"{TINY}:mlp", "--out", "broken.py/here"), "--out: Not a directory: 'broken.py/here'; give a writable folder"),
    (("bench", f"{TINY}:mlp", "--plans", " , "), "--plans ' , ' names no plan; give one or more"),
    (("bench", "leaves.py:job"), "SystemExit: done (leaves.py, line 5, in loss)"),
    (("tune", "leaves.py:job"), "SystemExit: done (leaves.py, line 5, in loss)"),
    (("doctor", "snie"), "workload 'snie' not found"),
    (("train", "raises.py:job"), "loss(model, batch) failed: KeyError: 'target' (raises.py, line 5, in loss)"),
    (("bench", "raises.py:job"), "fails in fp32: KeyError: 'target' (raises.py, line 5, in loss)"),
    (("tune", "raises.py:job"), "failed: KeyError: 'target' (raises.py, line 5, in loss)"),
    (("doctor", "raises.py:job"), "fails in fp32: KeyError: 'target' (raises.py, line 5, in loss)"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"), NOT_DONE, ids=[" ".join(words).replace(TINY, "t.py") for words, _ in NOT_DONE]
)
def test_what_cannot_be_done_is_one_sentence_and_code_1(
    own_folder: Path, words: tuple[str, ...], said: str
) -> None:
    Path("broken.py").write_text("\nx = 1 / 0\n")
    Path("raises.py").write_text(RAISES)
    Path("leaves.py").write_text(RAISES.replace('raise KeyError("target")', 'sys.exit("done")'))
    Path("bad.json").write_text('{"compute": "bf17"}')
    Path("not.json").write_text("plan: bf16")
    result = _run(*words)
    assert result.exit_code == 1
    sentences = [line for line in result.stderr.splitlines() if line.startswith("castwise: ")]
    assert len(sentences) == 1
    assert said in sentences[0]
    assert "Traceback" not in result.output


def test_a_device_that_is_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    for command in ("bench", "train", "tune", "doctor"):
        result = _run(command, f"{TINY}:mlp", "--device", "cuda")
        assert result.exit_code == 1
        assert f"castwise: {command}(device='cuda'): no cuda device is available" in result.stderr
    assert not Path("runs/train-mlp").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("nonsense",),
        ("bench",),
        ("train", "sine", "--stepz", "3"),
        ("train", "sine", "--steps", "three"),
        ("train", "sine", "--device", "gpu"),
        ("doctor", "--device", "cuda:x"),
        ("train", "sine", "--out", ""),
        ("tune", "sine", "--out", " "),
        ("bench", "sine", "--out", ""),
        ("migrate", "--write", ""),
    ],
)
def test_what_is_not_understood_is_code_2(words: tuple[str, ...]) -> None:
    result = _run(*words)
    assert result.exit_code == 2
    assert "Usage" in result.stderr
    assert not Path("runs").exists()


def test_a_failed_command_leaves_no_empty_folder() -> None:
    assert _run("bench", f"{TINY}:not_scalar").exit_code == 1
    assert not Path("runs/bench-mlp").exists()


def test_a_failed_training_says_where_its_record_is() -> None:
    result = _run("train", f"{TINY}:nan_data", "--out", "here")
    assert "The records so far are in here" in result.stderr
    assert json.loads(Path("here/result.json").read_text())["status"] == "failed"


def test_traceback_on_request() -> None:
    result = _run("train", f"{TINY}:not_scalar", "--traceback")
    assert result.exit_code == 1
    assert "Traceback (most recent call last)" in result.stderr
    assert "check_loss" in result.stderr


# --- as a process -----------------------------------------------------------------------------------------------


def test_exit_codes_of_real_processes() -> None:
    done = _process("train", f"{TINY}:mlp", "--steps", "3", "--out", "o")
    assert done.wait(120) == 0, done.said("err")
    assert Path("o/result.json").exists()
    failed = _process("train", f"{TINY}:nan_data")
    assert failed.wait(120) == 1
    assert "castwise: workload 'mlp': the loss of step 1 is nan" in failed.said("err")
    assert "Traceback" not in failed.said("err")
    assert "Warning" not in failed.said("err")
    assert _process("bench").wait(120) == 2


def test_asking_for_the_version_does_not_import_torch() -> None:
    code = (
        "import sys\nfrom castwise.commands.cli import main\n"
        "try:\n    main(['--version'])\nexcept SystemExit as end:\n    print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-2:] == ["0", "False"]


@pytest.mark.parametrize(
    ("ends", "code", "said"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_an_interrupted_training_keeps_its_record(ends: signal.Signals, code: int, said: str) -> None:
    """This holds for SIGTERM too, which ``timeout``, Slurm and Docker send."""
    lines = Path("o/metrics.jsonl")
    process = _process("train", f"{TINY}:mlp", "--steps", "1000000", "--out", "o")
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and (not lines.exists() or lines.stat().st_size < 1000):
            time.sleep(0.05)
        for _ in range(
            1 + (ends is signal.SIGTERM)
        ):  # ``timeout`` signals the process and its group, so twice
            os.kill(process.pid, ends)
        assert process.wait(120) == code
    finally:
        process.end()
    assert f"castwise: {said}\nThe records so far are in o" in process.said("err")
    record = json.loads(Path("o/result.json").read_text())
    assert record["status"] == "interrupted"
    assert record["steps_done"] == len(lines.read_text().splitlines()) > 5


# --- tune -----------------------------------------------------------------------------------------------------


def test_tune_writes_a_plan_that_the_other_commands_take(tmp_path: Path) -> None:
    out = tmp_path / "tuned"
    done = _run(
        "tune", f"{TINY}:mlp", "--goal", "numerics", "--formats", "bf16", "--no-memory", "--out", str(out)
    )
    assert done.exit_code == 0, done.output
    assert "Wrote" in done.stdout
    assert {"report.html", "plan.json", "evidence.json"} <= {path.name for path in out.iterdir()}
    trained = _run(
        "train",
        f"{TINY}:mlp",
        "--plan",
        str(out / "plan.json"),
        "--steps",
        "3",
        "--out",
        str(tmp_path / "trained"),
    )
    assert trained.exit_code == 0, trained.output


def test_tune_for_inference_tells_the_times_of_single_calls(tmp_path: Path) -> None:
    words = "tune", f"{TINY}:mlp", "--goal", "inference", "--formats", "bf16", "--no-memory", "--budget", "8"
    done = _run(*words, "--batch-sizes", "1, 6", "--verbose", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "Single calls" in done.stdout
    sizes = {one["batch_size"] for one in json.loads((tmp_path / "evidence.json").read_text())["latencies"]}
    assert sizes == {1, 6}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["--goal", "speed"],
            "tune(goal='speed') is not allowed. Allowed: time, memory, numerics, inference.",
        ),
        (["--formats", "bf61"], "'bf61' is not one of fp32, tf32, bf16, fp16"),
        (["--goal", "numerics", "--formats", "bf16,fp16"], "give the one low format"),
        (
            ["--batch-sizes", "1;8"],
            "--batch-sizes '1;8': give whole numbers, separated by commas, such as 1,8,32",
        ),
        (["--batch-sizes", "8"], "latencies are measured only with goal='inference'"),
        (["--budget", "1"], "too short; a search needs"),
        (["--verify-steps", "2"], "needs 0 or at least 5 steps"),
        (["--accumulate", "0"], "needs a whole number >= 1"),
    ],
)
def test_tune_refuses_in_one_sentence(words: list[str], text: str, tmp_path: Path) -> None:
    done = _run("tune", f"{TINY}:mlp", *words, "--out", str(tmp_path / "none"))
    assert done.exit_code == 1
    assert text in done.stderr
    assert done.stderr.startswith("castwise: ")
    assert not (tmp_path / "none").exists()


def test_a_search_that_is_terminated_writes_what_it_knows(tmp_path: Path) -> None:
    """SIGTERM, sent by ``timeout``, Slurm and Docker, acts like Ctrl-C; before it, stages are printed as lines."""
    words = ("tune", f"{TINY}:mlp", "--budget", "100", "--out", str(tmp_path / "o"))
    process = Forked(main, words, Path.cwd(), Path("said"), COLUMNS="400", TMPDIR=str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir(exist_ok=True)
    try:
        deadline = time.monotonic() + 120
        said = Path("said.err")
        while time.monotonic() < deadline and not (said.exists() and " s  race" in said.read_text()):
            time.sleep(0.02)
        children = started_by(process.pid)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(120) == 143
    finally:
        process.end()
    assert " s  reference" in process.said("err")
    assert "castwise: terminated\nThe results so far were written to" in process.said("err")
    assert "Traceback" not in process.said("err")
    assert json.loads((tmp_path / "o" / "evidence.json").read_text())["complete"] is False
    left = [path.name for path in (tmp_path / "tmp").iterdir()]
    assert not [
        name for name in left if not name.startswith("torchinductor_")
    ]  # torch creates these on import
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []


def test_a_termination_that_a_library_swallows_comes_again() -> None:
    """Some libraries swallow it during their import; without a repeat the command would continue training."""
    Path("job.py").write_text(
        "import os, signal, time\nfrom castwise.lab.workloads.sine import sine\n"
        "try:\n    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(5)\nexcept BaseException:\n    pass\n"
        "job = sine()\n"
    )
    process = _process("train", "job.py:job", "--steps", "1000000", "--out", "o")
    try:
        assert process.wait(120) == 143
    finally:
        process.end()
    assert process.said("err").endswith("castwise: terminated\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_is_ignored_stays_so(number: signal.Signals) -> None:
    """``nohup``, and shells without job control for background jobs, start processes with ignored signals."""
    code = (
        f"import os, signal, sys; signal.signal(signal.{number.name}, signal.SIG_IGN); "
        "os.execv(sys.executable, [sys.executable, '-m', 'castwise', *sys.argv[1:]])"
    )
    words = [sys.executable, "-c", code, "train", f"{TINY}:mlp", "--steps", "300", "--out", "o"]
    lines, deadline = Path("o/metrics.jsonl"), time.monotonic() + 120
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and time.monotonic() < deadline:
            if lines.exists():
                process.send_signal(number)
            time.sleep(0.02)
        assert process.wait(1) == 0, process.communicate()[1]
    assert json.loads(Path("o/result.json").read_text())["status"] == "ok"


@pytest.mark.parametrize("command", ["bench", "inspect"])
def test_other_commands_that_are_terminated_end_as_by_an_interrupt(command: str) -> None:
    ended = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        process = _process(
            command,
            f"{TINY}:mlp",
            "--out",
            number.name,
            *(["--steps", "100000"] if command == "bench" else []),
        )
        try:
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline and not Path(number.name).exists():
                time.sleep(0.02)
            os.kill(process.pid, number)
            ended[number] = process.wait(120)
        finally:
            process.end()
        assert "Traceback" not in process.said("err")
        assert not Path(number.name).exists()
    assert ended == {signal.SIGINT: 130, signal.SIGTERM: 143}
