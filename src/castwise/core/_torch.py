"""The only home of private or version-dependent torch API.

Every function here wraps one thing that PyTorch does not offer in public, says what it relies on, and is covered
by a test that would fail if a release changed it. Written against the releases that :mod:`castwise.core.session.canary` names, which
has self-checks for others.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import gc
import heapq
import itertools
import math
import operator
import re
import sys
import threading
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch.library import Library, get_kernel
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrizations
from torch.nn.utils.stateless import _functional_call
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")

_EXACT: dict[Any, torch.dtype] = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}
NUMBERS: tuple[Any, ...] = tuple(_EXACT)
"""Types of Python's numbers."""
NORM_PARAMETRIZATIONS = (parametrizations._WeightNorm, parametrizations._SpectralNorm)
"""torch's own parametrizations that low kernels compute well."""

AUTOCAST_KEYS: dict[str, str] = {
    "cpu": "AutocastCPU",
    "cuda": "AutocastCUDA",
    "xpu": "AutocastXPU",
    "mps": "AutocastMPS",
}
"""Dispatch key on which each device type's autocast kernels are registered."""


# --- the dispatcher -----------------------------------------------------------------------------------------


def autocast_registrations(device_type: str) -> frozenset[str]:
    """Operators (``aten::exp.out`` style) that have an autocast kernel of their own on a device type."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(AUTOCAST_KEYS[device_type])
    return frozenset(names)


def is_dispatched(op: torch._ops.OpOverload) -> bool:
    """Whether the overload goes through the dispatcher; a few (``einsum.sublist``) exist for TorchScript alone."""
    return bool(torch._C._dispatch_has_kernel(op.name()))


def native_autocast_call(op: torch._ops.OpOverload, device_type: str) -> Callable[..., Any]:
    """What the dispatcher runs today for ``op`` on the autocast key: call it as ``f(keyset, *args, **kwargs)``.

    For an operator that torch lists this is torch's own casting kernel. For any other the key is a fallthrough,
    whose kernel object cannot be called, so the call goes on below the key; the thread-local state stays on, as
    it does in torch, so that operators inside a composite one are still autocast.
    """
    key = AUTOCAST_KEYS[device_type]
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key):
        call: Callable[..., Any] = get_kernel(op, key).call_boxed
        return call
    return below_autocast_call(op, device_type)


def below_autocast_call(op: torch._ops.OpOverload, device_type: str) -> Callable[..., Any]:
    """Run ``op`` below the autocast key, as torch does with an operator it does not list.

    Called as ``f(keyset, *args, **kwargs)``. Operators inside a composite one are still autocast.
    """
    key = AUTOCAST_KEYS[device_type]
    below = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, key))
    redispatch = op.redispatch
    # In `x * 2` the dispatcher carries the 2 as a tensor that is marked as a number and hands it to Python as a
    # number, which redispatch refuses. Calling such an operator anew with the key off takes it, and is the same:
    # those that take numbers for tensors are plain arithmetic, without autocast operators inside.
    tensors = [i for i, arg in enumerate(op._schema.arguments) if i > 0 and str(arg.type) == "Tensor"]

    def fallthrough(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        for index in tensors:
            if index < len(args) and isinstance(args[index], NUMBERS):
                torch.set_autocast_enabled(device_type, False)
                try:
                    return op(*args, **kwargs)
                finally:
                    torch.set_autocast_enabled(device_type, True)
        return redispatch(keyset & below, *args, **kwargs)

    return fallthrough


def inside_operator() -> bool:
    """Whether an operator that runs now is called by the kernel of another, below autograd.

    In inference mode, and at the lower levels of a transform, autograd is off everywhere, and the answer is no.
    """
    return (
        torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)
        and not torch.is_inference_mode_enabled()
        and not in_transform()
    )


def register_autocast_kernel(
    op: torch._ops.OpOverload, device_type: str, kernel: Callable[..., Any]
) -> Callable[[], None]:
    """Put ``kernel(keyset, *args, **kwargs)`` in front of ``op`` on the autocast key; returns what undoes it."""
    return _register(op, kernel, AUTOCAST_KEYS[device_type])


def _register(op: torch._ops.OpOverload, kernel: Callable[..., Any], key: str) -> Callable[[], None]:
    library = Library(op.namespace, "IMPL")
    with warnings.catch_warnings():
        # torch says once per process that a kernel of its own is overridden, which is what we are here to do.
        warnings.simplefilter("ignore", UserWarning)
        library.impl(op, kernel, key, with_keyset=True, allow_override=True)
    return library._destroy


def _tensors(op: torch._ops.OpOverload) -> list[int]:
    """Which positional arguments of ``op`` are tensors and nothing else."""
    arguments = op._schema.arguments
    return [
        i
        for i, argument in enumerate(arguments)
        if str(argument.type) == "Tensor" and not argument.kwarg_only
    ]


def number_places(op: torch._ops.OpOverload) -> Sequence[int]:
    """Where ``op`` may be handed a number in place of a tensor that it cannot be called anew with.

    Of several tensors the dispatcher hands one that stands for a number (``x % 2``, ``2 ** x``) to Python as the number.
    Arithmetic can be called with it, but for the first (``1 - x``); other operators cannot.
    """
    places = _tensors(op)
    if len(places) < 2:
        return ()
    return places[:1] if op._schema.name.removeprefix("aten::") in NUMBERS_FOR_TENSORS else places


def register_in_front_of_transforms(
    op: torch._ops.OpOverload, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Put a kernel in front of ``op`` where transforms of torch.func are active, before any of them has seen the call.

    ``make`` takes what runs there today and returns the kernel, both called as ``f(keyset, *args, **kwargs)``.
    While one kernel is there, no other may be put in front of the operator. Returns what undoes it.
    """
    return _register(op, make(_taking_numbers(op, get_kernel(op, _TRANSFORMS).call_boxed)), _TRANSFORMS)


_TRANSFORMS = "FuncTorchDynamicLayerFrontMode"
_ARITHMETIC = ("add", "sub", "mul", "div", "subtract", "multiply", "divide", "true_divide", "floor_divide")
NUMBERS_FOR_TENSORS = (*_ARITHMETIC, *(f"{name}_" for name in _ARITHMETIC))
"""Arithmetic that takes numbers, and needs a kernel in front of transforms while any kernel in Python is registered.

A transform wraps the tensor that stands for a number, and the tangents of such tensors; the dispatcher then fails to make
a number of them for Python ("Cannot access data pointer"). In front of all transforms it still is a number. The names are
those of ``should_allow_numbers_as_tensors`` in torch/csrc/utils/python_arg_parser.cpp.
"""


def _taking_numbers(op: torch._ops.OpOverload, go_on: Callable[..., Any]) -> Callable[..., Any]:
    """Hand on 0-dim tensors in place of numbers, which promote as the numbers do."""
    places = _tensors(op)

    def front(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(args[i], NUMBERS) for i in places):
            return with_tensors(lambda *given: go_on(keyset, *given, **kwargs), args, places)
        return go_on(keyset, *args, **kwargs)

    return front


def with_tensors(
    call: Callable[..., torch.Tensor], args: Sequence[Any], places: Sequence[int]
) -> torch.Tensor:
    """Call an elementwise operator with 0-dim tensors in place of the numbers at ``places``, which promote as they do."""
    other = next(arg for arg in args if isinstance(arg, torch.Tensor))
    if other.dim() == 0:  # a 0-dim tensor would count as much as this one
        lifted = other.unsqueeze(0)
        out = with_tensors(call, [lifted if arg is other else arg for arg in args], places)
        return other if out is lifted else out.squeeze(0)
    given = list(args)
    for place in places:
        value = given[place]
        if not isinstance(value, NUMBERS):
            continue
        dtype = torch.result_type(other, value)
        if dtype is other.dtype:  # which the number does not decide, so that it may keep all its digits
            dtype = next(exact for kind, exact in _EXACT.items() if isinstance(value, kind))
        given[place] = torch.full((), value, dtype=dtype, device="cpu")
    return call(*given)


in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether this thread is inside a transform of torch.func, whose tensors belong to it."""


# --- autograd -----------------------------------------------------------------------------------------------


def graph_task_id() -> int:
    """Number of the backward pass that this thread is executing, or -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def sequence_number() -> int:
    """The number that the next autograd node made on this thread will get."""
    return int(torch._C._autograd._get_sequence_nr())


def running_node_number() -> int | None:
    """The number of the autograd node that this thread is executing, or None outside of backward."""
    node = torch._C._current_autograd_node() if torch._C._current_graph_task_id() != -1 else None
    return None if node is None else int(node._sequence_nr())


def running_node() -> tuple[str, int] | None:
    """Name and number of the autograd node that this thread is executing, or None outside of backward.

    Nodes that add up gradients of leaves have the largest number there is.
    """
    node = torch._C._current_autograd_node() if torch._C._current_graph_task_id() != -1 else None
    return None if node is None else (node.name(), int(node._sequence_nr()))


