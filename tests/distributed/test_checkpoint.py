"""Checkpoints of several processes: resumed by as many, and loaded under other layouts or in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import castwise
from castwise.core import checkpoint
from castwise.core.masters import without_masters
from castwise.errors import CheckpointError
from tests.distributed.world import World
from tests.soak import every

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="this torch is built without torch.distributed"
)
WORLD = 2


class Net(nn.Module):
    """Two named layers with dropout between them; each layer may be on another rank."""

    def __init__(self, names: tuple[str, ...] = ("first", "last"), dropout: float = 0.25) -> None:
        super().__init__()
        layers = {"first": nn.Linear(8, 16), "last": nn.Linear(16, 5)}  # FSDP2 splits 5 into 3 and 2
        self.layers = nn.ModuleDict({name: layers[name] for name in names})
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        if "first" in self.layers:
            x = nn.functional.dropout(torch.relu(self.layers["first"](x)), self.dropout, self.training)
        return self.layers["last"](x) if "last" in self.layers else x


class Piece(nn.Module):
    """A linear layer with different outputs on each rank."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8).chunk(world)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class Run:
    """A training in a layout: ``whole`` in each process, or split over both."""

    def __init__(self, layout: str, plan: str, seed: int = 0) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(seed)
        self.layout = layout
        self.amp = castwise.Amp(plan, device="cpu")
        names: tuple[str, ...] = ("first", "last")
        if layout == "pipeline":
            names = (names[self.rank],)
        self.model: nn.Module = Net(names, dropout=0.0 if layout == "tensor" else 0.25)
        if layout == "pieces":
            self.model = Piece(self.rank, WORLD)
        if layout == "fsdp":
            from torch.distributed.fsdp import fully_shard

            mesh = dist.device_mesh.init_device_mesh("cpu", (WORLD,))
            for layer in self.model.layers.values():
                fully_shard(layer, mesh=mesh, mp_policy=self.amp.mp_policy(layer))
            fully_shard(self.model, mesh=mesh, mp_policy=self.amp.mp_policy(self.model))
        if layout == "tensor":
            from torch.distributed.tensor.parallel import (
                ColwiseParallel,
                RowwiseParallel,
                parallelize_module,
            )

            mesh = dist.device_mesh.init_device_mesh("cpu", (WORLD,))
            styles = {"layers.first": ColwiseParallel(), "layers.last": RowwiseParallel()}
            parallelize_module(self.model, mesh, styles)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.02)
        self.amp.prepare(self.model, self.optimizer)
        if layout == "pieces":
            self.amp.mark_sharded(self.model.weight)
        self.call = nn.parallel.DistributedDataParallel(self.model) if layout == "ddp" else self.model
        torch.manual_seed(1000 * seed + (0 if layout == "tensor" else self.rank))

    def train(self, first: int, steps: int = 3) -> None:
        for number in range(first, first + steps):
            width = 16 if self.layout == "pipeline" and self.rank else 8
            seed = number if self.layout == "tensor" else 100 * number + self.rank
            x = torch.randn(6, width, generator=torch.Generator().manual_seed(seed))
            loss = self.call(x).square().mean()
            self.amp.backward(loss)
            self.amp.step(self.optimizer)
            self.optimizer.zero_grad()

    def parts(self) -> dict[str, Any]:
        return {"model": self.call, "optimizers": self.optimizer, "amp": self.amp}

    def save(self, folder: Path, step: int, **options: Any) -> checkpoint.Saving:
        return checkpoint.save(folder, step, **self.parts(), **options)

    def state(self) -> dict[str, Tensor]:
        """Return everything that training continues from, unsharded."""
        weights = self.amp.model_state_dict(self.model)
        state = {f"model.{key}": whole(value) for key, value in weights.items()}
        names = [name for name, _ in self.model.named_parameters()]
        for number, values in without_masters(self.optimizer.state_dict())["state"].items():
            state |= {f"{key}.{names[number]}": whole(value) for key, value in values.items()}
        state["scale"] = torch.tensor(self.amp.get_scale())
        return state


def whole(value: Tensor) -> Tensor:
    full = getattr(value, "full_tensor", None)
    return (value if full is None else full()).detach().clone()


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert got[key].dtype is value.dtype, key
        assert torch.equal(got[key], value), key


def raises(text: str, call: Callable[[], Any]) -> None:
    with pytest.raises(CheckpointError, match=text):
        call()


