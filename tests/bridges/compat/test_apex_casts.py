"""The cast lists of O1, on half and fp32 inputs, in place and out of place."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from castwise.bridges.compat.apex import amp
from castwise.core.casting import frames
from castwise.errors import StateError

HALF, FP32 = torch.float16, torch.float32
DTYPES = [torch.float16, torch.bfloat16]


def start(half: torch.dtype = HALF, *models: nn.Module) -> Any:
    amp.initialize(
        list(models) or nn.Linear(2, 2), opt_level="O1", verbosity=0, patch_torch_functions_type=half
    )
    return amp._amp_state.handle


def square(dtype: torch.dtype) -> Tensor:
    return torch.linspace(0.1, 0.9, 16).reshape(4, 4).to(dtype)


def image(dtype: torch.dtype, dims: int) -> Tensor:
    return torch.linspace(-1, 1, 2 * 4**dims).reshape(1, 2, *(4,) * dims).to(dtype)


LOWER: dict[str, Callable[[torch.dtype], Tensor]] = {
    "linear": lambda d: functional.linear(square(d), square(FP32), torch.ones(4)),
    "matmul": lambda d: torch.matmul(square(d), square(FP32)),
    "@": lambda d: square(d) @ square(FP32),
    "mm": lambda d: square(d).mm(square(FP32)),
    "mv": lambda d: torch.mv(square(d), torch.ones(4)),
    "addmm": lambda d: torch.addmm(square(FP32), square(d), square(FP32)),
    "addmv": lambda d: torch.addmv(torch.ones(4), square(d), torch.ones(4)),
    "addr": lambda d: torch.addr(square(FP32), torch.ones(4, dtype=d), torch.ones(4)),
    "bmm": lambda d: torch.bmm(square(d)[None], square(FP32)[None]),
    "baddbmm": lambda d: torch.baddbmm(square(FP32)[None], square(d)[None], square(FP32)[None]),
    "addbmm": lambda d: torch.addbmm(square(FP32), square(d)[None], square(FP32)[None]),
    "prelu": lambda d: functional.prelu(square(d), torch.ones(1)),
    "conv1d": lambda d: functional.conv1d(image(d, 1), torch.ones(3, 2, 2)),
    "conv2d": lambda d: functional.conv2d(image(d, 2), torch.ones(3, 2, 2, 2)),
    "conv3d": lambda d: functional.conv3d(image(d, 3), torch.ones(3, 2, 2, 2, 2)),
    "conv_transpose1d": lambda d: functional.conv_transpose1d(image(d, 1), torch.ones(2, 3, 2)),
    "conv_transpose2d": lambda d: functional.conv_transpose2d(image(d, 2), torch.ones(2, 3, 2, 2)),
    "conv_transpose3d": lambda d: functional.conv_transpose3d(image(d, 3), torch.ones(2, 3, 2, 2, 2)),
}
POINTWISE = [
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
]
WIDENED: dict[str, Callable[[torch.dtype], Tensor]] = {
    **{name: (lambda d, f=getattr(torch, name): f(square(d))) for name in POINTWISE},
    "Tensor.exp": lambda d: square(d).exp(),
    "pow": lambda d: torch.pow(square(d), 2.5),
    "**": lambda d: square(d) ** 2,
    "2 **": lambda d: 2 ** square(d),
    "cumprod": lambda d: square(d).cumprod(0),
    "cumsum": lambda d: square(d).cumsum(0),
    "dist": lambda d: torch.dist(square(d), square(d) * 2),
    "norm": lambda d: square(d).norm(),
    "prod": lambda d: square(d).prod(),
    "std": lambda d: square(d).std(),
    "sum": lambda d: square(d).sum(0),
    "var": lambda d: square(d).var(0),
    "renorm": lambda d: torch.renorm(square(d), 2, 0, 0.5),
    "softmax": lambda d: functional.softmax(square(d), -1),
    "nn.Softmax": lambda d: nn.Softmax(-1)(square(d)),
    "softmin": lambda d: functional.softmin(square(d), -1),
    "log_softmax": lambda d: square(d).log_softmax(-1),
    "softplus": lambda d: functional.softplus(square(d)),
    "gelu": lambda d: functional.gelu(square(d)),
    "layer_norm": lambda d: functional.layer_norm(square(d), (4,)),
    "group_norm": lambda d: nn.GroupNorm(1, 2)(image(d, 2)),
    "local_response_norm": lambda d: functional.local_response_norm(image(d, 2), 2),
    "normalize": lambda d: functional.normalize(square(d)),
    "cosine_similarity": lambda d: functional.cosine_similarity(square(d), square(d)),
    "interpolate": lambda d: functional.interpolate(image(d, 2), scale_factor=2, mode="bilinear"),
    "interpolate nearest": lambda d: functional.interpolate(image(d, 2), scale_factor=2),
    "grid_sample": lambda d: functional.grid_sample(
        image(d, 2), torch.zeros(1, 2, 2, 2), align_corners=False
    ),
    "mse_loss": lambda d: functional.mse_loss(square(d), square(d)),
    "l1_loss": lambda d: functional.l1_loss(square(d), square(d)),
    "smooth_l1_loss": lambda d: functional.smooth_l1_loss(square(d), square(d)),
    "kl_div": lambda d: functional.kl_div(square(d), square(d), reduction="batchmean"),
    "cross_entropy": lambda d: functional.cross_entropy(square(d), torch.arange(4)),
    "nll_loss": lambda d: functional.nll_loss(square(d), torch.arange(4)),
    "bce_with_logits": lambda d: functional.binary_cross_entropy_with_logits(square(d), square(d)),
    "soft_margin_loss": lambda d: functional.soft_margin_loss(square(d), square(d)),
    "multilabel_soft_margin_loss": lambda d: functional.multilabel_soft_margin_loss(square(d), square(d)),
    "multi_margin_loss": lambda d: functional.multi_margin_loss(square(d), torch.arange(4)),
    "margin_ranking_loss": lambda d: functional.margin_ranking_loss(*square(d)[:3]),
    "hinge_embedding_loss": lambda d: functional.hinge_embedding_loss(square(d), square(d)),
    "cosine_embedding_loss": lambda d: functional.cosine_embedding_loss(square(d), square(d), torch.ones(4)),
    "triplet_margin_loss": lambda d: functional.triplet_margin_loss(square(d), square(d), square(d)),
    "poisson_nll_loss": lambda d: functional.poisson_nll_loss(square(d), square(d)),
    "Tensor.cpu": lambda d: square(d).cpu(),
}
PROMOTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "+": lambda a, b: a + b,
    "r-": lambda a, b: b - a,
    "/": lambda a, b: a / b,
    "mul": torch.mul,
    "addcmul": lambda a, b: torch.addcmul(a, b, b),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, b),
    "atan2": torch.atan2,
    "cross": lambda a, b: torch.cross(a[:, :3], b[:, :3], dim=1),
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "bilinear": lambda a, b: functional.bilinear(a, b, torch.ones(1, 4, 4)),
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "a 0-dim factor": lambda a, b: a * b.sum(),
}
UNLISTED: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "mean": lambda x: x.mean(),
    "max": lambda x: x.amax(0),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "batch_norm": lambda x: functional.batch_norm(x, torch.zeros(4), torch.ones(4)),
    "dropout": functional.dropout,
    "max_pool2d": lambda x: functional.max_pool2d(x[None, None], 2),
    "sqrt": torch.sqrt,
}


@pytest.mark.parametrize("half", DTYPES)
def test_products_run_in_half(half: torch.dtype) -> None:
    start(half)
    wrong = {name: f(d).dtype for name, f in LOWER.items() for d in (half, FP32) if f(d).dtype is not half}
    assert not wrong


@pytest.mark.parametrize("half", DTYPES)
def test_fp32_list_gives_what_fp32_gives_on_half_inputs(half: torch.dtype) -> None:
    want = {name: f(FP32) for name, f in WIDENED.items()}
    rounded = square(half).float()
    start(half)
    for name, f in WIDENED.items():
        got = f(half)
        assert got.dtype is FP32, name
        assert f(FP32).dtype is FP32, name
        assert torch.equal(f(FP32), want[name]), name
    assert torch.equal(torch.exp(square(half)), torch.exp(rounded))
    assert torch.equal(functional.softmax(square(half), -1), functional.softmax(rounded, -1))


@pytest.mark.parametrize("half", DTYPES)
def test_mixed_inputs_meet_in_the_widest(half: torch.dtype) -> None:
    start(half)
    for name, f in PROMOTED.items():
        assert f(square(half), square(FP32)).dtype is FP32, name
        if name not in ("bilinear", "a 0-dim factor"):  # they contain fp32 weights or an fp32 sum
            assert f(square(half), square(half)).dtype is half, name
    assert bool((square(half) == square(half).float()).all())
    assert torch.equal(square(half), square(half).float())


@pytest.mark.parametrize("half", DTYPES)
def test_unlisted_operators_run_as_they_are(half: torch.dtype) -> None:
    start(half)
    for name, f in UNLISTED.items():
        assert f(square(half)).dtype is half, name
        assert f(square(FP32)).dtype is FP32, name


@pytest.mark.parametrize("half", DTYPES)
def test_in_place_operators_of_the_fp32_list_refuse_half(half: torch.dtype) -> None:
    start(half)
    for name in [*POINTWISE, "pow", "cumprod", "cumsum", "renorm"]:
        x = square(half)
        args = {"pow": (2,), "cumprod": (0,), "cumsum": (0,), "renorm": (2, 0, 1)}.get(name, ())
        with pytest.raises(NotImplementedError, match=f"Cannot call in-place method {name}_ on fp16 Tensors"):
            getattr(x, f"{name}_")(*args)
        assert torch.equal(x, square(half))
        getattr(square(FP32), f"{name}_")(*args)


@pytest.mark.parametrize("half", DTYPES)
def test_other_in_place_operators_keep_the_type_of_what_they_write_to(half: torch.dtype) -> None:
    start(half)
    ones = torch.ones(4)
    for x, other in ((square(half), square(FP32)), (square(FP32), square(half))):
        batch, other_batch = x[None].clone(), other[None]
        for result in (
            x.clone().addmm_(other, other),
            x.clone().addr_(ones, ones.to(half)),
            x[0].clone().addmv_(other, ones),
            x.clone().addbmm_(other_batch, other_batch),
            batch.baddbmm_(other_batch, other_batch),
            x.clone().add_(other),
            x.clone().mul_(other),
            x.clone().addcdiv_(other, other),
        ):
            assert result.dtype is x.dtype
    y = square(half)
    y **= 2
    assert y.dtype is FP32


def test_bce_is_banned_in_apex_s_words_and_runs_in_fp32_where_it_is_allowed() -> None:
    start()
    wanted = r"amp does not work out-of-the-box with `F.binary_cross_entropy` or `torch.nn.BCELoss.`"
    with pytest.raises(NotImplementedError, match=wanted):
        nn.BCELoss()(square(HALF), square(HALF))
    assert nn.BCELoss()(square(FP32), square(FP32)).dtype is FP32
    handle = amp.init(allow_banned=True)
    assert nn.BCELoss()(square(HALF), square(HALF)).dtype is FP32
    handle._deactivate()


# --- recurrent layers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", DTYPES)
def test_recurrent_cells_and_layers_run_in_half(half: torch.dtype) -> None:
    start(half)
    x = torch.randn(3, 2, 4)
    for cell in (
        nn.RNNCell(4, 4),
        nn.RNNCell(4, 4, nonlinearity="relu"),
        nn.GRUCell(4, 4),
        nn.LSTMCell(4, 4),
    ):
        hidden: Any = None
        for step in (x[0], x[1].to(half)):
            hidden = cell(step, hidden)
        assert (hidden if isinstance(hidden, Tensor) else hidden[0]).dtype is half
    packed = pack_padded_sequence(x, [3, 2])
    for layer in (nn.RNN(4, 4, 2), nn.GRU(4, 4, bidirectional=True), nn.LSTM(4, 4, 2)):
        out, _ = layer(x)
        assert out.dtype is half
        assert layer(packed)[0].data.dtype is half
        if out.shape[-1] == 4:
            assert layer(out)[0].dtype is half
        out.float().sum().backward()
        assert all(p.grad is not None and p.grad.dtype is FP32 for p in layer.parameters())


# --- backward -----------------------------------------------------------------------------------------------


def test_casts_rest_during_backward_and_come_back() -> None:
    seen: list[bool] = []
    model = nn.Linear(4, 4)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), verbosity=0)
    out = model(square(FP32))
    out.register_hook(lambda grad: seen.append(torch.is_autocast_enabled("cpu")))
    with amp.scale_loss(out.sum(), optimizer) as scaled:
        scaled.backward()
    assert seen == [False]
    assert amp._amp_state.handle.is_active()
    with pytest.raises(ZeroDivisionError), amp.scale_loss(model(square(FP32)).sum(), optimizer):
        raise ZeroDivisionError
    assert amp._amp_state.handle.is_active()


BACKWARDS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor | None]] = {
    "backward": lambda f, x: (f(x).backward(), x.grad)[1],  # type: ignore[func-returns-value]
    "torch.autograd.backward": lambda f, x: (torch.autograd.backward(f(x)), x.grad)[1],  # type: ignore[func-returns-value]
    "torch.autograd.grad": lambda f, x: torch.autograd.grad(f(x), x, create_graph=True)[0],
    "torch.func.grad": lambda f, x: torch.func.grad(f)(x.detach()),
    "torch.func.vjp": lambda f, x: torch.func.vjp(f, x.detach())[1](torch.ones(()))[0],
}


@pytest.mark.parametrize("backward", BACKWARDS.values(), ids=BACKWARDS.keys())
def test_casts_rest_in_every_backward_whoever_calls_it(backward: Callable[..., Tensor | None]) -> None:
    """Apex did not cast products inside derivative formulas, so an fp32 product has fp32 gradients."""

    def in_fp32(x: Tensor) -> Tensor:
        return torch.matmul(x, square(FP32)).pow(2).sum()

    want = backward(in_fp32, square(FP32).requires_grad_())
    amp.register_float_function(torch, "matmul")
    handle = start()
    got = backward(in_fp32, square(FP32).requires_grad_())
    assert handle.is_active()
    assert want is not None
    assert got is not None
    assert torch.equal(got, want)
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.zeros(()).backward()
    assert handle.is_active()
    handle._deactivate()
    with torch.autocast("cpu", HALF):  # torch's own autocast also casts in backward
        assert not torch.equal(torch.autograd.grad(in_fp32(x := square(FP32).requires_grad_()), x)[0], want)


class Product(torch.autograd.Function):
    """A custom function without torch.amp's decorators, as in old scripts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w.T, x.T @ grad


