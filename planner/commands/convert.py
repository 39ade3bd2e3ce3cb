"""`planner convert`."""

import json
from pathlib import Path

import click

from planner import api
from planner.commands.terminal import say


@click.command()
@click.argument("source", metavar="IN", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--to", "form", type=click.Choice(["pipedream", "planner"]),
              help="The format to write.  [default: planner where OUT ends in .json]",
              )  # fmt: skip
@click.option("--profile", metavar="FILE",
              help="Profile that a strategy was made for.  [default: OUT, if it is a graph.txt,"
              " else the newest in ./profiles]")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def convert(
    source: Path, target: Path, form: str | None, profile: str | None, as_json: bool
) -> None:
    """Writes a profile IN as OUT in another format, or a strategy IN as PipeDream's graph with the
    stage of every node, OUT, and a picture of it for Graphviz beside it.

    \b
    planner convert vgg16.txt profiles/vgg16.json
    planner convert profiles/resnet50.json resnet50.txt --to pipedream
    planner convert strategy.json graph.txt --to pipedream

    IN may be a profile of the planner, PipeDream's graph.txt, or the JSON of dnn-partitioning or
    Piper. Its content decides, not its name.
    """
    written = [str(path) for path in api.convert(source, target, to=form, profile=profile)]
    if as_json:
        click.echo(json.dumps({"written": written}))
    else:
        say(f"wrote {' and '.join(written)}")
