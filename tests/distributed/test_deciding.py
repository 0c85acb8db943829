"""Ranks that do different things in a step still send the same messages and make the same decision."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import castwise
from castwise.core.ranks import Agreement
from castwise.errors import StateError
from tests.distributed.test_agreement import Counted
from tests.distributed.test_layouts import tolerance
from tests.distributed.world import World
from tests.soak import each_value

PLANS = ["fp32", "fp16-mixed", "bf16-mixed", "bf16-master", "fp16-master", "bf16-true", "O1", "O2"]
GROWS = "+loss_scale.interval=2+loss_scale.init=1024"
STEPS = 6


def grown(plan: str) -> str:
    """Add a loss scale that changes during the test, if the plan has a loss scale."""
    return plan + GROWS if castwise.Plan.parse(plan).loss_scale is not None else plan


def network() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def batch(step: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def works(rank: int, step: int) -> bool:
    """Return whether a rank has a batch: both ranks in the first two steps, then one in turn, then none."""
    return step < 2 or (step < STEPS - 1 and (rank + step) % 2 == 0)


def oracle(steps: list[int], max_norm: float | None) -> Tensor:
    """Train in plain fp64 on the batches of the given steps; return the weights."""
    net = network().double()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in steps:
        net(batch(step).double()).square().mean().backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return net.weight.detach()


# --- gradients that are not averaged ---------------------------------------------------------------------------


def local_steps(rank: int, size: int, plan: str, max_norm: float | None, bad: int) -> Any:
    """Run local SGD: DDP averages gradients only in every third step, after which the weights are averaged."""
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    amp = castwise.Amp(plan, device="cpu")
    amp.prepare(net, optimizer)
    ddp = DistributedDataParallel(net)
    scales, skipped = [], []
    for step in range(9):
        x = batch(2 * step + rank)
        if step == bad and rank == 1:
            x[0, 0] = float("inf")
        local = step % 3 != 2
        with ddp.no_sync() if local else contextlib.nullcontext():
            amp.backward(ddp(x).square().mean())
        result = amp.step(optimizer, max_norm=max_norm)
        skipped.append(result.skipped)
        optimizer.zero_grad()
        scales.append(amp.get_scale())
        if not local:
            for parameter in optimizer.param_groups[0]["params"]:  # masters, if there are any
                dist.all_reduce(parameter.data)
                parameter.data /= size
    weight = amp.model_state_dict(net)["weight"].clone()
    amp.close()
    return scales, skipped, weight


@pytest.mark.parametrize("bad", [0, 1, 2, 4])
@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("plan", ["fp32", "bf16-mixed", "fp16-mixed", "fp16-master"])
def test_ranks_that_step_by_their_own_gradients_skip_together(
    two: World, plan: str, max_norm: float | None, bad: int
) -> None:
    (scales, skipped, weight), (others, also, other) = two.run(local_steps, grown(plan), max_norm, bad)
    assert scales == others
    assert skipped == also == [step == bad for step in range(9)]
    assert torch.equal(weight, other)
    nets = [network().double() for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in nets]
    for step in range(9):
        if step != bad:
            for rank, net in enumerate(nets):
                net(batch(2 * step + rank).double()).square().mean().backward()
            if step % 3 == 2:
                for one, two_ in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
                    one.grad = two_.grad = (one.grad + two_.grad) / 2  # type: ignore[operator]
            for net, optimizer in zip(nets, optimizers, strict=True):
                if max_norm is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), max_norm)
                optimizer.step()
                optimizer.zero_grad()
        if step % 3 == 2:
            with torch.no_grad():
                for one, two_ in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
                    one.copy_((one + two_) / 2)
                    two_.copy_(one)
    torch.testing.assert_close(
        weight.double(), nets[0].weight.detach(), atol=max(1e-6, tolerance(plan)[2]), rtol=0
    )


# --- a rank without a backward ---------------------------------------------------------------------------------


class Case:
    """A training loop on one of two ranks that are idle in turn."""

    def __init__(self, plan: str, optimizers: int, max_norm: float | None) -> None:
        self.nets = [network() for _ in range(optimizers)]
        self.optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in self.nets]
        self.amp = castwise.Amp(plan, device="cpu")
        for net, optimizer in zip(self.nets, self.optimizers, strict=True):
            self.amp.prepare(net, optimizer)
        self.max_norm = max_norm
        self.sent: list[int] = []

    def params(self) -> Iterator[Any]:
        return (parameter for net in self.nets for parameter in net.parameters())

    def backward(self, step: int, share: float = 1.0) -> None:
        for net in self.nets:
            self.amp.backward(net(batch(step)).square().mean() * share)

    def sum_gradients(self) -> None:
        for parameter in self.params():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
            dist.all_reduce(parameter.grad)

    def step(self, number: int, how: str) -> None:
        with Counted() as counts:
            if how == "joint" or self.max_norm is not None:
                self.amp.step(*self.optimizers, max_norm=self.max_norm)
            else:
                for optimizer in self.optimizers:
                    self.amp.step(optimizer)
        self.sent.append(counts.get("all_reduce", 0))
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=number % 3 == 0)

    def end(self) -> tuple[Tensor, float]:
        weights = [self.amp.model_state_dict(net)["weight"].clone().double() for net in self.nets]
        assert all(torch.equal(weight, weights[0]) for weight in weights)
        scale = self.amp.get_scale()
        self.amp.close()
        return weights[0], scale


def idle(
    rank: int, size: int, plan: str, how: str, optimizers: int, max_norm: float | None
) -> tuple[Tensor, float, list[int]]:
    case = Case(plan, optimizers, max_norm)
    for step in range(STEPS):
        if works(rank, step):
            case.backward(step, share=0.5 if how != "alone" and step < 2 else 1.0)
        if how == "unscaled":
            for optimizer in case.optimizers:
                case.amp.unscale_(optimizer)
        if how != "alone":
            case.sum_gradients()
        case.step(step, how)
    return (*case.end(), case.sent)


@each_value()
@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("how", ["alone", "summed", "unscaled"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_rank_without_a_batch_takes_part(
    two: World, plan: str, how: str, optimizers: int, max_norm: float | None
) -> None:
    """Ranks step their own weights, or gradients summed over ranks before or after unscaling."""
    if how == "alone" and max_norm is not None:
        max_norm = 100.0  # the norm covers all ranks
    (first, scale, sent), (second, other_scale, other_sent) = two.run(
        idle, grown(plan), how, optimizers, max_norm
    )
    atol = max(1e-6, tolerance(plan)[2])
    joint = None if max_norm is None else max_norm * (optimizers**-0.5)
    if how == "alone":
        for rank, weight in ((0, first), (1, second)):
            want = oracle([step for step in range(STEPS) if works(rank, step)], None)
            torch.testing.assert_close(weight, want, atol=atol, rtol=0)
    else:
        assert torch.equal(first, second)
        torch.testing.assert_close(first, oracle([*range(STEPS - 1)], joint), atol=atol, rtol=0)
    assert scale == other_scale
    assert sent == other_sent
    # Gradients that should be a sum over ranks are compared first and the norm is then sent again, which adds messages.
    assert len({*sent}) == 1 or (how == "summed" and max_norm is not None)


def from_the_start(rank: int, size: int, way: str) -> list[float]:
    """Train with a rank 1 that never has a batch, nor a scale of its own before."""
    case = Case("fp16-mixed", 1, None)
    (optimizer,) = case.optimizers
    for step in range(3):
        if rank == 0:
            loss = case.nets[0](batch(step)).square().mean()
            case.amp.scale(loss).backward() if way == "scale" else case.amp.backward(loss)
        if way == "plain":
            case.amp.unscale_(optimizer)
            case.sum_gradients()
            optimizer.step()
        elif way == "clipped":
            case.sum_gradients()
            case.amp.clip_grad_norm_(optimizer, 1e9)
            case.amp.step(optimizer)
        else:
            case.sum_gradients()
            case.amp.step(optimizer)
        optimizer.zero_grad()
    weight, _ = case.end()
    return weight.flatten().tolist()


@pytest.mark.parametrize("way", ["backward", "scale", "clipped", "plain"])
def test_a_rank_that_never_has_a_batch(two: World, way: str) -> None:
    first, second = two.run(from_the_start, way)
    assert first == second
    assert first == pytest.approx(oracle([0, 1, 2], None).flatten().tolist(), abs=2e-3)


def overflows(rank: int, size: int, max_norm: float | None) -> tuple[list[bool], float]:
    case = Case("fp16-mixed", 1, max_norm)
    skipped = []
    for step in range(4):
        if rank == 0 or step != 2:
            case.backward(step)
        if rank == 0 and step == 2:
            case.nets[0].weight.grad[0, 0] = float("inf")
        skipped.append(case.amp.step(case.optimizers[0], max_norm=max_norm).skipped)
        case.optimizers[0].zero_grad()
    return skipped, case.end()[1]


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_an_idle_rank_skips_with_the_others_and_its_scale_falls(two: World, max_norm: float | None) -> None:
    assert two.run(overflows, max_norm) == [([False, False, True, False], 32768.0)] * 2


def gradients_of_ones_own(rank: int, size: int, max_norm: float | None) -> str:
    """Step gradients that come from neither a backward nor a sum, so castwise cannot know whether they contain the
    scale.
    """
    case = Case("fp16-mixed", 1, max_norm)
    (optimizer,) = case.optimizers
    case.backward(0)
    case.step(0, "alone")
    case.nets[0].zero_grad()
    if rank == 0:
        case.backward(1)
    else:
        for parameter in case.params():
            parameter.grad = torch.full_like(parameter, 0.5)
    with pytest.raises(StateError) as refused:
        case.amp.step(optimizer, max_norm=max_norm)
    optimizer.zero_grad()
    case.backward(2)
    case.step(2, "alone")
    case.end()
    return str(refused.value)


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_gradients_that_no_backward_gave_are_refused_on_all_ranks(two: World, max_norm: float | None) -> None:
    for text in two.run(gradients_of_ones_own, max_norm):
        assert text.startswith(
            "step: rank 1 had no backward since the last step, but has gradients that no other rank has"
        )
        assert "call amp.unscale_(optimizer) on all ranks first" in text


def twice(rank: int, size: int) -> str:
    case = Case("fp16-mixed", 1, None)
    case.backward(0)
    case.amp.step(case.optimizers[0])
    with pytest.raises(StateError) as refused:
        case.amp.step(case.optimizers[0])
    case.amp.close()
    return type(refused.value).__name__


def test_a_second_step_on_the_same_gradients_is_refused(two: World) -> None:
    assert two.run(twice) == ["StateError"] * 2


def names(rank: int, size: int) -> tuple[list[float], str]:
    """Train named losses: a step's loss keeps its former name; a further loss on only some ranks is an error."""
    case = Case("fp16-mixed" + GROWS, 2, None)
    for step in range(4):
        for name, net, optimizer in zip("ab", case.nets, case.optimizers, strict=True):
            if rank == 0 or step < 2:
                case.amp.backward(net(batch(step)).square().mean() * (1e9 if name == "b" else 1.0), name)
            case.amp.step(optimizer)
            optimizer.zero_grad()
    scales = [case.amp.get_scale(name) for name in "ab"]
    said = ""
    loss = case.nets[0](batch(0)).square().mean()
    case.amp.backward(loss, "a")
    if rank == 0:
        case.amp.backward(case.nets[0](batch(1)).square().mean(), "b")
        case.amp.close()
    else:
        with pytest.raises(StateError) as refused:
            case.amp.step(case.optimizers[0])
        said = str(refused.value)
        dist.all_reduce(torch.zeros(()))  # receives the other rank's second message
        case.amp.close()
    return scales, said


