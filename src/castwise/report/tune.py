"""What a search for a plan found, in the terminal and as a page that a person can decide from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castwise.report import page, words
from castwise.report.grids import Grid, Row, terminal
from castwise.report.tune_plots import tune_figures

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "answer", "facts", "interval_note", "plan_grid", "region_grid", "remarks", "scale_sentences", "settings", "stage_grid",
    "tune_page", "tune_table", "verification_sentence", "write_tune_page",
]  # fmt: skip

Record = Mapping[str, Any]

_MOST = 12
"""Rows of a list in the terminal."""
_FIGURES = {
    "scatter": (
        "Speed over fp32 against the damage of each plan",
        "Every plan whose speed and gradients were both measured, with 95 % intervals; right and down is better. Plans "
        "without both are in the table alone.",
    ),
    "gradients": (
        "Histogram of gradient magnitudes with the ranges of formats",
        "Gradients of the model's modules in fp32, per power of two, above what formats hold: pale where a format has "
        "fewer digits left, nothing where it has none. A loss scale moves fp16's range (dashed) down.",
    ),
    "gradients_by_region": (
        "Gradient magnitudes of each region",
        "Where each region's gradients lie; width grows with the root of their number.",
    ),
    "regions": (
        "Bias and noise of each region",
        "Parts of the plan's damage, the relative error of an update, against the lines (dashed) that judge the whole of "
        "it.",
    ),
}
"""What a screen reader says of each picture, and what stands below it."""


# --- in tables ----------------------------------------------------------------------------------------------


def plan_grid(record: Record) -> Grid:
    """The plans that were considered, in the record's order, each with its status and why."""
    reference = (_baseline(record) or {}).get("peak_bytes")
    rows = []
    for row in record["candidates"]:
        parity, is_base = row["parity"], row["status"] == "baseline"
        cells = (
            row["name"],
            words.step(row["time"]),
            "1" if is_base and row["time"] else words.speed(row["speedup"]),
            words.speed(row["versus_autocast"]),
            "-"
            if row["peak_bytes"] is None
            else words.against(row["peak_bytes"], None if is_base else reference),
            parity["verdict"] if parity else "-",
            _damage(parity) if parity else "-",
            "-" if row["loss"] is None else words.loss(row["loss"]),
        )
        rows.append(Row(cells, row["status"], row["reason"] or (parity["reason"] if parity else "")))
    columns = ("training step", "vs fp32", "vs autocast", "peak memory", "parity", "damage", "loss")
    return Grid("Plans compared", ("plan", *columns), tuple(rows))


def region_grid(record: Record) -> Grid:
    """The model's regions, in the model's order; ``apart`` are those kept out of the plan's own format, with why."""
    rows = []
    for row in record["regions"]:
        parts, ends, own = (
            (row["bias"], row["noise"]),
            (row["grad_smallest"], row["grad_largest"]),
            row["damage"],
        )
        cells = (
            row["pattern"] or "(the model itself)",
            row["kind"] + (f" x{row['modules']}" if row["modules"] != 1 else ""),
            row["format"],
            _gained(row["time_fp32_s"], row["time_low_s"]),
            "-" if None in parts else " / ".join(map(words.damage, parts)),
            "-" if row["data_noise"] is None else words.damage(row["data_noise"]),
            f"{words.damage(own['value'])} ({own['verdict']})" if own else "-",
            "-" if None in ends else " to ".join(f"{v:.1e}" for v in ends),
        )
        rows.append(Row(cells, "apart" if row["format"] != record["compute"] else "", row["reason"]))
    columns = ("modules", "format", "time gained", "bias / noise", "data's noise", "alone", "gradients")
    return Grid("Regions", ("region", *columns), tuple(rows))


def stage_grid(record: Record) -> Grid:
    """What the search did: stage, time, forward/backwards on numerics, timed steps; the sum last."""
    stages = record["stages"]
    keys = ("time_s", "passes", "steps")
    sums = {"name": "in all", **{key: sum(stage[key] for stage in stages) for key in keys}}
    rows = tuple(
        Row((
            stage["name"],
            words.time(stage["time_s"]),
            *(f"{stage[key]:,}" if stage[key] else "-" for key in keys[1:]),
        ))
        for stage in [*stages, sums]
    )
    return Grid(
        "What the search did", ("stage", "time", "forward/backwards", "timed steps"), rows if stages else ()
    )


