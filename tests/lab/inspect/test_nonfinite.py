"""first_nonfinite() names the first operator that produced NaN or an infinity."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from castwise import Amp, CastwiseError, Plan, first_nonfinite
from castwise.errors import PlanError, WorkloadError
from castwise.lab.inspect.causes import ADVICE
from castwise.report.show import page
from tests.here import DEVICE
from tests.lab.inspect.makers import corpus
from tests.report.pages import read
from tests.soak import each_value, some

LOW = "fp16-mixed" if DEVICE == "cpu" else "fp16-mixed+ops.exp=lower+ops.pow=lower+ops.sum=lower"
"""A plan that runs exp, pow and sum in fp16; autocast on devices other than the CPU keeps them in fp32."""


@pytest.mark.parametrize("maker", some(corpus.MAKERS, 2), ids=lambda maker: maker.name)
def test_names_operator_module_phase_and_cause(maker: Any) -> None:
    torch.manual_seed(0)
    plan = LOW if maker.plan == "fp16-mixed" else maker.plan
    found = first_nonfinite(maker.model(), maker.loss, maker.batch(), plan, loss_scale=maker.scale)
    assert found
    assert found.origin == maker.kind
    assert found.module == maker.module
    assert found.in_model is maker.in_model
    assert found.call == maker.call
    if maker.operators:
        assert found.operator in maker.operators
        assert found.phase == maker.phase
    if maker.cause:
        assert found.cause in maker.cause
    assert (found.cure is not None) is maker.cured


@pytest.mark.parametrize("maker", some(corpus.SOUND, 2), ids=lambda maker: maker.name)
def test_infinities_that_go_away_again_are_no_fault(maker: Any) -> None:
    torch.manual_seed(0)
    found = first_nonfinite(maker.model(), maker.loss, maker.batch(), maker.plan, loss_scale=maker.scale)
    assert not found
    assert "Everything is finite" in found.to_dict()["answer"]


def _net(function: Callable[[Tensor], Tensor]) -> nn.Module:
    model: nn.Module = corpus.Net(corpus.Op(function))
    return model


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = corpus.square(model, batch)
    return loss


def test_the_cure_makes_a_step_of_a_training_finite() -> None:
    model = _net(lambda x: 1e-6 * (x.abs() + 12.0).exp())
    found = first_nonfinite(model, _loss, corpus.noise(), LOW)
    assert found.cure == Plan.parse(f"{LOW}+ops.exp=fp32".replace("+ops.exp=lower", ""))
    with Amp(found.cure, device=DEVICE) as amp:
        amp.prepare(model)
        loss = _loss(model, corpus.noise())
        amp.backward(loss)
        assert loss.isfinite()
    assert not first_nonfinite(model, _loss, corpus.noise(), found.cure)


def test_says_how_far_the_exact_result_is_beyond_the_format() -> None:
    found = first_nonfinite(_net(lambda x: (0 * x + 300.0).square()), _loss, corpus.noise(), LOW)
    assert found.operator == "pow"
    assert "90000" in found.why.replace("9e+04", "90000")
    assert "6.55e+04" in found.why
    (given,), (made,) = found.inputs, found.outputs
    assert (given.low, given.high, given.dtype) == (300.0, 300.0, "float16")
    assert (made.inf, made.nan, made.shape) == (8 * corpus.WIDTH, 0, (8, corpus.WIDTH))


def test_in_place_operators_are_shown_with_what_they_were_given() -> None:
    found = first_nonfinite(_net(lambda x: (0 * x + 2e38).mul_(4.0)), _loss, corpus.noise())
    assert found.operator == "mul_"
    assert found.inputs[0].high == pytest.approx(2e38)
    assert "8e+38" in found.why


def test_names_the_parameter_that_an_operator_was_given() -> None:
    model = _net(lambda x: x)
    with torch.no_grad():
        model.first.weight.fill_(3e38)
    found = first_nonfinite(model, _loss, corpus.noise())
    assert (found.operator, found.module, found.cause) == ("addmm", "first", "overflow")
    assert "mat2 (parameter first.weight)" in {values.name for values in found.inputs}


def test_names_the_line_of_code() -> None:
    def place(x: Tensor) -> Tensor:
        y = x.relu()
        return y.log()  # this one

    found = first_nonfinite(_net(place), _loss, corpus.noise())
    assert found.source.startswith("test_nonfinite.py, line ")
    assert found.source.endswith(", in place")
    assert found.code == "return y.log()  # this one"


def test_in_backward_the_line_is_that_of_the_forward_operator() -> None:
    def place(x: Tensor) -> Tensor:
        y = x * (x > 0)
        safe = y.sqrt()  # backward divides by it
        return safe + x

    found = first_nonfinite(_net(place), _loss, corpus.noise())
    assert (found.phase, found.forward, found.node) == ("backward", "sqrt", "SqrtBackward0")
    assert found.code == "safe = y.sqrt()  # backward divides by it"
    assert "loss" not in found.reached


def test_of_two_faults_the_first_is_told_and_the_other_named() -> None:
    model = nn.Sequential(
        nn.Linear(16, 16),
        corpus.Op(lambda x: x.relu().log().exp() + x.relu().log().clamp(max=0)),
        nn.Linear(16, 16),
    )
    model.append(corpus.Op(lambda x: x.detach().relu().log()))
    model.append(nn.Linear(16, 16))
    found = first_nonfinite(model, _loss, corpus.noise())
    assert (found.operator, found.module) == ("log", "1")


def test_a_loss_scale_that_is_too_large_is_said_to_be_that_and_a_smaller_one_is_tried() -> None:
    found = first_nonfinite(
        _net(lambda x: x), lambda m, b: 1e4 * _loss(m, b), corpus.noise(), "fp16-mixed", loss_scale=2.0**14
    )
    assert found.cause == "loss scale"
    assert found.loss_scale == 2.0**14
    assert found.cure is not None
    assert found.cure.loss_scale is not None
    assert found.cure.loss_scale.init < 2.0**14
    assert not first_nonfinite(_net(lambda x: x), _loss, corpus.noise(), "fp16-mixed", loss_scale=64.0)


@pytest.mark.parametrize(("plan", "scale"), [("fp32", 2.0), ("fp16-mixed", -1.0), ("fp16-mixed", math.inf)])
def test_refuses_a_loss_scale_that_cannot_be(plan: str, scale: float) -> None:
    with pytest.raises(PlanError, match=r"first_nonfinite\(loss_scale="):
        first_nonfinite(_net(lambda x: x), _loss, corpus.noise(), plan, loss_scale=scale)


def test_refuses_what_is_no_model_and_a_loss_that_is_none() -> None:
    with pytest.raises(WorkloadError, match="model is function"):
        first_nonfinite(lambda x: x, _loss, corpus.noise())  # type: ignore[arg-type]
    with pytest.raises(WorkloadError, match="shape"):
        first_nonfinite(_net(lambda x: x), lambda m, b: m(b), corpus.noise())
    with pytest.raises(WorkloadError, match="failed under fp32"):
        first_nonfinite(_net(lambda x: x), lambda m, b: m(b[0, 0, 0]), corpus.noise())


# --- nothing is changed ---------------------------------------------------------------------------------------


class Marked(nn.Module):
    """A model with state that a forward pass changes: dropout, BatchNorm and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5))
        self.body[2].eval()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        out: Tensor = self.body(x)
        return out.relu().log()


