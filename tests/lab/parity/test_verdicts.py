"""Verdicts of ``parity`` on models with planted faults, and its messages for models it cannot test."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import castwise
from castwise.errors import NonFiniteError, PlanError, WorkloadError
from tests.here import DEVICE
from tests.soak import every, pairs, some

Batch = tuple[Tensor, Tensor]


def _batches(seed: int = 0) -> Iterator[Batch]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    while True:
        yield torch.randn(16, 12, generator=generator), torch.randint(6, (16,), generator=generator)


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


class Framed(nn.Module):
    """Two linear layers with a module between them that may have a fault."""

    def __init__(self, place: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(12, 32)
        self.place = place
        self.after = nn.Linear(32, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.place(self.before(x)))  # type: ignore[no-any-return]


class Centred(nn.Module):
    """A module that adds and then subtracts a large mean, as a hand-written norm does."""

    def __init__(self, mean: float) -> None:
        super().__init__()
        self.mean = mean
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mean
        return (x - x.mean(-1, keepdim=True)) * self.scale


class Variance(nn.Module):
    """A norm with the variance E[x**2] - E[x]**2."""

    def __init__(self, mean: float) -> None:
        super().__init__()
        self.mean = mean
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mean
        variance = (x * x).mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2
        return x / (variance.clamp_min(0) + 1e-3).sqrt() * self.scale * 0.1


class LogSumExp(nn.Module):
    """A log-softmax written by hand as log(sum(exp(x)))."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = shift
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.shift
        return (x - x.exp().sum(-1, keepdim=True).log()) * self.scale


# --- sound models ---------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """A residual block of masked attention, with dropout."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.masked = masked
        self.norm = nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(4, 4, 3, 2, 16).permute(2, 0, 3, 1, 4)
        mask = torch.ones(4, 4, dtype=torch.bool).tril() if self.masked else None
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(mixed.transpose(1, 2).reshape(16, 32))  # type: ignore[no-any-return]


SOUND: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.Sequential(nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.3)),
    "BatchNorm": lambda: nn.Sequential(nn.BatchNorm1d(32), nn.ReLU()),
    "attention": lambda: Attention(masked=False),
    "masked attention": lambda: Attention(masked=True),
    "a recurrent layer": lambda: _Recurrent(),
    "convolutions": lambda: _Convolved(),
}


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x.view(16, 4, 8))[0].reshape(16, 32)  # type: ignore[no-any-return]


class _Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x.view(16, 4, 8)))).reshape(16, 32)


@every(2)
@pytest.mark.parametrize(
    ("name", "plan"), pairs(SOUND, ["bf16-mixed", "fp16-mixed", "bf16-master", "fp16-master"])
)
def test_sound_models_pass(name: str, plan: str) -> None:
    found = castwise.parity(Framed(SOUND[name]()), _loss, _batches, plan, optimizer=_adamw)
    assert found.verdict == "pass", found.reason
    assert found.strayed == 0
    assert re.fullmatch(
        r"damage \S+ \(the relative error of an update; 95 % interval \S+ to \S+\)( in the units of Adam's steps)? and its interval are below 0\.0[13]: not distinguishable from "
        "the noise of the data",
        found.reason,
    )


def test_sound_models_pass_where_data_is_noise_alone() -> None:
    """With random labels and a batch size of 1 there is no signal, and rounding is far below the noise."""

    def single(seed: int) -> Iterator[Batch]:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        while True:
            yield torch.randn(1, 12, generator=generator), torch.randint(6, (1,), generator=generator)

    model = Framed(nn.GELU())
    verdicts = [
        castwise.parity(model, _loss, single, "bf16-mixed", seed=s).verdict for s in some(range(6), 2)
    ]
    assert set(verdicts) == {"pass"}


def test_one_batch_repeated_is_judged_by_its_signal() -> None:
    found = castwise.parity(Framed(nn.GELU()), _loss, [next(_batches())], "bf16-mixed")
    assert found.verdict == "pass", found.reason
    planted = castwise.parity(Framed(Centred(1000.0)), _loss, [next(_batches())], "bf16-mixed")
    assert planted.verdict == "fail", planted.reason


# --- planted faults -------------------------------------------------------------------------------------------

