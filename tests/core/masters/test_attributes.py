"""Attributes set on a parameter by users or optimizers are visible on both the parameter and its master."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import castwise
from castwise.core.masters import master_of
from tests.core.masters.presets import MASTERS
from tests.here import DEVICE


@pytest.fixture(params=["plain", "dtensor"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[nn.Module]:
    """Return two layers, one of them optionally sharded over a mesh of this process only."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    if request.param == "plain":
        yield model
        return
    if DEVICE != "cpu":
        pytest.skip("the mesh is on the CPU")
    if not dist.is_available():
        pytest.skip("this torch is built without torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield parallelize_module(
        model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel(), "1": ColwiseParallel()}
    )
    dist.destroy_process_group()


class Faster(torch.optim.Optimizer):
    """SGD with an eight times higher rate for parameters marked ``fast``; it counts its updates on the parameter."""

    def __init__(self, params: Any, lr: float = 2**-6) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * group["lr"] * (8 if getattr(p, "fast", False) else 1))
                    p.updates = getattr(p, "updates", 0) + 1


def session(plan: Any, model: nn.Module, kind: Any = Faster) -> tuple[castwise.Amp, Any]:
    optimizer = kind(model.parameters())
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model, optimizer)
    return amp, optimizer


def held(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.cpu  # some cases use a CPU mesh
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("plan", MASTERS)
def test_the_optimizer_sees_what_is_set_on_parameters(plan: str, when: str, model: nn.Module) -> None:
    start = [p.detach().clone() for p in model.parameters()]
    params = list(model.parameters())
    if when == "before":
        params[0].fast = True  # type: ignore[attr-defined]
    amp, optimizer = session(castwise.Plan.parse(f"{plan}+loss_scale=none"), model)
    if when == "after":
        params[0].fast = True  # type: ignore[attr-defined]
    for p in params:
        p.grad = torch.ones_like(p, dtype=torch.float32)
    optimizer.step()
    for i, (p, q) in enumerate(zip(params, start, strict=True)):
        assert torch.equal(held(optimizer)[i].detach().double(), q.sub_(2**-3 if i == 0 else 2**-6).double())
        assert p.updates == held(optimizer)[i].updates == 1  # type: ignore[attr-defined]
    amp.close()
    assert [(getattr(p, "fast", False), p.updates) for p in params] == [(True, 1)] + [(False, 1)] * 3  # type: ignore[attr-defined]
    assert held(optimizer) == params


def test_attributes_are_set_seen_and_deleted_on_either_side(model: nn.Module) -> None:
    _, optimizer = session("bf16-master", model)
    p: Any = next(model.parameters())
    master = held(optimizer)[0]
    master.first, p.second = 1, 2
    assert (p.first, master.second) == (1, 2)
    assert vars(master) is vars(p)
    assert hasattr(master, "second")
    del master.second
    del p.first
    assert not hasattr(p, "second")
    assert not hasattr(master, "first")
    with pytest.raises(AttributeError, match="third"):
        master.third  # noqa: B018
    with pytest.raises(AttributeError, match="third"):
        del master.third


def test_what_describes_the_tensor_itself_is_the_masters_own(model: nn.Module) -> None:
    _, optimizer = session("bf16-master", model)
    p, master = next(model.parameters()), held(optimizer)[0]
    assert (p.dtype, master.dtype) == (torch.bfloat16, torch.float32)
    assert not hasattr(master, "step")
    torch._dynamo.mark_static_address(master)
    assert hasattr(master, "_dynamo_static_input_type")
    assert not hasattr(p, "_dynamo_static_input_type")


class Expert(nn.Parameter):
    """A parameter subclass with attributes, as libraries define them."""

    __slots__ = ("rank",)
    kind = "expert"

    @property
    def share(self) -> float:
        return self.weight / 2

    @share.setter
    def share(self, value: float) -> None:
        self.weight = value * 2

    def describe(self) -> str:
        return f"{self.kind} {self.rank} {self.dtype}"


def test_classes_of_parameters_keep_their_properties_slots_and_methods() -> None:
    model = nn.Linear(4, 2)
    p: Any = Expert(model.weight.data)
    p.weight, p.rank, model.weight = 4.0, 1, p
    amp, optimizer = session("bf16-master", model)
    master = held(optimizer)[0]
    assert isinstance(master, Expert)
    assert isinstance(p, Expert)
    assert (master.kind, master.share, master.describe()) == ("expert", 2.0, "expert 1 torch.float32")
    assert p.describe() == "expert 1 torch.bfloat16"
    master.share, master.rank = 5.0, 2
    assert (p.weight, p.rank) == (10.0, 2)
    assert master.describe() == "expert 2 torch.float32"
    amp.close()
    assert type(p) is Expert
    assert p.describe() == "expert 2 torch.float32"


def test_an_attribute_may_have_the_name_of_a_method_of_tensors() -> None:
    model = nn.Linear(4, 2)
    p: Any = model.weight
    p.type = "muon"
    _, optimizer = session("bf16-master", model)
    master = held(optimizer)[0]
    assert master.type == "muon"
    master.norm = "none"
    assert p.norm == master.norm == "none"
    del master.norm
    assert callable(p.norm)
    assert callable(master.norm)


def test_hooks_set_on_a_master_are_the_parameters() -> None:
    model = nn.Linear(4, 2)
    amp, optimizer = session("bf16-master", model)
    seen: list[Any] = []
    held(optimizer)[0].register_hook(lambda g: g * 2)
    held(optimizer)[0].register_post_accumulate_grad_hook(seen.append)
    amp.backward(model(torch.ones(1, 4)).sum())
    assert seen == [model.weight]
    assert torch.equal(held(optimizer)[0].grad, torch.full((2, 4), 2.0))


def test_per_sample_gradients_reach_an_optimizer_that_reads_them() -> None:
    """As in Opacus: its module sets ``grad_sample``, and its optimizer computes gradients from it in the parameter's
    dtype.
    """
    model = nn.Linear(4, 2)
    _, optimizer = session("bf16-master", model)
    for p in model.parameters():
        p.grad_sample = torch.ones(3, *p.shape, dtype=p.dtype)  # type: ignore[attr-defined]
    for p in held(optimizer):
        p.summed_grad = p.grad_sample.sum(0)
        p.grad = p.summed_grad
    assert torch.equal(model.weight.grad, torch.full((2, 4), 3.0))  # type: ignore[arg-type]
    optimizer.step()
    assert model.weight.updates == 1  # type: ignore[attr-defined]


# --- copies and pickles -----------------------------------------------------------------------------------------


class Anchored(Faster):
    """Keeps the initial parameters in its state, as GrokAdamW does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for p in held(self):
            self.state[p]["anchor"] = p


def trained(model: nn.Module, kind: Any = Anchored) -> tuple[castwise.Amp, Any]:
    for p in model.parameters():
        p.fast = True  # type: ignore[attr-defined]
    amp, optimizer = session("bf16-master", model, kind)
    amp.backward(model(torch.ones(3, 4)).sum())
    amp.step(optimizer)
    optimizer.zero_grad()
    return amp, optimizer


def file_of(what: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return file


def test_masters_in_a_saved_state_load_with_weights_only() -> None:
    model = nn.Linear(4, 2)
    _, optimizer = trained(model)
    loaded = torch.load(file_of(optimizer.state_dict()), weights_only=True)
    for entry, master in zip(loaded["state"].values(), held(optimizer), strict=True):
        assert type(entry["anchor"]) is nn.Parameter
        assert entry["anchor"].fast
        assert torch.equal(entry["anchor"], master)


@pytest.mark.parametrize("way", ["pickle", "torch"])
def test_pickled_optimizers_have_the_parameters_of_the_pickled_model(way: str) -> None:
    """The result equals what :meth:`Amp.close` leaves: fp32, with attributes, without masters."""
    model = nn.Linear(4, 2)
    _, optimizer = trained(model)
    both: Any = pickle.loads(pickle.dumps((model, optimizer))) if way == "pickle" else None
    both = both or torch.load(file_of((model, optimizer)), weights_only=False)
    for p, q, master in zip(both[0].parameters(), held(both[1]), held(optimizer), strict=True):
        assert p is q
        assert torch.equal(q, master)
        assert p.fast
    both[0](torch.ones(3, 4)).sum().backward()
    before = both[0].weight.detach().clone()
    both[1].step()
    assert not torch.equal(both[0].weight, before)


def test_deep_copies_share_attributes_among_themselves_alone(model: nn.Module) -> None:
    _, optimizer = trained(model)
    copied, other = copy.deepcopy((model, optimizer))
    for p, q, original in zip(copied.parameters(), held(other), model.parameters(), strict=True):
        assert master_of(p) is q
        q.fast = "copied"
        assert p.fast == "copied"
        assert original.fast is True  # type: ignore[attr-defined]


def test_tables_by_parameter_find_masters_and_the_other_way_round() -> None:
    model = nn.Linear(4, 2)
    _, optimizer = trained(model, lambda params: torch.optim.Adam(params, lr=0.01))
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    assert [names[master] for master in held(optimizer)] == ["weight", "bias"]
    table = dict.fromkeys(held(optimizer), "here")
    assert [table[p] for p in model.parameters()] == ["here", "here"]
    assert optimizer.state[model.weight] is optimizer.state[held(optimizer)[0]]
