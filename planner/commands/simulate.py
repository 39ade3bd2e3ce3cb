"""`planner simulate`."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from planner.commands.ends import NO_PLAN
from planner.commands.options import INPUTS, OWN_STAGES, TRAINING, WHAT_IF
from planner.commands.outputs import check_output
from planner.commands.printing import show, show_gantt
from planner.commands.problems import (
    calibration_of,
    changed_cluster,
    inputs_of,
    options_of,
    problems_for,
    say_if_compiling,
    type_of,
)
from planner.errors import OptionError

if TYPE_CHECKING:
    from planner.problem import Problem, Result

# Of an iteration; beyond, there is no account of every action.
MOST_ACTIONS = 300_000
# Options that say what a strategy says itself.
OF_THE_STRATEGY = (
    "gpus", "objective", "global_batch", "microbatch_size", "schedule", "optimizer", "recompute",
    "cuts", "replicas",
)  # fmt: skip


@click.command()
@click.argument("strategy", type=click.Path(path_type=Path), required=False)
@INPUTS
@TRAINING
@OWN_STAGES
@WHAT_IF
@click.option("--trace", "trace_path", type=click.Path(path_type=Path),
              help="Write the iteration, to be opened with Perfetto.")  # fmt: skip
@click.option("--gantt", "drawn", is_flag=True, help="Show what every device does when.")
@click.option("--svg", "svg_path", type=click.Path(path_type=Path), help="The same as a picture.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def simulate(
    ctx: click.Context,
    /,
    strategy: Path | None,
    profile_path: Path | None,
    gpus: int | None,
    topology_name: str,
    settings: tuple[str, ...],
    dropped: tuple[str, ...],
    added: tuple[str, ...],
    trace_path: Path | None,
    drawn: bool,
    svg_path: Path | None,
    as_json: bool,
    **training: Any,
) -> None:
    """Simulates one iteration of a STRATEGY, or of your own cuts of a profile.

    \b
    planner simulate strategy.json --gantt --trace trace.json
    planner simulate strategy.json --microbatches 64 --set links.nic.bandwidth=200Gbps
    planner simulate --profile profiles/gpt2.json --topology p3 --cuts node_view_46 --replicas 2,1

    The profile of a strategy is the newest in ./profiles or --profile; its topology is found by its
    name, or is another one, --topology.
    """
    from planner.costs.bounds import lower_bound_s
    from planner.drawing.gantt_svg import gantt_svg
    from planner.files import write_atomically
    from planner.judging.judge import exactly
    from planner.reports.simulate import device_table, idle_table, path_table, simulation_json
    from planner.reports.solve import certificate_lines, stage_table, times_line
    from planner.simulator.account import account
    from planner.traces.write import write_trace

    if strategy is None:
        problem, name, result = of_cuts(profile_path, topology_name, gpus, training, as_json)
        read = {"profile": profile_path}
    else:
        refuse_what_it_says(ctx)
        problem, name, result = of_strategy(ctx, strategy, training)
        read = {"strategy": strategy, "profile": profile_path}
    check_output([path for path in (trace_path, svg_path) if path is not None], read)
    if settings or dropped or added:
        changed = changed_cluster(problem, settings, dropped, added)
        problem = replace(problem, topology=changed.topology)
    say_if_compiling()
    if result.strategy is None:
        click.echo(f"the cuts given do not fit: {result.reason}", err=True)
        ctx.exit(NO_PLAN)
    plan, _, times = exactly(problem, name, result, lower_bound_s(problem))
    names = {device.device: device.name for device in plan.prediction.devices}
    few = len(times.code) <= MOST_ACTIONS
    told = account(problem, result.strategy) if few else None
    if told is None and (drawn or svg_path or trace_path):
        raise OptionError(
            f"an iteration has {len(times.code)} actions, too many for a picture or a trace; take"
            " fewer --microbatches"
        )
    if told is not None and trace_path is not None:
        write_trace(told.timeline, names, trace_path)
    if told is not None and svg_path is not None:
        write_atomically(svg_path, gantt_svg(told.timeline, names).encode())
    if as_json:
        paths = (None if path is None else str(path) for path in (trace_path, svg_path))
        plain = simulation_json(plan, told, len(problem.topology.devices), *paths)
        click.echo(json.dumps(plain))
        return
    show(stage_table(plan))
    show(device_table(plan))
    if told is not None:
        show(idle_table(told.idle, names))
        show(path_table(told.path, names))
        if drawn:
            show_gantt(told.timeline, names)
    for line in (
        *certificate_lines(plan)[:1],
        times_line(plan),
        *(f"note: {note}" for note in plan.notes),
    ):
        click.echo(line)
    if trace_path is not None:
        click.echo(f"wrote {trace_path}; open it with https://ui.perfetto.dev")
    if svg_path is not None:
        click.echo(f"wrote {svg_path}")


def of_cuts(
    profile_path: Path | None,
    topology_name: str,
    gpus: int | None,
    training: Mapping[str, Any],
    quiet: bool,
) -> "tuple[Problem, str, Result]":
    """The user's own stages."""
    from planner.solvers.manual.solve import solve

    if not training["cuts"] and not training["replicas"]:
        raise OptionError(
            "give a strategy, or --cuts NAME,NAME with the last operators of all stages but the"
            " last, or --replicas N for one stage"
        )
    read = inputs_of(profile_path, topology_name, training["microbatch_size"], quiet=quiet)
    calibration = calibration_of(read.profile_path, read.written, training)
    some = problems_for(read.profiles[-1:], read.topology_path, gpus, training, calibration)
    problem = some[-1]
    return problem, "manual", solve(problem, 0.0)


