"""Results of earlier searches are reused for the same job and never for another."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import random
import sys
import types
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import castwise
from castwise import Plan, Workload
from castwise.commands.jobs import tune as jobs_tune
from castwise.lab.search import index
from castwise.lab.search.axes import AUTOCAST, FP32
from castwise.lab.search.context import Context, Settings
from castwise.lab.search.decision import Decision
from castwise.lab.search.fastest import with_plans_from_elsewhere
from castwise.lab.search.final import Final
from castwise.lab.search.index import find, job_of, keep, restored
from castwise.lab.search.search import run
from castwise.lab.search.state import Search
from castwise.lab.timing.processes import Home
from tests.here import DEVICE
from tests.lab.search.test_choices import CPU
from tests.report.evidence import make_candidate, make_evidence

SETTINGS = Settings(goal="numerics", formats=("bf16",))
WIDE = 8


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CASTWISE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "plans"


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    while True:
        yield (
            torch.randn(16, WIDE, generator=generator, device=DEVICE),
            torch.randn(16, 2, generator=generator, device=DEVICE),
        )


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


JOB = Workload(
    "job",
    model=lambda: nn.Sequential(nn.Linear(WIDE, 16), nn.Tanh(), nn.Linear(16, 2)),
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
    batches=batches,
    loss=loss,
)


def tuned(workload: Workload = JOB, **options: Any) -> castwise.TuneResult:
    return castwise.tune(workload, goal="numerics", formats=("bf16",), device=DEVICE, memory=False, **options)


def test_the_same_job_is_answered_at_once_with_all_that_was_measured() -> None:
    first, again = tuned(), tuned()
    assert again.plan == first.plan
    assert again.plan.provenance == first.plan.provenance
    note, *notes = again.evidence.notes
    assert note.startswith(f"Found on {first.evidence.environment.date[:10]}")
    assert "--fresh" in note
    assert dataclasses.replace(again.evidence, notes=tuple(notes)) == first.evidence
    assert tuned(fresh=True).evidence.notes == first.evidence.notes


@pytest.mark.cpu  # only work on a CPU uses the host's heap
def test_an_answer_is_for_the_heap_that_it_was_found_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan keeps memory only if the heap returns freed memory to the system, so the heap's settings matter."""
    first = tuned()
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "0")
    assert not any("nothing was measured again" in note for note in tuned().evidence.notes)
    monkeypatch.delenv("MALLOC_MMAP_MAX_")
    assert any("nothing was measured again" in note for note in tuned().evidence.notes)
    assert first.evidence.complete


def test_what_was_found_before_can_be_saved_and_shown(tmp_path: Path) -> None:
    tuned()
    again = tuned()
    page, *_ = again.save(tmp_path / "again")
    assert "nothing was measured again" in page.read_text()
    assert again.table() is not None


