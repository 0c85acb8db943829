"""The releases of Hugging Face's libraries that this integration is tested with."""

from __future__ import annotations

import functools
import importlib.metadata
import warnings

TESTED = {"accelerate": "1.15", "transformers": "5.23"}
"""Tested minor release of each library."""


@functools.cache
def check_version(library: str) -> None:
    """Warn once per process if the installed release is untested.

    Args:
        library: ``accelerate`` or ``transformers``.
    """
    installed = importlib.metadata.version(library)
    if installed.split(".")[:2] != TESTED[library].split("."):
        warnings.warn(
            f"castwise.integrations.huggingface is tested with {library} {TESTED[library]}, but {installed} is installed: install "
            f"'{library}=={TESTED[library]}.*', or first compare a short run with the same plan in a loop of your own",
            stacklevel=3,
        )
