"""The commands for workloads, with their options. They call :mod:`castwise.commands.jobs` for the work.

The commands for scripts are in :mod:`castwise.commands.cli.scripts`.
"""

from __future__ import annotations

import os
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from castwise.commands.cli import scripts
from castwise.commands.cli.options import (
    Device,
    Json,
    PlanName,
    Seed,
    Traceback,
    Verbose,
    WorkloadName,
    as_path,
    counts,
    listed,
    path_option,
    plans_in,
)
from castwise.commands.cli.terminal import Commands, answering, folder_for
from castwise.errors import CastwiseError

app = typer.Typer(
    name="castwise",
    cls=Commands,
    help="Automatic mixed precision for PyTorch: measure precision plans on this machine, and train under them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        import castwise

        typer.echo(f"castwise {castwise.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def bench(
    workload: WorkloadName,
    plans: Annotated[
        str,
        typer.Option(
            help="Plans, separated by commas: presets, plan lines such as bf16-mixed+ops.exp=fp32, or paths of plan files. "
            "fp32 is always included."
        ),
    ] = "fp32,bf16-mixed",
    steps: Annotated[
        int, typer.Option(help="Training steps per plan, or inference calls without training.")
    ] = 50,
    rounds: Annotated[
        int,
        typer.Option(help="Interleaved timing rounds of each plan, divided among its starts."),
    ] = 15,
    starts: Annotated[
        int,
        typer.Option(
            help="Number of new processes in which each plan is timed; 0 to time all plans once, in one process."
        ),
    ] = 5,
    device: Device = None,
    seed: Seed = 0,
    memory: Annotated[bool, typer.Option(help="Measure memory, each plan in a process of its own.")] = True,
    training: Annotated[
        bool | None,
        typer.Option(
            help="Train, or only measure inference.",
            show_default="training if the workload has an optimizer and a loss",
        ),
    ] = None,
    inference: Annotated[bool, typer.Option(help="Measure inference.")] = True,
    out: Annotated[
        Path | None, path_option("Folder for the page and the record.", "runs/bench-WORKLOAD")
    ] = None,
    verbose: Verbose = False,
    json: Json = False,
    show_traceback: Traceback = False,
) -> None:
    """Run a workload under several plans, in turns, and show the time, memory and loss of each."""
    with answering(show_traceback, json=json, verbose=verbose) as answer:
        from castwise.commands.jobs import bench as job
        from castwise.core.plans.plan import as_plan

        chosen = plans_in(plans)
        for plan in chosen:
            as_plan(plan)  # check before creating or measuring anything
        with folder_for(out, "bench", workload) as folder:
            result = job.bench(
                workload, chosen, device=device, steps=steps, rounds=rounds, starts=starts, seed=seed,
                training=training, inference=inference, memory=memory, progress=True,
            )  # fmt: skip
            answer(result, lambda: result.save(folder))


_OF_A_SCRIPT = {"ignore_unknown_options": True, "allow_interspersed_args": False}
app.command(context_settings=_OF_A_SCRIPT)(scripts.run)
app.command(name="try", context_settings=_OF_A_SCRIPT)(scripts.try_)


@app.command()
def tune(
    workload: WorkloadName,
    goal: Annotated[
        str,
        typer.Option(
            help="time: the fastest sound plan; memory: the sound plan with the lowest peak memory; numerics: the plan of one low "
            "format with the fewest regions in fp32, whatever its speed; inference: the fastest plan for a model that is not trained "
            "any more, whose outputs are as good as fp32's."
        ),
    ] = "time",
    formats: Annotated[
        str | None,
        typer.Option(
            help="Formats, separated by commas: fp32, tf32, bf16, fp16.",
            show_default="all; bf16 for --goal numerics",
        ),
    ] = None,
    budget: Annotated[float, typer.Option(help="Time limit in seconds, approximate.")] = 170.0,
    verify_steps: Annotated[
        int,
        typer.Option(help="Steps of each final training run that compares the plan with fp32; 0 for none."),
    ] = 0,
    verify_seeds: Annotated[
        int, typer.Option(help="Number of pairs of training runs, one under the plan and one in fp32.")
    ] = 8,
    warmup_steps: Annotated[
        int | None,
        typer.Option(
            help="Test the gradients again after this many fp32 steps; 0 for no second test.",
            show_default="as many as are cheap, at most 300",
        ),
    ] = None,
    accumulate: Annotated[int, typer.Option(help="Microbatches accumulated per update.")] = 1,
    world_size: Annotated[
        int | None,
        typer.Option(
            help="Number of data-parallel ranks that average gradients.", show_default="torchrun's, or 1"
        ),
    ] = None,
    compile_: Annotated[
        str,
        typer.Option(
            "--compile",
            help="never; auto: compile the model if that is faster; always: compare only compiled plans. Compiling takes time, "
            "so give a longer --budget.",
        ),
    ] = "never",
    memory: Annotated[
        bool, typer.Option(help="Measure peak memory, each plan in a process of its own.")
    ] = True,
    batch_sizes: Annotated[
        str | None,
        typer.Option(
            help="With --goal inference: samples per call at which latencies are measured, separated by commas.",
            show_default="the workload's batches",
        ),
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option(
            help="Search even if an earlier search found a plan for the same model, data, device and versions."
        ),
    ] = False,
    device: Device = None,
    seed: Seed = 0,
    out: Annotated[
        Path | None, path_option("Folder for the plan, the evidence and the page.", "runs/tune-WORKLOAD")
    ] = None,
    verbose: Verbose = False,
    json: Json = False,
    show_traceback: Traceback = False,
) -> None:
    """Find by experiment the fastest plan whose gradients match fp32's within the noise; under torchrun on all ranks."""
    with answering(show_traceback, json=json, verbose=verbose) as answer:
        from castwise.commands.jobs import tune as job
        from castwise.commands.jobs.processes import joined
        from castwise.core.casting import default_device_type
        from castwise.core.session.process import find_device
        from castwise.lab.search.axes import FORMATS

        chosen = FORMATS if formats is None else tuple(listed(formats))
        with joined(find_device("tune", device, default_device_type()), "castwise tune") as (rank, where):
            first = rank == 0  # only this rank prints and writes
            with folder_for(out, "tune", workload, make=first) as folder:
                result = job.tune(
                    workload, goal=goal, formats=chosen, budget_s=budget, verify_steps=verify_steps,
                    verify_seeds=verify_seeds, warmup_steps=warmup_steps, accumulate=accumulate, world_size=world_size,
                    compile=compile_, memory=memory, batch_sizes=counts("--batch-sizes", batch_sizes), fresh=fresh, device=where, seed=seed, out=folder, progress=True,
                )  # fmt: skip
        if first:
            answer(result, lambda: result.files)


@app.command()
def train(
    workload: WorkloadName,
    plan: PlanName = "bf16-mixed",
    steps: Annotated[int, typer.Option(help="Training steps.")] = 200,
    out: Annotated[Path | None, path_option("Folder for the results.", "runs/train-WORKLOAD")] = None,
    device: Device = None,
    seed: Seed = 0,
    layout: Annotated[
        str | None,
        typer.Option(
            help="How torchrun's processes divide the work: dp2, fsdp2, tp2, pp2, products such as dp2xtp2.",
            show_default="dp over all of them",
        ),
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(help="Microbatches per step of a pipeline.", show_default="two per stage")
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(help="Schedule of a pipeline: gpipe, 1f1b, interleaved.", show_default="1f1b"),
    ] = None,
    save_every: Annotated[
        int, typer.Option(help="Number of steps between checkpoints; the last step is saved too; 0 for none.")
    ] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the newest complete checkpoint in the folder.")
    ] = False,
    json: Json = False,
    show_traceback: Traceback = False,
) -> None:
    """Train a workload under a plan; writes TensorBoard events, JSON lines, curves and weights."""
    # A rank that the launcher terminates still writes a record of the failure on another rank.
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    with answering(show_traceback, json=json, terminable=alone) as answer:
        from castwise.commands.jobs import train as job
        from castwise.commands.jobs.processes import started
        from castwise.core.plans.plan import as_plan

        chosen = as_plan(plan)
        leads = started()[0] == 0
        with folder_for(out, "train", workload, make=leads) as folder:
            result = job.train(
                workload, chosen, steps=steps, out=folder, device=device, seed=seed, layout=layout,
                microbatches=microbatches, schedule=schedule, save_every=save_every, resume=resume, progress=True,
            )  # fmt: skip
        if leads:
            files = [folder / "result.json", *(folder / name for name in result.files)]
            answer(result, lambda: files)


