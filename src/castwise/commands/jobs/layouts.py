"""The part of a model that a process trains under a parallel layout, except for pipelines.

The part is the whole model, an FSDP2 shard of it, or the tensor-parallel pieces of its layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from castwise.commands.jobs.faults import calls
from castwise.commands.jobs.layout import Layout
from castwise.commands.jobs.processes import TrainingRanks
from castwise.core.model.arrival import widen_for
from castwise.core.plans.plan import Plan
from castwise.core.ranks import ALONE
from castwise.core.session import Amp
from castwise.errors import WorkloadError
from castwise.lab.timing.runners import build_model, uncompiled
from castwise.lab.workloads.workload import Workload, check_loss, check_no_backward, make_optimizer


class Parts(Protocol):
    """The part of a model that this process trains, prepared for a plan.

    Attributes:
        amp: The castwise session that prepared the part.
        modules: The modules that this process holds.
        optimizers: The optimizers of these modules.
        whole: The whole model if this process can run it without the other processes; else None.
    """

    amp: Amp
    modules: list[nn.Module]
    optimizers: list[Optimizer]
    whole: nn.Module | None

    def backward(self, batch: Any) -> Tensor | None:
        """Compute the gradients of a batch. On each data-parallel rank, this is the rank's slice of the whole batch.

        Returns:
            The detached loss of the slice, or None on a process that does not compute the loss.
        """

    def weights(self) -> dict[str, Any] | None:
        """Return the whole model's state dict in fp32 on rank 0, and None on other ranks. All ranks must make this call."""


def check_workload(workload: Workload, layout: Layout) -> None:
    """Raise if a workload does not define how a layout divides its model.

    Raises:
        WorkloadError: The field ``shards`` or ``pipeline`` of the workload is missing. The message says what to write.
    """
    if layout.tp > 1 and workload.shards is None:
        raise WorkloadError(
            f"workload {workload.name!r}: layout {layout} splits layers into {layout.tp} pieces, but the workload's field "
            "'shards' is not set; give Workload(..., shards=lambda model: {'0': ColwiseParallel(), '2': RowwiseParallel()}) with the "
            "styles of torch.distributed.tensor.parallel by module path, or use dp, fsdp or pp"
        )
    if layout.pp > 1 and workload.pipeline is None:
        raise WorkloadError(
            f"workload {workload.name!r}: layout {layout} splits the model into stages, but the workload's field 'pipeline' is "
            "not set; give Workload(..., pipeline=Pipeline(split=lambda model, stages: [...], inputs=lambda batch: (batch[0],), "
            "target=lambda batch: batch[1], loss=torch.nn.functional.mse_loss)) of castwise.lab.workloads.workload, or use dp, fsdp or tp"
        )


def blocks_of(workload: Workload, model: nn.Module) -> list[nn.Module]:
    """Return the submodules of an unsharded model that FSDP2 gathers separately."""
    if workload.blocks is None:
        return list(_members(model))
    with calls(workload, "blocks(model)"):
        return list(workload.blocks(model))


def _members(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, nn.Sequential) or (
            isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList)
        ):
            if next(child.parameters(), None) is not None:
                yield child
        else:
            yield from _members(child)


def shard(module: nn.Module, blocks: Sequence[nn.Module], amp: Amp, ranks: TrainingRanks) -> None:
    """Shard a model or a pipeline stage by FSDP2, in place. The ``blocks`` in it are gathered separately."""
    mesh = ranks.of("dp", "fsdp") if "dp" in ranks.layout.mesh_dims() else ranks.of("fsdp")
    inside = {part for part in module.modules() if part is not module}
    amp.fully_shard(module, blocks=[block for block in blocks if block in inside], part=True, mesh=mesh)


