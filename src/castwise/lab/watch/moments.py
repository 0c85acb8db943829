"""Record the inputs of a training step: its batch, and the states of the random generators."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from castwise.core import _torch, devices
from castwise.core.casting.trees import tensors_in
from castwise.core.checkpoint.contents import random_states, set_random_states
from castwise.core.session import Amp


@dataclass(frozen=True)
class Moment:
    """A batch from a loader, with the states of the random generators when it was loaded.

    Attributes:
        batch: A reference to the batch, not a copy.
        random: The states as :func:`generators` returns them.
        versions: Autograd's version counter of each tensor in the batch.
    """

    batch: Any
    random: dict[str, Any]
    versions: tuple[int, ...]

    @classmethod
    def of(cls, batch: Any, amp: Amp) -> Moment:
        """Record a batch and the present states of the random generators."""
        return cls(batch, generators(amp), _versions(batch))

    @property
    def changed(self) -> bool:
        """Whether the batch was written to since it was recorded, according to autograd's version counters."""
        return _versions(self.batch) != self.versions

    @property
    def nbytes(self) -> int:
        """The total bytes of the batch's tensors."""
        return sum(tensor.nbytes for tensor in tensors_in(self.batch))


def _versions(batch: Any) -> tuple[int, ...]:
    return tuple(_torch.tensors.version(tensor) for tensor in tensors_in(batch))


def generators(amp: Amp) -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's random generators, as values that a checkpoint can hold."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys, dtype=np.int64)), *(float(x) for x in rest)),
        "torch": random_states(amp),
    }


def set_generators(states: Mapping[str, Any]) -> None:
    """Set the random generators to states from :func:`generators`; device types that are missing here are left out.

    Raises:
        ValueError: A state is invalid. Other generators may already have been set.
    """
    try:
        random.setstate(states["python"])
        kind, keys, position, has_gauss, gauss = states["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), int(position), int(has_gauss), gauss))
        set_random_states({
            kind: state for kind, state in states["torch"].items() if devices.is_available(kind)
        })
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise ValueError(f"a random generator rejected its state: {error}") from None
