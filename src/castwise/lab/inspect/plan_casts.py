"""What a plan casts of a model, learned from a run under it: which of its tensors are low, and which stay in fp32."""

from __future__ import annotations

from torch import Tensor

from castwise.core.plans.formats import LOW_DTYPES, get_format
from castwise.lab.inspect.watch import AtCall, Kind, Look, Site, Watch

_MIXING = (" batch_norm", " group_norm", " instance_norm", " layer_norm", " rms_norm")
"""Functions that take fp32 parameters beside a low input as they are."""
_POLES = frozenset({
    *(f"input 1 of {name}" for name in ("div", "div_", "true_divide", "true_divide_", "divide", "divide_")),
    *(f"input 0 of {name}" for name in ("__rtruediv__", "__rdiv__", "reciprocal", "rsqrt", "sqrt", "log", "log2", "log10")),
})  # fmt: skip
"""What must not become 0: the result is infinite then, or its gradient."""


class PlanCasts:
    """What a plan casts of a model, learned from runs under it.

    Attributes:
        kept: Sites of results that are wider than the plan's low formats.
        cast: Sites of inputs that are wide and are cast at their use.
        poles: Sites of low inputs that a function takes the quotient, the root or the logarithm of.
        formats: By module path the low formats of its results, by name.
    """

    def __init__(self) -> None:
        self.kept: set[Site] = set()
        self.cast: set[Site] = set()
        self.poles: set[Site] = set()
        self.formats: dict[str, set[str]] = {}
        self._parameters: dict[Site, bool] = {}

    def learning(self) -> Watch:
        """A watch that learns from the passes that it sees."""

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
        """Whether the plan keeps in fp32 what comes from a site."""
        if kind in ("weights", "weight gradients", "updates"):
            return not self._parameters.get(site, True)
        return site in self.kept

    def watch(self, look: Look, at_call: AtCall | None = None) -> Watch:
        """A watch that looks at inputs too where they are cast at their use."""
        return Watch(look, inputs=self.cast.__contains__, at_call=at_call)
