"""Parameter and master share one fp32 gradient: cleared, clipped, scaled, accumulated and counted."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from castwise.core.masters import Master, attach, attachment_of, master_of, model_param_of, refresh_master
from castwise.errors import StateError
from tests.core.masters.test_masters_optimizers import Net, Weights, batches, lower, train
from tests.here import DEVICE


def prepared(kind: type[nn.Module] = Weights, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = kind()
    former = lower(model, torch.bfloat16, keep=nn.BatchNorm1d)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    attach(optimizer, model, originals=former)
    return model, optimizer


def held(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def backward(model: nn.Module, seed: int = 0) -> None:
    model(batches(seed + 1)[seed]).square().mean().backward()


def test_gradients_are_fp32_and_shared() -> None:
    """Reading either gives the same tensor."""
    model, optimizer = prepared()
    backward(model)
    for parameter, master in zip(model.parameters(), held(optimizer), strict=True):
        assert parameter.dtype is torch.bfloat16
        assert parameter.grad is master.grad
        assert parameter.grad.dtype is torch.float32


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("by", ["optimizer", "model"])
@pytest.mark.parametrize("to_none", [False, True])
def test_clearing_either_clears_both(by: str, to_none: bool, fused: bool) -> None:
    """``zero_grad`` of the optimizer or the model, to None or to zero."""
    model, optimizer = prepared(fused=fused)
    backward(model)
    (optimizer if by == "optimizer" else model).zero_grad(set_to_none=to_none)
    for parameter, master in zip(model.parameters(), held(optimizer), strict=True):
        if to_none:
            assert parameter.grad is None
            assert master.grad is None
        else:
            assert parameter.grad is master.grad
            assert not parameter.grad.any()


def test_del_clears_both() -> None:
    """``del p.grad`` clears the gradient as well."""
    model, optimizer = prepared()
    backward(model)
    del held(optimizer)[0].grad
    assert model.a.weight.grad is None


def test_clipping_the_model_clips_what_is_applied() -> None:
    """The user clips through the model's parameters; a plain SGD step then shows the gradient."""
    model = Weights()
    former = lower(model, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    attach(optimizer, model, originals=former)
    before = [m.detach().clone() for m in held(optimizer)]
    (model(batches(1)[0]).square().mean() * 1000).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    applied = torch.cat([(b - m.detach()).flatten() for b, m in zip(before, held(optimizer), strict=True)])
    # fp32 updates of weights below 1: each difference has a rounding error of 1e-7.
    assert applied.norm().item() == pytest.approx(0.5, rel=1e-4)


def test_microbatches_accumulate_in_fp32() -> None:
    """256 gradients of 1/256 after one of 256: bf16 would lose the small ones."""
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    attach(optimizer)
    (parameter.float() * 256).sum().backward()
    for _ in range(256):
        (parameter.float() / 256).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.item() == 257
    optimizer.step()
    assert held(optimizer)[0].item() == -257


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_torch_grad_scaler_unscales_and_skips(dtype: torch.dtype, fused: bool) -> None:
    """Torch's own scaler treats the masters as ordinary fp32 parameters."""
    torch.manual_seed(0)
    model = Weights()
    former = lower(model, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    attach(optimizer, model, originals=former)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    reference = [m.detach().clone() for m in held(optimizer)]
    grads = torch.autograd.grad(model(batches(1)[0]).square().mean(), list(model.parameters()))
    scaler.scale(model(batches(1)[0]).square().mean()).backward()
    scaler.unscale_(optimizer)
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        # Low-precision gradients of a loss 1024 times larger are the same up to rounding.
        torch.testing.assert_close(parameter.grad, grad.float(), rtol=1e-2, atol=1e-4)
    scaler.step(optimizer)
    scaler.update()
    assert all(not torch.equal(r, m.detach()) for r, m in zip(reference, held(optimizer), strict=True))

    after = [m.detach().clone() for m in held(optimizer)]
    optimizer.zero_grad()
    backward(model)
    assert model.a.weight.grad is not None
    model.a.weight.grad[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    for master, parameter, want in zip(held(optimizer), model.parameters(), after, strict=True):
        assert torch.equal(master.detach(), want)
        assert torch.equal(parameter.detach(), want.to(dtype))


def test_double_backward_reaches_the_masters() -> None:
    """A gradient penalty: the second backward accumulates into the same gradient."""
    model, optimizer = prepared()
    loss = model(batches(1)[0]).square().mean()
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    penalty = sum((g.float().square().sum() for g in grads), torch.zeros(()))
    (loss + penalty).backward()
    assert all(m.grad is not None and m.grad.dtype is torch.float32 for m in held(optimizer))


def test_a_low_gradient_left_by_others_is_widened_in_place() -> None:
    """If other code writes bf16 gradients (grad_dtype lifted), model and master still share one fp32 tensor."""
    model, optimizer = prepared()
    weight = model.a.weight
    weight.grad_dtype = None
    weight.grad = torch.ones_like(weight)
    master = held(optimizer)[0]
    assert master.grad is weight.grad
    assert weight.grad.dtype is torch.float32
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert master.grad is weight.grad


def test_a_low_gradient_is_refused_where_it_could_not_be_shared() -> None:
    """The error is torch's: the gradient must have the parameter's grad_dtype."""
    model, _ = prepared()
    with pytest.raises(RuntimeError, match="grad_dtype"):
        model.a.weight.grad = torch.ones_like(model.a.weight)


def test_live_gradients_are_widened_when_masters_are_attached() -> None:
    """Attaching between backward and step loses no gradient."""
    model = Weights()
    former = lower(model, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model)
    before = model.a.weight.grad.clone()
    attach(optimizer, model, originals=former)
    assert model.a.weight.grad.dtype is torch.float32
    assert torch.equal(model.a.weight.grad, before.float())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed((x[:, 0].abs() * 3).long() % 8)).float()


def test_tied_weights_keep_one_master() -> None:
    """The gradients of both uses are summed in the shared gradient."""
    model, optimizer = prepared(Tied)
    assert len(held(optimizer)) == 1
    backward(model)
    optimizer.step()
    assert model.head.weight is model.embed.weight
    assert master_of(model.head.weight) is held(optimizer)[0]
    assert torch.equal(model.head.weight.detach(), held(optimizer)[0].detach().bfloat16())


def test_frozen_parameters_get_a_master_when_unfrozen() -> None:
    """They have no master while frozen, and one from the next step after unfreezing."""
    model = Weights()
    former = lower(model, torch.bfloat16)
    model.a.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    attach(optimizer, model, originals=former)
    assert held(optimizer)[0] is model.a.weight
    backward(model)
    optimizer.step()
    assert master_of(model.a.weight) is None
    model.a.weight.requires_grad_(True)
    backward(model)
    optimizer.step()
    assert isinstance(held(optimizer)[0], Master)
    assert optimizer.state[held(optimizer)[0]]["momentum_buffer"].dtype is torch.float32
    assert torch.equal(model.a.weight.detach(), held(optimizer)[0].detach().bfloat16())


def test_parameters_added_later_get_masters_if_they_are_the_models() -> None:
    """``add_param_group`` after attach: low-precision parameters of other models are left alone."""
    torch.manual_seed(0)
    model = Weights()
    former = lower(model, torch.bfloat16)
    optimizer = torch.optim.AdamW([model.a.weight], lr=0.01)
    attach(optimizer, model, originals=former)
    train(model, optimizer, 2)
    stranger = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer.add_param_group({"params": [model.b.weight, stranger], "lr": 0.5})
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    group = optimizer.param_groups[1]["params"]
    assert group[0] is master_of(model.b.weight)
    assert group[1] is stranger
    assert optimizer.param_groups[1]["lr"] == 0.5
    assert optimizer.state[group[0]]["exp_avg"].dtype is torch.float32
    assert torch.equal(model.b.weight.detach(), group[0].detach().bfloat16())


def test_a_parameter_cannot_be_added_twice() -> None:
    """Torch's own check detects that the optimizer already has the parameter, as its master."""
    model, optimizer = prepared()
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [model.a.weight]})


