"""A small model for every parallel layout, and its training under a plan on each layout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import castwise

WIDTH, HIDDEN, BLOCKS, BATCH = 16, 32, 4, 16


class _Copy(torch.autograd.Function):
    """Enters a hand-written tensor-parallel part: identity in forward, gradients summed over ranks in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].float().contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.to(grads[0].dtype), None


class _Sum(torch.autograd.Function):
    """Leaves a hand-written tensor-parallel part: sum over ranks in forward, the same gradient for all ranks in
    backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.float()
        dist.all_reduce(total, group=group)
        return total.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Block(nn.Module):
    """A residual block; ``cut`` is the group over which its hidden units are split by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.cut: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if self.cut is not None:
            h = _Copy.apply(h, self.cut)
        h = self.down(torch.nn.functional.gelu(self.up(h)))
        return x + (h if self.cut is None else _Sum.apply(h, self.cut))


class Net(nn.Module):
    """A stem, blocks and a head; a pipeline stage has some of them under the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.stem: nn.Module | None = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(BLOCKS)})
        self.head: nn.Module | None = nn.Linear(WIDTH, 4)
        self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        if self.stem is not None:
            x = self.stem(x)
        for block in self.blocks.values():
            if self.checkpointed:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x if self.head is None else self.head(x)


def build() -> Net:
    """Return the model with the weights that every run starts from."""
    torch.manual_seed(0)
    return Net()


def stage(index: int, stages: int) -> Net:
    """Return the ``index``-th of ``stages`` equal stages."""
    net = build()
    each = BLOCKS // stages
    for i in range(BLOCKS):
        if i // each != index:
            del net.blocks[str(i)]
    if index > 0:
        net.stem = None
    if index < stages - 1:
        net.head = None
    return net


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the global batch of a step: ``[16, 8]`` and ``[16, 4]``."""
    generator = torch.Generator().manual_seed(step % 5)
    x = torch.randn(BATCH, 8, generator=generator)
    return x, torch.stack([x[:, :4].sum(1), x[:, 0] * x[:, 1], x[:, 2].abs(), x[:, 3:].mean(1)], 1)


LOSS = nn.functional.mse_loss


@dataclass
class Options:
    """Options of a run."""

    steps: int = 50
    fused: bool = False
    max_norm: float | None = 1.0
    microbatches: int = 4
    schedule: str = "1f1b"
    compile: bool = False
    checkpointed: bool = False
    accumulate: int = 1
    hook: str | None = None
    """Compression of DDP's gradients."""
    unscale_first: bool = False
    plant: int | None = None
    """Rank whose gradient gets an infinity in the third step."""
    plant_late: bool = False
    """Place the infinity after unscaling instead of before."""
    frozen: bool = False
    """Freeze the second half of the model, which is the whole second of two stages."""
    idle: bool = False
    """With gradients summed by hand: in every other step, rank 0 has the whole batch and rank 1 has none."""
    late: bool = False
    """Sum gradients by hand after unscaling instead of before."""
    pairs: bool = False
    """Train ranks 0 and 1 separately from ranks 2 and 3."""


@dataclass
class Trace:
    """The results of a run."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    scale: float = 1.0


def optimizer_of(params: Any, options: Options) -> torch.optim.Optimizer:
    """Return SGD with momentum, which is linear in the gradients and does not amplify rounding.

    Fused runs use AdamW, because torch's fused SGD does not support DTensors. DTensors get their own group, because
    AdamW does not mix them with plain tensors.
    """
    if options.fused:
        params = list(params)
        cut = [p for p in params if hasattr(p, "device_mesh")]
        whole = [p for p in params if not hasattr(p, "device_mesh")]
        groups = [{"params": some} for some in (cut, whole) if some]
        return torch.optim.AdamW(groups, 0.003, fused=True)
    return torch.optim.SGD(params, 0.05, momentum=0.9)


def plant(optimizer: torch.optim.Optimizer) -> None:
    """Put an infinity into one element of this rank's last gradient."""
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    grad = params[-1].grad
    local = grad.to_local() if hasattr(grad, "to_local") else grad
    local.view(-1)[0] = float("inf")


