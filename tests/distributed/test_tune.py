"""``tune`` on two ranks: both measure, the slower rank's numbers count, and both get the same plan."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import castwise
from castwise import Plan, Workload
from castwise.lab.parity.updates import AFTER, COMPARED, UpdateTest
from castwise.lab.search import contest
from castwise.lab.search.context import Context, Settings
from castwise.lab.search.peaks import measure_peaks
from castwise.lab.search.sound import updates_of
from castwise.lab.search.state import Search
from castwise.lab.timing.processes import NotThereError
from castwise.lab.timing.ranks import lockstep
from tests.distributed.world import World
from tests.processes import command
from tests.searches import short_finals

WORLD = 2
TINY = Path(__file__).parent.parent / "commands" / "jobs" / "tiny_workloads.py"
SLOW_S, MIDDLE_S, QUICK_S = 0.16, 0.06, 0.01
"""Seconds that the models add to the clock used by races. They do not sleep, so a busy machine changes no choice."""
Case = Callable[[int, Path], dict[str, Any]]
Found = list[dict[str, Any]]


class Clock:
    """``time.perf_counter`` plus added time."""

    def __init__(self) -> None:
        self._now, self._further_s = time.perf_counter, 0.0

    def __call__(self) -> float:
        return self._now() + self._further_s

    def pass_s(self, seconds: float) -> None:
        time.perf_counter = self  # needed in the separate process of the final
        self._further_s += seconds


CLOCK = Clock()


def data(count: int = 20) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(16, 16, generator=generator), torch.randint(4, (16,), generator=generator))
        for _ in range(count)
    ]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def rmsprop(params: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(params, lr=1e-3)  # no fused kernel, which halves the number of candidates


class Low(nn.Module):
    """Calls one function in a low format, and another in fp32."""

    def __init__(self, low: Callable[[], object], fp32: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.low, self.fp32 = low, fp32

    def forward(self, inputs: Tensor) -> Tensor:
        (self.low if torch.is_autocast_enabled("cpu") else self.fp32)()
        return inputs * 1.0

    def __deepcopy__(self, memo: object) -> Low:
        return Low(self.low, self.fp32)


def network(low: Callable[[], object] = lambda: None, fp32: Callable[[], object] = lambda: None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), Low(low, fp32), nn.Linear(32, 4))


def tune(model: nn.Module, **options: Any) -> castwise.TuneResult:
    given: dict[str, Any] = {
        "model": model, "loss": loss, "batches": data(), "optimizer": rmsprop, "memory": False, "budget_s": 600,
        "formats": ("fp32", "bf16"),
    }  # fmt: skip
    return castwise.tune(**{**given, **options})


def said(result: castwise.TuneResult) -> dict[str, Any]:
    """Return everything that a search found, without the environment."""
    record = result.to_dict()
    del record["environment"]
    return {"digest": result.plan.digest, **record}


def fails(call: Callable[[], object]) -> dict[str, Any]:
    try:
        call()
    except BaseException as error:
        return {
            "kind": type(error).__name__,
            "text": str(error),
            "notes": getattr(error, "__notes__", []),
        }
    return {"kind": "nothing"}


# --- what both ranks do ------------------------------------------------------------------------


class Off(nn.Module):
    """Returns something else under autocast."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * (1.5 if torch.is_autocast_enabled("cpu") else 1.0)


def served(rank: int, folder: Path) -> dict[str, Any]:
    """bf16-mixed is fast on both ranks and wrong on rank 1."""
    model = network(lambda: CLOCK.pass_s(QUICK_S), lambda: CLOCK.pass_s(MIDDLE_S))
    model = nn.Sequential(model, Off() if rank == 1 else nn.Identity()).eval()
    made = castwise.tune(
        model=model, batches=[b for b, _ in data()], goal="inference", formats=("fp32", "bf16"), memory=False, budget_s=5,
    )  # fmt: skip
    return said(made)


