"""Simulate searches among plans of known speed and count how often the rule that chooses a plan is wrong.

Five plans, in order from the simplest, first race once as in one process, which finds plans that are far behind. Then
the rule of ``castwise.lab.search.decision`` chooses. The columns are shares. ``slow``: the chosen plan is more than 3
% slower than the best. ``sure_slow``: in addition, the search was reported as decided and not as "too noisy to
decide". ``complicated``: a simpler plan is at least as fast as the chosen one. ``alike``: both searches of a pair
choose the same plan. ``decided``: the search did not run out of starts. A search has up to 16 starts, or two (a short
budget) where the row says so.

The noise comes from two sources. Three levels are drawn from formulas: a process is faster or slower for its whole
life, rounds have a long right tail, and the machine drifts. The other noise was measured on this machine: copies of
one fp32 training run, each in its own process, are restarted and timed in turns, so that their times differ only by
noise. It is measured with the default host memory setting and with ``host_memory=keep``.

``decision-uneven``: two to six plans, of which the most complicated is 4 % faster, with the noise of a quiet machine.
Some of the plans are noisier: one random factor changes all rounds of a start. ``anyone``: one plan per search is
noisier, with a standard deviation of 1 to 10 %. ``half``: half of the plans. ``all but one``: all but the fastest.
``simplest`` (fp32) and ``fastest``: that plan, with a given standard deviation. ``rare``: one in ten starts of one
plan takes 10 or 30 % longer. ``restless``: as ``anyone``, but the standard deviation itself varies between starts, by
a factor of about e. ``rounds``: one in five rounds of one plan takes longer. The file also has the rows with the
noise from formulas.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import multiprocessing
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from castwise.core.plans.plan import PRESETS
from castwise.lab.search.decision import BEHIND, LEAST, MARGIN, MOST, ROUNDS, settle
from castwise.lab.timing import stats
from castwise.lab.timing.apart import race_apart
from castwise.lab.timing.processes import Home, portable
from common import Results, arguments

PLANS, SEARCHES = 5, 600
UNEVEN, COUNTS, LOUD = 400, (2, 3, 4, 5, 6), (0.03, 0.05, 0.08)
COPIES, STARTS, CORES = 5, 16, 2
WORKLOADS = ("gpt?layers=2&width=64&context=32&batch=8", "sine?size=32")

Noise = Callable[[random.Random, int], list[list[float]]]
"""Given a generator and a number of plans, returns the logarithms of their times in one start, by plan and round."""
Speeds = Callable[[random.Random, int], list[float]]
"""Given a generator and a number of plans, returns their times relative to the fastest, the simplest plan first."""
QUIET: dict[str, float] = {"rounds_sd": 0.01, "starts_sd": 0.003, "drift": 0.002}


def drawn(
    generator: random.Random, plans: int, *, rounds_sd: float, starts_sd: float, drift: float
) -> list[list[float]]:
    """Draw the logarithms of the times of one start.

    Each plan has one normal term for the whole start. Each round adds a normal term and, in one round of ten, an
    exponential tail. A random walk from block to block is added to all plans.
    """
    lucky = [generator.gauss(0.0, starts_sd) for _ in range(plans)]
    logs = [[0.0] * ROUNDS for _ in range(plans)]
    walk = 0.0
    for turn, plan in itertools.product(range(ROUNDS), range(plans)):
        walk += generator.gauss(0.0, drift)
        tail = generator.expovariate(1.0 / (5.0 * rounds_sd)) if generator.random() < 0.1 else 0.0
        logs[plan][turn] = lucky[plan] + generator.gauss(0.0, rounds_sd) + tail + walk
    return logs


def uneven(generator: random.Random, plans: int, *, who: str, sd: float | None = None) -> list[list[float]]:
    """Draw a start on the quiet machine with some noisier plans; without ``sd`` their noise is drawn once per search."""
    search = random.Random(generator.search)  # type: ignore[attr-defined]
    loud = sd or search.uniform(0.01, 0.1)
    some = range(plans)
    noisy = {
        "simplest": some[:1], "fastest": some[-1:], "half": search.sample(some, max(1, plans // 2)), "all but one": some[:-1],
    }.get(who, [search.randrange(plans)])  # fmt: skip
    logs = drawn(generator, plans, **QUIET)
    if who == "rounds":
        for one, turn in itertools.product(noisy, range(ROUNDS)):
            logs[one][turn] += (generator.random() < 0.2) * generator.expovariate(1.0 / (3.0 * loud))
        return logs
    for one in noisy:
        luck = generator.gauss(
            0.0, loud * (math.exp(generator.gauss(0.0, 1.0)) if who == "restless" else 1.0)
        )
        if who == "rare":
            luck = (generator.random() < 0.1) * search.choice((0.1, 0.3))
        logs[one] = [log + luck for log in logs[one]]
    return logs


def resampled(
    measured: Sequence[Sequence[Sequence[float]]], generator: random.Random, plans: int
) -> list[list[float]]:
    """Draw one of the measured starts, with its copies in random order."""
    start = generator.choice(measured)
    return [list(copy) for copy in generator.sample(list(start), plans)]


def measure(workload: str, memory: str, device: torch.device) -> list[list[list[float]]]:
    """Measure the logarithms of times by start, copy and round."""
    plan = dataclasses.replace(PRESETS["fp32"], host_memory=memory)
    with Home() as home:
        starts = []
        for start in range(STARTS):
            times = race_apart(
                home, portable(workload), [plan] * COPIES, device, rounds=ROUNDS, first=start * ROUNDS
            )
            starts.append([[math.log(t) for t in copy.times_s] for copy in times])
        return starts


def search(
    generator: random.Random, speeds: Sequence[float], noise: Noise, in_race: Noise, most: int = MOST
) -> tuple[int, bool, int]:
    """Simulate one search; return the chosen plan's index, whether the choice was decided, and the number of starts.

    ``speeds`` has the time of each plan relative to the fastest.
    """
    starts = 0

    def times_of(racing: Sequence[int], noise: Noise) -> dict[int, list[float]]:
        logs = noise(generator, len(speeds))
        return {one: [speeds[one] * math.exp(log) for log in logs[one]] for one in racing}

    def start(racing: Sequence[int]) -> Mapping[int, Sequence[float]]:
        nonlocal starts
        starts += 1
        return times_of(racing, noise)

    generator.search = generator.random()  # type: ignore[attr-defined]
    race = times_of(range(len(speeds)), in_race)
    behind = [(i, j) for i, j in itertools.permutations(race, 2) if lead(race[i], race[j]) > BEHIND]
    decision, times = settle(range(len(speeds)), start, is_over=lambda: starts >= most, behind=behind)
    return decision.chosen, decision.decided, max(map(len, times))


def lead(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the lower bound of the speedup of ``other`` over ``one``.

    With so few rounds the order statistics always give a wider interval than the bootstrap, so one resample is enough.
    """
    return stats.paired_speedup(one, other, resamples=1).low


