"""What castwise puts in the place of code of others: each override says what it keeps of the method that it replaces, and whatever
is replaced in torch while a session lives is torch's own again after it.

An override that calls the method it replaces keeps what that does. One that does not call it loses its side effects, unless it
has them as well: so those are listed, with what was read in the original, and with a digest of that. A new version of a library
whose method is another one fails here, to be read again.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import castwise

from .fresh import run_interpreter

LIBRARIES = ("accelerate", "lightning", "transformers", "torch.amp", "torch.optim.swa_utils")
ACCELERATOR = "integrations.huggingface.accelerator.CastwiseAccelerator"
PRECISION = "integrations.lightning.precision.CastwisePrecision"
KEEPS = {
    f"{ACCELERATOR}.prepare_optimizer": (
        "a0a2ff64", "LOMO's mark, no second wrapper, _optimizers; the scaler of the wrapper is the session",
    ),
    f"{ACCELERATOR}.backward": (
        "064f6206", "the loss over the accumulated batches, learning_rate for LOMO; DeepSpeed and Megatron are refused when it is made",
    ),
    f"{ACCELERATOR}.unscale_gradients": ("c136816c", "one, several or all optimizers, out of their wrappers"),
    f"{ACCELERATOR}.clip_grad_norm_": ("52f65751", "unscaling first, DTensors; FSDP1, DeepSpeed and XLA are refused when it is made"),
    f"{ACCELERATOR}.clip_grad_value_": ("996feded", "unscaling first"),
    f"{ACCELERATOR}.autocast": ("faf52e6e", "enabled and cache_enabled of the handler"),
    "integrations.huggingface.steps.CastwiseOptimizer.step": (
        "c5c8e842", "no step while gradients are accumulated, none of LOMO's, whether it was skipped; XLA is refused",
    ),
    "integrations.huggingface.steps.CastwiseOptimizer.step_was_skipped": ("53d31991", "of the last step"),
    f"{PRECISION}.convert_module": ("e5ee8550", "nothing: it returns the module"),
    f"{PRECISION}.connect": ("c7c47c5c", "nothing: it returns what it was given"),
    f"{PRECISION}.teardown": ("1e6750d5", "nothing"),
    f"{PRECISION}.convert_input": ("30b2783b", "nothing: it returns its argument"),
    f"{PRECISION}.forward_context": ("003f379b", "nothing: a null context"),
    f"{PRECISION}.train_step_context": ("f72f8da7", "forward_context"),
    f"{PRECISION}.val_step_context": ("985b1f5e", "forward_context"),
    f"{PRECISION}.test_step_context": ("698f1203", "forward_context"),
    f"{PRECISION}.predict_step_context": ("c60d8fde", "forward_context"),
    f"{PRECISION}.optimizer_step": ("b2373846", "the closure is wrapped, so that clipping and the hooks come behind it; its result"),
    f"{PRECISION}.unscale_gradients": ("9b97f99c", "nothing"),
    f"{PRECISION}.state_dict": ("b0f22671", "nothing: an empty state"),
    f"{PRECISION}.load_state_dict": ("1806eaa0", "nothing"),
    f"{PRECISION}.on_load_checkpoint": ("e2e86cc7", "nothing"),
    "integrations.lightning.parts.Resting.frequency": ("da39a3ee", "a field with a value"),
    "scaler.grad_scaler.GradScaler.get_scale": ("48c91f36", "1.0 where it is disabled"),
    "scaler.losses.NamedLosses.is_enabled": ("3675f286", "nothing but the answer"),
    "scaler.step_guard.StepGuard.unscale_": ("300c55c7", "the optimizer's stage and flags; there is no scale to divide by"),
    "masters.averages.AveragedModel.forward": ("22663d5e", "the averaged module is called"),
}  # fmt: skip

IN_FORCE = {
    # while a session lives
    "torch.amp.grad_scaler.GradScaler.scale",
    "torch.nn.modules.module.Module._apply",
    "torch.nn.modules.module.Module.zero_grad",
    "torch.optim.optimizer.Optimizer.zero_grad",
    # until a backward has shown that the model runs by its plan
    "torch.amp.autocast_mode.autocast.__enter__",
    # while there are masters
    "+torch.nn.parameter.Parameter.clone",
    "+torch.nn.parameter.Parameter.data",
    "torch.nn.parameter.Parameter.__deepcopy__",
}
FOR_GOOD = {
    # pickles of models, optimizers and methods that outlive their session hold nothing of castwise's
    "+copyreg.dispatch_table.<class 'functools.partial'>",
    "+copyreg.dispatch_table.<class 'method'>",
    "+torch.nn.modules.module.Module.__reduce_ex__",
    "+torch.optim.optimizer.Optimizer.__reduce_ex__",
    # asks whether the module is prepared
    "+torch.nn.modules.module.Module.__prepare_scriptable__",
    # asks whether the model in it is prepared
    "torch.nn.parallel.distributed.DistributedDataParallel._sync_final_model",
}
TORCHS_OWN = {
    f"{new}torch.optim.{kind.lower()}.{kind}.step" for kind in ("AdamW", "SGD") for new in ("", "+")
}
"""Wrapped by torch when the first optimizer of a class is made."""


def overrides() -> Iterator[tuple[str, Any, Any]]:
    """Each method of a class here that does not call the method of a library's class which it replaces: name, ours, theirs."""
    for found in pkgutil.walk_packages(castwise.__path__, "castwise."):
        if found.name.endswith("__main__"):
            continue
        try:
            module = importlib.import_module(found.name)
        except ImportError:  # a library that is not installed
            continue
        for kind in vars(module).values():
            if not inspect.isclass(kind) or kind.__module__ != module.__name__:
                continue
            theirs = [base for base in kind.__mro__ if base.__module__.startswith(LIBRARIES)]
            for name, ours in vars(kind).items():
                home = next((base for base in theirs if name in vars(base)), None)
                if home is None or name in ("__init__", "__getstate__", "__setstate__") or not _source(ours):
                    continue
                if "super()" not in _source(ours) and not name.startswith("_"):
                    yield (
                        f"{module.__name__.removeprefix('castwise.')}.{kind.__name__}.{name}",
                        ours,
                        vars(home)[name],
                    )


