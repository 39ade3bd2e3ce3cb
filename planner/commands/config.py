"""The option --config: options of `planner launch` from a file."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from planner import api

if TYPE_CHECKING:
    from planner.api import LaunchReport

_META = "planner.config"
OTHER_LENGTH = {"steps": "epochs", "epochs": "steps"}


def _read(ctx: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Makes the options of the file the defaults of this call; click reads this option first."""
    if path is not None:
        options = api.read_config(path)
        ctx.meta[_META] = options.pop("config")
        ctx.default_map = {_parameter(name): _as_given(name, one) for name, one in options.items()}
    return path


CONFIG = click.option(
    "--config",
    type=click.Path(path_type=Path),
    is_eager=True,
    callback=_read,
    help="Read options from a YAML file, such as lr: 0.1; the command line wins. Paths in it are"
    " relative to its folder.",
)


def _parameter(name: str) -> str:
    """The command's parameter for an argument of `api.launch`."""
    return "model_path" if name == "model" else name


def _as_given(name: str, value: Any) -> Any:
    """A value as the command line gives it: --loss and --class-dim once for each output."""
    if name not in ("loss", "class_dim"):
        return value
    return [f"{out}={one}" for out, one in value.items()] if isinstance(value, dict) else [value]


def is_from_file(ctx: click.Context, name: str) -> bool:
    """Whether a parameter's value is the file's."""
    return ctx.get_parameter_source(name) is ParameterSource.DEFAULT_MAP


def _is_replaced(ctx: click.Context, name: str) -> bool:
    """Whether the command line has another value than the file; --steps replaces --epochs, too."""
    other = OTHER_LENGTH.get(name)
    given = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    return not is_from_file(ctx, name) or ctx.get_parameter_source(other or name) in given


def without_replaced(ctx: click.Context, how: Mapping[str, Any]) -> dict[str, Any]:
    """The options without --epochs of a file where the command line has --steps, or the reverse."""
    gone = [one for one in OTHER_LENGTH if is_from_file(ctx, one) and _is_replaced(ctx, one)]
    return {**how, **dict.fromkeys(gone)}


def name_of_config(ctx: click.Context) -> str:
    """The name and the hash of the file; "" without one."""
    return str(ctx.meta.get(_META, ""))


def with_origin(ctx: click.Context, report: "LaunchReport") -> "LaunchReport":
    """The report with a note on the options that are from a file."""
    if _META not in ctx.meta:
        return report
    given = [one for one in ctx.command.params if one.name in (ctx.default_map or {})]
    taken = [one.opts[0] for one in given if not _is_replaced(ctx, one.name or "")]
    replaced = [one.opts[0] for one in given if one.opts[0] not in taken]
    note = f"options of {name_of_config(ctx)}: {', '.join(taken) or 'none'}"
    note += f"; replaced on the command line: {', '.join(replaced)}" if replaced else ""
    return replace(report, notes=(*report.notes, note))
