"""Find the regions of a plan in a model, store their parameters and run each in its format.

A :class:`Border` is put around the whole model and around every region, as a pair of forward hooks: on the way in
it casts inputs and puts the region's frame in force, on the way out it restores what was there and casts outputs to
the format around it. ``forward`` itself is never replaced, so a prepared model pickles, copies and compiles.

Patterns are globs over module paths in which ``*`` stays within one level and ``**`` crosses levels
(``encoder.layers.*.norm``, ``**.norm``), or ``type:`` and a glob over the names of a module's class and its bases.
Where several regions match a module the last one wins; a module that none matches belongs to the region around it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from castwise import _torch, rules
from castwise.casting import frames, kernels
from castwise.casting.context import override_rows
from castwise.casting.frames import Frame, mark_boundary, thread
from castwise.casting.kernels import frame_of
from castwise.casting.trees import cast_floating, map_tensors
from castwise.errors import PatternError, PlanError, StateError
from castwise.formats import FORMATS
from castwise.plan import Plan, Region

__all__ = [
    "Border",
    "assign",
    "install",
    "only_matching",
    "owner",
    "storage_dtypes",
    "store",
    "stored_format",
]

LOW_DTYPES = (torch.bfloat16, torch.float16)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


# --- which module belongs to which region --------------------------------------------------------------------


def _path_regex(glob: str) -> re.Pattern[str]:
    wild = {"**": r".*", "*": r"[^.]*", "?": r"[^.]"}
    return re.compile(
        "".join(wild.get(piece) or re.escape(piece) for piece in re.split(r"(\*\*|\*|\?)", glob))
    )


def _matches(region: Region, name: str, module: nn.Module) -> bool:
    if region.is_type:
        names = (cls.__name__ for cls in type(module).__mro__ if cls not in (nn.Module, object))
        return any(fnmatch.fnmatchcase(cls, region.glob) for cls in names)
    if not name:
        return region.glob == "**"
    return _path_regex(region.glob).fullmatch(name) is not None


def _never_called(model: nn.Module) -> dict[nn.Module, str]:
    """Modules whose forward does not run in normal use, with the reason."""
    found: dict[nn.Module, str] = {}
    for module in model.modules():
        if isinstance(module, _CONTAINERS):
            found[module] = f"{type(module).__name__} is a container; name its children with '.*'"
        if isinstance(module, nn.MultiheadAttention):
            found[module.out_proj] = (
                "nn.MultiheadAttention uses the weights of out_proj without calling it; name the attention itself"
            )
    return found


def assign(model: nn.Module, regions: Iterable[Region]) -> dict[str, Region]:
    """Which region each named module is matched by, itself and not through a parent.

    Args:
        model: The model that the plan is applied to.
        regions: The plan's regions, in order.

    Returns:
        Module path -> the last region that matches it.

    Raises:
        PatternError: A pattern that matches no module, or none whose forward runs. Type patterns may match
            nothing: a plan that keeps ``type:BatchNorm*`` in fp32 is right for a model without one.
    """
    modules = dict(model.named_modules())
    silent = _never_called(model)
    out: dict[str, Region] = {}
    for region in regions:
        hits = [name for name, module in modules.items() if _matches(region, name, module)]
        if not hits and not region.is_type:
            last = region.glob.split(".")[-1].strip("*")
            near = [name for name in modules if last and last in name][:5]
            hint = f" Modules with a similar name: {', '.join(near)}." if near else ""
            raise PatternError(
                f"Region({region.pattern!r}): no module of {type(model).__name__} matches.{hint} A '*' stays within one "
                "level and '**' crosses levels; print(dict(model.named_modules()).keys()) lists the paths. For one stage of a "
                "pipeline, whose other stages may have it, call prepare(..., part=True)."
            )
        quiet = [name for name in hits if modules[name] in silent]
        if region.compute is not None and quiet:
            reason = silent[modules[quiet[0]]]
            if len(quiet) == len(hits):
                raise PatternError(
                    f"Region({region.pattern!r}): matches only {quiet[0]!r}, whose forward never runs: {reason}."
                )
            containers_only = all(isinstance(modules[name], _CONTAINERS) for name in quiet)
            if not containers_only:
                warnings.warn(
                    f"Region({region.pattern!r}) does not reach {', '.join(quiet)}: {reason}.", stacklevel=4
                )
        for name in hits:
            out[name] = region
    return out


def only_matching(plan: Plan, model: nn.Module) -> Plan:
    """The plan without the regions by path that match nothing in a model: those of a pipeline's other stages."""
    modules = list(model.named_modules())
    here = tuple(
        region
        for region in plan.regions
        if region.is_type or any(_matches(region, name, module) for name, module in modules)
    )
    return dataclasses.replace(plan, regions=here)


