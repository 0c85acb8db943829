"""Write docs/rules.md: the operator tables of castwise.core.plans.rules, with a reason per row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from castwise.core.plans.rules import RULES, Row, base_table, describe

PAGE = Path(__file__).parent.parent / "docs" / "rules.md"

INTRODUCTION = """\
# Operator rules

<!-- Written by scripts/rules_page.py from castwise.core.plans.rules. Edit the tables in src/castwise/core/plans/tables.py instead. -->

A plan's `rules` names one of these tables, its `ops` replaces single rows; [the concepts](concepts.md) say what the rules
do. Operators carry ATen's names, a rule holds for every overload. An operator that is in no table is not touched: its
inputs pass as they are and, where it is made of other operators (`einsum` calls `bmm`), those follow rows of their own.

`castwise.core.plans.rules.describe(base, device_type)` lists the rows for the torch that is installed. This page is that of
torch 2.13.

"""


def page() -> str:
    """Return the whole page."""
    native = {device: base_table("native", device) for device in ("cpu", "cuda", "xpu", "mps")}
    assert _lacks(native["xpu"], native["cuda"]) == {}, "XPU has rows that CUDA has not: give it a section"
    missing = _names(_lacks(native["cuda"], native["xpu"]))
    stand_ins = _names(_lacks(base_table("cuda", "cpu"), native["cuda"]))
    parts = [
        INTRODUCTION,
        _section(
            "`native` on CPU", "What `torch.autocast` does on a CPU by itself.", describe("native", "cpu")
        ),
        _section(
            "`native` on CUDA, and `cuda`",
            "What `torch.autocast` does on CUDA (and ROCm) by itself, and on XPU and other accelerators for those of these "
            f"operators that they have autocast kernels for; on XPU there is no {missing}. The base `cuda` is this table on every device, so that a run on a CPU predicts one on a GPU; "
            f"where cuDNN's own kernels do not exist, {stand_ins} stand in for them.",
            describe("native", "cuda"),
        ),
        _section(
            "`native` on MPS", "What `torch.autocast` does on MPS by itself.", describe("native", "mps")
        ),
        _section("`apex`", "The lists of Apex's opt level O1, in ATen's names.", describe("apex", "cuda")),
        "## `none`\n\nNo operator is cast.\n\n",
        _differences(native["cpu"], native["cuda"]),
    ]
    return "".join(parts).rstrip() + "\n"


def _section(title: str, text: str, rows: Iterable[Row]) -> str:
    groups: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        ban = " (bf16 and fp16 inputs)" if row.only_low else ""
        groups.setdefault((f"`{row.rule}`{ban}", row.reason), []).append(row.op)
    lines = [f"| {rule} | {_names(ops)} | {reason} |" for (rule, reason), ops in groups.items()]
    return f"## {title}\n\n{text}\n\n| rule | operators | why |\n|---|---|---|\n" + "\n".join(lines) + "\n\n"


def _differences(cpu: Mapping[str, Row], cuda: Mapping[str, Row]) -> str:
    groups: dict[tuple[str, str], list[str]] = {}
    for op in sorted(cpu.keys() | cuda.keys()):
        rules = tuple(f"`{table[op].rule}`" if op in table else "" for table in (cpu, cuda))
        if rules[0] != rules[1]:
            groups.setdefault((rules[0], rules[1]), []).append(op)
    order = ["", *(f"`{rule}`" for rule in RULES)]
    keys = sorted(groups, key=lambda key: [order.index(rule) for rule in key])
    lines = [f"| {on_cpu or 'no row'} | {on_cuda or 'no row'} | {_names(groups[on_cpu, on_cuda])} |"
             for on_cpu, on_cuda in keys]  # fmt: skip
    text = (
        "torch.autocast is not one list but one per device. A model that is safe under `bf16-mixed` on CUDA may run "
        "`exp`, `softmax` or `layer_norm` in bf16 on a CPU: `rules=cuda` gives a CPU the list of CUDA."
    )
    return (
        f"## Where CPU and CUDA differ by themselves\n\n{text}\n\n| on CPU | on CUDA | operators |\n|---|---|---|\n"
        + "\n".join(lines)
        + "\n"
    )


def _lacks(these: Mapping[str, Row], those: Mapping[str, Row]) -> dict[str, Row]:
    """Return the rows of ``these`` that are missing in ``those`` or have another rule there."""
    return {op: row for op, row in these.items() if op not in those or those[op].rule != row.rule}


def _names(ops: Iterable[str]) -> str:
    return ", ".join(f"`{op}`" for op in ops)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
