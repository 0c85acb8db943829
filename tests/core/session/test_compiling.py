"""Plans that compile: prepare compiles in place, close undoes it, and all commands use it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import pickle
import textwrap
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import castwise
from castwise import Plan
from castwise.commands.jobs.bench import bench
from castwise.commands.jobs.train import train
from castwise.core.casting import frames
from castwise.errors import StateError
from castwise.lab.timing import timing
from castwise.lab.timing.runners import InferenceRun, TrainingRun
from castwise.lab.workloads.workload import Workload, find_workload
from tests.fresh import run_interpreter
from tests.here import DEVICE
from tests.soak import every

pytestmark = [
    pytest.mark.skipif(
        not hasattr(torch.compiler, "set_default_backend"), reason="this torch can compile only with Inductor"
    ),
    pytest.mark.skipif(DEVICE == "sim", reason="torch.compile cannot compile for the simulated device"),
    # Dynamo reads .grad of the input of a resumed frame.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
HERE = torch.device(DEVICE)
X = torch.linspace(-1, 1, 32).reshape(4, 8)
TINY = str(Path(__file__).parents[2] / "commands" / "jobs" / "tiny_workloads.py") + ":mlp"


@pytest.fixture(autouse=True)
def traced_only() -> Iterator[None]:
    """Trace graphs and run them with torch's kernels: 0.1 s where Inductor takes many seconds."""
    torch._dynamo.reset()
    torch.compiler.set_default_backend("aot_eager")
    yield
    torch.compiler.set_default_backend(None)
    torch._dynamo.reset()


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(self.b(self.a(x)))


def given(model: nn.Module) -> dict[str, Any]:
    return {name: copy.copy(value) for name, value in vars(model).items()}


@every(2, 1)
@pytest.mark.parametrize(
    "line", ["fp32", "bf16-mixed+regions.a=fp32", "fp16-master", "bf16-mixed+ops.exp=fp32"]
)
def test_prepare_compiles_in_place_and_close_takes_it_off(line: str) -> None:
    model, eager = Net(), Net()
    optimizer, other = (torch.optim.SGD(m.parameters(), 0.01) for m in (model, eager))
    before = given(model)
    with (
        castwise.Amp(f"{line}+compile=default", device=DEVICE) as amp,
        castwise.Amp(line, device=DEVICE) as plain,
    ):
        assert amp.prepare(model, optimizer) == (model, optimizer)
        plain.prepare(eager, other)
        start = graphs()
        for _ in range(3):
            loss, want = model(X).mean(), eager(X).mean()
            assert torch.equal(loss, want)
            amp.backward(loss)
            plain.backward(want)
            amp.step(optimizer)
            plain.step(other)
            optimizer.zero_grad()
            other.zero_grad()
        assert graphs() == start + 1
        saved = amp.model_state_dict(model)
    assert saved.keys() == eager.state_dict().keys()
    assert given(model).keys() == before.keys()
    assert model._compiled_call_impl is None
    model(X)
    assert graphs() == start + 1
    with castwise.Amp(
        "bf16-mixed+compile=default+output=as_is", device=DEVICE
    ) as amp:  # compile again under another plan
        amp.prepare(model)
        assert model(X).dtype is torch.bfloat16
        assert graphs() == start + 2


def test_whatever_class_a_model_has_it_is_compiled() -> None:
    """Torch's own ``module.compile()`` leaves torch's module classes, including their hooks, uncompiled."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with castwise.Amp("fp32+compile=default", device=DEVICE) as amp:
        amp.prepare(model)
        start = graphs()
        model(X)
        assert graphs() == start + 1


def test_models_of_one_class_are_compiled_each_for_itself_and_all_of_them() -> None:
    """Dynamo gives up on a code object after eight compilations, and all modules share torch's ``__call__``."""
    formats = [torch.bfloat16, torch.float16] * 6
    models = [Net() for _ in formats]
    start = graphs()
    with contextlib.ExitStack() as stack:
        for model, dtype in zip(models, formats, strict=True):
            short = "bf16" if dtype is torch.bfloat16 else "fp16"
            amp = stack.enter_context(
                castwise.Amp(f"{short}-mixed+compile=default+output=as_is", device=DEVICE)
            )
            amp.prepare(model)
        assert [model(X).dtype for model in models] == formats
        assert graphs() == start + len(models)
        assert [model(X).dtype for model in models] == formats
        assert graphs() == start + len(models)


