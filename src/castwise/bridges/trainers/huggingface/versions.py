"""Checks that the installed releases of Hugging Face's libraries are those with which castwise is tested."""

from __future__ import annotations

import functools
import importlib.metadata
import warnings

TESTED = {"accelerate": "1.15", "transformers": "5.23"}
"""The minor release of each library with which castwise is tested."""


@functools.cache
def check_version(library: str) -> None:
    """Warn, once per process, if castwise is not tested with the installed release of a library.

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
