"""Checkpoints of one process: resumed bit for bit, loaded under other plans, refused where they do not fit."""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful

import castwise
from castwise import LossScale, Plan
from castwise.core import checkpoint, masters
from castwise.core.casting.trees import map_tensors
from castwise.errors import CheckpointError
from tests.here import DEVICE
from tests.soak import each_value

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, 0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, 0.01, fused=False),
    "fused": lambda params: torch.optim.AdamW(params, 0.01, fused=True),
}


class Net(nn.Module):
    """Convolution, running statistics, dropout, tied weights and a frozen bias."""

    def __init__(self, dropout: float = 0.25) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(dropout)
        self.into = nn.Linear(16, 6)
        self.back = nn.Linear(6, 6, bias=False)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.back.weight
        self.tied.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.back(self.into(self.dropout(self.norm(self.conv(x))).flatten(1))))


class Run:
    """A model, optimizer and session that train, save and load."""

    def __init__(
        self,
        plan: str | Plan,
        optimizer: str | Callable[[Any], torch.optim.Optimizer] = "adamw",
        seed: int = 0,
        model: Callable[[], nn.Module] = Net,
    ) -> None:
        torch.manual_seed(seed)
        self.model = model()
        make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
        self.optimizer = make(self.model.parameters())
        self.amp = castwise.Amp(plan, device=DEVICE)
        self.amp.prepare(self.model, self.optimizer)

    def train(self, first: int, steps: int = 4) -> None:
        for number in range(first, first + steps):
            x = torch.randn(5, 1, 4, 4, generator=torch.Generator(DEVICE).manual_seed(number))
            for name, weight in (("loss", 1.0), ("other", 0.1)):
                self.amp.backward(weight * self.model(x).square().mean(), name)
            self.amp.step(self.optimizer, max_norm=1.0)
            self.optimizer.zero_grad()

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizers": self.optimizer, "amp": self.amp}

    def save(self, folder: Path, step: int, **options: Any) -> checkpoint.Saving:
        return checkpoint.save(folder, step, **self.parts(), **options)

    def load(self, found: Any) -> checkpoint.Loaded:
        return checkpoint.load(found, **self.parts())

    def state(self) -> dict[str, Any]:
        """Return copies of everything that training continues from."""
        state: dict[str, Any] = {
            f"model.{k}": v.clone() for k, v in self.amp.model_state_dict(self.model).items()
        }
        for number, values in self.optimizer.state_dict()["state"].items():
            state |= {f"{number}.{k}": v.clone() for k, v in values.items()}
        state["amp"] = self.amp.state_dict()["scaler"]
        state["rng"] = torch.get_rng_state()
        return state


def same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys()
    for key, value in want.items():
        if isinstance(value, Tensor):
            assert (got[key].dtype, got[key].stride()) == (value.dtype, value.stride()), key
            assert got[key].device == value.device, key
            assert torch.equal(got[key], value), key
        else:
            assert got[key] == value, key


# --- resuming -----------------------------------------------------------------------------------------------


@each_value()
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "plan", ["fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "fp16-master", "bf16-true"]
)
def test_training_continues_bit_for_bit(tmp_path: Path, plan: str, optimizer: str) -> None:
    run = Run(plan, optimizer)
    run.train(0)
    at = run.state()
    run.save(tmp_path, 4)
    same(run.state(), at)  # saving changes nothing
    run.train(4)
    want = run.state()
    fresh = Run(plan, optimizer, seed=1)
    fresh.train(10, 1)  # loading replaces what this training has learnt
    loaded = fresh.load(checkpoint.newest(tmp_path))
    assert (loaded.step, loaded.world_size, loaded.random_state) == (4, 1, True)
    assert Plan.parse(loaded.plan) == run.amp.plan
    same(fresh.state(), at)
    fresh.train(4)
    same(fresh.state(), want)


