"""``castwise run``: published scripts give the same results as with the same plan added by hand."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from castwise.commands.cli import main
from tests.fresh import SOURCE
from tests.processes import Forked, command, run_script
from tests.soak import each_value, every, pairs, some

PUBLISHED = Path(__file__).with_name("published")
BY_HAND: dict[str, dict[str, str]] = {
    "digits": {
        "    scheduler = ": "    global amp\n    amp = castwise.Amp(PLAN)\n    amp.prepare(model, optimizer)\n    scheduler = ",
        "loss.backward()": "amp.backward(loss)", "optimizer.step()": "amp.step(optimizer)",
    },
    "nanogpt": {
        "if compile:": "amp = castwise.Amp(PLAN)\namp.prepare(model, optimizer)\nif compile:",
        "scaler.scale(loss).backward()": "amp.backward(loss)", "scaler.unscale_(optimizer)": "amp.unscale_(optimizer)",
        "scaler.step(optimizer)": "amp.step(optimizer)",
    },
    "dcgan": {
        "# prepared here": "amp = castwise.Amp(PLAN)\namp.prepare(netD, optimizerD)\namp.prepare(netG, optimizerG)",
        "errD_real.backward()": "amp.backward(errD_real)", "errD_fake.backward()": "amp.backward(errD_fake)",
        "errG.backward()": "amp.backward(errG)", "optimizerD.step()": "amp.step(optimizerD)",
        "optimizerG.step()": "amp.step(optimizerG)",
    },
    "vae": {
        "def loss_function": "amp = castwise.Amp(PLAN)\namp.prepare(model, optimizer)\n\n\ndef loss_function",
        "loss.backward()": "amp.backward(loss)", "optimizer.step()": "amp.step(optimizer)",
    },
    "word_lm": {
        "# prepared here": "amp = castwise.Amp(PLAN)\namp.prepare(model)", "loss.backward()": "amp.backward(loss)",
    },
    "lbfgs": {
        "# prepared here": "amp = castwise.Amp(PLAN)\namp.prepare(seq, optimizer)", "loss.backward()": "amp.backward(loss)",
        "optimizer.step(closure)": "amp.step(optimizer, closure=closure)",
    },
}  # fmt: skip
PLANS = ("bf16-mixed", "fp16-mixed", "bf16-master", "fp16-master")
MIXED = {"word_lm": PLANS[:1], "lbfgs": PLANS[:2]}
"""Plans supported by scripts that update weights by hand, or that call their model only inside a step."""
CASES = [
    case for name in BY_HAND for case in pairs([name], MIXED.get(name, PLANS)[:: -1 if len(name) % 2 else 1])
]


def run(folder: Path, text: str, *words: str) -> str:
    """Return what a script prints under ``castwise run``."""
    (folder / "train.py").write_text(text)
    return _printed(Forked(main, ["run", *words], folder, folder / "ran"))


def python(folder: Path, text: str) -> str:
    """Return what a script prints without ``castwise run``."""
    (folder / "plain.py").write_text(text)
    return _printed(Forked(run_script, ["plain.py"], folder, folder / "by-hand"))


def _printed(process: Forked) -> str:
    assert process.wait(100) == 0, process.said("err")
    return process.said("out")


@every(2)
@pytest.mark.parametrize(("name", "plan"), CASES)
def test_a_script_gives_what_the_plan_gives_it_by_hand(name: str, plan: str, tmp_path: Path) -> None:
    text = (PUBLISHED / f"{name}.txt").read_text()
    hand = text
    for old, new in BY_HAND[name].items():
        assert old in hand
        hand = hand.replace(old, new)
    expected = python(tmp_path, f"import castwise\nPLAN = {plan!r}\n{hand}")
    assert run(tmp_path, text, "--plan", plan, "train.py") == expected


@every(2)
@pytest.mark.parametrize(("name", "plan"), pairs(MIXED, PLANS[2:]))
def test_what_a_plan_comes_too_late_for_runs_as_it_would(name: str, plan: str, tmp_path: Path) -> None:
    text = (PUBLISHED / f"{name}.txt").read_text()
    assert run(tmp_path, text, "--plan", plan, "train.py") == python(tmp_path, text)


@pytest.mark.parametrize("plan", some(["fp16-mixed", "bf16-mixed"], 2))
def test_ranks_of_torchrun_give_what_the_plan_gives_them_by_hand(plan: str, tmp_path: Path) -> None:
    text = (PUBLISHED / "ddp.txt").read_text()
    text += "    print(end='', flush=True)\n    os._exit(0)\n"  # gloo's teardown aborts at times
    hand = text.replace("# prepared here", f"amp = castwise.Amp({plan!r})\n    amp.prepare(model)")
    hand = hand.replace("# optimizer prepared here", "amp.prepare(model, optimizer)")
    hand = hand.replace("loss.backward()", "amp.backward(loss)\n        amp.unscale_(optimizer)")
    hand = "import castwise\n" + hand.replace("optimizer.step()", "amp.step(optimizer)")
    found = {}
    for name, script, given in (("hand", hand, "fp32"), ("run", text, plan), ("plain", text, "fp32")):
        (tmp_path / f"{name}.py").write_text(script)
        ranks = command(tmp_path, 2, "run", "--plan", given, f"{name}.py")
        assert [rank.code for rank in ranks] == [0, 0], ranks[0].said("err")
        found[name] = [rank.said("out") for rank in ranks]
    assert found["run"] == found["hand"] != found["plain"]


PAST_HOOKS = """
import torch
from torch import nn

