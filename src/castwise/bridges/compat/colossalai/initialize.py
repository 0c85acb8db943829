"""``colossalai.launch``, which starts the processes' communication, and ``initialize``, which makes an engine."""

from __future__ import annotations

import argparse
import os
import pprint
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from castwise import Amp
from castwise.bridges.compat.colossalai.amp import prepare
from castwise.bridges.compat.colossalai.context import ConfigException, ParallelMode
from castwise.bridges.compat.colossalai.core import global_context as gpc
from castwise.bridges.compat.colossalai.engine import DataParallelGradientHandler, Engine
from castwise.bridges.compat.colossalai.engine.gradient_accumulation import accumulate_gradient
from castwise.bridges.compat.colossalai.engine.schedule import (
    InterleavedPipelineSchedule,
    NonPipelineSchedule,
    PipelineSchedule,
)
from castwise.bridges.compat.colossalai.logging import get_dist_logger
from castwise.bridges.compat.colossalai.plans import Recipe, fp32_recipe, recipe_of
from castwise.bridges.compat.colossalai.sharding import shard, zero_recipe
from castwise.bridges.compat.colossalai.utils import get_current_device, is_using_ddp
from castwise.bridges.compat.colossalai.utils.common import broadcast_from_first
from castwise.core.casting import default_device_type
from castwise.errors import StateError

__all__ = [
    "get_default_parser",
    "initialize",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
]

_Configuration = Mapping[str, Any] | str | os.PathLike[str]


