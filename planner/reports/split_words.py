"""What the rules of operators split, in words: samples, sequence, columns, rows, heads, experts.

A rule names dimensions by their numbers. What lies along them follows from the graph: the inputs
have samples first, products with weights make columns (convolutions: channels), and what lies along
a dimension goes on along the rules, from what an operator reads to what it makes, and back.

    x R, weight S -> S      columns         x S, weight S -> P      rows
    x S, weight S -> S      experts         two activations S -> S  heads, but for samples
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from math import prod
from operator import itemgetter
from typing import NamedTuple

from planner.artefacts.graph import (
    FLOAT_DTYPES,
    Graph,
    Parameter,
    Tensor,
    parameters_by_name,
    tensors_by_name,
)
from planner.artefacts.operator_types import ATTENTION, PRODUCTS
from planner.artefacts.profile import Profile
from planner.artefacts.sharding import ROWS as LOOKED_UP
from planner.artefacts.sharding import AxisRule, dim_of, reads
from planner.support.memo import remembered

SAMPLES, SEQUENCE, COLUMNS, HEADS, EXPERTS = "samples", "sequence", "columns", "heads", "experts"
ROWS, CHANNELS, INPUT_CHANNELS = "rows", "channels", "input channels"
WHOLE, SUMMANDS = "whole", "summands"
"""Nothing is split; and the same where it runs on summands of a sum that comes later."""

MOST_JOINED = 3
"""Words that are not parted where a line is broken."""

_IMAGE = (SAMPLES, CHANNELS, "height", "width")
_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
_MULTIPLYING = PRODUCTS | {"Einsum", "Gather"}

_Labels = Mapping[tuple[str, str], str]
"""By tensor and part of a spec, such as S1, what lies along the dimension that it cuts."""


def word_of(profile: Profile, v: int, rule: AxisRule) -> str:
    """What a rule of an operator splits along an axis.

    Args:
        v: index of the operator.
    """
    if not rule.cuts:
        return SUMMANDS if "P" in rule.parts else WHOLE
    known = _word(profile.graph, v, rule, _labels(profile))
    if known is not None:
        return known
    cut = next(part for part in (*rule.outputs, *rule.inputs) if dim_of(part) is not None)
    return f"dimension {dim_of(cut)}"


@remembered
def _labels(profile: Profile) -> _Labels:
    """What lies along dimensions, as far as the rules tell."""
    graph = profile.graph
    found = dict(_of_inputs(graph))
    order = range(len(graph.operators))
    for operators, back in ((order, False), (order[::-1], True), (order, False)):
        for v in operators:
            for one in profile.operators[v].rules:
                if one.rule.cuts:
                    _spread(graph, v, one.rule, found, back=back)
    return found


def _of_inputs(graph: Graph) -> Iterable[tuple[tuple[str, str], str]]:
    tensors = tensors_by_name(graph)
    for name in graph.inputs:
        rank, is_float = len(tensors[name].shape), tensors[name].dtype in FLOAT_DTYPES
        words = _IMAGE if rank == len(_IMAGE) else (SAMPLES, SEQUENCE)
        most = 1 if rank == 2 and is_float else len(words)
        for dim, word in enumerate(words[: min(rank, most)]):
            yield (name, f"S{dim}"), word


def _spread(
    graph: Graph, v: int, rule: AxisRule, labels: dict[tuple[str, str], str], *, back: bool
) -> None:
    """Says of what an operator makes, or reads, what it splits by a rule."""
    word = _word(graph, v, rule, labels)
    if word is None:
        return
    operator = graph.operators[v]
    names = operator.inputs if back else operator.outputs
    parts = rule.inputs[: len(names)] if back else rule.outputs
    # What a product adds up over are the columns that were made before.
    made = {ROWS: COLUMNS, INPUT_CHANNELS: CHANNELS}.get(word, word)
    for name, part in zip(names, parts, strict=True):
        if dim_of(part) is not None:
            labels.setdefault((name, part), word if name in _fixed(graph) else made)


class _Parts(NamedTuple):
    """How an operator reads activations and weights, and what it makes."""

    activations: list[tuple[str, str]]
    weights: list[str]
    outputs: list[tuple[str, str]]


def _word(graph: Graph, v: int, rule: AxisRule, labels: _Labels) -> str | None:
    """The word of a rule that cuts something; None where it is not known yet."""
    operator, parts = graph.operators[v], _parts(graph, v, rule)
    ends = [*parts.activations, *parts.outputs]
    label = next((labels[end] for end in ends if end in labels), None)
    sums = all(part == "P" or part == "A" for _, part in parts.outputs)
    if operator.type in _MULTIPLYING and any(dim_of(part) is not None for part in parts.weights):
        reads_cut = any(dim_of(part) is not None for _, part in parts.activations)
        is_convolution = operator.type in _CONVOLUTIONS
        if LOOKED_UP in rule.local or sums:
            return INPUT_CHANNELS if is_convolution else ROWS
        if is_convolution:
            return CHANNELS
        return EXPERTS if reads_cut else COLUMNS
    if operator.type in PRODUCTS | ATTENTION | {"Einsum"} and _both_cut(parts):
        return HEADS if label in (None, COLUMNS) and not sums else label
    return label


def _both_cut(parts: _Parts) -> bool:
    return sum(dim_of(part) is not None for _, part in parts.activations) > 1


def _parts(graph: Graph, v: int, rule: AxisRule) -> _Parts:
    operator, fixed = graph.operators[v], _fixed(graph)
    given = list(zip(reads(operator), rule.inputs, strict=True))
    return _Parts(
        [(name, part) for name, part in given if name not in fixed],
        [part for name, part in given if fixed.get(name)],
        list(zip(operator.outputs, rule.outputs, strict=True)),
    )


@remembered
def _fixed(graph: Graph) -> Mapping[str, bool]:
    """Parameters and what is made of these alone, each with whether it is a weight: floats of two
    dimensions or more.
    """
    known: dict[str, Tensor | Parameter] = {
        **parameters_by_name(graph), **tensors_by_name(graph)
    }  # fmt: skip

    def is_weight(name: str) -> bool:
        return len(known[name].shape) > 1 and known[name].dtype in FLOAT_DTYPES

    found = {one.name: is_weight(one.name) for one in graph.parameters}
    for operator in graph.operators:
        if all(name in found for name in operator.inputs):
            found |= {name: is_weight(name) for name in operator.outputs}
    return found


def in_words(axes: Sequence[tuple[int, Sequence[str]]], replicas: int = 1) -> str:
    """How operators are split along the axes of a mesh, behind the number of replicas.

    Args:
        axes: of each, its size and the words of the operators.

    >>> in_words([(2, ["samples"]), (4, ["columns", "rows"])])
    'samples/2 x columns,rows/4'
    >>> in_words([(2, ["rows"]), (4, ["rows"])]), in_words([(4, ["whole"])]), in_words([], 8)
    ('rows/8', 'whole', '8 replicas')
    >>> in_words([(2, ["whole"]), (4, ["rows"])], 3)
    '3 replicas x rows/4'
    """
    found = [f"{replicas} replicas"] if replicas > 1 else []
    cut = [(size, words) for size, words in axes if size > 1 and [*words] != [WHOLE]]
    for words, alike in groupby(cut, key=itemgetter(1)):
        between = "," if len(words) <= MOST_JOINED else ", "
        found.append(f"{between.join(words)}/{prod(size for size, _ in alike)}")
    return " x ".join(found) or WHOLE
