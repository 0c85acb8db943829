"""Rates: counts of operations checked against torch's, and grades of given intervals."""

import math

import pytest
import torch

from castwise.lab.timing.rates import (
    FP32,
    VARIANTS,
    FormatGrade,
    Kernel,
    Loop,
    Rate,
    _probe,
    grade_format,
    grade_of,
    kernels,
    measure_bandwidth,
    measure_rates,
    variants,
)
from castwise.lab.timing.stats import Ratio

CPU = torch.device("cpu")
BF16_INSIDE = next(variant for variant in VARIANTS if variant.name == "fp32 (bf16 inside)")


def ratio(value, low, high):
    return Ratio(value, low, high, 0.95, 9)


def rate(kernel, speedup=None, *, grade=None, name="bf16", **rest):
    grade = grade or (grade_of(speedup) if speedup else None)
    return Rate(kernel, "", name, 100.0, speedup=speedup, grade=grade, **rest)


# --- counting -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", kernels("cpu", small=True), ids=lambda kernel: kernel.name)
def test_a_multiplication_and_an_addition_are_two_operations(kernel):
    out = kernel.on(CPU, torch.float32)()
    terms = math.prod(kernel.inputs[1][1:]) if out.dim() == 4 else kernel.inputs[0][1]  # terms of each sum
    assert kernel.flops == 2 * out.numel() * terms


def test_every_device_has_the_same_operators_and_probes_are_smaller():
    names = ["matmul", "conv3x3", "conv1x1", "depthwise"]
    for device_type in ("cpu", "cuda"):
        small, full = kernels(device_type, small=True), kernels(device_type)
        assert [k.name for k in small] == [k.name for k in full] == names
        assert all(s.flops < f.flops for s, f in zip(small, full, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_operator_overflows_or_underflows_in_any_format(dtype):
    for kernel in kernels("cpu", small=True):
        out = kernel.on(CPU, dtype)()
        assert out.dtype == dtype
        assert torch.isfinite(out).all()
        assert out.abs().max() > 1e-4


# --- grades -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interval", "grade"),
    [((1.8, 1.5, 2.1), "fast"), ((1.3, 0.9, 1.7), "no gain"), ((1.0, 1.0, 1.0), "no gain"),
     ((0.8, 0.6, 1.0), "no gain"), ((0.5, 0.4, 0.6), "avoid")],
)  # fmt: skip
def test_an_interval_that_contains_one_is_no_gain(interval, grade):
    assert grade_of(ratio(*interval)) == grade


def test_fast_everywhere():
    rates = [rate("matmul", ratio(4, 3, 5)), rate("conv3x3", ratio(2, 1.5, 3)), rate("matmul", name="fp32")]
    assert grade_format("bf16", rates) == FormatGrade(
        "bf16", "fast", "matmul 4.00x, conv3x3 2.00x of fp32's rate"
    )


def test_fast_in_products_and_slow_in_convolutions_names_where_to_avoid_it():
    said = grade_format("bf16", [rate("matmul", ratio(4, 3, 5)), rate("conv3x3", ratio(0.1, 0.05, 0.2))])
    assert (said.grade, said.avoid_in) == ("fast", ("conv3x3",))


def test_depthwise_alone_decides_nothing():
    tie = ratio(1, 0.9, 1.1)
    assert grade_format("bf16", [rate("matmul", tie), rate("depthwise", ratio(3, 2, 4))]).grade == "no gain"
    assert (
        grade_format("bf16", [rate("matmul", tie), rate("depthwise", ratio(0.2, 0.1, 0.3))]).grade
        == "no gain"
    )


def test_emulated_and_failing_formats_are_avoided_with_the_reason():
    slow = ratio(0.004, 0.004, 0.004)
    said = grade_format("fp16", [rate("matmul", slow, name="fp16", probe=True),
                          rate("conv3x3", name="fp16", grade="avoid", error="not implemented")])  # fmt: skip
    assert said.grade == "avoid"
    assert said.reason == "matmul 0.004x (small probe), conv3x3 fails (not implemented) of fp32's rate"


# --- measuring ----------------------------------------------------------------------------------------------


def test_variants_of_a_cpu_start_with_fp32_and_account_for_all():
    can, cannot = variants("cpu")
    assert can[0] == FP32
    assert {v.name for v in can} | {v.name for v, _ in cannot} == {v.name for v in VARIANTS}
    assert {"bf16", "fp16"} <= {v.name for v in can}
    assert all(reason for _, reason in cannot)


def test_settings_are_in_force_while_a_loop_runs_and_restored_after_it():
    backends = (torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv)
    before = [backend.fp32_precision for backend in backends]
    seen = []

    def look(left, right):
        seen.append([backend.fp32_precision for backend in backends])
        return left

    loop = Loop(Kernel("matmul", "", 1, ((2, 2), (2, 2)), look), BF16_INSIDE, CPU)
    loop.before(1)
    loop.run(1)
    loop.after()
    assert seen == [["bf16", "bf16"]]
    assert [backend.fp32_precision for backend in backends] == before


def test_a_hopeless_format_and_one_that_fails_never_reach_full_size():
    def call(left, right):
        if left.dtype == torch.float16:  # about 100 times the work
            for _ in range(100):
                left @ right
        if left.dtype == torch.bfloat16:
            raise RuntimeError("no kernel\nfor bf16")
        return left @ right

    kernel = Kernel("matmul", "", 2 * 128**3, ((128, 128), (128, 128)), call)
    can = tuple(v for v in VARIANTS if v.name in ("fp32", "bf16", "fp16"))
    out = {r.format: r for r in _probe(kernel, kernel, can, CPU)}
    assert set(out) == {"bf16", "fp16"}
    assert (out["bf16"].error, out["bf16"].gflops, out["bf16"].grade) == ("no kernel", None, "avoid")
    assert out["fp16"].probe
    assert out["fp16"].grade == "avoid"
    assert out["fp16"].speedup.value < 1 / 8


def test_rates_of_this_cpu():
    state = torch.get_rng_state()
    told = []
    rates = measure_rates(CPU, rounds=2, small=True, on_kernel=lambda *args: told.append(args))
    names = [v.name for v in variants("cpu")[0]]
    assert [r.format for r in rates] == names * 4
    assert all(r.gflops is not None and r.gflops > 0 for r in rates if not r.error)
    assert all((r.speedup is None) == (r.format == "fp32") for r in rates)
    assert told[0] == ("matmul", 0, 4)
    assert told[-1] == ("depthwise", 4, 4)
    assert torch.equal(torch.get_rng_state(), state)


def test_bandwidth_has_ordered_quartiles():
    band = measure_bandwidth(CPU, copied_bytes=2**20, repetitions=3)
    assert 0 < band.gb_per_s_low <= band.gb_per_s <= band.gb_per_s_high


@pytest.mark.gpu
def test_rates_of_this_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    rates = measure_rates(torch.device("cuda"), rounds=6)
    fp16 = next(r for r in rates if r.kernel == "matmul" and r.format == "fp16")
    assert fp16.gflops is not None
    assert not fp16.probe
