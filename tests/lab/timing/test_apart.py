"""Training runs in separate processes."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from castwise import Workload
from castwise.core.plans.plan import PRESETS
from castwise.errors import CastwiseError, WorkloadError, place
from castwise.lab.timing import processes
from castwise.lab.timing.apart import REST_S, SeparateRun, _run, race_apart
from castwise.lab.timing.failures import unfit
from castwise.lab.timing.processes import Home, not_there, portable
from castwise.lab.timing.runners import TrainingRun
from castwise.lab.timing.timing import WARMUP

CPU = torch.device("cpu")


def batches(seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(8, 4, generator=generator)


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def workload(loss: object = None, model: object = None) -> Workload:
    """Return a workload of lambdas and local functions, like one defined in a script."""
    return Workload(
        name="lambdas", model=model or (lambda: nn.Linear(4, 1)), optimizer=sgd, batches=batches,
        loss=loss or (lambda module, batch: module(batch).square().mean()),
    )  # fmt: skip


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    with Home() as found:
        yield found


def test_a_run_takes_the_steps_that_a_run_here_takes(home: Home) -> None:
    here = TrainingRun(workload(), PRESETS["bf16-mixed"], CPU, 3)
    here.block(4)
    apart = SeparateRun(home, portable(workload()), PRESETS["bf16-mixed"], CPU, 3)
    apart.warm_up()
    assert apart.steps(1) > 0.0
    assert apart.steps(1) > 0.0
    apart.close()
    assert apart.losses == here.losses
    here.close()


def test_runs_are_timed_in_turns_and_all_have_every_round(home: Home) -> None:
    times = race_apart(
        home, portable("sine?size=16"), [PRESETS["fp32"], PRESETS["bf16-mixed"]], CPU, rounds=3
    )
    assert [len(found.times_s) for found in times] == [3, 3]
    assert all(t > 0.0 for found in times for t in found.times_s)
    assert len(times[0].losses) == len(times[1].losses)


def test_a_slow_run_takes_fewer_steps_and_losses_are_of_the_steps_that_all_took(home: Home) -> None:
    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        slow = next(module.parameters()).dtype is torch.bfloat16
        time.sleep(0.1 if slow else 0.01)
        return module(batch).float().square().mean()

    plans = [PRESETS["fp32"], PRESETS["bf16-true"]]
    found = race_apart(home, portable(workload(loss)), plans, CPU, rounds=2)
    assert [len(timed.losses) for timed in found] == [WARMUP + 2] * 2
    found = race_apart(home, portable(workload(loss)), plans, CPU, rounds=2, steps=WARMUP + 2)
    assert [len(timed.losses) for timed in found] == [WARMUP + 2] * 2


def test_it_has_the_threads_of_the_process_that_asks(home: Home) -> None:
    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        return module(batch).square().mean() * 0.0 + torch.get_num_threads()

    apart = SeparateRun(home, portable(workload(loss)), PRESETS["fp32"], CPU, 0)
    apart.warm_up()
    apart.close()
    assert set(apart.losses) == {torch.get_num_threads()}


def test_an_exception_there_is_an_exception_here_and_leaves_the_others_alone(home: Home) -> None:
    def fails(module: nn.Module, batch: Tensor) -> Tensor:
        if next(module.parameters()).dtype is torch.bfloat16:
            raise NotImplementedError("no kernel for bf16")
        return module(batch).square().mean()

    found = race_apart(
        home, portable(workload(fails)), [PRESETS["bf16-true"], PRESETS["fp32"]], CPU, rounds=2
    )
    assert isinstance(found[0].error, NotImplementedError)
    assert "no kernel for bf16" in str(found[0].error)
    assert found[1].error is None
    assert len(found[1].times_s) == 2


class Awkward(Exception):
    """An exception that can be pickled but not unpickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_an_exception_that_cannot_travel_comes_in_words(home: Home) -> None:
    def model() -> nn.Module:
        raise Awkward(1, 2)

    apart = SeparateRun(home, portable(workload(model=model)), PRESETS["fp32"], CPU, 0)
    with pytest.raises(WorkloadError, match=r"^Awkward: 1 and 2 \(test_apart\.py, line \d+, in model\)$"):
        apart.warm_up()
    apart.close()


def raises_there(module: nn.Module, batch: Tensor) -> Tensor:
    raise ValueError("cannot open the lock")


def leaves_there(module: nn.Module, batch: Tensor) -> Tensor:
    sys.exit("done")