def test_an_idle_rank_and_named_losses(two: World) -> None:
    (scales, _), (other, said) = two.run(names)
    assert scales == other
    assert scales[0] != scales[1]
    assert "step: another rank called backward in this step for a named loss" in said


# --- a rank without trained parameters --------------------------------------------------------------------------


def nothing_to_train(
    rank: int, size: int, plan: str, what: str, max_norm: float | None
) -> tuple[list[bool], list[float]]:
    net: nn.Module = network()
    if rank == 1 and what == "module":
        net = nn.ReLU()
    if rank == 1 and what == "frozen":
        net.requires_grad_(False)
    params = [{"params": [*net.parameters()]}]
    if rank == 1 and what == "group":
        params = [{"params": []}]
    optimizer = torch.optim.SGD(params, 0.1)
    amp = castwise.Amp(plan, device="cpu")
    amp.prepare(net, optimizer)
    skipped, own = [], []
    for step in range(4):
        amp.backward(net(batch(step).requires_grad_()).square().mean())
        if rank == 0 and step == 2:
            net.weight.grad[0, 0] = float("inf")
        skipped.append(amp.step(optimizer, max_norm=max_norm).skipped)
        count = torch.ones(())
        dist.all_reduce(count)
        own.append(float(count))
        net.zero_grad()
    amp.close()
    return skipped, own


