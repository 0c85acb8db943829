"""Probes leave no trace, and see the right weights, buffers, data and random draws."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import castwise
from castwise import Plan
from castwise.errors import CastwiseError, WorkloadError
from castwise.lab.parity.damage import Grams, estimate
from castwise.lab.parity.parity import ParityTest
from castwise.lab.parity.probes import Prober
from castwise.lab.workloads.workload import find_workload
from tests.here import DEVICE
from tests.soak import each_value, every

HERE = torch.device(DEVICE)
Batch = tuple[Tensor, Tensor]
PLANS = ["fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "fp16-master", "bf16-true", "fp16-true"]


def _batches(seed: int = 0) -> Iterator[Batch]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    while True:
        yield torch.randn(16, 8, generator=generator), torch.randint(4, (16,), generator=generator)


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 16), nn.Linear(16, 4)
    )
    model[5].bias.requires_grad_(False)
    model[1].eval()
    return model


def _snapshot(model: nn.Module) -> dict[str, Any]:
    def plain(value: Tensor | None) -> Any:
        return (
            None if value is None else (str(value.dtype), value.stride(), value.tolist(), value.requires_grad)
        )

    return {
        "state": {name: plain(t) for name, t in model.state_dict(keep_vars=True).items()},
        "gradients": {name: plain(p.grad) for name, p in model.named_parameters()},
        "tensors": {n: id(t) for n, t in [*model.named_parameters(), *model.named_buffers()]},
        "modes": {name: m.training for name, m in model.named_modules()},
        "hooks": {
            (name, key): len(value)
            for name, m in model.named_modules()
            for key, value in vars(m).items()
            if key.endswith("_hooks") and value is not None
        },
        "attributes": {name: sorted(vars(m)) for name, m in model.named_modules()},
        "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),  # type: ignore[union-attr]
        "process": (
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled(DEVICE),
            torch.get_float32_matmul_precision(),
            torch.backends.fp32_precision,
            torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
        ),
    }


@every(2, 1)
@pytest.mark.parametrize("plan", PLANS)
def test_a_model_that_is_tested_is_as_before(plan: str) -> None:
    model = _model()
    _loss(model, next(_batches(9))).backward()  # gradients waiting for a step
    before = _snapshot(model)
    castwise.parity(model, _loss, _batches, plan, optimizer=_adamw)
    assert _snapshot(model) == before


@each_value()
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [1, 9, 20])
def test_a_model_is_as_before_when_the_test_fails(error: type[BaseException], at: int) -> None:
    model, calls = _model(), 0

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        nonlocal calls
        calls += 1
        random.random()
        if calls == at:
            raise error("in the middle")
        return _loss(model, batch)

    before = _snapshot(model)
    with pytest.raises(error if error is KeyboardInterrupt else WorkloadError, match="in the middle"):
        castwise.parity(model, loss, _batches, "bf16-master")
    assert _snapshot(model) == before
    castwise.parity(model, _loss, _batches, "fp16-mixed")  # the failed call has left no session open


def test_a_loss_that_calls_the_model_it_closes_over_leaves_no_gradients_there() -> None:
    """A common mistake: the loss runs the user's model instead of the copy. The model must stay unchanged."""
    model = _model()
    before = _snapshot(model)
    with pytest.raises(CastwiseError):
        castwise.parity(model, lambda _m, b: _loss(model, b), _batches, "bf16-mixed")
    assert _snapshot(model) == before


def test_the_users_batches_are_not_changed() -> None:
    data = [next(_batches(s)) for s in range(16)]
    before = copy.deepcopy(data)
    castwise.parity(_model(), _loss, data, "bf16-true", optimizer=_adamw)
    assert all(
        torch.equal(a, b)
        for one, two in zip(data, before, strict=True)
        for a, b in zip(one, two, strict=True)
    )


@pytest.mark.parametrize("plan", ["bf16-master", "fp16-mixed"])
def test_training_that_is_under_way_goes_on_bit_for_bit(plan: str) -> None:
    def train(tested: bool) -> list[Tensor]:
        torch.manual_seed(3)
        model = _model().train()
        optimizer = _adamw([p for p in model.parameters() if p.requires_grad])
        dataset = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(4, (64,)))
        # DataLoader's default generator is on the CPU, which fails if the default device is another.
        draw = None if DEVICE == "cpu" else torch.Generator(DEVICE).manual_seed(3)
        loader = torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True, generator=draw)
        for epoch in range(2):
            if tested and epoch == 1:
                castwise.parity(model, _loss, loader, plan, optimizer=_adamw)
            for batch in loader:
                optimizer.zero_grad()
                _loss(model, batch).backward()
                optimizer.step()
        moments = [t for state in optimizer.state.values() for t in state.values()]
        return [t.detach().clone() for t in [*model.state_dict().values(), *moments]]

    assert all(torch.equal(a, b) for a, b in zip(train(True), train(False), strict=True))