def served_elsewhere(rank: int, folder: Path) -> dict[str, Any]:
    """The processes of the final and of single calls can build this model."""
    return said(
        castwise.tune(
            f"{TINY}:mlp",
            goal="inference",
            formats=("fp32", "bf16"),
            batch_sizes=(4,),
            memory=False,
            budget_s=6,
        )
    )


def served_fails(rank: int, folder: Path) -> dict[str, Any]:
    """Rank 1's model raises in its last batches in fp32."""
    model, calls = nn.Linear(16, 4).eval(), [0]

    def outputs(model: nn.Module, batch: Tensor) -> Tensor:
        calls[0] += 1
        if rank == 1 and calls[0] == 20:
            raise ArithmeticError("the data\ncannot be read")
        return model(batch)

    given = {"model": model, "outputs": outputs, "batches": lambda seed: iter([b for b, _ in data()] * 50)}
    return fails(lambda: castwise.tune(**given, goal="inference", memory=False, budget_s=600))


def paced(rank: int, folder: Path) -> dict[str, Any]:
    """bf16 is fast on both ranks: the choice when no rank is slow."""
    return said(tune(network(lambda: CLOCK.pass_s(QUICK_S), lambda: CLOCK.pass_s(MIDDLE_S))))


def one_is_slow(rank: int, folder: Path) -> dict[str, Any]:
    events = []
    low_s = SLOW_S if rank == 1 else QUICK_S
    model = network(lambda: CLOCK.pass_s(low_s), lambda: CLOCK.pass_s(MIDDLE_S))
    return {**said(tune(model, progress=events.append)), "events": len(events)}


def one_fails_in_the_race(rank: int, folder: Path) -> dict[str, Any]:
    calls = [0]

    def low() -> None:
        calls[0] += 1
        if rank == 1 and calls[0] > 14:  # 8 of the calls time it alone
            raise NotImplementedError("a bf16 kernel\nthat cannot")

    return said(tune(network(low)))


def one_fails_in_the_numerics(rank: int, folder: Path) -> dict[str, Any]:
    def low() -> None:
        if rank == 1:
            raise NotImplementedError("no such bf16 kernel")

    return said(tune(network(low), goal="numerics", formats=("bf16",)))


def one_fails_in_fp32(rank: int, folder: Path) -> dict[str, Any]:
    calls = [0]

    def fp32() -> None:
        calls[0] += 1
        if rank == 1 and calls[0] == 5:
            raise ArithmeticError("the data\ncannot be read")

    return fails(lambda: tune(network(fp32=fp32)))


def one_is_interrupted(rank: int, folder: Path) -> dict[str, Any]:
    calls = [0]

    def fp32() -> None:
        calls[0] += 1
        if rank == 1 and calls[0] == 60:
            raise KeyboardInterrupt

    out = folder / f"rank{rank}"
    return {**fails(lambda: tune(network(fp32=fp32), out=out)), "wrote": out.exists()}


def unlike_arguments(rank: int, folder: Path) -> dict[str, Any]:
    return fails(lambda: tune(network(), seed=rank))


def a_refused_argument(rank: int, folder: Path) -> dict[str, Any]:
    return fails(lambda: tune(network(), accumulate=0 if rank == 1 else 1))


