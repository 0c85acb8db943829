"""Masters of sharded parameters and under torch's DistributedDataParallel, in real processes on gloo."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import castwise
from castwise.core.masters import attach, attachment_of, fp32_state_dict
from castwise.errors import StateError
from tests.core.masters.test_masters_gradients import held
from tests.core.masters.test_masters_optimizers import Weights, lower
from tests.distributed.world import World

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="this torch is built without torch.distributed"
)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """Provide a process group of this process only."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
@pytest.mark.usefixtures("alone")
def test_sharded_parameters_train_like_whole_ones(options: dict[str, bool]) -> None:
    """DTensor masters, clipped and stepped, equal those of the same model unsharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    whole = Weights().to(torch.bfloat16)
    sharded = parallelize_module(
        copy.deepcopy(whole), init_device_mesh("cpu", (1,)), {"a": ColwiseParallel(), "b": RowwiseParallel()}
    )
    optimizers = []
    for model in (whole, sharded):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
        attach(optimizer, model)
        for seed in range(3):
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed)).bfloat16()
            model(x).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        optimizers.append(optimizer)
    for master, want in zip(held(optimizers[1]), held(optimizers[0]), strict=True):
        assert isinstance(master, DTensor)
        torch.testing.assert_close(master.full_tensor().detach(), want.detach(), rtol=1e-6, atol=1e-7)
    for key, value in fp32_state_dict(sharded).items():
        assert isinstance(value, DTensor)
        assert value.dtype is torch.float32, key


@pytest.mark.usefixtures("alone")
def test_the_norm_of_shards_that_no_other_process_has_is_a_plain_tensor() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = parallelize_module(nn.Linear(4, 4), init_device_mesh("cpu", (1,)), ColwiseParallel())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with castwise.Amp("bf16-mixed", device="cpu") as amp:
        amp.prepare(model, optimizer)
        amp.backward(model(torch.ones(2, 4)).sum())
        assert not isinstance(amp.clip_grad_norm_(optimizer, 1.0), DTensor)


@pytest.mark.usefixtures("alone")
def test_gradients_may_be_looked_at_between_forward_and_backward_under_ddp() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with castwise.Amp("bf16-master", device="cpu") as amp:
        amp.prepare(model, optimizer)
        ddp = nn.parallel.DistributedDataParallel(model)
        with ddp.no_sync():
            amp.backward(ddp(torch.ones(2, 4)).sum())
        loss = ddp(torch.ones(2, 4)).sum()
        assert all(m.grad is not None and m.grad.dtype is torch.float32 for m in held(optimizer))
        amp.backward(loss)
        for master in held(optimizer):
            assert master.grad is not None
            assert master.grad.eq(4).all()


def _ddp(rank: int, size: int, as_view: bool) -> None:
    torch.manual_seed(rank)  # different seeds, as users have; DDP makes the weights equal
    model = Weights()
    former = lower(model, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    attachment = attach(optimizer, model, originals=former)
    attachment.accept_low_gradients()
    ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=as_view)
    attachment.rewrite(lambda master: dist.broadcast(master, 0))
    oracle = [m.detach().clone().requires_grad_() for m in held(optimizer)]
    plain = torch.optim.SGD(oracle, lr=0.1, momentum=0.9)
    for step in range(4):
        data = [torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(4)]
        if step >= 2:  # accumulate, and read the gradients in between
            with ddp.no_sync():
                ddp(data[2 + rank]).square().mean().backward()
            assert all(m.grad is not None for m in held(optimizer))
            attachment.narrow_gradients()
        ddp(data[rank]).square().mean().backward()
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert torch.isfinite(total)
        for parameter, master, want in zip(model.parameters(), held(optimizer), oracle, strict=True):
            assert master.grad is not None
            assert parameter.grad is master.grad
            assert master.grad.dtype is torch.float32
            for tensor in (master.grad, master.detach()):
                both = [tensor.clone(), tensor.clone()]
                dist.broadcast(both[0], 0)
                assert torch.equal(*both)
            want.grad = master.grad.clone()
        optimizer.step()
        plain.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        attachment.narrow_gradients()
        for parameter, master, want in zip(model.parameters(), held(optimizer), oracle, strict=True):
            assert torch.equal(master.detach(), want.detach())
            assert torch.equal(parameter.detach(), want.detach().bfloat16())


@pytest.mark.parametrize("as_view", [False, True])
def test_under_ddp_gradients_reach_masters_after_the_reduction(two: World, as_view: bool) -> None:
    """Gradients of two processes agree in fp32, and the clipped gradients are those applied."""
    two.run(_ddp, as_view)


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def _batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def _alike(tensors: Any) -> bool:
    """Return whether all ranks have the same values, bit for bit."""
    for tensor in tensors:
        first = tensor.detach().clone()
        dist.broadcast(first, 0)
        if not torch.equal(first, tensor.detach()):
            return False
    return True


def _wrap(model: nn.Sequential, how: str) -> Any:
    if how == "parts":
        for index, part in enumerate(model):
            model[index] = nn.parallel.DistributedDataParallel(part)
        return model
    if how == "replicate":
        from torch.distributed._composable.replicate import replicate

        return replicate(model)
    return nn.parallel.DistributedDataParallel(model)


def _wrapped(rank: int, size: int, plan: str, how: str) -> Any:
    torch.manual_seed(rank)  # the wrapper makes the weights equal
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with castwise.Amp(plan, device="cpu") as amp:
        amp.prepare(model, optimizer)
        wrapped = _wrap(model, how)
        for step in range(4):
            amp.backward(wrapped(_batch(step, rank)).square().mean())
            amp.step(optimizer, max_norm=1.0)
            optimizer.zero_grad()
        assert _alike(held(optimizer))
        return [p.detach().clone() for p in held(optimizer)]


@pytest.mark.parametrize("plan", ["bf16-master", "fp16-mixed"])
def test_parts_in_ddp_and_replicate_train_as_the_whole_in_ddp(two: World, plan: str) -> None:
    """DDP wraps a part of a prepared model, or only its parameters."""
    whole, parts, replicated = (two.run(_wrapped, plan, how)[0] for how in ("whole", "parts", "replicate"))
    assert all(map(torch.equal, whole, parts))
    assert all(map(torch.equal, whole, replicated))


def _joined(rank: int, size: int, plan: str) -> None:
    torch.manual_seed(rank)
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with castwise.Amp(plan, device="cpu") as amp:
        amp.prepare(model, optimizer)
        ddp = nn.parallel.DistributedDataParallel(model)
        for epoch in range(2):
            with ddp.join():
                for step in range(2 + (rank + epoch) % 2):
                    amp.backward(ddp(_batch(10 * epoch + step, rank)).square().mean())
                    amp.step(optimizer)
                    optimizer.zero_grad()
            attachment = attachment_of(optimizer)
            assert attachment is not None
            assert _alike([*attachment.masters, *model.parameters(), *amp.model_state_dict(model).values()])
            full = [
                m for m in attachment.masters if not torch.equal(m.to(m.dtype), m.to(torch.bfloat16).float())
            ]
            assert full, "low bits are kept"
            scale = torch.tensor(amp.get_scale())
            assert _alike([scale])
            assert plan == "bf16-master" or scale > 2.0**17, "it grew on both"


@pytest.mark.parametrize("plan", ["bf16-master", "fp16-master+loss_scale.interval=1+loss_scale.init=65536"])
def test_masters_are_equal_after_join(two: World, plan: str) -> None:
    """Torch's ``Join`` gives all ranks the weights of one that ended last; masters and loss scale must follow."""
    two.run(_joined, plan)


