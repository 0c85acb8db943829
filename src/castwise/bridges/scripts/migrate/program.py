"""Analyse a program's scripts together: which of them belong together, and in which of them imports stay, and why."""

from __future__ import annotations

import ast
import dataclasses
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from castwise.bridges.scripts.migrate.served import LIBRARIES, here, is_module, library_of, serves

BY_NAME = re.compile(r"import|module|package|find_spec|find_loader|available|installed", re.IGNORECASE)
"""Matches names of functions that take a module's name as a string, to import it or to test whether it exists."""
_DOTTED = re.compile(rf"({'|'.join(LIBRARIES)})(\.\w+)+")
_CODE = re.compile(
    rf"^\s*(?:from\s+((?:{'|'.join(LIBRARIES)})[\w.]*)\s+import\b|import\s+((?:{'|'.join(LIBRARIES)})[\w.]*)\s*(?:as\b|[;,#]|$))",
    re.MULTILINE,
)
_INSTALL = "castwise.compat.install"
_AMP = rb"torch\.(?:cuda\.|cpu\.)?(?:amp\b|autocast\b)"
_BARS = {
    "it names a device that castwise.autocast does not have": re.compile(
        rb"\b(torch_(xla|npu|mlu|musa|gcu|directml)|habana_frameworks)\b|[\"'](xla|npu|mlu|musa|hpu|mtia)[\"':]"
    ),
    "it replaces parts of torch.amp": re.compile(
        rb"(setattr|patch|patch\.object)\(\s*[\"']?%b|(%b|\b(GradScaler|autocast)\.)[\w.]*\s*=[^=]"
        % (_AMP, _AMP)
    ),
    "it compares an object's class with torch's": re.compile(
        rb"(type\([^()\n]*\)|__class__) *(==|!=|is|in|not in)\b.*\b(GradScaler|autocast)\b|(==|!=|is|is not) *%b"
        % _AMP
    ),
    "it switches a GradScaler by a private attribute": re.compile(rb"(?i:scaler)\w*\._enabled\s*=[^=]"),
    "it replaces private methods of GradScaler": re.compile(
        rb"(def|\.)\s*(_unscale_grads_|_maybe_opt_step|_lazy_init_scale_growth_tracker|_check_scale_growth_tracker)(\(self|\s*=[^=])"
    ),
}
"""What bars a program from using castwise's autocast and GradScaler in place of torch's, with the text that shows it."""
_SCRIPTED, _FORWARD = re.compile(rb"\bjit\.script(_method)?\b"), re.compile(rb"def forward\b|\bjit\b")
_PARTS = re.compile(r"(^|\.)torch\.((cuda|cpu)\.)?(amp(\.|$)|(autocast|GradScaler)$)")
"""Matches dotted names of torch.amp and of what it contains, in whatever module they are found."""
_REPLACES = {"setattr", "delattr", "patch", "object", "multiple", "setitem"}
"""Last parts of the names of functions that replace an attribute, in Python and in libraries for tests."""
_STARTS = re.compile(r"__main__$|initialize|launch|convert_to_")
"""Matches text of scripts that are started directly, and not of configurations or imported modules."""


class Imported(NamedTuple):
    """One import of one module.

    Attributes:
        module: As written, without leading dots.
        level: Number of leading dots.
        names: The imported names; empty for ``import module``.
        in_try: Whether the script can run without it.
    """

    module: str
    level: int
    names: tuple[str, ...]
    in_try: bool


@dataclasses.dataclass(frozen=True)
class Script:
    """The names that one script uses, judged by its syntax alone.

    Attributes:
        imports: All imports.
        words: Names of variables, attributes and imported objects; ``__main__`` if it tests for that.
        reached: Dotted names that the script uses through its imports; followed by parentheses if a call gives a
            second argument, as in ``apex.amp.initialize()``.
        asked: Modules of libraries with a drop-in that are imported, or searched for, by a string.
        installed: Libraries in calls of ``castwise.compat.install()``.
        bar: Why its program keeps torch.amp's own classes; empty if it need not.
        scripts: Whether it compiles with TorchScript, which knows only torch's own autocast.
        scripted: Whether TorchScript may compile code of it.
    """

    imports: tuple[Imported, ...] = ()
    words: frozenset[str] = frozenset()
    reached: frozenset[str] = frozenset()
    asked: frozenset[str] = frozenset()
    installed: frozenset[str] = frozenset()
    bar: str = ""
    scripts: bool = False
    scripted: bool = False


