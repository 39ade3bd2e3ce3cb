"""This process among the ranks of a launch: its number, its device, and how it joins the others."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from planner.launcher import ending
from planner.launcher.failures.page import Phase
from planner.launcher.store import TIMEOUT, groups_store
from planner.support.errors import LaunchError, Stopped


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
    """The seat that torchrun wrote into the environment; None outside it."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    if not all(name in os.environ for name in names):
        return None
    return ProcessRank(*(int(os.environ[name]) for name in names[:-1]))


def meet(rank: int, num_ranks: int, world_size: int) -> None:
    """Joins the other ranks in the default group, which is gloo's.

    Args:
        rank: of this process.
        num_ranks: ranks of the group.
        world_size: number of all processes.

    Raises:
        RuntimeError: if the others cannot be reached.
    """
    keep_to_this_host()
    ending.page().enter(Phase.MEETING)
    store = groups_store(rank, world_size)
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks, timeout=TIMEOUT, store=store)


def keep_to_this_host() -> None:
    """Lets gloo listen on the loopback interface alone if all ranks are on this host, unless
    GLOO_SOCKET_IFNAME names another one.
    """
    seat = process_rank()
    if seat is None or seat.world_size > seat.local_world_size:
        return
    names = {name for _, name in socket.if_nameindex()}
    for loopback in ("lo", "lo0"):  # Linux, macOS
        if loopback in names:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def choose_device(
    name: str, seat: ProcessRank, num_ranks: int, planned_types: frozenset[str]
) -> str:
    """Where this rank computes, in torch's words.

    Args:
        name: "cpu", "cuda", or "auto": the kind that the plan was made for, if there is a GPU for
            every rank of this host.
        seat: of this process.
        num_ranks: ranks that the strategy uses.
        planned_types: types of the plan's devices.

    Raises:
        LaunchError: if there is no such device.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    num_here = min(seat.local_world_size, num_ranks)
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
    return f"cuda:{seat.local_rank}"
