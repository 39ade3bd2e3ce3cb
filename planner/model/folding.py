"""Folding and shape inference, node by node in one forward pass.

Every node is either known before the model runs, or it stays and its outputs get static shapes:

1. Shape and Size of a tensor are constants, because its shape is static; so is a constant that is
   cast to its type.
2. A node that reads only constants is evaluated with onnx.reference, unless the result is large.
   Float initializers of rank 1 or more are no constants here: they may be trained.
3. Every other node stays. The types of its outputs come from ONNX's own inference, which gets the
   values of small constants.
4. If the structure of the graph depends on a tensor that stayed (a condition, a trip count, a
   shape), but no input of the model leads to it, its value is computed on demand.

Shapes that the file declares for its intermediate tensors are ignored. Control flow, sequences and
functions never get here: `expansion/` replaces them by plain nodes.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf, isnan, prod
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, TypeProto, helper, numpy_helper
from onnx.defs import OpSchema
from onnx.shape_inference import InferenceError, infer_node_outputs

from planner.artefacts.operator_types import facts, imported
from planner.model.output_types import CustomNode, ShapeFunction
from planner.model.protos import domain_of, operator_type, opsets
from planner.model.schemas import (
    REFUSED_DOMAINS,
    REGISTER,
    attributes_of,
    check_nodes,
    definition,
    without_activation,
)
from planner.model.scopes import module_names
from planner.model.values import (
    Values,
    dtype_of,
    is_float,
    shape_of,
    size_bytes,
    tensor_type,
)
from planner.support.errors import ModelError, OperatorError
from planner.support.printable import few
from planner.support.units import format_bytes

if TYPE_CHECKING:
    from onnx.reference import ReferenceEvaluator

MAX_FOLDED_BYTES = 64 * 2**20
MAX_COMPUTED_BYTES = 2**30
"""Of all constants that are computed, together: some seconds. Masks and tables of positions of
the largest language models take a fifth of it."""
MAX_PRODUCTS = 10**10
"""Of the numbers of elements of a costly operator's inputs: onnx.reference has no fast products of
integers."""
MAX_INDEPENDENT_BYTES = 2 * 2**30
"""Of the outputs of a node that no input of the model leads to, where its inputs are smaller."""
_COSTLY = re.compile(".*(MatMul|Conv|Gemm|Einsum|Attention|LSTM|GRU|RNN).*")
MAX_INFERENCE_ELEMENTS = 1024  # of a constant whose value is given to shape inference
# What ONNX's inference raises, in C++ for a part, of a node that does not fit its inputs.
_REFUSED = (
    InferenceError, onnx.checker.ValidationError, ArithmeticError, LookupError, RuntimeError,
    TypeError, ValueError,
)  # fmt: skip


def schemas(nodes: Iterable[NodeProto], opsets: Mapping[str, int]) -> dict[str, OpSchema]:
    """The definition of each operator type of ONNX in use, by `operator_type`.

    Raises:
        OperatorError: if operators have none and are not registered, naming all of them.
    """
    users: dict[str, list[NodeProto]] = {}
    for node in nodes:
        users.setdefault(operator_type(node), []).append(node)
    known = {kind: _schema(some_nodes[0], opsets) for kind, some_nodes in users.items()}
    problems = [
        _unknown(users[kind], opsets.get(domain_of(users[kind][0])))
        for kind, schema in known.items()
        if (schema is None and not facts(kind).shapes and not facts(kind).fused)
        or domain_of(users[kind][0]) not in opsets
    ]
    if problems:
        raise OperatorError("\n".join(problems))
    return {kind: schema for kind, schema in known.items() if schema is not None}


def _unknown(users: Sequence[NodeProto], version: int | None) -> str:
    """The problem that nobody defines an operator."""
    domain, modules = domain_of(users[0]), module_names(users)
    where = f" (in {few(modules)})" if modules else ""
    mend = "export the model with ONNX's own operators"
    if domain:
        mend = REFUSED_DOMAINS.get(domain, f"{mend}, or give it a function with {REGISTER}")
    if domain and version is None:
        return (
            f"opset_import: expected a version of the domain {domain!r}, whose operators"
            f" {few([one.name for one in users])} are{where}, got none; export the model again"
        )
    return (
        f"{operator_type(users[0])} version {version or 'unknown'} is no operator that"
        f" ONNX {onnx.__version__} or the planner defines, used by"
        f" {few([one.name for one in users])}{where}; {mend}"
    )


def _schema(node: NodeProto, opsets: Mapping[str, int]) -> OpSchema | None:
    domain = domain_of(node)
    return definition(node.op_type, opsets.get(domain, 0), domain)


class Pass:
    """The state of a pass over nodes without subgraphs, which read and make tensors only.

    Attributes:
        read: names that a node reads or the graph returns; outputs beside them get no type.
        types: of all tensors so far; static.
        kept: the nodes that stay, so far.
        constants: names that later nodes may be folded with.
        shape_determining: initializers on which the structure of the graph depends, and the node
            whose structure it is.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        inputs: Mapping[str, TypeProto],
        values: Values,
        trained: Collection[str],
    ) -> None:
        self.opsets = opsets(model)
        self.opset_imports = list(model.opset_import)
        self.ir_version = model.ir_version
        self.schemas: dict[str, OpSchema] = {}
        self.values = values
        self.trained = trained
        self.read: set[str] = set()
        self.types = dict(inputs)
        self.kept: list[NodeProto] = []
        self.constants: set[str] = set()
        self.shape_determining: dict[str, str] = {}
        self._computed_bytes = 0
        # No constants, but no input of the model leads to them.
        self._independent: set[str] = set()
        for tensor in model.graph.initializer:
            self.hold(tensor, tensor.name)

    def learn(self, nodes: Sequence[NodeProto]) -> None:
        """Looks up the operators of nodes that follow.

        Raises:
            OperatorError: if ONNX defines none of that name, naming all of them.
            ModelError: if a node has not the inputs, outputs and attributes of its operator.
        """
        self.schemas |= schemas(nodes, self.opsets)
        known = ((node, self.schemas.get(operator_type(node))) for node in nodes)
        check_nodes((node, schema) for node, schema in known if schema is not None)

    def hold(self, tensor: TensorProto, name: str) -> None:
        """An initializer, whose value `values` has."""
        type_ = helper.make_tensor_type_proto(tensor.data_type, tuple(tensor.dims))
        self.types[name] = type_
        if name in self.trained:
            return
        constant = not (is_float(type_) and len(tensor.dims))
        (self.constants if constant else self._independent).add(name)

    def visit(self, node: NodeProto) -> None:
        """Folds a node, or lets it stay."""
        if not self.fold(node):
            self.keep(node)

    def keep(self, node: NodeProto) -> None:
        """Lets a node stay, unless its outputs have a static shape only once they are known."""
        independent = not facts(operator_type(node)).random and all(
            not name or name in self.constants or name in self._independent for name in node.input
        )
        try:
            types = self.static_outputs(node)
        # Inference may fail for want of a value that no input leads to: then the node is computed,
        # and only if that fails, too, is it an error of the model.
        except ModelError:
            if not independent or not self.compute(node):
                raise
            return
        if independent:
            self._check_independent(node, types)
            self._independent.update(node.output)
        self.types |= types
        self.kept.append(node)

    def _check_independent(self, node: NodeProto, types: Mapping[str, TypeProto]) -> None:
        """Refuses a large constant that comes of small ones, which every step would make anew.

        Args:
            types: of its outputs.

        Raises:
            ModelError: if it is one.
        """
        made = sum(size_bytes(type_) for type_ in types.values())
        given = sum(size_bytes(self.types[name]) for name in set(node.input) if name)
        if made > max(MAX_INDEPENDENT_BYTES, given):
            raise ModelError(
                f"{node.name}: expected constants of at most {format_bytes(MAX_INDEPENDENT_BYTES)},"
                f" got {format_bytes(made)} from {operator_type(node)}; the model may hold a wrong"
                " size in its constants"
            )

    def compute(self, node: NodeProto) -> bool:
        """Whether the outputs that are read are constants now; no input of the model leads to
        the node.
        """
        names = [name for name in node.output if name in self.read]
        if any(self.evaluate_now(name, node.name, last=node) is None for name in names):
            return False
        self.kept.append(node)
        self._independent.update(node.output)
        return True

    def evaluate_now(
        self, name: str, user: str, last: NodeProto | None = None
    ) -> np.ndarray | None:
        """The value of a tensor that the structure of the graph depends on, a constant from here
        on; None if it depends on the model's inputs, on what the user wants trained, or on random
        numbers, or if it is large.

        Args:
            name: of the tensor.
            user: name of the node whose structure it is.
            last: a node behind those that stay, which no input of the model leads to.
        """
        if name in self.constants:
            return self.values[name]
        if name not in self._independent and (last is None or name not in last.output):
            return None
        cone, needed = self._cone(name, [*self.kept, *([] if last is None else [last])])
        results: dict[str, np.ndarray] = {}
        for node in cone:
            made = self.evaluated(node, results)
            if not made:
                return None
            results |= zip(node.output, made, strict=False)
        for source in sorted(needed):
            if source in self.values and source not in self.constants:
                self.shape_determining.setdefault(source, user)
        if name in results:
            self.add_constant(name, results[name])
        return self.values[name]

    @staticmethod
    def _cone(name: str, nodes: Sequence[NodeProto]) -> tuple[list[NodeProto], set[str]]:
        """The nodes that a tensor follows from, in their order, and all names that they read."""
        needed, cone = {name}, []
        for node in reversed(nodes):
            if not needed.isdisjoint(node.output):
                cone.append(node)
                needed.update(one for one in node.input if one)
        return cone[::-1], needed

    def name_output(self, node: NodeProto, position: int, name: str, type_: TypeProto) -> None:
        """Names an output, which had no name, of a node that stays."""
        node.output[position] = name
        self.types[name] = type_
        if all(one in self.constants or one in self._independent for one in node.input):
            self._independent.add(name)

    def remaining(self) -> tuple[NodeProto, ...]:
        """The nodes that stay, without outputs that became constants after all."""
        late = [n for n in self.kept if not self.constants.isdisjoint(filter(None, n.output))]
        gone = {id(node) for node in late}
        nodes = []
        for node in self.kept:
            if id(node) in gone:
                node = _without(node, self.constants)
            if any(name in self.types for name in node.output):
                nodes.append(node)
        return tuple(nodes)

    def fold(self, node: NodeProto) -> bool:
        """Whether the outputs of a node are constants now."""
        kind = operator_type(node)
        if kind in ("Shape", "Size"):
            results = [self.shape_or_size(node)]
        elif kind == "CastLike" and node.input[0] in self.constants:
            results = self.cast_like(node)
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
        """The value of a Shape or Size."""
        shape = shape_of(self.types[node.input[0]])
        if node.op_type == "Size":
            size = prod(shape)
            if size > np.iinfo(np.int64).max:
                raise ModelError(
                    f"{node.name}: expected a tensor that can be, got {list(shape)}; give smaller"
                    " dimensions"
                )
            return np.array(size, dtype=np.int64)
        ends = {attribute.name: attribute.i for attribute in node.attribute}
        return np.array(shape[ends.get("start") : ends.get("end")], dtype=np.int64)

    def cast_like(self, node: NodeProto) -> list[np.ndarray]:
        """The value of a CastLike, which depends on the type of its second input only."""
        elements = self.types[node.input[1]].tensor_type.elem_type
        cast = helper.make_node("Cast", node.input[:1], node.output, name=node.name, to=elements)
        self.learn([cast])
        return self.evaluated(cast)

    def evaluated(self, node: NodeProto, more: Mapping[str, np.ndarray] = {}) -> list[np.ndarray]:
        """The outputs of a node whose inputs are constants or among `more`; empty if they are
        large or random, or their computation fails.
        """
        if facts(operator_type(node)).random or not self.is_small(node, more):
            return []
        inputs = {n: more[n] if n in more else self.values[n] for n in node.input if n}
        try:
            results = self.evaluator(node).run(None, inputs)
        except Exception:  # it raises whatever numpy raises; then the node stays an operator
            return []
        arrays = [np.asarray(one) for one in results if isinstance(one, np.ndarray | np.generic)]
        self._charge(node, sum(array.nbytes for array in arrays))
        fitting = len(arrays) == len(results) and all(map(_is_constant, arrays))
        return arrays if fitting else []

    def is_small(self, node: NodeProto, more: Mapping[str, np.ndarray]) -> bool:
        """Whether a node is surely computed in little memory and time, before it is; arguments as
        of `evaluated`.
        """
        sizes = (prod(shape_of(self.types[name])) for name in node.input if name)
        if _COSTLY.fullmatch(node.op_type) and prod(sizes) > MAX_PRODUCTS:
            return False
        if node.op_type == "Range":  # whose shape ONNX does not infer in all types
            given = [more[name] if name in more else self.values[name] for name in node.input]
            return _range_bytes(*given) <= MAX_FOLDED_BYTES
        types = self.guess(node, more)
        known = all(name in types for name in node.output if name)
        small = all(size_bytes(type_) <= MAX_FOLDED_BYTES for type_ in types.values())
        return small and (known or facts(operator_type(node)).data_sized)

    def _charge(self, node: NodeProto, computed_bytes: int) -> None:
        """Counts what is computed.

        Raises:
            ModelError: if it is too much.
        """
        self._computed_bytes += computed_bytes
        if self._computed_bytes > MAX_COMPUTED_BYTES:
            raise ModelError(
                f"{node.name}: expected constants of at most {format_bytes(MAX_COMPUTED_BYTES)} in"
                " all, got more that follow from each other; export the model with fewer or"
                " smaller ones"
            )

    def evaluator(self, node: NodeProto) -> "ReferenceEvaluator":
        """ONNX's reference for a model of this node alone."""
        from planner.model.reference import evaluator  # for which many models have no use

        names = [onnx.ValueInfoProto(name=name) for name in dict.fromkeys(node.input) if name]
        outputs = [onnx.ValueInfoProto(name=name) for name in node.output]
        graph = helper.make_graph([node], "node", names, outputs)
        model = helper.make_model(
            graph, opset_imports=self.opset_imports, ir_version=self.ir_version
        )
        return evaluator(model)

    def guess(self, node: NodeProto, more: Mapping[str, np.ndarray]) -> dict[str, TypeProto]:
        """Types of the outputs that are static with these inputs; an error gives none."""
        try:
            types = self.inferred(node, floats=True, more=more)
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
                self.evaluate_integers(node)
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
            self._check_static(node, name, types)
        self.check_reshape(node, types)
        return {name: types[name] for name in names}

    def _check_static(self, node: NodeProto, name: str, types: Mapping[str, TypeProto]) -> None:
        """Refuses an output without a static shape, or with negative sizes."""
        if name not in types or not _is_static(types[name]):
            got = self.text(types[name]) if name in types else "nothing"
            raise ModelError(
                f"{node.name}: expected a static shape for {name!r}, which "
                f"{operator_type(node)} makes of {self.described(node.input)}, got {got}; "
                "its shape depends on data, so the model cannot be planned"
            )
        if min(shape_of(types[name]), default=0) < 0:
            raise ModelError(
                f"{node.name}: {operator_type(node)} makes {name!r} {self.text(types[name])} of"
                f" {self.described(node.input)}; expected sizes of at least 0: its input is too"
                " small, or its attributes are wrong"
            )

    def evaluate_integers(self, node: NodeProto) -> None:
        """Makes constants of the small inputs without gradient that no input of the model leads to:
        shapes, axes and repeats that were computed of floats.
        """
        for name in dict.fromkeys(node.input):
            type_ = self.types[name] if name in self._independent else None
            if type_ is None or is_float(type_) or prod(shape_of(type_)) > MAX_INFERENCE_ELEMENTS:
                continue
            self.evaluate_now(name, node.name)

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

    def inferred(
        self, node: NodeProto, floats: bool, more: Mapping[str, np.ndarray] = {}
    ) -> dict[str, TypeProto]:
        """ONNX's inference, given constants, those of `more` and, if `floats`, float initializers,
        all of them only where they are small.
        """
        kind = operator_type(node)
        known = facts(kind)
        if known.keeps_shape:
            return {node.output[0]: self.types[node.input[0]]}
        if known.shapes is not None:
            shapes = imported(known.shapes, "planner.model.output_types")
            return self.custom(node, kind, shapes)
        node = without_activation(node, *known.fused) if known.fused else node
        if kind == "STFT" and not any(one.name == "onesided" for one in node.attribute):
            node = _one_sided(node)
        names = [name for name in dict.fromkeys(node.input) if name]
        schema = self.schemas.get(kind) or _schema(node, self.opsets)
        assert schema is not None, "all operators were looked up before"
        return infer_node_outputs(
            schema,
            node,
            {name: self.types[name] for name in names},
            self._data(names, floats, more),
            opset_imports=self.opset_imports,
            ir_version=self.ir_version,
        )

    def _data(
        self, names: Iterable[str], floats: bool, more: Mapping[str, np.ndarray]
    ) -> dict[str, TensorProto]:
        """The values that inference gets; arguments as of `inferred`."""
        data = {}
        for name in names:
            known = name in more or name in self.constants or (floats and name in self.values)
            type_ = self.types[name]
            small = prod(shape_of(type_)) <= MAX_INFERENCE_ELEMENTS
            if known and small and type_.tensor_type.elem_type != TensorProto.STRING:
                value = more[name] if name in more else self.values[name]
                data[name] = numpy_helper.from_array(value, name)
        return data

    def custom(self, node: NodeProto, kind: str, shapes: ShapeFunction) -> dict[str, TypeProto]:
        """The types of the outputs of an operator that ONNX does not define."""
        types = [self.types[name] if name else None for name in node.input]
        given = CustomNode(
            type=kind,
            version=self.opsets[domain_of(node)],
            inputs=tuple(t and (dtype_of(t), shape_of(t)) for t in types),
            values={i: self.values[n] for i, n in enumerate(node.input) if n in self.constants},
            attributes=attributes_of(node),
            outputs=tuple(name in self.read for name in node.output),
        )
        try:
            made = [*shapes(given)]
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise OperatorError(f"its inputs and attributes do not fit: {error}") from error
        return {
            name: helper.make_tensor_type_proto(tensor_type(dtype), shape)
            for name, (dtype, shape) in zip(node.output, made, strict=False)
            if name
        }

    def described(self, names: Iterable[str]) -> str:
        """Tensors with their shapes, for a message."""
        return ", ".join(f"{name} {self.text(self.types[name])}" for name in names if name)

    @staticmethod
    def text(type_: TypeProto) -> str:
        """A shape for a message."""
        if not type_.HasField("tensor_type"):
            return str(type_.WhichOneof("value"))
        if not type_.tensor_type.HasField("shape"):
            return "a tensor of unknown rank"
        return str([dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?"
                    for dim in type_.tensor_type.shape.dim]).replace("'", "")  # fmt: skip


