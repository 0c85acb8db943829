"""Every name of Apex's contract, as scripts use it, and what became of it."""

from __future__ import annotations

from typing import Final

from castwise.compat.coverage import Covered

__all__ = ["COVERED"]

_LAMB = "torch has no LAMB; use `torch.optim.AdamW`, or the `Lamb` of timm"
_MASTERS = "O2 of `amp.initialize` keeps masters"

COVERED: Final = (
    # apex.amp
    Covered("apex.amp.initialize", "works"),
    Covered("apex.amp.initialize(models)", "works", "a module or a list"),
    Covered("apex.amp.initialize(optimizers)", "works", "an optimizer, LARC, a list, or None"),
    Covered(
        "apex.amp.initialize(enabled)", "works", "`state_dict` and `load_state_dict` work under `False`, too"
    ),
    Covered("apex.amp.initialize(opt_level)", "works", "`O0` to `O3`"),
    Covered(
        "apex.amp.initialize(cast_model_type)",
        "differs",
        "`torch.bfloat16` is taken besides fp16 and fp32; other types are refused",
    ),
    Covered("apex.amp.initialize(patch_torch_functions)", "works"),
    Covered("apex.amp.initialize(keep_batchnorm_fp32)", "works"),
    Covered("apex.amp.initialize(master_weights)", "works"),
    Covered("apex.amp.initialize(loss_scale)", "works"),
    Covered("apex.amp.initialize(cast_model_outputs)", "works"),
    Covered("apex.amp.initialize(num_losses)", "works"),
    Covered(
        "apex.amp.initialize(verbosity)",
        "differs",
        "2 prints what 1 prints: casts are made below Python, unseen",
    ),
    Covered("apex.amp.initialize(min_loss_scale)", "works"),
    Covered("apex.amp.initialize(max_loss_scale)", "works"),
    Covered(
        "apex.amp.initialize(patch_torch_functions_type)",
        "works",
        "of AMD's Apex: `torch.bfloat16` runs the casts of O1 in bf16",
    ),
    Covered(
        "apex.amp.initialize called again",
        "differs",
        "the casts of the first call end, where Apex stacked them; models that were cast stay cast",
    ),
    Covered(
        "apex.amp.scale_loss", "works", "`optimizers` may be a tuple, which in Apex counted gradients twice"
    ),
    Covered("apex.amp.scale_loss(loss_id)", "works"),
    Covered("apex.amp.scale_loss(model)", "works", "ignored, as in Apex"),
    Covered("apex.amp.scale_loss(delay_unscale)", "works"),
    Covered("apex.amp.scale_loss(delay_overflow_check)", "works"),
    Covered(
        "model.parameters()'s .grad in O2",
        "differs",
        "is the masters' own gradient: fp32 and unscaled, so that clipping it clips what is applied",
    ),
    Covered(
        "loss scale without a floor",
        "differs",
        "ends at fp32's smallest number, where ten more overflows raise `LossScaleError`; Apex divided by zero",
    ),
    Covered("apex.amp.master_params", "works", "masters are there at once, not from the first backward on"),
    Covered("apex.amp.state_dict", "works", "Apex's own structure"),
    Covered("apex.amp.load_state_dict", "works", "states that Apex saved, too"),
    Covered(
        "apex.amp.half_function", "differs", "fp64 is left alone; weights are not cached across its calls"
    ),
    Covered("apex.amp.float_function", "differs", "fp64 is left alone"),
    Covered("apex.amp.promote_function", "differs", "fp64 is left alone; fp16 with bf16 meets in fp32"),
    Covered("apex.amp.register_half_function", "works"),
    Covered("apex.amp.register_float_function", "works"),
    Covered("apex.amp.register_promote_function", "works"),
    Covered("apex.amp.disable_casts", "works", "also when it ends by an exception"),
    Covered("apex.amp.init", "works"),
    Covered("apex.amp.init(loss_scale)", "works"),
    Covered(
        "apex.amp.init(enable_caching)",
        "differs",
        "without `initialize` no model is known, and weights are cast at each use",
    ),
    Covered("apex.amp.init(verbose)", "differs", "prints nothing: casts are made below Python, unseen"),
    Covered("apex.amp.init(allow_banned)", "works"),
    Covered("handle.is_active", "works"),
    Covered("handle.wrap_optimizer", "works"),
    Covered("handle.scale_loss", "differs", "works; Apex's last releases refuse it"),
    Covered("handle._disable_casts", "works"),
    Covered("handle._clear_cache", "works"),
    Covered(
        "handle._deactivate",
        "differs",
        "must be called on the thread that `initialize` ran on; also `deactivate`",
    ),
    Covered("handle.has_cache", "works"),
    Covered("handle.cache", "differs", "empty: the copies are torch's"),
    Covered("handle.remove_cache", "works"),
    Covered("handle.verbose", "works"),
    Covered("apex.amp._amp_state.loss_scalers", "works", "`_loss_scale` and `_unskipped` can be set"),
    Covered("apex.amp._amp_state.handle", "differs", "None before O1 and after it, so that scripts can ask"),
    Covered("apex.amp._amp_state.opt_properties", "works"),
    Covered("apex.amp._amp_state.verbosity", "works"),
    Covered("apex.amp._amp_state.hard_override", "works"),
    Covered("apex.amp._amp_state.allow_incoming_model_not_fp32", "works"),
    Covered("apex.amp._amp_state.min_loss_scale", "works"),
    Covered("apex.amp._amp_state.max_loss_scale", "works"),
    Covered("optimizer.step(closure)", "works", "refused, as in Apex"),
    Covered(
        "optimizer._amp_stash",
        "differs",
        "has the lists of parameters and the flags, and none of the kernels",
    ),
    Covered("optimizer._amp_lazy_init", "works", "there is nothing left to do"),
    Covered(
        "optimizer._prepare_amp_backward",
        "differs",
        "does nothing: `scale_loss` keeps earlier gradients apart",
    ),
    Covered("optimizer._master_params_to_model_params", "works"),
    Covered(
        "optimizer._post_amp_backward",
        "absent",
        "leave `scale_loss` without `delay_unscale`, which does the same",
    ),
    # the rules of O1
    Covered(
        "O1: half list",
        "works",
        "on every device, in bf16 too; `scaled_dot_product_attention`, which is younger",
    ),
    Covered("O1: fp32 list", "works"),
    Covered("O1: promotion", "works"),
    Covered("O1: in-place operators", "works"),
    Covered("O1: banned functions", "works", "`binary_cross_entropy` on half raises in Apex's words"),
    Covered("O1: recurrent layers and cells", "works", "packed sequences too"),
    Covered(
        "O1: backward in Python",
        "works",
        "of a `torch.autograd.Function` of one's own, which is cast there too",
    ),
    Covered(
        "O1: other threads",
        "differs",
        "are cast where torch hands autocast on to them (DataParallel, checkpointing), not in threads of one's own",
    ),
    Covered("O1: workers of a DataLoader", "differs", "are not cast: they prepare data, on a CPU"),
    Covered(
        "O1: tensors of other devices", "differs", "are left alone, as Apex left alone what was not on a GPU"
    ),
    Covered(
        "O1: copies of weights",
        "differs",
        "live for one call of an initialised model, and only where gradients are wanted; Apex's outlived changes",
    ),
    # the models of O2
    Covered(
        "model.forward(x) in O2",
        "differs",
        "is not cast: call `model(x)`. Casts are hooks, so that models pickle, copy and replicate",
    ),
    Covered("model.state_dict() in O2", "differs", "holds the masters' values in fp32, not rounded ones"),
    Covered("model.load_state_dict() in O2", "differs", "reaches the masters, which Apex left stale"),
    Covered("optimizer.load_state_dict() in O2", "differs", "keeps momentum in fp32"),
    # apex.parallel
    Covered(
        "apex.parallel.DistributedDataParallel",
        "differs",
        "is torch's with Apex's arguments; those that torch has nothing for are ignored or refused",
    ),
    Covered("apex.parallel.Reducer", "works"),
    Covered("apex.parallel.SyncBatchNorm", "differs", "is torch's; `fuse_relu` is refused"),
    Covered("apex.parallel.convert_syncbn_model", "works"),
    Covered("apex.parallel.create_syncbn_process_group", "works"),
    Covered("apex.parallel.LARC", "works"),
    Covered("apex.parallel.multiproc", "absent", "start processes with `torchrun`"),
    # apex.optimizers
    Covered(
        "apex.optimizers.FusedAdam",
        "differs",
        "is `torch.optim.Adam`; `bias_correction=False` and `master_weights` are refused. Apex's states load",
    ),
    Covered("apex.optimizers.FusedSGD", "differs", "is `torch.optim.SGD`; `wd_after_momentum` is refused"),
    Covered(
        "apex.optimizers.FusedAdagrad", "differs", "is `torch.optim.Adagrad`; `adagrad_w_mode` is refused"
    ),
    Covered("apex.optimizers.FusedLAMB", "absent", _LAMB),
    Covered("apex.optimizers.FusedMixedPrecisionLamb", "absent", _LAMB),
    Covered(
        "apex.optimizers.FusedNovoGrad",
        "absent",
        "torch has no NovoGrad; use `torch.optim.AdamW`, or the `NvNovoGrad` of timm",
    ),
    Covered("apex.optimizers.FP16_Optimizer", "absent", _MASTERS),
    # apex.normalization
    Covered("apex.normalization.FusedLayerNorm", "works", "`memory_efficient` is ignored"),
    Covered("apex.normalization.FusedRMSNorm", "works", "`memory_efficient` is ignored"),
    Covered("apex.normalization.MixedFusedLayerNorm", "works"),
    Covered("apex.normalization.MixedFusedRMSNorm", "works"),
    *(
        Covered(f"apex.normalization.{name}", "works")
        for name in (
            "fused_layer_norm",
            "fused_layer_norm_affine",
            "mixed_dtype_fused_layer_norm_affine",
            "fused_rms_norm",
            "fused_rms_norm_affine",
            "mixed_dtype_fused_rms_norm_affine",
            "manual_rms_norm",
        )
    ),
    # what examples import with a star
    *(
        Covered(f"apex.fp16_utils.{name}", "works")
        for name in (
            "network_to_half",
            "BN_convert_float",
            "convert_module",
            "convert_network",
            "prep_param_lists",
            "model_grads_to_master_grads",
            "master_params_to_model_params",
            "clip_grad_norm",
            "to_python_float",
            "tofp16",
        )
    ),
    *(
        Covered(f"apex.fp16_utils.{name}", "absent", _MASTERS)
        for name in ("FP16_Optimizer", "FP16Model", "LossScaler", "DynamicLossScaler")
    ),
    Covered(
        "apex.multi_tensor_apply.multi_tensor_applier",
        "differs",
        "can be imported and says `available = False`; Apex's kernels are not there",
    ),
    Covered("apex.contrib", "absent", "torch has most of it: `scaled_dot_product_attention`, `torch.optim`"),
    Covered("apex.RNN", "absent", "use the recurrent layers of `torch.nn`"),
    Covered("apex.reparameterization", "absent", "use `torch.nn.utils.parametrizations`"),
    Covered("apex.transformer", "absent", "use `torch.distributed.tensor.parallel`"),
    Covered("apex.mlp.MLP", "absent", "use `torch.nn.Sequential` of `Linear` layers"),
)
"""By the order in which a reader meets them."""
