"""What one device has of a checkpoint, by name: out of a training, and into one.

A device saves the boxes of tensors that no device before it has (`resharding.sums.owns`), as they
lie on its mesh, and reads the boxes that it needs. So no device ever has more of the model than it
trains, and a checkpoint of one strategy is read under any other one. Running statistics are those
of each replica's own microbatches, so each replica saves its own. Parameters that nobody trains are
in the model's file.

Which random numbers the operators of a model draw depends on the step alone
(`operators/randomness.py`). The generators of torch, numpy and Python are for functions of the
user. A process gets the state of its own back if there are as many processes as there were.
"""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from planner.artefacts.graph import parameters_by_name
from planner.artefacts.sharding import local_shape_at, tiles
from planner.launcher.device_part import DevicePart
from planner.launcher.groups import Groups
from planner.launcher.job import TrainingJob
from planner.resharding.sums import owns, parameter_specs, stages_of
from planner.support.errors import FileError, LaunchError
from planner.training.checkpoints.folder import (
    DATA,
    OPTIMIZER,
    PARAMETERS,
    RANDOM,
    STATISTICS,
    Checkpoint,
    CheckpointRecord,
)
from planner.training.checkpoints.held import Held, whole


def optimizer_name(optimizer: Optimizer | None) -> str | None:
    """The kind of an optimizer, which its tensors belong to; None without one.

    >>> optimizer_name(torch.optim.SGD([torch.zeros(1)], momentum=0.9))
    'SGD with momentum'
    """
    if optimizer is None:
        return None
    momentum = any(group.get("momentum") for group in optimizer.param_groups)
    return f"{type(optimizer).__name__}{' with momentum' if momentum else ''}"


