"""Every name of Colossal-AI's contract, and what became of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from castwise.compat.coverage import Covered, absent_row

__all__ = ["COVERED", "missing_attribute"]

COVERED: Final[tuple[Covered, ...]] = (
    # --- AMP
    Covered("colossalai.amp.AMP_TYPE", "works"),
    Covered(
        "colossalai.amp.convert_to_amp",
        "differs",
        "returns the model itself, prepared in place, so that its `state_dict` has no `model.` before each name; the original "
        "wraps it",
    ),
    Covered("colossalai.amp.convert_to_torch_amp", "works"),
    Covered("colossalai.amp.convert_to_apex_amp", "works"),
    Covered("colossalai.amp.convert_to_naive_amp", "works"),
    Covered(
        "AMP_TYPE.TORCH",
        "works",
        "model and criterion run by CUDA's autocast lists, on every device; `step()` returns None",
    ),
    Covered("AMP_TYPE.TORCH(init_scale)", "works"),
    Covered("AMP_TYPE.TORCH(growth_factor)", "works"),
    Covered("AMP_TYPE.TORCH(backoff_factor)", "works"),
    Covered("AMP_TYPE.TORCH(growth_interval)", "works"),
    Covered("AMP_TYPE.TORCH(enabled)", "works", "False leaves scaling out and keeps autocast, as documented"),
    Covered(
        "AMP_TYPE.APEX",
        "differs",
        "O1 covers the model and the criterion, which is all that an engine runs, and not code of your own between them: put "
        "that under `with engine.amp.autocast():`. Works under tensor parallelism and in pipelines",
    ),
    Covered("AMP_TYPE.APEX(enabled)", "works"),
    Covered("AMP_TYPE.APEX(opt_level)", "works", "O0, O1, O2, O3"),
    Covered("AMP_TYPE.APEX(cast_model_type)", "works", "bf16 too, in O1 as well"),
    Covered("AMP_TYPE.APEX(patch_torch_functions)", "works", "True with O1 alone, as in Apex"),
    Covered("AMP_TYPE.APEX(keep_batchnorm_fp32)", "works"),
    Covered("AMP_TYPE.APEX(master_weights)", "works"),
    Covered(
        "AMP_TYPE.APEX(loss_scale)",
        "differs",
        "a fixed scale skips steps whose gradients are not finite, where Apex would ruin the weights",
    ),
    Covered("AMP_TYPE.APEX(cast_model_outputs)", "works", "fp32 or the format of the model"),
    Covered(
        "AMP_TYPE.APEX(num_losses)",
        "works",
        "an engine has one loss; several by `engine.amp.backward(loss, name)`",
    ),
    Covered("AMP_TYPE.APEX(verbosity)", "works"),
    Covered(
        "AMP_TYPE.APEX(min_loss_scale)",
        "differs",
        "2**-14 where none is given: a scale of 0 would end training silently",
    ),
    Covered("AMP_TYPE.APEX(max_loss_scale)", "works"),
    Covered(
        "AMP_TYPE.NAIVE",
        "works",
        "all in fp16, BatchNorm too, fp32 masters, fp32 outputs (of a pipeline's last stage)",
    ),
    Covered(
        "AMP_TYPE.NAIVE(initial_scale)",
        "works",
        "2**16 by default, as in the code; the documentation's sample has 2**32",
    ),
    Covered("AMP_TYPE.NAIVE(growth_factor)", "works"),
    Covered("AMP_TYPE.NAIVE(backoff_factor)", "works"),
    Covered("AMP_TYPE.NAIVE(growth_interval)", "works", "1000"),
    Covered(
        "AMP_TYPE.NAIVE(hysteresis)",
        "works",
        "`hysterisis` too. Overflows are counted until the scale grows",
    ),
    Covered("AMP_TYPE.NAIVE(min_scale)", "differs", "2**-14 where none is given, as above"),
    Covered("AMP_TYPE.NAIVE(max_scale)", "works"),
    Covered("AMP_TYPE.NAIVE(clip_grad_norm)", "works", "over all ranks together"),
    Covered("AMP_TYPE.NAIVE(dynamic_grad_scale)", "works"),
    Covered("AMP_TYPE.NAIVE(verbose)", "works"),
    Covered(
        "AMP_TYPE.NAIVE(log_num_zeros_in_grad)",
        "works",
        "`step()` returns a third value, this process's count, as the documentation has it",
    ),
    Covered(
        "colossalai.nn.optimizer.ColossalaiOptimizer",
        "works",
        "`backward`, `backward_by_grad`, `clip_grad_norm`, `step`, `zero_grad`; `optim` and `optimizer` are what it wraps",
    ),
    # --- the frame
    Covered(
        "colossalai.launch", "differs", "`nccl` becomes `gloo` without a CUDA device, which the log says"
    ),
    Covered("colossalai.launch_from_torch", "differs", "as `launch`"),
    Covered("colossalai.launch_from_slurm", "differs", "as `launch`"),
    Covered("colossalai.launch_from_openmpi", "differs", "as `launch`"),
    Covered("colossalai.get_default_parser", "works"),
    Covered(
        "colossalai.initialize",
        "differs",
        "BatchNorm's running statistics are the first data parallel rank's in all modes; the naive mode averages them there",
    ),
    Covered("colossalai.initialize(ophooks)", "absent", "use torch's module hooks"),
    Covered("config.fp16", "works", "in a pipeline and beside `zero` too, in every mode"),
    Covered(
        "config.fp16(dtype)", "differs", "castwise's own, in TORCH and NAIVE: `bf16` in the place of fp16"
    ),
    Covered("config.clip_grad_norm", "works", "by the norm over all ranks, unscaled first"),
    Covered("config.gradient_accumulation", "works", "in a pipeline too"),
    Covered(
        "config.parallel(pipeline)",
        "works",
        "by torch.distributed.pipelining; the model given is this rank's stage",
    ),
    Covered(
        "config.parallel(tensor)",
        "differs",
        "mode 1d, for its groups; cut layers with torch's `parallelize_module` on `gpc.device_mesh['tensor']`, or by hand with "
        "`parameter.is_tensor_parallel = True`. Modes 2d, 2.5d, 3d and sequence are refused",
    ),
    Covered("config.NUM_MICRO_BATCHES", "works", "by default the number of stages"),
    Covered("config.TENSOR_SHAPE", "works", "not needed: torch finds shapes by itself"),
    Covered(
        "config.zero",
        "differs",
        "FSDP2 shards; `level` 3 frees weights after the forward pass, 1 and 2 keep them. What means nothing to it is logged. "
        "Without `fp16` it is the naive plan",
    ),
    Covered("config.torch_ddp", "works"),
    Covered("config.cudnn_benchmark", "works"),
    Covered("config.cudnn_deterministic", "works"),
    Covered(
        "colossalai.core.global_context", "works", "`gpc.config` and the questions about ranks and groups"
    ),
    Covered("colossalai.context.Config", "works"),
    Covered(
        "colossalai.context.ParallelMode", "differs", "GLOBAL, DATA, MODEL, PIPELINE, TENSOR, PARALLEL_1D"
    ),
    Covered("colossalai.logging.get_dist_logger", "works"),
    Covered("colossalai.logging.disable_existing_loggers", "works"),
    Covered(
        "colossalai.engine.Engine",
        "works",
        "`amp` is the castwise session. Gradients are averaged by DistributedDataParallel, or before the step where that cannot",
    ),
    Covered("colossalai.engine.schedule.NonPipelineSchedule", "works"),
    Covered(
        "colossalai.engine.schedule.PipelineSchedule", "differs", "made by `initialize`; torch's Schedule1F1B"
    ),
    Covered(
        "colossalai.engine.schedule.InterleavedPipelineSchedule",
        "differs",
        "made by `initialize` for an `nn.ModuleList` of stages; torch's ScheduleInterleaved1F1B",
    ),
    Covered("colossalai.engine.gradient_accumulation", "works"),
    Covered("colossalai.builder.build_pipeline_model", "works", "layers keep their names"),
    Covered(
        "colossalai.utils.get_dataloader", "works", "memory is pinned only where there is an accelerator"
    ),
    Covered("colossalai.utils.MultiTimer", "works"),
    Covered("colossalai.utils.get_current_device", "works"),
    Covered("colossalai.utils.report_memory_usage", "works"),
    Covered(
        "colossalai.utils.save_checkpoint",
        "differs",
        "writes a folder, from all ranks, which resumes under any mode and layout; the original writes a pickle per rank",
    ),
    Covered("colossalai.utils.load_checkpoint", "differs", "reads what `save_checkpoint` wrote here"),
    Covered(
        "colossalai.utils.clip_grad_norm_fp32",
        "absent",
        "use `engine.amp.clip_grad_norm_(optimizer, max_norm)`",
    ),
    Covered("colossalai.utils.checkpoint", "absent", "use torch.utils.checkpoint"),
    Covered("colossalai.trainer.Trainer", "works", "progress is shown with rich"),
    Covered("colossalai.trainer.hooks.BaseHook", "works"),
    Covered("colossalai.trainer.hooks.MetricHook", "works"),
    Covered("colossalai.trainer.hooks.LossHook", "works"),
    Covered("colossalai.trainer.hooks.AccuracyHook", "works"),
    Covered("colossalai.trainer.hooks.LRSchedulerHook", "works"),
    Covered("colossalai.trainer.hooks.ThroughputHook", "works", "says so where the trainer has no timer"),
    Covered("colossalai.trainer.hooks.LogMetricByStepHook", "works"),
    Covered("colossalai.trainer.hooks.LogMetricByEpochHook", "works"),
    Covered("colossalai.trainer.hooks.LogTimingByEpochHook", "works"),
    Covered(
        "colossalai.trainer.hooks.LogMemoryByEpochHook",
        "works",
        "of the process where there is no CUDA device",
    ),
    Covered("colossalai.trainer.hooks.TensorboardHook", "works"),
    Covered(
        "colossalai.trainer.hooks.SaveCheckpointHook", "differs", "as `save_checkpoint`; keeps the last two"
    ),
    Covered(
        "colossalai.trainer.hooks.LoadCheckpointHook",
        "differs",
        "goes on with the epoch after the one that was saved",
    ),
    Covered(
        "colossalai.nn.lr_scheduler.LinearWarmupLR",
        "differs",
        "stays at 0 after the last step, where the original's rate goes below",
    ),
    Covered(
        "colossalai.nn.lr_scheduler", "absent", "other schedulers: use those of torch.optim.lr_scheduler"
    ),
    Covered("colossalai.nn.metric.Accuracy", "works"),
    Covered(
        "colossalai.nn",
        "absent",
        "parallel layers and optimizers: use torch.nn with torch's `parallelize_module`, torch.optim",
    ),
    Covered("colossalai.legacy", "works", "the same modules under the names that version 0.3 gave them"),
    Covered(
        "colossalai.zero",
        "absent",
        "use `zero = dict(level=3)` in the configuration, or castwise.Amp.fully_shard",
    ),
    Covered("colossalai.gemini", "absent", "use `zero = dict(level=3)` in the configuration"),
    Covered(
        "colossalai.booster",
        "absent",
        "use castwise.Amp: `model, optimizer = castwise.Amp(plan).prepare(model, optimizer)`",
    ),
    Covered("colossalai.kernel", "absent", "use torch's fused optimizers and torch.nn.functional"),
    Covered("colossalai.communication", "absent", "use torch.distributed with `gpc.get_group(mode)`"),
    Covered("colossalai.registry", "absent", "hand objects over instead of their names"),
)


def missing_attribute(module: str) -> Callable[[str], Any]:
    """A module's ``__getattr__``: an error that says what to use instead."""

    def __getattr__(name: str) -> Any:  # noqa: N807 - it becomes one
        row = absent_row(COVERED, f"{module}.{name}")
        message = f"{module!r} of castwise.compat has no {name!r}"
        if row is not None and name[0] != "_":
            # `from module import name` would put a text of its own in the place of an AttributeError's
            raise ImportError(f"{message}. Instead: {row.note}.")
        raise AttributeError(f"{message}; docs/compat.md lists what there is")

    return __getattr__
