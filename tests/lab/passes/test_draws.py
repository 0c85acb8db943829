"""Random draws of an fp32 run are replayed in other formats, with the values these formats would draw."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from castwise.core._torch.release import COARSE_DRAWS
from castwise.lab.passes.draws import Draws, _is_random, _rounded_twice, _uniform
from castwise.lab.passes.observers import observed
from tests.here import DEVICE

LOW = [torch.bfloat16, torch.float16]
X = (8, 33)
MANY = 1 << 16


def _ones(dtype: torch.dtype) -> Tensor:
    return torch.ones(X, dtype=dtype)


def _probabilities(dtype: torch.dtype) -> Tensor:
    return torch.full(X, 0.25, dtype=dtype)


DRAWS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "dropout": lambda d: functional.dropout(_ones(d), 0.5),
    "feature dropout": lambda d: functional.dropout2d(torch.ones(4, 8, 3, 3, dtype=d), 0.5),
    "alpha dropout": lambda d: functional.alpha_dropout(_ones(d), 0.5),
    "native_dropout": lambda d: torch.native_dropout(_ones(d), 0.5, True)[0],
    "native_dropout's mask": lambda d: torch.native_dropout(_ones(d), 0.5, True)[1],
    "randn_like": lambda d: torch.randn_like(_ones(d)),
    "rand_like": lambda d: torch.rand_like(_ones(d)),
    "randn": lambda d: torch.randn(X, dtype=d),
    "rand": lambda d: torch.rand(X, dtype=d),
    "bernoulli": lambda d: torch.bernoulli(_probabilities(d)),
    "bernoulli_": lambda d: torch.empty(X, dtype=d).bernoulli_(0.3),
    "uniform_": lambda d: torch.empty(X, dtype=d).uniform_(-1, 1),
    "normal_": lambda d: torch.empty(X, dtype=d).normal_(),
    "exponential_": lambda d: torch.empty(X, dtype=d).exponential_(),
    "randint": lambda d: torch.randint(1000, X),
    "randint_like": lambda d: torch.randint_like(_ones(d), 100),
    "randperm": lambda d: torch.randperm(100),
    "multinomial": lambda d: torch.multinomial(torch.rand(X).to(d), 3),
}


def _replayed(code: Callable[[], Any], draws: Draws, seed: int = 0) -> tuple[Any, int]:
    torch.manual_seed(seed)
    with observed(nn.Module(), draws):
        out = code()
    return out, draws.strayed


def _recorded(code: Callable[[], Any], seed: int = 0) -> tuple[Any, Draws]:
    draws = Draws()
    return _replayed(code, draws, seed)[0], draws


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("name", DRAWS)
def test_draws_of_fp32_are_replayed_in_other_formats(name: str, dtype: torch.dtype) -> None:
    drawn, draws = _recorded(lambda: DRAWS[name](torch.float32))
    again, strayed = _replayed(lambda: DRAWS[name](dtype), draws, seed=1)  # another seed: the tape is used
    assert strayed == 0
    assert again.dtype == (dtype if drawn.is_floating_point() else drawn.dtype)
    if name == "alpha dropout":  # its constants are rounded too
        torch.testing.assert_close(again.float(), drawn, rtol=2e-2, atol=1e-2)
    elif name in (
        "rand",
        "rand_like",
        "uniform_",
    ):  # the same quantile, up to one unit in the last place
        torch.testing.assert_close(again.float(), drawn, rtol=0, atol=2 * torch.finfo(dtype).eps)
    else:
        assert torch.equal(again, drawn.to(again.dtype))


KERNELS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "rand": lambda d: torch.rand(MANY, dtype=d),
    "rand_like": lambda d: torch.rand_like(torch.empty(MANY, dtype=d)),
    "rand_like of few": lambda d: torch.cat([torch.rand_like(torch.empty(64, dtype=d)) for _ in range(MANY // 64)]),
    "uniform_": lambda d: torch.empty(MANY, dtype=d).uniform_(),
    "uniform_, from a number to another": lambda d: torch.empty(MANY, dtype=d).uniform_(1e-6, 0.7),
    "uniform_, in a step": lambda d: torch.empty(MANY, dtype=d).uniform_(3, 3.01),
    "uniform_, up to 0": lambda d: torch.empty(MANY, dtype=d).uniform_(-1, 0),
    "randn": lambda d: torch.randn(MANY, dtype=d),
    "normal": lambda d: torch.normal(torch.ones(MANY, dtype=d), torch.full((MANY,), 0.01, dtype=d)),
    "exponential_": lambda d: torch.empty(MANY, dtype=d).exponential_(),
    "log_normal_": lambda d: torch.empty(MANY, dtype=d).log_normal_(),
    "cauchy_": lambda d: torch.empty(MANY, dtype=d).cauchy_(),
    "geometric_": lambda d: torch.empty(MANY, dtype=d).geometric_(0.01),
    "random_": lambda d: torch.empty(MANY, dtype=d).random_(),
    "randint_like": lambda d: torch.randint_like(torch.empty(MANY, dtype=d), 200),
    "poisson": lambda d: torch.poisson(torch.full((MANY,), 300.0, dtype=d)),
    "bernoulli_": lambda d: torch.empty(MANY, dtype=d).bernoulli_(5e-4),
    "bernoulli": lambda d: torch.bernoulli(torch.full((MANY,), 0.999, dtype=d)),
    "bernoulli_ of a tensor": lambda d: torch.empty(MANY, dtype=d).bernoulli_(torch.full((MANY,), 0.3, dtype=d)),
    "multinomial": lambda d: torch.multinomial(torch.linspace(0, 3, 16, dtype=d).expand(MANY // 8, 16), 2),
    "multinomial of many": lambda d: torch.multinomial(torch.ones(50, 50_000, dtype=d), 1),
    "multinomial, again and again": lambda d: torch.multinomial(torch.linspace(0, 3, 16, dtype=d), MANY, True),
    "rrelu": lambda d: functional.rrelu(torch.full((MANY,), -1.0).to(d), 0.1, 0.3, training=True),
}  # fmt: skip


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_a_replayed_draw_has_the_distribution_of_the_formats_own_kernel(
    name: str, dtype: torch.dtype
) -> None:
    """A replayed sample and a sample of the format's own kernel differ in distribution by chance only."""
    if name == "rrelu" and dtype is torch.float16:
        pytest.skip("torch has no rrelu kernel for fp16 on a CPU")
    if name == "randn" and COARSE_DRAWS and torch.get_default_device().type == "cpu":
        pytest.skip(
            "torch 2.11 draws randn on a CPU from only 256 or 2048 uniform numbers, which the replay does not imitate"
        )
    _, draws = _recorded(lambda: KERNELS[name](torch.float32))
    again, strayed = _replayed(lambda: KERNELS[name](dtype), draws, seed=1)
    torch.manual_seed(2)
    ours, theirs = again.double().flatten(), KERNELS[name](dtype).double().flatten()
    assert strayed == 0
    values = torch.cat((ours, theirs)).unique()
    below = [torch.searchsorted(x.sort().values, values, right=True) / x.numel() for x in (ours, theirs)]
    # Compare single values too: a probability of 1/512 at 0 is below the sampling error of the distribution.
    rate = [torch.cat((b[:1], b[1:] - b[:-1])).double() for b in below]
    error = ((rate[0] + rate[1]) / ours.numel()).sqrt() + 1 / ours.numel()
    assert (
        float((below[0] - below[1]).abs().max()) < 2.2 * (2 / ours.numel()) ** 0.5
    )  # Kolmogorov-Smirnov at p = 1e-4
    assert float(((rate[0] - rate[1]).abs() / error).max()) < 6.0


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_rand_is_0_where_the_format_would_round_it_to_1(dtype: torch.dtype) -> None:
    count = 16 * MANY  # enough draws to estimate the rate of zeros within a sixteenth
    drawn, draws = _recorded(lambda: torch.rand(count))
    again, _ = _replayed(lambda: torch.rand(count, dtype=dtype), draws)
    eps = torch.finfo(dtype).eps
    assert float(again.max()) == 1 - eps / 2
    coarse = (
        COARSE_DRAWS and torch.get_default_device().type == "cpu"
    )  # torch 2.11 rounds down, to multiples of eps / 2
    assert float((again == 0).double().mean()) == pytest.approx(eps / (2 if coarse else 4), rel=0.2)
    assert bool((again[drawn < eps / 4] == 0).all())  # where fp32 is near 0, the format is 0


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize(("start", "end"), [(0.0, 1.0), (3.0, 3.01), (-0.1, 0.1), (1e-6, 0.7)])
def test_uniform_draws_lie_at_the_quantiles_of_a_kernel_that_rounds_both_ends(
    start: float, end: float, dtype: torch.dtype
) -> None:
    """CUDA's kernel scales by the rounded ends, rounds the result and returns the start in place of the end."""
    unit = torch.rand(16 * MANY)
    first, last = (torch.tensor(x, dtype=dtype) for x in (start, end))
    kernel = (unit * (last - first).float() + first.float()).to(dtype)
    kernel = torch.where(kernel == last, first, kernel).float()
    ours = _uniform(unit * (end - start) + start, start, end, dtype, rounds_ends=True).float()
    assert bool(((ours >= first) & ((ours < last) | (first == last))).all())
    values = kernel.unique()
    below = [torch.searchsorted(x.sort().values, values, right=True) / x.numel() for x in (ours, kernel)]
    assert float((below[0] - below[1]).abs().max()) < 2e-3


