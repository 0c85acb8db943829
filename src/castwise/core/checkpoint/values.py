"""Read everything in a checkpoint that is not a tensor, and check it before it is used, since it is not trusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from castwise.core.checkpoint import storage
from castwise.core.checkpoint.folder import VALUES, read_values
from castwise.core.checkpoint.storage import need
from castwise.core.checkpoint.tree import check, decode, names_of
from castwise.errors import CheckpointError


@dataclass(frozen=True)
class Values:
    """Everything in a checkpoint except the bytes of its tensors.

    A tree is a nested value as JSON, in the encoding of :mod:`castwise.checkpoint.tree`.

    Attributes:
        tensors: Shapes and dtypes of the tensors, and positions of their bytes.
        model: Maps the names of the model's weights and other state to trees.
        aliases: Maps each further name of a tied weight to its first name.
        optimizers: A dict for each optimizer. ``class`` is its class name, and ``options`` has a tree for each parameter
            group. ``group_of`` maps names of weights to their groups, and ``state`` maps names of weights to trees.
        extra: A tree of the user's own values.
        ranks: For each rank, the trees ``amp`` (the session's state) and ``rng`` (the states of random generators).
    """

    tensors: storage.Index
    model: dict[str, Any]
    aliases: dict[str, str]
    optimizers: list[dict[str, Any]]
    extra: Any
    ranks: list[dict[str, Any]]


def read(path: Path, manifest: Mapping[str, Any]) -> Values:
    """Read and check the values of a checkpoint.

    Raises:
        CheckpointError: :func:`castwise.checkpoint.save` cannot have written these values.
    """
    found = read_values(path, manifest)
    files = {name: about["size"] for name, about in manifest["files"].items() if name != VALUES}
    try:
        need(
            isinstance(found, dict) and found.keys() == set(Values.__dataclass_fields__),
            "it does not have exactly the parts of a checkpoint",
        )
        values = Values(**{**found, "tensors": storage.read_index(found["tensors"], files)})
        _check(values, manifest["world_size"])
    except (CheckpointError, ValueError) as error:
        raise CheckpointError(f"its {VALUES} is damaged or was not written by castwise: {error}") from None
    return values


def _check(values: Values, world_size: int) -> None:
    known = values.tensors
    need(isinstance(values.model, dict), "the model is not a mapping")
    check([*values.model.values()], known)
    for name, tree in values.model.items():
        _need_own(tree, f"model.{name}")
    need(_maps(values.aliases, str), "the aliases are not a mapping of names")
    need(isinstance(values.optimizers, list), "the optimizers are not a list")
    for index, one in enumerate(values.optimizers):
        need(
            isinstance(one, dict)
            and one.keys() - {"steps_on_device"} == {"class", "options", "group_of", "state"}
            and isinstance(one["class"], str)
            and isinstance(one["options"], list)
            and _maps(one["group_of"], int)
            and _maps(one["state"], dict)
            and isinstance(one.get("steps_on_device", False), bool),
            "an optimizer does not consist of class, options, group_of and state",
        )
        need(
            all(0 <= group < len(one["options"]) for group in one["group_of"].values()),
            "a group is missing",
        )
        need(one["state"].keys() <= one["group_of"].keys(), "a weight has state but is in no group")
        for tree in (*one["options"], *one["state"].values()):
            check(tree, known)
            need(_is_mapping(tree), "options or state of an optimizer are not a mapping with string keys")
        _need_own(one["options"], f"optimizer.{index}.options")
        for name, tree in one["state"].items():
            _need_own(tree, f"optimizer.{index}.{name}")
    check(values.extra, known)
    need(
        isinstance(values.ranks, list) and len(values.ranks) == world_size,
        "the number of parts differs from the number of ranks that saved",
    )
    for rank in values.ranks:
        need(
            isinstance(rank, dict) and rank.keys() == {"amp", "rng"},
            "a rank's part does not consist of amp and rng",
        )
        check([rank["amp"], rank["rng"]], known)
        need(_is_mapping(rank["rng"]), "the states of the random generators are not a mapping")
        need(
            all(isinstance(item, dict) and "tensor" in item for _, item in rank["rng"]["dict"]),
            "the state of a random generator is not a tensor",
        )
        amp = decode(rank["amp"], lambda name: name)
        need(isinstance(amp, dict), "the session's state is not a mapping")
        scaler = amp.get("scaler")
        need(
            scaler is None or _is_scaler(scaler),
            "the scaler's state is not a mapping of names to finite numbers",
        )


def _need_own(tree: Any, name: str) -> None:
    """Raise ValueError if a tree refers to a tensor that is not stored under the tree's own name.

    It could otherwise refer to a tensor of another entry that has the same shape.
    """
    own = all(f"{tensor}.".startswith(f"{name}.") for tensor in names_of(tree))
    need(own, f"{name} holds a tensor under the name of another entry")


def _maps(value: Any, kind: type) -> bool:
    return isinstance(value, dict) and all(type(item) is kind for item in value.values())


def _is_mapping(tree: Any) -> bool:
    return isinstance(tree, dict) and "dict" in tree and all(isinstance(key, str) for key, _ in tree["dict"])


_OF_A_SCALE = {"scale", "_growth_tracker"}
_OF_A_SCALER = _OF_A_SCALE | {"growth_factor", "backoff_factor", "growth_interval"}


def _is_scaler(state: Any) -> bool:
    if not isinstance(state, dict):
        return False
    if not state:
        return True  # the state of a disabled scaler
    losses = state.get("losses", {})
    own = {key: value for key, value in state.items() if key != "losses"}
    return (
        _are_numbers(own, _OF_A_SCALER)
        and isinstance(losses, dict)
        and all(isinstance(name, str) and _are_numbers(loss, _OF_A_SCALE) for name, loss in losses.items())
    )


def _are_numbers(state: Any, required: set[str]) -> bool:
    if not isinstance(state, dict) or not required <= state.keys():
        return False
    for key in (required | {"hysteresis_tracker"}) & state.keys():
        whole = key.endswith(("tracker", "interval"))
        if type(state[key]) is not int and (whole or type(state[key]) is not float):
            return False
        if not 0 <= state[key] < 2**63:  # NaN fails these comparisons as well
            return False
    return True
