"""The axes of the search, the costs of parts, the race, and pairs of training runs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import castwise
from castwise import Plan, Workload
from castwise.core import _torch
from castwise.core.heap import HEAP, can_keep
from castwise.core.session.process import _claimed
from castwise.errors import DeviceError, PlanError, WorkloadError
from castwise.lab.parity.damage import ADAM_PASS, PASS, Estimate
from castwise.lab.parity.parity import ParityResult
from castwise.lab.passes.regions import Part, find_parts
from castwise.lab.search import fastest, part_costs
from castwise.lab.search.axes import (
    check_formats,
    complexity,
    numerics_of,
    whole_step_plans,
    with_operators_as_is,
)
from castwise.lab.search.contest import BASELINE, Contest, Entry
from castwise.lab.search.context import Context, Settings
from castwise.lab.search.pairs import (
    MARGIN,
    affordable_steps,
    in_training,
    is_doubtful,
    judge_losses,
    train_pairs,
)
from castwise.lab.search.part_costs import (
    Cost,
    _slowdown_on_a_piece,
    lacks_units,
    losing_parts,
    measure_costs,
    not_faster,
)
from castwise.lab.search.reference import refer
from castwise.lab.search.state import Search
from castwise.lab.timing.ranks import BY_ITSELF
from tests.here import DEVICE
from tests.lab.search.conftest import BEGUN
from tests.soak import every

CPU = torch.device(DEVICE)


class SlowWhenLow(nn.Module):
    """A module that takes 20 ms for bf16 inputs."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is torch.bfloat16:
            time.sleep(0.02)
        return x * 2


class Fragile(nn.Module):
    """A module that cannot run in bf16."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is torch.bfloat16:
            raise NotImplementedError("no kernel for bf16")
        return x * 2


def left_for(contest: Contest, plan: Plan) -> str:
    """Return the reason why a plan left the race."""
    left = contest.entries[plan].left
    return "" if left is None else left.reason


def noted(search: Search) -> dict[Plan, str]:
    """Return the journal's reason for each plan that was not chosen."""
    return {plan: fate.reason for plan, fate in search.journal.fates.items()}


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2)


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    while True:
        x = torch.randn(8, 16, generator=generator, device=DEVICE)
        yield x, x[:, 0].gt(0).long()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def workload(middle: type[nn.Module] = nn.GELU) -> Workload:
    return Workload(
        "tiny",
        lambda: nn.Sequential(nn.Linear(16, 16), middle(), nn.Linear(16, 2)),
        sgd,
        batches,
        loss,
    )


# --- axes -------------------------------------------------------------------------------------------------------


def test_formats_are_checked() -> None:
    assert check_formats(("bf16",), "time") == ("fp32", "bf16")
    assert check_formats("fp16", "numerics") == ("fp16",)
    with pytest.raises(
        PlanError, match=r"tune\(formats=\('fp8',\)\): 'fp8' is not one of fp32, tf32, bf16, fp16"
    ):
        check_formats(("fp8",), "time")
    with pytest.raises(PlanError, match="give the one low format that the model is to run in"):
        check_formats(("bf16", "fp16"), "numerics")
    with pytest.raises(PlanError, match=r"tune\(formats=\(\)\)"):
        check_formats((), "time")


def test_axes_follow_the_model_and_the_optimizer() -> None:
    line = nn.Linear(4, 4)
    images = nn.Sequential(nn.Conv2d(3, 4, 3))
    few, _ = whole_step_plans(("fp32", "bf16"), CPU, torch.optim.RMSprop(line.parameters()), has_images=False)
    assert {p.memory_format for p in few} == {"as_is"}
    assert {p.optimizer for p in few} == {"as_given"}
    many, _ = whole_step_plans(("fp32", "bf16"), CPU, torch.optim.AdamW(images.parameters()), has_images=True)
    assert {p.memory_format for p in many} == {"as_is", "channels_last"}
    assert {p.optimizer for p in many} == {"as_given"}
    assert many[0] == BASELINE
    light, _ = whole_step_plans(
        ("fp32", "bf16"), CPU, torch.optim.AdamW(line.parameters()), has_images=False, goal="memory"
    )
    assert light[0] == BASELINE
    assert {p.optimizer for p in light[1:]} == {"fused"}
    assert [complexity(p) for p in many] == sorted(complexity(p) for p in many)
    assert not any(p.master == "none" for p in many)
    small, _ = whole_step_plans(
        ("fp32", "bf16"), CPU, sgd(line.parameters()), has_images=False, goal="memory"
    )
    assert any(p.master == "none" for p in small)