@dataclasses.dataclass(frozen=True)
class Stay:
    """Why imports of a library stay in a script.

    Attributes:
        kind: ``own``: the library is a part of the program. ``lacks``: the drop-in cannot run the program.
            ``install``: other code imports the library too, and finds the drop-in only under the library's name.
            ``installed``: a script of the program already installs the drop-in.
        why: The reason as a clause, for ``lacks`` and ``install``.
        starts: For ``install``, whether the script is one that is started, where ``install()`` belongs.
    """

    kind: Literal["own", "lacks", "install", "installed"]
    why: str = ""
    starts: bool = False


def look(source: bytes) -> Script:
    """The names in a script; empty if it cannot be parsed."""
    try:
        with warnings.catch_warnings(action="ignore"):
            nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Script()
    tries = [node.body for node in nodes if isinstance(node, ast.Try)]
    in_try = {id(inner) for body in tries for line in body for inner in ast.walk(line)}
    imports: list[Imported] = []
    words: set[str] = set()
    means: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                imports.append(Imported(alias.name, 0, (), id(node) in in_try))
                bound = alias.name if alias.asname else library_of(alias.name)
                means[alias.asname or bound] = bound
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            imports.append(Imported(node.module or "", node.level, names, id(node) in in_try))
            words.update(names)
            home = "." * node.level + (node.module or "")
            means.update({alias.asname or alias.name: f"{home}.{alias.name}" for alias in node.names})
        elif isinstance(node, ast.Name):
            words.add(node.id)
        elif isinstance(node, ast.Attribute):
            words.add(node.attr)
        elif isinstance(node, ast.Constant) and node.value == "__main__":
            words.add("__main__")
    calls = [(_dotted(node.func, means), node) for node in nodes if isinstance(node, ast.Call)]
    reached = {_dotted(node, means) for node in nodes if isinstance(node, (ast.Name, ast.Attribute))}
    reached |= {f"{name}()" for name, call in calls if name and _has_second(call)}
    installed = {
        library
        for name, call in calls
        if name == _INSTALL
        for library in ([_text(argument) for argument in call.args] or LIBRARIES)
    }
    quoted = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings and annotations
    for node in nodes:
        for each in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            quoted.update(map(id, ast.walk(each)) if isinstance(each, ast.expr) else ())
    texts = {_text(node) for node in nodes if isinstance(node, ast.Constant) and id(node) not in quoted}
    asked = {module for text in texts for module in named_in_text(text)}
    asked |= texts if "sys.modules" in reached else set(_asked(calls))
    asked = {name for name in asked if library_of(name) in LIBRARIES}
    return Script(
        tuple(imports), frozenset(words), frozenset(reached - {""}), frozenset(asked), frozenset(installed),
        bar=next((why for why, text in _BARS.items() if text.search(source)), "") or _replaced(nodes, means),
        scripts=bool(_SCRIPTED.search(source)) or any(name.startswith("torch.jit.script") for name in reached), scripted=bool(_FORWARD.search(source)),
    )  # fmt: skip


def _dotted(node: ast.expr, means: Mapping[str, str]) -> str:
    """The dotted name of a name or a chain of attributes, by the script's imports; empty for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    start = means.get(node.id) if isinstance(node, ast.Name) else None
    return _original(".".join([start, *reversed(parts)])) if start else ""


def _replaced(nodes: Iterable[ast.AST], means: Mapping[str, str]) -> str:
    """Why a program that replaces parts of torch.amp keeps its classes; empty if it replaces none."""
    for node in nodes:
        replaced: list[str] = []
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            replaced = [_dotted(node, means)]
        elif isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in _REPLACES:
                home = _text(node.args[0]) or _dotted(node.args[0], means)
                replaced = [home, ".".join([home, *map(_text, node.args[1:2])])]
        if any(map(_PARTS.search, replaced)):
            return "it replaces parts of torch.amp"
    return ""


def _original(dotted: str) -> str:
    """The library's name for a name of its drop-in, so that a migrated script counts as before."""
    name = dotted.removeprefix("castwise.compat.")
    return name if library_of(name) in LIBRARIES else dotted


