"""Training resumes bit for bit from ``model.state_dict()`` and ``optimizer.state_dict()`` saved by ``torch.save``."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

import castwise
from tests.core.masters.presets import MASTERS
from tests.here import DEVICE
from tests.soak import every

Make = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.001),
    "adafactor": torch.optim.Adafactor,
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


class Tied(nn.Module):
    """fp32 and low-precision weights, one of them tied."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.head = (
            nn.Linear(8, 8),
            nn.LayerNorm(8),
            nn.Linear(8, 8),
            nn.Linear(8, 4),
        )
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, 8] to [batch, 4]."""
        out: Tensor = self.head(self.b(torch.tanh(self.norm(self.a(x)))))
        return out


def fresh(make: Make = OPTIMIZERS["adamw"], *, other: bool = False) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(1 if other else 0)
    model = Tied()
    return model, make(list(model.parameters()))


def train(amp: Any, model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:

        def evaluate(seed: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = (
                model(torch.randn(6, 8, generator=torch.Generator(DEVICE).manual_seed(seed))).square().mean()
            )
            amp.backward(loss)
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            amp.step(optimizer, closure=evaluate)
        else:
            evaluate()
            amp.step(optimizer)
        optimizer.zero_grad()


def files(model: nn.Module, optimizer: Optimizer) -> Any:
    """Return what a training loop saves and a later process loads."""
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@contextlib.contextmanager
def session(plan: str, *prepared: Any) -> Iterator[castwise.Amp]:
    with castwise.Amp(plan, device=DEVICE) as amp:
        if prepared:
            amp.prepare(*prepared)
        yield amp


def same(amp: castwise.Amp, model: nn.Module, want: dict[str, Tensor]) -> bool:
    got = amp.model_state_dict(model)
    return all(torch.equal(got[key], value) for key, value in want.items())


def uninterrupted(plan: str, make: Make) -> tuple[Any, Any, dict[str, Tensor]]:
    """Return the files and the session state in the middle of a training, and the weights at its end."""
    model, optimizer = fresh(make)
    with session(plan, model, optimizer) as amp:
        train(amp, model, optimizer, range(3))
        saved, state = files(model, optimizer), amp.state_dict()
        train(amp, model, optimizer, range(3, 6))
        return saved, state, {k: v.clone() for k, v in amp.model_state_dict(model).items()}


PLANS = [*MASTERS, "bf16-master+regions.head=params:fp32"]


@every(2)
@pytest.mark.parametrize("prepared", ["before", "after"])
@pytest.mark.parametrize("order", ["model-optimizer", "optimizer-model"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("plan", PLANS)
def test_a_training_goes_on_bit_for_bit_from_what_every_loop_saves(
    plan: str, name: str, order: str, prepared: str
) -> None:
    """Loading works in either order, before or after ``prepare``, and leaves no castwise keys in the optimizer."""
    saved, state, want = uninterrupted(plan, OPTIMIZERS[name])
    model, optimizer = fresh(OPTIMIZERS[name], other=True)
    with session(plan, *([model, optimizer] if prepared == "before" else [])) as amp:
        for part in order.split("-"):
            {"model": model, "optimizer": optimizer}[part].load_state_dict(saved[part])
        if prepared == "after":
            amp.prepare(model, optimizer)
        amp.load_state_dict(state)
        train(amp, model, optimizer, range(3, 6))
        assert same(amp, model, want)
        assert not [key for held in optimizer.state.values() for key in held if "castwise" in key]
        assert not [key for group in optimizer.param_groups for key in group if "castwise" in key]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_both_files_load_and_train_in_plain_torch(name: str) -> None:
    """Plain torch can use the optimizer file with or without the master values; includes files from before the first
    step.
    """
    for steps in (0, 2):
        model, optimizer = fresh(OPTIMIZERS[name])
        with session("bf16-master", model, optimizer) as amp:
            train(amp, model, optimizer, range(steps))
            saved = files(model, optimizer)
        plain, other = fresh(OPTIMIZERS[name])
        plain.load_state_dict(saved["model"])
        other.load_state_dict(copy.deepcopy(saved["optimizer"]))  # torch takes tensors without copying
        without, alone = fresh(OPTIMIZERS[name])
        without.load_state_dict(saved["model"])
        alone.load_state_dict(castwise.masters.without_masters(saved["optimizer"]))
        no_plan = castwise.Amp("fp32", device=DEVICE, nonfinite="allow")
        no_plan.step = lambda o, closure=None: o.step(closure)  # type: ignore[assignment, method-assign]
        for pair in ((plain, other), (without, alone)):
            train(no_plan, *pair, range(3))
        assert all(map(torch.equal, plain.parameters(), without.parameters()))


@pytest.mark.filterwarnings("ignore:.*single process:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_distributed_checkpoints_hold_masters(name: str, flat: bool, tmp_path: Any) -> None:
    """``get_state_dict`` and ``set_state_dict`` in another process restore the masters."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    results = []
    for resumed in (False, True):
        torch.manual_seed(int(resumed))
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
        optimizer = OPTIMIZERS[name](model.parameters())
        with session("bf16-master", model, optimizer) as amp:
            if not resumed:
                train(amp, model, optimizer, range(3))
            weights, state = get_state_dict(model, optimizer, options=options)
            if resumed:
                dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
                set_state_dict(
                    model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options
                )
            else:
                dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
            train(amp, model, optimizer, range(3, 6))
            results.append([v.clone() for v in amp.model_state_dict(model).values()])
    assert all(map(torch.equal, *results))


