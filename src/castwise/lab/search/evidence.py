"""The results of a search as plain dataclasses, which are written to ``evidence.json`` and shown on a page.

Times are in seconds per training step, sizes in bytes. The JSON file holds all fields, with null for numbers that are not
finite.
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
    "Candidate", "Damage", "Evidence", "Histogram", "Latency", "RegionEvidence", "ScaleRange", "Stage", "Verification",
]  # fmt: skip

Status = Literal["baseline", "chosen", "sound", "tie", "rejected", "not tried"]
LINES = {"pass": PASS, "fail": FAIL, "adam_pass": ADAM_PASS, "adam_fail": ADAM_FAIL}


@dataclass(frozen=True)
class Damage:
    """The squared error that a plan adds to one update, divided by the expected squared norm of the update.

    Attributes:
        verdict: The verdict by the thresholds of the parity test. It is ``decided by training`` if the chosen plan's gradients
            did not pass and training runs accepted the plan.
        value: (bias + noise / m) / (signal + data noise / m), with m microbatches per update; infinite if a gradient was not
            finite. ``low`` and ``high`` are its bootstrap interval.
        bias: The part of ``value`` that is equal in every batch.
        noise: The part of ``value`` that averages out over batches.
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
        name: The preset's name or the plan's line, as shown in tables.
        plan: The plan's line, which ``Plan.parse`` reads.
        words: The plan in words.
        status: ``baseline`` (fp32, chosen or not), ``chosen``, ``tie`` (sound, and not known to be slower than the chosen
            plan), ``sound`` (nothing else is known), ``rejected``, or ``not tried`` (not to the end, because the time ran out
            or an equally good plan had been found).
        reason: The reason for the status ("not faster", "gradient bias 0.31 in encoder.layers.3.norm", "out of memory", "not
            supported by this device: ..."); for the chosen plan, why it was chosen.
        stage: The stage of the search in which the status was decided; empty if it was decided at the end.
        late: Whether the plan was not tried because the time ran out.
        rounds: Number of timed rounds that the plan ran.
        time: Time per training step, None if it was not timed.
        speedup: Speed relative to fp32, measured by the final comparison; > 1 is faster. None for plans that left before the
            final comparison.
        versus_autocast: Speed relative to one-line ``torch.autocast`` in bf16 (``bf16-mixed``).
        peak_bytes: Peak memory of a training step, None if it was not measured.
        parity: Result of the gradient parity test, None if it was not run.
        loss: Mean loss of the plan's last training steps in the first start of the final comparison (without a final, in the
            race), None if it trained no steps.
        compile_s: Seconds that compiling the plan took with an empty code cache on disk; None if it was not compiled.
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
    """What a search measured in one region: a module, or modules of equal structure at the same place in repeated blocks.

    Attributes:
        pattern: The pattern in a plan's region, such as ``blocks.*.norm``.
        kind: Class name of the region's modules.
        parameters: Number of elements in their parameters.
        format: Format in which the region runs under the chosen plan.
        reason: The reason for that format, if it differs from the plan's compute format.
        time_fp32_s: Seconds for forward and backward of all its modules in fp32, None if the region was not timed alone.
        time_low_s: The same in the plan's compute format, including the casts of its inputs and outputs.
        damage: The damage to the update when only this region runs in the low format, None if it was not tested alone.
        share: Its parameters' share of the whole model's damage under the chosen plan: ``bias`` and ``noise`` together.
        data_noise: Variance of its gradient over batches, in the same unit (share of signal + data noise / m).
        grad_largest: Largest magnitude in the unscaled gradients of its output.
        grad_smallest: Magnitude below which at most a thousandth of the squared norm of these gradients lies.
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


BY_AUTOCAST = "one-line autocast"
"""In place of a plan: ``torch.autocast`` in bf16 around the model as it is given, which casts the weights in each call."""


@dataclass(frozen=True)
class Latency:
    """The times of single calls of a model under a plan, in a process of its own, each after a pause of 10 ms.

    After a pause threads and caches are cold, as between requests, so a call takes longer than in the race, where calls follow each
    other.

    Attributes:
        plan: The plan's line, or ``one-line autocast`` for the model under one line of ``torch.autocast`` in bf16.
        batch_size: Number of samples per call; None for the batches of the workload as they are.
        median_s: Median seconds of a call, including the wait for the device.
        p95_s: The 95th percentile.
        calls: Number of calls.
    """

    plan: str
    batch_size: int | None
    median_s: float
    p95_s: float
    calls: int


@dataclass(frozen=True)
class Stage:
    """The cost of one stage of the search.

    Attributes:
        name: Such as ``reference``, ``costs`` or ``race``.
        passes: Forward/backward passes spent on testing gradients; the steps of a race do not count.
        steps: Training steps spent on timing.
    """

    name: str
    time_s: float
    passes: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Verification:
    """The result of short training runs of the chosen plan and of fp32, paired by seed.

    Attributes:
        difference: Mean over pairs of the loss under the plan minus that in fp32, over the last steps.
        upper: Upper 95 % confidence bound of ``difference``.
        margin: The limit for ``upper``: a share of the decrease of fp32's loss (``lab/search/pairs.py::MARGIN``).
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
        goal: ``time``, ``memory``, ``numerics`` or ``inference``.
        formats: The allowed formats.
        plan: The chosen plan's line.
        compute: The plan's compute format outside its regions.
        answer: What to do and what is gained by it, in a sentence.
        why: The reasons for the answer, one sentence each.
        complete: False if the search was interrupted or ran out of its budget.
        settings: ``accumulate``, ``world_size``, ``compile``, ``warmup_steps``, ``seed``, ``budget_s`` and other arguments of
            :func:`castwise.tune`.
        world_size: Number of ranks that measured together, 1 for a single process. Every time is the slowest rank's, every peak
            the largest, and every damage the worst.
        candidates: The considered plans: the chosen plan first, then the others by status and speed.
        regions: The model's regions, in model order.
        histograms: Histograms of the gradients.
        scale: The range of usable loss scales, if fp16 was considered.
        floor: Damage between two fp32 runs with different rounding.
        repeat: Damage between two identical fp32 runs; above 0 if the loss is not deterministic.
        lines: The thresholds of the damage: below ``pass`` the parity test passes, above ``fail`` it fails. ``adam_pass`` and
            ``adam_fail`` are the same in units of Adam's steps.
        stages: The stages in order, with their costs.
        verification: The training runs, if ``verify_steps`` was given.
        latencies: For ``inference``, the times of single calls of fp32 and of the chosen plan, by batch size.
        widen: The value of ``widen=`` with which the plan is applied to a model that is given in bf16 or fp16.
        notes: Sentences that every reader should see.
        undecided: Open questions, each with what would settle it: a longer budget, or a quieter machine.
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
    latencies: tuple[Latency, ...] = ()
    widen: bool | str = False
    notes: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()

    @property
    def passes(self) -> int:
        """The number of forward/backward passes spent on testing gradients, over all stages."""
        return sum(stage.passes for stage in self.stages)
