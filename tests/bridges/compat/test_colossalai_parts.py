"""Other parts that scripts import, under the original paths: schedulers, optimizers, a registry, comparisons."""

from __future__ import annotations

import functools
import math
import pickle
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from castwise.bridges.compat import colossalai
from castwise.bridges.compat.colossalai.amp import AMP_TYPE, convert_to_amp
from castwise.bridges.compat.colossalai.nn.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmupLR,
)
from castwise.bridges.compat.colossalai.nn.optimizer import FusedAdam, FusedSGD, HybridAdam
from castwise.bridges.compat.colossalai.utils import free_port, set_to_cuda
from castwise.errors import PlanError, UnknownNameError
from tests.fresh import run_python

RATES = (0.8, 0.1)


# --- rate schedulers --------------------------------------------------------------------------------------------


def two_groups() -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in RATES])


def rates_of(make: Any, steps: int = 14) -> list[list[float]]:
    """Return the learning rates of each step; the second half is from a scheduler loaded from the first one's state."""
    scheduler = make(two_groups())
    seen = []
    for step in range(steps):
        if step == steps // 2:
            scheduler = resumed(make, scheduler)
        seen.append(scheduler.get_last_lr())
        scheduler.optimizer.step()
        scheduler.step()
    return seen


def resumed(make: Any, scheduler: Any) -> Any:
    again = make(two_groups())
    again.load_state_dict(pickle.loads(pickle.dumps(scheduler.state_dict())))
    for group, rate in zip(again.optimizer.param_groups, again.get_last_lr(), strict=True):
        group["lr"] = rate  # normally loaded with the optimizer's state
    return again


def cosine(share: float, rate: float, end: float) -> float:
    return end + (rate - end) * (1 + math.cos(math.pi * share)) / 2


@pytest.mark.parametrize(
    ("total", "warmup", "end"), [(10, 0, 0.0), (12, 3, 0.01), (30, 1, 0.0), (9, 8, 0.02)]
)
def test_the_cosine_after_a_warm_up(total: int, warmup: int, end: float) -> None:
    """After the warm-up the schedule equals torch's cosine, also beyond the last step."""
    make = functools.partial(CosineAnnealingWarmupLR, total_steps=total, warmup_steps=warmup, eta_min=end)
    for step, seen in enumerate(rates_of(make)):
        share = (step - warmup) / (total - warmup)
        want = [(step + 1) / warmup * rate if step < warmup else cosine(share, rate, end) for rate in RATES]
        assert seen == pytest.approx(want), step
    after = rates_of(make)[warmup:]
    period = total - warmup
    torchs = rates_of(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, period, eta_min=end))
    assert all(a == pytest.approx(b) for a, b in zip(after, torchs, strict=False))


def test_torchs_schedulers_under_colossal_ais_arguments() -> None:
    schedulers = torch.optim.lr_scheduler
    assert rates_of(lambda o: CosineAnnealingLR(o, total_steps=9, eta_min=0.1)) == rates_of(
        lambda o: schedulers.CosineAnnealingLR(o, T_max=9, eta_min=0.1)
    )