def _gained(slow: float | None, fast: float | None) -> str:
    if slow is None or fast is None:
        return "-"
    if slow == fast:
        return "0"
    sign = "-" if slow < fast else ""
    return f"{sign}{words.time(abs(slow - fast))}" + (
        f" ({words.factor(slow / fast)})" if slow and fast else ""
    )


def _damage(parity: Record) -> str:
    """Damage with its interval."""
    ends = [parity["low"], parity["high"]]
    if parity["value"] is None or None in ends:
        return words.damage(parity["value"])
    said = [words.damage(end) for end in ends]
    return f"{words.damage(parity['value'])} ({(' to ' if 'e' in ''.join(said) else '-').join(said)})"


def tune_table(record: Record) -> RenderableType:
    """A search's answer, the plans that it compared and why others were rejected, for ``rich.print``.

    Readable from 80 columns on; the chosen plan is marked.

    Args:
        record: As ``TuneResult.to_dict`` gives it.

    Returns:
        Something rich can print.
    """
    from rich.console import Group
    from rich.text import Text

    plans = plan_grid(record)
    kept, lost = _kept(plans), _rejected(plans)
    apart = region_grid(record).where(lambda row: row.status == "apart")
    grids = []
    if kept.rows:
        grids.append(kept.only("Speed", "plan", "training step", "vs fp32", "vs autocast"))
        grids.append(kept.only("Gradients and memory", "plan", "parity", "damage", "peak memory", "loss"))
    if apart.rows:
        grids.append(apart.only("Kept in another format", "region", "modules", "format", "why").first(_MOST))
    if lost.rows:
        grids.append(lost.only("Rejected", "plan", "why").first(_MOST))
    parts: list[RenderableType] = [Text(answer(record), style="bold"), Text()]
    parts += (terminal(grid, wrap=False) for grid in grids)
    if len(lost.rows) > _MOST:
        parts.append(Text(f"and {len(lost.rows) - _MOST} more in evidence.json", style="dim"))
    parts += [Text(note, style="yellow") for note in remarks(record)]
    parts += [Text(said) for said in (verification_sentence(record),) if said]
    parts += [Text(f"The plan: {record['plan']}"), Text(interval_note(record), style="dim")]
    return Group(*parts, Text(words.where(record), style="dim"))


def _kept(plans: Grid) -> Grid:
    return plans.where(lambda row: row.status != "rejected")


def _rejected(plans: Grid) -> Grid:
    return plans.where(lambda row: row.status == "rejected")


# --- as a page ----------------------------------------------------------------------------------------------


def tune_page(record: Record) -> str:
    """The page of a search.

    Args:
        record: As ``TuneResult.to_dict`` gives it; what was not measured is None or empty and is left out.

    Returns:
        HTML with its style and pictures inside, for wide and narrow screens, light and dark.
    """
    plans = plan_grid(record)
    return page.render(
        "tune.html.j2",
        record,
        page.pictures(tune_figures, record, _FIGURES),
        answer=answer(record),
        remarks=remarks(record),
        facts=facts(record),
        kept=_kept(plans),
        rejected=_rejected(plans),
        interval_note=interval_note(record),
        regions=region_grid(record),
        scale=scale_sentences(record),
        verification=verification_sentence(record),
        stages=stage_grid(record),
        settings=settings(record),
        command=record["command"] or record["environment"]["command"],
    )


def write_tune_page(record: Record, folder: Path) -> list[Path]:
    """Write the page and its pictures.

    Args:
        record: As ``TuneResult.to_dict`` gives it.
        folder: An existing folder.

    Returns:
        Paths: ``report.html`` first, then the PNG files.
    """
    return page.write(folder / "report.html", tune_page(record), tune_figures(record))


# --- in words -----------------------------------------------------------------------------------------------


