"""``colossalai.registry``: registries in which scripts register losses, hooks and other classes by name."""

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
    """Holds classes and functions under the names with which they were defined."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._held: dict[str, Any] = {}

    def register_module(self, module: _Registered) -> _Registered:
        """Register a class or a function, as a decorator. An earlier entry of the same name is replaced."""
        self._held[module.__name__] = module  # type: ignore[attr-defined]
        return module

    def has(self, module_name: str) -> bool:
        """Whether a class or function is registered under a name."""
        return module_name in self._held

    def get_module(self, module_name: str) -> Any:
        """Return the class or function that is registered under a name.

        Raises:
            UnknownNameError: Nothing is registered under this name. The layers and other objects that Colossal-AI itself
                registers are not available here.
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
