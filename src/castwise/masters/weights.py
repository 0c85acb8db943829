"""fp32 weights out of a model whose parameters have masters, and into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from castwise.masters.parameter import is_low, master_of, merge_values

__all__ = ["LoadIntoMasters", "fp32_state_dict", "install_load_hooks"]


def fp32_state_dict(model: nn.Module, prefix: str = "") -> dict[str, Any]:
    """The model's state dict with nothing in it that is stored low.

    Args:
        model: Its own ``state_dict`` decides the keys, hooks and extra state included; tied keys are all there.
        prefix: Put in front of every key.

    Returns:
        Parameters that have a master as that master, sharing its memory as ``state_dict`` does; other bf16 and
        fp16 tensors as fp32 copies; everything else as it is. Synchronises with the device, since weights that
        were changed by hand are looked for first.
    """
    converted: dict[int, Tensor] = {}
    result: dict[str, Any] = {}
    for key, value in model.state_dict(prefix=prefix, keep_vars=True).items():
        if not isinstance(value, Tensor):
            result[key] = value
            continue
        if id(value) not in converted:
            converted[id(value)] = _as_fp32(value)
        result[key] = converted[id(value)]
    return result


def _as_fp32(value: Tensor) -> Tensor:
    master = master_of(value)
    if master is not None:
        merge_values(master, value)
        return _plain(master)
    detached = value.detach()
    return detached.to(torch.float32) if is_low(detached) else detached


def _plain(master: nn.Parameter) -> Tensor:
    return master.data if type(master.data) is Tensor else master.detach()


class LoadIntoMasters:
    """Hook of a module: ``load_state_dict`` gives the masters the full values of a checkpoint, not rounded ones.

    It holds nothing, so a model that has it can be pickled and copied; in a copy, whose parameters have no
    masters, it does nothing.
    """

    def __call__(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        *_: Any,
    ) -> None:
        """Write what ``state_dict`` has for the parameters of ``module`` itself into their masters."""
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            value = state_dict.get(prefix + name)
            master = master_of(parameter)
            if master is None or not isinstance(value, Tensor) or value is parameter:
                continue
            if value.shape != parameter.shape or value.is_meta:
                continue  # torch reports it in its own words
            with torch.no_grad():
                master.copy_(value)
                if local_metadata.get("assign_to_params_buffers", False):
                    # assign=True would put the checkpoint's tensor in the place of the parameter that the
                    # optimizer updates; the parameter takes the values and keeps its place.
                    parameter.copy_(value)
                    state_dict[prefix + name] = parameter


def install_load_hooks(model: nn.Module) -> None:
    """Put one :class:`LoadIntoMasters` on every module of ``model`` that does not have it yet."""
    for module in model.modules():
        installed = getattr(module, "_castwise_loads_masters", False)
        if not installed and next(module.parameters(recurse=False), None) is not None:
            module.register_load_state_dict_pre_hook(LoadIntoMasters())
            module._castwise_loads_masters = True  # type: ignore[assignment]
