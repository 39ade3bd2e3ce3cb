"""PipeDream's graph.txt: one line per node, one line per edge.

    node1 -- Conv2d(3, 64) -- forward_compute_time=0.5, backward_compute_time=1.0, \
activation_size=4096.0, parameter_size=[or a list: 1024.0; 64.0] -- stage_id=0
    <tab>node1 -- node2

Times are in ms, sizes in bytes; a size may be a list, whose sum counts. The last field is written
by the optimizer. A file says neither the number of samples that its times are for nor the device
that they were measured on: `to_profile` makes a profile of microbatch size 1 on the device type
"imported", whose times hold on every device.

Nodes called "Input..." that nothing feeds are the model's inputs: PipeDream takes them out before
it plans, with their time, so they are inputs of the graph and no operators. Every other node is an
operator with one output, which it stashes, and at most one parameter. Operators keep the order of
the file as far as the edges allow. The loss is computed from the sink that most nodes lead to.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from heapq import heapify, heappop, heappush
from itertools import pairwise
from math import ceil, isfinite
from pathlib import Path

from planner.artefacts.formats.dnn_partitioning import imported_profile
from planner.artefacts.graph import (
    MAX_BYTES,
    Graph,
    Operator,
    Parameter,
    Tensor,
    consumers,
    parameters_by_name,
    producers,
    tensors_by_name,
)
from planner.artefacts.profile import Profile
from planner.support.errors import FileError
from planner.support.outputs import FileKind, head_of
from planner.support.printable import printable
from planner.support.reading import read_text

GRAPH_TXT = "PipeDream's graph.txt"
ADVICE = "a line is NODE -- DESCRIPTION -- forward_compute_time=..., or <tab>NODE -- NODE"
# More ms than a profile's times may have.
_MAX_MS = 1e12

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_NODE = re.compile(
    r"(?P<id>\S+) -- (?P<description>.*) -- (?P<figures>forward_compute_time=.*?)"
    r"(?: -- stage_id=(?P<stage>\S+))?\s*"
)
_EDGE = re.compile(r"\s*(?P<source>\S+) -- (?P<target>\S+)\s*")
_FIGURE = re.compile(r"(?P<field>\w+)=(?P<value>\[[^\]]*\]|[^,\s]+)")
_NODE_ID = re.compile(r"node\d+")


@dataclass(frozen=True, slots=True)
class TextNode:
    """A line of the file that describes a node.

    Attributes:
        name: such as "node12".
        description: such as "Conv2d(3, 64)".
        forward_ms: time of the forward pass.
        backward_ms: time of the backward pass.
        activation_bytes: of each of its outputs; fractions are kept.
        parameter_bytes: of each of its parameters; fractions are kept.
        stage: the stage that the file gives it, None where it gives none.
    """

    name: str
    description: str
    forward_ms: float
    backward_ms: float
    activation_bytes: tuple[float, ...]
    parameter_bytes: tuple[float, ...]
    stage: int | None = None


@dataclass(frozen=True, slots=True)
class GraphText:
    """The content of a graph.txt.

    Attributes:
        nodes: in the order of the file.
        edges: (source, target), in the order of the file.
    """

    nodes: tuple[TextNode, ...]
    edges: tuple[tuple[str, str], ...]


# -------------------------------------------------------------------------------- text -> nodes


def is_graph_txt(text: str) -> bool:
    """Whether a text looks like a graph.txt: it has a line that begins like a node's."""
    return any(re.match(r"\S+ -- .* -- forward_compute_time=", line) for line in text.splitlines())


def parse(text: str, path: Path) -> GraphText:
    """The nodes and edges of a text.

    Args:
        path: where it comes from, for messages.

    Raises:
        FileError: for all mistakes at once, with the numbers of their lines; for edges that run in
            a circle, if nothing else is wrong.
    """
    nodes: dict[str, TextNode] = {}
    edges: dict[tuple[str, str], int] = {}
    problems: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        node, edge = _NODE.fullmatch(line), _EDGE.fullmatch(line)
        if node is not None:
            described, wrong = _node(node)
            problems += [(number, problem) for problem in wrong]
            if described.name in nodes:
                problems.append((number, f"expected each node once, got {described.name!r} again"))
            nodes[described.name] = described
        elif edge is not None:
            edges.setdefault((edge["source"], edge["target"]), number)
        else:
            problems.append((number, f"expected a node or an edge, got {line.strip()!r:.60}"))
    problems = [*problems, *_strangers(edges, nodes)] or _circle(edges)
    if problems:
        lines = [f"{path}: line {number}: {problem}" for number, problem in sorted(problems)]
        raise FileError("\n".join((*lines, f"{path}: {GRAPH_TXT}: {ADVICE}")))
    if not nodes:
        raise FileError(f"{path}: expected {GRAPH_TXT}, it has no node; {ADVICE}")
    return GraphText(tuple(nodes.values()), tuple(edges))


