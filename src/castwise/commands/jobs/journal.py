"""Writes the log of a training while it runs, so that a crash loses nothing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from castwise.core.extras import left_out
from castwise.core.session.process import interrupts_wait

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Journal:
    """The log of a running training: JSON lines and, if TensorBoard is installed, TensorBoard events.

    Args:
        out: The output folder. Files of an earlier training in this folder are removed.
        steps_before: The number of steps of the earlier training that this training continues. Their log lines are kept.

    Attributes:
        files: The names of the written files.
        earlier: The lines of ``metrics.jsonl`` that were kept.
    """

    def __init__(self, out: Path, steps_before: int = 0) -> None:
        self._steps_before = steps_before
        self.earlier: list[dict[str, Any]] = []
        self._events = out / "tensorboard"
        self._lines_path = out / "metrics.jsonl"
        self._board: SummaryWriter | None = None
        self.files = [self._lines_path.name]

    def __enter__(self) -> Self:
        for name in ("model.pt", "result.json", "curves.png"):
            (self._lines_path.parent / name).unlink(missing_ok=True)
        self.earlier = self._still_true()
        kept = self._lines_path.with_suffix(".partial")
        kept.write_text("".join(json.dumps(row) + "\n" for row in self.earlier), encoding="utf-8")
        kept.replace(self._lines_path)
        if not self._steps_before:
            for old in self._events.glob("events.out.tfevents.*"):
                old.unlink()  # otherwise TensorBoard would draw both runs as one curve
        with left_out("the log for TensorBoard"):
            from torch.utils.tensorboard import SummaryWriter

            purge = self._steps_before + 1 if self._steps_before else None
            self._board = SummaryWriter(str(self._events), purge_step=purge)
            self.files.append(self._events.name)
        self._lines: TextIO = self._lines_path.open("a", encoding="utf-8")
        return self

    def _still_true(self) -> list[dict[str, Any]]:
        """Return the lines of the earlier training that are still valid.

        A killed process may have left half a line, or lines of steps that were made after the last checkpoint.
        """
        rows: list[dict[str, Any]] = []
        if self._steps_before and self._lines_path.is_file():
            for line in self._lines_path.read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    row = json.loads(line)
                    if row["step"] == len(rows) + 1 <= self._steps_before:
                        rows.append(row)
        return rows

    def step(self, row: Mapping[str, Any], loss: float) -> None:
        """Write a line to ``metrics.jsonl``, and the loss, finite or not, to TensorBoard."""
        self._lines.write(json.dumps(row, allow_nan=False) + "\n")
        if self._board is None:
            return
        self._board.add_scalar("loss", loss, row["step"])
        if row["loss_scale"] is not None:
            self._board.add_scalar("loss_scale", row["loss_scale"], row["step"])
            self._board.add_scalar("skipped", float(row["skipped"]), row["step"])

    @interrupts_wait()
    def metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the metrics of an evaluation after ``step`` steps to TensorBoard."""
        for key, value in metrics.items():
            if self._board is not None:
                self._board.add_scalar(f"final/{key}", value, step)

    def flush(self) -> None:
        """Pass the written lines to the operating system."""
        self._lines.flush()  # so that a killed process loses no line

    @interrupts_wait()
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.close()
        if self._board is not None:
            self._board.close()
