"""The replay of a recorded step is bitwise equal, and records are never incomplete."""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from typer.testing import CliRunner

import castwise
from castwise.commands.cli import app
from castwise.core import checkpoint
from castwise.core.casting.trees import to_device
from castwise.core.plans.plan import PRESETS
from castwise.errors import CheckpointError, PlanError, StateError
from castwise.lab.passes.isolation import seed_all
from castwise.lab.watch import step_files
from castwise.lab.watch.recorder import Recorder
from castwise.lab.watch.replay import Record, replay
from tests.here import DEVICE
from tests.processes import forks
from tests.soak import some

NAMES = [name for name in PRESETS if name not in ("tf32", "O0", "O3")]


class Net(nn.Module):
    """A model with buffers, dropout, and draws from the generators of Python, NumPy and torch."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(width, 4)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        noise = random.random() + float(np.random.rand())
        out: Tensor = self.last(self.drop(functional.relu(self.norm(self.first(x + 0.01 * noise)))))
        return out + 0.001 * self.calls


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.mse_loss(model(batch[0]), batch[1])


def data(count: int, spike: int = -1, value: float = float("inf")) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator(DEVICE).manual_seed(7)
    for number in range(count):
        x, y = torch.randn(16, 8, generator=generator), torch.randn(16, 4, generator=generator)
        if number == spike:
            y[0, 0] = value
        yield x, y


def start(plan: Any, model: nn.Module | None = None) -> tuple[castwise.Amp, nn.Module, torch.optim.Optimizer]:
    seed_all(0)
    model = Net() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model, optimizer)
    return amp, model, optimizer


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(one: dict[str, Tensor], other: Any) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name].isnan(), other[name].isnan())
        and torch.equal(one[name].nan_to_num(7.0), other[name].nan_to_num(7.0))
        for name in one
    )


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


# --- bitwise equality -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_step_comes_out_bit_for_bit_under_every_preset(name: str, tmp_path: Path) -> None:
    amp, model, optimizer = start(name)
    then: list[dict[str, Tensor]] = []
    with Recorder(amp, model, tmp_path, copies=True) as recorder:
        for number, batch in enumerate(recorder.batches(data(6))):
            amp.backward(loss(model, batch))
            then.append(gradients(model))
            amp.step(optimizer, max_norm=1.0)
            if number == 4:
                recorder.write("asked for in the test")
            optimizer.zero_grad()
    (path,) = recorder.records
    again = replay(path, Net(), loss)
    assert (again.step, again.exact, again.finite, again.reason) == (5, True, True, "asked for in the test")
    assert same(then[4], again.gradients)
    assert not same(then[3], again.gradients)


@pytest.mark.parametrize("name", ["fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "fp16-true"])
def test_an_overflow_is_recorded_by_itself(name: str, tmp_path: Path) -> None:
    amp, model, optimizer = start(name)
    with Recorder(amp, model, tmp_path) as recorder:
        for number, batch in enumerate(recorder.batches(data(6, spike=3))):
            amp.backward(loss(model, batch))
            if number == 3:
                then = gradients(model)
            amp.step(optimizer)
            optimizer.zero_grad()
    assert [path.name for path in recorder.records] == ["step-00000004"]
    again = replay(tmp_path, Net(), loss)
    assert again.exact
    assert not again.finite
    assert again.recorded_losses == (float("inf"),)
    assert same(then, again.gradients)
    assert again.first.name == "batch[1]"
    assert again.first.origin == "data"


def test_another_plan_is_no_claim_of_exactness(tmp_path: Path) -> None:
    amp, model, optimizer = start("fp16-mixed")
    with Recorder(amp, model, tmp_path) as recorder:
        for batch in recorder.batches(data(1, spike=0, value=1e18)):  # a gradient beyond fp16's range
            amp.backward(loss(model, batch))
            amp.step(optimizer)
    assert replay(tmp_path, Net(), loss, find=False).exact
    again = replay(tmp_path, Net(), loss, plan="fp32")
    assert again.exact is None
    assert again.finite
    assert again.first is None


def test_a_loss_that_is_not_the_recorded_one_is_noticed(tmp_path: Path) -> None:
    amp, model, optimizer = start("bf16-mixed")
    with Recorder(amp, model, tmp_path) as recorder:
        for batch in recorder.batches(data(2, spike=1)):
            amp.backward(loss(model, batch))
            amp.step(optimizer)
            optimizer.zero_grad()
    again = replay(tmp_path, Net(), lambda m, b: functional.mse_loss(m(b[0]), b[1].clamp(max=9)), find=False)
    assert again.exact is False


def test_accumulated_microbatches_are_one_step(tmp_path: Path) -> None:
    amp, model, optimizer = start("fp16-mixed")
    with Recorder(amp, model, tmp_path) as recorder:
        for number, batch in enumerate(recorder.batches(data(8, spike=5))):
            amp.backward(loss(model, batch) / 4)
            if number % 4 == 3:
                then = gradients(model)
                amp.step(optimizer)
                optimizer.zero_grad()
    again = replay(tmp_path, Net(), lambda m, b: loss(m, b) / 4, find=False)
    assert again.exact
    assert len(again.losses) == 4
    assert again.step == 2
    assert same(then, again.gradients)


def test_several_losses_keep_their_names_and_scales(tmp_path: Path) -> None:
    def losses(m: nn.Module, batch: Any) -> dict[str, Tensor]:
        out = m(batch[0])
        return {"fit": functional.mse_loss(out, batch[1]), "size": 1e-3 * out.square().mean()}

    amp, model, optimizer = start("fp16-mixed")
    with Recorder(amp, model, tmp_path, copies=True) as recorder:
        for number, batch in enumerate(recorder.batches(data(4))):
            for name, value in losses(model, batch).items():
                amp.backward(value, name, retain_graph=True)
            if number == 2:
                then = gradients(model)
                recorder.write()
            amp.step(optimizer)
            optimizer.zero_grad()
    again = replay(tmp_path, Net(), losses)
    assert again.exact
    assert len(again.losses) == 2
    assert same(then, again.gradients)


def test_an_error_in_a_step_is_recorded(tmp_path: Path) -> None:
    amp, model, optimizer = start("bf16-mixed")
    recorder = Recorder(amp, model, tmp_path)

    def train() -> None:
        with recorder:
            for number, batch in enumerate(recorder.batches(data(3))):
                amp.backward(loss(model, batch))
                _ = 1 / (2 - number)
                amp.step(optimizer)
                optimizer.zero_grad()

    with pytest.raises(ZeroDivisionError):
        train()
    assert Record.read(recorder.records[0])[0].kind == "error"
    assert replay(tmp_path, Net(), loss).exact


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        x = torch.randn(8, device="cpu") + random.random()  # from the worker's own generators
        return x, torch.full((4,), float("nan") if index == 37 else float(index), device="cpu")


def test_a_dataloader_with_workers(tmp_path: Path) -> None:
    amp, model, optimizer = start("bf16-mixed")
    loader = DataLoader(Numbers(), batch_size=8, num_workers=1, multiprocessing_context="fork")
    with Recorder(amp, model, tmp_path) as recorder:
        for batch in recorder.batches(loader):
            amp.backward(loss(model, to_device(batch, torch.device(DEVICE))))
            amp.step(optimizer)
            optimizer.zero_grad()
    again = replay(tmp_path, Net(), loss)
    assert again.exact
    assert again.step == 5
    assert again.first.origin == "data"


# --- when records are written, and what they hold -------------------------------------------------------------


def test_two_overflows_and_more_than_the_most(tmp_path: Path) -> None:
    amp, model, optimizer = start("fp32")
    with Recorder(amp, model, tmp_path, most=2) as recorder:
        for x, y in recorder.batches(data(6)):
            amp.backward(loss(model, (x, y * float("inf"))))
            amp.backward(loss(model, (x, y * float("nan"))))
            amp.step(optimizer)
            optimizer.zero_grad()
    assert len(recorder.records) == 2
    assert len(Record.read(recorder.records[0])[0].losses) == 2


def test_an_alarm_without_copies_gets_the_next_step(tmp_path: Path) -> None:
    amp, model, optimizer = start("bf16-master")
    then: list[dict[str, Tensor]] = []
    with Recorder(amp, model, tmp_path) as recorder:
        for number, batch in enumerate(recorder.batches(data(4))):
            amp.backward(loss(model, batch))
            then.append(gradients(model))
            amp.step(optimizer)
            if number == 1:
                recorder.write("behind the step")
            optimizer.zero_grad()
    again = replay(tmp_path, Net(), loss)
    assert again.step == 3
    assert again.exact
    assert same(then[2], again.gradients)


@pytest.mark.parametrize("name", ["bf16-mixed", "fp16-master"])
def test_the_training_does_not_notice(name: str, tmp_path: Path) -> None:
    ends = []
    for recording in (False, True):
        amp, model, optimizer = start(name)
        recorder = Recorder(amp, model, tmp_path, copies=True)
        for number, batch in enumerate(recorder.batches(data(6, spike=3)) if recording else data(6, spike=3)):
            amp.backward(loss(model, batch))
            amp.step(optimizer)
            optimizer.zero_grad()
            if number == 4 and recording:
                recorder.write()
        recorder.close()
        ends.append((state(model), torch.get_rng_state(), amp.state_dict()))
    assert len(recorder.records) == 2
    assert same(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])
    assert ends[0][2] == ends[1][2]


def test_replay_leaves_the_given_model_and_the_generators_alone(tmp_path: Path) -> None:
    amp, model, optimizer = start("bf16-mixed")
    with Recorder(amp, model, tmp_path) as recorder:
        for batch in recorder.batches(data(2, spike=1)):
            amp.backward(loss(model, batch))
            amp.step(optimizer)
    model.eval()
    before, seen, drawn = state(model), torch.get_rng_state(), random.getstate()
    assert replay(tmp_path, model, loss).exact  # given the prepared model itself
    assert same(before, state(model))
    assert not model.training
    assert torch.equal(seen, torch.get_rng_state())
    assert random.getstate() == drawn
    with pytest.raises(castwise.CastwiseError):
        replay(tmp_path, model, lambda m, b: None)
    assert same(before, state(model))
    assert torch.equal(seen, torch.get_rng_state())


def test_frozen_parts_and_modes_come_along(tmp_path: Path) -> None:
    amp, model, optimizer = start("bf16-mixed", Net())
    model.norm.eval()
    model.first.weight.requires_grad_(False)
    with Recorder(amp, model, tmp_path) as recorder:
        for batch in recorder.batches(data(2, spike=1)):
            amp.backward(loss(model, batch))
            then = gradients(model)
            amp.step(optimizer)
            optimizer.zero_grad()
    again = replay(tmp_path, Net(), loss, find=False)
    assert again.exact
    assert "first.weight" not in again.gradients
    assert same(then, again.gradients)


def test_what_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    amp, model, optimizer = start("fp32")
    with Recorder(amp, model, tmp_path) as recorder:
        for batch in recorder.batches({"x": x, "y": y, "who": object()} for x, y in data(2, spike=1)):
            amp.backward(loss(model, (batch["x"], batch["y"])))
            if batch["y"].isinf().any():
                with pytest.warns(UserWarning, match="who is a builtins.object, which cannot be saved"):
                    amp.step(optimizer)
            else:
                amp.step(optimizer)
            optimizer.zero_grad()
    assert recorder.records == ()
    assert not list(tmp_path.glob("step-*"))


def test_a_batch_that_was_changed_in_place_is_said_to_be(tmp_path: Path) -> None:
    amp, model, optimizer = start("fp32")
    with Recorder(amp, model, tmp_path) as recorder:
        for x, y in recorder.batches(data(2, spike=1)):
            amp.backward(loss(model, (x.add_(1.0), y)))
            amp.step(optimizer)
            optimizer.zero_grad()
    assert any("in place" in note for note in replay(tmp_path, Net(), loss, find=False).notes)


# --- files ----------------------------------------------------------------------------------------------------


def _write_for_ever(folder: Path) -> None:
    weights = {"w": torch.zeros(1 << 20, device="cpu")}
    about = {"castwise": "", "torch": "", "plan": "", "digest": ""}
    for number in range(1, 10_000):
        step_files.write(folder, number, {"number": number}, weights, about)


def test_kill_9_while_a_step_is_written_leaves_whole_records_alone(tmp_path: Path) -> None:
    for round_ in range(len(some(range(12), 4))):
        folder = tmp_path / str(round_)
        process = forks().Process(target=_write_for_ever, args=(folder,))
        process.start()
        end = time.monotonic() + 60
        while not list(folder.glob("step-*")) and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(0.0007 * (round_ + 1))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        seen = sorted(folder.glob("step-*"))
        assert seen
        for path in seen:
            _, (content,), weights = step_files.read(path)
            assert content["number"] == int(path.name[5:])
            assert weights["w"].shape == (1 << 20,)
        _ = step_files.write(folder, 10_001, {}, {}, {"castwise": "", "torch": "", "plan": "", "digest": ""})
        assert not list(folder.glob(".*partial"))


def test_a_full_disk_is_a_warning_and_leaves_nothing(tmp_path: Path) -> None:
    amp, model, optimizer = start("fp32", Net(width=4096))
    old, before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with Recorder(amp, model, tmp_path) as recorder:
            for number, batch in enumerate(recorder.batches(data(4, spike=1))):
                amp.backward(loss(model, batch))
                if number == 1:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, old[1]))
                    with pytest.warns(UserWarning, match="training continues"):
                        amp.step(optimizer)
                    resource.setrlimit(resource.RLIMIT_FSIZE, old)
                else:
                    amp.step(optimizer)
                optimizer.zero_grad()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, before)
    assert recorder.records == ()
    assert not list(tmp_path.rglob("*.safetensors"))
    with pytest.raises(CheckpointError, match="no complete record"):
        replay(tmp_path, Net(width=4096), loss)


@pytest.mark.parametrize("place", ["rank-00000.safetensors", "values.json", "checkpoint.json"])
def test_one_flipped_byte_is_refused(place: str, tmp_path: Path) -> None:
    amp, model, optimizer = start("fp32")
    with Recorder(amp, model, tmp_path) as recorder:
        for batch in recorder.batches(data(1, spike=0)):
            amp.backward(loss(model, batch))
            amp.step(optimizer)
    file = recorder.records[0] / place
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(CheckpointError):
        replay(recorder.records[0], Net(), loss)


def test_a_checkpoint_is_no_record_and_a_record_no_checkpoint(tmp_path: Path) -> None:
    amp, model, optimizer = start("fp32")
    saved = checkpoint.save(tmp_path / "a", 1, model=model, optimizers=optimizer, amp=amp).wait()
    with pytest.raises(CheckpointError, match="not a record"):
        replay(saved, Net(), loss)
    with Recorder(amp, model, tmp_path / "b") as recorder:
        for batch in recorder.batches(data(1, spike=0)):
            amp.backward(loss(model, batch))
            amp.step(optimizer)
    with pytest.raises(CheckpointError, match="it does not have exactly the parts of a checkpoint"):
        checkpoint.load(recorder.records[0], model=model, optimizers=optimizer, amp=amp)


def test_what_is_refused(tmp_path: Path) -> None:
    amp, model, optimizer = start("fp32")
    with pytest.raises(PlanError, match="most=0"):
        Recorder(amp, model, tmp_path, most=0)
    with pytest.raises(StateError, match="was not prepared by this Amp"):
        Recorder(amp, Net(), tmp_path)
    with pytest.raises(PlanError, match=r"the castwise\.Amp of the training"):
        Recorder(model, amp, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="no complete record"):
        replay(tmp_path, model, loss)
    with Recorder(amp, model, tmp_path) as recorder:
        for batch in recorder.batches(data(1, spike=0)):
            amp.backward(loss(model, batch))
            amp.step(optimizer)
    with pytest.raises(StateError, match="names no workload"):
        replay(tmp_path)
    with pytest.raises(StateError, match="give both model= and loss="):
        replay(tmp_path, model)
    with pytest.raises(CheckpointError, match="differs from the recorded model"):
        replay(tmp_path, Net(width=3), loss)


def test_a_workload_needs_no_model(tmp_path: Path) -> None:
    from castwise.lab.workloads.workload import find_workload

    job = find_workload("digits?width=4&batch=8")
    torch.manual_seed(0)
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    amp = castwise.Amp("bf16-mixed", device=DEVICE)
    amp.prepare(model, optimizer)
    with Recorder(amp, model, tmp_path, workload="digits?width=4&batch=8") as recorder:
        recorder.write("asked for")
        for _, batch in zip(range(1), recorder.batches(job.batches(0)), strict=False):
            amp.backward(job.loss(model, to_device(batch, torch.device(DEVICE))))
            amp.step(optimizer)
    with pytest.raises(StateError, match=r"type: castwise replay \S+ --workload 'digits\?width=4&batch=8'"):
        replay(tmp_path)
    again = replay(tmp_path, workload="digits?width=4&batch=8")
    assert again.exact
    assert again.finite
    record = again.to_dict()
    assert record["exact"]
    assert record["reason"] == "asked for"
    assert (again.save(tmp_path / "out") / "replay.json").is_file()


def record_of(folder: Path, workload: str) -> None:
    amp, model, optimizer = start("fp32")
    with Recorder(amp, model, folder, workload=workload) as recorder:
        recorder.write("asked for")
        for batch in recorder.batches(data(1)):
            amp.backward(loss(model, batch))
            amp.step(optimizer)


@pytest.mark.parametrize("named", ["evil.py:job", "evil:job", "./evil.py:job", "../evil.py:job"])
def test_code_that_only_a_record_names_does_not_run(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("evil.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    record_of(Path("steps"), named)
    with pytest.raises(
        StateError,
        match=f"type: castwise replay steps --workload {re.escape(named)} --plan bf16-mixed --rank 0 ",
    ):
        replay("steps", plan="bf16-mixed", rank=0)
    said = CliRunner().invoke(app, ["replay", "steps"])
    assert said.exit_code == 1
    assert f"type: castwise replay steps --workload {named}" in said.stderr
    assert not Path("ran").exists()
    assert "evil" not in sys.modules


@pytest.mark.parametrize(
    ("named", "shown"),
    [
        ("x; touch ran", "--workload 'x; touch ran'"),
        ("$(touch ran)", "--workload '$(touch ran)'"),
        ("it's", """--workload 'it'"'"'s'"""),
        ("a\ntouch ran", "--workload WORKLOAD"),
        ("a\x1b[2Jb", "--workload WORKLOAD"),
        ("a\u202eb", "--workload WORKLOAD"),
        ("a" * 5000, "--workload WORKLOAD"),
        ("", "--workload ''"),
    ],
)
def test_what_a_record_says_is_no_more_than_text(named: str, shown: str, tmp_path: Path) -> None:
    """Users paste the suggested command into a shell."""
    record_of(tmp_path, named)
    with pytest.raises(StateError) as refused:
        replay(tmp_path)
    said = str(refused.value)
    assert shown in said
    assert said.isprintable()
    assert len(said) < 1000


# --- the step that is recorded ----------------------------------------------------------------------------------


class Codes(nn.Module):
    """A model with buffers that change without a new autograd version: through ``.data`` and by reassignment."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.first(x) - self.mean) * self.scale
        self.mean.data.mul_(0.9).add_(out.detach().float().mean(0))
        self.scale = self.scale * 0.9
        self.scale = self.scale + 0.05
        return out


