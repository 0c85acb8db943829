"""Training in a separate process that reports the seconds of each step of a block, for ``bench_rest``."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import torch

from castwise import Plan
from castwise.lab.timing.processes import received
from castwise.lab.timing.runners import TrainingRun
from castwise.lab.timing.served import belong_to


def steps_in_turn(pipe: Connection, workload: bytes, line: str, rest_s: float) -> None:
    """For each number of steps received, pause, run the steps and send the seconds of each."""
    plan = Plan.parse(line)
    belong_to(plan)
    run = TrainingRun(received(workload), plan, torch.device("cpu"))
    pipe.send((False, None))
    while count := pipe.recv():
        time.sleep(rest_s)
        taken = []
        for _ in range(count):
            run.before(1)
            start = time.perf_counter()
            run.run(1)
            taken.append(time.perf_counter() - start)
            run.after()
        pipe.send((False, taken))
