"""Find the regions of a model for which a search can choose a format.

A *part* is a module that computes something itself, or a group of modules of equal structure at the same place in repeated
blocks (``blocks.*.norm``). A group is tested and timed once. A run of the model shows what each module computes itself.
Operators, and Python functions with their own backward, are attributed to the innermost module whose ``forward`` is running. A
module may only make views, copies and sums of its children's outputs (residual connections). Such a module needs no format of
its own, and is no part.

A module that is called and contains parts is a *container*. The search can also choose a format for a container as a whole,
including what it computes between its parts. If all parts of a container get the same format, the container becomes one region.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from castwise.core import _torch
from castwise.core.casting.trees import tensors_in
from castwise.core.model.resolve import assign
from castwise.core.plans.plan import Plan, Region
from castwise.core.plans.rules import UNFUSED
from castwise.errors import PatternError
from castwise.lab.passes.observers import Args, Call, Kwargs, Observer, Operators, Run, observed

_TRIVIAL = frozenset({
    "_local_scalar_dense", "_reshape_alias", "_to_copy", "_unsafe_view", "add", "add_", "alias", "arange", "as_strided",
    "cat", "chunk", "clone", "constant_pad_nd", "contiguous", "copy", "copy_", "detach", "empty", "empty_like", "expand",
    "flatten", "full", "full_like", "index", "lift_fresh", "narrow", "new_empty", "new_zeros", "ones", "ones_like",
    "permute", "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "stack", "t", "transpose",
    "unbind", "unsqueeze", "view", "zeros", "zeros_like",
})  # fmt: skip
"""Operators that neither round nor amplify: they move values, or add values that are already rounded."""
_SUMS = frozenset({"add", "add_"})
"""The additions among these operators. An addition is no residual connection if it adds a number or runs in a module without
children."""


@dataclass(frozen=True)
class Container:
    """A module that contains parts, or a group of such modules of equal structure at the same place in repeated blocks.

    Attributes:
        pattern: The pattern in a plan's region.
        like: As for :attr:`Part.like`.
    """

    pattern: str
    like: str = ""


@dataclass(frozen=True)
class Part:
    """A module, or a group of modules of equal structure, for which a search can choose a format.

    Attributes:
        pattern: The pattern in a plan's region; matches exactly ``paths``.
        kind: Class name of its modules.
        paths: Module paths, in model order.
        parameters: Number of elements in its modules' own parameters, without their children's.
        inner: Patterns of other parts inside this part. If there are any, the part stands only for what its modules'
            ``forward`` computes between the calls of the inner parts.
        like: The pattern with every number replaced by ``*``. Parts with the same ``like`` and the same format can form one
            region. It is empty if it would also match modules that belong to other parts.
        around: Containers that contain this part, innermost first. If the part has inner parts, it is itself the first. The
            whole model is not a container.
    """

    pattern: str
    kind: str
    paths: tuple[str, ...]
    parameters: int
    inner: tuple[str, ...] = ()
    like: str = ""
    around: tuple[Container, ...] = ()


class _Attribution(Observer):
    """Record which modules compute on floating tensors themselves, and not only in their children."""

    def __init__(self) -> None:
        self.leaves: set[str] = set()
        self.computes: set[str] = set()
        self.called: set[str] = set()
        self._seen: set[Any] = set()

    def modules(self, model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
        modules = dict(model.named_modules())
        self.leaves = {path for path, module in modules.items() if next(module.children(), None) is None}
        return modules.items()

    def enter(self, call: Call, args: Args, kwargs: Kwargs) -> None:
        self._look_back(args)  # the module that makes this call has computed these arguments
        self.called.add(call.path)

    def leave(self, call: Call, output: Any) -> None:
        self._look_back(output)

    def operator(self, run: Run, op: Any, args: Args, kwargs: Kwargs) -> Any:
        out, name = run(op, args, kwargs), op.overloadpacket.__name__
        if self.running and (name not in _TRIVIAL or (name in _SUMS and self._is_no_residual(args))):
            results = out if isinstance(out, (tuple, list)) else (out,)
            if any(isinstance(r, Tensor) and r.is_floating_point() for r in results):
                self.computes.add(self.running[-1].path)
        return out

    def _is_no_residual(self, args: tuple[Any, ...]) -> bool:
        return self.running[-1].path in self.leaves or not all(isinstance(arg, Tensor) for arg in args[:2])

    def _look_back(self, values: Any) -> None:
        """Record that the running module computes itself, if Python functions with their own backward made these values.

        The functions are found in the autograd graph, which is followed back to the nodes that were seen before.
        """
        nodes = [tensor.grad_fn for tensor in tensors_in(values)]
        while nodes:
            node = nodes.pop()
            if node is None or node in self._seen:
                continue
            self._seen.add(node)
            if self.running and _torch.tensors.is_users_function(node):
                self.computes.add(self.running[-1].path)
            nodes += [before for before, _ in node.next_functions]


def find_parts(model: nn.Module, forward: Callable[[], Any]) -> tuple[Part, ...]:
    """Find the parts of a model for which a search can choose a format (:class:`Part`), in model order.

    The model runs in fp32. Modules that are never called belong to no part.

    ``forward`` runs the forward pass of training, for example ``lambda: loss(model, batch)``.
    """
    seen = _Attribution()
    with torch.enable_grad(), observed(model, seen):
        forward()
    modules = dict(model.named_modules())
    keys = _keys(model)
    paths = [path for path in modules if path in seen.called and path in seen.computes]
    parts: list[Part] = []
    for pattern, own in _grouped(model, keys, paths):
        size = sum(p.numel() for path in own for p in modules[path].parameters(recurse=False))
        parts.append(Part(pattern, type(modules[own[0]]).__name__, tuple(own), size))
    like = _alike(model, {part.pattern: part.paths for part in parts})
    parts = [_with_inner(part, parts, like) for part in parts]
    nests = [path for path in modules if path and path in seen.called and path not in seen.leaves]
    return tuple(
        sorted(
            _with_containers(model, parts, _grouped(model, keys, nests)),
            key=lambda p: paths.index(p.paths[0]),
        )
    )


def _grouped(model: nn.Module, keys: Mapping[str, str], paths: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Group modules of equal structure, so that the pattern of each group matches exactly its modules."""
    modules = dict(model.named_modules())
    groups: dict[tuple[str, str], list[str]] = {}
    for path in paths:
        groups.setdefault((keys[path], _structure(modules[path])), []).append(path)
    out: list[tuple[str, list[str]]] = []
    for (pattern, _), members in groups.items():
        exact = _matched(model, pattern) == members
        out += (
            [(pattern, members)] if exact else [(_literal(path, modules[path]), [path]) for path in members]
        )
    return out


