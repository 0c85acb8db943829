"""Start ``torch.distributed``, also in processes that torchrun has restarted.

torchrun's agent keeps one store for all restarts, which still holds the keys of processes that have ended. So torch's
``init_process_group`` reads the addresses of ended processes from the store, and fails or hangs. In this module each
start uses a separate part of the store.
"""

from __future__ import annotations

import datetime
import os
import time
import uuid
from typing import Any

import torch
import torch.distributed as dist

from castwise.errors import StateError

_PATIENCE = datetime.timedelta(minutes=5)
_POLL_S = 0.01


def init_process_group(
    backend: str | None = None,
    *,
    timeout: datetime.timedelta | None = None,
    device_id: torch.device | int | None = None,
    pg_options: Any = None,
) -> None:
    """Start ``torch.distributed``, also in processes that torchrun has restarted.

    Use it in place of ``torch.distributed.init_process_group`` in a script under ``torchrun --max-restarts``, on one
    machine or several. In restarted processes, torch's function finds the addresses of ended processes in torchrun's
    store, and fails or hangs. Without torchrun or another launcher, the process forms a group by itself. The same
    script thus also runs as ``python train.py``.

    Args:
        backend: The backend, such as ``"gloo"`` or ``"nccl"``. None leaves the choice to torch, which chooses by
            device.
        timeout: How long to wait for the other processes, in this call and in collectives. None waits five minutes in
            this call, and has torch's defaults in collectives.
        device_id: The GPU of this process, as for torch's function.
        pg_options: Options of the backend, as for torch's function.

    Raises:
        StateError: Other processes did not arrive in time.
        RuntimeError: Raised by torch: the store cannot be reached.
        ValueError: Raised by torch: a group exists already, or the environment lacks ``MASTER_ADDR`` or a similar
            variable.
    """
    dist.init_process_group(
        backend,
        timeout=timeout,
        device_id=device_id,
        pg_options=pg_options,
        **_meeting_place(timeout or _PATIENCE),
    )


def _meeting_place(timeout: datetime.timedelta) -> dict[str, Any]:
    """Return the arguments ``store``, ``rank`` and ``world_size`` for torch's ``init_process_group``.

    The result is empty if torch's own rendezvous works.
    """
    env = os.environ
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
    agents = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    ours = dist.PrefixStore("castwise", agents)  # type: ignore[attr-defined]
    store = dist.PrefixStore(_attempt(ours, rank, world), ours)  # type: ignore[attr-defined]
    return {"store": store, "rank": rank, "world_size": world}


def _attempt(store: Any, rank: int, world: int) -> str:
    """Agree on a name for this start with the other processes, and return it.

    The name separates the keys of this start in the store from those of earlier starts. Rank 0 creates it, and each
    other rank asks for it under a key of its own. Rank 0 cannot tell requests of live ranks from those of ended ones,
    so it answers all of them until every rank has confirmed that it has read the answer. The number of the restart
    cannot serve as the name, since each agent of torchrun counts its own restarts.
    """
    own = uuid.uuid4().hex
    if rank > 0:
        store.set(f"here/{rank}", own)
        attempt = str(store.get(f"answer/{own}").decode())
        store.set(f"{attempt}/read/{rank}", "")
        return attempt
    missing, deadline = set(range(1, world)), time.monotonic() + store.timeout.total_seconds()
    while missing:
        if time.monotonic() > deadline:
            raise StateError(
                f"init_process_group: {len(missing)} of {world} ranks have not arrived within {store.timeout}, the first of "
                f"them rank {min(missing)}; look for its error above, or give more time with timeout="
            )
        for other in sorted(missing):
            if store.check([f"{own}/read/{other}"]):
                missing.remove(other)
            elif store.check([f"here/{other}"]):
                store.set(f"answer/{store.get(f'here/{other}').decode()}", own)
        time.sleep(_POLL_S)
    return own
