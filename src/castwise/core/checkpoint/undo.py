"""Record the state of a training run before a checkpoint is loaded, to restore it if the load fails midway."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from castwise.core import _torch, masters
from castwise.core.checkpoint.contents import random_states, set_random_states
from castwise.core.checkpoint.storage import local_of
from castwise.core.session import Amp


class Before:
    """A record of the state of a model, its optimizers, its session and the random generators, made by the constructor.

    Weights are copied to host memory, with their fp32 masters or the fp32 values that are kept for weights without
    masters. For an optimizer, the contents of its dicts and lists are recorded. Its tensors are copied only if it may write into them
    while it loads. torch's optimizers replace their tensors instead.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], amp: Amp) -> None:
        self._model, self._amp = model, amp
        state = model.state_dict(keep_vars=True)
        self._extra = {key: copy.deepcopy(v) for key, v in state.items() if not isinstance(v, Tensor)}
        held = [value for value in state.values() if isinstance(value, Tensor)]
        full = [of(value) for value in held for of in (masters.master_of, masters.original_of)]
        held += [tensor for tensor in full if tensor is not None]
        self._containers: list[tuple[Any, Any]] = []
        for optimizer in optimizers:
            inside = self._containers_of(optimizer)
            held += inside if _writes_in_place(optimizer) else []
        own = {id(one): local_of(one) for one in held}
        self._tensors = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in own.values()]
        self._session = amp.state_dict()
        self._random = random_states(amp)

    def _containers_of(self, optimizer: Optimizer) -> list[Tensor]:
        """Record the contents of all dicts and lists inside an optimizer, and return the tensors in them.

        Optimizers that the optimizer wraps are included.
        """
        seen: dict[int, Any] = {}
        tensors: list[Tensor] = []
        left: list[Any] = [optimizer]
        while left:
            value = left.pop()
            if id(value) in seen:
                continue
            seen[id(value)] = value
            if isinstance(value, Optimizer):
                left.append(vars(value))
            elif isinstance(value, (dict, list)):
                self._containers.append((value, value.copy()))
                left += value.values() if isinstance(value, dict) else value
            elif isinstance(value, tuple):
                left += value
            elif isinstance(value, Tensor) and not value.is_meta:
                tensors.append(value)
        return tensors

    def put_back(self) -> None:
        """Restore the recorded state."""
        if self._extra:
            with suppress(Exception):  # a module that refuses its own state has already raised
                self._model.load_state_dict({**self._model.state_dict(keep_vars=True), **self._extra})
        for container, kept in self._containers:
            if isinstance(container, list):
                container[:] = kept
            else:
                container.clear()
                container.update(kept)
        with torch.no_grad():
            for tensor, value in self._tensors:
                tensor.copy_(value)
        self._amp.load_state_dict(self._session)
        set_random_states(self._random)


def _writes_in_place(optimizer: Optimizer) -> bool:
    """Whether an optimizer may write into its current state tensors while it loads a state dict.

    torch's and castwise's code does not, so the answer is True if any other code runs during the load.
    """
    kind = type(optimizer)
    code = [kind.load_state_dict, kind.__setstate__, *_torch.optimizers.load_hooks(optimizer)]
    return not all(getattr(one, "__module__", "").startswith(("torch.optim.", "castwise.")) for one in code)
