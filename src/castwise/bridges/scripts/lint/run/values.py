"""The values of an abstract run: what a script computes with, as far as it concerns precision."""

from __future__ import annotations

import ast
import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Place(NamedTuple):
    """Where in a file an expression begins; lines are counted from 1."""

    path: Path
    line: int
    column: int


class Low(NamedTuple):
    """A conversion to a low format: the format (``bf16`` or ``fp16``), and the place of the conversion."""

    format: str
    place: Place


class Module:
    """A parsed file of the program.

    Attributes:
        path: The file.
        tree: Its syntax tree.
        names: The values of its global names.
    """

    def __init__(self, path: Path, tree: ast.Module) -> None:
        self.path = path
        self.tree = tree
        self.names = Scope(self, None)


class Scope:
    """The names of a module, class or function.

    Attributes:
        module: The module that contains the code.
        outer: The scope around it, in which names are looked up next; None for a module.
        values: The values by name.
        elsewhere: Names that belong to another scope because of ``global`` or ``nonlocal``.
    """

    def __init__(self, module: Module, outer: Scope | None) -> None:
        self.module = module
        self.outer = outer
        self.values: dict[str, Value] = {}
        self.elsewhere: dict[str, Scope] = {}

    def get(self, name: str) -> Value | None:
        """The value of a name; None if the name has no value yet."""
        here: Scope | None = self
        while here is not None:
            if name in here.values:
                return here.values[name]
            here = here.outer
        return None

    def set(self, name: str, value: Value) -> None:
        """Bind a name."""
        self.elsewhere.get(name, self).values[name] = value


@dataclasses.dataclass(eq=False)
class Value:
    """Any value.

    Attributes:
        place: Where it was made.
        loops: The loops that were running when it was made, from outside in.
        formats: The formats of the enabled autocast regions in which it was computed; None stands for an unknown format.
        scaler: The loss scaler that multiplied it.
        low: The conversion by which its numbers, or its weights, became low; None if it is not known to be low.
        modules: The modules whose parameters it contains.
        scale_of: The scaler of whose scale, or of whose skipped steps, it tells.
        is_of_gradients: Whether it is a gradient or computed from gradients.
        is_frozen: Whether it is a module of which some parameters are not trained.
    """

    place: Place
    loops: tuple[ast.AST, ...] = ()
    formats: frozenset[str | None] = frozenset()
    scaler: Value | None = None
    low: Low | None = None
    modules: frozenset[Value] = frozenset()
    scale_of: Value | None = None
    is_of_gradients: bool = False
    is_frozen: bool = False


@dataclasses.dataclass(eq=False)
class Const(Value):
    """A literal: None, a bool, a number or a string."""

    value: object = None


@dataclasses.dataclass(eq=False)
class External(Value):
    """An object of a library, by its dotted name."""

    name: str = ""


@dataclasses.dataclass(eq=False)
class Unknown(Value):
    """Anything that the script does not show.

    Attributes:
        text: The expression that computes it; decisions that depend on it are named by this text.
        turn: The round of the loop in which it may be different, or None if it is the same in all.
        owner: The object of which it is an attribute, and the name of the attribute.
        is_tensor: Whether it is a tensor rather than a module or another object.
        is_object: Whether the script used it, so that it is not None.
        made: Whether the script made it by a call.
        fields: The attributes that were read or set.
        options: The places of the options that it holds, if it is a parser of a command line or what one has parsed.
    """

    text: str = ""
    turn: int | None = None
    owner: tuple[Value, str] | None = None
    is_tensor: bool = False
    is_object: bool = False
    made: bool = False
    fields: dict[str, Value] = dataclasses.field(default_factory=dict)
    options: set[Place] | None = None


_MOST_ITEMS = 1000


@dataclasses.dataclass(eq=False)
class Box(Value):
    """A dictionary (``items`` by key) or a sequence (``items`` by index).

    Attributes:
        items: The known items.
        is_dict: Whether it is a dictionary.
        is_open: Whether it may have other items.
        maker: The scope whose code made it.
    """

    items: dict[Any, Value] = dataclasses.field(default_factory=dict)
    is_dict: bool = False
    is_open: bool = False
    maker: Scope | None = None

    def add(self, value: Value, key: object = None) -> None:
        """Add an item: under a key, or at the end; one of very many is not known."""
        if len(self.items) >= _MOST_ITEMS:
            self.is_open = True
            return
        while key is None or (not self.is_dict and key in self.items):
            key = len(self.items) if key is None else object()
        self.items[key] = value


@dataclasses.dataclass(eq=False, kw_only=True)
class Function(Value):
    """A function of the program.

    Attributes:
        node: Its definition.
        scope: The scope in which it is defined.
        owner: The class whose body defines it.
        regions: Autocast regions that its decorators open.
        decorators: The last parts of the names of its decorators.
    """

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scope: Scope | None = None
    owner: Class | None = None
    regions: tuple[Autocast, ...] = ()
    decorators: frozenset[str] = frozenset()


