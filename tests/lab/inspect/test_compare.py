"""compare() finds the module in which an error arises, for models of all kinds, and leaves the model unchanged."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from castwise.core.plans.plan import Plan, Region
from castwise.errors import NonFiniteError, PlanError, WorkloadError
from castwise.lab.inspect.compare import compare
from castwise.lab.inspect.comparison import CallComparison, Comparison
from castwise.lab.inspect.kernels import ExactKernels
from castwise.lab.passes.observers import observed
from tests.here import DEVICE
from tests.lab.inspect.faults import Layer, Stack, batch, coarse, loss
from tests.soak import SOAKING, some

LOW = "bf16-mixed"


def at(found: Comparison, path: str, call: int = 0) -> CallComparison:
    return next(c for c in found.calls if (c.path, c.call) == (path, call))


def numbers(found: Comparison) -> list[tuple[Any, ...]]:
    """Return the results for all calls as tuples, which ``==`` can compare."""
    return [
        (c.path, c.call, dataclasses.astuple(c.forward), dataclasses.astuple(c.backward)) for c in found.calls
    ]


# --- where errors arise ---------------------------------------------------------------------------------------

PLACES = {"out": "layers.{}.second", "sum": "layers.{}"}
FAULTS = [
    (position, place, backward)
    for position in range(24)
    for place, backward in itertools.product(PLACES, (False, True))
]


@pytest.mark.parametrize(("position", "place", "backward"), some(FAULTS, 47))
def test_a_fault_in_one_layer_of_24_is_found_there_and_nowhere_else(
    position: int, place: str, backward: bool
) -> None:
    bits = 3  # bf16 has 7 bits
    model = Stack(at=position, fault=(place, bits, backward))
    found = compare(model, loss, batch(), "fp32", LOW, tries=1)
    assert [c.path for c in found.birthplaces] == [PLACES[place].format(position)]
    side = found.birthplaces[0].backward if backward else found.birthplaces[0].forward
    assert side.effect == "born"
    assert found.tried[0].path == found.birthplaces[0].path
    assert found.gradient_error is not None
    assert found.tried[0].gradient_error is not None
    assert found.tried[0].gradient_error < found.gradient_error


def test_a_fault_in_few_elements_is_found_too() -> None:
    class Head(nn.Linear):
        """A linear layer with one coarse output among 64, as when one attention head is faulty."""

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            if not torch.is_autocast_enabled(DEVICE):
                return out
            return torch.cat([coarse(out[:, :1], 2), out[:, 1:]], 1)

    model = Stack(layers=6, width=32)
    model.layers[3].first = Head(32, 64)
    found = compare(model, loss, batch(), "fp32", LOW)
    assert found.birthplaces[0].path == "layers.3.first"
    assert "largest element" in found.birthplaces[0].forward.where


def test_a_plan_without_a_fault_has_no_birthplace() -> None:
    found = compare(Stack(layers=8), loss, batch(), "fp32", LOW)
    assert not found.birthplaces
    assert (
        len(found.calls) == 1 + 1 + 2 + 8 * 4
    )  # loss, model, first and last layer; 8 residual layers, 4 calls each
    assert found.passes == 7
    assert not found.notes


class Variance(nn.Module):
    """A norm with the variance E[x²] - E[x]², which cancels in a low format."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        return (x - mean) / ((x * x).mean(-1, keepdim=True) - mean * mean).abs().add(1e-5).sqrt()


class Vanishing(nn.Module):
    """A norm of small numbers, whose squares and epsilon are below fp16's smallest subnormal."""

    def forward(self, x: Tensor) -> Tensor:
        gap = (x - x.mean(-1, keepdim=True)) * 1e-4
        return gap / ((gap * gap).mean(-1, keepdim=True) + 1e-9).sqrt()  # ** runs in fp32 on a GPU


class RunningSum(nn.Module):
    """The input minus its mean, which is summed one term at a time in the format of the input."""

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x[:, 0])
        for column in x.unbind(1):
            total = total + column
        return x - total[:, None] / x.shape[1]