def of_strategy(
    ctx: click.Context, path: Path, training: Mapping[str, Any]
) -> "tuple[Problem, str, Result]":
    """A strategy on what it was made for, or on another topology, with as many microbatches as it
    has, or others.
    """
    from planner.files import newest_profile, read_plan
    from planner.formats import read_any_profiles
    from planner.judging.origins import profile_of, topology_of
    from planner.problem import Problem, Result, Status
    from planner.schedules.orders import with_microbatches

    plan = read_plan(path)
    profile_path = ctx.params["profile_path"] or newest_profile(Path("profiles"))
    profile = profile_of(plan, path, profile_path)
    calibration = calibration_of(profile_path, read_any_profiles(profile_path), training)
    named = ctx.params["topology_name"] if is_given(ctx, "topology_name") else None
    topology, same = topology_of(plan, path, named)
    own = plan.strategy
    count = training["microbatches"] or own.num_microbatches
    said = {
        "objective": plan.certificate.objective, "schedule": own.schedule.value,
        "optimizer": plan.optimizer, "recompute": "auto",
    }  # fmt: skip
    options = replace(options_of({**training, **said}), num_microbatches=count, seed=plan.seed)
    measured_on = type_of(profile, topology)
    problem = Problem(profile, topology, options, measured_on, calibration=calibration)
    if same and count == own.num_microbatches:
        certificate = plan.certificate
        return problem, plan.solver, Result(
            Status(plan.status), own, certificate.space_bound_s, certificate.space,
            reproducible=plan.reproducible,
        )  # fmt: skip
    space = "another topology or number of microbatches than was planned for"
    moved = with_microbatches(own, count)
    return problem, plan.solver, Result(Status.FEASIBLE, moved, space=space)


def refuse_what_it_says(ctx: click.Context) -> None:
    """Refuses options that contradict the strategy."""
    given = [name for name in OF_THE_STRATEGY if is_given(ctx, name)]
    if given:
        flag = given[0].replace("_", "-")
        raise OptionError(f"--{flag} is for your own cuts; a strategy says it itself")


def is_given(ctx: click.Context, name: str) -> bool:
    """Whether the user has given an option."""
    return ctx.get_parameter_source(name) is not ParameterSource.DEFAULT
