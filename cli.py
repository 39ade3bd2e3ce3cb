"""The command line: parse, call one function of the library, print. The library prints nothing."""

import errno
import json
import math
import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner import __version__
from planner.errors import FileError, ModelError, OptionError, PlannerError, UnitError
from planner.units import parse_bytes, parse_rate, parse_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

    from planner.costs.pipedream import PipeDreamReport
    from planner.model import Model
    from planner.plan import Comparison
    from planner.prediction import Plan
    from planner.problem import Problem
    from planner.profile import Profile
    from planner.profilers.analytic import Fit
    from planner.profilers.compare import EngineComparison
    from planner.profilers.measured import Effort
    from planner.report import Table
    from planner.sensitivity import Gain
    from planner.what_if import Changed

NO_PLAN = 3
# Cost models that plan for graphs of their own, with solvers of their own.
FOREIGN = ("dnn-partitioning", "piper")
# What PipeDream's --memory-constraint means there.
PIPEDREAM_MEMORY_BYTES = 16_000_000_000
STOPPED = 130  # 128 + SIGINT, as shells have it
# Width of tables where there is no terminal to ask.
PIPED_WIDTH = 160


class Quantity(click.ParamType[Any]):
    """An option with a unit."""

    def __init__(self, name: str, parse: Callable[[str], float]) -> None:
        self.name, self.parse = name, parse

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Parses text; defaults that are numbers already stay."""
        if not isinstance(value, str):
            return value
        try:
            return self.parse(value)
        except UnitError as error:
            return self.fail(str(error), param, ctx)


class Dimension(click.ParamType[Any]):
    """NAME=N."""

    name = "NAME=N"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Splits at the equals sign."""
        name, _, number = str(value).partition("=")
        is_number = number.isascii() and number.isdecimal()
        if not name or not is_number or int(number) < 1:
            return self.fail(f"expected NAME=N such as sequence=128, got {value!r}", param, ctx)
        return name, int(number)


class Batches(click.ParamType[Any]):
    """One size of a microbatch or several, such as 1,2,4."""

    name = "N[,N...]"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """The sizes, ascending."""
        if not isinstance(value, str):
            return value
        texts = value.split(",")
        good = all(text.isascii() and text.isdecimal() and int(text) > 0 for text in texts)
        if not good or len({int(text) for text in texts}) < len(texts):
            return self.fail(f"expected a size such as 8, or 4,8,16, got {value!r}", param, ctx)
        return tuple(sorted(int(text) for text in texts))


def distinct(
    ctx: click.Context, param: click.Parameter, value: tuple[tuple[str, int], ...]
) -> tuple[tuple[str, int], ...]:
    """Refuses a dimension that is bound twice."""
    names = [name for name, _ in value]
    for name in names:
        if names.count(name) > 1:
            raise click.BadParameter(f"{name} is given more than once", ctx, param)
    return value


def parse_ratio(text: str) -> float:
    """A number above 0.

    Raises:
        UnitError: if it is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UnitError(f"expected a number above 0 such as 2, got {text!r}")
    return value


SIZE, TIME = Quantity("size", parse_bytes), Quantity("time", parse_seconds)
RATE = Quantity("rate", parse_rate)
RATIO = Quantity("ratio", parse_ratio)


class Commands(click.Group):
    """Turns the library's errors, and the system's, into click's, in this one place."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command."""
        try:
            return super().invoke(ctx)
        except PlannerError as error:
            raise click.ClickException(str(error)) from error
        except (KeyboardInterrupt, click.Abort):
            click.echo("stopped", err=True)
            ctx.exit(STOPPED)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # who reads our output has had enough, which click knows
            abandon_output()
            where = "" if error.filename is None else f"{error.filename}: "
            raise click.ClickException(f"{where}{error.strerror or error}") from error


