"""The regions a search may decide about, found in a model's module tree.

A *part* is a module that computes something itself, or modules of one structure at the same place of repeated blocks
(``blocks.*.norm``): identical blocks share one probe and one timing. What a module computes itself is seen by running
it: operators are attributed to the innermost module whose ``forward`` is running. Views, copies and sums of what its
children made (a residual connection) are nothing to decide about, so a module that does only these joins its
surroundings.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from castwise import _torch
from castwise.errors import PatternError
from castwise.plans.plan import Plan, Region
from castwise.plans.rules import UNFUSED
from castwise.resolve import assign

_TRIVIAL = frozenset({
    "_local_scalar_dense", "_reshape_alias", "_to_copy", "_unsafe_view", "add", "add_", "alias", "arange", "as_strided",
    "cat", "chunk", "clone", "constant_pad_nd", "contiguous", "copy", "copy_", "detach", "empty", "empty_like", "expand",
    "flatten", "full", "full_like", "index", "lift_fresh", "narrow", "new_empty", "new_zeros", "ones", "ones_like",
    "permute", "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "stack", "t", "transpose",
    "unbind", "unsqueeze", "view", "zeros", "zeros_like",
})  # fmt: skip
"""Operators that neither round nor amplify: they move values, or add what has been rounded anyway."""


@dataclass(frozen=True)
class Part:
    """A region of a model, as a search sees it.

    Attributes:
        pattern: As a plan's region names it; matches exactly ``paths``.
        kind: Class name of its modules.
        paths: Module paths, in the model's order.
        parameters: Elements in the parameters that are its modules' own (not their children's).
        inner: Patterns of parts inside it. Where a part has some, the part itself is what its modules' ``forward``
            computes beside calling them.
        like: The pattern with every number as a ``*``, where all modules that it matches belong to parts that share it;
            else empty. Parts that are decided alike are so written as one region.
    """

    pattern: str
    kind: str
    paths: tuple[str, ...]
    parameters: int
    inner: tuple[str, ...] = ()
    like: str = ""


class _Attribution(_torch.OperatorMode):
    """Notes which operators run, and which modules run some of their own on floating tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[str] = []
        self.names: set[str] = set()
        self.computes: set[str] = set()
        self.called: set[str] = set()

    def handle(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out, name = op(*args, **kwargs), op.overloadpacket.__name__
        self.names.add(name)
        if self.running and name not in _TRIVIAL:
            results = out if isinstance(out, (tuple, list)) else (out,)
            if any(isinstance(r, Tensor) and r.is_floating_point() for r in results):
                self.computes.add(self.running[-1])
        return out

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
            self.running.pop()

        with contextlib.ExitStack() as hooks:
            for path, module in model.named_modules():

                def enter(_module: nn.Module, _args: Any, path: str = path) -> None:
                    self.running.append(path)
                    self.called.add(path)

                hooks.enter_context(module.register_forward_pre_hook(enter))
                hooks.enter_context(module.register_forward_hook(leave, always_call=True))
            with self:
                yield


def find_parts(model: nn.Module, forward: Callable[[], Any]) -> tuple[Part, ...]:
    """Find the parts of a model in fp32, in its order; modules that are never called are in none.

    ``forward`` runs its forward pass as training does: ``lambda: loss(model, batch)``.
    """
    seen = _Attribution()
    with torch.no_grad(), seen.watching(model):
        forward()
    modules = dict(model.named_modules())
    paths = [path for path in modules if path in seen.called and path in seen.computes]
    keys = _keys(model)
    groups: dict[tuple[str, str], list[str]] = {}
    for path in paths:
        groups.setdefault((keys[path], _structure(modules[path])), []).append(path)
    parts: list[Part] = []
    for (pattern, _), members in groups.items():
        exact = _matched(model, pattern) == members
        for name, own in [(pattern, members)] if exact else [(_literal(p, modules[p]), [p]) for p in members]:
            size = sum(p.numel() for path in own for p in modules[path].parameters(recurse=False))
            parts.append(Part(name, type(modules[own[0]]).__name__, tuple(own), size))
    together: dict[str, list[str]] = {}
    for part in parts:
        together.setdefault(_numberless(part.pattern), []).extend(part.paths)
    like = {p: p for p, members in together.items() if sorted(_matched(model, p)) == sorted(members)}
    return tuple(sorted((_with_inner(p, parts, like) for p in parts), key=lambda p: paths.index(p.paths[0])))


def operators_used(forward: Callable[[], Any]) -> frozenset[str]:
    """Names of the ATen operators that run in a forward pass, composite ones as what they are made of.

    Attention is named as it is called too: with dropout on a CPU it is nothing but its parts.
    """
    seen, called = _Attribution(), _Called()
    with torch.no_grad(), seen, called:
        forward()
    return frozenset(seen.names | called.names)


class _Called(TorchFunctionMode):
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
    def inside(path: str) -> bool:
        return any(not outer or path.startswith(outer + ".") for outer in part.paths if path != outer)

    inner = tuple(other.pattern for other in parts if all(inside(path) for path in other.paths))
    return dataclasses.replace(part, inner=inner, like=like.get(_numberless(part.pattern), ""))


def _literal(path: str, module: nn.Module) -> str:
    return path or f"type:{type(module).__name__}"


def _structure(module: nn.Module) -> str:
    """What makes two modules the same but for their weights."""
    shapes = [(name, tuple(p.shape)) for name, p in module.named_parameters()]
    return f"{type(module).__module__}.{type(module).__qualname__} {module!r} {shapes}"


def _keys(model: nn.Module) -> dict[str, str]:
    """Path -> pattern in which the numbers of structurally equal siblings are a ``*``."""
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
    try:
        return list(assign(model, (Region(pattern, compute="fp32"),)))
    except PatternError:
        return []


# --- plans from parts ---------------------------------------------------------------------------------------


def exempt(plan: Plan, parts: Sequence[Part], kept: Iterable[str]) -> Plan:
    """A plan with regions that keep parts of these patterns in fp32.

    Where a part has others inside that are not kept, these are given back to the plan's own format.
    """
    regions = _nested(parts, set(kept), "fp32", plan.compute)
    return dataclasses.replace(plan, regions=(*plan.regions, *regions))


def only(low: Plan, parts: Sequence[Part], chosen: Iterable[str]) -> Plan:
    """A low plan's format, rules and loss scale for parts of these patterns alone; all else runs in fp32."""
    chosen = set(chosen)
    regions = _nested(parts, chosen, low.compute, "fp32")
    return dataclasses.replace(
        low, compute="fp32", params="fp32", master="fp32", regions=tuple(regions), memory_format="as_is",
        optimizer="as_given",
    )  # fmt: skip


def _nested(parts: Sequence[Part], chosen: set[str], inside: str, outside: str) -> list[Region]:
    """Regions that put the chosen parts, and no others, into a format; outer ones first."""
    out = []
    for part in sorted(
        parts, key=lambda p: -len(p.inner)
    ):  # what encloses more comes first; the last match wins
        around = [p for p in parts if part.pattern in p.inner]
        enclosed = any(p.pattern in chosen for p in around)
        wanted = inside if part.pattern in chosen else outside if enclosed else None
        if wanted is not None:
            alike = [p for p in parts if part.like and p.like == part.like]
            same = all((p.pattern in chosen) == (part.pattern in chosen) for p in alike)
            out.append(Region(part.like if same and len(alike) > 1 else part.pattern, compute=wanted))
    return list(dict.fromkeys(out))
