"""Compiled finalists: what a trial refuses, which plans are tried, and what the record says."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import castwise
from castwise import Plan, Workload
from castwise.lab.search import compile_trial, compiling
from castwise.lab.search.axes import AUTOCAST, FP32
from castwise.lab.search.compile_trial import CompileTrial, _gradients, _moved, try_compiled
from castwise.lab.search.compiling import MOST, _compiled, own_cache, pays_after, said
from castwise.lab.search.contest import Contest, Entry
from castwise.lab.search.context import Context, Settings
from castwise.lab.search.fates import Fate
from castwise.lab.search.final import Final
from castwise.lab.search.record import evidence
from castwise.lab.search.state import Search
from castwise.lab.timing.processes import portable
from castwise.lab.timing.runners import TrainingRun
from castwise.lab.timing.served import COMPILED, belong_to
from castwise.lab.timing.stats import Ratio
from castwise.report.tune import plan_grid
from tests.here import DEVICE
from tests.report.evidence import make_candidate, make_evidence, make_record
from tests.searches import short_finals
from tests.soak import every, pairs, soaks

CPU = torch.device(DEVICE)
BF16, FP32_COMPILED = (Plan.parse(f"{name}+compile=default") for name in ("bf16-mixed", "fp32"))

compiles = pytest.mark.skipif(DEVICE == "sim", reason="the simulated device has no compiler")
needs_backend = pytest.mark.skipif(
    not hasattr(torch.compiler, "set_default_backend"), reason="this torch can compile with Inductor only"
)


@pytest.fixture(autouse=True)
def traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile with ``aot_eager``, which takes a tenth of a second; Inductor takes many seconds."""
    monkeypatch.setattr(compile_trial, "BLOCK_S", 0.01)
    limit = torch._dynamo.config.fail_on_recompile_limit_hit
    if hasattr(torch.compiler, "set_default_backend"):
        torch.compiler.set_default_backend("aot_eager")
    yield
    torch._dynamo.config.fail_on_recompile_limit_hit = limit
    if hasattr(torch.compiler, "set_default_backend"):
        torch.compiler.set_default_backend(None)
    torch._dynamo.reset()


class Net(nn.Module):
    """Two linear layers with dropout; subclasses put a fault between them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(8, 16), nn.Dropout(dropout), nn.Linear(16, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.drop(torch.tanh(self.a(self.fault(x)))))

    def fault(self, x: Tensor) -> Tensor:
        return x


class Wrong(Net):
    """A model with wrong values when compiled."""

    by = 1.5

    def fault(self, x: Tensor) -> Tensor:
        return x * self.by if torch.compiler.is_compiling() else x


class WithinRounding(Wrong):
    """A model whose error is below bf16's precision and far above fp32's."""

    by = 1.0 + 2.0**-9


class WrongBelow(Net):
    """A model with half of its first layer's gradients when compiled."""

    def forward(self, x: Tensor) -> Tensor:
        below = torch.tanh(self.a(x))
        return self.b(below * 0.5 + 0.5 * below.detach() if torch.compiler.is_compiling() else below)


class CoarseByHand(Net):
    """A model that in bf16 is closer to fp32 when compiled."""

    def fault(self, x: Tensor) -> Tensor:
        return x * 1.2 if self.is_coarse(x) and not torch.compiler.is_compiling() else x

    def is_coarse(self, x: Tensor) -> bool:
        return self.a.weight.dtype is torch.bfloat16


class CoarseCompiled(CoarseByHand):
    """A model that in bf16 is closer to fp32 when not compiled."""

    def fault(self, x: Tensor) -> Tensor:
        return x * 1.2 if self.is_coarse(x) and torch.compiler.is_compiling() else x


class WrongGradients(Net):
    """A model with correct values but an extra term in its gradients when compiled."""

    def __init__(self, by: float = 1.0) -> None:
        super().__init__()
        self.small, self.by = nn.Parameter(1.0 + torch.rand(4)), by

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x) + 1e-4 * self.small
        term = self.by * self.term(x) if torch.compiler.is_compiling() else None
        return out if term is None else out + (term - term.detach())

    def term(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class WrongBias(WrongGradients):
    """A model in which the gradient of one bias is off by a term."""

    def term(self, _x: Tensor) -> Tensor:
        return 0.5 * self.b.bias


class SmallGarbage(WrongGradients):
    """A model with a wrong gradient for a parameter that hardly matters beside the others."""

    def term(self, _x: Tensor) -> Tensor:
        return 1e-4 * self.small.flip(0)


class BeforeBatchNorm(WrongGradients):
    """A bias before BatchNorm: its gradient is only rounding error, and a different one when compiled."""

    def __init__(self, by: float) -> None:
        super().__init__(by)
        self.a = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))  # type: ignore[assignment]

    def term(self, _x: Tensor) -> Tensor:
        return self.a[0].bias.sum()  # type: ignore[index]


