"""Every loss against torch.nn.functional, value and gradient, divided by its total."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from planner.artefacts.graph import LossChoice
from planner.artefacts.losses import losses
from planner.operators.losses import criterion, num_counted
from planner.support.errors import LaunchError
from tests.model.test_losses import one_output, with_loss

SHAPE = (3, 5, 4)


def value_and_gradient(compute, output, target):
    leaf = output.clone().requires_grad_()
    loss = compute(leaf, target)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss, gradient


def mean(loss):
    """The loss of a microbatch alone."""

    def divided(output, target):
        value, counted = criterion(loss)(output, target)
        counted = num_counted(target) if loss.counts_targets else counted
        return value if counted is None else value / counted

    return divided


def same(loss, expected, output, target):
    found = value_and_gradient(mean(loss), output, target)
    torch.testing.assert_close(found, value_and_gradient(expected, output, target))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("mse", functional.mse_loss),
        ("l1", functional.l1_loss),
        ("smooth-l1", functional.smooth_l1_loss),
        ("huber", functional.huber_loss),
        ("bce", functional.binary_cross_entropy_with_logits),
    ],
)
def test_losses_of_values(function, expected):
    (loss,) = losses(with_loss(one_output("Add", SHAPE), function))
    same(loss, expected, torch.randn(SHAPE), torch.rand(SHAPE))


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_losses_of_classes_over_any_dimension(dim):
    output = torch.randn(SHAPE)
    target_shape = [n for i, n in enumerate(SHAPE) if i != dim % 3]
    target = torch.randint(SHAPE[dim], target_shape)
    target.view(-1)[0] = -100  # ignored
    for function, expected in (
        ("cross-entropy", functional.cross_entropy), ("nll", functional.nll_loss),
    ):  # fmt: skip
        (loss,) = losses(with_loss(one_output("Add", SHAPE), function, dim))
        same(loss, lambda x, t, f=expected: f(x.movedim(dim, 1), t), output, target)


@pytest.mark.parametrize("shape", [(2, 5), (2, 3, 5), (2, 5, 3, 4)])
@pytest.mark.parametrize(
    ("type_", "last"),
    [
        ("Gemm", lambda x, dim: x),
        ("Softmax", torch.softmax),
        ("LogSoftmax", torch.log_softmax),
    ],
)
def test_cross_entropy_of_logits_probabilities_and_their_logarithms(shape, type_, last):
    dim = 2 if len(shape) == 3 else 1
    logits = torch.randn(shape)
    (loss,) = losses(with_loss(one_output(type_, shape), "cross-entropy"))
    target = torch.randint(5, loss.target_shape)
    expected = functional.cross_entropy(logits.movedim(dim, 1), target)
    found = mean(loss)(last(logits, dim), target)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


def test_binary_cross_entropy_of_probabilities():
    (loss,) = losses(with_loss(one_output("Sigmoid", SHAPE), "bce"))
    logits, target = torch.randn(SHAPE), torch.rand(SHAPE)
    expected = functional.binary_cross_entropy_with_logits(logits, target)
    torch.testing.assert_close(mean(loss)(logits.sigmoid(), target), expected)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_an_own_loss_is_the_output(shape):
    (loss,) = losses(with_loss(one_output("ReduceMean", shape), "own"))
    assert mean(loss)(torch.full(shape, 2.5), None).item() == 2.5
    assert mean(loss)(torch.full(shape, 2.5).bfloat16(), None).dtype == torch.float32


@pytest.fixture
def users(tmp_path, monkeypatch):
    """The loss of a user's function, by its body."""
    monkeypatch.chdir(tmp_path)

    def make(body, name):
        (tmp_path / f"{name}.py").write_text(f"def f(output, target):\n    {body}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        graph = replace(one_output("Gemm", (2, 5)), losses=(LossChoice("y", f"{name}:f"),))
        return losses(graph)[0]

    return make


def test_the_users_function_computes_the_loss(users):
    loss = users("return ((output.softmax(1).gather(1, target[:, None])) ** 2).mean()", "focal_a")
    assert (loss.class_dim, loss.target_shape) == (1, (2,))  # as auto would choose
    expected = lambda x, t: (x.softmax(1).gather(1, t[:, None]) ** 2).mean()  # noqa: E731
    same(loss, expected, torch.randn(2, 5), torch.tensor([1, 4]))


@pytest.mark.parametrize("count", ["known.sum()", "int(known.sum())", "known.sum().double()"])
def test_the_users_function_may_say_how_much_it_counts(users, count):
    body = (
        "known = target != 9; picked = output.log_softmax(-1).gather(-1, target.where(known, 0)"
        f"[:, None])[:, 0]; return -(picked * known).sum(), {count}"
    )
    loss = users(body, f"counted_{abs(hash(count))}")
    expected = lambda x, t: functional.cross_entropy(x, t, ignore_index=9)  # noqa: E731
    same(loss, expected, torch.randn(2, 5), torch.tensor([9, 4]))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return output.sum(1)", "expected a scalar float tensor, got shape [2] and torch.float32"),
        ("return 1.0", "expected a scalar float tensor, got float"),
        ("return output.argmax()", "got shape [] and torch.int64"),
        ("return output.detach().sum()", "depends differentiably on the output"),
        ("return output.nothing", "AttributeError"),
        ("return output.sum(), 2, 3", "expected a scalar or (sum, count), got 3 values"),
        ("return output, 2", "expected a scalar float tensor, got shape [2, 5]"),
        (
            "return output.sum(), -1.0",
            "expected (sum, count) with a finite count of at least 0, got -1.0",
        ),
        (
            "return output.sum(), target",
            "with a finite count of at least 0, got shape [2] and torch.int64",
        ),
        ("return output.sum(), output.sum() ** 2", "expected a count without a gradient"),
    ],
)
def test_a_users_function_that_gives_no_loss_is_one_message(users, body, message):
    name = f"wrong_{abs(hash(body))}"
    compute = criterion(users(body, name))
    with pytest.raises(LaunchError) as error:
        compute(torch.randn(2, 5).requires_grad_(), torch.tensor([1, 4]))
    assert message in str(error.value) and f"--loss {name}:f" in str(error.value)


def test_a_users_function_that_is_not_there_is_one_message():
    (loss,) = losses(with_loss(one_output("Gemm", (2, 5)), "no_such_module:f"))
    with pytest.raises(LaunchError, match="--loss no_such_module:f: ModuleNotFoundError"):
        criterion(loss)