def _has_second(call: ast.Call) -> bool:
    return (
        len(call.args) > 1
        or any(isinstance(argument, ast.Starred) for argument in call.args)
        or any(keyword.arg in (None, "optimizers") for keyword in call.keywords)
    )


def _asked(calls: Iterable[tuple[str, ast.Call]]) -> Iterator[str]:
    for dotted, call in calls:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if BY_NAME.search(name) and call.args:
            yield _text(call.args[0])
        elif dotted.startswith("transformers.") and name == "is_apex_available":
            yield "apex"
        for argument in call.keywords:
            if (argument.arg or "").endswith("backend") and _text(argument.value) == "apex":
                yield "apex.amp"  # imported by that library


def named_in_text(text: str) -> list[str]:
    """The modules of Apex or Colossal-AI that a string names, as a dotted name or in code."""
    if _DOTTED.fullmatch(text):
        module = ".".join(text.split(".")[:2])
        return [module] if is_module(here(module)) else []
    return [found[1] or found[2] for found in _CODE.finditer(text)]


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


# --- which scripts belong together ------------------------------------------------------------------------


def loaded(
    importer: Path, each: Imported, root: Path, is_there: Callable[[Path], bool] = Path.is_file
) -> list[Path]:
    """The files of a program that an import loads: those nearest to the importer, from its folder up to the program's."""
    if each.level:
        bases = list(importer.parents)[each.level - 1 : each.level]
    else:
        bases = [folder for folder in importer.parents if folder == root or root in folder.parents]
    for base in bases:
        module = base.joinpath(*filter(None, each.module.split(".")))
        places = [module, *(module / name for name in each.names if name != "*")]
        files = [file for at in places for file in (at.parent / f"{at.name}.py", at / "__init__.py")]
        if found := [file for file in files if file != importer and is_there(file)]:
            return found
    return []


def _together(importers: Mapping[Path, Collection[Path]]) -> Iterator[set[Path]]:
    """Groups of scripts connected by imports, in either direction."""
    near: dict[Path, set[Path]] = defaultdict(set)
    for file, others in importers.items():
        near[file].update(others)
        for other in others:
            near[other].add(file)
    left = set(importers)
    while left:
        group: set[Path] = set()
        waiting = {left.pop()}
        while waiting:
            file = waiting.pop()
            group.add(file)
            waiting |= near[file] - group
        left -= group
        yield group


# --- scripts whose imports stay -----------------------------------------------------------------------------


def staying(scripts: Mapping[Path, Script], root: Path) -> Mapping[Path, Mapping[str, Stay]]:
    """By script, the libraries whose imports do not change to a drop-in of castwise."""
    importers: dict[Path, set[Path]] = {file: set() for file in scripts}
    outside: set[Path] = set()
    """Scripts that use ApexScaler from a library."""
    for file, script in scripts.items():
        for each in script.imports:
            found = loaded(file, each, root, scripts.__contains__)
            for other in found:
                importers[other].add(file)
            if "ApexScaler" in each.names and not found and not each.level:
                outside.add(file)
    for file in scripts:
        for other in _loaded_by_name(file, scripts, importers):
            importers[file].add(other)
    stays: dict[Path, dict[str, Stay]] = {file: {} for file in scripts}
    for group in _together(importers):
        together = [scripts[file] for file in group]
        lacking = _lacking("colossalai", together)
        why = _why_others_find_apex(together, bool(outside & group))
        started = {file for file in group if not importers[file] and _is_started(scripts[file])}
        installed = {library for script in together for library in script.installed}
        bar = next((script.bar for script in together if script.bar), "")
        scripts_ = any(script.scripts for script in together)
        for file in group:
            if bar or (scripts_ and scripts[file].scripted):
                why_torch = bar or "TorchScript compiles it, and knows only torch's own autocast"
                stays[file]["torch"] = Stay("lacks", f"the program needs torch's own: {why_torch}")
            if lacking:
                stays[file]["colossalai"] = Stay("lacks", lacking)
            if why and (file in started or not started):
                stays[file]["apex"] = Stay("install", why, starts=file in started)
            elif why:
                stays[file]["apex"] = Stay("installed")
            stays[file].update({library: Stay("installed") for library in installed})
    for file in scripts:
        stays[file].update({library: Stay("own") for library in _own(file, root)})
    return stays


