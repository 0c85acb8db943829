"""The commands for scripts, ``run``, ``try`` and ``migrate``, with their options. They call other modules for the work."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from castwise.commands.cli.options import (
    IsModule,
    Json,
    PlanName,
    Script,
    ScriptArguments,
    Traceback,
    Verbose,
    as_path,
    path_option,
    plans_in,
)
from castwise.commands.cli.terminal import answering

_SHOWN = 20
"""Precision problems that are printed before a script runs."""


def run(
    script: Script,
    arguments: ScriptArguments = None,
    plan: PlanName = "bf16-mixed",
    widen: Annotated[
        bool,
        typer.Option(
            "--widen",
            help="If the script makes its model in bf16 or fp16, store in fp32 all weights that the plan does not store in a low format.",
        ),
    ] = False,
    module: IsModule = False,
) -> None:
    """Run an unmodified training script under a plan; under torchrun on all ranks."""
    with answering(show_traceback=False):
        from castwise.bridges.run import EnoughError, Follower, Gate, check, execute
        from castwise.core.plans.plan import as_plan

        check(script, module)
        follower = Follower(as_plan(plan), widen=widen)
    follower.begin()
    if (gate := Gate.of_this_process(follower)) is not None:
        gate.begin()
    elif os.environ.get("RANK", "0") == "0":
        _say_faults("run", script, is_module=module)
    try:
        execute(script, arguments or (), is_module=module)
    except EnoughError:
        os._exit(0)  # skips the script's exit handlers
    except SystemExit as end:
        if gate is not None:
            gate.end(end.__context__)
        raise
    finally:
        follower.end()


def try_(
    script: Script,
    arguments: ScriptArguments = None,
    plans: Annotated[
        str, typer.Option(help="Plans, separated by commas: presets, plan lines or paths of plan files.")
    ] = "fp32,bf16-mixed,bf16-master,fp16-mixed",
    rounds: Annotated[int, typer.Option(help="Interleaved timing rounds.", min=1)] = 8,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Run in the working folder instead of in copies of it.")
    ] = False,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune", help="Tune a plan for the script's model, loss and batches, and try this plan too."
        ),
    ] = False,
    budget: Annotated[float, typer.Option(help="Time limit of tuning in seconds, approximate.")] = 170.0,
    out: Annotated[
        Path | None, path_option("Folder for the tuned plan, its evidence and its page.", "runs/try-SCRIPT")
    ] = None,
    verbose: Verbose = False,
    json: Json = False,
    module: IsModule = False,
    show_traceback: Traceback = False,
) -> None:
    """Run a script's first steps under several plans, in turns, and compare speed, memory and loss."""
    with answering(show_traceback, json=json, verbose=verbose) as answer:
        from castwise.bridges.run import try_script

        chosen = plans_in(plans)
        _say_faults("try", script, is_module=module)
        result = try_script(
            script,
            arguments or (),
            is_module=module,
            plans=chosen,
            rounds=rounds,
            in_place=in_place,
            tune=tune,
            budget_s=budget,
            out=out,
            progress=True,
        )
        answer(result, lambda: [Path(file) for file in result.files])


def _say_faults(command: str, script: str, *, is_module: bool) -> None:
    """Print the precision problems of a script to the error output, in a line each.

    Whether a model arrives with low weights is left to the run itself, which says what the plan does with it.
    """
    from castwise.bridges.scripts.lint import lint

    path = Path(f"{script.replace('.', '/')}.py" if is_module else script)
    if not path.is_file():
        return
    found = [each for each in lint(path).findings if each.rule != "low-weights-without-masters"]
    for each in found[:_SHOWN]:
        typer.echo(f"castwise {command}: {each.line_of_text()}", err=True)
    if len(found) > _SHOWN:
        more = f"{len(found) - _SHOWN} more precision problems are listed by castwise doctor --lint {path}"
        typer.echo(f"castwise {command}: {more}", err=True)


def migrate(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="A script, or a folder of scripts.", parser=as_path, show_default=False
        ),
    ],
    write: Annotated[
        bool, typer.Option("--write", help="Write the files; without this option the changes are only shown.")
    ] = False,
    json: Json = False,
    show_traceback: Traceback = False,
) -> None:
    """Move scripts from Apex amp, Colossal-AI AMP or torch.amp to castwise; shows the change and lists what you have to do."""
    with answering(show_traceback, json=json) as answer:
        from castwise.bridges.scripts import migrate as room

        result = room.migrate(path, write=write)
        answer.give(result.to_dict, result.show)
        result.check()
