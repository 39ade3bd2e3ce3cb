"""Paths of files, and the one reader of input files: path -> bytes, never more than a limit for its
kind of file.

A regular file is measured before it is read. What is none, a pipe or a device, tells no size: it is
read until it ends or the limit is reached. A pipe can be read once only, so its content is kept for
as long as the process lives: `--profile <(planner ..)` may be read by several steps.
"""

import errno
import os
import select
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from planner.support.errors import FileError, shown
from planner.support.units import format_bytes, format_seconds

File = str | os.PathLike[str]
"""The path of a file."""

MAX_MODEL_BYTES = 2**31 - 1
"""Of an ONNX file: protobuf reads no larger message. External data is no part of it."""

MAX_TEXT_BYTES = 64 * 2**20
"""Of a profile, a strategy, a calibration, or another planner's graph. The largest profile that
ships has 0.6 MB for 1,500 operators, so 100,000 operators fit. Parsed JSON takes up to 30 times its
bytes of memory (`[[],[],..`): 2 GiB."""

MAX_TRACE_BYTES = 256 * 2**20
"""Of a trace: 100 to 200 bytes for each event, a million events and more."""

MAX_CLUSTER_BYTES = 4 * 2**20
"""Of a topology or another description of a cluster. The reader of YAML is written in Python and
takes 7 s for a MB. As many devices and links as a topology may have, written out, take less."""

MAX_OPTIONS_BYTES = 2**18
"""Of the options of a training: a few lines of YAML, which is read at 7 s for a MB."""

MAX_PIPED_BYTES = 256 * 2**20
"""Of anything that is no regular file, whatever kind it is read as: it may never end, is in memory
twice while it is read, and once ever after."""

# A pipe whose other end nobody has opened for so long is refused; one that is open may be silent
# for longer, because its writer may have to compute.
OPENED_WITHIN_S, SILENT_FOR_S = 5.0, 60.0
_CHUNK = 2**20

# Contents of pipes and devices by device and inode.
_kept: dict[tuple[int, int], bytes] = {}


