"""`planner solve`."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.commands.ends import NO_PLAN
from planner.commands.foreign import FOREIGN, under_foreign_model
from planner.commands.option_types import RATE, TIME
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
from planner.commands.outputs import check_strategy_output, relative
from planner.commands.printing import show, spinner
from planner.commands.problems import (
    calibration_of,
    changed_cluster,
    inputs_of,
    problems_for,
    say_if_compiling,
)
from planner.errors import FileError, ModelError, OptionError
from planner.solvers.registry import portfolio, with_given

if TYPE_CHECKING:
    from planner.clusters.what_if import Changed
    from planner.judging.portfolio import Comparison
    from planner.judging.sensitivity import Gain
    from planner.model import Model
    from planner.plan import Plan
    from planner.problem import Problem
    from planner.profiles import Profile
    from planner.solvers.pipedream.costs import PipeDreamReport


@click.command(epilog=solver_list())
@INPUTS
@click.option("--model", "model_path", type=click.Path(path_type=Path),
              help="The ONNX file, if it is not where the profile says.")  # fmt: skip
@solver_choice("Ask", portfolio())
@click.option("--cost-model", type=click.Choice(["planner", "pipedream", *FOREIGN]),
              default="planner", show_default=True, help="Whose figures decide.")  # fmt: skip
@click.option("--bandwidth", type=RATE,
              help='Of Piper: between devices, such as "25 GiB/s".  [default: the file\'s]',
              )  # fmt: skip
@TRAINING
@SEARCH
@PINS
@OWN_STAGES
@click.option("--time-limit", type=TIME, default="10s", show_default=True,
              help="For all solvers together.")  # fmt: skip
@WHAT_IF
@click.option("--sensitivity", "with_sensitivity", is_flag=True,
              help="Say which link or device bounds the plan.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path), default="strategy.json",
              show_default=True, help="Strategy to write.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def solve(
    ctx: click.Context,
    /,
    profile_path: Path | None,
    model_path: Path | None,
    gpus: int | None,
    topology_name: str,
    solvers: tuple[str, ...],
    cost_model: str,
    microbatch_size: int | None,
    time_limit: float,
    output: Path,
    as_json: bool,
    settings: tuple[str, ...],
    dropped: tuple[str, ...],
    added: tuple[str, ...],
    with_sensitivity: bool,
    **training: Any,
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

    \b
    --set takes links.NAME.bandwidth or .latency (a link's name, or its ends as a-b),
    levels.NAME.bandwidth or .latency, devices.NAME.type, hosts.NAME.cores or .memory, and
    device_types.NAME.memory, .memory_bandwidth or .flops.DTYPE.

    Exits with 3 if no strategy fits.
    """
    from planner.files import newest_profile, write_plan
    from planner.judging.portfolio import compare_between, under_pipedream
    from planner.reports.what_if import sensitivity_line, sensitivity_table, what_if_json

    if cost_model == "pipedream" and set(solvers) - {"pipedream"}:
        raise OptionError("--cost-model pipedream asks only the solver pipedream; drop --solver")
    if cost_model in FOREIGN and solvers:
        raise OptionError(f"--cost-model {cost_model} has solvers of its own; drop --solver")
    if cost_model != "planner":
        refuse_for_others(cost_model, training)
    is_changed = bool(settings or dropped or added)
    if cost_model in FOREIGN and (is_changed or with_sensitivity):
        raise OptionError(
            "--set, --drop, --add-host and --sensitivity are for --cost-model planner or pipedream"
        )
    if cost_model in FOREIGN and microbatch_size is not None:
        raise OptionError("--microbatch-size is for --cost-model planner or pipedream")
    if training.pop("bandwidth") is not None and cost_model != "piper":
        raise OptionError("--bandwidth is for --cost-model piper; give a --topology instead")
    if cost_model in FOREIGN:
        chosen = profile_path or newest_profile(Path("profiles"))
        ctx.exit(under_foreign_model(chosen, topology_name))
    read = inputs_of(profile_path, topology_name, microbatch_size, quiet=as_json)
    profiles, chosen, found = read.profiles, read.profile_path, read.profiles[-1]
    model = model_path or (None if found.model_path is None else Path(found.model_path))
    check_strategy_output(
        output, {"profile": chosen, "topology": read.topology_path, "model": model}
    )
    calibration = calibration_of(read.profile_path, read.written, training)
    problems = problems_for(profiles, read.topology_path, gpus, training, calibration)
    present, changed = problems, None
    if is_changed:
        changed = changed_cluster(problems[-1], settings, dropped, added)
        problems = tuple(replace(one, topology=changed.topology) for one in problems)
    problem = problems[-1]
    loaded = load_for(found, chosen, model_path)
    say_if_compiling()
    comparisons, asked = [], problems
    with spinner() as say:
        for some in (present, problems) if is_changed else (problems,):
            if cost_model == "pipedream":
                say(cost_model)
                comparisons.append(under_pipedream(some[-1]))
            else:
                names = with_given(solvers or portfolio(), some[-1].options)
                one, asked = compare_between(some, profiles, names, time_limit, say)
                comparisons.append(one)
    comparison = comparisons[-1]
    best, partition = comparison.best, None
    if best is not None and best.plan is not None:
        if loaded is not None and best.microbatch_size != found.microbatch_size:
            sizes = {one.profile.microbatch_size: one.profile for one in asked}
            loaded = load_for(sizes[best.microbatch_size], chosen, model_path)
        plan, partition = finished(best.plan, loaded, output)
        write_plan(plan, output)
    written = None if best is None else str(output)
    report = pipedream_report(asked, comparison, (*solvers, cost_model))
    gains = sensitivity_of(asked, comparison) if with_sensitivity else None
    if as_json:
        plain = solve_json(comparison, problem, report, cost_model, written, partition)
        if changed is not None:
            count = len(present[-1].topology.devices)
            plain["what_if"] = what_if_json(changed.said, comparisons[0], count)
        if gains is not None:
            plain["sensitivity"] = [asdict(gain) for gain in gains]
        click.echo(json.dumps(plain))
    else:
        print_comparison(comparison, output, partition, report, cost_model)
        if changed is not None:
            print_what_if(changed, comparisons, (present[-1], problem))
        if gains:
            show(sensitivity_table(gains))
            click.echo(sensitivity_line(gains))
    left = output.with_suffix(".onnx")
    if written and partition is None and left.is_file():
        click.echo(f"note: {left} is of an earlier strategy; delete it", err=as_json)
    if best is None:
        ctx.exit(NO_PLAN)


