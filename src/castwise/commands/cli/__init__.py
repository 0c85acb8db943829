"""The command line: arguments, exit codes, progress. What the commands do is in :mod:`castwise.commands.jobs`.

Results go to standard output, progress and errors to standard error; with ``--json`` standard output is one JSON object, in
which an error is, too. Exit codes: 0; 1 where what was asked for could not be done; 2 where the command was not understood;
130 where it was interrupted, 143 where it was terminated.

``commands``: the commands; ``scripts``: those that take scripts. ``options``: what several of them take. ``terminal``: what goes
where. It needs Typer, which the core does without.
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
        arguments: Words after the command's name; by default the process's own.
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
    if words[:1] != ["run"]:  # its outputs are the script's
        show_plainly()
    app(args=words, prog_name="castwise")


def __getattr__(name: str) -> Any:
    """Import the commands on first use."""
    if name != "app":
        raise AttributeError(f"module 'castwise.commands.cli' has no attribute {name!r}")
    from castwise.commands.cli.commands import app

    return app