def _strangers(
    edges: Mapping[tuple[str, str], int], nodes: Collection[str]
) -> Iterator[tuple[int, str]]:
    """The lines of edges that name no nodes, and the messages on them."""
    for (source, target), number in edges.items():
        for name in dict.fromkeys((source, target)):
            if name not in nodes:
                yield number, f"an edge names {name!r}, which is no node of the file"


def _circle(edges: Mapping[tuple[str, str], int]) -> list[tuple[int, str]]:
    """The line of the last edge of a circle, and the message on it; empty without a circle.

    Args:
        edges: the line of each.
    """
    sorter = TopologicalSorter[str]()
    for source, target in edges:
        sorter.add(target, source)
    try:
        sorter.prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        line = max(edges[pair] for pair in pairwise(circle))
        shown = " -> ".join(circle if len(circle) <= 8 else (*circle[:7], "..", circle[0]))
        return [(line, f"expected edges that never run in a circle, got {shown}")]
    return []


def _node(match: re.Match[str]) -> tuple[TextNode, list[str]]:
    """The node of a line, and the mistakes in it."""
    given = [(one["field"], one["value"]) for one in _FIGURE.finditer(match["figures"])]
    wrong = [
        f"{field}: unknown field; known: {', '.join(_FIELDS)}"
        for field, _ in given
        if field not in _FIELDS
    ]
    values = dict(given)
    if len(values) < len(given):
        wrong.append("expected each field once")
    figures = [_figures(field, values.get(field), wrong) for field in _FIELDS]
    stage = match["stage"]
    if stage is not None and not (stage.isascii() and stage.isdecimal()):
        wrong.append(f"stage_id: expected a number of at least 0, got {stage!r:.60}")
        stage = None
    forward, backward, activation, parameter = figures
    node = TextNode(
        match["id"],
        match["description"],
        forward[0],
        backward[0],
        activation,
        parameter,
        None if stage is None else int(stage),
    )
    return node, wrong


def _figures(field: str, text: str | None, wrong: list[str]) -> tuple[float, ...]:
    """The numbers of a field; 0 after what is wrong about them is noted."""
    if text is None:
        wrong.append(f"{field}: missing")
        return (0.0,)
    is_time = field.endswith("time")
    numbers = _numbers(text, _MAX_MS if is_time else MAX_BYTES)
    if numbers is None or (is_time and len(numbers) > 1):
        what = "a time in ms" if is_time else "bytes, or a list of bytes such as [8.0; 4.0]"
        wrong.append(f"{field}: expected {what}, got {text!r:.60}")
        return (0.0,)
    return numbers


def _numbers(text: str, most: float) -> tuple[float, ...] | None:
    """The numbers of "1.5" or "[1.5; 2]"; None if it holds something else, one that is negative,
    or a sum that is too large.
    """
    pieces = text[1:-1].split(";") if text.startswith("[") else [text]
    try:
        numbers = tuple(float(piece) for piece in pieces)
    except ValueError:
        return None
    sound = all(isfinite(number) and number >= 0 for number in numbers) and sum(numbers) <= most
    return numbers if sound else None


# -------------------------------------------------------------------------------- nodes -> profile


def to_profile(text: GraphText, path: Path) -> Profile:
    """The profile that the nodes describe.

    Sizes are rounded up to whole bytes.

    Raises:
        FileError: if nothing computes.
    """
    feeds: dict[str, list[str]] = {node.name: [] for node in text.nodes}
    for source, target in text.edges:
        feeds[target].append(source)
    inputs = [n for n in text.nodes if n.description.startswith("Input") and not feeds[n.name]]
    order = _in_order(text.nodes, feeds)
    inner = [node for node in order if node not in inputs]
    if not inner:
        raise FileError(f"{path}: expected {GRAPH_TXT} with nodes that compute, it has only inputs")
    if not any(node.forward_ms or node.backward_ms for node in inner):
        raise FileError(f"{path}: expected {GRAPH_TXT} with times, all nodes take 0 ms")
    return imported_profile(
        _graph(inputs, inner, feeds),
        ((node.forward_ms / 1000.0, node.backward_ms / 1000.0) for node in inner),
    )


