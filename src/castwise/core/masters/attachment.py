"""Put fp32 master weights into an optimizer, and keep them equal to the model's parameters."""

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
    """Give every trainable parameter of an optimizer that is stored in bf16 or fp16 an fp32 master.

    The lists ``group["params"]`` are rewritten in place to hold the masters, and optimizer state is moved to them.
    From then on the optimizer's ``step``, whoever calls it, updates the masters and then the model. Parameters stored
    in fp32 stay in the optimizer unchanged. A frozen parameter in bf16 or fp16 gets a master when it is unfrozen.

    Args:
        optimizer: Any torch optimizer. Another call with the same optimizer adds the parameters of ``model`` to those that
            get masters.
        model: A prepared model. Only its parameters get masters, now or when they are added or unfrozen later. With None,
            every parameter of the optimizer in bf16 or fp16 gets a master.
        originals: Maps parameters to the fp32 values from which their masters start. A master without an entry starts from
            the parameter's stored value. A tensor with the parameter's strides becomes the master's memory.

    Returns:
        The object that synchronises masters and model. It lives as long as the optimizer.

    Raises:
        StateError: ``Optimizer.__init__`` was never called for the optimizer. After this or any other error, the
            optimizer, the parameters and the model's hooks are unchanged.
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
    """Return the :class:`Attachment` that :func:`attach` created for an optimizer, or None."""
    return _attachments.get(optimizer)


class Attachment:
    """Manages the fp32 masters of one optimizer and keeps them equal to the model's parameters.

    :func:`attach` creates it.

    A write to a master or to its parameter changes both, also outside of ``step``. Writes to masters are copied to the
    model before its next ``forward`` and ``state_dict``. Writes to parameters are copied to the masters before the next
    step. If both were written in between and differ, the master's values are used, with a warning.

    Writes through ``parameter.data`` are noticed as well. Writes by numpy, DLPack or foreign kernels do not raise
    torch's version counters. They are searched for in a few elements of each parameter before a step. After such a
    write call :meth:`refresh_from_model`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        """Create an attachment without fp32 masters. The optimizer is not changed."""
        self.covers_all = False
        self._low_gradients = False
        self._optimizer = weakref.ref(optimizer)
        self._models: list[tuple[weakref.ref[nn.Module], Callable[[], None]]] = []
        """Each model whose parameters get fp32 masters, with the function that removes the hooks on the model."""
        self._pairs = Pairs(self._optimizer)
        self._steps = 0
        self._frozen: list[nn.Parameter] = []
        self._groups: list[list[Any]] = []
        self._loads = Loads(optimizer)
        self._following: weakref.finalize[..., Attachment] | None = None
        self._concerned: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()

    @property
    def _hooks(self) -> tuple[Callable[..., Any], ...]:
        """The hooks on the optimizer. They are created at each access, since stored hooks would make a reference cycle.

        The hooks of two accesses are equal.
        """
        return (
            MethodType(before_step, self),
            MethodType(after_step, self),
            self.after_load,
            self.after_save,
        )

    def install(self, optimizer: Optimizer) -> None:
        """Register hooks on the optimizer, for steps, loading, saving and copying.

        :meth:`detach` removes the hooks, also if this method failed in the middle.
        """
        _attachments[optimizer] = self
        _torch.tensors.refuse_inlining(before_step)
        _torch.tensors.refuse_inlining(after_step)
        before, after, loaded, saved = self._hooks
        _torch.steps.subscribe(before, after, of=optimizer)
        optimizer.register_load_state_dict_post_hook(loaded)
        optimizer.register_state_dict_post_hook(saved)
        # torch leaves hooks out of copies of an optimizer. A copy without these hooks would train masters whose values
        # are never copied to a model.
        optimizer.__reduce_ex__ = _Reducer(optimizer)  # type: ignore[method-assign]
        sync.live[id(self)] = self
        _follow_all_steps()
        self._following = weakref.finalize(self, leave_parameters)
        self._following.atexit = False
        follow_parameters({p.device.type for group in optimizer.param_groups for p in group["params"]})

    @property
    def masters(self) -> tuple[nn.Parameter, ...]:
        """The fp32 masters, in the order of the optimizer's parameter groups."""
        return tuple(self._pairs.masters)

    @property
    def stored(self) -> tuple[nn.Parameter, ...]:
        """The model's parameters to which :attr:`masters` belong, in the same order."""
        return tuple(self._pairs.stored)

    # --- which parameters have masters ---------------------------------------------------------------------

    def extend(self, model: nn.Module | None) -> None:
        """Add the parameters of a model to those that get fp32 masters.

        Such a parameter gets a master once it is in the optimizer, trainable, and stored in bf16 or fp16.

        Args:
            model: The model. None adds all parameters of the optimizer.
        """
        if model is None:
            self.covers_all = True
        elif all(known() is not model for known, _ in self._models):
            known = weakref.ref(model)
            install_hooks(model, lambda remove: self._models.append((known, remove)))
        self.scan()

    def concerns(self, module: nn.Module) -> bool:
        """Whether any parameter of a module has an fp32 master in this optimizer, or may get one."""
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
        """Give fp32 masters to those parameters in the optimizer's groups that should have one and do not yet.

        If an error is raised, nothing has changed.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            return
        covered = None if self.covers_all else self._covered()
        groups = [list(group["params"]) for group in optimizer.param_groups]
        made: dict[int, Any] = {}
        kept: list[tuple[Any, Any, Tensor | None, Any]] = []
        frozen = []
        for params in groups:
            for index, parameter in enumerate(params):
                if isinstance(parameter, Master) or not is_low(parameter):
                    continue
                if covered is not None and id(parameter) not in covered:
                    continue
                if parameter.requires_grad:
                    if id(parameter) not in made:
                        shared, original = master_of(parameter), original_of(parameter)
                        made[id(parameter)] = new_master(parameter, original)
                        kept.append((made[id(parameter)], shared, original, optimizer.state.get(parameter)))
                    params[index] = made[id(parameter)]
                else:
                    frozen.append(parameter)
        masters = [p for params in groups for p in params if isinstance(p, Master)]
        # a master that another optimizer made may differ from its parameter by now, so both are compared at the next step
        new = (master for master, shared, *_ in kept if shared is None)
        marks = self._pairs.marks() | {id(master.stored): mark_of(master) for master in new}
        pairs = Pairs(self._optimizer, masters, marks)
        former = [list(group["params"]) for group in optimizer.param_groups]
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
        """Remove the fp32 masters and all hooks, and put the model's own parameters back into the optimizer.

        ``grad_dtype`` of the parameters is restored.

        Args:
            write_back: True makes the parameters fp32 and gives them the masters' values and memory. With False, they stay
                in bf16 or fp16 and the optimizer's state is cast to their format. The masters' values are then kept as
                the parameters' originals (see :func:`castwise.masters.original_of`).
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
        """Stop updating a model through fp32 masters, and write the masters' values back to its parameters as fp32.

        Masters of parameters that other models of this optimizer use stay. All masters stay if :func:`attach` was
        called without a model. If there is no other model, everything is detached.

        Args:
            model: The model. None stands for models that no longer exist.
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
        """Replace fp32 masters in the optimizer by their parameters.

        If the call is interrupted, it may be repeated: parameters that already have no master are skipped. A master
        that another optimizer also holds stays in that optimizer, and its state in this optimizer stays fp32.
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
        """Allow gradients in the parameters' dtype, for code that cannot write fp32 gradients, such as torch's DDP.

        A gradient is converted to fp32, once and in place, when the optimizer, a scaler or other code first reads it
        from the fp32 master. Until then microbatches accumulate in the low format, as in DDP without masters. This is
        called when DistributedDataParallel is built on a prepared model.
        """
        self._low_gradients = True
        for parameter in self._pairs.stored:
            allow_low_grad(parameter)

    def narrow_gradients(self) -> None:
        """Round fp32 gradients to the parameters' dtype again, before another backward pass accumulates into them.

        DDP can add only in the parameters' dtype. Without DDP, nothing is done.
        """
        if self._low_gradients:
            for parameter in self._pairs.stored:
                narrow_grad(parameter)

    # --- values ---------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Update the model from fp32 masters that were written outside of a step.

        Parameters that were unfrozen or added to the optimizer also get their masters, so that their gradients are fp32
        from the next backward pass on. This is called before each ``forward`` of a prepared model. If nothing was
        written, it only compares version counters.
        """
        self._scan_for_more(self._optimizer())
        self._pairs.push_written()

    def settle(self) -> None:
        """Copy writes to parameters into fp32 masters, and writes to masters into parameters.

        Writes are detected by version counters, not by comparing values.
        """
        optimizer = self._optimizer()
        if optimizer is not None:
            self._scan_for_more(optimizer)
            self._pairs.pull()
            if self._loads.waiting:
                self._loads.join(optimizer, self._pairs.pull)

    def join_files(self) -> None:
        """Give fp32 masters the fp32 values that the optimizer has loaded, if these values round to the model's weights.

        This is called after the model or the optimizer was loaded. If values do not fit the weights, they are kept
        until the other of the two is loaded, or until the next step.
        """
        optimizer = self._optimizer()
        self._loads.waiting = True
        if optimizer is not None:
            with contextlib.suppress(
                StateError
            ):  # the model was cast; its next step raises an error that says so
                self._loads.join(optimizer, self._pairs.pull)

    def refresh_from_model(self) -> None:
        """Update the fp32 masters from parameters that were changed by hand, even if torch did not count the write.

        Where an element of a parameter equals the rounded element of its master, the master keeps its full value.
        This is so even if the model was cast since. Synchronises with the device.
        """
        self._pairs.refresh()
        if self._loads.waiting:
            self.join_files()

    def copy_to_model(self) -> None:
        """Write every fp32 master into its parameter, rounded."""
        self._pairs.push_all()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the fp32 masters by the names of the model's parameters, sharing their memory.

        Synchronises with the device.

        A master whose parameter is in no model is named by its position in the optimizer.
        """
        self.refresh_from_model()
        return named_masters(self._pairs.masters, self._pairs.stored, self._alive())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Write the values that :meth:`state_dict` returned into the fp32 masters, and then into the model's parameters.

        Raises:
            CheckpointError: The saved masters are not those of this model and optimizer. Nothing was changed.
        """
        into = named_masters(self._pairs.masters, self._pairs.stored, self._alive())
        write_masters(into, state_dict)
        self.copy_to_model()

    def rewrite(self, write: Callable[[Tensor], object], params: Container[Tensor] | None = None) -> None:
        """Call ``write`` with each fp32 master, which it changes in place, then update the model.

        For example, DistributedDataParallel gives all ranks the first rank's *parameters* when it wraps a model. The
        masters must agree as well, or the ranks drift apart: ``attachment.rewrite(lambda t: dist.broadcast(t, 0))``.

        Args:
            write: Called with this rank's part of each master.
            params: Parameters whose masters to change. None stands for all.
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
        """Make fp32 masters and model equal before a step of the optimizer, which calls this method as a hook.

        Returns:
            None, or the arguments of the step with a closure that first writes the masters' values to the model.
        """
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
        """Write the updated fp32 masters into the model after a step of the optimizer.

        The optimizer calls this method as a hook.
        """
        self._pairs.push_updated()

    def after_load(self, optimizer: Optimizer) -> None:
        """Give the masters the fp32 values in a state dict that the optimizer has loaded.

        The optimizer calls this method as a hook.
        """
        restride_state(optimizer)
        self._loads.look(optimizer)
        self.join_files()

    def after_save(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Add the fp32 masters to a state dict that the optimizer has created.

        The optimizer calls this method as a hook.
        """
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
    """Replace the parameters of a parameter group, in the group's existing list if there is one.

    Some optimizers, such as LBFGS, keep a reference to that list.
    """
    if isinstance(group["params"], list):
        group["params"][:] = params
    else:
        group["params"] = tuple(params)


def copy_to_model(optimizer: Optimizer) -> None:
    """Write the fp32 master weights of an optimizer into the model's parameters, rounded to bf16 or fp16.

    Call this function after your own code has changed master weights, if the model's parameters are read before the
    next step or forward. A step of the optimizer does the same, and so does the next forward of a prepared model. The
    function does nothing if the optimizer has no master weights.
    """
    attachment = attachment_of(optimizer)
    if attachment is not None:
        attachment.copy_to_model()


def refresh_master(parameter: nn.Parameter) -> bool:
    """Update a parameter's fp32 master weight after a write that torch cannot notice, such as a write by NumPy.

    Such a write does not raise the parameter's version counter. The fp32 master weight is the copy that the optimizer
    updates when the parameter is in bf16 or fp16. The function waits for the device.

    Args:
        parameter: A parameter of a model.

    Returns:
        Whether the master weight differed from the parameter. False also if the parameter has no master weight.
    """
    for attachment in sync.attachments():
        if any(parameter is stored for stored in attachment.stored):
            attachment.sync()
    master = master_of(parameter)
    return master is not None and merge_values(master, parameter)


# --- optimizers that hold masters and were not attached ---------------------------------------------------------


@functools.cache
def _follow_all_steps() -> None:
    """Call :func:`_after_any_step` after each step of every optimizer. The hook is never removed."""
    _torch.steps.subscribe(after=_after_any_step)


def _after_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Update the model after a step of an optimizer that a prepared optimizer wraps, as SAM and Lookahead do.

    Fused kernels of the wrapped optimizer do not raise version counters, so its fp32 masters are marked as written.
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
    """A replacement of ``optimizer.__reduce_ex__`` that gives copies of the optimizer its fp32 masters and hooks.

    Pickles are those of the optimizer's class.
    """

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
    for master, stored in pairs:  # masters come first, since the optimizer's state has them as keys
        become_master(master, stored)
    optimizer: Optimizer = kind.__new__(kind)
    optimizer.__setstate__({"defaults": {}, "state": {}, "param_groups": []})
    attach(optimizer)
    return optimizer