def test_two_optimizers_share_one_master() -> None:
    """A parameter updated by two optimizers has one fp32 value."""
    model = Weights()
    former = lower(model, torch.bfloat16)
    one = torch.optim.SGD(model.parameters(), lr=0.1)
    two = torch.optim.SGD([model.a.weight], lr=0.2)
    attach(one, model, originals=former)
    attach(two, model, originals=former)
    assert held(two)[0] is held(one)[0]
    start = held(one)[0].detach().clone()
    model.a.weight.grad = torch.full(model.a.weight.shape, 1e-4)
    for _ in range(3):
        one.step()
        two.step()
    torch.testing.assert_close(held(one)[0].detach(), start - 3 * 3e-5, rtol=0, atol=1e-7)
    assert torch.equal(model.a.weight.detach(), held(one)[0].detach().bfloat16())


@pytest.mark.parametrize("how", ["default-dtype", "meta"])
def test_models_built_low_get_masters_from_their_weights(how: str) -> None:
    """For models too large to build in fp32."""
    if how == "meta":
        with torch.device("meta"):
            model = Weights().to(torch.bfloat16)
        model = model.to_empty(device=DEVICE)
        for module in (model.a, model.b):
            module.reset_parameters()
    else:
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = Weights()
        finally:
            torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    attach(optimizer, model)
    for parameter, master in zip(model.parameters(), held(optimizer), strict=True):
        assert torch.equal(master.detach(), parameter.detach().float())
    train(model, optimizer, 2)
    for parameter, master in zip(model.parameters(), held(optimizer), strict=True):
        assert torch.equal(master.detach().bfloat16(), parameter.detach())


