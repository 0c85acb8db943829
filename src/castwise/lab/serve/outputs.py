"""Name a model's outputs, decide what each is for, and measure how they differ between two runs of one batch.

An output is of one of four kinds, unless the user names another:

- ``integers``: integers and booleans. A changed element is a changed decision.
- ``scores``: floating, of shape ``[batch]`` or ``[batch, 1]``. They rank samples.
- ``logits``: floating, of shape ``[batch, classes]`` or ``[batch, positions, classes]`` with at least two classes. The largest
  of a row decides. Outputs whose names say that they are states or embeddings (:data:`STATES`) are no logits.
- ``values``: all others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from castwise.core.casting.trees import contents
from castwise.core.devices import widest_dtype

Kind = Literal["logits", "scores", "values", "integers"]
KINDS: tuple[str, ...] = get_args(Kind)
STATES = ("hidden", "state", "embed", "feature", "pooler", "attention", "past_key_values")
"""Parts of names of outputs that are no logits, whatever their shape."""
MASKED = 1e30
"""A value of fp32 at least this large is a mask's: under a plan it need only stay about as large, or as large as fp16 can be."""
STILL_MASKED = 6e4
"""A value under a plan at least this large masks what fp32 masks. fp16 ends at 65504."""
LOWEST = -9999.0
"""The lowest value of an output is a mask's, too, if several elements have it and it is at most this."""
MOST_ELEMENTS = 1 << 22
"""A larger output is represented by this many of its elements, in rows drawn at random."""
TOP = 5


def named_outputs(value: Any, left_out: dict[str, str] | None = None) -> dict[str, Tensor]:
    """Return the tensors in nested outputs by name, such as ``logits`` or ``hidden_states.0``; a bare tensor is ``output``.

    A tensor that occurs twice has both names, since a cast makes two of it. Arrays of NumPy, numbers and lists of numbers become
    tensors. Sparse, nested and quantised tensors become dense; nested ones are padded with zeros.

    Args:
        value: What a model returned.
        left_out: Filled with the names of objects that may hold tensors and cannot be read, and the names of their classes.
    """
    found: dict[str, Tensor] = {}

    def walk(one: Any, at: str, around: tuple[Any, ...]) -> None:
        if isinstance(one, Tensor):
            found[at or "output"] = _dense(one)
        elif isinstance(one, (np.ndarray, np.generic)) and _is_plain(one):
            found[at or "output"] = torch.from_numpy(np.array(one))
        elif isinstance(one, _NUMBERS) or (
            isinstance(one, (list, tuple)) and one and all(map(_is_number, one))
        ):
            found[at or "output"] = torch.tensor(one, device="cpu")
        elif (inner := contents(one)) is not None:
            if not any(one is outer for outer in around):
                for key, item in inner:
                    walk(item, f"{at}.{key}" if at else str(key), (*around, one))
        elif left_out is not None and one is not None:
            left_out[at or "output"] = type(one).__name__

    walk(value, "", ())
    return found


_NUMBERS = bool, int, float, complex


def _is_number(value: Any) -> bool:
    return isinstance(value, _NUMBERS)


def _is_plain(array: Any) -> bool:
    """Whether an array or a scalar of NumPy holds numbers that torch has, and no mask."""
    return array.dtype.kind in "biufc" and not isinstance(array, np.ma.MaskedArray)


def _dense(output: Tensor) -> Tensor:
    if output.is_nested:
        padded: Tensor = torch.nested.to_padded_tensor(output.detach(), 0.0)
        return padded
    if output.layout != torch.strided:
        return output.detach().to_dense()
    return output.dequantize() if output.is_quantized else output


def kind_of(name: str, output: Tensor) -> Kind:
    """Return what an output is for, from its dtype, its shape and its name."""
    if output.is_complex():
        return "values"
    if not output.is_floating_point():
        return "integers"
    if output.dim() == 1 or (output.dim() == 2 and output.shape[1] == 1):
        return "scores"
    if output.dim() in (2, 3) and output.shape[-1] > 1 and not any(word in name.lower() for word in STATES):
        return "logits"
    return "values"


