"""Apply a plan to a model to get a resolution: the format of each module, the storage of each tensor, the borders.

:func:`resolve` changes nothing and is computed once; all code that applies a plan (borders, storage, shard groups)
reads it. ``print(amp.resolve(model))`` shows it.

Patterns are globs over module paths in which ``*`` stays within one level and ``**`` crosses levels
(``encoder.layers.*.norm``, ``**.norm``), or ``type:`` and a glob over the names of a module's class and its bases.
If several regions match a module the last one wins; a module that none matches belongs to the enclosing region.
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
    """The paths of the modules that a region's pattern matches."""
    glob = region.glob
    if region.is_type:
        of = {name: _kind(module) for name, module in modules.items()}
        kinds = {kind for kind in set(of.values()) if _matches_kind(glob, kind)}
        return [name for name, kind in of.items() if kind in kinds]
    whole = len(glob) > 1 and set(glob) == {"*"}
    return [name for name in modules if (matches_path(glob, name) if name else whole)]


def _kind(module: nn.Module) -> type[nn.Module]:
    """The class of a module; of a scripted or traced one, the torch.nn class it was made from."""
    if isinstance(module, torch.jit.ScriptModule):
        made_from = getattr(nn, getattr(module, "original_name", ""), None)
        if isinstance(made_from, type) and issubclass(made_from, nn.Module):
            return made_from
    return type(module)


def _matches_kind(glob: str, kind: type[nn.Module]) -> bool:
    names = (cls.__name__ for cls in kind.__mro__ if cls not in (nn.Module, object))
    return any(fnmatch.fnmatchcase(name, glob) for name in names)


def _never_called(model: nn.Module) -> dict[nn.Module, str]:
    """Modules whose forward does not normally run, with the reason."""
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
    """The region that matches each named module directly, by path; the last match wins.

    Raises:
        PatternError: A pattern matches no module, or none whose forward runs. Type patterns may match
            nothing: a plan that keeps ``type:BatchNorm*`` in fp32 is valid for a model without one.
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
                "level and '**' crosses levels; print(dict(model.named_modules()).keys()) lists the paths. If {type(model).__name__} "
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
    """The region of a module, from the result of :func:`assign`: the region of the nearest module around it that has one."""
    while path and path not in assigned:
        path = path.rpartition(".")[0]
    return assigned.get(path)


def only_matching(plan: Plan, model: nn.Module) -> Plan:
    """The plan without path regions that match nothing in a model, such as those of other pipeline stages."""
    modules = dict(model.named_modules())
    here = tuple(region for region in plan.regions if region.is_type or _hits(region, modules))
    return dataclasses.replace(plan, regions=here)


def casts_operators(plan: Plan, compute: str) -> bool:
    """Whether the operators of a region with a compute format are autocast."""
    return compute in LOW and (plan.rules != "none" or bool(plan.ops))


# --- the resolution ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModulePlan:
    """The effect of a plan on one module.

    Attributes:
        path: Module path; empty for the model itself.
        kind: Name of the module's class.
        compute: Its compute format.
        stored: Storage format of its direct parameters; None leaves them as they are.
        around: Format outside its border; None without a border, and for the model itself.
        meets: Its operators combine a wider table of the module with low tensors; operators that refuse such a mixture
            run in ``compute``.
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
        plan: The plan; for one stage of a pipeline without the regions of other stages.
        places: Each module, by path, in the model's order.
        storage: Path of a parameter or buffer -> its new dtype, for those that must change.
        kept: Floating buffers that keep their dtype in a module whose parameters are stored low.
        mixes: Operators are cast and may get low weights for which their rules expect fp32.
        left_low: Paths of trained parameters that arrived in bf16 or fp16 and keep that format, although the plan does
            not require it.
        sealed: Paths of parameters that are left alone, with all of their module, since they are quantised.
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
        """The modules with their own format, or with tables wider than their compute format."""
        return tuple(place for place in self.places.values() if place.around is not None)

    def stored_in(self, path: str) -> torch.dtype | None:
        """The low dtype in which a module's direct parameters are stored; None for fp32."""
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
    """Determine the effect of a plan on a model; changes neither.

    A parameter shared by several regions takes the widest of their formats; fp64 stays. Buffers are state: they keep
    their dtype unless a region with ``params`` matches their very module. If operators are not autocast, recognisable
    constants follow the parameters, as in ``module.half()``: tensors that a parametrization keeps beside its weight,
    the class weights of losses, and masks that are added to scores. All other buffers stay.

    Operators refuse an fp32 table with low tensors. So a module with a table of two or more dimensions runs in fp32 if
    no parameters are inside, and otherwise gets its own border (:attr:`ModulePlan.meets`), as do those of its children
    that hold low parameters. So does a parametrization, other than torch's norms, whose operators may lack low kernels.
    A module without ``forward`` can have no border: its buffers follow the parameters too, unless they hold only whole
    numbers.

    Tensors that arrived low stay low, also where those of a float model would be fp32, except under ``widen``, in
    another low format than the plan's, or in an fp32 region of a low plan. Quantised modules stay as they are. A
    BatchNorm keeps its parameters in the format of its statistics, since torch has no kernel for low parameters with
    fp32 statistics, and if operators are autocast, a layer under spectral_norm keeps its weight in the format of its
    vectors.

    Args:
        plan: The plan.
        model: In any state of training.
        device_type: Device of the model.
        part: Whether the model is one stage of a pipeline: regions that match nothing belong to other stages.
        inference: Store weights low in layers that the plan computes low anyway.
        widen: Which tensors that arrived low and that the plan does not store low to store in fp32: one of
            ``arrival.WIDEN``.

    Raises:
        PatternError: As :func:`assign`.
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
                low = plan.compute_dtype if name in low_names and found is torch.float32 else None
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
    """Whether low weights exist outside the layers whose operators take only low inputs."""
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
    """If operators are not cast: find modules with parameters wider than their compute format, and give them a border."""
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
        if not any(_is_wider(final[buffer], low) for buffer in mine):
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
    """Whether a module has a forward that a border can wrap."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _called_in(module: nn.Module) -> Iterator[nn.Module]:
    """The modules with operators that a forward probably calls: its children, and those of containers.

    Layers of one operator that accepts a wide input are left out, and so are embeddings, which take no floating input.
    """
    for child in module.children():
        if isinstance(child, _CONTAINERS):
            yield from _called_in(child)
        elif not _is_one_operator(child):
            yield child


