"""Processes of distributed tests."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import torch.distributed as dist


def leave() -> NoReturn:
    """End a process whose assertions have all passed, together with the others of its group.

    gloo's own teardown aborts now and then ("terminate called without an active exception") although everything
    is done; what is tested ends here, so the process ends without it. A failed assertion never comes this far.
    """
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
