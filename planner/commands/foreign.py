"""`planner solve` under dnn-partitioning's or Piper's cost model."""

import json
from pathlib import Path

import click

from planner.commands.ends import NO_PLAN
from planner.commands.printing import show, spinner
from planner.commands.problems import problems_for, say_if_compiling
from planner.errors import OptionError

# Cost models that plan for graphs of their own, with solvers of their own.
FOREIGN = ("dnn-partitioning", "piper")


def under_foreign_model(chosen: Path, topology_name: str) -> int:
    """`solve` under dnn-partitioning's or Piper's cost model; the exit code."""
    from planner.clusters.yaml.read import find_topology
    from planner.formats import DNN_PARTITIONING, PIPER, detect, read_any_profiles
    from planner.formats.dnn_partitioning import read_dnn_partitioning
    from planner.formats.piper import read_piper
    from planner.peers.compare import (
        ForeignModel,
        ForeignOptions,
        foreign_json,
        solve_foreign,
        solve_profile,
    )
    from planner.problem import Recompute
    from planner.reports.foreign import foreign_lines, foreign_stage_table, foreign_table

    given = click.get_current_context().params
    model = ForeignModel(given["cost_model"])
    options = ForeignOptions(
        num_devices=given["gpus"],
        memory_bytes=given["device_memory"],
        batch=given["global_batch"],
        bandwidth_bytes_per_s=given["bandwidth"],
        recompute=Recompute(given["recompute"]),
        max_downsets=given["max_downsets"],
        exact=given["exact"],
        contiguous=given["contiguous"],
        time_limit_s=given["time_limit"],
        seed=given["seed"],
        engine=given["engine"],
    )
    if model is not ForeignModel.DNN_PARTITIONING and not options.contiguous:
        raise OptionError("--no-contiguous is not for --cost-model piper, whose stages are layers")
    form = detect(chosen)
    say_if_compiling()
    with spinner() as say:
        say(model.value)
        if form == DNN_PARTITIONING and model is ForeignModel.DNN_PARTITIONING:
            found = solve_foreign(read_dnn_partitioning(chosen), options)
        elif form == PIPER and model is ForeignModel.PIPER:
            found = solve_foreign(read_piper(chosen), options)
        else:
            path = find_topology(topology_name)
            problems = problems_for(read_any_profiles(chosen), path, given["gpus"], given)
            found = solve_profile(problems[-1], model, options)
    if given["as_json"]:
        click.echo(json.dumps(foreign_json(found)))
    else:
        show(foreign_table(found))
        if found.best.stages:
            show(foreign_stage_table(found))
        for line in foreign_lines(found):
            click.echo(line)
    return 0 if found.best.stages else NO_PLAN
