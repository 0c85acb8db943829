"""Describe what a recovery has done, for display and log."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOG = "recovery.jsonl"
WARNED = 3
"""Number of steps skipped because of non-finite data that give a warning each."""


@dataclass(frozen=True)
class Rollback:
    """One event of a :class:`castwise.Recovery`: a return to a good state, or a skipped step that needed no return.

    Attributes:
        step: The number of the step that diverged, in data order.
        to_step: The number of the step from which the training continued. If no return was needed, it is the next
            step.
        symptom: How the divergence was detected.
        cause: The cause of the divergence: ``batch``, ``update``, ``format``, ``loss scale``, ``transient`` or
            ``unknown``. ``update`` means that the previous step's update damaged the weights. ``unknown`` means that
            the step was not repeated.
        evidence: The runs that were made to find the cause, and their results.
        action: The change that was made.
        plan: The plan under which the training continued, in its one-line text form.
    """

    step: int
    to_step: int
    symptom: str
    cause: str
    evidence: str
    action: str
    plan: str

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values for JSON."""
        return dataclasses.asdict(self)

    @property
    def needed_no_return(self) -> bool:
        """Whether the step was skipped because of its data, so that the weights were unchanged."""
        return self.to_step > self.step

    def tell(self, folder: Path, quiet: int) -> None:
        """Give a warning, and append a line to the log.

        Args:
            folder: Folder of the log.
            quiet: Number of steps so far that needed no return. Only the first of these steps give warnings.
        """
        if not self.needed_no_return or quiet <= WARNED:
            how = "weights are unchanged" if self.needed_no_return else f"back to step {self.to_step}"
            more = (
                f" Further such steps are only recorded in {LOG}."
                if self.needed_no_return and quiet == WARNED
                else ""
            )
            warnings.warn(
                f"Recovery: step {self.step} diverged ({self.symptom}); {how}. Cause: {self.cause} "
                f"({self.evidence}). {self.action[:1].upper()}{self.action[1:]}.{more}",
                stacklevel=5,
            )
        try:
            with (folder / LOG).open("ab+") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(0, end - 1))
                half = file.read() not in (b"", b"\n")  # left by a killed process
                file.write(b"\n" * half + json.dumps(self.to_dict()).encode() + b"\n")
        except OSError as error:
            warnings.warn(f"Recovery: {LOG} was not written: {error}", stacklevel=5)


def gave_up(step: int, symptom: str, returns: tuple[Rollback, ...], folder: Path) -> str:
    """Return the error message for a training that diverged again after each return. It lists the returns."""
    told = "; ".join(f"step {one.step}: {one.symptom}: {one.action}" for one in returns)
    return (
        f"Recovery: step {step} diverged ({symptom}), and going back {len(returns)} time{'s' * (len(returns) != 1)} did not "
        f"help: {told}. {folder / LOG} has the evidence. Check the data and the learning rate; attempts= allows more attempts."
    )


def stopped(again: int, high: bool) -> str:
    """Say what happens when a recovery stops, and what the user can do.

    Args:
        again: Number of skipped steps that are repeated.
        high: Whether the recovery stopped because of high finite losses.
    """
    repeats = f"{again} skipped step{'s are' if again != 1 else ' is'} repeated, and " if again else ""
    if high:
        return (
            f"{repeats}high finite losses no longer count as divergence, as with spikes=False. Check the batches listed in {LOG}; "
            "if the loss stays high, lower the learning rate"
        )
    return (
        f"{repeats}this Recovery stops: training continues with nonfinite='skip' alone. Check the data and the learning rate; "
        f"{LOG} has the evidence"
    )