def test_a_format_that_the_device_lacks_is_left_out_with_its_reason() -> None:
    line = nn.Linear(4, 4)
    plans, dropped = whole_step_plans(("fp32", "tf32"), CPU, sgd(line.parameters()), has_images=False)
    refused = []
    try:
        castwise.Amp("tf32", device=DEVICE)
    except DeviceError as error:
        refused.append(f"not supported by this device: {error}")
    assert list(dropped.values()) == refused
    assert any(p.fp32_matmul == "tf32" for p in plans) is not bool(refused)


def test_regions_and_rules_make_a_plan_more_complex() -> None:
    lines = ("fp32", "bf16-mixed", "bf16-mixed+regions.0=fp32", "bf16-mixed+regions.0=fp32+optimizer=fused")
    assert [complexity(Plan.parse(line)) for line in lines] == sorted({
        complexity(Plan.parse(line)) for line in lines
    })
    free = complexity(Plan.parse("bf16-mixed+optimizer=fused+memory_format=channels_last"))
    assert free < complexity(Plan.parse("bf16-mixed+regions.0=fp32")) - 2.0
    assert free < complexity(Plan.preset("bf16-master"))
    assert numerics_of(
        Plan.parse("bf16-mixed+optimizer=fused+memory_format=channels_last+compile=default")
    ) == Plan.preset("bf16-mixed")
    fused, compiled, region = (
        complexity(Plan.parse(f"bf16-mixed+{more}"))
        for more in ("optimizer=fused", "compile=default", "regions.0=fp32")
    )
    assert fused < compiled < region


def test_losses_inside_the_model_may_follow_their_inputs() -> None:
    plan = with_operators_as_is(Plan.preset("bf16-mixed"), {"nll_loss_forward", "native_layer_norm"}, "cpu")
    assert plan is not None
    assert plan.ops == (("cross_entropy_loss", "as_is"),)  # autocast on a CPU does not cast norms
    on_cuda = with_operators_as_is(Plan.preset("bf16-mixed"), {"native_layer_norm", "_softmax"}, "cuda")
    assert on_cuda is not None
    assert on_cuda.ops == (("layer_norm", "as_is"), ("softmax", "as_is"))
    assert with_operators_as_is(Plan.preset("fp32"), {"_softmax"}, "cuda") is None


# --- costs --------------------------------------------------------------------------------------------------------


def test_a_part_that_is_slower_low_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch.cpu, "cpu_has_bf16", lambda: True)  # else a trial on a piece drops bf16
    made = workload(SlowWhenLow)
    model = made.model()
    batch = next(batches(0))
    parts = find_parts(model, lambda: loss(model, batch))
    costs = measure_costs(model, loss, batch, parts, ["bf16"], CPU)
    assert set(costs) == {"0", "1", "2"}
    assert losing_parts("bf16", costs)[0] == ("1",)  # it sleeps 20 ms; other slow parts are noise
    assert costs["1"].times_s["bf16"] > 0.02


def test_a_part_that_cannot_run_low_says_why() -> None:
    made = workload(Fragile)
    model = made.model()
    batch = next(batches(0))
    parts = find_parts(model, lambda: loss(model, batch))
    costs = measure_costs(model, loss, batch, parts, ["bf16"], CPU)
    assert costs["1"].reasons == {"bf16": "not supported by this device: no kernel for bf16"}
    assert losing_parts("bf16", costs)[0] == ("1",)


