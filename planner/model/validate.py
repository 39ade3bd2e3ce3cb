"""What must be true of an ONNX file before anything is made of it.

protobuf takes any number for an element type, any bytes for a name and any size for a tensor. The
steps behind this one read such fields without asking, many of them in C++. So they are all checked
here, once, and a file that fails has one line per problem.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from math import ceil, prod
from typing import NamedTuple

import onnx
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    TypeProto,
    helper,
)

from planner.artefacts.graph import MAX_BYTES
from planner.model.protos import nodes_of, own_domain
from planner.model.weights import element_bits
from planner.support.errors import ModelError

MAX_LINES = 5
"""Problems of one file that are listed; one mistake of an exporter is in every tensor."""
MAX_INLINED_NODES = 1_000_000
"""Nodes after the functions took the place of their calls, ten times those of the largest models
that planning is tested with. Calls of calls multiply: thirty functions of two calls make 10^9."""
MAX_CALL_DEPTH = 500
"""Functions that call each other in a row; onnx goes down the chain by recursion."""
_MAX_IR_VERSION = 1000  # newer ones than onnx knows are read, as far as it does
_MAX_VERSION = 2**31 - 1  # onnx has versions of operator sets in 32 bits
_MAX_OFFSET = 2**63 - 1
_ADVICE = "export the model again"
_KINDS = frozenset(TensorProto.DataType.values()) - {TensorProto.UNDEFINED}
_COMPLEX = (TensorProto.COMPLEX64, TensorProto.COMPLEX128)


def check(proto: ModelProto) -> None:
    """Refuses a model with fields that stand for nothing.

    Raises:
        ModelError: a line for each of the first problems.
    """
    problems = _problems(proto)
    if not problems:
        problems = [*_versions(proto), *_functions(proto), *_names(proto.graph)]
    if problems:
        more = len(problems) - MAX_LINES
        lines = [f"{line}; {_ADVICE}" for line in problems[:MAX_LINES]]
        raise ModelError("\n".join(lines + ([f"and {more} more like these"] if more > 0 else [])))


# ---------------------------------------------------------------------------------- messages


class _Fields(NamedTuple):
    """The fields of a kind of message, by name."""

    texts: tuple[str, ...]
    lists_of_texts: tuple[str, ...]
    messages: tuple[str, ...]
    lists_of_messages: tuple[str, ...]


@lru_cache(maxsize=64)
def _fields(kind: Descriptor) -> _Fields:
    def named(type_: int, repeated: bool) -> tuple[str, ...]:
        return tuple(
            one.name for one in kind.fields if one.type == type_ and one.is_repeated == repeated
        )

    text, message = FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_MESSAGE
    return _Fields(named(text, False), named(text, True), named(message, False),
                   named(message, True))  # fmt: skip


def _problems(message: Message) -> list[str]:
    """What is wrong with a message and those in it, each with its place in the message.

    A large model has 100,000 messages, so places are only written where there is a problem.
    """
    fields = _fields(message.DESCRIPTOR)
    problems = [
        f"{name}: expected text in UTF-8, got other bytes"
        for name in fields.texts
        if not _is_text(message, name)
    ]
    problems += [
        f"{name}: expected texts in UTF-8, got other bytes"
        for name in fields.lists_of_texts
        if not _are_texts(message, name)
    ]
    for name in fields.messages:
        if message.HasField(name):
            problems += [f"{name}{_joined(one)}" for one in _problems(getattr(message, name))]
    for name in fields.lists_of_messages:
        for i, part in enumerate(getattr(message, name)):
            if found := _problems(part):
                problems += [f"{name}[{i}]{_joined(one)}" for one in found]
    if not problems:
        problems += _own_problems(message)
    return problems


def _joined(problem: str) -> str:
    """A problem behind the place that it is in: a field of it, or the whole."""
    return problem if problem.startswith((" ", ":")) else f".{problem}"


def _is_text(message: Message, name: str) -> bool:
    """Whether a field is UTF-8. protobuf gives another one as bytes, or refuses to give it."""
    try:
        return isinstance(getattr(message, name), str)
    except UnicodeDecodeError:
        return False


def _are_texts(message: Message, name: str) -> bool:
    try:
        return all(isinstance(one, str) for one in getattr(message, name))
    except UnicodeDecodeError:
        return False


def _own_problems(message: Message) -> Iterator[str]:
    """Tensors, types and attributes that are none."""
    match message:
        case TensorProto():
            yield from _tensor(message)
        case TypeProto.Tensor():
            yield from _element(message)
        case AttributeProto():
            sparse = (message.sparse_tensor, *message.sparse_tensors)
            parts = (part for one in sparse for part in (one.values, one.indices))
            for tensor in (message.t, *message.tensors, *parts):
                if tensor.data_location == TensorProto.EXTERNAL:
                    yield (
                        f": expected the values of {message.name!r} in the model's file, got them"
                        f" in {_location(tensor)!r}"
                    )


def _element(type_: TypeProto.Tensor) -> Iterator[str]:
    if type_.elem_type not in _KINDS | {TensorProto.UNDEFINED}:
        yield (
            f"elem_type: expected an element type of ONNX {onnx.__version__}, got {type_.elem_type}"
        )


# ----------------------------------------------------------------------------------- tensors


def _tensor(tensor: TensorProto) -> Iterator[str]:
    """What is wrong with a tensor; at most one problem."""
    where = f" {tensor.name!r}" if tensor.name else ""
    shape, kind = list(tensor.dims), tensor.data_type
    if kind not in _KINDS:
        known = f"an element type of ONNX {onnx.__version__}"
        yield f"{where}: expected {known}, got {kind}"
    elif any(size < 0 for size in shape) or prod(shape) > MAX_BYTES:
        limit = f"at most {MAX_BYTES:.0e} elements"
        yield f"{where}: expected {limit} and no negative size, got {shape}"
    elif tensor.HasField("segment"):
        yield f"{where}: expected a whole tensor, got a segment of one"
    elif tensor.data_location == TensorProto.EXTERNAL:
        yield from (f"{where}: {one}" for one in _external(tensor))
    else:
        expected, actual = _expected_size(tensor), _actual_size(tensor)
        if expected != actual:
            described = f"{TensorProto.DataType.Name(kind).lower()}{shape}"
            what = "bytes" if tensor.HasField("raw_data") else "numbers"
            yield f"{where}: expected {expected} {what} for {described}, got {actual}"


def _item_bytes(tensor: TensorProto) -> float:
    return element_bits(tensor.data_type) / 8


def _size_bytes(tensor: TensorProto) -> int:
    return ceil(int(prod(tensor.dims)) * _item_bytes(tensor))


def _expected_size(tensor: TensorProto) -> int:
    """The bytes of raw data, or else the entries of the list of numbers, that a tensor needs."""
    if tensor.HasField("raw_data") and tensor.data_type != TensorProto.STRING:
        return _size_bytes(tensor)
    count = int(prod(tensor.dims))
    if tensor.data_type == TensorProto.STRING:
        return count
    # Numbers of half or a quarter of a byte share an entry, complex ones have two.
    item = _item_bytes(tensor)
    share = item if item in (0.5, 0.25) else 1
    entries: int = ceil(count * share) * (2 if tensor.data_type in _COMPLEX else 1)
    return entries


def _actual_size(tensor: TensorProto) -> int:
    name = helper.tensor_dtype_to_field(tensor.data_type)
    if tensor.HasField("raw_data") and tensor.data_type != TensorProto.STRING:
        name = "raw_data"
    return len(getattr(tensor, name))


def _location(tensor: TensorProto) -> str:
    return next((one.value for one in tensor.external_data if one.key == "location"), "")


def _external(tensor: TensorProto) -> Iterator[str]:
    """What is wrong with the place of a tensor's values in another file, which is not opened."""
    entries = {one.key: one.value for one in tensor.external_data}
    if not entries.get("location") or "\0" in entries["location"]:
        yield f"external data: expected the name of a file, got {entries.get('location')!r}"
    for name in ("offset", "length"):
        text = entries.get(name, "0")
        if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= _MAX_OFFSET):
            yield f"external data: {name}: expected a number of bytes, got {text!r:.60}"
            return
    if tensor.data_type == TensorProto.STRING:
        yield "external data: expected numbers, got text, which is only allowed in the model's file"
    elif "length" in entries and int(entries["length"]) != _size_bytes(tensor):
        described = f"{TensorProto.DataType.Name(tensor.data_type).lower()}{list(tensor.dims)}"
        yield (
            f"external data: length: expected {_size_bytes(tensor)} bytes for {described}, got"
            f" {entries['length']}"
        )


