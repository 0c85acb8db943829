"""Show the result of a search for a plan, in the terminal and as a page on which a user can base a decision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from castwise.report import words
from castwise.report.grids import Columns, Grid, Line, Row, breakable
from castwise.report.tune_plots import PICTURES

__all__ = [
    "PICTURES", "facts", "interval_note", "lines", "other_grid", "plan_grid", "region_grid", "scale_sentences",
    "settings", "stage_grid", "values", "verification_sentence",
]  # fmt: skip

Record = Mapping[str, Any]

_LEFT = {"sound": "sound but not timed", "rejected": "rejected", "not tried": "not tried"}
"""What the table of other plans says about each status."""
_MOST = 12
"""Largest number of rows of a list in the terminal."""


def lines(record: Record) -> list[Grid | Line]:
    """Return the lines and tables for the terminal.

    They are the answer with its reasons, how to use the plan, the compared plans, and what became of the other plans.
    """
    plans, exempt = plan_grid(record), region_grid(record).where("exempt")
    compiling = [name for name in plans.header if name == "compiling"]
    grids = (
        *(
            [
                plans.only("Speed", "plan", "call", *compiling, "vs fp32"),
                latency_grid(record),
                plans.only("Outputs and memory", "plan", "outputs", "error", "peak memory"),
            ]
            if _serves(record)
            else [
                plans.only("Speed", "plan", "training step", *compiling, "vs fp32", "vs autocast"),
                plans.only("Gradients and memory", "plan", "parity", "damage", "peak memory", "loss"),
            ]
        ),
        replace(exempt, rows=exempt.rows[:_MOST]).only(
            "Kept in another format", "region", "modules", "format", "why"
        ),
    )
    said = verification_sentence(record)
    return [
        Line(record["answer"], "bold"),
        *(Line(sentence) for sentence in record["why"]),
        *(Line(note, "yellow") for note in _open(record)),
        *(Line(note) for note in record["notes"]),
        Line(),
        Line(f"{_paste_title(record)}:"),
        Line(_pasted(record), "green"),
        Line(),
        *(grid for grid in grids if grid.rows),
        *(
            Line(breakable(f"Ties: {row.why}".replace("\n", "\n  or  ")))
            for row in plans.where("tie").rows
            if "\n" in row.why
        ),
        *_others(record),
        *([Line(said)] if said else ()),
        *(Line(small, "dim") for small in (interval_note(record), words.where(record))),
    ]


def brief(record: Record) -> list[Grid | Line]:
    """Return the answer for one screen, with its reasons, open questions, how to use the plan, and the closest plans."""
    grid, open_ = plan_grid(record), _open(record)
    rows = tuple(
        row for row in grid.rows if row.tag in ("chosen", "baseline", "tie") or _BESIDE in row.cells[0]
    )
    uncompiled = record["settings"].get("compile") == "never" and record["goal"] in ("time", "inference")
    return [
        Line(record["answer"], "bold"),
        *(Line(sentence) for sentence in record["why"][: _REASONS - min(len(open_), 1)]),
        *(Line(note, "yellow") for note in open_[:1]),
        Line(_pasted(record), "green"),
        *([replace(grid, rows=rows).only("", "plan", _step(record), "vs fp32", "peak memory")] if rows else ()),
        Line(f"{_UNCOMPILED * uncompiled}More: --verbose, or the page.", "dim"),
    ]  # fmt: skip


_REASONS = 3
_UNCOMPILED = "torch.compile was not tried (--compile auto). "
_BESIDE = "one-line autocast"


def _serves(record: Record) -> bool:
    return bool(record["goal"] == "inference")


def _step(record: Record) -> str:
    return "call" if _serves(record) else "training step"


def _pasted(record: Record) -> str:
    return words.pasted(record["plan"], serves=_serves(record), widen=record.get("widen", False))


def _paste_title(record: Record) -> str:
    return "Paste where the model is loaded" if _serves(record) else "Paste into your training loop"


def _others(record: Record) -> list[Grid | Line]:
    """Return a table of the first few plans that were dropped, with the reason for each."""
    grid = other_grid(record)
    more = len(grid.rows) - _MOST
    shown = replace(grid, rows=grid.rows[:_MOST]).only(grid.title, "plan", "outcome", "why")
    return [
        *([shown] if shown.rows else ()),
        *([Line(f"and {more} more in evidence.json", "dim")] if more > 0 else ()),
    ]


def values(record: Record) -> dict[str, Any]:
    """Return the values for the page's template, by name. The page shows the whole record."""
    return {
        "answer": record["answer"], "why": record["why"], "facts": facts(record),
        "paste": _pasted(record), "paste_title": _paste_title(record),
        "plans": plan_grid(record), "latencies": latency_grid(record),
        "others": other_grid(record), "open": _open(record), "remarks": record["notes"],
        "interval_note": interval_note(record), "regions": region_grid(record), "scale": scale_sentences(record),
        "verification": verification_sentence(record), "stages": stage_grid(record), "settings": settings(record),
    }  # fmt: skip


