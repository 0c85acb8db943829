"""``mismatch``: measure how far a model's token probabilities under a serving plan differ from those under its training plan.

In reinforcement learning one implementation samples tokens and another trains the model. If the two give a token
different probabilities, training is silently off-policy. Importance ratios correct for the difference, but their variance
explodes if the probabilities differ much. Here one process computes both probabilities at the same weights, teacher-forced on the
same tokens, so that only the formats cause differences.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from castwise.core.casting.trees import to_device
from castwise.core.plans.plan import Plan, as_plan
from castwise.core.plans.text import shown
from castwise.core.plans.words import in_words
from castwise.core.session.process import find_device
from castwise.errors import PlanError, WorkloadError
from castwise.lab.inspect.ratios import ServeMismatch, Sums
from castwise.lab.parity.parity import device_of
from castwise.lab.parity.together import together
from castwise.lab.passes.isolation import seed_all
from castwise.lab.passes.passes import Original, observed_under, under
from castwise.lab.result import Result
from castwise.lab.timing.environment import environment

CLIP = (0.8, 1.2)

Tokens = Literal["given", "sampled"]
Logits = Callable[[nn.Module, Any], tuple[Tensor, Tensor, Tensor | None]]


@dataclass(frozen=True)
class Mismatch(Result):
    """The result of :func:`castwise.mismatch`: how far token probabilities in serving differ from those in training.

    In reinforcement learning, one program samples tokens from a language model (serving) and another trains it. If
    their number formats differ, the same token gets two different probabilities. The importance ratio r of a token is
    its probability in training divided by its probability in serving.

    Attributes:
        workload: The name of the model's class.
        plan_train: The plan for training, which decides the formats in which the model computes and stores its
            weights.
        serve: The differences of each serving plan from the training plan, in the order in which the plans were
            given.
        tokens: The tokens whose probabilities are compared. ``given``: the tokens of the batches. ``sampled``: tokens
            drawn at each position from the serving plan's probabilities.
        count: The number of tokens compared.
        sequences: The number of sequences compared.
        clip: The range of r that is not clipped, as its two ends.
        environment: The device and the versions of the first rank.
        ranks: The number of processes whose batches were used.
    """

    kind: ClassVar[str] = "mismatch"
    workload: str
    plan_train: Plan
    serve: tuple[ServeMismatch, ...]
    tokens: Tokens
    count: int
    sequences: int
    clip: tuple[float, float]
    environment: Mapping[str, Any]
    ranks: int = 1

    def _fields(self) -> dict[str, Any]:
        serve = [
            dataclasses.asdict(row) | {"plan": str(row.plan), "words": in_words(row.plan)}
            for row in self.serve
        ]
        words = in_words(self.plan_train)
        said = f"log-probabilities in training ({words}) and in serving"
        return dataclasses.asdict(self) | {
            "plan_train": str(self.plan_train),
            "words_train": words,
            "serve": serve,
            "description": said,
        }

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``mismatch.json`` and ``mismatch.html``, a page with plots, into a folder.

        Args:
            folder: The output folder, which is created if it does not exist.

        Returns:
            The path of the page. If matplotlib or Jinja is not installed, a warning is given, no page is written, and
            the path of the JSON file is returned.
        """
        return self._save(Path(folder) / "mismatch.html", Path(folder) / "mismatch.json")[0]


