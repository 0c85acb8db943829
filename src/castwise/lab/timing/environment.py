"""Describe the environment of a measurement, which is written into every result file.

The description does not identify the machine's owner: it has no host name, no user and no path.
"""

from __future__ import annotations

import datetime
import importlib
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from castwise.core import devices


@dataclass(frozen=True)
class Environment:
    """The device, the time, the versions and the command line of a measurement.

    Attributes:
        device: The device's name, as the vendor gives it.
        device_type: The device type, such as ``cpu`` or ``cuda``.
        cores: The number of cores available to this process.
        threads: The number of threads that torch uses for one operator.
        capability: The CPU's vector instructions or the GPU's compute capability.
        torch: The version of torch.
        python: The version of Python.
        castwise: The version of castwise.
        commit: The commit of castwise's own checkout, with ``+`` if files other than results have changes. None if
            castwise is installed as a package.
        system: The operating system and the processor type.
        command: The command line. Of each absolute path in it, only the last part is kept.
        date: The time of the measurement, as text.
    """

    device: str
    device_type: str
    cores: int
    threads: int
    capability: str
    torch: str
    python: str
    castwise: str
    commit: str | None
    system: str
    command: str
    date: str


def environment(device: torch.device | str = "cpu") -> Environment:
    """Return the device, time, versions and command line of this process."""
    device = torch.device(device)
    return Environment(
        device=_device_name(device),
        device_type=device.type,
        cores=_cores(),
        threads=torch.get_num_threads(),
        capability=_capability(device),
        torch=torch.__version__,
        python=platform.python_version(),
        castwise=_version(),
        commit=_commit(),
        system=f"{platform.system()} {platform.machine()}",
        command=command_line(sys.argv),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def command_line(argv: list[str]) -> str:
    """Join a command line in which absolute paths and paths that start with ``~`` are reduced to their last part."""
    words = []
    for index, word in enumerate(argv):
        word = re.sub(r"(?:~|(?<![\w.:/])/)[\w.~+@-]*(?:/[\w.~+@-]*)*", lambda m: Path(m.group()).name, word)
        if index == 0 and word == "__main__.py":
            word = "castwise"
        words.append(f'"{word}"' if re.search(r"\s", word) or not word else word)
    return " ".join(words)


def cpuinfo() -> str:
    """Return the text of Linux's ``/proc/cpuinfo``; empty on other systems."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _device_name(device: torch.device) -> str:
    if device.type != "cpu":
        return devices.name_of(device)
    if match := re.search(r"^model name\s*:\s*(.+)$", cpuinfo(), re.MULTILINE):
        return match.group(1).strip()
    return platform.processor() or platform.machine()


def _capability(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{major}.{minor}"
    if device.type != "cpu":
        return ""
    # torch names only the vector units; AMX is added, since it determines whether low formats are fast
    vectors = torch.backends.cpu.get_cpu_capability()
    return f"{vectors} and AMX" if re.search(r"\bamx_tile\b", cpuinfo()) else vectors


def _version() -> str:
    # by name, since this module must not import the package's top level
    return str(importlib.import_module("castwise").__version__)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _commit() -> str | None:
    """Return the commit of castwise's own checkout, or None if castwise is installed, even inside another project's checkout."""
    package = Path(__file__).resolve().parents[2]
    root = package.parent.parent
    if package != root / "src" / "castwise" or not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+" if changed else "")


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()
