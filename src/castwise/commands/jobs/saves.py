"""Saves checkpoints of ``castwise train``, and resumes from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from castwise.commands.jobs.layouts import Parts
from castwise.core import checkpoint
from castwise.errors import CheckpointError


class Saves:
    """The checkpoints of a training, in a folder of their own.

    A checkpoint is saved after every ``every`` steps and after the last step. If ``every`` is 0, none is saved. With
    ``resume``, the training continues from the newest checkpoint, which must be of the same workload and seed.
    """

    def __init__(self, folder: Path, workload: str, seed: int, every: int, resume: bool) -> None:
        self.folder, self.every = folder, every
        self._workload, self._seed, self._resume = workload, seed, resume
        self._found: checkpoint.Found | None = None
        self._last: checkpoint.Saving | None = None

    def find(self) -> int:
        """Find the checkpoint to resume from, and return its number of steps, or 0 if there is none.

        All ranks must make this call.

        Raises:
            CheckpointError: There are checkpoints, but ``resume`` is not set.
        """
        if not self.folder.is_dir() and not self._resume:
            return 0
        found = checkpoint.newest(self.folder)
        if not found:
            return 0
        if not self._resume:
            raise CheckpointError(
                f"train: {self.folder.parent} has a training that was saved at step {found.step}. Continue it with --resume "
                "(resume=True), or give another folder with --out; to start again at step 0, delete the folder 'checkpoints' in it."
            )
        self._found = found
        return int(found.step)

    def load(self, parts: Parts) -> int:
        """Load the checkpoint that :meth:`find` has found, and return how many steps were skipped before it.

        Raises:
            CheckpointError: The checkpoint is of another workload or seed, or does not fit the model.
        """
        assert self._found is not None
        loaded = checkpoint.load(
            self._found, model=parts.modules, optimizers=parts.optimizers, amp=parts.amp, accept=self._accept
        )
        return int(loaded.extra.get("skipped_steps", 0))

    def _accept(self, extra: Any) -> None:
        extra = extra if isinstance(extra, dict) else {}
        was, now = (extra.get("workload"), extra.get("seed")), (self._workload, self._seed)
        if was != now or type(extra.get("skipped_steps", 0)) is not int:
            raise CheckpointError(
                f"the checkpoint was saved by workload {was[0]!r} with seed {was[1]}, but this training has workload {now[0]!r} with seed "
                f"{now[1]}; give another folder with --out, or the same workload and seed"
            )

    def due(self, step: int, last: int) -> bool:
        """Whether a checkpoint must be saved after a step."""
        return self.every > 0 and (step % self.every == 0 or step == last)

    def save(self, parts: Parts, step: int, skipped_steps: int) -> None:
        """Save a checkpoint in the background, once the previous checkpoint has been written."""
        extra = {"workload": self._workload, "seed": self._seed, "skipped_steps": skipped_steps}
        self._last = checkpoint.save(
            self.folder, step, model=parts.modules, optimizers=parts.optimizers, amp=parts.amp, extra=extra,
            asynchronous=True,
        )  # fmt: skip

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk."""
        if self._last is not None:
            self._last.wait()
