"""Options of commands, from the fields that declare them (`planner.support.options`)."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.core import ParameterSource

from planner import api
from planner.api import SOLVERS, Search, load_operators
from planner.commands.terminal import say
from planner.support.errors import UnitError
from planner.support.options import (
    Form,
    Option,
    Options,
    checked,
    declared,
    given,
    option,
    typed_as,
)

if TYPE_CHECKING:
    from planner.api import Inputs

HELP_WIDTH = 76
"""Columns of a block of a help text that click does not wrap, on a terminal of 80."""
Command = TypeVar("Command", bound=Callable[..., Any])


def takes(
    kind: type[Options],
    parameter: str,
    *,
    only: Collection[str] = (),
    without: Collection[str] = (),
    shown: Mapping[str, str] = {},
) -> Callable[[Command], Command]:
    """A decorator: the command has an option for each field of a type, and gets a value of it.

    Args:
        parameter: the command's, for that value.
        only: names of the fields that the command has; empty for all.
        without: names of fields that it has not.
        shown: defaults in words, by name, where they are this command's own.
    """
    chosen = [
        one
        for name, one in declared(kind).items()
        if one.help and name not in without and (name in only or not only)
    ]
    changed = [replace(one, shown=shown.get(one.name, one.shown)) for one in chosen]

    def add(command: Command) -> Command:
        @wraps(command)
        def with_options(*arguments: Any, **given: Any) -> Any:
            values = {one.name: given.pop(one.name) for one in chosen}
            return command(*arguments, **given, **{parameter: kind(**values)})

        for one in reversed(changed):
            _click_option(one)(with_options)
        return cast(Command, with_options)

    return add


class _ShownOnce(click.Option):
    """An option of whose flags the help text has the first one, and none that it had before."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """The flag and its value; the help."""
        record = super().get_help_record(ctx)
        if record is None:
            return None
        flags, text = record
        return flags.replace(", ".join(self.opts), self.opts[0]), text


def _click_option(one: Option) -> Callable[[Command], Command]:
    """The option of a command for a field: a flag, or one that takes a value."""
    words = f"{one.help}  [default: {text}]" if (text := default_text(one)) else one.help
    if one.type is bool:
        name = one.flag.removeprefix("--")
        flags = one.flag if one.default is False else f"{one.flag}/--no-{name}"
        return click.option(flags, one.name, is_flag=True, default=one.default, help=words)

    def read(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        if value is None or value == ():
            return one.default
        try:
            return checked(one, value, typed=False)
        except (ValueError, UnitError) as error:
            raise click.BadParameter(str(error), ctx, param) from None

    return click.option(
        *([one.flag, f"--{one.former}"] if one.former else [one.flag]),
        one.name,
        cls=_ShownOnce,
        type=click.UNPROCESSED,
        multiple=one.form is not Form.ONE and not one.separator,
        metavar=metavar(one),
        callback=read,
        help=words,
    )


def default_text(one: Option) -> str:
    """The default value of an option for its help text; "" where none is shown."""
    if one.shown or one.default is None or one.default is False or one.default == ():
        return one.shown
    if one.default is True:
        return one.flag.removeprefix("--")
    return f"{one.default:g}" if isinstance(one.default, float) else str(one.default)


def metavar(one: Option) -> str:
    """The value of an option in its help text."""
    usual = {int: "N", float: "X", Path: "PATH"}.get(one.type, "TEXT")
    return one.metavar or (f"[{'|'.join(one.choices)}]" if one.choices else usual)


SEARCH_KINDS: tuple[type[Options], ...] = (
    Search,
    *dict.fromkeys(one.options for one in SOLVERS.values() if one.options is not None),
)
"""The types of options of searches: those of all solvers, and each solver's own."""


