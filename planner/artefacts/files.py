"""Artefacts on disk: strict, versioned JSON. Topologies, in YAML, are read by `clusters/yaml`.

Every problem of a file is reported at once, with the path of the field.
"""

import hashlib
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

from pydantic import AfterValidator, ConfigDict, PlainValidator, ValidationError

from planner.artefacts.calibration import CalibrationFile
from planner.artefacts.plan import Plan
from planner.artefacts.profile import Profile, ProfileSet, SplitRule
from planner.artefacts.sharding import AT_REST, Sharding, rule_of
from planner.artefacts.strategy import Stage, not_runnable
from planner.artefacts.strict import MAX_FILES, STRICT, file_error, json_of, plain_of, reader
from planner.artefacts.weight_gradients import with_parameter_work, without_parameter_work
from planner.support.errors import FileError, shown
from planner.support.memo import remembered
from planner.support.outputs import FileKind
from planner.support.reading import MAX_TEXT_BYTES, read_text, without_format
from planner.support.writing import write_atomically

PROFILE_FORMAT = "planner-profile/2"
PROFILE_SET_FORMAT = "planner-profile-set/2"
# Profiles of format 2 are of one size of the microbatch and know backward passes as a whole only,
# and those of format 1 have no rules by which operators are split either; a file with neither
# growth, times of weights or hosts, another type of parameters nor weights that are converted
# once is of format 2.
NEWEST_PROFILE_FORMAT = "planner-profile/3"
NEWEST_PROFILE_SET_FORMAT = "planner-profile-set/3"
PROFILE_FORMATS = (PROFILE_FORMAT, NEWEST_PROFILE_FORMAT, "planner-profile/1")
PROFILE_SET_FORMATS = (PROFILE_SET_FORMAT, NEWEST_PROFILE_SET_FORMAT, "planner-profile-set/1")
STRATEGY_FORMAT = "planner-strategy/2"
# Stages of format 2 share nothing over replicas, and those of
# format 1 have no mesh either; a file that shares nothing, with parameters in the model's type, is
# of format 2.
NEWEST_FORMAT = "planner-strategy/3"
STRATEGY_FORMATS = (STRATEGY_FORMAT, NEWEST_FORMAT, "planner-strategy/1")
CALIBRATION_FORMAT = "planner-calibration/1"
CALIBRATION_ENDING = ".calibration.json"


# ---- stages: files have their groups one after the other, and their sharding as text


@dataclass(frozen=True, slots=True)
class _StageFields:
    """A `Stage` as files have it. None of the fields from `mesh` on is written where all operators
    are whole.
    """

    operators: tuple[str, ...]
    devices: tuple[int, ...]
    warmup: int
    recompute: bool
    mesh: tuple[int, ...] | None = None
    rules: dict[str, tuple[str, ...]] = field(default_factory=dict)
    parameters: dict[str, tuple[str, ...]] = field(default_factory=dict)
    inputs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    outputs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    gradients: dict[str, tuple[str, ...]] = field(default_factory=dict)
    states: dict[str, tuple[str, ...]] = field(default_factory=dict)
    over: int = 1
    zero: int = 0
    zero_of: dict[str, int] = field(default_factory=dict)
    prefetch: int | None = None
    gathered_ahead: int | None = None
    recomputed: tuple[tuple[str, ...], ...] = ()
    offloaded: tuple[tuple[str, ...], ...] = ()


_NEW_FIELDS = {"over": 1, "zero": 0, "zero_of": {}, "prefetch": None, "gathered_ahead": None,
               "recomputed": (), "offloaded": ()}  # fmt: skip
"""What stages have since format 3, with the values that are not written."""


def _stage_schema(source: object, handler: Callable[[Any], Any]) -> Any:
    """Reads a stage from the fields that a file has."""
    return handler(Annotated[_StageFields, AfterValidator(_stage_of)])


Stage.__get_pydantic_core_schema__ = _stage_schema  # type: ignore[attr-defined]


