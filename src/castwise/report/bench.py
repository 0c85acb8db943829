"""What a bench found, in the terminal and as a page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castwise.report import bench_plots, page, words
from castwise.report.grids import Grid, Row, terminal

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["bench_page", "bench_table", "grids", "headline", "interval_note", "notes", "write_bench_page"]

Record = Mapping[str, Any]

_MEMORY = {
    "training peak": "training_peak_bytes",
    "inference peak": "inference_peak_bytes",
    "kept for backward": "saved_bytes",
}
_FIGURES = {
    "time": (
        "time of each plan",
        "Medians, whiskers from the first to the third quartile; shorter is faster. A bar with // is longer.",
    ),
    "memory": ("memory of each plan", "Most that was allocated at once, each plan in a process of its own."),
    "loss": ("loss of each plan", "Every plan started from the same weights and saw the same batches."),
    "prediction": (
        "prediction of each plan", "The target, and what each plan's model makes of it after training."
    ),
}  # fmt: skip
"""What a screen reader says of each picture, and what stands below it."""


# --- in words -----------------------------------------------------------------------------------------------


def headline(record: Record) -> str:
    """The answer that a person came for, in a few sentences.

    A difference inside its interval is called a tie, and a plan that did not learn as well is never the answer.

    Returns:
        Plain text.
    """
    base = bench_plots.baseline(record)
    name, workload = base["name"], record["workload"]
    others = [row for row in record["plans"] if row is not base]
    if base["status"] != "ok":
        return f"{name} did not finish on {workload}, so nothing can be compared with it: {base['reason']}."
    rows = [row for row in others if row["status"] == "ok" and row["training"] and row["training"]["speedup"]]
    if not rows:
        why = [f"{row['name']}: {row['reason']}." for row in others if row["reason"]]
        said = f"On this machine no other plan than {name} could be measured on {workload}."
        return " ".join([said, *why])
    sound = [row for row in rows if row["name"] not in record["behind"]]
    if record["best"] is not None:
        best = next(row for row in rows if row["name"] == record["best"])
        said = (
            f"On this machine {best['name']} trains {workload} {_times(best)} as fast as "
            f"{name} ({_firm(best)}){_memory_words(best, base)}; {_loss_words(best, base)}."
        )
        if record["level_with_best"]:
            said += f" The measurement does not tell it apart from {words.listed(record['level_with_best'])} in speed."
    else:
        best = max(sound or rows, key=lambda row: float(row["training"]["speedup"]["value"]))
        speed = best["training"]["speedup"]
        is_tie = speed["low"] <= 1.0 <= speed["high"]
        near = f"{best['name']} and {name} are a tie" if is_tie else f"{best['name']} comes closest"
        said = (
            f"On this machine no plan that learns as well trains {workload} measurably faster than {name}. "
            f"{near}: {_times(best)} as fast ({_firm(best)}){_memory_words(best, base)}; {_loss_words(best, base)}."
        )
    lagging = [row["name"] for row in rows if row not in sound]
    return said + (f" {_lagging(words.listed(lagging), name)}" if lagging else "")


def _times(row: Record) -> str:
    return words.factor(row["training"]["speedup"]["value"])


def _firm(row: Record) -> str:
    speed = row["training"]["speedup"]
    return f"{words.level([speed])} interval {words.interval(speed)}"


def _lagging(names: str, base: str) -> str:
    return f"{names} learned visibly less than {base} in the same steps."


def _memory_words(row: Record, base: Record) -> str:
    mine, other = (_bytes(r, "training_peak_bytes") for r in (row, base))
    return f" with {words.share(mine, other)} peak memory" if mine and other else ""


def _loss_words(row: Record, base: Record) -> str:
    delta = row["final_loss_difference"]
    if not delta:
        return "its final loss is not finite" if delta is None else "its final loss is the same"
    reference = base["final_loss"]
    part = f", {abs(delta / reference) * 100:.2g} % of {base['name']}'s" if reference else ""
    return f"its final loss is {abs(delta):.2g} {'higher' if delta > 0 else 'lower'}{part}"


def interval_note(record: Record) -> str:
    """What the numbers in the speed table are."""
    firm = words.level(row["training"]["speedup"] for row in record["plans"] if row["training"])
    return (
        f"Times are medians ± half the interquartile range of {record['rounds']} interleaved rounds, "
        f"{record['steps']} training steps in all; speeds come with their {firm} interval from paired rounds. "
        "An interval that contains 1 is a tie."
    )


def notes(record: Record) -> list[str]:
    """Sentences below a table: why a plan has no numbers, and what else went wrong."""
    out = []
    for row in record["plans"]:
        if row["status"] in ("unsupported", "failed"):
            out.append(f"{row['name']}, {row['status']}: {row['reason']}")
        elif row["status"] == "stopped":
            out.append(f"{row['name']} was {row['reason']}.")
        elif row["name"] in record["behind"]:
            out.append(_lagging(row["name"], record["baseline"]))
        out += [f"{row['name']}: {note}" for note in row["notes"]]
    return out


# --- in tables ----------------------------------------------------------------------------------------------


def grids(record: Record) -> list[Grid]:
    """A bench's results as small tables, each narrow enough for a terminal and a phone.

    Returns:
        Speed, memory where it was measured, and learning.
    """
    base, rows = bench_plots.baseline(record), record["plans"]
    versus = f"vs {base['name']}"
    stages = ["training", *(["inference"] if any(row["inference"] for row in rows) else [])]
    heads = [("training step" if stage == "training" else stage, versus) for stage in stages]
    speed = [[cell for stage in stages for cell in _timed(row, stage)] for row in rows]
    out = [_grid("Speed", sum(heads, ()), rows, speed)]
    kinds = {k: v for k, v in _MEMORY.items() if any(_bytes(row, v) is not None for row in rows)}
    if kinds:
        out.append(
            _grid(
                "Memory", tuple(kinds), rows, [[_held(r, base, key) for key in kinds.values()] for r in rows]
            )
        )
    metrics = sorted({key for row in rows for key in row["metrics"]})
    learned = []
    for row in rows:
        values = [f"{v:.4g}" if (v := row["metrics"].get(m)) is not None else "-" for m in metrics]
        if row["status"] == "ok":
            delta = "" if row is base else _difference(row, base)
            learned.append([words.loss(row["final_loss"]), delta, str(row["skipped_steps"]), *values])
        else:
            learned.append(["-", "", "-", *values])
    return [*out, _grid("Learning", ("final loss", versus, "skipped steps", *metrics), rows, learned)]


def _grid(title: str, header: tuple[str, ...], plans: list[Record], cells: list[list[str]]) -> Grid:
    rows = (Row((plan["name"], *row), plan["status"]) for plan, row in zip(plans, cells, strict=True))
    return Grid(title, ("plan", *header), tuple(rows))


def _timed(row: Record, stage: str) -> tuple[str, str]:
    """The time, and the speed against the baseline; in place of them what kept a plan from being timed."""
    timing = row[stage]
    if timing is not None:
        return words.step(timing["step"]), words.speed(timing["speedup"]) if timing["speedup"] else ""
    if row["status"] == "ok" or stage != "training":
        return "-", ""
    return row["status"], row["reason"].removeprefix("stopped: ") if row["status"] == "stopped" else ""


def _bytes(row: Record, key: str) -> Any:
    return (row["memory"] or {}).get(key)


def _held(row: Record, base: Record, key: str) -> str:
    mine, other = (_bytes(r, key) for r in (row, base))
    return "-" if mine is None else words.against(mine, None if row is base else other)


def _difference(row: Record, base: Record) -> str:
    """A plan's final loss against the baseline's, with sign and percentage."""
    delta, reference = row["final_loss_difference"], base["final_loss"]
    if not delta:
        return "" if delta is None else "the same"
    relative = f" ({delta / abs(reference):+.1%})" if reference else ""
    return f"{delta:+.3g}{relative}".replace("%", " %")


def bench_table(record: Record) -> RenderableType:
    """A bench's answer, its tables and remarks, for ``rich.print``; readable from 80 columns on.

    Args:
        record: As ``BenchResult.to_dict`` gives it.

    Returns:
        Something rich can print.
    """
    from rich.console import Group
    from rich.text import Text

    return Group(
        Text(headline(record), style="bold"),
        Text(),
        *map(terminal, grids(record)),
        *(Text(note, style="yellow") for note in notes(record)),
        Text(interval_note(record), style="dim"),
        Text(words.where(record), style="dim"),
    )


# --- as a page ----------------------------------------------------------------------------------------------


def bench_page(record: Record) -> str:
    """The page of a bench.

    Args:
        record: As ``BenchResult.to_dict`` gives it.

    Returns:
        HTML with its style and pictures inside, for wide and narrow screens, light and dark.
    """
    return page.render(
        "bench.html.j2",
        record,
        page.pictures(bench_plots.bench_figures, record, _FIGURES),
        answer=headline(record),
        grids=grids(record),
        notes=notes(record),
        interval_note=interval_note(record),
    )


def write_bench_page(record: Record, folder: Path) -> list[Path]:
    """Write the page and its pictures.

    Args:
        record: As ``BenchResult.to_dict`` gives it.
        folder: An existing folder.

    Returns:
        Paths: ``bench.html`` first, then the PNG files.
    """
    return page.write(folder / "bench.html", bench_page(record), bench_plots.bench_figures(record))
