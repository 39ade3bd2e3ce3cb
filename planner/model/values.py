"""The values that an ONNX model holds, read lazily, and the static types of its tensors."""

from collections.abc import Iterable, Iterator, Mapping
from math import prod

import numpy as np
from onnx import TensorProto, TypeProto, helper, numpy_helper

from planner.model.weights import ModelFile, is_stored, size_of

# numpy's names that are not ONNX's
_NUMBERS = {"float32": "float", "float64": "double"}


class Values(Mapping[str, np.ndarray]):
    """Initializers and folded constants by name, read when asked for.

    Attributes:
        file: the model's.
    """

    def __init__(self, initializers: Iterable[TensorProto], file: ModelFile) -> None:
        self.file = file
        self._initializers: dict[str, TensorProto] = {}
        self._folded: dict[str, np.ndarray] = {}
        for tensor in initializers:
            self.hold(tensor)

    def __getitem__(self, name: str) -> np.ndarray:
        """The values; large ones are mapped into memory."""
        if name in self._folded:
            return self._folded[name]
        tensor = self._initializers[name]
        if is_stored(tensor):
            return self.file.array(tensor)
        if tensor.data_type == TensorProto.STRING:  # ONNX's texts are bytes in any encoding
            return np.array(tensor.string_data).reshape(tuple(tensor.dims))
        return numpy_helper.to_array(tensor)

    def __iter__(self) -> Iterator[str]:
        return iter(self._initializers | self._folded)

    def __len__(self) -> int:
        return len(self._initializers | self._folded)

    def __contains__(self, name: object) -> bool:
        return name in self._initializers or name in self._folded

    def described(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """The element type and shape of a value, which is not read."""
        tensor = self._initializers.get(name)
        if tensor is None or not is_stored(tensor):
            value = self[name]
            return value.dtype, value.shape
        return helper.tensor_dtype_to_np_dtype(tensor.data_type), tuple(tensor.dims)

    def fill(self, name: str, target: np.ndarray) -> None:
        """Copies a value, which is never in memory twice.

        Args:
            target: contiguous, of the value's shape; its elements have the size of the value's.
        """
        tensor = None if name in self._folded else self._initializers[name]
        stored = tensor is not None and is_stored(tensor) and target.size
        if tensor is None or not stored or size_of(tensor) != target.nbytes:  # or packed numbers
            target[...] = self[name].view(target.dtype)
            return
        room, at = target.reshape(-1).view(np.uint8).data, 0

        def write(piece: memoryview) -> None:
            nonlocal at
            room[at : at + len(piece)] = piece
            at += len(piece)

        self.file.copy(tensor, write)

    def copy(self) -> "Values":
        """The same values, to add others to."""
        made = Values((), self.file)
        made._initializers, made._folded = dict(self._initializers), dict(self._folded)
        return made

    def folded(self, name: str) -> bool:
        """Whether it is a folded constant, and no initializer."""
        return name in self._folded

    def hold(self, tensor: TensorProto, name: str = "") -> None:
        """Hold one more initializer, under its own name or another."""
        self._initializers[name or tensor.name] = tensor

    def forget(self, name: str) -> None:
        """Hold an initializer no more."""
        del self._initializers[name]

    def add(self, name: str, value: np.ndarray) -> None:
        """Hold a folded constant."""
        self._folded[name] = value


def shape_of(type_: TypeProto) -> tuple[int, ...]:
    """The shape of a tensor with static dimensions."""
    return tuple(dim.dim_value for dim in type_.tensor_type.shape.dim)


def dtype_of(type_: TypeProto) -> str:
    """The element type by its numpy name, as in `graph.ITEM_BYTES`."""
    return helper.tensor_dtype_to_np_dtype(type_.tensor_type.elem_type).name


def tensor_type(dtype: str) -> int:
    """ONNX's number of an element type by its numpy name, the inverse of `dtype_of`.

    >>> tensor_type("float32"), tensor_type("bfloat16")
    (1, 16)
    """
    return int(TensorProto.DataType.Value(_NUMBERS.get(dtype, dtype).upper()))


def is_float(type_: TypeProto) -> bool:
    """Whether the elements are floating-point numbers."""
    return "float" in dtype_of(type_)


def size_bytes(type_: TypeProto) -> int:
    """Size of a tensor with static dimensions."""
    item = helper.tensor_dtype_to_np_dtype(type_.tensor_type.elem_type).itemsize
    return int(prod(shape_of(type_)) * item)