def test_parts_of_one_region_lose_together() -> None:
    """Regression: three searches of ConvNeXt kept three different sets of depthwise convolutions in fp32, by chance."""
    parts = [
        Part(f"stages.{stage}.*.{name}", "Conv2d", (), 0, like=f"stages.*.*.{name}")
        for stage in range(3)
        for name in ("depthwise", "wide")
    ]

    def costs(*low_s: float) -> dict[str, Cost]:
        by_part = zip(parts, low_s, strict=True)
        return {part.pattern: Cost({"fp32": 1.0, "bf16": s}, {"bf16": 1.01}) for part, s in by_part}

    first, second, third = depthwise = tuple(f"stages.{stage}.*.depthwise" for stage in range(3))
    together = costs(1.02, 0.5, 1.5, 0.5, 1.6, 0.5)
    assert losing_parts("bf16", together, parts) == [depthwise]
    assert losing_parts("bf16", costs(1.7, 0.5, 0.9, 0.5, 1.6, 0.5), parts) == [depthwise]
    assert losing_parts("bf16", together) == [(third,), (second,)]
    # Parts are decided singly if one gains much, was not timed, cannot run low or is of another kind.
    assert losing_parts("bf16", costs(0.5, 0.5, 1.5, 0.5, 1.6, 0.5), parts) == [(third,), (second,)]
    untimed = {pattern: cost for pattern, cost in together.items() if pattern != first}
    assert losing_parts("bf16", untimed, parts) == [(third,), (second,)]
    unable = together | {first: Cost({"fp32": 1.0}, reasons={"bf16": "no kernel"})}
    assert losing_parts("bf16", unable, parts) == [(first,), (third,), (second,)]
    linear = [dataclasses.replace(parts[0], kind="Linear"), *parts[1:]]
    assert losing_parts("bf16", together, linear) == [(third,), (second,)]


def test_candidates_keep_all_losing_parts_in_fp32_or_the_larger_half(monkeypatch: pytest.MonkeyPatch) -> None:
    made = dataclasses.replace(
        workload(),
        model=lambda: nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 2)),
    )
    found = Search(Context(made, CPU, Settings(formats=("fp32", "bf16"), budget_s=30.0)))
    found.begun = refer(found.context)
    low_s = {"0": 0.5, "1": 1.2, "2": 1.6, "3": 0.5}
    known = {p: Cost({"fp32": 1.0, "bf16": s}, {"bf16": 1.01}) for p, s in low_s.items()}
    monkeypatch.setattr(fastest, "measure_costs", lambda *_args, **_options: known)
    out = fastest._by_costs(found, [BASELINE, Plan.preset("bf16-mixed")])
    kept = [[region.pattern for region in plan.regions] for plan in out if plan.regions]
    assert sorted(kept) == [["1", "2"], ["2"]]
    known["1"] = Cost(
        {"fp32": 1.0}, reasons={"bf16": "no kernel"}
    )  # a part that cannot run low is always kept
    out = fastest._by_costs(found, [BASELINE, Plan.preset("bf16-mixed")])
    kept = [[region.pattern for region in plan.regions] for plan in out if plan.regions]
    assert sorted(kept) == [["1"], ["1", "2"]]


class Faulty(nn.Module):
    """A module with a bug that raises in bf16, although bf16 is supported."""

    error: type[Exception] = LookupError

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is torch.bfloat16:
            raise self.error("the mask must be of 16 rows")
        return x * 2


