"""Notice a prepared model that is trained without being called, so that its plan does not apply.

A border is a pair of hooks, and torch runs hooks only when a module is called: not for ``model.forward(x)``, nor for a
container whose parts are called one by one. Operators then run in fp32, whatever the plan says. So the first backward
passes are checked: if one reaches parameters of a model, the operators that used them must have been recorded inside
the model's border.

Operators that ran in the plan's format outside the border, such as inside an autocast block, are right too, and so are
operators that no plan casts: an error needs a product, by one of torch's operators, with something else than the weight
itself. A weight that is stored low needs no cast in an autocast block, so nothing is reported once such a block was
entered. Compiled code cannot be checked. Once a backward has shown that the model runs by the plan, checking stops.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from castwise.core import _torch
from castwise.core.casting import autocast, tracing
from castwise.core.model.borders import Border, Entries, border_of
from castwise.core.model.resolve import Resolution
from castwise.core.plans.formats import LOW_DTYPES
from castwise.errors import StateError

_LOOKS = 64
"""After this many backward passes without a decision, a model is no longer checked."""


@dataclass(eq=False)
class _Watched:
    """A part of a model that computes in one format, and what was observed of its calls.

    Attributes:
        model: The prepared model.
        path: Path of the module with the border.
        entries: Counts of entries into the border.
        dtype: The dtype to which operators inside are cast.
        key: Key of the border's frame.
        plan: The plan as text.
        inner: Paths of modules inside that have their own borders.
        begun: Number of the next autograd node when the border was put on.
        blocks: Number of autocast blocks that had been entered by then.
        entered: Whether it has ever been called in training.
        misses: Backward passes in a row that reached it without a call before.
        looks: Number of backward passes still to check.
        say: Called with the message, instead of raising an error.
    """

    model: weakref.ref[nn.Module]
    path: str
    entries: Entries
    dtype: torch.dtype
    key: str
    plan: str
    inner: frozenset[str]
    begun: int
    blocks: int
    entered: bool = False
    misses: int = 0
    looks: int = _LOOKS
    say: Callable[[str], object] | None = None

    def own(self) -> dict[int, str]:
        """By ``id``, the names of those parameters whose nearest border this is and whose use a backward can show."""
        model = self.model()
        if model is None:
            return {}
        return {
            id(parameter): f"{path}.{name}" if path else name
            for path, module in _inside(model.get_submodule(self.path), self.path, self.inner)
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad and (parameter.dtype not in LOW_DTYPES or self.blocks == _blocks)
        }

    def is_settled(self, nodes: Sequence[Any]) -> bool:
        """Whether the recorded uses of the parameters show that they ran by the plan, or can never show anything."""
        return any(map(self._is_by_plan, nodes))

    def _is_by_plan(self, node: Any) -> bool:
        number = _torch.autograd.node_number(node)
        return (
            self.entries.made(number)
            or any(key == self.key and first <= number < last for key, first, last in tracing.graph_spans)
            or _torch.autograd.casts_to(node, self.dtype)
            or _torch.autograd.hides_operators(node)
        )

    def strays(self, products: Sequence[Any]) -> bool:
        """Whether there is a product in another format than the plan's, made outside the model's call.

        Only for a model that computes low as a whole: outside a region, other code may use its weights in another
        format. And not for a product with a vector, which spectral norms compute from a weight before the call.
        """
        if self.path:
            return False
        made = [(*_torch.autograd.makes(node), node) for node in products]
        return any(
            dtype is not self.dtype and size > 1 and not self._is_by_plan(node) for dtype, size, node in made
        )

    def was_passed_by(self, hides: bool) -> bool:
        """Whether a backward that reached the parameters by no operator inside the border proves that it was bypassed.

        It may be the backward of a penalty on weights, or other weights may have been computed from these before the
        border. So it proves a bypass only if the module was never called, or neither before this backward nor before
        the last one. ``hides``: the graph contains user code that calls the module without gradients and again in
        backward, as activation checkpointing does.
        """
        if self.entries.spans or (hides and self.entries.silent):
            self.entered, self.misses = True, 0
            self.entries.spans.clear()
        else:
            self.misses += 1
        self.entries.silent = False
        return self.misses >= (2 if self.entered else 1)


def _inside(module: nn.Module, path: str, without: frozenset[str]) -> Iterator[tuple[str, nn.Module]]:
    yield path, module
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        if below not in without:
            yield from _inside(child, below, without)


_watched: list[_Watched] = []
_undo: list[Callable[[], None]] = []
_blocks = 0
"""Number of autocast blocks that were entered while any model was checked."""


def _note_block(enter: Callable[..., Any]) -> Callable[..., Any]:
    def entered(block: Any) -> Any:
        global _blocks
        _blocks += 1
        return enter(block)

    return entered


_entries = [_torch.hooks.Replacement(kind, "__enter__", _note_block) for kind in (torch.autocast, autocast)]


def watch(model: nn.Module, resolution: Resolution, log: Callable[[Callable[[], None]], object]) -> None:
    """Check the first backward passes of a model that was just prepared.

    ``log`` gets the undo entry first.
    """
    modules = dict(model.named_modules())
    bordered = frozenset(place.path for place in resolution.borders)
    root = border_of(model)
    if root is None:
        return
    # if the whole model computes low, fp32 regions are not checked
    places: Mapping[str, Border] = (
        {"": root}
        if root.frame.enabled
        else {path: found for path in bordered if (found := border_of(modules[path])) and found.frame.enabled}
    )
    new = []
    for path, border in places.items():
        border.entries = Entries()
        assert border.frame.dtype is not None
        new.append(
            _Watched(
                weakref.ref(model), path, border.entries, border.frame.dtype, border.key, str(resolution.plan), bordered,
                _torch.autograd.sequence_number(), _blocks,
            )
        )  # fmt: skip

    def end() -> None:
        _forget(new)

    log(end)
    _watched.extend(new)
    for entry in _entries if new else ():
        entry.begin()
    if _watched and not _undo:
        _undo.append(_torch.autograd.around_backward(_look))


def watching(model: nn.Module) -> bool:
    """Whether backward passes are still checked for a model."""
    return any(watched.model() is model for watched in _watched)


def only_tell(model: nn.Module, say: Callable[[str], object]) -> None:
    """Call ``say`` once with the message instead of raising an error in backward."""
    for watched in _watched:
        if watched.model() is model:
            watched.say = say


def forget(model: nn.Module) -> None:
    """Stop checking a model, or all of them if it is not checked."""
    _forget([watched for watched in _watched if watched.model() is model])


def _forget(done: Sequence[_Watched]) -> None:
    for watched in done:
        if watched in _watched:
            _watched.remove(watched)
        model = watched.model()
        border = None if model is None else border_of(model.get_submodule(watched.path))
        if border is not None and border.entries is watched.entries:
            border.entries = None
    if not _watched:
        for entry in _entries:
            entry.end()
        if _undo:
            _undo.pop()()


def _look(call: Callable[..., Any], outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs around the engine: checks before gradients are added to parameters."""
    if kwargs.get("accumulate_grad", True) and _torch.autograd.graph_task_id() == -1:
        wanted = {id(tensor) for tensor in args[2]} if len(args) > 2 else set()
        _check([output for output in outputs if isinstance(output, torch.Tensor)], wanted)
    return call(outputs, grads, *args, **kwargs)


