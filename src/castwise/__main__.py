"""Run castwise's command line, as ``python -m castwise``."""

from __future__ import annotations

from castwise.commands.cli import main

if __name__ == "__main__":
    main()
