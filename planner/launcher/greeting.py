"""What a rank says of itself in the handshake, and how it tells the others that it has failed."""

import hashlib
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch

from planner.artefacts.files import artefact_hash
from planner.artefacts.plan import Plan
from planner.launcher.failures.system import host_key
from planner.launcher.handshake import Agreement, Hello, agree, say_failed, shake_hands
from planner.launcher.job import TrainingJob
from planner.launcher.rendezvous import ProcessRank, keep_to_this_host, peer_errors
from planner.launcher.seats import seating
from planner.launcher.store import begin_generation, common_store, generation
from planner.support.errors import PlannerError, Stopped
from planner.support.options import Options, declared
from planner.support.version import __version__

HASH_DIGITS = 12


def meet_others(plan: Plan, options: Sequence[Options], seat: ProcessRank) -> Agreement:
    """The handshake of all ranks; alone, there is nothing to agree on.

    Args:
        options: of the training; ranks may differ only in those that are declared so.

    Raises:
        LaunchError: if the ranks are not of one launch.
        Stopped: if another rank has ended.
    """
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if seat.world_size == 1:
        return Agreement("", restarted=restarts > 0, ranks=plan.ranks)
    several = seat.world_size > seat.local_world_size
    mine = Hello(
        values=_values(plan, options, several_hosts=several),
        host=host_key(),
        first=seat.rank - seat.local_rank,
        restarts=restarts,
    )
    keep_to_this_host()
    with peer_errors(seat.rank):
        store = common_store(seat.rank, seat.world_size)
        agreed = shake_hands(store, seat.rank, seat.world_size, mine, partial(seating, plan))
    begin_generation(agreed.generation)
    return agreed


def compare_jobs(job: TrainingJob, seat: ProcessRank, start: str) -> None:
    """Compares what the ranks with a device know once they have read the model.

    Args:
        start: name of the checkpoint that this rank goes on from; "" for none.

    Raises:
        LaunchError: if they have different models, kinds of devices or checkpoints.
        Stopped: if another rank has ended.
    """
    if len(job.plan.ranks) == 1:
        return
    values = {
        "model": job.model.hash[:HASH_DIGITS],
        "checkpoint": start,
        "kind of device": job.device.partition(":")[0],
    }
    with peer_errors(seat.rank):
        store = common_store(seat.rank, seat.world_size)
        agree(store, generation(), seat.rank, len(job.plan.ranks), values)


@contextmanager
def failure_told(seat: ProcessRank | None) -> Iterator[None]:
    """Tells rank 0 of an error before the handshake. On one host the ranks' parent sees to it; the
    agents of several hosts know nothing of each other.
    """
    try:
        yield
    except PlannerError as error:
        if (
            seat is not None
            and seat.world_size > seat.local_world_size
            and seat.rank > 0
            and not isinstance(error, Stopped)
        ):
            with suppress(RuntimeError):  # the store's host has ended
                say_failed(common_store(seat.rank, seat.world_size), seat.rank, str(error))
        raise


def _values(plan: Plan, options: Sequence[Options], *, several_hosts: bool) -> dict[str, str]:
    values = {
        "strategy": artefact_hash(plan)[:HASH_DIGITS],
        "planner": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
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


def _own_files() -> str:
    """A hash of the planner's sources."""
    folder, found = Path(__file__).resolve().parents[1], hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        found.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:HASH_DIGITS]
