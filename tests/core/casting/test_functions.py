"""Casting decorators and custom autograd functions."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import castwise
from castwise.errors import StateError
from tests.here import DEVICE

X = torch.linspace(-1, 1, 16).reshape(4, 4)
BF16 = {"plan": "bf16", "device_type": DEVICE}


def test_lower_function_casts_and_turns_autocast_off_inside() -> None:
    seen = {}

    @castwise.lower_function
    def user(a: torch.Tensor, *, b: dict[str, torch.Tensor]) -> torch.Tensor:
        seen["in"] = (a.dtype, b["x"].dtype, torch.is_autocast_enabled(DEVICE))
        return a + b["x"]

    with castwise.autocast(**BF16):
        assert user(X, b={"x": X}).dtype is torch.bfloat16
        assert torch.is_autocast_enabled(DEVICE)
    assert seen["in"] == (torch.bfloat16, torch.bfloat16, False)
    assert user(X, b={"x": X}).dtype is torch.float32


@pytest.mark.parametrize(
    "decorate", [castwise.lower_function, castwise.fp32_function, castwise.widest_function]
)
def test_fp64_and_integers_are_left_alone(decorate: Any) -> None:
    @decorate
    def user(*given: torch.Tensor) -> list[torch.dtype]:
        return [one.dtype for one in given]

    with castwise.autocast(**BF16):
        assert user(X.half(), X.double(), torch.arange(3), torch.ones(2) > 0)[1:] == [
            torch.float64,
            torch.int64,
            torch.bool,
        ]


def test_fp32_function_is_an_island() -> None:
    @castwise.fp32_function
    def user(a: torch.Tensor) -> torch.Tensor:
        return a @ a

    with castwise.autocast(**BF16):
        assert user(X.bfloat16()).dtype is torch.float32


@pytest.mark.parametrize(
    ("a", "b", "want"),
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float16, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    ],
)
def test_widest_function_promotes(a: torch.dtype, b: torch.dtype, want: torch.dtype) -> None:
    @castwise.widest_function
    def user(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.dtype, torch.dtype]:
        return x.dtype, y.dtype

    with castwise.autocast(**BF16):
        assert user(X.to(a), X.to(b)) == (want, want)


def test_decorated_functions_compile() -> None:
    @castwise.fp32_function
    def user(a: torch.Tensor) -> torch.Tensor:
        return a @ a

    compiled = torch.compile(lambda a: user(a), backend="aot_eager")
    with castwise.autocast(**BF16):
        assert compiled(X.bfloat16()).dtype is torch.float32


def make(style: str, cast_inputs: torch.dtype | None, seen: dict[str, Any]) -> type[torch.autograd.Function]:
    """Return a matrix product as a custom autograd function, in one of the two styles."""

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen["forward"] = (a.dtype, torch.is_autocast_enabled(DEVICE))
        return a @ b

    def pull_back(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = ctx.saved_tensors
        seen["backward"] = (
            torch.is_autocast_enabled(DEVICE),
            torch.get_autocast_dtype(DEVICE),
            (X @ X).dtype,
        )
        return (g @ b.t()).to(a.dtype), (a.t() @ g).to(b.dtype)

    if style == "ctx":

        class WithContext(torch.autograd.Function):
            @staticmethod
            @castwise.custom_fwd(device_type=DEVICE, cast_inputs=cast_inputs)
            def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(a, b)
                return product(a, b)

            backward = staticmethod(castwise.custom_bwd(pull_back, device_type=DEVICE))

        return WithContext

    class WithSetup(torch.autograd.Function):
        @staticmethod
        @castwise.custom_fwd(cast_inputs=cast_inputs)
        def forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return product(a, b)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            ctx.save_for_backward(*inputs)

        backward = staticmethod(castwise.custom_bwd(pull_back))

    return WithSetup


@pytest.mark.parametrize("style", ["ctx", "setup_context"])
def test_backward_runs_in_forwards_dtype(style: str) -> None:
    seen: dict[str, Any] = {}
    function = make(style, None, seen)
    a, b = X.clone().requires_grad_(), X.clone().requires_grad_()
    with castwise.autocast("fp16", device_type=DEVICE):
        out = function.apply(a, b)
    out.sum().backward()
    assert out.dtype is torch.float16
    assert seen["backward"] == (True, torch.float16, torch.float16)
    a.grad = b.grad = None
    function.apply(a, b).sum().backward()
    assert seen["backward"][0] is False
    with castwise.autocast("bf16", device_type=DEVICE):
        loss = function.apply(a, b).sum()
        assert seen["forward"][1]
    with castwise.autocast("fp16", device_type=DEVICE):
        loss.backward()  # the region around backward has no effect
    assert seen["backward"][1] is torch.bfloat16


@pytest.mark.parametrize("style", ["ctx", "setup_context"])
def test_cast_inputs_makes_an_island(style: str) -> None:
    seen: dict[str, Any] = {}
    function = make(style, torch.float32, seen)
    a = X.bfloat16().requires_grad_()
    with castwise.autocast(**BF16):
        out = function.apply(a, X)
    assert seen["forward"] == (torch.float32, False)
    assert out.dtype is torch.float32
    if style == "ctx":
        out.sum().backward()
        assert seen["backward"][0] is False
    seen.clear()
    function.apply(a, X.bfloat16())
    assert seen["forward"][0] is torch.bfloat16  # outside autocast cast_inputs has no effect


def test_forward_without_its_decorator_is_reported() -> None:
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
            return a.clone()

        @staticmethod
        @castwise.custom_bwd
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g

    with pytest.raises(StateError, match="custom_fwd"):
        Half.apply(X.clone().requires_grad_()).sum().backward()


class Recording(torch.autograd.Function):
    """Scales by a number; its backward records the dtype of matrix products there."""

    @staticmethod
    @castwise.custom_fwd
    def forward(a: torch.Tensor, seen: list[Any], inner: Any) -> torch.Tensor:
        if inner is not None:
            inner(a)
        return a * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.seen = inputs[1]

    @staticmethod
    @castwise.custom_bwd
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.seen.append((X @ X).dtype)
        return g * 2, None, None


def test_threads_that_share_a_function_do_not_mix_their_precision() -> None:
    together = threading.Barrier(4)

    def work(index: int) -> list[Any]:
        dtype = (torch.bfloat16, torch.float16, torch.float32)[index % 3]
        wrong: list[Any] = []
        together.wait(30)
        for _ in range(300):
            seen: list[Any] = []
            a = X.clone().requires_grad_()
            with castwise.autocast(DEVICE, dtype, device_type=DEVICE):
                out = Recording.apply(a, seen, None)
            out.sum().backward()
            wrong += [got for got in seen if got is not dtype] or ([] if len(seen) == 1 else [len(seen)])
        return wrong

    with ThreadPoolExecutor(4) as pool:
        assert [wrong for wrong in pool.map(work, range(4)) if wrong] == []


def test_a_function_inside_its_own_forward_and_after_an_exception() -> None:
    outer: list[Any] = []
    inner: list[Any] = []

    def nested(a: torch.Tensor) -> None:
        with torch.enable_grad():
            with castwise.autocast("fp16", device_type=DEVICE):
                out = Recording.apply(a.detach().requires_grad_(), inner, None)
            out.sum().backward()

    def failing(a: torch.Tensor) -> None:
        raise ZeroDivisionError

    with castwise.autocast(**BF16), pytest.raises(ZeroDivisionError):
        Recording.apply(X.clone().requires_grad_(), [], failing)
    Recording.apply(X.clone().requires_grad_(), outer, nested).sum().backward()
    with castwise.autocast(**BF16):
        out = Recording.apply(X.clone().requires_grad_(), outer, nested)
    out.sum().backward()
    assert outer == [torch.float32, torch.bfloat16]
    assert inner == [torch.float16] * 2


def test_a_subclass_with_a_forward_of_its_own_notes_that_one() -> None:
    class Island(Recording):
        @staticmethod
        @castwise.custom_fwd(cast_inputs=torch.float32)
        def forward(a: torch.Tensor, seen: list[Any], inner: Any) -> torch.Tensor:
            return a * 3

    seen: list[Any] = []
    with castwise.autocast(**BF16):
        parent = Recording.apply(X.clone().requires_grad_(), seen, None)
        child = Island.apply(X.clone().requires_grad_(), seen, None)
    child.sum().backward()
    parent.sum().backward()
    assert seen == [torch.float32, torch.bfloat16]
