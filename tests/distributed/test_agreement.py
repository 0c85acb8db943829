"""What ranks agree on, and when they send nothing."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import castwise
from castwise import LossScale, Plan
from castwise.core.ranks import ALONE, Agreement, Ranks
from castwise.core.session import storage
from castwise.errors import CheckpointError, PatternError, PlanError, RankError, StateError
from castwise.lab.timing.runners import InferenceRun, TrainingRun
from tests.distributed import model
from tests.distributed.model import LOSS, Options, build, mesh_of
from tests.distributed.world import World
from tests.soak import each_value


class Counted:
    """Counts collectives by their names in torch.distributed."""

    def __enter__(self) -> dict[str, int]:
        self.counts: dict[str, int] = {}
        self.former = {name: getattr(dist, name) for name in ("all_reduce", "broadcast", "all_gather_object")}
        for name, function in self.former.items():
            setattr(dist, name, self._counting(name, function))
        return self.counts

    def _counting(self, name: str, function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.counts[name] = self.counts.get(name, 0) + 1
            return function(*args, **kwargs)

        return counted

    def __exit__(self, *_: object) -> None:
        for name, function in self.former.items():
            setattr(dist, name, function)


# --- messages --------------------------------------------------------------------------------------------------


def messages(rank: int, size: int, layout: str, max_norm: float | None) -> dict[str, int]:
    run = model.make(layout, "fp16-mixed", Options())
    for step in range(3):
        run.amp.backward(LOSS(run.call(run.mine(model.batch(step)[0])), run.mine(model.batch(step)[1])))
        with Counted() as counts:
            run.amp.step(run.optimizer, max_norm=max_norm)
        run.optimizer.zero_grad()
    run.amp.close()
    return counts


@each_value()
@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize(("layout", "want"), [("ddp", 0), ("fsdp", 1), ("tp", 1)])
def test_a_step_sends_one_message_where_ranks_can_differ(
    two: World, layout: str, want: int, max_norm: float | None
) -> None:
    """The overflow flag and the norm travel in one message; under DDP nothing is sent."""
    for sent in two.run(messages, layout, max_norm):
        assert sum(sent.values()) == want


def undeclared(rank: int, size: int) -> tuple[bool, ...]:
    """Step an unwrapped model with a NaN on rank 1.

    By default all ranks decide together; with a group of one rank, or ALONE, each decides alone.
    """
    skipped = []
    groups = [dist.new_group([r]) for r in range(size)]
    for group in (None, groups[rank], ALONE):
        net = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        plan = Plan(compute="fp16", loss_scale=LossScale(init=64.0))
        amp = castwise.Amp(plan, device="cpu", group=group)
        amp.prepare(net, optimizer)
        amp.backward(net(torch.ones(2, 4)).sum())
        if rank == 1:
            net.weight.grad[0, 0] = float("nan")
        skipped.append(amp.step(optimizer).skipped)
        amp.close()
    return tuple(skipped)


def test_all_ranks_by_default_and_those_of_a_group(two: World) -> None:
    assert two.run(undeclared) == [(True, False, False), (True, True, True)]


def measured(rank: int, size: int) -> dict[str, int]:
    """Train, infer and compare gradients on rank 1 only, with sessions created by castwise."""
    with Counted() as counts:
        if rank == 1:
            net, data = nn.Linear(4, 4), [torch.ones(2, 4), torch.zeros(2, 4)]
            workload = castwise.Workload(
                "linear",
                lambda: copy.deepcopy(net),
                lambda params: torch.optim.SGD(params, 0.1),
                lambda seed: itertools.cycle(data),
                lambda model, batch: model(batch).square().mean(),
            )
            for run in (
                TrainingRun(workload, Plan.preset("fp16-master"), torch.device("cpu")),
                InferenceRun(workload, Plan.preset("bf16-true"), torch.device("cpu")),
            ):
                run.before(1)
                run.run(1)
                run.after()
                run.close()
            castwise.parity(net, workload.loss, data * 4, Plan.preset("bf16-master"))
    return counts


def test_measuring_on_one_rank_asks_no_other(two: World) -> None:
    """Ranks may measure different things, or fail at different points."""
    assert two.run(measured) == [{}, {}]


# --- all or none -----------------------------------------------------------------------------------------------


def all_or_none(rank: int, size: int) -> None:
    ranks, checked, alone = Ranks(), Ranks(error=CheckpointError), Ranks(ALONE)

    def fail(*on: int) -> int:
        if rank in on:
            raise ValueError("broken\nhere" if rank < 3 else "otherwise")
        return rank

    assert ranks.every(fail) == [0, 1, 2, 3]
    assert ranks.each(fail) == rank
    assert ranks.first(lambda: rank) == 0
    assert ranks.to_first(rank) == ([0, 1, 2, 3] if rank == 0 else [])
    for run in (ranks.every, ranks.each):
        with pytest.raises(RankError) as some:
            run(lambda: fail(1, 2, 3))
        place = f"(test_agreement.py, line {all_or_none.__code__.co_firstlineno + 5}, in fail)"
        text = f"on ranks 1, 2: ValueError: broken {place}; on rank 3: ValueError: otherwise {place}"
        assert (str(some.value), some.value.reason) == (text, text)
        assert isinstance(some.value.__cause__, ValueError) == (rank > 0)
    same = ArithmeticError("no")

    def all_fail() -> None:
        raise same

    with pytest.raises(ArithmeticError) as own:
        ranks.every(all_fail)
    assert own.value is same
    with pytest.raises(CheckpointError, match=r"^ArithmeticError: no$"):
        checked.every(all_fail)
    with pytest.raises(CheckpointError, match=r"^on rank 2: ValueError: broken\nhere$"):
        checked.each(lambda: fail(2))
    with pytest.raises(CheckpointError, match=r"^ValueError: broken\nhere$"):
        checked.first(lambda: fail(0))
    assert (alone.size, alone.rank, alone.gather(rank), alone.to_first(rank)) == (1, 0, [rank], [rank])
    if rank == 2:  # other ranks do not take part
        assert alone.first(lambda: fail(1)) == alone.each(fail) == 2
        with pytest.raises(ValueError, match="broken"):
            alone.every(lambda: fail(2))
    mine, other = (dist.new_group([r, r + 1]) for r in (0, 2))
    if rank > 1:
        mine, other = other, mine
    assert (
        Ranks(mine).gather(rank)
        == Ranks(mine).duplicate("test").gather(rank)
        == [rank // 2 * 2, rank // 2 * 2 + 1]
    )
    assert Ranks(mine).first(lambda: rank) == rank // 2 * 2
    assert Ranks(mine).merge(rank, lambda ranks: 10 * ranks[0] + ranks[1]) == 11 * (rank // 2 * 2) + 1
    groups = [Ranks(mine).duplicate(use).group for use in ("test", "test", "other")]
    assert groups[0] is groups[1]  # other uses, on other threads, have their own group
    assert groups[0] is not groups[2]
    assert Ranks.among([rank], "test").gather(rank) == [rank]
    for error, kind in ((None, StateError), (CheckpointError, CheckpointError)):
        with pytest.raises(kind, match=rf"this rank \(global rank {rank}\) is not in it"):
            Ranks(other, error)


def test_all_ranks_go_on_or_all_raise(four: World) -> None:
    four.run(all_or_none)


def named_losses(rank: int, size: int) -> tuple[float, float, bool]:
    """Train with two losses, of which ``b`` overflows on rank 1: its scale shrinks on all ranks, the other stays."""
    run = model.make("fsdp", Plan(compute="fp16", loss_scale=LossScale(init=64.0)), Options())
    x, y = model.batch(0)
    run.amp.backward(LOSS(run.call(run.mine(x)), run.mine(y)), "a")
    second = LOSS(run.call(run.mine(x)), run.mine(y)) * (float("inf") if rank == 1 else 1.0)
    run.amp.backward(second, "b")
    result = run.amp.step(run.optimizer)
    scales = run.amp.get_scale("a"), run.amp.get_scale("b")
    run.amp.close()
    return (*scales, result.skipped)


def test_scales_of_named_losses_agree(two: World) -> None:
    assert two.run(named_losses) == [(64.0, 32.0, True)] * 2


# --- norms -----------------------------------------------------------------------------------------------------


def mixed_meshes(rank: int, size: int, norm_type: float) -> tuple[float, float, float]:
    """Gradients that should be a sum over ranks are compared first and the norm is then sent again, which adds
    messages.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = mesh_of(a=2, b=size // 2)
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(8, 4, generator=generator) for _ in range(6)]
    agreement = Agreement()
    params: list[Any] = []

    def add(data: Any, grad: Any) -> None:
        parameter = nn.Parameter(data)
        parameter.grad = grad
        params.append(parameter)

    both = (Shard(0), Shard(1))
    add(distribute_tensor(values[0], mesh, both), distribute_tensor(values[0], mesh, both))
    one = mesh["a"]
    add(distribute_tensor(values[1], one, [Shard(0)]), distribute_tensor(values[1], one, [Shard(0)]))
    add(distribute_tensor(values[2], one, [Replicate()]), distribute_tensor(values[2], one, [Replicate()]))
    part = DTensor.from_local(
        values[3] * (0.25 if dist.get_rank(one.get_group()) == 0 else 0.75), one, [Partial()]
    )
    add(distribute_tensor(values[3], one, [Replicate()]), part)
    group = mesh.get_group("b")
    piece = values[4].chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()
    add(piece, piece.clone())
    agreement.pieces.mark(params[-1], group)
    add(values[5], values[5].clone())
    empty = torch.zeros(1, 4)  # fewer rows than ranks, so some ranks have none
    add(distribute_tensor(empty, one, [Shard(0)]), distribute_tensor(empty, one, [Shard(0)]))
    norm = agreement.norm(params, norm_type, joined=True)
    want = torch.linalg.vector_norm(torch.cat([v.flatten() for v in values]).double(), norm_type)
    return float(norm), float(want), float(params[3].grad.full_tensor().sub(values[3]).abs().max())


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
def test_the_norm_counts_each_parameter_once(four: World, norm_type: float) -> None:
    for got, want, partial in four.run(mixed_meshes, norm_type):
        assert got == pytest.approx(want, rel=1e-6)
        assert partial < 1e-6