@every(2)
@pytest.mark.parametrize("error", [ValueError, KeyError, IndexError, AssertionError, TypeError, RuntimeError])
def test_a_fault_of_the_code_is_no_word_on_a_format(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception propagates unchanged from every place that tries a plan."""
    monkeypatch.setattr(Faulty, "error", error)
    model = workload(Faulty).model()
    batch = next(batches(0))
    parts = find_parts(model, lambda: loss(model, batch))
    low = Plan.preset("bf16-mixed")
    with pytest.raises(error, match="the mask must be of 16 rows"):
        measure_costs(model, loss, batch, parts, ["bf16"], CPU)
    made = Search(Context(workload(Faulty), CPU, Settings(formats=("fp32", "bf16"), budget_s=30.0)))
    made.begun = refer(made.context)
    with pytest.raises(error, match="the mask must be of 16 rows"):
        made.find(low)
    with pytest.raises(error, match="the mask must be of 16 rows"):
        made.reference.numerics.repair(low, None)
    with Contest(workload(Faulty), CPU) as contest, pytest.raises(error, match="the mask must be of 16 rows"):
        contest.halve([low])
    assert not contest._runs
    with pytest.raises(
        WorkloadError, match=rf"{error.__name__}: .*the mask must be of 16 rows.* \(test_choices.py, line"
    ):
        castwise.tune(workload(Faulty), goal="numerics", device=DEVICE)


class Remembers(nn.Module):
    """A module that keeps an autograd graph between calls, so it can neither be copied nor run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.last is not None:
            x = x + self.last
        self.last = x * 2
        return self.last


def test_a_module_that_does_not_run_by_itself_is_left_out() -> None:
    model = workload(Remembers).model()
    batch = next(batches(0))
    parts = find_parts(model, lambda: loss(model, batch))
    costs = measure_costs(model, loss, batch, parts, ["bf16"], CPU)
    assert set(costs) == {"0", "2"}


def test_buffers_and_gradients_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    batch = next(batches(0))
    measure_costs(model, loss, batch, find_parts(model, lambda: None), ["bf16"], CPU)
    parts = find_parts(nn.Sequential(nn.Linear(16, 2)), lambda: None)
    assert parts == ()
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.cpu  # only CPU kernels for low formats are so slow that a piece is tried first
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Conv1d(32, 32, 3), (2, 32, 1600)),
        (nn.Conv2d(32, 32, 3), (2, 32, 64, 64)),
        (nn.Conv3d(4, 4, 3), (1, 4, 24, 24, 24)),
        (nn.Linear(64, 64), (2, 1600, 64)),
    ],
)
def test_a_module_shows_on_a_piece_what_it_takes(module: nn.Module, shape: tuple[int, ...]) -> None:
    seen: list[int] = []
    module.register_forward_pre_hook(lambda _module, args: seen.append(args[0].numel()))
    inputs = torch.randn(shape)
    assert (
        _slowdown_on_a_piece(module, (inputs,), {}, "fp16", CPU, BY_ITSELF) != 1.0
    )  # 1.0: no piece was tried
    assert max(seen) <= inputs.numel() // 2


