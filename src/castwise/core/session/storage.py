"""Convert a model's tensors to the dtypes in which a plan stores them, and back.

Every change has an entry in an undo log (:class:`~castwise.core.session.undo.UndoLog`) that is made before the change.
So a failure at any point, Ctrl-C included, can be undone.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from castwise.core import _torch, masters
from castwise.core.masters.originals import agree
from castwise.core.model.resolve import Resolution, named_tensors
from castwise.core.model.stored import narrowed
from castwise.core.parallel import fsdp
from castwise.core.plans.plan import Plan
from castwise.core.plans.text import some
from castwise.core.session.undo import UndoLog
from castwise.errors import PlanError, StateError

_AT_A_TIME = 2**20
"""Number of elements that are rounded at a time to see whether rounding changes them."""


def dtypes_of(resolution: Resolution, model: nn.Module) -> dict[Tensor, torch.dtype]:
    """Return the tensors of a model whose dtype must change under a plan, each with its new dtype."""
    by_name = dict(named_tensors(model))
    dtypes = {by_name[name]: dtype for name, dtype in resolution.storage.items()}
    dtypes.update(fsdp.shard_dtypes(resolution, model))
    return {tensor: dtype for tensor, dtype in dtypes.items() if tensor.dtype is not dtype}


def dtypes_now(tensors: Iterable[Tensor]) -> Any:
    """Return the current dtypes of tensors, as a mapping that holds only weak references to the tensors."""
    now: Any = WeakTensorKeyDictionary()
    for tensor in tensors:
        now[tensor] = tensor.dtype
    return now


def as_arrived(
    weights: Mapping[str, Any], model: nn.Module, arrived: Iterable[Mapping[Tensor, torch.dtype]]
) -> dict[str, Any]:
    """Return fp32 weights, but convert those that were bf16 or fp16 before ``prepare`` back to that dtype.

    Tensors that several keys share stay shared.

    Args:
        weights: The weights in fp32, by key.
        model: The model.
        arrived: Mappings from the tensors that were bf16 or fp16 before ``prepare`` to their dtypes then.
    """
    known = list(arrived)
    done: dict[int, Tensor] = {}
    out = dict(weights)
    for key, tensor in model.state_dict(keep_vars=True).items():
        dtype = next((of[tensor] for of in known if isinstance(tensor, Tensor) and tensor in of), None)
        if dtype is not None:
            if id(tensor) not in done:
                done[id(tensor)] = weights[key].to(dtype)
            out[key] = done[id(tensor)]
    return out


def check_range(model: nn.Module, dtypes: Mapping[Tensor, torch.dtype]) -> None:
    """Raise if tensors of a model cannot be converted to their new dtypes, or if values would become infinite.

    Raises:
        StateError: Some tensors are on the meta device, not strided, or expanded (several elements share memory).
        PlanError: Some values are beyond fp16's largest number, 65504, and would become infinite.

    Warns:
        UserWarning: Some values are below fp16's smallest number and would become zero.
    """
    names = {tensor: name for name, tensor in named_tensors(model)}
    for tensor in dtypes:
        dense = _torch.tensors.is_dense(tensor)
        expanded = dense and any(
            stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        )
        if tensor.is_meta or not dense or expanded:
            kind = (
                "on the meta device"
                if tensor.is_meta
                else "expanded"
                if expanded
                else "nested"
                if tensor.is_nested
                else f"{tensor.layout}"
            )
            raise StateError(
                f"prepare: {names[tensor]} is {kind}, and the plan stores it in {str(dtypes[tensor]).removeprefix('torch.')}; "
                f"give the module its own memory first (model.to_empty(device=...), .contiguous(), .to_dense()), or exclude "
                f"it with Region(path, params='fp32')"
            )
    over, under = [], []
    finfo = torch.finfo(torch.float16)
    for tensor, dtype in dtypes.items():
        if dtype is not torch.float16:
            continue
        values = masters.local(tensor)
        finite = values[values.isfinite()].abs()
        if finite.numel() == 0:
            continue
        if bool((finite > finfo.max).any()):
            over.append(f"{names[tensor]} (largest {float(finite.max()):.4g})")
        lost = (finite < finfo.smallest_normal / 2048) & (finite > 0)
        if float(lost.float().mean()) > 0.01:
            under.append(names[tensor])
    if over:
        raise PlanError(
            f"prepare: weights beyond fp16's largest number, 65504, would become infinite: {', '.join(over[:5])}. "
            "Use a bf16 plan, or Region(path, params='fp32') for these modules."
        )
    if under:
        warnings.warn(
            f"prepare: more than 1 % of the weights of {', '.join(under[:5])} are below fp16's smallest number and become "
            f"zero; a model that was trained in bf16 may need a bf16 plan",
            stacklevel=4,
        )


def store(
    model: nn.Module,
    plan: Plan,
    dtypes: Mapping[Tensor, torch.dtype],
    log: UndoLog,
    *,
    inference: bool,
    drop: bool = False,
) -> list[str]:
    """Convert tensors to the given dtypes and the plan's memory format, in place, so that references to them stay valid.

    The former values of parameters are remembered (:func:`castwise.masters.original_of`), and fp32 masters start from
    them. Each change has an entry in the undo log.

    Args:
        model: The model.
        plan: The plan.
        dtypes: The tensors to convert, with their new dtypes.
        log: The undo log.
        inference: Whether the model is only evaluated. Undoing then warns of tensors that were written in the meantime.
        drop: Whether to drop the former values of each tensor before the next one is converted, so that hardly more memory
            is used than before. Undoing then restores dtypes, but not what rounding has changed.

    Returns:
        The names of the tensors whose former values were dropped although rounding has changed them.
    """
    log.on(model, _flatten_recurrent)
    rounded: list[tuple[str, weakref.ref[Tensor]]] = []
    written: list[str] = []
    if inference:
        log.on(model, _tell_rounded, rounded, written)
    for name, tensor in named_tensors(model):
        dtype = dtypes.get(tensor, tensor.dtype)
        strides = (
            plan.memory_format == "channels_last" and tensor.dim() == 4 and _torch.tensors.is_dense(tensor)
        )
        gets_master = plan.keeps_masters and masters.is_low(
            tensor
        )  # closing converts it back from the master
        if dtype is tensor.dtype and not strides and not gets_master:
            continue
        grad_dtype = tensor.grad_dtype if tensor.is_leaf else None
        log.on(tensor, _as_before, tensor.dtype, tensor.stride(), grad_dtype)
        masters.note_former(tensor, tensor.dtype)
        if dtype is not tensor.dtype:
            changes = drop and _is_rounded_by(tensor, dtype)
            masters.store(tensor, dtype)
            if changes:
                rounded.append((name, weakref.ref(tensor)))
            if drop:
                masters.forget_original(tensor)
            if inference:
                log.on(tensor, _note_writes, _torch.tensors.version(tensor), name, written)
        if strides and not hasattr(tensor, "device_mesh"):
            # contiguous() does not change 1 x 1 kernels
            _torch.tensors.assign(tensor, tensor.data.to(memory_format=torch.channels_last))
    if dtypes:
        _flatten_recurrent(model)
    return [name for name, _ in rounded]


@contextlib.contextmanager
def silent_about_rounding() -> Iterator[None]:
    """Return a context manager without the warning that values were rounded for inference, for models that are thrown away."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* for inference")
        yield