def failed_node(loss: torch.Tensor, error: BaseException, seconds: float) -> Any:
    """The node of a graph whose backward raised an error: each that has not run is run once more by itself, on zeros.

    Called by itself a node computes its formula and nothing else: no hook runs and no ``.grad`` is written. Nodes that would run
    somebody's code are left out: those in Python, and those whose tensors a hook brings back, as checkpointing does. The
    engine takes the newest node first, and so does this.

    Returns:
        The node; None where none raises the error that is reached in so many seconds of this thread's work.
    """
    from torch.autograd.function import BackwardCFunction

    seen: set[Any] = set()
    waiting: list[tuple[int, int, Any]] = []

    def add(node: Any) -> None:
        if node is not None and node not in seen and hasattr(node, "_sequence_nr"):
            seen.add(node)
            heapq.heappush(waiting, (-node._sequence_nr(), len(seen), node))

    add(loss.grad_fn)
    until = time.thread_time() + seconds
    while waiting and time.thread_time() < until:
        node = heapq.heappop(waiting)[2]
        for below, _ in node.next_functions:
            add(below)
        if isinstance(node, BackwardCFunction) or type(node).__name__ == "AccumulateGrad":
            continue
        try:
            if _brings_back(node):
                continue
            node(*[torch.zeros(m.shape, dtype=m.dtype, device=m.device) for m in node._input_metadata])
        except Exception as again:
            if type(again) is type(error) and str(again).partition("\n")[0] == str(error).partition("\n")[0]:
                return node
    return None


def _brings_back(node: Any) -> bool:
    """Whether a hook brings back a tensor that a node has saved; raises where the node has run."""
    saved = [getattr(node, name) for name in dir(node) if name.startswith("_raw_saved_")]
    tensors = [each for one in saved for each in (one if isinstance(one, (tuple, list)) else (one,))]
    return any(getattr(tensor, "unpack_hook", True) is not None for tensor in tensors)


def forward_of(node: Any) -> Iterator[tuple[OpOverload, dict[str, Any]]]:
    """The operators that may have made a node, with the arguments that it keeps; zeros stand for tensors that it does not."""
    letters = re.sub(r"Backward\d*$", "", type(node).__name__).lower()
    names = {name.removeprefix("aten::").partition(".")[0] for name in operator_names("aten")}
    for name in sorted(name for name in names if name.replace("_", "") == letters and not name.endswith("_")):
        packet = getattr(torch.ops.aten, name)
        for overload in map(packet.__getattr__, packet.overloads()):
            if overload_kind(overload) == "functional":
                yield overload, _arguments_of(node, overload)


def _arguments_of(node: Any, overload: OpOverload) -> dict[str, Any]:
    arguments = overload._schema.arguments
    tensors = [argument.name for argument in arguments if str(argument.type) == "Tensor"]
    edges = (
        dict(zip(tensors, node.next_functions, strict=True))
        if len(node.next_functions) == len(tensors)
        else {}
    )
    given = {}
    for argument in arguments:
        kept = getattr(node, f"_saved_{argument.name}", None)
        if kept is not None:
            given[argument.name] = kept.detach() if isinstance(kept, torch.Tensor) else kept
        elif argument.name in tensors:
            below, index = edges.get(argument.name, (None, 0))
            like = node._input_metadata[0] if below is None else below._input_metadata[index]
            shape = getattr(node, f"_saved_{argument.name}_sym_sizes", like.shape)
            given[argument.name] = torch.zeros(tuple(shape), dtype=like.dtype, device=like.device)
        if edges.get(argument.name, (None, 0))[0] is not None:
            given[argument.name].requires_grad_()
    return given


ENGINE_CODE = torch.autograd.graph._engine_run_backward.__code__
"""Of the Python function that every backward pass is called by."""


def backward_of_scalar(loss: torch.Tensor) -> None:
    """``loss.backward()`` for a loss that is known to be a scalar tensor: straight to the engine.

    ``torch.autograd.backward`` spends some microseconds on asking what kinds of outputs and gradients it was given.
    """
    if type(loss) is not torch.Tensor or torch.compiler.is_compiling():
        torch.autograd.backward(loss)
        return
    torch.autograd.graph._engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def leaves_below(outputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], bool]:
    """The tensors that a backward from some outputs leaves gradients on.

    Returns:
        They, and whether there may be others that the graph does not show, since it is made again in backward.
    """
    found = [output for output in outputs if output.grad_fn is None and output.requires_grad]
    waiting: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen, hides = set(waiting), False
    while waiting:
        node = waiting.pop()
        kind = type(node).__name__
        if kind == "AccumulateGrad":
            found.append(node.variable)
        hides = hides or kind == "CheckpointFunctionBackward"
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)
    return found, hides


_PRODUCTS = re.compile(
    r"[Mm]m(?=[A-Z])|[Mm]v(?=B)|Addr(?=B)|Conv(?!ert)|(?<!Upsample)Linear|[Dd]ot|^Trilinear|Rnn|Lstm|Gru|Attention"
)
_VIEWS = re.compile(
    r"^(T|View|UnsafeView|ReshapeAlias|Alias|Clone|Transpose|Permute|Expand|Unsqueeze|Squeeze|Slice|Select|Split\w*|Unbind)Backward"
)


def uses_of_leaves(
    outputs: Sequence[torch.Tensor],
) -> tuple[list[tuple[torch.Tensor, list[Any], list[Any]]], bool]:
    """The leaves that a backward from some outputs reaches.

    Returns:
        Each with the autograd nodes that it went into, and the products among them of it, or of a view of it, with anything but
        itself, as weights have in penalties. And whether somebody's own code in Python is there, which may run what the graph does not show.
    """
    waiting: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    above: dict[Any, list[Any]] = {node: [] for node in waiting}
    leaves: list[Any] = []
    while waiting:
        node = waiting.pop()
        for below, _ in node.next_functions:
            if below is None:
                continue
            if below not in above:
                above[below] = []
                (leaves if type(below).__name__ == "AccumulateGrad" else waiting).append(below)
            above[below].append(node)

    def viewed(node: Any) -> Any:
        while _VIEWS.match(type(node).__name__):
            node = node.next_functions[0][0]
        return node

    def products(nodes: Sequence[Any]) -> Iterator[Any]:
        for node in nodes:
            name = type(node).__name__
            if _VIEWS.match(name):
                yield from products(above[node])
            elif _PRODUCTS.search(name) and not isinstance(node, torch.autograd.function.BackwardCFunction):
                given = [viewed(below) for below, _ in node.next_functions if below is not None]
                if len(given) == 1 or any(each is not given[0] for each in given):
                    yield node

    found = [(leaf.variable, above[leaf], list(products(above[leaf]))) for leaf in leaves]
    return found, any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in above)


def node_number(node: Any) -> int:
    """Of an autograd node, as :func:`sequence_number` counts them."""
    return int(node._sequence_nr())


def makes(node: Any) -> tuple[torch.dtype, int]:
    """Dtype and number of dimensions of what the operator of an autograd node has made."""
    made = node._input_metadata[0]
    return made.dtype, len(made.shape)


def casts_to(node: Any, dtype: torch.dtype) -> bool:
    """Whether an autograd node is that of a cast to ``dtype``."""
    return type(node).__name__ == "ToCopyBackward0" and makes(node)[0] is dtype


def hides_operators(node: Any) -> bool:
    """Whether an autograd node stands for operators that it does not show: code that AOTAutograd has compiled, DataParallel's copies."""
    return type(node).__name__ in ("CompiledFunctionBackward", "BroadcastBackward")


_around_backward: tuple[Callable[..., Any], ...] = ()
_ENGINE: Any = torch.autograd.Variable._execution_engine


def around_backward(run: Callable[..., Any]) -> Callable[[], None]:
    """Run every backward pass by ``run``: ``backward``, ``autograd.grad`` and torch.func's, which share one engine.

    torch hands the state of the calling thread on to the engine, that of autocast too, and looks the engine up each time.

    Args:
        run: Called with the engine's function and all that it is to be called with: outputs, gradients of outputs and so on.

    Returns:
        What undoes it.
    """
    global _around_backward
    home: Any = torch.autograd.Variable
    _around_backward = (*_around_backward, run)
    home._execution_engine = _Engine()

    def undo() -> None:
        global _around_backward
        _around_backward = tuple(other for other in _around_backward if other is not run)
        if not _around_backward:
            home._execution_engine = _ENGINE

    return undo


