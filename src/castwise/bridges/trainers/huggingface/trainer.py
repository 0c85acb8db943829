"""A ``transformers.Trainer`` that trains under a castwise plan."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from castwise import Amp, Plan
from castwise.bridges.trainers.huggingface.accelerator import CastwiseAccelerator
from castwise.bridges.trainers.huggingface.versions import check_version
from castwise.errors import PlanError

STATE = "castwise.json"
"""The file in a checkpoint that holds the plan, the loss scale and the number of skipped steps."""


class CastwiseMixin:
    """Makes any subclass of ``transformers.Trainer`` train under a castwise plan.

    A plan decides the formats in which a model computes and stores its weights. Use the class like this: ``class
    Mine(CastwiseMixin, SFTTrainer): ...``, and pass the plan to the trainer as ``plan=``.

    The trainer keeps its own accumulation, clipping, schedulers, evaluation, callbacks and overridden
    ``compute_loss``. The plan controls how the model runs, how losses are scaled, and how gradients are unscaled,
    clipped and used in steps. Checkpoints have the loss scales and, if the plan keeps fp32 master weights, the
    weights in fp32. A resumed training thus continues bit for bit.

    A skipped step does not advance schedulers. ``state.global_step`` still counts a skipped step, since the Trainer
    uses that count to find its place in the data. ``skipped_steps`` in the log is the number of skipped steps.

    Args:
        args: The positional arguments of the trainer.
        plan: A :class:`~castwise.Plan`, the name of a preset, the path of a plan file, or an :class:`~castwise.Amp`.
        prepare_options: Options of :meth:`castwise.Amp.prepare`, such as ``{"methods": ("encode",)}``.
        kwargs: The keyword arguments of the trainer.

    Raises:
        PlanError: Another precision setting is given in addition to the plan, such as
            ``TrainingArguments(bf16=True)``.
        StateError: The trainer is configured for a sharding method that sets its own precision.
    """

    accelerator: CastwiseAccelerator
    args: Any
    model: Any
    optimizer: Any
    is_in_train: bool

    def __init__(
        self,
        *args: Any,
        plan: Amp | Plan | str | os.PathLike[str],
        prepare_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._plan, self._options = plan, prepare_options
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator as the trainer does, and make it train under the plan.

        Raises:
            PlanError: Another precision setting is given in addition to the plan.
            StateError: The trainer is configured for a sharding method that sets its own precision.
        """
        check_version("transformers")
        names = ("bf16", "fp16", "bf16_full_eval", "fp16_full_eval")
        given = [f"{name}=True" for name in names if getattr(self.args, name, False)]
        if not given and self.args.mixed_precision != "no":
            given = [f"ACCELERATE_MIXED_PRECISION={self.args.mixed_precision}"]
        if given:
            plan = self._plan.plan if isinstance(self._plan, Amp) else self._plan
            raise PlanError(
                f"{type(self).__name__}(plan={str(plan)!r}) together with {', '.join(given)}: two settings of precision at once. "
                "Allowed: the plan alone. Remove the other setting from TrainingArguments and the environment, or train with "
                "transformers.Trainer without a plan"
            )
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        plan = CastwiseAccelerator.adopt(self.accelerator, self._plan, self._options).amp.plan
        if self.args.tf32 is not None and (plan.fp32_matmul, plan.fp32_conv) != ("as_is", "as_is"):
            raise PlanError(
                f"{type(self).__name__}(plan={str(plan)!r}) together with tf32={self.args.tf32}: both set what fp32 matrix "
                f"products may use internally. Leave tf32 out of TrainingArguments, or use a plan with fp32_matmul='as_is' "
                f"and fp32_conv='as_is'"
            )

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        if (
            self.args.n_gpu > 1
        ):  # the Trainer wraps the model in DataParallel, and does not pass it to Accelerate
            optimizers = [] if self.optimizer is None else [self.optimizer]
            self.accelerator.take_in(model, *optimizers)
        return super()._wrap_model(model, training, dataloader)  # type: ignore[misc]

    # --- checkpoints ------------------------------------------------------------------------------------------

    def _keeps_masters(self) -> bool:
        amp = self.accelerator.amp
        return amp.plan.keeps_masters and Amp.of(self.accelerator.unwrap_model(self.model)) is amp

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if not self._keeps_masters():
            super()._save(output_dir, state_dict)  # type: ignore[misc]
            return
        model = self.accelerator.unwrap_model(self.model)
        super()._save(output_dir, state_dict or self.accelerator.amp.model_state_dict(model))  # type: ignore[misc]
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        # config.json names the dtype of the saved weights, which is fp32 here. Adapters have none. One process writes.
        if self.args.should_save and (folder / "config.json").is_file():
            stored, model.config.dtype = model.config.dtype, torch.float32
            model.config.save_pretrained(folder)
            model.config.dtype = stored

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self._keeps_masters() and not _has_adapters(self.model):
            # The trainer loaded the weights in the model's dtype, before the fp32 master weights existed.
            self._load_from_checkpoint(checkpoint, self.model)
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with self._adapters_widened():
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        with self._adapters_widened():
            super()._load_best_model()  # type: ignore[misc]

    @contextlib.contextmanager
    def _adapters_widened(self) -> Iterator[None]:
        """Close the castwise session inside the block, in which PEFT loads adapters, and prepare the model again afterwards.

        PEFT casts the adapters' parameters to fp32, which would separate them from their master weights.
        """
        if not (self._keeps_masters() and _has_adapters(self.model)):
            yield
            return
        self.accelerator.amp.close()
        try:
            yield
        finally:
            self.accelerator.take_in(self.model, *([] if self.optimizer is None else [self.optimizer]))

    def _save_scaler(self, output_dir: str) -> None:
        scaler = self.accelerator.scaler
        if scaler.is_enabled():  # otherwise a Trainer without a scaler could not resume from this checkpoint
            super()._save_scaler(output_dir)  # type: ignore[misc]
        if self.args.should_save:
            Path(output_dir, STATE).write_text(json.dumps(scaler.state_dict(), indent=2), encoding="utf-8")

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and (file := Path(checkpoint, STATE)).is_file():
            self.accelerator.scaler.load_state_dict(json.loads(file.read_text(encoding="utf-8")))
        else:
            super()._load_scaler(checkpoint)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as the trainer does, and add castwise's values to the log of a training loss.

        These are ``skipped_steps`` and, if the plan has a loss scale, ``loss_scale``. If skipped steps made buffers
        non-finite, ``restored_buffers`` is added too. It is how often buffers were restored.

        Args:
            logs: The values by name.
            args: Further positional arguments, as in the trainer.
            kwargs: Further keyword arguments, as in the trainer.
        """
        if self.is_in_train and "loss" in logs:
            scaler = self.accelerator.scaler
            logs = {**logs, "skipped_steps": scaler.skipped_steps}
            if restored := scaler.restored_buffers:
                logs["restored_buffers"] = sum(restored.values())
            if scaler.is_enabled():
                logs["loss_scale"] = scaler.get_scale()
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


def _has_adapters(model: Any) -> bool:
    """Whether a model is a PEFT model or contains PEFT adapters."""
    return bool(getattr(model, "peft_config", None))


class CastwiseTrainer(CastwiseMixin, Trainer):
    """A ``transformers.Trainer`` that trains under a castwise plan. See :class:`CastwiseMixin`."""