def equal(_: random.Random, plans: int) -> list[float]:
    """Return equal times for all plans."""
    return [1.0] * plans


def simple_slower(_: random.Random, plans: int) -> list[float]:
    """Return times with the two simplest plans 4 % slower than the others."""
    return [1.04, 1.04, *[1.0] * (plans - 2)]


def one_faster(_: random.Random, plans: int) -> list[float]:
    """Return times with all plans but the most complicated one 4 % slower."""
    return [*[1.04] * (plans - 1), 1.0]


def spread(generator: random.Random, plans: int) -> list[float]:
    """Return times that differ by about 15 %, as those of the plans of one workload do."""
    return [math.exp(generator.gauss(0.0, 0.15)) for _ in range(plans)]


def simulate(
    noise: Noise,
    in_race: Noise,
    speeds: Speeds,
    most: int = MOST,
    plans: int | None = PLANS,
    pairs: int = SEARCHES,
) -> dict[str, float]:
    """Simulate pairs of searches; return shares of all searches, and for ``alike`` the share of all pairs."""
    generator = random.Random(0)
    slow, sure_slow, complicated, decided, alike, starts = 0, 0, 0, 0, 0, []
    for _ in range(pairs):
        known = speeds(generator, plans or generator.choice(COUNTS))
        found = [search(generator, known, noise, in_race, most) for _ in range(2)]
        alike += found[0][0] == found[1][0]
        for chosen, sure, taken in found:
            slow += known[chosen] > MARGIN * min(known)
            sure_slow += sure and known[chosen] > MARGIN * min(known)
            complicated += any(time <= known[chosen] for time in known[:chosen])
            decided += sure
            starts.append(taken)
    both = 2 * pairs
    return {
        "slow": slow / both, "sure_slow": sure_slow / both, "complicated": complicated / both, "alike": alike / pairs, "decided": decided / both,
        "starts": statistics.fmean(starts),
    }  # fmt: skip