def get_default_parser() -> argparse.ArgumentParser:
    """Return an argument parser for scripts that call :func:`launch`.

    Its arguments are those of :func:`launch`, such as ``--config``, ``--host`` and ``--rank``.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=str, help="path of the configuration, a Python file")
    parser.add_argument("--host", type=str, help="address of the first process")
    parser.add_argument("--port", type=int, help="port of the first process")
    parser.add_argument("--world_size", type=int, help="number of processes")
    parser.add_argument("--rank", type=int, help="rank of this process")
    parser.add_argument("--local_rank", type=int, help="rank of this process on its machine")
    parser.add_argument("--backend", type=str, default="nccl", help="backend of torch.distributed")
    return parser


def launch(
    config: _Configuration,
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str = "nccl",
    local_rank: int | None = None,
    seed: int = 1024,
    verbose: bool = True,
) -> None:
    """Start torch.distributed, read the configuration, create the process groups and seed the random generators.

    If torch.distributed is initialised already, it is not started again.

    Args:
        config: The configuration as a dict, or the path of a Python file.
        rank: The rank of this process.
        world_size: The number of processes.
        host: The address of the first process.
        port: The port of the first process.
        backend: The backend of torch.distributed. ``nccl`` is replaced by that of this process's device if there is no CUDA device.
        local_rank: The rank of this process on its machine, which is the index of its accelerator. The default is the
            rank modulo the number of accelerators.
        seed: The seed of Python, NumPy and torch, which is the same on all ranks.
        verbose: Whether to log a line at the end.
    """
    kind = default_device_type()
    if kind != "cpu":
        count = torch.accelerator.device_count()
        torch.accelerator.set_device_index(rank % count if local_rank is None else local_rank)
    said = ""
    if not dist.is_initialized():
        if backend == "nccl" and kind != "cuda":
            backend = dist.get_default_backend_for_device(kind)
            said = f", backend {backend} because there is no CUDA device (this device is {kind})"
        address = f"[{host}]" if ":" in host else host
        dist.init_process_group(
            backend, rank=rank, world_size=world_size, init_method=f"tcp://{address}:{port}"
        )
    gpc.destroy()
    gpc.load_config(config)
    gpc.init_parallel_groups()
    gpc.set_seed(seed)
    if verbose:
        get_dist_logger().info(
            f"launched: {dist.get_world_size()} processes, data parallel {gpc.data_parallel_size}, pipeline "
            f"{gpc.pipeline_parallel_size}, tensor {gpc.tensor_parallel_size}{said}",
            ranks=[0],
        )


def _launch_by(
    call: str, starter: str, config: _Configuration, names: Mapping[str, str], **given: Any
) -> None:
    """Call :func:`launch` with arguments that are read from environment variables.

    ``names`` maps arguments to variables. Every argument except the host is an integer.
    """
    try:
        for key, name in names.items():
            given[key] = os.environ[name] if key == "host" else int(os.environ[name])
    except KeyError as error:
        raise StateError(
            f"launch_from_{call}: the environment variable {error.args[0]} is not set; start the script with {starter}"
        ) from None
    launch(config, **given)


def launch_from_torch(
    config: _Configuration, backend: str = "nccl", seed: int = 1024, verbose: bool = True
) -> None:
    """Call :func:`launch` with the ranks, host and port from the environment variables that torchrun sets.

    The variables are RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    """
    names = {"rank": "RANK", "local_rank": "LOCAL_RANK", "world_size": "WORLD_SIZE"}
    names |= {"host": "MASTER_ADDR", "port": "MASTER_PORT"}
    starter = "torchrun --nproc-per-node N script.py"
    _launch_by("torch", starter, config, names, backend=backend, seed=seed, verbose=verbose)


def launch_from_slurm(
    config: _Configuration,
    host: str,
    port: int,
    backend: str = "nccl",
    seed: int = 1024,
    verbose: bool = True,
) -> None:
    """Call :func:`launch` with the rank and the number of processes from SLURM's environment variables.

    The variables are SLURM_PROCID and SLURM_NPROCS.
    """
    names = {"rank": "SLURM_PROCID", "world_size": "SLURM_NPROCS"}
    given = {"host": host, "port": port, "backend": backend, "seed": seed, "verbose": verbose}
    _launch_by("slurm", "srun", config, names, **given)


def launch_from_openmpi(
    config: _Configuration,
    host: str,
    port: int,
    backend: str = "nccl",
    seed: int = 1024,
    verbose: bool = True,
) -> None:
    """Call :func:`launch` with the ranks and the number of processes from Open MPI's environment variables.

    The variables are OMPI_COMM_WORLD_RANK and similar ones.
    """
    names = {"rank": "RANK", "local_rank": "LOCAL_RANK", "world_size": "SIZE"}
    names = {key: f"OMPI_COMM_WORLD_{name}" for key, name in names.items()}
    given = {"host": host, "port": port, "backend": backend, "seed": seed, "verbose": verbose}
    _launch_by("openmpi", "mpirun", config, names, **given)


def initialize(
    model: Any,
    optimizer: Any,
    criterion: Any = None,
    train_dataloader: Any = None,
    test_dataloader: Any = None,
    lr_scheduler: Any = None,
    ophooks: Any = None,
    verbose: bool = True,
) -> tuple[Engine, Any, Any, Any]:
    """Create an engine from a model, an optimizer and other parts of a training, as the configuration says.

    The configuration is the one that :func:`launch` has read. Its options ``fp16``, ``clip_grad_norm``,
    ``gradient_accumulation``, ``zero``, ``parallel``, ``NUM_MICRO_BATCHES``, ``torch_ddp``, ``cudnn_benchmark`` and
    ``cudnn_deterministic`` are used.

    Args:
        model: The model, on any device, or a function that creates the model. In a pipeline, it is the stage of this
            rank; see :func:`castwise.compat.colossalai.builder.build_pipeline_model`.
        optimizer: A torch optimizer, or a function that takes parameters and returns an optimizer.
        criterion: A callable that computes the loss from outputs and targets.
        train_dataloader: A data loader of pairs ``(inputs, targets)``.
        test_dataloader: A data loader of pairs ``(inputs, targets)`` for evaluation.
        lr_scheduler: A learning-rate scheduler of the optimizer, from torch or from this package.
        ophooks: Not supported. It must be None or empty.
        verbose: Whether to log the configuration.

    Returns:
        The tuple ``(engine, train_dataloader, test_dataloader, lr_scheduler)``.

    Raises:
        StateError: ``launch`` has not been called, or ``ophooks`` are given.
        PlanError: The configuration is invalid.
    """
    if ophooks:
        raise StateError(
            "initialize(ophooks=...): not supported; use torch's module hooks on the model instead"
        )
    if gpc.device_mesh is None:
        raise StateError("initialize: call colossalai.launch or launch_from_torch first")
    config, log = gpc.config, get_dist_logger()
    gpc.verbose = verbose
    if verbose:
        log.info(f"configuration:\n{pprint.pformat(dict(config))}", ranks=[0])
    torch.backends.cudnn.benchmark = bool(config.get("cudnn_benchmark", False))
    torch.backends.cudnn.deterministic = bool(config.get("cudnn_deterministic", False))
    if not isinstance(model, nn.Module):
        model = model()
    model.to(get_current_device())
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(model.parameters())

    zero, recipe = config.get("zero"), _recipe(config)
    clip = float(config.get("clip_grad_norm") or 0.0)
    amp = Amp(recipe.plan, device=get_current_device())
    if is_using_ddp():
        broadcast_from_first(model, gpc.get_group(ParallelMode.DATA))
    if zero is not None:
        shard(amp, model, optimizer, dict(zero))
    model, wrapped, criterion = prepare(recipe, amp, model, optimizer, criterion, clip)
    if verbose:
        log.info(f"plan: {amp.plan.summary()}", ranks=[0])

    handlers: list[Any] = []
    if is_using_ddp() and zero is None:
        if gpc.pipeline_parallel_size > 1 or any(hasattr(p, "device_mesh") for p in model.parameters()):
            handlers = [DataParallelGradientHandler(wrapped)]
        else:
            model = nn.parallel.DistributedDataParallel(
                model, process_group=gpc.get_group(ParallelMode.DATA), **config.get("torch_ddp", {})
            )
    size = config.get("gradient_accumulation", 1)
    outer: Any = wrapped
    if size != 1:
        outer, train_dataloader, handlers, lr_scheduler = accumulate_gradient(
            model, wrapped, train_dataloader, size, handlers, lr_scheduler
        )
    engine = Engine(model, outer, criterion, handlers, clip, verbose, _schedule(model, criterion, amp, size))
    return engine, train_dataloader, test_dataloader, lr_scheduler


def _recipe(config: Mapping[str, Any]) -> Recipe:
    fp16, zero = config.get("fp16"), config.get("zero")
    if fp16 is not None and not isinstance(fp16, Mapping):
        raise ConfigException(f"fp16={fp16!r} is not allowed. Allowed: dict(mode=AMP_TYPE.TORCH, ...).")
    if fp16 is None or fp16.get("mode") is None:
        return fp32_recipe() if zero is None else zero_recipe(zero)
    return recipe_of(fp16["mode"], {key: value for key, value in fp16.items() if key != "mode"})


def _schedule(
    model: nn.Module, criterion: Any, amp: Amp, divide_by: int
) -> NonPipelineSchedule | PipelineSchedule:
    if gpc.pipeline_parallel_size == 1:
        return NonPipelineSchedule()
    kind = InterleavedPipelineSchedule if isinstance(model, nn.ModuleList) else PipelineSchedule
    schedule = kind(gpc.config.get("NUM_MICRO_BATCHES", gpc.pipeline_parallel_size))
    schedule.attach(model, criterion, amp, divide_by)
    return schedule
