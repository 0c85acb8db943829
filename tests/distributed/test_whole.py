"""An unsharded copy of a sharded model on every rank: equal to the model before sharding, without effect on its
training.
"""

from __future__ import annotations

import copy
import resource
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import castwise
from castwise.core.parallel.whole import ranks_of
from castwise.errors import CastwiseError
from castwise.lab.passes.isolation import copied
from tests.distributed.model import Net, mesh_of
from tests.distributed.world import World


class Tied(Net):
    """The model with buffers, BatchNorm, a frozen parameter, a tied one, and one that FSDP2 can ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.arange(8.0))
        self.norm = nn.BatchNorm1d(4)
        self.alone = nn.Parameter(torch.ones(3))  # possibly fewer elements than ranks
        self.last = nn.Linear(16, 8, bias=False)
        assert self.stem is not None
        self.last.weight = nn.Parameter(self.stem.weight.detach().t().contiguous())
        self.again = self.last
        self.calls = 0
        self.blocks["0"].up.bias.requires_grad_(False)
        self.blocks["1"].eval()
        self.blocks["2"].register_forward_hook(_note)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x + self.shift)) * self.alone.sum() + self.again.weight.sum()

    def stemmed(self, x: Tensor) -> Tensor:
        """A second entry point of the model, which must be registered with FSDP2."""
        assert self.stem is not None
        return self.stem(x)  # type: ignore[no-any-return]


def _note(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2.0


def build() -> Tied:
    torch.manual_seed(3)
    return Tied()


def wrap(kind: str, net: Tied, size: int) -> nn.Module:
    if kind in ("tensor", "both"):
        tensor = mesh_of(tp=size) if kind == "tensor" else mesh_of(dp=size, tp=1)["tp"]
        plan = {f"blocks.{name}.up": ColwiseParallel() for name in ("0", "1", "2")}
        plan |= {f"blocks.{name}.down": RowwiseParallel() for name in ("0", "1", "2")}
        plan |= {"blocks.3.norm": SequenceParallel(sequence_dim=0, use_local_output=True)}
        parallelize_module(net, tensor, plan)
        return net if kind == "tensor" else fully_shard(net, mesh=mesh_of(dp=size, tp=1)["dp"])
    if kind in ("replicas", "alone"):
        mesh = mesh_of(replicas=size, shards=1)
        mesh = mesh if kind == "replicas" else mesh["shards"]
    else:
        mesh = mesh_of(fsdp=size)
    options: dict[str, Any] = {"mesh": mesh}
    if kind == "low":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    if kind == "ignoring":
        options["ignored_params"] = {net.alone, net.blocks["1"].up.weight}
    if kind == "grouped":
        fully_shard([net.blocks["0"], net.blocks["1"]], **options)
    elif kind != "flat":
        for block in list(net.blocks.values())[1:]:
            fully_shard(block, **options)
    fully_shard(net, **options)
    register_fsdp_forward_method(net, "stemmed")
    return net


def same(one: nn.Module, other: nn.Module) -> None:
    """Check that two models are equal, down to the class and the hooks of each module."""
    for (path, a), (other_path, b) in zip(one.named_modules(), other.named_modules(), strict=True):
        assert path == other_path
        assert type(a) is type(b)
        assert a.training is b.training
        assert vars(a).keys() == vars(b).keys(), path
        hooks = [[list(t.values()) for n, t in vars(m).items() if "hooks" in n and t] for m in (a, b)]
        assert hooks[0] == hooks[1], path
    for (name, p), (other_name, q) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert name == other_name
        assert type(p) is type(q) is nn.Parameter
        assert p.requires_grad is q.requires_grad
        assert torch.equal(p, q), name
    for p, q in zip(one.buffers(), other.buffers(), strict=True):
        assert type(p) is type(q)
        assert torch.equal(p, q)


class Around(nn.Module):
    """Forwards missing attributes to its inner module, as adapters do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


KINDS = ("nested", "flat", "low", "ignoring", "grouped", "replicas", "alone", "both", "tensor")


