"""A small model, trained with the drop-in's engine for Colossal-AI on all layouts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from castwise.bridges.compat import colossalai
from castwise.bridges.compat.colossalai.amp import AMP_TYPE, convert_to_amp
from castwise.bridges.compat.colossalai.context import ParallelMode
from castwise.bridges.compat.colossalai.core import global_context as gpc
from tests.distributed.model import BLOCKS, LOSS, Options, Run, batch, build, cut_by_hand, parallelize, stage

SCALE = 4096.0  # 65536 overflows fp16 with parts of a batch, which have larger gradients
MODES: dict[str, dict[str, Any] | None] = {
    "none": None,
    "torch": {"mode": AMP_TYPE.TORCH, "init_scale": SCALE},
    "apex-O1": {"mode": AMP_TYPE.APEX, "opt_level": "O1", "max_loss_scale": SCALE},
    "apex-O2": {"mode": AMP_TYPE.APEX, "opt_level": "O2", "max_loss_scale": SCALE},
    "naive": {"mode": AMP_TYPE.NAIVE, "initial_scale": SCALE, "hysteresis": 1},
}
STEPS, NORM = 6, 1.0


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def config(mode: str, **more: Any) -> dict[str, Any]:
    fp16 = MODES[mode]
    return {
        **({} if fp16 is None else {"fp16": fp16}),
        "clip_grad_norm": NORM,
        "NUM_MICRO_BATCHES": 4,
        **more,
    }


def alone(mode: str) -> dict[str, Tensor]:
    """Train in one process without an engine and return the weights."""
    model = build()
    optimizer = optimizer_of(model)
    fp16 = MODES[mode]
    if fp16 is None:
        for step in range(STEPS):
            x, y = batch(step)
            LOSS(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), NORM)
            optimizer.step()
            optimizer.zero_grad()
        return dict(model.state_dict())
    options = {key: value for key, value in fp16.items() if key != "mode"}
    model, wrapped, criterion = convert_to_amp(model, optimizer, LOSS, fp16["mode"], options)
    for step in range(STEPS):
        x, y = batch(step)
        wrapped.backward(criterion(model(x), y))
        wrapped.clip_grad_norm(model, NORM)
        wrapped.step()
        wrapped.zero_grad()
    weights = {key: value.clone() for key, value in wrapped.amp.model_state_dict(model).items()}
    wrapped.amp.close()
    return weights


class Layout:
    """An engine on a layout: ``data``, ``hand``, ``tensor``, ``pipeline``, ``zero`` or several as ``data.hand``."""

    def __init__(self, layout: str, mode: str, **more: Any) -> None:
        self.parts = layout.split(".")
        tensor = 2 if {"hand", "tensor"} & set(self.parts) else 1
        pipeline = 2 if "pipeline" in self.parts else 1
        parallel = {"pipeline": pipeline, "tensor": {"size": tensor, "mode": "1d"}}
        zero = {"zero": {"level": 3}} if "zero" in self.parts else {}
        colossalai.launch(
            config(mode, parallel=parallel, **zero, **more), 0, 1, "localhost", 0, verbose=False
        )
        self.run = Run("fp32", Options())  # records the parameters sharded by hand
        model = build() if pipeline == 1 else stage(gpc.get_local_rank(ParallelMode.PIPELINE), 2)
        if "hand" in self.parts:
            cut_by_hand(model, self.run, gpc.get_group(ParallelMode.TENSOR))
            for name, parameter in model.named_parameters():
                parameter.is_tensor_parallel = name in self.run.shards
        if "tensor" in self.parts:
            parallelize(model, gpc.device_mesh["tensor"])
        self.model = model
        self.engine, *_ = colossalai.initialize(model, optimizer_of(model), LOSS, verbose=False)

    def mine(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a batch."""
        count, rank = gpc.get_world_size(ParallelMode.DATA), gpc.get_local_rank(ParallelMode.DATA)
        return tensor.chunk(count)[rank]

    def step(self, index: int, plant: bool = False) -> tuple[Any, Any]:
        """Train on one batch; return this rank's loss and the result of ``engine.step``."""
        x, y = (self.mine(part) for part in batch(index))
        self.engine.zero_grad()
        _, _, loss = self.engine.execute_schedule(iter([(x, y)]))
        if plant:
            self.plant()
        return loss, self.engine.step()

    def plant(self) -> None:
        """Set one gradient element of this rank to infinity."""
        params = [p for group in self.engine.optimizer.param_groups for p in group["params"]]
        grad = [p for p in params if p.grad is not None][-1].grad
        local = grad.to_local() if hasattr(grad, "to_local") else grad
        local.view(-1)[0] = float("inf")

    def weights(self) -> dict[str, Tensor]:
        """Return the whole model's fp32 weights, on every rank."""
        out = {}
        for name, value in self.engine.amp.model_state_dict(self.model).items():
            value = value.detach()
            if hasattr(value, "full_tensor"):
                value = value.full_tensor()
            elif name in self.run.shards:
                dim, group = self.run.shards[name]
                pieces = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
                dist.all_gather(pieces, value.contiguous(), group=group)
                value = torch.cat(pieces, dim)
            out[name] = value.clone()
        if "pipeline" in self.parts:
            everyone: list[Any] = [None, None]
            dist.all_gather_object(everyone, out, group=gpc.get_group(ParallelMode.PIPELINE))
            out = {key: value for part in everyone for key, value in part.items()}
        return out