def abandon_output() -> None:
    """Where standard output takes no more, such as on a full disk, keeps Python from trying again
    when it ends.
    """
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Plans how to train an ONNX model on several devices, says how good the plan is, and runs it.

    \b
    planner profile model.onnx
    planner solve --gpus 8 --topology p3.yaml
    torchrun --nproc-per-node 8 --no-python planner launch strategy.json
    """


# -------------------------------------------------------------------------------- profile


@main.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path),
              help="Profile to write.  [default: profiles/MODEL.json]")  # fmt: skip
@click.option("--batch", "batches", type=Batches(), default=(None,),
              help="Samples per microbatch; of several sizes, such as 1,2,4, solve takes the best,"
              " and sizes between.")  # fmt: skip
@click.option("--dim", "dims", type=Dimension(), multiple=True, callback=distinct,
              help="Bind a symbolic dimension.")  # fmt: skip
@click.option("--train", multiple=True, metavar="NAME", help="Train this initializer.")
@click.option("--freeze", multiple=True, metavar="NAME", help="Do not train this initializer.")
@click.option("--device", default="cpu", show_default=True,
              help="cpu, cuda or cuda:N to measure here; a type such as V100-SXM2-16GB to compute.",
              )  # fmt: skip
@click.option("--engine", type=click.Choice(["torch", "onnxruntime", "analytic"]),
              help="What the times come from.  [default: torch; analytic for a type of device]",
              )  # fmt: skip
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]),
              help="Compute in this type where autocast does.  [default: the model's]",
              )  # fmt: skip
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True,
              help="CPU threads; one, because torchrun gives each rank one.")  # fmt: skip
@click.option("--repetitions", type=click.IntRange(1), metavar="N",
              help="Time every operator at least so often.  [default: 3; onnxruntime: 10]",
              )  # fmt: skip
@click.option("--budget", type=TIME, default="1s", show_default=True,
              help="Repeat a different operator so long at most, or until it is known to 3 %.",
              )  # fmt: skip
@click.option("--cache/--no-cache", "cached", default=True, show_default=True,
              help="Take what was measured on this machine before, and keep what is found.",
              )  # fmt: skip
@click.option("--compare", "comparing", is_flag=True,
              help="Also time forwards with ONNX Runtime, compute them, and show all beside each"
              " other.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Of the synthetic inputs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def profile(
    model: Path,
    output: Path | None,
    batches: tuple[int | None, ...],
    device: str,
    engine: str | None,
    comparing: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Times every operator of an ONNX MODEL, forward and backward, and what it keeps in memory.

    \b
    planner profile resnet50.onnx --batch 8
    planner profile resnet50.onnx --batch 4,8,16
    planner profile gpt2.onnx --batch 4 --dim seq=128 --threads 1

    What is not here can be computed: for a type of device in the table of the planner, or, where
    MODEL is a profile that was measured, from what another device took for it.

    \b
    planner profile gpt2.onnx --batch 4 --dim seq=512 --device A100-SXM4-80GB
    planner profile profiles/gpt2.json --device V100-SXM2-16GB -o profiles/gpt2-v100.json
    """
    from planner.files import write_profiles
    from planner.profilers.engines import rescaled_profiles

    path = output or Path("profiles") / f"{model.stem}.json"
    check_output([path], {"model": model})
    efforts: list[Effort] = []
    comparison = None
    if model.suffix.lower() in (".json", ".txt"):
        refuse_for_profiles(batches, engine, comparing, options)
        found: Sequence[Profile] = rescaled_profiles(model, device)
    else:
        found, loaded = measured_profiles(model, batches, device, engine, efforts, options)
        if comparing:
            comparison = compared_engines(loaded, found[-1], options)
    write_profiles(found, path)
    print_profiles(found, efforts, comparison, path, as_json)


def refuse_for_profiles(
    batches: Sequence[int | None],
    engine: str | None,
    comparing: bool,
    options: Mapping[str, Any],
) -> None:
    """Refuses what says how to measure a model, where a profile is only rescaled."""
    given = [
        "--batch" if batches != (None,) else "",
        "--engine" if engine else "",
        "--compare" if comparing else "",
        *(f"--{name}" for name in ("train", "freeze", "dtype", "repetitions") if options[name]),
        "--dim" if options["dims"] else "",
    ]
    if found := [name for name in given if name]:
        raise OptionError(
            f"{found[0]} is for an ONNX model; a profile is rescaled to another type of device as"
            " it is"
        )


def measured_profiles(
    path: Path,
    batches: Sequence[int | None],
    device: str,
    engine: str | None,
    efforts: "list[Effort]",
    options: Mapping[str, Any],
) -> "tuple[list[Profile], Model]":
    """Profiles of a model at every size, and the model at the last."""
    from planner.model import load
    from planner.profilers.engines import Measuring, engine_for, profile_with

    chosen = engine_for(device, engine)
    how = Measuring(
        threads=options["threads"],
        dtype=options["dtype"],
        repetitions=options["repetitions"],
        budget_s=options["budget"],
        seed=options["seed"],
        cached=options["cached"],
    )
    found = []
    for batch in batches:
        loaded = load(
            path,
            batch=batch,
            dimensions=dict(options["dims"]),
            train=options["train"],
            freeze=options["freeze"],
        )
        size = f", microbatch of {batch}" if len(batches) > 1 else ""
        with bar(f"Profiling {path.name}{size}") as tick:
            where = relative(path, Path())
            found.append(profile_with(chosen, loaded, where, device, how, tick, efforts.append))
    return found, loaded


def compared_engines(
    loaded: "Model", by_torch: "Profile", options: Mapping[str, Any]
) -> "tuple[EngineComparison, Fit]":
    """Forward times of a measured profile beside ONNX Runtime's, and computed ones."""
    from planner.profilers.engines import compare_with_others

    if by_torch.engine != "torch" or by_torch.device_type != "cpu" or options["dtype"]:
        raise OptionError(
            "--compare: expected a profile by --engine torch on --device cpu in the model's own"
            f" type, got one by {by_torch.engine} on {by_torch.device_type} in {by_torch.dtype}"
        )
    with bar("Comparing with ONNX Runtime") as tick:
        return compare_with_others(loaded, by_torch, seed=options["seed"], progress=tick)


