"""How the ranks of a launch meet, before any of them reads the model: are they of one launch?

Ranks of different strategies would wait for each other for ever, or train something else. So rank 0
compares what all ranks say of themselves and answers all of them, through the store of torchrun, or
of whoever wrote MASTER_ADDR; under `--nproc` that of rank 0, on the socket that the launcher has
bound:

    rank r   hello/r = number, facts                     a number of its own for each process;
                                                         or why it fails before this
    rank 0   answer/r/number = generation                for the latest hello of r, until
    rank r   ack/generation/r/number                     its process has seen that
    rank 0   verdict/generation = agreed, or the differences

After a restart by torchrun the store is the same, and has the hellos of processes that are dead:
those do not acknowledge. The generation, of rank 0's process, then is the prefix of everything
that these ranks write into the store: the addresses of gloo and nccl, for example.
"""

import hashlib
import json
import os
import platform
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist

from planner.artefacts.files import artefact_hash
from planner.artefacts.operator_types import registered
from planner.artefacts.plan import Plan
from planner.launcher.failures.rank import current_rank, current_status
from planner.launcher.failures.status import Phase
from planner.launcher.seating import RankFacts, rank_assignment
from planner.support.errors import LaunchError, PlannerError, Stopped
from planner.support.options import Options, declared
from planner.support.version import __version__

TIMEOUT = timedelta(minutes=30)
MEET_S = 600.0
"""Longest time in which all ranks have to come, in s."""
POLL_S, MAX_POLL_S = 0.02, 0.5
"""Shortest and longest time between two looks into the store, in s."""
STALE_S = 10.0
"""Time after which the failure of a rank is of this start, and not of the one before."""
MAX_DIFFERENCES, HASH_DIGITS = 8, 12
_AT = "planner/"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ProcessRank:
    """This process among those that torchrun started.

    Attributes:
        rank: over all hosts.
        world_size: processes over all hosts.
        local_rank: on this host.
        local_world_size: processes on this host.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def process_rank() -> ProcessRank | None:
    """This process, as torchrun wrote it into the environment; None outside it."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    if not all(name in os.environ for name in names):
        return None
    return ProcessRank(*(int(os.environ[name]) for name in names[:-1]))


@contextmanager
def peer_errors(rank: int) -> Iterator[None]:
    """Turns errors of gloo and nccl into `Stopped`: the peer has ended.

    Args:
        rank: of this process.
    """
    try:
        yield
    except RuntimeError as error:
        raise Stopped(f"rank {rank} stops because another rank has") from error


def _keep_to_this_host() -> None:
    """Lets gloo listen on the loopback interface alone if all ranks are on this host, unless
    GLOO_SOCKET_IFNAME names another one.
    """
    process = process_rank()
    if process is None or process.world_size > process.local_world_size:
        return
    names = {name for _, name in socket.if_nameindex()}
    for loopback in ("lo", "lo0"):  # Linux, macOS
        if loopback in names:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def host_key() -> str:
    """The name of this host, and the number of its last start, which differs between hosts of one
    name.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.is_file() else ''}"


def choose_device(
    name: str, process: ProcessRank, num_ranks: int, planned_types: frozenset[str]
) -> str:
    """Where this rank computes, in torch's words.

    Args:
        name: "cpu", "cuda", or "auto": the kind that the plan was made for, if there is a GPU for
            every rank of this host.
        process: this one.
        num_ranks: ranks that the strategy uses.
        planned_types: types of the plan's devices.

    Raises:
        LaunchError: if there is no such device.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    num_here = min(process.local_world_size, num_ranks)
    if name == "auto":
        name = "cuda" if num_gpus >= num_here and planned_types != {"cpu"} else "cpu"
    if name == "cpu":
        return "cpu"
    if name != "cuda":
        raise LaunchError(f"--device: expected auto, cpu or cuda, got {name!r}")
    if num_gpus < num_here:
        raise LaunchError(
            f"--device cuda: {num_here} ranks on this host need a GPU each, torch finds "
            f"{num_gpus}; use --device cpu or fewer ranks per host"
        )
    return f"cuda:{process.local_rank}"


