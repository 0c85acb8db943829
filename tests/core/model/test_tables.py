"""Tables in a model's buffers keep their precision, and the model runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import castwise
from castwise.core.model.borders import Border
from tests.here import DEVICE
from tests.soak import each_value

WITHOUT_AUTOCASTING = ["bf16-true", "fp16-true", "O2", "naive"]
LOW = (torch.bfloat16, torch.float16)


def sines(length: int, width: int) -> Tensor:
    angles = torch.arange(length)[:, None] * 10000 ** (-torch.arange(0, width, 2) / width)
    return torch.cat([angles.sin(), angles.cos()], -1)


class PositionalEncoding(nn.Module):
    """The positional encoding of torch's tutorials: a table without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.0)
        self.register_buffer("pe", sines(64, 16)[None])

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.pe[:, : x.shape[1]])


class Codebook(nn.Module):
    """A VQ-VAE codebook: it looks up averages of earlier inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("embed", torch.randn(16, 8))
        self.register_buffer("size", torch.ones(8))
        self.register_buffer("average", self.embed.clone())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 16)
        nearest = (
            flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.embed + self.embed.pow(2).sum(0)
        ).argmin(1)
        if self.training:
            seen = functional.one_hot(nearest, 8).to(flat.dtype)
            self.size.data.mul_(0.999).add_(seen.sum(0), alpha=0.001)
            self.average.data.mul_(0.999).add_(flat.detach().T @ seen, alpha=0.001)
            self.embed.data.copy_(self.average / self.size)
        found = functional.embedding(nearest, self.embed.T).view_as(x)
        return x + (found - x).detach()


class Angles(nn.Module):
    """A table of large angles, whose precision matters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "angles", torch.outer(torch.arange(64.0) + 4000.25, 10000 ** (-torch.arange(16) / 16))
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.angles[: x.shape[1]].cos()


class Attention(nn.Module):
    """Rotates by its own tables, beside parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.register_buffer("turns", sines(64, 16))
        self.register_buffer("mask", torch.full((64, 64), -torch.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = (part * self.turns[: x.shape[1]] for part in (q, k))
        by_hand = (q @ k.mT + self.mask[: x.shape[1], : x.shape[1]]).softmax(-1) @ v
        return self.out(by_hand + functional.scaled_dot_product_attention(q, k, v))


class Around(nn.Module):
    """Adds its own table, and uses some of its weights through functions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.weight = nn.Linear(16, 16), nn.Parameter(torch.randn(16, 16) / 4)
        self.scale = nn.Parameter(torch.ones(16))
        self.register_buffer("positions", sines(64, 16)[None])
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(2)])

    def mix(self, x: Tensor) -> Tensor:
        return functional.layer_norm(
            functional.linear(x + self.positions[:, : x.shape[1]], self.weight), (16,), self.scale
        )

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.mix, self.embed(x), use_reentrant=False)
        for block in self.blocks:
            x = block(x + self.positions[:, : x.shape[1]])
            x = block[1](x + self.positions[:, : x.shape[1]])
        return x


def around(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), make(), nn.Linear(16, 16))


MODELS = {
    "encoding": lambda: around(PositionalEncoding),
    "codebook": lambda: around(Codebook),
    "angles": lambda: around(Angles),
    "attention": lambda: around(Attention),
    "around": lambda: around(Around),
    "root": Around,
}
ROUNDING = {torch.bfloat16: 0.04, torch.float16: 0.006}


def tables(model: nn.Module) -> dict[str, Tensor]:
    return {n: b for n, b in model.named_buffers() if b.is_floating_point() and not n.endswith("mask")}


def data() -> Tensor:
    return torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1), device="cpu").to(DEVICE)


