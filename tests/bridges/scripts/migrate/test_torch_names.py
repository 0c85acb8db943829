"""Names of torch.amp: which are replaced by castwise's, and which uses need torch's own."""

from __future__ import annotations

import importlib
import inspect

import pytest

from castwise.bridges.scripts.migrate.rewriting import rewrite
from castwise.bridges.scripts.migrate.torch_names import SWAPS


@pytest.mark.parametrize("name", SWAPS)
def test_castwise_has_the_name_with_torchs_arguments(name: str) -> None:
    module, _, last = name.rpartition(".")
    torchs = getattr(importlib.import_module(module), last)
    ours = getattr(importlib.import_module(SWAPS[name]), last)
    want, got = (list(inspect.signature(each).parameters.values()) for each in (torchs, ours))
    by_place = [each for each in want if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert len(by_place) <= sum(each.kind is each.POSITIONAL_OR_KEYWORD for each in got)
    for torch_s, our in zip(by_place, got, strict=False):
        assert torch_s.name in (
            our.name,
            "device_type",
        )  # castwise takes a plan as well, and neither is required
        assert torch_s.default in (our.default, inspect.Parameter.empty)
    assert {each.name for each in want} <= {each.name for each in got}


ALL = ["autocast", "GradScaler", "custom_fwd", "custom_bwd"]


def test_every_name_of_torch_is_known() -> None:
    for home in ("torch", "torch.amp", "torch.cuda.amp", "torch.cpu.amp"):
        module = importlib.import_module(home)
        assert [name for name in ALL if hasattr(module, name)] == [
            name for name in ALL if f"{home}.{name}" in SWAPS
        ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from torch.amp import autocast\nautocast('cpu')", "from castwise import autocast\nautocast('cpu')"),
        ("from torch.cuda.amp import autocast as ac\nac(True)", "from castwise.compat.torch_amp.cuda import autocast as ac\nac(True)"),
        ("from torch import nn, autocast\nautocast('cpu')", "from torch import nn\nfrom castwise import autocast\nautocast('cpu')"),
        ("if x: from torch import nn, autocast\nautocast('cpu')", "if x: from torch import nn; from castwise import autocast\nautocast('cpu')"),
        ("import torch\nwith torch.autocast('cpu'): pass", "import torch\nimport castwise\nwith castwise.autocast('cpu'): pass"),
        ("from torch.cuda import amp\ns = amp.GradScaler()", "from torch.cuda import amp\nimport castwise.compat.torch_amp.cuda\ns = castwise.compat.torch_amp.cuda.GradScaler()"),
        ("def f():\n    import torch\n    return torch.GradScaler()", "def f():\n    import torch\n    import castwise\n    return castwise.GradScaler()"),
        ("import torch\ns: torch.GradScaler = torch.GradScaler()", "import torch\nimport castwise\ns: torch.GradScaler = castwise.GradScaler()"),
        ("try:\n    from torch.amp import autocast\nexcept ImportError:\n    autocast = None\nautocast('cpu')", "try:\n    from castwise import autocast\nexcept ImportError:\n    autocast = None\nautocast('cpu')"),
        ("try: import torch\nexcept ImportError: raise\ns = torch.GradScaler()", "try: import torch\nexcept ImportError: raise\nimport castwise\ns = castwise.GradScaler()"),
        ("import torch; s = torch.GradScaler()", "import torch; import castwise; s = castwise.GradScaler()"),
        ("if x: import torch; s = torch.GradScaler()", "if x: import torch; import castwise; s = castwise.GradScaler()"),
        ("def f(): import torch; return torch.autocast('cpu')", "def f(): import torch; import castwise; return castwise.autocast('cpu')"),
        ("from torch import amp, autocast; autocast('cpu'), amp.autocast('cpu')", "from torch import amp; from castwise import autocast; import castwise; autocast('cpu'), castwise.autocast('cpu')"),
        ("import torch\nS = torch.GradScaler if x else None\ns = S() if S is not None else 1", "import torch\nimport castwise\nS = castwise.GradScaler if x else None\ns = S() if S is not None else 1"),
        ("import torch\nfor S in [torch.GradScaler]: S()", "import torch\nimport castwise\nfor S in [castwise.GradScaler]: S()"),
        ("import torch\ndef f(kind=torch.GradScaler): kind()", "import torch\nimport castwise\ndef f(kind=castwise.GradScaler): kind()"),
        ("import torch\nac = partial(torch.autocast, 'cpu')\nwith ac(): pass", "import torch\nimport castwise\nac = partial(castwise.autocast, 'cpu')\nwith ac(): pass"),
        ("from torch.amp import custom_fwd, custom_bwd\n@custom_fwd\ndef f(c): pass\n@custom_bwd\ndef b(c): pass", "from castwise import custom_fwd, custom_bwd\n@custom_fwd\ndef f(c): pass\n@custom_bwd\ndef b(c): pass"),
    ],
)  # fmt: skip
def test_a_name_changes(before: str, after: str) -> None:
    got, (finding,) = rewrite(f"{before}\n")
    assert got == f"{after}\n"
    assert finding.kind == "kept"
    assert ("raises LossScaleError" in finding.text) is ("GradScaler" in before)
    assert rewrite(got) == (got, [])


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("from torch.amp import GradScaler\nclass A(GradScaler): pass\nGradScaler()", "a class that derives from it"),
        ("from torch.amp import GradScaler\nGradScaler()\nisinstance(x, (A, GradScaler))", "objects of torch's class"),
        ("from torch.amp import GradScaler\nGradScaler.step(s, o)", "an attribute of the class"),
        ("import torch\ntorch.GradScaler()\nx in (torch.GradScaler, A)", "compared"),
        ("import torch\ntorch.GradScaler()\nd = {torch.GradScaler: 1}", "compared"),
        ("import torch\nmatch torch.GradScaler():\n    case torch.GradScaler(): pass", "compared"),
        ("import torch\ntorch.amp.autocast = f", "the script replaces it"),
        ("try:\n    import torch\nexcept ImportError:\n    torch = None\ntorch.GradScaler()", "another meaning"),
        ("import torch\nS = torch.GradScaler\nclass A(S): pass\nS()", "a class that derives from it"),
        ("import torch\nclass T: kind = torch.GradScaler\nisinstance(x, T.kind)", "objects of torch's class"),
        ("import torch\nkinds = (int, torch.GradScaler)\nisinstance(x, kinds)", "objects of torch's class"),
        ("import torch\nif (S := torch.GradScaler) and type(x) == S: pass", "compared"),
        ("import torch\nS = torch.GradScaler\nR = S\nR.step(x, o)", "an attribute of the class"),
        ("import torch\nfor S in (A, torch.GradScaler): isinstance(x, S)", "objects of torch's class"),
        ("import torch\nany(isinstance(x, S) for S in [torch.GradScaler])", "objects of torch's class"),
        ("import torch\ndef f(kind=torch.GradScaler):\n    class A(kind): pass", "a class that derives from it"),
        ("import torch\nA = type('A', (torch.GradScaler,), {})\ntorch.GradScaler()", "other code receives"),
        ("from torch.amp import GradScaler\nA = derived(GradScaler)\nGradScaler()", "other code receives"),
        ("import torch\ndef f(castwise): return torch.autocast('cpu')", "used for something else"),
        ("import torch\ndef f():\n    castwise = 1\n    return torch.autocast('cpu')", "used for something else"),
        ("import torch, numpy as castwise\ntorch.autocast('cpu')", "used for something else"),
        ("from torch.amp import custom_fwd\n@custom_fwd\ndef f(c): pass", "change together"),
        ("from torch.amp import custom_bwd as b, custom_fwd\n@custom_fwd\ndef f(c): pass\nisinstance(b, b)", "change together"),
    ],
)  # fmt: skip
def test_a_name_stays(script: str, why: str) -> None:
    after, findings = rewrite(f"{script}\n")
    assert after == f"{script}\n"
    assert {finding.kind for finding in findings} == {"left"}
    assert any(why in finding.text for finding in findings)