def refuse_for_others(cost_model: str, training: Mapping[str, Any]) -> None:
    """Refuses what solvers under another cost model would not heed."""
    given = [name for name in ("cuts", "replicas", "pins") if training[name]]
    if given:
        flag = given[0].removesuffix("s") if given[0] == "pins" else given[0]
        raise OptionError(f"--{flag} is for --cost-model planner, not for {cost_model}")


def sensitivity_of(problems: "Sequence[Problem]", comparison: "Comparison") -> "tuple[Gain, ...]":
    """What bounds the best plan; nothing if there is none."""
    from planner.judging.sensitivity import sensitivity

    best = comparison.best
    if best is None or best.plan is None:
        return ()
    size = best.microbatch_size
    chosen = next(one for one in problems if one.profile.microbatch_size == size)
    return sensitivity(chosen, best.plan.strategy)


def print_what_if(
    changed: "Changed", comparisons: "Sequence[Comparison]", problems: "Sequence[Problem]"
) -> None:
    """What is different and what it brings.

    Args:
        comparisons: before and after.
        problems: likewise.
    """
    from planner.reports.what_if import unheard, what_if_table

    counts = [len(problem.topology.devices) for problem in problems]
    show(what_if_table(comparisons[0], comparisons[1], counts))
    for line in changed.said:
        click.echo(f"changed: {line}")
    for note in unheard(problems[0], changed.said):
        click.echo(f"note: {note}")