# --- tables -----------------------------------------------------------------------------------------------


def plan_grid(record: Record) -> Grid:
    """Return a table of the chosen plan, fp32, one-line autocast and plans of equal quality. Several ties are one row."""
    rows = [row for row in record["candidates"] if _is_shown(record, row)]
    ties = [row for row in rows if row["status"] == "tie" and not _name_beside(record, row)]
    columns = _columns(record)
    grid = Grid.of("Plans compared", (row for row in rows if row not in ties), columns, _status(record), _why)
    if len(ties) < 2:
        return replace(grid, rows=(*grid.rows, *Grid.of("", ties, columns, "status", _why).rows))
    return replace(grid, rows=(*grid.rows, _folded(ties, columns)))


def other_grid(record: Record) -> Grid:
    """Return a table of the plans that :func:`plan_grid` does not show, one row for each outcome and reason.

    Empty columns are left out.
    """
    rows = [
        row
        for status in _LEFT
        for row in record["candidates"]
        if row["status"] == status and not _is_shown(record, row)
    ]
    alike: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        alike.setdefault((row["status"], _why(row)), []).append(dict(row))
    firsts = [same[0] | {"words": _and_others(same)} for same in alike.values()]
    known = _columns(record)
    columns: Columns = {
        "plan": known["plan"],
        "outcome": lambda row: _LEFT[row["status"]],
        **{
            name: known[name]
            for name in ("vs fp32", "error" if _serves(record) else "damage")
            if any(_says(known[name], row) for row in firsts)
        },
    }
    return Grid.of(f"{len(rows)} other plan{'s' * (len(rows) != 1)}", firsts, columns, "", _why)


def _says(said: Any, row: Record) -> bool:
    return said(row) is not None


def _and_others(same: Sequence[Record]) -> str:
    others = len(same) - 1
    return str(same[0]["words"] or same[0]["name"]) + (
        f" and {others} other{'s' * (others > 1)}" if others else ""
    )


def _is_shown(record: Record, row: Record) -> bool:
    return (
        row["status"] not in _LEFT
        or (row["status"] == "sound" and row["time"] is not None)
        or bool(_name_beside(record, row))
        or row["plan"] == record["plan"]
    )


def _name_beside(record: Record, row: Record) -> str:
    """Return what is added to the name of a plan that always has a row: fp32 and one-line autocast; empty for other plans."""
    autocast = (
        "" if _serves(record) else _BESIDE
    )  # to serve, weights are cast once, which autocast does not do
    return {"fp32": "as it is", "bf16-mixed": autocast}.get(row["plan"], "")


def latency_grid(record: Record) -> Grid:
    """Return a table of the times of single calls, by batch size and plan."""
    names = {row["plan"]: row["words"] or row["name"] for row in record["candidates"]}
    columns: Columns = {
        "batch size": lambda row: "as given" if row["batch_size"] is None else str(row["batch_size"]),
        "plan": lambda row: names.get(row["plan"], row["plan"]),
        "median": lambda row: words.time(row["median_s"]),
        "95 % within": lambda row: words.time(row["p95_s"]),
        "per sample": lambda row: row["batch_size"] and words.time(row["median_s"] / row["batch_size"]),
    }
    return Grid.of("Single calls, each after a pause of 10 ms", record["latencies"], columns)


def _status(record: Record) -> Callable[[Record], str]:
    return lambda row: "chosen" if row["plan"] == record["plan"] else row["status"]


