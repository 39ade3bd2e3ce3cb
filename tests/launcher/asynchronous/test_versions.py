"""Versions of a stage's parameters, beside the same weights kept as plain copies."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from planner.artefacts.strategy import GradientSum
from planner.launcher.gradients import GradientBuckets
from planner.launcher.stash.versions import Versions

COUNT = 9


def module_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def order(warmup, count):
    """The passes of a replica: W forwards, then a backward and a forward in turn."""
    ahead = min(warmup, count)
    yield from (("F", k) for k in range(ahead))
    for k in range(count):
        yield "B", k
        if k + ahead < count:
            yield "F", k + ahead


class Stage:
    """A module with its versions, and SGD with momentum on the parameters."""

    def __init__(self, sums=()):
        self.module = module_of()
        self.trained = dict(self.module.named_parameters())
        self.gradients = GradientBuckets(self.trained, sums, SimpleNamespace(device=0))
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.3, momentum=0.9)
        self.versions = Versions(self.module, self.trained, self.gradients)

    def flow(self, warmup, count, version_of, heard=lambda event, k: None):
        """Runs minibatches; gives the gradients of each, and the most versions that were kept."""
        self.versions.begin([version_of(k) for k in range(count)])
        losses, found, most = {}, [], 0
        for event, k in order(warmup, count):
            if event == "F":
                with self.versions.forward(k):
                    losses[k] = loss_of(self.module, k)
            else:
                with self.versions.backward(k):
                    losses.pop(k).backward()
                found.append({n: p.grad.clone() for n, p in self.trained.items()})
                self.versions.step(self.optimizer.step)
                self.gradients.clear()
            most = max(most, self.versions.kept)
            heard(event, k)
        return found, most


def loss_of(module, k):
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
    return (module(x) ** 2).sum()


def by_copies(module, version_of, flows):
    """The same with a deep copy of the weights for each version; gradients of each minibatch."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9)
    found = []
    for count in flows:
        kept = [{n: p.detach().clone() for n, p in module.named_parameters()}]
        for k in range(count):
            old = {n: p.clone().requires_grad_() for n, p in kept[version_of(k)].items()}
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
            (torch.func.functional_call(module, old, x) ** 2).sum().backward()
            for name, parameter in module.named_parameters():
                parameter.grad = old[name].grad
            found.append({n: p.grad for n, p in old.items()})
            optimizer.step()
            kept.append({n: p.detach().clone() for n, p in module.named_parameters()})
    return found


@pytest.mark.parametrize("warmup", [1, 2, 4])
def test_each_backward_meets_the_weights_of_its_forward(warmup):
    def version_of(k):
        return max(0, k - warmup + 1)

    stage, plain = Stage(), module_of()
    found = [one for count in (COUNT, 5) for one in stage.flow(warmup, count, version_of)[0]]
    expected = by_copies(plain, version_of, (COUNT, 5))
    for got, wanted in zip(found, expected, strict=True):
        for name, gradient in wanted.items():
            torch.testing.assert_close(got[name], gradient, rtol=0, atol=1e-13)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(stage.trained[name], parameter, rtol=0, atol=1e-13)


@pytest.mark.parametrize("warmup", [1, 2, 4])
def test_as_many_versions_are_kept_as_minibatches_are_in_flight(warmup):
    stage = Stage()
    _, most = stage.flow(warmup, COUNT, lambda k: max(0, k - warmup + 1))
    assert most == warmup
    places = {one.untyped_storage().data_ptr() for one in stage.versions.tensors()}
    assert len(places) == warmup * len(stage.trained), "no more memory than versions need"
    assert stage.versions.kept == 1, "the others are over with the flow"


def test_versions_older_than_a_forwards_own_are_kept_for_it():
    """Vertical sync: the version that was new two minibatches before, in a stage with W = 1."""
    stage, plain = Stage(), module_of()
    found, most = stage.flow(1, COUNT, lambda k: max(0, k - 2))
    assert most == 3
    for got, wanted in zip(found, by_copies(plain, lambda k: max(0, k - 2), [COUNT]), strict=True):
        for name, gradient in wanted.items():
            torch.testing.assert_close(got[name], gradient, rtol=0, atol=1e-13)


def test_versions_that_no_minibatch_uses_are_not_kept():
    """Behind a stage of two replicas, with vertical sync: every other version is used."""
    stage = Stage()
    _, most = stage.flow(1, COUNT, lambda k: 2 * max(0, k // 2 - 1))
    assert most == 3


def test_nothing_is_copied_with_one_minibatch_in_flight():
    stage = Stage()
    places = [p.data_ptr() for p in stage.trained.values()]
    stage.flow(1, COUNT, lambda k: k)
    assert [p.data_ptr() for p in stage.trained.values()] == places


def test_between_passes_the_module_has_its_own_parameters():
    stage = Stage()

    def check(event, k):
        held = zip(stage.module.parameters(), stage.trained.values(), strict=True)
        assert all(a is b for a, b in held)

    stage.flow(3, COUNT, lambda k: max(0, k - 2), check)
    stage.versions.begin([0])
    with stage.versions.forward(0):
        assert not any(
            a is b for a, b in zip(stage.module.parameters(), stage.trained.values(), strict=True)
        )


def test_gradients_of_leaves_are_heard_as_those_of_parameters():
    names = tuple(dict(module_of().named_parameters()))
    stage, heard = Stage([GradientSum((0, 1), names, 0)]), []
    stage.gradients.listen(0, heard.append)
    stage.flow(3, COUNT, lambda k: max(0, k - 2))
    assert len(heard) == COUNT * len(names)
