"""Show the result of ``castwise bench`` in the terminal and as a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from castwise.report import words
from castwise.report.bench_plots import PICTURES, baseline
from castwise.report.grids import Columns, Grid, Line, Row

__all__ = ["PICTURES", "grids", "headline", "interval_note", "lines", "notes", "values"]

Record = Mapping[str, Any]

FEW = 6
"""An interval is called wide if it comes from fewer rounds in one process, or fewer starts, than this."""
_STEPS = {"training": "training step", "inference": "inference"}
MOST = 6
"""Largest number of plans that are shown on one screen."""
_UNMEASURED = ("unsupported", "failed")
_MEMORY = {
    "training peak": "training_peak_bytes",
    "inference peak": "inference_peak_bytes",
    "kept for backward": "saved_bytes",
}


def lines(record: Record) -> list[Grid | Line]:
    """Return the answer, the tables and the notes of a bench, for the terminal."""
    small = (interval_note(record), words.where(record))
    others = [row for row in record["plans"] if row["name"] != row["plan"]]
    return [
        Line(headline(record), "bold"), Line(), *grids(record), *(Line(note, "yellow") for note in notes(record)),
        *(line for row in others for line in (Line(f"To train by {row['name']}:"), Line(words.pasted(row["plan"]), "green"))),
        *(Line(said, "dim") for said in small),
    ]  # fmt: skip


def brief(record: Record) -> list[Grid | Line]:
    """Return the answer and one row per plan, to fit on one screen.

    Notes are left out, except those on plans that were not measured.
    """
    base, stage = baseline(record), _stage(record)

    def memory(row: Record) -> str:
        peak = _bytes(row, f"{stage}_peak_bytes")
        return words.against(peak, None if row is base else _bytes(base, f"{stage}_peak_bytes"))

    columns: Columns = {
        "plan": "name",
        _STEPS[stage]: lambda row: _timed(record, row, stage)[0],
        f"vs {base['name']}": lambda row: _timed(record, row, stage)[1],
        "peak memory": memory,
        **({"final loss": _final_loss} if record["trains"] else {}),
    }
    more = "inference, memory, losses" if record["trains"] else "memory"
    rows = record["plans"][:MOST]
    left = len(record["plans"]) - len(rows)
    return [
        Line(headline(record), "bold"),
        Grid.of("", rows, columns, "status"),
        *([Line(f"and {left} more plans", "dim")] if left else ()),
        *(
            Line(f"{row['name']}, {row['status']}: {row['reason']}", "yellow")
            for row in rows
            if row["status"] in _UNMEASURED
        ),
        Line(
            f"Brackets hold 95 % intervals. --verbose or the page shows {more} and the method.",
            "dim",
        ),
    ]


def values(record: Record) -> dict[str, Any]:
    """Return the values for the template of a bench's page, by name."""
    return {
        "answer": headline(record), "grids": grids(record), "notes": notes(record), "interval_note": interval_note(record)
    }  # fmt: skip


# --- text -------------------------------------------------------------------------------------------------


def headline(record: Record) -> str:
    """Return the answer to the user's question, in a few sentences.

    A difference inside its interval is called a tie. A plan that learned less than the baseline is never the answer.
    """
    base, stage = baseline(record), _stage(record)
    name, workload = base["name"], record["workload"]
    others = [row for row in record["plans"] if row is not base]
    if base["status"] != "ok":
        return f"{name} did not finish on {workload}, so nothing can be compared with it: {base['reason']}."
    rows = [row for row in others if row["status"] == "ok" and row[stage] and row[stage]["speedup"]]
    if not rows:
        why = [f"{row['name']}: {row['reason']}." for row in others if row["reason"]]
        said = f"On this machine {name} is the only plan that could be measured on {workload}."
        return " ".join([said, *why])
    sound = [row for row in rows if row["name"] not in record["behind"]]
    if record["best"] is not None:
        best = next(row for row in rows if row["name"] == record["best"])
        said = (
            f"On this machine {best['name']} {'trains' if record['trains'] else 'runs'} {workload} {_times(best, stage)} as fast as "
            f"{name} ({_firm(best, stage)}){_memory_words(best, base, stage)}; {_quality(record, best, base)}."
        )
        if record["level_with_best"]:
            said += f" {words.listed(record['level_with_best'])} cannot be distinguished from it in speed."
    else:
        best = max(sound or rows, key=lambda row: float(row[stage]["speedup"]["value"]))
        speed = best[stage]["speedup"]
        near = f"{best['name']} comes closest: it is"
        if speed["high"] is None or speed["low"] <= 1.0 <= speed["high"]:
            near = f"{best['name']} ties with {name}: it is"
            if speed["n"] < FEW:
                what = "start" if record["starts"] else "round"
                few = f"{speed['n']} {what}s do" if speed["n"] > 1 else f"One {what} does"
                near = f"{few} not show whether {best['name']} or {name} is faster; {FEW} or more may. {best['name']} is"
        said = (
            f"On this machine no plan {'that learns as well trains' if record['trains'] else 'runs'} {workload} measurably faster "
            f"than {name}. {near} {_times(best, stage)} as fast ({_firm(best, stage)}){_memory_words(best, base, stage)}; "
            f"{_quality(record, best, base)}."
        )
    lagging = [row["name"] for row in rows if row not in sound]
    return said + (f" {_lagging(words.listed(lagging), name)}" if lagging else "")


def _stage(record: Record) -> str:
    """Return what the answer is about: training, or inference if nothing was trained."""
    return "training" if record["trains"] else "inference"


