"""Trainings under torchrun whose processes are killed."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

WORKLOAD = "gpt?layers=2&width=32&context=32&batch=8"
STEPS = 1000


def environment() -> dict[str, str]:
    """One thread per process, and no quarrel with a torchrun around."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("TORCHELASTIC", "RANK", "WORLD_SIZE", "MASTER"))
    }
    return {**kept, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def children_of(pid: int) -> list[int]:
    """The processes that one has started, on Linux."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return found


class Training:
    """``castwise train`` on two processes, with checkpoints, that goes on after whatever happens to it."""

    def __init__(
        self, out: Path, *, steps: int, restarts: int = 0, plan: str = "fp16-master", layout: str = "dp2",
        save_every: int = 5,
    ) -> None:  # fmt: skip
        self.out = out
        self.log = out.with_suffix(".log")
        self.command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "--max-restarts", str(restarts), "--monitor-interval", "0.1",
            "-m", "castwise", "train", WORKLOAD, "--plan", plan, "--layout", layout, "--steps", str(steps),
            "--save-every", str(save_every), "--resume", "--out", str(out),
        ]  # fmt: skip
        self._agent: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it in the background."""
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self._agent = subprocess.Popen(self.command, stdout=log, stderr=log, env=environment())

    def run(self) -> None:
        """Start it and wait.

        Raises:
            AssertionError: It failed; with what it printed.
        """
        self.start()
        assert self.wait() == 0, self.log.read_text()[-4000:]

    def wait(self, timeout_s: float = 300) -> int:
        """The exit code."""
        assert self._agent is not None
        try:
            return self._agent.wait(timeout_s)
        finally:
            if self._agent.poll() is None:
                for pid in [*children_of(self._agent.pid), self._agent.pid]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._agent is not None and self._agent.poll() is None

    def steps_made(self) -> int:
        """Lines of its record."""
        with contextlib.suppress(OSError):
            return (self.out / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def saving(self) -> bool:
        """Whether a checkpoint is being written now."""
        folder = self.out / "checkpoints"
        return (
            any(re.search(r"partial", name.name) for name in folder.iterdir()) if folder.is_dir() else False
        )

    def kill_one(self, draw: random.Random) -> str | None:
        """``kill -9`` one of the processes that train; what it was doing, None where none runs."""
        assert self._agent is not None
        workers = children_of(self._agent.pid)
        if not workers:
            return None
        said = f"{'saving' if self.saving() else 'training'} after step {self.steps_made()}"
        try:
            os.kill(draw.choice(workers), signal.SIGKILL)
        except ProcessLookupError:
            return None
        return said

    def kill_one_saving(self, draw: random.Random) -> str | None:
        """The same while a checkpoint is being written: all are halted first, so that the moment cannot pass."""
        assert self._agent is not None
        while True:
            self.until(self.saving)
            workers = children_of(self._agent.pid)
            for pid in workers:
                os.kill(pid, signal.SIGSTOP)
            try:
                if self.saving():
                    return self.kill_one(draw)
            finally:
                for pid in workers:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)

    def until(self, ready: Callable[[], bool], timeout_s: float = 120) -> None:
        """Wait for a moment of it.

        Raises:
            AssertionError: It ended, or the moment did not come.
        """
        deadline = time.monotonic() + timeout_s
        while not ready():
            assert self.running(), f"it ended before the moment came:\n{self.log.read_text()[-4000:]}"
            assert time.monotonic() < deadline, f"the moment did not come:\n{self.log.read_text()[-4000:]}"
            time.sleep(0.0005)

    def weights_equal(self, other: Training) -> bool:
        """Whether both end at the same weights, bit for bit."""
        mine, theirs = (torch.load(t.out / "model.pt", weights_only=True) for t in (self, other))
        return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
