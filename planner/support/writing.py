"""Files are written whole or not at all: filled under no name, then put in place.

A symbolic link is written through: its end is replaced, and the link stays. Devices, pipes, sockets
and folders are refused, so that nobody's device node becomes a file.
"""

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from errno import EINVAL, EISDIR, ENOENT, ENOTSUP
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

from planner.support.errors import FileError

# Files without a name exist on Linux, on most file systems, and get one through /proc. A process
# that is killed leaves nothing of them.
_UNNAMED = getattr(os, "O_TMPFILE", 0) if Path("/proc/self/fd").is_dir() else 0
_NO_UNNAMED = frozenset({EINVAL, EISDIR, ENOENT, ENOTSUP})
# Names of the streams of a process, which may lead to files.
_STREAMS = ("/dev/stdin", "/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")
_SPECIAL = {
    stat.S_IFDIR: "a folder", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a link in a circle",
}  # fmt: skip


def destination(path: Path) -> Path:
    """The file, there or not, that is written where a path is: the end of its links.

    Raises:
        FileError: if that is no regular file, or cannot be replaced.
    """
    if os.path.abspath(path).startswith(_STREAMS):  # noqa: PTH100, resolve() would follow it
        raise FileError(f"{path}: cannot be written: it is a stream; name a file")
    with file_error(path):
        target = Path(os.path.realpath(path))
        try:
            kind = stat.S_IFMT(target.lstat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            kind = stat.S_IFREG
        if kind != stat.S_IFREG:
            what = _SPECIAL.get(kind, "no regular file")
            leads = f"a link to {what}" if path.is_symlink() and kind != stat.S_IFLNK else what
            raise FileError(f"{path}: cannot be written: it is {leads}; name a file")
        folder = next(one for one in target.parents if one.exists())
        if not folder.is_dir():
            raise FileError(f"{path}: cannot be written: {folder} is no folder; name another one")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise FileError(
                f"{path}: cannot be written: the folder {folder} takes no files of yours; name"
                " another one"
            )
        if target.exists() and not os.access(target, os.W_OK):
            raise FileError(
                f"{path}: cannot be written: it is read-only; name another file, or make it"
                " writable"
            )
    return target


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that nobody ever sees half of it.

    Raises:
        FileError: if it cannot be written.
    """
    write_together({path: content})


def write_together(contents: Mapping[Path, bytes]) -> None:
    """Writes several files, or none if one of them cannot be written.

    Raises:
        FileError: if one cannot be written.
    """
    with writing(*contents) as files:
        for file, (path, content) in zip(files, contents.items(), strict=True):
            with file_error(path):
                file.write(content)


@contextmanager
def writing(*paths: Path) -> Iterator[tuple[BinaryIO, ...]]:
    """Files to fill. At the end of the block all of them take the places of older ones; after an
    error none does, and no folder is left that was made for them.

    Raises:
        FileError: if one cannot be written.
    """
    drafts: list[_Draft] = []
    try:
        for path in paths:
            drafts.append(_Draft(path, destination(path)))
            with file_error(path):
                drafts[-1].begin()
        yield tuple(draft.file for draft in drafts)
        for draft in drafts:  # a full disk shows here at the latest
            with file_error(draft.path):
                draft.file.flush()
        for draft in drafts:
            with file_error(draft.path):
                draft.publish()
    except BaseException:
        for draft in reversed(drafts):
            draft.discard()
        raise
    finally:
        for draft in drafts:
            draft.close()


def replace_file(target: Path, content: bytes, mode: int = 0o666) -> None:
    """Puts a file in the place of an earlier one at once. Where files can be without a name, a
    process that is killed meanwhile leaves nothing behind.

    Args:
        target: in a folder that is there; no link.
        mode: access rights of a new file, before the umask.

    Raises:
        OSError: if it cannot be written.
    """
    draft = _Draft(target, target, mode)
    try:
        draft.begin()
        draft.file.write(content)
        draft.file.flush()
        draft.publish()
    except BaseException:
        draft.discard()
        raise
    finally:
        draft.close()


@contextmanager
def file_error(path: Path) -> Iterator[None]:
    """Turns errors of the system into ours, with the path that the user gave.

    Raises:
        FileError: for each of them.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise FileError(
            f"{path}: cannot be written: {reason}; make room for it, or name another place"
        ) from None


class _Draft:
    """A file that nobody sees yet.

    Attributes:
        path: as the user gave it.
        target: where it will stand.
        mode: access rights of a new file, before the umask.
        name: its own name, where files without one cannot be; else None.
        folders: that were made for it, the innermost last.
    """

    file: BinaryIO

    def __init__(self, path: Path, target: Path, mode: int = 0o666) -> None:
        self.path, self.target, self.mode = path, target, mode
        self.name: Path | None = None
        self.folders: list[Path] = []
        self.published = False

    def begin(self) -> None:
        """Opens it, with the access rights of the file that it replaces."""
        folder = self.target.parent
        for missing in reversed([one for one in (folder, *folder.parents) if not one.exists()]):
            missing.mkdir(exist_ok=True)
            self.folders.append(missing)
        self.file = os.fdopen(self._opened(folder), "wb")
        if self.target.exists():
            mode = stat.S_IMODE(self.target.stat().st_mode)
            if mode != stat.S_IMODE(os.fstat(self.file.fileno()).st_mode):
                os.fchmod(self.file.fileno(), mode)

    def _opened(self, folder: Path) -> int:
        if _UNNAMED:
            try:
                return os.open(folder, _UNNAMED | os.O_WRONLY, self.mode)
            except OSError as error:
                if error.errno not in _NO_UNNAMED:
                    raise
        name = self._hidden()
        handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self.mode)
        self.name = name
        return handle

    def _hidden(self) -> Path:
        return self.target.parent / f".planner-{token_hex(8)}.part"

    def publish(self) -> None:
        """Puts it in place."""
        if self.name is None:
            name, handle = self._hidden(), self.file.fileno()
            # linkat() alone follows the link in /proc, and Python calls it where a folder is given.
            os.link(f"/proc/self/fd/{handle}", name, src_dir_fd=handle)
            self.name = name
        else:
            self.file.close()
        self.name.replace(self.target)
        self.published = True

    def discard(self) -> None:
        """Leaves nothing of it, unless it stands in its place already."""
        if self.published:
            return
        if self.name is not None:
            self.name.unlink(missing_ok=True)
        for folder in reversed(self.folders):
            with suppress(OSError):  # another one has put a file there
                folder.rmdir()

    def close(self) -> None:
        """Closes it; what it holds was flushed, or is given up."""
        if hasattr(self, "file"):
            with suppress(OSError):
                self.file.close()
