"""Finding workloads by name or path, and the error message for each mistake."""

from __future__ import annotations

import math
import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from castwise import Workload
from castwise.errors import CastwiseError, NonFiniteError, WorkloadError
from castwise.lab.workloads.workload import BUILT_IN, Pipeline, check_loss, find_workload, non_finite_parts
from tests.fresh import run_python

FILE = """
import torch
from torch import nn
from castwise import Workload
from helper_beside import WIDTH


def _batches(seed):
    while True:
        yield torch.ones(2, WIDTH)


def _loss(model, batch):
    return model(batch).sum()


def make():
    return Workload("made", lambda: nn.Linear(WIDTH, 1), lambda p: torch.optim.SGD(p, lr=0.1), _batches, _loss)


ready = make()
number = 3
net = nn.Linear(1, 1)


def needs_more(size):
    return ready


def gives_number():
    return 4


def breaks():
    raise KeyError("weights")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder with a workload and a helper module; afterwards, remove their modules from ``sys.modules``."""
    (tmp_path / "mine_for_test.py").write_text(FILE)
    (tmp_path / "helper_beside.py").write_text("WIDTH = 5\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(
            getattr(sys.modules[name], "__file__", "") or getattr(sys.modules[name], "__path__", "")
        ):
            del sys.modules[name]


def _refused(spec: str) -> str:
    with pytest.raises(WorkloadError) as caught:
        find_workload(spec)
    text = str(caught.value)
    assert "\n" not in text
    return text


# --- specs that are found -----------------------------------------------------------------------------------


def test_every_built_in_is_found_and_makes_its_parts() -> None:
    for name in BUILT_IN:
        workload = find_workload(name)
        assert workload.name == name
        assert workload.description
        assert isinstance(workload.model(), nn.Module)
        assert pickle.loads(pickle.dumps(workload)).description == workload.description


def test_options_reach_the_built_in() -> None:
    model = find_workload("gpt?layers=1&width=48&heads=3&context=16&batch=2").model()
    assert len(model.blocks) == 1
    assert model.embedding.embedding_dim == 48
    assert model.blocks[0].attention.heads == 3
    assert find_workload("sine?size=32&hidden=8").batches(0).__next__()[0].shape == (1, 2, 32, 32)
    assert type(find_workload("digits?model=vit").model()).__name__ == "DigitsViT"


@pytest.mark.parametrize("attribute", ["ready", "make"])
def test_a_file_is_found_with_what_lies_beside_it(folder: Path, attribute: str) -> None:
    workload = find_workload(f"{folder}/mine_for_test.py:{attribute}")
    assert workload.name == "made"
    assert next(workload.batches(0)).shape == (2, 5)


def test_a_file_relative_to_the_current_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    first = find_workload("mine_for_test.py:ready")
    assert first is find_workload("./mine_for_test.py:ready")
    assert first is find_workload("mine_for_test:ready")


def test_a_module_is_found_from_the_current_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "package_for_test").mkdir()
    (folder / "package_for_test" / "jobs.py").write_text("from mine_for_test import ready as job\n")
    monkeypatch.chdir(folder)
    assert find_workload("package_for_test.jobs:job").name == "made"


def test_a_file_may_share_its_name_with_a_loaded_module(folder: Path) -> None:
    (folder / "math.py").write_text(FILE)
    assert find_workload(f"{folder}/math.py:ready").name == "made"
    assert sys.modules["math"] is math


def test_two_files_of_one_name_stay_apart(folder: Path) -> None:
    other = folder / "other"
    other.mkdir()
    (other / "mine_for_test.py").write_text(FILE.replace('"made"', '"other"'))
    assert find_workload(f"{folder}/mine_for_test.py:ready").name == "made"
    assert find_workload(f"{other}/mine_for_test.py:ready").name == "other"
    assert find_workload(f"{folder}/mine_for_test.py:ready").name == "made"


def test_a_workload_of_a_file_can_be_sent_to_another_process(folder: Path) -> None:
    (folder / "plain_for_test.py").write_text(
        "import torch\nfrom torch import nn\nfrom castwise import Workload\n"
        "def model(): return nn.Linear(1, 1)\n"
        "def batches(seed): yield torch.ones(1)\n"
        "def optimizer(params): return torch.optim.SGD(params)\n"
        "def loss(model, batch): return model(batch).sum()\n"
        "job = Workload('sent', model, optimizer, batches, loss)\n"
    )
    data = pickle.dumps(find_workload(f"{folder}/plain_for_test.py:job"))
    code = f"import pickle, sys; sys.path[:] = {sys.path!r}; print(pickle.loads({data!r}).name)"
    assert run_python(code, folder) == "sent\n"