def _check(outputs: Sequence[torch.Tensor], wanted: set[int]) -> None:
    """Check that no model which a backward reaches was bypassed.

    Raises:
        StateError: A model was bypassed.
    """
    leaves, hides = _torch.autograd.uses_of_leaves(outputs)
    uses = {id(leaf): nodes for leaf, nodes, _ in leaves}
    products = {id(leaf): multiplied for leaf, _, multiplied in leaves if multiplied}
    done = []
    try:
        for watched in _watched:
            watched.looks -= 1
            reached = {
                key: name
                for key, name in watched.own().items()
                if key in uses
                and (not wanted or key in wanted)
                and any(_torch.autograd.node_number(node) >= watched.begun for node in uses[key])
            }
            nodes = [node for key in reached for node in uses[key]]
            if (watched.model() is None or watched.looks < 0) or (nodes and watched.is_settled(nodes)):
                done.append(watched)
                beside = (
                    []
                    if hides
                    else [name for key, name in reached.items() if watched.strays(products.get(key, ()))]
                )
                if beside:
                    _tell_beside(watched, beside[0])
            elif not products.keys().isdisjoint(reached) and watched.was_passed_by(hides):
                fact = _fact(watched, next(name for key, name in reached.items() if key in products))
                if watched.say is None:
                    raise StateError(f"backward: {fact}{_CURE}")
                watched.say(fact)
                done.append(watched)
    finally:
        if done:
            _forget(done)


def _tell_beside(watched: _Watched, name: str) -> None:
    model = watched.model()
    kind, dtype = type(model).__name__, str(watched.dtype).removeprefix("torch.")
    said = (
        f"part of the loss was computed from {name} outside a call of the prepared {kind}, so the operators there were not cast "
        f"to {dtype} as the plan {watched.plan} says"
    )
    if watched.say is not None:
        watched.say(said)
        return
    warnings.warn(
        f"backward: {said}. Name the methods that are called besides forward, amp.prepare(model, optimizer, "
        f"methods=('encode',)), or put that part inside castwise.autocast(...), even if it should run in fp32.",
        stacklevel=2,
    )


_CURE = (
    "; or name the methods that are called instead of it, amp.prepare(model, optimizer, methods=('encode',)); or prepare each part "
    "that is called, amp.prepare(part, optimizer)."
)


def _fact(watched: _Watched, name: str) -> str:
    model = watched.model()
    assert model is not None
    module = model.get_submodule(watched.path)
    kind, dtype = type(module).__name__, str(watched.dtype).removeprefix("torch.")
    region = f"region {watched.path!r} ({kind}) of the prepared {type(model).__name__}"
    call = f"model.{watched.path}" if watched.path else "model"
    return (
        f"the loss was computed from {name}, but the {region if watched.path else f'prepared {kind}'} was not called, so its "
        f"operators were not cast to {dtype} as the plan {watched.plan} says. A plan applies only when the module itself is "
        f"called: call {call}(...), not {call}.forward(...) and do not call its parts one by one"
    )
