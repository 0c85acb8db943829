"""Ranks record a step together and roll back together, under DistributedDataParallel and FSDP2."""

from __future__ import annotations

import json
import math
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import castwise
from castwise.core import checkpoint
from castwise.core.plans.plan import PRESETS
from castwise.errors import PlanError, StateError
from castwise.lab.passes.isolation import seed_all
from castwise.lab.watch.recovery import Recovery
from tests.distributed.world import World
from tests.lab.watch.test_recovery import Batch, Net, data
from tests.soak import some

PLANS = [name for name in PRESETS if name not in ("tf32", "O0", "O3")]
"""Presets without the GPU's and without other names of fp32 and fp16-true."""
LAYOUTS = ("ddp", "fsdp")


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return functional.mse_loss(model(batch[0]), batch[1])


def shifted(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss plus a constant from the batch, which has no gradient."""
    return loss(model, batch[:2]) + batch[2]


class Job:
    """A model on a layout; weights are equal on all ranks, dropout masks are not."""

    def __init__(self, rank: int, layout: str, plan: Any, adam: bool = True, frozen: bool = False) -> None:
        seed_all(0)
        self.model = Net()
        self.model.last.weight.requires_grad_(not frozen)
        self.amp = castwise.Amp(plan, device="cpu")
        if layout == "fsdp":
            self.amp.fully_shard(self.model, blocks=[self.model.first, self.model.last])
        kind: Any = torch.optim.AdamW if adam else torch.optim.SGD
        self.optimizer = kind(self.model.parameters(), lr=1e-2)
        self.amp.prepare(self.model, self.optimizer)
        self.call: nn.Module = self.model if layout == "fsdp" else DistributedDataParallel(self.model)
        seed_all(rank + 1)

    def step(self, batch: Any, of: Callable[[nn.Module, Any], Tensor] = loss, after: Any = None) -> float:
        value = of(self.call, batch)
        self.amp.backward(value)
        if after is not None:
            after()
        self.amp.step(self.optimizer)
        self.optimizer.zero_grad()
        return float(value.detach())

    def gradients(self) -> dict[str, Tensor]:
        return {
            name: whole(p.grad).clone() for name, p in self.model.named_parameters() if p.grad is not None
        }

    def state(self) -> dict[str, Tensor]:
        """Return the whole model's weights and this rank's buffers, including non-persistent ones."""
        weights = {
            name: whole(value).clone() for name, value in self.amp.model_state_dict(self.model).items()
        }
        return weights | {f"{name} (buffer)": b.clone() for name, b in self.model.named_buffers()}


def whole(tensor: Any) -> Tensor:
    out: Tensor = tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()
    return out


def same(one: dict[str, Tensor], other: Any) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(
            one[name].float().nan_to_num(7.0, 8.0, 9.0), other[name].float().nan_to_num(7.0, 8.0, 9.0)
        )
        for name in one
    )


# --- records --------------------------------------------------------------------------------------------------


def records(rank: int, size: int, layout: str, plan: str, folder: str) -> Any:
    """Train with a recorder: the third step is requested; in the fourth, rank 1 has an infinite target."""
    chosen = castwise.Plan.preset(plan)
    if chosen.loss_scale is not None:  # a scale that does not have to be found first
        chosen = replace(chosen, loss_scale=replace(chosen.loss_scale, init=64.0))
    job = Job(rank, layout, chosen, adam=False)
    then, losses = [], []
    batches = data(4, spikes=(3,) if rank == 1 else (), value=float("inf"), seed=rank)
    with castwise.Recorder(job.amp, job.call, folder) as recorder:
        for number, batch in enumerate(recorder.batches(batches)):
            losses.append(job.step(batch, after=lambda: then.append(job.gradients())))
            if number == 1:
                recorder.write("asked for")
    job.amp.close()
    return [str(path) for path in recorder.records], then[2:], losses[2:]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("plan", some(PLANS, 2))
def test_a_step_of_two_ranks_comes_out_bit_for_bit_in_one_process(
    two: World, layout: str, plan: str, tmp_path: Path
) -> None:
    (paths, then, mine), (others, _, theirs) = two.run(records, layout, plan, str(tmp_path))
    assert paths == others  # one record of both ranks
    assert [Path(path).relative_to(tmp_path).name for path in paths] == ["step-00000003", "step-00000004"]
    for at, path in enumerate(paths):
        again = castwise.replay(path, Net(), loss, find=False)
        assert again.exact
        assert again.ranks == (0, 1)
        assert repr(again.recorded_losses) == repr((mine[at], theirs[at]))
        if (
            layout == "fsdp" or not castwise.Plan.preset(plan).stores_low
        ):  # otherwise DDP averaged the gradients in the low format
            assert same(then[at], again.gradients)
        assert again.finite is (at == 0)


def test_the_part_of_one_rank(two: World, tmp_path: Path) -> None:
    two.run(records, "fsdp", "fp16-mixed", str(tmp_path))
    again = castwise.replay(tmp_path, Net(), loss)
    assert again.first is not None
    assert again.first.name == "batch[1]"
    assert any("ran on rank 1" in note for note in again.notes)
    assert "rank" in again.to_dict()["reason"] or again.to_dict()["world_size"] == 2
    good, bad = (castwise.replay(tmp_path, Net(), loss, rank=rank, find=False) for rank in (0, 1))
    assert good.exact
    assert good.finite
    assert good.recorded_nonfinite  # the non-finite values came from the other rank
    assert bad.exact
    assert not bad.finite
    assert any("means over 2 ranks, of which 1 was replayed" in note for note in good.notes)
    with pytest.raises(PlanError, match="has no such rank; allowed: 0, 1"):
        castwise.replay(tmp_path, Net(), loss, rank=2)


def cut(rank: int, size: int, plan: str, folder: str) -> Any:
    """Train with tensor parallelism and record the second step."""
    model = halves()
    parallelize_module(
        model, init_device_mesh("cpu", (size,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    amp = castwise.Amp(plan, device="cpu")
    amp.prepare(model, optimizer)
    then: list[dict[str, Tensor]] = []
    with castwise.Recorder(amp, model, folder) as recorder:
        for number, batch in enumerate(recorder.batches(data(2))):
            amp.backward(loss(model, batch))
            then.append({name: whole(p.grad).clone() for name, p in model.named_parameters()})
            amp.step(optimizer)
            optimizer.zero_grad()
            if number == 0:
                recorder.write()
    amp.close()
    return then[1]


def halves() -> nn.Module:
    seed_all(0)
    return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 4))


@pytest.mark.parametrize(("plan", "off"), [("fp32", 1e-6), ("bf16-mixed", 0.02)])
def test_a_step_under_tensor_parallelism_comes_out_near(
    two: World, plan: str, off: float, tmp_path: Path
) -> None:
    then, _ = two.run(cut, plan, str(tmp_path))
    again = castwise.replay(tmp_path, halves(), loss, find=False)
    assert again.losses == pytest.approx(again.recorded_losses, rel=off)
    for name, gradient in again.gradients.items():
        assert float((then[name] - gradient).norm()) <= off * float(gradient.norm())


def recorded_behind_a_checkpoint(rank: int, size: int, layout: str, folder: str) -> Any:
    job = Job(rank, layout, "bf16-master", frozen=True)
    then: list[Any] = []
    with castwise.Recorder(job.amp, job.call, f"{folder}/steps") as recorder:
        for number, batch in enumerate(recorder.batches(data(3, seed=rank))):
            if number == 1:
                checkpoint.save(f"{folder}/saves", 1, model=job.model, optimizers=job.optimizer, amp=job.amp)
                recorder.write()
            job.step(batch, after=lambda: then.append(job.gradients()))
    job.amp.close()
    return then[2]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_record_of_all_ranks_holds_the_weights_once(two: World, layout: str, tmp_path: Path) -> None:
    then, _ = two.run(recorded_behind_a_checkpoint, layout, str(tmp_path))
    shutil.rmtree(tmp_path / "saves")
    again = castwise.replay(tmp_path / "steps", Net(), loss, find=False)
    assert again.exact
    assert again.step == 3
    values = json.loads((again.path / "values.json").read_text())
    assert len([name for name in values["tensors"] if "last.weight" in name]) == 1
    if layout == "fsdp":
        assert same(then, again.gradients)


def one_sees_it(rank: int, size: int, layout: str, folder: str) -> Any:
    """Make rank 1's loss infinite in the second step with finite gradients, so that the step is taken."""
    job = Job(rank, layout, "bf16-mixed")
    then: list[Any] = []
    with castwise.Recorder(job.amp, job.call, folder) as recorder:
        for number, batch in enumerate(recorder.batches(data(3, seed=rank))):
            extra = torch.tensor(math.inf if rank == 1 and number == 1 else 0.0)
            batch = (*batch, extra)
            recorder._step.moments[-1] = type(recorder._step.moments[-1]).of(batch, job.amp)  # type: ignore[union-attr]
            job.step(batch, shifted, lambda: then.append(job.gradients()))
    job.amp.close()
    return [str(path) for path in recorder.records], then[1], job.amp.skipped_steps


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_that_is_made_with_one_ranks_infinite_loss(two: World, layout: str, tmp_path: Path) -> None:
    (paths, then, skipped), (others, _, _) = two.run(one_sees_it, layout, str(tmp_path))
    assert paths == others
    assert skipped == 0
    again = castwise.replay(paths[0], Net(), shifted, find=False)
    assert again.exact
    assert again.step == 2
    assert again.reason == "on rank 1: the loss is inf"
    assert same(then, again.gradients)


def fails(rank: int, size: int, layout: str, folder: str) -> Any:
    job = Job(rank, layout, "bf16-mixed")
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with castwise.Recorder(job.amp, job.call, folder) as recorder:
                for number, batch in enumerate(recorder.batches(data(2, seed=rank))):
                    if number == 1:
                        job.amp.backward(loss(job.call, batch))
                        _ = 1 / (1 - rank)
                        break
                    job.step(batch)
        except ZeroDivisionError:
            pass
        said = [str(one.message) for one in caught if "Recorder" in str(one.message)]
    job.amp.close()
    return [str(path) for path in recorder.records], said


def test_an_error_of_one_rank_is_its_own(two: World, tmp_path: Path) -> None:
    (none, _), ((path,), said) = two.run(fails, "ddp", str(tmp_path / "ddp"))
    assert none == said == []
    assert path == str(tmp_path / "ddp" / "rank-1" / "step-00000002")
    again = castwise.replay(path, Net(), loss)
    assert again.exact
    assert again.ranks == (1,)
    (none, _), (neither, said) = two.run(fails, "fsdp", str(tmp_path / "fsdp"))
    assert none == neither == []
    assert "other ranks hold the rest of the weights" in said[0]


def refused(rank: int, size: int, folder: str) -> None:
    job = Job(rank, "fsdp", "bf16-master")
    before = job.state()
    with pytest.raises(StateError, match="is sharded in groups that follow the formats of its parameters"):
        job.amp.change("bf16-mixed")
    assert same(before, job.state())
    job.amp.close()
    net = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    amp = castwise.Amp("bf16-mixed", device="cpu")
    amp.prepare(net, optimizer)
    amp.mark_sharded(net.weight, dim=0)
    with pytest.raises(StateError, match="sharded by hand"):
        castwise.Recorder(amp, net, folder)
    with pytest.raises(StateError, match="sharded by hand"):
        Recovery(amp, net, optimizer, loss, folder)


def test_what_no_process_could_hold_is_refused(two: World, tmp_path: Path) -> None:
    two.run(refused, str(tmp_path))


# --- recoveries -----------------------------------------------------------------------------------------------


class Average:
    """A running mean of the weights, as an extra object that is rolled back too."""

    def __init__(self, model: nn.Module) -> None:
        self.values = [p.detach().clone() for p in model.parameters()]

    def update(self, model: nn.Module) -> None:
        for value, p in zip(self.values, model.parameters(), strict=True):
            value.lerp_(p.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for value, saved in zip(self.values, state["values"], strict=True):
            value.copy_(saved)


def recovers(rank: int, size: int, layout: str, kind: str, folder: str, steps: int = 40) -> Any:
    """Train with a fault at step 25, or from there on, visible to only one rank where possible."""
    job = Job(rank, layout, "fp16-mixed" if kind == "region" else "bf16-mixed")
    average = Average(job.model)
    recovery = Recovery(
        job.amp, job.call, job.optimizer, loss, folder, every=10, also={"average": average},
        keep_bytes=4 * 32 * 12 * 4 if rank == 1 and kind == "one lets go" else 1 << 30,
    )  # fmt: skip
    spikes = (25,) if rank == 1 and kind in ("spike", "nan", "one lets go") else ()
    value = float("nan") if kind == "nan" else 1e6
    losses: dict[int, float] = {}
    visits: Counter[int] = Counter()
    hits, last = 0, None
    for batch in recovery.batches(data(steps, spikes=spikes, value=value, seed=rank)):
        losses[recovery.step] = job.step(batch)
        average.update(job.model)
        visits[recovery.step] += 1
        if kind == "one lets go" and rank == 1 and recovery.step == 24 and last is not None:
            last[0].add_(1.0)  # the batch of step 23
        last = batch
        if kind == "region":
            job.model.loud.gain.fill_(1.0 if recovery.step < 25 else 1e6)
        if recovery.step == 25 and not hits and kind.startswith("weight"):
            hits += 1
            with torch.no_grad():
                for p in job.model.last.parameters():
                    local = p.to_local() if hasattr(p, "to_local") else p
                    if kind == "weights":
                        local.mul_(1e6)
                    elif rank == 1:  # weights that rank 0 does not have, or does not see change
                        local.fill_(math.nan)
    record = recovery.to_dict()
    state = job.state() | {f"average {at}": whole(value) for at, value in enumerate(average.values)}
    recovery.close()
    job.amp.close()
    return record["returns"], losses, state, visits


@pytest.mark.filterwarnings("ignore:Recovery. step:UserWarning")
@pytest.mark.parametrize(
    ("kind", "cause", "step"),
    [("nan", "batch", 25), ("spike", "batch", 25), ("weights", "transient", 26), ("region", "format", 26)],
)
def test_both_ranks_go_back_and_end_alike_on_both_layouts(
    two: World, kind: str, cause: str, step: int, tmp_path: Path
) -> None:
    ends = {}
    for layout in LAYOUTS:
        (first, mine, state, _), (second, theirs, also, _) = two.run(
            recovers, layout, kind, str(tmp_path / layout)
        )
        assert first == second
        assert [(one["step"], one["cause"]) for one in first] == [(step, cause)]
        assert (first[0]["to_step"] == 26) is (kind == "nan")  # no step is repeated
        weights = [name for name in state if "(buffer)" not in name and "running" not in name]
        assert all(torch.equal(state[name], also[name]) for name in weights)
        assert ("on rank 1: " in first[0]["evidence"]) is (kind in ("nan", "spike"))
        if kind == "region":
            assert "loud" in first[0]["evidence"]
        ends[layout] = mine, theirs
    for ours, ddps in zip(ends["fsdp"], ends["ddp"], strict=True):
        assert ours.keys() == ddps.keys()
        assert ours[39] == pytest.approx(ddps[39], rel=1e-3)
        assert ours[39] < ours[0]


@pytest.mark.filterwarnings("ignore:Recovery. step:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_damage_on_one_rank_alone_is_put_right_bit_for_bit(two: World, layout: str, tmp_path: Path) -> None:
    calm = two.run(recovers, layout, "none", str(tmp_path / "calm"))
    hit = two.run(recovers, layout, "weight of one", str(tmp_path / "hit"))
    for (none, losses, state, _), (returns, ours, now, _) in zip(calm, hit, strict=True):
        assert none == []
        assert [(one["step"], one["cause"]) for one in returns] == [(26, "transient")]
        assert losses == ours
        assert same(state, now)  # includes each rank's own buffers


@pytest.mark.filterwarnings("ignore:Recovery. step:UserWarning")
def test_what_one_rank_no_longer_has_no_rank_goes_back_to(two: World, tmp_path: Path) -> None:
    (first, *_, mine), (second, *_, theirs) = two.run(recovers, "fsdp", "one lets go", str(tmp_path))
    assert first == second
    assert (first[0]["step"], first[0]["to_step"], first[0]["cause"]) == (25, 20, "batch")
    for visits in (mine, theirs):  # rank 1 had dropped steps up to 21, and its batch of step 23 was changed
        assert [visits[step] for step in (20, 21, 22, 23, 24, 25, 26)] == [1, 1, 2, 1, 2, 1, 1]


def held(job: Job) -> list[Tensor]:
    """Copy all state of this rank: shards, their optimizer state, buffers, random generators."""
    inside = [value for state in job.optimizer.state.values() for value in state.values()]
    tensors: list[Any] = [*job.model.parameters(), *job.model.buffers(), *inside, torch.get_rng_state()]
    return [(t.to_local() if hasattr(t, "to_local") else t).detach().clone() for t in tensors]


def interrupted(rank: int, size: int, folder: str) -> None:
    """Interrupt rank 1 in the middle of a rollback and end it; write each rank's error and whether its state is
    unchanged.
    """
    job = Job(rank, "fsdp", "bf16-mixed")
    recovery = Recovery(job.amp, job.model, job.optimizer, loss, folder, every=10)
    batches = recovery.batches(data(40, spikes=(25,), seed=rank))
    for batch in batches:
        job.step(batch)
        if recovery.step == 25:
            break
    before, real = held(job), job.model.load_state_dict

    def cut_off(*given: Any, **how: Any) -> Any:
        real(*given, **how)
        job.model.load_state_dict = real  # type: ignore[method-assign]
        assert not torch.equal(before[0], held(job)[0])
        raise KeyboardInterrupt

    if rank == 1:
        job.model.load_state_dict = cut_off  # type: ignore[method-assign]
    said = ""
    try:
        next(batches)
    except BaseException as error:
        said = type(error).__name__
    equal = all(map(torch.equal, before, held(job)))
    (Path(folder).parent / f"{rank}.json").write_text(json.dumps([said, equal]))
    if rank == 1:
        os._exit(1)


def goes_on(rank: int, size: int, folder: str) -> Any:
    job = Job(rank, "fsdp", "bf16-mixed")
    loaded = checkpoint.load(
        checkpoint.newest(folder), model=job.model, optimizers=job.optimizer, amp=job.amp
    )
    job.step(next(data(1, seed=rank)))
    return loaded.extra["step"], all(bool(t.isfinite().all()) for t in held(job))


def test_an_interrupt_of_one_rank_leaves_all_as_it_was_and_a_good_state_to_go_on_from(tmp_path: Path) -> None:
    world = World(2)
    try:
        with pytest.raises(AssertionError, match="rank 1: the process has ended"):
            world.run(interrupted, str(tmp_path / "good"))
        one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
        assert other == ["KeyboardInterrupt", True]
        assert one[1]
        assert one[0] not in ("", "KeyboardInterrupt")  # the other rank has ended
        assert world.run(goes_on, str(tmp_path / "good")) == [(20, True), (20, True)]
    finally:
        world.close()
