"""Times action lists (`actions.py`) on devices and shared links, by discrete events.

The rules are those of `actions.py`: each device runs its list in order; computations, sums and
steps occupy it; sends and receives do not, but for the time that posting them takes. A transfer
starts when both its ends have posted it and the one before it of the same ordered pair of devices
has ended. It waits for the latency of its route without taking bandwidth, then moves its bytes at a
max-min fair rate, beside whatever the devices compute. A sum of gradients starts when its last
member has come to it.

A route may have exclusive links. Then the transfer starts when it is its turn on all of them, and
keeps them from then on, latency included; turns go by the time at which transfers were ready, then
by source and target.

So it is in the launcher: one thread per device runs the list. It waits for what a computation
needs and for sends before it, for each computation (on CUDA it synchronises after it), and for
sums, up to their end. Sends
and receives go on beside it: gloo moves bytes in a thread of its own, nccl on streams of their own.
What they take of the device is the posting, and copies that its processor makes for them
(`ActionCosts.post_s`, `copy_s_per_byte`).

Events at the same time are taken in the order of devices, then in that in which they were foreseen.
Where no two transfers share bandwidth, a shorter loop (`closed_kernels.py`) gives the same times to
the last bit. The loop is compiled (`events_kernels.py`), because there can be millions of actions.
"""

from math import nan
from typing import Any, NamedTuple

import numpy as np

from planner.costs.pricing import ActionCosts
from planner.schedules.actions import Code, Kind, Program
from planner.schedules.dry_run import Wiring, dry_run, wire
from planner.simulator import closed_kernels
from planner.simulator import events_arrays as arrays
from planner.simulator import events_kernels as kernels
from planner.simulator.closed import Network, closed_case, exclusive_links, network
from planner.simulator.timeline import Timeline, Times, timeline_of
from planner.support.arrays import Floats, Ints
from planner.topology import Topology


def simulate(program: Program, costs: ActionCosts, topology: Topology) -> Timeline:
    """What every device does when, in one iteration.

    Args:
        program: its devices are indices into the topology.
        costs: of everything in the program.

    Raises:
        ValueError: if the lists block each other; with what `dry_run` says.
    """
    return timeline_of(run(program, costs, topology))


def run(program: Program, costs: ActionCosts, topology: Topology) -> Times:
    """The same as times of the actions, in arrays. Arguments and errors as of `simulate`."""
    amount = amounts(program.code, costs)
    return run_wired(program, costs, topology, wired(program.code, topology), amount)


class Wired(NamedTuple):
    """What the simulator has to know of some lists besides what their actions take.

    Attributes:
        wiring: which actions belong together.
        ways: of its pairs of devices.
    """

    wiring: Wiring
    ways: Network


def wired(code: Code, topology: Topology) -> Wired:
    """Finds what belongs together in some lists, and the routes between their devices."""
    wiring = wire(code)
    sources, targets = code.devices[wiring.source], code.devices[wiring.target]
    return Wired(wiring, network(topology, sources, targets))


def run_wired(
    program: Program, costs: ActionCosts, topology: Topology, found: Wired, amount: Floats
) -> Times:
    """The same as `run`.

    Args:
        found: `wired` of these lists, or of ones that differ in the names of tensors only.
        amount: `amounts` of these lists.
    """
    code, wiring, ways = program.code, found.wiring, found.ways
    post = postings(code, costs)
    case = closed_case(topology, code, wiring, program.members, ways, amount, post)
    if case is not None and wiring.sound:
        ended, *times = closed_kernels.run(*case)
    else:
        world = _world(code, wiring, program.members, ways, amount, post, topology)
        ended = wiring.sound and kernels.run(world)
        times = [world.actions[name].copy() for name in ("start_s", "end_s", "post_s", "posted_s")]
    if not ended:
        raise ValueError(f"the schedule blocks: {dry_run(program)}")
    return times_of(code, costs, *times)


def times_of(
    code: Code, costs: ActionCosts, start_s: Floats, end_s: Floats, post_s: Floats, posted_s: Floats
) -> Times:
    """What a kernel has found, as `Times`.

    Raises:
        ValueError: if the costs lack an action of the program.
    """
    if np.isnan(end_s).any():
        raise ValueError("an action of the program has no cost")
    return Times(
        code=code,
        start_s=start_s,
        end_s=end_s,
        tensor_bytes=tuple(costs.tensor_bytes.get(name, 0) for name in code.tensors),
        iteration_s=float(max(end_s.max(initial=0.0), posted_s.max(initial=0.0))),
        post_s=post_s,
        posted_s=posted_s,
    )


