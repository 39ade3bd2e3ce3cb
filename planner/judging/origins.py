"""What a strategy was made for: its profile and its topology, found again by their hashes."""

from contextlib import suppress
from pathlib import Path

from planner.clusters.yaml.read import find_topology, read_topology
from planner.errors import FileError, OptionError
from planner.files import artefact_hash
from planner.formats import read_any_profiles
from planner.judging.interpolate import interpolated
from planner.plan import Plan
from planner.profiles import Profile
from planner.topology import Topology, take


def profile_of(plan: Plan, strategy_path: Path, profile_path: Path) -> Profile:
    """The profile of a file that a plan was made for, interpolated as it was then.

    Args:
        strategy_path: of the plan, for messages.

    Raises:
        FileError: if it is not in the file.
    """
    profiles = tuple(read_any_profiles(profile_path))
    with suppress(OptionError):  # of another size; then it is another profile's strategy
        profiles = (*profiles, interpolated(profiles, plan.microbatch_size))
    by_hash = {artefact_hash(profile): profile for profile in profiles}
    if plan.profile_hash not in by_hash:
        found = ", ".join(digest[:12] for digest in by_hash)
        raise FileError(
            f"{strategy_path}: made for profile {plan.profile_hash[:12]}, but {profile_path} is"
            f" {found}; give the one it was made for with --profile"
        )
    return by_hash[plan.profile_hash]


def topology_of(plan: Plan, strategy_path: Path, name: str | None) -> tuple[Topology, bool]:
    """The topology that a plan was made for, or another one that is named.

    Args:
        name: a file or preset; None takes the one of the plan's name.

    Returns:
        The topology, of as many devices as it was planned for; whether it is the plan's.

    Raises:
        FileError: if it is not found, is another one though none was named, or is too small.
    """
    try:
        path = find_topology(name or plan.topology)
    except FileError as error:
        advice = "" if name else "; give it with --topology"
        raise FileError(
            f"{strategy_path}: made for topology {plan.topology}: {error}{advice}"
        ) from None
    whole = read_topology(path)
    needed, there = max(plan.ranks) + 1, len(whole.devices)
    for count in range(there, needed - 1, -1):
        found = whole if count == there else take(whole, count)
        if artefact_hash(found) == plan.topology_hash:
            return found, True
    if name is None:
        raise FileError(
            f"{strategy_path}: made for a topology {plan.topology} {plan.topology_hash[:12]}, which"
            f" {path} is not; give it, or another one, with --topology"
        )
    if there < needed:
        raise FileError(f"{path}: has {there} devices, the strategy's need {needed}")
    return whole, False
