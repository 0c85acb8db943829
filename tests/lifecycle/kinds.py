"""Small models of several kinds, each with something a lifecycle may lose: counters, tables, ties, frozen parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from castwise.core import devices
from tests.here import DEVICE


class Counting(nn.Module):
    """A perceptron with BatchNorm that counts its training forwards in a floating buffer."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 3)
        self.register_buffer("steps", torch.tensor(255.0))  # bf16 cannot count past 256

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return self.head(self.body(x))


class Tied(nn.Module):
    """An embedding that is also the output layer, with position frequencies like those of rotary embeddings."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Linear(8, 8)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("frequencies", 10.0 ** -torch.arange(8.0).div(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        angles = torch.arange(4000.0, 4005.0)[:, None] * self.frequencies
        return self.out(self.norm(x + self.mix(x) + angles.cos().to(x.dtype)))


class Frozen(nn.Module):
    """A frozen base under a trained head, as in fine-tuning."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8)).requires_grad_(False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x))


class Conv(nn.Module):
    """Convolutions, whose weights have a memory format that can be lost."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.deep = nn.Conv2d(4, 4, 3)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.deep(torch.relu(self.norm(self.conv(x)))).mean((2, 3)))


class Recurrent(nn.Module):
    """An LSTM, which also keeps its weights in its own list."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def llama() -> nn.Module:
    """Return a tiny `transformers` Llama, with rotary tables in non-persistent buffers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, tie_word_embeddings=True, attn_implementation="eager",
    )  # fmt: skip
    return Logits(LlamaForCausalLM(config))


class Logits(nn.Module):
    """Returns only the logits of a `transformers` model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits


@dataclass(frozen=True)
class Kind:
    """A model and its input."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...] | None  # None: tokens

    def build(self) -> nn.Module:
        """Return the model with the same weights each time."""
        with devices.same_random_numbers([DEVICE]):
            torch.manual_seed(7)
            return self.model()

    def batch(self, seed: int) -> Tensor:
        """Return an input; the same for the same seed."""
        generator = torch.Generator(DEVICE).manual_seed(seed)
        if self.shape is None:
            return torch.randint(11, (2, 5), generator=generator)
        return torch.randn(4, *self.shape, generator=generator)


KINDS = {
    "plain": Kind(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), (6,)),
    "counting": Kind(Counting, (6,)),
    "tied": Kind(Tied, None),
    "frozen": Kind(Frozen, (6,)),
    "conv": Kind(Conv, (3, 5, 5)),
    "lstm": Kind(Recurrent, (4, 6)),
}
LLAMA = Kind(llama, None)


def _sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.05, momentum=0.9)


def _adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    # The default eps is zero in fp16, so AdamW without masters would divide by zero.
    return torch.optim.AdamW(params, 0.01, eps=1e-4)


def _fused(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, 0.01, eps=1e-4, fused=True)


OPTIMIZERS: dict[str, tuple[Callable[[list[nn.Parameter]], torch.optim.Optimizer], ...]] = {
    "two": (_sgd, _adamw),
    "adamw": (_adamw,),
    "fused": (_fused,),
    "sgd": (_sgd,),
}


def optimizers(model: nn.Module, name: str) -> list[torch.optim.Optimizer]:
    """Make optimizers of all parameters, including frozen ones; two optimizers get half of them each."""
    makers = OPTIMIZERS[name]
    params = list(model.parameters())
    size = -(-len(params) // len(makers))
    return [make(params[i * size : (i + 1) * size]) for i, make in enumerate(makers)]