def _factorises(module: nn.Module) -> bool:
    """Whether a parametrization may compute its weight with operators that lack low kernels, as orthogonal does."""
    return isinstance(module, ParametrizationList) and not all(
        isinstance(one, _torch.calls.NORM_PARAMETRIZATIONS) for one in module
    )


def _is_one_operator(module: nn.Module) -> bool:
    return type(module) in _ONE_OPERATOR and not hasattr(module, "parametrizations")


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer of a model once, by its first path."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _stored_format(plan: Plan, region: Region | None) -> str | None:
    """Format in which a region's parameters are stored; None leaves them unchanged."""
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
    """Whether a layer's weight is computed from its parameters and extra vectors, as by spectral_norm."""
    reparametrized = isinstance(module, ParametrizationList) or hasattr(module, "weight_orig")
    return reparametrized and any(b.is_floating_point() and b.dim() == 1 for b in module.buffers())


def _parents(path: str, modules: Mapping[str, nn.Module]) -> Iterator[nn.Module]:
    while path:
        path = path.rpartition(".")[0]
        yield modules[path]


def _is_constant(path: str, module: nn.Module, buffer: Tensor) -> bool:
    """Whether a buffer is recognisably a constant that is combined with activations, and not state, counters or positions."""
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
    """Whether a model has buffers that follow its parameters where operators are not autocast, see :func:`resolve`."""
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
"""Layers and the operators that take their weights."""


def _lower_layers(plan: Plan, device_type: str) -> dict[type[nn.Module], bool]:
    """For each kind of layer, whether a plan computes its operators low on a device."""
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
    """The parameters of a layer that can be stored low: none if a parametrization computes its weight."""
    for kind, lower in layers.items():
        if isinstance(module, kind):
            whole = not (hasattr(module, "parametrizations") or hasattr(module, "weight_orig"))
            return [name for name, _ in module.named_parameters(recurse=False)] if lower and whole else ()
    return ()
