"""Write the tables of README.md, docs/results.md and docs/which-precision.md from the files of ``bench/results``.

    python scripts/results_page.py

The text between ``<!-- results:NAME:start -->`` and ``<!-- results:end -->`` is written by the function of that name.
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
RESULTS = ROOT / "bench" / "results"
JOBS = {
    "sine": "1x1 convolutions (`sine`)", "gpt": "small GPT (`gpt`)", "digits": "small convolutional net (`digits`)",
    "bert": "BERT", "gpt2": "GPT-2", "llama": "Llama", "t5": "T5", "vit": "vision transformer", "resnet": "ResNet",
    "convnext": "ConvNeXt", "mobilenet": "MobileNet", "wav2vec": "wav2vec 2.0", "mlp": "tiny MLP",
}  # fmt: skip
OTHER = "tune-cpu-no-amx"
MARKED = re.compile(r"(<!-- results:(\w+):start -->\n).*?(<!-- results:end -->)", re.DOTALL)


def chosen(row: dict[str, Any]) -> str:
    """Return the chosen plan of a row in words, for a table."""
    doubt = any(
        one["gradients"] not in ("pass", None) for one in row["searches"] if one["plan"] == row["plan"]
    )
    return worded(row["plan"]) + ("; gradients in doubt, decided by training" if doubt else "")


def worded(line: str) -> str:
    """Return a plan in words, for a table."""
    plan = Plan.parse(line)
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
    words += ["freed memory kept"] * (plan.host_memory == "keep")
    return ", ".join(words + ["compiled"] * (plan.compile != "as_given"))


def told(ratio: list[float]) -> str:
    """Return a ratio with its interval as text."""
    value, low, high = ratio
    return f"{value:.2f} ({low:.2f}-{high:.2f})"


def searched(row: dict[str, Any]) -> str:
    """Return how the plans of several searches differ."""
    count = len(row["searches"])
    many = len({one["plan"] for one in row["searches"]})
    same = "one" if many == 1 else f"{many}, of one format" if row["alike"] else str(many)
    return f"{same} in {count}"


def measured(name: str) -> list[dict[str, Any]]:
    """Return the rows of a result file."""
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    return rows


def jobs(name: str = "tune-cpu") -> list[dict[str, Any]]:
    """Return the rows of the tuned jobs, with the largest speedup over autocast first."""
    rows = (row for row in measured(name) if "over_autocast" in row)
    return sorted(rows, key=lambda row: -row["over_autocast"][0])


def backed(*names: str) -> str:
    """Return the line below a table that names its files."""
    return f"\nFrom {' and '.join(f'[{name}.json](../bench/results/{name}.json)' for name in names)}.\n"


def markdown(lines: list[list[str]]) -> str:
    """Return a Markdown table; the first line has the titles."""
    head, *body = lines
    return "".join(f"| {' | '.join(line)} |\n" for line in [head, ["---"] * len(head), *body])


def table(whole: bool) -> str:
    """Return the table of the tuned jobs with their mean; ``whole`` adds columns for experts."""
    rows = jobs("tune-cpu")
    titles = ["training job", "what castwise chose", "against fp32", "against one-line autocast"]
    titles += ["against the best of the hand grid", "plans of its searches"] * whole
    lines = [titles]
    for row in rows:
        line = [
            JOBS[row["workload"].split("?")[0]],
            chosen(row),
            told(row["over_fp32"]),
            told(row["over_autocast"]),
        ]
        lines.append(line + [told(row["over_best_of_grid"]), searched(row)] * whole)
    return f"{markdown(lines)}\nIn the geometric mean, these plans are {mean(rows, 'over_autocast'):.2f} times as fast as one-line autocast.\n"


def mean(rows: list[dict[str, Any]], *keys: str) -> float:
    """Return the geometric mean of a ratio, or of a ratio divided by others."""
    logs = [[math.log(row[key][0]) for key in keys] for row in rows]
    return math.exp(statistics.fmean(first - sum(rest) for first, *rest in logs))


def compiled() -> str:
    """Return the table of the jobs tuned with the compiler, against a hand grid with compiled plans."""
    rows = jobs("tune-compiled-cpu")
    lines = [
        [
            "training job",
            "what castwise chose",
            "against one-line autocast",
            "best of the hand grid",
            "against that",
            "of it by kept memory",
        ]
    ]
    lines += [
        [
            JOBS[row["workload"].split("?")[0]],
            chosen(row),
            told(row["over_autocast"]),
            worded(row["best_of_grid"]),
            told(row["over_best_of_grid"]),
            told(row["over_giving_back"]),
        ]
        for row in rows
    ]
    over, ahead = mean(rows, "over_autocast"), mean(rows, "over_best_of_grid")
    back = (
        mean(rows, "over_autocast", "over_giving_back"),
        mean(rows, "over_best_of_grid", "over_giving_back"),
    )
    return (
        f"{markdown(lines)}\nIn the geometric mean, these plans are {over:.2f} times as fast as one-line autocast, and {ahead:.2f} times as fast as the best of "
        f"the grid. Autocast and the grid do not keep freed memory; without kept memory, the plans are {back[0]:.2f} and {back[1]:.2f} times as fast.\n"
        f"{backed('tune-compiled-cpu')}"
    )


def machines() -> str:
    """Return the table of the same jobs on the other machine, with the chosen plans and their speedups."""
    here = {row["workload"]: row for row in jobs()}
    rows = jobs(OTHER)
    lines = [
        [
            "training job",
            "chosen without AMX",
            "against fp32",
            "against one-line autocast",
            "the same format with AMX",
        ]
    ]
    for row in rows:
        one, two = (Plan.parse(found["plan"]) for found in (row, here[row["workload"]]))
        same = "yes" if form(one) == form(two) else f"no: {form(two)}"
        lines.append([
            JOBS[row["workload"].split("?")[0]], chosen(row), told(row["over_fp32"]), told(row["over_autocast"]), same
        ])  # fmt: skip
    over, ahead = mean(rows, "over_autocast"), mean(rows, "over_best_of_grid")
    return (
        f"{markdown(lines)}\nIn the geometric mean, these plans are {over:.2f} times as fast as one-line autocast, and {ahead:.2f} times as fast as the "
        f"best of the hand grid.\n{backed(OTHER)}"
    )


def form(plan: Plan) -> str:
    """Return a plan's format as the name of the preset that has it."""
    if plan.compute == "fp32":
        return "`fp32`" + f" with products in {plan.fp32_matmul}" * (plan.fp32_matmul != "as_is")
    return f"`{plan.compute}-{'master' if plan.keeps_masters else 'mixed'}`"


