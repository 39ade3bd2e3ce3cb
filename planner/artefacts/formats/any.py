"""Readers and writers of foreign formats, and the one entry that reads a profile from any of them.

A file is recognised by its content, not by its name.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from planner.artefacts.files import (
    PROFILE_FORMAT,
    PROFILE_SET_FORMAT,
    PROFILE_SET_FORMATS,
    STRATEGY_FORMAT,
    STRATEGY_FORMATS,
    json_of,
    read_profile,
    read_profile_set,
    read_text,
)
from planner.artefacts.formats.dnn_partitioning import (
    dnn_partitioning_profile,
    read_dnn_partitioning,
)
from planner.artefacts.formats.graph_txt import GRAPH_TXT, is_graph_txt, read_graph_txt
from planner.artefacts.formats.piper import piper_profile, read_piper
from planner.artefacts.profile import Profile
from planner.support.errors import FileError

DNN_PARTITIONING, PIPER = "dnn-partitioning's JSON", "Piper's JSON"
# Keys that only files of one format have.
_KEYS: Mapping[str, frozenset[str]] = {
    DNN_PARTITIONING: frozenset({"maxFPGAs", "nodes"}),
    PIPER: frozenset({"maxDevices", "nodes"}),
}

Reader = Callable[[Path], Profile]


READERS: Mapping[str, Reader] = {
    PROFILE_FORMAT: read_profile,
    GRAPH_TXT: read_graph_txt,
    DNN_PARTITIONING: lambda path: dnn_partitioning_profile(read_dnn_partitioning(path)),
    PIPER: lambda path: piper_profile(read_piper(path)),
}
_ADVICE = f"known formats: {', '.join(READERS)}"


def detect(path: Path) -> str:
    """The format of a file, a key of `READERS`, `PROFILE_SET_FORMAT` or `STRATEGY_FORMAT`, by its
    content.

    Raises:
        FileError: if it is missing, no text, or of no known format.
    """
    text = read_text(path, "a profile", _ADVICE)
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
            if plain["format"] in STRATEGY_FORMATS:
                return STRATEGY_FORMAT
            return PROFILE_SET_FORMAT if plain["format"] in PROFILE_SET_FORMATS else PROFILE_FORMAT
        for name, keys in _KEYS.items():
            if keys <= plain.keys():
                return name
    raise FileError(f"{path}: expected a profile, got JSON of no known kind; {_ADVICE}")


def read_any_profiles(path: Path) -> tuple[Profile, ...]:
    """The profiles in a file of any known format, ascending by the size of the microbatch; one,
    unless the file has several.

    Raises:
        FileError: if it is missing, malformed, or no profile.
    """
    form = detect(path)
    if form == STRATEGY_FORMAT:
        raise FileError(f"{path}: expected a profile, this is a strategy; {_ADVICE}")
    if form == PROFILE_SET_FORMAT:
        return read_profile_set(path).profiles
    try:
        return (READERS[form](path),)
    except ValueError as error:
        # The fields are sound one by one, and make no profile.
        raise FileError(f"{path}: {error}") from None
