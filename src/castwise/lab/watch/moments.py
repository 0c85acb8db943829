"""What a step of a training began with: its batch, and where the random generators stood."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from castwise.core import _torch
from castwise.core.casting.trees import tensors_in
from castwise.core.checkpoint.contents import random_states, set_random_states
from castwise.core.session import Amp


@dataclass(frozen=True)
class Moment:
    """A batch as a loader handed it out, and the random states of that moment.

    Attributes:
        batch: By reference.
        random: As :func:`generators` returns them.
        versions: How often each of the batch's tensors had been written to.
    """

    batch: Any
    random: dict[str, Any]
    versions: tuple[int, ...]

    @classmethod
    def of(cls, batch: Any, amp: Amp) -> Moment:
        """The moment that it is now."""
        return cls(batch, generators(amp), _versions(batch))

    @property
    def changed(self) -> bool:
        """Whether the batch was written to since, as far as autograd counts."""
        return _versions(self.batch) != self.versions

    @property
    def nbytes(self) -> int:
        """Bytes of the batch's tensors."""
        return sum(tensor.nbytes for tensor in tensors_in(self.batch))


def _versions(batch: Any) -> tuple[int, ...]:
    return tuple(_torch.tensors.version(tensor) for tensor in tensors_in(batch))


def generators(amp: Amp) -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators, of values that a checkpoint can hold."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys, dtype=np.int64)), *(float(x) for x in rest)),
        "torch": random_states(amp),
    }


def set_generators(states: Mapping[str, Any]) -> None:
    """Undo :func:`generators`, of the device types that are there.

    Raises:
        ValueError: Something that no generator takes; others may have been set.
    """
    try:
        random.setstate(states["python"])
        kind, keys, position, has_gauss, gauss = states["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), int(position), int(has_gauss), gauss))
        set_random_states({
            kind: state
            for kind, state in states["torch"].items()
            if kind == "cpu" or torch.get_device_module(kind).is_available()
        })
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise ValueError(f"a random generator rejected its state: {error}") from None
