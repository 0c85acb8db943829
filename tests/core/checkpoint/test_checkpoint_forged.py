"""Forged or damaged checkpoints, and two processes in one folder: no code runs, nothing is mixed or half changed."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import pickle
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import castwise
from castwise.core import checkpoint
from castwise.core.checkpoint import storage
from castwise.core.checkpoint.folder import measure
from castwise.errors import CheckpointError
from tests.core.checkpoint.test_checkpoint import Run, names, same
from tests.here import DEVICE
from tests.processes import forks
from tests.soak import each_value, every, examples

DEEP = "[" * 100_000 + "]" * 100_000
LONG = "9" * 5_000


@pytest.fixture
def saved(tmp_path: Path) -> Run:
    """Return a run that has saved two checkpoints and then trained on."""
    run = Run("fp16-master")
    run.train(0, 1)
    run.save(tmp_path, 1)
    run.train(1, 1)
    run.save(tmp_path, 2, extra={"epoch": 3, "seen": torch.arange(3)})
    run.train(2, 1)
    return run


def everything(run: Run) -> dict[str, Any]:
    """Return everything that training continues from, and how it is stored."""
    state = run.state()
    state |= {f"stored.{key}": value.clone() for key, value in run.model.state_dict().items()}
    state["options"] = repr([
        {k: v for k, v in g.items() if k != "params"} for g in run.optimizer.param_groups
    ])
    return state


def refused(run: Run, path: Any) -> str:
    """Check that loading fails with a one-line error and changes nothing; return the error."""
    before = everything(run)
    with pytest.raises(CheckpointError) as error:
        run.load(path)
    same(everything(run), before)
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 3_000
    return text


def passed_over(folder: Path, run: Run) -> str:
    """Check that the second checkpoint is skipped and the first is chosen; return why the second fails to load."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = checkpoint.newest(folder)
    assert found.step == 1
    (warning,) = caught
    assert "skipped step-00000002" in str(warning.message)
    return refused(run, folder / "step-00000002")


def seal(path: Path) -> None:
    """Update the sizes and hashes in the manifest to the files as they are, as a forger would."""
    manifest = json.loads((path / "checkpoint.json").read_text())
    for name in manifest["files"]:
        if (path / name).is_file():
            manifest["files"][name] = measure(path / name)
    forge(path, manifest)


