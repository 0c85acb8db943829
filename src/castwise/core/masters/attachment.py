"""Masters in an optimizer, synchronised with the model."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from operator import is_
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from castwise.core import _torch
from castwise.core.masters import sync
from castwise.core.masters.copies import is_being_copied, look_at_copies, search
from castwise.core.masters.files import Loads, with_masters
from castwise.core.masters.following import follow_parameters, leave_parameters
from castwise.core.masters.originals import (
    forget_original,
    is_low,
    local,
    merge_values,
    original_of,
    remember_original,
)
from castwise.core.masters.pairs import Pairs, mark_of
from castwise.core.masters.parameter import (
    Master,
    adopt,
    allow_low_grad,
    become_master,
    master_of,
    model_param_of,
    narrow_grad,
    new_master,
    release,
)
from castwise.core.masters.state import move_state, restride_state
from castwise.core.masters.step_hooks import Call, after_step, before_step
from castwise.core.masters.weights import install_hooks, named_masters, write_masters
from castwise.errors import StateError

_attachments: weakref.WeakKeyDictionary[Optimizer, Attachment] = weakref.WeakKeyDictionary()


def attach(
    optimizer: Optimizer,
    model: nn.Module | None = None,
    *,
    originals: Mapping[Any, Tensor] | None = None,
) -> Attachment:
    """Give every trainable parameter that is stored low an fp32 master in the optimizer.

    The lists ``group["params"]`` are rewritten in place, state is moved to the masters, and from then on the
    optimizer's ``step``, whoever calls it, updates the masters and then the model. Parameters stored in fp32 stay in
    the optimizer unchanged; frozen low ones stay until they are unfrozen.

    Args:
        optimizer: Any torch optimizer. Attaching again adds the parameters of ``model`` to those that get masters.
        model: A prepared model: only its parameters get masters, now or when they are added or unfrozen later. None:
            every parameter of the optimizer that is stored low.
        originals: fp32 values to start masters from; a parameter without an entry starts from its stored value. A
            tensor with the parameter's strides becomes the master's memory.

    Returns:
        The object that synchronises masters and model. It lives as long as the optimizer.

    Raises:
        StateError: ``Optimizer.__init__`` never ran for the optimizer. After this or any other error the optimizer,
            the parameters and the model's hooks are unchanged.
    """
    if not _torch.optimizers.has_step_hooks(optimizer):
        raise StateError(
            f"prepare: {type(optimizer).__name__} is a torch.optim.Optimizer whose Optimizer.__init__ was never called, so "
            "its steps cannot be followed. Prepare the optimizer that it wraps, or call super().__init__(params, defaults) in it."
        )
    for parameter, values in () if originals is None else originals.items():
        if isinstance(parameter, nn.Parameter) and master_of(parameter) is None:
            remember_original(parameter, values)
    attachment = _attachments.get(optimizer)
    if attachment is not None:
        attachment.extend(model)
        return attachment
    attachment = Attachment(optimizer)
    try:
        attachment.install(optimizer)
        attachment.extend(model)
    except BaseException:
        attachment.detach()
        raise
    return attachment


def attachment_of(optimizer: Optimizer) -> Attachment | None:
    """The object that :func:`attach` returned for the optimizer, or None."""
    return _attachments.get(optimizer)


class Attachment:
    """The masters of one optimizer and the hooks that synchronise them; made by :func:`attach`.

    A write to a master or to its parameter, also outside of ``step``, changes both: writes to masters
    reach the model before its next ``forward`` and ``state_dict``, writes to parameters reach the masters
    before the next step. If both were written in between and differ, the master's values are used, with a warning.

    Writes through ``parameter.data`` are noticed as well. Writes that torch does not count (numpy, DLPack, foreign
    kernels) are searched for in a few elements of each parameter before a step; after such a write call
    :meth:`refresh_from_model`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        """Create it without parameters; this changes nothing."""
        self.covers_all = False
        self._low_gradients = False
        self._optimizer = weakref.ref(optimizer)
        self._models: list[tuple[weakref.ref[nn.Module], Callable[[], None]]] = []
        """Each model with the function that removes its hooks."""
        self._pairs = Pairs(self._optimizer)
        self._steps = 0
        self._frozen: list[nn.Parameter] = []
        self._groups: list[list[Any]] = []
        self._loads = Loads(optimizer)
        self._following: weakref.finalize[..., Attachment] | None = None
        self._concerned: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()

    @property
    def _hooks(self) -> tuple[Callable[..., Any], ...]:
        """The hooks, created on each call but equal: stored here, they would make a reference cycle."""
        return (
            MethodType(before_step, self),
            MethodType(after_step, self),
            self.after_load,
            self.after_save,
        )

    def install(self, optimizer: Optimizer) -> None:
        """Hook the optimizer's steps; :meth:`detach` undoes it, however far it got."""
        _attachments[optimizer] = self
        _torch.tensors.refuse_inlining(before_step)
        _torch.tensors.refuse_inlining(after_step)
        before, after, loaded, saved = self._hooks
        _torch.steps.subscribe(before, after, of=optimizer)
        optimizer.register_load_state_dict_post_hook(loaded)
        optimizer.register_state_dict_post_hook(saved)
        # torch leaves hooks out of copies of an optimizer, and one without these would train masters that never
        # reach a model.
        optimizer.__reduce_ex__ = _Reducer(optimizer)  # type: ignore[method-assign]
        sync.live[id(self)] = self
        _follow_all_steps()
        follow_parameters()
        self._following = weakref.finalize(self, leave_parameters)
        self._following.atexit = False

    @property
    def masters(self) -> tuple[nn.Parameter, ...]:
        """The masters, in the order of the optimizer's groups."""
        return tuple(self._pairs.masters)

    @property
    def stored(self) -> tuple[nn.Parameter, ...]:
        """The model's parameters of these masters, in the same order."""
        return tuple(self._pairs.stored)

    # --- which parameters have masters ---------------------------------------------------------------------

    def extend(self, model: nn.Module | None) -> None:
        """Cover parameters: each gets a master when it is in the optimizer, trainable and low."""
        if model is None:
            self.covers_all = True
        elif all(known() is not model for known, _ in self._models):
            known = weakref.ref(model)
            install_hooks(model, lambda remove: self._models.append((known, remove)))
        self.scan()

    def concerns(self, module: nn.Module) -> bool:
        """Whether parameters of a module have masters here, or may get them."""
        known = self._concerned.get(module)
        if known is None:
            own = self._covered().union(map(id, self._pairs.stored))
            optimizer = self._optimizer() if self.covers_all else None
            for group in () if optimizer is None else optimizer.param_groups:
                own.update(id(model_param_of(parameter)) for parameter in group["params"])
            known = self._concerned[module] = any(id(parameter) in own for parameter in module.parameters())
        return known

    def _alive(self) -> list[nn.Module]:
        return [model for reference, _ in self._models if (model := reference()) is not None]

    def _covered(self) -> set[int]:
        return {id(parameter) for model in self._alive() for parameter in model.parameters()}

    def scan(self) -> None:
        """Give masters to covered parameters of the optimizer's groups that lack one.

        If it fails, everything stays unchanged.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            return
        covered = None if self.covers_all else self._covered()
        groups = [list(group["params"]) for group in optimizer.param_groups]
        made: dict[int, Any] = {}
        frozen = []
        for params in groups:
            for index, parameter in enumerate(params):
                if isinstance(parameter, Master) or not is_low(parameter):
                    continue
                if covered is not None and id(parameter) not in covered:
                    continue
                if parameter.requires_grad:
                    if id(parameter) not in made:
                        made[id(parameter)] = new_master(parameter)
                    params[index] = made[id(parameter)]
                else:
                    frozen.append(parameter)
        masters = [p for params in groups for p in params if isinstance(p, Master)]
        # a master made by another optimizer may differ from its parameter by now: it is compared at the next step
        new = (master for master in made.values() if master_of(master.stored) is None)
        marks = self._pairs.marks() | {id(master.stored): mark_of(master) for master in new}
        pairs = Pairs(self._optimizer, masters, marks)
        former = [list(group["params"]) for group in optimizer.param_groups]
        kept = [
            (master, master_of(master.stored), original_of(master.stored), optimizer.state.get(master.stored))
            for master in made.values()
        ]
        before = dict(vars(self))
        try:
            for master in made.values():
                adopt(master)
                if self._low_gradients:
                    allow_low_grad(master.stored)
            move_state(optimizer, {master.stored: master for master in made.values()})
            for params, group in zip(groups, optimizer.param_groups, strict=True):
                _put(params, group)
            self._pairs, self._frozen, self._groups = pairs, frozen, groups
            self._concerned = weakref.WeakKeyDictionary()
            for master in made.values():
                forget_original(master.stored)
            if made and self._loads.look(optimizer):
                self.join_files()
        except BaseException:
            vars(self).update(before)
            for params, group in zip(former, optimizer.param_groups, strict=True):
                _put(params, group)
            for master, shared, original, state in kept:
                if state is not None:
                    optimizer.state[master.stored] = state
                if shared is None:
                    release(master, write_back=None)
                if original is not None:
                    remember_original(master.stored, original)
            move_state(optimizer, {master: master.stored for master in made.values()}, fit=False)
            raise

    def detach(self, *, write_back: bool = False) -> None:
        """Remove the masters from the optimizer and restore the model's own parameters, hooks and ``grad_dtype``.

        Args:
            write_back: The parameters become fp32 and take the masters' values (and memory). Otherwise they stay
                low, the optimizer's state takes their format, and the masters' values are remembered as their
                originals (see :func:`castwise.masters.original_of`).
        """
        optimizer = self._optimizer()
        if optimizer is not None:
            _torch.hooks.remove_hooks(optimizer, *self._hooks)
        for _, remove in self._models:
            remove()
        self.refresh_from_model()
        self._let_go(self._pairs.masters, write_back)
        sync.live.pop(id(self), None)
        if self._following is not None:
            self._following()
        if optimizer is not None:
            vars(optimizer).pop("__reduce_ex__", None)
            _attachments.pop(optimizer, None)
        self._pairs, self._frozen, self._groups = Pairs(self._optimizer), [], []

    def leave(self, model: nn.Module | None) -> None:
        """Detach and write the masters' values back, except those that other live models share.

        Models that no longer exist, and ``model``, do not count as sharing; with None only the former.
        """
        kept = [
            (reference, remove)
            for reference, remove in self._models
            if (known := reference()) is not None and known is not model
        ]
        if not kept and not self.covers_all:
            self.detach(write_back=True)
            return
        for reference, remove in self._models:
            if all(reference is not other for other, _ in kept):
                remove()
        self._models = kept
        if self.covers_all:
            return
        self.refresh_from_model()
        covered = self._covered()
        self._let_go([m for m in self._pairs.masters if id(model_param_of(m)) not in covered], True)
        self.scan()

    def _let_go(self, masters: Sequence[Any], write_back: bool) -> None:
        """Release each parameter, values first; repeating the call after an interruption skips the parameters already released.

        A master that another optimizer also holds, for another model, stays with that optimizer, and its state here
        stays fp32.
        """
        others = {id(m) for other in sync.attachments() if other is not self for m in other.masters}
        for master in masters:
            if id(master) not in others:
                release(master, write_back=write_back)
        optimizer = self._optimizer()
        if optimizer is None:
            return
        move_state(optimizer, {m: m.stored for m in masters if id(m) not in others})
        move_state(optimizer, {m: m.stored for m in masters if id(m) in others}, fit=False)
        gone = {id(master) for master in masters}
        for group in optimizer.param_groups:
            _put([p.stored if id(p) in gone else p for p in group["params"]], group)

    # --- gradients under DistributedDataParallel ------------------------------------------------------------

    def accept_low_gradients(self) -> None:
        """Allow gradients in the parameters' dtype, for code that cannot write fp32 ones, such as torch's DDP.

        Each is converted to fp32, once and in place, when the optimizer, a scaler or other code first reads it from the
        master; until then microbatches accumulate in the low format, as in DDP without masters. Called when
        DistributedDataParallel is built on a prepared model.
        """
        self._low_gradients = True
        for parameter in self._pairs.stored:
            allow_low_grad(parameter)

    def narrow_gradients(self) -> None:
        """Before another backward accumulates into fp32 gradients, round them again, since DDP adds only in the low dtype."""
        if self._low_gradients:
            for parameter in self._pairs.stored:
                narrow_grad(parameter)

    # --- values ---------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Update the model from masters that were written outside of a step.

        Parameters that were unfrozen or added to the optimizer get their masters as well, so that the gradients of the
        next backward are fp32. Called before each ``forward`` of a prepared model; if nothing was written, it costs
        only a comparison of versions.
        """
        self._scan_for_more(self._optimizer())
        self._pairs.push_written()

    def settle(self) -> None:
        """Copy writes to parameters into masters, and writes to masters into parameters. Compares versions, not values."""
        optimizer = self._optimizer()
        if optimizer is not None:
            self._scan_for_more(optimizer)
            self._pairs.pull()
            if self._loads.waiting:
                self._loads.join(optimizer, self._pairs.pull)

    def join_files(self) -> None:
        """Give masters the full values that the optimizer loaded, if these round to the model's weights.

        Called after either was loaded; values that do not fit wait until the other is loaded, or the next step.
        """
        optimizer = self._optimizer()
        self._loads.waiting = True
        if optimizer is not None:
            with contextlib.suppress(
                StateError
            ):  # the model was cast; its next step raises an error that says so
                self._loads.join(optimizer, self._pairs.pull)

    def refresh_from_model(self) -> None:
        """Update the masters from parameters that were changed by hand in any way.

        Where an element of a parameter still equals its master rounded, the master keeps its full value, also if the
        model was cast since. Synchronises with the device.
        """
        self._pairs.refresh()
        if self._loads.waiting:
            self.join_files()

    def copy_to_model(self) -> None:
        """Write every master into its parameter, rounded."""
        self._pairs.push_all()

    def state_dict(self) -> dict[str, Tensor]:
        """The masters by the names of the model's parameters, sharing their memory. Synchronises with the device.

        Masters of other parameters are named by their position in the optimizer.
        """
        self.refresh_from_model()
        return named_masters(self._pairs.masters, self._pairs.stored, self._alive())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Write saved masters, and then the model's parameters.

        Raises:
            CheckpointError: The saved masters are not those of this model and optimizer; nothing was changed.
        """
        into = named_masters(self._pairs.masters, self._pairs.stored, self._alive())
        write_masters(into, state_dict)
        self.copy_to_model()

    def rewrite(self, write: Callable[[Tensor], object], params: Container[Tensor] | None = None) -> None:
        """Call ``write`` to change masters in place, all or those of ``params``, then update the model.

        DistributedDataParallel gives all ranks the first one's *parameters* when it wraps a model. Their masters
        must agree as well, or the ranks drift apart: ``attachment.rewrite(lambda t: dist.broadcast(t, 0))``.
        """
        for master in self._pairs.masters:
            if params is None or master.stored in params:
                write(local(master))
        self.copy_to_model()

    def _scan_for_more(self, optimizer: Optimizer | None) -> None:
        if optimizer is None:
            return
        groups = [group["params"] for group in optimizer.param_groups]
        if (
            len(groups) != len(self._groups)
            or any(
                len(a) != len(b) or not all(map(is_, a, b)) for a, b in zip(groups, self._groups, strict=True)
            )
            or any(parameter.requires_grad for parameter in self._frozen)
        ):
            self.scan()

    # --- hooks ----------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Called by the optimizer: synchronise, and write the masters' values to the model for a closure."""
        self._scan_for_more(optimizer)
        self._pairs.pull()
        if self._loads.waiting or self._loads.state != id(optimizer.state):
            self._loads.look(optimizer)
            self._loads.join(optimizer, self._pairs.pull, last=True)
        self._pairs.look()
        self._steps += 1
        search(self._steps, self._pairs.stored, master_of)
        look_at_copies()
        closure = _torch.steps.closure_of(args, kwargs)
        return None if closure is None else _torch.steps.with_closure(args, kwargs, self._wrap(closure))

    def after_step(self) -> None:
        """Called by the optimizer: update the model."""
        self._pairs.push_updated()

    def after_load(self, optimizer: Optimizer) -> None:
        """Called by the optimizer after its ``load_state_dict``."""
        restride_state(optimizer)
        self._loads.look(optimizer)
        self.join_files()

    def after_save(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Called by the optimizer with the result of its ``state_dict``."""
        with contextlib.suppress(StateError):
            self.settle()
        with_masters(optimizer, state_dict)

    def _wrap(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(closure)
        def evaluate() -> Any:
            self._pairs.push_updated()
            return closure()

        return evaluate


def _put(params: list[Any], group: dict[str, Any]) -> None:
    """Set the parameters of a group in its existing list, since some optimizers (LBFGS) keep a reference to it."""
    if isinstance(group["params"], list):
        group["params"][:] = params
    else:
        group["params"] = tuple(params)


def copy_to_model(optimizer: Optimizer) -> None:
    """Write the masters of an optimizer into the model, rounded; does nothing without masters.

    A step does this, and so does the next forward of a prepared model after masters were written by hand. Call it
    if the parameters are read before that.
    """
    attachment = attachment_of(optimizer)
    if attachment is not None:
        attachment.copy_to_model()


def refresh_master(parameter: nn.Parameter) -> bool:
    """Update the parameter's master after a write that torch does not count, such as by NumPy.

    Args:
        parameter: A parameter of a model.

    Returns:
        Whether anything differed; False also if there is no master. Synchronises with the device.
    """
    for attachment in sync.attachments():
        if any(parameter is stored for stored in attachment.stored):
            attachment.sync()
    master = master_of(parameter)
    return master is not None and merge_values(master, parameter)


# --- optimizers that hold masters and were not attached ---------------------------------------------------------


@functools.cache
def _follow_all_steps() -> None:
    """Hook the steps of every optimizer permanently, since another thread may be iterating over torch's hooks."""
    _torch.steps.subscribe(after=_after_any_step)


def _after_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Update the model after a step of an optimizer inside a prepared one (SAM's base, Lookahead's).

    Its fused kernels do not count as writes, so its masters are marked as written.
    """
    if not sync.live or torch.compiler.is_compiling() or optimizer in _attachments:
        return
    params = [p for group in optimizer.param_groups for p in group["params"]]
    held: list[Any] = [p for p in params if isinstance(p, Master)]
    if held:
        torch.autograd.graph.increment_version(held)
        steps = set(map(id, held))
        for attachment in sync.attachments():
            if not steps.isdisjoint(map(id, attachment.masters)):
                attachment.sync()


class _Reducer:
    """Replaces ``optimizer.__reduce_ex__``: copies of an optimizer get its hooks; pickles are those of plain torch."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)

    def __call__(self, protocol: Any) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None
        reduced: Any = type(optimizer).__reduce_ex__(optimizer, protocol)
        if not is_being_copied():
            return reduced
        attachment = _attachments.get(optimizer)
        pairs = () if attachment is None else (*zip(attachment.masters, attachment.stored, strict=True),)
        return _rebuild_optimizer, (type(optimizer), pairs), reduced[2]


def _rebuild_optimizer(kind: type[Optimizer], pairs: Iterable[tuple[Any, Any]] = ()) -> Optimizer:
    for master, stored in pairs:  # before the state, which has them as keys
        become_master(master, stored)
    optimizer: Optimizer = kind.__new__(kind)
    optimizer.__setstate__({"defaults": {}, "state": {}, "param_groups": []})
    attach(optimizer)
    return optimizer