def memory(rank: int, folder: Path) -> dict[str, Any]:
    """Measure memory: rank 1's model allocates 4 MiB more.

    The measuring process is not a rank and must not end the ranks' process groups.
    """
    assert os.environ["WORLD_SIZE"] == str(WORLD)

    class Hoarder(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            extra = torch.zeros(2**20 if rank == 1 else 1)
            return super().forward(inputs) + extra[0]

    def model() -> nn.Module:
        assert "RANK" not in os.environ
        return Hoarder(16, 4)

    made = Workload("hoarder", model, rmsprop, lambda seed: iter(data()), loss)
    plan = Plan.preset("fp32")
    left: list[Any] = [dist.new_group()]  # a group left in a reference cycle, as by a failed search
    left.append(left)
    dist.destroy_process_group(left[0])
    del left
    with lockstep("peaks") as ranks:
        search = Search(Context(made, torch.device("cpu"), Settings(), ranks=ranks))
        measure_peaks(search.context, search.peaks, [plan])
    return {"peak": search.peaks.get(plan), "notes": search.journal.notes}


def updates(rank: int, folder: Path) -> dict[str, Any]:
    """Compare updates under a loss that contains a collective, with a time limit that ends on rank 1 only."""

    def together(model: nn.Module, batch: Any) -> Tensor:
        value = loss(model, batch)
        dist.all_reduce(value.detach().clone())
        return value

    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=1e-2)

    made = Workload("together", network, make, lambda seed: iter(data()), together)
    with lockstep("updates") as ranks, pytest.MonkeyPatch.context() as patch:
        search = Search(Context(made, torch.device("cpu"), Settings(), ranks=ranks))
        search.begun = SimpleNamespace(
            model=network(), test=SimpleNamespace(prober=SimpleNamespace(passes=0))
        )
        if rank == 1:
            patch.setattr(UpdateTest, "next_s", property(lambda test: 1e9 if test._stages else None))
        short = updates_of(search, Plan.preset("bf16-true"))
        patch.undo()
        whole = updates_of(search, Plan.preset("bf16-true"))
    return {"short": short.steps, "whole": whole.steps}


def cannot_leave(rank: int, folder: Path) -> dict[str, Any]:
    """Search with a workload that only rank 0 can send to another process."""

    class Stays:
        def __reduce__(self) -> str:
            raise TypeError(f"cannot pickle what lies at {id(self):#x}")

    stays = Stays() if rank else None
    made = Workload("tiny", network, rmsprop, lambda _: iter(data()), lambda m, b: (stays, loss(m, b))[1])
    with lockstep("sending") as ranks:
        search = Search(Context(made, torch.device("cpu"), Settings(), ranks=ranks))
        with search.context.home:
            try:
                search.context.payload()
            except NotThereError as error:
                return {"said": str(error)}
    return {}


def exchanges(rank: int, folder: Path) -> dict[str, Any]:
    """Run the exchanges that searches use, with errors on chosen ranks."""

    def fail(on: tuple[int, ...], text: str) -> None:
        if rank in on:
            raise ValueError(text)

    with lockstep("first") as ranks:
        work = ranks.at("work")
        agreed = {
            "count": ranks.size,
            "slowest": ranks.at("times").slowest(lambda: [1.0 + rank, 5.0 - rank]),
            "same": ranks.at("value").same({"from": rank}),
            "worst": ranks.at("value").worst(lambda: {"from": rank}, lambda got: got["from"]),
            "clocks": len(set(ranks.at("clock").every(lambda now=ranks.now(): now))),
            "one": fails(lambda: work.each(lambda: fail((1,), "broken\nhere"))),
            "all": fails(lambda: work.each(lambda: fail((0, 1), "broken"))),
            "unlike": fails(lambda: work.each(lambda: fail((0, 1), f"broken {rank}"))),
            "plans": fails(lambda: ranks.alike("tune", seed=0, plan=("bf16-mixed", "fp32")[rank])),
        }

    def part_ways() -> None:
        with lockstep("second") as ranks:
            ranks.at(("a block", "the clock")[rank]).same(None)

    parted = fails(part_ways)
    return {**agreed, "parted": parted}


def work(rank: int, size: int, case: Case, folder: Path) -> dict[str, Any]:
    """Run a case with torchrun's environment and short races; the slow models are slow enough for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contest, "BLOCK_S", 0.01)
        short_finals(patch, 2)
        patch.setattr(time, "perf_counter", CLOCK)
        patch.setenv("RANK", str(rank))
        patch.setenv("WORLD_SIZE", str(size))
        return case(rank, folder)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World(WORLD, searches=True)
    yield world
    world.close()


@pytest.fixture
def found(world: World, tmp_path: Path) -> Callable[[Case], Found]:
    """Return a function that runs a case and returns each rank's result."""
    return lambda case: world.run(work, case, tmp_path)


