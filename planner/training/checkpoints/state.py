"""The tensors of one device that a checkpoint has, by name: out of a `Trainer`, and into one.

A parameter, and its optimizer's tensors, are written by the first device that holds it: the first
replica of the first stage that reads it. All others have the same values. Running statistics are
those of each replica's own microbatches, so each one writes its own. Parameters that nobody trains
are in the model's file. Where a stage is split, its devices gather their parts, and the first of
them writes the whole, so that a checkpoint does not depend on how a stage was split.

Which random numbers the operators of a model draw depends on the step alone
(`operators/randomness.py`). The generators of torch, numpy and Python are for functions of the
user. A process gets the state of its own back if there are as many processes as there were.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from planner.artefacts.graph import Graph, parameters_by_name
from planner.artefacts.sharding import Spec, local_shape
from planner.artefacts.strategy import operator_indices
from planner.launcher.device_part import DevicePart
from planner.launcher.job import TrainingJob
from planner.resharding.sums import lies_in
from planner.support.errors import FileError, LaunchError
from planner.training.checkpoints.folder import (
    OPTIMIZER,
    PARAMETERS,
    RANDOM,
    STATISTICS,
    Checkpoint,
    Record,
    TensorPlace,
)
from planner.training.trainer import Trainer


def optimizer_name(optimizer: Optimizer | None) -> str | None:
    """The kind of an optimizer, which its tensors belong to; None without one.

    >>> optimizer_name(torch.optim.SGD([torch.zeros(1)], momentum=0.9))
    'SGD with momentum'
    """
    if optimizer is None:
        return None
    momentum = any(group.get("momentum") for group in optimizer.param_groups)
    return f"{type(optimizer).__name__}{' with momentum' if momentum else ''}"


def tensors_to_save(trainer: Trainer, job: TrainingJob) -> dict[str, Tensor]:
    """The tensors that this device writes, by their names in a checkpoint; they are not copied.

    Raises:
        LaunchError: if the optimizer keeps something else than tensors.
    """
    device, part = trainer.groups.device, trainer.part
    holders, stepped = _first_holders(job), trainer.part.optimizer_parameters
    ways = _Ways(part, job.model.graph)
    tensors: dict[str, Tensor] = {}
    for name, value in part.trained.items():
        if device in holders[name][0]:
            tensors |= ways.whole(PARAMETERS + name, name, value)
            for word, kept in _of_optimizer(trainer.optimizer, name, stepped[name]):
                tensors |= ways.whole(word, name, kept, of_state=True)
    for name in _running(part):
        for replica, group in enumerate(holders[name]):
            if device in group:
                tensors |= ways.whole(f"{STATISTICS}{replica}/{name}", name, part.values[name])
    rank = job.plan.ranks.index(device)
    states = _generators(job.device)
    return tensors | {f"{RANDOM}{rank}/{word}": state for word, state in states.items()}


def restore(trainer: Trainer, job: TrainingJob, start: Checkpoint) -> None:
    """Gives this device everything that a checkpoint has for it.

    Raises:
        FileError: if the checkpoint is of another optimizer, or damaged.
    """
    from planner.training.checkpoints.storage import fill

    part, record = trainer.part, start.record
    known = optimizer_name(trainer.optimizer)
    if known is not None and record.optimizer != known:
        raise FileError(
            f"{start.path}: has the state of {record.optimizer or 'no optimizer'}, this launch"
            f" trains with {known}; choose the same optimizer"
        )
    words, ways = record.optimizer_words, _Ways(part, job.model.graph)
    into: dict[str, Tensor] = {}
    stepped, filled = part.optimizer_parameters, list[Callable[[], None]]()
    for name, value in part.trained.items():
        into[PARAMETERS + name], done = ways.to_fill(name, value.detach())
        filled.append(done)
        places = {word: record.tensors[f"{OPTIMIZER}{name}/{word}"] for word in words.get(name, ())}
        kept = _new_state(trainer.optimizer, places, value)
        into |= {f"{OPTIMIZER}{name}/{word}": tensor for word, tensor in kept.items()}
        if trainer.optimizer is not None and kept:
            filled.append(partial(_keep, trainer.optimizer, stepped[name], kept, ways, name))
    statistics = _statistics(part, record, _first_holders(job), trainer.groups.device)
    for saved, (name, value) in statistics.items():
        into[saved], done = ways.to_fill(name, value)
        filled.append(done)
    rank = job.plan.ranks.index(trainer.groups.device)
    states = _new_generators(record, rank) if record.num_ranks == len(job.plan.ranks) else {}
    into |= {f"{RANDOM}{rank}/{word}": state for word, state in states.items()}
    _check_shapes(start, into)
    fill(into, start.path, record.tensors)
    for done in filled:
        done()
    part.shards.refresh()
    _set_generators(states, job.device)
    trainer.restore(record.extras, record.step)


def _check_shapes(start: Checkpoint, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        place = start.record.tensors[name]
        if place.shape != tuple(tensor.shape):
            raise FileError(
                f"{start.path}: {name}: expected the shape {tuple(tensor.shape)}, got"
                f" {place.shape}; take another checkpoint"
            )


def _keep(
    optimizer: Optimizer, stepped: Tensor, kept: dict[str, Tensor], ways: "_Ways", name: str
) -> None:
    """Gives an optimizer what it keeps for a parameter, or this device's parts of it."""
    optimizer.state[stepped] = {
        word: ways.part(name, tensor, of_state=True) for word, tensor in kept.items()
    }