@each_value()
@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("what", ["module", "frozen", "group"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_rank_that_trains_nothing_answers(two: World, plan: str, what: str, max_norm: float | None) -> None:
    """The user's own all_reduce calls do not get mixed up with castwise's."""
    assert two.run(nothing_to_train, plan, what, max_norm) == [([False, False, True, False], [2.0] * 4)] * 2


class Half(nn.Module):
    """A model whose second part is excluded from DistributedDataParallel."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.own = network(), network()
        self._ddp_params_and_buffers_to_ignore = ["own.weight", "own.bias"]

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.shared(x))


def changes(rank: int, size: int, what: str) -> tuple[list[int], list[bool]]:
    """Step under DDP, which needs no messages until a trained parameter is not averaged by DDP."""
    amp = castwise.Amp("fp16-mixed", device="cpu")
    late = network()
    if what == "another model here" and rank == 1:
        amp.prepare(network(), inference=True)
    model = Half()
    model.own.requires_grad_(what == "left out")
    optimizer = torch.optim.SGD([*model.parameters()], 0.1)
    amp.prepare(model, optimizer)
    ddp = DistributedDataParallel(model)
    sent, skipped = [], []
    for step in range(4):
        if step == 1:
            if what == "another model here" and rank == 0:
                amp.prepare(network(), inference=True)
            if what == "unfrozen":
                model.own.requires_grad_(True)
            if what == "joined":
                amp.prepare(late, torch.optim.SGD(late.parameters(), 0.1))
                optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        amp.backward(ddp(batch(step)).square().mean())
        if rank == 0 and step == 3 and what != "another model here":
            grads = [
                p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
            ]
            grads[-1].view(-1)[0] = float("inf")
        with Counted() as counts:
            skipped.append(amp.step(optimizer).skipped)
        sent.append(counts.get("all_reduce", 0))
        optimizer.zero_grad()
    amp.close()
    return sent, skipped


@pytest.mark.parametrize(
    ("what", "sent"),
    [
        ("another model here", [0, 0, 0, 0]),
        ("left out", [1, 1, 1, 1]),
        ("unfrozen", [0, 1, 1, 1]),
        ("joined", [0, 1, 1, 1]),
    ],
)
def test_what_changes_is_decided_by_all(two: World, what: str, sent: list[int]) -> None:
    skipped = [False] * 3 + [what != "another model here"]
    assert two.run(changes, what) == [(sent, skipped)] * 2


def more_models_on_one(rank: int, size: int) -> list[bool]:
    """Step three optimizers together on rank 0, and one on rank 1."""
    nets = [network() for _ in range(3 if rank == 0 else 1)]
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in nets]
    amp = castwise.Amp("fp16-mixed", device="cpu")
    if rank == 0:
        amp.prepare(network(), inference=True)
    for net, optimizer in zip(nets, optimizers, strict=True):
        amp.prepare(net, optimizer)
    skipped = []
    for step in range(3):
        for net in nets:
            amp.backward(net(batch(step)).square().mean())
        if rank == 1 and step == 1:
            nets[0].weight.grad[0, 0] = float("nan")
        skipped.append(amp.step(*optimizers).skipped)
        for optimizer in optimizers:
            optimizer.zero_grad()
    amp.close()
    return skipped


def test_ranks_that_prepare_different_numbers_of_models(two: World) -> None:
    assert two.run(more_models_on_one) == [[False, True, False]] * 2


def stage_without_optimizer(
    rank: int, size: int, what: str, plan: str
) -> tuple[list[bool | None], list[float]]:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.manual_seed(rank)
    stage: nn.Module = nn.Linear(4, 4)
    if rank == 1:
        stage = nn.ReLU() if what == "module" else stage.requires_grad_(False)
    amp = castwise.Amp(plan, device="cpu")
    optimizer = None if rank == 1 else torch.optim.SGD(stage.parameters(), 0.1)
    amp.prepare(stage, *([] if optimizer is None else [optimizer]), part=True)
    schedule = amp.pipeline(
        ScheduleGPipe(
            PipelineStage(stage, rank, size, torch.device("cpu")), 2, loss_fn=nn.functional.mse_loss
        )
    )
    skipped: list[bool | None] = []
    own = []
    for step in range(3):
        args = (batch(step),) if rank == 0 else ()
        schedule.step(*args, target=torch.ones(8, 4) if rank == size - 1 else None)
        if rank == 2 and step == 1:
            stage.weight.grad[0, 0] = float("inf")
        skipped.append(None if optimizer is None else amp.step(optimizer, max_norm=1.0).skipped)
        late = torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1)
        if optimizer is None and what == "module" and step == 2:
            amp.prepare(stage, late)
            late.param_groups[0]["params"][0].grad = torch.ones(2)
            with pytest.raises(StateError, match=r"had no optimizer when amp\.pipeline"):
                amp.unscale_(late)
        stage.zero_grad()
        count = torch.ones(())
        dist.all_reduce(count)
        own.append(float(count))
    amp.close()
    return skipped, own


@pytest.mark.parametrize(("what", "plan"), [("module", "fp16-mixed"), ("frozen", "fp32")])
def test_stages_without_an_optimizer_are_not_waited_for(four: World, what: str, plan: str) -> None:
    step = [False, True, False]
    want = [(skipped, [4.0] * 3) for skipped in (step, [None] * 3, step, step)]
    assert four.run(stage_without_optimizer, what, plan) == want


# --- DistributedDataParallel over other ranks --------------------------------------------------------------------


def other_ranks(rank: int, size: int) -> tuple[bool, bool, bool]:
    """Train in sessions of ranks 0 and 1, or 2 and 3, with DDP across the sessions, over all ranks, and over the
    session's.
    """
    mine = [dist.new_group([at, at + 1]) for at in (0, 2)][rank // 2]
    across = [dist.new_group([at, at + 2]) for at in (0, 1)][rank % 2]
    found = []
    for group in (across, None, mine):
        amp = castwise.Amp("fp16-mixed", device="cpu", group=mine)
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        amp.prepare(net, optimizer)
        ddp = DistributedDataParallel(net, process_group=group)
        loss = ddp(batch(0)).square().mean()
        if rank % 2 == 1 and group is across:  # rank 1 or 3, one of each session
            loss = loss * float("inf")
        with Counted() as counts:
            amp.backward(loss)
            result = amp.step(optimizer)
        assert result.skipped == (group is across)
        found.append(counts.get("all_reduce", 0) > 0)
        amp.close()
    return tuple(found)  # type: ignore[return-value]


def test_only_an_average_over_the_sessions_own_ranks_counts(four: World) -> None:
    assert four.run(other_ranks) == [(True, False, False)] * 4


def meets_anew(rank: int, size: int, folder: str, first: str) -> list[list[bool]]:
    """Train one session with DDP or without, then without a process group, then together in a second process group."""
    case = Case("fp16-mixed", 1, None)
    (net,), (optimizer,) = case.nets, case.optimizers

    def steps(of: nn.Module) -> list[bool]:
        skipped = []
        for step in range(3):
            loss = of(batch(step)).square().mean()
            case.amp.backward(loss * (float("inf") if step == 1 and rank == 1 else 1.0))
            skipped.append(case.amp.step(optimizer).skipped)
            optimizer.zero_grad()
        return skipped

    found = [steps(DistributedDataParallel(net) if first == "ddp" else net)]
    dist.barrier()
    dist.destroy_process_group()
    found.append(steps(net))
    dist.init_process_group("gloo", init_method=f"file://{folder}/{first}", rank=rank, world_size=size)
    found.append(steps(net))
    case.amp.close()
    return found


@pytest.mark.parametrize("first", ["ddp", "bare"])
def test_a_second_process_group_decides_anew(two: World, tmp_path: Any, first: str) -> None:
    together, alone = [False, True, False], [False, False, False]
    (one, other) = two.run(meets_anew, str(tmp_path), first)
    assert one == [together, alone, together]
    assert other == [together, together, together]


def in_turns(rank: int, size: int, interval: int) -> str:
    """Step two optimizers, then one, then the other while rank 1 is idle and cannot see that a new window began."""
    case = Case(f"fp16-mixed+loss_scale.interval={interval}+loss_scale.init=1024", 2, None)

    def window(step: int, *turn: int) -> None:
        for at in turn:
            if rank == 0 or step != 2:
                case.amp.backward(case.nets[at](batch(step)).square().mean())
        for at in turn:
            for parameter in case.nets[at].parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
            case.amp.step(case.optimizers[at])
        for optimizer in case.optimizers:
            optimizer.zero_grad()

    window(0, 0, 1)
    window(1, 0)
    with pytest.raises(StateError) as refused:
        window(2, 1)
    case.amp.close()
    return str(refused.value)


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_scales_that_would_part_are_refused_on_all_ranks(two: World, interval: int) -> None:
    """The error comes whether or not the scale has changed by then."""
    for text in two.run(in_turns, interval):
        assert text.startswith(
            "step: rank 1 called no backward since its last step and counted the backwards"
        )
        assert (
            "call amp.backward(loss) for each optimizer on every rank (without a batch, multiply the loss by 0)"
            in text
        )


def test_alone_nothing_is_asked() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert not Agreement(castwise.ranks.ALONE, lambda: [parameter]).can_differ()
