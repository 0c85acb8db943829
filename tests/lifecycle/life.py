"""A life of a model under castwise: every event that can happen to it, each followed by checks.

Each event is a method. Hypothesis runs them in random order (`test_lifecycle`), and other tests run them in a given
order (`test_directed`). A failed check raises an AssertionError that lists what changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import castwise
from castwise.core import _torch
from castwise.core.casting import frames
from castwise.core.masters import without_masters
from castwise.core.session import Amp
from castwise.errors import CastwiseError
from tests.here import DEVICE, FP32_MATMUL
from tests.lifecycle.kinds import KINDS, LLAMA, optimizers
from tests.lifecycle.photograph import bits, differences, of_model, of_optimizers, of_process
from tests.lifecycle.twin import Twin, can_follow, load_state

PLANS = (
    "fp32",
    "bf16-mixed",
    "fp16-mixed+loss_scale.interval=1",
    "bf16-master",
    "fp16-master+loss_scale.interval=2",
    "bf16-true",
    "fp16-true",
    "O1",
    "O2",
    "naive",
    "bf16-mixed+rules=cuda",
    "bf16-mixed+memory_format=channels_last",
    "bf16-master+memory_format=channels_last+optimizer=fused",
    "fp16-mixed+loss_scale.interval=2+optimizer=fused",
    "fp32+fp32_matmul=ieee+fp32_conv=ieee",
    "bf16-mixed+regions.head=fp32+regions.out=fp32+regions.model=fp32",
)
"""Presets, and settings beyond presets. Of the last plan's regions, each kind keeps those it has."""

REFUSALS = (
    "typo", "no such path", "fused Rprop", "too large for fp16", "no optimizer", "skips __init__", "stranger", "conflict",
    "fails halfway", "interrupted halfway",
)  # fmt: skip
ERRORS: dict[str, Callable[[], BaseException]] = {
    "error": lambda: ValueError("in the middle"),
    "keyboard": KeyboardInterrupt,
    "exit": SystemExit,
    "cancelled": asyncio.CancelledError,
}
GETTERS = ("scale", "state", "repr", "weights", "owner", "optimizers", "last")


