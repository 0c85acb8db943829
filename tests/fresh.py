"""Run code in its own Python process, as a user would."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"
_OWN = {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
_SERVER = """
import json, os, sys, types, warnings
import gc
import torch, torch._dynamo
gc.collect()
gc.freeze()
for line in sys.stdin:
    request = json.loads(line)
    if os.fork() == 0:
        break
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
else:
    sys.exit()
os.chdir(request["folder"])
os.environ.clear()
os.environ.update(request["environment"])
for stream, path in enumerate((os.devnull, request["out"], request["err"])):
    os.dup2(os.open(path, os.O_WRONLY if stream else os.O_RDONLY), stream)
if request["strict"]:
    warnings.simplefilter("error")
sys.modules["__main__"] = types.ModuleType("__main__")
exec(compile(request["code"], "<stdin>", "exec"), vars(sys.modules["__main__"]))
"""


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Return a process that has imported torch and Dynamo but not castwise; it forks a process for each code it
    receives.

    It uses another hash seed than the tests.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, **_OWN, "PYTHONHASHSEED": "42"},
    )  # fmt: skip
    atexit.register(process.communicate)
    return process


def run_python(code: str, cwd: Path, *, strict: bool = False) -> str:
    """Return what ``code`` prints in ``cwd``, in a process that has imported only torch and Dynamo.

    With ``strict``, warnings are errors.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        request = {
            "code": code, "folder": str(cwd), "strict": strict, "out": out.name, "err": err.name,
            "environment": {**os.environ, **_OWN},
        }  # fmt: skip
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        ended = server.stdout.readline()
        assert ended == "0\n", err.read().decode()
        return out.read().decode()


def run_interpreter(code: str, cwd: Path, *flags: str) -> str:
    """Return what ``code`` prints in a new interpreter with ``flags``."""
    done = subprocess.run(
        [sys.executable, *flags, "-"], input=code, cwd=cwd, env={**os.environ, **_OWN}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
