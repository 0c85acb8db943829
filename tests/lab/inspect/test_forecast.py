"""Forecasts of models with known values, compared with exact shares and with real runs in low formats."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import castwise
from castwise import Amp, Plan
from castwise.core.plans.formats import FORMATS
from castwise.errors import NonFiniteError, PlanError, UnknownNameError, WorkloadError
from castwise.lab.inspect.forecast import forecast
from castwise.lab.inspect.plan_casts import PlanCasts
from castwise.lab.parity.casts import Values, cast_of
from castwise.lab.passes.observers import observed
from tests.here import DEVICE
from tests.soak import every

Batch = tuple[Tensor, Tensor]


class Times(nn.Module):
    """The input times a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def squared(model: nn.Module, batch: Batch) -> Tensor:
    return functional.mse_loss(model(batch[0]), batch[1])


def batches(width: int = 8, out: int = 4, count: int = 4) -> list[Batch]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    return [
        (torch.randn(16, width, generator=generator), torch.randn(16, out, generator=generator))
        for _ in range(count)
    ]


def sound(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))


# --- known shares -------------------------------------------------------------------------------------------


def test_shares_of_activations_and_gradients_are_exact() -> None:
    """With a weight of 1 the activations are the inputs, and the gradients are the weights of the loss."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    x = torch.tensor([1.0, 7e4, -1e5, 1e-5, 1e-9, 0.0, 3.0, 2.0])[:, None]
    weights = torch.tensor([1.0, 1e-9, 1e-9, 1e-5, 1.0, 1.0, 1.0, 1e-9])[:, None]
    found = forecast(
        model, lambda m, b: (m(b) * weights).sum(), [x], ("fp16",), microbatches=1, plan="bf16-true"
    )
    tensors = {t.kind: t for t in found.region("").tensors}
    out = tensors["activations"].cast("fp16")
    assert out is not None
    assert (out.overflow, out.subnormal, out.flush) == (4 / 16, 2 / 16, 2 / 16)  # of 8 inputs and 8 outputs
    gradient = tensors["gradients"].cast("fp16", scaled=False)
    assert gradient is not None
    assert (gradient.overflow, gradient.subnormal, gradient.flush) == (0.0, 1 / 8, 3 / 8)
    assert tensors["activations"].largest == 1e5
    assert tensors["activations"].histogram.zeros == 2
    assert "activations overflow" in found.region("").troubles["fp16"]


def test_weights_are_cast_as_they_are() -> None:
    model = sound()
    with torch.no_grad():
        model[3].weight.view(-1)[:32] = 1e-9
    found = forecast(model, squared, batches(), microbatches=1)
    tensor = found.region("3").tensor("weights")
    assert tensor is not None
    for name in ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2"):
        parts = [Values.of(p).tally(FORMATS[name]) for p in model[3].parameters()]
        assert tensor.cast(name, scaled=False) == cast_of(parts, name, None)
    assert tensor.count == 4 * 32 + 4


def test_a_sound_model_is_held_by_every_format() -> None:
    found = castwise.forecast(sound(), squared, batches())
    assert [region.path for region in found.regions] == ["", "0", "1", "2", "3"]
    assert not any(region.troubles for region in found.regions)
    assert found.recommendation == "bf16-mixed"
    assert "fp16, at a loss scale of" in found.answer
    assert "holds all 5 regions" in found.answer


# --- faults to find, and the plan recommended ----------------------------------------------------------------


@pytest.mark.parametrize("position", [1, 3])
def test_an_overflow_is_found_where_it_is_and_the_plan_that_follows_is_finite(position: int) -> None:
    model = sound()
    place = nn.Sequential(
        nn.Linear(32 if position > 1 else 8, 32 if position > 1 else 8), Times(1e6), Times(1e-6)
    )
    layers = list(model)
    layers.insert(position - 1 if position == 1 else position, place)
    model = nn.Sequential(*layers)
    where = str(position - 1 if position == 1 else position)
    found = forecast(model, squared, batches(), ("fp16",))
    assert found.region(f"{where}.1").troubles
    assert all(r.path.startswith(where) for r in found.regions if r.troubles)
    assert found.recommendation is not None

    def gradients(plan: Plan | str) -> bool:
        torch.manual_seed(0)
        with Amp(plan) as amp:
            amp.prepare(model)
            model.zero_grad()
            amp.backward(squared(model, batches()[0]))
            return all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())

    assert not gradients("fp16-mixed+loss_scale=none")
    assert gradients(found.recommendation)
    assert forecast(model, squared, batches(), ("bf16", "fp16")).recommendation == "bf16-mixed"


def low(model: nn.Module, plan: str) -> tuple[set[str], bool]:
    """Train a step under a plan; return the modules with non-finite outputs, and True if a gradient is not finite."""
    bad: set[str] = set()

    def see(path: str) -> Any:
        return lambda _module, _args, out: None if bool(torch.isfinite(out).all()) else bad.add(path)

    handles = [module.register_forward_hook(see(path)) for path, module in model.named_modules() if path]
    with Amp(plan) as amp:
        amp.prepare(model)
        amp.backward(squared(model, batches()[0]))
        bad_gradients = not all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())
    model.zero_grad()
    for handle in handles:
        handle.remove()
    return bad, bad_gradients


@pytest.mark.parametrize("behind", [(Times(1e-6), nn.LayerNorm(8)), (nn.Tanh(),)])
def test_what_an_overflow_reaches_is_what_a_real_run_shows(behind: tuple[nn.Module, ...]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Times(1e8), *behind, nn.Linear(8, 4))
    found = forecast(model, squared, batches(), ("fp16", "bf16"))
    bad, gradients = low(model, "fp16-mixed+loss_scale=none")
    assert set(found.spreads) == {"fp16"}
    spread = found.spreads["fp16"]
    assert spread.sources == ("1",)
    assert {*spread.sources, *spread.reached} == bad
    assert spread.gradients is gradients
    assert gradients is (len(behind) > 1)
    assert ("spreads to 3 other regions and makes gradients non-finite" in found.answer) is gradients
    assert ("spreads to no other region and does not change the gradients" in found.answer) is not gradients


def test_a_model_that_does_not_run_in_the_format_is_forecast_all_the_same() -> None:
    class Fussy(Times):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype is torch.float16:
                raise RuntimeError("not implemented for 'Half'")
            return super().forward(x)

    model = nn.Sequential(nn.Linear(8, 8), Fussy(1e8), Times(1e-8), nn.Linear(8, 4))
    found = forecast(model, squared, batches(), ("fp16",), microbatches=1)
    assert not found.spreads
    assert "not implemented for 'Half'" in found.notes[-1]
    assert found.recommendation is not None


def test_the_plan_is_judged_by_what_it_computes_where() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Times(1e8), Times(1e-8), nn.Linear(8, 4))
    whole = forecast(model, squared, batches(), ("fp16", "bf16"), plan="fp16-mixed", microbatches=1)
    assert whole.region("1").computed == ("fp16",)
    assert "overflow" in whole.region("1").trouble
    assert (
        "fp16-mixed computes in fp16 in 4 of 5 regions and holds 3 of them, but not region 1 ("
        in whole.plan_answer
    )
    cured = forecast(model, squared, batches(), ("fp16",), plan="fp16-mixed+regions.1=fp32", microbatches=1)
    assert cured.region("1").computed == ()
    assert not any(region.trouble for region in cured.regions)
    assert cured.plan_answer.endswith("in fp16 in 2 of 5 regions and holds all of them.")
    small = lambda m, b: 1e-6 * squared(m, b)  # noqa: E731 - gradients that fp16 holds only with a scale
    for scale, fits in (
        ("loss_scale=none", False),
        ("loss_scale.init=1+loss_scale.dynamic=false", False),
        ("loss_scale.init=1", True),
    ):
        found = forecast(sound(), small, batches(), ("fp16",), plan=f"fp16-mixed+{scale}", microbatches=1)
        assert (not any(region.trouble for region in found.regions)) is fits, scale
    assert not forecast(model, squared, batches(), ("fp16",), plan="bf16-mixed", microbatches=1).plan_answer


class Divides(nn.Module):
    """An RMS norm with four rows of zeros, where only the epsilon keeps the divisor from zero."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.inner, self.eps = nn.Linear(8, 4, bias=False), eps

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x * (torch.arange(16) > 3)[:, None])
        return h / ((h * h).mean(-1, keepdim=True) + self.eps).sqrt()


