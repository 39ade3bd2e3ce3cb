"""ONNX's own backend node tests, run through the planner: load, convert to torch, compute, compare.

A test is a model of one operator with inputs and expected outputs (and the same with the function
of the operator in its place, "expanded"). To be loaded as a model that is trained, it gets a second
output, the product of a number and a parameter. A tensor without elements is a constant there,
because no dimension of an input may be 0. Sequences and optionals are no inputs or outputs of
such models: they are made of tensors, and taken apart, by more nodes.
"""

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test.loader import load_model_tests

from planner.model.load import load
from planner.model.trainable import differentiable_inputs
from planner.operators import to_torch
from planner.support.errors import ModelError

ANCHOR = "conformance.anchor"
WHOLE_ELEMENTS = 60  # of all inputs together; the gradient of larger cases is compared along a line
GRADIENT_ELEMENTS = 20_000  # larger cases are not differentiated


@dataclass(frozen=True, eq=False)
class Case:
    """A node test of ONNX.

    Attributes:
        name: that ONNX gives it.
        type: of the operator that it is about.
        version: in which the operator was last changed before the operator set of the test.
        model: as ONNX has it.
        inputs: by name, in order: arrays, lists of arrays (sequences), or None (empty optionals).
        outputs: the same.
        rtol: relative tolerance.
        atol: absolute tolerance.
    """

    name: str
    type: str
    version: int
    model: onnx.ModelProto
    inputs: Mapping[str, object]
    outputs: Mapping[str, object]
    rtol: float
    atol: float


@cache
def all_tests():
    """All node tests as ONNX has them; making them takes 10 s."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_model_tests(kind="node")


@cache
def cases():
    """All cases of the standard operators."""
    tests = {test.name: test for test in all_tests()}
    found = []
    for name, test in sorted(tests.items()):
        whole = tests.get(name.split("_expanded")[0], test)
        node = whole.model.graph.node[0]
        if len(whole.model.graph.node) > 1 or node.domain not in ("", "ai.onnx"):
            continue
        opset = next(o.version for o in test.model.opset_import if o.domain in ("", "ai.onnx"))
        version = onnx.defs.get_schema(node.op_type, opset).since_version
        values = [
            [decoded(value, place.type) for value, place in zip(part, places, strict=True)]
            for part, places in zip(
                test.data_sets[0], (test.model.graph.input, test.model.graph.output), strict=True
            )
        ]
        inputs, outputs = (
            dict(zip([one.name for one in places], part, strict=True))
            for part, places in zip(
                values, (test.model.graph.input, test.model.graph.output), strict=True
            )
        )
        found.append(
            Case(name, node.op_type, version, test.model, inputs, outputs, test.rtol, test.atol)
        )
    return found


def decoded(value, type_):
    """A value of a test as arrays."""
    if isinstance(value, TensorProto):
        array = numpy_helper.to_array(value)
        return array.astype(object) if array.dtype.kind in "SU" else array
    if isinstance(value, onnx.SequenceProto):
        return numpy_helper.to_list(value)
    if isinstance(value, onnx.OptionalProto):
        return numpy_helper.to_optional(value)
    return value


# ---- one case as a model that the planner loads


def trainable(case, constants):
    """The model of a case with a trained parameter, and values of its inputs.

    Returns:
        The model; the arrays that it takes, by name; for each output of the case the names of the
        tensors that it consists of.
    """
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    graph = model.graph
    inputs = list(graph.input)
    del graph.input[:], graph.output[:]
    before, arrays = [], {ANCHOR: np.ones((1, 1), np.float32)}
    for place in inputs:
        before += given(place, case.inputs[place.name], arrays)
    after, parts = [], {}
    for name, value in case.outputs.items():
        nodes, parts[name] = taken(name, value)
        after += nodes
    anchor = helper.make_node("MatMul", [ANCHOR, f"{ANCHOR}.weight"], [f"{ANCHOR}.out"])
    nodes = [*before, *graph.node, *after, anchor]
    del graph.node[:]
    graph.node.extend(nodes)
    for name in [n for n, array in arrays.items() if n in constants or not np.size(array)]:
        graph.initializer.append(numpy_helper.from_array(np.asarray(arrays.pop(name)), name))
    graph.input.extend(
        helper.make_tensor_value_info(name, element_type(array), np.shape(array))
        for name, array in arrays.items()
    )
    graph.initializer.append(
        numpy_helper.from_array(np.ones((1, 1), np.float32), f"{ANCHOR}.weight")
    )
    names = [f"{ANCHOR}.out", *(one for some in parts.values() for one in some)]
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return model, arrays, parts


def element_type(array):
    """ONNX's number of an array's type."""
    dtype = np.asarray(array).dtype
    return TensorProto.STRING if dtype.kind in "SUO" else helper.np_dtype_to_tensor_dtype(dtype)


def given(place, value, arrays):
    """Nodes that make an input of a test of tensors, which `arrays` gets."""
    if isinstance(value, np.ndarray | np.generic) and place.type.HasField("tensor_type"):
        arrays[place.name] = value
        return []
    optional = place.type.HasField("optional_type")
    inner = place.type.optional_type.elem_type if optional else place.type
    if value is None:
        return [helper.make_node("Optional", [], [place.name], type=inner)]
    nodes, name = [], place.name
    if isinstance(value, list):
        names = [f"{place.name}.{i}" for i in range(len(value))]
        arrays.update(zip(names, value, strict=True))
        name = f"{place.name}.sequence" if optional else place.name
        elements = inner.sequence_type.elem_type.tensor_type.elem_type
        nodes.append(
            helper.make_node("SequenceConstruct", names, [name])
            if names
            else helper.make_node("SequenceEmpty", [], [name], dtype=elements)
        )
    else:
        name = f"{place.name}.tensor"
        arrays[name] = value
    if optional:
        nodes.append(helper.make_node("Optional", [name], [place.name]))
    return nodes


def taken(name, value):
    """Nodes that take the tensors out of an output of a test, and the names of the tensors."""
    if not isinstance(value, list):
        return [], [name]
    nodes, names = [helper.make_node("SequenceLength", [name], [f"{name}.length"])], []
    for i in range(len(value)):
        position = numpy_helper.from_array(np.array(i))
        at = helper.make_node("Constant", [], [f"{name}.at.{i}"], value=position)
        nodes += [at, helper.make_node("SequenceAt", [name, f"{name}.at.{i}"], [f"{name}.{i}"])]
        names.append(f"{name}.{i}")
    return nodes, [*names, f"{name}.length"]


def expected(case, parts):
    """The arrays that the tensors of the outputs should be, by name."""
    arrays = {}
    for name, value in case.outputs.items():
        values = [*value, np.array(len(value))] if isinstance(value, list) else [value]
        arrays.update(zip(parts[name], map(np.asarray, values), strict=True))
    return arrays


def as_tensor(array):
    """An array for torch."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def as_array(tensor):
    """A tensor for numpy; bfloat16 as float32."""
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


