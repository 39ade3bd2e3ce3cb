"""Boxes between two meshes, on numpy arrays."""

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.artefacts.sharding import tile
from planner.resharding import pieces
from tests.support.meshes import put

SHAPE = (12, 12)
MESHES = [((0, 1), (2,)), ((2, 3), (2,)), ((0, 1, 2, 3), (4,)), ((3, 1, 0, 2), (2, 2)),
          ((3,), (1,)), ((1, 2), (2,)), ((4, 5, 6), (3,))]  # fmt: skip


def sides():
    def with_spec(mesh):
        parts = st.sampled_from(["R", "S0", "S1"])
        return st.tuples(*[parts] * len(mesh[1])).map(lambda spec: (*mesh, spec))

    return st.sampled_from(MESHES).flatmap(with_spec)


@given(sides(), sides())
def test_every_device_gets_its_box_once(source, target):
    whole = np.arange(prod(SHAPE)).reshape(SHAPE).astype(float)
    have = dict(zip(source[0], put(whole, source[1], source[2]), strict=True))
    boxes = {d: tile(SHAPE, source[2], source[1], i) for i, d in enumerate(source[0])}
    got = {device: np.zeros(SHAPE) for device in target[0]}
    times = {device: np.zeros(SHAPE) for device in target[0]}
    for piece in pieces(SHAPE, source, target):
        starts = [first for first, _ in boxes[piece.source]]
        local = tuple(slice(a - s, b - s) for (a, b), s in zip(piece.box, starts, strict=True))
        box = tuple(slice(*b) for b in piece.box)
        got[piece.target][box] = have[piece.source][local]
        times[piece.target][box] += 1
    for i, device in enumerate(target[0]):
        box = tuple(slice(*b) for b in tile(SHAPE, target[2], target[1], i))
        inside = np.zeros(SHAPE)
        inside[box] = 1
        assert (times[device] == inside).all()
        assert (got[device][box] == whole[box]).all()


@given(sides(), sides())
def test_what_a_device_has_it_gives_itself(source, target):
    own = {d: tile(SHAPE, source[2], source[1], i) for i, d in enumerate(source[0])}
    for piece in pieces(SHAPE, source, target):
        at = own.get(piece.target)
        if at is not None and all(
            a <= c and d <= b for (a, b), (c, d) in zip(at, piece.box, strict=True)
        ):
            assert piece.source == piece.target


def test_copies_are_asked_in_turn():
    moved = pieces((4, 4), ((0, 1), (2,), ("R",)), ((2, 3), (2,), ("R",)))
    assert [(p.source, p.target) for p in moved] == [(0, 2), (1, 3)]


def test_a_summand_does_not_cross():
    with pytest.raises(ValueError, match="P: a summand cannot cross to another mesh"):
        pieces((4,), ((0, 1), (2,), ("P",)), ((2,), (1,), ("R",)))
