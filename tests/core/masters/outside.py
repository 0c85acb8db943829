"""Optimizers as their libraries write them, which change weights outside of ``step``."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from tests.here import DEVICE


class SAM(Optimizer):
    """SAM as in the widely copied davda54/sam: climbs, lets the caller evaluate there, returns and steps."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, data: bool = True, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)
        self.data = data

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        norms = [p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None]
        scale = self.param_groups[0]["rho"] / (torch.stack(norms).norm() + 1e-12)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if self.data:
                    self.state[p]["old_p"] = p.data.clone()
                    p.data.add_(p.grad * scale)
                else:
                    self.state[p]["e_w"] = e_w = p.grad * scale
                    p.add_(e_w)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if self.data:
                    p.data = self.state[p]["old_p"]
                else:
                    p.sub_(self.state[p]["e_w"])
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()


class ScheduleFree(Optimizer):
    """SGD as in the package ``schedulefree``: ``train()`` and ``eval()`` switch the weights between two points."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": True})

    @torch.no_grad()
    def _switch(self, train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not train:
                weight = 1 - group["beta"] if train else 1 - 1 / group["beta"]
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(end=self.state[p]["z"], weight=weight)
                group["train_mode"] = train

    def train(self) -> None:
        self._switch(True)

    def eval(self) -> None:
        self._switch(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(end=z, weight=1 / group["k"])
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["k"]) - 1))
                z.sub_(p.grad, alpha=group["lr"])


class Lookahead:
    """An outer optimizer that does not derive from ``Optimizer``: every k steps it writes slow weights through
    ``p.data``.
    """

    def __init__(self, base: Optimizer, k: int = 2, alpha: float = 0.5, replace: bool = False) -> None:
        self.base, self.k, self.alpha, self.replace, self.count = base, k, alpha, replace, 0
        self.param_groups = base.param_groups
        self.slow: dict[int, torch.Tensor] = {}

    def step(self) -> None:
        self.base.step()
        self.count += 1
        if self.count % self.k:
            return
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.slow.setdefault(id(p), torch.zeros_like(p.data))
                slow += self.alpha * (p.data - slow)
                if self.replace:
                    p.data = slow.clone()
                else:
                    p.data.copy_(slow)

    def zero_grad(self) -> None:
        self.base.zero_grad()


class AdaHessian(Optimizer):
    """The Hessian's diagonal by Hutchinson's method: differentiates the gradients by the parameters it holds."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.generator = torch.Generator(DEVICE).manual_seed(0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        grads = [p.grad for p in params]
        signs = [torch.randint(0, 2, p.size(), generator=self.generator) * 2.0 - 1.0 for p in params]
        products = torch.autograd.grad(grads, params, grad_outputs=signs, only_inputs=True)
        for p, grad, sign, product in zip(params, grads, signs, products, strict=True):
            p.addcdiv_(grad, (product * sign).abs().sqrt().add_(1e-2), value=-self.param_groups[0]["lr"])
