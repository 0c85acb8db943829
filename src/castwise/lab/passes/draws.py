"""Repeat the random draws of a reference run in another run, since two formats can only be compared with the same noise.

With the same seed, dropout masks agree across formats on a CPU. But ``randn_like`` and ``rand_like`` of a bf16 or fp16 tensor
draw other numbers than those of an fp32 tensor, and on a GPU masks can differ too. So the result of every operator that
torch tags as random is recorded in the reference and replaces the result in the other run.

A lower format draws from another distribution, and a repeated draw must have that distribution too. Most of torch's kernels draw
in fp32 and round; for these the recorded draw is rounded. The others:

- ``rand``, ``rand_like`` and ``uniform_(a, b)`` never return b: a number that rounds to b becomes a. So ``rand`` is 0 once in 512
  draws in bf16, and once in 4096 draws in fp16. The repeated draw is the number at the same quantile. On CUDA both ends are
  rounded to the format first. On a CPU torch 2.11 draws one of 256 numbers in bf16 and one of 2048 in fp16, and makes its
  ``randn`` of such numbers too; that ``randn`` is not repeated as the format draws it, but rounded.
- ``rrelu`` on CUDA rounds a uniform number in [0, 1] to the format, and then the slope that it makes of this number.
- ``randint`` and ``random_(a, b)`` return values below b even if the format rounds b - 1 to b. ``random_()`` returns the integers
  that the format represents exactly.
- ``bernoulli(p)`` with a tensor p rounds p to the format and draws. The repeated mask differs where rounding moves p past the uniform
  number that decided the element.
- ``multinomial`` divides the weights by exponential draws in the format and takes the largest, which in fp16 may overflow.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from castwise.core import _torch
from castwise.core.devices import widest_dtype
from castwise.core.plans.formats import LOW_DTYPES
from castwise.lab.passes.observers import Args, Kwargs, Observer, Run

Given = dict[str, Any]
"""The arguments of an operator, by name."""
_SEED = 0x5EED_0F_D4A5


def _is_random(op: _torch.operators.OpOverload, given: Given) -> bool:
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    name = op.overloadpacket.__name__
    if name.startswith("_scaled_dot"):  # tagged as random because of its dropout, which is usually 0
        return bool(given.get("dropout_p", 0.0))
    if name in ("_cudnn_rnn", "miopen_rnn"):  # a GPU's kernels for recurrent layers, likewise
        return bool(given["train"] and given["dropout"])
    return bool(given.get("training", False)) if name.startswith("rrelu") else True


def _drawn(op: _torch.operators.OpOverload, given: Given, out: Any, number: int) -> Tensor | None:
    """Return the random part of an operator's result, such as a dropout mask; None if it cannot be repeated."""
    name = op.overloadpacket.__name__
    if name == "native_dropout":
        return out[1]  # type: ignore[no-any-return]
    if name == "rrelu_with_noise":
        return given["noise"].clone()  # type: ignore[no-any-return]
    if not isinstance(out, Tensor) or name.startswith(("rrelu", "_scaled_dot")):
        return None
    if name.startswith("bernoulli"):
        chances = _chances(op, given)
        # the mask is enough if all elements have one probability; otherwise each needs a number that decided it
        return out.bool() if chances is None else _deciding(out.bool(), chances, _generator(out, number))
    return out.detach().clone()


