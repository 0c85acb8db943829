"""FusedLAMB and FusedNovoGrad, compared with their rules written by hand, one tensor at a time in fp64."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from castwise.bridges.compat.apex import amp, optimizers

SHAPES = [(3, 4), (5,), (), (2, 1, 3)]
STEPS = 4


def start(seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return weights; the last tensor is all zeros, so its norm is 0."""
    draw = torch.Generator().manual_seed(seed)
    weights = [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in SHAPES]
    return [*weights[:-1], torch.zeros(SHAPES[-1], dtype=dtype)]


def gradients(seed: int = 1, dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    """Return a list of gradients per step, with norms below and above 1."""
    draw = torch.Generator().manual_seed(seed)
    sizes = (0.01, 3.0, 0.1, 1.0)
    return [
        [size * torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in SHAPES]
        for size in sizes[:STEPS]
    ]


def lamb_by_hand(
    weights: list[Tensor],
    steps: list[list[Tensor]],
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    adam_w_mode: bool = True,
    grad_averaging: bool = True,
    max_grad_norm: float = 1.0,
    use_nvlamb: bool = False,
) -> list[Tensor]:
    """Apply Algorithm 2 of You et al. 2019, with Apex's options; Apex first clips by the norm of all gradients."""
    weights = [w.clone() for w in weights]
    m, v = [torch.zeros_like(w) for w in weights], [torch.zeros_like(w) for w in weights]
    (beta1, beta2), decay = betas, weight_decay
    for t, grads in enumerate(steps, 1):
        norm = math.sqrt(sum(float((g * g).sum()) for g in grads))
        for i, g in enumerate(grads):
            if norm > max_grad_norm:
                g = g * max_grad_norm / norm
            if not adam_w_mode:
                g = g + decay * weights[i]
            m[i] = beta1 * m[i] + ((1 - beta1) if grad_averaging else 1) * g
            v[i] = beta2 * v[i] + (1 - beta2) * g**2
            mean = m[i] / (1 - beta1**t) if bias_correction else m[i]
            square = v[i] / (1 - beta2**t) if bias_correction else v[i]
            r = mean / (square.sqrt() + eps)
            if adam_w_mode:
                r = r + decay * weights[i]
            length, size = float(weights[i].norm()), float(r.norm())
            adapts = (use_nvlamb or decay != 0) and length != 0 and size != 0
            weights[i] = weights[i] - lr * (length / size if adapts else 1.0) * r
    return weights


def novograd_by_hand(
    weights: list[Tensor],
    steps: list[list[Tensor]],
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    reg_inside_moment: bool = False,
    grad_averaging: bool = True,
    norm_type: int = 2,
    init_zero: bool = False,
) -> list[Tensor]:
    """Apply Algorithm 1 of Ginsburg et al. 2019 with Apex's ``v``: the root of the paper's, or a mean of maxima."""
    weights = [w.clone() for w in weights]
    m, v = [torch.zeros_like(w) for w in weights], [0.0] * len(weights)
    (beta1, beta2), decay = betas, weight_decay
    for t, grads in enumerate(steps, 1):
        for i, g in enumerate(grads):
            norm = float(g.norm()) if norm_type == 2 else float(g.abs().max())
            before = norm if t == 1 and not init_zero else v[i]
            if norm_type == 2:
                v[i] = math.sqrt(beta2 * before**2 + (1 - beta2) * norm**2)
            else:
                v[i] = beta2 * before + (1 - beta2) * norm
            divisor = (v[i] / math.sqrt(1 - beta2**t) if bias_correction else v[i]) + eps
            if reg_inside_moment:
                g = g / divisor + decay * weights[i]
            m[i] = beta1 * m[i] + ((1 - beta1) if grad_averaging else 1) * g
            mean = m[i] / (1 - beta1**t) if bias_correction else m[i]
            update = mean if reg_inside_moment else mean / divisor + decay * weights[i]
            weights[i] = weights[i] - lr * update
    return weights


def run(optimizer: torch.optim.Optimizer, steps: list[list[Tensor]]) -> list[Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for grads in steps:
        for p, g in zip(params, grads, strict=True):
            p.grad = g.to(p.dtype).clone()
        optimizer.step()
    return [p.detach() for p in params]


def made(kind: str, weights: list[Tensor], **options: Any) -> Any:
    return getattr(optimizers, kind)([nn.Parameter(w.clone()) for w in weights], **options)


def combinations(**choices: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    for chosen in itertools.product(*choices.values()):
        yield dict(zip(choices, chosen, strict=True))


BOTH = (False, True)
KINDS = {"FusedLAMB": lamb_by_hand, "FusedNovoGrad": novograd_by_hand}


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("max_grad_norm", [0.5, math.inf])
def test_lamb_is_the_published_rule_under_every_option(weight_decay: float, max_grad_norm: float) -> None:
    common = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": weight_decay, "max_grad_norm": max_grad_norm}  # fmt: skip
    found = set()
    for options in combinations(bias_correction=BOTH, adam_w_mode=BOTH, grad_averaging=BOTH, use_nvlamb=BOTH):
        got = run(made("FusedLAMB", start(), **common, **options), gradients())
        want = lamb_by_hand(start(), gradients(), **common, **options)
        for mine, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
        found.add(round(float(got[0][0, 0]), 9))
    # Some options have no effect: adam_w_mode without decay; use_nvlamb with decay, when all tensors adapt anyway;
    # and grad_averaging where the update is rescaled to the norm of its tensor.
    assert len(found) == 6


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("norm_type", [0, 2])
def test_novograd_is_the_published_rule_under_every_option(weight_decay: float, norm_type: int) -> None:
    common = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": weight_decay, "norm_type": norm_type}  # fmt: skip
    found = set()
    for options in combinations(
        bias_correction=BOTH, reg_inside_moment=BOTH, grad_averaging=BOTH, init_zero=BOTH
    ):
        got = run(made("FusedNovoGrad", start(), **common, **options), gradients())
        want = novograd_by_hand(start(), gradients(), **common, **options)
        for mine, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
        found.add(round(float(got[0][0, 0]), 9))
    assert len(found) == 16


def test_defaults_are_apex_s() -> None:
    for kind, by_hand in KINDS.items():
        got = run(made(kind, start()), gradients())
        for mine, theirs in zip(got, by_hand(start(), gradients()), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


def test_novograd_by_the_paper_s_own_words() -> None:
    """The paper keeps second moments instead of norms, has no bias correction and starts from the first gradient."""
    weight, grads = start()[0], [step[0] for step in gradients()]
    m, v = torch.zeros_like(weight), None
    for g in grads:
        v = float((g * g).sum()) if v is None else 0.98 * v + 0.02 * float((g * g).sum())
        m = 0.95 * m + (g / (math.sqrt(v) + 1e-8) + 0.001 * weight)
        weight = weight - 0.01 * m
    optimizer = made(
        "FusedNovoGrad", start()[:1], lr=0.01, betas=(0.95, 0.98), weight_decay=0.001, bias_correction=False,
        reg_inside_moment=True, grad_averaging=False,
    )  # fmt: skip
    torch.testing.assert_close(run(optimizer, [[g] for g in grads])[0], weight, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_groups_have_options_of_their_own_and_parameters_without_gradients_wait(kind: str) -> None:
    weights, steps = start(), gradients()
    params = [nn.Parameter(w.clone()) for w in weights]
    optimizer = getattr(optimizers, kind)(
        [{"params": params[:2]}, {"params": params[2:], "lr": 0.5, "weight_decay": 0.2}], lr=0.1
    )
    idle = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer.param_groups[0]["params"].append(idle)
    for grads in steps:
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
    decay = 0.01 if kind == "FusedLAMB" else 0.0
    want = KINDS[kind](weights, steps, lr=0.1, weight_decay=decay)[:2]
    want += KINDS[kind](weights, steps, lr=0.5, weight_decay=0.2)[
        2:
    ]  # clipping uses the norm over all groups
    for p, w in zip(params, want, strict=True):
        torch.testing.assert_close(p.detach(), w, rtol=1e-12, atol=1e-14)
    assert torch.equal(idle.detach(), torch.ones(2, dtype=torch.float64))
    assert idle not in optimizer.state
    assert [group["step"] for group in optimizer.param_groups] == [STEPS, STEPS]


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_of_half_parameters_only_the_results_are_rounded(kind: str, low: torch.dtype) -> None:
    weights, steps = start(dtype=low), gradients(dtype=low)[:1]
    got = run(made(kind, weights, lr=0.1, weight_decay=0.1), steps)
    want = run(made(kind, [w.float() for w in weights], lr=0.1, weight_decay=0.1), steps)
    assert all(torch.equal(mine, theirs.to(low)) for mine, theirs in zip(got, want, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_formats_may_be_mixed(kind: str) -> None:
    """Each parameter is updated in its own format; clipping uses the norm of all gradients."""
    dtypes = [torch.float64, torch.float32, torch.float16, torch.float32]
    weights = [w.to(d) for w, d in zip(start(), dtypes, strict=True)]
    got = run(made(kind, weights, lr=0.1), gradients())
    assert [p.dtype for p in got] == dtypes
    for p, want, tolerance in zip(
        got, KINDS[kind](start(), gradients(), lr=0.1), (1e-3, 1e-3, 1e-2, 1e-3), strict=True
    ):
        torch.testing.assert_close(p.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_it_is_the_same_rule_and_nothing_waits(kind: str) -> None:
    options = {"lr": 0.1, "weight_decay": 0.1}
    optimizer = made(kind, [w.cuda() for w in start()], **options)
    steps = [[g.cuda() for g in grads] for grads in gradients()]
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = run(optimizer, steps)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for mine, theirs in zip(got, KINDS[kind](start(), gradients(), **options), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-12, atol=1e-14)


def test_what_apex_refuses_is_refused() -> None:
    params = [nn.Parameter(torch.ones(2))]
    for kind in KINDS:
        with pytest.raises(RuntimeError, match=f"{kind} does not support the AMSGrad variant"):
            getattr(optimizers, kind)(params, amsgrad=True)
        optimizer = getattr(optimizers, kind)(params)
        params[0].grad = torch.ones(2).to_sparse()
        with pytest.raises(RuntimeError, match=f"{kind} does not support sparse gradients"):
            optimizer.step()
        params[0].grad = None
        optimizer.step()
    with pytest.raises(RuntimeError, match="norm_type was 1; allowed: 2, or 0 for inf"):
        optimizers.FusedNovoGrad(params, norm_type=1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_closure_is_evaluated_with_gradients(kind: str) -> None:
    p = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = getattr(optimizers, kind)([p], lr=0.1)

    def closure() -> Tensor:
        loss = (p**2).sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == 5.0
    assert bool((p.detach() < torch.tensor([1.0, 2.0])).all())


# --- state --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_goes_on_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    steps = gradients(dtype=dtype)
    optimizer = made(kind, start(dtype=dtype), lr=0.1)
    weights = [w.clone() for w in run(optimizer, steps[:2])]
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    want = run(optimizer, steps[2:])
    file.seek(0)
    again = made(kind, weights, lr=0.5)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert all(torch.equal(a, b) for a, b in zip(run(again, steps[2:]), want, strict=True))


@pytest.mark.parametrize("how", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (
            "FusedLAMB",
            {"adam_w_mode": False, "use_nvlamb": True, "set_grad_none": False, "max_grad_norm": 0.1},
        ),
        ("FusedNovoGrad", {"reg_inside_moment": True, "set_grad_none": False}),
        ("FusedAdam", {"set_grad_none": False}),
    ],
)
def test_copies_keep_what_the_optimizer_was_told(how: Any, kind: str, options: dict[str, Any]) -> None:
    optimizer = made(kind, start(), weight_decay=0.1, **options)
    run(optimizer, gradients()[:1])
    again = how(optimizer)
    both = [run(each, gradients()) for each in (optimizer, again)]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*both, strict=True))
    again.zero_grad()
    assert not any(bool(p.grad.any()) for p in again.param_groups[0]["params"])


def test_a_norm_beyond_fp16_survives_loading() -> None:
    p = nn.Parameter(torch.zeros(100, dtype=torch.float16))
    optimizer = optimizers.FusedNovoGrad([p])
    p.grad = torch.full_like(p, 60000.0)
    optimizer.step()
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    (entry,) = optimizer.state.values()
    assert entry["exp_avg"].dtype is torch.float16
    assert float(entry["exp_avg_sq"]) == pytest.approx(60000.0 * 10, rel=1e-3)


def test_a_state_of_apex_s_fused_novograd_loads() -> None:
    """Apex keeps the norms in the group, with fp16 parameters first; parameters without gradients so far have none."""
    dtypes = [torch.float32, torch.float16, torch.float32, torch.float16]
    params = [nn.Parameter(w.to(d)) for w, d in zip(start(), dtypes, strict=True)]
    optimizer = optimizers.FusedNovoGrad(params, lr=0.1)
    held = (0, 1, 3)
    group = {
        "lr": 0.5, "bias_correction": True, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.0,
        "grad_averaging": True, "norm_type": 2, "init_zero": False, "step": 7, "params": [0, 1, 2, 3],
        "exp_avg_sq": [torch.tensor([2.0, 3.0]), torch.tensor([4.0])],
    }  # fmt: skip
    optimizer.load_state_dict({
        "state": {i: {"exp_avg": torch.full_like(params[i], 0.25).detach()} for i in held},
        "param_groups": [group],
    })
    assert [float(optimizer.state[params[i]]["exp_avg_sq"]) for i in held] == [4.0, 2.0, 3.0]
    assert len(group["exp_avg_sq"]) == 2  # the given state is unchanged
    before = params[0].detach().clone()
    params[0].grad = torch.full_like(params[0], 0.5)
    optimizer.step()
    norm = math.sqrt(0.95 * 4.0**2 + 0.05 * float(params[0].grad.norm()) ** 2) / math.sqrt(1 - 0.95**8)
    mean = (0.8 * 0.25 + 0.2 * 0.5) / (1 - 0.8**8)
    torch.testing.assert_close(params[0].detach(), before - 0.5 * mean / (norm + 1e-3))


def test_a_state_of_apex_s_fused_lamb_loads() -> None:
    p = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = optimizers.FusedLAMB([p])
    group = {
        "lr": 0.5, "bias_correction": True, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.0,
        "grad_averaging": True, "max_grad_norm": 1.0, "step": 7, "params": [0],
    }  # fmt: skip
    state = {0: {"exp_avg": torch.tensor([0.1, 0.2]), "exp_avg_sq": torch.tensor([0.3, 0.4])}}
    optimizer.load_state_dict({"state": copy.deepcopy(state), "param_groups": [group]})
    p.grad = torch.tensor([0.3, -0.4])
    optimizer.step()
    mean = (0.8 * state[0]["exp_avg"] + 0.2 * p.grad) / (1 - 0.8**8)
    square = (0.95 * state[0]["exp_avg_sq"] + 0.05 * p.grad**2) / (1 - 0.95**8)
    want = torch.tensor([3.0, 4.0]) - 0.5 * mean / (square.sqrt() + 1e-3)
    torch.testing.assert_close(p.detach(), want)


# --- under amp ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("kind", KINDS)
def test_amp_trains_by_the_rule_on_fp32_weights(kind: str, level: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = getattr(optimizers, kind)(model.parameters(), lr=0.05)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    weights, steps = [p.detach().double() for p in amp.master_params(optimizer)], []
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.randn(8, 4)).pow(2).mean() * factor, optimizer) as scaled:
            scaled.backward()
        if math.isfinite(factor):
            steps.append([p.grad.double() for p in amp.master_params(optimizer)])
        optimizer.step()
    masters = list(amp.master_params(optimizer))
    assert {p.dtype for p in masters} == {torch.float32}
    for p, want in zip(masters, KINDS[kind](weights, steps, lr=0.05), strict=True):
        torch.testing.assert_close(p.detach().double(), want, rtol=2e-6, atol=2e-6)
    assert all(torch.equal(p, m.to(p.dtype)) for p, m in zip(model.parameters(), masters, strict=True))
