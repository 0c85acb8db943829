"""Records of a recovery's returns, for display and log."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOG = "recovery.jsonl"


@dataclass(frozen=True)
class Rollback:
    """One return to a good state.

    Attributes:
        step: The diverged step, in data order.
        to_step: The step from which training continued.
        symptom: How the divergence was detected.
        cause: ``batch``, ``format``, ``loss scale``, ``transient``, or ``unknown`` if the step was not repeated.
        evidence: What was run and the results.
        action: The change that was made.
        plan: The plan of the continued training, as a line.
    """

    step: int
    to_step: int
    symptom: str
    cause: str
    evidence: str
    action: str
    plan: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)

    def tell(self, folder: Path) -> None:
        """Give a warning, and append a line to the log in a folder."""
        warnings.warn(
            f"Recovery: step {self.step} diverged ({self.symptom}); back to step {self.to_step}. Cause: {self.cause} "
            f"({self.evidence}). {self.action[:1].upper()}{self.action[1:]}.",
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
    """The error message when going back did not help: the returns that were tried."""
    told = "; ".join(f"step {one.step}: {one.symptom}: {one.action}" for one in returns)
    return (
        f"Recovery: step {step} diverged ({symptom}), and going back {len(returns)} time{'s' * (len(returns) != 1)} did not "
        f"help: {told}. {folder / LOG} has the evidence. Check the data and the learning rate; attempts= allows more attempts."
    )
