"""A layer of experts, as GShard has it (Lepikhin et al. 2021, algorithm 1): each token goes to the
two experts that it scores highest, as long as they have room.

G groups, S tokens of a group, E experts, C places of an expert for the tokens of a group, M width.
"""

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto, numpy_helper

from tests.support.models import Flow


@dataclass(frozen=True)
class Experts:
    """The sizes of a layer of experts.

    Attributes:
        count: E.
        group: S.
        width: M, of the hidden state.
        inner: width of an expert's feed-forward part.
    """

    count: int
    group: int
    width: int
    inner: int

    @property
    def places(self) -> int:
        """C: room for the two experts of every token, if all are asked equally."""
        return 2 * self.group // self.count


def mixed_by_experts(flow: Flow, hidden: str, sizes: Experts, sequence: int) -> str:
    """The outputs of the experts of each token, weighted by its scores; 0 where none had room.

    Args:
        hidden: (batch, sequence, M), as the result.
    """
    shape = flow.constant("groups", np.array([-1, sizes.group, sizes.width]))
    tokens = flow.add("Reshape", hidden, shape)
    scores = flow.add("MatMul", tokens, flow.weight("gate", sizes.width, sizes.count))
    combine = _combine(flow, flow.add("Softmax", scores, axis=-1), sizes)
    dispatch = flow.add("Cast", flow.add("Cast", combine, to=TensorProto.BOOL), to=_FLOAT)
    up = flow.weight("up", sizes.count, sizes.width, sizes.inner)
    down = flow.weight("down", sizes.count, sizes.inner, sizes.width)
    inner = flow.add("Einsum", dispatch, tokens, equation="gsec,gsm->egcm")
    inner = flow.add("Relu", flow.add("Einsum", inner, up, equation="egcm,emh->egch"))
    made = flow.add("Einsum", inner, down, equation="egch,ehm->gecm")
    mixed = flow.add("Einsum", combine, made, equation="gsec,gecm->gsm")
    shape = flow.constant("samples", np.array([-1, sequence, sizes.width]))
    return flow.add("Reshape", mixed, shape)


_FLOAT = TensorProto.FLOAT


def _combine(flow: Flow, gates: str, sizes: Experts) -> str:
    """(G, S, E, C): the weight of the token in that place of that expert.

    Args:
        gates: (G, S, E), scores that add up to 1.
    """
    one = _fixed(flow, 1)
    first = _highest(flow, gates, sizes)
    second = _highest(flow, flow.add("Mul", gates, flow.add("Sub", one, first)), sizes)
    token, expert = (flow.constant(*axis) for axis in (("token", np.array([1])), _EXPERT))
    place = _earlier(flow, first)
    first = _with_room(flow, first, place, sizes)
    places = [place]
    taken = flow.add("ReduceSum", first, token)
    places.append(flow.add("Add", _earlier(flow, second), taken))
    chosen = [first, _with_room(flow, second, places[1], sizes)]
    weights = [flow.add("Mul", gates, mask) for mask in chosen]
    total = flow.add("ReduceSum", flow.add("Add", *weights), expert)
    total = flow.add("Max", total, _fixed(flow, 1e-9))
    parts = []
    for mask, place, weight in zip(chosen, places, weights, strict=True):
        of_token = flow.add("ReduceSum", flow.add("Mul", place, mask), expert, keepdims=0)
        spots = _one_hot(flow, flow.add("Cast", of_token, to=TensorProto.INT64), sizes.places)
        share = flow.add("Unsqueeze", flow.add("Div", weight, total), expert)
        parts.append(flow.add("Mul", share, flow.add("Unsqueeze", spots, flow.constant(*_PLACE))))
    return flow.add("Add", *parts)


_EXPERT = "expert", np.array([-1])
_PLACE = "place", np.array([2])


def _highest(flow: Flow, scores: str, sizes: Experts) -> str:
    """(G, S, E): 1 at the expert with the highest score of a token."""
    return _one_hot(flow, flow.add("ArgMax", scores, axis=-1, keepdims=0), sizes.count)


def _one_hot(flow: Flow, index: str, depth: int) -> str:
    bounds = _fixed(flow, [0, 1])
    return flow.add("OneHot", index, flow.constant(f"depth{depth}", np.array([depth])), bounds)


def _earlier(flow: Flow, mask: str) -> str:
    """(G, S, E): tokens of the group before this one that ask for the expert."""
    return flow.add("CumSum", mask, flow.constant("along tokens", np.int64(1)), exclusive=1)


def _with_room(flow: Flow, mask: str, place: str, sizes: Experts) -> str:
    """The tokens that come before the expert is full."""
    fits = flow.add("Less", place, _fixed(flow, sizes.places))
    return flow.add("Mul", mask, flow.add("Cast", fits, to=_FLOAT))


def _fixed(flow: Flow, value: float | list[int]) -> str:
    """A float that is made by a node, not held: what is held is trained."""
    return flow.add("Constant", value=numpy_helper.from_array(np.array(value, np.float32)))
