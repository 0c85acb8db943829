"""Compile the fastest plans, each first on trial in its own process; those that may win enter the final comparison.

A trial takes as long as compiling. The fastest plan is therefore tried first, and no trial begins that the remaining time
cannot cover. Each plan compiles into its own folder on disk. The trial thus measures how long a user's first compiled training
takes to start. The later starts of the same plan reuse that folder and are short.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from castwise.core.plans.plan import Plan
from castwise.core.plans.words import in_words
from castwise.errors import CastwiseError, WorkloadError
from castwise.lab.search.axes import AUTOCAST, FP32, as_raced, uncompiled
from castwise.lab.search.compile_trial import CompileTrial, run_trial
from castwise.lab.search.contest import Contest
from castwise.lab.search.context import Context
from castwise.lab.search.decision import LEAST as STARTS
from castwise.lab.search.fates import Fate
from castwise.lab.search.finalists import FINAL_SHARE, start_s
from castwise.lab.search.state import Search
from castwise.lab.timing.apart import Kind, SeparateRun
from castwise.lab.timing.failures import cannot_run, unfit
from castwise.lab.timing.processes import NotThereError, SilentError, not_there
from castwise.lab.timing.runners import TrainingRun
from castwise.lab.timing.served import COMPILED

MODE = "default"
"""The mode of torch.compile that a search tries."""
COMPILE_SHARE = 0.6
"""After this share of the budget no trial but the first begins."""
LEAST_S = 12.0
"""No trial begins if fewer seconds than this are left for it."""
ENDED_S = 2.0
"""Seconds to wait for a killed process. A process that takes longer is waiting for a device, and will end later."""
AGAIN = 0.25
"""Share of the compile time that is reserved for each later start of a compiled plan: recompiling from the cache on disk takes
about as long."""
MOST = 2
"""At most this many compiled plans enter the final comparison, because each start waits until all of them have compiled."""


@contextlib.contextmanager
def own_cache() -> Iterator[None]:
    """Let the processes started inside this context keep compiled code in a temporary folder, which is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="castwise-", ignore_cleanup_errors=True) as folder:
        os.environ[COMPILED] = folder
        try:
            yield
        finally:
            del os.environ[COMPILED]


def compile_finalists(search: Search, plans: Sequence[Plan]) -> list[Plan]:
    """Compile plans whose gradients or outputs passed the test, on trial, the fastest first, if the search compiles at all.

    Returns:
        The compiled plans that may win the final comparison.
    """
    context, contest = search.context, search.contest
    if context.settings.compile == "never":
        return []
    with search.journal.stage("compiling"):
        until = context.until(COMPILE_SHARE)
        in_final = STARTS * len({FP32, AUTOCAST, *plans}) * start_s(contest)
        first_until = max(until, context.until(FINAL_SHARE) - in_final)
        return _compiled(context, contest, search.trials, plans, until, first_until)