# --- the state at the start of a pass -------------------------------------------------------------------------


def test_buffers_start_every_pass_as_they_were() -> None:
    model = _model().train()
    seen: list[tuple[Any, int]] = []

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        seen.append((model[1].running_mean.float().tolist(), int(model[1].num_batches_tracked)))  # type: ignore[index,union-attr]
        return _loss(model, batch)

    model(torch.randn(16, 8) + 3.0)
    want = (model[1].running_mean.tolist(), 1)  # type: ignore[union-attr]
    prober = Prober(model, loss, _batches(), HERE)
    prober.extend(3)
    prober.probe(Plan.preset("bf16-mixed"), range(3))
    prober.floor(range(2))
    assert prober.passes == len(seen) == 8
    assert all(state == want for state in seen)


def test_a_plan_sees_the_weights_data_and_draws_of_its_reference() -> None:
    seen: list[tuple[Any, Any, Any]] = []

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        noise = torch.randn(3)
        seen.append((model[0].weight.tolist(), batch[0].tolist(), noise.tolist()))  # type: ignore[index,union-attr]
        return _loss(model, batch) + 0.0 * noise.sum()

    prober = Prober(_model(), loss, _batches(), HERE)
    prober.extend(3)
    prober.probe(Plan.preset("bf16-mixed"), [2, 0])
    assert seen[3] == seen[2]
    assert seen[4] == seen[0]
    assert seen[0][0] != seen[1][0]  # each microbatch has its own dither
    assert seen[0][2] != seen[1][2]


@pytest.mark.parametrize(("dither", "eps"), [("bf16", 2.0**-7), ("fp16", 2.0**-10)])
def test_weights_move_by_half_of_the_last_place_and_zeros_stay(dither: str, eps: float) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        model.weight[0] = 0.0
        model.weight[1] = 1.0  # at a power of two the spacing of the format's values changes
        model.weight[2] = -(2.0**-30)
    weight = model.weight.detach().clone()
    moved: list[Tensor] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        moved.append(model.weight.detach().clone())  # type: ignore[union-attr,operator]
        return model(batch).square().mean()

    prober = Prober(model, loss, iter([torch.randn(4, 64)] * 64), HERE, dither=dither)
    prober.extend(64)
    place = eps * 2.0 ** torch.floor(torch.log2(weight.abs().double()))
    off = torch.stack(moved).double() - weight.double()
    assert bool((off.abs() <= 0.5 * place + 2.0**-23 * weight.abs()).all())
    assert bool((off[:, 0] == 0).all())
    inside = off[:, 1:] / place[1:]
    assert float(inside.std()) == pytest.approx(12**-0.5, rel=0.02)  # uniform
    assert abs(float(inside.mean())) < 4 * 12**-0.5 / inside.numel() ** 0.5


def test_rounded_weights_are_no_bias_where_dithered_and_are_where_not() -> None:
    """In a linear model near its optimum the gradient's error is the weights' rounding times the data's covariance."""
    torch.manual_seed(0)
    model = nn.Linear(32, 8, bias=False)
    truth = model.weight.detach().clone()

    def batches() -> Iterator[Batch]:
        generator = torch.Generator(DEVICE).manual_seed(0)
        while True:
            x = torch.randn(256, 32, generator=generator).bfloat16().float()  # data that bf16 holds exactly
            yield x, x @ truth.t() + torch.randn(256, 8, generator=generator)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return functional.mse_loss(model(batch[0]).float(), batch[1])

    def persistent(dither: str) -> float:
        prober = Prober(model, loss, batches(), HERE, dither=dither)
        prober.extend(16)
        errors = prober.probe(Plan.preset("bf16-mixed"), range(16)).errors
        d = torch.stack([torch.cat(e) for e in errors]).double()
        return float(((d.mean(0) ** 2).sum() - d.var(0).sum() / 16) / (d**2).sum(1).mean())

    assert persistent("fp32") > 0.3  # a dither of fp32's last place has no effect
    assert abs(persistent("bf16")) < 0.06