def infinite_gradient(model: nn.Module) -> Any:
    """Make this rank's gradient infinite before DDP reduces it; afterwards, ranks cannot differ."""
    return next(model.parameters()).register_hook(lambda grad: torch.full_like(grad, float("inf")))


class Run:
    """A prepared model on a layout."""

    def __init__(self, plan: Any, options: Options) -> None:
        self.options = options
        self.amp = castwise.Amp(plan, device="cpu", group=pair_of() if options.pairs else None)
        self.kind = ""
        self.number = 0
        self.model: Any = None
        self.modules: list[Any] = []
        self.call: Any = None
        self.optimizer: Any = None
        self.schedule: Any = None
        self.dp: Any = None
        self.shards: dict[str, tuple[int, Any]] = {}
        self.last = True
        self.pp: Any = None

    def mine(self, tensor: Tensor) -> Tensor:
        """Return this rank's slice of the global batch."""
        if self.dp is None:
            return tensor
        if self.uneven():
            return tensor if dist.get_rank(self.dp) == 0 else tensor[:0]
        return tensor.chunk(dist.get_world_size(self.dp))[dist.get_rank(self.dp)]

    def uneven(self) -> bool:
        """Return whether rank 0 has the whole batch of this step."""
        return self.options.idle and self.number % 2 == 1

    def sum_gradients(self) -> None:
        """Sum gradients over ranks, in place of DistributedDataParallel."""
        if self.options.late:
            self.amp.unscale_(self.optimizer)
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        for parameter in held if self.options.late else self.model.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
                dist.all_reduce(parameter.grad, group=self.dp)

    def average_weights(self) -> None:
        """Average the weights of ranks that trained separately."""
        state = self.amp.model_state_dict(self.model)
        for value in state.values():
            dist.all_reduce(value, group=self.dp)
            value /= dist.get_world_size(self.dp)
        self.model.load_state_dict(state)

    def forward_backward(self, x: Tensor, y: Tensor) -> float | None:
        """Run forward and backward on this rank's part of a global batch; return the mean loss over ranks on the last
        stage.
        """
        x, y = self.mine(x), self.mine(y)
        if self.schedule is not None:
            every: list[Tensor] = []
            for a, b in zip(x.chunk(self.options.accumulate), y.chunk(self.options.accumulate), strict=True):
                losses: list[Tensor] = []
                args = (a,) if self.pp[0] == 0 else ()
                self.schedule.step(
                    *args, target=b if self.last else None, losses=losses if self.last else None
                )
                every += losses
            loss = torch.stack(every).mean().detach() * self.options.accumulate if self.last else None
        else:
            parts = list(zip(x.chunk(self.options.accumulate), y.chunk(self.options.accumulate), strict=True))
            total = torch.zeros(())
            share = dist.get_world_size(self.dp) if self.kind == "manual" and not self.uneven() else 1
            for index, (a, b) in enumerate(parts if x.numel() else ()):
                inner = index < len(parts) - 1 and isinstance(self.call, nn.parallel.DistributedDataParallel)
                with self.call.no_sync() if inner else contextlib.nullcontext():
                    part = LOSS(self.call(a), b) / len(parts)
                    self.amp.backward(part / share)
                total = total + part.detach()
            loss = total
        if self.kind == "manual":
            self.sum_gradients()
        if loss is not None and self.dp is not None:
            loss = loss.clone()
            dist.all_reduce(loss, group=self.dp)
            loss /= 1 if self.uneven() else dist.get_world_size(self.dp)
        return None if loss is None else float(loss)

    def train(self, first: int = 0) -> Trace:
        """Train all steps, or those from ``first`` on."""
        trace, options = Trace(), self.options
        for step in range(first, options.steps):
            rank = dist.get_rank() if dist.is_initialized() else 0
            self.number = step
            planting = options.plant == rank and step == 2
            before = planting and isinstance(self.call, nn.parallel.DistributedDataParallel)
            hook = infinite_gradient(self.model) if before else None
            loss = self.forward_backward(*batch(step))
            if hook is not None:
                hook.remove()
            elif planting and not options.plant_late:
                plant(self.optimizer)
            if options.unscale_first:
                self.amp.unscale_(self.optimizer)
            if planting and options.plant_late and hook is None:
                plant(self.optimizer)
            result = self.amp.step(self.optimizer, max_norm=options.max_norm)
            self.optimizer.zero_grad(set_to_none=options.fused or step % 2 == 0)
            if self.kind == "local":
                self.average_weights()
            trace.losses.append(float("nan") if loss is None else loss)
            trace.norms.append(float("nan") if result.grad_norm is None else float(result.grad_norm))
            trace.skipped.append(result.skipped)
        trace.scale = self.amp.get_scale()
        trace.weights = self.weights()
        return trace

    def weights(self) -> dict[str, Tensor]:
        """Return the whole model's fp32 weights on every rank."""
        out = {}
        held = self.modules or [self.model]
        states = [self.amp.model_state_dict(module) for module in held]
        for name, value in [item for state in states for item in state.items()]:
            value = value.detach()
            if hasattr(value, "full_tensor"):
                value = value.full_tensor()
            if name in self.shards:
                dim, group = self.shards[name]
                pieces = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
                dist.all_gather(pieces, value.contiguous(), group=group)
                value = torch.cat(pieces, dim)
            out[name] = value.clone()
        if self.schedule is not None:
            everyone: list[Any] = [None] * dist.get_world_size(self.pp[1])
            dist.all_gather_object(everyone, out, group=self.pp[1])
            out = {key: value for part in everyone for key, value in part.items()}
        return out


