"""Emulated fp16 products on a CPU, computed in fp32 and compared with fp64 products rounded once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from castwise.lab.passes.emulation import EmulatedProducts
from castwise.lab.passes.observers import observed
from tests.here import DEVICE
from tests.soak import each_value

pytestmark = pytest.mark.cpu  # only products on a CPU are emulated

Inputs = tuple[Tensor, ...]


def _inputs(*shapes: tuple[int, ...]) -> Inputs:
    generator = torch.Generator(DEVICE).manual_seed(0)
    return tuple(torch.randn(shape, generator=generator).half().double() for shape in shapes)


PRODUCTS: dict[str, tuple[Callable[..., Tensor], Inputs]] = {
    "mm": (torch.mm, _inputs((7, 33), (33, 5))),
    "mm of a transpose": (lambda a, b: a.t() @ b, _inputs((33, 7), (33, 5))),
    "bmm": (torch.bmm, _inputs((3, 7, 33), (3, 33, 5))),
    "matmul": (torch.matmul, _inputs((2, 3, 7, 33), (33, 5))),
    "mv": (torch.mv, _inputs((7, 33), (33,))),
    "linear": (functional.linear, _inputs((7, 33), (5, 33), (5,))),
    "linear of three dimensions": (functional.linear, _inputs((2, 7, 33), (5, 33), (5,))),
    "linear without bias": (functional.linear, _inputs((7, 33), (5, 33))),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2.0), _inputs((7, 5), (7, 33), (33, 5))),
    "baddbmm": (torch.baddbmm, _inputs((3, 7, 5), (3, 7, 33), (3, 33, 5))),
    "addbmm": (torch.addbmm, _inputs((7, 5), (3, 7, 33), (3, 33, 5))),
    "addmv": (torch.addmv, _inputs((7,), (7, 33), (33,))),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), _inputs((3, 7, 33), (3, 5, 33))),
    "conv1d": (functional.conv1d, _inputs((2, 4, 20), (6, 4, 3), (6,))),
    "conv2d": (
        lambda x, w, b: functional.conv2d(x, w, b, padding=1, stride=2),
        _inputs((2, 4, 9, 9), (6, 4, 3, 3), (6,)),
    ),
    "conv2d without bias": (functional.conv2d, _inputs((2, 4, 9, 9), (6, 4, 3, 3))),
    "depthwise": (lambda x, w: functional.conv2d(x, w, groups=6), _inputs((2, 6, 9, 9), (6, 1, 3, 3))),
    "conv3d": (functional.conv3d, _inputs((1, 2, 5, 5, 5), (3, 2, 3, 3, 3))),
    "conv_transpose2d": (functional.conv_transpose2d, _inputs((2, 4, 5, 5), (4, 3, 3, 3), (3,))),
}


def _run(
    function: Callable[..., Tensor], inputs: Inputs, dtype: torch.dtype, *, upstream_sign: bool = True
) -> list[Tensor]:
    """Return the result, and the gradients for an output gradient that fp16 holds exactly."""
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    out = function(*leaves)
    upstream = torch.randn(out.shape, generator=torch.Generator(DEVICE).manual_seed(3)).half().to(dtype)
    upstream = upstream if upstream_sign else upstream.abs()
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def _ulp(value: Tensor) -> Tensor:
    """Return fp16's unit in the last place at a value."""
    exponent = torch.frexp(value.abs().clamp_min(2.0**-14))[1] - 1
    return torch.ldexp(torch.full_like(value, 2.0**-10), exponent)


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_fp64s_rounded_once_forward_and_backward(name: str) -> None:
    """The error is at most half a unit of fp16, plus the fp32 rounding of the terms if the sum cancels."""
    function, inputs = PRODUCTS[name]
    exact = _run(function, inputs, torch.float64)
    terms = _run(function, tuple(x.abs() for x in inputs), torch.float64, upstream_sign=False)
    with observed(nn.Module(), EmulatedProducts()):
        low = _run(function, inputs, torch.float16)
    for wide, size, rounded in zip(exact, terms, low, strict=True):
        assert rounded.dtype is torch.float16
        assert rounded.shape == wide.shape
        off = (rounded.double() - wide).abs()
        assert bool((off <= 0.5 * _ulp(wide) + 2.0**-20 * size).all())
        assert float((off <= 0.501 * _ulp(wide)).double().mean()) > 0.97


