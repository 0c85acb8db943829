"""The search: what is fast is raced, what is fast is tested, and the fastest sound plan is tested again on fresh data.

1. *Reference.* fp32 gradients of a few microbatches: a loss that is not differentiable, data with NaN and a loss that is
   not deterministic are found here.
2. *Costs.* Every unique module is timed alone in each format, casts included. A format that is faster nowhere is
   dropped; parts that lose by the low format become regions of further candidates.
3. *Race.* Every combination of the whole-step axes, and of the regions, on real steps by successive halving.
4. *Parity.* The finalists' gradients; what fails is traced to its source and repaired with regions in fp32. Where the
   gradients leave in doubt what is faster than all that is sound, training runs against fp32 decide.
5. *Final.* Sound plans once more, for longer, with the fused optimizer and memory that is kept where these save time; a tie goes
   to the simpler one.
6. *Verification.* The winner's gradients on fresh batches; where it fails there, the next one, once it is decided.

The ranks of a process group search in lockstep: each runs all of this, and what could differ between them goes through
:mod:`castwise.lab.timing.ranks`.

Steps 2 to 6 are :mod:`castwise.lab.search.fastest`; with ``goal="numerics"`` the regions alone are sought
(:mod:`castwise.lab.search.exemptions`).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from castwise.core.casting.trees import to_device
from castwise.core.model.arrival import widen_
from castwise.core.plans.words import in_words
from castwise.errors import StateError
from castwise.lab.parity.parity import ParityTest
from castwise.lab.parity.probes import Prober
from castwise.lab.passes.isolation import seed_all, undisturbed
from castwise.lab.search.arrived import arrival_notes
from castwise.lab.search.axes import AUTOCAST, FP32, as_trained, numerics_of
from castwise.lab.search.compiling import own_cache
from castwise.lab.search.contest import Entry
from castwise.lab.search.exemptions import find_exemptions
from castwise.lab.search.fastest import find_fastest, formats_not_reached
from castwise.lab.search.pairs import is_doubtful, train_pairs
from castwise.lab.search.reference import refer
from castwise.lab.search.repair import VERIFYING, NumericsSearch
from castwise.lab.search.state import MICROBATCHES, PEAKS_S, SearchState, Settings
from castwise.lab.timing.runners import build_model

__all__ = ["Search", "Settings"]

LEAST_S = 5.0
"""A search that has less time than this cannot say anything."""
PATIENCE_S, SLOWER = 60.0, 3.0
"""A process hangs if it is silent for this many seconds, for the whole budget, and for this many times as long as the
reference took here."""


@dataclass
class Search(SearchState):
    """One search from its checks to its answer."""

    def run(self) -> None:
        """Search; on an exception, KeyboardInterrupt among them, what has been found so far stays.

        Raises:
            CastwiseError: The workload cannot be tuned: it fails in fp32, or there is no time.
        """
        settings = self.settings
        if self.ranks.size > 1:
            self.notes.append(
                f"Measured on {self.ranks.size} ranks at once, each with the same weights and batches: times and peak memory "
                "are the slowest and largest rank's, and gradients the worst rank's. What gradients cost on their way "
                "between ranks is not in the times."
            )
        if settings.budget_s < LEAST_S:
            raise StateError(
                f"tune(budget_s={settings.budget_s:g}): no time for anything; a search needs {LEAST_S:g} s at the very "
                "least, and a minute or two to be worth its answer"
            )
        with (
            undisturbed(),
            self.home,
            own_cache() if settings.compile != "never" else contextlib.nullcontext(),
        ):
            with self.stage("reference"):
                if settings.goal != "numerics":
                    self.home.begin()
                self.begun = refer(self)
                self.home.ready(self.left_here_s())
            self.home.patience_s = max(PATIENCE_S, settings.budget_s, SLOWER * self.stages[-1].time_s)
            if settings.goal == "numerics":
                find_exemptions(self)
            else:
                find_fastest(self)
            if settings.warmup_steps and settings.goal != "numerics" and numerics_of(self.chosen) != FP32:
                with self.stage("second look"):
                    self._second_look()
            steps = self.verification.steps if self.verification is not None else 0
            if self.chosen != FP32 and settings.verify_steps > steps:
                with self.stage("training runs"):
                    self._train()
            if settings.memory and settings.goal == "time" and self.left_s() > PEAKS_S:
                raced = self.contest is not None and bool(
                    self.contest.entries.get(AUTOCAST, Entry(AUTOCAST)).rounds
                )
                shown = [AUTOCAST] if raced else []
                with self.stage("memory"):
                    self.measure_peaks(list(dict.fromkeys([FP32, *shown, self.chosen])))
        if (note := self.reference.test.prober.positions.note) and numerics_of(self.chosen) != FP32:
            self.notes.append(note)
        if self.reference.arrived:
            self.notes += arrival_notes(self)
        if missed := formats_not_reached(self):
            self.undecided.append(
                f"{' and '.join(missed)} {'was' if len(missed) == 1 else 'were'} not tried: the time ran out. A longer "
                f"--budget would tell whether {'it is' if len(missed) == 1 else 'they are'} faster."
            )
        self.complete = not missed

    def _second_look(self) -> None:
        """Test the chosen plan once more after some fp32 steps: trained weights differ from fresh ones."""
        settings, workload = self.settings, self.workload
        seed_all(settings.seed)
        model = build_model(workload, self.device, settings.seed, self.reference.model.state_dict())
        arrived = widen_(model)
        optimizer = workload.optimizer(model.parameters())
        batches = iter(workload.batches(settings.seed))
        for step in range(settings.warmup_steps):
            self.say(self.now, "fp32 steps", step, settings.warmup_steps)
            optimizer.zero_grad()
            workload.loss(model, to_device(next(batches), self.device)).backward()
            optimizer.step()
        optimizer.zero_grad()
        prober = Prober(
            model, workload.loss, batches, self.device, seed=settings.seed, call=self.reference.test.prober.call,
            arrived=arrived,
        )  # fmt: skip
        warm = ParityTest(
            prober, self.reference.test.per_update, self.reference.test.adam, workload.optimizer
        )
        warm.reference(MICROBATCHES)
        search = NumericsSearch(warm, self.reference.parts, self.tell, self.ranks)
        result = search.find(self.chosen)
        trained = self.verification is not None and is_doubtful(result)  # that it trains has been seen
        if result.verdict != "pass" and not trained:
            before = self.chosen
            self.refuse(before, f"after {settings.warmup_steps} steps: {self.why(before, result)}")
            repair = search.repair(before, result, reserve=VERIFYING)
            result = search.verify(repair.plan)
            self.settle(*((repair.plan, result, repair.kept) if result.verdict == "pass" else (FP32, None)))
        self.findings[self.chosen] = result
        self.verified = result
        self.notes.append(
            f"A second look after {settings.warmup_steps} fp32 steps: {result.verdict}; {result.reason}."
        )

    def _train(self) -> None:
        settings = self.settings
        self.verification = train_pairs(
            self.workload, as_trained(self.chosen), self.device, steps=settings.verify_steps, seeds=settings.verify_seeds,
            first_seed=settings.seed, ranks=self.ranks,
            on_progress=lambda done, total: self.say(self.now, "pairs of training runs", done, total),
        )  # fmt: skip
        if self.verification.verdict == "worse":
            self.refuse(
                self.chosen,
                f"its loss after {settings.verify_steps} steps is worse than fp32's by {self.verification.difference:.2g}",
            )
            self.notes.append(
                f"{in_words(self.chosen)} passed the gradient test and failed in training; the plan is fp32."
            )
            self.settle(FP32, None)
