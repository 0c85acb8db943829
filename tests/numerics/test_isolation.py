"""Experiments leave no trace, and a seed settles every generator."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from castwise.numerics.isolation import seed_all, undisturbed


def _state() -> tuple[object, ...]:
    return (
        random.getstate(),
        tuple(np.random.get_state()[1]),  # type: ignore[arg-type]
        tuple(torch.get_rng_state().tolist()),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        torch.is_grad_enabled(),
    )


def _disturb() -> None:
    seed_all(99)
    random.random()
    np.random.rand(3)
    torch.rand(3)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark


def test_everything_is_given_back() -> None:
    before = _state()
    with undisturbed():
        _disturb()
        assert _state() != before
    assert _state() == before


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_everything_is_given_back_after_a_failure(error: type[BaseException]) -> None:
    before = _state()

    def fail() -> None:
        with undisturbed():
            _disturb()
            raise error

    with pytest.raises(error):
        fail()
    assert _state() == before


def test_deterministic_algorithms_that_the_user_wants_stay_wanted() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with undisturbed():
            torch.use_deterministic_algorithms(False)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_gradients_flow_inside_whatever_the_mode_outside() -> None:
    with torch.no_grad():
        with undisturbed():
            assert torch.is_grad_enabled()
            assert (torch.ones(1, requires_grad=True) * 2).requires_grad
        assert not torch.is_grad_enabled()


def test_gradients_flow_inside_inference_mode() -> None:
    with torch.inference_mode():
        with undisturbed():
            assert (torch.ones(1, requires_grad=True) * 2).requires_grad
        assert torch.is_inference_mode_enabled()


def test_ambient_autocast_is_off_inside_and_on_again_outside() -> None:
    """The reference is fp32, so a caller's own autocast region must not reach it."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with undisturbed():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
        assert torch.is_autocast_enabled("cpu")


def test_random_numbers_go_on_as_if_nothing_had_been() -> None:
    seed_all(5)
    want = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    seed_all(5)
    with undisturbed():
        _disturb()
    assert [random.random(), float(np.random.rand()), float(torch.rand(()))] == want


def test_a_seed_settles_python_numpy_and_torch() -> None:
    def draw(seed: int) -> tuple[float, float, float]:
        seed_all(seed)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    assert draw(1) == draw(1)
    assert all(a != b for a, b in zip(draw(1), draw(2), strict=True))
    draw(2**32 - 1)  # the largest that all three take