def cut_by_hand(model: Net, run: Run, group: Any) -> None:
    """Give each rank of the group its part of every block's hidden units."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for name, block in model.blocks.items():
        block.cut = group
        for layer, key, dim in (("up", "weight", 0), ("up", "bias", 0), ("down", "weight", 1)):
            parameter = getattr(getattr(block, layer), key)
            parameter.data = parameter.data.chunk(size, dim)[rank].clone()
            run.shards[f"blocks.{name}.{layer}.{key}"] = (dim, group)


def declare(model: Net, run: Run, group: Any) -> None:
    """Mark the split parameters in the session."""
    for name, parameter in model.named_parameters():
        if name in run.shards:
            run.amp.mark_sharded(parameter, group, dim=run.shards[name][0])


def parallelize(model: Net, mesh: DeviceMesh) -> None:
    """Split every block's hidden units with DTensor."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {}
    for name in model.blocks:
        plan[f"blocks.{name}.up"], plan[f"blocks.{name}.down"] = ColwiseParallel(), RowwiseParallel()
    parallelize_module(model, mesh, plan)


_pairs: list[Any] = []


def pair_of() -> Any:
    """Return this rank's group: ranks 0 and 1, or 2 and 3."""
    if not _pairs:
        _pairs.extend(dist.new_group([at, at + 1]) for at in (0, 2))
    return _pairs[dist.get_rank() // 2]


def freeze(model: Net) -> None:
    """Freeze the part of the model that belongs to the second of two stages."""
    held = [block for index, block in model.blocks.items() if int(index) >= BLOCKS // 2]
    for part in [*held, *filter(None, [model.head])]:
        part.requires_grad_(False)


_meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] = {}


def mesh_of(**sizes: int) -> DeviceMesh:
    """Return one mesh per shape and process, because each mesh creates process groups."""
    key = tuple(sizes.items())
    if key not in _meshes:
        _meshes[key] = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return _meshes[key]


def make(layout: str, plan: Any, options: Options) -> Run:
    """Return a run on a layout: ``single``, ``ddp``, ``fsdp``, ``tp``, ``hand``, ``pp``, or several as ``ddp.hand``.

    ``manual`` and ``local`` are custom loops: ``manual`` sums gradients over ranks, ``local`` averages weights after
    each step.
    """
    run = Run(plan, options)
    if run.amp.plan.compile != "as_given" and hasattr(
        torch.compiler, "set_default_backend"
    ):  # torch 2.11 uses Inductor
        torch.compiler.set_default_backend("aot_eager")
    size = dist.get_world_size() if dist.is_initialized() else 1
    parts = layout.split(".")
    model = build()
    if layout == "single":
        mesh = None
    elif parts == ["dp", "tp"]:
        mesh = mesh_of(dp=2, one=1, tp=size // 2)
    elif "pp" in parts:
        each = dict.fromkeys(parts, 2)
        each = {"pp": each.pop("pp"), **each}
        if parts == ["pp"]:
            each = {"pp": size}
        mesh = mesh_of(**each)
    else:
        mesh = mesh_of(**{part: (size if len(parts) == 1 else 2) for part in parts})
    modules: list[Net] = [model]
    if "pp" in parts:
        assert mesh is not None
        group = mesh.get_group("pp")
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        stages = ranks * (2 if options.schedule == "interleaved" else 1)
        mine = list(range(rank, stages, ranks))
        modules = [stage(index, stages) for index in mine]
        run.pp, run.last = (rank, group), stages - 1 in mine
    for module in modules:
        module.checkpointed = options.checkpointed
        if options.frozen:
            freeze(module)
        if "hand" in parts:
            cut_by_hand(module, run, mesh.get_group("hand"))
        if "tp" in parts:
            parallelize(module, mesh["tp"])
        if "fsdp" in parts:
            run.amp.fully_shard(module, blocks=module.blocks.values(), part="pp" in parts, mesh=mesh["fsdp"])
        if parts == ["dp", "tp"]:
            run.amp.fully_shard(module, blocks=module.blocks.values(), mesh=mesh["dp", "one"])
    run.modules = list(modules)
    run.model = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    run.optimizer = optimizer_of(run.model.parameters(), options)
    for module in modules:
        run.amp.prepare(module, run.optimizer, part="pp" in parts)
        if "hand" in parts:
            declare(module, run, mesh.get_group("hand"))
    calls: list[Any] = list(modules)
    if options.compile and "pp" in parts:  # DDP goes around the compiled stage, not inside
        calls = [torch.compile(call, backend="aot_eager") for call in calls]
    if "ddp" in parts:
        over = pair_of() if options.pairs else mesh.get_group("ddp")
        calls = [nn.parallel.DistributedDataParallel(m, process_group=over) for m in calls]
        if options.hook is not None:
            hook = getattr(castwise.parallel, f"compress_to_{options.hook}")
            for call in calls:
                call.register_comm_hook(mesh.get_group("ddp"), hook)
    if options.compile and "pp" not in parts:
        calls = [torch.compile(call, backend="aot_eager") for call in calls]
    run.call = calls[0]
    run.kind = layout
    for name in ("ddp", "fsdp", "dp", "manual", "local"):
        if name in parts:
            run.dp = pair_of() if options.pairs else mesh.get_group(name)
    if "pp" in parts:
        run.schedule = run.amp.pipeline(schedule_of(calls, mine, stages, group, options))
    return run


def schedule_of(calls: list[Any], mine: list[int], stages: int, group: Any, options: Options) -> Any:
    """Return a schedule of this rank's stages."""
    from torch.distributed.pipelining import (
        PipelineStage,
        Schedule1F1B,
        ScheduleGPipe,
        ScheduleInterleaved1F1B,
    )

    held = [
        PipelineStage(call, index, stages, torch.device("cpu"), group=group)
        for call, index in zip(calls, mine, strict=True)
    ]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return LOSS(output, target) / options.accumulate

    if options.schedule == "interleaved":
        return ScheduleInterleaved1F1B(held, options.microbatches, loss_fn=loss)
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[options.schedule]
    return kind(held[0], options.microbatches, loss_fn=loss)


def train(rank: int, size: int, layout: str, plan: Any, options: Options) -> Trace:
    """Train, as a case for a :class:`~tests.distributed.world.World`."""
    run = make(layout, plan, options)
    try:
        return run.train()
    finally:
        run.amp.close()


def alone(plan: Any, options: Options) -> Trace:
    """Train the same in one process."""
    run = make("single", plan, options)
    try:
        return run.train()
    finally:
        run.amp.close()


def every(values: list[Trace], of: Callable[[Trace], Any]) -> Iterator[Any]:
    """Return one attribute of every rank's trace."""
    return (of(value) for value in values)