def test_rates_that_cannot_be() -> None:
    with pytest.raises(
        PlanError, match=r"CosineAnnealingWarmupLR\(warmup_steps=-1\): needs warmup_steps >= 0"
    ):
        CosineAnnealingWarmupLR(two_groups(), 10, -1)
    scheduler = CosineAnnealingWarmupLR(two_groups(), total_steps=2, warmup_steps=4, eta_min=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns if the optimizer made no step
        for _ in range(5):
            scheduler.step()
    assert scheduler.get_last_lr() == [0.01, 0.01]


# --- optimizers -------------------------------------------------------------------------------------------------


def stepped(make: Any, steps: int = 5) -> list[Tensor]:
    """Return the weights of a small model, converted to fp64, after some steps with prescribed gradients."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3))]
    optimizer = make(params)
    for step in range(steps):
        for p in params:
            p.grad = torch.cos(p.detach() * (step + 1))
        optimizer.step()
    return [p.detach().double() for p in params]


def adam_in_fp64(decoupled: bool, lr: float, decay: float, steps: int = 5) -> list[Tensor]:
    """Run published Adam in fp64, with AdamW's decay if ``decoupled``, and return the weights."""
    torch.manual_seed(0)
    params = [torch.randn(4, 3).double(), torch.randn(3).double()]
    states = [(torch.zeros_like(p), torch.zeros_like(p)) for p in params]
    for step in range(steps):
        for p, (mean, square) in zip(params, states, strict=True):
            grad = torch.cos(p * (step + 1))
            if decoupled:
                p.mul_(1 - lr * decay)
            else:
                grad = grad + decay * p
            mean.mul_(0.9).add_(0.1 * grad)
            square.mul_(0.999).add_(0.001 * grad**2)
            bias = (1 - 0.9 ** (step + 1)), (1 - 0.999 ** (step + 1))
            p.sub_(lr * (mean / bias[0]) / ((square / bias[1]).sqrt() + 1e-8))
    return params


@pytest.mark.parametrize("kind", [HybridAdam, FusedAdam])
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_is_the_published_rule_on_torchs_fused_kernel(kind: Any, decoupled: bool) -> None:
    make = functools.partial(kind, lr=0.05, weight_decay=0.1, adamw_mode=decoupled)
    for got, want in zip(stepped(make), adam_in_fp64(decoupled, 0.05, 0.1), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert make([nn.Parameter(torch.zeros(1))]).defaults["fused"] is True


def test_fused_sgd_is_torchs() -> None:
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
    ours = stepped(lambda params: FusedSGD(params, **options))
    torchs = stepped(lambda params: torch.optim.SGD(params, **options))
    assert all(torch.equal(a, b) for a, b in zip(ours, torchs, strict=True))


SCALES = {
    AMP_TYPE.TORCH: {"init_scale": 256.0},
    AMP_TYPE.APEX: {"max_loss_scale": 256.0},
    AMP_TYPE.NAIVE: {"initial_scale": 256.0, "hysteresis": 1},
}


@pytest.mark.parametrize("mode", list(AMP_TYPE))
def test_hybrid_adam_trains_in_every_mode(mode: AMP_TYPE) -> None:
    """The step that overflows changes nothing, and the others train."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    model, optimizer, criterion = convert_to_amp(
        model, HybridAdam(model.parameters(), lr=0.1), nn.functional.mse_loss, mode, SCALES[mode]
    )
    generator = torch.Generator().manual_seed(0)
    losses = []
    for step in range(40):
        x = torch.randn(32, 4, generator=generator)
        optimizer.zero_grad()
        loss = criterion(model(x * (1e7 if step == 3 else 1)).float(), x.sum(1, keepdim=True))
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
    assert optimizer.loss_scale == 128.0
    optimizer.amp.close()


def test_what_the_optimizers_refuse() -> None:
    params = [nn.Parameter(torch.zeros(1))]
    with pytest.raises(PlanError, match=r"HybridAdam\(bias_correction=False\): allowed: True. Leave it out"):
        HybridAdam(params, bias_correction=False)
    with pytest.raises(
        PlanError, match=r"nvme_offload_fraction=0.5\): allowed: 0.0. .* zero = dict\(level=3\)"
    ):
        HybridAdam(params, nvme_offload_fraction=0.5)
    with pytest.raises(PlanError, match=r"FusedAdam\(amsgrad=True\): allowed: False. Use torch.optim.AdamW"):
        FusedAdam(params, amsgrad=True)
    with pytest.raises(PlanError, match=r"FusedSGD\(wd_after_momentum=True\): allowed: False"):
        FusedSGD(params, 0.1, wd_after_momentum=True)


# --- import lines -----------------------------------------------------------------------------------------------


def test_module_paths_of_the_examples(tmp_path: Path) -> None:
    """Names at module paths are the same objects as in their packages; absent names suggest a replacement."""
    code = """
        import castwise.bridges.compat
        castwise.bridges.compat.install("colossalai")

        from colossalai.amp.amp_type import AMP_TYPE
        from colossalai.context.config import Config, ConfigException
        from colossalai.context.parallel_context import ParallelContext
        from colossalai.context.parallel_mode import ParallelMode
        from colossalai.engine.schedule import NonPipelineSchedule
        from colossalai.legacy.context.parallel_mode import ParallelMode as again
        from colossalai.nn import CosineAnnealingLR, FusedSGD, LinearWarmupLR
        from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
        from colossalai.nn.optimizer import FusedAdam, HybridAdam
        from colossalai.registry import LOSSES
        from colossalai.utils.checkpointing import load_checkpoint, save_checkpoint
        from colossalai.utils.common import print_rank_0
        from colossalai.utils.cuda import empty_cache, get_current_device, set_to_cuda, synchronize
        from colossalai.utils.data_sampler import get_dataloader as loader
        from colossalai.utils.memory import report_memory_usage
        from colossalai.utils.timer import MultiTimer, Timer
        import colossalai
        import colossalai.utils.cuda as cuda
        from colossalai import utils
        import castwise.bridges.compat.colossalai.amp.amp_type as ours

        assert AMP_TYPE is colossalai.amp.AMP_TYPE is ours.AMP_TYPE
        assert ParallelMode is again is colossalai.context.ParallelMode
        assert Config is colossalai.context.Config
        assert MultiTimer is utils.MultiTimer and cuda is colossalai.utils.cuda
        assert load_checkpoint is utils.load_checkpoint and loader is utils.get_dataloader
        assert FusedSGD is colossalai.nn.optimizer.FusedSGD

        for line in (
            "from colossalai.amp.naive_amp import NaiveAMPModel",
            "from colossalai.context import seed",
            "from colossalai.context.random import seed",
            "from colossalai.engine.gradient_handler.utils import bucket_allreduce",
            "from colossalai.nn.optimizer import CPUAdam",
            "from colossalai.nn.lr_scheduler import PolynomialLR",
            "from colossalai.nn.layer import Linear",
            "from colossalai.utils.common import clip_grad_norm_fp32",
            "from colossalai.utils.activation_checkpoint import checkpoint",
            "from colossalai.utils.model.colo_init_context import ColoInitContext",
            "from colossalai.testing import parameterize",
            "from colossalai.tensor import ColoTensor",
            "from colossalai.booster.plugin import GeminiPlugin",
            "import colossalai.pipeline.pipelinable",
        ):
            try:
                exec(line)
            except ImportError as error:
                print(error)
            else:
                print(line, "ran")
    """
    said = run_python(textwrap.dedent(code), tmp_path).splitlines()
    for line, alternative in zip(
        said,
        [
            "convert_to_naive_amp", "torch.random.fork_rng", "torch.random.fork_rng", "castwise.Amp", "HybridAdam",
            "torch.optim.lr_scheduler", "parallelize_module", "engine.amp.clip_grad_norm_", "torch.utils.checkpoint",
            "torch.device('meta')", "pytest", "torch.distributed.tensor", "castwise.Amp(plan).prepare", "pipelining",
        ],
        strict=True,
    ):  # fmt: skip
        assert alternative in line


# --- registry and small functions ------------------------------------------------------------------


def test_a_registry_holds_what_is_registered() -> None:
    registry = colossalai.registry.Registry("LOSSES")

    @registry.register_module
    class Contrast(nn.Module):
        pass

    assert registry.has("Contrast")
    assert registry.get_module("Contrast") is Contrast
    with pytest.raises(UnknownNameError, match="LOSSES has no 'CrossEntropyLoss'; it has Contrast"):
        registry.get_module("CrossEntropyLoss")


def test_small_questions() -> None:
    assert 1024 <= free_port() < 2**16
    one, two = nn.Linear(1, 1), nn.Linear(1, 1)
    assert set_to_cuda(one) is one
    assert set_to_cuda([one]) is one
    assert set_to_cuda([one, two]) == [one, two]
    colossalai.utils.empty_cache()
    colossalai.utils.set_seed(3)
    drawn = torch.rand(2)
    colossalai.utils.set_seed(3)
    assert torch.equal(drawn, torch.rand(2))
