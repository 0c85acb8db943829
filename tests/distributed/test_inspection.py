"""Inspection tools under DDP and FSDP2: all ranks get one report, equal to that of one process with all batches."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from castwise import compare, first_nonfinite, forecast, mismatch, operator_table
from castwise.errors import CastwiseError
from castwise.lab.inspect.comparison import Comparison
from castwise.lab.inspect.forecast_result import Forecast
from castwise.lab.inspect.mismatch import Mismatch
from castwise.report import compare as compare_report
from castwise.report import mismatch as mismatch_report
from castwise.report import words
from castwise.report.grids import Grid
from tests.distributed.model import Net, mesh_of
from tests.distributed.world import World
from tests.lab.inspect.faults import Stack
from tests.lab.inspect.faults import batch as batch_of
from tests.lab.inspect.faults import loss as loss_of
from tests.lab.inspect.test_mismatch import Language, tokens

WRAPPERS = ("ddp", "fsdp")
PER_RANK = 2
FORMATS = ("fp16", "fp8_e5m2")


def wrapped(kind: str, model: nn.Module) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    parts = [module for name, module in model.named_children() if name in ("blocks", "layers")]
    for block in [block for part in parts for block in part.children()]:
        fully_shard(block, mesh=mesh_of(fsdp=dist.get_world_size()))
    return fully_shard(model, mesh=mesh_of(fsdp=dist.get_world_size()))


def unchanged(model: nn.Module) -> bool:
    return all(p.grad is None and hasattr(p, "device_mesh") is not _is_ddp(model) for p in model.parameters())


def _is_ddp(model: nn.Module) -> bool:
    return isinstance(model, DistributedDataParallel)


def columns(report: Any, result: Any) -> set[str]:
    """Return the names of all columns in the report of a result."""
    return {name for part in report.lines(result.to_dict()) if isinstance(part, Grid) for name in part.header}


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def inputs(number: int) -> Tensor:
    """Return inputs of very different sizes, so that ranks see different ranges."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number)) * 10.0**number


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean() * 1e-3


# --- forecast -------------------------------------------------------------------------------------------------


def forecasts(rank: int, size: int, kind: str) -> tuple[Forecast, bool]:
    model = wrapped(kind, net())
    mine = [inputs(rank * PER_RANK + number) for number in range(PER_RANK)]
    return forecast(model, square, mine, FORMATS, microbatches=PER_RANK), unchanged(model)


def test_a_forecast_is_that_of_one_process_with_all_batches(two: World) -> None:
    whole = forecast(net(), square, [inputs(number) for number in range(4)], FORMATS, microbatches=4)
    for kind in WRAPPERS:
        (one, untouched), (other, _) = two.run(forecasts, kind)
        assert one == other
        assert untouched
        assert (one.model, one.ranks, one.microbatches, one.scales) == ("Net", 2, 4, whole.scales)
        assert (one.answer, one.recommendation) == (whole.answer, whole.recommendation)
        for ours, theirs in zip(one.regions, whole.regions, strict=True):
            assert (ours.path, ours.troubles, ours.scales) == (theirs.path, theirs.troubles, theirs.scales)
            for a, b in zip(ours.tensors, theirs.tensors, strict=True):
                assert dataclasses.replace(a, casts=()) == dataclasses.replace(b, casts=())
                for cast, expected in zip(a.casts, b.casts, strict=True):
                    got, wanted = dataclasses.asdict(cast), dataclasses.asdict(expected)
                    assert (got.pop("format"), got.pop("scale")) == (
                        wanted.pop("format"),
                        wanted.pop("scale"),
                    )
                    assert got == pytest.approx(wanted, rel=1e-12, nan_ok=True)
    alone = forecast(net(), square, [inputs(number) for number in range(2)], FORMATS, microbatches=2)
    assert alone.regions != whole.regions  # ensures that the test can fail


# --- compare --------------------------------------------------------------------------------------------------


def stack(rank: int) -> Stack:
    """Return a stack whose sixth layer rounds coarsely on rank 1 only."""
    return Stack(8, at=5, fault=("out", 3, False) if rank == 1 else None)


def compares(rank: int, size: int, kind: str) -> tuple[Comparison, bool]:
    torch.manual_seed(0)
    model = wrapped(kind, stack(rank))
    return compare(model, loss_of, batch_of(), "fp32", "bf16-mixed", tries=1), unchanged(model)


