"""Updates that rounding drops while a run trains parameters that are stored low without masters.

At a few steps a few pieces of the parameters are stepped twice: by the optimizer as always, and before that, in fp32
and beside it, by a copy of the optimizer with what it keeps of them. An update is dropped where fp32 moves an element
and what is stored stays. Nothing of the run is changed: weights, state and random numbers are those of a run without.

Two kinds of optimizers drop nothing although elements stay, and are recognised by what they do. One keeps in its state what the
parameter does not take (Kahan summation, fp32 copies of its own, further bits of each weight): there it is found, and not where fp32 takes it. The other rounds at
random, up or down by chance: there elements move whose update is far below half of a rounding step.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from castwise.core import _torch, masters

EVERY = 64
"""Steps between two looks, but for the first, which are twice as far apart each time."""
PIECES = 8
"""A look takes one of this many pieces of all trained elements."""
ELEMENTS = 8192
"""Elements of a piece, about: whole rows."""
WHOLE = 2**20
"""Elements of the largest parameter that is taken whole, where the optimizer keeps rows and columns of it."""
NEAR = 0.1
"""How far, relative to what a parameter did not take, an entry of the state may be from it and still be what holds it."""
_BITS = (torch.int8, torch.uint8, torch.int16, torch.uint16)
COPY = 0
"""An entry of the state is the whole parameter; 1 and -1: what is missing in it, with that sign."""
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype)


@dataclass
class _Piece:
    """Rows of a parameter, as they were before a step, and where fp32 moves them."""

    parameter: Tensor
    rows: Any
    before: Tensor
    wide: Tensor
    state: dict[str, Tensor]
    """After the step in fp32: what the copy of the optimizer has of each of these elements."""


@dataclass
class DroppedUpdates:
    """What has been seen in the optimizers that are followed.

    Attributes:
        steps: Of all optimizers, so far.
        looks: At how many of them updates were looked at.
        moved: Updates seen that are not zero in fp32.
        lost: Those of them that left the stored value as it was, and that the optimizer does not keep in its state either.
        by_parameter: Of each parameter what was seen of it, moved and lost.
        unmeasured: Optimizers whose updates cannot be made again beside them, by class name, and why.
    """

    steps: int = 0
    looks: int = 0
    moved: int = 0
    lost: int = 0
    by_parameter: Any = field(default_factory=WeakIdKeyDictionary)
    unmeasured: dict[str, str] = field(default_factory=dict)
    _made: Any = field(default_factory=WeakIdKeyDictionary)
    _by_chance: Any = field(default_factory=WeakIdKeyDictionary)
    """By optimizer, of elements whose update is far below half of a rounding step: how many would move if rounding were at random,
    and how many did."""
    _pieces: list[_Piece] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Make hooks that can be told from those of another session."""
        self._before: Any = functools.partial(self._before_step)
        self._after: Any = functools.partial(self._after_step)
        for hook in (self._before, self._after):
            _torch.tensors.never_trace(hook, "castwise follows updates outside of compiled graphs")

    @property
    def share(self) -> float | None:
        """Of the updates that are not zero in fp32, the share that rounding dropped; None before any was seen."""
        return self.lost / self.moved if self.moved else None

    def follow(self, optimizer: Optimizer, log: Callable[[Callable[[], object]], object]) -> None:
        """Look at the steps of an optimizer from now on; ``log`` gets what ends it, before it begins."""
        _torch.steps.subscribe(self._before, self._after, of=optimizer, log=log)

    # --- around a step ----------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        made = self._made[optimizer] = self._made.get(optimizer, 0) + 1
        self.steps += 1
        self._pieces = []
        kind = type(optimizer).__name__
        due = made % EVERY == 0 or (made < EVERY and made & (made - 1) == 0)
        if not due or kind in self.unmeasured or _torch.tensors.dynamo_callback():
            return
        if any(callable(value) for value in (*args[1:], *kwargs.values())):
            self.unmeasured[kind] = "its step() evaluates the loss"
            return
        try:
            self._pieces = _stepped_in_fp32(optimizer, made)
        except Exception as error:  # a class of somebody else's: what it needs for a step nobody knows
            self.unmeasured[kind] = f"a copy of it cannot step ({type(error).__name__}: {error})"

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        pieces, self._pieces = self._pieces, []
        if not pieces:
            return
        self.looks += 1
        keepers = _keepers(optimizer, pieces)
        by_chance = self._rounds_at_random(optimizer, pieces)
        for piece in pieces:
            moved = piece.wide.detach() != piece.before.float()
            dropped = moved & _stays(piece) & ~_kept(optimizer, piece, keepers)
            count, lost = int(moved.sum()), 0 if by_chance else int(dropped.sum())
            before = self.by_parameter.get(piece.parameter, (0, 0))
            self.by_parameter[piece.parameter] = before[0] + count, before[1] + lost
            self.moved += count
            self.lost += lost

    def _rounds_at_random(self, optimizer: Optimizer, pieces: list[_Piece]) -> bool:
        """Whether the optimizer moves elements that rounding to nearest leaves alone, as often as rounding at random would.

        What was counted as lost before that was seen is taken back.
        """
        expected, moved = self._by_chance.get(optimizer, (0.0, 0))
        for piece in pieces:
            values = piece.before.float()
            share = (piece.wide.detach() - values).abs() / _rounding_step(piece.before)
            small = share < 1 / 4
            expected += float(share[small].sum())
            moved += int((small & ~_stays(piece)).sum())
        self._by_chance[optimizer] = expected, moved
        if moved == 0 or moved < expected / 4:
            return False
        for parameter in {id(p): p for group in optimizer.param_groups for p in group["params"]}.values():
            seen, lost = self.by_parameter.get(parameter, (0, 0))
            if lost:
                self.by_parameter[parameter] = seen, 0
                self.lost -= lost
        return True