def test_changes_by_hand_are_taken_over_and_nothing_else() -> None:
    """Rows that were not written keep the master's full-precision value."""
    model, optimizer = prepared()
    master = held(optimizer)[0]
    full = master.detach().clone()
    assert not torch.equal(full, full.bfloat16().float())
    with torch.no_grad():
        model.a.weight[3] = 2.0
    optimizer.step()  # no gradients: only the written values change
    assert torch.equal(master[3].detach(), torch.full((8,), 2.0))
    assert torch.equal(master[:3].detach(), full[:3])
    assert model.a.weight[3, 0] == 2.0


def test_data_replaced_by_hand_is_taken_over() -> None:
    """``parameter.data = ...``, as in vector_to_parameters, does not count as a write but replaces the memory."""
    model, optimizer = prepared()
    nn.utils.vector_to_parameters(torch.ones(8 * 16 + 16 * 4, dtype=torch.bfloat16), model.parameters())
    backward(model)
    optimizer.zero_grad()
    optimizer.step()
    assert all((m == 1).all() for m in held(optimizer))
    assert all((p == 1).all() for p in model.parameters())


@pytest.mark.cpu  # numpy writes to host memory
def test_writes_past_torch_are_taken_over_when_told() -> None:
    """NumPy's writes are invisible to torch; refresh_from_model compares the values."""
    model, optimizer = prepared()
    attachment = attachment_of(optimizer)
    assert attachment is not None
    model.a.weight.detach().view(torch.int16).numpy().fill(torch.tensor(3.0).bfloat16().view(torch.int16))
    attachment.refresh_from_model()
    assert (held(optimizer)[0] == 3).all()
    with torch.no_grad():
        held(optimizer)[0].fill_(4.0)
    attachment.copy_to_model()
    assert (model.a.weight == 4).all()


def test_refreshing_a_master_says_whether_anything_differed() -> None:
    model, optimizer = prepared()
    assert not refresh_master(model.a.weight)
    model.a.weight.data.fill_(3.0)
    assert refresh_master(model.a.weight)
    assert (held(optimizer)[0] == 3).all()
    assert not refresh_master(model.a.weight)
    assert not refresh_master(nn.Parameter(torch.ones(2)))
    with torch.no_grad():
        held(optimizer)[0].fill_(4.0)  # a master value that the parameter does not have yet is not lost
    refresh_master(model.a.weight)
    assert (held(optimizer)[0] == 4).all()
    assert (model.a.weight == 4).all()