# ---- running a case

QUOTED = re.compile(r"'([^']+)'")


@dataclass(frozen=True, eq=False)
class Outcome:
    """What became of a case.

    Attributes:
        case: the test.
        status: "passed", "failed" (another result, or a crash) or "refused" (by a message).
        constants: inputs that had to be constants.
        operators: types of the operators that the planner runs.
        message: why it did not pass.
    """

    case: Case
    status: str
    constants: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    message: str = ""


def attempts(case):
    """Inputs to make constants: none, each alone, those that configure, all but the first, all."""
    arrays = tensors_of(case)
    names = [name for name in arrays if name != ANCHOR]
    whole = {name for name in names if np.asarray(arrays[name]).dtype.kind in "iub"}
    yield frozenset()
    yield from (frozenset([name]) for name in names)
    yield frozenset(whole - set(names[:1]))
    yield frozenset(names[1:])
    yield frozenset(whole)
    yield frozenset(names)


def tensors_of(case):
    """All tensors that a case gets, by name."""
    return trainable(case, ())[1]


def run(case, folder):
    """The outcome of a case, with as few inputs made constants as possible.

    Args:
        case: the test.
        folder: for the model's file.
    """
    refused = []
    for constants in dict.fromkeys(named_attempts(case, folder)):
        outcome = attempt(case, constants, folder)
        if outcome.status != "refused":
            return outcome
        refused.append(outcome)
    # With everything constant nothing is left to plan, which is no reason.
    return refused[-2] if len(refused) > 1 else refused[-1]


def named_attempts(case, folder):
    """The attempts, after those with the inputs that messages ask for."""
    constants, names = frozenset(), set(tensors_of(case)) - {ANCHOR}
    for _ in names:
        yield constants
        asked = set(QUOTED.findall(attempt(case, constants, folder).message)) & names
        if asked <= constants:
            break
        constants |= asked
    yield from attempts(case)


def attempt(case, constants, folder):
    """The outcome of a case with these inputs as constants."""
    model, arrays, parts = trainable(case, constants)
    path = folder / "case.onnx"
    path.write_bytes(model.SerializeToString())
    outcome = Outcome(case, "refused", tuple(sorted(constants)))
    try:
        loaded = load(path)
        module = to_torch(loaded)
    except ModelError as error:
        return replace(outcome, message=str(error).replace(f"{path}: ", ""))
    operators = tuple(o.type for o in loaded.graph.operators[:-1])
    outcome = replace(outcome, operators=operators)
    try:
        found = dict(zip(module.output_names, module(*(
            as_tensor(np.asarray(arrays[name])) for name in module.input_names
        )), strict=True))  # fmt: skip
    except (RuntimeError, NotImplementedError) as error:
        return replace(outcome, status="failed", message=f"torch: {error}".splitlines()[0])
    for name, due in expected(case, parts).items():
        made = as_array(found[name]) if name in found else loaded.values[name]
        message = difference(case, made, due)
        if message:
            return replace(outcome, status="failed", message=f"{name}: {message}")
    return replace(outcome, status="passed")


