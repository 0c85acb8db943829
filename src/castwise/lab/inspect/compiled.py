"""Crossings in compiled code: at every border of a call stands an operator that the compiler does not look into.

So each module's own code is compiled as it would be, and what the compiler fuses across borders is not. Nothing is found of calls
below a border in a checkpointed piece, whose tracing allows no such hooks.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from castwise.core.casting.trees import map_tensors
from castwise.lab.inspect.crossings import Backward, Call, Forward, Point

_watching: list[CompiledCrossings] = []


class CompiledCrossings:
    """Watches the calls of all modules of a model that is compiled in its first call, as a context manager, for one pass.

    Args:
        model: Prepared; its hooks are there before anything is compiled.
        forward: As for :class:`~castwise.lab.inspect.crossings.Crossings`.
        backward: The same.
        writes: Paths of modules that write to their inputs: these are not looked at, since the caller would not see the write.
    """

    def __init__(
        self, model: nn.Module, forward: Forward, backward: Backward, writes: frozenset[str]
    ) -> None:
        self.unseen: Counter[str] = Counter()
        self._model, self._forward, self._backward, self._writes = model, forward, backward, writes
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        _define()
        for path, module in self._model.named_modules():
            enter, leave = _hooks(path, path in self._writes)
            self._handles += (
                module.register_forward_pre_hook(enter, with_kwargs=True),
                module.register_forward_hook(leave, prepend=True),
            )
        _watching.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _watching.remove(self)
        for handle in self._handles:
            handle.remove()

    def seen(self, tensor: Tensor, point: Point, back: bool) -> Tensor:
        """What goes on in the place of a tensor that arrived; a copy where that is the tensor itself."""
        put = self._backward(point, tensor) if back else self._forward(point, tensor, False)
        return tensor.clone() if put is None else put


def _hooks(path: str, writes: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Hooks that Dynamo traces: numbers are counted while it does, since each pass is compiled anew."""
    began = [0]

    def crossed(value: Any, side: Literal["in", "out"], number: int) -> Any:
        seen: list[tuple[Tensor, Tensor]] = []

        def cross(tensor: Tensor) -> Tensor:
            for before, after in seen:
                if before is tensor:
                    return after
            made: Tensor = torch.ops.castwise.cross(tensor, path, number, side == "out", len(seen))
            seen.append((tensor, made))
            return made

        return map_tensors(cross, value)

    def enter(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        began[0] += 1
        return (args, kwargs) if writes else crossed((args, kwargs), "in", began[0] - 1)

    def leave(_module: nn.Module, _args: Any, output: Any) -> Any:
        return crossed(output, "out", began[0] - 1)

    return enter, leave


@functools.cache
def _define() -> None:
    """Register the operators; once, when they are first needed."""
    schema = "(Tensor tensor, str path, int number, bool out, int index) -> Tensor"

    def look(tensor: Tensor, path: str, number: int, out: bool, index: int, back: bool) -> Tensor:
        point = Point(Call(path, number), "out" if out else "in", index)
        return _watching[-1].seen(tensor, point, back) if _watching else tensor.clone()

    def cross(tensor: Tensor, path: str, number: int, out: bool, index: int) -> Tensor:
        return look(tensor, path, number, out, index, False)

    def cross_back(tensor: Tensor, path: str, number: int, out: bool, index: int) -> Tensor:
        return look(tensor, path, number, out, index, True)

    def like(tensor: Tensor, *_: Any) -> Tensor:
        return torch.empty_like(tensor)

    def remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.place = inputs[1:]

    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.ops.castwise.cross_back(gradient, *ctx.place), None, None, None, None

    forward = torch.library.custom_op("castwise::cross", cross, mutates_args=(), schema=schema)
    forward.register_fake(like)
    forward.register_autograd(backward, setup_context=remember)
    torch.library.custom_op("castwise::cross_back", cross_back, mutates_args=(), schema=schema).register_fake(
        like
    )
