"""`LearnedModel`: the ONNX file that was trained, with its weights in a checkpoint."""

from collections.abc import Iterator
from pathlib import Path

import torch
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper
from torch import Tensor

from planner.model.protos import FLOATS
from planner.model.repair import Ties, repaired
from planner.model.source import open_source
from planner.model.values import tensor_type
from planner.model.weights import is_stored
from planner.support.errors import FileError, ModelError
from planner.training.checkpoints.files import whole_tensors
from planner.training.checkpoints.folder import PARAMETERS, STATISTICS, Checkpoint


class LearnedModel:
    """A model and its weights, which are read one by one.

    Where the file was repaired when it was read (`model/repair.py`), parameters that an exporter
    had merged differ by now, so it has the repaired graph.

    Attributes:
        proto: a copy of the file, to change. Initializers that were learned or repaired have no
            right content in it; `content` has it.
        learned: names in the checkpoint by those of initializers: the trained parameters, and the
            running statistics of the first replica.
        record: of the module that the file was exported from.
        notes: on the repair.
        not_finite: names of those learned initializers, of the ones that have been read, that have
            elements which are not finite.

    Args:
        start: the checkpoint.
        path: of the model.

    Raises:
        FileError: if it is another model than the checkpoint's.
    """

    def __init__(self, start: Checkpoint, path: Path) -> None:
        self._start, self._path = start, path
        record, source = start.record, open_source(path)
        found = source.hash
        if found != record.model_hash:
            raise FileError(
                f"{start.path}: trained from model {record.model_hash[:12]}, but {path} is"
                f" {found[:12]}; give the right one with --model FILE"
            )
        self._module = repaired(source, Ties.of(record.tie, record.untie))
        self.record, self.notes = source.record, self._module.warnings
        self.proto = _with_structure(source.proto, self._module.proto)
        # Those that no node reads in the form that is written are in the module nevertheless.
        self._initializers = {one.name: one for one in self._module.proto.graph.initializer}
        self.learned = _learned(start)
        self.not_finite: set[str] = set()

    def place_all(self) -> None:
        """Makes initializers of the constants that were learned.

        Raises:
            FileError: if the checkpoint has another shape or type than the model.
            ModelError: if a parameter is neither an initializer nor a constant.
        """
        there = {tensor.name: tensor for tensor in self.proto.graph.initializer}
        for name, key in self.learned.items():
            saved = self._start.record.tensors[key]
            if name not in there:
                _remove_constant(self.proto.graph, name, self._path)
                there[name] = self.proto.graph.initializer.add(
                    name=name, data_type=tensor_type(saved.dtype), dims=saved.shape
                )
            tensor = there[name]
            if tuple(tensor.dims) != saved.shape or tensor.data_type != tensor_type(saved.dtype):
                raise FileError(
                    f"{self._start.path}: {name}: expected the shape {tuple(tensor.dims)} as in"
                    f" {self._path}, got {saved.dtype}{list(saved.shape)}; take another checkpoint"
                )

    def content(self, tensor: TensorProto) -> bytes:
        """The content of an initializer of `proto`, as ONNX has it raw."""
        if tensor.name in self.learned:
            flat = self.value(tensor.name).contiguous().reshape(-1)
            return flat.view(torch.uint8).numpy().tobytes()
        if is_stored(tensor):
            content = bytearray()
            self._module.file.copy(tensor, content.extend)
            return bytes(content)
        if tensor.HasField("raw_data"):
            return tensor.raw_data
        return numpy_helper.from_array(self._module.values[tensor.name]).raw_data

    def value(self, name: str) -> Tensor:
        """An initializer as a tensor."""
        if name not in self.learned:
            return self._old_value(name)
        (tensor,) = whole_tensors(self._start, [self.learned[name]]).values()
        if not tensor.isfinite().all():
            self.not_finite.add(name)
        return tensor

    def _old_value(self, name: str) -> Tensor:
        """An initializer that was not learned."""
        tensor = self._initializers[name]
        dtype = getattr(torch, helper.tensor_dtype_to_np_dtype(tensor.data_type).name)
        content = bytearray(self.content(tensor))
        flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
        return flat.reshape(tuple(tensor.dims))

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that was learned and, as far as the model tells, all that the module has
        besides: by names of initializers, and by all names that the module has for a tensor.
        """
        state = {name: self.value(name) for name in self.learned}
        for name in self._others():
            if name not in state:
                state[name] = self.value(name)
        for one in () if self.record is None else self.record.parameters:
            if one.initializer in state:
                state |= dict.fromkeys((one.name, *one.aliases), state[one.initializer])
        return state

    def _others(self) -> Iterator[str]:
        """Initializers that are tensors of the module and were not trained: by its record, else
        all of floats that have a dimension.
        """
        if self.record is not None:
            both = (*self.record.parameters, *self.record.buffers)
            yield from (one.initializer for one in both if one.initializer is not None)
            return
        for tensor in self._initializers.values():
            if tensor.data_type in FLOATS and tensor.dims:
                yield tensor.name


def _with_structure(file: ModelProto, repaired: ModelProto) -> ModelProto:
    """A copy of a file with the repaired nodes and initializers."""
    proto = ModelProto()
    proto.CopyFrom(file)
    if repaired is not file:
        graph, mended = proto.graph, repaired.graph
        del graph.node[:], graph.initializer[:]
        graph.node.extend(mended.node)
        graph.initializer.extend(mended.initializer)
    return proto


def _learned(start: Checkpoint) -> dict[str, str]:
    prefixes = (PARAMETERS, f"{STATISTICS}0/")
    return {
        key.removeprefix(prefix): key
        for key in sorted(start.record.tensors)
        for prefix in prefixes
        if key.startswith(prefix)
    }


def _remove_constant(graph: GraphProto, name: str, path: Path) -> None:
    for at, node in enumerate(graph.node):
        if node.op_type == "Constant" and list(node.output) == [name]:
            del graph.node[at]
            return
    raise ModelError(
        f"{path}: {name!r} was trained, and is within a loop, a branch or a sequence, where weights"
        " cannot be written; write them with --state-dict FILE.pt alone"
    )
