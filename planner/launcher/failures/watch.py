"""When a rank hangs: it is stopped, it stands in one action for too long, or all ranks wait.

Times are those that the watcher itself has seen pass, look after look. If the whole machine sleeps,
so does the watcher, and nothing has hung.

    stopped   by SIGSTOP for STOPPED_S, in whatever action.
    stands    in an action of its own for longer than T = --hang-timeout and KNOWN times the longest
              such action before, or FIRST * T if there was none: compilers, connections, caches.
              While it waits for other ranks, these are to blame. In data, evaluation and
              checkpoints, time counts in which its processes compute nothing; FIRST times that
              long it may compute.
    together  all ranks wait for each other, for the same times.

What is known of processes is what Linux says; elsewhere the answers are None.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from planner.launcher.failures.status import (
    USERS,
    WAITING,
    CurrentAction,
    Phase,
    Status,
    StatusFile,
    who,
)
from planner.support.units import format_seconds

STOPPED_S = 20.0
"""Time after which a rank hangs that a signal has stopped, in s."""
KNOWN = 10
"""An action may take that many times the longest one of its kind before."""
FIRST = 30
"""The first action of its kind may take that many times --hang-timeout."""
IDLE = 0.02
"""Share of a core below which processes are idle."""
MAX_LOOK_S = 2.0
"""Longest time between two looks that counts, in s: it was the watcher that slept."""

_PROC = Path("/proc")
_STOPPED = "T"  # by SIGSTOP or SIGTSTP; a debugger's "t" is none of it


def _fields(process: int) -> list[str]:
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
    fields = _fields(process)
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
    fields = _fields(process)
    if not fields:
        return None
    group, ticks = fields[2], 0
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            own = _fields(int(folder.name))
            if own and own[2] == group:
                ticks += int(own[11]) + int(own[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Hang:
    """Ranks that have to be ended.

    Attributes:
        ranks: ascending.
        message: for the user.
    """

    ranks: tuple[int, ...]
    message: str


@dataclass(slots=True)
class _Seen:
    """What has been seen of one rank; times in s."""

    action: CurrentAction
    computed_s: float | None = None
    stands_s: float = 0.0
    idle_s: float = 0.0
    stopped_s: float = 0.0


@dataclass(slots=True)
class HangDetector:
    """Looks at the status of ranks, again and again.

    Attributes:
        files: by rank.
        world_size: ranks over all hosts.
        lives: tells of a process whether it is there.
        stopped: tells of a process whether a signal has stopped it.
        computed: CPU time of a process and its group, in s.
    """

    files: Mapping[int, StatusFile]
    world_size: int
    lives: Callable[[int], bool] = lives
    stopped: Callable[[int], bool | None] = is_stopped
    computed: Callable[[int], float | None] = computed_s
    _seen: dict[int, _Seen] = field(default_factory=dict)
    _looked_s: float | None = None

    def look(self, now_s: float) -> Hang | None:
        """Looks at all ranks.

        Args:
            now_s: on any clock.

        Returns:
            The first hang, if there is one.
        """
        passed_s = 0.0 if self._looked_s is None else min(now_s - self._looked_s, MAX_LOOK_S)
        self._looked_s = now_s
        # Each file is read once, so that all is judged by the same moment.
        statuses = {rank: file.look() for rank, file in sorted(self.files.items())}
        for rank, status in statuses.items():
            self._note(rank, status, passed_s)
        working = {
            rank: status for rank, status in statuses.items()
            if status.action.phase is not Phase.ENDED
        }  # fmt: skip
        watched = {
            rank: status for rank, status in working.items()
            if status.hang_timeout_s > 0 and self.lives(status.process)
        }  # fmt: skip
        all_are_watched = len(statuses) >= self.world_size and len(watched) == len(working)
        return self._alone(watched) or (self._together(watched) if all_are_watched else None)

    def _note(self, rank: int, status: Status, passed_s: float) -> None:
        seen = self._seen.get(rank)
        if seen is None:
            self._seen[rank] = _Seen(status.action)
            return
        idle_s = self._idle_s(seen, status, passed_s)
        if seen.action == status.action:
            seen.stands_s += passed_s
            seen.idle_s += idle_s
        else:
            seen.action, seen.stands_s, seen.idle_s = status.action, 0.0, 0.0
        is_stopped = status.process and self.stopped(status.process)
        seen.stopped_s = seen.stopped_s + passed_s if is_stopped else 0.0

    def _idle_s(self, seen: _Seen, status: Status, passed_s: float) -> float:
        """The part of a time in which the rank's processes have not computed; they are asked only
        where it matters, because all processes of the host have to be looked through.
        """
        if status.action.phase not in USERS or seen.stands_s <= MAX_LOOK_S or not status.process:
            seen.computed_s = None
            return 0.0
        before, seen.computed_s = seen.computed_s, self.computed(status.process)
        if seen.computed_s is None:  # nothing is known: time passes
            return passed_s
        if before is None:
            return 0.0
        return passed_s if seen.computed_s - before <= IDLE * passed_s else 0.0

    def _alone(self, watched: Mapping[int, Status]) -> Hang | None:
        """The first rank that hangs whatever the others do."""
        for rank, status in watched.items():
            why = self._stop(rank, status) or self._standing(rank, status)
            if why is not None:
                return Hang((rank,), f"{who(rank, status)} hangs: {why}")
        return None

    def _stop(self, rank: int, status: Status) -> str | None:
        stopped_s = self._seen[rank].stopped_s
        if stopped_s < STOPPED_S:
            return None
        return (
            f"it has given no sign of life for {stopped_s:.0f} s, {status.action}; process "
            f"{status.process} was stopped by a signal"
        )

    def _standing(self, rank: int, status: Status) -> str | None:
        seen, phase = self._seen[rank], status.action.phase
        if phase in WAITING:
            return None
        limit_s = limit(status)
        if phase not in USERS:
            return _too_long(seen.stands_s, status) if seen.stands_s > limit_s else None
        if seen.idle_s > limit_s:
            return _too_long(seen.stands_s, status, ", and its processes compute nothing")
        if seen.stands_s > max(FIRST * status.hang_timeout_s, limit_s):
            return _too_long(seen.stands_s, status)
        return None

    def _together(self, watched: Mapping[int, Status]) -> Hang | None:
        """Whether all ranks wait for each other."""
        if len(watched) < 2:
            return None
        for rank, status in watched.items():
            if status.action.phase not in WAITING or self._seen[rank].stands_s <= limit(status):
                return None
        lines = "".join(f"\n  {who(rank, one)}: {one.action}" for rank, one in watched.items())
        stands_s = min(self._seen[rank].stands_s for rank in watched)
        return Hang(
            tuple(sorted(watched)), f"all ranks wait for each other for {stands_s:.0f} s:{lines}"
        )


def limit(status: Status) -> float:
    """The longest time that a rank may stand in its action, in s."""
    known_s, timeout_s = status.action.longest_s, status.hang_timeout_s
    return max(timeout_s, KNOWN * known_s) if known_s else FIRST * timeout_s


def _too_long(stands_s: float, status: Status, more: str = "") -> str:
    known_s = status.action.longest_s
    before = f"took at most {format_seconds(known_s)} before" if known_s else "was none before"
    return (
        f"it has stood for {stands_s:.0f} s {status.action}; such an action {before}{more}; if"
        f" that is right, give more time with --hang-timeout (now {status.hang_timeout_s:g})"
    )
