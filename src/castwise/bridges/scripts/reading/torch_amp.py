"""A script's uses of torch.amp, low formats and optimizers, by torch's names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import libcst as cst

from castwise.bridges.scripts.reading.view import View, inside, text


def _names(what: str, module: str) -> Mapping[str, str | None]:
    """The dotted names of an object of torch.amp, with the device of each; None if an argument gives it."""
    homes = {"torch.cuda.amp": "cuda", "torch.cpu.amp": "cpu", "torch.amp": None}
    names = {f"{home}.{name}": at for home, at in homes.items() for name in (what, f"{module}.{what}")}
    return {**names, f"torch.{what}": None}


AUTOCAST = _names("autocast", "autocast_mode")
SCALER = _names("GradScaler", "grad_scaler")
PARAMETERS = ("parameters", "named_parameters")
"""Methods of a model that return its parameters."""
CASTS = {"half": "fp16", "bfloat16": "bf16"}
"""Methods of a model that convert it to a low format."""
FORMATS = {"torch.float16": "fp16", "torch.half": "fp16", "torch.bfloat16": "bf16"}
_FOR_AUTOCAST = ("enabled", "dtype", "cache_enabled")
_FOR_ANY_AUTOCAST = ("device_type", "dtype", "enabled", "cache_enabled")
_FOR_SCALER = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")


@dataclasses.dataclass(frozen=True)
class AmpCall:
    """A call that creates an autocast or a GradScaler of torch.

    Attributes:
        view: The view of its script.
        node: The call.
        origin: Torch's name of the called object.
        given: Its visible arguments, by the names of torch's parameters.
        unseen: Why the other arguments are not visible; empty if all are.
    """

    view: View
    node: cst.Call
    origin: str
    given: Mapping[str, cst.BaseExpression]
    unseen: str

    @property
    def is_autocast(self) -> bool:
        """Whether it is an autocast."""
        return self.origin in AUTOCAST

    @property
    def device(self) -> cst.BaseExpression | str | None:
        """The device type: the given one, or the one that the name implies; None if there is neither."""
        given = self.given.get("device_type", self.given.get("device"))
        return {**AUTOCAST, **SCALER}[self.origin] if given is None else given

    @property
    def device_type(self) -> str | None:
        """The device type, if it is a literal."""
        return text(self.device) if isinstance(self.device, cst.BaseExpression) else self.device

    @property
    def format(self) -> str | None:
        """The format of an autocast, if it is a literal or the default of its device."""
        if "dtype" in self.given or self.unseen:
            return format_of(self.view, self.given.get("dtype"))
        return {"cpu": "bf16", "cuda": "fp16"}.get(self.device_type or "")

    @property
    def is_on(self) -> bool:
        """Whether it is always enabled."""
        enabled = self.given.get("enabled")
        return not self.unseen and (enabled is None or self.view.code(enabled) == "True")


def amp_calls(view: View, names: Mapping[str, str | None]) -> list[AmpCall]:
    """The calls that create an autocast or a GradScaler, for ``names`` of :data:`AUTOCAST` or :data:`SCALER`."""
    return [_read(view, call, origin) for call, origin in view.calls if origin in names]


def _read(view: View, node: cst.Call, origin: str) -> AmpCall:
    if origin in AUTOCAST:
        order: tuple[str, ...] = _FOR_AUTOCAST if AUTOCAST[origin] else _FOR_ANY_AUTOCAST
    else:
        order = _FOR_SCALER if SCALER[origin] else ("device", *_FOR_SCALER)
    given: dict[str, cst.BaseExpression] = {}
    unseen = ""
    for place, each in enumerate(node.args):
        if each.star or (each.keyword is None and place >= len(order)):
            unseen = "the script does not show the arguments of this call"
            break
        given[each.keyword.value if each.keyword else order[place]] = each.value
    if not unseen and set(given) - set(order):
        unseen = "this call has an argument that torch does not have"
    return AmpCall(view, node, origin, given, unseen)


def format_of(view: View, node: cst.BaseExpression | None) -> str | None:
    """``bf16`` or ``fp16`` if an expression is torch's dtype of that name; None for anything else."""
    return None if node is None else FORMATS.get(view.origin(node) or "")


def is_optimizer(origin: str) -> bool:
    """Whether a torch name is an optimizer, by its module."""
    return origin.startswith("torch.optim.") and not origin.startswith((
        "torch.optim.lr_scheduler.",
        "torch.optim.swa_utils.",
    ))


def asked_for_parameters(node: cst.CSTNode) -> list[cst.BaseExpression]:
    """The modules whose parameters an expression uses."""
    calls = [each.func for each in inside(node) if isinstance(each, cst.Call)]
    return [func.value for func in calls if isinstance(func, cst.Attribute) and func.attr.value in PARAMETERS]