def _loaded_by_name(
    file: Path, scripts: Mapping[Path, Script], importers: Mapping[Path, Collection[Path]]
) -> list[Path]:
    """Scripts that may load one that nothing imports or starts, such as a configuration: the nearest that use its library.

    A script that uses Apex completely by itself needs none.
    """
    script = scripts[file]
    used = _libraries(script) - (
        {"apex"} if script.asked or not _why_others_find_apex([script], False) else set()
    )
    alone = not importers[file] and not any(file in others for others in importers.values())
    if not used or not alone or any(map(_STARTS.match, script.words)):
        return []
    users = [
        other
        for other, each in scripts.items()
        if used & _libraries(each) and (any(map(_STARTS.match, each.words)) or importers[other])
    ]
    for folder in file.parents:
        if near := [other for other in users if other != file and folder in other.parents]:
            return near
    return []


def _libraries(script: Script) -> set[str]:
    names = [
        f"{each.module}.{name}" for each in script.imports if not each.level for name in each.names or ("",)
    ]
    return {library_of(_original(name)) for name in names} & {*LIBRARIES}


def _is_started(script: Script) -> bool:
    """Whether a script that no other imports is started, so that it must install Apex's drop-in."""
    asks = bool(script.asked) or any(
        library_of(each.module) == "apex" for each in script.imports if not each.level
    )
    return asks and bool({"initialize", "__main__"} & script.words)


def _lacking(library: str, scripts: Iterable[Script]) -> str:
    """What a program needs of a library that its drop-in lacks; empty if it lacks nothing."""
    wanted = {
        (each.module, name)
        for script in scripts
        for each in script.imports
        if library_of(each.module) == library and not each.level and not each.in_try
        for name in each.names or ("",)
    }
    absent = sorted(".".join(filter(None, names)) for names in wanted if not serves(*names))
    return f"{', '.join(absent[:3])}{' and more' if len(absent) > 3 else ''}"


def _why_others_find_apex(scripts: Iterable[Script], takes_scaler: bool) -> str:
    """Why code outside a program imports Apex too while it runs; empty if none does."""
    scripts = list(scripts)
    seen: frozenset[str] = frozenset().union(*(script.words | script.reached for script in scripts))
    asked = {
        name for script in scripts for name in script.asked if library_of(name) == "apex" and is_module(name)
    }
    used = {name for name in seen if name.startswith("apex.") and is_module(".".join(name.split(".")[:2]))}
    initializes = "apex.amp.initialize()" in seen
    if initializes and (takes_scaler or "scale_loss" not in seen):
        return "a library scales the loss, as timm's ApexScaler does"
    if "apex.amp.scale_loss" in seen and not {"initialize", "apex.amp.init"} & seen:
        return "a library initializes amp, as the Trainer of transformers does"
    if asked - {"apex"} or (asked and (used or {"amp", "initialize"} <= seen)):
        return "the program looks up apex by a string"
    return ""


def _own(file: Path, root: Path) -> list[str]:
    """Libraries that are modules or packages of the program, in the file's folder or those around it."""
    folders = [folder for folder in file.parents if folder == root or root in folder.parents]
    return [
        library
        for library in LIBRARIES
        if any((at / f"{library}.py").is_file() or (at / library / "__init__.py").is_file() for at in folders)
    ]