torch.manual_seed(0)

class Net(nn.Module):
    def __init__(me):
        super().__init__()
        me.table, me.norm = nn.Embedding(50, 16), nn.BatchNorm1d(16)
        me.core = nn.Parameter(torch.randn(16, 16))

    def forward(me, i):
        return me.norm(me.table(i) @ me.core) @ me.table.weight.t()

    def loss(me, i):
        return nn.functional.cross_entropy(me.forward(i), i)

model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
FIRST
for _ in range(4):
    i = torch.randint(0, 50, (32,))
    optimizer.zero_grad()
    loss = CALL
    loss.backward()
    optimizer.step()
    print(loss.item())
"""


CALLED = "nn.functional.cross_entropy(model(i), i)"
PAST = {
    "forward": CALLED.replace("model(", "model.forward("),
    "a method that calls forward": "model.loss(i)",
    "the function of the class": CALLED.replace("model(i)", "Net.forward(model, i)"),
    "the call of the class": CALLED.replace("model(i)", "nn.Module.__call__(model, i)"),
    "a method that was taken before": CALLED.replace("model(", "taken("),
    "within an object": CALLED.replace("model(", "holder.run("),
    "within a wrapper": CALLED.replace("model(", "wrapper.module.forward("),
    "a wrapper's own forward": CALLED.replace("model(", "wrapper.forward("),
    "checkpointed": CALLED.replace(
        "model(i)", "torch.utils.checkpoint.checkpoint(model.forward, i, use_reentrant=False)"
    ),
    "functionally": CALLED.replace(
        "model(i)", "torch.func.functional_call(model, dict(model.named_parameters()), i)"
    ),
    "after calls": CALLED.replace("model(", "(model if _ < 2 else model.forward)("),
}
HOLDERS = """
class Holder:
    def run(me, i): return model.forward(i)
class Wrapper(nn.Module):
    def __init__(me): super().__init__(); me.module = model
    def forward(me, i): return me.module.forward(i)
taken, holder, wrapper = model.forward, Holder(), Wrapper()
"""


@each_value(2)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("way", PAST)
def test_a_model_that_is_called_past_its_hooks_trains_by_the_plan(
    way: str, plan: str, tmp_path: Path
) -> None:
    """The model trains as if it were called, and as a whole, not module by module."""
    (tmp_path / "train.py").write_text(PAST_HOOKS.replace("CALL", PAST[way]).replace("FIRST", HOLDERS))
    process = Forked(main, ["run", "--plan", plan, "train.py"], tmp_path, tmp_path / "ran")
    found = _printed(process)
    assert process.said("err").count("trains under") == 1
    called = PAST_HOOKS.replace("CALL", CALLED).replace("FIRST", "")
    assert found == run(tmp_path, called, "--plan", plan, "train.py") != python(tmp_path, called)


FORWARDS = """
import gc, inspect, torch, weakref
from torch import nn

