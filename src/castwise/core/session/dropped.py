"""Measure the updates that rounding drops when parameters are stored low without masters.

At a few steps, slices of the parameters are stepped twice: by the optimizer as usual, and before that in fp32
by a copy of the optimizer with its state for these slices. An update is dropped if fp32 moves an element
and the stored value stays the same. The run is not changed: weights, state and random numbers are as without measuring.

Two kinds of optimizers drop nothing although stored values stay the same, and are recognised by their behaviour. One
keeps the remainder in its state (Kahan summation, its own fp32 copies, extra bits of each weight): the remainder is
found in the state of the low step and not in that of the fp32 step. The other rounds stochastically: elements move
whose update is far below half of a rounding step.
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
"""Steps between two measurements, except for the first ones, whose distance doubles each time."""
PIECES = 8
"""A measurement takes one of this many slices of all trained elements."""
ELEMENTS = 8192
"""Approximate number of elements of a slice, in whole rows."""
WHOLE = 2**20
"""Size of the largest parameter that is taken whole, if the optimizer keeps per-row and per-column state of it."""
NEAR = 0.1
"""Relative tolerance with which an entry of the state must match the remainder of a parameter to count as holding
it."""
_BITS = (torch.int8, torch.uint8, torch.int16, torch.uint16)
COPY = 0
"""Meaning of an entry of the state: the whole parameter; or, for 1 and -1, the remainder with that sign."""
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype)


@dataclass
class _Piece:
    """Rows of a parameter, their values before a step, and the elements that fp32 moves."""

    parameter: Tensor
    rows: Any
    before: Tensor
    wide: Tensor
    state: dict[str, Tensor]
    """After the step in fp32: the state of the optimizer's copy for each of these elements."""


@dataclass
class DroppedUpdates:
    """Measurements of the updates of the tracked optimizers.

    Attributes:
        steps: Number of steps of all optimizers so far.
        looks: Number of those steps that were measured.
        moved: Number of measured elements that fp32 updates.
        by_parameter: For each parameter, the sum of squares of these updates, and the same sum of the lost updates, which
            left the stored value unchanged and are not kept in the optimizer's state either.
        keeps: Whether the optimizer of the last measured step keeps in its state what rounding drops, or rounds stochastically.
        unmeasured: Optimizers whose updates cannot be repeated on a copy, by class name, and why.
    """

    steps: int = 0
    looks: int = 0
    moved: int = 0
    by_parameter: Any = field(default_factory=WeakIdKeyDictionary)
    keeps: bool = False
    unmeasured: dict[str, str] = field(default_factory=dict)
    _made: Any = field(default_factory=WeakIdKeyDictionary)
    _by_chance: Any = field(default_factory=WeakIdKeyDictionary)
    """By optimizer, for elements whose update is far below half of a rounding step: how many would move under
    stochastic rounding, and how many did."""
    _pieces: list[_Piece] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Create hooks that differ from those of another session."""
        self._before: Any = functools.partial(self._before_step)
        self._after: Any = functools.partial(self._after_step)
        for hook in (self._before, self._after):
            _torch.tensors.never_trace(hook, "castwise follows updates outside of compiled graphs")

    @property
    def share(self) -> float | None:
        """The share of the updates' squared norm that rounding dropped; None before any update was measured.

        Squares count large updates more: a third of the elements may be dropped although hardly any of the update is lost.
        """
        seen, lost = (sum(each) for each in zip((0.0, 0.0), *self.by_parameter.values(), strict=True))
        return lost / seen if seen else None

    def follow(self, optimizer: Optimizer, log: Callable[[Callable[[], object]], object]) -> None:
        """Measure the steps of an optimizer from now on; ``log`` gets the undo entry first."""
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
        except Exception as error:  # a foreign class: what its step needs is unknown
            self.unmeasured[kind] = f"a copy of it cannot step ({type(error).__name__}: {error})"

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        pieces, self._pieces = self._pieces, []
        if not pieces:
            return
        self.looks += 1
        keepers = _keepers(optimizer, pieces)
        by_chance = self._rounds_at_random(optimizer, pieces)
        self.keeps = by_chance or bool(keepers)
        for piece in pieces:
            squares = (piece.wide.detach() - piece.before.float()).double().square()
            dropped = squares[_stays(piece) & ~_kept(optimizer, piece, keepers)]
            lost = 0.0 if by_chance else float(dropped.sum())
            before = self.by_parameter.get(piece.parameter, (0.0, 0.0))
            self.by_parameter[piece.parameter] = before[0] + float(squares.sum()), before[1] + lost
            self.moved += int((squares != 0).sum())

    def _rounds_at_random(self, optimizer: Optimizer, pieces: list[_Piece]) -> bool:
        """Whether the optimizer moves elements that rounding to nearest would not, as often as stochastic rounding would.

        If so, updates that were counted as lost before are subtracted.
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
            if parameter in self.by_parameter:
                self.by_parameter[parameter] = self.by_parameter[parameter][0], 0.0
        return True