def clipped(rank: int, size: int, layout: str) -> tuple[float, float]:
    """Call ``amp.clip_grad_norm_`` alone; return its result and the clipped gradients."""
    run = model.make(layout, "fp16-mixed", Options())
    run.forward_backward(*model.batch(0))
    norm = float(run.amp.clip_grad_norm_(run.optimizer, 0.01))
    after = float(run.amp.clip_grad_norm_(run.optimizer, 1e9))
    run.amp.close()
    return norm, after


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp", "hand", "pp"])
def test_clipping_by_itself(two: World, layout: str) -> None:
    net = build()
    x, y = model.batch(0)
    LOSS(net(x), y).backward()
    want = float(nn.utils.clip_grad_norm_(net.parameters(), 1e9))
    for norm, after in two.run(clipped, layout):
        assert norm == pytest.approx(want, rel=5e-3)  # fp16
        assert after == pytest.approx(0.01, rel=1e-3)


# --- plans -----------------------------------------------------------------------------------------------------


def different(rank: int, size: int) -> str:
    plan = "bf16-mixed" if rank != 1 else "bf16-mixed+ops.exp=fp32"
    amp = castwise.Amp(plan, device="cpu")
    net = nn.Linear(2, 2)
    with pytest.raises(PlanError) as caught:
        amp.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    assert castwise.Amp.of(net) is None
    return str(caught.value)