def test_a_running_training_goes_back_to_its_files() -> None:
    """All low-order bits are restored, even of elements that round to the same value before and after."""
    model, optimizer = fresh()
    with session("bf16-master", model, optimizer) as amp:
        train(amp, model, optimizer, range(3))
        snapshot = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        want = {k: v.clone() for k, v in amp.model_state_dict(model).items()}
        train(amp, model, optimizer, range(3, 5))
        model.load_state_dict(snapshot[0])
        optimizer.load_state_dict(snapshot[1])
        assert same(amp, model, want)


def test_saving_and_looking_write_nothing() -> None:
    model, optimizer = fresh()
    with session("bf16-master", model, optimizer) as amp:
        train(amp, model, optimizer, range(2))
        before = [p.detach().clone() for p in (*model.parameters(), *optimizer.param_groups[0]["params"])]
        versions = [p._version for p in model.parameters()]
        optimizer.state_dict()
        assert [p._version for p in model.parameters()] == versions
        after = [*model.parameters(), *optimizer.param_groups[0]["params"]]
        assert all(map(torch.equal, before, after))
        assert not [key for held in optimizer.state.values() for key in held if "castwise" in key]


def test_what_was_written_by_hand_is_saved() -> None:
    """Saves weights written before the masters took them over, and masters written before the weights did."""
    model, optimizer = fresh()
    with session("bf16-master", model, optimizer) as amp:
        train(amp, model, optimizer, range(2))
        with torch.no_grad():
            model.get_parameter("a.weight")[0] = 0.3
            optimizer.param_groups[0]["params"][1].fill_(0.123456)
        optimizer_file, model_file = optimizer.state_dict(), model.state_dict()
        want = {k: v.clone() for k, v in amp.model_state_dict(model).items()}
        assert torch.equal(want["a.bias"], torch.full((8,), 0.123456))
        saved = copy.deepcopy((model_file, optimizer_file))
    model, optimizer = fresh()
    with session("bf16-master", model, optimizer) as amp:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        assert same(amp, model, want)


def test_parameters_frozen_at_first_keep_their_full_values() -> None:
    """They keep them through both files, and after unfreezing."""
    results = []
    for resumed in (False, True):
        model, optimizer = fresh(other=resumed)
        for parameter in model.get_submodule("head").parameters():
            parameter.requires_grad_(False)
        with session("bf16-master", model, optimizer) as amp:
            if not resumed:
                train(amp, model, optimizer, range(3))
                saved = files(model, optimizer)
            else:
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
            train(amp, model, optimizer, range(3, 5))
            for parameter in model.get_submodule("head").parameters():
                parameter.requires_grad_(True)
            train(amp, model, optimizer, range(5, 7))
            results.append({k: v.clone() for k, v in amp.model_state_dict(model).items()})
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


