"""Work out what a plan means for each module and tensor of a model, as a :class:`Resolution`.

A resolution holds the format in which each module computes and the dtype in which each tensor is to be stored. It also
lists the borders, which are the modules at whose entry and exit tensors are cast. :func:`resolve` computes the
resolution once and does not change the model. The code that applies the plan reads the resolution, and
``print(amp.resolve(model))`` shows it.

The regions of a plan are named by patterns. A pattern is a glob over module paths, in which ``*`` stays within one
level and ``**`` crosses levels (``encoder.layers.*.norm``, ``**.norm``). Or it is ``type:`` and a glob over the names
of a module's class and its base classes. If several regions match a module, the last one wins. A module that no region
matches belongs to the region of the module around it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from castwise.core import _torch
from castwise.core.casting.kernels import widest_dtype
from castwise.core.model.arrival import is_quantised, is_sealed, widening
from castwise.core.plans import rules
from castwise.core.plans.formats import FORMATS, LOW, LOW_DTYPES
from castwise.core.plans.plan import Plan, Region
from castwise.core.plans.text import matches_path, shown, some
from castwise.errors import PatternError

_WEIGHTED = (
    nn.CrossEntropyLoss, nn.NLLLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.MultiMarginLoss, nn.MultiLabelSoftMarginLoss,
)  # fmt: skip
"""Losses that keep class weights in a buffer."""
_ONE_OPERATOR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


# --- which module belongs to which region --------------------------------------------------------------------


def _hits(region: Region, modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the paths of the modules that a region's pattern matches."""
    glob = region.glob
    if region.is_type:
        of = {name: _kind(module) for name, module in modules.items()}
        kinds = {kind for kind in set(of.values()) if _matches_kind(glob, kind)}
        return [name for name, kind in of.items() if kind in kinds]
    whole = len(glob) > 1 and set(glob) == {"*"}
    return [name for name in modules if (matches_path(glob, name) if name else whole)]


