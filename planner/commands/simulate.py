"""`planner simulate`."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from planner import api
from planner.commands.errors import NO_PLAN
from planner.commands.options import (
    CALIBRATION,
    INPUTS,
    OWN_STAGES,
    TRAINING,
    WHAT_IF,
    InputNames,
)
from planner.commands.terminal import say, say_if_compiling, show, show_chart
from planner.support.errors import OptionError

if TYPE_CHECKING:
    from planner.api import Account, Inputs, Plan, Simulation, Training, WhatIf

# Options that contradict a strategy, which says them itself.
OF_THE_STRATEGY = (
    "gpus", "objective", "global_batch", "microbatch_size", "schedule", "optimizer", "recompute",
    "vertical_sync", "cuts", "replicas",
)  # fmt: skip


@click.command()
@click.argument("strategy", type=click.Path(path_type=Path), required=False)
@INPUTS
@CALIBRATION
@TRAINING
@OWN_STAGES
@WHAT_IF
@click.option("--trace", "trace_path", type=click.Path(path_type=Path),
              help="Write the iteration as a trace for Perfetto.")  # fmt: skip
@click.option("--gantt", "drawn", is_flag=True,
              help="Draw the activity of every device over time.")  # fmt: skip
@click.option("--svg", "svg_path", type=click.Path(path_type=Path),
              help="Write the same drawing as a picture.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def simulate(
    ctx: click.Context,
    /,
    strategy: Path | None,
    names: InputNames,
    calibrated: bool,
    training: "Training",
    cuts: tuple[str, ...],
    replicas: tuple[int, ...],
    what_if: "WhatIf",
    trace_path: Path | None,
    drawn: bool,
    svg_path: Path | None,
    as_json: bool,
) -> None:
    """Simulates one iteration of a STRATEGY, or of your own cuts of a profile.

    \b
    planner simulate strategy.json --gantt --trace trace.json
    planner simulate strategy.json --microbatches 64 --set links.nic.bandwidth=200Gbps
    planner simulate --profile profiles/gpt2.json --topology p3 --cuts node_view_46 --replicas 2,1

    The profile of a strategy is the file that it was made from, else the newest in ./profiles;
    --profile gives another file. Its topology is found by its name; --topology gives another one.
    """
    written = {"trace": trace_path, "picture": svg_path}
    if strategy is None:
        if not cuts and not replicas:
            raise OptionError(
                "give a strategy, or --cuts NAME,NAME with the last operators of all stages but the"
                " last, or --replicas N for one stage"
            )
        inputs = names.read(quiet=as_json, calibration=calibrated)
        stages: dict[str, Any] = {"cuts": cuts, "replicas": replicas, "training": training}
        simulated = partial(api.simulate_stages, inputs, **stages)
    else:
        inputs = read_strategy(ctx, strategy, names, calibrated)
        changed = ("microbatches", "device_memory", "reserve")
        simulated = partial(api.simulate, inputs, **{n: getattr(training, n) for n in changed})
    api.check_outputs(written, inputs.paths)
    say_if_compiling(len(inputs.topology.devices))
    simulation = simulated(what_if=what_if)
    if simulation.plan is None:
        say(f"the cuts given do not fit: {simulation.reason}", err=True)
        ctx.exit(NO_PLAN)
    if drawn or trace_path or svg_path:
        simulation.described()  # which says why there is nothing to draw
    if trace_path is not None:
        api.write_trace(simulation, trace_path)
    if svg_path is not None:
        api.write_svg(simulation, svg_path)
    if as_json:
        print_json(simulation, simulation.plan, trace_path, svg_path)
    else:
        print_simulation(simulation, simulation.plan, drawn)
        if trace_path is not None:
            say(f"wrote {trace_path}; open it with https://ui.perfetto.dev")
        if svg_path is not None:
            say(f"wrote {svg_path}")


def read_strategy(
    ctx: click.Context, strategy: Path, names: InputNames, calibrated: bool
) -> "Inputs":
    """The strategy, its profile, and its own topology or another one that is named.

    Raises:
        OptionError: if there are options that contradict a strategy.
    """
    given = [name for name in OF_THE_STRATEGY if is_given(ctx, name)]
    if given:
        flag = given[0].replace("_", "-")
        raise OptionError(f"--{flag} is for your own cuts; a strategy says it itself")
    return api.read_plan_inputs(
        strategy,
        profile=names.profile,
        topology=names.topology if is_given(ctx, "topology") else None,
        calibration=calibrated,
    )


def is_given(ctx: click.Context, name: str) -> bool:
    """Whether the user has given an option."""
    return ctx.get_parameter_source(name) is not ParameterSource.DEFAULT


def print_json(
    simulation: "Simulation", plan: "Plan", trace_path: Path | None, svg_path: Path | None
) -> None:
    """One object: the prediction, the timeline, the critical path, and the files written."""
    from planner.reports.simulation import simulation_json

    trace, svg = (None if path is None else str(path) for path in (trace_path, svg_path))
    num_devices = len(simulation.problem.topology.devices)
    click.echo(json.dumps(simulation_json(plan, simulation.account, num_devices, trace, svg)))


def print_simulation(simulation: "Simulation", plan: "Plan", drawn: bool) -> None:
    """Tables for people.

    Args:
        drawn: whether the activity of every device is drawn.
    """
    from planner.reports.plans import certificate_lines, parameter_table, stage_table, times_line
    from planner.reports.simulation import device_table

    show(stage_table(plan))
    if (split := parameter_table(plan)) is not None:
        show(split)
    show(device_table(plan))
    if simulation.account is not None:
        print_account(simulation.account, simulation.names, drawn)
    for line in (*certificate_lines(plan)[:1], times_line(plan)):
        say(line)
    for note in plan.notes:
        say(f"note: {note}")


def print_account(account: "Account", names: dict[int, str], drawn: bool) -> None:
    """Why devices idle, and the actions that the length of the iteration is made of."""
    from planner.reports.simulation import gantt_lines, idle_table, path_table

    show(idle_table(account.idle, names))
    show(path_table(account.path, names))
    if drawn:
        show_chart(partial(gantt_lines, account.timeline, names))
