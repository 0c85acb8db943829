"""Name the extra of castwise that installs an optional library, and raise the error if the library is missing."""

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
"""Maps the import name of a library to the extra of castwise that installs it."""


class LeftOutWarning(UserWarning):
    """An output was left out because a library is missing.

    The message names both, and says how to install the library.
    """


def install(library: str) -> str:
    """Return the command that installs castwise with an optional library."""
    return f'pip install "castwise[{EXTRAS[library]}]"'


@contextlib.contextmanager
def needs(what: str) -> Iterator[None]:
    """A context manager around imports of an optional library, which says how to install the library if it is missing.

    Args:
        what: What needs the library, for the message.

    Raises:
        MissingLibraryError: The library is not installed. Other import errors pass through unchanged.
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
    """A context manager around an output that needs an optional library.

    If the library is missing, the output is left out, with a warning that names ``what``.
    """
    try:
        with needs(what):
            yield
    except MissingLibraryError as error:
        warnings.warn(f"left out: {error}", LeftOutWarning, stacklevel=3)
