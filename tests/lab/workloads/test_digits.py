"""``digits``: the images are scikit-learn's, each is used once, and both networks learn to classify them."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import islice

import pytest
import torch
from torch import nn

from castwise.errors import CastwiseError
from castwise.lab.workloads import digits as digits_module
from castwise.lab.workloads.digits import digits, split
from castwise.lab.workloads.workload import find_workload
from tests.lab.workloads.learning import train


def test_the_split_holds_every_image_once() -> None:
    from sklearn.datasets import load_digits

    images, labels, held_images, held_labels = split()
    assert (len(images), len(held_images)) == (1437, 360)
    data = load_digits()
    raw = torch.tensor(data.images, dtype=torch.float32)
    everything = torch.cat((images, held_images))[:, 0]
    scale, shift = raw.std(), raw.mean()
    back = (
        (everything * float(scale) + float(shift)) - 0
    ).round()  # normalized with the training images' statistics, nearly the same
    pairs = zip(back.flatten(1).tolist(), torch.cat((labels, held_labels)).tolist(), strict=True)
    found = Counter((tuple(map(int, pixels)), label) for pixels, label in pairs)
    wanted = Counter(
        (tuple(map(int, pixels)), int(label))
        for pixels, label in zip(raw.flatten(1).tolist(), data.target, strict=True)
    )
    assert found == wanted


def test_training_images_are_standardised_and_all_digits_are_held_out() -> None:
    images, labels, _, held_labels = split()
    assert float(images.mean()) == pytest.approx(0, abs=1e-5)
    assert float(images.std()) == pytest.approx(1, abs=1e-5)
    assert set(held_labels.tolist()) == set(labels.tolist()) == set(range(10))


def test_an_epoch_shows_no_image_twice_and_follows_the_seed() -> None:
    workload = digits(batch=64)
    epoch = list(islice(workload.batches(1), 22))
    rows = torch.cat([images for images, _ in epoch]).flatten(1)
    original = split()[0].flatten(1).unique(dim=0)
    assert len(rows.unique(dim=0)) == len(rows) == 22 * 64 <= len(original)
    again = next(workload.batches(1))
    assert torch.equal(epoch[0][0], again[0])
    assert torch.equal(epoch[0][1], again[1])
    assert not torch.equal(epoch[0][0], next(workload.batches(2))[0])
    later = next(islice(workload.batches(1), 22, 23))
    assert later[0].shape == (64, 1, 8, 8)


@pytest.mark.parametrize(
    ("spec", "steps", "accuracy"), [("digits?width=16", 60, 0.85), ("digits?model=vit&width=32", 120, 0.6)]
)
def test_it_learns(spec: str, steps: int, accuracy: float) -> None:
    workload = find_workload(spec)
    model, losses = train(workload, steps)
    assert losses[-1] < 0.6 * losses[0]
    with torch.no_grad():
        metrics = workload.evaluate(model.eval())
    assert metrics["accuracy"] > accuracy
    assert metrics["held_out_loss"] < losses[0]


def test_the_convolutional_network_has_batch_norm_and_the_transformer_layer_norm() -> None:
    conv, vit = digits().model(), digits("vit").model()
    assert sum(isinstance(m, nn.BatchNorm2d) for m in conv.modules()) == 3
    assert sum(isinstance(m, nn.LayerNorm) for m in vit.modules()) == 7
    assert vit(torch.zeros(2, 1, 8, 8)).shape == conv(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)  # None makes the import fail
    digits_module.split.cache_clear()
    with pytest.raises(CastwiseError, match=r'pip install "castwise\[workloads\]"'):
        next(digits().batches(0))
    digits_module.split.cache_clear()
