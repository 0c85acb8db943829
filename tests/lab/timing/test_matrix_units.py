"""Detection of matrix units from the text of cpuinfo and from CUDA capabilities."""

import pytest
import torch

from castwise.lab.timing.matrix_units import cpu_flags, cpu_units, cuda_units, matrix_units, rocm_units

XEON = """processor\t: 0
model name\t: Intel(R) Xeon(R) Platinum 8480+
flags\t\t: fpu avx2 avx512f avx512_bf16 avx512_fp16 amx_bf16 amx_tile amx_int8
bugs\t\t: spectre_v1

processor\t: 1
flags\t\t: fpu
"""


def test_flags_are_those_of_the_first_processor():
    assert cpu_flags(XEON) == {
        "fpu", "avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_tile", "amx_int8"
    }  # fmt: skip


def test_arm_calls_them_features_and_other_systems_have_none():
    assert cpu_flags("processor : 0\nFeatures\t: fp asimd bf16 sme\n") == {"fp", "asimd", "bf16", "sme"}
    assert cpu_flags("") == frozenset()


def test_amx_is_a_matrix_unit_for_the_formats_it_lists():
    units = cpu_units(cpu_flags(XEON))
    assert (units.name, units.present, units.formats) == ("AMX", True, ("bf16",))
    assert cpu_units(frozenset({"amx_tile", "amx_bf16", "amx_fp16"})).formats == ("bf16", "fp16")


def test_amx_for_whole_numbers_alone_has_no_format():
    units = cpu_units(frozenset({"amx_tile", "amx_int8"}))
    assert units.formats == ()
    assert "whole numbers alone" in units.sentence


def test_avx512_bf16_is_a_vector_unit_and_no_matrix_unit():
    units = cpu_units(frozenset({"avx512f", "avx512_bf16"}))
    assert (units.name, units.present, units.formats, units.vector_formats) == ("none", False, (), ("bf16",))
    assert "AVX-512 BF16 is a set of vector instructions, not matrix units" in units.sentence


def test_a_plain_cpu_has_neither_and_an_unreadable_one_is_unknown():
    assert cpu_units(frozenset({"avx2"})).vector_formats == ()
    assert cpu_units(frozenset()).name == "unknown"
    assert not cpu_units(frozenset()).present


@pytest.mark.parametrize(
    ("capability", "generation", "has", "lacks"),
    [
        ((7, 0), "first", "fp16", "bf16"),
        ((7, 5), "second", "fp16", "bf16"),
        ((8, 0), "third", "tf32", "fp8_e4m3"),
        ((8, 6), "third", "bf16", "fp8_e4m3"),
        ((8, 9), "fourth", "fp8_e4m3", "fp64"),
        ((9, 0), "fourth", "fp8_e4m3", "fp64"),
        ((10, 0), "fifth", "fp8_e4m3", "fp64"),
        ((12, 0), "fifth", "fp8_e4m3", "fp64"),
    ],
)
def test_tensor_cores_by_compute_capability(capability, generation, has, lacks):
    units = cuda_units(capability)
    assert units.name == "Tensor Cores"
    assert generation in units.sentence
    assert has in units.formats
    assert lacks not in units.formats


def test_gpus_without_tensor_cores():
    assert cuda_units((6, 1)).name == "none"
    assert cuda_units((7, 5), "NVIDIA GeForce GTX 1660 Ti").name == "none"
    assert cuda_units((7, 5), "NVIDIA GeForce RTX 2080").name == "Tensor Cores"


def test_amd_gpus():
    assert "fp8_e4m3" in rocm_units("gfx942:sramecc+:xnack-").formats
    assert rocm_units("gfx90a").formats == ("bf16", "fp16")
    assert rocm_units("gfx1100").present
    assert rocm_units("gfx1030").name == "none"
    assert rocm_units("").name == "unknown"


def test_this_machine_has_an_answer():
    assert matrix_units(torch.device("cpu")).sentence
