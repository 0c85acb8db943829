"""Random draws of an fp32 run come again in another format; fp16 products are what a matrix unit gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from castwise.numerics.draws import Recorder, Replayer, Tape
from castwise.numerics.emulation import EmulatedProducts

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: functional.dropout(torch.ones_like(x), 0.5),
    "randn_like": torch.randn_like,
    "rand_like": torch.rand_like,
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "multinomial": lambda x: torch.multinomial(torch.ones(64), 16).to(x.dtype),
    "randint": lambda x: torch.randint(0, 9, (16,)).to(x.dtype),
    "randperm": lambda x: torch.randperm(16).to(x.dtype),
    "native_dropout": lambda x: torch.native_dropout(torch.ones_like(x), 0.3, True)[0],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", DRAWS)
def test_draws_come_again_in_another_format(name: str, dtype: torch.dtype) -> None:
    x = torch.zeros(64, 16)
    tape = Tape()
    torch.manual_seed(1)
    with Recorder(tape):
        reference = DRAWS[name](x)
    torch.manual_seed(2)  # a run that draws anew would see other numbers
    with Replayer(tape) as replayer:
        again = DRAWS[name](x.to(dtype))
    assert replayer.strayed == 0
    assert again.dtype is dtype
    assert torch.equal(again, reference.to(dtype))


@pytest.mark.parametrize("like", [torch.randn_like, torch.rand_like])
def test_without_replay_low_draws_are_other_numbers(like: Callable[[Tensor], Tensor]) -> None:
    """The trap itself: one seed, two formats, different noise. Small tensors agree on a CPU; large ones do not."""
    torch.manual_seed(3)
    wide = like(torch.zeros(5000))
    torch.manual_seed(3)
    low = like(torch.zeros(5000, dtype=torch.bfloat16))
    assert not torch.allclose(wide, low.float(), atol=0.05)


def test_draws_of_a_recomputed_forward_are_on_the_tape_too() -> None:
    def block(x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5) * 2

    def run() -> Tensor:
        x = torch.ones(32, requires_grad=True)
        checkpoint(block, x, use_reentrant=False).sum().backward()
        assert x.grad is not None
        return x.grad

    tape = Tape()
    torch.manual_seed(1)
    with Recorder(tape):
        reference = run()
    torch.manual_seed(2)
    with Replayer(tape) as replayer:
        assert torch.equal(run(), reference)
    assert replayer.strayed == 0


def test_other_code_strays_and_is_counted() -> None:
    tape = Tape()
    with Recorder(tape):
        torch.rand_like(torch.zeros(4))
    with Replayer(tape) as replayer:
        torch.randn_like(torch.zeros(4))
        torch.rand_like(torch.zeros(5))
    assert replayer.strayed == 2


def test_attention_without_dropout_is_not_random() -> None:
    q = torch.randn(1, 2, 8, 16)
    tape = Tape()
    with Recorder(tape):
        functional.scaled_dot_product_attention(q, q, q)
    assert tape.draws == []


# --- emulated products --------------------------------------------------------------------------------------

PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "mm": (torch.mm, ((8, 300), (300, 8))),
    "bmm": (torch.bmm, ((2, 8, 100), (2, 100, 8))),
    "linear": (functional.linear, ((8, 300), (16, 300), (16,))),
    "conv2d": (functional.conv2d, ((2, 8, 6, 6), (4, 8, 3, 3))),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_summed_wide_and_rounded_once(name: str) -> None:
    function, shapes = PRODUCTS[name]
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randn(s, generator=generator).half().requires_grad_() for s in shapes]
    exact = [o.detach().double().requires_grad_() for o in operands]
    with EmulatedProducts():
        out = function(*operands)
        out.backward(torch.ones_like(out))
    truth = function(*exact)
    truth.backward(torch.ones_like(truth))
    assert out.dtype is torch.float16
    for found, right in [(out, truth), *((o.grad, e.grad) for o, e in zip(operands, exact, strict=True))]:
        assert found is not None
        assert right is not None
        unit = 2.0 ** (torch.frexp(right.abs().clamp_min(2.0**-14))[1] - 11).double()  # fp16's last place
        assert ((found.double() - right).abs() <= 0.51 * unit + 1e-4).all()


def test_other_formats_are_left_to_their_kernels() -> None:
    a = torch.randn(16, 16).bfloat16()
    with EmulatedProducts():
        assert torch.equal(a @ a, torch.mm(a, a))
        assert (a.float() @ a.float()).dtype is torch.float32
