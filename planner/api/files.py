"""The edge: names become files, and files artefacts; artefacts become files.

A command or a function of the library reads what it plans for by one call of `read_inputs`, or of
`read_plan_inputs` for a strategy: each name is found once and each file is read once. Below,
nothing has a path.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from planner.api.models import find_model
from planner.planning.plans import Simulation
from planner.support.errors import FileError, OptionError, TopologyError
from planner.support.reading import File

if TYPE_CHECKING:
    from planner.artefacts.calibration import Calibration
    from planner.artefacts.plan import Plan
    from planner.artefacts.profile import Profile
    from planner.artefacts.topology import Topology
    from planner.model.load import Model
    from planner.simulator.traces.calibrate import CheckedCalibration
    from planner.simulator.traces.comparison import TraceComparison
    from planner.simulator.traces.read import Trace


LOCAL = "local.yaml"
"""The topology where none is named: this machine."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What is planned for: every name found once, every file read once.

    Attributes:
        profiles: of one model, ascending by the size of the microbatch; with a plan, only its own.
        topology: its first devices, if only some were asked for; with a plan, the one that it was
            made for, or another one that was given.
        calibration: corrections of times.
        model: of the profiles; None where it was not asked for, or is not where the profile says.
        plan: the strategy that is read; None where none is.
        paths: of the files, by their meaning, such as "profile": for messages, and because they
            must not be overwritten. Artefacts that were given have none.
        notes: choices that were made for the user, in words.
    """

    profiles: "tuple[Profile, ...]"
    topology: "Topology"
    calibration: "Calibration"
    model: "Model | None" = None
    plan: "Plan | None" = None
    paths: Mapping[str, Path] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_inputs(
    profile: "File | Profile | Sequence[Profile] | Inputs | None" = None,
    *,
    topology: "File | Topology" = LOCAL,
    gpus: int | None = None,
    calibration: "bool | Calibration" = True,
    model: File | None = None,
    with_model: bool = False,
) -> Inputs:
    """Reads what is planned for: the profiles, the topology, the corrections and the model.

    Args:
        profile: None takes the newest in ./profiles, if all are of one model. If some are for types
            of device of the topology, it takes the newest of these. Inputs that were read already
            are given back, without other arguments.
        topology, gpus: see `read_topology`.
        calibration: corrections of times; True takes those beside the profile's file, if there are
            any, and False none.
        model: the ONNX file, if it is not where the profile says. The newest profile has to be of
            this model.
        with_model: whether the model is read, too.

    Raises:
        FileError: if a file is missing or malformed, or the model is not the profile's.
        OptionError: if the profiles are not of one model and device.
        TopologyError: if the topology has fewer devices.
    """
    if isinstance(profile, Inputs):
        if (topology, gpus, calibration, model) != (LOCAL, None, True, None):
            raise ValueError("the inputs are read already; give their files to read_inputs")
        return profile
    place, topology_path = given_topology(topology, gpus)
    profiles, profile_path, notes = (
        _newest_profiles(model, place) if profile is None else (*given_profiles(profile), ())
    )
    paths = {"profile": profile_path, "topology": topology_path}
    name = "the profile" if profile_path is None else str(profile_path)
    return Inputs(
        profiles=profiles,
        topology=place,
        paths=_there(**paths, model=profiles[-1].model_path if model is None else model),
        calibration=given_calibration(calibration, profile_path, profiles),
        model=find_model(profiles[-1], model, name=name) if with_model else None,
        notes=notes,
    )


def read_plan_inputs(
    strategy: "File | Plan",
    *,
    profile: "File | Profile | Sequence[Profile] | None" = None,
    topology: "File | Topology | None" = None,
    calibration: "bool | Calibration" = True,
) -> Inputs:
    """Reads a strategy, and what it was made for.

    Args:
        strategy: a strategy file, or a plan.
        profile: None takes the file that the strategy names, if it is there, else the newest of its
            model in ./profiles.
        topology: None finds the strategy's own by its name; another one may be given.
        calibration: see `read_inputs`.

    Raises:
        FileError: if a file is missing or malformed, or the profile or topology is not the
            strategy's.
        OptionError: if the profiles are not of one model and device.
    """
    from planner.api.lookup import files_named, profile_of, profiles_of, topology_of
    from planner.resharding.checks import check_fits

    if isinstance(strategy, str | os.PathLike):
        path, plan, name = Path(strategy), read_strategy(strategy), str(strategy)
    else:
        path, plan, name = None, strategy, "the strategy"
    profiles, profile_path = profiles_of(plan, path) if profile is None else given_profiles(profile)
    where = "the profile given" if profile_path is None else str(profile_path)
    own = profile_of(plan, name, profiles, where)
    check_fits(plan, name, own.graph)
    try:
        whole, topology_path = given_topology(plan.topology if topology is None else topology)
    except FileError as error:
        if topology is not None:
            raise
        raise FileError(
            f"{name}: made for topology {plan.topology}: {error}; give it with --topology"
        ) from None
    if topology is None and len(whole.devices) <= max(plan.ranks):
        with suppress(TopologyError):  # unless it has as many devices as are asked for
            whole, _ = given_topology(plan.topology, max(plan.ranks) + 1)
    where = f"the topology {whole.name}" if topology_path is None else str(topology_path)
    place = topology_of(plan, name, whole, where, is_given=topology is not None)
    named: dict[str, Path | None] = {} if path is None else {**files_named(plan, path)}
    read = {"profile": profile_path, "topology": topology_path}
    return Inputs(
        profiles=(own,),
        topology=place,
        calibration=given_calibration(calibration, profile_path, profiles),
        plan=plan,
        paths=_there(strategy=path, **(named | read if profile is None else read | named)),
    )


def _there(**paths: File | None) -> dict[str, Path]:
    """The paths that are not None."""
    return {name: Path(path) for name, path in paths.items() if path is not None}


def read_profile(path: File) -> "Profile":
    """The profile in a file of any known format; of several that of the largest microbatch."""
    return read_profiles(path)[-1]


def read_profiles(path: File) -> "tuple[Profile, ...]":
    """All profiles in a file of any known format, ascending by the size of the microbatch."""
    from planner.artefacts.formats.any import read_any_profiles

    return tuple(read_any_profiles(Path(path)))


def newest_profile(
    folder: File = "profiles",
    *,
    model: File | None = None,
    topology: "File | Topology | None" = None,
) -> Path:
    """The profile in a folder that was modified last.

    Args:
        folder: with the profiles.
        model: an ONNX file; the profile is one of this model.
        topology: of the profiles for a type of its devices, if there are any, the newest is taken.

    Raises:
        FileError: if there is none, or if there are several models to choose from, or no such
            topology.
    """
    from planner.api import lookup

    place = None if topology is None else given_topology(topology)[0]
    return lookup.newest_profile(Path(folder), _hash_of(model), _types_of(place)).path


def _newest_profiles(
    model: File | None, topology: "Topology"
) -> "tuple[tuple[Profile, ...], Path, tuple[str, ...]]":
    """The newest profiles in ./profiles for a topology, their file, and why they are taken."""
    from planner.api import lookup
    from planner.artefacts.formats.any import read_any_profiles

    types = _types_of(topology)
    found = lookup.newest_profile(Path("profiles"), _hash_of(model), types)
    profiles = read_any_profiles(found.path, found.text)
    unfit = lookup.device_note(profiles, types)
    return profiles, found.path, found.notes if unfit is None else (*found.notes, unfit)


def _hash_of(model: File | None) -> str | None:
    """The content hash of a model's file."""
    if model is None:
        return None
    from planner.model.load import hash_of

    return hash_of(Path(model))


