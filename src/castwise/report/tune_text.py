"""What the report of a search says, the same in the terminal and on the page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from castwise.numerics.damage import FAIL, MEANING, PASS
from castwise.report import text

__all__ = [
    "PlanRow",
    "RegionRow",
    "answer",
    "autocast_name",
    "chosen",
    "facts",
    "format_damage",
    "format_number",
    "interval_note",
    "plan_rows",
    "region_rows",
    "remarks",
    "scale_sentences",
    "settings",
    "stage_rows",
    "verification_sentence",
]

Record = Mapping[str, Any]


@dataclass(frozen=True)
class PlanRow:
    """A plan in words; ``-`` where something was not measured.

    Attributes:
        name: Of the plan.
        status: ``chosen``, ``sound``, ``baseline`` or ``rejected``.
        reason: Why.
        step: Median and half the interquartile range.
        speed: Over fp32, with its interval.
        autocast: Over one-line ``torch.autocast``, with its interval.
        peak: Peak memory, and the change against fp32.
        verdict: ``pass``, ``fail``, ``undecided`` or ``-``.
        damage: With its interval.
        loss: Mean of the last steps.
    """

    name: str
    status: str
    reason: str
    step: str
    speed: str
    autocast: str
    peak: str
    verdict: str
    damage: str
    loss: str


@dataclass(frozen=True)
class RegionRow:
    """A region in words; ``-`` where something was not measured.

    Attributes:
        pattern: As in the plan's line.
        kind: Class and number of modules.
        format: That it runs in.
        reason: Why that, or empty.
        gained: Time per step that the low format saves, or would.
        share: Its part of the plan's damage: bias and noise.
        data_noise: The data's noise in the same unit.
        own: Damage when it alone runs low, with the verdict.
        range: Magnitudes of its gradients.
        apart: Whether it is kept out of the plan's own format.
    """

    pattern: str
    kind: str
    format: str
    reason: str
    gained: str
    share: str
    data_noise: str
    own: str
    range: str
    apart: bool


def chosen(record: Record) -> Record | None:
    """The candidate that was chosen; fp32 where nothing was better, None where nothing was tried."""
    rows: Sequence[Record] = record["candidates"]
    for status in ("chosen", "baseline"):
        for row in rows:
            if row["status"] == status and (status == "chosen" or row["plan"] == record["plan"]):
                return row
    return None


def _baseline(record: Record) -> Record | None:
    return next((row for row in record["candidates"] if row["status"] == "baseline"), None)


def autocast_name(record: Record) -> str | None:
    """Name of the candidate that is one-line ``torch.autocast``, where it took part."""
    return next((row["name"] for row in record["candidates"] if row["plan"] == "bf16-mixed"), None)


def answer(record: Record) -> str:
    """The result in a sentence, also where the search ended before it had one."""
    if record["answer"]:
        return str(record["answer"])
    return f"The search ended before it could compare plans on {record['workload']}, so the plan is {record['plan']}."


def remarks(record: Record) -> list[str]:
    """Sentences that a reader should not miss: what is incomplete first."""
    out = []
    if not record["complete"]:
        out.append("The search was interrupted or ran out of its budget: this is what was known by then.")
    if (repeat := record["repeat"]) is not None and repeat > 0:
        out.append(
            f"The loss is not deterministic: fp32 repeated exactly differs from itself by a damage, the relative error of "
            f"an update, of {format_damage(repeat)}, below which nothing can be told."
        )
    return out + list(record["notes"])


# --- numbers ------------------------------------------------------------------------------------------------


def format_damage(value: float | None) -> str:
    """Damage to two digits; a value that is not finite has no number in a record."""
    if value is None:
        return "not finite"
    return "0" if value == 0 else f"{value:.2g}"


def format_number(value: float) -> str:
    """A large or small number: thousands in groups, else three digits."""
    return f"{value:,.0f}" if 1000 <= value < 1e15 else f"{value:.3g}"


def _speed(ratio: Record | None) -> str:
    if ratio is None or ratio["value"] is None:
        return "-"
    return f"{text.format_factor(ratio['value'])} ({text.interval(ratio).replace(' to ', '-')})"


def _step(time: Record | None) -> str:
    if time is None or time["median_s"] is None:
        return "-"
    size, unit = next(((s, u) for s, u in ((1.0, "s"), (1e-3, "ms")) if time["median_s"] >= s), (1e-6, "us"))
    half = (time["q3_s"] - time["q1_s"]) / 2 / size
    median = text.format_time(time["median_s"])
    number = median.split()[0]
    places = len(number.partition(".")[2])
    return f"{number} ±{half:.{places}f} {unit}"


def _damage(parity: Record | None) -> str:
    if parity is None:
        return "-"
    if parity["value"] is None:
        return "not finite"
    ends = [parity["low"], parity["high"]]
    if None in ends:
        return format_damage(parity["value"])
    said = [format_damage(end) for end in ends]
    return f"{format_damage(parity['value'])} ({(' to ' if 'e' in ''.join(said) else '-').join(said)})"


def plan_rows(record: Record) -> list[PlanRow]:
    """The plans that were considered, in the record's order.

    Returns:
        A row each.
    """
    base = _baseline(record)
    reference = base["peak_bytes"] if base else None
    out = []
    for row in record["candidates"]:
        peak = "-"
        if row["peak_bytes"] is not None:
            peak = text.format_bytes(row["peak_bytes"])
            if reference and row is not base:
                peak += f" ({row['peak_bytes'] / reference - 1:+.0%})".replace("%", " %")
        parity = row["parity"]
        out.append(
            PlanRow(
                name=row["name"],
                status=row["status"],
                reason=row["reason"] or (parity["reason"] if parity else ""),
                step=_step(row["time"]),
                speed="1" if row["status"] == "baseline" and row["time"] else _speed(row["speedup"]),
                autocast=_speed(row["versus_autocast"]),
                peak=peak,
                verdict=parity["verdict"] if parity else "-",
                damage=_damage(parity),
                loss="-" if row["loss"] is None else text.format_loss(row["loss"]),
            )
        )
    return out


def region_rows(record: Record) -> list[RegionRow]:
    """The model's regions, in the model's order.

    Returns:
        A row each.
    """
    formats = [row["format"] for row in record["regions"]]
    usual = re.split(r"[^\w]", record["plan"], maxsplit=1)[0]
    if usual not in formats and formats:
        usual = max(sorted(set(formats)), key=formats.count)
    out = []
    for row in record["regions"]:
        slow, fast = row["time_fp32_s"], row["time_low_s"]
        gained = "-"
        if slow is not None and fast is not None:
            saved = slow - fast
            sign = "-" if saved < 0 else ""
            gained = f"{sign}{text.format_time(abs(saved))}" if saved else "0"
            if slow and fast:
                gained += f" ({text.format_factor(slow / fast)})"
        parts = [row["bias"], row["noise"]]
        share = "-" if None in parts else " / ".join(map(format_damage, parts))
        own = "-"
        if row["damage"] is not None:
            own = f"{format_damage(row['damage']['value'])} ({row['damage']['verdict']})"
        ends = [row["grad_smallest"], row["grad_largest"]]
        modules = f"{row['kind']}" + (f" x{row['modules']}" if row["modules"] != 1 else "")
        out.append(
            RegionRow(
                pattern=row["pattern"] or "(the model itself)",
                kind=modules,
                format=row["format"],
                reason=row["reason"],
                gained=gained,
                share=share,
                data_noise="-" if row["data_noise"] is None else format_damage(row["data_noise"]),
                own=own,
                range="-" if None in ends else " to ".join(f"{v:.1e}" for v in ends),
                apart=row["format"] != usual,
            )
        )
    return out


# --- sentences ----------------------------------------------------------------------------------------------


def facts(record: Record) -> list[tuple[str, str, str]]:
    """The chosen plan's numbers: what it is, the number, what makes it firm; unmeasured ones left out."""
    row = chosen(record)
    if row is None:
        return []
    out = []
    pairs = (("over fp32", row["speedup"]), ("over one-line torch.autocast", row["versus_autocast"]))
    for label, ratio in pairs:
        if ratio is not None and ratio["value"] is not None:
            firm = f"{ratio['level'] * 100:.3g} % interval {text.interval(ratio)}"
            out.append((f"speed {label}", text.format_factor(ratio["value"]), firm))
    if row["time"] is not None:
        out.append(("a training step", text.format_time(row["time"]["median_s"]), f"{row['rounds']} rounds"))
    if row["peak_bytes"] is not None:
        base = _baseline(record)
        other = base["peak_bytes"] if base else None
        against = f"{text.share(row['peak_bytes'], other)} than fp32" if other else ""
        against = against.replace("as much than", "as much as")
        out.append(("peak memory", text.format_bytes(row["peak_bytes"]), "" if row is base else against))
    if row["parity"] is not None:
        out.append((
            "gradients",
            row["parity"]["verdict"],
            f"damage {_damage(row['parity'])}, the relative error of an update",
        ))
    return out


