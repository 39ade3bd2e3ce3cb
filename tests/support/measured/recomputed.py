"""Which operators a run computed again in its backward, where no option says it, as segments of a
stage (`Stage.recomputed`).

    selective                what makes and reads the scores of attention (Korthikanti et al. 2022,
                             arXiv:2205.05198, section 5); nothing where no scores are made
    selective per operator   all but attention and the product of the gate: what is kept then is
                             what torchtitan keeps, every second product and attention, within a
                             twentieth of the bytes, but three more products run again

A layer is the operators of a numbered scope of the network (`networks.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from planner.artefacts.strategy import Stage

Names = tuple[str, ...]


def running_again(stage: Stage, words: str) -> Stage:
    """The stage with the segments that a row names; the same stage where an option says it all.

    Args:
        words: `Row.recompute`.
    """
    if words not in _SEGMENTS:
        return stage
    segments = tuple(_SEGMENTS[words](_layers(stage.operators)))
    return replace(stage, recompute=bool(segments), recomputed=segments)


def _layers(operators: Names) -> list[Names]:
    """The operators of each numbered scope, in their order."""
    scopes = groupby(operators, key=lambda name: name.rpartition(".")[0])
    return [tuple(names) for scope, names in scopes if scope]


def _kind(name: str) -> str:
    """The type of an operator of `Flow`."""
    return name.rpartition(".")[2].partition("_")[0]


def _scores(layers: Sequence[Names]) -> Iterator[Names]:
    for names in layers:
        kinds = [_kind(name) for name in names]
        if "Softmax" in kinds:
            at = kinds.index("Softmax")
            yield names[at - 1 : kinds.index("MatMul", at) + 1]


def _between(layers: Sequence[Names]) -> Iterator[Names]:
    for names in layers:
        kinds = [_kind(name) for name in names]
        attention, gate = kinds.index("Attention"), kinds.index("Swish") - 1
        yield from (names[:attention], names[attention + 1 : gate], names[gate + 1 :])


_SEGMENTS: Mapping[str, Callable[[Sequence[Names]], Iterator[Names]]] = {
    "selective": _scores,
    "selective per operator": _between,
}