@pytest.mark.parametrize("eps", [1e-3, 1e-8])
def test_an_epsilon_that_becomes_zero_below_a_quotient_is_found(eps: float) -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), Divides(eps))
    found = forecast(
        model, squared, batches(), ("fp16", "bf16"), plan="fp16-mixed+rules=none+ops.linear=lower"
    )
    trouble = found.region("1").troubles.get("fp16", "")
    assert ("of the inputs of sqrt become 0" in trouble) is (eps < 1e-7)
    assert "bf16" not in found.region("1").troubles


class Squares(nn.Module):
    """Squares that underflow, scaled up again, so the lost values are tiny beside later ones."""

    def forward(self, x: Tensor) -> Tensor:
        small = x * 1e-4
        return small * small.abs() * 1e8


def test_what_one_result_loses_is_seen_beside_larger_ones() -> None:
    found = forecast(nn.Sequential(nn.Linear(8, 4), Squares()), squared, batches(), ("fp16", "bf16"))
    assert "become 0" in found.region("1").troubles["fp16"]
    assert "bf16" not in found.region("1").troubles


def test_a_module_that_only_holds_parameters_is_kept_in_fp32_by_the_one_that_uses_them() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True))
    with torch.no_grad():
        model[1].out_proj.weight[0, 0] = 1e5

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner[0](x[None])
            return self.inner[1](h, h, h)[0]

    found = forecast(Whole(), lambda m, b: m(b[0]).square().mean(), batches(), ("fp16",), microbatches=1)
    assert "weights overflow" in found.region("inner.1.out_proj").troubles["fp16"]
    assert found.recommendation is not None
    assert "regions.inner.1=fp32" in found.recommendation