def main() -> None:
    """Simulate and write ``results/decision-<device>.json`` and ``results/decision-uneven-<device>.json``."""
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=("measured", "uneven"))
    given = parser.parse_args()
    device = torch.device(given.device)
    kinds: dict[str, Noise] = {
        "quiet": partial(drawn, **QUIET),
        "busy": partial(drawn, rounds_sd=0.03, starts_sd=0.007, drift=0.005),
        "wild": partial(drawn, rounds_sd=0.08, starts_sd=0.02, drift=0.01),
    }
    if given.only != "uneven":
        with Results("decision", device, __doc__, given.budget) as results:
            for workload, memory in itertools.product(WORKLOADS, ("as_given", "keep")):
                name = f"{workload}, host_memory={memory}"
                measured = measure(workload, memory, device)
                kinds[name] = partial(resampled, measured)
                results.add({"part": f"noise of {name}", **noise_of(measured)})
            _simulated(results, _even(kinds))
    if given.only != "measured":
        with Results("decision-uneven", device, __doc__, given.budget) as results:
            _simulated(results, itertools.chain(_uneven(), _even(dict(itertools.islice(kinds.items(), 3)))))


Job = tuple[str, tuple[Any, ...]]
"""A row's name, and the arguments of :func:`simulate`."""


def _even(kinds: Mapping[str, Noise]) -> Iterator[Job]:
    """Yield jobs in which all plans are equally noisy."""
    races = {name: kinds[name.replace("as_given", "keep")] for name in kinds}  # a race keeps memory
    for (name, noise), speeds in itertools.product(kinds.items(), (equal, simple_slower, one_faster, spread)):
        yield f"{name}: {speeds.__name__}", (noise, races[name], speeds)
    for name, noise in kinds.items():
        yield f"{name}: {spread.__name__}, {LEAST} starts", (noise, races[name], spread, LEAST)


def _uneven() -> Iterator[Job]:
    """Yield jobs in which some plans are noisier than others."""
    cases = [
        *itertools.product(("anyone", "half", "all but one", "rare", "restless", "rounds"), (None,), (None,)),
        *itertools.product(("simplest", "fastest"), LOUD, (None, 3)),
    ]
    for who, sd, plans in cases:
        noise = partial(uneven, who=who, sd=sd)
        name = f"uneven, {plans or '2 to 6'} plans: {who}" + (f" {sd:.0%}" if sd else "")
        yield name, (noise, noise, one_faster, MOST, plans, UNEVEN)


def _simulated(results: Results, jobs: Iterable[Job]) -> None:
    with multiprocessing.get_context("fork").Pool(CORES) as pool:
        for row in pool.imap(_row, jobs):
            results.add(row)


def _row(job: Job) -> dict[str, Any]:
    return {"part": job[0], **simulate(*job[1])}


def noise_of(measured: Sequence[Sequence[Sequence[float]]]) -> dict[str, float]:
    """Return the standard deviations of the log ratios of copies: between rounds of a start, and between starts."""
    between, within = [], []
    for start in measured:
        for one, other in itertools.pairwise(start):
            ratios = [a - b for a, b in zip(one, other, strict=True)]
            between.append(statistics.median(ratios))
            within.append(statistics.stdev(ratios))
    return {"rounds_sd": statistics.median(within), "starts_sd": statistics.pstdev(between)}


if __name__ == "__main__":
    main()
