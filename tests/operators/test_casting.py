"""Copies of weights under autocast: one per step, with the gradients of conversions."""

import torch
from torch import nn

from planner.operators import to_torch
from planner.operators.casting import WeightCast, cast_once
from planner.operators.running import autocast
from tests.profilers.test_profilers import read

TEXT = """agraph (float[3,8] x) => (float[3,8] y) {
    h = MatMul (x, w)
    b = Add (h, bias)
    g = Gemm (b, v, bias)
    y = Mul (g, bias)
}"""


def loaded(folder):
    """Two products; a vector that a product, a sum and a factor read."""
    return read(folder, TEXT, {"w": (8, 8), "v": (8, 8), "bias": 8})


def test_products_alone_read_copies(tmp_path):
    model = loaded(tmp_path)
    module = to_torch(model)
    casts = cast_once(module, model.graph)
    assert sorted(name for _, name in casts) == ["bias", "v", "w"]
    x = torch.randn(3, 8)
    whole = module(x)
    assert all(cast.kept is None for cast, _ in casts)
    with autocast("cpu", "bfloat16"):
        module(x)
    assert {cast.kept.dtype for cast, _ in casts} == {torch.bfloat16}
    assert torch.equal(to_torch(model)(x)[0], whole[0])


def test_gradients_are_those_of_autocast_without_copies_that_stay(tmp_path):
    model = loaded(tmp_path)
    usual, kept = to_torch(model), to_torch(model)
    cast_once(kept, model.graph)
    for seed in range(3):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))
        for module in (usual, kept):
            with autocast("cpu", "bfloat16"):
                (y,) = module(x)
            y.float().square().sum().backward()
    for one, other in zip(usual.parameters(), kept.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_microbatches_in_flight_share_a_copy_until_it_is_cleared():
    weight, cast = nn.Parameter(torch.randn(4, 4)), WeightCast()
    with autocast("cpu", "bfloat16"):
        first, second = cast(weight), cast(weight)
    place = first.untyped_storage().data_ptr()
    assert second.untyped_storage().data_ptr() == place
    cast.clear()
    with torch.no_grad():
        weight.add_(1)
    with autocast("cpu", "bfloat16"):
        third = cast(weight)
    assert third.untyped_storage().data_ptr() != place
    assert torch.equal(third, weight.detach().bfloat16())
    assert torch.equal(first, second)


def test_a_copy_of_another_weight_is_not_taken():
    """Under asynchronous schedules a module reads weights of several versions."""
    cast, old, new = WeightCast(), nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))
    with autocast("cpu", "bfloat16"):
        assert [cast(one).sum().item() for one in (old, new, old)] == [0, 2, 0]
