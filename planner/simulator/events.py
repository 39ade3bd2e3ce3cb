"""Times action lists (`schedules/actions.py`) on devices and links, by discrete events.

The rules are those of `schedules/event_loop.py`, which runs the lists. Each device runs its list
in order. Computations and steps occupy it. Sends and receives occupy it only for the time that
posting them takes. A computation or step on a device of a contention group
(`ActionCosts.contention`) is slower the more devices of the group compute at the time. A transfer
starts when both its ends have posted it and the one before it of the same ordered pair of devices
has ended. It waits for the latency of its route without taking bandwidth, then moves its bytes at a
max-min fair rate, beside whatever the devices compute.

All-reduces of gradients run beside the computations of their members, one after the other on each.
One starts when all its members have the gradients, and have ended the all-reduce before it. The
gradients are there within the last backward before it (`ActionCosts.backward_left_s`), or when the
device comes to the all-reduce (`costs/stage_pass.py` says where). There the device waits until it
has ended.

A route may have exclusive links. Then the transfer starts when it is its turn on all of them, and
keeps them from then on, latency included. Turns go by the time at which transfers were ready, then
by source and target.

The launcher behaves in the same way. One thread per device runs the list. The thread waits for the
transfers that a computation needs or waits for, for each computation (on CUDA it synchronises after
it), and for all-reduces, up to their end. Sends, receives and all-reduces go on beside it: gloo
moves bytes in threads of its own, nccl on streams of their own. Sends and receives take the
device's time only for the posting, and for copies that its processor makes for them
(`ActionCosts.post_s`, `copy_s_per_byte`).
"""

from math import nan, prod

import numpy as np

from planner.artefacts.topology import Topology
from planner.costs.actions import ActionCosts
from planner.schedules import rules
from planner.schedules.actions import ActionKind, Code, Piece, Program
from planner.schedules.dependencies import dependencies, tasks
from planner.schedules.dry_run import dry_run
from planner.schedules.tasks import ContentionGroups, Cuts
from planner.simulator.network import network, paths
from planner.simulator.timeline import Timeline, Times, timeline_of, transfers
from planner.support.arrays import Floats, Ints


def simulate(program: Program, costs: ActionCosts, topology: Topology) -> Timeline:
    """The times of all actions of one iteration.

    Args:
        program: its devices are indices into the topology.
        costs: of everything in the program; of a flow, of the all-reduces of one round.

    Raises:
        ValueError: if the lists block each other; with the words of `dry_run`.
    """
    return timeline_of(run(program, costs, topology))


def run(program: Program, costs: ActionCosts, topology: Topology) -> Times:
    """The same as times of the actions, in arrays. Arguments and errors as of `simulate`.

    Raises:
        ValueError: also if the costs lack an action.
    """
    code = program.code
    known, duration_s = dependencies(code), _durations_s(code, costs)
    sources, targets = code.devices[known.source], code.devices[known.target]
    ways = paths(topology, network(topology, sources, targets))
    cuts = _cuts(code, costs, duration_s)
    job = tasks(code, known, program.members, duration_s, _sizes_bytes(code, costs), cuts)
    result = rules.run(job, ways, _contention_groups(code.devices, costs))
    if not result.ended:
        raise ValueError(f"the schedule blocks: {dry_run(program)}")
    if np.isnan(result.end_s).any():
        raise ValueError("an action of the program has no cost")
    return Times(
        code=code,
        start_s=result.start_s,
        end_s=result.end_s,
        piece_bytes=tuple(int(_bytes(costs, piece, 0)) for piece in code.pieces),
        iteration_s=float(max(result.end_s.max(initial=0.0), result.posted_s.max(initial=0.0))),
        post_s=result.post_s,
        posted_s=result.posted_s,
        cut_at=cuts.at,
        cut_of=cuts.of,
    )


