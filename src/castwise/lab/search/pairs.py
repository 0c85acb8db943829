"""Compare short training runs of a plan with fp32's, paired by seed, in a test of non-inferiority.

Each pair gives one difference: the loss under the plan minus the loss in fp32, averaged over the last steps. The plan is *not
worse* if the upper 95 % bound of the mean difference is below a margin. The margin is a fixed share of the decrease of fp32's
loss. It is what plans cost whose gradients pass the gradient test. A constant that is added to the loss changes neither the
difference nor the margin. No run can show that two plans are equal, so the smallest detectable difference is reported too.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Sequence

import torch

from castwise.core.plans.plan import PRESETS, Plan
from castwise.errors import LossScaleError, NonFiniteError, PlanError
from castwise.lab.parity.parity import COMPARABLE, ParityResult
from castwise.lab.search.evidence import Verification
from castwise.lab.timing.ranks import BY_ITSELF, Lockstep
from castwise.lab.timing.runners import TrainingRun
from castwise.lab.workloads.workload import Workload

FEWEST, MOST, LATE = 20, 100, 500
"""Fewest and most steps of the training runs that decide about a plan whose gradients leave it in doubt. ``LATE`` is the most
for a plan without masters, which can do harm late."""
DOUBT = 30.0
"""Training runs may accept a plan whose damage is at most this many times the pass threshold, or 3 times the fail threshold."""
LAST = 0.2
"""Share of the steps of a run, at its end, whose losses count."""
MARGIN = 0.0056
"""Share of the decrease of fp32's loss by which a plan's loss may be worse than fp32's.

In the calibration, it is the largest loss of a format whose damage passes the gradient test. If the margin came from the spread
of a few short runs instead, it would grow with their noise.

Source: bench/results/calibration-cpu.json, by bench/bench_calibration.py.
"""
STRICT = 0.1
"""Share of the margin by which a plan without masters may be known to be worse. What rounding drops adds up, so that harm grows
with the length of a training."""
_T95 = (
    6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740,
    1.734, 1.729, 1.725, 1.721, 1.717, 1.714, 1.711, 1.708, 1.706, 1.703, 1.701, 1.699,
)  # fmt: skip
"""One-sided 95 % points of Student's t for 1, 2, ... degrees of freedom."""
_FALL = (0.1 ** (1 / 5),) * 5
"""Factors on the learning rates in each tenth of the second half of a run, for plans without masters: rounding drops more of smaller
updates."""
_POWER = 0.842
"""The 80 % quantile of the normal distribution."""


def train_pairs(
    workload: Workload,
    plan: Plan,
    device: torch.device,
    *,
    steps: int,
    seeds: int,
    first_seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    ranks: Lockstep = BY_ITSELF,
    until_hopeless: bool = False,
) -> Verification:
    """Train pairs of runs, one under the plan and one in fp32, from equal weights on equal batches, and judge their losses.

    For a plan without masters, the learning rates of both fall to a tenth in the second half, and known harm is judged more strictly
    (``STRICT``).

    Args:
        workload: The workload to train.
        plan: The plan to compare with fp32.
        device: The device to train on.
        steps: Number of steps of each run.
        seeds: Number of pairs.
        first_seed: Seed of the first pair.
        on_progress: Called with the number of pairs done and the total.
        ranks: The ranks that train together.
        until_hopeless: Whether to stop after half of the pairs or more if "not worse" has become impossible, even if the
            remaining pairs showed no difference.

    Raises:
        PlanError: Fewer than 5 steps or 2 seeds.
    """
    if steps < 5 or seeds < 2:
        raise PlanError(f"verify_steps={steps}, verify_seeds={seeds}: needs at least 5 steps and 2 seeds")
    last = max(1, round(LAST * steps))
    strict = plan.lacks_masters
    starts: list[float] = []
    reference: list[float] = []
    candidate: list[float] = []

    def margin() -> float:
        return MARGIN * max(0.0, statistics.fmean(starts) - statistics.fmean(reference))

    for number in range(seeds):
        on_progress(number, seeds)
        for one, ends in ((PRESETS["fp32"], reference), (plan, candidate)):
            with contextlib.closing(TrainingRun(workload, one, device, first_seed + number)) as run:
                ends.append(_end(run, steps, last, falls=strict))
                if ends is reference:
                    starts.append(run.losses[0] if run.losses else math.nan)
        if until_hopeless and seeds > number + 1 >= max(2, seeds / 2):
            hopeless = ranks.at("losses so far").worst(
                lambda: is_hopeless(reference, candidate, seeds, margin(), strict), bool
            )
            if hopeless:
                break
    on_progress(seeds, seeds)
    verdicts = ("not worse", "not shown", "worse")
    return ranks.at("the losses of training runs").worst(
        lambda: judge_losses(reference, candidate, steps, margin(), strict),
        lambda found: (verdicts.index(found.verdict), found.upper),
    )  # fmt: skip


