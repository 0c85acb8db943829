"""Measure which updates are lost to rounding when parameters are stored in bf16 or fp16 without fp32 masters.

At a few steps, slices of the parameters are stepped twice: in fp32 by a copy of the optimizer that has its state for
these slices, and then by the optimizer as usual. The update of an element is *dropped* if it changes the element in
fp32 while the stored value stays the same. The *remainder* of an element is the part of its fp32 update that rounding
leaves out of the stored value. Measuring does not change the training: weights, state and random numbers are the same
without it.

Two kinds of optimizers lose nothing although stored values stay the same. They are recognised by their behaviour:

- Some keep the remainder in their state, by Kahan summation, as fp32 copies of their own, or as extra bits of each
  weight. The remainder is then found in the state after the usual step and not in the state after the step in fp32.
- Some round stochastically. Elements then change although their update is far below half of a rounding step.
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

from castwise.core import _torch, devices, masters

EVERY = 64
"""The number of steps between two measurements, except for the first ones, whose distance doubles each time."""
PIECES = 8
"""The number of slices, spread over all trained elements, that a measurement takes."""
ELEMENTS = 8192
"""The approximate number of elements of a slice, which consists of whole rows."""
WHOLE = 2**20
"""The largest number of elements of a parameter that is taken whole if the optimizer keeps state for its rows or columns."""
NEAR = 0.1
"""The relative tolerance with which a state tensor must match what rounding dropped to count as keeping it."""
_BITS = (torch.int8, torch.uint8, torch.int16, torch.uint16)
COPY = 0
"""What a state tensor may keep of a parameter. COPY stands for the parameter's whole value.

1 and -1 stand for the remainder, which is the part of the updates that rounding dropped, with that sign.
"""
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype)


@dataclass
class _Piece:
    """A slice of a parameter (some of its rows) with its values before a step and after the same step in fp32."""

    parameter: Tensor
    rows: Any
    before: Tensor
    wide: Tensor
    state: dict[str, Tensor]
    """The state of the optimizer's copy for these elements, after the step in fp32."""


@dataclass
class DroppedUpdates:
    """Measures which updates of the optimizers that it follows are lost to rounding.

    Attributes:
        steps: Number of steps of all optimizers so far.
        looks: Number of those steps that were measured.
        moved: Number of measured elements that the step in fp32 changes.
        by_parameter: For each parameter, the sum of squares of these updates, and the sum of squares of the lost ones.
            An update is lost if it left the stored value unchanged and is not kept in the optimizer's state either.
        keeps: Whether the optimizer of the last measured step keeps in its state what rounding drops, or rounds
            stochastically.
        unmeasured: The class names of optimizers whose updates cannot be repeated on a copy, and the reasons.
    """

    steps: int = 0
    looks: int = 0
    moved: int = 0
    by_parameter: Any = field(default_factory=WeakIdKeyDictionary)
    keeps: bool = False
    unmeasured: dict[str, str] = field(default_factory=dict)
    _made: Any = field(default_factory=WeakIdKeyDictionary)
    _by_chance: Any = field(default_factory=WeakIdKeyDictionary)
    """For each optimizer, how many elements with an update far below half of a rounding step should change under
    stochastic rounding, and how many did change."""
    _pieces: list[_Piece] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Create hooks that are not equal to those of another object of this class."""
        self._before: Any = functools.partial(self._before_step)
        self._after: Any = functools.partial(self._after_step)
        for hook in (self._before, self._after):
            _torch.tensors.never_trace(hook, "castwise follows updates outside of compiled graphs")

    @property
    def share(self) -> float | None:
        """The share of the updates' squared norm that was lost to rounding, or None before any update was measured.

        Squares give large updates more weight. So the updates of a third of the elements may be lost although hardly
        any of the squared norm is.
        """
        seen, lost = (sum(each) for each in zip((0.0, 0.0), *self.by_parameter.values(), strict=True))
        return lost / seen if seen else None

    def follow(self, optimizer: Optimizer, log: Callable[[Callable[[], object]], object]) -> None:
        """Measure steps of an optimizer from now on.

        Before that, ``log`` is called with a function that stops the measuring.
        """
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
        except Exception as error:  # any library's step() may raise any error
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
            squares = devices.in_fp64(piece.wide.detach() - piece.before.float()).square()
            lasting = _stays(piece) & ~_kept(optimizer, piece, keepers)
            dropped = squares[lasting.to(squares.device)]  # squares are on the CPU if the device lacks fp64
            lost = 0.0 if by_chance else float(dropped.sum())
            before = self.by_parameter.get(piece.parameter, (0.0, 0.0))
            self.by_parameter[piece.parameter] = before[0] + float(squares.sum()), before[1] + lost
            self.moved += int((squares != 0).sum())

    def _rounds_at_random(self, optimizer: Optimizer, pieces: list[_Piece]) -> bool:
        """Whether the optimizer changes elements that rounding to nearest would leave, as often as stochastic rounding does.

        If so, its updates that were counted as lost before are not counted as lost any more.
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
    """Return the names of the state tensors that keep what rounding drops from the updates of a parameter.

    Each name comes with what the tensor keeps: the whole value of the parameter (:data:`COPY`), or the dropped part
    with the sign 1 or -1.
    """
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
    """Return for each element whether the optimizer's state keeps at least half of what rounding dropped, as a bool tensor."""
    missing = _missing(piece)
    kept = torch.zeros_like(missing, dtype=torch.bool)
    for held, error, _ in _held(optimizer, piece) if keepers else ():
        if held in keepers:
            kept |= error.abs() <= torch.maximum(missing.abs() / 2, _little(piece))
    return kept