def _graph(
    inputs: Sequence[TextNode], inner: Sequence[TextNode], feeds: Mapping[str, Sequence[str]]
) -> Graph:
    """The graph of nodes that compute, in order, and of the inputs.

    Args:
        feeds: the nodes that feed each.
    """
    weighty = [node for node in inner if _whole(node.parameter_bytes)]
    with_parameters = {node.name: (_parameter(node),) for node in weighty}
    return Graph(
        operators=tuple(
            Operator(
                name=node.name,
                type=node.description,
                inputs=tuple(feeds[node.name]),
                outputs=(node.name,),
                parameters=with_parameters.get(node.name, ()),
            )
            for node in inner
        ),
        tensors=tuple(
            Tensor(one.name, *_shape(_whole(one.activation_bytes)), gradient=one not in inputs)
            for one in (*inputs, *inner)
        ),
        parameters=tuple(
            Parameter(_parameter(node), *_shape(_whole(node.parameter_bytes)), trainable=True)
            for node in weighty
        ),
        inputs=tuple(node.name for node in inputs),
        outputs=_sinks(inner, feeds),
    )


def _in_order(
    nodes: Sequence[TextNode], feeds: Mapping[str, Sequence[str]]
) -> tuple[TextNode, ...]:
    """The nodes in topological order; of all nodes that are ready, the first one of the file."""
    place = {node.name: i for i, node in enumerate(nodes)}
    left = {node.name: len(feeds[node.name]) for node in nodes}
    readers: dict[str, list[str]] = {node.name: [] for node in nodes}
    for node in nodes:
        for source in feeds[node.name]:
            readers[source].append(node.name)
    ready = [place[name] for name, count in left.items() if not count]
    heapify(ready)
    order = []
    while ready:
        node = nodes[heappop(ready)]
        order.append(node)
        for name in readers[node.name]:
            left[name] -= 1
            if not left[name]:
                heappush(ready, place[name])
    return tuple(order)


