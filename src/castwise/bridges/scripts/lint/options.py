"""Options of precision that a script parses and never uses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from castwise.bridges.scripts.lint.run.program import Program
from castwise.bridges.scripts.lint.run.values import Facts, Place, code

_OPTION = re.compile(
    r"(use_|no_|enable_|with_)?(amp|fp16|bf16|half|float16|bfloat16|(mixed_?)?precision|autocast|amp_dtype|mixed)$"
)
_CONFIG = re.compile(r"conf|cfg|default|param|option|setting|args|opts", re.IGNORECASE)
"""Names of dictionaries and classes that hold options."""
RULE = "unused-precision-option"


def is_precision(option: str) -> bool:
    """Whether the name of an option is one that chooses a precision."""
    return _OPTION.match(option.lstrip("-").replace("-", "_")) is not None


def unused_options(program: Program, facts: Facts) -> Iterator[Place]:
    """The places of the options that nothing reads.

    An option is left out if all options were handed to code that the program does not show, if its name occurs once more
    anywhere in the program, or if no other option of the same kind is read either: then other files read them.
    """
    text = program.text()
    names = [name for name, _ in facts.options.values()]
    for place, (name, spelled) in facts.options.items():
        others = [each for each in names if each != name and re.search(rf"\.{each}\b", text)]
        rest = re.sub(rf"""dest\s*=\s*["']{name}["']""", "", text.replace(f'"{spelled}"', "", 1).replace(f"'{spelled}'", "", 1))  # fmt: skip
        if is_precision(name) and others and place not in facts.handed and not _is_read(rest, name):
            yield place
    for path in facts.files:
        tree = program.load(path).tree
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    yield from (Place(path, line, 0) for line in _of_command(node))
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict() as given) if _CONFIG.search(name):  # fmt: skip
                    if Place(path, given.lineno, given.col_offset) in facts.handed:
                        continue
                    keys = {str(key.value): Place(path, value.lineno, value.col_offset) for key, value in zip(given.keys, given.values, strict=True) if isinstance(key, ast.Constant)}  # fmt: skip
                    yield from _of_fields(keys, text, facts.handed)
                case ast.ClassDef(name=name) if _CONFIG.search(name) and _is_dataclass(node):
                    if (
                        at := Place(path, node.lineno, node.col_offset)
                    ) in facts.made and at not in facts.handed:
                        fields = [each for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)]  # fmt: skip
                        keys = {code(each.target): Place(path, each.lineno, 0) for each in fields}
                        yield from _of_fields(keys, text, facts.handed)


def _of_fields(fields: dict[str, Place], text: str, handed: set[Place]) -> Iterator[Place]:
    """Entries of a configuration that nothing reads, though at least two others are read."""
    read = [name for name in fields if _is_read(_once_less(text, name), name)]
    for name, place in fields.items():
        if is_precision(name) and name not in read and len(read) >= 2 and place not in handed:
            yield place


def _once_less(text: str, name: str) -> str:
    """The text without the entry itself: ``"name":`` in a dictionary."""
    return re.sub(rf"""["']{name}["']\s*:""", "", text, count=1)


def _is_read(text: str, name: str) -> bool:
    """Whether a name occurs as an attribute, a string or a keyword."""
    return bool(re.search(rf"""\.{name}\b|["']{name}["']|\b{name}\s*=(?!=)""", text))


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in code(each) for each in node.decorator_list)


def _of_command(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[int]:
    """The lines of options of a click or typer command whose parameter its function does not use."""
    used = {each.id for line in node.body for each in ast.walk(line) if isinstance(each, ast.Name)}
    if "locals" in used or node.args.kwarg is not None:
        return
    calls = [each for each in node.decorator_list if isinstance(each, ast.Call)]
    if not any(code(each.func).endswith(".command") for each in calls):
        return
    parameters = {each.arg: each.lineno for each in (*node.args.args, *node.args.kwonlyargs)}
    for call in calls:
        if not code(call.func).endswith("option"):
            continue
        given = [str(each.value) for each in call.args if isinstance(each, ast.Constant)]
        name = next((each for each in given if not each.startswith("-")), given[0] if given else "")
        name = name.partition("/")[0].lstrip("-").replace("-", "_")
        is_ours = any(is_precision(each.partition("/")[0]) for each in given)
        if is_ours and name in parameters and name not in used:
            yield call.lineno
        parameters.pop(name, None)
    for name, line in parameters.items():
        if is_precision(name) and name not in used:
            yield line