def trained():
    class Net(nn.Module):
        def __init__(me): super().__init__(); me.part = nn.Linear(4, 4)
        def forward(this, x, *, self=0): return this.part(x)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.forward(torch.ones(4), self=1).sum().backward()
    optimizer.step()
    print(inspect.getfullargspec(model.forward), inspect.signature(Net.forward), Net.forward.__qualname__)
    return weakref.ref(Net), weakref.ref(model)

found = [trained() for _ in range(3)]
gc.collect()
print([each() for pair in found for each in pair])
class Net(nn.Module):
    def __init__(me): super().__init__(); me.part = nn.Linear(4, 4)
    def forward(me, x): return me.part(x)
print(torch.jit.script(Net())(torch.ones(4)).shape)
"""


def test_a_forward_looks_and_lives_as_without_castwise(tmp_path: Path) -> None:
    """Signatures are unchanged, a parameter may be named ``self``, and unused classes are freed."""
    assert run(tmp_path, FORWARDS, "train.py") == python(tmp_path, FORWARDS)


UNSEEN = {
    "its weights by hand": "nn.functional.cross_entropy(model.table.weight[i] @ model.core @ model.table.weight.t(), i)",
    "compiled past it": CALLED.replace("model(", "compiled("),
}


@pytest.mark.parametrize("way", UNSEEN)
def test_a_model_that_no_call_shows_is_told(way: str, tmp_path: Path) -> None:
    text = PAST_HOOKS.replace("CALL", UNSEEN[way])
    text = text.replace("FIRST", "compiled = torch.compile(model.forward, backend='eager')")
    (tmp_path / "train.py").write_text(text)
    process = Forked(main, ["run", "train.py"], tmp_path, tmp_path / "ran")
    assert _printed(process) == python(tmp_path, text)
    assert process.said("err").startswith(
        "castwise run: SGD steps as it would without castwise: it updates parameters that no call of a module used. A module runs "
        "under the plan when it or its forward is called: call model(...), not a method that computes from the parameters "
        "themselves, and compile the model, not model.forward\n"
    )


WHOLE = """
import copy, sys, torch
from torch import nn
class Model(nn.Module):
    def __init__(s): super().__init__(); s.norm, s.a, s.b, s.c = nn.LayerNorm(8), nn.LSTM(8, 8), nn.Linear(8, 8), nn.Linear(8, 8); s.c.weight = s.b.weight
    def forward(s, x): return s.c(s.b(s.a(s.norm(x))[0]))
torch.manual_seed(0)
model, x = Model(), torch.randn(4, 4, 8)
model.register_full_backward_hook(print)
for hook in [*model._backward_hooks]: del model._backward_hooks[hook]
o = torch.optim.SGD(model.parameters(), 0.1); sched = torch.optim.lr_scheduler.StepLR(o, 1)
for _ in range(3): o.zero_grad(); model(x).square().mean().backward(); o.step(); sched.step()
best = copy.deepcopy(model)
for name, what in (("model", model), ("best", best), ("all", [model, o, sched])):
    torch.save(what, name + ".pt")
with torch.serialization.safe_globals([Model, nn.LayerNorm, nn.LSTM, nn.Linear]):
    again, best = torch.load("model.pt"), torch.load("best.pt")