def test_functions_with_a_backward_in_python_are_cast_there_too() -> None:
    w = nn.Parameter(square(FP32))
    _, optimizer = amp.initialize(nn.Linear(2, 2), torch.optim.SGD([w], 0.1), loss_scale=1024.0, verbosity=0)
    with amp.scale_loss(Product.apply(square(FP32), w).sum(), optimizer) as scaled:
        scaled.backward()
    assert w.grad is not None
    with amp.disable_casts():
        want = square(FP32).T @ torch.ones(4, 4)
    assert torch.allclose(w.grad, want, rtol=2e-3)
    assert not torch.equal(w.grad, want)  # the product was in half


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_forwards_are_recomputed_by_apex_s_lists(reentrant: bool) -> None:
    """On a CPU, torch's own autocast would run exp in half."""
    seen: list[torch.dtype] = []

    def body(x: Tensor, w: Tensor) -> Tensor:
        y = torch.exp(x @ w)
        seen.append(y.dtype)
        return y * y

    w = nn.Parameter(square(FP32))
    _, optimizer = amp.initialize(nn.Linear(2, 2), torch.optim.SGD([w], 0.1), loss_scale=64.0, verbosity=0)
    x = square(FP32).requires_grad_()
    out = checkpoint(body, x, w, use_reentrant=reentrant)
    with amp.scale_loss(out.sum(), optimizer) as scaled:
        scaled.backward()
    assert seen == [FP32, FP32]


