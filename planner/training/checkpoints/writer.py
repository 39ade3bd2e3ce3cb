"""`FolderLock`: one training at a time writes checkpoints into a folder.

    DIR/.writer    who writes; rank 0 of that training holds a lock on it

The system releases a lock with the process that holds it, so a file that a killed training has left
stops nobody. NFS of version 4 has locks between hosts, Lustre has them if it is mounted with flock.
A file system without locks is written to as it is.
"""

import os
import socket
import time
from pathlib import Path

from planner.support.errors import FileError
from planner.support.writing import file_error

WRITER = ".writer"
_MAX_BYTES = 512


class FolderLock:
    """Keeps other trainings out of a folder, which is made if it is not there.

    Args:
        folder: for checkpoints.

    Raises:
        FileError: if another training writes there, or the folder cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / WRITER
        with file_error(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._locked()
            os.ftruncate(self._file, 0)
            started = time.strftime("%Y-%m-%d %H:%M:%S")
            text = f"process {os.getpid()} on host {socket.gethostname()} since {started}"
            os.pwrite(self._file, text.encode(), 0)

    def _locked(self) -> int:
        """The descriptor of the file, with the lock."""
        import fcntl  # not on Windows

        while True:
            file = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o644)
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                owner = os.read(file, _MAX_BYTES).decode(errors="replace") or "another process"
                os.close(file)
                raise FileError(
                    f"{self._path.parent}: {owner} writes checkpoints there; name another folder,"
                    " or end that training first"
                ) from None
            except OSError:  # a file system without locks
                return file
            if self._is_there(file):
                return file
            os.close(file)  # its owner has removed it meanwhile

    def _is_there(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), self._path.stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Lets other trainings in."""
        self._path.unlink(missing_ok=True)
        os.close(self._file)