def _averaged(rank: int, size: int, plan: str, what: str) -> None:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    torch.manual_seed(0)
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    averager = PeriodicModelAverager(period=1, warmup_steps=0)
    with castwise.Amp(plan, device="cpu", group=castwise.ranks.ALONE) as amp:
        amp.prepare(model, optimizer)
        for step in range(3):
            amp.backward(model(_batch(step, rank)).square().mean())
            amp.step(optimizer)
            averager.average_parameters(model.parameters() if what == "model" else optimizer.param_groups)
            optimizer.zero_grad()
            before = [p.detach().clone() for p in model.parameters()]
            weights = amp.model_state_dict(model)
            if what == "model":
                assert all(map(torch.equal, before, model.parameters()))
            else:
                assert _alike(weights.values())
            assert _alike(model.parameters())


@pytest.mark.parametrize("what", ["model", "masters"])
def test_averaged_models_stay_averaged(two: World, what: str) -> None:
    """Torch's model averaging gets the model's parameters or the optimizer's groups; getters do not undo it."""
    two.run(_averaged, "fp16-master", what)


@pytest.mark.usefixtures("alone")
def test_delayed_reductions_are_refused_under_masters_alone() -> None:
    for plan in ("bf16-master", "bf16-mixed"):
        model = _net()
        with castwise.Amp(plan, device="cpu") as amp:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            amp.prepare(model, optimizer)
            delayed: dict[str, Any] = {
                "delay_all_reduce_named_params": [("2.weight", model[2].weight)],
                "param_to_hook_all_reduce": model[0].weight,
            }
            if plan == "bf16-mixed":
                nn.parallel.DistributedDataParallel(model, **delayed)
                continue
            with pytest.raises(StateError, match=r"delay_all_reduce_named_params=.* Leave that argument out"):
                nn.parallel.DistributedDataParallel(model, **delayed)
            nn.parallel.DistributedDataParallel(model)


