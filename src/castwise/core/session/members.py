"""The prepared models and optimizers of a session, held weakly."""

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
    """Models and optimizers of one session, in the order in which they were prepared."""

    def __init__(self) -> None:
        self._optimizers: dict[int, weakref.ref[Optimizer]] = {}
        self.roots: weakref.WeakKeyDictionary[nn.Module, Border] = weakref.WeakKeyDictionary()
        """The models, and the border around each."""
        self.arrived: weakref.WeakKeyDictionary[nn.Module, Mapping[torch.Tensor, torch.dtype]] = (
            weakref.WeakKeyDictionary()
        )
        """By model, the tensors that arrived in bf16 or fp16, with their format."""
        self._strays: list[torch.Tensor] | None = None
        self._alive = 0
        """How many optimizers were alive when strays were last computed."""

    def add(self, model: nn.Module, root: Border) -> None:
        """Add a model."""
        self.roots[model] = root
        self._strays = None

    def remove(self, model: nn.Module) -> None:
        """Remove a model."""
        self.roots.pop(model, None)
        self._strays = None

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Add an optimizer."""
        self._optimizers[id(optimizer)] = weakref.ref(optimizer)
        self._strays = None

    def remove_optimizer(self, optimizer: Optimizer) -> None:
        """Remove an optimizer."""
        self._optimizers.pop(id(optimizer), None)
        self._strays = None

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether this very optimizer was prepared."""
        known = self._optimizers.get(id(optimizer))
        return known is not None and known() is optimizer

    @property
    def models(self) -> list[nn.Module]:
        """The models that are alive."""
        return list(self.roots)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that are alive."""
        return [optimizer for known in self._optimizers.values() if (optimizer := known()) is not None]

    def parameters(self) -> Iterator[torch.Tensor]:
        """Every parameter of the models, each once."""
        seen: set[int] = set()
        for model in self.models:
            for parameter in model.parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter

    def updated(self) -> Iterator[torch.Tensor]:
        """The tensors that the optimizers update, masters or parameters; without an optimizer the models' parameters."""
        optimizers = self.optimizers
        if not optimizers:
            return self.parameters()
        groups = itertools.chain.from_iterable(optimizer.param_groups for optimizer in optimizers)
        return itertools.chain.from_iterable(map(operator.itemgetter("params"), groups))

    def strays(self) -> list[torch.Tensor]:
        """Parameters of the models that none of the optimizers held when it was prepared."""
        optimizers = self.optimizers
        if (
            self._strays is None or len(optimizers) != self._alive
        ):  # an optimizer may have died and left its parameters in none
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
        """Module paths of parameters and of their masters, by ``id``."""
        names = {}
        for model in self.models:
            for name, parameter in model.named_parameters():
                names[id(parameter)] = name
                names[id(masters.master_of(parameter))] = name
        return names
