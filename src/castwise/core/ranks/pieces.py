"""Find out which parameters are sharded, and how many different pieces of each the ranks hold.

A DTensor carries this information. Two other cases must be declared: a weight that the user's code has split over ranks
(:meth:`Pieces.mark`), and a module that is one stage of a pipeline, whose parameters only the ranks of that stage hold
(:meth:`Pieces.mark_stage`). Every rank is taken to hold any other parameter whole.
"""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from castwise.core import masters
from castwise.core.ranks.group import running
from castwise.errors import StateError


def summed(tensor: Any) -> Any:
    """Return a DTensor with its partial sums reduced over ranks. All ranks of its mesh must call this.

    Any other tensor is returned unchanged.
    """
    if not is_dtensor(tensor) or not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    from torch.distributed.tensor import Replicate

    return tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, found out without importing DTensor."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


class Pieces:
    """Knows which parameters of a model are sharded: DTensors, and parameters that were declared as sharded."""

    def __init__(self) -> None:
        self._cuts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """The group whose ranks hold the pieces of each declared parameter, and the dimension of the split if known."""
        self._stages: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._meshes: dict[int, Any] = {}

    def mark(self, parameter: Tensor, group: Any, dim: int | None = None) -> None:
        """Declare that a parameter is only this rank's piece of a weight that is split over ranks.

        If FSDP2 has sharded the piece further over other ranks, declare the DTensor that it made.

        Args:
            parameter: The model's own parameter.
            group: The ranks that hold the pieces; None for all.
            dim: The dimension along which the weight was split, in rank order. Only checkpoints need it.

        Raises:
            StateError: torch.distributed is not initialised, or the parameter is a DTensor over these same ranks, which
                already describes its sharding.
        """
        if not running():
            raise StateError(
                "mark_sharded: torch.distributed is not initialised; call init_process_group first"
            )
        group = group if group is not None else dist.group.WORLD
        if is_dtensor(parameter):
            mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
            ranks = dist.get_process_group_ranks(group)
            if any(dist.get_process_group_ranks(mesh.get_group(at)) == ranks for at in range(mesh.ndim)):
                raise StateError(
                    "mark_sharded: this parameter is a DTensor over the same ranks, which already records its sharding; leave "
                    "the "
                    "call out"
                )
        self._cuts[parameter] = group, dim

    def mark_stage(self, module: nn.Module, group: Any) -> None:
        """Declare that a module is one stage of a pipeline whose stages are spread over the ranks of ``group``."""
        for parameter in module.parameters():
            self._stages[parameter] = group

    def group_of(self, parameter: Tensor) -> Any:
        """Return the group whose ranks hold the pieces of a declared parameter, or None if it was not declared."""
        return self._cuts.get(parameter, (None, None))[0]

    def is_part(self, parameter: Tensor) -> bool:
        """Whether a parameter was declared as sharded or as part of a pipeline stage.

        Other ranks then hold different values in its place.
        """
        parameter = masters.model_param_of(parameter)
        return self.group_of(parameter) is not None or parameter in self._stages

    def piece(self, parameter: Tensor) -> tuple[int, int] | None:
        """Return the index of this rank's piece and the number of pieces, if :meth:`as_whole` cannot make a DTensor of it.

        Return None for all other parameters.
        """
        group, dim = self._cuts.get(parameter, (None, None))
        if group is None or (dim is not None and not is_dtensor(parameter)):
            return None
        return dist.get_rank(group), dist.get_world_size(group)

    def as_whole(self, parameter: Tensor, values: Tensor) -> Tensor:
        """Return this rank's values of a sharded parameter as a DTensor that represents the whole, in the same memory.

        The pieces on all ranks are assumed to have equal size.

        Args:
            parameter: The model's parameter, or its fp32 master.
            values: A tensor of the parameter's shape: the parameter, its gradient, or its optimizer state.

        Returns:
            The DTensor, if the parameter was declared with a dimension and is not a DTensor itself. Otherwise
            ``values``.
        """
        parameter = masters.model_param_of(parameter)
        group, dim = self._cuts.get(parameter, (None, None))
        if dim is None or values.shape != parameter.shape or is_dtensor(parameter):
            return values
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        if id(group) not in self._meshes:
            self._meshes[id(group)] = DeviceMesh.from_group(group, parameter.device.type)
        return DTensor.from_local(values.detach(), self._meshes[id(group)], [Shard(dim)], run_check=False)

    def count(self, parameter: Tensor) -> int:
        """Return how many different values the ranks hold in the place of a parameter: pieces, or other stages' parameters.

        In a pipeline of 4 stages whose weights are split in 2 by tensor parallelism, the result is 8. For a parameter
        that every rank holds whole, it is 1.
        """
        parameter = masters.model_param_of(parameter)
        groups = [self.group_of(parameter), self._stages.get(parameter)]
        sizes = [dist.get_world_size(group) for group in groups if group is not None]
        if is_dtensor(parameter):
            cut: Any = parameter
            by_dim = zip(cut.device_mesh.shape, cut.placements, strict=True)
            sizes += [size for size, placement in by_dim if not placement.is_replicate()]
        return math.prod(sizes)
