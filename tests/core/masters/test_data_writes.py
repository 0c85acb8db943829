"""Writes to parameters that autograd does not count reach the masters before the next step."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.dlpack
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import castwise
from castwise.core.masters import attachment_of, master_of
from castwise.core.masters.sample import READ, Sample
from tests.core.masters.presets import MASTERS
from tests.here import DEVICE


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def session(plan: Any = "bf16-master", options: Any = None) -> tuple[Any, Any, Any]:
    model = net()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, **(options or {}))
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model, optimizer)
    return amp, model, optimizer


def step(amp: Any, model: Any, optimizer: Any, seed: int) -> None:
    x = torch.randn(8, 16, generator=torch.Generator(DEVICE).manual_seed(seed))
    amp.backward(model(x).square().mean())
    amp.step(optimizer)
    optimizer.zero_grad()


def clamp(tensors: list[Tensor], seed: int) -> None:
    for t in tensors:
        t.clamp_(-0.05, 0.05)


def initialise(tensors: list[Tensor], seed: int) -> None:
    if seed == 2:
        tensors[0].normal_(generator=torch.Generator(DEVICE).manual_seed(seed))


def one_row(tensors: list[Tensor], seed: int) -> None:
    tensors[0][seed].zero_()


def one_element(tensors: list[Tensor], seed: int) -> None:
    tensors[0][seed, seed] = 7


def mask(tensors: list[Tensor], seed: int) -> None:
    tensors[0].mul_(torch.arange(16).remainder(2))


def through_a_view(tensors: list[Tensor], seed: int) -> None:
    tensors[0].view(-1)[seed * 3 : seed * 3 + 2].copy_(torch.ones(2))


def foreach(tensors: list[Tensor], seed: int) -> None:
    torch._foreach_mul_(tensors, 0.5)


def interpolated(tensors: list[Tensor], seed: int) -> None:
    torch._foreach_lerp_(tensors, [torch.ones_like(t) for t in tensors], 0.25)


def functions_of_init(tensors: list[Tensor], seed: int) -> None:
    nn.init.eye_(tensors[0])


WRITES = [
    clamp,
    initialise,
    one_row,
    one_element,
    mask,
    through_a_view,
    foreach,
    interpolated,
    functions_of_init,
]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
@pytest.mark.parametrize("plan", MASTERS)
def test_writes_through_data_are_writes(plan: str, write: Callable[[list[Tensor], int], None]) -> None:
    """The result equals that of the same writes counted by autograd; elements not written keep their low-order bits."""
    ends = []
    for data in (True, False):
        amp, model, optimizer = session(plan)
        for seed in range(4):
            step(amp, model, optimizer, seed)
            with torch.no_grad():
                write([p.data if data else p for p in model.parameters()], seed)
        step(amp, model, optimizer, 4)
        ends.append([master.detach() for master in attachment_of(optimizer).masters])  # type: ignore[union-attr]
    for got, want in zip(*ends, strict=True):
        assert torch.equal(got, want)


@pytest.mark.cpu  # the mesh is on the CPU
@pytest.mark.skipif(not dist.is_available(), reason="this torch is built without torch.distributed")
@pytest.mark.parametrize("local", [False, True])
def test_writes_to_whole_shards_are_found_at_the_next_step(local: bool, tmp_path: Path) -> None:
    """DTensors do not count writes through ``data``."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model: Any = parallelize_module(net(), init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})
        amp = castwise.Amp("bf16-master", device=DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        amp.prepare(model, optimizer)
        for number in range(3):
            step(amp, model, optimizer, number)
            data = model[0].weight.data.to_local() if local else model[0].weight.data
            data.clamp_(-0.01, 0.01).mul_(number + 1)
            want = model[0].weight.to_local().detach().clone()
            step(amp, model, optimizer, number)
            assert torch.equal(model[0].weight.to_local(), want)
            master: Any = master_of(model[0].weight)
            assert torch.equal(master.to_local().detach().bfloat16(), want)
    finally:
        dist.destroy_process_group()


def test_an_alias_of_data_is_followed_as_long_as_it_is_held() -> None:
    amp, model, optimizer = session()
    alias, row = model[0].weight.data, model[0].weight.data[3]
    for seed in range(3):
        step(amp, model, optimizer, seed)
        alias.add_(1)
        row.fill_(seed)
        want = model[0].weight.detach().float()
        attachment_of(optimizer).settle()  # type: ignore[union-attr]
        master: Any = master_of(model[0].weight)
        assert torch.equal(master.detach().bfloat16().float(), want)
        assert (master[3] == seed).all()


@pytest.mark.parametrize("way", ["vector", "assigned", "swapped", "inference"])
def test_other_ways_of_writing_whole_parameters_are_taken_over(way: str) -> None:
    amp, model, optimizer = session("fp16-master+regions.type:Linear=params:fp16")
    step(amp, model, optimizer, 0)
    with torch.inference_mode(way == "inference"), torch.no_grad():
        if way == "vector":
            vector_to_parameters(parameters_to_vector(model.parameters()) * 2, model.parameters())
        for p in model.parameters():
            if way == "assigned":
                p.data = p.data * 2
            elif way == "swapped":
                p.data, kept = torch.full_like(p, 0.5), p.data
                p.data = kept.mul_(2)
            elif way == "inference":
                p.mul_(2)
    want = [p.detach().clone() for p in model.parameters()]
    optimizer.param_groups[0]["lr"] = 0.0
    step(amp, model, optimizer, 1)
    for p, q in zip(model.parameters(), want, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(master_of(p).detach().half(), q)  # type: ignore[union-attr]


def test_data_may_be_written_between_forward_and_backward() -> None:
    """As in torch, a write through ``data`` does not invalidate the tensors that backward needs."""
    amp, model, optimizer = session()
    loss = model(torch.ones(2, 16)).square().mean()
    model[2].weight.data.mul_(0.5)
    amp.backward(loss)
    amp.step(optimizer)
    assert not model[2].weight.data.requires_grad
    assert type(model[2].weight.data) is Tensor


def test_a_write_through_data_fails_no_backward_that_needs_what_was_read_before() -> None:
    """Such as a codebook that is read without gradient and updated in the same forward."""
    amp, model, optimizer = session()
    for seed in range(2):
        h = model(torch.randn(8, 16, generator=torch.Generator(DEVICE).manual_seed(seed)))
        loss = (h.bfloat16() @ model[2].weight.data).square().mean()
        model[2].weight.data.mul_(0.5)
        amp.backward(loss)
        want = model[2].weight.detach().clone()
        attachment_of(optimizer).settle()  # type: ignore[union-attr]
        assert torch.equal(master_of(model[2].weight).detach().bfloat16(), want)  # type: ignore[union-attr]
        amp.step(optimizer)
        optimizer.zero_grad()


def test_data_that_is_read_often_stays_followed_and_takes_no_memory() -> None:
    _, model, optimizer = session()
    weight = model[0].weight
    master: Any = master_of(weight)
    alias, row = weight.data, weight.data[3]
    for seed in range(200):
        weight.data.sum()
        if seed % 50 == 0:
            alias.fill_(seed)
            row.fill_(seed + 1)
            attachment_of(optimizer).settle()  # type: ignore[union-attr]
            assert (master[0] == seed).all()
            assert (master[3] == seed + 1).all()
    assert len(master.data_writes._out) < 40
    written = master.data_writes.count
    for _ in range(100):
        weight.data.add_(1)
    assert master.data_writes.count == written + 100


def followed() -> set[str]:
    return {name for name in ("data", "clone") if name in vars(nn.Parameter)}


def test_parameters_are_followed_while_there_are_masters() -> None:
    gc.collect()
    assert not followed()
    first, model, optimizer = session()
    second, other, dropped = session()
    first.close()
    assert followed()
    other[0].weight.data.fill_(2)
    attachment_of(dropped).settle()  # type: ignore[union-attr]
    assert (master_of(other[0].weight) == 2).all()  # type: ignore[union-attr]
    del second, dropped, other
    gc.collect()
    assert not followed()
    assert nn.Parameter.__deepcopy__.__module__ == "torch.nn.parameter"
    amp = castwise.Amp("bf16-master", device=DEVICE)
    amp.prepare(model, optimizer)
    assert followed()
    amp.close()
    assert not followed()


def test_what_others_put_in_its_place_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    amp, model, _ = session()
    ours: Any = nn.Parameter.clone
    monkeypatch.setattr(nn.Parameter, "clone", lambda self: ours(self))
    amp.close()
    assert followed() == {"clone"}
    amp, model, _ = session()
    assert torch.equal(model[0].weight.clone(), model[0].weight)
    monkeypatch.undo()
    amp.close()
    assert not followed()


def test_copies_in_inference_mode_are_made() -> None:
    _, model, _ = session()
    with torch.inference_mode():
        assert torch.equal(copy.deepcopy(model)[0].weight, model[0].weight.clone())
        assert torch.equal(copy.deepcopy(model[0].weight), model[0].weight.data)


# Compiled code is checked at each step; on a device, a write is found too late and causes a warning.
@pytest.mark.cpu
def test_under_torch_compile_data_is_read_and_written() -> None:
    amp, model, optimizer = session()

    @torch.compile(backend="eager", fullgraph=True)
    def halve(x: Tensor) -> Tensor:
        model[0].weight.data.mul_(0.5)
        return model(x)

    before = model[0].weight.detach().clone()
    halve(torch.ones(2, 16))
    assert torch.equal(model[0].weight, before / 2)
    optimizer.param_groups[0]["lr"] = 0.0
    step(amp, model, optimizer, 0)
    assert torch.equal(model[0].weight, before / 2)


class Own(nn.Parameter):
    """A user's subclass, which torch.compile traces into."""


@pytest.mark.parametrize("kind", [nn.Parameter, Own])
def test_compiled_code_that_reads_data_and_clones_has_no_breaks(kind: type[nn.Parameter]) -> None:
    amp, model, optimizer = session()
    amp.close()
    model[0].weight = kind(model[0].weight.detach())
    optimizer.param_groups[0]["params"][0] = model[0].weight
    amp = castwise.Amp("bf16-master", device=DEVICE)
    amp.prepare(model, optimizer)

    @torch.compile(backend="eager", fullgraph=True)
    def norm() -> Tensor:
        return model[0].weight.data.square().sum() + model[0].weight.clone().sum()

    want = model[0].weight.detach()
    assert torch.equal(norm().detach(), want.square().sum() + want.sum())


def test_parameters_with_masters_are_ordinary_ones() -> None:
    """Printing, pickling and wrapping in another Parameter work as for any parameter."""
    amp, model, _ = session()
    p = model[0].weight
    assert type(p) is nn.Parameter
    assert type(p.data) is Tensor
    assert repr(p) == repr(nn.Parameter(p.detach()))
    assert type(pickle.loads(pickle.dumps(p))) is nn.Parameter
    assert nn.Parameter(p).data_ptr() == p.data_ptr()
    nn.utils.parametrizations.weight_norm(copy.deepcopy(model)[0])
    p.data.mul_(2)
    amp.close()
    assert type(p.data) is Tensor


def test_data_of_parameters_without_masters_is_as_ever() -> None:
    session()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        p = nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=dtype.is_floating_point)
        p.data.add_(1)
        assert p._version == 0
        p.data = torch.zeros(2, dtype=dtype)
        assert p.shape == (2,)
        with pytest.raises(RuntimeError, match="Deleting tensor data is not allowed"):
            del p.data


# --- writes that torch does not see ------------------------------------------------------------------------------


def as_numpy(tensor: Tensor) -> Any:
    return tensor.detach().view(torch.int16).numpy()


def by_numpy(p: Tensor) -> None:
    as_numpy(p)[:] = as_numpy(p.detach() * 2)


def by_dlpack(p: Tensor) -> None:
    torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(p.detach())).mul_(2)


