"""Libraries that castwise does without until they are used: which extra brings each, and what is said where one is missing."""

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
"""By the name that a library is imported by, the extra of the package that brings it."""


class LeftOutWarning(UserWarning):
    """Something was left out for want of a library; says what, and what installs it."""


def install(library: str) -> str:
    """The line that installs a library with castwise."""
    return f'pip install "castwise[{EXTRAS[library]}]"'


@contextlib.contextmanager
def needs(what: str) -> Iterator[None]:
    """Import libraries of an extra inside, for ``what``.

    Raises:
        MissingLibraryError: One is not installed; it says what installs it. Other failures of an import stay what they are.
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
    """Make inside what a library of an extra is for; where it is missing ``what`` is left out, and a warning says so."""
    try:
        with needs(what):
            yield
    except MissingLibraryError as error:
        warnings.warn(f"left out: {error}", LeftOutWarning, stacklevel=3)