def test_an_error_on_one_rank_is_found_on_all_with_its_rank(two: World) -> None:
    sides = []
    for rank in range(2):
        torch.manual_seed(0)
        sides.append(compare(stack(rank), loss_of, batch_of(), "fp32", "bf16-mixed", tries=1))
    for kind in WRAPPERS[1:]:
        (one, untouched), (other, _) = two.run(compares, kind)
        assert untouched
        assert one == other
        assert [(c.path, c.forward.rank) for c in one.birthplaces] == [("layers.5.second", 1)]
        assert one.calls[0].forward.rank in (0, 1)
        for calls in zip(one.calls, *(side.calls for side in sides), strict=True):
            for direction in ("forward", "backward"):
                joined, *found = (getattr(call, direction) for call in calls)
                assert dataclasses.replace(joined, rank=None) == found[joined.rank]
                assert joined.excess >= max(f.excess for f in found if f.effect == joined.effect)
        assert "rank" in columns(compare_report, one)
        assert one.output_error == max(side.output_error or 0.0 for side in sides)
        assert one.tried[0].path == "layers.5.second"
        assert "arises in layers.5.second, forward on rank 1: given its inputs" in compare_report.headline(
            one.to_dict()
        )
        assert "2 ranks together" in words.where(one.to_dict())
        assert (one.ranks, one.passes) == (2, sum(side.passes for side in sides))


# --- mismatch -------------------------------------------------------------------------------------------------


def mismatches(rank: int, size: int, kind: str, which: Any) -> Mismatch:
    mine = [tokens(seed=rank + size * number) for number in range(PER_RANK)]
    return mismatch(wrapped(kind, Language()), mine, "fp32", ["bf16-mixed", "bf16-true"], tokens=which)


def test_a_mismatch_is_that_of_one_process_with_all_batches(two: World) -> None:
    for kind, which in zip(WRAPPERS, ("given", "sampled"), strict=True):
        one, other = two.run(mismatches, kind, which)
        assert one == other
        every = [tokens(seed=number) for number in range(4)]
        whole = mismatch(Language(), every, "fp32", ["bf16-mixed", "bf16-true"], tokens=which)  # type: ignore[arg-type]
        assert (one.ranks, one.count, one.sequences) == (2, whole.count, whole.sequences)
        for ours, theirs in zip(one.serve, whole.serve, strict=True):
            said, expected = (
                dataclasses.asdict(dataclasses.replace(row, worst=())) for row in (ours, theirs)
            )
            for name, value in expected.items():
                assert said[name] == (
                    pytest.approx(value, rel=1e-9) if name not in ("plan", "worst") else value
                )
            placed = [dataclasses.replace(t, batch=2 * t.batch + t.rank, rank=0) for t in ours.worst]
            assert placed == [*theirs.worst]
            assert {token.rank for token in ours.worst} == {0, 1}
        assert "rank" in columns(mismatch_report, one)


# --- operator_table -------------------------------------------------------------------------------------------


def tables(rank: int, size: int, kind: str) -> Any:
    def job(model: nn.Module, x: Tensor) -> Tensor:
        return square(model, x.sinh() if rank == 0 else x)

    return operator_table(wrapped(kind, net()), job, inputs(0), "bf16-mixed", repeats=1)


def test_operators_are_those_of_the_slowest_rank(two: World) -> None:
    whole = operator_table(net(), square, inputs(0), "bf16-mixed", repeats=1)
    for kind in WRAPPERS:
        one, other = two.run(tables, kind)
        assert one == other
        assert one.ranks_time_s[one.rank] == max(one.ranks_time_s) == pytest.approx(one.time_s)
        assert len(one.ranks_time_s) == 2
        assert f"on rank {one.rank}, the slowest of 2" in one.answer
        assert one.notes == (f"Rank {1 - one.rank} ran different operators: sinh.",)
        own = {(u.operator, u.format, u.phase, u.calls) for u in one.operators if u.operator != "sinh"}
        assert own == {(u.operator, u.format, u.phase, u.calls) for u in whole.operators}


# --- first_nonfinite ------------------------------------------------------------------------------------------


