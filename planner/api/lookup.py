"""Names become files: of profiles, and of the profile and the topology that a strategy was made
for. Their names or paths are written into it, and their hashes prove that they are the same.
"""

import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from planner.artefacts.files import (
    CALIBRATION_ENDING,
    PROFILE_FIELDS,
    artefact_hash,
    shipped,
)
from planner.artefacts.formats.any import read_any_profiles
from planner.artefacts.plan import Plan
from planner.artefacts.profile import Profile
from planner.artefacts.roofline import device_is_unknown
from planner.artefacts.strict import json_of
from planner.artefacts.topology import Topology, take
from planner.clusters.yaml.read import device_table
from planner.profilers.devices import SHORTER
from planner.profilers.interpolate import interpolated
from planner.support.errors import FileError, OptionError
from planner.support.reading import MAX_TEXT_BYTES, read_bytes

MAX_NAMED = 3
"""Profiles that a note or a message names."""
MAX_SHOWN = 40
"""Characters of a value that a note shows."""


@dataclass(frozen=True, slots=True)
class Found:
    """The profile that is taken where none is named.

    Attributes:
        path: of its file.
        text: of the file, if it was read for the choice.
        notes: why this one is taken, in words.
    """

    path: Path
    text: str | None
    notes: tuple[str, ...]


def newest_profile(
    folder: Path, model_hash: str | None = None, types: Collection[str] = ()
) -> Found:
    """The profile in a folder that was modified last, among those of one model, and among these of
    those for some types of device, if there are any. Profiles that come from elsewhere belong to no
    model, and are only taken where there are no others.

    Args:
        folder: with the profiles.
        model_hash: content hash of the model; None where it is not known.
        types: of the devices that are planned for; none where they are not known.

    Raises:
        FileError: if there is none, or none of that model, or if there are several models to choose
            from.
    """
    paths = _profile_paths(folder)
    if not paths:
        raise FileError(f"{folder}: there is no profile; run: planner profile MODEL.onnx")
    if len(paths) == 1:
        return Found(paths[0], None, (f"profile {paths[0]}, the newest in {folder}/",))
    heads = {path: _head_of(path) for path in paths}
    candidates = _of_one_model(folder, heads, model_hash)
    fitting = [path for path in candidates if heads[path].device_type in types]
    *others, path = fitting or candidates
    kind = f" for {heads[path].device_type}" if 0 < len(fitting) < len(candidates) else ""
    notes = (f"profile {path}, the newest{kind} in {folder}/", *_older_note(path, others, heads))
    return Found(path, heads[path].text, notes)


def _of_one_model(
    folder: Path, heads: Mapping[Path, "_Head"], model_hash: str | None
) -> list[Path]:
    """The profiles to choose from, the newest last.

    Args:
        folder: for messages.
        heads: of all profiles, the newest last.
        model_hash: see `newest_profile`.

    Raises:
        FileError: as `newest_profile`.
    """
    stems = [path.stem for path in reversed([*heads])]
    names = ", ".join(stems[:MAX_NAMED]) + (", ..." if len(stems) > MAX_NAMED else "")
    if model_hash is not None:
        candidates = [path for path, head in heads.items() if head.model_hash == model_hash]
        if not candidates:
            raise FileError(
                f"{folder}: expected a profile of model {model_hash[:12]} among {len(heads)}, got"
                f" none ({names}); run planner profile for that model, or give --profile FILE"
            )
        return candidates
    candidates = [path for path, head in heads.items() if head.model_hash is not None] or [*heads]
    of_models = {heads[path].model_hash for path in candidates}
    if len(of_models) > 1 or (None in of_models and len(candidates) > 1):
        raise FileError(
            f"{folder}: expected profiles of one model, got {len(heads)} profiles of several,"
            f" the newest first: {names}; say which with --profile, such as --profile"
            f" {candidates[-1].stem}"
        )
    return candidates


def _older_note(
    path: Path, others: Sequence[Path], heads: Mapping[Path, "_Head"]
) -> tuple[str, ...]:
    """A note that names the older profiles that differ from the one that is taken, if any do."""
    differing = {
        other.stem: "; ".join(words)
        for other in reversed(others)
        if (words := _differences(heads[other].fields, heads[path].fields))
    }
    if not differing:
        return ()
    shown = [f"{stem} ({words})" for stem, words in differing.items()][:MAX_NAMED]
    more = f", and {len(differing) - MAX_NAMED} more" if len(differing) > MAX_NAMED else ""
    return (
        f"note: older profiles there differ: {', '.join(shown)}{more}; to take one, give"
        f" --profile, such as --profile {next(iter(differing))}",
    )


