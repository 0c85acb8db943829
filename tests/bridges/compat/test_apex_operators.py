"""O1 beyond the cast lists: in-place arithmetic, operators called by operators, registered functions, torch.func."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func, nn
from torch.distributions import Categorical
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from castwise.bridges.compat.apex import amp
from tests.soak import each_value, every

HALF, FP32 = torch.float16, torch.float32
DTYPES = [torch.float16, torch.bfloat16]
# Tolerance relative to the largest element, for a few successive roundings to half.
ROUNDED = 2e-3


def start(half: torch.dtype = HALF) -> None:
    amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0, patch_torch_functions_type=half)


def square(dtype: torch.dtype = FP32) -> Tensor:
    """Return an invertible matrix of numbers that half rounds."""
    return (torch.linspace(0.1, 0.9, 16).reshape(4, 4) + 2 * torch.eye(4)).to(dtype)


# --- inside operators ---------------------------------------------------------------------------------------

WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "affine_grid": lambda x: functional.affine_grid(x[None, :2, :3], [1, 1, 4, 4], align_corners=False),
    "cdist": lambda x: torch.cdist(x, x.T),
    "corrcoef": torch.corrcoef,
    "cov": torch.cov,
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "inner": lambda x: torch.inner(x, x),
    "linalg.cond": torch.linalg.cond,
    "linalg.inv": torch.linalg.inv,
    "linalg.lstsq": lambda x: torch.linalg.lstsq(x, x[:, :1])[0],
    "linalg.matmul": lambda x: torch.linalg.matmul(x, x),
    "linalg.matrix_exp": torch.linalg.matrix_exp,
    "linalg.matrix_power": lambda x: torch.linalg.matrix_power(x, 3),
    "linalg.multi_dot": lambda x: torch.linalg.multi_dot([x, x, x]),
    "linalg.pinv": torch.linalg.pinv,
    "linalg.pinv by its tolerance": lambda x: torch.linalg.pinv(x, rtol=torch.tensor(1e-3)),
    "linalg.tensorinv": lambda x: torch.linalg.tensorinv(x.reshape(4, 2, 2), ind=1),
    "linalg.vecdot": lambda x: torch.linalg.vecdot(x, x),
    "matrix_exp": torch.matrix_exp,
    "matrix_power": lambda x: x.matrix_power(3),
    "matrix_power below 0": lambda x: torch.matrix_power(x, -2),
    "pinverse": lambda x: x.pinverse(),
    "smm": lambda x: torch.smm(x.to_sparse(), x).to_dense(),
    "sparse.addmm": lambda x: torch.sparse.addmm(x, x.to_sparse(), x),
    "sparse.mm": lambda x: torch.sparse.mm(x.to_sparse(), x),
    "tensordot": lambda x: torch.tensordot(x, x, 1),
}
"""Operators that are not in Apex's lists and multiply matrices internally."""


@pytest.mark.parametrize("half", DTYPES)
def test_what_runs_inside_of_an_operator_is_not_cast(half: torch.dtype) -> None:
    want = {name: f(square()) for name, f in WHOLE.items()}
    start(half)
    for name, f in WHOLE.items():  # LAPACK's results depend on memory addresses
        torch.testing.assert_close(f(square()), want[name], rtol=1e-6, atol=1e-6, msg=name)
    with pytest.raises(AssertionError):
        torch.testing.assert_close((square() @ square()).float(), want["linalg.matmul"], rtol=1e-6, atol=1e-6)


