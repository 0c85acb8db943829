"""Keep, compare or replace the tensors that enter or leave module calls in one forward and backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from castwise.lab.inspect.crossings import Backward, Forward, Point, is_plain
from castwise.lab.inspect.runs import Difference, difference
from castwise.lab.passes.observers import Call


class Key(NamedTuple):
    """Identifies a tensor that enters or leaves a module call, or its gradient.

    Attributes:
        point: Where the tensor enters or leaves.
        back: Whether the gradient is meant.
        hit: Which gradient at this point is meant, from 0: there are several if the loss calls autograd itself.
    """

    point: Point
    back: bool = False
    hit: int = 0

    @property
    def is_made_by_callee(self) -> bool:
        """Whether the tensor is the gradient of an input, which the module call itself produces in backward."""
        return self.back and self.point.side == "in"


@dataclass
class Look:
    """Keeps, compares or replaces the tensors that enter or leave module calls in one forward and backward pass.

    Attributes:
        scale: The loss scale of the pass; gradients are kept and compared unscaled.
        reference: Tensors of another pass to compare with.
        keep: Whether to keep the tensors.
        put: A function that gets a key and the unscaled tensor, and returns a replacement, or None for no replacement.
        kept: Copies of the tensors, if ``keep`` is set.
        errors: Differences of the tensors from the reference.
        dtypes: Dtypes of the tensors.
        shapes: Shapes of the tensors.
    """

    scale: float = 1.0
    reference: Mapping[Key, Tensor] | None = None
    keep: bool = False
    put: Callable[[Key, Tensor], Tensor | None] = lambda *_: None
    kept: dict[Key, Tensor] = field(default_factory=dict)
    errors: dict[Key, Difference | None] = field(default_factory=dict)
    dtypes: dict[Key, torch.dtype] = field(default_factory=dict)
    shapes: dict[Key, torch.Size] = field(default_factory=dict)
    _hits: Counter[Point] = field(default_factory=Counter)

    def begin(self, scale: float | None) -> tuple[Forward, Backward]:
        """Clear all results before a forward and backward pass with a loss scale.

        Returns:
            The functions that get each tensor and each gradient in this pass.
        """
        for seen in (self.kept, self.errors, self.dtypes, self.shapes, self._hits):
            seen.clear()
        self.scale = scale or 1.0
        return self.forward, self.backward

    def at_the_end(self) -> float | None:
        """Return the largest error of any output of the model; None if no output was compared."""
        root = Call("", 0)
        errors = [
            error.norm
            for key, error in self.errors.items()
            if error is not None and not key.back and key.point.call == root and key.point.side == "out"
        ]
        return max(errors, default=None)

    def forward(self, point: Point, tensor: Tensor, again: bool) -> Tensor | None:
        """Keep or compare a tensor in forward, and return its replacement; ``again`` marks a recomputation, which is not kept."""
        key = Key(point)
        if not again:
            self._see(key, tensor)
        return self._given(key, tensor, tensor, 1.0)

    def backward(self, point: Point, gradient: Tensor) -> Tensor | None:
        """Keep or compare a gradient in backward, and return its replacement."""
        key = Key(point, True, self._hits[point])
        self._hits[point] += 1
        if not is_plain(gradient):
            return None
        unscaled = gradient if self.scale == 1.0 else gradient.float() / self.scale
        self._see(key, unscaled)
        self.dtypes[key] = gradient.dtype
        return self._given(key, gradient, unscaled, self.scale)

    def _see(self, key: Key, tensor: Tensor) -> None:
        self.dtypes[key], self.shapes[key] = tensor.dtype, tensor.shape
        if self.keep:
            self.kept[key] = tensor.clone()
        if self.reference is not None and key in self.reference:
            self.errors[key] = difference(tensor, self.reference[key])

    def _given(self, key: Key, tensor: Tensor, unscaled: Tensor, scale: float) -> Tensor | None:
        given = self.put(key, unscaled)
        if given is None or given.shape != tensor.shape:
            return None
        if (
            given.is_complex() is not tensor.is_complex()
            or given.is_floating_point() is not tensor.is_floating_point()
        ):
            return None
        return torch.empty_like(tensor).copy_(given if scale == 1.0 else given * scale)