def _sinks(order: Sequence[TextNode], feeds: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The nodes that nobody reads: first the one that most others lead to, of equals the last one,
    then the rest in order.
    """
    place = {node.name: i for i, node in enumerate(order)}
    # Per node, the nodes that lead to it, as bits.
    before: list[int] = []
    for node in order:
        mask = 0
        for name in feeds[node.name]:
            if name in place:
                mask |= before[place[name]] | 1 << place[name]
        before.append(mask)
    read = {name for node in order for name in feeds[node.name]}
    sinks = [i for i, node in enumerate(order) if node.name not in read]
    loss = max(sinks, key=lambda i: (before[i].bit_count(), i))
    return tuple(order[i].name for i in (loss, *(i for i in sinks if i != loss)))


def _whole(sizes: Iterable[float]) -> int:
    return ceil(sum(sizes))


def _parameter(node: TextNode) -> str:
    return f"{node.name}.parameters"


def _shape(size_bytes: int) -> tuple[tuple[int, ...], str]:
    """A size as float32 elements, or as plain bytes where it is no multiple of 4."""
    whole, rest = divmod(size_bytes, 4)
    return ((size_bytes,), "uint8") if rest else ((whole,), "float32")


# -------------------------------------------------------------------------------- writing


def from_profile(profile: Profile, stages: Mapping[str, int] | None = None) -> GraphText:
    """A profile as nodes and edges. Inputs of the graph become nodes "Input0", "Input1", ... of
    stage 0. Nodes are called by their operators where those are called "node1", "node2", ...;
    otherwise they are numbered, and the operator's name stands in the description.

    The format has no place for shapes, FLOPs, the stash and shared parameters, which are lost. Only
    trained parameters count, because PipeDream synchronises and stashes parameters.

    Args:
        stages: per operator, the stage to write; None writes none.
    """
    graph = profile.graph
    tensors, made_by, parameters = (
        tensors_by_name(graph), producers(graph), parameters_by_name(graph)
    )  # fmt: skip
    own, input_ids, ids = _node_ids(graph)
    together = sum if profile.launch_blocking else max  # of device and host
    nodes = [
        TextNode(one, f"Input{i}", 0.0, 0.0, (float(tensors[name].bytes),), (0.0,),
             None if stages is None else 0)
        for i, (name, one) in enumerate(input_ids.items())
    ]  # fmt: skip
    edges = []
    for v, (operator, cost) in enumerate(zip(graph.operators, profile.operators, strict=True)):
        trained = [parameters[p].bytes for p in operator.parameters if parameters[p].trainable]
        nodes.append(
            TextNode(
                ids[v],
                operator.type if own else f"{operator.type}({' '.join(operator.name.split())})",
                together((cost.forward_s, cost.host_forward_s)) * 1000.0,
                together((cost.backward_s, cost.host_backward_s)) * 1000.0,
                tuple(float(tensors[name].bytes) for name in operator.outputs) or (0.0,),
                (float(sum(trained)),),
                None if stages is None else stages[operator.name],
            )
        )
        edges += [
            (ids[made_by[name]] if name in made_by else input_ids[name], ids[v])
            for name in operator.inputs
        ]
    return GraphText(tuple(nodes), tuple(dict.fromkeys(edges)))


def _node_ids(graph: Graph) -> tuple[bool, dict[str, str], Sequence[str]]:
    """Whether the nodes are called as in the graph; the nodes of inputs by name, and those of the
    operators.
    """
    read_by, given = consumers(graph), [operator.name for operator in graph.operators]
    if all(_NODE_ID.fullmatch(name) for name in (*given, *graph.inputs)):
        return True, {name: name for name in graph.inputs}, given
    inputs = [name for name in graph.inputs if read_by[name]]
    ids = [f"node{i}" for i in range(1, len(inputs) + len(given) + 1)]
    return False, dict(zip(inputs, ids, strict=False)), ids[len(inputs) :]


def to_text(graph: GraphText) -> str:
    """The file, nodes first."""
    return "".join(f"{line}\n" for line in _lines(graph))


def _lines(graph: GraphText) -> Iterator[str]:
    for node in graph.nodes:
        figures = (
            _number(node.forward_ms),
            _number(node.backward_ms),
            _sizes(node.activation_bytes),
            _sizes(node.parameter_bytes),
        )
        text = ", ".join(f"{field}={value}" for field, value in zip(_FIELDS, figures, strict=True))
        stage = "" if node.stage is None else f" -- stage_id={node.stage}"
        yield f"{printable(node.name)} -- {printable(node.description)} -- {text}{stage}"
    yield from (f"\t{printable(source)} -- {printable(target)}" for source, target in graph.edges)


def _number(value: float) -> str:
    """Three digits after the point, as PipeDream writes, or as many as it takes, up to 15 in all.

    >>> _number(0.5), _number(0.12345), _number(44302336.0)
    ('0.500', '0.12345', '44302336.000')
    """
    short = f"{value:.3f}"
    exact = f"{value:.15g}"
    return short if float(short) == float(exact) else exact


def _sizes(sizes: tuple[float, ...]) -> str:
    texts = [_number(size) for size in sizes]
    return texts[0] if len(texts) == 1 else f"[{'; '.join(texts)}]"


def annotate(text: str, stages: Mapping[str, int]) -> str:
    """The same text with the stage of every node as the last field; all else stays as it is.

    Args:
        text: a graph.txt that `parse` takes.
        stages: per operator; nodes that are none, the inputs, get stage 0.
    """
    lines = []
    for line in text.splitlines():
        node = _NODE.fullmatch(line)
        if node is None:
            lines.append(line)
            continue
        bare = line if node["stage"] is None else line[: line.rindex(" -- stage_id=")]
        lines.append(f"{bare.rstrip()} -- stage_id={stages.get(node['id'], 0)}")
    return "".join(f"{line}\n" for line in lines)


def _is_written_here(path: Path) -> bool:
    """Whether a file is a graph.txt as `to_text` writes it: with at least three digits behind every
    point, which PipeDream's profiler does not write for activations.
    """
    try:
        text = read_text(path, GRAPH_TXT, ADVICE)
        return is_graph_txt(text) and to_text(parse(text, path)) == text
    except FileError:
        return False


GRAPH_FILE = FileKind("a graph.txt", _is_written_here)

_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f")


_DOT_HEAD = ("digraph stages {", "  node [shape=box, style=filled, fillcolor=white];")
DOT_FILE = FileKind(
    "a picture for Graphviz", lambda path: head_of(path).startswith("\n".join(_DOT_HEAD))
)


def to_dot(graph: GraphText) -> str:
    """The graph for Graphviz, one colour per stage; colours come again after 8 stages."""
    lines = list(_DOT_HEAD)
    for node in graph.nodes:
        name = printable(node.name)
        label = _quoted(f"{name}: {printable(node.description)}")
        if node.stage is None:
            lines.append(f"  {_quoted(name)} [label={label}];")
        else:
            label = _quoted(f"{name}: {printable(node.description)}\nstage {node.stage}")
            colour = _COLOURS[node.stage % len(_COLOURS)]
            lines.append(f'  {_quoted(name)} [label={label}, fillcolor="{colour}"];')
    edges = ((printable(source), printable(target)) for source, target in graph.edges)
    lines += [f"  {_quoted(source)} -> {_quoted(target)};" for source, target in edges]
    return "\n".join((*lines, "}\n"))


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
