"""Private API of Dynamo and Inductor: compiled modules, the guards of compiled code, and recompilation."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

import torch

from castwise.core._torch.calls import _own_frames, without_compiler
from castwise.core._torch.release import RELEASE
from castwise.core._torch.tensors import living

_F = TypeVar("_F", bound=Callable[..., Any])
_SPARE_DEVICES = 3
_SPARE_DTYPES = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
MAX_GUARD_CODE = len(_SPARE_DTYPES) ** _SPARE_DEVICES - 1
_thread = threading.local()


@functools.cache
def _spare_devices() -> Mapping[str, torch.dtype]:
    """Return device types that nobody has here, with torch's autocast dtype of each.

    An extension that brings such a device registers its module as an attribute of torch.
    """
    spare = [device for device in ("maia", "ipu", "hpu", "xla") if not hasattr(torch, device)]
    return {device: torch.get_autocast_dtype(device) for device in spare[:_SPARE_DEVICES]}


def set_guard_code(code: int) -> None:
    """Store a number in a thread-local state that Dynamo guards, so that compiled code recompiles when the number changes.

    Dynamo's global guard compares the autocast state of every device type that torch knows, and the dtypes where
    autocast is enabled. The number is encoded in the autocast dtypes of device types that nobody has here.
    No tensor is on such a device, so no operator is affected. This costs a few thread-local writes. torch has no public
    hook for custom guards.

    Args:
        code: The number, at most ``MAX_GUARD_CODE``. 0 restores the default state.
    """
    if code == getattr(_thread, "guard_code", 0):
        return
    _thread.guard_code = code
    for device, default in _spare_devices().items():
        torch.set_autocast_enabled(device, code > 0)
        torch.set_autocast_dtype(device, _SPARE_DTYPES[code % len(_SPARE_DTYPES)] if code else default)
        code //= len(_SPARE_DTYPES)


def compiled_code_sees(change: Callable[[], None]) -> bool:
    """Whether calling ``change``, which changes the state of the process, makes already compiled code recompile."""
    guard = torch._C._dynamo.guards.GlobalStateGuard()
    before = guard.check()
    change()
    return before and not guard.check()


_skipped: set[str] = set()
_newest: dict[str, tuple[int, str]] = {}
"""The number of loaded modules and the newest module's name at the last :func:`skip_modules`, by its ``package``."""


def skip_modules(package: str, with_callees: tuple[str, ...]) -> None:
    """Tell Dynamo never to start a compilation at functions of a package. Dynamo may still inline these functions.

    Hooks of a compiled model run in plain Python, and so does a function that Dynamo gave up compiling. Dynamo may then compile
    each function that they call. Hooks and context managers that change thread state must run uncompiled there.

    Args:
        package: Name of the package. Only loaded modules are treated, so call this function again after further modules
            were loaded.
        with_callees: Names of its modules of which Dynamo also skips what their functions call, such as methods of containers.
    """
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    def skip(code: CodeType, strategy: _FrameExecStrategy) -> None:
        set_code_exec_strategy(code, strategy)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                skip(constant, strategy)

    def visit(owner: Any, module: str, strategy: _FrameExecStrategy) -> None:
        for value in list(vars(owner).values()):
            inner = getattr(value, "fget", None) or getattr(value, "__wrapped__", None) or value
            function = getattr(inner, "__func__", inner)
            if getattr(function, "__module__", None) != module:
                continue
            if isinstance(function, FunctionType):
                skip(function.__code__, strategy)
            elif isinstance(value, type) and value is not owner:
                visit(value, module, strategy)

    newest = len(sys.modules), next(reversed(sys.modules))
    if _newest.get(package) == newest:
        return
    for name in [name for name in sys.modules if name.startswith(f"{package}.") and name not in _skipped]:
        callees = _FrameAction.SKIP if name in with_callees else _FrameAction.DEFAULT
        visit(sys.modules[name], name, _FrameExecStrategy(_FrameAction.SKIP, callees))
        _skipped.add(name)
    _newest[package] = newest


def graph_function(function: _F) -> _F:
    """Make Dynamo put calls of ``function`` into its graph as they are, without tracing into the function.

    Such a call is never dropped from the graph.
    """
    torch.fx.node.has_side_effect(function)
    return torch.compiler.allow_in_graph(function)  # type: ignore[no-any-return]


