"""Parameters that are gathered again under autocast: bit for bit what whole ones give."""

import pytest
import torch
from torch.nn import functional

from planner.launcher.mesh.convert import Conversion, finished
from planner.launcher.mesh.gather_again import RegatheredOperator
from planner.resharding import conversion
from tests.support.threads import on_all

IN, OUT = 8, 6


def by(function, weight, x):
    """What a function makes, and the gradients of the weight and of the input."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        y = function(weight, x)
    y.float().square().sum().backward()
    return y.detach(), weight.grad, x.grad


@pytest.mark.parametrize("function", [
    lambda weight, x: functional.linear(x, weight),
    lambda weight, x: functional.linear(x, weight[1:5]),
    lambda weight, x: torch.matmul(x, weight.t()),
    lambda weight, x: functional.linear(x, weight) + functional.linear(x.flip(0), weight),
], ids=["whole", "part", "view", "twice"])  # fmt: skip
@pytest.mark.parametrize("sent", [None, torch.bfloat16])
def test_products_under_autocast_keep_no_copy(function, sent):
    """Also where parts of the weight are converted first, and gathered in the shorter type."""
    torch.manual_seed(0)
    weight, x = torch.randn(OUT, IN), torch.randn(5, IN)
    expected = by(function, weight.clone().requires_grad_(), x)
    there = conversion(weight.shape, 4, (2,), ("S0",), ("R",))
    back = conversion(weight.shape, 4, (2,), ("P",), ("S0",))

    def on_one(mesh):
        home = weight.chunk(2)[mesh.index].clone().requires_grad_()
        convert = Conversion("w", mesh, there, back)
        convert.dtype, convert.gradient_dtype = sent, torch.float32
        again = RegatheredOperator(lambda w, x: function(w, x), [convert], is_product=True)

        def gathered(home, x):
            copy = finished(convert(home))
            assert copy.dtype == (sent or torch.float32)
            return again([(home, copy)], copy, x)

        return by(gathered, home, x)

    found, counts = on_all((2,), on_one)
    assert counts == [{"all-gather": 2, "reduce-scatter": 1}]
    for i, (y, of_weight, of_x) in enumerate(found):
        assert torch.equal(y, expected[0])
        assert torch.equal(of_weight, 2 * expected[1].chunk(2)[i])  # both devices had all samples
        assert torch.equal(of_x, expected[2])
