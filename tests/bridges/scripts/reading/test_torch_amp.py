"""Calls of torch.amp are read as torch would bind their arguments."""

from __future__ import annotations

import importlib
import inspect

import pytest

from castwise.bridges.scripts.reading.torch_amp import AUTOCAST, SCALER, AmpCall, amp_calls
from castwise.bridges.scripts.reading.view import View


def read(code: str) -> AmpCall:
    (call,) = amp_calls(View(f"import torch\n{code}\n"), {**AUTOCAST, **SCALER})
    return call


@pytest.mark.parametrize("name", [name for name in (*AUTOCAST, *SCALER) if name.count(".") < 4])
def test_arguments_by_place_are_those_of_torch(name: str) -> None:
    module, _, last = name.rpartition(".")
    made = getattr(importlib.import_module(module), last, None)
    if made is None:
        pytest.skip("this torch does not have it")
    names = list(inspect.signature(made.__init__).parameters)[1:]
    call = read(f"{name}({', '.join(names)})")
    assert not call.unseen
    assert {each: call.view.code(value) for each, value in call.given.items()} == {
        each: each for each in names
    }
    assert (
        read(f"{name}({', '.join(names)}, more)").unseen
        == "the script does not show the arguments of this call"
    )


@pytest.mark.parametrize(
    ("code", "device_type", "format_", "is_on"),
    [
        ("torch.autocast('cuda')", "cuda", "fp16", True),
        ("torch.autocast('cpu')", "cpu", "bf16", True),
        ("torch.autocast(device)", None, None, True),
        ("torch.autocast('cpu', torch.half, False)", "cpu", "fp16", False),
        ("torch.autocast(device_type='cuda', dtype=dtype, enabled=amp)", "cuda", None, False),
        ("torch.cuda.amp.autocast(False)", "cuda", "fp16", False),
        ("torch.cuda.amp.autocast(True, torch.bfloat16)", "cuda", "bf16", True),
        ("torch.amp.GradScaler(enabled=True)", None, None, True),
        ("torch.cuda.amp.GradScaler(1024., 2., .5, 2000, False)", "cuda", "fp16", False),
        ("torch.autocast('cuda', torch.bfloat16, *rest)", "cuda", "bf16", False),
        ("torch.autocast('cuda', **options)", "cuda", None, False),
        ("torch.autocast('cuda', dtyp=torch.half)", "cuda", None, False),
    ],
)
def test_what_a_call_says(code: str, device_type: str | None, format_: str | None, is_on: bool) -> None:
    call = read(code)
    assert (call.device_type, call.format, call.is_on) == (device_type, format_, is_on)
