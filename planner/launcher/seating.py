"""Which rank runs which device: the ranks of a planned host are on one host.

The topology says which devices share a host, and the plan was priced with the links between them.
Torchrun numbers its hosts by --node-rank, or as they come. So rank 0 looks where the ranks are. It
gives the devices of each planned host to the host of that name if all planned hosts are there by
name, else to one with that many ranks; hosts of equal size keep their order. Where that leaves a
planned host on several, the launch is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from planner.artefacts.plan import Plan
from planner.support.errors import LaunchError

ONE_HOST = "one host"


@dataclass(frozen=True, slots=True)
class RankFacts:
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


def rank_assignment(plan: Plan, facts: Sequence[RankFacts]) -> tuple[int, ...]:
    """The device of each rank that has one.

    Args:
        plan: with the host of each of its ranks.
        facts: of all ranks, those that idle too.

    Raises:
        LaunchError: if a planned host would be on several.

    >>> from types import SimpleNamespace as Fake
    >>> plan = Fake(ranks=(0, 1, 2), hosts=("big", "big", "small"))
    >>> rank_assignment(plan, [RankFacts({}, name) for name in ("small", "big", "big")])
    (2, 0, 1)
    """
    planned = _devices_by_host(plan)
    there = _hosts_by_rank(facts)[: len(plan.ranks)]
    blocks = [(host, len([*same])) for host, same in groupby(there)]
    order = _by_name(planned, blocks) or _as_they_are(planned, there) or _by_size(planned, blocks)
    if order is None:
        raise LaunchError(_refusal(planned, blocks))
    return tuple(device for host in order for device in planned[host])


def _devices_by_host(plan: Plan) -> dict[str, list[int]]:
    """The devices of each planned host, in the order of the ranks."""
    devices: dict[str, list[int]] = {}
    for device, host in zip(plan.ranks, plan.hosts or [ONE_HOST] * len(plan.ranks), strict=True):
        devices.setdefault(host, []).append(device)
    return devices


def _hosts_by_rank(facts: Sequence[RankFacts]) -> list[str]:
    """The name of each rank's host; with what tells it from others where several have one name."""
    keys = {one.host for one in facts}
    names = [key.split()[0] for key in keys]
    own = [one.host.split()[0] for one in facts]
    return [
        name if names.count(name) == 1 else one.host for name, one in zip(own, facts, strict=True)
    ]


Order = list[str] | None


def _by_name(planned: dict[str, list[int]], blocks: list[tuple[str, int]]) -> Order:
    sizes = [(host, len(devices)) for host, devices in planned.items()]
    return [host for host, _ in blocks] if sorted(sizes) == sorted(blocks) else None


def _as_they_are(planned: dict[str, list[int]], there: list[str]) -> Order:
    """The planned order, if each planned host is on one host."""
    begin = 0
    for devices in planned.values():
        if len({*there[begin : begin + len(devices)]}) > 1:
            return None
        begin += len(devices)
    return list(planned)


def _by_size(planned: dict[str, list[int]], blocks: list[tuple[str, int]]) -> Order:
    """An order in which hosts have as many ranks as planned."""
    left, order = dict(planned), []
    for _, size in blocks:
        host = next((host for host, devices in left.items() if len(devices) == size), None)
        if host is None:
            return None
        order.append(host)
        del left[host]
    return None if left else order


def _refusal(planned: dict[str, list[int]], blocks: list[tuple[str, int]]) -> str:
    there = ", ".join(f"{host}: {size}" for host, size in blocks)
    if [*planned] == [ONE_HOST]:
        return (
            f"the strategy is for devices of one host, and its ranks are on several ({there}); "
            "run: planner solve with a --topology that has these hosts"
        )
    wanted = ", ".join(f"{host}: {len(devices)}" for host, devices in planned.items())
    return (
        f"the ranks of a planned host must be on one host; planned are {wanted}, got {there}; "
        "start torchrun on each host with its own --nproc-per-node, in this order of --node-rank"
    )