def _stage_of(fields: _StageFields) -> Stage:
    if fields.mesh is None:
        if fields.rules or any(getattr(fields, name) for name in AT_REST):
            raise ValueError("mesh: missing, but there are rules or specs")
        whole = Stage.whole(fields.operators, fields.devices, fields.warmup, fields.recompute)
        return replace(whole, **{name: getattr(fields, name) for name in _NEW_FIELDS})
    rules = {}
    for name, lines in fields.rules.items():
        try:
            rules[name] = rule_of(lines)
        except ValueError as error:
            raise ValueError(f"rules.{name}: {error}") from None
    sharding = Sharding(fields.mesh, rules, **{name: getattr(fields, name) for name in AT_REST})
    size, devices = sharding.num_devices, fields.devices
    if len(devices) % size:
        raise ValueError(f"devices: expected a multiple of {size} for the mesh, got {len(devices)}")
    groups = tuple(devices[i : i + size] for i in range(0, len(devices), size))
    return Stage(
        fields.operators, groups, fields.warmup, fields.recompute, sharding,
        **{name: getattr(fields, name) for name in _NEW_FIELDS},
    )  # fmt: skip


def _fields_of(stage: Stage) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "operators": stage.operators,
        "devices": stage.devices,
        "warmup": stage.warmup,
        "recompute": stage.recompute,
    }
    plain |= {
        name: getattr(stage, name)
        for name, usual in _NEW_FIELDS.items()
        if getattr(stage, name) != usual
    }
    if stage.sharding is None:
        return plain
    at_rest = {name: getattr(stage.sharding, name) for name in AT_REST}
    of_zero = ("gradients", "states")
    return plain | {
        "mesh": stage.sharding.mesh,
        "rules": {name: one.lines for name, one in stage.sharding.rules.items()},
        **{name: specs for name, specs in at_rest.items() if specs or name not in of_zero},
    }


# ---- rules of a profile: lists of texts, each list once; an operator has the index of its own


@dataclass(frozen=True, slots=True)
class _RuleLists:
    """The rules in a file with a profile, or with several; all else is for another reader.

    Raises:
        ValueError: if an operator has the index of no list.
    """

    __pydantic_config__: ClassVar[ConfigDict] = {**STRICT, "extra": "ignore"}

    rules: tuple[tuple[Annotated[SplitRule, PlainValidator(SplitRule.parse)], ...], ...] = ()
    operators: Any = ()
    profiles: tuple["_RuleLists", ...] = ()

    def __post_init__(self) -> None:
        known = range(len(self.rules))
        wrong = [
            f"operators[{i}].rules: expected the index of one of the {len(known)} lists of rules,"
            f" got {shown(one['rules'])}"
            for i, one in _with_rules(self.operators)
            if type(one["rules"]) is not int or one["rules"] not in known
        ]
        if wrong:
            raise ValueError("\n".join(wrong))


def _with_rules(operators: object) -> list[tuple[int, dict[str, Any]]]:
    """The operators of a file that say something of rules, with their places."""
    known = enumerate(operators) if isinstance(operators, list) else ()
    return [(i, one) for i, one in known if isinstance(one, dict) and "rules" in one]


def _packed(artefact: object, plain: dict[str, Any]) -> dict[str, Any]:
    """A profile, or several, with rules as files have them; anything else as it is."""
    if isinstance(artefact, ProfileSet):
        both = zip(artefact.profiles, plain["profiles"], strict=True)
        return {**plain, "profiles": [_packed(one, own) for one, own in both]}
    if not isinstance(artefact, Profile) or not any(one.rules for one in artefact.operators):
        return plain
    lists: dict[tuple[SplitRule, ...], int] = {}
    for one, own in zip(artefact.operators, plain["operators"], strict=True):
        if one.rules:
            own["rules"] = lists.setdefault(one.rules, len(lists))
    return {**plain, "rules": [[one.text for one in some] for some in lists]}


def _unpacked(plain: dict[str, Any], known: _RuleLists) -> dict[str, Any]:
    """The fields of a profile, or of several, with the rules of each operator in it."""
    if known.profiles:
        both = zip(plain["profiles"], known.profiles, strict=True)
        return {**plain, "profiles": [_unpacked(one, own) for one, own in both]}
    if "operators" not in plain:
        return plain
    lists, operators = to_plain(known.rules), plain["operators"]
    packed = dict(_with_rules(operators))
    if packed:
        operators = [
            {**one, "rules": lists[packed[i]["rules"]]} if i in packed else one
            for i, one in enumerate(operators)
        ]
    return {name: v for name, v in plain.items() if name != "rules"} | {"operators": operators}


# -------------------------------------------------------------------------------- writing


def to_plain(artefact: Any) -> Any:
    """The artefact as JSON's mappings, lists, strings and numbers."""
    return plain_of(artefact, {Stage: _fields_of})


