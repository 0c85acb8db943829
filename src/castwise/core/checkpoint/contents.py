"""Collect what a checkpoint contains: the state of a model, its optimizers, a session and the random generators."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from castwise.core import devices, masters
from castwise.core.checkpoint.names import Names
from castwise.core.checkpoint.tree import encode
from castwise.core.ranks import Ranks
from castwise.core.session import Amp
from castwise.errors import CheckpointError


@dataclass(frozen=True)
class Contents:
    """The data that one rank saves.

    Attributes:
        tensors: Tensors by name.
        common: JSON that is the same on all ranks with the same weights.
        own: JSON that belongs to this rank alone.
    """

    tensors: dict[str, Tensor]
    common: dict[str, Any]
    own: dict[str, Any]


def collect(
    model: nn.Module, optimizers: Sequence[Optimizer], amp: Amp, extra: Any, ranks: Ranks
) -> Contents:
    """Collect everything that this rank saves, without copying tensors.

    Weights are collected in fp32, from the master weights if there are any. Optimizer state is saved as it is. If an
    optimizer has none yet, no step is made to create it.

    Raises:
        CheckpointError: Something cannot be saved.
    """
    names = Names(model, amp)
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for key, value in masters.fp32_state_dict(names.model).items():
        name = names.saved[key]
        if isinstance(value, Tensor):
            value = amp.as_whole(names.state[key], value)
        values[name] = encode(value, f"model.{name}", tensors)
    common = {
        "model": values,
        "aliases": names.aliases(),
        "optimizers": [
            _optimizer(index, optimizer, groups, tensors, amp)
            for index, (optimizer, groups) in enumerate(zip(optimizers, names.of(optimizers), strict=True))
        ],
        "extra": encode(extra, "extra", tensors),
    }
    own = {
        "amp": encode(amp.state_dict(), "amp", tensors),
        "rng": encode(random_states(amp), f"rng.{ranks.rank}", tensors),
    }
    return Contents(tensors, common, own)


def _optimizer(
    index: int, optimizer: Optimizer, groups: list[list[str]], tensors: dict[str, Tensor], amp: Amp
) -> dict[str, Any]:
    """Return an optimizer's state dict as JSON, with the names of parameters instead of their numbers.

    The tensors are added to ``tensors``.
    """
    saved = masters.without_masters(optimizer.state_dict())  # the model's weights are saved in fp32 anyway
    name_of = {
        number: name
        for group, names in zip(saved["param_groups"], groups, strict=True)
        for number, name in zip(group["params"], names, strict=True)
    }
    options = [{k: v for k, v in group.items() if k != "params"} for group in saved["param_groups"]]
    params = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def whole(number: int, state: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: amp.as_whole(params[number], value) if isinstance(value, Tensor) and key != "step" else value
            for key, value in state.items()
        }

    return {
        "class": type(optimizer).__qualname__,
        "options": [
            encode(group, f"optimizer.{index}.options.{number}", tensors)
            for number, group in enumerate(options)
        ],
        "group_of": {name: number for number, names in enumerate(groups) for name in names},
        "state": {
            name_of[number]: encode(whole(number, state), f"optimizer.{index}.{name_of[number]}", tensors)
            for number, state in saved["state"].items()
        },
        "steps_on_device": any(
            isinstance(step := state.get("step"), Tensor) and step.device.type != "cpu"
            for state in saved["state"].values()
        ),
    }


def random_states(amp: Amp) -> dict[str, Tensor]:
    """Return the states of torch's random generators on this rank, by device type."""
    states = {"cpu": torch.get_rng_state()}
    if amp.device_type != "cpu":
        states[amp.device_type] = devices.generator(torch.device(amp.device_type))[0]()
    return states


def set_random_states(states: Mapping[str, Tensor]) -> None:
    """Set torch's random generators to states that :func:`random_states` returned."""
    for device_type, state in states.items():
        devices.generator(torch.device(device_type))[1](state)


def merge(contents: Contents, ranks: Ranks) -> dict[str, Any]:
    """Merge the JSON of all ranks on the first rank, and return it there.

    The other ranks get an empty dict. All ranks must call this.

    Raises:
        CheckpointError: The ranks' optimizers differ in class.
    """
    # With many ranks, most have the same common part as the first rank. These ranks do not send it.
    digest = hashlib.sha256(json.dumps(contents.common).encode()).hexdigest()
    common = None if ranks.first(lambda: digest) == digest and ranks.rank else contents.common
    parts = ranks.to_first((common, contents.own))
    return ranks.each(lambda: _merge([c for c, _ in parts if c], [own for _, own in parts]))


def _merge(commons: list[dict[str, Any]], own: list[dict[str, Any]]) -> dict[str, Any]:
    if not commons:
        return {}
    first: dict[str, Any] = {**commons[0], "optimizers": []}
    for common in commons:
        first["model"] = {**common["model"], **first["model"]}
        first["aliases"] = {**common["aliases"], **first["aliases"]}
        for index, optimizer in enumerate(common["optimizers"]):
            if index == len(first["optimizers"]):
                first["optimizers"].append({**optimizer, "options": [], "group_of": {}, "state": {}})
            _add(first["optimizers"][index], optimizer, index)
    return {**first, "ranks": own}


def _add(known: dict[str, Any], more: Mapping[str, Any], index: int) -> None:
    if known["class"] != more["class"]:
        raise CheckpointError(
            f"save: optimizer {index} is a {known['class']} on one rank and a {more['class']} on another"
        )
    offset = len(known["options"])
    known["options"] += more["options"]
    known["group_of"] = {
        **{name: number + offset for name, number in more["group_of"].items()}, **known["group_of"]
    }  # fmt: skip
    known["state"] = {**more["state"], **known["state"]}
