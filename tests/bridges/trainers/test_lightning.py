"""Plans in Lightning's Trainer and Fabric train bitwise the same as in a plain loop."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import os
import pickle
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import castwise.bridges.trainers.lightning
from castwise import Amp, LossScale, Plan
from castwise.errors import PlanError, StateError
from tests.distributed.world import World

pytest.importorskip("lightning", reason="needs castwise[lightning]")

import lightning
from lightning import Fabric, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel

from castwise.bridges.trainers.lightning import CastwisePrecision, StrategyError
from tests.soak import each_value, every, pairs

pytestmark = [
    # Lightning's warnings: few data-loading workers, and a name that torch has renamed.
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec"),
]

PLANS = ["fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "fp16-master", "bf16-true", "O2"]
IN_PARTS = "bf16-mixed+regions.net.3=fp32+regions.type:LayerNorm=fp32+ops.gelu=fp32"
FEW = ["fp16-mixed", "bf16-master", "fp16-master"]
"""Plans with a loss scale, with masters, and with both."""
Batch = tuple[Tensor, Tensor]


class Net(LightningModule):
    """A small classifier; ``seen`` holds what its hooks recorded."""

    def __init__(self, seed: int = 1, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
        self.options = {"lr": 0.01, **options}
        self.seen: list[Any] = []

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def loss(self, batch: Batch) -> Tensor:
        return functional.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: Batch) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), **self.options)


def batches(count: int = 6, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 8, 16, generator=generator)
    return [(one, one[:, :4].argmax(1)) for one in inputs]


def loader(data: list[Any]) -> DataLoader[Any]:
    return DataLoader(data, batch_size=None)  # type: ignore[arg-type]


def trainer_for(plugin: CastwisePrecision | None = None, **options: Any) -> Trainer:
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    plugins = [] if plugin is None else [plugin]
    return Trainer(**{"accelerator": "cpu", "max_epochs": 1, "plugins": plugins, **quiet, **options})


def fit(model: Any, plan: Any, data: list[Any] | None = None, /, **options: Any) -> Any:
    """Train the model with a Trainer under a plan and return it."""
    ours = {name: options.pop(name) for name in ("model", "methods", "nonfinite") if name in options}
    path = options.pop("ckpt_path", None)
    trainer_for(CastwisePrecision(plan, **ours), **options).fit(
        model, loader(batches() if data is None else data), ckpt_path=path
    )
    return model


def by_hand(model: Any, plan: Any, data: list[Any] | None = None, clip: Any = None, every: int = 1) -> Any:
    """Train the model in a plain loop under a plan and return it; record the skipped steps in ``seen``."""
    optimizer = model.configure_optimizers()
    results = []
    with Amp(plan) as amp:
        amp.prepare(model, optimizer)
        for number, batch in enumerate(batches() if data is None else data, start=1):
            amp.backward(model.loss(batch) / every)
            if number % every == 0:
                if clip is not None:
                    clip(amp, optimizer)
                results.append(amp.step(optimizer))
                optimizer.zero_grad()
        model.seen.append([result.skipped for result in results])
    return model


def fabric_for(plugin: CastwisePrecision) -> Fabric:
    return Fabric(accelerator="cpu", devices=1, plugins=[plugin])


def by_fabric(model: Any, plan: Any, clip: dict[str, float] | None = None, every: int = 1) -> Any:
    """Train the model with Fabric under a plan and return it."""
    plugin = CastwisePrecision(plan)
    fabric = fabric_for(plugin)
    module, optimizer = fabric.setup(model, model.configure_optimizers())
    for number, (inputs, targets) in enumerate(batches(), start=1):
        with fabric.no_backward_sync(module, enabled=number % every != 0):
            fabric.backward(functional.cross_entropy(module(inputs), targets) / every)
        if number % every == 0:
            if clip is not None:
                fabric.clip_gradients(module, optimizer, **clip)
            optimizer.step()
            optimizer.zero_grad()
    plugin.teardown()
    return model


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and x.dtype is y.dtype and torch.equal(x, y) for (a, x), (b, y) in pairs)


# --- bitwise equal training -----------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [*PLANS, IN_PARTS])
def test_trains_as_in_a_plain_loop(plan: str) -> None:
    want = by_hand(Net(), plan)
    assert same(want, by_hand(Net(), "fp32")) == (plan == "fp32")
    assert same(fit(Net(), plan), want)
    assert same(by_fabric(Net(), plan), want)


@pytest.mark.parametrize("plan", PLANS)
def test_a_submodule_alone_trains_as_in_a_plain_loop(plan: str) -> None:
    """Paths of the plan's regions are relative to the submodule."""
    if plan == "bf16-mixed":
        plan = "bf16-mixed+regions.3=fp32+ops.gelu=fp32"
    want = Net()
    optimizer = want.configure_optimizers()
    with Amp(plan) as amp:
        amp.prepare(want.net, optimizer)
        for batch in batches():
            amp.backward(want.loss(batch))
            amp.step(optimizer)
            optimizer.zero_grad()
    assert same(fit(Net(), plan, model="net"), want)


def test_several_submodules_run_each_by_the_plan() -> None:
    class Two(Net):
        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.net(inputs)
            self.seen.append(hidden.dtype)
            return self.head(hidden)

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 4)

    def see(module: Any, args: Any, output: Tensor) -> None:
        outputs.append(output.dtype)

    outputs: list[torch.dtype] = []
    model = Two()
    model.net[0].register_forward_hook(see)
    model.head.register_forward_hook(see, prepend=True)
    fit(model, "bf16-mixed", model=("net", "head"))
    assert {*outputs} == {torch.bfloat16}
    assert {*model.seen} == {torch.float32}  # outputs between the prepared submodules