# torch.distributed.checkpoint.state_dict is no help: it names optimizer states by modules, and the
# module of a stage holds parts of them.
class Content:
    """What a checkpoint has of one device, by the names in a checkpoint; nothing is copied.

    Attributes:
        job: what is trained.
        groups: the other devices.
        optimizer: of the device's parameters; None if it trains none.

    Args:
        part: of the device.
        data: gives the state of the data that the device reads, as JSON; None for none.
    """

    def __init__(
        self, job: TrainingJob, part: DevicePart, optimizer: Optimizer | None, groups: Groups,
        data: Callable[[], Any] = lambda: None,
    ) -> None:  # fmt: skip
        self.job, self.groups, self.optimizer, self._data = job, groups, optimizer, data
        self._part, self._device = part, groups.device
        self._rank = job.plan.ranks.index(self._device)
        self._strategy, self._graph = job.plan.strategy, job.model.graph
        self._known = parameters_by_name(self._graph)
        self._used_in = stages_of(self._strategy, self._graph)

    def to_save(self) -> dict[str, Held]:
        """Everything.

        Raises:
            LaunchError: if the optimizer keeps something else than tensors.
        """
        generators = {
            f"{RANDOM}{self._rank}/{word}": whole(state)
            for word, state in _generators(self.job.device).items()
        }
        data = self._data()
        if data is not None:
            content = bytearray(json.dumps(data).encode())
            generators[f"{DATA}{self._rank}"] = whole(torch.frombuffer(content, dtype=torch.uint8))
        return {**self.learned(), **self._optimizer_states(), **generators}

    def learned(self) -> dict[str, Held]:
        """The trained parameters, and the running statistics that training changes."""
        running = {id(one) for stage in self._part.stages.values() for one in stage.states.values()}
        return self._parameters() | {
            f"{STATISTICS}{replica}/{name}": self._held(name, value, replica=replica)
            for name, value in self._part.values.items()
            if id(value) in running and (replica := self._replica(name)) is not None
        }

    def to_fill(self, record: CheckpointRecord) -> dict[str, Held]:
        """Everything that a checkpoint has for this device; it makes the optimizer's tensors.

        Running statistics are those of the same replica, else of the first one. Normalizations that
        are frozen now take them over, too.
        """
        self._make_states(record)
        filled = {**self._parameters(), **self._optimizer_states()}
        for name, value in self._part.values.items():
            for replica in (self._replica(name) or 0, 0):
                if (saved := f"{STATISTICS}{replica}/{name}") in record.tensors:
                    filled[saved] = self._held(name, value)
                    break
        return filled

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the trained parameters and of the running statistics of the first replica,
        whole, by names of initializers, in the memory of every rank's CPU; every rank calls it.
        """
        own = {
            name.removeprefix(prefix): replace(one, values=one.values.cpu().clone().contiguous())
            for name, one in self.learned().items()
            for prefix in (PARAMETERS, f"{STATISTICS}0/")
            if one.writes and name.startswith(prefix)
        }
        described = {name: replace(one, values=one.values.to("meta")) for name, one in own.items()}
        ranks, wholes = self.job.plan.ranks, dict[str, Tensor]()
        for device, some in zip(ranks, self.groups.gather(described), strict=True):
            devices = (device, *(one for one in ranks if one != device))
            for name, one in some.items():
                mine = device == self._device
                values = own[name].values if mine else torch.empty_like(one.values, device="cpu")
                self.groups.share(values, devices)
                into = wholes.setdefault(name, torch.empty(one.shape, dtype=values.dtype))
                for start, part in replace(one, values=values).parts().items():
                    box = zip(start, part.shape, strict=True)
                    into[tuple(slice(first, first + size) for first, size in box)] = part
        return wholes

    def restore(self, start: Checkpoint) -> None:
        """Gives this device everything that a checkpoint has for it; every rank calls it.

        Raises:
            FileError: if the checkpoint is of another optimizer, or damaged.
            LaunchError: if the ranks do not see the same one.
        """
        from planner.training.checkpoints.files import fill

        record = start.record
        self._check_start(start)
        wanted = self.to_fill(record)
        same_ranks = record.num_ranks == len(self.job.plan.ranks)
        states = _generators_to_fill(record, self._rank) if same_ranks else {}
        wanted |= {f"{RANDOM}{self._rank}/{word}": whole(state) for word, state in states.items()}
        for name, held in wanted.items():
            saved = record.tensors[name].shape
            if saved != held.shape:
                raise FileError(
                    f"{start.path}: {name}: expected the shape {held.shape}, got {saved}; take"
                    " another checkpoint"
                )
        self._part.forget_casts()
        fill(wanted, start)
        if self._part.masters:
            self._part.masters.spread()
            self._part.shards.gather()
            self._part.shards.settle()
        else:
            self._part.shards.refresh()
        _set_generators(states, self.job.device)

    def saved_data(self, start: Checkpoint) -> dict[int, Any]:
        """The states of data in a checkpoint, by rank that read it.

        Raises:
            FileError: if it is damaged.
        """
        from planner.training.checkpoints.files import whole_tensors

        names = [name for name in start.record.tensors if name.startswith(DATA)]
        tensors = whole_tensors(start, sorted(names))
        try:
            return {
                int(name.removeprefix(DATA)): json.loads(content.numpy().tobytes())
                for name, content in tensors.items()
            }
        except ValueError as error:
            raise FileError(
                f"{start.path}: damaged: expected the state of the data, got {error}; take another"
                " checkpoint"
            ) from None

    def _check_start(self, start: Checkpoint) -> None:
        """Refuses what this training cannot go on from."""
        seen = self.groups.gather((start.record.step, start.record.files))
        for rank, (step, files) in enumerate(seen):
            if (step, files) != seen[0]:
                raise LaunchError(
                    f"{start.path}: rank {rank} sees a checkpoint of step {step} there, rank 0"
                    f" another one of step {seen[0][0]}; give a folder that all hosts share"
                )
        known, saved = optimizer_name(self.optimizer), start.record.optimizer
        if known is not None and saved != known:
            raise FileError(
                f"{start.path}: has the state of {saved or 'no optimizer'}, this launch trains with"
                f" {known}; choose the same optimizer"
            )

    def _parameters(self) -> dict[str, Held]:
        self._part.shards.settle()
        copies = self._part.masters.copies
        return {
            PARAMETERS + name: self._held(name, copies.get(name, value), of_state=name in copies)
            for name, value in self._part.trained.items()
            if copies.get(name, value).numel()  # chunks may be empty
        }

    def _optimizer_states(self) -> dict[str, Held]:
        optimizer, states = self.optimizer, {}
        for name, stepped in self._part.optimizer_parameters.items():
            kept = {} if optimizer is None else optimizer.state.get(stepped, {})
            for word, value in kept.items():
                if isinstance(value, Tensor) and not value.numel():
                    continue  # of an empty chunk
                if isinstance(value, Tensor):
                    states[f"{OPTIMIZER}{name}/{word}"] = self._held(name, value, of_state=True)
                elif value is not None:
                    raise LaunchError(
                        f"--checkpoint: the state of {type(optimizer).__name__} for {name!r} has"
                        f" {word!r}, a {type(value).__name__}; expected tensors only: take another"
                        " optimizer"
                    )
        return states

    def _make_states(self, record: CheckpointRecord) -> None:
        """Gives the optimizer tensors for what a checkpoint has of its state: of the size of the
        device's part, or as they were saved if they are not of the parameter's shape.

        They are where torch has them: with the parameter, but the count of steps only where steps
        are fused.
        """
        if self.optimizer is None:
            return
        groups = self.optimizer.param_groups
        fused = any(group.get("fused") or group.get("capturable") for group in groups)
        for saved_name, saved in record.tensors.items():
            name, _, word = saved_name.removeprefix(OPTIMIZER).rpartition("/")
            stepped = self._part.optimizer_parameters.get(name)
            if stepped is None or not saved_name.startswith(OPTIMIZER):
                continue
            is_cut = saved.shape == self._known[name].shape
            self.optimizer.state[stepped][word] = torch.empty(
                stepped.shape if is_cut else saved.shape, dtype=saved.torch_dtype,
                device=stepped.device if fused or word != "step" else "cpu",
            )  # fmt: skip

    def _held(self, name: str, values: Tensor, *, of_state: bool = False, replica: int = 0) -> Held:
        """A parameter, or a tensor of the optimizer for it: of its shape, or the same on all
        devices.
        """
        place = next(iter(self._part.places.values()))  # in all, parameters lie alike
        shape, mesh = self._known[name].shape, place.shared_mesh
        whole, lies = ("R",) * len(mesh.sizes), parameter_specs(place.stage, self._graph)
        spec = whole if name not in lies else lies[name].parameter
        if of_state and name in lies:
            spec = lies[name].state
        if tuple(values.shape) != local_shape_at(shape, spec, mesh.sizes, mesh.index):
            shape, spec = tuple(values.shape), whole
        writes = owns(self._strategy, self._graph, self._device, name, spec, replica)
        return Held(values.detach(), shape, tiles(shape, spec, mesh.sizes, mesh.index), writes)

    def _replica(self, name: str) -> int | None:
        """The replica of the device in the first stage that has a parameter."""
        groups = self._strategy.stages[self._used_in[name][0]].groups
        return next((r for r, group in enumerate(groups) if self._device in group), None)


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


def _generators_to_fill(record: CheckpointRecord, rank: int) -> dict[str, Tensor]:
    """The states of the generators of a rank, to be filled."""
    start = f"{RANDOM}{rank}/"
    return {
        name.removeprefix(start): saved.empty()
        for name, saved in record.tensors.items()
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
