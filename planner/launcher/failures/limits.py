"""When a rank hangs: it is stopped, it is silent, or it stands in one action for too long.

Times are those that the watcher itself has seen pass, look after look. If the whole machine sleeps,
so does the watcher, and nothing has hung.

    stopped   by SIGSTOP for SILENT_S.
    silent    its thread has not beaten for SILENT_S, and its processes compute nothing. (Code that
              computes long without letting Python's other threads run is silent, and no hang.)
    stands    in an action of its own for longer than T = --hang-timeout and KNOWN times the longest
              such action before, or FIRST * T if there was none: compilers, connections, caches.
              While it waits for other ranks, these are to blame. In data, evaluation and
              checkpoints, time counts in which its processes compute nothing; FIRST times that
              long it may compute.
    together  all ranks wait for each other, for the same times.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from planner.launcher.failures import system
from planner.launcher.failures.page import USERS, WAITING, Doing, Glance, Page, Phase
from planner.launcher.failures.words import who
from planner.support.units import format_seconds

SILENT_S = 12.0
"""Time without a sign of life after which a rank hangs, in s."""
KNOWN = 10
"""An action may take that many times the longest one of its kind before."""
FIRST = 30
"""The first action of its kind may take that many times --hang-timeout."""
IDLE = 0.02
"""Share of a core below which processes are idle."""
MAX_LOOK_S = 2.0
"""Longest time between two looks that counts, in s: it was the watcher that slept."""


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
    """What a watcher has seen of one rank; times in s."""

    doing: Doing
    beats: int
    computed_s: float | None = None
    stands_s: float = 0.0
    idle_s: float = 0.0
    silent_s: float = 0.0
    silent_idle_s: float = 0.0


@dataclass(slots=True)
class Watch:
    """Looks at the pages of ranks, again and again.

    Attributes:
        pages: by rank.
        world_size: ranks over all hosts.
        lives: tells of a process whether it is there.
        stopped: tells of a process whether a signal has stopped it.
        computed: CPU time of a process and its children, in s.
    """

    pages: Mapping[int, Page]
    world_size: int
    lives: Callable[[int], bool] = system.lives
    stopped: Callable[[int], bool | None] = system.is_stopped
    computed: Callable[[int], float | None] = system.computed_s
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
        glances = {rank: page.look() for rank, page in self.pages.items()}
        for rank, glance in glances.items():
            self._note(rank, glance, passed_s)
        watched = {
            rank: one for rank, one in glances.items()
            if one.hang_timeout_s > 0
            and one.doing.phase is not Phase.ENDED
            and self.lives(one.process)
        }  # fmt: skip
        for rank, glance in watched.items():
            why = self._silence(rank, glance) or self._standing(rank, glance)
            if why is not None:
                return Hang((rank,), f"{who(rank, glance)} hangs: {why}")
        return self._together(watched)

    def _note(self, rank: int, glance: Glance, passed_s: float) -> None:
        seen = self._seen.get(rank)
        if seen is None:
            self._seen[rank] = _Seen(glance.doing, glance.beats)
            return
        idle_s = self._idle_s(seen, glance, passed_s)
        if seen.doing == glance.doing:
            seen.stands_s += passed_s
            seen.idle_s += idle_s
        else:
            seen.doing, seen.stands_s, seen.idle_s = glance.doing, 0.0, 0.0
        if glance.beats != seen.beats:
            seen.beats, seen.silent_s, seen.silent_idle_s = glance.beats, 0.0, 0.0
        else:
            seen.silent_s += passed_s
            seen.silent_idle_s += idle_s

    def _idle_s(self, seen: _Seen, glance: Glance, passed_s: float) -> float:
        """The part of a time in which the rank's processes have not computed; they are asked only
        where it matters, because all processes of the host have to be looked through.
        """
        quiet = glance.beats == seen.beats and seen.silent_s > MAX_LOOK_S
        waits_long = glance.doing.phase in USERS and seen.stands_s > MAX_LOOK_S
        if not (quiet or waits_long) or not glance.process:
            seen.computed_s = None
            return 0.0
        before, seen.computed_s = seen.computed_s, self.computed(glance.process)
        if seen.computed_s is None:  # nothing is known: time passes
            return passed_s
        if before is None:
            return 0.0
        return passed_s if seen.computed_s - before <= IDLE * passed_s else 0.0

    def _silence(self, rank: int, glance: Glance) -> str | None:
        seen = self._seen[rank]
        if seen.silent_s < SILENT_S:
            return None
        silent = f"it has given no sign of life for {seen.silent_s:.0f} s, {glance.doing}"
        if self.stopped(glance.process):
            return f"{silent}; process {glance.process} was stopped by a signal"
        if seen.silent_idle_s >= SILENT_S - 2 * MAX_LOOK_S:
            return f"{silent}; process {glance.process} computes nothing"
        return None

    def _standing(self, rank: int, glance: Glance) -> str | None:
        seen, doing = self._seen[rank], glance.doing
        if doing.phase in WAITING:
            return None
        limit_s = limit(glance)
        if doing.phase not in USERS:
            return _too_long(seen.stands_s, glance) if seen.stands_s > limit_s else None
        if seen.idle_s > limit_s:
            return _too_long(seen.stands_s, glance, ", and its processes compute nothing")
        if seen.stands_s > max(FIRST * glance.hang_timeout_s, limit_s):
            return _too_long(seen.stands_s, glance)
        return None

    def _together(self, watched: Mapping[int, Glance]) -> Hang | None:
        """Whether all ranks wait for each other."""
        active = [r for r, page in self.pages.items() if page.look().doing.phase is not Phase.ENDED]
        if len(self.pages) < self.world_size or len(watched) < max(len(active), 2):
            return None
        for rank, glance in watched.items():
            if glance.doing.phase not in WAITING or self._seen[rank].stands_s <= limit(glance):
                return None
        lines = "".join(f"\n  {who(rank, one)}: {one.doing}" for rank, one in watched.items())
        stands_s = min(self._seen[rank].stands_s for rank in watched)
        return Hang(
            tuple(sorted(watched)), f"all ranks wait for each other for {stands_s:.0f} s:{lines}"
        )


def limit(glance: Glance) -> float:
    """The longest time that a rank may stand in its action, in s."""
    known, timeout_s = glance.doing.longest_s, glance.hang_timeout_s
    return max(timeout_s, KNOWN * known) if known else FIRST * timeout_s


def _too_long(stands_s: float, glance: Glance, more: str = "") -> str:
    known_s = glance.doing.longest_s
    before = f"took at most {format_seconds(known_s)} before" if known_s else "was none before"
    return (
        f"it has stood for {stands_s:.0f} s {glance.doing}; such an action {before}{more}; if that "
        f"is right, give more time with --hang-timeout (now {glance.hang_timeout_s:g})"
    )
