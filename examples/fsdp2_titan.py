"""A training loop in the style of torchtitan with a castwise plan: FSDP2, accumulation, clipping of DTensors and DCP.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2_titan.py --plan bf16-mixed

It trains a byte-level language model on the text of Python's own documentation, on the CPU in a few seconds, or on GPUs
with NCCL. When started again, it resumes from its newest checkpoint: under the same plan bit for bit, or under another
plan. The comments (1) to (6) mark the lines for castwise.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import functional

import castwise
from castwise.parallel import init_process_group

CONTEXT, BATCH, VOCABULARY = 64, 4, 256


class Block(nn.Module):
    """Attention and an MLP with norms and residual connections; maps ``[batch, tokens, width]`` to the same shape."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Mix over tokens, then over features."""
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(
            functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """A language model over bytes; maps ``[batch, tokens]`` to logits ``[batch, tokens, 256]``."""

    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleDict({str(number): Block(width) for number in range(depth)})
        self.norm, self.output = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next byte."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))


TEXT = torch.tensor(list("".join(pydoc_data.topics.topics.values()).encode()))


def batch(number: int) -> Tensor:
    """Return pieces of the text ``[4, 65]``, which depend only on the number, so that no data state must be saved."""
    generator = torch.Generator().manual_seed(number)
    starts = torch.randint(len(TEXT) - CONTEXT, (BATCH, 1), generator=generator)
    return TEXT[starts + torch.arange(CONTEXT + 1)]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next byte."""
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class State:
    """The complete training state for torch.distributed.checkpoint, which saves it sharded and loads it in place."""

    def __init__(self, model, optimizer, schedule, amp) -> None:
        self.model, self.optimizer, self.schedule, self.amp = model, optimizer, schedule, amp
        self.step = 0

    def state_dict(self) -> dict:
        """Return the state to save, which is also the target of a load."""
        # DCP expects each of these keys in the checkpoint. State that differs between plans is text under one key.
        return {
            "model": self.amp.model_state_dict(self.model),  # (5) fp32 under every plan
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
            "schedule": self.schedule.state_dict()["last_epoch"],
            "amp": json.dumps(self.amp.state_dict()),  # (6) the loss scale
            "step": self.step,
        }

    def load_state_dict(self, state: dict) -> None:
        """Restore the training from a loaded state."""
        self.model.load_state_dict(state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        self.schedule.load_state_dict({**self.schedule.state_dict(), "last_epoch": state["schedule"]})
        self.amp.load_state_dict(json.loads(state["amp"]))
        self.step = state["step"]


def train(options: argparse.Namespace) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = Transformer().to(device)
    amp = castwise.Amp(options.plan)  # (1) a preset, or the path of a plan.json
    amp.fully_shard(
        model, blocks=model.layers.values()
    )  # (2) calls fully_shard on each block and the model, with the plan's formats
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    amp.prepare(model, optimizer)  # (3)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 10, 1 - 0.9 * step / options.steps)
    )
    state = State(model, optimizer, schedule, amp)
    saved = sorted(Path(options.out).glob("step-*/.metadata"))  # DCP writes it last
    if saved:
        dcp.load({"training": state}, checkpoint_id=saved[-1].parent)

    while state.step < min(options.stop or options.steps, options.steps):
        total = torch.zeros((), device=device)
        for micro in range(options.accumulate):
            model.set_requires_gradient_sync(
                micro == options.accumulate - 1
            )  # one reduction for all microbatches
            number = (state.step * options.accumulate + micro) * world + rank
            loss = loss_of(model, batch(number).to(device)) / options.accumulate
            amp.backward(loss)  # (4) scales the loss if the plan has a loss scale
            total += loss.detach()
        amp.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of DTensors, over all ranks
        if not amp.step(optimizer).skipped:  # all ranks step, or none
            schedule.step()
        optimizer.zero_grad()
        state.step += 1
        dist.all_reduce(total)
        if rank == 0:
            print(
                f"step {state.step} loss {total.item() / world:.9g} norm {norm.full_tensor().item():.4g}",
                flush=True,
            )
        if state.step % options.save_every == 0:
            dcp.save({"training": state}, checkpoint_id=Path(options.out) / f"step-{state.step:08}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", default="bf16-mixed", help="a preset, or the path of a plan.json")
    parser.add_argument(
        "--steps", type=int, default=60, help="number of steps, over which the learning rate falls"
    )
    parser.add_argument("--stop", type=int, help="stop after this step; another run can resume")
    parser.add_argument("--accumulate", type=int, default=2, help="microbatches per step")
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--out", default="runs/titan")
    init_process_group()
    train(parser.parse_args())
    dist.barrier()  # no process exits while others still communicate
    dist.destroy_process_group()
