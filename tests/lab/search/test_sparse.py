"""Sparse gradients of ``nn.Embedding(sparse=True)``, alone and beside dense ones, in every command that measures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import castwise
from castwise import Plan, Workload
from castwise.lab.search.axes import whole_step_plans
from castwise.lab.search.contest import Contest
from tests.here import DEVICE
from tests.soak import every, pairs

pytestmark = pytest.mark.sparse


class Bags(nn.Module):
    """A model with sparse gradients only."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 4, sparse=True)
        self.bag = nn.EmbeddingBag(50, 4, mode="sum", sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).mean(1) + self.bag(ids)


class Both(nn.Module):
    """A model with sparse and dense gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8, sparse=True)
        self.dense = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head((self.table(ids) + self.dense(ids)).mean(1))


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    while True:
        ids = torch.randint(50, (16, 6), generator=generator, device=DEVICE)
        yield ids, ids.sum(1) % 4


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
CASES: dict[str, tuple[type[nn.Module], Make]] = {
    "SparseAdam": (Bags, lambda p: torch.optim.SparseAdam(list(p), lr=0.01)),
    "SGD": (Both, lambda p: torch.optim.SGD(p, lr=0.1)),
    "SGD with momentum": (Both, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
}
each = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def made(case: tuple[type[nn.Module], Make]) -> Workload:
    return Workload("sparse", case[0], case[1], batches, loss)


@each
def test_parity_and_the_updates_that_are_lost(case: tuple[type[nn.Module], Make]) -> None:
    model = case[0]()
    loss(model, next(batches(1))).backward()  # parity may be called during gradient accumulation
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for plan in ("bf16-mixed", "bf16-master"):
        assert castwise.parity(model, loss, batches, plan, optimizer=case[1])
    true = castwise.parity(model, loss, batches, "bf16-true", optimizer=case[1])
    assert true.damage.value < 0.01
    assert true.lost_updates is not None
    assert -1.0 < true.lost_updates < 1.0
    for name, gradient in before.items():
        left = model.get_parameter(name).grad
        assert left is not None
        assert left.layout is gradient.layout
        parts = (
            ("_indices", "_values") if gradient.is_sparse else ("to_dense",)
        )  # to_dense() sums in any order on a GPU
        assert all(torch.equal(getattr(left, part)(), getattr(gradient, part)()) for part in parts)


def test_gradients_are_those_of_dense_tables() -> None:
    sparse, dense = Both(), Both()
    dense.table.sparse = False
    dense.load_state_dict(sparse.state_dict())
    plan = "bf16-mixed+regions.table=bf16"
    found = [castwise.parity(model, loss, batches, plan) for model in (sparse, dense)]
    assert found[0].damage.value > 0.0
    assert found[0].damage.value == pytest.approx(found[1].damage.value, rel=0.0 if DEVICE == "cpu" else 1e-3)


@every(3)
@pytest.mark.parametrize(
    ("case", "plan"), pairs(CASES, ["bf16-mixed", "bf16-master", "fp16-master", "bf16-true", "O2"], 2)
)
def test_every_plan_of_a_bench_comes_to_its_end(case: str, plan: str) -> None:
    plans = ("fp32", plan)
    result = castwise.bench(
        made(CASES[case]), plans, steps=6, rounds=2, hopeless=1e9, memory=False, device=DEVICE
    )
    for row in result.plans:
        assert (row.status, row.reason, row.notes) == ("ok", "", ())
        assert row.final_loss is not None
        assert row.training is not None
        assert row.inference is not None


@each
def test_a_search_comes_to_its_end_and_a_race_has_all_its_numbers(case: tuple[type[nn.Module], Make]) -> None:
    result = castwise.tune(made(case), goal="numerics", device=DEVICE)
    assert str(result.plan) == "bf16-mixed"
    plans = [Plan.preset(name) for name in ("bf16-mixed", "bf16-master")]
    with Contest(made(case), torch.device(DEVICE)) as contest:
        contest.run(plans, 1)
    for entry in contest.entries.values():
        assert entry.left is None
        assert entry.rounds == 1
        assert entry.losses


def test_no_fused_kernel_is_offered_for_sparse_gradients() -> None:
    optimizer = torch.optim.SGD(Both().parameters(), lr=0.1)
    fused: list[set[str]] = [
        {
            plan.optimizer
            for plan in whole_step_plans(
                ("fp32", "bf16"),
                torch.device(DEVICE),
                optimizer,
                has_images=False,
                goal="memory",
                sparse=sparse,
            )[0]
        }
        for sparse in (False, True)
    ]
    assert fused == [{"as_given", "fused"}, {"as_given"}]
    model = Both()
    with castwise.Amp("fp32+optimizer=fused", device=DEVICE) as amp:
        model, optimizer = amp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        amp.backward(loss(model, next(batches(0))))
        with pytest.raises(RuntimeError, match="_fused_sgd` does not support sparse"):  # torch's own error
            amp.step(optimizer)