again.a.flatten_parameters()
with torch.no_grad(): print(round(again(x).square().mean().item(), 2), round(best(x).square().mean().item(), 2), again.c.weight is again.b.weight)
model, o, sched = torch.load("all.pt", weights_only=False)
model(x).square().mean().backward(); o.step(); print(o.param_groups[0]["params"][0] is next(model.parameters()))
"""


@pytest.mark.parametrize("plan", ["fp32", *PLANS, "bf16-true"])
def test_a_script_that_saves_its_model_whole_loads_it_again(plan: str, tmp_path: Path) -> None:
    """The model loads with ``weights_only`` and the allowed globals, and without castwise."""
    if plan.startswith("fp16"):
        plan += "+loss_scale.init=64"
    assert run(tmp_path, WHOLE, "--plan", plan, "train.py") == python(tmp_path, WHOLE)
    run(tmp_path, WHOLE, "--plan", plan, "train.py")
    for name in ("model", "best", "all"):
        assert b"castwise" not in (tmp_path / f"{name}.pt").read_bytes()


def test_arguments_and_files_are_the_scripts_own(tmp_path: Path) -> None:
    text = (PUBLISHED / "digits.txt").read_text()
    found = run(tmp_path, text, "train.py", "--epochs", "1", "--save-model", "--workers", "1")
    assert found.count("Test set") == 1
    assert (tmp_path / "mnist_cnn.pt").is_file()


ODD = {
    "exits": ("import sys\nprint(sys.argv[1:], __name__, __file__)\nsys.exit(3)", 3, "['--plan', 'x'] __main__ HERE/train.py\n", ""),
    "raises": ("def f():\n    raise ValueError('here')\nf()", 1, "", 'train.py", line 3, in <module>'),
    "prints what its terminal cannot show": (
        "import sys\nsys.stdout.reconfigure(encoding='ascii')\nprint('\\xe9')", 1, "", "UnicodeEncodeError",
    ),
    "has no model": ("print('done')", 0, "done\n", "the script trained no model"),
    "does not compile": ("print('done'", 1, "", "SyntaxError"),
    "is interrupted": (
        # A shell starts background jobs with interrupts ignored.
        "import os, signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)",
        -signal.SIGINT, "", "KeyboardInterrupt",
    ),
    "autocasts itself": (
        "import torch\nm = torch.nn.Linear(2, 2)\nwith torch.autocast('cpu'):\n    print(m(torch.ones(1, 2)).dtype)", 0,
        "torch.bfloat16\n", "nothing ran under the plan, because Linear was left as it is (the script runs it in torch.autocast)",
    ),
    "scales itself": (
        "import torch\nm = torch.nn.Linear(2, 2)\ns = torch.amp.GradScaler('cpu')\nprint(m(torch.ones(1, 2)).sum().grad_fn.name())", 0,
        "SumBackward0\n", "with a GradScaler",
    ),
    "has a model in bf16": (
        "import torch\nm = torch.nn.Linear(2, 2).bfloat16()\nprint(m(torch.ones(1, 2).bfloat16()).dtype)", 0,
        "torch.bfloat16\n", "castwise run --widen stores them in fp32",
    ),
    "has a model that is refused": (
        "import torch\nm = torch.nn.DataParallel(torch.jit.script(torch.nn.Linear(2, 2)))\nprint(m(torch.ones(1, 2)).shape)", 0,
        "torch.Size([1, 2])\n", "runs as it would without castwise",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ODD)
def test_exit_code_output_and_signals_are_the_scripts_own(what: str, tmp_path: Path) -> None:
    text, code, out, said = ODD[what]
    (tmp_path / "train.py").write_text(text)
    process = Forked(main, ["run", "train.py", "--plan", "x"], tmp_path, tmp_path / "said")
    assert process.wait(60) == code, process.said("err")
    assert process.said("out") == out.replace("HERE", str(tmp_path.resolve()))
    assert said in process.said("err")
    assert "castwise/script" not in process.said("err")  # castwise's frames are not in tracebacks


EVERYTHING = """
import importlib, pkgutil, torch, warnings
warnings.simplefilter("ignore")
names = [module.name for module in pkgutil.walk_packages(torch.__path__, "torch.", onerror=lambda name: None)]
failed = []
for name in names:
    first, *parts = name.split(".")
    if parts[0] in ("testing", "utils", "onnx") or any(part.startswith("_") for part in parts):
        continue
    try:
        importlib.import_module(name)
    except ImportError:
        pass
    except Exception as error:
        failed.append((name, error))
print(failed)
"""
SCRIPTED = """
import torch
class Pair:
    def __init__(self, x: torch.Tensor):
        self.x = helper(x)
def helper(x: torch.Tensor) -> torch.Tensor:
    return 2 * x
def main():
    factor = 3
    @torch.jit.script
    class Local:
        def __init__(self, x: torch.Tensor):
            self.x = helper(x)
    return Local
