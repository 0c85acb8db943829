"""Make an abstract run of a script for each way in which its tests can turn out, and collect what the rules find."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

from castwise.bridges.scripts.lint.options import RULE, unused_options
from castwise.bridges.scripts.lint.result import Fault
from castwise.bridges.scripts.lint.run.calls import call, call_function, parameter
from castwise.bridges.scripts.lint.run.expressions import attribute, evaluate
from castwise.bridges.scripts.lint.run.flow import SpentError
from castwise.bridges.scripts.lint.run.machine import Machine, Parts
from castwise.bridges.scripts.lint.run.objects import note_escape
from castwise.bridges.scripts.lint.run.program import Program
from castwise.bridges.scripts.lint.run.rules import Rules
from castwise.bridges.scripts.lint.run.statements import execute
from castwise.bridges.scripts.lint.run.values import Class, Facts, Function, Module, Place, Value
from castwise.bridges.scripts.lint.texts import RULES

_PRECISION = re.compile(
    r"amp|half|fp16|bf16|float16|scal|precision|autocast|mixed|dtype|cuda|accum|grad|clip|enabled", re.I
)
"""Tests that concern precision, which are also changed in pairs."""
_PARTS = Parts(execute, evaluate, attribute, call, call_function)
_USES = re.compile(r"\b(autocast|GradScaler)\b|\.(half|bfloat16)\(")
"""Text of scripts that may use mixed precision where a test turns out differently than in the first run."""
_RUNS = 120
_STATEMENTS = 60_000
"""Statements and calls of all runs together, after which no other run is begun."""
_LOOPED = re.compile(r"epoch|(^|_)(train(ing)?_)?step$|one_iter|iteration|batch", re.IGNORECASE)
"""Names of functions that a loop calls."""


class Exploration:
    """All runs of one script.

    Args:
        path: The script.
        parsed: As for :class:`castwise.bridges.scripts.lint.run.program.Program`.
    """

    def __init__(self, path: Path, parsed: dict[Path, tuple[ast.Module, str]] | None = None) -> None:
        self.program = Program(path, {} if parsed is None else parsed)
        self.program.load(path)
        self.text = self.program.text()
        self.facts = Facts()
        self.visited: set[ast.AST] = set()
        self.executed = 0
        self.runs: list[tuple[dict[str, str], Rules, Machine]] = []

    def faults(self) -> list[Fault]:
        """The errors of the script, and of the files beside it that it imports."""
        self._explore(leftover=())
        module = self.runs[0][2].modules[self.program.path]
        leftover = tuple(node for node in _functions(module) if node not in self.visited)
        found = self._collect()
        if leftover:
            self.runs.clear()
            self.executed = 0
            self._explore(leftover)
            found |= {key: when for key, when in self._collect().items() if key not in found}
        found |= dict.fromkeys(((place, RULE) for place in unused_options(self.program, self.facts)), "")
        faults = [
            Fault(place.path, place.line, rule, RULES[rule].why, RULES[rule].instead, RULES[rule].severity, when)
            for (place, rule), when in found.items()
        ]  # fmt: skip
        return sorted(set(faults))

    def _explore(self, leftover: tuple[ast.AST, ...]) -> None:
        base = self._run({}, leftover)
        if not base.rules.seen and not _USES.search(self.text):
            return
        flips = list(_flips(base))
        tried: set[frozenset[tuple[str, str]]] = {frozenset()}
        waiting = [dict([flip]) for flip in flips]
        concerned = [flip for flip in flips if _PRECISION.search(flip[0])][:12]
        pairs = [dict(pair) for pair in itertools.combinations(concerned, 2) if pair[0][0] != pair[1][0]]
        while (waiting or pairs) and len(tried) < _RUNS and self.executed < _STATEMENTS:
            choices = waiting.pop(0) if waiting else pairs.pop(0)
            key = frozenset(choices.items())
            if key in tried:
                continue
            tried.add(key)
            machine = self._run(choices, leftover)
            for text, decision in _flips(machine):
                if text not in base.asked and len(choices) < 3:
                    waiting.append({**choices, text: decision})  # a test that is reached only after this one

    def _run(self, choices: dict[str, str], leftover: tuple[ast.AST, ...]) -> Machine:
        machine = Machine(self.program, choices, _PARTS, lambda trace: Rules(self.facts, trace))
        rules = machine.rules
        try:
            machine.run()
            for node in leftover:
                if node not in machine.visited:
                    _enter(machine, node)
        except (SpentError, RecursionError):
            rules.end()
            rules.later.clear()  # the code that was not run may hold the missing calls
        else:
            rules.end()
        self.visited |= machine.visited
        self.executed += machine.executed
        self.facts.files |= set(machine.modules)
        self.runs.append((choices, rules, machine))
        return machine

    def _collect(self) -> dict[tuple[Place, str], str]:
        """The errors, each with the flags that switch it on; empty text if it is there in the first run."""
        found: dict[tuple[Place, str], str] = {}
        missing = {
            "scaler-not-updated": self.facts.updated | self.facts.escaped,
            "scaler-not-saved": self.facts.saved | self.facts.escaped,
        }
        each_run = []
        for choices, rules, machine in self.runs:
            errors = rules.found | {
                (place, rule) for place, rule, scaler in rules.later if scaler not in missing[rule]
            }
            each_run.append((choices, errors, rules, machine))
        for choices, errors, _, machine in each_run:
            for error in errors:
                if error in found:
                    continue
                flags = [
                    _said(text, pattern == "T") for text, pattern in choices.items() if len(pattern) == 1
                ]
                flags = [each for each in flags if _PRECISION.search(each)]
                if not choices:
                    flags = [
                        _said(text, machine.asked[text][0])
                        for other, errors_there, rules, _ in each_run
                        for text in other
                        if len(other) == 1 and error not in errors_there and _PRECISION.search(text)
                        and not machine.asked[text][1]
                    ]  # fmt: skip
                found[error] = " and ".join(dict.fromkeys(flags))
        return found


def _said(text: str, is_true: bool) -> str:
    return text if is_true else f"not {text}" if re.fullmatch(r"[\w.]+(\(.*\))?", text) else f"not ({text})"


def _flips(machine: Machine) -> list[tuple[str, str]]:
    """The other ways in which each test that may concern precision can turn out."""
    flips: list[tuple[str, str]] = []
    for text, (decided, varies) in machine.asked.items():
        if text not in machine.relevant and not _PRECISION.search(text):
            continue
        if not varies:
            flips.append((text, "F" if decided else "T"))
        elif decided:
            flips += [(text, "FT")]
        else:
            flips += [(text, "TF")]
    return flips


def _functions(module: Module) -> list[ast.AST]:
    """The functions and methods of a module; those that nothing in the file names come first."""
    found: list[ast.AST] = []
    for node in module.tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.append(node)
        elif isinstance(node, ast.ClassDef):
            found += [each for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
    used = {each.id for each in ast.walk(module.tree) if isinstance(each, ast.Name)}
    used |= {each.attr for each in ast.walk(module.tree) if isinstance(each, ast.Attribute)}
    return sorted(found, key=lambda node: getattr(node, "name", "") in used)


def _enter(machine: Machine, node: ast.AST) -> None:
    """Execute a function or method as if other code had called it."""
    module = machine.modules[machine.program.path]
    name = getattr(node, "name", "")
    is_looped = bool(_LOOPED.search(name))
    for value in list(module.names.values.values()):
        if isinstance(value, Function) and value.node is node:
            _call(machine, value, [], is_looped)
            return
        if isinstance(value, Class) and value.node is not None and node in value.node.body:
            found = value.names.values.get(name) if value.names else None
            if isinstance(found, Function):
                _call(machine, found, [_object(machine, value)], is_looped)
            return


def _object(machine: Machine, kind: Class) -> Value:
    """An object of a class: the last that the program made, or else a new one."""
    for each in reversed(machine.instances):
        if each.kind is kind or (each.kind is not None and kind in each.kind.lineage()):
            return each
    assert kind.node is not None
    made: list[Value] = []
    machine.apart(lambda: made.append(machine.call(kind, ([], {}), kind.node)))  # type: ignore[arg-type]
    return made[0] if made else machine.instances[-1]


def _call(machine: Machine, function: Function, given: list[Value], is_looped: bool) -> None:
    definition = function.node
    arguments = given
    if isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef)):
        names = [*definition.args.posonlyargs, *definition.args.args]
        before, machine.path = machine.path, function.place.path
        arguments = [*given, *(parameter(machine, each) for each in names[len(given) :])]
        machine.path = before
    if is_looped:
        machine.loops.append(definition)
        machine.turns.append(0)
    try:
        machine.apart(
            lambda: note_escape(machine, [machine.call_function(function, (arguments, {}), definition)])
        )
    finally:
        if is_looped:
            machine.loops.pop()
            machine.turns.pop()
