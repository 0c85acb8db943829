"""A plan in Lightning's Trainer and Fabric trains what the same plan trains in a plain loop, to the last bit."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from castwise import Amp, LossScale, Plan
from castwise.errors import PlanError, StateError

pytest.importorskip("lightning", reason="needs castwise[lightning]")

import lightning
from lightning import Fabric, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint

from castwise.integrations.lightning import CastwisePrecision, StrategyError

pytestmark = [
    # Lightning's own: of workers that it would have, and of a name that torch has renamed
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec"),
]

PLANS = ["fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "fp16-master", "bf16-true", "O2"]
IN_PARTS = "bf16-mixed+regions.net.3=fp32+regions.type:LayerNorm=fp32+ops.gelu=fp32"
FEW = ["fp16-mixed", "bf16-master", "fp16-master"]
"""With a loss scale, with masters, with both."""
Batch = tuple[Tensor, Tensor]


class Net(LightningModule):
    """A small classifier; ``seen`` is what its hooks saw."""

    def __init__(self, seed: int = 1, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
        self.options = {"lr": 0.01, **options}
        self.seen: list[Any] = []

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

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
    """The model trained by a Trainer under a plan."""
    ours = {name: options.pop(name) for name in ("model", "methods", "nonfinite") if name in options}
    path = options.pop("ckpt_path", None)
    trainer_for(CastwisePrecision(plan, **ours), **options).fit(
        model, loader(batches() if data is None else data), ckpt_path=path
    )
    return model


def by_hand(model: Any, plan: Any, data: list[Any] | None = None, clip: Any = None, every: int = 1) -> Any:
    """The model trained in a plain loop under a plan, and what became of each step."""
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
    """The model trained by Fabric under a plan."""
    plugin = CastwisePrecision(plan)
    fabric = fabric_for(plugin)
    module, optimizer = fabric.setup(model, model.configure_optimizers())
    for number, (inputs, targets) in enumerate(batches(), start=1):
        with fabric.no_backward_sync(module, enabled=number % every != 0):
            fabric.backward(F.cross_entropy(module(inputs), targets) / every)
        if number % every == 0:
            if clip is not None:
                fabric.clip_gradients(module, optimizer, **clip)
            optimizer.step()
            optimizer.zero_grad()
    plugin.teardown()
    return model


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(k == l and a.dtype is b.dtype and torch.equal(a, b) for (k, a), (l, b) in pairs)


# --- the same digits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [*PLANS, IN_PARTS])
def test_trains_as_in_a_plain_loop(plan: str) -> None:
    want = by_hand(Net(), plan)
    assert same(want, by_hand(Net(), "fp32")) == (plan == "fp32")
    assert same(fit(Net(), plan), want)
    assert same(by_fabric(Net(), plan), want)


@pytest.mark.parametrize("plan", PLANS)
def test_a_submodule_alone_trains_as_in_a_plain_loop(plan: str) -> None:
    """Under Fabric too; the plan's regions are those of the submodule."""
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
    assert {*model.seen} == {torch.float32}  # between two models that are prepared


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

    # SGD, since Adam takes the size of gradients out again
    class Model(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.5)

    options: dict[str, Any] = {"accumulate_grad_batches": 2}
    if clip:
        kind = "norm" if "max_norm" in clip else "value"
        options |= {"gradient_clip_val": [*clip.values()][0], "gradient_clip_algorithm": kind}
    want = by_hand(Model(), plan, clip=clip_by_hand, every=2)
    assert same(want, by_hand(Model(), plan, every=2)) == (clip is None)
    assert same(fit(Model(), plan, **options), want)
    torch.testing.assert_close(by_fabric(Model(), plan, clip, every=2).state_dict(), want.state_dict())


@pytest.mark.parametrize("plan", FEW)
def test_an_optimizer_that_unscales_by_itself_may_be_clipped(plan: str) -> None:
    """Lightning's own fp16 refuses to clip before a fused optimizer's step."""

    def clip(amp: Amp, optimizer: Any) -> None:
        amp.clip_grad_norm_(optimizer, 0.05)

    want = by_hand(Net(fused=True), plan, clip=clip)
    assert same(fit(Net(fused=True), plan, gradient_clip_val=0.05), want)


@pytest.mark.parametrize("plan", ["bf16-mixed", *FEW])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_an_optimizer_that_evaluates_the_loss_itself(plan: str, clip: float | None) -> None:
    """Lightning's own fp16 refuses LBFGS."""

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
            loss = F.cross_entropy(module(inputs), targets)
            fabrics.zero_grad()
            fabric.backward(loss)
            if clip:
                fabric.clip_gradients(module, fabrics, max_norm=clip)
            return loss

        assert isinstance(fabrics.step(fabric_closure), Tensor)
    plugin.teardown()
    torch.testing.assert_close(model.state_dict(), want.state_dict(), rtol=1e-4, atol=1e-5)


class Adversaries(LightningModule):
    """Two networks with an optimizer each, in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.critic = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def generator_loss(self, inputs: Tensor) -> Tensor:
        return F.softplus(-self.critic(self.generator(inputs))).mean()

    def critic_loss(self, inputs: Tensor) -> Tensor:
        made = self.generator(inputs).detach()
        return F.softplus(self.critic(made)).mean() + F.softplus(-self.critic(inputs)).mean()

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
    """In Lightning's own fp16 gradients that are clipped by hand still hold the loss scale."""
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
"""Overflows at first: no step is made until the scale has come down."""


class Scheduled(Net):
    """With a learning rate that halves; ``seen`` has it after each batch."""

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
    """Batches, some of which hold NaN."""
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
    assert model.trainer.global_step == len(
        data
    )  # as under Lightning's own: a step that is skipped is counted
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
        fabric.backward(F.cross_entropy(module(inputs), targets))
        skips.append(optimizer.step().skipped)
        optimizer.zero_grad()
    assert skips == by_hand(Net(), LOUD, batches(30)).seen[0]
    assert plugin.last_step.skipped is False
    assert plugin.amp.skipped_steps == sum(skips)


# --- checkpoints ----------------------------------------------------------------------------------------------

MOVING = {
    plan: dataclasses.replace(Plan.preset(plan), loss_scale=LossScale(init=2.0**20, interval=3))
    if plan.startswith("fp16")
    else Plan.preset(plan)
    for plan in PLANS[:-1]
}
"""Plans whose loss scale does not stay where it is."""


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
    """``seen`` is the loss scale that training begins with."""

    def on_train_start(self) -> None:
        self.seen.append(self.trainer.precision_plugin.amp.get_scale())


def test_a_checkpoint_goes_on_under_another_plan(tmp_path: Path) -> None:
    """Also one that was saved when training had ended, or without what training needs."""
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
            fabric.backward(F.cross_entropy(module(inputs), targets))
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