def forge(path: Path, manifest: dict[str, Any]) -> None:
    manifest.pop("sha256", None)
    text = json.dumps(manifest, sort_keys=True)
    manifest["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (path / "checkpoint.json").write_text(json.dumps(manifest))


def values_of(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((path / "values.json").read_text())
    return values


def with_values(path: Path, values: Any) -> None:
    (path / "values.json").write_text(json.dumps(values))
    seal(path)


# --- nothing is executed ------------------------------------------------------------------------------------


class Runs:
    """A pickle that runs a command through REDUCE."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


class Builds(Runs):
    """A pickle that runs a command through BUILD on a torch object."""

    def __reduce__(self) -> Any:
        return nn.Module, (), {"state": Runs(self.marker)}


def payloads(marker: Path) -> dict[str, bytes]:
    zipped = io.BytesIO()
    torch.save({"weight": torch.ones(2), "run": Runs(marker)}, zipped)
    return {
        "reduce": pickle.dumps(Runs(marker)),
        "build": pickle.dumps(Builds(marker)),
        "global": f"cos\nsystem\n(S'touch {marker}'\ntR.".encode(),
        "zip": zipped.getvalue(),
    }


@each_value()
@pytest.mark.parametrize("kind", ["reduce", "build", "global", "zip"])
@pytest.mark.parametrize(
    "name", ["checkpoint.json", "values.json", "rank-00000.safetensors", "tensor", ".metadata"]
)
def test_nothing_in_a_checkpoint_is_run(tmp_path: Path, saved: Run, name: str, kind: str) -> None:
    """No pickle is executed: not in castwise's files, not in entries of bytes, not in files beside them that torch
    could read.
    """
    marker, path = tmp_path / "marker", tmp_path / "step-00000002"
    data = payloads(marker)[kind]
    if name == "tensor":  # the pickle is stored as a tensor's bytes, so it loads as that tensor's numbers
        values = values_of(path)
        values["tensors"]["extra.seen"] = {
            "dtype": "uint8",
            "shape": [len(data)],
            "pieces": [["rank-00001.safetensors", 0, [0], [len(data)]]],
        }
        (path / "rank-00001.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + data)
        manifest = json.loads((path / "checkpoint.json").read_text())
        manifest["files"]["rank-00001.safetensors"] = {}
        (path / "checkpoint.json").write_text(json.dumps(manifest))
        with_values(path, values)
        assert bytes(saved.load(path).extra["seen"].tolist()) == data
    else:
        (path / name).write_bytes(data)
        if name != "checkpoint.json":
            seal(path)
        if name == ".metadata":
            (path / "__0_0.distcp").write_bytes(data)
            saved.load(checkpoint.newest(tmp_path))
        else:
            refused(saved, path)
            if name == "checkpoint.json":
                passed_over(tmp_path, saved)
            else:
                refused(saved, checkpoint.newest(tmp_path))
    assert not marker.exists()


def test_nothing_of_torchs_readers_is_called(
    tmp_path: Path, saved: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finding and loading a checkpoint never calls an unpickler, so a malicious pickle cannot run."""

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("an unpickler was called")

    for where, what in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(where, what, never)
    assert saved.load(checkpoint.newest(tmp_path)).step == 2


@each_value()
@pytest.mark.parametrize("target", ["/etc/passwd", "../step-00000001/values.json", "values.json"])
@pytest.mark.parametrize("name", ["checkpoint.json", "values.json", "rank-00000.safetensors"])
def test_links_are_not_followed(tmp_path: Path, saved: Run, name: str, target: str) -> None:
    path = tmp_path / "step-00000002"
    (path / name).unlink()
    (path / name).symlink_to(target)
    assert "not a plain file" in passed_over(tmp_path, saved)


def test_a_pipe_is_not_waited_for(tmp_path: Path, saved: Run) -> None:
    for name in ("checkpoint.json", "values.json", "rank-00000.safetensors"):
        path = tmp_path / "step-00000002" / name
        whole = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        assert "not a plain file" in passed_over(tmp_path, saved)
        path.unlink()
        path.write_bytes(whole)


@pytest.mark.parametrize(
    "name", ["../step-00000001/values.json", "/etc/passwd", "a/b", "..", "", ".lock", "x\0y"]
)
def test_no_file_outside_is_named(tmp_path: Path, saved: Run, name: str) -> None:
    path = tmp_path / "step-00000002"
    manifest = json.loads((path / "checkpoint.json").read_text())
    manifest["files"][name] = {"size": 1, "crc32": "00000000"}
    forge(path, manifest)
    assert "missing fields or fields of the wrong type" in passed_over(tmp_path, saved)
    del manifest["files"][name]
    forge(path, manifest)
    values = values_of(path)
    values["tensors"]["extra.seen"]["pieces"][0][0] = name
    with_values(path, values)
    assert "a piece is in a file that the checkpoint does not have" in refused(saved, path)


def test_links_to_folders_are_removed_and_not_what_they_lead_to(tmp_path: Path, saved: Run) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    (tmp_path / ".step-00000007.partial").symlink_to(elsewhere)
    (tmp_path / ".step-00000008.deleted").symlink_to(elsewhere)
    shutil.move(tmp_path / "step-00000001", elsewhere / "first")
    (tmp_path / "step-00000001").symlink_to(elsewhere / "first")
    saved.save(tmp_path, 3, keep=1)
    assert names(tmp_path) == ["elsewhere", "step-00000003"]
    assert names(elsewhere) == ["first", "precious"]


# --- all or nothing -----------------------------------------------------------------------------------------

FILES = ["checkpoint.json", "values.json", "rank-00000.safetensors"]


@pytest.mark.parametrize("name", FILES)
def test_damage_of_every_file_is_found_and_changes_nothing(tmp_path: Path, saved: Run, name: str) -> None:
    path = tmp_path / "step-00000002"
    whole = (path / name).read_bytes()
    others = [(path / other).read_bytes() for other in FILES if other != name]
    others.append((tmp_path / "step-00000001" / name).read_bytes())
    draw = random.Random(0)
    flips = [bytearray(whole) for _ in range(30)]
    for flip in flips:
        flip[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
    cuts = [whole[: draw.randrange(len(whole))] for _ in range(10)]
    texts = [
        b"",
        b"null",
        b"3",
        b"[]",
        b"{}",
        b"NaN",
        b'"x"',
        DEEP.encode(),
        LONG.encode(),
        b"\xff\xfe\x00",
        b'{"a":1,"a":2}',
    ]
    for data in (*flips, *cuts, *others, *texts, whole + b" {}", whole * 2):
        (path / name).write_bytes(data)
        if name == "checkpoint.json" and _same_json(data, whole):
            continue  # the JSON means the same: one blank was replaced by another
        passed_over(tmp_path, saved)
    (path / name).unlink()
    passed_over(tmp_path, saved)
    (path / name).write_bytes(whole)
    assert checkpoint.newest(tmp_path).step == 2


def _same_json(one: bytes, other: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except (ValueError, RecursionError):
        return False


@every(2, 1)
@pytest.mark.parametrize(
    "key", ["format", "version", "step", "castwise", "torch", "plan", "digest", "world_size", "files"]
)
def test_a_manifest_of_any_shape_is_passed_over_in_words(tmp_path: Path, saved: Run, key: str) -> None:
    path = tmp_path / "step-00000002"
    manifest = json.loads((path / "checkpoint.json").read_text())
    values: list[Any] = [
        "x", -1, 3, 1.5, None, True, [], {}, [[[[]]]], {"a": {"b": 1}}, float("nan"), float("inf"), 10**4_000,
    ]  # fmt: skip
    for value, wrong in (
        *((value, {**manifest, key: value}) for value in values),
        (None, {k: v for k, v in manifest.items() if k != key}),
    ):
        forge(path, wrong)
        if isinstance(wrong.get(key), str) and key in ("castwise", "torch", "plan", "digest"):
            continue  # these values are only printed, so any string is accepted
        if key == "world_size" and value == 3 and key in wrong:
            assert "the number of parts differs from the number of ranks" in refused(saved, path)
        else:
            passed_over(tmp_path, saved)


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to every value in nested JSON."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from nodes(item, (*path, key))


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    value = copy.deepcopy(value)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return value


WRONG: list[Any] = [
    None, True, 0, -1, 3, 1e300, float("nan"), float("inf"), 10**4_000, 2**63, "x", "", "model.conv.bias", [], {}, [[]], [None],
    {"tensor": "x"}, {"tensor": "model.conv.bias"}, {"tensor": []}, {"dict": 1}, {"dict": [[1]]}, {"dict": [[[], 1]]},
    {"dict": [[{"tuple": [[]]}, 1]]}, {"tuple": {}}, {"tuple": [], "x": 1}, {"dict": []},
]  # fmt: skip


def loads(run: Run, path: Path) -> str | None:
    """Return why a checkpoint is refused, or None if it loads."""
    try:
        run.load(path)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize("seed", range(examples(3, 6)))
def test_forged_values_are_refused_whole_or_are_good_to_train_on(
    tmp_path: Path, saved: Run, seed: int
) -> None:
    """With any value replaced by any other, either loading fails and changes nothing, or training continues."""
    path = tmp_path / "step-00000002"
    values = values_of(path)
    ways = [way for way in nodes(values) if way]
    draw = random.Random(seed)
    before = everything(saved)
    refusals = 0
    for _ in range(70):
        # choose the part first; otherwise nearly all draws would hit the many numbers of the tensors
        part = draw.choice(list(values))
        way = draw.choice([way for way in ways if way[0] == part])
        with_values(path, put(values, way, draw.choice(WRONG)))
        error = loads(saved, path)
        refusals += error is not None
        if error is not None:
            assert "\n" not in error, way
            same(everything(saved), before)
        else:
            if way[0] != "optimizers":  # a changed name here may be a state that some optimizer requires
                saved.train(9, 1)
            with_values(path, values)
            saved = Run("fp16-master")
            saved.load(path)
            saved.train(2, 1)
            same(everything(saved), before)
    assert refusals > 20


def test_forged_sizes_and_places_of_tensors(tmp_path: Path, saved: Run) -> None:
    path = tmp_path / "step-00000002"
    values = values_of(path)
    weight = values["tensors"]["model.into.weight"]
    assert weight["shape"] == [6, 16]
    name, start, _, _ = weight["pieces"][0]
    cases: list[tuple[str, Any]] = [
        ("pieces overlap", [[name, start, [0, 0], [4, 16]], [name, start, [3, 0], [2, 16]]]),
        ("pieces do not cover the tensor", []),
        ("pieces do not cover the tensor", weight["pieces"] * 2),
        ("extends beyond the tensor", [[name, start, [1, 0], [6, 16]]]),
        ("wrong number of dimensions", [[name, start, [0], [96]]]),
        ("a piece is empty", [*weight["pieces"], [name, start, [0, 0], [0, 16]]]),
        ("in the middle of a number", [[name, start + 2, [0, 0], [6, 16]]]),
        ("ends beyond the end of its file", [[name, 4 * 10**9, [0, 0], [6, 16]]]),
        ("list of integers", [[name, -4, [0, 0], [6, 16]]]),
        ("list of integers", [[name, start, [0.0, 0], [6, 16]]]),
        ("list of integers", [[name, start, [0, 0], [10**30, 16]]]),
    ]
    for said, pieces in cases:
        with_values(path, put(values, ("tensors", "model.into.weight", "pieces"), pieces))
        assert said in refused(saved, path)
    huge = {"dtype": "float32", "shape": [2**40], "pieces": [[name, 0, [0], [2**40]]]}
    with_values(path, put(values, ("tensors", "extra.seen"), huge))
    assert "ends beyond the end of its file" in refused(saved, path)
    for wrong in ("int64", "bool", "complex64"):
        with_values(
            path,
            put(
                values,
                ("tensors", "model.conv.bias"),
                {**values["tensors"]["model.conv.bias"], "dtype": wrong},
            ),
        )
        refused(saved, path)
    state = values["tensors"]["optimizer.0.conv.weight.exp_avg"]
    count = state["pieces"][0][3][0] * 9
    flat = {**state, "shape": [count], "pieces": [[*state["pieces"][0][:2], [0], [count]]]}
    with_values(path, put(values, ("tensors", "optimizer.0.conv.weight.exp_avg"), flat))
    assert "optimizer 0 has state of other shapes or dtypes: exp_avg of conv.weight" in refused(saved, path)
    fresh = Run("fp16-master")
    assert "optimizer 0 has state of other shapes or dtypes: exp_avg of conv.weight" in refused(fresh, path)


def test_forged_options_scales_and_random_states(tmp_path: Path, saved: Run) -> None:
    path = tmp_path / "step-00000002"
    values = values_of(path)
    options = [key for key, _ in values["optimizers"][0]["options"][0]["dict"]]
    for key, wrong in (
        ("lr", "fast"),
        ("lr", None),
        ("betas", 0.9),
        ("betas", {"tuple": [0.9]}),
        ("eps", []),
    ):
        way = ("optimizers", 0, "options", 0, "dict", options.index(key), 1)
        with_values(path, put(values, way, wrong))
        assert "optimizer 0 has options of other types: " in refused(saved, path)
    amp = [key for key, _ in values["ranks"][0]["amp"]["dict"]]
    scaler = ("ranks", 0, "amp", "dict", amp.index("scaler"), 1)
    keys = [key for key, _ in values["ranks"][0]["amp"]["dict"][amp.index("scaler")][1]["dict"]]
    for key, wrong in (
        ("scale", float("nan")),
        ("scale", "x"),
        ("scale", -1.0),
        ("_growth_tracker", 1.5),
        ("losses", 3),
    ):
        with_values(path, put(values, (*scaler, "dict", keys.index(key), 1), wrong))
        assert "the scaler's state is not a mapping of names to finite numbers" in refused(saved, path)
    with_values(path, put(values, scaler, {"dict": []}))
    saved.load(path)
    generator = values["tensors"]["rng.0.cpu"]
    short = {**generator, "shape": [16], "pieces": [[*generator["pieces"][0][:2], [0], [16]]]}
    with_values(path, put(values, ("tensors", "rng.0.cpu"), short))
    assert "random generator of cpu" in refused(saved, path)
    seen = values["tensors"]["model.conv.weight"]["pieces"][0]
    with_values(path, put(values, ("tensors", "rng.0.cpu", "dtype"), "int8"))
    assert "random generator of cpu" in refused(saved, path)
    assert seen


@pytest.mark.parametrize(
    ("key", "wrong", "why"),
    [
        ("lr", True, "options of other types: lr of group 0"),
        ("maximize", 1, "options of other types: maximize of group 0"),
        ("foreach", "no", "options of other types: foreach of group 0"),
        ("fused", 3, "options of other types: fused of group 0"),
        ("betas", {"tuple": [True, 0.9]}, "options of other types: betas of group 0"),
        ("amsgrad", True, "options that need state which was not saved: max_exp_avg_sq of "),
    ],
    ids=["lr", "maximize", "foreach", "fused", "betas", "amsgrad"],
)
def test_forged_options_that_an_optimizer_would_take(
    tmp_path: Path, saved: Run, key: str, wrong: Any, why: str
) -> None:
    path = tmp_path / "step-00000002"
    values = values_of(path)
    keys = [name for name, _ in values["optimizers"][0]["options"][0]["dict"]]
    with_values(path, put(values, ("optimizers", 0, "options", 0, "dict", keys.index(key), 1), wrong))
    assert f"optimizer 0 has {why}" in refused(saved, path)


def test_a_key_that_is_given_twice_is_refused(tmp_path: Path, saved: Run) -> None:
    path = tmp_path / "step-00000002"
    values = values_of(path)
    values["optimizers"][0]["options"][0]["dict"].append(["lr", 5.0])
    with_values(path, values)
    assert "a mapping with a duplicate key" in refused(saved, path)


@pytest.mark.parametrize("where", ["model", "optimizer", "amp", "random"])
def test_what_fails_while_it_is_written_is_taken_back(
    tmp_path: Path, saved: Run, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a module, an optimizer or a session fails while it loads, those that loaded before it are restored."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no,\nnot this")

    if where == "model":  # fails in the last module, after all others have their weights
        saved.model.tied.register_load_state_dict_pre_hook(refuse)
    elif where == "optimizer":
        saved.optimizer.register_load_state_dict_post_hook(refuse)
    elif where == "amp":
        state = saved.amp.load_state_dict
        calls = iter([refuse, state])
        monkeypatch.setattr(saved.amp, "load_state_dict", lambda value: next(calls)(value))
    else:
        monkeypatch.setattr("castwise.checkpoint.restore.set_random_states", refuse)
    text = refused(saved, tmp_path / "step-00000002")
    assert "nothing was changed: RuntimeError: no, not this" in text
    saved.train(5, 1)


def test_a_checkpoint_that_is_not_accepted_changes_nothing(tmp_path: Path, saved: Run) -> None:
    def accept(extra: Any) -> None:
        raise ValueError(f"of epoch {extra['epoch']}")

    before = everything(saved)
    with pytest.raises(CheckpointError, match="nothing was changed: ValueError: of epoch 3"):
        checkpoint.load(tmp_path / "step-00000002", **saved.parts(), accept=accept)
    same(everything(saved), before)


class Counter(nn.Module):
    """A module with extra state that is not a tensor; it refuses some values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.kept: Any = {"count": 0, "at": torch.zeros(2)}

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        if state["count"] > 5:
            raise ValueError("too many")
        self.kept = state


def test_state_of_modules_that_is_no_tensor_is_saved_loaded_and_taken_back(tmp_path: Path) -> None:
    run = Run("bf16-mixed", model=lambda: nn.Sequential(Counter(), Counter()))
    run.model[0].kept = {"count": 2, "at": torch.ones(2)}
    path = run.save(tmp_path, 1).path
    run.model[1].kept["count"] = 6
    bad = run.save(tmp_path, 2).path
    fresh = Run("bf16-mixed", model=lambda: nn.Sequential(Counter(), Counter()))
    fresh.load(path)
    assert (fresh.model[0].kept["count"], fresh.model[0].kept["at"].tolist()) == (2, [1.0, 1.0])
    fresh.model[0].kept["count"] = 3
    with pytest.raises(CheckpointError, match=r"nothing was changed: .*too many"):
        fresh.load(bad)
    assert fresh.model[0].kept["count"] == 3


@pytest.mark.sparse
def test_what_could_not_be_read_again_is_not_saved(tmp_path: Path) -> None:
    run = Run("fp32")
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    sparse = torch.eye(2).to_sparse()
    for extra, said in (
        (deep, "nested more than 60 levels deep"),
        (10**4_500, "more than 4,000 digits"),
        (sparse, "cannot be saved. Allowed: plain tensors"),
        (torch.ones(1, device="meta"), "cannot be saved. Allowed: plain tensors with values"),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(CheckpointError, match=said):
                run.save(tmp_path, 1, extra=extra)
    assert names(tmp_path) == []


@pytest.mark.parametrize("dtype", [*storage._DTYPES.values()], ids=str)
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    bits = torch.randint(0, 256, (5, 3, 16), dtype=torch.uint8)
    value = (bits > 99) if dtype is torch.bool else bits.view(dtype)
    extra = [value, value.transpose(0, 1), value[1:, :, 0], value[0, 0, 0], value[:0]]
    run = Run("fp32")
    got = run.load(run.save(tmp_path, 1, extra=extra).path).extra
    for one, other in zip(got, extra, strict=True):
        assert (one.dtype, one.shape) == (dtype, other.shape)
        assert torch.equal(*(t.cpu().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))


# --- two processes ------------------------------------------------------------------------------------------


def saver(pipe: Connection, folder: Path, value: float, saves: int) -> None:
    """Run in a second process: save on command, report the result, and stay alive."""
    warnings.simplefilter("ignore")
    model = nn.Linear(64, 64)
    nn.init.constant_(model.weight, value)
    amp = castwise.Amp("fp32", device=DEVICE)
    amp.prepare(model)
    pipe.recv()
    try:
        for step in range(saves):
            checkpoint.save(folder, step, model=model, amp=amp, keep=3)
    except CheckpointError as error:
        pipe.send(f"told: {error}")
    else:
        pipe.send("saved")
    pipe.recv()


class Saver:
    """Controls that process from the test."""

    def __init__(self, folder: Path, value: float, saves: int) -> None:
        context = forks()
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=saver, args=(theirs, folder, value, saves), daemon=True)
        self.process.start()
        theirs.close()

    def go(self) -> None:
        self._pipe.send("go")

    def said(self) -> str:
        assert self._pipe.poll(120)
        return str(self._pipe.recv())

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture
def processes() -> Iterator[Callable[..., Saver]]:
    started: list[Saver] = []

    def start(*args: Any) -> Saver:
        started.append(Saver(*args))
        return started[-1]

    yield start
    for one in started:
        one.kill()


def test_of_two_processes_that_save_at_once_one_is_told_and_nothing_mixes(
    tmp_path: Path, processes: Any
) -> None:
    both = [processes(tmp_path, value, 20) for value in (1.0, 2.0)]
    for one in both:
        one.go()
    said = [one.said() for one in both]
    assert sorted(text.split()[0] for text in said) == ["saved", "told:"]
    winner = said.index("saved")
    assert (
        f"another process saves into {tmp_path}: process {both[winner].process.pid} on " in said[1 - winner]
    )
    assert "name another folder" in said[1 - winner]
    assert names(tmp_path) == ["step-00000017", "step-00000018", "step-00000019"]
    model = nn.Linear(64, 64)
    amp = castwise.Amp("fp32", device=DEVICE)
    amp.prepare(model)
    for path in sorted(tmp_path.glob("step-*")):
        checkpoint.load(path, model=model, amp=amp)
        assert bool((model.weight == winner + 1.0).all())
    with pytest.raises(CheckpointError, match=r"save\(step=20\): another process saves into"):
        checkpoint.save(tmp_path, 20, model=model, amp=amp)  # the other process is paused, not dead
    both[winner].kill()
    checkpoint.save(tmp_path, 20, model=model, amp=amp)  # a killed process no longer claims the folder
    assert checkpoint.newest(tmp_path).step == 20


def test_a_folder_that_was_left_is_free(tmp_path: Path, processes: Any) -> None:
    """A process claims the folder it saves into until it saves into another."""
    run = Run("fp32")
    run.save(tmp_path / "a", 1)
    run.save(tmp_path / "b", 1)
    other = processes(tmp_path / "a", 1.0, 2)
    other.go()
    assert other.said() == "saved"
    with pytest.raises(CheckpointError, match="another process saves into"):
        run.save(tmp_path / "a", 2)
    shutil.rmtree(tmp_path / "b")
    run.save(tmp_path / "b", 2)
    third = processes(tmp_path / "b", 1.0, 2)
    third.go()
    assert third.said().startswith(
        f"told: save(step=0): another process saves into {tmp_path / 'b'}: process {os.getpid()} on "
    )