def _types_of(topology: "Topology | None") -> tuple[str, ...]:
    """The types of the devices of a topology, in their order."""
    devices = () if topology is None else topology.devices
    return tuple(dict.fromkeys(device.type for device in devices))


def find_profile(name: File) -> Path:
    """The file that a name of a profile stands for: itself, one in ./profiles, or one that ships.

    Args:
        name: such as "profiles/gpt2.json" or "gpt2".

    Raises:
        FileError: if there is none; it lists the profiles in ./profiles and those that ship.
    """
    from planner.api import lookup

    return lookup.find_profile(os.fspath(name))


def write_profile(profile: "Profile", path: File) -> None:
    """Writes a profile as JSON."""
    write_profiles((profile,), path)


def write_profiles(profiles: "Sequence[Profile]", path: File) -> None:
    """Writes profiles of one model into one JSON file.

    Args:
        profiles: ascending by the size of the microbatch.
    """
    from planner.artefacts import files

    files.write_profiles(profiles, Path(path))


def read_topology(name: File, gpus: int | None = None, *, pruned: bool = False) -> "Topology":
    """The topology in a file, in ./topologies, or among the presets.

    Args:
        name: such as "cluster.yaml" or "p3".
        gpus: number of devices to take, the first ones; None takes all.
        pruned: whether switches are left out that lead to none of the devices taken.

    Raises:
        FileError: if there is no such topology, or its file is malformed.
        TopologyError: if it has fewer devices.
    """
    from planner.clusters.places import without_dead_ends

    topology, _ = given_topology(name, gpus)
    return without_dead_ends(topology) if pruned and gpus is not None else topology


