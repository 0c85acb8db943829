"""Run a script abstractly: execute its statements with values of which only their part in mixed precision is known.

A test that the script does not decide (``if args.amp:``) is decided by a choice, the same wherever the same expression
is tested in the run; :mod:`castwise.bridges.scripts.lint.explore` makes a run for each choice. So each run is one path
through the program, and values need no approximation where paths meet. A loop runs twice, and a function is executed at
each of its calls.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from castwise.bridges.scripts.lint import binding, calls, decisions, expressions, statements
from castwise.bridges.scripts.lint.flow import LEAVES, SpentError
from castwise.bridges.scripts.lint.program import Program
from castwise.bridges.scripts.lint.values import (
    Autocast,
    Const,
    External,
    Function,
    Instance,
    Module,
    Place,
    Scope,
    Unknown,
    Value,
    code,
)

if TYPE_CHECKING:
    from castwise.bridges.scripts.lint.library import Library

_MOST = 20_000
"""Statements of one run."""
_TEXT = 70
Arguments = tuple[list[Value], dict[str, Value]]
"""The arguments of a call: by place, and by name; ``*`` and ``**`` stand for arguments that the script does not show."""


class Machine:
    """One abstract run of a program.

    Args:
        program: Its files.
        choices: Decisions of tests by their text: one letter, ``T`` or ``F``; or two for a test that may turn out
            differently in the first and the second round of its loop.
        library: What calls of libraries do.

    Attributes:
        asked: The tests that were decided by a choice: whether the decision was true, and whether it may differ
            between rounds.
        relevant: Those of them that decide whether code that may concern precision is executed.
        visited: The definitions of the functions that were executed.
        regions: The autocast regions that are active, the innermost last.
        loops: The loops that are running.
        path: The file whose code is executed.
        tested: Scalers of whose scale a test has been made, since this was last emptied.
        instances: Every object of a class of the program.
        executed: The number of statements that were executed.
        frames: The functions that are being executed, from outside in: the scope of each, and the place of its call.
    """

    def __init__(self, program: Program, choices: Mapping[str, str], library: Library) -> None:
        self.program = program
        self.choices = choices
        self.library = library
        self.asked: dict[str, tuple[bool, bool]] = {}
        self.relevant: set[str] = set()
        self.decided: list[str] = []
        self.visited: set[ast.AST] = set()
        self.regions: list[Autocast] = []
        self.loops: list[ast.AST] = []
        self.turns: list[int] = []
        self.path = program.path
        self.tested: set[Value] = set()
        self.instances: list[Instance] = []
        self.modules: dict[Path, Module] = {}
        self.equal_to: dict[str, object] = {}
        self.frames: list[tuple[Scope, Place]] = []
        self.running: list[ast.AST] = []
        self.yielded: list[Value] = []
        self.executed = 0
        library.machine = self

    # --- starting ---------------------------------------------------------------------------------------------

    def run(self) -> Module:
        """Execute the script from its first line, as ``__main__``."""
        return self.load(self.program.path, "__main__")

    def apart(self, do: Callable[[], object]) -> None:
        """Execute a part of the program; whatever ends it ends only this part.

        Raises:
            SpentError: The run has executed as many statements as it may.
        """
        try:
            do()
        except LEAVES:
            pass
        finally:
            self.regions.clear()
            self.running.clear()
            self.frames.clear()

    def load(self, path: Path, name: str) -> Module:
        """A file of the program as a module that has been executed."""
        if path in self.modules:
            return self.modules[path]
        module = self.modules[path] = self.program.load(path)
        module.names.set("__name__", Const(Place(path, 1, 0), value=name))
        before, self.path = self.path, path
        try:
            self.block(module.tree.body, module.names)
        except LEAVES:
            pass
        finally:
            self.path = before
        return module

    # --- values -----------------------------------------------------------------------------------------------

    def place(self, node: ast.AST) -> Place:
        """Where a node of the file that is executed begins."""
        return Place(self.path, getattr(node, "lineno", 1), getattr(node, "col_offset", 0))

    def const(self, node: ast.AST, value: object) -> Const:
        """A literal."""
        return Const(self.place(node), value=value)

    def unknown(self, node: ast.AST, text: str, *sources: Value | None, turn: int | None = None) -> Unknown:
        """A value that the script does not show, computed from ``sources``."""
        turns = [each.turn for each in sources if isinstance(each, Unknown) and each.turn is not None]
        formats = frozenset().union(*(each.formats for each in sources if each))
        return Unknown(
            self.place(node),
            tuple(self.loops),
            formats=formats,
            scale_of=next((each.scale_of for each in sources if each and each.scale_of), None),
            is_of_gradients=any(each.is_of_gradients for each in sources if each),
            text=text if len(text) <= _TEXT else f"{text[:_TEXT]}...",
            turn=max(turns) if turn is None and turns else turn,
        )

    def text(self, value: Value, node: ast.AST) -> str:
        """A short expression for a value, for messages and decisions."""
        match value:
            case Unknown(text=text):
                return text
            case Const(value=it):
                return repr(it)
            case External(name=name):
                return name
        return code(node)

    def turn(self) -> int | None:
        """The round of the innermost loop; None outside of loops."""
        return self.turns[-1] if self.turns else None

    # --- executing --------------------------------------------------------------------------------------------

    def block(self, body: Sequence[ast.stmt], scope: Scope) -> None:
        """Execute statements."""
        for statement in body:
            self.executed += 1
            if self.executed > _MOST:
                raise SpentError
            statements.execute(self, statement, scope)

    def enter(self, region: Autocast) -> None:
        """Enter an autocast region until the ``with`` that is executed ends."""
        self.regions.append(region)
        self.library.entered(region)

    def truth(self, node: ast.expr, scope: Scope, default: bool = True) -> bool:
        """Whether an expression is true; ``default`` is the preferred decision."""
        return decisions.truth(self, node, scope, default)

    def is_true(self, value: Value, node: ast.AST) -> bool:
        """Whether a value is true, by a choice if the script does not decide it."""
        return decisions.is_true(self, value, node)

    def eval(self, node: ast.expr, scope: Scope) -> Value:
        """The value of an expression."""
        return expressions.evaluate(self, node, scope)

    def attribute(self, of: Value, name: str, node: ast.AST) -> Value:
        """An attribute of a value."""
        return expressions.attribute(self, of, name, node)

    def assign(self, target: ast.expr, value: Value, scope: Scope) -> None:
        """Bind a target of an assignment."""
        binding.assign(self, target, value, scope)

    def call(self, function: Value, arguments: Arguments, node: ast.AST) -> Value:
        """Call a value."""
        return calls.call(self, function, arguments, node)

    def call_function(self, function: Function, arguments: Arguments, node: ast.AST) -> Value:
        """Execute a function; the result is what its first ``return`` that is reached returns."""
        return calls.call_function(self, function, arguments, node)