class SkipsInit(torch.optim.Optimizer):
    """Wraps an optimizer without calling `Optimizer.__init__`, as some libraries do: no hooks, no defaults."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Stubborn(torch.optim.SGD):
    """Refuses hooks, so everything that `prepare` has done before must be undone."""

    error: BaseException

    def register_step_pre_hook(self, hook: Any) -> Any:
        raise self.error


def plan_for(line: str, model: nn.Module) -> castwise.Plan:
    """Return the plan of a line, without regions that the model does not have."""
    plan = castwise.Plan.parse(line)
    paths = dict(model.named_modules())
    kept = tuple(region for region in plan.regions if region.is_type or region.pattern in paths)
    return dataclasses.replace(plan, regions=kept)


def check(before: dict[str, Any], after: dict[str, Any], what: str) -> None:
    """Raise an AssertionError that lists the changes, if there are any."""
    found = differences(before, after)
    assert not found, f"{what} changed {len(found)} things:\n  " + "\n  ".join(found[:12])


class Life:
    """A model with optimizers, its twin, and the events that may happen to them.

    Args:
        kind: A key of `KINDS`, or "llama".
        optimizer: A key of `OPTIMIZERS`.
    """

    def __init__(self, kind: str, optimizer: str) -> None:
        self.kind_name, self.optimizer_name = kind, optimizer
        self.kind = LLAMA if kind == "llama" else KINDS[kind]
        self.at_start = of_process()
        self.model = self.kind.build()
        self.optimizers = optimizers(self.model, optimizer)
        self.twin = Twin(self.kind, optimizer)
        self.buffer_dtypes = {name: buffer.dtype for name, buffer in self.model.named_buffers()}
        self.amp: Amp | None = None
        self.refused: list[Amp] = []
        self.line = ""
        self.at_rest: dict[str, Any] = {}
        self.follows = True
        self.seed = 0
        self.result: Any = None
        self.saved: dict[str, Any] | None = None

    @property
    def prepared(self) -> bool:
        """Return whether a plan is on the model."""
        return self.amp is not None

    def photograph(self, values: bool = True) -> dict[str, Any]:
        """Record the state of model, optimizers and process."""
        return {**of_process(), **of_model(self.model, values), **of_optimizers(self.optimizers, values)}

    def _whole(self) -> dict[str, Any]:
        return {**self.photograph(), "fp32 forward": self._plain_forward()}

    def _plain_forward(self) -> Any:
        """Return the model's output in evaluation, leaving no trace."""
        training = self.model.training
        self.model.eval()
        with torch.no_grad():
            try:
                out = bits(self.model(self.kind.batch(99)))
            except RuntimeError as error:
                out = repr(error)
        self.model.train(training)
        return out

    # --- prepare, and refusals ------------------------------------------------------------------------------

    def prepare(self, line: str) -> None:
        """Prepare the model for a plan; buffers keep their dtype."""
        plan = plan_for(line, self.model)
        self.at_rest = {
            **of_process(),
            **of_model(self.model, False),
            **of_optimizers(self.optimizers, False),
        }
        self.amp = Amp(plan, device=DEVICE)
        self.amp.prepare(self.model, *self.optimizers)
        self.line = line
        self.result = None
        self.follows = can_follow(plan, self.kind_name)
        if self.follows:
            self.twin.prepare(plan)
        self.compare("prepare")

    def refuse(self, how: str, line: str = "bf16-master") -> None:
        """Make a `prepare` fail, called on a new Amp or, if a plan is on, on the current one."""
        if how == "too large for fp16":
            line = "O2+memory_format=channels_last"
        elif how == "fused Rprop":
            line = f"{line.partition('+')[0]}+optimizer=fused"
        elif how == "no such path":
            line = f"{line.partition('+')[0]}+regions.nowhere=fp32"
        elif how == "conflict":
            line = "fp32+fp32_matmul=ieee"
        elif how.endswith("halfway"):
            line = "bf16-master+memory_format=channels_last+ops.exp=fp32+fp32_conv=ieee"
        plan = castwise.Plan.parse(line)
        if how == "conflict" and (
            not _torch.cpu.cpu_has_bf16() or (self.amp and self.amp.plan.fp32_matmul != "as_is")
        ):
            return
        amp = Amp(plan, device=DEVICE)
        self.refused.append(amp)  # an Amp that is freed would give up its settings
        given: list[Any] = list(self.optimizers)
        methods: tuple[str, ...] = ()
        last = list(self.model.parameters())[-1]
        former = last.detach().clone()
        other: Amp | None = None
        must = True
        if how == "typo":
            methods = ("forwrad",)
        elif how == "fused Rprop":
            given.append(torch.optim.Rprop(self.model.parameters()))
        elif how == "too large for fp16":
            last.data.fill_(1e5 if last.dtype is torch.float32 else 1.0)
            must = last.dtype is torch.float32
        elif how == "no optimizer":
            given.append("adamw")
        elif how == "skips __init__":
            given.append(SkipsInit(self.optimizers[0]))
            must = False  # the plan may also accept such an optimizer
        elif how == "stranger":
            given.append(torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1))
        elif how.endswith("halfway"):
            stubborn = Stubborn(self.model.parameters(), 0.1)
            stubborn.error = (
                KeyboardInterrupt() if how.startswith("interrupted") else RuntimeError("no hooks here")
            )
            given.append(stubborn)
        elif how == "conflict":
            other = Amp(f"fp32+fp32_matmul={FP32_MATMUL}", device=DEVICE)
            other.prepare(nn.Linear(1, 1))
            must = FP32_MATMUL != "ieee"  # other plans use ieee as well
        extra = [o for o in given[len(self.optimizers) :] if hasattr(o, "_optimizer_step_pre_hooks")]
        watched = [*self.optimizers, *extra]
        before = {**self._whole(), **of_optimizers(watched)}
        refused = True
        try:
            try:
                amp.prepare(self.model, *given, methods=methods)
                refused = False
            except BaseException as error:
                own = how.endswith("halfway") and not isinstance(error, (AttributeError, TypeError))
                assert own or isinstance(error, CastwiseError), (  # noqa: PT017
                    f"prepare ({how}) raised an error that is not castwise's: {error!r}"
                )
            assert not refused or Amp.of(self.model) is self.amp, "a refused Amp owns the model"
            if not refused:
                amp.close()
                assert not must, f"prepare ({how}) was accepted"
            check(before, {**self._whole(), **of_optimizers(watched)}, f"a refused prepare ({how}, {line})")
            amp.close()
            check(
                before, {**self._whole(), **of_optimizers(watched)}, f"closing a refused Amp ({how}, {line})"
            )
        finally:
            if how == "too large for fp16":
                last.data.copy_(former)
            if other is not None:
                other.close()
        self.compare(f"a refused prepare ({how})")

    # --- training -----------------------------------------------------------------------------------------

    def forward(self, seed: int, poison: bool = False) -> tuple[Tensor, Tensor | None]:
        """Run the model and its twin; the outputs are bitwise equal."""
        x = self.kind.batch(seed)
        if poison and x.is_floating_point():
            x.view(-1)[0] = float("nan")
        out = self.model(x)
        assert out.dtype is torch.float32, f"the output is {out.dtype}"
        want = self.twin.forward(x) if self.follows else None
        if want is not None:
            assert bits(out) == bits(want), f"forward differs from the twin's under {self.line or 'no plan'}"
        return out, want

    def step(
        self,
        together: bool = True,
        max_norm: float | None = None,
        overflow: bool = False,
        getters: bool = False,
        poison: bool = False,
    ) -> None:
        """Run forward, backward, step and clear; with `getters`, read everything in between.

        `poison` puts a NaN into the batch: the step is skipped, and no buffer becomes non-finite.
        """
        self.seed += 1
        look = self.get if getters else (lambda *which: None)
        out, want = self.forward(self.seed, poison)
        plan = None if self.amp is None else self.amp.plan
        factor = 1e9 if overflow and plan is not None and plan.loss_scale is not None else 1.0
        loss = factor * out.square().mean()
        look()
        if want is not None:
            self.twin.backward(factor * want.square().mean())
            self.twin.step(together, max_norm)
        if self.amp is None:
            loss.backward()
            for several in [self.optimizers] if together else [[o] for o in self.optimizers]:
                if max_norm is not None:
                    params = [p for o in several for group in o.param_groups for p in group["params"]]
                    nn.utils.clip_grad_norm_(params, max_norm)
                for optimizer in several:
                    optimizer.step()
        else:
            self.amp.backward(loss)
            look()
            if together:
                self.result = self.amp.step(*self.optimizers, max_norm=max_norm)
            else:
                for optimizer in self.optimizers:
                    self.result = self.amp.step(optimizer, max_norm=max_norm)
                    look()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        look()
        if poison:
            for name, buffer in self.model.named_buffers():
                assert buffer.isfinite().all(), f"a skipped step left {name} non-finite under {self.line}"
        self.compare("a poisoned step" if poison else "a step")

    def _refused(self, wrong: Callable[[], Any], what: str) -> None:
        """Run a backward, then a call that must raise castwise's error and not change the weights."""
        assert self.amp is not None
        self.seed += 1
        out, want = self.forward(self.seed)
        self.amp.backward(out.square().mean())
        before = of_model(self.model)
        try:
            wrong()
        except Exception as error:
            assert isinstance(error, CastwiseError), (  # noqa: PT017
                f"{what} raised an error that is not castwise's: {error!r}"
            )
        else:
            raise AssertionError(f"{what} was accepted under {self.line}")
        weights = {key: value for key, value in of_model(self.model).items() if "gradient" not in key}
        check({key: before[key] for key in weights}, weights, f"{what}, refused,")
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.model.zero_grad()
        del out, want
        self.compare(what)

    def write_through_data(self, number: int) -> None:
        """Halve a parameter through `p.data`, as clipping, pruning and initialisation do; the next step continues from
        there.
        """
        params = list(self.model.parameters())
        at = number % len(params)
        params[at].data.mul_(0.5)
        if self.follows:
            own = list(self.twin.model.parameters())[at]
            with torch.no_grad():
                own.copy_(own.to(params[at].dtype).mul_(0.5))

    def mark(self, number: int) -> None:
        """Set attributes on a parameter and on the one that the optimizer holds; each shows on the other."""
        params = list(self.model.parameters())
        parameter: Any = params[number % len(params)]
        for optimizer in self.optimizers:
            for held in (p for group in optimizer.param_groups for p in group["params"]):
                if castwise.masters.model_param_of(held) is parameter:
                    parameter.marked, held.marked_back = number, number
                    assert held.marked == parameter.marked_back == number
                    del held.marked, parameter.marked_back
                    assert not hasattr(parameter, "marked")
                    assert not hasattr(held, "marked_back")

    def step_of_a_stranger(self) -> None:
        """Step an optimizer of the model's parameters that `prepare` never saw."""
        if self.amp is None:
            return
        amp, stranger = self.amp, torch.optim.SGD(self.model.parameters(), 0.1)
        self._refused(lambda: amp.step(stranger), "a step of an optimizer that was not prepared")

    def step_on_scaled(self) -> None:
        """Call `optimizer.step()` on gradients that still contain the loss scale."""
        if self.amp is None or self.amp.plan.loss_scale is None:
            return
        self._refused(
            lambda: [optimizer.step() for optimizer in self.optimizers], "a step on scaled gradients"
        )

    def step_on_replaced(self) -> None:
        """Call `optimizer.step()` on gradients that were replaced by ones computed from scaled gradients."""
        if self.amp is None or self.amp.plan.loss_scale is None:
            return

        def wrong() -> None:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()
            for optimizer in self.optimizers:
                optimizer.step()

        self._refused(wrong, "a step on gradients that replaced scaled ones")

    def leave_out(self, overflow: bool, set_to_none: bool) -> None:
        """Unscale, check and clear without a step, as a user's own check does. Weights stay; an overflow changes the
        scale.
        """
        if self.amp is None:
            return
        self.seed += 1
        out, want = self.forward(self.seed)
        factor = 1e9 if overflow and self.amp.plan.loss_scale is not None else 1.0
        self.amp.backward(factor * out.square().mean())
        for optimizer in self.optimizers:
            self.amp.unscale_(optimizer)
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        found = not all(bool(torch.isfinite(grad).all()) for grad in grads)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
        self.model.zero_grad()
        if want is not None and found and self.twin.scale is not None:
            self.twin.scale.update(True)
        del out, want, grads
        self.compare("a step that was left out")

    def compile_first(self) -> None:
        """Compile, run, then prepare: refused, because the compiled code would ignore the plan."""
        model = nn.Linear(2, 2)
        compiled = torch.compile(model, backend="eager")
        compiled(torch.ones(1, 2))
        with Amp("bf16-mixed", device=DEVICE) as amp:
            for given in (model, compiled):
                try:
                    amp.prepare(given)
                except CastwiseError:
                    assert Amp.of(model) is None
                else:
                    raise AssertionError("prepare accepted a module that has run compiled")
        torch._dynamo.reset()

    def by_closure(self) -> None:
        """Take a few LBFGS steps, which need a closure, on the trained parameters; without a twin."""
        if self.amp is not None:
            return
        trained = [p for p in self.model.parameters() if p.requires_grad]
        lbfgs = torch.optim.LBFGS(trained, 0.1, max_iter=2)
        before = self.photograph(values=False)
        with Amp("bf16-master", device=DEVICE) as amp:
            amp.prepare(self.model, lbfgs)
            x = self.kind.batch(self.seed)

            def closure() -> Tensor:
                lbfgs.zero_grad()
                loss = self.model(x).square().mean()
                amp.backward(loss)
                return loss

            amp.step(lbfgs, closure=closure)
            want = {name: bits(value) for name, value in amp.model_state_dict(self.model).items()}
        lbfgs.zero_grad()
        check(
            want,
            {name: bits(value) for name, value in self.model.state_dict().items()},
            "closing after LBFGS",
        )
        check(before, self.photograph(values=False), "LBFGS under a plan, closed,")
        self._twin_takes_over()
        self.compare("LBFGS")

    def evaluate(self) -> None:
        """Evaluate: nothing changes, and the output equals the twin's."""
        before = self.photograph()
        self.model.eval()
        self.twin.model.eval()
        with torch.no_grad():
            self.forward(1000)
        self.model.train()
        self.twin.model.train()
        check(before, self.photograph(), "evaluation")

    def interrupt(self, which: str, where: int) -> None:
        """Raise an error in a submodule in the middle of a forward; the plan does not stay in force."""
        before = of_process()
        x = self.kind.batch(1001)
        models = [self.model] if not self.follows else [self.model, self.twin.model]
        for model in models:
            module = list(model.modules())[where % len(list(model.modules()))]
            run = model if model is self.model else self.twin.forward
            with contextlib.ExitStack() as stack:
                if model is not self.model and self.twin.low is not None:
                    module = list(self.twin.low.modules())[where % len(list(model.modules()))]
                error = ERRORS[which]()

                def fail(*args: Any, error: BaseException = error, **kwargs: Any) -> Any:
                    raise error

                module.__dict__["forward"] = fail
                stack.callback(module.__dict__.pop, "forward")
                with contextlib.suppress(type(error)):
                    run(x)
        check(before, of_process(), f"{which} inside a forward under {self.line or 'no plan'}")
        x = torch.ones(2, 2)
        assert nn.Linear(2, 2)(x).dtype is torch.float32
        self.compare(f"{which} inside a forward")

    # --- reading ------------------------------------------------------------------------------------------

    def get(self, *which: str) -> None:
        """Read everything, or some of it; nothing changes."""
        if self.amp is None:
            return
        before = self.photograph()
        amp, seen = self.amp, []
        looks: dict[str, Callable[[], Any]] = {
            "scale": amp.get_scale,
            "state": amp.state_dict,
            "repr": lambda: (repr(amp), str(self.result)),
            "weights": lambda: [bits(value) for value in amp.model_state_dict(self.model).values()],
            "owner": lambda: Amp.of(self.model) is amp,
            "optimizers": lambda: [optimizer.state_dict() and None for optimizer in self.optimizers],
            "last": lambda: self.result is not None and (self.result.skipped, str(self.result.grad_norm)),
        }
        for name in which or GETTERS:
            seen.append(str(looks[name]()))  # noqa: PERF401
        for name, want in zip(which or GETTERS, seen, strict=True):
            assert str(looks[name]()) == want, f"{name} gives another result the second time"
        check(before, self.photograph(), f"getters ({', '.join(which) or 'all'})")

    def copy(self) -> None:
        """Copy and pickle the model: the copy gives the same output, the pickle has no plan, and no Amp owns either."""
        before = self.photograph()
        want = self._plain_forward()
        other, data = copy.deepcopy(self.model), pickle.dumps(self.model)
        other.eval()
        with torch.no_grad():
            assert bits(other(self.kind.batch(99))) == want
        plain = pickle.loads(data)
        assert b"castwise" not in data
        assert Amp.of(other) is Amp.of(plain) is None
        amp, weights = self.amp, self.model.state_dict()
        if amp is not None:
            weights = amp.model_state_dict(self.model, as_given=True)
        for name, value in plain.state_dict().items():
            assert bits(value) == bits(weights[name].as_subclass(Tensor)), f"the pickled {name} differs"
        del other, plain
        try:
            twin, none = copy.deepcopy(amp), pickle.loads(pickle.dumps(amp))
        except Exception as error:
            raise AssertionError(f"a model with an Amp cannot be copied or pickled: {error!r}") from error
        assert none is None
        assert amp is None or (twin.plan, twin.get_scale()) == (amp.plan, amp.get_scale())
        check(before, self.photograph(), "a copy of the model")

    # --- saving -------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Keep a checkpoint in memory, as a file would be."""
        amp, file = self.amp, io.BytesIO()
        weights = self.model.state_dict() if amp is None else amp.model_state_dict(self.model)
        state = {
            "model": weights,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "amp": None if amp is None else amp.state_dict(),
        }
        torch.save(state, file)
        file.seek(0)
        self.saved = torch.load(file, weights_only=True)
        low = [
            name
            for name, value in self.saved["model"].items()
            if value.dtype in (torch.bfloat16, torch.float16)
        ]
        assert not low, f"saved low: {low}"
        scale = self.twin.scale if self.follows else None
        self.saved["scale"] = None if scale is None else (scale.value, scale.finite)
        self.saved["plan"] = "" if amp is None else self.line
        self.compare("saving")

    def load(self) -> None:
        """Load the checkpoint, whatever plan is on now."""
        saved = self.saved
        if saved is None:
            return
        if self.amp is not None and saved["plan"] not in ("", self.line):
            saved = {**saved, "amp": None, "scale": None}  # the state of another loss scale does not apply
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            load_state(optimizer, state)
        if self.amp is not None and saved["amp"] is not None:
            self.amp.load_state_dict(saved["amp"])
        if self.follows:
            self.twin.take(saved["model"], saved["optimizers"])
            if self.twin.scale is not None and saved["scale"] is not None:
                self.twin.scale.value, self.twin.scale.finite = saved["scale"]
        self.compare("loading")

    # --- closing ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the plan: everything is as before `prepare`, except that the weights are trained."""
        amp = self.amp
        if amp is None:
            return
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.model.zero_grad()
        # Without masters, the low values were trained; fp32 values may return with more digits.
        low = amp.plan.compute_dtype if amp.plan.stores_low and not amp.plan.keeps_masters else None
        want = _rounded(amp.model_state_dict(self.model), low)
        amp.close()
        self.amp = None
        line, self.line = self.line, ""
        check(self.at_rest, self.photograph(values=False), f"prepare and close of {line}")
        check(want, _rounded(self.model.state_dict(), low), f"closing {line}")
        assert Amp.of(self.model) is None
        amp.close()
        if self.follows:
            self.twin.close()
        else:
            self._twin_takes_over()
        self.follows = True
        self.compare(f"closing {line}")

    def _twin_takes_over(self) -> None:
        self.twin.close()
        self.twin.take(self.model.state_dict(), [optimizer.state_dict() for optimizer in self.optimizers])

    def bury(self) -> None:
        """Restore the process after any failure. A life without failure checks this in `end`."""
        with contextlib.suppress(Exception):
            if self.amp is not None:
                self.amp.close()
        while frames.depth():
            frames.pop()
        torch.set_autocast_enabled(DEVICE, False)
        torch.set_autocast_dtype(DEVICE, self.at_start["autocast dtype"])
        backends = torch.backends.mkldnn
        backends.matmul.fp32_precision, backends.conv.fp32_precision = self.at_start["fp32 precision"]

    def end(self) -> None:
        """Close; then the process is as at the start, and the model trains on as its twin does."""
        self.close()
        check(self.at_start, of_process(), "a whole life")
        self.step()
        self.step()

    # --- checks after every event ---------------------------------------------------------------------------

    def compare(self, after: str) -> None:
        """Check that weights, buffers and optimizer states equal the twin's bit for bit, and buffers keep their dtype."""
        dtypes = {name: buffer.dtype for name, buffer in self.model.named_buffers()}
        check(self.buffer_dtypes, dtypes, f"{after} under {self.line or 'no plan'}")
        if not self.follows:
            return
        own = self.model.state_dict() if self.amp is None else self.amp.model_state_dict(self.model)
        want = {name: bits(value) for name, value in self.twin.model.state_dict().items()}
        check(
            want,
            {name: bits(value) for name, value in own.items()},
            f"beside the twin, {after} ({self.line or 'no plan'})",
        )
        for number, (a, b) in enumerate(zip(self.twin.optimizers, self.optimizers, strict=True)):
            check(
                _values_of(a),
                _values_of(b),
                f"beside the twin, {after} ({self.line or 'no plan'}), optimizer {number}",
            )


def _rounded(weights: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, Any]:
    return {name: bits(value if dtype is None else value.to(dtype)) for name, value in weights.items()}


def _values_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state by value without all-zero tensors, which a fused kernel makes even when it skips its first step."""
    state = without_masters(optimizer.state_dict())["state"]
    return {
        f"{index}.{key}": bits(value) if isinstance(value, Tensor) else value
        for index, entries in state.items()
        for key, value in entries.items()
        if not isinstance(value, Tensor) or value.any()
    }


@contextlib.contextmanager
def living(kind: str = "plain", optimizer: str = "sgd") -> Iterator[Life]:
    """Provide a life, and clean up the process however it ends."""
    life = Life(kind, optimizer)
    try:
        yield life
    finally:
        life.bury()


def must_break(script: Callable[[Life], None], kind: str = "plain", optimizer: str = "sgd") -> None:
    """Check that a life which runs this script fails."""
    with living(kind, optimizer) as life, pytest.raises(AssertionError):
        script(life)