def _chosen(record: Record) -> Record | None:
    """The candidate that was chosen; fp32 where nothing was better, None where nothing was tried."""
    rows: Sequence[Record] = record["candidates"]
    chosen = (row for row in rows if row["status"] == "chosen")
    return next(chosen, None) or next(
        (row for row in rows if row["status"] == "baseline" and row["plan"] == record["plan"]), None
    )


def _baseline(record: Record) -> Record | None:
    return next((row for row in record["candidates"] if row["status"] == "baseline"), None)


def answer(record: Record) -> str:
    """The result in a sentence, also where the search ended before it had one."""
    if record["answer"]:
        return str(record["answer"])
    return f"The search ended before it could compare plans on {record['workload']}, so the plan is {record['plan']}."


def remarks(record: Record) -> list[str]:
    """Sentences that a reader should not miss: what is incomplete first."""
    ended = "The search was interrupted or ran out of its budget: this is what was known by then."
    return [*([] if record["complete"] else [ended]), *record["notes"]]


def facts(record: Record) -> list[tuple[str, str, str]]:
    """The chosen plan's numbers: what it is, the number, what makes it firm; unmeasured ones left out."""
    row = _chosen(record)
    if row is None:
        return []
    out = []
    for label, ratio in (
        ("over fp32", row["speedup"]),
        ("over one-line torch.autocast", row["versus_autocast"]),
    ):
        if ratio is not None:
            firm = f"{words.level([ratio])} interval {words.interval(ratio)}"
            out.append((f"speed {label}", words.factor(ratio["value"]), firm))
    if row["time"] is not None:
        out.append(("a training step", words.time(row["time"]["median_s"]), f"{row['rounds']} rounds"))
    if row["peak_bytes"] is not None:
        base = _baseline(record)
        said = ""
        if base is not None and base is not row and base["peak_bytes"]:
            said = f"{words.share(row['peak_bytes'], base['peak_bytes'])} than fp32".replace(
                "as much than", "as much as"
            )
        out.append(("peak memory", words.size(row["peak_bytes"]), said))
    if row["parity"] is not None:
        firm = f"damage {_damage(row['parity'])}, the relative error of an update"
        out.append(("gradients", row["parity"]["verdict"], firm))
    return out


def interval_note(record: Record) -> str:
    """What the numbers in the tables are."""
    firm, lines = words.level(row["speedup"] for row in record["candidates"]), record["lines"]
    return (
        f"Times are medians ± half the interquartile range of interleaved rounds; speeds come with their {firm} "
        "interval from rounds that both plans ran, and an interval that contains 1 is a tie. Damage is "
        f"{words.MEANING}, with its 95 % interval: below {lines['pass']:g} passes, above {lines['fail']:g} fails, between the two "
        "is undecided."
    )


def scale_sentences(record: Record) -> list[str]:
    """The window of loss scales in words; nothing where fp16 was not in the running."""
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
            f"No loss scale holds both in fp16: below {words.number(low)} the small ones underflow, above {words.number(high)} the large "
            "ones overflow."
        )
    else:
        out.append(f"fp16 holds both with a loss scale from {words.number(low)} to {words.number(high)}.")
    out.append(f"Training in fp16 starts with a loss scale of {words.number(init)}, well below overflow.")
    return out


def verification_sentence(record: Record) -> str:
    """What paired training runs showed; empty where there were none."""
    found = record["verification"]
    if found is None:
        return ""
    said = {
        "not worse": "The plan is not worse than fp32 by the margin that was set before",
        "worse": "The plan is worse than fp32",
        "not shown": "The runs do not show that the plan is not worse than fp32",
    }.get(found["verdict"], found["verdict"])
    numbers = {key: "not finite" if found[key] is None else f"{found[key]:.3g}" for key in
               ("difference", "upper", "margin", "detectable")}  # fmt: skip
    return (
        f"{said}: over {found['seeds']} pairs of {found['steps']} steps its final loss minus fp32's is "
        f"{numbers['difference']}, with 95 % confidence at most {numbers['upper']}, against a margin of "
        f"{numbers['margin']}. Such runs would show a difference of {numbers['detectable']} four times out of five."
    )


def settings(record: Record) -> list[tuple[str, str]]:
    """What was asked for, as pairs of name and value."""
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