def _end(run: TrainingRun, steps: int, last: int, falls: bool) -> float:
    """Train, and return the mean of the last losses. Return NaN if the run diverges, whatever exception it raises then.

    With ``falls``, the learning rates fall to a tenth in the second half, as in most trainings.
    """
    try:
        run.block(steps // 2 if falls else steps)
        for share in _FALL if falls else ():
            for group in run.optimizer.param_groups:
                if group.get("lr") is not None:  # Adafactor finds its own
                    group["lr"] *= share
            run.block(min(-(-steps // (2 * len(_FALL))), steps - len(run.losses)))
    except Exception as error:
        if not isinstance(error, (NonFiniteError, LossScaleError)) and all(map(math.isfinite, run.losses)):
            raise
        return math.nan
    return statistics.fmean(run.losses[-last:])


def is_doubtful(found: ParityResult) -> bool:
    """Whether a plan that failed the gradient test is so close to the thresholds that training runs may decide about it.

    The thresholds come from a few workloads, and gradients at fresh weights can show damage that disappears after some steps.
    """
    own = max(found.floor, found.repeat)
    near = found.severity <= DOUBT and own <= COMPARABLE * found.damage.value
    return (
        near and not found.strayed and not found.owners and not found.biased
    )  # training losses do not depend on running statistics, and a bias only shows in longer runs


def affordable_steps(room_s: float, a_pair_s: float, pairs: int, asked: int = 0, most: int = MOST) -> int:
    """Return how many steps each of ``2 * pairs`` training runs can have in ``room_s`` seconds; 0 if there is too little time.

    ``a_pair_s`` is the time of one step in fp32 and one step of the plan. ``asked`` is the requested number of steps; if it is
    0, ``most`` is the largest number.
    """
    steps = int(0.8 * room_s / (a_pair_s * pairs))  # building the models takes time too
    return min(asked or most, steps) if steps >= min(asked or FEWEST, FEWEST) else 0


def is_hopeless(
    reference: Sequence[float], candidate: Sequence[float], pairs: int, margin: float, strict: bool = False
) -> bool:
    """Whether the result cannot become "not worse" any more, even if the remaining pairs show no difference."""
    left = [0.0] * (pairs - len(reference))
    best = judge_losses([*reference, *left], [*candidate, *left], 0, margin, strict)
    return best.verdict != "not worse"


def judge_losses(
    reference: Sequence[float], candidate: Sequence[float], steps: int, margin: float, strict: bool = False
) -> Verification:
    """Judge pairs of final losses, after runs of this many steps.

    The verdict is ``not worse`` if the upper bound of the mean difference is not above the margin. It is ``worse`` if the lower
    bound is above the margin, or with ``strict`` above a tenth of it, or a loss of the plan is not finite. Else it is ``not shown``; so it is if a loss in fp32 is not
    finite, which leaves nothing to compare with.
    """
    differences = [c - r for c, r in zip(candidate, reference, strict=True)]
    n = len(differences)
    t = _T95[n - 2] if n - 2 < len(_T95) else 1.645
    if not all(map(math.isfinite, differences)):
        verdict = "worse" if all(map(math.isfinite, reference)) else "not shown"
        return Verification(steps, n, math.inf, math.inf, 0.0, 0.0, verdict)
    mean, error = statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(n)
    upper, lower = mean + t * error, mean - t * error
    worse = lower > (STRICT * margin if strict else margin)
    verdict = "worse" if worse else "not worse" if upper <= margin else "not shown"
    return Verification(steps, n, mean, upper, margin, (t + _POWER) * error, verdict)


def in_training(trained: Verification) -> str:
    """Return the result of training runs as a clause."""
    if not math.isfinite(trained.difference):
        whose = "its" if trained.verdict == "worse" else "fp32's own"
        return f"{whose} loss became non-finite within {trained.steps} steps"
    if trained.verdict == "worse" and trained.upper <= trained.margin:
        return (
            f"over {trained.seeds} pairs of {trained.steps} steps its loss is higher than fp32's by {trained.difference:.2g} (at most "
            f"{trained.upper:.2g} with 95 % confidence), and without masters such harm grows with the length of the training"
        )
    return (
        f"over {trained.seeds} pairs of {trained.steps} steps its loss differs from fp32's by {trained.difference:.2g} (at most "
        f"{trained.upper:.2g} with 95 % confidence; allowed are {trained.margin:.2g}, {100 * MARGIN:.2g} % of the decrease of fp32's loss)"
    )