def _why(row: Record) -> Any:
    why = row["reason"] or (row["parity"] or row)["reason"]
    if row["status"] == "sound" and row["time"] is None:
        return why or "there was no time for it in the final"
    return why


def _columns(record: Record) -> Columns:
    base = _baseline(record)
    peak = None if base is None else base["peak_bytes"]
    parity, damage = ("outputs", "error") if _serves(record) else ("parity", "damage")
    columns: Columns = {
        "plan": lambda row: ", ".join(filter(None, (row["words"] or row["name"], _name_beside(record, row)))),
        _step(record): lambda row: words.step(row["time"]),
        "vs fp32": lambda row: (
            "1" if row["status"] == "baseline" and row["time"] else words.speed(row["speedup"])
        ),
        "vs autocast": lambda row: words.speed(row["versus_autocast"]),
        "peak memory": lambda row: words.against(row["peak_bytes"], None if row is base else peak),
        parity: lambda row: row["parity"] and row["parity"]["verdict"],
        damage: lambda row: row["parity"] and _damage(row["parity"]),
        "loss": lambda row: None if row["loss"] is None else words.loss(row["loss"]),
    }
    if any(row["compile_s"] for row in record["candidates"]):
        columns = {**columns, "compiling": _compiling}
    return columns


def _folded(ties: Sequence[Record], columns: Columns) -> Row:
    """Return one row for several tied plans: their number, and the smallest and largest of each of their values."""

    def span(said: Callable[[float], str], values: Sequence[float | None]) -> str:
        known = [value for value in values if value is not None]
        ends = list(dict.fromkeys(said(end) for end in (min(known), max(known)))) if known else ["-"]
        if len(ends) == 2 and (unit := ends[0].lstrip(".0123456789")) == ends[1].lstrip(".0123456789"):
            ends = [f"{ends[0].removesuffix(unit)}-{ends[1]}"]
        return " to ".join(ends)

    def value(key: str, inner: str) -> list[float | None]:
        return [None if (found := row[key]) is None else found[inner] for row in ties]

    speed = span(words.time, value("time", "median_s"))
    verdicts = ", ".join(
        dict.fromkeys(filter(None, (row["parity"] and row["parity"]["verdict"] for row in ties)))
    )
    errors = span(words.damage, value("parity", "value"))
    cells = {
        "plan": f"{len(ties)} tied plans",
        "training step": speed,
        "call": speed,
        "vs fp32": span(words.factor, value("speedup", "value")),
        "vs autocast": span(words.factor, value("versus_autocast", "value")),
        "peak memory": span(words.size, [row["peak_bytes"] for row in ties]),
        "parity": verdicts,
        "outputs": verdicts,
        "damage": errors,
        "error": errors,
        "loss": span(words.loss, [row["loss"] for row in ties]),
        "compiling": span(words.time, [row["compile_s"] for row in ties]),
    }
    return Row(
        tuple(cells[name] or "-" for name in columns),
        "tie",
        "\n".join(row["words"] or row["name"] for row in ties),
    )


def _compiling(row: Record) -> str | None:
    """Say how long compiling took, and after how many steps it pays off."""
    if row["compile_s"] is None:
        return None
    steps = row["pays_after_steps"]
    return words.time(row["compile_s"]) + (f", pays off after {steps:,} steps" if steps is not None else "")


def region_grid(record: Record) -> Grid:
    """Return a table of the model's regions, in the model's order.

    Rows with the status ``exempt`` are regions that do not run in the plan's compute format, with the reason.
    """

    def exempt(row: Record) -> str:
        return "exempt" if row["format"] != record["compute"] else ""

    columns: Columns = {
        "region": lambda row: row["pattern"] or "(the model itself)",
        "modules": lambda row: row["kind"] + (f" x{row['modules']}" if row["modules"] != 1 else ""),
        "format": "format",
        "time gained": lambda row: _gained(row["time_fp32_s"], row["time_low_s"]),
        "bias / noise": lambda row: _joined(" / ", words.damage, row["bias"], row["noise"]),
        "data's noise": lambda row: _joined("", words.damage, row["data_noise"]),
        "alone": lambda row: (own := row["damage"]) and f"{words.damage(own['value'])} ({own['verdict']})",
        "gradients": lambda row: _joined(" to ", "{:.1e}".format, row["grad_smallest"], row["grad_largest"]),
    }
    return Grid.of("Regions", record["regions"], columns, exempt, "reason")


