"""Runs of a model under ONNX Runtime's profiler, and the times of its operators in them.

1. The graph's operators become an ONNX model again. It has static shapes, and nothing that was
   folded. Every weight is an input, because in training it changes from step to step; so no weight
   is packed in advance, copied, or too large for a file.
2. Even without any optimization, a session replaces operators that ONNX Runtime has no kernel for
   by their definitions, and puts casts and copies between kernels. So the session writes out the
   model that it made; each node of it belongs to the operator whose output it makes or helps to
   make.
3. A second session runs this model, with numbers as names, under the profiler. It takes turns with
   the first session, which runs without.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, helper
from onnx.defs import OpSchema, SchemaError

from planner.artefacts.graph import Graph, Parameter, Tensor, producers, tensors_by_name
from planner.model.load import Model, Node
from planner.model.protos import operator_type
from planner.model.scopes import ALWAYS, OWN_DOMAIN
from planner.support.errors import OperatorError, OptionError
from planner.support.repeat import repeat

if TYPE_CHECKING:
    from onnxruntime import InferenceSession, IOBinding, SessionOptions

PROVIDERS: Mapping[str, str] = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
WARM_UPS = 2
"""Untimed runs of each session: the first runs allocate memory, and read weights from disk."""

IR_VERSION = 10
TRUNCATED_S = 0.5e-6
"""The profiler rounds times down to whole microseconds; this is the mean of what it cuts off."""

_KERNEL = "_kernel_time"
_ONNX_NAMES = {"float32": "FLOAT", "float64": "DOUBLE"}
_QUIET, _USUAL = 4, 2  # the lowest severities that ONNX Runtime logs

ProfilerEvent = Mapping[str, Any]
"""An event of the profiler, in the format of Chrome's traces; times in us."""


@dataclass(frozen=True, slots=True)
class TimedRuns:
    """Times of a number of runs.

    Attributes:
        samples: per operator of the graph, the time of its forward pass in each run, in s; zeros
            where no kernel ran for it.
        providers: number of operators that ran on each execution provider, by its name.
        parts_per_whole: sum over all kernels of a run, over the time of the run without profiler
            right before; median over the runs.
    """

    samples: tuple[tuple[float, ...], ...]
    providers: Mapping[str, int]
    parts_per_whole: float


def run(
    model: Model,
    values: Mapping[str, np.ndarray],
    *,
    device: str,
    threads: int,
    repetitions: int,
    progress: Callable[[int, int], None],
) -> TimedRuns:
    """Runs the model without and with the profiler, in turn, `repetitions` times each.

    Args:
        model: the model.
        values: inputs of the graph by name.
        device: "cpu", "cuda" or "cuda:N".
        threads: number of CPU threads within an operator.
        repetitions: number of timed runs.
        progress: called with the number of runs done and of all.

    Raises:
        OptionError: if the provider is not available, or the profiler drops kernels.
        OperatorError: if ONNX Runtime has no kernel for an operator.
    """
    held = dict(values) | {p.name: model.values[p.name] for p in model.graph.parameters}
    with TemporaryDirectory() as folder:
        options = _options(threads)
        options.optimized_model_filepath = str(Path(folder) / "made.onnx")
        plain = _session(model, runnable(model), options, device)
        made = onnx.load(options.optimized_model_filepath)
        owners = _owners(made.graph.node, model.graph)
        for i, node in enumerate(made.graph.node):
            node.name = str(i)
        options = _options(threads)
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "events")
        watched = _session(model, made, options, device)
        bindings = [_binding(one, held, model.graph, device) for one in (plain, watched)]
        all_runs, done = WARM_UPS + repetitions, count(1)

        def whole_s() -> float:
            """The time of a run without the profiler; one with it follows. In turn, so that a
            machine that is busy for a while slows both.
            """
            start = perf_counter()
            plain.run_with_iobinding(bindings[0])
            time_s = perf_counter() - start
            watched.run_with_iobinding(bindings[1])
            progress(next(done), all_runs)
            return time_s

        times_s = repeat(whole_s, least=repetitions, warm_ups=WARM_UPS)
        events = json.loads(Path(watched.end_profiling()).read_text())
    kernels = _kernels(events, len(owners), all_runs)[WARM_UPS:]
    return _runs(owners, kernels, len(model.graph.operators), times_s)


# ---- the model