def difference(case, made, due):
    """How two arrays differ; "" if they agree to the tolerance of the case."""
    wide = due.astype(np.float32) if due.dtype.name == "bfloat16" else due
    if made.dtype.name == "bfloat16":
        made = made.astype(np.float32)
    if (made.dtype, made.shape) != (wide.dtype, wide.shape):
        return f"{wide.dtype}{list(wide.shape)} is expected, got {made.dtype}{list(made.shape)}"
    if wide.dtype.kind not in "fc":
        return "" if np.array_equal(made, wide) else "other values"
    rtol, atol = TOLERANCE.get(due.dtype.name, (case.rtol, case.atol))
    if np.allclose(made, wide, rtol=rtol, atol=atol, equal_nan=True):
        return ""
    return f"differs by {np.abs(made.astype(float) - wide.astype(float)).max():.2g}"


TOLERANCE = {"float16": (4e-3, 4e-3), "bfloat16": (4e-2, 4e-2)}
"""Relative and absolute: expected values were computed in float32, or by another order of sums."""


# ---- gradients


@dataclass(frozen=True, eq=False)
class Slope:
    """Whether the gradients of a case are those of finite differences, in float64.

    Attributes:
        status: "agrees", "differs", or "none" where no float input leads to a float output.
        message: how they differ.
    """

    status: str
    message: str = ""


def slope(outcome, folder):
    """The gradients of a case that passed; None if it has no float32 inputs, or infinite ones, or
    is too large, or its operator takes no float64.
    """
    wide = in_float64(outcome.case)
    model, arrays, _ = trainable(wide, outcome.constants)
    floats = [n for n, a in arrays.items() if np.asarray(a).dtype == np.float64]
    if not floats or sum(np.size(arrays[n]) for n in floats) > GRADIENT_ELEMENTS:
        return None
    if not all(np.isfinite(arrays[name]).all() for name in floats):
        return None
    path = folder / "case.onnx"
    path.write_bytes(model.SerializeToString())
    try:
        loaded = load(path)
        module = to_torch(loaded)
    except ModelError:
        return None
    still = {name for one in wide.model.graph.node for name in unmoved(one)}
    given_ = [as_tensor(np.asarray(arrays[name])) for name in module.input_names]
    moving = [
        i for i, name in enumerate(module.input_names)
        if name in floats and name.removesuffix(".tensor") not in still
    ]  # fmt: skip
    return compared(module, given_, moving)


def unmoved(node):
    """The inputs of a node that get no gradient."""
    return set(node.input) - set(differentiable_inputs(node))


def compared(module, arrays, moving):
    """The gradients by the inputs `moving`, at the arrays or, at a kink, beside them."""

    def outputs(*moved):
        found = list(arrays)
        for i, tensor in zip(moving, moved, strict=True):
            found[i] = tensor
        made = module(*found)
        return tuple(
            tensor for tensor in made
            if tensor.dtype == torch.float64 and tensor.requires_grad
        )  # fmt: skip

    random, messages = torch.Generator().manual_seed(0), []
    for step in (0.0, 0.03):
        points = [
            (arrays[i] + step * torch.rand(arrays[i].shape, generator=random, dtype=torch.float64))
            .requires_grad_()
            for i in moving
        ]  # fmt: skip
        try:
            if not points or not outputs(*points):
                return Slope("none")
            fast = sum(point.numel() for point in points) > WHOLE_ELEMENTS
            torch.autograd.gradcheck(outputs, points, atol=1e-4, fast_mode=fast)
            return Slope("agrees")
        except RuntimeError as error:
            messages.append(str(error).splitlines()[0])
    return Slope("differs", messages[0])


def in_float64(case):
    """The case with float64 wherever it has float32."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    widen(model.graph)
    for place in model.graph.input:
        place.type.CopyFrom(wider_type(place.type))
    return replace(
        case,
        model=model,
        inputs={name: wider(value) for name, value in case.inputs.items()},
        outputs={name: wider(value) for name, value in case.outputs.items()},
    )


def wider(value):
    """An array, or a list of arrays, in float64 where it is in float32."""
    if isinstance(value, list):
        return [wider(one) for one in value]
    array = value if value is None else np.asarray(value)
    return array.astype(np.float64) if array is not None and array.dtype == np.float32 else value


def wider_type(type_):
    """A type with float64 in place of float32."""
    found = onnx.TypeProto()
    found.CopyFrom(type_)
    inner = found.optional_type.elem_type if found.HasField("optional_type") else found
    inner = inner.sequence_type.elem_type if inner.HasField("sequence_type") else inner
    if inner.tensor_type.elem_type == TensorProto.FLOAT:
        inner.tensor_type.elem_type = TensorProto.DOUBLE
    return found


def widen(graph):
    """Makes the tensors that a graph holds, and those inside its nodes, float64."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t") and attribute.t.data_type == TensorProto.FLOAT:
                array = numpy_helper.to_array(attribute.t).astype(np.float64)
                attribute.t.CopyFrom(numpy_helper.from_array(array))
            if attribute.HasField("g"):
                widen(attribute.g)
