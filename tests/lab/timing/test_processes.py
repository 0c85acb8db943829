"""Measuring processes take over the caller's settings; workloads that cannot run there are reported."""

from __future__ import annotations

import multiprocessing
import pathlib
import socket
import sys
import time
import types
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from tests.lab.timing.test_apart import CPU, workload
from tests.lab.timing.there import has
from tests.soak import some
from torch import Tensor, nn

from castwise import Workload
from castwise.core.plans.plan import PRESETS
from castwise.core.session.process import put_settings, settings
from castwise.errors import CastwiseError
from castwise.lab.passes.isolation import undisturbed
from castwise.lab.timing import processes, served
from castwise.lab.timing.apart import SeparateRun
from castwise.lab.timing.memory import measure_memory
from castwise.lab.timing.processes import Home, NotThereError, _end, delivered

CHANGES: dict[str, Callable[[], Any]] = {
    "matmul precision": lambda: torch.set_float32_matmul_precision("medium"),
    "fp32_precision": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "of one operator": lambda: setattr(torch.backends.mkldnn.conv, "fp32_precision", "bf16"),  # type: ignore[attr-defined]
    "deterministic": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "denormals": lambda: torch.set_flush_denormal(True),
    "attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "tf32": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "reduced": lambda: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    "oneDNN": lambda: setattr(torch.backends.mkldnn, "enabled", False),
    "dtype": lambda: torch.set_default_dtype(torch.float64),
    "device": lambda: torch.set_default_device("meta"),
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "autocast": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "recursion": lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 1),
}


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    with Home() as found:
        yield found


@pytest.fixture
def own_settings() -> Iterator[dict[str, Any]]:
    before = settings()
    yield before
    put_settings(before)
    assert settings() == before
    assert torch.backends.cudnn.allow_tf32 is True  # still readable; torch.export reads it


def there(_pipe: Connection) -> dict[str, Any]:
    return settings()


@pytest.mark.parametrize("change", CHANGES)
def test_a_process_has_the_settings_of_the_one_that_asks(
    home: Home, own_settings: dict[str, Any], change: str
) -> None:
    CHANGES[change]()
    here = settings()
    assert here != own_settings
    process = home.start(there)
    found = process.answer(60.0)
    process.close()
    assert {name: value for name, value in found.items() if value != here[name]} == {}
    put_settings(own_settings)
    with undisturbed():
        CHANGES[change]()
    assert settings() == own_settings


def address(_pipe: Connection) -> int:
    return torch.empty(1000).data_ptr()


def test_processes_that_are_forked_have_heaps_of_their_own(home: Home) -> None:
    """The heap's layout affects the time of a step; if all starts shared it, their spread would not show this."""
    found = set()
    for _ in range(4):
        process = home.start(address)
        found.add(process.answer(60.0))
        process.close()
    assert len(found) > 1


def ends(_pipe: Connection, kind: type[Exception]) -> None:
    raise kind("the user's own file")


@pytest.mark.parametrize("kind", [EOFError, ConnectionResetError, BrokenPipeError])
def test_an_error_that_a_pipe_could_have_raised_is_told_like_any_other(
    home: Home, kind: type[Exception]
) -> None:
    process = home.start(ends, kind)
    with pytest.raises(kind, match="the user's own file"):
        process.answer(60.0)
    process.close()


def test_every_flag_of_torchs_backends_is_a_setting() -> None:
    """A flag added by a new torch release must be added to the settings or to ``known`` below."""
    owners = {
        "cudnn": torch.backends.cudnn, "mkldnn": torch.backends.mkldnn, "opt_einsum": torch.backends.opt_einsum,
        "quantized": torch.backends.quantized,
    }  # fmt: skip
    known = {
        "cudnn.allow_tf32",  # an older name of cudnn's fp32_precision
        "cudnn.depthwise_kernel",  # undocumented in torch.backends.cudnn
        "mkldnn.fp32_precision",  # reads oneDNN's value but sets all backends
        *settings(),
    }
    flags = {
        f"{name}.{flag}"
        for name, owner in owners.items()
        for flag, kind in vars(type(owner)).items()
        if type(kind).__name__ == "ContextProp" and flag != "supported_engines"
    }
    assert len(flags) >= 10
    assert {flag for flag in flags if flag not in known and not flag.endswith("_engine")} == set()


# --- workloads that do not run in another process -------------------------------------------------------------


class Awkward(Exception):
    """An exception that can be pickled but not unpickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def of_a_module_that_only_this_process_has(monkeypatch: pytest.MonkeyPatch) -> Workload:
    module = types.ModuleType("only_here")
    exec("def loss(model, batch): return model(batch).square().mean()", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", module)
    return workload(module.loss)


def with_an_object_that_cannot_be_made_again(_monkeypatch: pytest.MonkeyPatch) -> Workload:
    awkward = Awkward(1, 2)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean() * len(awkward.args)

    return workload(loss)


NOWHERE_ELSE = [of_a_module_that_only_this_process_has, with_an_object_that_cannot_be_made_again]


@pytest.mark.parametrize("make", NOWHERE_ELSE)
def test_what_cannot_be_made_again_there_is_measured_here(
    home: Home, monkeypatch: pytest.MonkeyPatch, make: Callable[[pytest.MonkeyPatch], Workload]
) -> None:
    made = make(monkeypatch)
    with pytest.raises(
        NotThereError, match=r"workload 'lambdas' does not run in another process .*file\.py:attribute"
    ):
        delivered(home, made)
    if sys.platform.startswith("linux"):
        assert measure_memory(made, PRESETS["fp32"], CPU, inference=False, home=home).method.endswith(
            "one thread"
        )


@pytest.mark.parametrize("forks", some([True, False], 2))
def test_import_paths_that_are_no_strings_do_not_end_the_processes(
    forks: bool, one_home: Callable[[Home], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both fresh interpreters and forks start, with none of the tests' imports."""
    monkeypatch.setattr(processes, "FORKS", forks)
    monkeypatch.setattr(Home, "line", one_home)
    monkeypatch.setattr(sys, "path", [pathlib.Path("/tmp"), *sys.path])
    with Home() as home:
        assert delivered(home, workload())