# --- parameters -----------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(tokens))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("plan", PLANS[1:])
def test_a_tied_parameter_counts_once_with_the_sum_of_both_uses(plan: str) -> None:
    tokens = torch.randint(12, (32,), generator=torch.Generator(DEVICE).manual_seed(0))
    weights: list[Tied] = []

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        if len(weights) < 4:
            weights.append(copy.deepcopy(model))  # type: ignore[arg-type]
        return functional.cross_entropy(model(batch[0]), batch[1])

    torch.manual_seed(0)
    prober = Prober(Tied(), loss, iter([(tokens, (tokens + 1) % 12)] * 4), HERE)
    prober.extend(4)
    assert prober.names == ["embed.weight", "mix.weight", "mix.bias"]
    for model, micro in zip(weights, prober.micros, strict=True):
        exact = model.double()
        functional.cross_entropy(exact(micro.batch[0]), micro.batch[1]).backward()
        want = exact.embed.weight.grad
        assert want is not None
        torch.testing.assert_close(micro.gradients[0].double(), want.flatten(), rtol=1e-4, atol=1e-7)
    probe = prober.probe(Plan.preset(plan), range(4))
    assert probe.finite
    assert estimate(Grams.total(prober.grams(probe).values())).value < 0.01


def test_a_parameter_that_takes_no_part_has_a_gradient_of_zero() -> None:
    model = _model()
    model.register_parameter("idle", nn.Parameter(torch.ones(3)))
    prober = Prober(model, _loss, _batches(), HERE)
    prober.extend(4)
    at = prober.names.index("idle")
    assert all(torch.equal(micro.gradients[at], torch.zeros(3)) for micro in prober.micros)
    assert castwise.parity(model, _loss, _batches, "bf16-mixed", optimizer=_adamw).verdict == "pass"


@pytest.mark.parametrize("plan", ["bf16-master", "fp16-master"])
def test_masters_have_fp32_gradients(plan: str) -> None:
    kinds: set[tuple[torch.dtype, torch.dtype]] = set()
    prober = Prober(_model(), _loss, _batches(), HERE)

    def spy(
        model: nn.Module, scale: float, plain: Callable[..., list[Tensor]] = prober._gradients
    ) -> list[Tensor]:
        kinds.update((p.dtype, p.grad.dtype) for p in model.parameters() if p.grad is not None)
        return plain(model, scale)

    prober.extend(2)
    prober._gradients = spy  # type: ignore[method-assign]
    prober.probe(Plan.preset(plan), range(2))
    low = Plan.preset(plan).compute_dtype
    assert (low, torch.float32) in kinds
    assert (low, low) not in kinds


def test_samples_of_large_parameters_are_unbiased(monkeypatch: pytest.MonkeyPatch) -> None:
    def trace(seed: int) -> np.ndarray[Any, Any]:
        torch.manual_seed(0)
        prober = Prober(
            nn.Linear(64, 64, bias=False), lambda m, b: m(b).square().mean(), iter(data), HERE, seed=seed
        )
        prober.extend(4)
        grams = prober.grams(prober.probe(Plan.preset("bf16-mixed"), range(4)))["weight"]
        return np.array([grams.signal.trace(), grams.signal.sum(), grams.error.trace(), grams.error.sum()])

    data = [torch.randn(8, 64) for _ in range(4)]
    whole = np.mean([trace(seed) for seed in range(20)], axis=0)
    monkeypatch.setattr("castwise.lab.parity.probes.MOST_ELEMENTS", 512)
    sampled = [trace(seed) for seed in range(20)]
    spread = np.std(sampled, axis=0) / 20**0.5
    assert (np.abs(np.mean(sampled, axis=0) - whole) <= 4 * spread).all()
    assert (spread < 0.2 * whole).all()


# --- floor ----------------------------------------------------------------------------------------------------


@every(2)
@pytest.mark.parametrize(
    "name",
    [
        "sine?size=16&hidden=32",
        "gpt?layers=1&width=32&context=16&batch=4",
        "digits?batch=8",
        "digits?model=vit&batch=8",
    ],
)
def test_every_built_in_workload_has_a_floor_above_nothing_and_far_below_the_line(name: str) -> None:
    workload = find_workload(name)
    torch.manual_seed(0)
    prober = Prober(workload.model(), workload.loss, iter(workload.batches(0)), HERE)
    test = ParityTest(prober)
    test.reference(4)
    assert 0.0 < test.floor < 1e-4
    # on a GPU, convolutions sum in an arbitrary order
    assert test.repeat <= (1e-10 if DEVICE == "cuda" else 0.0)


def test_gradients_that_are_rounding_alone_are_recognised() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(4, 8, 3, padding=1)
            self.norm = nn.BatchNorm1d(8)
            self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(self.conv(x)).transpose(1, 2)
            weights = torch.softmax(self.query(x) @ self.key(x).transpose(1, 2), -1)
            return (weights @ self.value(x)).mean(1)

    torch.manual_seed(0)
    data = [(torch.randn(8, 4, 10), torch.randint(8, (8,))) for _ in range(4)]
    test = ParityTest(Prober(Attention(), _loss, iter(data), HERE), 1, True)
    test.reference(4)
    assert test.dead == {"conv.bias", "key.bias"}