def test_a_fault_in_the_model_itself_has_no_plan() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * 1e6 * 1e-6

    found = forecast(Root(), squared, batches(), ("fp16",))
    assert "fp16" in found.region("").troubles
    assert found.recommendation is None


def test_gradients_that_vanish_in_fp16_are_found_and_the_loss_scales_hold_them() -> None:
    """Gradients are exact within 1e-4 at the highest loss scale; far above and far below the range they are not."""
    small = lambda m, b: 1e-6 * squared(m, b)  # noqa: E731
    found = forecast(sound(), small, batches(), ("fp16",), plan="fp16-mixed")
    assert found.scales is not None
    gradients = found.region("0").tensor("gradients")
    assert gradients is not None
    assert gradients.cast("fp16", scaled=False).flush > 0.3
    assert gradients.cast("fp16").flush < 0.01
    assert not any(r.troubles for r in found.regions)

    def error(scale: float) -> float:
        model = sound()
        small(model, batches()[0]).backward()
        exact = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        with Amp(f"fp16-mixed+loss_scale.init={scale}") as amp:
            amp.prepare(model)
            amp.backward(small(model, batches()[0]))
            low = [p.grad / scale for p in model.parameters()]
        differences = sum(float((a - b).double().square().sum()) for a, b in zip(exact, low, strict=True))
        return differences / sum(float(a.double().square().sum()) for a in exact)

    inside = 2.0 ** np.floor(np.log2(found.scales.highest_scale))
    assert error(inside) < 1e-4
    assert not error(16 * inside) < 1e-2
    assert error(max(found.scales.lowest_scale, 2.0**-14) / 2**12) > 1e-2
    assert found.loss_scale <= inside


def test_gradients_that_vanish_and_are_small_beside_others_are_no_trouble_but_noted() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main, self.side = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.main(x) + 1e-10 * self.side(x)

    found = forecast(Branches(), squared, batches(), ("fp16",))
    assert "fp16" not in found.region("side").troubles
    (note,) = found.notes
    assert "10 % or more of the gradients of side underflow" in note


def test_updates_that_bf16_drops_are_counted() -> None:
    found = forecast(
        sound(),
        squared,
        batches(),
        ("bf16", "fp16"),
        optimizer=lambda p: torch.optim.SGD(p, lr=1e-4),
        microbatches=1,
    )
    updates = [t for region in found.regions for t in region.tensors if t.kind == "updates"]
    assert len(updates) == 3
    assert all(t.cast("bf16").flush >= t.cast("fp16").flush for t in updates)
    assert "rounding loses" in found.region("0").stored["bf16"]
    assert "bf16" not in found.region("0").troubles
    kept = forecast(
        sound(),
        squared,
        batches(),
        ("bf16",),
        optimizer=lambda p: torch.optim.SGD(p, lr=100.0),
        microbatches=1,
    )
    assert not any(region.stored for region in kept.regions)


# --- what a plan keeps in fp32 ------------------------------------------------------------------------------


class Keeps(nn.Module):
    """A large fp32 result of exp that goes either into log, which stays in fp32, or into a linear layer."""

    def __init__(self, product: bool) -> None:
        super().__init__()
        self.inner, self.outer, self.product = nn.Linear(8, 4), nn.Linear(4, 4), product

    def forward(self, x: Tensor) -> Tensor:
        large = (self.inner(x).float() * 0.1 + 12.0).exp()
        return self.outer(large) * 1e-6 if self.product else self.outer(large.log())