def print_profiles(
    found: "Sequence[Profile]",
    efforts: "Sequence[Effort]",
    comparison: "tuple[EngineComparison, Fit] | None",
    path: Path,
    as_json: bool,
) -> None:
    """What was found out, for people or machines."""
    from planner.profilers.summary import edge_sizes, summary
    from planner.report import (
        compare_json,
        compare_lines,
        compare_table,
        edges_line,
        effort_line,
        fit_line,
        profile_json,
        profile_lines,
        profile_table,
    )

    glances = [summary(one) for one in found]
    for one in found:
        for warning in one.warnings:
            click.echo(f"warning: {warning}", err=True)
    if as_json:
        *others, plain = (
            profile_json(one, glance, str(path)) for one, glance in zip(found, glances, strict=True)
        )
        more: dict[str, Any] = {"others": others} if others else {}
        if efforts:
            more["effort"] = [asdict(effort) for effort in efforts]
        if comparison is not None:
            more["compared"] = compare_json(*comparison)
        click.echo(json.dumps({**plain, **more}))
        return
    for index, (one, glance) in enumerate(zip(found, glances, strict=True)):
        show(profile_table(glance))
        for line in (*profile_lines(one, glance), edges_line(edge_sizes(one))):
            click.echo(line)
        if efforts:
            click.echo(effort_line(efforts[index]))
    if comparison is not None:
        show(compare_table(comparison[0]))
        for line in (*compare_lines(comparison[0]), fit_line(comparison[1])):
            click.echo(line)
    click.echo(f"wrote {path}")


# -------------------------------------------------------------------------------- solve


@main.command()
@click.option("--profile", "profile_path", type=click.Path(path_type=Path),
              help="Profile to plan for.  [default: the newest in ./profiles]")  # fmt: skip
@click.option("--model", "model_path", type=click.Path(path_type=Path),
              help="The ONNX file, if it is not where the profile says.")  # fmt: skip
@click.option("--gpus", type=click.IntRange(1), metavar="N",
              help="Use the first N devices.  [default: all]")  # fmt: skip
@click.option("--topology", "topology_name", default="local.yaml", show_default=True,
              help="A file, one in ./topologies, or a preset.")  # fmt: skip
@click.option("--solver", "solvers", multiple=True, metavar="NAME",
              help="Ask only this one of single, data-parallel, antichain, even, pipedream, heft,"
              " m-topo, m-etf, m-sct, pesto, netsplit; may be repeated.  [default: the first five]",
              )  # fmt: skip
@click.option("--cost-model", type=click.Choice(["planner", "pipedream", *FOREIGN]),
              default="planner", show_default=True, help="Whose figures decide.")  # fmt: skip
@click.option("--bandwidth", type=RATE,
              help='Of Piper: between devices, such as "25 GiB/s".  [default: the file\'s]',
              )  # fmt: skip
@click.option("--objective", type=click.Choice(["iteration", "bottleneck", "latency"]),
              default="iteration", show_default=True)  # fmt: skip
@click.option("--microbatches", type=click.IntRange(1), metavar="M",
              help="Per iteration, of the profile's largest size.  [default: 4 per device]",
              )  # fmt: skip
@click.option("--global-batch", type=click.IntRange(1), metavar="B",
              help="Samples per iteration, instead of --microbatches.")  # fmt: skip
@click.option("--microbatch-size", type=click.IntRange(1), metavar="N",
              help="Samples in a microbatch, as profiled or between.  [default: the best]",
              )  # fmt: skip
@click.option("--schedule", type=click.Choice(["1f1b", "gpipe"]), default="1f1b",
              show_default=True)  # fmt: skip
@click.option("--optimizer", type=click.Choice(["sgd", "momentum", "adam", "adamw"]),
              default="sgd", show_default=True)  # fmt: skip
@click.option("--recompute", type=click.Choice(["auto", "none", "full"]), default="auto",
              show_default=True, help="Run forwards twice instead of stashing.")  # fmt: skip
@click.option("--device-memory", type=SIZE, help='Per device, such as "8 GiB".')
@click.option("--reserve", type=SIZE, default="1 GiB", show_default=True,
              help="Memory per device that is not to be planned with.")  # fmt: skip
@click.option("--max-downsets", type=click.IntRange(2), metavar="N",
              help="Merge operators until there are so few.  [default: some seconds' worth]",
              )  # fmt: skip
@click.option("--exact", is_flag=True,
              help="Merge no operators, however long it takes; up to 200,000 downsets.",
              )  # fmt: skip
