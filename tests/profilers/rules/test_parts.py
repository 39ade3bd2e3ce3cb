"""Functions that ask the other devices, on devices that are threads, beside PyTorch's own ones."""

from itertools import product

import pytest
import torch
from torch.nn import functional

from planner.artefacts.operator_types import function_of
from planner.operators.binding import Call, Read
from planner.operators.normalization import batch_normalization
from planner.operators.parts import HALO, MARKED, MOMENTS, Cut, cross_entropy
from planner.operators.running import evaluating, updating
from tests.support.splits import check, on_threads, shares, together


def call(kind, *names, **kwargs):
    reads = dict(zip(names, map(Read, names), strict=True))
    return Call(function_of(kind), (), {**reads, **kwargs})


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


# ---- windows: kernel, stride, pads


@pytest.mark.parametrize(("kernel", "stride", "pads"), [
    (3, 1, (1, 1)), (3, 2, (1, 1)), (3, 2, (0, 1)), (1, 2, (0, 0)), (2, 2, (0, 0)), (5, 1, (2, 2)),
    (7, 2, (3, 3)), (4, 2, (1, 1)), (2, 1, (0, 1)), (2, 1, (1, 0)),
])  # fmt: skip
@pytest.mark.parametrize("n", [2, 4])
def test_a_convolution_of_a_cut_image(kernel, stride, pads, n):
    own = call("Conv", "x", "w", "b", strides=(stride,) * 2, pads=(pads[0],) * 2 + (pads[1],) * 2)
    tensors = [normal(2, 3, 16, 8), normal(4, 3, kernel, kernel, seed=1), normal(4, seed=2)]
    assert check("Conv", own, [0], tensors, "S2,R,R->S2 @halo", n) == 3


def test_a_convolution_with_gaps_and_pads_by_its_own_rule():
    own = call("Conv", "x", "w", strides=(2, 2), dilations=(2, 2), auto_pad="SAME_LOWER")
    tensors = [normal(2, 3, 16, 24), normal(4, 3, 3, 3, seed=1)]
    assert check("Conv", own, [0], tensors, "S3,R->S3 @halo", 4) == 2


KINDS = {
    "MaxPool": {"num_outputs": 1},
    "LpPool": {"p": 3},
    "AveragePool": {"count_include_pad": 0},
    "AveragePool with pads": {"count_include_pad": 1},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("kernel", "stride", "pads", "ceil"), [
    (3, 1, (1, 1), 0), (3, 2, (1, 1), 0), (3, 2, (0, 1), 0), (3, 2, (1, 0), 1), (2, 1, (1, 0), 0),
])  # fmt: skip
@pytest.mark.parametrize("n", [2, 4])
def test_pooling_of_a_cut_image(kind, kernel, stride, pads, ceil, n):
    own = call(
        kind.split()[0], "x", kernel_shape=(kernel,) * 2, strides=(stride,) * 2, ceil_mode=ceil,
        pads=(pads[0],) * 2 + (pads[1],) * 2, **KINDS[kind],
    )  # fmt: skip
    check(kind.split()[0], own, [0], [normal(2, 3, 16, 8)], "S2->S2 @halo", n)


