"""The profile and the topology that a strategy was made for. Their paths are written into it, or
their names, and their hashes prove that they are the same.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from planner.artefacts.files import artefact_hash, newest_profile
from planner.artefacts.formats.any import read_any_profiles
from planner.artefacts.plan import Plan
from planner.artefacts.profile import Profile
from planner.artefacts.topology import Topology, take
from planner.clusters.yaml.read import find_topology, read_topology
from planner.profilers.interpolate import interpolated
from planner.support.errors import FileError, OptionError
from planner.support.reading import relative


def with_paths(
    plan: Plan, folder: Path, profile_path: Path | None, model_path: Path | None
) -> Plan:
    """The plan with the paths of its files as seen from the folder that it is written to. They are
    filled in here, and only here.

    Args:
        profile_path: None keeps the plan's.
        model_path: None keeps the plan's.
    """
    if profile_path is not None:
        plan = replace(plan, profile_path=relative(profile_path, folder))
    if model_path is not None:
        plan = replace(plan, model_path=relative(model_path, folder))
    return plan


def find_profiles(plan: Plan, strategy_path: Path) -> tuple[Path, tuple[Profile, ...]]:
    """The file with the profile of a plan, and all profiles in it: the file that the plan names, if
    it still has the profile, else the newest of its model in ./profiles.

    Raises:
        FileError: if there is neither, or the newest is malformed.
    """
    if plan.profile_path is not None:
        path = strategy_path.parent / plan.profile_path
        with suppress(FileError):  # it was moved, or is another one by now
            profiles = tuple(read_any_profiles(path))
            profile_of(plan, str(strategy_path), profiles, str(path))
            return path, profiles
    path = newest_profile(Path("profiles"), plan.model_hash)
    return path, tuple(read_any_profiles(path))


def files_named(plan: Plan, strategy_path: Path) -> dict[str, Path]:
    """The files that a strategy names, there or not, by what they are."""
    paths = {"model": plan.model_path, "profile": plan.profile_path}
    return {what: strategy_path.parent / path for what, path in paths.items() if path is not None}


def profile_of(
    plan: Plan, strategy_name: str, profiles: Sequence[Profile], profile_name: str
) -> Profile:
    """The profile that a plan was made for, interpolated as it was then.

    Args:
        strategy_name: the plan's, for messages.
        profile_name: the profiles', for messages.

    Raises:
        FileError: if it is none of them.
    """
    with suppress(OptionError):  # of another size; then it is another profile's strategy
        profiles = (*profiles, interpolated(profiles, plan.microbatch_size))
    by_hash = {artefact_hash(profile): profile for profile in profiles}
    if plan.profile_hash not in by_hash:
        digests = ", ".join(digest[:12] for digest in by_hash)
        raise FileError(
            f"{strategy_name}: made for profile {plan.profile_hash[:12]}, but {profile_name} is"
            f" {digests}; give the one it was made for with --profile"
        )
    return by_hash[plan.profile_hash]


def topology_of(
    plan: Plan, strategy_name: str, given: str | Topology | None
) -> tuple[Topology, bool]:
    """The topology that a plan was made for, or another one that is given.

    Args:
        strategy_name: the plan's, for messages.
        given: a topology, or the name of a file or preset; None looks for the plan's by its name.

    Returns:
        The topology, of as many devices as it was planned for; whether it is the plan's.

    Raises:
        FileError: if it is not found, is another one though none was given, or is too small.
    """
    if isinstance(given, Topology):
        whole, where = given, f"the topology {given.name}"
    else:
        path = _path_of(plan, strategy_name, given)
        whole, where = read_topology(path), str(path)
    needed, there = max(plan.ranks) + 1, len(whole.devices)
    # A plan is for all devices or, nearly always, for as many as it uses.
    if whole.name == plan.topology and needed <= there:
        for count in (there, *range(needed, there)):
            part = whole if count == there else take(whole, count)
            if artefact_hash(part) == plan.topology_hash:
                return part, True
    if given is None:
        raise FileError(
            f"{strategy_name}: made for a topology {plan.topology} {plan.topology_hash[:12]}, which"
            f" {where} is not; give it, or another one, with --topology"
        )
    if there < needed:
        raise FileError(f"{where}: has {there} devices, the strategy's need {needed}")
    return whole, False


def _path_of(plan: Plan, strategy_name: str, name: str | None) -> Path:
    """The file of the topology of that name, or of the plan's."""
    try:
        return find_topology(name or plan.topology)
    except FileError as error:
        advice = "" if name else "; give it with --topology"
        raise FileError(
            f"{strategy_name}: made for topology {plan.topology}: {error}{advice}"
        ) from None