@pytest.mark.usefixtures("alone")
def test_an_optimizer_that_shards_its_state_is_refused_under_masters_alone() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    for plan in ("bf16-master", "fp16-mixed"):
        model = _net()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01)
        with castwise.Amp(plan, device="cpu") as amp:
            if plan == "bf16-master":
                with pytest.raises(StateError, match="ZeroRedundancyOptimizer steps a separate optimizer"):
                    amp.prepare(model, optimizer)
                continue
            amp.prepare(model, optimizer)
            amp.backward(model(torch.ones(2, 8)).sum())
            amp.step(optimizer)


@pytest.mark.filterwarnings("ignore:.*FSDP:UserWarning")
@pytest.mark.filterwarnings("ignore:.*FullyShardedDataParallel:FutureWarning")
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("plan", ["fp32", "bf16-mixed", "bf16-master"])
def test_fsdp1_is_refused_around_and_inside_of_a_model(plan: str) -> None:
    """The error recommends FSDP2. Models that were not prepared are not affected."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    def shard(module: nn.Module, original: bool) -> Any:
        return FullyShardedDataParallel(module, use_orig_params=original, device_id=torch.device("cpu"))

    with castwise.Amp(plan, device="cpu") as amp:
        amp.prepare(first := _net(), torch.optim.SGD(first.parameters(), lr=0.1))
        with pytest.raises(StateError, match=r"FullyShardedDataParallel\(Sequential\): FSDP1 .* Use FSDP2"):
            shard(first, True)
    for original in (False, True):
        inside = _net()
        inside[2] = shard(inside[2], original)
        for model in (shard(_net(), original), inside):
            with (
                castwise.Amp(plan, device="cpu") as amp,
                pytest.raises(StateError, match=r"prepare\(.*\): FSDP1"),
            ):
                amp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def _unfrozen(rank: int, size: int, plan: str, sharded: bool, low: bool, frozen_after: bool) -> Any:
    """Return the weights after freezing and unfreezing the middle of the model; each rank has the same batches."""
    torch.manual_seed(0)
    model = _net()
    if low:
        model.bfloat16()

    def freeze(frozen: bool) -> None:
        for part in model[:2]:
            part.requires_grad_(not frozen)

    if not frozen_after:
        freeze(True)
    with castwise.Amp(plan, device="cpu", group=None if sharded else castwise.ranks.ALONE) as amp:
        if sharded:
            amp.fully_shard(model, blocks=[model[0]])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        amp.prepare(model, optimizer)
        freeze(True)
        for step in range(4):
            if step == 2:
                freeze(False)
            amp.backward(model(_batch(step, 0)).square().mean())
            amp.step(optimizer)
            optimizer.zero_grad()
        if sharded and plan != "bf16-true":
            assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        return [
            w.full_tensor().clone() if sharded else w.clone() for w in amp.model_state_dict(model).values()
        ]


@pytest.mark.parametrize(
    ("plan", "low", "frozen_after"),
    [
        ("bf16-master", False, False),
        ("bf16-master", True, False),
        ("O2", False, True),
        ("bf16-true", True, False),
        ("bf16-mixed", False, True),
    ],
)
def test_shards_frozen_at_first_train_once_they_are_unfrozen(
    two: World, plan: str, low: bool, frozen_after: bool
) -> None:
    """They train as the unsharded model does, whether frozen before or after ``prepare``, in fp32 or in low precision."""
    whole = two.run(_unfrozen, plan, False, low, frozen_after)[0]
    for rank in two.run(_unfrozen, plan, True, low, frozen_after):
        for got, want in zip(rank, whole, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4 if plan != "bf16-true" else 1e-2, atol=1e-6)
