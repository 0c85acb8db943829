"""The built-in workloads: real data, the same for the same seed, and models that learn from it."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator

import pytest
import torch

from castwise.errors import WorkloadError
from castwise.workload import Workload, find_workload
from castwise.workloads.digits import HELD_OUT, split
from castwise.workloads.gpt import corpus, decode
from castwise.workloads.sine import FREQUENCY, grid, quantised_wave

SMALL = {
    "sine": "sine?size=48&hidden=64",
    "gpt": "gpt?layers=2&width=64&context=64&batch=8",
    "digits": "digits",
    "digits-vit": "digits?model=vit",
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _train(workload: Workload, steps: int, seed: int = 0) -> tuple[torch.nn.Module, list[float]]:
    torch.manual_seed(seed)
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())
    losses = []
    for batch in itertools.islice(workload.batches(seed), steps):
        loss = workload.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return model, losses


@pytest.mark.parametrize("name", SMALL)
def test_learns(name: str) -> None:
    workload = find_workload(SMALL[name])
    model, losses = _train(workload, 60)
    first, last = losses[0], sum(losses[-5:]) / 5
    assert last < 0.75 * first
    model.eval()
    with torch.no_grad():
        after = workload.evaluate(model)
        torch.manual_seed(1)
        before = workload.evaluate(workload.model().eval())
    measure, better = {
        "sine": ("mse", -1),
        "gpt": ("held_out_nats_per_char", -1),
        "digits": ("accuracy", 1),
        "digits-vit": ("accuracy", 1),
    }[name]
    assert better * after[measure] > better * before[measure]


def test_the_convolutional_network_reads_digits() -> None:
    workload = find_workload("digits")
    model, _ = _train(workload, 60)
    with torch.no_grad():
        assert workload.evaluate(model.eval())["accuracy"] > 0.9


@pytest.mark.parametrize("name", SMALL)
def test_the_same_seed_gives_the_same_run(name: str) -> None:
    workload = find_workload(SMALL[name])
    assert _train(workload, 3)[1] == _train(workload, 3)[1]


@pytest.mark.parametrize("name", ["gpt", "digits"])
def test_another_seed_gives_other_batches(name: str) -> None:
    workload = find_workload(SMALL[name])
    (inputs, targets), (others, _) = next(workload.batches(0)), next(workload.batches(1))
    assert not torch.equal(inputs, others)
    assert len(inputs) == len(targets)


@pytest.mark.parametrize("name", SMALL)
def test_can_be_sent_to_another_process(name: str) -> None:
    workload = find_workload(SMALL[name])
    copy = pickle.loads(pickle.dumps(workload))
    assert _train(copy, 1)[1] == _train(workload, 1)[1]


# --- sine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bins", [2, 4, 7])
@pytest.mark.parametrize("size", [17, 64, 128])
def test_the_wave_has_exactly_its_levels(size: int, bins: int) -> None:
    levels = quantised_wave(size, bins).unique()
    assert torch.equal(levels, (torch.arange(bins, dtype=torch.float64) / (bins - 1)).float())


def test_the_wave_is_the_sum_of_two_cosines_cut_into_equal_bands() -> None:
    size, bins = 33, 4
    wave = quantised_wave(size, bins)
    x, y = grid(size).double()
    exact = torch.cos(2 * torch.pi * FREQUENCY[0] * x) + torch.cos(2 * torch.pi * FREQUENCY[1] * y)
    low, high = exact.min(), exact.max()
    for level in range(bins):
        band = (
            exact[wave == level / (bins - 1)] if level not in (1, 2) else exact[(wave * 3).round() == level]
        )
        assert band.min() >= low + (high - low) * level / bins - 1e-6
        assert band.max() <= low + (high - low) * (level + 1) / bins + 1e-6


def test_coordinates_run_from_0_to_1_with_x_along_the_last_axis() -> None:
    x, y = grid(5)
    assert x[0].tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert torch.equal(y, x.T)


def test_the_network_is_the_one_of_the_measurements() -> None:
    torch.manual_seed(0)
    kinds = [type(m).__name__ for m in find_workload("sine").model().modules() if not list(m.children())]
    assert kinds == ["Conv2d", "BatchNorm2d", "ReLU"] * 3 + ["Conv2d"]


def test_the_picture_shows_the_target_and_what_the_model_makes_of_it() -> None:
    workload = find_workload("sine?size=32&hidden=16")
    model, _ = _train(workload, 2)
    with torch.no_grad():
        picture = workload.picture(model.eval())
        expected = model(grid(32)[None])[0, 0]
    assert torch.equal(picture["target"], quantised_wave(32))
    assert torch.equal(picture["prediction"], expected)


# --- gpt ----------------------------------------------------------------------------------------------------


def test_the_text_is_that_of_pydoc_data() -> None:
    from pydoc_data.topics import topics

    tokens, alphabet = corpus()
    text = decode(tokens)
    assert text == "\n\n".join(topics[key] for key in sorted(topics))
    assert "".join(sorted(set(text))) == alphabet
    inputs, targets = next(find_workload(SMALL["gpt"]).batches(0))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert decode(inputs[0]) in text


def test_batches_never_show_the_held_out_text() -> None:
    tokens, _ = corpus()
    # as long as the context is, a window of held-out text that stood in training would have to be a repetition
    training = decode(tokens[: int(len(tokens) * 0.9)])
    for inputs, targets in itertools.islice(find_workload("gpt?layers=1&width=64").batches(3), 20):
        assert all(decode(row) in training for row in (*inputs, *targets))


def test_the_model_sees_no_later_character() -> None:
    workload = find_workload(SMALL["gpt"])
    torch.manual_seed(0)
    model = workload.model().eval()
    inputs, _ = next(workload.batches(0))
    changed = inputs.clone()
    changed[:, 40:] = (changed[:, 40:] + 1) % 50
    with torch.no_grad():
        before, after = model(inputs), model(changed)
    torch.testing.assert_close(before[:, :40], after[:, :40])
    assert not torch.allclose(before[:, 40:], after[:, 40:])


def test_embedding_and_output_are_one_matrix() -> None:
    model = find_workload(SMALL["gpt"]).model()
    assert model.head.weight is model.embedding.weight


# --- digits -------------------------------------------------------------------------------------------------


def test_the_digits_are_sklearns() -> None:
    from sklearn.datasets import load_digits

    data = load_digits()
    images, labels, held_images, held_labels = split()
    assert len(held_labels) == HELD_OUT
    every = torch.cat([images, held_images])
    raw = torch.tensor(data.images, dtype=torch.float32)[:, None]
    scale = (raw.std() / every.std()).item()
    # the same images, in another order and with another zero and unit
    assert torch.equal(
        torch.cat([labels, held_labels]).bincount(), torch.tensor(data.target, dtype=torch.int64).bincount()
    )
    restored = (every * scale + (raw.mean() - every.mean() * scale)).round().flatten(1)
    assert sorted(restored.int().tolist()) == sorted(raw.int().flatten(1).tolist())


def test_held_out_images_are_not_trained_on() -> None:
    _, _, held, _ = split()
    unseen = {tuple(image.flatten().tolist()) for image in held}
    workload = find_workload("digits?batch=256")
    for images, _ in itertools.islice(workload.batches(0), 12):
        assert unseen.isdisjoint(tuple(image.flatten().tolist()) for image in images)


# --- options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("sine?size=2", "size >= 16"),
        ("sine?bins=1", "bins >= 2"),
        ("gpt?width=100&heads=3", "not a multiple of heads=3"),
        ("gpt?layers=0", "must be positive"),
        ("gpt?context=9000", "at most 4096"),
        ("digits?batch=5000", "batch <= 1437"),
        ("digits?model=vgg", "allowed: conv, vit"),
    ],
)
def test_options_out_of_range_are_refused(spec: str, words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        find_workload(spec)


def test_options_reach_the_model() -> None:
    torch.manual_seed(0)
    model = find_workload("gpt?layers=3&width=96&heads=2&context=32").model()
    assert len(model.blocks) == 3
    assert model.embedding.weight.shape[1] == 96
    assert model.position.weight.shape[0] == 32