def formats() -> str:
    """Return the table of how often each format was chosen on each machine, with the speeds of castwise and autocast."""
    lines = [
        [
            "machine",
            "what castwise chose",
            "jobs",
            "its speed against fp32",
            "of one-line autocast in bf16, on the same jobs",
        ]
    ]
    for machine, name in (("with AMX", "tune-cpu"), ("without", OTHER)):
        groups: dict[str, list[dict[str, Any]]] = {}
        for row in jobs(name):
            groups.setdefault(form(Plan.parse(row["plan"])), []).append(row)
        for words, rows in sorted(groups.items(), key=lambda group: -len(group[1])):
            said = ", ".join(JOBS[row["workload"].split("?")[0]] for row in rows)
            tuned = [row["over_fp32"][0] for row in rows]
            line = [row["over_fp32"][0] / row["over_autocast"][0] for row in rows]
            lines.append([machine, words, f"{len(rows)}: {said}", between(tuned), between(line)])
    return markdown(lines) + backed("tune-cpu", OTHER)


def between(values: list[float]) -> str:
    """Return the smallest and the largest of some ratios as text."""
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def gradients() -> str:
    """Return the table of the parity test's verdicts by format, on healthy models and those with a planted fault."""
    rows = measured("parity-cpu")
    lines = [
        [
            "format",
            "healthy models: trials that pass",
            "largest damage of them",
            "models with a planted fault of range or rounding",
        ]
    ]
    for name in ("bf16", "fp16"):
        healthy = [row for row in rows if row["what"] == "healthy" and row["format"] == name]
        planted = [row for row in rows if row["what"] == "planted" and row["format"] == name]
        trials, passed = (sum(row[key] for row in healthy) for key in ("trials", "pass"))
        endless = sum(row["damage"] is None for row in planted)
        lines.append([
            name, f"{passed} of {trials}", f"{max(row['worst_damage'] for row in healthy):.4f}",
            f"{len(planted)} fail, {endless} of them because gradients are not finite at any loss scale",
        ])  # fmt: skip
    return markdown(lines) + backed("parity-cpu")