def owner(name: str, assigned: Mapping[str, Region]) -> Region | None:
    """The region that a module belongs to: its own, else that of the nearest parent with one."""
    while True:
        if name in assigned:
            return assigned[name]
        if not name:
            return None
        name = name.rpartition(".")[0]


def _casts_operators(plan: Plan, compute: str) -> bool:
    return compute in ("bf16", "fp16") and (plan.rules != "none" or bool(plan.ops))


# --- storage -------------------------------------------------------------------------------------------------


def stored_format(plan: Plan, region: Region | None) -> str | None:
    """Format that a region's parameters are stored in; None leaves them as they are."""
    if region is not None:
        if region.params is not None:
            return region.params
        if region.compute is not None and (
            plan.params == "compute" or region.compute == "fp64" or plan.rules == "none"
        ):
            return region.compute
    return plan.compute if plan.params == "compute" else None


def storage_dtypes(
    model: nn.Module, plan: Plan, keep: Container[torch.Tensor] = ()
) -> dict[torch.Tensor, torch.dtype]:
    """The dtype that each floating parameter and buffer is to be stored in, for those that must change.

    A tensor shared by several regions takes the widest of their formats. Buffers follow their module's parameters,
    as in ``module.to(dtype)``.

    Args:
        model: The model that the plan is applied to.
        plan: The plan.
        keep: Parameters that stay as they are: FSDP2 keeps its shards in fp32, which are masters enough, and gathers
            them low by ``Amp.mp_policy``.
    """
    assigned = assign(model, plan.regions)
    wanted: dict[torch.Tensor, list[torch.dtype]] = {}
    for name, module in model.named_modules():
        stored = stored_format(plan, owner(name, assigned))
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_floating_point() and tensor not in keep:
                wanted.setdefault(tensor, []).append(FORMATS[stored].dtype if stored else tensor.dtype)
    out = {}
    for tensor, dtypes in wanted.items():
        dtype = kernels.widest_dtype(dtypes)
        if dtype is not None and dtype is not tensor.dtype:
            out[tensor] = dtype
    return out


