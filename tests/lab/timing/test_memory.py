"""Memory, compared with counts made by hand."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from castwise.core.plans.plan import Plan
from castwise.errors import CastwiseError
from castwise.lab.timing.memory import Memory, count_saved_bytes, measure_memory, peak_bytes
from castwise.lab.timing.runners import InferenceRun, TrainingRun
from castwise.lab.workloads.workload import find_workload

CPU = torch.device("cpu")
FP32 = Plan.preset("fp32")


def test_saved_storages_are_counted_once_and_weights_not_at_all() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    inputs = torch.randn(32, 8)
    with count_saved_bytes(model) as saved:
        model(inputs).sum()
    # the input, for the first weight; and ReLU's output, which ReLU and the second layer share
    assert saved.total_bytes == 4 * (32 * 8 + 32 * 16)


def test_saved_storages_of_views_are_one() -> None:
    inputs = torch.randn(6, 6, requires_grad=True)
    with count_saved_bytes(nn.Identity()) as saved:
        ((inputs[:3] * inputs[3:]) * inputs.t()[:3]).sum()
    # the whole of inputs once, for all its views, and the first product
    assert saved.total_bytes == 4 * (36 + 18)


def test_casts_of_weights_count_as_saved() -> None:
    model = nn.Linear(8, 16, bias=False)
    with count_saved_bytes(model) as saved, torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(32, 8, requires_grad=True)).sum()
    assert saved.total_bytes == 2 * (32 * 8 + 16 * 8)


def test_peak_is_exact_and_repeats_to_the_byte(tiny: str) -> None:
    workload = find_workload(f"{tiny}:plain")
    peaks = {peak_bytes(lambda: InferenceRun(workload, FP32, CPU), CPU) for _ in range(3)}
    weights = 4 * (8 * 16 + 16 + 16 + 1)
    inputs, hidden = 4 * 32 * 8, 4 * 32 * 16
    states = 2 * torch.get_rng_state().nbytes  # two random states of torch that the runner holds
    # at its peak the call holds the weights, the input, and the hidden layer before and after ReLU
    assert peaks == {weights + inputs + 2 * hidden + states}


def test_a_tensor_held_in_passing_shows_in_full(tiny: str) -> None:
    def peaks(name: str) -> tuple[int, int]:
        workload = find_workload(f"{tiny}:{name}")
        training = peak_bytes(lambda: TrainingRun(workload, FP32, CPU), CPU)
        inference = peak_bytes(lambda: InferenceRun(workload, FP32, CPU), CPU)
        assert training is not None
        assert inference is not None
        return training, inference

    plain, hoarder = peaks("plain"), peaks("hoarder")
    for before, after in zip(plain, hoarder, strict=True):
        assert abs(after - before - 4 * 2**20) < 16 * 1024


def test_an_earlier_peak_in_the_same_process_does_not_leak_into_the_next(tiny: str) -> None:
    plain, hoarder = find_workload(f"{tiny}:plain"), find_workload(f"{tiny}:hoarder")
    first = peak_bytes(lambda: InferenceRun(plain, FP32, CPU), CPU)
    kept = [torch.zeros(2**20)]
    peak_bytes(lambda: TrainingRun(hoarder, FP32, CPU), CPU)
    kept.clear()
    assert peak_bytes(lambda: InferenceRun(plain, FP32, CPU), CPU) == first


@pytest.fixture(scope="module")
def one(tiny: str) -> Memory:
    """Return the memory measured in a separate process."""
    return measure_memory(f"{tiny}:mlp", FP32, CPU)


def test_two_processes_agree_to_the_byte_and_training_takes_more(tiny: str, one: Memory) -> None:
    assert measure_memory(f"{tiny}:mlp", FP32, CPU) == one
    assert one.training_peak_bytes > one.inference_peak_bytes > 0
    assert one.saved_bytes > 0
    assert one.method == "bytes held by torch's allocator"


def test_a_workload_of_lambdas_is_measured_like_one_that_is_named(tiny: str) -> None:
    workload = find_workload(f"{tiny}:mlp")
    of_lambdas = replace(workload, batches=lambda seed: workload.batches(seed))
    assert measure_memory(of_lambdas, FP32, CPU) == measure_memory(f"{tiny}:mlp", FP32, CPU)


def test_a_workload_that_cannot_be_sent_is_measured_in_a_fork(tiny: str, one: Memory) -> None:
    workload = find_workload(f"{tiny}:mlp")
    lock = threading.Lock()

    def optimizer(params: Any) -> torch.optim.Optimizer:
        with lock:
            return torch.optim.SGD(params, lr=0.1)

    unsendable = replace(workload, optimizer=optimizer)
    memory = measure_memory(unsendable, FP32, CPU)
    assert memory.method.endswith("one thread")
    assert replace(memory, method="") == replace(one, method="")


def test_the_other_process_is_no_rank_of_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: str
) -> None:
    """Code that joins a process group if torchrun's variables are set would wait forever."""
    code = "\nimport os\nassert not {'RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'TORCHELASTIC_RUN_ID'} & set(os.environ)\n"
    (tmp_path / "careful.py").write_text(Path(tiny).read_text() + code)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    memory = measure_memory(f"{tmp_path / 'careful.py'}:plain", FP32, CPU, inference=False)
    assert memory.training_peak_bytes is not None
    assert memory.inference_peak_bytes is None


def test_a_failure_in_the_other_process_comes_back_as_a_sentence(tiny: str) -> None:
    with pytest.raises(CastwiseError, match="memory was not measured: FloatingPointError: a kernel"):
        measure_memory(f"{tiny}:breaks_in_low", Plan.preset("bf16-mixed"), CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_peak_on_a_gpu_is_that_of_its_allocator(tiny: str) -> None:
    plain, hoarder = (
        measure_memory(f"{tiny}:{name}", FP32, torch.device("cuda")) for name in ("plain", "hoarder")
    )
    assert plain.method == "max_memory_allocated"
    # the hoarder's tensor is on the CPU
    assert plain.training_peak_bytes == hoarder.training_peak_bytes > plain.inference_peak_bytes > 0
