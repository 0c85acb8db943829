"""Agreement between real processes on hand-written shards."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import castwise
from castwise import LossScale, Plan
from castwise.errors import StateError

from .processes import leave

WORLD = 2


def weights() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(8, 4, generator=generator),
        torch.randn(4, generator=generator),
        torch.randn(5, 4, generator=generator),
    )


class Shard(nn.Module):
    """A linear layer cut by its outputs, after a scale that every rank holds whole."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        whole, scale, _ = weights()
        self.scale = nn.Parameter(scale.clone())
        self.piece = nn.Parameter(whole.chunk(world)[rank].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x * self.scale, self.piece)


def run(
    rank: int, world: int, fused: bool, unscale_first: bool, plant: bool
) -> tuple[list[bool], list[float], float]:
    """Three steps; on the second, rank 1's own piece overflows if asked for."""
    model = Shard(rank, world)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=fused)
    amp = castwise.Amp(Plan(compute="fp16", loss_scale=LossScale(init=64.0)), device="cpu")
    amp.prepare(model, optimizer)
    if world > 1:
        amp.mark_sharded(model.piece)
    skipped, norms = [], []
    for number in range(3):
        loss = model(weights()[2]).float().pow(2).sum()
        amp.backward(loss)
        if world > 1:
            dist.all_reduce(model.scale.grad)  # as tensor parallelism does for what lies before the cut
        if plant and number == 1 and rank == world - 1:
            model.piece.grad[0, 0] = float("inf")
        if unscale_first:
            amp.unscale_(optimizer)
        result = amp.step(optimizer, max_norm=1.0)
        skipped.append(result.skipped)
        norms.append(float(result.grad_norm))
        optimizer.zero_grad()
    return skipped, norms, amp.get_scale()


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    for fused in (False, True):
        for first in (False, True):
            skipped, norms, scale = run(rank, WORLD, fused, first, plant=True)
            assert skipped == [False, True, False], (rank, skipped)
            assert scale == 32.0
            want = run(0, 1, fused, first, plant=False)[1]
            # fp16 rounds each product; the sum over two ranks is taken in another order.
            assert norms[0] == pytest.approx(want[0], rel=2e-3), (norms, want)
    Path(folder, f"done{rank}").touch()
    leave()


def test_hand_written_shards_skip_together_and_share_one_norm() -> None:
    """An infinity in one rank's piece: all skip; the clip norm is that of the whole layer on one process."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (folder,), WORLD)
        assert {path.name for path in Path(folder).glob("done*")} == {"done0", "done1"}


def wrapped(_rank: int, folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    x, y = torch.randn(8, 8), torch.randn(8, 4)

    def learn(plan: str, wrapper: str) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        amp = castwise.Amp(plan, device="cpu")
        if wrapper == "fsdp":
            fully_shard(model, mesh=mesh, mp_policy=amp.mp_policy(model))
        optimizer = torch.optim.AdamW(model.parameters(), 0.05)
        amp.prepare(model, optimizer)
        call = nn.parallel.DistributedDataParallel(model) if wrapper == "ddp" else model
        losses = []
        for _ in range(20):
            loss = nn.functional.mse_loss(call(x), y)
            amp.backward(loss)
            amp.step(optimizer, max_norm=1.0)
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.3 * losses[0], (plan, wrapper, losses)

    for plan in ("bf16-mixed", "fp16-mixed", "bf16-master"):
        learn(plan, "fsdp")
    for plan in ("bf16-mixed", "fp16-mixed"):
        learn(plan, "ddp")
    with pytest.raises(StateError, match="use bf16-mixed, or shard with FSDP2"):
        learn("bf16-master", "ddp")
    Path(folder, "done").touch()
    leave()


def test_the_order_of_wrappers() -> None:
    """fully_shard then prepare; prepare then DDP; what DDP cannot do is said in words."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(wrapped, (folder,), 1)
        assert Path(folder, "done").exists()


def test_declaring_shards_needs_a_process_group() -> None:
    amp = castwise.Amp("bf16-mixed", device="cpu")
    with pytest.raises(StateError, match="not initialised"):
        amp.mark_sharded(nn.Parameter(torch.ones(2)))
