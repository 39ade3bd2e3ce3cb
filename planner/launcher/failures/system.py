"""What the system knows of a process. Only Linux is asked; elsewhere the answers are None."""

import os
import socket
from pathlib import Path

_PROC = Path("/proc")
_STOPPED = "T"  # by SIGSTOP or SIGTSTP; a debugger's "t" is none of it


def _status(process: int) -> list[str]:
    """The fields of /proc/N/stat behind the name, from the state on; none if it is not there."""
    try:
        text = (_PROC / str(process) / "stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def lives(process: int) -> bool:
    """Whether there is a process of that number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def is_stopped(process: int) -> bool | None:
    """Whether a process is stopped by a signal; None where that is not known."""
    fields = _status(process)
    return fields[0] == _STOPPED if fields else None


def used_bytes(process: int) -> int | None:
    """Memory that a process uses now, in bytes; None where that is not known."""
    try:
        pages = (_PROC / str(process) / "statm").read_text().split()[1]
    except (OSError, IndexError):
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def computed_s(process: int) -> float | None:
    """CPU time of a process and all others of its group, in s; None where that is not known."""
    fields = _status(process)
    if not fields:
        return None
    group, ticks = fields[2], 0
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            own = _status(int(folder.name))
            if own and own[2] == group:
                ticks += int(own[11]) + int(own[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def host_key() -> str:
    """The name of this host, and the number of its last start, which differs between hosts of one
    name.
    """
    boot = _PROC / "sys/kernel/random/boot_id"
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.is_file() else ''}"
