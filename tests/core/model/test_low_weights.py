"""Operators with low-stored weights and fp32 inputs, or without low-precision kernels, still run."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import castwise
from castwise.core.casting.kernels import registered
from castwise.core.plans import rules, tables
from castwise.core.plans.plan import PRESETS
from tests.here import DEVICE
from tests.soak import each_value, every, pairs, some

MASTERS = ["bf16-master", "fp16-master"]
PLANS = [f"{name}{more}" for name in MASTERS for more in ("", "+rules=cuda", "+rules=apex")]
ROUNDING = {torch.bfloat16: 0.03, torch.float16: 0.004}


class Positions(nn.Module):
    """Embeds, adds a table kept in fp32, and passes the fp32 sum on."""

    def __init__(self, after: nn.Module) -> None:
        super().__init__()
        self.embed, self.after, self.head = nn.Embedding(32, 16), after, nn.Linear(16, 3)
        angles = torch.arange(64)[:, None] * 10000 ** (-torch.arange(16) / 16)
        self.register_buffer("table", angles.sin())

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.after(self.embed(ids) + self.table[: ids.shape[1]]))


class Turned(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.mT).mT


class Flat(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.flatten(0, 1)).view_as(x)


class ByHand(nn.Module):
    """Uses its weights through functions, inside a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.matrix = nn.Parameter(torch.rand(16) + 0.5), nn.Parameter(torch.randn(16) / 4)

    def run(self, x: Tensor) -> Tensor:
        x = functional.layer_norm(x, (16,), self.scale)
        x = x + torch.tensordot(x, self.matrix, 1)[..., None] + torch.mv(x[0], self.matrix)[:, None]
        flat = functional.batch_norm(x.flatten(0, 1), None, None, self.scale, self.matrix, training=True)
        return flat.view_as(x)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Bilinear(16, 16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x)


def encoder_layer(first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=first)


AFTER: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(16),
    "LayerNorm without bias": lambda: nn.LayerNorm(16, bias=False),
    "RMSNorm": lambda: nn.RMSNorm(16),
    "GroupNorm": lambda: Turned(nn.GroupNorm(4, 16)),
    "InstanceNorm": lambda: Turned(nn.InstanceNorm1d(16, affine=True)),
    "InstanceNorm with statistics": lambda: Turned(
        nn.InstanceNorm1d(16, affine=True, track_running_stats=True)
    ),
    "BatchNorm without statistics": lambda: Flat(nn.BatchNorm1d(16, track_running_stats=False)),
    "encoder layer, norm first": lambda: encoder_layer(True),
    "encoder layer, norm last": lambda: encoder_layer(False),
    "by hand": ByHand,
    "Bilinear": Both,
}
IDS = torch.arange(20).view(2, 10)


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Positions(AFTER[kind]())


def off(got: Tensor, want: Tensor) -> float:
    return float((got.detach() - want.detach()).norm() / want.detach().norm())


@each_value()
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("kind", AFTER)
def test_low_weights_take_wide_inputs(kind: str, name: str) -> None:
    model = made(kind)
    exact = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = castwise.Plan.preset(name.partition("+")[0])
    more = "+loss_scale.init=1024" if "fp16" in name else ""
    with castwise.Amp(name + more, device=DEVICE) as amp, warnings.catch_warnings():
        warnings.simplefilter("error")
        amp.prepare(model, optimizer)
        for training in (True, False):
            model.train(training), exact.train(training)
            want = exact(IDS)
            exact.zero_grad()
            want.square().mean().backward()
            got = model(IDS)
            assert off(got, want) < ROUNDING[plan.compute_dtype]
            amp.backward(got.square().mean())
            amp.unscale_(optimizer)
            grads = [torch.cat([p.grad.float().flatten() for p in m.parameters()]) for m in (model, exact)]
            assert off(*grads) < 3 * ROUNDING[plan.compute_dtype]
            optimizer.zero_grad()
            with torch.no_grad():
                assert off(model(IDS), exact(IDS)) < 2 * ROUNDING[plan.compute_dtype]
        amp.backward(model(IDS).square().mean())
        assert not amp.step(optimizer).skipped
    assert not registered(DEVICE)


