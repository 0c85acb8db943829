"""Repair finds a fragile module among many regions and keeps the sound ones in low precision."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import castwise
from castwise import Plan
from castwise.lab.parity.parity import ParityTest
from castwise.lab.parity.probes import Prober
from castwise.lab.parity.verdicts import LEAST
from castwise.lab.passes.regions import find_parts
from castwise.lab.search.repair import VERIFYING, NumericsSearch
from tests.here import DEVICE
from tests.soak import SOAKING, every


class Offset(nn.Module):
    """The identity, computed by adding and subtracting 1000; a low format loses the input."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 1000.0) - 1000.0


class Shift(nn.Module):
    """The input plus a number so large that a low format loses the input."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by

    def extra_repr(self) -> str:
        return f"{self.by}"


class Cast(nn.Module):
    """A cast to autocast's dtype, as in code written for torch.autocast."""

    def forward(self, x: Tensor) -> Tensor:
        low = torch.is_autocast_enabled(DEVICE)
        return x.to(torch.get_autocast_dtype(DEVICE)) if low else x


class Glue(nn.Module):
    """A shift in the module's own forward, between two sound layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(16, 16)
        self.after = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        far = torch.full_like(x, 1000.0)
        return self.after(torch.add(torch.add(self.before(x), far), -far))


class Reverse(torch.autograd.Function):
    """The identity, with gradients multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


class Weighed(nn.Module):
    """The identity; its backward pass scales gradients below fp16's range and back."""

    def forward(self, x: Tensor) -> Tensor:
        return Reverse.apply(Reverse.apply(x, 1e13), 1e-13)  # type: ignore[no-any-return]


class NoKernel(nn.Module):
    """A module that runs only in fp32, since torch lacks airy_ai in low formats."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * torch.special.airy_ai(x.detach()).sum()


def batches(seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    while True:
        yield (
            torch.randn(16, 16, generator=generator, device=DEVICE),
            torch.randint(4, (16,), generator=generator, device=DEVICE),
        )


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


class Block(nn.Module):
    """A residual block, so that deep stacks can be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.act = nn.GELU()
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def model(depth: int, *places: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 16),
        nn.Sequential(*(Block() for _ in range(depth))),
        *places,
        nn.LayerNorm(16),
        nn.Linear(16, 4),
    )


def search(made: nn.Module, left_s: float = 0.0) -> NumericsSearch:
    test = ParityTest(Prober(made, loss, batches(), torch.device(DEVICE)), 1, True)
    test.reference(8)
    parts = find_parts(made, lambda: loss(made, test.prober.micros[0].batch))
    return NumericsSearch(test, parts, left_s=lambda: left_s)


@pytest.mark.parametrize("depth", [24, 2] if SOAKING else [12])
def test_one_fragile_place_is_found_within_the_passes(depth: int) -> None:
    found = search(model(depth, Offset()))
    plan = Plan.preset("bf16-mixed")
    result = found.find(plan)
    assert result.verdict == "fail"
    repair = found.repair(plan, result, reserve=16)
    assert set(repair.kept) == {"2"}
    assert [r.pattern for r in repair.plan.regions] == ["2"]
    assert "damage, the relative error of the update" in repair.kept["2"]
    assert found.verify(repair.plan).verdict == "pass"
    assert found.left() >= 0


def test_two_fragile_places_are_found() -> None:
    found = search(model(2, Offset(), nn.Linear(16, 16), Offset()))
    plan = Plan.preset("bf16-mixed")
    repair = found.repair(plan, found.find(plan), reserve=16)
    assert set(repair.kept) == {"2", "4"}
    assert found.verify(repair.plan).verdict == "pass"


@every(2)
@pytest.mark.parametrize(
    ("place", "kept", "regions"),
    [
        (nn.Sequential(Shift(1000.0), Shift(-1000.0)), {"2.0", "2.1"}, "2"),
        (nn.Sequential(Shift(1000.0), Cast(), Shift(-1000.0)), {"2.0", "2.2"}, "2"),
        (nn.Sequential(nn.Tanh(), Shift(1000.0), Cast(), Shift(-1000.0)), {"2.0", "2.1", "2.3"}, "2"),
        (nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Tanh(), Shift(1e3), Cast(), Shift(-1e3))),
         {"2.1.0", "2.1.1", "2.1.3"}, "2.1"),
        (nn.Sequential(Cast(), Offset()), {"2.1"}, "2.1"),
        (nn.Sequential(nn.Sequential(nn.Tanh(), Shift(1e3)), Cast(), nn.Sequential(Shift(-1e3), nn.Tanh())),
         {"2.0.0", "2.0.1", "2.2.0", "2.2.1"}, "2"),
        (Glue(), {"2", "2.before", "2.after"}, "2"),
    ],
    ids=["two parts", "a cast between", "beside another part", "nested", "a part is enough", "wider", "glue"],
)  # fmt: skip
def test_the_smallest_container_is_kept_where_its_parts_are_no_cure(
    place: nn.Module, kept: set[str], regions: str
) -> None:
    found = search(model(2, place))
    plan = Plan.preset("bf16-mixed")
    repair = found.repair(plan, found.find(plan), reserve=16)
    assert [r.pattern for r in repair.plan.regions] == [regions]
    assert set(repair.kept) == kept
    assert all(repair.kept.values())
    assert found.verify(repair.plan).verdict == "pass"
    assert found.left() >= 0


