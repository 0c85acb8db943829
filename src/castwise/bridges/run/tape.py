"""Records the computation from a model's outputs to the loss, so that it can be repeated.

A script has no function ``loss(model, batch)``. Each pass through its loop becomes a :class:`Tape`: the calls of the
model and of torch functions that the loss depends on, in order. The tensors that came from outside are stored
separately, as the batch. :class:`TapeLoss` is ``loss(model, batch)``, built from the tapes of all batches.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from castwise.core.casting.trees import map_tensors, tensors_in

Batch = tuple[int, list[Tensor]]
"""The number of a tape, and its input tensors."""
_TENSOR: Any = Tensor
_READS_GRADIENT = _TENSOR.grad.__get__
Taken = tuple[tuple[tuple[Any, ...], dict[str, Any]], tuple["Source", ...]]
"""The arguments of a call with empty tensors in place of its tensors, and the source of each tensor."""


class Source(NamedTuple):
    """The source of a tensor in a step.

    Attributes:
        kind: ``value``: an earlier step; ``given``: the batch; ``parameter``: the model.
        key: Number of the value or of the batch's tensor, or the parameter's name.
        is_leaf: Whether the batch's tensor requires a gradient.
    """

    kind: str
    key: Any
    is_leaf: bool = False


@dataclass(frozen=True)
class Step:
    """A recorded call.

    Attributes:
        function: The torch function; None for the model.
        arguments: Positional and keyword arguments, with an empty tensor in place of each tensor.
        sources: Sources of these tensors, in the order of :func:`~castwise.core.casting.trees.map_tensors`.
        first: Number of the first tensor that the call returns, or of the tensor that it writes to.
        count: Number of these tensors.
        writes: Whether the call changes its first argument.
    """

    function: Callable[..., Any] | None
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    sources: tuple[Source, ...]
    first: int
    count: int
    writes: bool


@dataclass(frozen=True)
class Tape:
    """The recorded computation of a loss.

    Attributes:
        steps: The recorded calls, in order.
        loss: Number of the value that backward started from.
    """

    steps: tuple[Step, ...]
    loss: int


@dataclass(frozen=True)
class TapeLoss:
    """``loss(model, batch)`` of recorded batches.

    Attributes:
        tapes: The tapes by number.
    """

    tapes: Sequence[Tape]

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the loss of a batch with the model or with another of the same structure."""
        tape, given = self.tapes[batch[0]], batch[1]
        # a leaf is the same tensor in all calls
        leaves: dict[int, Tensor] = {
            s.key: given[s.key].detach().clone().requires_grad_()
            for step in tape.steps
            for s in step.sources
            if s.is_leaf
        }
        values: dict[int, Tensor] = {}

        def find(source: Source) -> Tensor:
            if source.kind == "given":
                number: int = source.key
                return leaves.get(number, given[number])
            return values[source.key] if source.kind == "value" else model.get_parameter(source.key)

        for step in tape.steps:
            tensors = iter([find(source) for source in step.sources])
            args, kwargs = map_tensors(lambda _, tensors=tensors: next(tensors), step.arguments)  # type: ignore[misc]
            if step.writes and step.sources[0].kind == "given":
                args = (args[0].clone(), *args[1:])  # leaves the batch unchanged
            out: Any = (model if step.function is None else step.function)(*args, **kwargs)
            values.update(enumerate([args[0]] if step.writes else tensors_in(out), step.first))
        return values[tape.loss]


