"""``colossalai.context.config``: the configuration, which is read from a mapping or a Python file."""

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
    """Raised for an invalid configuration."""


class Config(dict[str, Any]):
    """A dictionary whose values can be read as attributes. Nested dictionaries are converted to this class too."""

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
        """Add values. Those that are dictionaries become :class:`Config`."""
        for key, value in config.items():
            self[key] = Config(value) if isinstance(value, dict) else value
        return self

    @classmethod
    def from_file(cls, filename: str | os.PathLike[str]) -> Self:
        """Run a Python file and return its global variables as a configuration.

        The file may import from ``colossalai``. Modules, classes and names that begin with ``__`` are left out.

        Raises:
            ConfigException: The file does not exist, or its name does not end in ``.py``.
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
