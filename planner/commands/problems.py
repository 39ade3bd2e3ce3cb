"""From the options of `solve` and `compare` to the problems they describe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.errors import FileError, OptionError
from planner.solvers.registry import own_options

if TYPE_CHECKING:
    from planner.calibration import Calibration
    from planner.clusters.what_if import Changed
    from planner.problem import Options, Problem
    from planner.profiles import Profile
    from planner.topology import DeviceType, Topology


@dataclass(frozen=True, slots=True)
class Inputs:
    """The files that a command plans for.

    Attributes:
        profiles: ascending by size of the microbatch.
        profile_path, topology_path: where they and the topology lie.
        written: the profiles of the file, where one between them is planned for.
    """

    profiles: tuple["Profile", ...]
    profile_path: Path
    topology_path: Path
    written: tuple["Profile", ...]


def inputs_of(
    profile_path: Path | None, topology_name: str, microbatch_size: int | None, *, quiet: bool
) -> Inputs:
    """What is planned for.

    Args:
        profile_path: None takes the newest in ./profiles, and says which.
        microbatch_size: the only one to take, interpolated where it was not profiled; or None.
        quiet: whether standard output is not for people.
    """
    from planner.clusters.yaml.read import find_topology
    from planner.files import newest_profile
    from planner.formats import read_any_profiles
    from planner.judging.interpolate import interpolated

    chosen = profile_path or newest_profile(Path("profiles"))
    profiles = written = tuple(read_any_profiles(chosen))
    if microbatch_size is not None:
        profiles = (interpolated(profiles, microbatch_size),)
    if profile_path is None:
        click.echo(f"profile {chosen}, the newest in profiles/", err=quiet)
    return Inputs(profiles, chosen, find_topology(topology_name), written)


def calibration_of(
    profile_path: Path, written: Sequence["Profile"], training: Mapping[str, Any]
) -> "Calibration":
    """What stands beside a profile, unless the options refuse it.

    Args:
        written: the profiles in that file.
    """
    from planner.calibration import Calibration
    from planner.files import read_calibration

    found = read_calibration(profile_path, written) if training["calibration"] else None
    return Calibration() if found is None else found.calibration


def problems_for(
    profiles: Sequence["Profile"],
    topology_path: Path,
    gpus: int | None,
    training: Mapping[str, Any],
    calibration: "Calibration | None" = None,
) -> tuple["Problem", ...]:
    """The problems that the options describe, one for each size of the microbatch, all with the
    same samples per iteration.
    """
    from planner.calibration import Calibration
    from planner.clusters.yaml.read import read_topology
    from planner.problem import Problem
    from planner.topology import take

    topology = read_topology(topology_path, gpus)
    topology = topology if gpus is None else take(topology, gpus)
    options = options_of(training)
    counts = nums_microbatches(profiles, len(topology.devices), training)
    measured_on = type_of(profiles[-1], topology)
    return tuple(
        Problem(
            profile,
            topology,
            replace(options, num_microbatches=count),
            measured_on,
            calibration=calibration or Calibration(),
        )
        for profile, count in zip(profiles, counts, strict=True)
        if count is not None
    )


def type_of(profile: "Profile", topology: "Topology") -> "DeviceType | None":
    """The type of device that a profile was made on; None if it is not known."""
    from planner.clusters.yaml.read import device_table

    own = {kind.name: kind for kind in topology.device_types}
    return (device_table() | own).get(profile.device_type)


def options_of(training: Mapping[str, Any]) -> "Options":
    """How to train, and how to search where there are options for that; for one microbatch."""
    from planner.problem import Objective, Optimizer, Options, Recompute
    from planner.strategy import ScheduleName

    options = Options(
        num_microbatches=1,
        schedule=ScheduleName(training["schedule"]),
        optimizer=Optimizer(training["optimizer"]),
        objective=Objective(training["objective"]),
        recompute=Recompute(training["recompute"]),
        device_memory_bytes=training["device_memory"],
        reserve_bytes=training["reserve"],
        switches=own_options(training),
    )
    return with_search(options, training) if "exact" in training else options


def with_search(options: "Options", search: Mapping[str, Any]) -> "Options":
    """The options with the limits of the search."""
    if search["exact"] and search["max_downsets"] is not None:
        raise OptionError("give either --exact or --max-downsets, not both")
    return replace(
        options,
        max_downsets=search["max_downsets"],
        exact=search["exact"],
        pins=tuple(search["pins"]),
        seed=search["seed"],
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


def changed_cluster(
    problem: "Problem", settings: Sequence[str], dropped: Sequence[str], added: Sequence[str]
) -> "Changed":
    """The cluster of a problem with what --set, --drop and --add-host ask for."""
    from planner.clusters.what_if import what_if
    from planner.clusters.yaml.read import device_table, find_topology, read_topology

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


def say_if_compiling() -> None:
    """Says why the first solve of a version takes longer."""
    from planner.support.jit import compiled_before

    if not compiled_before():
        click.echo("compiling the search, once per version: some 10 to 20 s", err=True)
