"""Models that are called in unusual ways under prepare(inference=True): outputs equal those of a loop by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import castwise
from tests.here import DEVICE

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
PLANS = ["bf16-true", "bf16-mixed", "fp16-mixed"]


class Denoiser(nn.Module):
    """A small network of convolutions that predicts the noise of an image at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
        self.down, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.up = nn.Conv2d(8, 3, 3, padding=1)
        self.register_buffer("frequencies", torch.arange(1.0, 5.0))

    def forward(self, image: Tensor, time: Tensor) -> Tensor:
        angles = time[:, None] * self.frequencies
        moment = self.time(torch.cat([angles.sin(), angles.cos()], 1).to(image.dtype))
        hidden = nn.functional.silu(self.norm(self.down(image)) + moment[:, :, None, None])
        out: Tensor = self.up(hidden)
        return out


class Encoder(nn.Module):
    """PyTorch's encoder, which calls one fused kernel per layer in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, batch_first=True)

    def forward(self, packed: nn.utils.rnn.PackedSequence) -> Tensor:
        out, _ = self.lstm(packed)
        return nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0]


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().eval().to(DEVICE)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), device="cpu").to(DEVICE)


def by_hand(model: nn.Module, plan: str) -> tuple[nn.Module, torch.autocast, torch.dtype]:
    """Return a copy of a model as users prepare it, the block around its calls, and the dtype of its inputs."""
    parsed = castwise.Plan.parse(plan)
    low, copied = LOW[parsed.compute], copy.deepcopy(model)
    if not parsed.autocasts:
        copied.to(low)
    given = torch.float32 if parsed.autocasts else low
    return copied, torch.autocast(DEVICE, low, enabled=parsed.autocasts), given


def denoised(model: nn.Module, image: Tensor) -> Tensor:
    """Return an image after ten steps of a scheduler outside of the model, which computes in the image's dtype."""
    for step in range(10, 0, -1):
        noise = model(image, torch.full((image.shape[0],), step / 10.0, device=image.device))
        image = image - 0.1 * noise.to(image.dtype)
    return image


@pytest.mark.parametrize("plan", PLANS)
def test_a_loop_that_calls_the_model_with_its_own_outputs(plan: str) -> None:
    model, image = made(Denoiser), drawn(2, 3, 8, 8)
    hand, block, dtype = by_hand(model, plan)
    hand.get_buffer("frequencies").data = model.get_buffer("frequencies").clone()
    with torch.inference_mode(), block:
        want = denoised(hand, image.to(dtype))
    with castwise.Amp(plan, device=DEVICE) as amp, torch.inference_mode():
        amp.prepare(model, inference=True, keep_originals=True)
        got = denoised(model, image)
    assert got.dtype is torch.float32  # the scheduler keeps the caller's dtype
    tolerance = 0.0 if dtype is torch.float32 else 0.1  # by hand the scheduler runs in bf16
    torch.testing.assert_close(got, want.float(), rtol=0.0, atol=tolerance)


@pytest.mark.parametrize("plan", PLANS)
def test_the_fused_layers_of_an_encoder(plan: str) -> None:
    model, x = made(Encoder), drawn(2, 5, 16)
    hand, block, dtype = by_hand(model, plan)
    with torch.inference_mode(), block:
        want = hand(x.to(dtype))
    with castwise.Amp(plan, device=DEVICE) as amp, torch.inference_mode():
        amp.prepare(model, inference=True, keep_originals=True)
        got = model(x)
    assert torch.equal(got.float(), want.float())


@pytest.mark.parametrize("plan", PLANS)
def test_packed_sequences(plan: str) -> None:
    model = made(Packed)
    packed = nn.utils.rnn.pack_padded_sequence(drawn(3, 6, 8), torch.tensor([6, 4, 1], device="cpu"), True)
    with torch.inference_mode():
        want = model(packed)
        with castwise.Amp(plan, device=DEVICE) as amp:
            amp.prepare(model, inference=True, keep_originals=True)
            got = model(packed)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    torch.testing.assert_close(got.float(), want, rtol=0.0, atol=0.02)
    assert not torch.equal(got.float(), want)


@pytest.mark.parametrize("plan", PLANS)
def test_speech_to_text(plan: str) -> None:
    """The encoder of Whisper runs in generate(), outside of the model's forward."""
    transformers = pytest.importorskip("transformers")
    shape = {
        "vocab_size": 128, "num_mel_bins": 8, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        "max_source_positions": 32, "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 3, "suppress_tokens": None, "begin_suppress_tokens": None,
    }  # fmt: skip
    model: Any = made(
        lambda: transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**shape))
    )
    sound, how = drawn(2, 8, 64), {"max_new_tokens": 8, "do_sample": False}
    hand, block, dtype = by_hand(model, plan)
    with torch.inference_mode(), block:
        want = hand.generate(sound.to(dtype), **how)  # type: ignore[operator]
    with castwise.Amp(plan, device=DEVICE) as amp, torch.inference_mode():
        amp.prepare(model, inference=True, keep_originals=True)
        got = model.generate(sound, **how)
    assert torch.equal(got, want)