def _photograph(model: nn.Module) -> list[Any]:
    tensors = [
        *(t.detach().clone() for t in model.state_dict().values()),
        *(p.grad.clone() for p in model.parameters() if p.grad is not None),
        torch.get_rng_state(),
        torch.from_numpy(np.asarray(np.random.get_state()[1])).to(torch.int64),
    ]
    hooks = [
        len(table)
        for m in model.modules()
        for name, table in vars(m).items()
        if name.endswith("_hooks") and isinstance(table, dict)
    ]
    return [
        [t.tolist() for t in tensors],
        hooks,
        [m.training for m in model.modules()],
        [p.requires_grad for p in model.parameters()],
        [id(p) for p in model.parameters()],
        random.getstate(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(DEVICE),
        nn.Module.__call__,
    ]


def _marked() -> nn.Module:
    model = Marked()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


@pytest.mark.parametrize("plan", ["fp32", "fp16-master"])
def test_leaves_no_trace(plan: str) -> None:
    model, batch = _marked(), corpus.noise()
    before, data = _photograph(model), batch.clone()
    assert first_nonfinite(model, _loss, batch, plan)
    assert _photograph(model) == before
    assert torch.equal(batch, data)


@each_value()
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("when", ["forward", "backward", "second pass"])
def test_leaves_no_trace_where_it_is_interrupted(error: type[BaseException], when: str) -> None:
    model, passes = _marked(), []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        passes.append(1)
        if when == "forward" or len(passes) == 2:
            model(batch)
            raise error
        out = _loss(model, batch)
        if when == "backward":
            out.register_hook(_raising(error))
        return out

    before = _photograph(model)
    with pytest.raises((error, CastwiseError)):
        first_nonfinite(model, loss, corpus.noise(), "fp16-mixed")
    assert _photograph(model) == before
    assert first_nonfinite(model, _loss, corpus.noise())


def _raising(error: type[BaseException]) -> Callable[[Tensor], Tensor]:
    def hook(_: Tensor) -> Tensor:
        raise error

    return hook


def test_draws_what_the_caller_would_draw_next() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        drawn.append(torch.rand(()).item())
        return _loss(model, batch)

    drawn: list[float] = []
    first_nonfinite(_net(lambda x: x.relu().log()), loss, corpus.noise())
    assert len(drawn) > 1
    assert set(drawn) == {torch.rand(()).item()}
    drawn.clear()
    first_nonfinite(_net(lambda x: x), loss, corpus.noise(), seed=3)
    torch.manual_seed(3)
    assert drawn == [torch.rand(()).item()]


# --- text -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["where-log", "exp-fp16", "data-dict"])
def test_saves_a_record_and_a_page_that_say_the_same(name: str, tmp_path: Path) -> None:
    maker = next(m for m in corpus.MAKERS if m.name == name)
    found = first_nonfinite(maker.model(), maker.loss, maker.batch(), maker.plan)
    path = found.save(tmp_path / "new")
    record = json.loads((tmp_path / "new" / "nonfinite.json").read_text())
    said = read(path.read_text())
    assert record["answer"] in said
    assert record["operator"] == found.operator
    assert record["environment"]["torch"] == torch.__version__
    for trial in found.trials:
        assert trial.what in said
    assert page(record) == path.read_text()


def test_every_kind_of_cause_has_advice() -> None:
    for maker in corpus.MAKERS:
        assert all(cause in ADVICE or cause in ("loss scale", "underflow") for cause in maker.cause)


def test_statistics_that_batch_norm_writes_in_silence_are_a_result_and_no_origin() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    with torch.no_grad():
        model[0].weight.fill_(3e38)
    found = first_nonfinite(model, _loss, corpus.noise())
    assert (found.origin, found.operator, found.module) == ("operator", "addmm", "0")
    assert found.others == ()
    assert "buffer 1.running_mean" in found.reached