def resumes(rank: int, size: int, folder: Path, layout: str, plan: str, asynchronous: bool) -> None:
    """Resume bit for bit with as many processes in the same layout; leave the checkpoint for the parent process."""
    run = Run(layout, plan)
    run.train(0)
    at = run.state()
    saving = run.save(folder, 3, extra={"rank": rank}, asynchronous=asynchronous)
    run.train(3)
    want = run.state()
    assert saving.wait() == folder / "step-00000003"
    fresh = Run(layout, plan, seed=7)
    found = checkpoint.newest(folder)
    assert (found.path, found.step, found.skipped) == (saving.path, 3, ())
    loaded = checkpoint.load(found, **fresh.parts())
    assert (loaded.step, loaded.extra, loaded.world_size, loaded.random_state) == (
        3,
        {"rank": 0},
        WORLD,
        True,
    )
    same(fresh.state(), at)
    fresh.train(3)
    same(fresh.state(), want)
    if layout == "pipeline":  # each rank has a part of the state
        parts: list[Any] = [None] * WORLD
        dist.all_gather_object(parts, at)
        at = {key: value for part in parts for key, value in part.items()}
    if rank == 0:
        torch.save(at, folder / "want.pt")


def layouts_change(rank: int, size: int, folder: Path) -> None:
    """Load a checkpoint that one process saved as ``plain`` into sharded layouts."""
    want = torch.load(folder / "plain" / "want.pt", weights_only=True)
    for layout, plan in (("fsdp", "fp16-master"), ("tensor", "bf16-mixed"), ("ddp", "fp16-mixed")):
        run = Run(layout, plan, seed=7)
        loaded = checkpoint.load(checkpoint.newest(folder / "plain"), **run.parts())
        assert not loaded.random_state
        got = run.state()
        scale = got.pop("scale")
        assert scale == (65536.0 if plan.startswith("fp16") else 1.0)
        same(got, {key: value for key, value in want.items() if key != "scale"})
        run.train(0, 1)
    run = Run("fsdp", "bf16-mixed", seed=7)  # from one kind of sharding to another
    checkpoint.load(folder / "tensor" / "step-00000003", **run.parts())
    saved = torch.load(folder / "tensor" / "want.pt", weights_only=True)
    same(run.state(), saved)


def errors(rank: int, size: int, folder: Path) -> None:
    """Raise the error of one rank on all ranks, without changing anything on any."""
    run = Run("ddp", "bf16-mixed", seed=5)
    raises(
        "rank 1: save: extra is a builtins.object",
        lambda: run.save(folder / "none", 1, extra=object() if rank else 1),
    )
    assert not checkpoint.newest(folder / "none")
    before = run.state()
    run.model.add_module("further", nn.Linear(2, 2) if rank else nn.Identity())
    raises(
        r"does not fit, and nothing was changed.*not saved: further\.weight, further\.bias",
        lambda: checkpoint.load(folder / "ddp" / "step-00000003", **run.parts()),
    )
    del run.model.further
    same(run.state(), before)
    # If loading fails on one rank, all ranks roll back.
    if rank:
        hook = run.model.layers["last"].register_load_state_dict_pre_hook(lambda *_: 1 / 0)
    raises(
        "nothing was changed: on rank 1: ZeroDivisionError",
        lambda: checkpoint.load(folder / "ddp" / "step-00000003", **run.parts()),
    )
    same(run.state(), before)
    if rank:
        hook.remove()
    # Any rank may find the damage when it reads a file; all ranks then choose the same other checkpoint.
    late = folder / "damage"
    run.save(late, 1)
    run.save(late, 2)
    if rank == 0:
        with next((late / "step-00000002").glob("*.safetensors")).open("r+b") as file:
            file.seek(40)
            byte = file.read(1)
            file.seek(40)
            file.write(bytes([byte[0] ^ 1]))
    dist.barrier()
    found = newest_quietly(late)
    assert (found.step, [skipped.path.name for skipped in found.skipped]) == (1, ["step-00000002"])
    assert "other contents" in found.skipped[0].reason
    run.save(folder / "grouped", 1, process_group=dist.group.WORLD, asynchronous=True).wait()
    assert checkpoint.newest(folder / "grouped", process_group=dist.group.WORLD).step == 1


def a_disk_fails(rank: int, size: int, folder: Path) -> None:
    """Fail while one rank writes: all ranks raise, and the older checkpoint stays the newest."""
    from castwise.core.checkpoint.storage import Stage

    folder = folder / "disk"
    run = Run("ddp", "bf16-mixed")
    run.save(folder, 1)

    def broken(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Stage, "write", broken)
        text = r"step-00000002 was not written; earlier.* rank 1: OSError: \[Errno 5\] Input/output error"
        raises(text, lambda: run.save(folder, 2))
        saving = run.save(folder, 2, asynchronous=True)
        run.train(0, 1)
        raises(text, saving.wait)
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "step-00000001"]
    run.save(folder, 3)


