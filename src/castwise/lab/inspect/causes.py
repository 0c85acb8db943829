"""Find out why an operator with finite inputs returned a non-finite value.

The operator runs again on the same inputs in fp64. If the fp64 result is finite, the range of the operator's format was too small,
and the fp64 result shows by how much. Otherwise the operation has no finite result, and the inputs show why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from castwise.core import _torch
from castwise.core.casting.trees import map_tensors, tensors_in
from castwise.core.plans.formats import FORMATS
from castwise.lab.inspect.trace import OperatorRun
from castwise.lab.inspect.values import Values, is_finite, is_floating, plain, values_of

_CASTS = frozenset({"_to_copy", "copy_", "to", "copy"})
_EXPONENTIALS = frozenset({"exp", "exp_", "exp2", "expm1", "sinh", "cosh", "exponential"})
_POWERS = frozenset({"pow", "square", "mul", "mul_", "pow_", "addcmul", "addcmul_", "prod", "cumprod"})
_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "convolution", "convolution_backward", "linear", "matmul"})  # fmt: skip
_SUMS = frozenset({"sum", "cumsum", "mean", "add", "add_", "sub", "sub_", "rsub", "nansum", "var", "std", "var_mean", "linalg_vector_norm", "norm"})  # fmt: skip
_DIVISIONS = frozenset({"div", "div_", "reciprocal", "reciprocal_", "rsqrt", "rsqrt_", "true_divide", "remainder", "fmod", "addcdiv", "addcdiv_"})  # fmt: skip
_LOGARITHMS = frozenset({
    "log",
    "log_",
    "log2",
    "log10",
    "log1p",
    "logit",
    "xlogy",
    "log_softmax",
    "_log_softmax",
    "logsumexp",
})
_SOFTMAXES = frozenset({"_softmax", "_log_softmax", "_safe_softmax", "logsumexp", "softmax"})
_DOMAINS = frozenset({
    "sqrt",
    "sqrt_",
    "acos",
    "asin",
    "atanh",
    "acosh",
    "erfinv",
    "lgamma",
    "digamma",
    "pow",
})

ADVICE: Mapping[str, str] = {
    "overflow": "keep the operator's inputs small: scale them before a product, subtract their maximum before exp, take a mean instead of a sum",
    "exp of a large value": "subtract the largest input before exp, or use torch.logsumexp, softmax or log_softmax, which do so",
    "0/0": "add an epsilon that the format holds to the denominator; if torch.where masks the quotient, put a safe value into "
    "the denominator before dividing, because backward divides in both branches",
    "division by zero": "add an epsilon that the format holds to the denominator, or clamp it away from zero",
    "log of zero": "clamp the argument away from zero before log, or work with log_softmax and logsigmoid",
    "log of a negative value": "find out why the argument is negative: rounding can change the sign of a small difference",
    "outside the operator's domain": "clamp the argument to slightly inside the operator's domain",
    "inf - inf": "if the infinities come from a mask, keep one value in each row unmasked, or fill with the format's smallest "
    "finite value instead of -inf",
    "0 * inf": "an intended infinity is multiplied by zero: select with torch.where or masked_fill instead of a product",
    "a row of nothing but -inf": "every value of a row is masked: keep one value unmasked, or fill with torch.finfo(dtype).min instead of -inf",
    "nothing to reduce": "a selection is empty: leave its term out of the loss when it is empty",
    "data": "clean the data, or leave the batch out",
    "parameter": "the weights were not finite before this pass: go back to a checkpoint, and inspect the step that wrote them",
    "buffer": "the buffer was not finite before this pass: go back to a checkpoint, or inspect the code that writes it",
    "constant": "the program sets this value itself; make sure that only masked positions use it",
    "memory": "uninitialised memory is read: use torch.zeros instead of torch.empty, or write every element first",
    "unseen": "look for code that computes the value outside of torch's operators, in NumPy or an extension, or before the loss is called",
    "unknown": "look at the inputs of the operator",
}  # fmt: skip
"""Advice for each kind of cause, given when no other format cures the non-finite value."""


@dataclass(frozen=True)
class Why:
    """The reason why an operator's output is not finite.

    Attributes:
        kind: A key of :data:`ADVICE`.
        sentence: The cause as a clause, with numbers.
        inputs: Floating inputs, by the operator's argument names.
        outputs: Results of the operator.
        needed: Largest magnitude of the exact result; None if that is not finite or was not computed.
    """

    kind: str
    sentence: str
    inputs: tuple[Values, ...] = ()
    outputs: tuple[Values, ...] = ()
    needed: float | None = None


def explain(
    op: _torch.operators.OpOverload,
    place: OperatorRun,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    made: Sequence[Tensor],
    name_of: Callable[[Tensor], str],
    *,
    overwrites: bool = False,
) -> Why:
    """Find out why an operator returned a non-finite value.

    Args:
        op: The operator.
        place: Where the operator ran.
        args: Its positional arguments, as they were before it ran.
        kwargs: Its keyword arguments, as they were before it ran.
        made: The operator's floating results.
        name_of: Gives a tensor's name; empty if it has none.
        overwrites: Whether the result is independent of the previous contents of the tensors that it writes to.
    """
    results = {name for _, name in _torch.tensors.written_arguments(op)} if overwrites else set()
    inputs = tuple(_inputs(op, args, kwargs, name_of, results))
    at = [i for i, tensor in enumerate(made) if not is_finite(tensor)]
    outputs = tuple(values_of("output", made[i]) for i in at[:4])
    wide = distinct(tensors_in(results_in_fp64(op, args, kwargs)))
    needed = None
    if len(wide) == len(made) and all(is_finite(wide[i]) for i in at[:1]):
        needed = max((float(plain(wide[i]).abs().max()) for i in at[:1] if wide[i].numel()), default=0.0)
    kind, sentence = _kind(place.operator, place.phase == "backward", inputs, outputs, needed, args)
    return Why(kind, sentence, inputs, outputs, needed)


def distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the floating tensors without repetition.

    Instances of a tensor subclass that handles operators itself are left out, except DTensors.
    """
    return list({id(t): t for t in tensors if is_floating(t) and _is_plain(t)}.values())


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter)
        or hasattr(tensor, "device_mesh")
        or not _torch.distributed.dispatches_itself(tensor)
    )