def _is_rounded_by(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether a conversion changes values of a tensor. It is tried on a few rows at a time, which takes little memory."""
    values = masters.local(tensor)
    rows = (
        values.split(max(1, _AT_A_TIME * len(values) // max(1, values.numel()))) if values.dim() else [values]
    )
    return not all(agree(some_rows.to(dtype), some_rows) for some_rows in rows)


def _note_writes(tensor: Tensor, version: int, name: str, written: list[str]) -> None:
    """Add the name of a tensor to ``written`` if it was written since it had this version, and the values are not kept."""
    if not masters.is_low(tensor):  # it has been cast back, or has the values of its master
        return
    known = masters.is_written(tensor)
    if (_torch.tensors.version(tensor) != version if known is None else known) and name not in written:
        written.insert(0, name)  # changes are undone from the last to the first


def _tell_rounded(
    model: nn.Module, rounded: Sequence[tuple[str, weakref.ref[Tensor]]], written: Sequence[str]
) -> None:
    """Warn of the tensors whose former values, or values written since, are lost, when their dtypes are restored."""
    now = dict(named_tensors(model))  # loading may have replaced some
    lost = [name for name, cast in rounded if name not in written and now.get(name) is cast()]
    kind = type(model).__name__
    if lost:
        warnings.warn(
            f"{some(lost)} of {kind} were rounded for inference, and have the rounded values in their former dtype now, since their "
            "former values were not kept. To have them back, load them again, or prepare with "
            "prepare(model, inference=True, keep_originals=True), which keeps them in host memory.",
            stacklevel=6,
        )
    if written:
        warnings.warn(
            f"{some(written)} of {kind} were written while they were stored low for inference, so they hold rounded values. To have the "
            "exact ones, write them again. Under keep_originals=True, load_state_dict keeps what it loads.",
            stacklevel=6,
        )


def say_narrowed(model: nn.Module) -> str:
    """Name the parameters that were cast to a narrower dtype since a model was prepared, which closing does not undo."""
    cast = [
        name
        for name, p in narrowed(model).items()
        if masters.former_dtype(p) is p.dtype and masters.master_of(p) is None
    ]
    if not cast:
        return ""
    dtype = str(model.get_parameter(cast[0]).dtype).removeprefix("torch.")
    return (
        f"{some(cast)} of {type(model).__name__} were cast to {dtype} after prepare, as by model.to({dtype}), and stay in it. "
        "model.float() brings all parameters to fp32 again, with the digits that are left."
    )


def _flatten_recurrent(model: nn.Module) -> None:
    """Make the weights of each recurrent layer on a GPU contiguous, since cuDNN would copy them at every call otherwise."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def forget_originals(tensors: Iterable[Tensor], *, inference: bool) -> None:
    """Free the device memory of the values that these tensors had before they were converted, if they have no masters.

    The values of trained parameters are dropped for good. Those of other tensors, which do not change, are moved to the
    host, and ``Amp.close`` restores them exactly. With ``inference``, no parameter is trained.
    """
    for tensor in tensors:
        trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad and not inference
        values = None if trained else masters.original_of(tensor)
        masters.forget_original(tensor)
        if values is not None:
            masters.remember_original(tensor, values.cpu())


def _as_before(
    tensor: Tensor, dtype: torch.dtype, stride: tuple[int, ...], grad_dtype: torch.dtype | None
) -> None:
    """Restore a tensor's dtype and strides, and its values if they are remembered.

    A tensor that was low because of a model prepared before, which shares it, stays so. That model's entry restores it.
    """
    if masters.former_dtype(tensor) is dtype:
        masters.restore(tensor)
        if tensor.dtype is not dtype:
            masters.store(tensor, dtype)
            masters.forget_original(tensor)
        masters.forget_former(tensor, dtype)
    if tensor.stride() != stride and not hasattr(tensor, "device_mesh") and tensor.dim() == len(stride):
        data = torch.empty_strided(tensor.shape, stride, dtype=dtype, device=tensor.device)
        _torch.tensors.assign(tensor, data.copy_(tensor.data))
    if tensor.is_leaf:
        masters.fit_grad(tensor, grad_dtype)


class Newcomers:
    """Finds tensors that were added to a model after it was prepared, for example by a parametrization.

    They have the dtype in which the plan stores the module's tensors, so closing must convert them too.

    Args:
        model: The model before it is converted.
        dtypes: The tensors to convert, with their new dtypes.
    """

    def __init__(self, model: nn.Module, dtypes: Mapping[Tensor, torch.dtype]) -> None:
        self._known: _torch.tensors.OfTensors[bool] = _torch.tensors.OfTensors()
        self._formats: dict[str, tuple[torch.dtype, torch.dtype]] = {}
        """The dtype in which the plan stores the tensors of a module, and the dtype they had before, by the module's path."""
        for name, tensor in named_tensors(model):
            self._known[tensor] = True
            if tensor in dtypes:
                self._formats.setdefault(name.rpartition(".")[0], (dtypes[tensor], tensor.dtype))

    def restore(self, model: nn.Module, optimizers: Iterable[weakref.ref[Optimizer]]) -> None:
        """Convert tensors that were added since to the dtype that their module's tensors had before the plan was applied.

        The optimizer state of added parameters is converted too.
        """
        stored = []
        for name, tensor in named_tensors(model):
            low, former = self._formats_around(name)
            if tensor not in self._known and tensor.dtype is low and masters.master_of(tensor) is None:
                masters.store(tensor, former)
                stored += [weakref.ref(tensor)] if isinstance(tensor, nn.Parameter) else []
        for reference in optimizers if stored else ():
            optimizer = reference()
            if optimizer is not None:
                follow_state(optimizer, stored)

    def _formats_around(self, name: str) -> tuple[torch.dtype | None, torch.dtype]:
        """Return the dtype in which the plan should store an added tensor, and the dtype it should have without the plan.

        Both are taken from the innermost module around the tensor whose tensors the plan converts. If there is no such
        module, they are taken from all converted modules if these agree.
        """
        path = name
        while path:
            path = path.rpartition(".")[0]
            if path in self._formats:
                return self._formats[path]
        alike = set(self._formats.values())
        return alike.pop() if len(alike) == 1 else (None, torch.float32)


def state_of(
    optimizer: Optimizer, params: Iterable[weakref.ref[nn.Parameter]]
) -> list[tuple[Optimizer, nn.Parameter, Any]]:
    """Return the state that an optimizer holds for these parameters, which :func:`put_back_state` can restore."""
    alive = [parameter for ref in params if (parameter := ref()) is not None]
    return [(optimizer, p, optimizer.state[p]) for p in alive if p in optimizer.state]


def put_back_state(kept: Iterable[tuple[Optimizer, nn.Parameter, Any]]) -> None:
    """Restore the optimizer state that :func:`state_of` returned, since casting it there and back would round it."""
    for optimizer, parameter, state in kept:
        optimizer.state[parameter] = state


def follow_state(optimizer: Optimizer, params: Iterable[weakref.ref[nn.Parameter]]) -> None:
    """Convert an optimizer's state for these parameters to their dtype, as optimizer kernels require.

    The parameters must not have masters.
    """
    alive = [parameter for ref in params if (parameter := ref()) is not None]
    masters.move_state(optimizer, dict(zip(alive, alive, strict=True)))


class Kept(NamedTuple):
    """The fp32 values and optimizer state of tensors that were bf16 or fp16 before ``prepare``, while a plan is changed.

    Closing the former plan rounds the tensors to bf16 or fp16 again. The next plan starts from the values kept here.

    Attributes:
        values: Each tensor, and its values in fp32.
        states: The optimizer state of each parameter, with the optimizer and the parameter.
    """

    values: list[tuple[Tensor, Tensor]]
    states: list[tuple[Optimizer, nn.Parameter, Any]]

    @classmethod
    def of(cls, arrived: Iterable[Mapping[Tensor, torch.dtype]], optimizers: Iterable[Optimizer]) -> Self:
        """Read the fp32 values of tensors that were bf16 or fp16 before ``prepare``, and their optimizer state.

        Synchronises with the device if there are masters.
        """
        found, every = cls([], []), list(optimizers)
        for attachment in filter(None, map(masters.attachment_of, every)):
            attachment.refresh_from_model()
        for tensor in {id(t): t for of in arrived for t in of}.values():
            if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
                continue  # frozen, so closing restores it without rounding
            master = masters.master_of(tensor) if isinstance(tensor, nn.Parameter) else None
            wide = tensor if master is None else master
            if not masters.is_low(wide):
                found.values.append((tensor, masters.local(wide)))
        params = [weakref.ref(t) for t, _ in found.values if isinstance(t, nn.Parameter)]
        for optimizer in every:
            found.states.extend(state_of(optimizer, params))
        return found

    def trains(self, model: nn.Module) -> bool:
        """Whether the kept values include a parameter of a model."""
        own = {id(parameter) for parameter in model.parameters()}
        return any(id(tensor) in own for tensor, _ in self.values)

    def put_back(self) -> None:
        """Make the next ``prepare`` start from the kept values and states."""
        for tensor, values in self.values:
            masters.remember_original(tensor, values)
        put_back_state(self.states)

    def settle(self) -> None:
        """Drop the kept values, and convert the optimizer state of parameters without masters to their dtype."""
        for tensor, _ in self.values:
            if not isinstance(tensor, nn.Parameter) or masters.master_of(tensor) is None:
                masters.forget_original(tensor)
        alone = [weakref.ref(p) for _, p, _ in self.states if masters.master_of(p) is None]
        for optimizer in {id(o): o for o, _, _ in self.states}.values():
            follow_state(optimizer, alone)
