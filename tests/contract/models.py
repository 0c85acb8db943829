"""Small models of all kinds that precision plans are used on, with data that they can learn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everyone knows

from tests.here import DEVICE


class Transformer(nn.Module):
    """torch's encoder layer with attention, norms and disabled dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


class Recurrent(nn.Module):
    """An LSTM over a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class TiedGPT(nn.Module):
    """One decoder block whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.final = nn.LayerNorm(16)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(self.final(x + self.out(y)))


@dataclass(frozen=True)
class Case:
    """A model with its data, its loss and the loss that twenty steps must reach."""

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    rate: float = 0.1

    def build(self) -> nn.Module:
        """Return the model with the weights that every run starts from."""
        torch.manual_seed(0)
        return self.model()

    @staticmethod
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean cross entropy over every position."""
        out = model(batch[0])
        return F.cross_entropy(out.flatten(0, -2), batch[1].flatten())


def _classes(*shape: int) -> Callable[[], tuple[Tensor, Tensor]]:
    def batch() -> tuple[Tensor, Tensor]:
        generator = torch.Generator(DEVICE).manual_seed(1)
        y = torch.randint(4, (16,), generator=generator)
        centres = torch.randn(4, *shape, generator=generator)
        return centres[y] + 0.3 * torch.randn(16, *shape, generator=generator), y

    return batch


def _tokens() -> tuple[Tensor, Tensor]:
    text = torch.arange(80).reshape(8, 10) % 11
    return text, (text * 3 + 1) % 11


CASES = {
    "mlp": Case(lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), _classes(16)),
    "conv": Case(
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, 4),
        ),
        _classes(3, 6, 6),
    ),
    "transformer": Case(Transformer, _classes(5, 16), 0.05),
    "lstm": Case(Recurrent, _classes(5, 16), 0.5),
    "gpt": Case(TiedGPT, _tokens, 0.1),
}