@click.option("--straight-pipeline", is_flag=True,
              help="Of PipeDream: replicate no stage.")  # fmt: skip
@click.option("--memory-constraint", is_flag=True,
              help="Of PipeDream: limit its stash to --device-memory.  [16 GB without it]",
              )  # fmt: skip
@click.option("--fewer-machines", is_flag=True,
              help="Of PipeDream: leave machines out where that is faster.")  # fmt: skip
@click.option("--activation-compression", type=RATIO, metavar="R",
              help="Of PipeDream: count transfers, of activations compressed R times; 1 for not"
              " at all.")  # fmt: skip
@click.option("--time-limit", type=TIME, default="10s", show_default=True,
              help="For all solvers together.")  # fmt: skip
@click.option("--seed", default=0, show_default=True)
@click.option("--set", "settings", multiple=True, metavar="PATH=VALUE",
              help="What if: another figure, such as links.nic.bandwidth=200Gbps; may be repeated.",
              )  # fmt: skip
@click.option("--drop", "dropped", multiple=True, metavar="NAME",
              help="What if: without this device or host; may be repeated.")  # fmt: skip
@click.option("--add-host", "added", multiple=True, metavar="NAME",
              help="What if: with one more of this host, or with the hosts of this topology; may be"
              " repeated.")  # fmt: skip
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
    from planner.clusters import find_topology
    from planner.files import newest_profile, write_plan
    from planner.formats import read_any_profiles
    from planner.interpolate import interpolated
    from planner.plan import compare_between, under_pipedream
    from planner.what_if_report import sensitivity_line, sensitivity_table, what_if_json

    if cost_model == "pipedream" and set(solvers) - {"pipedream"}:
        raise OptionError("--cost-model pipedream asks only the solver pipedream; drop --solver")
    if cost_model in FOREIGN and solvers:
        raise OptionError(f"--cost-model {cost_model} has solvers of its own; drop --solver")
    is_changed = bool(settings or dropped or added)
    if cost_model in FOREIGN and (is_changed or with_sensitivity):
        raise OptionError(
            "--set, --drop, --add-host and --sensitivity are for --cost-model planner or pipedream"
        )
    if cost_model in FOREIGN and microbatch_size is not None:
        raise OptionError("--microbatch-size is for --cost-model planner or pipedream")
    if training.pop("bandwidth") is not None and cost_model != "piper":
        raise OptionError("--bandwidth is for --cost-model piper; give a --topology instead")
    chosen = profile_path or newest_profile(Path("profiles"))
    if cost_model in FOREIGN:
        ctx.exit(under_foreign_model(chosen, topology_name))
    profiles = read_any_profiles(chosen)
    if microbatch_size is not None:
        profiles = (interpolated(profiles, microbatch_size),)
    found = profiles[-1]
    if profile_path is None:
        click.echo(f"profile {chosen}, the newest in profiles/", err=as_json)
    topology_path = find_topology(topology_name)
    model = model_path or (None if found.model_path is None else Path(found.model_path))
    check_strategy_output(output, {"profile": chosen, "topology": topology_path, "model": model})
    problems = problems_for(profiles, topology_path, gpus, training)
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
                one, asked = compare_between(some, profiles, solvers or None, time_limit, say)
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


def changed_cluster(
    problem: "Problem", settings: Sequence[str], dropped: Sequence[str], added: Sequence[str]
) -> "Changed":
    """The cluster of a problem with what --set, --drop and --add-host ask for."""
    from planner.clusters import device_table, find_topology, read_topology
    from planner.what_if import what_if

    topology = problem.topology
    hosts = [host.name for host in topology.hosts]
    shown = ", ".join(hosts[:8]) + ", .." * (len(hosts) > 8)
    more = []
    for name in added:
        try:
            path = None if name in hosts else find_topology(name)
        except FileError as error:
            raise OptionError(
                f"--add-host {name}: expected a host of the topology, {shown}, or another"
                f" topology; {error}"
            ) from None
        more.append((name, None if path is None else read_topology(path)))
    return what_if(topology, settings, dropped, more, device_table())


def sensitivity_of(problems: "Sequence[Problem]", comparison: "Comparison") -> "tuple[Gain, ...]":
    """What bounds the best plan; nothing if there is none."""
    from planner.sensitivity import sensitivity

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
    from planner.what_if_report import unheard, what_if_table

    counts = [len(problem.topology.devices) for problem in problems]
    show(what_if_table(comparisons[0], comparisons[1], counts))
    for line in changed.said:
        click.echo(f"changed: {line}")
    for note in unheard(problems[0], changed.said):
        click.echo(f"note: {note}")


