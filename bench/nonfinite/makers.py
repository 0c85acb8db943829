"""Small models and losses that produce NaN or infinities, each with the operator, module and phase that cause them.

The right answer is written by hand from the code of the case. Sound cases produce infinities that disappear again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 16


class Op(nn.Module):
    """A module that applies a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Net(nn.Module):
    """Linear, the place, LayerNorm if ``tame``, Linear; maps ``[batch, WIDTH]`` to the same shape."""

    def __init__(self, place: nn.Module, tame: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.place = place
        self.norm = nn.LayerNorm(WIDTH) if tame else nn.Identity()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.place(self.first(x))))


def op(function: Callable[[Tensor], Tensor], tame: bool = True) -> Callable[[], nn.Module]:
    """Return a function that builds a model with ``function`` as its place."""
    return lambda: Net(Op(function), tame)


def square(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean square of the model's output."""
    return model(batch).float().square().mean()


def noise() -> Tensor:
    """Return a batch ``[8, WIDTH]``."""
    drawn = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1), device="cpu")
    return drawn.to(torch.get_default_device())


@dataclass(frozen=True)
class Maker:
    """A case and its right answer.

    Attributes:
        name: Name of the case.
        model: Builds the model.
        operators: The right operators, any of which is accepted; empty for a sound case.
        module: Path of the right module.
        phase: The right phase.
        kind: The right kind of origin.
        cause: The right causes, any of which is accepted; if empty, the cause is not checked.
        plan: The plan to run under.
        loss: Computes the loss from the model and the batch.
        batch: Makes the batch.
        cured: Whether a plan cures the case.
        scale: A loss scale that replaces the plan's.
        call: Index of the module's call.
        in_model: Whether the fault is in the model's code, not in the loss, the data or the weights.
    """

    name: str
    model: Callable[[], nn.Module]
    operators: tuple[str, ...] = ()
    module: str = "place"
    phase: str = "forward"
    kind: str = "operator"
    cause: tuple[str, ...] = ()
    plan: str = "fp32"
    loss: Callable[[nn.Module, Any], Tensor] = square
    batch: Callable[[], Any] = noise
    cured: bool = False
    scale: float | None = None
    call: int = 0
    in_model: bool = True


# --- forward --------------------------------------------------------------------------------------------------


def _padded(x: Tensor) -> Tensor:
    x = x * (torch.arange(x.shape[0]) % 4 != 3)[:, None]
    return x / x.norm(dim=-1, keepdim=True)


def _half_norm(x: Tensor) -> Tensor:
    y = x * 1e-4
    return y * torch.rsqrt((y * y).mean(-1, keepdim=True))


def _empty_mean(x: Tensor) -> Tensor:
    return x + x[x > 1e6].mean()


def _in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y.mul_(1e20)
    return y.mul_(1e20)


def _view(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 2:5].div_(torch.zeros(3))
    return y


def _foreach(x: Tensor) -> Tensor:
    parts = torch._foreach_mul([x.clone(), x.clone()], [1.0, 1e38])
    return torch._foreach_mul(parts, 1e3)[1]


def _numpy(x: Tensor) -> Tensor:
    with np.errstate(divide="ignore"):
        return x + torch.from_numpy(np.log(np.arange(WIDTH, dtype=np.float32))).to(x.device)


@torch.library.custom_op("castwise_makers::inverse", mutates_args=())
def _inverse(x: Tensor) -> Tensor:
    return x.relu().reciprocal()


_inverse.register_autograd(lambda ctx, grad: grad)


class Recurrent(nn.Module):
    """A recurrent network whose state grows without bound."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.rnn = nn.RNN(WIDTH, WIDTH, nonlinearity="relu", batch_first=True)
        with torch.no_grad():
            self.rnn.weight_hh_l0.mul_(1e10)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(self.first(x)[:, None].repeat(1, 8, 1))[0][:, -1]


class Shared(nn.Module):
    """A model that calls one module twice; the second input makes it overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.place = Op(lambda x: x.exp())
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(self.place(y) + self.place(100.0 * y.abs() + 100.0))


