"""`planner simulate`."""

import json
import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from planner import api
from planner.api import Manual, Training, WhatIf
from planner.commands.by_module import Explaining, print_modules
from planner.commands.errors import NO_PLAN
from planner.commands.options import JSON, InputNames, given_flags, takes
from planner.commands.terminal import say, say_note, show, show_chart
from planner.support.errors import OptionError
from planner.support.options import Options, given, option

if TYPE_CHECKING:
    from planner.api import Account, Inputs, Plan, Simulation


@dataclass(frozen=True, slots=True)
class Drawing(Options):
    """Drawings of the iteration."""

    trace: Path | None = option("Write the iteration as a trace for Perfetto to this file.")
    gantt: bool = option("Draw the activity of every device over time.", False)
    svg: Path | None = option("Write the drawing of --gantt as a picture to this file.")


# Options that a strategy and own stages have alike.
FOR_A_STRATEGY = frozenset(
    {"profile", "topology", "calibration", "microbatches", "device_memory", "reserve"}
)


@click.command()
@click.argument("strategy", type=click.Path(path_type=Path), required=False)
@takes(InputNames, "names")
@takes(Training, "training")
@takes(Manual, "stages")
@takes(WhatIf, "what_if")
@takes(Drawing, "drawing")
@takes(Explaining, "explaining")
@JSON
@click.pass_context
def simulate(
    ctx: click.Context,
    /,
    strategy: Path | None,
    names: InputNames,
    training: Training,
    stages: Manual,
    what_if: WhatIf,
    drawing: Drawing,
    explaining: Explaining,
    as_json: bool,
) -> None:
    """Simulates one iteration of a STRATEGY, or of your own cuts of a profile.

    \b
    planner simulate strategy.json --gantt --trace trace.json
    planner simulate strategy.json --set links.nic.bandwidth=200Gbps
    planner simulate --profile gpt2 --topology p3 --cuts node_view_46
    planner simulate strategy.json --by-module

    The profile of a strategy is the file that it was made from, else the newest in ./profiles;
    --profile gives another file. Its topology is found by its name; --topology gives another one.
    """
    trace_path, svg_path = drawing.trace, drawing.svg
    if strategy is None:
        if stages == Manual():
            raise OptionError(
                "give a strategy, or --cuts NAME,NAME with the last operators of all stages but the"
                " last, or --replicas N for one stage"
            )
        inputs = names.read(quiet=as_json)
        own = partial(api.simulate_stages, cuts=stages.cuts, replicas=stages.replicas)
        simulated = partial(own, inputs, training=training)
    else:
        inputs = read_strategy(strategy, names)
        say_note(_what_if_note(inputs.plan, strategy, names.topology, what_if))
        changed = {n: value for n, value in given(training).items() if n in FOR_A_STRATEGY}
        simulated = partial(api.simulate, inputs, **changed)
    api.check_outputs({"trace": trace_path, "picture": svg_path}, inputs.paths)
    simulation = simulated(what_if=what_if)
    if simulation.plan is None:
        say(f"the cuts given do not fit: {simulation.reason}", err=True)
        ctx.exit(NO_PLAN)
    if given(drawing):
        simulation.described()  # which says why there is nothing to draw
    if trace_path is not None:
        api.write_trace(simulation, trace_path)
    if svg_path is not None:
        api.write_svg(simulation, svg_path)
    if as_json:
        print_json(simulation, simulation.plan, trace_path, svg_path, explaining)
    else:
        _print_simulation(simulation, simulation.plan, drawing.gantt, explaining)
        if trace_path is not None:
            say(f"wrote {trace_path}; open it with https://ui.perfetto.dev")
        if svg_path is not None:
            say(f"wrote {svg_path}")


def read_strategy(strategy: Path, names: InputNames) -> "Inputs":
    """The strategy, its profile, and its own topology or another one that is named.

    Raises:
        OptionError: if there are options that contradict a strategy.
    """
    for flag in given_flags(InputNames, Training, Manual, without=FOR_A_STRATEGY).values():
        raise OptionError(f"{flag} is for your own cuts; a strategy says it itself")
    other = "topology" in given_flags(InputNames)
    return api.read_plan_inputs(
        strategy,
        profile=names.profile,
        topology=names.topology if other else None,
        calibration=names.calibration,
    )


def _what_if_note(
    plan: "Plan | None", strategy: Path, topology: str, what_if: WhatIf
) -> str | None:
    """A note that a plan for a changed topology is simulated without these changes."""
    planned = () if plan is None else plan.what_if
    if not planned or planned == what_if.words:
        return None
    changes = " ".join(planned)
    command = shlex.join(["planner", "simulate", str(strategy), "--topology", topology])
    return (
        f"{strategy} was planned with {changes}, and is simulated with"
        f" {' '.join(what_if.words) or 'no change'}; to simulate it as it was planned:"
        f" {command} {changes}"
    )


def print_json(
    simulation: "Simulation", plan: "Plan", trace_path: Path | None, svg_path: Path | None,
    explaining: Explaining,
) -> None:  # fmt: skip
    """One object: the prediction, the timeline, the critical path, the files written and, if they
    are asked for, the modules.
    """
    from planner.reports.by_module import modules_json
    from planner.reports.modules import module_costs
    from planner.reports.simulation import simulation_json

    trace, svg = (None if path is None else str(path) for path in (trace_path, svg_path))
    num_devices = len(simulation.problem.topology.devices)
    plain = simulation_json(plan, simulation.account, num_devices, trace, svg)
    if explaining.by_module:
        plain["modules"] = modules_json(module_costs(simulation.problem, plan.strategy))
    click.echo(json.dumps(plain))


def _print_simulation(
    simulation: "Simulation", plan: "Plan", drawn: bool, explaining: Explaining
) -> None:
    """Tables for people.

    Args:
        drawn: whether the activity of every device is drawn.
        explaining: whether the modules are shown.
    """
    from planner.reports.plans import certificate_lines, parameter_table, stage_table, times_line
    from planner.reports.simulation import device_table

    show(stage_table(plan))
    if (split := parameter_table(plan)) is not None:
        show(split)
    if explaining.by_module:
        print_modules([(simulation.problem, plan)])
    show(device_table(plan))
    if simulation.account is not None:
        _print_account(simulation.account, simulation.names, drawn)
    for line in (*certificate_lines(plan)[:1], times_line(plan)):
        say(line)
    for note in plan.notes:
        say(f"note: {note}")


def _print_account(account: "Account", names: dict[int, str], drawn: bool) -> None:
    """Why devices idle, and the actions that the length of the iteration is made of."""
    from planner.reports.simulation import gantt_lines, idle_table, path_table

    show(idle_table(account.idle, names))
    show(path_table(account.path, names))
    if drawn:
        show_chart(partial(gantt_lines, account.timeline, names))
