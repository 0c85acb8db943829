"""A result names the last position tested if the model allows longer sequences, and says nothing otherwise."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import castwise
from castwise.lab.parity.positions import Positions
from castwise.lab.parity.probes import Prober
from castwise.lab.workloads.workload import find_workload
from tests.here import DEVICE

Batch = tuple[Tensor, Tensor]


def batches(seed: int = 0, size: int = 4) -> Iterator[Batch]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    while True:
        tokens = torch.randint(20, (size, 17), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


class Sequences(nn.Module):
    """A model of tokens with a given kind of position encoding that has room for ``size`` positions."""

    def __init__(self, kind: str, size: int) -> None:
        super().__init__()
        self.kind = kind
        self.embedding, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        if kind == "embedding":
            self.table = nn.Embedding(size, 16)
        elif kind == "parameter":
            self.table = nn.Parameter(torch.randn(1, size, 16))
        elif kind == "mask":
            self.register_buffer("table", torch.ones(size, size).tril())
        elif kind != "none":
            self.register_buffer("table", torch.randn(size, 16))

    def forward(self, tokens: Tensor) -> Tensor:
        x, length = self.embedding(tokens), tokens.shape[1]
        if self.kind == "embedding":
            x = x + self.table(torch.arange(length))
        elif self.kind == "parameter":
            x = x + self.table[:, :length]
        elif self.kind == "mask":
            x = self.table[:length, :length] @ x / length
        elif self.kind == "sliced":
            x = x * self.table[:length]
        elif self.kind == "indexed":
            x = x * self.table[torch.arange(length)]
        elif self.kind == "rotary":
            x = x * torch.outer(torch.arange(length).float(), self.table[-1]).cos()
        return self.head(x)  # type: ignore[no-any-return]


def seen(model: nn.Module, size: int = 4) -> Positions:
    prober = Prober(model, loss, batches(size=size), torch.device(DEVICE))
    prober.extend(1)
    return prober.positions


@pytest.mark.parametrize("kind", ["embedding", "parameter", "mask", "sliced", "indexed"])
def test_a_table_with_room_for_more_is_named(kind: str) -> None:
    found = seen(Sequences(kind, 64))
    assert (found.length, list(found.tables.values())) == (16, [64])
    assert found.note.startswith("Tested at positions 0 to 15, those of the sample: later positions (table")
    assert " has 64) were not tested." in found.note


@pytest.mark.parametrize("kind", ["embedding", "parameter", "mask", "sliced", "indexed"])
def test_a_table_that_is_used_up_is_not_spoken_of(kind: str) -> None:
    assert seen(Sequences(kind, 16)).note == ""


def test_positions_that_are_computed_have_no_end() -> None:
    note = seen(Sequences("rotary", 3)).note
    assert note.startswith(
        "Tested at positions 0 to 15, those of the sample: later positions were not tested."
    )


@pytest.mark.parametrize(("kind", "size"), [("none", 4), ("rotary", 16)])
def test_what_is_not_recognised_is_not_spoken_of(kind: str, size: int) -> None:
    """There is no note for a model without positions, nor if the length could equally be the batch size."""
    assert seen(Sequences(kind, 3), size).note == ""


def test_positions_that_are_given_count() -> None:
    def given() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        yield *next(batches()), torch.arange(16).expand(4, 16)

    prober = Prober(Sequences("none", 0), loss, given(), torch.device(DEVICE))
    prober.extend(1)
    assert prober.positions.length == 16


@pytest.mark.parametrize(
    "name", ["gpt?layers=1&width=32&context=16&batch=4", "digits?batch=8", "sine?size=16"]
)
def test_built_in_workloads_have_no_later_positions(name: str) -> None:
    workload = find_workload(name)
    prober = Prober(workload.model(), workload.loss, workload.batches(0), torch.device(DEVICE))
    prober.extend(1)
    assert prober.positions.note == ""


def test_the_finding_and_its_table_say_so() -> None:
    from rich.console import Console

    found = castwise.parity(Sequences("sliced", 64), loss, batches, "bf16-mixed")
    assert found.note.startswith("Tested at positions 0 to 15")
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(found.table())
    assert "Tested at positions 0 to 15" in console.export_text()


def test_a_search_notes_it_of_a_plan_that_computes_low() -> None:
    result = castwise.tune(
        model=Sequences("sliced", 64), loss=loss, batches=batches, goal="numerics", formats=("bf16",), memory=False,
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
    )  # fmt: skip
    assert any(note.startswith("Tested at positions 0 to 15") for note in result.evidence.notes)
