"""Watch sees each floating-point result and its gradient once, at the same sites in all formats; it changes nothing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from castwise import Amp
from castwise.lab.inspect.watch import Site, Watch, site_of
from castwise.lab.passes.observers import observed

Seen = list[tuple[str, Site, Tensor]]


def watched(model: nn.Module, run: Callable[[nn.Module], Any], **options: Any) -> Seen:
    """Return what Watch sees in the forward and backward pass of the sum of ``run(model)``."""
    seen: Seen = []
    watch = Watch(lambda kind, site, tensor: seen.append((kind, site, tensor.clone())), **options)
    with observed(model, watch):
        run(model).float().sum().backward()
    return seen


def sites(seen: Seen, kind: str) -> list[tuple[str, str]]:
    """Return the sites of results and parameters, without the model's inputs."""
    return [
        (site.path, site.name)
        for what, site, _ in seen
        if what == kind and not re.fullmatch(r"input \d+", site.name)
    ]


class Several(nn.Module):
    """A model with in-place operators, views, containers, a shared module and a branch without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = self.first
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.first(x)
        h = self.again(h).relu_()
        parts = h.view(-1, 2, 2).transpose(1, 2).chunk(2, 0)
        with torch.no_grad():
            scale = h.abs().mean()
        return {"out": self.norm(h) * scale, "parts": [torch.cat(parts).exp(), h.argmax()]}


def test_each_result_is_seen_once_where_it_is_computed() -> None:
    x = torch.randn(6, 4)
    model = Several()

    def run(model: nn.Module) -> Tensor:
        out = model(x)
        return out["out"].sum() + out["parts"][0].sum()

    seen = watched(model, run)
    assert sites(seen, "activations") == [
        ("first", "linear"), ("first", "linear"), ("", "relu_"), ("", "abs"), ("", "mean"), ("norm", "layer_norm"),
        ("", "mul"), ("", "cat"), ("", "exp"),
    ]  # fmt: skip
    assert Counter(sites(seen, "gradients")) == Counter([
        ("first", "linear"), ("first", "linear"), ("", "relu_"), ("norm", "layer_norm"), ("", "mul"), ("", "cat"), ("", "exp"),
    ])  # fmt: skip
    assert Counter(sites(seen, "weight gradients")) == Counter([
        ("first", "weight"),
        ("first", "bias"),
        ("norm", "weight"),
        ("norm", "bias"),
    ])


def test_gradients_are_those_of_autograd() -> None:
    x = torch.randn(5, 4)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    hidden = model[0](x)
    expected = torch.autograd.grad(model[2](model[1](hidden)).square().sum(), hidden)[0]
    seen = watched(model, lambda model: model(x).square())
    found = [tensor for kind, site, tensor in seen if kind == "gradients" and site.path == "0"]
    assert len(found) == 1
    assert torch.equal(found[0], expected)


def test_results_outside_the_model_are_not_seen() -> None:
    seen = watched(nn.Linear(3, 3), lambda model: functional.softplus(model(torch.ones(2, 3)) * 3))
    assert sites(seen, "activations") == [("", "linear")]


def test_watching_changes_no_number_and_leaves_nothing_behind() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 1))
    x = torch.randn(8, 4)
    torch.manual_seed(1)
    model(x).sum().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    state = {name: b.clone() for name, b in model.named_buffers()}
    model[2].reset_running_stats()
    model.zero_grad()
    torch.manual_seed(1)
    watched(model, lambda model: model(x))
    assert all(torch.equal(a, p.grad) for a, p in zip(plain, model.parameters(), strict=True))
    assert all(torch.equal(state[name], b) for name, b in model.named_buffers())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_interrupt_leaves_no_hook_and_no_mode(error: type[BaseException]) -> None:
    class Breaks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise error

    model = nn.Sequential(nn.Linear(2, 2), Breaks())
    count = [0]

    def look(*_: Any) -> None:
        count[0] += 1

    with pytest.raises(error), observed(model, Watch(look)):
        model(torch.ones(1, 2))
    assert count == [2]  # the input and a result
    model[0](torch.ones(1, 2)).exp()
    assert count == [2]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# --- kinds of models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [False, True])
def test_the_parts_of_torchs_own_attention_are_seen(weights: bool) -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 3, 8)
    names = [
        name
        for _, name in sites(watched(model, lambda m: m(x, x, x, need_weights=weights)[0]), "activations")
    ]
    assert names.count("linear") == 2
    assert ("softmax" in names) is weights
    assert ("scaled_dot_product_attention" in names) is not weights


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_part_is_seen_once_with_its_gradients(reentrant: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 3), nn.GELU())

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inner, x * 1.0, use_reentrant=reentrant)

    x = torch.randn(2, 3, requires_grad=True)
    seen = watched(Model(), lambda model: model(x))
    assert sites(seen, "activations") == [("", "mul"), ("inner.0", "linear"), ("inner.1", "gelu")]
    assert Counter(sites(seen, "gradients"))["inner.0", "linear"] == 1


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def test_the_gradient_of_a_custom_functions_result_is_seen_at_its_module() -> None:
    class Custom(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Double.apply(x)

    model = nn.Sequential(nn.Linear(2, 2), Custom(), nn.Tanh())
    seen = watched(model, lambda model: model(torch.randn(3, 2)))
    assert ("1", "mul") in sites(seen, "activations")
    assert ("1", "output") in sites(seen, "gradients")


@pytest.mark.sparse
def test_integers_views_and_conversions_are_no_results() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 4, sparse=True)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids + 1)[0].t().double().float().contiguous()

    seen = watched(Model(), lambda model: model(torch.tensor([[0, 3]])))
    assert sites(seen, "activations") == [("table", "embedding"), ("", "contiguous")]
    (sparse,) = (tensor for kind, _, tensor in seen if kind == "weight gradients")
    assert sparse.shape == (2, 4)


def test_memory_that_is_not_filled_yet_is_no_result() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out = torch.empty_like(x)
            out.copy_(x * 2)
            return out + x.new_full((1,), 3.0)

    seen = watched(Model(), lambda model: model(torch.ones(3, requires_grad=True)))
    assert sites(seen, "activations") == [("", "mul"), ("", "copy_"), ("", "add")]


def test_lstm_complex_and_empty_tensors_pass() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            out, _ = self.lstm(x)
            return torch.fft.rfft(out).abs().sum() + out[:0].exp().sum()

    seen = watched(Model(), lambda model: model(torch.randn(2, 2, 3)))
    assert {"lstm", "fft_rfft", "abs"} <= {name for _, name in sites(seen, "activations")}
    assert ("", "fft_rfft") in sites(seen, "gradients")


# --- sites and formats --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan", ["bf16-mixed", "bf16-true", "bf16-mixed+regions.2=fp32", "bf16-mixed+ops.exp=fp32"]
)
def test_a_low_run_has_the_sites_of_an_fp32_run(plan: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        return nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))

    x = torch.randn(2, 5, 8)
    wide = watched(make(), lambda model: model(x))
    model = make()
    with Amp(plan) as amp:
        amp.prepare(model)
        low = watched(model, lambda model: model(x))
    for kind in ("activations", "weight gradients"):
        assert [site for what, site, _ in low if what == kind] == [
            site for what, site, _ in wide if what == kind
        ]
    assert any(tensor.dtype is torch.bfloat16 for what, _, tensor in low if what == "activations")


def test_the_models_inputs_are_looked_at() -> None:
    model = nn.Linear(2, 2)
    x = torch.ones(1, 2, requires_grad=True)
    seen = watched(model, lambda model: model(input=x) * 3)
    assert [site for kind, site, _ in seen if site.name == "input 0"] == [Site("", "input 0")] * 2
    count = len(seen)
    (x * 2).sum().backward()
    assert len(seen) == count  # no hook remains on the user's tensor


def test_inputs_are_looked_at_where_they_are_asked_for() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    seen = watched(model, lambda model: model(torch.ones(1, 3)), inputs=lambda site: site.path == "1")
    assert sites(seen, "activations") == [("0", "linear"), ("1", "input 0 of linear"), ("1", "linear")]
    assert site_of("a.b.weight") == Site("a.b", "weight")
    assert site_of("weight") == Site("", "weight")
