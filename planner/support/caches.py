"""What the planner keeps in the user's cache folder: entries that are whole, in folders that nobody
else can write to where it matters.

An entry begins with a hash of its name and content. One that was cut short, damaged or put under
another name is no entry: it is made anew, with a warning. A cache that cannot be written, on a full
disk for example, costs time and never an answer. Warnings are messages of the logger `LOGGER`.
"""

import errno
import hashlib
import json
import logging
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from planner.support.writing import replace_file

LOGGER = logging.getLogger(__name__)

_MARK = b"planner-cache 1 "
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_root() -> Path:
    """The planner's folder in the user's cache folder."""
    return user_cache_path("planner", appauthor=False)


def with_checksum(name: str, content: bytes) -> bytes:
    """The entry of a name, as it stands in a file."""
    return _seal(name, content) + content


def without_checksum(name: str, entry: bytes) -> bytes:
    """The content of an entry.

    Raises:
        ValueError: if it is not what was kept under this name.

    >>> without_checksum("a", with_checksum("a", b"1"))
    b'1'
    >>> without_checksum("b", with_checksum("a", b"1"))
    Traceback (most recent call last):
    ValueError: the entry is cut short or damaged
    """
    if not entry:
        raise ValueError("the entry is empty")
    begin = len(_seal(name, b""))
    if entry[:begin] != _seal(name, entry[begin:]):
        raise ValueError("the entry is cut short or damaged")
    return entry[begin:]


def _seal(name: str, content: bytes) -> bytes:
    digest = hashlib.sha256(name.encode() + b"\0" + content)
    return _MARK + digest.hexdigest().encode() + b"\n"


@dataclass
class CacheFolder:
    """Entries in a folder.

    Attributes:
        folder: of the entries; None keeps nothing.
        remedy: what the user can do where it cannot be written.
        problem: the reason if an entry could not be kept, else None; nothing more is kept then.
        damaged: number of the entries that were no entries.
    """

    folder: Path | None
    remedy: str = "free some space, or set XDG_CACHE_HOME to another folder"
    problem: str | None = field(default=None, init=False)
    damaged: int = field(default=0, init=False)

    def get(self, name: str) -> bytes | None:
        """What was kept under a name, a path in the folder; None if there is nothing, or no entry,
        which is said.
        """
        if self.folder is None:
            return None
        path = self.folder / name
        try:
            return without_checksum(name, _own_content(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self._mistrust(name, error.strerror or str(error))
        except ValueError as error:
            self._mistrust(name, str(error))
        return None

    def get_json(self, name: str) -> Any:
        """The same of a value that was kept as JSON."""
        content = self.get(name)
        return None if content is None else json.loads(content)

    def put_json(self, name: str, plain: object) -> None:
        """Keeps a value as JSON."""
        self.put(name, json.dumps(plain, sort_keys=True).encode())

    def _mistrust(self, name: str, reason: str) -> None:
        """Says, once for all entries, that one cannot be used."""
        self.damaged += 1
        if self.damaged == 1:
            LOGGER.warning(
                "%s: expected an entry of the cache, but %s; it and others like it are made anew",
                None if self.folder is None else self.folder / name,
                reason,
            )

    def put(self, name: str, content: bytes) -> None:
        """Keeps something; if that fails, `problem` has the reason."""
        if self.folder is None or self.problem:
            return
        path = self.folder / name
        try:
            _make_folder(path.parent)
            replace_file(path, with_checksum(name, content), mode=0o600)
        except OSError as error:
            self.problem = f"{path}: cannot be written: {error.strerror or error}; {self.remedy}"


def _own_content(path: Path) -> bytes:
    """The content of a file of this user or of root.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is of somebody else.
    """
    with path.open("rb") as file:
        facts = os.fstat(file.fileno())
        if not _own(facts):
            raise ValueError(f"it belongs to user {facts.st_uid}")
        return file.read()


def _own(facts: os.stat_result) -> bool:
    """Whether something belongs to this user or to root."""
    # Other systems keep caches in the user's own profile.
    return not hasattr(os, "geteuid") or facts.st_uid in (0, os.geteuid())


def _make_folder(folder: Path) -> None:
    """Makes a folder and those above it, for this user alone."""
    for one in reversed([one for one in (folder, *folder.parents) if not one.exists()]):
        one.mkdir(mode=0o700, exist_ok=True)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))


def private_folder(folder: Path) -> str:
    """Makes a folder, if need be, that only this user can write to.

    Returns:
        "", or why others can write to it, or it cannot be made: a line with what to do.
    """
    try:
        _make_folder(folder)
        return _writer_of(folder.resolve())
    except OSError as error:
        return f"{folder}: cannot be made: {error.strerror or error}"


def _writer_of(folder: Path) -> str:
    """Who else can change what is in a folder, directly or by renaming one above it, "" for nobody:
    a line with what to do.
    """
    if not hasattr(os, "geteuid"):
        return ""
    for one in (folder, *folder.parents):
        facts = one.stat()
        if not _own(facts):
            return (
                f"{one}: expected a folder of this user or of root, got one of user {facts.st_uid}"
            )
        # In a sticky folder, such as /tmp, nobody can rename what belongs to another user.
        sticky = one != folder and bool(facts.st_mode & stat.S_ISVTX)
        if facts.st_mode & _others_write(facts) and not sticky:
            mode = stat.S_IMODE(facts.st_mode)
            return (
                f"{one}: expected a folder that only you can write to, got mode {mode:o}; run:"
                f" chmod go-w {one}"
            )
    return ""


def _others_write(facts: os.stat_result) -> int:
    """The bits of a mode that let others write: not that of a group that is this user alone."""
    import grp
    import pwd

    try:
        me, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(facts.st_gid)
    except KeyError:
        return _OTHERS_WRITE
    alone = me.pw_gid == group.gr_gid and me.pw_name == group.gr_name
    return stat.S_IWOTH if alone and set(group.gr_mem) <= {me.pw_name} else _OTHERS_WRITE
