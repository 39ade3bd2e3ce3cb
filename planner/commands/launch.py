"""`planner launch`."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner import api
from planner.api.files import files_of
from planner.commands.config import (
    CONFIG,
    is_from_file,
    name_of_config,
    with_origin,
    without_replaced,
)
from planner.commands.errors import one_of_several
from planner.commands.option_types import loss_options
from planner.commands.options import OPERATORS, packed
from planner.commands.terminal import bar, say, show
from planner.commands.training_options import LOOP

if TYPE_CHECKING:
    from planner.api import LaunchReport


CHECKPOINTS = packed(
    "checkpoints", dict,
    click.option("--checkpoint", type=click.Path(path_type=Path), metavar="DIR",
                 help="Folder for checkpoints; one is written at the end."),
    click.option("--checkpoint-every", type=click.IntRange(1), metavar="N",
                 help="Write a checkpoint after every N steps, too."),
    click.option("--checkpoint-keep", type=click.IntRange(1), metavar="N", default=3,
                 show_default=True, help="Number of checkpoints that stay, the newest ones."),
    click.option("--resume", type=click.Path(path_type=Path), metavar="DIR",
                 help="Go on from a checkpoint, or from the newest one in a folder; --steps counts"
                 " from the very first."),
)  # fmt: skip


@click.command()
@click.argument("strategy", type=click.Path(path_type=Path))
@click.option("--nproc", type=click.IntRange(1), metavar="N",
              help="Start N processes on this host.")  # fmt: skip
@click.option("--model", "model_path", type=click.Path(path_type=Path),
              help="The ONNX file, if it is not where the strategy says.")  # fmt: skip
@CONFIG
@LOOP
@loss_options("as in the profile")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto",
              show_default=True)  # fmt: skip
@click.option("--hang-timeout", type=click.FloatRange(0), default=20, show_default=True,
              metavar="S",
              help="Seconds that a rank may always stand in one action; 0: for ever.")  # fmt: skip
@click.option("--trace", type=click.Path(path_type=Path),
              help="Write a measured iteration as a trace for Perfetto.")  # fmt: skip
@click.option("--track-memory", is_flag=True,
              help="Track memory in one more step, which is slow.")  # fmt: skip
@CHECKPOINTS
@OPERATORS
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, on rank 0.")
@click.pass_context
def launch(
    ctx: click.Context,
    /,
    strategy: Path,
    nproc: int | None,
    model_path: Path | None,
    trace: Path | None,
    config: Path | None,
    as_json: bool,
    checkpoints: dict[str, Any],
    **how: Any,
) -> None:
    """Trains as a STRATEGY says, and shows predicted beside measured times.

    \b
    torchrun --nproc-per-node 8 --no-python planner launch strategy.json
    planner launch strategy.json --nproc 8 --steps 20

    \b
    --data names a function without parameters that returns a dataset: its samples, or the batches
    of its DataLoader, are those of a loop on one device, and every rank reads its own part. Or it
    names a function (step, microbatch, inputs) -> (tensors by input name, target), where inputs
    maps the name of each input of the model to its shape and dtype. With several losses, the
    target is a dict by output.
    """
    how = {**without_replaced(ctx, how), "config": name_of_config(ctx)}
    written = {"trace": trace, "log": how["log"]}
    if any(written.values()):
        read = {"model": model_path, "config": config, **files_of(strategy)}
        api.check_outputs(written, read)
    if nproc is not None and "RANK" not in os.environ:
        ctx.exit(api.start_launch(strategy, nproc, forwarded()))
    with one_of_several(), bar("Training") as tick:
        report = api.launch(
            strategy,
            model=model_path,
            trace=trace,
            **checkpoints,
            report=lambda line: say(line, err=True),
            progress=lambda done, total, loss: tick(done, total, loss_text(loss)),
            tells=sys.stderr.isatty(),
            **how,
        )
    if report is not None:
        print_report(with_origin(ctx, report), as_json)


def loss_text(loss: float | None) -> str:
    """What the progress bar says of a step."""
    return "" if loss is None else f", loss {loss:.4g}"


def print_report(report: "LaunchReport", as_json: bool) -> None:
    """Predicted beside measured times, and the loss."""
    from planner.reports.launch import launch_json, launch_tables, loss_lines

    if as_json:
        click.echo(json.dumps(launch_json(report)))
        return
    for table in launch_tables(report):
        show(table)
    for line in (*loss_lines(report), *(f"note: {note}" for note in report.notes)):
        say(line)


def forwarded() -> list[str]:
    """This command's options for its ranks: all but --nproc, and those that they read from a file
    themselves.
    """
    ctx = click.get_current_context()
    arguments: list[str] = []
    for parameter in ctx.command.params:
        value, name = ctx.params.get(parameter.name or ""), parameter.opts[0]
        if parameter.name in ("strategy", "nproc") or value is None:
            continue
        if is_from_file(ctx, parameter.name or ""):
            continue
        if isinstance(value, bool):
            arguments += [name] if value else parameter.secondary_opts[:1]
            continue
        given = value if isinstance(value, tuple) else (value,)
        if isinstance(value, dict):
            given = tuple(f"{key}={one}" for key, one in value.items())
        for one in given:
            arguments += [name, str(one)]
    return arguments
