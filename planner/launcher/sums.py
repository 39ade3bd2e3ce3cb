"""The sums of a device's gradients, started within the backward that makes the last of them."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from planner.launcher import clocks
from planner.launcher.gradients import GradientBuffers
from planner.launcher.world import PostedTransfer, World
from planner.schedules.actions import Action, AllReduce, Compute, Direction


class BucketSums:
    """Sums one bucket after the other over the devices that have it, in the order of the action
    list, as the simulator has it (`schedules/rules_kernels.py`). A sum starts when the backward
    before it has made all gradients of the bucket, or when the device comes to its action.

    Args:
        actions: of the device; all-reduces have the numbers of their buckets.
        gradients: of the device's trainable parameters.
        world: the other devices.
        scatter: makes the gradients of the shards of a bucket out of those of its parameters, on
            this device and the others of its mesh; see `split/states.py`.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        gradients: GradientBuffers,
        world: World,
        scatter: Callable[[int], None] | None = None,
    ) -> None:
        self._gradients, self._world, self._scatter = gradients, world, scatter
        self._closing: dict[Compute, tuple[int, ...]] = {}
        self._sizes: dict[int, int] = {}
        self._due: deque[int] = deque()  # sums of the backward that runs, which are not started
        self._missing: dict[int, int] = {}  # how many gradients of each of them are not there yet
        self._started: dict[int, list[PostedTransfer]] = {}
        self._free_s = 0.0  # end of the last sum
        self.follow(actions)

    def follow(self, actions: Sequence[Action]) -> None:
        """Takes another list of the device."""
        self._closing = closing_backwards(actions)
        early = {index for due in self._closing.values() for index in due}
        for index in sorted(early - self._sizes.keys()):
            self._sizes[index] = len(self._gradients.parameters(index))
            self._gradients.listen(index, partial(self._made, index))

    def begin(self, compute: Compute) -> None:
        """A backward is about to begin: sums that come right after it may start within it."""
        self._due = deque(self._closing.get(compute, ()))
        self._missing = {index: self._sizes[index] for index in self._due}

    def _made(self, index: int, _: Tensor) -> None:
        """The backward has added up a gradient of a bucket."""
        if index in self._missing:
            self._missing[index] -= 1
            while self._due and not self._missing[self._due[0]]:
                self._start(self._due.popleft())

    def _start(self, index: int) -> None:
        self._gradients.silence(index)
        if self._gradients.is_kept_in_parts(index):
            self._started[index] = []  # a reduce-scatter waits until nothing else is done
            return
        buffers = self._gradients.buffers(index)
        self._started[index] = [self._world.start_sum(one, index) for one in buffers]

    def finish(self, index: int) -> tuple[float, float]:
        """Waits until a bucket is summed; gives start and end on this process's clock."""
        # The backward has left out a gradient of this bucket, or of one before it.
        while self._due and index not in self._started:
            self._start(self._due.popleft())
        if index not in self._started:
            self._start(index)
        posted = self._started.pop(index)
        if self._gradients.is_kept_in_parts(index):
            return self._scattered(index)
        start_s = max(self._free_s, posted[0].posted_s)
        self._free_s = max(self._world.finish(one) for one in posted)
        return start_s, self._free_s

    def _scattered(self, index: int) -> tuple[float, float]:
        """A sum of which each device keeps a part: a reduce-scatter over the devices of the mesh,
        and a sum of the parts over those that keep the same.
        """
        start_s = max(self._free_s, clocks.now_s())
        assert self._scatter is not None, "only meshes keep parts"
        self._scatter(index)
        if self._world.sums_parts(index):
            for one in [self._world.start_sum(b, index) for b in self._gradients.parts(index)]:
                self._world.finish(one)
        self._free_s = clocks.now_s()
        return start_s, self._free_s


def closing_backwards(actions: Sequence[Action]) -> dict[Compute, tuple[int, ...]]:
    """The sums of a list by the last backward before them; none where a device runs several stages,
    which makes gradients of one bucket in several backwards.
    """
    closing: dict[Compute, tuple[int, ...]] = {}
    if len({one.stage for one in actions if isinstance(one, Compute)}) > 1:
        return closing
    latest: Compute | None = None
    for action in actions:
        if isinstance(action, Compute) and action.direction is Direction.BACKWARD:
            latest = action
        elif isinstance(action, AllReduce) and latest is not None:
            closing[latest] = (*closing.get(latest, ()), action.sum)
    return closing