def _by_method(model: nn.Module) -> nn.Module:
    model.compile()
    return model


@pytest.mark.parametrize("compiled", [torch.compile, _by_method])
def test_a_model_that_is_compiled_already_is_refused(compiled: Callable[[nn.Module], Any]) -> None:
    model = Net()
    run = compiled(model)
    before = given(model)
    amp = castwise.Amp("bf16-mixed+compile=default", device=DEVICE)
    with pytest.raises(StateError) as error:
        amp.prepare(run)
    assert str(error.value) == (
        "prepare: the plan bf16-mixed+compile=default compiles the model, and this Net is compiled already; prepare it "
        "before torch.compile, or use a plan with compile='as_given', which leaves compiling to you"
    )
    assert given(model) == before
    # Compile="as_given": it stays compiled.
    with castwise.Amp("bf16-mixed+output=as_is", device=DEVICE) as amp:
        amp.prepare(run)
        start = graphs()
        assert run(X).dtype is torch.bfloat16
        assert graphs() == start + 1


def test_a_build_of_torch_without_dynamo_runs_every_plan_that_does_not_compile(tmp_path: Path) -> None:
    """Torch's optimizers need Dynamo, so the test runs inference."""
    code = """
        import sys
        sys.modules["torch._dynamo"] = None  # an import of it fails
        import torch, castwise
        for line in ("fp32", "bf16-mixed+ops.exp=fp32", "bf16-true", "bf16-mixed+compile=default"):
            model = torch.nn.Linear(2, 2)
            try:
                with castwise.Amp(line + "+output=as_is", device="cpu") as amp:
                    amp.prepare(model, inference=True)
                    print(model(torch.ones(1, 2)).dtype)
            except castwise.CastwiseError as error:
                print(str(error).partition(": this build")[0])
    """
    assert run_interpreter(textwrap.dedent(code), tmp_path).splitlines() == [
        "torch.float32",
        "torch.bfloat16",
        "torch.bfloat16",
        "Plan bf16-mixed+compile=default+output=as_is: compile='default', but torch.compile cannot compile for cpu here",
    ]


def test_a_prepare_that_fails_leaves_nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    model = Net()
    before = given(model)
    monkeypatch.setattr(castwise.session.amp.wrappers, "on_ddp", fails)
    with pytest.raises(KeyboardInterrupt):
        castwise.Amp("bf16-mixed+compile=default", device=DEVICE).prepare(model)
    assert given(model).keys() == before.keys()
    assert model._compiled_call_impl is None


def test_copies_and_replicas_run_by_the_plan_uncompiled() -> None:
    model = Net()
    with castwise.Amp("bf16-mixed+compile=default+output=as_is", device=DEVICE) as amp:
        amp.prepare(model)
        want = model(X)
        start = graphs()
        for other in (
            copy.deepcopy(model),
            model._replicate_for_data_parallel(),
        ):
            assert torch.equal(other(X), want)
        # The unpickled model has no plan.
        assert torch.equal(pickle.loads(pickle.dumps(model))(X), Net().forward(X))
        assert graphs() == start


def test_a_compiled_model_inside_of_what_is_compiled_is_part_of_it() -> None:
    model = Net()
    with castwise.Amp("bf16-mixed+compile=default", device=DEVICE) as amp:
        amp.prepare(model)
        want = model(X)
        outer = torch.compile(lambda x: model(x) + 1, fullgraph=True)
        assert torch.equal(outer(X), want + 1)
        assert torch.equal(torch.compile(model)(X), want)
        swapped = {name: value * 2 for name, value in model.named_parameters()}
        eager = torch.func.functional_call(copy.deepcopy(model), swapped, (X,))
        assert torch.equal(torch.func.functional_call(model, swapped, (X,)), eager)


def test_a_part_of_a_model_is_compiled_alone() -> None:
    model = nn.Sequential(Net(), nn.Linear(8, 2))
    with castwise.Amp("bf16-mixed+compile=default", device=DEVICE) as amp:
        amp.prepare(model[0])
        start = graphs()
        model(X).sum().backward()
        assert graphs() == start + 1
        assert model._compiled_call_impl is model[1]._compiled_call_impl is None


