"""The arrays of records that `events_kernels.py` works on: what is run, and how far it has come."""

from typing import Any, NamedTuple

import numpy as np

from planner.support.arrays import Ints

# Arrays of records, whose fields mypy cannot see.
Records = Any

# at: the action that it runs or waits for; end: of its list;
# waits: key of the computation that it waits for, -1 where it does not
DEVICE = np.dtype([("at", "i8"), ("end", "i8"), ("waits", "i8")])
# key: of a computation or receive, or the sum; holds: of a send or receive, as `Wiring` says;
# amount: s, or bytes of a receive; post: s that posting a send or receive takes; start_s, end_s:
# of what has begun, a transfer's at its receive; post_s, posted_s: from when until when a send
# or receive was posted
ACTION = np.dtype(
    [(name, "i8") for name in ("kind", "key", "holds", "pair")]
    + [(name, "f8") for name in ("amount", "post", "start_s", "end_s", "post_s", "posted_s")]
)
# source, target: positions of its devices; first: its receives in `receives`; hop, end_hop: its
# route in `hops`; latency: s
# sent, posted, begun: sends, receives and transfers so far
# number: of the transfer under way, -1 without one; rate: bytes/s, 0 during its latency; left:
# bytes at time `since`; end: as foreseen
# place: in the list of touched flows, -1 where it is not; mark: the last search that reached it;
# new: its new rate, 0 without one
# gated: whether its route has exclusive links; waits: whether its transfer is in their queues
PAIR = np.dtype(
    [(name, "i8") for name in ("source", "target", "first", "hop", "end_hop", "gated")]
    + [(name, "i8") for name in ("sent", "posted", "begun", "number", "place", "mark", "waits")]
    + [(name, "f8") for name in ("latency", "rate", "left", "since", "end", "new")]
)
# One link of the route of one pair. The hops of the flows that are on a link now hang together; on
# an exclusive link, those of the transfers in its queue, of which the first may be under way.
HOP = np.dtype([("link", "i8"), ("pair", "i8"), ("after", "i8"), ("before", "i8")])
# load: flows on it; head, tail: the first and, of an exclusive one, the last of their hops, -1
# without one; mark: the last search that reached it; open, room: flows without a new rate, and the
# bandwidth that is left to them
LINK = np.dtype(
    [
        ("width", "f8"),
        ("exclusive", "i8"),
        ("load", "i8"),
        ("head", "i8"),
        ("tail", "i8"),
        ("mark", "i8"),
        ("open", "i8"),
        ("room", "f8"),
    ]
)
SUMMING = np.dtype([("members", "i8"), ("come", "i8")])
# now: s; order: events foreseen so far; search: the last; the others: how long these lists are
CLOCK = np.dtype(
    [("now", "f8"), ("order", "i8"), ("search", "i8")]
    + [(name, "i8") for name in ("touched", "rated", "fresh", "freed")]
)


class World(NamedTuple):
    """What is run, on what, and where everything stands between two events.

    Attributes:
        devices: (D,) `DEVICE`.
        actions: (n,) `ACTION`, device after device.
        pairs: (P,) `PAIR`.
        hops: (H,) `HOP`, pair after pair.
        links: (L,) `LINK`.
        sums: `SUMMING`.
        clock: (1,) `CLOCK`.
        missing: by key of a computation, receives posted and not there, and sends that hold it.
        receives: the receives by pair, in the order of their lists.
        touched: (2 P,) flows that came, or lost company, since the rates were last asked for; one
            that went and came again is in it twice.
        some: (P,) flows that a search found.
        reached: (L,) links that it found.
        rated: (P,) flows with new rates, in the order in which they got them.
        fresh: (P,) transfers that are ready, and in no queue of an exclusive link yet.
        freed: (P,) those that have just left some.
    """

    devices: Records
    actions: Records
    pairs: Records
    hops: Records
    links: Records
    sums: Records
    clock: Records
    missing: Ints
    receives: Ints
    touched: Ints
    some: Ints
    reached: Ints
    rated: Ints
    fresh: Ints
    freed: Ints
