"""Names become files: of profiles, and of the profile and the topology that a strategy was made
for. Their names or paths are written into it, and their hashes prove that they are the same.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from planner.artefacts.files import CALIBRATION_ENDING, artefact_hash, json_of, shipped
from planner.artefacts.formats.any import read_any_profiles
from planner.artefacts.plan import Plan
from planner.artefacts.profile import Profile
from planner.artefacts.topology import Topology, take
from planner.profilers.interpolate import interpolated
from planner.support.errors import FileError, OptionError
from planner.support.reading import MAX_TEXT_BYTES, read_bytes


def newest_profile(folder: Path, model_hash: str | None = None) -> Path:
    """The profile in a folder that was modified last, among those of one model. Profiles that come
    from elsewhere belong to no model, and are only taken where there are no others.

    Args:
        folder: with the profiles.
        model_hash: content hash of the model; None where it is not known.

    Raises:
        FileError: if there is none, or none of that model, or if there are several models to choose
            from.
    """
    paths = _profile_paths(folder)
    if not paths:
        raise FileError(f"{folder}: there is no profile; run: planner profile MODEL.onnx")
    if len(paths) == 1:
        return paths[0]
    models = {path: _model_hash_in(path) for path in paths}
    names = f"{', '.join(path.stem for path in paths[:-4:-1])}{', ...' if len(paths) > 3 else ''}"
    if model_hash is not None:
        own = [path for path in paths if models[path] == model_hash]
        if not own:
            raise FileError(
                f"{folder}: expected a profile of model {model_hash[:12]} among {len(paths)}, got"
                f" none ({names}); run planner profile for that model, or give --profile FILE"
            )
        return own[-1]
    candidates = [path for path in paths if models[path] is not None] or paths
    of_models = {models[path] for path in candidates}
    if len(of_models) > 1 or (None in of_models and len(candidates) > 1):
        raise FileError(
            f"{folder}: expected profiles of one model, got {len(paths)} profiles of several, the"
            f" newest first: {names}; say which with --profile, such as --profile"
            f" {candidates[-1].stem}"
        )
    return candidates[-1]


def find_profile(name: str, folder: Path = Path("profiles")) -> Path:
    """The file that a name of a profile stands for: itself, one in a folder, or one that ships.

    Args:
        name: a path, or a name such as "gpt2" for gpt2.json in the folder.

    Raises:
        FileError: if there is none; it lists the names in the folder and those that ship.
    """
    path, ships = Path(name), shipped("profiles")
    for candidate in (path, folder / name, folder / f"{name}.json", ships / f"{name}.json"):
        if candidate.exists():
            return candidate
    known = ", ".join(sorted(path.stem for path in _profile_paths(folder)))
    there = f"{folder}/ has {known}" if known else f"{folder}/ has no profiles"
    others = ", ".join(sorted(path.stem for path in _profile_paths(ships)))
    raise FileError(
        f"{name}: there is no such file, and no profile of that name: {there}, and {others} ship"
        " with the planner; run: planner profile MODEL.onnx"
    )


def _profile_paths(folder: Path) -> list[Path]:
    """The JSON files in a folder but calibrations, the newest last."""
    paths = (path for path in folder.glob("*.json") if not path.name.endswith(CALIBRATION_ENDING))
    return sorted(paths, key=lambda path: (path.stat().st_mtime_ns, path.name))


def _model_hash_in(path: Path) -> str | None:
    """The hash of the model in a profile; None where the file is no profile of a model."""
    try:
        plain = json_of(read_bytes(path, MAX_TEXT_BYTES).decode())
    except (FileError, OSError, ValueError, RecursionError):
        return None
    if isinstance(plain, dict) and isinstance(plain.get("profiles"), list) and plain["profiles"]:
        plain = plain["profiles"][0]
    digest = plain.get("model_hash") if isinstance(plain, dict) else None
    return digest if isinstance(digest, str) else None


def profiles_of(plan: Plan, strategy: Path | None) -> tuple[tuple[Profile, ...], Path]:
    """All profiles in the file with the profile of a plan, and the file: the one that the plan
    names, if it still has the profile, else the newest of its model in ./profiles.

    Args:
        strategy: the file of the plan; None if it comes from none.

    Raises:
        FileError: if there is neither, or the newest is malformed.
    """
    if strategy is not None and plan.profile_path is not None:
        path = strategy.parent / plan.profile_path
        with suppress(FileError):  # it was moved, or is another one by now
            profiles = read_any_profiles(path)
            profile_of(plan, str(strategy), profiles, str(path))
            return profiles, path
    path = newest_profile(Path("profiles"), plan.model_hash)
    return read_any_profiles(path), path


def files_named(plan: Plan, strategy_path: Path) -> dict[str, Path]:
    """The files that a strategy names, there or not, by their meaning."""
    paths = {"model": plan.model_path, "profile": plan.profile_path}
    return {
        f"strategy's {what}": strategy_path.parent / path
        for what, path in paths.items()
        if path is not None
    }


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
    plan: Plan, strategy_name: str, whole: Topology, where: str, *, is_given: bool
) -> Topology:
    """The topology that a plan was made for, of as many devices, or another one that is given.

    Args:
        strategy_name: the plan's, for messages.
        whole: the topology that is given, or the one of the plan's name.
        where: its name, for messages.
        is_given: whether it may be another one.

    Raises:
        FileError: if it is another one though none was given, or is too small.
    """
    needed, there = max(plan.ranks) + 1, len(whole.devices)
    # A plan is for all devices or, nearly always, for as many as it uses.
    if whole.name == plan.topology and needed <= there:
        for count in (there, *range(needed, there)):
            part = whole if count == there else take(whole, count)
            if artefact_hash(part) == plan.topology_hash:
                return part
    if not is_given:
        raise FileError(
            f"{strategy_name}: made for a topology {plan.topology} {plan.topology_hash[:12]}, which"
            f" {where} is not; give it, or another one, with --topology"
        )
    if there < needed:
        raise FileError(f"{where}: has {there} devices, the strategy's need {needed}")
    return whole
