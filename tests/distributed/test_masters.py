"""Masters of sharded parameters, and under torch's DistributedDataParallel, in real processes on gloo."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import castwise
from castwise.masters import attach, fp32_state_dict
from tests.test_masters_gradients import held
from tests.test_masters_optimizers import Weights, lower

from .world import World

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="this torch is built without torch.distributed"
)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process only."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
@pytest.mark.usefixtures("alone")
def test_sharded_parameters_train_like_whole_ones(options: dict[str, bool]) -> None:
    """DTensor masters, clipped and stepped, against the same model unsharded."""
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
    torch.manual_seed(rank)  # as users do: DDP makes the ranks' weights equal
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
        if step >= 2:  # accumulation, and a look at the gradients in between
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
    """Two processes: gradients agree, in fp32, and what is clipped is what is applied."""
    two.run(_ddp, as_view)
