"""What a training was before it was loaded into, to be put back if that fails in the middle."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from castwise import _torch, masters
from castwise.checkpoint.contents import random_states, set_random_states
from castwise.parallel.pieces import is_dtensor
from castwise.session import Amp

__all__ = ["Before"]


class Before:
    """A model, its optimizers, its session and the random generators, as they are now.

    Weights and their masters are copied to host memory. The state of an optimizer is not: its ``load_state_dict`` puts
    other tensors in the place of these.

    Args:
        model: Without wrappers.
        optimizers: Those that are loaded into.
        amp: The session.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], amp: Amp) -> None:
        self._model, self._amp = model, amp
        state = model.state_dict(keep_vars=True)
        self._extra = {key: copy.deepcopy(v) for key, v in state.items() if not isinstance(v, Tensor)}
        held = [value for value in state.values() if isinstance(value, Tensor)]
        held += [master for value in held if (master := masters.master_of(value)) is not None]
        self._originals = [
            (value, original.detach().clone())
            for value in held
            if (original := masters.original_of(value)) is not None
        ]
        own = {id(one): _torch.local_tensor(one) if is_dtensor(one) else one for one in held}
        self._tensors = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in own.values()]
        self._optimizers = [
            (
                one,
                one.state,
                {key: dict(value) for key, value in one.state.items()},
                one.param_groups,
                [dict(g) for g in one.param_groups],
            )
            for one in optimizers
        ]
        self._session = amp.state_dict()
        self._random = random_states(amp)

    def put_back(self) -> None:
        """Undo what has been changed since."""
        if self._extra:
            with suppress(Exception):  # a module that refuses its own state has said so before
                self._model.load_state_dict({**self._model.state_dict(keep_vars=True), **self._extra})
        with torch.no_grad():
            for tensor, value in self._tensors:
                tensor.copy_(value)
        for parameter, original in self._originals:
            masters.remember_original(parameter, original)
        for optimizer, state, values, groups, options in self._optimizers:
            state.clear()
            state.update(values)
            for group, kept in zip(groups, options, strict=True):
                group.clear()
                group.update(kept)
            optimizer.state, optimizer.param_groups = state, groups
        self._amp.load_state_dict(self._session)
        set_random_states(self._random)
