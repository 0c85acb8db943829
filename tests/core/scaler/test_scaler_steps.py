"""Steps of a scaler: agreement between ranks, results without synchronization, compiled loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from castwise import GradScaler
from castwise.core.scaler import StepResult
from castwise.errors import LossScaleError, StateError
from tests.distributed.world import World
from tests.here import DEVICE

INF = float("inf")

# --- agreement, sync, outcome -------------------------------------------------------------------------------


def another_ranks_flag(returns: bool) -> Callable[[torch.Tensor], torch.Tensor | None]:
    """Return a reduction as if another rank had found an overflow: in place or as a return value."""

    def reduce(flag: torch.Tensor) -> torch.Tensor | None:
        if returns:
            return torch.ones_like(flag)
        flag.fill_(1.0)
        return None

    return reduce


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("returns", [False, True])
def test_another_ranks_overflow_skips_here_too(fused: bool, first: bool, returns: bool) -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([p], 0.1, fused=fused)
    scaler = GradScaler(DEVICE, reduce=another_ranks_flag(returns))
    scaler.scale(p.sum()).backward()
    if first:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    result = scaler.result_of(optimizer)
    scaler.update()
    assert result.skipped
    assert torch.equal(p.detach(), torch.ones(2))
    assert scaler.get_scale() == 32768.0


def test_a_rank_without_gradients_takes_part() -> None:
    calls = []
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], 0.1)
    scaler = GradScaler(DEVICE, reduce=lambda flag: calls.append(flag))
    scaler.scale(torch.ones((), requires_grad=True)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert len(calls) == 1


class CountSyncs(TorchDispatchMode):
    """Counts reads of device values by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("extras", [{}, {"hysteresis": 2}, {"ceiling": 2.0**20}])
def test_fused_optimizers_need_no_host_sync(extras: dict[str, Any]) -> None:
    p = nn.Parameter(torch.ones(2))
    scaler = GradScaler(DEVICE, **extras)
    optimizer = torch.optim.AdamW([p], 0.1, fused=True)
    scaler.scale(p.sum()).backward()
    with CountSyncs() as syncs:
        scaler.step(optimizer)
        scaler.update()
    assert syncs.count == 0
    plain = torch.optim.SGD([p], 0.1)
    with CountSyncs() as syncs:
        scaler.scale(p.sum()).backward()
        scaler.step(plain)
    assert syncs.count == 1  # the counter works


