"""Windows, the guard and torch-style use of a scaler, across processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import castwise
from castwise import GradScaler, LossScale, Plan
from castwise.errors import StateError
from tests.distributed import model
from tests.distributed.model import LOSS, Options, mesh_of
from tests.distributed.world import World
from tests.soak import each_value, pairs

SCALED = Plan(compute="fp16", loss_scale=LossScale(init=64.0, interval=1))

# --- a scaler of its own, on DTensors -----------------------------------------------------------------------


def shards(rank: int, size: int, ours: bool, fused: bool) -> list[tuple[bool, float]]:
    """Put an infinity into one rank's piece of parameters on two meshes in turn; the scaler is not told about ranks."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = mesh_of(a=2, b=size // 2)
    meshes = (mesh, mesh["a"]) if size > 2 else (mesh["a"], mesh["a"])
    found = []
    for place in range(2):
        for bad in range(size):
            scaler: Any = GradScaler("cpu", 8.0) if ours else torch.amp.GradScaler("cpu", 8.0)
            params = [
                nn.Parameter(distribute_tensor(torch.ones(4, 4), each, [Shard(0)] * each.ndim))
                for each in meshes
            ]
            optimizer = torch.optim.AdamW(params, 0.1, fused=fused)
            before = params[0].to_local().clone()
            scaler.scale(sum(p.to_local().sum() for p in params)).backward()
            if rank == bad:
                params[place].grad.to_local()[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            found.append((torch.equal(params[0].to_local(), before), scaler.get_scale()))
    return found


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_alone_agrees_across_a_mesh_as_torchs_does(two: World, fused: bool) -> None:
    assert two.run(shards, True, False) == two.run(shards, False, False) == [[(True, 4.0)] * 4] * 2
    assert two.run(shards, True, fused) == [[(True, 4.0)] * 4] * 2


def test_a_scaler_alone_agrees_across_all_meshes(four: World) -> None:
    """Torch's scaler only asks the mesh of the first gradient."""
    assert four.run(shards, True, False) == [[(True, 4.0)] * 8] * 4


# --- what causes an error, and what does not ------------------------------------------------------------------


def alarms(rank: int, size: int, layout: str, by: str, clip: bool) -> list[str]:
    run = model.make(layout, SCALED, Options(max_norm=None))
    said = []
    for step in range(3):
        for part in range(2):
            x, y = model.batch(2 * step + part)
            loss = LOSS(run.call(run.mine(x)), run.mine(y))
            run.amp.backward(loss) if by == "backward" else run.amp.scale(loss).backward()
        if layout == "single":
            for parameter in run.model.parameters():
                dist.all_reduce(parameter.grad)
        if clip:
            for parameter in run.model.parameters():
                parameter.grad.clamp_(-1.0, 1.0)
        try:
            run.amp.step(run.optimizer)
        except StateError as error:
            said.append(str(error))
        run.optimizer.zero_grad()
    run.amp.close()
    return said


@each_value()
@pytest.mark.parametrize("by", ["backward", "scale"])
@pytest.mark.parametrize("layout", ["single", "ddp", "fsdp", "tp"])
def test_reductions_raise_no_alarm_and_clipping_does(two: World, layout: str, by: str) -> None:
    """Covers all-reduces written by hand and hooks that change gradients at the end of a backward."""
    assert two.run(alarms, layout, by, False) == [[], []]
    for said in two.run(alarms, layout, by, True):
        assert len(said) == 3
        assert "changed since the backward" in said[0]


# --- the guard ----------------------------------------------------------------------------------------------


def guarded(
    rank: int, size: int, layout: str, plan: str, way: str, bad: int
) -> tuple[list[bool], bool, bool, int]:
    """Put a NaN into one rank's part of a gradient in the second of three steps."""
    run = model.make(layout, plan, Options(fused=way == "fused", max_norm=None))
    skipped, kept = [], True
    params = [p for group in run.optimizer.param_groups for p in group["params"]]
    for step in range(3):
        x, y = model.batch(step)
        run.amp.backward(LOSS(run.call(run.mine(x)), run.mine(y)))
        before = [_local(p).clone() for p in params]
        if step == 1 and (rank == bad or layout == "ddp"):
            _local(params[0].grad).fill_(float("nan"))
        if way == "direct":
            run.optimizer.step()
        else:
            skipped.append(run.amp.step(run.optimizer, max_norm=1.0 if way == "max_norm" else None).skipped)
        same = all(torch.equal(_local(p), value) for p, value in zip(params, before, strict=True))
        kept = kept and same is (step == 1)
        run.optimizer.zero_grad()
    finite = all(bool(torch.isfinite(_local(p)).all()) for p in params)
    count = run.amp.skipped_steps
    run.amp.close()
    return skipped, kept, finite, count


def _local(tensor: Any) -> torch.Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


@each_value()
@pytest.mark.parametrize(
    ("layout", "plan", "way"),
    [
        (layout, plan, way)
        for (layout, way), plan in pairs(
            pairs(["ddp", "fsdp", "tp", "hand"], ["step", "max_norm", "fused", "direct"], 3),
            ["fp32", "bf16-mixed", "bf16-master"],
        )
    ],
)
def test_one_ranks_nan_reaches_no_ranks_weights(two: World, layout: str, plan: str, way: str) -> None:
    want = [] if way == "direct" else [False, True, False]
    for bad in range(2):
        assert two.run(guarded, layout, plan, way, bad) == [(want, True, True, 1)] * 2


def refused(rank: int, size: int) -> str:
    run = model.make("fsdp", "bf16-mixed", Options(max_norm=None))
    run.amp.close()
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    amp = castwise.Amp("bf16-mixed", device="cpu", nonfinite="raise")
    amp.prepare(net, optimizer)
    amp.backward(net(torch.ones(1, 2)).sum())
    if rank == 1:
        net.bias.grad.fill_(float("nan"))
    try:
        amp.step(optimizer)
    except castwise.errors.NonFiniteError as error:
        return str(error)
    return ""


def test_every_rank_raises(two: World) -> None:
    first, second = two.run(refused)
    assert "they are on another rank" in first
    assert "those of bias" in second


def unwrapped(rank: int, size: int, plan: str, how: str) -> list[tuple[list[bool], bool]]:
    """Train without DDP after DDP has wrapped the model before; rank 0 has a NaN in two of four steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    amp = castwise.Amp(plan, device="cpu")
    amp.prepare(model, optimizer)

    def train(forward: nn.Module) -> list[bool]:
        skipped = []
        for step in range(4):
            optimizer.zero_grad()
            bad = rank == 0 and step % 2
            amp.backward(forward(torch.ones(3, 4)).square().mean() * (float("nan") if bad else 1.0))
            skipped.append(amp.step(optimizer).skipped)
        return skipped

    if how == "failed":
        try:
            DistributedDataParallel(model, bucket_cap_mb="not a number")  # type: ignore[arg-type]
        except (TypeError, ValueError):
            pass
        else:
            raise AssertionError("planted")
    else:
        train(DistributedDataParallel(model))
        amp.close()
        amp.prepare(model, optimizer)
    skipped = train(model)
    return [(skipped, all(bool(parameter.isfinite().all()) for parameter in model.parameters()))]


@each_value()
@pytest.mark.parametrize("how", ["failed", "closed"])
@pytest.mark.parametrize("plan", ["bf16-mixed", "fp16-mixed+loss_scale.init=4.0"])
def test_ranks_agree_where_no_wrapper_averages_any_more(two: World, plan: str, how: str) -> None:
    for ((skipped, finite),) in two.run(unwrapped, plan, how):
        assert skipped == [False, True, False, True]
        assert finite