def _repeated(
    op: _torch.operators.OpOverload, given: Given, out: Any, drawn: Tensor | None, number: int
) -> Any:
    """Return the operator's result with the recorded draw, as the operator's format would draw it; None if that is impossible."""
    name = op.overloadpacket.__name__
    if drawn is None:
        return None
    if name == "native_dropout":
        if drawn.shape != out[1].shape:
            return None
        if given.get("train") is False:  # in evaluation it is the identity
            return out
        p = given["p"]
        return (given["input"] * drawn * (1.0 / (1.0 - p) if p < 1.0 else 0.0), drawn)
    if not isinstance(out, Tensor) or drawn.shape != out.shape:
        return None
    if name == "rrelu_with_noise":
        x, noise = given["self"], given["noise"]
        if noise.is_cuda and noise.dtype in LOW_DTYPES:
            start, end = given.get("lower", 1 / 8), given.get("upper", 1 / 3)
            drawn = torch.where(drawn == 1, drawn, _rounded_twice(drawn, start, end, noise.dtype))
        noise.copy_(torch.where((x <= 0) & (drawn != 1), drawn.to(noise.dtype), noise))
        return out.copy_(x * noise)
    if name.startswith("bernoulli") and (chances := _chances(op, given)) is not None:
        return out.copy_(drawn < chances)
    if name == "multinomial" and given["self"].dtype in LOW_DTYPES:
        if given["num_samples"] > 1 and given.get("replacement"):  # another kernel, which sums in fp32
            return out.copy_(drawn)
        return out.copy_(_raced(given["self"], drawn, _generator(out, number)))
    if out.dtype in LOW_DTYPES and drawn.dtype not in LOW_DTYPES:
        drawn = _in_format(name, given, out.dtype, drawn)
    return out.copy_(drawn)


def _in_format(name: str, given: Given, dtype: torch.dtype, drawn: Tensor) -> Tensor:
    """Return the value that a bf16 or fp16 kernel would draw at the same quantile as the recorded draw of a wider format."""
    if name.startswith(("randint", "random")):
        end = given.get("high", given.get("to"))
        if end is None:  # random_() draws up to the largest integer below which the format holds all integers
            return (
                drawn.to(widest_dtype(drawn.device))
                * ((2 / torch.finfo(dtype).eps + 1) / (2 / torch.finfo(drawn.dtype).eps + 1))
            ).floor()
        return drawn.clamp_max(float(_below(float(end), dtype)))
    if name.startswith("uniform") or name in ("rand", "rand_like"):
        start, end = float(given.get("from", 0.0)), float(given.get("to", 1.0))
        if _torch.release.COARSE_DRAWS and drawn.device.type == "cpu" and end > start:
            return _coarse(drawn, start, end, dtype)
        return _uniform(drawn, start, end, dtype, rounds_ends=drawn.is_cuda)
    return drawn


def _coarse(drawn: Tensor, start: float, end: float, dtype: torch.dtype) -> Tensor:
    """Return the numbers that torch 2.11 makes on a CPU of uniform multiples of half the format's eps."""
    first, last = torch.tensor([start, end], dtype=dtype, device="cpu")
    steps = 2 / torch.finfo(dtype).eps
    part = ((drawn - start) * (steps / (end - start))).floor().clamp(0, steps - 1) / steps
    return (part * float(last - first) + float(first)).to(dtype)


def _uniform(drawn: Tensor, start: float, end: float, dtype: torch.dtype, *, rounds_ends: bool) -> Tensor:
    """Return uniform numbers from ``start`` to ``end`` at the quantiles of those drawn in a wider format."""
    last = torch.tensor(end, dtype=dtype, device="cpu")
    if rounds_ends and end > start:
        first = float(torch.tensor(start, dtype=dtype, device="cpu"))
        drawn = (drawn - start) * ((float(last) - first) / (end - start)) + first
        start, end = first, float(last)
    # draws above this number round to the end, and become the start
    edge = (float(last) + float(torch.nextafter(last, last - torch.inf))) / 2
    low = (drawn - (end - edge)).clamp_min(start).to(dtype)
    return low.masked_fill_(low == float(last), start)


def _rounded_twice(drawn: Tensor, start: float, end: float, dtype: torch.dtype) -> Tensor:
    """Return the numbers that a kernel makes of uniform numbers in [0, 1] which it rounds to a format first."""
    if not end > start:
        return drawn
    return ((drawn - start) / (end - start)).to(dtype).to(drawn.dtype) * (end - start) + start


def _below(end: float, dtype: torch.dtype) -> Tensor:
    """Return the largest number of a format that is smaller than ``end``."""
    nearest = torch.tensor(end, dtype=dtype, device="cpu")
    return nearest if float(nearest) < end else torch.nextafter(nearest, nearest - torch.inf)


