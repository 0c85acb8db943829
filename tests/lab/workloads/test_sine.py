"""``sine``: the target is the wave given by the formula, and the network learns it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from castwise.lab.workloads.sine import WaveNet, grid, quantised_wave
from castwise.lab.workloads.workload import find_workload
from tests.lab.workloads.learning import train


def test_coordinates_run_from_zero_to_one_along_the_right_axes() -> None:
    x, y = grid(33)
    assert x.dtype is torch.float32
    assert torch.equal(x[0], x[20])
    assert torch.equal(y[:, 0], y[:, 20])
    assert (x[0, 0], x[0, -1], y[0, 0], y[-1, 0]) == (0.0, 1.0, 0.0, 1.0)
    assert float(x[0, 16]) == 0.5


@pytest.mark.parametrize("bins", [2, 4, 7])
def test_the_wave_has_as_many_levels_as_bins(bins: int) -> None:
    levels = quantised_wave(128, bins).unique()
    assert len(levels) == bins
    torch.testing.assert_close(levels, torch.arange(bins) / (bins - 1), atol=1e-7, rtol=0)


def test_the_wave_is_the_formula_pixel_by_pixel() -> None:
    size, bins = 61, 4
    wave = [
        [math.cos(8 * math.pi * x / (size - 1)) + math.cos(4 * math.pi * y / (size - 1)) for x in range(size)]
        for y in range(size)
    ]
    low, high = min(map(min, wave)), max(map(max, wave))
    got = quantised_wave(size, bins)
    for y in range(size):
        for x in range(size):
            position = (wave[y][x] - low) / (high - low) * bins
            if (
                abs(position - round(position)) > 1e-9 or position >= bins
            ):  # a pixel on an edge may be rounded up or down
                assert float(got[y, x]) == pytest.approx(min(int(position), bins - 1) / (bins - 1))


def test_the_wave_repeats_four_times_across_and_twice_down() -> None:
    wave = quantised_wave(129)  # 128 intervals: whole periods of 32 and 64 pixels

    def same(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one == other).double().mean())

    # pixels on the edge between two levels may be rounded up or down
    assert same(wave[:, :96], wave[:, 32:128]) > 0.98
    assert same(wave[:, :112], wave[:, 16:128]) < 0.6
    assert same(wave[:64], wave[64:128]) > 0.98
    assert same(wave[:96], wave[32:128]) < 0.6


def test_the_network_is_of_1x1_convolutions_with_batch_norm() -> None:
    model = WaveNet(16, 2)
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert [(c.in_channels, c.out_channels) for c in convolutions] == [(2, 16), (16, 16), (16, 16), (16, 1)]
    assert all(c.kernel_size == (1, 1) for c in convolutions)
    assert sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()) == 3
    assert (
        sum(p.numel() for p in WaveNet().parameters()) == 2 * 256 + 2 * 256**2 + 256 + 3 * 256 + 1 + 6 * 256
    )
    assert model(grid(20)[None]).shape == (1, 1, 20, 20)


def test_it_learns_and_shows_what_it_learned() -> None:
    workload = find_workload("sine?size=32&hidden=64")
    model, losses = train(workload, 80)
    assert losses[-1] < 0.3 * losses[0]
    untrained, _ = train(workload, 0)
    with torch.no_grad():
        metrics, before = workload.evaluate(model.eval()), workload.evaluate(untrained.eval())
        picture = workload.picture(model)
    assert metrics["mse"] < 0.5 * before["mse"]
    assert metrics["pixels_right"] > before["pixels_right"]
    assert torch.equal(picture["target"], quantised_wave(32))
    assert picture["prediction"].shape == (32, 32)
    error = (picture["prediction"] - picture["target"]).square().mean()
    assert float(error) == pytest.approx(metrics["mse"], rel=1e-5)


def test_metrics_of_a_perfect_model_are_perfect() -> None:
    class Oracle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(1))

        def forward(self, coordinates: torch.Tensor) -> torch.Tensor:
            return quantised_wave(coordinates.shape[-1])[None, None] + self.shift

    workload = find_workload("sine?size=64")
    with torch.no_grad():
        assert workload.evaluate(Oracle()) == {"pixels_right": 1.0, "mse": 0.0}


def test_the_default_size_fits_the_machine() -> None:
    side = next(find_workload("sine").batches(0))[1].shape[-1]
    assert side == (512 if torch.accelerator.is_available() else 128)
