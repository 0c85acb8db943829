"""``colossalai.testing``: comparisons, and tests in several processes, as its own tests and others' use them."""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.multiprocessing.spawn import spawn as start_and_join
from torch.testing import assert_close

from castwise.bridges.compat.colossalai.utils import empty_cache, free_port, synchronize
from castwise.bridges.compat.coverage import missing_attribute

__all__ = [
    "assert_close",
    "assert_close_loose",
    "assert_equal",
    "assert_equal_in_group",
    "assert_not_equal",
    "check_state_dict_equal",
    "clear_cache_before_run",
    "free_port",
    "parameterize",
    "rerun_if_address_is_in_use",
    "rerun_on_exception",
    "spawn",
]
__getattr__ = missing_attribute("colossalai.testing")

_Function = Callable[..., Any]


# --- comparisons ----------------------------------------------------------------------------------------------


def assert_equal(a: Tensor, b: Tensor) -> None:
    """Assert that all elements are equal."""
    assert bool((a == b).all()), f"expected equal tensors, got {a} and {b}"


def assert_not_equal(a: Tensor, b: Tensor) -> None:
    """Assert that some elements differ."""
    assert not bool((a == b).all()), f"expected tensors that differ, got {a} twice"


def assert_close_loose(a: Tensor, b: Tensor, rtol: float = 1e-3, atol: float = 1e-3) -> None:
    """Assert that tensors are close, as ``torch.testing.assert_close`` does with wider tolerances."""
    assert_close(a, b, rtol=rtol, atol=atol)


def assert_equal_in_group(tensor: Tensor, process_group: Any = None) -> None:
    """Assert that all ranks of a group have the same values; they make the call together."""
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(everyone, tensor, group=process_group)
    for other in everyone:
        assert_equal(tensor, other)


def check_state_dict_equal(
    d1: Mapping[str, Any], d2: Mapping[str, Any], ignore_device: bool = True, ignore_dtype: bool = False
) -> None:
    """Assert that nested states have the same keys and close values."""
    assert set(d1) == set(d2), f"keys differ: {list(d1)} and {list(d2)}"
    for key, value in d1.items():
        _check_equal(key, value, d2[key], ignore_device, ignore_dtype)


def _check_equal(key: Any, a: Any, b: Any, ignore_device: bool, ignore_dtype: bool) -> None:
    if isinstance(a, Mapping):
        check_state_dict_equal(a, b, ignore_device, ignore_dtype)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), f"{key}: {len(a)} and {len(b)} entries"
        for one, other in zip(a, b, strict=True):
            _check_equal(key, one, other, ignore_device, ignore_dtype)
    elif isinstance(a, Tensor):
        assert_close(
            a, b, rtol=1e-3, atol=1e-3, check_device=not ignore_device, check_dtype=not ignore_dtype,
            msg=lambda said: f"{key}: {said}",
        )  # fmt: skip
    else:
        assert a == b, f"{key}: {a} and {b}"


# --- tests ----------------------------------------------------------------------------------------------------


def parameterize(argument: str, values: Iterable[Any]) -> Callable[[_Function], _Function]:
    """Have a function run once for each value of a keyword argument, within one process."""
    held = list(values)

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def run_all(*args: Any, **kwargs: Any) -> None:
            for value in held:
                function(*args, **{**kwargs, argument: value})

        del run_all.__wrapped__  # pytest would ask for a fixture of the argument's name
        return run_all

    return decorate


def rerun_on_exception(
    exception_type: type[BaseException] = Exception, pattern: str | None = None, max_try: int | None = 5
) -> Callable[[_Function], _Function]:
    """Have a function run again when it raises, ``max_try`` times in all, None for ever.

    ``pattern`` is a regular expression that a line of the error must begin with; others are not tried again.
    """

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            tries = 1
            while True:
                try:
                    return function(*args, **kwargs)
                except exception_type as error:
                    known = pattern is None or any(re.match(pattern, line) for line in str(error).split("\n"))
                    if not known or tries == max_try:
                        raise
                    tries += 1

        return run

    return decorate


def rerun_if_address_is_in_use() -> Callable[[_Function], _Function]:
    """Have a test that spawns processes run again where its port was taken."""
    return rerun_on_exception(ProcessRaisedException, ".*Address already in use.*")


def clear_cache_before_run() -> Callable[[_Function], _Function]:
    """Have a function begin with memory that nothing uses given back."""

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> None:
            synchronize()
            gc.collect()
            empty_cache()
            function(*args, **kwargs)

        return run

    return decorate


def spawn(func: _Function, nprocs: int = 1, **kwargs: Any) -> None:
    """Run ``func(rank, world_size=, port=, **kwargs)`` in so many processes, with a port that is free."""
    start_and_join(functools.partial(func, world_size=nprocs, port=free_port(), **kwargs), nprocs=nprocs)
