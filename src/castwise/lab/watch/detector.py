"""Check the samples and steps of a training against the lines of the alarms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from torch.optim import Optimizer

from castwise.core.plans.formats import FORMATS
from castwise.core.plans.text import some
from castwise.core.session.amp import Amp, SessionView
from castwise.lab.watch.alarms import Alarms
from castwise.lab.watch.history import COLLAPSED, FRESH, IN_A_ROW, LossWatch
from castwise.lab.watch.records import Alarm, Sample
from castwise.lab.watch.turns import RECENT, Turn

LEAST_MOVE = 0.1
"""If the weights move by less than this share between two samples, the movement is not compared with the updates."""
MARGIN = 1.0
"""Factor on the movement that the steps explain, which is their number times the larger update of the two samples."""
SEEKS = 16
"""Number of steps in a row that may be skipped while the loss scale is searched, before the first step that is not skipped."""


class Detector:
    """Checks values against the lines of the alarms.

    Args:
        amp: The session.
        crossed: The lines and the open alarms.
        watch: Compares each loss with earlier losses.

    Attributes:
        news: Alarms that were raised or cleared since this list was last emptied.
    """

    def __init__(self, amp: Amp, crossed: Alarms, watch: LossWatch) -> None:
        self.news: list[Alarm] = []
        self._amp, self._session, self._crossed, self._watch = amp, SessionView(amp), crossed, watch

    def check(self, turn: Turn, sample: Sample, trained: Sequence[str]) -> None:
        """Check a sample against the lines; ``trained`` names the modules that should get a gradient."""
        regions = sample.regions

        def by_region(name: str) -> dict[str, float]:
            return {r.path: value for r in regions if (value := getattr(r, name)) is not None}

        low = {
            r.path: r.output / FORMATS["fp16"].max
            for r in regions
            if r.near_overflow is not None and r.output is not None
        }
        self.see("near_overflow", low, turn)
        if sample.skipped is not True:
            if sample.skipped is False:
                bad = {
                    r.path: float(
                        any(v is not None and not math.isfinite(v) for v in (r.grad_norm, r.output))
                    )
                    for r in regions
                }
                self.see("nonfinite", bad, turn)
            self.see("underflow", by_region("underflow"), turn)
            self.see("update_ratio", by_region("update_ratio"), turn)
            over = turn.over_median(sample.grad_norm)
            self.see("grad_norm", {} if over is None else {"": over}, turn)
            self._compare(turn, sample, trained)
        self.see("lost_updates", {} if sample.lost_updates is None else {"": sample.lost_updates}, turn)
        self._see_scale(turn, sample.loss_scale)
        self._see_share(turn)
        turn.suspect(self._crossed.suspicious(turn.number) or 0 < self._watch.high < IN_A_ROW)

    def check_loss(self, turn: Turn) -> None:
        """Check the latest losses against the line for losses."""
        if not self._watch.high and not self._crossed.open:
            return
        if self._watch.high >= IN_A_ROW:
            self.see("loss", {"": self._watch.above}, turn)
        elif self._watch.normal >= FRESH and ("loss", turn.number) in self._crossed.open:
            self.see("loss", {"": 0.0}, turn)

    def _compare(self, turn: Turn, sample: Sample, trained: Sequence[str]) -> None:
        """Compare the sample of a step that was not skipped with earlier samples."""
        regions = sample.regions
        norms = {r.path: r.grad_norm for r in regions}
        lost = turn.history.lost(
            norms, trained, self._watch.is_settled(sample.loss), 0.0 if sample.loss is None else COLLAPSED
        )
        gone = [path for path, value in lost.items() if value]
        self.see("no_gradient", lost, turn, lambda: f", like {some(gone[1:], 3)}" if gone[1:] else "")
        if sample.update_ratio is not None and sample.lost_updates is None:
            still = sample.update_ratio == 0.0 and bool(sample.grad_norm) and not turn.decayed
            self.see("no_update", {"": float(still)}, turn)
        steps = turn.steps - turn.sampled - 1
        moved = {}
        for r in regions:
            largest = max(r.update_ratio or 0.0, turn.ratios.get(r.path, 0.0))
            if r.drift is not None:
                moved[r.path] = r.drift / max(LEAST_MOVE, MARGIN * steps * largest)
        self.see("moved", moved, turn)
        turn.sampled = turn.steps
        turn.ratios = {r.path: r.update_ratio for r in regions if r.update_ratio is not None}

    def note_skip(self, optimizer: Optimizer, turn: Turn) -> None:
        """Check a skipped step against the lines."""
        if turn.made or turn.streak > SEEKS:
            self.see("skipped_in_a_row", {"": float(turn.streak)}, turn, lambda: self._blame(optimizer))
        if self._session.window.scales:
            self._see_scale(turn, self._amp.get_scale(), lambda: self._blame(optimizer))
        self._see_share(turn, lambda: self._blame(optimizer))

    def _see_scale(self, turn: Turn, scale: float | None, detail: Callable[[], str] = str) -> None:
        moves = self._amp.plan.loss_scale is not None and self._amp.plan.loss_scale.dynamic
        self.see("loss_scale", {"": scale} if moves and scale is not None else {}, turn, detail)

    def _see_share(self, turn: Turn, detail: Callable[[], str] = str) -> None:
        if len(turn.recent) == RECENT:
            self.see("skipped_share", {"": sum(turn.recent) / RECENT}, turn, detail)

    def _blame(self, optimizer: Optimizer) -> str:
        """Name the modules whose gradients are not finite."""
        paths = dict.fromkeys(
            name.rpartition(".")[0] or "the model" for name in self._amp.scaler.non_finite_params(optimizer)
        )
        return f" in {some([*paths], 3)}" if paths else ""

    def see(
        self, kind: str, values: Mapping[str, float], turn: Turn, detail: Callable[[], str] = str
    ) -> None:
        """Check the values of modules against the line of a kind; ``detail`` is called if an alarm is raised."""
        alarm = self._crossed.see(kind, values, turn.steps, turn.number, detail)
        if alarm is not None:
            self.news.append(alarm)
