"""Other parts of Apex that scripts import, and ``import apex`` itself."""

from __future__ import annotations

import importlib
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from castwise.bridges import compat
from castwise.bridges.compat import apex
from castwise.bridges.compat.apex import fp16_utils, multi_tensor_apply, normalization, optimizers, parallel
from tests.fresh import run_python

# --- import apex --------------------------------------------------------------------------------------------

IMAGENET = """
    import castwise.bridges.compat
    assert castwise.bridges.compat.install() == ("apex", "colossalai")
    from apex.parallel import DistributedDataParallel as DDP
    from apex.fp16_utils import *
    from apex import amp, optimizers
    from apex.multi_tensor_apply import multi_tensor_applier
    from apex.parallel.LARC import LARC
"""


def test_the_imports_of_apex_s_example_are_served(tmp_path: Path) -> None:
    code = """
        import apex, apex.amp, apex.amp._amp_state, castwise.bridges.compat.apex.amp, torch
        from apex.amp._amp_state import _amp_state
        assert amp is apex.amp is castwise.bridges.compat.apex.amp
        assert amp._amp_state is _amp_state
        assert apex.parallel.LARC is apex.parallel.LARC.LARC is LARC
        assert amp.__spec__.name == amp.__name__ == "castwise.bridges.compat.apex.amp"
        assert issubclass(DDP, torch.nn.parallel.DistributedDataParallel)
        assert to_python_float(torch.ones(1)) == 1.0
        assert not multi_tensor_applier.available
        castwise.bridges.compat.uninstall()
        try:
            import apex
        except ModuleNotFoundError:
            print("gone")
    """
    assert run_python(textwrap.dedent(IMAGENET) + textwrap.dedent(code), tmp_path, strict=True) == "gone\n"


def test_a_real_apex_stays_if_it_has_amp(tmp_path: Path) -> None:
    code = "import castwise.bridges.compat, apex; print(castwise.bridges.compat.install('apex'), apex.__file__.count('castwise'))"
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").touch()
    assert (
        run_python("import castwise.bridges.compat; print(castwise.bridges.compat.install('apex'))", tmp_path)
        == "('apex',)\n"
    )
    (tmp_path / "apex" / "amp.py").touch()
    assert run_python(code, tmp_path) == "() 0\n"


def test_modules_that_are_missing_say_what_to_use() -> None:
    assert "apex" not in sys.modules
    compat.install("apex")
    try:
        with pytest.raises(
            ModuleNotFoundError, match=r"No module named 'apex.RNN': .*recurrent layers of torch.nn"
        ):
            importlib.import_module("apex.RNN")
        with pytest.raises(
            ModuleNotFoundError, match=r"'apex.contrib': .*cross_entropy, which has label_smoothing"
        ):
            importlib.import_module("apex.contrib.xentropy.softmax_xentropy")
        with pytest.raises(ModuleNotFoundError, match=r"'apex.contrib': .*torch.nn.utils.clip_grad_norm_"):
            from apex.contrib.clip_grad import clip_grad_norm_  # type: ignore[import-not-found]  # noqa: F401
        with pytest.raises(ModuleNotFoundError, match=r"'apex.unheard_of': .*docs/compat.md"):
            importlib.import_module("apex.unheard_of")
        with pytest.raises(ImportError, match=r"FusedMixedPrecisionLamb.*use FusedLAMB with O2"):
            from apex.optimizers import FusedMixedPrecisionLamb  # type: ignore[import-not-found]  # noqa: F401
    finally:
        compat.uninstall()
    assert "apex" not in sys.modules
    with pytest.raises(ValueError, match="allowed: apex"):
        compat.install("torch")