def _kind(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, or for a scripted or traced module the torch.nn class that it was made from."""
    if isinstance(module, torch.jit.ScriptModule):
        made_from = getattr(nn, getattr(module, "original_name", ""), None)
        if isinstance(made_from, type) and issubclass(made_from, nn.Module):
            return made_from
    return type(module)


def _matches_kind(glob: str, kind: type[nn.Module]) -> bool:
    names = (cls.__name__ for cls in kind.__mro__ if cls not in (nn.Module, object))
    return any(fnmatch.fnmatchcase(name, glob) for name in names)


def _never_called(model: nn.Module) -> dict[nn.Module, str]:
    """Return the modules whose forward does not run in normal use, each with the reason as text for an error message."""
    found: dict[nn.Module, str] = {}
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            code = "runs scripted code, in which torch calls no hooks; name a module around it, or do not script it"
            inner = list(module.modules())[1:]
            found.update(dict.fromkeys(inner, f"the module that it is in was scripted or traced, and {code}"))
            if not _torch.hooks.takes_hooks(module):
                found[module] = f"a scripted module {code}"
        if isinstance(module, _CONTAINERS):
            found[module] = f"{type(module).__name__} is a container; name its children with '.*'"
        if isinstance(module, nn.MultiheadAttention):
            found[module.out_proj] = (
                "nn.MultiheadAttention uses the weights of out_proj without calling it; name the attention module itself"
            )
    return found


def assign(model: nn.Module, regions: Iterable[Region]) -> dict[str, Region]:
    """Find the modules that the patterns of regions match, and return the region of each by its path.

    If several regions match a module, the last one wins. Modules inside a matching module are not listed.

    Raises:
        PatternError: A pattern matches no module, or no module whose forward runs. Patterns that begin with ``type:``
            may match nothing: a plan that keeps ``type:BatchNorm*`` in fp32 is valid for a model without BatchNorm.
    """
    modules = dict(model.named_modules())
    silent = _never_called(model)
    out: dict[str, Region] = {}
    for region in regions:
        hits = _hits(region, modules)
        if not hits and not region.is_type:
            last = region.glob.split(".")[-1].strip("*")
            near = [name for name in modules if last and last in name][:5]
            hint = f" Modules with a similar name: {', '.join(near)}." if near else ""
            raise PatternError(
                f"Region({shown(region.pattern)}): no module of {type(model).__name__} matches.{hint} A '*' stays within one "
                f"level and '**' crosses levels; print(dict(model.named_modules()).keys()) lists the paths. If {type(model).__name__} "
                "is one stage of a pipeline and the module may be in another stage, call prepare(..., part=True)."
            )
        quiet = [name for name in hits if modules[name] in silent]
        if region.compute is not None and quiet:
            reason = silent[modules[quiet[0]]]
            if len(quiet) == len(hits):
                raise PatternError(
                    f"Region({shown(region.pattern)}): matches only {quiet[0]!r}, whose forward never runs: {reason}."
                )
            if not all(isinstance(modules[name], _CONTAINERS) for name in quiet):
                warnings.warn(
                    f"Region({shown(region.pattern)}) does not reach {', '.join(quiet)}: {reason}.",
                    stacklevel=5,
                )
        for name in hits:
            out[name] = region
    return out


def region_of(path: str, assigned: Mapping[str, Region]) -> Region | None:
    """Return the region to which the module at ``path`` belongs, given the result of :func:`assign`.

    This is the module's own region, or else that of the nearest module around it that has one, or None.
    """
    while path and path not in assigned:
        path = path.rpartition(".")[0]
    return assigned.get(path)


def only_matching(plan: Plan, model: nn.Module) -> Plan:
    """Return the plan without the regions whose path pattern matches no module of the model.

    The modules of such a region are probably in other pipeline stages.
    """
    modules = dict(model.named_modules())
    here = tuple(region for region in plan.regions if region.is_type or _hits(region, modules))
    return dataclasses.replace(plan, regions=here)


def casts_operators(plan: Plan, compute: str) -> bool:
    """Whether a plan autocasts operators in the parts of a model that compute in the format ``compute``."""
    return compute in LOW and (plan.rules != "none" or bool(plan.ops))


# --- the resolution ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModulePlan:
    """The effect of a plan on one module.

    Attributes:
        path: Module path; empty for the model itself.
        kind: Name of the module's class.
        compute: The format in which the module computes.
        stored: The storage format of the parameters that the module itself holds, or None to leave them as they are.
        around: The compute format of the module that encloses this one, if tensors are cast at the entry and exit of
            this module. None if they are not, and for the model itself.
        meets: Whether the module's operators combine a tensor of its own that is wider than ``compute``, such as an
            fp32 table, with bf16 or fp16 tensors. Operators that refuse such a mixture then run in ``compute``.
    """

    path: str
    kind: str
    compute: str
    stored: str | None
    around: str | None = None
    meets: bool = False


@dataclass(frozen=True)
class Resolution:
    """The effect of a plan on a model.

    Attributes:
        plan: The plan. For one stage of a pipeline, it lacks the regions of other stages.
        places: The effect on each module, by module path, in the model's order.
        storage: The new dtype of each parameter and buffer that must change, by path.
        kept: Paths of floating buffers that keep their dtype although the parameters of their module are stored in bf16
            or fp16.
        mixes: Whether operators are autocast and may get bf16 or fp16 weights where their rules expect fp32 weights.
        left_low: Paths of trained parameters that arrived in bf16 or fp16 and keep that format, although the plan does
            not require it.
        sealed: Paths of quantised parameters, which are left unchanged. The other tensors of their modules stay
            unchanged too.
    """

    plan: Plan
    places: Mapping[str, ModulePlan]
    storage: Mapping[str, torch.dtype]
    kept: tuple[str, ...]
    mixes: bool = False
    left_low: tuple[str, ...] = ()
    sealed: tuple[str, ...] = ()

    @property
    def borders(self) -> tuple[ModulePlan, ...]:
        """The modules at whose entry and exit tensors are cast, without the model itself.

        They have a format of their own, or hold a table that is wider than the format in which they compute.
        """
        return tuple(place for place in self.places.values() if place.around is not None)

    def stored_in(self, path: str) -> torch.dtype | None:
        """Return the dtype in which the parameters that a module itself holds are stored: bf16, fp16, or None for fp32.

        None also means that the plan leaves the parameters as they are.
        """
        stored = self.places[path].stored
        return FORMATS[stored].dtype if stored in LOW else None

    def __str__(self) -> str:
        root = self.places[""]
        rows = [("module", "runs in", "its parameters", "border")]
        told: dict[str, ModulePlan] = {}
        for path, place in self.places.items():
            above = self.places.get(path.rpartition(".")[0], root)
            if not path or place.around or (place.compute, place.stored) != (above.compute, above.stored):
                told[path] = place
        for place in told.values():
            border = "whole model" if place is root else f"in {place.around}" if place.around else ""
            border += ", with its own operator rules" if place.meets else ""
            rows.append((place.path or place.kind, place.compute, place.stored or "as they are", border))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        count = Counter(str(dtype).removeprefix("torch.") for dtype in self.storage.values())
        stored = ", ".join(f"{number} in {name}" for name, number in count.items()) or "none"
        lines += [f"tensors to be stored in another format: {stored}"]
        if self.kept:
            lines += [f"buffers kept in their own format: {', '.join(self.kept)}"]
        if self.left_low:
            lines += [
                f"trained parameters left in the low format in which they arrived: {some(self.left_low, 5)}"
            ]
        if self.sealed:
            lines += [f"quantised, and left unchanged: {some(self.sealed, 5)}"]
        return "\n".join([f"{self.plan} on {root.kind}", *lines])


def resolve(
    plan: Plan,
    model: nn.Module,
    device_type: str = "cpu",
    *,
    part: bool = False,
    inference: bool = False,
    widen: Any = False,
) -> Resolution:
    """Determine the effect of a plan on a model, and change neither.

    A parameter shared by several regions takes the widest of their formats. fp64 tensors stay fp64. Quantised modules
    stay as they are.

    Buffers are state, so they keep their dtype unless the pattern of a region with ``params`` matches their very
    module. There is one exception: if operators are not autocast, buffers that are clearly constants are stored in the
    format of the parameters, as ``module.half()`` does. These are the tensors that a parametrization keeps beside its
    weight, the class weights of losses, and masks that are added to attention scores.

    If operators are not autocast, most refuse an fp32 tensor together with bf16 or fp16 ones. A module that keeps an
    fp32 buffer of two or more dimensions, a table, runs all the same:

    - Without parameters inside, the module runs in fp32.
    - With parameters inside, inputs and outputs of the module are cast (:attr:`ModulePlan.meets`), and so are those of
      its children that hold bf16 or fp16 parameters.
    - Inputs and outputs of a parametrization other than torch's norms are cast too, since the operators that it calls
      may lack bf16 and fp16 kernels.
    - A module without ``forward`` has no inputs or outputs that could be cast. Its buffers are stored in the format of
      the parameters too, unless they hold only whole numbers.

    A parameter that stays in fp32 because a module in an fp32 region shares it, as under tied embeddings, is such a table
    for the other modules that use it.

    Tensors that are bf16 or fp16 before the plan is applied stay so, also where those of an fp32 model would stay fp32.
    There are three exceptions, in which they are stored in fp32: ``widen`` asks for it, the plan stores parameters in
    the other one of bf16 and fp16, or the tensor is in an fp32 region of a plan that computes in bf16 or fp16.

    A BatchNorm keeps its parameters in the format of its statistics, since torch has no kernel for bf16 or fp16
    parameters with fp32 statistics. If operators are autocast, a layer under spectral_norm keeps its weight in the
    format of its vectors.

    Args:
        plan: The plan.
        model: The model, before or during training.
        device_type: Device of the model.
        part: Whether the model is one stage of a pipeline, so that regions that match nothing belong to other stages.
        inference: Whether to store weights in the plan's compute format in layers that compute in it anyway.
        widen: Which of the tensors that arrived in bf16 or fp16 are stored in fp32, where the plan does not store them
            in its compute format: one of ``arrival.WIDEN``.

    Raises:
        PatternError: A pattern is not allowed for this model, see :func:`assign`.
    """
    if part:
        plan = only_matching(plan, model)
    assigned = assign(model, plan.regions)
    silent = _never_called(model)
    layers = _lower_layers(plan, device_type) if inference else {}
    places: dict[str, ModulePlan] = {}
    owners: dict[str, Region | None] = {}
    wanted: dict[Tensor, list[torch.dtype]] = {}
    kept = []
    planned: set[Tensor] = set()
    sealed: list[str] = []
    wide = widening(model, widen)

    def as_is(path: str, tensor: Tensor) -> torch.dtype:
        # operators refuse two low formats together and, in an fp32 region, a low weight
        other = plan.stores_low and tensor.dtype is not plan.compute_dtype
        fp32_region = plan.compute in LOW and places[path].compute == "fp32"
        meets = tensor.dtype in LOW_DTYPES and (other or fp32_region)
        return torch.float32 if meets or wide(path, tensor) else tensor.dtype

    modules = dict(model.named_modules())
    for path, module in modules.items():
        above = path.rpartition(".")[0]
        region = assigned.get(path)
        owners[path] = region if region is not None else owners[above] if path else None
        compute, around = (places[above].compute, None) if path else (plan.compute, None)
        if region is not None and region.compute is not None and module not in silent:
            compute, around = region.compute, compute if path else None
        stored = _stored_format(plan, owners[path])
        explicit = region.params if region is not None else None
        low_operators = casts_operators(plan, compute)
        if (
            explicit is None
            and stored in LOW
            and (_has_statistics(module) or (low_operators and _has_vectors(module)))
        ):
            stored = None
        quantised = is_quantised(module)
        if quantised and explicit is None:
            stored = None
        places[path] = ModulePlan(path, type(module).__name__, compute, stored, around)
        dtype = FORMATS[stored].dtype if stored else None
        fused = plan.rules != "native" and any(
            isinstance(parent, nn.TransformerEncoderLayer) for parent in _parents(path, modules)
        )
        low_names = () if owners[path] is not None or fused else _names_of(module, layers)
        for name, tensor in module.named_parameters(recurse=False):
            if is_sealed(tensor) or (quantised and dtype is None and not tensor.requires_grad):
                sealed.append(f"{path}.{name}" if path else name)
            elif tensor.is_floating_point() and tensor.dtype is not torch.float64:  # fp64 is never cast
                found = as_is(path, tensor)
                once = name in low_names and found in (torch.float32, plan.compute_dtype)
                low = plan.compute_dtype if once else None
                wanted.setdefault(tensor, []).append(dtype or low or found)
                if dtype or low:
                    planned.add(tensor)
        for name, tensor in module.named_buffers(recurse=False):
            if not tensor.is_floating_point() or tensor.dtype is torch.float64:
                continue
            if is_sealed(tensor) or (quantised and dtype is None):
                continue
            follows = dtype is not None and (
                explicit is not None
                or _is_wider(dtype, tensor.dtype)
                or (not low_operators and _is_constant(path, module, tensor))
            )
            wanted.setdefault(tensor, []).append(
                dtype if follows and dtype is not None else as_is(path, tensor)
            )
            if dtype is not None and not follows and _is_wider(tensor.dtype, dtype):
                kept.append(f"{path}.{name}" if path else name)
    storage = {}
    for name, tensor in named_tensors(model):
        widest = widest_dtype(wanted.get(tensor, ()))
        if widest is not None and widest is not tensor.dtype:
            storage[name] = widest
    left_low = tuple(
        name
        for name, p in model.named_parameters()
        if p.requires_grad and p in wanted and storage.get(name, p.dtype) in LOW_DTYPES and p not in planned
    )
    _place_tables(plan, modules, assigned, places, storage)
    return Resolution(
        plan, places, storage, tuple(kept), _mixes(plan, modules, places), left_low, tuple(sealed)
    )


def _mixes(plan: Plan, modules: Mapping[str, nn.Module], places: Mapping[str, ModulePlan]) -> bool:
    """Whether autocast operators may get bf16 or fp16 weights where their rules expect fp32 weights.

    That is so if modules other than linear layers, convolutions and embeddings store parameters in bf16 or fp16.
    """
    return any(casts_operators(plan, place.compute) for place in places.values()) and any(
        places[path].stored in LOW
        and not _is_one_operator(module)
        and next(module.parameters(recurse=False), None) is not None
        for path, module in modules.items()
    )


def _place_tables(
    plan: Plan,
    modules: Mapping[str, nn.Module],
    assigned: Mapping[str, Region],
    places: dict[str, ModulePlan],
    storage: dict[str, torch.dtype],
) -> None:
    """Find modules that hold a table wider than the format in which they compute, and cast at their entry and exit.

    A table is a buffer of two or more dimensions, or a parameter that a module in fp32 shares. ``places`` is changed so that inputs and outputs of these modules are
    cast. Only modules whose operators are not autocast need this.
    """
    paths = {module: path for path, module in modules.items()}
    final = {tensor: storage.get(name, tensor.dtype) for name, tensor in named_tensors(modules[""])}
    for path, module in modules.items():
        place = places[path]
        if place.compute not in LOW or casts_operators(plan, place.compute) or not _runs(module):
            continue
        if not plan.stores_low and place.stored not in LOW:
            continue  # there are no low tensors to combine it with
        low = FORMATS[place.compute].dtype
        if _factorises(module) and place.stored in LOW and place.around is None:
            places[path] = dataclasses.replace(place, around=place.compute, meets=True)
            continue
        mine = [b for b in module.buffers(recurse=False) if b.dim() > 1 and b.is_floating_point()]
        if place.stored in LOW:  # a parameter is wider then if another module shares it
            mine += [p for p in module.parameters(recurse=False) if p.is_floating_point()]
        if not any(_is_wider(final[tensor], low) for tensor in mine):
            continue
        around = place.around or (place.compute if path else None)
        if next(module.parameters(), None) is None and (
            path not in assigned or assigned[path].compute is None
        ):
            places[path] = dataclasses.replace(place, compute="fp32", stored=None, around=around)
            for inner in list(module.modules())[1:]:
                below = places[paths[inner]]
                outer = places[below.path.rpartition(".")[0]].compute
                if below.around is not None:
                    places[below.path] = dataclasses.replace(below, around=outer)
                elif outer == "fp32":
                    places[below.path] = dataclasses.replace(below, compute="fp32", stored=None)
                    if below.path not in assigned:
                        for name, _ in inner.named_buffers(below.path, recurse=False):
                            storage.pop(name, None)
            continue
        places[path] = dataclasses.replace(place, around=around, meets=True)
        for child in _called_in(module):
            below = places[paths[child]]
            if below.around is None and any(
                _is_wider(torch.float32, final[p]) for p in child.parameters() if p.is_floating_point()
            ):
                places[below.path] = dataclasses.replace(below, around=place.compute)


def _runs(module: nn.Module) -> bool:
    """Whether a module has its own ``forward``, at whose start and end tensors can be cast."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _called_in(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that a module's ``forward`` probably calls: its children, and the children of its containers.

    Linear layers and convolutions are left out, since their one operator accepts an fp32 input. Embeddings are left out
    too, since they take no floating input.
    """
    for child in module.children():
        if isinstance(child, _CONTAINERS):
            yield from _called_in(child)
        elif not _is_one_operator(child):
            yield child


def _factorises(module: nn.Module) -> bool:
    """Whether a parametrization may need operators that have no bf16 or fp16 kernels, as ``orthogonal`` does."""
    return isinstance(module, ParametrizationList) and not all(
        isinstance(one, _torch.calls.NORM_PARAMETRIZATIONS) for one in module
    )


def _is_one_operator(module: nn.Module) -> bool:
    return type(module) in _ONE_OPERATOR and not hasattr(module, "parametrizations")


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer of a model once, with the first of its paths."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _stored_format(plan: Plan, region: Region | None) -> str | None:
    """Return the format in which a plan stores the parameters of a region, or None if it leaves them unchanged."""
    if region is not None:
        if region.params is not None:
            return region.params
        if region.compute is not None and (
            plan.params == "compute" or region.compute == "fp64" or plan.rules == "none"
        ):
            return region.compute
    return plan.compute if plan.params == "compute" else None


def _is_wider(one: torch.dtype, other: torch.dtype) -> bool:
    return torch.finfo(one).bits > torch.finfo(other).bits


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None


def _has_vectors(module: nn.Module) -> bool:
    """Whether a layer computes its weight from parameters and from vectors that it keeps as buffers, as by spectral_norm."""
    reparametrized = isinstance(module, ParametrizationList) or hasattr(module, "weight_orig")
    return reparametrized and any(b.is_floating_point() and b.dim() == 1 for b in module.buffers())


def _parents(path: str, modules: Mapping[str, nn.Module]) -> Iterator[nn.Module]:
    while path:
        path = path.rpartition(".")[0]
        yield modules[path]


def _is_constant(path: str, module: nn.Module, buffer: Tensor) -> bool:
    """Whether a buffer is clearly a constant that is combined with activations.

    Such buffers are tensors that a parametrization keeps (the vectors of spectral_norm), class weights of losses, and
    additive masks. In a module without ``forward``, tables that do not hold only whole numbers count too. All other
    buffers may be state, counters or positions.
    """
    if "parametrizations" in path.split(".") or hasattr(module, "weight_orig"):
        return True  # the vectors of spectral_norm are multiplied by the weight
    if isinstance(module, _WEIGHTED):
        return True
    if not _torch.tensors.is_dense(buffer) or buffer.dim() < 2 or buffer.is_meta or buffer.numel() == 0:
        return False
    values = buffer.detach()
    if not _runs(module):
        return not bool((values == values.round()).logical_and(values.isfinite()).all())
    lowest, highest = values.aminmax()
    mask = highest == 0 and (lowest.isneginf() or -65504 <= lowest < 0)
    return bool(mask and (values == lowest).logical_or(values == 0).all())


def has_constants(model: nn.Module) -> bool:
    """Whether a model has buffers that are stored in the format of its parameters where operators are not autocast.

    :func:`resolve` says which buffers these are.
    """
    return any(
        buffer.is_floating_point() and _is_constant(path, module, buffer)
        for path, module in model.named_modules()
        for buffer in module.buffers(recurse=False)
    )


# --- weights for inference -----------------------------------------------------------------------------------

_OPERATORS: Final[tuple[tuple[type[nn.Module], tuple[str, ...]], ...]] = (
    (nn.Linear, ("linear",)),
    (nn.Bilinear, ("bilinear",)),
    (nn.Conv1d, ("conv1d",)),
    (nn.Conv2d, ("conv2d",)),
    (nn.Conv3d, ("conv3d",)),
    (nn.ConvTranspose1d, ("conv_transpose1d",)),
    (nn.ConvTranspose2d, ("conv_transpose2d",)),
    (nn.ConvTranspose3d, ("conv_transpose3d",)),
    (nn.MultiheadAttention, ("linear", "bmm", "scaled_dot_product_attention")),
    (nn.RNNBase, ("lstm", "gru", "rnn_tanh", "rnn_relu")),
    (nn.LSTMCell, ("lstm_cell",)),
    (nn.GRUCell, ("gru_cell",)),
)
"""Classes of layers, each with the names of the operators that take the layer's weights."""


def _lower_layers(plan: Plan, device_type: str) -> dict[type[nn.Module], bool]:
    """Return for each class of layer whether a plan runs all of its operators in the plan's compute format on a device.

    The result is empty if the plan does not autocast, or stores parameters in bf16 or fp16 anyway.
    """
    if not plan.autocasts or plan.stores_low:
        return {}
    table = rules.base_table(plan.rules, device_type)
    chosen = {op: row.rule for op, row in table.items()} | dict(plan.ops)
    if plan.rules == "native":  # torch.autocast casts for them internally, by operators of cuDNN and oneDNN
        chosen = {"lstm": "lower", "gru": "lower", "rnn_tanh": "lower", "rnn_relu": "lower", **chosen}
    return {
        kind: all(chosen.get(op) in ("lower", "unfused") for op in operators)
        for kind, operators in _OPERATORS
    }


def _names_of(module: nn.Module, layers: Mapping[type[nn.Module], bool]) -> Iterable[str]:
    """Return the names of a layer's parameters that can be stored in bf16 or fp16 for inference.

    There are none if a parametrization computes the layer's weight.
    """
    for kind, lower in layers.items():
        if isinstance(module, kind):
            whole = not (hasattr(module, "parametrizations") or hasattr(module, "weight_orig"))
            return [name for name, _ in module.named_parameters(recurse=False)] if lower and whole else ()
    return ()
