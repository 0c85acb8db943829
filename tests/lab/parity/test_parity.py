"""parity() returns the right verdict (pass, fail or undecided) and names the source of the damage."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import castwise
from castwise.errors import WorkloadError
from tests.here import DEVICE
from tests.soak import each_value


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    while True:
        yield torch.randn(16, 8, generator=generator), torch.randint(4, (16,), generator=generator)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def adam(params: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-3)


class Offset(nn.Module):
    """The identity, computed by adding and subtracting 1000; a low format loses the input."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 1000.0) - 1000.0


class Exponent(nn.Module):
    """An exponential that overflows fp16."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 12.0).exp() * 1e-5


def model(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32), *middle, nn.Linear(32, 4)
    )


@each_value()
@pytest.mark.parametrize("plan", ["fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "fp16-master"])
@pytest.mark.parametrize("optimizer", [None, adam])
def test_sound_plans_pass(plan: str, optimizer: object) -> None:
    found = castwise.parity(model(), loss, batches, plan, optimizer=optimizer)  # type: ignore[arg-type]
    assert found.verdict == "pass", found.reason
    assert found
    assert found.passes == 69
    assert (found.adam is None) == (optimizer is None)
    assert "below" in found.reason


def test_what_loses_its_input_fails_and_is_named() -> None:
    found = castwise.parity(model(Offset()), loss, batches, "bf16-mixed")
    assert found.verdict == "fail"
    assert not found
    assert found.damage.low > 0.1
    assert "most of it in 3" in found.reason or "most of it in" in found.reason
    cured = castwise.parity(model(Offset()), loss, batches, "bf16-mixed+regions.4=fp32")
    assert cured.verdict == "pass", cured.reason


class Two(nn.Module):
    """One half of the weights is applied to the input, the other half to a copy that a low format rounds to nothing."""

    def __init__(self, is_complex: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        re, im = torch.randn(2, 4, 8) * 0.1
        parts = {"w": torch.complex(re, im)} if is_complex else {"re": re, "im": im}
        self.parts = nn.ParameterDict({name: nn.Parameter(part) for name, part in parts.items()})
        self.register_buffer("eye", torch.eye(8))

    def forward(self, x: Tensor) -> Tensor:
        lost = ((x @ self.eye + 1000.0) - 1000.0).float()
        if "w" in self.parts:
            return (torch.complex(x, -lost).unsqueeze(1) * self.parts["w"]).sum(-1).real
        return (x.unsqueeze(1) * self.parts["re"] + lost.unsqueeze(1) * self.parts["im"]).sum(-1)


@pytest.mark.parametrize("optimizer", [None, adam])
def test_complex_parameters_are_two_real_ones(optimizer: object) -> None:
    real, both = (
        castwise.parity(Two(one), loss, batches, "bf16-mixed", optimizer=optimizer)  # type: ignore[arg-type]
        for one in (False, True)
    )
    assert (real.verdict, both.verdict) == ("fail", "fail")
    assert both.damage.value == pytest.approx(real.damage.value, rel=1e-3)
    if optimizer is not None:
        assert both.adam is not None
        assert real.adam is not None
        assert both.adam.value == pytest.approx(real.adam.value, rel=0.1)  # each tensor has its own floor


class Rare(nn.Module):
    """A layer with weights after an almost dead ReLU, whose gradient is zero in most batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.w = nn.Linear(8, 4), nn.Parameter(torch.zeros(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + functional.relu(x - 2.3) @ self.w.T


def test_a_gradient_that_the_first_batches_lack_does_not_outweigh_the_rest() -> None:
    torch.manual_seed(0)
    made = Rare()
    few, many = (
        castwise.parity(made, loss, batches, "bf16-mixed", optimizer=adam, microbatches=n) for n in (4, 32)
    )
    assert few.adam is not None
    assert many.adam is not None
    assert (few.verdict, few.microbatches, many.microbatches) == ("pass", 29, 32)
    assert few.adam.value == pytest.approx(many.adam.value, rel=0.3)


def test_a_test_of_nothing_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"parity: in fp32 every gradient is 0 on all of 8 micro"):
        castwise.parity(model(), lambda m, b: loss(m, b) * 0, batches, "bf16-mixed")
    with pytest.raises(
        WorkloadError, match=r"none of its trained parameters is fp32 \(0.weight is float64\)"
    ):
        castwise.parity(model().double(), loss, batches, "bf16-mixed")
    assert (
        castwise.parity(model(), lambda m, b: loss(m, b) * (b[1][0] == 0), batches, "bf16-mixed").microbatches
        >= 8
    )


def test_what_overflows_at_any_scale_fails() -> None:
    """The plan runs exp in fp16 by a rule, since autocast on devices other than the CPU keeps exp in fp32."""
    found = castwise.parity(model(Exponent()), loss, batches, "fp16-mixed+ops.exp=lower")
    assert found.verdict == "fail"
    assert "is not finite at any loss scale" in found.reason
    assert castwise.parity(model(Exponent()), loss, batches, "bf16-mixed")


def test_random_draws_in_the_model_are_no_error() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 0.5 * torch.randn_like(x)

    found = castwise.parity(model(Noisy(), nn.Dropout(0.3)), loss, batches, "bf16-mixed")
    assert found.verdict == "pass", found.reason
    assert found.strayed == 0


def test_accumulation_averages_noise_away() -> None:
    one = castwise.parity(model(), loss, batches, "bf16-mixed")
    many = castwise.parity(model(), loss, batches, "bf16-mixed", accumulate=4, world_size=8)
    assert many.per_update == 32
    assert many.damage.noise * many.damage.denominator == pytest.approx(
        one.damage.noise * one.damage.denominator / 32, rel=1e-6
    )


def test_the_table_names_the_worst_modules() -> None:
    from rich.console import Console

    found = castwise.parity(model(Offset()), loss, batches, "bf16-mixed", optimizer=adam)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(found.table())
    text = console.export_text()
    assert "bf16-mixed: fail." in text
    assert "data's noise" in text
    assert "Damage is the relative error of an update" in text
