"""What a scaler does to gradients, and how it names them; nothing here waits for the device unless it says so."""

from __future__ import annotations

import operator
from collections import abc, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from castwise.core import _torch
from castwise.core.plans.formats import LOW_DTYPES

_PLAIN = {torch.Tensor}
_dtype = operator.attrgetter("dtype")


def lift_low(outputs: Any) -> Any:
    """Outputs with low formats in fp32, so that the product with a scale is formed there; structure is kept.

    0-dim tensors are left alone: torch promotes their product with a scale itself.
    """
    if isinstance(outputs, torch.Tensor):
        return outputs.float() if outputs.dtype in LOW_DTYPES and outputs.dim() else outputs
    if isinstance(outputs, (list, tuple)):
        return type(outputs)(map(lift_low, outputs))
    return map(lift_low, outputs) if isinstance(outputs, abc.Iterable) else outputs


def held(optimizer: Optimizer) -> list[torch.Tensor]:
    """The gradients that lie on an optimizer's parameters now."""
    return [g for group in optimizer.param_groups for p in group["params"] if (g := p.grad) is not None]


def stored(optimizer: Optimizer) -> list[torch.Tensor]:
    """The model's parameters that an optimizer updates: those behind its masters, and its others."""
    return [getattr(p, "stored", p) for group in optimizer.param_groups for p in group["params"]]


def on_each(optimizer: Optimizer) -> list[torch.Tensor | None]:
    """By parameter of an optimizer, the gradient that lies there as a backward left it.

    Of a parameter with a master it is that of the parameter, in whatever format: reading it changes nothing.
    """
    return [parameter.grad for parameter in stored(optimizer)]


def ends(optimizer: Optimizer) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The first gradient that lies on a parameter of an optimizer and the last; reading them changes nothing."""
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
    """Whether there is a gradient on any parameter of an optimizer; reading them changes nothing."""
    return any(
        getattr(p, "stored", p).grad is not None for group in optimizer.param_groups for p in group["params"]
    )


def move(optimizer: Optimizer) -> bool:
    """Whether any gradient of an optimizer is not zero; libraries step on zeros, so that there is state to load into."""
    return any(bool(values(grad).any()) for grad in on_each(optimizer) if grad is not None)


def values(grad: torch.Tensor) -> torch.Tensor:
    """What this process holds of a gradient as dense real numbers: of a DTensor its shard, of a sparse one its values.

    Of one that torch has yet to conjugate the numbers as they lie in memory, where they can be multiplied in place.
    """
    grad = _torch.tensors.dense_values(
        _torch.distributed.local_tensor(grad) if type(grad) is not torch.Tensor and _is_whole(grad) else grad
    )
    return torch.view_as_real(grad.conj() if grad.is_conj() else grad) if grad.is_complex() else grad


def mesh_groups(optimizer: Optimizer) -> list[Any]:
    """The process groups of all meshes that an optimizer's gradients lie on as DTensors, each once."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return []
    found = (getattr(grad, "device_mesh", None) for grad in held(optimizer))
    meshes = {id(mesh): mesh for mesh in found if mesh is not None}
    return list({id(group): group for mesh in meshes.values() for group in mesh.get_all_groups()}.values())


def number(value: float, device: torch.device | str) -> torch.Tensor:
    """A flag or factor: 0-dim fp32, whatever the process's default dtype is, as the kernels want it."""
    return torch.full((), value, dtype=torch.float32, device=device)


def inverse(scale: torch.Tensor) -> torch.Tensor:
    """One over a scale, rounded once: 0-dim fp32 on its device."""
    wide = scale if scale.device.type == "mps" else scale.double()  # no fp64 there
    return wide.reciprocal().float()


def largest(flags: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The largest of some 0-dim flags, on ``device``; zero if there are none."""
    if not flags:
        return number(0.0, device)
    here = [flag.to(device, non_blocking=True) for flag in flags]
    return here[0] if len(here) == 1 else torch.stack(here).amax(0)


def check_and_multiply(
    grads: Sequence[torch.Tensor], factor: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """Multiply gradients in place, each in its own dtype, and say whether one was not finite: unscaling, in one pass.

    Args:
        grads: On any devices, of any floating dtypes, sparse ones coalesced or not.
        factor: 0-dim fp32; None for one.
        device: Where the flag shall be.

    Returns:
        0-dim fp32 flag: one where a gradient was not finite before.
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
    """Torch's unscaling for the usual case, dense gradients all on the scale's device, in fewer steps.

    Of a DTensor it looks at this rank's shard alone: torch's own operator would make the ranks of the first
    gradient's mesh agree, and no others. Gradients are multiplied by ``inverse`` in place, and ``flag`` is set to
    one where one is not finite: 0-dim fp32 both.

    Returns:
        Whether it was that case; if not, nothing was done.
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
        # The kernel of a CPU takes dtypes as they come, and refuses what is sparse or elsewhere before it writes anything.
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
    """Whether a tensor of a class of its own is a DTensor without partial sums."""
    placements: Any = getattr(grad, "placements", None)
    return placements is not None and not any(placement.is_partial() for placement in placements)


def are_finite(grads: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """As :func:`check_and_multiply` by one, without writing: of any dtype and with any strides.

    Returns:
        0-dim fp32 flag on ``device``: one where a gradient is not finite.
    """
    flags = [(~torch.isfinite(values(grad.detach())).all()).float() for grad in grads]
    return largest(flags, device)


def forget_unwritten(optimizer: Optimizer, flags: Iterable[torch.Tensor]) -> None:
    """After the first step of a fused kernel: if it was skipped, let SGD's momentum go.

    torch allocates it and leaves it to the kernel to write, which a skipped step does not (seen in torch 2.13); the next
    step would go on from whatever lay there. Waits for the device, this once.
    """
    if isinstance(optimizer, torch.optim.SGD) and any(flag.item() for flag in flags):
        optimizer.state.clear()


def set_aside(params: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Take the gradients off parameters, so that the next backward leaves its own alone; :func:`add_up` puts them back.

    Where torch.distributed is in use a gradient may lie in a bucket that the next backward writes to again
    (``gradient_as_bucket_view`` of DistributedDataParallel): there they are copied.

    Returns:
        Of the parameters, each given once, those that had a gradient, with it.
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
    """Put gradients back onto parameters, on top of those that have come meanwhile.

    They are from :func:`set_aside`, and may be written to.
    """
    with torch.no_grad():
        for parameter, grad in aside:
            fresh = parameter.grad
            if fresh is not None:
                if grad.is_sparse and not fresh.is_sparse:
                    grad, fresh = fresh, grad  # torch adds sparse ones to dense ones alone
                grad = grad.add_(fresh)
            parameter.grad = grad


def non_finite_params(optimizer: Optimizer, names: Mapping[int, str]) -> list[str]:
    """Names of the parameters whose gradients hold an infinity or a NaN. Synchronises with the device.

    Those in ``names``, by the parameters' ``id``, go before those that torch has in the groups as ``param_names``.
    """
    found = []
    for number, group in enumerate(optimizer.param_groups):
        given = group.get("param_names")
        for index, parameter in enumerate(group["params"]):
            grad = parameter.grad
            if grad is None:
                continue
            if not bool(torch.isfinite(values(grad)).all()):
                fallback = given[index] if given else f"param_groups[{number}]['params'][{index}]"
                found.append(names.get(id(parameter), fallback))
    return found