def memory() -> str:
    """Return the table of bytes per parameter that are held and sent, by layout and plan."""
    lines = [["layout and plan", "held per parameter, in bytes", "sent per parameter and step, in bytes"]]
    lines += [
        [f"{'one copy per process' if row['layout'] == 'ddp' else 'sharded over two (FSDP2)'}, `{row['plan']}`",
         f"{row['held_bytes_per_parameter']:.0f}", f"{row['bytes_per_parameter']:.0f}"]
        for row in measured("parallel-cpu")
        if row["part"] == "wire" and not row["compressed"]
    ]  # fmt: skip
    return markdown(lines) + backed("parallel-cpu")


def activations() -> str:
    """Return the table of speed and peak memory on a workload whose memory is nearly all activations."""
    lines = [["`sine`, training", "speed against fp32", "peak memory"]]
    lines += [
        [row["loop"].removeprefix("castwise "), told([row["speedup"], row["low"], row["high"]]), f"{-row['less_memory']:+.0%}"]
        for row in measured("sine-cpu")
        if row["what"] == "training" and row["loop"].startswith("castwise")
    ]  # fmt: skip
    return markdown(lines) + backed("sine-cpu")


def masters() -> str:
    """Return the table of the time and memory that masters cost on one process."""
    rows = measured("master-cpu")
    by_loop = {row["loop"]: row for row in rows if "loop" in row}
    lines = [["small GPT", "`bf16-master`"]]
    row = by_loop["castwise bf16-master"]
    lines.append(["time against torch.autocast by hand", told([row["ratio"], row["low"], row["high"]])])
    lines += [
        [f"peak memory above `bf16-mixed` where {row['memory']}, in bytes per parameter", f"{row['bytes_per_parameter_above']:+.1f}"]
        for row in rows if "memory" in row
    ]  # fmt: skip
    return markdown(lines) + backed("master-cpu")


def growth() -> str:
    """Return the table of step times relative to the hand-written loop, by number of parts, with ``prepare``'s seconds."""
    rows = measured("growth-cpu")
    races = [row for row in rows if "ratio" in row]
    plans = [*dict.fromkeys(row["plan"] for row in races)]
    short = [f"`{plan.partition('+')[0]}`" + (", GELU in fp32" if "gelu" in plan else "") for plan in plans]
    lines = [["parts of the model or step", *short]]
    for part, size in dict.fromkeys((row["part"], row["size"]) for row in races):
        of = {row["plan"]: row for row in races if (row["part"], row["size"]) == (part, size)}
        cells = [of.get(plan) for plan in plans]
        lines.append([
            f"{size:,} {part}",
            *("" if row is None else told([row["ratio"], row["low"], row["high"]]) for row in cells),
        ])
    prepared = [row for row in rows if row["part"] == "prepare"]
    most = max(row["size"] for row in prepared)
    seconds = ", ".join(
        f"{row['prepare_s']:.2f} s under `{row['plan']}`" for row in prepared if row["size"] == most
    )
    return markdown(lines) + f"\n`prepare` of {most:,} parameters took {seconds}.\n" + backed("growth-cpu")


