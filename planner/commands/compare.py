"""`planner compare`."""

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from planner import api
from planner.api import Asking, Search, Training, WhatIf
from planner.commands.by_module import Explaining, print_modules
from planner.commands.errors import NO_PLAN
from planner.commands.options import (
    JSON,
    OPERATORS,
    InputNames,
    check_given_solvers,
    file_option,
    names_of,
    searching,
    solver_list,
    takes,
)
from planner.commands.terminal import bar, console, say, show, spinner
from planner.support.errors import OptionError
from planner.support.options import Options, given, option

if TYPE_CHECKING:
    from planner.api import Model, Plans, Trial


@dataclass(frozen=True, slots=True)
class Running(Options):
    """The launches of the plans."""

    model: Path | None = option("ONNX file for --run, if it is not where the profile says.")
    run: int | None = option(
        "Launch every plan that this machine can run, one after the other, and time STEPS steps of"
        " each.",
        least=1, metavar="STEPS",
    )  # fmt: skip


@click.command(epilog=solver_list())
@takes(InputNames, "names")
@takes(Running, "running")
@takes(Asking, "asking", shown={"solvers": names_of(api.automatic())})
@takes(Training, "training")
@searching
@takes(WhatIf, "what_if")
@takes(Explaining, "explaining")
@file_option("--csv", "csv_path", help="Write the table to this file.")
@OPERATORS
@JSON
@click.pass_context
def compare(
    ctx: click.Context,
    /,
    names: InputNames,
    running: Running,
    asking: Asking,
    training: Training,
    search: Search,
    what_if: WhatIf,
    explaining: Explaining,
    csv_path: Path | None,
    as_json: bool,
) -> None:
    """Asks every solver for a strategy, and shows the simulator's figures of each.

    \b
    planner compare --gpus 4 --topology p3.yaml
    planner compare --profile gpt2 --gpus 4 --objective latency --microbatches 1
    planner compare --solver heft --solver netsplit --time-limit 60s --csv r.csv
    planner compare --gpus 2 --run 20
    planner compare --gpus 8 --solver megatron --solver zero --by-module

    Of a profile with several sizes of the microbatch, the largest is taken, or --microbatch-size.
    No strategy is written; that is what solve does.

    Exits with 3 if no strategy fits.
    """
    steps = running.run
    check_given_solvers(asking.solvers, api.automatic())
    inputs = names.read(quiet=as_json, model=running.model, with_model=steps is not None)
    if steps is not None and inputs.model is None:
        raise OptionError(
            f"--run: the model of {inputs.paths['profile']} is not where the profile says; give it"
            " with --model FILE"
        )
    api.check_outputs({"table": csv_path}, inputs.paths)
    with spinner() as progress:
        plans = api.compare(
            inputs, training=training, search=search, what_if=what_if, progress=progress,
            **given(asking),
        )  # fmt: skip
    if steps is None and csv_path is not None:
        _write_rows(plans, csv_path)
    output = Output(csv_path, as_json, explaining.by_module)
    if not as_json:
        print_plans(plans, by_module=explaining.by_module)
    if steps is None or inputs.model is None:
        finish(plans, output)
    else:
        run_plans(plans, inputs.model, steps, output)
    if plans.plan is None:
        ctx.exit(NO_PLAN)


class Output(NamedTuple):
    """Where the plans go.

    Attributes:
        csv_path: the file of the table; None for none.
        as_json: whether one JSON object is printed, and nothing else.
        by_module: whether the modules are shown, too.
    """

    csv_path: Path | None
    as_json: bool
    by_module: bool

    def print_json(self, plans: "Plans", plain: dict[str, Any]) -> None:
        """Prints the object of the plans, with the path of the table."""
        if self.by_module:
            from planner.reports.by_module import with_modules

            plain = with_modules(plain, plans.comparison)
        click.echo(json.dumps({**plain, "csv": self.csv_path and str(self.csv_path)}))


def print_plans(plans: "Plans", *, by_module: bool) -> None:
    """The table, bars, the winner and, if they are asked for, the modules."""
    from planner.reports.plans import (
        calibration_lines,
        compare_bars,
        comparison_table,
        reason_lines,
        unfit_lines,
        winner_line,
    )

    comparison = plans.comparison
    show(comparison_table(comparison))
    notes = (
        *calibration_lines(comparison), *reason_lines(comparison), *unfit_lines(comparison),
    )  # fmt: skip
    for line in (
        *compare_bars(comparison, console().width),
        *(f"note: {line}" for line in notes),
        *filter(None, [winner_line(comparison)]),
    ):
        say(line)
    if by_module:
        print_modules([(row.problem, row.plan) for row in comparison.rows if row.plan])


def _write_rows(plans: "Plans", csv_path: Path) -> None:
    """The table of plans that are not launched, as a file."""
    from planner.reports.plans import compare_csv

    api.write_text(compare_csv(plans.comparison), csv_path)


def finish(plans: "Plans", output: Output) -> None:
    """What is said of plans that are not launched."""
    from planner.reports.plans import comparison_json

    if output.as_json:
        plain = comparison_json(plans.comparison, plans.num_devices, None, None)
        output.print_json(plans, plain)
    elif output.csv_path is not None:
        say(f"wrote {output.csv_path}")


def run_plans(plans: "Plans", model: "Model", steps: int, output: Output) -> None:
    """Launches the plans. After Ctrl-C, too, the plans that have run are shown."""
    trials: list[Trial] = []
    num_plans = sum(row.plan is not None for row in plans.comparison.rows)
    try:
        with bar("Launching") as tick:

            def told(done: int, solver: str) -> None:
                tick(done, num_plans, f" the plan of {solver}")

            with closing(api.measure(plans, model, steps=steps, progress=told)) as running:
                for trial in running:
                    trials.append(trial)
    finally:
        _finish_run(plans, trials, steps, output)


def _finish_run(
    plans: "Plans", trials: "Sequence[Trial]", steps: int, output: Output
) -> None:  # fmt: skip
    """The files, the JSON or the table of plans that were launched."""
    from planner.reports.trials import (
        complete,
        note_lines,
        order_line,
        order_of,
        trials_csv,
        trials_json,
        trials_table,
    )

    comparison = plans.comparison
    trials = complete(comparison, trials)
    if output.csv_path is not None:
        api.write_text(trials_csv(comparison, trials), output.csv_path)
    if output.as_json:
        output.print_json(plans, trials_json(comparison, trials, plans.num_devices))
        return
    if trials:
        show(trials_table(trials, steps))
    for line in (
        *filter(None, [order_line(order_of(trials))]),
        *(f"note: {note}" for note in note_lines(trials)),
        *([] if output.csv_path is None else [f"wrote {output.csv_path}"]),
    ):
        say(line)