def test_several_groups_optimizers_and_partial_files() -> None:
    """One file per optimizer, and the model's weights in two files."""
    results = []
    for resumed in (False, True):
        model, _ = fresh(other=resumed)
        named = dict(model.named_parameters())
        body = [p for name, p in named.items() if "head" not in name]
        optimizers = [
            torch.optim.AdamW([{"params": body[:2], "lr": 0.01}, {"params": body[2:], "lr": 0.02}]),
            torch.optim.SGD([named["head.weight"], named["head.bias"]], lr=0.1),
        ]
        with session("bf16-master", model, *optimizers) as amp:
            if not resumed:
                for step in range(3):
                    joint(amp, model, optimizers, step)
                saved = copy.deepcopy((model.state_dict(), [o.state_dict() for o in optimizers]))
            else:
                head = {k: v for k, v in saved[0].items() if "head" in k}
                optimizers[0].load_state_dict(saved[1][0])
                model.load_state_dict(head, strict=False)
                model.load_state_dict({k: v for k, v in saved[0].items() if k not in head}, strict=False)
                optimizers[1].load_state_dict(saved[1][1])
            for step in range(3, 5):
                joint(amp, model, optimizers, step)
            results.append({k: v.clone() for k, v in amp.model_state_dict(model).items()})
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


def joint(amp: castwise.Amp, model: nn.Module, optimizers: list[Optimizer], step: int) -> None:
    amp.backward(
        model(torch.randn(6, 8, generator=torch.Generator(DEVICE).manual_seed(step))).square().mean()
    )
    amp.step(*optimizers)
    for optimizer in optimizers:
        optimizer.zero_grad()


def test_full_weights_hold_against_masters_of_other_weights() -> None:
    """An fp32 average loaded with the optimizer's file stays unchanged by the masters, without a warning."""
    saved, _, _ = uninterrupted("bf16-master", OPTIMIZERS["adamw"])
    average = {k: v.float() * (1 + 1e-5) for k, v in saved["model"].items()}
    for order in (0, 1):
        model, optimizer = fresh()
        with session("bf16-master", model, optimizer) as amp:
            loads = [lambda m=model: m.load_state_dict(average)]
            loads.insert(order, lambda o=optimizer: o.load_state_dict(saved["optimizer"]))
            for load in loads:
                load()
            train(amp, model, optimizer, range(0))
            assert same(amp, model, average)


@pytest.mark.parametrize("order", ["model-optimizer", "optimizer-model"])
def test_masters_of_another_step_are_said_and_the_models_values_hold(order: str) -> None:
    model, optimizer = fresh()
    with session("bf16-master", model, optimizer) as amp:
        train(amp, model, optimizer, range(2))
        early = files(model, optimizer)
        train(amp, model, optimizer, range(2, 4))
        late = files(model, optimizer)
    model, optimizer = fresh(OPTIMIZERS["adamw"], other=True)
    with session("bf16-master", model, optimizer) as amp:
        for part in order.split("-"):
            if part == "model":
                model.load_state_dict(late["model"])
            else:
                optimizer.load_state_dict(early["optimizer"])
        for group in optimizer.param_groups:
            group["lr"] = 0.0
            group["weight_decay"] = 0.0
        with pytest.warns(
            UserWarning, match=r"AdamW.load_state_dict: .* are not those of the model's weights"
        ):
            train(amp, model, optimizer, range(1))
        assert all(torch.equal(model.state_dict()[key], value) for key, value in late["model"].items())
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # warns once
            train(amp, model, optimizer, range(1, 2))


@pytest.mark.parametrize("order", ["model-optimizer", "optimizer-model"])
def test_files_without_low_bits_are_said_while_they_load(order: str) -> None:
    """Files from a plain bf16 loop cause one warning."""
    plain, plain_optimizer = fresh()
    plain.bfloat16()
    plain(torch.ones(2, 8).bfloat16()).sum().backward()
    plain_optimizer.step()
    saved = files(plain, plain_optimizer)
    model, optimizer = fresh(other=True)
    with session("bf16-master", model, optimizer) as amp:
        first, second = order.split("-")
        {"model": model, "optimizer": optimizer}[first].load_state_dict(saved[first])
        with pytest.warns(UserWarning, match="the loaded state has no fp32 masters"):
            {"model": model, "optimizer": optimizer}[second].load_state_dict(saved[second])
        train(amp, model, optimizer, range(2))


