"""Find cures for an operator call that fails because of its dtypes, and try each on the call before suggesting it."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from castwise.core import _torch, devices
from castwise.core.casting import frames, kernels
from castwise.core.casting.context import override_rows
from castwise.core.casting.frames import Frame
from castwise.core.casting.kernels import widest_dtype
from castwise.core.casting.trees import tensors_in
from castwise.core.model.complaints.calls import Call, failed_calls, failed_in_backward
from castwise.core.model.complaints.expressions import OF_MODULE
from castwise.core.model.complaints.source import Spot, raised_by_hand
from castwise.core.model.complaints.words import (
    COMPLEX,
    NAMES,
    asks_for_whole,
    factory,
    is_dtype_error,
    is_real,
    met_in,
    named,
    sentence,
    writing,
)
from castwise.core.model.resolve import casts_operators, has_constants, resolve
from castwise.core.plans import rules
from castwise.core.plans.formats import FORMATS, LOW_DTYPES
from castwise.core.plans.plan import Plan, Region, with_rule
from castwise.errors import CastwiseError

_NOT_AGAIN: Final = "The call could not be repeated, so no cure was tried"


MOST_BYTES: Final = 2**30
"""The largest size in bytes of the tensors of a call that is repeated. Larger calls are not repeated."""
MOST_S: Final = 3.0
"""The time limit for trying cures, in seconds of CPU time of this thread."""


@dataclass(frozen=True)
class Site:
    """The precision settings of a region of a prepared model.

    From them a :class:`~castwise.core.casting.frames.Frame`, which puts such settings in force, can be made for another
    plan.

    Attributes:
        plan: The plan.
        compute: The format in which the region computes.
        device_type: The device type for which the settings hold.
        extra: Operator rules beyond those of the plan, for operators that the plan's ``ops`` do not name.
        meets: Whether the region is a module whose own fp32 table is combined with bf16 or fp16 tensors, as in
            :attr:`~castwise.core.model.resolve.ModulePlan.meets`. The plan's operator rules do not hold in it.
    """

    plan: Plan
    compute: str
    device_type: str
    extra: Mapping[str, rules.Row] = dataclasses.field(default_factory=dict)
    meets: bool = False

    def frame(self, plan: Plan) -> Frame:
        """Return the precision settings of this region under another plan, as a ``Frame`` for temporary use.

        The frame is not registered for ``torch.compile``, and no low-precision copies of weights are cached in it.
        """
        dtype = FORMATS[self.compute].dtype
        if self.meets:
            rows = dict(rules.meetings(self.device_type))
            return Frame(self.device_type, dtype, dtype, rows, kernels.actions(rows), cache=False)
        if not casts_operators(plan, self.compute):
            return Frame(self.device_type, None, dtype)
        own = dict(plan.ops)
        rows = {**override_rows(plan, self.device_type)}
        rows |= {op: row for op, row in self.extra.items() if op not in own}
        return Frame(self.device_type, dtype, dtype, rows, kernels.actions(rows), cache=False)


@contextlib.contextmanager
def _in_force(frame: Frame) -> Iterator[None]:
    """Activate precision settings, given as a :class:`Frame`, inside a ``with`` block.

    Warnings are ignored inside, and the states of the random number generators are restored at the end.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(devices.same_random_numbers([frame.device_type]))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if frame.rows:
            lease = kernels.Lease(frame.rows, frame.device_type)  # holds only while a variable refers to it
            stack.callback(lease.close)
        frames.push(frame)
        stack.callback(frames.unwind, frames.depth() - 1)
        yield


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.is_complex():
        return tensor.to(COMPLEX[dtype])
    return tensor.to(dtype)


