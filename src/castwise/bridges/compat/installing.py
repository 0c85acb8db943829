"""``import apex`` and ``import colossalai`` from castwise, if the real package is missing or no longer contains amp."""

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
    """Finds packages and their modules under ``castwise.compat``."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = tuple(packages)

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module for the import system."""
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
    # the location of all parts in later versions of the original
    legacy = f"{fullname}.".startswith("colossalai.legacy.")
    return f"{_HOME}.{fullname.replace('.legacy', '', 1) if legacy else fullname}"


def _asked(fullname: str) -> str:
    """The module being imported, if a package on its path is being found."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_find_and_load":
            name = str(frame.f_locals.get("name"))
            fullname = name if name.startswith(f"{fullname}.") else fullname
        frame = frame.f_back
    return fullname


class _Loader(importlib.abc.Loader):
    """Returns the module under ``castwise.compat`` itself, so that each exists only once."""

    def __init__(self, home: str) -> None:
        self.home = home
        self._spec: object = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the module. Modules that it has already imported get their short names too, before they are used."""
        module = importlib.import_module(self.home)
        self._spec = module.__spec__
        for name, part in list(sys.modules.items()):
            if f"{name}.".startswith(f"{self.home}."):
                sys.modules.setdefault(name.removeprefix(f"{_HOME}."), part)
                # in a package without a folder, so that access to its contents raises the error with the replacement
                vars(part).setdefault("__path__", [])
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: it has run already, and keeps its spec."""
        module.__spec__ = self._spec  # type: ignore[assignment]


def install(*packages: str) -> tuple[str, ...]:
    """Let ``import apex`` and ``import colossalai`` find castwise's drop-ins in this process.

    A real package takes precedence: the drop-in is used only if the package is missing, or is an Apex without ``amp``.

    Args:
        packages: The packages to install; all that castwise has if none is named.

    Returns:
        The packages that come from castwise now.

    Raises:
        ValueError: castwise has no drop-in for a package.
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
    """Whether a package is installed and complete."""
    try:
        if importlib.util.find_spec(package) is None:
            return False
        return package != "apex" or importlib.util.find_spec("apex.amp") is not None
    except (ImportError, ValueError):
        return False


def uninstall() -> None:
    """Undo :func:`install`: modules imported meanwhile are removed under their short names."""
    for finder in [finder for finder in sys.meta_path if isinstance(finder, _Finder)]:
        _remove(finder)


def _remove(finder: _Finder) -> None:
    sys.meta_path.remove(finder)
    for name in [name for name in sys.modules if name.partition(".")[0] in finder.packages]:
        del sys.modules[name]


@contextlib.contextmanager
def serving(package: str) -> Iterator[None]:
    """Install a drop-in for the duration of a block, unless it is installed already, or the real package is available."""
    if package in sys.modules or importlib.util.find_spec(package) is not None:
        yield
        return
    finder = _Finder([package])
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        _remove(finder)
