"""Collectives of the simulated devices: gloo, on what the kernels see of their memory.

``init()`` begins a process group whose tensors may be on the host or on the device. An accelerator's own library would
put the collective into a stream; here it is over when the host has waited for it, as gloo's are.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from tests.device import sim

_LIBRARY: list[torch.library.Library] = []
_GROUPS: list[Any] = []
"""Groups that were begun. One that is freed joins gloo's threads, and these may wait for the interpreter that frees it."""


def _on_host(op: Any) -> Any:
    """The kernel of a collective for the device: gloo's, on the same memory."""

    def run(*args: Any, **kwargs: Any) -> Any:
        ours: dict[int, torch.Tensor] = {}

        def host(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type != sim.NAME:
                return tensor
            alias = sim.as_kernels_see(tensor)
            ours[id(alias)] = tensor
            return alias

        given = tree_map_only(torch.Tensor, host, (args, kwargs))
        found = op(*given[0], **given[1])
        return tree_map_only(torch.Tensor, lambda tensor: ours.get(id(tensor), tensor), found)

    return run


def register() -> None:
    """Have torch's collectives work on tensors of the device, in this process."""
    if _LIBRARY:
        return
    library = torch.library.Library("c10d", "IMPL")
    _LIBRARY.append(library)
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
        space, _, whole = name.partition("::")
        if space == "c10d":
            base, _, overload = whole.partition(".")
            op = getattr(getattr(torch.ops.c10d, base), overload or "default")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of kernels that are overridden, which is meant
                library.impl(op, _on_host(op), "PrivateUse1", allow_override=True)


def init(**options: Any) -> None:
    """Begin the default process group, as ``torch.distributed.init_process_group`` with the same options."""
    register()
    dist.init_process_group(f"cpu:gloo,{sim.NAME}:gloo", **options)
    _GROUPS.append(dist.group.WORLD)
