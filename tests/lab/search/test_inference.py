"""Searches with ``goal="inference"``: the fastest plan whose outputs are as good as those of fp32."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import castwise
from castwise import Plan, Workload
from castwise.core import devices
from castwise.core.model.arrival import widen_for
from castwise.errors import PlanError, StateError, WorkloadError
from castwise.lab.search import compiling, inference
from castwise.lab.search.axes import FP32, numerics_of
from castwise.lab.search.contest import Contest
from castwise.lab.search.context import Journal
from castwise.lab.search.evidence import BY_AUTOCAST
from castwise.lab.search.final import Final
from castwise.lab.serve.comparison import OutputTest
from castwise.lab.timing.ranks import BY_ITSELF
from castwise.lab.timing.runners import InferenceRun, outputs_of, resized, served, served_call
from tests.here import DEVICE
from tests.searches import short_finals

CPU = torch.device(DEVICE)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    short_finals(monkeypatch, 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.relu(self.middle(self.first(x)))))

    def middle(self, x: Tensor) -> Tensor:
        return x


class Offset(nn.Module):
    """Adds a number and subtracts it again, which bf16 does not survive."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 1000.0) - 1000.0


class Fragile(Net):
    def __init__(self) -> None:
        super().__init__()
        self.offset = Offset()

    def middle(self, x: Tensor) -> Tensor:
        return self.offset(x)


