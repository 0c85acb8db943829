"""Records how a script computes its loss from the model's outputs, so that the computation can be repeated.

A script has no function ``loss(model, batch)``. Here, each iteration of its training loop becomes a :class:`Tape`: the calls of
the model and of torch functions that the loss depends on, in order. The tensors that neither the model nor a recorded call
produced are stored separately, as the batch. :class:`TapeLoss` is ``loss(model, batch)``, built from the tapes of all batches.
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
"""A recorded batch: the number of its :class:`Tape`, and the input tensors."""
_TENSOR: Any = Tensor
_READS_GRADIENT = _TENSOR.grad.__get__
Taken = tuple[tuple[tuple[Any, ...], dict[str, Any]], tuple["Source", ...]]
"""The arguments of a call, in which empty tensors replace all tensors, and the :class:`Source` of each replaced tensor."""


class Source(NamedTuple):
    """Where a tensor argument of a recorded call came from.

    Attributes:
        kind: ``value`` if an earlier recorded call returned the tensor, ``given`` if it belongs to the batch, and
            ``parameter`` if it is a parameter of the model.
        key: The number of the value, the index of the tensor in the batch, or the name of the parameter.
        is_leaf: Whether the tensor belongs to the batch and is a leaf that requires a gradient.
    """

    kind: str
    key: Any
    is_leaf: bool = False


@dataclass(frozen=True)
class Step:
    """A recorded call of the model or of a torch function.

    Attributes:
        function: The torch function, or None for the model.
        arguments: The positional and keyword arguments, in which empty tensors replace all tensors.
        sources: The source of each replaced tensor, in the order of :func:`~castwise.core.casting.trees.map_tensors`.
        first: The number given to the first tensor that the call returns, or to the tensor that the call changes in
            place. Further tensors have the numbers that follow.
        count: How many tensors the call returns or changes.
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
        loss: The number of the value from which backward started.
    """

    steps: tuple[Step, ...]
    loss: int


@dataclass(frozen=True)
class TapeLoss:
    """A callable ``loss(model, batch)`` that repeats the recorded computation of a batch's loss.

    Attributes:
        tapes: The tapes. A batch holds the index of its tape.
    """

    tapes: Sequence[Tape]

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the loss of a recorded batch with a model, which may be another model of the same structure."""
        tape, given = self.tapes[batch[0]], batch[1]
        # a leaf that requires a gradient must be the same tensor in all calls
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
                args = (args[0].clone(), *args[1:])  # so that the batch itself is not changed
            out: Any = (model if step.function is None else step.function)(*args, **kwargs)
            values.update(enumerate([args[0]] if step.writes else tensors_in(out), step.first))
        return values[tape.loss]


class Recording(TorchFunctionMode):
    """A torch function mode that records tapes while the script runs.

    castwise's usual observers cannot be used here: they observe a forward and backward pass that castwise itself runs.

    Args:
        model: The model. Calls that depend on its outputs or parameters are recorded.

    Attributes:
        tapes: The complete tapes.
        batches: The batch of each tape.
        size: The size of all batches in bytes.
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
        """Start recording the calls of torch functions on this thread."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Stop recording."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def clear(self) -> None:
        """Discard the unfinished tape and start a new tape."""
        self._steps: list[Step] = []
        self._count = 0
        self._values: dict[int, int] = {}
        self._given: dict[int, int] = {}
        self._tensors: list[Tensor] = []
        self._alive: list[Any] = []  # keeps the tensors alive, so that their ids stay unique
        self._unknown: set[int] = set()

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a torch function, and record the call if an argument is a parameter or the result of a recorded call."""
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
        """Return the arguments of a call as they are recorded, before the call can change them in place."""
        sources: list[Source] = []

        def mark(tensor: Tensor) -> Tensor:
            sources.append(self._source(tensor))
            return torch.empty(0, device="cpu")

        return map_tensors(mark, (args, kwargs)), tuple(sources)

    def write(
        self, function: Callable[..., Any] | None, taken: Taken, args: tuple[Any, ...], out: Any
    ) -> None:
        """Record a finished call of ``function`` or, if that is None, of the model."""
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
        """Complete the tape of an iteration, given the loss from which backward started, and start a new tape.

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
    """Return the recorded calls that a value depends on, including calls that change their results in place."""
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
    """A function that reads an attribute of a tensor, such as ``T``, and that can be pickled."""

    name: str

    def __call__(self, tensor: Tensor) -> Any:
        return getattr(tensor, self.name)


def _portable(function: Any) -> Any:
    if isinstance(function, types.MethodWrapperType) and function.__name__ == "__get__":
        return _Attribute(function.__self__.__name__)  # type: ignore[attr-defined]
    return function
