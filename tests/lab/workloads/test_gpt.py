"""``gpt``: the text is pydoc's, the model is causal, and it learns."""

from __future__ import annotations

import math
from itertools import islice
from pydoc_data.topics import topics

import pytest
import torch

from castwise.lab.workloads.gpt import CharGPT, corpus, decode, gpt
from castwise.lab.workloads.workload import find_workload
from tests.lab.workloads.learning import train


def test_the_text_is_all_of_pydocs_topics() -> None:
    tokens, alphabet = corpus()
    text = decode(tokens[:5000])
    assert text == "\n\n".join(topics[key] for key in sorted(topics))[:5000]
    assert len(tokens) == sum(map(len, topics.values())) + 2 * (len(topics) - 1)
    assert list(alphabet) == sorted(set("".join(topics.values()) + "\n"))


def test_targets_are_the_next_characters_of_the_training_text() -> None:
    text = "\n\n".join(topics[key] for key in sorted(topics))
    border = int(len(text) * 0.9)
    tokens, targets = next(gpt(context=40, batch=6).batches(3))
    assert tokens.shape == targets.shape == (6, 40)
    assert tokens.dtype is torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    for row, following in zip(tokens, targets, strict=True):
        where = text.index(decode(row) + decode(following[-1:]))
        assert where + 41 <= border


def test_batches_follow_the_seed_and_do_not_repeat() -> None:
    workload = gpt(context=16, batch=4)
    first, again, other = (list(islice(workload.batches(seed), 3)) for seed in (1, 1, 2))
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one[0], two[0])
    assert not torch.equal(first[0][0], other[0][0])
    assert not torch.equal(first[0][0], first[1][0])


def test_embedding_and_output_share_a_matrix_padded_for_matrix_units() -> None:
    model = gpt(layers=1, width=32).model()
    assert model.head.weight is model.embedding.weight
    assert model.embedding.num_embeddings % 64 == 0
    assert model.embedding.num_embeddings >= len(corpus()[1])


def test_the_first_loss_is_that_of_guessing() -> None:
    workload = gpt(layers=2, width=64)
    _, losses = train(workload, 1)
    assert losses[0] == pytest.approx(math.log(workload.model().embedding.num_embeddings), abs=0.15)


def test_a_position_sees_the_past_alone() -> None:
    torch.manual_seed(0)
    model = CharGPT(64, 2, 32, 2, 24).eval()
    tokens = torch.randint(64, (2, 24))
    changed = tokens.clone()
    changed[:, 12] = (changed[:, 12] + 1) % 64
    with torch.no_grad():
        difference = (model(tokens) - model(changed)).abs().amax((0, 2))
    assert (difference[:12] == 0).all()
    assert (difference[12:] > 0).all()


def test_it_learns_the_held_out_text_too() -> None:
    workload = find_workload("gpt?layers=1&width=64&context=32&batch=16&lr=3e-3")
    model, losses = train(workload, 60)
    assert sum(losses[-5:]) / 5 < 0.75 * losses[0]
    with torch.no_grad():
        held_out = workload.evaluate(model.eval())["held_out_nats_per_char"]
    assert held_out < 0.8 * losses[0]
    # better than the entropy of character frequencies, which a bias alone can learn
    tokens, _ = corpus()
    share = tokens.bincount().double() / len(tokens)
    assert held_out < float(-(share * share.clamp_min(1e-12).log()).sum())


@pytest.mark.parametrize(("width", "heads"), [(32, 1), (128, 2), (256, 4), (384, 6), (100, 2)])
def test_heads_are_about_64_wide(width: int, heads: int) -> None:
    assert gpt(layers=1, width=width).model().blocks[0].attention.heads == heads
