"""Changes to a plain loop after which a session might mean something else: each must be seen, and named."""

from __future__ import annotations

import pytest

from castwise.bridges.scripts.migrate.rewriting import rewrite

TORCH = """\
import torch
from torch.cuda.amp import GradScaler, autocast

model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler()
for x, y in loader:
    optimizer.zero_grad()
    with autocast():
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""

NOT_A_SESSION = {
    "validation outside of autocast": ("scaler.update()\n", "scaler.update()\nprint(model(x))\n", "runs outside of autocast"),
    "an island": ("criterion(model(x), y)", "one(y)\n        with autocast(enabled=False):\n            model(x)", "runs outside of autocast"),
    "another format": ("autocast()", "autocast(dtype=torch.bfloat16)", "no fp16 autocast"),
    "lazily": ("criterion(model(x), y)", "sum(model(each) for each in x)", "runs outside of autocast"),
    "a lambda": ("criterion(model(x), y)", "later(lambda: model(x))", "runs outside of autocast"),
    "handed to a function": ("loader:\n", "loader:\n    validate(model)\n", "'model' is passed here to code"),
    "another name for the model": ("scaler = ", "copy = model\nscaler = ", "'model' is passed here to code"),
    "kept in a list": ("optimizer = ", "holders.append(model)\noptimizer = ", "'model' is passed here to code"),
    "registered": ("optimizer = ", "trainer.hooks[0].register(model)\noptimizer = ", "'model' is passed here to code"),
    "an average of the model": ("scaler = ", "ema = Average(model)\nscaler = ", "'model' is passed here to code"),
    "a part of the model": ("loader:\n", "loader:\n    model.head(x)\n", "'model' is passed here to code"),
    "wrapped before": ("optimizer = ", "model = torch.compile(model)\noptimizer = ", "wrapped before its optimizer is made"),
    "scripted before": ("optimizer = ", "model = torch.jit.script(model)\noptimizer = ", "wrapped before its optimizer is made"),
    "another model later": ("for x", "model = other\nfor x", "is reassigned after"),
    "made in a branch": ("model = Net().cuda()", "if big:\n    model = Net()\nelse:\n    model = Small()", "made in a different block"),
    "optimizer in a branch": ("optimizer = ", "if 1:\n    optimizer = ", "made in different blocks"),
    "unknown parameters": ("model.parameters()", "groups(model)", "which model 'optimizer' updates"),
    "two optimizers by one name": ("scaler = ", "optimizer = other(optimizer)\nscaler = ", "how 'optimizer' is made"),
    "the model's name from a loop": ("model = Net().cuda()", "for model in models:\n    pass", "where 'model' comes from"),
    "the scaler handed on": ("loader:\n", "loader:\n    log(scaler)\n", "'scaler' is passed to other code here"),
    "the scaler in an object": ("scaler = GradScaler()", "self.scaler = scaler = GradScaler()", "one variable"),
    "a scaler that may be none": ("GradScaler()", "GradScaler() if fp16 else None", "one variable"),
    "a second scaler": ("for x", "other = GradScaler()\nfor x", "more than one scaler"),
    "a scale known only later": ("GradScaler()", "GradScaler(init_scale=args.scale)", "init_scale is not a literal number"),
    "computed enabled": ("GradScaler()", "GradScaler(enabled=not args.fp32)", "neither True nor a plain name"),
    "enabled bound twice": ("scaler = GradScaler()", "on = 1\non = 2\nscaler = GradScaler(enabled=on)", "may be assigned more than once"),
    "enabled for one alone": ("scaler = GradScaler()", "on = 1\nscaler = GradScaler(enabled=on)", "no fp16 autocast"),
    "update with a value": ("update()", "update(1024.0)", "scaler.update(...) has no counterpart"),
    "no update": ("    scaler.update()\n", "", "no update() comes after"),
    "an update alone": ("    scaler.step(optimizer)\n    scaler", "    scaler.step(optimizer)\n    scaler.update()\n    scaler", "no step() comes before this update()"),
    "update in another block": ("    scaler.update()", "    if x:\n        scaler.update()", "different blocks"),
    "a way out between": ("    scaler.update()", "    if x:\n        continue\n    scaler.update()", "may end between"),
    "a look between": ("    scaler.update()", "    print(scaler.get_scale())\n    scaler.update()", "the scale is read between"),
    "a loss between": ("    scaler.update()", "    scaler.scale(loss).backward()\n    scaler.update()", "a loss is scaled between"),
    "the result of a step": ("    scaler.step(", "    result = scaler.step(", "its result is used"),
    "a closure": ("step(optimizer)", "step(optimizer, closure)", "an argument other than an optimizer's name"),
    "a gradient": (".backward()", ".backward(ones)", "something other than .backward()"),
    "a gradient by name": (".backward()", ".backward(gradient=ones)", "something other than .backward()"),
    "a scaled loss kept": ("scaler.scale(loss).backward()", "scaled = scaler.scale(loss)\n    scaled.backward()", "something other than"),
    "a step and its update on one line": ("optimizer)\n    scaler.up", "optimizer); scaler.up", "scaler.step(optimizer) shares its line"),
    "an update and more on one line": ("scaler.update()", "scaler.update(); done()", "scaler.update() shares its line"),
    "a loss and more on one line": (".backward()", ".backward(); done()", "scaler.scale(loss).backward() shares its line"),
    "a step on the line of an if": ("scaler.step(", "if x: scaler.step(", "scaler.step(optimizer) shares its line"),
    "wrapped behind its optimizer": ("lr=0.1)\n", "lr=0.1); model = DDP(model)\n", "wrapped before its optimizer is made"),
    "kept after a semicolon": ("optimizer = ", "init(model); holders.append(model)\noptimizer = ", "'model' is passed here to code"),
    "run after a semicolon": ("for x", "model = DDP(model); validate(model)\nfor x", "'model' is passed here to code"),
    "is_enabled": ("loader:\n", "loader:\n    scaler.is_enabled()\n", "scaler.is_enabled() has no counterpart"),
    "clipped while scaled": ("    scaler.step(", "    clip_grad_norm_(model.parameters(), 1.0)\n    scaler.step(", "gradients are used while they still contain the loss scale"),
    "clipped before unscaling": ("    scaler.step(", "    clip(model.parameters())\n    scaler.unscale_(optimizer)\n    scaler.step(", "unscale_(optimizer) comes later"),
    "gradients dropped while scaled": ("    scaler.step(", "    weight.grad = None\n    scaler.step(", "gradients are used while they still contain the loss scale"),
    "clipped above the backward": ("    optimizer.zero_grad()\n    with", "    clip_grad_norm_(params, 1.0)\n    scaler.step(optimizer)\n    scaler.update()\n    with", "gradients are used while they still contain the loss scale"),
    "a step without the scaler": ("    scaler.step(", "    optimizer.step()\n    scaler.step(", "optimizer.step is called without the scaler here"),
    "another step of the optimizer": ("for x", "optimizer.step = counted(optimizer.step)\nfor x", "optimizer.step is used without being called here"),
    "a loss without the scaler": ("    scaler.step(", "    other.backward()\n    scaler.step(", "this backward starts from a loss that the scaler has not scaled"),
    "no loss": ("    scaler.scale(loss).backward()\n", "", "the scaler scales no loss in this script"),
    "variables by text": ("for x", "exec(open('config.py').read())\nfor x", "accesses variables by strings"),
    "autocast set for all": ("for x", "torch.set_autocast_gpu_dtype(torch.bfloat16)\nfor x", "sets autocast's dtype"),
    "around another optimizer": ("torch.optim.SGD(model.parameters(), lr=0.1)", "Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))", "wraps another optimizer"),
    "sharded in place": ("optimizer = ", "fully_shard(model)\noptimizer = ", "'model' is passed here to code"),
    "compiled in place": ("optimizer = ", "model.compile()\noptimizer = ", "'model' is passed here to code"),
    "wrapped by a function": ("model = Net().cuda()", "def build():\n    return DataParallel(Net())\nmodel = build()", "wrapped before its optimizer is made"),
}  # fmt: skip


def test_the_plain_loop_becomes_a_session() -> None:
    assert 'amp = castwise.Amp("fp16-mixed+output=as_is", device="cuda")' in rewrite(TORCH)[0]


@pytest.mark.parametrize("case", NOT_A_SESSION)
def test_a_loop_stays(case: str) -> None:
    old, new, reason = NOT_A_SESSION[case]
    assert old in TORCH
    before = TORCH.replace(old, new, 1)
    after, (left,) = rewrite(before)
    assert after == before
    assert left.kind == "left"
    assert left.text.startswith("torch.amp stays as it is, and works beside castwise: ")
    assert reason in left.text


@pytest.mark.parametrize(
    ("written", "plan"),
    [("1024", "1024"), ("2.**16", "65536"), ("(2 ** 10)", "1024"), ("1e4", "10000"), ("65536.0", "65536")],
)
def test_a_scale_that_is_written_out(written: str, plan: str) -> None:
    after, _ = rewrite(TORCH.replace("GradScaler()", f"GradScaler(init_scale={written})", 1))
    assert f'castwise.Amp("fp16-mixed+output=as_is+loss_scale.init={plan}", device="cuda")' in after


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("model = Net().cuda()\noptimizer", "x = 1; model = Net().cuda(); optimizer"),
        ("optimizer = ", "x = 1; init(model)\noptimizer = "),
        ("lr=0.1)\n", "lr=0.1); x = 1\n"),
    ],
    ids=["both on one line", "behind another statement", "before another statement"],
)
def test_statements_that_share_a_line_are_told_apart(old: str, new: str) -> None:
    after, findings = rewrite(TORCH.replace(old, new, 1))
    assert "model, optimizer = amp.prepare(model, optimizer)\n" in after
    assert {finding.kind for finding in findings} == {"differs"}


def test_a_decorated_function_stays() -> None:
    head, _, loop = TORCH.partition("for x, y in loader:\n")
    after, findings = rewrite(f"{head}@torch.compile\ndef step(x, y):\n{loop}")
    assert "castwise.Amp(" not in after
    assert "in a decorated function" in findings[0].text


VALIDATE = "def validate(x):\n    with autocast():\n        return model(x)\n\n\n"


@pytest.mark.parametrize(
    ("old", "new", "session"),
    [
        ("model = ", f"{VALIDATE}model = ", False),  # nobody calls it here
        ("for x, y", f"{VALIDATE}for x, y", True),
        ("model = ", f"{VALIDATE}model = Net()\nvalidate(0)\nmodel = ", False),
    ],
    ids=["before", "after", "called before"],
)
def test_a_region_that_may_run_before_the_session(old: str, new: str, session: bool) -> None:
    """All of a loop is rewritten, or nothing: the session's name may not be bound yet."""
    before = TORCH.replace(old, new, 1)
    after, findings = rewrite(before)
    assert ("amp = castwise.Amp(" in after) is session
    assert session is ("autocast()" not in after.replace("amp.autocast()", ""))
    assert session or (after == before and "may be entered before the session" in findings[0].text)


