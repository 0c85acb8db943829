"""Lives in a given order: one for each way in which a plan once stayed behind or a step was lost."""

from __future__ import annotations

import collections
import copy
import gc
import pickle
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import castwise
from castwise.core.plans.plan import PRESETS
from castwise.core.session import Amp
from castwise.errors import CastwiseError, StateError
from tests.here import DEVICE
from tests.lifecycle.kinds import KINDS, optimizers
from tests.lifecycle.life import ERRORS, GETTERS, PLANS, REFUSALS, Life, check, living
from tests.lifecycle.photograph import bits, of_model, of_optimizers, of_process
from tests.soak import each_value, every, pairs

HERE = [
    name for name in PRESETS if name not in ("tf32", "O0", "O3")
]  # no TF32 here; O0 and O3 duplicate other presets
HEAD = "bf16-mixed+regions.2=fp32"


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Clean up after each test, whatever it found."""
    life = Life("plain", "sgd")
    yield
    life.bury()


# --- prepare does everything or nothing -----------------------------------------------------------------------


@each_value()
@pytest.mark.parametrize(
    "line", ["bf16-mixed", "bf16-master", "bf16-true", "O1", "O2+memory_format=channels_last"]
)
@pytest.mark.parametrize("how", REFUSALS)
def test_a_refused_prepare_leaves_everything_as_it_was(how: str, line: str) -> None:
    with living("plain", "adamw") as life:
        life.step()
        life.refuse(how, line)
        life.step()


@each_value()
@pytest.mark.parametrize("kind", ["counting", "conv", "lstm", "frozen", "tied"])
@pytest.mark.parametrize("how", ["typo", "fused Rprop", "skips __init__"])
def test_a_refused_prepare_leaves_every_kind_as_it_was(how: str, kind: str) -> None:
    with living(kind, "sgd") as life:
        life.refuse(how, "fp16-master+memory_format=channels_last")
        life.end()


@pytest.mark.parametrize("how", REFUSALS)
def test_a_refused_prepare_leaves_the_plan_that_is_on(how: str) -> None:
    with living("plain", "adamw") as life:
        life.prepare("bf16-mixed")
        life.step()
        life.refuse(how)
        life.step()
        life.end()


# --- close undoes all of it ------------------------------------------------------------------------------------


@each_value()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("line", PLANS)
def test_close_undoes_prepare(line: str, kind: str) -> None:
    with living(kind, "adamw") as life:
        life.step()
        life.prepare(line)
        life.step()
        life.close()
        life.step()
        life.end()


@every(2)
@pytest.mark.parametrize(("first", "optimizer"), pairs(HERE, ["sgd", "adamw"]))
def test_every_preset_trains_after_every_other(first: str, optimizer: str) -> None:
    failed = {}
    for second in HERE:
        with living("plain", optimizer) as life:
            for line in (first, second):
                try:
                    life.prepare(line)
                    life.step()
                    life.close()
                    life.step()
                except (AssertionError, RuntimeError) as error:
                    failed[second] = str(error).splitlines()[:3]
                    break
    assert not failed


@each_value()
@pytest.mark.parametrize("line", ["bf16-mixed", "fp16-mixed", "bf16-true", "bf16-master"])
@pytest.mark.parametrize("kind", ["plain", "counting", "conv", "lstm"])
def test_close_undoes_inference(kind: str, line: str) -> None:
    with living(kind) as life:
        life.model.eval()
        before = life._whole()
        amp = Amp(line, device=DEVICE)
        amp.prepare(life.model, inference=True, keep_originals=True)
        life._plain_forward()
        amp.close()
        check(before, life._whole(), f"inference under {line}, closed,")


def test_what_a_collected_amp_claimed_is_free() -> None:
    before = of_process()
    for line in ("fp32+fp32_matmul=ieee", "O1"):
        model = nn.Linear(2, 2)
        amp = Amp(line, device=DEVICE)
        amp.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        del model, amp
        gc.collect()
    check(before, of_process(), "an Amp that was collected unclosed")


@pytest.mark.cpu  # the mesh is on the CPU
def test_close_gives_dtensors_back() -> None:
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        from torch.distributed.tensor import distribute_module, distribute_tensor, init_device_mesh

        mesh = init_device_mesh("cpu", (1,))
        model = KINDS["plain"].build()
        distribute_module(model, mesh)
        x = distribute_tensor(KINDS["plain"].batch(0), mesh)
        (optimizer,) = optimizers(model, "adamw")

        def stored() -> dict[str, Any]:
            return {
                name: (
                    type(p),
                    p.dtype,
                    p.to_local().dtype,
                    p.to_local().untyped_storage().nbytes(),
                    p.grad_dtype,
                )  # type: ignore[attr-defined]
                for name, p in model.named_parameters()
            }

        before = stored()
        with Amp("bf16-master", device=DEVICE) as amp:
            amp.prepare(model, optimizer)
            amp.backward(model(x).full_tensor().square().mean())
            amp.step(optimizer)
            optimizer.zero_grad()
        check(before, stored(), "closing a model of DTensors")
        model(x).full_tensor().square().mean().backward()
        optimizer.step()
    finally:
        dist.destroy_process_group()


def test_a_fused_step_after_a_change_of_memory_format_is_right() -> None:
    """Fused kernels read state by the parameters' strides, which `channels_last` changes."""
    with living("conv", "fused") as life:
        life.step()
        life.prepare("bf16-mixed+memory_format=channels_last")
        life.step()