def _rounding_step(values: Tensor) -> Tensor:
    return torch.ldexp(
        torch.full_like(values, torch.finfo(values.dtype).eps, dtype=torch.float32),
        values.float().frexp()[1] - 1,
    )


def _stays(piece: _Piece) -> Tensor:
    return masters.local(piece.parameter)[piece.rows] == piece.before


def _keepers(optimizer: Optimizer, pieces: list[_Piece]) -> set[tuple[str, int]]:
    """The entries of the state that hold the remainder of the parameter, and how (see :func:`_held`)."""
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
    """Where the state holds at least half of the remainder of the parameter."""
    missing = _missing(piece)
    kept = torch.zeros_like(missing, dtype=torch.bool)
    for held, error, _ in _held(optimizer, piece) if keepers else ():
        if held in keepers:
            kept |= error.abs() <= torch.maximum(missing.abs() / 2, _little(piece))
    return kept


def _missing(piece: _Piece) -> Tensor:
    return piece.wide.detach() - masters.local(piece.parameter)[piece.rows].float()


def _little(piece: _Piece) -> Tensor:
    """The tolerance for zero: an update is itself rounded before it is added to the remainder."""
    return NEAR * (_missing(piece).abs() * _stays(piece)).mean()


def _held(optimizer: Optimizer, piece: _Piece) -> Iterator[tuple[tuple[str, int], Tensor, Tensor]]:
    """For entries of the state: the distance of each from holding the remainder, and its rounding step.

    An entry that accumulates remainders differs by the remainder, with either sign, from that of the fp32 step, where
    there is none; an entry that is a copy of the parameter equals its new value.
    """
    for name, value in optimizer.state.get(piece.parameter, {}).items():
        if _is_beside(value, piece.parameter):
            own = masters.local(value)[piece.rows]
            values, missing = own.float(), _missing(piece)
            more = values - piece.state.get(name, torch.zeros_like(values)).float()
            if own.is_floating_point():
                step = values.abs() * torch.finfo(own.dtype).eps
            else:  # extra bits of the parameter
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
    """Rows of an optimizer's low parameters, and the result of a step in fp32 on them."""
    own = [(p, group) for group in optimizer.param_groups for p in group["params"] if _is_counted(p)]
    if not own:
        return []
    copied = _copy_without_state(optimizer)
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
        copied.state[wide] = {name: _piece_of(value, parameter, rows) for name, value in state.items()}
        if id(group) not in groups:
            groups[id(group)] = {
                "params": [],
                **copy.deepcopy({k: v for k, v in group.items() if k != "params"}),
            }
        groups[id(group)]["params"].append(wide)
        pieces.append(_Piece(parameter, rows, values[rows].clone(), wide, {}))
    copied.param_groups = list(groups.values())
    devices = {piece.before.device for piece in pieces if piece.before.device.type != "cpu"}
    kinds = {device.type for device in devices}
    with warnings.catch_warnings(), torch.random.fork_rng(devices, device_type=next(iter(kinds), "cuda")):
        warnings.simplefilter("ignore")  # warnings and prints of this step would repeat those of the real one
        _torch.optimizers.step_without_hooks(copied)
    for piece in pieces:
        state = copied.state.get(piece.wide, {})
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
    """Rows around places that are evenly spread over all elements, different at each measurement."""
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
    """A new instance of the optimizer's class, with its options.

    Raises:
        TypeError: The optimizer holds something other than options that a step could change.
    """
    kind: Any = type(optimizer)
    copied = kind.__new__(kind)
    copied.__setstate__({
        "defaults": dict(optimizer.defaults),
        "state": defaultdict(dict),
        "param_groups": [],
    })
    known = {
        *vars(copied),
        *vars(torch.optim.SGD([torch.zeros(1, device="cpu")])),
        "__reduce_ex__",
        "step",
        "_opt_called",
    }
    for name, value in vars(optimizer).items():
        if name in ("grad_scale", "found_inf"):  # inputs of a fused step: the inverse scale and the flag
            setattr(copied, name, value)
        elif name not in known:
            if not isinstance(value, _PLAIN):
                raise TypeError(f"it holds {name}, a {type(value).__name__}")
            setattr(copied, name, value)
    return copied


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
