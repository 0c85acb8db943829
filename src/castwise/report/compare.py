"""Show a comparison of two plans in the terminal and as a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from castwise.report import words
from castwise.report.compare_plots import PICTURES, label
from castwise.report.grids import Columns, Grid, Line
from castwise.report.parity import choices

__all__ = ["PICTURES", "lines", "values"]

Record = Mapping[str, Any]

SHOWN = 12
"""Largest number of calls that a table in the terminal shows."""
MEANING = (
    "Errors are relative: the norm of the difference over the norm under the first plan. error: the error of the call's "
    "results when each plan runs separately. came in: the error of its inputs. own: the error of its results when it gets the "
    "inputs of the first plan's run, which excludes earlier errors. x rounding: the own error over the error that rounding to "
    "the call's format explains, measured by moving its inputs and weights by half a unit in the last place."
)
EFFECTS = {
    "born": "an error that rounding to the format does not explain",
    "kernel": "the error comes from rounding inside torch's own kernel for the layer; it vanishes if the kernel rounds only its results",
    "amplifies": "conditioning: the call magnifies rounding errors",
    "rounding": "most of the error is the call's own rounding",
    "passes": "most of the error comes from the inputs",
    "exact": "no difference",
    "unseen": "nothing to compare",
}
_DIRECTIONS = ("forward", "backward")


def lines(record: Record) -> list[Grid | Line]:
    """Return the answer, the fixes that were tried, and the calls with the largest errors, for the terminal."""
    return _lines(record, lambda _effect: True)


def brief(record: Record) -> list[Grid | Line]:
    """Return the same as :func:`lines`, but without calls whose errors come from torch's own kernels.

    One line says how many modules have such calls.
    """
    return _lines(record, _is_models, " table(verbose=True) lists them.")


def _lines(record: Record, shows: Callable[[str], bool], more: str = "") -> list[Grid | Line]:
    said = in_kernels(record)
    return [
        Line(headline(record), "bold"),
        Line(ends(record)),
        *((Line(said + more),) if said else ()),
        Line(),
        *((tried(record), Line()) if record["tried"] else ()),
        *(_worst(record, direction, shows) for direction in _DIRECTIONS),
        *((choices(record["choices"]), Line()) if record["choices"] else ()),
        *(Line(note, "yellow") for note in record["notes"]),
        Line(MEANING, "dim"),
        Line(words.where(record), "dim"),
    ]


def values(record: Record) -> dict[str, Any]:
    """Return the values for the page's template, by name.

    The page lists all calls. Calls whose errors come from torch's own kernels are folded.
    """

    def grids(shows: Callable[[str], bool]) -> dict[str, Grid]:
        chosen = {d: [call for call in record["calls"] if shows(call[d]["effect"])] for d in _DIRECTIONS}
        return {direction: _calls(record, direction, calls) for direction, calls in chosen.items() if calls}

    return {
        "choices": choices(record["choices"]) if record["choices"] else None,
        "answer": headline(record), "ends": ends(record), "tried": tried(record) if record["tried"] else None,
        "grids": grids(_is_models), "folded": grids(lambda effect: not _is_models(effect)), "in_kernels": in_kernels(record),
        "notes": record["notes"], "meaning": MEANING, "effects": EFFECTS,
    }  # fmt: skip


def _is_models(effect: str) -> bool:
    return effect != "kernel"


def in_kernels(record: Record) -> str:
    """Say how many modules have errors that come from torch's own kernels, and name the largest; empty if none has."""
    sides = [
        (call, call[direction])
        for call in record["calls"]
        for direction in _DIRECTIONS
        if call[direction]["effect"] == "kernel"
    ]
    if not sides:
        return ""
    call, side = max(sides, key=lambda pair: _number(pair[1]["own"]))
    count = len({call["path"] for call, _ in sides})
    return (
        f"In {count} module{'s' * (count > 1)} errors come from rounding inside torch's own kernels, up to {_error(side['own'])} "
        f"({call['kind']} {label(call)}, {side['where']})."
    )


def headline(record: Record) -> str:
    """Say in which call an error arises, which choices (integers and masks) are wrong, and which inputs become equal."""
    wrong = [choice for choice in record["choices"] if choice["is_wrong"]]
    collapsed = record["collapsed"]
    said = [] if (wrong or collapsed) and not _born(record) else [_where_born(record)]
    if collapsed:
        said.append(f"{collapsed}.")
    if wrong:
        places = list(
            dict.fromkeys(f"{choice['what']} in {choice['path'] or 'the model'}" for choice in wrong)
        )
        said.append(
            f"Under {record['words_b']} integers or masks differ by more than rounding explains: {words.listed(places)}."
        )
    return " ".join(said)


