"""Read and write fp32 weights of a model whose parameters have masters."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from castwise.core import _torch
from castwise.core.masters.copies import excuse, watch
from castwise.core.masters.files import note_load
from castwise.core.masters.originals import former_dtype, is_low, merge_values, note_former, original_of
from castwise.core.masters.parameter import master_of
from castwise.core.masters.sync import join_files, refresh, sync, sync_first
from castwise.errors import CheckpointError


def fp32_state_dict(model: nn.Module, prefix: str = "") -> dict[str, Any]:
    """The model's state dict with fp32 values in place of bf16 and fp16 values.

    Args:
        model: Its ``state_dict`` determines the keys, hooks and extra state included; tied weights keep all their keys.
        prefix: Put in front of every key.

    Returns:
        For parameters with a master or a remembered original, that tensor, sharing its memory as in ``state_dict``; for
        other bf16 and fp16 tensors, fp32 copies; everything else unchanged. Synchronises with the device, since it
        first searches for weights that were changed by hand.
    """
    sync(model)
    refresh(model)
    converted: dict[int, Tensor] = {}
    result: dict[str, Any] = {}
    for key, value in model.state_dict(prefix=prefix, keep_vars=True).items():
        if not isinstance(value, Tensor):
            result[key] = value
            continue
        if id(value) not in converted:
            converted[id(value)] = in_fp32(value)
        result[key] = converted[id(value)]
    return result


def in_fp32(value: Tensor) -> Tensor:
    """The fp32 values of a model's tensor, detached.

    Returns:
        The memory of its master, or else of its remembered original; else an fp32 copy of a low tensor, or any other
        tensor unchanged.
    """
    master = master_of(value)
    if master is not None:
        return master.data
    original = original_of(value)
    full = value.detach() if original is None else original
    return full.to(torch.float32) if is_low(full) else full


def named_masters(
    masters: Sequence[nn.Parameter], stored: Sequence[nn.Parameter], models: Iterable[nn.Module]
) -> dict[str, Tensor]:
    """Masters, detached and sharing their memory, under names that are the same in every process.

    Parameters of ``models`` have their names there; any other is named by its position.
    """
    known: dict[int, str] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            known.setdefault(id(parameter), name)
    names = [known.get(id(parameter), str(index)) for index, parameter in enumerate(stored)]
    often = Counter(names)
    return {
        name if often[name] == 1 else f"{index}.{name}": master.data
        for index, (name, master) in enumerate(zip(names, masters, strict=True))
    }


@torch.no_grad()
def write_masters(into: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write saved values into the masters of :func:`named_masters`.

    Raises:
        CheckpointError: The names or shapes differ; nothing was changed.
    """
    wrong = sorted(into.keys() ^ state.keys())
    wrong += [
        name for name in into.keys() & state.keys() if into[name].shape != getattr(state[name], "shape", None)
    ]
    if wrong:
        raise CheckpointError(
            f"Attachment.load_state_dict: these masters are missing, unknown or of another shape: {', '.join(wrong[:5])}; "
            "load the state of the same model and optimizer"
        )
    for name, master in into.items():
        master.copy_(state[name])


class LoadIntoMasters:
    """Hook of a module: ``load_state_dict`` writes the unrounded values of a checkpoint into the masters.

    It also writes to the remembered originals of parameters without masters. A value in the parameter's format does not
    replace a full value that rounds to it: ``model.load_state_dict(model.state_dict())`` changes nothing.

    In a copy of the model, whose parameters have no masters, it has no module and does nothing. ``copy.deepcopy``
    of a module copies this hook after its parameters, which is how copies are found (see ``copies``).
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._module = None if module is None else weakref.ref(module)

    def __reduce__(self) -> Any:
        return LoadIntoMasters, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> LoadIntoMasters:
        module = None if self._module is None else self._module()
        tensors = (
            () if module is None else (*module.parameters(recurse=False), *module.buffers(recurse=False))
        )
        for tensor in tensors:
            copied = memo.get(id(tensor))
            if isinstance(copied, Tensor):
                note_former(copied, former_dtype(tensor))
                if isinstance(tensor, nn.Parameter) and master_of(tensor) is not None:
                    watch(copied, tensor)
        return LoadIntoMasters(None if module is None else memo.get(id(module)))

    @torch.no_grad()
    def __call__(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        *_: Any,
    ) -> None:
        """Write the entries of ``state_dict`` for the direct parameters of ``module`` into their masters."""
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            value = state_dict.get(prefix + name)
            excuse(parameter)
            master = master_of(parameter)
            full = original_of(parameter) if master is None else master
            if full is None or not isinstance(value, Tensor) or value is parameter:
                continue
            if value.shape != parameter.shape or value.is_meta:
                continue  # torch raises an error for it
            note_load(parameter, value)
            alike = hasattr(value, "device_mesh") == hasattr(full, "device_mesh")
            if alike and value.dtype is parameter.dtype and is_low(value):
                merge_values(full, value.to(full.device))
            else:
                full.copy_(value)
            if local_metadata.get("assign_to_params_buffers", False):
                # assign=True would put the checkpoint's tensor in the place of the parameter that the
                # optimizer updates; the parameter takes the values and keeps its place.
                parameter.copy_(value)
                state_dict[prefix + name] = parameter


def install_hooks(model: nn.Module, log: Callable[[Callable[[], None]], object]) -> None:
    """Install the hooks that synchronise a model with its masters: before ``forward``, ``state_dict`` and loading.

    ScriptModules in it do not support such hooks, and are skipped. ``log`` gets the undo entry before any hook is
    installed.
    """
    first = functools.partial(sync_first)  # told apart from the hook of another optimizer of the model
    loaded = functools.partial(join_files)
    hooked: list[tuple[weakref.ref[nn.Module], Callable[..., Any]]] = []

    def remove() -> None:
        for reference, hook in hooked:
            module = reference()
            if module is not None:
                _torch.hooks.remove_hooks(module, first, loaded, hook)

    log(remove)
    hooked.append((weakref.ref(model), first))
    _torch.hooks.hook_first(model, first)
    model.register_load_state_dict_post_hook(loaded)
    for module in model.modules():
        own = next(module.parameters(recurse=False), None)
        if own is not None and not isinstance(module, torch.jit.ScriptModule):
            load = LoadIntoMasters(module)
            hooked.append((weakref.ref(module), load))
            module.register_load_state_dict_pre_hook(load)
            module.register_state_dict_pre_hook(first)
