"""Tensors on a simulated mesh, in numpy: a list of local arrays, one per device, and every step of
a conversion done on it. It shares nothing with the launcher but the names of the steps.
"""

from math import prod

import numpy as np

from planner.artefacts.sharding import blocks_of, dim_of, local_shape, tiles
from planner.resharding import Collective


def lines(mesh, axis):
    """The lines of devices along one axis, in the order of their coordinates."""
    numbers = np.arange(prod(mesh)).reshape(mesh)
    return np.moveaxis(numbers, axis, -1).reshape(-1, mesh[axis]).tolist()


def put(whole, mesh, spec, rng=None):
    """What each device has of a tensor. Summands are random, and sum up to the tensor."""
    parts = []
    for i in range(prod(mesh)):
        boxes = tiles(whole.shape, spec, mesh, i)
        blocked = [dim_of(part) for part in spec if blocks_of(part) > 1]
        some = [whole[tuple(slice(*b) for b in box)] for box in boxes]
        parts.append(np.concatenate(some, blocked[0]) if blocked else some[0])
        assert parts[-1].shape == local_shape(whole.shape, spec, mesh)
    for axis, part in enumerate(spec):
        if part != "P":
            continue
        for line in lines(mesh, axis):
            shares = [rng.normal(size=parts[i].shape) for i in line[1:]]
            first = parts[line[0]] - sum(shares)
            for i, value in zip(line, [first, *shares], strict=True):
                parts[i] = value
    return parts


def taken(parts, mesh, spec, shape):
    """The tensor that the devices have together. Copies must be equal."""
    for axis, part in enumerate(spec):
        if part == "P":
            for line in lines(mesh, axis):
                total = sum(parts[i] for i in line)
                parts = [total if i in line else one for i, one in enumerate(parts)]
    whole = np.full(shape, np.nan)
    for i, value in enumerate(parts):
        boxes = [tuple(slice(*b) for b in box) for box in tiles(shape, spec, mesh, i)]
        blocked = [dim_of(part) for part in spec if blocks_of(part) > 1]
        some = np.split(value, len(boxes), blocked[0]) if blocked else [value]
        for box, one in zip(boxes, some, strict=True):
            old = whole[box]
            assert np.allclose(old[~np.isnan(old)], one[~np.isnan(old)]), "copies that differ"
            whole[box] = one
    assert not np.isnan(whole).any(), "a part that nobody has"
    return whole


def done(parts, mesh, step):
    """What the devices have after a step."""
    after = list(parts)
    for line in lines(mesh, step.axis):
        here = [parts[i] for i in line]
        for k, i in enumerate(line):
            after[i] = _one(here, k, step)
    return after


def cut(whole, n, part):
    """The parts of an array along one axis of a mesh, blocks apart."""
    blocks = np.split(whole, blocks_of(part), dim_of(part))
    shares = [np.split(block, n, dim_of(part)) for block in blocks]
    return [np.concatenate([share[k] for share in shares], dim_of(part)) for k in range(n)]


def joined(parts, part):
    """The array that was cut."""
    blocks = [np.split(one, blocks_of(part), dim_of(part)) for one in parts]
    return np.concatenate([one[b] for b in range(blocks_of(part)) for one in blocks], dim_of(part))


def _one(here, k, step):
    n = len(here)
    match step.kind:
        case Collective.ALL_GATHER:
            return joined(here, step.source)
        case Collective.ALL_TO_ALL:
            return joined([cut(x, n, step.target)[k] for x in here], step.source)
        case Collective.ALL_REDUCE:
            return sum(here)
        case Collective.REDUCE_SCATTER:
            return cut(sum(here), n, step.target)[k]
        case Collective.SLICE:
            return cut(here[k], n, step.target)[k]
        case Collective.FIRST:
            return here[k] if k == 0 else np.zeros_like(here[k])
        case Collective.SCATTER:
            return joined([here[k] if i == k else np.zeros_like(here[k]) for i in range(n)],
                          step.source)  # fmt: skip
