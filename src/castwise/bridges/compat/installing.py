"""Makes ``import apex`` and ``import colossalai`` find castwise's replacements, if the real package or its amp is missing."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from types import FrameType, ModuleType

from castwise.bridges.compat.coverage import instead

__all__ = ["install", "serving", "uninstall"]

_HOME = "castwise.bridges.compat"
_PACKAGES = ("apex", "colossalai")


class _Finder(importlib.abc.MetaPathFinder):
    """An import finder that finds ``apex``, ``colossalai`` and their modules under ``castwise.compat``."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = tuple(packages)

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module under ``castwise.compat``, or None if the module belongs to another package."""
        if fullname.partition(".")[0] not in self.packages:
            return None
        home = _home_of(fullname)
        if importlib.util.find_spec(home) is None:
            name, asked = (_home_of(part).removeprefix(f"{_HOME}.") for part in (fullname, _asked(fullname)))
            note = instead(asked, inside=name) or "docs/compat.md lists the modules that it has"
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: castwise.compat replaces the library here, and has no such module; {note}",
                name=fullname,
            )
        return importlib.machinery.ModuleSpec(fullname, _Loader(home), is_package=True)


def _home_of(fullname: str) -> str:
    # later versions of Colossal-AI keep all these modules under colossalai.legacy
    legacy = f"{fullname}.".startswith("colossalai.legacy.")
    return f"{_HOME}.{fullname.replace('.legacy', '', 1) if legacy else fullname}"


def _asked(fullname: str) -> str:
    """Return the name of the module that the script imports; ``fullname`` may be only a parent package of that module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_find_and_load":
            name = str(frame.f_locals.get("name"))
            fullname = name if name.startswith(f"{fullname}.") else fullname
        frame = frame.f_back
    return fullname


class _Loader(importlib.abc.Loader):
    """An import loader that returns the module under ``castwise.compat`` itself, so that each module exists only once."""

    def __init__(self, home: str) -> None:
        self.home = home
        self._spec: object = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the module under ``castwise.compat``.

        The submodules that this module has already imported get their short names, such as ``apex.amp``, in ``sys.modules``.
        """
        module = importlib.import_module(self.home)
        self._spec = module.__spec__
        for name, part in list(sys.modules.items()):
            if f"{name}.".startswith(f"{self.home}."):
                sys.modules.setdefault(name.removeprefix(f"{_HOME}."), part)
                # makes every module a package, so that importing a submodule that it lacks reaches _Finder and its error
                vars(part).setdefault("__path__", [])
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec. The code of the module has run already."""
        module.__spec__ = self._spec  # type: ignore[assignment]


def install(*packages: str) -> tuple[str, ...]:
    """Make ``import apex`` and ``import colossalai`` import castwise's replacements in this process.

    Call it at the head of a script whose imports should stay as they are. If the real package is installed, the import
    still finds the real package. The only exception is an Apex without ``apex.amp``, which is replaced.

    Args:
        packages: The names of the packages to replace, ``"apex"`` and ``"colossalai"``. Without arguments, both are
            replaced.

    Returns:
        The names of the packages that are imported from castwise from now on.

    Raises:
        ValueError: castwise has no replacement for a package.
    """
    unknown = [name for name in packages if name not in _PACKAGES]
    if unknown:
        raise ValueError(f"install({unknown[0]!r}): allowed: {', '.join(_PACKAGES)}")
    served = {name for finder in sys.meta_path if isinstance(finder, _Finder) for name in finder.packages}
    wanted = [name for name in packages or _PACKAGES if name in served or not _is_real(name)]
    uninstall()
    if wanted:
        sys.meta_path.insert(0, _Finder(wanted))
    return tuple(wanted)


def _is_real(package: str) -> bool:
    """Whether the real package is installed and, for Apex, contains ``amp``."""
    try:
        if importlib.util.find_spec(package) is None:
            return False
        return package != "apex" or importlib.util.find_spec("apex.amp") is not None
    except (ImportError, ValueError):
        return False


def uninstall() -> None:
    """Undo :func:`install`, and remove the replaced modules, such as ``apex.amp``, from ``sys.modules``."""
    for finder in [finder for finder in sys.meta_path if isinstance(finder, _Finder)]:
        _remove(finder)


def _remove(finder: _Finder) -> None:
    sys.meta_path.remove(finder)
    for name in [name for name in sys.modules if name.partition(".")[0] in finder.packages]:
        del sys.modules[name]


@contextlib.contextmanager
def serving(package: str) -> Iterator[None]:
    """Return a context manager inside which a package is imported from castwise, as after :func:`install`.

    It does nothing if the real package is available or if the replacement is installed already.

    Args:
        package: ``"apex"`` or ``"colossalai"``.
    """
    if package in sys.modules or importlib.util.find_spec(package) is not None:
        yield
        return
    finder = _Finder([package])
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        _remove(finder)
