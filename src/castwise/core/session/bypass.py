"""Raise or warn if a prepared model is trained without being called, so that its plan does not apply.

A plan is applied by a pair of hooks around the model (its :class:`~castwise.core.model.borders.Border`). torch runs
hooks only when a module is called. It runs none for ``model.forward(x)``, and none for a container whose children are
called one by one. Operators then run in fp32, whatever the plan says. So the first backward passes are checked. If one
reaches parameters of a model, the operators that used them must have run inside the model's border.

Operators may also run in the plan's format outside the border, for example inside an autocast block, and this is right
too. So are operators that no plan casts. An error is therefore raised only if a weight was multiplied, by one of
torch's operators, with something else than itself. A weight that is stored in bf16 or fp16 needs no cast in an autocast
block, so nothing is reported for it once such a block was entered. Compiled code cannot be checked. Once
a backward pass has shown that calls of the model run under the plan, only a backward pass before which the model was
not called is checked, and a bypass is a warning.
"""

from __future__ import annotations

import random
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

_chance = random.Random(0)
_LOOKS = 64
"""The number of backward passes after which a model is no longer checked if nothing was found.

It is also the largest number of backward passes in a row that are left out for a model that they did not reach."""


@dataclass(eq=False)
class _Watched:
    """A module with a :class:`~castwise.core.model.borders.Border`, and what was observed of its calls.

    Attributes:
        model: The prepared model.
        path: Path of the module in the model.
        entries: The record of autograd nodes that were created inside the module.
        dtype: The dtype to which operators inside are cast.
        key: The text by which traced graphs identify the precision settings inside the module.
        plan: The plan as text.
        inner: Paths of modules inside that have their own borders.
        begun: Number of the next autograd node when the border was installed.
        blocks: Number of autocast blocks that had been entered by then.
        entered: Whether the module has ever been called in training.
        misses: Number of backward passes in a row that reached its parameters although it was not called.
        looks: Number of backward passes still to check.
        say: A function to call with the message instead of raising an error, or None.
        calls: Number of calls in training at the last backward, once calls are known to run under the plan.
        idle: Largest number of backward passes to leave out after the last one, which did not reach its parameters.
        left_out: Number of backward passes still to leave out.
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
    calls: int = 0
    idle: int = 0
    left_out: int = 0

    def own(self) -> dict[int, str]:
        """Return the names of the parameters to check, by ``id``.

        These are the trained parameters of this module, without those of inner modules that have their own borders.
        bf16 and fp16 parameters are left out once an autocast block was entered.
        """
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
        """Whether these autograd nodes, which used the parameters, show that the module ran under the plan.

        Nodes whose operators cannot be seen, such as those of compiled code, count as showing it.
        """
        return any(map(self._is_by_plan, nodes))

    def _is_by_plan(self, node: Any) -> bool:
        number = _torch.autograd.node_number(node)
        return (
            self.entries.made(number)
            or any(key == self.key and first <= number < last for key, first, last in tracing.graph_spans)
            or _torch.autograd.casts_to(node, self.dtype)
            or _torch.autograd.hides_operators(node)
        )

    def is_called(self, nodes: Sequence[Any]) -> bool:
        """Whether calls that were recorded have made some of these nodes."""
        return any(self.entries.made(_torch.autograd.node_number(node)) for node in nodes)

    def strays(self, products: Sequence[Any]) -> bool:
        """Whether some of these products with a weight ran in another format than the plan's, outside the model's call.

        This is checked only for a model that computes in bf16 or fp16 as a whole, because other code may use the
        weights of a region in another format. Products with a vector are left out, since spectral norms compute such
        products from a weight before the call.
        """
        if self.path:
            return False
        made = [(*_torch.autograd.makes(node), node) for node in products]
        return any(
            dtype is not self.dtype and size > 1 and not self._is_by_plan(node) for dtype, size, node in made
        )

    def was_passed_by(self, hides: bool) -> bool:
        """Whether the module was trained without being called, given that a backward pass has reached its parameters.

        In this backward pass, no operator that used the parameters ran inside the module. That alone proves nothing. It
        may be the backward pass of a penalty on weights, or other weights may have been computed from these before the
        call. So the result is true only if the module was never called, or neither before this backward pass nor before
        the last one.

        ``hides`` says whether the graph contains user code that may call the module without gradients and again in
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
_settled: list[_Watched] = []
"""Those whose calls are known to run by the plan."""
_undo: list[Callable[[], None]] = []
_blocks = 0
"""The number of autocast blocks that were entered while any model was checked."""


def _note_block(enter: Callable[..., Any]) -> Callable[..., Any]:
    def entered(block: Any) -> Any:
        global _blocks
        _blocks += 1
        return enter(block)

    return entered


_entries = [_torch.hooks.Replacement(kind, "__enter__", _note_block) for kind in (torch.autocast, autocast)]


def watch(model: nn.Module, resolution: Resolution, log: Callable[[Callable[[], None]], object]) -> None:
    """Check the first backward passes of a model that was just prepared.

    Before anything is changed, ``log`` is called with a function that ends the checks.
    """
    modules = dict(model.named_modules())
    bordered = frozenset(place.path for place in resolution.borders)
    root = border_of(model)
    if root is None:
        return
    # if operators of the whole model are autocast, only the model as a whole is checked; otherwise each autocast region is
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
    """Whether the backward passes of a model are still checked."""
    return any(watched.model() is model for watched in _watched)


def only_tell(model: nn.Module, say: Callable[[str], object]) -> None:
    """Make the checks of a model call ``say`` with the message, instead of raising an error in backward or warning."""
    for watched in (*_watched, *_settled):
        if watched.model() is model:
            watched.say = say