class Complaint:
    """A dtype error of an operator, and the search for its cures."""

    def __init__(self, error: BaseException, model: nn.Module, site: Site, outside: bool) -> None:
        self._error, self._model, self._text = error, model, str(error.args[0])
        self._paths = {module: name for name, module in model.named_modules()}
        self._module, self._site = self._innermost(site)
        self._outside = outside and self._module is None
        self._until, self._late = time.thread_time() + MOST_S, False
        self._inside = self._site.frame(self._site.plan)
        self._off = Frame(site.device_type, None)
        self._frame = self._off if self._outside else self._inside

    def _innermost(self, site: Site) -> tuple[nn.Module | None, Site]:
        """Return the innermost module of the model that was running, or None, and the precision settings around it."""
        found, trace = None, self._error.__traceback__
        while trace is not None:
            owner = trace.tb_frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and owner in self._paths:
                found = owner
                for hook in _torch.hooks.hook_tables(owner)[1].values():
                    site = getattr(getattr(hook, "__self__", None), "site", None) or site
            trace = trace.tb_next
        return found, site

    def said(self) -> str:
        """Return the text to add to the error's message, or an empty text if the error is not a dtype error."""
        if self._module is None and not self._outside:
            return ""  # an error that was raised before the model ran
        spot = Spot()
        for frame in dict.fromkeys((
            self._frame,
            self._off,
        )):  # a block in the model's code may have turned autocast off
            with _in_force(frame):
                calls, spot = failed_calls(self._error.__traceback__)
            if self._outside and not self._has_weights(calls):
                return ""  # not caused by the model
            if said := self._tried(calls, frame):
                return said
        return self._untried(spot)

    def said_of_backward(self, loss: Tensor) -> str:
        """Return the text to add to the message of an error from the backward pass of ``loss``, as :meth:`said` does."""
        self._outside = False
        with _in_force(self._off):
            calls, _ = failed_calls(self._error.__traceback__)
            if said := self._tried(calls, self._off):  # the error is in the backward of a user's Function
                return said.replace(" outside of the model, in ", " in backward, in ", 1)
            calls = failed_in_backward(loss, self._error, MOST_S)
        said = self._tried(calls, self._inside)
        return said.replace(" outside of the model, in ", " in the backward of ", 1)

    def _tried(self, calls: list[Call], where: Frame) -> str:
        """Return the text with the cures of the first call that fails again in the same way.

        The text is empty if no call fails again.
        """
        failing = [call for call in filter(self._worth, calls) if self._fails(call, where)]
        if not failing:
            return ""
        call, *around = failing
        cures = self._cures(call, where)
        for outer in around:
            cures += self._rules(outer, where) if "::" in outer.name else []
        cast, line = self._line(call, where)
        head = self._head(call, call.spot, cast)
        if cures or line:
            return f"{head} {sentence(list(dict.fromkeys(cures)), line, self._late)}"
        if self._late or not is_dtype_error(self._text):
            return ""
        return f"{head} No other rule for this call and no other dtype of its inputs makes it run."

    def _has_weights(self, calls: list[Call]) -> bool:
        mine = {id(t) for t in (*self._model.parameters(), *self._model.buffers())}
        return any(id(_torch.operators.base_of(t)) in mine for call in calls for t in call.tensors)

    # --- trying ---------------------------------------------------------------------------------------------

    def _worth(self, call: Call) -> bool:
        """Whether a call may have failed because of dtypes and is safe to repeat."""
        tensors = call.tensors
        if sum(tensor.numel() * tensor.element_size() for tensor in tensors) > MOST_BYTES:
            return False
        if "::" in call.name and torch.distributed.is_available() and torch.distributed.is_initialized():
            return False  # a custom operator may wait for other ranks
        dtypes = {tensor.dtype for tensor in tensors if tensor.dtype is not torch.bool}
        if call.name == OF_MODULE or "::" in call.name:
            return bool(dtypes)
        return len(dtypes) > 1 or not dtypes.isdisjoint((*LOW_DTYPES, torch.complex32))

    def _fails(self, call: Call, frame: Frame) -> bool:
        """Whether a call fails again with the same type of error under the precision settings of ``frame``."""
        try:
            with _in_force(frame):
                call.again()
        except Exception as error:
            return type(error) is type(self._error)
        return False

    def _runs(self, call: Call, frame: Frame, casts: Mapping[int, torch.dtype] | None = None) -> bool:
        """Whether a call runs without an error under the precision settings of ``frame``, with some of its tensors cast.

        ``casts`` maps the ``id`` of a tensor to its new dtype.
        """
        casts = casts or {}
        if time.thread_time() > self._until:
            self._late = True
            return False
        try:
            with _in_force(frame):
                call.again(lambda t: _cast(t, casts[id(t)]) if id(t) in casts else t)
        except Exception:  # an operator may raise any error
            return False
        return True

    # --- changes of the plan --------------------------------------------------------------------------------

    def _cures(self, call: Call, where: Frame) -> list[str]:
        """Return advice for each change of the plan, or of the arguments of ``prepare``, with which the call runs."""
        if self._outside:
            return ["make this call inside `with amp.autocast():`"] if self._runs(call, self._inside) else []
        found = self._rules(call, where)
        frozen = {id(p) for p in self._model.parameters() if p.dtype in LOW_DTYPES and not p.requires_grad}
        if any(id(t) in frozen for t in call.tensors) and self._runs(
            call, where, dict.fromkeys(frozen, torch.float32)
        ):
            found.append("store frozen parameters in fp32 as well, by prepare(..., widen='all')")
        return [*found, *self._tables(call, where), *self._regions(call)]

    def _regions(self, call: Call) -> list[str]:
        """Return advice to run the failing module in an fp32 region, if the failed call then runs.

        It is tried only for modules of ``torch.nn`` without children.
        """
        module = self._module
        if (
            module is None
            or not (path := self._paths[module])
            or not type(module).__module__.startswith("torch.nn.modules.")
            or next(module.children(), None) is not None
            or call.name == OF_MODULE
        ):
            return []
        casts = {id(t): torch.float32 for t in call.tensors if is_real(t)}
        if self._accepts(Region(path, compute="fp32")) and self._runs(call, self._off, casts):
            return [f"keep it in fp32, by Region({path!r}, compute='fp32')"]
        return []

    def _accepts(self, region: Region) -> bool:
        try:
            plan = dataclasses.replace(self._site.plan, regions=(*self._site.plan.regions, region))
            resolve(plan, self._model, self._site.device_type)
        except CastwiseError:
            return False
        return True

    def _rules(self, call: Call, where: Frame) -> list[str]:
        """Return advice to add a rule for the operator to the plan, if the call runs with that rule."""
        site = self._site
        if call.name == OF_MODULE or site.meets or where is not self._inside:
            return []
        found: list[str] = []
        with contextlib.ExitStack() as held:
            for rule in ("widest", "lower", "fp32", "as_is"):
                if (rule == "fp32" and found[:1] == ["widest"]) or (rule == "as_is" and found):
                    continue  # it has the same effect here as the rule that was found
                plan = self._with_rule(site, call.name, rule)
                if plan is None:
                    continue
                frame = site.frame(plan)
                lease = kernels.Lease(
                    frame.rows, frame.device_type
                )  # kept open, since the next rule needs it too
                held.callback(lease.close)
                if self._runs(call, frame):
                    found.append(rule)
        names = " or ".join(f"ops.{call.name}={rule}" for rule in found)
        if not found:
            return []
        plan = self._with_rule(site, call.name, found[0])
        whole = f", as in {str(plan)!r}" if len(str(plan)) <= 200 else ""
        return [f"add {names} to the plan{whole}"]

    def _with_rule(self, site: Site, name: str, rule: str) -> Plan | None:
        """Return the plan with one more operator rule, or None if the rule is invalid or affects other operators too."""
        try:
            plan = with_rule(site.plan, name, rule)
            override_rows(plan, site.device_type)
            if not casts_operators(plan, site.compute):
                return None
            if not casts_operators(site.plan, site.compute):
                now, then = (resolve(p, self._model, site.device_type) for p in (site.plan, plan))
                if has_constants(self._model) or (now.places, now.storage) != (then.places, then.storage):
                    return None
        except CastwiseError:
            return None
        return plan

    def _tables(self, call: Call, where: Frame) -> list[str]:
        """Return advice to store an fp32 buffer in bf16 or fp16, for each buffer with which the failed call then runs."""
        site = self._site
        low = next((t.dtype for t in call.tensors if t.dtype in LOW_DTYPES), None)
        found: list[str] = []
        if low is None:
            return []
        for path, module in self._model.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                continue
            if site.plan.params != "compute" and next(module.parameters(recurse=False), None) is not None:
                continue
            for name, buffer in module.named_buffers(recurse=False):
                mine = {id(t) for t in call.tensors if _torch.operators.base_of(t) is buffer}
                if not mine or buffer.dtype is not torch.float32:
                    continue
                region = Region(path or f"type:{type(module).__name__}", params=NAMES[low])
                if self._accepts(region) and self._runs(call, where, dict.fromkeys(mine, low)):
                    found.append(
                        f"store the buffer {path + '.' if path else ''}{name} in {NAMES[low]}, by "
                        f"Region({region.pattern!r}, params={NAMES[low]!r})"
                    )
        return found

    # --- casts in the user's code ---------------------------------------------------------------------------

    def _line(self, call: Call, where: Frame) -> tuple[Mapping[int, torch.dtype], str]:
        """Find casts of the call's tensors with which the call runs.

        Returns:
            The new dtypes by the tensors' ``id``, and the code to write as advice. Both are empty if no casts are
            found.
        """
        floating = [t for t in call.tensors if is_real(t)]
        written = (
            list(tensors_in(call.kwargs["out"] if "out" in call.kwargs else call.args[:1]))
            if call.writes
            else []
        )
        receiver = written[0] if len(written) == 1 else None
        line = call.spot.line
        there = f"in line {line.number}" if line is not None else f"where {call.name} is called"
        for casts in self._castings(call, floating, receiver):
            if self._runs(call, where, casts):
                if casts.keys().isdisjoint(map(id, written)):
                    return casts, f"{writing(call, casts)} {there}"
                if receiver is not None and (
                    made := factory(receiver, casts[id(receiver)], floating, call.spot)
                ):
                    return casts, made
        for dtype in self._wanted(floating) if not written else ():
            casts = {id(t): dtype for t in floating}
            if self._runs(call, self._off, casts):
                block = f"with torch.autocast({self._off.device_type!r}, enabled=False):"
                return casts, f"{writing(call, casts)} {there}, inside `{block}`"
        return {}, ""

    def _wanted(self, tensors: Iterable[Tensor]) -> list[torch.dtype]:
        """Return the dtypes to which these tensors may all be cast, in the order in which to try them.

        The widest of their dtypes other than fp64 comes first, then fp32, then the region's compute format.
        """
        found = [
            torch.empty((), dtype=t.dtype, device="cpu").real.dtype if t.is_complex() else t.dtype
            for t in tensors
        ]
        narrow = [dtype for dtype in found if dtype is not torch.float64]
        low = [FORMATS[self._site.compute].dtype]
        widest = widest_dtype(narrow)
        order = [*([] if widest is None else [widest]), torch.float32, *low, *found]
        return list(dict.fromkeys(order))

    def _castings(
        self, call: Call, floating: list[Tensor], receiver: Tensor | None
    ) -> Iterator[dict[int, torch.dtype]]:
        """Yield possible casts of the call's tensors, the best first.

        Each is a mapping from the ``id`` of a tensor to its new dtype.
        """
        if receiver is not None and (receiver.is_floating_point() or receiver.is_complex()):
            others = [t for t in floating if t is not receiver]
            for dtype in self._wanted(others) if others else (torch.float32,):
                yield {id(receiver): dtype}
            target = receiver.dtype
            if target in NAMES:
                yield {id(t): target for t in others if t.dtype is not target}
        known = {id(t) for t in (*self._model.parameters(), *self._model.buffers())}
        for dtype in dict.fromkeys(t.dtype for t in floating if id(t) in known and t.is_floating_point()):
            yield {id(t): dtype for t in floating if t.dtype is not dtype and id(t) not in known}
        for dtype in self._wanted(floating):
            yield {id(t): dtype for t in floating if t.dtype is not dtype}
        whole = [
            t for t in call.tensors if not (t.is_floating_point() or t.is_complex() or t.dtype is torch.bool)
        ]
        for dtype in self._wanted(floating):
            wide = {id(t): dtype for t in floating if t.dtype is not dtype}
            for one in whole[:4]:
                yield {id(one): dtype}
                yield {id(one): dtype, **wide}
        for one in floating if asks_for_whole(self._text) else ():
            yield {id(one): torch.int64}

    # --- text -------------------------------------------------------------------------------------------------

    def _head(self, call: Call | None, spot: Spot, cast: Iterable[int] = ()) -> str:
        """Return the first sentence of the explanation, which says which dtypes met and where."""
        if call is not None:
            shown = [t for t in call.tensors if is_real(t) or id(t) in cast]
            met = list(dict.fromkeys(named(t.dtype) for t in shown))
        else:
            met = met_in(self._text)
        module, name = self._module, "" if call is None or call.name == OF_MODULE else f", in {call.name}"
        where = " outside of the model"
        if module is not None:
            path, kind = self._paths[module], type(module).__name__
            where = f" in {path!r} ({kind})" if path else f" in {kind} itself"
        line = f", {spot.line}" if spot.line is not None else ""
        code = f" (`{spot.code}`)" if spot.code else ""
        what = f"dtypes {' and '.join(met)} met" if len(met) > 1 else f"dtype {''.join(met)} was refused"
        return f"{what}{where}{name}{line}{code}."

    def _untried(self, spot: Spot) -> str:
        """Return the explanation for a call that could not be repeated."""
        if not is_dtype_error(self._text) or raised_by_hand(self._error.__traceback__):
            return ""  # the message of an error that user code raises may be about anything
        there = f"in line {spot.line.number}" if spot.line is not None else "there"
        several = len(met_in(self._text)) > 1
        write = (
            ".to(torch.float32) or .to(other.dtype), so that all have one dtype"
            if several
            else ".to(torch.float32)"
        )
        return (
            f"{self._head(None, spot)} {'There was no time to try cures' if self._late else _NOT_AGAIN}: cast the operator's "
            f"inputs {there}, by {write}."
        )