OTHERS: dict[str, dict[str, Any]] = {
    "another model": {"model": lambda: nn.Sequential(nn.Linear(WIDE, 16), nn.ReLU(), nn.Linear(16, 2))},
    "another optimizer": {"optimizer": lambda params: torch.optim.SGD(params, lr=1e-3)},
    "another rate": {"optimizer": lambda params: torch.optim.Adam(params, lr=1e-2)},
    "another loss": {"loss": lambda model, batch: loss(model, batch) * 2.0},
    "other data": {"batches": lambda seed: ((x * 3.0, y) for x, y in batches(seed))},
    "other shapes": {"batches": lambda seed: ((x[:8], y[:8]) for x, y in batches(seed))},
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_job_is_searched(what: str) -> None:
    known = job_of(JOB, CPU, SETTINGS)
    other = job_of(dataclasses.replace(JOB, **OTHERS[what]), CPU, SETTINGS)
    assert known is not None
    assert other is not None
    assert other.digest != known.digest or not other.is_like(dataclasses.asdict(known))
    keep(known, CPU, Plan.preset("bf16-mixed"), {})
    assert find(other, CPU, SETTINGS) == (None, [])


class Holds(nn.Module):
    """A model that holds values besides its parameters."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.layer, self.held = nn.Linear(WIDE, 2), held

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Slotted:
    __slots__ = ("eps",)

    def __init__(self, eps: float) -> None:
        self.eps = eps


@dataclasses.dataclass(slots=True)
class SlottedData(Slotted):
    more: int = 0


def decorated(by: float) -> Callable[[Tensor], Tensor]:
    """Return a function that a library's decorator wraps."""
    return torch.enable_grad()(lambda x: x + by)


def of_static_methods(by: float) -> type:
    """Return a function with a backward of its own, whose class has only static methods."""

    class Adds(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x + by

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad

    return Adds


def hooked(by: float) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        made = JOB.model()
        made.register_forward_hook(lambda module, args, output: output + 0.0 * by)
        return made

    return make


def one(x: Tensor) -> Tensor:
    return x


def two(x: Tensor) -> Tensor:
    return x * 1


class Configuration:
    def __init__(self, eps: float) -> None:
        self.eps = eps


HELD: dict[str, tuple[Any, Any]] = {
    "a number": (1e-6, 1e-9),
    "a dictionary of lists": ({"a": [1, 2]}, {"a": [1, 3]}),
    "a namespace": (types.SimpleNamespace(eps=1e-6), types.SimpleNamespace(eps=1e-9)),
    "an object": (Configuration(1e-6), Configuration(1e-9)),
    "a function": (lambda x: x, lambda x: x + 1),
    "an array": (np.ones(2), np.zeros(2)),
    "an object with slots": (Slotted(1e-6), Slotted(1e-9)),
    "a dataclass with slots": (SlottedData(1), SlottedData(2)),
    "a function in a library's decorator": (decorated(1.0), decorated(2.0)),
    "a class of static methods": (of_static_methods(1.0), of_static_methods(2.0)),
    "functions in another order": ([one, two, one], [one, two, two]),
    "a meta tensor beside another": (torch.ones(2, device="meta"), torch.ones(3, device="meta")),
    "a tensor in a closure": ((lambda t: lambda: t)(torch.ones(3)), (lambda t: lambda: t)(torch.zeros(3))),
    "a partial": (functools.partial(torch.add, alpha=1), functools.partial(torch.add, alpha=2)),
}


@pytest.mark.parametrize("what", HELD)
def test_a_model_that_holds_another_value_is_searched(what: str) -> None:
    """Even if one pass in fp32 does not show it."""
    jobs = [
        job_of(dataclasses.replace(JOB, model=lambda one=one: Holds(one)), CPU, SETTINGS)
        for one in HELD[what]
    ]
    assert jobs[0] is not None
    assert jobs[1] is not None
    kept(jobs[0], SETTINGS)
    assert find(jobs[0], CPU, SETTINGS)[0] is not None
    assert find(jobs[1], CPU, SETTINGS)[0] is None


def test_a_model_with_another_hook_is_searched() -> None:
    jobs = [job_of(dataclasses.replace(JOB, model=hooked(by)), CPU, SETTINGS) for by in (1.0, 1.0, 2.0)]
    assert all(jobs)
    assert jobs[0] == jobs[1] != jobs[2]


def test_what_acts_in_a_low_format_alone_is_searched_wherever_its_code_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here an environment variable decides, which no digest of code holds."""

    def offset(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        output = model(batch[0])
        output = output.float() if os.environ["WIDE"] == "yes" else output
        return nn.functional.mse_loss(((output + 1000.0) - 1000.0).float(), batch[1])

    found: dict[tuple[str, str], index.Job | None] = {}
    for goal in ("numerics", "inference"):
        job = dataclasses.replace(JOB, loss=offset, outputs=lambda model, batch: offset(model, batch))
        for wide in ("yes", "no"):
            monkeypatch.setenv("WIDE", wide)
            found[goal, wide] = job_of(job, CPU, dataclasses.replace(SETTINGS, goal=goal))
        one, other = found[goal, "yes"], found[goal, "no"]
        assert one is not None
        assert other is not None
        assert one.low != other.low
        assert (one.digest, one.loss, one.norm, one.data) == (
            other.digest,
            other.loss,
            other.norm,
            other.data,
        )


@pytest.mark.parametrize("number", [1, 7, 31])
def test_other_data_in_a_later_batch_is_searched(number: int) -> None:
    def others(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        for at, (x, y) in enumerate(batches(seed)):
            yield (3e4 * x if at == number else x), y

    known, other = job_of(JOB, CPU, SETTINGS), job_of(dataclasses.replace(JOB, batches=others), CPU, SETTINGS)
    assert known is not None
    assert other is not None
    assert (other.digest, other.loss) == (known.digest, known.loss)
    assert other.data != known.data


def test_a_last_bit_of_the_loss_is_enough_for_another_search() -> None:
    """An offset that is added and subtracted again changes no more in fp32, and everything in bf16."""

    def shifted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss((model(batch[0]) + OFFSET) - OFFSET, batch[1])

    jobs = []
    for globals()["OFFSET"] in (0.0, 2000.0):
        jobs.append(job_of(dataclasses.replace(JOB, loss=shifted), CPU, SETTINGS))
    assert jobs[0] is not None
    assert jobs[1] is not None
    assert jobs[1].loss == pytest.approx(jobs[0].loss, rel=1e-3)
    assert jobs[1].loss != jobs[0].loss


OFFSET = 0.0


def test_a_loss_that_draws_is_known_again() -> None:
    drawing = dataclasses.replace(JOB, loss=lambda model, batch: loss(model, batch) * (1.0 + random.random()))
    jobs = []
    for seed in (1, 2):  # processes start with different seeds
        random.seed(seed)
        jobs.append(job_of(drawing, CPU, SETTINGS))
    assert jobs[0] == jobs[1] is not None


def test_what_was_asked_tells_jobs_apart_but_not_for_how_long() -> None:
    known = job_of(JOB, CPU, SETTINGS)
    assert known == job_of(JOB, CPU, dataclasses.replace(SETTINGS, budget_s=30.0, memory=False))
    for change in ({"accumulate": 2}, {"goal": "time"}, {"formats": ("fp16",)}, {"warmup_steps": 1}):
        other = job_of(JOB, CPU, dataclasses.replace(SETTINGS, **change))
        assert other is not None
        assert known is not None
        assert other.digest != known.digest, change


def test_a_plan_from_another_device_is_a_candidate_and_no_answer(cache: Path) -> None:
    job = job_of(JOB, CPU, Settings(formats=("fp32", "bf16")))
    assert job is not None
    plan = dataclasses.replace(Plan.parse("bf16-mixed+regions.2=fp32"), provenance={"device": "another"})
    keep(job, CPU, plan, {})
    (path,) = cache.glob("*.json")
    entry = json.loads(path.read_text())
    entry["place"]["device"] = "another"
    path.write_text(json.dumps(entry))
    plan = dataclasses.replace(plan, provenance=None)
    assert find(job, CPU, SETTINGS) == (None, [plan])
    search = Search(
        Context(JOB, CPU, Settings(formats=("fp32", "bf16")), elsewhere=[plan, Plan.preset("fp16-mixed")])
    )
    assert with_plans_from_elsewhere(search, [FP32, AUTOCAST]) == [plan, FP32, AUTOCAST]


@pytest.mark.parametrize("harm", ["", "{", "[]", '{"job": 1}', "[" * 200_000, None])
def test_a_file_that_cannot_be_read_is_as_if_it_were_not_there(cache: Path, harm: str | None) -> None:
    job = job_of(JOB, CPU, SETTINGS)
    assert job is not None
    kept(job, SETTINGS)
    (path,) = cache.glob("*.json")
    assert find(job, CPU, SETTINGS)[0] is not None
    entry = json.loads(path.read_text())
    del entry["found"][1]["environment"]
    path.write_text(json.dumps(entry) if harm is None else harm)
    assert find(job, CPU, SETTINGS) == (None, [])


def entry_of(cache: Path) -> tuple[index.Job, Path]:
    job = job_of(JOB, CPU, SETTINGS)
    assert job is not None
    kept(job, SETTINGS)
    (path,) = cache.glob("*.json")
    assert find(job, CPU, SETTINGS)[0] is not None
    return job, path


FOREIGN: dict[str, Callable[[Path], object]] = {
    "a file of another user": lambda path: os.chown(path, 54321, -1),
    "a folder of another user": lambda path: os.chown(path.parent, 54321, -1),
    "a file that its group can write": lambda path: path.chmod(0o664),
    "a file that all can write": lambda path: path.chmod(0o646),
    "a folder that its group can write": lambda path: path.parent.chmod(0o770),
    "a folder that all can write": lambda path: path.parent.chmod(0o1777),
    "a link": lambda path: path.symlink_to(path.rename(path.with_suffix(".moved"))),
    "a link to nothing": lambda path: (path.unlink(), path.symlink_to("nowhere")),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a link to the folder of another user": lambda path: (
        path.parent.rename(path.parent.with_name("theirs")),
        os.chown(path.parent.with_name("theirs"), 54321, -1),
        path.parent.symlink_to("theirs"),
    ),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_what_somebody_else_can_have_written_is_passed_over(cache: Path, what: str) -> None:
    job, path = entry_of(cache)
    if "another user" in what and os.getuid() != 0:
        pytest.skip("only root can change the owner of a file")
    FOREIGN[what](path)
    assert find(job, CPU, SETTINGS) == (None, [])


def test_another_user_passes_over_what_this_one_wrote_and_roots_is_everybodys(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, path = entry_of(cache)
    by_root = path.stat().st_uid == 0
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    assert (find(job, CPU, SETTINGS)[0] is not None) is by_root


def test_the_folder_is_this_users_alone(cache: Path) -> None:
    """A folder made with a loose umask is closed to others; a symbolic link at the file's path is not followed."""
    old = os.umask(0)
    try:
        cache.mkdir(parents=True)
        job, path = entry_of(cache)
    finally:
        os.umask(old)
    assert cache.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600
    victim = cache.parent / "victim"
    victim.write_text("untouched")
    path.with_suffix(f".{os.getpid()}.partial").symlink_to(victim)
    kept(job, SETTINGS)
    assert victim.read_text() == "untouched"
    assert find(job, CPU, SETTINGS)[0] is not None


@pytest.mark.parametrize("what", ["plan", "evidence"])
def test_an_answer_that_was_edited_is_as_if_it_were_not_there(cache: Path, what: str) -> None:
    """An edited entry is ignored, because its plan and its evidence name different plans."""
    job = job_of(JOB, CPU, SETTINGS)
    assert job is not None
    kept(job, SETTINGS)
    (path,) = cache.glob("*.json")
    entry = json.loads(path.read_text())
    if what == "plan":
        entry["found"][0] = Plan.preset("fp16-mixed").to_json()
    else:
        entry["found"][1]["plan"] = "fp16-mixed"
    path.write_text(json.dumps(entry))
    assert find(job, CPU, SETTINGS) == (None, [])


def kept(job: index.Job, asked: Settings, **found: Any) -> None:
    """Store a result as a search with these settings does."""
    made = make_evidence(settings=dataclasses.asdict(asked), **found)
    plan = Plan.preset("bf16-mixed")
    keep(job, CPU, plan, castwise.TuneResult(plan, made).to_dict())


PEAKS = (make_candidate("fp32", 0.1, "baseline", peak_bytes=1 << 20),)
TIMED = Settings(formats=("bf16",), budget_s=30.0)
SAID = Final(
    [FP32, AUTOCAST], times_s=[[[1.0, 1.1, 1.2]], [[1.3, 0.9, 0.8]]], decision=Decision(0, decided=False)
)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"budget_s": 60.0}, {"undecided": (SAID.doubt(FP32),)}),
        ({"budget_s": 60.0}, {"candidates": (*PEAKS, make_candidate("bf16", 0.1, late=True))}),
        ({"budget_s": 60.0}, {"candidates": ()}),
        ({"memory": True}, {"settings": {"memory": False}}),
        ({"verify_steps": 50, "verify_seeds": 20}, {"settings": {"verify_steps": 50}}),
    ],
    ids=["not decided", "something left out", "no time for peaks", "no peaks", "fewer pairs"],
)  # fmt: skip
def test_an_answer_that_knows_less_than_is_asked_now_is_a_candidate_alone(
    asked: dict[str, Any], found: dict[str, Any]
) -> None:
    known = {"candidates": PEAKS, "notes": (), **found}
    before = dataclasses.replace(TIMED, **known.pop("settings", {}))
    job = job_of(JOB, CPU, before)
    assert job is not None
    kept(job, before, **known)
    for less in (
        before,
        dataclasses.replace(before, budget_s=10.0),
        dataclasses.replace(before, memory=False),
    ):
        assert find(job, CPU, less)[0] is not None
    assert find(job, CPU, dataclasses.replace(before, **asked)) == (None, [Plan.preset("bf16-mixed")])


