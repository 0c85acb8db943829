"""``tune`` as users call it: its result, the state it must not change, and the input it refuses."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tests.here import DEVICE
from tests.searches import short_finals
from tests.soak import each_value
from torch import Tensor, nn
from torch.nn import functional

import castwise
from castwise import Plan, Workload
from castwise.commands.jobs import Event
from castwise.core import _torch
from castwise.errors import CastwiseError, NonFiniteError, PlanError, StateError, WorkloadError


@pytest.fixture(autouse=True, scope="module")
def one_start() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        short_finals(patch)
        yield


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4))


def data(count: int = 20) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    return [
        (torch.randn(16, 16, generator=generator), torch.randint(4, (16,), generator=generator))
        for _ in range(count)
    ]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def tune(model: nn.Module | None = None, **options: Any) -> castwise.TuneResult:
    given: dict[str, Any] = {
        "model": network() if model is None else model, "loss": loss, "batches": data(), "optimizer": adamw,
        "memory": False, "budget_s": 20, "formats": ("fp32", "bf16"),
    }  # fmt: skip
    return castwise.tune(**{**given, **options})


@pytest.fixture(scope="module")
def result() -> castwise.TuneResult:
    """Return the result of a search called as by users; check that it compiles nothing."""
    before = torch._dynamo.utils.counters["frames"]["total"]
    found = tune()
    assert torch._dynamo.utils.counters["frames"]["total"] == before
    return found


def test_the_plan_loads_and_trains_and_every_other_has_its_reason(
    result: castwise.TuneResult, tmp_path: Path
) -> None:
    assert result.answer == result.evidence.answer
    paths = result.save(tmp_path)
    assert [p.name for p in paths[:3]] == ["report.html", "plan.json", "evidence.json"]
    assert Plan.load(tmp_path / "plan.json") == result.plan
    record = json.loads((tmp_path / "evidence.json").read_text())
    assert record["plan"] == str(result.plan)
    assert record["complete"] is True
    assert record["passes"] <= 120
    assert {s["name"] for s in record["stages"]} >= {
        "reference",
        "costs",
        "race",
        "parity",
        "final",
        *(["verification"] if result.plan.compute != "fp32" else []),
    }
    statuses = [c["status"] for c in record["candidates"]]
    assert statuses.count("baseline") == 1 or record["plan"] == "fp32"
    assert all(c["reason"] for c in record["candidates"] if c["status"] == "rejected")
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with castwise.Amp(Plan.load(tmp_path / "plan.json"), device=DEVICE) as amp:
        amp.prepare(model, optimizer)
        losses = []
        for batch in data(4) * 6:
            losses.append(loss(model, batch))
            amp.backward(losses[-1])
            assert not amp.step(optimizer).skipped
            optimizer.zero_grad()
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])


@pytest.mark.parametrize("end", ["returns", "fails", "is interrupted"])
def test_nothing_is_left_behind(end: str, tmp_path: Path) -> None:
    """Model, random states and settings are restored, and further training is bitwise the same as without a search."""
    count = itertools.count()

    def watched(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        number = next(count)
        if number == 60 and end == "fails":
            raise ArithmeticError("the loss fails now and then")
        if number == 60 and end == "is interrupted":
            raise KeyboardInterrupt
        return loss(model, batch)

    model, untouched = network(), network()
    model[1].eval()
    untouched[1].eval()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    precision = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    if end == "is interrupted":
        with pytest.raises(KeyboardInterrupt) as caught:
            tune(model, loss=watched, out=tmp_path)
        assert "The results so far were written to" in caught.value.__notes__[0]
        record = json.loads((tmp_path / "evidence.json").read_text())
        assert record["complete"] is False
        assert (tmp_path / "report.html").exists()
    else:
        # A failure under another plan rejects that plan; a failure in fp32 ends the search.
        try:
            tune(model, loss=watched)
        except WorkloadError:
            assert end == "fails"
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()
    assert torch.backends.mkldnn.matmul.fp32_precision == precision  # type: ignore[attr-defined]
    assert [m.training for m in model] == [True, False, True, True, True]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert castwise.Amp.of(model) is None

    def train(trained: nn.Module) -> list[Tensor]:
        torch.manual_seed(9)
        optimizer = adamw(trained.parameters())
        for batch in data(4):
            loss(trained, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [copy.deepcopy(t) for t in trained.state_dict().values()]

    assert all(torch.equal(a, b) for a, b in zip(train(model), train(untouched), strict=True))


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_numerics_alone(low: str) -> None:
    class Offset(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 8000.0) - 8000.0

    sound = tune(goal="numerics", formats=(low,))
    assert sound.plan.compute == low
    assert sound.plan.regions == ()
    assert sound.answer == (
        f"{low} needs no region in fp32: its gradients cannot be distinguished from fp32's within the noise of the data."
    )
    model = network()
    model.insert(3, Offset())
    repaired = tune(model, goal="numerics", formats=(low,))
    assert [(r.pattern, r.compute) for r in repaired.plan.regions] == [("3", "fp32")]
    assert "sound with 1 region kept in fp32 (3)" in repaired.answer
    assert next(r for r in repaired.evidence.regions if r.pattern == "3").reason


def test_fp32_is_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The answer claims nothing that was not measured; files and progress are the same as on the command line."""
    result = tune(
        formats=("fp32",), optimizer=lambda params: torch.optim.RMSprop(params, lr=1e-3), out=tmp_path / "new", progress=True
    )  # fmt: skip
    assert result.plan == Plan.preset("fp32")
    assert result.answer == "Stay in fp32 as it is: no other plan was timed to the end."
    rows = {c.plan: c for c in result.evidence.candidates}
    assert rows["fp32"].reason == "no other plan was timed to the end"
    assert (rows["bf16-mixed"].status, rows["bf16-mixed"].reason) == (
        "not tried", "bf16 is not among the formats that were asked for",
    )  # fmt: skip
    assert [path.name for path in result.files[:3]] == ["report.html", "plan.json", "evidence.json"]
    assert sorted(result.files) == sorted((tmp_path / "new").iterdir())
    shown = capsys.readouterr()
    assert {"reference", "race", "final"} <= set(shown.err.split())
    assert not shown.out


