"""Convert the loss-scaler state dicts of Apex and Colossal-AI to and from torch's.

Apex saves no factors, and Colossal-AI saves no growth tracker under that name. Such values are arguments, or have the
defaults that the docstrings give. Fields that castwise does not know raise an error.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from castwise.errors import CheckpointError


def from_apex(
    state: Mapping[str, Any], *, names: tuple[str, ...] = ("loss",), growth_interval: int = 2000
) -> dict[str, Any]:
    """Convert a loss-scaler state of Apex to a state that :meth:`castwise.GradScaler.load_state_dict` accepts.

    Args:
        state: The result of ``apex.amp.state_dict()``: ``{"loss_scaler0": {"loss_scale": ..., "unskipped": ...},
            ...}``.
        names: The names of the losses, in Apex's order of ``loss_id``. The first must be ``"loss"``. Further losses
            without a name here are called ``loss1``, ``loss2``, ...
        growth_interval: The number of updates with finite gradients before the scale grows. Apex does not save it,
            and its default is 2000.

    Raises:
        CheckpointError: The state is empty or has other keys, or ``names`` is not valid.
    """
    found: dict[str, dict[str, Any]] = {}
    for index, (key, value) in enumerate(state.items()):
        if key != f"loss_scaler{index}" or set(value) != {"loss_scale", "unskipped"}:
            raise CheckpointError(
                f"from_apex: unexpected entry {key!r}: {value!r}; expected loss_scaler0, loss_scaler1, ... with loss_scale "
                "and unskipped, as apex.amp.state_dict() gives them"
            )
        name = names[index] if index < len(names) else f"loss{index}"
        found[name] = {"scale": float(value["loss_scale"]), "_growth_tracker": int(value["unskipped"])}
    if not found:
        raise CheckpointError("from_apex: the state is empty; expected loss_scaler0, loss_scaler1, ...")
    first, *others = found
    if first != "loss" or len(found) != len(state):
        raise CheckpointError(
            f"from_apex(names={names!r}): the first must be 'loss', the scaler's default, and all names must differ"
        )
    out: dict[str, Any] = {
        **found[first], "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": growth_interval
    }  # fmt: skip
    if others:
        out["losses"] = {name: {**found[name], "hysteresis_tracker": 0} for name in others}
    return out


def to_apex(state: Mapping[str, Any]) -> OrderedDict[str, dict[str, Any]]:
    """Convert the state of a :class:`castwise.GradScaler` to a state for ``apex.amp.load_state_dict``.

    Args:
        state: The result of ``state_dict()`` of the :class:`castwise.GradScaler`.
    """
    return OrderedDict(
        (f"loss_scaler{i}", {"loss_scale": float(loss["scale"]), "unskipped": int(loss["_growth_tracker"])})
        for i, loss in enumerate([state, *state.get("losses", {}).values()])
    )


_COLOSSAL = {
    "scale": "scale",
    "growth_factor": "growth_factor",
    "backoff_factor": "backoff_factor",
    "growth_interval": "growth_interval",
    "growth_step": "_growth_tracker",
    "hysteresis_step": "hysteresis_tracker",
}
_COLOSSAL_POLICY = {"min_scale", "max_scale", "hysteresis"}


def from_colossalai(state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a loss-scaler state of Colossal-AI to a state that :meth:`castwise.GradScaler.load_state_dict` accepts.

    Args:
        state: The ``state_dict()`` of a ``DynamicGradScaler`` of Colossal-AI's naive AMP. Its fields differ between
            releases. It must have ``scale``, a number or a tensor of one element. It may have any of growth_factor,
            backoff_factor, growth_interval, growth_step and hysteresis_step, each with or without a leading
            underscore. The fields min_scale, max_scale and hysteresis are ignored, since they are arguments of the
            constructor.

    Raises:
        CheckpointError: A field is not known, or ``scale`` is missing.
    """
    fields = {key.removeprefix("_"): value for key, value in state.items()}
    unknown = set(fields) - set(_COLOSSAL) - _COLOSSAL_POLICY
    if unknown or "scale" not in fields:
        raise CheckpointError(
            f"from_colossalai: unexpected or missing fields in {sorted(state)}; expected scale and any of "
            f"{', '.join(list(_COLOSSAL)[1:])}, min_scale, max_scale, hysteresis"
        )
    out = {
        "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 1000, "_growth_tracker": 0,
        "hysteresis_tracker": 0,
    }  # fmt: skip
    for theirs, ours in _COLOSSAL.items():
        if theirs in fields:
            value = fields[theirs]
            out[ours] = value.item() if hasattr(value, "item") else value
    return out


def to_colossalai(state: Mapping[str, Any], *, hysteresis: int = 2) -> dict[str, Any]:
    """Convert the state of a :class:`castwise.GradScaler` to a state for Colossal-AI's ``DynamicGradScaler``.

    Args:
        state: The result of ``state_dict()`` of the :class:`castwise.GradScaler`. Only the first loss is converted,
            since Colossal-AI has only one loss.
        hysteresis: The argument ``hysteresis`` of Colossal-AI's scaler, which it saves with its state. Its default is
            2.

    Returns:
        A state for ``DynamicGradScaler.load_state_dict``. It has the fields that Colossal-AI reads, with the scale as
        an fp32 tensor of shape ``[1]``. It also has the counters, which Colossal-AI neither saves nor reads.
    """
    out = {theirs: state.get(ours, 0) for theirs, ours in _COLOSSAL.items()}
    out["scale"] = torch.tensor([float(state["scale"])], device="cpu")
    out["hysteresis"] = hysteresis
    return out