PLANTED: list[tuple[str, Callable[[], nn.Module], Callable[[], nn.Module], str]] = [
    ("a large mean", lambda: Centred(1000.0), lambda: Centred(0.0), "bf16-mixed"),
    ("a large mean, stored low", lambda: Centred(1000.0), lambda: Centred(0.0), "bf16-master"),
    ("a large mean in fp16", lambda: Centred(30000.0), lambda: Centred(0.0), "fp16-mixed"),
    ("variance by squares", lambda: Variance(50.0), lambda: Variance(0.0), "bf16-mixed"),
    ("variance by squares in fp16", lambda: Variance(300.0), lambda: Variance(0.0), "fp16-mixed"),
    ("exponentials that overflow fp16", lambda: LogSumExp(13.0), lambda: LogSumExp(0.0), "fp16-mixed"),
]


@every(2)
@pytest.mark.parametrize(("fragile", "sound", "plan"), [p[1:] for p in PLANTED], ids=[p[0] for p in PLANTED])
def test_planted_trouble_fails_its_sound_twin_passes_and_a_region_cures_it(
    fragile: Callable[[], nn.Module], sound: Callable[[], nn.Module], plan: str
) -> None:
    found = castwise.parity(Framed(fragile()), _loss, _batches, plan)
    assert found.verdict == "fail", found.reason
    assert not found
    twin = castwise.parity(Framed(sound()), _loss, _batches, plan)
    assert twin.verdict == "pass", twin.reason
    cured = castwise.parity(Framed(fragile()), _loss, _batches, f"{plan}+regions.place=fp32")
    assert cured.verdict == "pass", cured.reason


def test_a_failure_is_confirmed_on_fresh_batches() -> None:
    found = castwise.parity(Framed(Centred(1000.0)), _loss, _batches, "bf16-mixed")
    assert found.verdict == "fail"
    assert found.microbatches >= 16
    sound = castwise.parity(Framed(nn.GELU()), _loss, _batches, "bf16-mixed")
    assert sound.verdict == "pass"
    assert sound.microbatches == 32


