"""Exported programs and baked modules give the same results as the prepared model."""

from __future__ import annotations

import contextlib
import copy
import io
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import castwise
from castwise import Plan
from castwise.core.casting import frames
from castwise.core.plans.plan import PRESETS
from castwise.errors import PatternError, PlanError, StateError
from tests.here import DEVICE

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Attention(nn.Module):
    """Attention with a persistent buffer and a non-persistent one."""

    table: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.register_buffer("scale", torch.tensor(1.5))
        self.register_buffer("table", torch.linspace(-1, 1, 16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x + self.table.to(x.dtype)).chunk(3, -1)
        q, k, v = (part.view(*x.shape[:2], 2, 8).transpose(1, 2) for part in parts)
        return (
            self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            * self.scale
        )


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), Attention(), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)).eval()


def images() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(8, 4)).eval()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out, (h, _) = self.lstm(x)
        return {"out": self.head(out), "last": h}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return torch.einsum("bld,vd->blv", self.embed(ids), self.out.weight) + self.out(self.embed(ids))


def floats(seed: int = 0, batch: int = 3, length: int = 5) -> Tensor:
    return torch.randn(batch, length, 8, generator=torch.Generator().manual_seed(seed), device="cpu").to(
        DEVICE
    )


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "attention": (model, floats),
    "images": (
        images,
        lambda: torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0), device="cpu").to(DEVICE),
    ),
    "recurrent": (lambda: Recurrent().eval(), floats),
    "tied": (
        lambda: Tied().eval(),
        lambda: torch.randint(10, (2, 5), generator=torch.Generator().manual_seed(0), device="cpu").to(
            DEVICE
        ),
    ),
}
PLANS = [*PRESETS, "bf16-mixed+ops.gelu=lower", "bf16-mixed+ops.scaled_dot_product_attention=unfused",
         "fp16-mixed+ops.layer_norm=fp32", "bf16-mixed+memory_format=channels_last"]  # fmt: skip


def prepared(given: nn.Module, plan: str, *args: Any) -> Any:
    """Return the model's output under the plan."""
    copied = copy.deepcopy(given)
    with castwise.Amp(plan, device=DEVICE) as amp:
        amp.prepare(copied, inference=True, keep_originals=True)
        with torch.no_grad():
            return copied(*args)


def runnable(plan: str) -> bool:
    return "tf32" not in plan


def leaves(value: Any) -> list[Tensor]:
    return [*value.values()] if isinstance(value, dict) else [value]


def photograph(given: nn.Module) -> dict[str, tuple[Tensor, torch.dtype]]:
    return {k: (v.clone(), v.dtype) for k, v in [*given.named_parameters(), *given.named_buffers()]}


def unchanged(given: nn.Module, before: dict[str, tuple[Tensor, torch.dtype]]) -> bool:
    now = photograph(given)
    return now.keys() == before.keys() and all(
        torch.equal(now[k][0], v) and now[k][1] is dtype for k, (v, dtype) in before.items()
    )