# --- weights, threads, handles ------------------------------------------------------------------------------


def test_no_copy_of_a_weight_outlives_its_change() -> None:
    model = nn.Linear(4, 4, bias=False)
    other = nn.Linear(4, 4, bias=False)  # not given to initialize, like an average of weights
    amp.initialize(model, verbosity=0)
    x = torch.ones(1, 4)
    for net in (model, other):
        for change in (
            lambda w: w.data.fill_(1.0),
            lambda w: w.detach().fill_(2.0),
            lambda w: w.data.fill_(3.0),
        ):
            with torch.no_grad():
                change(net.weight)
                assert torch.equal(net(x), net.weight.half().sum(1)[None])
            change(net.weight)
            assert torch.equal(net(x), net.weight.half().sum(1)[None])


def test_evaluation_before_training_leaves_gradients_whole() -> None:
    """A cast cached under no_grad has no graph and must not be reused."""
    model = nn.Linear(4, 4)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = amp.initialize(model, optimizer, loss_scale=128.0, verbosity=0)
    with torch.no_grad():
        model(torch.ones(1, 4))
    with amp.scale_loss(model(torch.ones(1, 4)).sum(), optimizer) as scaled:
        scaled.backward()
    assert torch.equal(model.weight.grad, torch.ones(4, 4))