class _Engine(type(_ENGINE)):  # type: ignore[misc]
    """The engine, with what is around it."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        call = _ENGINE.run_backward
        for run in _around_backward:
            call = functools.partial(run, call)
        return call(*args, **kwargs)


def around_python_backward(enter: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    """Call ``enter`` before, and what it returns after, the backward of each autograd Function written in Python.

    Functions of torch itself and of castwise are left out: they set up by themselves what they run in. The engine looks
    ``apply`` up on the class of the node each time.

    Returns:
        What undoes it.
    """
    base: Any = torch.autograd.function.BackwardCFunction
    original = base.apply

    def apply(node: Any, *args: Any) -> Any:
        if getattr(node, "_forward_cls", base).__module__.partition(".")[0] in ("torch", "castwise"):
            return original(node, *args)
        leave = enter()
        try:
            return original(node, *args)
        finally:
            leave()

    base.apply = apply

    def undo() -> None:
        base.apply = original

    return undo


def is_returned(leaf: torch.Tensor) -> bool:
    """Whether the backward pass that is running returns a leaf's gradient, as ``torch.autograd.grad`` does, and adds it nowhere."""
    if not leaf.requires_grad:
        return False
    try:
        torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(leaf).node)
    except RuntimeError as error:
        return "autograd.grad()" in str(error)
    return False


def on_graph_task_end(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward pass that is running now has finished (not when it fails)."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# --- Dynamo -------------------------------------------------------------------------------------------------

_SPARE_DEVICES = {device: torch.get_autocast_dtype(device) for device in ("maia", "hpu", "ipu")}
_SPARE_DTYPES = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
MAX_GUARD_CODE = len(_SPARE_DTYPES) ** len(_SPARE_DEVICES) - 1
_thread = threading.local()


def set_guard_code(code: int) -> None:
    """Mark this thread with ``code`` (0: none) in a place that Dynamo guards.

    Dynamo's global guard compares the autocast state of every device type that torch knows, dtypes included where
    autocast is enabled. Enabled on device types that no one has (maia, hpu, ipu), the dtypes can carry a number
    that makes Dynamo recompile when the precision plan changes, at the cost of a few thread-local writes. No
    tensor is on such a device, so no operator sees it. There is no public hook for a guard of one's own.
    """
    if code == getattr(_thread, "guard_code", 0):
        return
    _thread.guard_code = code
    for device, default in _SPARE_DEVICES.items():
        torch.set_autocast_enabled(device, code > 0)
        torch.set_autocast_dtype(device, _SPARE_DTYPES[code % len(_SPARE_DTYPES)] if code else default)
        code //= len(_SPARE_DTYPES)


def compiled_code_sees(change: Callable[[], None]) -> bool:
    """Whether code that was compiled before a change of the process's state is compiled anew after it."""
    guard = torch._C._dynamo.guards.GlobalStateGuard()
    before = guard.check()
    change()
    return before and not guard.check()


_skipped: set[str] = set()


def skip_modules(prefixes: tuple[str, ...]) -> None:
    """Tell Dynamo never to compile functions of these modules as frames of their own; it may still inline them.

    Where Dynamo gives a frame up (a graph break inside a block), the frame runs in plain Python and Dynamo looks at
    each function that it calls. Hooks and context managers that change thread state must then run for real. Modules
    that are not loaded yet are passed over until the next call.
    """
    from torch._dynamo.eval_frame import skip_code

    def skip(code: CodeType) -> None:
        skip_code(code)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                skip(constant)

    def visit(owner: Any, module: str) -> None:
        for value in list(vars(owner).values()):
            inner = getattr(value, "fget", None) or getattr(value, "__wrapped__", None) or value
            function = getattr(inner, "__func__", inner)
            if getattr(function, "__module__", None) != module:
                continue
            if isinstance(function, FunctionType):
                skip(function.__code__)
            elif isinstance(value, type) and value is not owner:
                visit(value, module)

    for name in [name for name in sys.modules if name.startswith(prefixes) and name not in _skipped]:
        if any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes):
            _skipped.add(name)
            visit(sys.modules[name], name)


def graph_function(function: _F) -> _F:
    """Let Dynamo put calls of ``function`` into its graph as they are: it runs whenever the graph is traced."""
    torch.fx.node.has_side_effect(function)
    return torch.compiler.allow_in_graph(function)  # type: ignore[no-any-return]


def mark_constant(function: Callable[..., Any]) -> None:
    """Let Dynamo call ``function`` while it traces and keep the result as a constant.

    The public ``torch.compiler.assume_constant_result`` sets the same mark but imports Dynamo to do so.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


TRACES_IDENTITY = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Whether Dynamo traces ``id`` and ``is`` of containers; that of torch 2.11 does not."""


def object_at(address: int) -> Any:
    """The living object whose ``id`` this is. Dynamo traces ``id``, and guards that it stays the same."""
    return ctypes.cast(address, ctypes.py_object).value


def set_autocast_attributes(
    block: torch.autocast, device_type: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool
) -> None:
    """Give a subclass's instance the attributes of ``torch.autocast``."""
    block.device, block.fast_dtype = device_type, dtype
    block._enabled, block._cache_enabled = enabled, cache_enabled


def custom_backend_name() -> str:
    """What torch calls the device type that a library outside of it may bring; an attribute of ``torch.autocast``."""
    return str(torch._C._get_privateuse1_backend_name())


def trace_context(cls: type, as_torchs: Callable[[Any], bool]) -> None:
    """Have Dynamo trace the methods of instances of ``cls`` that were made outside of what it compiles.

    It would replace all of them, as instances of a subclass of ``torch.autocast``, by torch's own; now only those
    of which ``as_torchs`` says that this is right.
    """
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.variables import ctx_manager
    from torch._dynamo.variables.builder import VariableBuilder

    class Reentrant(ctx_manager.AutocastModeVariable):
        """Torch's keeps what to restore in itself and can be entered once at a time: one of it for each entry."""

        initial_values: Any

        def enter(self, tx: Any) -> Any:
            self.initial_values.append(ctx_manager.AutocastModeVariable(self.target_values))
            return self.initial_values[-1].enter(tx)

        def exit(self, tx: Any, *args: Any) -> Any:
            return self.initial_values.pop().exit(tx, *args)

    def build(builder: Any, value: Any) -> Any:
        builder.install_guards(GuardBuilder.ID_MATCH)
        if as_torchs(value):
            state = [value.device, value.fast_dtype, value._enabled, value._cache_enabled]
            return Reentrant(state, [], source=builder.source)
        return ctx_manager.GenericContextWrappingVariable(value, source=builder.source)

    for with_numpy in (True, False):
        VariableBuilder._type_dispatch_impl(with_numpy)[cls] = build


def before_compiled_calls(callback: Callable[[], object]) -> None:
    """Have ``callback`` called before each call of what Dynamo is compiling at the moment, outside of its graph.

    Guards are what runs then, so it is called by one that always holds. There is no public hook for it.
    """
    from torch._dynamo.guards import install_guard
    from torch._dynamo.source import GlobalStateSource
    from torch._guards import Guard

    def holds(_: Any) -> bool:
        callback()
        return True

    def add(builder: Any, guard: Guard) -> None:
        builder.guard_manager.root.add_lambda_guard(holds, [f"{callback!r} was called"], guard.user_stack)

    install_guard(Guard(GlobalStateSource(), add))


class _Loading(MetaPathFinder):
    """Finds a module as Python does, and calls a function when it has been loaded."""

    def __init__(self, name: str, loaded: Callable[[], None]) -> None:
        self._name, self._loaded = name, loaded

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == self._name else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            sys.meta_path.remove(self)
            self._loaded()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def when_dynamo_is_loaded(function: Callable[[], None]) -> None:
    """Call ``function`` as soon as Dynamo has been imported, which nobody may ever do; now where it has been."""
    if "torch._dynamo" in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _Loading("torch._dynamo", function))


def dynamo_loaded() -> bool:
    """Whether Dynamo has been imported in this process; importing it takes a second, so callers wait for it."""
    return "torch._dynamo.symbolic_convert" in sys.modules


class DynamoTrace:
    """The frame that Dynamo is tracing on this thread at the moment."""

    def __init__(self, tx: Any) -> None:
        self._output = tx.output
        self._root = tx.output.root_tx

    @classmethod
    def current(cls) -> DynamoTrace | None:
        """The trace in progress, or None; None also while a backend works on a finished graph."""
        if not dynamo_loaded():
            return None
        from torch._dynamo import symbolic_convert

        tx = getattr(symbolic_convert.tls, "current_tx", None)
        if tx is None or getattr(tx.output, "_castwise_done", False):
            return None
        return cls(tx)

    def hold(self, restore: Callable[[], None]) -> None:
        """Undo a state change when the trace ends, and refuse graph breaks until :meth:`release`.

        A graph break in the middle of a state change would lose the state at run time. With the mark set, Dynamo
        gives up on this frame instead and runs it in plain Python, where hooks work for real, and compiles the
        frames inside it.
        """
        output = self._output

        def cleanup() -> None:
            output._castwise_done = True
            restore()

        output.add_cleanup_hook(cleanup)
        self._root.active_generic_context_managers.append(self)

    def release(self) -> None:
        """Allow graph breaks again after the state was restored."""
        active = self._root.active_generic_context_managers
        for index in range(len(active) - 1, -1, -1):
            if isinstance(active[index], DynamoTrace):
                del active[index]
                return


