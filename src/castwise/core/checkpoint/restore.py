"""Load one rank's part of a checkpoint: check that it fits, read it, and write it into the model and the optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from castwise.core import masters
from castwise.core.checkpoint import storage, values
from castwise.core.checkpoint.contents import random_states, set_random_states
from castwise.core.checkpoint.names import Names
from castwise.core.checkpoint.options import (
    HOW_NOT_WHAT,
    OF_A_SCHEDULE,
    OF_A_WEIGHT,
    alike,
    as_kind,
    fits,
    of_torch,
    refusal,
    state_keys,
    takes,
)
from castwise.core.checkpoint.storage import Entry
from castwise.core.checkpoint.tree import decode, names_of
from castwise.core.checkpoint.undo import Before
from castwise.core.plans.text import shown, some
from castwise.core.ranks import Ranks
from castwise.core.session import Amp
from castwise.errors import CheckpointError


class Restore:
    """Loads a verified checkpoint into a model, its optimizers and a session.

    If no optimizers are given, the saved ones are ignored.

    Attributes:
        same_ranks: Whether as many ranks load as saved, so that each rank continues with its own random states.
    """

    def __init__(
        self,
        path: Path,
        manifest: Mapping[str, Any],
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        amp: Amp,
        ranks: Ranks,
    ) -> None:
        self._path, self._step = path, manifest["step"]
        self._same_torch = _release(manifest["torch"]) == _release(torch.__version__)
        try:
            self._values = values.read(path, manifest)
        except CheckpointError as error:
            raise CheckpointError(f"load({str(path)!r}): {error}. Load another checkpoint.") from None
        self._amp, self._optimizers = amp, list(optimizers)
        self._names = Names(model, amp)
        self._updated = self._names.of(optimizers)
        self._aliases = self._names.aliases()
        self.same_ranks = manifest["world_size"] == ranks.size
        self._own = self._values.ranks[ranks.rank if self.same_ranks else 0]
        self._tensors: dict[str, Tensor] = {}
        self._before: Before | None = None

    # --- checks -------------------------------------------------------------------------------------------

    def check(self, ranks: Ranks) -> None:
        """Check on all ranks that the checkpoint fits the model and the optimizers.

        All ranks must call this. Nothing is changed.

        Raises:
            CheckpointError: Something is missing in the checkpoint or here, or has another shape or another kind of dtype.
        """
        held = ranks.every(lambda: (set(self._names.saved.values()), self._updated_sets()))
        problems = ranks.every(
            lambda: [
                *self._misfits_of_model(set().union(*(keys for keys, _ in held))),
                *self._misfits_of_optimizers([updated for _, updated in held]),
            ]
        )
        different = dict.fromkeys(text for texts in problems for text in texts)
        if different:
            raise CheckpointError(
                f"load({str(self._path)!r}): the checkpoint does not fit, and nothing was changed: {'; '.join(different)}. Load "
                "into the model and the optimizers that saved it."
            )

    def _updated_sets(self) -> list[set[str]]:
        return [{name for group in groups for name in group} for groups in self._updated]

    def _misfits_of_model(self, held: set[str]) -> list[str]:
        known = set(self._values.model)
        shapes, kinds, missing = [], [], []
        for key, value in self._names.state.items():
            name = self._names.saved[key]
            if name not in known:
                missing.append(name)
                continue
            saved = decode(self._values.model[name], self._values.tensors.__getitem__)
            was = list(saved.shape) if isinstance(saved, Entry) else "no tensor"
            now = list(self._amp.as_whole(value, value).shape) if isinstance(value, Tensor) else "no tensor"
            if was != now:
                shapes.append(f"{name} ({was} saved, {now} here)")
            elif isinstance(saved, Entry) and _kind(saved.dtype) != _kind(value.dtype):
                kinds.append(f"{name} ({_kind(saved.dtype)} saved, {_kind(value.dtype)} here)")
        return [
            *_listed("the model has weights that were not saved", missing),
            *_listed("weights were saved that the model does not have", sorted(known - held)),
            *_listed("weights have other shapes", shapes),
            *_listed("weights have other kinds of dtypes", kinds),
        ]

    def _misfits_of_optimizers(self, held: Sequence[list[set[str]]]) -> list[str]:
        saved = self._values.optimizers
        if not any(held):
            return []
        if len(saved) != len(self._optimizers):
            return [f"{len(saved)} optimizers were saved, and there are {len(self._optimizers)} here"]
        out = []
        for index, (optimizer, was) in enumerate(zip(self._optimizers, saved, strict=True)):
            kind = type(optimizer).__qualname__
            if kind != was["class"]:
                out.append(f"optimizer {index} was {was['class']} and is {kind} here")
                continue
            here = self._updated_sets()[index]
            everywhere = set().union(*(updated[index] for updated in held if index < len(updated)))
            everywhere = {self._first_name(name) for name in everywhere}
            before = {self._first_name(name) for name in was["group_of"]}
            out += _listed(
                f"optimizer {index} updates parameters here that it did not update when it was saved",
                [n for n in sorted(here) if self._first_name(n) not in before],
            )
            out += _listed(
                f"optimizer {index} updated parameters when it was saved that it does not update here",
                sorted(before - everywhere),
            )
            for number, names in enumerate(self._updated[index]):
                groups = [was["options"][was["group_of"][n]] for n in map(self._name_in(was), names) if n]
                if any(group != groups[0] for group in groups):
                    out.append(
                        f"group {number} of optimizer {index} joins parameters that had different options"
                    )
            if not out:
                out = self._misfits_of_values(index, optimizer)
        return out

    def _misfits_of_values(self, index: int, optimizer: Optimizer) -> list[str]:
        """Return descriptions of the saved options and state that an optimizer does not accept."""
        was, entry = self._values.optimizers[index], self._values.tensors.__getitem__
        torchs = of_torch(optimizer)
        options: list[str] = []
        unknown: list[str] = []
        state: list[str] = []
        missing: list[str] = []
        for number, (group, saved) in enumerate(self._groups(index)):
            for parameter, name in zip(group["params"], saved, strict=True):
                for key, value in decode(was["options"][was["group_of"][name]], entry).items():
                    here = group.get(key)
                    if not takes(optimizer, group, key):
                        unknown += [f"{key} of group {number}"] if self._same_torch else []
                        continue
                    if key in HOW_NOT_WHAT:
                        good = value is None or isinstance(value, (bool, type(here)))
                    elif key in OF_A_SCHEDULE and key not in group:
                        good = value is not None and alike(0.0, value)
                    else:
                        good = alike(here, value)
                    if not good:
                        options.append(f"{key} of group {number}")
                own = optimizer.state.get(parameter, {})
                for key, value in decode(was["state"].get(name, {"dict": []}), entry).items():
                    wanted = own.get(key)
                    if wanted is None and key in OF_A_WEIGHT and torchs and value is not None:
                        wanted = masters.model_param_of(parameter)
                    if isinstance(wanted, Tensor):
                        wanted = self._amp.as_whole(parameter, wanted)
                    if not fits(wanted, value):
                        state.append(f"{key} of {name} ({_said(value)} saved, {_said(wanted)} here)")
            if torchs and saved and not options:
                given = decode(was["options"][was["group_of"][saved[0]]], entry)
                reason = refusal(optimizer, given)
                options += [f"options of group {number}: {reason}"] if reason else []
                dims = [masters.model_param_of(parameter).dim() for parameter in group["params"]]
                needed = {dim: set() if reason else state_keys(optimizer, given, dim) for dim in set(dims)}
                for dim, name in zip(dims, saved, strict=True):
                    there = {key for key, _ in was["state"].get(name, {"dict": []})["dict"]}
                    missing += [f"{key} of {name}" for key in sorted(needed[dim] - there) if there]
        return [
            *_listed(
                f"optimizer {index} was saved with options that {type(optimizer).__qualname__} does not have (set them in its "
                "param_groups first if they are yours)",
                dict.fromkeys(unknown),
            ),
            *_listed(f"optimizer {index} has options of other types", dict.fromkeys(options)),
            *_listed(f"optimizer {index} has state of other shapes or dtypes", state),
            *_listed(f"optimizer {index} has options that need state which was not saved", missing),
        ]

    def _first_name(self, name: str) -> str:
        """Return the first name of a tied weight, whichever of its names is given. Any other name is returned unchanged.

        The weight may be tied in the model or only in the checkpoint.
        """
        name = self._values.aliases.get(name, name)
        return self._aliases.get(name, name)

    def _name_in(self, was: Mapping[str, Any]) -> Any:
        by_first = {self._first_name(name): name for name in was["group_of"]}
        return lambda name: name if name in was["group_of"] else by_first.get(self._first_name(name))

    def _groups(self, index: int) -> Iterator[tuple[dict[str, Any], list[Any]]]:
        """Yield each parameter group of an optimizer with the names under which its parameters were saved."""
        name_in = self._name_in(self._values.optimizers[index])
        for group, names in zip(self._optimizers[index].param_groups, self._updated[index], strict=True):
            yield group, list(map(name_in, names))

    # --- read ---------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Read everything that this rank needs into new tensors. The model and the optimizers are not changed.

        Raises:
            CheckpointError: A file ends too soon, or a random generator does not accept its saved state.
        """
        for key, value in self._names.state.items():
            for tensor in names_of(self._values.model[self._names.saved[key]]):
                whole = isinstance(value, Tensor)
                self._tensors[tensor] = self._like(tensor, value) if whole else self._plain(tensor)
        for index, was in enumerate(self._values.optimizers[: len(self._optimizers)]):
            for group, saved in self._groups(index):
                for parameter, name in zip(group["params"], saved, strict=True):
                    for tensor in names_of(was["state"].get(name)):
                        self._tensors[tensor] = self._like(tensor, parameter)
            for tensor in names_of(was["options"]):
                self._tensors[tensor] = self._plain(tensor)
        for tensor in names_of([self._values.extra, self._own["rng"] if self.same_ranks else None]):
            self._tensors[tensor] = self._plain(tensor)
        storage.read(self._path, self._values.tensors, self._tensors)
        self._random: dict[str, Tensor] = {}
        if self.same_ranks:
            states = decode(self._own["rng"], self._tensors.__getitem__)
            self._random = {kind: states[kind] for kind in random_states(self._amp) if kind in states}
        for kind, state in self._random.items():
            try:
                torch.Generator(kind).set_state(state)  # a new generator, to test the state
            except (RuntimeError, TypeError) as error:
                raise CheckpointError(
                    f"the saved state of the random generator of {kind} is not valid: {error}"
                ) from None

    def _plain(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        saved = self._values.tensors[name]
        return torch.empty(saved.shape, dtype=saved.dtype, device=device)

    def _like(self, name: str, owner: Tensor) -> Tensor:
        """Return an uninitialised tensor to read a saved tensor into, with the device and sharding of its parameter.

        Step counters are read to the CPU. Another tensor whose shape differs from its parameter's is replicated.
        """
        saved = self._values.tensors[name]
        owner = masters.model_param_of(owner)
        owner = self._amp.as_whole(owner, owner).detach()
        counter = name.endswith(".step") or (saved.shape == () and owner.dim() > 0)
        if saved.shape == owner.shape and not counter:
            return torch.empty_like(owner, dtype=saved.dtype)
        mesh = getattr(owner, "device_mesh", None)
        if counter or mesh is None:
            return self._plain(name, "cpu" if counter else owner.device)
        from torch.distributed import tensor

        return tensor.empty(  # such as Adafactor's rows and columns, which every rank holds whole
            saved.shape,
            dtype=saved.dtype,
            device_mesh=mesh,
            placements=[tensor.Replicate()] * mesh.ndim,
        )

    # --- write --------------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Write what :meth:`read` has read into the model, the optimizers, the session and the random generators.

        :meth:`undo` reverts this.
        """
        self._before = Before(self._names.model, self._optimizers, self._amp)
        fetch = self._tensors.__getitem__
        state = {key: decode(self._values.model[name], fetch) for key, name in self._names.saved.items()}
        for key, value in state.items():
            if isinstance(value, Tensor):
                state[key] = _as_cut(value, self._names.state[key])
        self._names.model.load_state_dict(state)
        for index, optimizer in enumerate(self._optimizers):
            state = self._state_of(index, optimizer)
            optimizer.load_state_dict(state)
            _keep_counters(optimizer, state["state"])
        self._amp.load_state_dict(decode(self._own["amp"], fetch))
        set_random_states(self._random)

    def undo(self) -> None:
        """Revert :meth:`apply`, even if it failed in the middle."""
        if self._before is not None:
            self._before.put_back()

    def _state_of(self, index: int, optimizer: Optimizer) -> dict[str, Any]:
        """Return the saved state of an optimizer in the form that the optimizer's ``load_state_dict`` takes."""
        was, fetch = self._values.optimizers[index], self._tensors.__getitem__
        state: dict[int, Any] = {}
        groups = []
        count = 0
        for group, saved in self._groups(index):
            numbers = range(count, count + len(saved))
            count += len(saved)
            options = {key: value for key, value in group.items() if key != "params"}
            for number, name, parameter in zip(numbers, saved, group["params"], strict=True):
                if name in was["state"]:
                    state[number] = {
                        key: _as_cut(value, parameter) if isinstance(value, Tensor) else value
                        for key, value in decode(was["state"][name], fetch).items()
                    }
                    if isinstance(steps := state[number].get("step"), Tensor):
                        # torch moves all state to the parameter's device except ``step``
                        there = was.get("steps_on_device", False)
                        own = optimizer.state.get(parameter, {}).get("step")
                        place = own if isinstance(own, Tensor) else parameter if there else steps
                        state[number]["step"] = steps.to(place.device)
                loaded = decode(was["options"][was["group_of"][name]], fetch)
                options |= {
                    key: value
                    for key, value in loaded.items()
                    if key not in HOW_NOT_WHAT and takes(optimizer, group, key)
                }
            options = {key: as_kind(value, group.get(key)) for key, value in options.items()}
            groups.append({**options, "params": list(numbers)})
        return {"state": state, "param_groups": groups}

    def extra(self) -> Any:
        """Return the ``extra`` that was given to :func:`save`."""
        return decode(self._values.extra, self._tensors.__getitem__)


def _keep_counters(optimizer: Optimizer, saved: Mapping[int, Mapping[str, Any]]) -> None:
    """Give 0-dim tensors in an optimizer's state their saved dtype again.

    ``load_state_dict`` of torch has cast all of them except ``step`` to the dtype of the parameter.
    """
    params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, state in saved.items():
        held = optimizer.state.get(params[number], {})
        for key, value in state.items():
            now = held.get(key)
            alone = isinstance(value, Tensor) and value.dim() == 0 and params[number].dim() > 0
            if alone and isinstance(now, Tensor) and now.dim() == 0 and now.dtype is not value.dtype:
                held[key] = value.to(now.device)


def _as_cut(value: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's part of a DTensor if its parameter was sharded by hand, so that the parameter is no DTensor.

    Any other value is returned unchanged.
    """
    parameter = masters.model_param_of(parameter)
    if hasattr(value, "to_local") and not hasattr(parameter, "to_local"):
        local: Tensor = value.to_local()
        return local
    return value


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point or dtype.is_complex:
        return "complex" if dtype.is_complex else "floating"
    return "truth values" if dtype is torch.bool else "whole"


def _release(version: str) -> str:
    return version.partition("+")[0]


def _said(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, (Entry, Tensor)) else shown(value)


def _listed(what: str, names: Iterable[str]) -> list[str]:
    names = list(names)
    return [f"{what}: {some(names)}"] if names else []