def test_a_weight_is_cast_once_in_a_forward() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.inner(x))

    def casts(model: nn.Module) -> int:
        nodes, todo = set(), [model(torch.ones(1, 4)).grad_fn]
        while todo:
            node = todo.pop()
            if node is not None and node not in nodes:
                nodes.add(node)
                todo += [following for following, _ in node.next_functions]
        return sum(node.name() == "ToCopyBackward0" for node in nodes)

    model = Twice()
    amp.initialize(model, verbosity=0)
    assert casts(model) == 2
    amp.initialize(nn.Linear(2, 2), verbosity=0)
    assert casts(model) == 4  # the model is no longer the initialized one


def test_memory_does_not_grow_with_repeated_initialize() -> None:
    model = nn.Linear(4, 4)
    for _ in range(3):
        amp.initialize(model, verbosity=0)
        assert frames.depth() == 1
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1


def test_threads_that_inherit_autocast_follow_the_lists() -> None:
    """Threads of DataParallel and of backward on a GPU inherit autocast's state only."""
    start()
    seen: list[torch.dtype] = []

    def replica() -> None:
        with torch.autocast("cpu", dtype=HALF):
            seen.append(torch.exp(square(HALF)).dtype)

    thread = threading.Thread(target=replica)
    thread.start()
    thread.join()
    assert seen == [FP32]