def test_slopes_of_rrelu_lie_where_a_kernel_that_rounds_twice_puts_them() -> None:
    unit = torch.rand(MANY)
    kernel = (unit.bfloat16().double() * 0.2 + 0.1).bfloat16()
    ours = _rounded_twice(unit * 0.2 + 0.1, 0.1, 0.1 + 0.2, torch.bfloat16).bfloat16()
    assert float((ours != kernel).double().mean()) < 1e-3
    assert float(((unit * 0.2 + 0.1).bfloat16() != kernel).double().mean()) > 0.1


def test_recurrent_kernels_of_a_gpu_draw_only_for_dropout_in_training() -> None:
    op = torch.ops.aten._cudnn_rnn.default
    assert not _is_random(op, {"train": True, "dropout": 0.0})
    assert not _is_random(op, {"train": False, "dropout": 0.5})
    assert _is_random(op, {"train": True, "dropout": 0.5})


def test_randint_replays_no_number_that_the_format_cannot_draw() -> None:
    _, draws = _recorded(lambda: torch.randint_like(torch.empty(MANY), 1000))
    with pytest.warns(UserWarning, match="out of bounds"):
        again, _ = _replayed(lambda: torch.randint_like(torch.empty(MANY).bfloat16(), 1000), draws)
    assert float(again.max()) == 996  # the next bf16 value is 1000