def find_topology(name: File) -> Path:
    """The file that a name of a topology stands for: itself, one in ./topologies, or a preset.

    Raises:
        FileError: if there is none; it lists the presets.
    """
    from planner.clusters.yaml import read

    return read.find_topology(os.fspath(name))


def write_topology(topology: "Topology", path: File, comments: Sequence[str] = ()) -> None:
    """Writes a topology as YAML.

    Args:
        comments: lines at the top of the file.
    """
    from planner.clusters.yaml import write

    write.write_topology(topology, Path(path), comments)


def read_strategy(path: File) -> "Plan":
    """The plan in a strategy file: the strategy, its prediction and its certificate."""
    from planner.artefacts.files import read_plan

    return read_plan(Path(path))


def files_of(strategy: File, plan: "Plan") -> dict[str, Path]:
    """A strategy file, and the model and the profile that its plan names, there or not, by their
    meaning: the files that must not be overwritten where it is read.
    """
    from planner.api.lookup import files_named

    return {"strategy": Path(strategy), **files_named(plan, Path(strategy))}


def write_trace(simulation: Simulation, path: File) -> None:
    """Writes a simulated iteration as a trace, to be opened with Perfetto.

    Raises:
        OptionError: if it has too many actions.
        FileError: if the file cannot be written.
    """
    from planner.simulator.collectives import collectives
    from planner.simulator.traces import write

    timeline = simulation.described().timeline
    assert simulation.plan is not None, "what is described has a plan"
    inside = collectives(simulation.problem, simulation.plan.strategy, timeline)
    write.write_trace(timeline, simulation.names, Path(path), inside=inside)


def write_svg(artefact: "Simulation | Topology", path: File) -> None:
    """Writes a picture: of a simulated iteration the actions of every device, of a topology its
    devices and links.

    Raises:
        OptionError: if an iteration has too many actions.
        FileError: if the file cannot be written.
    """
    if isinstance(artefact, Simulation):
        from planner.reports.drawing.gantt_svg import gantt_svg

        picture = gantt_svg(artefact.described().timeline, artefact.names)
    else:
        from planner.reports.drawing.topology_svg import svg

        picture = svg(artefact)
    write_text(picture, path)


def write_text(text: str, path: File) -> None:
    """Writes text so that nobody ever sees half of it."""
    from planner.support.writing import write_atomically

    write_atomically(Path(path), text.encode())


def read_trace(path: File) -> "Trace":
    """The iteration in a trace file of the planner, predicted or measured."""
    from planner.simulator.traces import read

    return read.read_trace(Path(path))


def compare_traces(predicted: "File | Trace", measured: "File | Trace") -> "TraceComparison":
    """Where two traces of one strategy differ.

    Raises:
        FileError: if a file is missing, malformed, or no trace of the planner.
        OptionError: if they are traces of different strategies.
    """
    from planner.simulator.traces import comparison

    return comparison.compare_traces(given_trace(predicted), given_trace(measured))


def write_overlay(predicted: "File | Trace", measured: "File | Trace", path: File) -> None:
    """Writes two traces of one strategy into one, each device twice, for Perfetto.

    Raises:
        FileError: if a file is missing, malformed, or no trace, or cannot be written.
    """
    from planner.simulator.traces import comparison, write

    write.write_trace(
        *comparison.overlay(given_trace(predicted), given_trace(measured)), Path(path)
    )


def read_calibration(profile: File, profiles: "Sequence[Profile]") -> "Calibration":
    """The corrections that stand beside a profile; without any, those that change nothing.

    Args:
        profile: the profile's file.
        profiles: that the file holds.

    Raises:
        FileError: if they are malformed, or were made for another profile.
    """
    from planner.artefacts import files
    from planner.artefacts.calibration import Calibration

    known = files.read_calibration(Path(profile), profiles)
    return Calibration() if known is None else known.calibration


