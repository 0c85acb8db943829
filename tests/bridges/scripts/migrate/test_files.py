"""Finding, reading and writing of files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from castwise.bridges.scripts.migrate import files as files_room
from castwise.bridges.scripts.migrate import migrate
from castwise.errors import MigrateError

BEFORE = "from apex import amp\n"
AFTER = "from castwise.compat.apex import amp\n"


def test_nothing_is_written_without_being_asked(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(BEFORE)
    result = migrate(file)
    assert [each.path for each in result.changed] == [file]
    assert file.read_text() == BEFORE
    assert not result.files[0].written
    assert result.summary() == "Would rewrite 1 of 1 file; --write rewrites them"


def test_writing_leaves_the_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(BEFORE)
    file.chmod(0o755)
    result = migrate(file, write=True)
    assert result.files[0].written
    assert file.read_text() == AFTER
    assert stat.S_IMODE(file.stat().st_mode) == 0o755
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    again = migrate(file, write=True)
    assert again.files == ()
    assert again.summary() == "Nothing to rewrite in 1 file"


@pytest.mark.parametrize("newline", ["\r\n", "\n"])
def test_newlines_stay(tmp_path: Path, newline: str) -> None:
    file = tmp_path / "train.py"
    text = newline.join(["import torch, apex", "", "apex.amp", "# the end"])
    file.write_bytes(text.encode())
    migrate(file, write=True)
    want = newline.join(["import torch", "from castwise.compat import apex", "", "apex.amp", "# the end"])
    assert file.read_bytes() == want.encode()


def test_a_swap_takes_the_newlines_of_its_file(tmp_path: Path) -> None:
    before = (Path(__file__).parent / "scripts" / "torch_gan.before.txt").read_text()
    after = (Path(__file__).parent / "scripts" / "torch_gan.after.txt").read_text()
    file = tmp_path / "train.py"
    file.write_bytes(before.replace("\n", "\r\n").encode())
    result = migrate(file, write=True)
    assert file.read_bytes() == after.replace("\n", "\r\n").encode()
    assert "\r" not in result.files[0].diff()


@pytest.mark.parametrize(
    ("encoding", "head"),
    [
        ("latin-1", "# -*- coding: latin-1 -*-\n"),
        ("utf-8", ""),
        ("utf-8-sig", ""),
        ("cp1252", "#!python\n# coding: cp1252\n"),
    ],
)
def test_encodings_stay(tmp_path: Path, encoding: str, head: str) -> None:
    file = tmp_path / "train.py"
    file.write_bytes((head + "# Künstler\n" + BEFORE).encode(encoding))
    migrate(file, write=True)
    assert file.read_bytes() == (head + "# Künstler\n" + AFTER).encode(encoding)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"from apex import amp\nif:\n", "cannot be parsed as Python: line 2: "),
        (b"from apex import amp\nprint 'two'\n", "cannot be parsed as Python: line 2: "),
        (b"from apex import amp\n\0\1\2", "cannot be read: it holds null bytes"),
        (b"from apex import amp\n# K\xfcnstler\n", "cannot be read: its text is not utf-8"),
        (b"# coding: klingon\nfrom apex import amp\n", "cannot be read: unknown encoding"),
        (b"# coding: hex\nfrom apex import amp\n", "cannot be read: 'hex' is not a text encoding"),
        (b"# coding: rot13\nfrom apex import amp\n", "cannot be read: 'rot13' is not a text encoding"),
    ],
)
def test_what_cannot_be_read_is_a_problem_and_stays(tmp_path: Path, raw: bytes, reason: str) -> None:
    bad, good = tmp_path / "bad.py", tmp_path / "good.py"
    bad.write_bytes(raw)
    good.write_text(BEFORE)
    result = migrate(tmp_path, write=True)
    assert [file.path for file in result.problems] == [bad]
    assert result.problems[0].problem.startswith(reason)
    assert bad.read_bytes() == raw
    assert good.read_text() == AFTER  # the other file is migrated
    with pytest.raises(MigrateError, match=r"^migrate: .*bad\.py (is not|cannot)"):
        result.check()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "good.py").write_text(BEFORE)
    for path in (tmp_path, tmp_path / "pipe.py"):
        (problem,) = migrate(path, write=True).problems
        assert problem.path == tmp_path / "pipe.py"
        assert problem.problem == "cannot be read: it is not a regular file"
    assert (tmp_path / "good.py").read_text() == AFTER


def test_a_file_in_which_nothing_changes_keeps_every_byte(tmp_path: Path) -> None:
    """This includes bytes that LibCST would change."""
    (tmp_path / "train.py").write_bytes(
        b"import torch\n\x0cwith torch.no_grad():\n    pass  # no autocast\n\x0cx = 1\r"
    )
    assert migrate(tmp_path).changed == ()


def test_a_file_that_is_no_concern_of_ours_is_not_parsed(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text("print 'Python 2'\n")
    result = migrate(tmp_path)
    assert result.files == ()
    assert result.looked_at == 1


def test_folders_that_hold_no_scripts_of_the_user_are_passed_over(tmp_path: Path) -> None:
    for name in (".git", "env", "__pycache__", "src/site-packages", "src/deep"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "train.py").write_text(BEFORE)
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "notes.txt").write_text(BEFORE)
    assert [each.path for each in migrate(tmp_path).changed] == [tmp_path / "src/deep/train.py"]


def test_symbolic_links(tmp_path: Path) -> None:
    """Links in a folder are listed and not followed; a link given by path is followed and stays a link."""
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.mkdir()
    folder.mkdir()
    target = outside / "train.py"
    target.write_text(BEFORE)
    link = folder / "link.py"
    link.symlink_to(target)
    (folder / "loop").symlink_to(folder, target_is_directory=True)
    (folder / "dead.py").symlink_to(folder / "gone.py")
    result = migrate(folder, write=True)
    assert result.changed == ()
    assert [(file.path.name, file.findings[0].kind) for file in result.files] == [
        ("dead.py", "left"),
        ("link.py", "left"),
    ]
    assert "a symbolic link to" in result.files[1].findings[0].text
    assert target.read_text() == BEFORE
    migrate(link, write=True)
    assert link.is_symlink()
    assert target.read_text() == AFTER


def test_a_read_only_file_is_a_problem_and_stays(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(BEFORE)
    file.chmod(0o444)
    assert migrate(file).problems == ()
    result = migrate(file, write=True)
    assert result.problems[0].problem == "was not written: the file is read-only"
    assert file.read_text() == BEFORE


def test_a_file_that_changes_meanwhile_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "train.py"
    file.write_text(BEFORE)

    def rewrite(text: str, **options: object) -> tuple[str, list[object]]:
        file.write_text("mine\n")
        return AFTER, []

    monkeypatch.setattr(files_room, "rewrite", rewrite)
    result = migrate(file, write=True)
    assert result.problems[0].problem == "was not written: the file was changed in the meantime"
    assert file.read_text() == "mine\n"


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "train.py"
    file.write_text(BEFORE)

    def replace(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    result = migrate(file, write=True)
    assert result.problems[0].problem == "was not written: No space left on device"
    assert file.read_text() == BEFORE
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


LOOP = """\
import torch
from torch.amp import GradScaler, autocast

