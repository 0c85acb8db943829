"""Find the operator call that raised an error, with its arguments, and repeat it on copies of them.

Python does not keep the arguments of a call that raised, so they are evaluated again from the source line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from castwise.core import _torch
from castwise.core.casting.trees import map_tensors, tensors_in
from castwise.core.model.complaints.expressions import Values, handed_on, writes
from castwise.core.model.complaints.source import Line, Spot, is_shown, maker_of, node_of, short

_CODE = (types.FunctionType, types.MethodType, functools.partial, torch.nn.Module)
"""Types of arguments that are user code."""


@dataclass(frozen=True)
class Call:
    """A call of an operator or of a torch function.

    Attributes:
        name: The operator as plans name it, such as ``mm``, ``index_add_`` or ``mylib::op``. ``OF_MODULE`` of
            :mod:`~castwise.core.model.complaints.expressions` if a module of ``torch.nn`` was called.
        function: The called function. For a method, it takes the tensor as its first argument.
        args: Positional arguments.
        kwargs: Keyword arguments.
        writes: Whether the call writes to one of its arguments.
        spot: The line of user code that made the call.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    writes: bool
    spot: Spot

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, each once, as a list."""
        return list({id(t): t for t in tensors_in((self.args, self.kwargs))}.values())

    def again(self, cast: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Any:
        """Repeat the call on copies of its tensors, each of which ``cast`` may replace first."""

        def copy(tensor: Tensor) -> Tensor:
            made = cast(tensor)
            alone = made.detach().clone() if made is tensor else made.detach()
            # a view, since autograd refuses writes to a leaf that requires a gradient
            return alone.requires_grad_().view_as(alone) if _follows(tensor, alone) else alone

        def new(value: Any) -> Any:
            return value.clone_state() if isinstance(value, torch.Generator) else value

        # a call with out= cannot be differentiated, so it ran without gradients
        with torch.set_grad_enabled(torch.is_grad_enabled() and "out" not in self.kwargs):
            args, kwargs = map_tensors(copy, self.args), map_tensors(copy, self.kwargs)
            return self.function(*map(new, args), **{name: new(value) for name, value in kwargs.items()})


def _follows(tensor: Tensor, copy: Tensor) -> bool:
    strided = copy.layout is torch.strided
    return torch.is_grad_enabled() and tensor.requires_grad and copy.is_floating_point() and strided


def failed_calls(trace: TracebackType | None) -> tuple[list[Call], Spot]:
    """Find the call that raised an error, given the error's traceback.

    To get the arguments, expressions in the source are evaluated; only functions of torch are run for this.

    Returns:
        The calls that may be repeated, the innermost first, and the innermost line of user code. The first call is that
        of the operator that failed. The others are those of custom operators whose Python kernels called it.
    """
    steps, device = _steps(trace)
    with contextlib.nullcontext() if device is None else device:
        return _failed_calls(steps)


def _steps(trace: TracebackType | None) -> tuple[list[TracebackType], torch.device | None]:
    """Return the frames of a traceback and the default device in force in the innermost one, if it can be seen.

    The frames in which torch applies a default device are left out, so that a call looks as it does without one.
    """
    steps: list[TracebackType] = []
    device = None
    while trace is not None:
        found = _torch.operators.default_device_of(trace.tb_frame)
        if found is None:
            steps.append(trace)
        else:
            device = found
            if steps and steps[-1].tb_frame.f_code is torch.overrides.handle_torch_function.__code__:
                del steps[-2:]  # the function that handed itself over and is called again in the next frame
        trace = trace.tb_next
    return steps, device


def _failed_calls(steps: list[TracebackType]) -> tuple[list[Call], Spot]:
    while steps and _below_kernel(steps):
        steps.pop()
    calls: list[Call] = []
    first = None
    for index in range(len(steps) - 1, -1, -1):
        outer = steps[index - 1] if index else None
        if steps[index].tb_frame.f_code.co_name == "__call__" and _module(steps[index]) == "torch._ops":
            call = (
                _direct(steps, index) if outer is None or not _module(outer).startswith("castwise") else None
            )
            calls += [call] if call is not None and (first is None or "::" in call.name) else []
        elif first is None and not _module(steps[index]).startswith((
            "castwise",
            "torch._ops",
            "torch._library",
        )):
            call = _written(steps, index)
            calls += [call] if call is not None else []
        if first is None and is_shown(steps[index].tb_frame.f_code.co_filename):
            first = index
    return calls, Spot() if first is None else _spot(steps, first, {})


def _direct(steps: list[TracebackType], index: int) -> Call | None:
    """Return the call of an operator through ``torch.ops``, such as ``torch.ops.mylib.op(x)``, or None.

    None means that the call cannot be repeated.

    The arguments are read from the local variables of torch's own stack frame.
    """
    given = steps[index].tb_frame.f_locals
    name, args, kwargs = (
        _torch.operators.operator_name(given.get("self")),
        given.get("args"),
        given.get("kwargs"),
    )
    if not name or not isinstance(args, tuple) or not isinstance(kwargs, dict):
        return None
    return _known(Call(name, given["self"], args, kwargs, writes(name), _spot(steps, index, {})))


def _written(steps: list[TracebackType], index: int) -> Call | None:
    """Return the call that a stack frame was executing, evaluated from its source line, or None if that is unknown."""
    node = node_of(steps[index])
    if node is None:
        return None
    values = Values(steps[index].tb_frame)
    try:
        name, function, args, kwargs = values.call(node)
    except Exception:  # unknown, or changed since it ran
        return None
    spot = _spot(steps, index, values.texts)
    return _known(Call(name, function, tuple(args), kwargs, writes(name) or "out" in kwargs, spot))


def _spot(steps: list[TracebackType], index: int, texts: Mapping[int, str]) -> Spot:
    """Return the line of user code that a stack frame was running, or that called it.

    Args:
        steps: The whole traceback.
        index: Which of its stack frames.
        texts: The source expressions of tensors, by ``id``, if already known.
    """
    own = index
    while own >= 0 and not is_shown(steps[own].tb_frame.f_code.co_filename):
        own -= 1
    if own < 0:
        return Spot()
    step = steps[own]
    code, node = step.tb_frame.f_code, node_of(step)
    if own != index or not texts:
        texts = handed_on(node, step.tb_frame, steps[own + 1].tb_frame) if own + 1 < len(steps) else {}
    line = Line(code.co_filename, step.tb_lineno, code.co_name)
    return Spot(line, short(node), texts, functools.partial(maker_of, step))


def _module(step: TracebackType) -> str:
    return str(step.tb_frame.f_globals.get("__name__", ""))


def _below_kernel(steps: list[TracebackType]) -> bool:
    """Whether the traceback ends in castwise's kernel for an operator rule, or in the operator that this kernel called."""
    for step in reversed(steps):
        if _module(step) == "castwise.core.casting.kernels":
            return True
        if not _module(step).startswith(("castwise", "torch._ops")):
            return False
    return False