def test_a_region_before_that_is_entered_after() -> None:
    before = TORCH.replace("model = ", f"{VALIDATE}model = ", 1) + "validate(0)\n"
    after, _ = rewrite(before)
    assert "def validate(x):\n    with amp.autocast():" in after
    assert "import GradScaler" not in after


def test_what_is_bound_for_another_scope_stays() -> None:
    head, _, loop = TORCH.partition("for x, y in loader:\n")
    made = "".join(f"    {line}\n" for line in head.splitlines()[3:])
    before = f"import torch\nfrom torch.cuda.amp import GradScaler, autocast\n\ndef setup():\n    global model, optimizer, scaler\n{made}\nsetup()\nfor x, y in loader:\n{loop}"
    after, findings = rewrite(before)
    assert after == before
    assert "'scaler' is a global or nonlocal variable of the function that makes it" in findings[0].text


def test_a_script_with_castwise_as_a_name_of_its_own_is_left() -> None:
    text = "castwise = 1\nfrom apex import amp\n"
    after, findings = rewrite(text)
    assert after == text
    assert findings[0].kind == "left"


@pytest.mark.parametrize(("first", "device"), [(True, "next(model.parameters()).device"), (False, "None")])
def test_where_a_session_that_is_off_runs(first: bool, device: str) -> None:
    """Where torch.amp is off the model may be anywhere, on a machine with CUDA too."""
    made = "scaler = GradScaler(enabled=on)\n"
    text = TORCH.replace("scaler = GradScaler()\n", made if first else "").replace(
        "cast()", "cast(enabled=on)"
    )
    text = text.replace("model = ", f"on = ask()\n{'' if first else made}model = ", 1)
    assert f'device="cuda" if on else {device})\n' in rewrite(text)[0]
