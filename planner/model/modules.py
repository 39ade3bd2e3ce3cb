"""The module of a PyTorch network that each operator came from, by path: "model.layers.0.mlp".

The exporter notes it at each node. Nodes that lost the note, because a rewriting made them, take
the module of a parameter that they read, else that of the operator before them, else that of the
one behind them.
"""

from collections.abc import Iterable

from planner.model.load import Model
from planner.model.scopes import scope_of


def modules_of(model: Model) -> tuple[str, ...]:
    """Per operator of the graph, the path of its module, "" for the whole network; () where the
    file does not say any.
    """
    noted = {node.name: scope_of(node).module for node in model.proto.graph.node}
    if not any(noted.values()):
        return ()
    operators = model.graph.operators
    paths = [
        _of_parameter(operator.parameters, model) if path is None else path
        for operator in operators
        for path in [noted.get(operator.name)]
    ]
    made_in: dict[str, str] = {}
    for i, operator in enumerate(operators):
        path = paths[i]
        if path is None:
            path = paths[i] = next((made_in[n] for n in operator.inputs if n in made_in), None)
        if path is not None:
            made_in |= dict.fromkeys(operator.outputs, path)
    read_in: dict[str, str] = {}
    for i, operator in reversed([*enumerate(operators)]):
        path = paths[i]
        if path is None:
            path = paths[i] = next((read_in[n] for n in operator.outputs if n in read_in), "")
        read_in |= dict.fromkeys(operator.inputs, path)
    return tuple(path or "" for path in paths)


def _of_parameter(names: Iterable[str], model: Model) -> str | None:
    """The module of the first parameter whose path in the network is known."""
    for name in names:
        choice = model.choices.get(name)
        if choice is not None and choice.parameter:
            return choice.parameter.rpartition(".")[0]
    return None
