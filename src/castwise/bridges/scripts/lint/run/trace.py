"""Where an abstract run is: what it executes, what was decided, and which regions are active."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

from castwise.bridges.scripts.lint.run.program import Program
from castwise.bridges.scripts.lint.run.values import Autocast, Instance, Module, Place, Scope, Value


class Trace:
    """The state of one abstract run of a program.

    Args:
        program: Its files.
        choices: Decisions of tests by their text: one letter, ``T`` or ``F``; or two for a test that may turn out
            differently in the first and the second round of its loop.

    Attributes:
        asked: The tests that were decided by a choice: whether the decision was true, and whether it may differ
            between rounds.
        relevant: Those of them that decide whether code that may concern precision is executed.
        decided: The tests that were decided by a choice since this was last emptied.
        equal_to: Literals that unknown values were decided to equal, by the text of the value.
        visited: The definitions of the functions that were executed.
        regions: The autocast regions that are active, the innermost last.
        loops: The loops that are running.
        turns: The round of each of them, and of loops over items that are known: 0 or 1.
        path: The file whose code is executed.
        tested: Scalers of whose scale a test was made since the last backward.
        instances: Every object of a class of the program.
        modules: The files that were executed.
        frames: The functions that are being executed, from outside in: the scope of each, and the place of its call.
        running: Their definitions.
        yielded: What the innermost of them has yielded.
        executed: The number of statements, calls and items of comprehensions that were executed.
    """

    def __init__(self, program: Program, choices: Mapping[str, str]) -> None:
        self.program = program
        self.choices = choices
        self.asked: dict[str, tuple[bool, bool]] = {}
        self.relevant: set[str] = set()
        self.decided: list[str] = []
        self.equal_to: dict[str, object] = {}
        self.visited: set[ast.AST] = set()
        self.regions: list[Autocast] = []
        self.loops: list[ast.AST] = []
        self.turns: list[int] = []
        self.path = program.path
        self.tested: set[Value] = set()
        self.instances: list[Instance] = []
        self.modules: dict[Path, Module] = {}
        self.frames: list[tuple[Scope, Place]] = []
        self.running: list[ast.AST] = []
        self.yielded: list[Value] = []
        self.executed = 0

    def place(self, node: ast.AST) -> Place:
        """Where a node of the file that is executed begins."""
        return Place(self.path, getattr(node, "lineno", 1), getattr(node, "col_offset", 0))

    def turn(self) -> int | None:
        """The round of the innermost loop; None outside of loops."""
        return self.turns[-1] if self.turns else None
