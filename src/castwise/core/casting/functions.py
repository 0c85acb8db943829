"""Decorators that make user functions cast their inputs, or make autograd Functions follow autocast."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.autograd.function import BackwardCFunction, FunctionCtx

from castwise.core.casting import frames
from castwise.core.casting.backward import current_frame
from castwise.core.casting.frames import Frame
from castwise.core.casting.kernels import eligible, widest_dtype
from castwise.core.casting.trees import map_tensors, tensors_in
from castwise.errors import StateError

_F = TypeVar("_F", bound=Callable[..., Any])


def _autocast_device(args: Any, kwargs: Any) -> str | None:
    """Return the device type of the first floating tensor for whose device type autocast is enabled, or None."""
    for tensor in tensors_in((args, kwargs)):
        if tensor.is_floating_point() and torch.is_autocast_enabled(tensor.device.type):
            return tensor.device.type
    return None


def _cast_tree(value: Any, device: str, dtype: torch.dtype) -> Any:
    return map_tensors(lambda tensor: tensor.to(dtype) if eligible(tensor, device) else tensor, value)


def _casting(function: _F, choose: Callable[[str, Any], torch.dtype | None]) -> _F:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        device = _autocast_device(args, kwargs)
        if device is None:
            return function(*args, **kwargs)
        dtype = choose(device, (args, kwargs))
        # Dynamo must trace torch's own block
        off = (
            torch.autocast(device, enabled=False)
            if torch.compiler.is_compiling()
            else frames.suspended(device)
        )
        with off:
            if dtype is None:
                return function(*args, **kwargs)
            return function(*_cast_tree(args, device, dtype), **_cast_tree(kwargs, device, dtype))

    return run  # type: ignore[return-value]


def lower_function(function: _F) -> _F:
    """Decorate a function so that it computes under autocast in the dtype of autocast, such as bf16.

    Inside an autocast block, the function's floating inputs are cast to the dtype of the block. If the block was given
    a plan, that is the format of the plan's field ``compute``. Autocast is off for the operators in the function. fp64
    inputs are not cast. Outside autocast the function is unchanged.

    Args:
        function: The function to decorate. Tensors inside lists, tuples and mappings are cast too.
    """
    return _casting(function, lambda device, _: torch.get_autocast_dtype(device))


def fp32_function(function: _F) -> _F:
    """Decorate a function so that it computes in fp32 under autocast.

    Inside an autocast block, the function's floating inputs are cast to fp32. Autocast is off for the operators in the
    function. fp64 inputs are not cast. Outside autocast the function is unchanged.

    Args:
        function: The function to decorate. Tensors inside lists, tuples and mappings are cast too.
    """
    return _casting(function, lambda _device, _args: torch.float32)


def widest_function(function: _F) -> _F:
    """Decorate a function so that all its floating inputs are cast to the widest dtype among them under autocast.

    Use it for a function that gets tensors of different dtypes, such as one that adds a bf16 and an fp32 tensor. For a
    bf16 and an fp16 input, the widest dtype is fp32. Autocast is off for the operators in the function. fp64 inputs are
    not cast and do not count. Outside autocast the function is unchanged.

    Args:
        function: The function to decorate. Tensors inside lists, tuples and mappings are cast too.
    """

    def choose(device: str, values: Any) -> torch.dtype | None:
        return widest_dtype(tensor.dtype for tensor in tensors_in(values) if eligible(tensor, device))

    return _casting(function, choose)


# --- autograd functions -------------------------------------------------------------------------------------

_STATE = "_castwise_frame"


def _frame_now(device: str) -> Frame:
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    frame = current_frame()
    if frame is not None and frame.device_type == device and frame.dtype is dtype:
        return frame
    return Frame(device, dtype)


def _device_of(device_type: str | None, args: Any, kwargs: Any) -> str:
    if device_type is not None:
        return device_type
    for tensor in tensors_in((args, kwargs)):
        return tensor.device.type
    return "cpu"


def _classes_with(forward: Callable[..., Any], base: Any) -> Iterator[Any]:
    for cls in base.__subclasses__():
        if getattr(cls, "forward", None) is forward:
            yield cls
        yield from _classes_with(forward, cls)


def _record_in_setup_context(forward: Callable[..., Any], note: Callable[[Any], Frame]) -> None:
    """Make autograd Functions that use ``forward`` store the active :class:`Frame` in the context, in ``setup_context``.

    torch calls ``setup_context`` right after ``forward``, on the same thread and in the same autocast state. So the
    frame need not be passed from ``forward`` to ``setup_context``.
    """
    for cls in _classes_with(forward, torch.autograd.Function):
        original = cls.setup_context
        if getattr(original, _STATE, None) is forward:
            continue

        @functools.wraps(original)
        def setup_context(ctx: Any, inputs: Any, output: Any, _original: Any = original) -> Any:
            _original(ctx, inputs, output)
            setattr(ctx, _STATE, note(inputs))

        setattr(setup_context, _STATE, forward)
        cls.setup_context = staticmethod(setup_context)


def custom_fwd(
    fwd: Callable[..., Any] | None = None,
    *,
    device_type: str | None = None,
    cast_inputs: torch.dtype | None = None,
) -> Any:
    """Make the ``forward`` of a ``torch.autograd.Function`` work under autocast.

    Use it as a decorator of ``forward``, together with :func:`custom_bwd` on ``backward``. It replaces
    ``torch.amp.custom_fwd``. Both styles of ``forward`` are supported: ``forward(ctx, ...)``, and ``forward(...)`` with
    a separate ``setup_context``.

    Args:
        fwd: The method ``forward``. It is left out if the decorator is used with arguments.
        device_type: The type of device whose autocast state is used. The default is the device type of the first tensor
            among the inputs.
        cast_inputs: The dtype to which floating inputs are cast if autocast is active. ``forward`` then runs with
            autocast off. With None, inputs are not cast, and the operators inside ``forward`` are autocast as usual.

    Returns:
        The decorated method.
    """
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)
    newest: list[Any] = [
        None
    ]  # the autograd Function created last when the Functions with this forward were last searched for

    def frames_of(inputs: Any, kwargs: Any) -> tuple[Frame, Frame]:
        """Return the :class:`Frame` that is active around a call of ``forward``, and the frame for its backward."""
        frame = _frame_now(_device_of(device_type, inputs, kwargs))
        island = cast_inputs is not None and frame.enabled
        return frame, Frame(frame.device_type, None) if island else frame

    @functools.wraps(fwd)
    def forward(*args: Any, **kwargs: Any) -> Any:
        takes_context = bool(args) and isinstance(args[0], FunctionCtx)
        inputs = args[1:] if takes_context else args
        frame, inside = frames_of(inputs, kwargs)
        if takes_context:
            setattr(args[0], _STATE, inside)
        elif (last := BackwardCFunction.__subclasses__()[-1]) is not newest[0]:
            _record_in_setup_context(forward, lambda given: frames_of(given, {})[1])
            newest[0] = last
        if inside is frame:
            return fwd(*args, **kwargs)
        assert cast_inputs is not None
        device = frame.device_type
        with frames.suspended(device):
            inputs = _cast_tree(inputs, device, cast_inputs)
            kwargs = _cast_tree(kwargs, device, cast_inputs)
            return fwd(args[0], *inputs, **kwargs) if takes_context else fwd(*inputs, **kwargs)

    return forward


def custom_bwd(bwd: Callable[..., Any] | None = None, *, device_type: str | None = None) -> Any:
    """Make the ``backward`` of a ``torch.autograd.Function`` run in the precision in which its ``forward`` ran.

    Use it as a decorator of ``backward``, together with :func:`custom_fwd` on ``forward``. It replaces
    ``torch.amp.custom_bwd``.

    Args:
        bwd: The method ``backward``. It is left out if the decorator is used with arguments.
        device_type: Accepted for compatibility with torch and ignored. The device type of ``forward`` is used.

    Returns:
        The decorated method.

    Raises:
        StateError: During the backward pass, if ``forward`` was not decorated with :func:`custom_fwd`.
    """
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def backward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        frame = getattr(ctx, _STATE, None)
        if frame is None:
            raise StateError(
                f"custom_bwd: {type(ctx).__name__} has no record of its forward's precision; "
                "decorate its forward with castwise.custom_fwd"
            )
        frames.push(frame)
        try:
            return bwd(ctx, *args, **kwargs)
        finally:
            frames.pop()

    return backward
