"""The notes that PyTorch's exporters leave at each node: which module and which call it came from.

torch.onnx.export with dynamo=True writes them into the node's metadata:

    pkg.torch.onnx.name_scopes      ['', 'h', 'h.0', 'h.0.ln', 'layer_norm']
    pkg.torch.onnx.class_hierarchy  ['GPT2', ..., 'torch.nn.LayerNorm', 'aten.layer_norm.default']
    pkg.torch.onnx.fx_node          %layer_norm : ... = call_function[target=torch.ops.aten.
                                    layer_norm.default](args = (%x, [32], %p_h_0_ln_weight, ...

`planner export` keeps the first two, and adds marks of its own for what ONNX cannot express. They
are metadata of nodes that ONNX has, so that other programs read the file as if there were none:

    planner.padding_idx    at a Gather: the row of the table that gets no gradient
    planner.stop_gradient  at an Identity: no gradient flows back through it
    planner.open_bounds    at a Clip: the gradient at its bounds is zero
    planner.state          at an Identity: a buffer; the node makes its value after the microbatch
    planner.evaluation     at an Identity: a tensor, which the node gives in evaluation
    planner.mode           at a BatchNormalization or Dropout: "always", it computes as in training
                           in evaluation, too

While a model is read, Identities with a state or an evaluation become operators of the planner's
own domain, with all that they read among their inputs.

The older exporter writes the path into the node's name: "/h.0/ln/LayerNormalization".
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from onnx import ModelProto, NodeProto, helper

from planner.model.protos import metadata

_NAME_SCOPES = "pkg.torch.onnx.name_scopes"
_CLASSES = "pkg.torch.onnx.class_hierarchy"
FX_NODE = "pkg.torch.onnx.fx_node"
PADDING_MARK, STOP_MARK = "planner.padding_idx", "planner.stop_gradient"
OPEN_MARK = "planner.open_bounds"
STATE_MARK, EVALUATION_MARK, MODE_MARK = "planner.state", "planner.evaluation", "planner.mode"
MARKS = frozenset({
    PADDING_MARK, STOP_MARK, OPEN_MARK, STATE_MARK, EVALUATION_MARK, MODE_MARK,
})  # fmt: skip
"""Keys of the marks that say what ONNX cannot. They are part of what a model computes."""
ALWAYS = "always"
OWN_DOMAIN = "planner"
NEXT_STATE, BY_MODE = "NextState", "ByMode"
"""Operators (value, state) -> value, and (in training, in evaluation) -> one of them."""
_RULES = "pkg.onnxscript.rewriter.rule_name"
_CALL = re.compile(r"target=torch\.ops\.\w+\.(\w+)")
# embedding(table, indices, row): a row from 0 on.
_PADDING = re.compile(r"ops\.aten\.embedding\.\w+\]\(args = \(%\w+, %\w+, (\d+)[,)]")
_PAIRS = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class Scope:
    """The place in a PyTorch module that a node came from.

    Attributes:
        module: path of the innermost module, "" for the whole one; None where it is not known.
        kind: class of the innermost module; "" where it is not known.
        root: class of the whole network; "" where it is not known.
        call: torch's operator without namespace and overload, such as "layer_norm"; "" where it is
            not known.
        arguments: of the call, in order: the names among each, without "%"; () for numbers.
        padding: row of an embedding's table that gets no gradient; None for none.
        rules: names of the exporter's rewritings that made the node, "" for none.
    """

    module: str | None
    kind: str = ""
    root: str = ""
    call: str = ""
    arguments: tuple[tuple[str, ...], ...] = ()
    padding: int | None = None
    rules: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """All names among the arguments."""
        return tuple(name for argument in self.arguments for name in argument)


def scope_of(node: NodeProto) -> Scope:
    """The place that a node came from, as far as its metadata and its name say."""
    notes = metadata(node)
    path, kinds = _strings(notes.get(_NAME_SCOPES, "")), _strings(notes.get(_CLASSES, ""))
    call, arguments = _call(notes.get(FX_NODE, ""))
    # The last entry of both lists is the call.
    module = path[-2] if len(path) > 1 else "" if path else _path_in(node.name)
    kind = kinds[-2] if len(kinds) > 1 else ""
    root = kinds[0] if len(kinds) > 1 else ""
    row = padding_in(notes)
    return Scope(module, kind, root, call, arguments, row, notes.get(_RULES, ""))


def module_names(nodes: Iterable[NodeProto]) -> list[str]:
    """The modules that nodes came from, each once, for messages.

    >>> node = NodeProto(op_type="Foo")
    >>> scopes, classes = "['', 'mlp', 'foo']", "['m.Net', 'm.Mlp', 'foo']"
    >>> _ = node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scopes)
    >>> _ = node.metadata_props.add(key="pkg.torch.onnx.class_hierarchy", value=classes)
    >>> module_names([node, NodeProto(op_type="Foo")])
    ['mlp (Mlp)']
    """
    return list(dict.fromkeys(filter(None, map(_module_name, map(scope_of, nodes)))))


def _module_name(scope: Scope) -> str:
    kind = scope.kind.rpartition(".")[2]
    if not scope.module and not kind:
        return ""
    name = scope.module or "the whole model"
    return f"{name} ({kind})" if kind else name


def padding_in(notes: Mapping[str, str]) -> int | None:
    """The row of an embedding's table that gets no gradient, by a node's metadata."""
    mark = notes.get(PADDING_MARK, "")
    if mark.isdecimal():
        return int(mark)
    noted = _PADDING.search(notes.get(FX_NODE, ""))
    return None if noted is None else int(noted[1])


def stops_gradient(node: NodeProto) -> bool:
    """Whether no gradient flows back through a node, by a mark of `planner export`."""
    return node.op_type == "Identity" and STOP_MARK in metadata(node)


def is_next_state(node: NodeProto) -> bool:
    """Whether a node makes the next value of a state, which the next microbatch reads."""
    return node.op_type == NEXT_STATE and node.domain == OWN_DOMAIN


def mark_of(node: NodeProto, key: str) -> str:
    """The value of a mark; "" without it."""
    return metadata(node).get(key, "")


def states_in(nodes: Iterable[NodeProto]) -> frozenset[str]:
    """The initializers that some nodes make new values of."""
    return frozenset(filter(None, (mark_of(node, STATE_MARK) for node in nodes)))


def explicit(proto: ModelProto) -> ModelProto:
    """A copy of a model with operators of the planner's own in place of marked identities; itself
    without any.
    """
    if not any(_own_operator(node) for node in proto.graph.node):
        return proto
    marked, proto = proto, ModelProto()
    proto.CopyFrom(marked)
    for node in proto.graph.node:
        if own := _own_operator(node):
            node.op_type, node.domain = own[0], OWN_DOMAIN
            node.input.append(own[1])
    proto.opset_import.append(helper.make_opsetid(OWN_DOMAIN, 1))
    return proto


def _own_operator(node: NodeProto) -> tuple[str, str] | None:
    """The operator that a marked Identity stands for, and its second input."""
    if node.op_type != "Identity" or node.domain:
        return None
    kinds: Mapping[str, str] = {STATE_MARK: NEXT_STATE, EVALUATION_MARK: BY_MODE}
    return next(((kind, mark_of(node, key)) for key, kind in kinds.items() if mark_of(node, key)),
                None)  # fmt: skip


@lru_cache(maxsize=4096)
def _strings(text: str) -> tuple[str, ...]:
    """The strings in the text of a Python list; () where it is none."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return ()
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _path_in(name: str) -> str | None:
    """The module's path in a node's name by the older exporter.

    >>> _path_in("/h.0/ln/LayerNormalization"), _path_in("/Add_1"), _path_in("Add_1")
    ('h.0.ln', '', None)
    """
    return ".".join(name.split("/")[1:-1]) if name.startswith("/") else None


@lru_cache(maxsize=4096)
def _call(text: str) -> tuple[str, tuple[tuple[str, ...], ...]]:
    """Torch's operator and the names among its arguments.

    >>> _call("%y : [..] = call_function[target=torch.ops.aten.cat.default](args = ([%a, %b], 1), "
    ...       "kwargs = {})")
    ('cat', (('a', 'b'), ()))
    """
    operator = _CALL.search(text)
    start = text.find("(args = (")
    if operator is None or start < 0:
        return "", ()
    parts = _split(text[start + len("(args = (") :])
    return operator[1], tuple(tuple(re.findall(r"%(\w+)", part)) for part in parts)


def _split(text: str) -> Iterator[str]:
    """The parts of a text between commas, up to the bracket that ends them."""
    closing: list[str] = []
    begin = 0
    for i, letter in enumerate(text):
        if letter in _PAIRS:
            closing.append(_PAIRS[letter])
        elif closing and letter == closing[-1]:
            closing.pop()
        elif not closing and letter in ",)":
            if text[begin:i].strip():
                yield text[begin:i]
            begin = i + 1
            if letter == ")":
                return
