"""``transformers`` models and ``peft`` adapters in bf16 before prepare; only this file imports the libraries."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import castwise
from castwise.core.plans.plan import PRESETS
from castwise.core.plans.rules import base_table
from tests.core.masters.presets import ALL
from tests.here import DEVICE
from tests.soak import each_value

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # from transformers, when peft calls it

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ADAPTED = {"gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"], "bert": ["query", "value"]}


def make(kind: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
    elif kind == "llama":
        config = transformers.LlamaConfig(**SIZES, intermediate_size=32, max_position_embeddings=16)
    else:
        config = transformers.BertConfig(**SIZES, **NO_DROPOUT, intermediate_size=32)
        return transformers.AutoModelForMaskedLM.from_config(config, dtype=dtype)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def adapted(kind: str) -> Any:
    """Return a low-precision base with fp32 adapters, peft's default."""
    config = peft.LoraConfig(r=2, target_modules=ADAPTED[kind], fan_in_fan_out=kind == "gpt2")
    model = peft.get_peft_model(make(kind), config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    return model


def train(amp: castwise.Amp, model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(3):
        tokens = (torch.arange(16).reshape(2, 8) * 7 + step) % 40
        loss = model(input_ids=tokens, labels=tokens).loss
        amp.backward(loss)
        amp.step(optimizer)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)


def run(model: Any, plan: str, widen: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    optimizer = adamw(model)
    with castwise.Amp(plan, device=DEVICE) as amp:
        amp.prepare(model, optimizer, widen=widen if PRESETS[plan].params == "fp32" else False)
        losses = train(amp, model, optimizer)
        return losses, {name: value.clone() for name, value in amp.model_state_dict(model).items()}


def alike(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    assert all(torch.equal(value, other[1][name]) for name, value in one[1].items())


@each_value()
@pytest.mark.parametrize("plan", ALL)
@pytest.mark.parametrize("kind", ADAPTED)
def test_a_model_from_a_bf16_config_trains_like_the_float_model(kind: str, plan: str) -> None:
    model = make(kind)
    assert model.dtype is torch.bfloat16
    reference = copy.deepcopy(model).float()
    alike(run(model, plan, True), run(reference, plan, False))
    assert model.dtype is torch.bfloat16
    if model.get_output_embeddings() is not None and kind == "gpt2":
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@each_value()
@pytest.mark.parametrize("plan", ALL)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_adapters_train_beside_a_base_in_bf16_that_stays(kind: str, plan: str) -> None:
    model = adapted(kind)
    base = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = adamw(model)
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model, optimizer)
    if PRESETS[plan].params == "fp32" or PRESETS[plan].compute == "bf16":
        assert {p.dtype for n, p in model.named_parameters() if n in base} == {torch.bfloat16}
    held = {p.dtype for group in optimizer.param_groups for p in group["params"]}
    assert held == {torch.float32 if PRESETS[plan].master == "fp32" else amp.plan.compute_dtype}
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    # Where torch's own list lacks layer_norm, fp16 and bf16 inputs meet there.
    if plan == "fp16-mixed" and kind == "gpt2" and "layer_norm" not in base_table("native", DEVICE):
        with pytest.raises(RuntimeError, match="widen='all'"):
            train(amp, model, optimizer)
        amp.close()
        return
    train(amp, model, optimizer)
    assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters() if n in before)
    amp.close()
    for name, p in model.named_parameters():
        assert p.dtype is (torch.bfloat16 if name in base else torch.float32)
        assert name not in base or torch.equal(p, base[name])


@each_value()
@pytest.mark.parametrize("plan", ALL)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_adapters_and_their_base_train_like_the_float_model_where_all_is_widened(
    kind: str, plan: str
) -> None:
    model = adapted(kind)
    reference = copy.deepcopy(model).float()
    alike(run(model, plan, "all"), run(reference, plan, False))
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}


@pytest.mark.parametrize("plan", ["bf16-mixed", "bf16-master"])
def test_a_checkpoint_goes_back_to_disk_as_it_came(plan: str, tmp_path: Path) -> None:
    model = make("llama")
    optimizer = adamw(model)
    with castwise.Amp(plan, device=DEVICE) as amp:
        amp.prepare(model, optimizer, widen=plan == "bf16-mixed")
        train(amp, model, optimizer)
        given = amp.model_state_dict(model, as_given=True)
        model.save_pretrained(tmp_path, state_dict=dict(given))  # save_pretrained empties the dict
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert all(torch.equal(value, given[name]) for name, value in again.state_dict().items())
    assert {value.dtype for value in again.parameters()} == {torch.bfloat16}