def test_watching_a_floor_needs_no_host_sync() -> None:
    p = nn.Parameter(torch.ones(2))
    scaler = GradScaler(DEVICE, init_scale=8.0, floor=1.0)
    optimizer = torch.optim.AdamW([p], 0.1, fused=True)
    with CountSyncs() as syncs:
        for factor in (1.0, float("inf"), 1.0):
            scaler.scale(p.sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.previous_skipped is False
    assert syncs.count == 0
    assert scaler.get_scale() == 4.0


def test_result_outlives_the_window() -> None:
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    optimizers = [torch.optim.AdamW([p], 0.1, fused=True) for p in params]
    scaler = GradScaler(DEVICE)
    scaler.scale(params[0].sum() + params[1].sum() * float("inf")).backward()
    results = []
    for optimizer in optimizers:
        scaler.step(optimizer)
        results.append(scaler.result_of(optimizer))
    scaler.update()
    assert [r.skipped for r in results] == [False, True]
    assert [float(r.found_inf) > 0 for r in results] == [False, True]
    assert "skipped=True" in repr(results[1])


def test_steps_that_belong_together_are_skipped_where_one_was() -> None:
    made, skipped = StepResult(None), StepResult([torch.ones(())])
    norm = torch.ones(())
    assert StepResult.join([made]) is made
    assert StepResult.join([made], norm).grad_norm is norm
    for results in ([made, skipped], [skipped, made]):
        joint = StepResult.join(results)
        assert joint.skipped
        assert float(joint.found_inf) == 1.0
    assert not StepResult.join([made, made]).skipped


def test_fp16_gradients() -> None:
    p = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.SGD([p], 0.1)
    scaler = GradScaler(DEVICE, init_scale=8.0)
    scaler.scale(p.float().sum()).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.step(optimizer)
    scaler = GradScaler(DEVICE, init_scale=8.0, allow_fp16_grads=True)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    assert torch.equal(p.grad, torch.ones(2).half())


def test_last_and_previous_outcomes() -> None:
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    optimizers = [torch.optim.SGD([params[0]], 0.1), torch.optim.AdamW([params[1]], 0.1, fused=True)]
    scaler = GradScaler(DEVICE)
    assert scaler.last_result is None
    assert scaler.previous_skipped is None
    previous = []
    for factors in ((1.0, 1.0), (INF, 1.0), (1.0, INF), (1.0, 1.0)):
        scaler.scale(sum(p.sum() * factor for p, factor in zip(params, factors, strict=True))).backward()
        for optimizer, factor in zip(optimizers, factors, strict=True):
            scaler.step(optimizer)
            assert scaler.last_result.skipped is (factor == INF)
        scaler.update()
        assert [scaler.result_of(o).skipped for o in optimizers] == [f == INF for f in factors]
        assert scaler.last_result.skipped is (factors[1] == INF)
        assert scaler.result_of(*optimizers).skipped is (INF in factors)
        previous.append(scaler.previous_skipped)
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert previous == [False, True, True, False]
    with pytest.raises(StateError, match="not stepped in this window or the one before"):
        scaler.result_of(torch.optim.SGD([params[0]], 0.1))


def train_with_ranks(rank: int, fused: bool, first: bool) -> tuple[Any, ...]:
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([p], 0.1, fused=fused)
    scaler = GradScaler(DEVICE, process_group=dist.group.WORLD)
    outcomes = []
    for bad in (None, 0, None, 1):
        scaler.scale(p.sum() * (INF if rank == bad else 1.0)).backward()
        if first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        outcomes.append(scaler.last_result.skipped)
        scaler.update()
        optimizer.zero_grad()
    scaler.backward(p.sum(), "a", params=[p])
    scaler.backward((p * (INF if rank == 0 else 1.0)).sum(), "b", params=[p])
    scaler.step(optimizer)
    outcomes.append(scaler.last_result.skipped)
    scaler.update()
    return outcomes, [scaler.get_scale(name) for name in ("loss", "a", "b")], p.tolist()


def keep_apart_in_buckets(rank: int) -> None:
    """Use gradients that are views of DistributedDataParallel's buckets, which each backward overwrites."""
    model = nn.Linear(2, 1, bias=False)
    parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    scaler = GradScaler(DEVICE, init_scale=8.0)
    scaler._losses.get("b").scale.fill_(2.0)
    for _ in range(2):
        for name, factor in (("a", 1.0), ("b", 2.0), ("a", 4.0)):
            loss = factor * parallel(torch.tensor([[1.0 + rank, 0.0]])).sum()
            scaler.backward(loss, name, params=model.parameters)
        scaler.unscale_(optimizer)
        assert model.weight.grad.tolist() == [[10.5, 0.0]]  # 7 times the mean over ranks
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def steps_of_ranks(rank: int, size: int) -> None:
    for fused, first in ((False, False), (True, False), (True, True)):
        outcomes, scales, values = train_with_ranks(rank, fused, first)
        assert outcomes == [False, True, False, True, True]
        assert scales == [16384.0, 65536.0, 32768.0]
        of_all: list[Any] = [None, None]
        dist.all_gather_object(of_all, values)
        assert of_all[0] == of_all[1] == values
    keep_apart_in_buckets(rank)


def test_real_ranks_agree() -> None:
    """Torch's ShardedGradScaler fails with a fused optimizer: one rank skips and the other steps."""
    world = World(2)
    world.run(steps_of_ranks)
    world.close()


@pytest.mark.gpu
@pytest.mark.parametrize("extras", [{}, {"floor": 1.0}, {"hysteresis": 2}])
def test_nothing_waits_for_a_gpu(extras: dict[str, Any]) -> None:
    p = nn.Parameter(torch.ones(1000, device="cuda"))
    optimizer = torch.optim.AdamW([p], 0.1, fused=True)
    scaler = GradScaler("cuda", **extras)
    factors = [torch.tensor(factor, device="cuda") for factor in (1.0, INF, 1.0)]
    results = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for factor in factors:
            scaler.scale(p.sum() * factor).backward()
            scaler.step(optimizer)
            results.append(scaler.result_of(optimizer))
            scaler.update()
            optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert all(result.known for result in results)
    assert [result.skipped for result in results] == [False, True, False]
    assert scaler.previous_skipped is False


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_a_floor_is_watched_on_a_gpu(fused: bool) -> None:
    p = nn.Parameter(torch.ones(10, device="cuda"))
    optimizer = torch.optim.AdamW([p], 0.1, fused=fused)
    scaler = GradScaler("cuda", init_scale=8.0, floor=1.0, patience=3)

    def train(steps: int) -> None:
        for _ in range(steps):
            scaler.scale(p.sum() * INF).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    with pytest.raises(LossScaleError, match="at its floor, 1; first affected"):
        train(20)


# --- compiled -----------------------------------------------------------------------------------------------


# Dynamo reads .grad of the input of a resumed frame, and Inductor uses torch.jit; both warn.
@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_loop_with_a_fused_optimizer() -> None:
    def run(compiled: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=True)
        scaler = GradScaler(DEVICE)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss.detach()

        call = torch.compile(step, backend="aot_eager") if compiled else step
        return [float(call(torch.ones(2, 4))) for _ in range(3)]

    assert run(True) == pytest.approx(run(False), rel=1e-5)


def test_scaling_is_traced_into_one_graph() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=True)
    scaler = GradScaler(DEVICE, init_scale=8.0, growth_interval=2)
    scaler.scale(torch.ones(()))  # creates the scale, which a graph cannot do
    scaler.load_state_dict(scaler.state_dict())  # closes the window
    graphs = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def scaled_loss(x: torch.Tensor) -> torch.Tensor:
        return scaler.scale(model(x).float().pow(2).mean())

    x = torch.ones(2, 4)
    for _ in range(4):
        value = scaled_loss(x)
        assert value.item() == pytest.approx(scaler.get_scale() * model(x).pow(2).mean().item(), rel=1e-6)
        value.backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 32.0  # the graph used the increased scale
    assert graphs == 1
