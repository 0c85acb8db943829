"""Parameters and buffers that are sparse, nested or in oneDNN's layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import castwise
from castwise import Amp
from castwise.core._torch.tensors import dense_values, is_dense, to_dense
from castwise.errors import StateError, WorkloadError
from tests.here import DEVICE

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "coo": lambda d: d.to_sparse(),
    "csr": lambda d: d.to_sparse_csr(),
    "csc": lambda d: d.to_sparse_csc(),
    "bsr": lambda d: d.to_sparse_bsr((2, 2)),
    "bsc": lambda d: d.to_sparse_bsc((2, 2)),
    "mkldnn": lambda d: d.to_mkldnn(),
    "nested": lambda d: torch.nested.nested_tensor([d[:3], d[3:]]),
    "jagged": lambda d: torch.nested.nested_tensor([d[:3], d[3:]], layout=torch.jagged),
}
ALL_LAYOUTS = [pytest.param(name, marks=() if name == "jagged" else pytest.mark.sparse) for name in LAYOUTS]
PLANS = ("fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "bf16-true", "fp16-true", "O2", "naive")


def table() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(8, 8).relu()


class Graph(nn.Module):
    """A layer with a matrix in a buffer; ``runs`` multiplies by the matrix."""

    def __init__(self, layout: str, runs: bool = False) -> None:
        super().__init__()
        self.register_buffer("matrix", LAYOUTS[layout](table()))
        self.layer, self.runs = nn.Linear(8, 8), runs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return self.matrix.to_dense().float() @ x.float() if self.runs else x  # type: ignore[operator]


class Trained(nn.Module):
    """A trained sparse matrix."""

    def __init__(self, layout: str, product: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.matrix, self.product = nn.Parameter(LAYOUTS[layout](table())), product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(self.matrix, x)


def train(model: Any, plan: str | None, momentum: float = 0.0, *, bad: bool = False) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=momentum)
    amp = None
    if plan is not None:
        amp = Amp(plan, device=DEVICE)
        amp.prepare(model, optimizer)
    for number in range(3):
        loss = model(torch.ones(8, 8)).float().square().mean() / 64
        loss = loss * float("inf") if bad and number == 1 else loss
        if amp is None:
            loss.backward()
            optimizer.step()
        else:
            amp.backward(loss)
            amp.step(optimizer)
        optimizer.zero_grad()
    return amp


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_buffers_of_any_layout_are_kept(layout: str, plan: str) -> None:
    model = Graph(layout, runs=layout in ("coo", "csr", "csc", "bsr"))
    before = dense_values(model.matrix.clone())
    amp = train(model, plan)
    assert torch.equal(dense_values(model.matrix), before)
    amp.close()
    assert torch.equal(dense_values(model.matrix), before)


@pytest.mark.sparse
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("plan", ["fp32", "bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_parameters_train_as_in_plain_torch(layout: str, plan: str, momentum: float) -> None:
    """Plain torch trains only these two layouts; the model uses operators that no plan casts."""

    def product(matrix: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (matrix.to_dense() * x).sum(1)

    plain, ours = Trained(layout, product), Trained(layout, product)
    train(plain, None, momentum)
    amp = train(ours, f"{plan}+loss_scale.init=8.0" if plan == "fp16-mixed" else plan, momentum)
    assert amp.skipped_steps == 0
    torch.testing.assert_close(ours.matrix.to_dense(), plain.matrix.to_dense(), rtol=1e-6, atol=0)


@pytest.mark.sparse
def test_csr_products_train_in_fp32() -> None:
    plain, ours = Trained("csr", torch.sparse.mm), Trained("csr", torch.sparse.mm)
    train(plain, None)
    train(ours, "fp32")
    assert torch.equal(ours.matrix.to_dense(), plain.matrix.to_dense())


@pytest.mark.sparse
@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("plan", ["fp32", "fp16-mixed+loss_scale.init=8.0"])
def test_what_is_not_finite_is_found_in_sparse_gradients(layout: str, plan: str) -> None:
    model = Trained(layout, lambda matrix, x: (matrix.to_dense() * x).sum(1))
    assert train(model, plan, bad=True).skipped_steps == 1
    assert dense_values(model.matrix.detach()).isfinite().all()


@pytest.mark.sparse
@pytest.mark.parametrize("plan", ["bf16-master", "bf16-true"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "jagged"])
def test_parameters_that_a_plan_would_store_low_are_refused_in_words(layout: str, plan: str) -> None:
    model = Trained(layout, torch.sparse.mm)
    with pytest.raises(
        StateError, match=r"prepare: matrix is (torch\.|nested).* and the plan stores it in bfloat16"
    ):
        Amp(plan, device=DEVICE).prepare(model)  # fmt: skip


@pytest.mark.sparse
def test_diagnoses_take_them() -> None:
    """Only COO tensors: experiments need a copy of the model, and torch cannot copy the other layouts."""

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    assert (
        castwise.first_nonfinite(Graph("coo", runs=True), loss, torch.randn(8, 8), "bf16-mixed") is not None
    )
    with pytest.raises(WorkloadError, match="the model cannot be copied"):
        castwise.first_nonfinite(Graph("csr", runs=True), loss, torch.randn(8, 8), "bf16-mixed")


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_values_of_any_layout(layout: str) -> None:
    tensor = LAYOUTS[layout](table())
    assert float(dense_values(tensor).sum()) == pytest.approx(float(table().sum()), rel=1e-6)
    assert float(to_dense(tensor).sum()) == pytest.approx(float(table().sum()), rel=1e-6)
    assert not is_dense(tensor)
    assert is_dense(table())
