"""Implements pipeline parallelism: the model stages that a process trains, and the schedule that runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from castwise.commands.jobs.faults import calls
from castwise.commands.jobs.layout import check_splits
from castwise.commands.jobs.layouts import blocks_of, full_weights, shard
from castwise.commands.jobs.processes import TrainingRanks
from castwise.core import devices
from castwise.core.casting.trees import map_tensors
from castwise.core.model.arrival import widen_for
from castwise.core.ranks import Ranks
from castwise.core.session import Amp
from castwise.errors import WorkloadError
from castwise.lab.workloads.workload import Workload, check_loss, make_optimizer

VIRTUAL_STAGES = 2
"""The number of stages per process under the interleaved schedule."""


class Stages:
    """Holds the pipeline stages that this process trains, prepared for a plan.

    The stages are cut out of a whole model that has the same weights on all ranks. A step runs the microbatches in the order
    of one of :data:`castwise.commands.jobs.layout.SCHEDULES`.
    """

    def __init__(
        self,
        workload: Workload,
        amp: Amp,
        model: nn.Module,
        ranks: TrainingRanks,
        microbatches: int,
        schedule: str,
    ) -> None:
        assert workload.pipeline is not None
        self._workload, self._pipeline = workload, workload.pipeline
        self._ranks = ranks
        self._microbatches = microbatches
        size, mine = ranks.layout.pp, ranks.place.pp
        total = size * (VIRTUAL_STAGES if schedule == "interleaved" else 1)
        every = split(workload, model, total)
        numbers = range(mine, total, size)
        shared = _shared(every)
        for names in shared:
            if len({number % size for number in names}) < len(names):
                raise WorkloadError(
                    f"workload {workload.name!r}: the stages {', '.join(map(str, names))} share {next(iter(names.values()))}, "
                    "and one process has several of these stages; use --schedule 1f1b or gpipe"
                )
        self.amp = amp
        self.modules = [every[number] for number in numbers]
        self.whole: nn.Module | None = None
        blocks = blocks_of(workload, model) if ranks.layout.shards else []
        for module in self.modules:
            if ranks.layout.shards:
                shard(module, blocks, amp, ranks)
        optimizer = make_optimizer(workload, (p for module in self.modules for p in module.parameters()))
        self.optimizers: list[Optimizer] = [optimizer]
        for module in self.modules:
            amp.prepare(module, optimizer, part=True, widen=widen_for(amp.plan, module))
            module.register_forward_hook(_contiguous)
        groups = _groups(shared, ranks)
        self._ties = [
            (module.get_parameter(name), group)
            for number, module in zip(numbers, self.modules, strict=True)
            for name, group in groups.get(number, ())
        ]
        self._dry_run_due = any(next(stage.buffers(), None) is not None for stage in every)
        group = ranks.of("pp").get_group()
        parts = [
            PipelineStage(module, number, total, ranks.device, group=group)
            for module, number in zip(self.modules, numbers, strict=True)
        ]
        made: Any
        if schedule == "interleaved":
            made = ScheduleInterleaved1F1B(list(parts), microbatches, loss_fn=self._loss)
        else:
            kind = Schedule1F1B if schedule == "1f1b" else ScheduleGPipe
            made = kind(parts[0], microbatches, loss_fn=self._loss)
        self._schedule = amp.pipeline(made)

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        with calls(self._workload, "pipeline.loss(output, target)"):
            loss = self._pipeline.loss(output, target)
        return check_loss(loss, self._workload)

    def backward(self, batch: Any) -> Tensor | None:
        """Compute the gradients of a batch, as :class:`castwise.commands.jobs.layouts.Parts` describes."""
        with calls(self._workload, "pipeline.inputs(batch)"):
            inputs = tuple(self._pipeline.inputs(batch))
        with calls(self._workload, "pipeline.target(batch)"):
            target = self._pipeline.target(batch)
        check_splits((*inputs, target), self._microbatches, self._ranks.layout)
        if self._dry_run_due:
            self._dry_run_due = False
            self._dry_run(inputs, target)
        losses = self._run(inputs, target)
        for parameter, group in self._ties:
            _add_up_gradient(parameter, group)
        place = self._ranks.place
        knows = place.pp == self._ranks.layout.pp - 1 and place.tp == 0
        return torch.stack([loss.detach() for loss in losses]).mean() if knows else None

    def _run(self, inputs: tuple[Any, ...], target: Tensor) -> list[Tensor]:
        losses: list[Tensor] = []
        pp = self._ranks.place.pp
        first, last = pp == 0, pp == self._ranks.layout.pp - 1
        with calls(self._workload, "a step of its pipeline"):
            self._schedule.step(
                *(inputs if first else ()),
                target=target if last else None, losses=losses if last else None, return_outputs=False,
            )  # fmt: skip
        return losses

    def _dry_run(self, inputs: tuple[Any, ...], target: Tensor) -> None:
        """Run a step forward and backward, then restore buffers and clear gradients.

        torch's first pipeline step infers shapes by running the stages on uninitialised memory. Such values must not stay in
        the running statistics of BatchNorm.
        """
        before = [{name: buffer.clone() for name, buffer in m.named_buffers()} for m in self.modules]
        with devices.same_random_numbers([self._ranks.device.type]):
            self._run(inputs, target)
        for module, saved in zip(self.modules, before, strict=True):
            for name, buffer in module.named_buffers():
                buffer.copy_(saved[name])
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def weights(self) -> dict[str, Any] | None:
        """Return the whole model's weights, as :class:`castwise.commands.jobs.layouts.Parts` describes."""
        place = self._ranks.place
        gathers = place.dp == place.fsdp == place.tp == 0
        mine: dict[str, Any] = {}
        for module in self.modules:
            mine |= full_weights(self.amp, module, gathers)
        if not gathers:
            return None
        parts = Ranks(self._ranks.of("pp").get_group()).to_first(mine)
        return {key: value for part in parts for key, value in part.items()} if parts else None