class Attention(nn.Module):
    """Hand-written attention; ``gain`` scales the queries and keys, ``hidden`` returns the positions to mask."""

    def __init__(self, gain: float, hidden: Callable[[int], Tensor], fill: str = "masked_fill") -> None:
        super().__init__()
        self.gain, self.hidden, self.fill = gain, hidden, fill
        self.register_buffer("mask", torch.where(hidden(WIDTH), -math.inf, 0.0), persistent=False)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.gain * x.unsqueeze(-1)
        scores = q @ q.transpose(1, 2)
        if self.fill == "buffer":
            scores = scores + self.mask
        elif self.fill == "product":
            scores = scores.masked_fill(self.hidden(WIDTH), -math.inf) * ~self.hidden(WIDTH)
        elif self.fill == "cast":
            scores = scores + torch.where(self.hidden(WIDTH), -1e9, 0.0).to(scores.dtype)
        elif self.fill == "where":
            scores = torch.where(self.hidden(WIDTH), torch.tensor(-math.inf), scores)
        else:
            scores = scores.masked_fill(self.hidden(WIDTH), -math.inf)
        return self.proj((scores.softmax(-1) @ x.unsqueeze(-1)).squeeze(-1))


def causal(size: int) -> Tensor:
    """Return a mask of the future positions."""
    return torch.ones(size, size, dtype=torch.bool).triu(1)


def strictly(size: int) -> Tensor:
    """Return a mask of the future and the current position, which hides everything from the first row."""
    return torch.ones(size, size, dtype=torch.bool).triu(0)


# --- backward -------------------------------------------------------------------------------------------------


class _Divides(torch.autograd.Function):
    """The identity, with a gradient that is divided by the positive part of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] / x.relu()


def _where_log(x: Tensor) -> Tensor:
    y = x * (x > 0)
    return torch.where(y > 0, y.log(), 0.0)


def _zero_norm(x: Tensor) -> Tensor:
    y = x * (torch.arange(x.shape[0]) % 4 != 3)[:, None]
    return x + (y * y).sum(-1, keepdim=True).sqrt()


def _sigmoid(x: Tensor) -> Tensor:
    return 1.0 / (1.0 + (-200.0 * x).exp())


class Checkpointed(nn.Module):
    """A place that is recomputed in backward."""

    def __init__(self, place: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.place, self.reentrant = place, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.place, x, use_reentrant=self.reentrant)


class Cell(nn.Module):
    """A function between two linear layers, for checkpoints."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.core = Op(function)
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.core(self.a(x)))


def checkpointed(function: Callable[[Tensor], Tensor], reentrant: bool) -> Callable[[], nn.Module]:
    """Return a function that builds a model whose place is recomputed in backward."""
    return lambda: Net(Checkpointed(Cell(function), reentrant))


def compiled(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """Return a function that builds a model whose place is compiled."""

    def make() -> nn.Module:
        cell = Cell(function)
        cell.compile(backend="eager")
        return Net(cell)

    return make


# --- losses, data, weights ------------------------------------------------------------------------------------


def _log_of_softmax(model: nn.Module, batch: Tensor) -> Tensor:
    return -(1000.0 * model(batch)).softmax(-1).log()[:, 0].mean()


def _masked_target(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch).masked_fill(torch.arange(WIDTH) < 4, -math.inf)
    return functional.cross_entropy(logits, torch.full((batch.shape[0],), 2))


def _penalty(model: nn.Module, batch: Tensor) -> Tensor:
    x = batch.clone().requires_grad_()
    (g,) = torch.autograd.grad(model(x).relu().sum() * 0.0, x, create_graph=True)
    return model(x).square().mean() + ((g * g).sum(-1).sqrt() - 1.0).square().mean()


def _spoilt(where: str, value: float) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Net(nn.BatchNorm1d(WIDTH)).eval()
        tensor = dict([*model.named_parameters(), *model.named_buffers()])[where]
        tensor.data.view(-1)[3] = value
        return model

    return make


def _spoilt_batch(value: float) -> Callable[[], Tensor]:
    def make() -> Tensor:
        batch = noise()
        batch[2, 3] = value
        return batch

    return make


def _dict_batch() -> dict[str, Tensor]:
    return {"x": noise(), "weight": torch.tensor([1.0, math.nan] * 4)}


def _weighted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]).square().mean(-1) * batch["weight"]).mean()