class Recording(TorchFunctionMode):
    """Records tapes while the script runs.

    This is a separate mode, not an observer of a pass, since the script decides where its passes begin and end.

    Args:
        model: The model whose outputs and parameters are followed.

    Attributes:
        tapes: The complete tapes.
        batches: The batch of each tape.
        size: Size of the batches in bytes.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.tapes: list[Tape] = []
        self.batches: list[Batch] = []
        self.size = 0
        self._model = model  # keeps the parameters alive, so that their ids stay unique
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.clear()

    def start(self) -> None:
        """Start recording the calls of this thread."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Stop recording."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def clear(self) -> None:
        """Start a new tape."""
        self._steps: list[Step] = []
        self._count = 0
        self._values: dict[int, int] = {}
        self._given: dict[int, int] = {}
        self._tensors: list[Tensor] = []
        self._alive: list[Any] = []  # ids stay unique while this keeps the tensors alive
        self._unknown: set[int] = set()

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a torch function, and record the call if it takes a recorded result or a parameter."""
        kwargs = kwargs or {}
        if not torch.is_grad_enabled() or func == _READS_GRADIENT:
            return func(*args, **kwargs)
        if not any(id(t) in self._values or id(t) in self._names for t in tensors_in((args, kwargs))):
            return func(*args, **kwargs)
        taken = self.take(args, kwargs)
        out = func(*args, **kwargs)
        self.write(func, taken, args, out)
        return out

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Taken:
        """Read the arguments of a call before the call can change them."""
        sources: list[Source] = []

        def mark(tensor: Tensor) -> Tensor:
            sources.append(self._source(tensor))
            return torch.empty(0, device="cpu")

        return map_tensors(mark, (args, kwargs)), tuple(sources)

    def write(
        self, function: Callable[..., Any] | None, taken: Taken, args: tuple[Any, ...], out: Any
    ) -> None:
        """Record a finished call; without ``function``, a call of the model."""
        arguments, sources = taken
        writes = _writes(function) and bool(args) and isinstance(args[0], Tensor)
        found = [args[0]] if writes else tensors_in(out)
        if found:
            self._steps.append(Step(_portable(function), arguments, sources, self._count, len(found), writes))
            self._values.update((id(tensor), number) for number, tensor in enumerate(found, self._count))
            self._count += len(found)
            self._alive.append((args, out))

    def _source(self, tensor: Tensor) -> Source:
        if id(tensor) in self._values:
            return Source("value", self._values[id(tensor)])
        if id(tensor) in self._names:
            return Source("parameter", self._names[id(tensor)])
        if id(tensor) not in self._given:
            self._given[id(tensor)] = len(self._tensors)
            self._alive.append(tensor)
            self._tensors.append(tensor.detach().to("cpu", copy=True))
            if tensor.grad_fn is not None:
                self._unknown.add(self._given[id(tensor)])
        return Source("given", self._given[id(tensor)], tensor.is_leaf and tensor.requires_grad)

    def finish(self, loss: Tensor) -> str | None:
        """Complete the tape with the tensor that backward started from.

        Returns:
            Why the loss cannot be recomputed, or None.
        """
        number = self._values.get(id(loss))
        steps = () if number is None else _needed(self._steps, number)
        given = sorted({s.key for step in steps for s in step.sources if s.kind == "given"})
        if number is None or self._unknown.intersection(given) or all(s.function is not None for s in steps):
            self.clear()
            return "the loss is not computed from the outputs of one model by torch functions only"
        places = {old: new for new, old in enumerate(given)}
        self.batches.append((len(self.tapes), [self._tensors[i] for i in given]))
        self.size += sum(tensor.nbytes for tensor in self.batches[-1][1])
        self.tapes.append(Tape(tuple(_moved(step, places) for step in steps), number))
        self.clear()
        return None


def _needed(steps: Sequence[Step], loss: int) -> tuple[Step, ...]:
    """The steps that a value depends on, including in-place writes into their results."""
    kept, wanted = [], {loss}
    for step in reversed(steps):
        makes = range(step.first, step.first + step.count)
        if not wanted.isdisjoint(makes) or (step.writes and step.sources[0].kind == "value"):
            kept.append(step)
            wanted.update(source.key for source in step.sources if source.kind == "value")
    return tuple(reversed(kept))


def _moved(step: Step, places: dict[int, int]) -> Step:
    sources = tuple(s._replace(key=places[s.key]) if s.kind == "given" else s for s in step.sources)
    return dataclasses.replace(step, sources=sources)


def _writes(function: Any) -> bool:
    name: str = getattr(function, "__name__", "")
    inner = name.strip("_")
    if name == f"__{inner}__":  # x += y, x[i] = y
        return inner == "setitem" or (inner.startswith("i") and hasattr(Tensor, f"__{inner[1:]}__"))
    return name.endswith("_") and hasattr(Tensor, name)


@dataclass(frozen=True)
class _Attribute:
    """``tensor.T`` and the like, as a function that can be pickled."""

    name: str

    def __call__(self, tensor: Tensor) -> Any:
        return getattr(tensor, self.name)


def _portable(function: Any) -> Any:
    if isinstance(function, types.MethodWrapperType) and function.__name__ == "__get__":
        return _Attribute(function.__self__.__name__)  # type: ignore[attr-defined]
    return function
