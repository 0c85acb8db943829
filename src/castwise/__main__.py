"""``python -m castwise``: the command line."""

from __future__ import annotations

from castwise.commands.cli import main

if __name__ == "__main__":
    main()
