"""Install borders on a model: forward hooks that switch the precision and cast tensors where a region starts and ends.

A :class:`Border` is put around the whole model and around every region, as a pair of forward hooks. The hook before
``forward`` casts inputs and activates the region's precision settings (a :class:`~castwise.core.casting.frames.Frame`).
The hook after ``forward`` restores the former settings and casts outputs. ``forward`` itself is never replaced, so a
prepared model can be copied and compiled. Pickles leave borders out (:mod:`castwise.masters.pickles`).

An output is rounded no more than its next consumer needs. If operators outside the border are autocast, they cast their
inputs themselves. Then outputs are not rounded, and formats that the operators would refuse are cast to fp32. If
operators outside are not autocast, the border casts outputs to the format outside, since nothing else would. It keeps
the unrounded value beside the rounded one. Another border that receives the tensor unchanged, that of a neighbouring
fp32 region or of the whole model, uses the unrounded value. A 0-dim tensor, such as a loss, does not widen other
operands, so it is not rounded.

If operators are not autocast, a module may keep a table that is wider than its compute format
(:attr:`~castwise.core.model.resolve.ModulePlan.meets`). Inside such a module, operators that refuse an fp32 tensor
together with bf16 or fp16 ones get all of them in the compute format, and nothing else is cast. Its children with bf16
or fp16 parameters have borders of their own, inside which operators run unchanged.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from castwise.core import _torch
from castwise.core.casting import frames, kernels, tracing
from castwise.core.casting.backward import mark_boundary, note_backward
from castwise.core.casting.context import override_rows
from castwise.core.casting.frames import Frame
from castwise.core.casting.kernels import frame_of
from castwise.core.casting.trees import cast_floating, floating_to, map_arguments, map_tensors
from castwise.core.model import later
from castwise.core.model.complaints import Site, explain_backward, explain_dtype_error
from castwise.core.model.resolve import ModulePlan, Resolution, casts_operators
from castwise.core.model.rounding import RoundedInputs
from castwise.core.model.stored import explain_cast, refuse_cast
from castwise.core.plans import rules
from castwise.core.plans.formats import FORMATS, LOW_DTYPES
from castwise.core.plans.plan import Plan
from castwise.core.plans.text import shown
from castwise.errors import StateError

_WIDE = "_castwise_wide"
"""Name of an attribute of a rounded output, which holds the unrounded tensor and the output's version when rounded."""


_NOT_COPIED = ("_lease", "begin", "entries", "first", "loaded", "read", "rounding")


class Entries:
    """Records which autograd nodes were created inside a module that has a :class:`Border`, for its last 256 calls.

    Attributes:
        spans: For each call that created nodes, the sequence number of the first node and the number after the last.
        silent: Whether there was a call that created no nodes, as a call without gradients does.
        calls: The number of calls that created nodes.
    """

    def __init__(self) -> None:
        self.spans: deque[tuple[int, int]] = deque(maxlen=256)
        self.silent = False
        self.calls = 0
        self._open: list[int] = []

    def enter(self) -> None:
        """Record the start of a call.

        A call without gradients counts as creating no nodes, although torch creates some for casts of weights.
        """
        self._open.append(_torch.autograd.sequence_number() if torch.is_grad_enabled() else sys.maxsize)

    def leave(self) -> None:
        """Record the end of the call that started last."""
        first, last = self._open.pop() if self._open else 0, _torch.autograd.sequence_number()
        if first < last:
            self.spans.append((first, last))
            self.calls += 1
        else:
            self.silent = True

    def made(self, number: int) -> bool:
        """Whether the autograd node with this sequence number was created inside one of the recorded calls."""
        return any(first <= number < last for first, last in self.spans)