# --- specs that are not found -------------------------------------------------------------------------------


def test_unknown_names_get_close_ones_and_the_forms() -> None:
    text = _refused("sin")
    assert "'sin' not found (did you mean 'sine'?)" in text
    assert "sine, gpt, digits" in text
    assert "file.py:attribute" in text
    assert "did you mean" not in _refused("zzz")


@pytest.mark.parametrize("spec", ["", "   "])
def test_an_empty_name_says_what_is_expected(spec: str) -> None:
    assert "expected a name (sine, gpt, digits)" in _refused(spec)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("sine?sise=3", "no option 'sise' (did you mean 'size'?); allowed: size, hidden=256, layers=2, bins=4"),
        ("gpt?layers", "option 'layers' has no value; write gpt?layers="),
        ("gpt?layers=two", "option layers='two' is not a whole number"),
        ("gpt?lr=fast", "option lr='fast' is not a number"),
        ("digits?model=resnet", "option model='resnet'; allowed: conv, vit"),
        ("gpt?width=100&heads=3", "width=100 is not a multiple of heads=3"),
        ("sine?size=4", "needs size >= 16"),
        ("digits?batch=5000", "batch <= 1437"),
        ("gpt?lr=0", "must be positive"),
        ("gpt?context=100000", "at most 4096"),
    ],
)  # fmt: skip
def test_bad_options_name_the_option_and_what_is_allowed(spec: str, words: str) -> None:
    assert words in _refused(spec)


def test_a_missing_file_names_close_ones(folder: Path) -> None:
    assert f"{folder}/mine_for_tests.py (did you mean 'mine_for_test.py'?)" in _refused(
        f"{folder}/mine_for_tests.py:ready"
    )
    assert "no such file: nowhere/x.py; give the path from the current folder" in _refused("nowhere/x.py:y")
    assert "is a folder, not a file" in _refused(f"{folder}/:ready")


def test_a_file_without_attribute_says_how_to_name_one(folder: Path) -> None:
    path = folder / "one_for_test.py"
    path.write_text("from castwise import Workload\njob = Workload('x', len, len, len, len)\n")
    assert f"{path}:attribute, such as {path}:job" in _refused(str(path))