# ------------------------------------------------------------------------------------ the store


class Store(Protocol):
    """Keys and values that all ranks share: torch's stores."""

    def set(self, key: str, value: str, /) -> object:
        """Writes a value."""

    def get(self, key: str, /) -> bytes:
        """Waits for a value."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all of some keys have a value."""

    def wait(self, keys: list[str], limit: timedelta, /) -> object:
        """Waits until all of some keys have a value."""


_store: Store | None = None
_generation = ""
"""Begin of the keys that the ranks of this start write, once they have agreed on one."""


def common_store() -> Store:
    """The store.

    Raises:
        RuntimeError: if it cannot be reached.
    """
    global _store
    if _store is None:
        rank = current_rank()
        if rank is not None and rank.listener is not None:
            _store = dist.TCPStore(  # type: ignore[attr-defined]
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=True,
                timeout=TIMEOUT,
                wait_for_workers=False,
                master_listen_fd=rank.listener,
            )
        else:
            places = dist.rendezvous("env://", timeout=TIMEOUT)  # type: ignore[attr-defined]
            _store, _, _ = next(places)
    assert _store is not None
    return _store


def begin_generation(name: str) -> None:
    """From now on, the process groups of these ranks are made under a name of their own."""
    global _generation
    _generation = name


def generation() -> str:
    """The name of this start of all ranks; "" before they have agreed on one."""
    return _generation


def join_group(rank: int, num_ranks: int) -> None:
    """Joins the other ranks in the default group, which is gloo's.

    Args:
        rank: of this process.
        num_ranks: ranks of the group.

    Raises:
        RuntimeError: if the others cannot be reached.
    """
    _keep_to_this_host()
    current_status().enter(Phase.MEETING)
    store = dist.PrefixStore(  # type: ignore[attr-defined]
        f"groups/{_generation}", cast(Any, common_store())
    )
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks, timeout=TIMEOUT, store=store)


def gathered(value: T) -> list[T]:
    """The values of all ranks of the default group, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _put(store: Store, key: str, value: object) -> None:
    store.set(_AT + key, json.dumps(value))


def _peek(store: Store, key: str) -> Any:
    """A value, if it is there."""
    return json.loads(store.get(_AT + key)) if store.check([_AT + key]) else None


def _wait_for(store: Store, key: str) -> Any:
    """A value, once it is there."""
    store.wait([_AT + key], timedelta(seconds=MEET_S))
    return json.loads(store.get(_AT + key))


# -------------------------------------------------------------------------------- the handshake


@dataclass(frozen=True, slots=True)
class LaunchAgreement:
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


Assignment = Callable[[Sequence[RankFacts]], tuple[int, ...]]


def meet_others(plan: Plan, options: Sequence[Options], process: ProcessRank) -> LaunchAgreement:
    """The handshake of all ranks; alone, there is nothing to agree on.

    Args:
        options: of the training; ranks may differ only in those that are declared so.

    Raises:
        LaunchError: if the ranks are not of one launch.
        Stopped: if another rank has ended.
    """
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if process.world_size == 1:
        return LaunchAgreement("", restarted=restarts > 0, ranks=plan.ranks)
    several_hosts = process.world_size > process.local_world_size
    mine = RankFacts(
        values=_values(plan, options, several_hosts=several_hosts),
        host=host_key(),
        first=process.rank - process.local_rank,
        restarts=restarts,
    )
    _keep_to_this_host()
    with peer_errors(process.rank):
        agreed = shake_hands(
            common_store(), process.rank, process.world_size, mine, partial(rank_assignment, plan)
        )
    begin_generation(agreed.generation)
    return agreed


def shake_hands(
    store: Store, rank: int, world_size: int, mine: RankFacts, assignment: Assignment
) -> LaunchAgreement:
    """Compares all ranks; every rank calls it.

    Args:
        store: of all ranks.
        rank: of this process.
        world_size: number of ranks, those that idle too.
        mine: this rank's.
        assignment: gives the device of each rank from the facts of all; rank 0 calls it. It raises
            a `LaunchError` if there is no such order.

    Raises:
        LaunchError: on all ranks, if they differ, or if one fails or does not come.
    """
    current_status().enter(Phase.MEETING)
    if rank > 0:
        number = uuid.uuid4().hex
        _put(store, f"hello/{rank}", {"number": number, "facts": asdict(mine)})
        begun = _answer(store, rank, number)
        _put(store, f"ack/{begun}/{rank}/{number}", True)
    else:
        begun = uuid.uuid4().hex
        verdict = _verdict(store, world_size, begun, mine, assignment)
        _put(store, f"verdict/{begun}", verdict)
    verdict = _wait_for(store, f"verdict/{begun}")
    if "refused" in verdict:
        raise LaunchError(verdict["refused"])
    hosts = {int(first): name for first, name in verdict["hosts"].items()}
    return LaunchAgreement(begun, verdict["restarted"], tuple(verdict["ranks"]), hosts)


def _answer(store: Store, rank: int, number: str) -> str:
    """The generation, once rank 0 has answered.

    Raises:
        LaunchError: if rank 0 fails before it does, or does not come.
    """
    failures, begun_s = _Failures(store), time.monotonic()
    while (begun := _peek(store, f"answer/{rank}/{number}")) is None:
        failures.check(0)
        waited_s = time.monotonic() - begun_s
        if waited_s > MEET_S:
            raise LaunchError(_absent({0}))
        # The longer a rank has waited, the less a moment more matters; the store answers many.
        time.sleep(min(max(waited_s / 50, POLL_S), MAX_POLL_S))
    return str(begun)


def _verdict(
    store: Store, world_size: int, begun: str, mine: RankFacts, assignment: Assignment
) -> dict[str, Any]:
    """Rank 0's answer to all."""
    try:
        facts = [mine, *_gathered(store, world_size, begun)]
        if found := differences(facts):
            return {"refused": _refusal(found)}
        ranks = assignment(facts)
    except LaunchError as error:
        return {"refused": str(error)}
    hosts = {one.first: one.host.split()[0] for one in facts}
    return {"restarted": any(one.restarts for one in facts), "ranks": ranks, "hosts": hosts}