@pytest.mark.parametrize(
    "script",
    [
        "from torch.amp import GradScaler\ndef f(scaler: GradScaler): pass",
        "import torch\nif torch.is_autocast_enabled('cpu'): torch.get_autocast_dtype('cpu')",
        "from torch.cuda.amp import *\nautocast()",
        "def f(torch): return torch.autocast('cpu')",
        "import castwise, torch\nwith torch.autocast('cpu'): pass",
        "from castwise import autocast\nfrom torch.amp import GradScaler\nGradScaler()",
        "castwise_amp = 'torch.cuda.amp.autocast'",
    ],
)
def test_nothing_is_said_of_what_has_nothing_to_change(script: str) -> None:
    assert rewrite(f"{script}\n") == (f"{script}\n", [])


def test_an_isinstance_keeps_torchs_class_and_the_call_does_not() -> None:
    script = (
        "import torch\ns = torch.cuda.amp.GradScaler()\nassert isinstance(s, torch.cuda.amp.GradScaler)\n"
    )
    after, findings = rewrite(script)
    assert "s = castwise.compat.torch_amp.cuda.GradScaler()" in after
    assert "isinstance(s, torch.cuda.amp.GradScaler)" in after
    assert [finding.kind for finding in findings] == ["kept", "left"]


def test_a_script_with_castwise_as_a_name_of_its_own_is_left() -> None:
    text = "castwise = 1\nfrom apex import amp\n"
    after, findings = rewrite(text)
    assert after == text
    assert findings[0].kind == "left"