def _is_constant(array: np.ndarray) -> bool:
    """Whether a result may be held: it is small, and no text."""
    return array.nbytes <= MAX_FOLDED_BYTES and array.dtype.kind not in "OSU"


def _one_sided(node: NodeProto) -> NodeProto:
    """An STFT with its default written down, which ONNX's inference takes for 0 (onnx 1.23)."""
    found = NodeProto()
    found.CopyFrom(node)
    found.attribute.append(helper.make_attribute("onesided", 1))
    return found


def _without(node: NodeProto, names: Collection[str]) -> NodeProto:
    """The node without some of its outputs."""
    found = NodeProto()
    found.CopyFrom(node)
    found.output[:] = ["" if name in names else name for name in node.output]
    return found


def _range_bytes(start: np.ndarray, limit: np.ndarray, delta: np.ndarray) -> float:
    """Bytes of a Range; without end where its inputs make no sense, as nothing computes it."""
    if any(one.size != 1 or one.dtype.kind in "OSU" for one in (start, limit, delta)):
        return inf
    first, last, step = (float(one.astype(np.float64).item()) for one in (start, limit, delta))
    count = (last - first) / step if step else inf
    return inf if isnan(count) else max(0.0, count) * start.itemsize


def _is_static(type_: TypeProto) -> bool:
    tensor = type_.tensor_type
    return (
        type_.HasField("tensor_type")
        and tensor.HasField("shape")
        and tensor.elem_type != TensorProto.UNDEFINED
        and all(dim.HasField("dim_value") for dim in tensor.shape.dim)
    )