def runnable(model: Model) -> ModelProto:
    """The operators of the graph as an ONNX model whose parameters are inputs.

    Constants that only configure an operator stay constants. Batch normalization and dropout work
    as in inference, as everywhere in the planner.
    """
    graph = model.graph
    tensors = tensors_by_name(graph)
    parameters = {p.name for p in graph.parameters}
    names = dict.fromkeys(name for node in model.nodes for name in node.inputs)
    constants = [name for name in names if name in model.values and name not in parameters]
    return helper.make_model(
        helper.make_graph(
            [_node(node) for node in model.nodes],
            "operators",
            [_declared(tensors[name]) for name in graph.inputs]
            + [_declared(parameter) for parameter in graph.parameters],
            [_declared(tensors[name]) for name in graph.outputs],
            [onnx.numpy_helper.from_array(model.values[name], name) for name in constants],
        ),
        opset_imports=list(model.proto.opset_import),
        ir_version=IR_VERSION,
    )


def _element_type(dtype: str) -> int:
    """ONNX's number of an element type.

    >>> _element_type("float32"), _element_type("bfloat16")
    (1, 16)
    """
    return int(TensorProto.DataType.Value(_ONNX_NAMES.get(dtype, dtype.upper())))


def _declared(one: Tensor | Parameter) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(one.name, _element_type(one.dtype), one.shape)


def _node(node: Node) -> NodeProto:
    """The node in ONNX, with a name for each required output, even if no operator reads it."""
    schema = _schema(node)
    outputs = [
        name or ("" if schema is None or _is_optional(schema, i) else f"{node.name}:{i}")
        for i, name in enumerate(node.outputs)
    ]
    while not outputs[-1]:  # absent ones at the end count for ONNX Runtime's checks
        outputs.pop()
    inputs = node.inputs[:2] if node.type == "Dropout" else node.inputs
    kind, domain = node.type, node.domain
    if domain == OWN_DOMAIN:  # in the file, it is an Identity with a mark
        kind, domain, inputs = "Identity", "", inputs[:1]
    made = helper.make_node(kind, inputs, outputs, node.name, domain=domain)
    made.attribute.extend(
        _attribute(name, value, schema)
        for name, value in node.attributes.items()
        if name not in ("training_mode", "padding_idx", "stop_gradient", "open_bounds", ALWAYS)
    )
    return made


def _schema(node: Node) -> OpSchema | None:
    try:
        return onnx.defs.get_schema(node.type, node.version, node.domain)
    except SchemaError:
        return None


def _is_optional(schema: OpSchema, position: int) -> bool:
    formal = schema.outputs[min(position, len(schema.outputs) - 1)]
    return bool(formal.option == OpSchema.FormalParameterOption.Optional)


def _attribute(name: str, value: object, schema: OpSchema | None) -> AttributeProto:
    """An attribute of a node. Its type comes from the operator's definition, because an empty list
    has none.
    """
    kind = None
    if schema is not None and name in schema.attributes:
        kind = int(schema.attributes[name].type)  # type: ignore[call-overload] # it is an IntEnum
    if isinstance(value, np.ndarray):
        value = onnx.numpy_helper.from_array(value)
    return helper.make_attribute(name, value, attr_type=kind)


# ---- sessions


def place_of(device: str) -> tuple[str, int]:
    """Kind and index of a device.

    >>> place_of("cuda:1"), place_of("cpu")
    (('cuda', 1), ('cpu', 0))
    """
    kind, _, index = device.partition(":")
    return kind, int(index or 0)


def _options(threads: int) -> "SessionOptions":
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _QUIET
    return options


def _session(
    model: Model, proto: ModelProto, options: "SessionOptions", device: str
) -> "InferenceSession":
    """A session on the device; operators that it has no kernel for run on the CPU."""
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as errors

    kind, index = place_of(device)
    wanted = PROVIDERS[kind]
    asked = [(wanted, {"device_id": str(index)})] if kind != "cpu" else []
    onnxruntime.set_default_logger_severity(_QUIET)
    try:
        session = onnxruntime.InferenceSession(
            proto.SerializeToString(), options, providers=[*asked, PROVIDERS["cpu"]]
        )
    except (errors.NotImplemented, errors.InvalidGraph, errors.Fail) as error:
        raise OperatorError(
            f"{model.path}: ONNX Runtime {onnxruntime.__version__} does not run this model:"
            f" {str(error).splitlines()[0]}; use --engine torch"
        ) from None
    finally:
        onnxruntime.set_default_logger_severity(_USUAL)
    if wanted not in session.get_providers():
        raise OptionError(
            f"--device {device}: expected {wanted}, ONNX Runtime {onnxruntime.__version__}"
            f" falls back on {', '.join(session.get_providers())} here; use --device cpu, or"
            " install onnxruntime-gpu with the versions of CUDA and cuDNN that it is built for"
        )
    return session