@each_value()
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_other_formats_are_left_alone_to_the_bit(name: str, dtype: torch.dtype) -> None:
    function, inputs = PRODUCTS[name]
    plain = _run(function, inputs, dtype)
    with observed(nn.Module(), EmulatedProducts()):
        inside = _run(function, inputs, dtype)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(plain, inside, strict=True))


# --- attention ------------------------------------------------------------------------------------------------

MASKS: dict[str, Callable[[torch.dtype], Tensor | None]] = {
    "no": lambda _d: None,
    "a boolean": lambda _d: torch.ones(16, 16, dtype=torch.bool).tril(),
    "an additive": lambda d: torch.zeros(16, 16, dtype=d).masked_fill(
        torch.ones(16, 16, dtype=torch.bool).triu(1), -1e4
    ),
}


@pytest.mark.parametrize("mask", MASKS)
def test_attention_is_fp64s_rounded_forward_and_backward(mask: str) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=MASKS[mask](q.dtype))

    inputs = _inputs((2, 4, 16, 8), (2, 4, 16, 8), (2, 4, 16, 8))
    exact = _run(attend, inputs, torch.float64)
    with observed(nn.Module(), EmulatedProducts()):
        low = _run(attend, inputs, torch.float16)
    assert low[0].dtype is torch.float16
    assert float(((low[0].double() - exact[0]).abs() / _ulp(exact[0])).max()) <= 1.0
    for wide, rounded in zip(exact[1:], low[1:], strict=True):
        assert rounded.dtype is torch.float16
        # backward reads the rounded result of the forward pass
        torch.testing.assert_close(rounded.double(), wide, rtol=4e-3, atol=4e-3)


def test_causal_attention_is_fp64s_rounded() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5)

    inputs = _inputs((2, 4, 16, 8), (2, 4, 16, 8), (2, 4, 16, 8))
    exact = _run(attend, inputs, torch.float64)
    with observed(nn.Module(), EmulatedProducts()):
        low = _run(attend, inputs, torch.float16)
    assert float(((low[0].double() - exact[0]).abs() / _ulp(exact[0])).max()) <= 1.0


# --- properties of fp16 ---------------------------------------------------------------------------------------


def test_products_overflow_as_fp16s_do() -> None:
    a = torch.full((2, 4), 200.0).half()
    with observed(nn.Module(), EmulatedProducts()):
        assert torch.isinf(a @ a.t()).all()  # 160,000
        assert torch.equal((a @ (a.t() / 4)).double(), torch.full((2, 2), 40_000.0).double())


def test_products_underflow_as_fp16s_do() -> None:
    a = torch.full((1, 1), 2.0**-13).half()
    with observed(nn.Module(), EmulatedProducts()):
        assert float(a @ a) == 0.0
        assert float(a @ (a * 4)) == 2.0**-24


def test_sums_inside_a_product_do_not_overflow() -> None:
    a = torch.tensor([[60_000.0, 60_000.0, -60_000.0]]).half()
    with observed(nn.Module(), EmulatedProducts()):
        assert float(a @ torch.ones(3, 1).half()) == float(torch.tensor(60_000.0).half())


def test_autocast_to_fp16_gives_gradients_of_the_right_formats() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    x = torch.randn(2, 3, 8, 8)
    with observed(nn.Module(), EmulatedProducts()), torch.autocast(DEVICE, dtype=torch.float16):
        out = model(x)
        assert out.dtype is torch.float16
        out.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())
    emulated = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model(x).square().mean().backward()
    for low, p in zip(emulated, model.parameters(), strict=True):
        torch.testing.assert_close(low, p.grad, rtol=2e-2, atol=2e-3)


def test_recurrent_layers_run_in_fp16() -> None:
    torch.manual_seed(0)
    lstm, x = nn.LSTM(6, 5, batch_first=True), torch.randn(2, 7, 6)
    with torch.no_grad():
        for p in lstm.parameters():
            p.copy_(p.half())
    exact = lstm.double()(x.half().double())[0]
    with observed(nn.Module(), EmulatedProducts()):
        low = lstm.half()(x.half())[0]
    assert low.dtype is torch.float16
    torch.testing.assert_close(low.double(), exact, rtol=1e-2, atol=2e-3)
