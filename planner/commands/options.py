"""Groups of options that several commands share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from planner.commands.option_types import MEMORY, RATIO, SIZE, Pin, counts, names

Command = TypeVar("Command", bound=Callable[..., Any])


def stacked(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """A decorator that adds options in the order given."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


INPUTS = stacked(
    click.option(
        "--profile",
        "profile_path",
        type=click.Path(path_type=Path),
        help="Profile to plan for.  [default: the newest in ./profiles]",
    ),
    click.option(
        "--gpus",
        type=click.IntRange(1),
        metavar="N",
        help="Use the first N devices.  [default: all]",
    ),
    click.option(
        "--topology",
        "topology_name",
        default="local.yaml",
        show_default=True,
        help="A file, one in ./topologies, or a preset.",
    ),
)
"""What is planned for."""

TRAINING = stacked(
    click.option(
        "--calibration/--no-calibration",
        default=True,
        show_default=True,
        help="Correct times as planner calibrate found them, where it has.",
    ),
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
        help="Per iteration, of the profile's largest size.  [default: 4 per device]",
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
        help="Samples in a microbatch, as profiled or between.  [default: the best]",
    ),
    click.option(
        "--schedule", type=click.Choice(["1f1b", "gpipe"]), default="1f1b", show_default=True
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
        help="Run forwards twice instead of stashing.",
    ),
    click.option("--device-memory", type=MEMORY, help='Per device, such as "8 GiB".'),
    click.option(
        "--reserve",
        type=SIZE,
        default="1 GiB",
        show_default=True,
        help="Memory per device that is not to be planned with.",
    ),
)
"""How the model is trained."""

SEARCH = stacked(
    click.option(
        "--max-downsets",
        type=click.IntRange(2),
        metavar="N",
        help="Merge operators until there are so few.  [default: some seconds' worth]",
    ),
    click.option(
        "--exact",
        is_flag=True,
        help="Merge no operators, however long it takes; up to 200,000 downsets.",
    ),
    click.option("--straight-pipeline", is_flag=True, help="Of PipeDream: replicate no stage."),
    click.option(
        "--memory-constraint",
        is_flag=True,
        help="Of PipeDream: limit its stash to --device-memory.  [16 GB without it]",
    ),
    click.option(
        "--fewer-machines",
        is_flag=True,
        help="Of PipeDream: leave machines out where that is faster.",
    ),
    click.option(
        "--activation-compression",
        type=RATIO,
        metavar="R",
        help="Of PipeDream: count transfers, of activations compressed R times; 1 for not at all.",
    ),
    click.option(
        "--relaxed",
        is_flag=True,
        help="Of NetSplit: its model as published, in which a device runs any number of"
        " operators at once.",
    ),
    click.option(
        "--engine",
        type=click.Choice(["cp-sat", "gurobi"]),
        help="Of NetSplit: who solves its model.  [default: cp-sat; highs for the bottleneck]",
    ),
    click.option(
        "--contiguous/--no-contiguous",
        default=True,
        show_default=True,
        help="Of NetSplit, and of --cost-model dnn-partitioning: whether the smallest bottleneck"
        " is one of stages that follow each other.",
    ),
    click.option("--seed", default=0, show_default=True),
)
"""Switches of solvers."""

PINS = stacked(
    click.option(
        "--pin",
        "pins",
        type=Pin(),
        multiple=True,
        help="Keep this operator on this device; may be repeated.",
    ),
)
"""What has to be where."""

OWN_STAGES = stacked(
    click.option(
        "--cuts",
        metavar="NAME,NAME",
        callback=names,
        help="Your own stages, for the solver manual, which is asked too then: the last"
        " operators of all but the last.",
    ),
    click.option(
        "--replicas",
        metavar="N,N",
        callback=counts,
        help="Of your own stages: the devices of each.  [default: 1 each]",
    ),
)
"""The user's own stages."""

WHAT_IF = stacked(
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="PATH=VALUE",
        help="What if: another figure, such as links.nic.bandwidth=200Gbps; may be repeated.",
    ),
    click.option(
        "--drop",
        "dropped",
        multiple=True,
        metavar="NAME",
        help="What if: without this device or host; may be repeated.",
    ),
    click.option(
        "--add-host",
        "added",
        multiple=True,
        metavar="NAME",
        help="What if: with one more of this host, or with the hosts of this topology; may be"
        " repeated.",
    ),
)
"""Another cluster than the one at hand."""
