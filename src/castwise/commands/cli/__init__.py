"""The command line: arguments, exit codes, progress. What the commands do is in :mod:`castwise.commands.jobs`.

Results go to standard output, progress and errors to standard error. With ``--json`` standard output is one JSON
object, which also contains any error. Exit codes: 0 success; 1 the command failed; 2 usage error; 130 interrupted; 143
terminated.

``commands``: the commands for workloads; ``scripts``: the commands for scripts; ``options``: shared options;
``terminal``: output. The command line needs Typer; the core does not.
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
        arguments: Arguments after ``castwise``; by default those of the process.
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
    if words[:1] != ["run"]:  # standard output and error belong to the script
        show_plainly()
    app(args=words, prog_name="castwise")


def __getattr__(name: str) -> Any:
    """Import the commands on first use."""
    if name != "app":
        raise AttributeError(f"module 'castwise.commands.cli' has no attribute {name!r}")
    from castwise.commands.cli.commands import app

    return app
