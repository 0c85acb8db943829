"""Count the faults that the precision lint finds and its false alarms.

``found``: for each rule, how many of the marked faults the lint finds in the scripts of
``tests/bridges/scripts/lint/corpus``. These have the forms of public training scripts, and their authors had not seen
the lint. ``false``: findings without a mark, in these scripts, in correct scripts of the same kind, in Python's
standard library and in the installed packages, of which the two largest are sampled. Files that contain neither torch
nor a word of mixed precision are counted as files but only read. ``seconds`` is CPU time.
"""

from __future__ import annotations

import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from castwise.bridges.scripts.lint import lint
from common import Results, arguments

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.bridges.scripts.lint.corpus import compare, kinds, programs

LARGE = ("torch", "transformers")
EVERY = 8


def corpus(folder: Path) -> list[dict[str, Any]]:
    """Return a row for each rule with the number of marked faults and of those that the lint finds."""
    rows = []
    for kind in (*kinds(), "sound"):
        begin = time.process_time()
        given = list(programs(kind))
        results = [compare(program, program.check(folder)) for program in given]
        marks = [mark for program in given for mark in program.marks()]
        missed = sum(len(each) for each, _ in results)
        row = {"scripts": kind, "files": sum(len(program.files) for program in given), "present": len(marks)}
        row |= {"found": len(marks) - missed, "false": sum(len(each) for _, each in results)}
        rows.append({**row, "seconds": time.process_time() - begin})
    return rows


def library(name: str, paths: Sequence[Path]) -> dict[str, Any]:
    """Return a row with the number of findings in files that should have none."""
    begin, files, false = time.process_time(), 0, 0
    for path in paths:
        result = lint(path)
        files, false = files + result.looked_at, false + len(result.findings)
        for each in result.findings:
            print(each.line_of_text())
    row = {"scripts": name, "files": files, "present": None, "found": None, "false": false}
    return {**row, "seconds": time.process_time() - begin}


def main() -> None:
    """Check the corpus, the standard library and the installed packages."""
    parser = arguments(__doc__)
    parser.add_argument("--corpus-only", action="store_true")
    chosen = parser.parse_args()
    with Results("lint", torch.device("cpu"), __doc__) as results, tempfile.TemporaryDirectory() as folder:
        for row in corpus(Path(folder)):
            results.add(row)
        if not chosen.corpus_only:
            results.add(library("standard library", [Path(sysconfig.get_path("stdlib"))]))
            packages = Path(sysconfig.get_path("purelib"))
            others = [each for each in sorted(packages.iterdir()) if each.is_dir() and each.name not in LARGE]
            results.add(library("installed packages", others))
            for name in LARGE:
                files = sorted((packages / name).rglob("*.py"))[::EVERY]
                results.add(library(f"{name}, every {EVERY}th file", files))


if __name__ == "__main__":
    main()
