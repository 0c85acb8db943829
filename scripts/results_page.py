"""Write the tables of tuned plans in README.md and docs/results.md from ``bench/results/tune-cpu.json``.

python scripts/results_page.py
"""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

from castwise import Plan

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "tune-cpu.json"
JOBS = {
    "sine": "1x1 convolutions (`sine`)", "gpt": "small GPT (`gpt`)", "digits": "small convolutional net (`digits`)",
    "bert": "BERT", "gpt2": "GPT-2", "llama": "Llama", "t5": "T5", "vit": "vision transformer", "resnet": "ResNet",
    "convnext": "ConvNeXt", "mobilenet": "MobileNet", "wav2vec": "wav2vec 2.0",
}  # fmt: skip
MARKED = re.compile(r"(<!-- results:start -->\n).*?(<!-- results:end -->)", re.DOTALL)


def chosen(row: dict[str, Any]) -> str:
    """A plan in a table's words."""
    plan = Plan.parse(row["plan"])
    words = [plan.compute]
    if plan.stores_low:
        words = [
            f"{plan.compute} with {'fp32 copies of the weights' if plan.keeps_masters else 'weights in it'}"
        ]
    if plan.fp32_matmul != "as_is":
        words.append(f"products in {plan.fp32_matmul}")
    words += [
        "attention as plain products" if op == "scaled_dot_product_attention" else f"{op} {rule}"
        for op, rule in plan.ops
    ]
    words += [
        f"`{region.pattern.rpartition('.')[2]}` in {region.compute}"
        for region in plan.regions
        if region.compute is not None
    ]
    words += [plan.memory_format] * (plan.memory_format != "as_is") + ["fused optimizer"] * (
        plan.optimizer == "fused"
    )
    doubt = any(
        one["gradients"] not in ("pass", None) for one in row["searches"] if one["plan"] == row["plan"]
    )
    return ", ".join(words) + ("; gradients in doubt, decided by training" if doubt else "")


def told(ratio: list[float]) -> str:
    """A ratio with its interval."""
    value, low, high = ratio
    return f"{value:.2f} ({low:.2f}-{high:.2f})"


def searched(row: dict[str, Any]) -> str:
    """How the plans of several searches differ."""
    count = len(row["searches"])
    many = len({one["plan"] for one in row["searches"]})
    same = "one" if many == 1 else f"{many}, of one format" if row["alike"] else str(many)
    return f"{same} in {count}"


def table(whole: bool) -> str:
    """The rows, the largest gain over autocast first, and their mean; ``whole`` is with what only experts ask for."""
    record = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    rows = sorted((row for row in record if "over_autocast" in row), key=lambda row: -row["over_autocast"][0])
    titles = ["training job", "what castwise chose", "against fp32", "against one-line autocast"]
    titles += ["against the best of the hand grid", "plans of its searches"] * whole
    lines = [titles, ["---"] * len(titles)]
    for row in rows:
        line = [
            JOBS[row["workload"].split("?")[0]],
            chosen(row),
            told(row["over_fp32"]),
            told(row["over_autocast"]),
        ]
        lines.append(line + [told(row["over_best_of_grid"]), searched(row)] * whole)
    mean = math.exp(statistics.fmean(math.log(row["over_autocast"][0]) for row in rows))
    return (
        "".join(f"| {' | '.join(line)} |\n" for line in lines)
        + f"\nOver one-line autocast that is {mean:.2f} times as fast in the geometric mean.\n"
    )


def page(name: str) -> str:
    """A page with its table as the results say."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return MARKED.sub(lambda found: found[1] + table(name != "README.md") + found[2], text)


PAGES = ("README.md", "docs/results.md")

if __name__ == "__main__":
    for name in PAGES:
        (ROOT / name).write_text(page(name), encoding="utf-8")
