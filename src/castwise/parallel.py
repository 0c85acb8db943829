"""The one place where ranks agree: on non-finite gradients and on global norms.

Hand-written shards (a weight cut into pieces by the user, each rank holding one) cannot be recognised, so they are
declared. Gradients that DistributedDataParallel has averaged agree already and cost nothing here; DTensors agree by
torch's own operators.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from castwise.errors import StateError

__all__ = ["Shards"]


class Shards:
    """Parameters of which each rank of a group holds a piece of its own."""

    def __init__(self) -> None:
        self._groups: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __bool__(self) -> bool:
        return len(self._groups) > 0

    def mark(self, parameter: Tensor, group: Any) -> None:
        """Declare a parameter as this rank's piece.

        Args:
            parameter: The model's own parameter.
            group: The ranks that hold the other pieces; None for all.

        Raises:
            StateError: torch.distributed is not initialised.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise StateError(
                "mark_sharded: torch.distributed is not initialised; call init_process_group first"
            )
        self._groups[parameter] = group if group is not None else dist.group.WORLD

    def _distinct(self) -> list[Any]:
        found: dict[int, Any] = {}
        for group in self._groups.values():
            found.setdefault(id(group), group)
        return list(found.values())

    def reduce_flag(self, flag: Tensor) -> Tensor:
        """Make a non-finite flag (0-dim fp32) the largest over every rank that holds a piece, in place."""
        for group in self._distinct():
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
        return flag

    def norm(self, owners: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
        """Norm over whole parameters: pieces are added up over their ranks, all else is counted once.

        Args:
            owners: The model's parameters whose gradients are meant; those without one are passed over.
            norm_type: 2, any other positive power, or infinity.

        Returns:
            0-dim fp32 tensor, equal on all ranks.
        """
        infinite = math.isinf(norm_type)
        local: list[Tensor] = []
        pieces: dict[int, tuple[Any, list[Tensor]]] = {
            id(group): (group, [torch.zeros(())]) for group in self._distinct()
        }
        for owner in owners:
            if owner.grad is None:
                continue
            values = owner.grad._values() if owner.grad.is_sparse else owner.grad
            size = torch.linalg.vector_norm(values.float(), norm_type)
            size = size if infinite else size**norm_type
            group = self._groups.get(owner)
            (local if group is None else pieces[id(group)][1]).append(size)
        device = next(
            (size.device for sizes in (local, *(p[1][1:] for p in pieces.values())) for size in sizes), None
        )
        total = [size.to(device) for size in local]
        for group, sizes in pieces.values():
            stacked = torch.stack([size.to(device) for size in sizes])
            part = stacked.amax() if infinite else stacked.sum()
            dist.all_reduce(part, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
            total.append(part)
        if not total:
            return torch.zeros(())
        whole = torch.stack(total)
        return whole.amax() if infinite else whole.sum() ** (1.0 / norm_type)
