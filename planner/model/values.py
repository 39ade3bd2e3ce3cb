"""The values that an ONNX model holds, read lazily, and the static types of its tensors."""

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path

import numpy as np
import onnx_ir
from onnx import TensorProto, TypeProto, helper

from planner.errors import FileError
from planner.support.reading import check_mapped

# numpy's names that are not ONNX's
_NUMBERS = {"float32": "float", "float64": "double"}


class Values(Mapping[str, np.ndarray]):
    """Initializers and folded constants by name, read when asked for (external data mapped)."""

    def __init__(self, initializers: Iterable[TensorProto], folder: Path) -> None:
        self._folder = folder
        self._tensors = {t.name: onnx_ir.serde.deserialize_tensor(t, folder) for t in initializers}
        self._folded: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        if name in self._folded:
            return self._folded[name]
        tensor = self._tensors[name]
        if isinstance(tensor, onnx_ir.ExternalTensor):
            check_mapped(Path(tensor.path))
        try:
            return tensor.numpy()
        except (OSError, ValueError) as error:
            where = getattr(tensor, "path", name)
            raise FileError(
                f"{where}: expected the values of {name!r}: {error}; "
                "put the data file of the model beside it"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors | self._folded)

    def __len__(self) -> int:
        return len(self._tensors) + len(self._folded)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors or name in self._folded

    def folded(self, name: str) -> bool:
        """Whether it is a folded constant, and no initializer."""
        return name in self._folded

    def hold(self, tensor: TensorProto, name: str = "") -> None:
        """Hold one more initializer, under its own name or another."""
        self._tensors[name or tensor.name] = onnx_ir.serde.deserialize_tensor(tensor, self._folder)

    def forget(self, name: str) -> None:
        """Hold an initializer no more."""
        del self._tensors[name]

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
