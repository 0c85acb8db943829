"""Changes to a plain loop after which a session might mean something else: each must be seen, and named."""

from __future__ import annotations

import pytest

from castwise.migrate.rewriting import rewrite

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
    "another format": ("autocast()", "autocast(dtype=torch.bfloat16)", "no autocast of fp16"),
    "lazily": ("criterion(model(x), y)", "sum(model(each) for each in x)", "runs outside of autocast"),
    "a lambda": ("criterion(model(x), y)", "later(lambda: model(x))", "runs outside of autocast"),
    "handed to a function": ("loader:\n", "loader:\n    validate(model)\n", "'model' is handed on here"),
    "another name for the model": ("scaler = ", "copy = model\nscaler = ", "'model' is handed on here"),
    "an average of the model": ("scaler = ", "ema = Average(model)\nscaler = ", "'model' is handed on here"),
    "a part of the model": ("loader:\n", "loader:\n    model.head(x)\n", "'model' is handed on here"),
    "wrapped before": ("optimizer = ", "model = torch.compile(model)\noptimizer = ", "wrapped before its optimizer is made"),
    "another model later": ("for x", "model = other\nfor x", "becomes something else"),
    "made in a branch": ("model = Net().cuda()", "if big:\n    model = Net()\nelse:\n    model = Small()", "made in another block"),
    "optimizer in a branch": ("optimizer = ", "if 1:\n    optimizer = ", "made in different blocks"),
    "unknown parameters": ("model.parameters()", "groups(model)", "which model 'optimizer' updates"),
    "two optimizers by one name": ("scaler = ", "optimizer = other(optimizer)\nscaler = ", "how 'optimizer' is made"),
    "the model's name from a loop": ("model = Net().cuda()", "for model in models:\n    pass", "where 'model' comes from"),
    "the scaler handed on": ("loader:\n", "loader:\n    log(scaler)\n", "'scaler' is handed on here"),
    "the scaler in an object": ("scaler = GradScaler()", "self.scaler = scaler = GradScaler()", "one variable"),
    "a scaler that may be none": ("GradScaler()", "GradScaler() if fp16 else None", "one variable"),
    "a second scaler": ("for x", "other = GradScaler()\nfor x", "more than one scaler"),
    "a scale known only later": ("GradScaler()", "GradScaler(init_scale=args.scale)", "init_scale is not a number written out"),
    "computed enabled": ("GradScaler()", "GradScaler(enabled=not args.fp32)", "neither True nor a plain name"),
    "enabled bound twice": ("scaler = GradScaler()", "on = 1\non = 2\nscaler = GradScaler(enabled=on)", "may be bound more than once"),
    "enabled for one alone": ("scaler = GradScaler()", "on = 1\nscaler = GradScaler(enabled=on)", "no autocast of fp16"),
    "update with a value": ("update()", "update(1024.0)", "scaler.update(...) has no counterpart"),
    "no update": ("    scaler.update()\n", "", "no update() follows"),
    "an update alone": ("    scaler.step(optimizer)\n    scaler", "    scaler.step(optimizer)\n    scaler.update()\n    scaler", "follows no step()"),
    "update in another block": ("    scaler.update()", "    if x:\n        scaler.update()", "different blocks"),
    "a way out between": ("    scaler.update()", "    if x:\n        continue\n    scaler.update()", "may be left between"),
    "a look between": ("    scaler.update()", "    print(scaler.get_scale())\n    scaler.update()", "the scale is read between"),
    "a loss between": ("    scaler.update()", "    scaler.scale(loss).backward()\n    scaler.update()", "a loss is scaled between"),
    "the result of a step": ("    scaler.step(", "    result = scaler.step(", "its result is used"),
    "a closure": ("step(optimizer)", "step(optimizer, closure)", "more than an optimizer's name"),
    "a gradient": (".backward()", ".backward(ones)", "something else than .backward()"),
    "a gradient by name": (".backward()", ".backward(gradient=ones)", "something else than .backward()"),
    "a scaled loss kept": ("scaler.scale(loss).backward()", "scaled = scaler.scale(loss)\n    scaled.backward()", "something else than"),
    "is_enabled": ("loader:\n", "loader:\n    scaler.is_enabled()\n", "scaler.is_enabled() has no counterpart"),
}  # fmt: skip


def test_the_plain_loop_becomes_a_session() -> None:
    assert 'amp = castwise.Amp("fp16-mixed", device="cuda")' in rewrite(TORCH)[0]


@pytest.mark.parametrize("case", NOT_A_SESSION)
def test_a_loop_of_torch_keeps_its_form(case: str) -> None:
    old, new, reason = NOT_A_SESSION[case]
    assert old in TORCH
    after, findings = rewrite(TORCH.replace(old, new, 1))
    assert "castwise.Amp(" not in after
    (left,) = [finding.text for finding in findings if finding.kind == "left"]
    assert left.startswith("not made a castwise.Amp: ")
    assert reason in left


def test_a_decorated_function_keeps_its_form() -> None:
    head, _, loop = TORCH.partition("for x, y in loader:\n")
    after, findings = rewrite(f"{head}@torch.compile\ndef step(x, y):\n{loop}")
    assert "castwise.Amp(" not in after
    assert "a function with a decorator" in findings[0].text