# --------------------------------------------------------------------------- model and graph


def _versions(proto: ModelProto) -> Iterator[str]:
    if not 0 <= proto.ir_version <= _MAX_IR_VERSION:
        yield f"ir_version: expected a number such as {onnx.IR_VERSION}, got {proto.ir_version}"
    versions: dict[str, set[int]] = defaultdict(set)
    for one in proto.opset_import:
        versions[own_domain(one.domain)].add(one.version)
    for domain, some in versions.items():
        name = domain or "ai.onnx"
        if len(some) > 1:
            yield f"opset_import: expected one version of {name}, got {sorted(some)}"
        elif abs(min(some)) > _MAX_VERSION:
            yield f"opset_import: expected a version of {name}, got {min(some)}"


def _names(graph: GraphProto) -> Iterator[str]:
    """Names of the outermost graph that are absent or stand for several values."""
    for what, names in (
        ("input", [one.name for one in graph.input]),
        ("initializer", [one.name for one in graph.initializer]),
    ):
        for name, times in Counter(names).items():
            if not name:
                yield f"graph.{what}: expected a name for each, got {times} without"
            elif times > 1:
                yield f"graph.{what}: expected each name once, got {name!r} {times} times"
    if not graph.output or not all(one.name for one in graph.output):
        yield "graph.output: expected at least one output, each with a name"


