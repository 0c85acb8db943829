"""Mutation testing: change one place of the sources at a time and find the changes that no test notices.

    python scripts/mutants.py --out bench/results/mutants.json

This needs the package ``coverage`` in addition to the development tools. It works on an export of HEAD in a temporary
folder. The tests run once to record which tests execute which lines. Then a seeded sample of mutants is tested. For
each mutant, the tests that execute its lines run, cheapest first, in a fork of a process that has imported torch. A
mutant that exceeds the time limit counts as noticed, with the fate ``timeout``.

A mutant may survive only because a sample of the tests ran. ``--again --only FILE:LINE --tests ...`` tries survivors
again with whole test files and all their parameters. A reader then judges the remaining ones in the fields
``verdict`` and ``why``.

Libraries are not used for two reasons: cosmic-ray starts an interpreter per mutant, and mutmut wraps each function in
a trampoline, which torch.compile, pickling and signatures see.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("core/scaler", "core/masters", "core/casting", "lab/parity/damage.py")
TESTS = (
    "tests/casting", "tests/masters", "tests/lab/parity/test_damage.py", "tests/core/model/test_low_weights.py",
    "tests/test_masters*.py", "tests/test_scaler*.py",
)  # fmt: skip
SLOW_S, VARIANTS = 5.0, 6
"""Tests of more than ``SLOW_S`` seconds are left out; of a test with many parameters, ``VARIANTS`` are sampled."""
BUDGET_S, FEW_S = 5.0, 2.0
"""Seconds of tests for one mutant: the maximum, and the minimum if its file has that many."""
OWN = {"castwise", "tests", "conftest", "__main__", "__mp_main__"}
"""Packages that each mutant imports again; all other modules that tests import are imported before the fork."""
LIMIT_S, WAIT_S = 60, 300
"""Limits of CPU time and wall time per mutant, in seconds."""

SWAPPED: dict[type[ast.AST], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.And: "or", ast.Or: "and", ast.Add: "-", ast.Sub: "+",
    ast.Mult: "/", ast.Div: "*",
}  # fmt: skip


@dataclass
class Mutant:
    """One change: ``text`` in place of the bytes ``start`` to ``end`` of a file, in lines ``line`` to ``last``."""

    file: str
    line: int
    last: int
    kind: str
    start: int
    end: int
    text: str
    before: str = ""
    after: str = ""


def mutants_of(file: str, source: bytes) -> Iterator[Mutant]:
    """Yield all mutants of a file; error messages, annotations and decorators are not changed."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: Any) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def change(kind: str, node: Any, new: str, at: tuple[int, int] | None = None) -> Mutant:
        return Mutant(file, node.lineno, node.end_lineno, kind, *(at or span(node)), new)

    def negated(test: Any) -> Iterator[Mutant]:
        ordered = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
        if not isinstance(test, ast.Compare) or isinstance(
            test.ops[0], ordered
        ):  # other comparisons have their operators swapped
            yield change("negate a condition", test, f"(not ({source[slice(*span(test))].decode()}))")

    def between(kind: str, whole: Any, left: Any, right: Any, operator: ast.AST) -> Iterator[Mutant]:
        gap = span(left)[1], span(right)[0]
        if type(operator) in SWAPPED and not set(b"()#") & set(source[slice(*gap)]):
            yield change(kind, whole, f" {SWAPPED[type(operator)]} ", gap)

    def visit(node: Any) -> Iterator[Mutant]:
        match node:
            case ast.FunctionDef(body=body) if not _gives_value(node):
                for first in body[1 if ast.get_docstring(node) else 0 :][:1]:
                    start = span(first)[0]
                    yield change("return early", first, "return\n" + " " * first.col_offset, (start, start))
            case ast.Return(value=ast.AST() as value) if not isinstance(value, ast.Constant) or value.value:
                yield change("return early", value, "None")
            case ast.Raise() | ast.Delete() | ast.AugAssign() | ast.Continue() | ast.Break():
                yield change("drop a statement", node, "pass")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
                yield change("drop a statement", node, "pass")
            case ast.Expr(value=ast.Call()):
                yield change("drop a call", node, "pass")
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                yield from negated(test)
            case ast.comprehension(ifs=ifs):
                yield from (mutant for test in ifs for mutant in negated(test))
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                yield from between("swap a comparison", node, left, right, operator)
            case ast.BoolOp(op=operator, values=values):
                for left, right in itertools.pairwise(values):
                    yield from between("and/or", node, left, right, operator)
                for value in values:
                    yield change("drop an operand", value, str(isinstance(operator, ast.And)))
            case ast.BinOp(left=left, op=operator, right=right):
                yield from between("swap an operator", node, left, right, operator)
            case ast.Constant(value=bool() as value):
                yield change("another constant", node, str(not value))
            case ast.Constant(value=int() | float() as value):
                yield change("another constant", node, repr(value + 1))
            case ast.JoinedStr():
                return
        if isinstance(node, ast.Raise):
            return
        for name, value in ast.iter_fields(node):
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, ast.AST) and name not in {"annotation", "returns", "decorator_list"}:
                    yield from visit(item)

    for mutant in visit(ast.parse(source)):
        changed = mutated(source, mutant)
        try:
            compile(changed, file, "exec", dont_inherit=True)
        except SyntaxError:
            continue
        old, new = source.decode().splitlines(), changed.decode().splitlines()
        mutant.before = "\n".join(old[mutant.line - 1 : mutant.last])
        mutant.after = "\n".join(new[mutant.line - 1 : mutant.last + len(new) - len(old)])
        yield mutant


