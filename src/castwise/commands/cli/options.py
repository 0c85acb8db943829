"""Arguments and options that several commands share, and parsers of their values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from castwise.errors import CastwiseError, PlanError


def listed(given: str) -> list[str]:
    """Return the names in a comma-separated list."""
    return [part for part in (word.strip() for word in given.split(",")) if part]


def counts(option: str, given: str | None) -> tuple[int, ...]:
    """Return the whole numbers in a comma-separated list; none without a list.

    Raises:
        PlanError: It contains anything else.
    """
    try:
        return tuple(map(int, listed(given or "")))
    except ValueError:
        raise PlanError(
            f"{option} {given!r}: give whole numbers, separated by commas, such as 1,8,32"
        ) from None


def as_path(given: str) -> Path:
    """Return a command-line value as a path. An empty value is a usage error."""
    if not given.strip():
        raise typer.BadParameter("'' is not a path; give one, or leave the option out")
    try:
        given.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter(
            f"{given!r} is not valid text, so a record cannot store it; rename it, or give another path"
        ) from None
    return Path(given)


def plans_in(given: str) -> list[str]:
    """Return the plans in a comma-separated list, which must not be empty.

    Raises:
        CastwiseError: The list is empty.
    """
    if plans := listed(given):
        return plans
    raise CastwiseError(f"--plans {given!r} names no plan; give one or more, such as fp32,bf16-mixed")


def _is_seed(seed: int) -> int:
    if not 0 <= seed < 2**32:
        raise typer.BadParameter(
            f"{seed} is not a seed; allowed: whole numbers from 0 to {2**32 - 1}, as for NumPy"
        )
    return seed


def _is_device(name: str | None) -> str | None:
    if name is not None:
        from castwise.core import devices

        if devices.type_of(name) is None:
            raise typer.BadParameter(f"torch knows no device {name!r} here; allowed: {devices.choices()}")
    return name


def path_option(help: str, default: str | bool) -> Any:
    """Return a command-line option that takes a path. ``--help`` shows ``default`` as the default value."""
    return typer.Option(help=help, parser=as_path, metavar="PATH", show_default=default)


WorkloadName = Annotated[
    str,
    typer.Argument(
        metavar="WORKLOAD",
        help="sine, gpt or digits, with options as in 'sine?size=256'; or file.py:attribute, or package.module:attribute.",
        show_default=False,
    ),
]
Script = Annotated[
    str, typer.Argument(help="The script, or with -m the module, as for python.", show_default=False)
]
ScriptArguments = Annotated[
    list[str] | None, typer.Argument(help="Arguments of the script.", metavar="[ARGS]...", show_default=False)
]
IsModule = Annotated[bool, typer.Option("-m", help="Run a module as a script.")]
PlanName = Annotated[str, typer.Option(help="A preset, a plan line or the path of a plan file.")]
Device = Annotated[
    str | None,
    typer.Option(
        help="cpu, cuda, cuda:1, or another device that torch has.",
        show_default="the accelerator, else the CPU",
        callback=_is_device,
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of weights and data.", callback=_is_seed)]
Traceback = Annotated[bool, typer.Option("--traceback", help="On an error, show the traceback.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show all results, as the page does.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object, the record or an error, and nothing else.")
]
