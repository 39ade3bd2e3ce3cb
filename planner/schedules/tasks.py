"""Input and output of the compiled rules of action lists (`event_loop.py`). This file imports
nothing that changes often, because all kernels are compiled anew when it does.
"""

from typing import NamedTuple

from planner.support.arrays import Floats, Ints, Kinds


class Dependencies(NamedTuple):
    """Which actions of some lists belong together; n actions, P ordered pairs of devices.

    Attributes:
        counter: (n,) of a computation, the counter that it waits for; of a receive, that of the
            computation that needs it; of a send, that of the computation that begins only when the
            transfer is over, -1 where there is none; of an all-reduce, its own; -1 of a step.
        num_computations: counters of computations; behind them come those of the all-reduces.
        pair: (n,) of sends and receives, the ordered pair of devices.
        source: (P,) of a pair, the position of the device that sends.
        target: (P,) of a pair, the position of the device that receives.
        first: (P + 1,) where the transfers of a pair begin.
        send: (T,) the sends of the transfers, by pair, in the order of their lists.
        receive: (T,) the receive that each of them meets. Sends and receives of a pair from the
            first on that differ are in no transfer.
    """

    counter: Ints
    num_computations: int
    pair: Ints
    source: Ints
    target: Ints
    first: Ints
    send: Ints
    receive: Ints


class Cuts(NamedTuple):
    """Moments within computations; C cuts on D devices.

    Attributes:
        first: (D + 1,) where the cuts of each device begin, and the last ones end.
        at: (C,) of a cut, the computation that it is in; ascending within a device.
        after_s: (C,) how long after the start of the computation it is, if no other device
            computes; ascending within a computation, and at most its duration.
        of: (C,) the all-reduce of the same device whose gradients are there from then on.
    """

    first: Ints
    at: Ints
    after_s: Floats
    of: Ints


class Tasks(NamedTuple):
    """What devices do; D devices, n actions, P ordered pairs of devices, T transfers.

    Attributes:
        start: (D + 1,) where the list of each device begins, and the last one ends.
        kind: (n,) of each action.
        known: what the actions have to do with each other.
        duration_s: (n,) for which each action occupies its device.
        size_bytes: (n,) of receives.
        counters: the value that each counter begins with.
        cuts: within computations.
    """

    start: Ints
    kind: Kinds
    known: Dependencies
    duration_s: Floats
    size_bytes: Floats
    counters: Ints
    cuts: Cuts


class Paths(NamedTuple):
    """What transfers run over; P ordered pairs of devices, L links.

    Attributes:
        latency_s: (P,) of each pair.
        bytes_per_s: (P,) of each pair, at full speed.
        first_place: (P + 1,) where the places of each pair at gates begin.
        place_gate: the gate of each place.
        num_gates: how many gates there are.
        first_hop: (P + 1,) where the routes begin of pairs with shared links; others have none.
        hop_link: the link of each step of a route.
        link_bytes_per_s: (L,) of each link.
    """

    latency_s: Floats
    bytes_per_s: Floats
    first_place: Ints
    place_gate: Ints
    num_gates: int
    first_hop: Ints
    hop_link: Ints
    link_bytes_per_s: Floats


class ContentionGroups(NamedTuple):
    """Devices that slow each other while they compute; H groups of at most K of the D devices.

    Attributes:
        group: (D,) the group of each device, -1 where it computes at one speed.
        slowdown: (H, K + 1) of each group, by how many of its devices compute: the time of a
            computation over that of the same computation alone, at least 1; the first is unused.
    """

    group: Ints
    slowdown: Floats


class RunResult(NamedTuple):
    """How far a run came, and when.

    Attributes:
        ended: whether nothing is left over.
        at: (D,) the action at which each device stands, or the end of its list.
        done: (P,) transfers of each pair that have ended.
        sent: (P,) sends of each pair that were posted.
        posted: (P,) receives of each pair that were posted.
        start_s: (n,) when each action began; of a receive, its transfer.
        end_s: (n,) when it ended.
        post_s: (n,) when the device came to a send or receive; of an all-reduce, when its gradients
            were there.
        posted_s: (n,) when it was posted.
    """

    ended: bool
    at: Ints
    done: Ints
    sent: Ints
    posted: Ints
    start_s: Floats
    end_s: Floats
    post_s: Floats
    posted_s: Floats
