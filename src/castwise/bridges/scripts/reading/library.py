"""The library that parses scripts, imported only when needed."""

from __future__ import annotations

import importlib.util

from castwise.errors import MissingLibraryError


def check_libcst(what: str) -> None:
    """Check that LibCST is available for ``what``.

    Raises:
        MissingLibraryError: The library is not installed.
    """
    if importlib.util.find_spec("libcst") is None:
        raise MissingLibraryError(
            f'{what} needs libcst, which is not installed. Install it with: pip install "castwise[migrate]"'
        )