def test_in_the_background_it_is_the_moment_of_the_call_that_is_saved(tmp_path: Path) -> None:
    run = Run("bf16-master")
    run.train(0)
    at = run.state()
    saving = run.save(tmp_path, 4, asynchronous=True)
    run.train(4)
    assert saving.wait() == saving.path == tmp_path / "step-00000004"
    assert saving.done
    run.load(saving.path)
    same(run.state(), at)


def test_a_save_in_the_background_is_waited_for(tmp_path: Path) -> None:
    run = Run("fp32")
    run.save(tmp_path, 1, asynchronous=True)
    run.save(tmp_path, 2, asynchronous=True)
    assert checkpoint.newest(tmp_path).step == 2
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("plan", ["fp32", "bf16-master"])
def test_an_optimizer_that_has_never_stepped_stays_so(tmp_path: Path, plan: str) -> None:
    """Saving takes no step to create optimizer state, and loading removes state that the checkpoint does not have."""
    run = Run(plan)
    run.save(tmp_path, 0)
    assert not run.optimizer.state
    run.train(0)
    run.load(checkpoint.newest(tmp_path))
    assert not run.optimizer.state
    run.train(0)
    want = run.state()
    run.load(tmp_path / "step-00000000")
    run.train(0)
    same(run.state(), want)


