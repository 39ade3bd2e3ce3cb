"""Files of one format into files of another: profiles into each other, and a strategy into
PipeDream's graph.txt with the stage of every node.
"""

from pathlib import Path

from planner.api.lookup import newest_profile, profile_of
from planner.artefacts.files import PROFILE_FILE, STRATEGY_FORMAT, read_plan, write_profiles
from planner.artefacts.formats.any import detect, read_any_profiles
from planner.artefacts.formats.graph_txt import (
    ADVICE,
    DOT_FILE,
    GRAPH_FILE,
    GRAPH_TXT,
    annotate,
    from_profile,
    parse,
    to_dot,
    to_text,
)
from planner.artefacts.plan import Plan
from planner.artefacts.profile import Profile
from planner.model.load import ReadOptions, load
from planner.resharding.checks import check_fits
from planner.support.caches import LOGGER
from planner.support.errors import OptionError
from planner.support.outputs import check_outputs, same_file
from planner.support.reading import read_text
from planner.support.writing import write_atomically, write_together

PIPEDREAM, PLANNER = "pipedream", "planner"


def convert(
    source: Path, target: Path, to: str | None = None, profile: Path | None = None
) -> tuple[Path, ...]:
    """Converts a file, by its content, and returns what was written.

    A profile becomes a graph.txt or the planner's JSON, with the rules by which its operators split
    where its ONNX file is at hand; of several in one file, the one for the
    largest microbatch becomes a graph.txt. A strategy becomes a graph.txt with stages, and a dot
    file beside it, of the profile that it was made for: it is looked for in `profile`, else in the
    graph.txt that `target` already is, else in the newest file of ./profiles.

    Args:
        to: "pipedream" or "planner"; None goes by the ending of the target: .json is the planner's.
        profile: for strategies only.

    Raises:
        FileError: if a file is missing, malformed, or the profile is not the strategy's.
        OptionError: if the arguments contradict each other, or a file would be overwritten that
            the planner has not written.
    """
    if to not in (None, PIPEDREAM, PLANNER):
        raise OptionError(f"unknown format {to!r}; known: {PIPEDREAM}, {PLANNER}")
    is_strategy = detect(source) == STRATEGY_FORMAT
    form = to or (PLANNER if target.suffix.lower() == ".json" and not is_strategy else PIPEDREAM)
    if same_file(target, source):
        raise OptionError(f"{target} would be overwritten by itself; choose another name")
    if is_strategy:
        if form != PIPEDREAM:
            raise OptionError(f"{source} is a strategy, which becomes a graph.txt: --to pipedream")
        return _convert_strategy(read_plan(source), source, target, profile)
    if profile is not None:
        raise OptionError(f"--profile is for strategies, and {source} is a profile itself")
    check_outputs([(target, PROFILE_FILE if form == PLANNER else GRAPH_FILE)], {})
    profiles = read_any_profiles(source)
    if form == PLANNER:
        write_profiles([_with_rules(one) for one in profiles], target)
    elif detect(source) == GRAPH_TXT:  # what a profile has no place for stays: lists, stages
        text = read_text(source, GRAPH_TXT, ADVICE)
        write_atomically(target, to_text(parse(text, source)).encode())
    else:
        write_atomically(target, to_text(from_profile(profiles[-1])).encode())
    return (target,)


def _with_rules(profile: Profile) -> Profile:
    """A profile with the rules by which its operators split, if it has none and its ONNX file is
    where it says, unchanged and with the same operators.
    """
    path = None if profile.model_path is None else Path(profile.model_path)
    if path is None or not path.is_file() or any(one.rules for one in profile.operators):
        return profile
    from planner.profilers.rules import with_rules

    options = ReadOptions(
        batch=profile.microbatch_size, dimensions=profile.dimensions, tie=profile.tie,
        untie=profile.untie, batch_norm=profile.batch_norm,
    )  # fmt: skip
    model = load(path, options)
    if model.hash != profile.model_hash or model.graph.operators != profile.graph.operators:
        return profile
    made = with_rules(profile, model)
    for warning in made.warnings[len(profile.warnings) :]:
        LOGGER.warning(warning)
    return made


def _convert_strategy(
    plan: Plan, source: Path, target: Path, profile_path: Path | None
) -> tuple[Path, ...]:
    """A graph.txt with the stages of a plan, and its picture."""
    dot = target.with_suffix(".dot")
    if dot == target:
        raise OptionError(f"{target}: expected a name such as graph.txt; the picture is written"
                          " beside it and has the ending .dot")  # fmt: skip
    path = profile_path or _own_profile(target, plan)
    is_text = detect(path) == GRAPH_TXT
    read = {"strategy": source, "profile": path}
    annotated = is_text and same_file(target, path)  # which loses nothing of it
    if not annotated:
        check_outputs([(target, GRAPH_FILE)], read)
    check_outputs([(dot, DOT_FILE)], {**read, "graph": target})
    profile = profile_of(plan, str(source), read_any_profiles(path), str(path))
    check_fits(plan, str(source), profile.graph)
    text = _with_stages(profile, read_text(path, GRAPH_TXT, ADVICE) if is_text else None, plan)
    write_together({target: text.encode(), dot: to_dot(parse(text, target)).encode()})
    return target, dot


def _own_profile(target: Path, plan: Plan) -> Path:
    """The graph.txt that is there already, else the newest profile of the plan's model."""
    if target.is_file() and detect(target) == GRAPH_TXT:
        return target
    return newest_profile(Path("profiles"), plan.model_hash, (plan.profiled_on,)).path


def _with_stages(profile: Profile, text: str | None, plan: Plan) -> str:
    stages = {name: s for s, one in enumerate(plan.strategy.stages) for name in one.operators}
    return to_text(from_profile(profile, stages)) if text is None else annotate(text, stages)
