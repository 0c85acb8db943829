"""Functions and classes of torch and other libraries in an abstract run."""

from __future__ import annotations

import ast
import re

from castwise.bridges.scripts.lint.run.binding import set_attribute
from castwise.bridges.scripts.lint.run.machine import Machine
from castwise.bridges.scripts.lint.run.names import (
    AUTOCAST,
    CLIPS,
    LOSSES,
    OPTIMIZERS,
    SCALER,
    SCHEDULERS,
    WRAPPERS,
    format_of,
    is_optimizer,
)
from castwise.bridges.scripts.lint.run.objects import (
    copy_of,
    make_autocast,
    make_device,
    make_dict,
    make_optimizer,
    make_scaler,
    norm_of,
    note_escape,
    unseen,
)
from castwise.bridges.scripts.lint.run.values import (
    Arguments,
    Autocast,
    Box,
    Const,
    Contexts,
    Function,
    Instance,
    Low,
    Method,
    Partial,
    Scheduler,
    Unknown,
    Value,
    code,
    reachable,
)


def call_external(machine: Machine, name: str, arguments: Arguments, node: ast.AST) -> Value:
    """Call a function or class of a library."""
    given, named = arguments
    first = given[0] if given else None
    last = name.rpartition(".")[2]
    if name in AUTOCAST:
        return make_autocast(machine, name, arguments, machine.place(node))
    if name in SCALER:
        return make_scaler(machine, name, arguments, node)
    if name.startswith("torch.optim.") and last[:1].isupper() and not name.startswith(("torch.optim.lr_scheduler.", "torch.optim.swa_utils.")):  # fmt: skip
        return make_optimizer(machine, name, arguments, node)
    if SCHEDULERS.search(name) and any(is_optimizer(each) for each in (*given, *named.values())):
        return Scheduler(machine.place(node), tuple(machine.loops))
    if OPTIMIZERS.search(name):
        return make_optimizer(machine, name, arguments, node)
    if CLIPS.search(name):
        return norm_of(machine, machine.rules.clipped(node, arguments), arguments, node)
    if name in ("torch.save",) and first is not None:
        machine.rules.saved(node, [first])
        return machine.const(node, None)
    if WRAPPERS.search(name) and first is not None:
        if isinstance(first, Function):
            return first
        return first
    if last in ("deepcopy", "copy") and first is not None and len(given) == 1:
        return copy_of(machine, first, node)
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
        note_escape(machine, [first])
    if name in ("torch.device",):
        return make_device(machine, first, node)
    if last in ("dict", "OrderedDict"):
        return make_dict(machine, arguments, node)
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
            machine.rules.backward(each, node)
        return machine.const(node, None)
    if name == "torch.set_autocast_gpu_dtype" or name == "torch.set_autocast_dtype":
        machine.rules.default_format = format_of(given[-1] if given else None)
        return machine.const(node, None)
    if name == "torch.set_default_dtype":
        form = format_of(first)
        machine.rules.default_low = Low(form, machine.place(node)) if form in ("fp16", "bf16") else None
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
    if LOSSES.search(name):
        machine.rules.lost(node, given)
    result = unseen(machine, None, arguments, node, name)
    if machine.rules.default_low is not None and re.match(r"(torch\.)?nn\.|torchvision\.models|timm|transformers", name):  # fmt: skip
        result.low = machine.rules.default_low
    form = format_of(named.get("torch_dtype") or named.get("dtype"))
    if last == "from_pretrained" and form in ("fp16", "bf16"):
        result.low = Low(form, machine.place(node))
    if isinstance(result, Unknown):
        result.is_tensor = name.startswith("torch.nn.functional.") or bool(re.match(r"torch\.[a-z_]+$", name))  # fmt: skip
    return result
