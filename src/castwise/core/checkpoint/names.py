"""Give weights names in checkpoints that do not depend on wrappers or sharding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from castwise.core import masters
from castwise.core.parallel.wrappers import unwrap
from castwise.core.session import Amp
from castwise.errors import CheckpointError

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


class _Joined(nn.Module):
    """Several modules that together have the state dict of one model. This module is never called."""

    parts: tuple[nn.Module, ...]

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        # The parts are not registered as submodules, because the names of their weights would get prefixes.
        self.__dict__["parts"] = tuple(map(unwrap, parts))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dicts of all parts in one dict."""
        out: dict[str, Any] = {}
        for part in self.parts:
            state = part.state_dict(*args, **kwargs)
            twice = out.keys() & state.keys()
            if twice:
                raise CheckpointError(
                    f"checkpoint: two of the modules have a weight named {min(twice)!r}. To save several models in one "
                    "checkpoint, pass nn.ModuleDict({'name': model, ...})."
                )
            out |= state
        return out

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load into each part the entries that belong to it."""
        for part in self.parts:
            part.load_state_dict({key: state_dict[key] for key in part.state_dict()}, strict, assign)


def joined(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """Return a model, or the pipeline stages that this process holds, as one module."""
    if isinstance(model, nn.Module):
        return model
    return model[0] if len(model) == 1 else _Joined(model)


class Names:
    """The keys of a model's state dict, and the names of the same weights in checkpoints.

    Attributes:
        model: The given model, without wrappers around it.
        state: State dict of the model, which holds the parameters themselves.
        saved: Maps each key to the name under which it is saved, which lacks the parts that wrappers add. A parameter that
            was sharded by hand (``Amp.mark_sharded``) is saved in pieces with names such as ``weight#0of2``.
    """

    def __init__(self, model: nn.Module, amp: Amp) -> None:
        self.model = unwrap(model)
        self.state: dict[str, Any] = self.model.state_dict(keep_vars=True)
        inner = {
            f"{path}.{part}" if path else part
            for path, module in self.model.named_modules(remove_duplicate=False)
            for part in (("module",) if isinstance(module, _WRAPPERS) else ("_orig_mod",))
            if isinstance(getattr(module, part, None), nn.Module)
        }
        self.saved = {key: _without(key, inner) for key in self.state}
        for key, value in self.state.items():
            piece = amp.piece_of(value) if isinstance(value, Tensor) else None
            if piece is not None:
                self.saved[key] += f"#{piece[0]}of{piece[1]}"
        self._of: dict[int, list[str]] = {}
        for key, value in self.state.items():
            self._of.setdefault(id(value), []).append(self.saved[key])

    def aliases(self) -> dict[str, str]:
        """Return the further names of tied weights. Each further name is mapped to the first name of the parameter."""
        return {
            name: names[0]
            for value in self.state.values()
            if isinstance(value, Tensor)
            for names in (self._of[id(value)],)
            for name in names[1:]
        }

    def of(self, optimizers: Iterable[Optimizer]) -> list[list[list[str]]]:
        """Return the names of the parameters of each optimizer, for each of its parameter groups.

        Raises:
            CheckpointError: A parameter does not belong to the model.
        """
        return [
            [
                [self._name(parameter, index) for parameter in group["params"]]
                for group in optimizer.param_groups
            ]
            for index, optimizer in enumerate(optimizers)
        ]

    def _name(self, parameter: torch.Tensor, index: int) -> str:
        names = self._of.get(id(masters.model_param_of(parameter)))
        if names is None:
            raise CheckpointError(
                f"checkpoint: optimizer {index} updates a parameter of shape {list(parameter.shape)} that is not in the model's "
                "state dict. To save several models in one checkpoint, pass nn.ModuleDict({'name': model, ...})."
            )
        return names[0]


def _without(key: str, inner: set[str]) -> str:
    path, kept = "", []
    for part in key.split("."):
        path = f"{path}.{part}" if path else part
        if path not in inner:
            kept.append(part)
    return ".".join(kept)
