"""`planner solve` under dnn-partitioning's or Piper's cost model."""

import json
from typing import TYPE_CHECKING

import click

from planner import api
from planner.commands.errors import NO_PLAN
from planner.commands.options import InputNames
from planner.commands.terminal import say, show, spinner

if TYPE_CHECKING:
    from planner.api import Search, Training

# Cost models that plan for graphs of their own, with solvers of their own.
FOREIGN = ("dnn-partitioning", "piper")


def solve_foreign(
    cost_model: str,
    names: InputNames,
    training: "Training",
    search: "Search",
    bandwidth: float | None,
    time_limit_s: float,
    as_json: bool,
) -> int:
    """Plans under the cost model, shows the plans, and returns the exit code."""
    from planner.reports.published import (
        published_json,
        published_lines,
        published_stage_table,
        published_table,
    )

    with spinner(names.gpus) as progress:
        progress(cost_model)
        comparison = api.solve_under(
            cost_model,
            names.profile or api.newest_profile(),
            topology=names.topology,
            gpus=names.gpus,
            training=training,
            search=search,
            bandwidth=bandwidth,
            time_limit_s=time_limit_s,
        )
    if as_json:
        click.echo(json.dumps(published_json(comparison)))
    else:
        show(published_table(comparison))
        if comparison.best.stages:
            show(published_stage_table(comparison))
        for line in published_lines(comparison):
            say(line)
    return 0 if comparison.best.stages else NO_PLAN
