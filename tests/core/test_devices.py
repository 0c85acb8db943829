"""The module that asks torch what a device supports."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from castwise.core import _torch, devices


def _alone(code: str) -> str:
    """Run code in its own process and return its output; a device can be renamed only once per process."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


BACKEND = """
    import types, torch, castwise
    from castwise.core import devices
    from castwise.errors import CastwiseError

    assert not devices.has_autocast("npu") and devices.type_of("npu") is None
    torch.utils.rename_privateuse1_backend("npu")
    npu = types.ModuleType("torch.npu")
    npu.is_available, npu.device_count = lambda: True, lambda: 2
    npu.get_amp_supported_dtype = lambda: [torch.bfloat16]
    torch._register_device_module("npu", npu)

    def refused(call):
        try:
            call()
        except CastwiseError as error:
            return str(error)
        raise AssertionError("accepted")
"""


def test_only_names_of_devices_are_device_types() -> None:
    for name in ("cpu", "cuda", "xpu", "mps"):
        assert devices.has_autocast(name)
        assert name in devices.autocast_types()
    for other in ("meta", "cuda:0", "nn", "bf16-mixed", "", 0, None, torch.bfloat16):
        assert not devices.has_autocast(other)


def test_the_cpu_has_what_castwise_uses() -> None:
    found = devices.features(torch.device("cpu"))
    assert {"autocast kernels", "bf16", "fp16", "fp64", "fused Adam", "fused SGD", "random generators"} <= {
        *found.has
    }
    assert found.count == 1
    assert devices.widest_dtype(torch.device("cpu")) is torch.float64


def test_fused_kernels_are_those_that_torch_has_registered() -> None:
    kernels = ("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_")
    assert all(devices.has_fused(kernel, "cpu") for kernel in kernels)
    # Meta tensors have shapes but no values.
    assert not any(devices.has_fused(kernel, "meta") for kernel in kernels)
    assert devices.has_fused("_fused_adagrad_", "cuda") == _adagrad_fuses_on_cuda()


def _adagrad_fuses_on_cuda() -> bool:
    """Return whether Adagrad accepts fused=True on CUDA: torch 2.11 does not, though its CUDA builds have the kernel."""
    if not torch.backends.cuda.is_built():
        return False
    with FakeTensorMode():  # needs no GPU
        parameter = torch.nn.Parameter(torch.ones(4, device="cuda"))
        parameter.grad = torch.ones(4, device="cuda")
        try:
            torch.optim.Adagrad([parameter], fused=True).step()
        except RuntimeError as error:
            return "requires all the params to be floating point Tensors of supported devices" not in str(
                error
            )
    return True


def test_random_numbers_are_restored() -> None:
    torch.manual_seed(3)
    with devices.same_random_numbers(["cpu"]):
        inside = torch.rand(4)
    assert torch.equal(torch.rand(4), inside)


def test_numbers_for_guards_are_kept_where_no_device_is() -> None:
    spare = _torch.dynamo._spare_devices()
    assert len(spare) == 3
    assert not {*spare} & {*devices.autocast_types()}


def test_a_device_that_an_extension_brings_is_found_by_its_name() -> None:
    _alone(
        BACKEND
        + """
    assert devices.accelerator() == "npu" and devices.choices() == "cpu or npu, or npu:0 to npu:1"
    assert devices.type_of("privateuseone:1") == "npu" and "npu" in devices.autocast_types()
    assert devices.low_dtypes("npu") == (torch.bfloat16,) and not devices.casts("npu")
    assert castwise.Amp("fp32", device="privateuseone").device_type == "npu"
    assert castwise.Amp("bf16-true").device_type == "npu"
    assert castwise.autocast("bf16", device_type="npu:1").device == "npu"
    """
    )


