"""The functions ``initialize``, ``init``, ``state_dict`` and ``load_state_dict`` of ``apex.amp``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from castwise.bridges.compat.apex.amp import models as casting
from castwise.bridges.compat.apex.amp import stash
from castwise.bridges.compat.apex.amp._amp_state import _amp_state, maybe_print
from castwise.bridges.compat.apex.amp.ambient import (
    FORMATS,
    begin_caching,
    casts_of_o1,
    end_caching,
    patch_torch,
)
from castwise.bridges.compat.apex.amp.functions import patch_registered
from castwise.bridges.compat.apex.amp.handle import AmpHandle
from castwise.bridges.compat.apex.amp.properties import BRIEFS, LEVELS, Properties
from castwise.bridges.compat.apex.amp.scaler import LossScaler
from castwise.core.masters import make_pickles_plain

__all__ = ["init", "initialize", "load_state_dict", "state_dict"]


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: Any = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = 2.0**24,
    *,
    patch_torch_functions_type: torch.dtype | None = None,
) -> Any:
    """Prepare models and optimizers, in place, for training in mixed precision at one of Apex's optimization levels.

    Args:
        models: A module, or a list of modules.
        optimizers: An optimizer, a list of optimizers, or None if the models are only evaluated.
        enabled: Whether mixed precision is used. With False, all functions of ``amp`` do nothing.
        opt_level: The optimization level. ``O0`` trains in fp32. ``O1`` casts the inputs of operators, in all code of
            the process. ``O2`` stores models in fp16, and the optimizers update fp32 copies of the weights (master
            weights). ``O3`` stores models in fp16 without master weights.
        cast_model_type: The dtype in which models are stored: fp16, bf16 or fp32. False leaves models unchanged.
        patch_torch_functions: Whether the casts of ``O1`` are made. None means the default of the level.
        keep_batchnorm_fp32: Whether BatchNorm modules that have weights stay in fp32. The strings ``"True"`` and
            ``"False"`` are accepted too.
        master_weights: Whether the optimizers keep fp32 master weights.
        loss_scale: ``"dynamic"``, or the fixed scale as a number or as text.
        cast_model_outputs: The dtype to which the floating outputs of the models are cast.
        num_losses: The number of loss scales. ``scale_loss(loss_id=...)`` selects one of them.
        verbosity: With 0, nothing is printed.
        min_loss_scale: The smallest value of a dynamic loss scale.
        max_loss_scale: The largest value of a dynamic loss scale.
        patch_torch_functions_type: The dtype of the casts of ``O1``: fp16 or bf16, as in AMD's Apex. None means fp16.

    Returns:
        ``models``, or the tuple ``(models, optimizers)`` if optimizers were given. Each is a list if a list was given.

    Raises:
        RuntimeError: The level does not exist, options contradict each other, or an optimizer is given twice. Or a
            model is already stored in fp16 or bf16, or is wrapped for data parallelism.
        TypeError: Models or optimizers are in a container other than a list, or an optimizer's parameters are neither
            fp32, fp16 nor bf16.
    """
    _amp_state.opt_properties = properties = Properties()
    _amp_state.verbosity = verbosity
    _amp_state.loss_scalers = []
    if _end_casts():
        maybe_print(
            "amp.initialize was called again: the casts of an earlier call with O1 end here.  Call amp.initialize once, "
            "with lists of all models and optimizers, to keep them.",
            True,
        )
    if not enabled:
        return models if optimizers is None else (models, optimizers)
    if opt_level not in LEVELS:
        raise RuntimeError(
            f"Unexpected optimization level {opt_level}. Options are 'O0', 'O1', 'O2', 'O3'.  Note that in `O0`, `O1`, etc., "
            "the prefix O is the letter O, not the number zero."
        )
    properties.set_level(opt_level)
    maybe_print(f"Selected optimization level {opt_level}:  {BRIEFS[opt_level]}", True)
    _print_options("Defaults for this optimization level are:", properties)
    _amp_state.min_loss_scale = min_loss_scale
    _amp_state.max_loss_scale = max_loss_scale
    maybe_print("Processing user overrides (additional kwargs that are not None)...", True)
    for name, value in (
        ("cast_model_type", cast_model_type),
        ("patch_torch_functions", patch_torch_functions),
        ("keep_batchnorm_fp32", keep_batchnorm_fp32),
        ("master_weights", master_weights),
        ("loss_scale", loss_scale),
    ):
        if value is not None:
            setattr(properties, name, value)
    _print_options("After processing overrides, optimization options are:", properties)
    all_optimizers = _as_list(
        "optimizer", optimizers, lambda value: isinstance(casting.base_of(value), torch.optim.Optimizer)
    )
    all_models = _as_list("model", models, lambda value: isinstance(value, nn.Module))
    casting.check_models(all_models)
    if not _amp_state.allow_incoming_model_not_fp32:
        casting.check_params_fp32(all_models)
    casting.check_optimizers(all_optimizers, all_models if properties.cast_model_type else [])
    scalers = [
        LossScaler(properties.loss_scale, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale)
        for _ in range(num_losses)
    ]
    # Checks come first, so that the call can be repeated after an error.
    if properties.patch_torch_functions:
        device_type, half = casting.device_type_of(all_models), patch_torch_functions_type or torch.float16
        _begin_casts(device_type, half, all_models, properties.loss_scale)
    try:
        if properties.cast_model_type:
            casting.cast_models(all_models, all_optimizers, properties, cast_model_outputs)
    except BaseException:
        _end_casts()
        raise
    if not properties.cast_model_type and cast_model_outputs is not None:
        casting.install_casts(all_models, None, cast_model_outputs)
    for optimizer in all_optimizers:
        stash.equip(optimizer, bool(properties.master_weights))
    _amp_state.loss_scalers = scalers
    return models if optimizers is None else (models, optimizers)


def _print_options(title: str, properties: Properties) -> None:
    maybe_print(title, True)
    for name, value in properties.options.items():
        maybe_print(f"{name:22} : {value}", True)


def _as_list(what: str, given: Any, fits: Callable[[Any], bool]) -> list[Any]:
    if given is None:
        return []
    values = [given] if fits(given) else given
    if not isinstance(values, list) or not all(map(fits, values)):
        raise TypeError(f"{what}s must be either a single {what} or a list of {what}s.")
    return values


def _end_casts() -> bool:
    """End the ``O1`` casts of an earlier ``initialize``, and return whether they were active. Apex would stack them."""
    handle = _amp_state.handle
    if handle is None:
        return False
    were_in_force: bool = handle._ambient.entered
    handle._deactivate()
    return were_in_force


def _begin_casts(
    device_type: str,
    half: torch.dtype,
    models: Sequence[nn.Module],
    loss_scale: float | str,
    enabled: bool = True,
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> AmpHandle:
    if half not in FORMATS:
        raise RuntimeError(
            f"patch_torch_functions_type was {half}; allowed: torch.float16, torch.bfloat16. For fp32 use opt_level='O0'."
        )
    ambient = casts_of_o1(device_type, half, allow_banned)
    handle = AmpHandle(
        ambient, half, loss_scale, enabled and enable_caching, verbose or _amp_state.verbosity == 2
    )
    try:
        if enabled:
            patch_registered(handle.undo)
            make_pickles_plain()
            for model in models if enable_caching else ():
                handle.undo.callback(model.register_forward_pre_hook(begin_caching).remove)
                handle.undo.callback(model.register_forward_hook(end_caching, always_call=True).remove)
            ambient.enter()
            patch_torch(device_type, handle.undo)
    except BaseException:
        handle._deactivate()
        raise
    _amp_state.handle = handle
    return handle


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> Any:
    """Start the casts of optimization level ``O1`` in all code of the process, as Apex's first API did.

    Args:
        enabled: Whether casts are made. With False, the returned handle does nothing.
        loss_scale: ``"dynamic"`` or a number: the loss scale that the handle uses.
        enable_caching: Stored without effect. No model is passed to this function whose cast weights could be cached.
        verbose: Stored without effect.
        allow_banned: Whether ``binary_cross_entropy`` runs in fp32. Otherwise it raises an error for fp16 inputs.

    Returns:
        The handle, which scales losses and can end the casts.
    """
    _end_casts()
    where, half = casting.device_type_of([]), torch.float16
    return _begin_casts(where, half, [], loss_scale, enabled, enable_caching, verbose, allow_banned)


# --- state --------------------------------------------------------------------------------------------------


def state_dict(destination: OrderedDict[str, Any] | None = None) -> OrderedDict[str, Any]:
    """Return the loss scales in Apex's form: ``{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}, ...}``.

    ``unskipped`` is the number of backward passes since the last overflow or growth. If ``amp`` is disabled, the result
    has no entries.

    Args:
        destination: A dictionary to which the entries are added, if given.
    """
    destination = OrderedDict() if destination is None else destination
    for index, scaler in enumerate(_amp_state.loss_scalers):
        destination[f"loss_scaler{index}"] = {
            "loss_scale": scaler.loss_scale(),
            "unskipped": scaler._unskipped,
        }
    return destination


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Load loss scales that were saved by this module or by the real Apex.

    If the number of saved scales differs from ``num_losses``, the first scales are loaded, as many as exist on both
    sides.

    Args:
        state_dict: The dictionary that ``amp.state_dict()`` returned.

    Raises:
        RuntimeError: A key does not belong to a loss scale.
    """
    scalers = _amp_state.loss_scalers
    if len(state_dict) != len(scalers):
        print(
            f"Warning: state_dict contains {len(state_dict)} entries, while {len(scalers)} loss_scalers are used"
        )
    unexpected = [key for key in state_dict if "loss_scaler" not in key]
    saved = [value for key, value in state_dict.items() if "loss_scaler" in key]
    if len(saved) > len(scalers):
        print(f"Skipping loss_scaler[{len(scalers)}], since num_losses was set to {len(scalers)}")
    for scaler, entry in zip(scalers, saved, strict=False):
        scaler._loss_scale = float(entry["loss_scale"])
        scaler._unskipped = int(entry["unskipped"])
    if unexpected:
        keys = ", ".join(f'"{key}"' for key in unexpected)
        raise RuntimeError(f"Error(s) in loading state_dict. Unexpected key(s) in state_dict: {keys}. ")