@each_value()
@pytest.mark.parametrize("plan", ["bf16-mixed", *FEW])
@pytest.mark.parametrize(
    "clip", [{"max_norm": 0.05}, {"clip_val": 0.002}, None], ids=["norm", "value", "none"]
)
def test_clips_true_gradients_and_accumulates(plan: str, clip: dict[str, float] | None) -> None:
    def clip_by_hand(amp: Amp, optimizer: Any) -> None:
        if clip and "max_norm" in clip:
            assert amp.clip_grad_norm_(optimizer, clip["max_norm"]) > clip["max_norm"]
        elif clip:
            amp.clip_grad_value_(optimizer, clip["clip_val"])

    # SGD, because Adam is invariant to the scale of gradients
    class Model(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.5)

    options: dict[str, Any] = {"accumulate_grad_batches": 2}
    if clip:
        kind = "norm" if "max_norm" in clip else "value"
        options |= {"gradient_clip_val": next(iter(clip.values())), "gradient_clip_algorithm": kind}
    want = by_hand(Model(), plan, clip=clip_by_hand, every=2)
    assert same(want, by_hand(Model(), plan, every=2)) == (clip is None)
    assert same(fit(Model(), plan, **options), want)
    torch.testing.assert_close(by_fabric(Model(), plan, clip, every=2).state_dict(), want.state_dict())


@pytest.mark.parametrize("plan", FEW)
def test_an_optimizer_that_unscales_by_itself_may_be_clipped(plan: str) -> None:
    """Lightning's own fp16 plug-in refuses to clip with fused optimizers."""

    def clip(amp: Amp, optimizer: Any) -> None:
        amp.clip_grad_norm_(optimizer, 0.05)

    want = by_hand(Net(fused=True), plan, clip=clip)
    assert same(fit(Net(fused=True), plan, gradient_clip_val=0.05), want)


