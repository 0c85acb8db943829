"""Programs of several scripts: which scripts belong together, and which libraries other code imports too."""

from __future__ import annotations

from pathlib import Path

import pytest

from castwise.bridges.scripts.migrate.program import Imported, Script, loaded, look, staying

SCRIPT = b"""\
import apex.parallel as parallel, os.path
from apex import amp as a
from .engine import fit, Trainer
try:
    from apex.optimizers import *
except ImportError:
    import torch
a.initialize(model, optimizer)
a.initialize(model)
parallel.convert(model)
self.amp.scale_loss(loss)
importlib.import_module("apex.RNN")
castwise.compat.install("apex")
import castwise.compat
"""


def test_what_a_script_names() -> None:
    script = look(SCRIPT)
    assert script.imports == (
        Imported("apex.parallel", 0, (), False),
        Imported("os.path", 0, (), False),
        Imported("apex", 0, ("amp",), False),
        Imported("engine", 1, ("fit", "Trainer"), False),
        Imported("castwise.compat", 0, (), False),
        Imported("apex.optimizers", 0, ("*",), True),
        Imported("torch", 0, (), False),
    )
    assert {"apex.amp.initialize", "apex.amp.initialize()", "apex.parallel.convert"} <= script.reached
    assert "apex.parallel.convert()" not in script.reached
    assert {"scale_loss", "model", "amp", "fit"} <= script.words
    assert script.asked == {"apex.RNN"}
    assert script.installed == {"apex"}
    assert look(b"print 'Python 2'\n") == Script()
    assert look(b"import castwise.compat\ncastwise.compat.install()\n").installed == {"apex", "colossalai"}


FILES = {
    Path("p") / name
    for name in ("train.py", "tools/__init__.py", "tools/a.py", "tools/b/__init__.py", "a.py")
}


@pytest.mark.parametrize(
    ("importer", "each", "want"),
    [
        ("train.py", Imported("tools.a", 0, ("f",), False), {"tools/a.py"}),
        (
            "train.py",
            Imported("tools", 0, ("a", "b"), False),
            {"tools/__init__.py", "tools/a.py", "tools/b/__init__.py"},
        ),
        ("train.py", Imported("torch", 0, (), False), set()),
        ("tools/a.py", Imported("a", 0, (), False), {"a.py"}),  # a script does not import itself
        ("tools/b/__init__.py", Imported("", 2, ("a",), False), {"tools/__init__.py", "tools/a.py"}),
        (
            "tools/b/__init__.py",
            Imported("a", 0, (), False),
            {"tools/a.py"},
        ),  # the script may be run from its folder
        ("train.py", Imported("x", 9, (), False), set()),
    ],
)
def test_what_an_import_loads(importer: str, each: Imported, want: set[str]) -> None:
    found = loaded(Path("p") / importer, each, Path("p"), FILES.__contains__)
    assert {file.relative_to("p").as_posix() for file in found} == want


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("from apex import amp\namp.initialize(m, o)", "a library scales the loss"),
        ("from apex import amp\namp.initialize(m, optimizers=o)", "a library scales the loss"),
        ("from apex.amp import initialize\ninitialize(*both)", "a library scales the loss"),
        ("from apex import amp\namp.initialize(m, opt_level='O2')", ""),  # inference only
        ("from apex import amp\namp.initialize(m, o)\nself.amp.scale_loss(l)", ""),
        ("from apex import amp\nfrom timm.utils import ApexScaler\namp.initialize(m, o)\namp.scale_loss(l)", "a library scales"),
        ("from apex.amp import scale_loss\nscale_loss(l, o)", "a library initializes amp"),
        ("from apex import amp\namp.init()\namp.scale_loss(l, o)", ""),
        ("class Mine:\n    def scale_loss(self): pass\nMine().scale_loss()", ""),
        ("import importlib\nimportlib.import_module('apex.amp')", "looks up apex by a string"),
        ("from importlib.util import find_spec\nfind_spec('apex')", ""),
        ("from importlib.util import find_spec\nfind_spec('apex')\nimport apex\napex.amp.init()", "looks up apex by a string"),
        ("from importlib import import_module\nimport_module('apex.agents.x')", ""),
        ("from transformers.utils import is_apex_available\nfrom apex import amp\nif is_apex_available(): amp.init()", "looks up apex"),
        ("import sys\nfrom apex import amp\nif 'apex' in sys.modules: amp.init()", "looks up apex"),
        ("import sys\nfrom apex import amp\nsys.modules.get('apex.amp')", "looks up apex"),
        ("import sys\nfrom apex import amp\nif 'apex' in sys.argv: amp.init()", ""),
        ("import pytest\npytest.importorskip('apex')\nfrom apex import amp\namp.init()", "looks up apex"),
        ("from apex import amp\namp = lazy('apex.amp')", "looks up apex"),
        ("import apex\nmock.patch('apex.amp.master_params')", "looks up apex"),
        ("import apex\napex.amp.init()\nexec('x = 1\\n  from apex import amp as a')", "looks up apex"),
        ("import apex\napex.amp.init()\nsubprocess.run(['-c', 'import apex; x()'])", "looks up apex"),
        ("import apex\napex.amp.init()\nprint('import apex failed')\nx = 'apex'\nrun('apex')", ""),
        ("\"\"\"As with\n    from apex import amp\n\"\"\"\nfrom apex import amp\namp.init()", ""),
        ("from apex import amp\namp.init()\nx: 'apex.amp' = 1\ndef f(a: list['apex.amp']) -> 'apex.amp': pass", ""),
        ("from apex.optimizers import FusedAdam\nTrainer(amp_backend='apex')", "looks up apex"),
        ("from apex.optimizers import FusedAdam\nTrainer(amp_backend='native')\nx = 'apex'", ""),
        ("from apex import amp\namp.init()\nlog('apex.agents.x')", ""),
        ("def is_apex_available(): pass\nfrom apex import amp\nif is_apex_available(): amp.init()", ""),
    ],
)  # fmt: skip
def test_why_others_have_to_find_apex(source: str, why: str) -> None:
    stay = staying({Path("p/train.py"): look(source.encode())}, Path("p"))[Path("p/train.py")].get("apex")
    assert (stay is None) is (why == "")
    assert stay is None or why in stay.why


def test_one_script_of_a_program_serves_apex_to_all() -> None:
    sources = {
        "train.py": "import sys\nfrom apex import amp\nimport tools\nif 'apex' in sys.modules: amp.initialize(m, o)",
        "tools.py": "from apex import amp\namp.scale_loss(l, o)",
        "alone.py": "from apex import amp",
    }
    found = staying({Path(name): look(source.encode()) for name, source in sources.items()}, Path())
    kinds = {
        path.name: [(stay.kind, stay.starts) for stay in stays.values()] for path, stays in found.items()
    }
    assert kinds == {"train.py": [("install", True)], "tools.py": [("installed", False)], "alone.py": []}