def _gathered(store: Store, world_size: int, begun: str) -> list[RankFacts]:
    """The facts of the living processes of all other ranks."""
    facts: dict[int, RankFacts] = {}
    failures = _Failures(store)
    begun_s = time.monotonic()
    while len(facts) < world_size - 1:
        for rank in {*range(1, world_size)} - facts.keys():
            hello = _peek(store, f"hello/{rank}")
            if hello is None or failures.check(rank):
                continue
            _put(store, f"answer/{rank}/{hello['number']}", begun)
            if _peek(store, f"ack/{begun}/{rank}/{hello['number']}"):
                facts[rank] = RankFacts(**hello["facts"])
        if time.monotonic() - begun_s > MEET_S:
            raise LaunchError(_absent({*range(1, world_size)} - facts.keys()))
        time.sleep(POLL_S)
    return [facts[rank] for rank in sorted(facts)]


def _absent(ranks: set[int]) -> str:
    names = ", ".join(map(str, sorted(ranks)[:MAX_DIFFERENCES]))
    return (
        f"after {MEET_S:.0f} s, {len(ranks)} ranks have not come, such as {names}; look at what "
        "they print, and whether their hosts reach the address MASTER_ADDR"
    )


@contextmanager
def failure_reported(process: ProcessRank | None) -> Iterator[None]:
    """Tells the ranks of other hosts of an error before the handshake. On one host the ranks'
    parent sees to it; the agents of several hosts know nothing of each other.
    """
    try:
        yield
    except PlannerError as error:
        several_hosts = process is not None and process.world_size > process.local_world_size
        if several_hosts and not isinstance(error, Stopped):
            assert process is not None
            with suppress(RuntimeError):  # the store's host has ended
                report_failure(common_store(), process.rank, str(error))
        raise


def report_failure(store: Store, rank: int, message: str) -> None:
    """Tells the others that a rank ends before it shakes hands: rank 0, or all if it is rank 0."""
    _put(store, f"hello/{rank}", {"number": uuid.uuid4().hex, "failed": message})