def _missing(piece: _Piece) -> Tensor:
    return piece.wide.detach() - masters.local(piece.parameter)[piece.rows].float()


def _little(piece: _Piece) -> Tensor:
    """Return the size below which the part of an update that rounding dropped counts as zero.

    It is needed because an optimizer that keeps this part in its state rounds the update before adding it there.
    """
    return NEAR * (_missing(piece).abs() * _stays(piece)).mean()


def _held(optimizer: Optimizer, piece: _Piece) -> Iterator[tuple[tuple[str, int], Tensor, Tensor]]:
    """Compare each state tensor of a parameter with what it would be if it kept what rounding dropped from the update.

    There are three ways to keep it. A tensor that is a copy of the parameter (:data:`COPY`) would equal the parameter's
    new value in fp32. A tensor that accumulates what was dropped would differ from the same tensor after the step in
    fp32 by the dropped part, with the sign 1 or -1.

    Yields:
        A tuple for each tensor and each way. It holds the name of the tensor and the way, the difference for each
        element, and the size of a rounding step of the tensor.
    """
    for name, value in optimizer.state.get(piece.parameter, {}).items():
        if _is_beside(value, piece.parameter):
            own = masters.local(value)[piece.rows]
            values, missing = own.float(), _missing(piece)
            more = values - piece.state.get(name, torch.zeros_like(values)).float()
            if own.is_floating_point():
                step = values.abs() * torch.finfo(own.dtype).eps
            else:  # an integer tensor holds extra bits of the parameter
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
    """Choose rows of an optimizer's bf16 and fp16 parameters, step copies of them in fp32, and return the results."""
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
    with warnings.catch_warnings(), devices.same_random_numbers(piece.before.device.type for piece in pieces):
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
    """Yield parameters with the rows of them to measure.

    The rows lie around places that are evenly spread over all elements and differ at each measurement. ``made`` is the
    number of the step.
    """
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
    """Return a new instance of an optimizer's class with its options, but without parameters and state.

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
        # inputs of a fused step: the inverse scale and the flag; and on CUDA, that the optimizer has no option ``capturable``
        if name in ("grad_scale", "found_inf", "_warned_capturable_if_run_uncaptured"):
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
