"""Update rules of optimizers that torch does not have. They work on lists of tensors, in few kernels.

All tensors of a call must be on one device, and all tensors of a list must have one dtype. bf16 and fp16 tensors are
converted to fp32, and rounded once, at the end. The host does not wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from castwise.core import _torch
from castwise.core.plans.formats import LOW_DTYPES

__all__ = ["lamb_", "novograd_", "total_norm"]


@torch.no_grad()
def lamb_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    divisor: Tensor,
    bias_correction: bool = True,
    grad_averaging: bool = True,
    decoupled: bool = True,
    adapt_all: bool = False,
) -> None:
    """Make one step of LAMB, an optimizer that scales Adam's direction in proportion to the norm of each tensor.

    Parameters and running means are changed in place.

    Args:
        params: The parameters, of any shapes. They are updated.
        grads: One gradient for each parameter. They are not changed.
        means: The running means of the gradients. They are updated.
        squares: The running means of the squared gradients. They are updated.
        lr: The learning rate.
        betas: The decay factors of the two running means.
        eps: A number that is added to the root of the mean square.
        weight_decay: The coefficient with which the parameter is added to the direction.
        step: The number of this step, from 1.
        divisor: A 0-dim tensor by which gradients are divided first, to clip them.
        bias_correction: Whether the means are divided by the sum of their weights.
        grad_averaging: Whether a gradient has the weight ``1 - betas[0]`` in its mean. Otherwise the weight is 1.
        decoupled: Whether weight decay is added to the direction. Otherwise it is added to the gradient.
        adapt_all: Whether the direction is also scaled if ``weight_decay`` is 0.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2019. The options
    are those of Apex.
    """
    beta1, beta2 = betas
    weights, mean, square, grad = map(_wide, (params, means, squares, grads))
    grad = [*_torch.tensors.each_div(grad, divisor.to(grad[0]))]
    if weight_decay and not decoupled:
        _torch.tensors.each_add_(grad, weights, alpha=weight_decay)
    _torch.tensors.each_mul_(mean, beta1)
    _torch.tensors.each_add_(mean, grad, alpha=1 - beta1 if grad_averaging else 1.0)
    _torch.tensors.each_mul_(square, beta2)
    _torch.tensors.each_addcmul_(square, grad, grad, 1 - beta2)
    root = _torch.tensors.each_div(square, 1 - beta2**step if bias_correction else 1.0)
    _torch.tensors.each_sqrt_(root)
    _torch.tensors.each_add_(root, eps)
    direction = _torch.tensors.each_div(mean, 1 - beta1**step if bias_correction else 1.0)
    _torch.tensors.each_div_(direction, root)
    if weight_decay and decoupled:
        _torch.tensors.each_add_(direction, weights, alpha=weight_decay)
    if weight_decay or adapt_all:
        length, size = (
            torch.stack(_torch.tensors.each_norm(weights)),
            torch.stack(_torch.tensors.each_norm(direction)),
        )
        ratio = torch.where((length != 0) & (size != 0), length / size, 1.0)
        _torch.tensors.each_mul_(direction, ratio.unbind())
    _torch.tensors.each_add_(weights, direction, alpha=-lr)
    _round_to((params, weights), (means, mean), (squares, square))


@torch.no_grad()
def novograd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    means: Sequence[Tensor],
    norms: Sequence[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    order: float = 2.0,
    bias_correction: bool = True,
    grad_averaging: bool = True,
    inside: bool = False,
) -> None:
    """Make one step of the optimizer NovoGrad, which divides each tensor's gradient by a running norm of its gradients.

    Parameters, running means and running norms are changed in place.

    Args:
        params: The parameters, of any shapes. They are updated.
        grads: One gradient for each parameter. They are not changed.
        means: The running means of the gradients. They are updated.
        norms: The running norms of the gradients, as 0-dim tensors. They are updated. With ``order`` 2 a running norm
            is the root of a mean square, otherwise a mean. It must start as the norm of the first gradient, or as
            zero.
        lr: The learning rate.
        betas: The decay factors of the running means and of the running norms.
        eps: A number that is added to the norm.
        weight_decay: The coefficient with which the parameter is added to the direction.
        step: The number of this step, from 1.
        order: The order of the norm, 2 or infinity.
        bias_correction: Whether means and norms are divided by the sum of their weights, as if they had started at
            zero.
        grad_averaging: Whether a gradient has the weight ``1 - betas[0]`` in its mean. Otherwise the weight is 1.
        inside: Whether gradients are divided by the norm, and weight decay is added, before the mean is taken, as in
            the paper. Otherwise this is done to the mean.

    Source: Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments for Training of Deep
    Networks", 2019. The options are those of Apex.
    """
    beta1, beta2 = betas
    weights, mean, grad = map(_wide, (params, means, grads))
    new = torch.stack(_torch.tensors.each_norm(grad, order))
    old = torch.stack([norm.to(new.dtype) for norm in norms])
    if order == 2:
        norm = (beta2 * old**2 + (1 - beta2) * new**2).sqrt()
    else:
        norm = beta2 * old + (1 - beta2) * new
    _torch.tensors.copy_each(list(norms), list(norm.unbind()))
    correction1 = 1 - beta1**step if bias_correction else 1.0
    correction2 = (1 - beta2**step) ** 0.5 if bias_correction else 1.0
    divisors = (norm / correction2 + eps).unbind()
    weight = 1 - beta1 if grad_averaging else 1.0
    _torch.tensors.each_mul_(mean, beta1)
    if inside:
        grad = [*_torch.tensors.each_div(grad, divisors)]
        if weight_decay:
            _torch.tensors.each_add_(grad, weights, alpha=weight_decay)
        _torch.tensors.each_add_(mean, grad, alpha=weight)
        _torch.tensors.each_add_(weights, mean, alpha=-lr / correction1)
    else:
        _torch.tensors.each_add_(mean, grad, alpha=weight)
        direction = _torch.tensors.each_div(mean, correction1)
        _torch.tensors.each_div_(direction, divisors)
        if weight_decay:
            _torch.tensors.each_add_(direction, weights, alpha=weight_decay)
        _torch.tensors.each_add_(weights, direction, alpha=-lr)
    _round_to((params, weights), (means, mean))


@torch.no_grad()
def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all elements of several tensors together.

    The result is a 0-dim tensor on the device of the first tensor. It is computed in fp64 if any tensor is fp64,
    otherwise in fp32.
    """
    dtype = torch.float64 if any(t.dtype is torch.float64 for t in tensors) else torch.float32
    norms = _torch.tensors.each_norm(list(tensors), 2, dtype)
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return total


def _wide(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.float() if t.dtype in LOW_DTYPES else t for t in tensors]


def _round_to(*lists: tuple[Sequence[Tensor], Sequence[Tensor]]) -> None:
    """Copy each value in fp32 into its target, which rounds it. Pairs of a target with itself are skipped."""
    pairs = [pair for each in lists for pair in zip(*each, strict=True) if pair[0] is not pair[1]]
    _torch.tensors.copy_each([target for target, _ in pairs], [value for _, value in pairs])