def _cuts(code: Code, costs: ActionCosts, duration_s: Floats) -> Cuts:
    """When the gradients of all-reduces are there, within the last backward before each."""
    owner, places = code.owner(), np.arange(len(code))
    back = (code.kind == ActionKind.COMPUTE) & code.backward
    latest = np.maximum.accumulate(np.where(back, places, -1))
    sums = np.flatnonzero((code.kind == ActionKind.ALL_REDUCE) & (latest >= code.start[owner]))
    buckets = code.piece[sums] % max(len(costs.sum_s), 1)
    keys = zip(buckets.tolist(), code.devices[owner[sums]].tolist(), strict=True)
    left_s = np.array([costs.backward_left_s.get(key, nan) for key in keys], dtype=float)
    sums, left_s = sums[~np.isnan(left_s)], left_s[~np.isnan(left_s)]
    at = latest[sums]
    cut_s = np.maximum(duration_s[at] - left_s, 0.0)
    order = np.lexsort((cut_s, at))
    first = np.searchsorted(at[order], code.start)
    return Cuts(first, at[order], cut_s[order], sums[order])


def _contention_groups(devices: Ints, costs: ActionCosts) -> ContentionGroups:
    """The contention groups of some devices, which are indices into the topology."""
    group = np.full(len(devices), -1)
    slowdown = np.ones(
        (len(costs.contention), max((len(one.slowdown) for one in costs.contention), default=1))
    )
    for number, one in enumerate(costs.contention):
        group[np.isin(devices, one.devices)] = number
        slowdown[number, : len(one.slowdown)] = one.slowdown
    return ContentionGroups(group, slowdown)


def _durations_s(code: Code, costs: ActionCosts) -> Floats:
    """(n,) for which each action occupies its device, in s."""
    owner, devices = code.owner(), code.devices.tolist()
    duration_s = np.zeros(len(code))
    position = {device: d for d, device in enumerate(devices)}
    table = np.full((2, len(devices), int(code.stage.max(initial=0)) + 1), nan)
    for backward, known in enumerate((costs.forward_s, costs.backward_s)):
        for (stage, device), time_s in known.items():
            if device in position and stage < table.shape[2]:
                table[backward, position[device], stage] = time_s
    own = np.flatnonzero(code.kind == ActionKind.COMPUTE)
    duration_s[own] = table[code.backward[own].astype(np.int8), owner[own], code.stage[own]]
    begins = own[np.diff(owner[own], prepend=-1) > 0]  # the first computation of each list
    head_s = np.array([costs.head_s.get(device, 0.0) for device in devices])
    duration_s[begins] += head_s[owner[begins]]
    own = np.flatnonzero(code.kind == ActionKind.ALL_REDUCE)
    if len(own):
        # The all-reduces of a flow come again in each of its rounds.
        duration_s[own] = np.array(costs.sum_s, dtype=float)[code.piece[own] % len(costs.sum_s)]
    own = np.flatnonzero(code.kind == ActionKind.STEP)
    step_s = np.array([costs.step_s.get(device, nan) for device in devices])
    duration_s[own] = step_s[owner[own]]
    if costs.post_s or costs.copy_s_per_byte:
        post_s = np.array([costs.post_s.get(device, 0.0) for device in devices])
        per_byte_s = np.array([costs.copy_s_per_byte.get(device, 0.0) for device in devices])
        size = np.array([_bytes(costs, piece, 0) for piece in code.pieces], dtype=float)
        own = np.flatnonzero(transfers(code))
        duration_s[own] = post_s[owner[own]] + per_byte_s[owner[own]] * size[code.piece[own]]
    return duration_s


def _sizes_bytes(code: Code, costs: ActionCosts) -> Floats:
    """(n,) the bytes of receives that move over links; 0 of other actions."""
    size_bytes = np.zeros(len(code))
    own = np.flatnonzero(code.kind == ActionKind.RECEIVE)
    if len(own):
        sizes = [costs.link_share * _bytes(costs, piece, nan) for piece in code.pieces]
        size_bytes[own] = np.array(sizes)[code.piece[own]]
    return size_bytes


def _bytes(costs: ActionCosts, piece: Piece, unknown: float) -> float:
    """Size of a piece."""
    if piece.box is None:
        return costs.tensor_bytes.get(piece.tensor, unknown)
    item = costs.item_bytes.get(piece.tensor, unknown)
    return prod(stop - start for start, stop in piece.box) * item