def test_training_runs() -> None:
    result = tune(goal="numerics", formats=("bf16",), verify_steps=10, verify_seeds=2)
    assert result.evidence.verification is not None
    assert result.evidence.verification.seeds == 2


def test_the_lightest_plan_is_chosen_among_the_sound_and_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        _torch.cpu, "cpu_has_bf16", lambda: True
    )  # otherwise bf16 is ruled out on CPUs without it
    # A lambda keeps the workload in this process, so memory is measured in forks, which start quickly.
    made = Workload(
        "wide", wide, lambda params: torch.optim.AdamW(params, lr=1e-2), lambda seed: wide_batches(seed), loss
    )
    result = castwise.tune(
        made, goal="memory", formats=("fp32", "bf16"), device=DEVICE, budget_s=50, warmup_steps=5
    )
    peaks = {c.plan: c.peak_bytes for c in result.evidence.candidates if c.peak_bytes is not None}
    assert len(peaks) >= 3
    # on a busy machine there may be no time to train a plan without masters; autocast saves memory, too
    sound = [
        c for c in result.evidence.candidates if c.status not in ("rejected", "not tried") and c.peak_bytes
    ]
    chosen = next(c for c in sound if c.plan == str(result.plan))
    assert chosen.peak_bytes is not None
    assert chosen.peak_bytes <= 1.02 * min(c.peak_bytes or 0 for c in sound)
    assert chosen.peak_bytes < peaks["fp32"]
    assert any(note.startswith("The gradient test after 5 fp32 steps: ") for note in result.evidence.notes)


