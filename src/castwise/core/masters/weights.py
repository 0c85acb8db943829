"""Read and write the fp32 weights of a model whose parameters have fp32 masters."""

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
    """Return a model's state dict with fp32 values in place of bf16 and fp16 values.

    Synchronises with the device, since weights that were changed by hand are searched for first.

    Args:
        model: The model. Its ``state_dict`` determines the keys, so hooks and extra state are included. Tied weights keep
            all their keys.
        prefix: Text in front of every key.

    Returns: For a parameter with an fp32 master, the master, sharing its memory as in ``state_dict``. For a parameter
    whose original values were kept, these. For any other bf16 or fp16 tensor, an fp32 copy. Everything else is
    unchanged.
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
    """Return the fp32 values of a parameter or buffer of a model, detached.

    Returns: The parameter's fp32 master if there is one, sharing its memory. Otherwise, the parameter's original
    values if they were kept. Otherwise, an fp32 copy of a bf16 or fp16 tensor, or any other tensor unchanged.
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
    """Return fp32 masters by names that are the same in every process, detached and sharing their memory.

    The master of a parameter of one of the models has the parameter's name in that model. Any other master is named
    by its position.

    Args:
        masters: The masters.
        stored: Their parameters, in the same order.
        models: The models.
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
    """Write saved values into fp32 masters.

    Args:
        into: The masters by name, from :func:`named_masters`.
        state: The saved values by name.

    Raises:
        CheckpointError: The names or shapes differ. Nothing was changed.
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
    """A pre-hook of a module's ``load_state_dict`` that writes the unrounded loaded values into the fp32 masters.

    For parameters without masters, it writes to their original values if these were kept. A value in the parameter's
    format does not replace an fp32 value that rounds to it. So ``model.load_state_dict(model.state_dict())`` changes
    nothing.

    ``copy.deepcopy`` of a module copies this hook after the module's parameters. The hook then reports the copied
    parameters to the module ``copies``, which watches for averages of weights. Parameters of a copy have no masters, so
    in a copy the hook does nothing.
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
        """Write the entries of ``state_dict`` for the parameters directly in ``module`` into their fp32 masters."""
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


def install_hooks(
    model: nn.Module, log: Callable[[Callable[[], None]], object], *, inference: bool = False
) -> None:
    """Install the hooks that synchronise a model with its fp32 masters before ``forward`` and ``state_dict``.

    Another hook writes the unrounded values of loaded state dicts into the masters.

    ScriptModules in the model do not support such hooks and are skipped.

    Args:
        model: The model.
        log: Called with a function that removes the hooks, before any hook is installed.
        inference: Whether no optimizer trains the model. Then it has no masters, and ``forward`` gets no hook.
    """
    first = functools.partial(
        sync_first
    )  # an object of its own, unequal to the hook for another optimizer of the model
    loaded = functools.partial(join_files)
    hooked: list[tuple[weakref.ref[nn.Module], Callable[..., Any]]] = []

    def remove() -> None:
        for reference, hook in hooked:
            module = reference()
            if module is not None:
                _torch.hooks.remove_hooks(module, first, loaded, hook)

    log(remove)
    hooked.append((weakref.ref(model), first))
    if not inference:
        _torch.hooks.hook_first(model, first)
    model.register_load_state_dict_post_hook(loaded)
    for module in model.modules():
        own = next(module.parameters(recurse=False), None)
        if own is not None and not isinstance(module, torch.jit.ScriptModule):
            load = LoadIntoMasters(module)
            hooked.append((weakref.ref(module), load))
            module.register_load_state_dict_pre_hook(load)
            module.register_state_dict_pre_hook(first)
