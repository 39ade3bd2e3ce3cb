"""Groups of options that several commands share."""

import os
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass
from enum import StrEnum
from functools import wraps
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args, get_type_hints

import click
from click.types import convert_type

from planner import api
from planner.api import (
    SOLVERS,
    Search,
    Training,
    WhatIf,
    load_operators,
    option_fields,
    own_options,
)
from planner.commands.option_types import MEMORY, SIZE, Pin, counts, names
from planner.commands.terminal import say

if TYPE_CHECKING:
    from planner.api import Inputs

Command = TypeVar("Command", bound=Callable[..., Any])


def stacked(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """A decorator that adds options in the order given."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def packed(
    parameter: str, make: Callable[..., object], *options: Callable[[Any], Any]
) -> Callable[[Command], Command]:
    """A decorator that adds options in the order given; the command gets one value of all.

    Args:
        parameter: the command's, for that value.
        make: the value, from the options by name.
    """

    def add(command: Command) -> Command:
        @wraps(command)
        def with_packed(*arguments: Any, **given: Any) -> Any:
            own = {name: given.pop(name) for name in own_names}
            return command(*arguments, **given, **{parameter: make(**own)})

        params = vars(with_packed).setdefault("__click_params__", [])  # where click collects them
        others = len(params)
        stacked(*options)(with_packed)
        own_names = [one.name for one in params[others:]]
        return cast(Command, with_packed)

    return add


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
    help="Python module that registers operators; may be repeated.  [env: PLANNER_OPERATORS]",
)


class OwnValue(click.ParamType[Any]):
    """A value of a solver's own option, checked by the type of these options."""

    def __init__(self, options: type, field: str, kind: type) -> None:
        self.options, self.field, self.kind = options, field, kind
        self.plain: click.ParamType[Any] = (
            click.Choice([one.value for one in kind])
            if issubclass(kind, StrEnum)
            else convert_type(kind)
        )
        self.name = self.plain.name

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        """The values to choose from, where they are a few."""
        return self.plain.get_metavar(param, ctx)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """The value as the solver takes it."""
        own = self.kind(self.plain.convert(value, param, ctx))
        try:
            self.options(**{self.field: own})
        except ValueError as error:
            return self.fail(str(error), param, ctx)
        return own


def own_option(options: type, field: Field[Any]) -> Callable[[Any], Any]:
    """The option for a field of a solver's own options: a flag, values between commas, or one
    value.
    """
    name, default, words = field.name.replace("_", "-"), field.default, dict(field.metadata)
    (kind,) = {*kinds_of(get_type_hints(options)[field.name])} - {NoneType}
    if kind is bool:
        flags = f"--{name}" if default is False else f"--{name}/--no-{name}"
        shown = default is True
        return click.option(flags, is_flag=True, default=default, show_default=shown, **words)
    if kind in (tuple[str, ...], tuple[int, ...]):
        return click.option(
            f"--{name}", callback=names if kind == tuple[str, ...] else counts, **words
        )
    own = OwnValue(options, field.name, kind)
    shown = default is not None
    return click.option(f"--{name}", type=own, default=default, show_default=shown, **words)


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """The types that a hint joins.

    >>> kinds_of(float | None), kinds_of(tuple[int, ...])
    ((<class 'float'>, <class 'NoneType'>), (tuple[int, ...],))
    """
    return get_args(hint) if isinstance(hint, UnionType) else (hint,)


def solver_options(*, needed: bool) -> Callable[[Command], Command]:
    """The own options of solvers.

    Args:
        needed: of those that are asked only where these are given, or of the others.
    """
    kinds = dict.fromkeys(
        solver.options
        for solver in SOLVERS.values()
        if solver.options is not None and solver.needs_options is needed
    )
    return stacked(*(own_option(kind, field) for kind in kinds for field in option_fields(kind)))


def own_options_of(name: str) -> Callable[[Command], Command]:
    """The own options of one solver."""
    kind = SOLVERS[name].options
    if kind is None:
        raise ValueError(f"the solver {name} has no options of its own")
    return stacked(*(own_option(kind, field) for field in option_fields(kind)))


def solver_list() -> str:
    """All solvers with a line each, for the end of a help text."""
    width = max(map(len, SOLVERS))
    lines = (f"  {name:{width}}  {solver.summary}" for name, solver in SOLVERS.items())
    return "\n".join(("\b", "Solvers:", *lines))


def solver_choice(verb: str, default: Sequence[str]) -> Callable[[Any], Any]:
    """The option --solver.

    Args:
        verb: what the command does with a solver.
        default: the solvers that are asked where none is named.
    """
    rest = [name for name in SOLVERS if name not in default]
    standard = f"all but {', '.join(rest)}" if len(rest) < len(default) else ", ".join(default)
    return click.option(
        "--solver",
        "solvers",
        multiple=True,
        metavar="NAME",
        help=f"{verb} only this one of {', '.join(SOLVERS)}; may be repeated."
        f"  [default: {standard}]",
    )


def search_of(
    max_downsets: int | None, exact: bool, seed: int, pins: tuple[tuple[str, str], ...], **own: Any
) -> Search:
    """How to search.

    Args:
        own: the solvers' own options.
    """
    return Search(max_downsets, exact, seed, pins, own_options(own))


@dataclass(frozen=True, slots=True)
class InputNames:
    """The files that are planned for, as they are typed.

    Attributes:
        profile: None stands for the newest in ./profiles, if all are of one model.
        gpus: number of devices to take; None takes all.
        topology: a file, one in ./topologies, or a preset.
    """

    profile: str | None
    gpus: int | None
    topology: str

    def read(self, *, quiet: bool, **how: Any) -> "Inputs":
        """The files, read.

        Args:
            quiet: whether standard output is not for people.
            how: what else is read; see `api.read_inputs`.
        """
        inputs = api.read_inputs(self.profile, topology=self.topology, gpus=self.gpus, **how)
        for note in inputs.notes:
            say(note, err=quiet)
        return inputs


INPUTS = packed(
    "names",
    InputNames,
    click.option(
        "--profile",
        metavar="FILE",
        help="Profile to plan for: a file, or a name in ./profiles.  [default: the newest there,"
        " if all are of one model]",
    ),
    click.option(
        "--gpus",
        type=click.IntRange(1),
        metavar="N",
        help="Use the first N devices.  [default: all]",
    ),
    click.option(
        "--topology",
        default="local.yaml",
        show_default=True,
        help="Topology to plan for: a file, one in ./topologies, or a preset.",
    ),
)
"""The files that are planned for."""

CALIBRATION = click.option(
    "--calibration/--no-calibration",
    "calibrated",
    default=True,
    show_default=True,
    help="Apply the corrections found by planner calibrate, if there are any.",
)

TRAINING = packed(
    "training",
    Training,
    click.option(
        "--objective",
        type=click.Choice(["iteration", "bottleneck", "latency"]),
        default="iteration",
        show_default=True,
    ),
    click.option(
        "--microbatches",
        type=click.IntRange(1),
        metavar="M",
        help="Microbatches per iteration, of the profile's largest size.  [default: 4 per device]",
    ),
    click.option(
        "--global-batch",
        type=click.IntRange(1),
        metavar="B",
        help="Samples per iteration, instead of --microbatches.",
    ),
    click.option(
        "--microbatch-size",
        type=click.IntRange(1),
        metavar="N",
        help="Samples in a microbatch, profiled or interpolated.  [default: the best]",
    ),
    click.option(
        "--schedule",
        type=click.Choice(["1f1b", "gpipe", "pipedream"]),
        default="1f1b",
        show_default=True,
        help="Order of forwards and backwards. pipedream is asynchronous: it steps after every"
        " microbatch, with older versions of the parameters.",
    ),
    click.option(
        "--vertical-sync",
        is_flag=True,
        help="A microbatch meets equally old parameters in all stages; for --schedule pipedream.",
    ),
    click.option(
        "--optimizer",
        type=click.Choice(["sgd", "momentum", "adam", "adamw"]),
        default="sgd",
        show_default=True,
    ),
    click.option(
        "--recompute",
        type=click.Choice(["auto", "none", "full"]),
        default="auto",
        show_default=True,
        help="Run forward passes twice instead of stashing activations.",
    ),
    click.option("--device-memory", type=MEMORY, help='Memory per device, such as "8 GiB".'),
    click.option(
        "--reserve",
        type=SIZE,
        default="1 GiB",
        show_default=True,
        help="Memory per device that plans leave free.",
    ),
)
"""How the model is trained."""

SEARCH = packed(
    "search",
    search_of,
    click.option(
        "--max-downsets",
        type=click.IntRange(2),
        metavar="N",
        help="Merge operators until the graph has at most N downsets.  [default: as many as some"
        " seconds allow]",
    ),
    click.option(
        "--exact",
        is_flag=True,
        help="Merge no operators, however long it takes; up to 200,000 downsets.",
    ),
    solver_options(needed=False),
    click.option("--seed", default=0, show_default=True),
    click.option(
        "--pin",
        "pins",
        type=Pin(),
        multiple=True,
        help="Keep this operator on this device; may be repeated.",
    ),
    solver_options(needed=True),
)
"""How to search, with the solvers' own options."""

OWN_STAGES = own_options_of("manual")
"""The user's own stages."""

WHAT_IF = packed(
    "what_if",
    WhatIf,
    click.option(
        "--set",
        multiple=True,
        metavar="PATH=VALUE",
        help="What if: change a figure, such as links.nic.bandwidth=200Gbps; may be repeated."
        " PATH is links.NAME.bandwidth or .latency, with the name of links or their ends as a-b;"
        " levels.NAME.bandwidth or .latency; devices.NAME.type; hosts.NAME.cores or .memory; or"
        " device_types.NAME.memory, .memory_bandwidth or .flops.DTYPE.",
    ),
    click.option(
        "--drop",
        multiple=True,
        metavar="NAME",
        help="What if: remove this device or host; may be repeated.",
    ),
    click.option(
        "--add-host",
        multiple=True,
        metavar="NAME",
        help="What if: add a copy of this host, or the hosts of this topology; may be repeated.",
    ),
)
"""Another cluster than the one at hand."""
