"""The handshake of the ranks, before any of them reads the model: are they of one launch?

Ranks of different strategies would wait for each other for ever, or train something else. So rank 0
compares what all ranks say of themselves and answers all of them, through torchrun's store:

    rank r   hello/r = number, values                    a number of its own for each process
    rank 0   answer/r/number = generation                for the latest hello of r, until
    rank r   ack/generation/r/number                     its process has seen that
    rank 0   verdict/generation = agreed, or the differences

After a restart by torchrun the store is the same, and has the hellos of processes that are dead:
those do not acknowledge. The generation, of rank 0's process, then is the prefix of everything
that these ranks write into the store: the addresses of gloo and nccl, for example.
"""

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from planner.launcher import ending
from planner.launcher.failures.page import Phase
from planner.launcher.store import Store
from planner.support.errors import LaunchError

MEET_S = 600.0
"""Longest time in which all ranks have to come, in s."""
POLL_S = 0.02
STALE_S = 10.0
"""Time after which the last words of a rank are those of this start, and not of the one before."""
MAX_DIFFERENCES = 8
_AT = "planner/"


@dataclass(frozen=True, slots=True)
class Hello:
    """What a rank says of itself.

    Attributes:
        values: by name; those of all ranks have to be equal.
        host: the name of its host, and what tells it from others of that name.
        first: the first rank of its host, or of torchrun's agent.
        restarts: how often torchrun has started it again.
    """

    values: dict[str, str]
    host: str
    first: int = 0
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Agreement:
    """What the ranks agree on.

    Attributes:
        generation: a name of this start of all ranks.
        restarted: whether torchrun has started them again.
        ranks: device of each rank.
        hosts: names of the hosts by their first rank.
    """

    generation: str
    restarted: bool
    ranks: tuple[int, ...]
    hosts: dict[int, str] = field(default_factory=dict)


Seating = Callable[[Sequence[Hello]], tuple[int, ...]]


def shake_hands(
    store: Store, rank: int, world_size: int, mine: Hello, seating: Seating
) -> Agreement:
    """Compares all ranks; every rank calls it.

    Args:
        store: of all ranks.
        rank: of this process.
        world_size: number of ranks, those that idle too.
        mine: this rank's.
        seating: gives the device of each rank from all hellos; rank 0 calls it. It raises a
            `LaunchError` if there is no such order.

    Raises:
        LaunchError: on all ranks, if they differ, or if one does not come.
    """
    ending.page().enter(Phase.MEETING)
    number = uuid.uuid4().hex
    if rank > 0:
        _say(store, f"hello/{rank}", {"number": number, "hello": asdict(mine)})
        generation = str(_heard(store, f"answer/{rank}/{number}"))
        _say(store, f"ack/{generation}/{rank}/{number}", True)
    else:
        generation = number
        _say(store, f"verdict/{generation}", _verdict(store, world_size, generation, mine, seating))
    verdict = _heard(store, f"verdict/{generation}")
    if "refused" in verdict:
        raise LaunchError(verdict["refused"])
    hosts = {int(first): name for first, name in verdict["hosts"].items()}
    return Agreement(generation, verdict["restarted"], tuple(verdict["ranks"]), hosts)


def say_failed(store: Store, rank: int, message: str) -> None:
    """Tells rank 0 that a rank ends before it shakes hands."""
    _say(store, f"hello/{rank}", {"number": uuid.uuid4().hex, "failed": message})


def agree(
    store: Store, generation: str, rank: int, num_ranks: int, values: Mapping[str, str]
) -> None:
    """Compares more values, after the handshake; every rank that has a device calls it.

    Raises:
        LaunchError: on all ranks, if they differ.
    """
    key = f"{generation}/more"
    _say(store, f"{key}/{rank}", dict(values))
    if rank == 0:
        found = [_heard(store, f"{key}/{r}") for r in range(num_ranks)]
        _say(store, key, differences([Hello(one, "") for one in found]))
    found = _heard(store, key)
    if found:
        raise LaunchError(_refusal(found))


def differences(hellos: Sequence[Hello]) -> list[str]:
    """What differs from rank 0's, a line for each rank and value.

    >>> differences([Hello({"torch": "2.9"}, "a 1"), Hello({"torch": "2.8"}, "b 2")])
    ["torch: rank 0 has '2.9', rank 1 on b has '2.8'"]
    """
    first, found = hellos[0].values, []
    for rank, hello in enumerate(hellos):
        place = f" on {hello.host.split()[0]}" if hello.host else ""
        for name in sorted({*first, *hello.values}):
            own, other = first.get(name), hello.values.get(name)
            if own != other:
                found.append(f"{name}: rank 0 has {own!r}, rank {rank}{place} has {other!r}")
    return found


def _verdict(
    store: Store, world_size: int, generation: str, mine: Hello, seating: Seating
) -> dict[str, Any]:
    """Rank 0's answer to all."""
    try:
        hellos = [mine, *_gathered(store, world_size, generation)]
        if found := differences(hellos):
            return {"refused": _refusal(found)}
        ranks = seating(hellos)
    except LaunchError as error:
        return {"refused": str(error)}
    hosts = {one.first: one.host.split()[0] for one in hellos}
    return {"restarted": any(one.restarts for one in hellos), "ranks": ranks, "hosts": hosts}


def _refusal(found: Sequence[str]) -> str:
    shown = [f"\n  {line}" for line in found[:MAX_DIFFERENCES]]
    more = len(found) - MAX_DIFFERENCES
    shown += [f"\n  and {more} more"] if more > 0 else []
    return (
        "the ranks do not run the same; start all with the same files, options and versions:"
        f"{''.join(shown)}"
    )


def _gathered(store: Store, world_size: int, generation: str) -> list[Hello]:
    """The hellos of the living processes of all other ranks."""
    hellos: dict[int, Hello] = {}
    failed_since: dict[str, float] = {}
    begun_s = time.monotonic()
    while len(hellos) < world_size - 1:
        for rank in {*range(1, world_size)} - hellos.keys():
            said = _said(store, f"hello/{rank}")
            if said is None:
                continue
            if "failed" in said:
                since_s = failed_since.setdefault(said["number"], time.monotonic())
                if time.monotonic() - since_s > STALE_S:
                    raise LaunchError(f"rank {rank} has failed: {said['failed']}")
                continue
            _say(store, f"answer/{rank}/{said['number']}", generation)
            if _said(store, f"ack/{generation}/{rank}/{said['number']}"):
                hellos[rank] = Hello(**said["hello"])
        if time.monotonic() - begun_s > MEET_S:
            raise LaunchError(_absent({*range(1, world_size)} - hellos.keys()))
        time.sleep(POLL_S)
    return [hellos[rank] for rank in sorted(hellos)]


def _absent(ranks: set[int]) -> str:
    names = ", ".join(map(str, sorted(ranks)[:MAX_DIFFERENCES]))
    return (
        f"after {MEET_S:.0f} s, {len(ranks)} ranks have not come, such as {names}; look at what "
        "they print, and whether their hosts reach the address MASTER_ADDR"
    )


def _say(store: Store, key: str, value: object) -> None:
    store.set(_AT + key, json.dumps(value))


def _said(store: Store, key: str) -> Any:
    """A value, if it is there."""
    return json.loads(store.get(_AT + key)) if store.check([_AT + key]) else None


def _heard(store: Store, key: str) -> Any:
    """A value, once it is there."""
    store.wait([_AT + key], timedelta(seconds=MEET_S))
    return json.loads(store.get(_AT + key))