def _source(method: Any) -> str:
    method = inspect.unwrap(getattr(method, "fget", getattr(method, "__func__", method)))
    return inspect.getsource(method) if inspect.isfunction(method) else ""


def digest(method: Any) -> str:
    return hashlib.sha1(_source(method).encode(), usedforsecurity=False).hexdigest()[:8]


def test_every_override_says_what_it_keeps() -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("lightning")
    found = {name: digest(theirs) for name, _, theirs in overrides()}
    assert found.keys() == KEEPS.keys()
    changed = {name: now for name, now in found.items() if now != KEEPS[name][0]}
    assert not changed, "read these again, and write down what they do now"


def test_accelerates_autocast_takes_what_the_handler_says() -> None:
    accelerate = pytest.importorskip("accelerate")
    from castwise.integrations.huggingface import CastwiseAccelerator

    accelerator = CastwiseAccelerator("bf16-mixed", cpu=True)
    for handler, expected in (
        (None, (True, torch.is_autocast_cache_enabled())),
        (accelerate.utils.AutocastKwargs(enabled=False), (False, torch.is_autocast_cache_enabled())),
        (accelerate.utils.AutocastKwargs(cache_enabled=False), (True, False)),
    ):
        with accelerator.autocast(handler):
            assert (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()) == expected


SNAPSHOTS = """
import copyreg, sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed.fsdp, torch.distributed.pipelining, torch.export, torch.nn.parallel, torch.optim.swa_utils
import torch._dynamo

def snapshot():
    found = {}
    for name, module in list(sys.modules.items()):
        if module is None or not (name == "torch" or name.startswith("torch.") or name in ("copyreg", "copy", "pickle", "signal")):
            continue
        for key, value in list(vars(module).items()):
            if callable(value):
                found[name, key] = value
            if isinstance(value, type) and value.__module__ == name:
                for attribute, method in list(vars(value).items()):
                    if callable(method) or isinstance(method, (property, staticmethod, classmethod)):
                        found[name, f"{key}.{attribute}"] = method
    found.update({("copyreg.dispatch_table", str(kind)): how for kind, how in copyreg.dispatch_table.items()})
    return found

def changes(before, after):
    known = {key[0] for key in before}
    changed = {".".join(key) for key in before.keys() & after.keys() if before[key] is not after[key]}
    changed |= {"+" + ".".join(key) for key in after.keys() - before.keys() if key[0] in known}
    return changed | {"-" + ".".join(key) for key in before.keys() - after.keys()}

first = snapshot()
import castwise
imported = changes(first, snapshot())
during = set()
for plan in ("fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "bf16-true", "O1", "O2", "bf16-mixed+ops.exp=lower"):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    with castwise.Amp(plan, device="cpu") as amp:
        amp.prepare(model, optimizer)
        during |= changes(first, snapshot())
        amp.backward(model(torch.randn(4, 4)).mean())
        amp.step(optimizer)
        optimizer.zero_grad()
        during |= changes(first, snapshot())
    del model, optimizer, amp
after = changes(first, snapshot())
"""


def test_whatever_is_replaced_in_torch_is_listed_and_is_put_back(tmp_path: Path) -> None:
    said = run_interpreter(
        f"import json\n{SNAPSHOTS}\nprint(json.dumps([sorted(each) for each in (imported, during, after)]))",
        tmp_path,
    )
    imported, during, after = map(set, json.loads(said))
    assert not imported, "importing castwise does no work"
    assert during - TORCHS_OWN == IN_FORCE | FOR_GOOD
    assert after - TORCHS_OWN == FOR_GOOD
