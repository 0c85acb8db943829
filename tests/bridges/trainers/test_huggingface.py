"""Plans in Accelerate and in the Trainer of transformers, compared with the same plans in a loop by hand."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import os
import pickle
import re
import runpy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import soak

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import AutocastKwargs, GradScalerKwargs
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import castwise
from castwise.bridges.trainers.huggingface import (
    CastwiseAccelerator,
    CastwiseMixin,
    CastwiseTrainer,
    versions,
)
from castwise.errors import CheckpointError, PlanError, StateError
from tests.processes import of_one, run_ranks
from tests.soak import each_value, every

PLANS = ["fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "fp16-master", "bf16-true"]
SCALED = [name for name in PLANS if "fp16" in name]


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset Accelerate's process-wide state and warning filters after each test."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with warnings.catch_warnings():
        yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


def gpt(seed: int = 0, dropout: float = 0.0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, loss_type="ForCausalLM",
        )
    )  # fmt: skip


def texts(number: int = 64) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 64, (number, 16), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    known = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 4, "learning_rate": 1e-2,
        "warmup_steps": 2, "max_grad_norm": 0.5, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "use_cpu": True, "disable_tqdm": True, "optim": "adamw_torch", "dataloader_pin_memory": False,
        "output_dir": str(folder),
    }  # fmt: skip
    return TrainingArguments(**{**known, **changes})


def trainer(folder: Path, plan: Any, kind: Any = CastwiseTrainer, model: Any = None, **changes: Any) -> Any:
    model = gpt() if model is None else model
    return kind(model=model, args=arguments(folder, **changes), train_dataset=texts(), plan=plan)


def logged(run: Any, name: str) -> list[Any]:
    return [entry[name] for entry in run.state.log_history if name in entry]


def weights(run: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.accelerator.amp.model_state_dict(run.model).items()}


def equal(one: Any, other: Any) -> None:
    """Assert that two trees of tensors are bitwise equal."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        one, other = list(one.values()), [other[name] for name in one]
    if isinstance(one, (list, tuple)):
        for mine, yours in zip(one, other, strict=True):
            equal(mine, yours)
    else:
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


# --- the Trainer ----------------------------------------------------------------------------------------------


def by_hand(folder: Path, plan: str) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """Train like the Trainer, in a loop by hand: same data, parameter groups, schedule and division of the loss."""
    model = gpt()
    maker = Trainer(model=model, args=arguments(folder), train_dataset=texts())
    optimizer = maker.create_optimizer()
    amp = castwise.Amp(plan, device="cpu")
    amp.prepare(model, optimizer)
    scheduler = maker.create_scheduler(4, optimizer)
    batches = iter(maker.get_train_dataloader())
    model.train()
    norms, losses = [], []
    for _ in range(4):
        pair = [next(batches), next(batches)]
        tokens = sum((batch["labels"] != -100).sum() for batch in pair)
        steps = [model(**batch, num_items_in_batch=tokens).loss for batch in pair]
        for loss in steps:
            amp.backward(loss)
        norms.append(float(amp.clip_grad_norm_(model.parameters(), 0.5)))
        assert not amp.step(optimizer).skipped
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(sum(loss.detach() for loss in steps)))
    return amp.model_state_dict(model), norms, losses


