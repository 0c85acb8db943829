"""Scripts for Apex and Colossal-AI: imports are changed to the drop-in if it has the name, and listed otherwise."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from types import ModuleType

import pytest

from castwise.bridges.compat import apex, colossalai
from castwise.bridges.compat.coverage import covered
from castwise.bridges.scripts.migrate.program import Stay
from castwise.bridges.scripts.migrate.rewriting import rewrite
from castwise.bridges.scripts.migrate.served import home, is_module, lacks
from tests.soak import each_value

LIBRARIES = {"apex": apex, "colossalai": colossalai}
NAMES = [
    row
    for library in LIBRARIES
    for row in covered(library)
    if row.name.startswith(f"{library}.")
    and "_state." not in row.name
    and row.name.replace(".", "").replace("_", "").isalnum()
]
"""Names in the coverage lists that a script can import, without rows for arguments and values."""


def run(text: str) -> dict[str, object]:
    space: dict[str, object] = {}
    exec(compile(text, "script", "exec"), space)
    return space


def texts(script: str, kind: str) -> list[str]:
    return [finding.text for finding in rewrite(script)[1] if finding.kind == kind]


REWRITTEN = {
    "from apex import amp": "from castwise.compat.apex import amp",
    "from apex import amp as a, parallel": "from castwise.compat.apex import amp as a, parallel",
    "import apex": "from castwise.compat import apex",
    "import apex as nv": "import castwise.compat.apex as nv",
    "import apex.amp as amp": "import castwise.compat.apex.amp as amp",
    "import apex.amp": "import castwise.compat.apex.amp\nfrom castwise.compat import apex",
    "import os, apex, sys": "import os, sys\nfrom castwise.compat import apex",
    "import os; import apex.amp; x = 1": "import os; import castwise.compat.apex.amp; from castwise.compat import apex; x = 1",
    "if 1: import apex, os": "if 1: import os; from castwise.compat import apex",
    "from apex.fp16_utils import *": "from castwise.compat.apex.fp16_utils import *",
    "from apex.amp._amp_state import _amp_state": "from castwise.compat.apex.amp._amp_state import _amp_state",
    "from apex.optimizers.fused_adam import FusedAdam": "from castwise.compat.apex.optimizers.fused_adam import FusedAdam",
    "from apex.contrib.optimizers.fp16 import amp": "from apex.contrib.optimizers.fp16 import amp",
    "from apex.optimizers import (FusedAdam,  # fast\n    FP16_Optimizer)": (
        "from castwise.compat.apex.optimizers import (FusedAdam,  # fast\n    )\nfrom apex.optimizers import (FP16_Optimizer)"
    ),
    "from apex import amp, RNN  # both": "from castwise.compat.apex import amp  # both\nfrom apex import RNN",
    "import apex, colossalai": "from castwise.compat import apex\nfrom castwise.compat import colossalai",
    "from colossalai.amp.amp_type import AMP_TYPE": "from castwise.compat.colossalai.amp.amp_type import AMP_TYPE",
    "from colossalai.utils.timer import MultiTimer": "from castwise.compat.colossalai.utils.timer import MultiTimer",
    "from colossalai.legacy.amp import AMP_TYPE": "from castwise.compat.colossalai.amp import AMP_TYPE",
    "import colossalai.legacy as cl\ncl.amp.AMP_TYPE": "import castwise.compat.colossalai as cl\ncl.amp.AMP_TYPE",
    "import colossalai.legacy\ncolossalai.legacy.amp.AMP_TYPE": "from castwise.compat import colossalai\ncolossalai.amp.AMP_TYPE",
    "import colossalai as c\nc.legacy.amp.AMP_TYPE": "import castwise.compat.colossalai as c\nc.amp.AMP_TYPE",
    "from colossalai.initialize import launch": "from castwise.compat.colossalai.initialize import launch",
}  # fmt: skip


@pytest.mark.parametrize("before", REWRITTEN)
def test_an_import_becomes_that_of_the_drop_in(before: str) -> None:
    """The rewritten import runs, unless it still names the library."""
    after, findings = rewrite(before + "\n")
    assert after == REWRITTEN[before] + "\n"
    assert [finding.kind for finding in findings].count("kept") == len({
        library for library in LIBRARIES if f"castwise.compat.{library}" in str(findings)
    })
    run("\n".join(line for line in after.splitlines() if not line.startswith("from apex")))
    assert rewrite(after)[0] == after


@each_value()
@pytest.mark.parametrize("form", ["from {0} import {1}", "import {0}\n{0}.{1}"])
@pytest.mark.parametrize("row", NAMES, ids=lambda row: row.name)
def test_every_name_of_the_lists_is_imported_or_noted(row: object, form: str) -> None:
    name, status, note = row.name, row.status, row.note  # type: ignore[attr-defined]
    module, _, last = name.rpartition(".")
    script = form.format(module, last)
    after, findings = rewrite(script)
    left = [finding.text for finding in findings if finding.kind == "left"]
    if status == "absent":
        assert any(note.replace("`", "") in text for text in left)
        if form.startswith("from"):
            assert len(left) == 1
            assert after == script
    else:
        run(after)
        assert [finding.kind for finding in findings].count("kept") == 1
        assert status != "differs" or any(note.replace("`", "") in finding.text for finding in findings)


def modules(of: ModuleType) -> list[str]:
    inside = pkgutil.walk_packages(of.__path__, f"{of.__name__}.")
    return [of.__name__, *(module.name for module in inside)]


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_is_read_from_the_source_is_what_runs(library: str) -> None:
    for full in modules(LIBRARIES[library]):
        module = importlib.import_module(full)
        name = full.removeprefix("castwise.bridges.compat.")
        assert is_module(name)
        for public in getattr(module, "__all__", ()):
            assert home(name, public) == name
            assert not lacks(f"{name}.{public}")
        assert home(name, "no_such_name") == ""
        held = vars(importlib.import_module(full.rpartition(".")[0])).get(full.rpartition(".")[2])
        if inspect.ismodule(held):  # not a function of the same name
            assert lacks(f"{name}.no_such_name") == f"{name}.no_such_name"


FALLBACKS = """\
try:
    import apex
    from apex import amp
    from apex.optimizers import FP16_Optimizer
    has_apex = True