def test_a_wide_draw_is_replayed_as_it_is() -> None:
    drawn, draws = _recorded(lambda: torch.rand(MANY))
    again, _ = _replayed(lambda: torch.rand(MANY), draws, seed=1)
    assert torch.equal(again, drawn)


def test_chances_that_move_by_rounding_change_only_the_masks_that_they_decide() -> None:
    chances = torch.rand(MANY)
    drawn, draws = _recorded(lambda: torch.bernoulli(chances))
    again, _ = _replayed(lambda: torch.bernoulli(chances.bfloat16()), draws, seed=1)
    assert torch.equal(_replayed(lambda: torch.bernoulli(chances), draws, seed=1)[0], drawn)
    moved = (chances.bfloat16().float() - chances).abs().mean()
    assert 0 < float((again.float() != drawn).float().mean()) < 2 * float(moved)


@pytest.mark.cpu  # a GPU draws in fp32 and then rounds
def test_without_a_tape_a_seed_alone_gives_other_draws() -> None:
    """The same seed gives different draws in two formats; this is why draws are replayed."""
    torch.manual_seed(0)
    wide = DRAWS["randn_like"](torch.float32)
    torch.manual_seed(0)
    assert not torch.equal(DRAWS["randn_like"](torch.bfloat16), wide.bfloat16())


