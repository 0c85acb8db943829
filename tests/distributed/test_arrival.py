"""Models that are in bf16 before prepare and sharded by FSDP2."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import castwise
from castwise.core.plans.plan import PRESETS
from castwise.errors import StateError
from tests.distributed.model import mesh_of
from tests.distributed.world import World
from tests.soak import every


def arrived(rank: int, size: int, plan: str) -> None:
    torch.manual_seed(0)
    low = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)).bfloat16()
    wide = copy.deepcopy(low).float()
    found = []
    for net in (low, wide):
        amp = castwise.Amp(plan, device="cpu")
        amp.fully_shard(net, blocks=[net[0]], mesh=mesh_of(fsdp=size))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4)
        amp.prepare(net, optimizer, widen=net is low and PRESETS[plan].params == "fp32")
        generator = torch.Generator().manual_seed(rank)
        losses = []
        for _ in range(3):
            loss = (net(torch.randn(4, 6, generator=generator)).float() - 1).square().mean()
            amp.backward(loss)
            amp.step(optimizer, max_norm=1.0)
            optimizer.zero_grad()
            losses.append(loss.item())
        weights = {name: value.full_tensor() for name, value in amp.model_state_dict(net).items()}
        found.append((losses, weights))
        given = amp.model_state_dict(net, as_given=True)
        amp.close()
        kept = torch.bfloat16 if net is low else torch.float32
        assert {value.dtype for value in given.values()} == {p.dtype for p in net.parameters()} == {kept}
    assert found[0][0] == found[1][0]
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())


@every(2)
@pytest.mark.parametrize("plan", [name for name in PRESETS if name != "tf32"])
def test_shards_that_arrive_low_train_like_the_float_models(two: World, plan: str) -> None:
    two.run(arrived, plan)


def ran(rank: int, size: int) -> None:
    net = nn.Sequential(nn.Linear(6, 4)).bfloat16()
    amp = castwise.Amp("bf16-mixed", device="cpu")
    amp.fully_shard(net, mesh=mesh_of(fsdp=size))
    out = net(torch.randn(4, 6).bfloat16())
    with pytest.raises(StateError, match=r"FSDP2 has gathered .* call reshard\(\)"):
        amp.prepare(net, torch.optim.SGD(net.parameters(), 0.1), widen=True)
    out.sum().backward()
    with pytest.raises(StateError, match=r"0.weight .* was bfloat16 when FSDP2 ran .* stores it in float32"):
        amp.prepare(net, torch.optim.SGD(net.parameters(), 0.1), widen=True)
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}


def test_shards_that_fsdp_has_gathered_already_are_refused(two: World) -> None:
    two.run(ran)


def wrapped(rank: int, size: int) -> None:
    net = nn.Sequential(nn.Linear(6, 4)).bfloat16()
    amp = castwise.Amp("bf16-mixed", device="cpu")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(StateError, match="prepare the module first and wrap it after"):
        amp.prepare(nn.parallel.DistributedDataParallel(net), optimizer, widen=True)
    net = nn.Sequential(nn.Linear(6, 4)).bfloat16()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    amp.prepare(net, optimizer, widen=True)
    ddp = nn.parallel.DistributedDataParallel(net)
    amp.backward(ddp(torch.randn(4, 6)).square().mean())
    amp.step(optimizer)
    assert {p.dtype for p in net.parameters()} == {torch.float32}


def test_ddp_wraps_what_was_widened(two: World) -> None:
    two.run(wrapped)
