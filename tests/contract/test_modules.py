"""Every module of ``torch.nn`` under every preset, eager and compiled, compared with a hand-written loop.

The loop uses torch.autocast and a loss scale for the mixed presets, fp32 copies for those with masters and
``module.to(dtype)`` for those without. Outputs, gradients and the weights after a step must be equal bit for bit. O1
has no hand-written equivalent, so it is compared with fp64 within its format's rounding. castwise may fail only where
torch itself cannot run a case; if only castwise can run it, the reference is fp64.

Each module runs under half of the presets in turn, and an eighth of the modules are compiled, each under one preset. In
a soak (`CASTWISE_SOAK=1`), all modules run under all presets.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

import castwise
from castwise.core.plans.plan import PRESETS
from tests.contract.module_recipes import EXCEPTIONS, RECIPES, Recipe, covered, every_name
from tests.here import DEVICE
from tests.soak import SOAKING, each_value, every, pairs

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # from torch, for deprecated modules or slow kernels
]
NAMES = [name for name in PRESETS if name not in ("tf32", "O0", "O3")]
"""The test CPUs have no TF32; O0 and O3 are other names of fp32 and fp16-true."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_LOW = (torch.bfloat16, torch.float16)
ROUNDING = {"fp32": 1e-5, "bf16": 0.06, "fp16": 0.01}
"""Largest error of outputs and gradients against fp64, relative to their largest value: several rounding errors."""
RATE = 0.1
_R = TypeVar("_R")


@pytest.fixture(autouse=True)
def no_fast_path() -> Iterator[None]:
    """Disable the kernel that evaluates a Transformer layer without hooks, because autocast does not know it."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


def plan_of(name: str) -> castwise.Plan:
    """Return the preset with a loss scale that causes no overflow; otherwise half of the cases would test a skipped
    step.
    """
    plan = castwise.Plan.preset(name)
    if plan.loss_scale is None:
        return plan
    return dataclasses.replace(plan, loss_scale=dataclasses.replace(plan.loss_scale, init=64.0))


# --- one training step and one evaluation --------------------------------------------------------------------------


@dataclasses.dataclass
class Run:
    """The results of a run, all in fp32 (or fp64), with unscaled gradients."""

    outputs: list[Tensor]
    input_grads: list[Tensor | None]
    grads: dict[str, Tensor | None]
    weights: dict[str, Tensor]
    evaluated: list[Tensor]

    def parts(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield every part with its name."""
        for number, tensor in enumerate(self.outputs):
            yield f"output {number}", tensor
        for number, grad in enumerate(self.input_grads):
            yield f"gradient of input {number}", grad
        for name, grad in self.grads.items():
            yield f"gradient of {name}", grad
        for name, value in self.weights.items():
            yield f"{name} after the step", value
        for number, tensor in enumerate(self.evaluated):
            yield f"output {number} in evaluation", tensor


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors of an output, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [found for item in value for found in tensors(item)] if isinstance(value, (tuple, list)) else []


def widened(outputs: list[Tensor]) -> list[Tensor]:
    """Convert low outputs to fp32, as a prepared model does."""
    return [out.float() if out.dtype in _LOW else out for out in outputs]


def loss_of(outputs: list[Tensor]) -> Tensor | None:
    """Return a scalar in which each element has its own weight; None if nothing is differentiable."""
    total = None
    for out in outputs:
        if out.requires_grad:
            weights = torch.linspace(-1, 1.5, out.numel(), dtype=out.dtype).view(out.shape)
            part = (out * weights).sum() / out.numel() ** 0.5
            total = part if total is None else total + part
    return total


def evaluate(
    module: nn.Module, recipe: Recipe, run: Callable[..., Any], cast: Callable[[Any], Any]
) -> list[Tensor]:
    """Run one forward in evaluation mode."""
    module.eval()
    inputs = [cast(value) for value in recipe.feed()]
    torch.manual_seed(5)
    with torch.no_grad():
        return tensors(run(*inputs))