LACKS = [
    ("castwise.Amp('bf16-mixed', device='npu')", "torch has no autocast kernels for npu devices, so nothing would be cast"),
    ("castwise.Amp('fp16-true', device='npu')", "npu (npu) does not compute in fp16; use bf16 instead"),
    ("castwise.Amp('fp32', device='npu:2')", "there are only 2, counted from 0; use a lower index"),
    ("castwise.Amp('fp32', device='tpu')", "torch knows no such device here; allowed: cpu or npu, or npu:0 to npu:1"),
    ("castwise.bench('sine', ['fp32'], device='npu:5')", "there are only 2"),
    ("castwise.Amp('fp32', device='hpu')", "there is no module torch.hpu, which the extension that brings the device registers"),
    ("castwise.Amp('tf32', device='npu')", "this npu device has no TF32"),
]  # fmt: skip


@pytest.fixture(scope="module")
def said() -> list[str]:
    """What each call says, in one process: a device can be renamed only once, and importing torch takes seconds."""
    calls = ", ".join(f"lambda: {call}" for call, _ in LACKS)
    found: list[str] = json.loads(
        _alone(f"{BACKEND}\n    import json\n    print(json.dumps([refused(call) for call in ({calls})]))")
    )
    return found


@pytest.mark.parametrize("number", range(len(LACKS)), ids=[call for call, _ in LACKS])
def test_what_a_device_lacks_is_said_in_one_sentence(number: int, said: list[str]) -> None:
    assert LACKS[number][1] in said[number]
    assert "\n" not in said[number]


def test_a_build_without_the_compiler_is_said_in_one_sentence() -> None:
    said = _alone(
        """
    import sys, torch, castwise
    from castwise.errors import DeviceError

    class Without:
        def find_spec(self, name, path=None, target=None):
            if name.startswith("torch._dynamo"):
                raise ImportError(f"No module named {name!r}")

    sys.meta_path.insert(0, Without())
    amp = castwise.Amp(castwise.Plan(compute="bf16", compile="default"), device="cpu")
    try:
        amp.prepare(torch.nn.Linear(2, 2))
    except DeviceError as error:
        print(error)
    """
    )
    assert "torch.compile cannot compile for cpu here: this build of torch has no compiler" in said
    assert said.endswith("use compile='as_given'")


GIB = 2**30


@pytest.mark.parametrize(
    ("line", "files", "left"),
    [
        ("0::/box", {"box": ("memory.max", 4, "memory.current", 3, "inactive_file", 1)}, [2]),
        (
            "0::/outer/box",
            {
                "outer": ("memory.max", 2, "memory.current", 1, "inactive_file", 0),
                "outer/box": ("memory.max", None, "memory.current", 1, "inactive_file", 0),
            },
            [1],
        ),
        ("0::/", {"": ("memory.max", 8, "memory.current", 2, "inactive_file", 0)}, [6]),
        # a container that sees only its own group
        ("0::/../../elsewhere", {"": ("memory.max", 8, "memory.current", 2, "inactive_file", 0)}, [6]),
        ("0::/docker/0123", {"": ("memory.max", 2, "memory.current", 3, "inactive_file", 0)}, [0]),
        (
            "4:cpu,memory:/box",
            {
                "memory/box": (
                    "memory.limit_in_bytes",
                    5,
                    "memory.usage_in_bytes",
                    3,
                    "total_inactive_file",
                    2,
                )
            },
            [4],
        ),
        ("4:cpu:/box", {"cpu/box": ("memory.max", 4, "memory.current", 3, "inactive_file", 1)}, []),
        ("0::/box", {}, []),
        ("nonsense", {}, []),
    ],
)
def test_memory_is_free_within_the_limits_of_control_groups(
    line: str, files: dict[str, tuple[Any, ...]], left: list[int], tmp_path: Path
) -> None:
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    (tmp_path / "cgroup").write_text(f"12:pids:/\n{line}\n")
    for folder, (limit, most, usage, used, cached, cache) in files.items():
        (mounted / folder).mkdir(parents=True, exist_ok=True)
        (mounted / folder / limit).write_text("max\n" if most is None else f"{most * GIB}\n")
        (mounted / folder / usage).write_text(f"{used * GIB}\n")
        (mounted / folder / "memory.stat").write_text(f"anon 77\n{cached} {cache * GIB}\n")
    assert list(devices._free_in_groups(tmp_path / "cgroup", mounted)) == [each * GIB for each in left]
    assert list(devices._free_in_groups(tmp_path / "none", mounted)) == []