def serving(whole: bool) -> str:
    """Return the table of the served jobs; ``whole`` adds columns for experts."""

    def ratio(row: dict[str, Any], name: str) -> str:
        return told([row[name], row[f"{name}_low"], row[f"{name}_high"]])

    titles = [
        "served model",
        "what castwise chose",
        "against fp32",
        "against one-line autocast",
        "memory against fp32",
    ]
    lines = [titles + ["against the best loop by hand", "that loop", "seconds of the search"] * whole]
    for row in sorted(measured("serving-cpu"), key=lambda row: -row["over_fp32"]):
        job = row["workload"].split("?")[0]
        if not whole and job not in JOBS:  # an architecture that was held back
            continue
        peaks, plan = row["peak_bytes"], worded(row["plan"])
        held = f"{(peaks['tuned'] / peaks['fp32'] - 1.0) * 100.0:+.0f} %"
        line = [
            JOBS.get(job, f"`{job}`"),
            plan,
            ratio(row, "over_fp32"),
            ratio(row, "over_autocast"),
            held,
        ]
        more = [ratio(row, "tuned_over_best"), row["best"], f"{row['search_s']:.0f}"] if whole else []
        lines.append(line + more)
    return markdown(lines)


def peer_rows() -> tuple[list[str], list[str], dict[tuple[str, str], dict[str, Any]]]:
    """Return the jobs, the ways to train them other than hand-written torch.amp, and the rows by way and job."""
    rows = [row for row in measured("peers-cpu") if "way" in row]
    known = {(row["way"], row["workload"]): row for row in rows}
    ways = [way for way in dict.fromkeys(row["way"] for row in rows) if way != "torch.amp"]
    return list(dict.fromkeys(row["workload"] for row in rows)), ways, known


def peers_short() -> str:
    """Return the table of speedups over hand-written torch.amp, on the overhead-bound job and on the others together."""
    jobs_, ways, known = peer_rows()
    others = [job for job in jobs_ if job != "mlp"]
    titles = [
        "bf16 against torch.amp by hand",
        JOBS["mlp"],
        f"geometric mean of {len(others)} jobs",
        "slowest and fastest of them",
    ]
    lines = [titles]
    for way in ways:
        speeds = [row["over_torch.amp"][0] for job in others if "over_torch.amp" in (row := known[way, job])]
        mean = math.exp(statistics.fmean(map(math.log, speeds)))
        missing = f", {len(others) - len(speeds)} failed" * (len(speeds) < len(others))
        own = told(known[way, "mlp"]["over_torch.amp"])
        lines.append([way, own, f"{mean:.2f}{missing}", f"{min(speeds):.2f} to {max(speeds):.2f}"])
    return markdown(lines)


def peers() -> str:
    """Return the table of speedups over hand-written torch.amp, job by job."""
    jobs_, ways, known = peer_rows()
    lines = [["bf16 against torch.amp by hand", *ways, "steps per second by hand"]]
    for job in jobs_:
        rows = [known[way, job] for way in ways]
        cells = [told(row["over_torch.amp"]) if "over_torch.amp" in row else "failed" for row in rows]
        lines.append([JOBS[job.split("?")[0]], *cells, f"{1e3 / known['torch.amp', job]['step_ms']:,.1f}"])
    return markdown(lines)


def peers_memory() -> str:
    """Return the table of peak process memory and of the loss after the same steps, job by job."""
    jobs_, ways, known = peer_rows()
    ways = ["torch.amp", *ways]
    lines = [["peak memory in MiB, and loss", *ways]]
    for job in jobs_:
        rows = [known[way, job] for way in ways]
        cells = [f"{row['peak_mib']:,}, {row['loss']:.4g}" if "loss" in row else "failed" for row in rows]
        lines.append([JOBS[job.split("?")[0]], *cells])
    return markdown(lines)


