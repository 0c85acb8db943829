"""``make gpu`` without a GPU: a benchmark that fails and one that hangs do not affect the others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Forked, run_script
from tests.soak import SOAKING

ROOT = Path(__file__).parent.parent

RAISES = "raise RuntimeError('planted')\n"
# One part of it fails, a row is written, and then it hangs with its own child process.
HANGS = """
import subprocess, sys, torch
from common import Results
with Results("compat", torch.device("cpu"), "planted") as results:
    with results.part("first"):
        raise ValueError("planted in /some/where/file.py")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    results.add({"part": "second", "child": child.pid})
    child.wait()
"""
FINE = """
import argparse, torch
from common import Results
parser = argparse.ArgumentParser()
parser.add_argument("--device"), parser.add_argument("--budget", type=float)
with Results("overhead", torch.device(parser.parse_args().device), "planted") as results:
    results.add({"loop": "planted", "budget_s": parser.parse_args().budget})
"""


def copied(folder: Path) -> Path:
    """Copy ``bench/`` without its results."""
    return shutil.copytree(
        ROOT / "bench", folder / "bench", ignore=shutil.ignore_patterns("results", "planted", "__pycache__")
    )


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    return copied(tmp_path)


def start_part(bench: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(bench / "gpu.py"), *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_part(bench: Path, *arguments: str) -> tuple[int, str, str]:
    """Return the exit status and the output of each stream."""
    part = start_part(bench, *arguments)
    said = part.communicate(timeout=300)
    return part.returncode, *said


def forked(script: Path, *arguments: str) -> Forked:
    """Run a benchmark to its end."""
    process = Forked(
        run_script, [str(script), *arguments], script.parent, script.with_suffix(".said"), PYTHONPATH=str(ROOT / "src")
    )  # fmt: skip
    process.wait(100)
    return process


@pytest.fixture(scope="module", autouse=True)
def broken_part(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """Start a part of three benchmarks, of which one fails and one hangs, while the other tests run."""
    bench = copied(tmp_path_factory.mktemp("broken"))
    (bench / "bench_master.py").write_text(RAISES, encoding="utf-8")
    (bench / "bench_compat.py").write_text(HANGS, encoding="utf-8")
    (bench / "bench_overhead.py").write_text(FINE, encoding="utf-8")
    part = start_part(
        bench, "core", "--device", "cpu", "--minutes", "0.6", "--only", "compat,master,overhead"
    )
    yield bench, part
    part.terminate()  # ends its children too; no effect if it has ended
    part.communicate()


def result(bench: Path, name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((bench / "results" / f"{name}-cpu.json").read_text(encoding="utf-8"))
    return record


def runs(process: int) -> bool:
    """Return whether a process is running, on Linux."""
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_benchmark_keeps_to_its_budget(bench: Path) -> None:
    """Runs the real benchmark up to its first rounds, with a small GPT and without other libraries, which import
    slowly.
    """
    script = bench / "bench_overhead.py"
    text = script.read_text(encoding="utf-8")
    smaller = {
        "util.find_spec(package)": "util.find_spec('none')",
        "gpt?lr=1e-4": "gpt?layers=1&width=32&context=32&batch=8",
    }
    for old, new in [] if SOAKING else smaller.items():
        assert old in text
        text = text.replace(old, new)
    script.write_text(text, encoding="utf-8")
    done = forked(script, "--device", "cpu", "--budget", "1", "--steps", "5")
    assert done.code == 0, done.said("err")
    whole = result(bench, "overhead")
    assert "finished" not in whole
    assert {row["format"] for row in whole["rows"]} >= {"bf16", "fp16", "bf16, guard on the MLP"}
    assert all(row["ratio"] > 0 for row in whole["rows"])


def test_tests_that_fail_are_named(bench: Path) -> None:
    tests = bench.parent / "tests"
    tests.mkdir()
    (tests / "test_plain.py").write_text("import nothing\n", encoding="utf-8")
    body = """
        import pytest

        @pytest.mark.gpu
        @pytest.mark.parametrize("word", ["good", "a bad one"])
        def test_marked(word):
            assert word == "good"

        def test_unmarked():
            assert False
    """
    (tests / "test_marked.py").write_text(textwrap.dedent(body), encoding="utf-8")
    assert forked(bench / "gpu.py", "test", "--device", "cpu").code == 1
    record = result(bench, "gpu-test")
    (row,) = record["rows"]
    assert row["passed"] == 1
    assert row["failed"] == ["tests/test_marked.py::test_marked[a bad one]"]
    assert record["finished"] is True
    assert record["environment"]["device_type"] == "cpu"


def test_what_cannot_begin_says_why(bench: Path) -> None:
    code, _, said = run_part(bench, "core", "--device", "cpu", "--only", "overheads")
    assert code == 2
    assert "the jobs of core are ['overhead', 'sine', 'master', 'compat']" in said

    (bench / "torch").mkdir()
    (bench / "torch" / "__init__.py").write_text("__version__ = '2.10.1+cu130'", encoding="utf-8")
    code, _, said = run_part(bench, "core")
    assert code == 2
    assert "has torch 2.10.1+cu130, and castwise needs 2.11 or later" in said


def test_a_loop_that_fails_takes_nothing_from_the_others(bench: Path) -> None:
    code = """
        import time, torch
        from loops import Loop
        from common import Results, compare

        def step():
            time.sleep(0.001)
            return torch.ones(())

        def bad():
            raise RuntimeError("planted")

        with Results("loops", torch.device("cpu"), "planted", 0.2) as results:
            loops = [("base", lambda: Loop(step)), ("unbuildable", bad), ("fails", lambda: Loop(bad)),
                     ("again", lambda: Loop(step))]
            rows = compare(loops, rounds=10**6, steps=1, device=torch.device("cpu"), unit="ms",
                           seconds=results.share(1), relative=0.1)
            results.add(*rows)
    """
    script = bench / "bench_loops.py"
    script.write_text(textwrap.dedent(code), encoding="utf-8")
    done = forked(script)
    assert done.code == 1
    assert "failed: unbuildable, fails" in done.said("err")
    rows = {row["loop"]: row for row in result(bench, "loops")["rows"]}
    assert rows["unbuildable"]["error"] == rows["fails"]["error"] == "RuntimeError: planted"
    assert 0.2 < rows["again"]["ratio"] < 5
    assert rows["base"]["step_ms"] >= 1


def test_a_part_goes_on_after_failures_and_ends_non_zero(
    broken_part: tuple[Path, subprocess.Popen[str]],
) -> None:
    bench, part = broken_part
    said, errors = part.communicate(timeout=300)
    assert part.returncode == 1, errors

    summary = {row["job"]: row["outcome"] for row in result(bench, "gpu-core")["rows"]}
    assert summary.pop("compat").startswith("ended after")
    assert summary == {"overhead": "ok", "master": "failed (exit 1)"}
    assert "RuntimeError: planted" in said
    assert said.rstrip().rpartition("---")[2].count("outcome=") == 3  # listed at the end

    whole = result(bench, "overhead")
    assert "finished" not in whole
    (row,) = whole["rows"]
    assert 0 < row["budget_s"] < 36

    cut = result(bench, "compat")
    assert cut["finished"] is False
    assert cut["rows"] == [
        {"part": "first", "error": "ValueError: planted in file.py"},
        {"part": "second", "child": cut["rows"][1]["child"]},
    ]
    assert not runs(cut["rows"][1]["child"])
