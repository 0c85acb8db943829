"""Probes: dither, isolation, what counts as a gradient, and the loss-scale window."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from castwise import Plan
from castwise.errors import NonFiniteError, WorkloadError
from castwise.numerics.batches import endless, same_batch
from castwise.numerics.isolation import undisturbed
from castwise.numerics.parity import ParityTest
from castwise.numerics.probes import Prober, _dithered
from castwise.numerics.updates import lost_updates
from castwise.numerics.window import GradientRange
from castwise.workload import find_workload

CPU = torch.device("cpu")


def batches(seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(16, 8, generator=generator), torch.randint(4, (16,), generator=generator)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))


def prober(model: nn.Module, count: int = 4) -> Prober:
    made = Prober(model, loss, batches(), CPU)
    made.extend(count)
    return made


# --- dither ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "eps"), [(torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10)])
def test_dither_is_at_most_half_of_the_last_place_and_makes_rounding_unbiased(
    dtype: torch.dtype, eps: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(500, generator=generator)
    unit = 2.0 ** (torch.frexp(weight)[1] - 1) * eps
    mean = torch.zeros(500)
    for _ in range(400):
        moved = _dithered(weight, eps, generator)
        assert ((moved - weight).abs() <= unit / 2 * (1 + 1e-6)).all()
        mean += moved.to(dtype).float() / 400
    fixed = (weight.to(dtype).float() - weight) / unit
    left = (mean - weight) / unit
    assert left.abs().mean() < 0.25 * fixed.abs().mean()


def test_zero_stays_zero() -> None:
    assert (_dithered(torch.zeros(10), 2.0**-7, torch.Generator().manual_seed(0)) == 0).all()


def test_rounded_weights_are_no_bias_under_dither() -> None:
    """Without dither much of the squared error is the weights' own rounding, the same in every batch."""
    workload = find_workload("gpt?layers=2&width=64&context=32")
    torch.manual_seed(0)
    model = workload.model()

    def persistent(dither: str) -> float:
        found = Prober(model, workload.loss, iter(workload.batches(0)), CPU, dither=dither)
        found.extend(8)
        errors = found.trial(Plan.preset("bf16-mixed"), range(8)).errors
        d = torch.stack([torch.cat(e) for e in errors]).double()
        return float(((d.mean(0) ** 2).sum() - d.var(0).sum() / 8) / (d**2).sum(1).mean())

    assert persistent("fp32") > 0.3  # a step of fp32's last place is as good as none
    assert abs(persistent("bf16")) < 0.05


# --- isolation --------------------------------------------------------------------------------------------------


def test_the_model_is_not_touched() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 4))
    model[1].eval()
    before = copy.deepcopy(model.state_dict())
    test = ParityTest(prober(model, 0), 1, True)
    test.reference(4)
    test.prober.trial(Plan.preset("bf16-master"), range(4))
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert [m.training for m in model] == [True, False, True, True]
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("fails", [False, True])
def test_everything_random_and_process_wide_is_given_back(fails: bool) -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    with torch.no_grad():
        with pytest.raises(KeyError) if fails else undisturbed(), undisturbed():
            assert torch.is_grad_enabled()
            torch.manual_seed(7)
            random.seed(7)
            np.random.seed(7)
            torch.set_default_dtype(torch.float64)
            if fails:
                raise KeyError
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()
    assert torch.get_default_dtype() is torch.float32


def test_a_repeated_pass_is_the_same_and_buffers_start_anew() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))
    assert all(float(e.abs().max()) == 0.0 for e in prober(model).repeat(2).errors[0])


# --- gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["bf16-mixed", "bf16-master", "fp16-mixed", "fp16-master"])
def test_gradients_come_unscaled_and_in_fp32(plan: str) -> None:
    found = prober(mlp())
    trial = found.trial(Plan.preset(plan), range(4))
    assert trial.finite
    for errors, micro in zip(trial.errors, found.micros, strict=True):
        d, g = torch.cat(errors), torch.cat(micro.gradients)
        assert d.dtype is torch.float32
        assert 0 < float(d.norm() / g.norm()) < 0.05


def test_frozen_and_shared_parameters_count_once_or_not_at_all() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    model.append(nn.Linear(4, 4))
    model.append(nn.Linear(4, 4))
    model[5].weight = model[4].weight
    assert prober(model).names == [
        "0.bias",
        "1.weight",
        "1.bias",
        "3.weight",
        "3.bias",
        "4.weight",
        "4.bias",
        "5.bias",
    ]


