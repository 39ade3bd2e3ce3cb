"""`planner convert`."""

import json
from dataclasses import dataclass
from pathlib import Path

import click

from planner import api
from planner.commands.options import JSON, takes
from planner.commands.terminal import say
from planner.support.options import Options, given, option


@dataclass(frozen=True, slots=True)
class Converting(Options):
    """The other format."""

    to: str | None = option(
        "Format to write.",
        choices=("pipedream", "planner"),
        shown="planner where OUT ends in .json",
    )  # fmt: skip
    profile: str | None = option(
        "Profile that a strategy was made for.", metavar="FILE",
        shown="OUT, if it is a graph.txt, else the newest in ./profiles",
    )  # fmt: skip


@click.command()
@click.argument("source", metavar="IN", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@takes(Converting, "converting")
@JSON
def convert(source: Path, target: Path, converting: Converting, as_json: bool) -> None:
    """Writes a profile IN as OUT in another format, or a strategy IN as PipeDream's graph with the
    stage of every node, OUT, and a picture of it for Graphviz beside it.

    \b
    planner convert vgg16.txt profiles/vgg16.json
    planner convert profiles/resnet50.json resnet50.txt --to pipedream
    planner convert strategy.json graph.txt --to pipedream

    IN may be a profile of the planner, PipeDream's graph.txt, or the JSON of dnn-partitioning or
    Piper. Its content decides, not its name.
    """
    written = [str(path) for path in api.convert(source, target, **given(converting))]
    if as_json:
        click.echo(json.dumps({"written": written}))
    else:
        say(f"wrote {' and '.join(written)}")
