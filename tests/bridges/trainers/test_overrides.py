"""Overrides of other libraries' methods keep the side effects of the originals."""

from __future__ import annotations

import hashlib
import inspect
import re
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytest.importorskip("lightning", reason="needs castwise[lightning]")

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import AutocastKwargs
from lightning import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from torch.utils.data import DataLoader
from transformers import Trainer as HuggingFaceTrainer

from castwise.bridges.trainers.huggingface import CastwiseAccelerator, CastwiseMixin
from castwise.bridges.trainers.huggingface.adapters import CastwiseOptimizer
from castwise.bridges.trainers.lightning import CastwisePrecision
from castwise.errors import StateError
from tests.core.masters.test_optimizers_apart import Lomo

KINDS: list[tuple[type, type, str]] = [
    (CastwiseAccelerator, Accelerator, "accelerate 1.15"),
    (CastwiseOptimizer, AcceleratedOptimizer, "accelerate 1.15"),
    (CastwiseMixin, HuggingFaceTrainer, "transformers 5.23"),
    (CastwisePrecision, Precision, "lightning 2.6"),
]
"""castwise's class, the class whose methods it overrides, and the release that was read."""
REPLACED = {
    "Accelerator.prepare_optimizer": "d50a28b49664",
    "Accelerator.backward": "fb25ccb046ca",
    "Accelerator.unscale_gradients": "c13f85a87897",
    "Accelerator.clip_grad_norm_": "07bab36d3993",
    "Accelerator.clip_grad_value_": "74c7bba9d475",
    "Accelerator.autocast": "c180d07cf612",
    "AcceleratedOptimizer.step": "3c449e5cf706",
    "AcceleratedOptimizer.step_was_skipped": "1f692139c3cc",
    "Precision.convert_module": "e0422cba9fd4",
    "Precision.connect": "4612dbb582c1",
    "Precision.teardown": "fcd31bea5e2e",
    "Precision.convert_input": "6598ea8026a1",
    "Precision.forward_context": "be84f4d137d2",
    "Precision.train_step_context": "8af7be843010",
    "Precision.val_step_context": "056d657c1869",
    "Precision.test_step_context": "0a8b92205c1c",
    "Precision.predict_step_context": "9003a79da87a",
    "Precision.optimizer_step": "868b323ae627",
    "Precision.unscale_gradients": "62d1d1c1b9f3",
    "Precision.state_dict": "e0a433fe93c9",
    "Precision.load_state_dict": "3f7a651df785",
    "Precision.on_load_checkpoint": "b72dcb2f3194",
}
"""Methods that their overrides do not call, with a digest of the source for which the override was written."""


def code_of(found: Any) -> str:
    return inspect.getsource(found.fget if isinstance(found, property) else found)


def overrides() -> list[tuple[str, Any, Any, str]]:
    return [
        (f"{theirs.__name__}.{name}", own, original, release)
        for ours, theirs, release in KINDS
        for name, own in vars(ours).items()
        if (callable(own) or isinstance(own, property))
        and not (name.startswith("__") and name != "__init__")
        and (original := inspect.getattr_static(theirs, name, None)) is not None
        and not isinstance(original, type(object.__init__))
        and getattr(own, "__module__", "castwise").startswith("castwise")
    ]