@every(2, 1)
@pytest.mark.parametrize(("kind", "name"), some(pairs(AFTER, MASTERS), 2))
def test_compiled_with_fullgraph_they_run_as_eager_ones(kind: str, name: str) -> None:
    torch._dynamo.reset()
    model = made(kind)
    with castwise.Amp(name, device=DEVICE) as amp:
        amp.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        found = []
        for run in (model, compiled):
            model.zero_grad()
            out = run(IDS)
            out.square().mean().backward()
            found.append((out.detach(), [p.grad.clone() for p in model.parameters()]))
        torch.testing.assert_close(*found, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", ["LayerNorm", "GroupNorm", "RMSNorm", "InstanceNorm"])
def test_a_wide_input_of_a_norm_is_not_rounded(kind: str) -> None:
    model = made(kind)
    seen: list[torch.dtype] = []
    model.after.register_forward_hook(lambda module, args, out: seen.extend((args[0].dtype, out.dtype)))
    with castwise.Amp("bf16-master", device=DEVICE) as amp:
        amp.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        model(IDS)
    assert seen == [torch.float32, torch.float32]


@pytest.mark.parametrize("kind", ["LayerNorm", "GroupNorm", "BatchNorm without statistics", "Bilinear"])
def test_low_inputs_are_taken_as_without_the_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for rows in (rules.stored_low, lambda base, device: {}):
        monkeypatch.setattr(rules, "stored_low", rows)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), AFTER[kind](), nn.Linear(16, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with castwise.Amp("bf16-master", device=DEVICE) as amp:
            amp.prepare(model, optimizer)
            for seed in range(3):
                x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(seed), device="cpu").to(
                    DEVICE
                )
                amp.backward(model(x).square().mean())
                amp.step(optimizer)
                optimizer.zero_grad()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["bf16-mixed", "bf16-true", "O1", "fp32"])
def test_other_plans_get_no_such_rows(name: str) -> None:
    assert not castwise.Amp(name, device=DEVICE).resolve(nn.LayerNorm(4)).mixes


def test_models_of_matrix_products_and_plans_that_say_otherwise_get_no_such_rows() -> None:
    assert not castwise.Amp("bf16-master", device=DEVICE).resolve(nn.Linear(4, 4)).mixes
    model = made("LayerNorm")
    with castwise.Amp("bf16-master+ops.layer_norm=as_is", device=DEVICE) as amp:
        amp.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        with pytest.raises(RuntimeError, match=r"mixed dtype|expected scalar type"):
            model(IDS)


@pytest.mark.parametrize("device_type", ["cpu", "cuda", "mps"])
@pytest.mark.parametrize("base", ["native", "cuda", "apex", "none"])
def test_rows_for_low_weights_leave_those_of_the_table(base: str, device_type: str) -> None:
    extra, table = rules.stored_low(base, device_type), rules.base_table(base, device_type)
    assert all(op not in table or table[op].rule == "as_is" for op in extra)
    assert "matrix_exp" in extra
    if base == "none":
        listed = {op for group in tables.STORED_LOW for op in group.ops.split()}
        assert {
            op for op in listed if hasattr(torch.ops.aten, op)
        } == extra.keys()  # torch 2.14 has removed some operators


# --- operators without low kernels -----------------------------------------------------------------------------------


class Skew(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        upper = x.triu(1)
        return upper - upper.mT


class Exponential(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.matrix_exp(x)


class Cayley(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one", torch.eye(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.solve(self.one - x, self.one + x)


def parametrized(*parts: nn.Module) -> nn.Module:
    layer = nn.Linear(8, 8)
    for part in parts:
        parametrize.register_parametrization(layer, "weight", part)
    return layer


ROTATIONS: dict[str, Callable[[], nn.Module]] = {
    "matrix_exp": lambda: parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="matrix_exp"),
    "cayley": lambda: parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="cayley"),
    "householder": lambda: parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="householder"),
    "not square": lambda: parametrizations.orthogonal(nn.Linear(8, 5)),
    "plain": lambda: parametrizations.orthogonal(nn.Linear(8, 8), use_trivialization=False),
    "own exponential": lambda: parametrized(Skew(), Exponential()),
    "own solver": lambda: parametrized(Skew(), Cayley()),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
}


_EAGER = [name for name in PRESETS if name not in ("fp32", "tf32", "O0", "O3")]
_COMPILED = pairs(ROTATIONS, ["bf16-master", "bf16-true", "O2"])


