"""``colossalai.context.parallel_context``: the configuration, and the process groups of each kind of parallelism."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from castwise.bridges.compat.colossalai.context.config import Config, ConfigException
from castwise.bridges.compat.colossalai.context.parallel_mode import ParallelMode
from castwise.core.casting import default_device_type
from castwise.errors import StateError

__all__ = ["ParallelContext"]


class ParallelContext:
    """Holds the configuration, and this process's rank and group in each kind of parallelism.

    The only object of this class is ``colossalai.core.global_context``. Ranks are ordered as in Colossal-AI: tensor parallel
    ranks are adjacent, then data parallel ranks, then pipeline stages.

    Attributes:
        config: The configuration; empty before ``launch``.
        verbose: Whether ``initialize`` was called with ``verbose``.
        device_mesh: The ``DeviceMesh`` with the dimensions ``pipeline``, ``data`` and ``tensor``, for torch's
            ``parallelize_module`` and similar functions. None before ``launch``. Colossal-AI does not have this attribute.
    """

    def __init__(self) -> None:
        self.destroy()

    def destroy(self) -> None:
        """Reset the configuration and forget the groups. The process groups of torch.distributed are not destroyed."""
        self.config = Config()
        self.verbose = False
        self.device_mesh: Any = None
        self.data_parallel_size = 1
        self.pipeline_parallel_size = 1
        self.tensor_parallel_size = 1
        self._groups: dict[ParallelMode, Any] = {}

    def load_config(self, config: Mapping[str, Any] | str | os.PathLike[str]) -> None:
        """Read a configuration from a mapping or a Python file."""
        if isinstance(config, Mapping):
            self.config = Config(config)
        elif isinstance(config, (str, os.PathLike)):
            self.config = Config.from_file(config)
        else:
            raise ConfigException(
                f"launch(config={config!r}): a dict or the path of a Python file is needed; with torchrun, pass "
                "--config PATH to the script."
            )

    # --- groups ---------------------------------------------------------------------------------------------

    def init_parallel_groups(self) -> None:
        """Create the process groups that the option ``parallel`` of the configuration asks for.

        Raises:
            ConfigException: The sizes do not divide the number of processes, or the tensor parallel mode is not 1d.
        """
        parallel = self.config.get("parallel") or {}
        pipeline, _ = _size_of(parallel, "pipeline")
        tensor, mode = _size_of(parallel, "tensor")
        world = dist.get_world_size()
        if tensor > 1 and mode not in (None, "1d"):
            raise ConfigException(
                f"parallel = dict(tensor=dict(size={tensor}, mode={mode!r})): allowed modes: '1d'. Cut other layouts with "
                "torch's parallelize_module on your own mesh."
            )
        data, rest = divmod(world, pipeline * tensor)
        if rest or not data:
            raise ConfigException(
                f"parallel: pipeline={pipeline} times tensor={tensor} does not divide the {world} processes; start a "
                f"multiple of {pipeline * tensor}, or change the sizes."
            )
        from torch.distributed.device_mesh import init_device_mesh

        self.pipeline_parallel_size, self.data_parallel_size = pipeline, data
        self.tensor_parallel_size = tensor
        names = ("pipeline", "data", "tensor")
        mesh = init_device_mesh(default_device_type(), (pipeline, data, tensor), mesh_dim_names=names)
        self.device_mesh = mesh
        groups: dict[ParallelMode, Any] = {ParallelMode.GLOBAL: dist.group.WORLD}
        groups[ParallelMode.DATA] = mesh.get_group("data")
        if pipeline > 1:
            groups[ParallelMode.PIPELINE] = groups[ParallelMode.MODEL] = mesh.get_group("pipeline")
        if tensor > 1:
            groups[ParallelMode.TENSOR] = groups[ParallelMode.PARALLEL_1D] = mesh.get_group("tensor")
            groups[ParallelMode.MODEL] = groups[ParallelMode.TENSOR]
        if pipeline > 1 and tensor > 1:
            layout = torch.arange(world, device="cpu").view(pipeline, data, tensor)
            for index in range(data):
                ranks = layout[:, index].flatten().tolist()
                group = dist.new_group(ranks)
                if dist.get_rank() in ranks:
                    groups[ParallelMode.MODEL] = group
        self._groups = groups

    def is_initialized(self, mode: ParallelMode) -> bool:
        """Whether a kind of parallelism has a process group."""
        return mode in self._groups

    def get_group(self, mode: ParallelMode) -> Any:
        """Return the process group of a kind of parallelism.

        Raises:
            StateError: There is no such group.
        """
        if mode not in self._groups:
            raise StateError(
                f"gpc.get_group({mode}): there is no such group; call colossalai.launch first, with a configuration whose "
                f"`parallel` defines it"
            )
        return self._groups[mode]

    def get_global_rank(self) -> int:
        """Return the rank of this process among all processes."""
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    def get_local_rank(self, mode: ParallelMode) -> int:
        """Return this process's rank within the group of a kind of parallelism, or 0 if there is no such group."""
        return dist.get_rank(self._groups[mode]) if mode in self._groups else 0

    def get_world_size(self, mode: ParallelMode) -> int:
        """Return the size of the group of a kind of parallelism, or 1 if there is no such group."""
        return dist.get_world_size(self._groups[mode]) if mode in self._groups else 1

    def get_ranks_in_group(self, mode: ParallelMode) -> list[int]:
        """Return the global ranks of the group of a kind of parallelism, in the order of their local ranks."""
        return list(dist.get_process_group_ranks(self.get_group(mode)))

    def get_next_global_rank(self, mode: ParallelMode) -> int:
        """Return the global rank of the next process in a group. The last process is followed by the first."""
        return self._neighbour(mode, 1)

    def get_prev_global_rank(self, mode: ParallelMode) -> int:
        """Return the global rank of the previous process in a group. The first process is preceded by the last."""
        return self._neighbour(mode, -1)

    def _neighbour(self, mode: ParallelMode, step: int) -> int:
        ranks = self.get_ranks_in_group(mode)
        return ranks[(self.get_local_rank(mode) + step) % len(ranks)]

    def is_first_rank(self, mode: ParallelMode) -> bool:
        """Whether this process is the first of its group."""
        return self.get_local_rank(mode) == 0

    def is_last_rank(self, mode: ParallelMode) -> bool:
        """Whether this process is the last of its group."""
        return self.get_local_rank(mode) == self.get_world_size(mode) - 1

    def is_pipeline_first_stage(self, ignore_virtual: bool = False) -> bool:
        """Whether this process holds the pipeline's first stage."""
        return self.is_first_rank(ParallelMode.PIPELINE)

    def is_pipeline_last_stage(self, ignore_virtual: bool = False) -> bool:
        """Whether this process holds the pipeline's last stage."""
        return self.is_last_rank(ParallelMode.PIPELINE)

    def set_seed(self, seed: int) -> None:
        """Seed Python, NumPy and torch, equally on all ranks."""
        random.seed(seed)
        with contextlib.suppress(ImportError):
            import numpy as np

            np.random.seed(seed)
        torch.manual_seed(seed)

    def __iter__(self) -> Iterator[ParallelMode]:
        return iter(self._groups)


def _size_of(parallel: Mapping[str, Any], name: str) -> tuple[int, str | None]:
    value = parallel.get(name, 1)
    size, mode = (value.get("size", 1), value.get("mode")) if isinstance(value, Mapping) else (value, None)
    if value is None or isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigException(
            f"parallel = dict({name}={value!r}) is not allowed. Allowed: a whole number >= 1, or dict(size=...)."
        )
    return size, mode