class CoarseNorm(nn.LayerNorm):
    """A layer norm that rounds the result of torch's kernel coarsely under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return coarse(out, 3) if torch.is_autocast_enabled(DEVICE) else out


def normed(middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 64), middle, nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4)
    )
    nn.init.constant_(model[0].bias, 3.0)
    return model


def rows() -> tuple[Tensor, Tensor]:
    draw = torch.Generator(DEVICE).manual_seed(1)
    return torch.randn(512, 16, generator=draw), torch.randint(4, (512,), generator=draw)


@pytest.mark.cpu  # on a GPU layer norm accumulates in fp32
@pytest.mark.parametrize("plan", [LOW, "bf16-true", "fp16-mixed"])
def test_rounding_inside_torchs_own_kernels_is_not_named(plan: str) -> None:
    """On a CPU, the backward pass of layer norm sums the gradient of its bias in bf16."""
    found = compare(normed(nn.LayerNorm(64)), loss, rows(), "fp32", plan, tries=0)
    assert not found.birthplaces
    assert {c.path for c in found.in_kernels} == {"1", "4"}
    assert at(found, "4").backward.effect == "kernel"
    assert at(found, "4").backward.excess > 4.0
    assert found.passes == 6


@pytest.mark.parametrize(
    ("middle", "plan"),
    [(Variance, LOW), (Vanishing, "fp16-mixed"), (RunningSum, LOW), (partial(CoarseNorm, 64), LOW)],
)
def test_faults_of_the_models_own_code_are_named_beside_torchs_kernels(
    middle: Callable[[], nn.Module], plan: str
) -> None:
    found = compare(normed(middle()), loss, rows(), "fp32", plan, tries=0)
    assert [c.path for c in found.birthplaces] == ["1"]
    assert {c.path for c in found.in_kernels} <= {"4"}


@pytest.mark.cpu  # on a GPU layer norm accumulates in fp32, so nothing is lost
@pytest.mark.parametrize(
    "plan",
    [
        Plan(compute="bf16", ops=(("layer_norm", "lower"),)),
        Plan(compute="fp32", regions=(Region("type:LayerNorm", compute="bf16"),)),
    ],
)
def test_a_norm_that_loses_because_a_rule_of_the_plan_lowers_it_is_named(plan: Plan) -> None:
    found = compare(normed(nn.LayerNorm(64)), loss, rows(), "fp32", plan, tries=0)
    assert {c.path for c in found.birthplaces} == {"1", "4"}
    assert not found.in_kernels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_exact_kernels_round_once(dtype: torch.dtype) -> None:
    draw = torch.Generator(DEVICE).manual_seed(0)
    x, came_in = (torch.randn(4096, 64, generator=draw).to(dtype) for _ in range(2))
    layer, exact = nn.LayerNorm(64).to(dtype), nn.LayerNorm(64).double()
    exact(x.double()).backward(came_in.double())
    with observed(layer, ExactKernels()):
        layer(x).backward(came_in)
    assert exact.bias.grad is not None
    assert torch.equal(cast("Tensor", layer.bias.grad), exact.bias.grad.to(dtype))
    layer.zero_grad()
    if DEVICE == "cuda":  # torch's own CUDA kernel accumulates in fp32
        return
    layer(x).backward(came_in)
    assert not torch.equal(layer.bias.grad, exact.bias.grad.to(dtype))
    layer.zero_grad()
    with observed(layer, ExactKernels(except_for=("layer_norm",))):
        layer(x).backward(came_in)
    assert not torch.equal(layer.bias.grad, exact.bias.grad.to(dtype))


def test_a_plan_agrees_with_itself() -> None:
    found = compare(Stack(layers=2), loss, batch(), LOW, LOW)
    assert found.output_error == found.gradient_error == found.loss_error == 0.0
    assert {side.effect for c in found.calls for side in (c.forward, c.backward)} <= {"exact", "unseen"}


def test_own_errors_are_those_of_the_module_by_itself() -> None:
    model = Stack(layers=1)
    found = compare(model, loss, batch(), "fp32", LOW)
    x = model.take(batch()[0]).detach()
    layer = model.layers[0].first
    with torch.autocast(DEVICE, torch.bfloat16):
        format = model.layers[0].norm(model.take(batch()[0])).dtype
    given = model.layers[0].norm(x).to(format)  # in the format of this input under the plan
    with torch.autocast(DEVICE, torch.bfloat16):
        low = layer(given)
    wide = layer(given.float())
    expected = float(((low.double() - wide.double()).norm() / wide.double().norm()).detach())
    assert at(found, "layers.0.first").forward.own == pytest.approx(expected, rel=1e-3)


def test_what_a_region_rounds_passes_through_the_others() -> None:
    plan = Plan(compute="fp32", regions=(Region("layers.5", compute="bf16"),))
    found = compare(Stack(layers=8), loss, batch(), "fp32", plan)
    for c in found.calls:
        inside = c.path.startswith("layers.5")
        for side in (c.forward, c.backward):
            assert inside or (side.own or 0.0) < 1e-6, c
    assert at(found, "layers.6.first").forward.effect == "passes"
    assert at(found, "layers.4.first").forward.effect == "exact"
    assert {t.path.split(".")[1] for t in found.tried} == {"5"}


class Cancels(nn.Module):
    """The input minus its mean, far smaller than the input: ill-conditioned in any format."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean()) * 100.0 if self.training else x