@pytest.mark.parametrize("how", ["started", "copied"])
def test_an_exception_tells_here_where_in_the_users_code_it_was_raised_there(how: str, home: Home) -> None:
    sent = portable(workload(raises_there))
    if how == "started":
        process = home.start(_run, sent, PRESETS["fp32"].to_json(), "cpu", 0)
        process.answer()
        process.send(1)
    else:
        process = home.fork(_stepped, workload(raises_there))
    with contextlib.closing(process), pytest.raises(ValueError, match="cannot open the lock") as caught:
        process.answer()
    line = raises_there.__code__.co_firstlineno + 1
    assert place(caught.value) == f"test_apart.py, line {line}, in raises_there"
    assert f"(test_apart.py, line {line}, in raises_there)" in unfit(caught.value)
    assert 'raise ValueError("cannot open the lock")' in "".join(traceback.format_exception(caught.value))


def test_a_lack_of_a_kernel_is_told_without_a_place(home: Home) -> None:
    def fails(module: nn.Module, batch: Tensor) -> Tensor:
        raise NotImplementedError("no kernel for bf16")

    found = race_apart(home, portable(workload(fails)), [PRESETS["fp32"]], CPU, rounds=1)
    assert found[0].error is not None
    assert unfit(found[0].error) == "not supported by this device: no kernel for bf16"


def test_sys_exit_there_ends_nobody_here(home: Home) -> None:
    apart = SeparateRun(home, portable(workload(leaves_there)), PRESETS["fp32"], CPU, 0)
    with pytest.raises(
        WorkloadError, match=r"^SystemExit: done \(test_apart\.py, line \d+, in leaves_there\)$"
    ):
        apart.warm_up()
    apart.close()


def _stepped(job: Workload) -> None:
    TrainingRun(job, PRESETS["fp32"], CPU, 0).block(1)


def test_a_process_that_dies_is_a_failure_in_words(home: Home) -> None:
    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return module(batch).sum()

    apart = SeparateRun(home, portable(workload(loss)), PRESETS["fp32"], CPU, 0)
    with pytest.raises(CastwiseError, match="ended without a message"):
        apart.warm_up()
    apart.close()
    other = SeparateRun(home, portable(workload()), PRESETS["fp32"], CPU, 0)
    other.warm_up()
    other.close()


def test_a_workload_that_has_a_name_is_not_told_to_take_one() -> None:
    error = ValueError("no such tokenizer")
    assert "file.py:attribute" not in str(not_there("jobs.py:mine", error))
    assert "file.py:attribute" in str(not_there(workload(), error))


def test_a_workload_that_cannot_travel_is_refused_in_words() -> None:
    lock = threading.Lock()
    with pytest.raises(WorkloadError, match=r"cannot be sent to another process.*file\.py:attribute"):
        portable(workload(lambda module, batch: (lock, module(batch).sum())[1]))


def test_no_process_outlives_a_pipe_that_closes(home: Home) -> None:
    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        return module(batch).sum() * 0.0 + os.getpid()

    apart = SeparateRun(home, portable(workload(loss)), PRESETS["fp32"], CPU, 0)
    apart.warm_up()
    apart.close()
    assert ended({int(found) for found in apart.losses})


def test_times_are_seconds_per_step_without_the_pause_before_a_block(home: Home) -> None:
    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        time.sleep(0.03)
        return module(batch).square().mean()

    apart = SeparateRun(home, portable(workload(loss)), PRESETS["fp32"], CPU, 0)
    apart.warm_up()
    begin = time.monotonic()
    assert 0.03 <= apart.steps(6) < 0.1
    assert time.monotonic() - begin >= 6 * 0.03 + REST_S
    apart.close()
    assert len(apart.losses) == WARMUP + 6


def test_nobody_takes_a_step_while_others_build(home: Home, tmp_path: Path) -> None:
    """Otherwise the number of steps in a block would follow from a step slowed by the others."""
    begin, folder = time.monotonic(), str(tmp_path)

    def model() -> nn.Module:
        for number in range(1, 4):  # the first process builds in the shortest time
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.join(folder, str(number)))
                time.sleep(0.4 * number)
                break
        return nn.Linear(4, 1)

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        return module(batch).square().mean() * 0.0 + (time.monotonic() - begin)

    found = race_apart(home, portable(workload(loss, model)), [PRESETS["fp32"]] * 3, CPU, rounds=1)
    assert min(timed.losses[0] for timed in found) > 1.2


