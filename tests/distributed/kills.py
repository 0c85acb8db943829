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
"""torchrun's options for workers that are forks of one process that has imported torch, and run a script."""


def environment() -> dict[str, str]:
    """One thread per process, and no quarrel with a torchrun around."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("TORCHELASTIC", "RANK", "WORLD_SIZE", "MASTER"))
    }
    return {**kept, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def torchrun(words: list[str]) -> None:
    """torchrun, in this process."""
    os.environ |= environment()
    serve_forks()  # those of torchrun's workers, too, have imported torch
    torch.distributed.run.main(words)


def workers_of(agent: int, forks: bool = True) -> list[int]:
    """The processes that one torchrun has started to train."""
    children = children_of(agent)
    return [pid for child in children for pid in children_of(child)] if forks else children


class Torchrun:
    """A script on two processes under torchrun's elastic restarts, that goes on after whatever happens to it.

    Args:
        out: Folder of what it writes.
        words: The script and its arguments.
        folder: Where it runs.
        forks: Whether torchrun's workers are forks of one process that has imported torch. Else each is an
            interpreter of its own, as a user starts it, which takes seconds.
    """

    def __init__(self, out: Path, *words: str, folder: Path = ROOT, forks: bool = True) -> None:
        self.out, self.words = out, words
        self._folder, self._forks = folder, forks
        self._agent: Forked | None = None

    def start(self, restarts: int) -> None:
        """Start it in the background."""
        self.out.parent.mkdir(parents=True, exist_ok=True)
        words = [
            "--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts), "--monitor-interval", "0.1",
            *(FORKED * self._forks), *self.words,
        ]  # fmt: skip
        self._agent = Forked(torchrun, words, self._folder, self.out.with_suffix(".agent"))

    def wait(self, timeout_s: float = 300) -> int:
        """The exit code."""
        assert self._agent is not None
        return self._agent.wait(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._agent is not None:
            self._agent.end()

    def workers(self) -> list[int]:
        """The processes that train, as far as they have been started."""
        assert self._agent is not None
        return workers_of(self._agent.pid, self._forks)

    def said(self) -> str:
        """The end of what it has printed."""
        assert self._agent is not None
        return self._agent.said("err")[-4000:]

    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._agent is not None and self._agent.code is None

    def steps_made(self) -> int:
        """As far as can be seen from outside."""
        raise NotImplementedError

    def moment(self) -> str:
        """What it is doing."""
        return f"after step {self.steps_made()}"

    def kill_one(self, draw: random.Random) -> str | None:
        """``kill -9`` one of the processes that train; what it was doing, None where none runs."""
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
        """Wait for a moment of it.

        Raises:
            AssertionError: It ended, or the moment did not come.
        """
        deadline = time.monotonic() + timeout_s
        while not ready():
            assert self.running(), f"it ended before the moment came:\n{self.said()}"
            assert time.monotonic() < deadline, f"the moment did not come:\n{self.said()}"
            time.sleep(0.0005)


class OwnLoop(Torchrun):
    """The script of a loop of one's own in docs/parallel.md, as it stands there, but for gloo's teardown.

    That aborts one in ten processes, in plain torch too, and would be a restart.
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
        end = "" if forks else "import os\nos._exit(0)\n"  # a fork ends by os._exit itself
        script.write_text(code + end, encoding="utf-8")
        super().__init__(folder / "runs" / "survives", str(script), folder=folder, forks=forks)

    def run(self) -> None:
        """Run it undisturbed, without torchrun.

        Raises:
            AssertionError: It failed; with what it printed.
        """
        for rank in run_ranks(run_script, list(self.words), self._folder, 2):
            assert rank.code == 0, rank.said("err")[-4000:]

    def steps_made(self) -> int:
        """The step of its newest checkpoint; 0 without one."""
        return max(
            (int(found.name.removeprefix("step-")) for found in self.out.glob("step-*[0-9]")), default=0
        )

    def weights_equal(self, other: OwnLoop) -> bool:
        """Whether their newest checkpoints hold the same bytes."""
        mine, theirs = (
            {
                found.name: found.read_bytes()
                for found in loop.out.glob(f"step-{loop.steps_made():08}/*.safetensors")
            }
            for loop in (self, other)
        )
        return bool(mine) and mine == theirs


class Training(Torchrun):
    """``castwise train`` with checkpoints.

    Args:
        out: Folder of the training.
        steps: How many.
        plan: A preset.
        layout: Of the two processes.
        save_every: Steps between checkpoints.
        forks: As of :class:`Torchrun`.
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
        """Run it undisturbed, without torchrun.

        Raises:
            AssertionError: It failed; with what it printed.
        """
        self.out.parent.mkdir(parents=True, exist_ok=True)
        for rank in command(self.out.parent, 2, *self.command):
            assert rank.code == 0, rank.said("err")[-4000:]

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

    def moment(self) -> str:
        """Whether it trains or saves, and after which step."""
        return f"{'saving' if self.saving() else 'training'} {super().moment()}"

    def kill_one_saving(self, draw: random.Random) -> str | None:
        """The same while a checkpoint is being written: all are halted first, so that the moment cannot pass."""
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
        """Whether both end at the same weights, bit for bit."""
        mine, theirs = (torch.load(t.out / "model.pt", weights_only=True) for t in (self, other))
        return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