def test_a_scale_that_overflows_is_lowered() -> None:
    def steep(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return 3000.0 * loss(model, batch)

    found = Prober(mlp(), steep, batches(), CPU)
    found.extend(2)
    trial = found.trial(Plan.preset("fp16-mixed"), range(2))
    assert trial.finite
    assert trial.scale is not None
    assert trial.scale < 65536.0


def test_a_gradient_that_is_rounding_alone_is_dead() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    test = ParityTest(prober(model, 0), 1, True)
    test.reference(4)
    assert test._dead == {"0.bias"}
    assert 0.0 < test.floor < 1e-6
    assert test.repeat == 0.0


def test_a_sample_stands_for_a_large_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = prober(mlp(), 4)
    truth = whole.grams(whole.trial(Plan.preset("bf16-mixed"), range(4)))["3.weight"]
    monkeypatch.setattr("castwise.numerics.probes.MOST_ELEMENTS", 64)
    part = prober(mlp(), 4)
    found = part.grams(part.trial(Plan.preset("bf16-mixed"), range(4)))["3.weight"]
    assert found.signal.trace() == pytest.approx(truth.signal.trace(), rel=0.5)


# --- loss scale ---------------------------------------------------------------------------------------------------


def test_the_window_of_known_gradients() -> None:
    class Known(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    model, seen = Known(), GradientRange()
    with seen.observing(model):
        out = model(torch.ones(4))
        (out * torch.tensor([2.0**-20, 2.0**-18, 2.0**-4, 2.0**-3])).sum().backward()
    found = seen.window()
    assert found is not None
    assert found.largest == 2.0**-3
    assert found.smallest == 2.0**-4  # the two small ones carry less than a part in 10,000 of the square
    assert found.highest_scale == 65504 * 8
    assert found.init == 2.0**15
    assert found.lowest_scale == 2.0**-20
    assert not found.is_empty


# --- updates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lr", "least", "most"), [(1e-6, 0.9, 1.0), (1e-1, 0.0, 0.1)])
def test_lost_updates(lr: float, least: float, most: float) -> None:
    def optimizer(params: object) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=lr)

    found = lost_updates(mlp(), loss, batches(), optimizer, Plan.preset("bf16-true"), CPU)
    assert found is not None
    assert least <= found <= most
    assert lost_updates(mlp(), loss, batches(), optimizer, Plan.preset("bf16-master"), CPU) is None


# --- batches and what is refused --------------------------------------------------------------------------------------


def test_batches_of_every_kind_begin_again() -> None:
    def once(seed: int) -> Iterator[int]:
        yield from (seed, seed + 1)

    for given, first in (([1, 2], [1, 2, 1]), ((1, 2), [1, 2, 1]), (once, [5, 6, 5])):
        stream = endless(given, "tune")(5)
        assert [next(stream) for _ in range(3)] == first
    loader = torch.utils.data.DataLoader([1, 2, 3], batch_size=2)
    stream = endless(loader, "tune")(0)
    assert [t.tolist() for t in (next(stream), next(stream), next(stream))] == [[1, 2], [3], [1, 2]]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (iter([1, 2]), "tune: batches is an iterator (list_iterator), which can be gone through only once"),
        (torch.zeros(3), "tune: batches is Tensor; give a sequence of batches, a DataLoader or a function"),
        (3, "tune: batches is int; give a sequence"),
    ],
)
def test_batches_that_cannot_be_used(given: object, text: str) -> None:
    with pytest.raises(WorkloadError, match="^" + text.replace("(", r"\(").replace(")", r"\)")):
        endless(given, "tune")


def test_no_batches_at_all() -> None:
    with pytest.raises(WorkloadError, match="tune: batches gave no batch at all; give at least one"):
        next(endless([], "tune")(0))


def test_the_same_batch_is_recognised() -> None:
    one, other = next(batches(0)), next(batches(1))
    assert same_batch(one, tuple(t.clone() for t in one))
    assert not same_batch(one, other)
    assert not same_batch({}, {"a": 1})


def test_batches_that_run_out() -> None:
    few = Prober(mlp(), loss, iter([next(batches())] * 3), CPU, call="tune('mine')")
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
    made = Prober(mlp(), broken, batches(), CPU)  # type: ignore[arg-type]
    with pytest.raises(WorkloadError, match=rf"^parity: loss\(model, batch\) returned {text}"):
        made.extend(1)


def test_a_loss_of_another_model() -> None:
    other = mlp()
    made = Prober(mlp(), lambda _model, b: loss(other, b), batches(), CPU)
    with pytest.raises(
        WorkloadError, match="no parameter of the model has a gradient; the loss must call the model"
    ):
        made.extend(1)


def test_what_fails_in_fp32_already() -> None:
    def poisoned() -> Iterator[tuple[Tensor, Tensor]]:
        x, y = next(batches())
        yield x.index_fill(0, torch.tensor([2]), float("nan")), y

    made = Prober(mlp(), loss, poisoned(), CPU)
    with pytest.raises(
        NonFiniteError, match=r"batch 0 is not finite in fp32 already.*batch\[0\] \(8 of 128 values\)"
    ):
        made.extend(1)


def test_a_low_model_is_no_reference() -> None:
    with pytest.raises(WorkloadError, match="stored in a low format; give it in fp32"):
        Prober(mlp().bfloat16(), loss, batches(), CPU)