def wide() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 4))


def wide_batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield learnable batches, so the loss falls enough for training runs to decide on a plan without masters.

    They are large, so that activations take more memory than weights.
    """
    generator = torch.Generator(DEVICE).manual_seed(seed)
    while True:
        x = torch.randn(256, 16, generator=generator)
        yield x, x[:, :4].argmax(1)


def test_one_batch_repeated_is_said() -> None:
    result = tune(batches=data(1), goal="numerics", formats=("bf16",))
    assert any(note.startswith("Every batch is the same") for note in result.evidence.notes)


def test_a_loss_that_is_not_deterministic_is_said() -> None:
    restless = random.Random(0)
    result = tune(loss=lambda m, b: loss(m, b) * (1 + restless.random()), goal="numerics", formats=("bf16",))
    assert any(note.startswith("The loss is not deterministic") for note in result.evidence.notes)
    assert result.plan == Plan.preset("fp32")


def _nan(batches: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    return [(x * float("nan"), y) for x, y in batches]


OTHER = network()
REFUSED: dict[str, tuple[dict[str, Any], type[CastwiseError], str]] = {
    "goal": ({"goal": "speed"}, PlanError, "tune(goal='speed') is not allowed. Allowed: time, memory, numerics, inference."),
    "compile": ({"compile": "maybe"}, PlanError, "tune(compile='maybe') is not allowed. Allowed: never, auto, always."),
    "compile for memory": (
        {"compile": "auto", "goal": "memory"}, PlanError, "tune(compile='auto', goal='memory'): whether to compile is decided by time",
    ),
    "format": ({"formats": ("fp8",)}, PlanError, "tune(formats=('fp8',)): 'fp8' is not one of fp32, tf32, bf16, fp16"),
    "two formats": (
        {"goal": "numerics", "formats": ("bf16", "fp16")}, PlanError, "give the one low format that the model is to run in",
    ),
    "accumulate": ({"accumulate": 0}, PlanError, "tune(accumulate=0): needs a whole number >= 1"),
    "verify_steps": ({"verify_steps": 2}, PlanError, "tune(verify_steps=2): needs 0 or at least 5 steps"),
    "no time": ({"budget_s": 1}, StateError, "tune(budget_s=1): too short; a search needs at least 5 s"),
    "no budget": ({"budget_s": 0}, PlanError, "tune(budget_s=0): needs a positive number of seconds"),
    "class": ({"model": nn.Linear}, WorkloadError, "tune(model=type): give the torch.nn.Module itself"),
    "optimizer": (
        {"optimizer": adamw(network().parameters())}, WorkloadError,
        "optimizer must be a function, such as lambda params: torch.optim.AdamW(params, lr=1e-3), got AdamW",
    ),
    "progress": ({"progress": "yes"}, PlanError, "progress='yes': needs True, False, None or a function that takes an Event"),
    "missing": ({"loss": None}, WorkloadError, "tune(): loss is missing; give model=, loss=, batches= and optimizer="),
    "both": ({"workload": "digits"}, WorkloadError, "tune(workload, model=...): give a workload or its parts, not both"),
    "iterator": ({"batches": iter(data())}, WorkloadError, "tune: batches is an iterator (list_iterator), which can be"),
    "empty": ({"batches": []}, WorkloadError, "tune: batches is empty; give at least one batch"),
    "detached": (
        {"loss": lambda m, b: loss(m, b).detach()}, WorkloadError, "returned a tensor without a graph, so the loss is not",
    ),
    "another model": (
        {"loss": lambda _m, b: loss(OTHER, b)}, WorkloadError, "no parameter of the model has a gradient; the loss must call",
    ),
    "NaN": ({"batches": _nan(data())}, NonFiniteError, "is not finite in fp32 already, so no plan can be compared: its data"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    options, kind, text = REFUSED[name]
    with pytest.raises(kind) as caught:
        tune(**options)
    assert text in str(caught.value)


def test_batches_of_a_workload_that_run_out() -> None:
    def few(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        yield from data(5)

    made = Workload("short", network, adamw, few, loss)
    with pytest.raises(WorkloadError, match=r"^tune\('short'\): batches ended after 5; the test needs 8"):
        castwise.tune(made, memory=False)


def test_a_module_is_no_workload() -> None:
    call: Callable[..., Any] = castwise.tune
    with pytest.raises(
        WorkloadError, match=r"^tune\(Sequential\): give a castwise.Workload, .* pass a module as model="
    ):
        call(network())


@pytest.mark.parametrize("after", [0, 60])
def test_a_search_that_fails_writes_what_was_known(after: int, tmp_path: Path) -> None:
    count = itertools.count()

    def fails(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if next(count) >= after and model.training:
            raise LookupError("planted")
        return loss(model, batch)

    with pytest.raises(WorkloadError, match="LookupError: planted") as caught:
        tune(loss=fails, out=tmp_path)
    notes = " ".join(getattr(caught.value, "__notes__", []))
    assert ("The results so far were written to" in notes) == (after > 0)
    assert (tmp_path / "evidence.json").exists() == (after > 0)
    if after:
        assert json.loads((tmp_path / "evidence.json").read_text())["complete"] is False


@pytest.mark.parametrize("stage", ["reference", "race"])
def test_what_progress_raises_comes_out_as_it_is(stage: str, tmp_path: Path) -> None:
    def breaks(event: Event) -> None:
        if event.stage == stage:
            raise RuntimeError("bar broke")

    with pytest.raises(RuntimeError, match="bar broke") as caught:
        tune(progress=breaks, out=tmp_path)
    assert not isinstance(caught.value, CastwiseError)
    assert caught.traceback[-1].name == "breaks"
    assert (
        (tmp_path / "plan.json").exists() == (stage == "race") == bool(getattr(caught.value, "__notes__", []))
    )


@pytest.mark.parametrize("where", ["file", "file/within"])
def test_a_place_that_is_no_folder_is_refused_in_a_sentence(where: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(PlanError, match=r"tune\(out=\): .*'.*file.*'; give a writable folder"):
        tune(out=tmp_path / where)
    assert (tmp_path / "file").read_text() == "mine"


class Loader:
    """A loader whose iterators hold a resource while they live, like a DataLoader with workers."""

    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    given: ClassVar[list[weakref.ref[Tensor]]] = []

    def __init__(self) -> None:
        Loader.alive.add(self)
        self._data = iter(data(200))

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        batch = next(self._data)
        Loader.given.append(weakref.ref(batch[0]))
        return batch


class Loading:
    def __iter__(self) -> Loader:
        return Loader()


@each_value()
@pytest.mark.parametrize("end", ["returns", "fails"])
@pytest.mark.parametrize("given", ["loader", "workload"])
def test_no_batch_and_no_iterator_over_them_outlives_the_search(given: str, end: str) -> None:
    """Iterators are freed without the garbage collector, since they may hold processes and files."""
    count = itertools.count()

    def maybe(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if end == "fails" and next(count) == 40:
            raise LookupError("planted")
        return loss(model, batch)

    options: dict[str, Any] = {"goal": "numerics", "formats": ("bf16",), "memory": False}
    caught = None
    gc.disable()
    try:
        if given == "loader":
            tune(loss=maybe, batches=Loading(), **options)
        else:
            job = Workload("job", network, adamw, lambda _seed: Loader(), maybe)
            castwise.tune(job, device=DEVICE, **options)
    except WorkloadError as error:
        caught = error  # keep the error with its traceback
    finally:
        assert len(Loader.alive) == 0
        if end == "returns":  # the frames of an error's traceback hold some batches
            assert [batch for batch in Loader.given if batch() is not None] == []
        Loader.given.clear()
        gc.enable()
    assert (caught is not None) == (end == "fails")
