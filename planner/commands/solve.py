"""`planner solve`."""

import gc
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from planner import api
from planner.api import Asking, Search, Solving, Training, WhatIf
from planner.commands.errors import NO_PLAN
from planner.commands.options import (
    JSON,
    OPERATORS,
    SEARCH_KINDS,
    InputNames,
    check_given_solvers,
    file_option,
    given_flags,
    names_of,
    searching,
    solver_list,
    takes,
)
from planner.commands.terminal import say, say_note, show, spinner
from planner.support.options import given

if TYPE_CHECKING:
    from planner.api import (
        Gain,
        Inputs,
        PipeDreamReport,
        Plan,
        Plans,
        SolverComparison,
    )


# Cost models that plan for graphs of their own, with solvers of their own.
FOREIGN = ("dnn-partitioning", "piper")
# The cost model of a problem without a model.
CONTEST = "iopddl"
# Allocations between two looks for garbage. Searches make many small objects that live long; with
# Python's 700 a tenth of the time is spent on looking through them.
COLLECTED_AFTER = 50_000
OUTPUT = {"output": "-o"}


@click.command(epilog=solver_list())
@takes(InputNames, "names")
@takes(Solving, "solving")
@takes(Asking, "asking", shown={"solvers": names_of(api.portfolio())})
@takes(Training, "training")
@searching
@takes(WhatIf, "what_if")
@file_option("-o", "--output", default="strategy.json", show_default=True,
             help="Strategy to write.")  # fmt: skip
@OPERATORS
@JSON
@click.pass_context
def solve(
    ctx: click.Context,
    /,
    names: InputNames,
    solving: Solving,
    asking: Asking,
    training: Training,
    search: Search,
    what_if: WhatIf,
    output: Path,
    as_json: bool,
) -> None:
    """Finds a strategy for a profiled model on some devices and proves how good it is.

    \b
    planner solve --gpus 8 --topology p3.yaml
    planner solve --profile gpt2 --gpus 2 --microbatches 8 --optimizer adam
    planner solve --profile vgg16.txt --topology four.yaml --cost-model pipedream
    planner solve --profile bert.json --cost-model piper --bandwidth "25 GiB/s"
    planner solve --profile A.json.gz --cost-model iopddl --time-limit 60s

    What if the cluster were another one? The changed one is planned for, beside the present one:

    \b
    planner solve --topology p3 --set links.gpu0-gpu1.bandwidth="50 GB/s"
    planner solve --topology p3 --set devices.gpu3.type=T4 --drop gpu7
    planner solve --topology four.yaml --add-host host0 --sensitivity

    Exits with 3 if no strategy fits.
    """
    gc.set_threshold(COLLECTED_AFTER)
    cost_model = solving.cost_model
    _check_given(cost_model, asking.solvers)
    if cost_model == CONTEST:
        ctx.exit(solve_contest(names.profile, asking.time_limit_s, search.seed, as_json))
    if cost_model in FOREIGN:
        ctx.exit(solve_foreign(names, solving, asking, training, search, as_json))
    inputs = names.read(quiet=as_json, model=solving.model, with_model=True)
    older = api.check_outputs({"strategy": output}, inputs.paths)
    with spinner() as progress:
        plans = api.solve(
            inputs, training=training, search=search, **given(asking), cost_model=cost_model,
            what_if=what_if, refine=solving.refine, model=solving.model, progress=progress,
        )  # fmt: skip
    written = write(plans, inputs, output, older["strategy"])
    asked_pipedream = "pipedream" in (*asking.solvers, cost_model)
    report = api.pipedream_report(plans) if asked_pipedream else None
    gains = api.sensitivity(plans) if solving.sensitivity else None
    (print_json if as_json else print_plans)(plans, written, report, gains)
    if plans.plan is None:
        ctx.exit(NO_PLAN)
    _print_left_over(output, written, as_json)


def _check_given(cost_model: str, solvers: tuple[str, ...]) -> None:
    """Refuses options that are given, and that neither the cost model nor a solver takes."""
    flags = given_flags(InputNames, Solving, Asking, Training, WhatIf, *SEARCH_KINDS)
    output = click.get_current_context().get_parameter_source("output")
    api.check_model(cost_model, flags | ({} if output is ParameterSource.DEFAULT else OUTPUT))
    if cost_model not in (*FOREIGN, CONTEST):
        alone = () if cost_model == "planner" else (cost_model,)
        check_given_solvers(solvers or alone, api.portfolio())


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


def _print_left_over(output: Path, written: Sequence[Path], as_json: bool) -> None:
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
    from planner.reports.changes import refinement_json, sensitivity_json, what_if_json
    from planner.reports.plans import comparison_json
    from planner.reports.published import pipedream_json, plan_of, under_other_model

    strategy, partition, *_ = (*map(str, written), None, None)
    plain = comparison_json(plans.comparison, plans.num_devices, strategy, partition)
    if plans.cost_model != "planner":
        plain = under_other_model(plain, None if report is None else report.objective_s)
    more: dict[str, Any] = {"pipedream": None}
    if report is not None:
        more["pipedream"] = pipedream_json(report, plan_of(report, plans.comparison))
    if plans.before is not None:
        before = plans.before
        more["what_if"] = what_if_json(plans.changes, before.comparison, before.num_devices)
    if plans.refinement is not None:
        more["refined"] = refinement_json(plans.refinement)
    if gains is not None:
        more["sensitivity"] = sensitivity_json(gains)
    click.echo(json.dumps({**plain, **more}))