def _rounding_step(values: Tensor) -> Tensor:
    return torch.ldexp(
        torch.full_like(values, torch.finfo(values.dtype).eps, dtype=torch.float32),
        values.float().frexp()[1] - 1,
    )


def _stays(piece: _Piece) -> Tensor:
    return masters.local(piece.parameter)[piece.rows] == piece.before


def _keepers(optimizer: Optimizer, pieces: list[_Piece]) -> set[tuple[str, int]]:
    """The entries of the state that hold what the parameter did not take, and how (see :func:`_held`)."""
    judged: dict[str, int] = defaultdict(int)
    alike: dict[tuple[str, int], int] = defaultdict(int)
    for piece in pieces:
        size = _missing(piece).abs()
        for (name, way), error, step in _held(optimizer, piece):
            told = (size > _little(piece)) & _stays(piece) & (step < NEAR * size)
            if way == COPY:
                judged[name] += int(told.sum())
            alike[name, way] += int((told & (error.abs() <= 2 * NEAR * size)).sum())
    return {(name, way) for (name, way), count in alike.items() if count > 0.9 * judged[name]}


def _kept(optimizer: Optimizer, piece: _Piece, keepers: set[tuple[str, int]]) -> Tensor:
    """Where the state holds at least half of what the parameter did not take."""
    missing = _missing(piece)
    kept = torch.zeros_like(missing, dtype=torch.bool)
    for held, error, _ in _held(optimizer, piece) if keepers else ():
        if held in keepers:
            kept |= error.abs() <= torch.maximum(missing.abs() / 2, _little(piece))
    return kept


def _missing(piece: _Piece) -> Tensor:
    return piece.wide.detach() - masters.local(piece.parameter)[piece.rows].float()


def _little(piece: _Piece) -> Tensor:
    """What is as good as nothing: an update is itself rounded before it is added to what is kept."""
    return NEAR * (_missing(piece).abs() * _stays(piece)).mean()


def _held(optimizer: Optimizer, piece: _Piece) -> Iterator[tuple[tuple[str, int], Tensor, Tensor]]:
    """Entries of the state of a piece's elements: how far each is from holding what is missing, and its own rounding step.

    A sum of what is lost differs by that from the one of the step in fp32, where nothing is lost, with either sign; a copy of
    the parameter is what that has become.
    """
    for name, value in optimizer.state.get(piece.parameter, {}).items():
        if _is_beside(value, piece.parameter):
            own = masters.local(value)[piece.rows]
            values, missing = own.float(), _missing(piece)
            more = values - piece.state.get(name, torch.zeros_like(values)).float()
            if own.is_floating_point():
                step = values.abs() * torch.finfo(own.dtype).eps
            else:  # further bits of the parameter
                step = _rounding_step(piece.before) / 2 ** torch.iinfo(own.dtype).bits
                values, more = values * step, more * step
            yield (name, COPY), values - piece.wide.detach(), step
            yield (name, 1), more - missing, step
            yield (name, -1), more + missing, step