DEEP = {
    "apex.amp.frontend": "initialize",
    "apex.amp.handle": "scale_loss",
    "apex.amp.scaler": "LossScaler",
    "apex.fp16_utils.fp16util": "network_to_half",
    "apex.multi_tensor_apply.multi_tensor_apply": "MultiTensorApply",
    "apex.normalization.fused_layer_norm": "MixedFusedRMSNorm",
    "apex.optimizers.fused_adagrad": "FusedAdagrad",
    "apex.optimizers.fused_adam": "FusedAdam",
    "apex.optimizers.fused_lamb": "FusedLAMB",
    "apex.optimizers.fused_novograd": "FusedNovoGrad",
    "apex.optimizers.fused_sgd": "FusedSGD",
    "apex.parallel.distributed": "DistributedDataParallel",
    "apex.parallel.optimized_sync_batchnorm": "SyncBatchNorm",
    "apex.parallel.sync_batchnorm": "SyncBatchNorm",
}
"""Submodules of Apex's packages, with a name that scripts import from each."""


@pytest.mark.parametrize("first", [True, False])
def test_deep_paths_lead_to_what_the_packages_have(first: bool) -> None:
    """This holds whether the submodule or its package is imported first."""
    compat.install("apex")
    try:
        for path, name in DEEP.items():
            package = path.rpartition(".")[0]
            modules = [
                importlib.import_module(each) for each in ((path, package) if first else (package, path))
            ]
            held = [getattr(module, name) for module in modules if hasattr(module, name)]
            assert (
                getattr(importlib.import_module(f"castwise.bridges.compat.{path}"), name)
                is held[0]
                is held[-1]
            )
        assert (
            importlib.import_module("apex.normalization.fused_layer_norm") is normalization.fused_layer_norm
        )
        with pytest.raises(
            ModuleNotFoundError, match=r"'apex.fp16_utils.fp16_optimizer': .*O2 of amp.initialize"
        ):
            importlib.import_module("apex.fp16_utils.fp16_optimizer")
    finally:
        compat.uninstall()


def test_what_is_missing_is_no_attribute_and_an_import_says_what_to_use() -> None:
    assert hasattr(apex.optimizers, "FusedLAMB")
    for holder, name in (
        (apex, "RNN"),
        (apex.optimizers, "FusedMixedPrecisionLamb"),
        (apex.optimizers, "unheard_of"),
        (fp16_utils, "FP16_Optimizer"),
        (fp16_utils.fp16util, "FP16Model"),
    ):
        assert not hasattr(holder, name)
        assert getattr(holder, name, None) is None
    with pytest.raises(AttributeError, match=r"FusedMixedPrecisionLamb'\. Instead: use FusedLAMB with O2"):
        apex.optimizers.FusedMixedPrecisionLamb  # noqa: B018 - the access is the test
    for line, said in (
        (
            "from castwise.bridges.compat.apex.optimizers import FusedMixedPrecisionLamb",
            "Instead: use FusedLAMB with O2",
        ),
        (
            "from castwise.bridges.compat.apex import amp, RNN",
            "Instead: use the recurrent layers of torch.nn",
        ),
        (
            "from castwise.bridges.compat.apex.fp16_utils.fp16util import FP16Model",
            "Instead: O2 of amp.initialize",
        ),
        ("from castwise.bridges.compat.apex.optimizers import unheard_of", "cannot import name 'unheard_of'"),
    ):
        with pytest.raises(ImportError, match=said):
            exec(line)


# --- optimizers ---------------------------------------------------------------------------------------------