def test_alike_containers_behind_relus_are_one_set_and_need_no_more() -> None:
    class Up(Shift):
        extra_repr = nn.Module.extra_repr

    torch.manual_seed(0)
    data = [(torch.randn(16, 32), torch.randint(10, (16,))) for _ in range(40)]
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(32, 32))
    for _ in range(3):
        made.append(nn.Sequential(nn.Linear(32, 32), nn.Sequential(Up(1e3), Up(-1e3)), nn.ReLU()))
    result = castwise.tune(
        model=made.append(nn.Linear(32, 10)), loss=loss, batches=data, goal="numerics", memory=False,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    )  # fmt: skip
    assert [region.pattern for region in result.plan.regions] == ["*.*.*"]
    assert sum(stage.passes for stage in result.evidence.stages) <= 150


def test_what_stays_undecided_is_not_said_to_have_failed() -> None:
    calls = itertools.count()
    result = castwise.tune(
        model=nn.Linear(16, 4), loss=lambda m, b: loss(m, b) * (1 + next(calls) % 7), batches=batches,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1), goal="numerics", memory=False,
    )  # fmt: skip
    assert str(result.plan) == "fp32"
    assert any("bf16 was not shown to be sound" in note for note in result.evidence.notes)
    assert not any("No set of regions made" in note for note in result.evidence.notes)


def test_a_function_with_a_backward_of_its_own_is_found() -> None:
    found = search(model(2, nn.Sequential(nn.Linear(16, 16), Weighed())))
    plan = Plan.preset("fp16-mixed")
    repair = found.repair(plan, found.find(plan), reserve=16)
    assert [r.pattern for r in repair.plan.regions] == ["2.1"]
    assert found.verify(repair.plan).verdict == "pass"


def test_what_cannot_run_low_is_kept_for_that_reason() -> None:
    found = search(model(2, NoKernel()))
    repair = found.repair(Plan.preset("bf16-mixed"), None, reserve=16)
    assert set(repair.kept) == {"2"}
    kernel = "airy_ai_cuda" if DEVICE == "cuda" else "airy_ai_cpu"  # the simulated device computes on the CPU
    assert repair.kept["2"] == f"not supported by this device: \"{kernel}\" not implemented for 'BFloat16'"
    assert repair.result is not None
    assert repair.result.verdict == "pass"


def test_a_sound_model_needs_no_repair() -> None:
    found = search(model(3))
    for plan in ("bf16-mixed", "bf16-master", "fp16-mixed"):
        assert found.find(Plan.preset(plan)).verdict == "pass"


def test_the_chosen_plan_is_verified_on_as_many_fresh_batches_as_it_takes_to_pass() -> None:
    found = search(model(2))
    plan = Plan.preset("bf16-mixed")
    assert found.find(plan).microbatches == 8
    passes = found.left()
    result = found.verify(plan)
    assert result.verdict == "pass"
    assert result.microbatches == LEAST - 8
    assert passes - found.left() == 2 * (LEAST - 8)
    assert found.verify(Plan.preset("bf16-master")).microbatches >= LEAST  # this plan was not tested before


def test_more_is_drawn_where_the_verdict_hangs_on_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan.preset("bf16-mixed")
    seen = search(model(2)).find(plan)
    assert seen.adam is not None
    monkeypatch.setattr("castwise.lab.parity.verdicts.PASS", 1.0)
    line = (seen.adam.value + seen.adam.high) / 2  # a limit in the upper half of the interval
    monkeypatch.setattr("castwise.lab.parity.verdicts.ADAM_PASS", line)
    found = search(model(2))
    assert found.find(plan).microbatches > 8
    assert found.left() >= VERIFYING


def test_microbatches_that_time_allows_leave_the_passes_to_other_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = Plan.preset("bf16-mixed")
    first = search(model(2))
    seen = first.find(plan)
    assert seen.adam is not None
    monkeypatch.setattr("castwise.lab.parity.verdicts.PASS", 1.0)
    monkeypatch.setattr(
        "castwise.lab.parity.verdicts.ADAM_PASS", seen.adam.value + 0.35 * (seen.adam.high - seen.adam.value)
    )
    monkeypatch.setattr("castwise.lab.search.repair.MOST", 1)
    few, many = search(model(2)), search(model(2), left_s=1e6)
    passes = {}
    for one in (few, many):
        began = one._test.prober.passes
        one.find(plan)
        passes[one] = one._test.prober.passes - began
    assert passes[many] > passes[few]
    assert many.left() == few.left()


def test_a_source_is_found_if_the_first_microbatch_is_not_finite() -> None:
    class Overflows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 1e6) * 1e-6

    found = search(model(4, Overflows()))
    plan = Plan.preset("fp16-mixed")
    result = found.find(plan)
    assert result.verdict == "fail"
    repair = found.repair(plan, result, reserve=16)
    assert set(repair.kept) == {"2"}
