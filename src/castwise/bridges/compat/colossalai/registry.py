"""``colossalai.registry``: classes by name, as scripts register their losses and hooks."""

from __future__ import annotations

from typing import Any, TypeVar

from castwise.bridges.compat.coverage import missing_attribute
from castwise.errors import UnknownNameError

__all__ = [
    "DATASETS",
    "HOOKS",
    "LAYERS",
    "LOSSES",
    "LR_SCHEDULERS",
    "MODELS",
    "OPTIMIZERS",
    "Registry",
]
__getattr__ = missing_attribute("colossalai.registry")

_Registered = TypeVar("_Registered")


class Registry:
    """Classes and functions under the names with which they were defined."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._held: dict[str, Any] = {}

    def register_module(self, module: _Registered) -> _Registered:
        """Register a class or a function, replacing another one of the same name; a decorator."""
        self._held[module.__name__] = module  # type: ignore[attr-defined]
        return module

    def has(self, module_name: str) -> bool:
        """Whether something is registered under a name."""
        return module_name in self._held

    def get_module(self, module_name: str) -> Any:
        """The object registered under a name.

        Raises:
            UnknownNameError: Nothing is registered under this name. Colossal-AI's registered objects, such as layers,
                are not available here.
        """
        if module_name not in self._held:
            raise UnknownNameError(
                f"colossalai.registry: {self.name} has no {module_name!r}; it has {', '.join(self._held) or 'nothing'}. "
                "Register it with register_module, or pass the object itself instead of its name."
            )
        return self._held[module_name]


DATASETS = Registry("DATASETS")
HOOKS = Registry("HOOKS")
LAYERS = Registry("LAYERS")
LOSSES = Registry("LOSSES")
LR_SCHEDULERS = Registry("LR_SCHEDULERS")
MODELS = Registry("MODELS")
OPTIMIZERS = Registry("OPTIMIZERS")