def print_plans(
    plans: "Plans",
    written: Sequence[Path],
    report: "PipeDreamReport | None",
    gains: "Sequence[Gain] | None",
) -> None:
    """Tables for people; the arguments are those of `print_json`."""
    from planner.reports.changes import refinement_lines, sensitivity_line, sensitivity_table
    from planner.reports.plans import comparison_table, no_plan_lines, reason_lines

    judged = plans.cost_model == "planner"
    if judged:
        show(comparison_table(plans.comparison))
    if report is not None:
        _print_pipedream(report, plans.comparison)
    if plans.plan is None:
        for line in (no_plan_lines if judged else reason_lines)(plans.comparison):
            say(line)
    else:
        _print_plan(plans.plan, plans.comparison, judged)
        for line in () if plans.refinement is None else refinement_lines(plans.refinement):
            say(line)
        _print_written(written, len(plans.plan.ranks))
    if plans.before is not None:
        _print_what_if(plans, plans.before)
    if gains:
        show(sensitivity_table(gains))
        say(sensitivity_line(gains))


def _print_pipedream(report: "PipeDreamReport", comparison: "SolverComparison") -> None:
    """PipeDream's own figures, and the time of the same strategy as it is launched."""
    from planner.reports.published import launched_line, pipedream_lines, pipedream_table, plan_of

    show(pipedream_table(report))
    for line in pipedream_lines(report):
        say(line)
    plan = plan_of(report, comparison)
    if plan is not None:
        say(launched_line(plan))


def _print_plan(plan: "Plan", comparison: "SolverComparison", judged: bool) -> None:
    """The best plan: its stages, how good it is, and notes.

    Args:
        judged: whether it was chosen by the planner's own cost model.
    """
    from planner.reports.plans import (
        certificate_lines,
        parameter_table,
        reason_lines,
        samples_lines,
        stage_table,
        times_line,
        winner_line,
    )

    show(stage_table(plan))
    if (split := parameter_table(plan)) is not None:
        show(split)
    if judged:
        for line in (winner_line(comparison), *certificate_lines(plan)):
            say(line)
    say(times_line(plan))
    notes = (
        *samples_lines(comparison), *plan.notes, *comparison.notes, *reason_lines(comparison),
    )  # fmt: skip
    for note in notes:
        say(f"note: {note}")


def _print_written(written: Sequence[Path], num_ranks: int) -> None:
    """The files, and how to run the strategy."""
    from planner.reports.launch import run_lines

    strategy, *partition = written
    if partition:
        say(f"wrote {strategy} and {partition[0]}")
    else:
        say(f"wrote {strategy}; no annotated model, because the model is not at hand")
        say("to run the strategy, solve again with --model FILE.onnx, for launch reads the model")
        return
    for line in run_lines(strategy, num_ranks):
        say(line)


def _print_what_if(plans: "Plans", before: "Plans") -> None:
    """What is different, and what that brings."""
    from planner.reports.changes import changes_without_effect, what_if_table

    counts = (before.num_devices, plans.num_devices)
    show(what_if_table(before.comparison, plans.comparison, counts))
    for line in plans.changes:
        say(f"changed: {line}")
    for note in changes_without_effect(before.problems[-1], plans.changes):
        say(f"note: {note}")


def solve_foreign(
    names: InputNames,
    solving: Solving,
    asking: Asking,
    training: Training,
    search: Search,
    as_json: bool,
) -> int:
    """Plans under the cost model, shows the plans, and returns the exit code."""
    from planner.reports.published import (
        published_json,
        published_lines,
        published_stage_table,
        published_table,
    )

    profile: str | Path | None = names.profile
    if profile is None:
        profile = api.newest_profile(topology=names.topology)
        say(f"profile {profile}", err=as_json)
    with spinner() as progress:
        progress(solving.cost_model)
        comparison = api.solve_under(
            solving.cost_model,
            profile,
            topology=names.topology,
            gpus=names.gpus,
            training=training,
            search=search,
            bandwidth=solving.bandwidth,
            time_limit_s=asking.time_limit_s,
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


def solve_contest(profile: str | None, time_limit_s: float, seed: int, as_json: bool) -> int:
    """Solves a problem of the iopddl contest, shows the answer, and returns the exit code."""
    from planner.reports.choices import choice_json, choice_lines
    from planner.support.age import age_s

    if profile is None:
        raise click.UsageError("--cost-model iopddl needs --profile FILE")
    with spinner() as progress:
        progress(CONTEST)
        answer = api.solve_contest(profile, time_limit_s=time_limit_s, seed=seed, spent_s=age_s())
    if as_json:
        click.echo(json.dumps(choice_json(answer)))
    else:
        for line in choice_lines(answer):
            click.echo(line)
    return NO_PLAN if answer.choice.picks is None else 0