@pytest.mark.parametrize("product", [False, True])
def test_what_stays_in_fp32_does_not_count_unless_it_is_cast_at_its_use(product: bool) -> None:
    found = forecast(
        Keeps(product), squared, batches(), ("fp16",), plan="bf16-mixed+ops.exp=fp32+ops.log=fp32"
    )
    kept = found.region("").tensor("activations", kept=True)
    assert kept is not None
    assert kept.cast("fp16").overflow > 0
    assert ("fp16" in found.region("outer").troubles) is product
    assert "fp16" not in found.region("").troubles
    assert "fp16" in found.region("").stored


def test_everything_is_low_under_a_true_plan() -> None:
    found = forecast(sound(), squared, batches(), ("bf16",), plan="bf16-true", microbatches=1)
    assert not any(t.kept for region in found.regions for t in region.tensors)


def test_parameters_that_norms_take_as_they_are_are_kept() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    casts = PlanCasts()
    x = torch.randn(4, 8)
    with Amp("bf16-mixed") as amp:
        amp.prepare(model)
        with observed(model, casts.learning()):
            model(x).sum().backward()
    found = forecast(model, squared, batches(), ("bf16",), microbatches=1)
    assert found.region("1").tensor("weights", kept=True) is not None
    assert found.region("0").tensor("weights", kept=False) is not None


# --- kinds of models ----------------------------------------------------------------------------------------


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.other = self.one
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.other(self.one(x)))


class Tokens(nn.Module):
    """A model with a sparse embedding, an LSTM and a complex spectrum."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8, sparse=True)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.out = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x.abs() * 3).long().clamp(max=9)
        h, _ = self.lstm(self.table(ids))
        return self.out(torch.fft.rfft(h[:, -1]).abs())


class Output(dict[str, Any]):
    """A dict of outputs with attributes, like Hugging Face's."""


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.out, self.reentrant = (
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)),
            nn.Linear(8, 4),
            reentrant,
        )

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = x.requires_grad_() if self.reentrant else x
        return Output(logits=self.out(checkpoint(self.inner, x, use_reentrant=self.reentrant)))


def of_dict(model: nn.Module, batch: Batch) -> Tensor:
    return functional.mse_loss(model(batch[0])["logits"], batch[1])


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "shared": (Shared, squared),
    "tokens": (Tokens, squared),
    "checkpointed": (lambda: Checkpointed(False), of_dict),
    "checkpointed, reentrant": (lambda: Checkpointed(True), of_dict),
    "BatchNorm": (
        lambda: nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4)),
        squared,
    ),
    "in bf16": (lambda: sound().bfloat16(), squared),
    "large": (lambda: nn.Sequential(nn.Linear(8, 4), Times(1e30), Times(1e-30)), squared),
    "small": (lambda: nn.Sequential(nn.Linear(8, 4), Times(1e-30), Times(1e30)), squared),
}


@every(2)
@pytest.mark.parametrize("name", MODELS)
def test_models_of_all_kinds_are_forecast_and_left_as_they_were(name: str) -> None:
    make, loss = MODELS[name]
    torch.manual_seed(0)
    model = make()
    model.train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random_state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    found = forecast(model, loss, batches(), microbatches=2)
    assert found.regions
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert all(m.training for m in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    now = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(now[0], random_state[0])
    assert now[1:] == random_state[1:]
    for region in found.regions:
        for tensor in region.tensors:
            assert all(
                0.0 <= share <= 1.0
                for cast in tensor.casts
                for share in (cast.overflow, cast.subnormal, cast.flush)
            )
    assert bool(found.region("1").troubles) if name in ("large", "small") else True


def test_the_shared_module_goes_by_its_first_path() -> None:
    found = forecast(Shared(), squared, batches(), ("fp16",), microbatches=1, plan="bf16-true")
    assert [region.path for region in found.regions] == ["", "one", "out"]
    tensor = found.region("one").tensor("activations")
    assert tensor is not None
    assert tensor.count == 2 * 16 * 8  # two calls


def test_a_model_that_arrives_in_bf16_has_weights_that_bf16_holds_exactly() -> None:
    make, loss = MODELS["in bf16"]
    tensor = forecast(make(), loss, batches(), microbatches=1).region("0").tensor("weights")
    assert tensor is not None
    assert tensor.cast("bf16").error == 0.0
    assert tensor.cast("fp8_e5m2").error > 0.0


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_an_interrupt_half_way_leaves_no_trace(error: type[BaseException], at: int) -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 4)).train()
    model[1].eval()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    calls = [0]

    def loss(m: nn.Module, batch: Batch) -> Tensor:
        value = squared(m, batch)
        calls[0] += 1
        if calls[0] == at:
            raise error
        return value

    torch.manual_seed(4)
    state = torch.get_rng_state()
    with pytest.raises((error, WorkloadError)):
        forecast(model, loss, batches(), microbatches=2)
    assert calls == [at]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    assert [m.training for m in model] == [True, False, True, True]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    functional.relu(torch.ones(1))
    assert calls == [at]


