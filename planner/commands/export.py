"""`planner export`."""

import json
from dataclasses import dataclass
from pathlib import Path

import click

from planner import api
from planner.commands.options import JSON, OPERATORS, file_option, takes
from planner.commands.terminal import say
from planner.support.errors import OptionError
from planner.support.options import Options, option


def dimension(text: str) -> tuple[str, int, str]:
    """The input, the index of the dimension and its name in a text INPUT.DIM=NAME."""
    place, _, name = text.partition("=")
    argument, _, dim = place.rpartition(".")
    if not argument or not (dim.isascii() and dim.isdecimal()) or not name.isidentifier():
        raise ValueError(f"expected INPUT.DIM=NAME such as x.0=batch, got {text!r}")
    return argument, int(dim), name


@dataclass(frozen=True, slots=True)
class Exporting(Options):
    """How a module is exported."""

    dynamic: tuple[tuple[str, int, str], ...] = option(
        "Make a dimension of an input symbolic, such as x.0=batch. May be repeated.",
        (), metavar="INPUT.DIM=NAME", parse=dimension, words="a dimension of an input",
    )  # fmt: skip
    check: bool = option("Compare the file's outputs and gradients with the module's.", True)
    verbose: bool = option("Show everything that torch prints.", False)


@click.command()
@click.argument("factory", metavar="MODULE:FACTORY")
@file_option("-o", "--output", default=Path("model.onnx"), show_default=True,
             help="ONNX file to write.")  # fmt: skip
@takes(Exporting, "options")
@OPERATORS
@JSON
def export(factory: str, output: Path, options: Exporting, as_json: bool) -> None:
    """Writes a PyTorch module as an ONNX file whose training is the module's training.

    FACTORY is a function without arguments that returns the module and example inputs: a tensor, a
    tuple of tensors, or a dict of tensors by argument. MODULE is a module or a .py file.

    \b
    planner export nets:resnet -o resnet.onnx
    planner export nets:gpt2 -o gpt2.onnx --dynamic input_ids.0=batch

    The module is exported in its own mode. In training mode, BatchNormalization and Dropout are in
    training form.
    """
    from planner.reports.model import export_json, export_lines

    api.check_outputs({"exported model": output}, {})
    module, inputs = api.call_factory(factory)
    shapes, check, verbose = symbolic(options.dynamic), options.check, options.verbose
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
