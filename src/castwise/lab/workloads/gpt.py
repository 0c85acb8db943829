"""``gpt``: a character-level language model of technical English, trained on Python's own documentation.

The text is that of the module ``pydoc_data.topics``, which every CPython contains.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from castwise.errors import WorkloadError
from castwise.lab.workloads.blocks import Block, Transformer, cut, inputs, shards, target
from castwise.lab.workloads.workload import Pipeline, Workload

HELD_OUT = 0.1
"""Share of the text, at its end, that is held out from training."""
_VOCABULARY_MULTIPLE = 64
"""The embedding is padded with unused rows to a multiple of this number, so that its matrix products fit the matrix units."""


@functools.cache
def corpus() -> tuple[Tensor, str]:
    """Return the text's characters as int64 indices ``[characters]``, and the sorted alphabet.

    Raises:
        WorkloadError: This Python was built without its documentation.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise WorkloadError(
            "workload 'gpt': this Python lacks the module pydoc_data.topics, whose text is the training data; use a complete "
            "CPython, or another workload"
        ) from error
    text = "\n\n".join(topics[key] for key in sorted(topics))
    alphabet = "".join(sorted(set(text)))
    index = {character: i for i, character in enumerate(alphabet)}
    return torch.tensor([index[character] for character in text], device="cpu"), alphabet


def decode(tokens: Tensor) -> str:
    """Return the text of a one-dimensional int64 tensor of character indices."""
    alphabet = corpus()[1]
    return "".join(alphabet[int(token)] for token in tokens)


def _texts() -> tuple[Tensor, Tensor]:
    tokens, _ = corpus()
    border = int(len(tokens) * (1.0 - HELD_OUT))
    return tokens[:border], tokens[border:]


class CharGPT(Transformer):
    """Decoder-only transformer with pre-norm blocks and tied input and output embeddings.

    Args:
        vocabulary: Number of characters, including padding.
        layers: Number of blocks.
        width: Number of features.
        heads: Number of attention heads.
        context: Length of the longest input.
    """

    BEFORE = ("embedding", "position")

    def __init__(self, vocabulary: int, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                # smaller initial residual branches for deeper models (GPT-2, section 2.3)
                added = name.endswith(("attention.out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / ((2 * layers) ** 0.5 if added else 1.0))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def embed(self, x: Tensor) -> Tensor:
        """Return the features of characters, int64 ``[batch, length]`` with ``length <= context``."""
        features: Tensor = self.embedding(x) + self.position(torch.arange(x.shape[1], device=x.device))
        return features

    def predict(self, x: Tensor) -> Tensor:
        """Return the logits ``[batch, length, vocabulary]`` of the next character at every position."""
        logits: Tensor = self.head(self.norm(x))
        return logits


def _model(layers: int, width: int, heads: int, context: int) -> CharGPT:
    characters = len(corpus()[1])
    vocabulary = -(-characters // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    return CharGPT(vocabulary, layers, width, heads, context)


def _adamw(lr: float, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)


def _batches(batch: int, context: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield windows of the training text, each paired with the window that is shifted by one character."""
    train, _ = _texts()
    draw = torch.Generator().manual_seed(seed)
    span = torch.arange(context + 1, device="cpu")
    while True:
        starts = torch.randint(len(train) - context, (batch,), generator=draw, device="cpu")
        windows = train[starts[:, None] + span]
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per character."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, targets = batch
    return _cross_entropy(model(tokens), targets)


def _blocks(model: nn.Module) -> list[nn.Module]:
    assert isinstance(model, CharGPT)
    return list(model.blocks)


def _evaluate(batch: int, context: int, model: nn.Module) -> dict[str, float]:
    """Return the mean loss on windows that are evenly spaced over the held-out text."""
    _, text = _texts()
    device = next(model.parameters()).device
    windows = 64
    starts = torch.linspace(0, len(text) - context - 1, windows, device="cpu").long()
    span = torch.arange(context + 1, device="cpu")
    total = 0.0
    for part in starts.split(batch):
        rows = text[part[:, None] + span].to(device)
        total += float(_loss(model, (rows[:, :-1], rows[:, 1:]))) * len(part)
    return {"held_out_nats_per_char": total / windows}


def gpt(
    layers: int = 4,
    width: int = 256,
    heads: int | None = None,
    context: int = 128,
    batch: int = 8,
    lr: float = 1e-3,
) -> Workload:
    """Make the ``gpt`` workload.

    Args:
        layers: Transformer blocks.
        width: Features.
        heads: Attention heads, a divisor of ``width``; by default chosen so that heads are 64 wide or slightly less.
        context: Characters per window.
        batch: Windows per batch.
        lr: Learning rate of AdamW.

    Raises:
        WorkloadError: An option out of range.
    """
    if heads is None:
        heads = next((h for h in range(max(1, -(-width // 64)), width + 1) if width % h == 0), 1)
    if min(layers, width, heads, context, batch) < 1 or not lr > 0:
        raise WorkloadError(
            f"workload 'gpt': layers={layers}, width={width}, heads={heads}, context={context}, batch={batch}, lr={lr}; "
            "all must be positive"
        )
    if width % heads:
        raise WorkloadError(
            f"workload 'gpt': width={width} is not a multiple of heads={heads}; choose a multiple"
        )
    if context > 4096:
        raise WorkloadError(
            f"workload 'gpt': context={context}; must be at most 4096, so that the held-out text has windows"
        )
    return Workload(
        name="gpt",
        model=partial(_model, layers, width, heads, context),
        optimizer=partial(_adamw, lr),
        batches=partial(_batches, batch, context),
        loss=_loss,
        evaluate=partial(_evaluate, batch, context),
        description=f"character model ({layers} transformer blocks of width {width}, {heads} heads) on the text of "
        f"pydoc_data.topics, {batch} windows of {context} characters",
        shards=shards,
        blocks=_blocks,
        pipeline=Pipeline(cut, inputs, target, _cross_entropy),
    )
