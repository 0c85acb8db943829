"""Probes: dither, the gradients that are compared, and what an observer sees."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from castwise import Plan
from castwise.errors import NonFiniteError, WorkloadError
from castwise.lab.parity.probes import Prober, dithered
from castwise.lab.passes.observers import Call, Observer
from tests.here import DEVICE

HERE = torch.device(DEVICE)


def batches(seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    while True:
        yield torch.randn(16, 8, generator=generator), torch.randint(4, (16,), generator=generator)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))


def prober(model: nn.Module, count: int = 4) -> Prober:
    made = Prober(model, loss, batches(), HERE)
    made.extend(count)
    return made


# --- dither ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "eps"), [(torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10)])
def test_dither_is_at_most_half_of_the_last_place_and_makes_rounding_unbiased(
    dtype: torch.dtype, eps: float
) -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    weight = torch.randn(500, generator=generator)
    unit = 2.0 ** (torch.frexp(weight)[1] - 1) * eps
    mean = torch.zeros(500)
    for _ in range(400):
        moved = dithered(weight, eps, generator)
        assert ((moved - weight).abs() <= unit / 2 * (1 + 1e-6)).all()
        mean += moved.to(dtype).float() / 400
    fixed = (weight.to(dtype).float() - weight) / unit
    left = (mean - weight) / unit
    assert left.abs().mean() < 0.25 * fixed.abs().mean()


def test_zero_stays_zero() -> None:
    assert (dithered(torch.zeros(10), 2.0**-7, torch.Generator(DEVICE).manual_seed(0)) == 0).all()
    ends = torch.tensor([math.inf, -math.inf]).repeat(8)  # infinities, as in masks
    assert torch.equal(dithered(ends, 2.0**-7, torch.Generator(DEVICE).manual_seed(0)), ends)


def test_complex_weights_are_dithered_and_sampled_in_both_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Phase(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(64, dtype=torch.cfloat))

        def forward(self, x: Tensor) -> Tensor:
            return (self.w * torch.view_as_complex(x.reshape(64, 2))).real

    monkeypatch.setattr("castwise.lab.parity.probes.MOST_ELEMENTS", 50)
    torch.manual_seed(0)
    found = Prober(Phase(), lambda m, b: m(b[0]).square().sum(), batches(), HERE)
    found.extend(2)
    weights = found.model.w.detach()
    moved = dithered(weights, 2.0**-7, torch.Generator(DEVICE).manual_seed(0))
    assert bool((moved.real != weights.real).all())
    assert bool((moved.imag != weights.imag).all())
    assert [len(micro.gradients[0]) for micro in found.micros] == [50, 50]


# --- gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["bf16-mixed", "bf16-master", "fp16-mixed", "fp16-master"])
def test_gradients_come_unscaled_and_in_fp32(plan: str) -> None:
    found = prober(mlp())
    probe = found.probe(Plan.preset(plan), range(4))
    assert probe.finite
    for errors, micro in zip(probe.errors, found.micros, strict=True):
        d, g = torch.cat(errors), torch.cat(micro.gradients)
        assert d.dtype is torch.float32
        assert 0 < float(d.norm() / g.norm()) < 0.05


def test_a_scale_that_overflows_is_lowered() -> None:
    def steep(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return 3000.0 * loss(model, batch)

    found = Prober(mlp(), steep, batches(), HERE)
    found.extend(2)
    probe = found.probe(Plan.preset("fp16-mixed"), range(2))
    assert probe.finite
    assert probe.scale is not None
    assert probe.scale < 65536.0


# --- observers --------------------------------------------------------------------------------------------------------


def test_an_observer_sees_a_plans_pass_with_the_draws_of_the_reference() -> None:
    model = nn.Sequential(mlp(), nn.Dropout(0.5))
    made = prober(model, 2)
    seen: list[tuple[Tensor, torch.dtype]] = []

    class Dropped(Observer):
        def modules(self, running: nn.Module) -> Iterable[tuple[str, nn.Module]]:
            return (("1", running.get_submodule("1")),)

        def leave(self, _call: Call, out: Tensor) -> None:
            seen.append((out.detach() == 0, out.dtype))

        @contextlib.contextmanager
        def around(self, running: nn.Module) -> Iterator[None]:
            yield
            assert all(p.grad is not None for p in running.parameters())

    for plan in ("fp32", "bf16-mixed"):
        made.observe(Plan.parse(plan), [1, 0], Dropped())
    assert made.passes == 2 + 4
    assert [dtype for _, dtype in seen] == [torch.float32] * 2 + [torch.bfloat16] * 2
    assert torch.equal(seen[0][0], seen[2][0])
    assert torch.equal(seen[1][0], seen[3][0])
    assert not torch.equal(seen[0][0], seen[1][0])


def test_batches_that_run_out() -> None:
    few = Prober(mlp(), loss, iter([next(batches())] * 3), HERE, call="tune('mine')")
    with pytest.raises(WorkloadError, match=r"tune\('mine'\): batches ended after 3; the test needs"):
        few.extend(8)


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (lambda m, b: loss(m, b).detach(), "a tensor without a graph, so the loss is not differentiable"),
        (
            lambda m, b: m(b[0]),
            r"a tensor of shape \[16, 4\] and float32; it must return a floating tensor with one element",
        ),
        (lambda m, b: 3.0, "float; it must return a floating tensor with one element"),
    ],
)
def test_losses_that_cannot_be_used(broken: object, text: str) -> None:
    made = Prober(mlp(), broken, batches(), HERE)  # type: ignore[arg-type]
    with pytest.raises(WorkloadError, match=rf"^parity: loss\(model, batch\) returned {text}"):
        made.extend(1)


def test_a_loss_of_another_model() -> None:
    other = mlp()
    made = Prober(mlp(), lambda _model, b: loss(other, b), batches(), HERE)
    with pytest.raises(
        WorkloadError, match="no parameter of the model has a gradient; the loss must call the model"
    ):
        made.extend(1)


def test_what_fails_in_fp32_already() -> None:
    def poisoned() -> Iterator[tuple[Tensor, Tensor]]:
        x, y = next(batches())
        yield x.index_fill(0, torch.tensor([2]), float("nan")), y

    made = Prober(mlp(), loss, poisoned(), HERE)
    with pytest.raises(
        NonFiniteError, match=r"batch 0 is not finite in fp32 already.*batch\[0\] \(8 of 128 values\)"
    ):
        made.extend(1)
