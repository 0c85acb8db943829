"""Collectives of the simulated devices: gloo on the memory that the kernels see.

``init()`` starts a process group for tensors on the host or on the device. An accelerator's own library would queue the
collective in a stream; here it is complete once the host has waited for it, as with gloo.
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
"""Groups that were started. Freeing one joins gloo's threads, which may wait for the interpreter that frees it."""


def _on_host(op: Any) -> Any:
    """Return gloo's kernel of a collective, running on the device's memory."""

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
    """Make torch's collectives work on tensors of the device, in this process."""
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
                # Hides warnings about overridden kernels, which is intended.
                warnings.simplefilter("ignore", UserWarning)
                library.impl(op, _on_host(op), "PrivateUse1", allow_override=True)


def init(**options: Any) -> None:
    """Start the default process group like ``torch.distributed.init_process_group``, with the same options."""
    register()
    dist.init_process_group(f"cpu:gloo,{sim.NAME}:gloo", **options)
    _GROUPS.append(dist.group.WORLD)