def store(model: nn.Module, dtypes: Mapping[torch.Tensor, torch.dtype]) -> dict[torch.Tensor, torch.Tensor]:
    """Store parameters and buffers in the given dtypes, in place: every reference to them stays good.

    Returns:
        The tensors' former contents, for those that were narrowed: what fp32 masters start from.

    Warns:
        UserWarning: When a weight does not fit fp16: values above 65,504 would become infinite.
    """
    former: dict[torch.Tensor, torch.Tensor] = {}
    names = {tensor: name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    _check_range(names, dtypes)
    for tensor, dtype in dtypes.items():
        if torch.finfo(dtype).bits < torch.finfo(tensor.dtype).bits:
            former[tensor] = tensor.detach()
        if hasattr(tensor, "device_mesh"):
            _torch.store_dtensor(tensor, dtype)
        else:
            tensor.data = tensor.data.to(dtype)
        if tensor.grad is not None:
            tensor.grad = tensor.grad.to(dtype)
    return former


def _check_range(names: Mapping[torch.Tensor, str], dtypes: Mapping[torch.Tensor, torch.dtype]) -> None:
    over, under = [], []
    finfo = torch.finfo(torch.float16)
    for tensor, dtype in dtypes.items():
        if dtype is not torch.float16 or tensor.is_meta or tensor.numel() == 0:
            continue
        magnitude = (_torch.local_tensor(tensor) if hasattr(tensor, "device_mesh") else tensor).detach().abs()
        if magnitude.numel() == 0:
            continue
        if bool((magnitude > finfo.max).any()):
            over.append(f"{names.get(tensor, '?')} (largest {float(magnitude.max()):.4g})")
        lost = (magnitude < finfo.smallest_normal / 2048) & (magnitude > 0)
        if float(lost.float().mean()) > 0.01:
            under.append(names.get(tensor, "?"))
    if over:
        raise PlanError(
            f"prepare: weights beyond fp16's largest number, 65504, would become infinite: {', '.join(over[:5])}. "
            "Use a bf16 plan, or Region(path, params='fp32') for these modules."
        )
    if under:
        warnings.warn(
            f"prepare: more than 1 % of the weights of {', '.join(under[:5])} are below fp16's smallest numbers and become "
            "zero; a model trained in bf16 may need a bf16 plan",
            stacklevel=4,
        )


# --- borders -------------------------------------------------------------------------------------------------


class Border:
    """The border of a region, or of the whole model: a pair of forward hooks.

    Args:
        frame: What is in force inside.
        cast_inputs: Dtype of floating inputs inside; None leaves them.
        cast_outputs: Dtype of floating outputs outside; None leaves them.
        outer: Frame around the border by the module tree; None around the whole model.
        root: Whether this is the border of the whole model.
        follow_backward: Whether backward must know which frame forward ran in, as it must with operator overrides.
        path: Module path, for messages.
    """

    def __init__(
        self,
        frame: Frame,
        *,
        cast_inputs: torch.dtype | None = None,
        cast_outputs: torch.dtype | None = None,
        outer: Frame | None = None,
        root: bool = False,
        follow_backward: bool = False,
        path: str = "",
    ) -> None:
        self.frame = frame
        self.key = frame.key
        self.cast_inputs = cast_inputs
        self.cast_outputs = cast_outputs
        self.outer = outer
        self.root = root
        self.follow_backward = follow_backward
        self.path = path
        self._lease = kernels.Lease(frame.rows, frame.device_type) if frame.rows else None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lease"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lease = kernels.Lease(self.frame.rows, self.frame.device_type) if self.frame.rows else None

    def close(self) -> None:
        """Give up the override kernels; the hooks must have been removed before."""
        if self._lease is not None:
            self._lease.close()

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Forward pre-hook where inputs need no cast."""
        if is_compiling():
            frames.graph_push(self.key)
        else:
            frames.push(self.frame, self, self.root)

    def enter_and_cast(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Forward pre-hook with keyword arguments, where inputs are cast or backward must be told of the border."""
        if self.cast_inputs is not None:
            args = cast_floating(args, self.cast_inputs)
            kwargs = cast_floating(kwargs, self.cast_inputs)
        if is_compiling():
            frames.graph_push(self.key)
            return args, kwargs
        if self.follow_backward:
            args = self._marked(args, self.outer)
            kwargs = self._marked(kwargs, self.outer)
        frames.push(self.frame, self, self.root)
        return args, kwargs

    @staticmethod
    def _marked(value: Any, frame: Frame | None) -> Any:
        return map_tensors(lambda tensor: mark_boundary(tensor, frame), value)

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook; runs after an exception too, then with ``output=None``."""
        if is_compiling():
            frames.graph_pop()
        else:
            saved = thread.state.saved
            if not saved or saved[-1][6] is not self:
                return output  # an exception came before enter
            if self.follow_backward and output is not None:
                output = self._marked(output, self.frame)
            frames.pop()
        cast = self.cast_outputs
        if self.root:
            if isinstance(output, torch.Tensor):
                return output.float() if cast is not None and output.dtype in LOW_DTYPES else output
            if output is None and not is_compiling():
                explain_mismatch(sys.exc_info()[1], module)
            return output if cast is None else cast_floating(output, cast, LOW_DTYPES)
        return output if cast is None else cast_floating(output, cast)


class Method:
    """A method of a prepared model other than ``forward``, run inside the model's border.

    Stands in the instance's dictionary; pickles and copies with it.
    """

    def __init__(self, module: nn.Module, name: str, border: Border) -> None:
        self.module = module
        self.name = name
        self.border = border

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        border = self.border
        method = getattr(type(self.module), self.name).__get__(self.module)
        args, kwargs = border.enter_and_cast(self.module, args, kwargs)
        output = None
        try:
            output = method(*args, **kwargs)
        finally:
            output = border.leave(self.module, args, output)
        return output


def strip(model: nn.Module) -> None:
    """Remove borders that came with a copy or a pickle of a prepared model."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                border = getattr(hook, "__self__", None)
                if isinstance(border, Border):
                    del hooks[key]
                    border.close()
        for name, value in list(vars(module).items()):
            if isinstance(value, Method):
                del module.__dict__[name]


def leave_interrupted() -> None:
    """Leave borders that were entered and never left: a forward that KeyboardInterrupt ended.

    torch runs hooks after an ``Exception`` only. Called where no forward can be running.
    """
    saved = thread.state.saved
    while saved and isinstance(saved[-1][6], Border):
        frames.pop()


def _frame_for(plan: Plan, compute: str, device_type: str, rows: Mapping[str, rules.Row]) -> Frame:
    dtype = FORMATS[compute].dtype
    if _casts_operators(plan, compute):
        return frame_of(device_type, dtype, rows)
    return frame_of(device_type, None, surrounding=dtype)


def install(
    model: nn.Module, plan: Plan, device_type: str, methods: Iterable[str] = ()
) -> tuple[Border, Callable[[], None]]:
    """Put the borders of a plan on a model.

    Args:
        model: A module in any state; its class, ``forward`` and parameters stay what they are.
        plan: The plan to run by.
        device_type: Where the model runs.
        methods: Names of methods other than ``forward`` that are called from outside.

    Returns:
        The border of the whole model, and what removes all of it again.

    Raises:
        PatternError: As :func:`assign`.
        StateError: A name in ``methods`` that the model does not have.
    """
    assigned = assign(model, plan.regions)
    computes = {plan.compute} | {r.compute for r in plan.regions if r.compute}
    rows = dict(override_rows(plan, device_type)) if any(_casts_operators(plan, c) for c in computes) else {}
    if device_type == "cpu" and "fp16" in computes and any(isinstance(m, nn.LSTM) for m in model.modules()):
        # torch.autocast asks oneDNN for an fp16 LSTM, which it has on no CPU so far ("could not create a primitive
        # descriptor"). Casting around the whole operator runs it in fp16 by torch's own kernels instead.
        rows.setdefault("lstm", rules.Row("lstm", "lower", "oneDNN has no fp16 LSTM on CPUs"))
    follow = bool(rows)
    root_frame = _frame_for(plan, plan.compute, device_type, rows)
    root_cast = plan.compute_dtype if plan.params == "compute" else None
    whole = assigned.get("")
    if whole is not None and whole.compute is not None:
        root_frame = _frame_for(plan, whole.compute, device_type, rows)
        root_cast = FORMATS[whole.compute].dtype
    borders: list[Border] = []
    handles = []

    def put(module: nn.Module, border: Border) -> None:
        borders.append(border)
        if border.cast_inputs is not None or border.follow_backward:
            handles.append(module.register_forward_pre_hook(border.enter_and_cast, with_kwargs=True))
        else:
            handles.append(module.register_forward_pre_hook(border.enter))
        handles.append(module.register_forward_hook(border.leave, always_call=True))

    root = Border(
        root_frame,
        cast_inputs=root_cast,
        cast_outputs=torch.float32 if plan.output == "fp32" else None,
        root=True,
        follow_backward=follow,
    )
    put(model, root)
    silent = _never_called(model)
    inside: dict[str, tuple[str, Frame]] = {
        "": (whole.compute if whole and whole.compute else plan.compute, root_frame)
    }
    for name, module in model.named_modules():
        if not name:
            continue
        around, outer = inside[name.rpartition(".")[0]]
        region = assigned.get(name)
        if region is None or region.compute is None or region.compute == around or module in silent:
            inside[name] = (around, outer)
            continue
        frame = _frame_for(plan, region.compute, device_type, rows)
        inside[name] = (region.compute, frame)
        put(
            module,
            Border(
                frame,
                cast_inputs=FORMATS[region.compute].dtype,
                cast_outputs=FORMATS[around].dtype,
                outer=outer,
                follow_backward=follow,
                path=name,
            ),
        )
    for method in methods:
        if not callable(getattr(type(model), method, None)):
            known = [n for n in dir(type(model)) if not n.startswith("_") and n not in dir(nn.Module)]
            raise StateError(
                f"prepare: methods={method!r}: {type(model).__name__} has no method of that name; "
                f"it has {', '.join(known) or 'none beyond forward'}"
            )
        model.__dict__[method] = Method(model, method, root)

    alive = weakref.ref(model)  # what removes the borders must not keep the model

    def remove() -> None:
        for handle in handles:
            handle.remove()
        target = alive()
        if target is not None:
            for method in methods:
                target.__dict__.pop(method, None)
        for border in borders:
            border.close()

    return root, remove


# --- dtype mismatches ----------------------------------------------------------------------------------------

_DTYPE_WORDS = re.compile(
    r"\b(?:c10::|torch\.)?(BFloat16|Half|Float|Double|bfloat16|float16|float32|float64|float|double)\b"
)
_DTYPE_NAMES = {
    "bfloat16": "bf16", "half": "fp16", "float16": "fp16", "float": "fp32", "float32": "fp32",
    "double": "fp64", "float64": "fp64",
}  # fmt: skip
_MISMATCH = re.compile(r"dtype|scalar type|type \(|should be the same|data type", re.IGNORECASE)


def explain_mismatch(error: BaseException | None, model: nn.Module) -> None:
    """Add to an operator's complaint about dtypes which module it came from and what would cure it.

    The hook that calls this cannot raise an error of its own (torch silences it), so the message of the error on its
    way out is extended in place.
    """
    if not isinstance(error, RuntimeError) or not error.args or not isinstance(error.args[0], str):
        return
    text = error.args[0]
    found = list(dict.fromkeys(_DTYPE_NAMES[word.lower()] for word in _DTYPE_WORDS.findall(text)))
    if not _MISMATCH.search(text) or not found or "castwise:" in text:
        return
    paths = {id(module): name for name, module in model.named_modules()}
    path, module = "", model
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in paths:
            path, module = paths[id(owner)], owner
        trace = trace.tb_next
    stored = sorted({_DTYPE_NAMES[str(p.dtype).removeprefix("torch.")] for p in module.parameters(recurse=False)
                     if str(p.dtype).removeprefix("torch.") in _DTYPE_NAMES})  # fmt: skip
    known = found if len(found) > 1 else list(dict.fromkeys([*found, *stored]))
    where = f"in {path!r} ({type(module).__name__})" if path else f"in {type(module).__name__} itself"
    held = f", whose parameters are stored in {', '.join(stored)}" if stored else ""
    error.args = (
        f"{text}\ncastwise: dtypes {' and '.join(known)} met {where}{held}. To cure it give the plan "
        f"Region({path or '**'!r}, compute='fp32'), or an operator rule such as ops=((operator, 'widest'),), or use a "
        "plan with rules='native', which casts the inputs of operators.",
        *error.args[1:],
    )