def written(op: _torch.operators.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the floating tensors among an operator's arguments that the operator writes to."""
    places = _torch.tensors.written_arguments(op)
    given = [args[at] if 0 <= at < len(args) else kwargs.get(name) for at, name in places]
    return distinct(tensors_in(given))


def _inputs(
    op: _torch.operators.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name_of: Callable[[Tensor], str],
    results: set[str],
) -> list[Values]:
    names = _torch.operators.argument_names(op)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    found = []
    for name, value in given.items():
        if name in results:
            continue
        for tensor in tensors_in(value):
            if is_floating(tensor):
                known = name_of(tensor)
                found.append(values_of(f"{name} ({known})" if known else name, tensor))
    return found[:8]


def results_in_fp64(op: _torch.operators.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the same inputs in fp64; return its results and the tensors that it writes to.

    None is returned for an operator that draws random numbers or has no fp64 kernel.
    """
    if torch.Tag.nondeterministic_seeded in op.tags:  # it would draw random numbers again
        return None
    low = dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64)

    def widen(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return low.get(value, value)
        return value

    def copy(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.detach().to(torch.complex128, copy=True)
        return tensor.detach().to(torch.float64, copy=True) if tensor.is_floating_point() else tensor

    try:
        with torch.no_grad():
            wide = map_tensors(copy, (tuple(map(widen, args)), {k: widen(v) for k, v in kwargs.items()}))
            return op(*wide[0], **wide[1]), written(op, *wide)
    except Exception:  # operators without an fp64 kernel raise various types
        return None


def _kind(
    name: str,
    backward: bool,
    inputs: tuple[Values, ...],
    outputs: tuple[Values, ...],
    needed: float | None,
    args: tuple[Any, ...],
) -> tuple[str, str]:
    given = any(v.nan or v.inf for v in inputs)
    if not given and needed is not None:
        return _overflow(name, inputs, outputs, needed)
    first = inputs[0] if inputs else None
    if first is not None and not math.prod(first.shape):
        return "nothing to reduce", "the input has no elements, so it has no mean"
    if given:
        if name in _SOFTMAXES and all(v.inf == v.negative_inf for v in inputs):
            return (
                "a row of nothing but -inf",
                "every value of a row is -inf, so its sum of exp is 0 and softmax is 0/0",
            )
        if name in _POWERS or name in _PRODUCTS:
            return "0 * inf", "a product of zero and infinity"
        return "inf - inf", "infinities of opposite sign are added, or infinities of equal sign subtracted"
    if first is None:
        return "unknown", "the operator has no floating-point input"
    if name in _EXPONENTIALS:
        return "exp of a large value", f"exp of {first.high:.4g} overflows every format"
    if name in _DIVISIONS or name.startswith("_foreach_div") or (name == "pow" and _zeros(inputs[:1])):
        below = inputs[1] if len(inputs) > 1 else first
        zeros = f"{below.zeros} of {math.prod(below.shape):,} denominators are 0"
        if any(v.nan for v in outputs):
            return "0/0", f"{zeros}, and at least one of their numerators is 0 too"
        return "division by zero", zeros
    if name in _LOGARITHMS:
        if first.low is not None and first.low < 0 and name not in ("log1p", "log_softmax", "_log_softmax"):
            return "log of a negative value", f"the smallest argument is {first.low:.4g}"
        return "log of zero", f"{first.zeros} of {math.prod(first.shape):,} arguments are 0"
    if name in _DOMAINS:
        return "outside the operator's domain", f"arguments range from {first.low:.4g} to {first.high:.4g}"
    return "unknown", "the result is not finite in fp64 either"


def _zeros(values: Sequence[Values]) -> int:
    return sum(v.zeros for v in values)


def _overflow(
    name: str, inputs: tuple[Values, ...], outputs: tuple[Values, ...], needed: float
) -> tuple[str, str]:
    dtype = next((v.dtype for v in outputs), "")
    format = next((f for f in FORMATS.values() if f.torch_name == dtype), FORMATS["fp32"])
    ends = f"the largest {format.name} number is {format.max:.4g}"
    if needed <= format.max:
        return (
            "overflow",
            f"the result {needed:.4g} fits into {format.name}, but an intermediate value overflows; {ends}",
        )
    what = "the result"
    if name in _CASTS:
        what = f"a value cast to {format.name}"
    elif name in _EXPONENTIALS:
        high = max((v.high for v in inputs if v.high is not None), default=0.0)
        return "exp of a large value", f"exp of {high:.4g} is {needed:.4g}; {ends}"
    elif name in _PRODUCTS:
        what = "a sum of products"
    elif name in _SUMS:
        what = "a sum"
    elif name in _POWERS:
        what = "a product"
    elif name in _DIVISIONS:
        what = "a quotient"
    return "overflow", f"{what} reaches {needed:.4g}; {ends}"
