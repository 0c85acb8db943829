"""Trainings under torchrun whose processes are killed."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import torch
import torch.distributed.run

import castwise.__main__
from tests.processes import Forked, children_of, command, run_ranks, run_script, serve_forks

ROOT = Path(__file__).parents[2]
WORKLOAD = "gpt?layers=2&width=32&context=32&batch=8"
STEPS = 1000
FORKED = ["--start-method", "forkserver", "--run-path"]
"""torchrun's options for workers that run a script as forks of one process that has imported torch."""


def environment() -> dict[str, str]:
    """Return an environment with one thread per process and without variables of an outer torchrun."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("TORCHELASTIC", "RANK", "WORLD_SIZE", "MASTER"))
    }
    return {**kept, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def torchrun(words: list[str]) -> None:
    """Run torchrun in this process."""
    os.environ |= environment()
    serve_forks()  # torchrun's workers then start with torch imported
    torch.distributed.run.main(words)


def workers_of(agent: int, forks: bool = True) -> list[int]:
    """Return the pids of the training processes that one torchrun has started."""
    children = children_of(agent)
    return [pid for child in children for pid in children_of(child)] if forks else children


class Torchrun:
    """A script on two processes under torchrun's elastic restarts.

    Args:
        out: Folder of its output.
        words: The script and its arguments.
        folder: Working folder.
        forks: Whether torchrun's workers are forks of one process that has imported torch. Otherwise each is a new
    interpreter, as users start it, which takes seconds.
    """

    def __init__(self, out: Path, *words: str, folder: Path = ROOT, forks: bool = True) -> None:
        self.out, self.words = out, words
        self._folder, self._forks = folder, forks
        self._agent: Forked | None = None

    def start(self, restarts: int) -> None:
        """Start torchrun in the background."""
        self.out.parent.mkdir(parents=True, exist_ok=True)
        words = [
            "--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts), "--monitor-interval", "0.1",
            *(FORKED * self._forks), *self.words,
        ]  # fmt: skip
        self._agent = Forked(torchrun, words, self._folder, self.out.with_suffix(".agent"))

    def wait(self, timeout_s: float = 300) -> int:
        """Wait for torchrun to end, and return its exit code."""
        assert self._agent is not None
        return self._agent.wait(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._agent is not None:
            self._agent.end()

    def workers(self) -> list[int]:
        """Return the pids of the training processes started so far."""
        assert self._agent is not None
        return workers_of(self._agent.pid, self._forks)

    def said(self) -> str:
        """Return the end of its error output."""
        assert self._agent is not None
        return self._agent.said("err")[-4000:]

    def running(self) -> bool:
        """Return whether torchrun is still running."""
        return self._agent is not None and self._agent.code is None

    def steps_made(self) -> int:
        """Return the number of steps, as visible from outside."""
        raise NotImplementedError

    def moment(self) -> str:
        """Describe what the training is doing."""
        return f"after step {self.steps_made()}"

    def kill_one(self, draw: random.Random) -> str | None:
        """``kill -9`` one training process; return what the training was doing, or None if no process runs."""
        workers = self.workers()
        if not workers:
            return None
        said = self.moment()
        try:
            os.kill(draw.choice(workers), signal.SIGKILL)
        except ProcessLookupError:
            return None
        return said

    def until(self, ready: Callable[[], bool], timeout_s: float = 120) -> None:
        """Wait until a condition holds.

        Raises:
            AssertionError: The training ended first, or the condition did not hold in time.
        """
        deadline = time.monotonic() + timeout_s
        while not ready():
            assert self.running(), f"the training ended before the condition held:\n{self.said()}"
            assert time.monotonic() < deadline, f"the condition did not hold in time:\n{self.said()}"
            time.sleep(0.0005)


class OwnLoop(Torchrun):
    """The script with a custom loop from docs/parallel.md, without gloo's teardown.

    The teardown aborts one in ten processes, in plain torch too, and torchrun would restart them.
    """

    def __init__(self, folder: Path, *, steps: int = 200, forks: bool = True) -> None:
        folder.mkdir(parents=True)
        page = (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8")
        blocks = re.findall(r"^```python\n(# train\.py\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
        assert len(blocks) == 1
        code, end = blocks[0].split("dist.destroy_process_group()\n")
        assert not end
        code = re.sub(r"^STEPS = \d+$", f"STEPS = {steps}", code, flags=re.MULTILINE)
        script = folder / "train.py"
        end = "" if forks else "import os\nos._exit(0)\n"  # a fork ends with os._exit already
        script.write_text(code + end, encoding="utf-8")
        super().__init__(folder / "runs" / "survives", str(script), folder=folder, forks=forks)

    def run(self) -> None:
        """Run the script without torchrun and without kills.

        Raises:
            AssertionError: It failed; the message is its error output.
        """
        for rank in run_ranks(run_script, list(self.words), self._folder, 2):
            assert rank.code == 0, rank.said("err")[-4000:]

    def steps_made(self) -> int:
        """Return the step of the newest checkpoint, or 0."""
        return max(
            (int(found.name.removeprefix("step-")) for found in self.out.glob("step-*[0-9]")), default=0
        )

    def weights_equal(self, other: OwnLoop) -> bool:
        """Return whether the newest checkpoints of both contain the same bytes."""
        mine, theirs = (
            {
                found.name: found.read_bytes()
                for found in loop.out.glob(f"step-{loop.steps_made():08}/*.safetensors")
            }
            for loop in (self, other)
        )
        return bool(mine) and mine == theirs


class Training(Torchrun):
    """A ``castwise train`` with checkpoints.

    Args:
        out: Folder of the training.
        steps: Number of steps.
        plan: A preset.
        layout: The layout on two processes.
        save_every: Steps between checkpoints.
        forks: As in :class:`Torchrun`.
    """

    def __init__(
        self, out: Path, *, steps: int, plan: str = "fp16-master", layout: str = "dp2", save_every: int = 5,
        forks: bool = True,
    ) -> None:  # fmt: skip
        self.command = [
            "train", WORKLOAD, "--plan", plan, "--layout", layout, "--steps", str(steps),
            "--save-every", str(save_every), "--resume", "--out", str(out),
        ]  # fmt: skip
        script = [castwise.__main__.__file__] if forks else ["-m", "castwise"]
        super().__init__(out, *script, *self.command, forks=forks)

    def run(self) -> None:
        """Run the training without torchrun and without kills.

        Raises:
            AssertionError: It failed; the message is its error output.
        """
        self.out.parent.mkdir(parents=True, exist_ok=True)
        for rank in command(self.out.parent, 2, *self.command):
            assert rank.code == 0, rank.said("err")[-4000:]

    def steps_made(self) -> int:
        """Return the number of lines in its metrics file."""
        with contextlib.suppress(OSError):
            return (self.out / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def saving(self) -> bool:
        """Return whether a checkpoint is being written."""
        folder = self.out / "checkpoints"
        return (
            any(re.search(r"partial", name.name) for name in folder.iterdir()) if folder.is_dir() else False
        )

    def moment(self) -> str:
        """Describe whether it trains or saves, and after which step."""
        return f"{'saving' if self.saving() else 'training'} {super().moment()}"

    def kill_one_saving(self, draw: random.Random) -> str | None:
        """Kill one process while a checkpoint is being written; stop all processes first, so the write cannot finish."""
        while True:
            self.until(self.saving)
            workers = self.workers()
            for pid in workers:
                os.kill(pid, signal.SIGSTOP)
            try:
                if self.saving():
                    return self.kill_one(draw)
            finally:
                for pid in workers:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)

    def weights_equal(self, other: Training) -> bool:
        """Return whether both end with the same weights, bit for bit."""
        mine, theirs = (torch.load(t.out / "model.pt", weights_only=True) for t in (self, other))
        return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