def read_bytes(path: Path, limit_bytes: int) -> bytes:
    """The content of an input file. That of a pipe is the same whenever it is asked for.

    Args:
        path: of a regular file, a pipe or a device.
        limit_bytes: the most that a file of its kind may have.

    Raises:
        OSError: if it is missing, a folder, or may not be read.
        ValueError: if no file can have that name.
        FileError: if it has more bytes, or is a pipe that nobody writes to.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) and (status.st_dev, status.st_ino) in _kept:
        return _within(_kept[status.st_dev, status.st_ino], path, limit_bytes)
    # Without O_NONBLOCK, to open a pipe waits for the other end.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(handle)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if stat.S_ISREG(status.st_mode):
            return _regular(handle, path, status.st_size, limit_bytes)
        content = _stream(handle, path, min(limit_bytes, MAX_PIPED_BYTES))
    finally:
        os.close(handle)
    _kept[status.st_dev, status.st_ino] = content
    return content


def read_text(path: Path, form: str, advice: str, limit_bytes: int = MAX_TEXT_BYTES) -> str:
    """The text of a file that should have a format.

    Args:
        limit_bytes: the most that a file of its kind may have.

    Raises:
        FileError: if it is missing, a folder, too large, or no text; with the advice.
    """
    try:
        content = read_bytes(path, limit_bytes)
    except (FileNotFoundError, ValueError):  # no file has a name with a zero byte
        raise FileError(f"{path}: there is no such file") from None
    except IsADirectoryError:
        raise FileError(
            f"{path}: expected {form}, this is a folder; give a file in it, or {advice}"
        ) from None
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not content.strip():
        raise FileError(f"{path}: expected {form}, the file is empty; {advice}")
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise FileError(f"{path}: expected {form}, this is a binary file; {advice}")
    return text


def without_format(plain: object, path: Path, form: str, advice: str) -> dict[str, Any]:
    """The fields of a file without its format, which is checked."""
    if not isinstance(plain, dict):
        raise FileError(f"{path}: expected {form}, a mapping, got {shown(plain)}; {advice}")
    if plain.get("format") != form:
        raise FileError(
            f"{path}: format: expected {form!r}, got {shown(plain.get('format'))}; {advice}"
        )
    return {name: value for name, value in plain.items() if name != "format"}


def read_document(
    path: Path,
    form: str,
    advice: str,
    parse: Callable[[str, Path], object],
    limit_bytes: int = MAX_TEXT_BYTES,
) -> dict[str, Any]:
    """The fields of a file without its format.

    Args:
        form: the format that the file should have.
        parse: the value of the text; gets the path for its messages.
        limit_bytes: the most that a file of its kind may have.

    Raises:
        FileError: if it is missing, too large, no text, or of another format; with the advice.
    """
    text = read_text(path, form, advice, limit_bytes)
    return without_format(parse(text, path), path, form, advice)


def check_mapped(path: Path) -> None:
    """Checks a file that is mapped into memory instead of being read, such as weights beside a
    model, of any size.

    Raises:
        FileError: if it is a pipe or a device: to open one may wait forever.
    """
    if path.exists() and not path.is_file():
        raise FileError(
            f"{path}: expected a regular file of weights, got a folder, a pipe or a device; put the"
            " data file of the model there"
        )


def _regular(handle: int, path: Path, size: int, limit_bytes: int) -> bytes:
    """The content of a regular file.

    Args:
        size: bytes, as the file says. Files such as those in /proc have more, as have files that
            grow.
    """
    if size > limit_bytes:
        raise _too_large(path, limit_bytes, format_bytes(size))
    with os.fdopen(os.dup(handle), "rb") as file:
        content = file.read(size + 1)
        if len(content) > size:
            content += file.read(limit_bytes + 1 - len(content))
    return _within(content, path, limit_bytes)


def _within(content: bytes, path: Path, limit_bytes: int) -> bytes:
    if len(content) > limit_bytes:
        raise _too_large(path, limit_bytes, "more")
    return content


def _too_large(path: Path, limit_bytes: int, size: str) -> FileError:
    return FileError(
        f"{path}: expected at most {format_bytes(limit_bytes)}, got {size}; check that it is the"
        " file that you mean"
    )


def _stream(handle: int, path: Path, limit_bytes: int) -> bytes:
    """The content of a pipe or a device up to its end.

    Args:
        handle: open, and not blocking.
    """
    parts: list[bytes] = []
    size, opened, heard_s = 0, not _waits_for_writer(handle), time.monotonic()
    while size <= limit_bytes:
        try:
            part = os.read(handle, _CHUNK)
        except BlockingIOError:  # somebody has it open, and has written nothing yet
            opened = True
        else:
            if part:
                parts.append(part)
                size, opened, heard_s = size + len(part), True, time.monotonic()
                continue
            if opened:
                return b"".join(parts)
        left_s = heard_s + (SILENT_FOR_S if opened else OPENED_WITHIN_S) - time.monotonic()
        if left_s <= 0:
            raise _silent(path, opened)
        ready, _, _ = select.select([handle], [], [], left_s)
        # A pipe that is ready with nothing to read was opened and closed.
        opened = opened or bool(ready)
    raise _too_large(path, limit_bytes, "more, from what is no regular file and may never end")


def _waits_for_writer(handle: int) -> bool:
    """Whether it is a pipe with a name, at whose other end somebody may still come. One without a
    name, as the shell makes for `<(..)`, is ended where it has no writer.
    """
    if not stat.S_ISFIFO(os.fstat(handle).st_mode):
        return False
    link = Path(f"/proc/self/fd/{handle}")
    return not (link.is_symlink() and link.readlink().name.startswith("pipe:"))


def _silent(path: Path, opened: bool) -> FileError:
    what = "nobody has written to it" if opened else "nobody has opened it for writing"
    after = format_seconds(SILENT_FOR_S if opened else OPENED_WITHIN_S)
    return FileError(f"{path}: expected a file, got a pipe, and {what} within {after}; give a file")


def relative(path: Path, folder: Path) -> str:
    """A path as seen from a folder, with forward slashes, as it is written into files."""
    return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()
