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
from typing import Any, NamedTuple

from castwise.bridges.scripts.lint.run.flow import LEAVES, SpentError
from castwise.bridges.scripts.lint.run.program import Program
from castwise.bridges.scripts.lint.run.rules import Rules
from castwise.bridges.scripts.lint.run.trace import Trace
from castwise.bridges.scripts.lint.run.values import (
    Arguments,
    Const,
    External,
    Function,
    Module,
    Place,
    Scope,
    Unknown,
    Value,
    code,
)

_MOST = 30_000
"""Statements, calls and items of comprehensions of one run."""
_TEXT = 70


class Parts(NamedTuple):
    """What a machine does with each part of a program; every function takes the machine first.

    Attributes:
        execute: Executes a statement in a scope.
        evaluate: Returns the value of an expression in a scope.
        attribute: Returns an attribute of a value, by its name.
        call: Calls a value with arguments.
        call_function: Calls a function of the program with arguments.
    """

    execute: Callable[[Any, ast.stmt, Scope], None]
    evaluate: Callable[[Any, ast.expr, Scope], Value]
    attribute: Callable[[Any, Value, str, ast.AST], Value]
    call: Callable[[Any, Value, Arguments, ast.AST], Value]
    call_function: Callable[[Any, Function, Arguments, ast.AST], Value]


class Machine(Trace):
    """One abstract run of a program.

    Args:
        program: Its files.
        choices: As for :class:`Trace`.
        parts: How it executes code.
        rules: What is told of each use of mixed precision.
    """

    def __init__(
        self, program: Program, choices: Mapping[str, str], parts: Parts, rules: Callable[[Trace], Rules]
    ) -> None:
        super().__init__(program, choices)
        self.parts = parts
        self.rules = rules(self)

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

    # --- executing --------------------------------------------------------------------------------------------

    def block(self, body: Sequence[ast.stmt], scope: Scope) -> None:
        """Execute statements."""
        for statement in body:
            self.spend()
            self.parts.execute(self, statement, scope)

    def spend(self) -> None:
        """Count a statement, a call or an item of a comprehension.

        Raises:
            SpentError: The run has executed as many as it may.
        """
        self.executed += 1
        if self.executed > _MOST:
            raise SpentError

    def eval(self, node: ast.expr, scope: Scope) -> Value:
        """The value of an expression."""
        return self.parts.evaluate(self, node, scope)

    def attribute(self, of: Value, name: str, node: ast.AST) -> Value:
        """An attribute of a value."""
        return self.parts.attribute(self, of, name, node)

    def call(self, function: Value, arguments: Arguments, node: ast.AST) -> Value:
        """Call a value."""
        return self.parts.call(self, function, arguments, node)

    def call_function(self, function: Function, arguments: Arguments, node: ast.AST) -> Value:
        """Execute a function; the result is what its first ``return`` that is reached returns."""
        return self.parts.call_function(self, function, arguments, node)