@pytest.mark.cpu  # only CPU kernels for low formats are so slow that a piece is tried first
@pytest.mark.parametrize("has", [True, False])
def test_bf16_is_tried_on_a_piece_first_where_the_cpu_has_none(
    has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it bf16 takes 40 times as long as fp32; a search of `gpt` spent half of its time on such steps."""
    monkeypatch.setattr(_torch.cpu, "cpu_has_bf16", lambda: has)
    slower = _slowdown_on_a_piece(nn.Linear(64, 64), (torch.randn(4096, 64),), {}, "bf16", CPU, BY_ITSELF)
    assert (slower == 1.0) == has


def test_an_activation_in_place_can_be_timed() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 2))
    batch = next(batches(0))
    costs = measure_costs(model, loss, batch, find_parts(model, lambda: loss(model, batch)), ["bf16"], CPU)
    assert set(costs["1"].times_s) == {"fp32", "bf16"}
    assert model[1].inplace is True


# --- the race -----------------------------------------------------------------------------------------------------


def test_what_is_slow_or_cannot_run_leaves_with_its_reason() -> None:
    low, kept = Plan.preset("bf16-mixed"), Plan.parse("bf16-mixed+regions.1=fp32")
    with Contest(workload(SlowWhenLow), CPU) as contest:
        left = contest.halve([low, kept], keep=2)
        assert low not in left
        assert left_for(contest, low).startswith("not faster: ")
        assert BASELINE in left
    with Contest(workload(Fragile), CPU) as contest:
        contest.halve([low])
        assert left_for(contest, low) == "not supported by this device: no kernel for bf16"
        assert contest.entries[BASELINE].rounds > 0


def test_an_interruption_leaves_nothing_behind() -> None:
    count = [0]

    def interrupted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        count[0] += 1
        if count[0] > 20:
            raise KeyboardInterrupt
        return loss(model, batch)

    made = dataclasses.replace(workload(), loss=interrupted)
    with pytest.raises(KeyboardInterrupt), Contest(made, CPU) as contest:
        contest.halve([Plan.preset("bf16-mixed"), Plan.parse("fp32+fp32_matmul=ieee")])
    assert not contest._runs
    assert not _claimed


@pytest.mark.skipif(not can_keep(), reason="the C library is not glibc")
def test_an_interruption_while_runs_are_closed_gives_the_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    contest = Contest(workload(), CPU)
    with contest:
        contest.run([], 1)

        def interrupted(_plan: Plan) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(contest, "_close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            contest.close()
        assert HEAP.host_memory == "as_given"
        monkeypatch.undo()


def test_batches_that_run_out_in_a_race_are_the_workloads_error() -> None:
    made = dataclasses.replace(workload(), batches=lambda seed: itertools.islice(batches(seed), 12))
    with (
        pytest.raises(WorkloadError, match=r"workload 'tiny': batches\(seed\) ended after \d+ batches"),
        Contest(made, CPU) as contest,
    ):
        contest.halve([Plan.preset("bf16-mixed")])
    assert not contest._runs


def test_nobody_joins_a_race_after_its_deadline() -> None:
    low = Plan.preset("bf16-mixed")
    with Contest(workload(), CPU, deadline=time.monotonic() - 1.0) as contest:
        assert contest.halve([low]) == [BASELINE]
        assert left_for(contest, low) == "the time ran out"
    with Contest(workload(), CPU, deadline=time.monotonic() - 1.0) as contest:
        contest.run([low], 3)  # plans that passed the parity test are always timed
        assert contest.entries[low].rounds == 1


def test_a_region_is_a_candidate_where_batches_have_four_axes_and_nothing_convolves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def masked(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in batches(seed):
            yield x.view(8, 1, 4, 4), y

    made = dataclasses.replace(
        workload(SlowWhenLow),
        batches=masked,
        loss=lambda model, batch: loss(model, (batch[0].flatten(1), batch[1])),
    )
    monkeypatch.setattr(part_costs, "SLOWER", math.inf)  # with tiny layers any low format looks slow
    found = Search(Context(made, CPU, Settings(formats=("fp32", "bf16"), budget_s=30.0)))
    found.begun = refer(found.context)
    out = fastest._by_costs(found, [BASELINE, Plan.preset("bf16-mixed")])
    assert Plan.parse("bf16-mixed+regions.1=fp32") in out


# --- pairs of training runs ---------------------------------------------------------------------------------------


def test_losses_are_judged_as_students_t_says() -> None:
    reference = [1.0, 1.1, 0.9, 1.05]
    candidate = [r + d for r, d in zip(reference, (0.001, 0.003, 0.002, 0.002), strict=True)]
    found = judge_losses(reference, candidate, 50, 0.005)
    error = statistics.stdev((0.001, 0.003, 0.002, 0.002)) / 2
    assert found.difference == pytest.approx(0.002)
    assert found.upper == pytest.approx(0.002 + 2.353 * error)
    assert found.verdict == "not worse"  # even though fp32's own losses vary more
    worse = [r + 0.02 for r in reference]
    assert judge_losses(reference, worse, 50, 0.005).verdict == "worse"
    assert judge_losses(reference, worse, 50, 0.1).verdict == "not worse"
    unclear = [r + d for r, d in zip(reference, (-1, 1, -1, 1), strict=True)]
    assert judge_losses(reference, unclear, 50, 0.005).verdict == "not shown"
    assert judge_losses(reference, [math.inf] * 4, 50, 0.005).verdict == "worse"
    little = judge_losses(reference, candidate, 50, 0.005, strict=True)
    assert little.verdict == "worse"  # without masters, known harm grows, however small it is
    assert "such harm grows with the length of the training" in in_training(little)
    same = [r + d for r, d in zip(reference, (-0.001, 0.001, -0.001, 0.001), strict=True)]
    assert judge_losses(reference, same, 50, 0.005, strict=True).verdict == "not worse"
    assert in_training(found).startswith(
        "over 4 pairs of 50 steps its loss differs from fp32's by 0.002 (at most 0.003 with 95 % confidence; allowed"
    )


@pytest.mark.parametrize("raises", [False, True])
def test_training_that_diverges_under_a_plan_is_worse_and_under_fp32_shows_nothing(raises: bool) -> None:
    """The search goes on, whether the diverged run raises castwise's error, one of the loss's own, or none."""

    def explodes(model: nn.Module, batch: Any, low: bool) -> Tensor:
        weight = next(model.parameters())
        value = loss(model, batch)
        if (weight.dtype == torch.bfloat16) != low:
            return value
        if raises and not weight.isfinite().all():
            raise ValueError("a loss that checks its numbers")
        return value + weight.float().square().sum() * 1e30

    def of(low: bool) -> Workload:
        return dataclasses.replace(
            workload(), loss=lambda model, batch: explodes(model, batch, low), optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
        )  # fmt: skip

    plan = Plan.preset("bf16-true")
    found = train_pairs(of(low=True), plan, CPU, steps=20, seeds=2)
    assert (found.verdict, found.difference) == ("worse", math.inf)
    assert in_training(found) == "its loss became non-finite within 20 steps"
    other = train_pairs(of(low=False), plan, CPU, steps=20, seeds=2)
    assert other.verdict == "not shown"
    assert in_training(other) == "fp32's own loss became non-finite within 20 steps"


def test_a_fault_of_the_loss_while_all_is_finite_is_no_divergence() -> None:
    def faulty(model: nn.Module, batch: Any) -> Tensor:
        raise ZeroDivisionError("here")

    with pytest.raises(ZeroDivisionError, match="here"):
        train_pairs(
            dataclasses.replace(workload(), loss=faulty), Plan.preset("bf16-mixed"), CPU, steps=5, seeds=2
        )


def test_the_margin_is_what_the_committed_calibration_says() -> None:
    path = Path(__file__).parents[3] / "bench/results/calibration-cpu.json"
    rows = [row for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if row["workload"] != "all"]
    below = [
        row
        for row in rows
        if max(row["damage_fresh"], row["damage_trained"]) < PASS
        and max(row["adam_fresh"], row["adam_trained"]) < ADAM_PASS
    ]
    assert {row["verdict"] for row in below} == {"harmless"}
    cost = max(row["loss_difference"] / (row["fp32_start"] - row["fp32_loss"]) for row in below)
    assert cost - 1e-4 < MARGIN <= cost
    harmful = [row for row in rows if row["verdict"] == "harmful"]
    assert all(row["loss_difference"] > MARGIN * (row["fp32_start"] - row["fp32_loss"]) for row in harmful)


@pytest.mark.parametrize("constant", [-0.6, 10.0])
def test_a_constant_in_the_loss_changes_no_verdict(constant: float) -> None:
    made = dataclasses.replace(workload(), optimizer=lambda params: torch.optim.SGD(params, lr=0.5))
    shifted = dataclasses.replace(made, loss=lambda model, batch: loss(model, batch) + constant)
    plan = Plan.preset("bf16-mixed")
    plain, other = (train_pairs(one, plan, CPU, steps=20, seeds=3) for one in (made, shifted))
    assert plain.margin > 0.0
    assert other.margin == pytest.approx(plain.margin, rel=0.01)
    assert other.difference == pytest.approx(plain.difference, abs=1e-5)
    assert other.verdict == plain.verdict


def test_a_loss_that_does_not_fall_shows_nothing() -> None:
    batch = next(batches(0))
    still = dataclasses.replace(
        workload(), optimizer=lambda params: torch.optim.SGD(params, lr=0.0), batches=lambda _seed: itertools.repeat(batch)
    )  # fmt: skip
    found = train_pairs(still, Plan.preset("bf16-mixed"), CPU, steps=5, seeds=2)
    assert found.margin == 0.0
    same = train_pairs(still, Plan.preset("fp32"), CPU, steps=5, seeds=2)
    assert (same.difference, same.verdict) == (0.0, "not worse")


def test_the_same_plan_is_not_worse_than_itself() -> None:
    found = train_pairs(workload(), Plan.preset("fp32"), CPU, steps=10, seeds=3)
    assert found.difference == 0.0
    assert found.verdict == "not worse"
    with pytest.raises(PlanError, match="verify_steps=3, verify_seeds=3: needs at least 5 steps and 2 seeds"):
        train_pairs(workload(), Plan.preset("fp32"), CPU, steps=3, seeds=3)


def test_training_decides_only_near_the_lines() -> None:
    def found(
        damage: float,
        adam: float | None = None,
        floor: float = 0.0,
        strayed: int = 0,
        stopped: tuple[str, ...] = (),
    ) -> ParityResult:
        value = Estimate(damage, damage, damage, *[0.0] * 6)
        steps = None if adam is None else dataclasses.replace(value, value=adam)
        return ParityResult(
            Plan.preset("bf16-mixed"),
            "fail",
            "",
            value,
            steps,
            (),
            floor=floor,
            repeat=0.0,
            strayed=strayed,
            stopped=stopped,
        )

    assert is_doubtful(found(0.11))
    assert is_doubtful(found(0.02, adam=0.8))
    assert not is_doubtful(found(0.31))
    assert not is_doubtful(found(0.11, adam=1.0))
    assert not is_doubtful(found(math.inf))
    assert not is_doubtful(found(0.11, floor=0.1))  # the floor of fp32 is as large
    assert not is_doubtful(found(0.11, strayed=1))
    assert not is_doubtful(
        found(0.01, stopped=("norm.running_mean",))
    )  # buffers that do not affect the training loss


def test_a_format_that_gains_nothing_where_another_gains_is_dropped_before_the_race() -> None:
    """Regression: fp16 convolutions took 12 to 20 times as long but stayed in, and a model's first steps took 20 s."""
    costs = {
        "conv": Cost({"fp32": 10.0, "bf16": 6.0, "fp16": 90.0}, {"bf16": 11.0, "fp16": 10.5}),
        "norm": Cost({"fp32": 1.0, "bf16": 1.0, "fp16": 0.9}, {"bf16": 1.2, "fp16": 1.2}),
    }
    assert not_faster("fp16", ("bf16", "fp16"), costs).startswith(
        "timed module by module, bf16 is faster: in fp16 conv takes 9.0 "
    )
    assert not_faster("fp16", ("fp16",), costs) == (
        "timed module by module, it is no faster than fp32: conv takes 9.0 times as long as fp32"
    )
    assert not not_faster("bf16", ("bf16", "fp16"), costs)
    costs["conv"].bordered_s["bf16"] = costs["conv"].times_s["bf16"] = 9.9  # bf16 gains nothing either
    assert not_faster("fp16", ("bf16", "fp16"), costs).startswith(
        "timed module by module, it is no faster than fp32"
    )
    costs["conv"].times_s.update(bf16=6.0, fp16=8.0)
    assert not not_faster("fp16", ("bf16", "fp16"), costs)


def test_a_format_without_units_has_to_gain_by_regions_to_be_raced() -> None:
    """Regression: on a CPU without bf16, 60 of 100 s went into plans of BERT with only the activations in bf16."""

    def costs(low_s: float, activation_s: float) -> dict[str, Cost]:
        return {
            "linear": Cost({"fp32": 8.0, "bf16": low_s}, {"bf16": 8.2}),
            "activation": Cost({"fp32": 2.0, "bf16": activation_s}, {"bf16": 2.0}),
        }

    assert lacks_units("bf16", costs(24.0, 1.6))
    assert not_faster("bf16", ("bf16",), costs(24.0, 1.6)) == (
        "timed module by module, it saves at most 2% of fp32's time: linear takes 3.0 times as long as fp32"
    )
    assert not not_faster("bf16", ("bf16",), costs(24.0, 0.9))
    assert not lacks_units("bf16", costs(23.0, 1.6))
    assert not not_faster("bf16", ("bf16",), costs(23.0, 1.6))  # has units: whole steps decide
    hopeless = costs(24.0, 1.6) | {"linear": Cost({"fp32": 8.0}, reasons={"bf16": "takes 12 times as long"})}
    assert lacks_units("bf16", hopeless)
    assert not_faster("bf16", ("bf16",), hopeless)


@pytest.mark.parametrize(("linear_s", "shown"), [(9.0, False), (2.9, True)])
def test_one_line_autocast_is_raced_where_the_device_has_units_for_it(
    linear_s: float, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: one step of autocast, timed only for display, took as long as all other steps of a search."""
    found = Search(Context(workload(), CPU, Settings(formats=("fp32", "bf16"), budget_s=30.0)))
    found.begun = refer(found.context)
    known = {"0": Cost({"fp32": 1.0, "bf16": linear_s}, {"bf16": 1.2})}
    monkeypatch.setattr(fastest, "measure_costs", lambda *_args, **_options: known)
    autocast = Plan.preset("bf16-mixed")
    out = fastest._by_costs(found, [BASELINE, autocast, Plan.preset("bf16-master")])
    assert set(out) == ({BASELINE, autocast} if shown else {BASELINE})
    assert (autocast in found.journal.fates) != shown


def test_autocast_that_is_raced_to_be_shown_has_no_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a variant in a dropped format reached the final, with the note "may still be much faster"."""
    autocast, master = Plan.preset("bf16-mixed"), Plan.preset("bf16-master")
    found = Search(Context(workload(), CPU, Settings(formats=("fp32", "bf16"), budget_s=30.0)))
    found.begun = BEGUN
    monkeypatch.setattr(
        fastest, "with_operators_as_is", lambda plan, *_: dataclasses.replace(plan, ops={"softmax": "as_is"})
    )
    raced: list[Plan] = []
    monkeypatch.setattr(Contest, "halve", lambda _self, plans, **_: raced.extend(plans) or [BASELINE])
    with Contest(workload(), CPU) as contest:
        found.race = contest
        contest.entries[autocast] = Entry(autocast)
        assert fastest._with_operators(found, [autocast]) == [autocast]
        assert raced == []
        contest.entries[master] = Entry(master)
        fastest._with_operators(found, [autocast])
        assert len(raced) == 2


def test_what_is_far_slower_is_timed_twice() -> None:
    count = {"fp32": 0, "near": 0, "far": 0}

    def takes(name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            count[name] += 1
            time.sleep(seconds)

        return run

    ways = {
        ("fp32", False): takes("fp32", 0.004),
        ("bf16", False): takes("near", 0.004),
        ("fp16", False): takes("far", 0.04),
    }
    best = part_costs._least_s(ways, CPU, BY_ITSELF)
    assert count == {"fp32": part_costs.ROUNDS, "near": part_costs.ROUNDS, "far": 2}
    assert set(best) == set(ways)
    assert best["fp16", False] >= 0.04


def test_a_format_that_is_dropped_names_the_part_that_loses_most() -> None:
    """Regression: the message named the largest part, although that took 0.9 times as long as fp32."""
    costs = {
        "large": Cost({"fp32": 10.0, "bf16": 9.9}, {"bf16": 11.0}),
        "small": Cost({"fp32": 1.0, "bf16": 3.0}, {"bf16": 3.0}),
    }
    assert not_faster("bf16", ("bf16",), costs) == (
        "timed module by module, it is no faster than fp32: small takes 3.0 times as long as fp32"
    )


def test_training_runs_are_as_long_as_time_allows() -> None:
    assert affordable_steps(80.0, 0.1, 8) == 80
    assert affordable_steps(1e6, 0.1, 8) == 100
    assert affordable_steps(1e6, 0.1, 8, asked=300) == 300
    assert affordable_steps(80.0, 0.1, 8, asked=300) == 80
    assert affordable_steps(1e6, 0.1, 8, asked=5) == 5
    assert affordable_steps(1.0, 0.1, 8, asked=5) == 0
    assert affordable_steps(10.0, 0.1, 8) == 0  # too few steps to compare losses


def test_attention_is_unfused_where_there_is_any_and_no_gpu() -> None:
    line = nn.Linear(4, 4)

    def plans(used: set[str], goal: str = "time") -> list[Plan]:
        optimizer = sgd(line.parameters())
        return whole_step_plans(("fp32", "bf16"), CPU, optimizer, has_images=False, goal=goal, used=used)[0]

    def unfused(found: list[Plan]) -> list[Plan]:
        return [p for p in found if ("scaled_dot_product_attention", "unfused") in p.ops]

    attention = {"scaled_dot_product_attention"}
    wanted = set() if DEVICE == "cuda" else {"fp32", "compute"}
    assert {p.params for p in unfused(plans(attention))} == wanted
    assert not any(p.compute == "fp32" for p in unfused(plans(attention)))
    assert not unfused(plans({"mm"}))
    assert not unfused(plans(attention, goal="memory"))  # unfused attention keeps the scores for backward
