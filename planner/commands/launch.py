"""`planner launch`."""

import json
import os
from pathlib import Path
from typing import Any

import click

from planner.commands.ends import one_of_several
from planner.commands.outputs import check_output
from planner.commands.printing import bar, show


@click.command()
@click.argument("strategy", type=click.Path(path_type=Path))
@click.option("--nproc", type=click.IntRange(1), metavar="N",
              help="Start N processes with torchrun.")  # fmt: skip
@click.option("--model", "model_path", type=click.Path(path_type=Path),
              help="The ONNX file, if it is not where the strategy says.")  # fmt: skip
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True)
@click.option("--lr", "learning_rate", type=float,
              help="Learning rate.  [default: the optimizer's usual one]")  # fmt: skip
@click.option("--loss", type=click.Choice(["auto", "cross-entropy", "mse"]), default="auto",
              show_default=True)  # fmt: skip
@click.option("--data", metavar="MODULE:FUNCTION",
              help="Where microbatches come from.  [default: synthetic]")  # fmt: skip
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto",
              show_default=True)  # fmt: skip
@click.option("--threads", type=click.IntRange(1),
              help="CPU threads per rank.  [default: as profiled]")  # fmt: skip
@click.option("--seed", type=int, help="Of synthetic data.  [default: the strategy's]")
@click.option("--trace", type=click.Path(path_type=Path),
              help="Write a measured iteration, to be opened with Perfetto.")  # fmt: skip
@click.option("--track-memory", is_flag=True,
              help="Watch memory in one more step, which is slow.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, on rank 0.")
@click.pass_context
def launch(
    ctx: click.Context,
    /,
    strategy: Path,
    nproc: int | None,
    as_json: bool,
    steps: int,
    **options: Any,
) -> None:
    """Trains as a STRATEGY says, and shows predicted beside measured times.

    \b
    torchrun --nproc-per-node 8 --no-python planner launch strategy.json
    planner launch strategy.json --nproc 8 --steps 20

    \b
    --data names a function (step, microbatch, inputs) -> (tensors by input name, target), where
    inputs maps the name of each input of the model to its shape and dtype. Every rank calls it
    for its own microbatches.
    """
    if options["trace"] is not None:
        check_output([options["trace"]], {"strategy": strategy, "model": options["model_path"]})
    if nproc is not None and "RANK" not in os.environ:
        from planner.launcher.torchrun import start_torchrun

        ctx.exit(start_torchrun(strategy, nproc, forwarded()))
    from planner.launcher.run import launch as run
    from planner.reports.launch import launch_json, launch_tables, loss_line

    with one_of_several(), bar("Training") as tick:
        report = run(
            strategy,
            steps=steps,
            report=lambda line: click.echo(line, err=True),
            progress=lambda step: tick(step, steps),
            **options,
        )
    if report is None:
        return
    if as_json:
        click.echo(json.dumps(launch_json(report)))
        return
    for table in launch_tables(report):
        show(table)
    for line in (loss_line(report), *(f"note: {note}" for note in report.notes)):
        click.echo(line)


def forwarded() -> list[str]:
    """This command's arguments for its ranks: all but --nproc and the strategy."""
    ctx = click.get_current_context()
    found: list[str] = []
    for parameter in ctx.command.params:
        value = ctx.params.get(parameter.name or "")
        if parameter.name in ("strategy", "nproc") or value is None or value is False:
            continue
        found += [parameter.opts[0]] if value is True else [parameter.opts[0], str(value)]
    return found
