"""Loading keeps masters that round to the loaded values; saving gives fp32 or is documented not to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

import castwise
from castwise.core.masters import attach, original_of
from tests.core.masters.presets import ALL
from tests.core.masters.test_masters_gradients import held, prepared
from tests.core.masters.test_masters_optimizers import Net, Weights, lower, train
from tests.here import DEVICE
from tests.soak import every


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("through", ["itself", "clone", "wrapper"])
def test_loading_a_models_own_state_changes_nothing(through: str, assign: bool) -> None:
    """Applies to the state itself, a clone of it, and loading through a wrapper."""
    model, optimizer = prepared(Net)
    train(model, optimizer, 3)
    full = [p.detach().clone() for p in held(optimizer)]
    assert not torch.equal(full[0], full[0].bfloat16().float())
    state = model.state_dict()
    if through == "clone":
        state = {key: value.clone() for key, value in state.items()}
    if through == "wrapper":
        nn.Sequential(model).load_state_dict(
            {f"0.{key}": value for key, value in state.items()}, assign=assign
        )
    else:
        model.load_state_dict(state, assign=assign)
    model(torch.ones(2, 8))
    optimizer.step()
    for master, want in zip(held(optimizer), full, strict=True):
        assert torch.equal(master.detach(), want)


def test_elements_that_differ_are_loaded() -> None:
    """Only the elements that differ are changed."""
    model, optimizer = prepared()
    train(model, optimizer, 3)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    state["a.weight"][0] = 7.0
    full = held(optimizer)[0].detach().clone()
    model.load_state_dict(state)
    assert (held(optimizer)[0][0] == 7).all()
    assert torch.equal(held(optimizer)[0][1:].detach(), full[1:])


def test_values_in_other_formats_are_taken_as_they_are() -> None:
    """fp32 and fp16 values replace the master, even where the master rounds to the same value."""
    model, optimizer = prepared()
    for dtype in (torch.float32, torch.float16):
        with torch.no_grad():
            held(optimizer)[0].fill_(1.0009)
        model.load_state_dict({
            key: torch.ones_like(v, dtype=dtype) for key, v in Weights().state_dict().items()
        })
        model(torch.ones(2, 8))
        assert (held(optimizer)[0] == 1).all()


class AppState(Stateful):
    """The wrapper from torch.distributed.checkpoint's tutorial."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


@pytest.mark.filterwarnings("ignore:.*single process:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_the_tutorials_app_state_keeps_the_low_bits(tmp_path: Path) -> None:
    """After ``dcp.save`` and ``dcp.load`` in a running training, the next step gives the same result as without them."""
    results = []
    for saved in (False, True):
        model, optimizer = prepared(Net)
        train(model, optimizer, 3)
        if saved:
            dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=tmp_path)
            dcp.load({"app": AppState(model, optimizer)}, checkpoint_id=tmp_path)
        train(model, optimizer, 2)
        results.append([p.detach().clone() for p in held(optimizer)])
    for plain, loaded in zip(*results, strict=True):
        assert torch.equal(plain, loaded)


def test_loading_reaches_what_is_remembered_of_frozen_parameters() -> None:
    """A frozen parameter without a master keeps the loaded fp32 values unrounded."""
    model = Weights()
    former = lower(model, torch.bfloat16)
    model.a.weight.requires_grad_(False)
    attach(torch.optim.SGD(model.parameters(), lr=0.1), model, originals=former)
    new = torch.randn(16, 8)
    model.load_state_dict({"a.weight": new, "b.weight": torch.zeros(4, 16)})
    original = original_of(model.a.weight)
    assert original is not None
    assert torch.equal(original, new)
    model.load_state_dict(model.state_dict())
    assert torch.equal(original_of(model.a.weight), new)  # type: ignore[arg-type]


@every(3, 1)
@pytest.mark.parametrize("plan", ALL)
def test_save_pretrained_saves_fp32_when_told(plan: str, tmp_path: Path) -> None:
    """The documented way is ``state_dict=amp.model_state_dict(model)``."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32,
        num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with castwise.Amp(plan, device=DEVICE) as amp:
        amp.prepare(model, optimizer)
        ids = torch.arange(8)[None]
        for _ in range(2):
            amp.backward(model(input_ids=ids, labels=ids).loss)
            amp.step(optimizer)
            optimizer.zero_grad()
        model.save_pretrained(tmp_path, state_dict=amp.model_state_dict(model))
        state = amp.model_state_dict(model)
        loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        for name, value in loaded.state_dict().items():
            assert torch.equal(value, state[name].detach()), name
