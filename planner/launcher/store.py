"""The store that all ranks of a launch read and write, before there are connections between them.

It is that of torchrun, or of whoever wrote MASTER_ADDR; under `--nproc` rank 0's, on the socket
that the launcher has bound.
"""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, cast

import torch.distributed as dist

from planner.launcher import ending

TIMEOUT = timedelta(minutes=30)


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


@dataclass(slots=True)
class _Joined:
    """This process's end of the store.

    Attributes:
        store: None before the first use.
        generation: what the ranks of this start write begins with it, where they have agreed on
            one: see `handshake`.
    """

    store: Store | None = None
    generation: str = ""


_joined = _Joined()


def common_store(rank: int, world_size: int) -> Store:
    """The store.

    Args:
        rank: of this process.
        world_size: number of all processes.

    Raises:
        RuntimeError: if it cannot be reached.
    """
    if _joined.store is None:
        here = ending.here()
        if here is not None and here.launched:
            _joined.store = dist.TCPStore(  # type: ignore[attr-defined]
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                world_size,
                is_master=here.listener is not None,
                timeout=TIMEOUT,
                wait_for_workers=False,
                master_listen_fd=here.listener,
            )
        else:
            places = dist.rendezvous("env://", rank, world_size, timeout=TIMEOUT)  # type: ignore[attr-defined]
            _joined.store, _, _ = next(places)
    assert _joined.store is not None
    return _joined.store


def begin_generation(name: str) -> None:
    """From now on, the process groups of these ranks are made under a name of their own."""
    _joined.generation = name


def generation() -> str:
    """The name of this start of all ranks; "" before they have agreed on one."""
    return _joined.generation


def groups_store(rank: int, world_size: int) -> Any:
    """The part of the store for the process groups of this start.

    Raises:
        RuntimeError: if it cannot be reached.
    """
    store = common_store(rank, world_size)
    return dist.PrefixStore(  # type: ignore[attr-defined]
        f"groups/{_joined.generation}", cast(Any, store)
    )