def mark_constant(function: Callable[..., Any]) -> None:
    """Make Dynamo call ``function`` during tracing and keep the result as a constant.

    The public ``torch.compiler.assume_constant_result`` sets the same mark but imports Dynamo to do so.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


_casts_recorded = False


def is_exporting() -> bool:
    """Whether torch.export is tracing a graph that lacks the casts of operators.

    torch's own function says whether it is tracing, but Dynamo of torch 2.11 takes it to be always true.
    """
    return torch.compiler.is_exporting() and not _casts_recorded


mark_constant(is_exporting)

TRACES_IDENTITY = RELEASE >= (2, 13)
"""Whether this release's Dynamo can trace ``id`` and ``is`` of containers. torch 2.11's cannot."""


def unkeyed_autocast() -> str:
    """Return the devices where autocast is enabled with their dtypes, if torch does not add them to the keys of its compile caches.

    The keys of torch 2.11 say only whether autocast is enabled, so it runs a graph compiled for bf16 where autocast is to
    fp16. torch 2.13 adds the dtypes.
    """
    if RELEASE >= (2, 13):
        return ""
    devices = [kind for kind in torch._C._autocast_supported_devices() if kind not in _spare_devices()]
    return ",".join(
        f"{kind}={torch.get_autocast_dtype(kind)}" for kind in devices if torch.is_autocast_enabled(kind)
    )


def object_at(address: int) -> Any:
    """Return the object whose ``id`` is ``address``. The object must still be alive.

    Dynamo can trace ``id``, and guards that the result stays the same.
    """
    return ctypes.cast(address, ctypes.py_object).value


def set_autocast_attributes(
    block: torch.autocast, device_type: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool
) -> None:
    """Set the attributes of ``torch.autocast`` on an instance of a subclass, which skips ``torch.autocast.__init__``."""
    block.device, block.fast_dtype = device_type, dtype
    block._enabled, block._cache_enabled = enabled, cache_enabled


def custom_backend_name() -> str:
    """Return torch's name for the device type of an out-of-tree backend, which ``torch.autocast`` has as an attribute."""
    return str(torch._C._get_privateuse1_backend_name())


def trace_context(cls: type, as_torchs: Callable[[Any], bool]) -> None:
    """Make Dynamo trace the methods of a subclass of ``torch.autocast``, for instances made outside of compiled code.

    By default Dynamo treats instances of a subclass as plain ``torch.autocast`` objects and ignores the subclass's
    methods.

    Args:
        cls: The subclass.
        as_torchs: Called with an instance. Returns True if Dynamo should still treat it as a plain ``torch.autocast``.
    """
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.variables import ctx_manager
    from torch._dynamo.variables.builder import VariableBuilder

    class Reentrant(ctx_manager.AutocastModeVariable):
        """An autocast block that traced code may enter again while it is entered.

        Dynamo's own variable for autocast holds the state of one entry, so each entry creates a new variable.
        """

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
    """Call ``callback`` before each later call of the code that Dynamo is compiling now, outside of the compiled graph.

    Only Dynamo's guards run at that point, so the callback is called by a guard that always holds. torch has no public
    hook for this.
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
    """An import hook that calls a function when Python has loaded the module with a given name."""

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
    """Call ``function`` as soon as Dynamo has been imported, which may never happen.

    If Dynamo has already been imported, ``function`` is called immediately.
    """
    if "torch._dynamo" in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _Loading("torch._dynamo", function))


def why_not_compile(device_type: str) -> str:
    """Return why torch.compile cannot compile code for a device type, or an empty text if it can.

    Inductor itself compiles for the devices of torch. An extension has to register its device with Inductor.
    """
    try:
        from torch._dynamo.eval_frame import check_if_inductor_supported

        check_if_inductor_supported()
        if device_type != custom_backend_name():
            return ""
        from torch._inductor.codegen.common import get_scheduling_for_device, init_backend_registration

        init_backend_registration()
    except (ImportError, RuntimeError) as error:
        return f"this build of torch has no compiler: {error}"
    return (
        "" if get_scheduling_for_device(device_type) else "its extension has not registered it with Inductor"
    )


def dynamo_loaded() -> bool:
    """Whether Dynamo has been imported. Callers check this to avoid importing it, which takes a second."""
    return "torch._dynamo.symbolic_convert" in sys.modules


class DynamoTrace:
    """The trace of a function that Dynamo is making on this thread."""

    def __init__(self, tx: Any) -> None:
        self._output = tx.output
        self._root = tx.output.root_tx

    @classmethod
    def current(cls) -> DynamoTrace | None:
        """Return the trace in progress, or None. While a backend compiles a finished graph, no trace is in progress."""
        if not dynamo_loaded():
            return None
        from torch._dynamo import symbolic_convert

        tx = getattr(symbolic_convert.tls, "current_tx", None)
        if tx is None or getattr(tx.output, "_castwise_done", False):
            return None
        return cls(tx)

    def hold(self, restore: Callable[[], None]) -> None:
        """Call ``restore`` when the trace ends, and forbid graph breaks until :meth:`release`.

        This method is called after a hook or a context manager has changed thread state. A graph break before the state
        is restored would lose the changed state at run time. If graph breaks are forbidden, Dynamo instead gives up on
        the Python function and runs it uncompiled, with its hooks. The functions that it calls are still compiled.
        """
        output = self._output

        def cleanup() -> None:
            output._castwise_done = True
            restore()

        output.add_cleanup_hook(cleanup)
        self._root.active_generic_context_managers.append(self)

    def release(self) -> None:
        """Allow graph breaks again after the state that :meth:`hold` protects was restored."""
        active = self._root.active_generic_context_managers
        for index in range(len(active) - 1, -1, -1):
            if isinstance(active[index], DynamoTrace):
                del active[index]
                return


def keep_compile_callbacks(start: Callable[[Any], None], end: Callable[[Any], None]) -> None:
    """Make Dynamo call ``start`` before and ``end`` after each compilation, on the thread that compiles.

    This function must be called again after ``torch._dynamo.reset()``, which removes callbacks. Another call is cheap.
    """
    from torch._dynamo.callback import callback_handler

    if start not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(start)
    if end not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(end)


_backward_pass_autocast = ""
"""torch's setting before :func:`trace_backward_without_autocast` changed it, or an empty text if it did not."""


