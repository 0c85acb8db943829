"""Workloads of small models with random weights, built from ``transformers`` configurations.

``castwise tune bench/architectures.py:bert`` tunes one of them. The workloads measure time, so the data is random,
with enough structure that the loss falls. The optimizer is ``torch.optim.AdamW``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from castwise import Workload

__all__ = ["ARCHITECTURES", "HELD_OUT"]

VOCABULARY = 512


def _adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-4)


def _build(make: Callable[[Any], tuple[type, Any]]) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    cls, config = make(transformers)
    model: nn.Module = cls(config)
    return model.train()


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _tokens(batch: int, length: int, seed: int, shape: str = "causal") -> Iterator[dict[str, Tensor]]:
    """Yield batches of token sequences in which each token is the previous one plus a random step of 1 to 3."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(VOCABULARY, (batch, 1), generator=generator)
        step = torch.randint(1, 4, (batch, length - 1), generator=generator).cumsum(1)
        ids = torch.cat((start, (start + step) % VOCABULARY), 1)
        if shape == "classes":
            yield {"input_ids": ids, "labels": start[:, 0] % 4}
        else:
            yield {"input_ids": ids, "labels": ids.clone()}


def _images(batch: int, side: int, classes: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield images with one colour pattern per class and added noise."""
    patterns = torch.randn(classes, 3, 4, 4, generator=torch.Generator().manual_seed(7))
    patterns = nn.functional.interpolate(patterns, size=(side, side))
    generator = torch.Generator().manual_seed(seed)
    while True:
        labels = torch.randint(classes, (batch,), generator=generator)
        noise = torch.randn(batch, 3, side, side, generator=generator)
        yield {"pixel_values": patterns[labels] + noise, "labels": labels}


def _sounds(batch: int, samples: int, classes: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield tones with one pitch per class and added noise."""
    generator = torch.Generator().manual_seed(seed)
    time = torch.arange(samples) / 16000
    while True:
        labels = torch.randint(classes, (batch,), generator=generator)
        tones = torch.sin(2 * torch.pi * 220 * (labels[:, None] + 1) * time)
        yield {
            "input_values": tones + 0.3 * torch.randn(batch, samples, generator=generator),
            "labels": labels,
        }


def _workload(
    name: str,
    make: Callable[[Any], tuple[type, Any]],
    batches: Callable[[int], Iterator[dict[str, Tensor]]],
    what: str,
) -> Workload:
    return Workload(
        name=name,
        model=partial(_build, make),
        optimizer=_adamw,
        batches=batches,
        loss=_loss,
        description=what,
    )


def _make_bert(t: Any) -> tuple[type, Any]:
    return t.BertForSequenceClassification, t.BertConfig(
        vocab_size=VOCABULARY, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024,
        max_position_embeddings=128, num_labels=4,
    )  # fmt: skip


def bert() -> Workload:
    """Return an encoder."""
    return _workload("bert", _make_bert, partial(_tokens, 8, 128, shape="classes"), "BERT, 4 layers of 256.")


def _make_gpt2(t: Any) -> tuple[type, Any]:
    return t.GPT2LMHeadModel, t.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=256,
        n_layer=4,
        n_head=4,
        n_positions=128,
        bos_token_id=0,
        eos_token_id=0,
    )


def gpt2() -> Workload:
    """Return a decoder."""
    return _workload("gpt2", _make_gpt2, partial(_tokens, 8, 128), "GPT-2, 4 layers of 256.")


def _make_llama(t: Any) -> tuple[type, Any]:
    return t.LlamaForCausalLM, t.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def llama() -> Workload:
    """Return a decoder with RMSNorm, rotary positions and gated layers."""
    return _workload("llama", _make_llama, partial(_tokens, 8, 128), "Llama, 4 layers of 256.")


def _make_t5(t: Any) -> tuple[type, Any]:
    return t.T5ForConditionalGeneration, t.T5Config(
        vocab_size=VOCABULARY, d_model=192, d_ff=768, d_kv=48, num_layers=3, num_heads=4, decoder_start_token_id=0,
        pad_token_id=0,
    )  # fmt: skip


def t5() -> Workload:
    """Return an encoder-decoder."""
    return _workload("t5", _make_t5, partial(_tokens, 8, 64), "T5, 3 + 3 layers of 192.")


def _make_vit(t: Any) -> tuple[type, Any]:
    return t.ViTForImageClassification, t.ViTConfig(
        hidden_size=192, num_hidden_layers=4, num_attention_heads=3, intermediate_size=768, image_size=96, patch_size=8,
        num_labels=10,
    )  # fmt: skip


def vit() -> Workload:
    """Return a vision transformer."""
    return _workload("vit", _make_vit, partial(_images, 8, 96, 10), "ViT, 4 layers of 192, 96 x 96 images.")


def _make_resnet(t: Any) -> tuple[type, Any]:
    return t.ResNetForImageClassification, t.ResNetConfig(
        embedding_size=32,
        hidden_sizes=[32, 64, 128, 256],
        depths=[2, 2, 2, 2],
        layer_type="basic",
        num_labels=10,
    )


