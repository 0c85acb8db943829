"""Models that arrive in bf16 and are sharded by FSDP2."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import castwise
from castwise.plans.plan import PRESETS

from .model import mesh_of
from .world import World


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


@pytest.mark.parametrize("plan", [name for name in PRESETS if name != "tf32"])
def test_shards_that_arrive_low_train_like_the_float_models(two: World, plan: str) -> None:
    two.run(arrived, plan)