@app.command()
def doctor(
    workload: Annotated[
        str | None,
        typer.Argument(
            metavar="[WORKLOAD]", help="Also measure training steps of this workload.", show_default=False
        ),
    ] = None,
    lint: Annotated[
        Path | None,
        path_option(
            "Measure nothing: list the precision problems of a script, or of all scripts in a folder. The exit code is 1 if there are any.",
            False,
        ),
    ] = None,
    device: Device = None,
    verbose: Verbose = False,
    json: Json = False,
    show_traceback: Traceback = False,
) -> None:
    """Measure the speed of each format on this device and what limits a workload; or check a script."""
    with answering(show_traceback, json=json, verbose=verbose) as answer:
        if lint is not None:
            if workload is not None:
                raise CastwiseError("doctor takes a workload or --lint PATH, not both: call it twice")
            from castwise.bridges.scripts.lint import lint as read

            said = read(lint)
            answer.give(said.to_dict, said.show)
            if said.findings or said.problems:
                raise typer.Exit(1)
            return
        from castwise.lab.workloads.workload import find_workload

        found = None if workload is None else find_workload(workload)
        from castwise.commands.jobs import doctor as job

        result = job.doctor(found, device=device, progress=True)
        answer(result)


@app.command()
def inspect(
    workload: WorkloadName,
    only: Annotated[
        str, typer.Option(help="Tools, separated by commas: nonfinite, operators, compare, forecast.")
    ] = "nonfinite,operators,compare,forecast",
    plan: PlanName = "bf16-mixed",
    against: Annotated[
        str, typer.Option(help="The plan with which the compare tool compares --plan.")
    ] = "fp32",
    formats: Annotated[
        str,
        typer.Option(
            help="Formats for the forecast tool, separated by commas: fp16, bf16, fp8_e4m3, fp8_e5m2.",
            show_default="all of them",
        ),
    ] = "",
    device: Device = None,
    seed: Seed = 0,
    out: Annotated[
        Path | None, path_option("Folder for the pages and the records.", "runs/inspect-WORKLOAD")
    ] = None,
    verbose: Verbose = False,
    json: Json = False,
    show_traceback: Traceback = False,
) -> None:
    """Inspect a workload's numerics: non-finite values and their cause, operators and casts, errors by module, other formats."""
    with answering(show_traceback, json=json, verbose=verbose) as answer:
        from castwise.commands.jobs import inspect as job

        with folder_for(out, "inspect", workload) as folder:
            result = job.inspect(
                workload, only=listed(only), plan=plan, against=against, formats=listed(formats), device=device, seed=seed,
                progress=True,
            )  # fmt: skip
            answer(result, lambda: result.save(folder))


