"""Observe the tensors that enter or leave module calls in code compiled by torch.compile.

An opaque custom operator is inserted wherever a tensor enters or leaves a call. Each module's own code is compiled as usual, but
fusions across calls are prevented. Calls inside an activation-checkpointed region are not observed, since checkpointing does not
allow such hooks while it is traced.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from castwise.core.casting.trees import map_tensors
from castwise.lab.inspect.crossings import Backward, Forward, Point
from castwise.lab.passes.observers import Call, Observer

_watching: list[CompiledCrossings] = []


class CompiledCrossings(Observer):
    """Observes the tensors that enter or leave module calls of a prepared model under torch.compile, in one forward and backward.

    The observer registers its own hooks before anything is compiled, and Dynamo traces them.

    Args:
        forward: As for :class:`~castwise.lab.inspect.crossings.Crossings`.
        backward: As for :class:`~castwise.lab.inspect.crossings.Crossings`.
        writes: Paths of modules that write to their inputs. The inputs of these modules are not observed, since the module would
            write to a copy that its caller does not see.
    """

    def __init__(self, forward: Forward, backward: Backward, writes: frozenset[str]) -> None:
        self.unseen: Counter[str] = Counter()
        self._forward, self._backward, self._writes = forward, backward, writes

    @contextlib.contextmanager
    def around(self, model: nn.Module) -> Iterator[None]:
        """Register hooks on all modules, and remove them at the end."""
        _define()
        with contextlib.ExitStack() as hooks:
            for path, module in model.named_modules():
                enter, leave = _hooks(path, path in self._writes)
                hooks.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(leave, prepend=True))
            _watching.append(self)
            hooks.callback(_watching.remove, self)
            yield

    def seen(self, tensor: Tensor, point: Point, back: bool) -> Tensor:
        """Show a tensor or gradient to the given functions, and return their replacement, or else a copy."""
        put = self._backward(point, tensor) if back else self._forward(point, tensor, False)
        return tensor.clone() if put is None else put


def _hooks(path: str, writes: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return a forward pre-hook and a forward hook that pass a module's inputs and outputs through a custom operator.

    Dynamo traces the hooks. A module's calls are numbered during tracing, since each pass is compiled anew.
    """
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
    """Register the custom operators with torch, once, at first use."""
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
        ctx.border = inputs[1:]

    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.ops.castwise.cross_back(gradient, *ctx.border), None, None, None, None

    forward = torch.library.custom_op("castwise::cross", cross, mutates_args=(), schema=schema)
    forward.register_fake(like)
    forward.register_autograd(backward, setup_context=remember)
    torch.library.custom_op("castwise::cross_back", cross_back, mutates_args=(), schema=schema).register_fake(
        like
    )