def train(
    rank: int, size: int, layout: str, mode: str, plant: int | None = None, accumulate: int = 1
) -> tuple[dict[str, Tensor], list[Any], float]:
    """Train; return the weights, the result of each step and the final loss scale."""
    more = {} if accumulate == 1 else {"gradient_accumulation": accumulate}
    run = Layout(layout, mode, **more)
    try:
        run.engine.train()
        if accumulate == 1:
            returned = [run.step(index, plant == rank and index == 2)[1] for index in range(STEPS)]
        else:
            returned = [step for index in range(STEPS) for step in accumulated(run, index, accumulate)]
        return run.weights(), returned, run.engine.optimizer.amp.get_scale()
    finally:
        run.engine.optimizer.amp.close()


def accumulated(run: Layout, index: int, parts: int) -> list[Any]:
    """Run each part of a batch through the whole loop; return the results of the steps."""
    x, y = (run.mine(part) for part in batch(index))
    returned = []
    for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
        run.engine.zero_grad()
        run.engine.execute_schedule(iter([(a, b)]))
        returned.append(run.engine.step())
    return returned


def groups(rank: int, size: int, parallel: dict[str, Any]) -> dict[str, Any]:
    """Return the values of ``gpc`` on this rank."""
    colossalai.launch({"parallel": parallel, "NUM_EPOCHS": 3}, 0, 1, "localhost", 0, verbose=False)
    said: dict[str, Any] = {
        mode.name: (gpc.get_local_rank(mode), gpc.get_world_size(mode), gpc.is_initialized(mode))
        for mode in ParallelMode
    }
    said["first"], said["last"] = gpc.is_pipeline_first_stage(), gpc.is_pipeline_last_stage()
    said["epochs"] = gpc.config.NUM_EPOCHS
    said["next"] = gpc.get_next_global_rank(ParallelMode.GLOBAL)
    said["ranks"] = gpc.get_ranks_in_group(ParallelMode.GLOBAL)
    return said


def loader(rank: int, size: int, add_sampler: bool) -> list[list[int]]:
    """Return the samples that this rank gets from a loader in two epochs."""
    colossalai.launch({}, 0, 1, "localhost", 0, verbose=False)
    data = torch.utils.data.TensorDataset(torch.arange(20))
    loaded = colossalai.utils.get_dataloader(
        data, shuffle=add_sampler, add_sampler=add_sampler, batch_size=5, pin_memory=True
    )
    return [[int(value) for (part,) in loaded for value in part] for _ in range(2)]


def averaged(rank: int, size: int) -> tuple[list[float], bool, float]:
    """Average gradients that both ranks, one rank or no rank has; return the results."""
    from castwise.bridges.compat.colossalai.engine import DataParallelGradientHandler

    params = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
    optimizer = torch.optim.SGD(params, 1.0)
    params[0].grad = torch.full((3,), float(rank))
    if rank == 1:
        params[1].grad = torch.full((3,), 8.0)
    colossalai.launch({}, 0, 1, "localhost", 0, verbose=False)
    DataParallelGradientHandler(optimizer).handle_gradient()
    return params[0].grad.tolist(), params[2].grad is None, float(params[1].grad[0])


def trainer_in_a_pipeline(rank: int, size: int, mode: str, chunks: int) -> dict[str, Any]:
    """Train for two epochs with the trainer, with an evaluation after each; return metrics, layers and steps."""
    from castwise.bridges.compat.colossalai.trainer import Trainer, hooks

    parallel = {"pipeline": 2}
    colossalai.launch(config(mode, parallel=parallel), 0, 1, "localhost", 0, verbose=False)
    whole = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    torch.manual_seed(0)
    model = colossalai.builder.build_pipeline_model(whole, num_chunks=chunks)
    batches = [batch(index) for index in range(3)]
    engine, train_loader, test_loader, _ = colossalai.initialize(
        model, optimizer_of(model), LOSS, batches, batches, verbose=False
    )
    trainer = Trainer(engine)
    hook = hooks.LossHook()
    trainer.fit(train_loader, epochs=2, test_dataloader=test_loader, hooks=[hook])
    said = {
        name: {kind: metric.get_accumulated_value() for kind, metric in metrics.items()}
        for name, metrics in trainer.states["metrics"].items()
    }
    engine.amp.close()
    parts = [model] if chunks == 1 else list(model)
    names = [name for part in parts for name, _ in part.named_children()]
    return {"metrics": said, "names": names, "steps": trainer.cur_step}


assert BLOCKS % 2 == 0