# --- arguments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"formats": ("fp16", "fp4")}, UnknownNameError, "fp4"),
        ({"formats": ("fp32",)}, PlanError, "give one or more formats; allowed: fp16, bf16"),
        ({"formats": ()}, PlanError, "give one or more"),
        ({"plan": "fp32"}, PlanError, "casts nothing to a low format"),
        ({"microbatches": 0}, PlanError, "microbatches=0"),
        ({"model": lambda x: x}, WorkloadError, "give the torch.nn.Module itself"),
        ({"loss": lambda m, b: {"loss": squared(m, b)}}, WorkloadError, "returned dict"),
        ({"loss": lambda m, b: squared(m, b) * float("nan")}, NonFiniteError, "not finite in fp32 already"),
        (
            {"optimizer": torch.optim.SGD([torch.zeros(1)], 0.1)},
            WorkloadError,
            "optimizer must be a function",
        ),
        ({"optimizer": torch.optim.LBFGS}, WorkloadError, "LBFGS.step\\(\\) needs a closure"),
        ({"batches": []}, WorkloadError, "batches is empty"),
        ({"batches": [(torch.zeros(0, 8), torch.zeros(0, 4))]}, NonFiniteError, "not finite in fp32"),
    ],
)
def test_bad_input_gets_one_clear_error(options: dict[str, Any], error: type[Exception], said: str) -> None:
    given = {"model": sound(), "loss": squared, "batches": batches(), **options}
    with pytest.raises(error, match=said):
        forecast(**given)


def test_one_format_may_be_given_by_any_of_its_names() -> None:
    assert forecast(sound(), squared, batches(), "float16", microbatches=1).formats == ("fp16",)
    assert forecast(sound(), squared, batches(), (torch.bfloat16,), microbatches=1).formats == ("bf16",)  # type: ignore[arg-type]


def test_batches_of_no_rows_are_no_trouble_where_the_loss_is_none() -> None:
    data = [(torch.zeros(0, 8), torch.zeros(0, 4))]
    found = forecast(sound(), lambda m, b: (m(b[0]) - b[1]).sum(), data, microbatches=1)
    assert all(t.count == 0 for region in found.regions for t in region.tensors if t.kind == "activations")


def test_a_function_of_a_seed_gives_batches() -> None:
    def drawn(seed: int) -> Iterator[Batch]:
        torch.manual_seed(seed)
        while True:
            yield torch.randn(4, 8), torch.randn(4, 4)

    one, other = (forecast(sound(), squared, drawn, ("bf16",), seed=seed, microbatches=1) for seed in (1, 1))
    assert one.to_dict()["regions"] == other.to_dict()["regions"]


def test_the_record_is_plain_and_is_saved_beside_its_page(tmp_path: Path) -> None:
    found = forecast(sound(), squared, batches(), microbatches=1)
    page = found.save(tmp_path / "new")
    assert page == tmp_path / "new" / "forecast.html"
    assert sorted(path.name for path in page.parent.iterdir()) == ["forecast.html", "forecast.json"]
    record = json.loads((page.parent / "forecast.json").read_text(encoding="utf-8"))
    assert record == found.to_dict()
    assert record["plan"] == "bf16-mixed"
    assert record["regions"][0]["tensors"][0]["casts"][0]["format"] == "fp16"


def test_a_model_that_autocasts_itself_is_said_to() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(DEVICE, torch.bfloat16):
                return self.inner(x).float()

    (note,) = forecast(Casts(), squared, batches(), ("fp16",), microbatches=1).notes
    assert "own code casts to a low format (inner)" in note
    assert forecast(sound(), squared, batches(), ("fp16",), microbatches=1).notes == ()


@pytest.mark.inductor
def test_a_compiled_model_is_forecast_as_it_is_written() -> None:
    plain = forecast(sound(), squared, batches(), ("fp16",), microbatches=1)
    model = sound()
    compiled = nn.Sequential(torch.compile(model[:3]), model[3])
    found = forecast(compiled, squared, batches(), ("fp16",), microbatches=1)
    assert sum(len(r.tensors) for r in found.regions) == sum(len(r.tensors) for r in plain.regions)
