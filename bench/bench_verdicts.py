"""Test the decision rule of ``parity`` on simulated gradients whose damage is known.

In the first part, the damage is even; or in one half, fifth, tenth or twentieth of the microbatches only; or
lognormal over the microbatches (the standard deviation of its logarithm is 1, 2 or 3). The direction of the error is
random for each microbatch (noise) or the same for all (bias). The mean damage is 0.3, 1, 3 and 10 times the threshold
below which plans pass. The rows have the shares of the verdicts and the mean number of microbatches, for the rule as
it is and for the interval alone, that is, without a minimum number of microbatches. The data's noise is as large as
its signal. ``parity`` starts with 8 microbatches and draws at most 32.

In the second part, the data's noise is 1 to 1000 times the signal, in 10, 60 and 2000 dimensions. The rounding's
noise is 0.1 or 0.3 % of the data's noise, which is sound, and the square of its bias is 0 to 3 times the squared
signal. The rule is compared with other horizons, including its former version, which compares the bias with the noise
of a single update (``horizon`` 1).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import torch

from castwise.lab.parity import damage
from castwise.lab.parity.damage import PASS, Grams, Matrix, estimate
from castwise.lab.parity.parity import MICROBATCHES, MOST
from castwise.lab.parity.verdicts import LEAST, compare, goes_on
from common import Results, arguments

SHAPES = ("even", "1/2", "1/5", "1/10", "1/20", "lognormal 1", "lognormal 2", "lognormal 3")
LEVELS = (0.3, 1.0, 3.0, 10.0)
SIZE = 60
"""Number of elements of a gradient."""
SIZES, NOISES = (10, 60, 2000), (1.0, 50.0, 200.0, 1000.0)
BIASES = ((0.001, 0.0), (0.003, 0.0), (0.003, 0.03), (0.003, 0.3), (0.003, 1.0), (0.003, 3.0))
"""The rounding's noise divided by the data's, and the square of its bias divided by the squared signal."""
HORIZONS = ((damage.HORIZON, damage.LASTING), (1, 1), (10, 1), (30, 1000), (100, 1000))


def energies(rng: np.random.Generator, shape: str, count: int) -> Matrix:
    """Draw squared errors ``[count]`` with an expected value of 1."""
    if shape == "even":
        return np.ones(count)
    if shape.startswith("1/"):
        every = int(shape.removeprefix("1/"))
        return every * (rng.random(count) < 1.0 / every).astype(np.float64)
    sigma = float(shape.removeprefix("lognormal "))
    return np.exp(sigma * rng.standard_normal(count) - sigma**2 / 2)


def draw(rng: np.random.Generator, shape: str, level: float, biased: bool, count: int) -> Grams:
    """Draw gradients with a signal and a noise of 1, and errors with a damage of ``level`` times ``PASS``."""
    signal = rng.standard_normal((count, SIZE)) / math.sqrt(SIZE)
    signal[:, 0] += 1.0
    error = rng.standard_normal((1 if biased else count, SIZE)) * np.ones((count, 1))
    error /= np.linalg.norm(error, axis=1, keepdims=True)
    error *= np.sqrt(2.0 * level * PASS * energies(rng, shape, count))[:, None]
    return Grams(signal @ signal.T, error @ error.T)


def draw_biased(
    rng: np.random.Generator, size: int, data: float, noise: float, bias: float, count: int
) -> Grams:
    """Draw gradients with a squared signal of 1 / ``data`` and a noise of 1, and errors with a given noise and bias."""
    signal, error = rng.standard_normal((2, count, size)) / math.sqrt(size)
    signal[:, 0] += math.sqrt(1.0 / data)
    error *= math.sqrt(noise)
    error[:, 1] += math.sqrt(bias / data)
    return Grams(signal @ signal.T, error @ error.T)


def judge(drawn: Grams, least: int) -> tuple[str, int]:
    """Return the verdict and the number of microbatches, following the steps of ``castwise.parity``."""
    count = MICROBATCHES
    while True:
        part = Grams(drawn.signal[:count, :count], drawn.error[:count, :count])
        verdict, _, more = compare(estimate(part), None, count, least)
        if not goes_on(verdict, more, count, MICROBATCHES, drawn.count):
            return verdict, count
        count += MICROBATCHES


def main() -> None:
    """Run both parts and write ``results/verdicts-cpu.json``."""
    parser = arguments(__doc__)
    parser.add_argument("--trials", type=int, default=400)
    options = parser.parse_args()
    with Results("verdicts", torch.device("cpu"), __doc__, options.budget) as results:
        for shape, biased, level in itertools.product(SHAPES, (False, True), LEVELS):
            for rule, least in (("as it is", LEAST), ("interval alone", 0)):
                rng = np.random.default_rng(0)
                said: Counter[str] = Counter()
                counts = []
                for _ in range(options.trials):
                    verdict, count = judge(draw(rng, shape, level, biased, MOST * MICROBATCHES), least)
                    said[verdict] += 1
                    counts.append(count)
                results.add({
                    "rule": rule, "damage_is_in": shape, "direction": "the same" if biased else "anew",
                    "times_the_line": level, "trials": options.trials,
                    **{name: said[name] / options.trials for name in ("pass", "undecided", "fail")},
                    "microbatches": float(np.mean(counts)),
                })  # fmt: skip
        for size, data, (noise, bias) in itertools.product(SIZES, NOISES, BIASES):
            for horizon, lasting in HORIZONS:
                damage.HORIZON, damage.LASTING = horizon, lasting
                rng = np.random.default_rng(0)
                said = Counter(
                    judge(draw_biased(rng, size, data, noise, bias, MOST * MICROBATCHES), LEAST)[0]
                    for _ in range(options.trials // 4)
                )
                results.add({
                    "rule": "as it is" if (horizon, lasting) == HORIZONS[0] else "other horizon", "dimensions": size,
                    "data_noise_over_signal": data, "rounding_noise_over_data": noise, "bias_over_signal": bias,
                    "horizon": horizon, "lasting": lasting, "trials": options.trials // 4,
                    **{name: said[name] / (options.trials // 4) for name in ("pass", "undecided", "fail")},
                })  # fmt: skip
            damage.HORIZON, damage.LASTING = HORIZONS[0]


if __name__ == "__main__":
    main()