def searching(command: Command) -> Command:
    """A decorator: the command gets a `Search`, with the own options of all solvers."""
    kinds = SEARCH_KINDS[1:]

    @wraps(command)
    def with_search(*arguments: Any, search: Search, **given: Any) -> Any:
        own = [given.pop(kind.__name__) for kind in kinds]
        chosen = tuple(options for options in own if options != type(options)())
        return command(*arguments, search=replace(search, switches=chosen), **given)

    decorated: Callable[..., Any] = with_search
    for kind in reversed(kinds):
        decorated = takes(kind, kind.__name__)(decorated)
    return cast(Command, takes(Search, "search")(decorated))


def given_flags(*kinds: type[Options], without: Collection[str] = ()) -> dict[str, str]:
    """The options that the user has given to this command, as they are typed, by their fields.

    Args:
        kinds: the types of the options.
        without: names of fields that are left out.
    """
    ctx = click.get_current_context()
    return {
        name: typed_as(one, ctx.params[name])
        for kind in kinds
        for name, one in declared(kind).items()
        if name not in without
        and ctx.get_parameter_source(name) not in (None, ParameterSource.DEFAULT)
    }


def check_given_solvers(solvers: Sequence[str], usual: Sequence[str]) -> None:
    """Refuses options that the user has given to this command, and that are of other solvers.

    Args:
        solvers: that are named.
        usual: that are asked where none is named, besides those with options that ask for them.
    """
    optional = (name for name, solver in SOLVERS.items() if solver.needs_options)
    api.check_solvers(solvers or (*usual, *optional), given_flags(*SEARCH_KINDS))


@dataclass(frozen=True, slots=True)
class InputNames(Options):
    """What is planned for, as it is typed."""

    profile: str | None = option(
        "Profile to plan for: a file, or a name in ./profiles.", metavar="FILE",
        shown="the newest there for the topology's devices, if all are of one model",
    )  # fmt: skip
    gpus: int | None = option("Use the first N devices.", least=1, shown="all")
    topology: str = option(
        "Topology to plan for: a file, one in ./topologies, or a preset.", "local.yaml",
        metavar="NAME",
    )  # fmt: skip
    calibration: bool = option(
        "Apply the corrections found by `planner calibrate`, if there are any.", True
    )

    def read(self, *, quiet: bool, **how: Any) -> "Inputs":
        """The files, read.

        Args:
            quiet: whether standard output is not for people.
            how: what else is read; see `api.read_inputs`.
        """
        inputs = api.read_inputs(**given(self), **how)
        for note in inputs.notes:
            say(note, err=quiet)
        return inputs


def _load_operators(ctx: click.Context, parameter: object, modules: tuple[str, ...]) -> None:
    """Imports the modules here, and leaves their names to the ranks that this process starts."""
    if modules:
        os.environ[OPERATORS_VARIABLE] = " ".join(modules)
        load_operators(modules)


OPERATORS_VARIABLE = "PLANNER_OPERATORS"
OPERATORS = click.option(
    "--operators",
    multiple=True,
    metavar="MODULE",
    envvar=OPERATORS_VARIABLE,
    expose_value=False,
    callback=_load_operators,
    help="Python module that registers operators. May be repeated.  [env: PLANNER_OPERATORS]",
)


def file_option(*names: str, help: str, **more: Any) -> Callable[[Command], Command]:
    """An option that names a file."""
    return click.option(*names, type=click.Path(path_type=Path), help=help, **more)


JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
JSON_OF_RANK_0 = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object, on rank 0."
)
NPROC = click.option(
    "--nproc", type=click.IntRange(1), metavar="N", help="Start N processes on this host."
)


def names_of(default: Sequence[str]) -> str:
    """The solvers that are asked where none is named, for a help text."""
    rest = [name for name in SOLVERS if name not in default]
    return f"all but {', '.join(rest)}" if len(rest) < len(default) else ", ".join(default)


def solver_list() -> str:
    """All solvers with their summaries, for the end of a help text."""
    width = max(map(len, SOLVERS))
    lines = (
        fill(
            solver.summary, HELP_WIDTH, initial_indent=f"  {name:{width}}  ",
            subsequent_indent=" " * (width + 4),
        )
        for name, solver in SOLVERS.items()
    )  # fmt: skip
    return "\n".join(("\b", "Solvers:", *lines))