@dataclasses.dataclass(eq=False)
class Class(Value):
    """A class of the program.

    Attributes:
        node: Its definition.
        names: The names that its body defines.
        bases: Its base classes.
    """

    node: ast.ClassDef | None = None
    names: Scope | None = None
    bases: tuple[Value, ...] = ()

    def lineage(self) -> Iterator[Value]:
        """The class and all its bases, the nearest first."""
        yield self
        for base in self.bases:
            if isinstance(base, Class):
                yield from base.lineage()
            else:
                yield base

    def find(self, name: str, after: Class | None = None) -> Value | None:
        """A name that the class or a base defines, or only the bases behind ``after``; None if there is none."""
        skip = after is not None
        for each in self.lineage():
            if not skip and isinstance(each, Class) and each.names and name in each.names.values:
                return each.names.values[name]
            skip = skip and each is not after
        return None

    def derives_from(self, prefix: str) -> bool:
        """Whether a base is an object of a library whose dotted name begins with ``prefix``."""
        return any(isinstance(each, External) and each.name.startswith(prefix) for each in self.lineage())


@dataclasses.dataclass(eq=False)
class Instance(Value):
    """An object of a class of the program, with its attributes."""

    kind: Class | None = None
    fields: dict[str, Value] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class Method(Value):
    """A method of an object: a function of the program, or a name that the object's library knows."""

    of: Value | None = None
    name: str = ""
    function: Function | None = None


@dataclasses.dataclass(eq=False)
class Partial(Value):
    """A callable with its first arguments."""

    of: Value | None = None
    given: tuple[Value, ...] = ()
    named: dict[str, Value] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class Namespace(Value):
    """A module of the program."""

    module: Module | None = None


@dataclasses.dataclass(eq=False)
class Autocast(Value):
    """An autocast region.

    Attributes:
        format: The format; None if it is not known.
        device: The device type; None if it is not known.
        is_on: Whether it is enabled.
        is_switched: Whether a flag of the script enables it.
        is_without_gradients: Whether it is ``torch.no_grad`` instead, in which nothing is trained.
    """

    format: str | None = None
    is_switched: bool = False
    is_without_gradients: bool = False
    device: str | None = None
    is_on: bool = True


@dataclasses.dataclass(eq=False)
class Contexts(Value):
    """What ``with`` enters: several autocast regions.

    Attributes:
        regions: The regions.
        after: Statements that are executed when the ``with`` ends, each block with its scope.
    """

    regions: tuple[Autocast, ...] = ()
    after: tuple[tuple[list[ast.stmt], Scope], ...] = ()


@dataclasses.dataclass(eq=False)
class Scaler(Value):
    """A GradScaler that the script makes.

    Attributes:
        is_on: Whether it is enabled.
        is_switched: Whether a flag of the script enables it.
        device: The device type; None if the script does not name one.
    """

    is_on: bool = True
    is_switched: bool = False
    device: str | None = None


@dataclasses.dataclass(eq=False)
class Optimizer(Value):
    """An optimizer that the script makes.

    Attributes:
        name: The dotted name of its class.
    """

    name: str = ""


@dataclasses.dataclass(eq=False)
class Scheduler(Value):
    """A learning rate scheduler."""


@dataclasses.dataclass(eq=False)
class State(Value):
    """The state of an object, as ``state_dict()`` returns it."""

    of: Value | None = None


Arguments = tuple[list[Value], dict[str, Value]]
"""The arguments of a call: by place, and by name; ``*`` and ``**`` stand for arguments that the script does not show."""


@dataclasses.dataclass
class Facts:
    """What all runs of a program together show, for errors that are something missing; objects by their place.

    Attributes:
        updated: Scalers that were updated.
        saved: Scalers whose state was saved or asked for.
        escaped: Scalers that code which the program does not show may use.
        stepped: Per scaler, the optimizers that it has stepped.
        options: Options of the command line: the attribute that holds each, and its spelling.
        handed: Options and values that were handed to code which the program does not show.
        made: Classes of which there was an object.
        files: The files that were executed.
    """

    updated: set[Place] = dataclasses.field(default_factory=set)
    saved: set[Place] = dataclasses.field(default_factory=set)
    escaped: set[Place] = dataclasses.field(default_factory=set)
    stepped: dict[Place, set[Place]] = dataclasses.field(default_factory=lambda: defaultdict(set))
    options: dict[Place, tuple[str, str]] = dataclasses.field(default_factory=dict)
    handed: set[Place] = dataclasses.field(default_factory=set)
    made: set[Place] = dataclasses.field(default_factory=set)
    files: set[Path] = dataclasses.field(default_factory=set)


def code(node: ast.AST) -> str:
    """The source of a node, in one line and one way of writing."""
    found: str | None = getattr(node, "castwise_code", None)
    if found is None:
        found = ast.unparse(node)
        node.castwise_code = found  # type: ignore[attr-defined]
    return found


def reachable(values: Iterator[Value] | list[Value]) -> list[Value]:
    """The values, and everything that they contain."""
    found: dict[int, Value] = {}
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if id(value) in found:
            continue
        found[id(value)] = value
        if isinstance(value, Box):
            waiting += value.items.values()
        elif isinstance(value, (Instance, Unknown)):
            waiting += value.fields.values()
        elif isinstance(value, Partial):
            waiting += [*value.given, *value.named.values()] + ([value.of] if value.of else [])
        elif isinstance(value, Method) and value.of is not None:
            waiting.append(value.of)
    return list(found.values())