@remembered
def artefact_hash(artefact: Any) -> str:
    """sha256 of an artefact's canonical JSON. Of a profile, times of parts and of weights and the
    growth are left out: they say nothing of whole operators at its size, and strategies and
    corrections that were made without them stay valid.
    """
    if isinstance(artefact, Profile):
        artefact = without_parameter_work(artefact)
        if any(one.parts or one.backward_weight_s is not None for one in artefact.operators):
            whole = tuple(
                replace(one, parts=(), backward_weight_s=None) for one in artefact.operators
            )
            artefact = replace(artefact, operators=whole)
        if artefact.growth is not None:
            artefact = replace(artefact, growth=None)
    text = json.dumps(to_plain(artefact), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _one_value_a_line(plain: object) -> str:
    """JSON with every element on a line of its own, as people like to compare it."""
    return json.dumps(plain, sort_keys=True, indent=1)


def _one_record_a_line(plain: object, margin: str = "") -> str:
    """JSON with a line for each operator, tensor and parameter, a quarter shorter. An
    element of a list of mappings has a line of its own; so has a mapping with neither such a list
    nor mappings that have one.

    >>> print(_one_record_a_line({"a": [{"b": [1, 2]}, {"b": []}], "c": {"d": 0.5}}))
    {
     "a": [
      {"b": [1, 2]},
      {"b": []}
     ],
     "c": {"d": 0.5}
    }
    """
    deep = _depth(plain)
    if deep < 2 or (deep == 2 and isinstance(plain, dict)):
        return json.dumps(plain, sort_keys=True)
    inner = f"{margin} "
    if isinstance(plain, dict):
        items = ((json.dumps(key), _one_record_a_line(plain[key], inner)) for key in sorted(plain))
        parts = [": ".join(item) for item in items]
    else:
        parts = [_one_record_a_line(part, inner) for part in cast(Sequence[object], plain)]
    begin, end = "{}" if isinstance(plain, dict) else "[]"
    return begin + ",".join(f"\n{inner}{part}" for part in parts) + f"\n{margin}{end}"


def _depth(plain: object) -> int:
    """How deep lists and mappings are nested."""
    parts = (
        plain.values() if isinstance(plain, dict) else plain if isinstance(plain, list) else None
    )
    return 0 if parts is None else 1 + max(map(_depth, parts), default=0)


def _content(artefact: object, form: str, text: Callable[[object], str]) -> bytes:
    plain = {"format": form, **_packed(artefact, to_plain(artefact))}
    return (text(plain) + "\n").encode()


def artefact_bytes(artefact: object, form: str) -> bytes:
    """The content of a JSON file with an artefact of another module.

    Args:
        form: its format, such as "planner-strategy/2".
    """
    return _content(artefact, form, _one_record_a_line)


def write_profile(profile: Profile, path: Path) -> None:
    """Writes a profile as JSON."""
    form = NEWEST_PROFILE_FORMAT if _is_new(profile) else PROFILE_FORMAT
    write_atomically(path, _content(_as_written(profile), form, _one_record_a_line))


def _as_written(profile: Profile) -> Profile:
    """What of a profile does not follow from the rest of it."""
    return profile if profile.growth is None else without_parameter_work(profile)


def _as_read(profile: Profile) -> Profile:
    growth = profile.growth
    return profile if growth is None else with_parameter_work(profile, growth)


def _is_new(profile: Profile) -> bool:
    """Whether a profile has fields that files have since format 3."""
    timed = any(one.backward_weight_s is not None for one in profile.operators)
    timed |= without_parameter_work(profile) is not profile
    started = any(one.host_forward_s or one.host_backward_s for one in profile.operators)
    started |= any(one.host_forward_s or one.host_backward_s for one in profile.loss_costs)
    typed = profile.parameter_dtype is not None or profile.casts_once
    stated = profile.fused_loss or profile.launch_blocking
    return timed or started or typed or stated or profile.growth is not None


def write_profiles(profiles: Sequence[Profile], path: Path) -> None:
    """Writes the profiles of one model as JSON, ascending by the size of their microbatches."""
    if len(profiles) == 1:
        write_profile(profiles[0], path)
    else:
        is_new = any(map(_is_new, profiles))
        form = NEWEST_PROFILE_SET_FORMAT if is_new else PROFILE_SET_FORMAT
        written = ProfileSet(tuple(map(_as_written, profiles)))
        content = _content(written, form, _one_record_a_line)
        write_atomically(path, content)


def write_plan(plan: Plan, path: Path) -> None:
    """Writes a plan as strategy JSON."""
    write_atomically(path, plan_bytes(plan))


def plan_bytes(plan: Plan) -> bytes:
    """The content of a plan's strategy JSON."""
    is_new = any(
        getattr(one, name) != value
        for one in plan.strategy.stages
        for name, value in _NEW_FIELDS.items()
    )
    is_new = is_new or plan.parameter_dtype is not None
    return _content(plan, NEWEST_FORMAT if is_new else STRATEGY_FORMAT, _one_value_a_line)


def write_calibration(calibration: CalibrationFile, path: Path) -> None:
    """Writes a calibration as JSON."""
    write_atomically(path, _content(calibration, CALIBRATION_FORMAT, _one_record_a_line))


# The fields in which profiles or plans differ, in words.
PROFILE_FIELDS = {
    "model_hash": "model", "dimensions": "dimensions", "microbatch_size": "microbatch size",
    "dtype": "type", "device_type": "device", "engine": "engine", "threads": "number of threads",
    "batch_norm": "form of batch normalizations", "parameter_dtype": "type of parameters",
}  # fmt: skip
_PLAN_FIELDS = {
    "model_hash": "model", "dimensions": "dimensions", "topology_hash": "topology",
    "profile_hash": "profile", "optimizer": "optimizer",
}  # fmt: skip


def overwrite_note(
    path: Path, older: Mapping[str, Any], artefacts: Sequence[Profile] | Plan
) -> str | None:
    """A line on a profile or strategy that is about to be overwritten: the fields in which it
    differs from the new one, such as the model; None if it differs in none.

    Args:
        path: of the file.
        older: the fields of the file, from `FileKind.recognise`.
        artefacts: to be written there.
    """
    new: Sequence[Profile | Plan]
    if isinstance(artefacts, Plan):
        name, fields, new = STRATEGY_FILE.name, _PLAN_FIELDS, [artefacts]
    else:
        name, fields, new = PROFILE_FILE.name, PROFILE_FIELDS, artefacts
    before = older.get("profiles", [older])
    if not isinstance(before, list) or not all(isinstance(one, dict) for one in before):
        return f"{path} was {name} that is damaged, and is overwritten"
    absent = {one.name: one.default for one in dataclass_fields(new[0]) if one.metadata}

    def differs(field: str) -> bool:
        known = [one.get(field, absent.get(field)) for one in before]
        return known != [getattr(one, field) for one in new]

    differing = [word for field, word in fields.items() if differs(field)]
    if not differing:
        return None
    return f"{path} was {name} of another {' and '.join(differing)}, and is overwritten"


def format_in(path: Path, limit_bytes: int = MAX_TEXT_BYTES) -> str:
    """The format that a JSON file gives itself, a trace in `otherData`; empty where there is none,
    or no JSON.

    Args:
        limit_bytes: of files of its kind; see `planner.support.reading`.
    """
    plain = _json_in(path, "", limit_bytes)
    return "" if plain is None else _format_of(plain)


def _format_of(plain: Mapping[str, Any]) -> str:
    about = plain.get("otherData")
    form = (about if isinstance(about, dict) else plain).get("format")
    return form if isinstance(form, str) else ""


def _json_in(path: Path, form: str, limit_bytes: int = MAX_TEXT_BYTES) -> dict[str, Any] | None:
    """The mapping in a JSON file; None where it has none, or one of another format.

    Args:
        form: the beginning of its format, so that files of any version are recognised.
    """
    try:
        plain = json_of(read_text(path, "JSON", "", limit_bytes))
    except (FileError, ValueError, RecursionError):
        return None
    return plain if isinstance(plain, dict) and _format_of(plain).startswith(form) else None


PROFILE_FILE = FileKind("a profile", partial(_json_in, form="planner-profile"))
STRATEGY_FILE = FileKind("a strategy", partial(_json_in, form="planner-strategy"))
CALIBRATION_FILE = FileKind("a calibration", partial(_json_in, form="planner-calibration"))


# -------------------------------------------------------------------------------- reading


@lru_cache(maxsize=MAX_FILES)
def _artefact(kind: Any, text: str) -> Any:
    """The artefact in the text of a file, whose format is right: the same object each time, so that
    values derived from it are found again.

    Raises:
        ValidationError: if it is malformed.
    """
    plain = {name: value for name, value in json_of(text).items() if name != "format"}
    if kind in (Profile, ProfileSet):
        plain = _unpacked(plain, reader(_RuleLists).validate_json(text))
    read = reader(kind).validate_json(json.dumps(plain))
    if isinstance(read, ProfileSet):
        return ProfileSet(tuple(map(_as_read, read.profiles)))
    return _as_read(read) if isinstance(read, Profile) else read


def _read(
    kind: Any,
    path: Path,
    made_by: str,
    formats: Sequence[str],
    text: str | None = None,
) -> Any:
    """An artefact from its JSON file.

    Args:
        made_by: the command that makes such a file, for messages.
        formats: the format of the file, and older ones that are read, too.
        text: of the file, if it was read already.
    """
    form, advice = formats[0], f"make one with: {made_by}"
    content = read_text(path, form, advice) if text is None else text
    try:
        plain = json_of(content)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: expected {form}, this is no JSON: {error}; {advice}") from None
    own = isinstance(plain, dict) and plain.get("format") in formats
    without_format({**plain, "format": form} if own else plain, path, form, advice)
    try:
        return _artefact(kind, content)
    except ValidationError as error:
        raise file_error(path, error) from None


def read_artefact(
    kind: Any, form: str, path: Path, made_by: str, text: str | None = None
) -> Any:  # fmt: skip
    """An artefact of another module from its JSON file, see `artefact_bytes`.

    Args:
        kind: its frozen dataclass.
        form: the format that the file has to have.
        made_by: the command that makes such a file, for messages.
        text: of the file, if it was read already.

    Raises:
        FileError: if it is missing, of another format, or malformed.
    """
    return _read(kind, path, made_by, (form,), text)


def read_profile(path: Path, text: str | None = None) -> Profile:
    """The profile in a JSON file.

    Args:
        text: of the file, if it was read already.

    Raises:
        FileError: if it is missing, no profile, or malformed.
    """
    advice = "planner profile MODEL.onnx"
    profile: Profile = _read(Profile, path, advice, PROFILE_FORMATS, text)
    return profile


def read_profile_set(path: Path, text: str | None = None) -> ProfileSet:
    """The profiles in a JSON file with several of them.

    Args:
        text: of the file, if it was read already.

    Raises:
        FileError: if it is missing, no such file, or malformed.
    """
    advice = "planner profile MODEL.onnx --batch 1,2,4"
    profiles: ProfileSet = _read(ProfileSet, path, advice, PROFILE_SET_FORMATS, text)
    return profiles


def read_plan(path: Path) -> Plan:
    """The plan in a strategy JSON file.

    Raises:
        FileError: if it is missing, no strategy, or malformed, or has stages that cannot be run.
    """
    plan: Plan = _read(Plan, path, "planner solve", STRATEGY_FORMATS)
    return _runnable(plan, path)


def calibration_path(profile_path: Path) -> Path:
    """Where the calibration of a profile stands."""
    return profile_path.with_suffix(CALIBRATION_ENDING)


def read_calibration(profile_path: Path, profiles: Sequence[Profile]) -> CalibrationFile | None:
    """The calibration that stands beside a profile; None if there is none.

    Args:
        profiles: in that file.

    Raises:
        FileError: if it is malformed, or was made for other profiles.
    """
    path = calibration_path(profile_path)
    if not path.exists():
        return None
    advice = f"planner calibrate TRACE --profile {shlex.quote(str(profile_path))}"
    calibration: CalibrationFile = _read(CalibrationFile, path, advice, (CALIBRATION_FORMAT,))
    if calibration.profiles != tuple(map(artefact_hash, profiles)):
        raise FileError(
            f"{path}: made for another profile than {profile_path} is now; run: {advice}, or give"
            " --no-calibration"
        )
    return calibration


def plan_from_plain(plain: object, path: Path) -> Plan:
    """A plan that stands inside another file.

    Raises:
        FileError: if it is malformed.
    """
    try:
        plan: Plan = reader(Plan).validate_json(json.dumps(plain))
    except ValidationError as error:
        raise file_error(path, error) from None
    return _runnable(plan, path)


def _runnable(plan: Plan, path: Path) -> Plan:
    """The plan, refused where a stage of it can be neither priced nor run."""
    for s, stage in enumerate(plan.strategy.stages):
        if obstacle := not_runnable(stage):
            raise FileError(f"{path}: strategy.stages[{s}]: {obstacle}")
    return plan


def shipped(folder: str) -> Path:
    """A folder of data: in a checkout at its root, else inside the installed package."""
    package = Path(__file__).resolve().parents[1]
    root = package.parent / folder
    return root if root.is_dir() else package / "data" / folder