def resnet() -> Workload:
    """Return a residual network of basic blocks."""
    return _workload(
        "resnet", _make_resnet, partial(_images, 16, 96, 10), "ResNet, basic blocks, 96 x 96 images."
    )


def _make_convnext(layer_scale: float, t: Any) -> tuple[type, Any]:
    return t.ConvNextForImageClassification, t.ConvNextConfig(
        hidden_sizes=[32, 64, 128, 256],
        depths=[2, 2, 2, 2],
        layer_scale_init_value=layer_scale,
        num_labels=10,
    )


def convnext(layer_scale: float = 1e-6) -> Workload:
    """Return a small ConvNeXt with depthwise 7 x 7 convolutions and an initial layer scale of ``layer_scale``."""
    make = partial(_make_convnext, layer_scale)
    return _workload("convnext", make, partial(_images, 16, 96, 10), "ConvNeXt, small, 96 x 96 images.")


def _make_mobilenet(t: Any) -> tuple[type, Any]:
    return t.MobileNetV2ForImageClassification, t.MobileNetV2Config(
        image_size=96, depth_multiplier=0.5, num_labels=10, finegrained_output=False
    )


def mobilenet() -> Workload:
    """Return a network of inverted residuals around depthwise convolutions."""
    return _workload("mobilenet", _make_mobilenet, partial(_images, 8, 96, 10), "MobileNetV2, half width.")


def _make_wav2vec(t: Any) -> tuple[type, Any]:
    return t.Wav2Vec2ForSequenceClassification, t.Wav2Vec2Config(
        hidden_size=192, num_hidden_layers=3, num_attention_heads=4, intermediate_size=768, conv_dim=(64,) * 7,
        num_conv_pos_embeddings=32, num_conv_pos_embedding_groups=4, num_labels=5, classifier_proj_size=64,
        mask_time_prob=0.0, layerdrop=0.0, vocab_size=32,
    )  # fmt: skip


def wav2vec() -> Workload:
    """Return a network of convolutions over sound, followed by an encoder."""
    return _workload(
        "wav2vec", _make_wav2vec, partial(_sounds, 4, 16000, 5), "wav2vec 2.0, 3 layers of 192, 1 s of sound."
    )


def _make_distilbert(t: Any) -> tuple[type, Any]:
    return t.DistilBertForSequenceClassification, t.DistilBertConfig(
        vocab_size=VOCABULARY,
        dim=256,
        n_layers=3,
        n_heads=4,
        hidden_dim=1024,
        max_position_embeddings=128,
        num_labels=4,
    )


def distilbert() -> Workload:
    """Return a distilled encoder."""
    return _workload(
        "distilbert",
        _make_distilbert,
        partial(_tokens, 8, 128, shape="classes"),
        "DistilBERT, 3 layers of 256.",
    )


def _make_opt(t: Any) -> tuple[type, Any]:
    return t.OPTForCausalLM, t.OPTConfig(
        vocab_size=VOCABULARY, hidden_size=256, num_hidden_layers=4, ffn_dim=1024, num_attention_heads=4,
        max_position_embeddings=128, word_embed_proj_dim=256, pad_token_id=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def opt() -> Workload:
    """Return a decoder with ReLU."""
    return _workload("opt", _make_opt, partial(_tokens, 8, 128), "OPT, 4 layers of 256.")


def _make_swin(t: Any) -> tuple[type, Any]:
    return t.SwinForImageClassification, t.SwinConfig(
        image_size=96, patch_size=4, embed_dim=48, depths=[2, 2, 2], num_heads=[3, 6, 12], window_size=6, num_labels=10
    )  # fmt: skip


def swin() -> Workload:
    """Return a transformer with shifted windows."""
    return _workload("swin", _make_swin, partial(_images, 8, 96, 10), "Swin, three stages, 96 x 96 images.")


def _make_regnet(t: Any) -> tuple[type, Any]:
    return t.RegNetForImageClassification, t.RegNetConfig(
        embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[1, 1, 2, 1], groups_width=16, num_labels=10
    )  # fmt: skip


def regnet() -> Workload:
    """Return a network of grouped convolutions with squeeze and excitation."""
    return _workload(
        "regnet", _make_regnet, partial(_images, 16, 96, 10), "RegNet, four stages, 96 x 96 images."
    )


def _make_mixer(t: Any) -> tuple[type, Any]:
    return t.PoolFormerForImageClassification, t.PoolFormerConfig(
        hidden_sizes=[32, 64, 128, 256], depths=[1, 1, 2, 1], num_labels=10
    )  # fmt: skip


def poolformer() -> Workload:
    """Return a network that mixes positions by pooling."""
    return _workload(
        "poolformer", _make_mixer, partial(_images, 8, 96, 10), "PoolFormer, four stages, 96 x 96 images."
    )


ARCHITECTURES: dict[str, Callable[[], Workload]] = {
    f.__name__: f for f in (bert, gpt2, llama, t5, vit, resnet, convnext, mobilenet, wav2vec)
}
"""Functions that build the workloads, by name: an encoder, decoders, an encoder-decoder, vision and sound."""
HELD_OUT: dict[str, Callable[[], Workload]] = {
    f.__name__: f for f in (distilbert, opt, swin, regnet, poolformer)
}
"""Functions that build workloads of architectures on which nothing was developed, by name."""