def test_the_damage_of_a_part_is_where_the_part_is() -> None:
    """The loss adds two branches. Only one has a fault, and only its parameters show damage."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.good, self.bad = Framed(Centred(0.0)), Framed(Centred(1000.0))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.good(x), self.bad(x)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        good, bad = model(batch[0])
        return functional.cross_entropy(good, batch[1]) + functional.cross_entropy(bad, batch[1])

    found = castwise.parity(Branches(), loss, _batches, "bf16-mixed")
    assert found.verdict == "fail"
    by_path = {r.path: r.bias + r.noise for r in found.regions}
    assert set(by_path) == {f"{b}.{p}" for b in ("good", "bad") for p in ("before", "place", "after")}
    bad = sum(v for path, v in by_path.items() if path.startswith("bad"))
    good = sum(v for path, v in by_path.items() if path.startswith("good"))
    assert bad > 20 * good
    assert all(r.path.startswith("bad") for r in found.worst(3))
    assert re.search(r" is above 0\.1, most of it in bad\.(before|place|after)$", found.reason)


def test_a_small_gradient_counts_in_the_units_of_adams_steps() -> None:
    """A gradient a thousandth of the rest is negligible in the norm, but counts equally in Adam's steps."""

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = Framed(Centred(0.0)), Framed(Centred(1e4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.large(x), self.small(x)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        large, small = model(batch[0])
        return functional.cross_entropy(large, batch[1]) + 1e-3 * functional.cross_entropy(small, batch[1])

    plain = castwise.parity(Small(), loss, _batches, "bf16-mixed")
    assert plain.verdict == "pass", plain.reason
    adam = castwise.parity(Small(), loss, _batches, "bf16-mixed", optimizer=_adamw)
    assert adam.verdict != "pass", adam.reason
    assert "in the units of Adam's steps" in adam.reason
    assert adam.adam is not None
    assert adam.adam.value > 1e3 * adam.damage.value
    assert adam.worst(1)[0].path.startswith("small.")


# --- undecided ------------------------------------------------------------------------------------------------


def test_a_loss_that_differs_from_itself_is_said_to() -> None:
    rng = np.random.default_rng(0)  # a private generator, which global seeds do not affect

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return _loss(model, batch) * (1.0 + 0.5 * float(rng.standard_normal()))

    found = castwise.parity(Framed(nn.GELU()), loss, _batches, "bf16-mixed")
    assert found.verdict == "undecided"
    assert not found
    assert re.fullmatch(
        r"the loss is not deterministic: computed twice from the same inputs, it differs by \S+ of an update, and the plan "
        r"differs from fp32 by \S+",
        found.reason,
    )


def test_a_loss_that_hardly_differs_from_itself_is_judged() -> None:
    rng = np.random.default_rng(0)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return _loss(model, batch) * (1.0 + 1e-4 * float(rng.standard_normal()))

    assert castwise.parity(Framed(nn.GELU()), loss, _batches, "bf16-mixed").verdict == "pass"
    assert castwise.parity(Framed(Centred(1000.0)), loss, _batches, "bf16-mixed").verdict == "fail"


def test_noise_that_cannot_be_replayed_is_no_failure_of_the_plan() -> None:
    """In-place RReLU overwrites the input to which its draws apply, so two formats see different noise."""

    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if DEVICE != "cpu" and torch.is_autocast_enabled(DEVICE):
                torch.rand(1)  # on a GPU draws are the same in both formats, unless one is added
            return functional.rrelu(x.clone(), -4.0, 4.0, training=True, inplace=True)

    found = castwise.parity(Framed(Noise()), _loss, _batches, "bf16-mixed")
    assert found.strayed > 0
    assert found.verdict == "undecided"
    assert "could not be replayed" in found.reason


@pytest.mark.filterwarnings("ignore:The plan rounds floating inputs")  # the cause of the error
def test_a_model_that_fails_only_under_the_plan_is_told_apart_from_one_that_always_fails() -> None:
    class Ids(nn.Module):
        """A lookup of float indices up to 999: bf16 rounds 999 to 1000, which is beyond the table."""

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(1000, 4)

        def forward(self, x: Tensor) -> Tensor:
            # Row by row, so the host checks the index; a device-side assert would break CUDA for the whole process.
            return torch.stack([self.table.weight[row] for row in x.long().tolist()])

    def numbers(_seed: int) -> Iterator[Tensor]:
        while True:
            yield torch.arange(900.0, 1000.0)

    said = "runs in fp32, but fails under bf16-true: IndexError"
    with pytest.raises(WorkloadError, match=said):
        castwise.parity(Ids(), lambda model, x: model(x).square().mean(), numbers, "bf16-true")


def test_without_an_optimizer_parameters_stored_low_are_undecided() -> None:
    found = castwise.parity(Framed(nn.GELU()), _loss, _batches, "bf16-true")
    assert found.verdict == "undecided"
    assert found.reason.endswith(
        "; but parameters are stored low without masters: give optimizer= to measure how much of its updates rounding "
        "loses"
    )


# --- the caller's settings ------------------------------------------------------------------------------------


def test_a_callers_own_autocast_does_not_reach_the_reference() -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch[0])
        assert (out @ out.t()).dtype is torch.float32  # the caller's autocast must be off in the loss
        return functional.cross_entropy(out, batch[1])

    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert castwise.parity(Framed(nn.GELU()), loss, _batches, "bf16-mixed").verdict == "pass"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_runs_where_gradients_are_off(mode: Callable[[], Any]) -> None:
    model = Framed(nn.GELU())
    with mode():
        assert castwise.parity(model, _loss, _batches, "bf16-mixed").verdict == "pass"


def test_the_same_question_has_the_same_answer() -> None:
    one, two = (castwise.parity(Framed(nn.Dropout(0.2)), _loss, _batches, "bf16-mixed") for _ in range(2))
    assert one == two


@every(2)
@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_the_unit_of_the_loss_does_not_matter(factor: float) -> None:
    plain = castwise.parity(Framed(nn.GELU()), _loss, _batches, "bf16-mixed")
    scaled = castwise.parity(Framed(nn.GELU()), lambda m, b: factor * _loss(m, b), _batches, "bf16-mixed")
    assert scaled.damage.value == pytest.approx(plain.damage.value, rel=0.2)
    found = castwise.parity(Framed(nn.GELU()), lambda m, b: factor * _loss(m, b), _batches, "fp16-mixed")
    assert found.verdict == "pass", found.reason  # the loss scale is measured


def test_the_number_of_passes_does_not_grow_with_depth() -> None:
    counts = {
        castwise.parity(
            nn.Sequential(nn.Linear(12, 6), *(nn.Linear(6, 6) for _ in range(depth))),
            _loss,
            _batches,
            "bf16-mixed",
        ).passes
        for depth in (1, 4, 16)
    }
    assert counts == {69}  # 32 for the reference, 4 for the floor, 1 repeated, 32 for the plan


# --- input that cannot be tested ------------------------------------------------------------------------------


def _refused(error: type[Exception], text: str, loss: Any = _loss, **options: Any) -> None:
    options = {"model": Framed(nn.GELU()), "batches": _batches, "plan": "bf16-mixed", **options}
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        castwise.parity(loss=loss, **options)


def test_a_loss_without_a_graph() -> None:
    _refused(
        WorkloadError,
        "parity: loss(model, batch) returned a tensor without a graph, so the loss is not differentiable: no gradient can "
        "reach the model; remove .detach(), .item(), argmax or no_grad() from it, and check that the model has parameters that "
        "require gradients",
        lambda m, b: (m(b[0]).argmax(-1) == b[1]).float().mean(),
    )


def test_a_loss_of_another_model() -> None:
    other = Framed(nn.GELU())
    _refused(
        WorkloadError,
        "parity: after loss(model, batch) and backward no parameter of the model has a gradient; the loss must call the "
        "model that it is given, since experiments run on copies",
        lambda _m, b: _loss(other, b),
    )


def test_a_loss_that_is_no_scalar() -> None:
    _refused(
        WorkloadError,
        "parity: loss(model, batch) returned a tensor of shape [16] and float32; it must return a floating tensor with one "
        "element. Reduce it with .mean() or .sum()",
        lambda m, b: functional.cross_entropy(m(b[0]), b[1], reduction="none"),
    )


def test_a_loss_that_is_no_tensor() -> None:
    _refused(
        WorkloadError,
        "parity: loss(model, batch) returned float; it must return a floating tensor with one element, computed by torch and "
        "without .item()",
        lambda m, b: _loss(m, b).item(),
    )


def test_a_loss_that_is_nan_in_fp32_from_sound_data() -> None:
    _refused(
        NonFiniteError,
        "parity: the loss (nan) of batch 0 is not finite in fp32 already, so no plan can be compared: its data is "
        "finite, so look at the model's weights and its loss",
        lambda m, b: _loss(m, b) + (m(b[0]).abs() + 1).neg().log().sum(),
    )


def test_a_gradient_that_is_nan_in_fp32_under_a_finite_loss() -> None:
    _refused(
        NonFiniteError,
        "parity: the gradient of before.weight, before.bias, after.weight of batch 0 is not finite in fp32 already, so no "
        "plan can be compared: its data is finite, so look at the model's weights and its loss",
        lambda m, b: _loss(m, b) + (m(b[0]) * 0.0).sqrt().sum(),
    )


def test_data_that_holds_nan() -> None:
    x, y = next(_batches())
    x[3, 4] = float("nan")
    _refused(
        NonFiniteError,
        "parity: the loss (nan) of batch 0 is not finite in fp32 already, so no plan can be compared: its data contains NaN or "
        "infinite values, in batch[0] (1 of 192 values); clean the data first",
        batches=[(x, y)],
    )


def test_a_model_that_is_no_module() -> None:
    _refused(WorkloadError, "parity: model is type; give the torch.nn.Module itself", model=Framed)


def test_a_model_without_trained_parameters() -> None:
    _refused(
        WorkloadError,
        "parity: no parameter of Linear requires a gradient; give a model that is trained",
        model=nn.Linear(12, 6).requires_grad_(False),
    )


@pytest.mark.parametrize("name", ["accumulate", "world_size"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "1"])
def test_counts_that_are_none(name: str, value: Any) -> None:
    _refused(PlanError, f"parity({name}={value!r}): needs a whole number >= 1", **{name: value})


def test_a_plan_that_does_not_exist() -> None:
    with pytest.raises(PlanError, match="'bf61-mixed'"):
        castwise.parity(Framed(nn.GELU()), _loss, _batches, "bf61-mixed")


def test_a_region_that_matches_nothing() -> None:
    with pytest.raises(PlanError, match="'nowhere'"):
        castwise.parity(Framed(nn.GELU()), _loss, _batches, "bf16-mixed+regions.nowhere=fp32")


def test_batches_that_are_used_up() -> None:
    _refused(
        WorkloadError,
        "parity: batches is an iterator (generator), which can be consumed only once; give a "
        "sequence, a DataLoader or a function batches(seed) -> iterator",
        batches=_batches(),
    )


def test_no_batches() -> None:
    _refused(
        WorkloadError,
        "parity: batches is empty; give at least one batch, better 16 or more",
        batches=[],
    )


def test_the_users_own_error_comes_through() -> None:
    def loss(_model: nn.Module, _batch: Batch) -> Tensor:
        raise LookupError("mine")

    with pytest.raises(
        WorkloadError, match=r"LookupError: mine \(test_verdicts\.py, line \d+, in loss\)$"
    ) as caught:
        castwise.parity(Framed(nn.GELU()), loss, _batches, "bf16-mixed")
    assert isinstance(caught.value.__cause__, LookupError)
