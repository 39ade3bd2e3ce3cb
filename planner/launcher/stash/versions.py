"""The versions of a stage's parameters, so that each backward meets the weights of its forward.

The optimizer steps the parameters themselves, in place. A forward runs with *leaves* instead: one
tensor per parameter that shares the parameter's memory and gradient, but whose changes autograd
counts for themselves. Autograd keeps the leaves, so the backward meets them too; a stage that
recomputes is given them once more. While a minibatch still needs the newest version, the next step
must not change it. So the parameters move to other memory before that step, and the leaves stay:

    memory 0    v0 v0 v0 v3 v3 v3     a version stays until the last minibatch that uses it has
    memory 1       v1 v1 v1 v4 v4     run its backward; then its memory is free for the next one
    memory 2          v2 v2 v2 v5     that has to be kept apart

So there are as many copies as versions are in use at once. A version that no minibatch needs any
more is stepped in place: with one minibatch in flight nothing is ever copied.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from planner.launcher.gradients import GradientBuckets

Leaves = tuple[Tensor, ...]


class CurrentWeights:
    """The weights of a schedule under which every pass meets the newest."""

    def step(self, change: Callable[[], object]) -> None:
        """Changes the parameters in place."""
        change()

    def tensors(self) -> Iterator[Tensor]:
        """All memory of weights besides the parameters: none."""
        return iter(())


class Versions:
    """The trained parameters of one stage on one device, in the versions that minibatches need.

    Attributes:
        newest: the number of the newest version, which is the number of steps in this flow.

    Args:
        module: that holds the parameters.
        trained: the parameters that are stepped, by name.
        gradients: of these.
    """

    def __init__(
        self, module: nn.Module, trained: Mapping[str, Tensor], gradients: GradientBuckets
    ) -> None:
        self._gradients = gradients
        self._places = _places(module, trained)
        self._parameters = [place[-1] for place in self._places]
        self.newest = 0
        self._leaves: dict[int, Leaves] = {}  # by version
        self._spare: list[Leaves] = []
        self._used: Sequence[int] = ()  # the version of each minibatch
        self._left: Counter[int] = Counter()  # minibatches to run backward yet, by their version

    @property
    def kept(self) -> int:
        """The number of versions that are kept, the newest one among them."""
        return len(self._leaves)

    def tensors(self) -> Iterator[Tensor]:
        """All memory of versions, that of the parameters among it."""
        for leaves in (*self._leaves.values(), *self._spare):
            yield from leaves

    def begin(self, used: Sequence[int]) -> None:
        """A flow begins; the parameters as they are now are its version 0.

        Args:
            used: the version that each minibatch of this device uses, in their order.
        """
        assert not self._left.total(), "the flow before has run to its end"
        leaves = self._leaves.pop(self.newest, None) or self._made()
        self._leaves, self.newest = {0: leaves}, 0
        self._used, self._left = used, Counter(used)

    @contextmanager
    def forward(self, turn: int) -> Iterator[None]:
        """While the forward of the k-th minibatch runs; it uses its version."""
        with self._in_place(self._used[turn]):
            yield

    @contextmanager
    def backward(self, turn: int) -> Iterator[None]:
        """While the backward of the k-th minibatch runs; it uses the version of its forward."""
        version = self._used[turn]
        with self._in_place(version):
            yield
        self._left[version] -= 1
        if version < self.newest and not self._left[version]:
            self._spare.append(self._leaves.pop(version))

    def step(self, change: Callable[[], object]) -> None:
        """Makes the next version.

        Args:
            change: changes the parameters in place.
        """
        stays = self._left[self.newest] > 0
        leaves = self._moved() if stays else self._leaves.pop(self.newest)
        change()
        self.newest += 1
        self._leaves[self.newest] = leaves

    def _made(self) -> Leaves:
        """Leaves that share the memory of the parameters."""
        leaves = tuple(one.data.requires_grad_() for one in self._parameters)
        for parameter, leaf in zip(self._parameters, leaves, strict=True):
            self._gradients.adopt(parameter, leaf)
        return leaves

    def _moved(self) -> Leaves:
        """Moves the parameters to memory of no version; gives the leaves that share it.

        The parameters are the optimizer's: they are never replaced, only their memory is. Passes
        run with leaves alone, so no autograd graph holds a parameter, and to assign its `data` is
        safe.
        """
        if not self._spare:
            for parameter in self._parameters:
                parameter.data = parameter.data.clone()
            return self._made()
        leaves = self._spare.pop()
        for parameter, leaf in zip(self._parameters, leaves, strict=True):
            parameter.data = leaf.data.copy_(parameter.data)
        return leaves

    @contextmanager
    def _in_place(self, version: int) -> Iterator[None]:
        """Puts the leaves of a version where the module looks for its parameters."""
        for (owner, name, _), leaf in zip(self._places, self._leaves[version], strict=True):
            owner._parameters[name] = leaf  # type: ignore[assignment]
        try:
            yield
        finally:
            for owner, name, parameter in self._places:
                owner._parameters[name] = parameter


def _places(
    module: nn.Module, trained: Mapping[str, Tensor]
) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Where a module holds the parameters that are trained: submodule, name there, parameter."""
    known = {id(one) for one in trained.values()}
    return [
        (owner, name, one)
        for owner in module.modules()
        for name, one in owner.named_parameters(recurse=False)
        if id(one) in known
    ]


Weights = CurrentWeights | Versions
"""The weights of a device's stages, which its optimizer changes."""
