"""Optional libraries: the extra that installs each, and the error if one is missing."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Final

from castwise.errors import MissingLibraryError

EXTRAS: Final[Mapping[str, str]] = {
    "cloudpickle": "tune",
    "jinja2": "report",
    "libcst": "migrate",
    "matplotlib": "report",
    "sklearn": "workloads",
    "tensorboard": "tensorboard",
    "typer": "cli",
}
"""By import name of a library, the extra that installs it."""


class LeftOutWarning(UserWarning):
    """An output was left out because a library is missing; the message names both, and how to install the library."""


def install(library: str) -> str:
    """The command that installs a library with castwise."""
    return f'pip install "castwise[{EXTRAS[library]}]"'


@contextlib.contextmanager
def needs(what: str) -> Iterator[None]:
    """Context for imports of an optional library that ``what`` needs.

    Raises:
        MissingLibraryError: A library is not installed; the message says how to install it. Other import errors pass through
            unchanged.
    """
    try:
        yield
    except ImportError as error:
        library = (error.name or "").partition(".")[0]
        if library not in EXTRAS:
            raise
        raise MissingLibraryError(
            f"{what} needs {library}, which is not installed. Install it with: {install(library)}",
            name=library,
        ) from error


@contextlib.contextmanager
def left_out(what: str) -> Iterator[None]:
    """Context for an output that needs an optional library: if it is missing, ``what`` is left out with a warning."""
    try:
        with needs(what):
            yield
    except MissingLibraryError as error:
        warnings.warn(f"left out: {error}", LeftOutWarning, stacklevel=3)