@pytest.mark.cpu  # numpy writes to host memory
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("write", [by_numpy, by_dlpack])
def test_writes_past_torch_are_found_at_the_next_step(write: Callable[[Tensor], None], layout: Any) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)).to(memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    amp = castwise.Amp("bf16-master", device=DEVICE)
    amp.prepare(model, optimizer)
    for number in range(3):
        p = list(model.parameters())[number]
        write(p)
        want, others = p.detach().clone(), [master_of(q).detach().clone() for q in model.parameters()]  # type: ignore[union-attr]
        amp.backward(model(torch.ones(2, 3, 4, 4)).sum())
        amp.step(optimizer)
        assert torch.equal(p, want)
        others[number] = want.float()
        for q, master in zip(model.parameters(), others, strict=True):
            assert torch.equal(master_of(q), master)  # type: ignore[arg-type]


@pytest.mark.cpu  # numpy writes to host memory
def test_a_part_that_is_written_again_and_again_is_met() -> None:
    amp, model, optimizer = session()
    for seed in range(60):
        as_numpy(model[0].weight)[2] = 16256  # 1 in bf16
        step(amp, model, optimizer, seed)
        if (master_of(model[0].weight)[2] > 0.9).all():  # type: ignore[index]
            return
    raise AssertionError("60 steps missed a write to a sixteenth of a parameter")


def test_the_sample_says_nothing_where_parameters_are_their_masters() -> None:
    """Covers NaN, infinities, zeros of both signs, and empty and overlapping tensors."""
    values = torch.tensor([float("nan"), float("inf"), -0.0, 0.0, 1.00001, 7e4])
    sources = [values, values.view(2, 3).t(), torch.ones(()), torch.ones(0), torch.ones(1).expand(4)]
    for dtype in (torch.bfloat16, torch.float16):
        sample = Sample([s.to(dtype) for s in sources], sources)
        assert not any(sample.differs() for _ in range(2 * READ))


def test_the_sample_meets_every_element() -> None:
    source = torch.zeros(1000)
    for at in (0, 1, 499, 998, 999):
        target = source.bfloat16()
        target[at] = 1
        sample = Sample([target], [source])
        assert any(sample.differs() for _ in range(4000)), at