def _compiled(
    context: Context,
    contest: Contest,
    trials: dict[Plan, CompileTrial],
    plans: Sequence[Plan],
    until: float,
    first_until: float,
) -> list[Plan]:
    """Compile the given plans on trial, the fastest first.

    Args:
        context: The job to tune.
        contest: The race in which the plans were timed.
        trials: The result of each trial is added here, by compiled plan.
        plans: Plans that passed the test.
        until: Clock time at which the last trial must end, so that time is left for the final comparison.
        first_until: Clock time at which the first trial must end. It tries the plan that is likeliest to win, and may use all
            time that the final comparison does not need.

    Returns:
        The compiled plans that may win the final comparison.
    """
    ranks, journal = context.ranks, context.journal
    each = {as_raced(plan): plan for plan in [FP32, *plans]}  # as they will run in the final
    order = contest.order(list(each))
    try:
        payload = context.payload(partial(_try_elsewhere, context, contest.kind))
    except NotThereError as error:
        journal.notes.append(f"Nothing was compiled: {error}.")
        return []
    took = 0.0
    speeds: dict[Plan, float] = {}
    for number, raced in enumerate(order):
        plan = each[raced]
        made = dataclasses.replace(plan, compile=MODE)
        journal.tell(f"compiling {in_words(plan)}", number, len(order))
        begin = ranks.now()
        in_final = sum(trials[one].compile_s for one in _fastest(speeds))
        left = (until if trials else first_until) - begin
        room = (left - STARTS * AGAIN * in_final) / (1.0 + STARTS * AGAIN)
        if room < max(LEAST_S, took):
            last = f", and the last plan took {took:.0f} s" if took else ""
            why = f"{max(0.0, room):.0f} s of the budget were left to compile it{last}; use a longer --budget"
            journal.decide(made, Fate("late", why))
            continue
        trial = ranks.at(f"compiling {plan}").worst(
            partial(_tried, context, payload, made, room, contest.kind),
            lambda found: (bool(found.reason), found.step_s),
        )
        took = ranks.now() - begin
        trials[made] = trial
        if trial.reason:
            journal.decide(made, Fate("late" if trial.late else "failed", trial.reason))
            continue
        assert trial.gain is not None
        if trial.gain.high <= 1.0 and context.settings.compile == "auto":
            slower = f"not faster compiled: takes {1.0 / trial.gain.value:.2f} times as long"
            journal.decide(made, Fate("worse", slower))
            continue
        ratio = contest.ratio(raced)
        speeds[made] = (ratio.value if ratio is not None else 1.0) * trial.gain.value
    best = _fastest(speeds)
    for made in speeds.keys() - set(best):
        journal.decide(made, Fate("spared", f"not in the final: {MOST} other compiled plans were faster"))
    return best


def _try_elsewhere(context: Context, kind: Kind, payload: bytes) -> None:
    """Run one step in another process before any trial, so that an exception in a later trial is due to compiling."""
    with contextlib.closing(
        SeparateRun(context.home, payload, FP32, context.device, context.settings.seed, kind)
    ) as run:
        try:
            run.warm_up(1)
        except Exception as error:
            raise not_there(context.spec or context.workload, error) from error


def _fastest(speeds: Mapping[Plan, float]) -> list[Plan]:
    return sorted(speeds, key=speeds.__getitem__, reverse=True)[:MOST]


def _tried(
    context: Context, payload: bytes, plan: Plan, timeout_s: float, kind: Kind = TrainingRun
) -> CompileTrial:
    process = context.home.start(
        run_trial, payload, plan.to_json(), str(context.device), context.settings.seed, kind
    )
    try:
        found: CompileTrial = process.answer(timeout_s)
        return found
    except SilentError:
        why = f"compiling took longer than the {timeout_s:.0f} s that were left; use a longer --budget"
        return CompileTrial(why, late=True)
    except WorkloadError:
        raise
    except CastwiseError as error:
        return CompileTrial(f"does not compile: {error}")
    except Exception as error:  # raised in that process before anything was compiled
        if not cannot_run(error):
            raise
        return CompileTrial(unfit(error))
    finally:
        process.close(ENDED_S)  # compilers write into the folder that is deleted next


def pays_after(search: Search, plan: Plan) -> int | None:
    """Return the number of steps after which compiling a plan has paid off; None if that is unknown or never happens."""
    trial, final = search.trials.get(plan), search.final
    if trial is None or trial.reason:
        return None
    eager_s, step_s = trial.eager_s, trial.step_s
    ratio = final.ratio(plan, uncompiled(plan)) if final is not None else None
    if final is not None and ratio is not None:
        eager_s = statistics.median(final.seconds(uncompiled(plan)))
        step_s = eager_s / ratio.value
    return math.ceil(trial.compile_s / (eager_s - step_s)) if step_s < eager_s else None


def said(search: Search, plan: Plan) -> str:
    """Say how long compiling the chosen plan takes and when it pays off; empty if the plan is not compiled."""
    trial = search.trials.get(plan)
    if trial is None:
        return ""
    serves = search.context.settings.goal == "inference"
    first, each = ("at the first call", "calls") if serves else ("when training first starts", "steps")
    steps = pays_after(search, plan)
    when = f"and pays off after {steps:,} {each}" if steps is not None else "and was not shown to pay off"
    return f"Compiling takes {trial.compile_s:.0f} s {first} (less if the compiled code is cached on disk) {when}."