def _contiguous(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    """Make output tensors contiguous, as a forward hook. Tensors sent between stages must be contiguous."""
    return map_tensors(Tensor.contiguous, output)


def split(workload: Workload, model: nn.Module, stages: int) -> list[nn.Module]:
    """Split a model into stages by the workload's ``pipeline.split``, and check the stages.

    Together, the stages must have the keys of the model's state dict, and contain the model's own parameters, not copies.

    Raises:
        WorkloadError: The number, the keys or the parameters of the stages are wrong.
    """
    assert workload.pipeline is not None
    with calls(workload, "pipeline.split(model, stages)"):
        parts = list(workload.pipeline.split(model, stages))
    call = f"workload {workload.name!r}: pipeline.split(model, {stages})"
    if len(parts) != stages or not all(isinstance(part, nn.Module) for part in parts):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise WorkloadError(f"{call} returned [{kinds}]; it must return {stages} modules")
    whole = model.state_dict(keep_vars=True)
    found: dict[str, Any] = {}
    for number, part in enumerate(parts):
        for key, value in part.state_dict(keep_vars=True).items():
            if key not in whole or (value is not whole[key] and isinstance(value, nn.Parameter)):
                raise WorkloadError(
                    f"{call}: stage {number} has {key!r}, which the model does not have under this name; build stages from the "
                    "model's own submodules, under the same names"
                )
            found[key] = value
    missing = [key for key in whole if key not in found]
    if missing:
        raise WorkloadError(
            f"{call}: no stage has {', '.join(missing[:3])}{' and more' if len(missing) > 3 else ''}; each parameter and buffer must "
            "be in a stage"
        )
    return parts


def _shared(stages: Sequence[nn.Module]) -> list[dict[int, str]]:
    """Return a dict for each parameter that several stages share, from stage numbers to the parameter's name in the stage."""
    found: dict[nn.Parameter, dict[int, str]] = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            if parameter.requires_grad:
                found.setdefault(parameter, {})[number] = name
    return [names for names in found.values() if len(names) > 1]


def _groups(shared: Sequence[dict[int, str]], ranks: TrainingRanks) -> dict[int, list[tuple[str, Any]]]:
    """Create the process groups that sum the gradients of shared parameters.

    Every process creates every group in the same order, including groups to which the process does not belong.

    Returns:
        For each stage, the names of its shared parameters, each with its process group.
    """
    assert ranks.mesh is not None
    size = ranks.layout.pp
    columns = ranks.mesh.mesh.reshape(size, -1)
    made: dict[tuple[int, ...], Any] = {}
    out: dict[int, list[tuple[str, Any]]] = {}
    for names in shared:
        holders = tuple(sorted({number % size for number in names}))
        if holders not in made:
            made[holders] = None
            for column in columns.T.tolist():
                members = [column[holder] for holder in holders]
                group = dist.new_group(members)
                if ranks.rank in members:
                    made[holders] = group
        for number, name in names.items():
            out.setdefault(number, []).append((name, made[holders]))
    return out


def _add_up_gradient(parameter: nn.Parameter, group: Any) -> None:
    """Sum the gradient of a shared parameter, in place, over all stages that have the parameter."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    grad = parameter.grad
    dist.all_reduce(grad.to_local() if isinstance(grad, DTensor) else grad, group=group)