def _gives_value(function: ast.FunctionDef) -> bool:
    todo: list[ast.AST] = [*function.body]
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.Yield, ast.YieldFrom)) or (isinstance(node, ast.Return) and node.value):
            return True
        if not isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            todo += ast.iter_child_nodes(node)
    return False


def mutated(source: bytes, mutant: Mutant) -> bytes:
    """Return the source with the mutant's change."""
    return source[: mutant.start] + mutant.text.encode() + source[mutant.end :]


def sample(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return a sample in random order; each file has its share of all mutants, with one per line first."""
    dice, picked = random.Random(seed), []
    for file in sorted({mutant.file for mutant in mutants}):
        own = [mutant for mutant in mutants if mutant.file == file]
        dice.shuffle(own)
        of_line: Counter[int] = Counter()
        ranked = []
        for mutant in own:
            of_line[mutant.line] += 1
            ranked.append((of_line[mutant.line], len(ranked), mutant))
        picked += [
            m for *_, m in sorted(ranked, key=lambda r: r[:2])[: round(count * len(own) / len(mutants))]
        ]
    dice.shuffle(picked)
    return picked


# --- tests -------------------------------------------------------------------------------------------------------


def in_fork(tree: Path, work: Callable[[], int], cpu_s: int = 3600, wait_s: int = 7200) -> int | None:
    """Run ``work`` in a forked process, then end it and its children; return its exit code, or None if out of time."""
    log = tree / "last.log"
    child = os.fork()
    if not child:
        code = 70
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
            out = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.chdir(tree)
            sys.path[:0] = [str(tree / "src")]
            os.environ["PYTHONPATH"] = str(tree / "src")
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    end = time.monotonic() + wait_s
    status = None
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.05)
    else:
        status = None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    code = None if status is None else os.waitstatus_to_exitcode(status)
    if code == 70:
        raise RuntimeError(f"mutants.py: {log.read_text()[-3000:]}")
    return None if code in {-signal.SIGXCPU, -signal.SIGKILL} else code


def learn(tree: Path, files: list[str], tests: list[str], variants: int, to: Path) -> int:
    """Run the tests once, and write which tests execute which lines and how long each takes."""
    import coverage
    import pytest

    cover = coverage.Coverage(data_file=None, config_file=False, include=[str(tree / file) for file in files])
    seconds: dict[str, float] = {}
    failed: set[str] = set()
    modules: list[str] = []

    class Learn:
        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            dice = random.Random(0)
            of_test: dict[str, list[str]] = {}
            for item in items:
                of_test.setdefault(item.nodeid.partition("[")[0], []).append(item.nodeid)
            kept = {one for ids in of_test.values() for one in dice.sample(ids, min(len(ids), variants))}
            items[:] = [item for item in items if item.nodeid in kept]

        def pytest_collection_finish(self) -> None:
            modules.extend(name for name in sys.modules if name.partition(".")[0] not in OWN)

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
            cover.switch_context(item.nodeid)
            began = sum(os.times()[:4])
            done = yield
            seconds[item.nodeid] = sum(os.times()[:4]) - began
            cover.switch_context("")
            return done

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if not report.passed:
                failed.add(report.nodeid)

    cover.start()
    pytest.main(["-q", "-p", "no:cacheprovider", f"--timeout={3 * SLOW_S}", *tests], plugins=[Learn()])
    cover.stop()
    data = cover.get_data()
    lines = {
        file: {line: [t for t in by if t in seconds and t not in failed] for line, by in found.items()}
        for file in files
        if (found := data.contexts_by_lineno(str(tree / file)))
    }
    kept = {test: round(s, 4) for test, s in seconds.items() if test not in failed and s <= SLOW_S}
    left_out = sorted(seconds.keys() - kept.keys())
    to.write_text(json.dumps({"modules": modules, "left_out": left_out, "seconds": kept, "lines": lines}))
    return 0


def tests_for(mutant: Mutant, known: dict[str, Any], budget_s: float) -> list[str]:
    """Return the tests that execute a mutant's lines, cheapest first; if they are too few, add others of its file."""
    seconds, lines = known["seconds"], known["lines"].get(mutant.file, {})
    own = {test for line in range(mutant.line, mutant.last + 1) for test in lines.get(str(line), ())}
    others = {test for by in lines.values() for test in by} - own
    picked, spent = [], 0.0
    for group, until in ((own, budget_s), (others, FEW_S)):
        for test in sorted(group & seconds.keys(), key=lambda test: (seconds[test], test)):
            if spent + seconds[test] <= until:
                picked.append(test)
                spent += seconds[test]
    return picked


def run_tests(tests: list[str], *, remember: bool = False) -> int:
    """Run tests in this order up to the first failure; return pytest's exit code. ``remember`` keeps their bytecode."""
    import pytest

    sys.dont_write_bytecode = not remember
    place = {test: index for index, test in enumerate(tests)}

    class Pick:
        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            items[:] = sorted((i for i in items if i.nodeid in place), key=lambda item: place[item.nodeid])

    files = sorted({test.split("::")[0] for test in tests})
    options = [
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=line",
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
    ]
    return int(pytest.main([*options, *files], plugins=[Pick()]))


# --- all together ------------------------------------------------------------------------------------------------


def export(tree: Path) -> str:
    """Export HEAD into a folder, compile its sources so that only changed files compile again; return the commit."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
    options = ["-q", "--invalidation-mode", "checked-hash"]
    subprocess.run([sys.executable, "-m", "compileall", *options, str(tree / "src")], check=True)
    return commit.stdout.strip()


def fate_of(tree: Path, mutant: Mutant, work: Callable[[], int]) -> str:
    """Return ``survived``, ``killed`` or ``timeout`` for a mutant under some tests."""
    path = tree / mutant.file
    source = path.read_bytes()
    path.write_bytes(mutated(source, mutant))
    try:
        code = in_fork(tree, work, LIMIT_S, WAIT_S)
    finally:
        path.write_bytes(source)
    return "survived" if code == 0 else "timeout" if code is None else "killed"


def first_look(tree: Path, given: argparse.Namespace, files: list[str], commit: str) -> None:
    """Try a sample of the mutants against a sample of the tests, and write the result after each mutant."""
    learned = (given.map or tree / "map.json").resolve()
    if not learned.exists():
        tests = [str(p.relative_to(tree)) for pattern in given.tests for p in sorted(tree.glob(pattern))]
        in_fork(tree, lambda: learn(tree, files, tests, given.variants, learned))
    known = json.loads(learned.read_text())
    for name in known["modules"]:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    cheap = [test for test, seconds in known["seconds"].items() if seconds < 0.1]
    if in_fork(tree, lambda: run_tests(cheap, remember=True)) != 0:
        raise SystemExit(
            f"mutants.py: tests fail without any change: {(tree / 'last.log').read_text()[-3000:]}"
        )
    every = [m for file in files for m in mutants_of(file, (tree / file).read_bytes())]
    todo = sample(every, given.count, given.seed)
    record: dict[str, Any] = {
        "commit": commit, "command": " ".join(["python", *sys.argv]), "possible": len(every), "tried": 0,
        "fates": Counter(), "files": {}, "kinds": {}, "survivors": [], "killed_by_a_second_look": [],
    }  # fmt: skip
    for number, mutant in enumerate(todo, 1):
        tests = tests_for(mutant, known, given.budget_s)
        fate = fate_of(tree, mutant, lambda tests=tests: run_tests(tests)) if tests else "survived"
        print(f"{number}/{len(todo)} {fate} {mutant.file}:{mutant.line} {mutant.kind}", flush=True)
        record["tried"] = number
        for group in (record["fates"], record["files"], record["kinds"]):
            key = mutant.file if group is record["files"] else mutant.kind
            counts = group if group is record["fates"] else group.setdefault(key, Counter())
            counts[fate] += 1
        if fate == "survived":
            shown = ("file", "line", "kind", "before", "after")
            told = {key: value for key, value in asdict(mutant).items() if key in shown}
            record["survivors"].append({**told, "tests": len(tests), "verdict": "", "why": ""})
        given.out.write_text(json.dumps(record, indent=1) + "\n")


def second_look(tree: Path, given: argparse.Namespace, files: list[str]) -> None:
    """Try the survivors of a first run against whole test files, and record which of them are noticed."""
    import pytest

    record = json.loads(given.out.read_text())
    every = {
        (m.file, m.before, m.after): m for file in files for m in mutants_of(file, (tree / file).read_bytes())
    }
    options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=line", *given.tests]
    if in_fork(tree, lambda: int(pytest.main(options))) != 0:
        raise SystemExit(
            f"mutants.py: tests fail without any change: {(tree / 'last.log').read_text()[-3000:]}"
        )
    for known in list(record["survivors"]):
        mutant = every.get((known["file"], known["before"], known["after"]))
        name = f"{known['file']}:{known['line']}"
        if mutant is None or not any(part in name for part in given.only):
            continue
        fate = fate_of(tree, mutant, lambda: int(pytest.main(options)))
        print(fate, name, mutant.kind, flush=True)
        if fate != "survived":
            record["survivors"].remove(known)
            record["killed_by_a_second_look"].append({**known, "by": " ".join(given.tests)})
        given.out.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    """Run the first or the second look, as the arguments specify."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--map", type=Path, help="record of the lines that tests execute: read if it exists, else written"
    )
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds of tests for one mutant")
    parser.add_argument(
        "--variants",
        type=int,
        default=VARIANTS,
        help="number of variants to sample of a test with many parameters",
    )
    parser.add_argument("--sources", nargs="*", default=SOURCES, help="folders or files below src/castwise")
    parser.add_argument("--tests", nargs="*", default=TESTS)
    parser.add_argument("--again", action="store_true", help="try the survivors again, with all of --tests")
    parser.add_argument("--only", nargs="*", default=[""], help="with --again: parts of FILE:LINE")
    given = parser.parse_args()
    given.out = given.out.resolve()
    os.environ["OMP_NUM_THREADS"] = os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        commit = export(tree)
        rooms = [tree / "src/castwise" / source for source in given.sources]
        paths = [path for room in rooms for path in (sorted(room.glob("*.py")) if room.is_dir() else [room])]
        files = [str(path.relative_to(tree)) for path in paths]
        if given.again:
            second_look(tree, given, files)
        else:
            first_look(tree, given, files, commit)


if __name__ == "__main__":
    main()
