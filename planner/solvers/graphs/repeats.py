"""Repeated blocks: runs of identical layers in a graph, such as those of a transformer.

A layer is a stretch of operators in topological order that comes again right after itself: the
same types, shapes and parameters, every operator fed from the same places of the layer or from
the very same tensors (an attention mask that all layers read). With period p:

    run of layers from i on  <=>  operator j looks like operator j + p, for p or more j from i on

Periods worth a look are the distances at which a stretch of 1, 2, 4, ... operators comes again.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from planner.artefacts.graph import Graph, Operator, parameters_by_name, tensors_by_name
from planner.support.arrays import Bools, Floats, Ints

# Repeats that decide fewer operators than this once instead of again are left alone.
_FEWEST_SAVED = 4
# Layers whose operators' times differ by more than this share of the layer are not the same.
_NOISE = 0.5
# Number of distances that are looked at for every length of stretch.
_DISTANCES = 4


@dataclass(frozen=True, slots=True)
class Repeat:
    """A run of identical layers.

    Attributes:
        first: index of the run's first operator.
        period: operators in one layer.
        count: layers, at least 2.
    """

    first: int
    period: int
    count: int

    @property
    def end(self) -> int:
        """The index after the run's last operator."""
        return self.first + self.period * self.count


def repeats(graph: Graph, times: Sequence[float]) -> tuple[Repeat, ...]:
    """Runs of identical layers, in order; no two overlap. Those that save most come first where
    several are possible.

    Args:
        graph: its operators in topological order, the layers one after the other.
        times: per operator, in s; layers whose times differ by more than measuring does are not
            identical.
    """
    labels = _numbered([_label(graph, operator) for operator in graph.operators])
    wires = _wires(graph)
    seconds = np.array(times, dtype=float)
    chosen: list[Repeat] = []
    free = np.ones(len(labels), dtype=np.bool_)
    alike = {p: _alike(labels, wires, p) for p in sorted(_periods(labels))}
    while True:
        options = [run for p, same in alike.items() for run in _runs(same, free, seconds, p)]
        saved = max(((r.count - 1) * r.period for r in options), default=0)
        if saved < _FEWEST_SAVED:
            return tuple(sorted(chosen, key=lambda r: r.first))
        best = next(r for r in options if (r.count - 1) * r.period == saved)
        free[best.first : best.end] = False
        chosen.append(best)


def representatives(num_operators: int, runs: Sequence[Repeat]) -> list[int]:
    """Per operator, the operator of the first layer that it repeats; itself outside of repeats."""
    first = list(range(num_operators))
    for repeat in runs:
        for v in range(repeat.first, repeat.end):
            first[v] = repeat.first + (v - repeat.first) % repeat.period
    return first


def _label(graph: Graph, operator: Operator) -> tuple[object, ...]:
    """What identical operators have in common, who feeds them left out."""
    tensors, parameters = tensors_by_name(graph), parameters_by_name(graph)
    outputs = [tensors[name] for name in operator.outputs]
    held = [parameters[name] for name in operator.parameters]
    return (
        operator.type,
        len(operator.inputs),
        tuple((t.shape, t.dtype, t.gradient) for t in outputs),
        tuple((p.shape, p.dtype, p.trainable) for p in held),
    )


def _numbered(labels: Sequence[object]) -> Ints:
    """Equal labels get equal numbers, from 0 in order of appearance."""
    number: dict[object, int] = {}
    return np.array([number.setdefault(label, len(number)) for label in labels], dtype=np.int64)


def _wires(graph: Graph) -> tuple[Ints, Ints]:
    """Who feeds every operator: (N, most inputs) the tensor, as a number, and the operator that
    makes it, -1 where nobody does. Outputs of one operator have numbers that differ by their
    places.
    """
    widest = max(len(o.outputs) for o in graph.operators)
    number = {
        name: v * widest + place
        for v, operator in enumerate(graph.operators)
        for place, name in enumerate(operator.outputs)
    }
    for place, name in enumerate(graph.inputs):
        number[name] = -2 - place
    most = max(len(o.inputs) for o in graph.operators)
    tensor = np.full((len(graph.operators), most), -1, dtype=np.int64)
    for v, operator in enumerate(graph.operators):
        tensor[v, : len(operator.inputs)] = [number[name] for name in operator.inputs]
    return tensor, np.where(tensor >= 0, widest, 0)


def _periods(labels: Ints) -> set[int]:
    """The most usual distances from a stretch of 1, 2, 4, ... operators to the next like it."""
    periods: set[int] = set()
    ranks, length = labels, 1
    while len(ranks) > 1:
        last: dict[int, int] = {}
        distances: Counter[int] = Counter()
        for i, rank in enumerate(ranks.tolist()):
            if rank in last:
                distances[i - last[rank]] += 1
            last[rank] = i
        if not distances:
            break
        usual = sorted(distances, key=lambda p: (-distances[p], p))
        periods.update(usual[:_DISTANCES])
        pairs = ranks[:-length] * (ranks.max() + 1) + ranks[length:]
        ranks = np.unique(pairs, return_inverse=True)[1].astype(np.int64)
        length *= 2
    return periods


def _alike(labels: Ints, wires: tuple[Ints, Ints], p: int) -> Bools:
    """(N - p,) whether operator j looks like operator j + p."""
    tensor, step = wires
    shifted = tensor[:-p] + p * step[:-p] == tensor[p:]
    fed_alike = (shifted | (tensor[:-p] == tensor[p:])).all(axis=1)
    return np.asarray((labels[:-p] == labels[p:]) & fed_alike, dtype=np.bool_)


def _runs(alike: Bools, free: Bools, seconds: Floats, p: int) -> Iterator[Repeat]:
    """The maximal runs of layers of p operators, free ones only."""
    usable = alike & free[:-p] & free[p:]
    at = 0
    for same, stretch in groupby(usable.tolist()):
        length = len(list(stretch))
        if same and length >= p:
            yield from _timed_alike(Repeat(at, p, length // p + 1), seconds)
        at += length


def _timed_alike(run: Repeat, seconds: Floats) -> Iterator[Repeat]:
    """The run, cut where a layer takes other times than the next."""
    layers = seconds[run.first : run.end].reshape(run.count, run.period)
    difference = np.abs(layers[1:] - layers[:-1]).sum(axis=1)
    close = difference <= _NOISE * np.maximum(layers[1:], layers[:-1]).sum(axis=1)
    at = 0
    for same, stretch in groupby(close.tolist()):
        length = len(list(stretch))
        if same:
            yield Repeat(run.first + at * run.period, run.period, length + 1)
        at += length