def forget(model: nn.Module) -> None:
    """Stop checking the backward passes of a model. Does nothing if they are not checked."""
    _forget([watched for watched in (*_watched, *_settled) if watched.model() is model])


def _forget(done: Sequence[_Watched]) -> None:
    for watched in done:
        for each in (_watched, _settled):
            if watched in each:
                each.remove(watched)
        model = watched.model()
        border = None if model is None else border_of(model.get_submodule(watched.path))
        if border is not None and border.entries is watched.entries:
            border.entries = None
    if not _watched:
        for entry in _entries:
            entry.end()
        if _undo and not _settled:
            _undo.pop()()


def _settle(watched: _Watched) -> None:
    """Check, from now on, only backward passes before which the model was not called."""
    watched.calls, watched.misses, watched.blocks = watched.entries.calls, 0, -1
    _watched.remove(watched)
    _settled.append(watched)
    _forget(())


def _uncalled() -> list[_Watched]:
    """Return those of ``_settled`` that were not called in training since the last backward.

    Where models are trained in turns, most backward passes concern another model. A look at one takes as long as its
    graph is large, so more and more of them are left out.
    """
    found = []
    for watched in _settled:
        if watched.calls == watched.entries.calls:
            watched.left_out -= 1
            if watched.left_out < 0:
                found.append(watched)
        watched.calls = watched.entries.calls
    return found


def _look(call: Callable[..., Any], outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
    """Check a backward pass before it runs, and then run it. This is called in place of autograd's engine."""
    if kwargs.get("accumulate_grad", True) and _torch.autograd.graph_task_id() == -1:
        uncalled = _uncalled()
        if _watched or uncalled:
            wanted = {id(tensor) for tensor in args[2]} if len(args) > 2 else set()
            _check([output for output in outputs if isinstance(output, torch.Tensor)], wanted, uncalled)
    return call(outputs, grads, *args, **kwargs)


def _check(outputs: Sequence[torch.Tensor], wanted: set[int], uncalled: Sequence[_Watched]) -> None:
    """Raise if a backward pass reaches parameters of a prepared model that was not called.

    Args:
        outputs: The tensors from which the backward pass starts.
        wanted: The ``id`` of the tensors that get gradients, or an empty set for all.
        uncalled: Models whose calls run under the plan, but that were not called since the last backward.

    Raises:
        StateError: A model, or a region of it, was not called.
    """
    leaves, hides = _torch.autograd.uses_of_leaves(outputs)
    uses = {id(leaf): nodes for leaf, nodes, _ in leaves}
    products = {id(leaf): multiplied for leaf, _, multiplied in leaves if multiplied}
    done, settled = [], []
    try:
        for watched in (*_watched, *uncalled):
            known = watched in uncalled
            watched.looks -= not known
            reached = {
                key: name
                for key, name in watched.own().items()
                if key in uses
                and (not wanted or key in wanted)
                and any(_torch.autograd.node_number(node) >= watched.begun for node in uses[key])
            }
            nodes = [node for key in reached for node in uses[key]]
            attentive = reached or watched.misses or not known
            watched.idle = 0 if attentive else min(2 * watched.idle + 2, _LOOKS)
            watched.left_out = _chance.randint(
                0, watched.idle
            )  # with a fixed number, a periodic loop could always be checked in the same phase
            if (watched.model() is None or watched.looks < 0) or (nodes and watched.is_settled(nodes)):
                if watched.is_called(nodes) and watched.model() is not None:
                    watched.misses = 0
                    settled += [] if known else [watched]
                else:
                    done.append(watched)
                if known:
                    continue
                beside = (
                    []
                    if hides
                    else [name for key, name in reached.items() if watched.strays(products.get(key, ()))]
                )
                if beside:
                    _tell_beside(watched, beside[0])
                continue
            bare = [
                name
                for key, name in reached.items()
                if key in products and not _is_used_by_others(watched, uses[key])
            ]
            if known and bare and not hides:
                watched.misses += 1
                if watched.misses >= 2:
                    done.append(watched)
                    _warn(watched, _fact(watched, bare[0]), _CURE)
            elif not known and bare and watched.was_passed_by(hides):
                fact = _fact(watched, bare[0])
                if watched.say is None:
                    raise StateError(f"backward: {fact}{_CURE}")
                watched.say(fact)
                done.append(watched)
    finally:
        for watched in settled:
            _settle(watched)
        if done:
            _forget(done)


def _is_used_by_others(watched: _Watched, nodes: Sequence[Any]) -> bool:
    """Whether calls of another module that is watched, and shares the parameter, have made some of these nodes."""
    others = (other for other in (*_watched, *_settled) if other is not watched)
    return any(other.is_called(nodes) for other in others)


def _tell_beside(watched: _Watched, name: str) -> None:
    model = watched.model()
    kind, dtype = type(model).__name__, str(watched.dtype).removeprefix("torch.")
    said = (
        f"part of the loss was computed from {name} outside a call of the prepared {kind}, so the operators there were not cast "
        f"to {dtype} as the plan {watched.plan} says"
    )
    _warn(
        watched, said,
        ". Name the methods that are called besides forward, amp.prepare(model, optimizer, "
        "methods=('encode',)), or put that part inside castwise.autocast(...), even if it should run in fp32.",
    )  # fmt: skip


def _warn(watched: _Watched, fact: str, cure: str) -> None:
    """Tell the user a fact; ``cure`` is for loops that prepare the model themselves."""
    if watched.say is not None:
        watched.say(fact)
    else:
        warnings.warn(f"backward: {fact}{cure}", stacklevel=3)


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