def full_weights(amp: Amp, module: nn.Module, keep: bool) -> dict[str, Any]:
    """Return the unsharded fp32 state dict of a model or a pipeline stage, on the CPU. Tied weights share a tensor.

    All ranks that share the model or stage must make this call. Ranks with ``keep=False`` get an empty dict.
    """
    from torch.distributed.tensor import DTensor

    done: dict[int, Any] = {}
    out: dict[str, Any] = {}
    for key, value in amp.model_state_dict(module).items():
        if id(value) not in done:
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            done[id(value)] = whole.cpu() if keep and isinstance(whole, Tensor) else whole if keep else None
        if keep:
            out[key] = done[id(value)]
    return out


class Whole:
    """A model that each process runs from its inputs to its loss, without pipeline stages.

    The model is trained on one process, replicated, sharded, or split into tensor-parallel pieces. This class implements
    :class:`Parts`.
    """

    def __init__(self, workload: Workload, amp: Amp, model: nn.Module, ranks: TrainingRanks) -> None:
        self.amp = amp
        self._workload = workload
        self._ranks = ranks
        if ranks.layout.shards:
            shard(model, blocks_of(workload, model), amp, ranks)
        optimizer = make_optimizer(workload, model.parameters())
        amp.prepare(model, optimizer, widen=widen_for(amp.plan, model))
        self.modules = [model]
        self.optimizers = [optimizer]
        self.whole: nn.Module | None = None if ranks.layout.tp > 1 or ranks.layout.shards else model
        self._call = model
        self._checked = False
        if ranks.layout.dp > 1 and not ranks.layout.shards:
            ids = None if ranks.device.type == "cpu" else [ranks.device.index]
            self._call = nn.parallel.DistributedDataParallel(
                model, device_ids=ids, process_group=ranks.of("dp").get_group()
            )

    def backward(self, batch: Any) -> Tensor | None:
        """Compute the gradients of a batch, as :class:`Parts` describes."""
        with calls(self._workload, "loss(model, batch)"):
            loss = self._workload.loss(self._call, batch)
        if not self._checked:
            check_no_backward(self._call, f"workload {self._workload.name!r}")
            self._checked = True
        loss = check_loss(loss, self._workload)
        self.amp.backward(loss)
        return loss.detach() if self._ranks.place.tp == 0 else None

    def weights(self) -> dict[str, Any] | None:
        """Return the whole model's weights, as :class:`Parts` describes."""
        leads = self._ranks.leads
        if self.whole is None:
            full = full_weights(self.amp, self.modules[0], leads)
        else:
            full = self.amp.model_state_dict(self.whole)
        return full if leads else None


def build_whole(workload: Workload, ranks: TrainingRanks, seed: int) -> nn.Module:
    """Build a workload's whole model with the same weights on all ranks. A tensor-parallel layout then splits its layers."""
    with calls(workload, "model()"):
        model = build_model(workload, ranks.device, seed)
    if ranks.layout.tp > 1:
        from torch.distributed.tensor.parallel import parallelize_module

        assert workload.shards is not None
        with calls(workload, "shards(model)"):
            parallelize_module(model, ranks.of("tp"), dict(workload.shards(model)))
    return model


def evaluate_whole(
    workload: Workload, plan: Plan, device: torch.device, weights: dict[str, Any], seed: int
) -> dict[str, float]:
    """Return the metrics of ``workload.evaluate`` for a new copy of the model, with given weights, under a plan."""
    assert workload.evaluate is not None
    with Amp(plan, device=device, group=ALONE) as amp:
        model = build_model(workload, device, seed)
        amp.prepare(model, widen=widen_for(plan, model))
        model.load_state_dict(weights)
        return evaluate(workload, model)


def evaluate(workload: Workload, model: nn.Module) -> dict[str, float]:
    """Return the metrics of ``workload.evaluate`` for a prepared model, as numbers by name."""
    assert workload.evaluate is not None
    model.eval()
    with torch.no_grad(), uncompiled(), calls(workload, "evaluate(model)"):
        metrics = {key: float(value) for key, value in workload.evaluate(model).items()}
    model.train()
    return metrics