def test_a_process_that_cannot_be_started_is_a_failure_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "FORKS", False)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with Home() as home, pytest.raises(CastwiseError, match="no process for measurements could be started"):
        home.start(there)


def started_with(home: Home, name: str) -> bool:
    process = home.start(has, name)
    found = bool(process.answer(60.0))
    process.close()
    return found


def test_what_the_first_process_imported_is_there_when_the_next_starts() -> None:
    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        import sklearn.manifold  # noqa: F401

        return module(batch).square().mean()

    with Home() as home:
        assert not started_with(home, "sklearn.manifold")
        apart = SeparateRun(home, processes.portable(workload(loss)), PRESETS["fp32"], CPU, 0)
        apart.warm_up()
        apart.close()
        assert started_with(home, "sklearn.manifold")
        assert not started_with(home, __name__)


def test_modules_of_the_users_own_and_of_torch_are_no_libraries() -> None:
    found = served.libraries(sys.modules)
    assert "pytest" in found
    assert {name.partition(".")[0] for name in found}.isdisjoint({"torch", "castwise", "tests"})


THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"


@pytest.mark.parametrize(
    ("source", "threads"),
    [
        (THREAD, "2"),
        (f"import scipy.linalg\n{THREAD}", "1"),
        ("import os\nos._exit(3)", "2"),
        ("raise SystemExit", "2"),
        ("while True: pass", "2"),
    ],
    ids=["thread", "thread beside a pool that has none", "dies", "raises", "hangs"],
)
def test_a_library_that_a_fork_would_not_survive_is_left_to_each_process(
    source: str, threads: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setattr(processes, "_IMPORT_S", 2.0 if "while" in source else 20.0)
    for name in ("strange", "harmless"):
        (tmp_path / f"{name}.py").write_text(source if name == "strange" else "", encoding="utf-8")
    with Home() as home:
        home.start(has, "strange").close()
        home.import_once(["harmless", "strange"])
        assert not started_with(home, "strange")
        home.import_once(["harmless"])
        assert not started_with(home, "harmless")


def test_a_library_is_imported_while_the_process_that_asks_goes_on(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(1.0)\n", encoding="utf-8")
    with Home() as home:
        home.begin()
        home.ready()
        begin = time.monotonic()
        home.import_soon(["slow"])
        assert time.monotonic() - begin < 0.9
        home.ready()
        assert time.monotonic() - begin >= 0.9
        assert started_with(home, "slow")


def test_a_home_that_is_left_while_a_library_is_imported_ends_that(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    here = tmp_path / "here"
    source = f"import os, pathlib, time\npathlib.Path({str(here)!r}).write_text(str(os.getpid()))\ntime.sleep(60)\n"
    (tmp_path / "slow.py").write_text(source, encoding="utf-8")
    with Home() as home:
        home.begin()
        home.import_soon(["slow"])
        while not (here.exists() and here.read_text()):
            time.sleep(0.01)
        begin = time.monotonic()
    assert time.monotonic() - begin < 10.0
    while pathlib.Path("/proc", here.read_text()).exists():
        assert time.monotonic() - begin < 10.0


def test_a_home_that_cannot_begin_says_so_when_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def line(_: Home) -> socket.socket:
        raise OSError("no processes left")

    monkeypatch.setattr(Home, "line", line)
    with Home() as home:
        home.begin()
        home.import_soon(["sklearn"])
        home.ready()
        with pytest.raises(
            CastwiseError, match=r"no process for measurements could be started .*no processes left"
        ):
            home.start(has, "sklearn")


@pytest.mark.skipif(not processes.FORKS, reason="this system does not fork processes")
def test_a_home_ends_though_what_was_forked_meanwhile_has_a_copy_of_its_line(
    one_home: Callable[[Home], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: data-loading workers outlived a search and made it wait five seconds for its home process."""
    monkeypatch.setattr(Home, "line", one_home)
    monkeypatch.setattr(processes, "_end", _end)
    with Home() as home:
        home.begin()
        home.ready()
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        worker.start()
        begin = time.monotonic()
    worker.kill()
    worker.join()
    assert time.monotonic() - begin < processes._ENDS_S - 1.0


def test_a_home_that_does_not_do_what_is_asked_ends_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens, for example, if a second process cannot use the accelerator."""

    def fails(*_: object) -> None:
        raise RuntimeError("out of memory")

    with Home() as home:
        home.begin()
        monkeypatch.setattr(processes.Process, "answer", fails)
        home.ready()


def test_a_home_that_nothing_was_asked_of_ends_at_once() -> None:
    begin = time.monotonic()
    with Home() as home:
        home.begin()
    assert time.monotonic() - begin < 2.0  # shorter than its import of torch


def test_what_is_imported_once_meets_what_it_would_meet_in_a_process_of_its_own(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, own_settings: dict[str, Any]
) -> None:
    """Exit codes of child processes are available, and torch's settings are the caller's."""
    monkeypatch.syspath_prepend(str(tmp_path))
    asks = "import subprocess, torch\nassert subprocess.call(['false']) == 1\nassert torch.get_default_dtype() is torch.float64\n"
    (tmp_path / "asks.py").write_text(asks, encoding="utf-8")
    torch.set_default_dtype(torch.float64)
    with Home() as home:
        home.start(has, "asks").close()
        home.import_once(["asks"])
        assert started_with(home, "asks")