def _times(row: Record, stage: str) -> str:
    return words.factor(row[stage]["speedup"]["value"])


def _firm(row: Record, stage: str) -> str:
    speed = row[stage]["speedup"]
    return "no interval" if speed["high"] is None else f"95 % interval {words.interval(speed)}"


def _lagging(names: str, base: str) -> str:
    return f"{names} learned visibly less than {base} in the same steps."


def _memory_words(row: Record, base: Record, stage: str) -> str:
    mine, other = (_bytes(r, f"{stage}_peak_bytes") for r in (row, base))
    return f" with {words.share(mine, other)} peak memory" if mine and other else ""


def _quality(record: Record, row: Record, base: Record) -> str:
    if not record["trains"]:
        return "outputs were not compared (castwise.output_parity, castwise tune --goal inference)"
    delta = row["final_loss_difference"]
    if not delta:
        return "its final loss is not finite" if delta is None else "its final loss is the same"
    reference = base["final_loss"]
    part = f", {abs(delta / reference) * 100:.2g} % of {base['name']}'s" if reference else ""
    return f"its final loss is {abs(delta):.2g} {'higher' if delta > 0 else 'lower'}{part}"


def interval_note(record: Record) -> str:
    """Say how the numbers in the speed table were measured."""
    times = f"Times are medians ± half the interquartile range of {record['rounds']} interleaved rounds"
    if record["starts"]:
        times += f" over {record['starts']} starts of every plan, each in a separate process"
        of = "over starts (Student's t), which includes differences between times of day"
    else:
        times += " of all plans in one process"
        of = "from paired rounds"
    losses = (
        f" Losses are those of {record['steps']} training steps of each plan." if record["trains"] else ""
    )
    return f"{times}; speeds come with their 95 % interval {of}. An interval that contains 1 is a tie. {words.PAIRED}{losses}"


def notes(record: Record) -> list[str]:
    """Return the sentences below the tables: why plans have no numbers, and other problems."""
    out = list(record["notes"])
    for row in record["plans"]:
        if row["status"] in _UNMEASURED:
            out.append(f"{row['name']}, {row['status']}: {row['reason']}")
        elif row["status"] == "stopped":
            out.append(f"{row['name']} was {row['reason']}.")
        elif row["name"] in record["behind"]:
            out.append(_lagging(row["name"], record["baseline"]))
        out += [f"{row['name']}: {note}" for note in row["notes"]]
    return out


# --- tables -----------------------------------------------------------------------------------------------


def grids(record: Record) -> list[Grid]:
    """Return tables of speed, memory (if measured) and learning, each narrow enough for a terminal and a phone."""
    base, rows = baseline(record), record["plans"]
    versus = f"vs {base['name']}"
    stages = {
        stage: title
        for stage, title in _STEPS.items()
        if stage == _stage(record) or any(row[stage] for row in rows)
    }
    header = ("plan", *(name for title in stages.values() for name in (title, versus)))
    timed = (
        (row["name"], *(cell for stage in stages for cell in _timed(record, row, stage))) for row in rows
    )
    speed = tuple(Row(cells, row["status"]) for cells, row in zip(timed, rows, strict=True))
    out = [Grid("Speed", header, speed)]

    def held(key: str) -> Callable[[Record], str]:
        return lambda row: words.against(_bytes(row, key), None if row is base else _bytes(base, key))

    def metric(key: str) -> Callable[[Record], str | None]:
        return lambda row: None if key not in row["metrics"] else words.loss(row["metrics"][key])

    memory = {
        name: held(key) for name, key in _MEMORY.items() if any(_bytes(row, key) is not None for row in rows)
    }
    if memory:
        out.append(Grid.of("Memory", rows, {"plan": "name", **memory}, "status"))
    learning: Columns = {
        "plan": "name",
        "final loss": _final_loss,
        versus: lambda row: "" if row is base or row["status"] != "ok" else _difference(row, base),
        "skipped steps": lambda row: row["skipped_steps"] if row["status"] == "ok" else None,
    }
    metrics = {key: metric(key) for key in sorted({key for row in rows for key in row["metrics"]})}
    if record["trains"]:
        return [*out, Grid.of("Learning", rows, {**learning, **metrics}, "status")]
    return [*out, *([Grid.of("Quality", rows, {"plan": "name", **metrics}, "status")] if metrics else [])]


def _final_loss(row: Record) -> str | None:
    return words.loss(row["final_loss"]) if row["status"] == "ok" else None


def _timed(record: Record, row: Record, stage: str) -> tuple[str, str]:
    """Return a plan's time and its speed relative to the baseline, or the reason why it was not timed."""
    timing = row[stage]
    if timing is not None:
        return words.step(timing["step"]) or "-", words.speed(timing["speedup"]) or ""
    if row["status"] == "ok" or stage != _stage(record):
        return "-", ""
    return row["status"], row["reason"].removeprefix("stopped: ") if row["status"] == "stopped" else ""


def _bytes(row: Record, key: str) -> Any:
    return (row["memory"] or {}).get(key)


def _difference(row: Record, base: Record) -> str:
    """Return the difference of a plan's final loss from the baseline's, with sign and percentage."""
    delta, reference = row["final_loss_difference"], base["final_loss"]
    if not delta:
        return "" if delta is None else "the same"
    relative = f" ({delta / abs(reference):+.1%})" if reference else ""
    return f"{delta:+.3g}{relative}".replace("%", " %")
