"""Observe each floating result of torch's functions in a model, and its gradient, together with the module that made the call.

One run in eager mode is observed through ``TorchFunctionMode`` and module hooks. A result is named by its *site*: the module, the
function, and the index among the results of one call of the module. A model calls the same functions in any format, so the sites
of an fp32 run and of a low-format run are equal. Values inside one kernel are not visible: scores in fused attention, gates of an
LSTM, intermediate values of a custom autograd function.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from castwise.core import _torch
from castwise.core.casting.trees import tensors_in
from castwise.lab.passes.observers import Args, Call, Kwargs, Observer

Kind = Literal["weights", "activations", "gradients", "weight gradients", "updates"]

_NOT_COMPUTED: Final = frozenset({
    "to", "type", "type_as", "float", "double", "half", "bfloat16", "detach", "detach_", "requires_grad_", "__get__", "__set__",
    "empty_like", "full_like", "ones_like", "zeros_like", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros",
})  # fmt: skip
"""Functions whose results are not observed: they pass a value on, perhaps in another format, or create a tensor.

They include a plan's own casts, so these do not change the indices of other results.
"""
_BACKWARD: Final = frozenset({"backward", "grad"})
"""Functions inside which reentrant activation checkpointing may run forward code again."""
_IN_PYTHON: Final = frozenset({"torch.nn.functional", "torch.autograd"})
_GUARDS: Final = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


class Site(NamedTuple):
    """Identifies a tensor in every run of a model, by the code that computes or holds it.

    Attributes:
        path: Path of the module, empty for the model itself; of a shared module, the first of its paths.
        name: Name of the function or the parameter; for an input of a function or of the model, with the number of
            the input.
        number: Index among the results of one call of the module.
    """

    path: str
    name: str
    number: int = 0


Look = Callable[[Kind, Site, Tensor], None]
"""Called with each tensor and, when it is computed, each gradient; must change neither."""
AtCall = Callable[[list[tuple[Site, Tensor]], list[Tensor]], None]
"""Called with the floating inputs of each function and their sites, and its results."""


class Watch(Observer, TorchFunctionMode):
    """Observes the tensors that a model computes, and their gradients.

    A tensor is named by the torch function that computes it, since a model calls the same functions in every format, but not the
    same operators.

    Args:
        look: Called with each tensor.
        inputs: Which function inputs other than parameters to observe too; by default none. The model's own inputs
            are always observed.
        at_call: Called for each function, before ``look``.

    Attributes:
        parameters: Sites of the model's parameters, by ``id``.
    """

    def __init__(
        self,
        look: Look,
        inputs: Callable[[Site], bool] = lambda _site: False,
        at_call: AtCall | None = None,
    ) -> None:
        super().__init__()
        self._look, self._inputs, self._at_call = look, inputs, at_call
        self.parameters: dict[int, Site] = {}
        self._numbers: Counter[Call] = Counter()
        self._ends = contextlib.ExitStack()

    def modules(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Return all modules of the model, with their paths."""
        yield from model.named_modules()

    @contextlib.contextmanager
    def around(self, model: nn.Module) -> Iterator[None]:
        """Observe torch functions during the block, and the gradients of parameters at its end."""
        self.parameters = {id(parameter): site_of(name) for name, parameter in model.named_parameters()}
        self._numbers = Counter()
        with contextlib.ExitStack() as stack:
            self._ends = stack
            # compiled models run uncompiled: compiled code cannot be observed
            if _torch.dynamo.dynamo_loaded():
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(self)
            yield
        for name, parameter in model.named_parameters():
            if (gradient := parameter.grad) is not None:
                dense = _torch.tensors.dense_values(gradient.coalesce() if gradient.is_sparse else gradient)
                self._show("weight gradients", site_of(name), dense)

    def enter(self, call: Call, args: Args, kwargs: Kwargs) -> None:
        """Observe the inputs when the model itself is called."""
        if not call.path:
            for number, tensor in enumerate(tensors_in((args, kwargs))):
                if tensor.is_floating_point() or tensor.is_complex():
                    self._watch(Site("", f"input {number}"), tensor)

    def leave(self, call: Call, output: Any) -> None:
        """Observe a module's outputs that come from a user's autograd function, since no torch function returned them."""
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None and _torch.tensors.is_users_function(tensor.grad_fn):
                self._watch(self._next(call, "output"), tensor)

    def _next(self, call: Call, name: str) -> Site:
        """Return the :class:`Site` that names the next result of a module call."""
        self._numbers[call] += 1
        return Site(call.path, name, self._numbers[call] - 1)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function, and observe the results that it computes from floating tensors."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if (
            not (self.running or name in _BACKWARD)
            or name in _NOT_COMPUTED
            or _torch.dispatcher.in_transform()
        ):
            return func(*args, **kwargs)
        if (inner := _unguarded(func)) is not None:
            with self:
                return inner(*args, **kwargs)
        if not self.running:
            return func(*args, **kwargs)
        given = [t for t in tensors_in((args, kwargs)) if t.is_floating_point() or t.is_complex()]
        if not given:
            return func(*args, **kwargs)
        versions = {id(t): _torch.tensors.version(t) for t in given}
        out = func(*args, **kwargs)
        homes = {_home(t) for t in given}

        def is_new(tensor: Tensor) -> bool:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                return False
            if id(tensor) in versions:  # written in place, or passed on
                return _torch.tensors.version(tensor) != versions[id(tensor)]
            return _home(tensor) not in homes  # not a view

        results = [t for t in tensors_in(out) if is_new(t)]
        if results:
            self._see_call(self.running[-1], name, given, results)
        return out

    def _see_call(self, call: Call, name: str, given: list[Tensor], results: list[Tensor]) -> None:
        written = set(map(id, results))
        inputs = [
            (Site(call.path, f"input {number} of {name}", self._numbers[call]), tensor)
            for number, tensor in enumerate(given)
            if id(tensor) not in written
        ]
        if self._at_call is not None:
            with torch.no_grad(), _torch.tensors.outside_modes():
                self._at_call(inputs, results)
        for site, tensor in inputs:
            if not isinstance(tensor, nn.Parameter) and self._inputs(site):
                self._watch(site, tensor)
        for tensor in results:
            self._watch(self._next(call, name), tensor)

    def _watch(self, site: Site, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            return
        if _torch.autograd.graph_task_id() == -1:  # else it is a recomputation in backward
            self._show("activations", site, tensor)
        if tensor.requires_grad and torch.is_grad_enabled():

            def see(gradient: Tensor | None) -> None:
                # the gradient is None for an unused output of an operator of which another output is used
                if gradient is not None and gradient.layout is torch.strided:
                    self._show("gradients", site, gradient)

            handle = tensor.register_hook(see)
            if tensor.is_leaf:  # the user's tensor, which outlives the graph
                self._ends.callback(handle.remove)

    def _show(self, kind: Kind, site: Site, tensor: Tensor) -> None:
        with torch.no_grad(), _torch.tensors.outside_modes():
            self._look(kind, site, tensor.detach())


def site_of(parameter: str) -> Site:
    """Return the :class:`Site` that names a parameter, given the parameter's path in the model."""
    path, _, name = parameter.rpartition(".")
    return Site(path, name)


def _home(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, which is equal for its views; a unique number if it has no ordinary storage."""
    return (
        tensor.untyped_storage().data_ptr()
        if tensor.layout is torch.strided and tensor.numel()
        else -id(tensor)
    )


@functools.cache
def _unguarded(func: Any) -> Any:
    """Return a copy of a Python function of torch that does not check for active modes, so that its inner calls are observed.

    None is returned for a function that has no such check or is not one of torch's.
    """
    if not isinstance(func, FunctionType) or not (func.__module__ in _IN_PYTHON or func is Tensor.backward):
        return None
    if not any(name in func.__code__.co_names for name in _GUARDS):
        return None
    names = {**func.__globals__, **dict.fromkeys(_GUARDS, lambda *_: False)}
    inner = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    inner.__kwdefaults__ = func.__kwdefaults__
    return inner
