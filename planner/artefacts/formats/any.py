"""Readers and writers of foreign formats, and the one entry that reads a profile from any of them.

A file is recognised by its content, not by its name.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from planner.artefacts.files import (
    PROFILE_FORMAT,
    PROFILE_SET_FORMATS,
    STRATEGY_FORMAT,
    STRATEGY_FORMATS,
    read_profile,
    read_profile_set,
)
from planner.artefacts.formats.dnn_partitioning import (
    DnnGraph,
    dnn_partitioning_profile,
    read_dnn_partitioning,
)
from planner.artefacts.formats.graph_txt import GRAPH_TXT, is_graph_txt, parse, to_profile
from planner.artefacts.formats.piper import PiperGraph, piper_profile, read_piper
from planner.artefacts.profile import Profile
from planner.artefacts.strict import json_of
from planner.support.errors import FileError
from planner.support.reading import read_text

DNN_PARTITIONING, PIPER = "dnn-partitioning's JSON", "Piper's JSON"
# Keys that only files of one format have.
_KEYS: Mapping[str, frozenset[str]] = {
    DNN_PARTITIONING: frozenset({"maxFPGAs", "nodes"}),
    PIPER: frozenset({"maxDevices", "nodes"}),
}

ForeignGraph = DnnGraph | PiperGraph
"""A graph with devices of its own, which two other planners plan for."""


def _planner_profiles(path: Path, text: str) -> tuple[Profile, ...]:
    """The profiles in the planner's own JSON, which has one or several."""
    if json_of(text)["format"] in PROFILE_SET_FORMATS:
        return read_profile_set(path, text).profiles
    return (read_profile(path, text),)


READERS: Mapping[str, Callable[[Path, str], tuple[Profile, ...] | ForeignGraph]] = {
    PROFILE_FORMAT: _planner_profiles,
    GRAPH_TXT: lambda path, text: (to_profile(parse(text, path), path),),
    DNN_PARTITIONING: read_dnn_partitioning,
    PIPER: read_piper,
}
_ADVICE = f"take a file of a known format: {', '.join(READERS)}"


def detect(path: Path) -> str:
    """The format of a file, a key of `READERS` or `STRATEGY_FORMAT`, by its content.

    Raises:
        FileError: if it is missing, no text, or of no known format.
    """
    return _format_of(read_text(path, "a profile", _ADVICE), path)


def _format_of(text: str, path: Path) -> str:
    """`detect` for a file that has been read.

    Raises:
        FileError: if the text is of no known format.
    """
    if not text.lstrip().startswith(("{", "[")) and is_graph_txt(text):
        return GRAPH_TXT
    try:
        plain = json_of(text)
    except (ValueError, RecursionError) as error:
        is_json = text.lstrip().startswith(("{", "["))
        what = f"JSON that breaks off: {error}" if is_json else "neither JSON nor lines of nodes"
        raise FileError(f"{path}: expected a profile, got {what}; {_ADVICE}") from None
    if isinstance(plain, dict):
        if "format" in plain:
            # The reader of the format complains about a wrong version.
            return STRATEGY_FORMAT if plain["format"] in STRATEGY_FORMATS else PROFILE_FORMAT
        for name, keys in _KEYS.items():
            if keys <= plain.keys():
                return name
    raise FileError(f"{path}: expected a profile, got JSON of no known kind; {_ADVICE}")


def read_any(path: Path, text: str | None = None) -> tuple[Profile, ...] | ForeignGraph:
    """The profiles in a file, ascending by the size of the microbatch, or the foreign graph.

    Args:
        text: of the file, if it was read already.

    Raises:
        FileError: if it is missing, malformed, or neither.
    """
    text = text or read_text(path, "a profile", _ADVICE)
    form = _format_of(text, path)
    if form == STRATEGY_FORMAT:
        raise FileError(f"{path}: expected a profile, this is a strategy; {_ADVICE}")
    try:
        return READERS[form](path, text)
    except ValueError as error:
        # The fields are sound one by one, and make no profile.
        raise FileError(f"{path}: {error}") from None


def read_any_profiles(path: Path, text: str | None = None) -> tuple[Profile, ...]:
    """The profiles in a file of any known format, ascending by the size of the microbatch; one,
    unless the file has several.

    Args:
        text: of the file, if it was read already.

    Raises:
        FileError: if it is missing, malformed, or no profile.
    """
    return as_profiles(read_any(path, text), path)


def as_profiles(content: tuple[Profile, ...] | ForeignGraph, path: Path) -> tuple[Profile, ...]:
    """What `read_any` has read, as profiles.

    Raises:
        FileError: if a foreign graph makes no profile.
    """
    try:
        match content:
            case DnnGraph():
                return (dnn_partitioning_profile(content),)
            case PiperGraph():
                return (piper_profile(content),)
    except ValueError as error:
        raise FileError(f"{path}: {error}") from None
    return content