def test_ranks_with_different_plans_are_named(two: World) -> None:
    for text in two.run(different):
        assert "ranks were given different plans" in text
        assert "rank 0: bf16-mixed (digest" in text
        assert "rank 1: bf16-mixed+ops.exp=fp32 (digest" in text
        assert "They differ in ops" in text
        assert "Amp(plan, group=...)" in text


def fails(rank: int, size: int, where: str) -> str:
    """Fail on rank 1: in prepare's checks, while the plan is applied, or before both."""
    amp, net = castwise.Amp("bf16-master", device="cpu"), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    patch = pytest.MonkeyPatch()
    if rank == 1 and where == "checks":
        net.weight.data.fill_(1e9)
        amp = castwise.Amp("fp16-master", device="cpu")
    if rank == 1 and where == "apply":
        patch.setattr(storage, "store", lambda *_: 1 / 0)
    if where == "late":
        amp = castwise.Amp("bf16-mixed", device="cpu")
        amp.prepare(net)
    if rank == 1 and where in ("late", "stranger"):
        optimizer = torch.optim.SGD(nn.Linear(3, 3).parameters(), 0.1)
    start = time.monotonic()
    with pytest.raises(Exception) as caught:  # noqa: PT011
        amp.prepare(net, optimizer)
    assert time.monotonic() - start < 20
    assert net.weight.dtype is torch.float32
    assert (castwise.Amp.of(net) is None) is (where != "late")
    patch.undo()
    amp.close()
    with castwise.Amp("bf16-mixed", device="cpu") as again:  # all ranks can prepare together again
        again.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("where", ["checks", "apply", "late", "stranger"])