def _grad(tensor: Tensor, inverse: float) -> Tensor | None:
    return None if tensor.grad is None else tensor.grad.detach().float() * inverse


def by_castwise(recipe: Recipe, plan: castwise.Plan, compiler: str | None = None) -> Run:
    """Run the case under castwise, compiled if a backend is given."""
    module = recipe.build()
    parameters = list(module.parameters())
    optimizer = torch.optim.SGD(parameters, RATE) if parameters else None
    with castwise.Amp(plan, device=DEVICE) as amp:
        amp.prepare(module, *([optimizer] if optimizer else []))
        run: Any = module
        if compiler is not None:
            torch._dynamo.reset()
            run = torch.compile(module, backend=compiler)
        inputs = recipe.feed()
        torch.manual_seed(5)
        outputs = tensors(run(*inputs))
        loss = loss_of(outputs)
        grads: dict[str, Tensor | None] = {}
        if loss is not None:
            inverse = 1 / amp.get_scale()
            amp.backward(loss)
            input_grads = [_grad(i, inverse) if isinstance(i, Tensor) else None for i in inputs]
            if optimizer is not None and any(q.grad is not None for q in parameters):
                amp.unscale_(optimizer)
                grads = {name: _grad(q, 1.0) for name, q in module.named_parameters()}
                amp.step(optimizer)
                optimizer.zero_grad()
        else:
            input_grads = []
        weights = {
            name: value.detach().clone()
            for name, value in amp.model_state_dict(module).items()
            if isinstance(value, Tensor)
        }
        evaluated = evaluate(module, recipe, run, lambda value: value)
        return Run([out.detach() for out in outputs], input_grads, grads, weights, evaluated)


def by_hand(recipe: Recipe, plan: castwise.Plan, low_buffers: bool = False) -> Run:
    """Run the case in plain torch: masters, torch.autocast and a loss scale according to the preset.

    Args:
        recipe: The case.
        plan: A preset's, not O1's.
        low_buffers: Store buffers low too, as `module.to(dtype)` does.
    """
    module, dtype = recipe.build(), _DTYPES[plan.compute]
    stores_low = plan.params == "compute" and dtype in _LOW
    scale = plan.loss_scale.init if plan.loss_scale else 1.0
    low = module
    if stores_low:
        low = copy.deepcopy(module)
        kept = {
            id(q)
            for m in low.modules()
            if plan.regions and isinstance(m, nn.modules.batchnorm._BatchNorm)
            for q in m.parameters(recurse=False)
        }
        for parameter in low.parameters():
            if id(parameter) not in kept and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
                parameter.grad_dtype = torch.float32 if plan.keeps_masters else dtype
        for buffer in low.buffers():
            if low_buffers and buffer.is_floating_point():
                buffer.data = buffer.data.to(dtype)
    masters = module if plan.keeps_masters or not stores_low else low

    def cast(value: Any) -> Any:
        rounds = stores_low and not plan.autocasts  # operators under autocast round by themselves
        lower = rounds and isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if lower else value

    def run(*values: Any) -> Any:
        plain = low.forward
        # Wraps forward only, so that hooks on the whole model run in fp32: legacy spectral_norm computes in a hook.
        low.forward = torch.autocast(DEVICE, dtype if dtype in _LOW else None, enabled=plan.autocasts)(plain)
        try:
            return widened(tensors(low(*[cast(value) for value in values])))
        finally:
            del low.forward

    inputs = recipe.feed()
    torch.manual_seed(5)
    outputs = run(*inputs)
    loss = loss_of(outputs)
    grads: dict[str, Tensor | None] = {}
    input_grads: list[Tensor | None] = []
    if loss is not None:
        (loss * scale).backward()
        input_grads = [_grad(i, 1 / scale) if isinstance(i, Tensor) else None for i in inputs]
        if any(q.grad is not None for q in low.parameters()):
            for one, other in zip(low.parameters(), masters.parameters(), strict=True):
                other.grad = None if one.grad is None else one.grad.mul_(1 / scale)
            grads = {name: _grad(q, 1.0) for name, q in masters.named_parameters()}
            torch.optim.SGD(masters.parameters(), RATE).step()
            if masters is not low:
                with torch.no_grad():
                    for one, other in zip(low.parameters(), masters.parameters(), strict=True):
                        one.copy_(other)
    weights = {**low.state_dict(), **dict(masters.named_parameters())}
    weights = {name: widened([v.detach().clone()])[0] for name, v in weights.items() if isinstance(v, Tensor)}
    if masters is not low:  # state_dict uses other names for tied or parametrized weights
        weights = {name: weights[name] for name in masters.state_dict() if name in weights}
    evaluated = evaluate(low, recipe, run, lambda value: value)
    return Run([out.detach() for out in outputs], input_grads, grads, weights, evaluated)


