"""Errors that mean a plan cannot run: those raised by torch here, and messages reported for other devices."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from castwise.errors import DeviceError, NonFiniteError, PlanError, RankError, WorkloadError
from castwise.lab.timing.failures import cannot_run, unfit

LOW = torch.ones(2, 2, dtype=torch.bfloat16)
HALF = LOW.half()
WIDE = torch.ones(2, 2)
AT = torch.zeros(2, 2, dtype=torch.long)
LACKING: dict[str, Callable[[], object]] = {
    # operators without a kernel for low formats
    "airy_ai": lambda: torch.special.airy_ai(LOW),
    "solve": lambda: torch.linalg.solve(LOW, LOW),
    "svd": lambda: torch.linalg.svd(HALF),
    "inv": lambda: torch.linalg.inv(LOW),
    "lstsq": lambda: torch.linalg.lstsq(LOW, LOW),
    "pinv": lambda: torch.linalg.pinv(LOW),
    "logdet": lambda: torch.logdet(LOW),
    "rfft": lambda: torch.fft.rfft(LOW),
    "fft of fp16": lambda: torch.fft.fft(HALF),
    "stft": lambda: torch.stft(LOW.new_ones(1, 400), n_fft=64, return_complex=True),
    "ctc_loss": lambda: functional.ctc_loss(LOW.new_ones(5, 2, 3), AT + 1, AT[0] + 5, AT[0] + 2),
    "cdist": lambda: torch.cdist(LOW, LOW),
    "quantile": lambda: torch.quantile(LOW, 0.5),
    "complex": lambda: torch.complex(LOW, LOW),
    "view_as_complex": lambda: torch.view_as_complex(LOW),
    "numpy": lambda: LOW.numpy(),
    "another backend's": lambda: WIDE.to_mkldnn() @ WIDE,
    # operands of different dtypes
    "mm": lambda: torch.mm(LOW, WIDE),
    "addmm": lambda: torch.addmm(WIDE, LOW, LOW),
    "bmm": lambda: torch.bmm(LOW[None], WIDE[None]),
    "baddbmm": lambda: torch.baddbmm(WIDE[None], LOW[None], LOW[None]),
    "mv": lambda: torch.mv(LOW, WIDE[0]),
    "dot": lambda: torch.dot(LOW[0], WIDE[0]),
    "linear": lambda: functional.linear(WIDE, HALF, HALF[0]),
    "bilinear": lambda: functional.bilinear(LOW, LOW, WIDE[None]),
    "tensordot": lambda: torch.tensordot(LOW, WIDE, 1),
    "conv2d": lambda: functional.conv2d(LOW[None, None], WIDE[None, None]),
    "conv2d's bias": lambda: functional.conv2d(WIDE[None, None], WIDE[None, None], LOW[0, :1]),
    "layer_norm": lambda: functional.layer_norm(WIDE, (2,), LOW[0], LOW[0]),
    "batch_norm": lambda: functional.batch_norm(WIDE, LOW[0], LOW[0]),
    "attention": lambda: functional.scaled_dot_product_attention(LOW[None], WIDE[None], WIDE[None]),
    "lstm": lambda: nn.LSTM(2, 2)(LOW[None]),
    "gru of fp16": lambda: nn.GRU(2, 2).half()(WIDE[None]),
    "lstm cell": lambda: nn.LSTMCell(2, 2)(LOW),
    "embedding": lambda: functional.embedding(LOW, WIDE),
    "embedding_bag": lambda: functional.embedding_bag(AT, HALF, per_sample_weights=WIDE, mode="sum"),
    "prelu": lambda: functional.prelu(LOW, WIDE[0]),
    "lerp": lambda: torch.lerp(WIDE, LOW, 0.5),
    "scatter": lambda: WIDE.scatter(0, AT, LOW),
    "index_add": lambda: WIDE.index_add(0, AT[0], LOW),
    "index_copy": lambda: WIDE.index_copy(0, AT[0], LOW),
    "index_put": lambda: WIDE.index_put((AT[0],), LOW),
    "masked_scatter": lambda: WIDE.masked_scatter(WIDE > 0, LOW),
    "put_": lambda: WIDE.clone().put_(AT[0], LOW[0]),
    "sparse.mm": lambda: torch.sparse.mm(WIDE.to_sparse(), LOW),
    "nll_loss": lambda: functional.nll_loss(LOW, AT[0], weight=WIDE[0]),
    "binary_cross_entropy": lambda: functional.binary_cross_entropy(LOW, WIDE),
    "allclose": lambda: torch.allclose(LOW, WIDE),
    "a gradient": lambda: setattr(nn.Parameter(WIDE), "grad", LOW),
    # numbers out of a dtype's range
    "masked_fill": lambda: HALF.masked_fill(WIDE > 0, -1e9),
    "full": lambda: torch.full((2,), 1e6, dtype=torch.float16),
}


@pytest.mark.parametrize("call", LACKING.values(), ids=LACKING)
def test_what_torch_lacks_for_a_dtype(call: Callable[[], object]) -> None:
    with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
        call()
    assert cannot_run(caught.value)
    assert unfit(caught.value).startswith("not supported by this device: ")


ELSEWHERE = [
    # as reported in github.com/deepspeedai/DeepSpeed/issues/6723 and opendatalab/MinerU/issues/1508
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx( handle, opa, opb, m, n, k, &falpha)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ARCH_MISMATCH when calling `cublasGemmEx`"),
    # deepakn97/relationPrediction/issues/37, gistvision/e2sri/issues/13
    RuntimeError("Unable to find a valid cuDNN algorithm to run convolution"),
    RuntimeError("GET was unable to find an engine to execute this computation"),
    RuntimeError("no valid convolution algorithms available in CuDNN"),
    RuntimeError("CUDA error: no kernel image is available for execution on the device"),
    RuntimeError("CUDA error: invalid device function"),
    RuntimeError("torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9, or ROCm MI300+"),
    # lucidrains/denoising-diffusion-pytorch/issues/239, unslothai/unsloth/issues/827
    RuntimeError("No available kernel. Aborting execution."),
    RuntimeError("FlashAttention only support fp16 and bf16 data type"),
    # intel/torch-xpu-ops/issues/1612; also an LSTM in fp16 on a CPU without castwise's rule
    RuntimeError("could not create a primitive descriptor for the matmul primitive"),
    # pytorch/pytorch/issues/104191 and 122602, oobabooga/textgen/issues/5216
    TypeError("Trying to convert BFloat16 to the MPS backend but it does not have support for that dtype."),
    TypeError("BFloat16 is not supported on MPS"),
    TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."),
    NotImplementedError("The operator 'aten::_linalg_svd.U' is not currently implemented for the MPS device."),
]  # fmt: skip


@pytest.mark.parametrize("error", ELSEWHERE, ids=lambda error: str(error)[:40])
def test_what_other_devices_lack(error: Exception) -> None:
    assert cannot_run(error)
    assert unfit(error) == f"not supported by this device: {error}"


def test_no_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.int8)
    found: list[Exception] = [
        caught.value,
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("MPS backend out of memory (MPS allocated: 18.13 GB, other allocations: 2.01 MB)"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] . DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes"),
    ]  # fmt: skip
    assert [(cannot_run(error), unfit(error)) for error in found] == [(True, "out of memory")] * len(found)


class Checked(nn.Module):
    """A module that raises a given error."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise self.error