def copies(rank: int, size: int) -> None:
    for kind in KINDS:
        plain: Any = build()
        net: Any = wrap(kind, build(), size)
        if kind == "nested":
            plain, net = Around(plain), Around(net)
        assert [ranks_of(m).size for m in (net, plain)] == [1 if kind == "alone" else size, 1]
        before = [(id(p), type(p)) for p in net.parameters()], [type(m) for m in net.modules()]
        whole: Any = copied(net, "test")
        same(whole, plain)
        assert whole.again is whole.last
        assert before == ([(id(p), type(p)) for p in net.parameters()], [type(m) for m in net.modules()])
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
        for model in (whole, plain):  # each rank on its own batch, without the others
            model(x).square().mean().backward()
        assert torch.equal(whole.stemmed(x), plain.stemmed(x))
        for p, q in zip(whole.parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) is (q.grad is None)
            assert p.grad is None or torch.equal(p.grad, q.grad)


def test_it_is_the_model_as_it_was_before_it_was_cut(two: World) -> None:
    two.run(copies)


def trains(rank: int, size: int, looking: bool) -> list[Tensor]:
    """Copy between forward and backward passes, while gathered or not, and after an evaluation that leaves the root
    gathered.
    """
    net = build()
    net.blocks["2"] = checkpoint_wrapper(net.blocks["2"])
    net = wrap("nested", net, size)  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * rank + step))
        with torch.no_grad():
            net(x)
        if looking:
            whole = copied(net, "test")
            assert not any(isinstance(m, FSDPModule) for m in whole.modules())
            (copy.deepcopy(whole)(x).sum() + whole(x).sum()).backward()
        loss = net(x).square().mean()
        if looking:
            copied(net, "test")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().full_tensor().clone() for p in net.parameters()]  # type: ignore[attr-defined]


def test_its_training_does_not_notice(two: World) -> None:
    watched, alone = two.run(trains, True), two.run(trains, False)
    for one, other in zip(watched, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def lacks_room(rank: int, size: int) -> list[str]:
    """Copy a model that does not fit into memory on one rank, and one that one rank refuses: both ranks raise."""
    said = []
    big = fully_shard(nn.Linear(1 << 12, 1 << 12), mesh=mesh_of(fsdp=size))
    before = resource.getrlimit(resource.RLIMIT_AS)
    if rank == 1:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (16 << 20), before[1]))
    try:
        copied(big, "forecast")
    except CastwiseError as error:
        said.append(f"{type(error).__name__}: {error}")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    small: Any = fully_shard(nn.Linear(2, 2), mesh=mesh_of(fsdp=size))
    small.odd = (n for n in range(3)) if rank == 1 else None
    try:
        copied(small, "forecast")
    except CastwiseError as error:
        said.append(f"{type(error).__name__}: {error}")
    return said


def test_where_it_does_not_fit_all_ranks_say_so(two: World) -> None:
    heard = two.run(lacks_room)
    assert heard[0] == heard[1]
    room, uncopied = heard[0]
    assert room.startswith(
        "RankError: on rank 1: WorkloadError: forecast: the model is sharded, and every rank needs memory"
    )
    assert "0.0625 GiB" in room
    assert uncopied.startswith("RankError: on rank 1: TypeError: cannot pickle 'generator' object")


def prepared(rank: int, size: int, plan: str) -> None:
    """Check that a copy has everything castwise put on the model, as a copy of an unsharded model does."""
    torch.manual_seed(0)
    plain, net = Net(), None
    net = copy.deepcopy(plain)
    amp = castwise.Amp(plan, device="cpu")
    amp.fully_shard(net, blocks=list(net.blocks.values()), mesh=mesh_of(fsdp=size))
    amp.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    whole = copied(net, "test")
    with castwise.Amp(plan, device="cpu", group=castwise.ranks.ALONE) as alone:
        alone.prepare(plain)
        x = torch.ones(2, 8)
        got, expected = whole(x), plain(x)
        assert got.dtype is expected.dtype
        assert torch.equal(got, expected)
    amp.close()


def test_of_a_prepared_model_it_runs_by_the_plan(two: World) -> None:
    for plan in ("bf16-mixed", "bf16-master"):
        two.run(prepared, plan)