except ImportError:
    amp = FP16_Optimizer = None
    has_apex = False
if amp is not None:
    initialize = amp.initialize
"""


def test_an_import_with_a_fallback() -> None:
    after, findings = rewrite(FALLBACKS)
    space = run(after)
    assert space["has_apex"] is False  # FP16_Optimizer exists only in Apex
    assert [f"{finding.line} {finding.kind}" for finding in findings] == ["2 kept", "4 left"]
    alone = run(rewrite(FALLBACKS.replace("    from apex.optimizers import FP16_Optimizer\n", ""))[0])
    assert alone["has_apex"] is True
    assert "initialize" in alone


def test_a_name_that_is_missing_is_said_once_where_it_is_first_named() -> None:
    script = "import apex\nx = apex.contrib.a\ny = apex.contrib.b\nfrom apex.contrib import c\n"
    left = [finding for finding in rewrite(script)[1] if finding.kind == "left"]
    assert [finding.line for finding in left] == [2]
    assert left[0].text.startswith("castwise.compat has no apex.contrib: torch has most of it")


@pytest.mark.parametrize(
    ("script", "kind", "text"),
    [
        ("import amp_C", "left", "amp_C is Apex's compiled code"),
        ("from importlib import import_module\nimport_module('apex.amp')", "left", "apex.amp is named in a string"),
        ("import importlib.util\nimportlib.util.find_spec('apex')", "left", "apex is named in a string"),
        ("from apex import amp\namp.initialize(m, verbosity=0)", "differs", "apex.amp.initialize(verbosity): 2 prints"),
        ("import colossalai as c\nc.initialize(m, ophooks=[])", "left", "colossalai.initialize(ophooks): use torch's module hooks"),
        ("from apex import amp\namp._amp_state.loss_scalers", "kept", "castwise.compat.apex runs this script as it is"),
        ("from apex.fp16_utils.loss_scaler import LossScaler", "left", "no apex.fp16_utils.loss_scaler: O2 of amp.initialize"),
        ("from apex.optimizers.fused_sgd import FusedSGD", "differs", "fused_sgd.FusedSGD: is torch.optim.SGD"),
        ("from apex.optimizers import fused_sgd as f\nf.FusedSGD(p, wd_after_momentum=True)", "differs", "is torch.optim.SGD"),
        ("from apex.fp16_utils import *\nFP16_Optimizer(o)", "left", "apex.fp16_utils.FP16_Optimizer: O2 of amp.initialize"),
    ],
)  # fmt: skip
def test_what_is_said(script: str, kind: str, text: str) -> None:
    assert any(text in said for said in texts(script + "\n", kind))


def test_what_is_not_the_library_is_left_alone() -> None:
    script = (
        "from .apex import amp\nfrom my.apex import amp\nimport my.apex\nself.apex.amp\napex = 1\nf(apex=1)\n"
    )
    assert rewrite(script) == (script, [])


def test_a_part_of_the_program_itself_stays() -> None:
    script = "from apex import amp\n"
    after, findings = rewrite(script, stays={"apex": Stay("own")})
    assert after == script
    assert "part of this program" in findings[0].text


@pytest.mark.parametrize(
    "script",
    [
        "import apex\napp = apex.Application()\n",
        "import apex as a\na.extras.run(a.forms.Form)\n",
        "from apex import *\napp = Application()\n",
        "import os, apex\napex.run(os.getcwd())\n",
    ],
)
def test_another_package_of_that_name_is_left_alone(script: str) -> None:
    after, findings = rewrite(script)
    assert after == script
    assert findings
    assert {finding.kind for finding in findings} == {"left"}


@each_value()
@pytest.mark.parametrize(
    "module",
    ["amp_C", "apex_C", "syncbn", "fused_adam_cuda", "fused_lamb_cuda", "distributed_adam_cuda", "xentropy_cuda",
     "fused_layer_norm_cuda", "scaled_upper_triang_masked_softmax_cuda"],
)  # fmt: skip
@pytest.mark.parametrize(
    "form", ["import os, {}", "from {} import f", "import importlib\nimportlib.import_module('{}')"]
)
def test_compiled_code_of_apex_is_noted(module: str, form: str) -> None:
    script = form.format(module) + "\n"
    after, (finding,) = rewrite(script)
    assert after == script
    assert (
        finding.text
        == f"{module} is Apex's compiled code, which castwise does not include: use torch's operators"
    )


HEAD = '"""A script."""\nfrom __future__ import annotations\n'
SERVED = "from apex import amp\nimport apex.parallel as parallel, amp_C\nfrom apex.contrib import xentropy\n"


def test_imports_of_a_library_that_others_import_too_stay() -> None:
    after, findings = rewrite(HEAD + SERVED, stays={"apex": Stay("install", "a library scales", starts=True)})
    assert after == f'{HEAD}import castwise.compat\ncastwise.compat.install("apex")\n{SERVED}'
    assert [f"{finding.line} {finding.kind}" for finding in findings] == ["3 kept", "4 left", "5 left"]
    assert findings[0].text.startswith("a library scales, so imports of apex stay")
    assert "castwise.compat has no apex.contrib" in findings[2].text


@pytest.mark.parametrize(
    ("stay", "text"),
    [
        (Stay("install", "a library scales"), "put castwise.compat.install('apex') before all other imports"),
        (Stay("installed"), "castwise.compat.install() serves apex"),
        (Stay("lacks", "apex.contrib"), "the program needs apex.contrib, which the drop-in lacks"),
    ],
)
def test_imports_stay_and_it_is_said_once(stay: Stay, text: str) -> None:
    after, findings = rewrite(SERVED, stays={"apex": stay})
    assert after == SERVED
    assert sum(text in finding.text for finding in findings) == 1


def test_nothing_else_than_imports_changes() -> None:
    """The drop-in runs the loops as written, so none is rewritten."""
    script = (
        "from apex import amp\nmodel, optimizer = amp.initialize(model, optimizer, opt_level='O1')\n"
        "with amp.scale_loss(loss, optimizer) as scaled_loss:\n    scaled_loss.backward()\noptimizer.step()\n"
    )
    after, _ = rewrite(script)
    assert after == script.replace("from apex", "from castwise.compat.apex")
    assert isinstance(ast.parse(after), ast.Module)
