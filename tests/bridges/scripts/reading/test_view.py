"""Scripts that a parser cannot process."""

from __future__ import annotations

from pathlib import Path

import pytest

from castwise.bridges.scripts.lint import lint
from castwise.bridges.scripts.reading.view import View

DEEP = {
    "parentheses": "(" * 3000 + "1" + ")" * 3000,
    "lists": "[" * 3000 + "]" * 3000,
    "attributes": "a" + ".b" * 20_000,
    "calls": "a" + "()" * 5000,
    "nots": "not " * 5000 + "a",
}


@pytest.mark.parametrize("of", DEEP)
def test_what_is_nested_too_deeply_is_refused_and_ends_no_process(of: str) -> None:
    """Regression: LibCST's parser crashed the process without a message, and with it the run over a whole folder."""
    with pytest.raises(SyntaxError, match="nested"):
        View(f"x = {DEEP[of]}\n")


def test_other_files_of_a_folder_are_read_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "deep.py").write_text(f"import torch\nx = {DEEP['parentheses']}  # autocast\n")
    (tmp_path / "plain.py").write_text(
        "import torch\nwith torch.autocast('cpu', dtype=torch.float16): pass\n"
    )
    found = lint(tmp_path)
    assert [path.name for path, _ in found.problems] == ["deep.py"]
    assert {fault.path.name for fault in found.findings} == {"plain.py"}