def test_an_attribute_that_is_missing_names_those_there_are(folder: Path) -> None:
    text = _refused(f"{folder}/mine_for_test.py:redy")
    assert "no attribute 'redy' (did you mean 'ready'?); its workloads are ready" in text
    (folder / "functions_for_test.py").write_text("def build(): pass\n")
    assert "its functions are build" in _refused(f"{folder}/functions_for_test.py:job")
    (folder / "empty_for_test.py").write_text("")
    assert "it holds no workload and no function" in _refused(f"{folder}/empty_for_test.py:job")


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        ("number", "number is int, expected a castwise.Workload or a function that returns one"),
        ("net", "net is Linear, expected"),
        ("gives_number", "gives_number is a function that returned int, expected"),
        ("needs_more", "needs_more() failed with TypeError: needs_more() missing 1 required"),
        ("breaks", "breaks() failed with KeyError: 'weights'"),
    ],
)  # fmt: skip
def test_the_wrong_kind_of_attribute(folder: Path, attribute: str, words: str) -> None:
    assert words in _refused(f"{folder}/mine_for_test.py:{attribute}")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("x = 1\ny = undefined_name\n", "broken_for_test.py, line 2: NameError: name 'undefined_name' is not"),
        ("x = (\n", "broken_for_test.py, line 1: SyntaxError: '(' was never closed"),
        ("\n\nimport no_such_module_here\n", "broken_for_test.py, line 3: ModuleNotFoundError: No module named"),
        ("import json\n\njson.loads('{')\n", "broken_for_test.py, line 3: JSONDecodeError: Expecting property"),
        ("raise SystemExit(3)\n", "broken_for_test.py, line 1: SystemExit: 3"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_import_names_line_and_error(folder: Path, code: str, words: str) -> None:
    path = folder / "broken_for_test.py"
    path.write_text(code)
    text = _refused(f"{path}:job")
    assert "does not import" in text
    assert words in text
    path.write_text(FILE)  # after the file is fixed, it imports
    assert find_workload(f"{path}:ready").name == "made"


def test_modules_that_are_not_there_or_break(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert "there is no module 'no_such_package'" in _refused("no_such_package.jobs:job")
    (folder / "broken_for_test.py").write_text("import no_such_module_here\n")
    text = _refused("broken_for_test:job")
    assert "does not import: broken_for_test.py, line 1: ModuleNotFoundError" in text


# --- checks of the workload object --------------------------------------------------------------------------


def _workload() -> Workload:
    def batches(seed: int) -> Iterator[torch.Tensor]:
        while True:
            yield torch.ones(2, 3)

    return Workload(
        "tiny",
        lambda: nn.Linear(3, 1),
        lambda p: torch.optim.SGD(p, lr=0.1),
        batches,
        lambda m, b: m(b).mean(),
    )


@pytest.mark.parametrize(
    "field", ["model", "optimizer", "batches", "loss", "evaluate", "picture", "shards", "blocks"]
)
def test_fields_must_be_functions(field: str) -> None:
    with pytest.raises(WorkloadError, match=rf"Workload\('tiny'\): {field} must be a function.*, got int"):
        replace(_workload(), **{field: 3})


def test_a_pipeline_is_one_and_made_of_functions() -> None:
    pipeline = Pipeline(lambda m, _: [m], lambda b: (b,), lambda b: b, nn.functional.mse_loss)
    assert replace(_workload(), pipeline=pipeline).pipeline is pipeline
    with pytest.raises(
        WorkloadError, match=r"pipeline must be a castwise.lab.workloads.workload.Pipeline, got function"
    ):
        replace(_workload(), pipeline=lambda m: [m])
    for field in ("split", "inputs", "target", "loss"):
        with pytest.raises(WorkloadError, match=f"Pipeline: {field} must be a function, got NoneType"):
            replace(pipeline, **{field: None})


def test_a_model_must_be_made_and_a_name_given() -> None:
    with pytest.raises(WorkloadError, match=r"must be a function that makes the model, got a Linear"):
        replace(_workload(), model=nn.Linear(1, 1))
    with pytest.raises(WorkloadError, match="needs a name"):
        replace(_workload(), name="")
    assert issubclass(WorkloadError, ValueError)
    assert issubclass(WorkloadError, CastwiseError)


def test_a_good_loss_passes_through() -> None:
    loss = torch.tensor(2.0, requires_grad=True)
    assert check_loss(loss, _workload(), step=1) is loss
    with torch.no_grad():
        check_loss(torch.tensor(1.0), _workload(), step=1)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (1.5, "returned float; it must return a floating tensor with one element"),
        (None, "returned NoneType"),
        (torch.ones(4, 2, requires_grad=True), r"a tensor of shape \[4, 2\] and float32; .* Reduce it with \.mean\(\)"),
        (torch.tensor(3), r"a tensor of shape \[\] and int64; it must return a floating tensor with one element$"),
        (torch.tensor(3.0), "without a graph"),
    ],
)  # fmt: skip
def test_a_bad_loss_is_refused_with_what_it_is(loss: object, words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        check_loss(loss, _workload())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_names_the_data(value: float) -> None:
    loss = torch.tensor(value, requires_grad=True)
    data = torch.ones(3, 2)
    with pytest.raises(NonFiniteError, match=rf"the loss of step 4 is {value}: its data is finite"):
        check_loss(loss, _workload(), (data,), step=4)
    data[1, 0] = math.nan
    with pytest.raises(NonFiniteError, match=r"NaN or infinite values, in batch\[0\] \(1 of 6 values\)"):
        check_loss(loss, _workload(), (data,), step=4)
    assert check_loss(loss, _workload(), (data,)) is loss


def test_values_that_are_not_finite_are_found_in_any_container() -> None:
    bad = torch.tensor([1.0, math.inf, math.nan])
    batch = {"x": [torch.ones(2), (bad,)], "ids": torch.tensor([1, 2]), "name": "a"}
    assert non_finite_parts(batch) == ["batch['x'][1][0] (2 of 3 values)"]
    assert non_finite_parts(bad.to(torch.bfloat16)) == ["batch (2 of 3 values)"]
    assert non_finite_parts(None) == []


def test_built_in_workloads_are_imported_when_they_are_asked_for(tmp_path: Path) -> None:
    code = "import sys, castwise.lab.workloads.workload; print([m for m in sys.modules if m.startswith('castwise.lab.workloads')])"
    assert run_python(code, tmp_path) == "['castwise.lab.workloads', 'castwise.lab.workloads.workload']\n"