@pytest.mark.filterwarnings("ignore:prepare. more than 1 % of the weights:UserWarning")
def test_buffers_that_a_skipped_step_poisoned_are_put_back_and_logged(tmp_path: Path) -> None:
    model = gpt()
    model.lm_head.register_buffer("mean", torch.zeros(()))

    def note(head: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        output = output * (float("inf") if run.state.global_step == 1 else 1.0)
        head.mean.lerp_(output.detach().float().mean(), 0.1)
        return output

    model.lm_head.register_forward_hook(note)
    run = trainer(tmp_path, "bf16-mixed", model=model, logging_nan_inf_filter=False)
    run.train()
    assert logged(run, "skipped_steps") == [0, 1, 1, 1]
    assert logged(run, "restored_buffers") == [1, 1, 1]
    assert model.lm_head.mean.isfinite()


@every(2, 1)
@pytest.mark.parametrize("plan", PLANS)
def test_the_trainer_computes_what_the_loop_by_hand_does(plan: str, tmp_path: Path) -> None:
    run = trainer(tmp_path, plan)
    run.train()
    state, norms, losses = by_hand(tmp_path, plan)
    equal(weights(run), state)
    equal(logged(run, "grad_norm"), norms)
    equal(logged(run, "loss"), losses)
    assert logged(run, "loss_scale") == ([65536.0] * 4 if plan in SCALED else [])
    assert run.accelerator.amp.plan == castwise.Plan.preset(plan)


@each_value()
@pytest.mark.parametrize(
    ("plan", "stored"),
    [
        *((plan, torch.float32) for plan in PLANS),
        ("bf16-master", torch.bfloat16),
        ("bf16-true", torch.bfloat16),
    ],
)
def test_a_resumed_run_goes_on_bit_for_bit(plan: str, stored: torch.dtype, tmp_path: Path) -> None:
    """The model has dropout and the loss scale changes; the model may be given in bf16."""
    low = castwise.Plan.preset(plan)
    if low.loss_scale is not None:
        low = dataclasses.replace(low, loss_scale=dataclasses.replace(low.loss_scale, interval=2))

    def run(folder: Path, **changes: Any) -> Any:
        return trainer(
            folder, low, model=gpt(dropout=0.1).to(stored), save_strategy="steps", save_steps=2, **changes
        )

    whole = run(tmp_path)
    whole.train()
    rest = run(tmp_path / "again")
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    equal(weights(rest), weights(whole))
    equal(rest.optimizer.state_dict(), whole.optimizer.state_dict())
    assert rest.accelerator.amp.state_dict() == whole.accelerator.amp.state_dict()
    for name in ("loss", "grad_norm", "learning_rate", *(["loss_scale"] if plan in SCALED else [])):
        equal(logged(rest, name), logged(whole, name))  # the first two are from the checkpoint
    if plan in SCALED:
        assert len(set(logged(whole, "loss_scale"))) > 1
    whole.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    equal(weights(whole), weights(rest))


class Spoiled(CastwiseTrainer):
    """A trainer that overrides the loss; it is infinite in the second step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.skips: list[bool] = []
        self.seen: list[dict[str, torch.Tensor]] = []

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss * torch.inf if self.state.global_step == 1 else loss

    def log(self, logs: Any, *args: Any) -> None:
        super().log(logs, *args)
        if "loss" in logs:
            self.skips.append(self.accelerator.optimizer_step_was_skipped)
            self.seen.append(weights(self))


@each_value()
@pytest.mark.filterwarnings(
    "ignore:prepare. more than 1 % of the weights:UserWarning"
)  # biases start at zero and have made two steps
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd"])
@pytest.mark.parametrize("plan", ["bf16-mixed", "fp16-mixed", "fp16-master"])
def test_a_skipped_step_moves_nothing_and_is_said(plan: str, optim: str, tmp_path: Path) -> None:
    changes = {"optim": optim, "logging_nan_inf_filter": False, "save_strategy": "steps", "save_steps": 3}
    run = trainer(tmp_path, plan, Spoiled, **changes)
    run.train()
    assert run.skips == [False, True, False, False]
    equal(run.seen[1], run.seen[0])
    assert not torch.equal(run.seen[2]["lm_head.weight"], run.seen[1]["lm_head.weight"])
    assert logged(run, "learning_rate") == [0.0, 0.005, 0.005, 0.01]
    assert logged(run, "skipped_steps") == [0, 1, 1, 1]
    assert not torch.isfinite(torch.tensor(logged(run, "grad_norm")[1]))
    assert run.state.global_step == 4
    if plan in SCALED:
        assert logged(run, "loss_scale") == [65536.0, 32768.0, 32768.0, 32768.0]
    rest = trainer(tmp_path / "again", plan, Spoiled, **changes)
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert logged(rest, "skipped_steps") == [0, 1, 1, 1]
    equal(weights(rest), weights(run))


@every(2, 1)
@pytest.mark.parametrize("plan", PLANS)
def test_evaluating_before_and_after_changes_nothing_of_training(plan: str, tmp_path: Path) -> None:
    run = trainer(tmp_path, plan)
    before = run.evaluate(texts(8))["eval_loss"]
    assert castwise.Amp.of(run.model) is run.accelerator.amp
    run.train()
    other = trainer(tmp_path, plan)
    other.train()
    equal(weights(run), weights(other))
    assert run.evaluate(texts(8))["eval_loss"] < before
    with torch.no_grad():
        logits = run.model(input_ids=torch.stack([row["input_ids"] for row in texts(4)])).logits
    equal(torch.from_numpy(run.predict(texts(4)).predictions), logits)
    first = weights(run)
    run.train()  # train further
    assert not torch.equal(first["lm_head.weight"], weights(run)["lm_head.weight"])


@pytest.mark.parametrize("plan", ["bf16-master", "fp16-mixed"])
def test_a_second_trainer_takes_the_model_over(plan: str, tmp_path: Path) -> None:
    first = trainer(tmp_path, plan)
    first.train()
    kept = weights(first)
    second = trainer(tmp_path, "fp32", model=first.model)
    second.evaluate(texts(4))
    assert castwise.Amp.of(first.model) is second.accelerator.amp
    equal(weights(second), kept)
    second.train()
    first.train()
    assert castwise.Amp.of(first.model) is first.accelerator.amp


def test_saved_weights_are_fp32_and_say_so(tmp_path: Path) -> None:
    run = trainer(tmp_path, "bf16-master")
    run.train()
    run.save_model()
    saved = load_file(tmp_path / "model.safetensors")
    equal(saved, {name: value for name, value in weights(run).items() if name in saved})
    assert run.model.dtype is torch.bfloat16
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    equal(dict(GPT2LMHeadModel.from_pretrained(tmp_path).state_dict()), weights(run))


def test_a_process_that_saves_nothing_leaves_the_configuration_of_the_one_that_does_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(tmp_path, "bf16-master")
    run.train()
    (tmp_path / "config.json").write_text("of the other", encoding="utf-8")
    monkeypatch.setattr(TrainingArguments, "should_save", False)
    run.save_model()
    assert (tmp_path / "config.json").read_text(encoding="utf-8") == "of the other"


def test_the_best_model_is_loaded_into_the_masters(tmp_path: Path) -> None:
    args = arguments(
        tmp_path, save_strategy="steps", eval_strategy="steps", save_steps=1, eval_steps=1, load_best_model_at_end=True
    )  # fmt: skip
    run = CastwiseTrainer(
        plan="bf16-master", model=gpt(), args=args, train_dataset=texts(), eval_dataset=texts(4)
    )
    run.train()
    best = load_file(Path(run.state.best_model_checkpoint) / "model.safetensors")
    equal({name: value for name, value in weights(run).items() if name in best}, best)


@pytest.mark.parametrize("plan", ["bf16-mixed", "bf16-master"])
def test_a_trainer_without_a_plan_goes_on_from_a_checkpoint(plan: str, tmp_path: Path) -> None:
    run = trainer(tmp_path, plan, save_strategy="steps", save_steps=2)
    run.train()
    assert castwise.Plan.preset(plan) == castwise.Plan.from_json(
        json.loads((tmp_path / "checkpoint-2" / "castwise.json").read_text())["plan"]
    )
    rest = Trainer(model=gpt(1), args=arguments(tmp_path / "again"), train_dataset=texts())
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logged(rest, "loss")[:2] == logged(run, "loss")[:2]
    # bf16 has 8 bits; the loss is near ln 64.
    assert logged(rest, "loss")[2:] == pytest.approx(logged(run, "loss")[2:], rel=2e-2)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_adapters_that_do_not_load_leave_the_plan_on(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    run = trainer(
        tmp_path, "bf16-master", model=peft.get_peft_model(gpt(), config), save_strategy="steps", save_steps=2
    )
    run.train()
    wanted = weights(run)
    (tmp_path / "checkpoint-2" / "adapter_model.safetensors").write_bytes(b"broken")
    with pytest.raises(Exception, match="deserializing"):
        run._load_from_checkpoint(str(tmp_path / "checkpoint-2"))
    assert castwise.Amp.of(run.model) is run.accelerator.amp
    equal(weights(run), wanted)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT calls it
@pytest.mark.parametrize(
    ("plan", "stored"),
    [("bf16-mixed", torch.bfloat16), ("bf16-master", torch.float32), ("fp16-master", torch.float32)],
)
def test_adapters_resume_bit_for_bit(plan: str, stored: torch.dtype, tmp_path: Path) -> None:
    """The run resumes in a new trainer and in the one that saved."""
    peft = pytest.importorskip("peft")

    def run(folder: Path) -> Any:
        config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)
        return trainer(
            folder,
            plan,
            model=peft.get_peft_model(gpt().to(stored), config),
            save_strategy="steps",
            save_steps=2,
        )

    whole = run(tmp_path)
    whole.train()
    wanted = weights(whole)
    assert (
        load_file(tmp_path / "checkpoint-2" / "adapter_model.safetensors").popitem()[1].dtype is torch.float32
    )
    assert not (tmp_path / "checkpoint-2" / "config.json").exists()
    for again in (run(tmp_path / "again"), whole):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        equal(weights(again), wanted)


@pytest.mark.parametrize("plan", ["bf16-mixed", "fp16-master"])
def test_a_batch_that_does_not_fit_is_made_smaller(plan: str, tmp_path: Path) -> None:
    """The Trainer prepares everything again in the middle of a step."""

    class Small(CastwiseTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            if len(inputs["input_ids"]) > 2 and self.state.global_step == 1:
                raise RuntimeError("CUDA out of memory.")  # Accelerate recognises this message
            return loss

    run = trainer(tmp_path, plan, Small, auto_find_batch_size=True)
    run.train()
    assert run.state.train_batch_size == 2
    assert run.accelerator.skipped_steps == 0
    assert castwise.Amp.of(run.model) is run.accelerator.amp


def test_a_model_made_anew_is_prepared_anew(tmp_path: Path) -> None:
    run = CastwiseTrainer(
        plan="fp16-mixed", model_init=lambda: gpt(), args=arguments(tmp_path), train_dataset=texts()
    )
    run.train()
    first = weights(run)
    run.train()
    equal(weights(run), first)


def test_data_parallel_runs_by_the_plan(tmp_path: Path) -> None:
    """DataParallel bypasses Accelerate; on a CPU it calls the wrapped module."""
    args = arguments(tmp_path)
    args._n_gpu = 2
    run = CastwiseTrainer(plan="fp16-master", model=gpt(), args=args, train_dataset=texts())
    run.train()
    assert isinstance(run.model_wrapped, nn.DataParallel)
    assert run.model.dtype is torch.float16
    assert len(logged(run, "loss_scale")) == 4
    assert run.evaluate(texts(8))["eval_loss"] < logged(run, "loss")[0]


def test_a_compiled_model_runs_by_the_plan(tmp_path: Path) -> None:
    run = trainer(tmp_path, "fp16-mixed", torch_compile=True, torch_compile_backend="eager", max_steps=1)
    run.train()
    plain = trainer(tmp_path, "fp16-mixed", max_steps=1)
    plain.train()
    equal(logged(run, "loss"), logged(plain, "loss"))
    torch.compiler.reset()


# --- Accelerate -----------------------------------------------------------------------------------------------


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))


def pairs(number: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator))
        for _ in range(number)
    ]


def parts(fused: bool = False) -> tuple[nn.Module, Any, Any]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def loop(accelerator: Any, model: Any, optimizer: Any, scheduler: Any, data: Any) -> list[float]:
    """Train in the loop of Accelerate's guides; return the gradient norms."""
    norms = []
    for inputs, targets in data:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("plan", ["bf16-mixed", "fp16-master"])
def test_copies_and_pickles_of_accelerates_objects_are_its_own(plan: str) -> None:
    accelerator = CastwiseAccelerator(plan)
    objects = accelerator.prepare(*parts(), torch.utils.data.DataLoader(pairs(), batch_size=None))
    loop(accelerator, *objects)
    everything = [*objects, accelerator.scaler, accelerator]
    data = pickle.dumps(everything)
    assert b"castwise" not in data
    for again in (pickle.loads(data), copy.deepcopy(everything)):
        model, optimizer, scheduler, loader, scaler, plain = again
        assert type(optimizer) is AcceleratedOptimizer
        assert scaler is None
        assert scheduler.optimizers[0].param_groups is optimizer.param_groups
        for inputs, targets in loader:
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        if plain is not accelerator:  # deepcopy of an accelerator returns itself
            assert type(plain) is Accelerator
            assert plain.scaler is None
    loop(accelerator, *objects)  # the originals still train
    assert accelerator.amp.holds(objects[1].optimizer)


class OwnAccelerator(Accelerator):
    extra = 3


class OwnCastwiseAccelerator(CastwiseAccelerator):
    extra = 4


def test_classes_of_ones_own_stay_in_copies_and_pickles() -> None:
    adopted = CastwiseAccelerator.adopt(OwnAccelerator(), "bf16-mixed")
    own = OwnCastwiseAccelerator("bf16-mixed")
    for accelerator, kind in ((adopted, OwnAccelerator), (own, OwnCastwiseAccelerator)):
        again = pickle.loads(pickle.dumps(accelerator))
        assert type(again) is kind
        assert not hasattr(again, "amp")


def state_of(amp: castwise.Amp, model: Any, optimizer: Any, scheduler: Any) -> Any:
    inner = {
        name.removeprefix("module."): value.clone() for name, value in amp.model_state_dict(model).items()
    }
    return inner, optimizer.state_dict(), scheduler.state_dict()["_last_lr"], amp.state_dict()


@pytest.mark.parametrize(("plan", "fused"), soak.pairs(PLANS, [False, True]))
def test_a_loop_of_accelerate_computes_what_the_loop_by_hand_does(plan: str, fused: bool) -> None:
    accelerator = CastwiseAccelerator(plan, gradient_accumulation_steps=2)
    model, optimizer, scheduler = accelerator.prepare(*parts(fused))
    norms = loop(accelerator, model, optimizer, scheduler, pairs())
    found = state_of(accelerator.amp, model, optimizer, scheduler)

    model, optimizer, scheduler = parts(fused)
    amp = castwise.Amp(plan, device="cpu")
    amp.prepare(model, optimizer)
    wanted = []
    for number, (inputs, targets) in enumerate(pairs(), start=1):
        amp.backward(nn.functional.mse_loss(model(inputs), targets) / 2)
        if number % 2 == 0:
            wanted.append(float(amp.clip_grad_norm_(model.parameters(), 0.1)))
            amp.step(optimizer)
            scheduler.step()
            optimizer.zero_grad()
    equal(norms, wanted)
    equal(found, state_of(amp, model, optimizer, scheduler))


@pytest.mark.parametrize("plan", PLANS)
def test_save_state_and_load_state_go_on_bit_for_bit(plan: str, tmp_path: Path) -> None:
    def begin() -> Any:
        accelerator = CastwiseAccelerator(plan, gradient_accumulation_steps=2)
        return accelerator, *accelerator.prepare(*parts())

    accelerator, *training = begin()
    loop(accelerator, *training, pairs()[:4])
    accelerator.save_state(str(tmp_path))
    loop(accelerator, *training, pairs()[4:])
    whole = state_of(accelerator.amp, *training)

    accelerator, *training = begin()
    loop(accelerator, *training, pairs(2))  # reach another state first
    accelerator.load_state(str(tmp_path))
    loop(accelerator, *training, pairs()[4:])
    equal(state_of(accelerator.amp, *training), whole)


@pytest.mark.parametrize("fused", [False, True], ids=["loop", "fused"])
@pytest.mark.parametrize("plan", ["bf16-mixed", "fp16-mixed", "bf16-master"])
def test_a_step_that_was_skipped_is_told_to_the_scheduler(plan: str, fused: bool, tmp_path: Path) -> None:
    accelerator = CastwiseAccelerator(plan)
    model, optimizer, scheduler = accelerator.prepare(*parts(fused))
    assert not accelerator.optimizer_step_was_skipped
    (inputs, targets), *rest = pairs()
    loop(accelerator, model, optimizer, scheduler, [(inputs, targets)])
    assert (optimizer.step_was_skipped, scheduler.get_last_lr()) == (False, [0.005])
    loop(accelerator, model, optimizer, scheduler, [(inputs, targets * torch.inf)])
    assert (optimizer.step_was_skipped, scheduler.get_last_lr()) == (True, [0.005])
    assert accelerator.skipped_steps == 1
    loop(accelerator, model, optimizer, scheduler, rest)
    assert (optimizer.step_was_skipped, accelerator.skipped_steps) == (False, 1)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("plan", "order"), soak.pairs(PLANS, ["apart", "optimizer first", "evaluated first"])
)
def test_models_and_optimizers_come_in_any_order(order: str, plan: str) -> None:
    accelerator = CastwiseAccelerator(plan)
    model, optimizer, scheduler = parts()
    if order == "optimizer first":
        optimizer, model = accelerator.prepare(optimizer, model)
    else:
        model = accelerator.prepare_model(model, evaluation_mode=order == "evaluated first")
        model(pairs(1)[0][0])
        optimizer = accelerator.prepare(optimizer)
    scheduler = accelerator.prepare(scheduler)
    loop(accelerator, model, optimizer, scheduler, pairs())
    found = state_of(accelerator.amp, model, optimizer, scheduler)
    accelerator = CastwiseAccelerator(plan)
    together = accelerator.prepare(*parts())
    loop(accelerator, *together, pairs())
    equal(found, state_of(accelerator.amp, *together))


