"""Floats that a model holds and nobody trains: masks, tables of angles, slopes, initial states.

A rule looks at the name, at the use, or at the content, and says why a value is a constant. Content
is read only where the use fits, and only as far as it fits: a few rows of a large matrix.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from onnx import NodeProto

from planner.artefacts.operator_types import COPY, VIEW, facts
from planner.model.origins import Origin, OriginKind
from planner.model.protos import FLOATS

_MASKING = frozenset({"Add", "Attention", "Mul", "Sub", "Where"})
_JOINING = frozenset({"Add", "Sub", "Where", "Div", "Mul", "Max", "Clip", "Concat"})
_HIDDEN_BELOW = -50.0  # Swin's masks hide with -100, others with -10000 or less
_BLOCK = 4096  # elements looked at in one go
_ROWS = 64  # rows of a table that are looked at
_TOLERANCE = 1e-3

_NAMES: Mapping[str, str] = {
    r"running_(mean|var)|moving_(mean|variance)": "a running statistic, by its name",
    r"num_batches_tracked": "a count of batches, by its name",
    r"(original_)?inv_freq|freqs?_cis|(cos|sin)_cached|rope_freqs": (
        "a table of rotary angles, by its name"
    ),
    r"masked_bias|(attn|attention|causal|key_padding)_mask|mask": "a mask, by its name",
    r"position_ids|token_type_ids|relative_position_index": "indices, by its name",
    r"alibi(_slopes)?|slopes": "ALiBi's slopes, by its name",
}
# Calls of torch that fill a new tensor.
_FILLING = re.compile(
    r"(new_)?(zeros|ones|full|empty)(_like)?|arange|linspace|scalar_tensor|tril|triu|eye|one_hot"
    r"|cos|sin|outer|lift_fresh(_copy)?|where|masked_fill|bitwise_not|logical_not|rsub"
)


@dataclass(frozen=True, slots=True)
class Use:
    """An input of an operator that reads a value, directly or through views.

    Attributes:
        node: the operator.
        position: of the input.
    """

    node: NodeProto
    position: int


def _is_view(node: NodeProto) -> bool:
    """Whether a node only moves or converts the elements of its first input."""
    return facts(node.op_type).moves in (VIEW, COPY)


class Uses:
    """Who reads the tensors of a graph.

    Args:
        nodes: in topological order.
        kinds: path of the class of module that each node came from, by the node's name.
    """

    def __init__(self, nodes: Sequence[NodeProto], kinds: Mapping[str, str]) -> None:
        self.nodes, self.kinds = nodes, kinds
        self.readers: dict[str, list[Use]] = {}
        for node in nodes:
            for position, name in enumerate(node.input):
                if name:
                    self.readers.setdefault(name, []).append(Use(node, position))

    def of(self, name: str) -> list[Use]:
        """The reads of a tensor; views of it are followed, not listed."""
        uses = []
        waiting = self.readers.get(name, [])[::-1]  # the next one last
        while waiting:
            use = waiting.pop()
            if _is_view(use.node) and use.position == 0:
                waiting += self.readers.get(use.node.output[0], [])[::-1]
            else:
                uses.append(use)
        return uses

    @cached_property
    def scores(self) -> set[str]:
        """The tensors that a Softmax takes, and those that are only added up or hidden first."""
        found: set[str] = set()
        for node in reversed(self.nodes):
            if node.op_type in ("Softmax", "LogSoftmax") or (
                _is_view(node) and not found.isdisjoint(node.output)
            ):
                found.add(node.input[0])
            elif node.op_type in _JOINING and not found.isdisjoint(node.output):
                found.update(name for name in node.input if name)
        return found

    @cached_property
    def counted(self) -> set[str]:
        """Floats that are computed from integers alone, such as positions."""
        found: set[str] = set()
        for node in self.nodes:
            to = next((a.i for a in node.attribute if a.name == "to"), None)
            first = node.input[0] if node.input else ""
            if (node.op_type == "Cast" and to in FLOATS) or (_is_view(node) and first in found):
                found.update(node.output)
        return found

    def is_score(self, use: Use) -> bool:
        """Whether a value is added to the scores of an attention, or hides some of them."""
        if use.node.op_type == "Attention":
            return use.position == 3
        return use.node.op_type in ("Add", "Sub", "Where") and any(
            name in self.scores for name in use.node.output
        )


@dataclass(frozen=True)
class Candidate:
    """A float initializer that may be a constant.

    Attributes:
        name: of it.
        shape: of it.
        origin: the module's tensor that it is; None where nothing says it.
        uses: its reads.
        graph: all uses of the graph.
        read: its content, when called.
    """

    name: str
    shape: tuple[int, ...]
    origin: Origin | None
    uses: Sequence[Use]
    graph: Uses
    read: Callable[[], np.ndarray]

    @cached_property
    def readers(self) -> frozenset[str]:
        """The types of the operators that read it."""
        return frozenset(use.node.op_type for use in self.uses)


def why_constant(candidate: Candidate) -> str | None:
    """Why nobody trains a value, by its name, its use and its content; None if nothing says so."""
    return next((why for rule in _RULES if (why := rule(candidate)) is not None), None)


# -------------------------------------------------------------------------- by name and by use


def _by_name(candidate: Candidate) -> str | None:
    last = candidate.name.rsplit(".", 1)[-1].rsplit("/", 1)[-1]
    return next((why for pattern, why in _NAMES.items() if re.fullmatch(pattern, last)), None)


def _filled(candidate: Candidate) -> str | None:
    """The exporter names a folded value after the call that made it."""
    if candidate.origin is None or candidate.origin.kind is not OriginKind.COMPUTED:
        return None
    call = re.sub(r"_\d+$", "", candidate.origin.name)
    return f"made by torch.{call}, not a parameter" if _FILLING.fullmatch(call) else None


def _initial_state(candidate: Candidate) -> str | None:
    if candidate.uses and all(
        use.position in facts(use.node.op_type).states for use in candidate.uses
    ):
        return "the initial state of a recurrent operator"
    return None


def _attention_scale(candidate: Candidate) -> str | None:
    """A single number that multiplies both sides of matrix products: queries and keys."""
    if any(size != 1 for size in candidate.shape) or candidate.readers != {"Mul"}:
        return None
    sides: Counter[str] = Counter()
    for use in candidate.uses:
        for end in candidate.graph.of(use.node.output[0]):
            if end.node.op_type != "MatMul":
                return None
            sides[end.node.output[0]] += 1
    return "the scale of an attention" if set(sides.values()) == {2} else None


def _no_scale(candidate: Candidate) -> str | None:
    """All one, and the scale of normalizations without a bias: the exporter gives them one, as the
    operator asks for. Weights of modules are named by its notes.
    """
    if candidate.origin is not None or not candidate.uses:
        return None
    for use in candidate.uses:
        noted = candidate.graph.kinds.get(use.node.name)
        plain = use.node.op_type == "LayerNormalization" and not "".join(use.node.input[2:])
        if not noted or not plain:
            return None
    ones = _is_filled_with(candidate.read(), 1.0)
    return "the scale of a normalization without weights" if ones else None


def _frozen_normalization(candidate: Candidate) -> str | None:
    kinds = {candidate.graph.kinds.get(use.node.name, "") for use in candidate.uses}
    if kinds and all("FrozenBatchNorm" in kind for kind in kinds):
        return "a statistic of a frozen batch normalization"
    return None


def _angles(candidate: Candidate) -> str | None:
    """Multiplied by positions, and then only in Sin and Cos: a network's weights are multiplied by
    what depends on its inputs.
    """
    graph = candidate.graph
    if not candidate.uses or not all(_times_positions(use, graph) for use in candidate.uses):
        return None
    ends = [end for use in candidate.uses for end in _ends(use.node.output[0], graph)]
    if ends and all(end.op_type in ("Sin", "Cos") for end in ends):
        return "frequencies: it feeds only Sin and Cos"
    return None


def _times_positions(use: Use, graph: Uses) -> bool:
    others = [name for i, name in enumerate(use.node.input) if i != use.position]
    return use.node.op_type in ("Mul", "MatMul", "Einsum") and graph.counted.issuperset(others)


def _ends(name: str, graph: Uses) -> Iterator[NodeProto]:
    """The operators that a tensor comes to through views, Concat and products with scalars."""
    waiting, known = [name], {name}
    while waiting:
        for use in graph.of(waiting.pop()):
            joined = use.node.output[0]
            if use.node.op_type != "Concat":
                yield use.node
            elif joined not in known:  # an operator may read a tensor twice
                known.add(joined)
                waiting.append(joined)


# ---------------------------------------------------------------------------------- by content


def _mask(candidate: Candidate) -> str | None:
    """0 and a large negative number where it is added, 0 and 1 in square matrices elsewhere."""
    if len(candidate.shape) < 2 or candidate.readers.isdisjoint(_MASKING):
        return None
    value = candidate.read()
    if _is_additive_mask(value) or _is_causal_mask(value):
        return "a mask: it only hides or keeps"
    return None


def _zero_mask(candidate: Candidate) -> str | None:
    """Nothing hidden: all zero, added to scores, and the same for all heads."""
    shape = candidate.shape
    if len(shape) < 2 or (len(shape) > 2 and shape[-3] > 1) or not candidate.uses:
        return None
    if not all(candidate.graph.is_score(use) for use in candidate.uses):
        return None
    return "a mask that hides nothing" if _is_filled_with(candidate.read(), 0.0) else None


def _neutral(candidate: Candidate) -> str | None:
    """Factors of one that the exporter made itself: it names no call and no parameter of them."""
    made = re.fullmatch(r"(val|tmp)(_\d+)?", candidate.name)
    if made is None or candidate.origin is not None or candidate.readers != {"Mul"}:
        return None
    if not all(candidate.graph.kinds.get(use.node.name) for use in candidate.uses):
        return None
    return "factors of one" if _is_filled_with(candidate.read(), 1.0) else None


def _ones_mask(candidate: Candidate) -> str | None:
    """All one, (batch, tokens, 1), and multiplied."""
    shape = candidate.shape
    if len(shape) < 3 or shape[0] == 1 or shape[-1] != 1 or candidate.readers != {"Mul"}:
        return None
    return "a mask that hides nothing" if _is_filled_with(candidate.read(), 1.0) else None


def _wave_table(candidate: Candidate) -> str | None:
    """Cosines and sines of positions: rotary tables are multiplied, sinusoidal ones added."""
    used = candidate.readers
    if len(candidate.shape) < 2 or not used or not used <= {"Add", "Mul", "Gather", "Concat"}:
        return None
    rows = candidate.read()
    rows = rows.reshape(-1, *rows.shape[-2:])[0][:_ROWS].astype(np.float64)
    if rows.size < 4 or np.abs(rows).max() > 1 + _TOLERANCE or np.ptp(rows) < _TOLERANCE:
        return None
    if _are_unit_pairs(rows) or _are_waves(rows):
        return "a table of cosines and sines of positions"
    return None


def _alibi(candidate: Candidate) -> str | None:
    """Added to scores, and linear in the position with one slope per head."""
    if len(candidate.shape) < 2 or candidate.shape[-1] < 3 or not candidate.uses:
        return None
    if not all(candidate.graph.is_score(use) for use in candidate.uses):
        return None
    value = candidate.read()
    rows = value.reshape(-1, value.shape[-1])[:_ROWS].astype(np.float64)
    steps = np.diff(rows, axis=-1)
    even = np.allclose(steps, steps[:, :1], rtol=_TOLERANCE, atol=1e-9)
    return "ALiBi's biases: linear in the position" if even and np.any(steps) else None


def _slopes(candidate: Candidate) -> str | None:
    """2^(-8 i / heads), or frequencies base^(-2 i / width): a geometric sequence that is
    multiplied.
    """
    size = max(candidate.shape, default=0)
    used = candidate.readers
    flat = int(np.prod(candidate.shape)) == size
    if not flat or not 2 <= size <= _BLOCK or not used or not used <= {"Mul", "MatMul", "Div"}:
        return None
    values = candidate.read().reshape(-1).astype(np.float64)
    if np.any(values <= 0):
        return None
    ratios = values[1:] / values[:-1]
    alibi = np.allclose(values, 2.0 ** (-8 * np.arange(1, size + 1) / size), rtol=_TOLERANCE)
    even = size > 2 and np.allclose(ratios, ratios[0], rtol=_TOLERANCE)
    falling = even and abs(ratios[0] - 1) > _TOLERANCE
    return "slopes or frequencies: a geometric sequence" if alibi or falling else None


def _is_additive_mask(value: np.ndarray) -> bool:
    hides = False
    for block in _blocks(value):
        hidden = block <= _HIDDEN_BELOW
        if not np.all(hidden | (block == 0)):
            return False
        hides = hides or bool(hidden.any())
    return hides


def _is_causal_mask(value: np.ndarray) -> bool:
    seen: set[float] = set()
    if value.shape[-1] != value.shape[-2]:
        return False
    for block in _blocks(value):
        if not np.all((block == 0) | (block == 1)):
            return False
        seen.update(np.unique(block).tolist())
    return len(seen) == 2


def _is_filled_with(value: np.ndarray, number: float) -> bool:
    return all(bool(np.all(block == number)) for block in _blocks(value))


def _blocks(value: np.ndarray) -> Iterable[np.ndarray]:
    flat = value.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        yield flat[start : start + _BLOCK].astype(np.float64)


def _are_unit_pairs(rows: np.ndarray) -> bool:
    """Whether columns come in pairs of a sine and a cosine, side by side or half a row apart."""
    width = rows.shape[-1]
    if width % 2:
        return False
    halves = rows[:, : width // 2] ** 2 + rows[:, width // 2 :] ** 2
    neighbours = rows[:, ::2] ** 2 + rows[:, 1::2] ** 2
    return bool(
        np.allclose(halves, 1, atol=_TOLERANCE) or np.allclose(neighbours, 1, atol=_TOLERANCE)
    )


def _are_waves(rows: np.ndarray) -> bool:
    """Whether each column is a wave: y[t - 1] + y[t + 1] = 2 cos(w) y[t]. One row that is repeated
    is none, though its columns have that form.
    """
    if len(rows) < 4 or np.ptp(rows, axis=0).max() < _TOLERANCE:
        return False
    middle, around = rows[1:-1], rows[:-2] + rows[2:]
    energy = (middle**2).sum(axis=0)
    factor = (middle * around).sum(axis=0) / np.maximum(energy, 1e-12)
    fits = np.allclose(around, factor * middle, atol=_TOLERANCE)
    return bool(fits and np.abs(factor).max() <= 2 + _TOLERANCE)


_RULES: tuple[Callable[[Candidate], str | None], ...] = (
    _by_name, _filled, _initial_state, _attention_scale, _frozen_normalization, _angles, _no_scale,
    _mask, _zero_mask, _ones_mask, _neutral, _wave_table, _alibi, _slopes,
)  # fmt: skip
"""The first that applies gives the reason; those that read nothing come first."""


def pairs_of_tables(
    names: Collection[str], shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], np.ndarray]
) -> set[str]:
    """Tables of one shape of which one holds the cosines and another one the sines.

    Args:
        names: of tables that are multiplied.
        shapes: by name.
        read: the content of one.
    """
    found: set[str] = set()
    ordered = sorted(names)
    for i, one in enumerate(ordered):
        for other in ordered[i + 1 :]:
            if shapes[one] == shapes[other] and _is_unit(read(one), read(other)):
                found |= {one, other}
    return found


def _is_unit(one: np.ndarray, other: np.ndarray) -> bool:
    blocks = zip(_blocks(one), _blocks(other), strict=True)
    unit = all(np.allclose(a**2 + b**2, 1, atol=_TOLERANCE) for a, b in blocks)
    return unit and bool(np.ptp(one) > _TOLERANCE)