def amounts(code: Code, costs: ActionCosts) -> Floats:
    """(n,) the time of each action in s, or the bytes of a receive; nan where it is not known."""
    owner = code.owner()
    position = {device: d for d, device in enumerate(code.devices.tolist())}
    amount = np.full(len(code), nan)
    table = np.full((2, len(position), int(code.stage.max(initial=0)) + 1), nan)
    for backward, known in enumerate((costs.forward_s, costs.backward_s)):
        for (stage, device), time_s in known.items():
            if device in position and stage < table.shape[2]:
                table[backward, position[device], stage] = time_s
    own = np.flatnonzero(code.kind == Kind.COMPUTE)
    amount[own] = table[code.backward[own].astype(np.int8), owner[own], code.stage[own]]
    for kind, values, of in (
        (
            Kind.RECEIVE,
            [costs.wire * costs.tensor_bytes.get(name, nan) for name in code.tensors],
            code.tensor,
        ),
        (Kind.SUM, costs.sum_s, code.tensor),
        (Kind.STEP, [costs.step_s.get(device, nan) for device in position], owner),
    ):
        own = np.flatnonzero(code.kind == kind)
        if len(own):
            amount[own] = np.array(values, dtype=float)[of[own]]
    if costs.launch_s:
        launch_s = np.array([costs.launch_s.get(device, 0.0) for device in position])
        occupying = (code.kind != Kind.SEND) & (code.kind != Kind.RECEIVE)
        amount[occupying] += launch_s[owner[occupying]]
    return amount


def postings(code: Code, costs: ActionCosts) -> Floats:
    """(n,) how long each send and receive occupies its device, in s; 0 for other actions."""
    found = np.zeros(len(code))
    if not costs.post_s and not costs.copy_s_per_byte:
        return found
    owner, transfers = code.owner(), (code.kind == Kind.SEND) | (code.kind == Kind.RECEIVE)
    devices = code.devices.tolist()
    each = np.array([costs.post_s.get(device, 0.0) for device in devices])
    per_byte = np.array([costs.copy_s_per_byte.get(device, 0.0) for device in devices])
    size = np.array([costs.tensor_bytes.get(name, 0) for name in code.tensors], dtype=float)
    own = owner[transfers]
    found[transfers] = each[own] + per_byte[own] * size[code.tensor[transfers]]
    return found


def _world(
    code: Code, wiring: Wiring, members: Ints, ways: Network, amount: Floats, post: Floats,
    topology: Topology,
) -> arrays.World:  # fmt: skip
    """Everything before the first event."""
    exclusive, bounds = exclusive_links(topology), ways.bounds
    num_pairs, num_links = len(ways.latency_s), len(topology.links)
    held = np.concatenate([[0], np.cumsum(exclusive[ways.links])])[bounds]

    def numbers(size: int) -> Ints:
        return np.zeros(size, dtype=np.int64)

    return arrays.World(
        devices=_records(
            arrays.DEVICE, len(code.devices),
            at=code.start[:-1], end=code.start[1:], waits=-1,
        ),
        actions=_records(
            arrays.ACTION, len(code),
            kind=code.kind, key=wiring.key, holds=wiring.holds, pair=wiring.pair,
            amount=amount, post=post,
        ),
        pairs=_records(
            arrays.PAIR, num_pairs,
            source=wiring.source, target=wiring.target, first=wiring.first[:-1],
            hop=bounds[:-1], end_hop=bounds[1:], latency=ways.latency_s,
            gated=held[1:] > held[:-1],
            number=-1, place=-1,
        ),
        hops=_records(
            arrays.HOP, int(bounds[-1]),
            link=ways.links,
            pair=np.repeat(np.arange(num_pairs), np.diff(bounds)),
        ),
        links=_records(
            arrays.LINK, num_links,
            width=[link.bandwidth_bytes_per_s for link in topology.links],
            exclusive=exclusive, head=-1, tail=-1,
        ),
        sums=_records(arrays.SUMMING, len(members), members=members),
        clock=_records(arrays.CLOCK, 1),
        missing=numbers(wiring.num_keys),
        receives=wiring.receives,
        touched=numbers(2 * num_pairs),
        some=numbers(num_pairs),
        reached=numbers(num_links),
        rated=numbers(num_pairs),
        fresh=numbers(num_pairs),
        freed=numbers(num_pairs),
    )  # fmt: skip


def _records(form: "np.dtype[np.void]", size: int, /, **fields: Any) -> arrays.Records:
    """An array of records that are zero where nothing is said of a field."""
    found = np.zeros(size, dtype=form)
    for name, values in fields.items():
        found[name] = values
    return found