def under_foreign_model(chosen: Path, topology_name: str) -> int:
    """`solve` under dnn-partitioning's or Piper's cost model; the exit code."""
    from planner.clusters import find_topology
    from planner.foreign import (
        ForeignModel,
        ForeignOptions,
        foreign_json,
        solve_foreign,
        solve_profile,
    )
    from planner.formats import DNN_PARTITIONING, PIPER, detect, read_any_profiles
    from planner.formats.dnn_partitioning import read_dnn_partitioning
    from planner.formats.piper import read_piper
    from planner.problem import Recompute
    from planner.report import foreign_lines, foreign_stage_table, foreign_table

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
    )
    form = detect(chosen)
    say_if_compiling()
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


def pipedream_report(
    problems: "Sequence[Problem]", comparison: "Comparison", asked: Sequence[str]
) -> "PipeDreamReport | None":
    """What PipeDream's optimizer says of its plan, if it was asked by name and has one."""
    if "pipedream" not in asked:
        return None
    from planner.solvers.pipedream import optimum

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
    from planner.report import comparison_json, pipedream_json, under_foreign_model

    plain = comparison_json(comparison, len(problem.topology.devices), written, partition)
    if cost_model != "planner":
        plain = under_foreign_model(plain, None if report is None else report.objective_s)
    return {**plain, "pipedream": None if report is None else pipedream_json(report)}


def say_if_compiling() -> None:
    """Says why the first solve of a version takes longer."""
    from planner.jit import compiled_before

    if not compiled_before():
        click.echo("compiling the search, once per version: some 10 to 20 s", err=True)


def problems_for(
    profiles: Sequence["Profile"],
    topology_path: Path,
    gpus: int | None,
    training: Mapping[str, Any],
) -> tuple["Problem", ...]:
    """The problems that the options describe, one for each size of the microbatch, all with the
    same samples per iteration.
    """
    from planner.clusters import device_table, read_topology
    from planner.problem import Objective, Optimizer, Options, PipeDream, Problem, Recompute
    from planner.strategy import ScheduleName
    from planner.topology import take

    topology = read_topology(topology_path, gpus)
    topology = topology if gpus is None else take(topology, gpus)
    if training["exact"] and training["max_downsets"] is not None:
        raise OptionError("give either --exact or --max-downsets, not both")
    own = {kind.name: kind for kind in topology.device_types}
    memory = training["device_memory"] or PIPEDREAM_MEMORY_BYTES
    options = Options(
        num_microbatches=1,
        schedule=ScheduleName(training["schedule"]),
        optimizer=Optimizer(training["optimizer"]),
        objective=Objective(training["objective"]),
        recompute=Recompute(training["recompute"]),
        device_memory_bytes=training["device_memory"],
        reserve_bytes=training["reserve"],
        max_downsets=training["max_downsets"],
        exact=training["exact"],
        seed=training["seed"],
        pipedream=PipeDream(
            straight_pipeline=training["straight_pipeline"],
            memory_bytes=memory if training["memory_constraint"] else None,
            fewer_machines=training["fewer_machines"],
            compression=training["activation_compression"],
        ),
    )
    measured_on = (device_table() | own).get(profiles[-1].device_type)
    counts = nums_microbatches(profiles, len(topology.devices), training)
    return tuple(
        Problem(profile, topology, replace(options, num_microbatches=count), measured_on)
        for profile, count in zip(profiles, counts, strict=True)
        if count is not None
    )


def nums_microbatches(
    profiles: Sequence["Profile"], num_devices: int, training: Mapping[str, Any]
) -> list[int | None]:
    """M for each size of the microbatch, from --microbatches (of the largest), --global-batch or
    the default; None for sizes that do not divide the samples.
    """
    samples, given = training["global_batch"], training["microbatches"]
    if samples is not None and given is not None:
        raise OptionError("give either --microbatches or --global-batch, not both")
    sizes = [profile.microbatch_size for profile in profiles]
    samples = samples or (given or 4 * num_devices) * sizes[-1]
    if all(samples % size for size in sizes):
        raise OptionError(
            f"--global-batch {samples} is no multiple of the profile's microbatch of"
            f" {' or '.join(map(str, sizes))}; take one, --microbatch-size for a size between, or"
            " profile with another --batch"
        )
    return [None if samples % size else samples // size for size in sizes]


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
    from planner.report import pipedream_lines, pipedream_table

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
    from planner.launch.torchrun import torchrun_command
    from planner.report import (
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
    for line in (*certificate, times_line(plan), *notes):
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


# -------------------------------------------------------------------------------- launch


@main.command()
@click.argument("strategy", type=click.Path(path_type=Path))
@click.option("--nproc", type=click.IntRange(1), metavar="N",
              help="Start N processes with torchrun.")  # fmt: skip
@click.option("--model", "model_path", type=click.Path(path_type=Path),
              help="The ONNX file, if it is not where the strategy says.")  # fmt: skip
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True)
@click.option("--lr", "learning_rate", type=float,
              help="Learning rate.  [default: the optimizer's usual one]")  # fmt: skip
@click.option("--loss", type=click.Choice(["auto", "cross-entropy", "mse"]), default="auto",
              show_default=True)  # fmt: skip
@click.option("--data", metavar="MODULE:FUNCTION",
              help="Where microbatches come from.  [default: synthetic]")  # fmt: skip
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto",
              show_default=True)  # fmt: skip