def alive(pid: int) -> bool:
    """Return True if a process is running, that is, neither gone nor a zombie."""
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ended(pids: Iterable[int], within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(alive, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def told(folder: Path) -> list[int]:
    """Return the process ids that :class:`Hangs` recorded."""
    return [int(name) for name in os.listdir(folder)]


class Hangs:
    """A model that starts a child process and then hangs, while being built or in a step, under all or low plans."""

    def __init__(self, folder: Path, where: str, low_alone: bool = False) -> None:
        self.folder, self.where, self.low_alone = str(folder), where, low_alone

    def hang(self) -> None:
        for pid in (os.getpid(), subprocess.Popen(["sleep", "600"]).pid):
            Path(self.folder, str(pid)).touch()
        time.sleep(600.0)

    def __call__(self) -> nn.Module:
        if self.where == "building":
            self.hang()
        return nn.Linear(4, 1)

    def loss(self, module: nn.Module, batch: Tensor) -> Tensor:
        out = module(batch)
        if self.where == "a step" and not (self.low_alone and module.weight.dtype == torch.float32):
            self.hang()
        return out.float().square().mean()


needs_proc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
HANGS_AT = pytest.mark.parametrize("where", ["building", "a step"])


@needs_proc
@HANGS_AT
def test_what_an_interrupt_finds_at_work_ends_at_once_with_what_it_started(
    where: str, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a model that hung blocked the search, even when interrupted, or its process stayed behind."""
    hangs = Hangs(tmp_path, where)

    def interrupted(_timeout_s: float) -> bool:
        while len(told(tmp_path)) < 2:
            time.sleep(0.01)
        raise KeyboardInterrupt

    apart = SeparateRun(home, portable(workload(hangs.loss, hangs)), PRESETS["fp32"], CPU, 0)
    if where == "a step":
        apart.wait()
    monkeypatch.setattr(apart._process._pipe, "poll", interrupted)
    with pytest.raises(KeyboardInterrupt):
        apart.warm_up()
    monkeypatch.undo()
    begin = time.monotonic()
    apart.close()
    assert time.monotonic() - begin < 2.0
    assert ended(told(tmp_path))


@needs_proc
@HANGS_AT
def test_what_hangs_is_waited_for_once_and_ends_with_what_it_started(where: str, tmp_path: Path) -> None:
    """The time limit of an answer counts from its request, so four hanging processes share one wait."""
    hangs = Hangs(tmp_path, where)
    with Home() as home:
        other = SeparateRun(home, portable(workload()), PRESETS["fp32"], CPU, 0)
        other.warm_up()  # the process that forks the others is running
        home.patience_s = 2.0
        begin = time.monotonic()
        found = race_apart(
            home,
            portable(workload(hangs.loss, hangs)),
            [PRESETS["fp32"]] * (4 if where == "building" else 1),
            CPU,
            rounds=1,
        )
        assert time.monotonic() - begin < 6.0
        begin, plans = time.monotonic(), [PRESETS["fp32"], PRESETS["bf16-mixed"], PRESETS["bf16-master"]]
        race_apart(home, portable(workload(hangs.loss, hangs)), plans, CPU, rounds=1)
        assert (
            time.monotonic() - begin < 4.0
        )  # after one has hung, the others get less time; steps are requested in turn
        home.patience_s = 60.0
        other.steps(1)
        other.close()
    assert {unfit(timed.error) for timed in found if timed.error is not None} == {"no answer after 2 s"}
    assert told(tmp_path)
    assert ended(told(tmp_path))


@needs_proc
def test_who_hangs_loses_its_place_and_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "HURRY", 0.9)  # the healthy plan's step may be slow while other tests run
    hangs = Hangs(tmp_path, "a step", low_alone=True)
    with Home() as home:
        home.patience_s = 5.0
        low, fine = race_apart(
            home, portable(workload(hangs.loss)), [PRESETS["bf16-master"], PRESETS["fp32"]], CPU, rounds=2
        )
    assert unfit(low.error) == "no answer after 5 s"
    assert fine.error is None
    assert len(fine.times_s) == 2
    assert ended(told(tmp_path))


def test_a_budget_without_an_end_waits_without_one() -> None:
    with Home() as home:
        home.patience_s = math.inf
        apart = SeparateRun(home, portable(workload()), PRESETS["fp32"], CPU, 0)
        assert apart.warm_up() > 0.0
        apart.close()


def test_a_home_that_is_left_before_it_is_up_leaves_nothing(tmp_path: Path) -> None:
    """An interrupt in the first second of a final leaves it in this state."""
    hangs = Hangs(tmp_path, "building")
    begin = time.monotonic()
    with Home() as home:
        SeparateRun(home, portable(workload(hangs.loss, hangs)), PRESETS["fp32"], CPU, 0).close()
    assert time.monotonic() - begin < 20.0
    assert ended(told(tmp_path))
