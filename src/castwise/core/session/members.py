"""Keep the prepared models and optimizers of an :class:`~castwise.Amp`, by weak references."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from castwise.core import masters
from castwise.core.model.borders import Border


class Members:
    """The prepared models and optimizers of one :class:`~castwise.Amp`, in the order in which they were prepared."""

    def __init__(self) -> None:
        self._optimizers: dict[int, weakref.ref[Optimizer]] = {}
        self.roots: weakref.WeakKeyDictionary[nn.Module, Border] = weakref.WeakKeyDictionary()
        """The prepared models, each with the :class:`~castwise.core.model.borders.Border` that holds its hooks."""
        self.arrived: weakref.WeakKeyDictionary[nn.Module, Mapping[torch.Tensor, torch.dtype]] = (
            weakref.WeakKeyDictionary()
        )
        """The tensors of each model that were bf16 or fp16 before it was prepared, with their dtype then."""
        self._strays: list[torch.Tensor] | None = None
        self._alive = 0
        """How many optimizers existed when the parameters outside all optimizers were last computed."""

    def add(self, model: nn.Module, root: Border) -> None:
        """Add a model that was prepared. ``root`` holds the model's hooks."""
        self.roots[model] = root
        self._strays = None

    def remove(self, model: nn.Module) -> None:
        """Remove a model because its preparation is undone."""
        self.roots.pop(model, None)
        self._strays = None

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Add an optimizer that was prepared."""
        self._optimizers[id(optimizer)] = weakref.ref(optimizer)
        self._strays = None

    def remove_optimizer(self, optimizer: Optimizer) -> None:
        """Remove an optimizer because its preparation is undone."""
        self._optimizers.pop(id(optimizer), None)
        self._strays = None

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether this very optimizer was prepared."""
        known = self._optimizers.get(id(optimizer))
        return known is not None and known() is optimizer

    @property
    def models(self) -> list[nn.Module]:
        """The models that still exist, as a list."""
        return list(self.roots)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that still exist, as a list."""
        return [optimizer for known in self._optimizers.values() if (optimizer := known()) is not None]

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield every parameter of the models once."""
        seen: set[int] = set()
        for model in self.models:
            for parameter in model.parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter

    def updated(self) -> Iterator[torch.Tensor]:
        """Return an iterator over the tensors that the optimizers update: fp32 masters, or parameters without masters.

        Without an optimizer, it yields the models' parameters.
        """
        optimizers = self.optimizers
        if not optimizers:
            return self.parameters()
        groups = itertools.chain.from_iterable(optimizer.param_groups for optimizer in optimizers)
        return itertools.chain.from_iterable(map(operator.itemgetter("params"), groups))

    def strays(self) -> list[torch.Tensor]:
        """Return the parameters of the models that none of the optimizers updates.

        Parameters that are added to an optimizer later are noticed only when models or optimizers come or go.
        """
        optimizers = self.optimizers
        if (
            self._strays is None or len(optimizers) != self._alive
        ):  # an optimizer may have been freed, so that none updates its parameters any more
            held = {
                id(masters.model_param_of(parameter))
                for optimizer in optimizers
                for group in optimizer.param_groups
                for parameter in group["params"]
            }
            self._strays = [parameter for parameter in self.parameters() if id(parameter) not in held]
            self._alive = len(optimizers)
        return self._strays

    def names(self) -> dict[int, str]:
        """Return the names of the models' parameters, by the ``id`` of the parameter and also of its fp32 master."""
        names = {}
        for model in self.models:
            for name, parameter in model.named_parameters():
                names[id(parameter)] = name
                names[id(masters.master_of(parameter))] = name
        return names
