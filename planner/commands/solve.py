"""`planner solve`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner import api
from planner.commands.errors import NO_PLAN
from planner.commands.foreign import FOREIGN, solve_foreign
from planner.commands.option_types import RATE, TIME
from planner.commands.options import (
    CALIBRATION,
    INPUTS,
    OPERATORS,
    SEARCH,
    TRAINING,
    WHAT_IF,
    InputNames,
    solver_choice,
    solver_list,
)
from planner.commands.terminal import say, say_note, show, spinner

if TYPE_CHECKING:
    from planner.api import (
        Gain,
        Inputs,
        PipeDreamReport,
        Plan,
        Plans,
        Search,
        SolverComparison,
        Training,
        WhatIf,
    )


@click.command(epilog=solver_list())
@INPUTS
@click.option("--model", "model_path", type=click.Path(path_type=Path),
              help="The ONNX file, if it is not where the profile says.")  # fmt: skip
@solver_choice("Ask", api.portfolio())
@click.option("--cost-model", type=click.Choice(["planner", "pipedream", *FOREIGN]),
              default="planner", show_default=True,
              help="Cost model by which plans are compared.")  # fmt: skip
@click.option("--bandwidth", type=RATE,
              help='Piper: bandwidth between devices, such as "25 GiB/s".  [default: the file\'s]',
              )  # fmt: skip
@CALIBRATION
@TRAINING
@SEARCH
@click.option("--time-limit", "time_limit_s", type=TIME, default="10s", show_default=True,
              help="Limit of work for all solvers together, in seconds of an ordinary core.",
              )  # fmt: skip
@click.option("--refine", is_flag=True,
              help="Measure the split operators of the best plan on this machine at their local"
              " shapes, until no plan is better by these times. They are added to the profile.",
              )  # fmt: skip
@WHAT_IF
@click.option("--sensitivity", "with_sensitivity", is_flag=True,
              help="Show which link or device bounds the plan.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path), default="strategy.json",
              show_default=True, help="Strategy to write.")  # fmt: skip
@OPERATORS
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def solve(
    ctx: click.Context,
    /,
    names: InputNames,
    model_path: Path | None,
    solvers: tuple[str, ...],
    cost_model: str,
    bandwidth: float | None,
    calibrated: bool,
    training: "Training",
    search: "Search",
    time_limit_s: float,
    refine: bool,
    what_if: "WhatIf",
    with_sensitivity: bool,
    output: Path,
    as_json: bool,
) -> None:
    """Finds a strategy for a profiled model on some devices and proves how good it is.

    \b
    planner solve --gpus 8 --topology p3.yaml
    planner solve --profile profiles/gpt2.json --gpus 2 --microbatches 8 --optimizer adam
    planner solve --profile vgg16.txt --topology levels.yaml --cost-model pipedream
    planner solve --profile bert.json --gpus 512 --cost-model piper --bandwidth "25 GiB/s"

    What if the cluster were another one? The changed one is planned for, beside the present one:

    \b
    planner solve --topology p3 --set links.gpu0-gpu1.bandwidth="50 GB/s" --sensitivity
    planner solve --topology p3 --set devices.gpu3.type=T4 --drop gpu7
    planner solve --topology four.yaml --add-host host0 --set levels.host.bandwidth=200Gbps

    Exits with 3 if no strategy fits.
    """
    api.check_cost_model(
        cost_model, training, search, solvers, what_if=what_if, refine=refine,
        sensitivity=with_sensitivity, bandwidth=bandwidth,
    )  # fmt: skip
    if cost_model in FOREIGN:
        how = (training, search, bandwidth, time_limit_s)
        ctx.exit(solve_foreign(cost_model, names, *how, as_json))
    inputs = names.read(quiet=as_json, calibration=calibrated, model=model_path, with_model=True)
    older = api.check_outputs({"strategy": output}, inputs.paths)
    with spinner(len(inputs.topology.devices)) as progress:
        plans = api.solve(
            inputs, training=training, search=search, solvers=solvers, cost_model=cost_model,
            what_if=what_if, time_limit_s=time_limit_s, refine=refine, model=model_path,
            progress=progress,
        )  # fmt: skip
    written = write(plans, inputs, output, older["strategy"])
    asked_pipedream = "pipedream" in (*solvers, cost_model)
    report = api.pipedream_report(plans) if asked_pipedream else None
    gains = api.sensitivity(plans) if with_sensitivity else None
    (print_json if as_json else print_plans)(plans, written, report, gains)
    if plans.plan is None:
        ctx.exit(NO_PLAN)
    print_left_over(output, written, as_json)


def write(
    plans: "Plans", inputs: "Inputs", output: Path, older: "Mapping[str, Any] | None"
) -> tuple[Path, ...]:
    """Writes new times of parts into the file of the profile, which all commands read, and the best
    plan. Gives the strategy and the annotated model, if there is one; nothing without a plan.

    Args:
        older: the fields of the strategy that is replaced; None if there is none.
    """
    profile = inputs.paths["profile"]
    if plans.refinement is not None and plans.refinement.profiles:
        api.write_profiles(plans.refinement.into(inputs.profiles), profile)
    if plans.plan is None:
        return ()
    say_note(api.overwrite_note(output, older, plans.plan))
    return api.write_strategy(plans.plan, output, inputs.model, profile=profile)


def print_left_over(output: Path, written: Sequence[Path], as_json: bool) -> None:
    """A note on an annotated model that was not written now."""
    left = output.with_suffix(".onnx")
    if left not in written and left.is_file():
        say(f"note: {left} is of an earlier strategy; delete it", err=as_json)


def print_json(
    plans: "Plans",
    written: Sequence[Path],
    report: "PipeDreamReport | None",
    gains: "Sequence[Gain] | None",
) -> None:
    """One object: the best plan, all others, and the answers to what else was asked.

    Args:
        written: the strategy, and the annotated model if there is one; empty without a plan.
        report: PipeDream's, if it was asked by name.
        gains: of --sensitivity.
    """
    from planner.reports.changes import what_if_json
    from planner.reports.pipedream import pipedream_json, plan_of, under_foreign_model
    from planner.reports.plans import comparison_json
    from planner.reports.refine import refinement_json

    strategy, partition, *_ = (*map(str, written), None, None)
    plain = comparison_json(plans.comparison, plans.num_devices, strategy, partition)
    if plans.cost_model != "planner":
        plain = under_foreign_model(plain, None if report is None else report.objective_s)
    more: dict[str, Any] = {"pipedream": None}
    if report is not None:
        more["pipedream"] = pipedream_json(report, plan_of(report, plans.comparison))
    if plans.before is not None:
        before = plans.before
        more["what_if"] = what_if_json(plans.changes, before.comparison, before.num_devices)
    if plans.refinement is not None:
        more["refined"] = refinement_json(plans.refinement)
    if gains is not None:
        more["sensitivity"] = [asdict(gain) for gain in gains]
    click.echo(json.dumps({**plain, **more}))


def print_plans(
    plans: "Plans",
    written: Sequence[Path],
    report: "PipeDreamReport | None",
    gains: "Sequence[Gain] | None",
) -> None:
    """Tables for people; the arguments are those of `print_json`."""
    from planner.reports.changes import sensitivity_line, sensitivity_table
    from planner.reports.plans import comparison_table, no_plan_lines, reason_lines
    from planner.reports.refine import refinement_lines

    judged = plans.cost_model == "planner"
    if judged:
        show(comparison_table(plans.comparison))
    if report is not None:
        print_pipedream(report, plans.comparison)
    if plans.plan is None:
        for line in (no_plan_lines if judged else reason_lines)(plans.comparison):
            say(line)
    else:
        print_plan(plans.plan, plans.comparison, judged)
        for line in () if plans.refinement is None else refinement_lines(plans.refinement):
            say(line)
        print_written(written, len(plans.plan.ranks))
    if plans.before is not None:
        print_what_if(plans, plans.before)
    if gains:
        show(sensitivity_table(gains))
        say(sensitivity_line(gains))


def print_pipedream(report: "PipeDreamReport", comparison: "SolverComparison") -> None:
    """PipeDream's own figures, and the time of the same strategy as it is launched."""
    from planner.reports.pipedream import launched_line, pipedream_lines, pipedream_table, plan_of

    show(pipedream_table(report))
    for line in pipedream_lines(report):
        say(line)
    plan = plan_of(report, comparison)
    if plan is not None:
        say(launched_line(plan))