@pytest.mark.parametrize("plan", ["bf16-mixed", "fp16-mixed", "bf16-master"])
def test_what_memory_was_freed_of_is_prepared_anew(plan: str) -> None:
    accelerator = CastwiseAccelerator(plan)
    model, *others = accelerator.prepare(*parts())
    loop(accelerator, model, *others, pairs())
    assert accelerator.free_memory(None) == [None]
    assert castwise.Amp.of(model) is None
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))[
        1
    ]  # the first optimizer is still alive
    inputs, targets = pairs(1)[0]
    accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    assert not optimizer.step_was_skipped


@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize("plan", ["fp16-mixed", "bf16-master"])
def test_several_models_share_the_session(plan: str, evaluated: bool) -> None:
    accelerator = CastwiseAccelerator(plan)
    one, other = net(), net()
    if evaluated:
        for model in (one, other):
            accelerator.prepare_model(model, evaluation_mode=True)
    first = torch.optim.SGD(one.parameters(), lr=0.1)
    second = torch.optim.SGD(other.parameters(), lr=0.1)
    one, other, first, second = accelerator.prepare(one, other, first, second)
    assert castwise.Amp.of(one) is castwise.Amp.of(other) is accelerator.amp
    before = [p.detach().clone() for p in (*one.parameters(), *other.parameters())]
    for inputs, targets in pairs(2):
        accelerator.backward(nn.functional.mse_loss(one(inputs) + other(inputs), targets))
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    after = [*one.parameters(), *other.parameters()]
    assert not any(torch.equal(was, now) for was, now in zip(before, after, strict=True))