def calibration_path(profile: File) -> Path:
    """Where corrections of a profile stand.

    Args:
        profile: the profile's file.
    """
    from planner.artefacts import files

    return files.calibration_path(Path(profile))


def write_calibration(
    fitted: "CheckedCalibration", profile: File, profiles: "Sequence[Profile]"
) -> Path:
    """Writes corrections beside a profile, where `solve`, `compare` and `simulate` find them.

    Args:
        profile: the profile's file.
        profiles: that the file holds.

    Returns:
        The file written.
    """
    from planner.artefacts import files
    from planner.artefacts.calibration import CalibrationFile

    path = files.calibration_path(Path(profile))
    written = CalibrationFile(
        profiles=tuple(map(files.artefact_hash, profiles)),
        calibration=fitted.calibration,
        error_before=fitted.error_before,
        error_after=fitted.error_after,
        left_out=fitted.left_out,
    )
    files.write_calibration(written, path)
    return path


def convert(
    source: File, target: File, *, to: str | None = None, profile: File | None = None
) -> tuple[Path, ...]:
    """Writes a profile in another format, or a strategy as PipeDream's graph.txt with the stage of
    every node, and a picture of it for Graphviz.

    Args:
        source: a profile in any known format, or a strategy; its content decides.
        target: the file to write.
        to: "pipedream" or "planner"; None writes the planner's JSON where the target ends in .json.
        profile: that a strategy was made for; None takes the target, if it is a graph.txt, else the
            newest profile in ./profiles.

    Returns:
        The files written.

    Raises:
        FileError: if a file is missing or malformed, or the profile is not the strategy's.
        OptionError: if the arguments contradict each other.
    """
    from planner.api import conversion as formats

    own = None if profile is None else find_profile(profile)
    return formats.convert(Path(source), Path(target), to, own)


def rate_of(rate: float | str | None) -> float | None:
    """A rate in bytes per s, from text with a unit or as it is."""
    from planner.support.units import parse_rate

    return parse_rate(rate) if isinstance(rate, str) else rate


def given_profiles(
    given: "File | Profile | Sequence[Profile]",
) -> "tuple[tuple[Profile, ...], Path | None]":
    """The profiles, ascending by the size of the microbatch, and their file if they come from one.

    Raises:
        FileError: if there is no such file, or it is malformed.
        OptionError: if they are none, or not of one model and device.
    """
    if isinstance(given, str | os.PathLike):
        path = find_profile(given)
        return read_profiles(path), path
    from planner.artefacts.profile import Profile, ProfileSet

    profiles = (given,) if isinstance(given, Profile) else tuple(given)
    if not profiles:
        raise OptionError("no profile is given; expected at least one")
    ascending = sorted(profiles, key=lambda one: one.microbatch_size)
    try:
        return ProfileSet(tuple(ascending)).profiles, None
    except ValueError as error:
        raise OptionError(str(error)) from None


def given_topology(
    given: "File | Topology", gpus: int | None = None
) -> "tuple[Topology, Path | None]":
    """The topology, or its first devices, and its file if it comes from one.

    Raises:
        FileError: if there is no such topology, or its file is malformed.
        TopologyError: if it has fewer devices, or one that comes from no file is not sound.
    """
    from planner.artefacts.topology import problems, take
    from planner.clusters.yaml import read

    path = None
    if isinstance(given, str | os.PathLike):
        path = read.find_topology(os.fspath(given))
        given = read.read_topology(path, gpus)
    elif wrong := problems(given):
        raise TopologyError("\n".join(wrong))
    return given if gpus is None else take(given, gpus), path


def given_calibration(
    choice: "bool | Calibration", path: Path | None, profiles: "Sequence[Profile]"
) -> "Calibration":
    """The corrections to apply.

    Args:
        choice: the corrections, or whether those beside the profiles' file are taken.
        path: that file; None if the profiles come from none.

    Raises:
        FileError: if they are malformed, or were made for another profile.
    """
    from planner.artefacts.calibration import Calibration

    if isinstance(choice, Calibration):
        return choice
    return read_calibration(path, profiles) if choice and path is not None else Calibration()


def given_trace(given: "File | Trace") -> "Trace":
    """The trace, or that in a file."""
    return read_trace(given) if isinstance(given, str | os.PathLike) else given