def test_what_is_badly_conditioned_is_not_called_a_fault() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.cancels, self.b = nn.Linear(8, 8), Cancels(), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.cancels(self.a(x) * 0.01 + 3.0))  # type: ignore[no-any-return]

    found = compare(Model(), loss, batch(), "fp32", LOW)
    side = at(found, "cancels").forward
    assert not found.birthplaces
    assert side.effect in ("amplifies", "passes")
    assert side.expected is not None
    assert side.expected > 0.1  # far above bf16's eps of 2**-7


# --- models of all kinds ----------------------------------------------------------------------------------------


class Shared(nn.Module):
    """One layer called four times, in two segments that may be checkpointed."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.take, self.layer, self.give = how, nn.Linear(8, 16), Layer(16), nn.Linear(16, 4)
        self.drop = nn.Dropout(0.3)

    def twice(self, x: Tensor) -> Tensor:
        return self.drop(self.layer(self.layer(x)))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        x = self.take(x)
        for _ in range(2):
            x = (
                checkpoint(self.twice, x, use_reentrant=self.how == "reentrant")
                if self.how
                else self.twice(x)
            )
        return self.give(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
def test_checkpointing_changes_nothing_that_is_found(how: str) -> None:
    plain, again = (compare(Shared(h), loss, batch(), "fp32", LOW, tries=0) for h in ("", how))
    assert again.strayed == plain.strayed == 0
    assert [c.call for c in plain.calls if c.path == "layer"] == [0, 1, 2, 3]
    assert not plain.birthplaces
    for one, other in zip(plain.calls, again.calls, strict=True):
        assert (one.path, one.call) == (other.path, other.call)
        assert one.forward == other.forward
        # Reentrant checkpointing casts the weights again, so gradients of several calls are summed in another format.
        for name in ("incoming",) if how == "reentrant" else ("own", "error", "incoming"):
            mine, theirs = getattr(one.backward, name), getattr(other.backward, name)
            rel = 0.1 if name == "own" and DEVICE != "cpu" else 1e-4  # on a GPU both kinds do
            assert theirs == (mine and pytest.approx(mine, rel=rel)), (one.path, one.call, name)


class Mirrored(nn.Module):
    """A layer called with x and with x reversed: the inputs have the same sum, as all outputs of a layer norm do."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.layer, self.checkpointed = nn.Parameter(torch.ones(())), nn.Linear(8, 4), checkpointed

    def both(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) + self.layer(x.flip(-1))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.one
        return checkpoint(self.both, x, use_reentrant=True) if self.checkpointed else self.both(x)