def test_an_answer_that_lacked_no_time_serves_longer_budgets_too() -> None:
    job = job_of(JOB, CPU, TIMED)
    assert job is not None
    kept(job, TIMED, candidates=PEAKS, notes=())
    assert find(job, CPU, dataclasses.replace(TIMED, budget_s=600.0))[0] is not None


SCALE = 2.0


def helper(x: Tensor) -> Tensor:
    return x * SCALE


class Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return helper(super().forward(x))


class Rewritten(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * SCALE


Rewritten.__qualname__ = Rewritten.__name__ = "Layer"


def by_linear(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return loss(model, batch)


def by_switch(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Compute the loss in one of two ways, chosen by an environment variable."""
    out = model(batch[0])
    error = out - batch[1]
    return (error * error).mean() if os.environ.get("BY_HAND") else error.square().mean()


LAYERED = dataclasses.replace(JOB, model=lambda: Layer(WIDE, 2), loss=by_linear)
EDITS: dict[str, Callable[[pytest.MonkeyPatch], Workload]] = {
    "forward": lambda _: dataclasses.replace(LAYERED, model=lambda: Rewritten(WIDE, 2)),
    "loss": lambda _: dataclasses.replace(
        LAYERED, loss=lambda model, batch: (loss(model, batch) * 4.0) / 4.0
    ),
    "helper": lambda patch: patch.setattr(helper, "__code__", (lambda x: SCALE * x).__code__) or LAYERED,
    "constant": lambda patch: patch.setattr(sys.modules[__name__], "SCALE", 2.0000001) or LAYERED,
    "optimizer": lambda _: dataclasses.replace(LAYERED, optimizer=Own),
}


class Own(torch.optim.Adam):
    """Adam with a ``step`` of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-3)

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


Own.__qualname__ = "Adam"


@pytest.mark.parametrize("what", EDITS)
def test_other_code_for_the_same_numbers_is_searched_from_the_plan_of_before(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    before = job_of(LAYERED, CPU, SETTINGS)
    assert before == job_of(LAYERED, CPU, SETTINGS)
    after = job_of(EDITS[what](monkeypatch), CPU, SETTINGS)
    assert before is not None
    assert after is not None
    assert (after.digest, after.loss) == (before.digest, pytest.approx(before.loss))
    assert after.code != before.code
    kept(before, SETTINGS)
    assert find(after, CPU, SETTINGS) == (None, [Plan.preset("bf16-mixed")])
    assert find(before, CPU, SETTINGS)[0] is not None


def test_what_runs_counts_where_the_code_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    made = dataclasses.replace(JOB, loss=by_switch)
    before = job_of(made, CPU, SETTINGS)
    monkeypatch.setenv("BY_HAND", "1")
    after = job_of(made, CPU, SETTINGS)
    assert before is not None
    assert after is not None
    assert after.digest == before.digest
    assert after.code != before.code


def test_a_digest_of_code_is_the_same_in_another_process(tmp_path: Path) -> None:
    """The first process compiles the file, the second reads the bytecode; sets have another order there."""
    (tmp_path / "job.py").write_text(SCRIPT)
    with Home() as home:
        found = []
        for _ in range(2):
            process = home.start(there, str(tmp_path))
            found.append(process.answer(60.0))
            process.close()
    assert found[0] == found[1]


def there(_pipe: Connection, folder: str) -> index.Job | None:
    sys.path.insert(0, folder)
    import job  # type: ignore[import-not-found]

    return job_of(job.workload, CPU, SETTINGS)


SCRIPT = """
import torch
from castwise import Workload

NAMES = {"a", "b", "c", "d"}

class Net(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * (len(NAMES) if "e" not in {"a", "b", "c"} else 1)

def batches(seed):
    while True:
        yield torch.ones(2, 3)

workload = Workload("w", lambda: Net(3, 1), lambda p: torch.optim.SGD(p, lr=0.1), batches, lambda m, b: m(b).mean())
"""


def make_evidence_record() -> dict[str, Any]:
    return castwise.TuneResult(Plan.preset("bf16-mixed"), make_evidence()).to_dict()


def test_a_record_comes_back_as_it_was_but_for_numbers_that_json_has_not() -> None:
    record = make_evidence()
    assert castwise.TuneResult(Plan.preset("fp32"), restored(type(record), make_evidence_record())).to_dict() == (
        castwise.TuneResult(Plan.preset("fp32"), record).to_dict()
    )  # fmt: skip


def test_a_search_without_an_end_is_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(search: Search) -> None:
        run(search)
        search.complete = False

    monkeypatch.setattr(jobs_tune, "run", endless)
    tuned()
    assert not list(cache.glob("*"))


def test_an_empty_variable_turns_it_off_and_a_folder_that_cannot_be_made_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    job = job_of(JOB, CPU, SETTINGS)
    assert job is not None
    monkeypatch.setenv("CASTWISE_CACHE_DIR", str(tmp_path / "file"))
    keep(job, CPU, AUTOCAST, {})
    assert find(job, CPU, SETTINGS) == (None, [])
    monkeypatch.setenv("CASTWISE_CACHE_DIR", "")
    assert index.folder() is None
    keep(job, CPU, AUTOCAST, {})
    assert find(job, CPU, SETTINGS) == (None, [])


def test_a_job_that_fails_is_left_to_its_search() -> None:
    def broken(_model: nn.Module, _batch: Any) -> Tensor:
        raise KeyError("planted")

    assert job_of(dataclasses.replace(JOB, loss=broken), CPU, SETTINGS) is None
