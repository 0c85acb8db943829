"""What a search for a plan leaves behind: plain records, written as ``evidence.json`` and shown as a page.

Times are in seconds per training step, sizes in bytes. JSON holds all of it; numbers that are not finite are null there.
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
    """What a plan does to one update, relative to the expected square of the update itself.

    Attributes:
        verdict: Judged against the lines of the parity test; ``decided by training`` of the chosen plan where its gradients
            did not pass and pairs of training runs spoke for it.
        value: (bias + noise / m) / (signal + data noise / m), with m microbatches per update; infinite where a
            gradient was not finite. ``low`` and ``high`` are its bootstrap interval.
        bias: The part of ``value`` that is the same in every batch.
        noise: The part that averages out over batches.
        reason: In a clause, what made the verdict.
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
    """A plan that was considered.

    Attributes:
        name: A preset's name or the plan's line; what tables call it.
        plan: The plan's line, which ``Plan.parse`` reads.
        words: The plan as people read it.
        status: ``baseline`` (fp32, chosen or not), ``chosen``, ``tie`` (sound, and not known to be slower than the chosen one),
            ``sound`` (nothing else is known of it), ``rejected``, or ``not tried`` (to the end, for want of time or since another
            as good was in).
        reason: Why ("not faster", "gradient bias 0.31 in encoder.layers.3.norm", "out of memory", "not supported by this
            device: ..."); of the chosen one why it was chosen.
        stage: Stage of the search in which that was decided; empty where it was at the end.
        late: Whether it was not tried for want of time.
        rounds: Timed rounds it took part in.
        time: Time per training step, None where it was not timed.
        speedup: Over fp32, by the final; > 1 is faster. None for those that left before it.
        versus_autocast: Over one-line ``torch.autocast`` in bf16 (``bf16-mixed``).
        peak_bytes: Peak memory of a training step, None where it was not measured.
        parity: The gradient parity test's finding, None where it was not made.
        loss: Mean loss of the last steps that it trained in the first start of the final (without one, in the race), None where there were none.
        compile_s: Seconds that compiling it took, with none of its code on disk; None where it was not compiled.
        pays_after_steps: Steps that take as much longer uncompiled; None where that is not known, or never.
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
    """A region of the model: one module, or modules of one structure at the same place of repeated blocks.

    Attributes:
        pattern: As a plan's region names it, such as ``blocks.*.norm``.
        kind: Class name of its modules.
        parameters: Elements in their parameters.
        format: Format it runs in under the chosen plan.
        reason: Why that, where it is not the plan's own format.
        time_fp32_s: Forward and backward of all its modules in fp32, None where it was not timed alone.
        time_low_s: The same in the plan's compute format, casts at its border included.
        damage: Its share of the damage to the update when it alone runs low, or None where it was not probed alone.
        share: Its parameters' share of the whole model's damage under the chosen plan: ``bias`` and ``noise`` together.
        data_noise: Variance of its gradient over batches in the same unit (share of signal + data noise / m).
        grad_largest: Largest magnitude in its output's gradients, unscaled.
        grad_smallest: Magnitude below which lies at most a thousandth of the squared norm of these.
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
    """A stage of the search and what it cost.

    Attributes:
        name: Such as ``reference``, ``costs`` or ``race``.
        passes: Forward/backwards spent on numerics; steps of races are not among them.
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
        upper: Upper 95 % confidence bound of it.
        margin: What it had to stay below: a share of how far fp32's loss fell (``lab/search/pairs.py::MARGIN``).
        detectable: The smallest difference that these runs would have shown four times out of five.
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
    """All that a search measured.

    Attributes:
        command: What repeats the search.
        goal: ``time``, ``memory`` or ``numerics``.
        formats: Formats that were allowed.
        plan: The chosen plan's line.
        compute: The format that it computes in, apart from its regions.
        answer: What to do and what it brings, in a sentence.
        why: What speaks for it, in sentences.
        complete: False where the search was interrupted or ran out of its budget.
        settings: ``accumulate``, ``world_size``, ``compile``, ``warmup_steps``, ``seed``, ``budget_s`` and such.
        world_size: Ranks that measured together, 1 for a process alone. Every time is the slowest rank's, every peak the
            largest, and every damage the worst.
        candidates: The plans considered, the chosen one first, then by time.
        regions: The model's regions, in the model's order.
        histograms: Of the gradients.
        scale: The range of loss scales, where fp16 was in the running.
        floor: Damage of fp32 against itself, rounding differently.
        repeat: Damage of fp32 against itself, repeated exactly; above 0 where the loss is not deterministic.
        lines: Damage below which the parity test passes, and above which it fails.
        stages: What was done, in order, and what it cost.
        verification: Of ``verify_steps``, where asked for.
        notes: Sentences that a reader should not miss.
        undecided: What was left open, and what would decide it: a longer budget, or a quieter machine.
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
        """Forward/backwards spent on numerics, over all stages."""
        return sum(stage.passes for stage in self.stages)
