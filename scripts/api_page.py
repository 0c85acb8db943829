"""Write docs/api.md: every public name with its signature and the first sentence of its docstring.

On the site, that page has the complete docstrings under the same headings (``reference()``).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import castwise
import castwise.core.schemas
import castwise.lab.watch
from castwise import errors
from castwise.core import casting, checkpoint, masters, parallel, scaler
from castwise.core.masters import updates
from castwise.core.plans import plan, rules
from castwise.lab.inspect import comparison, cures, operators, ratios, values
from castwise.lab.inspect import forecast as forecasts
from castwise.lab.parity import casts, damage, gradient_range, parity
from castwise.lab.serve import result, verdicts
from castwise.lab.timing import environment as measured_on
from castwise.lab.workloads import workload

PAGE = Path(__file__).parent.parent / "docs" / "api.md"

INTRODUCTION = """\
# API

<!-- Written by scripts/api_page.py from the docstrings. Edit those instead. -->

What `import castwise` offers, with one line each; `help(castwise.Amp)` has arguments, shapes, dtypes and errors in full.

"""

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "In a training loop": ("Amp", "AveragedModel", "StepResult"),
    "Plans": ("Plan", "Region", "LossScale"),
    "Experiments": ("tune", "TuneResult", "parity", "ParityResult"),
    "Seeing the numerics": (
        "forecast", "Forecast", "compare", "Comparison", "operator_table", "OperatorTable", "first_nonfinite", "FirstNonfinite",
        "mismatch", "Mismatch",
    ),
    "While a training runs": ("Monitor", "Recorder", "replay", "Replay", "Recovery"),
    "Casting": (
        "autocast", "lower_function", "fp32_function", "widest_function", "custom_fwd", "custom_bwd",
    ),
    "Serving": ("output_parity", "OutputParity", "export", "bake"),
    "Loss scaling by hand": ("GradScaler",),
    "Workloads": ("Workload", "bench"),
    "Errors": ("CastwiseError",),
}  # fmt: skip
"""The sections, and the names of ``castwise.__all__`` in each."""

FURTHER_TEXT = """\
For single questions, and for libraries on top of castwise: the drop-ins for Apex and Colossal-AI use nothing that is not
on this page."""

FURTHER = (
    ("castwise.casting", casting, ("AmbientAutocast", "default_device_type", "hook_first")),
    ("castwise.checkpoint", checkpoint, ("save", "Saving", "newest", "load")),
    ("castwise.inspection.comparison", comparison, ("CallComparison", "Side", "TriedExemption")),
    ("castwise.inspection.forecast", forecasts, ("RegionForecast", "Spread", "TensorForecast")),
    ("castwise.inspection.cures", cures, ("TriedCure",)),
    ("castwise.inspection.operators", operators, ("OperatorUse", "RegionUse", "CastUse")),
    ("castwise.inspection.ratios", ratios, ("ServeMismatch", "Token")),
    ("castwise.inspection.values", values, ("Values",)),
    (
        "castwise.masters",
        masters,
        ("master_of", "model_param_of", "copy_to_model", "refresh_master", "make_pickles_plain"),
    ),
    (
        "castwise.monitor",
        castwise.lab.watch,
        ("Line", "Alarm", "Sample", "RegionSample", "Audit", "MonitorReport"),
    ),
    ("castwise.measure.environment", measured_on, ("Environment",)),
    ("castwise.numerics.casts", casts, ("Cast",)),
    ("castwise.numerics.damage", damage, ("Estimate",)),
    ("castwise.numerics.gradient_range", gradient_range, ("Histogram", "ScaleRange")),
    ("castwise.numerics.parity", parity, ("RegionParity", "Choice")),
    ("castwise.parallel", parallel, ("init_process_group", "compress_to_bf16", "compress_to_fp16")),
    ("castwise.plans.plan", plan, ("as_plan",)),
    ("castwise.plans.rules", rules, ("base_table", "describe", "overrides")),
    (
        "castwise.scaler",
        scaler,
        (
            "check_and_multiply",
            "set_aside",
            "add_up",
            "next_state",
            "from_apex",
            "to_apex",
            "from_colossalai",
            "to_colossalai",
        ),
    ),
    ("castwise.schemas", castwise.core.schemas, ("schema",)),
    ("castwise.serving.result", result, ("Metric",)),
    ("castwise.serving.verdicts", verdicts, ("OutputError",)),
    ("castwise.updates", updates, ("lamb_", "novograd_", "total_norm")),
    ("castwise.workload", workload, ("find_workload", "Pipeline")),
)
"""Further names: where to import them from, the module, the names. Drop-ins use only these and those of ``SECTIONS``."""


def page() -> str:
    """Return the whole page."""
    assert sorted(sum(SECTIONS.values(), ())) == castwise.__all__, "a public name without a section"
    parts = [INTRODUCTION]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n\n")
        parts += (_entry(name, getattr(castwise, name)) for name in names)
        if title == "Errors":
            parts.append(_errors())
    parts.append(f"## Further names\n\n{FURTHER_TEXT}\n\n| call | |\n|---|---|\n")
    for where, module, names in FURTHER:
        parts += (f"| `{where}.{_call(name, getattr(module, name))}` | {_summary(getattr(module, name))} |\n"
                  for name in names)  # fmt: skip
    return "".join(parts).rstrip() + "\n"


def reference() -> str:
    """Return the page for the site: autodoc directives, which insert the docstrings."""
    parts = ["# API\n\nWhat `import castwise` offers. Each name is an attribute of `castwise`.\n\n"]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n\n")
        parts += (
            f"### {name}\n\n{_directive(f'castwise.{name}', getattr(castwise, name))}" for name in names
        )
        if title == "Errors":
            parts += ["In `castwise.errors`, each also the builtin that a caller would expect:\n\n"]
            parts += (_directive(f"castwise.errors.{name}", getattr(errors, name))
                      for name in errors.__all__ if name not in castwise.__all__)  # fmt: skip
    parts.append(f"## Further names\n\n{FURTHER_TEXT}\n\n")
    for where, module, names in FURTHER:
        parts += (_directive(f"{where}.{name}", getattr(module, name)) for name in names)
    return "".join(parts)


def _directive(path: str, value: Any) -> str:
    kind, options = "function", ""
    if inspect.isclass(value):
        kind = "exception" if issubclass(value, Exception) else "class"
        members = ", ".join(call.partition("(")[0] for call, _ in _members(value))
        options = f"   :members: {members}\n" * bool(members)
        options += "   :show-inheritance:\n" * (kind == "exception")
    return f"```{{eval-rst}}\n.. auto{kind}:: {path}\n{options}```\n\n"


def _entry(name: str, value: Any) -> str:
    if inspect.isclass(value) and issubclass(value, Exception):
        return f"`{name}`: {_summary(value)}\n\n"
    text = f"### {name}\n\n```text\n{_call(name, value)}\n```\n\n{_summary(value)}\n\n"
    members = list(_members(value)) if inspect.isclass(value) else []
    if members:
        text += "| | |\n|---|---|\n" + "".join(f"| `{call}` | {said} |\n" for call, said in members) + "\n"
    return text


def _members(cls: type) -> Iterator[tuple[str, str]]:
    bases = [
        base
        for base in cls.__mro__[1:]
        if base.__module__.startswith((
            "castwise.core.session",
            "castwise.commands.jobs",
            "castwise.lab.result",
        ))
    ]
    inherited = {k: v for base in reversed(bases) for k, v in vars(base).items()}
    for name, value in {**vars(cls), **inherited, **vars(cls)}.items():
        if name.startswith("_"):
            continue
        if isinstance(value, (classmethod, staticmethod)):
            yield _call(name, value.__func__, bound=isinstance(value, classmethod)), _summary(value)
        elif inspect.isfunction(value):
            yield _call(name, value, bound=True), _summary(value)
        elif isinstance(value, (property, cached_property)):
            yield name, _summary(value)


def _errors() -> str:
    rows = []
    for name in errors.__all__:
        cls = getattr(errors, name)
        if cls is not errors.CastwiseError:
            bases = ", ".join(f"`{base.__name__}`" for base in cls.__bases__)
            rows.append(f"| `{name}` | {bases} | {_summary(cls)} |\n")
    return (
        "In `castwise.errors`, each also the builtin that a caller would expect:\n\n| error | is a | |\n|---|---|---|\n"
        + "".join(rows)
        + "\n"
    )


def _call(name: str, value: Any, *, bound: bool = False) -> str:
    signature = inspect.signature(value)
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()
    ]
    plain = signature.replace(parameters=parameters[bound:], return_annotation=inspect.Signature.empty)
    return f"{name}{plain}".replace("|", "\\|")


def _summary(value: Any) -> str:
    """Return the first sentence of a docstring, in Markdown."""
    paragraph = " ".join(inspect.cleandoc(value.__doc__).split("\n\n")[0].split())
    first = re.split(r"(?<=\.)\s", paragraph)[0]
    first = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", first)  # :class:`~castwise.Plan`
    return first.replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
