"""The replacements of torch's own functions are listed, and undone when no session is alive.

For overrides of other libraries' methods see ``tests/bridges/trainers/test_overrides.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.fresh import run_interpreter

IN_FORCE = {
    # while a session is alive
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
    # pickles of models, optimizers and methods that outlive their session contain nothing of castwise
    "+copyreg.dispatch_table.<class 'functools.partial'>",
    "+copyreg.dispatch_table.<class 'method'>",
    "+torch.nn.modules.module.Module.__reduce_ex__",
    "+torch.optim.optimizer.Optimizer.__reduce_ex__",
    # checks whether the module is prepared
    "+torch.nn.modules.module.Module.__prepare_scriptable__",
    # checks whether the model in it is prepared
    "torch.nn.parallel.distributed.DistributedDataParallel._sync_final_model",
}
TORCHS_OWN = {
    f"{new}torch.optim.{kind.lower()}.{kind}.step" for kind in ("AdamW", "SGD") for new in ("", "+")
}
"""Wrapped by torch when the first optimizer of a class is created."""

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
