"""`planner profile`."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from planner import api
from planner.commands.option_types import TIME, Batches, Dimension, distinct, loss_options
from planner.commands.options import OPERATORS, packed
from planner.commands.terminal import bar, say, say_note, show
from planner.support.errors import OptionError

if TYPE_CHECKING:
    from planner.api import Effort, EngineComparison, Model, Profile, RooflineFit


TRAINED = packed(
    "chosen",
    dict,
    click.option(
        "--train", multiple=True, metavar="NAME", help="Train this initializer; may be repeated."
    ),
    click.option(
        "--freeze",
        multiple=True,
        metavar="NAME",
        help="Do not train this initializer; may be repeated.",
    ),
    click.option(
        "--tie",
        multiple=True,
        metavar="NAME[=OTHER]",
        help="Keep this initializer one parameter, or make OTHER the same one; may be repeated.",
    ),
    click.option(
        "--untie",
        multiple=True,
        metavar="NAME",
        help="Give each module that reads this initializer its own; may be repeated.",
    ),
    click.option(
        "--batch-norm",
        type=click.Choice(["training", "frozen"]),
        help="Whether BatchNormalization uses the statistics of the microbatch or its running"
        " ones.  [default: as the file says]",
    ),
    click.option(
        "--output",
        multiple=True,
        metavar="NAME",
        help="Output of the model that a loss is computed from; may be repeated.  [default: the"
        " first one of floats, or the loss that the model computes]",
    ),
    loss_options("auto"),
)
"""What is trained, and how."""
OF_RESCALING = frozenset({"model", "path", "device", "as_json"})
"""Options for a profile that is rescaled; all others are for a model."""


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("-o", "path", type=click.Path(path_type=Path), metavar="FILE",
              help="Profile to write.  [default: profiles/MODEL.json, for other devices, types and"
              " engines with their names]")  # fmt: skip
@click.option("--batch", "batches", type=Batches(), default=(None,),
              help="Samples per microbatch. Among several sizes, such as 1,2,4, and sizes between"
              " them, solve chooses.")  # fmt: skip
@click.option("--dim", "dims", type=Dimension(), multiple=True, callback=distinct,
              help="Size of a symbolic dimension; may be repeated.")  # fmt: skip
@TRAINED
@click.option("--device", default="cpu", show_default=True,
              help="Device: cpu, cuda or cuda:N, which is measured here, or a type such as"
              " V100-SXM2-16GB, for which times are computed.",
              )  # fmt: skip
@click.option("--engine", type=click.Choice(["torch", "onnxruntime", "analytic"]),
              help="Source of the times.  [default: torch; analytic for a type of device]",
              )  # fmt: skip
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]),
              help="Type of the computation where autocast changes it.  [default: the model's]",
              )  # fmt: skip
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True,
              help="CPU threads; one, because torchrun gives each rank one.")  # fmt: skip
@click.option("--repetitions", type=click.IntRange(1), metavar="N",
              help="Minimum number of timed runs per operator.  [default: 3; onnxruntime: 10]",
              )  # fmt: skip
@click.option("--budget", "budget_s", type=TIME, default="1s", show_default=True,
              help="Longest time for the runs of one operator; they end when its time is known to"
              " 3 %.",
              )  # fmt: skip
@click.option("--cache/--no-cache", default=True, show_default=True,
              help="Reuse measurements made on this machine, and store new ones.",
              )  # fmt: skip
@click.option("--contention/--no-contention", default=True, show_default=True,
              help="Measure how much processes on this CPU's cores slow each other: some 12 s, once"
              " per machine.",
              )  # fmt: skip
@click.option("--compare", "comparing", is_flag=True,
              help="Show forward times by ONNX Runtime and computed ones beside those by torch.",
              )  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Seed of the synthetic inputs.")
@OPERATORS
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def profile(
    model: Path,
    path: Path | None,
    batches: tuple[int | None, ...],
    dims: tuple[tuple[str, int], ...],
    device: str,
    engine: str | None,
    dtype: str | None,
    threads: int,
    repetitions: int | None,
    budget_s: float,
    cache: bool,
    contention: bool,
    comparing: bool,
    seed: int,
    as_json: bool,
    chosen: dict[str, Any],
) -> None:
    """Times every operator of an ONNX MODEL, forward and backward, and what it keeps in memory.

    \b
    planner profile resnet50.onnx --batch 8
    planner profile resnet50.onnx --batch 4,8,16
    planner profile gpt2.onnx --batch 4 --dim seq=128 --threads 1

    Profiles of devices that are not here are computed: for a type of device in the planner's
    table, or, where MODEL is a measured profile, by rescaling it to another type.

    \b
    planner profile gpt2.onnx --batch 4 --dim seq=512 --device A100-SXM4-80GB
    planner profile profiles/gpt2.json --device V100-SXM2-16GB -o profiles/gpt2-v100.json
    """
    path = path or api.profile_path(model, device=device, engine=engine, dtype=dtype)
    older = api.check_outputs({"profile": path}, {"model": model})
    efforts: list[Effort] = []
    comparison, last = None, None
    if model.suffix.lower() in (".json", ".txt"):
        refuse_options_of_models()
        profiles: Sequence[Profile] = api.rescale(model, device)
    else:
        read = partial(api.read_model, model, dims=dict(dims), **chosen)
        measure = partial(
            api.profile, device=device, engine=engine, dtype=dtype, threads=threads,
            repetitions=repetitions, budget_s=budget_s, cache=cache, contention=contention,
            seed=seed, effort=efforts.append,
        )  # fmt: skip
        profiles, last = measured_profiles(model.name, batches, read, measure)
        print_notes(last)
        if comparing:
            with bar("Comparing with ONNX Runtime") as tick:
                comparison = api.compare_engines(last, profiles[-1], seed=seed, progress=tick)
    say_note(api.overwrite_note(path, older["profile"], profiles))
    api.write_profiles(profiles, path)
    if as_json:
        print_json(profiles, efforts, comparison, path, last)
    else:
        print_profiles(profiles, efforts, comparison, path)


def refuse_options_of_models() -> None:
    """Refuses options that say how to measure a model, where a profile is only rescaled."""
    context = click.get_current_context()
    for option in context.command.params:
        name = str(option.name)
        by_user = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if by_user and name not in OF_RESCALING:
            flag = "/".join([*option.opts, *option.secondary_opts])
            raise OptionError(
                f"{flag} is for an ONNX model; a profile is rescaled to another type of device as"
                " it is"
            )


def measured_profiles(
    name: str,
    batches: Sequence[int | None],
    read: "Callable[..., Model]",
    measure: "Callable[..., Profile]",
) -> "tuple[list[Profile], Model]":
    """Profiles of a model at every size, and the model at the last.

    Args:
        name: the model's, for the progress bar.
        read: the model at a size, `batch`.
        measure: the profile of a model, which tells its `progress`.
    """
    profiles = []
    for batch in batches:
        model = read(batch=batch)
        size = f", microbatch of {batch}" if len(batches) > 1 else ""
        with bar(f"Profiling {name}{size}") as tick:
            profiles.append(measure(model, progress=tick))
    return profiles, model


def print_json(
    profiles: "Sequence[Profile]",
    efforts: "Sequence[Effort]",
    comparison: "tuple[EngineComparison, RooflineFit] | None",
    path: Path,
    model: "Model | None",
) -> None:
    """The profile of the largest microbatch as one object, with the others and the measuring."""
    from planner.reports.profile import choices_json, compare_json, profile_json

    print_warnings(profiles)
    *others, plain = (profile_json(one, str(path)) for one in profiles)
    more: dict[str, Any] = {"others": others} if others else {}
    if model is not None:
        more["parameters"] = choices_json(model.choices)
    if efforts:
        more["effort"] = [asdict(effort) for effort in efforts]
    if comparison is not None:
        more["compared"] = compare_json(*comparison)
    click.echo(json.dumps({**plain, **more}))


def print_profiles(
    profiles: "Sequence[Profile]",
    efforts: "Sequence[Effort]",
    comparison: "tuple[EngineComparison, RooflineFit] | None",
    path: Path,
) -> None:
    """Every profile, the measuring and the comparison of engines, for people."""
    from planner.reports.profile import (
        compare_lines,
        compare_table,
        edges_line,
        effort_line,
        fit_line,
        profile_lines,
        profile_table,
    )

    print_warnings(profiles)
    for index, one in enumerate(profiles):
        show(profile_table(one))
        for line in (*profile_lines(one), edges_line(one)):
            say(line)
        if efforts:
            say(effort_line(efforts[index]))
    if comparison is not None:
        show(compare_table(comparison[0]))
        for line in (*compare_lines(comparison[0]), fit_line(comparison[1])):
            say(line)
    say(f"wrote {path}")


def print_notes(model: "Model") -> None:
    """Parameters that may be others than the module's, and what is left out where the model is
    trained, on standard error.
    """
    for warning in model.warnings:
        say(f"warning: {warning}", err=True)
    for note in model.notes:
        say(f"note: {note}", err=True)


def print_warnings(profiles: "Sequence[Profile]") -> None:
    """Warnings of the measuring, on standard error."""
    for one in profiles:
        for warning in one.warnings:
            say(f"warning: {warning}", err=True)