def test_buffers_that_move_unseen_are_those_that_the_step_began_with(tmp_path: Path) -> None:
    amp, model, optimizer = start("bf16-mixed", Codes())
    with Recorder(amp, model, tmp_path) as recorder:
        for number, batch in enumerate(recorder.batches(data(6))):
            if number == 4:
                recorder.write("look")
            amp.backward(loss(model, batch))
            amp.step(optimizer)
            optimizer.zero_grad()
    again = replay(tmp_path, Codes(), loss)
    assert (again.step, again.exact) == (6, True)


def test_a_second_life_keeps_the_records_of_the_first(tmp_path: Path) -> None:
    for life, spike in ((1, 3), (2, 1)):
        amp, model, optimizer = start("bf16-mixed")
        with Recorder(amp, model, tmp_path) as recorder:
            for batch in recorder.batches(data(5, spike)):
                amp.backward(loss(model, batch))
                amp.step(optimizer)
                optimizer.zero_grad()
        assert len(sorted(tmp_path.glob("step-*"))) == life
        amp.close()
    assert [path.name for path in recorder.records] == ["step-00000006"]
    assert replay(tmp_path, Net(), loss, find=False).path == recorder.records[0]


def test_the_second_of_two_optimizers_on_a_batch_is_recorded_and_a_note_says_that_weights_have_moved(
    tmp_path: Path,
) -> None:
    seed_all(0)
    model = Net()
    one = torch.optim.SGD(model.first.parameters(), lr=1e-2)
    two = torch.optim.SGD(model.last.parameters(), lr=1e-2)
    amp = castwise.Amp("bf16-mixed", device=DEVICE)
    amp.prepare(model, one, two)
    with Recorder(amp, model, tmp_path) as recorder:
        for number, (x, y) in enumerate(recorder.batches(data(4))):
            amp.backward(loss(model, (x, y)), "one")
            assert not amp.step(one).skipped
            amp.backward(loss(model, (x, y * (float("nan") if number == 2 else 1.0))), "two")
            assert amp.step(two).skipped is (number == 2)
            one.zero_grad()
            two.zero_grad()
    (record,) = Record.read(tmp_path)
    assert (record.step, record.kind, [item["name"] for item in record.losses]) == (3, "loss", ["one", "two"])
    assert any(
        "earlier optimizer step on the same batch" in note
        for note in replay(tmp_path, Net(), loss, find=False).notes
    )


