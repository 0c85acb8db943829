"""The command line: its arguments, output and exit codes. :mod:`castwise.commands.jobs` does the work of the commands.

Results go to standard output, and progress and errors to standard error. With ``--json``, standard output is one JSON object,
which also contains any error. The exit codes are 0 for success, 1 for a failed command, 2 for a usage error, 130 for an
interrupt and 143 for a termination by SIGTERM.

``commands`` holds the commands for workloads, ``scripts`` the commands for scripts, ``options`` the options that commands
share, and ``terminal`` the output. The command line needs Typer. Other parts of castwise do not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from castwise.core.extras import needs
from castwise.errors import MissingLibraryError

if TYPE_CHECKING:
    from castwise.commands.cli.commands import app

__all__ = ["app", "main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit the process.

    Args:
        arguments: The arguments after ``castwise``. By default they are those of this process.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        with needs("the command line"):
            from castwise.commands.cli.commands import app
            from castwise.commands.cli.terminal import show_plainly
    except MissingLibraryError as error:
        print(f"castwise: {error}", file=sys.stderr)
        if "--json" in words:
            said = {"type": type(error).__name__, "message": str(error), "exit_code": 1}
            print(json.dumps({"error": said}))
        raise SystemExit(1) from None
    if words[:1] != ["run"]:  # the output of run is the script's own, and is not changed
        show_plainly()
    app(args=words, prog_name="castwise")


def __getattr__(name: str) -> Any:
    """Return ``app``, the Typer application, which is imported when it is first used."""
    if name != "app":
        raise AttributeError(f"module 'castwise.commands.cli' has no attribute {name!r}")
    from castwise.commands.cli.commands import app

    return app