MODES = {"grad": torch.enable_grad, "no grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
@pytest.mark.parametrize("half", DTYPES)
def test_logsumexp_and_what_stands_on_it_take_half(half: torch.dtype, mode: Any) -> None:
    logits = square(half) * 2
    truth = Categorical(logits=logits.double())
    start(half)
    rounded = 2**-8 if half is HALF else 2**-5  # rounding of logits between 4 and 8
    with mode():
        x = logits.clone().requires_grad_(torch.is_grad_enabled())
        assert torch.logsumexp(x, -1).dtype is half  # not in Apex's lists
        torch.testing.assert_close(
            torch.logsumexp(x, -1).double(), logits.double().logsumexp(-1), rtol=2**-7, atol=0
        )
        found = Categorical(logits=x)
        for got, want in (
            (found.log_prob(torch.arange(4)), truth.log_prob(torch.arange(4))),
            (found.entropy(), truth.entropy()),
            (found.probs, truth.probs),
        ):
            torch.testing.assert_close(got.detach().double(), want, rtol=rounded, atol=2 * rounded)
        assert found.sample().shape == (4,)
    if x.requires_grad:
        found.log_prob(torch.arange(4)).float().sum().backward()
        assert x.grad is not None
        assert x.grad.isfinite().all()


def test_in_place_forms_of_unlisted_names_run() -> None:
    start()
    for name in ("square_", "arccos_", "arcsin_"):
        x = square(HALF) / 4
        assert getattr(x, name)() is x
        assert x.dtype is HALF
    with pytest.raises(NotImplementedError, match="Cannot call in-place method pow_"):
        square(HALF).pow_(2)


# --- in-place arithmetic ------------------------------------------------------------------------------------

IN_PLACE = {
    operator.iadd: torch.add, operator.isub: torch.sub, operator.imul: torch.mul, operator.itruediv: torch.div,
}  # fmt: skip


@each_value()
@pytest.mark.parametrize("half", DTYPES)
@pytest.mark.parametrize("operate", IN_PLACE, ids=lambda function: function.__name__)
def test_in_place_arithmetic_promotes(operate: Any, half: torch.dtype) -> None:
    wide = square() * 1e5
    want = IN_PLACE[operate](square(half).float(), wide)
    start(half)
    x = square(half)
    got = operate(x, wide)
    assert got.dtype is FP32
    assert torch.equal(got, want)
    assert torch.equal(x, square(half))  # unchanged, as in Apex, where only the name is rebound
    assert operate(square(half), torch.tensor(3.0)).dtype is FP32
    x = square()
    assert operate(x, square(half)) is x
    assert x.dtype is FP32
    for other in (2, 0.5, square(half), square(torch.float64)):
        x = square(half)
        assert operate(x, other) is x
        assert x.dtype is half
    with amp.disable_casts():
        assert operate(square(half), square()).dtype is half


def test_losses_that_are_added_up_do_not_overflow() -> None:
    model = nn.Linear(4, 4)
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), 0.1), loss_scale=0.0625, verbosity=0
    )
    out = model(square())
    loss = out.mean()
    assert loss.dtype is HALF
    loss += functional.cross_entropy(out, torch.arange(4)) * 1e5
    assert loss.dtype is FP32
    assert 65504 < float(loss.detach()) < float("inf")
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    assert model.weight.grad.isfinite().all()


def test_a_part_of_a_tensor_that_is_added_to_keeps_its_type() -> None:
    start()
    x = square(HALF)
    x[0] += torch.ones(4)
    assert x.dtype is HALF
    assert torch.equal(x[0], (square(HALF)[0].float() + 1).half())


# --- registered functions -----------------------------------------------------------------------------------