def _binding(
    session: "InferenceSession", held: Mapping[str, np.ndarray], graph: Graph, device: str
) -> "IOBinding":
    """A binding of inputs and parameters that are copied to the device once, and of outputs that
    stay there.
    """
    import onnxruntime

    binding, (kind, index) = session.io_binding(), place_of(device)
    for name, value in held.items():
        array = np.ascontiguousarray(value).reshape(value.shape)
        if array.dtype.name == "bfloat16":  # which numpy knows only through ml_dtypes
            placed = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
                array.view(np.uint16), TensorProto.BFLOAT16
            )
        else:
            placed = onnxruntime.OrtValue.ortvalue_from_numpy(array, kind, index)
        binding.bind_ortvalue_input(name, placed)
    for name in graph.outputs:
        binding.bind_output(name, kind, index)
    return binding


# ---- events


def _runs(
    owners: Sequence[int],
    runs: Sequence[Sequence[ProfilerEvent]],
    num_operators: int,
    whole_s: Sequence[float],
) -> TimedRuns:
    """The times of operators, from those of kernels.

    Args:
        owners: the operator of each kernel.
        runs: the kernels of each run, in the order of the nodes.
        num_operators: number of operators in the graph.
        whole_s: the time of the run without profiler before each of these runs.
    """
    times = np.array([[kernel["dur"] for kernel in run] for run in runs]) * 1e-6 + TRUNCATED_S
    by_operator = np.zeros((num_operators, len(runs)))
    np.add.at(by_operator, list(owners), times.T)
    placed = dict(zip(owners, (kernel["args"]["provider"] for kernel in runs[0]), strict=True))
    return TimedRuns(
        samples=tuple(tuple(row.tolist()) for row in by_operator),
        providers=Counter(placed.values()),
        parts_per_whole=float(np.median(times.sum(axis=1) / whole_s)),
    )


def _position(kernel: ProfilerEvent) -> int:
    """Index of a kernel's node in the model that was run; -1 if it is not in it."""
    name = kernel["name"].removesuffix(_KERNEL)
    return int(name) if name.isdecimal() else -1


def _kernels(
    events: Sequence[ProfilerEvent], num_nodes: int, num_runs: int
) -> list[list[ProfilerEvent]]:
    """The kernels of each run, in the order of the nodes.

    Raises:
        OptionError: if they are not one per node; the profiler drops events when it has too many.
    """
    runs: list[list[ProfilerEvent]] = [[]]
    for event in events:
        if event["cat"] == "Node" and event["name"].endswith(_KERNEL):
            runs[-1].append(event)
        elif event["name"] == "model_run":  # the last event of a run
            runs.append([])
    ordered = [sorted(run, key=_position) for run in runs[:-1]]
    if [[*map(_position, run)] for run in ordered] != [[*range(num_nodes)]] * num_runs:
        raise OptionError(
            f"--engine onnxruntime: expected {num_nodes} kernels in each of {num_runs} runs, its"
            " profiler reports others; use fewer --repetitions, or --engine torch"
        )
    return ordered


def _owners(nodes: Sequence[NodeProto], graph: Graph) -> list[int]:
    """The operator that each node belongs to.

    This is the operator whose output the node makes, or else the operator of its name. A node that
    ONNX Runtime has inserted belongs to the first operator that needs it.
    """
    made_by = producers(graph)
    named = {(o.name, o.type): i for i, o in enumerate(graph.operators)}
    # By tensor, the first operator that needs it. Nodes are in topological order, so from the end
    # every reader of a node's outputs has its owner before the node asks.
    needed_by: dict[str, int] = {}
    owners = []
    for node in reversed(nodes):
        makes = [made_by[output] for output in node.output if output in made_by]
        helps = [needed_by[output] for output in node.output if output in needed_by]
        own = named.get((node.name, operator_type(node)), min(helps, default=0))
        owner = makes[0] if makes else own
        owners.append(owner)
        for read in node.input:
            needed_by[read] = min(owner, needed_by.get(read, owner))
    return owners[::-1]