print(torch.jit.script(Pair)(torch.ones(1)).x, main()(torch.ones(1)).x, torch.jit.script(helper)(torch.ones(1)))
"""


@pytest.mark.parametrize("plan", ["bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize(
    ("text", "out"), [(EVERYTHING, "[]\n"), (SCRIPTED, "tensor([2.]) tensor([2.]) tensor([2.])\n")]
)
def test_what_looks_at_its_callers_frame_finds_the_script(
    text: str, out: str, plan: str, tmp_path: Path
) -> None:
    """TorchScript looks up names in the frame of its caller; all modules of torch can still be imported."""
    (tmp_path / "train.py").write_text(text)
    process = Forked(main, ["run", "--plan", plan, "train.py"], tmp_path, tmp_path / "said")
    assert process.wait(120) == 0, process.said("err")
    assert process.said("out") == out


def test_a_model_that_arrives_in_bf16_trains_like_the_float_model(tmp_path: Path) -> None:
    text = """
import torch
torch.manual_seed(0)
m = torch.nn.Linear(8, 4).bfloat16()
o = torch.optim.SGD(m.parameters(), 1e-3)
for _ in range(5):
    m(torch.randn(16, 8)).square().mean().backward()
    o.step()
    o.zero_grad()
print(m.weight.dtype, m.weight.double().sum().item())
"""
    found = run(tmp_path, text, "--widen", "train.py")
    assert found == run(tmp_path, text.replace("bfloat16()", "bfloat16().float()"), "train.py")
    assert found.startswith("torch.float32 ")


ARRIVED = """
import torch
torch.manual_seed(0)
m = torch.nn.Linear(8, 4).bfloat16()
o = torch.optim.SGD(m.parameters(), 0.1)
for _ in range(3):
    loss = CALL(torch.randn(16, 8).bfloat16()).float().square().mean()
    loss.backward()
    o.step()
    o.zero_grad()
    print(loss.item(), m.weight.dtype)
"""


@each_value()
@pytest.mark.parametrize("call", ["m", "m.forward"])
@pytest.mark.parametrize("plan", ["fp32", *PLANS[:3], "bf16-true"])
def test_an_arrival_in_bf16_is_told(plan: str, call: str, tmp_path: Path) -> None:
    """The message is the same for both ways to call the model; plans that store parameters low give none."""
    text = ARRIVED.replace("CALL", call)
    (tmp_path / "train.py").write_text(text)
    process = Forked(main, ["run", "--plan", plan, "train.py"], tmp_path, tmp_path / "ran")
    found = _printed(process)
    if plan.endswith(("master", "true")):
        assert process.said("err") == f"castwise run: Linear trains under {plan}\n"
        assert found.count("torch.bfloat16") == 3
        return
    assert found == python(tmp_path, text)
    why = (
        f"prepare: the plan {plan} keeps parameters in fp32, but weight, bias are stored in bf16: their updates and gradients would be "
        "bf16. castwise run --widen stores them in fp32, which takes 72 B more for the weights, and as much again for their "
        "gradients and for each state tensor of the optimizer; or use the plan 'bf16-master' (fp32 masters in the optimizer)."
    )
    assert (
        process.said("err").splitlines()[0]
        == f"castwise run: Linear runs as it would without castwise: {why}"
    )


@each_value()
@pytest.mark.parametrize("plan", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize(
    "way", ["m(x.bfloat16())", "m(x.to(m.weight.dtype))", "c(input=x.bfloat16())", "m.forward(x.bfloat16())"]
)
def test_inputs_that_a_script_casts_for_its_model_are_taken_by_the_widened_one(
    way: str, plan: str, tmp_path: Path
) -> None:
    """Loops around bf16 models cast fp32 batches to bf16; the widened model accepts the rounded inputs."""
    text = f"""
import torch
torch.manual_seed(0)
m = torch.nn.Linear(8, 4).bfloat16()
c = torch.compile(m, backend="aot_eager")
o = torch.optim.SGD(m.parameters(), 1e-3)
for _ in range(3):
    x = torch.randn(16, 8).bfloat16()
    {way}.float().square().mean().backward()
    o.step()
    o.zero_grad()