def test_casts_outside_of_the_model_are_the_plans() -> None:
    accelerator = CastwiseAccelerator("bf16-mixed")
    x = torch.randn(4, 4)
    with accelerator.autocast():
        assert (x @ x).dtype is torch.bfloat16
        with accelerator.autocast(AutocastKwargs(enabled=False)):
            assert (x @ x).dtype is torch.float32


@pytest.mark.parametrize("plan", ["bf16-mixed", "bf16-master"])
def test_options_of_prepare_are_handed_on(plan: str, tmp_path: Path) -> None:
    class Twice(nn.Linear):
        def again(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = nn.functional.linear(x, self.weight).dtype
            return self(x)

    model = Twice(4, 4)
    accelerator = CastwiseAccelerator(plan, prepare_options={"methods": ("again",)})
    accelerator.prepare_model(model).again(torch.randn(2, 4))
    assert model.seen is torch.bfloat16
    accelerator.prepare(model, torch.optim.SGD(model.parameters()))[0].again(torch.randn(2, 4))
    assert model.seen is torch.bfloat16
    run = CastwiseTrainer(
        plan=plan,
        prepare_options={"methods": ("no_such",)},
        model=gpt(),
        args=arguments(tmp_path),
        train_dataset=texts(),
    )
    with pytest.raises(StateError, match="no_such"):
        run.train()


def test_a_session_made_by_hand_is_handed_over() -> None:
    amp = castwise.Amp("fp16-mixed", device="cpu", nonfinite="raise")
    model, optimizer, scheduler = parts()
    amp.prepare(model, optimizer)
    accelerator = CastwiseAccelerator(amp)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    assert accelerator.amp is amp is castwise.Amp.of(model)
    assert amp.holds(optimizer.optimizer)
    assert not amp.holds(optimizer)
    loop(accelerator, model, optimizer, scheduler, pairs())
    assert accelerator.scaler.get_scale() == 65536.0


def test_a_scale_saved_by_torchs_scaler_is_taken_over() -> None:
    """A run with ``mixed_precision="fp16"`` saves such a state."""
    torchs = torch.amp.GradScaler("cpu", init_scale=128.0)
    torchs.scale(torch.ones(()))
    accelerator = CastwiseAccelerator("fp16-mixed")
    accelerator.scaler.load_state_dict(torchs.state_dict())
    assert accelerator.scaler.get_scale() == 128.0
    torchs.load_state_dict(CastwiseAccelerator("fp16-mixed").scaler.state_dict())
    assert torchs.get_scale() == 65536.0
    with pytest.raises(CheckpointError, match="expected the keys version"):
        accelerator.scaler.load_state_dict({"scale": 1.0})


# --- settings that are refused --------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["bf16", "fp16", "bf16_full_eval", "fp16_full_eval"])
def test_a_trainer_with_two_settings_of_precision_is_refused(setting: str, tmp_path: Path) -> None:
    with pytest.raises(
        PlanError, match=rf"CastwiseTrainer\(plan='fp16-mixed'\) together with {setting}=True: two settings"
    ):
        trainer(tmp_path, "fp16-mixed", **{setting: True})
    trainer(tmp_path, "fp16-mixed").train()  # the failed call left no state


@pytest.mark.parametrize(
    ("plan", "setting", "said"),
    [
        (
            "bf16-mixed+compile=default",
            {"torch_compile": True, "torch_compile_backend": "eager"},
            r"by 'EAGER'",
        ),
        ("fp32+fp32_matmul=ieee", {"tf32": False}, r"together with tf32=False"),
    ],
)
def test_a_trainer_with_two_settings_of_speed_is_refused(
    plan: str, setting: Any, said: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=said):
        trainer(tmp_path, plan, **setting)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mixed_precision": "bf16"}, r"together with mixed_precision='bf16': two settings"),
        ({"kwargs_handlers": [GradScalerKwargs()]}, r"kwargs_handlers='GradScalerKwargs'.*loss_scale="),
    ],
)
def test_an_accelerator_with_two_settings_of_precision_is_refused(given: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        CastwiseAccelerator("fp16-mixed", **given)
    accelerator = Accelerator(**given)
    with pytest.raises(PlanError, match=said):
        CastwiseAccelerator.adopt(accelerator, "fp16-mixed")
    assert type(accelerator) is Accelerator


def test_no_precision_is_no_setting() -> None:
    assert CastwiseAccelerator("fp16-mixed", mixed_precision="no").scaler.is_enabled()


def test_two_settings_by_the_environment_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`accelerate launch --mixed_precision` sets this variable."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(PlanError, match=r"ACCELERATE_MIXED_PRECISION=bf16: two settings"):
        trainer(tmp_path, "fp16-mixed")
    with pytest.raises(PlanError, match=r"mixed_precision='bf16': two settings"):
        CastwiseAccelerator("fp16-mixed")


def late_to(plan: str) -> None:
    """Prepare a second optimizer for a model that is already training."""
    accelerator = CastwiseAccelerator(plan)
    model, optimizer, _ = parts()
    accelerator.prepare(model, optimizer)
    accelerator.prepare(torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize(
    ("do", "said"),
    [
        (lambda a: a.prepare(parts()[1]), r"prepare\(AdamW\): this optimizer updates no model that this accelerator"),
        (lambda a: late_to("bf16-master"), r"prepare\(AdamW\): the plan bf16-master has already stored parameters of its model low"),
        (lambda a: CastwiseAccelerator.adopt(a, "fp32"), r"has prepared models or optimizers already"),
        (lambda a: a.prepare(castwise.Amp("fp32", device="cpu").prepare(net())), r"has prepared this model already, but this"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_in_words(do: Callable[[Any], Any], said: str) -> None:
    accelerator = CastwiseAccelerator("fp32")
    accelerator.prepare(*parts())
    with pytest.raises(StateError, match=said):
        do(accelerator)


def test_another_release_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(versions.TESTED, "accelerate", "0.1")
    versions.check_version.cache_clear()
    with pytest.warns(
        UserWarning, match=r"is tested with accelerate 0\.1, but 1\.\S+ is installed"
    ) as caught:
        [CastwiseAccelerator("fp32") for _ in range(2)]
    assert len(caught) == 1
    versions.check_version.cache_clear()


# --- a plain Trainer with a prepared model --------------------------------------------------------------------


def prepared(plan: str, **changes: Any) -> Callable[[Path], Any]:
    def make(folder: Path) -> Any:
        model = gpt()
        optimizer = torch.optim.AdamW(model.parameters())
        amp = castwise.Amp(plan, device="cpu")
        amp.prepare(model, optimizer)
        run = Trainer(
            model=model,
            args=arguments(folder, **changes),
            train_dataset=texts(),
            optimizers=(optimizer, None),
        )
        run.amp = amp
        return run

    return make


@pytest.mark.parametrize("plan", ["fp32", "bf16-mixed", "bf16-master"])
def test_a_plain_trainer_trains_a_prepared_model_without_a_scale(plan: str, tmp_path: Path) -> None:
    run = prepared(plan)(tmp_path)
    run.train()
    mine = CastwiseTrainer(
        plan=(session := castwise.Amp(plan, device="cpu")), model=(model := gpt()), args=arguments(tmp_path),
        train_dataset=texts(), optimizers=(torch.optim.AdamW(model.parameters()), None),
    )  # fmt: skip
    mine.train()
    equal(session.model_state_dict(model), run.amp.model_state_dict(run.model))


@pytest.mark.parametrize("plan", SCALED)
def test_a_plain_trainer_does_not_train_without_the_scale_of_the_plan(plan: str, tmp_path: Path) -> None:
    run = prepared(plan)(tmp_path)
    before = {name: value.clone() for name, value in run.amp.model_state_dict(run.model).items()}
    with pytest.raises(StateError, match=r"no loss was ever scaled.*castwise\.integrations\.huggingface"):
        run.train()
    equal(run.amp.model_state_dict(run.model), before)
    accelerator, model = Accelerator(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    castwise.Amp(plan, device="cpu").prepare(model, optimizer)
    with pytest.raises(StateError, match="no loss was ever scaled"):
        loop(accelerator, *accelerator.prepare(model, optimizer, None), pairs())


@pytest.mark.parametrize("plan", ["fp32", "bf16-mixed", "fp16-mixed"])
def test_a_plain_trainers_own_precision_does_not_override_the_plan(plan: str, tmp_path: Path) -> None:
    said = r"forward of this GPT2LMHeadModel was replaced by one inside torch\.autocast\('cpu'\), which overrides the plan"
    with pytest.raises(StateError, match=said):
        prepared(plan, bf16=True)(tmp_path).train()
    model = Accelerator(mixed_precision="bf16").prepare(net())
    with pytest.raises(StateError, match=r"forward of this Sequential was replaced"):
        castwise.Amp(plan, device="cpu").prepare(model)


def test_a_mixin_follows_other_trainers(tmp_path: Path) -> None:
    class Own(Accelerator):
        pass

    class Other(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator.__class__ = Own

    class Mine(CastwiseMixin, Other):
        pass

    run = trainer(tmp_path, "fp16-mixed", Mine)
    assert isinstance(run.accelerator, Own)
    assert isinstance(run.accelerator, CastwiseAccelerator)
    run.train()
    equal(weights(run), by_hand(tmp_path, "fp16-mixed")[0])


# --- the example ----------------------------------------------------------------------------------------------


def test_the_example_learns_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Path(__file__).parents[3] / "examples" / "huggingface_trainer.py"

    def run(*words: str) -> float:
        monkeypatch.setattr(
            "sys.argv", [str(script), "--output", str(tmp_path), "--plan", "bf16-master", *words]
        )
        runpy.run_path(str(script), run_name="__main__")
        said = capsys.readouterr().out
        return float(re.search(r"^bf16-master: loss (\d\.\d+) on text", said, re.MULTILINE)[1])

    begun = run("--steps", "6")
    assert run("--steps", "12", "--resume") < begun < math.log(256)


# --- two processes --------------------------------------------------------------------------------------------


class SpoiledOnOne(Spoiled):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = Trainer.compute_loss(self, model, inputs, *args, **kwargs)
        return loss * torch.inf if self.args.process_index == 0 and self.state.global_step == 1 else loss


def train_on_two(folder: str) -> None:
    warnings.simplefilter("ignore")  # torch warns about its collectives
    os.environ["ACCELERATE_USE_CPU"] = "true"
    here, gathered = Path(folder), {}
    for plan in ("fp16-mixed", "fp16-master"):
        accelerator = CastwiseAccelerator(plan, gradient_accumulation_steps=2)
        mine = slice(accelerator.process_index, None, 2)
        model, optimizer, scheduler = accelerator.prepare(*parts())
        assert isinstance(model, nn.parallel.DistributedDataParallel)
        norms = loop(accelerator, model, optimizer, scheduler, pairs()[mine])
        found = state_of(accelerator.amp, model, optimizer, scheduler)

        amp = castwise.Amp(plan, device="cpu")
        model, optimizer, scheduler = parts()
        amp.prepare(model, optimizer)
        model = nn.parallel.DistributedDataParallel(model)
        wanted = []
        for number, (inputs, targets) in enumerate(pairs()[mine], start=1):
            with model.no_sync() if number % 2 else contextlib.nullcontext():
                amp.backward(nn.functional.mse_loss(model(inputs), targets) / 2)
            if number % 2 == 0:
                wanted.append(float(amp.clip_grad_norm_(model.parameters(), 0.1)))
                amp.step(optimizer)
                scheduler.step()  # once per process, as in Accelerate
                scheduler.step()
                optimizer.zero_grad()
        equal(norms, wanted)
        equal(found, state_of(amp, model, optimizer, scheduler))

        AcceleratorState._reset_state(reset_partial_state=False)
        GradientState._reset_state()
        run = trainer(
            here / plan, plan, SpoiledOnOne, logging_nan_inf_filter=False, save_strategy="steps", save_steps=3
        )
        run.train()
        assert run.skips in ([False, True, False, False], [])  # filled on the rank that logs
        assert run.accelerator.skipped_steps == 1
        rest = trainer(here / plan, plan, SpoiledOnOne, logging_nan_inf_filter=False)
        rest.train(resume_from_checkpoint=str(here / plan / "checkpoint-3"))
        equal(weights(rest), weights(run))
        gathered[plan] = weights(run)
    torch.save(gathered, here / f"weights{run.args.process_index}.pt")


def two_ranks(folder: Path) -> None:
    ranks = run_ranks(train_on_two, str(folder), folder, 2)
    assert [rank.code for rank in ranks] == [0, 0], "".join(rank.said("err") for rank in ranks)


@pytest.mark.slow
def test_two_processes_train_as_the_loop_by_hand_on_two_does(tmp_path: Path) -> None:
    of_one(two_ranks, tmp_path, tmp_path)
    one, other = (torch.load(tmp_path / f"weights{rank}.pt") for rank in range(2))
    equal(one, other)