@dataclass(eq=False, repr=False)
class Border:
    """The border of a region, or of the whole model: a pair of forward hooks.

    Attributes:
        frame: The precision settings inside the border.
        cast_inputs: The dtype to which floating inputs are cast, or None to leave them as they are.
        cast_only: The dtypes of the inputs that are cast, or None to cast floating inputs of all dtypes.
        cast_outputs: The dtype to which floating outputs are cast, or None to leave them as they are.
        outer: The precision settings around the border; None for the border of the whole model.
        root: Whether this is the border of the whole model.
        follow_backward: Whether the backward pass must run under the settings of the forward pass on both sides of the
            border, because a plan's operator rules may hold on both. If only ``frame`` has such rules, its settings are
            recorded for the backward pass anyway.
        entries: Records the autograd nodes of calls, while someone reads the records.
        rounding: Checks the inputs of the first calls, if ``cast_inputs`` is bf16 or fp16. Only for the whole model.
        first: A trained parameter and its dtype. If a call with gradients finds another dtype, all trained parameters
            are checked. Only for the whole model.
        begin: A function that is called when a forward of the model begins that is not compiled, with whether the model
            is in training mode. Only for the whole model.
        loaded: A function that is called after a state was loaded into the model. Only for the whole model.
        read: A function that is called before the state of the model is read. Only for the whole model.
        site: The settings from which ``frame`` was made.
        tells_later: Whether to warn of outputs that may run code later. Only for the whole model.
    """

    frame: Frame
    cast_inputs: torch.dtype | None = None
    cast_only: tuple[torch.dtype, ...] | None = None
    cast_outputs: torch.dtype | None = None
    outer: Frame | None = None
    root: bool = False
    follow_backward: bool = False
    entries: Entries | None = None
    rounding: RoundedInputs | None = None
    first: tuple[weakref.ref[nn.Parameter], torch.dtype] | None = None
    begin: Callable[[bool], object] | None = None
    loaded: Callable[[], object] | None = None
    read: Callable[[], object] | None = None
    site: Site | None = None
    tells_later: bool = False

    def __post_init__(self) -> None:
        self.key = self.frame.key
        self.open()

    def open(self) -> None:
        """Register the kernels that carry out the plan's operator rules inside the module."""
        self._lease = kernels.Lease(self.frame.rows, self.frame.device_type) if self.frame.rows else None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _NOT_COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.open()

    def close(self) -> None:
        """Release the kernels that :meth:`open` registered. The hooks must have been removed before."""
        if self._lease is not None:
            self._lease.close()

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Activate the precision settings, as a forward pre-hook of a module whose inputs need no cast."""
        if is_compiling():
            if _torch.dynamo.is_exporting() and self.frame.enabled:
                _refuse_export(type(module).__name__)
            tracing.graph_push(self.key)
        else:
            self._check(module)
            if self.begin is not None:
                self.begin(module.training)
            frames.push(self.frame, self, self.root)

    def enter_and_cast(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Cast the inputs and activate the precision settings, as a forward pre-hook with keyword arguments.

        This hook is also used if inputs are not cast, but the change of settings must be recorded for the backward
        pass.
        """
        cast = self.cast_inputs
        if cast is not None:
            if self.rounding is not None and not is_compiling() and not _torch.tensors.is_tracing():
                kind = type(module).__name__
                self.rounding = self.rounding if self.rounding.look(kind, (args, kwargs)) else None
            if cast not in LOW_DTYPES and self.cast_only is None:
                args, kwargs = map_arguments(_widened, args, kwargs)
            args, kwargs = map_arguments(floating_to(cast, self.cast_only), args, kwargs)
        if is_compiling():
            if _torch.dynamo.is_exporting() and self.frame.enabled:
                _refuse_export(type(module).__name__)
            tracing.graph_push(self.key)
            return args, kwargs
        self._check(module)
        if self.follow_backward:
            args, kwargs = map_arguments(self._marked, args, kwargs)
        elif self.frame.overrides:
            map_tensors(self._noted_outside, (args, kwargs))
        if self.begin is not None:
            self.begin(module.training)
        frames.push(self.frame, self, self.root)
        return args, kwargs

    def _check(self, module: nn.Module) -> None:
        if "forward" in module.__dict__:
            check_forward(module)
        if self.first is not None and torch.is_grad_enabled():
            parameter = self.first[0]()
            if parameter is not None and parameter.dtype is not self.first[1]:
                refuse_cast(module)
        if self.entries is not None:
            self.entries.enter()

    def _marked(self, tensor: torch.Tensor) -> torch.Tensor:
        return mark_boundary(tensor, self.outer)

    def _noted_outside(self, tensor: torch.Tensor) -> torch.Tensor:
        return note_backward(tensor, self.outer)

    def _noted_inside(self, tensor: torch.Tensor) -> torch.Tensor:
        return note_backward(tensor, self.frame)

    def watch(
        self,
        model: nn.Module,
        begin: Callable[[bool], object],
        loaded: Callable[[], object],
        read: Callable[[], object],
    ) -> None:
        """Register functions to call at events of the whole model.

        Args:
            model: The model that this border is around.
            begin: Called when a forward begins that is not compiled, with the model's ``training`` attribute.
            loaded: Called after a state was loaded into the model.
            read: Called before the state of the model is read.
        """
        self.begin, self.loaded, self.read = begin, loaded, read
        if not isinstance(model, torch.jit.ScriptModule):
            model.register_load_state_dict_post_hook(self.load)
            model.register_state_dict_pre_hook(self.save)

    def load(self, _module: nn.Module, _keys: Any) -> None:
        """Call the function ``loaded``, as a hook that runs after a state was loaded into the whole model."""
        if self.loaded is not None:
            self.loaded()

    def save(self, _module: nn.Module, _prefix: str, _keep_vars: bool) -> None:
        """Call the function ``read``, as a hook that runs before the state of the whole model is read."""
        if self.read is not None:
            self.read()

    def run(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a method of a module under the border's precision settings, as the hooks do for a call of the module."""
        depth = frames.depth()
        args, kwargs = self.enter_and_cast(module, args, kwargs)
        try:
            output = call(*args, **kwargs)
        except BaseException as error:
            frames.unwind(depth)
            explain_cast(error, module)
            if self.site is not None:
                explain_dtype_error(error, module, self.site)
            raise
        return self.leave(module, args, output)

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Restore the former precision settings and cast the outputs, as a forward hook.

        The hook also runs after an exception, with ``output=None``.
        """
        if is_compiling():
            tracing.graph_pop()
        else:
            if not frames.leave(self):
                return output  # an exception was raised before enter
            if self.entries is not None:
                self.entries.leave()
            if (
                self.follow_backward or self.frame.overrides
            ):  # no view is returned here: a write to a view would lose the tensor hooks that users put on it
                map_tensors(self._noted_inside, output)
        cast = self.cast_outputs
        if not self.root:
            if cast is None:
                return output
            if cast in LOW_DTYPES:
                return map_tensors(lambda tensor: _rounded(tensor, cast), output)
            return cast_floating(output, cast)
        if output is None and not is_compiling():
            explain_cast(sys.exc_info()[1], module)
            if self.site is not None:
                explain_dtype_error(sys.exc_info()[1], module, self.site)
        if isinstance(output, torch.Tensor):
            output = _widened(output) if output.dtype in LOW_DTYPES else output
            return output.float() if cast is not None and output.dtype in LOW_DTYPES else output
        if self.tells_later and not is_compiling():
            self.tells_later = not later.told(type(module).__name__, output)
        output = map_tensors(_widened, output)
        return output if cast is None else cast_floating(output, cast, LOW_DTYPES)


def _refuse_export(kind: str) -> None:
    """Raise the error for ``torch.export`` of a model whose operators a plan casts.

    Raises:
        StateError: Always.
    """
    raise StateError(
        f"torch.export of a prepared {kind}: an exported graph would lack the plan's casts of operators, and fail at its first "
        "call. Call amp.close() and then castwise.export(model, plan, example), whose graph holds the casts."
    )


_torch.dynamo.mark_constant(_refuse_export)


def refuse_scripting(module: nn.Module) -> None:
    """Raise if ``torch.jit.script`` is about to compile a prepared module, or a region of one.

    Its hooks (:class:`Border`) would not run in scripted code.

    Raises:
        StateError: The module has such hooks.
    """
    if border_of(module) is None:
        return
    raise StateError(
        f"torch.jit.script of a prepared {type(module).__name__}: hooks switch the formats, and scripted code runs no hooks. "
        f"Script the model after "
        "amp.close(), which leaves it in fp32, trace it with torch.jit.trace, or script only parts of the model before "
        "preparing it"
    )


def _rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an output rounded to bf16 or fp16, with the unrounded tensor as an attribute of the rounded one.

    A 0-dim tensor is returned unchanged.
    """
    if not tensor.is_floating_point() or tensor.dtype is dtype or tensor.dim() == 0:
        return tensor
    low = tensor.to(dtype)
    # tensors made in inference mode have no version, so a later write to the rounded tensor would not be noticed
    if is_compiling() or not tensor.is_inference():
        low._castwise_wide = (tensor, _torch.tensors.version(low))  # type: ignore[attr-defined]
    return low


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return the unrounded value of a tensor that :func:`_rounded` rounded, unless it was written to since then.

    Any other tensor is returned unchanged.
    """
    wide = getattr(tensor, _WIDE, None)
    return wide[0] if wide is not None and wide[1] == _torch.tensors.version(tensor) else tensor


@dataclass(eq=False, repr=False)
class Method:
    """Runs a method of a prepared model other than ``forward`` under the model's precision settings.

    It is stored in the model's ``__dict__`` under the method's name, and is copied with the model.
    """

    module: nn.Module
    name: str
    border: Border
    before: Callable[[nn.Module], None]

    @property
    def __wrapped__(self) -> Any:
        """The wrapped method, for code that reads its signature or overrides it."""
        return getattr(type(self.module), self.name).__get__(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Cast the arguments, run the method under the model's precision settings, and cast the result."""
        self.before(self.module)
        return self.border.run(self.module, self.__wrapped__, args, kwargs)


@dataclass(eq=False)
class Door:
    """Hooks that run a submodule of a prepared model under the model's precision settings.

    They have an effect only if the submodule is called from outside the model.

    Attributes:
        border: The hooks of the model, which these hooks call.
        entered: For each running call of the submodule, whether it came from outside the model.
    """

    border: Border
    entered: list[bool] = field(default_factory=list)

    def put(self, part: nn.Module) -> None:
        """Install the hooks on a submodule of the model."""
        part.register_forward_pre_hook(self.enter, with_kwargs=True)
        part.register_forward_hook(self.leave, always_call=True)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Activate the model's precision settings if the call came from outside the model, as a forward pre-hook."""
        self.entered.append(not frames.depth())
        return self.border.enter_and_cast(module, args, kwargs) if self.entered[-1] else None

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Undo what :meth:`enter` did and cast the output, as a forward hook that also runs after an exception."""
        return self.border.leave(module, args, output) if self.entered.pop() else output


def check_forward(module: nn.Module) -> None:
    """Raise if ``torch.autocast`` wraps a module's ``forward``, where it would override the plan.

    Raises:
        StateError: ``torch.autocast`` wraps the module's ``forward``.
    """
    device_type = _torch.calls.autocast_within(module.__dict__.get("forward"))
    if device_type is not None:
        raise StateError(
            f"forward of this {type(module).__name__} was replaced by one inside torch.autocast({device_type!r}), which overrides the plan. "
            "Accelerate replaces forward for mixed_precision=, and the Trainer of transformers for bf16=True or fp16=True: leave that "
            "argument out, or train without the plan; with castwise.integrations.huggingface, Accelerate and the Trainer train by a plan"
        )


def strip(model: nn.Module, log: Callable[[Callable[[], None]], object]) -> None:
    """Remove castwise's hooks (:class:`Border`) from a model that has them because it is a copy of a prepared model.

    Before any hook is removed, ``log`` is called with a function that puts them back.
    """
    taken: list[tuple[Any, Any, Any]] = []
    for module in model.modules():
        for hooks in _torch.hooks.hook_tables(module):
            taken += [
                (hooks, key, hook)
                for key, hook in hooks.items()
                if isinstance(getattr(hook, "__self__", None), Border | Door)
            ]
        taken += [(module.__dict__, name, v) for name, v in vars(module).items() if isinstance(v, Method)]
    owners = [value if isinstance(value, Method) else value.__self__ for *_, value in taken]
    stripped = {owner if isinstance(owner, Border) else owner.border for owner in owners}

    def put_back() -> None:
        for border in stripped:
            border.open()
        for table, key, value in taken:
            table[key] = value

    log(put_back)
    for table, key, _ in taken:
        del table[key]
    for border in stripped:
        border.close()


def border_of(module: nn.Module) -> Border | None:
    """Return the :class:`Border` whose hooks a module has, or None."""
    own = (
        getattr(hook, "__self__", None)
        for hooks in _torch.hooks.hook_tables(module)
        for hook in hooks.values()
    )
    return next((border for border in own if isinstance(border, Border)), None)


def door_of(module: nn.Module) -> Border | None:
    """Return the border of the whole prepared model under whose plan a call of this module runs, or None.

    The module is the model, or has a :class:`Door`.
    """
    own = (getattr(hook, "__self__", None) for hook in _torch.hooks.hook_tables(module)[0].values())
    return next(
        (
            border
            for each in own
            if (border := each.border if isinstance(each, Door) else each) is not None
            and isinstance(border, Border)
            and border.root
        ),
        None,
    )


def root_of(model: nn.Module) -> Border | None:
    """Return the :class:`Border` of a prepared model, or None if the module is not a whole prepared model."""
    border = border_of(model)
    return border if border is not None and border.root else None


def explain(error: BaseException, models: Iterable[nn.Module], loss: torch.Tensor | None = None) -> None:
    """Add cures to the message of a dtype error that is due to weights used outside of their prepared models.

    ``loss`` is given if the error came from the backward pass of that loss.
    """
    for model in models:
        if (border := root_of(model)) is None or border.site is None:
            continue
        if loss is None:
            explain_dtype_error(error, model, border.site, outside=True)
        else:
            explain_backward(error, model, border.site, loss)


def has_method(model: nn.Module, name: str) -> bool:
    """Whether a model's class has a plain method of a name, which the model itself does not replace.

    A generator or a coroutine is none, since a call of it only begins later.
    """
    method = inspect.getattr_static(type(model), name, None)
    return (
        inspect.isfunction(method) and name not in vars(model) and not later.kind_of(inspect.unwrap(method))
    )


def check_methods(plan: Plan, model: nn.Module, methods: Iterable[str]) -> None:
    """Check that a model has the methods that are to run under the plan.

    Raises:
        StateError: The model lacks a method, or ``methods`` are not names. Or ``forward`` or a method is a generator or a
            coroutine, whose code would run outside of the plan.
    """
    if isinstance(methods, str) or not (
        isinstance(methods, Iterable) and all(isinstance(method, str) for method in methods)
    ):
        raise StateError(
            f"prepare(methods={shown(methods)}) is not allowed. Allowed: a sequence of names of methods of {type(model).__name__}, such "
            "as methods=('encode',), or none: methods=()."
        )
    for method in methods:
        if not callable(getattr(type(model), method, None)):
            known = [n for n in dir(type(model)) if not n.startswith("_") and n not in dir(nn.Module)]
            raise StateError(
                f"prepare: methods={method!r}: {type(model).__name__} has no method of that name; "
                f"it has {', '.join(known) or 'none beyond forward'}"
            )
    for method in ("forward", *methods) if later.matters(plan) else ():
        later.refuse(
            f"prepare: {type(model).__name__}.{method}", inspect.getattr_static(type(model), method, None)
        )


def is_as_planned(border: Border, resolution: Resolution, place: ModulePlan) -> bool:
    """Whether the border that a module has casts as the one that ``place`` asks for."""
    site, around = border.site, place.around or place.compute
    return (
        site is not None
        and not border.root
        and (site.plan, site.compute, site.meets) == (resolution.plan, place.compute, place.meets)
        and border.cast_outputs is _cast_outputs(resolution.plan, place.compute, around)
    )


def _frame_for(plan: Plan, compute: str, device_type: str, rows: Mapping[str, rules.Row]) -> Frame:
    dtype = FORMATS[compute].dtype
    if casts_operators(plan, compute):
        return frame_of(device_type, dtype, rows)
    return frame_of(device_type, None, surrounding=dtype)


def _cast_outputs(plan: Plan, inside: str, around: str) -> torch.dtype | None:
    """Return the dtype to which a region's outputs are cast, or None; the module docstring says why.

    Args:
        plan: The plan.
        inside: The compute format of the region.
        around: The compute format of the module that encloses the region.
    """
    if not casts_operators(plan, around):
        return FORMATS[around].dtype
    return None if inside in (around, "fp32") else torch.float32


def _widens_all(model: nn.Module, resolution: Resolution) -> bool:
    """Whether a model is given in bf16 or fp16 and all of it is stored in fp32, so that inputs in its former format meet fp32."""
    if torch.float32 not in resolution.storage.values():
        return False
    both = model.named_parameters()
    return all(p.dtype not in LOW_DTYPES or name in resolution.storage for name, p in both)


def install(
    model: nn.Module,
    resolution: Resolution,
    device_type: str,
    methods: Iterable[str],
    before: Callable[[nn.Module], None],
    log: Callable[[Callable[[], None]], object],
) -> Border:
    """Install the hooks (:class:`Border`) that make a model run as its resolution says.

    Args:
        model: The resolved model. Its class, ``forward`` and parameters do not change.
        resolution: The resolution of a plan for this model.
        device_type: Device of the model.
        methods: Names of methods other than ``forward`` that are to run under the plan, already checked.
        before: A function that is called with the model before each of these methods, as forward pre-hooks are called
            before ``forward``.
        log: A function that is called before anything is installed, with a function that removes the hooks.

    Returns:
        The border of the whole model.
    """
    plan, root_place = resolution.plan, resolution.places[""]
    computes = {place.compute for place in resolution.places.values()}
    own = dict(override_rows(plan, device_type)) if any(casts_operators(plan, c) for c in computes) else {}
    rows = dict(own)
    if (
        device_type == "cpu"
        and computes & ({"fp16"} if _torch.cpu.cpu_has_bf16() else {"fp16", "bf16"})
        and any(isinstance(m, nn.LSTM) and not m.proj_size for m in model.modules())
    ):
        # torch.autocast runs an LSTM without projections by oneDNN, which so far supports none in fp16 on any CPU, and none in bf16
        # on a CPU without AVX-512 ("could not create a primitive descriptor"). Casting around the whole operator runs it low
        # by torch's own kernels instead.
        rows.setdefault("lstm", rules.Row("lstm", "lower", "oneDNN does not support this LSTM on this CPU"))
    follow = bool(rows)
    # These rules only affect operators that could not run otherwise, so they do not need ``follow``: a border whose
    # own settings have rules records them for the backward pass in any case.
    extra = dict(rules.stored_low(plan.rules, device_type)) if resolution.mixes else {}
    if own and plan.rules == "none":
        extra |= rules.meetings(
            device_type
        )  # what a rule casts to fp32 goes on to operators with low weights
    rows |= {op: row for op, row in extra.items() if op not in dict(plan.ops)}
    made = {compute: _frame_for(plan, compute, device_type, rows) for compute in computes}
    meeting = {
        compute: frame_of(device_type, FORMATS[compute].dtype, rules.meetings(device_type), cache=False)
        for compute in {place.compute for place in resolution.places.values() if place.meets}
    }

    def frame(place: ModulePlan) -> Frame:
        return (meeting if place.meets else made)[place.compute]

    beside = {op: row for op, row in rows.items() if own.get(op) is not row}

    def site(place: ModulePlan) -> Site:
        return Site(plan, place.compute, device_type, beside, place.meets)

    def outer(path: str) -> Frame:
        """Return the precision settings of the nearest region, or of the model, around the module at ``path``."""
        above = path.rpartition(".")[0]
        place = resolution.places[above]
        return outer(above) if above and place.around is None else frame(place)

    root_input: torch.dtype | None = None
    if plan.params == "compute" or root_place.compute != plan.compute:
        root_input = FORMATS[root_place.compute].dtype
    # autocast operators accept both fp32 and the plan's format, and round only what they compute with
    casts = root_input is not None and plan.rules != "none" and casts_operators(plan, root_place.compute)
    cast_inputs, cast_only = root_input, None
    if casts:
        cast_inputs, cast_only = torch.float32, tuple({torch.float64, *LOW_DTYPES} - {root_input})
    elif root_input is None and root_place.compute == "fp32" and _widens_all(model, resolution):
        cast_inputs, cast_only = torch.float32, tuple(LOW_DTYPES)
    alive = weakref.ref(model)  # the undo entry must not keep the model alive
    borders: list[tuple[weakref.ref[nn.Module], Border]] = []

    def remove() -> None:
        for reference, border in borders:
            module = reference()
            if module is not None:
                _torch.hooks.remove_hooks(
                    module, border.enter, border.enter_and_cast, border.leave, border.load, border.save
                )
                _torch.calls.unguard_calls(module, border)
        target = alive()
        for method in methods:
            if target is not None:
                target.__dict__.pop(method, None)
        for _, border in borders:
            border.close()

    def put(module: nn.Module, border: Border) -> None:
        # listed before the hooks are installed, so that ``remove`` also finds those of an interrupted call
        borders.append((weakref.ref(module), border))
        if border.cast_inputs is not None or border.follow_backward:
            module.register_forward_pre_hook(border.enter_and_cast, with_kwargs=True)
        else:
            module.register_forward_pre_hook(border.enter)
        module.register_forward_hook(border.leave, always_call=True)
        _torch.calls.guard_calls(module, border, frames.depth, frames.unwind)

    log(remove)
    root = Border(
        frame(root_place),
        cast_inputs=cast_inputs,
        cast_only=cast_only,
        cast_outputs=torch.float32 if plan.output == "fp32" else None,
        root=True,
        follow_backward=follow,
        site=site(root_place),
        tells_later=later.matters(plan),
    )
    if root.cast_inputs in LOW_DTYPES:
        root.rounding = RoundedInputs(root.cast_inputs)
    put(model, root)
    modules = dict(model.named_modules())
    for place in resolution.borders:
        assert place.around is not None
        border = Border(
            frame(place),
            cast_inputs=FORMATS[place.compute].dtype,
            cast_outputs=_cast_outputs(plan, place.compute, place.around),
            outer=outer(place.path),
            follow_backward=follow,
            site=site(place),
        )
        put(modules[place.path], border)
    for method in methods:
        model.__dict__[method] = Method(model, method, root, before)
    return root
