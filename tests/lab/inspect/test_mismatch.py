"""mismatch(): log-probabilities and importance ratios of two plans, compared with direct computations."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from castwise.errors import PlanError, WorkloadError
from castwise.lab.inspect.mismatch import mismatch
from castwise.lab.inspect.ratios import ServeMismatch, effective_share
from tests.here import DEVICE

VOCABULARY = 11


class Language(nn.Module):
    """Logits from an embedding and a linear layer, with dropout that mismatch() must switch off."""

    def __init__(self, sharp: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.take, self.drop = nn.Embedding(VOCABULARY, 32), nn.Dropout(0.5)
        self.mix, self.give, self.sharp = nn.Linear(32, 32), nn.Linear(32, VOCABULARY), sharp

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.take(ids))
        return self.give(torch.tanh(self.mix(x.cumsum(1)))) * self.sharp  # type: ignore[no-any-return]


def tokens(rows: int = 4, length: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator(DEVICE).manual_seed(seed))


def oracle(model: nn.Module, ids: Tensor, plan: str) -> Tensor:
    """Return the log-probabilities of all tokens at all positions but the last, computed in fp64 from the logits."""
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16, enabled=plan != "fp32"):
        logits = model.eval()(ids)
    return torch.log_softmax(logits.double(), -1)[:, :-1]


def test_numbers_are_those_of_the_definitions() -> None:
    ids = tokens()
    found = mismatch(Language(), [ids], "fp32", "bf16-mixed", clip=(0.999, 1.001))
    row = found.serve[0]
    train, serve = (oracle(Language(), ids, plan) for plan in ("fp32", "bf16-mixed"))
    kl = (serve.exp() * (serve - train)).sum(-1)
    log_r = (train - serve).gather(-1, ids[:, 1:, None])[..., 0]
    r, whole = log_r.exp(), log_r.sum(1).exp()
    assert (found.count, found.sequences) == (32, 4)
    assert row.mean_abs == pytest.approx(float(log_r.abs().mean()), rel=1e-4)
    assert row.max_abs == pytest.approx(float(log_r.abs().max()), rel=1e-4)
    assert row.k1 == pytest.approx(float(-log_r.mean()), rel=1e-3, abs=1e-7)
    assert row.k2 == pytest.approx(float((log_r**2 / 2).mean()), rel=1e-3)
    assert row.k3 == pytest.approx(float((r - 1 - log_r).mean()), rel=1e-3)
    assert row.kl == pytest.approx(float(kl.mean()), rel=1e-3)
    assert row.clipped == pytest.approx(float(((r < 0.999) | (r > 1.001)).double().mean()))
    assert row.clipped_sequences == pytest.approx(float(((whole < 0.999) | (whole > 1.001)).double().mean()))
    assert row.effective == pytest.approx(float(r.sum() ** 2 / (r**2).sum() / r.numel()), rel=1e-6)
    assert row.effective_sequences == pytest.approx(float(whole.sum() ** 2 / (whole**2).sum() / 4), rel=1e-6)
    assert row.ratio["0.5"] == pytest.approx(float(r.flatten().quantile(0.5)), rel=1e-6)
    assert row.log_ratio["0.99"] == pytest.approx(float(log_r.flatten().quantile(0.99)), rel=1e-3)
    assert row.by_position == pytest.approx(log_r.abs().mean(0).tolist(), rel=1e-3)
    first = row.worst[0]
    assert abs(first.train - first.serve) == row.max_abs
    assert int(ids[first.row, first.position + 1]) == first.token


def test_the_same_plan_on_both_sides_is_no_mismatch() -> None:
    row = mismatch(Language(), [tokens()], "bf16-mixed", "bf16-mixed").serve[0]
    assert (row.max_abs, row.kl, row.k3, row.clipped) == (0.0, 0.0, 0.0, 0.0)
    assert row.effective == row.effective_sequences == pytest.approx(1.0)


def test_estimators_from_sampled_tokens_are_those_of_the_divergence() -> None:
    """With enough tokens, k1 and k3 approach the KL divergence of the full logits; k3 has less noise."""
    batches = [tokens(64, 33, seed) for seed in range(4)]
    row = mismatch(Language(sharp=100.0), batches, "fp32", "bf16-true", tokens="sampled").serve[0]
    assert row.kl > 1e-3
    # With other seeds k3 is 0.80 to 1.25 times the KL on a CPU; a GPU draws other tokens.
    assert row.k3 == pytest.approx(row.kl, rel=0.15 if DEVICE == "cpu" else 0.5)
    assert row.k1 == pytest.approx(
        row.kl, abs=4 * math.sqrt(2 * row.k2 / (4 * 64 * 32))
    )  # four standard errors of k1


def test_padding_does_not_count() -> None:
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0

    class Named(Language):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:  # type: ignore[override]
            class Output:
                logits = Language.forward(self, input_ids)

            return Output()

    padded = mismatch(Named(), [{"input_ids": ids, "attention_mask": mask}], "fp32", "bf16-mixed")
    assert padded.count == 32 - 4
    assert not [t for t in padded.serve[0].worst if t.row == 0 and t.position >= 4]


def test_several_plans_are_told_apart_on_the_same_tokens() -> None:
    rows = mismatch(Language(), [tokens()], "fp32", ["fp32", "fp16-mixed", "bf16-mixed"]).serve
    assert [str(row.plan) for row in rows] == ["fp32", "fp16-mixed", "bf16-mixed"]
    assert 0.0 == rows[0].mean_abs < rows[1].mean_abs < rows[2].mean_abs


def test_a_low_head_is_found_by_its_divergence() -> None:
    """Serving in bf16 rounds large logits and clips ratios; with training on the same plan nothing is clipped."""
    model, ids = Language(sharp=60.0), tokens(16, 33)
    row = mismatch(model, [ids], "fp32", "bf16-true").serve[0]
    assert row.clipped > 0.05
    assert row.effective_sequences < 0.9
    assert mismatch(model, [ids], "bf16-true", "bf16-true").serve[0].clipped == 0.0


def test_other_models_give_logits_themselves() -> None:
    def logits(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, None]:
        return model(batch[0]), batch[1], None

    ids = tokens()
    found = mismatch(Language(), [(ids[:, :-1], ids[:, 1:])], "fp32", "bf16-mixed", logits=logits)
    plain = mismatch(Language(), [ids], "fp32", "bf16-mixed")
    assert found.serve[0].k2 == pytest.approx(plain.serve[0].k2, rel=1e-6)


def test_effective_share_of_known_weights() -> None:
    assert effective_share(torch.zeros(7, dtype=torch.float64)) == pytest.approx(1.0)
    assert effective_share(
        torch.tensor([500.0, -500.0, -500.0, -500.0], dtype=torch.float64)
    ) == pytest.approx(0.25)


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_the_model_is_as_it_was(error: type[BaseException] | None) -> None:
    model = Language().train()
    model.give.weight.grad = torch.ones_like(model.give.weight)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    def batches() -> Any:
        yield tokens()
        if error is not None:
            raise error

    if error is None:
        mismatch(model, batches(), "fp32", "bf16-true", tokens="sampled")
    else:
        with pytest.raises((WorkloadError, KeyboardInterrupt)):
            mismatch(model, batches(), "fp32", "bf16-true", tokens="sampled")
    assert all(m.training for m in model.modules())
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert model.give.weight.grad is not None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_it_is_written_as_json_and_as_a_page(tmp_path: Path) -> None:
    found = mismatch(Language(), [tokens()], "fp32", ["bf16-mixed", "fp16-mixed"])
    page = found.save(tmp_path)
    assert page == tmp_path / "mismatch.html"
    record = json.loads((tmp_path / "mismatch.json").read_text(encoding="utf-8"))
    assert [row["plan"] for row in record["serve"]] == ["bf16-mixed", "fp16-mixed"]
    assert {*ServeMismatch.__dataclass_fields__, "words"} == set(record["serve"][0])
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 2
    assert "Schulman 2020" in text
    assert "Kish 1965" in text


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: mismatch(Language(), [], "fp32", "bf16-mixed"), WorkloadError, "no token"),
        (lambda: mismatch(Language(), [tokens().float()], "fp32", "bf16-mixed"), WorkloadError, "a batch is Tensor"),
        (lambda: mismatch(nn.Embedding(11, 4), [tokens()], "fp32", "fp8"), PlanError, "fp8"),
        (lambda: mismatch(Language(), [tokens()], "fp32", []), PlanError, "give at least one plan"),
        (lambda: mismatch(Language(), [tokens()], "fp32", "fp32", clip=(1.2, 0.8)), PlanError, "clip=\\(1.2, 0.8\\)"),
        (lambda: mismatch(Language(), [tokens()], "fp32", "fp32", tokens="drawn"), PlanError, "tokens='drawn'"),  # type: ignore[arg-type]
        (lambda: mismatch(Language(), [tokens()], "fp32", "fp32", logits=lambda m, b: (m(b), b[:, 1:], None)), WorkloadError,
         "must be \\[batch, length, vocabulary\\]"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused(
    call: Callable[[], Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        call()