def _known(call: Call) -> Call | None:
    """Return the call if it can be repeated, or None.

    A call can be repeated if none of its arguments is a function, a module or a tensor of a subclass that implements
    its own operators. Tensors on the meta device exclude it too. For a call inside ``vmap``, the wrapped tensors are
    replaced by the plain tensors inside them.
    """
    given = (*call.args, *call.kwargs.values())
    if not call.name or _torch.dispatcher.in_transform() or any(isinstance(each, _CODE) for each in given):
        return None
    held = {id(t): _torch.operators.without_transforms(t) for t in call.tensors}
    if not _torch.operators.plain_tensors(tensor for tensor, _ in held.values()):
        return None
    if all(tensor is held[id(tensor)][0] for tensor in call.tensors):
        return call
    args, kwargs = map_tensors(lambda t: held[id(t)][0], (call.args, call.kwargs))
    texts = {id(tensor): call.spot.texts[key] for key, (tensor, _) in held.items() if key in call.spot.texts}
    dims = [dims for _, dims in {id(tensor): (tensor, dims) for tensor, dims in held.values()}.values()]
    levels = sorted({level for each in dims for level in each})
    mapped = functools.partial(
        _mapped, call.function, [[each.get(level) for each in dims] for level in levels]
    )
    return dataclasses.replace(
        call, function=mapped, args=args, kwargs=kwargs, spot=dataclasses.replace(call.spot, texts=texts)
    )


def _mapped(function: Callable[..., Any], levels: list[list[int | None]], *args: Any, **kwargs: Any) -> Any:
    """Call a function inside nested ``vmap``.

    ``levels`` has one item for each ``vmap``, the outermost first: the dimensions of the tensors that it maps over.
    """
    tensors = list({id(t): t for t in tensors_in((args, kwargs))}.values())

    def inner(*given: Tensor) -> Any:
        replaced = dict(zip(map(id, tensors), given, strict=True))
        new_args, new_kwargs = map_tensors(lambda t: replaced[id(t)], (args, kwargs))
        return function(*new_args, **new_kwargs)

    for dims in reversed(levels):
        inner = torch.func.vmap(inner, in_dims=tuple(dims), randomness="different")
    return inner(*tensors)


def failed_in_backward(loss: Tensor, error: BaseException, seconds: float) -> list[Call]:
    """Return the operator calls whose backward may have raised an error.

    Repeating such a call runs its forward and its backward. The list is empty if the calls cannot be found within
    ``seconds``.
    """
    node = _torch.autograd.failed_node(loss, error, seconds)
    calls = []
    for op, given in _torch.autograd.forward_of(node) if node is not None else ():
        if _torch.operators.plain_tensors(tensors_in(given)):
            name = _torch.operators.operator_name(op)
            calls.append(Call(name, functools.partial(_there_and_back, op), (), given, False, Spot()))
    return calls


def _there_and_back(op: Callable[..., Any], **given: Any) -> None:
    made = [t for t in tensors_in(op(**given)) if t.requires_grad]
    device = made[0].device.type
    with torch.autocast(device, enabled=False):
        inputs = [t for t in tensors_in(given) if t.requires_grad]
        torch.autograd.grad(made, inputs, list(map(torch.zeros_like, made)), allow_unused=True)
