"""Test whether ``castwise.first_nonfinite`` finds the operator that produced NaN or infinities, its module and a cure.

There are three kinds of cases. The models of ``bench/nonfinite/makers.py`` produce NaN or infinities in forward,
backward, checkpoints, compiled code, custom functions, losses, data, buffers and parameters; the right answer was
written from the code of each case. Sound models have intended infinities that disappear again. The planted failures
of ``bench/planted`` become non-finite under ``fp16-mixed`` at a loss scale of 1, which excludes the effects of the
loss scale. A row is ``right`` if the kind, operator, module and phase are all right, or if nothing is reported for a
sound model. If a plan cures a case, the plan must be found, and the case is run again under it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import castwise
from common import Results, arguments
from nonfinite.makers import MAKERS, SOUND, Maker
from planted import cases, models

PLANTED: dict[tuple[str, str], tuple[tuple[str, ...], str]] = {
    ("first", "variance"): (("mul",), "forward"),
    ("first", "log-sum-exp"): (("exp",), "forward"),
    ("first", "epsilon"): (("div",), "forward"),
    ("first", "overflow"): (("bmm",), "forward"),
    ("first", "underflow"): (("div",), "backward"),
    ("first", "exponential"): (("exp",), "forward"),
    ("held-out", "log-mean-exp"): (("exp",), "forward"),
    ("held-out", "epsilon"): (("div",), "forward"),
    ("held-out", "small-norm"): (("div",), "forward"),
    ("held-out", "attention-overflow"): (("bmm",), "forward"),
    ("held-out", "attention-mask"): (("mul", "_softmax"), "forward"),
    ("held-out", "softplus"): (("exp",), "forward"),
}
"""The planted cases that become non-finite in fp16, with the operators and the phase, read from their code.

``global-response`` is not among them: its sum overflows fp16, and dividing by the infinity gives 0."""


@dataclass(frozen=True)
class Case:
    """A case and its right answer.

    Attributes:
        suite: The suite that the case belongs to.
        maker: The model and the right answer.
    """

    suite: str
    maker: Maker


def _planted() -> Iterator[Case]:
    for suite, one in (("first", cases.CASES), ("held-out", models.CASES)):
        for case in one:
            workload = case.workload(False) if isinstance(case, cases.Case) else case.make(False)
            operators, phase = PLANTED.get((suite, case.name), ((), ""))

            def batch(make: Callable[[int], Iterator[Any]] = workload.batches) -> Any:
                return next(make(0))

            yield Case(
                f"planted, {suite}",
                Maker(
                    case.name,
                    workload.model,
                    operators,
                    case.fragile,
                    phase,
                    plan="fp16-mixed",
                    loss=workload.loss,
                    batch=batch,
                    cured=bool(operators),
                    scale=1.0,
                ),
            )


def _row(case: Case) -> dict[str, Any]:
    maker = case.maker
    torch.manual_seed(0)
    model, batch = maker.model(), maker.batch()
    start = time.perf_counter()
    found = castwise.first_nonfinite(model, maker.loss, batch, maker.plan, loss_scale=maker.scale)
    seconds = time.perf_counter() - start
    sound = maker.kind == "operator" and not maker.operators
    right = {
        "found": bool(found) is not sound,
        "operator": sound or not maker.operators or found.operator in maker.operators,
        "module": sound or found.module == maker.module,
        "phase": sound or found.origin not in ("operator", "constant") or found.phase == maker.phase,
        "kind": sound or found.origin == maker.kind,
        "cause": sound or not maker.cause or found.cause in maker.cause,
        "cure": (found.cure is not None) is maker.cured,
    }
    cured = found.cure is not None and _finite(model, maker.loss, batch, found.cure)
    return {
        "suite": case.suite,
        "case": maker.name,
        "plan": maker.plan,
        "right": all(right[key] for key in ("found", "operator", "module", "phase", "kind")),
        "cure_right": right["cure"] and (cured or not maker.cured),
        "wrong": [key for key, value in right.items() if not value],
        "said": f"{found.origin} {found.operator} in {found.module!r} {found.phase}: {found.cause}"
        if found
        else "all is finite",
        "cure": None if found.cure is None else str(found.cure),
        "seconds": round(seconds, 3),
    }


def _finite(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Any, plan: castwise.Plan
) -> bool:
    """Return whether an ordinary training step under a plan has a finite loss and finite gradients."""
    with castwise.Amp(plan, device="cpu") as amp:
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=0.0)
        amp.prepare(model, optimizer)
        value = loss(model, batch)
        amp.backward(value)
        gradients = [p.grad for p in parameters if p.grad is not None]
        return bool(torch.isfinite(value)) and all(bool(torch.isfinite(g).all()) for g in gradients)


def main() -> None:
    """Run ``first_nonfinite`` on every case and write ``results/nonfinite-cpu.json``."""
    options = arguments(__doc__).parse_args()
    with Results("nonfinite", torch.device("cpu"), __doc__, options.budget) as results:
        for case in (
            *(Case("makers", maker) for maker in MAKERS),
            *(Case("sound", maker) for maker in SOUND),
            *_planted(),
        ):
            with results.part(case.maker.name):
                results.add(_row(case))
        for suite in dict.fromkeys(row["suite"] for row in results.rows):
            rows = [row for row in results.rows if row["suite"] == suite]
            results.add({
                "suite": suite, "cases": len(rows), "right": sum(row["right"] for row in rows),
                "cures_right": sum(row["cure_right"] for row in rows),
            })  # fmt: skip


if __name__ == "__main__":
    main()