def forecasts() -> str:
    """Return the table of how often forecasts agree with runs, and the results on models with a fragile place."""
    rows = measured("forecast-cpu")
    jobs = [row for row in rows if "planted" not in row]
    lines = [["run in", "jobs", "regions", "agree in every share", "overflow agrees", "zeros agree"]]
    for plan in dict.fromkeys(row["plan"] for row in jobs):
        of = [row for row in jobs if row["plan"] == plan]

        def mean(key: str, weight: str, of: list[dict[str, Any]] = of) -> str:
            return f"{100 * sum(row[key] * row[weight] for row in of) / sum(row[weight] for row in of):.1f} %"

        lines.append([
            f"`{plan}`", str(len(of)), str(sum(row["regions"] for row in of)), mean("regions_agree", "regions"),
            mean("overflow_agrees", "tensors"), mean("flush_agrees", "tensors"),
        ])  # fmt: skip
    fragile = [row for row in rows if row.get("sound") is False]
    broken = [row for row in fragile if row["overflow_seen"]]
    named = [row for row in broken if "place" in row["troubled"]]
    sound = [row for row in rows if row.get("sound")]
    alarms = [row for row in sound if row["troubled"]]
    planted = (
        f"Of {len(fragile)} models with a fragile place, {len(broken)} produce non-finite numbers in fp16. The forecast names the place "
        f"in {len(named)} of these, and reports trouble in {len(alarms)} of the {len(sound)} counterparts without a fragile place."
    )
    return f"{markdown(lines)}\n{planted}\n{backed('forecast-cpu')}"


def gpu_jobs() -> str:
    """Return the table of the jobs that were tuned on a GPU."""
    lines = [
        [
            "training job",
            "what castwise chose",
            "against fp32",
            "against one-line autocast",
            "against the best of the hand grid",
        ]
    ]
    for row in jobs("tune-cuda"):
        ratios = (told(row[key]) for key in ("over_fp32", "over_autocast", "over_best_of_grid"))
        lines.append([f"`{row['workload']}`", chosen(row), *ratios])
    return markdown(lines) + backed("tune-cuda")


def gpu_sine() -> str:
    """Return the table of speed and memory on a GPU, for the job of the ROCm measurements."""
    rows = [row for row in measured("sine-cuda") if row["loop"] != "fp32"]
    lines = [
        ["`sine` of 512 x 512 against fp32", "training", "inference", "peak memory of training, of inference"]
    ]
    for loop in dict.fromkeys(row["loop"] for row in rows):
        of = {row["what"]: row for row in rows if row["loop"] == loop}
        speeds = [told([row["speedup"], row["low"], row["high"]]) for row in of.values()]
        less = [f"{-row['less_memory']:+.1%}" for row in of.values() if "less_memory" in row]
        lines.append([loop.removeprefix("castwise "), *speeds, ", ".join(less)])
    return markdown(lines) + backed("sine-cuda")


def gpu_loops() -> str:
    """Return the table of step times on a GPU relative to the hand-written loop."""
    lines = [["time of a step against the loop by hand", "ratio"]]
    for name, what in (
        ("overhead", "small MLP"),
        ("master", "GPT of width 384, fused AdamW"),
        ("compat", ""),
    ):
        for row in measured(f"{name}-cuda"):
            ours = row.get("loop", "").startswith((
                "castwise bf16",
                "castwise fp16",
                "apex",
                "torch.amp by hand, again",
            ))
            if ours and "guard" not in row.get("format", ""):
                job = what or f"{row['job']}, {row['format']}"
                lines.append([f"{job}: {row['loop']}", told([row["ratio"], row["low"], row["high"]])])
    return markdown(lines) + backed("overhead-cuda", "master-cuda", "compat-cuda")


TABLES = {
    "gpu_jobs": gpu_jobs,
    "gpu_sine": gpu_sine,
    "gpu_loops": gpu_loops,
    "forecasts": forecasts,
    "growth": growth,
    "peers": peers,
    "peers_short": peers_short,
    "peers_memory": peers_memory,
    "serving": lambda: serving(True) + backed("serving-cpu"),
    "serving_short": lambda: serving(False),
    "short": lambda: table(False),
    "whole": lambda: table(True),
    "machines": machines,
    "compiled": compiled,
    "formats": formats,
    "gradients": gradients,
    "memory": memory,
    "activations": activations,
    "masters": masters,
}


def page(name: str) -> str:
    """Return a page with its tables rewritten from the results."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return MARKED.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


PAGES = ("README.md", "docs/forecast.md", "docs/results.md", "docs/which-precision.md")

if __name__ == "__main__":
    for name in PAGES:
        (ROOT / name).write_text(page(name), encoding="utf-8")
