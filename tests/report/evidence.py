"""Evidence of a search made by hand, for which the correct report is known."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from castwise.commands.jobs.tune_result import TuneResult
from castwise.core.plans.plan import Plan, Region
from castwise.lab.parity.gradient_range import Histogram, ScaleRange
from castwise.lab.search.evidence import Candidate, Damage, Evidence, RegionEvidence, Stage, Verification
from castwise.lab.timing.environment import Environment
from castwise.lab.timing.stats import Ratio, Summary

MIB = 2**20
CHOSEN = dataclasses.replace(
    Plan.preset("bf16-mixed"),
    regions=(Region("stages.*.blocks.*.dwconv", compute="fp32"),),
    optimizer="fused",
)
ENVIRONMENT = Environment(
    device="Test CPU 9000 <fast> 16-Core Processor", device_type="cpu", cores=2, threads=2, capability="AVX512",
    torch="2.13.0", python="3.11.7", castwise="0.1.0", commit="0123456789ab", system="Linux x86_64",
    command="castwise tune convnext --out out", date="2026-01-02T03:04:05+00:00",
)  # fmt: skip


def make_damage(value: float, verdict: Any = None, reason: str = "") -> Damage:
    """Return a damage that is three quarters bias, with the verdict of the usual limits unless one is given."""
    judged = verdict or ("pass" if value < 0.01 else "fail" if value > 0.1 else "undecided")
    if not math.isfinite(value):
        return Damage("fail", value, value, value, math.nan, math.nan, reason or "a gradient was not finite")
    return Damage(judged, value, 0.6 * value, 1.7 * value, 0.75 * value, 0.25 * value, reason)


def make_candidate(name: str, step_s: float | None, status: Any = "sound", **changes: Any) -> Candidate:
    """Return a plan, compared with fp32 at 100 ms per step and bf16-mixed at 73 ms per step."""
    made = Candidate(name, name, status)
    if step_s is not None:
        made = dataclasses.replace(
            made,
            rounds=12,
            time=Summary(step_s, 0.98 * step_s, 1.02 * step_s, 12),
            speedup=None
            if status == "baseline"
            else Ratio(0.1 / step_s, 0.097 / step_s, 0.103 / step_s, 0.95, 12),
            versus_autocast=Ratio(0.073 / step_s, 0.071 / step_s, 0.075 / step_s, 0.95, 12),
            peak_bytes=int(1000 * MIB * (0.4 + 6 * step_s)),
            loss=2.3456,
        )
    return dataclasses.replace(made, **changes)


def _bell(pattern: str, middle: float, spread: float, total: int) -> Histogram:
    weights = [math.exp(-0.5 * ((i - middle) / spread) ** 2) for i in range(-60, 10)]
    counts = [int(total * w / sum(weights)) for w in weights]
    used = [i for i, n in enumerate(counts) if n]
    return Histogram(pattern, -60 + used[0], tuple(counts[used[0] : used[-1] + 1]), total // 50)


def _regions() -> tuple[RegionEvidence, ...]:
    low = {"time_fp32_s": 12e-3, "time_low_s": 5e-3, "grad_largest": 3e-3, "grad_smallest": 2e-9}
    return (
        RegionEvidence("stem", "Conv2d", 1, 4_704, "bf16", share=0.0008, bias=0.0003, noise=0.0005, data_noise=0.05, **low),
        RegionEvidence(
            "stages.*.blocks.*.dwconv", "Conv2d", 9, 42_336, "fp32", "bf16 is slower here: 21.0 ms against 12.4",
            time_fp32_s=12.4e-3, time_low_s=21e-3, share=1e-6, bias=0.0, noise=1e-6, data_noise=0.11,
        ),
        RegionEvidence(
            "stages.*.blocks.*.norm", "LayerNorm", 9, 6_912, "fp32", "gradient bias 0.31 in bf16",
            time_fp32_s=1.1e-3, time_low_s=0.9e-3, damage=make_damage(0.34), share=2e-7, bias=1e-7, noise=1e-7,
            data_noise=0.02, grad_largest=0.4, grad_smallest=3e-8,
        ),
        RegionEvidence(
            "stages.*.blocks.*.pwconv*", "Linear", 18, 2_359_296, "bf16", damage=make_damage(0.0021), share=0.0022,
            bias=0.0014, noise=0.0008, data_noise=0.44, **low,
        ),
        RegionEvidence("head", "Linear", 1, 3_850, "bf16"),
    )  # fmt: skip


def make_evidence(**changes: Any) -> Evidence:
    """Return the evidence of a finished search with all kinds of entries, with the given changes."""
    line = str(CHOSEN)
    candidates = (
        make_candidate(
            line, 0.056, "chosen", reason="the fastest whose gradients cannot be distinguished from fp32's",
            parity=make_damage(0.0031),
        ),
        make_candidate("bf16-mixed+optimizer=fused", 0.0655, parity=make_damage(0.0042)),
        make_candidate("bf16-mixed+memory_format=channels_last", 0.0561, "tie", reason="as fast as the chosen plan",
                       parity=make_damage(0.0040)),
        make_candidate("bf16-mixed+memory_format=channels_last+optimizer=fused", 0.0559, "tie",
                       reason="as fast as the chosen plan", parity=make_damage(0.0044)),
        make_candidate("bf16-mixed", 0.073, parity=make_damage(0.0040)),
        make_candidate("fp32", 0.1, "baseline"),
        make_candidate("bf16-master", 0.064, "rejected", reason="gradient bias 0.31 in stages.2.blocks.1.norm",
                       parity=make_damage(0.33)),
        make_candidate("bf16-master+memory_format=channels_last+optimizer=fused", 0.061, "rejected",
                       reason="undecided after 24 microbatches: damage 0.02 to 0.08", parity=make_damage(0.043)),
        make_candidate("fp32+memory_format=channels_last", 0.098, "rejected", reason="not faster", rounds=4),
        make_candidate("fp16-mixed", 6.9, "rejected", reason="not faster: convolutions take 69x the time in fp16",
                       parity=make_damage(math.inf)),
        make_candidate("fp16-true", None, "rejected", reason="out of memory"),
        make_candidate("fp32+optimizer=fused", None, "not tried", reason="the time ran out"),
        make_candidate("tf32", None, "rejected", reason="not supported by this device: no <TF32> on a CPU"),
    )  # fmt: skip
    made = Evidence(
        workload="convnext", description="a small ConvNeXt on <random> images",
        command="castwise tune convnext --out out", goal="time", formats=("fp32", "bf16", "fp16"),
        plan=line, digest=CHOSEN.digest, compute="bf16",
        answer="Train in bf16 by autocast, keep stages.*.blocks.*.dwconv in fp32, switch to the fused AdamW: 1.79 times as "
        "fast (1.73-1.84), 26 % less memory.",
        why=("Compared with one-line torch.autocast in bf16 it is 1.30 times as fast (1.27-1.34).",
             "Its gradients cannot be distinguished from fp32's within the noise of the data."),
        complete=True,
        settings={"accumulate": 1, "world_size": 1, "compile": False, "warmup_steps": 0, "seed": 0, "budget_s": None},
        environment=ENVIRONMENT, candidates=candidates, regions=_regions(),
        histograms=(
            _bell("stem", -22, 4, 900_000), _bell("stages.*.blocks.*.dwconv", -27, 4.5, 4_000_000),
            _bell("stages.*.blocks.*.norm", -24, 5, 3_000_000), _bell("stages.*.blocks.*.pwconv*", -26, 4, 8_000_000),
            _bell("head", -9, 2, 2_000),
        ),
        scale=ScaleRange(0.4, 2e-9, 29.8, 163_760.0, 16_384.0),
        floor=2e-9, repeat=0.0,
        stages=(
            Stage("checks", 1.2, passes=3), Stage("costs", 14.5), Stage("race", 61.0, steps=212),
            Stage("reference", 3.1, passes=8), Stage("floor", 1.4, passes=4), Stage("all low", 5.9, passes=16),
            Stage("regions", 14.2, passes=32), Stage("confirmation", 3.0, passes=8),
            Stage("verification", 95.0, steps=2_000),
        ),
        verification=Verification(100, 10, 0.0012, 0.0041, 0.0130, 0.0052, "not worse"),
        notes=("bf16-mixed stores nothing low: its <memory> is that of fp32.",),
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def make_bare(**changes: Any) -> Evidence:
    """Return the evidence of a search that was interrupted at its start."""
    made = Evidence(
        workload="m", description="", command=ENVIRONMENT.command, goal="time", formats=("fp32", "bf16"), plan="fp32",
        digest=Plan.preset("fp32").digest, compute="fp32", answer="The search ended early.", complete=False, settings={}, environment=ENVIRONMENT,
        candidates=(), regions=(),
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def make_record(evidence: Evidence | None = None) -> dict[str, Any]:
    """Return the plain record from which the page is made."""
    evidence = make_evidence() if evidence is None else evidence
    return TuneResult(Plan.parse(evidence.plan), evidence).to_dict()
