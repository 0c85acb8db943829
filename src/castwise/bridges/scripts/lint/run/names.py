"""The names by which an abstract run knows torch and other libraries."""

from __future__ import annotations

import re

from castwise.bridges.scripts.lint.run.values import (
    Class,
    Const,
    External,
    Instance,
    Optimizer,
    Unknown,
    Value,
)

HOMES = {"torch.cuda.amp": "cuda", "torch.cpu.amp": "cpu", "torch.amp": None}


def _names(what: str, module: str) -> dict[str, str | None]:
    return {f"{home}{inner}.{what}": at for home, at in HOMES.items() for inner in ("", f".{module}")}


AUTOCAST = {**_names("autocast", "autocast_mode"), "torch.autocast": None}
SCALER = {
    **_names("GradScaler", "grad_scaler"),
    "torch.GradScaler": None,
    "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler": None,
}
FORMATS = {
    "torch.float16": "fp16", "torch.half": "fp16", "torch.bfloat16": "bf16", "float16": "fp16", "bfloat16": "bf16",
    "torch.float32": "fp32", "torch.float": "fp32", "float32": "fp32", "torch.float64": "fp64", "torch.double": "fp64",
}  # fmt: skip
CLIPS = re.compile(r"(^|\.)(clip_grad_norm|clip_grad_value|clip_grads_with_norm|clip_grad)s?_?$")
SCHEDULERS = re.compile(r"^torch\.optim\.lr_scheduler\.|(^|[._])get_\w*schedul\w*$|(^|\.)\w*(Scheduler|LR)$")
LR = "torch.optim.lr_scheduler."
SCHEDULED = re.compile(r"sched|(^|[._])lr_?(s|sch|sched|decay|policy)$", re.IGNORECASE)
OPTIMIZERS = re.compile(r"(^|\.)(\w*Adam\w*|SGD\w*|AdamW\w*|RMSprop\w*|Adagrad|Adafactor|Lion\w*|Lamb|LAMB|NovoGrad|RAdam|NAdam|LBFGS|Rprop|ASGD|Adadelta|Muon)$")  # fmt: skip
OPTIMIZED = re.compile(r"opt", re.IGNORECASE)
OF_SCALERS = {
    "scale", "unscale_", "step", "update", "get_scale", "is_enabled", "state_dict", "load_state_dict", "get_growth_factor",
    "set_growth_factor", "get_backoff_factor", "set_backoff_factor", "get_growth_interval", "set_growth_interval",
    "_enabled", "_scale", "_growth_tracker", "_init_scale", "_growth_factor", "_backoff_factor", "_growth_interval",
}  # fmt: skip
"""What scripts use of torch's GradScaler."""
SCALED = re.compile(r"scal", re.IGNORECASE)
WRAPPERS = re.compile(r"(^|\.)(DistributedDataParallel|DDP|DataParallel|FullyShardedDataParallel|FSDP|compile|convert_sync_batchnorm|unwrap_model|de_parallel|script|fully_shard|replicate)$")  # fmt: skip
QUIET = re.compile(
    r"^(print|len|str|repr|isinstance|hasattr|id|type|vars|bool|callable|format|logging|logger|log|tqdm|warnings|json\.dumps|getattr|next|wandb|json|yaml|toml|pprint|OmegaConf|asdict|dataclasses\.\w+)\b"
    r"|(^|[._])(log|info|debug|print|warning)$"
)
"""Functions that use no scaler, whatever they are given."""
HARMLESS = re.compile(r"^(object|torch\.nn\.|torch\.optim\.|abc\.|typing\.|torch\.utils\.data\.|enum\.|nn\.Module|Exception)")  # fmt: skip
"""Bases whose code uses no attribute that the class sets."""
IN_PLACE = {"cuda", "cpu", "train", "eval", "to_empty", "share_memory", "contiguous", "compile", "xpu", "requires_grad_", "apply"}  # fmt: skip
CASTS = {"half": "fp16", "bfloat16": "bf16", "float": "fp32", "double": "fp64"}
PARSES = ("parse_args", "parse_known_args", "parse_intermixed_args")
PARSER = (
    "add_argument",
    "add_argument_group",
    "add_mutually_exclusive_group",
    "add_subparsers",
    "add_parser",
)
PARAMETERS = {"parameters", "named_parameters", "trainable_parameters", "get_parameters"}
MODULES = {"modules", "named_modules", "children", "named_children"}
OF_MODULES = {*MODULES, *IN_PLACE, *CASTS, *PARAMETERS, "to", "state_dict", "load_state_dict", "zero_grad"}  # fmt: skip
SAVES = re.compile(r"(^|[._])(save|savez|dump)(_|$)|(^|[._])save\w*|\w*save(_checkpoint|_ckpt|_state)?$", re.IGNORECASE)  # fmt: skip
LOSSES = re.compile(r"^torch\.nn\.functional\.(cross_entropy|nll_loss|mse_loss|kl_div|binary_cross_entropy\w*|l1_loss|smooth_l1_loss)$")  # fmt: skip
LOSS_NAMES = re.compile(r"(^|[._])(criterion|loss_fn|loss_func)$")


def is_closed(kind: Class) -> bool:
    """Whether all bases of a class are known, so that no other code uses what its objects hold."""
    return all(
        isinstance(each, Class) or (isinstance(each, External) and HARMLESS.search(each.name))
        for each in kind.lineage()
    )


def is_method(of: Instance, name: str) -> bool:
    """Whether a name is a method that a library's base class gives to an object."""
    if of.kind is None:
        return False
    if of.kind.derives_from("torch.optim."):
        return name in ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")
    return name in OF_MODULES or (name == "__call__")


def format_of(value: Value | None) -> str | None:
    """The format that a dtype names, such as ``bf16``; None for anything else."""
    if isinstance(value, External):
        return FORMATS.get(value.name)
    if isinstance(value, Const) and isinstance(value.value, str):
        return FORMATS.get(value.value)
    return None


def is_scheduler(value: Instance) -> bool:
    """Whether an object of a class of the program is a learning rate scheduler that holds an optimizer."""
    if value.kind is None or value.kind.node is None:
        return False
    is_named = SCHEDULERS.search(value.kind.node.name) or SCHEDULED.search(value.kind.node.name)
    holds = any(map(is_optimizer, value.fields.values()))
    return value.kind.derives_from(LR) or (bool(is_named) and holds)


def is_optimizer(value: Value) -> bool:
    """Whether a value is an optimizer, as far as the script shows."""
    if isinstance(value, Optimizer):
        return True
    if isinstance(value, Instance) and value.kind is not None:
        return value.kind.derives_from("torch.optim.") and not value.kind.derives_from(LR)
    name = called_name(value.text) if isinstance(value, Unknown) else ""
    return bool(OPTIMIZED.search(name)) and not SCHEDULED.search(name)


def called_name(text: str) -> str:
    """An expression without the arguments of its calls."""
    return re.sub(r"\(.*\)|\(.*", "()", text)
