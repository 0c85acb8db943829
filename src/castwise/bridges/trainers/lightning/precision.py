"""The precision plug-in that makes Lightning train under a castwise plan."""

from __future__ import annotations

import functools
import inspect
import os
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning
import torch
from lightning import Fabric, LightningModule
from lightning.fabric.strategies import ddp, dp, model_parallel
from lightning.pytorch import strategies
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from castwise import Amp, Plan, StepResult
from castwise.bridges.trainers.lightning.wrappers import (
    Resting,
    check_alone,
    evaluates,
    noting,
    params_of,
    save_masters,
    unwrapped,
)
from castwise.core.plans.plan import as_plan
from castwise.errors import PlanError, StateError

_TESTED = "2.6"
"""The release of Lightning with which castwise is tested."""
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_NAMES = {
    "fp32": ("32-true", "32-true"),
    "bf16": ("bf16-mixed", "bf16-true"),
    "fp16": ("16-mixed", "16-true"),
}
"""Lightning's name for the precision nearest to a plan, by the format in which the plan computes.

The first name is for fp32 parameters, the second for parameters stored in the low-precision format.
"""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_AVERAGING = (StochasticWeightAveraging, WeightAveraging)
_SHARDED = (model_parallel.ModelParallelStrategy, strategies.ModelParallelStrategy)
_WRAPPING = (
    ddp.DDPStrategy,
    dp.DataParallelStrategy,
    strategies.DDPStrategy,
)