MAKERS: tuple[Maker, ...] = (
    Maker("log-zero", op(lambda x: x.relu().log()), ("log",), cause=("log of zero",)),
    Maker("log-negative", op(lambda x: x.log()), ("log",), cause=("log of a negative value",)),
    Maker("zero-by-zero", op(_padded), ("div",), cause=("0/0",)),
    Maker("sqrt-negative", op(lambda x: x.sqrt()), ("sqrt",), cause=("outside the operator's domain",)),
    Maker("exp-fp32", op(lambda x: (x.abs() + 100.0).exp()), ("exp",), cause=("exp of a large value",), cured=True),
    Maker("exp-fp16", op(lambda x: 1e-6 * (x.abs() + 12.0).exp()), ("exp",), cause=("exp of a large value",), plan="fp16-mixed",
          cured=True),
    Maker("square-fp16", op(lambda x: (1e3 * x).square().mean(-1, keepdim=True) * 1e-6 + x), ("pow",), cause=("overflow",),
          plan="fp16-mixed", cured=True),
    Maker("product-fp16", lambda: Net(Cell(lambda x: 1e6 * x)), ("mul",), module="place.core", cause=("overflow",),
          plan="fp16-mixed", cured=True),
    Maker("sum-fp16", op(lambda x: x + (100.0 * x.abs() + 100.0).repeat(1, 64).sum(-1, keepdim=True) * 1e-4), ("sum",),
          cause=("overflow",), plan="fp16-mixed", cured=True),
    Maker("underflow-fp16", op(_half_norm), ("rsqrt",), cause=("underflow",), plan="fp16-mixed", cured=True),
    Maker("empty-mean", op(_empty_mean), ("mean",), cause=("nothing to reduce",)),
    Maker("in-place", op(_in_place), ("mul_",), cause=("overflow",), cured=True),
    Maker("view", op(_view), ("div_",), cause=("division by zero",)),
    Maker("foreach", op(_foreach), ("_foreach_mul",), cause=("overflow",), cured=True),
    Maker("numpy", op(_numpy), ("lift_fresh",), kind="constant"),
    Maker("custom-operator", op(lambda x: _inverse(x)), ("castwise_makers::inverse",)),
    Maker("recurrence", Recurrent, ("addmm", "mm", "add"), module="rnn", cause=("overflow",)),
    Maker("shared", Shared, ("exp",), cause=("exp of a large value",), call=1),
    Maker("row-of-nothing", lambda: Net(Attention(1.0, strictly)), ("_softmax",), cause=("a row of nothing but -inf",)),
    Maker("row-of-nothing-buffer", lambda: Net(Attention(1.0, strictly, "buffer")), ("_softmax",),
          cause=("a row of nothing but -inf",)),
    Maker("mask-product", lambda: Net(Attention(1.0, causal, "product")), ("mul",), cause=("0 * inf",)),
    Maker("mask-and-overflow", lambda: Net(Attention(1e3, causal)), ("bmm",), cause=("overflow",), plan="fp16-mixed", cured=True),
    Maker("cast-and-overflow", lambda: Net(Attention(1e3, causal, "cast")), ("bmm",), cause=("overflow",), plan="fp16-true",
          cured=True),
    Maker("cast-row", lambda: Net(Attention(1.0, strictly, "cast")), ("_to_copy", "_softmax"), plan="fp16-true",
          cause=("overflow",), cured=True),
    Maker("compiled", compiled(lambda x: x.relu().log()), ("log",), module="place.core", cause=("log of zero",)),
    Maker("compiled-fp16", compiled(lambda x: 1e-6 * (x.abs() + 12.0).exp()), ("exp",), module="place.core", plan="fp16-mixed",
          cause=("exp of a large value",), cured=True),
    *(
        Maker(f"checkpoint-{name}-forward", checkpointed(lambda x: x.relu().log(), reentrant), ("log",), module="place.place.core",
              cause=("log of zero",))
        for name, reentrant in (("reentrant", True), ("not-reentrant", False))
    ),
    *(
        Maker(f"checkpoint-{name}-backward", checkpointed(_where_log, reentrant), ("div",), module="place.place.core",
              phase="backward", cause=("0/0",))
        for name, reentrant in (("reentrant", True), ("not-reentrant", False))
    ),
    *(
        Maker(f"checkpoint-{name}-fp16", checkpointed(lambda x: 1e-6 * (x.abs() + 12.0).exp(), reentrant), ("exp",),
              module="place.place.core", plan="fp16-mixed", cause=("exp of a large value",), cured=True)
        for name, reentrant in (("reentrant", True), ("not-reentrant", False))
    ),
    Maker("where-log", op(_where_log), ("div",), phase="backward", cause=("0/0",)),
    Maker("sqrt-at-zero", op(_zero_norm), ("div",), phase="backward", cause=("division by zero",)),
    Maker("power-at-zero", op(lambda x: x + (x * (x > 0)) ** 0.5), ("pow", "div", "sqrt"), phase="backward"),
    Maker("acos-at-one", op(lambda x: x + (0.0 * x + 1.0).acos()), ("rsqrt",), phase="backward",
          cause=("division by zero",)),
    Maker("hand-made-sigmoid", op(_sigmoid), ("exp",), cause=("exp of a large value",), cured=True),
    Maker("function-backward", op(lambda x: _Divides.apply(x)), ("div",), phase="backward",
          cause=("0/0", "division by zero")),
    Maker("backward-fp16", op(lambda x: ((1e-3 * x).square() + 1e-8).sqrt() / 1e-3), ("div", "mul", "_to_copy"), phase="backward",
          plan="fp16-mixed", scale=1.0, cured=True),
    Maker("loss-scale", op(functional.gelu), ("_to_copy",), module="", phase="backward",
          plan="fp16-mixed", loss=lambda m, b: 1e4 * square(m, b), cause=("loss scale",), cured=True),
    Maker("log-of-softmax", op(functional.gelu), ("log",), module="", cause=("log of zero",), loss=_log_of_softmax, in_model=False),
    Maker("masked-target", op(functional.gelu), ("masked_fill",), module="", kind="constant", cause=("constant",),
          loss=_masked_target, in_model=False),
    Maker("penalty", op(functional.gelu), ("div",), module="", phase="backward", loss=_penalty, in_model=False),
    Maker("data-nan", op(functional.gelu), kind="data", module="", batch=_spoilt_batch(math.nan), cause=("data",), in_model=False),
    Maker("data-inf", op(functional.gelu), kind="data", module="", batch=_spoilt_batch(math.inf), cause=("data",), in_model=False),
    Maker("data-dict", op(functional.gelu), kind="data", module="", batch=_dict_batch, loss=_weighted, cause=("data",),
          in_model=False),
    Maker("buffer", _spoilt("place.running_var", math.nan), kind="buffer", module="", cause=("buffer",), in_model=False),
    Maker("parameter", _spoilt("last.weight", math.inf), kind="parameter", module="", cause=("parameter",), in_model=False),
)  # fmt: skip


def _clamped(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = (1.0 / x.relu()).clamp(max=10.0)
    return x * scale


SOUND: tuple[Maker, ...] = (
    Maker("causal", lambda: Net(Attention(1.0, causal))),
    Maker("causal-buffer", lambda: Net(Attention(1.0, causal, "buffer"))),
    Maker("causal-where", lambda: Net(Attention(1.0, causal, "where"))),
    Maker("causal-cast", lambda: Net(Attention(1.0, causal, "cast")), plan="fp16-true"),
    Maker("causal-fp16", lambda: Net(Attention(1.0, causal)), plan="fp16-mixed", scale=64.0),
    Maker("clamped", op(_clamped)),
    Maker("maximum", op(lambda x: x + torch.cummax(torch.full_like(x, -math.inf).index_put((torch.tensor(0),), x[0]), 0)[0][0])),
    Maker("allocated", op(lambda x: torch.empty_like(x).fill_(math.nan).copy_(x))),
    Maker("dropout", op(lambda x: functional.dropout(x, 0.5))),
)  # fmt: skip