def interval_note(record: Record) -> str:
    """What the numbers in the tables are."""
    ratios = [row["speedup"] for row in record["candidates"] if row["speedup"]]
    level = min((ratio["level"] for ratio in ratios), default=0.95) * 100
    low, high = lines(record)
    return (
        f"Times are medians ± half the interquartile range of interleaved rounds; speeds come with their {level:.3g} % "
        "interval from rounds that both plans ran, and an interval that contains 1 is a tie. Damage is "
        f"{MEANING}, with its 95 % interval: below {low:g} passes, above {high:g} fails, between the two is undecided."
    )


def lines(record: Record) -> tuple[float, float]:
    """The damage below which a plan passes, and above which it fails; the parity test's, where a record says none."""
    return record["lines"].get("pass", PASS), record["lines"].get("fail", FAIL)


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
            f"No loss scale holds both in fp16: below {format_number(low)} the small ones underflow, above {format_number(high)} the large "
            "ones overflow."
        )
    else:
        out.append(f"fp16 holds both with a loss scale from {format_number(low)} to {format_number(high)}.")
    out.append(f"Training in fp16 starts with a loss scale of {format_number(init)}, well below overflow.")
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


def stage_rows(record: Record) -> list[tuple[str, str, str, str]]:
    """What the search did: stage, time, forward/backwards on numerics, timed steps; the sum last."""
    stages = record["stages"]
    if not stages:
        return []

    def count(value: int) -> str:
        return f"{value:,}" if value else "-"

    rows = [(s["name"], text.format_time(s["time_s"]), count(s["passes"]), count(s["steps"])) for s in stages]
    sums = [sum(s[key] for s in stages) for key in ("time_s", "passes", "steps")]
    return [*rows, ("in all", text.format_time(sums[0]), count(sums[1]), count(sums[2]))]


def settings(record: Record) -> list[tuple[str, str]]:
    """What was asked for, as pairs of name and value."""
    out = [("goal", record["goal"]), ("formats", ", ".join(record["formats"]))]
    for key, value in record["settings"].items():
        said = {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
        if said is not None:
            out.append((
                key.removesuffix("_s").replace("_", " "),
                f"{said} s" if key.endswith("_s") else str(said),
            ))
    for key, label in (
        ("floor", "fp32's own rounding"),
        ("repeat", "fp32 repeated"),
    ):
        if record[key] is not None:
            out.append((label, format_damage(record[key])))
    return out
