"""Weights that other code writes between backward and step, from gradients that are not finite.

SAM, for example, climbs along the gradient, has the loss computed there, returns and then steps. If the first gradients
overflow, the weights become NaN before any step could be skipped. So when gradients that were unscaled explicitly are
not finite, the weights are copied. Weights that have become non-finite at the next clearing of gradients, forward,
reading of the state or step get the copies back, and the step is skipped.

Where the host knows that the gradients are not finite, the weights are always copied, until they are looked at. Where only
the device knows, an optimizer is observed until its first step, and the host waits later only if its weights were written
before that step, or if it contains another optimizer.

All this is for a process that trains alone, or beside others with the same weights and gradients, as under
DistributedDataParallel. Other processes would have to agree before a weight is restored, at points of the loop at which
they need not meet.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from castwise.core import _torch
from castwise.core.scaler.result import read_on_host


@dataclass(eq=False)
class _Overflow:
    """The weights of an optimizer when its gradients were found not to be finite.

    Attributes:
        optimizer: The optimizer.
        copies: Its parameters, or masters, and their values.
        torn: Whether weights became non-finite, so that the next step is skipped.
        stepped: Whether that step is over.
        counted: Whether the overflow is counted as a skipped step.
    """

    optimizer: weakref.ref[Optimizer]
    copies: list[tuple[torch.Tensor, torch.Tensor]]
    torn: bool = False
    stepped: bool = False
    counted: bool = False


class Written:
    """Restores the weights of a window's optimizers after an overflow; see the module docstring.

    Args:
        contains: Whether an optimizer contains others.
        sync: Copies an optimizer's masters into the model.
    """

    def __init__(
        self,
        contains: Callable[[Optimizer], bool],
        sync: Callable[[Optimizer], object],
    ) -> None:
        self._contains, self._sync = contains, sync
        self.ranks_agree: Callable[[], bool] = lambda: False
        """Whether all processes that train together have the same weights and gradients."""
        self.overflows: dict[int, _Overflow] = {}
        """The overflows that are not over, by the ``id`` of their optimizers."""
        self._writes: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        """Whether the host waits to know whether gradients are finite; known after an optimizer's first step."""
        self._versions: dict[int, list[int]] = {}
        """By optimizer that has not stepped: its weights' versions after the first backward."""

    def note_unscaled(self, optimizer: Optimizer, flags: Collection[torch.Tensor]) -> None:
        """After gradients were unscaled explicitly: copy the weights if the gradients are not finite.

        If only the device knows, the host waits for it if the weights may be written before the step.
        """
        if not (_is_alone() or self.ranks_agree()):
            return
        key, writes = id(optimizer), self._writes.get(optimizer)
        if key in self.overflows and self.overflows[key].stepped:
            self.look()
        if writes is None:
            self._versions.setdefault(key, _torch.tensors.versions(_weights(optimizer)))
        if key in self.overflows:
            return
        bad = read_on_host(flags)
        if bad or (bad is None and writes is not False and any(bool(flag) for flag in flags)):
            copies = [(weight, weight.detach().clone()) for weight in _weights(optimizer)]
            self.overflows[key] = _Overflow(weakref.ref(optimizer), copies)

    def note_counted(self, key: int) -> None:
        """Record that the overflow of an optimizer, given by ``id``, is counted as a skipped step."""
        if key in self.overflows:
            self.overflows[key].counted = True

    def look(self) -> None:
        """Restore weights that have become non-finite."""
        for key, overflow in list(self.overflows.items()):
            self._restore(overflow)
            if overflow.stepped:
                del self.overflows[key]

    def begin_step(self, optimizer: Optimizer) -> bool:
        """Before a step: restore the weights, and return whether the step must be skipped because they were written."""
        key = id(optimizer)
        if key in self._versions and optimizer not in self._writes:
            versions = self._versions.pop(key)
            moved = versions != _torch.tensors.versions(_weights(optimizer))
            self._writes[optimizer] = moved or self._contains(optimizer)
        overflow = self.overflows.get(key)
        if overflow is None or overflow.optimizer() is not optimizer:
            return False
        self._restore(overflow)
        overflow.stepped = True
        return overflow.torn

    def is_counted(self, optimizer: Optimizer) -> bool:
        """Whether the overflow for which a step is skipped is counted already."""
        overflow = self.overflows.get(id(optimizer))
        return overflow is not None and overflow.torn and overflow.counted

    def _restore(self, overflow: _Overflow) -> None:
        optimizer = overflow.optimizer()
        if optimizer is None or not overflow.copies:
            return
        if any(
            bool((~_local(now).isfinite() & _local(copy).isfinite()).any()) for now, copy in overflow.copies
        ):
            overflow.torn = True
            with torch.no_grad():
                for weight, copy in overflow.copies:
                    weight.copy_(copy)
            self._sync(optimizer)


def _is_alone() -> bool:
    """Whether no other process trains with this one."""
    distributed = torch.distributed
    together = distributed.is_available() and distributed.is_initialized()
    return not together or distributed.get_world_size() == 1


def _weights(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor; other tensors unchanged."""
    local: torch.Tensor = tensor.detach()
    return local.to_local() if hasattr(local, "to_local") else local