@click.option("--threads", type=click.IntRange(1),
              help="CPU threads per rank.  [default: as profiled]")  # fmt: skip
@click.option("--seed", type=int, help="Of synthetic data.  [default: the strategy's]")
@click.option("--trace", type=click.Path(path_type=Path),
              help="Write a measured iteration, to be opened with Perfetto.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, on rank 0.")
@click.pass_context
def launch(
    ctx: click.Context,
    /,
    strategy: Path,
    nproc: int | None,
    as_json: bool,
    steps: int,
    **options: Any,
) -> None:
    """Trains as a STRATEGY says, and shows predicted beside measured times.

    \b
    torchrun --nproc-per-node 8 --no-python planner launch strategy.json
    planner launch strategy.json --nproc 8 --steps 20

    \b
    --data names a function (step, microbatch, inputs) -> (tensors by input name, target), where
    inputs maps the name of each input of the model to its shape and dtype. Every rank calls it
    for its own microbatches.
    """
    if options["trace"] is not None:
        check_output([options["trace"]], {"strategy": strategy, "model": options["model_path"]})
    if nproc is not None and "RANK" not in os.environ:
        from planner.launch.torchrun import start_torchrun

        ctx.exit(start_torchrun(strategy, nproc, forwarded()))
    from planner.launch.run import launch as run
    from planner.launch.world import Stopped
    from planner.report import launch_json, launch_tables, loss_line

    try:
        with bar("Training") as tick:
            report = run(
                strategy,
                steps=steps,
                report=lambda line: click.echo(line, err=True),
                progress=lambda step: tick(step, steps),
                **options,
            )
    except Stopped:
        ctx.exit(1)  # the rank that failed has said why
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            raise
        ctx.exit(STOPPED)
    if report is None:
        return
    if as_json:
        click.echo(json.dumps(launch_json(report)))
        return
    for table in launch_tables(report):
        show(table)
    for line in (loss_line(report), *(f"note: {note}" for note in report.notes)):
        click.echo(line)


def forwarded() -> list[str]:
    """This command's arguments for its ranks: all but --nproc and the strategy."""
    ctx = click.get_current_context()
    found: list[str] = []
    for parameter in ctx.command.params:
        value = ctx.params.get(parameter.name or "")
        if parameter.name in ("strategy", "nproc") or value is None or value is False:
            continue
        found += [parameter.opts[0]] if value is True else [parameter.opts[0], str(value)]
    return found


# -------------------------------------------------------------------------------- topology


@main.group()
def topology() -> None:
    """Lists, shows, imports and measures clusters.

    \b
    planner topology list
    planner topology show p3 --svg p3.svg
    planner topology probe --nproc 2
    """


@topology.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_topologies(as_json: bool) -> None:
    """Lists the clusters that ship with the planner.

    \b
    planner topology list
    planner topology list --json
    """
    from planner.cluster_report import presets, presets_table

    found = presets()
    if as_json:
        click.echo(json.dumps({"presets": [asdict(one) for one in found]}))
    else:
        show(presets_table(found))


@topology.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("cluster.yaml"),
              show_default=True)  # fmt: skip
@click.option("--nproc", type=click.IntRange(1), metavar="N",
              help="Start N processes on this host with torchrun.")  # fmt: skip
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto",
              show_default=True, help="cpu measures with gloo, cuda with nccl.")  # fmt: skip
@click.option("--largest", metavar="SIZE", default="256 MiB", show_default=True,
              help="Of the messages.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, on rank 0.")
@click.pass_context
def probe(
    ctx: click.Context, output: Path, nproc: int | None, device: str, largest: str, as_json: bool
) -> None:
    """Measures the cluster that torchrun has started ranks on, and writes its topology.

    \b
    torchrun --nproc-per-node 8 --no-python planner topology probe -o cluster.yaml
    planner topology probe --nproc 2

    Every ordered pair of ranks and all-reduces of growing groups are measured, one after the
    other; nothing else should run meanwhile. Sizes of messages go up to --largest, or for a pair
    until one would take over 1 s.
    """
    largest_bytes = SIZE.convert(largest, None, ctx)
    check_output([output], {})
    if nproc is not None and "RANK" not in os.environ:
        from planner.launch.torchrun import start_ranks

        options = ["--output", str(output), "--device", device, "--largest", largest]
        command = ["topology", "probe", *options, *(["--json"] if as_json else [])]
        ctx.exit(start_ranks(command, nproc))
    from planner.launch.probe import probe as run
    from planner.launch.world import Stopped
    from planner.probe_report import (
        class_table,
        probe_comments,
        probe_json,
        probe_lines,
        sums_table,
    )
    from planner.write_topology import write_topology

    try:
        with bar("Probing") as tick:
            found = run(output.stem, device=device, largest_bytes=largest_bytes, progress=tick)
    except Stopped:
        ctx.exit(1)  # the rank that failed has said why
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            raise
        ctx.exit(STOPPED)
    if found is None:
        return
    today = datetime.now(UTC).date().isoformat()
    write_topology(found.inferred.topology, output, probe_comments(found, today))
    if as_json:
        click.echo(json.dumps(probe_json(found, str(output))))
        return
    show(class_table(found))
    if found.allreduces:
        show(sums_table(found))
    for line in probe_lines(found):
        click.echo(line)
    click.echo(f"wrote {output}; use it: planner solve --topology {shlex.quote(str(output))}")