def test_a_rank_that_fails_inside_prepare_frees_the_others_at_once(where: str, two: World) -> None:
    """Without this, they would wait until the process group's timeout."""
    for text in two.run(fails, where):
        assert text.startswith("RankError: on rank 1: "), text


def fails_alike(rank: int, size: int) -> str:
    net = nn.Linear(2, 2)
    with pytest.raises(PatternError) as caught:
        castwise.Amp("bf16-mixed+regions.nowhere=fp32", device="cpu").prepare(
            net, torch.optim.SGD(net.parameters(), 0.1)
        )
    return str(caught.value)


def test_what_fails_alike_on_all_is_each_ranks_own(two: World) -> None:
    for text in two.run(fails_alike):
        assert "nowhere" in text


def provenance(rank: int, size: int) -> None:
    plan = dataclasses.replace(Plan.preset("bf16-mixed"), provenance={"who": f"rank {rank}"})
    net = nn.Linear(2, 2)
    castwise.Amp(plan, device="cpu").prepare(net, torch.optim.SGD(net.parameters(), 0.1))


def test_where_a_plan_came_from_may_differ(two: World) -> None:
    two.run(provenance)


def nowhere(rank: int, size: int) -> str:
    options = Options()
    with pytest.raises(PatternError) as caught:
        model.make("pp", "bf16-mixed+regions.nothing.here=fp32", options)
    return str(caught.value)


def test_a_region_that_no_stage_has(two: World) -> None:
    for text in two.run(nowhere):
        assert "matches no module of any stage" in text


# --- orders ----------------------------------------------------------------------------------------------------


def orders(rank: int, size: int) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    amp = castwise.Amp("bf16-master", device="cpu")

    net = build()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    ddp = nn.parallel.DistributedDataParallel(net)
    with pytest.raises(StateError, match="prepare the module first and wrap it after"):
        amp.prepare(ddp, optimizer)
    with pytest.raises(StateError, match="inside a DistributedDataParallel already"):
        amp.prepare(net, optimizer)

    net = build()
    amp.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    model.parallelize(net, mesh_of(tp=size))
    with pytest.raises(StateError, match=r"use fully_shard\(model, mesh=...\) with the mesh \(dp, 1, tp\)"):
        nn.parallel.DistributedDataParallel(net)

    net = build()
    fully_shard(net, mesh=mesh_of(fsdp=size))
    with pytest.raises(
        StateError, match=r"FSDP2 gathers stem.weight in float32.*stores it in bfloat16.*amp.fully_shard"
    ):
        amp.prepare(net, torch.optim.SGD(net.parameters(), 0.1))

    for plan in ("bf16-mixed", "fp16-mixed"):
        for wrap in (
            lambda net: fully_shard(net, mesh=mesh_of(fsdp=size)),
            lambda net: model.parallelize(net, mesh_of(tp=size)),
        ):
            late = castwise.Amp(plan, device="cpu")
            net = build()
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            late.prepare(net, optimizer)
            wrap(net)
            late.backward(LOSS(net(model.batch(0)[0]), model.batch(0)[1]))
            with pytest.raises(
                StateError, match=r"became a DTensor after prepare.*fully_shard or parallelize_module first"
            ):
                late.step(optimizer)
            late.close()

    net = build()
    stage = PipelineStage(net, rank, size, torch.device("cpu"))
    with pytest.raises(StateError, match=f"the module of stage {rank} was not prepared"):
        amp.pipeline(ScheduleGPipe(stage, 2, loss_fn=LOSS))
    with pytest.raises(StateError, match=r"not a schedule of torch.distributed.pipelining"):
        amp.pipeline(net)
    amp.close()


def test_what_is_wrapped_in_the_wrong_order_is_refused(two: World) -> None:
    two.run(orders)


def test_declaring_shards_needs_a_process_group() -> None:
    amp = castwise.Amp("bf16-mixed", device="cpu")
    with pytest.raises(StateError, match="not initialised"):
        amp.mark_sharded(nn.Parameter(torch.ones(2)))


# --- FSDP2's groups --------------------------------------------------------------------------------------------