@pytest.mark.cpu  # a GPU draws in fp32 and then rounds
@pytest.mark.parametrize("like", [torch.randn_like, torch.rand_like])
def test_in_large_tensors_a_seed_gives_wholly_other_draws(like: Callable[[Tensor], Tensor]) -> None:
    """In small tensors on a CPU, the draws of two formats agree up to rounding."""
    torch.manual_seed(3)
    wide = like(torch.zeros(5000))
    torch.manual_seed(3)
    low = like(torch.zeros(5000, dtype=torch.bfloat16))
    assert not torch.allclose(wide, low.float(), atol=0.05)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_dropout_of_any_probability_masks_and_scales_alike_in_forward_and_backward(
    p: float, dtype: torch.dtype
) -> None:
    def run(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x = torch.linspace(1, 2, 256, dtype=dtype).requires_grad_()
        y = functional.dropout(x, p)
        return y.detach(), torch.autograd.grad(y.sum(), x)[0]

    drawn, draws = _recorded(lambda: run(torch.float32))
    again, strayed = _replayed(lambda: run(dtype), draws, seed=3)
    assert strayed == 0
    for wide, low in zip(drawn, again, strict=True):
        torch.testing.assert_close(low.float(), wide, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("train", [True, False, None])
def test_native_dropout_in_either_mode(train: bool | None) -> None:
    drawn, draws = _recorded(lambda: torch.native_dropout(torch.ones(64), 0.5, train))
    again, strayed = _replayed(lambda: torch.native_dropout(torch.ones(64).half(), 0.5, train), draws, 1)
    assert strayed == 0
    assert torch.equal(again[0].float(), drawn[0])
    assert torch.equal(again[1], drawn[1])


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("hard", [False, True])
def test_gumbel_softmax_draws_alike(hard: bool, dtype: torch.dtype) -> None:
    logits = torch.linspace(-1, 1, 6).repeat(20, 1)
    drawn, draws = _recorded(lambda: functional.gumbel_softmax(logits, hard=hard))
    again, strayed = _replayed(lambda: functional.gumbel_softmax(logits.to(dtype), hard=hard), draws, 1)
    assert strayed == 0
    torch.testing.assert_close(again.float(), drawn, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_reparameterised_samples_draw_alike_and_keep_their_gradient(dtype: torch.dtype) -> None:
    def run(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        scale = torch.full((64,), 2.0, dtype=dtype, requires_grad=True)
        sample = torch.distributions.Normal(torch.zeros(64, dtype=dtype), scale).rsample()
        return sample.detach(), torch.autograd.grad(sample.sum(), scale)[0]

    drawn, draws = _recorded(lambda: run(torch.float32))
    again, strayed = _replayed(lambda: run(dtype), draws, seed=2)
    assert strayed == 0
    for wide, low in zip(drawn, again, strict=True):
        torch.testing.assert_close(low.float(), wide, rtol=2e-2, atol=0)


def test_draws_that_are_changed_in_place_afterwards_are_replayed_as_drawn() -> None:
    def code(dtype: torch.dtype) -> Tensor:
        return torch.randn(20, dtype=dtype).mul_(3).add_(1)

    drawn, draws = _recorded(lambda: code(torch.float32))
    again, _ = _replayed(lambda: code(torch.float32), draws, seed=1)
    assert torch.equal(again, drawn)
    again, _ = _replayed(lambda: code(torch.float32), draws, seed=1)  # a tape can be replayed twice
    assert torch.equal(again, drawn)


def test_the_same_format_and_seed_give_the_same_bits() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.GELU(), nn.Linear(8, 1))
    x = torch.randn(16, 8)

    def run() -> list[Tensor]:
        return list(torch.autograd.grad(model(x).square().mean(), model.parameters()))

    drawn, draws = _recorded(run)
    again, strayed = _replayed(run, draws, seed=9)
    assert strayed == 0
    assert all(torch.equal(a, b) for a, b in zip(drawn, again, strict=True))


def test_the_generator_moves_on_as_it_would_without_a_tape() -> None:
    _, draws = _recorded(lambda: torch.randn(5))
    torch.manual_seed(4)
    with observed(nn.Module(), draws):
        torch.randn(5)
    after = torch.rand(3)
    torch.manual_seed(4)
    torch.randn(5)
    assert torch.equal(after, torch.rand(3))


# --- recomputation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
def test_recomputation_sees_the_mask_that_forward_saw(dtype: torch.dtype, reentrant: bool) -> None:
    def run(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x = torch.ones(256, dtype=dtype, requires_grad=True)
        y = checkpoint(lambda t: functional.dropout(t * t, 0.5), x, use_reentrant=reentrant)
        (gradient,) = torch.autograd.grad(y.sum(), x) if not reentrant else (None,)
        if gradient is None:
            y.sum().backward()
            gradient = x.grad
        assert gradient is not None
        return y.detach(), gradient

    drawn, draws = _recorded(lambda: run(torch.float32))
    again, strayed = _replayed(lambda: run(dtype), draws, seed=5)
    assert strayed == 0
    assert torch.equal(again[0].float(), drawn[0])
    assert torch.equal(again[1].float(), drawn[1])
    assert torch.equal(again[1], 2 * again[0])  # backward uses the mask of the forward pass


# --- attention ------------------------------------------------------------------------------------------------


def _attend(inputs: Tensor, p: float) -> tuple[Tensor, Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in inputs)
    # On a GPU, fused kernels draw internally, and these draws cannot be replayed.
    with sdpa_kernel(SDPBackend.MATH) if p and DEVICE != "cpu" else contextlib.nullcontext():
        out = functional.scaled_dot_product_attention(q, k, v, dropout_p=p)
    return out.detach(), torch.autograd.grad(out.float().square().sum(), v)[0]


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_attention_with_and_without_dropout(p: float, dtype: torch.dtype) -> None:
    inputs = torch.randn(3, 2, 4, 16, 8)
    drawn, draws = _recorded(lambda: _attend(inputs, p))
    again, strayed = _replayed(lambda: _attend(inputs.to(dtype), p), draws, seed=6)
    assert strayed == 0
    assert len(draws.tape or ()) == (1 if p else 0)
    for wide, low in zip(drawn, again, strict=True):
        torch.testing.assert_close(low.float(), wide, rtol=0.05, atol=0.1)


# --- code that draws differently under the plan ---------------------------------------------------------------


def test_a_draw_of_another_shape_is_counted() -> None:
    _, draws = _recorded(lambda: torch.randn(5))
    assert _replayed(lambda: torch.randn(6), draws)[1] == 1


def test_a_draw_by_another_operator_is_counted() -> None:
    _, draws = _recorded(lambda: torch.randn(5))
    assert _replayed(lambda: torch.rand(5), draws)[1] == 1


def test_draws_beyond_the_tape_are_counted_and_random() -> None:
    drawn, draws = _recorded(lambda: torch.randn(50))
    (one, two), strayed = _replayed(lambda: (torch.randn(50), torch.randn(50)), draws, seed=1)
    assert strayed == 1
    assert torch.equal(one, drawn)
    assert not torch.equal(two, drawn)


def test_rrelu_repeats_its_slopes_in_forward_and_backward() -> None:
    values = torch.randn(50)

    def code(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x = values.to(dtype).requires_grad_()
        y = functional.rrelu(x, training=True)
        return y.detach(), torch.autograd.grad(y.sum(), x)[0]

    drawn, draws = _recorded(lambda: code(torch.float32))
    again, strayed = _replayed(lambda: code(torch.bfloat16), draws, seed=1)
    assert strayed == 0
    for wide, low in zip(drawn, again, strict=True):
        torch.testing.assert_close(low.float(), wide, rtol=2e-2, atol=0)


def test_rrelu_draws_nothing_in_evaluation() -> None:
    x = torch.randn(50)
    assert _recorded(lambda: functional.rrelu(x))[1].tape == []


def test_a_noise_that_cannot_be_replayed_is_counted() -> None:
    x = torch.randn(50)
    _, draws = _recorded(lambda: functional.rrelu_(x.clone(), training=True))
    assert _replayed(lambda: functional.rrelu_(x.bfloat16(), training=True), draws)[1] == 1


def test_code_without_draws_records_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5).eval(), nn.BatchNorm1d(4), nn.Softmax(-1))
    _, draws = _recorded(lambda: model(torch.ones(3, 4)).sum().backward())
    assert draws.tape == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("name", ["dropout", "randn", "bernoulli_"])
def test_draws_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    with torch.device("cuda"):
        drawn, draws = _recorded(lambda: DRAWS[name](torch.float32))
        again, strayed = _replayed(lambda: DRAWS[name](dtype), draws, seed=1)
    assert strayed == 0
    assert torch.equal(again, drawn.to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("name", [name for name in KERNELS if "rrelu" not in name])
def test_a_replayed_draw_has_the_distribution_of_a_gpus_kernel(name: str, dtype: torch.dtype) -> None:
    with torch.device("cuda"):
        test_a_replayed_draw_has_the_distribution_of_the_formats_own_kernel(name, dtype)