def test_ranks_compare_as_many_updates(found: Callable[[Case], Found]) -> None:
    ranks = found(updates)
    assert ranks[0] == ranks[1]
    assert ranks[0]["short"] == AFTER[1] + COMPARED
    assert ranks[0]["whole"] > ranks[0]["short"]


def candidate(record: dict[str, Any], plan: str) -> dict[str, Any]:
    return next(c for c in record["candidates"] if c["plan"] == plan)


# --- results on both ranks ------------------------------------------------------------------------------------


def test_ranks_agree(found: Callable[[Case], Found]) -> None:
    first, second = found(exchanges)
    for one in (first, second):
        assert one["count"] == WORLD
        assert one["slowest"] == [2.0, 5.0]
        assert one["same"] == {"from": 0}
        assert one["worst"] == {"from": 1}
        assert one["clocks"] == 1
        place = f"(test_tune.py, line {exchanges.__code__.co_firstlineno + 5}, in fail)"
        said = f"on rank 1: ValueError: broken {place}"
        assert one["one"] == {"kind": "RankError", "text": said, "notes": []}
        assert one["all"] == {"kind": "ValueError", "text": "broken", "notes": []}
        each = [f"on rank {rank}: ValueError: broken {rank} {place}" for rank in range(WORLD)]
        assert one["unlike"]["text"] == "; ".join(each)
        assert one["plans"]["kind"] == "StateError"
        assert one["plans"]["text"] == (
            "tune: plan differs between ranks: bf16-mixed on rank 0, fp32 on rank 1; give every rank the same "
            "model, batches and arguments"
        )
        assert one["parted"]["kind"] == "StateError"
        assert one["parted"]["text"].startswith(
            "second: the ranks do not run the same steps: rank 0 at a block, rank 1 at the clock; give every rank the same"
        )


def test_both_ranks_have_the_same_plan_and_evidence(found: Callable[[Case], Found]) -> None:
    first, second = found(paced)
    assert first == second
    assert first["world_size"] == WORLD
    assert first["settings"]["world_size"] == WORLD
    assert any(note.startswith("Measured on 2 ranks at once") for note in first["notes"])
    assert candidate(first, first["plan"])["time"]["median_s"] > QUICK_S
    assert "bf16" in first["plan"]


def test_the_slower_rank_decides(found: Callable[[Case], Found]) -> None:
    first, second = found(one_is_slow)
    assert (first.pop("events") > 0, second.pop("events")) == (True, 0)  # only rank 0 reports progress
    assert first == second
    assert candidate(first, "bf16-mixed")["time"]["q1_s"] > SLOW_S  # rank 0 alone would have measured QUICK_S
    assert "bf16" not in Plan.parse(first["plan"]).compute


def test_a_candidate_that_fails_on_one_rank_fails_on_both(found: Callable[[Case], Found]) -> None:
    first, second = found(one_fails_in_the_race)
    assert first == second
    lost = candidate(first, "bf16-mixed")
    assert lost["status"] == "rejected"
    assert lost["loss"] is None  # the ranks lose the candidate at different steps
    assert lost["reason"] == "on rank 1: not supported by this device: a bf16 kernel"
    assert Plan.parse(first["plan"]).compute == "fp32"


def test_a_region_that_fails_on_one_rank_is_kept_on_both(found: Callable[[Case], Found]) -> None:
    first, second = found(one_fails_in_the_numerics)
    assert first == second
    region = next(r for r in first["regions"] if r["pattern"] == "2")
    assert region["format"] == "fp32"
    assert region["reason"] == "on rank 1: not supported by this device: no such bf16 kernel"
    assert Plan.parse(first["plan"]).compute == "bf16"


