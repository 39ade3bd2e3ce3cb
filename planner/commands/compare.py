"""`planner compare`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from planner.commands.ends import NO_PLAN
from planner.commands.option_types import TIME
from planner.commands.options import (
    INPUTS,
    OWN_STAGES,
    PINS,
    SEARCH,
    TRAINING,
    WHAT_IF,
    solver_choice,
    solver_list,
)
from planner.commands.outputs import check_output
from planner.commands.printing import show, spinner
from planner.commands.problems import (
    calibration_of,
    changed_cluster,
    inputs_of,
    problems_for,
    say_if_compiling,
)
from planner.solvers.registry import automatic, with_given

# Columns of the longest bar.
BAR_WIDTH = 48


@click.command(epilog=solver_list())
@INPUTS
@solver_choice("Compare", automatic())
@TRAINING
@SEARCH
@PINS
@OWN_STAGES
@click.option("--time-limit", type=TIME, default="10s", show_default=True,
              help="For each solver.")  # fmt: skip
@WHAT_IF
@click.option("--csv", "csv_path", type=click.Path(path_type=Path), help="Write the rows here.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def compare(
    ctx: click.Context,
    /,
    profile_path: Path | None,
    gpus: int | None,
    topology_name: str,
    solvers: tuple[str, ...],
    microbatch_size: int | None,
    time_limit: float,
    settings: tuple[str, ...],
    dropped: tuple[str, ...],
    added: tuple[str, ...],
    csv_path: Path | None,
    as_json: bool,
    **training: Any,
) -> None:
    """Asks every solver for a strategy, and shows what the simulator says of each.

    \b
    planner compare --gpus 4 --topology p3.yaml
    planner compare --profile profiles/gpt2.json --gpus 4 --objective latency --microbatches 1
    planner compare --solver heft --solver netsplit --time-limit 60s --csv rows.csv

    Of a profile with several sizes of the microbatch, the largest is taken, or --microbatch-size.
    Nothing is planned for launching; that is what solve does.

    Exits with 3 if no strategy fits.
    """
    from planner.files import write_atomically
    from planner.judging.portfolio import compare as run
    from planner.reports.compare import compare_bars, compare_csv, winner_line
    from planner.reports.solve import comparison_json, comparison_table, reason_lines

    read = inputs_of(profile_path, topology_name, microbatch_size, quiet=as_json)
    if csv_path is not None:
        check_output([csv_path], {"profile": read.profile_path, "topology": read.topology_path})
    calibration = calibration_of(read.profile_path, read.written, training)
    some = problems_for(read.profiles[-1:], read.topology_path, gpus, training, calibration)
    problem = some[-1]
    if settings or dropped or added:
        changed = changed_cluster(problem, settings, dropped, added)
        problem = replace(problem, topology=changed.topology)
    say_if_compiling()
    with spinner() as say:
        names = with_given(solvers or automatic(), problem.options)
        comparison = run(problem, names, time_limit, say, thorough=True)
    if csv_path is not None:
        write_atomically(csv_path, compare_csv(comparison).encode())
    if as_json:
        plain = comparison_json(comparison, len(problem.topology.devices), None, None)
        click.echo(json.dumps({**plain, "csv": None if csv_path is None else str(csv_path)}))
    else:
        show(comparison_table(comparison))
        for line in (
            *compare_bars(comparison, BAR_WIDTH),
            *(f"note: {reason}" for reason in reason_lines(comparison)),
            *filter(None, [winner_line(comparison)]),
        ):
            click.echo(line)
        if csv_path is not None:
            click.echo(f"wrote {csv_path}")
    if comparison.best is None:
        ctx.exit(NO_PLAN)