def keep_compile_callbacks(start: Callable[[Any], None], end: Callable[[Any], None]) -> None:
    """Have Dynamo call ``start`` and ``end`` around each compilation, on the compiling thread.

    Cheap to call again, which is needed: ``torch._dynamo.reset()`` forgets callbacks.
    """
    from torch._dynamo.callback import callback_handler

    if start not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(start)
    if end not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(end)


_compiled, _compiled_s, _compiling_since = 0, 0.0, 0.0


def _compiling(_: object) -> None:
    global _compiling_since
    _compiling_since = time.perf_counter()


def _compiling_ended(_: object) -> None:
    global _compiled, _compiled_s
    _compiled, _compiled_s = _compiled + 1, _compiled_s + time.perf_counter() - _compiling_since


def compilations() -> tuple[int, float]:
    """How often this process has compiled something since the first call, and how many seconds that took.

    Forwards and backwards count apart, and so do the pieces between graph breaks.
    """
    keep_compile_callbacks(_compiling, _compiling_ended)
    return _compiled, _compiled_s


def refuse_to_give_up() -> None:
    """Have Dynamo raise where it would run a function that it has compiled too often as it is, in silence."""
    import torch._dynamo.config as config

    config.fail_on_recompile_limit_hit = True


def gave_up(error: BaseException) -> bool:
    """Whether an exception is the one of :func:`refuse_to_give_up`."""
    return "FailOnRecompileLimitHit" in type(error).__name__


def eager_random_numbers() -> contextlib.AbstractContextManager[Any]:
    """A block in which Inductor compiles operators that draw random numbers to draw what they do in eager mode."""
    import torch._inductor.config as config

    return config.patch(fallback_random=True)  # type: ignore[no-any-return]


# --- what operators are -------------------------------------------------------------------------------------

OpOverload: TypeAlias = torch._ops.OpOverload


def overload_kind(overload: OpOverload) -> Literal["functional", "in_place", "out", "other"]:
    """What an overload does with its arguments.

    Args:
        overload: Such as ``torch.ops.aten.exp.default``.

    Returns:
        ``functional``: takes tensors and writes to none. ``in_place``: writes to its first argument and its name
        ends in an underscore. ``out``: writes to keyword-only results. ``other``: anything else, such as
        TorchScript's overloads on numbers.
    """
    arguments = overload._schema.arguments
    if not any("Tensor" in str(argument.type) for argument in arguments):
        return "other"
    written = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    if not written:
        return "functional"
    if all(argument.kwarg_only for argument in written):
        return "out"
    if overload._schema.name.endswith("_") and len(written) == 1 and written[0].name == arguments[0].name:
        return "in_place"
    return "other"


def argument_names(overload: OpOverload) -> list[str]:
    """Those of an operator, in order."""
    return [argument.name for argument in overload._schema.arguments]


def is_composite(overload: OpOverload) -> bool:
    """Whether an overload is made of other operators, which torch.autocast then sees one by one."""
    name: str = overload.name()
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))


_COLLECTIVE = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")
"""Namespaces of operators in which ranks wait for each other."""


def operator_name(value: object) -> str:
    """What plans call an operator of ``torch.ops``, or one of ``torch.library.custom_op``; empty for anything else.

    Operators in which ranks wait for each other have none.
    """
    from torch._library.custom_ops import CustomOpDef

    if isinstance(value, torch._ops.OpOverload):
        name = value.name().partition(".")[0]
    elif isinstance(value, torch._ops.OpOverloadPacket):
        name = value._qualified_op_name
    elif isinstance(value, CustomOpDef):
        name = value._qualname
    else:
        return ""
    space = name.partition("::")[0]
    return "" if space in _COLLECTIVE else name.removeprefix("aten::")


