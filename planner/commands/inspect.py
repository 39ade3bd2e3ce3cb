"""`planner inspect`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from planner import api
from planner.commands.option_types import Dimension, distinct
from planner.commands.options import OPERATORS
from planner.commands.terminal import say, show

if TYPE_CHECKING:
    from planner.api import Inspection


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--batch", type=click.IntRange(1), help="Samples per microbatch, for the FLOPs.")
@click.option("--dim", "dims", type=Dimension(), multiple=True, callback=distinct,
              help="Size of a symbolic dimension; may be repeated.")  # fmt: skip
@click.option("--tie", multiple=True, metavar="NAME[=OTHER]",
              help="Keep this initializer one parameter, or make OTHER the same one; may be"
              " repeated.")  # fmt: skip
@click.option("--untie", multiple=True, metavar="NAME",
              help="Give each module that reads this initializer its own; may be repeated.",
              )  # fmt: skip
@OPERATORS
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(
    model: Path,
    batch: int | None,
    dims: tuple[tuple[str, int], ...],
    tie: tuple[str, ...],
    untie: tuple[str, ...],
    as_json: bool,
) -> None:
    """Shows the operators and parameters of an ONNX MODEL, and what is trained and why.

    Weights in external data are not read. Shapes and FLOPs need the size of each symbolic
    dimension.

    \b
    planner inspect gpt2.onnx
    planner inspect gpt2.onnx --batch 4 --dim seq=128 --json
    """
    found = api.inspect(model, batch=batch, dims=dict(dims), tie=tie, untie=untie)
    for warning in found.warnings:
        say(f"warning: {warning}" if not warning.startswith("note: ") else warning, err=True)
    if as_json:
        from planner.reports.model import inspect_json

        click.echo(json.dumps(inspect_json(found)))
    else:
        print_inspection(found)


def print_inspection(found: "Inspection") -> None:
    """Everything for people."""
    from planner.reports.model import inspect_lines, module_table, parameter_table, type_table

    show(type_table(found))
    if found.parts:
        show(module_table(found))
    show(parameter_table(found))
    for line in inspect_lines(found):
        say(line)
