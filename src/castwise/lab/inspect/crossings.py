"""Observe every tensor that enters or leaves a module call in a forward and backward pass, and its gradient.

Each tensor is given to a function that may replace the tensor. A call is named by the module's path and the number of the call,
counted from 0 in forward. A call that activation checkpointing repeats in backward is recognised by its inputs and keeps the
number of the original call.

In code compiled by torch.compile single module calls cannot be seen: see :mod:`castwise.lab.inspect.compiled`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from castwise.core import _torch
from castwise.core.casting.trees import map_tensors, tensors_in
from castwise.lab.passes.observers import Call, Observer


class Point(NamedTuple):
    """The place where a tensor enters or leaves a module call: the call, the side, and the index among the tensors there."""

    call: Call
    side: Literal["in", "out"]
    at: int


Forward = Callable[[Point, Tensor, bool], Tensor | None]
"""Gets the detached tensor at a point, and whether the call is a recomputation in backward; returns a replacement,
or None to keep the tensor."""
Backward = Callable[[Point, Tensor], Tensor | None]
"""Gets the gradient at a point; returns a replacement, or None to keep the gradient."""


class _Cross(torch.autograd.Function):
    """Passes a tensor on in forward, and in backward gives its gradient to a function that may replace the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, held: list[Tensor], point: Point, look: Backward) -> Tensor:
        ctx.point, ctx.look = point, look
        return held[0]  # returning an argument would make a view, which must not be written to

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        put = None if gradient is None else ctx.look(ctx.point, gradient.detach())
        return gradient if put is None else put, None, None, None


@dataclass
class _Running:
    """A module call in progress.

    Attributes:
        module: The module.
        call: The call; None for a recomputation whose original call is not known.
        again: Whether activation checkpointing repeats the call in backward.
        copies: For each input the original, the copy that the module gets, and the copy's version at first. In-place writes
            to a copy are copied back to the original.
    """

    module: nn.Module
    call: Call | None
    again: bool
    copies: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)


class Crossings(Observer):
    """Observes the tensors that enter or leave all module calls of a model, in one forward and backward pass.

    The observer registers its own hooks, which may replace tensors. The hooks run after a plan has cast a module's inputs and
    before it casts the outputs, so tensors have the format that the module computes in.

    Args:
        forward: Gets each tensor that enters or leaves a call, and may replace it.
        backward: Gets each gradient, and may replace it.

    Attributes:
        callers: All calls in the order in which they started, each with its caller; None for calls made by the loss.
        writes: Paths of modules that wrote to their inputs.
        unseen: Tensors that could not be watched: sparse, nested or of a tensor subclass.
    """

    def __init__(self, forward: Forward, backward: Backward) -> None:
        self.callers: dict[Call, Call | None] = {}
        self.writes: set[str] = set()
        self.unseen: Counter[str] = Counter()
        self._forward, self._backward = forward, backward
        self._paths: dict[nn.Module, str] = {}
        self._numbers: Counter[str] = Counter()
        self._given: dict[Call, tuple[float, ...]] = {}
        self._left: dict[str, list[Call]] = {}
        self._running: list[_Running] = []

    @contextlib.contextmanager
    def around(self, model: nn.Module) -> Iterator[None]:
        """Register hooks on all modules, and remove them at the end."""
        self._paths = {module: path for path, module in model.named_modules()}
        with contextlib.ExitStack() as hooks:
            hooks.callback(self._running.clear)
            for module in self._paths:
                hooks.enter_context(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(self._leave, prepend=True, always_call=True))
            yield

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        path = self._paths[module]
        again = _torch.autograd.graph_task_id() != -1
        given = tuple(_mark(tensor) for tensor in tensors_in((args, kwargs)))
        call: Call | None
        if again:
            call = self._found_again(path, given)
        else:
            call = Call(path, self._numbers[path])
            self._numbers[path] += 1
            self._given[call] = given
            self._left.setdefault(path, []).append(call)
            self.callers[call] = self._running[-1].call if self._running else None
        running = _Running(module, call, again)
        self._running.append(running)
        return self._crossed((args, kwargs), "in", running)

    def _leave(self, module: nn.Module, _args: Any, output: Any) -> Any:
        """Handle the end of a module call, as a forward hook.

        The hook also runs after an exception, since activation checkpointing ends its recomputation with an exception.
        """
        if not self._running or self._running[-1].module is not module:
            return None
        running = self._running[-1]
        try:
            for original, copy, version in running.copies:
                if _torch.tensors.version(copy) != version:
                    original.copy_(copy)
                    self.writes.add(self._paths[module])
            return None if output is None else self._crossed(output, "out", running)
        finally:
            self._running.pop()

    def _found_again(self, path: str, given: tuple[float, ...]) -> Call | None:
        """Return the forward call that a recomputation in backward repeats.

        It is the last call with the same inputs that was not recomputed yet. If no inputs are the same, it is the last call that
        was not recomputed yet; None if there is none.
        """
        left = self._left.get(path) or []
        for call in reversed(left):
            if _same(self._given[call], given):
                left.remove(call)
                return call
        return left.pop() if left else None

    def _crossed(self, value: Any, side: Literal["in", "out"], running: _Running) -> Any:
        seen: dict[int, Tensor] = {}

        def cross(tensor: Tensor) -> Tensor:
            if id(tensor) not in seen:  # attention tests whether its query is its key
                seen[id(tensor)] = self._cross(tensor, side, len(seen), running)
            return seen[id(tensor)]

        return value if running.call is None else map_tensors(cross, value)

    def _cross(self, tensor: Tensor, side: Literal["in", "out"], index: int, running: _Running) -> Tensor:
        assert running.call is not None
        if not is_plain(tensor):
            self.unseen[running.call.path] += 1
            return tensor
        point = Point(running.call, side, index)
        put = self._forward(point, tensor.detach(), running.again)
        value = tensor.detach().clone() if put is None else put
        if tensor.requires_grad and torch.is_grad_enabled():
            value = _Cross.apply(tensor, [value], point, self._backward)  # type: ignore[no-untyped-call]
        if side == "in":
            running.copies.append((tensor, value, _torch.tensors.version(value)))
        return value


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's values can be read: the tensor is dense, of no tensor subclass, and not inside a torch.func transform."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and type(tensor) in (Tensor, nn.Parameter)
        and not _torch.dispatcher.in_transform()
    )


def _mark(tensor: Tensor) -> float:
    """Return a number that tells tensors apart: a sum in which each position has a weight.

    A plain sum would not do, since all results of layer norm have the same.
    """
    if not is_plain(tensor) or tensor.is_complex():
        return 0.0
    flat = tensor.detach().float().flatten()
    return float((flat * torch.linspace(0.5, 1.5, flat.numel(), device=flat.device)).sum())


def _same(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return len(one) == len(other) and all(
        a == b or (a != a and b != b) for a, b in zip(one, other, strict=True)
    )
