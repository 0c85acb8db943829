"""``colossalai.context.config``: the configuration, from a mapping or a Python file."""

from __future__ import annotations

import inspect
import os
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from castwise.errors import PlanError

__all__ = ["Config", "ConfigException"]


class ConfigException(PlanError):
    """An invalid configuration."""


class Config(dict[str, Any]):
    """A dictionary whose values, also nested ones, can be read as attributes."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.update(config or {})

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError:
            raise AttributeError(
                f"gpc.config has no {key!r}; it has {', '.join(self) or 'nothing'}. Add it to the configuration."
            ) from None

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value

    def update(self, config: Mapping[str, Any]) -> Self:  # type: ignore[override]
        """Add further values; mappings become :class:`Config`."""
        for key, value in config.items():
            self[key] = Config(value) if isinstance(value, dict) else value
        return self

    @classmethod
    def from_file(cls, filename: str | os.PathLike[str]) -> Self:
        """Run a Python file, which may import from ``colossalai``, and collect its global names.

        Names that begin with ``__``, modules and classes are left out.

        Raises:
            ConfigException: There is no such file, or it is not Python.
        """
        from castwise.bridges.compat.installing import serving

        path = Path(filename)
        if path.suffix != ".py" or not path.is_file():
            raise ConfigException(
                f"config {str(filename)!r}: {'not a .py file' if path.is_file() else 'no such file'}; give the path of a "
                "Python file, or a dict."
            )
        with serving("colossalai"):
            names = runpy.run_path(str(path))
        return cls({
            key: value
            for key, value in names.items()
            if not (key.startswith("__") or inspect.ismodule(value) or inspect.isclass(value))
        })
