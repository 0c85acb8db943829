"""Build the sdist and, from it alone, the wheel; install the wheel and use it.

It is installed in new environments, without access to the sources. There are two environments: ``core`` has castwise
with its required libraries (torch, NumPy, rich) and their dependencies, ``all`` also has those of ``castwise[all]``.
The libraries are links to the installed ones, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
JOB = """
import torch
from torch import nn
from castwise import Workload


def batches(seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        inputs = torch.randn(32, 16, generator=generator)
        yield inputs, inputs.sum(1, keepdim=True)


def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


workload = Workload(
    name="tiny", model=lambda: nn.Linear(16, 1), optimizer=lambda params: torch.optim.SGD(params, 0.1), batches=batches, loss=loss
)
"""
TUNE = """
import castwise
from castwise.schemas import schema
found = castwise.tune("job.py:workload", goal="numerics", memory=False, fresh=True)
print(castwise.__file__, found.plan, schema("evidence")["$id"])
"""


def main() -> None:
    """Build, check and try out the package; stop at the first error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "package", help="folder for the sdist and the wheel"
    )
    out = parser.parse_args().out.resolve()
    with tempfile.TemporaryDirectory(prefix="castwise-package-") as name:
        scratch = Path(name)
        sdist, wheel = build(scratch)
        check_sdist(sdist)
        check_wheel(wheel)
        for extra in ("", "all"):
            environment = install(wheel, extra, scratch / f"environment-{extra or 'core'}")
            try_out(environment, extra, scratch / f"work-{extra or 'core'}")
        out.mkdir(parents=True, exist_ok=True)
        for made in (sdist, wheel):
            print(f"wrote {shutil.copy(made, out)}")


def build(scratch: Path) -> tuple[Path, Path]:
    """Build the sdist from the files that git knows of, and the wheel from the sdist alone; return their paths."""
    source, dist = scratch / "source", scratch / "dist"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    dist.mkdir()
    sdist = dist / _backend("build_sdist", source, dist)
    with tarfile.open(sdist) as archive:
        archive.extractall(scratch / "unpacked", filter="data")
    (unpacked,) = (scratch / "unpacked").iterdir()
    return sdist, dist / _backend("build_wheel", unpacked, dist)


def _backend(call: str, source: Path, dist: Path) -> str:
    """Build with setuptools and return the name of the built file."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.{call}(sys.argv[1]))"
    done = _run([sys.executable, "-c", code, str(dist)], source)
    return done.splitlines()[-1]


def check_sdist(sdist: Path) -> None:
    """Check that the sdist has the package, its build files, the README, changelog and license, and no tests."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if "/" in name}
    folders = {name.partition("/")[0] for name in names if "/" in name}
    files = {name for name in names if "/" not in name} - folders
    wanted = {
        "CHANGELOG.md",
        "LICENSE",
        "MANIFEST.in",
        "PKG-INFO",
        "README.md",
        "pyproject.toml",
        "setup.cfg",
    }
    _same("the sdist's files", files, wanted)
    _same("the sdist's folders", folders, {"src"})
    inside = {name.removeprefix("src/castwise/") for name in names if name.startswith("src/castwise/")}
    _same("the sdist's package", {name for name in inside if Path(name).suffix}, package_files())


def check_wheel(wheel: Path) -> None:
    """Check that the wheel has every module and all data of the package, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    inside = {name.removeprefix("castwise/") for name in names if name.startswith("castwise/")}
    _same("the wheel's package", inside, package_files())
    others = {name for name in names if not name.startswith("castwise/")}
    assert all(re.match(r"castwise-[^/]+\.dist-info/", name) for name in others), (
        f"stray files: {sorted(others)}"
    )


def package_files() -> set[str]:
    """Return the files of the package, without the READMEs in its folders, which are for developers."""
    folder = ROOT / "src" / "castwise"
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".md") and "__pycache__" not in path.parts
    }


def _same(what: str, found: set[str], wanted: set[str]) -> None:
    assert found == wanted, f"{what}: stray {sorted(found - wanted)}, missing {sorted(wanted - found)}"


def install(wheel: Path, extra: str, folder: Path) -> Path:
    """Make a virtual environment with only the wheel and the libraries that it requires; return its Python."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(
        _run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip()
    )
    _run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install", "--no-deps",
         "--no-index", "--quiet", str(wheel)], folder,
    )  # fmt: skip
    (metadata,) = site.glob("castwise-*.dist-info")
    for name in sorted(needed(importlib.metadata.Distribution.at(metadata), {extra})):
        _link(importlib.metadata.distribution(name), site)
    return python


def needed(distribution: importlib.metadata.Distribution, extras: set[str]) -> set[str]:
    """Return the names of the distributions that a distribution requires, directly or indirectly."""
    found: dict[str, set[str]] = {}

    def visit(one: importlib.metadata.Distribution, wanted: set[str]) -> None:
        for requirement in map(Requirement, one.requires or ()):
            if not any(
                requirement.marker is None or requirement.marker.evaluate({"extra": extra})
                for extra in wanted | {""}
            ):
                continue
            name = canonicalize_name(requirement.name)
            known = found.get(name)
            if known is not None and requirement.extras <= known:
                continue
            found[name] = (known or set()) | requirement.extras
            own = name == canonicalize_name(distribution.name)
            visit(distribution if own else importlib.metadata.distribution(name), set(requirement.extras))

    visit(distribution, extras)
    return set(found) - {canonicalize_name(distribution.name)}


def _link(distribution: importlib.metadata.Distribution, site: Path) -> None:
    """Link a distribution that is installed here into another environment."""
    for top in {
        file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")
    }:
        target = Path(str(distribution.locate_file(top)))
        if not (site / top).exists():
            (site / top).symlink_to(target)


def try_out(python: Path, extra: str, work: Path) -> None:
    """Run the README's example, a search and the command there; check a user's program against the installed types."""
    work.mkdir()
    (work / "job.py").write_text(JOB, encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    example = re.search(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert example is not None
    print(_run([str(python), "-W", "error", "-c", example[1]], work).strip())
    said = _run([str(python), "-c", TUNE], work).split()
    assert Path(said[0]).is_relative_to(python.parent.parent), f"imported from {said[0]}"
    print(f"tuned from Python: {' '.join(said[1:])}")
    command = python.with_name("castwise")
    if not extra:
        refused = _run([str(command), "--version"], work, code=1)
        assert 'pip install "castwise[cli]"' in refused, refused
        print(refused.strip())
        return
    print(_run([str(command), "--version"], work).strip())
    told = json.loads(
        _run([str(command), "tune", "job.py:workload", "--goal", "numerics", "--no-memory", "--json"], work)
    )
    assert {"report.html", "plan.json", "evidence.json"} <= {Path(path).name for path in told["wrote"]}
    print(f"castwise tune: {told['answer']}")
    for words in (
        ("train", "digits", "--plan", "runs/tune-tiny/plan.json", "--steps", "3"),
        ("migrate", "job.py"),
        ("schema", "plan"),
    ):
        _run([str(command), *words], work)
        print(f"castwise {' '.join(words)}: done")
    shutil.copy(ROOT / "tests" / "typed_use.py", work)
    print(
        _run(
            [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), "typed_use.py"],
            work,
        ).strip()
    )


def _run(words: list[str], folder: Path, code: int = 0) -> str:
    """Run a command and return its standard output; if it is expected to fail, also its standard error."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        words, cwd=folder, env={**own, "CASTWISE_CACHE_DIR": ""}, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + (done.stderr if code else "")


if __name__ == "__main__":
    main()