def in_fp64(recipe: Recipe) -> Run:
    """Run the case in fp64, nearly without rounding."""
    module = recipe.build().double()

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.detach().double().requires_grad_(value.requires_grad)
        return value

    inputs = [cast(value) for value in recipe.feed()]
    torch.manual_seed(5)
    outputs = tensors(module(*inputs))
    loss = loss_of(outputs)
    grads: dict[str, Tensor | None] = {}
    input_grads: list[Tensor | None] = []
    if loss is not None:
        loss.backward()
        input_grads = [i.grad if isinstance(i, Tensor) else None for i in inputs]
        if any(q.grad is not None for q in module.parameters()):
            grads = {name: q.grad for name, q in module.named_parameters()}
            torch.optim.SGD(module.parameters(), RATE).step()
    weights = {name: v.detach().clone() for name, v in module.state_dict().items() if isinstance(v, Tensor)}
    return Run(
        [out.detach() for out in outputs], input_grads, grads, weights, evaluate(module, recipe, module, cast)
    )


# --- comparison -------------------------------------------------------------------------------------------------------


def check_equal(got: Run, want: Run) -> None:
    """Check that two runs are equal bit for bit."""
    ours, theirs = dict(got.parts()), dict(want.parts())
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        other = theirs[name]
        assert (value is None) == (other is None), name
        if value is not None and other is not None:
            assert value.dtype is other.dtype, f"{name}: {value.dtype}, by hand {other.dtype}"
            assert value.shape == other.shape, name
            same = torch.equal(value, other) or torch.allclose(value, other, rtol=0, atol=0, equal_nan=True)
            assert same, f"{name} differs by {float((value.double() - other.double()).abs().max()):.3g}"


def check_near(
    got: Run, want: Run, tolerance: float, drawn: bool = False, without: Collection[str] = ()
) -> None:
    """Check that two runs agree within the tolerance, except the parts in ``without``; random cases only in evaluation."""
    ours, theirs = dict(got.parts()), dict(want.parts())
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        other = theirs[name]
        assert (value is None) == (other is None), name
        if value is None or other is None or (drawn and not name.endswith("evaluation")) or name in without:
            continue
        assert value.shape == other.shape, name
        if value.is_floating_point():
            off = float((value.double() - other.double()).abs().max()) if value.numel() else 0.0
            limit = tolerance * max(1.0, float(other.abs().max()) if value.numel() else 0.0)
            assert off <= limit, f"{name} is off by {off:.3g}, more than {limit:.3g}"


def attempt(run: Callable[[], _R]) -> tuple[_R | None, BaseException | None]:
    """Return the result of a run and None, or None and its error."""
    try:
        return run(), None
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError) as error:
        return None, error


def sums_in_any_order(recipe: Recipe, plan: castwise.Plan) -> bool:
    """Return whether the device's kernels give different bits from run to run, as atomic additions do."""
    first, *others = (by_hand(recipe, plan) for _ in range(8))
    with contextlib.suppress(AssertionError):
        for other in others:
            check_equal(other, first)
        return False
    return True


