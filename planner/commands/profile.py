"""`planner profile`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.commands.option_types import TIME, Batches, Dimension, distinct
from planner.commands.outputs import check_output, relative
from planner.commands.printing import bar, show
from planner.errors import OptionError

if TYPE_CHECKING:
    from planner.model import Model
    from planner.profilers.analytic import RooflineFit
    from planner.profilers.compare import EngineComparison
    from planner.profilers.measured import Effort
    from planner.profiles import Profile


@click.command()
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
) -> "tuple[EngineComparison, RooflineFit]":
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
    comparison: "tuple[EngineComparison, RooflineFit] | None",
    path: Path,
    as_json: bool,
) -> None:
    """What was found out, for people or machines."""
    from planner.profilers.summary import edge_sizes, summary
    from planner.reports.engines import compare_json, compare_lines, compare_table, fit_line
    from planner.reports.profile import (
        edges_line,
        effort_line,
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
