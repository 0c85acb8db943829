"""Save and restore the good states of a training: its last few checkpoints, with the state of further objects."""

from __future__ import annotations

import contextlib
import copy
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from castwise.core import checkpoint
from castwise.core.checkpoint.folder import candidates
from castwise.core.ranks.pieces import is_dtensor
from castwise.core.session.amp import Amp, SessionView
from castwise.errors import CheckpointError, PlanError, sentence
from castwise.lab.watch.moments import generators, set_generators

KEPT = 2
"""Number of good states that are kept. Two are needed, because the last may already contain the cause of a later divergence."""


@dataclass(frozen=True)
class Good:
    """A saved state to which a training can return.

    Attributes:
        path: The checkpoint.
        step: Number of the next step.
        cursor: Position in the data at which that step starts.
        own: The state that each rank keeps in its own memory: Python's and NumPy's random generators, and buffers.
    """

    path: Path
    step: int
    cursor: int
    own: Mapping[str, Any] = field(repr=False, compare=False)


class GoodStates:
    """The saved states to which one training can return, the oldest first.

    Args:
        amp: The session.
        model: The model that the loop calls.
        inner: The module that the session prepared.
        optimizers: The model's optimizers.
        also: Further objects with ``state_dict`` and ``load_state_dict``, by name.
        folder: The folder of the checkpoints.

    Attributes:
        all: The good states.

    Raises:
        PlanError: An object in ``also`` lacks ``state_dict`` or ``load_state_dict``.
    """

    all: list[Good]

    def __init__(
        self,
        amp: Amp,
        model: nn.Module,
        inner: nn.Module,
        optimizers: Sequence[Optimizer],
        also: Mapping[str, Any],
        folder: Path,
    ) -> None:
        for name, thing in also.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise PlanError(
                    f"Recovery(also={{{name!r}: {type(thing).__name__}}}): needs state_dict and load_state_dict; leave it out, or "
                    "wrap it in an object that has them"
                )
        self._amp, self._model, self._inner, self._optimizers = amp, model, inner, optimizers
        self._also, self._folder = also, folder
        self._serial = max((step for step, _ in candidates(folder)), default=-1) + 1
        self._ranks = SessionView(amp).ranks
        self.all = []

    def add(self, step: int, cursor: int) -> None:
        """Save the present state as a good state. All ranks must call this together.

        Raises:
            CheckpointError: The state could not be written. Earlier states are unchanged.
        """
        own = {
            "generators": {name: state for name, state in generators(self._amp).items() if name != "torch"},
            "buffers": {name: buffer.detach().clone() for name, buffer in self._inner.named_buffers()},
        }
        also = {name: thing.state_dict() for name, thing in self._also.items()}
        saving = checkpoint.save(
            self._folder,
            self._serial,
            model=self._model,
            optimizers=self._optimizers,
            amp=self._amp,
            extra={"step": step, "also": also},
            keep=None,
            process_group=self._ranks.group,
        )
        self._serial += 1
        self.all.append(Good(saving.path, step, cursor, own))
        for old in self.all[:-KEPT]:
            self._remove(old)
        self.all = self.all[-KEPT:]

    def before(self, step: int, earlier: int) -> Good:
        """Return the newest good state after which a step was made before ``step``; if there is none, the oldest state.

        With ``earlier``, go back so many states further, if they exist.

        Raises:
            CheckpointError: There is no good state.
        """
        goods = [good for good in self.all if good.step < step] or self.all[:1]
        if not goods:
            raise CheckpointError(f"Recovery: step {step} diverged, and there is no good state to go back to")
        return goods[max(0, len(goods) - 1 - earlier)]

    def load(self, good: Good) -> None:
        """Restore everything to a good state, and clear the gradients.

        If that fails or is interrupted, everything except the gradients is unchanged.

        Raises:
            CheckpointError: The state no longer exists, or does not fit.
        """
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        self._inner.zero_grad()
        before = {name: copy.deepcopy(thing.state_dict()) for name, thing in self._also.items()}

        def accept(extra: Any) -> None:
            for name, thing in self._also.items():
                try:
                    thing.load_state_dict(_as_held(extra["also"][name], before[name]))
                except (KeyError, TypeError, ValueError, RuntimeError) as error:
                    raise CheckpointError(f"{name} of also= rejected its state: {sentence(error)}") from error

        try:
            checkpoint.load(
                good.path, model=self._model, optimizers=self._optimizers, amp=self._amp, accept=accept,
                process_group=self._ranks.group,
            )  # fmt: skip
        except BaseException:
            for name, thing in self._also.items():
                thing.load_state_dict(before[name])
            raise
        with torch.no_grad():
            for name, buffer in self._inner.named_buffers():
                if name in good.own["buffers"]:
                    buffer.copy_(good.own["buffers"][name])
        set_generators({**generators(self._amp), **good.own["generators"]})

    def forget_after(self, good: Good) -> None:
        """Delete the states that are newer than the given state."""
        for other in self.all:
            if other.step > good.step:
                self._remove(other)
        self.all = [other for other in self.all if other.step <= good.step]

    def forget_before(self, good: Good) -> None:
        """Delete the states that are older than the given state."""
        for other in self.all[: self.all.index(good)]:
            self._remove(other)
        self.all = self.all[self.all.index(good) :]

    def _remove(self, good: Good) -> None:
        """Delete a state. It is renamed first, so that a partly deleted folder does not look like a checkpoint."""
        if self._ranks.rank == 0:
            doomed = good.path.with_name(f".{good.path.name}.deleted")
            with contextlib.suppress(OSError):
                good.path.rename(doomed)
                shutil.rmtree(doomed)


def _as_held(saved: Any, held: Any) -> Any:
    """Shard whole tensors of a saved state like the present tensors."""
    if isinstance(held, Tensor) and isinstance(saved, Tensor) and is_dtensor(held):
        from torch.distributed.tensor import distribute_tensor

        cut: Any = held
        return distribute_tensor(
            saved.to(held.device), cut.device_mesh, cut.placements, src_data_rank=None
        )  # fmt: skip
    if isinstance(saved, Mapping) and isinstance(held, Mapping):
        return {key: _as_held(value, held.get(key)) for key, value in saved.items()}
    if isinstance(saved, (list, tuple)) and isinstance(held, (list, tuple)) and len(saved) == len(held):
        return type(saved)(map(_as_held, saved, held))
    return saved
