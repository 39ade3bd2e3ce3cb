"""The costs of operators."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.api.files import given_profiles, given_topology
from planner.api.models import read_with
from planner.api.topologies import type_of
from planner.artefacts.options import LossOptions, ModelOptions
from planner.support.errors import FileError, OptionError
from planner.support.options import given, options_from
from planner.support.reading import File

if TYPE_CHECKING:
    from planner.artefacts.profile import Profile
    from planner.artefacts.topology import Topology
    from planner.model.load import Model
    from planner.profilers.analytic import RooflineFit
    from planner.profilers.compare import EngineComparison
    from planner.profilers.measured import Effort
    from planner.profilers.sizes import SizedProfiles
    from planner.simulator.traces.calibrate import CheckedCalibration


def profile(
    model: "File | Model",
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
    effort: "Callable[[Effort], None]" = lambda effort: None,
    **how: Any,
) -> "Profile":
    """The costs of each operator of a model: forward and backward time, and memory.

    Args:
        model: an ONNX file, or a model that `read_model` has read.
        progress: called with the number of operators done, and of all.
        effort: called once with the effort of the measurement, where the engine knows it.
        how: the options of the command line, called after the fields of
            `planner.profilers.options.Measuring` (`device`, `engine`, `dtype`, `parameters`,
            `gradients`, `threads`,
            `repetitions`, `budget_s`, `cache`, `contention`, `seed`), and, for a file, the options
            of `read_model`.

    Raises:
        FileError: if the file is missing or no ONNX model.
        ModelError: if the model cannot be bound or planned.
        OptionError: if the options contradict each other, or the device is not there.
        TypeError: if there is no option of that name.
    """
    from planner.profilers.engines import engine_for, profile_with
    from planner.profilers.options import Measuring
    from planner.support.reading import relative

    measuring, *reading = options_from("profile", how, Measuring, ModelOptions, LossOptions)
    engine = engine_for(measuring.device, measuring.engine)
    if isinstance(model, str | os.PathLike):
        model = read_with(model, *reading)
    elif ignored := [name for options in reading for name in given(options)]:
        raise ValueError(f"{', '.join(ignored)}: expected a file, as this model is read already")
    place = relative(model.path, Path())
    return profile_with(engine, model, place, measuring, progress=progress, effort=effort)


def profile_sizes(
    model: File,
    *,
    sizes: Sequence[int] = (),
    progress: Callable[[int, int, int], None] = lambda done, total, size: None,
    effort: "Callable[[Effort], None]" = lambda effort: None,
    **how: Any,
) -> "SizedProfiles":
    """The profiles of a model for microbatches of several sizes, among which `solve` chooses.

    Without sizes, a model whose batch is symbolic is measured at one sample, at the largest number
    that fits, and at their geometric middle (`planner.profilers.sizes` says what fits). A model of
    a fixed batch, and one whose profile is computed, has one profile.

    Args:
        model: an ONNX file.
        sizes: samples in a microbatch.
        progress: called with the number of operators done, that of all, and the size.
        effort: called for each size, as by `profile`.
        how: see `profile`.

    Raises:
        FileError: if the file is missing or no ONNX model.
        ModelError: if the model cannot be bound or planned.
        OptionError: if the options contradict each other, or the device is not there.
        TypeError: if there is no option of that name.
    """
    from planner.model.binding import batch_is_open
    from planner.model.load import read_proto
    from planner.model.protos import true_inputs
    from planner.profilers.engines import engine_for, profile_with
    from planner.profilers.options import Measuring, ProfileEngine
    from planner.profilers.sizes import profiles_at, profiles_at_usual_sizes
    from planner.support.reading import relative

    measuring, options, losses = options_from(
        "profile_sizes", how, Measuring, ModelOptions, LossOptions
    )
    engine = engine_for(measuring.device, measuring.engine)

    def read(size: int | None) -> "Model":
        return read_with(model, replace(options, batch=size), losses)

    named = sorted({*sizes}) or [options.batch]

    def measure(one: "Model") -> "Profile":
        def tick(done: int, total: int) -> None:
            progress(done, total, one.batch)

        place = relative(one.path, Path())
        # Good for any size, a computed profile serves all others.
        growth = named[0] in (None, one.batch)
        return profile_with(
            engine, one, place, measuring, progress=tick, effort=effort, growth=growth
        )

    if named == [None] and engine is not ProfileEngine.ANALYTIC:
        inputs = true_inputs(read_proto(Path(model)).graph)
        if batch_is_open(inputs, options.dims or {}):
            return profiles_at_usual_sizes(read, measure, measuring.device)
    return profiles_at(named, read, measure)


def profile_path(
    model: File,
    *,
    device: str = "cpu",
    engine: str | None = None,
    dtype: str | None = None,
    parameters: str | None = None,
    compiled: bool = False,
    fused_loss: bool = False,
    launch_blocking: bool = False,
) -> Path:
    """The usual file of a profile, in ./profiles: MODEL.json where it was measured by PyTorch on
    this CPU in float32, and with the device, type and engine in its name else.

    Args:
        model: an ONNX file, or a profile that is to be rescaled.
        device, engine, dtype, parameters, compiled, fused_loss, launch_blocking: see `profile`.

    Raises:
        OptionError: if the device is not there.
    """
    from planner.profilers.engines import profile_file

    stem = Path(model).stem
    name = profile_file(
        stem, device, engine, dtype, parameters=parameters, compiled=compiled,
        fused_loss=fused_loss, launch_blocking=launch_blocking,
    )  # fmt: skip
    return Path("profiles") / name


def rescale(profiles: "File | Profile | Sequence[Profile]", device: str) -> "tuple[Profile, ...]":
    """The profiles as they would be on another type of device.

    Args:
        profiles: of one model; all of one type of device.
        device: a type in the planner's table, such as "V100-SXM2-16GB".

    Raises:
        OptionError: if the type is unknown, or nothing is known of the profiles' own.
        FileError: if the file is no profile.
    """
    from planner.clusters.yaml.read import shipped_device_type
    from planner.profilers.analytic import rescale as rescaled

    kind = shipped_device_type(device)
    given, _ = given_profiles(profiles)
    own = shipped_device_type(given[0].device_type)
    return tuple(rescaled(one, kind, own) for one in given)


def compare_engines(
    model: "Model",
    profile: "Profile",
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> "tuple[EngineComparison, RooflineFit]":
    """Forward times of a profile, those of ONNX Runtime, which is run for it, and those computed
    from FLOPs and bytes at speeds that are fitted to the profile.

    Args:
        model: the profile's.
        profile: measured by torch on this machine's CPU in the model's own type.
        progress: called with the number of runs done, and of all.

    Raises:
        OptionError: if the profile was made in another way.
    """
    from planner.artefacts.graph import main_dtype
    from planner.profilers.engines import compare_with_others

    own = profile.dtype == main_dtype(model.graph)
    if profile.engine != "torch" or profile.device_type != "cpu" or not own:
        raise OptionError(
            "--compare: expected a profile by --engine torch on --device cpu in the model's own"
            f" type, got one by {profile.engine} on {profile.device_type} in {profile.dtype}"
        )
    return compare_with_others(model, profile, seed=seed, progress=progress)


def calibrate(
    traces: Sequence[File] = (),
    *,
    measured: File | None = None,
    profiles: "Sequence[Profile]",
    topologies: "Sequence[File | Topology]" = ("local.yaml",),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> "CheckedCalibration":
    """Corrections of predicted times, fitted to measured runs, with the error before and after.

    Args:
        traces: written by `launch`, all on devices of one type.
        measured: instead of traces, a table of the times of iterations: a CSV file with columns t,
            d, p, microbatch, batch and time, and others (`artefacts/measured.py`).
        profiles: among them those of the runs.
        topologies: among them those of the runs; for a table one, on whose first devices they were.
        progress: called with the number of rows of a table that are read, and of all.

    Raises:
        FileError: if a file is missing or malformed, a trace was not measured, or rows of a table
            are too few or have no plan.
        OptionError: if the profile or topology of a run is missing.
    """
    from planner.clusters.yaml.read import device_table
    from planner.simulator.traces import calibrate as calibration
    from planner.simulator.traces.runs import read_runs

    places = [given_topology(one)[0] for one in topologies]
    if measured is not None:
        if traces:
            raise OptionError("give either traces or --measured, not both")
        return _calibrate_by_table(Path(measured), profiles, places, progress)
    if not traces:
        raise OptionError("no trace is given; expected at least one, or a table with --measured")
    paths = [Path(path) for path in traces]
    return calibration.calibrate(read_runs(paths, profiles, places, dict(device_table())))


def _calibrate_by_table(
    path: Path,
    profiles: "Sequence[Profile]",
    topologies: "Sequence[Topology]",
    progress: Callable[[int, int], None],
) -> "CheckedCalibration":
    """Factors that are fitted to a table.

    Raises:
        FileError: as `calibrate` has it.
        OptionError: if there are several topologies, or types of devices.
    """
    from planner.artefacts.measured import read_measured
    from planner.planning.measured import Place, timed_runs
    from planner.simulator.factors import FACTORS, MIN_RUNS, fit_factors

    rows = read_measured(path)
    if len(rows) < MIN_RUNS:
        raise FileError(
            f"{path}: expected at least {MIN_RUNS} runs, for {len(FACTORS)} factors,"
            f" got {len(rows)}"
        )
    if len(topologies) != 1:
        raise OptionError(
            f"--measured: expected one --topology, on which all runs were, got {len(topologies)}"
        )
    (topology,) = topologies
    types = sorted({one.type for one in topology.devices})
    if len(types) > 1:
        raise OptionError(
            f"--topology: {topology.name} has {' and '.join(types)}; calibrate one type of device"
            " at a time"
        )
    place = Place(profiles, topology, type_of(profiles[-1], topology))
    try:
        runs = timed_runs(rows, place, progress)
    except OptionError as error:
        raise FileError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from None
    return fit_factors(runs)