class Root(nn.Module):
    """Takes a logarithm of 0 if the input sums to 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.log = Log()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x + self.log(x.detach() * 0.0 + 1.0) + self.log(x.abs() * 0.0 + (x.sum() != 0))


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.log()


def nonfinite(rank: int, size: int, kind: str, where: str) -> Any:
    torch.manual_seed(0)
    model: nn.Module = Root()
    for parameter in model.parameters():
        nn.init.ones_(parameter) if parameter.dim() > 1 else nn.init.zeros_(parameter)
    model = wrapped(kind, model) if kind else model
    x = torch.ones(2, 4)
    if rank == size - 1:
        x = x * math.nan if where == "data" else x * 0.0
    found = first_nonfinite(
        model, lambda m, b: m(b).square().mean(), x, group=None if kind else dist.group.WORLD, cures=False
    )
    assert all(p.grad is None for p in model.parameters())
    assert found.answer.count(" on rank 1") == 1
    return found.ranks, found.origin, found.operator, found.module


def test_what_one_rank_alone_has_is_told_on_all(two: World) -> None:
    for kind in (*WRAPPERS, ""):
        assert two.run(nonfinite, kind, "log") == [((1,), "operator", "log", "log")] * 2
        assert two.run(nonfinite, kind, "data") == [((1,), "data", "", "")] * 2


# --- one rank alone, and failures -------------------------------------------------------------------------------


def alone(rank: int, size: int) -> Any:
    """Inspect an unwrapped model, which belongs to one rank, so other ranks need not take part."""
    found = None
    if rank == 0:
        found = (
            forecast(net(), square, [inputs(0)], FORMATS, microbatches=1).ranks,
            first_nonfinite(net(), square, inputs(0) * math.inf).ranks,
        )
    ddp = wrapped("ddp", net())
    if rank == 1:
        found = forecast(ddp.get_submodule("module"), square, [inputs(0)], FORMATS, microbatches=1).ranks, ()
    return found


def test_a_model_without_a_wrapper_is_looked_at_alone(two: World) -> None:
    assert two.run(alone) == [(1, ()), (1, ())]


def fails(rank: int, size: int, kind: str) -> list[str]:
    def job(model: nn.Module, x: Tensor) -> Tensor:
        if rank == 1:
            raise KeyError("targets")
        return square(model, x)

    def logits(model: nn.Module, x: Tensor) -> Any:
        return job(model, x), x, None

    said = []
    for call in (
        lambda m: forecast(m, job, [inputs(0)], FORMATS, microbatches=1),
        lambda m: compare(m, job, inputs(0), "fp32", "bf16-mixed"),
        lambda m: mismatch(m, [inputs(0)], "fp32", "bf16-mixed", logits=logits),
        lambda m: operator_table(m, job, inputs(0), "bf16-mixed"),
        lambda m: first_nonfinite(m, job, inputs(0)),
    ):
        model = wrapped(kind, net())
        try:
            call(model)
        except CastwiseError as error:
            said.append(f"{type(error).__name__}: {error}")
        assert unchanged(model)
        try:
            forecast(model, lambda _, x: square(model, x), [inputs(0)], FORMATS, microbatches=1)  # noqa: B023
        except CastwiseError as error:
            assert "the loss must call the model that it is given" in str(error)  # noqa: PT017
        assert unchanged(model)
        square(model, inputs(rank)).backward()  # the model can still be trained
    return said


@pytest.mark.parametrize("kind", WRAPPERS)
def test_where_one_rank_fails_all_say_so(two: World, kind: str) -> None:
    one, other = two.run(fails, kind)
    assert one == other
    for said, call in zip(
        one, ("forecast", "compare", "mismatch", "operator_table", "first_nonfinite"), strict=True
    ):
        assert said.startswith("RankError: on rank ")
        assert f"on rank 1: WorkloadError: {call}: " in said
        assert "KeyError: 'targets' (test_inspection.py, line" in said


def given_unlike(rank: int, size: int) -> list[str]:
    model, said = DistributedDataParallel(net()), []
    language = DistributedDataParallel(Language())
    one = rank == 1
    plan = "no-such-plan.json" if one else "bf16-mixed"  # a file that exists on one machine only
    other = "fp16-mixed" if one else "bf16-mixed"
    mine = [inputs(0)]
    for call in (
        lambda: forecast(model, square, mine, FORMATS, plan=plan),
        lambda: forecast(model, square, mine, FORMATS, microbatches=0 if one else 1),
        lambda: forecast(model, square, iter(mine) if one else mine, FORMATS, microbatches=1),
        lambda: forecast(model, square, mine, FORMATS, microbatches=1, device="cuda:99" if one else "cpu"),
        lambda: compare(model, square, inputs(0), "fp32", plan),
        lambda: compare(model, square, inputs(0), "fp32", "bf16-mixed", device="cuda:99" if one else "cpu"),
        lambda: operator_table(model, square, inputs(0), plan),
        lambda: first_nonfinite(model, square, inputs(0), "fp16-mixed", loss_scale=-1.0 if one else 2.0),
        lambda: mismatch(language, [tokens(seed=0)], "fp32", "bf16-true", clip=(2.0, 3.0) if one else (0.8, 1.2)),
        lambda: forecast(model, square, mine, FORMATS[:1] if one else FORMATS, microbatches=1),
        lambda: compare(model, square, inputs(0), "fp32", other),
        lambda: compare(model, square, inputs(0), "fp32", "bf16-mixed", tries=rank),
        lambda: operator_table(model, square, inputs(0), other),
        lambda: first_nonfinite(model, square, inputs(0), other),
        lambda: mismatch(language, [tokens(seed=0)], "fp32", ["bf16-true", other][: size - rank]),
    ):  # fmt: skip
        with pytest.raises(CastwiseError) as error:
            call()
        said.append(f"{type(error.value).__name__}: {error.value}")
    return said


def test_what_one_rank_is_given_otherwise_is_told_on_all(two: World) -> None:
    one, other = two.run(given_unlike)
    assert one == other
    assert all(text.startswith("RankError: on rank 1: ") for text in one[:9])
    assert all(text.startswith("PlanError: ") and " ranks were given different " in text for text in one[9:])
    assert "different plan_b (rank 0: bf16-mixed; rank 1: fp16-mixed). Give every rank the same" in one[10]
