"""The results of a search: plain records, written as ``evidence.json`` and shown as a page.

Times are in seconds per training step, sizes in bytes. The JSON holds all of it, with null for numbers that are not finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from castwise.lab.parity.damage import ADAM_FAIL, ADAM_PASS, FAIL, PASS
from castwise.lab.parity.gradient_range import Histogram, ScaleRange
from castwise.lab.parity.verdicts import Verdict
from castwise.lab.timing.environment import Environment
from castwise.lab.timing.stats import Ratio, Summary

__all__ = [
    "Candidate", "Damage", "Evidence", "Histogram", "RegionEvidence", "ScaleRange", "Stage", "Verification",
]  # fmt: skip

Status = Literal["baseline", "chosen", "sound", "tie", "rejected", "not tried"]
LINES = {"pass": PASS, "fail": FAIL, "adam_pass": ADAM_PASS, "adam_fail": ADAM_FAIL}


@dataclass(frozen=True)
class Damage:
    """The squared error that a plan adds to one update, divided by the expected squared norm of the update.

    Attributes:
        verdict: By the thresholds of the parity test; ``decided by training`` if the chosen plan's gradients did not pass and
            training runs accepted it.
        value: (bias + noise / m) / (signal + data noise / m), with m microbatches per update; infinite where a
            gradient was not finite. ``low`` and ``high`` are its bootstrap interval.
        bias: The part of ``value`` that is equal in every batch.
        noise: The part that averages out over batches.
        reason: The cause of the verdict, as a clause.
    """

    verdict: Verdict | Literal["decided by training"]
    value: float
    low: float | None
    high: float | None
    bias: float | None
    noise: float | None
    reason: str = ""


@dataclass(frozen=True)
class Candidate:
    """A plan that the search considered.

    Attributes:
        name: A preset's name or the plan's line; tables show it.
        plan: The plan's line, which ``Plan.parse`` reads.
        words: The plan in words.
        status: ``baseline`` (fp32, chosen or not), ``chosen``, ``tie`` (sound, and not known to be slower than the chosen one),
            ``sound`` (nothing else is known), ``rejected``, or ``not tried`` (not to the end, for lack of time or because an
            equally good plan was already there).
        reason: Why ("not faster", "gradient bias 0.31 in encoder.layers.3.norm", "out of memory", "not supported by this
            device: ..."); for the chosen plan, why it was chosen.
        stage: The stage that decided this; empty if it was decided at the end.
        late: Whether it was not tried for lack of time.
        rounds: Number of timed rounds that it ran.
        time: Time per training step, None if it was not timed.
        speedup: Over fp32, by the final; > 1 is faster. None for plans that left before the final.
        versus_autocast: Over one-line ``torch.autocast`` in bf16 (``bf16-mixed``).
        peak_bytes: Peak memory of a training step, None if it was not measured.
        parity: Result of the gradient parity test, None if it was not run.
        loss: Mean loss of its last training steps in the first start of the final (without a final, in the race), None if it
            trained no steps.
        compile_s: Seconds that compiling it took with an empty code cache on disk; None if it was not compiled.
        pays_after_steps: Number of steps after which the time spent on compiling is recovered; None if unknown or never.
    """

    name: str
    plan: str
    status: Status
    words: str = ""
    reason: str = ""
    stage: str = ""
    late: bool = False
    rounds: int = 0
    time: Summary | None = None
    speedup: Ratio | None = None
    versus_autocast: Ratio | None = None
    peak_bytes: int | None = None
    parity: Damage | None = None
    loss: float | None = None
    compile_s: float | None = None
    pays_after_steps: int | None = None


@dataclass(frozen=True)
class RegionEvidence:
    """A region of the model: one module, or modules of equal structure at the same place in repeated blocks.

    Attributes:
        pattern: The pattern in a plan's region, such as ``blocks.*.norm``.
        kind: Class name of its modules.
        parameters: Number of elements in their parameters.
        format: Format in which it runs under the chosen plan.
        reason: The reason for that format, if it is not the plan's own.
        time_fp32_s: Forward and backward of all its modules in fp32, None if it was not timed alone.
        time_low_s: The same in the plan's compute format, casts at its border included.
        damage: The damage to the update when only this region runs low, None if it was not probed alone.
        share: Its parameters' share of the whole model's damage under the chosen plan: ``bias`` and ``noise`` together.
        data_noise: Variance of its gradient over batches, in the same unit (share of signal + data noise / m).
        grad_largest: Largest magnitude in the gradients of its output, unscaled.
        grad_smallest: Magnitude below which at most a thousandth of their squared norm lies.
    """

    pattern: str
    kind: str
    modules: int
    parameters: int
    format: str
    reason: str = ""
    time_fp32_s: float | None = None
    time_low_s: float | None = None
    damage: Damage | None = None
    share: float | None = None
    bias: float | None = None
    noise: float | None = None
    data_noise: float | None = None
    grad_largest: float | None = None
    grad_smallest: float | None = None


@dataclass(frozen=True)
class Stage:
    """A stage of the search and its cost.

    Attributes:
        name: Such as ``reference``, ``costs`` or ``race``.
        passes: Forward/backward passes spent on numerics; race steps do not count.
        steps: Training steps spent on timing.
    """

    name: str
    time_s: float
    passes: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Verification:
    """Short training runs of the chosen plan against fp32, paired by seed.

    Attributes:
        difference: Mean over pairs of the loss under the plan minus that in fp32, over the last steps.
        upper: Its upper 95 % confidence bound.
        margin: The limit for the upper bound: a share of the decrease of fp32's loss (``lab/search/pairs.py::MARGIN``).
        detectable: The smallest difference that such runs would detect with 80 % probability.
        verdict: ``not worse``, ``worse`` or ``not shown``.
    """

    steps: int
    seeds: int
    difference: float
    upper: float
    margin: float
    detectable: float
    verdict: str


@dataclass(frozen=True)
class Evidence:
    """Everything that a search measured.

    Attributes:
        command: The command that repeats the search.
        goal: ``time``, ``memory`` or ``numerics``.
        formats: The allowed formats.
        plan: The chosen plan's line.
        compute: The plan's compute format, apart from its regions.
        answer: What to do and what it gains, in a sentence.
        why: The reasons for it, in sentences.
        complete: False if the search was interrupted or ran out of its budget.
        settings: ``accumulate``, ``world_size``, ``compile``, ``warmup_steps``, ``seed``, ``budget_s`` and such.
        world_size: Number of ranks that measured together, 1 for a single process. Every time is the slowest rank's, every peak
            the largest, and every damage the worst.
        candidates: The considered plans, the chosen one first, then by time.
        regions: The model's regions, in model order.
        histograms: Of the gradients.
        scale: The range of loss scales, if fp16 was considered.
        floor: Damage between two fp32 runs with different rounding.
        repeat: Damage between two identical fp32 runs; above 0 if the loss is not deterministic.
        lines: The damage thresholds: below the first the parity test passes, above the second it fails.
        stages: The stages in order, with their costs.
        verification: The training runs, if ``verify_steps`` was given.
        notes: Sentences that every reader should see.
        undecided: Open questions, and what would settle each: a longer budget, or a quieter machine.
    """

    workload: str
    description: str
    command: str
    goal: str
    formats: tuple[str, ...]
    plan: str
    digest: str
    compute: str
    answer: str
    complete: bool
    settings: Mapping[str, Any]
    environment: Environment
    candidates: tuple[Candidate, ...]
    regions: tuple[RegionEvidence, ...]
    why: tuple[str, ...] = ()
    world_size: int = 1
    histograms: tuple[Histogram, ...] = ()
    scale: ScaleRange | None = None
    floor: float | None = None
    repeat: float | None = None
    lines: Mapping[str, float] = field(default_factory=lambda: LINES)
    stages: tuple[Stage, ...] = ()
    verification: Verification | None = None
    notes: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()

    @property
    def passes(self) -> int:
        """Forward/backward passes spent on numerics, over all stages."""
        return sum(stage.passes for stage in self.stages)