scaler = GradScaler("cpu")
with autocast("cpu"), torch.autocast("cpu", enabled=False):
    pass
"""


@pytest.mark.parametrize(
    ("other", "stays"),
    [
        ("from train import GradScaler\n", {"GradScaler"}),
        ("from .train import autocast as a\n", {"autocast"}),
        ("import train\ntrain.autocast\n", {"autocast"}),
        ("from . import train\nclass Mine(train.GradScaler): pass\n", {"GradScaler"}),
        ("from train import *\nautocast\n", {"autocast"}),
        ("from train import *\n", set()),
        ("import train\ntrain.main(autocast)\n", set()),
        ("from pkg.train import arguments\n", set()),
        ("print 'Python 2'\n", set()),
    ],
)
def test_a_name_that_another_script_takes_over_stays(tmp_path: Path, other: str, stays: set[str]) -> None:
    """The other script may subclass the class or use it in isinstance()."""
    (tmp_path / "train.py").write_text(LOOP)
    (tmp_path / "eval.py").write_text(other)
    for path in (tmp_path, tmp_path / "train.py"):
        (result,) = migrate(path).files
        for name in ("GradScaler", "autocast"):
            assert (f"torch.amp.{name} stays: other scripts import it" in str(result.findings)) is (
                name in stays
            )
        swapped = [f"from torch.amp import {name}\n" for name in stays]
        assert all(line in result.after for line in swapped)
        assert "castwise.autocast(" in result.after


@pytest.mark.parametrize(
    "use",
    ["from train import Scaler\nclass Mine(Scaler): pass\n", "import train\nisinstance(x, train.Scaler)\n"],
)
def test_a_class_under_a_name_that_other_scripts_import_stays(tmp_path: Path, use: str) -> None:
    (tmp_path / "train.py").write_text("import torch\nScaler = torch.amp.GradScaler\n")
    (tmp_path / "other.py").write_text(use)
    (result,) = migrate(tmp_path).files
    assert not result.changed
    assert "other scripts import it" in result.findings[0].text


def test_a_package_that_passes_all_names_on_keeps_them(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "train.py").write_text(LOOP)
    (tmp_path / "tools" / "__init__.py").write_text("from .train import *\n")
    (result,) = migrate(tmp_path).files
    assert "from torch.amp import GradScaler, autocast\n" in result.after


BARS = {
    "import torch_npu\n": "it names a device that castwise.autocast does not have",
    "device = 'hpu:0' if args.hpu else 'cuda'\n": "it names a device that castwise.autocast does not have",
    "torch.cuda.amp.autocast = mine\n": "it replaces parts of torch.amp",
    "mock.patch('torch.amp.GradScaler.step', mine)\n": "it replaces parts of torch.amp",
    "setattr(torch.cuda.amp, 'autocast', mine)\n": "it replaces parts of torch.amp",
    "import torch.amp.grad_scaler as g\nmonkeypatch.setattr(g, 'GradScaler', mine)\n": "it replaces parts of torch.amp",
    "from torch.amp import GradScaler as G\nmock.patch.object(G, 'step')\n": "it replaces parts of torch.amp",
    "monkeypatch.setattr('train.torch.amp.GradScaler', mine)\n": "it replaces parts of torch.amp",
    "monkeypatch.setattr(train.torch, 'autocast', mine)\n": "it replaces parts of torch.amp",
    "from torch import amp\namp.GradScaler = mine\n": "it replaces parts of torch.amp",
    "if not cuda: self.scaler._enabled = False\n": "it switches a GradScaler by a private attribute",
    "self._enabled = False\nmonkeypatch.setattr(train, 'GradScaler', mine)\n": "",
    "GradScaler.step = mine\n": "it replaces parts of torch.amp",
    "old = scaler._unscale_grads_\nscaler._unscale_grads_ = mine\n": "it replaces private methods of GradScaler",
    "class A:\n    def _maybe_opt_step(self): pass\n": "it replaces private methods of GradScaler",
    "type(scaler) is torch.amp.GradScaler\n": "it compares an object's class with torch's",
    "model = torch.jit.script(model)\n": "",  # the loop has no code that could be scripted
}


@pytest.mark.parametrize("line", BARS)
def test_what_keeps_a_whole_program_on_torch(tmp_path: Path, line: str) -> None:
    for folder, head in (("joined", "import train\n"), ("apart", "")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.py").write_text(LOOP)
        (tmp_path / folder / "other.py").write_text(head + line)
        result = next(file for file in migrate(tmp_path / folder).files if file.path.name == "train.py")
        stays = folder == "joined" and BARS[line] != ""
        assert result.changed is not stays
        assert not stays or f"the program needs torch's own: {BARS[line]}" in result.findings[0].text


@pytest.mark.parametrize(
    "script", ["torch.jit.script", "from torch.jit import script as s\ns", "import torch.jit as j\nj.script"]
)
def test_what_torchscript_may_compile_stays(tmp_path: Path, script: str) -> None:
    (tmp_path / "main.py").write_text(f"import net\n{script}(net.Net())\n")
    (tmp_path / "net.py").write_text(f"{LOOP}\nclass Net:\n    def forward(self): pass\n")
    (result,) = migrate(tmp_path).files
    assert not result.changed
    assert "TorchScript compiles it" in result.findings[0].text


def test_one_script_of_a_program_that_uses_apex_elsewhere(tmp_path: Path) -> None:
    for name in ("train.py", "scaler.py"):
        (tmp_path / name).write_text(BEFORE)
    (tmp_path / "model.py").write_text("import torch\n")
    (result,) = migrate(tmp_path / "train.py").files
    assert [finding.kind for finding in result.findings] == ["left", "kept"]
    assert "scaler.py may use the library too: migrate the whole folder" in result.findings[0].text
    assert all(len(file.findings) == 1 for file in migrate(tmp_path).files)


def test_a_script_is_told_of_what_it_imports_from_below(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "train.py").write_text("from apex import amp\nfrom tools.scalers import Scaler\n")
    (tmp_path / "tools" / "scalers.py").write_text("from .base import Base\n")
    (tmp_path / "tools" / "base.py").write_text(BEFORE)
    (result,) = migrate(tmp_path / "train.py").files
    assert f"{Path('tools/base.py')} may use the library too" in result.findings[0].text


def test_all_files_are_written_or_none(tmp_path: Path) -> None:
    """A program with only some files on the drop-in would not work."""
    for name in ("a.py", "b.py", "c.py"):
        (tmp_path / name).write_text(BEFORE)
    (tmp_path / "b.py").chmod(0o444)
    result = migrate(tmp_path, write=True)
    assert [file.path.name for file in result.problems] == ["a.py", "b.py", "c.py"]
    assert result.problems[0].problem == f"was not written, because {tmp_path / 'b.py'} cannot be written"
    assert {(tmp_path / name).read_text() for name in ("a.py", "b.py", "c.py")} == {BEFORE}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_what_fails_half_way_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: BaseException
) -> None:
    for name in ("a.py", "b.py", "c.py"):
        (tmp_path / name).write_text(BEFORE)
    real, calls = getattr(os, call), []

    def fail(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise error
        real(*arguments)

    monkeypatch.setattr(os, call, fail)
    if isinstance(error, OSError):
        problems = {file.path.name: file.problem for file in migrate(tmp_path, write=True).problems}
        assert problems.pop("b.py") == "was not written: No space left on device"
        assert problems == dict.fromkeys(
            ("a.py", "c.py"), f"was not written, because {tmp_path / 'b.py'} cannot be written"
        )
    else:
        with pytest.raises(KeyboardInterrupt):
            migrate(tmp_path, write=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(
        ("a.py", "b.py", "c.py"), BEFORE
    )


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can change the owner of a file"
)
def test_a_file_keeps_its_owner(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(BEFORE)
    os.chown(file, 1234, 1234)
    migrate(file, write=True)
    assert (file.stat().st_uid, file.stat().st_gid) == (1234, 1234)


INITIALIZES = "from timm.utils import ApexScaler\nfrom apex import amp\nm, o = amp.initialize(m, o)\n"


def test_a_library_that_scales_the_loss(tmp_path: Path) -> None:
    """Such a library needs the drop-in under the name ``apex``; other programs in the folder do not."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    (tmp_path / "one" / "train.py").write_text(INITIALIZES)
    (tmp_path / "two" / "train.py").write_text(BEFORE + "m, o = amp.initialize(m, o)\namp.scale_loss(l, o)\n")
    for path in (tmp_path, tmp_path / "one" / "train.py"):
        assert (
            migrate(path).files[0].after
            == f'import castwise.compat\ncastwise.compat.install("apex")\n{INITIALIZES}'
        )
    assert migrate(tmp_path).files[1].after.startswith(AFTER)
    (tmp_path / "one" / "main.py").write_text("import train\n")
    result = migrate(tmp_path).files[0]
    assert not result.changed
    assert "before all other imports of the script that is started" in result.findings[0].text