def test_a_models_file_alone_is_loaded_without_a_word() -> None:
    """Fine-tuning starts this way."""
    model, optimizer = fresh()
    with session("bf16-master", model, optimizer) as amp:
        model.load_state_dict({k: v.bfloat16() for k, v in fresh(other=True)[0].state_dict().items()})
        train(amp, model, optimizer, range(2))


class OwnLoader(torch.optim.AdamW):
    """Loads with its own code, which calls no hooks, as bitsandbytes does."""

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state as torch does, but without hooks."""
        hooks = self._optimizer_load_state_dict_post_hooks.copy()
        self._optimizer_load_state_dict_post_hooks.clear()
        try:
            super().load_state_dict(state_dict)
        finally:
            self._optimizer_load_state_dict_post_hooks.update(hooks)


@pytest.mark.parametrize("order", ["model-optimizer", "optimizer-model"])
def test_optimizers_that_load_by_their_own_code(order: str) -> None:
    saved, _, want = uninterrupted("bf16-master", OPTIMIZERS["adamw"])
    model, optimizer = fresh(lambda p: OwnLoader(p, lr=0.01), other=True)
    with session("bf16-master", model, optimizer) as amp:
        for part in order.split("-"):
            {"model": model, "optimizer": optimizer}[part].load_state_dict(saved[part])
        train(amp, model, optimizer, range(3, 6))
        assert same(amp, model, want)


def test_close_right_after_a_load_gives_full_weights() -> None:
    model, optimizer = fresh()
    with session("bf16-master", model, optimizer) as amp:
        train(amp, model, optimizer, range(3))
        saved = files(model, optimizer)
        want = {k: v.clone() for k, v in amp.model_state_dict(model).items()}
    model, optimizer = fresh(other=True)
    with session("bf16-master", model, optimizer):
        optimizer.load_state_dict(saved["optimizer"])
        model.load_state_dict(saved["model"])
    assert all(torch.equal(model.state_dict()[key], value) for key, value in want.items())


def test_files_go_on_under_another_plan_with_masters() -> None:
    """From bf16 to fp16: the full-precision values are those of the masters."""
    model, optimizer = fresh()
    with session("bf16-master", model, optimizer) as amp:
        train(amp, model, optimizer, range(3))
        saved = files(model, optimizer)
        want = {k: v.clone() for k, v in amp.model_state_dict(model).items()}
    model, optimizer = fresh(other=True)
    with session("fp16-master", model, optimizer) as amp:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        assert same(amp, model, want)


def test_state_that_torch_has_rounded_before_prepare_is_said() -> None:
    """If the model is low-precision before prepare, torch itself casts the optimizer state on loading."""
    saved, _, _ = uninterrupted("bf16-master", OPTIMIZERS["adamw"])
    model, optimizer = fresh()
    model.bfloat16()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    with session("bf16-master") as amp, pytest.warns(UserWarning, match="Call load_state_dict after prepare"):
        amp.prepare(model, optimizer)


def test_a_model_that_arrives_low_goes_on_bit_for_bit() -> None:
    """The files are loaded after ``prepare``."""
    results = []
    for resumed in (False, True):
        model, optimizer = fresh(other=resumed)
        model.bfloat16()
        with session("bf16-master", model, optimizer) as amp:
            if not resumed:
                train(amp, model, optimizer, range(3))
                saved = files(model, optimizer)
            else:
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
            train(amp, model, optimizer, range(3, 6))
            results.append({k: v.clone() for k, v in amp.model_state_dict(model).items()})
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


@pytest.mark.parametrize("plan", ["fp32", "bf16-mixed", "bf16-true"])
def test_a_plan_without_masters_keeps_none_of_the_files(plan: str) -> None:
    """The saved master values would use memory and become outdated."""
    saved, _, _ = uninterrupted("bf16-master", OPTIMIZERS["adamw"])
    model, optimizer = fresh()
    with session(plan, model, optimizer) as amp:
        hooks = len(optimizer._optimizer_load_state_dict_post_hooks)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        train(amp, model, optimizer, range(2))
        assert optimizer.state_dict().keys() == {"state", "param_groups"}
        assert not [key for held in optimizer.state.values() for key in held if "castwise" in key]
    assert len(optimizer._optimizer_load_state_dict_post_hooks) == hooks - 1