def batches(seed: int) -> Iterator[Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    while True:
        yield torch.randn(16, 32, generator=generator, device=DEVICE)


def test_a_model_that_is_low_as_a_whole_is_simpler_to_serve_than_one_with_casts() -> None:
    mixed, low = Plan.parse("bf16-mixed"), Plan.parse("bf16-true")
    workload = Workload("net", model=Net, batches=batches)
    served, trained = Contest(workload, CPU, kind=InferenceRun), Contest(workload, CPU)
    assert served.complexity(FP32) == 0.0 < served.complexity(low) < served.complexity(mixed)
    arrived = Contest(workload, CPU, kind=InferenceRun, stored="bf16")
    assert arrived.complexity(low) == 0.0 < arrived.complexity(FP32)
    assert trained.complexity(mixed) < trained.complexity(low)
    equal = [[[0.001] * 4, [0.001001] * 4], [[0.001] * 4, [0.001001] * 4]]
    for kind, simplest in ((served, low), (trained, mixed)):
        final = Final([mixed, low], times_s=equal, complexity=kind.complexity)
        assert next(final.in_turn([mixed, low])) == simplest


def tune(model: nn.Module, **options: Any) -> castwise.TuneResult:
    given = {"goal": "inference", "formats": ("bf16",), "budget_s": 12.0, "memory": False, "device": DEVICE}
    return castwise.tune(**{"model": model, "batches": batches, **given, **options})


def shown(result: castwise.TuneResult, verbose: bool) -> str:
    text = io.StringIO()
    Console(file=text, width=80, color_system=None).print(result.table(verbose=verbose))
    return text.getvalue()


def timed_under_autocast(result: castwise.TuneResult) -> bool:
    """Whether single calls were timed under one line of autocast, or there was no time to race it."""
    mixed = next(row for row in result.evidence.candidates if row.plan == "bf16-mixed")
    return BY_AUTOCAST in {one.plan for one in result.evidence.latencies} or not mixed.rounds


def parity_of(result: castwise.TuneResult, plan: Plan) -> Any:
    return next(row.parity for row in result.evidence.candidates if row.plan == str(plan))


# --- the search ---------------------------------------------------------------------------------------------


def test_a_model_that_is_given_in_bf16_is_shown_as_it_is_and_stays_in_bf16_unless_another_plan_is_faster() -> (
    None
):
    """``transformers`` gives models as their checkpoints store them; LoRA gives a frozen base in bf16 and adapters in fp32."""
    low = Net().eval().to(torch.bfloat16).requires_grad_(False)
    result = tune(low, formats=("fp32", "bf16"), batches=lambda seed: (x.bfloat16() for x in batches(seed)))
    given = next(row for row in result.evidence.candidates if row.words == "as given")
    assert given.parity is not None
    assert given.parity.verdict == "pass"
    assert given.rounds
    assert {parameter.dtype for parameter in low.parameters()} == {torch.bfloat16}
    notes = "\n".join(result.evidence.notes)
    assert "were given in bfloat16" in notes
    assert "The row 'as given' is the model in its own formats" in notes
    widen = result.plan.provenance["widen"]
    assert result.evidence.widen == widen
    assert (f"inference=True, widen={widen!r})" if widen else "inference=True)") in shown(
        result, verbose=False
    )
    assert timed_under_autocast(result)
    assert (f"inference=True, widen={widen!r}" if widen else "inference=True)") in notes
    model = castwise.Amp(result.plan, device=DEVICE).prepare(low, inference=True, widen=widen)
    with torch.inference_mode():
        assert model(next(batches(0)).bfloat16()).dtype is torch.float32


@pytest.mark.parametrize(
    ("line", "trained", "widen"),
    [
        ("fp32", True, "all"),
        ("bf16-mixed", True, "all"),
        ("bf16-mixed", False, "all"),
        ("bf16-true", True, False),
        ("bf16-true+output=as_is", False, False),
        ("fp32+output=as_is", True, False),
    ],
)
def test_what_is_widened_to_serve_does_not_depend_on_what_was_trained(
    line: str, trained: bool, widen: Any
) -> None:
    model = Net().to(torch.bfloat16).requires_grad_(trained)
    assert widen_for(Plan.parse(line), model, serves=True) == widen


def test_a_search_needs_no_optimizer_and_no_loss_and_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = Net().to(DEVICE)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = tune(
        model, batch_sizes=(1, 24), out=tmp_path, budget_s=30.0
    )  # both sizes, on a busy machine too
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    late = "Latencies at batch sizes 24 were not measured: the time ran out." in result.evidence.undecided
    assert {one.batch_size for one in result.evidence.latencies} == ({1} if late else {1, 24})
    assert all(0.0 < one.median_s <= one.p95_s for one in result.evidence.latencies)
    assert timed_under_autocast(result)
    assert {file.name for file in result.files} >= {"report.html", "plan.json", "evidence.json"}
    for verbose in (False, True):
        said = shown(result, verbose)
        assert "gradient" not in said
        assert "training step" not in said
    castwise.Amp(result.plan, device=DEVICE).prepare(Net().to(DEVICE).eval(), inference=True)


def test_a_module_that_a_low_format_breaks_is_found_and_stays_in_fp32() -> None:
    result = tune(Fragile())
    broken = parity_of(result, Plan.parse("bf16-mixed"))
    assert broken is None or broken.verdict != "pass" or numerics_of(result.plan) == FP32
    for row in result.evidence.candidates:
        if row.parity is not None and row.parity.verdict == "pass" and row.plan != "fp32":
            assert "offset" in row.plan or "Offset" in row.plan or "fp32_matmul" in row.plan, row


def test_a_second_search_for_the_same_job_is_answered_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CASTWISE_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    model = Net()
    first = tune(model)
    again = tune(model)
    assert again.plan == first.plan
    assert first.evidence.complete is False or any(
        "nothing was measured again" in note for note in again.evidence.notes
    )
    with torch.no_grad():
        model.first.weight.mul_(2.0)
    assert not any("nothing was measured again" in note for note in tune(model).evidence.notes)


def test_a_workload_with_a_loss_is_served_without_the_loss() -> None:
    result = castwise.tune(
        "sine?size=16&hidden=16",
        goal="inference",
        formats=("bf16",),
        budget_s=10.0,
        memory=False,
        device=DEVICE,
    )
    assert result.evidence.goal == "inference"
    assert result.evidence.answer.startswith(("Serve", "Stay in fp32"))


@pytest.mark.parametrize(("left_s", "verdict"), [(60.0, "fail"), (1e-6, "pass")])
def test_the_metrics_of_evaluate_are_compared_if_there_is_time(left_s: float, verdict: str) -> None:
    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"lost": 11.0 if next(model.parameters()).dtype is torch.bfloat16 else 1.0}

    given = Workload("net", model=Net, batches=batches, evaluate=evaluate)
    test = OutputTest(Net().to(DEVICE).eval(), served_call, batches(0), CPU)
    test.reference(4)
    context: Any = SimpleNamespace(workload=given, journal=Journal(), left_s=lambda: left_s, ranks=BY_ITSELF)
    search: Any = SimpleNamespace(context=context)
    served_: Any = SimpleNamespace(test=test)
    found = inference._evaluated(search, served_, test.test(Plan.parse("bf16-true")))
    assert found is not None
    assert found.verdict == verdict
    assert ("lost" in found.reason) == (verdict == "fail")
    assert [bool(text) for text in context.journal.undecided] == [True] * (verdict == "pass")


def test_a_batch_that_does_not_fit_in_memory_is_not_tried() -> None:
    found: Any = SimpleNamespace(samples=16, batch_bytes=2**20, weight_bytes=2**30)
    free = devices.free_bytes(CPU)
    for peak in (None, 2**30 + 2**22):
        search: Any = SimpleNamespace(
            context=SimpleNamespace(device=CPU), peaks={} if peak is None else {FP32: peak}
        )
        assert inference._too_large(search, found, 1) == inference._too_large(search, found, 32) == ""
        said = inference._too_large(search, found, 10**12)
        assert bool(said) == (free is not None)
        if said:
            assert said.startswith(
                "Batch size 1000000000000 was not timed: by the peak of a batch of 16 it needs"
            )


