"""What torch's exporter merged, left out or copied, put back as the module has it.

By default `torch.onnx.export` optimizes for inference. Of the parameters of a module it

1. keeps one initializer of those whose values are equal, as all LayerNorm weights of a fresh
   network are: `split_merged` gives each its own again;
2. leaves out biases that are zero: `restore_zero_biases` puts them back;
3. stores a tied weight that is used transposed as a second initializer: `tie_copies` makes it a
   Transpose of the first;
4. repeats a parameter for each sample of the batch: `merge_repeated_rows` expands one row instead.

The notes at the nodes (`origins.py`) say which tensors were meant. Nothing is repaired where they
say nothing, or where the file holds a record of the module: `planner export` merges nothing.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from planner.artefacts.operator_types import facts
from planner.model.constants import Candidate, Uses, why_constant
from planner.model.origins import Origin, OriginKind, Origins, Read, flat, reads
from planner.model.protos import FLOATS, nodes_of, subgraphs, true_inputs
from planner.model.source import Source
from planner.support.errors import ModelError
from planner.support.printable import few

_SAMPLED = 16  # rows of two matrices that are compared
_STATISTICS = {3: "running_mean", 4: "running_var"}
_REPEATING = ("expand", "repeat", "embedding", "index", "broadcast_to")
AVOIDING = (
    "to avoid it, export with planner export, or with"
    " torch.onnx.export(..., dynamo=True, optimize=False)"
)


@dataclass(frozen=True, slots=True)
class Ties:
    """The user's choices.

    Attributes:
        tied: initializers that stay one parameter, whoever reads them.
        joined: pairs of initializers: the second one becomes the first one, transposed if its shape
            is.
        untied: initializers of which each module that reads them gets its own.
    """

    tied: tuple[str, ...] = ()
    joined: tuple[tuple[str, str], ...] = ()
    untied: tuple[str, ...] = ()

    @classmethod
    def of(cls, tie: Collection[str], untie: Collection[str]) -> "Ties":
        """The choices as options have them.

        Args:
            tie: names that stay one parameter, or pairs A=B of names that become one.
            untie: names of which each module gets its own.

        >>> Ties.of(["a", "b=c"], ["d"])
        Ties(tied=('a',), joined=(('b', 'c'),), untied=('d',))
        """
        pairs = [tuple(one.split("=", 1)) for one in tie if "=" in one]
        return cls(
            tuple(one for one in tie if "=" not in one),
            tuple((pair[0], pair[1]) for pair in pairs),
            tuple(untie),
        )


def repaired(source: Source, ties: Ties) -> Source:
    """The model with the parameters of its module. A file with a record of the module merges
    nothing, so only the user's choices are followed there. Content is read only where the notes
    leave something open.

    Of a model that is changed, `proto` is a copy of the structure: initializers have names, types
    and shapes, and content only in `values`.

    Args:
        source: as the file has it.
        ties: the user's choices.

    Raises:
        ModelError: if a choice names no initializer, or two that do not fit.
    """
    repair = _Repair(source, ties)
    repair.check(ties)
    if source.record is None:
        repair.split_merged()
        repair.restore_zero_biases()
        repair.tie_copies()
        repair.merge_repeated_rows()
    repair.join_chosen(ties.joined)
    return repair.result()


class _Repair:
    """A model while it is repaired.

    Attributes:
        nodes: of the file; those that change are copies.
        tensors: initializers by name, without content where they are new.
        readers: where the floats among them are read, and as which tensor of the module.
        inner: names that nodes of branches and loops read, which stay as they are.
    """

    def __init__(self, source: Source, ties: Ties) -> None:
        self.source, self.ties = source, ties
        self.proto, self.values = source.proto, source.values.copy()
        proto = self.proto
        self.nodes: list[NodeProto] = list(proto.graph.node)
        self.copied: set[int] = set()
        self.before: dict[int, list[NodeProto]] = {}
        self.tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
        inputs = [value.name for value in true_inputs(proto.graph)]
        self.names = {*self.tensors, *inputs, *(node.name for node in self.nodes)}
        self.names.update(name for node in self.nodes for name in node.output)
        self.origins = Origins(self.nodes, inputs, self.tensors)
        floats = {name for name, tensor in self.tensors.items() if tensor.data_type in FLOATS}
        self.readers = reads(self.nodes, floats, self.origins)
        kinds = {n.name: s.kind for n, s in zip(self.nodes, self.origins.scopes, strict=True)}
        self.uses = Uses(self.nodes, kinds)
        first = next(iter(true_inputs(proto.graph)), None)
        dims = [] if first is None else [*first.type.tensor_type.shape.dim]
        self.batch = dims[0].dim_value if dims else 0
        self.inner = {name for node in self.nodes for name in _read_inside(node)}
        self.sources: dict[str, str] = {}
        self.warnings: list[str] = []

    def check(self, ties: Ties) -> None:
        """Refuses choices that name no float initializer."""
        joined = [name for pair in ties.joined for name in pair]
        chosen = {"--tie": [*ties.tied, *joined], "--untie": [*ties.untied]}
        problems = [
            f"{option} {name}: expected the name of a float initializer that a node reads, found"
            f" none; planner inspect lists them"
            for option, names in chosen.items()
            for name in names
            if name not in self.readers
        ]
        if problems:
            raise ModelError("\n".join(problems))

    # ------------------------------------------------------------------------------ 1: merged

    def split_merged(self) -> None:
        """Gives each tensor of the module its own initializer."""
        merged = []
        for name, found in list(self.readers.items()):
            groups = self.groups(name, found)
            if len(groups) < 2:
                continue
            new = [self.split(name, origin, group) for origin, group in groups.items()]
            nodes = [self.nodes[read.node].name for read in found]
            merged.append(f"{name} (as {few([n for n in new if n != name])}; by {few(nodes)})")
        if merged:
            self.warnings.append(
                f"initializers that stand for several tensors of the module, because the exporter"
                f" merged equal values: {few(merged)}; each tensor is trained by itself, unless"
                f" --tie NAME keeps it one; {AVOIDING}"
            )

    def groups(self, name: str, found: Sequence[Read]) -> dict[Origin, list[Read]]:
        """The reads of an initializer by the module's tensor that was meant."""
        if name in self.ties.tied:
            return {}
        groups: dict[Origin, list[Read]] = {}
        known = {read.origin for read in found if read.origin is not None}
        usual = next(iter(known)) if len(known) == 1 else Origin(OriginKind.PARAMETER, name)
        for read in found:
            origin = read.origin or self.statistic(name, read) or usual
            if name in self.ties.untied:
                origin = self.by_module(name, read, origin)
            groups.setdefault(origin, []).append(read)
        if len(groups) < 2 or name in self.ties.untied:
            return groups
        if all(one.kind is OriginKind.COMPUTED or one.name == name for one in groups):
            single = not self.tensors[name].dims
            return {} if single or self.is_constant(name) else groups
        return groups

    def statistic(self, name: str, read: Read) -> Origin | None:
        """The running statistic that a node reads, whatever its initializer is called."""
        node, scope = self.nodes[read.node], self.origins.scopes[read.node]
        if node.op_type != "BatchNormalization" or read.position not in _STATISTICS:
            return None
        last = _STATISTICS[read.position]
        own = name.rsplit(".", 1)[-1] == last or len(self.readers[name]) == 1
        return Origin(OriginKind.BUFFER, name if own else f"{scope.module or node.name}.{last}")

    def by_module(self, name: str, read: Read, origin: Origin) -> Origin:
        """The tensor if every module has its own."""
        module = self.origins.scopes[read.node].module or self.nodes[read.node].name
        home = origin.name.rsplit(".", 1)
        if module == home[0] or (origin.name == name and self.readers[name][0] == read):
            return origin
        return Origin(origin.kind, f"{module}.{home[-1]}")

    def is_constant(self, name: str) -> bool:
        return why_constant(self.candidate(name, self.readers[name][0].origin)) is not None

    def candidate(self, name: str, origin: Origin | None) -> Candidate:
        shape = tuple(self.tensors[name].dims)
        uses = self.uses.of(name)
        return Candidate(name, shape, origin, uses, self.uses, lambda: self.values[name])

    def split(self, name: str, origin: Origin, group: Sequence[Read]) -> str:
        """An initializer of the same value for some of the reads."""
        if origin.name == name:
            self.readers[name] = list(group)
            return name
        new = self.new_name(origin.name or f"{name}.constant")
        tensor = TensorProto()
        tensor.CopyFrom(self.tensors[name])
        tensor.name = new
        self.add(tensor, name)
        self.readers[new] = [Read(one.node, one.position, origin) for one in group]
        self.readers[name] = [one for one in self.readers[name] if one not in group]
        for read in group:
            self.own(read.node).input[read.position] = new
        return new

    # --------------------------------------------------------------------------- 2: left out

    def restore_zero_biases(self) -> None:
        """Puts back the zero biases that the exporter left out."""
        lost: dict[str, list[str]] = {}
        for i, node in enumerate(self.nodes):
            origin = self.origins.bias(node, i)
            size = self.bias_size(node) if origin is not None else None
            if origin is None or size is None:
                continue
            kind = self.tensors[node.input[1]].data_type
            known = next(
                (n for n, rs in self.readers.items() if any(r.origin == origin for r in rs)), None
            )
            name = known or self.new_name(origin.name)
            if known is None:
                zeros = np.zeros(size, helper.tensor_dtype_to_np_dtype(kind))
                self.add(numpy_helper.from_array(zeros, name), "zeros")
            own, position = self.own(i), facts(node.op_type).bias
            assert position is not None, "it has an origin"
            own.input.extend([""] * (position + 1 - len(own.input)))
            own.input[position] = name
            self.readers.setdefault(name, []).append(Read(i, position, origin))
            lost.setdefault(name, []).append(node.name)
        if lost:
            listed = [f"{name} ({few(nodes)})" for name, nodes in lost.items()]
            self.warnings.append(
                f"biases that are zero and that the exporter left out: {few(listed)}; they are put"
                f" back and trained; {AVOIDING}"
            )

    def bias_size(self, node: NodeProto) -> int | None:
        """Number of elements of a node's bias; None where its weight is no initializer."""
        weight = self.tensors.get(node.input[1])
        if weight is None:
            return None
        given = {attribute.name: attribute.i for attribute in node.attribute}
        match node.op_type:
            case "Gemm":
                return int(weight.dims[0 if given.get("transB") else 1])
            case "ConvTranspose":
                return int(weight.dims[1] * given.get("group", 1))
            case _:
                return int(weight.dims[0])

    # ----------------------------------------------------------------------------- 3: copied

    def tie_copies(self) -> None:
        """Makes copies of one parameter that parameter again."""
        held: dict[Origin, list[str]] = {}
        for name, found in self.readers.items():
            for origin in dict.fromkeys(read.origin for read in found if read.origin):
                if origin.kind is OriginKind.PARAMETER:
                    held.setdefault(origin, []).append(name)
        # Equal content alone ties nothing: layers that PyTorch copies are equal at first, and are
        # not tied.
        tied: list[str] = []
        apart: list[str] = []
        for origin, names in held.items():
            if len(names) < 2 or {*names, origin.name} & {*self.ties.untied}:
                continue
            base = origin.name if origin.name in names else names[0]
            for copy in names:
                if copy == base:
                    continue
                (tied if self.join(base, copy) else apart).append(f"{copy} of {base}")
        if tied:
            self.warnings.append(
                f"copies of tied parameters that the exporter made: {few(tied)}; they are one"
                f" parameter, unless --untie NAME parts them; {AVOIDING}"
            )
        if apart:
            self.warnings.append(
                f"tied parameters that the exporter computed into several initializers:"
                f" {few(apart)}; these are trained apart; {AVOIDING}"
            )

    def join(self, base: str, copy: str) -> bool:
        """Replaces an initializer by another one, or by its transpose; False if neither fits."""
        one, other = self.tensors[base], self.tensors[copy]
        if copy in self.inner:
            return False
        same = list(one.dims) == list(other.dims) and self.equal(base, copy, transposed=False)
        turned = list(one.dims) == [*reversed(other.dims)] and len(one.dims) == 2
        if not same and not (turned and self.equal(base, copy, transposed=True)):
            return False
        if same:
            for read in self.readers[copy]:
                self.own(read.node).input[read.position] = base
            self.readers[base] += self.readers[copy]
        else:
            first = min(read.node for read in self.readers[copy])
            node = helper.make_node(
                "Transpose", [base], [copy], name=self.new_name(f"Transpose_{copy}"), perm=[1, 0]
            )
            self.before.setdefault(first, []).append(node)
        self.forget(copy)
        return True

    def equal(self, base: str, copy: str, *, transposed: bool) -> bool:
        """Whether some rows of two initializers agree."""
        one, other = self.values[base], self.values[copy]
        other = other.T if transposed else other
        rows = np.linspace(0, len(one) - 1, min(_SAMPLED, len(one))).astype(int)
        return bool(np.array_equal(one[rows], other[rows]))

    def join_chosen(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Ties the initializers that the user wants tied."""
        for base, copy in pairs:
            if base != copy and base in self.readers and not self.join(base, copy):
                raise ModelError(
                    f"--tie {base}={copy}: expected initializers of equal values, or one the"
                    f" other's transpose, got {list(self.tensors[base].dims)} and"
                    f" {list(self.tensors[copy].dims)} of other values; tie what is equal"
                )

    # --------------------------------------------------------------------------- 4: repeated

    def merge_repeated_rows(self) -> None:
        """Keeps one of the rows that the exporter repeated for every sample."""
        repeated = []
        for name, found in list(self.readers.items()):
            origins = {read.origin for read in found}
            origin = next(iter(origins), None)
            if len(origins) != 1 or origin is None or origin.kind is not OriginKind.COMPUTED:
                continue
            dims = list(self.tensors[name].dims)
            call = flat(origin.name).rstrip("0123456789").rstrip("_")
            if not call.startswith(_REPEATING) or len(dims) < 2 or name in self.inner:
                continue
            if self.batch < 2 or dims[0] != self.batch:
                continue
            value = self.values[name]
            if not np.array_equal(value[1:], value[:-1]) or self.is_constant(name):
                continue
            self.expand(name, _one_row(value[:1], call), dims)
            repeated.append(name)
        if repeated:
            self.warnings.append(
                f"parameters that the exporter repeated for each of {self.batch} samples:"
                f" {few(repeated)}; one row is trained for all; {AVOIDING}"
            )

    def expand(self, name: str, row: np.ndarray, dims: Sequence[int]) -> None:
        """Stores one row, and repeats it in the graph to the size that its readers expect."""
        found = self.readers[name]
        self.forget(name)
        new, shape = self.new_name(f"{name}.row"), self.new_name(f"{name}.shape")
        self.add(numpy_helper.from_array(np.ascontiguousarray(row), new), name)
        self.add(numpy_helper.from_array(np.array(dims, dtype=np.int64), shape), name)
        label = self.new_name(f"Expand_{name}")
        node = helper.make_node("Expand", [new, shape], [name], name=label)
        first = min(read.node for read in found)
        self.before.setdefault(first, []).append(node)
        self.readers[new] = [Read(first, 0, found[0].origin)]

    # ------------------------------------------------------------------------------- result

    def add(self, tensor: TensorProto, source: str) -> None:
        self.tensors[tensor.name] = tensor
        self.sources[tensor.name] = source
        self.values.hold(tensor)

    def forget(self, name: str) -> None:
        """An initializer that nobody reads any more."""
        del self.tensors[name], self.readers[name]
        self.values.forget(name)

    def own(self, index: int) -> NodeProto:
        """A node that may be changed."""
        if index not in self.copied:
            node = NodeProto()
            node.CopyFrom(self.nodes[index])
            self.nodes[index] = node
            self.copied.add(index)
        return self.nodes[index]

    def new_name(self, wish: str) -> str:
        """A name that nothing in the model has."""
        name, number = wish, 2
        while name in self.names:
            name, number = f"{wish}.{number}", number + 1
        self.names.add(name)
        return name

    def result(self) -> Source:
        """The model, with the tensors that are still read."""
        unread = [n for n, found in self.readers.items() if not found and n not in self.inner]
        for name in unread:
            self.forget(name)
        changed = bool(self.copied or self.before)
        known = {
            name: origin
            for name, found in self.readers.items()
            if (origin := _common([read.origin for read in found])) is not None
        }
        return replace(
            self.source,
            proto=self.structure() if changed else self.proto,
            values=self.values,
            origins=known,
            named=frozenset(self.origins.named()),
            warnings=tuple(self.warnings),
            sources={n: s for n, s in self.sources.items() if n in self.tensors},
        )

    def structure(self) -> ModelProto:
        """The model without the content of its initializers."""
        proto = ModelProto(ir_version=self.proto.ir_version)
        proto.opset_import.extend(self.proto.opset_import)
        proto.graph.name = self.proto.graph.name
        proto.graph.input.extend(true_inputs(self.proto.graph))
        proto.graph.output.extend(self.proto.graph.output)
        proto.graph.initializer.extend(
            TensorProto(name=t.name, dims=t.dims, data_type=t.data_type)
            for t in self.tensors.values()
        )
        for i, node in enumerate(self.nodes):
            proto.graph.node.extend([*self.before.get(i, ()), node])
        return proto


def _read_inside(node: NodeProto) -> Iterator[str]:
    """The names that the graphs in a node read."""
    for graph in subgraphs(node):
        for inner in nodes_of(graph.node):
            yield from inner.input


def _common(origins: Sequence[Origin | None]) -> Origin | None:
    """The tensor that all reads mean; of several that were computed alike, the first."""
    distinct = [*dict.fromkeys(origins)]
    if len(distinct) == 1 or all(one and one.kind is OriginKind.COMPUTED for one in distinct):
        return next(iter(distinct), None)
    return None


def _one_row(rows: np.ndarray, call: str) -> np.ndarray:
    """One row of a table that was looked up for all positions, such as the type of BERT's tokens.

    Args:
        rows: (1, positions, ...) of one sample.
        call: of torch, by which the rows were made.

    Returns:
        (1, 1, ...) if all rows are one and not of one number, which fresh tables may be; else the
        rows.
    """
    same = np.array_equal(rows[:, 1:], rows[:, :-1])
    looked_up = call.startswith("embedding") and rows.ndim > 2
    return rows[:, :1] if looked_up and same and np.ptp(rows) > 0 else rows