def test_an_error_on_one_rank_ends_both_in_words(found: Callable[[Case], Found]) -> None:
    first, second = found(one_fails_in_fp32)
    assert second["kind"] == "WorkloadError"
    assert " failed: ArithmeticError: the data cannot be read (test_tune.py, line " in second["text"]
    assert first["kind"] == "StateError"
    assert first["text"] == f"tune: rank 1 failed: WorkloadError: {second['text']}"


def test_an_interrupt_on_one_rank_ends_both_and_rank_0_writes(found: Callable[[Case], Found]) -> None:
    first, second = found(one_is_interrupted)
    assert (first["kind"], second["kind"]) == ("KeyboardInterrupt", "KeyboardInterrupt")
    assert first["text"] == "rank 1 was interrupted"
    assert (first["wrote"], second["wrote"]) == (True, False)
    assert first["notes"][0].startswith("The results so far were written to")
    assert second["notes"] == []


def test_ranks_that_ask_for_different_things(found: Callable[[Case], Found]) -> None:
    for one in found(unlike_arguments):
        assert one["kind"] == "StateError"
        assert one["text"] == (
            "tune: seed differs between ranks: 0 on rank 0, 1 on rank 1; give every rank the same model, batches and "
            "arguments"
        )
    first, second = found(a_refused_argument)
    assert second["text"] == "tune(accumulate=0): needs a whole number >= 1"
    assert first["text"] == f"tune: rank 1 failed: PlanError: {second['text']}"


def test_the_larger_peak_counts(found: Callable[[Case], Found]) -> None:
    first, second = found(memory)
    assert first == second
    assert first["notes"] == []
    assert 4 << 20 < first["peak"] < 5 << 20


def test_a_workload_that_stays_on_one_rank_stays_on_all_whatever_each_says(
    found: Callable[[Case], Found],
) -> None:
    """All ranks report one rank's message, because an object's address differs between ranks."""
    first, second = found(cannot_leave)
    assert first == second
    assert "cannot be sent to another process" in first["said"]


def test_nothing_is_exchanged_by_a_process_alone() -> None:
    with lockstep("alone") as ranks:
        assert (ranks.size, ranks.rank) == (1, 0)
        assert ranks.slowest(lambda: [1.0]) == [1.0]
        assert ranks.now() <= time.monotonic()


def test_the_command_on_two_ranks(tmp_path: Path) -> None:
    """The command prints one table, writes one set of files and returns exit code 0."""
    words = (f"{TINY}:plain", "--goal", "numerics", "--device", "cpu", "--no-memory", "--out", "out")
    ranks = command(tmp_path, WORLD, "tune", *words)
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].said("err")
    assert "".join(rank.said("out") for rank in ranks).count("\nWrote out/report.html and ") == 1
    record = json.loads((tmp_path / "out" / "evidence.json").read_text())
    assert record["world_size"] == WORLD
    assert Plan.load(tmp_path / "out" / "plan.json").digest == record["digest"]


def test_a_served_model_gets_a_plan_that_is_sound_on_every_rank(found: Callable[[Case], Found]) -> None:
    first, second = found(served)
    assert first == second
    verdicts = {c["plan"]: c["parity"]["verdict"] for c in first["candidates"] if c["parity"]}
    assert verdicts["bf16-mixed"] == "fail"
    assert first["plan"] != "bf16-mixed"


def test_single_calls_are_timed_on_all_ranks_at_once(found: Callable[[Case], Found]) -> None:
    first, second = found(served_elsewhere)
    assert first == second
    assert {latency["batch_size"] for latency in first["latencies"]} == {4}


def test_a_served_model_that_fails_on_one_rank_fails_on_both(found: Callable[[Case], Found]) -> None:
    first, second = found(served_fails)
    assert first["kind"] != "nothing"
    assert second["kind"] != "nothing"
    assert "rank 1" in first["text"]
    assert "the data" in first["text"]
    assert "the data" in second["text"]
