"""`planner inspect`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from planner import api
from planner.api import ModelOptions
from planner.commands.options import JSON, OPERATORS, takes
from planner.commands.terminal import say, show
from planner.support.options import given

if TYPE_CHECKING:
    from planner.api import Inspection


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@takes(ModelOptions, "options", only=["batch", "dims", "tie", "untie"])
@OPERATORS
@JSON
def inspect(model: Path, options: ModelOptions, as_json: bool) -> None:
    """Shows the operators and parameters of an ONNX MODEL, and what is trained and why.

    Weights in external data are not read. Shapes and FLOPs need the size of each symbolic
    dimension.

    \b
    planner inspect gpt2.onnx
    planner inspect gpt2.onnx --batch 4 --dim seq=128 --json
    """
    found = api.inspect(model, **given(options))
    for warning in found.warnings:
        say(f"warning: {warning}" if not warning.startswith("note: ") else warning, err=True)
    if as_json:
        from planner.reports.model import inspect_json

        click.echo(json.dumps(inspect_json(found)))
    else:
        _print_inspection(found)


def _print_inspection(found: "Inspection") -> None:
    """Everything for people."""
    from planner.reports.model import inspect_lines, module_table, parameter_table, type_table

    show(type_table(found))
    if found.parts:
        show(module_table(found))
    show(parameter_table(found))
    for line in inspect_lines(found):
        say(line)
