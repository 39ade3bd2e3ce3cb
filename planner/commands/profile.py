"""`planner profile`."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner import api
from planner.api import LossOptions, Measuring, ModelOptions
from planner.commands.options import JSON, OPERATORS, file_option, given_flags, takes
from planner.commands.terminal import bar, say, say_note, show
from planner.support.errors import OptionError
from planner.support.options import Options, given, option

if TYPE_CHECKING:
    from planner.api import Effort, EngineComparison, Profile, RooflineFit, SizedProfiles


@dataclass(frozen=True, slots=True)
class Sizes(Options):
    """The sizes of the microbatch that are profiled."""

    batch: tuple[int, ...] = option(
        "Samples per microbatch. solve chooses among several sizes, such as 1,2,4, and sizes"
        " between them. A computed profile of one size is good for any.",
        (), least=1, metavar="N[,N...]", separator=",",
        shown="as in the file; if symbolic and measured: 1, the largest that fits, and one between",
    )  # fmt: skip

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if len({*self.batch}) < len(self.batch):
            raise OptionError(f"--batch: expected each size once, got {self.batch}")


@dataclass(frozen=True, slots=True)
class Comparing(Options):
    """Other engines beside the profile's."""

    compare: bool = option(
        "Show forward times by ONNX Runtime and computed times beside those by torch.", False
    )


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@file_option(
    "-o", "path", metavar="FILE",
    help="Profile to write.  [default: profiles/MODEL.json; for other devices, types and engines"
    " with their names]",
)  # fmt: skip
@takes(Sizes, "sizes")
@takes(ModelOptions, "options", without=["batch"])
@takes(LossOptions, "losses")
@takes(Measuring, "measuring")
@takes(Comparing, "comparing")
@OPERATORS
@JSON
def profile(
    model: Path,
    path: Path | None,
    sizes: Sizes,
    options: ModelOptions,
    losses: LossOptions,
    measuring: Measuring,
    comparing: Comparing,
    as_json: bool,
) -> None:
    """Measures every operator of an ONNX MODEL: forward and backward time, and memory.

    \b
    planner profile resnet50.onnx
    planner profile resnet50.onnx --batch 4,8,16
    planner profile gpt2.onnx --batch 4 --dim seq=128 --threads 1

    The profile of a device that is not here is computed: for a type of device in the planner's
    table or, where MODEL is a measured profile, by rescaling that profile to another type.

    \b
    planner profile gpt2.onnx --batch 4 --dim seq=512 --device A100-SXM4-80GB
    planner profile profiles/gpt2.json --device V100-SXM2-16GB -o gpt2-v100.json
    """
    device = measuring.device
    path = path or _usual_path(model, measuring)
    older = api.check_outputs({"profile": path}, {"model": model})
    efforts: list[Effort] = []
    comparison, sized = None, None
    if model.suffix.lower() in (".json", ".txt"):
        _refuse_options_of_models()
        profiles: Sequence[Profile] = api.rescale(model, device)
    else:
        with bar(f"Profiling {model.name}") as tick:
            sized = api.profile_sizes(
                model,
                sizes=sizes.batch,
                progress=lambda done, total, size: tick(done, total, f", microbatch of {size}"),
                effort=efforts.append,
                **given(measuring),
                **given(options),
                **given(losses),
            )
        profiles = sized.profiles
        _print_notes(sized)
        if comparing.compare:
            with bar("Comparing with ONNX Runtime") as tick:
                comparison = api.compare_engines(
                    sized.model, profiles[-1], seed=measuring.seed, progress=tick
                )
    say_note(api.overwrite_note(path, older["profile"], profiles))
    api.write_profiles(profiles, path)
    if as_json:
        print_json(profiles, efforts, comparison, path, sized)
    else:
        _print_profiles(profiles, efforts, comparison)
        if sized is not None and sized.choice is not None:
            say(sized.choice)
        say(f"wrote {path}")


def _usual_path(model: Path, how: Measuring) -> Path:
    """The file of a profile that the user did not name."""
    return api.profile_path(
        model, device=how.device, engine=how.engine, dtype=how.dtype,
        parameters=how.parameters, compiled=how.compiled, fused_loss=how.fused_loss,
        launch_blocking=how.launch_blocking,
    )  # fmt: skip


def _refuse_options_of_models() -> None:
    """Refuses options that say how to measure a model, where a profile is only rescaled."""
    kinds = (Sizes, ModelOptions, LossOptions, Measuring, Comparing)
    for flag in given_flags(*kinds, without={"device"}).values():
        raise OptionError(
            f"{flag} is for an ONNX model; a profile is rescaled to another type of device as it is"
        )


def print_json(
    profiles: "Sequence[Profile]",
    efforts: "Sequence[Effort]",
    comparison: "tuple[EngineComparison, RooflineFit] | None",
    path: Path,
    sized: "SizedProfiles | None",
) -> None:
    """The profile of the largest microbatch as one object, with the others and the measuring.

    Args:
        sized: the profiles with their model; None where they were rescaled.
    """
    from planner.reports.profile import choices_json, compare_json, profile_json

    _print_warnings(profiles)
    *others, plain = (profile_json(one, str(path)) for one in profiles)
    more: dict[str, Any] = {"others": others} if others else {}
    if sized is not None:
        more["parameters"] = choices_json(sized.model.choices)
        more["choice_of_sizes"] = sized.choice
    if efforts:
        more["effort"] = [asdict(effort) for effort in efforts]
    if comparison is not None:
        more["compared"] = compare_json(*comparison)
    click.echo(json.dumps({**plain, **more}))


def _print_profiles(
    profiles: "Sequence[Profile]",
    efforts: "Sequence[Effort]",
    comparison: "tuple[EngineComparison, RooflineFit] | None",
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

    _print_warnings(profiles)
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


def _print_notes(sized: "SizedProfiles") -> None:
    """Parameters that may be others than the module's, what is left out where the model is trained,
    and sizes that there are no profiles of, on standard error.
    """
    for warning in sized.model.warnings:
        say(f"warning: {warning}", err=True)
    for note in (*sized.model.notes, *sized.warnings):
        say(f"note: {note}", err=True)


def _print_warnings(profiles: "Sequence[Profile]") -> None:
    """Warnings of the measuring, on standard error."""
    for one in profiles:
        for warning in one.warnings:
            say(f"warning: {warning}", err=True)
