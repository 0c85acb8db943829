"""fp32 weights out of a model whose parameters have masters, and into it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from castwise.errors import CheckpointError
from castwise.masters.parameter import is_low, master_of, merge_values

__all__ = ["LoadIntoMasters", "fp32_state_dict", "install_load_hooks", "named_masters", "write_masters"]


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


def named_masters(
    masters: Sequence[nn.Parameter], stored: Sequence[nn.Parameter], models: Iterable[nn.Module]
) -> dict[str, Tensor]:
    """Masters, detached and in their own memory, under names that another process would give them.

    Args:
        masters: In the order of the optimizer.
        stored: The parameters that they are the masters of.
        models: Modules whose parameters have names; any other parameter is named by its position.
    """
    known: dict[int, str] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            known.setdefault(id(parameter), name)
    names = [known.get(id(parameter), str(index)) for index, parameter in enumerate(stored)]
    often = Counter(names)
    return {
        name if often[name] == 1 else f"{index}.{name}": _plain(master)
        for index, (name, master) in enumerate(zip(names, masters, strict=True))
    }


@torch.no_grad()
def write_masters(into: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write saved values into what :func:`named_masters` returned.

    Raises:
        CheckpointError: Other names or shapes; nothing was changed.
    """
    wrong = sorted(into.keys() ^ state.keys())
    wrong += [
        name for name in into.keys() & state.keys() if into[name].shape != getattr(state[name], "shape", None)
    ]
    if wrong:
        raise CheckpointError(
            f"Attachment.load_state_dict: these masters are missing, left over or of another shape: {', '.join(wrong[:5])}; "
            "load the state of the same model and optimizer"
        )
    for name, master in into.items():
        master.copy_(state[name])


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
