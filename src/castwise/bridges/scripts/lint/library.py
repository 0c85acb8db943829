"""What calls of torch and other libraries do in an abstract run, as far as it concerns precision."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from castwise.bridges.scripts.lint.binding import set_attribute
from castwise.bridges.scripts.lint.statements import enter_value
from castwise.bridges.scripts.lint.values import (
    Autocast,
    Box,
    Class,
    Const,
    Contexts,
    External,
    Function,
    Instance,
    Low,
    Method,
    Optimizer,
    Partial,
    Place,
    Scaler,
    Scheduler,
    Scope,
    State,
    Unknown,
    Value,
    code,
    reachable,
)

if TYPE_CHECKING:
    from castwise.bridges.scripts.lint.machine import Arguments, Machine
    from castwise.bridges.scripts.lint.rules import Rules

_HOMES = {"torch.cuda.amp": "cuda", "torch.cpu.amp": "cpu", "torch.amp": None}


def _names(what: str, module: str) -> dict[str, str | None]:
    return {f"{home}{inner}.{what}": at for home, at in _HOMES.items() for inner in ("", f".{module}")}


_AUTOCAST = {**_names("autocast", "autocast_mode"), "torch.autocast": None}
_SCALER = {
    **_names("GradScaler", "grad_scaler"),
    "torch.GradScaler": None,
    "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler": None,
}
FORMATS = {
    "torch.float16": "fp16", "torch.half": "fp16", "torch.bfloat16": "bf16", "float16": "fp16", "bfloat16": "bf16",
    "torch.float32": "fp32", "torch.float": "fp32", "float32": "fp32", "torch.float64": "fp64", "torch.double": "fp64",
}  # fmt: skip
_CLIPS = re.compile(r"(^|\.)(clip_grad_norm|clip_grad_value|clip_grads_with_norm|clip_grad)s?_?$")
_SCHEDULERS = re.compile(r"^torch\.optim\.lr_scheduler\.|(^|[._])get_\w*schedul\w*$|(^|\.)\w*(Scheduler|WarmupLR|AnnealingLR|CosineLR|OneCycleLR)$")  # fmt: skip
_SCHEDULED = re.compile(r"sched|(^|[._])lr_?(s|sch|sched|decay|policy)$", re.IGNORECASE)
_OPTIMIZERS = re.compile(r"(^|\.)(\w*Adam\w*|SGD\w*|AdamW\w*|RMSprop\w*|Adagrad|Adafactor|Lion\w*|Lamb|LAMB|NovoGrad|RAdam|NAdam|LBFGS|Rprop|ASGD|Adadelta|Muon)$")  # fmt: skip
_OPTIMIZED = re.compile(r"opt", re.IGNORECASE)
_SCALED = re.compile(r"scal", re.IGNORECASE)
_WRAPPERS = re.compile(r"(^|\.)(DistributedDataParallel|DDP|DataParallel|FullyShardedDataParallel|FSDP|compile|convert_sync_batchnorm|unwrap_model|de_parallel|script|fully_shard|replicate)$")  # fmt: skip
_QUIET = re.compile(
    r"^(print|len|str|repr|isinstance|hasattr|id|type|vars|bool|callable|format|logging|logger|log|tqdm|warnings|json\.dumps|getattr|next|wandb)\b"
    r"|(^|[._])(log|info|debug|print|warning)$"
)
"""Functions that use no scaler, whatever they are given."""
_HARMLESS = re.compile(r"^(object|torch\.nn\.|torch\.optim\.|abc\.|typing\.|torch\.utils\.data\.|enum\.|nn\.Module|Exception)")  # fmt: skip
"""Bases whose code uses no attribute that the class sets."""
_IN_PLACE = {"cuda", "cpu", "train", "eval", "to_empty", "share_memory", "contiguous", "compile", "xpu", "requires_grad_", "apply"}  # fmt: skip
_CASTS = {"half": "fp16", "bfloat16": "bf16", "float": "fp32", "double": "fp64"}
_PARSES = ("parse_args", "parse_known_args", "parse_intermixed_args")
_PARSER = (
    "add_argument",
    "add_argument_group",
    "add_mutually_exclusive_group",
    "add_subparsers",
    "add_parser",
)
_PARAMETERS = {"parameters", "named_parameters", "trainable_parameters", "get_parameters"}
_OF_MODULES = {*_IN_PLACE, *_CASTS, *_PARAMETERS, "to", "state_dict", "load_state_dict", "zero_grad", "modules", "named_modules", "children"}  # fmt: skip
_SAVES = re.compile(r"(^|[._])(save|savez|dump)(_|$)|(^|[._])save\w*|\w*save(_checkpoint|_ckpt|_state)?$", re.IGNORECASE)  # fmt: skip
_LOSSES = re.compile(r"^torch\.nn\.functional\.(cross_entropy|nll_loss|mse_loss|kl_div|binary_cross_entropy\w*|l1_loss|smooth_l1_loss)$")  # fmt: skip
_LOSS_NAMES = re.compile(r"(^|[._])(criterion|loss_fn|loss_func)$")


class Library:
    """What calls of libraries do.

    Args:
        rules: What is told of each use of mixed precision.
    """

    machine: Machine

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        rules.library = self

    # --- what the machine asks --------------------------------------------------------------------------------

    def same(self, node: ast.AST, value: Value) -> Value:
        """A value computed from one other, such as ``-loss``."""
        new = self.machine.unknown(node, self.machine.text(value, node), value)
        new.scaler, new.low = value.scaler, value.low
        new.is_tensor = True
        return new

    def combine(self, node: ast.AST, operator: ast.operator, left: Value, right: Value) -> Value:
        """The result of ``left + right`` or another operator."""
        machine = self.machine
        if isinstance(operator, ast.BitOr) and isinstance(left, Box) and isinstance(right, Box):
            return Box(machine.place(node), items={**left.items, **right.items}, is_dict=True)
        if isinstance(operator, ast.Add) and isinstance(left, Box) and isinstance(right, Box):
            box = Box(machine.place(node), is_open=left.is_open or right.is_open)
            for each in (*left.items.values(), *right.items.values()):
                box.add(each)
            return box
        text = code(node) if isinstance(node, ast.expr) else "a value"
        new = machine.unknown(node, text, left, right)
        new.scaler = left.scaler or right.scaler
        new.is_tensor = bool(new.formats) or any(isinstance(each, Unknown) and each.is_tensor for each in (left, right))  # fmt: skip
        if isinstance(operator, ast.Mult) and self._is_by_hand(node, left, right):
            new.formats = frozenset()
        return new

    def _is_by_hand(self, node: ast.AST, left: Value, right: Value) -> bool:
        """Whether a product may be a loss scaled by hand."""
        parts = [node.left, node.right] if isinstance(node, ast.BinOp) else []
        big = any(isinstance(each, Const) and isinstance(each.value, (int, float)) and each.value >= 64 for each in (left, right))  # fmt: skip
        return big or any(_SCALED.search(code(each)) for each in parts)

    def _dict(self, arguments: Arguments, node: ast.AST) -> Box:
        """``dict(...)``: of keywords, of another dictionary, or of pairs."""
        given, named = arguments
        scope = self.machine.frames[-1][0] if self.machine.frames else None
        box = Box(
            self.machine.place(node),
            items=dict(named),
            is_dict=True,
            is_open="**" in named,
            maker=scope,
        )
        for each in given:
            pairs = list(each.items.values()) if isinstance(each, Box) and not each.is_dict else []
            if pairs and all(isinstance(pair, Box) and len(pair.items) == 2 for pair in pairs):
                for pair in pairs:
                    assert isinstance(pair, Box)
                    box.add(pair.items[1], object())
                box.is_open = True
            else:
                self.merge(box, each)
        return box

    def merge(self, box: Box, value: Value) -> None:
        """Add what ``**value`` or ``*value`` contains."""
        if isinstance(value, Box):
            for key, each in value.items.items():
                box.add(each, key if box.is_dict else None)
            box.is_open |= value.is_open
        else:
            box.add(value, object())
            box.is_open = True

    def as_region(self, value: Value) -> Autocast | None:
        """The autocast region that a decorator opens, if it is one."""
        if isinstance(value, Autocast):
            return value
        if isinstance(value, External) and value.name in _AUTOCAST:
            return self._autocast(value.name, ([], {}), value.place)
        return None

    def entered(self, region: Autocast) -> None:
        """An autocast region was entered."""
        self.rules.entered(region)

    def joined(self, node: ast.BoolOp, values: list[Value]) -> None:
        """``with`` was given contexts joined by ``and`` or ``or``."""
        self.rules.joined(node, values)

    def after_test(self, node: ast.AST, test: ast.expr, scope: Scope) -> None:
        """A test was made and one of its branches executed."""
        self.rules.tested(node, test)

    def escapes(self, values: list[Value]) -> None:
        """Code that the script does not show may use these values."""
        self.rules.escaped(reachable(values))

    def is_closed(self, kind: Class) -> bool:
        """Whether all bases of a class are known, so that no other code uses what its objects hold."""
        return all(
            isinstance(each, Class) or (isinstance(each, External) and _HARMLESS.search(each.name))
            for each in kind.lineage()
        )

    def is_method(self, of: Instance, name: str) -> bool:
        """Whether a name is a method that a library's base class gives to an object."""
        if of.kind is None:
            return False
        if of.kind.derives_from("torch.optim."):
            return name in ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")
        return name in _OF_MODULES or (name == "__call__")

    def made(self, made: Instance, kind: Class, arguments: Arguments) -> None:
        """An object of a class of the program was made."""
        if not self.is_closed(kind):
            self.escapes([made])
        self.rules.facts.made.add(kind.place)
        given = reachable([*arguments[0], *arguments[1].values()])
        if kind.derives_from("torch.optim."):
            made.modules = frozenset().union(*(each.modules for each in given))

    # --- functions of libraries -------------------------------------------------------------------------------

    def function(self, name: str, arguments: Arguments, node: ast.AST) -> Value:
        """Call a function or class of a library."""
        machine, (given, named) = self.machine, arguments
        first = given[0] if given else None
        last = name.rpartition(".")[2]
        if name in _AUTOCAST:
            return self._autocast(name, arguments, machine.place(node))
        if name in _SCALER:
            return self._scaler(name, arguments, node)
        if name.startswith("torch.optim.") and last[:1].isupper() and not name.startswith(("torch.optim.lr_scheduler.", "torch.optim.swa_utils.")):  # fmt: skip
            return self._optimizer(name, arguments, node)
        if _SCHEDULERS.search(name) and any(self.is_optimizer(each) for each in (*given, *named.values())):
            return Scheduler(machine.place(node), tuple(machine.loops))
        if _OPTIMIZERS.search(name):
            return self._optimizer(name, arguments, node)
        if _CLIPS.search(name):
            self.rules.clipped(node, arguments)
            return machine.unknown(node, "the norm", *given)
        if name in ("torch.save",) and first is not None:
            self.rules.saved(node, [first])
            return machine.const(node, None)
        if _WRAPPERS.search(name) and first is not None:
            if isinstance(first, Function):
                return first
            return first
        if last in ("deepcopy", "copy") and first is not None and len(given) == 1:
            return self._copy(first, node)
        if name == "functools.partial" and first is not None:
            return Partial(machine.place(node), of=first, given=tuple(given[1:]), named=named)
        if name == "getattr" and first is not None and len(given) > 1 and isinstance(given[1], Const):
            return machine.attribute(first, str(given[1].value), node)
        if name == "setattr" and len(given) == 3 and isinstance(given[1], Const):
            set_attribute(machine, given[0], str(given[1].value), given[2])
            return machine.const(node, None)
        if name == "hasattr" and len(given) == 2 and isinstance(first, Instance) and isinstance(given[1], Const):  # fmt: skip
            known = given[1].value in first.fields or (first.kind and first.kind.find(str(given[1].value)))
            return machine.const(node, bool(known))
        if name in ("torch.no_grad", "torch.inference_mode"):
            return Autocast(machine.place(node), is_on=False, is_without_gradients=True)
        if last == "nullcontext" or name == "torch.enable_grad":
            return Contexts(machine.place(node))
        if last == "ArgumentParser":
            parser = machine.unknown(node, "parser")
            parser.options = set()
            return parser
        if name == "vars" and isinstance(first, Unknown) and first.options is not None:
            return first
        if name == "getattr" and first is not None:
            self.escapes([first])
        if name in ("torch.device",):
            return self._device(first, node)
        if last in ("dict", "OrderedDict"):
            return self._dict(arguments, node)
        if name in ("list", "tuple", "reversed", "sorted", "iter", "set", "tqdm", "tqdm.tqdm", "tqdm.auto.tqdm") and first is not None:  # fmt: skip
            return first
        if name == "enumerate" and isinstance(first, Box) and not first.is_open and not first.is_dict:
            items = [Box(machine.place(node), items={0: machine.const(node, number), 1: each}) for number, each in enumerate(first.items.values())]  # fmt: skip
            return Box(machine.place(node), items=dict(enumerate(items)))
        if name == "zip" and given and all(isinstance(each, Box) and not each.is_open and not each.is_dict for each in given):  # fmt: skip
            columns = [list(each.items.values()) for each in given if isinstance(each, Box)]
            rows = [Box(machine.place(node), items=dict(enumerate(row))) for row in zip(*columns, strict=False)]  # fmt: skip
            return Box(machine.place(node), items=dict(enumerate(rows)))
        if name in ("filter", "map", "itertools.chain", "itertools.chain.from_iterable", "next", "sum", "torch.stack", "max", "min"):  # fmt: skip
            new = machine.unknown(node, code(node), *reachable(given))
            new.modules = frozenset().union(*(each.modules for each in reachable(given)))
            new.is_tensor = True
            return new
        if name in ("torch.autograd.backward",) and first is not None:
            for each in reachable([first]):
                self.rules.backward(each, node)
            return machine.const(node, None)
        if name == "torch.set_autocast_gpu_dtype" or name == "torch.set_autocast_dtype":
            self.rules.default_format = self._format(given[-1] if given else None)
            return machine.const(node, None)
        if name == "torch.set_default_dtype":
            form = self._format(first)
            self.rules.default_low = Low(form, machine.place(node)) if form in ("fp16", "bf16") else None
            return machine.const(node, None)
        if last in ("spawn", "start_processes", "launch") and isinstance(first, (Function, Method)):
            rest = named.get("args")
            extra = list(rest.items.values()) if isinstance(rest, Box) else []
            machine.call(first, ([machine.unknown(node, "rank"), *extra], {}), node)
            return machine.const(node, None)
        if last == "ExitStack":
            return Contexts(machine.place(node))
        if last in ("Namespace", "SimpleNamespace"):
            made = machine.unknown(node, last)
            made.fields.update(named)
            return made
        if _LOSSES.search(name):
            self.rules.lost(node, given)
        result = self.unseen(None, arguments, node, name)
        if self.rules.default_low is not None and re.match(r"(torch\.)?nn\.|torchvision\.models|timm|transformers", name):  # fmt: skip
            result.low = self.rules.default_low
        form = self._format(named.get("torch_dtype") or named.get("dtype"))
        if last == "from_pretrained" and form in ("fp16", "bf16"):
            result.low = Low(form, machine.place(node))
        if isinstance(result, Unknown):
            result.is_tensor = name.startswith("torch.nn.functional.") or bool(re.match(r"torch\.[a-z_]+$", name))  # fmt: skip
        return result

    def unseen(self, function: Value | None, arguments: Arguments, node: ast.AST, name: str = "") -> Value:
        """Call something whose code the script does not show."""
        machine, (given, named) = self.machine, arguments
        values = [*given, *named.values()]
        called = name or (machine.text(function, node) if function is not None else "")
        if called.startswith("type("):
            return self._dict(arguments, node)
        contents = reachable(values)
        if not _QUIET.search(called):
            self.rules.escaped(contents)
            if _SAVES.search(called):
                self.rules.saved(node, values)
        if _SCHEDULED.search(called) and any(self.is_optimizer(each) for each in values):
            return Scheduler(machine.place(node), tuple(machine.loops))
        sources = [*contents, function]
        new = machine.unknown(node, code(node) if isinstance(node, ast.expr) else called, *sources)
        new.made = True
        new.formats |= self._formats_here()
        if _SCALED.search(called):
            new.formats = frozenset()
        if _LOSS_NAMES.search(called) or (isinstance(node, ast.Call) and _LOSS_NAMES.search(code(node.func))):
            self.rules.lost(node, given)
        if isinstance(function, Unknown) and function.low is not None:
            new.low = function.low
            new.modules = frozenset({function})
        new.is_tensor = isinstance(function, Unknown) and function.made and function.owner is None
        return new

    def _formats_here(self) -> frozenset[str | None]:
        """The format in which what is computed here has its gradients; empty outside of enabled autocast regions."""
        regions = self.machine.regions
        if not regions or not regions[-1].is_on or any(each.is_without_gradients for each in regions):
            return frozenset()
        return frozenset({regions[-1].format})

    def call_instance(self, of: Instance, kind: Class, arguments: Arguments, node: ast.AST) -> Value:
        """Call an object of a class of the program."""
        machine = self.machine
        for name in ("__call__", "forward"):
            method = kind.find(name)
            if isinstance(method, Function):
                inner = machine.call_function(method, ([of, *arguments[0]], arguments[1]), node)
                if name == "__call__" or not isinstance(inner, Unknown):
                    return inner
                inner.formats |= self._formats_here()
                for each in reachable([*arguments[0], *arguments[1].values()]):
                    inner.formats |= each.formats
                if of.low is not None:
                    inner.low, inner.modules = of.low, frozenset({of})
                inner.is_tensor = True
                return inner
        result = self.unseen(None, arguments, node, "a call")
        if of.low is not None:
            result.low, result.modules = of.low, frozenset({of})
        if isinstance(result, Unknown):
            result.is_tensor = True
        return result

    # --- methods ----------------------------------------------------------------------------------------------

    def method(
        self, of: Value, name: str, arguments: Arguments, node: ast.AST, seen: Unknown | None = None
    ) -> Value:
        """Call a method that is not in the program."""
        machine, (given, named) = self.machine, arguments
        first = given[0] if given else next(iter(named.values()), None)
        if isinstance(of, Unknown):
            of.is_object = of.is_object or not of.is_tensor
        if isinstance(of, Scaler) or (isinstance(of, Unknown) and _SCALED.search(of.text) and name in ("scale", "unscale_", "step", "update", "get_scale", "state_dict", "is_enabled")):  # fmt: skip
            return self._scaler_method(of, name, arguments, node)
        if isinstance(of, Unknown) and of.options is not None and name in (*_PARSES, *_PARSER):
            return self._parser_method(of, of.options, name, arguments, node)
        if isinstance(of, Contexts) and name == "enter_context" and first is not None:
            return enter_value(machine, first, node)
        if isinstance(of, Autocast) and name in ("__enter__", "__exit__"):
            if name == "__enter__":
                machine.enter(of)
            elif of in machine.regions:
                machine.regions.remove(of)
            return of
        if isinstance(of, Autocast) and name == "__call__" and isinstance(first, Function):
            first.regions = (*first.regions, of)
            return first
        if isinstance(of, Box):
            return self._box_method(of, name, arguments, node)
        if isinstance(of, Const) and isinstance(of.value, str):
            if name in ("lower", "upper", "strip", "startswith", "endswith") and all(isinstance(each, Const) for each in given):  # fmt: skip
                try:
                    return machine.const(node, getattr(of.value, name)(*(each.value for each in given if isinstance(each, Const))))  # fmt: skip
                except (TypeError, ValueError):
                    pass
            return machine.unknown(node, code(node))
        if name == "backward" and not isinstance(of, Instance):
            self.rules.backward(of, node)
            return machine.const(node, None)
        is_spelled = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _SCHEDULED.search(code(node.func.value))  # fmt: skip
        is_named = isinstance(of, Unknown) and len(given) + len(named) < 2 and (is_spelled or _SCHEDULED.search(_called(of.text)))  # fmt: skip
        if isinstance(of, Scheduler) or (is_named and name == "step"):
            if name == "step":
                self.rules.scheduled(of, node, arguments)
            return State(machine.place(node), of=of) if name == "state_dict" else machine.const(node, None)
        if name == "step" and self.is_optimizer(of):
            for each in given:
                if isinstance(each, (Function, Method)):
                    machine.call(each, ([], {}), node)
            self.rules.stepped(of, node)
            return machine.const(node, None)
        if name == "zero_grad":
            self.rules.zeroed(of)
            return machine.const(node, None)
        if name == "state_dict":
            return State(machine.place(node), of=of, low=of.low)
        if name in _PARAMETERS:
            new = machine.unknown(node, f"{machine.text(of, node)}.{name}()")
            new.modules, new.is_tensor = frozenset({of}), True
            return new
        if _CLIPS.search(name):
            self.rules.clipped(node, arguments, of)
            return machine.unknown(node, "the norm", *given)
        if of.is_of_gradients and (name in ("clamp_", "clip_") or (name == "mul_" and first and first.is_of_gradients)):  # fmt: skip
            self.rules.clipped(node, arguments, of)
            return of
        if name == "requires_grad_" and first is not None and not (isinstance(first, Const) and first.value is True):  # fmt: skip
            for module in (of, *of.modules):
                module.is_frozen = True
        if name in (*_CASTS, "to", "type", "type_as", *_IN_PLACE):
            return self._cast(of, name, arguments, node)
        if name in ("clone", "detach", "numpy") and isinstance(of, Unknown):
            new_value = self.same(node, of)
            if name != "clone":
                new_value.formats, new_value.scaler = frozenset(), None
            return new_value
        if isinstance(of, State) and name in ("items", "values", "copy"):
            new = machine.unknown(node, f"{machine.text(of, node)}.{name}()")
            new.low, new.is_tensor = of.low, True
            new.fields["of"] = of
            return new
        function = seen if seen is not None else of
        result = self.unseen(function, arguments, node, f"{machine.text(of, node)}.{name}")
        if not isinstance(result, Unknown):
            return result
        result.formats |= of.formats
        result.scale_of = result.scale_of or of.scale_of
        if isinstance(of, Unknown):
            if result.turn is None:
                result.turn = of.turn
            result.is_tensor = of.is_tensor
            if of.is_tensor and not given:
                result.scaler = of.scaler
        if name == "from_pretrained":
            form = self._format(named.get("torch_dtype") or named.get("dtype"))
            if form in ("fp16", "bf16"):
                result.low = Low(form, machine.place(node))
        return result

    def _parser_method(
        self, of: Unknown, options: set[Place], name: str, arguments: Arguments, node: ast.AST
    ) -> Value:
        """A method of a parser of the command line, which returns a part of it, or the parsed options."""
        given, named = arguments
        new = self.machine.unknown(node, "args" if name in _PARSES else of.text)
        new.options, new.is_object = options, True
        if name == "add_argument":
            spelled = [str(each.value) for each in given if isinstance(each, Const)]
            long = next((each for each in spelled if each.startswith("--")), "")
            dest = named.get("dest")
            name = str(dest.value) if isinstance(dest, Const) else long.lstrip("-").replace("-", "_")
            if long:
                place = self.machine.place(node)
                self.rules.facts.options[place] = name, long
                options.add(place)
        if name == "parse_known_args":
            return Box(self.machine.place(node), items={0: new, 1: self.machine.unknown(node, "rest")})
        return new

    def _scaler_method(self, of: Value, name: str, arguments: Arguments, node: ast.AST) -> Value:
        machine, (given, named) = self.machine, arguments
        first = given[0] if given else next(iter(named.values()), None)
        rules = self.rules
        if name == "scale" and first is not None:
            if isinstance(first, Box):
                items = {
                    key: self._scaler_method(of, name, ([each], {}), node)
                    for key, each in first.items.items()
                }
                return Box(machine.place(node), items=items)
            new = machine.unknown(node, f"{machine.text(of, node)}.scale(...)", first)
            new.scaler, new.is_tensor = of, True
            return new
        if name == "unscale_" and first is not None:
            rules.unscaled(of, first, node)
        elif name == "step" and first is not None:
            for each in given[1:]:
                if isinstance(each, (Function, Method)):
                    machine.call(each, ([], {}), node)
            rules.scaler_stepped(of, first, node)
            new = machine.unknown(node, "the result of scaler.step()", turn=machine.turn())
            new.scale_of = of
            return new
        elif name == "update":
            rules.updated(of)
        elif name == "state_dict":
            rules.state_read(of)
            return State(machine.place(node), of=of)
        elif name == "is_enabled":
            return machine.const(node, of.is_on) if isinstance(of, Scaler) else machine.unknown(node, f"{machine.text(of, node)}.is_enabled()")  # fmt: skip
        elif name in ("load_state_dict",):
            return machine.const(node, None)
        else:
            rules.scale_read(of)
            new = machine.unknown(node, f"{machine.text(of, node)}.{name}()", turn=machine.turn())
            new.scale_of = of
            return new
        return machine.const(node, None)

    def _box_method(self, of: Box, name: str, arguments: Arguments, node: ast.AST) -> Value:
        machine, (given, named) = self.machine, arguments
        first = given[0] if given else None
        if name == "append" and first is not None:
            of.add(first)
        elif name in ("update", "extend"):
            if first is not None:
                self.merge(of, first)
            of.items.update(named)
        elif name in ("get", "pop", "setdefault") and isinstance(first, Const):
            if first.value in of.items:
                return of.items[first.value]
            if name == "setdefault" and len(given) > 1:
                of.items[first.value] = given[1]
            return given[1] if len(given) > 1 else machine.const(node, None) if not of.is_open and name == "get" else machine.unknown(node, code(node), of)  # fmt: skip
        elif name == "items" and of.is_dict:
            items = [Box(machine.place(node), items={0: machine.const(node, key), 1: each}) for key, each in of.items.items()]  # fmt: skip
            return Box(machine.place(node), items=dict(enumerate(items)), is_open=of.is_open)
        elif name == "values":
            return Box(machine.place(node), items=dict(enumerate(of.items.values())), is_open=of.is_open)
        elif name == "copy":
            return Box(machine.place(node), items=dict(of.items), is_dict=of.is_dict, is_open=of.is_open)
        return machine.unknown(node, code(node), of)

    def _cast(self, of: Value, name: str, arguments: Arguments, node: ast.AST) -> Value:
        """``.half()``, ``.to(...)``, ``.cuda()``: a tensor's is new, and a module's is the same object."""
        given, named = arguments
        form = _CASTS.get(name) if not given else None
        if name in ("to", "type"):
            found = (self._format(each) for each in (*given, *named.values()))
            form = next(filter(None, found), None)
        self.rules.moved(name, given)
        low = Low(form, self.machine.place(node)) if form in ("fp16", "bf16") else None
        if isinstance(of, Instance) or (isinstance(of, Unknown) and not of.is_tensor):
            if form is not None:
                of.low = low
                if low is not None:
                    self.rules.rounded(of)
            return of
        new = self.machine.unknown(node, self.machine.text(of, node), of)
        new.modules, new.scaler, new.is_tensor = of.modules, of.scaler, True
        if form is None:
            new.low = of.low
        elif low is not None:
            new.low = low if of.low is None else of.low
            self.rules.rounded(new)
        else:
            new.modules = frozenset()
        return new

    # --- objects of torch -------------------------------------------------------------------------------------

    def _format(self, value: Value | None) -> str | None:
        if isinstance(value, External):
            return FORMATS.get(value.name)
        if isinstance(value, Const) and isinstance(value.value, str):
            return FORMATS.get(value.value)
        return None

    def _device(self, value: Value | None, node: ast.AST) -> Value:
        if isinstance(value, Const) and isinstance(value.value, str):
            return self.machine.const(node, value.value.partition(":")[0])
        return value if isinstance(value, Unknown) else self.machine.unknown(node, code(node))

    def _arguments(self, order: tuple[str, ...], arguments: Arguments) -> dict[str, Value] | None:
        given, named = arguments
        if "*" in named or "**" in named:
            return None
        return {**dict(zip(order, given, strict=False)), **named}

    def _autocast(self, name: str, arguments: Arguments, place: object) -> Autocast:
        implied = _AUTOCAST[name]
        order = ("enabled", "dtype", "cache_enabled") if implied else ("device_type", "dtype", "enabled")
        found = self._arguments(order, arguments)
        machine = self.machine
        node = ast.Constant(None, lineno=place.line, col_offset=place.column)  # type: ignore[attr-defined]
        if found is None:
            return Autocast(place, format=None, device=implied)  # type: ignore[arg-type]
        kind = found.get("device_type")
        device = implied
        if isinstance(kind, Const) and isinstance(kind.value, str):
            device = kind.value.partition(":")[0]
        is_on = machine.is_true(found["enabled"], node) if "enabled" in found else True
        given = found.get("dtype")
        form: str | None
        if given is None or (isinstance(given, Const) and given.value is None):
            form = self.rules.default_format or {"cpu": "bf16", "cuda": "fp16"}.get(device or "")
        else:
            form = self._format(given)
        if form == "fp32":
            is_on = False
        is_switched = isinstance(found.get("enabled"), Unknown)
        return Autocast(place, format=form, device=device, is_on=is_on, is_switched=is_switched)  # type: ignore[arg-type]

    def _scaler(self, name: str, arguments: Arguments, node: ast.AST) -> Scaler:
        implied = _SCALER[name]
        order = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")
        found = self._arguments(order if implied else ("device", *order), arguments)
        machine = self.machine
        is_on, is_switched, device = True, False, implied
        if found is not None:
            is_on = machine.is_true(found["enabled"], node) if "enabled" in found else True
            is_switched = isinstance(found.get("enabled"), Unknown)
            at = found.get("device")
            device = str(at.value).partition(":")[0] if isinstance(at, Const) else device
        made = machine.place(node), tuple(machine.loops)
        scaler = Scaler(*made, is_on=is_on, is_switched=is_switched, device=device)
        self.rules.scaler_made(scaler, node, is_seen=found is not None)
        return scaler

    def _optimizer(self, name: str, arguments: Arguments, node: ast.AST) -> Optimizer:
        given = reachable([*arguments[0], *arguments[1].values()])
        modules = frozenset().union(*(each.modules for each in given))
        return Optimizer(self.machine.place(node), tuple(self.machine.loops), modules=modules, name=name)

    def is_optimizer(self, value: Value) -> bool:
        """Whether a value is an optimizer, as far as the script shows."""
        if isinstance(value, Optimizer):
            return True
        if isinstance(value, Instance) and value.kind is not None:
            return value.kind.derives_from("torch.optim.")
        name = _called(value.text) if isinstance(value, Unknown) else ""
        return bool(_OPTIMIZED.search(name)) and not _SCHEDULED.search(name)

    def _copy(self, value: Value, node: ast.AST) -> Value:
        if isinstance(value, Box):
            return Box(value.place, items=dict(value.items), is_dict=value.is_dict, is_open=value.is_open)
        if isinstance(value, Instance):
            return Instance(
                self.machine.place(node), kind=value.kind, fields=dict(value.fields), low=value.low
            )
        new = self.machine.unknown(node, f"a copy of {self.machine.text(value, node)}", value)
        new.low = value.low
        return new


def _called(text: str) -> str:
    """An expression without the arguments of its calls."""
    return re.sub(r"\(.*\)|\(.*", "()", text)