def test_a_region_that_may_run_before_the_session_keeps_its_form() -> None:
    """Validation runs first here: the session's name is not bound yet."""
    early = "def validate(x):\n    with autocast():\n        return model(x)\n\n\n"
    after, _ = rewrite(TORCH.replace("model = ", f"{early}model = ", 1))
    assert "amp = castwise.Amp(" in after
    assert 'def validate(x):\n    with castwise.autocast(torch.float16, device_type="cuda"):' in after


APEX = """\
import torch
from apex import amp

model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
for x, y in loader:
    optimizer.zero_grad()
    with amp.scale_loss(criterion(model(x), y), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
"""

NOT_APEX = {
    "a level known later": ('"O1"', "args.level", "known only when it runs"),
    "a static scale": ('"O1"', '"O1", loss_scale=128.0', "loss_scale=128.0 has no preset"),
    "a ceiling": ('"O1"', '"O1", max_loss_scale=2.**20', "max_loss_scale=2.**20 has no preset"),
    "off": ('"O1"', '"O1", enabled=False', "enabled=False has no preset"),
    "two times": ("for x", "amp.initialize(a, b)\nfor x", "called 2 times"),
    "state": ("for x", "amp.load_state_dict(saved)\nfor x", "amp.load_state_dict is used"),
    "more in the block": ("scaled_loss.backward()", "scaled_loss.backward()\n        log(scaled_loss)", "more than call backward()"),
    "used after the block": ("    optimizer.step()", "    optimizer.step()\n    log(scaled_loss)", "outside of its block"),
    "a loss's own scale": (", optimizer) as", ", optimizer, loss_id=1) as", "not of the form with amp.scale_loss"),
    "steps apart": ("    optimizer.step()", "    if x:\n        optimizer.step()", "does not follow this block"),
    "a step alone": ("for x", "optimizer.step()\nfor x", "without a block of amp.scale_loss"),
    "a closure": ("optimizer.step()", "optimizer.step(closure)", "does not follow this block"),
    "masters looked at": ("    optimizer.zero_grad()", "    norms(amp.master_params(optimizer))", "something else than clipping"),
    "half state dicts": ('"O1")', '"O2")\nsave(model.state_dict())', "Apex's state dicts are fp32"),
    "another model later": ("for x", "model = Other(model)\nfor x", "becomes something else"),
    "amp handed on": ("for x", "run(amp.scale_loss)\nfor x", "amp.scale_loss is not called here"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_APEX)
def test_a_loop_of_apex_keeps_its_form(case: str) -> None:
    old, new, reason = NOT_APEX[case]
    assert old in APEX
    assert "castwise.Amp(" in rewrite(APEX)[0]
    after, findings = rewrite(APEX.replace(old, new, 1))
    assert after == APEX.replace(old, new, 1).replace("from apex", "from castwise.compat.apex")
    (left,) = [finding.text for finding in findings if finding.kind == "left"]
    assert left.startswith("not made a castwise.Amp, but run by castwise.compat.apex: ")
    assert reason in left


COLOSSAL = """\
from colossalai.amp import AMP_TYPE, convert_to_amp

model, optimizer, criterion = convert_to_amp(model, optimizer, criterion, AMP_TYPE.TORCH)
for x, y in loader:
    optimizer.zero_grad()
    optimizer.backward(criterion(model(x), y))
    optimizer.clip_grad_norm(model, 1.0)
    optimizer.step()
"""

NOT_COLOSSAL = {
    "a mode known later": ("AMP_TYPE.TORCH", "config.mode", "known only when it runs"),
    "Apex's": ("AMP_TYPE.TORCH", "AMP_TYPE.APEX", "the mode is APEX"),
    "options": ("AMP_TYPE.TORCH", "AMP_TYPE.TORCH, dict(init_scale=2)", "amp_config=dict(init_scale=2) has no preset"),
    "wrapped": ("model, optimizer, ", "model = DDP(model)\nmodel, optimizer, ", "'model' is wrapped"),
    "handed on": ("    optimizer.step()", "    optimizer.step()\n    log(optimizer)", "'optimizer' is handed on here"),
    "a result": ("    optimizer.backward", "    done = optimizer.backward", "the result of optimizer.backward() is used"),
    "clipped early": ("    optimizer.step()", "    log()\n    optimizer.step()", "not right before the step"),
    "no loop": ("    optimizer.backward", "    other.backward", "are not in this script"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_COLOSSAL)
def test_a_loop_of_colossalai_keeps_its_form(case: str) -> None:
    old, new, reason = NOT_COLOSSAL[case]
    assert old in COLOSSAL
    assert "castwise.Amp(" in rewrite(COLOSSAL)[0]
    after, findings = rewrite(COLOSSAL.replace(old, new, 1))
    assert after == COLOSSAL.replace(old, new, 1).replace(
        "from colossalai", "from castwise.compat.colossalai"
    )
    (left,) = [finding.text for finding in findings if finding.kind == "left"]
    assert left.startswith("not made a castwise.Amp, but run by castwise.compat.colossalai: ")
    assert reason in left


def test_a_script_with_castwise_as_a_name_of_its_own_is_left() -> None:
    text = "castwise = 1\nfrom apex import amp\n"
    after, findings = rewrite(text)
    assert after == text
    assert findings[0].kind == "left"
