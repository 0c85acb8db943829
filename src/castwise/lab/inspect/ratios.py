"""Compute importance ratios of tokens and their statistics.

The importance ratio of a token is r = p_train / p_serve. KL(serve || train) is estimated from tokens that the serving side sampled,
as the mean of k1, k2 or k3. k1 = -log r is unbiased with high variance. k2 = (log r)**2 / 2 is biased with low variance.
k3 = (r - 1) - log r is unbiased with low variance and never negative.

Source: J. Schulman, "Approximating KL Divergence" (2020), for k1, k2 and k3; PPO (arXiv 1707.06347) for the clip range; Kish (1965) for
the effective sample size, (sum w)**2 / sum w**2 over the number of weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from castwise.core.plans.plan import Plan
from castwise.lab.inspect.runs import in_fp64

QUANTILES = (0.001, 0.01, 0.05, 0.5, 0.95, 0.99, 0.999)
BINS = 16
"""Number of groups into which the sequence positions are divided."""
WORST = 10


@dataclass(frozen=True)
class Token:
    """One token, its place in the batches, and its log-probabilities in training and serving.

    Attributes:
        batch: The number of the batch on its rank.
        row: The row in the batch.
        position: The position among the predicted tokens. Position 0 is the first token that has a context.
        token: The token id.
        train: The log-probability under the training plan.
        serve: The log-probability under the serving plan.
        rank: The rank that the batch belongs to, if there are several processes. It is 0 for one process.
    """

    batch: int
    row: int
    position: int
    token: int
    train: float
    serve: float
    rank: int = 0


@dataclass(frozen=True)
class ServeMismatch:
    """The differences between the token probabilities of one serving plan and of the training plan.

    The importance ratio of a token is r = p_train / p_serve, where p is the token's probability under a plan.
    KL(serve || train) is the Kullback-Leibler divergence of the serving plan's probabilities from the training
    plan's.

    Attributes:
        plan: The serving plan.
        mean_abs: The mean of ``|log p_train - log p_serve|`` over tokens, in nats.
        max_abs: The largest ``|log p_train - log p_serve|``, in nats.
        log_ratio: Quantiles of log r = log p_train - log p_serve, by their level.
        ratio: Quantiles of r, by their level.
        clipped: The share of tokens whose r is outside the clip range.
        clipped_sequences: The share of sequences whose product of r over their tokens is outside the clip range.
        effective: The effective sample size of the tokens with r as weights, as a share of the number of tokens.
        effective_sequences: The effective sample size of the sequences with the products of r as weights, as a share
            of the number of sequences.
        k1: The mean of -log r, an estimate of KL(serve || train) in nats per token. It is unbiased for tokens that
            the serving plan sampled.
        k2: The mean of (log r)**2 / 2, a biased estimate of the same divergence with low variance.
        k3: The mean of (r - 1) - log r, another estimate. It is unbiased for tokens that the serving plan sampled,
            and never negative.
        kl: The exact KL(serve || train), computed from all logits at each position and averaged over positions.
        argmax: The share of positions at which the most likely token differs between the plans.
        by_position: The mean of ``|log r|`` in each of at most 16 equal parts of the sequence, in order.
        worst: The tokens with the largest ``|log r|``.
    """

    plan: Plan
    mean_abs: float
    max_abs: float
    log_ratio: Mapping[str, float]
    ratio: Mapping[str, float]
    clipped: float
    clipped_sequences: float
    effective: float
    effective_sequences: float
    k1: float
    k2: float
    k3: float
    kl: float
    argmax: float
    by_position: tuple[float, ...]
    worst: tuple[Token, ...]


class Sums:
    """Collects the results of each token for one serving plan, and computes the statistics.

    Of the logits only log-probabilities and KL divergences are kept.

    Args:
        plan: The serving plan.
        clip: The range of r that is not clipped.
        size: Number of processes; batch ``i`` is on rank ``i % size``.
    """

    def __init__(self, plan: Plan, clip: tuple[float, float], size: int = 1) -> None:
        self._plan, self._clip, self._size = plan, clip, size
        self._rows: list[Tensor] = []  # batch, row, position, token, train, serve, KL, other likeliest: fp64
        self.count = self.sequences = 0

    def take(self, at: int, train: Tensor, serve: Tensor, tokens: Tensor, mask: Tensor | None) -> None:
        """Record the tokens of a batch; ``at`` is the number of the batch among the batches of all processes."""
        for row in range(len(tokens)):  # one row at a time, since fp64 needs memory
            keep = torch.ones_like(tokens[row], dtype=torch.bool) if mask is None else mask[row]
            positions = keep.nonzero()[:, 0]
            if not len(positions):
                continue
            ours, theirs = (
                torch.log_softmax(in_fp64(logits[row, positions]), -1) for logits in (train, serve)
            )
            kl = (theirs.exp() * torch.where(theirs == -math.inf, 0.0, theirs - ours)).sum(-1)
            other = train[row, positions].argmax(-1) != serve[row, positions].argmax(-1)
            token = tokens[row, positions].to(ours.device)
            chosen = (logs.gather(-1, token[:, None])[:, 0] for logs in (ours, theirs))
            places = (torch.full_like(positions, number) for number in (at, row))
            columns = [*places, positions, token, *chosen, kl, other]
            self._rows.append(torch.stack([column.cpu().double() for column in columns], 1))
            self.count += len(positions)
            self.sequences += 1

    def __iadd__(self, other: Sums) -> Self:
        """Add the records of another process."""
        self._rows += other._rows
        self.count += other.count
        self.sequences += other.sequences
        return self

    def result(self) -> ServeMismatch:
        """Return the statistics of all recorded tokens."""
        all_rows = torch.cat(self._rows)
        batch, row, position, token, ours, theirs, kl, other = all_rows.unbind(1)
        log_ratio = ours - theirs
        ratio = log_ratio.exp()
        _, sequence = torch.unique(torch.stack([batch, row], 1), dim=0, return_inverse=True)
        whole = torch.zeros(int(sequence.max()) + 1, dtype=torch.float64, device="cpu").index_add_(
            0, sequence, log_ratio
        )
        worst = log_ratio.abs().argsort(descending=True)[:WORST].tolist()
        levels = torch.tensor(QUANTILES, dtype=torch.float64, device="cpu")
        return ServeMismatch(
            plan=self._plan,
            mean_abs=float(log_ratio.abs().mean()),
            max_abs=float(log_ratio.abs().max()),
            log_ratio=_by_level(_quantiles(log_ratio, levels)),
            ratio=_by_level(_quantiles(ratio, levels)),
            clipped=_outside(ratio, self._clip),
            clipped_sequences=_outside(whole.exp(), self._clip),
            effective=effective_share(log_ratio),
            effective_sequences=effective_share(whole),
            k1=float((-log_ratio).mean()),
            k2=float((0.5 * log_ratio.square()).mean()),
            k3=float((torch.expm1(log_ratio) - log_ratio).mean()),
            kl=float(kl.mean()),
            argmax=float(other.mean()),
            by_position=_along(position, log_ratio.abs()),
            worst=tuple(
                Token(
                    batch=int(batch[at]) // self._size,
                    row=int(row[at]),
                    position=int(position[at]),
                    token=int(token[at]),
                    train=float(ours[at]),
                    serve=float(theirs[at]),
                    rank=int(batch[at]) % self._size,
                )
                for at in worst
            ),
        )


def effective_share(log_weights: Tensor) -> float:
    """Return the effective sample size of weights as a share of their number, from the logarithms of the weights.

    It is (sum w)**2 / sum w**2, divided by the number of weights n: 1 if all weights are equal, 1/n if one weight dominates.

    Source: Kish, Survey Sampling (1965).
    """
    weights = (log_weights - log_weights.max()).exp()
    return float(weights.sum().square() / weights.square().sum() / len(weights))


def _quantiles(values: Tensor, levels: Tensor) -> Tensor:
    """Return quantiles by linear interpolation; ``torch.quantile`` accepts at most 16 million values."""
    ordered = values.sort().values
    at = levels * (len(ordered) - 1)
    low = at.floor().long()
    high = at.ceil().long()
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def _by_level(values: Tensor) -> dict[str, float]:
    return {f"{level:g}": float(value) for level, value in zip(QUANTILES, values, strict=True)}


def _outside(ratio: Tensor, clip: tuple[float, float]) -> float:
    return float(((ratio < clip[0]) | (ratio > clip[1])).double().mean())


def _along(position: Tensor, values: Tensor) -> tuple[float, ...]:
    """Return the means of values in equal parts of the sequence; NaN for a part without values."""
    parts = min(BINS, int(position.max()) + 1)
    at = (position * parts / (position.max() + 1)).long()
    sums, counts = (
        torch.zeros(parts, dtype=torch.float64, device="cpu").index_add_(0, at, v)
        for v in (values, torch.ones_like(values))
    )
    return tuple((sums / counts).tolist())
