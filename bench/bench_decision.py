"""How often the rule that chooses a plan is wrong: simulated searches among plans of known speed.

Five plans, the simplest first, race once as in one process, which tells who is far behind, and then by the rule of ``castwise.lab.search.decision``: ``slow`` counts choices that are more than
3 % slower than the best, ``sure_slow`` those of them that were called decided and not "too noisy to decide", ``complicated`` choices that a simpler plan equals, ``alike`` pairs of searches that choose the same,
``decided`` searches that did not run out of starts, of which there are 16, or two where a row says so: a short budget. The noise is of three kinds drawn from formulas (a process is lucky for
its whole life, rounds have a long right tail, the machine drifts), and this machine's own: copies of one fp32 training, each
in a process of its own, started anew and run in turns, whose times differ by nothing but noise; as they are, and keeping memory.

``decision-uneven``: the drawn noise again, and of two to six plans, the most complicated of which is 4 % faster, on the quiet machine, some are noisier: all rounds of a start
take longer or shorter by one factor. ``anyone``: in each search one plan, by a standard deviation of 1 to 10 %; ``half``: half of
them; ``simplest`` (fp32) and ``fastest`` by a given one; ``all but one``. ``rare``: one in ten starts takes 10 or 30 % longer. ``restless``:
the deviation itself changes between starts, by a factor of e. ``rounds``: one in five rounds is disturbed and takes longer.
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
"""Logarithms of times of so many plans in one start, by plan and round."""
Speeds = Callable[[random.Random, int], list[float]]
"""How many times as long as the fastest each of so many plans takes, the simplest first."""
QUIET: dict[str, float] = {"rounds_sd": 0.01, "starts_sd": 0.003, "drift": 0.002}


def drawn(
    generator: random.Random, plans: int, *, rounds_sd: float, starts_sd: float, drift: float
) -> list[list[float]]:
    """A start's luck, a normal part and one in ten a long tail per round, and a random walk from block to block."""
    lucky = [generator.gauss(0.0, starts_sd) for _ in range(plans)]
    logs = [[0.0] * ROUNDS for _ in range(plans)]
    walk = 0.0
    for turn, plan in itertools.product(range(ROUNDS), range(plans)):
        walk += generator.gauss(0.0, drift)
        tail = generator.expovariate(1.0 / (5.0 * rounds_sd)) if generator.random() < 0.1 else 0.0
        logs[plan][turn] = lucky[plan] + generator.gauss(0.0, rounds_sd) + tail + walk
    return logs


def uneven(generator: random.Random, plans: int, *, who: str, sd: float | None = None) -> list[list[float]]:
    """A start on the quiet machine, of which some plans are noisier; without ``sd`` its noise is drawn once per search."""
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
    """One of the measured starts, its copies in random order."""
    start = generator.choice(measured)
    return [list(copy) for copy in generator.sample(list(start), plans)]


def measure(workload: str, memory: str, device: torch.device) -> list[list[list[float]]]:
    """Logarithms of times by start, copy and round."""
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
    """One search among plans that take so many times as long as one another: which it chooses, whether decided, starts."""
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
    """How many times as fast the other is at the least: of so few rounds no resample is beyond the order statistics."""
    return stats.paired_speedup(one, other, resamples=1).low


def equal(_: random.Random, plans: int) -> list[float]:
    """All as fast as each other."""
    return [1.0] * plans


def simple_slower(_: random.Random, plans: int) -> list[float]:
    """The two simplest 4 % slower than the others."""
    return [1.04, 1.04, *[1.0] * (plans - 2)]


def one_faster(_: random.Random, plans: int) -> list[float]:
    """All but the most complicated 4 % slower."""
    return [*[1.04] * (plans - 1), 1.0]


def spread(generator: random.Random, plans: int) -> list[float]:
    """As plans of one workload lie: by some 15 % from one another."""
    return [math.exp(generator.gauss(0.0, 0.15)) for _ in range(plans)]


def simulate(
    noise: Noise,
    in_race: Noise,
    speeds: Speeds,
    most: int = MOST,
    plans: int | None = PLANS,
    pairs: int = SEARCHES,
) -> dict[str, float]:
    """Pairs of searches; shares of all searches, and of all pairs for ``alike``."""
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
    """Write ``results/decision-<device>.json`` and ``results/decision-uneven-<device>.json``."""
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
    """Plans of equal noise."""
    races = {name: kinds[name.replace("as_given", "keep")] for name in kinds}  # a race keeps memory
    for (name, noise), speeds in itertools.product(kinds.items(), (equal, simple_slower, one_faster, spread)):
        yield f"{name}: {speeds.__name__}", (noise, races[name], speeds)
    for name, noise in kinds.items():
        yield f"{name}: {spread.__name__}, {LEAST} starts", (noise, races[name], spread, LEAST)


def _uneven() -> Iterator[Job]:
    """Plans of unequal noise."""
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
    """Spreads of the measured copies: of rounds within a start, and between starts beyond what rounds explain."""
    between, within = [], []
    for start in measured:
        for one, other in itertools.pairwise(start):
            ratios = [a - b for a, b in zip(one, other, strict=True)]
            between.append(statistics.median(ratios))
            within.append(statistics.stdev(ratios))
    return {"rounds_sd": statistics.median(within), "starts_sd": statistics.pstdev(between)}


if __name__ == "__main__":
    main()