@each_value()
@pytest.mark.parametrize("plan", ["bf16-mixed", *FEW])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_an_optimizer_that_evaluates_the_loss_itself(plan: str, clip: float | None) -> None:
    """Lightning's own fp16 plug-in refuses LBFGS."""

    class Model(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    want = Model()
    optimizer = want.configure_optimizers()
    with Amp(plan) as amp:
        amp.prepare(want, optimizer)
        for batch in batches():

            def closure(batch: Batch = batch) -> Tensor:
                loss = want.loss(batch)
                optimizer.zero_grad()
                amp.backward(loss)
                if clip:
                    amp.clip_grad_norm_(optimizer, clip)
                return loss

            amp.step(optimizer, closure=closure)
    assert same(fit(Model(), plan, gradient_clip_val=clip), want)

    model = Model()
    plugin = CastwisePrecision(plan)
    fabric = fabric_for(plugin)
    module, fabrics = fabric.setup(model, model.configure_optimizers())
    for inputs, targets in batches():

        def fabric_closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            loss = functional.cross_entropy(module(inputs), targets)
            fabrics.zero_grad()
            fabric.backward(loss)
            if clip:
                fabric.clip_gradients(module, fabrics, max_norm=clip)
            return loss

        assert isinstance(fabrics.step(fabric_closure), Tensor)
    plugin.teardown()
    torch.testing.assert_close(model.state_dict(), want.state_dict(), rtol=1e-4, atol=1e-5)


class Adversaries(LightningModule):
    """Two networks with one optimizer each, in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.critic = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def generator_loss(self, inputs: Tensor) -> Tensor:
        return functional.softplus(-self.critic(self.generator(inputs))).mean()

    def critic_loss(self, inputs: Tensor) -> Tensor:
        made = self.generator(inputs).detach()
        return (
            functional.softplus(self.critic(made)).mean() + functional.softplus(-self.critic(inputs)).mean()
        )

    def training_step(self, batch: Batch) -> None:
        for optimizer, loss in zip(self.optimizers(), (self.generator_loss, self.critic_loss), strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss(batch[0]))
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            assert optimizer.step() is self.trainer.precision_plugin.last_step

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.5) for part in (self.generator, self.critic)]


@pytest.mark.parametrize("plan", ["bf16-mixed", *FEW])
def test_manual_optimization_of_several_optimizers(plan: str) -> None:
    """With Lightning's own fp16 plug-in, gradients clipped by hand are still multiplied by the loss scale."""
    want = Adversaries()
    optimizers = want.configure_optimizers()
    with Amp(plan) as amp:
        amp.prepare(want, *optimizers, methods=("generator_loss", "critic_loss"))
        for inputs, _ in batches():
            for optimizer, loss in zip(optimizers, (want.generator_loss, want.critic_loss), strict=True):
                optimizer.zero_grad()
                amp.backward(loss(inputs))
                amp.clip_grad_norm_(optimizer, 0.1)
                amp.step(optimizer)
    assert not same(want, Adversaries())
    assert same(fit(Adversaries(), plan, methods=("generator_loss", "critic_loss")), want)


# --- skipped steps --------------------------------------------------------------------------------------------

LOUD = dataclasses.replace(Plan.preset("fp16-mixed"), loss_scale=LossScale(init=2.0**40, interval=2))
"""A plan whose first steps overflow and are skipped until the loss scale has fallen."""


class Scheduled(Net):
    """A model with a halving learning rate; ``seen`` has the scheduler's count and ``skipped`` after each batch."""

    def __init__(self, interval: str = "step", **options: Any) -> None:
        super().__init__()
        self.scheduler = {"interval": interval, **options}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        halving = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": halving, **self.scheduler}}

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append((self.lr_schedulers().last_epoch, self.trainer.precision_plugin.last_step.skipped))


def spoilt(count: int, *at: int) -> list[Batch]:
    """Return batches, with NaN in those at the given positions."""
    return [
        (inputs * (float("nan") if n in at else 1), targets)
        for n, (inputs, targets) in enumerate(batches(count))
    ]


def moves(skips: list[bool]) -> list[int]:
    return [number - sum(skips[:number]) for number in range(1, len(skips) + 1)]


@pytest.mark.parametrize(
    ("plan", "data"),
    [
        (LOUD, batches(30)),
        ("bf16-master", spoilt(6, 1, 4)),
    ],
    ids=["overflow", "nan"],
)
def test_a_scheduler_rests_at_skipped_steps(plan: Any, data: list[Batch]) -> None:
    model = fit(Scheduled(), plan, data)
    counts, skips = map(list, zip(*model.seen, strict=True))
    want = by_hand(Net(), plan, data)
    assert skips == want.seen[0]
    assert True in skips
    assert False in skips
    assert counts == moves(skips)
    assert model.trainer.global_step == len(data)  # skipped steps count, as in Lightning
    assert model.lr_schedulers().state_dict()["last_epoch"] == counts[-1]


def test_a_scheduler_of_epochs_moves_whatever_becomes_of_the_last_step() -> None:
    model = fit(Scheduled("epoch"), "bf16-mixed", spoilt(3, 2), max_epochs=4)
    counts, skips = map(list, zip(*model.seen, strict=True))
    assert skips == [False, False, True] * 4
    assert counts[2::3] == [1, 2, 3, 4]


def test_a_scheduler_of_every_second_step_rests_too() -> None:
    model = fit(Scheduled(frequency=2), "bf16-mixed", spoilt(8, 3))
    assert [count for count, _ in model.seen] == [0, 1, 1, 1, 1, 2, 2, 3]


def test_fabrics_step_says_whether_it_was_skipped() -> None:
    plugin = CastwisePrecision(LOUD)
    fabric, model = fabric_for(plugin), Net()
    module, optimizer = fabric.setup(model, model.configure_optimizers())
    skips = []
    for inputs, targets in batches(30):
        fabric.backward(functional.cross_entropy(module(inputs), targets))
        skips.append(optimizer.step().skipped)
        optimizer.zero_grad()
    assert skips == by_hand(Net(), LOUD, batches(30)).seen[0]
    assert plugin.last_step.skipped is False
    assert plugin.amp.skipped_steps == sum(skips)


# --- checkpoints ----------------------------------------------------------------------------------------------

MOVING = {
    plan: dataclasses.replace(Plan.preset(plan), loss_scale=LossScale(init=2.0**15, interval=3))
    if plan.startswith("fp16")
    else Plan.preset(plan)
    for plan in PLANS[:-1]
}
"""Plans whose loss scale changes."""


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("plan", MOVING)
def test_a_run_that_is_resumed_goes_on_as_if_nothing_had_been(plan: str, tmp_path: Path) -> None:
    whole, first, second = Scheduled(), Scheduled(), Scheduled()
    fit(whole, MOVING[plan], max_epochs=2)
    saves = {"enable_checkpointing": True}
    callback = ModelCheckpoint(tmp_path, save_last=True)
    fit(first, MOVING[plan], callbacks=[callback], **saves)
    path = callback.last_model_path
    state = torch.load(path, weights_only=True)
    fit(second, MOVING[plan], max_epochs=2, ckpt_path=path, callbacks=[ModelCheckpoint(tmp_path)], **saves)
    assert same(second, whole)
    assert second.seen == whole.seen[-len(second.seen) :]
    ours, theirs = (model.trainer.precision_plugin.state_dict() for model in (second, whole))
    assert ours == theirs
    assert (ours["scaler"] is not None) == plan.startswith("fp16")

    assert state["CastwisePrecision"]["plan"] == MOVING[plan].to_json()
    dtypes = {value.dtype for value in state["state_dict"].values()}
    assert dtypes == {torch.bfloat16 if plan == "bf16-true" else torch.float32}
    assert all(torch.equal(value, state["state_dict"][key]) for key, value in first.state_dict().items())


class Begins(Net):
    """A model that records the initial loss scale in ``seen``."""

    def on_train_start(self) -> None:
        self.seen.append(self.trainer.precision_plugin.amp.get_scale())


def test_a_checkpoint_goes_on_under_another_plan(tmp_path: Path) -> None:
    """The checkpoint may be saved after training has ended, or with the weights only."""
    model = fit(Net(), MOVING["fp16-master"], max_epochs=1)
    trainer = model.trainer
    trainer.save_checkpoint(tmp_path / "all.ckpt")
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    for name in ("all", "weights"):
        loaded = Net(2)
        loaded.load_state_dict(torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["state_dict"])
        assert same(loaded, model)
    other = fit(Begins(2), "fp16-mixed", max_epochs=2, ckpt_path=tmp_path / "all.ckpt")
    scale = trainer.precision_plugin.state_dict()["scaler"]["scale"]
    assert other.seen == [scale]
    assert scale != LossScale().init
    plain = trainer_for(max_epochs=2)
    plain.fit(Net(2), loader(batches()), ckpt_path=tmp_path / "all.ckpt")
    assert plain.global_step == 12


def test_weights_are_saved_whole_in_the_middle_of_training(tmp_path: Path) -> None:
    class Saves(Net):
        def on_train_batch_end(self, *_: Any) -> None:
            assert {parameter.dtype for parameter in self.parameters()} == {torch.bfloat16}
            self.trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
            self.seen.append(self.state_dict())
            for callback in self.trainer.callbacks:
                if isinstance(callback, EMAWeightAveraging):
                    self.seen.append(callback._average_model.module.state_dict())

    averages = EMAWeightAveraging()
    with pytest.warns(UserWarning, match=r"rounded to bf16, .* Average with castwise.AveragedModel\(model\)"):
        model = fit(Saves(), "bf16-master", callbacks=[averages])
    kinds = {value.dtype for state in model.seen for value in state.values()}
    assert torch.float32 in kinds
    saved = torch.load(tmp_path / "weights.ckpt", weights_only=True)["state_dict"]
    assert {value.dtype for value in saved.values()} == {torch.float32}
    assert any(not torch.equal(value, value.bfloat16().float()) for value in saved.values())


def test_the_scale_of_lightnings_own_precision_is_taken_over(tmp_path: Path) -> None:
    trainer = trainer_for()
    trainer.fit(Net(), loader(batches()))
    trainer.save_checkpoint(tmp_path / "theirs.ckpt")
    state = torch.load(tmp_path / "theirs.ckpt", weights_only=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    torch.save({**state, "MixedPrecision": scaler.state_dict()}, tmp_path / "theirs.ckpt")
    model = fit(Begins(), "fp16-mixed", max_epochs=2, ckpt_path=tmp_path / "theirs.ckpt")
    assert model.seen == [8.0]


@pytest.mark.parametrize("plan", MOVING)
def test_fabric_saves_and_goes_on(plan: str, tmp_path: Path) -> None:
    def train(count: int, start: int = 0, path: Path | None = None) -> Net:
        plugin, model = CastwisePrecision(MOVING[plan]), Net(start)
        fabric = fabric_for(plugin)
        module, optimizer = fabric.setup(model, model.configure_optimizers())
        state = {"model": module, "optimizer": optimizer, "precision": plugin}
        if path is not None:
            fabric.load(path, state)
        for inputs, targets in batches(8)[start : start + count]:
            fabric.backward(functional.cross_entropy(module(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        fabric.save(tmp_path / "fabric.ckpt", state)
        plugin.teardown()
        model.seen.append(plugin.state_dict())
        return model

    whole = train(8)
    train(5)
    rest = train(3, start=5, path=tmp_path / "fabric.ckpt")
    assert same(rest, whole)
    assert rest.seen == whole.seen


# --- values in hooks and steps --------------------------------------------------------------------------------


class Looks(Callback):
    """A callback that records the loss before backward, and the largest gradient before the step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.largest: list[float] = []

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.losses.append(loss.item())

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        grads = [parameter.grad for parameter in pl_module.parameters()]
        self.largest.append(max(grad.abs().max().item() for grad in grads))


@pytest.mark.parametrize("plan", FEW)
def test_callbacks_see_true_losses_and_gradients(plan: str) -> None:
    plain, ours = Looks(), Looks()
    fit(Net(), "fp32", callbacks=[plain])
    fit(Net(), plan, callbacks=[ours])
    assert len(ours.losses) == len(ours.largest) == 6
    torch.testing.assert_close(ours.losses, plain.losses, rtol=0.02, atol=0.02)
    torch.testing.assert_close(ours.largest, plain.largest, rtol=0.2, atol=0.02)


@pytest.mark.parametrize("plan", [*FEW, "bf16-mixed", "bf16-true"])
def test_steps_of_every_kind_run_by_the_plan(plan: str) -> None:
    class Steps(Net):
        def look(self, batch: Any, batch_idx: int) -> Tensor:
            hidden = self.net[0](batch[0])
            out = self(batch[0])
            self.seen.append((hidden.dtype, out.dtype))
            return out

        validation_step = test_step = predict_step = look

        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            return {
                "loss": functional.cross_entropy(self.look(batch, batch_idx), batch[1]),
                "more": batch_idx,
            }

    low = Plan.preset(plan).compute_dtype
    for run in ("fit", "validate", "test", "predict"):
        model = Steps()
        trainer = trainer_for(CastwisePrecision(plan))
        found = getattr(trainer, run)(model, loader(batches(2)))
        assert {*model.seen} == {(low, torch.float32)}
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        if run != "fit":
            assert same(model, Steps()) == (plan != "bf16-true")
        if run == "predict":
            assert {out.dtype for out in found} == {torch.float32}
        assert model.net[0](torch.ones(1, 16)).dtype is torch.float32
        assert not vars(model).keys() & {"training_step", "validation_step", "test_step", "predict_step"}


def test_one_trainer_fits_and_tests_again_and_again() -> None:
    trainer = trainer_for(CastwisePrecision("bf16-master"), max_epochs=1)
    model = Net()
    model.test_step = lambda batch, batch_idx: model.seen.append(model.net[0](batch[0]).dtype)
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(model, loader(batches()))
        trainer.test(model, loader(batches(1)))
    assert {*model.seen} == {torch.bfloat16}  # also in a test_step set on the instance
    assert not same(model, by_hand(Net(), "bf16-master"))


@pytest.mark.parametrize("plan", ["bf16-mixed", *FEW])
def test_a_backward_of_the_modules_own_is_called(plan: str) -> None:
    class Own(Net):
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            self.seen.append(loss.item())
            loss.backward(*args, **kwargs)

    model = fit(Own(), plan)
    assert len(model.seen) == 6
    assert (max(model.seen) > 100) == (plan in ("fp16-mixed", "fp16-master"))
    assert same(model, by_hand(Net(), plan))


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")  # emitted once per process
@pytest.mark.parametrize("plan", ["bf16-mixed", *FEW])
def test_a_batch_without_a_loss_is_passed_over(plan: str) -> None:
    class Some(Net):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
            return None if batch_idx == 2 else self.loss(batch)

    data = batches()
    model = fit(Some(), plan, data)
    assert same(model, by_hand(Net(), plan, data[:2] + data[3:]))


def test_an_average_of_the_weights_is_kept_beside_a_model_that_trains() -> None:
    """Lightning's callback deep copies the prepared module."""
    model = fit(Net(), "bf16-mixed", callbacks=[EMAWeightAveraging(decay=0.5)])
    assert not same(model, by_hand(Net(), "bf16-mixed"))
    torch.testing.assert_close(
        model.state_dict(), by_hand(Net(), "bf16-mixed").state_dict(), rtol=0.5, atol=0.1
    )


def test_lightnings_own_autocast_computes_the_same() -> None:
    ours, theirs = fit(Net(), "bf16-mixed"), Net()
    trainer_for(precision="bf16-mixed").fit(theirs, loader(batches()))
    assert same(ours, theirs)


class Copies(Callback):
    """A callback that pickles and copies Lightning's objects during training, and holds the Trainer."""

    def __init__(self) -> None:
        self.found: list[tuple[Any, Any]] = []
        self.trainer: Any = None

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.trainer = trainer
        if not self.found:
            assert b"castwise" not in pickle.dumps((module, trainer.optimizers, trainer.lr_scheduler_configs))
            things = [module, trainer.optimizers, trainer.strategy, trainer, self]
            self.found = [(pickle.loads(pickle.dumps(thing)), copy.deepcopy(thing)) for thing in things]


@pytest.mark.parametrize("plan", ["bf16-mixed", "fp16-mixed", "bf16-master", IN_PARTS])
def test_copies_and_pickles_of_what_lightning_holds_have_the_plan_and_no_session(plan: Any) -> None:
    callback = Copies()
    model = fit(Net(), plan, None, callbacks=[callback])
    assert same(model, by_hand(Net(), plan))
    for again in callback.found[3]:
        plugin = again.precision_plugin
        assert (type(plugin), plugin.plan, plugin._amp) == (CastwisePrecision, Plan.parse(plan), None)
    for again in callback.found[0]:
        assert castwise.Amp.of(again) is None
        assert {p.dtype for p in callback.found[0][0].parameters()} == {torch.float32}
    assert copy.deepcopy(callback.trainer).precision_plugin.plan == Plan.parse(plan)  # a copy after training


def test_a_plug_in_goes_to_processes_that_are_started_later() -> None:
    plugin = pickle.loads(pickle.dumps(CastwisePrecision(IN_PARTS)))
    model = Net()
    trainer_for(plugin).fit(model, loader(batches()))
    assert same(model, by_hand(Net(), IN_PARTS))
    assert repr(plugin) == f"CastwisePrecision({IN_PARTS!r})"


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")  # the only step overflows
@pytest.mark.parametrize(
    ("plan", "kind"), pairs([*PLANS, "bf16-mixed+ops.gelu=fp32"], [BoringModel, ManualOptimBoringModel])
)
def test_lightnings_own_examples_run(kind: Any, plan: str) -> None:
    model = kind()
    for run in ("fit", "validate", "test", "predict"):
        if run == "fit" or kind is BoringModel:
            getattr(trainer_for(CastwisePrecision(plan), fast_dev_run=True), run)(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@each_value()
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("plan", FEW)
def test_training_that_fails_leaves_the_module_as_it_was(plan: str, error: type[BaseException]) -> None:
    class Fails(Net):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            if batch_idx == 2:
                raise error("mine")
            return self.loss(batch)

    model = Fails()
    with pytest.raises((ValueError, SystemExit)):  # Lightning exits on KeyboardInterrupt
        fit(model, plan)
    assert Amp.of(model) is None
    assert same(model, by_hand(Net(), plan, batches()[:2]))
    assert same(fit(Net(), plan), by_hand(Net(), plan))


def test_what_is_computed_again_in_backward_runs_by_the_plan() -> None:
    class Again(Net):
        def forward(self, inputs: Tensor) -> Tensor:
            return checkpoint(self.net, inputs, use_reentrant=False)

    assert same(fit(Again(), IN_PARTS), by_hand(Net(), IN_PARTS))


def test_an_optimizer_of_nothing_in_the_model_steps_as_it_would() -> None:
    class Apart(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.other = nn.Parameter(torch.ones(()))

        def training_step(self, batch: Batch) -> None:
            net, other = self.optimizers()
            for optimizer, loss in ((net, self.loss(batch)), (other, self.other.square())):
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(p, lr=0.25) for p in (self.net.parameters(), [self.other])]

    model = fit(Apart(), "bf16-mixed", model="net")
    assert model.other.item() == 0.5**6
    for plan in ("fp16-mixed", "fp16-master"):
        model = Apart()
        with pytest.raises(
            StateError, match=r"SGD\.step\(\): .*has not prepared.*gradients still contain the loss scale"
        ):
            fit(model, plan, model="net")
        assert model.other.item() == 1.0


@pytest.mark.parametrize("plan", FEW)
def test_an_optimizer_made_in_the_middle_of_a_fit_steps_on_no_scaled_gradients(plan: str) -> None:
    class Anew(Net):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.kept = {name: value.clone() for name, value in self.state_dict().items()}
                self.trainer.optimizers = [self.configure_optimizers()]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    model = Anew()
    with pytest.raises(StateError, match=r"SGD\.step\(\): "):
        fit(model, plan, max_epochs=2)
    assert all(torch.equal(value, model.kept[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("plan", [f"{name}+regions.net.3=fp32" for name in ("bf16-mixed", *FEW)])
def test_a_region_is_differentiated_in_its_format_in_manual_optimization(plan: str) -> None:
    class Manual(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Batch) -> None:  # type: ignore[override]
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    assert same(fit(Manual(), plan), by_hand(Net(), plan))


@pytest.mark.parametrize("plan", FEW)
def test_a_toggled_optimizer_alone_gets_gradients(plan: str) -> None:
    class Toggles(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net[place].parameters(), lr=0.1) for place in (0, 3)]

        def training_step(self, batch: Batch) -> None:  # type: ignore[override]
            for optimizer, other in ((self.optimizers()[0], 3), (self.optimizers()[1], 0)):
                self.toggle_optimizer(optimizer)
                assert not self.net[other].weight.requires_grad
                self.manual_backward(self.loss(batch))
                assert self.net[other].weight.grad is None
                optimizer.step()
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)
                assert self.net[other].weight.requires_grad

    fit(Toggles(), plan)


def test_every_average_of_rounded_weights_is_said() -> None:
    callback = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
    with pytest.warns(
        UserWarning, match="Lightning's StochasticWeightAveraging averages weights that are rounded to bf16"
    ):
        fit(Net(), "bf16-master", max_epochs=2, callbacks=[callback])


def test_evaluation_by_fabric_needs_no_optimizer() -> None:
    for plan in PLANS:
        fabric = fabric_for(CastwisePrecision(plan))
        model = Net()
        module = fabric.setup_module(model)
        with torch.no_grad(), fabric.autocast():
            out = module(batches(1)[0][0])
            low = Plan.preset(plan)
            if low.autocasts:
                assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is low.compute_dtype
        assert out.dtype is torch.float32
        assert (model.net[0].weight.dtype is torch.float32) == (low.params == "fp32")


@pytest.mark.parametrize("plan", PLANS)
def test_fabric_takes_the_optimizer_after_the_module(plan: str) -> None:
    model, plugin = Net(), CastwisePrecision(plan)
    fabric = fabric_for(plugin)
    module = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(model.configure_optimizers())
    for inputs, targets in batches():
        fabric.backward(functional.cross_entropy(module(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    plugin.teardown()
    assert same(model, by_hand(Net(), plan))


@pytest.mark.parametrize("plan", ["bf16-mixed", *FEW])
def test_fabric_runs_the_steps_of_a_lightning_module(plan: str) -> None:
    model, plugin = Net(), CastwisePrecision(plan)
    fabric = fabric_for(plugin)
    module, optimizer = fabric.setup(model, model.configure_optimizers())
    for batch in batches():
        loss = module.training_step(batch)
        fabric.backward(loss * torch.ones(2) / 2, torch.ones(2))  # a loss that is not a scalar
        optimizer.step()
        optimizer.zero_grad()
    plugin.teardown()
    torch.testing.assert_close(model.state_dict(), by_hand(Net(), plan).state_dict(), rtol=1e-3, atol=1e-3)


def test_two_networks_in_fabric_have_one_session() -> None:
    plugin = CastwisePrecision("fp16-mixed")
    fabric = fabric_for(plugin)
    pairs = [fabric.setup(model, model.configure_optimizers()) for model in (Net(1), Net(2))]
    for batch in batches(2):
        for module, optimizer in pairs:
            fabric.backward(module.loss(batch))
            optimizer.step()
            optimizer.zero_grad()
    assert all(Amp.of(module.module) is plugin.amp for module, _ in pairs)


@pytest.mark.parametrize(
    ("plan", "path", "dtype"),
    [
        ("bf16-true", None, torch.bfloat16),
        ("bf16-true", "net", torch.float32),
        ("bf16-master", None, torch.float32),  # its operators cast their inputs
    ],
)
def test_only_a_whole_module_takes_its_batch_low(plan: str, path: str | None, dtype: torch.dtype) -> None:
    class Regression(Net):
        def training_step(self, batch: Batch) -> Tensor:
            out = self(batch[0])
            self.seen.append((batch[1].dtype, out.dtype))
            return functional.mse_loss(
                out, batch[1].to(out.dtype)
            )  # torch 2.11 has no backward for mixed dtypes

    data = [(inputs, inputs[:, :4]) for inputs, _ in batches()]
    model = fit(Regression(), plan, data, model=path)
    assert {*model.seen} == {(dtype, torch.float32)}


def test_a_plan_that_compiles_compiles_a_submodule(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any, **_: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    with monkeypatch.context() as inductor:  # torch 2.11 has no torch.compiler.set_default_backend
        inductor.setattr(importlib.import_module("torch._inductor.compile_fx"), "compile_fx", backend)
        model = fit(Net(), "bf16-mixed+compile=default", batches(2), model="net")
    assert compiled
    assert same(model, fit(Net(), "bf16-mixed", batches(2), model="net"))


@every(2)
@pytest.mark.parametrize("plan", ["bf16-mixed", "fp16-master+regions.type:Conv2d=fp32"])
def test_the_example_learns_to_read(
    plan: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Path(__file__).parents[3] / "examples" / "lightning_digits.py"
    words = ["--plan", plan, "--max-epochs", "3", "--accelerator", "cpu"]
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr().out.splitlines()[-1]
    accuracy, skipped = re.fullmatch(
        rf"accuracy (.*) under {re.escape(plan)}; (\d+) steps skipped", said
    ).groups()
    assert float(accuracy) > 0.9
    assert int(skipped) < 10


# --- settings that are refused --------------------------------------------------------------------------------


def refuses(error: type[Exception], said: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [Trainer, Fabric])
def test_two_precision_settings_are_refused(kind: Any) -> None:
    make = {"accelerator": "cpu", "plugins": [CastwisePrecision("bf16-master")]}
    refuses(
        ValueError,
        r"both `precision=bf16-mixed` and `plugins=CastwisePrecision\('bf16-master'\)`",
        lambda: kind(precision="bf16-mixed", **make),
    )


@pytest.mark.parametrize(("home", "argument"), [("fabric", "precision"), ("pytorch", "precision_plugin")])
def test_a_strategy_that_takes_no_plug_in_says_what_to_use(home: str, argument: str) -> None:
    kind = importlib.import_module(f"lightning.{home}.strategies").FSDPStrategy
    plugin = CastwisePrecision("fp16-mixed")
    said = r"^CastwisePrecision\('fp16-mixed'\): FSDPStrategy accepts only .* strategy=ModelParallelStrategy\(\.\.\.\), and"
    refuses(StrategyError, said, lambda: kind(**{argument: plugin}))
    refuses(
        StrategyError, said, lambda: setattr(kind(), argument, plugin)
    )  # a Trainer on a GPU sets it like this
    assert issubclass(StrategyError, TypeError)
    with pytest.raises(TypeError, match="can only work with"):
        kind(**{argument: lightning.pytorch.plugins.MixedPrecision("bf16-mixed", "cpu")})


def test_autocast_around_and_a_scaler_inside_are_refused() -> None:
    model = Net()
    with torch.autocast("cpu", torch.bfloat16):
        refuses(StateError, "Net is set up inside torch.autocast", lambda: fit(model, "bf16-mixed"))
        plugin = CastwisePrecision("bf16-mixed")
        refuses(StateError, "inside torch.autocast", lambda: fabric_for(plugin).setup_module(Net()))
    model.grad_scaler = torch.amp.GradScaler("cpu")
    refuses(StateError, r"Net.grad_scaler is a GradScaler: two loss", lambda: fit(model, "fp16-mixed"))
    model.grad_scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert same(fit(model, "fp16-mixed"), by_hand(Net(), "fp16-mixed"))  # the model is unchanged


@each_value()
@pytest.mark.parametrize(
    ("plan", "dtype", "refused"),
    [
        ("bf16-mixed", torch.float16, True),
        ("fp32", torch.bfloat16, True),
        ("bf16-mixed", torch.bfloat16, False),
        ("bf16-mixed", None, False),
    ],
)
@pytest.mark.parametrize("path", [None, "net"])
def test_autocast_inside_is_refused_where_it_differs(
    plan: str, dtype: torch.dtype | None, refused: bool, path: str | None
) -> None:
    class Autocasts(Net):
        def training_step(self, batch: Batch) -> Tensor:
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                return self.loss(batch)

    before = Autocasts()

    def call() -> Any:
        return fit(before, plan, model=path)

    def by_fabric() -> Any:
        module = fabric_for(CastwisePrecision(plan, model=path)).setup_module(Net())
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            return module(batches(1)[0][0])

    if refused:
        refuses(StateError, rf"dtype={dtype}\) under the plan {plan}: two", call)
        assert same(before, Net())
        refuses(StateError, rf"Fabric has set up is called in .*dtype={dtype}\) under", by_fabric)
    else:
        call()
        assert by_fabric().dtype is torch.float32


@pytest.mark.parametrize("plan", ["bf16-mixed", "fp16-mixed"])
def test_a_scaler_of_ones_own_beside_fabrics_is_refused(plan: str) -> None:
    """Otherwise updates would be too large by that scaler's scale."""
    plugin, model = CastwisePrecision(plan), Net()
    fabric = fabric_for(plugin)
    module, _ = fabric.setup(model, model.configure_optimizers())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    loss = scaler.scale(module.loss(batches()[0]))
    with pytest.raises(StateError, match="backward: this loss has been scaled already"):
        fabric.backward(loss)
    plugin.teardown()


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"plan": "bf17"}, PlanError, "bf17"),
        ({"model": ""}, PlanError, r"model=''\) is not allowed. Allowed: the path of a submodule"),
        ({"model": ()}, PlanError, r"model=\(\)\) is not allowed"),
        ({"model": 3}, PlanError, r"model=3\) is not allowed"),
        (
            {"model": "body"},
            PlanError,
            "Net has no submodule of that path. Allowed: 'net', and their submodules",
        ),
        ({"methods": ("encode",)}, StateError, "Net has no method of that name"),
        ({"nonfinite": "stop"}, PlanError, "nonfinite='stop'"),
        ({"plan": "bf16-mixed+compile=default"}, StateError, "Name the submodule to compile: .*model='net'"),
        ({"plan": "bf16-mixed+regions.1=fp32"}, PlanError, "no module of Net matches"),
    ],
    ids=str,
)
def test_arguments_that_mean_nothing_are_refused(
    options: dict[str, Any], error: type[Exception], said: str
) -> None:
    plugin = {"plan": "bf16-mixed", **options}
    refuses(error, said, lambda: trainer_for(CastwisePrecision(**plugin)).fit(Net(), loader(batches())))


def test_a_module_that_was_compiled_whole_is_refused() -> None:
    model = torch.compile(Net(), backend="eager")
    refuses(
        StateError,
        "Net is compiled already with its training step",
        lambda: trainer_for(CastwisePrecision("bf16-mixed")).fit(model, loader(batches())),
    )


def test_options_of_a_step_are_refused() -> None:
    class Options(Adversaries):
        def training_step(self, batch: Batch) -> None:
            optimizer, _ = self.optimizers()
            optimizer.step(epoch=1)

    refuses(StateError, r"SGD.step\(epoch\): under a plan", lambda: fit(Options(), "bf16-mixed"))


@pytest.mark.parametrize(("release", "warns"), [("2.5.1", True), ("2.7.0", True), ("2.6.9", False)])
def test_another_release_of_lightning_is_said(
    release: str, warns: bool, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(lightning, "__version__", release)
    CastwisePrecision("fp32")
    assert [str(warning.message) for warning in recwarn] == [
        f"CastwisePrecision was tested with Lightning 2.6, but {release} is installed, whose precision hooks may differ; if "
        "something fails, install 'lightning==2.6.*'."
    ] * warns
    assert all(warning.filename == __file__ for warning in recwarn)


def test_without_lightning_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning", None)
    with pytest.raises(ModuleNotFoundError, match=r"is not installed: pip install 'castwise\[lightning\]'"):
        runpy.run_path(castwise.bridges.trainers.lightning.__file__)


def test_other_plug_ins_are_left_alone() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    model = Net()
    module, optimizer = fabric.setup(model, model.configure_optimizers())
    assert Amp.of(model) is None
    fabric.backward(module(batches(1)[0][0]).sum())
    assert optimizer.step() is None
    assert fabric.setup_optimizers(model.configure_optimizers()).step() is None


# --- several processes ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two() -> Iterator[World]:
    """Yield two processes that communicate over gloo."""
    if not torch.distributed.is_available():
        pytest.skip("this torch is built without torch.distributed")
    world = World(2)
    yield world
    world.close()


class Sharded(Scheduled):
    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        self.trainer.precision_plugin.fully_shard(self.net, mesh=mesh, blocks=[self.net[0], self.net[3]])


def shares(rank: int, data: list[Batch]) -> list[Batch]:
    return [(inputs[rank::2], targets[rank::2]) for inputs, targets in data]


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    return {
        k: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach().clone() for k, v in state.items()
    }


def alike(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


def as_started_by_torchrun(rank: int) -> None:
    here = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    fixed = {"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    os.environ.update({name: str(value) for name, value in {**here, **fixed}.items()})


def trained(rank: int, layout: str, plan: Any, data: list[Batch], **options: Any) -> Any:
    """Train a model with a Trainer on two ranks and return it."""
    as_started_by_torchrun(rank)
    from lightning.pytorch.strategies import ModelParallelStrategy

    strategy: Any = "ddp"
    if layout == "fsdp":
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    model = Sharded() if layout == "fsdp" else Scheduled()
    settings = {"devices": 2, "strategy": strategy, "use_distributed_sampler": False}
    return fit(model, plan, shares(rank, data), **settings, **options)


def hand_on_two(rank: int, layout: str, plan: Any, data: list[Batch], clip: float | None) -> Any:
    """Train the same way in a plain loop."""
    from torch.distributed.device_mesh import init_device_mesh

    model = Scheduled()
    with Amp(plan) as amp:
        if layout == "fsdp":
            blocks = [model.net[0], model.net[3]]
            amp.fully_shard(model.net, mesh=init_device_mesh("cpu", (2,)), blocks=blocks, part=True)
        chosen = model.configure_optimizers()
        optimizer, scheduler = chosen["optimizer"], chosen["lr_scheduler"]["scheduler"]
        amp.prepare(model, optimizer)
        run = model if layout == "fsdp" else nn.parallel.DistributedDataParallel(model)
        for inputs, targets in shares(rank, data):
            amp.backward(functional.cross_entropy(run(inputs), targets))
            if clip is not None:
                amp.clip_grad_norm_(optimizer, clip)
            skipped = amp.step(optimizer).skipped
            optimizer.zero_grad()
            if not skipped:
                scheduler.step()
            model.seen.append((scheduler.last_epoch, skipped))
    return model


def trains_as_by_hand(rank: int, size: int, layout: str, plan: Any, clip: float | None) -> list[Any]:
    data = spoilt(8, 2)
    data[2][0][1::2] = 1.0  # NaN on one rank only
    ours = trained(rank, layout, plan, data, gradient_clip_val=clip)
    want = hand_on_two(rank, layout, plan, data, clip)
    assert alike(whole_weights(ours), whole_weights(want))
    assert not alike(whole_weights(ours), whole_weights(Net()))
    assert ours.seen == want.seen
    return ours.seen


@every(3)
@pytest.mark.parametrize(
    ("layout", "plan", "clip"),
    [
        (layout, *how)
        for how, layout in pairs(
            [(IN_PARTS, None), ("fp16-mixed", 0.05), ("bf16-master", 0.05), ("fp16-master", None)],
            ["ddp", "fsdp"],
        )
    ],
)
def test_two_processes_train_as_in_a_plain_loop(
    two: World, layout: str, plan: str, clip: float | None
) -> None:
    """NaN on one rank makes both ranks skip the step, and neither scheduler advances."""
    first, second = two.run(trains_as_by_hand, layout, plan, clip)
    assert first == second
    assert first[2][1]


def goes_on(rank: int, size: int, layout: str, plan: Any, folder: str) -> None:
    data = batches(4)
    whole = trained(rank, layout, plan, data, max_epochs=2)
    saves = ModelCheckpoint(folder, save_last=True)
    trained(rank, layout, plan, data, enable_checkpointing=True, callbacks=[saves])
    again = trained(
        rank, layout, plan, data, max_epochs=2, ckpt_path=saves.last_model_path, enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder)],
    )  # fmt: skip
    assert alike(whole_weights(again), whole_weights(whole))
    assert again.seen == whole.seen[-4:]
    assert False in [skipped for _, skipped in whole.seen[:4]]
    ours, theirs = (model.trainer.precision_plugin.state_dict() for model in (again, whole))
    assert ours == theirs


@every(2)
@pytest.mark.parametrize(("layout", "plan"), pairs(["fsdp", "ddp"], ["fp16-master", "bf16-master"]))
def test_two_processes_resume(two: World, layout: str, plan: str, tmp_path: Path) -> None:
    two.run(goes_on, layout, MOVING[plan], str(tmp_path))


def by_fabric_on_two(rank: int, size: int, layout: str, plan: str) -> None:
    as_started_by_torchrun(rank)
    from lightning.fabric.strategies import ModelParallelStrategy

    plugin = CastwisePrecision(plan)

    def shard(model: Any, mesh: Any) -> Any:
        blocks = [model.net[0], model.net[3]]
        plugin.fully_shard(model.net, mesh=mesh["data_parallel"], blocks=blocks)
        return model

    strategy: Any = "ddp"
    if layout == "fsdp":
        strategy = ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[plugin])
    fabric.launch()
    model, data = Scheduled(), batches(5)
    if layout == "fsdp":
        module = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(model.configure_optimizers()["optimizer"])
    else:
        module, optimizer = fabric.setup(model, model.configure_optimizers()["optimizer"])
        if plugin.plan.stores_low:
            refuses(StateError, r"Call fabric.setup\(model, optimizer\)", lambda: fabric.setup_module(Net()))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.5)
    for inputs, targets in shares(rank, data):
        fabric.backward(functional.cross_entropy(module(inputs), targets))
        norm = fabric.clip_gradients(module, optimizer, max_norm=1e6, error_if_nonfinite=False)
        assert norm is not None
        if not optimizer.step().skipped:
            schedule.step()
        optimizer.zero_grad()
    plugin.teardown()
    want = hand_on_two(rank, layout, plan, data, clip=None)
    assert alike(whole_weights(model), whole_weights(want))


@each_value()
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("plan", ["fp16-mixed", "bf16-master"])
def test_two_processes_of_fabric_train_as_in_a_plain_loop(two: World, layout: str, plan: str) -> None:
    two.run(by_fabric_on_two, layout, plan)
