"""``castwise run`` on published scripts that use trainers gives bitwise the results of the integration."""

from __future__ import annotations

from pathlib import Path

import pytest

from castwise.commands.cli import main
from tests.processes import Forked, of_one, run_script

PUBLISHED = Path(__file__).with_name("published")
INTEGRATED = {
    "trainer": (
        "fp16-mixed", {"Trainer(model=": "CastwiseTrainer(plan=PLAN, model="},
        "from castwise.integrations.huggingface import CastwiseTrainer",
    ),
    "lightning": (
        "bf16-mixed", {"L.Trainer(": "L.Trainer(plugins=[CastwisePrecision(PLAN, model='net')], "},
        "from castwise.integrations.lightning import CastwisePrecision",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INTEGRATED)
def test_a_script_gives_what_the_integration_gives(name: str, tmp_path: Path) -> None:
    plan, changes, imported = INTEGRATED[name]
    text = (PUBLISHED / f"{name}.txt").read_text()
    (tmp_path / "train.py").write_text(text)
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "integrated.py").write_text(f"{imported}\nPLAN = {plan!r}\n{text}")
    of_one(_compare, (imported, plan, tmp_path), tmp_path)


def _compare(given: tuple[str, str, Path]) -> None:
    imported, plan, folder = given
    exec(imported)
    ran = Forked(main, ["run", "--plan", plan, "train.py"], folder, folder / "ran")
    assert ran.wait(200) == 0, ran.said("err")
    assert f"trains under {plan}" in ran.said("err")
    by_hand = Forked(run_script, ["integrated.py"], folder, folder / "by-hand")
    assert by_hand.wait(200) == 0, by_hand.said("err")
    assert _numbers(ran) == _numbers(by_hand)


def _numbers(process: Forked) -> str:
    """Return the last line of numbers that the script prints."""
    return [line for line in process.said("out").splitlines() if line.startswith("[")][-1]
