"""Folding and shape inference in one forward pass over the nodes of an ONNX graph.

Every node is either known before the model runs, or it stays and its outputs get static shapes:

1. Shape and Size of a tensor are constants, because its shape is static.
2. A node that reads only constants is evaluated with onnx.reference, unless the result is large.
   Float initializers of rank 1 or more are no constants here: they may be trained.
3. Every other node stays. The types of its outputs come from ONNX's own inference, which gets the
   values of small constants.

Shapes that the file declares for its intermediate tensors are ignored.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx
from onnx import NodeProto, TypeProto, helper, numpy_helper
from onnx.defs import OpSchema
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx.shape_inference import InferenceError, infer_node_outputs

from planner.errors import ModelError, OperatorError
from planner.model.canonical import domain_of, own_domain
from planner.model.definitions import (
    FOREIGN,
    FUSED,
    REFUSED_DOMAINS,
    REGISTER,
    attributes_of,
    definition,
    modules_of,
    without_activation,
)
from planner.model.foreign import ForeignNode
from planner.model.sequences import TensorSequence, gather, identity, read_sequence, sizes_name
from planner.model.values import (
    Values,
    dtype_of,
    is_float,
    shape_of,
    size_bytes,
    tensor_type,
)

MAX_FOLDED_BYTES = 64 * 2**20
MAX_INFERENCE_ELEMENTS = 1024  # of a constant whose value is given to shape inference
_REFUSED = (InferenceError, onnx.checker.ValidationError)
RANDOM_OPERATORS = frozenset({
    "Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
    "RandomUniformLike",
})  # fmt: skip

SHAPE_KEEPING_OPERATORS = frozenset({"GroupNormalization", "MeanVarianceNormalization"})
"""Operators for which ONNX 1.23 infers no shape: their output is like their first input."""


@dataclass(frozen=True)
class Folded:
    """The result of a pass over the nodes.

    Attributes:
        types: of inputs, initializers and every tensor that a node makes and another one reads, or
            the graph returns; all static.
        nodes: without those that became constants; sequences are written as plain operators.
    """

    types: Mapping[str, TypeProto]
    nodes: tuple[NodeProto, ...]


def operator_type(node: NodeProto) -> str:
    """The operator type, with its domain in front if that is not ONNX's own."""
    domain = domain_of(node)
    return f"{domain}.{node.op_type}" if domain else node.op_type


