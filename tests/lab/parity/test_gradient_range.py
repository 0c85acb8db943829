"""Histograms of known gradients, and the loss scales that follow from them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from castwise import Amp, LossScale, Plan, compare, first_nonfinite, parity
from castwise.lab.parity.gradient_range import GradientRange, Histogram, Magnitudes
from castwise.lab.parity.parity import ParityTest, with_measured_scale
from castwise.lab.parity.probes import Prober
from castwise.lab.passes.observers import observed
from castwise.lab.watch import Monitor
from tests.here import DEVICE

FP16 = Plan.preset("fp16-mixed")


class Pass(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1.0


def _seen(*gradients: Tensor) -> GradientRange:
    """Return the range observed on modules whose outputs have these gradients."""
    model, seen = nn.ModuleDict({f"m{i}": Pass() for i in range(len(gradients))}), GradientRange()
    with observed(model, seen):
        for module, gradient in zip(model.values(), gradients, strict=True):
            module(torch.ones_like(gradient, requires_grad=True)).backward(gradient)
    return seen


def test_every_gradient_is_in_the_bin_of_its_power_of_two() -> None:
    found = _seen(torch.tensor([1.0, 1.5, 1.999, -2.0, 0.25, 0.0, -0.0])).histogram("m", ["m0"])
    assert found is not None
    assert found.zeros == 2
    assert {2.0 ** (found.lowest + i): n for i, n in enumerate(found.counts) if n} == {
        0.25: 1,
        1.0: 3,
        2.0: 1,
    }


def test_a_value_that_stands_for_several_counts_as_often() -> None:
    seen = Magnitudes()
    seen.add(torch.tensor([1.0, 0.0, math.inf]), times=3)
    seen.add(torch.tensor([2.0**-149, 4.0], dtype=torch.float64))
    seen.add(torch.zeros(0))
    found = seen.histogram("m")
    assert (found.lowest, found.zeros, sum(found.counts), seen.largest) == (-149, 3, 5, math.inf)
    assert found.counts[0] == found.counts[-1] == 1
    assert found.counts[149] == 3


def test_histograms_add_up_over_modules_and_passes() -> None:
    seen = _seen(torch.tensor([1.0, 0.0]), torch.tensor([8.0, 1.0]))
    both = seen.histogram("both", ["m0", "m1", "unknown"])
    assert both is not None
    assert (both.lowest, both.counts, both.zeros) == (0, (2, 0, 0, 1), 1)
    assert seen.histogram("none", ["unknown"]) is None


def test_gradients_that_are_all_zero() -> None:
    seen = _seen(torch.zeros(5))
    assert seen.histogram("m", ["m0"]) == Histogram("m", 0, (), 5)
    assert seen.scales() is None


def test_magnitudes_beyond_the_bins_are_in_the_outermost_ones() -> None:
    found = _seen(torch.tensor([2.0**-100, 2.0**100])).histogram("m", ["m0"])
    assert found is not None
    assert sum(found.counts) == 2


@pytest.mark.parametrize("factor", [2.0**-12, 1.0, 2.0**9])
def test_the_scales_moves_against_the_gradients(factor: float) -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    gradient = torch.randn(1000, generator=generator)
    one, other = _seen(gradient).scales(), _seen(gradient * factor).scales()
    assert one is not None
    assert other is not None
    assert other.largest == one.largest * factor
    assert other.smallest == one.smallest * factor
    assert other.init == one.init / factor
    assert other.highest_scale == pytest.approx(one.highest_scale / factor)
    assert other.lowest_scale == pytest.approx(one.lowest_scale / factor)


def test_inside_the_scales_nothing_overflows_and_little_underflows() -> None:
    gradient = torch.randn(4000) * 10.0 ** torch.linspace(-7, 0, 4000)
    scales = _seen(gradient).scales()
    assert scales is not None
    for scale in (scales.lowest_scale, scales.init, scales.highest_scale):
        held = (gradient.double() * scale).half().double() / scale
        assert bool(torch.isfinite(held).all())
        lost = gradient.double()[held == 0].square().sum() / gradient.double().square().sum()
        assert float(lost) <= 1e-4
    assert torch.isinf((gradient.double() * scales.highest_scale * 1.01).half()).any()
    assert scales.init <= scales.highest_scale / 8
    assert math.log2(scales.init).is_integer()


def test_gradients_of_parameters_hold_the_scales_down_too() -> None:
    seen = _seen(torch.ones(3))
    before = seen.scales()
    seen.see_parameters(["w", "none"], [torch.tensor([-512.0, 1.0]), torch.zeros(0)])
    after = seen.scales()
    assert before is not None
    assert after is not None
    assert after.largest == 512.0
    assert after.init == before.init / 512


def test_a_module_with_next_to_no_gradient_does_not_hold_it_up() -> None:
    alone, beside = _seen(torch.ones(9)).scales(), _seen(torch.ones(9), torch.full((9,), 1e-9)).scales()
    assert alone is not None
    assert beside is not None
    assert beside.smallest == alone.smallest


@pytest.mark.parametrize(("largest", "empty"), [(2.0**39, False), (2.0**41, True)])
def test_a_scales_is_empty_where_fp16_cannot_hold_both_ends(largest: float, empty: bool) -> None:
    seen = _seen(torch.ones(9))
    seen.see_parameters(["w"], [torch.tensor([largest])])
    scales = seen.scales()
    assert scales is not None
    assert scales.smallest == 1.0
    assert scales.is_empty is empty


@pytest.mark.parametrize(("size", "init"), [(1e-30, 2.0**24), (1e30, 2.0**-14)])
def test_the_start_stays_within_reason(size: float, init: float) -> None:
    scales = _seen(torch.full((9,), size)).scales()
    assert scales is not None
    assert scales.init == init


def test_gradients_that_are_not_finite_do_not_make_the_window() -> None:
    scales = _seen(torch.ones(2), torch.tensor([math.inf, 1.0])).scales()
    assert scales is not None
    assert scales.largest == 1.0


# --- plans ----------------------------------------------------------------------------------------------------


def test_a_plan_starts_inside_the_scales_and_within_its_own_bounds() -> None:
    seen = _seen(torch.ones(4))  # 65504 / 8 -> 2**12
    start = with_measured_scale(FP16, seen).loss_scale
    assert start is not None
    assert start.init == 2.0**12
    for bounds, init in (
        ({"ceiling": 64.0, "init": 64.0}, 64.0),
        ({"floor": 2.0**14, "init": 2.0**14}, 2.0**14),
    ):
        plan = Plan(compute="fp16", loss_scale=LossScale(**bounds))
        scale = with_measured_scale(plan, seen).loss_scale
        assert scale is not None
        assert scale.init == init


def test_plans_without_a_dynamic_scale_stay_as_they_are() -> None:
    seen = _seen(torch.ones(4))
    fixed = Plan(compute="fp16", loss_scale=LossScale(init=8.0, dynamic=False))
    for plan in (Plan.preset("bf16-mixed"), Plan.preset("fp32"), fixed):
        assert with_measured_scale(plan, seen) is plan
    assert with_measured_scale(FP16, GradientRange()) is FP16


@pytest.mark.parametrize("factor", [1.0, 3000.0])
def test_training_from_the_measured_scale_skips_no_step(factor: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    batches = [(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(8)]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return factor * functional.cross_entropy(model(batch[0]), batch[1])

    test = ParityTest(Prober(model, loss, iter(batches), torch.device(DEVICE)))
    test.reference(4, observed=2)

    def skipped(plan: Plan) -> int:
        torch.manual_seed(0)
        trained = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
        with Amp(plan) as amp:
            amp.prepare(trained, optimizer)
            count = 0
            for step in range(20):
                amp.backward(loss(trained, batches[step % 8]))
                count += bool(amp.step(optimizer).skipped)
                optimizer.zero_grad()
        return count

    measured = with_measured_scale(FP16, test.range)
    assert measured != FP16
    assert skipped(measured) == 0
    if factor > 1.0:
        assert skipped(FP16) > 0  # with the default loss scale steps are skipped


def test_watching_changes_no_gradient_and_leaves_no_hook() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    x = torch.randn(5, 3)
    plain = torch.autograd.grad(model(x).sum(), model.parameters())
    with observed(model, GradientRange()):
        watched = torch.autograd.grad(model(x).sum(), model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert not any(m._forward_hooks for m in model.modules())


class OneOfThree(nn.Module):
    """Three outputs of one operator, of which the loss uses one. Autograd calls the hooks of the others with None."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.chunk(3, -1)


def test_outputs_that_nothing_uses_have_no_gradient() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        return model(batch[0])[1].pow(2).mean()

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 12), OneOfThree())

    net, gradients = model(), GradientRange()
    with observed(net, gradients):
        loss(net, (torch.ones(2, 4),)).backward()
    assert set(gradients.largest) == {"0", "1", ""}
    batches = [(torch.randn(8, 4),) for _ in range(32)]
    assert parity(model(), loss, batches, "fp16-mixed", device=DEVICE).verdict != "fail"
    compare(model(), loss, batches[0], "fp32", "fp16-mixed", device=DEVICE)
    first_nonfinite(model(), loss, batches[0], "fp16-mixed", device=DEVICE)
    amp, net = Amp("fp16-mixed", device=DEVICE), model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    amp.prepare(net, optimizer)
    monitor = Monitor(amp, every=1)
    for batch in batches[:3]:
        amp.backward(loss(net, batch))
        amp.step(optimizer)
        optimizer.zero_grad()
    assert not monitor.report().unseen