def updates(make: Any, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Return weights after three steps with known gradients."""
    draw = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(n, generator=draw, dtype=dtype)) for n in (3, 4)]
    optimizer = make(params)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape, generator=draw, dtype=dtype)
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize(
    ("ours", "torch_s"),
    [
        (
            lambda p: optimizers.FusedAdam(p, lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1),
            lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1),
        ),
        (
            lambda p: optimizers.FusedAdam(p, 0.1, adam_w_mode=False, weight_decay=0.1),
            lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.1),
        ),
        (
            lambda p: optimizers.FusedSGD(p, 0.1, 0.9, 0.0, 0.1, True),
            lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.1, nesterov=True),
        ),
        (
            lambda p: optimizers.FusedAdagrad(p, 0.1, 1e-3, 0.1),
            lambda p: torch.optim.Adagrad(p, 0.1, eps=1e-3, weight_decay=0.1),
        ),
    ],
)
def test_fused_optimizers_are_torch_s(ours: Any, torch_s: Any) -> None:
    assert all(torch.equal(a, b) for a, b in zip(updates(ours), updates(torch_s), strict=True))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("FusedAdam", {"bias_correction": False}),
        ("FusedAdam", {"amsgrad": True}),
        ("FusedAdam", {"master_weights": True}),
        ("FusedSGD", {"wd_after_momentum": True}),
        ("FusedAdagrad", {"adagrad_w_mode": True}),
    ],
)
def test_arguments_without_an_equivalent_are_refused(kind: str, options: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=f"{kind}"):
        getattr(optimizers, kind)([nn.Parameter(torch.ones(1))], lr=0.1, **options)


def test_zero_grad_follows_set_grad_none() -> None:
    none_by_default = {"FusedAdam", "FusedAdagrad", "FusedLAMB", "FusedNovoGrad"}
    for kind, none in ((kind, kind in none_by_default) for kind in optimizers.__all__):
        for chosen in (None, not none):
            p = nn.Parameter(torch.ones(1))
            optimizer = getattr(optimizers, kind)(
                [p], lr=0.1, **({} if chosen is None else {"set_grad_none": chosen})
            )
            p.grad = torch.ones(1)
            optimizer.zero_grad()
            assert (p.grad is None) == (none if chosen is None else chosen)


def test_a_state_of_apex_s_fused_adam_loads() -> None:
    """Apex counts steps in the group and has other keys there."""
    param = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = optimizers.FusedAdam([param], lr=0.1)
    moments = {"exp_avg": torch.tensor([0.1, 0.2]), "exp_avg_sq": torch.tensor([0.3, 0.4])}
    group = {
        "lr": 0.5,
        "bias_correction": True,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "step": 7,
        "params": [0],
    }
    optimizer.load_state_dict({
        "state": {0: {k: v.clone() for k, v in moments.items()}},
        "param_groups": [group],
    })
    param.grad = torch.tensor([1.0, -1.0])
    optimizer.step()
    mean = 0.9 * moments["exp_avg"] + 0.1 * param.grad
    square = 0.999 * moments["exp_avg_sq"] + 0.001 * param.grad**2
    moved = 0.5 * (mean / (1 - 0.9**8)) / ((square / (1 - 0.999**8)).sqrt() + 1e-8)
    assert torch.allclose(param.detach(), torch.tensor([1.0, 2.0]) - moved)


# --- LARC ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_larc_by_its_formula(clip: bool, decay: float) -> None:
    draw = torch.Generator().manual_seed(0)
    start = [
        torch.randn(4, generator=draw).double(),
        torch.zeros(3).double(),
        torch.randn(2, generator=draw).double(),
    ]
    grads = [torch.randn(4, generator=draw).double(), torch.ones(3).double(), torch.zeros(2).double()]
    params = [nn.Parameter(w.clone()) for w in start]
    optimizer = parallel.LARC(
        torch.optim.SGD(params, 0.1, weight_decay=decay), trust_coefficient=0.02, clip=clip
    )
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    optimizer.step()
    w, g = start[0], grads[0]
    rate = 0.02 * w.norm() / (g.norm() + decay * w.norm() + 1e-8)
    rate = min(rate / 0.1, 1.0) if clip else rate
    assert torch.allclose(params[0].detach(), w - 0.1 * rate * (g + decay * w))
    for index in (1, 2):  # a norm is zero, so the gradient is unscaled
        assert torch.allclose(params[index].detach(), start[index] - 0.1 * grads[index])
    assert optimizer.param_groups[0]["weight_decay"] == decay


# --- normalization ------------------------------------------------------------------------------------------


def test_norms_are_torch_s_and_the_mixed_ones_return_the_weights_format() -> None:
    x = torch.randn(3, 4, 5)
    assert torch.equal(normalization.FusedLayerNorm((4, 5))(x), nn.LayerNorm((4, 5))(x))
    assert torch.equal(
        normalization.FusedLayerNorm(5, elementwise_affine=False)(x),
        nn.LayerNorm(5, elementwise_affine=False)(x),
    )
    assert torch.equal(normalization.FusedRMSNorm(5)(x), nn.RMSNorm(5, 1e-5)(x))
    for kind in (normalization.MixedFusedLayerNorm, normalization.MixedFusedRMSNorm):
        norm = kind(5)
        assert norm(x.half()).dtype is torch.float32
        assert torch.equal(norm(x.half()), kind(5)(x.half().float()))
        assert norm.half()(x).dtype is torch.float16
        with pytest.raises(RuntimeError, match="does not support `elementwise_affine = False`"):
            kind(5, elementwise_affine=False)
    functions = normalization.fused_layer_norm
    weight, bias = torch.randn(5), torch.randn(5)
    assert torch.equal(
        functions.fused_layer_norm_affine(x, weight, bias, 5),
        nn.functional.layer_norm(x, (5,), weight, bias, 1e-6),
    )
    assert torch.equal(functions.fused_rms_norm(x, 5), functions.manual_rms_norm(x, 5, None, 1e-6))
    applied = functions.FusedLayerNormAffineFunction.apply(x, weight, bias, (5,), 1e-6)
    assert torch.equal(applied, functions.fused_layer_norm_affine(x, weight, bias, (5,), 1e-6))
    plain = functions.FusedLayerNormFunction.apply(x, (5,), 1e-6)
    assert torch.equal(plain, functions.fused_layer_norm(x, (5,), 1e-6))


# --- the old helpers ----------------------------------------------------------------------------------------


def test_helpers_of_fp16_utils_make_o2_by_hand() -> None:
    torch.manual_seed(0)
    model = fp16_utils.network_to_half(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    assert {p.dtype for p in model[1][1].parameters()} == {torch.float32}
    params, masters = fp16_utils.prep_param_lists(model)
    model(torch.randn(4, 4)).float().sum().backward()
    fp16_utils.model_grads_to_master_grads(params, masters)
    assert {m.grad.dtype for m in masters} == {torch.float32}
    torch.optim.SGD(masters, 0.5).step()
    fp16_utils.master_params_to_model_params(params, masters)
    assert all(torch.equal(p, m.to(p.dtype)) for p, m in zip(params, masters, strict=True))
    other = fp16_utils.convert_network(
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False), nn.BatchNorm1d(2)), torch.float16
    )
    assert [t.dtype for t in (other[0].weight, other[1].running_mean, other[2].running_mean)] == [
        torch.float16, torch.float16, torch.float32,
    ]  # fmt: skip
    params, (flat,) = fp16_utils.prep_param_lists(nn.Linear(3, 2).half(), flat_master=True)
    for p in params:
        p.grad = torch.ones_like(p)
    fp16_utils.model_grads_to_master_grads(params, [flat], flat_master=True)
    assert torch.equal(flat.grad, torch.ones(8))
    with torch.no_grad():
        flat.fill_(0.5)
    fp16_utils.master_params_to_model_params(params, [flat], flat_master=True)
    assert all(bool((p == 0.5).all()) for p in params)
    assert fp16_utils.to_python_float(torch.tensor([2.0])) == 2.0


def test_apex_s_kernels_say_that_they_are_not_there() -> None:
    with pytest.raises(RuntimeError, match=r"use torch\.nn\.utils\.get_total_norm"):
        multi_tensor_apply.multi_tensor_applier(None, None, [])
