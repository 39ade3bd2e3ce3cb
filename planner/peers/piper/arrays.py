"""The arrays that `piper_kernels.py` works on; their indices are told there."""

from typing import NamedTuple

from planner.support.arrays import Floats, Ints, Masks


class Lattice(NamedTuple):
    """`order.Downsets` of the layers, as arrays: see there.

    Attributes:
        masks: (n, words) uint64.
        start: (n + 1,).
        cover: (edges,).
        added: (edges,).
    """

    masks: Masks
    start: Ints
    cover: Ints
    added: Ints


class Layers(NamedTuple):
    """What layers cost.

    Attributes:
        option_start: (layers * degrees + 1,) the configurations of layer v for degree x are those
            from option_start[v * degrees + x] up to the next.
        figures: (configurations, 4) compute_s, sync_s, A and B.
        crossing: (layers * degrees, neighbours) s of the edge to each neighbour, if it crosses, in
            the configuration where that is least.
        extra: (configurations, neighbours) s of it besides, in each configuration.
        mixed: whether there is any.
        near_start: (layers + 1,) the neighbours of layer v are near[near_start[v]:near_start[v+1]].
        near: see near_start.
    """

    option_start: Ints
    figures: Floats
    crossing: Floats
    extra: Floats
    mixed: bool
    near_start: Ints
    near: Ints


class Stages(NamedTuple):
    """Every stage, with the configurations that are worth choosing.

    Attributes:
        start: (n + 1,) the stages that begin after D_i are those from start[i] up to the next.
        end: (pairs,) the j of each.
        point_start: (pairs * degrees + 1,) the choices of stage p for degree x.
        outside: (pairs * degrees,) s of the edges that cross, in any choice.
        figures: (choices, 4) serial_s besides, sync_s, A and B.
        most: (choices,) samples in flight that fit, capped.
    """

    start: Ints
    end: Ints
    point_start: Ints
    outside: Floats
    figures: Floats
    most: Ints


class Degrees(NamedTuple):
    """What a stage may take.

    Attributes:
        tensor: (degrees,) t, ascending.
        data: (divisors,) d, ascending.
        num_devices: K.
        batch: the most samples in flight.
    """

    tensor: Ints
    data: Ints
    num_devices: int
    batch: int