def test_a_first_fused_step_that_is_skipped_leaves_no_momentum() -> None:
    """Torch's fused SGD allocates momentum uninitialised, and a skipped step does not write it."""
    with living("plain", "sgd") as life:
        life.prepare("fp16-mixed+loss_scale.interval=2+optimizer=fused")
        life.step(overflow=True)
        life.step()


# --- a forward that is interrupted -------------------------------------------------------------------------------


@each_value()
@pytest.mark.parametrize(
    "line", ["bf16-mixed", "O1", "bf16-master", "bf16-true", HEAD, "bf16-mixed+rules=cuda"]
)
@pytest.mark.parametrize("which", ERRORS)
def test_an_interrupted_forward_leaves_no_plan_in_force(which: str, line: str) -> None:
    with living("plain") as life:
        life.prepare(line)
        for where in range(4):
            life.interrupt(which, where)
        life.step()


@pytest.mark.parametrize("which", ERRORS)
def test_an_interrupted_method_leaves_no_plan_in_force(which: str) -> None:
    class Model(nn.Linear):
        def score(self, x: Tensor) -> Tensor:
            raise ERRORS[which]()

    before = of_process()
    with Amp("O1", device=DEVICE) as amp:
        model = amp.prepare(Model(2, 2), methods=("score",))
        inside = of_process()
        with pytest.raises(type(ERRORS[which]())):
            model.score(torch.ones(1, 2))
        check(inside, of_process(), f"{which} in a method")
    check(before, of_process(), "closing")


class Pair(collections.namedtuple("Pair", "first second")):  # noqa: PYI024
    """A named tuple whose constructor takes other arguments than its fields."""

    def __new__(cls, first: Tensor) -> Any:
        return super().__new__(cls, first, first)


def _cyclic(x: Tensor) -> Any:
    out: list[Any] = [x]
    out.append(out)
    return out


ODD: dict[str, Callable[[Tensor], Any]] = {
    "mapping proxy": lambda x: types.MappingProxyType({"x": x}),
    "named tuple with its own __new__": Pair,
    "cyclic list": _cyclic,
}