class CastwisePrecision(Precision):
    """A Lightning precision plug-in that makes a Trainer or Fabric train under a castwise plan.

    A plan decides the formats in which a model computes and stores its weights. Pass the plug-in as
    ``Trainer(plugins=[CastwisePrecision(plan)])`` or ``Fabric(plugins=[CastwisePrecision(plan)])``.

    Args:
        plan: A :class:`~castwise.Plan`, the name of a preset, or the path of a plan file.
        model: The paths of the submodules that run under the plan, such as ``"net"``. The rest of the
            ``LightningModule``, including its loss, is unchanged. The plan's regions name modules relative to these
            submodules. By default the whole module runs under the plan, including ``training_step`` and the other
            steps, as with Lightning's own precisions. Plans that store parameters in bf16 or fp16 then also cast the
            floating tensors of a batch, including targets.
        methods: The names of methods that code outside the model calls, and that run under the plan. ``forward`` and
            the steps run under the plan anyway.
        nonfinite: What happens at a gradient that is not finite, as in :class:`castwise.Amp`.
        patience: The number of skipped steps in a row before an error, as in :class:`castwise.Amp`.
        group: The process group that trains the model, as in :class:`castwise.Amp`.

    Attributes:
        plan: The plan.
        last_step: The :class:`~castwise.StepResult` of the last optimizer step. None before the first step. If
            ``last_step.skipped`` is true, do not step a learning-rate scheduler by hand. Schedulers that a Trainer
            steps at the interval ``"step"`` pause automatically.

    Raises:
        PlanError: The plan does not exist or is invalid, or ``model`` is not a path.

    Warns:
        UserWarning: The installed release of Lightning is not the release with which castwise is tested.
    """

    def __init__(
        self,
        plan: Plan | str | os.PathLike[str] | torch.dtype,
        *,
        model: str | Sequence[str] | None = None,
        methods: Sequence[str] = (),
        nonfinite: str = "skip",
        patience: int = 10,
        group: Any = None,
    ) -> None:
        _check_release()
        self.plan = as_plan(plan)
        paths = [model] if isinstance(model, str) else model
        if paths is not None and not (
            isinstance(paths, Sequence) and paths and all(isinstance(path, str) and path for path in paths)
        ):
            raise PlanError(
                f"CastwisePrecision(model={model!r}) is not allowed. Allowed: the path of a submodule such as 'net', a sequence of "
                "such paths, or None for the whole module."
            )
        self.precision = _NAMES[self.plan.compute][self.plan.params == "compute"]  # type: ignore[assignment]
        self.last_step: StepResult | None = None
        self._paths = paths
        self._methods = tuple(methods)
        self._options = {"nonfinite": nonfinite, "patience": patience, "group": group}
        self._amp: Amp | None = None
        self._roots: list[weakref.ref[nn.Module]] = []
        self._own_steps: frozenset[str] = frozenset()
        """The methods of ``_STEPS`` that were assigned to the module instance.

        castwise cannot wrap them, and casts around their calls instead.
        """
        self._undo: list[Callable[[], object]] = []
        self._module: LightningModule | None = None
        """The LightningModule that a Trainer trains; None under Fabric."""
        self._fabric: tuple[Fabric, Sequence[Optimizer], bool] | None = None
        """The Fabric, the optimizers, and whether Fabric moves the module, while Fabric sets up a module. None otherwise."""
        self._waiting: list[nn.Module] = []
        """Modules of Fabric that are prepared when their optimizer is set up or, if none is set up, at the first call."""
        self._watched = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that copies and pickles keep: the plan and the options, without the session.

        A Trainer's hyperparameters may contain the plug-in, and are copied and pickled.
        """
        return vars(self) | {
            "last_step": None, "_amp": None, "_roots": [], "_own_steps": frozenset(), "_undo": [], "_module": None, "_fabric": None,
            "_waiting": [], "_watched": False,
        }  # fmt: skip

    @property
    def amp(self) -> Amp:
        """The :class:`castwise.Amp` that prepares the model. It is created when it is first used."""
        return self._open(None)

    @property
    def scaler(self) -> Any:
        """The :class:`castwise.GradScaler` that has the loss scale.

        None if the plan has no loss scale, or before :attr:`amp` was created.
        """
        return None if self.plan.loss_scale is None or self._amp is None else self._amp.scaler

    def _open(self, device_type: str | None) -> Amp:
        amp = self._amp
        if amp is None or (device_type not in (None, amp.device_type) and not self._alive()):
            self._amp = Amp(self.plan, device=device_type, **self._options)
            if amp is not None:
                self._amp.load_state_dict(amp.state_dict())
            return self._amp
        return amp

    def fully_shard(
        self, model: nn.Module, *, mesh: Any, blocks: Iterable[nn.Module] = (), **options: Any
    ) -> nn.Module:
        """Shard a module by FSDP2's ``fully_shard``, with the formats of the plan.

        Call this method in ``configure_model`` or in Fabric's ``parallelize_fn``.

        Args:
            model: The module to shard: the whole model or a submodule.
            mesh: The device mesh, which is ``device_mesh["data_parallel"]`` of the strategy.
            blocks: The modules that are sharded individually, as in :meth:`castwise.Amp.fully_shard`.
            options: Options of ``fully_shard``, as in :meth:`castwise.Amp.fully_shard`.

        Returns:
            The model.
        """
        amp = self._open(mesh.device_type)
        amp.fully_shard(model, mesh=mesh, blocks=blocks, part=self._paths is None, **options)
        return model

    # --- preparing ----------------------------------------------------------------------------------------

    def _alive(self) -> list[nn.Module]:
        return [root for reference in self._roots if (root := reference()) is not None]

    def _roots_of(self, module: nn.Module) -> list[nn.Module]:
        if self._paths is None:
            return [module]
        known = [name for name, _ in module.named_children()]
        roots = []
        for path in self._paths:
            try:
                roots.append(module.get_submodule(path))
            except AttributeError:
                raise PlanError(
                    f"CastwisePrecision(model={path!r}): {type(module).__name__} has no submodule of that path. "
                    + (
                        f"Allowed: {', '.join(map(repr, known))}, and their submodules."
                        if known
                        else "It has no submodules."
                    )
                ) from None
        return roots

    def _prepare(self, module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        amp, kind = self.amp, type(module).__name__
        whole = isinstance(module, LightningModule) and self._paths is None
        if whole and getattr(module, "_compiler_ctx", None) is not None:
            raise StateError(
                f"CastwisePrecision: this {kind} is compiled already with its training step, but a plan must be applied before compiling. Give "
                "the Trainer the uncompiled module, and compile with CastwisePrecision('...+compile=default', model='...')"
            )
        if whole and self.plan.compile != "as_given":
            raise StateError(
                f"CastwisePrecision({str(self.plan)!r}): the plan compiles the model, but {kind} is called by its steps. Name the "
                "submodule to compile: CastwisePrecision(plan, model='net')"
            )
        optimizers = [*optimizers]
        self._own_steps = frozenset(step for step in _STEPS if step in vars(module)) if whole else frozenset()
        for root in self._roots_of(module):
            own = {id(parameter) for parameter in root.parameters()}
            mine = [one for one in optimizers if not own.isdisjoint(map(id, params_of(one)))]
            steps = [step for step in _STEPS if step not in self._own_steps] if whole else []
            amp.prepare(root, *mine, methods=(*steps, *self._methods))
            self._roots.append(weakref.ref(root))
            if self.plan.keeps_masters and not any(hasattr(p, "placements") for p in root.parameters()):
                self._undo.append(root.register_state_dict_post_hook(save_masters).remove)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return the module, after preparing it for the plan if the strategy will wrap it next.

        A strategy wraps modules in DistributedDataParallel, for example. Otherwise a Trainer's module is prepared in
        :meth:`connect`, when its optimizers exist.
        """
        if self._fabric is not None:
            fabric, optimizers, moves = self._fabric
            if isinstance(fabric.strategy, _SHARDED):
                return module
            if moves:
                fabric.to_device(module)
            self._take(module, optimizers, isinstance(fabric.strategy, _WRAPPING))
        elif isinstance(module, LightningModule):
            trainer = module.trainer
            strategy = trainer.strategy
            self._module, self._watched = module, False
            check_alone(module, self._open(strategy.root_device.type))
            if isinstance(strategy, _WRAPPING) and trainer.state.fn == TrainerFn.FITTING:
                strategy.model_to_device()
                strategy.setup_optimizers(trainer)
                self._prepare(module, strategy.optimizers)
                # The optimizers have been made above. The strategy would make them again, after it has wrapped the module.
                strategy.setup_optimizers = _nothing  # type: ignore[method-assign]
                self._undo.append(functools.partial(vars(strategy).pop, "setup_optimizers", None))
        return module

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Prepare a Trainer's module with its optimizers, and make its learning-rate schedulers pause at skipped steps.

        Warns:
            UserWarning: A callback averages weights that the plan stores in bf16 or fp16.
        """
        module = self._module
        assert module is not None
        trainer: Any = module.trainer
        vars(trainer.strategy).pop("setup_optimizers", None)
        if not self._alive():
            self._prepare(module, optimizers)
        averaging = [type(one).__name__ for one in trainer.callbacks if isinstance(one, _AVERAGING)]
        if self.plan.stores_low and averaging:
            warnings.warn(
                f"Lightning's {averaging[0]} averages weights that are rounded to {self.plan.compute}, and the average is rounded again "
                f"when it is copied into the model, because the plan {self.plan} stores parameters low. Average with "
                "castwise.AveragedModel(model), or use a plan that stores parameters in fp32.",
                stacklevel=2,
            )
        return model, optimizers, [Resting(config, self) for config in lr_schedulers]

    def teardown(self) -> None:
        """Undo the preparation of the model, after which it has fp32 weights.

        :meth:`state_dict` keeps returning the last state.
        """
        while self._undo:
            self._undo.pop()()
        self._roots.clear()
        self._waiting.clear()
        self._module = None
        if self._amp is not None:
            self._amp.close()

    # --- Fabric -------------------------------------------------------------------------------------------

    def _set_up(self, fabric: Fabric, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a Fabric method that sets up modules or optimizers, and prepare them for the plan before or after it."""
        given = inspect.signature(call).bind(fabric, *args, **kwargs)
        given.apply_defaults()
        optimizers = [unwrapped(optimizer) for optimizer in given.arguments.get("optimizers", ())]
        self._open(fabric.device.type)
        if "module" not in given.arguments:
            self._join(optimizers)
            return call(fabric, *args, **kwargs)
        self._fabric = fabric, optimizers, bool(given.arguments["move_to_device"])
        try:
            result = call(fabric, *args, **kwargs)
        finally:
            self._fabric = None
        if isinstance(fabric.strategy, _SHARDED):  # prepared here, after Fabric has sharded the module
            self._take((result[0] if optimizers else result).module, optimizers, False)
        return result

    def _take(self, module: nn.Module, optimizers: Sequence[Optimizer], wraps: bool) -> None:
        check_alone(module, self.amp)
        if optimizers or not self.plan.stores_low:
            self._prepare(module, optimizers)
        elif not wraps:
            self._waiting.append(module)
        else:
            raise StateError(
                f"CastwisePrecision({str(self.plan)!r}): the plan stores parameters low, so a module that is wrapped must be prepared with "
                "its optimizer. Call fabric.setup(model, optimizer) instead of setup_module and setup_optimizers"
            )

    def _join(self, optimizers: Sequence[Optimizer]) -> None:
        ids = {id(parameter) for optimizer in optimizers for parameter in params_of(optimizer)}
        for module in [*self._waiting]:
            if not ids.isdisjoint(map(id, module.parameters())):
                self._waiting.remove(module)
                self._prepare(module, optimizers)
                return
        for root in self._alive():
            if not ids.isdisjoint(map(id, root.parameters())):
                self.amp.prepare(root, *optimizers)

    def convert_input(self, data: Any) -> Any:
        """Return the inputs unchanged, since the prepared module casts them itself.

        Modules of Fabric for which no optimizer was set up are prepared here.

        Raises:
            StateError: A module of Fabric is called in a ``torch.autocast`` block whose dtype the plan does not use.
        """
        while self._waiting:
            self._prepare(self._waiting.pop(0), ())
        if self._module is None and (found := self._foreign("The model that Fabric has set up")):
            raise StateError(found[0])
        return data

    # --- contexts -----------------------------------------------------------------------------------------

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return a context manager that casts operators by the plan, for ``fabric.autocast()``."""
        return self.amp.autocast()

    @contextmanager
    def train_step_context(self) -> Generator[None]:
        """Return the context in which the Trainer runs ``training_step``.

        Raises:
            StateError: The first ``training_step`` calls a module in ``torch.autocast``, with a dtype that the plan does
                not use.
        """
        with self._around("training_step"):
            if self._watched:
                yield
                return
            found: list[str] = []
            handle = register_module_forward_pre_hook(functools.partial(self._look, found))
            try:
                yield
            finally:
                handle.remove()
        self._watched = True
        if found:
            raise StateError(found[0])

    @contextmanager
    def val_step_context(self) -> Generator[None]:
        """Return the context in which the Trainer runs ``validation_step``."""
        with self._around("validation_step"):
            yield

    @contextmanager
    def test_step_context(self) -> Generator[None]:
        """Return the context in which the Trainer runs ``test_step``."""
        with self._around("test_step"):
            yield

    @contextmanager
    def predict_step_context(self) -> Generator[None]:
        """Return the context in which the Trainer runs ``predict_step``."""
        with self._around("predict_step"):
            yield

    def _around(self, step: str) -> AbstractContextManager[Any]:
        """Return the context for a method such as ``training_step``.

        If the method was assigned to the module instance, the context casts as the plan says. castwise has wrapped the other
        methods, for which the context does nothing.
        """
        return self.amp.autocast() if step in self._own_steps else nullcontext()

    def _look(self, found: list[str], module: nn.Module, args: Any) -> None:
        found += self._foreign(f"training_step: {type(module).__name__}")

    def _foreign(self, who: str) -> list[str]:
        """Return a list with an error text if ``torch.autocast`` is active with a dtype that the plan does not use.

        Otherwise the list is empty. ``who`` names the called module in the text.
        """
        kind = self.amp.device_type
        if not torch.is_autocast_enabled(kind):
            return []
        dtype = torch.get_autocast_dtype(kind)
        formats = {self.plan.compute, *(region.compute for region in self.plan.regions)}
        if dtype in {torch.float32, *(_DTYPES[name] for name in formats if name in _DTYPES)}:
            return []
        return [
            f"{who} is called in torch.autocast({kind!r}, dtype={dtype}) under the plan {self.plan}: two precision settings "
            "at once. Remove the autocast block, or put its format into a region of the plan"
        ]

    # --- backward -----------------------------------------------------------------------------------------

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Run Lightning's callbacks before the backward pass, with the unscaled loss."""
        return tensor if self._module is None else super().pre_backward(tensor, module)

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Compute gradients that are multiplied by the loss scale.

        Under a Trainer, the module's own ``backward`` computes them.
        """
        # With manual optimization, this runs inside training_step, but backward must not run under the casts of that step.
        with torch.autocast(self.amp.device_type, enabled=False):
            if self._module is not None:
                super().backward(self.amp.scale(tensor), model, *args, **kwargs)
            elif args or kwargs.get("gradient") is not None:
                self.amp.scale(tensor).backward(*args, **kwargs)
            else:
                self.amp.backward(tensor, **kwargs)

    def post_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Run Lightning's callbacks after the backward pass. The gradients stay scaled until clipping or the step."""
        return tensor if self._module is None else super().post_backward(tensor, module)

    # --- steps --------------------------------------------------------------------------------------------

    def optimizer_step(
        self, optimizer: Any, model: Any = None, closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        """Unscale the gradients and step the optimizer.

        If a gradient is not finite on any rank, all ranks skip the step.

        Returns:
            The first value that the closure returned. If it is None, the :class:`castwise.StepResult` of the step.
        """
        if self._module is not None and closure is not None:
            closure = functools.partial(self._wrap_closure, model, optimizer, closure)
        if not self.amp.holds(optimizer):
            if self.plan.loss_scale is not None:
                raise StateError(
                    f"{type(optimizer).__name__}.step(): {self} has not prepared this optimizer, because it updates no "
                    "parameter under the plan or was made during the fit; the gradients still contain the loss scale. Use one "
                    "optimizer with parameter groups; or name each part that is trained, model=['net', 'other']; or keep the "
                    "optimizers that configure_optimizers made; or use a plan without a loss scale, such as 'bf16-mixed'"
                )
            return optimizer.step(**kwargs) if closure is None else optimizer.step(closure=closure, **kwargs)
        if kwargs:
            raise StateError(
                f"{type(optimizer).__name__}.step({', '.join(kwargs)}): under a plan step takes only a closure. Set "
                "options in optimizer.param_groups"
            )
        values: list[Any] = []
        if closure is not None and evaluates(optimizer):
            self.last_step = self.amp.step(optimizer, closure=noting(closure, values))
        else:
            values += [] if closure is None else [closure()]
            if values == [None] and all(p.grad is None for p in params_of(optimizer)):
                return None  # training_step returned None to skip this batch
            self.last_step = self.amp.step(optimizer)
        return self.last_step if not values or values[0] is None else values[0]

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        if self.plan.loss_scale is not None and self.amp.holds(optimizer):
            self.amp.unscale_(optimizer)  # so that callbacks before the step see unscaled gradients
        super()._after_closure(model, optimizer)

    def unscale_gradients(self, optimizer: Any) -> None:
        """Divide an optimizer's gradients by the loss scale. Fabric calls this before it clips gradients."""
        self.amp.unscale_(unwrapped(optimizer))

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Divide an optimizer's gradients by the loss scale, and clip them to a global norm.

        The norm is computed over all shards.
        """
        optimizer = unwrapped(optimizer)
        if self.amp.holds(optimizer):
            self.amp.clip_grad_norm_(optimizer, clip_val)
        else:
            super().clip_grad_by_norm(optimizer, clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        """Divide an optimizer's gradients by the loss scale, and clip each of their elements."""
        optimizer = unwrapped(optimizer)
        if self.amp.holds(optimizer):
            self.amp.clip_grad_value_(optimizer, clip_val)
        else:
            super().clip_grad_by_value(optimizer, clip_val)

    # --- state --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scales, as :meth:`castwise.Amp.state_dict` does.

        The weights are in the module's own ``state_dict``, in fp32.
        """
        return {} if self._amp is None else self._amp.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load loss scales that were saved under this plan or another plan."""
        self.amp.load_state_dict(state_dict)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the loss scale from a checkpoint that was saved with Lightning's own precision ``"16-mixed"``."""
        theirs = checkpoint.get(MixedPrecision.__qualname__)
        if theirs and type(self).__qualname__ not in checkpoint:
            self.load_state_dict({"version": 1, "scaler": theirs})

    def __repr__(self) -> str:
        return f"CastwisePrecision({str(self.plan)!r})"


def _nothing(trainer: Any) -> None:
    pass


def _check_release() -> None:
    release = lightning.__version__
    if release.split(".")[:2] != _TESTED.split("."):
        warnings.warn(
            f"CastwisePrecision was tested with Lightning {_TESTED}, but {release} is installed, whose precision hooks may differ; "
            f"if something fails, install 'lightning=={_TESTED}.*'.",
            stacklevel=3,
        )