def trace_backward_without_autocast(on: bool) -> None:
    """Make AOTAutograd trace backward without the autocast of the forward, as backward runs in eager mode.

    By default torch traces backward under the forward's autocast. A part of the forward that turns autocast off, such as a
    region in fp32, then has a backward in the low format (pytorch issue 179804).

    Args:
        on: False undoes the change. A setting that is not torch's default ``"same_as_forward"`` is left alone.
    """
    global _backward_pass_autocast
    import torch._functorch.config as config

    if on and config.backward_pass_autocast == "same_as_forward":
        _backward_pass_autocast, config.backward_pass_autocast = "same_as_forward", "off"
    elif not on and _backward_pass_autocast:
        _backward_pass_autocast, config.backward_pass_autocast = "", "same_as_forward"


_compiled, _compiled_s, _compiling_since = 0, 0.0, 0.0


def _compiling(_: object) -> None:
    global _compiling_since
    _compiling_since = time.perf_counter()


def _compiling_ended(_: object) -> None:
    global _compiled, _compiled_s
    _compiled, _compiled_s = _compiled + 1, _compiled_s + time.perf_counter() - _compiling_since


def compilations() -> tuple[int, float]:
    """Return how often this process has compiled since the first call of this function, and how many seconds that took.

    Forward and backward graphs count separately, and so do the graphs between graph breaks.
    """
    keep_compile_callbacks(_compiling, _compiling_ended)
    return _compiled, _compiled_s


def refuse_to_give_up() -> None:
    """Make Dynamo raise an error where it would silently run a function in eager mode after too many recompilations."""
    import torch._dynamo.config as config

    config.fail_on_recompile_limit_hit = True


def gave_up(error: BaseException) -> bool:
    """Whether an exception, or its cause, is the error that Dynamo raises because of :func:`refuse_to_give_up`."""
    return any("FailOnRecompileLimitHit" in type(one).__name__ for one in (error, error.__cause__))


def eager_random_numbers() -> contextlib.AbstractContextManager[Any]:
    """Return a context manager in which code compiled by Inductor draws the same random numbers as eager mode."""
    import torch._inductor.config as config

    return config.patch(fallback_random=True)  # type: ignore[no-any-return]


def ran_compiled(module: torch.nn.Module) -> bool:
    """Whether a module has already run compiled, by ``torch.compile`` or ``module.compile()``, so that it ignores new hooks.

    Dynamo keeps compiled code per code object, and all modules of a class share the code object of ``forward``. Dynamo
    does not compile the ``forward`` of torch's own modules, which all share two other code objects. So if there is
    compiled code, this function also checks whether this very module was compiled.
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
        thing._modules.get("_orig_mod") is module for thing in living(OptimizedModule)
    )


def inside_compiled(models: Iterable[torch.nn.Module]) -> set[torch.nn.Module]:
    """Return the modules of some models that are compiled themselves or are inside a compiled module.

    Hooks added to these modules are ignored, or cause recompilation. Modules that are compiled as part of a function
    are not found.
    """
    if not dynamo_loaded():
        return set()
    from torch._dynamo.eval_frame import OptimizedModule

    wrapped = {id(thing._modules["_orig_mod"]) for thing in living(OptimizedModule)}
    return {
        inner
        for model in models
        for module in model.modules()
        if id(module) in wrapped or is_compiled(module)
        for inner in module.modules()
    }


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module was compiled by ``module.compile()``, or is the wrapper that ``torch.compile`` returned."""
    call = module._compiled_call_impl
    return without_compiler(module) is not module or (
        call is not None and not hasattr(call, "__castwise_guard__")
    )


def forget_compiled(model: torch.nn.Module) -> None:
    """Make compiled functions recompile at their next call if they call modules of the same classes as those of a model.

    Dynamo guards the classes of modules but not their hooks, so compiled functions would otherwise ignore hooks that
    were added to the model.
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