def mismatch(
    model: nn.Module,
    batches: Iterable[Any],
    plan_train: Plan | str,
    plan_serve: Plan | str | Sequence[Plan | str],
    *,
    logits: Logits | None = None,
    tokens: Tokens = "given",
    clip: tuple[float, float] = CLIP,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> Mismatch:
    """Compare the probabilities that a language model gives to tokens in training and in serving.

    Use this before reinforcement learning, where one program samples tokens and another trains on them. A plan
    decides the formats in which the model computes and stores its weights. The function computes the log-probability
    of each token under the training plan and under each serving plan. From these follow the importance ratios r =
    p_train / p_serve and their statistics.

    The function runs copies of the model under all plans, in evaluation mode and without gradients. The model, the
    random generators and process-wide settings are unchanged when the function returns, fails or is interrupted. It
    waits for the device. It holds the logits of one batch twice in fp32.

    If the model is in DistributedDataParallel or sharded by FSDP2, all its ranks must call this function together.
    Each rank passes its own batches. All ranks get the result that one process would get on all batches.

    Args:
        model: A causal language model. It returns logits of shape ``[batch, length, vocabulary]``, or an object with
            such ``.logits``, as in Hugging Face. A sharded model is copied whole on every rank.
        batches: A finite number of batches. Each batch is a tensor of token ids ``[batch, length]``. It can also be a
            mapping with ``input_ids`` and optionally ``attention_mask``, which is 0 for padding. With ``logits``, it
            is whatever that function accepts.
        plan_train: The plan that the model is trained under.
        plan_serve: The plan that the model is served under, or several plans to compare.
        logits: For other models, a function ``logits(model, batch)`` that returns three values. They are the logits
            ``[batch, length, vocabulary]``, the tokens ``[batch, length]`` predicted at each position, and a mask
            ``[batch, length]`` of the tokens that count. The mask may be None if all tokens count.
        tokens: Which tokens are compared. ``given``: the tokens of the batches. The estimates k1 and k3 are then
            unbiased only if the serving side sampled these tokens (rollouts). ``sampled``: one token per position,
            drawn from the serving plan's probabilities in the context of the batch.
        clip: The two ends of the range of r that is not clipped. In PPO this is ``(1 - eps, 1 + eps)``.
        device: The device of the run. By default it is the device of the model's parameters.
        seed: The seed of the sampled tokens.

    Returns:
        The result. Its ``.serve`` has one entry for each serving plan. It also has ``.table()`` and
        ``.save(folder)``.

    Raises:
        WorkloadError: There is no batch or no token, or the logits have another shape.
        PlanError: A plan does not fit the model, or ``clip`` or ``tokens`` is invalid.
        DeviceError: The device cannot run a plan.
    """

    def given() -> tuple[Plan, list[Plan], Tokens, tuple[float, float]]:
        several = [plan_serve] if isinstance(plan_serve, (Plan, str)) else list(plan_serve)
        train, serve = as_plan(plan_train), [as_plan(plan) for plan in several]
        if tokens not in ("given", "sampled"):
            raise PlanError(f"mismatch(tokens={shown(tokens)}): allowed: 'given', 'sampled'")
        if not serve:
            raise PlanError("mismatch(plan_serve=[]): give at least one plan")
        _check_clip(clip)
        return train, serve, tokens, clip

    with together(model, "mismatch", what="the model or its batches") as ranks:
        arguments = ("plan_train", "plan_serve", "tokens", "clip")
        train, serve, *_ = ranks.alike("mismatch", arguments, given)
        where = ranks.each(lambda: find_device("mismatch", device, str(device_of(ranks.model))))

        def run() -> list[Sums]:
            sums = [Sums(plan, clip, ranks.size) for plan in serve]
            sides = _Sides(ranks.model, where, logits or _causal)
            with torch.no_grad():
                for number, batch in enumerate(batches):
                    at = number * ranks.size + ranks.rank  # index among the batches of all ranks
                    batch = to_device(batch, where)
                    ours, targets, mask = sides.run(train, batch)
                    for row, plan in zip(sums, serve, strict=True):
                        theirs, _, _ = sides.run(plan, batch)
                        seed_all((seed * 1_000_003 + at) % 2**32)
                        row.take(at, ours, theirs, targets if tokens == "given" else _draw(theirs), mask)
            return sums

        every = ranks.to_first(ranks.each(run))

        def result() -> Mismatch:
            sums = [functools.reduce(operator.iadd, of_plan) for of_plan in zip(*every, strict=True)]
            if not sums[0].count:
                raise WorkloadError(
                    "mismatch: the batches have no tokens to compare; give at least one batch of two tokens"
                )
            return Mismatch(
                workload=type(ranks.model).__name__,
                plan_train=train,
                serve=tuple(row.result() for row in sums),
                tokens=tokens,
                count=sums[0].count,
                sequences=sums[0].sequences,
                clip=(float(clip[0]), float(clip[1])),
                environment=dataclasses.asdict(environment(where)),
                ranks=ranks.size,
            )

        return ranks.first(result)


# --- running ----------------------------------------------------------------------------------------------------


class _Sides:
    """Runs copies of a model under plans, one copy at a time, since plans may need different process-wide settings."""

    def __init__(self, model: nn.Module, device: torch.device, of: Logits) -> None:
        self._original, self._device, self._of = Original(model, "mismatch", device), device, of
        self._original.model.eval()
        self._copies: dict[Plan, nn.Module] = {}

    def run(self, plan: Plan, batch: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """Run a batch under a plan; return the logits in fp32, the tokens and the mask."""
        plan = dataclasses.replace(plan, compile="as_given")
        if plan not in self._copies:
            self._copies[plan] = self._original.copy()
        model = self._copies[plan]
        with under(plan, model, self._device), observed_under(plan, model, self._device):
            return _checked(self._of(model, batch))


def _causal(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run a causal language model on token ids or on a batch in Hugging Face's format.

    Returns:
        The logits, the next tokens that they predict, and a mask of the tokens that count, or None.
    """
    named = isinstance(batch, Mapping)
    ids = batch["input_ids"] if named and "input_ids" in batch else batch
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
        raise WorkloadError(
            f"mismatch: a batch is {type(batch).__name__}; give token numbers [batch, length], a mapping with input_ids, or "
            "logits=lambda model, batch: (logits, tokens, mask)"
        )
    out = model(**batch) if named else model(ids)
    whole = getattr(out, "logits", out)
    if not isinstance(whole, Tensor):
        raise WorkloadError(
            f"mismatch: the model returned {type(out).__name__}; it must return logits, or an object with .logits; else give "
            "logits=lambda model, batch: (logits, tokens, mask)"
        )
    mask = batch.get("attention_mask") if named else None
    return whole[:, :-1], ids[:, 1:], None if mask is None else mask[:, 1:] * mask[:, :-1]


def _checked(parts: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    if not (isinstance(parts, tuple) and len(parts) == 3):
        raise WorkloadError(
            f"mismatch: logits(model, batch) returned {type(parts).__name__}; it must return logits, tokens and a mask or None"
        )
    logits, tokens, mask = parts
    if (
        logits.dim() != 3
        or logits.shape[:2] != tokens.shape
        or (mask is not None and mask.shape != tokens.shape)
    ):
        shapes = [list(part.shape) for part in parts if part is not None]
        raise WorkloadError(
            f"mismatch: logits, tokens and mask have the shapes {', '.join(map(str, shapes))}; they must be [batch, length, vocabulary], "
            "[batch, length] and [batch, length]"
        )
    return logits.float(), tokens, None if mask is None else mask.bool()


def _draw(logits: Tensor) -> Tensor:
    """Sample one token per position from the softmax of the logits; the same seed gives the same noise under every plan."""
    noise = torch.rand(logits.shape, device=logits.device, dtype=torch.float32).clamp_min_(
        torch.finfo(torch.float32).tiny
    )
    return (logits - noise.log_().neg_().log_()).argmax(-1)  # Gumbel's trick


def _check_clip(clip: object) -> None:
    right = isinstance(clip, tuple) and len(clip) == 2 and all(isinstance(end, (int, float)) for end in clip)
    if not right or not 0.0 <= clip[0] < 1.0 < clip[1]:  # type: ignore[index]
        raise PlanError(f"mismatch(clip={shown(clip)}): allowed: two numbers around 1, such as (0.8, 1.2)")
