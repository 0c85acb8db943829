"""A script as a tree, with the meaning of its names."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from typing import Any

import libcst as cst
from libcst import metadata as meta

Suite = cst.IndentedBlock | cst.Module


def _check_depth(code: str) -> None:
    """Refuse what Python's own parser finds nested too deeply: LibCST's would end the process.

    Raises:
        SyntaxError: The nesting is too deep for Python's parser.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(code)
        except (RecursionError, MemoryError):
            raise SyntaxError("its expressions are nested too deeply") from None
        except SyntaxError as error:
            if "too many" in str(error):
                raise
        except ValueError:  # LibCST reports this error
            pass


class View:
    """Queries on a parsed script.

    Raises:
        SyntaxError: The script cannot be parsed.
    """

    def __init__(self, code: str) -> None:
        self.text = code
        _check_depth(code)
        try:
            tree = cst.parse_module(code)
        except cst.ParserSyntaxError as error:
            raise SyntaxError(f"line {error.raw_line}: {error.message}") from None
        wrapper = meta.MetadataWrapper(tree, unsafe_skip_copy=True)
        self.module = wrapper.module
        wrapper.resolve_many(  # together, since each metadata provider walks the tree
            (meta.ScopeProvider, meta.QualifiedNameProvider, meta.ParentNodeProvider, meta.PositionProvider)
        )
        self._scopes = wrapper.resolve(meta.ScopeProvider)
        self._names: Any = wrapper.resolve(meta.QualifiedNameProvider)
        self._parents = wrapper.resolve(meta.ParentNodeProvider)
        self._positions = wrapper.resolve(meta.PositionProvider)
        scope = self._scopes[self.module]
        assert scope is not None
        self.globals: meta.Scope = scope
        self.nodes: list[cst.CSTNode] = list(inside(self.module))
        scopes = {id(each): each for each in self._scopes.values() if each is not None}.values()
        self.words = {item.name for each in scopes for item in each.assignments} | {
            node.value for node in self.nodes if isinstance(node, cst.Name) and self.scope(node) is not None
        }
        """Names of variables, everywhere: not attribute names or argument keywords."""

    def everywhere(self, name: str) -> list[meta.BaseAssignment]:
        """All bindings of a name in the script, in any scope."""
        scopes = {id(each): each for each in self._scopes.values() if each is not None}.values()
        return [item for each in scopes for item in each.assignments if item.name == name]

    # --- places -------------------------------------------------------------------------------------------

    def code(self, node: cst.CSTNode) -> str:
        """The source of a node."""
        return self.module.code_for_node(node)

    def line(self, node: cst.CSTNode) -> int:
        """The line where a node begins."""
        return self.position(node)[0]

    def position(self, node: cst.CSTNode) -> tuple[int, int]:
        """Line and column where a node begins."""
        start = self._positions[node].start
        return start.line, start.column

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """The node around a node."""
        return self._parents.get(node)

    def around(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """The nodes around a node, from inside out."""
        while (parent := self.parent(node)) is not None:
            yield parent
            node = parent

    def statement(self, node: cst.CSTNode) -> cst.BaseStatement:
        """The statement that a node is in."""
        return next(outer for outer in (node, *self.around(node)) if isinstance(outer, cst.BaseStatement))

    def suite(self, node: cst.CSTNode) -> Suite | None:
        """The block that contains the statement of a node; None if the block is on the line of its ``if`` or ``with``."""
        parent = self.parent(self.statement(node))
        return parent if isinstance(parent, (cst.IndentedBlock, cst.Module)) else None

    def targets(self, statement: cst.CSTNode | None) -> list[cst.BaseExpression]:
        """The targets of an assignment; empty for anything else."""
        return [each.target for each in statement.targets] if isinstance(statement, cst.Assign) else []

    def called(self, call: cst.Call) -> str:
        """The last part of the name of the called object."""
        return self.code(call.func).rpartition(".")[2]

    # --- names --------------------------------------------------------------------------------------------

    def origin(self, node: cst.CSTNode) -> str | None:
        """The dotted name of a name or attribute, by the script's imports; None if it is not certain."""
        found = self.origins(node)
        return next(iter(found)) if len(found) == 1 and "" not in found else None

    def origins(self, node: cst.CSTNode) -> set[str]:
        """All possible dotted names by the script's imports; the empty string stands for anything else."""
        found = self._names.get(node, ())
        names = found() if callable(found) else found  # computed on access
        return {name.name if name.source is meta.QualifiedNameSource.IMPORT else "" for name in names}

    def scope(self, node: cst.CSTNode) -> meta.Scope | None:
        """The scope of a node."""
        return self._scopes.get(node)

    def bindings(self, name: cst.Name) -> list[meta.BaseAssignment]:
        """The bindings of a name that are visible at its position, in the order of lines."""
        scope = self.scope(name)
        found = [] if scope is None else list(scope[name.value])
        return sorted(
            found, key=lambda item: self.position(item.node) if isinstance(item, meta.Assignment) else (0, 0)
        )


def inside(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """A node and everything inside it, in the order of the script."""
    stack = [node]
    while stack:
        here = stack.pop()
        yield here
        stack.extend(reversed(here.children))


def text(node: cst.BaseExpression) -> str | None:
    """A literal string; None for anything else."""
    value = node.evaluated_value if isinstance(node, cst.SimpleString) else None
    return value if isinstance(value, str) else None


def root(node: cst.BaseExpression) -> cst.Name | None:
    """The first name of ``a.b.c``."""
    while isinstance(node, cst.Attribute):
        node = node.value
    return node if isinstance(node, cst.Name) else None