@every(2)
@pytest.mark.parametrize(
    ("kind", "names", "compiled"),
    [
        *((kind, some(_EAGER, 2), False) for kind in ROTATIONS),
        *((kind, [name for other, name in _COMPILED if other == kind], True) for kind in ROTATIONS),
    ],
)
def test_parametrizations_train_as_in_fp32_under_every_preset(
    kind: str, names: list[str], compiled: bool
) -> None:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0), device="cpu").to(DEVICE)
    want = None
    for name in ("fp32", *names):
        torch.manual_seed(3)
        model = nn.Sequential(layer := ROTATIONS[kind](), nn.ReLU(), nn.Linear(layer.out_features, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run: Any = model
        if compiled and name != "fp32":
            torch._dynamo.reset()
            run = torch.compile(model, backend="aot_eager", fullgraph=True)
        with castwise.Amp(name, device=DEVICE) as amp:
            amp.prepare(model, optimizer)
            for _ in range(10):
                amp.backward(run(x).square().mean())
                assert not amp.step(optimizer).skipped, name
                optimizer.zero_grad()
        found = torch.cat([p.detach().float().flatten() for p in model.parameters()])
        want = found if want is None else want
        assert off(found, want) < (0.02 if amp.plan.compute == "bf16" else 0.004), name


def test_weights_computed_by_weight_norm_get_no_border() -> None:
    model = nn.Sequential(ROTATIONS["weight_norm"](), nn.Linear(8, 3))
    assert castwise.Amp("bf16-true", device=DEVICE).resolve(model).borders == ()


_LOW = torch.eye(5) * 2 + 0.1


@each_value(2)
@pytest.mark.parametrize("name", PLANS[:3])
@pytest.mark.parametrize(
    "call",
    [
        torch.matrix_exp, torch.linalg.matrix_exp, torch.det, torch.linalg.slogdet, torch.logdet, torch.linalg.lu,
        torch.linalg.lu_factor, torch.linalg.ldl_factor, torch.linalg.pinv, torch.linalg.inv, torch.linalg.svdvals,
        torch.linalg.vander, torch.pdist, torch.linalg.qr, torch.linalg.cholesky,
        lambda w: torch.linalg.solve_triangular(w, w, upper=True), lambda w: torch.linalg.solve(w, w),
        lambda w: torch.linalg.lu_solve(*torch.linalg.lu_factor(w), w),
    ],
)  # fmt: skip
def test_a_model_calls_linear_algebra_on_weights_stored_low(
    call: Callable[[Tensor], Tensor], name: str
) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(_LOW.clone())

        def forward(self) -> Tensor:
            out = call(self.weight)
            return out if isinstance(out, Tensor) else out[-1 if call is torch.linalg.slogdet else 0]

    model = Own()
    want = model()
    with castwise.Amp(name, device=DEVICE) as amp:
        amp.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        torch.testing.assert_close(model().float(), want, rtol=0.02, atol=0.02)


# --- plans that store all weights low and cast no operators but those that they name ---------------------------


class Tied(nn.Module):
    """A small language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.inner = nn.Embedding(20, 16), nn.LayerNorm(16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        return self.head(h + functional.gelu(self.inner(self.norm(h))).softmax(-1))


NAMED = [
    "ops.gelu=fp32", "ops.softmax=fp32", "ops.layer_norm=fp32", "ops.linear=fp32", "ops.embedding=fp32", "ops.exp=fp32",
    "regions.head=fp32", "regions.embed=fp32", "regions.inner=fp32", "regions.head=fp32+ops.gelu=fp32",
    "regions.norm=fp32+ops.softmax=fp32",
]  # fmt: skip


@pytest.mark.parametrize("more", NAMED)
@pytest.mark.parametrize("name", ["bf16-true", "fp16-true+loss_scale=none", "O3"])
def test_what_a_plan_keeps_in_fp32_meets_low_weights(name: str, more: str) -> None:
    ids, dtype = torch.arange(12).reshape(2, 6), torch.float16 if name != "bf16-true" else torch.bfloat16
    want = Tied()(ids)
    for inference in (True, False):
        model = Tied()
        with (
            castwise.Amp(f"{name}+{more}", device=DEVICE, nonfinite="skip") as amp,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            if inference:
                amp.prepare(model, inference=True)
            else:
                amp.prepare(model, optimizer := torch.optim.SGD(model.parameters(), 0.01))
            out = model(ids)
            if not inference:
                amp.backward(out.float().square().mean())
                amp.step(optimizer)
                assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
            torch.testing.assert_close(
                out.float(), want, rtol=0, atol=2 * ROUNDING[dtype] * float(want.abs().max())
            )
            shared = model.embed.weight.dtype
            assert shared is (
                torch.float32 if "head" in more or ("embed=" in more and "regions" in more) else dtype
            )
            amp.close()
