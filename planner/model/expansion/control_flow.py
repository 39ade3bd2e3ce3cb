"""If, Loop, Scan, SequenceMap and operators that are functions, as the nodes that they run.

    If with a known condition     ->  the nodes of its branch
    Loop, Scan, SequenceMap       ->  the nodes of every iteration; their number has to be known
    operators that are functions  ->  the nodes of the function

What is carried from one iteration to the next has no operator: it is a name. A tensor that is
collected over the iterations is an Unsqueeze of each part and a Concat; one that is read row by row
is a Split and a Squeeze of each part.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count

import numpy as np
from onnx import helper

from planner.model.expansion.inlining import INLINED_OPERATORS, function_graph
from planner.model.expansion.nested import Body, Call, Expander, Handler, TensorSequence, Value
from planner.model.expansion.sequences import known_number, sequence
from planner.support.errors import ModelError


def _if(x: Expander, call: Call) -> Sequence[Value]:
    condition = known_number(x, call, 0, "condition")
    assert condition is not None, "ONNX requires the condition"
    branch = "then" if condition else "else"
    graph = call.graph(f"{branch}_branch")
    body = x.body(graph)
    return x.walk(body, x.open(call, body, branch), wanted=x.wanted(call, graph.output))


def _loop(x: Expander, call: Call) -> Sequence[Value | None]:
    body = x.body(call.graph("body"))
    scope = x.open(call, body)
    carried = list(call.inputs[2:])
    _check_body(call, body, 2 + len(carried), 1 + len(carried))
    number, going, *names = (value.name for value in body.graph.input)
    outputs = body.graph.output[1 : 1 + len(carried)]
    rows: list[list[Value | None]] = []
    conditional = len(call.inputs) > 1 and call.inputs[1] is not None
    for i, last in _iterations(x, call, body):
        values = dict(zip(names, carried, strict=True))
        values[number] = x.constant(x.fresh(f"{call.name}/{i}/{number}"), np.array(i))
        values[going] = x.constant(x.fresh(f"{call.name}/{i}/{going}"), np.array(True))
        wanted = x.wanted(call, outputs) if last else {}
        condition, *results = x.walk(body, scope, values, wanted, i)
        carried = list(results[: len(carried)])
        rows.append(list(results[len(carried) :]))
        if conditional and not _goes_on(x, call, condition, i):
            break
    stacked = [
        _stacked(x, call, [row[k] for row in rows], 1 + len(carried) + k, len(carried) + k)
        for k in range(len(body.graph.output) - 1 - len(carried))
    ]
    return [*carried, *stacked]


def _check_body(call: Call, body: Body, num_inputs: int, least_outputs: int) -> None:
    """Refuses a graph that does not take and return what the node around it gives and carries on.

    Raises:
        ModelError: if it does not.
    """
    inputs, outputs = len(body.graph.input), len(body.graph.output)
    if inputs != num_inputs or outputs < least_outputs:
        raise ModelError(
            f"{call}: expected a graph with {num_inputs} inputs and at least {least_outputs}"
            f" outputs, got {inputs} and {outputs}; export the model again"
        )


def _iterations(x: Expander, call: Call, body: Body) -> Iterator[tuple[int, bool]]:
    """Numbers of the iterations of a Loop, and whether the number says that it is the last."""
    limit = known_number(x, call, 0, "number of iterations")
    start = known_number(x, call, 1, "condition")
    most = None if limit is None else int(limit)
    if start is None:
        if most is None:
            raise ModelError(f"{call}: expected a number of iterations or a condition, got neither")
        x.charge(call, body, most)
    elif not start:
        return
    for i in count() if most is None else range(most):
        if start is not None:
            x.charge(call, body, 1)
        yield i, most == i + 1


def _goes_on(x: Expander, call: Call, condition: Value, iteration: int) -> bool:
    """The condition that an iteration ends with."""
    value = x.evaluate_now(call, condition) if isinstance(condition, str) else None
    if value is None:
        raise ModelError(
            f"{call}: expected a condition that is known before the model runs, got one that"
            f" depends on data after iteration {iteration}, so the model cannot be planned; export"
            " it with a fixed number of iterations"
        )
    if value.size != 1:
        raise ModelError(
            f"{call}: expected one condition, got {value.size}; export the model again"
        )
    return bool(value.item())


def _stacked(
    x: Expander,
    call: Call,
    rows: Sequence[Value | None],
    body_output: int,
    position: int,
    axis: int = 0,
) -> Value | None:
    """An output that collects a tensor of every iteration along a new axis; None if absent.

    Args:
        x: for new operators.
        call: a Loop or Scan.
        rows: the tensors in the order of the result.
        body_output: position of the tensor among the outputs of the graph.
        position: of the output of the call.
        axis: the new one.
    """
    output = x.output(call, position)
    if not output:
        return None
    names = [row for row in rows if isinstance(row, str)]
    if len(names) < len(rows):
        raise ModelError(f"{call}: expected tensors to collect, got a sequence or optional")
    if names:
        x.stack(call, names, axis, output, f"_{position}")
        return output
    tensor = call.graph("body").output[body_output].type.tensor_type
    if not all(dim.HasField("dim_value") for dim in tensor.shape.dim):
        raise ModelError(
            f"{call}: expected at least one iteration, got none, and the shape of output"
            f" {position} is not in the file; export the model again"
        )
    shape = [dim.dim_value for dim in tensor.shape.dim]
    shape.insert(axis, 0)
    return x.constant(output, np.zeros(shape, helper.tensor_dtype_to_np_dtype(tensor.elem_type)))


def _scan(x: Expander, call: Call) -> Sequence[Value | None]:
    if x.tensors.opsets[""] < 9:
        raise ModelError(f"{call}: expected Scan of version 9 or newer, got 8; export it again")
    body = x.body(call.graph("body"))
    scope = x.open(call, body)
    num_scanned = call.integer("num_scan_inputs")
    num_carried = len(call.inputs) - num_scanned
    if not 0 < num_scanned <= len(call.inputs):
        raise ModelError(
            f"{call}: num_scan_inputs: expected 1 to {len(call.inputs)}, got {num_scanned}; export"
            " the model again"
        )
    _check_body(call, body, len(call.inputs), num_carried)
    num_outputs = len(body.graph.output) - num_carried
    names = [value.name for value in body.graph.input]
    tensors = [call.tensor(num_carried + k) for k in range(num_scanned)]
    axes, length = _scanned(x, call, tensors)
    x.charge(call, body, length)
    parts = [_split(x, call, *one, k) for k, one in enumerate(zip(tensors, axes, strict=True))]
    backwards = _each(call, "scan_input_directions", num_scanned)
    carried = list(call.inputs[:num_carried])
    rows: list[list[Value]] = []
    for i in range(length):
        values = dict(zip(names, carried, strict=False))
        for k, name in enumerate(names[num_carried:]):
            part = parts[k][length - 1 - i if backwards[k] else i]
            row = x.fresh(f"{call.name}/{i}/{name}")
            x.without_axis(call, part, axes[k], row, f"{i}/Squeeze_{k}")
            values[name] = row
        outputs = body.graph.output[:num_carried]
        wanted = x.wanted(call, outputs) if i == length - 1 else {}
        results = x.walk(body, scope, values, wanted, i)
        carried = list(results[:num_carried])
        rows.append(results[num_carried:])
    axes = _each(call, "scan_output_axes", num_outputs)
    backwards = _each(call, "scan_output_directions", num_outputs)
    stacked = []
    for k in range(num_outputs):
        column = [row[k] for row in (reversed(rows) if backwards[k] else rows)]
        stacked.append(_stacked(x, call, column, num_carried + k, num_carried + k, axes[k]))
    return [*carried, *stacked]


def _scanned(x: Expander, call: Call, tensors: Sequence[str]) -> tuple[Sequence[int], int]:
    """The axis of each scanned tensor, counted from the front, and their one length there."""
    given = _each(call, "scan_input_axes", len(tensors))
    axes = [_axis(x, call, name, axis) for name, axis in zip(tensors, given, strict=True)]
    lengths = {x.shape(name)[axis] for name, axis in zip(tensors, axes, strict=True)}
    if len(lengths) != 1:
        raise ModelError(f"{call}: expected inputs of one length, got {sorted(lengths)}")
    return axes, lengths.pop()


def _each(call: Call, name: str, count: int) -> Sequence[int]:
    """An attribute with an integer for each scanned tensor, zeros by default."""
    given = call.integers(name, [0] * count)
    if len(given) != count:
        raise ModelError(
            f"{call}: {name}: expected {count} integers, got {len(given)}; export the model again"
        )
    return given


def _axis(x: Expander, call: Call, name: str, axis: int) -> int:
    """The axis of a tensor, counted from the front."""
    rank = len(x.shape(name))
    if not -rank <= axis < rank:
        raise ModelError(
            f"{call}: expected {name!r} with an axis {axis}, got the shape {list(x.shape(name))};"
            " export the model again"
        )
    return axis % rank


def _split(x: Expander, call: Call, name: str, axis: int, k: int) -> list[str]:
    """Names of the parts of a scanned tensor, each of size 1 along the axis."""
    length = x.shape(name)[axis]
    if length < 2:
        return [name] * length
    parts = [x.fresh(f"{call.name}/{name}.{i}") for i in range(length)]
    x.split(call, name, axis, [1] * length, parts, f"Split_{k}")
    return parts


def _sequence_map(x: Expander, call: Call) -> Sequence[Value]:
    body = x.body(call.graph("body"))
    scope = x.open(call, body)
    length = len(sequence(call))
    x.charge(call, body, length)
    _check_body(call, body, len(call.inputs), 1)
    columns: list[Sequence[Value | None]] = []
    for k, value in enumerate(call.inputs):
        listed = isinstance(value, TensorSequence)
        columns.append(x.elements(call, sequence(call, k)) if listed else [value] * length)
    rows = []
    for i in range(length):
        inputs = zip(body.graph.input, columns, strict=True)
        rows.append(x.walk(body, scope, {value.name: one[i] for value, one in inputs}, {}, i))
    tensors = [[row[k] for row in rows] for k in range(len(body.graph.output))]
    return [TensorSequence(tuple(one for one in column if isinstance(one, str)))
            for column in tensors]  # fmt: skip


def _function(x: Expander, call: Call) -> Sequence[Value | None]:
    node = x.flat_node(call)
    if x.tensors.fold(node):
        return list(node.output)
    pass_ = x.tensors
    graph = function_graph(node, pass_.types, pass_.opset_imports, pass_.ir_version)
    body = x.body(graph)
    names = [name for name in node.output if name]
    values = {value.name: value.name for value in graph.input}
    results = x.walk(body, x.open_function(call, body), values, {name: name for name in names})
    found = dict(zip(names, results, strict=True))
    return [found.get(name) for name in node.output]


CONTROL_FLOW: Mapping[str, Handler] = {
    "If": _if,
    "Loop": _loop,
    "Scan": _scan,
    "SequenceMap": _sequence_map,
    **dict.fromkeys(sorted(INLINED_OPERATORS), _function),
}
