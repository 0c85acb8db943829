"""Optimizer options and state in checkpoints: which optimizer and torch version they fit, and rollback after a failure."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from castwise.core import checkpoint
from castwise.errors import CheckpointError
from tests.core.checkpoint.test_checkpoint import Run, same
from tests.core.checkpoint.test_checkpoint_forged import everything, forge, refused, values_of, with_values
from tests.here import DEVICE


class Two(nn.Module):
    """Two weights of one shape, which could be mistaken for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.a = nn.Linear(16, 16)
        self.b = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(self.conv(x).flatten(1)))


def saved_run(folder: Path, make: Any = "adamw", plan: str = "bf16-master") -> tuple[Run, Path]:
    run = Run(plan, make, model=Two)
    run.train(0, 2)
    run.save(folder, 1)
    run.train(2, 1)
    return run, folder / "step-00000001"


def as_of(path: Path, version: str) -> None:
    manifest = json.loads((path / "checkpoint.json").read_text())
    forge(path, {**manifest, "torch": version})


@pytest.mark.parametrize("where", ["state", "model", "options"])
def test_tensors_of_another_weight_are_refused(tmp_path: Path, where: str) -> None:
    run, path = saved_run(tmp_path)
    values = values_of(path)
    one = values["optimizers"][0]
    if where == "state":
        one["state"]["a.weight"] = one["state"]["b.weight"]
    elif where == "model":
        values["model"]["a.weight"] = values["model"]["b.weight"]
    else:
        lr = [key for key, _ in one["options"][0]["dict"]].index("lr")
        one["options"][0]["dict"][lr][1] = {"tensor": "optimizer.0.a.weight.step"}
    with_values(path, values)
    assert "a tensor under the name of another entry" in refused(run, path)


def with_option(path: Path, key: str, value: Any) -> None:
    values = values_of(path)
    values["optimizers"][0]["options"][0]["dict"].append([key, value])
    with_values(path, values)


@pytest.mark.parametrize(
    ("key", "value"), [("forged", 3), ("eval", "x"), ("initial_lr", "high"), ("max_lr", None)]
)
def test_options_that_torchs_optimizers_do_not_have_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    run, path = saved_run(tmp_path)
    with_option(path, key, value)
    assert f"{key} of group 0" in refused(run, path)


def test_options_of_ones_own_are_loaded_where_the_group_has_them(tmp_path: Path) -> None:
    """The user's own options load once the group has them, as the error message advises."""
    run, _ = saved_run(tmp_path)
    run.optimizer.param_groups[0]["depth"] = 2
    run.save(tmp_path, 2)
    fresh = Run("bf16-master", model=Two)
    assert "set them in its param_groups first" in refused(fresh, tmp_path / "step-00000002")
    fresh.optimizer.param_groups[0]["depth"] = 0
    fresh.load(tmp_path / "step-00000002")
    assert fresh.optimizer.param_groups[0]["depth"] == 2


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 3),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=True),
        lambda o: torch.optim.swa_utils.SWALR(o, 0.1),
    ],
)
def test_options_of_schedulers_are_loaded_before_there_is_one(
    tmp_path: Path, schedule: Callable[..., Any]
) -> None:
    run, _ = saved_run(tmp_path)
    schedule(run.optimizer)
    run.save(tmp_path, 2)
    fresh = Run("bf16-master", model=Two)
    fresh.load(tmp_path / "step-00000002")
    want, got = run.optimizer.param_groups[0], fresh.optimizer.param_groups[0]
    assert {k: v for k, v in got.items() if k != "params"} == {k: v for k, v in want.items() if k != "params"}


def test_options_of_another_torch_are_left_out_and_those_it_had_not_stay(tmp_path: Path) -> None:
    """Newer torch versions add options: Adam got ``decoupled_weight_decay`` in 2.7."""
    run, path = saved_run(tmp_path)
    values = values_of(path)
    options = values["optimizers"][0]["options"][0]["dict"]
    options[:] = [[key, value] for key, value in options if key != "decoupled_weight_decay"]
    options.append(["of_a_later_torch", True])
    with_values(path, values)
    as_of(path, "9.9.0")
    fresh = Run("bf16-master", model=Two)
    keys = fresh.optimizer.param_groups[0].keys()
    fresh.load(path)
    assert fresh.optimizer.param_groups[0].keys() == keys
    assert fresh.optimizer.param_groups[0]["decoupled_weight_decay"] is True
    fresh.train(2, 1)
    same(fresh.state() | {"rng": 0}, run.state() | {"rng": 0})