print(m.weight.dtype, m.weight.double().sum().item())
"""
    plain = text.replace("Linear(8, 4).bfloat16()", "Linear(8, 4).bfloat16().float()").replace(
        way, "m(x.float())"
    )
    found = run(tmp_path, text, "--plan", plan, "--widen", "train.py")
    assert found == run(tmp_path, plain, "--plan", plan, "train.py")


def test_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint(sys.argv)\n1 / 0")
    done = subprocess.run(
        [sys.executable, "-m", "castwise", "run", "--plan", "fp32", "train.py", "--help"], cwd=tmp_path, capture_output=True,
        text=True, env={"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "['train.py', '--help']\n")
    assert done.stderr.startswith(
        f'Traceback (most recent call last):\n  File "{tmp_path / "train.py"}", line 3, in <module>'
    )


OTHERS = """
import torch
m, left = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
for each in (m, left):
    torch.nn.init.constant_(each.weight, 0.5)
o, p = torch.optim.SGD(m.parameters(), 0.5), torch.optim.SGD(left.parameters(), 0.5)
x, leaf = torch.ones(2, 4), torch.ones(4, requires_grad=True)
m(x).sum().backward()
with torch.autocast("cpu"):
    loss = left(x).sum()
loss.backward()
(leaf * 2).sum().backward()
(m(x * leaf) + leaf.square()).sum().backward()
print(m.weight.grad.tolist(), left.weight.grad.tolist(), leaf.grad.tolist())
print([g.tolist() for g in torch.autograd.grad(m(x * leaf).sum(), (leaf, m.weight))])
o.step()
m(x).sum().backward()
print(m.weight.grad.tolist(), leaf.grad.tolist())
late = torch.optim.SGD([*m.parameters()], 1.0)
o.zero_grad()
(m(x) * float("inf")).sum().backward()
before = m.weight.tolist()
o.step()
print(m.weight.tolist() == before)
"""


@every(2)
@pytest.mark.parametrize("plan", ["fp32", "bf16-mixed", "fp16-mixed+loss_scale.init=1024"])
def test_gradients_are_true_whoever_holds_them(plan: str, tmp_path: Path) -> None:
    found = run(tmp_path, OTHERS, "--plan", plan, "train.py")
    *gradients, skipped = python(tmp_path, OTHERS).splitlines()
    assert found.splitlines() == [*gradients, "True"]
    assert skipped == "False"


POISONED = """
import torch
m = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
o = torch.optim.SGD(m.parameters(), 0.1)
for number in (1.0, float("nan"), 1.0):
    o.zero_grad()
    m(number * torch.randn(8, 3)).square().mean().backward()
    o.step()
print(all(value.isfinite().all() for value in m.state_dict().values()))
"""


@pytest.mark.parametrize("plan", ["fp32", "bf16-master"])
def test_a_script_with_a_bad_batch_ends_with_sound_weights_and_buffers(plan: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(POISONED)
    ran = Forked(main, ["run", "--plan", plan, "train.py"], tmp_path, tmp_path / "ran")
    assert ran.wait(100) == 0
    assert ran.said("out") == "True\n"
    assert (
        "buffers that skipped steps had made non-finite were restored: 1.running_mean, 1.running_var"
        in ran.said("err")
    )
    assert python(tmp_path, POISONED) == "False\n"


INPUTS = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(64, 16)
for _ in range(12):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), x[:, :2]).backward()
    optimizer.step()
def saliency(loss, outputs=None):
    given = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(model(given)), given, grad_outputs=outputs)
    return f"{gradient.abs().sum():.4g}", bool(gradient.isfinite().all())
for loss, outputs in (
    (lambda y: y.square().mean(), None), (lambda y: y[:, 1].sum(), None), (lambda y: y, torch.ones(64, 2)),
    (lambda y: 1000 * y.sum(), None), (lambda y: 1000 * y.sum(), None), (lambda y: y.square().mean(), None),
    (lambda y: y.sum() * float("nan"), None),
):
    print(*saliency(loss, outputs))
"""