# --- bad input ----------------------------------------------------------------------------------------------


def test_bad_arguments_are_one_sentence() -> None:
    with pytest.raises(WorkloadError, match=r"batches is missing; give model= and batches=, or a workload"):
        castwise.tune(model=Net(), goal="inference")
    with pytest.raises(
        PlanError, match=r"tune\(accumulate=4, goal='inference'\): accumulate is for training"
    ):
        tune(Net(), accumulate=4)
    with pytest.raises(
        PlanError, match=r"tune\(batch_sizes=\[8\], goal='time'\): latencies are measured only"
    ):
        tune(Net(), batch_sizes=(8,), goal="time", loss=lambda m, b: m(b).sum(), optimizer=torch.optim.AdamW)
    with pytest.raises(PlanError, match=r"batch_sizes"):
        tune(Net(), batch_sizes=(0,))
    with pytest.raises(StateError, match="too short"):
        tune(Net(), budget_s=1.0)


def test_a_workload_without_an_optimizer_says_so_when_it_is_trained() -> None:
    only = Workload("only", model=Net, batches=batches)
    with pytest.raises(WorkloadError, match=r"has no optimizer, so only its inference can be measured"):
        castwise.tune(only, formats=("bf16",), budget_s=10.0, device=DEVICE)
    with pytest.raises(WorkloadError, match=r"Workload\('x'\): batches is missing"):
        Workload("x", model=Net)


# --- calls --------------------------------------------------------------------------------------------------


def job(**parts: Any) -> Workload:
    return Workload("job", model=Net, batches=batches, **parts)


def test_the_batch_is_the_arguments_unless_outputs_or_a_loss_say_otherwise() -> None:
    model, x = Net().eval(), torch.randn(4, 32)
    want = model(x)
    assert torch.equal(served(job(), model, x)(), want)
    assert torch.equal(served(job(), model, (x,))(), want)
    assert torch.equal(served(job(), model, {"x": x})(), want)
    with_loss = job(loss=lambda m, b: m(b[0]).square().mean())
    assert torch.equal(served(with_loss, model, (x, 1))(), want)
    assert torch.equal(outputs_of(with_loss, model, (x, 1)), want)
    twice = job(loss=lambda m, b: m(b).sum() + m(2 * b).sum())
    assert len(outputs_of(twice, model, x)) == 2
    doubled = job(outputs=lambda m, b: 2 * m(b))
    assert torch.equal(served(doubled, model, x)(), 2 * want)


def test_batches_are_joined_and_cut_along_their_samples() -> None:
    rows = [(torch.full((3, 2), float(i)), {"label": torch.full((3,), i)}) for i in range(4)]
    x, rest = resized(job(), rows[0], iter(rows[1:]), 7)
    assert x[:, 0].tolist() == [0, 0, 0, 1, 1, 1, 2] == rest["label"].tolist()
    assert resized(job(), rows[0], iter(()), 2)[0].shape == (2, 2)
    with pytest.raises(WorkloadError, match=r"shapes \[3, 2\], \[4\]"):
        resized(job(), (torch.ones(3, 2), torch.ones(4)), iter(()), 2)
    with pytest.raises(WorkloadError, match="ended after 1 batches"):
        resized(job(), rows[0], iter(()), 7)


def test_a_run_calls_the_model_in_evaluation_mode_with_a_batch_of_the_size() -> None:
    seen: list[tuple[bool, int, bool]] = []

    def outputs(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append((model.training, len(batch), torch.is_inference_mode_enabled()))
        return model(batch)

    run = InferenceRun(job(outputs=outputs), Plan.parse("bf16-mixed"), CPU, batch_size=40)
    run.block(2)
    run.close()
    assert seen == [(False, 40, True)] * 2


@pytest.mark.skipif(DEVICE != "cpu", reason="freed memory is kept on CPUs alone")
@pytest.mark.parametrize("budget_s", [8.0, 2.0 * inference.TO_COMPILE_S])
def test_plans_that_keep_freed_memory_are_compiled_so_too(
    budget_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With little time and with much."""
    asked: list[Plan] = []
    monkeypatch.setattr(inference, "keeping_saves", lambda *_: True)
    monkeypatch.setattr(compiling, "_compiled", lambda _c, _r, _t, plans, *_: asked.extend(plans) or [])
    castwise.tune(
        model=Net().eval(), batches=batches, goal="inference", compile="auto", budget_s=budget_s, formats=("fp32", "bf16"),
        memory=False, device=DEVICE, fresh=True,
    )  # fmt: skip
    assert asked
    assert {plan.host_memory for plan in asked} == {"keep"}
