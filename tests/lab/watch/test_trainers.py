"""A monitor sees the steps of Lightning and transformers, and leaves their training unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from castwise.lab.watch import Monitor
from tests.here import DEVICE
from tests.lab.watch.jobs import same

pytestmark = pytest.mark.skipif(DEVICE == "sim", reason="Lightning and accelerate do not know the device")


@pytest.fixture(autouse=True)
def on_the_host() -> Iterator[None]:
    """Create models and batches on the CPU: the trainers move them, and their loaders draw from CPU generators."""
    with torch.device("cpu"):
        yield


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.isinstance.treespec, LeafSpec")
def test_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="needs castwise[lightning]")
    from lightning import Trainer
    from lightning.pytorch.callbacks import Callback

    from castwise.bridges.trainers.lightning import CastwisePrecision
    from tests.bridges.trainers.test_lightning import Net, batches, loader

    class Watching(Callback):
        monitor: Monitor | None = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.monitor = Monitor(trainer.precision_plugin.amp, every=1, log=pl_module.log_dict_of_monitor)

    ends = []
    for watched in (False, True):
        net, seen = Net(), []
        net.log_dict_of_monitor = lambda values, step, seen=seen: seen.append(step)  # type: ignore[assignment,misc]
        callback = Watching()
        trainer = Trainer(
            accelerator=DEVICE, max_epochs=1, plugins=[CastwisePrecision("fp16-mixed")], logger=False,
            callbacks=[callback] if watched else [], enable_progress_bar=False, enable_checkpointing=False,
            enable_model_summary=False, default_root_dir=tmp_path, accumulate_grad_batches=2,
        )  # fmt: skip
        trainer.fit(net, loader(batches()))
        ends.append({name: value.clone() for name, value in net.state_dict().items()})
    assert same(*ends)
    assert callback.monitor is not None
    assert callback.monitor.step == trainer.global_step == 3
    assert seen == [1, 2, 3]


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs castwise[huggingface]")
    pytest.importorskip("transformers", reason="needs castwise[huggingface]")
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import TrainerCallback

    from tests.bridges.trainers.test_huggingface import trainer

    class Watching(TrainerCallback):  # type: ignore[misc]
        monitor: Monitor | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.monitor = Monitor(run.accelerator.amp, every=1)

    ends, callback = [], Watching()
    for watched in (False, True):
        run = trainer(tmp_path, "fp16-mixed", use_cpu=DEVICE == "cpu")
        if watched:
            run.add_callback(callback)
        run.train()
        ends.append({name: value.clone() for name, value in run.model.state_dict().items()})
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        PartialState._reset_state()
    assert same(*ends)
    assert callback.monitor is not None
    assert callback.monitor.step == run.state.global_step == 4
    assert torch.is_tensor(next(iter(ends[0].values())))
