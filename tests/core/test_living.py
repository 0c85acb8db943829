"""Finding the live objects of a class without holding a reference to any other object."""

from __future__ import annotations

import sys
import threading
import time

import torch
from torch import Tensor, nn

from castwise.core._torch.tensors import living


class Own(nn.Parameter):
    pass


class Odd:
    """Claims to be of another class through ``__class__``."""

    __class__ = Tensor  # type: ignore[assignment]


def test_instances_of_subclasses_are_found_and_nothing_else() -> None:
    tensors = [torch.ones(2), nn.Parameter(torch.ones(2)), Own(torch.ones(2)), nn.Buffer(torch.ones(2))]
    odd, modules = Odd(), [nn.Linear(2, 2), nn.Sequential()]
    found = set(map(id, living(Tensor)))
    assert found >= set(map(id, tensors))
    assert found.isdisjoint(map(id, [odd, *modules]))
    assert set(map(id, living(nn.Module))) >= set(map(id, modules))
    assert set(map(id, living(nn.Sequential, Own))) >= {id(modules[1]), id(tensors[2])}
    assert id(tensors[1]) not in set(map(id, living(nn.Sequential, Own)))


def test_other_threads_go_on_undisturbed() -> None:
    """gc.get_objects references every object, which makes a tuple that another thread is building fail with
    SystemError.
    """
    failed: list[BaseException] = []
    ended = time.monotonic() + 1.0
    interval = sys.getswitchinterval()

    def build() -> None:
        while time.monotonic() < ended and not failed:
            try:
                tuple(i for i in range(300))
            except SystemError as error:
                failed.append(error)

    threads = [threading.Thread(target=build) for _ in range(3)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        while time.monotonic() < ended and not failed:
            living(Tensor)
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failed