@topology.command("show")
@click.argument("name")
@click.option("--gpus", type=click.IntRange(1), metavar="N",
              help="Only the first N devices.  [default: all]")  # fmt: skip
@click.option("--svg", "picture", type=click.Path(path_type=Path), help="Write a picture.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show_topology(name: str, gpus: int | None, picture: Path | None, as_json: bool) -> None:
    """Shows a cluster: devices, links, bandwidth between devices, and what bounds all-reduces.
    NAME is a file, one in ./topologies, or a preset.

    \b
    planner topology show p3
    planner topology show cluster.yaml --gpus 12 --svg cluster.svg
    """
    from planner import cluster_report as report
    from planner.clusters import find_topology, read_topology
    from planner.files import write_atomically
    from planner.pictures import tree
    from planner.pictures_svg import svg
    from planner.places import without_dead_ends
    from planner.topology import take

    path = find_topology(name)
    found = read_topology(path, gpus)
    found = found if gpus is None else without_dead_ends(take(found, gpus))
    if picture is not None:
        check_output([picture], {"topology": path})
        write_atomically(picture, svg(found).encode())
    if as_json:
        plain = report.topology_json(found)
        click.echo(json.dumps({**plain, "svg": None if picture is None else str(picture)}))
        return
    show(report.devices_table(found))
    click.echo(f"{tree(found)}\n")
    if len(found.devices) > 1:
        for table in (
            report.bandwidth_table(found),
            report.latency_table(found),
            report.classes_table(found),
            report.collectives_table(report.collectives(found)),
        ):
            show(table)
    for note in found.notes:
        click.echo(f"note: {note}")
    if picture is not None:
        click.echo(f"wrote {picture}")


@topology.command("import")
@click.argument("source", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--from", "form", type=click.Choice(["nvidia-smi", "astra-sim", "hostfile"]),
              help="The format of FILE.  [default: by its content]")  # fmt: skip
@click.option("--device", metavar="TYPE", help="The type of all devices.")
@click.option("--type", "types", multiple=True, metavar="NAME=TYPE",
              help="The type of a host's devices (hostfile) or of a device (nvidia-smi).",
              )  # fmt: skip
@click.option("--inside", type=RATE,
              help='Of a hostfile: from a device to its host, such as "12 GB/s".')  # fmt: skip
@click.option("--between", type=RATE,
              help='Of a hostfile: from a host to the network, such as "25 Gbps".')  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True,
              help="Topology to write.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def import_cluster(
    source: Path,
    form: str | None,
    device: str | None,
    types: tuple[str, ...],
    inside: float | None,
    between: float | None,
    output: Path,
    as_json: bool,
) -> None:
    """Writes a topology from a description of a cluster in another format: the output of
    nvidia-smi topo -m, an ASTRA-sim network YAML, or a DeepSpeed hostfile.

    \b
    nvidia-smi topo -m > topo.txt
    planner topology import topo.txt --device A100-SXM4-80GB -o server.yaml
    planner topology import network.yml --device H100-SXM -o cluster.yaml
    planner topology import hostfile --type worker-1=T4 --type worker-2=L4 \\
        --inside "12 GB/s" --between "25 Gbps" -o cluster.yaml

    What the file does not say, bandwidths of NVLink and PCIe above all, comes from data sheets and
    is said in the file that is written: look through it.
    """
    from planner.formats.clusters import import_topology
    from planner.write_topology import write_topology

    named = {}
    for one in types:
        name, equals, kind = one.partition("=")
        if not (name and equals and kind):
            raise OptionError(f"--type {one}: expected NAME=TYPE such as worker-1=T4")
        if name in named:
            raise OptionError(f"--type {one}: {name} is given more than once")
        named[name] = kind
    check_output([output], {"file": source})
    found = import_topology(source, form, device, named, inside, between)
    write_topology(found, output, [f"Imported from {source.name}.", *found.notes])
    if as_json:
        plain = {"written": str(output), "num_devices": len(found.devices)}
        click.echo(json.dumps({**plain, "notes": list(found.notes)}))
        return
    for note in found.notes:
        click.echo(f"note: {note}")
    click.echo(f"wrote {output}; look at it: planner topology show {shlex.quote(str(output))}")


