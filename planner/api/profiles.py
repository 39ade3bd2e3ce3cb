"""The costs of operators."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from planner.api.files import given_profiles, given_topology
from planner.api.models import read_model
from planner.support.errors import OptionError
from planner.support.reading import File

if TYPE_CHECKING:
    from planner.artefacts.profile import Profile
    from planner.artefacts.topology import Topology
    from planner.model.load import Model
    from planner.profilers.analytic import RooflineFit
    from planner.profilers.compare import EngineComparison
    from planner.profilers.measured import Effort
    from planner.simulator.traces.calibrate import CheckedCalibration


def profile(
    model: "File | Model",
    *,
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    train: Sequence[str] = (),
    freeze: Sequence[str] = (),
    tie: Sequence[str] = (),
    untie: Sequence[str] = (),
    output: str | Sequence[str] = (),
    loss: str | Mapping[str, str] | None = None,
    class_dim: int | Mapping[str, int] | None = None,
    batch_norm: str | None = None,
    device: str = "cpu",
    engine: str | None = None,
    dtype: str | None = None,
    threads: int = 1,
    repetitions: int | None = None,
    budget_s: float = 1.0,
    cache: bool = True,
    contention: bool = True,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
    effort: "Callable[[Effort], None]" = lambda effort: None,
) -> "Profile":
    """The costs of each operator of a model: forward and backward time, and memory.

    Args:
        model: an ONNX file, or a model that `read_model` has read.
        batch, dims, train, freeze, tie, untie, output, loss, class_dim, batch_norm: see
            `read_model`, which gets them; only with a file.
        device: "cpu", "cuda" or "cuda:N" to measure here, or a type of device to compute for.
        engine: "torch", "onnxruntime" or "analytic"; None measures with torch on devices that are
            here, and computes for others.
        dtype: floating-point type of the computation, "float32", "bfloat16" or "float16"; None
            takes the model's own.
        threads: CPU threads.
        repetitions: minimum number of timed runs per operator; None takes the engine's own.
        budget_s: time for each different operator.
        cache: whether measurements made on this machine are reused, and new ones stored.
        contention: whether to measure how much processes on a CPU's cores slow each other, which
            takes some 12 s once per machine.
        seed: of the synthetic inputs.
        progress: called with the number of operators done, and of all.
        effort: called once with the effort of the measurement, where the engine knows it.

    Raises:
        FileError: if the file is missing or no ONNX model.
        ModelError: if the model cannot be bound or planned.
        OptionError: if the options contradict each other, or the device is not there.
    """
    from planner.profilers.engines import Measuring, engine_for, profile_with
    from planner.support.reading import relative

    chosen = engine_for(device, engine)
    how = Measuring(
        threads=threads,
        dtype=dtype,
        repetitions=repetitions,
        budget_s=budget_s,
        seed=seed,
        cached=cache,
        contention=contention,
    )
    if isinstance(model, str | os.PathLike):
        model = read_model(
            model, batch=batch, dims=dims, train=train, freeze=freeze, tie=tie, untie=untie,
            output=output, loss=loss, class_dim=class_dim, batch_norm=batch_norm,
        )  # fmt: skip
    elif (
        any((batch, dims, train, freeze, tie, untie, output, loss, batch_norm))
        or class_dim is not None
    ):
        raise ValueError(
            "batch, dims, train, freeze, tie, untie, output, loss, class_dim and batch_norm are for"
            " a file; this model is read already"
        )
    place = relative(model.path, Path())
    return profile_with(chosen, model, place, device, how, progress, effort)


def profile_path(
    model: File, *, device: str = "cpu", engine: str | None = None, dtype: str | None = None
) -> Path:
    """The usual file of a profile, in ./profiles: MODEL.json where it was measured by PyTorch on
    this CPU in float32, and with the device, type and engine in its name else.

    Args:
        model: an ONNX file, or a profile that is to be rescaled.
        device, engine, dtype: see `profile`.

    Raises:
        OptionError: if the device is not there.
    """
    from planner.profilers.engines import profile_file

    stem = Path(model).stem
    return Path("profiles") / profile_file(stem, device, engine, dtype)


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
    traces: Sequence[File],
    *,
    profiles: "Sequence[Profile]",
    topologies: "Sequence[File | Topology]" = ("local.yaml",),
) -> "CheckedCalibration":
    """Corrections of predicted times, fitted to measured traces, with the error before and after.

    Args:
        traces: written by `launch`, all on devices of one type.
        profiles: among them those of the runs.
        topologies: among them those of the runs.

    Raises:
        FileError: if a file is missing or malformed, or a trace was not measured.
        OptionError: if the profile or topology of a run is missing.
    """
    from planner.clusters.yaml.read import device_table
    from planner.simulator.traces import calibrate as calibration
    from planner.simulator.traces.runs import read_runs

    if not traces:
        raise OptionError("no trace is given; expected at least one")
    paths, places = [Path(path) for path in traces], [given_topology(one)[0] for one in topologies]
    return calibration.calibrate(read_runs(paths, profiles, places, dict(device_table())))