def test_gradients_of_what_is_no_loss_are_finite_where_they_are_without_a_scale(tmp_path: Path) -> None:
    """A sum's gradients overflow fp16 at a mean's loss scale; only the first overflow after finite gradients stays."""
    (tmp_path / "train.py").write_text(INPUTS)
    plain = Forked(main, ["run", "--plan", "fp32", "train.py"], tmp_path, tmp_path / "plain")
    scaled = Forked(main, ["run", "--plan", "fp16-mixed", "train.py"], tmp_path, tmp_path / "scaled")
    assert (plain.wait(60), scaled.wait(60)) == (0, 0), scaled.said("err")
    want, got = ([line.split() for line in run.said("out").splitlines()] for run in (plain, scaled))
    assert [finite for _, finite in want] == ["True"] * 6 + ["False"]
    assert [finite for _, finite in got][:1] + [finite for _, finite in got][2:3] == ["True", "True"]
    assert [finite for _, finite in got][4:] == ["True", "True", "False"]
    for (mine, finite), (theirs, _) in zip(got, want, strict=True):
        if finite == "True":
            assert float(mine) == pytest.approx(float(theirs), rel=0.02)


CLOSURES = """
import sys, torch
from torch import nn
torch.manual_seed(0)
class Sam(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        params = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        climbs = [0.05 * p.grad / (sum(q.grad.norm() for q in params) + 1e-12) for p in params]
        torch._foreach_add_(params, climbs)
        with torch.enable_grad():
            closure()
        torch._foreach_sub_(params, climbs)
        super().step()
        return loss
model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer, steps = {
    "lbfgs": lambda p: (torch.optim.LBFGS(p), 5),
    "lbfgs, one step": lambda p: (torch.optim.LBFGS(p, max_iter=100), 1),
    "line search": lambda p: (torch.optim.LBFGS(p, line_search_fn="strong_wolfe"), 5),
    "adam": lambda p: (torch.optim.Adam(p, 0.01), 200),
    "sam": lambda p: (Sam(p, 0.1, momentum=0.9), 200),
}[sys.argv[1]](model.parameters())
x = torch.linspace(0, 1, 32)[:, None].requires_grad_()
def closure():
    optimizer.zero_grad()
    u = model(x)
    slope, = torch.autograd.grad(u.sum(), x, create_graph=True)
    loss = (slope + u).square().mean() + (model(torch.zeros(1, 1)) - 1).square().mean()
    loss.backward()
    return loss
for _ in range(steps):
    optimizer.step(closure)
print(float(closure()))
"""


@pytest.mark.parametrize("name", ["lbfgs", "lbfgs, one step", "line search", "adam", "sam"])
def test_a_model_that_is_called_inside_steps_alone_trains_by_a_plan_with_a_loss_scale(
    name: str, tmp_path: Path
) -> None:
    """The model's first call is inside the first optimizer step, which may be the only one."""
    (tmp_path / "train.py").write_text(CLOSURES)
    plain = Forked(main, ["run", "--plan", "fp32", "train.py", name], tmp_path, tmp_path / "plain")
    scaled = Forked(main, ["run", "--plan", "fp16-mixed", "train.py", name], tmp_path, tmp_path / "scaled")
    assert (plain.wait(60), scaled.wait(60)) == (0, 0), scaled.said("err")
    want, got = (float(run.said("out")) for run in (plain, scaled))
    assert got == pytest.approx(want, abs=0.005)
    assert "trains under fp16-mixed" in scaled.said("err")


BY_GRAD = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
x = torch.randn(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
def closure():
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    for p, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))):
        p.grad = gradient
    return loss.detach()
for _ in range(20):
    if sys.argv[1] == "closure":
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()
print(float(closure()))
"""


@pytest.mark.parametrize("way", ["closure", "step"])
def test_a_script_whose_gradients_all_come_from_grad_trains(way: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BY_GRAD)
    plain = Forked(main, ["run", "--plan", "fp32", "train.py", way], tmp_path, tmp_path / "plain")
    mixed = Forked(main, ["run", "--plan", "fp16-mixed", "train.py", way], tmp_path, tmp_path / "mixed")
    assert (plain.wait(60), mixed.wait(60)) == (0, 0), mixed.said("err")
    assert float(mixed.said("out")) == pytest.approx(float(plain.said("out")), rel=0.01)