def device_note(profiles: Sequence[Profile], types: Sequence[str]) -> str | None:
    """A note that the newest profiles are for none of the types of device that are planned for, and
    the command that makes one; None where they are for one of them, or for any device.

    Args:
        profiles: of the file that is taken.
        types: of the devices that are planned for, at least one.
    """
    profile = profiles[-1]
    if profile.device_type in types or device_is_unknown(profile):
        return None
    dims = set.intersection(*(set(one.dimensions.items()) for one in profiles))
    command = ["planner", "profile", profile.model_path or "MODEL.onnx"]
    if len(profiles) > 1:
        command += ["--batch", ",".join(str(one.microbatch_size) for one in profiles)]
    for name, size in sorted(dims):
        command += ["--dim", f"{name}={size}"]
    if profile.dtype in SHORTER:
        command += ["--dtype", profile.dtype]
    known = types[0] in device_table()
    if types[0] != "cpu":
        command += ["--device", types[0] if known else "cuda"]
    return (
        f"note: no profile of this model in profiles/ is for {' or '.join(types)}: the one taken is"
        f" for {profile.device_type}, and its times are rescaled; to make one"
        f"{'' if known else ', on such a device'}: {shlex.join(command)}"
    )


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


@dataclass(frozen=True, slots=True)
class _Head:
    """What a file says that a profile is chosen by; empty where it is no profile.

    Attributes:
        text: of the file; None where it has none.
        fields: the fields of each of its profiles.
    """

    text: str | None
    fields: Sequence[Mapping[str, Any]]

    @property
    def model_hash(self) -> str | None:
        """The content hash of the model; None where the file does not say it."""
        digest = self.fields[0].get("model_hash") if self.fields else None
        return digest if isinstance(digest, str) else None

    @property
    def device_type(self) -> object:
        """The type of device that the times are for."""
        return self.fields[0].get("device_type") if self.fields else None


def _head_of(path: Path) -> _Head:
    text = None
    try:
        text = read_bytes(path, MAX_TEXT_BYTES).decode()
        plain = json_of(text)
    except (FileError, OSError, ValueError, RecursionError):
        return _Head(text, ())
    several = plain.get("profiles", [plain]) if isinstance(plain, dict) else ()
    known = isinstance(several, list) and all(isinstance(one, dict) for one in several)
    return _Head(text, several if known else ())


def _differences(
    older: Sequence[Mapping[str, Any]], taken: Sequence[Mapping[str, Any]]
) -> list[str]:
    """The fields in which a file of profiles differs from another one, with its own values, such as
    "type float32"; nothing where it differs in none.
    """
    absent = {one.name: one.default for one in fields(Profile) if one.metadata}
    words = []
    for name, word in PROFILE_FIELDS.items():
        own, other = ([one.get(name, absent.get(name)) for one in each] for each in (older, taken))
        if own != other:
            values = dict.fromkeys(_value(value) for value in own if value is not None)
            words += [f"{word} {' and '.join(values)}"] if values else []
    return words


def _value(value: object) -> str:
    """The value of a field, short."""
    if isinstance(value, dict):
        return ", ".join(f"{name}={size}" for name, size in value.items()) or "none"
    return f"{value!s:.{MAX_SHOWN}}"


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
    newest = newest_profile(Path("profiles"), plan.model_hash, (plan.profiled_on,))
    return read_any_profiles(newest.path, newest.text), newest.path


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
    """The topology that a plan was made for, of as many devices, or another one that is given,
    which may have too few devices before it is changed.

    Args:
        strategy_name: the plan's, for messages.
        whole: the topology that is given, or the one of the plan's name.
        where: its name, for messages.
        is_given: whether it may be another one.

    Raises:
        FileError: if it is another one though none was given.
    """
    needed, there = max(plan.ranks) + 1, len(whole.devices)
    # A plan is for all devices or, nearly always, for as many as it uses.
    if whole.name == plan.topology and needed <= there:
        for count in (there, *range(needed, there)):
            part = whole if count == there else take(whole, count)
            if artefact_hash(part) == plan.topology_hash:
                return part
    if not is_given and plan.what_if:
        options = f"--topology {shlex.quote(plan.topology)} {' '.join(plan.what_if)}"
        raise FileError(
            f"{strategy_name}: made for a topology {plan.topology} that was changed; give the same"
            f" options, {options}, or another topology"
        )
    if not is_given:
        raise FileError(
            f"{strategy_name}: made for a topology {plan.topology} {plan.topology_hash[:12]}, which"
            f" {where} is not; give it, or another one, with --topology, and the --set, --drop and"
            " --add-host that it was planned with, if any"
        )
    return whole