# --------------------------------------------------------------------------------- functions

_Key = tuple[str, str, str]  # domain, name and overload


def _functions(proto: ModelProto) -> Iterator[str]:
    """Functions that call themselves, or that make too many nodes."""
    bodies = {(one.domain, one.name, one.overload): one for one in proto.functions}
    calls = {key: Counter(_called(one.node)) for key, one in bodies.items()}
    known = {key: [one for one in some if one in bodies] for key, some in calls.items()}
    try:
        order = [*TopologicalSorter(known).static_order()]
    except CycleError as error:
        circle = " calls ".join(repr(name) for _, name, _ in error.args[1][:MAX_LINES])
        yield f"functions: expected some that do not call themselves, but {circle}"
        return
    size: dict[_Key, int] = {}
    depth: dict[_Key, int] = {}
    for key in order:
        size[key] = sum(size.get(one, 1) * times for one, times in calls[key].items())
        depth[key] = 1 + max((depth[one] for one in known[key]), default=0)
    whole = sum(size.get(one, 1) for one in _called(proto.graph.node)) if bodies else 0
    if whole > MAX_INLINED_NODES:
        yield f"functions: expected calls of at most {MAX_INLINED_NODES} nodes, got {whole}"
    if max(depth.values(), default=0) > MAX_CALL_DEPTH:
        yield f"functions: expected at most {MAX_CALL_DEPTH} calls in a row, got more"


def _called(nodes: Iterable[NodeProto]) -> Iterator[_Key]:
    """What nodes and those of graphs inside them are, as functions would be called."""
    for node in nodes_of(nodes):
        yield node.domain, node.op_type, node.overload