def test_an_image_that_is_cut_both_ways_has_its_corners():
    """2 x 2 devices: rows over the outer axis, columns over the inner one. A device's place on one
    line is that of the other line's number, so both lines are made of one board each.
    """
    x, w = normal(1, 2, 8, 8), normal(3, 2, 3, 3, seed=1)
    whole = functional.conv2d(x, w, padding=1)
    rows = [shares(one, "S3", 2, None) for one in shares(x, "S2", 2, None)]
    grid = {}

    def row(outer):
        def column(inner):
            grid[outer.rank, inner.rank] = MARKED[HALO, "Conv"](
                rows[outer.rank][inner.rank], w, pads=(1, 1, 1, 1),
                cuts=(Cut(Both(outer, inner), 2), Cut(inner, 3)),
            )  # fmt: skip

        return on_threads(2, column)

    class Both:
        """The outer line of one inner place: the two columns take turns on the one board."""

        def __init__(self, outer, inner):
            self.rank, self.size, self.outer, self.inner = outer.rank, outer.size, outer, inner

        def exchange(self, before, after):
            every = self.inner.board.meet(self.inner.rank, (before, after))
            front, back = (torch.stack(side) for side in zip(*every, strict=True))
            if self.inner.rank == 0:
                got = self.outer.exchange(front, back)
                self.inner.board.meet(0, got)
            else:
                got = self.inner.board.meet(1, None)[0]
            return got[0][self.inner.rank], got[1][self.inner.rank]

    on_threads(2, row)
    made = together([together([grid[i, j] for j in (0, 1)], "S3") for i in (0, 1)], "S2")
    torch.testing.assert_close(made, whole, rtol=1e-12, atol=1e-12)


# ---- a vocabulary


@pytest.mark.parametrize("n", [2, 4])
def test_an_embedding_from_a_cut_table(n):
    ids = torch.tensor([[0, 7, -1], [3, 3, 5]])
    own = call("Gather", "data", "indices", axis=0, padding_idx=3)
    assert check("Gather", own, [0], [normal(8, 5), ids], "S0,R->P @rows", n) == 1


def test_columns_from_a_cut_matrix():
    own = call("Gather", "data", "indices", axis=1)
    ids = torch.tensor([5, 0, 2])
    assert check("Gather", own, [0], [normal(4, 6, 2), ids], "S1,R->P @rows", 3) == 1