def plain_tensors(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether tensors hold values of their own: none is of a class with code of its own, on meta, or part of a transform."""
    return all(
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and not tensor.is_meta
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        for tensor in tensors
    )


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that another is a view of; itself where it is none."""
    return tensor if tensor._base is None else tensor._base


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """A block whose operators nobody's mode sees, and whose saved tensors nobody's hooks get."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(_disable_current_modes())
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            stack.enter_context(
                torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept)
            )
        yield


def without_transforms(tensor: torch.Tensor) -> tuple[torch.Tensor, dict[int, int]]:
    """What a tensor inside transforms of torch.func holds, and which dimension each level of ``vmap`` maps over."""
    api, dims = torch._C._functorch, {}
    while api.is_functorch_wrapped_tensor(tensor):
        if api.is_batchedtensor(tensor):
            dims[api.maybe_get_level(tensor)] = api.maybe_get_bdim(tensor)
        tensor = api.get_unwrapped(tensor)
    return tensor, dims


def operator_names(namespace: str) -> frozenset[str]:
    """Every operator registered under a namespace, with overload, as ``aten::exp.out``."""
    return frozenset(
        name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{namespace}::")
    )


# --- what a CPU can do --------------------------------------------------------------------------------------


def cpu_has_bf16() -> bool:
    """Whether oneDNN computes in bf16 on this CPU (AVX-512 at least)."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def cpu_has_tf32() -> bool:
    """Whether oneDNN computes in TF32 on this CPU: it needs AMX-TF32, and is a silent no-op without."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            return " amx_tf32" in file.read(16384)
    except OSError:
        return False


# --- optimizers ---------------------------------------------------------------------------------------------


_MARKS = ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")
"""torch sets the latter at a step."""


def takes_flag(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's kernels take the non-finite flag on the device, so that the host need not know it."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def mark_fused(optimizer: torch.optim.Optimizer) -> None:
    """Let a GradScaler hand its scale and flag to the optimizer's fused kernel."""
    vars(optimizer)[_MARKS[0]] = True


def fused_marks(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """What gives an optimizer the marks again that it has now."""
    before = {name: value for name, value in vars(optimizer).items() if name in _MARKS}
    alive = weakref.ref(optimizer)

    def undo() -> None:
        if (found := alive()) is not None:
            for name in _MARKS:
                vars(found).pop(name, None)
            vars(found).update(before)

    return undo


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``Optimizer.__init__`` has run, which some wrappers leave out: without it no hook can be registered."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks") and hasattr(
        optimizer, "_optimizer_load_state_dict_post_hooks"
    )


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer step and no hook hear of it, those of all optimizers included."""
    step: Any = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


def load_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """The hooks that an optimizer calls while it loads a state dict."""
    before, after = (
        getattr(optimizer, f"_optimizer_load_state_dict_{when}_hooks", {}) for when in ("pre", "post")
    )
    return [*before.values(), *after.values()]


_step_watchers: tuple[Callable[[torch.optim.Optimizer], object], ...] = ()
_step_watchers_lock = threading.Lock()


def _tell_step_watchers(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for look in _step_watchers:
        look(optimizer)


@functools.cache
def _begin_telling() -> None:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    never_trace(_tell_step_watchers)
    register_optimizer_step_pre_hook(_tell_step_watchers)


def before_calls(look: Callable[[torch.nn.Module], object]) -> Callable[[], None]:
    """Have ``look`` called with each module that is called, before anything of the call has happened, but for compiled code.

    torch's own hooks for all modules come when a module's hooks have been read: those that ``look`` adds would not be called.

    Returns:
        What undoes it.
    """

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def see(module: torch.nn.Module) -> None:  # below a graph break it would be compiled
        look(module)

    def around(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                see(self)
            return call(self, *args, **kwargs)

        return called

    return _instead_of_call(around)


def around_calls(run: Callable[..., Any]) -> Callable[[], None]:
    """Have ``run(call, module, *args, **kwargs)`` called in place of each call of a module, but for compiled code.

    Returns:
        What undoes it.
    """

    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]
    def run_uncompiled(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    def around(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return call(self, *args, **kwargs)
            return run_uncompiled(call, self, *args, **kwargs)

        return called

    return _instead_of_call(around)


def _instead_of_call(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    home: Any = torch.nn.Module
    original = home.__call__
    home.__call__ = called = around(original)

    def undo() -> None:
        if home.__call__ is called:
            home.__call__ = original

    return undo


def after_optimizers(look: Callable[[torch.optim.Optimizer], object]) -> Callable[[], None]:
    """Have ``look`` called with each optimizer that is made, which torch has no hook for.

    Returns:
        What undoes it.
    """
    home: Any = torch.optim.Optimizer
    original = home.__init__

    @functools.wraps(original)
    def made(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        look(self)

    home.__init__ = made

    def undo() -> None:
        if home.__init__ is made:
            home.__init__ = original

    return undo


def around_function(
    home: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Put ``around(method)`` in the place of a function of torch, in a class or a module.

    Returns:
        What undoes it.
    """
    original, is_own = getattr(home, name), name in vars(home)
    called = functools.wraps(original)(around(original))
    setattr(home, name, called)

    def undo() -> None:
        if getattr(home, name) is called:
            setattr(home, name, original) if is_own else delattr(home, name)

    return undo


class Replacement:
    """A method of a class of torch's with something around it, at times.

    An interrupt between any two lines leaves a state that :meth:`end` undoes, and what somebody else has put there stays.
    """

    def __init__(
        self, home: type, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        self._home, self._name, self._own = home, name, vars(home)[name]
        self._ours = functools.wraps(self._own)(around(self._own))

    def begin(self) -> None:
        """Put it there, where it is not."""
        if vars(self._home).get(self._name) is self._own:
            setattr(self._home, self._name, self._ours)

    def end(self) -> None:
        """Put the method itself back, where it is not."""
        if vars(self._home).get(self._name) is self._ours:
            setattr(self._home, self._name, self._own)


class _Told:
    """Functions that are told of each call of some methods of torch, before the call does anything, or ``after`` it.

    The former are given the object, the latter what the call returned. The methods are torch's own again when the last
    function has gone.
    """

    def __init__(self, *places: tuple[Any, str], after: bool = False) -> None:
        self._places = places
        self._after = after
        self._looks: tuple[Callable[[Any], object], ...] = ()
        self._lock = threading.RLock()  # a session that is collected meanwhile takes its own out
        self._undo: list[Callable[[], None]] = []

    def add(self, look: Callable[[Any], object]) -> None:
        with self._lock:
            self._looks = (*self._looks, look)
            if not self._undo:
                self._undo = [around_function(home, name, self._around) for home, name in self._places]

    def remove(self, look: Callable[[Any], object]) -> None:
        with self._lock:
            self._looks = tuple(other for other in self._looks if other != look)
            while self._undo and not self._looks:
                self._undo.pop()()

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(this: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return call(this, *args, **kwargs)
            if self._after:
                this = call(this, *args, **kwargs)
            for look in self._looks:
                look(this)
            return this if self._after else call(this, *args, **kwargs)

        return called


clearing = _Told((torch.optim.Optimizer, "zero_grad"), (torch.nn.Module, "zero_grad"))
"""Whom to tell of each ``zero_grad``: of which optimizer or module."""
scaling = _Told((torch.amp.GradScaler, "scale"), after=True)
"""Whom to tell of each loss that a GradScaler has scaled."""


def watch_every_step(look: Callable[[torch.optim.Optimizer], object]) -> None:
    """Have ``look`` called before each step of any optimizer, until :func:`forget_every_step`.

    One hook for all, which stays: another thread's step may be going through torch's table of hooks at any time.
    """
    global _step_watchers
    _begin_telling()
    with _step_watchers_lock:
        _step_watchers = (*_step_watchers, look)


def forget_every_step(look: Callable[[torch.optim.Optimizer], object]) -> None:
    """Undo :func:`watch_every_step`, or nothing."""
    global _step_watchers
    with _step_watchers_lock:
        _step_watchers = tuple(other for other in _step_watchers if other != look)


_Around: TypeAlias = tuple[
    Callable[[torch.optim.Optimizer, bool], object], Callable[[torch.optim.Optimizer], object]
]
_around_steps: tuple[_Around, ...] = ()


def around_every_step(
    before: Callable[[torch.optim.Optimizer, bool], object], after: Callable[[torch.optim.Optimizer], object]
) -> Callable[[], None]:
    """Have ``before`` called before, and ``after`` after, each step of any optimizer, outside of the optimizer's own hooks.

    ``before`` is told, too, whether the step evaluates a closure. As with :func:`watch_every_step` torch's own hooks stay.

    Returns:
        What undoes it.
    """
    global _around_steps
    _begin_telling_around()
    pair = before, after
    with _step_watchers_lock:
        _around_steps = (*_around_steps, pair)

    def undo() -> None:
        global _around_steps
        with _step_watchers_lock:
            _around_steps = tuple(other for other in _around_steps if other is not pair)

    return undo


def _tell_before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for before, _ in _around_steps:
        before(optimizer, callable(args[1] if len(args) > 1 else kwargs.get("closure")))


def _tell_after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for _, after in _around_steps:
        after(optimizer)


@functools.cache
def _begin_telling_around() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    never_trace(_tell_before, "castwise looks at steps between graphs")
    never_trace(_tell_after, "castwise looks at steps between graphs")
    register_optimizer_step_pre_hook(_tell_before)
    register_optimizer_step_post_hook(_tell_after)


@contextlib.contextmanager
def other_workers(loader: torch.utils.data.DataLoader[Any]) -> Iterator[None]:
    """Have ``iter`` of a loader make workers of its own inside, where it would begin anew those that it keeps for somebody else.

    Relies on: ``DataLoader(persistent_workers=True)`` keeps its one iterator as ``_iterator``.
    """
    kept, loader._iterator = loader._iterator, None
    try:
        yield
    finally:
        loader._iterator = kept


def hook_first(module: torch.nn.Module, hook: Callable[..., Any], *, with_kwargs: bool = False) -> None:
    """``module.register_forward_pre_hook(hook, prepend=True)``, which torch 2.11 can compile.

    There the guards count the keys of an OrderedDict as they came in, not as ``move_to_end`` has put them.

    Args:
        module: Whose forward it precedes, before all hooks that are there.
        hook: As ``register_forward_pre_hook`` takes it.
        with_kwargs: Whether it is given keyword arguments too.
    """
    module.register_forward_pre_hook(hook, prepend=True, with_kwargs=with_kwargs)
    table = module._forward_pre_hooks
    if list(table) != list(dict.keys(table)):
        hooks = list(table.items())
        try:
            table.clear()
        finally:  # whatever interrupts it, the hooks stay
            table.update(hooks)


def registered(hook: Any) -> Any:
    """What was given to be a hook of ``state_dict`` or ``load_state_dict``, which torch wraps; any other hook itself."""
    return hook.hook if isinstance(hook, torch.nn.modules.module._WrappedHook) else hook


def remove_hooks(owner: Any, *hooks: Callable[..., Any]) -> None:
    """Undo the registrations of hooks, or nothing, by the hooks themselves: an interrupt can lose the handle.

    Args:
        owner: A module or an optimizer; None for the hooks of all optimizers.
        hooks: Whatever equals one of them goes.
    """
    owner = sys.modules[torch.optim.Optimizer.__module__] if owner is None else owner
    tables = [table for name, table in vars(owner).items() if "_hooks" in name and isinstance(table, dict)]
    keys = [
        key
        for table in tables
        for key, hook in list(table.items())
        if any(own == registered(hook) for own in hooks)
    ]
    for table in reversed(tables):  # what torch notes of a hook stands behind it
        for key in keys:
            table.pop(key, None)


def ran_compiled(module: torch.nn.Module) -> bool:
    """Whether a module has run compiled, by ``torch.compile`` or ``module.compile()``: hooks added now would be ignored.

    Dynamo keeps compiled code by code objects, which modules of one class share, and those whose ``forward`` it does not
    compile, torch's own, all share one; so where there is some, it is asked whether this module has been wrapped at all.
    """
    if not dynamo_loaded():
        return False
    from torch._dynamo import trace_rules
    from torch._dynamo.eval_frame import OptimizedModule, _debug_get_cache_entry_list
    from torch._dynamo.external_utils import wrap_inline

    forward = type(module).forward
    shared = (torch.nn.Module._call_impl, wrap_inline(torch.nn.Module.eval))
    functions: tuple[Any, ...] = shared if trace_rules.check(forward) else (forward,)
    codes = [code for function in functions if (code := getattr(function, "__code__", None)) is not None]
    if not any(_debug_get_cache_entry_list(code) for code in codes):
        return False
    return is_compiled(module) or any(
        type(thing) is OptimizedModule and thing._modules.get("_orig_mod") is module
        for thing in gc.get_objects()
    )


def inside_compiled(models: Iterable[torch.nn.Module]) -> set[torch.nn.Module]:
    """Of some models those modules that are, or are inside of, one that ``torch.compile`` or ``module.compile()`` was called on.

    Hooks put on these are ignored, or have them compiled anew. What was given to ``torch.compile`` in a function is not known.
    """
    if not dynamo_loaded():
        return set()
    from torch._dynamo.eval_frame import OptimizedModule

    wrapped = {
        id(thing._modules["_orig_mod"]) for thing in gc.get_objects() if type(thing) is OptimizedModule
    }
    return {
        inner
        for model in models
        for module in model.modules()
        if id(module) in wrapped or is_compiled(module)
        for inner in module.modules()
    }


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether somebody has called ``module.compile()``, or the module is what ``torch.compile`` returned."""
    call = module._compiled_call_impl
    return without_compiler(module) is not module or (
        call is not None and not hasattr(call, "__castwise_guard__")
    )


def forget_compiled(model: torch.nn.Module) -> None:
    """Have functions that were compiled with such a model inside compiled anew at their next call.

    Dynamo guards the classes of modules and not their hooks, so they would go on without those that were added since.
    """
    if not dynamo_loaded():
        return
    from torch._C._dynamo.eval_frame import reset_code
    from torch._dynamo.convert_frame import input_codes
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    kinds = {
        str(id(type(module)))
        for module in model.modules()
        if module is model or not type(module).__module__.startswith("torch.nn.")
    }
    inside = set(model.modules())
    for reference in input_codes.seen:
        code = reference()
        if code is None:
            continue
        owner = _own_frames.get(code)
        if owner is not None and ((other := owner()) is None or inside.isdisjoint(other.modules())):
            continue  # compiled for another model of the class
        for entry in _debug_get_cache_entry_list(code):
            guards = str(entry.guard_manager)
            if "type_id" not in guards or any(kind in guards for kind in kinds):
                reset_code(code)
                break


# --- torch.amp.GradScaler -----------------------------------------------------------------------------------

_check_and_unscale = torch._amp_foreach_non_finite_check_and_unscale_
_unscaled_by_hand: set[tuple[str, torch.dtype]] = set()
"""Device types and formats that torch's kernel has refused."""


def _kind(grads: list[torch.Tensor]) -> tuple[str, torch.dtype]:
    return grads[0].device.type, grads[0].dtype


def check_and_unscale(grads: list[torch.Tensor], flag: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply gradients in place by a factor, and set a flag to one where a gradient was not finite.

    Torch's kernel where there is one; CUDA has none for bf16 (seen in torch 2.11). There the largest magnitude of each
    gradient, which is NaN where one of its elements is, says whether all are finite.

    Args:
        grads: At least one, on one device; of one dtype, but on a CPU of any.
        flag: 0-dim fp32 on that device.
        factor: The same.
    """
    if not _unscaled_by_hand or _kind(grads) not in _unscaled_by_hand:
        try:
            _check_and_unscale(grads, flag, factor)
            return
        except NotImplementedError:
            if grads[0].device.type == "cpu":  # sparse gradients, which it refuses before it writes anything
                raise
            _unscaled_by_hand.add(_kind(grads))
    largest = torch.stack(torch._foreach_norm([grad for grad in grads if grad.numel()] or [flag], math.inf))
    flag.copy_(torch.maximum(flag, (~torch.isfinite(largest).all()).to(flag.dtype)))
    torch._foreach_mul_(grads, factor)


update_scale = torch._amp_update_scale_
"""``(scale, growth_tracker, flag, growth, backoff, interval)``: move a scale in place by its rule."""


class OpenGradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` by names without underscores, for a subclass that works on what it keeps."""

    works: bool
    """Whether it was enabled, on a device that is there; otherwise it passes everything through."""
    optimizer_states: dict[int, dict[str, Any]]
    """By the optimizers' ``id`` their stage, and their flags by device."""
    current: Any
    """What holds ``scale`` and ``growth_tracker``, None before the first use; its ``allocate(device)`` makes them."""
    step_or_skip: Callable[..., Any]
    """``(optimizer, state, *args, **kwargs)``: call the optimizer's step unless a flag of its ``state`` is set."""

    _enabled = property(lambda self: self.works, lambda self, value: setattr(self, "works", value))
    _per_optimizer_states = property(
        lambda self: self.optimizer_states, lambda self, value: setattr(self, "optimizer_states", value)
    )
    _scale = property(
        lambda self: self.current.scale, lambda self, value: setattr(self.current, "scale", value)
    )
    _growth_tracker = property(
        lambda self: self.current.growth_tracker,
        lambda self, value: setattr(self.current, "growth_tracker", value),
    )

    @property
    def device_type(self) -> str:
        """Of the gradients."""
        return str(self._device)

    def unscale_grads(
        self, optimizer: torch.optim.Optimizer, inverse: torch.Tensor, flag: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Multiply an optimizer's gradients by ``inverse``; a flag per device."""
        return super()._unscale_grads_(optimizer, inverse, flag, allow_fp16)

    def check_scaled(self, call: str) -> torch.Tensor:
        """The scale; an error as torch's where nothing was ever scaled."""
        return self._check_scale_growth_tracker(call)[0]

    def start_states(self) -> None:
        """Go on with fresh states; those that were are left as they are."""
        self.optimizer_states = defaultdict(self.optimizer_states.default_factory)  # type: ignore[attr-defined]

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self.current.allocate(dev)

    def _unscale_grads_(self, *args: Any) -> dict[torch.device, torch.Tensor]:
        return self.unscale_grads(*args)

    def _maybe_opt_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.step_or_skip(*args, **kwargs)


# --- calls of modules ---------------------------------------------------------------------------------------


def guard_calls(
    module: torch.nn.Module,
    owner: object,
    depth: Callable[[], int],
    unwind: Callable[[int], None],
    mode: str | None = None,
) -> None:
    """Restore this thread's state after a call of a module that an exception of any kind ended, and compile its calls.

    torch runs forward hooks after an ``Exception``, but not after KeyboardInterrupt, SystemExit or CancelledError.
    The place that ``module.compile()`` puts its code in is called instead of the module's own call, and is left out
    of copies and pickles; a module that somebody else has compiled so has no guard. Replicas of DataParallel share the
    module's attributes, so the module that is called is taken from the frame of the call; they run as they are.

    Args:
        module: Whose calls to guard.
        owner: Whose guard it is; :func:`unguard_calls` removes it, and a further call with it takes its place.
        depth: Gives the state before a call.
        unwind: Goes back to it.
        mode: Of ``torch.compile``; None leaves calls as they are.
    """
    alive = weakref.ref(module)
    compiled = None if mode is None else torch.compile(_own_frame(module), mode=mode)

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            own: Any = alive()
            return own._call_impl(*args, **kwargs)
        called = sys._getframe(1).f_locals["self"]
        before = depth()
        try:
            if compiled is not None and called is alive():
                return compiled(*args, **kwargs)
            return called._call_impl(*args, **kwargs)
        except BaseException:
            unwind(before)
            raise

    present = module._compiled_call_impl
    call.__castwise_guard__, call.__castwise_before__ = owner, present  # type: ignore[attr-defined]
    if present is None or getattr(present, "__castwise_guard__", None) is owner:
        module._compiled_call_impl = call


def _own_frame(module: torch.nn.Module) -> FunctionType:
    """A function that calls a module, hooks and all, with a code object of its own.

    Dynamo keeps compiled code by code objects, and gives one up that it has compiled eight times. What ``module.compile()``
    has it compile is ``Module._call_impl``, which is one for all modules.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    code = call.__code__.replace(co_name=f"call_{next(_numbers)}")
    _own_frames[code] = weakref.ref(module)
    return FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)


_numbers = itertools.count()
"""Code objects that are alike in all are one to a dictionary."""
_own_frames: weakref.WeakKeyDictionary[CodeType, weakref.ref[torch.nn.Module]] = weakref.WeakKeyDictionary()


def unguard_calls(module: torch.nn.Module, owner: object) -> None:
    """Remove the guard that :func:`guard_calls` put on a module for this owner, or nothing."""
    if getattr(module._compiled_call_impl, "__castwise_guard__", None) is owner:
        del module._compiled_call_impl


def without_guard(call: Any) -> Any:
    """What stood where a module's calls go before :func:`guard_calls`."""
    return getattr(call, "__castwise_before__", None) if hasattr(call, "__castwise_guard__") else call


def leave_uncompiled(module: torch.nn.Module, owner: object) -> None:
    """Undo what :func:`guard_calls` with a mode did for this owner, or nothing; the guard stays."""
    call = module._compiled_call_impl
    if getattr(call, "__castwise_guard__", None) is owner and call.__castwise_before__ is not None:  # type: ignore[union-attr]
        module._compiled_call_impl = call.__castwise_before__  # type: ignore[union-attr]


def without_compiler(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside what ``torch.compile`` returned; any other itself."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, torch.nn.Module) else module


def autocast_within(function: Any) -> str | None:
    """The device type of a ``torch.autocast`` that a function, or one that it wraps, was decorated with and that is enabled.

    Relies on what ``torch.autocast`` decorates with: a function of its own module, with the autocast in its closure.
    """
    while function is not None:
        function = getattr(function, "__func__", function)
        if getattr(function, "__globals__", {}).get("__name__") == torch.autocast.__module__:
            for cell in function.__closure__ or ():
                block = cell.cell_contents
                if isinstance(block, torch.autocast) and block._enabled:
                    return str(block.device)
        function = getattr(function, "__wrapped__", None)
    return None


def called_by_a_scaler() -> bool:
    """Whether a ``torch.amp.GradScaler`` is among the callers, as it is of the optimizer steps that it makes."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), torch.amp.GradScaler):
            return True
        frame = frame.f_back
    return False


def takes_hooks(module: torch.nn.Module) -> bool:
    """Whether a scripted or traced module calls hooks that are put on it: what ``torch.jit.trace`` returned does."""
    return type(module).__name__ == "TopLevelTracedModule"


def hook_tables(module: torch.nn.Module) -> tuple[dict[int, Any], ...]:
    """The tables of a module's hooks around ``forward``, after loading and before saving, to look into and to change."""
    return (
        module._forward_pre_hooks, module._forward_hooks, module._load_state_dict_post_hooks, module._state_dict_pre_hooks,
    )  # fmt: skip


def before_scripting(look: Callable[[torch.nn.Module], object]) -> None:
    """Have a function called with each module before ``torch.jit.script`` compiles it, for good."""

    def prepare(module: torch.nn.Module) -> torch.nn.Module:
        look(module)
        return module

    if not hasattr(torch.nn.Module, "__prepare_scriptable__"):
        torch.nn.Module.__prepare_scriptable__ = prepare  # type: ignore[attr-defined]


def buffer_tables(model: torch.nn.Module) -> Iterator[tuple[str, dict[str, torch.Tensor | None]]]:
    """By path, the dictionary in which each module of a model has its buffers, to read from and to write to."""
    for path, module in model.named_modules():
        table: Any = module._buffers
        # what scripted code keeps is handed out by a view, in which no other tensor can be put
        yield path, table if isinstance(table, dict) else dict(table.items())


def gradient_hooks(parameter: torch.Tensor) -> list[Any]:
    """The hooks that a backward calls with a parameter's gradient, before it is added and after."""
    tables = parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)
    return [hook for table in tables for hook in (table or {}).values()]


# --- many tensors at once -----------------------------------------------------------------------------------

dynamo_callback: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback
"""None or False unless this thread is running inside a call that torch.compile handles."""


_set_grad_enabled = torch._C._set_grad_enabled
_is_grad_enabled = torch.is_grad_enabled


def without_grad(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function under ``torch.no_grad()``, which costs a microsecond less this way."""
    was = _is_grad_enabled()
    try:
        _set_grad_enabled(False)
        return function(*args)
    finally:
        _set_grad_enabled(was)


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source into the target at its place, casting, in as few kernels as the device can."""
    if targets:
        torch._foreach_copy_(targets, sources)


@torch.no_grad()
def multiply_each(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply each tensor in place by a 0-dim one on their device, in as few kernels as it can."""
    torch._foreach_mul_(tensors, factor)


# what torch calls foreach operations: on lists of tensors of one device, fastest where all are of one dtype
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
    """How often each tensor was written in place, as autograd counts; -1 for None.

    Not counted are writes through ``.data`` and those of torch's fused optimizers.
    """
    try:
        return [*map(_version_of, tensors)]
    except AttributeError:  # there is a None
        return [-1 if tensor is None else _version_of(tensor) for tensor in tensors]


def version(tensor: torch.Tensor) -> int:
    """How often one tensor was written in place, as :func:`versions`; 0 of an inference tensor, which does not count."""
    if torch.compiler.is_compiling():  # Dynamo cannot trace is_inference
        return int(tensor._version)
    return 0 if tensor.is_inference() else int(tensor._version)


class WeakMemory:
    """A tensor's memory, by a reference that does not keep it, and how often it was written."""

    def __init__(self, tensor: torch.Tensor) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._where = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._writes = tensor.detach()  # counts with it, and with what else is detached from it
        self._writes.data = self._writes.new_empty(0)

    @property
    def version(self) -> int:
        """As :func:`version`."""
        return int(self._writes._version)

    def tensor(self) -> torch.Tensor | None:
        """The tensor, or None when nothing holds its memory any more."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        return None if storage is None else self._writes.new_empty(0).set_(storage, *self._where)


def counted_alias(data: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """``data``, except that writes to it raise the version of ``counter``; with no operator that a mode would see."""
    alias: Any = torch.Tensor._make_subclass(torch.Tensor, counter)
    _set_data(alias, data)
    return alias  # type: ignore[no-any-return]


def below_torch_function(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Call ``function`` as if no argument had a ``__torch_function__`` of its own."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def refuse_inlining(function: Callable[..., Any]) -> None:
    """Make Dynamo break the graph at ``function``, which it may have met as a frame of its own: :func:`never_trace` for hooks."""
    from torch._dynamo.eval_frame import skip_code

    never_trace(function, "castwise keeps masters and parameters in step")
    skip_code(function.__code__)


def never_trace(function: Any, why: str = "castwise's GradScaler runs between graphs") -> None:
    """Have Dynamo leave calls of ``function`` to Python, as ``torch.compiler.disable`` does.

    The public decorator imports Dynamo and wraps the function, which every call in eager mode would pay for.
    """
    function._torchdynamo_disable, function._torchdynamo_disable_msg = True, why


def safe_softmax(scores: torch.Tensor, dim: int) -> torch.Tensor:
    """Softmax whose rows of nothing but ``-inf`` are 0 instead of NaN, as masked attention has it."""
    return torch._safe_softmax(scores, dim)


def memory_of(tensor: torch.Tensor) -> StorageWeakRef:
    """What stands for a tensor's memory in dictionaries: equal for views, and never that of memory allocated later."""
    return StorageWeakRef(tensor.untyped_storage())


@functools.cache
def is_view(op: OpOverload) -> bool:
    """Whether what an operator returns is memory of its arguments, which it does not write to."""
    aliases = [result.alias_info for result in op._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


@functools.cache
def written_arguments(op: OpOverload) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that an operator writes to; -1 for those that are given by keyword alone."""
    return tuple(
        (-1 if argument.kwarg_only else at, argument.name)
        for at, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


class OperatorMode(TorchDispatchMode):
    """Calls :meth:`handle` for every ATen operator that runs inside it, those of backward too, below autocast."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Hand the operator over; inside, the mode is off."""
        return self.handle(func, args, kwargs or {})

    def handle(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, or something in its place."""
        return op(*args, **kwargs)


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """Run operators inside below every mode of ``torch_function`` and ``torch_dispatch`` that is in force."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def outside_dispatch_modes(function: Callable[..., _T], *args: Any) -> _T:
    """Call a function below every mode that sees operators; costs next to nothing where there is none."""
    if torch._C._len_torch_dispatch_stack() == 0:
        return function(*args)
    with outside_modes():
        return function(*args)


def outside_transforms(function: Callable[[], _T]) -> _T:
    """Call a function below every transform of ``torch.func``, whose tensors mean nothing once it has ended."""
    if not in_transform():
        return function()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        return function()


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for others inside one of ``torch.func``'s transforms, as ``vmap`` makes them."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_tracing() -> bool:
    """Whether ``torch.jit.trace`` records what runs."""
    return torch._C._get_tracing_state() is not None


def is_stand_in_call() -> bool:
    """Whether a module is being traced, or called with other parameters or buffers in the place of its own."""
    if is_tracing():
        return True
    frame: FrameType | None = sys._getframe()
    for _ in range(24):  # between the call and a hook of the module
        if frame is None or frame.f_code is _functional_call.__code__:
            return frame is not None
        frame = frame.f_back
    return False


def is_users_function(node: Any) -> bool:
    """Whether a node of autograd's graph is the backward of a ``torch.autograd.Function`` that is not torch's own."""
    return isinstance(node, torch.autograd.function.BackwardCFunction) and not (
        node._forward_cls.__module__.startswith("torch.")  # type: ignore[attr-defined]
    )


# --- torch.distributed --------------------------------------------------------------------------------------


def dense_values(tensor: torch.Tensor) -> torch.Tensor:
    """The values that a tensor of any layout holds: of a sparse or nested one in its own memory, coalesced or not.

    A dense tensor is itself; one in a layout of oneDNN is copied.
    """
    if is_dense(tensor):
        return tensor
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    return tensor.to_dense() if tensor.is_mkldnn else tensor.values()


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements lie in memory by its strides: it is not sparse, nested, or in a layout of oneDNN."""
    return tensor.layout is torch.strided and not tensor.is_nested


def to_dense(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of any layout as dense operators take it: zeros filled in; of a nested one the values alone."""
    if is_dense(tensor):
        return tensor
    return tensor.values() if tensor.is_nested else tensor.to_dense()


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor, in its own memory; ``to_local()`` would add a node to the graph."""
    local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    wait = getattr(local, "wait", None)  # the result of a collective that may be on its way
    return local if wait is None or type(local) is torch.Tensor else wait()


def dispatches_itself(tensor: torch.Tensor) -> bool:
    """Whether operators on a tensor run code of its class in Python; fake tensors, which stand for plain ones, do not count."""
    kind: Any = type(tensor)
    own = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return own and not kind.__module__.startswith("torch._subclasses")


_set_data: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # also where a subclass has a property data


def local_box(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of what this rank holds of a tensor, which is all of it but for DTensors.

    It is what torch.distributed.checkpoint asks DTensors for.
    """
    if not hasattr(tensor, "device_mesh"):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
    return tuple(chunk.offsets), tuple(chunk.sizes)


def set_dtensor(parameter: torch.Tensor, values: Any) -> None:
    """Give a DTensor the memory of another, as ``parameter.data = values`` gives it to a plain tensor.

    That assignment changes what a DTensor says of itself and leaves its memory as it was; ``torch.utils.swap_tensors``
    refuses what has weak references.
    """
    _set_data(parameter, values)
    parameter._local_tensor = values._local_tensor  # type: ignore[attr-defined]
    parameter._spec = values._spec  # type: ignore[attr-defined]


def was_dtensor(parameter: torch.Tensor) -> bool:
    """Whether ``DistributedDataParallel(device_mesh=...)`` has put a rank's piece in the place of a DTensor."""
    return hasattr(parameter, "_st_info")


def fsdp_groups(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module, torch.nn.Parameter, Any]]:
    """Every parameter that ``fully_shard`` manages: path and module it was called on, parameter, its policy."""
    return [
        (path, module, param.sharded_param, group.mp_policy)
        for path, module, group in _fsdp_param_groups(model)
        for param in group.fsdp_params
    ]


def default_store() -> Any:
    """The store by which the processes of the default group have met; safe to use from several threads."""
    return torch.distributed.distributed_c10d._get_default_store()


def is_in_join(ddp: Any) -> bool:
    """Whether a DistributedDataParallel is inside of torch's ``Join``."""
    return bool(getattr(getattr(ddp, "_join_config", None), "enable", False))


def on_join_end(listener: Callable[[Any, int], object]) -> None:
    """Have ``listener(ddp, rank)`` called on all ranks where torch's ``Join`` has given them the weights of one, by its rank."""

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def sync_final_model(ddp: Any, is_last_joiner: bool) -> None:
            original(ddp, is_last_joiner)
            listener(ddp, ddp._authoritative_rank)

        return sync_final_model

    around_function(torch.nn.parallel.DistributedDataParallel, "_sync_final_model", around)


def delays_reductions(ddp: Any) -> bool:
    """Whether a DistributedDataParallel was given ``delay_all_reduce_named_params``."""
    return bool(getattr(ddp, "_delay_all_reduce_params", None))


def _is_loaded(thing: Any, module: str, name: str) -> bool:
    """Whether a thing is of a class that may not have been imported."""
    return isinstance(thing, getattr(sys.modules.get(module), name, ()))


def is_zero(optimizer: Any) -> bool:
    """Whether an optimizer is torch's ZeroRedundancyOptimizer."""
    return _is_loaded(
        optimizer, "torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer"
    )


def is_fsdp1(module: Any) -> bool:
    """Whether a module is FSDP1's FullyShardedDataParallel."""
    return _is_loaded(
        module, "torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"
    )


def has_fsdp1(model: torch.nn.Module) -> bool:
    """Whether FSDP1 holds parameters of a model, in it or around it."""
    return any(map(is_fsdp1, model.modules())) or any(
        getattr(parameter, "_fsdp_flattened", False) for parameter in model.parameters()
    )


def is_fsdp(module: torch.nn.Module) -> bool:
    """Whether ``fully_shard``, or the ``replicate`` made of it, was called on a module itself."""
    return hasattr(type(module), "_get_fsdp_state")  # a module around it may hand on its attributes


def fsdp_shards(model: torch.nn.Module) -> dict[torch.Tensor, torch.Tensor]:
    """The shard behind each form in which FSDP2 registers a parameter with its module, gathered or not."""
    return {
        form: param.sharded_param
        for _, _, group in _fsdp_param_groups(model)
        for param in group.fsdp_params
        for name in ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
        if (form := getattr(param, name, None)) is not None
    }


def copy_without_shards(model: torch.nn.Module, wholes: dict[torch.Tensor, torch.Tensor]) -> torch.nn.Module:
    """A deep copy of a model without what ``fully_shard`` and ``parallelize_module`` have put on it: states, hooks, classes.

    The classes that ``fully_shard`` makes refuse to be copied, and their states hold process groups.

    Args:
        model: Is as it was afterwards.
        wholes: What stands in the copy in the place of a parameter or a buffer.
    """
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

    sharded = [(module, type(module)) for module in model.modules() if is_fsdp(module)]
    memo: dict[int, Any] = {id(tensor): whole for tensor, whole in wholes.items()}
    memo |= {id(module._get_fsdp_state()): object() for module, _ in sharded}  # type: ignore[operator]
    try:
        for module, kind in sharded:
            module.__class__ = kind.__mro__[getattr(kind, "_orig_cls_mro_index", 2)]
        out = copy.deepcopy(model, memo)
    finally:
        for module, kind in sharded:
            module.__class__ = kind
    for module in out.modules():
        own = vars(module)
        tables = [own[name] for name in own if "_hooks" in name and isinstance(own[name], dict)]
        hooks = [getattr(hook, "hook", hook) for table in tables for hook in table.values()]
        remove_hooks(module, *(hook for hook in hooks if _is_of_parallelism(hook)))
        for name in ("_is_fsdp_managed_module", "_fsdp_use_orig_params", "_distribute_module_applied"):
            own.pop(name, None)
        for name in (STATE_KEY, REGISTRY_KEY):
            for api in [api for api in own.get(name, ()) if getattr(api, "__name__", api) in _SHARDING]:
                del own[name][api]
            if not own.get(name, True):
                del own[name]
        for name, value in list(
            own.items()
        ):  # what register_fsdp_forward_method has put before the class's own
            if isinstance(value, MethodType) and _defined_in(value.__func__).startswith(_FSDP):
                del own[name]
    return out


_SHARDING = ("fully_shard", "replicate")


_FSDP = "torch.distributed.fsdp."


def _is_of_parallelism(hook: Any) -> bool:
    home = str(getattr(hook, "__module__", ""))
    return home.startswith((_FSDP, "torch.distributed.tensor.", "torch.distributed._composable.replicate"))


def _defined_in(function: Any) -> str:
    """The module that a function was written in, whatever it wraps."""
    return str(getattr(function, "__globals__", {}).get("__name__", ""))


def fsdp_knows(model: torch.nn.Module) -> dict[torch.nn.Parameter, torch.dtype]:
    """The dtype of each shard that FSDP2 counts on since the model ran for the first time; nothing before that."""
    params = (param for _, _, group in _fsdp_param_groups(model) for param in group.fsdp_params)
    return {param.sharded_param: param.orig_dtype for param in params if hasattr(param, "orig_dtype")}


def _fsdp_param_groups(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, Any]]:
    for path, module in model.named_modules():
        if not is_fsdp(module):
            continue
        state: Any = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # a list since torch 2.12
        if groups is None:
            groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
        yield from ((path, module, group) for group in groups)


def fsdp_units(model: torch.nn.Module) -> list[weakref.ref[Any]]:
    """What FSDP2 gathers and reduces at once in a model: its groups of parameters, not held."""
    return [weakref.ref(group) for _, _, group in _fsdp_param_groups(model)]


def is_unfrozen(unit: Any) -> bool:
    """Whether FSDP2 found nothing to train in a group when the model first ran, and there is something now."""
    return getattr(unit, "_orig_dtype", unit) is None and any(
        param.sharded_param.requires_grad for param in unit.fsdp_params
    )


def look_again(unit: Any, widen: Callable[[torch.Tensor], bool]) -> None:
    """Have FSDP2 take the dtypes of a group's gradients from what is trained now.

    Without it gradients of what was frozen when the model first ran come in the format that it is gathered in.

    Args:
        unit: From :func:`fsdp_units`.
        widen: Stores a shard otherwise where that is needed, and says whether it did.
    """
    trained = [param for param in unit.fsdp_params if param.sharded_param.requires_grad]
    widened = [param for param in trained if widen(param.sharded_param)]
    if hasattr(unit, "_orig_dtype"):  # else it has not run
        if widened and not unit.is_sharded:
            unit._to_sharded()
        for param in widened:
            param.reset_sharded_param()
        unit._init_mp_dtypes()


def schedule_stages(schedule: Any) -> list[Any]:
    """The stages that this rank runs in a schedule of ``torch.distributed.pipelining``."""
    many = getattr(schedule, "_stages", None)
    return list(many) if many is not None else [schedule._stage]


def replace_schedule_loss(
    schedule: Any, wrap: Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]
) -> None:
    """Have a pipeline schedule compute its loss by ``wrap(loss_fn)``; nothing happens where it has none."""
    if schedule._loss_fn is not None:
        schedule._loss_fn = wrap(schedule._loss_fn)


def take_gradient_division(schedule: Any) -> int:
    """The number by which a pipeline schedule divides gradients after its microbatches; it leaves that out from now on."""
    parts = int(schedule._n_microbatches) if schedule.scale_grads else 1
    schedule.scale_grads = False
    return parts