class _Failures:
    """Ranks that have ended before they could shake hands."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._since_s: dict[str, float] = {}

    def check(self, rank: int) -> bool:
        """Whether the last process of a rank has failed, perhaps before a restart.

        Raises:
            LaunchError: if no other process has come instead for a while.
        """
        hello = _peek(self._store, f"hello/{rank}")
        if hello is None or "failed" not in hello:
            return False
        now_s = time.monotonic()
        if now_s - self._since_s.setdefault(hello["number"], now_s) > STALE_S:
            raise LaunchError(f"rank {rank} has failed: {hello['failed']}")
        return True


# -------------------------------------------------------------------------------- what is compared


def compare_ranks(process: ProcessRank, num_ranks: int, values: Mapping[str, str]) -> None:
    """Compares more values, once the ranks with a device know them. They have no connections yet:
    these depend on the kind of device that all of them use.

    Raises:
        LaunchError: on all ranks, if they differ.
        Stopped: if another rank has ended.
    """
    if num_ranks > 1:
        with peer_errors(process.rank):
            agree(common_store(), generation(), process.rank, num_ranks, values)


def agree(store: Store, begun: str, rank: int, num_ranks: int, values: Mapping[str, str]) -> None:
    """Compares values of ranks; all of them call it.

    Args:
        begun: name of this start of all ranks.

    Raises:
        LaunchError: on all ranks, if they differ.
    """
    key = f"{begun}/more"
    _put(store, f"{key}/{rank}", dict(values))
    if rank == 0:
        found = [RankFacts(_wait_for(store, f"{key}/{r}"), "") for r in range(num_ranks)]
        _put(store, key, differences(found))
    if lines := _wait_for(store, key):
        raise LaunchError(_refusal(lines))


def differences(facts: Sequence[RankFacts]) -> list[str]:
    """What differs from rank 0's, a line for each rank and value.

    >>> differences([RankFacts({"torch": "2.9"}, "a 1"), RankFacts({"torch": "2.8"}, "b 2")])
    ["torch: rank 0 has '2.9', rank 1 on b has '2.8'"]
    """
    first, found = facts[0].values, []
    for rank, one in enumerate(facts):
        place = f" on {one.host.split()[0]}" if one.host else ""
        for name in sorted({*first, *one.values}):
            own, other = first.get(name), one.values.get(name)
            if own != other:
                found.append(f"{name}: rank 0 has {own!r}, rank {rank}{place} has {other!r}")
    return found


def _refusal(found: Sequence[str]) -> str:
    shown = [f"\n  {line}" for line in found[:MAX_DIFFERENCES]]
    more = len(found) - MAX_DIFFERENCES
    shown += [f"\n  and {more} more"] if more > 0 else []
    return (
        "the ranks do not run the same; start all with the same files, options and versions:"
        f"{''.join(shown)}"
    )


def _values(plan: Plan, options: Sequence[Options], *, several_hosts: bool) -> dict[str, str]:
    values = {
        "strategy": artefact_hash(plan)[:HASH_DIGITS],
        "planner": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "operators": _own_operators(),
    }
    for chosen in options:
        for name, one in declared(type(chosen)).items():
            if not one.per_rank:
                values[f"option {name}"] = _text(getattr(chosen, name))
    if several_hosts:
        values["planner's files"] = _own_files()
    return values


def _text(value: object) -> str:
    """A value in words that are the same on all ranks; of functions and datasets the name."""
    if callable(value):
        return f"{value.__module__}:{getattr(value, '__qualname__', type(value).__name__)}"
    if isinstance(value, Mapping):
        return str(dict(sorted(value.items())))
    plain = isinstance(value, str | int | float | bool | tuple | None | Path)
    return str(value) if plain else type(value).__name__


def _own_operators() -> str:
    """The user's operators, and hashes of what computes them."""
    return ", ".join(f"{kind} {_hash(source)}" for kind, source in registered().items())


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:HASH_DIGITS]


def _own_files() -> str:
    """A hash of the planner's sources."""
    folder = Path(__file__).resolve().parents[1]
    files = sorted(folder.rglob("*.py"))
    return _hash(b"".join(
        file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes() for file in files
    ))  # fmt: skip
