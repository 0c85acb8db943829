"""Private API of tensors: operations on many tensors at once, memory, layouts, version counters and dispatch modes."""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FrameType
from typing import Any, Generic, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.stateless import _functional_call
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from castwise.core._torch.dispatcher import in_transform
from castwise.core._torch.operators import OpOverload

_T = TypeVar("_T")
dynamo_callback: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback
"""Returns None or False, unless this thread is running inside a call that torch.compile handles."""
_set_grad_enabled = torch._C._set_grad_enabled
_is_grad_enabled = torch.is_grad_enabled


def living(*kinds: type) -> list[Any]:
    """Return the instances of some classes and of their subclasses that are alive in this process.

    ``gc.get_objects`` would take a reference to every object of the process. While other threads run, that can break them: a
    tuple that another thread is building cannot be extended then (SystemError). So only what refers to these classes is asked for.
    """
    found: dict[type, None] = {}
    to_do = [*kinds]
    while to_do:
        kind = to_do.pop()
        if kind not in found:
            found[kind] = None
            to_do += type.__subclasses__(kind)
    # isinstance would call into proxies, which answer with warnings
    return [thing for thing in gc.get_referrers(*found) if type(thing) in found]


def without_grad(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function as under ``torch.no_grad()``, but a microsecond faster than with the context manager."""
    was = _is_grad_enabled()
    try:
        _set_grad_enabled(False)
        return function(*args)
    finally:
        _set_grad_enabled(was)


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source into the corresponding target and cast it to the target's dtype.

    This takes as few kernels as the device allows.
    """
    if targets:
        torch._foreach_copy_(targets, sources)


@torch.no_grad()
def multiply_each(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply each tensor in place by a 0-dim tensor on the same device, in as few kernels as possible."""
    torch._foreach_mul_(tensors, factor)


# torch's foreach operations: on lists of tensors of one device, fastest if all have one dtype
each_add_ = torch._foreach_add_
each_addcmul_ = torch._foreach_addcmul_
each_div = torch._foreach_div
each_div_ = torch._foreach_div_
each_mul_ = torch._foreach_mul_
each_norm = torch._foreach_norm
each_sqrt_ = torch._foreach_sqrt_
each_sub = torch._foreach_sub
_version_of = operator.attrgetter("_version")


def versions(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """Return autograd's version counter of each tensor, which says how often the tensor was written in place.

    For None the result is -1. The counter misses writes through ``.data`` and writes by torch's fused optimizers.
    """
    try:
        return [*map(_version_of, tensors)]
    except AttributeError:  # one of the tensors is None
        return [-1 if tensor is None else _version_of(tensor) for tensor in tensors]


def version(tensor: torch.Tensor) -> int:
    """Return the version counter of one tensor, as in :func:`versions`, or 0 for an inference tensor, which has none."""
    if torch.compiler.is_compiling():  # Dynamo cannot trace is_inference
        return int(tensor._version)
    return 0 if tensor.is_inference() else int(tensor._version)


class _Key(weakref.ref[torch.Tensor]):
    """A weak reference to a key of :class:`OfTensors`, with the ``id`` of the key."""

    __slots__ = ("number",)
    number: int


class OfTensors(Generic[_T]):
    """A dictionary with tensors as keys, by identity, that does not keep its keys alive.

    It is torch's ``WeakTensorKeyDictionary`` with fewer methods. A look-up creates no reference, which makes it five
    times as fast: models have many parameters, and each is looked up often.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[_Key, _T]] = {}
        alive = weakref.ref(self)

        def gone(key: Any) -> None:
            this = alive()
            entry = None if this is None else this._entries.get(key.number)
            if this is not None and entry is not None and entry[0] is key:
                del this._entries[key.number]

        self._gone = gone

    def __len__(self) -> int:
        return len(self._entries)

    def __setitem__(self, tensor: torch.Tensor, value: _T) -> None:
        entry = self._entries.get(id(tensor))
        if entry is None or entry[0]() is not tensor:
            key = _Key(tensor, self._gone)
            key.number = id(tensor)
        else:
            key = entry[0]
        self._entries[id(tensor)] = key, value

    def get(self, tensor: torch.Tensor, otherwise: Any = None) -> Any:
        """Return the value of a tensor, or ``otherwise`` if it has none."""
        entry = self._entries.get(id(tensor))
        return otherwise if entry is None or entry[0]() is not tensor else entry[1]

    def pop(self, tensor: torch.Tensor) -> None:
        """Remove a tensor, if it is there."""
        if tensor in self:
            self._entries.pop(id(tensor), None)

    def holds_any(self, numbers: Collection[int]) -> bool:
        """Whether one of the tensors that live at these ids has a value."""
        return not self._entries.keys().isdisjoint(numbers)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        entry = self._entries.get(id(tensor))
        return entry is not None and entry[0]() is tensor


class WeakMemory:
    """A weak reference to a tensor's memory, with its version counter."""

    def __init__(self, tensor: torch.Tensor) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._where = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._writes = tensor.detach()  # it shares the version counter with everything detached from it
        self._writes.data = self._writes.new_empty(0)

    @property
    def version(self) -> int:
        """The tensor's version counter, as :func:`version` returns it."""
        return int(self._writes._version)

    def tensor(self) -> torch.Tensor | None:
        """Return a new tensor with the referenced memory and its shape and strides, or None if the memory was freed."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        return None if storage is None else self._writes.new_empty(0).set_(storage, *self._where)


def counted_alias(data: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """Return a tensor that shares the memory of ``data`` and the version counter of ``counter``.

    So in-place writes to the returned tensor raise the version of ``counter``. No operator is called that a dispatch
    mode could intercept.
    """
    alias: Any = torch.Tensor._make_subclass(torch.Tensor, counter)
    _set_data(alias, data)
    return alias  # type: ignore[no-any-return]


def assign(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Set ``tensor.data = values``, whether or not either was made in inference mode.

    Torch refuses an unlike pair on devices that its list of dense backends lacks, such as all of ``PrivateUse1``. On
    other devices, ``tensor`` would become an inference tensor.
    """
    if values.is_inference() is not tensor.is_inference():
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            values = values.clone()
    tensor.data = values


def below_torch_function(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Call ``function`` as if no argument had a ``__torch_function__`` of its own."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def refuse_inlining(function: Callable[..., Any]) -> None:
    """Make Dynamo break the graph at calls of ``function``, even if Dynamo has already compiled the function.

    For hooks, :func:`never_trace` suffices.
    """
    from torch._dynamo.eval_frame import skip_code

    never_trace(function, "castwise synchronises masters and parameters")
    skip_code(function.__code__)


def never_trace(function: Any, why: str = "castwise's GradScaler runs outside of compiled graphs") -> None:
    """Make Dynamo run ``function`` uncompiled, as ``torch.compiler.disable`` does.

    ``torch.compiler.disable`` itself imports Dynamo and wraps the function, which would slow every call in eager mode.
    """
    function._torchdynamo_disable, function._torchdynamo_disable_msg = True, why


def safe_softmax(scores: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the softmax of ``scores``, with 0 instead of NaN in rows of only ``-inf``, as masked attention needs."""
    return torch._safe_softmax(scores, dim)


def memory_of(tensor: torch.Tensor) -> StorageWeakRef:
    """Return a dictionary key for a tensor's memory.

    Views of one tensor have equal keys. Memory that is allocated later never has an equal key.
    """
    return StorageWeakRef(tensor.untyped_storage())


@functools.cache
def is_view(op: OpOverload) -> bool:
    """Whether an operator returns a view of its arguments without writing to it."""
    aliases = [result.alias_info for result in op._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


@functools.cache
def written_arguments(op: OpOverload) -> tuple[tuple[int, str], ...]:
    """Return the position and the name of each argument that an operator writes to.

    The position is -1 for keyword-only arguments.
    """
    return tuple(
        (-1 if argument.kwarg_only else at, argument.name)
        for at, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


class OperatorMode(TorchDispatchMode):
    """A mode that calls ``run(op, args, kwargs)`` in place of every ATen operator, also in the backward pass.

    It intercepts operators after autocast has cast their inputs. The mode is off while ``run`` runs.
    """

    def __init__(self, run: Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._run(func, args, kwargs or {})


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """Hide the operators inside a ``with`` block from every active ``torch_function`` and ``torch_dispatch`` mode."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def outside_dispatch_modes(function: Callable[..., _T], *args: Any) -> _T:
    """Call a function with all modes that intercept operators disabled.

    Without such a mode, this costs almost nothing.
    """
    if torch._C._len_torch_dispatch_stack() == 0:
        return function(*args)
    with outside_modes():
        return function(*args)


def outside_transforms(function: Callable[[], _T]) -> _T:
    """Call a function as if outside of every transform of ``torch.func``.

    So tensors that the function creates stay valid when the transform has ended.
    """
    if not in_transform():
        return function()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        return function()


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a wrapper that a transform of ``torch.func`` made, such as ``vmap``."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_tracing() -> bool:
    """Whether ``torch.jit.trace`` is recording operators now."""
    return torch._C._get_tracing_state() is not None


def is_stand_in_call() -> bool:
    """Whether ``torch.jit.trace`` is recording, or a module is being called by ``torch.func.functional_call``."""
    if is_tracing():
        return True
    frame: FrameType | None = sys._getframe()
    for _ in range(24):  # at most 24 Python frames are between functional_call and a hook of the module
        if frame is None or frame.f_code is _functional_call.__code__:
            return frame is not None
        frame = frame.f_back
    return False


def is_users_function(node: Any) -> bool:
    """Whether an autograd node is the backward of a ``torch.autograd.Function`` that is defined outside of torch."""
    return isinstance(node, torch.autograd.function.BackwardCFunction) and not (
        node._forward_cls.__module__.startswith("torch.")  # type: ignore[attr-defined]
    )


def dense_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the stored values of a tensor of any layout as a dense tensor.

    A dense tensor is returned unchanged. Values of sparse and nested tensors are neither copied nor coalesced. A
    tensor in a oneDNN layout is copied.
    """
    if is_dense(tensor):
        return tensor
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    return tensor.to_dense() if tensor.is_mkldnn else tensor.values()


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided. Sparse tensors, nested tensors and tensors in a oneDNN layout are not."""
    return tensor.layout is torch.strided and not tensor.is_nested


def to_dense(tensor: torch.Tensor) -> torch.Tensor:
    """Convert a tensor of any layout to a dense tensor, with zeros where a sparse tensor stores nothing.

    For a nested tensor, only the stored values are returned.
    """
    if is_dense(tensor):
        return tensor
    return tensor.values() if tensor.is_nested else tensor.to_dense()


_set_data: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # also where a subclass has a property data