def _chances(op: _torch.operators.OpOverload, given: Given) -> Tensor | None:
    """Return the probability of each element of a Bernoulli draw; None if all elements have the same, given as a number."""
    p = given["self"] if str(op) == "aten.bernoulli.default" else given.get("p")
    return p.float() if isinstance(p, Tensor) else None


def _deciding(mask: Tensor, chances: Tensor, generator: torch.Generator) -> Tensor:
    """Draw uniform numbers in [0, 1) that would have given a Bernoulli mask.

    A number is below its probability in ``chances`` where the mask is set, and nowhere else.
    """
    uniform = torch.rand(mask.shape, generator=generator, device=mask.device)
    below = torch.nextafter(chances, torch.zeros_like(chances))
    return torch.where(mask, torch.minimum(chances * uniform, below), chances + (1.0 - chances) * uniform)


def _raced(weights: Tensor, winners: Tensor, generator: torch.Generator) -> Tensor:
    """Return the categories that ``multinomial`` draws in a low format, given those drawn in exact arithmetic (``winners``).

    ``multinomial`` takes the largest of ``weights / exponential draws``. That is the category that arrives first, if category j
    arrives after a random time with rate ``weights[j]``. So this function draws exponential numbers under the condition that the
    given categories arrive first, in their order, and then repeats the division in the low format.
    """
    wide = weights.float()

    def exponential(shape: torch.Size) -> Tensor:
        return torch.empty(shape, device=weights.device).exponential_(generator=generator)

    won = wide.gather(-1, winners)
    left = wide.sum(-1, keepdim=True) - won.cumsum(-1) + won
    arrival = (exponential(won.shape) / left.clamp_min(torch.finfo(torch.float32).tiny)).cumsum(-1)
    draws = (arrival[..., -1:] * wide + exponential(wide.shape)).scatter(-1, winners, arrival * won)
    ratio = weights / draws.to(weights.dtype)
    count = winners.shape[-1]
    return ratio.argmax(-1, keepdim=True) if count == 1 else ratio.topk(count).indices


def _generator(like: Tensor, number: int) -> torch.Generator:
    """Return a new generator for draw ``number``.

    Its seed is one that users hardly choose: with the user's seed it would repeat the numbers that made the recorded draw.
    """
    return torch.Generator(like.device).manual_seed(_SEED + number)


class Draws(Observer):
    """Records the random draws of a first pass, and repeats them in each later pass of the same code.

    Attributes:
        tape: Each random operator of the first pass with its draw. The draw is None if it cannot be repeated, as with attention
            whose kernel applies dropout.
        strayed: Number of draws in the last pass without a counterpart in the first; these are drawn anew.
    """

    def __init__(self) -> None:
        self.tape: list[tuple[str, Tensor | None]] | None = None
        self._rest: list[tuple[str, Tensor | None]] | None = None
        self.strayed = 0

    def around(self, model: nn.Module) -> contextlib.AbstractContextManager[object]:
        """Start to record random draws or, in later passes, start again with the first recorded draw."""
        self._rest = None if self.tape is None else [*self.tape]
        self.tape = [] if self.tape is None else self.tape
        self.strayed = 0
        return super().around(model)

    def operator(self, run: Run, op: _torch.operators.OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Run the operator; if it is random, record its draw or repeat the recorded one."""
        # also when repeating: its shape and format are needed, and the generator must advance
        out = run(op, args, kwargs)
        if torch.Tag.nondeterministic_seeded not in op.tags:
            return out
        given = {**dict(zip(_torch.operators.argument_names(op), args, strict=False)), **kwargs}
        if not _is_random(op, given):
            return out
        name = op.overloadpacket.__name__
        assert self.tape is not None
        if self._rest is None:
            self.tape.append((name, _drawn(op, given, out, len(self.tape))))
            return out
        if not self._rest or self._rest[0][0] != name:
            self.strayed += 1
            return out
        number = len(self.tape) - len(self._rest)
        repeated = _repeated(op, given, out, self._rest.pop(0)[1], number)
        if repeated is None:
            self.strayed += 1
            return out
        return repeated