def sampled(output: Tensor, kind: Kind) -> Tensor:
    """Return a detached copy of an output: logits as rows ``[rows, classes]``, others flat.

    Of an output with more than ``MOST_ELEMENTS`` elements, rows are drawn at random, the same for the same shape.
    """
    if output.is_complex():
        output = torch.view_as_real(output.resolve_conj())
    rows = output.detach().reshape(-1, output.shape[-1] if kind == "logits" else 1)
    if rows.numel() > MOST_ELEMENTS:
        generator = torch.Generator().manual_seed(len(rows))
        count = max(1, MOST_ELEMENTS // rows.shape[1])
        rows = rows[
            torch
            .randint(len(rows), (count,), generator=generator, device="cpu")
            .sort()
            .values.to(rows.device)
        ]
    return rows.clone() if kind == "logits" else rows.reshape(-1).clone()


@dataclass
class Difference:
    """How an output of one batch differs from fp32's.

    Attributes:
        elements: Number of elements compared by value.
        error: Sum of squared differences, of elements that are finite in both runs.
        signal: Sum of squares of fp32's output.
        nonfinite: Number of elements that are NaN, or infinite where fp32's are finite.
        masked: Number of elements that are infinite in fp32, or a mask's.
        lost: Number of these that are neither that large nor NaN, or have another sign.
        reshaped: Whether the shape differs. All elements then count as changed.
        decisions: Number of rows of logits, or of integers.
        changed: Number of changed decisions: of the largest of a row of logits, or of integers.
        unexplained: Number of changed decisions between classes that rounding does not bring together.
        top: Number of rows whose five largest logits changed; None if they have at most five classes.
        divergence: KL divergence of each row of logits from fp32's, in nats.
        noise: For each row of logits, the largest of the root mean square difference in the row and that in the batch.
        output: The scores; None for other kinds.
    """

    elements: int = 0
    error: float = 0.0
    signal: float = 0.0
    nonfinite: int = 0
    masked: int = 0
    lost: float = 0
    reshaped: bool = False
    decisions: int = 0
    changed: float = 0
    unexplained: int = 0
    top: int | None = None
    divergence: Tensor | None = None
    noise: Tensor | None = None
    output: Tensor | None = None


def difference(fp32: Tensor, other: Tensor, kind: Kind, reach: Tensor | None = None) -> Difference:
    """Measure how an output differs from fp32's.

    Args:
        fp32: fp32's output, from :func:`sampled`.
        other: The same output in another run, also from :func:`sampled`.
        kind: What the output is for.
        reach: For each row of logits, the margin between classes up to which rounding explains a change.
    """
    if fp32.shape != other.shape:
        return reshaped(fp32, kind)
    wide = widest_dtype(fp32.device)
    x, y = fp32.to(wide), other.to(wide)
    if kind == "integers":
        changed, error = int((fp32 != other).sum()), float((y - x).square().sum())
        return Difference(
            fp32.numel(), error, float(x.square().sum()), decisions=fp32.numel(), changed=changed
        )
    counts = _compared(x)
    bad = (counts & ~y.isfinite()) | y.isnan()
    kept = (y.abs() >= (0.9 * x.abs()).clamp_max(STILL_MASKED)) & (y.sign() == x.sign())
    delta = torch.where(counts & ~bad, y - x, 0.0)
    found = Difference(
        int(counts.sum()),
        float(delta.square().sum()),
        float(torch.where(counts, x, 0.0).square().sum()),
        int(bad.sum()),
        int((~counts).sum()),
        int((~counts & ~bad & ~kept).sum()),
    )
    if kind == "scores":
        found.output = y
    if kind != "logits":
        return found
    row = (delta.square().sum(1) / counts.sum(1).clamp_min(1)).sqrt()
    found.noise = row.clamp_min(float(delta.square().sum() / max(1, found.elements)) ** 0.5)
    y = torch.where(y.isnan(), -math.inf, y)
    best, now = x.argmax(1, keepdim=True), y.argmax(1, keepdim=True)
    changed_rows = (best != now).squeeze(1)
    found.decisions, found.changed = len(x), int(changed_rows.sum())
    if reach is not None:
        margin = (x.gather(1, best) - x.gather(1, now)).squeeze(1)
        found.unexplained = int((changed_rows & (margin > reach)).sum())
    if x.shape[1] > TOP:
        ours, theirs = (each.topk(TOP, 1).indices.sort(1).values for each in (x, y))
        found.top = int((ours != theirs).any(1).sum())
    p, q = _log_probabilities(x), _log_probabilities(y)
    found.divergence = (torch.where(p > -math.inf, p.exp() * (p - q), 0.0)).sum(1).clamp_min(0.0)
    return found


def _compared(x: Tensor) -> Tensor:
    """Return which elements of fp32's output are compared by value: those that are finite and no mask's."""
    counts = x.isfinite() & (x.abs() < MASKED)
    if counts.any() and (lowest := float(x[counts].min())) <= LOWEST and int((x == lowest).sum()) > 1:
        counts &= x != lowest
    return counts


def compared(fp32: Tensor, kind: Kind) -> int:
    """Return how many elements of fp32's output say anything."""
    return fp32.numel() if kind == "integers" else int(_compared(fp32.to(widest_dtype(fp32.device))).sum())


def rare(fp32: Tensor) -> int:
    """Return how many integers differ from the most frequent one: so many change if the output is lost as a whole."""
    if not fp32.numel():
        return 0
    some = fp32[:: max(1, fp32.numel() >> 16)]
    values, counts = some.unique(return_counts=True)
    return int((fp32 != values[counts.argmax()]).sum())


def mean_difference(found: Sequence[Difference]) -> Difference:
    """Return the mean of several differences of one output on one batch: numbers of changes too, which then need not be whole."""
    noises = [each.noise for each in found if each.noise is not None]
    return dataclasses.replace(
        found[0],
        error=math.fsum(each.error for each in found) / len(found),
        changed=math.fsum(each.changed for each in found) / len(found),
        lost=math.fsum(each.lost for each in found) / len(found),
        reshaped=any(each.reshaped for each in found),
        noise=torch.stack(noises).square().mean(0).sqrt() if noises else None,
    )


def reshaped(fp32: Tensor, kind: Kind) -> Difference:
    """Return the difference from an output of another shape: as large as fp32's output, with all decisions changed."""
    x = fp32.to(widest_dtype(fp32.device))
    signal = float(torch.where(_compared(x), x, 0.0).square().sum())
    decisions = len(fp32) if kind in ("logits", "integers") else 0
    return Difference(
        fp32.numel(), signal, signal, reshaped=True, decisions=decisions, changed=decisions, unexplained=decisions,
        noise=torch.full((len(fp32),), math.inf, device=fp32.device) if kind == "logits" else None,
    )  # fmt: skip


def _log_probabilities(rows: Tensor) -> Tensor:
    """Return log-probabilities of rows of logits, of log-probabilities, or of probabilities."""
    sums = rows.sum(1)
    if bool((rows >= 0).all()) and bool(((sums - 1).abs() < 0.05).all()):
        return (rows / sums.unsqueeze(1)).log()
    return rows.log_softmax(1)


def spread(fp32: Tensor, kind: Kind, centre: float = 0.0) -> float:
    """Return the sum of squared deviations of fp32's output from its mean: of each row of logits, or else from ``centre``."""
    x = fp32.to(widest_dtype(fp32.device))
    counts = _compared(x)
    x = torch.where(counts, x, 0.0)
    middle = x.sum(1, keepdim=True) / counts.sum(1, keepdim=True).clamp_min(1) if kind == "logits" else centre
    return float(torch.where(counts, x - middle, 0.0).square().sum())


def rank_correlation(one: Tensor, other: Tensor) -> float | None:
    """Return Spearman's correlation of two vectors of scores; None if one of them is constant or has fewer than 3 values."""
    ranks = [_ranks(scores) for scores in (one, other)]
    a, b = (rank - rank.mean() for rank in ranks)
    norm = float(a.norm() * b.norm())
    return float(a @ b) / norm if norm and len(a) > 2 else None


def _ranks(scores: Tensor) -> Tensor:
    """Return the ranks of scores, equal scores with their mean rank."""
    _, inverse, counts = scores.cpu().unique(return_inverse=True, return_counts=True)
    counts = counts.to(torch.float64)
    ranks: Tensor = (counts.cumsum(0) - (counts - 1) / 2)[inverse]
    return ranks