@each_value()
@pytest.mark.parametrize("name", WITHOUT_AUTOCASTING)
@pytest.mark.parametrize("kind", MODELS)
def test_tables_stay_and_their_model_runs(kind: str, name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]()
    exact, before = copy.deepcopy(model), copy.deepcopy(tables(model))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with castwise.Amp(name, device=DEVICE) as amp:
        amp.prepare(model, optimizer)
        assert all(b.dtype is torch.float32 and torch.equal(b, before[n]) for n, b in tables(model).items())
        model.eval(), exact.eval()
        with torch.no_grad():
            got, want = model(data()), exact(data())
        off = float((got - want).norm() / want.norm())
        assert off < ROUNDING[amp.plan.compute_dtype], off
        model.train()
        for _ in range(2):
            amp.backward(1e-3 * model(data()).square().mean())
            assert not amp.step(optimizer).skipped
            optimizer.zero_grad()
    if kind != "codebook":
        assert all(torch.equal(b, before[n]) for n, b in tables(model).items())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_table_is_rounded_once_and_with_what_it_is_added_to() -> None:
    model = around(PositionalEncoding)
    with castwise.Amp("bf16-true", device=DEVICE) as amp:
        amp.prepare(model)
        seen: list[Tensor] = []
        model[0].register_forward_hook(lambda module, args, out: seen.append(out))
        model[2].register_forward_pre_hook(lambda module, args: seen.append(*args))
        model(data())
        assert seen[1].dtype is torch.bfloat16
        assert torch.equal(seen[1], (seen[0].float() + sines(64, 16)[:6]).bfloat16())


def test_an_average_in_a_table_moves_as_in_fp32() -> None:
    model = around(Codebook)
    exact = copy.deepcopy(model[1])
    with castwise.Amp("bf16-true", device=DEVICE) as amp:
        amp.prepare(model)
        model[1].register_forward_pre_hook(lambda module, args: (args, exact(args[0].float()))[0])
        with torch.no_grad():
            for _ in range(200):
                model(torch.randn(4, 6, 16))
        torch.testing.assert_close(model[1].average, exact.average)
        torch.testing.assert_close(model[1].embed, exact.embed)


@pytest.mark.parametrize("name", WITHOUT_AUTOCASTING)
def test_what_is_fp32_alone_is_not_rounded_beside_parameters(name: str) -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)
            self.register_buffer("frequencies", 10000 ** (-torch.arange(16) / 16)[None])
            self.register_buffer("moments", torch.arange(4000.0, 4064.0)[:, None])

        def forward(self, x: Tensor) -> Tensor:
            self.angles = self.moments @ self.frequencies
            return self.inner(x * self.angles[: x.shape[1]].cos())

    model = around(Rotary)
    with castwise.Amp(name, device=DEVICE) as amp:
        amp.prepare(model)
        model(data())
        assert torch.equal(model[1].angles, model[1].moments * model[1].frequencies)


@pytest.mark.parametrize("name", [*WITHOUT_AUTOCASTING, "bf16-mixed", "bf16-master", "O1"])
def test_models_without_tables_get_one_border(name: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout())
    with castwise.Amp(name, device=DEVICE) as amp:
        amp.prepare(model)
        assert [place.path for place in amp.resolve(model).borders] == []
        assert not any(module._forward_hooks for module in model[:])


def test_tables_where_operators_are_cast_get_no_border() -> None:
    for name in ("bf16-mixed", "fp16-mixed", "bf16-master", "O1", "fp32"):
        assert castwise.Amp(name, device=DEVICE).resolve(around(Attention)).borders == ()


# --- regions that set a format for tables ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("region", "stored", "border"),
    [
        ("1=params:bf16", torch.bfloat16, False),
        ("1=params:fp32", torch.float32, True),
        ("type:PositionalEncoding=params:bf16", torch.bfloat16, False),
        ("1=fp32", torch.float32, True),
        ("1=bf16", torch.float32, True),
    ],
)
def test_a_region_says_how_a_table_is_stored(region: str, stored: torch.dtype, border: bool) -> None:
    model = around(PositionalEncoding)
    with castwise.Amp(f"bf16-true+regions.{region}", device=DEVICE) as amp:
        amp.prepare(model)
        assert model[1].pe.dtype is stored
        assert bool(amp.resolve(around(PositionalEncoding)).borders) is border
        assert model(data()).isfinite().all()
    assert model[1].pe.dtype is torch.float32