# -------------------------------------------------------------------------------- convert


@main.command()
@click.argument("source", metavar="IN", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--to", "form", type=click.Choice(["pipedream", "planner"]),
              help="The format to write.  [default: planner where OUT ends in .json]",
              )  # fmt: skip
@click.option("--profile", "profile_path", type=click.Path(path_type=Path),
              help="What a strategy was made for.  [default: OUT, if it is a graph.txt, else the"
              " newest in ./profiles]")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def convert(
    source: Path, target: Path, form: str | None, profile_path: Path | None, as_json: bool
) -> None:
    """Writes a profile IN as OUT in another format, or a strategy IN as PipeDream's graph with the
    stage of every node, OUT, and a picture of it for Graphviz beside it.

    \b
    planner convert vgg16.txt profiles/vgg16.json
    planner convert profiles/resnet50.json resnet50.txt --to pipedream
    planner convert strategy.json graph.txt --to pipedream

    IN may be a profile of the planner, PipeDream's graph.txt, or dnn-partitioning's or Piper's
    JSON: its content decides, not its name.
    """
    from planner.formats.convert import convert as run

    check_output([target], {})
    written = [str(path) for path in run(source, target, form, profile_path)]
    if as_json:
        click.echo(json.dumps({"written": written}))
    else:
        click.echo(f"wrote {' and '.join(written)}")


# -------------------------------------------------------------------------------- files


def check_output(written: Sequence[Path], read: Mapping[str, Path | None]) -> None:
    """Refuses to overwrite what is read.

    Args:
        written: the files that will be written.
        read: the files that are read, by what they are.
    """
    for path in written:
        if path.is_dir():
            raise OptionError(f"{path} is a folder; name a file in it")
        for what, other in read.items():
            if other is not None and path.resolve() == other.resolve():
                raise OptionError(
                    f"{path} is the {what} itself, and would be overwritten; choose another name"
                )


def check_strategy_output(output: Path, read: Mapping[str, Path | None]) -> None:
    """The same for a strategy and for the annotated model beside it."""
    if output.suffix.lower() == ".onnx":
        raise OptionError(
            f"-o {output}: expected a name such as {output.with_suffix('.json')}; the annotated"
            " model is written beside the strategy and has the ending .onnx"
        )
    check_output([output], read)
    check_output([output.with_suffix(".onnx")], read)


# -------------------------------------------------------------------------------- printing


def relative(path: Path, folder: Path) -> str:
    """A path as seen from a folder, with forward slashes."""
    return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()


def console(*, stderr: bool = False) -> "Console":
    """Colour and the terminal's width on a terminal; neither in a pipe."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else PIPED_WIDTH, highlight=False)


def show(table: "Table") -> None:
    """Prints a table; where it is too wide, with heads of several lines, then with fewer columns,
    so that no number and no name is broken.
    """
    screen = console()
    roomy = screen.options.update(width=10 * PIPED_WIDTH)
    drawn = draw(table, tall=False)
    for head in (None, *table.optional):
        if screen.measure(drawn, options=roomy).minimum <= screen.width:
            break
        table = table if head is None else table.without(head)
        drawn = draw(table, tall=True)
    screen.print(drawn)


def draw(table: "Table", *, tall: bool) -> "RichTable":
    """A table for rich. Only text after the first column is wrapped.

    Args:
        tall: whether heads are no wider than what is below them, as far as words allow.
    """
    from rich import box
    from rich.markup import escape
    from rich.table import Table as RichTable

    drawn = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD)
    for index, column in enumerate(table.columns):
        is_number, head = column.startswith(">"), column.lstrip(">")
        width = max((len(row[index]) for row in table.rows), default=0)
        if tall:
            head = textwrap.fill(head, max(1, width), break_long_words=False)
        whole = is_number or index == 0
        drawn.add_column(
            escape(head),
            justify="right" if is_number else "left",
            no_wrap=whole,
            min_width=max(width, *map(len, head.splitlines() or [""])) if whole else None,
            overflow="ellipsis" if is_number else "fold",
        )
    for index, row in enumerate(table.rows):
        drawn.add_row(*map(escape, row), style="bold green" if index == table.marked else None)
    return drawn


@contextmanager
def bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar with the time left; silent where standard output is no terminal."""
    if not sys.stdout.isatty():
        yield lambda done, total: None
        return
    from rich.progress import Progress

    with Progress(console=console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def spinner() -> Iterator[Callable[[str], None]]:
    """Says which solver is at work; silent where standard output is no terminal."""
    if not sys.stdout.isatty():
        yield lambda name: None
        return
    with console(stderr=True).status("Solving") as status:
        yield lambda name: status.update(f"Solving: {name}")


if __name__ == "__main__":
    main()