def pipedream_report(
    problems: "Sequence[Problem]", comparison: "Comparison", asked: Sequence[str]
) -> "PipeDreamReport | None":
    """What PipeDream's optimizer says of its plan, if it was asked by name and has one."""
    if "pipedream" not in asked:
        return None
    from planner.solvers.pipedream.solve import optimum

    sizes = {row.microbatch_size for row in comparison.rows if row.solver == "pipedream"}
    chosen = [one for one in problems if one.profile.microbatch_size in sizes] or problems
    return optimum(chosen[-1]).report


def solve_json(
    comparison: "Comparison",
    problem: "Problem",
    report: "PipeDreamReport | None",
    cost_model: str,
    written: str | None,
    partition: str | None,
) -> dict[str, Any]:
    """The object that `solve --json` prints."""
    from planner.reports.pipedream import pipedream_json, under_foreign_model
    from planner.reports.solve import comparison_json

    plain = comparison_json(comparison, len(problem.topology.devices), written, partition)
    if cost_model != "planner":
        plain = under_foreign_model(plain, None if report is None else report.objective_s)
    return {**plain, "pipedream": None if report is None else pipedream_json(report)}


def load_for(profile: "Profile", profile_path: Path, model_path: Path | None) -> "Model | None":
    """The model of a profile, to be annotated; None where it is not at hand."""
    if model_path is None and profile.model_path is None:
        return None
    path = model_path or Path(str(profile.model_path))
    if model_path is None and not path.is_file():
        return None
    from planner.model import load

    try:
        model = load(path, dimensions=profile.dimensions)
    except ModelError as error:
        raise FileError(
            f"{profile_path}: was not made for {path}, or with another version of it: {error}"
        ) from error
    if model.hash != profile.model_hash:
        raise FileError(
            f"{profile_path}: made for model {str(profile.model_hash)[:12]}, but {path} is"
            f" {model.hash[:12]}; run: planner profile {path}"
        )
    return model


def finished(plan: "Plan", model: "Model | None", output: Path) -> tuple["Plan", str | None]:
    """The plan with its path to the model, and the path of the annotated model, if there is one."""
    if model is None:
        return plan, None
    from planner.partition import write_partition

    plan = replace(plan, model_path=relative(model.path, output.parent))
    partition = output.with_suffix(".onnx")
    write_partition(model, plan, partition)
    return plan, str(partition)


def print_pipedream(report: "PipeDreamReport") -> None:
    """PipeDream's own figures."""
    from planner.reports.pipedream import pipedream_lines, pipedream_table

    show(pipedream_table(report))
    for line in pipedream_lines(report):
        click.echo(line)


def print_comparison(
    comparison: "Comparison",
    output: Path,
    partition: str | None,
    report: "PipeDreamReport | None",
    cost_model: str,
) -> None:
    """The tables and what to do next."""
    from planner.launcher.torchrun import torchrun_command
    from planner.reports.compare import winner_line
    from planner.reports.solve import (
        certificate_lines,
        comparison_table,
        no_plan_lines,
        reason_lines,
        stage_table,
        times_line,
    )

    if cost_model == "planner":
        show(comparison_table(comparison))
    if report is not None:
        print_pipedream(report)
    best = comparison.best
    if best is None or best.plan is None:
        advice = no_plan_lines if cost_model == "planner" else reason_lines
        for line in advice(comparison):
            click.echo(line)
        return
    plan = best.plan
    show(stage_table(plan))
    said = (*plan.notes, *comparison.notes, *reason_lines(comparison))
    notes = [f"note: {note}" for note in said]
    certificate = certificate_lines(plan) if cost_model == "planner" else ()
    winner = (winner_line(comparison),) if cost_model == "planner" else ()
    for line in (*winner, *certificate, times_line(plan), *notes):
        click.echo(line)
    if partition is None:
        click.echo(
            f"wrote {output}; no annotated model, because the model is not at hand (--model)"
        )
    else:
        click.echo(f"wrote {output} and {partition}")
    count, quoted = len(plan.ranks), shlex.quote(str(output))
    if count > 1:
        click.echo(f"run it: {torchrun_command(output, count)}")
        click.echo(f"    or: planner launch {quoted} --nproc {count}")
    else:
        click.echo(f"run it: planner launch {quoted}")
