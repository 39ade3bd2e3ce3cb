"""`planner compare-trace`."""

import json
from pathlib import Path

import click

from planner import api
from planner.commands.options import JSON, file_option
from planner.commands.terminal import say, show


@click.command("compare-trace")
@click.argument("predicted", type=click.Path(path_type=Path))
@click.argument("measured", type=click.Path(path_type=Path))
@file_option(
    "-o", "--output", help="Write both into one trace for Perfetto, with each device twice."
)
@JSON
def compare_trace(predicted: Path, measured: Path, output: Path | None, as_json: bool) -> None:
    """Shows where a PREDICTED and a MEASURED trace of one strategy differ.

    \b
    planner simulate strategy.json --trace predicted.json
    planner launch strategy.json --nproc 2 --trace measured.json
    planner compare-trace predicted.json measured.json -o both.json

    Times are means over the microbatches of one iteration: for each stage forward and backward,
    for each all-reduce and optimizer step, and for the transfers between each pair of devices.
    """
    from planner.reports.traces import trace_json, trace_tables

    api.check_outputs({"trace": output}, {"predicted trace": predicted, "measured trace": measured})
    before, after = api.read_trace(predicted), api.read_trace(measured)
    comparison = api.compare_traces(before, after)
    if output is not None:
        api.write_overlay(before, after, output)
    if as_json:
        click.echo(json.dumps(trace_json(comparison, None if output is None else str(output))))
        return
    for table in trace_tables(comparison):
        show(table)
    if output is not None:
        say(f"wrote {output}")