def _alike(model: nn.Module, paths: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Map each pattern to the same pattern with its numbers replaced by ``*``, where that matches no other modules."""
    together: dict[str, list[str]] = {}
    for pattern, own in paths.items():
        together.setdefault(_numberless(pattern), []).extend(own)
    return {p: p for p, members in together.items() if sorted(_matched(model, p)) == sorted(members)}


def _with_containers(
    model: nn.Module, parts: Sequence[Part], nests: Sequence[tuple[str, list[str]]]
) -> list[Part]:
    """Add to each part of a model the modules around it (:class:`Container`).

    A module becomes a container only if it contains each part wholly or not at all.
    """
    held: dict[str, list[Part]] = {}
    for pattern, paths in nests:
        inside = [[_is_in(path, paths) for path in part.paths] for part in parts]
        whole = [part for part, ins in zip(parts, inside, strict=True) if all(ins)]
        if any(part.pattern != pattern for part in whole) and all(all(ins) or not any(ins) for ins in inside):
            held[pattern] = whole
    like = _alike(model, {pattern: paths for pattern, paths in nests if pattern in held})
    order = sorted(held, key=lambda pattern: (len(held[pattern]), -pattern.count(".")))
    return [
        dataclasses.replace(
            part,
            around=tuple(
                Container(pattern, like.get(_numberless(pattern), ""))
                for pattern in order
                if part in held[pattern]
            ),
        )
        for part in parts
    ]


def _is_in(path: str, outer: Iterable[str]) -> bool:
    return any(path == at or not at or path.startswith(at + ".") for at in outer)


def operators_used(forward: Callable[[], Any]) -> frozenset[str]:
    """Return the names of the ATen operators that run in a forward pass. A composite operator appears as its components.

    Attention also appears under the name of the function that was called, because with dropout on a CPU only its components
    run.
    """
    seen, called = Operators(), _Called()
    with torch.no_grad(), observed(nn.Module(), seen), called:
        forward()
    return frozenset({op.overloadpacket.__name__ for op in seen.ran} | called.names)


class _Called(TorchFunctionMode):
    """Record the names of called functions that torch decomposes before an observer of operators can see them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in UNFUSED:
            self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


def _numberless(pattern: str) -> str:
    return ".".join("*" if name.isdigit() else name for name in pattern.split("."))


def _with_inner(part: Part, parts: Sequence[Part], like: Mapping[str, str]) -> Part:
    inner = tuple(
        other.pattern
        for other in parts
        if other is not part and all(_is_in(path, part.paths) for path in other.paths)
    )
    return dataclasses.replace(part, inner=inner, like=like.get(_numberless(part.pattern), ""))


def _literal(path: str, module: nn.Module) -> str:
    return path or f"type:{type(module).__name__}"


def _structure(module: nn.Module) -> str:
    """Return a key that is equal for two modules that differ only in their weights."""
    shapes = [(name, tuple(p.shape)) for name, p in module.named_parameters()]
    return f"{type(module).__module__}.{type(module).__qualname__} {module!r} {shapes}"


def _keys(model: nn.Module) -> dict[str, str]:
    """Map the path of each module to a pattern, in which ``*`` replaces the numbers of structurally equal siblings."""
    keys = {"": f"type:{type(model).__name__}"}

    def walk(module: nn.Module, path: str) -> None:
        children = dict(module.named_children())
        alike = Counter(map(_structure, children.values()))
        for name, child in children.items():
            repeated = name.isdigit() and alike[_structure(child)] == len(children) > 1
            at = f"{path}.{name}" if path else name
            step = "*" if repeated else name
            keys[at] = f"{keys[path]}.{step}" if path else step
            walk(child, at)

    walk(model, "")
    return keys


def _matched(model: nn.Module, pattern: str) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # of scripted modules, which a region around them may match
        try:
            return list(assign(model, (Region(pattern, compute="fp32"),)))
        except PatternError:
            return []


# --- plans from parts ---------------------------------------------------------------------------------------


def exempt(plan: Plan, parts: Sequence[Part], kept: Iterable[str]) -> Plan:
    """Return a plan with regions that keep parts of the model in fp32. ``kept`` holds the patterns of the parts.

    A container is kept as a whole if all its parts are kept. If an inner part is not among the patterns, it returns to the
    plan's own format.
    """
    regions = _nested(parts, set(kept), "fp32", plan.compute)
    return dataclasses.replace(plan, regions=(*plan.regions, *regions))


def only(low: Plan, parts: Sequence[Part], chosen: Iterable[str]) -> Plan:
    """Return a plan that runs only the chosen parts of the model in the format of ``low``, and the rest in fp32.

    The rules and the loss scale of ``low`` apply too. ``chosen`` holds the patterns of the parts.
    """
    regions = _nested(parts, set(chosen), low.compute, "fp32")
    return dataclasses.replace(
        low, compute="fp32", params="fp32", master="fp32", regions=tuple(regions), memory_format="as_is",
        optimizer="as_given",
    )  # fmt: skip


def whole(parts: Sequence[Part], container: Container) -> tuple[str, ...]:
    """Return the patterns by which a search selects a :class:`Container` as a whole.

    They are the patterns of the parts in it. If it has only one part, its own pattern is added.
    """
    own = tuple(part.pattern for part in parts if container in part.around)
    return own if len(own) > 1 else (*own, container.pattern)


def _nested(parts: Sequence[Part], chosen: set[str], inner: str, outer: str) -> list[Region]:
    """Return nested regions that give the chosen parts the format ``inner``, and parts inside them the format ``outer``."""
    held = {c: whole(parts, c) for part in parts for c in part.around}
    chosen_whole = {c for c, patterns in held.items() if chosen.issuperset(patterns)}
    regions: list[tuple[int, bool, str, str]] = []
    for part in parts:
        covered = [c for c in part.around if c in chosen_whole]
        enclosed = any(p.pattern in chosen for p in parts if part.pattern in p.inner)
        if covered:
            widest = covered[-1]
            alike = {c for c in held if c.like and c.like == widest.like}
            regions.append((
                len(held[widest]),
                True,
                _name(widest, len(alike) > 1 and alike <= chosen_whole),
                inner,
            ))
        elif part.pattern in chosen or enclosed:
            like = {p.pattern for p in parts if p.like and p.like == part.like}
            same = len(like) > 1 and (like <= chosen or not like & chosen)
            wanted = inner if part.pattern in chosen else outer
            regions.append((len(part.inner), False, _name(part, same), wanted))
    # the last match wins, so outer regions come first, and a part's own forward comes before a container inside that part
    regions.sort(key=lambda region: (-region[0], region[1]))
    return [Region(name, compute=wanted) for name, wanted in dict.fromkeys(region[2:] for region in regions)]


def _name(unit: Part | Container, alike: bool) -> str:
    return unit.like if alike else unit.pattern