@app.command()
def replay(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="A recorded step, or a folder of recorded steps, of which the newest is replayed.",
            parser=as_path,
            show_default=False,
        ),
    ],
    workload: Annotated[
        str | None,
        typer.Option(
            help="Workload whose model and loss are run. A workload is code, so the name in the record is shown, but never run.",
            show_default=False,
        ),
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(
            help="A preset, a plan line or the path of a plan file.", show_default="the recorded one"
        ),
    ] = None,
    device: Device = None,
    rank: Annotated[
        int | None,
        typer.Option(
            help="Replay only the part of this rank, if several ranks took the step.",
            show_default="all",
        ),
    ] = None,
    find: Annotated[
        bool, typer.Option(help="Find the operator that first returned a value that is not finite.")
    ] = True,
    out: Annotated[
        Path | None, path_option("Folder for the record of the replay.", "none is written")
    ] = None,
    json: Json = False,
    show_traceback: Traceback = False,
) -> None:
    """Repeat a step that a Recorder has written, bit for bit or under another plan, and find the first failure."""
    with answering(show_traceback, json=json) as answer:
        from castwise.lab.watch.replay import replay as make_again

        result = make_again(folder, workload=workload, plan=plan, device=device, rank=rank, find=find)
        answer(result, lambda: [] if out is None else result.write(out))


app.command()(scripts.migrate)


@app.command()
def schema(
    name: Annotated[str, typer.Argument(metavar="NAME", help="plan or evidence.", show_default=False)],
    json: Json = False,
    show_traceback: Traceback = False,
) -> None:
    """Print the JSON Schema of plan.json or evidence.json."""
    with answering(show_traceback, json=json) as answer:
        from castwise.core import schemas

        found = schemas.schema(name)
        record = {"kind": "schema", "version": schemas.RECORD_VERSION, "name": name, "schema": found}
        answer.give(lambda: record, lambda console: console.out(dumps(found, indent=1), highlight=False))
