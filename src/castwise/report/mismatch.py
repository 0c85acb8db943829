"""Show a comparison of the log-probabilities of training and serving, in the terminal and as a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from castwise.report import words
from castwise.report.grids import Columns, Grid, Line
from castwise.report.mismatch_plots import PICTURES

__all__ = ["PICTURES", "lines", "values"]

Record = Mapping[str, Any]
_TOLD = 5
"""Largest number of tokens shown in the terminal, the largest differences first."""


def lines(record: Record) -> list[Grid | Line]:
    """Return the answer and the numbers of each plan, for the terminal."""
    return [
        Line(headline(record), "bold"), Line(), *grids(record), _tokens(record, _TOLD), Line(meaning(record), "dim"),
        Line(words.where(record), "dim"),
    ]  # fmt: skip


def values(record: Record) -> dict[str, Any]:
    """Return the values for the page's template, by name."""
    return {
        "answer": headline(record),
        "grids": grids(record),
        "worst": _tokens(record),
        "meaning": meaning(record),
    }


def headline(record: Record) -> str:
    """Say how far training and serving differ under the plan with the largest difference, and which plans do not differ."""
    train, clip = record["words_train"], record["clip"]
    same = [row["words"] for row in record["serve"] if row["max_abs"] == 0.0]
    off = [row for row in record["serve"] if row["max_abs"] != 0.0]
    said = []
    if off:
        row = max(off, key=lambda row: float("inf") if row["mean_abs"] is None else row["mean_abs"])
        most = ", which differs most," if len(off) > 1 else ""
        said.append(
            f"Between training under {train} and serving under {row['words']}{most} a token's log-probability differs by "
            f"{_digits(row['mean_abs'])} nats on average and by at most {_digits(row['max_abs'])} nats; {_percent(row['clipped'])} of the "
            f"ratios are outside of {clip[0]:g} to {clip[1]:g}, and the effective sample size is {_percent(row['effective'])} of the tokens "
            f"and {_percent(row['effective_sequences'])} of the sequences."
        )
    if same:
        said.append(
            f"Served under {words.listed(same)}, every token has exactly the same probability as under {train}."
        )
    return " ".join(said)


def grids(record: Record) -> list[Grid]:
    """Return tables of differences, ratios and KL divergences, with one row for each serving plan."""
    rows = record["serve"]

    def digits(key: str) -> Any:
        return lambda row: _digits(row[key])

    def percent(key: str) -> Any:
        return lambda row: _percent(row[key])

    def level(key: str) -> Any:
        return lambda row: _digits(row["ratio"][key])

    distance: Columns = {
        "plan": "words", "mean nats": digits("mean_abs"), "most nats": digits("max_abs"), "other likeliest": percent("argmax"),
    }  # fmt: skip
    ratios: Columns = {
        "plan": "words", "r, 1\N{NO-BREAK SPACE}%": level("0.01"), "50\N{NO-BREAK SPACE}%": level("0.5"),
        "99\N{NO-BREAK SPACE}%": level("0.99"), "clipped": percent("clipped"), "effective": percent("effective"), "clipped sequences": percent("clipped_sequences"),
        "effective sequences": percent("effective_sequences"),
    }  # fmt: skip
    kl: Columns = {
        "plan": "words",
        "exact": digits("kl"),
        "k1": digits("k1"),
        "k2": digits("k2"),
        "k3": digits("k3"),
    }
    titles = (
        "Log-probabilities, serving against training",
        "Ratios train / serve",
        "KL(serve || train), nats per token",
    )
    return [
        Grid.of(title, rows, columns) for title, columns in zip(titles, (distance, ratios, kl), strict=True)
    ]


def _tokens(record: Record, count: int | None = None) -> Grid:
    columns: Columns = {
        "plan": "plan",
        **({"rank": "rank"} if record.get("ranks", 1) > 1 else {}),
        "batch": "batch",
        "row": "row",
        "position": "position",
        "token": "token",
        "train": lambda token: f"{token['train']:.4f}",
        "serve": lambda token: f"{token['serve']:.4f}",
    }
    rows = [
        token | {"plan": row["words"]}
        for row in record["serve"]
        for token in row["worst"][:count]
        if row["max_abs"] != 0.0
    ]
    return Grid.of("Tokens that differ most", rows, columns)


def meaning(record: Record) -> str:
    """Explain the numbers in the tables."""
    drawn = (
        "drawn from the serving plan's probabilities at each position, so that k1 and k3 are unbiased"
        if record["tokens"] == "sampled"
        else "those of the batches; k1 and k3 are unbiased if the serving side sampled them"
    )
    return (
        f"{record['count']:,} tokens in {record['sequences']:,} sequences, {drawn}. nats: differences of natural logarithms; 0.01 nats are "
        "a 1 % difference of the probability. other likeliest: positions where the two plans give the highest probability to "
        "different tokens. "
        "Ratios are r = p(train) / p(serve) per token, and the product over tokens per sequence, with quantiles at 1, 50 and "
        "99 %; clipped: those outside PPO's clip range. k1 = -log r, k2 = (log r)^2 / 2, k3 = (r - 1) - log r (Schulman "
        "2020); exact is "
        "from all "
        "logits. Effective: (sum r)^2 / sum r^2 over their number (Kish 1965)."
    )


def _digits(value: float | None) -> str:
    return "not finite" if value is None else "0" if value == 0 else f"{value:.3g}"


def _percent(share: float | None) -> str:
    if share is None:
        return "not finite"
    return f"{100 * share:.3g} %"