@pytest.mark.parametrize("copies", [False, True])
def test_an_error_behind_the_optimizers_step_is_no_record_of_weights_that_have_moved(
    copies: bool, tmp_path: Path
) -> None:
    """An alarm that ends the run can raise such an error before the recorder is told of the step."""
    amp, model, optimizer = start("bf16-mixed")
    calls = [0]

    def fail(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise ZeroDivisionError

    amp.listen(steps=fail)
    recorder = Recorder(amp, model, tmp_path, copies=copies)

    def train() -> None:
        with recorder:
            for batch in recorder.batches(data(5)):
                amp.backward(loss(model, batch))
                amp.step(optimizer)
                optimizer.zero_grad()

    if copies:
        with pytest.raises(ZeroDivisionError):
            train()
        assert replay(tmp_path, Net(), loss).exact
    else:
        with pytest.warns(UserWarning, match="its optimizer had begun"), pytest.raises(ZeroDivisionError):
            train()
        assert not recorder.records


def test_records_that_are_passed_over_are_named(tmp_path: Path) -> None:
    amp, model, optimizer = start("bf16-mixed")
    with Recorder(amp, model, tmp_path) as recorder:
        for x, y in recorder.batches(data(2)):
            amp.backward(loss(model, (x, y * float("nan"))))
            amp.step(optimizer)
            optimizer.zero_grad()
    _ = (recorder.records[1] / "checkpoint.json").write_text("{")
    with pytest.warns(UserWarning, match=r"skipped step-00000002, which its checkpoint\.json cannot be read"):
        assert replay(tmp_path, Net(), loss, find=False).step == 1
    _ = (recorder.records[0] / "checkpoint.json").write_text("{")
    with pytest.raises(
        CheckpointError, match=r"no complete record\. Skipped: step-00000002, .* step-00000001"
    ):
        replay(tmp_path, Net(), loss)


def test_of_what_a_replay_writes_it_names_its_own_files_alone(tmp_path: Path) -> None:
    amp, model, optimizer = start("bf16-mixed")
    with Recorder(amp, model, tmp_path / "steps") as recorder:
        for batch in recorder.batches(data(2, spike=1)):
            amp.backward(loss(model, batch))
            amp.step(optimizer)
            optimizer.zero_grad()
    out = tmp_path / "out"
    out.mkdir()
    _ = (out / "nonfinite.html").write_text("of another replay")
    again = replay(tmp_path / "steps", Net(), loss, find=False)
    assert again.write(out) == [out / "replay.json"]
    assert again.save(out) == out