def stage_grid(record: Record) -> Grid:
    """Return a table of the work of the search: for each stage its time, its passes to test gradients, and its timed steps.

    The last row is the sum.
    """
    stages = record["stages"]
    sums = {key: sum(stage[key] for stage in stages) for key in ("time_s", "passes", "steps")}
    columns: Columns = {
        "stage": "name",
        "time": lambda row: words.time(row["time_s"]),
        "forward/backwards": lambda row: f"{row['passes']:,}" if row["passes"] else None,
        "timed steps": lambda row: f"{row['steps']:,}" if row["steps"] else None,
    }
    return Grid.of("What the search did", [*stages, {"name": "in all", **sums}] if stages else [], columns)


def _joined(between: str, said: Callable[[float], str], *values: float | None) -> str | None:
    known = [said(value) for value in values if value is not None]
    return between.join(known) if len(known) == len(values) else None


def _gained(slow: float | None, fast: float | None) -> str | None:
    if slow is None or fast is None or slow == fast:
        return None if slow is None or fast is None else "0"
    factor = f" ({words.factor(slow / fast)})" if slow and fast else ""
    return f"{'-' if slow < fast else ''}{words.time(abs(slow - fast))}{factor}"


def _damage(parity: Record) -> str:
    """Return the damage with its interval."""
    ends = [parity["low"], parity["high"]]
    if parity["value"] is None or None in ends:
        return words.damage(parity["value"])
    said = [words.damage(end) for end in ends]
    return f"{words.damage(parity['value'])} ({(' to ' if 'e' in ''.join(said) else '-').join(said)})"


# --- text -------------------------------------------------------------------------------------------------


def _chosen(record: Record) -> Record | None:
    """Return the candidate that was chosen; None if nothing was tried."""
    return next((row for row in record["candidates"] if row["plan"] == record["plan"]), None)


def _baseline(record: Record) -> Record | None:
    return next((row for row in record["candidates"] if row["status"] == "baseline"), None)


def _open(record: Record) -> list[str]:
    """Return the questions that the search left open."""
    ended = "The search was interrupted or ran out of time: this is the result so far."
    return [*([] if record["complete"] else [ended]), *record.get("undecided", ())]


def facts(record: Record) -> list[tuple[str, str, str]]:
    """Return the chosen plan's numbers, each as a name, the number, and its evidence. Unmeasured numbers are left out."""
    row = _chosen(record)
    if row is None:
        return []
    out = []
    for label, ratio in (
        ("over fp32", row["speedup"]),
        ("over one-line torch.autocast", None if _serves(record) else row["versus_autocast"]),
    ):
        if ratio is not None:
            out.append((f"speed {label}", _told(ratio), words.interval(ratio)))
    if row["time"] is not None:
        firm = (
            f"{row['rounds']} rounds in {_starts(record)} starts"
            if _starts(record) > 1
            else f"{row['rounds']} rounds"
        )
        out.append((f"a {_step(record)}", words.time(row["time"]["median_s"]), firm))
    if row["peak_bytes"] is not None:
        base = _baseline(record)
        said = ""
        if base is not None and base is not row and base["peak_bytes"]:
            said = f"{words.share(row['peak_bytes'], base['peak_bytes'])} than fp32".replace(
                "as much than", "as much as"
            )
        out.append(("peak memory", words.size(row["peak_bytes"]), said))
    if row["parity"] is not None and _serves(record):
        out.append((
            "outputs",
            row["parity"]["verdict"],
            f"error {_damage(row['parity'])}, relative to the floor",
        ))
    elif row["parity"] is not None:
        firm = f"damage {_damage(row['parity'])}, the relative error of an update"
        out.append(("gradients", row["parity"]["verdict"], firm))
    return out


def _told(ratio: Record) -> str:
    """Return a speed as the answer states it; if its interval includes 1, neither plan is called faster."""
    low, high = (round(ratio[end], 2) if ratio[end] is not None else None for end in ("low", "high"))
    if low is None or high is None or high > _UNKNOWN * low:
        return "not known"
    return "as fast" if low <= 1.0 <= high else words.factor(ratio["value"])