class Counts(torch.optim.SGD):
    """Adds an option in its first step, as many optimizers outside torch do."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        return super().step(closure)


def test_optimizers_outside_of_torch_may_add_options_as_they_step(tmp_path: Path) -> None:
    run, path = saved_run(tmp_path, lambda p: Counts(p, 0.05))
    fresh = Run("bf16-master", lambda p: Counts(p, 0.05), model=Two)
    fresh.load(path)
    assert fresh.optimizer.param_groups[0]["step"] == 2
    assert run.optimizer.param_groups[0]["step"] == 3


class InPlace(torch.optim.Optimizer):
    """Loads into its existing tensors, including those kept outside its state; can fail at the end."""

    fails = False

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.slow = {"count": torch.zeros(()), "seen": [torch.zeros(2)]}
        self.inner = torch.optim.SGD([torch.zeros(2)], lr, momentum=0.9)
        self.inner.state["kept"] = {"buffer": torch.zeros(2)}
        self.loads = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state.setdefault("sum", torch.zeros_like(parameter)).add_(parameter.grad)
                    state.setdefault("past", []).append(state["sum"].mean())
                    parameter.sub_(group["lr"] * state["sum"])
        self.slow["count"] += 1  # type: ignore[operator]

    def load_state_dict(self, state_dict: Any) -> None:
        params = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, state in state_dict["state"].items():
            self.state[params[number]]["sum"].copy_(state["sum"])
            self.state[params[number]]["past"].clear()
        self.state[params[0]]["new"] = 1
        self.slow["count"].add_(100)  # type: ignore[union-attr]
        self.slow["seen"][0].add_(1)  # type: ignore[index]
        self.slow["more"] = []
        self.inner.state["kept"]["buffer"].add_(1)
        self.inner.param_groups[0]["lr"] = -1.0
        self.loads += 1
        for group in self.param_groups:
            group["lr"] = -1.0
            group["params"].reverse()
        if self.fails:
            raise RuntimeError("not this")


@pytest.mark.parametrize("plan", ["bf16-master", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("where", ["itself", "later"])
def test_optimizers_that_load_in_place_are_taken_back_whole(
    tmp_path: Path, plan: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the optimizer fails while it loads, or something fails after it, its state is restored."""
    run, path = saved_run(tmp_path, lambda p: InPlace(p, 0.05), plan)
    optimizer: Any = run.optimizer

    def picture() -> Any:
        return {
            **{k: v for k, v in everything(run).items() if "past" not in k},
            "past": repr([state["past"] for state in optimizer.state.values()]),
            "slow": repr(optimizer.slow),
            "inner": repr((dict(optimizer.inner.state), optimizer.inner.param_groups)),
            "attributes": sorted(vars(optimizer)),
            "loads": optimizer.loads,
            "params": [id(p) for group in optimizer.param_groups for p in group["params"]],
        }

    # `Run.state` clones only tensors
    monkeypatch.setattr(Run, "state", lambda self: {
        f"model.{k}": v.clone() for k, v in self.amp.model_state_dict(self.model).items()
    } | {f"{n}.sum": s["sum"].clone() for n, s in enumerate(self.optimizer.state.values())})  # fmt: skip
    before = picture()
    if where == "itself":
        optimizer.fails = True
        before["attributes"] = sorted(vars(optimizer))
    else:
        load, calls = run.amp.load_state_dict, iter([True, False])

        def refuse(state: Any) -> None:
            if next(calls):
                raise RuntimeError("not this")
            load(state)

        monkeypatch.setattr(run.amp, "load_state_dict", refuse)
    with pytest.raises(CheckpointError, match="nothing was changed: RuntimeError: not this"):
        checkpoint.load(path, **run.parts())
    same(picture(), before)


def test_single_numbers_of_state_keep_their_format_where_parameters_are_stored_low(tmp_path: Path) -> None:
    """NAdam's running product is fp32 beside bf16 parameters; torch's own loading would cast it to bf16."""
    import castwise

    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.NAdam(model.parameters(), 1e-2)
    amp = castwise.Amp("bf16-true", device=DEVICE)
    amp.prepare(model, optimizer)
    for _ in range(5):
        amp.backward(model(torch.ones(3, 4)).square().mean())
        amp.step(optimizer)
        optimizer.zero_grad()
    products = [state["mu_product"].clone() for state in optimizer.state.values()]
    path = checkpoint.save(tmp_path, 1, model=model, optimizers=optimizer, amp=amp).wait()
    checkpoint.load(path, model=model, optimizers=optimizer, amp=amp)
    now = [state["mu_product"] for state in optimizer.state.values()]
    assert [one.dtype for one in now] == [torch.float32] * 2
    assert all(map(torch.equal, now, products))
