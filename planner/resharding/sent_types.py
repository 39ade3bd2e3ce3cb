"""The types in which weights are gathered. Under autocast products read a weight in a shorter type.
One that nothing else reads is converted where it lies, and its parts are gathered in that type:
half the bytes, and each device converts its own part. To convert and to gather may change places,
so the copies are the same numbers. Their gradients come home in the type of the weight.
"""

from collections.abc import Mapping

from planner.artefacts.graph import (
    Graph,
    holders,
    parameters_by_name,
    retyped,
    tensors_by_name,
)
from planner.artefacts.operator_types import PRODUCTS
from planner.support.memo import remembered

SHORT_FLOATS = ("float16", "bfloat16")


@remembered
def sent_types(graph: Graph) -> Mapping[str, str]:
    """By name, the types of the weights that are gathered in another type than their own.

    Args:
        graph: with the types that its tensors have under autocast.
    """
    known, tensors = parameters_by_name(graph), tensors_by_name(graph)
    found = {}
    for name, readers in holders(graph).items():
        operators = [graph.operators[v] for v in readers]
        made = {tensors[one.outputs[0]].dtype for one in operators}
        short = made.intersection(SHORT_FLOATS)
        products = all(one.type in PRODUCTS for one in operators)
        if known[name].dtype == "float32" and products and len(made) == len(short) == 1:
            found[name] = short.pop()
    return found


def with_products_in(graph: Graph, dtype: str) -> Graph:
    """The graph of a file, which knows nothing of autocast, with the type that products of float32
    weights compute in.
    """
    known = parameters_by_name(graph)
    made = {
        name: dtype
        for one in graph.operators
        if one.type in PRODUCTS and any(known[n].dtype == "float32" for n in one.parameters)
        for name in one.outputs
    }
    return retyped(graph, made)