class Softmax(torch.autograd.Function):
    """A softmax in fp32 whose backward pass runs in bf16 when compiled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        p = x.float().softmax(-1)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (p,) = ctx.saved_tensors
        if torch.compiler.is_compiling():
            p, grad = p.bfloat16(), grad.bfloat16()
        return p * (grad - (p * grad).sum(-1, keepdim=True))


class ForgetsIsland(Net):
    """A model whose gradients are small differences of large numbers."""

    def forward(self, x: Tensor) -> Tensor:
        p: Tensor = Softmax.apply(super().forward(x))
        return (p * torch.tensor([1000.0, 1001.0, 1002.0, 1003.0])).sum(-1)


class OnTheEdge(Net):
    """A ReLU whose input is slightly above zero, and slightly below when compiled."""

    def __init__(self, above: float = 2.0**-23) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.full((4,), 1.0 - above))
        self.above = above

    def forward(self, x: Tensor) -> Tensor:
        less = 2.0 * self.above if torch.compiler.is_compiling() else 0.0
        return super().forward(x) + torch.relu(self.one - self.other - less) + 5.0 * (self.one + self.other)


class RunningMean(Net):
    """A model that subtracts a running mean, so each pass changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros(()))

    def fault(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.count += 1
            self.mean = self.mean + (x.mean(0) - self.mean) / self.count
        return x - self.mean


class Restless(Net):
    """A model that counts its calls in Python; torch.compile treats the count as a constant and recompiles."""

    def fault(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x if self.calls < 10**6 else x * 2


def batches(seed: int) -> Iterator[Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    while True:
        yield torch.randn(8, 8, generator=generator, device=DEVICE)


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def workload(model: Callable[[], nn.Module] = Net) -> Workload:
    return Workload("tiny", model, sgd, batches, loss)


def tried(model: Callable[[], nn.Module], plan: Plan) -> CompileTrial:
    torch._dynamo.reset()
    return try_compiled(workload(model), plan, CPU, 0)


# --- a trial --------------------------------------------------------------------------------------------------


def within(seconds: float) -> tuple[float, float]:
    """Return two equal deadlines: for compiling all plans, and for compiling the first."""
    return time.monotonic() + seconds, time.monotonic() + seconds


@compiles
@every(2, 1)
@needs_backend
@pytest.mark.parametrize(
    ("line", "dropout"),
    pairs(
        ["fp32", "bf16-mixed", "fp16-mixed+loss_scale.init=1024", "bf16-master+regions.b=fp32"], [0.0, 0.5]
    ),
)
def test_a_plan_whose_compiled_gradients_are_its_own_can_be_compiled(line: str, dropout: float) -> None:
    found = tried(lambda: Net(dropout), Plan.parse(f"{line}+compile=default"))
    assert found.reason == ""
    assert found.difference <= 1.0
    assert min(found.compile_s, found.eager_s, found.step_s) > 0.0


@compiles
@needs_backend
@pytest.mark.parametrize("plan", [FP32_COMPILED, BF16])
def test_wrong_gradients_are_seen(plan: Plan) -> None:
    found = tried(Wrong, plan)
    assert found.reason.startswith(
        "not compiled: the gradient of a.weight differs from that of the uncompiled plan by "
    )
    assert found.difference > 1.0


@compiles
@needs_backend
def test_what_a_format_leaves_open_is_no_fault_in_it_alone() -> None:
    assert tried(WithinRounding, BF16).reason == ""
    assert "the gradient of a.weight differs" in tried(WithinRounding, FP32_COMPILED).reason


@compiles
@needs_backend
def test_gradients_that_are_nearer_to_fp32_compiled_are_no_fault() -> None:
    plan = Plan.parse("bf16-master+compile=default")
    assert tried(CoarseByHand, plan).reason == ""
    assert "differs from that of the uncompiled plan" in tried(CoarseCompiled, plan).reason


@compiles
@needs_backend
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function:DeprecationWarning")  # raised by Dynamo
@pytest.mark.parametrize(
    ("model", "plan", "of"),
    [
        (WrongBias, FP32_COMPILED, "b.bias"),
        (WrongBias, BF16, "b.bias"),
        (SmallGarbage, FP32_COMPILED, "small"),
        (ForgetsIsland, BF16, ""),
    ],
)
def test_gradients_that_alone_are_wrong_are_seen(model: type[Net], plan: Plan, of: str) -> None:
    assert tried(model, plan).reason.startswith(f"not compiled: the gradient of {of}")


@compiles
@needs_backend
def test_what_flips_in_few_draws_is_drawn_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tried(OnTheEdge, FP32_COMPILED).reason == ""
    assert "the gradient of other differs" in tried(lambda: OnTheEdge(2.0**-20), FP32_COMPILED).reason
    monkeypatch.setattr(compile_trial, "DRAWS", 0)
    assert "the gradient of other differs" in tried(OnTheEdge, FP32_COMPILED).reason


@compiles
@needs_backend
@pytest.mark.parametrize(("plan", "by"), [(FP32_COMPILED, 1e-4), (BF16, 1e-2)])
def test_gradients_that_are_only_rounding_may_be_any_that_are_small(plan: Plan, by: float) -> None:
    assert tried(lambda: BeforeBatchNorm(by), plan).reason == ""
    assert "the gradient of a.0.bias differs" in tried(lambda: BeforeBatchNorm(2.0), plan).reason


def test_complex_weights_are_moved_and_compared_in_both_parts() -> None:
    class Phase(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, dtype=torch.cfloat))

        def forward(self, x: Tensor) -> Tensor:
            return (self.w * torch.complex(x, x)).real

    job = Workload("complex", Phase, sgd, batches, lambda m, b: m(torch.ones(8)).square().sum())
    with contextlib.closing(TrainingRun(job, Plan.preset("fp32"), CPU, 0)) as run:
        weight = run.model.get_parameter("w").detach().clone()
        found = _gradients(run, job, next(batches(0)), 0)["w"]
        assert found.shape == (8, 2)
        torch.testing.assert_close(found[:, 0], -found[:, 1])
        assert found.any()
        with _moved(run.model, 2.0**-7, 0):
            moved = run.model.get_parameter("w").detach()
            assert bool((moved.real != weight.real).all())
            assert bool((moved.imag != weight.imag).all())
        assert torch.equal(run.model.get_parameter("w"), weight)


@compiles
@needs_backend
def test_a_model_that_is_compiled_anew_at_every_step_is_not_compiled() -> None:
    assert tried(Restless, FP32_COMPILED).reason.startswith("not compiled: it recompiles ")


class ForgetsDeep(nn.Module):
    """Twenty layers that, when compiled, get no gradient; in bf16 their gradients are noisy in any case."""

    def __init__(self, forgets: bool) -> None:
        super().__init__()
        self.below = nn.Sequential(
            *(nn.Sequential(nn.Linear(64 if n else 8, 64), nn.ReLU()) for n in range(20))
        )
        self.last, self.forgets = nn.Linear(64, 4), forgets

    def forward(self, x: Tensor) -> Tensor:
        below = self.below(x)
        return self.last(below.detach() * 1.0 + 0.0 * below if self.lost() else below)

    def lost(self) -> bool:
        return self.forgets and torch.compiler.is_compiling()


@compiles
@needs_backend
def test_gradients_that_are_forgotten_are_seen_where_a_format_leaves_much_open() -> None:
    assert tried(lambda: ForgetsDeep(False), BF16).reason == ""
    assert tried(lambda: ForgetsDeep(True), BF16).reason.startswith("not compiled: the gradient of below.")


@compiles
@needs_backend
def test_what_a_model_remembers_of_its_passes_is_no_fault() -> None:
    found = tried(RunningMean, FP32_COMPILED)
    assert found.reason == ""
    assert found.difference < 1.0


@compiles
@needs_backend
def test_what_cannot_be_compared_is_not_compiled() -> None:
    """At its first loss scale every gradient is infinite."""
    plan = Plan.parse("fp16-mixed+compile=default")
    for model in (Net, Wrong):
        torch._dynamo.reset()
        job = Workload("tiny", model, sgd, batches, lambda m, b: 1e6 * m(b).square().mean())
        found = try_compiled(job, plan, CPU, 0)
        assert found.reason.startswith("not compiled: its gradients at its first loss scale are not finite")


@compiles
@needs_backend
def test_a_batch_whose_gradients_are_at_the_edge_hides_no_fault_in_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = 0
    gradients = compile_trial._gradients

    def edge(*args: Any) -> dict[str, Tensor]:
        nonlocal calls
        found = gradients(*args)
        calls += 1
        if calls == 4:  # 1 and 2 detect random draws; 3 is a batch, 4 the same batch with moved weights
            found["a.weight"] = found["a.weight"] * math.inf
        return found

    monkeypatch.setattr(compile_trial, "_gradients", edge)
    assert "the gradient of a.weight differs" in tried(WrongBelow, BF16).reason


@compiles
@needs_backend
def test_what_the_compiler_refuses_is_the_reason() -> None:
    def refuses(_graph: Any, _inputs: Any) -> None:
        raise RuntimeError("no kernel of that kind")

    torch.compiler.set_default_backend(refuses)
    found = tried(Net, BF16)
    assert found.reason.startswith("does not compile: ")
    assert "no kernel of that kind" in found.reason


@compiles
def test_a_model_of_which_nothing_is_compiled_is_not_called_compiled() -> None:
    with torch.compiler.set_stance("force_eager"):
        assert tried(Net, BF16).reason == "not compiled: torch.compile finds nothing to compile in the model"


# --- which plans are tried ------------------------------------------------------------------------------------

OTHERS = [Plan.parse(f"bf16-mixed+regions.{name}=fp32") for name in ("a", "b", "drop")]


@pytest.fixture
def search() -> Iterator[Search]:
    """A search after its race: bf16-mixed is fastest, fp32 slowest."""
    made = Search(Context(workload(), CPU, Settings(("fp32", "bf16"), compile="auto")))
    with made.context.home:
        made.race = Contest(made.context.workload, CPU)
        for place, plan in enumerate([AUTOCAST, *OTHERS, FP32]):
            entry = made.contest.entries.setdefault(plan, Entry(plan))
            entry.times_s = [1.0 + 0.1 * place] * 4
        yield made


def finalists(search: Search, plans: Sequence[Plan], until: float, first_until: float) -> list[Plan]:
    return _compiled(search.context, search.contest, search.trials, plans, until, first_until)


def gain(times_as_long: float, off: float = 0.01) -> Ratio:
    """Return the speedup of a compiled step, with an error of 1 % by default."""
    value = 1.0 / times_as_long
    return Ratio(value, value * (1.0 - off), value * (1.0 + off), 0.95, 9)


def compiled(plan: Plan) -> Plan:
    return dataclasses.replace(plan, compile="default")


def tries(monkeypatch: pytest.MonkeyPatch, found: Callable[[Plan], CompileTrial]) -> list[Plan]:
    """Replace trials by the given results; return the list of plans that were tried."""
    asked: list[Plan] = []

    def instead(_search: Search, _payload: bytes, plan: Plan, _timeout_s: float, _kind: Any) -> CompileTrial:
        asked.append(plan)
        return found(plan)

    monkeypatch.setattr(compiling, "_tried", instead)
    return asked


@compiles
def test_the_fastest_come_first_and_the_best_go_on(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    step_s = {
        compiled(AUTOCAST): 1.1,
        compiled(OTHERS[0]): 0.5,
        compiled(OTHERS[1]): 0.6,
        compiled(FP32): 0.55,
    }
    asked = tries(monkeypatch, lambda plan: CompileTrial("", 0.1, 1.0, gain(step_s.get(plan, 0.9))))
    made = finalists(search, [AUTOCAST, *OTHERS], *within(600.0))
    assert asked == [compiled(plan) for plan in (AUTOCAST, *OTHERS, FP32)]
    assert made == [compiled(OTHERS[0]), compiled(OTHERS[1])]
    assert search.journal.fates[compiled(AUTOCAST)].reason == "not faster compiled: takes 1.10 times as long"
    assert (
        search.journal.fates[compiled(FP32)].reason
        == f"not in the final: {MOST} other compiled plans were faster"
    )


@compiles
def test_what_is_not_known_to_be_slower_compiled_goes_on(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine a few rounds showed 1.02 times the time; the longer final has to decide."""
    tries(monkeypatch, lambda plan: CompileTrial("", 0.1, 1.0, gain(1.02, 0.05 if plan == BF16 else 0.01)))
    assert finalists(search, [AUTOCAST], *within(600.0)) == [BF16]
    assert set(search.journal.fates) == {FP32_COMPILED}


@compiles
def test_plans_are_compiled_as_they_keep_memory(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [dataclasses.replace(plan, host_memory="keep") for plan in (AUTOCAST, OTHERS[0], FP32)]
    asked = tries(monkeypatch, lambda _: CompileTrial("", 0.1, 1.0, gain(0.5)))
    assert finalists(search, kept, *within(600.0)) == [*map(compiled, kept[:2])]
    assert asked == [*map(compiled, kept)]


@compiles
def test_who_always_compiles_takes_the_slow_too_and_never_what_is_wrong(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    search.context = dataclasses.replace(
        search.context, settings=Settings(("fp32", "bf16"), compile="always")
    )
    tries(
        monkeypatch,
        lambda plan: CompileTrial("" if plan == BF16 else "not compiled: wrong", 0.1, 1.0, gain(1.1)),
    )
    assert finalists(search, [AUTOCAST], *within(600.0)) == [BF16]
    assert search.journal.fates == {FP32_COMPILED: Fate("failed", "not compiled: wrong")}


@compiles
def test_without_the_time_for_it_nothing_is_compiled_and_that_is_said(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tries(monkeypatch, lambda plan: CompileTrial("", 40.0, 1.0, gain(0.5)))
    assert finalists(search, [AUTOCAST], *within(4.0)) == []
    assert asked == []
    assert set(search.journal.fates) == {BF16, FP32_COMPILED}
    assert "of the budget were left" in search.journal.fates[BF16].reason
    assert search.journal.fates[BF16].reason.endswith(
        " s of the budget were left to compile it; use a longer --budget"
    )
    # The time that the final needs to compile the first plan again is reserved.
    assert finalists(search, [AUTOCAST], *within(37.0)) == [BF16]
    assert asked == [BF16]


@compiles
def test_the_first_may_take_what_the_final_can_spare(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tries(monkeypatch, lambda plan: CompileTrial("", 0.1, 1.0, gain(0.5)))
    now = time.monotonic()
    assert finalists(search, [AUTOCAST], now + 4.0, now + 600.0) == [BF16]
    assert asked == [BF16]
    assert "of the budget were left" in search.journal.fates[FP32_COMPILED].reason


def _traced() -> nn.Module:
    """Build the model with ``aot_eager`` as backend, since the other process would use Inductor."""
    torch.compiler.set_default_backend("aot_eager")
    return Net()


@needs_backend
@soaks  # otherwise covered by the search at the end of this file
def test_a_trial_has_a_process_of_its_own(search: Search) -> None:
    search.context = dataclasses.replace(search.context, workload=workload(_traced))
    made = finalists(search, [AUTOCAST], *within(600.0))
    assert set(search.trials) == {BF16, FP32_COMPILED}
    for plan, found in search.trials.items():
        assert found.compile_s > 0.0
        assert plan in made or search.journal.fates[plan].reason.startswith("not faster compiled")


def test_a_trial_that_takes_too_long_is_ended(search: Search) -> None:
    def sleeps() -> nn.Module:
        time.sleep(60.0)
        return Net()

    begin = time.monotonic()
    found = compiling._tried(search.context, portable(workload(sleeps)), BF16, 0.5)
    assert found.reason == ("compiling took longer than the 0 s that were left; use a longer --budget")
    assert time.monotonic() - begin < 50.0


def test_a_trial_whose_process_dies_is_a_reason(search: Search) -> None:
    def dies() -> nn.Module:
        os._exit(1)

    found = compiling._tried(search.context, portable(workload(dies)), BF16, 60.0)
    assert found.reason == "does not compile: the process ended without a message, perhaps out of memory"


@compiles
def test_what_a_trial_has_started_is_gone_when_it_is_over(search: Search, tmp_path: Path) -> None:
    """A child process, such as a compiler, could otherwise write into a folder that is being removed."""
    told = tmp_path / "pid"

    def starts_and_sleeps() -> nn.Module:
        told.write_text(str(subprocess.Popen(["sleep", "60"]).pid))
        time.sleep(60.0)
        return Net()

    found = compiling._tried(
        search.context, portable(workload(starts_and_sleeps)), BF16, 1.0 if DEVICE == "cpu" else 30.0
    )
    assert found.reason.startswith("compiling took longer")
    status = Path(f"/proc/{told.read_text()}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"


@compiles
def test_a_fault_of_the_code_comes_out_of_a_trial(search: Search) -> None:
    def faulty() -> nn.Module:
        raise LookupError("no such file of weights")

    with pytest.raises(LookupError, match="no such file of weights"):
        compiling._tried(search.context, portable(workload(faulty)), BF16, 60.0)


@compiles
def test_a_workload_that_another_process_cannot_run_is_not_compiled_and_that_is_said(search: Search) -> None:
    here = os.getpid()

    def made_here() -> nn.Module:
        if os.getpid() != here:
            raise AttributeError("nothing was set up")
        return Net()

    search.context = dataclasses.replace(search.context, workload=workload(made_here))
    assert finalists(search, [AUTOCAST], *within(600.0)) == []
    (note,) = search.journal.notes
    assert note.startswith(
        "Nothing was compiled: workload 'tiny' does not run in another process (AttributeError: nothing"
    )


def test_each_plan_of_a_search_finds_nothing_of_anothers_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCHINDUCTOR_CACHE_DIR"
    monkeypatch.setenv(name, "mine")
    monkeypatch.setenv("TMPDIR", "mine")
    monkeypatch.setattr(tempfile, "tempdir", tempfile.gettempdir())
    belong_to(BF16)
    assert (os.environ[name], os.environ["TMPDIR"]) == ("mine", "mine")  # no search is running
    with own_cache():
        kept = os.environ[COMPILED]
        assert os.path.isdir(kept)
        folders = []
        for plan in (BF16, FP32_COMPILED, BF16, AUTOCAST):
            belong_to(plan)
            folders.append(os.environ[name])
    assert folders[0] == folders[2] != folders[1]
    assert folders[3] == folders[2]  # a plan without compilation keeps the folder
    assert os.environ["TMPDIR"] == tempfile.gettempdir() == kept  # a killed compiler leaves its files there
    assert all(os.path.dirname(folder) == kept for folder in folders)
    assert COMPILED not in os.environ
    assert not os.path.exists(kept)


# --- the text -------------------------------------------------------------------------------------------------


def test_compiling_pays_after_as_many_steps_as_it_takes_to_gain_its_time(search: Search) -> None:
    search.trials[BF16] = CompileTrial("", 54.0, 0.170, gain(0.150 / 0.170))
    assert pays_after(search, BF16) == 2700
    times = [[[0.1695] * 3], [[0.145] * 3]]
    search.final = Final([AUTOCAST, BF16], times_s=times)  # type: ignore[arg-type]
    assert pays_after(search, BF16) == 2205
    assert said(search, BF16) == (
        "Compiling takes 54 s when training first starts (less if the compiled code is cached on disk) and pays off after 2,205 steps."
    )
    search.final = Final([AUTOCAST, BF16], times_s=times[::-1])  # type: ignore[arg-type]
    assert pays_after(search, BF16) is None
    assert said(search, BF16).endswith("and was not shown to pay off.")
    assert said(search, AUTOCAST) == ""
    search.trials[FP32_COMPILED] = CompileTrial("not compiled: wrong", 5.0)
    assert pays_after(search, FP32_COMPILED) is None
    rows = {row.plan: row for row in evidence(search).candidates}
    assert (rows[str(BF16)].compile_s, rows[str(FP32_COMPILED)].compile_s) == (54.0, 5.0)
    assert rows["bf16-mixed"].compile_s is None


def test_the_page_says_what_compiling_took_and_when_it_pays() -> None:
    assert "compiling" not in plan_grid(make_record()).header
    rows = (
        make_candidate("fp32", 0.1, "baseline"),
        make_candidate("fp32+compile=default", 0.08, compile_s=54.2, pays_after_steps=2710),
        make_candidate("bf16-mixed+compile=default", 0.12, compile_s=7.0),
    )
    grid = plan_grid(make_record(make_evidence(candidates=rows)))
    at = grid.header.index("compiling")
    assert [row.cells[at] for row in grid.rows] == ["-", "54.2 s, pays off after 2,710 steps", "7.00 s"]


def test_true_and_false_mean_always_and_never() -> None:
    assert [Settings(compile=given).compile for given in (True, False)] == ["always", "never"]


@compiles
@needs_backend
def test_a_search_compiles_its_finalists_if_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    short_finals(monkeypatch)
    result = castwise.tune(
        workload(_traced), formats=("fp32", "bf16"), device=DEVICE, memory=False, budget_s=45, compile=True
    )
    record = result.evidence
    assert record.settings["compile"] == "always"
    assert any(stage.name == "compiling" for stage in record.stages)
    rows = [row for row in record.candidates if "compile=default" in row.plan]
    assert rows
    assert all(row.compile_s or row.late for row in rows)
    assert result.plan.compile == "default"
    assert any(note.startswith("Compiling takes ") for note in record.notes)