@pytest.mark.parametrize(("n", "scale"), list(product([2, 4], [1.0, 1e4])))
def test_the_cross_entropy_of_a_cut_vocabulary(n, scale):
    scores, classes = normal(5, 8) * scale, torch.tensor([0, 7, 3, -100, 4])
    whole = scores.clone().requires_grad_()
    loss = functional.cross_entropy(whole, classes, reduction="sum")
    (slope,) = torch.autograd.grad(3.0 * loss, whole)
    local = shares(scores, "S1", n, None)

    def work(line):
        own = local[line.rank].clone().requires_grad_()
        made = cross_entropy(own, classes, line)
        return made.detach(), torch.autograd.grad(3.0 * made, own)[0]

    done = on_threads(n, work)
    for made, _ in done:
        torch.testing.assert_close(made, loss.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(together([d[1] for d in done], "S1"), slope, rtol=1e-12, atol=1e-12)


# ---- statistics of a dimension that is cut

IMAGE = normal(4, 3, 8, 8) * 3 + 5
OF_CHANNELS = [normal(3, seed=seed) for seed in (1, 2, 3)] + [normal(3, seed=4).abs()]


def batch_norm():
    return call(
        "BatchNormalization", "x", "scale", "b", "mean", "var", epsilon=1e-5, momentum=0.9,
        training_mode=1, num_outputs=1, read_outputs=(True,),
    )  # fmt: skip


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("dim", [0, 2, 3])
def test_a_batch_normalization_by_the_statistics_of_all(dim, n):
    line = f"S{dim},R,R,R,R->S{dim} @moments"
    tensors = [IMAGE, *OF_CHANNELS]
    assert check("BatchNormalization", batch_norm(), [0], tensors, line, n, still=(3, 4)) == 3


def test_running_statistics_are_updated_as_by_pytorch_and_not_by_those_of_a_part():
    expected = torch.nn.BatchNorm2d(3, dtype=torch.float64)
    expected(IMAGE)

    def after(function):
        def work(line):
            x = shares(IMAGE, "S0", 4, None)[line.rank]
            mean, var = torch.zeros(3).double(), torch.ones(3).double()
            ones, zeros = torch.ones(3).double(), torch.zeros(3).double()
            with updating([mean, var]):
                function(x, ones, zeros, mean, var, 1e-5, line)
            return mean, var

        return on_threads(4, work)

    def synchronised(*args):
        *given, line = args
        MARKED[MOMENTS, "BatchNormalization"](
            *given, training_mode=1, num_outputs=1, read_outputs=(True,), cuts=(Cut(line, 0),)
        )

    def apart(*args):
        *given, _ = args
        batch_normalization(*given, training_mode=1, num_outputs=1, read_outputs=(True,))

    due = expected.running_mean, expected.running_var
    for found in after(synchronised):
        torch.testing.assert_close(found, due, rtol=1e-12, atol=1e-12)
    assert any(not torch.allclose(found[0], due[0], rtol=1e-3) for found in after(apart))


def test_in_evaluation_a_part_asks_nobody():
    x = shares(IMAGE, "S0", 2, None)[0]
    with evaluating():
        found = MARKED[MOMENTS, "BatchNormalization"](
            x, *OF_CHANNELS, 1e-5, training_mode=1, num_outputs=1, read_outputs=(True,),
            cuts=(Cut(None, 0),),
        )  # fmt: skip
    scale, b, mean, var = OF_CHANNELS
    due = functional.batch_norm(x, mean, var, scale, b)
    torch.testing.assert_close(found, due, rtol=1e-12, atol=1e-12)


def test_statistics_far_from_zero_lose_no_digits():
    """float32 numbers around 1,000 with deviation 1: sums of squares in float32 would have two."""
    x = (normal(8, 2, 16, 16) + 1000).float()
    ones, zeros = torch.ones(2), torch.zeros(2)
    given = {"training_mode": 1, "num_outputs": 1, "read_outputs": (True,)}

    def work(line):
        own = shares(x, "S0", 4, None)[line.rank]
        return MARKED[MOMENTS, "BatchNormalization"](
            own, ones, zeros, zeros.clone(), ones.clone(), 1e-5, cuts=(Cut(line, 0),), **given
        )

    due = functional.batch_norm(x.double(), None, None, training=True)
    found = together([*on_threads(4, work)], "S0").double()
    torch.testing.assert_close(found, due, rtol=2e-3, atol=2e-3)


NORMS = {
    "LayerNormalization": ("S2,S0,S0->S2", {"scale": 8, "b": 8}, {"axis": -1, "num_outputs": 1}),
    "LayerNormalization of two dimensions": (
        "S1,S0->S1", {"scale": (4, 8)}, {"axis": 1, "num_outputs": 1}
    ),
    "RMSNormalization": ("S2,S0->S2", {"scale": 8}, {"axis": -1}),
    "GroupNormalization": (
        "S2,R,R->S2", {"scale": 4, "bias": 4}, {"num_groups": 2, "version": 21}
    ),
    "InstanceNormalization": ("S2,R,R->S2", {"scale": 4, "b": 4}, {}),
}  # fmt: skip


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", NORMS)
def test_a_normalization_along_a_dimension_that_is_cut(name, n):
    kind, (line, shapes, options) = name.split()[0], NORMS[name]
    x = "input" if kind == "InstanceNormalization" else "x"
    own = call(kind, x, *shapes, epsilon=1e-5, **options)
    sizes = [one if isinstance(one, tuple) else (one,) for one in shapes.values()]
    tensors = [normal(2, 4, 8) + 2, *(normal(*size, seed=i) for i, size in enumerate(sizes, 1))]
    assert check(kind, own, [0], tensors, f"{line} @moments", n) == len(tensors)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("scale", [1.0, 1e3])
@pytest.mark.parametrize("kind", ["Softmax", "LogSoftmax"])
def test_shares_of_a_sum_over_a_dimension_that_is_cut(kind, scale, n):
    own = call(kind, "input", axis=-1, version=13)
    assert check(kind, own, [0], [normal(2, 3, 8) * scale], "S2->S2 @moments", n) == 1