def test_workers_of_a_data_loader_are_not_cast() -> None:
    class Products(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Tensor:
            return square(FP32) @ square(FP32)

    start()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about forking with threads
        loader = torch.utils.data.DataLoader(Products(), num_workers=1, multiprocessing_context="fork")
        assert {batch.dtype for batch in loader} == {FP32}


def test_a_handle_is_deactivated_where_it_began() -> None:
    import castwise

    handle = start()
    with (
        castwise.autocast("bf16", device_type="cpu"),
        pytest.raises(StateError, match="leave those blocks first"),
    ):
        handle._deactivate()
    assert handle.is_active()


def test_the_first_api_scales_and_skips() -> None:
    handle = amp.init()
    model = nn.Linear(2, 1, bias=False)
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), 0.5), num_loss=2)
    before = model.weight.detach().clone()
    with (
        pytest.raises(RuntimeError, match=r"use `optimizer\.scale_loss"),
        handle.scale_loss(torch.ones(()), optimizer),
    ):
        pass
    x = torch.ones(1, 2)  # losses are divided by 4, since 2**16 would overflow half
    for factors, moved in (((1.0, 1.0), 0.5), ((1.0, float("inf")), 0.0)):
        optimizer.zero_grad()
        for factor in factors:
            with optimizer.scale_loss(model(x).sum() / 4 * factor) as scaled:
                scaled.backward()
        optimizer.step()
        assert torch.allclose(before - model.weight.detach(), torch.full((1, 2), moved * 0.5))
        before = model.weight.detach().clone()
    with pytest.raises(NotImplementedError, match="closure"):
        optimizer.step(lambda: None)
    handle._deactivate()
    handle = amp.init(enabled=False)
    with handle.scale_loss(before, None) as scaled:
        assert scaled is before
    assert not handle.is_active()
    handle = amp.init()
    plain = torch.optim.SGD(model.parameters(), 0.5)
    model.zero_grad()
    with handle.scale_loss(model(x).sum() / 4, plain) as scaled:
        scaled.backward()
    plain.step()
    assert torch.allclose(before - model.weight.detach(), torch.full((1, 2), 0.125))


def test_the_first_api_keeps_earlier_gradients_apart() -> None:
    handle = amp.init()
    model = nn.Linear(2, 1, bias=False)
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), 0.5))
    model.weight.grad = torch.ones(1, 2)
    with optimizer.scale_loss(model(torch.ones(1, 2)).sum() / 4) as scaled:
        scaled.backward()
    assert torch.equal(model.weight.grad, torch.full((1, 2), 1.25))
    optimizer.step()
    with pytest.raises(KeyError), optimizer.scale_loss(model(torch.ones(1, 2)).sum()):
        raise KeyError
    assert torch.equal(model.weight.grad, torch.full((1, 2), 1.25))
