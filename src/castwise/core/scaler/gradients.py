"""Read, check, multiply and set aside gradients of optimizers.

No function waits for the device unless its docstring says so.
"""

from __future__ import annotations

import operator
from collections import abc, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from castwise.core import _torch
from castwise.core.devices import widest_dtype
from castwise.core.plans.formats import LOW_DTYPES

_PLAIN = {torch.Tensor}
_dtype = operator.attrgetter("dtype")


def lift_low(outputs: Any) -> Any:
    """Convert bf16 and fp16 tensors in a structure to fp32, so that they are scaled in fp32.

    0-dim tensors are left unchanged, since torch promotes their product with a scale itself.
    """
    if isinstance(outputs, torch.Tensor):
        return outputs.float() if outputs.dtype in LOW_DTYPES and outputs.dim() else outputs
    if isinstance(outputs, (list, tuple)):
        return type(outputs)(map(lift_low, outputs))
    return map(lift_low, outputs) if isinstance(outputs, abc.Iterable) else outputs


def held(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the gradients that an optimizer's parameters have now."""
    return [g for group in optimizer.param_groups for p in group["params"] if (g := p.grad) is not None]


def stored(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the model's own parameters that an optimizer updates, also those that it updates through fp32 masters."""
    return [getattr(p, "stored", p) for group in optimizer.param_groups for p in group["params"]]


def on_each(optimizer: Optimizer) -> list[torch.Tensor | None]:
    """Return the gradient of each parameter of an optimizer as the backward pass left it, or None.

    For a parameter with an fp32 master, this is the gradient of the model's own parameter, in whatever dtype it has.
    Reading the gradient of the master instead could convert it to fp32.
    """
    return [parameter.grad for parameter in stored(optimizer)]


def ends(optimizer: Optimizer) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the first and the last gradient of an optimizer's parameters, or None if there are none.

    The gradients are those of the model's own parameters, as in :func:`on_each`.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            first = getattr(parameter, "stored", parameter).grad
            if first is not None:
                for others in reversed(optimizer.param_groups):
                    for other in reversed(others["params"]):
                        last = getattr(other, "stored", other).grad
                        if last is not None:
                            return first, last
    return None


def lie_on(optimizer: Optimizer) -> bool:
    """Whether any parameter of an optimizer has a gradient, found out without reading the gradient of an fp32 master."""
    return any(
        getattr(p, "stored", p).grad is not None for group in optimizer.param_groups for p in group["params"]
    )


def move(optimizer: Optimizer) -> bool:
    """Whether any gradient of an optimizer is not zero. Waits for the device.

    If all are zero, the step may be one by which a library only creates optimizer state.
    """
    return any(bool(values(grad).any()) for grad in on_each(optimizer) if grad is not None)


def values(grad: torch.Tensor) -> torch.Tensor:
    """Return the values of a gradient on this rank as a dense tensor of real numbers, in the same memory.

    Of a DTensor, it is this rank's shard; of a sparse gradient, its values. A lazily conjugated gradient is returned as
    it is stored in memory, so that it can be multiplied in place.
    """
    grad = _torch.tensors.dense_values(
        _torch.distributed.local_tensor(grad) if type(grad) is not torch.Tensor and _is_whole(grad) else grad
    )
    return torch.view_as_real(grad.conj() if grad.is_conj() else grad) if grad.is_complex() else grad


def mesh_groups(optimizer: Optimizer) -> list[Any]:
    """Return the process groups of all device meshes of an optimizer's DTensor gradients, each once."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return []
    found = (getattr(grad, "device_mesh", None) for grad in held(optimizer))
    meshes = {id(mesh): mesh for mesh in found if mesh is not None}
    return list({id(group): group for mesh in meshes.values() for group in mesh.get_all_groups()}.values())


def number(value: float, device: torch.device | str) -> torch.Tensor:
    """Return a number as a 0-dim fp32 tensor, whatever torch's default dtype is, as the kernels require."""
    return torch.full((), value, dtype=torch.float32, device=device)


def inverse(scale: torch.Tensor) -> torch.Tensor:
    """Return one over a scale, a 0-dim fp32 tensor on its device. It is rounded once, from fp64 if the device has it."""
    return scale.to(widest_dtype(scale.device)).reciprocal().float()


def largest(flags: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the maximum of 0-dim tensors, as a tensor on ``device``, or zero if there are none."""
    if not flags:
        return number(0.0, device)
    here = [flag.to(device, non_blocking=True) for flag in flags]
    return here[0] if len(here) == 1 else torch.stack(here).amax(0)


def check_and_multiply(
    grads: Sequence[torch.Tensor], factor: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """Multiply gradients by a factor in place, and return whether one of them was not finite before.

    Each gradient keeps its dtype. This is what a loss scaler does when it unscales gradients.

    Args:
        grads: Gradients on any devices, of any floating dtypes. Sparse gradients may be uncoalesced.
        factor: The factor, a 0-dim fp32 tensor. With None, the gradients are only checked.
        device: The device of the result.

    Returns:
        A 0-dim fp32 tensor that is one if a gradient was not finite, and otherwise zero.
    """
    factor = number(1.0, device) if factor is None else factor
    by_kind: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for dense in map(values, grads):
        by_kind[dense.device, dense.dtype].append(dense)
    flags = []
    with torch.no_grad():
        for (where, _), group in by_kind.items():
            flag = number(0.0, where)
            _torch.grad_scaler.check_and_unscale(group, flag, factor.to(where))
            flags.append(flag)
    return largest(flags, device)


def unscale_plain(
    optimizer: Optimizer, inverse: torch.Tensor, flag: torch.Tensor, allow_fp16: bool = False
) -> bool:
    """Unscale an optimizer's gradients if all are dense and on the device of the loss scale, which is the usual case.

    This has less overhead than torch's method. Of a DTensor, only this rank's shard is checked, since torch's operator
    would reduce over the mesh of the first gradient only. Gradients are multiplied by ``inverse`` in place, and
    ``flag`` is set to one if a gradient is not finite. Both are 0-dim fp32 tensors.

    Returns:
        Whether the gradients were of that kind. If not, nothing was changed.
    """
    grads = held(optimizer)
    if set(map(type, grads)) != _PLAIN:
        if not grads or not all(type(grad) is torch.Tensor or _is_whole(grad) for grad in grads):
            return False
        grads = [
            grad if type(grad) is torch.Tensor else _torch.distributed.local_tensor(grad) for grad in grads
        ]
    device = inverse.get_device()
    if not allow_fp16 and torch.float16 in map(_dtype, grads):
        return False
    if device == -1:
        # The CPU kernel accepts any dtypes, and raises for sparse gradients or other devices before it writes anything.
        try:
            _torch.tensors.without_grad(_torch.grad_scaler.check_and_unscale, grads, flag, inverse)
        except RuntimeError:
            return False
        return True
    if any(grad.get_device() != device or grad.is_sparse or grad.is_complex() for grad in grads):
        return False
    for dtype in set(map(_dtype, grads)):
        some = [grad for grad in grads if grad.dtype is dtype]
        _torch.tensors.without_grad(_torch.grad_scaler.check_and_unscale, some, flag, inverse)
    return True


def _is_whole(grad: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor that is not a partial sum."""
    placements: Any = getattr(grad, "placements", None)
    return placements is not None and not any(placement.is_partial() for placement in placements)


def are_finite(grads: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Check whether gradients of any dtype and strides are finite, without writing to them.

    Returns:
        A 0-dim fp32 flag on ``device`` that is one if a gradient is *not* finite.
    """
    flags = [(~torch.isfinite(values(grad.detach())).all()).float() for grad in grads]
    return largest(flags, device)


def forget_unwritten(optimizer: Optimizer, flags: Iterable[torch.Tensor]) -> None:
    """Drop the momentum of a fused SGD if its first step was skipped. Waits for the device.

    torch allocates momentum uninitialised and lets the kernel write it, which a skipped step does not do (seen in torch
    2.13). The next step would then start from uninitialised memory.
    """
    if isinstance(optimizer, torch.optim.SGD) and any(flag.item() for flag in flags):
        optimizer.state.clear()


def set_aside(params: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Remove gradients from parameters, so that gradients of the next backward pass are not added to them.

    :func:`add_up` adds them again later. If torch.distributed is in use, the gradients are copied, because they may
    be views of a bucket that the next backward pass overwrites (``gradient_as_bucket_view`` of
    DistributedDataParallel).

    Args:
        params: The parameters. Their ``.grad`` is None afterwards.

    Returns:
        Pairs of a parameter that had a gradient, each once, and that gradient.
    """
    shared = torch.distributed.is_available() and torch.distributed.is_initialized()
    aside = []
    for parameter in params:
        grad = parameter.grad
        if grad is not None:
            aside.append((parameter, grad.clone() if shared else grad))
            parameter.grad = None
    return aside


def add_up(aside: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Add the gradients that :func:`set_aside` removed to the gradients that their parameters have now.

    Args:
        aside: The result of :func:`set_aside`. The gradients in it may be overwritten.
    """
    with torch.no_grad():
        for parameter, grad in aside:
            fresh = parameter.grad
            if fresh is not None:
                if grad.is_sparse and not fresh.is_sparse:
                    grad, fresh = fresh, grad  # torch adds sparse to dense, not dense to sparse
                grad = grad.add_(fresh)
            parameter.grad = grad


def non_finite_params(optimizer: Optimizer, names: Mapping[int, str]) -> list[str]:
    """Return the names of an optimizer's parameters whose gradients hold an infinity or a NaN.

    ``names`` holds the names by the parameters' ``id``. Names of other parameters come from the ``param_names`` of the
    optimizer's groups, if they exist. Synchronises with the device.
    """
    return _non_finite(optimizer, names, lambda parameter: parameter.grad)


def non_finite_weights(optimizer: Optimizer, names: Mapping[int, str]) -> list[str]:
    """Return the names of an optimizer's parameters that hold an infinity or a NaN themselves.

    ``names`` is used as in :func:`non_finite_params`. Synchronises with the device.
    """
    return _non_finite(optimizer, names, torch.Tensor.detach)


def _non_finite(
    optimizer: Optimizer, names: Mapping[int, str], of: Callable[[torch.Tensor], torch.Tensor | None]
) -> list[str]:
    found = []
    for number, group in enumerate(optimizer.param_groups):
        given = group.get("param_names")
        for index, parameter in enumerate(group["params"]):
            tensor = of(parameter)
            if tensor is not None and not bool(torch.isfinite(values(tensor)).all()):
                fallback = given[index] if given else f"param_groups[{number}]['params'][{index}]"
                found.append(names.get(id(parameter), fallback))
    return found