class Odd(nn.Module):
    """Returns an object that casting cannot rebuild."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.inner(x))


@each_value()
@pytest.mark.parametrize(
    "line", ["bf16-mixed", "bf16-master", "bf16-mixed+rules=cuda", "bf16-mixed+regions.0=fp32"]
)
@pytest.mark.parametrize("what", ODD)
def test_an_odd_output_leaves_no_plan_in_force(what: str, line: str) -> None:
    before = of_process()
    model = nn.Sequential(Odd(ODD[what]))
    with Amp(line, device=DEVICE) as amp:
        amp.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        inside = of_process()
        try:
            out = model(torch.ones(1, 2))
            assert type(out) is type(ODD[what](torch.ones(1)))
        except CastwiseError:
            pass  # refused with castwise's error
        check(inside, of_process(), f"a forward that answers by a {what}")
    check(before, of_process(), "closing")


# --- optimizers that were not prepared -----------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "bf16-true", "O2"])
def test_a_step_of_an_optimizer_that_was_not_prepared_is_refused(line: str) -> None:
    model = KINDS["plain"].build()
    (optimizer,) = optimizers(model, "sgd")
    with Amp(line, device=DEVICE) as amp:
        amp.prepare(model)
        before = of_model(model)
        amp.backward(model(KINDS["plain"].batch(0)).square().mean())
        with pytest.raises(StateError, match="prepare"):
            amp.step(optimizer)
        model.zero_grad()
        check(before, of_model(model), "a step that was refused")


def test_masters_without_an_optimizer_are_noticed_when_trained() -> None:
    model = KINDS["plain"].build()
    with Amp("bf16-master", device=DEVICE) as amp:
        amp.prepare(model)
        (optimizer,) = optimizers(model, "sgd")
        with pytest.raises((CastwiseError, UserWarning), match="prepare"):  # noqa: PT012 - at either of them
            amp.backward(model(KINDS["plain"].batch(0)).square().mean())
            optimizer.step()


def test_second_derivatives_under_masters_are_right_or_refused_in_words() -> None:
    """As AdaHessian needs them: gradients with a graph, differentiated by the parameters that the optimizer holds."""
    x = KINDS["plain"].batch(0)

    def hessian(amp: Amp | None) -> list[Tensor]:
        model = KINDS["plain"].build()
        (optimizer,) = optimizers(model, "sgd")
        if amp is not None:
            amp.prepare(model, optimizer)
        loss = model(x).square().mean()
        params = [p for group in optimizer.param_groups for p in group["params"]]
        try:
            with warnings.catch_warnings():
                # Torch warns of the reference cycle that such gradients create.
                warnings.simplefilter("ignore")
                loss.backward(create_graph=True) if amp is None else amp.backward(loss, create_graph=True)
            grads = [p.grad for p in params]
            return [
                d.float() for d in torch.autograd.grad(grads, params, [torch.ones_like(g) for g in grads])
            ]
        finally:
            optimizer.zero_grad()

    with Amp("bf16-master", device=DEVICE) as amp:
        try:
            traces = hessian(amp)
        except CastwiseError:
            return
        for trace, want in zip(traces, hessian(None), strict=True):
            torch.testing.assert_close(trace, want, rtol=0.1, atol=0.05)


# --- compiled, pickled -----------------------------------------------------------------------------------------------


def _by_function(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def _by_method(model: nn.Module) -> Any:
    model.compile(backend="eager")
    return model


def _a_part(model: nn.Module) -> Any:
    model[0].compile(backend="eager")  # type: ignore[operator]
    return model


def _the_forward(model: nn.Module) -> Any:
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
    return model


@each_value()
@pytest.mark.parametrize("given", ["model", "compiled"])
@pytest.mark.parametrize("how", [_by_function, _by_method, _a_part, _the_forward])
def test_prepare_after_a_compiled_run_is_refused(how: Callable[[nn.Module], Any], given: str) -> None:
    torch._dynamo.reset()
    model = KINDS["plain"].build()
    compiled = how(model)
    x = KINDS["plain"].batch(0)
    compiled(x)
    before = of_model(model)
    with Amp("bf16-mixed", device=DEVICE) as amp:
        try:
            amp.prepare(model if given == "model" else compiled)
        except StateError:
            check(before, of_model(model), "a refused prepare")
            return
        want = KINDS["plain"].build()
        with torch.autocast(DEVICE, torch.bfloat16):
            expected = want(x).float()
        assert torch.equal(compiled(x), expected), "accepted, and then ignored"


def test_a_copy_of_an_amp_has_its_plan_and_scale_and_a_pickle_none() -> None:
    with living("plain") as life:
        life.prepare("fp16-mixed")
        life.step()
        assert life.amp is not None
        for copier in (copy.deepcopy, copy.copy):
            other = copier(life.amp)
            assert other.plan == life.amp.plan
            assert other.get_scale() == life.amp.get_scale()
            assert not any(other.holds(optimizer) for optimizer in life.optimizers)
        assert pickle.loads(pickle.dumps(life.amp)) is None
        life.step()


# --- windows ---------------------------------------------------------------------------------------------------------


@each_value()
@pytest.mark.parametrize("getter", GETTERS)
@pytest.mark.parametrize("line", ["fp16-mixed+loss_scale.interval=1", "fp16-master+loss_scale.interval=1"])
def test_a_getter_between_two_steps_changes_nothing(line: str, getter: str) -> None:
    with living("plain", "two") as life:
        life.prepare(line)
        life.get = lambda *which: Life.get(life, getter)  # type: ignore[method-assign]
        for _ in range(3):
            life.step(together=False, getters=True)


def _two_halves(line: str) -> tuple[Amp, nn.Module, list[torch.optim.Optimizer]]:
    model = KINDS["plain"].build()
    pair: list[torch.optim.Optimizer] = [
        torch.optim.SGD(model[0].parameters(), 0.1),  # type: ignore[index]
        torch.optim.SGD(model[2].parameters(), 0.1),  # type: ignore[index]
    ]
    amp = Amp(line, device=DEVICE)
    amp.prepare(model, *pair)
    return amp, model, pair


@pytest.mark.parametrize(
    "line", ["fp16-mixed+loss_scale.interval=1", "fp16-master+loss_scale.interval=1", "bf16-mixed"]
)
def test_one_optimizer_accumulates_while_another_steps(line: str) -> None:
    """Both gradients of the second optimizer count in full although the scale changed in between, or castwise raises."""
    xs = [KINDS["plain"].batch(seed) for seed in (1, 2)]
    model, want = KINDS["plain"].build(), None
    for x in xs:
        model(x).square().mean().backward()
        with torch.no_grad():
            for p in model[0].parameters():  # type: ignore[index]
                p -= 0.1 * p.grad
                p.grad = None
    want = [p.detach() - 0.1 * p.grad for p in model[2].parameters()]  # type: ignore[index]
    amp, model, (a, b) = _two_halves(line)
    with amp:
        try:
            for x in xs:
                amp.backward(model(x).square().mean())
                amp.step(a)
                a.zero_grad()
            amp.step(b)
        except StateError:
            return
        got = [amp.model_state_dict(model)[f"2.{name}"] for name in ("weight", "bias")]
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=0.02, atol=2e-3)


def _steps_by_itself(amp: Amp, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def _steps_by_itself_after_clipping(amp: Amp, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    optimizer.step()


def _clips_too_early(amp: Amp, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    amp.step(optimizer)


def _clips_values_too_early(amp: Amp, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    amp.step(optimizer)


@pytest.mark.parametrize("line", ["fp16-mixed", "fp16-master", "O2"])
@pytest.mark.parametrize(
    "wrong", [_steps_by_itself, _steps_by_itself_after_clipping, _clips_too_early, _clips_values_too_early]
)
def test_a_step_on_scaled_gradients_is_noticed(wrong: Callable[..., None], line: str) -> None:
    model = KINDS["plain"].build()
    (optimizer,) = optimizers(model, "sgd")
    with Amp(line, device=DEVICE) as amp:
        amp.prepare(model, optimizer)
        amp.backward(model(KINDS["plain"].batch(0)).square().mean())
        before = [bits(p) for p in model.parameters()]
        with pytest.raises(StateError):
            wrong(amp, model, optimizer)
        assert [bits(p) for p in model.parameters()] == before


def _steps_first(amp: Amp, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    amp.step(optimizer)


def _unscales_first(amp: Amp, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    amp.unscale_(optimizer)


def _clips_first(amp: Amp, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    amp.clip_grad_norm_(optimizer, 1.0)


def _unscales_twice(amp: Amp, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    amp.backward(model(KINDS["plain"].batch(0)).square().mean())
    amp.unscale_(optimizer)
    amp.unscale_(optimizer)


def _steps_twice(amp: Amp, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    amp.backward(model(KINDS["plain"].batch(0)).square().mean())
    amp.step(optimizer)
    amp.step(optimizer)


def _two_scales(amp: Amp, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss = model(KINDS["plain"].batch(0)).square().mean()
    amp.scale(loss)
    amp.scale(loss, "other")


@each_value()
@pytest.mark.parametrize(
    "wrong", [_steps_first, _unscales_first, _clips_first, _unscales_twice, _steps_twice, _two_scales]
)
@pytest.mark.parametrize("line", ["fp16-mixed", "fp16-mixed+optimizer=fused", "fp16-master", "O2"])
def test_errors_of_a_window_speak_castwises_words(line: str, wrong: Callable[..., None]) -> None:
    model = KINDS["plain"].build()
    (optimizer,) = optimizers(model, "sgd")
    with Amp(line, device=DEVICE) as amp:
        amp.prepare(model, optimizer)
        try:
            wrong(amp, model, optimizer)
        except Exception as error:
            assert isinstance(error, CastwiseError), repr(error)  # noqa: PT017
            text = str(error)
            for word in ("_scale is None", "update()", "GradScaler", "found_inf", "inf checks"):
                assert word not in text, text
        finally:
            optimizer.zero_grad()
    assert of_optimizers([optimizer], values=False)["SGD 0: defaults"].get("fused") is None


def test_a_castwise_plan_is_told_from_none() -> None:
    """A control: without a plan, the same life runs plain torch."""
    with living("plain", "two") as life:
        for _ in range(3):
            life.step(together=False, max_norm=0.5, getters=True)
        life.end()
    assert castwise.Amp.of(life.model) is None


@pytest.mark.parametrize(
    "line",
    ["fp32", "fp16-mixed+loss_scale.interval=1", "bf16-master", "fp16-master+loss_scale.interval=2", "O2"],
)
@pytest.mark.parametrize("optimizer", ["sgd", "two"])
def test_replaced_gradients_and_steps_left_out_between_others(line: str, optimizer: str) -> None:
    life = Life("plain", optimizer)
    life.prepare(line)
    for overflow in (False, True):
        for set_to_none in (True, False):
            life.step()
            life.leave_out(overflow, set_to_none)
            life.save()
            life.load()
            life.step_on_replaced()
            life.step(False, 0.5, overflow=overflow)
    life.close()
    life.end()
    life.bury()