def groups(rank: int, size: int) -> dict[str, tuple[str, str]]:
    plan = Plan.parse("bf16-master+regions.type:LayerNorm=params:fp32+regions.head=compute:fp32/params:fp32")
    amp = castwise.Amp(plan, device="cpu")
    net = build()
    amp.fully_shard(net, blocks=net.blocks.values(), mesh=mesh_of(fsdp=size))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    amp.prepare(net, optimizer)
    seen: dict[str, tuple[str, str]] = {}

    def look(module: nn.Module, args: Any) -> None:
        name = next(n for n, m in net.named_modules() if m is module)
        seen[name] = (str(module.weight.dtype), str(args[0].dtype))

    for module in net.modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            module.register_forward_pre_hook(look)
    amp.backward(LOSS(net(model.batch(0)[0]), model.batch(0)[1]))
    amp.step(optimizer)
    assert all(p.dtype is torch.float32 and p.grad.dtype is torch.float32 for p in net.parameters())
    amp.close()
    return seen


def test_regions_get_shard_groups_of_their_own(two: World) -> None:
    (seen, _) = two.run(groups)
    low, full = "torch.bfloat16", "torch.float32"
    assert seen["stem"] == (low, full)  # inputs of the model are not cast; its operators cast them
    assert seen["blocks.0.up"] == (low, low)
    assert seen["blocks.0.norm"] == (full, low)
    assert seen["head"] == (full, full)


def shards_low(rank: int, size: int, plan: str) -> set[torch.dtype]:
    run = model.make("fsdp", plan, Options(steps=2))
    run.train()
    run.forward_backward(*model.batch(0))
    run.amp.step(run.optimizer)
    state = {v.dtype for s in run.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)}
    held = {p.to_local().dtype for p in run.model.parameters()} | {p.dtype for p in run.model.parameters()}
    run.amp.close()
    return held | state


def test_a_plan_without_masters_shards_what_it_stores(two: World) -> None:
    assert two.run(shards_low, "bf16-true") == [{torch.bfloat16}] * 2
    assert two.run(shards_low, "bf16-master") == [{torch.float32}] * 2


# --- DataParallel ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["bf16-mixed", "fp16-mixed+ops.gelu=fp32", "bf16-master", "bf16-true"])
def test_replicas_in_threads_run_by_the_plan(plan: str) -> None:
    """As DataParallel does on GPUs: replicas share hooks, and each runs in its own thread."""
    net = build()
    amp = castwise.Amp(plan, device="cpu")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    amp.prepare(net, optimizer)
    x, y = model.batch(0)
    amp.backward(LOSS(net(x), y))
    want = [p.grad.clone() for p in net.parameters()]
    optimizer.zero_grad()

    replicas = [_replica(net) for _ in range(2)]
    outputs: list[Any] = [None, None]

    def work(index: int) -> None:
        outputs[index] = replicas[index](x.chunk(2)[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    out = torch.cat(outputs)
    assert out.dtype is torch.float32
    assert all("cast" in str(o.grad_fn).lower() or o.grad_fn is not None for o in outputs)
    amp.backward(LOSS(out, y))
    for parameter, grad in zip(net.parameters(), want, strict=True):
        # Two bf16 halves are rounded separately, the whole only once.
        torch.testing.assert_close(parameter.grad, grad, rtol=0.1, atol=0.02 * float(grad.abs().max() + 1e-3))
    assert amp.step(optimizer).skipped is False
    amp.close()


def _replica(net: nn.Module) -> nn.Module:
    """Copy a module like ``torch.nn.parallel.replicate``, whose broadcast is differentiable."""
    copies = {id(module): module._replicate_for_data_parallel() for module in net.modules()}
    for module in net.modules():
        copy = copies[id(module)]
        for name, child in module._modules.items():
            if child is not None:
                setattr(copy, name, copies[id(child)])
        for name, parameter in module._parameters.items():
            setattr(copy, name, None if parameter is None else parameter.clone())
    return copies[id(net)]


def test_data_parallel_without_devices_passes_through() -> None:
    net = build()
    amp = castwise.Amp("bf16-master", device="cpu")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    amp.prepare(net, optimizer)
    parallel = nn.DataParallel(net)
    x, y = model.batch(0)
    losses = []
    for _ in range(10):
        loss = LOSS(parallel(x), y)
        amp.backward(loss)
        amp.step(optimizer)
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    amp.close()