@pytest.mark.parametrize(
    ("name", "own", "original", "release"),
    overrides(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_override_calls_the_original_or_was_compared_with_it(
    name: str, own: Any, original: Any, release: str
) -> None:
    method = name.partition(".")[2]
    if re.search(rf"super\(\)\.{method}\(", code_of(own)):
        assert name not in REPLACED
        return
    library, read = release.split()
    if not version(library).startswith(read + "."):
        pytest.skip(f"what was read is {release}")
    digest = hashlib.sha256(code_of(original).encode()).hexdigest()[:12]
    assert REPLACED.get(name) == digest, (
        f"{library} {version(library)}: {name} is not what it was. Read it again, give the override each side effect that it has "
        f"now, then write the digest {digest} here"
    )


def test_no_digest_is_left_over() -> None:
    assert set(REPLACED) <= {name for name, *_ in overrides()}


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset Accelerate's process-wide state after the test."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with warnings.catch_warnings():
        yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


def plain_values(thing: Any) -> dict[str, Any]:
    """Return the attributes that are numbers, strings or None, and the lengths of lists."""
    found: dict[str, Any] = {}
    for name, value in vars(thing).items():
        if value is None or isinstance(value, (bool, int, float, str)):
            found[name] = value
        elif isinstance(value, list):
            found[name] = len(value)
    return found


def through_its_calls(accelerator: Accelerator) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    again = accelerator.prepare_optimizer(optimizer)
    seen = [plain_values(accelerator)]
    for _ in range(2):
        with accelerator.accumulate(model), accelerator.autocast():
            accelerator.backward(model(torch.ones(2, 4)).square().mean())
            accelerator.unscale_gradients(optimizer)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            accelerator.clip_grad_value_(model.parameters(), 1.0)
            again.step()
            again.zero_grad()
        seen += [
            plain_values(accelerator),
            plain_values(accelerator.gradient_state),
            {"skipped": again.step_was_skipped},
        ]
    accelerator.get_state_dict(model)
    accelerator.free_memory()
    return [*seen, plain_values(accelerator)]


def test_an_accelerator_is_left_as_the_original_would_be(apart: None) -> None:
    want = through_its_calls(Accelerator())
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for ours, theirs in zip(through_its_calls(CastwiseAccelerator("fp32")), want, strict=True):
        assert {name: ours.get(name, "missing") for name in theirs if name != "scaler"} == {
            name: value for name, value in theirs.items() if name != "scaler"
        }


@pytest.mark.parametrize("plan", ["fp32", "bf16-mixed", "fp16-mixed", "bf16-master"])
def test_lomo_takes_its_rate_from_backward_or_is_refused(plan: str, apart: None) -> None:
    torch.manual_seed(0)
    model, plain = nn.Linear(4, 4), nn.Linear(4, 4)
    plain.load_state_dict(model.state_dict())
    accelerator = CastwiseAccelerator(plan)
    if plan in ("fp16-mixed", "bf16-master"):
        with pytest.raises(StateError, match=r"Lomo updates weights inside the backward"):
            accelerator.prepare(model, Lomo(model))
        return
    with pytest.warns(UserWarning, match="Lomo updates weights inside the backward"):
        model, optimizer = accelerator.prepare(model, Lomo(model))
    assert accelerator.has_lomo_optimizer
    by_hand = Lomo(plain)
    for rate in (0.5, 0.25):
        accelerator.backward(model(torch.ones(2, 4)).square().mean(), learning_rate=rate)
        optimizer.step()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=plan == "bf16-mixed"):
            out = plain(torch.ones(2, 4))
        by_hand.fused_backward(out.float().square().mean(), rate)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_a_rate_that_nobody_takes_is_refused(apart: None) -> None:
    model = nn.Linear(4, 4)
    accelerator = CastwiseAccelerator("fp32")
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(
        StateError,
        match=r"backward\(learning_rate=0\.5\): none of the optimizers.*set the learning rate in the optimizer's param_groups",
    ):
        accelerator.backward(model(torch.ones(2, 4)).sum(), learning_rate=0.5)


@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec")
@pytest.mark.parametrize("plan", ["fp32", "fp16-mixed", "bf16-master"])
def test_a_training_step_may_leave_a_batch_out(plan: str) -> None:
    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 4)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor | None:
            return None if index % 2 else self.net(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

        def train_dataloader(self) -> Any:
            return DataLoader(torch.ones(8, 4), batch_size=2)

    net = Net()
    before = net.net.weight.detach().clone()
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", plugins=[CastwisePrecision(plan)], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*returned `None`")
        trainer.fit(net)
    assert not torch.equal(before, net.net.weight)


def test_accelerates_autocast_takes_what_the_handler_says() -> None:
    accelerator = CastwiseAccelerator("bf16-mixed", cpu=True)
    for handler, expected in (
        (None, (True, torch.is_autocast_cache_enabled())),
        (AutocastKwargs(enabled=False), (False, torch.is_autocast_cache_enabled())),
        (AutocastKwargs(cache_enabled=False), (True, False)),
    ):
        with accelerator.autocast(handler):
            assert (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()) == expected
