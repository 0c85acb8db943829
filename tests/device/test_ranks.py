"""Two processes with a device each: DDP and FSDP2 under every kind of plan."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import castwise
from tests.device import group, sim
from tests.here import DEVICE
from tests.processes import run_ranks

pytestmark = pytest.mark.skipif(DEVICE != sim.NAME, reason="the process group is for the simulated device")


def _data(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(rank)
    x = torch.randn(16, 8, generator=generator)
    return x, x.argmax(1) % 4


def _whole(amp: castwise.Amp, model: nn.Module) -> dict[str, torch.Tensor]:
    state = amp.model_state_dict(model)
    return {name: getattr(value, "full_tensor", value.clone)() for name, value in state.items()}


def _train(given: tuple[str, str]) -> None:
    """Check that both ranks have equal weights after each step and skip together when one of them overflows."""
    layout, plan = given
    rank = int(os.environ["RANK"])
    torch.accelerator.set_device_index(rank)
    group.init()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    assert {p.device.index for p in model.parameters()} == {rank}
    amp = castwise.Amp(plan, device=DEVICE)
    if layout == "fsdp2":
        mesh = init_device_mesh(DEVICE, (2,))
        for part in (model[0], model[2], model):
            fully_shard(part, mesh=mesh, mp_policy=amp.mp_policy(part))
    optimizer = torch.optim.AdamW(model.parameters(), 0.02, eps=1e-4, fused=layout == "ddp")
    amp.prepare(model, optimizer)
    run = DistributedDataParallel(model, device_ids=[rank]) if layout == "ddp" else model
    x, y = _data(rank)
    losses = []
    for number in range(12):
        before = _whole(amp, model)
        loss = nn.functional.cross_entropy(run(x), y)
        losses.append(float(loss.detach()))
        amp.backward(loss * (math.nan if number == 3 and rank == 1 else 1.0))
        assert amp.step(optimizer).skipped is (number == 3)
        optimizer.zero_grad()
        after = _whole(amp, model)
        assert all(torch.equal(before[name], after[name]) for name in before) is (number == 3)
    for value in after.values():
        both = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(both, value)
        assert torch.equal(*both)
    assert losses[-1] < losses[0]
    amp.close()
    dist.destroy_process_group()


@pytest.mark.parametrize("plan", ["fp32", "bf16-mixed", "fp16-mixed+loss_scale.init=64", "bf16-master"])
@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_two_devices_train_as_one(layout: str, plan: str, tmp_path: Path) -> None:
    for rank in run_ranks(_train, (layout, plan), tmp_path, 2):
        assert rank.code == 0, rank.said("err")[-4000:]
