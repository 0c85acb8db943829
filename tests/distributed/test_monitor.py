"""A monitor on several ranks: its figures are those of the whole model, there is one report, and training is unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import castwise
from castwise.lab.watch import Alarm, Line, Monitor
from tests.distributed import model
from tests.distributed.model import LOSS, Options
from tests.distributed.world import World
from tests.lab.watch.jobs import batches, loss, same
from tests.soak import every


def train(run: model.Run, steps: int = 4) -> None:
    for step in range(steps):
        inputs, targets = map(run.mine, model.batch(step))
        run.optimizer.zero_grad()
        run.amp.backward(LOSS(run.call(inputs), targets))
        run.amp.step(run.optimizer)


def figures(rank: int, size: int, layout: str, plan: str, folder: str, watched: bool) -> Any:
    run = model.make(layout, plan, Options())
    path = Path(folder) / f"{layout}-{rank}.jsonl"
    monitor = Monitor(run.amp, every=1, jsonl=path) if watched else None
    train(run)
    weights = [
        p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in run.model.parameters()
    ]
    out = [w.clone() for w in weights], None if monitor is None else [*monitor.samples], path.exists()
    if monitor is not None:
        assert monitor.report().unseen == ()
        monitor.close()
        lines = path.read_text().splitlines() if path.exists() else []
        assert [json.loads(line)["step"] for line in lines] == ([1, 2, 3, 4] if rank == 0 else [])
    run.amp.close()
    return out


@every(2)
@pytest.mark.parametrize(
    ("layout", "plan"), [("ddp", "fp16-mixed"), ("fsdp", "bf16-mixed"), ("fsdp", "bf16-master")]
)
def test_figures_are_those_of_the_whole_and_equal_on_all_ranks(
    two: World, layout: str, plan: str, tmp_path: Path
) -> None:
    watched = two.run(figures, layout, plan, str(tmp_path), True)
    plain = two.run(figures, layout, plan, str(tmp_path), False)
    for (mine, *_), (theirs, *_) in zip(watched, plain, strict=True):
        assert same(mine, theirs)
    assert watched[0][1] == watched[1][1]
    assert (watched[0][2], watched[1][2]) == (True, False)
    alone = World(1)
    try:
        (single,) = alone.run(figures, "single", plan, str(tmp_path), True)
    finally:
        alone.close()
    for one, whole in zip(watched[0][1], single[1], strict=True):
        assert one.grad_norm == pytest.approx(whole.grad_norm, rel=0.02)
        assert one.update_ratio == pytest.approx(whole.update_ratio, rel=0.05)
        ours, theirs = ({r.path: r for r in s.regions} for s in (one, whole))
        assert ours.keys() == theirs.keys()
        for path, region in ours.items():
            assert region.weight_norm == pytest.approx(theirs[path].weight_norm, rel=0.01)
            assert region.grad_norm == pytest.approx(theirs[path].grad_norm, rel=0.1, abs=2e-3)
            if theirs[path].output is not None:
                assert region.output == pytest.approx(theirs[path].output, rel=0.05)


def one_rank_alone(rank: int, size: int) -> Any:
    """Train with a step that is skipped and an audit that fails, each because of rank 1 only."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    made = torch.optim.AdamW(net.parameters(), 1e-3)
    amp = castwise.Amp("bf16-mixed")
    amp.prepare(net, made)
    ddp = DistributedDataParallel(net)
    seen: list[Alarm] = []

    def job(module: nn.Module, batch: Any) -> torch.Tensor:
        value = loss(module, batch)
        if broken and rank == 1:  # a large constant: rounding it to bf16 loses the rest
            value = value + (loss(module, batch).bfloat16() + 3000).float() * 0.5
        return value

    broken = False
    monitor = Monitor(
        amp, every=1, loss=job, batches=batches(12, seed=rank), audit_every=3, accumulate=2, on_alarm=seen.append,
        lines={"skipped_in_a_row": Line(0.5, 0.25)},
    )  # fmt: skip
    for step, batch in enumerate(batches(6, seed=10 + rank), start=1):
        made.zero_grad()
        value = loss(ddp, batch)
        if step == 2 and rank == 1:
            value = value * float("inf")
        amp.backward(value)
        amp.step(made)
        broken = step >= 4
    amp.close()
    return [(a.kind, a.step) for a in seen], [
        (a.step, a.verdict, a.rank, a.microbatches) for a in monitor.audits
    ]


def test_what_one_rank_sees_all_ranks_hear(two: World) -> None:
    one, other = two.run(one_rank_alone)
    assert one == other
    alarms, audits = one
    assert alarms[0] == ("skipped_in_a_row", 2)
    assert [step for step, *_ in audits] == [1, 3, 6]
    assert audits[0][3] == 16
    assert audits[1][3] == 4


