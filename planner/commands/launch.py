"""`planner launch`."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from planner import api
from planner.api import Checkpoints, Launching, Loop, LossOptions
from planner.api.files import files_of
from planner.commands.errors import one_of_several
from planner.commands.options import JSON_OF_RANK_0, NPROC, OPERATORS, takes
from planner.commands.terminal import bar, say, show
from planner.support.errors import LaunchError
from planner.support.options import declared, given

if TYPE_CHECKING:
    from planner.api import LaunchReport, Plan


_META = "planner.config"
OTHER_LENGTH = {"steps": "epochs", "epochs": "steps"}


def _read(ctx: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Makes the options of the file the defaults of this call; click reads this option first."""
    if path is not None:
        options = api.read_config(path)
        ctx.meta[_META] = options.pop("config")
        for name in declared(LossOptions).keys() & options.keys():  # repeated, by output
            one = options[name]
            options[name] = [*one.items()] if isinstance(one, dict) else [("", one)]
        ctx.default_map = options
    return path


CONFIG = click.option(
    "--config",
    type=click.Path(path_type=Path),
    is_eager=True,
    callback=_read,
    help="Read options from a YAML file, such as lr: 0.1. The command line wins. Paths in the file"
    " are relative to its folder.",
)


@click.command()
@click.argument("strategy", type=click.Path(path_type=Path))
@NPROC
@CONFIG
@takes(Launching, "launching")
@takes(Loop, "loop")
@takes(LossOptions, "losses", without=["output"], shown={"loss": "as in the profile"})
@takes(Checkpoints, "checkpoints")
@OPERATORS
@JSON_OF_RANK_0
@click.pass_context
def launch(
    ctx: click.Context,
    /,
    strategy: Path,
    nproc: int | None,
    config: Path | None,
    launching: Launching,
    loop: Loop,
    losses: LossOptions,
    checkpoints: Checkpoints,
    as_json: bool,
) -> None:
    """Trains as a STRATEGY says, and shows predicted beside measured times.

    \b
    torchrun --nproc-per-node 8 --no-python planner launch strategy.json
    planner launch strategy.json --nproc 8 --steps 20

    --data names a function without parameters that returns a dataset: its samples, or the batches
    of its DataLoader, are those of a loop on one device, and every rank reads its own part. Or it
    names a function (step, microbatch, inputs) -> (tensors by input name, target), where inputs
    maps the name of each input of the model to its shape and dtype. With several losses, the
    target is a dict by output.
    """
    gone = [name for name in OTHER_LENGTH if _is_from_file(ctx, name) and _is_replaced(ctx, name)]
    changes: dict[str, Any] = {**dict.fromkeys(gone), "config": ctx.meta.get(_META)}
    loop = replace(loop, reports_loss=sys.stderr.isatty(), **changes)

    def check(plan: "Plan") -> None:
        read = {"model": launching.model, "config": config, **files_of(strategy, plan)}
        api.check_outputs({"trace": launching.trace, "log": loop.log_file}, read)

    if nproc is not None and "RANK" not in os.environ:
        ctx.exit(
            api.start_launch(strategy, nproc, _forwarded(), checkpoints=checkpoints, check=check)
        )
    with one_of_several(), bar("Training") as tick:
        report = api.launch(
            strategy,
            report=lambda line: say(line, err=True),
            progress=lambda done, total, loss: tick(done, total, _loss_text(loss)),
            check=check,
            **given(loop), **given(losses), **given(launching), **given(checkpoints),
        )  # fmt: skip
    if report is not None:
        _print_report(_with_origin(ctx, report), as_json)
        if report.failure is not None:
            raise LaunchError(report.failure)


def _is_from_file(ctx: click.Context, name: str) -> bool:
    """Whether a parameter's value is the file's."""
    return ctx.get_parameter_source(name) is ParameterSource.DEFAULT_MAP


def _is_replaced(ctx: click.Context, name: str) -> bool:
    """Whether the command line has another value than the file; --steps replaces --epochs, too."""
    other = OTHER_LENGTH.get(name)
    on_line = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    return not _is_from_file(ctx, name) or ctx.get_parameter_source(other or name) in on_line


def _with_origin(ctx: click.Context, report: "LaunchReport") -> "LaunchReport":
    """The report with a note on the options that are from a file."""
    if _META not in ctx.meta:
        return report
    listed = [one for one in ctx.command.params if one.name in (ctx.default_map or {})]
    taken = [one.opts[0] for one in listed if not _is_replaced(ctx, one.name or "")]
    replaced = [one.opts[0] for one in listed if one.opts[0] not in taken]
    note = f"options of {ctx.meta[_META]}: {', '.join(taken) or 'none'}"
    note += f"; replaced on the command line: {', '.join(replaced)}" if replaced else ""
    return replace(report, notes=(*report.notes, note))


def _loss_text(loss: float | None) -> str:
    """What the progress bar says of a step."""
    return "" if loss is None else f", loss {loss:.4g}"


def _print_report(report: "LaunchReport", as_json: bool) -> None:
    """Predicted beside measured times, and the loss."""
    from planner.reports.launch import launch_json, launch_tables, loss_lines

    if as_json:
        click.echo(json.dumps(launch_json(report)))
        return
    for table in launch_tables(report):
        show(table)
    for line in (*loss_lines(report), *(f"note: {note}" for note in report.notes)):
        say(line)


def _forwarded() -> list[str]:
    """This command's options for its ranks: all but --nproc, and those that they read from a file
    themselves.
    """
    ctx = click.get_current_context()
    arguments: list[str] = []
    for parameter in ctx.command.params:
        value, name = ctx.params.get(parameter.name or ""), parameter.opts[0]
        if parameter.name in ("strategy", "nproc") or value is None:
            continue
        if _is_from_file(ctx, parameter.name or ""):
            continue
        if isinstance(value, bool):
            arguments += [name] if value else parameter.secondary_opts[:1]
            continue
        values = value if isinstance(value, tuple) else (value,)
        if isinstance(value, dict):
            values = tuple(f"{key}={one}" for key, one in value.items())
        for one in values:
            arguments += [name, str(one)]
    return arguments