# torch.distributed.checkpoint.state_dict is no help: it names optimizer states by modules, and the
# module of a stage holds parts of them.
class _Ways:
    """The ways between parameters of the model and what this device has of them.

    Args:
        part: of this device.
        graph: the model's.
    """

    def __init__(self, part: DevicePart, graph: Graph) -> None:
        self._known = parameters_by_name(graph)
        self._place = next(iter(part.places.values()))  # in all, parameters lie alike
        self._lies = lies_in(self._place.stage, graph)

    def _spec(self, name: str, *, of_state: bool) -> Spec:
        if of_state and name in self._lies:
            return self._lies[name].state
        return self._place.spec("parameters", name)

    def whole(
        self, saved: str, name: str, tensor: Tensor, *, of_state: bool = False
    ) -> dict[str, Tensor]:
        """What this device writes of a parameter, or of a tensor of the optimizer for it.

        Args:
            saved: its name in a checkpoint.
            name: of the parameter.
        """
        shape, spec = self._known[name].shape, self._spec(name, of_state=of_state)
        if spec and tuple(tensor.shape) == local_shape(shape, spec, self._place.mesh.sizes):
            tensor = self._place.whole(shape, spec, tensor.detach()).cpu()
        return {saved: tensor} if self._place.mesh.index == 0 else {}

    def part(self, name: str, whole: Tensor, *, of_state: bool = False) -> Tensor:
        """The other way round, in memory of its own."""
        if tuple(whole.shape) != self._known[name].shape:
            return whole
        return self._place.part(whole, self._spec(name, of_state=of_state))

    def to_fill(self, name: str, value: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """The tensor to fill for a parameter, and what is to be done afterwards."""
        if value.shape == self._known[name].shape:
            return value, _nothing
        whole = value.new_empty(self._known[name].shape)

        def done() -> None:
            value.copy_(self.part(name, whole))

        return whole, done


def _nothing() -> None:
    """A tensor that was filled in its place needs nothing else."""


def _first_holders(job: TrainingJob) -> dict[str, tuple[tuple[int, ...], ...]]:
    """For each parameter of the model, the devices of the first stage that holds it: those of each
    replica.
    """
    graph = job.model.graph
    index_of = operator_indices(graph)
    holders: dict[str, tuple[tuple[int, ...], ...]] = {}
    for stage in job.plan.strategy.stages:
        for operator in stage.operators:
            for name in graph.operators[index_of[operator]].parameters:
                holders.setdefault(name, stage.groups)
    return holders


def _running(part: DevicePart) -> Iterator[str]:
    """The running statistics of a device that training changes, by name."""
    changing = {id(one) for stage in part.stages.values() for one in stage.running.values()}
    return (name for name, value in part.values.items() if id(value) in changing)


def _statistics(
    part: DevicePart,
    record: Record,
    holders: Mapping[str, tuple[tuple[int, ...], ...]],
    device: int,
) -> dict[str, tuple[str, Tensor]]:
    """The running statistics of a device, with their names in the model, by the names of those that
    it takes over: of the same replica, else of the first one. Normalizations that are frozen now
    take them over, too.
    """
    found = {}
    for name, value in part.values.items():
        own = next((r for r, group in enumerate(holders[name]) if device in group), 0)
        names = (f"{STATISTICS}{replica}/{name}" for replica in (own, 0))
        saved = next((one for one in names if one in record.tensors), None)
        if saved is not None:
            found[saved] = name, value
    return found


# ------------------------------------------------------------------------------- optimizers


def _of_optimizer(
    optimizer: Optimizer | None, name: str, parameter: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """The optimizer's tensors for a parameter, by their names in a checkpoint."""
    kept = {} if optimizer is None else optimizer.state.get(parameter, {})
    for word, value in kept.items():
        if isinstance(value, Tensor):
            yield f"{OPTIMIZER}{name}/{word}", value
        elif value is not None:
            raise LaunchError(
                f"--checkpoint: the state of {type(optimizer).__name__} for {name!r} has {word!r},"
                f" a {type(value).__name__}; expected tensors only: take another optimizer"
            )


def _new_state(
    optimizer: Optimizer | None, places: Mapping[str, TensorPlace], parameter: Tensor
) -> dict[str, Tensor]:
    """The tensors that an optimizer keeps for a parameter, to be filled, by its words for them.

    They are where torch has them: with the parameter, but the count of steps only where steps are
    fused.
    """
    groups = () if optimizer is None else optimizer.param_groups
    fused = any(group.get("fused") or group.get("capturable") for group in groups)
    return {
        word: place.empty(str(parameter.device) if fused or word != "step" else "cpu")
        for word, place in places.items()
    }


# ------------------------------------------------------------------------------- generators


def _generators(device: str) -> dict[str, Tensor]:
    """The states of the generators of this process, as tensors."""
    _, words, left = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    assert kind == "MT19937", "what numpy's functions without a generator use"
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python-left": torch.tensor([] if left is None else [left], dtype=torch.float64),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "numpy-left": torch.tensor([float(one) for one in rest], dtype=torch.float64),
    }
    if device != "cpu":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _new_generators(record: Record, rank: int) -> dict[str, Tensor]:
    """The states of the generators of a rank, to be filled."""
    start = f"{RANDOM}{rank}/"
    return {
        name.removeprefix(start): place.empty()
        for name, place in record.tensors.items()
        if name.startswith(start)
    }


def _set_generators(states: Mapping[str, Tensor], device: str) -> None:
    if not states:
        return
    torch.set_rng_state(states["torch"])
    left = states["python-left"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), left[0] if left else None))
    keys = states["numpy"].numpy().astype(np.uint32)
    position, has_one, one = states["numpy-left"].tolist()
    np.random.set_state(("MT19937", keys, int(position), int(has_one), one))
    if device != "cpu" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