half_, float_, promote_ = (
    amp.register_half_function,
    amp.register_float_function,
    amp.register_promote_function,
)
WINS: list[tuple[Any, Any, str, Callable[[], Tensor], torch.dtype]] = [
    (float_, torch, "matmul", lambda: torch.matmul(square(HALF), square()), FP32),
    (float_, torch, "bmm", lambda: torch.bmm(square(HALF)[None], square()[None]), FP32),
    (float_, torch, "einsum", lambda: torch.einsum("ij,jk->ik", square(HALF), square(HALF)), FP32),
    (float_, torch.Tensor, "matmul", lambda: square(HALF).matmul(square(HALF)), FP32),
    (float_, functional, "linear", lambda: nn.Linear(4, 4)(square(HALF)), FP32),
    (float_, functional, "conv2d", lambda: nn.Conv2d(1, 1, 1)(square(HALF)[None, None]), FP32),
    (float_, torch, "cat", lambda: torch.cat([square(HALF), square(HALF)]), FP32),
    (float_, torch, "sigmoid", lambda: torch.sigmoid(square(HALF)), FP32),
    (half_, torch, "exp", lambda: torch.exp(square()), HALF),
    (half_, torch, "norm", lambda: torch.norm(square()), HALF),
    (half_, torch, "add", lambda: torch.add(square(HALF), square()), HALF),
    (half_, torch, "stack", lambda: torch.stack([square(HALF), square()]), HALF),
    (half_, torch, "einsum", lambda: torch.einsum("ij,jk->ik", square(), square()), HALF),
    (half_, torch.Tensor, "sum", lambda: square().sum(), HALF),
    (half_, functional, "softmax", lambda: nn.Softmax(-1)(square()), HALF),
    (half_, functional, "gelu", lambda: functional.gelu(square()), HALF),
    (half_, functional, "layer_norm", lambda: functional.layer_norm(square(), (4,)), HALF),
    (half_, functional, "cross_entropy", lambda: functional.cross_entropy(square(), torch.arange(4)), HALF),
    (half_, functional, "interpolate", lambda: functional.interpolate(square()[None], scale_factor=2), HALF),
    (half_, functional, "softmin", lambda: functional.softmin(square(), -1), HALF),
]
"""Register function, owner, name, a call, and the dtype of its result, which differs without registration."""


@every(3, 2)
@pytest.mark.parametrize(("register", "owner", "name", "call", "wanted"), WINS)
def test_registered_functions_win_over_the_lists(
    register: Any, owner: Any, name: str, call: Callable[[], Tensor], wanted: torch.dtype
) -> None:
    plain = getattr(owner, name)
    start()
    assert call().dtype is not wanted
    amp._amp_state.handle._deactivate()
    register(owner, name)
    start()
    assert call().dtype is wanted
    amp._amp_state.handle._deactivate()
    assert getattr(owner, name) is plain


def test_a_registered_product_is_one_of_unrounded_inputs() -> None:
    want = square() @ square()
    amp.register_float_function(torch, "matmul")
    start()
    assert torch.equal(torch.matmul(square(), square()), want)
    assert (square() @ square()).dtype is HALF  # ``@`` is another function


def test_registered_functions_that_call_several_operators_have_the_casts_inside() -> None:
    amp.register_half_function(functional, "normalize")
    amp.register_float_function(functional, "multi_head_attention_forward")
    start()
    assert functional.normalize(square()).dtype is FP32  # as its norm is
    attention = nn.MultiheadAttention(4, 2)
    assert attention(square()[:, None], square()[:, None], square()[:, None])[0].dtype is HALF


def test_a_ban_gives_way_and_promotion_comes_after_the_lists() -> None:
    amp.register_float_function(functional, "binary_cross_entropy")
    amp.register_promote_function(torch, "matmul")
    amp.register_promote_function(torch, "maximum")
    start()
    assert nn.BCELoss()(square(HALF) / 4, square(HALF) / 4).dtype is FP32
    assert torch.matmul(square(HALF), square()).dtype is HALF
    assert torch.maximum(square(HALF), square()).dtype is FP32


def test_what_is_registered_last_wins() -> None:
    amp.register_half_function(functional, "softmax")
    amp.register_float_function(functional, "softmax")
    start()
    assert functional.softmax(square(HALF), -1).dtype is FP32


# --- torch.func ---------------------------------------------------------------------------------------------