_UNKNOWN = 10.0
"""An interval tells nothing if its upper end is more than this many times its lower end."""


def _starts(record: Record) -> int:
    """Return how often the plans of the final comparison were started; 0 if fp32 was not measured with them."""
    return max((row["speedup"]["n"] for row in record["candidates"] if row["speedup"]), default=0)


def interval_note(record: Record) -> str:
    """Explain the numbers in the tables."""
    lines, starts = record["lines"], _starts(record)
    ran = "ran" if _serves(record) else "trained"
    how = (
        f"each was started up to {starts} times, each time in a separate process, and the plans {ran} in turns"
        if starts > 1
        else f"each was started once, and the plans {ran} in turns"
        if starts
        else "only fp32 was"
    )
    said = (
        f"Plans with a time were in the final: {how}. fp32's time is a median ± half the interquartile range; another plan's time is "
        "fp32's time divided by the plan's speed. Brackets hold 95 % intervals: those of speeds include the variation between starts "
        "(Student's t) and times of day"
    )
    if _serves(record):
        return (
            f"{said}, those of errors the variation between batches. An error is the relative error of an output, divided by "
            "the error that rounding the model's inputs by half a unit of the plan's format causes in fp32: a plan passes up "
            f"to {lines['pass']:g}."
        )
    return (
        f"{said}, those of damage the variation between batches. Damage is {words.MEANING}: a plan passes below {lines['pass']:g}, fails above {lines['fail']:g} and is "
        f"undecided in between; in the units of Adam's steps the limits are {lines['adam_pass']:g} and {lines['adam_fail']:g}."
    )


def scale_sentences(record: Record) -> list[str]:
    """Describe the range of usable loss scales; empty if fp16 was not a candidate."""
    scale = record["scale"]
    if scale is None or None in scale.values():
        return []
    low, high, init = scale["lowest_scale"], scale["highest_scale"], scale["init"]
    out = [
        f"The largest gradient is {scale['largest']:.2g}; gradients below {scale['smallest']:.2g} carry at most one part in "
        "10,000 of a module's squared gradient."
    ]
    if low > high:
        out.append(
            f"No loss scale lets fp16 hold both: below {words.number(low)} small gradients underflow, above {words.number(high)} large "
            "gradients overflow."
        )
    else:
        out.append(f"fp16 holds both with a loss scale from {words.number(low)} to {words.number(high)}.")
    out.append(f"Training in fp16 starts with a loss scale of {words.number(init)}, well below overflow.")
    return out


def verification_sentence(record: Record) -> str:
    """Say in one sentence what paired training runs showed; empty if there were none."""
    found = record["verification"]
    if found is None:
        return ""
    said = {
        "not worse": "The plan is not worse than fp32 by more than the margin set beforehand",
        "worse": "The plan is worse than fp32",
        "not shown": "The runs do not show that the plan is not worse than fp32",
    }.get(found["verdict"], found["verdict"])
    if found["difference"] is None:
        whose = "its" if found["verdict"] == "worse" else "fp32's own"
        return f"{said}: {whose} loss became non-finite within {found['steps']} steps."
    numbers = {key: f"{found[key]:.3g}" for key in
               ("difference", "upper", "margin", "detectable")}  # fmt: skip
    return (
        f"{said}: over {found['seeds']} pairs of {found['steps']} steps its final loss minus fp32's is "
        f"{numbers['difference']}, at most {numbers['upper']} with 95 % confidence; the margin is {numbers['margin']}. Four out of "
        f"five such comparisons would show a difference of {numbers['detectable']}."
    )


def settings(record: Record) -> list[tuple[str, str]]:
    """Return the settings of the search, as pairs of name and value."""
    out = [("goal", record["goal"]), ("formats", ", ".join(record["formats"]))]
    for key, value in record["settings"].items():
        said = {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
        if said is not None:
            name, unit = key.removesuffix("_s").replace("_", " "), " s" if key.endswith("_s") else ""
            out.append((name, f"{said}{unit}"))
    for key, label in (("floor", "fp32's own rounding"), ("repeat", "fp32 repeated")):
        if record[key] is not None:
            out.append((label, words.damage(record[key])))
    return out