class Counting(torch.optim.SGD):
    """Counts its steps on each parameter's device, as some optimizers outside torch do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, 0.05)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for p in self.param_groups[0]["params"] if p.grad is not None):
            state = self.state[parameter]
            for key in ("step", "count"):
                state[key] = state.get(key, torch.zeros((), device=parameter.device)) + 1
            parameter.grad.mul_(state["step"] / state["count"])
        super().step(closure)


def test_optimizers_of_other_kinds(tmp_path: Path) -> None:
    """Optimizer state may have other shapes or be in lists, and options may be tensors."""
    kinds: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda params: torch.optim.Adafactor(params, 0.05),
        lambda params: torch.optim.Adam(params, torch.tensor(0.01), amsgrad=True),
        lambda params: torch.optim.Adam(params, betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False),
        Counting,
        lambda params: torch.optim.SGD(params, 0.05),
    ]
    for number, kind in enumerate(kinds):
        run = Run("bf16-master", kind)
        run.train(0)
        run.save(tmp_path / str(number), 4)
        run.train(4)
        want = run.state()
        fresh = Run("bf16-master", kind, seed=1)
        fresh.load(tmp_path / str(number) / "step-00000004")
        fresh.train(4)
        same(fresh.state(), want)


def test_lbfgs_keeps_its_history(tmp_path: Path) -> None:
    def learn(run: Run, steps: int) -> list[float]:
        losses = []
        x = torch.randn(8, 1, 4, 4, generator=torch.Generator(DEVICE).manual_seed(0))

        def closure() -> Tensor:
            run.optimizer.zero_grad()
            loss = run.model(x).square().mean()
            run.amp.backward(loss)
            losses.append(float(loss.detach()))
            return loss

        for _ in range(steps):
            run.amp.step(run.optimizer, closure=closure)
        return losses

    def start() -> Run:
        return Run("fp32", lambda params: torch.optim.LBFGS(params, 0.1), model=lambda: Net(dropout=0.0))

    run = start()
    learn(run, 2)
    run.save(tmp_path, 2)
    want = learn(run, 2)
    fresh = start()
    fresh.load(tmp_path / "step-00000002")
    assert learn(fresh, 2) == want


def test_groups_schedulers_and_several_optimizers(tmp_path: Path) -> None:
    def start() -> tuple[nn.Module, list[torch.optim.Optimizer], Any, castwise.Amp]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})  # two models, prepared separately
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.SGD([{"params": [model["a"].weight], "weight_decay": 0.1}, {"params": [model["a"].bias]}], 0.1),
            torch.optim.AdamW(model["b"].parameters(), 0.1),
        ]  # fmt: skip
        amp = castwise.Amp("bf16-master", device=DEVICE)
        for part, optimizer in zip(model.values(), optimizers, strict=True):
            amp.prepare(part, optimizer)
        return model, optimizers, torch.optim.lr_scheduler.StepLR(optimizers[0], 1, 0.5), amp

    model, optimizers, scheduler, amp = start()
    for _ in range(3):
        amp.backward(model["b"](model["a"](torch.ones(2, 4))).sum())
        amp.step(*optimizers)
        scheduler.step()
    checkpoint.save(
        tmp_path, 3, model=model, optimizers=optimizers, amp=amp, extra={"scheduler": scheduler.state_dict()}
    )
    fresh = start()
    loaded = checkpoint.load(
        tmp_path / "step-00000003", model=fresh[0], optimizers=iter(fresh[1]), amp=fresh[3]
    )
    fresh[2].load_state_dict(loaded.extra["scheduler"])
    assert [group["lr"] for group in fresh[1][0].param_groups] == [0.0125, 0.0125]
    assert [group["weight_decay"] for group in fresh[1][0].param_groups] == [0.1, 0]
    assert fresh[2].state_dict() == scheduler.state_dict()
    for got, want in zip(fresh[1], optimizers, strict=True):
        assert str(map_tensors(Tensor.cpu, got.state_dict())) == str(
            map_tensors(Tensor.cpu, want.state_dict())
        )
    with pytest.raises(CheckpointError, match="2 optimizers were saved, and there are 1 here"):
        checkpoint.load(tmp_path / "step-00000003", model=fresh[0], optimizers=fresh[1][0], amp=fresh[3])
    checkpoint.load(tmp_path / "step-00000003", model=fresh[0], amp=fresh[3])  # weights only


def test_wrappers_and_compiled_parts_leave_no_trace_in_the_names(tmp_path: Path) -> None:
    run = Run("bf16-mixed", model=lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    run.model[0] = torch.compile(run.model[0], backend="eager")
    parts = {**run.parts(), "model": torch.compile(nn.DataParallel(run.model), backend="eager")}
    path = checkpoint.save(tmp_path, 1, **parts).path
    assert [name for name in tensors_of(path) if name.startswith("model.")] == [
        "model.0.weight",
        "model.0.bias",
        "model.1.weight",
        "model.1.bias",
    ]
    plain = Run("bf16-mixed", model=lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), seed=1)
    plain.load(path)
    assert torch.equal(plain.model[0].weight, run.model[0].weight)
    checkpoint.load(path, **parts)


def test_state_saved_in_one_memory_format_loads_into_the_other(tmp_path: Path) -> None:
    def start(plan: Plan) -> Run:  # no dropout: its random values depend on the memory order
        return Run(
            plan,
            lambda params: torch.optim.SGD(params, 0.05, momentum=0.9, fused=True),
            model=lambda: Net(dropout=0.0),
        )

    want, got = start(Plan(compute="fp32", memory_format="channels_last")), start(Plan(compute="fp32"))
    want.train(0)
    want.save(tmp_path, 4)
    got.load(tmp_path / "step-00000004")
    weight = got.model.conv.weight
    assert got.optimizer.state[weight]["momentum_buffer"].stride() == weight.stride()
    for run in (want, got):
        run.load(tmp_path / "step-00000004")
        run.train(4)
    # Convolutions in another memory format sum in another order.
    torch.testing.assert_close(got.model.conv.weight, want.model.conv.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("asynchronous", [False, True])
def test_on_a_gpu_training_continues_bit_for_bit(tmp_path: Path, asynchronous: bool) -> None:
    def start() -> tuple[dict[str, Any], Callable[[], float]]:
        model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 4)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=True)
        amp = castwise.Amp("fp16-master", device="cuda")
        amp.prepare(model, optimizer)

        def step() -> float:
            loss = model(torch.ones(16, 8, device="cuda")).square().mean()
            amp.backward(loss)
            amp.step(optimizer)
            optimizer.zero_grad()
            return float(loss.detach())

        return {"model": model, "optimizers": optimizer, "amp": amp}, step

    parts, step = start()
    losses = [step() for _ in range(4)]
    saving = checkpoint.save(tmp_path, 4, **parts, extra=torch.ones(2).cuda(), asynchronous=asynchronous)
    losses = [step() for _ in range(4)]
    fresh, again = start()
    loaded = checkpoint.load(saving.wait(), **fresh)
    assert loaded.extra.device.type == "cpu"
    assert [again() for _ in range(4)] == losses


# --- other plans --------------------------------------------------------------------------------------------


@each_value()
@pytest.mark.parametrize(
    ("before", "after"), list(itertools.product(["fp32", "bf16-mixed", "fp16-master", "bf16-true"], repeat=2))
)
def test_every_plan_loads_every_other(tmp_path: Path, before: str, after: str) -> None:
    run = Run(before, "fused")
    run.train(0)
    want = run.state()
    run.save(tmp_path, 4)
    fresh = Run(after, "adamw", seed=1)
    fresh.load(checkpoint.newest(tmp_path))
    got = fresh.state()
    full = after != "bf16-true"
    named = fresh.model.named_parameters(remove_duplicate=False)
    rounded = {f"model.{name}" for name, p in named if p.requires_grad and p.dtype is torch.bfloat16}
    params = fresh.optimizer.param_groups[0]["params"]
    for key, value in want.items():
        if key.startswith("model.") and value.is_floating_point():
            assert got[key].dtype is torch.float32
            kept = value
            if key in rounded and not full:  # trained without masters: rounded once
                kept = value.to(fresh.amp.plan.compute_dtype).float()
            assert torch.equal(got[key], kept), key
        elif "exp_avg" in key:
            assert got[key].dtype is params[int(key.partition(".")[0])].dtype
            assert torch.equal(got[key], value.to(got[key].dtype)), key
    assert (
        fresh.optimizer.param_groups[0]["fused"] is False
    )  # the checkpoint does not decide which kernel runs
    for name in ("loss", "other"):
        had = run.amp.get_scale(name) if before == "fp16-master" else 65536.0
        assert fresh.amp.get_scale(name) == (had if after == "fp16-master" else 1.0)
    fresh.train(4, 1)
    if before == "fp32":
        assert any((value != value.bfloat16()).any() for k, value in want.items() if k.startswith("model."))


def test_the_scale_is_kept_from_plan_to_plan(tmp_path: Path) -> None:
    """Each named loss has its own scale. Loading under a plan without loss scaling does not lose it."""
    run = Run(Plan(compute="fp16", loss_scale=LossScale(init=64.0, interval=2)))
    run.train(0)
    state = run.amp.state_dict()
    state["scaler"]["losses"]["other"]["scale"] = 8.0
    run.amp.load_state_dict(state)
    scales = [run.amp.get_scale(name) for name in ("loss", "other")]
    run.save(tmp_path, 4)
    for plan in ("fp16-master", "fp16-mixed", "bf16-mixed"):
        fresh = Run(plan, seed=1)
        fresh.load(tmp_path / "step-00000004")
        got = [fresh.amp.get_scale(name) for name in ("loss", "other")]
        assert got == (scales if plan.startswith("fp16") else [1.0, 1.0])
    assert scales == [256.0, 8.0]


def test_tied_weights_may_be_untied_and_tied_again(tmp_path: Path) -> None:
    """As when the first and the last stage of a pipeline each have their own copy of the embedding."""

    def untied() -> nn.Module:
        model = Net()
        model.tied.weight = nn.Parameter(torch.zeros(6, 6))
        return model

    tied, apart, again = Run("bf16-master"), Run("bf16-mixed", model=untied), Run("bf16-master", seed=1)
    tied.train(0)
    apart.load(tied.save(tmp_path, 1).path)
    state = [apart.optimizer.state[layer.weight]["exp_avg"] for layer in (apart.model.back, apart.model.tied)]
    want = tied.optimizer.state[tied.model.back.weight]["exp_avg"]
    assert torch.equal(apart.model.back.weight, apart.model.tied.weight)
    assert all(torch.equal(value, want) for value in state)
    again.load(apart.save(tmp_path, 2).path)
    same(again.state(), tied.state())


# --- what does not fit --------------------------------------------------------------------------------------


def refuses(run: Run, path: Any, *texts: str) -> None:
    before = run.state()
    for text in texts:
        with pytest.raises(CheckpointError, match=text):
            run.load(path)
    same(run.state(), before)


def test_a_model_that_does_not_fit_is_left_alone(tmp_path: Path) -> None:
    run = Run("bf16-master")
    run.train(0)
    path = run.save(tmp_path, 4).path

    def other(change: Callable[[Net], None], optimizer: Any = "adamw") -> Run:
        def build() -> nn.Module:
            model = Net()
            change(model)
            return model

        return Run("bf16-master", optimizer, seed=1, model=build)

    def longer(model: Net) -> None:
        model.more = nn.Linear(2, 2, bias=False)

    def wider(model: Net) -> None:
        model.into = nn.Linear(16, 7)

    refuses(
        other(longer),
        path,
        r"nothing was changed: the model has weights that were not saved: more\.weight;",
        r"optimizer 0 updates parameters here that it did not update when it was saved: more\.weight",
    )
    refuses(
        other(wider),
        path,
        r"weights have other shapes: into\.weight \(\[6, 16\] saved, \[7, 16\] here\), into\.bias",
    )
    refuses(
        other(lambda model: delattr(model, "norm")),
        path,
        r"weights were saved that the model does not have: norm\.bias, norm\.num_batches_tracked, norm\.running_mean, "
        r"norm\.running_var, norm\.weight",
    )
    refuses(other(lambda _: None, "sgd"), path, "optimizer 0 was AdamW and is SGD here")
    refuses(
        other(lambda _: None, lambda params: torch.optim.AdamW(list(params)[:-2], 0.01)),
        path,
        r"optimizer 0 updated parameters when it was saved that it does not update here: back\.weight, tied\.bias",
    )


def test_groups_that_cannot_be_joined(tmp_path: Path) -> None:
    def cut(params: Any) -> torch.optim.Optimizer:
        first, *others = params
        return torch.optim.AdamW([{"params": [first], "lr": 0.5}, {"params": others}], 0.01)

    path = Run("fp32", cut).save(tmp_path, 1).path
    refuses(Run("fp32"), path, "group 0 of optimizer 0 joins parameters that had different options")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"step": -1}, r"save\(step=-1\) is not allowed. Allowed: a whole number"),
        ({"step": 1.0}, r"save\(step=1.0\)"),
        ({"keep": 0}, r"save\(keep=0\) is not allowed. Allowed: a whole number, 1 or above, or None"),
        ({"amp": None}, r"save\(amp=NoneType\) is not allowed. Allowed: the castwise.Amp"),
        ({"extra": {"a": [0, {1}]}}, r"save: extra\.a\.1 is a builtins\.set, which cannot be saved"),
        ({"extra": {b"k": 1}}, "save: extra has a key of type bytes"),
        ({"extra": {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}}, r"both be named 'extra\.a\.b'"),
        ({"optimizers": torch.optim.SGD([nn.Parameter(torch.ones(3))])}, "updates a parameter of shape"),
    ],
)
def test_what_cannot_be_saved_is_said_before_anything_is_written(
    tmp_path: Path, options: dict[str, Any], text: str
) -> None:
    run = Run("fp32")
    with pytest.raises(CheckpointError, match=text):
        checkpoint.save(tmp_path, **{"step": 1, **run.parts(), **options})
    assert not list(tmp_path.iterdir())


def test_extra_comes_back_as_it_was(tmp_path: Path) -> None:
    extra = {
        "none": None,
        "numbers": [1, -(2**80), 0.1, math.inf, True],
        1: (1, (2,), [], {}),
        (1, None): "ü\n",
        "tensors": [torch.arange(6).reshape(2, 3), {"b": torch.ones((), dtype=torch.bfloat16)}],
        "tensor": {"tensor": "model.conv.weight", "tuple": 1, "dict": 2},
    }
    run = Run("fp32")
    run.save(tmp_path, 1, extra=extra)
    got = run.load(checkpoint.newest(tmp_path)).extra
    assert repr(got) == repr(map_tensors(Tensor.cpu, extra))
    run.save(tmp_path, 2, extra=math.nan)
    assert math.isnan(run.load(checkpoint.newest(tmp_path)).extra)


# --- crashes and damage -------------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def tensors_of(path: Path) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((path / "values.json").read_text())["tensors"]
    return index


@pytest.fixture
def saved(tmp_path: Path) -> Run:
    """Return a run that has saved two checkpoints."""
    run = Run("fp32")
    run.train(0, 1)
    run.save(tmp_path, 1)
    run.train(1, 1)
    run.save(tmp_path, 2)
    return run


def passes_over(folder: Path, name: str, reason: str, **options: Any) -> checkpoint.Found:
    with pytest.warns(UserWarning, match=f"skipped {name}: .*{reason}"):
        found = checkpoint.newest(folder, **options)
    assert (found.step, [skipped.path.name for skipped in found.skipped]) == (1, [name])
    with pytest.raises(CheckpointError, match=reason):
        checkpoint.load(folder / name, model=nn.Linear(1, 1), amp=castwise.Amp("fp32", device=DEVICE))
    return found


def test_damage_is_found(tmp_path: Path, saved: Run) -> None:
    path = tmp_path / "step-00000002"
    (data,) = path.glob("*.safetensors")
    whole = data.read_bytes()
    data.write_bytes(whole[:-1])
    passes_over(tmp_path, path.name, r"safetensors has [\d,]+ bytes instead of [\d,]+", checksums=False)
    data.write_bytes(whole[:99] + bytes([whole[99] ^ 1]) + whole[100:])
    assert checkpoint.newest(tmp_path, checksums=False).step == 2
    found = passes_over(tmp_path, path.name, r"other contents \(crc32 differs\)")
    assert saved.load(found).skipped == found.skipped
    data.unlink()
    passes_over(tmp_path, path.name, "safetensors is missing")
    data.write_bytes(whole)
    assert checkpoint.newest(tmp_path).step == 2
    manifest = path / "checkpoint.json"
    text = manifest.read_text()
    manifest.write_text(text[:-20])
    passes_over(tmp_path, path.name, r"checkpoint\.json cannot be read")
    manifest.write_text(text.replace('"version": 2', '"version": 1'))
    passes_over(tmp_path, path.name, "has format version 1, and this castwise reads 2")
    manifest.write_text("[]")
    passes_over(tmp_path, path.name, "was not written by castwise")
    manifest.unlink()
    passes_over(
        tmp_path, path.name, r"has no checkpoint\.json: it is damaged or was written by another program"
    )


def test_another_programs_folder_is_neither_loaded_nor_replaced_nor_deleted(
    tmp_path: Path, saved: Run
) -> None:
    foreign = tmp_path / "step-00000003"
    foreign.mkdir()
    (foreign / "model.bin").touch()
    (tmp_path / "step-00000009").touch()
    (tmp_path / "step-latest").mkdir()
    with pytest.warns(UserWarning, match="skipped step-00000003"):
        assert checkpoint.newest(tmp_path).step == 2
    with pytest.raises(CheckpointError, match="no castwise manifest, so it is not replaced; move it away"):
        saved.save(tmp_path, 3)
    saved.save(tmp_path, 4, keep=1)
    assert names(tmp_path) == ["step-00000003", "step-00000004", "step-00000009", "step-latest"]
    assert names(foreign) == ["model.bin"]


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    assert not checkpoint.newest(tmp_path / "none")
    found = checkpoint.newest(tmp_path)
    assert (bool(found), found.path, found.skipped) == (False, None, ())
    with pytest.raises(CheckpointError, match=r"found no complete checkpoint; .* train from the start"):
        checkpoint.load(found, model=nn.Linear(1, 1), amp=castwise.Amp("fp32", device=DEVICE))


class Kill(BaseException):
    """Simulates a process that dies here without any cleanup."""


def killed_at(monkeypatch: pytest.MonkeyPatch, moment: int, call: Callable[[], Any]) -> None:
    """Run a save that dies at its n-th rename."""
    count = itertools.count(1)
    rename = Path.rename

    def dying(path: Path, target: Any) -> Path:
        if next(count) == moment:
            raise Kill
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dying)
        with pytest.raises(Kill):
            call()


def test_a_save_that_is_killed_leaves_the_older_one(
    tmp_path: Path, saved: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_at(monkeypatch, 1, lambda: saved.save(tmp_path, 3))
    assert names(tmp_path) == [".step-00000003.partial", "step-00000001", "step-00000002"]
    with pytest.warns(UserWarning, match=r"skipped \.step-00000003\.partial: was never finished"):
        assert checkpoint.newest(tmp_path).step == 2
    saved.save(tmp_path, 3)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def test_a_step_that_is_saved_again_replaces_the_first(
    tmp_path: Path, saved: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.state()
    saved.train(5, 1)
    after = saved.state()
    killed_at(monkeypatch, 2, lambda: saved.save(tmp_path, 2))  # between the two renames
    assert names(tmp_path) == [".step-00000002.partial", ".step-00000002.replaced", "step-00000001"]
    found = checkpoint.newest(tmp_path)
    saved.load(found)
    same(saved.state(), before)
    saved.train(5, 1)
    killed_at(monkeypatch, 1, lambda: saved.save(tmp_path, 3))
    assert ".step-00000002.replaced" in names(tmp_path)  # it is the newest checkpoint, so it stays
    saved.save(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    saved.load(checkpoint.newest(tmp_path))
    same(saved.state(), after)


def test_only_complete_checkpoints_of_earlier_steps_are_deleted(tmp_path: Path, saved: Run) -> None:
    data = next((tmp_path / "step-00000001").glob("*.safetensors"))
    data.write_bytes(b"")
    saved.save(tmp_path, 3, keep=2)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]
    saved.save(tmp_path, 4, keep=1)
    assert names(tmp_path) == ["step-00000001", "step-00000004"]
    with pytest.warns(UserWarning, match=r"save\(step=2\): .*step-00000004 is of a later step and stays"):
        saved.save(tmp_path, 2, keep=1)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000004"]
    saved.save(tmp_path, 5, keep=None)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000004", "step-00000005"]


def test_a_save_that_fails_says_so_and_takes_no_space(tmp_path: Path, saved: Run, monkeypatch: Any) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("castwise.checkpoint.folder._sync", full)
    with pytest.raises(CheckpointError, match=r"earlier checkpoints are unchanged.*No space left"):
        saved.save(tmp_path, 3)
    saving = saved.save(tmp_path, 3, asynchronous=True)
    with pytest.raises(CheckpointError, match="No space left"):
        saving.wait()
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    unseen = saved.save(tmp_path, 4, asynchronous=True)
    while not unseen.done:  # without a call of wait()
        time.sleep(0.01)
    monkeypatch.undo()
    with pytest.warns(UserWarning, match="checkpoint of step 4 was not saved: .*No space left"):
        saved.save(tmp_path, 5)
    assert checkpoint.newest(tmp_path).step == 5


@pytest.mark.parametrize("moment", range(1, 6))
def test_a_disk_that_is_full_at_any_moment_leaves_whole_checkpoints(
    tmp_path: Path, saved: Run, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    count = itertools.count(1)
    fsync = os.fsync

    def full(handle: int) -> None:
        if next(count) == moment:
            raise OSError(28, "No space left on device")
        fsync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"save\(step=3\): .*step-00000003.*No space left") as error:
            saved.save(tmp_path, 3)
    renamed = "step-00000003" in names(tmp_path)
    assert ("is complete, but" in str(error.value)) == renamed == (moment == 5)
    assert ("earlier checkpoints are unchanged" in str(error.value)) != renamed
    assert names(tmp_path)[:2] == ["step-00000001", "step-00000002"]
    assert len(names(tmp_path)) == 2 + renamed
    assert checkpoint.newest(tmp_path).step == 2 + renamed


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path, saved: Run) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / ".lock").symlink_to(tmp_path / "victim")
    with pytest.raises(
        CheckpointError, match=r"\.lock, which names the process that saves there, .*: it is a link\. Delete"
    ):
        saved.save(other, 1)
    assert not (tmp_path / "victim").exists()


# --- torch.distributed.checkpoint itself --------------------------------------------------------------------


def test_tools_for_safetensors_read_the_weights(tmp_path: Path, saved: Run) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    saved.save(
        tmp_path, 3, extra=[torch.tensor(2j, dtype=torch.complex128), torch.zeros(2, 0), torch.ones(3).bool()]
    )
    tensors = load_file(tmp_path / "step-00000003" / "rank-00000.safetensors")
    want = saved.amp.model_state_dict(saved.model)
    assert {name.removeprefix("model.") for name in tensors if name.startswith("model.")} == want.keys()
    assert all(torch.equal(tensors[f"model.{key}"], value.cpu()) for key, value in want.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@pytest.mark.parametrize("plan", ["fp16-master", "bf16-master"])
def test_session_scaler_and_masters_are_stateful(tmp_path: Path, plan: str) -> None:
    run = Run(plan)
    run.train(0)
    attachment = masters.attachment_of(run.optimizer)
    assert attachment is not None
    with torch.no_grad():
        run.model.into.bias.fill_(3.0)  # changed by hand; saving brings the masters up to date
    state: dict[str, Any] = {"amp": run.amp, "masters": attachment}
    state |= {"scaler": run.amp.scaler} if run.amp.scaler is not None else {}
    assert all(isinstance(item, Stateful) for item in state.values())
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    want = {name: value.clone() for name, value in attachment.state_dict().items()}
    assert set(want) == {"conv.weight", "conv.bias", "into.weight", "into.bias", "back.weight"}
    scale = run.amp.state_dict()
    run.train(4)
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    got = attachment.state_dict()
    assert all(torch.equal(got[name], value) for name, value in want.items())
    assert torch.equal(got["into.bias"], torch.full((6,), 3.0))
    for name, parameter in run.model.named_parameters():
        if name in want:
            assert torch.equal(parameter, want[name].to(parameter.dtype)), name
    assert run.amp.state_dict() == scale
    run.train(4, 1)


def test_masters_without_a_model_go_by_position(tmp_path: Path) -> None:
    params = [nn.Parameter(torch.full((2,), 0.1).bfloat16()) for _ in range(2)]
    optimizer = torch.optim.SGD(params, 0.1)
    attachment = masters.attach(optimizer)
    assert list(attachment.state_dict()) == ["0", "1"]
    attachment.load_state_dict({"0": torch.full((2,), 1 / 3), "1": torch.ones(2)})
    assert torch.equal(attachment.masters[0], torch.full((2,), 1 / 3))
    assert torch.equal(params[0], torch.full((2,), 1 / 3).bfloat16())
    with pytest.raises(CheckpointError, match="missing, unknown or of another shape: 1, 2; load the state"):
        attachment.load_state_dict({"0": torch.ones(2), "2": torch.ones(2)})
    with pytest.raises(CheckpointError, match="another shape: 1;"):
        attachment.load_state_dict({"0": torch.zeros(2), "1": torch.ones(3)})
    assert torch.equal(attachment.masters[0], torch.full((2,), 1 / 3))