def test_a_region_inside_a_module_that_runs_in_fp32_keeps_its_own_format() -> None:
    class Outer(PositionalEncoding):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Softmax(-1), nn.CrossEntropyLoss(torch.rand(16)))

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return x + self.inner[1](x.flatten(0, 1), torch.zeros(12, dtype=torch.long)) + self.inner[0](x)

    model = around(Outer)
    with castwise.Amp("bf16-true+regions.1.inner.0=bf16", device=DEVICE) as amp:
        resolution = amp.resolve(model)
        assert resolution.places["1.inner.0"].compute == "bf16"
        assert resolution.places["1.inner.0"].around == "fp32"
        assert "1.inner.1.weight" not in resolution.storage
        assert "1           fp32     as they are     in bf16" in str(resolution)
        amp.prepare(model)
        assert model(data()).isfinite().all()


# --- copies, compilation -----------------------------------------------------------------------------------------


@each_value()
@pytest.mark.parametrize("name", ["bf16-true", "fp16-true"])
@pytest.mark.parametrize("kind", ["encoding", "angles", "attention", "root"])
def test_compiled_models_with_tables_run_whole_and_as_eager_ones(kind: str, name: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MODELS[kind]()
    with castwise.Amp(name, device=DEVICE) as amp:
        amp.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for run in (model, compiled):
            model.zero_grad()
            out = run(data())
            out.sum().backward()
            grads = [q.grad.clone() for q in model.parameters()]
            if run is model:
                want = (out, grads)
        torch.testing.assert_close((out, grads), want, rtol=0.02, atol=0.02)


@each_value()
@pytest.mark.parametrize("kind", MODELS)
def test_copies_of_prepared_models_with_tables_run_the_same(kind: str) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]().eval()
    with castwise.Amp("bf16-true", device=DEVICE) as amp:
        amp.prepare(model)
        with torch.no_grad():
            assert torch.equal(copy.deepcopy(model)(data()), model(data()))


@pytest.mark.parametrize("kind", MODELS)
def test_tables_at_inference(kind: str) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]().eval()
    with torch.inference_mode():
        want = model(data())
        with castwise.Amp("bf16-true", device=DEVICE) as amp:
            amp.prepare(model, inference=True, keep_originals=True)
            assert all(buffer.dtype is torch.float32 for buffer in tables(model).values())
            assert float((model(data()) - want).norm() / want.norm()) < ROUNDING[torch.bfloat16]