def audits(rank: int, size: int, layout: str, plan: str, spoilt: bool) -> list[castwise.monitor.Audit]:
    """Run three audits: the whole test before a step, a few microbatches between steps, and one after an evaluation."""
    run = model.make(layout, plan, Options(fused=True))

    if spoilt and rank == 1:  # adds a large constant, so that bf16 rounding loses the rest
        run.model.stem.register_forward_hook(lambda _module, _args, out: (out + 300.0) - 300.0)

    def job(net: nn.Module, batch: Any) -> torch.Tensor:
        return LOSS(net(batch[0]), batch[1])

    mine = [tuple(map(run.mine, model.batch(step))) for step in range(5)] if size > 1 else None
    monitor = Monitor(run.amp, loss=job, batches=mine, audit_every=1000)
    found = [monitor.audit()]
    train(run, 2)
    found.append(monitor.audit())
    with torch.no_grad():
        run.call(run.mine(model.batch(0)[0]))
    found.append(monitor.audit())
    monitor.close()
    run.amp.close()
    return found


def test_an_audit_of_a_sharded_model_is_that_of_the_whole_one(two: World) -> None:
    for plan, spoilt in (("bf16-mixed", False), ("bf16-mixed", True), ("bf16-master", False)):
        sharded, whole = (two.run(audits, layout, plan, spoilt) for layout in ("fsdp", "ddp"))
        verdicts = ["fail"] * 3 if spoilt else ["pass", "sound", "sound"]
        assert [[a.verdict for a in found] for found in (*sharded, *whole)] == [verdicts] * 4
        # Under a plan with low gradients, DDP averages them in that format, so the weights drift apart.
        near = 1e-2 if plan == "bf16-mixed" else 0.3
        for ours, theirs in zip(sharded[0], whole[0], strict=True):
            assert (ours.rank, ours.microbatches) == (theirs.rank, theirs.microbatches)
            assert ours.damage == pytest.approx(theirs.damage, rel=near)
            assert ours.adam == pytest.approx(theirs.adam, rel=near)


def fails_on_one(rank: int, size: int) -> str:
    """Run an audit whose loss fails on one rank: both ranks get the error, and neither waits forever."""
    net = nn.Linear(16, 4)
    made = torch.optim.SGD(net.parameters(), 1e-3)
    amp = castwise.Amp("bf16-mixed")
    amp.prepare(net, made)
    ddp = DistributedDataParallel(net)

    def job(module: nn.Module, batch: Any) -> Any:
        return loss(module, batch) if rank == 0 else "nothing"

    Monitor(amp, loss=job, batches=batches())
    amp.backward(loss(ddp, batches()[0]))
    try:
        amp.step(made)
    except castwise.CastwiseError as error:
        return type(error).__name__ + ": " + str(error)
    finally:
        amp.close()
        dist.barrier()
    return ""


def test_a_first_audit_that_fails_on_one_rank_is_an_error_on_all(two: World) -> None:
    for said in two.run(fails_on_one):
        assert said.startswith("RankError: on rank 1: WorkloadError")


def joins(rank: int, size: int, tool: str, folder: str) -> str:
    """Train ranks with unequal numbers of batches in torch's Join."""
    net = nn.Linear(16, 4)
    made = torch.optim.SGD(net.parameters(), 1e-3)
    amp = castwise.Amp("bf16-mixed")
    amp.prepare(net, made)
    ddp, mine = DistributedDataParallel(net), batches(2 + rank)
    watch: Any = {
        "Monitor": lambda: Monitor(amp, every=1),
        "Recorder": lambda: castwise.Recorder(amp, ddp, folder),
        "Recovery": lambda: castwise.Recovery(amp, ddp, made, loss, folder),
    }[tool]()
    try:
        with ddp.join():
            for batch in mine if tool == "Monitor" else watch.batches(mine):
                amp.backward(loss(ddp, batch))
                amp.step(made)
    except castwise.errors.StateError as error:
        return str(error)
    finally:
        watch.close()
        amp.close()
    return ""


@pytest.mark.parametrize("tool", ["Monitor", "Recorder", "Recovery"])
def test_ranks_that_end_at_different_steps_are_refused(two: World, tool: str, tmp_path: Path) -> None:
    for said in two.run(joins, tool, str(tmp_path)):
        assert said.startswith(
            f"{tool}: DistributedDataParallel is in torch's Join, where ranks end at different"
        )


def row_cut(rank: int, size: int) -> Any:
    """Monitor a row-parallel layer, whose ranks have partial sums of its output; return its figures and the true
    maximum.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4))
    mesh = init_device_mesh("cpu", (size,))
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    made = torch.optim.SGD(net.parameters(), 1e-3)
    amp = castwise.Amp("bf16-mixed")
    amp.prepare(net, made)
    monitor = Monitor(amp, every=1)
    (batch,), made_of = batches(1), []
    for _ in range(2):  # the monitor reads outputs from the second step on
        out = net(batch[0])
        made_of.append(float(out.detach().abs().max()))
        amp.backward(out.square().mean())
        amp.step(made)
    (found,) = [region.output for region in monitor.samples[-1].regions if region.path == "1"]
    monitor.close()
    amp.close()
    return found, made_of[-1]


def test_an_output_whose_addends_ranks_hold_is_that_of_the_whole(two: World) -> None:
    for found, true in two.run(row_cut):
        assert found == pytest.approx(true, rel=0.01)