def test_a_program_that_a_drop_in_cannot_carry_stays_whole(tmp_path: Path) -> None:
    """The drop-in shares no state with the library, so a program cannot use both."""
    (tmp_path / "train.py").write_text("from engine import step\nfrom colossalai.booster import Booster\n")
    (tmp_path / "engine.py").write_text("from colossalai.amp import AMP_TYPE\n")
    (tmp_path / "other.py").write_text("import colossalai\ncolossalai.launch(config={})\n")
    (tmp_path / "third.py").write_text(
        "from colossalai import launch\ntry:\n    import colossalai.booster\nexcept ImportError:\n    pass\n"
    )
    result = migrate(tmp_path)
    assert [file.path.name for file in result.changed] == ["other.py", "third.py"]
    assert "the program needs colossalai.booster.Booster" in result.files[0].findings[0].text


CONFIG = "from colossalai.amp import AMP_TYPE\nfp16 = dict(mode=AMP_TYPE.TORCH)\n"
LAUNCHES = "import colossalai\ncolossalai.launch_from_torch(config='config.py')\n"


def test_a_configuration_that_is_loaded_by_its_path_goes_with_what_loads_it(tmp_path: Path) -> None:
    """No script imports the file; the nearest programs that use its library may load it."""
    for name, text in {
        "lacks/train.py": f"from colossalai.booster import Booster\n{LAUNCHES}",
        "lacks/config.py": CONFIG,
        "lacks/more/config.py": CONFIG,
        "has/tools/train.py": LAUNCHES,
        "half/train.py": "from colossalai.amp import convert_to_amp\nfrom colossalai.booster import Booster\n",
        "half/config.py": CONFIG,
        "has/configs/config.py": CONFIG,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    changed = [file.path.relative_to(tmp_path).as_posix() for file in migrate(tmp_path).changed]
    assert changed == ["has/configs/config.py", "has/tools/train.py"]


def test_a_helper_that_is_loaded_by_its_path_goes_with_what_loads_it(tmp_path: Path) -> None:
    """On its own, the helper looks like a script in which a library initializes amp."""
    (tmp_path / "train.py").write_text(f"{BEFORE}m, o = amp.initialize(m, o)\nrun('helpers/step.py')\n")
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers" / "step.py").write_text(
        f"{BEFORE}with amp.scale_loss(l, o) as s:\n    s.backward()\n"
    )
    result = migrate(tmp_path)
    assert [file.after.splitlines()[0] + "\n" for file in result.changed] == [AFTER, AFTER]
    assert {finding.kind for file in result.files for finding in file.findings} == {"kept"}


def test_a_copy_of_apex_in_the_program_is_left(tmp_path: Path) -> None:
    """Imports of that copy are not imports of the library; in another folder the same imports are."""
    for name in ("one/apex/__init__.py", "one/apex/amp.py", "one/tools/train.py", "two/train.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(BEFORE)
    result = migrate(tmp_path)
    assert [file.path for file in result.changed] == [tmp_path / "two/train.py"]
    assert all(file.findings[0].kind == "left" for file in result.files if not file.changed)


def test_no_such_path(tmp_path: Path) -> None:
    with pytest.raises(MigrateError, match=r"migrate: there is no file or folder '.*gone'"):
        migrate(tmp_path / "gone")