def check(recipe: Recipe, name: str) -> None:
    """Check one case in eager mode."""
    plan = plan_of(name)
    own_storage = recipe.state and plan.stores_low and plan.rules == "none"
    # By hand, torch's composite rms_norm gets an fp32 input with a low weight and rounds part of the weight's gradient.
    takes_mixtures = recipe is RECIPES["RMSNorm"] and plan.stores_low and plan.autocasts
    has_equal = plan.rules != "apex" and not own_storage and not takes_mixtures
    want, theirs = attempt(lambda: by_hand(recipe, plan)) if plan.rules != "apex" else (None, None)
    assert theirs is None or plan.compute != "fp32", f"this recipe does not work: {theirs!r}"
    got, ours = attempt(lambda: by_castwise(recipe, plan))
    if ours is not None:
        alike = theirs is not None and (isinstance(ours, type(theirs)) or isinstance(theirs, type(ours)))
        if alike and recipe.state and plan.stores_low:  # fp32 buffers may fail where low ones work
            _, alike = attempt(lambda: by_hand(recipe, plan, low_buffers=True))
        assert alike, f"castwise failed alone: {ours!r}"
        return
    assert got is not None
    if has_equal and want is not None:
        try:
            check_equal(got, want)
        except AssertionError:
            if DEVICE == "cpu" or not sums_in_any_order(recipe, plan):
                raise
        else:
            return
    broken: set[str] = set()
    if plan.rules != "apex":  # torch's own kernels overflow here in this format
        hand, _ = attempt(lambda: by_hand(recipe, plan, low_buffers=True))
        if hand is not None:
            broken = {name for name, part in hand.parts() if part is not None and not part.isfinite().all()}
    check_near(got, in_fp64(recipe), ROUNDING[plan.compute], recipe.random, broken)


@each_value()
@pytest.mark.parametrize(("module", "name"), pairs(RECIPES, NAMES, 5))
def test_every_module_runs_as_by_hand(module: str, name: str) -> None:
    check(RECIPES[module], name)


# --- compiled -----------------------------------------------------------------------------------------------------------


def check_compiled(recipe: Recipe, name: str, backend: str) -> None:
    """Check that compiled code equals eager code within rounding, unless torch cannot compile the module."""
    plan = plan_of(name)
    eager, failed = attempt(lambda: by_castwise(recipe, plan))
    if failed is not None:
        return  # covered by the eager tests
    got, ours = attempt(lambda: by_castwise(recipe, plan, backend))
    if ours is not None:
        _, theirs = attempt(lambda: compiled_by_hand(recipe, plan, backend))
        assert theirs is not None, f"castwise failed alone: {ours!r}"
        assert isinstance(ours, type(theirs)), f"castwise: {ours!r}, by hand: {theirs!r}"
        return
    assert got is not None
    assert eager is not None
    try:
        check_near(got, eager, ROUNDING[plan.compute], recipe.random and backend == "inductor")
    except AssertionError:
        theirs = compiled_by_hand(recipe, plan, backend)  # torch's own graph may have the same bug
        try:
            check_near(
                dataclasses.replace(theirs, outputs=widened(theirs.outputs)),
                _outputs_alone(eager),
                ROUNDING[plan.compute],
            )
        except AssertionError:
            check_near(_outputs_alone(got), _outputs_alone(theirs), ROUNDING[plan.compute])
        else:
            raise


def _outputs_alone(run: Run) -> Run:
    return Run(widened(run.outputs), [], {}, {}, [])


def compiled_by_hand(recipe: Recipe, plan: castwise.Plan, backend: str) -> Run:
    """Compile the module under torch's own autocast and run it."""
    module = recipe.build()
    torch._dynamo.reset()
    run = torch.compile(module, backend=backend)
    with torch.autocast(DEVICE, _DTYPES[plan.compute] if plan.autocasts else None, enabled=plan.autocasts):
        outputs = tensors(run(*recipe.feed()))
    loss = loss_of(widened(outputs))
    if loss is not None:
        loss.backward()
    return Run([out.detach() for out in outputs], [], {}, {}, [])


_ALL = [(module, name) for module in RECIPES for name in NAMES]
_SAMPLE = [(module, NAMES[i % len(NAMES)]) for i, module in enumerate(list(RECIPES)[::24])]
_SAMPLE += [("parametrizations.spectral_norm", "O1")]  # vdot: found by a soak
_INDUCTOR = [
    ("LayerNorm", "bf16-master"), ("CrossEntropyLoss", "O1"),
]  # fmt: skip


