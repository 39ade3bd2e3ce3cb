"""Products whose backward has two parts: bit for bit what autograd makes of them in one."""

from functools import partial

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from planner.launcher.mesh.late_gradients import ProductInTwo, late_parameters

SIZE = 12


class Pause(torch.autograd.Function):
    """Stands for the end of a copy: notes when its backward runs."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.seen.append("input")
        return gradient, None


def gradients(function, x, parameters, *, late, autocast=False):
    """The output, the gradients of x and of parameters, and the order in which they were there."""
    x = x.clone().requires_grad_()
    parameters = [one.clone().requires_grad_() for one in parameters]
    seen = []
    for one in parameters:
        one.register_post_accumulate_grad_hook(lambda _: seen.append("parameter"))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
        held = late_parameters(*parameters)
        copy = Pause.apply(x, seen)
        product = partial(ProductInTwo(function), held) if late else function
        y = product(copy, *parameters)
        y.sin().sum().backward()
    return [y.detach(), x.grad, *(one.grad for one in parameters)], seen


PRODUCTS = {
    "linear": (lambda x, w, b: functional.linear(x, w, b), [(SIZE, SIZE), (SIZE,)]),
    "matmul": (lambda x, w: x @ w.t(), [(SIZE, SIZE)]),
    "twice": (lambda x, w: x @ w + x.flip(0) @ w.t(), [(SIZE, SIZE)]),
    "convolution": (
        lambda x, w: functional.conv2d(x.view(1, 3, SIZE, 3, 1)[..., 0], w, padding=1),
        [(4, 3, 3, 3)],
    ),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_both_parts_give_what_one_gives(name, autocast):
    function, shapes = PRODUCTS[name]
    torch.manual_seed(0)
    x, parameters = torch.randn(9, SIZE), [torch.randn(shape) for shape in shapes]
    expected, before = gradients(function, x, parameters, late=False, autocast=autocast)
    found, order = gradients(function, x, parameters, late=True, autocast=autocast)
    assert all(map(torch.equal, found, expected))
    assert order == ["input", *["parameter"] * len(parameters)]
    assert order == before[::-1]


def test_a_weight_of_two_products_gets_both_gradients():
    torch.manual_seed(0)
    w = torch.randn(SIZE, SIZE, requires_grad=True)
    x = torch.randn(5, SIZE, requires_grad=True)

    def total(product):
        return product(product(x).tanh()).square().sum()

    total(lambda one: one @ w).backward()
    expected, w.grad = w.grad, None
    total(lambda one: ProductInTwo(torch.matmul)(late_parameters(w), one, w)).backward()
    torch.testing.assert_close(w.grad, expected, rtol=1e-6, atol=1e-6)


def test_frozen_parameters_and_inputs_by_name():
    x, w = torch.randn(5, SIZE, requires_grad=True), torch.randn(SIZE, SIZE)
    b = torch.randn(SIZE, requires_grad=True)
    product = ProductInTwo(functional.linear)
    product(late_parameters(w, b), x, weight=w, bias=b).sum().backward()
    assert torch.equal(b.grad, torch.full((SIZE,), 5.0))
    torch.testing.assert_close(x.grad, w.sum(0).expand(5, SIZE))
    with torch.no_grad():
        assert not product(late_parameters(w, b), x, w, b).requires_grad


def test_neither_the_output_nor_the_graph_is_held():
    """Between forward and backward nobody but their reader holds the output; afterwards nobody
    holds what was saved.
    """
    x, w = torch.randn(5, SIZE, requires_grad=True), torch.randn(SIZE, SIZE, requires_grad=True)
    copy = x * 2
    y = ProductInTwo(torch.matmul)(late_parameters(w), copy, w)
    total = y.sum()
    output, saved = (StorageWeakRef(one.untyped_storage()) for one in (y, copy))
    del y, copy
    assert output.expired() and not saved.expired()
    total.backward()
    assert saved.expired()