def some(names: Sequence[str], most: int = 3) -> str:
    """A few of the names for a message.

    >>> some(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def schemas(nodes: Iterable[NodeProto], opsets: Mapping[str, int]) -> dict[str, OpSchema]:
    """The definition of each operator type of ONNX in use, by `operator_type`.

    Raises:
        OperatorError: if operators have none and are not registered, naming all of them.
        ModelError: if nodes hold subgraphs.
    """
    users: dict[str, list[NodeProto]] = {}
    for node in nodes:
        users.setdefault(operator_type(node), []).append(node)
    known = {kind: _schema(some_nodes[0], opsets) for kind, some_nodes in users.items()}
    problems = [
        _unknown(users[kind], opsets.get(domain_of(users[kind][0])))
        for kind, schema in known.items()
        if schema is None and kind not in FOREIGN and kind not in FUSED
    ]
    if problems:
        raise OperatorError("\n".join(problems))
    branching = [n.name for n in nodes if any(a.HasField("g") or a.graphs for a in n.attribute)]
    if branching:
        raise ModelError(
            f"expected a graph without branches and loops, got subgraphs (If, Loop, Scan) in "
            f"{some(branching)}; export the model with fixed control flow"
        )
    return {kind: schema for kind, schema in known.items() if schema is not None}


def _unknown(users: Sequence[NodeProto], version: int | None) -> str:
    """The problem that nobody defines an operator."""
    domain, modules = domain_of(users[0]), modules_of(users)
    where = f" (in {some(modules)})" if modules else ""
    mend = "export the model with ONNX's own operators"
    if domain:
        mend = REFUSED_DOMAINS.get(domain, f"{mend}, or give it a function with {REGISTER}")
    return (
        f"{operator_type(users[0])} version {version or 'unknown'} is no operator that"
        f" ONNX {onnx.__version__} or the planner defines, used by"
        f" {some([one.name for one in users])}{where}; {mend}"
    )


def _schema(node: NodeProto, opsets: Mapping[str, int]) -> OpSchema | None:
    domain = domain_of(node)
    return definition(node.op_type, opsets.get(domain, 0), domain)


def fold(
    model: onnx.ModelProto,
    inputs: Mapping[str, TypeProto],
    values: Values,
    trained: Collection[str] = (),
) -> Folded:
    """Folds the nodes that are known before the model runs, and infers the types of all others.

    Args:
        model: with unique node names, without functions.
        inputs: static types of the graph's inputs.
        values: gets the folded constants.
        trained: names that are no constants, because the user wants them trained.

    Raises:
        ModelError: naming the node whose output has no static shape.
    """
    return _Pass(model, inputs, values, trained).run()


class _Pass:
    """The state of a pass: a tensor has a type, or it is a sequence, from its node on.

    Attributes:
        read: names that a node reads or the graph returns; outputs beside them get no type.
        types: of all tensors so far; static.
        sequences: of all sequences so far.
        kept: the nodes that stay, so far.
        constants: names that later nodes may be folded with.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        inputs: Mapping[str, TypeProto],
        values: Values,
        trained: Collection[str],
    ) -> None:
        self.nodes = model.graph.node
        self.opsets = {own_domain(o.domain): o.version for o in model.opset_import}
        self.opset_imports = list(model.opset_import)
        self.ir_version = model.ir_version
        self.schemas = schemas(self.nodes, self.opsets)
        self.values = values
        self.trained = trained
        self.read = {name for node in self.nodes for name in node.input if name}
        self.outputs = [output.name for output in model.graph.output]
        self.read.update(self.outputs)
        self.types = dict(inputs)
        self.sequences: dict[str, TensorSequence] = {}
        self.kept: list[NodeProto] = []
        self.constants: set[str] = set()
        for tensor in model.graph.initializer:
            type_ = helper.make_tensor_type_proto(tensor.data_type, tuple(tensor.dims))
            self.types[tensor.name] = type_
            if tensor.name not in trained and not (is_float(type_) and len(tensor.dims)):
                self.constants.add(tensor.name)

    def run(self) -> Folded:
        """The whole pass."""
        for node in self.nodes:
            self.check_names(node)
            if self.fold(node):
                continue
            match operator_type(node):
                case "SplitToSequence":
                    self.split(node)
                case "SequenceAt":
                    self.pick(node)
                case _:
                    self.keep(node)
        missing = [name for name in self.outputs if name not in self.types]
        if missing:
            raise ModelError(f"expected the model's outputs to be tensors, got: {some(missing)}")
        return Folded(self.types, tuple(self.kept))

    def check_names(self, node: NodeProto) -> None:
        """Refuses a node that reads something unknown, makes it twice, or reads a sequence."""
        known = self.types.keys() | self.sequences.keys()
        unknown = [name for name in node.input if name and name not in known]
        if unknown:
            raise ModelError(
                f"{node.name}: reads {some(unknown)}, which no earlier node makes; "
                "nodes must be in topological order"
            )
        again = [name for name in node.output if name in known]
        if again:
            raise ModelError(f"{node.name}: makes {some(again)}, which exists already")
        taken = [name for name in node.input if name in self.sequences]
        if taken and operator_type(node) != "SequenceAt":
            raise ModelError(
                f"{node.name}: {operator_type(node)} takes the sequence {some(taken)}; only "
                "SequenceAt of SplitToSequence can be planned: export the model without sequences"
            )

    def keep(self, node: NodeProto) -> None:
        """Lets a node stay."""
        self.types |= self.static_outputs(node)
        self.kept.append(node)

    def split(self, node: NodeProto) -> None:
        """SplitToSequence becomes a Split, whose outputs get their names by `pick`; or nothing, if
        its parts lose the axis, which a Split's outputs have.
        """
        known = {n: self.values[n] for n in node.input[1:] if n in self.constants}
        shape = shape_of(self.types[node.input[0]])
        sequence = read_sequence(node, shape, known, self.opsets[""])
        self.sequences[node.output[0]] = sequence
        if sequence.split is not None:
            self.add_constant(sizes_name(node), np.array(sequence.sizes, dtype=np.int64))
            self.kept.append(sequence.split)

    def pick(self, node: NodeProto) -> None:
        """SequenceAt becomes an output of the Split, an Identity of one that has a name already, or
        a Gather where there is no Split.
        """
        name, position = node.input
        sequence = self.sequences[name]
        if position not in self.constants:
            raise ModelError(
                f"{node.name}: expected a constant position for SequenceAt, got {position!r}, "
                "which depends on data, so the model cannot be planned"
            )
        if sequence.split is None:
            self.keep(gather(node, sequence))
            return
        i = int(self.values[position])
        if not -len(sequence.sizes) <= i < len(sequence.sizes):
            raise ModelError(
                f"{node.name}: expected a position within the {len(sequence.sizes)} tensors of "
                f"{name!r}, got {i}; export the model again"
            )
        taken = sequence.split.output[i]
        if taken:
            self.keep(identity(node, taken))
            return
        # The Split stands in `kept` already; only now is the name of its output i known.
        sequence.split.output[i] = node.output[0]
        source = self.types[sequence.source]
        shape = list(shape_of(source))
        shape[sequence.axis] = sequence.sizes[i]
        elements = source.tensor_type.elem_type
        self.types[node.output[0]] = helper.make_tensor_type_proto(elements, shape)

    def fold(self, node: NodeProto) -> bool:
        """Whether the outputs of a node are constants now."""
        if domain_of(node) == "" and node.op_type in ("Shape", "Size"):
            results = [self.shape_or_size(node)]
        elif all(not name or name in self.constants for name in node.input):
            results = self.evaluated(node)
        else:
            results = []
        for name, value in zip(node.output, results, strict=False):
            if name:
                self.add_constant(name, value)
        return bool(results)

    def add_constant(self, name: str, value: np.ndarray) -> None:
        """A folded tensor; one that is to be trained has a value, but nothing is folded with it."""
        self.values.add(name, value)
        if name not in self.trained:
            self.constants.add(name)
        dtype = helper.np_dtype_to_tensor_dtype(value.dtype)
        self.types[name] = helper.make_tensor_type_proto(dtype, value.shape)

    def shape_or_size(self, node: NodeProto) -> np.ndarray:
        shape = shape_of(self.types[node.input[0]])
        if node.op_type == "Size":
            return np.array(prod(shape), dtype=np.int64)
        ends = {attribute.name: attribute.i for attribute in node.attribute}
        return np.array(shape[ends.get("start") : ends.get("end")], dtype=np.int64)

    def evaluated(self, node: NodeProto) -> list[np.ndarray]:
        """The outputs of a node whose inputs are constants; empty if they are large or random, or
        their computation fails.
        """
        if node.op_type in RANDOM_OPERATORS:
            return []
        # Before it is computed, as far as the shapes are known: it might not fit the memory.
        if any(size_bytes(type_) > MAX_FOLDED_BYTES for type_ in self.guess(node).values()):
            return []
        inputs = {name: self.values[name] for name in node.input if name}
        try:
            results = self.evaluator(node).run(None, inputs)
        except Exception:  # it raises whatever numpy raises; then the node stays an operator
            return []
        arrays = [np.asarray(one) for one in results if isinstance(one, np.ndarray | np.generic)]
        small = all(array.nbytes <= MAX_FOLDED_BYTES for array in arrays)
        return arrays if small and len(arrays) == len(results) else []

    def evaluator(self, node: NodeProto) -> ReferenceEvaluator:
        """ONNX's reference for a model of this node alone."""
        names = [onnx.ValueInfoProto(name=name) for name in dict.fromkeys(node.input) if name]
        outputs = [onnx.ValueInfoProto(name=name) for name in node.output]
        graph = helper.make_graph([node], "node", names, outputs)
        model = helper.make_model(
            graph, opset_imports=self.opset_imports, ir_version=self.ir_version
        )
        return ReferenceEvaluator(model, new_ops=[GatherElements])

    def guess(self, node: NodeProto) -> dict[str, TypeProto]:
        """Types of the outputs as far as they are static; an error gives none."""
        try:
            types = self.inferred(node, floats=False)
        except (*_REFUSED, OperatorError):
            return {}
        return {name: type_ for name, type_ in types.items() if _is_static(type_)}

    def static_outputs(self, node: NodeProto) -> dict[str, TypeProto]:
        """Types of the outputs that are read.

        Raises:
            ModelError: if the node does not take its inputs, or a shape depends on data.
        """
        names = [name for name in node.output if name in self.read]
        try:
            types = self.inferred(node, floats=False)
            # Scales of Resize and such are float initializers, which are no constants otherwise.
            if not all(name in types and _is_static(types[name]) for name in names):
                types = self.inferred(node, floats=True)
        except OperatorError as error:
            raise OperatorError(
                f"{node.name}: {operator_type(node)} does not take"
                f" {self.described(node.input)}: {error}"
            ) from None
        except _REFUSED as error:
            raise ModelError(
                f"{node.name}: {operator_type(node)} does not take "
                f"{self.described(node.input)}: {error}; the model may hold another batch size or "
                "length in its constants"
            ) from None
        for name in names:
            if name not in types or not _is_static(types[name]):
                got = self.text(types[name]) if name in types else "nothing"
                raise ModelError(
                    f"{node.name}: expected a static shape for {name!r}, which "
                    f"{operator_type(node)} makes of {self.described(node.input)}, got {got}; "
                    "its shape depends on data, so the model cannot be planned"
                )
        self.check_reshape(node, types)
        return {name: types[name] for name in names}

    def check_reshape(self, node: NodeProto, types: Mapping[str, TypeProto]) -> None:
        """Counts the elements, as ONNX's inference does not where the shape is a constant."""
        if operator_type(node) != "Reshape":
            return
        source, target = shape_of(self.types[node.input[0]]), shape_of(types[node.output[0]])
        if prod(source) != prod(target):
            raise ModelError(
                f"{node.name}: Reshape cannot make {list(target)} of {list(source)}; the model "
                "holds another batch size or length in its constants: bind that one, or export "
                "it with symbolic dimensions"
            )

    def inferred(self, node: NodeProto, floats: bool) -> dict[str, TypeProto]:
        """ONNX's inference, given small constants and, if `floats`, small float initializers."""
        if operator_type(node) in SHAPE_KEEPING_OPERATORS:
            return {node.output[0]: self.types[node.input[0]]}
        kind = operator_type(node)
        if kind in FOREIGN:
            return self.foreign(node, kind)
        node = without_activation(node, kind) if kind in FUSED else node
        names = [name for name in dict.fromkeys(node.input) if name]
        data = {
            name: numpy_helper.from_array(self.values[name], name)
            for name in names
            if (name in self.constants or (floats and name in self.values))
            and prod(shape_of(self.types[name])) <= MAX_INFERENCE_ELEMENTS
        }
        schema = self.schemas.get(kind) or _schema(node, self.opsets)
        assert schema is not None, "all operators were looked up before"
        return infer_node_outputs(
            schema,
            node,
            {name: self.types[name] for name in names},
            data,
            opset_imports=self.opset_imports,
            ir_version=self.ir_version,
        )

    def foreign(self, node: NodeProto, kind: str) -> dict[str, TypeProto]:
        """The types of the outputs of an operator that ONNX does not define."""
        types = [self.types[name] if name else None for name in node.input]
        given = ForeignNode(
            type=kind,
            version=self.opsets[domain_of(node)],
            inputs=tuple(t and (dtype_of(t), shape_of(t)) for t in types),
            values={i: self.values[n] for i, n in enumerate(node.input) if n in self.constants},
            attributes=attributes_of(node),
            outputs=tuple(name in self.read for name in node.output),
        )
        return {
            name: helper.make_tensor_type_proto(tensor_type(dtype), shape)
            for name, (dtype, shape) in zip(node.output, FOREIGN[kind](given), strict=False)
            if name
        }

    def described(self, names: Iterable[str]) -> str:
        return ", ".join(f"{name} {self.text(self.types[name])}" for name in names if name)

    @staticmethod
    def text(type_: TypeProto) -> str:
        if not type_.HasField("tensor_type"):
            return str(type_.WhichOneof("value"))
        if not type_.tensor_type.HasField("shape"):
            return "a tensor of unknown rank"
        return str([dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?"
                    for dim in type_.tensor_type.shape.dim]).replace("'", "")  # fmt: skip


class GatherElements(OpRun):
    """Replaces the reference's own operator, which fails on [1, 512] at [1, 32] (onnx 1.23)."""

    def _run(self, data: np.ndarray, indices: np.ndarray, axis: int = 0) -> tuple[np.ndarray]:
        kept = [slice(n) for n in indices.shape]
        kept[axis] = slice(None)
        return (np.take_along_axis(data[tuple(kept)], indices, axis),)


def _is_static(type_: TypeProto) -> bool:
    tensor = type_.tensor_type
    return (
        type_.HasField("tensor_type")
        and tensor.HasField("shape")
        and all(dim.HasField("dim_value") for dim in tensor.shape.dim)
    )
