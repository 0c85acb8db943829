"""Generation with transformers under prepare(inference=True): tokens and caches equal those of a manual reference."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import castwise
from tests.here import DEVICE

transformers = pytest.importorskip("transformers")
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
SMALL = {"vocab_size": 128}


def llama() -> nn.Module:
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **shape, num_key_value_heads=2))  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(**SMALL, n_embd=64, n_layer=2, n_head=4, n_positions=128)
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def t5() -> nn.Module:
    """Return a T5 model, whose encoder generate() calls outside of the model's forward."""
    shape = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**SMALL, **shape, decoder_start_token_id=0)
    )  # type: ignore[no-any-return]


def made(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return make().eval()


def tokens(model: Any, cache: str) -> tuple[torch.Tensor, set[torch.dtype]]:
    """Return the tokens that a model generates and the formats of its cache."""
    ids = torch.randint(2, 128, (2, 6), generator=torch.Generator().manual_seed(0), device="cpu").to(DEVICE)
    how = {} if cache == "dynamic" else {"cache_implementation": cache}
    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, **how)
    held = getattr(out.past_key_values, "self_attention_cache", out.past_key_values)
    return out.sequences, {states.dtype for layer in held.layers for states in (layer.keys, layer.values)}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("plan", ["bf16-true", "fp16-true", "bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize("make", [llama, gpt2, t5])
def test_tokens_are_those_of_the_loop_by_hand_and_the_cache_is_low(
    make: Callable[[], nn.Module], plan: str, cache: str
) -> None:
    given, parsed = made(make), castwise.Plan.parse(plan)
    low = LOW[parsed.compute]
    by_hand = copy.deepcopy(given) if parsed.autocasts else copy.deepcopy(given).to(low)
    with torch.autocast(DEVICE, low, enabled=parsed.autocasts):  # autocast fails on Llama with a static cache
        want = tokens(by_hand, "dynamic" if make is llama else cache)[0]
    with castwise.Amp(plan, device=DEVICE) as amp:
        amp.prepare(given, inference=True, keep_originals=True)
        got, formats = tokens(given, cache)
    assert torch.equal(got, want)
    assert formats == {low}


@pytest.mark.cpu
@pytest.mark.parametrize("plan", ["fp32", "bf16-true", "bf16-mixed"])
def test_a_quantised_cache_is_quantised_from_the_plan_s_format(plan: str) -> None:
    """By hand, under autocast, such a cache holds fp32; tokens are compared where the two hold the same."""
    pytest.importorskip("optimum.quanto")
    how = {"backend": "quanto", "nbits": 4, "q_group_size": 32, "residual_length": 4}
    given, parsed = made(llama), castwise.Plan.parse(plan)
    low = LOW.get(parsed.compute, torch.float32)
    ids = torch.randint(2, 128, (2, 6), generator=torch.Generator().manual_seed(0))

    def generated(model: Any) -> tuple[torch.Tensor, Any]:
        asked = {"cache_implementation": "quantized", "cache_config": how, "return_dict_in_generate": True}
        with torch.inference_mode():
            out = model.generate(ids, max_new_tokens=10, do_sample=False, **asked)
        return out.sequences, out.past_key_values.layers[0]

    by_hand = copy.deepcopy(given).to(low)
    with castwise.Amp(plan, device=DEVICE) as amp:
        amp.prepare(given, inference=True, keep_originals=True)
        got, layer = generated(given)
    assert layer.keys.dtype is layer._quantized_keys.dtype is layer._quantized_values.dtype is low
    if not parsed.autocasts:
        assert torch.equal(got, generated(by_hand)[0])


def test_caches_of_other_models_and_of_training_are_left_alone() -> None:
    update = transformers.cache_utils.Cache.update
    given, other = made(llama), made(llama)
    with castwise.Amp("bf16-mixed", device=DEVICE) as amp:
        amp.prepare(given, inference=True, keep_originals=True)
        assert tokens(given, "dynamic")[1] == {torch.bfloat16}
        assert tokens(other, "dynamic")[1] == {torch.float32}
        with torch.autocast(DEVICE, torch.bfloat16):
            assert torch.float32 in tokens(other, "dynamic")[1]
        with castwise.Amp("bf16-mixed", device=DEVICE) as second:
            second.prepare(other, inference=True, keep_originals=True)
            assert tokens(other, "dynamic")[1] == {torch.bfloat16}
        assert tokens(given, "dynamic")[1] == {torch.bfloat16}
    assert transformers.cache_utils.Cache.update is update
    assert "generate" not in vars(given)


def test_a_session_that_is_dropped_leaves_the_caches_to_the_next_that_closes() -> None:
    update = transformers.cache_utils.Cache.update
    amp = castwise.Amp("bf16-mixed", device=DEVICE)
    amp.prepare(Odd(4, 4).eval(), inference=True)
    del amp
    gc.collect()
    with castwise.Amp("bf16-mixed", device=DEVICE) as amp:
        amp.prepare(Odd(4, 4).eval(), inference=True, keep_originals=True)
    assert transformers.cache_utils.Cache.update is update


def test_keys_and_values_stay_fp32_for_attention_in_fp32() -> None:
    given = made(llama)
    ids = torch.randint(2, 128, (2, 6), generator=torch.Generator().manual_seed(0), device="cpu").to(DEVICE)
    plan = "bf16-mixed+ops.scaled_dot_product_attention=fp32"
    with castwise.Amp(plan, device=DEVICE) as amp, torch.no_grad():
        amp.prepare(given, inference=True, keep_originals=True)
        kept = given(ids, use_cache=True)
        assert torch.equal(kept.logits, given(ids, use_cache=False).logits)
    assert kept.past_key_values.layers[0].keys.dtype is torch.float32


class Odd(nn.Linear):
    """Has a ``generate`` method, which the test replaces on an instance."""

    def generate(self, x: Any) -> Any:
        return "class"


class Static(nn.Linear):
    @staticmethod
    def generate(number: int) -> int:
        return number


class Kind(nn.Linear):
    @classmethod
    def generate(cls, number: int) -> int:
        return number


class Late(nn.Linear):
    def generate(self, number: int) -> Any:
        yield number


class Held(nn.Linear):
    generate = nn.Linear(4, 4)


def test_what_is_named_generate_and_is_no_method_of_the_class_stays() -> None:
    own = Odd(4, 4)
    own.generate = lambda x: "mine"  # type: ignore[method-assign]
    for model in (own, Static(4, 4), Kind(4, 4), Late(4, 4), Held(4, 4)):
        before = dict(vars(model))
        amp = castwise.Amp("bf16-mixed", device=DEVICE)
        amp.prepare(model.eval(), inference=True, keep_originals=True)
        assert vars(model).get("generate") is before.get("generate")
        amp.close()
        assert vars(model).get("generate") is before.get("generate")
    assert own.generate(1) == "mine"
    with (
        castwise.Amp("bf16-mixed", device=DEVICE) as amp,
        pytest.raises(castwise.CastwiseError, match="sequence of names"),
    ):
        amp.prepare(Odd(4, 4).eval(), inference=True, methods="encode")


def test_a_method_that_is_named_generate_runs_under_the_plan_in_inference_alone() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)

        def generate(self, x: torch.Tensor) -> torch.dtype:
            return self.body(x).dtype

    model, x = Decoder().eval(), torch.ones(2, 4)
    for inference, want in ((True, torch.bfloat16), (False, torch.float32)):
        with castwise.Amp("bf16-mixed", device=DEVICE) as amp, torch.no_grad():
            amp.prepare(model, **({"inference": True, "keep_originals": True} if inference else {}))
            assert model.generate(x) is want
            assert model(x).dtype is torch.float32