@pytest.mark.parametrize("made_inside", [False, True])
def test_inference_mode_around_prepare_changes_only_values(made_inside: bool) -> None:
    """Parameters stay normal tensors, or inference tensors, as the model was made."""
    with torch.inference_mode(made_inside):
        model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)).eval()
    before = copy.deepcopy(model.state_dict())
    with torch.inference_mode():
        amp = castwise.Amp("bf16-true+memory_format=channels_last", device=DEVICE)
        amp.prepare(model, inference=True, keep_originals=True)
        assert model(torch.ones(1, 4, 4, 4)).isfinite().all()
    assert model[0].weight.dtype is torch.bfloat16
    assert all(p.is_inference() is made_inside for p in model.parameters())
    amp.close()
    assert all(p.is_inference() is made_inside for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    if not made_inside:
        model(torch.ones(1, 4, 4, 4)).sum().backward()


def test_a_model_on_the_meta_device_resolves_as_one_in_memory() -> None:
    with torch.device("meta"):
        bare = MODELS["attention"]()
    plan = castwise.Plan.preset("bf16-true")
    there, here = (
        castwise.Amp(plan, device=DEVICE).resolve(model) for model in (bare, MODELS["attention"]())
    )
    assert there.places == here.places


# --- real models -----------------------------------------------------------------------------------------------------

_SIZES = {
    "hidden_size": 16, "d_model": 16, "n_embd": 16, "embed_dim": 8, "dff": 16, "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16, "ffn_dim": 16, "intermediate_size": 16, "n_layer": 1, "num_layers": 1, "num_hidden_layers": 2,
    "encoder_layers": 1, "decoder_layers": 1, "n_head": 4, "num_attention_heads": 4, "attention_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 4, "rotary_dim": 4,
    "vocab_size": 32, "n_positions": 32, "max_position_embeddings": 32, "num_local_experts": 2,
}  # fmt: skip
_VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_SWIN = {
    "embed_dim": 8,
    "image_size": 16,
    "patch_size": 2,
    "depths": [2, 1],
    "num_heads": [1, 2],
    "window_size": 4,
}


@each_value()
@pytest.mark.parametrize("name", ["bf16-true", "fp16-true"])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("CTRL", {}), ("GPTJ", {}), ("CodeGen", {}), ("OpenAIGPT", {}), ("MiniMax", {}), ("XGLM", {}),
        ("M2M100", {}), ("Llama", {}), ("ViT", _VIT), ("Swin", _SWIN), ("Swinv2", _SWIN),
    ],
)  # fmt: skip
def test_models_of_transformers_with_tables_train_and_run(kind: str, more: dict[str, Any], name: str) -> None:
    import transformers

    config_class = getattr(transformers, f"{kind}Config")
    known = config_class()
    config = config_class(**(more or {k: v for k, v in _SIZES.items() if hasattr(known, k)}))
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}Model")(config)
    images = model.main_input_name == "pixel_values"
    inputs = (
        {"pixel_values": torch.randn(2, 3, 16, 16)} if images else {"input_ids": torch.arange(24).view(2, 12)}
    )
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    exact = copy.deepcopy(model).eval()
    before = copy.deepcopy(tables(model))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with castwise.Amp(name, device=DEVICE) as amp:
        amp.prepare(model, optimizer)
        assert {n: b.dtype for n, b in tables(model).items()} == {n: b.dtype for n, b in before.items()}
        model.eval()
        with torch.no_grad():
            got, want = (run(**inputs)[0] for run in (model, exact))
        assert float((got - want).norm() / want.norm()) < 2 * ROUNDING[amp.plan.compute_dtype]
        model.train()
        for _ in range(2):
            amp.backward(1e-2 * model(**inputs)[0].square().mean())
            assert not amp.step(optimizer).skipped
            optimizer.zero_grad()


# --- what cannot run -------------------------------------------------------------------------------------------------


class FromOutside(nn.Module):
    """Reads the table of another module without calling it, so that module's border does not apply."""

    def __init__(self) -> None:
        super().__init__()
        self.encoding, self.last = PositionalEncoding(), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.encoding.pe[:, : x.shape[1]])


class Vectors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.rand(16))
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x - self.shift)


@pytest.mark.parametrize(
    ("make", "last", "pattern"),
    [
        (FromOutside, "last", "encoding"),
        (Vectors, "last", "type:Vectors"),
        (lambda: nn.Sequential(Vectors()), "0.last", "0"),
    ],
)
def test_a_mismatch_beside_a_table_names_what_cures_it(
    make: Callable[[], nn.Module], last: str, pattern: str
) -> None:
    with castwise.Amp("bf16-true", device=DEVICE) as amp:
        model = make()
        amp.prepare(model)
        with pytest.raises(RuntimeError) as caught:
            model(data())
    assert f"keep it in fp32, by Region('{last}', compute='fp32')" in str(caught.value)
    for cure in (f"{last}=fp32", f"{pattern}=params:bf16"):
        with castwise.Amp(f"bf16-true+regions.{cure}", device=DEVICE) as amp:
            amp.prepare(model)
            assert model(data()).isfinite().all()


def test_borders_around_tables_are_borders() -> None:
    model = around(PositionalEncoding)
    with castwise.Amp("bf16-true", device=DEVICE) as amp:
        amp.prepare(model)
        (hook,) = model[1]._forward_hooks.values()
        assert isinstance(hook.__self__, Border)