@every(2)
@pytest.mark.parametrize(("module", "name"), _ALL if SOAKING else _SAMPLE)
def test_compiled_modules_run_as_eager_ones(module: str, name: str) -> None:
    check_compiled(RECIPES[module], name, "aot_eager")


@pytest.mark.inductor
@pytest.mark.parametrize(("module", "name"), _INDUCTOR)
def test_modules_compiled_by_inductor_run_as_eager_ones(module: str, name: str) -> None:
    check_compiled(RECIPES[module], name, "inductor")


# --- nothing is left out ---------------------------------------------------------------------------------------------------


def test_every_module_is_covered() -> None:
    """A module that a new torch release adds needs a recipe, or an exception with a reason."""
    names, known = every_name(), covered()
    assert not names - known - EXCEPTIONS.keys()
    assert not EXCEPTIONS.keys() & known
    gone = {name for name in known if "." not in name} - names
    assert not gone, f"recipes for what torch.nn does not have: {gone}"


def test_the_presets_left_out_are_others_by_another_name() -> None:
    assert PRESETS["O0"] == PRESETS["fp32"]
    assert PRESETS["O3"] == PRESETS["fp16-true"]


def test_a_wrong_format_is_found() -> None:
    """A control: the hand-written loop in another format must differ from castwise."""
    recipe = RECIPES["Linear"]
    got = by_castwise(recipe, plan_of("bf16-mixed"))
    check_equal(got, by_hand(recipe, plan_of("bf16-mixed")))
    for other in ("fp32", "fp16-mixed", "bf16-true"):
        with pytest.raises(AssertionError):
            check_equal(got, by_hand(recipe, plan_of(other)))
    with pytest.raises(AssertionError):
        check_near(by_castwise(recipe, plan_of("fp16-true")), in_fp64(recipe), 1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_near(by_castwise(recipe, plan_of("O1")), in_fp64(recipe), ROUNDING["fp16"])


# --- state: attributes, writes through data, buffers ------------------------------------------------------------------


@each_value()
@pytest.mark.parametrize(("module", "name"), pairs(RECIPES, NAMES, 2))
def test_state_of_every_module_holds(module: str, name: str) -> None:
    """Optimizers see attributes, masters receive writes through ``data``, and skipped steps make no buffer non-finite."""
    recipe, states = RECIPES[module], []
    for counted in (True, False):
        net = recipe.build()
        parameters = [q for q in net.parameters() if q.requires_grad and q.is_floating_point()]
        if not parameters:
            return
        optimizer = torch.optim.SGD(parameters, RATE)
        with castwise.Amp(plan_of(name), device=DEVICE) as amp:
            amp.prepare(net, optimizer)
            for number, (parameter, held) in enumerate(
                zip(parameters, optimizer.param_groups[0]["params"], strict=True)
            ):
                parameter.mark = number  # type: ignore[attr-defined]
                assert held.mark == number
                written = parameter if counted else parameter.data
                with torch.no_grad():
                    written.mul_(0.5)
            states.append(amp.model_state_dict(net))
            buffers = [b for b in net.buffers() if b.is_floating_point() and b.isfinite().all()]
            outputs, _ = attempt(lambda net=net: tensors(net(*recipe.feed())))  # type: ignore[misc]
            loss = loss_of(outputs or [])  # modules that torch's autocast cannot run are tested above
            if loss is None:
                continue
            amp.backward(loss * float("nan"))
            if any(q.grad is not None for q in parameters):
                assert amp.step(optimizer).skipped
                assert all(b.isfinite().all() for b in buffers)
    counted_state, data_state = states
    for key, value in counted_state.items():
        if (
            isinstance(value, Tensor)
            and "running" not in key
            and not key.endswith(("weight_u", "weight_v", "_u", "_v"))
        ):
            assert torch.equal(value, data_state[key]), key