def buffers_differ(rank: int, size: int, folder: Path) -> None:
    """Load replicas with different buffers: all get the first rank's, as with DistributedDataParallel."""
    run = Run("whole", "bf16-mixed")
    for number in range(4):
        run.model.register_buffer(f"seen{number}", torch.full((3 + number,), float(rank)))
    run.save(folder / "buffers", 1)
    checkpoint.load(folder / "buffers" / "step-00000001", **run.parts())
    assert not any(bool(buffer.any()) for buffer in run.model.buffers())


def newest_quietly(folder: Path) -> checkpoint.Found:
    if dist.get_rank():
        return checkpoint.newest(folder)
    with pytest.warns(UserWarning, match="skipped step-00000002"):
        return checkpoint.newest(folder)


def subgroup(rank: int, size: int, folder: Path) -> None:
    """Save from a subgroup of the ranks without the others."""
    groups = [dist.new_group([each]) for each in range(size)]
    mine = groups[rank]
    run = Run("whole", "bf16-mixed")
    here = folder / f"alone{rank}"
    run.save(here, 1, process_group=mine)
    assert checkpoint.newest(here, process_group=mine).step == 1
    raises(
        r"this rank \(global rank \d\) is not in it",
        lambda: run.save(here, 2, process_group=groups[1 - rank]),
    )


SAVED = {
    "fsdp": ("fsdp", "fp16-master", False),
    "fsdp-async": ("fsdp", "bf16-master", True),
    "ddp": ("ddp", "fp16-mixed", True),
    "tensor": ("tensor", "bf16-mixed", False),
    "pipeline": ("pipeline", "bf16-mixed", False),
    "pieces": ("pieces", "bf16-master", False),
}
"""Layout, plan, and whether the save is asynchronous."""


@pytest.fixture(scope="module")
def saved(two: World, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder that two processes have saved and resumed from; ``plain`` was saved by one process."""
    folder = tmp_path_factory.mktemp("saved")

    @functools.cache
    def save(name: str) -> Path:
        if name == "plain":
            run = Run("whole", "fp32")
            run.train(0)
            run.save(folder / name, 3)
            torch.save(run.state(), folder / name / "want.pt")
        else:
            two.run(resumes, folder / name, *SAVED[name])
        return folder / name

    return save


@every(2)
@pytest.mark.parametrize("name", SAVED)
def test_two_processes_resume_bit_for_bit(saved: Callable[[str], Path], name: str) -> None:
    saved(name)


@pytest.mark.parametrize("case", [layouts_change, errors, a_disk_fails, buffers_differ, subgroup])
def test_among_two_processes(two: World, saved: Callable[[str], Path], case: Callable[..., None]) -> None:
    (folder,) = {saved(name).parent for name in ("plain", "ddp", "tensor")}
    two.run(case, folder)


@pytest.mark.parametrize("name", ["fsdp", "fsdp-async", "ddp", "tensor", "pipeline"])
@pytest.mark.parametrize("plan", ["bf16-mixed", "fp16-master"])
def test_one_process_loads_what_two_have_saved(saved: Callable[[str], Path], name: str, plan: str) -> None:
    """Weights and state load unsharded under the same names; masters get the full values."""
    want = torch.load(saved(name) / "want.pt", weights_only=True)
    run = Run("whole", plan, seed=7)
    loaded = checkpoint.load(checkpoint.newest(saved(name)), **run.parts())
    assert (loaded.step, loaded.world_size, loaded.random_state) == (3, WORLD, False)
    scales = want.pop("scale"), run.amp.get_scale()
    assert scales[1] == (65536.0 if plan.startswith("fp16") else 1.0)
    got = run.state()
    del got["scale"]
    same(got, want)
    # Otherwise rounding would not show.
    assert any((value != value.bfloat16()).any() for value in want.values())
    run.train(0, 1)
    run.amp.close()


def test_hand_cut_pieces_are_never_taken_for_the_whole(saved: Callable[[str], Path]) -> None:
    run = Run("whole", "bf16-mixed")
    run.model = run.call = Piece(0, 1)
    run.optimizer = torch.optim.AdamW(run.model.parameters())
    with pytest.raises(CheckpointError, match=r"not saved: weight; .* weight#0of2, weight#1of2"):
        checkpoint.load(saved("pieces") / "step-00000003", **run.parts())