@pytest.mark.parametrize("plan", [plan for plan in PLANS if runnable(plan)])
@pytest.mark.parametrize("case", CASES)
def test_a_program_gives_what_the_prepared_model_gives(case: str, plan: str) -> None:
    make, feed = CASES[case]
    given, x = make(), feed()
    before = photograph(given)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        program = castwise.export(given, plan, x)
    pairs = list(zip(leaves(program.module()(x)), leaves(prepared(given, plan, x)), strict=True))
    assert all(one.dtype is other.dtype for one, other in pairs)
    equal = all(torch.equal(one, other) for one, other in pairs)
    # torch.export decomposes an LSTM; fused kernels, which not every machine has, round less often
    assert equal or case == "recurrent"
    assert all(torch.allclose(one, other, rtol=0.0, atol=0.01) for one, other in pairs)
    assert equal != any("outputs of the exported Recurrent differ" in str(one.message) for one in said)
    assert unchanged(given, before)
    assert castwise.Amp.of(given) is None
    assert not any("castwise" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize("plan", ["bf16-mixed", "bf16-mixed+regions.1=fp32", "O1"])
def test_sizes_may_differ_from_the_example(plan: str) -> None:
    given, sizes = model(), {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", max=64)}
    program = castwise.export(given, plan, (floats(),), dynamic_shapes=(sizes,))
    other = floats(1, 7, 9)
    assert torch.equal(program.module()(other), prepared(given, plan, other))


def test_a_saved_program_runs_without_castwise(tmp_path: Path) -> None:
    given, x = model(), floats()
    torch.export.save(castwise.export(given, "O1", x), tmp_path / "model.pt2")
    torch.save((x, prepared(given, "O1", x)), tmp_path / "pair.pt")
    code = (
        "import sys; sys.modules['castwise'] = None\n"
        "import torch\n"
        "program = torch.export.load('model.pt2')\n"
        "x, want = torch.load('pair.pt')\n"
        "assert torch.equal(program.module()(x), want)\n"
        "assert {v.dtype for v in program.state_dict.values()} >= {torch.float16}\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)


def test_weights_are_stored_as_the_plan_stores_them_and_do_not_follow_the_model() -> None:
    given, x = model(), floats()
    program = castwise.export(given, "bf16-true", x)
    want = program.module()(x)
    with torch.no_grad():
        for parameter in given.parameters():
            parameter.zero_()
    assert torch.equal(program.module()(x), want)
    weights = [v for k, v in program.state_dict.items() if k.endswith("weight")]
    assert {weight.dtype for weight in weights} == {torch.bfloat16}
    assert not any(weight.requires_grad for weight in weights)


def test_a_block_of_castwise_inside_of_the_model_is_in_the_graph() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with castwise.autocast("bf16-mixed+ops.linear=fp32", device_type=DEVICE):
                x = self.a(x)
            with torch.autocast(DEVICE, enabled=False):
                return self.b(x.to(self.b.weight.dtype))

    given, x = Block().eval(), floats()
    assert torch.equal(castwise.export(given, "bf16-mixed", x).module()(x), prepared(given, "bf16-mixed", x))


def test_torchs_own_export_of_a_prepared_model_is_refused_as_before_and_after() -> None:
    given, x = model(), floats()
    with castwise.Amp("bf16-mixed", device=DEVICE) as amp:
        amp.prepare(given, inference=True, keep_originals=True)
        for _ in range(2):
            with pytest.raises(StateError, match=r"torch\.export of a prepared"):
                torch.export.export(given, (x,), strict=False)
            castwise.export(model(), "bf16-mixed", x)


def test_outputs_that_are_nan_are_no_difference() -> None:
    class Undefined(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.clamp_max(-10.0).sqrt()

    assert castwise.export(Undefined().eval(), "bf16-mixed", floats()).module()(floats()).isnan().all()


# --- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call", [lambda m: castwise.export(m, "bf16-mixed", floats()), lambda m: castwise.bake(m, "bf16-mixed")]
)
def test_a_model_in_training_mode_or_prepared_is_refused(call: Callable[[nn.Module], object]) -> None:
    given = model()
    given[3].train()
    with pytest.raises(StateError, match=r"3 of this Sequential is in training mode.*model.eval\(\)"):
        call(given)
    given.eval()
    with castwise.Amp("bf16-mixed", device=DEVICE) as amp:
        amp.prepare(given)
        with pytest.raises(StateError, match=r"prepared.*amp.close\(\)"):
            call(given)
    call(given)


def test_what_torch_cannot_trace_is_one_error_and_the_model_stays() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if x.sum() > 0 else x

    given = Branches().eval()
    before = photograph(given)
    with pytest.raises(StateError, match=r"torch\.export cannot trace this Branches") as caught:
        castwise.export(given, "bf16-mixed", floats())
    assert caught.value.__cause__ is not None
    assert frames.depth() == 0
    assert unchanged(given, before)
    with pytest.raises(PatternError, match="nowhere"):
        castwise.export(given, "bf16-mixed+regions.nowhere=fp32", floats())
    assert unchanged(given, before)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_program_begins_with_the_buffers_that_the_model_has(replaced: bool) -> None:
    """The comparison runs on the example leave the buffers unchanged."""

    class Counting(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if replaced:
                self.count = self.count + 1
            else:
                self.count += 1
            return self.a(x) * self.count

    given, x = Counting().eval(), floats()
    said = (
        pytest.warns(UserWarning, match="assigns its buffers count anew")
        if replaced
        else contextlib.nullcontext()
    )
    with said:
        program = castwise.export(given, "bf16-mixed", x)
    assert float(given.count) == float(program.state_dict["count"]) == 0.0
    run, by_model = program.module(), copy.deepcopy(given)
    with castwise.Amp("bf16-mixed", device=DEVICE) as amp, torch.no_grad():
        amp.prepare(by_model, inference=True, keep_originals=True)
        for _ in range(1 if replaced else 3):
            assert torch.equal(run(x), by_model(x))


def test_a_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        given = model()
    for call in (
        lambda: castwise.export(given, "bf16-mixed", floats()),
        lambda: castwise.bake(given, "bf16-mixed"),
    ):
        with pytest.raises(StateError, match="is on the meta device"):
            call()


def test_a_setting_of_the_process_is_said_to_be_no_part_of_it() -> None:
    with pytest.warns(UserWarning, match="fp32_matmul='tf32'.*whole process"):
        castwise.export(model(), "fp32+fp32_matmul=tf32", floats())


def test_outputs_that_are_random_are_said_to_differ() -> None:
    class Noisy(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Noisy.calls += 1
            return x + Noisy.calls

    with pytest.warns(UserWarning, match="outputs of the exported Noisy differ"):
        castwise.export(Noisy().eval(), "bf16-mixed", floats())


def test_complex_outputs_are_compared_in_both_parts() -> None:
    class Phase(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Phase.calls += 1
            return torch.complex(x, x + Phase.calls)

    with pytest.warns(UserWarning, match="outputs of the exported Phase differ"):
        castwise.export(Phase().eval(), "fp32", floats())


# --- baked ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan", ["fp32", "bf16-mixed", "fp16-mixed", "bf16-true", "fp16-true", "O3", "bf16-master"]
)
@pytest.mark.parametrize("case", CASES)
def test_a_baked_module_is_plain_and_gives_what_the_prepared_model_gives(case: str, plan: str) -> None:
    make, feed = CASES[case]
    given, x = make(), feed()
    before = photograph(given)
    parsed = Plan.parse(plan)
    low = LOW.get(parsed.compute)
    plain = castwise.bake(given, plan)
    assert unchanged(given, before)
    assert type(plain) is type(given)
    file = io.BytesIO()
    torch.save(plain.state_dict(), file)
    assert b"castwise" not in file.getvalue()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in plain.modules())
    fed = x.to(low) if low is not None and x.is_floating_point() and not parsed.autocasts else x
    with torch.no_grad(), torch.autocast(DEVICE, low or torch.bfloat16, enabled=parsed.autocasts):
        try:
            got = plain(fed)
        except RuntimeError as error:
            if "could not create a primitive" in str(error):
                pytest.skip(
                    "this machine has no LSTM in fp16 under torch.autocast; a session casts around it"
                )
            raise
    for one, other in zip(leaves(got), leaves(prepared(given, plan, x)), strict=True):
        assert torch.equal(one.to(other.dtype), other)


def test_tied_weights_stay_tied() -> None:
    plain = castwise.bake(Tied().eval(), "bf16-true")
    assert plain.get_parameter("out.weight") is plain.get_parameter("embed.weight")
    assert plain.get_parameter("out.weight").dtype is torch.bfloat16


@pytest.mark.parametrize("plan", ["O1", "bf16-mixed+regions.1=fp32", "bf16-mixed+ops.gelu=lower"])
def test_a_plan_that_casts_inside_of_the_model_is_not_baked(plan: str) -> None:
    with pytest.raises(PlanError, match=r"need casts inside of the model.*castwise.export"):
        castwise.bake(model(), plan)


@pytest.mark.inductor
@pytest.mark.cpu  # Inductor needs a compiler for each device
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("plan", ["fp16-mixed"])
def test_inductor_compiles_an_exported_program_ahead_of_time(plan: str, tmp_path: Path) -> None:
    x = torch.randn(2, 5, 8)
    program = castwise.export(model(), plan, (x,))
    want = program.module()(x)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    found = torch._inductor.aoti_load_package(path)(x)
    # Inductor fuses operators, and so leaves out roundings between them.
    torch.testing.assert_close(found, want, rtol=0.0, atol=4e-3)