FAULTS: dict[str, Callable[[], object]] = {
    "a key": lambda: {}["key"],
    "an index": lambda: [][0],
    "an index of a tensor": lambda: WIDE[5],
    "types": lambda: [] + 1,  # type: ignore[operator]
    "operands": lambda: object() < 1,  # type: ignore[operator]
    "an argument": lambda: torch.zeros(2, dtypes=torch.float32),  # type: ignore[call-overload]
    "no forward": lambda: nn.Module()(WIDE),
    "no attribute": lambda: nn.Module().missing,
    "shapes": lambda: torch.mm(WIDE, torch.ones(3, 3)),
    "a view": lambda: torch.ones(2).view(3),
    "no graph": lambda: WIDE.sum().backward(),
    "sizes": lambda: WIDE + torch.ones(3),
    "another device": lambda: torch.ones(2, device="meta") + WIDE[0],
    "an operator for booleans": lambda: (WIDE > 0) - (WIDE > 0),
    "a file": Path("/no/such/file").read_text,
    # errors of a model's own checks, for example of its values
    "distribution": lambda: torch.distributions.Categorical(logits=torch.full((2,), math.nan), validate_args=True),
    "domain": lambda: math.sqrt(-1.0),
    "overflow": lambda: math.exp(1e4),
    "division": lambda: 1 / 0,
    "an assertion": lambda: Checked(AssertionError("sizes must be even"))(WIDE),
    "a value": lambda: Checked(ValueError("the mask must be of float32"))(WIDE),
    "a type": lambda: Checked(TypeError("dtype must be a string"))(WIDE),
    "what is missing": lambda: Checked(NotImplementedError("this branch"))(WIDE),
    "a sentence": lambda: Checked(RuntimeError("Half of the batch is not supported"))(WIDE),
}  # fmt: skip


@pytest.mark.parametrize("call", FAULTS.values(), ids=FAULTS)
def test_faults_of_the_code(call: Callable[[], object]) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    assert not cannot_run(caught.value)
    assert unfit(caught.value).startswith(f"{type(caught.value).__name__}: ")


def test_castwises_own_errors() -> None:
    assert cannot_run(PlanError("no such module"))
    assert cannot_run(DeviceError("no bf16"))
    assert cannot_run(NonFiniteError("the loss is nan"))
    assert not cannot_run(WorkloadError("the batches ended"))
    assert [cannot_run(RankError("one failed", cannot_run=lacking)) for lacking in (False, True)] == [
        False,
        True,
    ]
