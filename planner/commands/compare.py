"""`planner compare`."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from planner import api
from planner.commands.ends import NO_PLAN
from planner.commands.inputs import InputNames, planned
from planner.commands.option_types import TIME
from planner.commands.options import (
    CALIBRATION,
    INPUTS,
    SEARCH,
    TRAINING,
    WHAT_IF,
    solver_choice,
    solver_list,
)
from planner.commands.outputs import check_output
from planner.commands.printing import say, show

if TYPE_CHECKING:
    from planner.api import Plans, Search, Training, WhatIf

# Columns of the longest bar.
BAR_WIDTH = 48


@click.command(epilog=solver_list())
@INPUTS
@solver_choice("Compare", api.automatic())
@CALIBRATION
@TRAINING
@SEARCH
@click.option("--time-limit", "time_limit_s", type=TIME, default="10s", show_default=True,
              help="Time for each solver.")  # fmt: skip
@WHAT_IF
@click.option("--csv", "csv_path", type=click.Path(path_type=Path),
              help="Write the table to this file.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def compare(
    ctx: click.Context,
    /,
    names: InputNames,
    solvers: tuple[str, ...],
    calibrated: bool,
    training: "Training",
    search: "Search",
    time_limit_s: float,
    what_if: "WhatIf",
    csv_path: Path | None,
    as_json: bool,
) -> None:
    """Asks every solver for a strategy, and shows the simulator's figures of each.

    \b
    planner compare --gpus 4 --topology p3.yaml
    planner compare --profile profiles/gpt2.json --gpus 4 --objective latency --microbatches 1
    planner compare --solver heft --solver netsplit --time-limit 60s --csv rows.csv

    Of a profile with several sizes of the microbatch, the largest is taken, or --microbatch-size.
    No strategy is written; that is what solve does.

    Exits with 3 if no strategy fits.
    """
    from planner.reports.compare import compare_csv

    inputs = names.read(calibrated=calibrated, quiet=as_json)
    if csv_path is not None:
        read = {"profile": inputs.profile_path, "topology": inputs.topology_path}
        check_output({"table": csv_path}, read)
    ask = partial(
        api.compare, training=training, search=search, solvers=solvers, what_if=what_if,
        time_limit_s=time_limit_s,
    )  # fmt: skip
    plans = planned(ask, inputs)
    if csv_path is not None:
        api.write_text(compare_csv(plans.comparison), csv_path)
    print_plans(plans, csv_path, as_json)
    if plans.plan is None:
        ctx.exit(NO_PLAN)


def print_plans(plans: "Plans", csv_path: Path | None, as_json: bool) -> None:
    """The table, bars and the winner."""
    from planner.reports.compare import compare_bars, winner_line
    from planner.reports.solve import comparison_json, comparison_table, reason_lines

    comparison = plans.comparison
    if as_json:
        plain = comparison_json(comparison, plans.num_devices, None, None)
        click.echo(json.dumps({**plain, "csv": None if csv_path is None else str(csv_path)}))
        return
    show(comparison_table(comparison))
    for line in (
        *compare_bars(comparison, BAR_WIDTH),
        *(f"note: {reason}" for reason in reason_lines(comparison)),
        *filter(None, [winner_line(comparison)]),
    ):
        say(line)
    if csv_path is not None:
        say(f"wrote {csv_path}")
