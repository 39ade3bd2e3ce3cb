"""`planner export`."""

import json
from pathlib import Path

import click

from planner import api
from planner.commands.option_types import Dynamic
from planner.commands.options import OPERATORS
from planner.commands.terminal import say
from planner.support.errors import OptionError


@click.command()
@click.argument("factory", metavar="MODULE:FACTORY")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("model.onnx"),
              show_default=True, help="ONNX file to write.")  # fmt: skip
@click.option("--dynamic", "dynamic", type=Dynamic(), multiple=True,
              help="Make a dimension of an input symbolic, such as x.0=batch; may be repeated.",
              )  # fmt: skip
@click.option("--check/--no-check", default=True, show_default=True,
              help="Compare the file's outputs and gradients with the module's.",
              )  # fmt: skip
@OPERATORS
@click.option("--verbose", is_flag=True, help="Show everything that torch prints.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def export(
    factory: str,
    output: Path,
    dynamic: tuple[tuple[str, int, str], ...],
    check: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Writes a PyTorch module as an ONNX file whose training is the module's training.

    FACTORY is a function without arguments that returns the module and example inputs: a tensor, a
    tuple of tensors, or a dict of tensors by argument. MODULE may be a .py file in this folder.

    \b
    planner export nets:resnet -o resnet.onnx
    planner export nets:gpt2 -o gpt2.onnx --dynamic input_ids.0=batch

    The module is exported in its own mode. In training mode, BatchNormalization and Dropout are in
    training form.
    """
    from planner.reports.model import export_json, export_lines

    api.check_outputs({"exported model": output}, {})
    module, inputs = api.call_factory(factory)
    shapes = symbolic(dynamic)
    done = api.export(module, inputs, output, shapes, check=check, verbose=verbose)
    if as_json:
        click.echo(json.dumps(export_json(done)))
    else:
        for line in export_lines(done):
            say(line)


def symbolic(dynamic: tuple[tuple[str, int, str], ...]) -> dict[str, dict[int, str]] | None:
    """The dynamic shapes that --dynamic gives; None where it is not given."""
    shapes: dict[str, dict[int, str]] = {}
    for argument, dim, name in dynamic:
        dims = shapes.setdefault(argument, {})
        if dim in dims:
            raise OptionError(f"--dynamic {argument}.{dim}: given more than once")
        dims[dim] = name
    return shapes or None
