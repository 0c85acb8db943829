"""Show where the first non-finite value of a pass arose, in the terminal and as a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from castwise.report.grids import Columns, Grid, Line, opening
from castwise.report.plots import Picture

Record = Mapping[str, Any]

PICTURES: Mapping[str, Picture] = {}
MEANING = (
    "lowest and highest: the range of the finite values. smallest: the smallest nonzero magnitude. became NaN: the operator that "
    "turned infinities into NaN. passed through: modules between the origin and the final non-finite value. Each plan that is tried "
    "runs the same pass again."
)
_FORMATS = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}


def headline(record: Record) -> str:
    """Say in a sentence or two which operator made the first non-finite value, or that everything is finite."""
    if not record["found"]:
        gone = (
            f"; {record['harmless']} of them returned NaN or infinities that did not reach the results"
            if record["harmless"]
            else ""
        )
        return (
            f"Everything is finite under {record['words']}: the loss is {record['loss']}, and so are gradients and buffers. "
            f"{record['operators']:,} operators ran{gone}."
        )
    made = "NaN" if record["nan"] else "infinities"
    on = f" on rank {record['ranks'][0]}" if record["ranks"] else ""
    if record["origin"] in ("data", "parameter", "buffer"):
        return f"{record['why'][:1].upper()}{record['why'][1:]}{on}."
    if not record["operator"]:
        return f"Something is not finite{on}: {record['why']}."
    what = f"{record['operator']} in {place(record)} made {made}"
    if record["origin"] != "operator":
        what = f"{record['operator']} in {place(record)} was the first with {made} among its inputs"
    return f"{what}{on}: {record['why']}."


def place(record: Record) -> str:
    """Name the module, the call and the phase in which the operator ran."""
    module = record["module"] or ("the model itself" if record["in_model"] else "the loss")
    call = f", call {record['call']}" if record["call"] else ""
    if record["phase"] == "backward":
        of = f"of {record['forward']} " if record["forward"] else ""
        return f"the backward {of}in {module}{call}"
    again = ", recomputed in backward" if record["phase"] == "recomputation" else ""
    return f"{module}{call}{again}"


def cure(record: Record) -> str:
    """Say in one sentence with which change the pass was finite or, if none was found, what to do."""
    if not record["found"]:
        return ""
    if record["cure"] is not None:
        return f"The pass was tried again and is finite with: {record['cure']}"
    tried = ", ".join(cure["what"] for cure in record["trials"])
    return (f"No format cures it ({tried} tried). " if tried else "") + f"What to do: {record['advice']}."


def facts(record: Record) -> dict[str, str]:
    """Return further facts about the first non-finite value, as text by name."""
    reached = record["reached"]
    said = {
        "plan": record["plan"],
        "not finite": ", ".join(reached[:4]) + (f" and {len(reached) - 4} more" if len(reached) > 4 else ""),
        "line": record["source"],
        "code": record["code"],
        "autograd node": record["node"],
        "became NaN": record["became_nan"],
        "passed through": ", ".join(filter(None, record["through"])),
        "others": ", ".join(record["others"][:6]),
        "loss scale": f"{record['loss_scale']:g}" if record["loss_scale"] != 1 else "",
        "proof": "the pass is finite if its result is replaced by finite values"
        if record["confirmed"]
        else "",
        "ranks": ", ".join(map(str, record["ranks"])),
        "note": record["note"],
    }
    return {name: text for name, text in said.items() if text}


def grids(record: Record) -> list[Grid]:
    """Return tables of the operator's inputs and results, and of the plans that were tried."""
    out = []
    tensors = [*record["inputs"], *record["outputs"]]
    if tensors:
        columns: Columns = {
            "tensor": "name",
            "format": lambda v: _FORMATS.get(v["dtype"], v["dtype"]),
            "shape": lambda v: " x ".join(map(str, v["shape"])) or "scalar",
            "lowest": lambda v: _number(v["low"]),
            "highest": lambda v: _number(v["high"]),
            "smallest": lambda v: _number(v["smallest"]),
            "zeros": lambda v: f"{v['zeros']:,}",
            "NaN": lambda v: f"{v['nan']:,}",
            "infinite": lambda v: f"{v['inf']:,}",
        }
        out.append(Grid.of(f"Inputs and results of {record['operator']}", tensors, columns))
    if record["trials"]:
        tried: Columns = {
            "plan": "what",
            "result": lambda t: t["error"] or ("finite" if t["finite"] else "not finite"),
        }
        out.append(Grid.of("Tried", record["trials"], tried, lambda t: "fast" if t["finite"] else ""))
    return out


def lines(record: Record) -> list[Grid | Line]:
    """Return the answer, the cure, the facts and the tables, for the terminal."""
    shown: list[Grid | Line] = [Line(headline(record), "bold")]
    if not record["found"]:
        return shown + [Line(record["note"], "yellow")] * bool(record["note"])
    shown += [Line(cure(record), "green" if record["cure"] is not None else "yellow"), Line()]
    shown += [Line(f"{name}: {text}") for name, text in facts(record).items()]
    for grid in grids(record):
        shown += [Line(), grid]
    return shown


def brief(record: Record) -> list[Grid | Line]:
    """Return only the answer and the cure, without further facts and tables."""
    return opening(lines(record))


def values(record: Record) -> dict[str, Any]:
    """Return the values for the page's template, by name."""
    return {
        "answer": headline(record),
        "cure": cure(record),
        "facts": facts(record),
        "grids": grids(record),
        "meaning": MEANING,
    }


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.4g}"
