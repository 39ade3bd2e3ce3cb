"""What must hold after every command, whatever its input was."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from google.protobuf.message import DecodeError
from onnx import ModelProto

from tests.fuzz.runner import Outcome

EXIT_CODES = (0, 1, 2, 3)
LOG = '{"format": "planner-log/'
NO_MEMORY = re.compile(r"MemoryError|Unable to allocate|std::bad_alloc")
TRACEBACK = "Traceback (most recent call last)"
# Everything that moves the cursor, changes colours or the direction of writing, or ends a line for
# some readers; and halves of characters.
CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff"
    "\ud800-\udfff]"
)
NOT_A_NUMBER = re.compile(r"(?<![\w.'\"/-])-?(?:nan|NaN|inf|Infinity)(?![\w.'\"/-])")
ERROR = re.compile(r"[\w.]+(?:Error|Exception|Interrupt|Exit|Warning)\b")
FRAME = re.compile(r'File "[^"]*?((?:planner/|cli\.py)[^"]*)", line \d+,? in (\S+)')
MOST_LINES, MOST_CHARACTERS = 30, 6000
Snapshot = Mapping[str, tuple[int, int, int]]


def snapshot(folder: Path) -> Snapshot:
    """What lies in a folder: kind, size and time of the last change, by name."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        is_folder = path.is_dir() and not path.is_symlink()
        size, time = (0, 0) if is_folder else (status.st_size, status.st_mtime_ns)
        found[str(path.relative_to(folder))] = (status.st_mode, size, time)
    return found


def problems(
    outcome: Outcome, arguments: Sequence[str], before: Snapshot, after: Snapshot, folder: Path
) -> list[str]:
    """All that is wrong about a command that has ended, in words.

    Args:
        arguments: of the command.
        before: what lay in its folder.
        after: the same, after it.
        folder: where it ran.
    """
    out, err = outcome.stdout.decode(errors="replace"), outcome.stderr.decode(errors="replace")
    found = [*_end(outcome, out, err), *_printed(outcome)]
    touched = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    if outcome.code == 0:
        found += _results(folder, [name for name in touched if name in after])
        found += _said(out, "--json" in arguments)
    else:
        found += [f"left {name} after a failure" for name in touched]
        found += _message(out, err, outcome)
    found += [f"changed its input {name}" for name in touched if name in before]
    return found


def _end(outcome: Outcome, out: str, err: str) -> Iterator[str]:
    if outcome.timed_out:
        yield f"hangs{_place(err)}"
    elif outcome.signal is not None:
        yield f"ended by signal {outcome.signal}"
    elif TRACEBACK in err or TRACEBACK in out:
        yield f"traceback: {_cause(err if TRACEBACK in err else out)}"
    elif outcome.code not in EXIT_CODES:
        yield f"exit code {outcome.code}"
    if match := NO_MEMORY.search(err + out):
        yield f"no memory: {match[0]}"


def _cause(err: str) -> str:
    """The error of a traceback, and the last place in the package that it came through."""
    lines = [line for line in err.splitlines() if line.strip()]
    kind = next((line for line in reversed(lines) if ERROR.match(line)), lines[-1])
    places = FRAME.findall(err)
    return f"{kind[:100]}{f' in {places[-1][0]} {places[-1][1]}' if places else ''}"


def _place(err: str) -> str:
    """Where a command that hangs was: the innermost place in the package of the first thread,
    which is the last one printed.
    """
    places = FRAME.findall(err.rpartition("Thread 0x")[2])
    return f" in {places[0][0]} {places[0][1]}" if places else ""


def _printed(outcome: Outcome) -> Iterator[str]:
    for name, content in (("output", outcome.stdout), ("message", outcome.stderr)):
        try:
            text = content.decode()
        except UnicodeDecodeError:
            yield f"{name} is not UTF-8"
            continue
        if match := CONTROL.search(text):
            yield f"control character {match[0]!r} in the {name}"


def _message(out: str, err: str, outcome: Outcome) -> Iterator[str]:
    """A failure has a message of a few lines."""
    if outcome.timed_out or outcome.signal is not None:
        return
    if not (err.strip() or (outcome.code == 3 and out.strip())):
        yield "no message"
    if TRACEBACK not in err and (len(err.splitlines()) > MOST_LINES or len(err) > MOST_CHARACTERS):
        yield f"a message of {len(err.splitlines())} lines, {len(err)} characters"


def _said(out: str, as_json: bool) -> Iterator[str]:
    """The output of a command that succeeded."""
    if as_json:
        try:
            _strict_json(out)
        except ValueError as error:
            yield f"--json: {error}"
    elif match := NOT_A_NUMBER.search(out):
        yield f"{match[0]} in the output"


def _results(folder: Path, names: Sequence[str]) -> Iterator[str]:
    """The files of a command that succeeded."""
    for name in names:
        path = folder / name
        if path.is_dir():
            continue
        content = path.read_bytes()
        try:
            if path.suffix == ".onnx":
                ModelProto.FromString(content)
                continue
            text = content.decode()
            if text.startswith(LOG):
                for line in text.splitlines():
                    _strict_json(line)
            elif text.lstrip().startswith(("{", "[")):
                _strict_json(text)
            elif match := NOT_A_NUMBER.search(text):
                yield f"{match[0]} in {name}"
            if path.suffix == ".svg":
                ElementTree.fromstring(text)
        except (ValueError, DecodeError, ElementTree.ParseError) as error:
            yield f"{name}: {error}"
            continue
        if match := CONTROL.search(text):
            yield f"control character {match[0]!r} in {name}"


def _strict_json(text: str) -> None:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    json.loads(text, parse_constant=refuse)