def test_recomputed_calls_are_told_apart_by_more_than_the_sum_of_what_they_are_given() -> None:
    data = (batch()[0].mul(2).round(), batch()[1])
    plain, again = (
        [
            c.backward.incoming
            for c in compare(Mirrored(how), loss, data, "fp32", LOW, tries=0).calls
            if c.path == "layer"
        ]
        for how in (False, True)
    )
    assert plain[0] != pytest.approx(plain[1], rel=0.01)
    assert again == pytest.approx(plain, rel=1e-4)


class Parts(nn.Module):
    """Keyword arguments, non-tensor outputs, in-place ReLU, BatchNorm, dropout and an LSTM on packed rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.take, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.act, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.2)
        self.lstm, self.give = nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 4)
        self.head = Head()

    def forward(self, x: Tensor) -> Any:
        x = self.norm(self.take(x))
        self.act(x)  # the result is not used: ReLU wrote to x in place
        x = self.drop(x)
        packed = nn.utils.rnn.pack_padded_sequence(
            x.view(4, 4, 16), torch.tensor([4, 4, 3, 2], device="cpu"), batch_first=True
        )
        _, (hidden, _) = self.lstm(packed)
        return self.head(features=hidden[-1], scale=2.0, give=self.give)


class Head(nn.Module):
    def forward(self, *, features: Tensor, scale: float, give: nn.Module) -> dict[str, Any]:
        return {"logits": give(features) * scale, "name": "head", "count": 3, "none": None}


def parts_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0])["logits"], batch[1][:4])


def test_parts_of_all_kinds_are_followed() -> None:
    found = compare(Parts(), parts_loss, batch(), "fp32", LOW)
    assert found.strayed == 0
    assert not found.notes
    assert not found.birthplaces
    assert at(found, "act").forward.error == pytest.approx(at(found, "norm").forward.error, rel=0.5)
    for path in ("take", "norm", "act", "lstm", "head", "give"):
        side = at(found, path).forward
        assert side.error is not None, path
        assert side.own is not None, path


def test_the_comparison_sees_the_losses_of_the_model_without_it() -> None:
    """compare() copies the inputs and outputs of modules; the losses stay the same, also with in-place operators."""
    model = Parts()
    found = compare(model, parts_loss, batch(), "fp32", LOW)
    torch.manual_seed(0)
    assert found.losses[0] == float(parts_loss(model, batch()).detach())


def test_hugging_face_models_and_their_outputs() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=32, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(64, (2, 16))
    found = compare(model, lambda m, b: m(input_ids=b, labels=b).loss, ids, "fp32", LOW)
    assert not found.birthplaces
    assert found.output_error is not None
    assert 1e-4 < found.output_error < 0.1
    assert at(found, "model.layers.1.mlp.down_proj").backward.own is not None


class Adaptive(nn.Module):
    """A model that calls its layer twice in bf16 and once in fp32, so the number of calls differs between plans."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.give = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if y.dtype is torch.bfloat16:
            y = self.layer(y)
        return self.give(y)  # type: ignore[no-any-return]


def test_calls_that_one_plan_has_alone_are_said() -> None:
    found = compare(Adaptive(), loss, batch(), "fp32", LOW)
    assert [c.call for c in found.calls if c.path == "layer"] == [0]
    assert "1 call ran only under the second plan: layer (call 1)." in found.notes
    assert found.birthplaces  # the model's own forward, which calls the layer twice
    assert found.birthplaces[0].path == ""


def test_a_model_that_is_not_trained_is_compared_forward() -> None:
    model = Stack(layers=2).requires_grad_(requires_grad=False)
    found = compare(model, loss, batch(), "fp32", LOW)
    assert found.gradient_error is None
    assert {c.backward.effect for c in found.calls} == {"unseen"}
    assert found.output_error