def test_an_exception_of_any_kind_leaves_no_plan_in_force() -> None:
    class Stops(Net):
        error: BaseException | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.error is not None:
                raise self.error
            return super().forward(x)

    model = Stops()
    with castwise.Amp("bf16-mixed+compile=default+ops.exp=fp32", device=DEVICE) as amp:
        amp.prepare(model)
        model(X)
        for error in (KeyboardInterrupt(), ValueError("no")):
            model.error = error
            with pytest.raises(type(error)):
                model(X)
            assert frames.depth() == 0
            assert not torch.is_autocast_enabled(DEVICE)


def test_a_session_that_compiles_goes_with_its_model() -> None:
    model = Net()
    amp = castwise.Amp("bf16-mixed+compile=default", device=DEVICE)
    amp.prepare(model)
    model(X).sum().backward()
    alive = weakref.ref(model), weakref.ref(amp)
    del model, amp
    torch._dynamo.reset()
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


# --- measured and trained -------------------------------------------------------------------------------------


def workload() -> Workload:
    return find_workload(TINY)


def test_runs_obey_the_plan_and_count_what_compiling_took() -> None:
    plan = Plan.parse("bf16-mixed+compile=default")
    run, eager = TrainingRun(workload(), plan, HERE), TrainingRun(workload(), Plan.preset("bf16-mixed"), HERE)
    for each in (run, eager):
        each.block(3)
    assert run.losses == pytest.approx(eager.losses, rel=2**-7)
    assert (eager.compilations, eager.compile_s) == (0, 0.0)
    assert run.compilations >= 1
    taken = run.compilations, run.compile_s
    assert taken[1] > 0.0
    called = InferenceRun(workload(), plan, HERE)
    called.block(2)
    assert called.compilations >= 1
    with run.evaluating() as model:
        model(next(iter(workload().batches(0)))[0])
    run.block(1)
    # Excludes compilations of the other run and of the evaluation.
    assert (run.compilations, run.compile_s) == taken
    for each in (run, eager, called):
        each.close()


def test_compiling_makes_no_candidate_look_hopeless(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)

    class Compiles:
        steps, compile_s = 0, 0.0

        def before(self, steps: int) -> None: ...

        def run(self, steps: int) -> None:
            nonlocal now
            now += steps
            if self.steps < self.compiled:
                now, self.compile_s = now + 60.0, self.compile_s + 60.0
            self.steps += steps

        def after(self) -> None: ...

        def __init__(self, compiled: int) -> None:
            self.compiled = compiled

    laps = timing.race(
        [("fp32", Compiles(0)), ("one", Compiles(1)), ("two", Compiles(2))], rounds=3, steps=1, device=HERE
    )
    assert [lap.slowdown for lap in laps.values()] == [None] * 3
    assert laps["two"].times_s == [1.0] * 3


def test_the_bench_compiles_and_says_how_long_it_took() -> None:
    made = workload()
    start = graphs()
    result = bench(
        made,
        ["bf16-mixed", "bf16-mixed+compile=default"],
        device=DEVICE,
        steps=8,
        rounds=2,
        starts=0,
        memory=False,
    )
    _, plain, compiled = result.plans
    assert (plain.notes, compiled.status) == ((), "ok")
    (note,) = compiled.notes
    assert note.startswith("compiling took ")
    assert graphs() >= start + 2  # one for training and one for inference
    assert compiled.losses == pytest.approx(plain.losses, rel=2**-6)


def test_a_training_compiles_and_evaluates_without(tmp_path: Path) -> None:
    calls = []
    found = workload()
    evaluate = found.evaluate
    assert evaluate is not None

    def watched(model: nn.Module) -> dict[str, float]:
        calls.append(graphs())
        metrics = evaluate(model)
        calls.append(graphs())
        return metrics

    made = dataclasses.replace(found, evaluate=watched)
    start = graphs()
    result = train(made, "bf16-mixed+compile=default", steps=4, out=tmp_path, device=DEVICE)
    plain = train(found, "bf16-mixed", steps=4, out=tmp_path / "plain", device=DEVICE)
    assert calls[0] > start
    assert calls[0] == calls[1] == graphs()
    assert result.plan == "bf16-mixed+compile=default"
    assert result.final_loss == pytest.approx(plain.final_loss, rel=2**-6)
    assert torch.load(tmp_path / "model.pt").keys() == torch.load(tmp_path / "plain" / "model.pt").keys()