def print_plan(plan: "Plan", comparison: "SolverComparison", judged: bool) -> None:
    """The best plan: its stages, how good it is, and notes.

    Args:
        judged: whether it was chosen by the planner's own cost model.
    """
    from planner.reports.compare import winner_line
    from planner.reports.plans import (
        certificate_lines,
        parameter_table,
        reason_lines,
        stage_table,
        times_line,
    )

    show(stage_table(plan))
    if (split := parameter_table(plan)) is not None:
        show(split)
    if judged:
        for line in (winner_line(comparison), *certificate_lines(plan)):
            say(line)
    say(times_line(plan))
    for note in (*plan.notes, *comparison.notes, *reason_lines(comparison)):
        say(f"note: {note}")


def print_written(written: Sequence[Path], num_ranks: int) -> None:
    """The files, and how to run the strategy."""
    from planner.reports.launch import run_lines

    strategy, *partition = written
    if partition:
        say(f"wrote {strategy} and {partition[0]}")
    else:
        say(f"wrote {strategy}; no annotated model, because the model is not at hand (--model)")
    for line in run_lines(strategy, num_ranks):
        say(line)


def print_what_if(plans: "Plans", before: "Plans") -> None:
    """What is different, and what that brings."""
    from planner.reports.changes import changes_without_effect, what_if_table

    counts = (before.num_devices, plans.num_devices)
    show(what_if_table(before.comparison, plans.comparison, counts))
    for line in plans.changes:
        say(f"changed: {line}")
    for note in changes_without_effect(before.problems[-1], plans.changes):
        say(f"note: {note}")