def test_attaching_again_adds_to_what_is_attached() -> None:
    model = Weights()
    lower(model, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attachment = attach(optimizer, model.a)
    assert [p is model.a.weight for p in attachment.stored] == [True]
    assert attach(optimizer, model.b) is attachment
    assert [p is q for p, q in zip(attachment.stored, model.parameters(), strict=True)] == [True, True]


def test_only_the_masters_that_are_meant_are_rewritten() -> None:
    model, optimizer = prepared()
    attachment = attachment_of(optimizer)
    assert attachment is not None
    kept = master_of(model.b.weight).detach().clone()  # type: ignore[union-attr]
    attachment.rewrite(lambda master: master.fill_(2.0), {model.a.weight})
    assert (model.a.weight == 2).all()
    assert torch.equal(master_of(model.b.weight).detach(), kept)  # type: ignore[union-attr]


def test_low_gradients_are_accepted_from_parameters_that_come_later_too() -> None:
    """As for a parameter that DistributedDataParallel knew before it was unfrozen."""
    model = Weights()
    former = lower(model, torch.bfloat16)
    model.b.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attachment = attach(optimizer, model, originals=former)
    attachment.accept_low_gradients()
    model.b.weight.requires_grad_(True)
    attachment.sync()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        assert parameter.grad.dtype is torch.bfloat16


def test_a_model_made_fp32_behind_the_optimizers_back_is_an_error() -> None:
    """model.float() would disconnect the masters."""
    model, optimizer = prepared()
    backward(model)
    model.float()
    with pytest.raises(StateError, match="prepare the model again"):
        optimizer.step()


def test_a_parameter_that_became_another_altogether_stops_no_detaching() -> None:
    model, optimizer = prepared()
    attachment, full = attachment_of(optimizer), held(optimizer)[0].detach().clone()
    assert attachment is not None
    model.a.weight.data = torch.zeros(3, 5)
    attachment.refresh_from_model()
    assert torch.equal(held(optimizer)[0].detach(), full)
    attachment.detach(write_back=True)
    assert model.a.weight.shape == (3, 5)


def test_a_step_without_gradients_writes_nothing() -> None:
    """Parameters without an update are not copied."""
    model, optimizer = prepared()
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    before = [p._version for p in model.parameters()]
    optimizer.step()
    assert [p._version for p in model.parameters()] == before
    model.a.weight.grad = torch.ones(model.a.weight.shape)
    optimizer.step()
    assert model.a.weight._version > before[0]
    assert model.b.weight._version == before[1]


def storages() -> dict[int, int]:
    return {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if issubclass(type(t), Tensor)
        and not isinstance(t, FakeTensor)  # left over from compilation; has no memory
        and t.layout is torch.strided
        and t.device.type == "cpu"
        and t.untyped_storage().nbytes()
    }


@pytest.mark.cpu  # counts host memory
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_memory_is_ten_bytes_per_parameter(momentum: float) -> None:
    """2 low + 4 master + 4 gradient bytes, and 4 of momentum; there is no second gradient."""
    gc.collect()
    before = storages()
    model = nn.Linear(256, 512, bias=False)
    former = lower(model, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    attach(optimizer, model, originals=former)
    former.clear()
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 256, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    gc.collect()
    new = {address: size for address, size in storages().items() if address not in before}
    # A gradient has no Python object until it is read, so read it through both owners.
    for owner in (*model.parameters(), *held(optimizer)):
        assert owner.grad is not None
        new[owner.grad.untyped_storage().data_ptr()] = owner.grad.untyped_storage().nbytes()
    per_parameter = sum(new.values()) / (256 * 512)
    assert 10 + 4 * (momentum > 0) == pytest.approx(per_parameter, abs=0.05)


def test_nothing_outlives_the_optimizer() -> None:
    """Neither a reference cycle nor the global table keeps masters alive."""
    prepared()  # a first optimizer makes torch import Dynamo, in frames that would keep the optimizer alive
    gc.collect()
    gc.disable()
    try:
        model, optimizer = prepared()
        train(model, optimizer, 2)
        reference = weakref.ref(held(optimizer)[0])
        stored = weakref.ref(model.a.weight)
        parameter = model.a.weight
        del optimizer
        assert reference() is None
        assert master_of(parameter) is None
        del model, parameter
    finally:
        gc.enable()
    gc.collect()
    assert stored() is None


def test_model_alone_copies_and_pickles_without_masters() -> None:
    """A copy for averaging or evaluation is a plain low-precision model."""
    import pickle

    model, optimizer = prepared(Net)
    train(model, optimizer, 2)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.a.weight.dtype is torch.bfloat16
        assert master_of(twin.a.weight) is None
        assert torch.equal(twin.a.weight.detach(), model.a.weight.detach())
        twin.load_state_dict(model.state_dict())
        train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), 1)


def test_model_and_optimizer_copied_together_train_on_alike() -> None:
    """Torch drops an optimizer's hooks on copying; without them the copied model would never change."""
    model, optimizer = prepared(Net)
    train(model, optimizer, 2)
    pair = (model, optimizer)
    twin, other = copy.deepcopy(pair)
    assert held(other)[0].stored is twin.a.weight
    for m, o in ((model, optimizer), (twin, other)):
        m.zero_grad()
        train(m, o, 3)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert a is not b
        assert torch.equal(a.detach(), b.detach())
    for a, b in zip(held(optimizer), held(other), strict=True):
        assert torch.equal(a.detach(), b.detach())


def test_what_is_written_to_a_copied_model_first_reaches_its_masters() -> None:
    model, optimizer = copy.deepcopy(prepared())
    with torch.no_grad():
        model.a.weight.fill_(2.0)
    optimizer.step()
    assert (held(optimizer)[0] == 2).all()
    assert (model.a.weight == 2).all()


def test_tables_keyed_by_the_models_parameters_find_masters() -> None:
    """``optimizer.state[model.weight]`` and a user's own ``{parameter: name}`` work."""
    model, optimizer = prepared()
    backward(model)
    optimizer.step()
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert [names[m] for m in held(optimizer)] == ["a.weight", "b.weight"]
    assert optimizer.state[model.a.weight]["exp_avg"].shape == model.a.weight.shape
    assert len(optimizer.state) == 2
    assert model_param_of(held(optimizer)[0]) is model.a.weight
    assert model_param_of(model.a.weight) is model.a.weight
    assert torch.equal(held(optimizer)[0] == torch.zeros(16, 8), torch.zeros(16, 8, dtype=torch.bool))


def test_what_is_written_between_two_attachments_reaches_a_master_that_they_share() -> None:
    model, _ = prepared()
    two = torch.optim.SGD([model.a.weight], lr=0.2)
    with torch.no_grad():
        model.a.weight.fill_(2.0)
    attach(two, model)
    two.step()
    assert (held(two)[0] == 2.0).all()
