"""Learn from a run under a plan which of a model's tensors the plan casts to low formats, and which stay in fp32."""

from __future__ import annotations

from torch import Tensor

from castwise.core.plans.formats import LOW_DTYPES, get_format
from castwise.lab.inspect.watch import AtCall, Kind, Look, Site, Watch

_MIXING = (" batch_norm", " group_norm", " instance_norm", " layer_norm", " rms_norm")
"""Functions that accept fp32 parameters with a low input without a cast."""
_POLES = frozenset({
    *(f"input 1 of {name}" for name in ("div", "div_", "true_divide", "true_divide_", "divide", "divide_")),
    *(f"input 0 of {name}" for name in ("__rtruediv__", "__rdiv__", "reciprocal", "rsqrt", "sqrt", "log", "log2", "log10")),
})  # fmt: skip
"""Functions whose inputs must not become 0: their result or its gradient would be infinite."""


class PlanCasts:
    """The casts that a plan makes in a model, learned from runs under the plan.

    A tensor is named by its :class:`~castwise.lab.inspect.watch.Site`: the module, the function and the index of the result.

    Attributes:
        kept: Sites of function results that stay in fp32 (or fp64) under the plan.
        cast: Sites of fp32 inputs that are cast to a low format when a function uses them.
        poles: Sites of inputs to a division, root or logarithm that is computed in a low format, and that must not become 0.
        formats: By module path, names of the low formats of the module's results.
    """

    def __init__(self) -> None:
        self.kept: set[Site] = set()
        self.cast: set[Site] = set()
        self.poles: set[Site] = set()
        self.formats: dict[str, set[str]] = {}
        self._parameters: dict[Site, bool] = {}

    def learning(self) -> Watch:
        """Return an observer that learns from the passes it observes which tensors the plan casts."""

        def at_call(inputs: list[tuple[Site, Tensor]], results: list[Tensor]) -> None:
            low = any(t.dtype in LOW_DTYPES for t in results)
            for site, tensor in inputs:
                is_cast = low and not site.name.endswith(_MIXING)
                if (name := watch.parameters.get(id(tensor))) is not None:
                    self._parameters[name] = (
                        self._parameters.get(name, False) or is_cast or tensor.dtype in LOW_DTYPES
                    )
                elif is_cast and tensor.dtype not in LOW_DTYPES:
                    self.cast.add(site)
                if site.name in _POLES and low:
                    self.poles.add(site)

        def look(kind: Kind, site: Site, tensor: Tensor) -> None:
            if kind != "activations":
                return
            if tensor.dtype not in LOW_DTYPES:
                self.kept.add(site)
            elif not site.name.startswith("input "):
                self.formats.setdefault(site.path, set()).add(get_format(tensor.dtype).name)

        watch = Watch(look, at_call=at_call)
        return watch

    def keeps(self, kind: Kind, site: Site) -> bool:
        """Whether the plan keeps a tensor of some kind in fp32; ``site`` names the tensor."""
        if kind in ("weights", "weight gradients", "updates"):
            return not self._parameters.get(site, True)
        return site in self.kept

    def watch(self, look: Look, at_call: AtCall | None = None) -> Watch:
        """Return an observer that gives ``look`` each tensor, and also the inputs that are cast when a function uses them."""
        return Watch(look, inputs=self.cast.__contains__, at_call=at_call)