def updated(x: Tensor) -> Tensor:
    y = x * 1.0
    y += 2
    y *= x
    y -= 0.5
    y /= 3
    return y


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "2 * x": lambda x: 2 * x,
    "x + 0.1": lambda x: x + 0.1,
    "1 - x": lambda x: 1 - x,
    "x / 3": lambda x: x / 3,
    "2 / x": lambda x: 2 / x,
    "x ** 3": lambda x: x**3,
    "3 ** x": lambda x: 3**x,
    "x % 0.7": lambda x: x * (x % 0.7),
    "x > 1": lambda x: torch.where(x > 1, x * x, 0.5),
    "multiply": lambda x: torch.multiply(x, 0.7),
    "subtract": lambda x: torch.subtract(x, 1, alpha=2),
    "divide": lambda x: torch.divide(x, 3),
    "true_divide": lambda x: x.true_divide(3),
    "rsub": lambda x: torch.rsub(x, 2),
    "xlogy": lambda x: torch.xlogy(x, 2.0) + torch.xlogy(2.0, x),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "products": lambda x: (x @ x) * 0.5 - 1,
    "in place": updated,
}
OF_FUNC: dict[str, Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Any]]] = {
    "grad": func.grad,
    "grad of grad": lambda f: func.grad(lambda x: func.grad(f)(x).sum()),
    "vmap of grad": lambda f: lambda x: func.vmap(func.grad(f))(torch.stack([x, x * 0.5])),
    "jvp": lambda f: lambda x: func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "hessian": func.hessian,
}


@pytest.mark.parametrize("transform", OF_FUNC.values(), ids=OF_FUNC.keys())
def test_numbers_are_operands_inside_of_transforms(transform: Any) -> None:
    start()
    for name, operation in OPERATIONS.items():
        got = transform(lambda x, f=operation: f(x).sum())(square())
        want = transform(lambda x, f=operation: f(x).sum())(square(torch.float64))  # fp64 is never cast
        torch.testing.assert_close(
            got.double(), want, rtol=0, atol=ROUNDED * max(1.0, float(want.abs().max())), msg=name
        )


TAKEN_APART: dict[str, Callable[[Tensor], Tensor]] = {
    "bce": lambda z: functional.binary_cross_entropy_with_logits(z, square() / 4),
    "bce, weighed": lambda z: functional.binary_cross_entropy_with_logits(
        z, square() / 4, square(), pos_weight=torch.full((4,), 2.0)
    ),
    "attention": lambda z: functional.scaled_dot_product_attention(z[None], z[None], z[None]).float(),
    "attention, causal": lambda z: functional.scaled_dot_product_attention(
        z[None], z[None], z[None], is_causal=True
    ).float(),
}


@each_value()
@pytest.mark.parametrize("dtype", [HALF, FP32])
@pytest.mark.parametrize("transform", OF_FUNC.values(), ids=OF_FUNC.keys())
@pytest.mark.parametrize("function", TAKEN_APART.values(), ids=TAKEN_APART.keys())
def test_what_a_transform_takes_apart_is_cast_as_a_whole(
    function: Callable[[Tensor], Tensor], transform: Any, dtype: torch.dtype
) -> None:
    def f(x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # torch 2.14 has no forward derivative of another kernel
            return function(x @ square() / 4).sum()

    start()
    got = transform(f)(square(dtype))
    amp._amp_state.handle._deactivate()
    want = transform(f)(square())
    torch.testing.assert_close(
        got.float(), want, rtol=0, atol=4 * ROUNDED * max(1.0, float(want.abs().max()))
    )


@pytest.mark.parametrize("dtype", [HALF, FP32])
def test_a_scalar_is_differentiated(dtype: torch.dtype) -> None:
    start()
    x = square()
    for operation in (
        lambda s: s * x,
        lambda s: x - s,
        lambda s: x / s,
        lambda s: x**s,
        lambda s: 2 * s * x + 1,
    ):
        got = func.grad(lambda s, f=operation: f(s).sum())(torch.tensor(1.5, dtype=dtype))
        with amp.disable_casts():
            want = func.grad(lambda s, f=operation: f(s).sum())(torch.tensor(1.5))
        assert got.dtype is dtype
        torch.testing.assert_close(got.float(), want, rtol=ROUNDED, atol=0)
