"""The Apex drop-in with data parallelism: two processes train as one does on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from castwise.bridges.compat.apex import amp, parallel
from tests.bridges.compat.reference import FROM_FP64, close
from tests.distributed.world import World
from tests.soak import each_value

STEPS = 6
OVERFLOW = {1, 3}
RATE = 0.8  # the loss is divided by 8, so that nothing else overflows at the first scale


def model_and_data() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
    draw = torch.Generator().manual_seed(1)
    return model, [
        (torch.randn(8, 6, generator=draw), torch.randn(8, 3, generator=draw)) for _ in range(STEPS)
    ]


def train(
    rank: int, size: int, wrapper: str, level: str, accumulate: bool
) -> tuple[list[Tensor], list[float], int]:
    model, batches = model_and_data()
    if rank:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)  # DDP replaces these by rank 0's weights
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if wrapper == "torch":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        model = parallel.DistributedDataParallel(
            model, message_size=100, delay_allreduce=True, allreduce_always_fp32=wrapper == "apex fp32"
        )
    scales = []
    for step, (x, y) in enumerate(batches):
        mine = slice(rank * 8 // size, (rank + 1) * 8 // size)
        optimizer.zero_grad()
        parts = [(x[mine], y[mine])]
        if accumulate:
            parts = list(zip(x[mine].chunk(2), y[mine].chunk(2), strict=True))
        for inputs, targets in parts:
            loss = nn.functional.mse_loss(model(inputs), targets) / (8 * len(parts))
            if step in OVERFLOW and rank == size - 1:
                loss = loss * float("inf")  # on one rank only; all ranks must skip
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        optimizer.step()
        scales.append(amp.state_dict()["loss_scaler0"]["loss_scale"])
    weights = [p.detach().clone() for p in amp.master_params(optimizer)]
    if amp._amp_state.handle is not None:
        amp._amp_state.handle._deactivate()
    return weights, scales, len(list(model.module.parameters()))


def in_fp64() -> list[Tensor]:
    model, batches = model_and_data()
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    for step, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        (nn.functional.mse_loss(model(x.double()), y.double()) / 8).backward()
        if step not in OVERFLOW:
            optimizer.step()
    return [p.detach() for p in model.parameters()]


@each_value()
@pytest.mark.parametrize("wrapper", ["torch", "apex", "apex fp32"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_two_ranks_train_as_one(two: World, wrapper: str, level: str, accumulate: bool) -> None:
    (first, scales, _), (second, other_scales, _) = two.run(train, wrapper, level, accumulate)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    halvings = 2 if accumulate else 1  # one halving per backward pass, as in Apex
    want = [2.0 ** (16 - halvings * sum(step <= now for step in OVERFLOW)) for now in range(STEPS)]
    assert scales == other_scales == want
    close(first, in_fp64(), 3 * FROM_FP64[torch.float16])


def sums(rank: int, size: int) -> tuple[list[Tensor], list[Tensor], int, str]:
    model = nn.Linear(2, 1, bias=False)
    summed = parallel.DistributedDataParallel(model, gradient_average=False)
    summed(torch.full((1, 2), rank + 1.0)).sum().backward()
    with torch.no_grad():
        grads = [torch.full((2,), float(rank))]
        parallel.Reducer(grads).reduce()
        other = nn.Linear(2, 1)
        other.weight.fill_(float(rank))
        parallel.Reducer(other)
    group = parallel.create_syncbn_process_group(size)
    try:
        parallel.create_syncbn_process_group(3)
    except ValueError as error:
        said = str(error)
    return [model.weight.grad.clone(), other.weight.detach().clone()], grads, dist.get_world_size(group), said


def test_parts_of_apex_parallel_on_two_ranks(two: World) -> None:
    for weights, grads, members, said in two.run(sums):
        assert torch.equal(weights[0], torch.full((1, 2), 3.0))
        assert torch.equal(weights[1], torch.zeros(1, 2))
        assert torch.equal(grads[0], torch.full((2,), 0.5))
        assert members == 2
        assert said == "create_syncbn_process_group(3): group_size must divide the number of ranks, 2"


def refusals(rank: int, size: int) -> list[str]:
    said: list[str] = []
    wrapped: Any = parallel.DistributedDataParallel(nn.Linear(2, 2))
    for model, call in (
        (wrapped, lambda m: amp.initialize(m, opt_level="O2", verbosity=0)),
        (nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), lambda m: amp.initialize(m, verbosity=0)),
        (nn.Linear(2, 2), lambda m: parallel.DistributedDataParallel(m, shared_param=True)),
        (nn.Linear(2, 2), lambda m: parallel.DistributedDataParallel(m, retain_allreduce_buffers=True)),
        (nn.Linear(2, 2), lambda m: parallel.SyncBatchNorm(2, fuse_relu=True)),
    ):
        try:
            call(model)
        except (RuntimeError, ValueError) as error:
            said.append(str(error).replace("\n", ""))
    converted = parallel.convert_syncbn_model(nn.Sequential(nn.BatchNorm1d(2)))
    return [*said, type(converted[0]).__name__]


def test_wrappers_and_arguments_that_are_refused(two: World) -> None:
    said, _ = two.run(refusals)
    starts = (
        "Incoming model is an instance of apex.parallel.DistributedDataParallel. Parallel wrappers should only",
        "Incoming model is an instance of torch.nn.parallel.DistributedDataParallel. Parallel wrappers should",
        "shared_param is no longer supported as an option.",
        "DistributedDataParallel(retain_allreduce_buffers=...): torch's DistributedDataParallel has no such option; leave it out",
        "SyncBatchNorm(fuse_relu=True): torch has no fused form; add a ReLU after it",
        "SyncBatchNorm",
    )
    assert len(said) == len(starts)
    assert all(text.startswith(start) for text, start in zip(said, starts, strict=True))
