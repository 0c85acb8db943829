"""Outputs for samples, alarms and audits, and what happens if writing fails."""

from __future__ import annotations

import contextlib
import io
import json
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import castwise
from castwise.lab.watch import Alarm, Audit, Line, Monitor, Sample
from castwise.lab.watch import sinks as sinks_of
from castwise.lab.watch.sinks import JsonLines, Screen, Sinks, scalars
from tests.lab.watch.jobs import batches, loss, model, train


def watched(**how: Any) -> tuple[castwise.Amp, nn.Module, torch.optim.Optimizer, Monitor]:
    net = model()
    made = torch.optim.SGD(net.parameters(), 1e-2)
    amp = castwise.Amp("fp16-mixed")
    amp.prepare(net, made)
    return amp, net, made, Monitor(amp, every=2, **how)


def report() -> Any:
    raise AssertionError("nobody asks")


def test_json_lines_are_the_samples_alarms_and_audits(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "lines.jsonl"
    amp, net, made, monitor = watched(
        jsonl=path, loss=loss, batches=batches(), audit_every=4, lines={"skipped_in_a_row": Line(0.5, 0.25)}
    )
    train(amp, net, made, 6, poison=[5])
    monitor.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows if row["event"] == "sample"] == [s.step for s in monitor.samples]
    assert [row["verdict"] for row in rows if row["event"] == "audit"] == [a.verdict for a in monitor.audits]
    alarms = [row for row in rows if row["event"] == "alarm"]
    assert [(row["kind"], row["cleared"]) for row in alarms if row["kind"] == "skipped_in_a_row"][-2:] == [
        ("skipped_in_a_row", None), ("skipped_in_a_row", 6)
    ]  # fmt: skip
    sample = next(row for row in rows if row["event"] == "sample")
    assert sample["regions"][0]["path"] == "0"


def test_a_resumed_run_appends_behind_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b'{"whole": 1}\n{"half')
    sink = JsonLines(path)
    sink.write(Sample(3, grad_norm=float("nan")), report)
    sink.close()
    whole, half, mine = path.read_text().splitlines()
    assert (json.loads(whole), half) == ({"whole": 1}, '{"half')
    assert json.loads(mine)["grad_norm"] is None


@contextlib.contextmanager
def at_most(size: int) -> Iterator[None]:
    """Limit the size of files, so writing stops in the middle as on a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_whole_lines_and_the_training_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    amp, net, made, monitor = watched(jsonl=path)
    train(amp, net, made, 4)
    size = path.stat().st_size
    with (
        at_most(size + 100),
        pytest.warns(
            UserWarning, match="writing to jsonl= failed .OSError.*training and the monitor continue"
        ),
    ):
        train(amp, net, made, 8)
    assert path.stat().st_size == size
    train(amp, net, made, 2)  # with space on the disk again
    monitor.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 4, 14]
    assert monitor.step == 14


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs castwise[tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    amp, net, made, monitor = watched(tensorboard=tmp_path, lines={"near_overflow": Line(1e-9, 1e-10)})
    train(amp, net, made, 5)
    monitor.close()
    seen = EventAccumulator(str(tmp_path)).Reload()
    last = monitor.samples[-1]
    for name, value in last.scalars().items():
        path, _, number = name.rpartition("/")
        event = seen.Scalars(f"monitor {number}/{path}" if path else f"monitor/{name}")[-1]
        assert (event.step, event.value) == (last.step, pytest.approx(value, rel=1e-6))
    assert seen.Scalars("monitor/alarm/near_overflow")[-1].value == 1.0


def test_a_writer_of_ones_own_is_used_and_left_open() -> None:
    class Writer:
        def __init__(self) -> None:
            self.seen: list[tuple[str, int]] = []
            self.flushed = 0

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.seen.append((name, step))

        def flush(self) -> None:
            self.flushed += 1

    writer = Writer()
    amp, net, made, monitor = watched(tensorboard=writer)
    train(amp, net, made, 2)
    monitor.close()
    assert ("monitor/grad_norm", 2) in writer.seen
    assert writer.flushed == 1


def test_a_logger_gets_names_and_numbers_with_the_step() -> None:
    seen: list[tuple[int, dict[str, float]]] = []
    amp, net, made, _ = watched(log=lambda values, step: seen.append((step, values)))
    train(amp, net, made, 4)
    assert [step for step, _ in seen] == [1, 2, 4]
    assert {"grad_norm", "update_ratio", "loss_scale", "skipped_steps", "0/grad_norm", "6/output"} <= set(
        seen[-1][1]
    )
    assert all(isinstance(value, float) for _, values in seen for value in values.values())


def test_the_terminal_shows_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich import console

    drawn = io.StringIO()

    class Terminal(console.Console):
        def __init__(self, **_: Any) -> None:
            super().__init__(file=drawn, force_terminal=True, width=100)

    monkeypatch.setattr(console, "Console", Terminal)
    amp, net, made, monitor = watched(live=True)
    train(amp, net, made, 2)
    assert drawn.getvalue().rfind("\x1b[?25h") > drawn.getvalue().rfind(
        "\x1b[?25l"
    )  # the cursor is visible, in case the run ends here
    print("loss 1.5")  # standard output is a file or pipe
    train(amp, net, made, 2)
    monitor.close()
    assert "fp16-mixed: 4 steps" in drawn.getvalue()
    assert "Step 4" in drawn.getvalue()
    assert capsys.readouterr().out == "loss 1.5\n"


def test_without_a_terminal_nothing_is_drawn(capfd: pytest.CaptureFixture[str]) -> None:
    amp, net, made, monitor = watched(live=True)
    train(amp, net, made, 4)
    monitor.close()
    assert capfd.readouterr() == ("", "")


def test_every_event_has_numbers() -> None:
    assert scalars(Audit(1, "pass", "", 0.5, None)) == {"audit/damage": 0.5}
    alarm = Alarm("audit", 1, "", 1.0, 0.5, "")
    assert scalars(alarm) == {"alarm/audit": 1.0}


def test_one_that_fails_to_close_does_not_keep_others_open(tmp_path: Path) -> None:
    class Broken(Screen):
        def close(self) -> None:
            raise OSError("broken")

    lines = JsonLines(tmp_path / "lines")
    monkey = dict(sinks_of._WHAT)
    sinks_of._WHAT["Broken"] = "broken="
    try:
        with pytest.warns(UserWarning, match="broken= failed"):
            Sinks([lines, Broken()]).close()
    finally:
        sinks_of._WHAT.clear()
        sinks_of._WHAT.update(monkey)
    assert lines._file is None