def _is_beside(value: Any, parameter: Tensor) -> bool:
    return (
        isinstance(value, Tensor)
        and value.shape == parameter.shape
        and (value.is_floating_point() or value.dtype in _BITS)
    )


def _stepped_in_fp32(optimizer: Optimizer, made: int) -> list[_Piece]:
    """Rows of the low parameters of an optimizer, and what a step in fp32 makes of them."""
    own = [(p, group) for group in optimizer.param_groups for p in group["params"] if _is_counted(p)]
    if not own:
        return []
    trial = _copy_without_state(optimizer)
    groups: dict[int, dict[str, Any]] = {}
    pieces = []
    for (parameter, group), rows in _chosen(own, made):
        state = optimizer.state.get(parameter, {})
        values = masters.local(parameter)
        if any(_is_of_whole(value, parameter) for value in state.values()):
            if values.numel() > WHOLE or hasattr(parameter, "device_mesh"):
                continue
            rows = ...
        wide = nn.Parameter(_in_fp32(values[rows]))
        assert parameter.grad is not None
        wide.grad = _in_fp32(masters.local(parameter.grad)[rows])
        trial.state[wide] = {name: _piece_of(value, parameter, rows) for name, value in state.items()}
        if id(group) not in groups:
            groups[id(group)] = {
                "params": [],
                **copy.deepcopy({k: v for k, v in group.items() if k != "params"}),
            }
        groups[id(group)]["params"].append(wide)
        pieces.append(_Piece(parameter, rows, values[rows].clone(), wide, {}))
    trial.param_groups = list(groups.values())
    devices = {piece.before.device for piece in pieces if piece.before.device.type != "cpu"}
    kinds = {device.type for device in devices}
    with warnings.catch_warnings(), torch.random.fork_rng(devices, device_type=next(iter(kinds), "cuda")):
        warnings.simplefilter("ignore")  # what it says of its step it says of the true one
        _torch.optimizers.step_without_hooks(trial)
    for piece in pieces:
        state = trial.state.get(piece.wide, {})
        piece.state = {name: value for name, value in state.items() if _is_beside(value, piece.wide)}
    return pieces


def _is_counted(parameter: Any) -> bool:
    grad = parameter.grad
    return (
        masters.is_low(parameter)
        and masters.master_of(parameter) is None
        and grad is not None
        and grad.layout is torch.strided
        and masters.local(parameter).numel() > 0
    )


def _chosen(own: list[tuple[Any, Any]], made: int) -> Iterator[tuple[tuple[Any, Any], Any]]:
    """Rows around places evenly spread over all elements, others at each look."""
    sizes = [masters.local(parameter).numel() for parameter, _ in own]
    turn = (made * 0.6180339887) % 1.0
    seen = set()
    for number in range(PIECES):
        place = int((number + turn) / PIECES * sum(sizes))
        at = 0
        while place >= sizes[at]:
            place -= sizes[at]
            at += 1
        values = masters.local(own[at][0])
        row = sizes[at] // values.shape[0] if values.dim() else 1
        count = max(1, ELEMENTS // row)
        first = place // row // count * count
        if (at, first) not in seen:
            seen.add((at, first))
            yield own[at], slice(first, first + count) if values.dim() else ...


def _copy_without_state(optimizer: Optimizer) -> Any:
    """Another of its class, with its options.

    Raises:
        TypeError: It holds something beside options that a step could change.
    """
    kind: Any = type(optimizer)
    trial = kind.__new__(kind)
    trial.__setstate__({"defaults": dict(optimizer.defaults), "state": defaultdict(dict), "param_groups": []})
    known = {
        *vars(trial),
        *vars(torch.optim.SGD([torch.zeros(1, device="cpu")])),
        "__reduce_ex__",
        "step",
        "_opt_called",
    }
    for name, value in vars(optimizer).items():
        if name in ("grad_scale", "found_inf"):  # what a fused step unscales and decides by
            setattr(trial, name, value)
        elif name not in known:
            if not isinstance(value, _PLAIN):
                raise TypeError(f"it holds {name}, a {type(value).__name__}")
            setattr(trial, name, value)
    return trial


def _is_of_whole(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape != parameter.shape


def _piece_of(value: Any, parameter: Tensor, rows: Any) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    values = masters.local(value)
    values = values[rows] if value.shape == parameter.shape else values
    return _in_fp32(values) if masters.is_low(values) else values.clone()


def _in_fp32(values: Tensor) -> Tensor:
    return values.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