def _where_born(record: Record) -> str:
    a, b = record["words_a"], record["words_b"]
    born = [
        (call, direction)
        for call in _born(record)
        for direction in _DIRECTIONS
        if call[direction]["effect"] == "born"
    ]
    if not born:
        if any(call["forward"]["own"] is None for call in record["calls"][1:]) and _all(record, "own", None):
            return f"{b} against {a}: the origin of the errors could not be determined."
        if not any(_number(call[d]["error"]) for call in record["calls"] for d in _DIRECTIONS):
            return f"{b} and {a} agree to the last bit."
        return f"Rounding explains every difference between {b} and {a}."
    first, direction = max(
        born, key=lambda pair: max(_number(pair[0][d]["excess"]) for d in _DIRECTIONS)
    )  # of the two directions of one call, the forward comes first
    side = first[direction]
    differs = (
        "is not finite"
        if side["own"] is None
        else f"differs by {_error(side['own'])}, {side['excess']:.3g} times what rounding to {first['format']} explains"
    )
    where = f" on rank {side['rank']}" if side.get("rank") is not None else ""
    place = f"{label(first)}, {direction}{where}"
    said = f"Under {b} an error arises in {place}: given its inputs from the run under {a}, its {side['where']} {differs}."
    others = [label(call) for call, _ in born if call is not first]
    others = list(dict.fromkeys(others))
    if others:
        more = f" and {len(others) - 4} more" if len(others) > 4 else ""
        said += (
            f" The same holds for {words.listed(others[:4]) if not more else ', '.join(others[:4]) + more}."
        )
    return said


def ends(record: Record) -> str:
    """Say by how much the loss, the outputs and the gradients differ at the end."""
    one, other = record["losses"]
    said = f"At the end: loss {words.loss(one)} and {words.loss(other)}"
    parts = [f"which differ by {_error(record['loss_error'])}" if record["loss_error"] else ""]
    parts += [
        f"{what} differ by {_error(record[key])}"
        for what, key in (("outputs", "output_error"), ("gradients", "gradient_error"))
        if record[key] is not None
    ]
    scale = f" The loss scale was {record['loss_scale']:g}." if record["loss_scale"] else ""
    return ", ".join([said, *filter(None, parts)]) + f".{scale}"


def tried(record: Record) -> Grid:
    """Return a table of the errors at the end if one module at a time runs in the first plan's format."""
    columns: Columns = {
        "plan": "words",
        "loss": lambda tried: _error(tried["loss_error"]),
        "outputs": lambda tried: _error(tried["output_error"]),
        "gradients": lambda tried: _error(tried["gradient_error"]),
    }
    whole = {
        "words": record["words_b"], "loss_error": record["loss_error"], "output_error": record["output_error"],
        "gradient_error": record["gradient_error"], "reason": "",
    }  # fmt: skip
    rows = [whole, *record["tried"]]
    return Grid.of(
        "Errors at the end, with one module in the first plan's format",
        rows,
        columns,
        why=lambda tried: tried["reason"],
    )


def _worst(record: Record, direction: str, shows: Callable[[str], bool]) -> Grid:
    """Return a table of the calls whose errors are furthest above rounding in a direction, in the order in which they ran."""
    order = {id(call): at for at, call in enumerate(record["calls"])}
    known = [
        call
        for call in record["calls"]
        if (effect := call[direction]["effect"]) not in ("exact", "unseen") and shows(effect)
    ]
    by = sorted(
        known,
        key=lambda call: (call[direction]["effect"] != "born", -_number(call[direction]["excess"])),
    )
    chosen = sorted(by[:SHOWN], key=lambda call: order[id(call)])
    grid = _calls(record, direction, chosen)
    left = len(record["calls"]) - len(chosen)
    title = f"{direction.capitalize()}{f', the {len(chosen)} calls furthest above the error of rounding' if left else ''}"
    return Grid(title, grid.header, grid.rows)


def _calls(record: Record, direction: str, calls: Sequence[Record]) -> Grid:
    def of(key: str) -> Any:
        return lambda call: _error(call[direction][key])

    columns: Columns = {
        "module": label,
        "error": of("error"),
        "came in": of("incoming"),
        "own": of("own"),
        "x rounding": lambda call: (
            f"{_number(call[direction]['excess']):.2f}" if call[direction]["own"] is not None else None
        ),
        "effect": lambda call: call[direction]["effect"],
    }
    if record.get("ranks", 1) > 1:
        columns = {**columns, "rank": lambda call: str(call[direction]["rank"])}
    return Grid.of(
        direction.capitalize(), calls, columns, lambda call: "stopped" if call[direction]["effect"] == "born" else "",
        lambda call: ", ".join(filter(None, (call["kind"], call["format"], _where(call[direction]["where"])))),
    )  # fmt: skip


def _where(where: str) -> str:
    return where if where.startswith("the ") or not where else f"its {where}"


def _born(record: Record) -> list[Record]:
    named = {tuple(birth) for birth in record["birthplaces"]}
    return [call for call in record["calls"] if (call["path"], call["call"]) in named]


def _all(record: Record, key: str, value: Any) -> bool:
    return all(call[direction][key] == value for call in record["calls"] for direction in _DIRECTIONS)


def _number(value: float | None) -> float:
    return value or 0.0


def _error(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"