def test_a_loss_that_takes_gradients_itself() -> None:
    def penalised(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = batch[0].clone().requires_grad_()
        out = functional.cross_entropy(model(x), batch[1])
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return out + slope.square().sum()

    found = compare(Stack(layers=2), penalised, batch(), "fp32", LOW)
    assert found.gradient_error is not None
    assert 0.0 < found.gradient_error < 0.2


@pytest.mark.parametrize(
    "plan", some(["fp16-mixed", "bf16-master", "fp16-master", "bf16-true", "O1", "O2"], 1 if SOAKING else 3)
)
def test_presets_can_be_compared(plan: str) -> None:
    found = compare(Stack(layers=2), loss, batch(), "fp32", plan)
    assert found.gradient_error is not None
    assert 0.0 < found.gradient_error < 0.1
    assert all(c.forward.own is not None for c in found.calls)


# --- compiled ----------------------------------------------------------------------------------------------------


@pytest.mark.inductor
@pytest.mark.slow
@pytest.mark.skipif(not SOAKING, reason="compiles a model three times; runs in make soak")
def test_compiled_code_against_eager_code_under_one_plan() -> None:
    found = compare(Stack(layers=2), loss, batch(), LOW, f"{LOW}+compile=default", tries=0)
    assert "each call was compiled separately" in found.notes[0]
    assert not found.birthplaces
    assert found.gradient_error is not None
    assert 0.0 < found.gradient_error < 0.05
    assert [c.path for c in found.calls if c.forward.own is None] == []


# --- the model and the random state are unchanged ---------------------------------------------------------------


def state(model: nn.Module) -> list[Any]:
    return [
        random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), torch.is_grad_enabled(),
        [m.training for m in model.modules()],
        [len(hooks) for m in model.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks)],
        [(n, p.grad is None or p.grad.tolist(), p.tolist(), p.requires_grad) for n, p in model.named_parameters()],
        [(n, b.tolist()) for n, b in model.named_buffers()],
    ]  # fmt: skip


class Fails(Exception):
    pass


@pytest.mark.parametrize("error", [None, Fails, KeyboardInterrupt])
@pytest.mark.parametrize("passes", [1, 2, 4])
def test_the_model_is_as_it_was(error: type[BaseException] | None, passes: int) -> None:
    if error is None and passes > 1:
        pytest.skip("without a failure one case is enough")
    model = Parts()
    model.drop.eval()
    parts_loss(model, batch()).backward()
    before, count = state(model), 0

    def failing(given: nn.Module, of: Any) -> Tensor:
        nonlocal count
        count += 1
        random.random()
        np.random.rand()
        if error is not None and count > passes:
            parts_loss(given, of)
            raise error
        return parts_loss(given, of)

    def run() -> None:
        compare(model, failing, batch(), "fp32", LOW)

    if error is None or (error is Fails and passes > 1):
        run()  # if the loss fails in a pass with substituted values, only that pass ends
    else:
        with pytest.raises((WorkloadError, KeyboardInterrupt)):
            run()
    assert state(model) == before


def test_own_errors_are_left_out_where_the_loss_cannot_bear_given_values() -> None:
    count = 0

    def failing(model: nn.Module, of: Any) -> Tensor:
        nonlocal count
        count += 1
        if count > 2:
            raise Fails("no more")
        return loss(model, of)

    found = compare(Stack(layers=1), failing, batch(), "fp32", LOW, tries=0)
    assert "the error that each call adds is unknown" in found.notes[0]
    assert "Fails: no more" in found.notes[0]
    assert {c.forward.effect for c in found.calls} <= {"unseen", "exact"}


# --- input that is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: compare(loss, loss, batch(), "fp32", LOW), WorkloadError, "model is function"),  # type: ignore[arg-type]
        (lambda: compare(Stack(1), loss, batch(), "fp32", "bf17"), PlanError, "bf17"),
        (lambda: compare(Stack(1), loss, batch(), "fp32", LOW, tries=-1), PlanError, "compare\\(tries=-1\\)"),
        (lambda: compare(Stack(1), lambda m, b: 1.0, batch(), "fp32", LOW), WorkloadError, "returned float"),  # type: ignore[arg-type,return-value]
        (lambda: compare(Stack(1), lambda m, b: loss(m, b) * torch.inf, batch(), "fp32", LOW), NonFiniteError, "not finite under fp32"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused(
    call: Callable[[], Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        call()
