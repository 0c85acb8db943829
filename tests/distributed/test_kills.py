"""Killed processes under torchrun's elastic restarts, and several nodes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from tests.distributed import kills
from tests.distributed.kills import OwnLoop, Training
from tests.processes import Forked
from tests.soak import soaks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc for the processes to kill")


def test_two_kills_lose_nothing(tmp_path: Path) -> None:
    """One kill comes in a step, one while a checkpoint is written; the final weights are the same."""
    quiet = Training(tmp_path / "quiet", steps=40)
    quiet.run()
    with Training(tmp_path / "noisy", steps=40) as noisy:
        noisy.start(restarts=3)
        draw = random.Random(0)
        made = []
        noisy.until(lambda: noisy.steps_made() > 12)
        made.append(noisy.kill_one(draw))
        noisy.until(lambda: noisy.steps_made() > 22)
        made.append(noisy.kill_one_saving(draw))
        assert all(made)
        assert "saving" in str(made[1])
        assert noisy.wait() == 0, noisy.said()
    assert noisy.weights_equal(quiet)
    rows = [json.loads(line) for line in (noisy.out / "metrics.jsonl").read_text().splitlines()]
    want = [json.loads(line) for line in (quiet.out / "metrics.jsonl").read_text().splitlines()]
    for got, row in zip(rows, want, strict=True):
        del got["elapsed_s"], row["elapsed_s"]
        assert got == row
    result = json.loads((noisy.out / "result.json").read_text())
    assert (result["status"], result["steps_done"]) == ("ok", 40)
    assert result["steps_before"] >= 15  # saves are asynchronous, so the last one may have been incomplete


def test_a_loop_of_ones_own_comes_back(tmp_path: Path) -> None:
    """The example in docs/parallel.md: after each rank is killed once, one restart each leads to the same weights."""
    quiet = OwnLoop(tmp_path / "quiet")
    quiet.run()
    with OwnLoop(tmp_path / "noisy") as noisy:
        noisy.start(restarts=2)
        for rank in range(2):
            noisy.until(lambda: noisy.steps_made() > 10 + 40 * rank)  # noqa: B023
            os.kill(sorted(noisy.workers())[rank], signal.SIGKILL)
            assert noisy.steps_made() < 200
        assert noisy.wait(60) == 0, noisy.said()
    assert noisy.steps_made() == quiet.steps_made() == 200
    assert noisy.weights_equal(quiet)


@soaks
def test_two_nodes_train_like_one(tmp_path: Path) -> None:
    """Two torchrun agents with a rendezvous on loopback, one of them killed, equal two processes of one agent."""
    one = Training(tmp_path / "one", steps=40, layout="fsdp2")
    one.run()
    two = Training(tmp_path / "two", steps=40, layout="fsdp2")
    port = _listening_port()
    words = [
        "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}",
        "--rdzv-id", "castwise", "--local-addr", "127.0.0.1", "--max-restarts", "1", "--monitor-interval", "0.1",
        *kills.FORKED, *two.words,
    ]  # fmt: skip
    nodes = [Forked(kills.torchrun, words, tmp_path, tmp_path / f"node{number}") for number in range(2)]
    deadline = time.monotonic() + 60
    while two.steps_made() < 12 and time.monotonic() < deadline:
        time.sleep(0.001)
    for worker in kills.workers_of(nodes[1].pid):
        os.kill(worker, signal.SIGKILL)
    codes = [node.wait(100) for node in nodes]
    said = [node.said("out") + node.said("err") for node in nodes]
    assert codes == [0, 0], "\n".join(said)
    assert sum("Wrote" in text for text in said) == 1
    assert json.loads((two.out / "result.json").read_text())["steps_before"] >= 5
    assert two.weights_equal(one)


def _listening_port() -> int:
    """Return a port below the system's range for outgoing connections, so that it is free until torchrun listens."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port between 20000 and 32000 is free")
