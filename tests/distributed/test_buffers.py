"""Buffers made non-finite by one rank's bad batch are restored after the step that all ranks skip."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import castwise
from tests.distributed.world import World
from tests.soak import pairs


class Averaging(nn.Module):
    """BatchNorm, and a running mean shared by all ranks, as in synchronised norms."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().float().mean(0)
        dist.all_reduce(mean)
        self.mean.lerp_(mean, 0.1)
        return self.body(x)


def poisoned(rank: int, size: int, layout: str, plan: str, bad: int) -> list[dict[str, Any]]:
    """Return floating buffers and the restored names before a bad batch, after it, and after a good one."""
    amp, model = castwise.Amp(plan, device="cpu"), Averaging()
    inner: Any = model
    if layout == "fsdp2":
        amp.fully_shard(model, blocks=[model.body])
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    amp.prepare(model, optimizer)
    if layout.startswith("ddp"):
        model = DistributedDataParallel(model, broadcast_buffers=layout == "ddp")
    seen = []
    for step, is_bad in enumerate((False, False, True, False)):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        if is_bad and rank == bad:
            x[0, 0] = float("nan")
        optimizer.zero_grad()
        amp.backward(model(x).square().mean())
        result = amp.step(optimizer, max_norm=1.0 if step else None)
        assert result.skipped is is_bad
        floating = {name: b.clone() for name, b in inner.named_buffers() if b.is_floating_point()}
        seen.append({"buffers": floating, "restored": result.restored})
    return seen[1:]


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize(
    ("layout", "plan"),
    pairs(("ddp", "ddp without broadcast", "fsdp2"), ("fp32", "bf16-master", "fp16-mixed")),
)
def test_each_rank_puts_back_what_became_non_finite_on_it(
    two: World, layout: str, plan: str, bad: int
) -> None:
    own = {"body.1.running_mean", "body.1.running_var"}
    found = two.run(poisoned, layout, plan, bad)
    for rank, (own_good, after, later) in enumerate(found):
        # DDP broadcasts rank 0's buffers before the forward.
        good = found[0][0] if layout == "ddp" else own_good
        restored = {"mean", *(own if rank == bad else ())}
        assert set(after["restored"]) == restored
        for name, buffer in after["buffers"].items():
            assert buffer.isfinite().all()
            if rank == bad or name == "mean":
                assert torch.equal(buffer, good["buffers"][name])
        assert later["restored"] == ()
        assert all(buffer.isfinite().all() for buffer in later["buffers"].values())
