"""Bytes inside one pass, worked out by hand. Every tensor has 1 to 100 B, parameters have 1 B."""

from dataclasses import replace

import pytest

from planner.artefacts.graph import Graph, Operator, Parameter, Tensor, View
from planner.costs.passes import backward_workspace_bytes, operator_workspaces
from tests.support.builders import profile_of


def graph_of(operators, sizes, output="y"):
    """(inputs, outputs) of each operator, and the bytes of all tensors but the model's input."""
    return Graph(
        operators=tuple(
            Operator(f"op{v}", "Test", inputs, outputs, (f"w{v}",))
            for v, (inputs, outputs) in enumerate(operators)
        ),
        tensors=(
            Tensor("x", (1,), "int8", False),
            *(Tensor(name, (size,), "int8", True) for name, size in sizes.items()),
        ),
        parameters=tuple(Parameter(f"w{v}", (1,), "int8", True) for v in range(len(operators))),
        inputs=("x",),
        outputs=(output,),
    )


def excess(graph, views, inside=None, private=None):
    """The most in a backward pass that lets go of nothing, parameters' gradients (1 B) included."""
    profile = profile_of(graph, [1.0] * len(graph.operators), stash=False)
    profile = replace(profile, gradient_views=tuple(View(*pair) for pair in views))
    inside = range(len(graph.operators)) if inside is None else inside
    return backward_workspace_bytes(profile, frozenset(inside), frozenset(), (0, 0))


# x -> a -> b, x -> c; both joined, and joined -> y.
JOIN = graph_of(
    [(("x",), ("a",)), (("a",), ("b",)), (("x",), ("c",)), (("b", "c"), ("j",)), (("j",), ("y",))],
    {"a": 100, "b": 30, "c": 20, "j": 50, "y": 1},
)


def test_gradients_that_are_views_take_nothing_of_their_own():
    # The gradient of a, while that of b is there; then c's of its own is there, too.
    assert excess(JOIN, []) == 30 + 100 + 1
    # The whole of j's gradient is there as long as b's lies in it.
    assert excess(JOIN, [("b", "j"), ("c", "j")]) == 50 + 100 + 1
    assert excess(JOIN, [("c", "j")]) == max(50 + 30 + 1, 30 + 100 + 1)


def test_views_of_what_has_come_from_elsewhere_take_nothing_here():
    # Without the last operator, the gradient of j comes from another device.
    assert excess(JOIN, [("b", "j"), ("c", "j")], inside=range(4)) == 100 + 1
    assert excess(JOIN, [], inside=range(4)) == max(30 + 20 + 1, 30 + 100 + 1)


def test_what_goes_back_to_another_device_is_no_view():
    # b and c come from other devices; copies of their gradients go there.
    assert excess(JOIN, [("b", "j"), ("c", "j")], inside=[3, 4]) == 50 + 30 + 20 + 1


# x -> a; a -> b; a + b -> s; s -> y: a residual.
RESIDUAL = graph_of(
    [(("x",), ("a",)), (("a",), ("b",)), (("a", "b"), ("s",)), (("s",), ("y",))],
    {"a": 10, "b": 10, "s": 10, "y": 1},
)


def test_a_second_gradient_is_added_in_place_where_nothing_else_lies_there():
    # While the operator of b runs: s's storage, in which those of a and b lie, and a's second one.
    assert excess(RESIDUAL, [("a", "s"), ("b", "s")]) == 10 + 10 + 1
    assert excess(RESIDUAL, [("a", "s")]) == excess(RESIDUAL, []) == 10 + 10 + 10 + 1


# As above, but another operator reads a later, while b's gradient still lies in that of s.
FORK = graph_of(
    [(("x",), ("b",)), (("x",), ("a",)), (("a",), ("z",)), (("a", "b"), ("s",)),
     (("s", "z"), ("y",))],
    {"a": 10, "b": 10, "s": 10, "z": 3, "y": 1},
)  # fmt: skip


def test_a_second_gradient_needs_a_new_storage_where_something_else_lies_there():
    # z's has been used; s's storage, a's second one and the sum of both.
    assert excess(FORK, [("a", "s"), ("b", "s")]) == 10 + 10 + 10 + 1
    # In place; while the operator of z runs: those of z, a and b, and a's second one.
    assert excess(FORK, [("a", "s")]) == 3 + 10 + 10 + 10 + 1


def test_what_has_come_from_elsewhere_is_never_added_to_in_place():
    # j goes to another device, too, whose gradient is there: a second one and the sum of both.
    graph = replace(
        JOIN,
        operators=(*JOIN.operators, Operator("op5", "Test", ("j",), ("o",), ())),
        tensors=(*JOIN.tensors, Tensor("o", (1,), "int8", True)),
        outputs=("o",),
    )
    views = [("b", "j"), ("c", "j")]
    assert excess(graph, views, inside=range(5)) == max(50 + 50 + 1, 50 + 100 + 1)
    less = replace(graph, tensors=tuple(
        replace(one, shape=(10,)) if one.name == "a" else one for one in graph.tensors
    ))  # fmt: skip
    assert excess(less, views, inside=range(5)) == 50 + 50 + 1


# x -> a by the table w; a -> h; w -> t, its transpose; (h, t) -> y: an embedding that is tied.
def tied(transposed=True, between=()):
    reads = ("h", "t") if transposed else ("h",)
    operators = [
        Operator("embed", "Test", ("x",), ("a",), ("w",)),
        Operator("layer", "Test", ("a",), ("h",), between),
        Operator("turn", "Test", (), ("t",), ("w",)),
        Operator("head", "Test", reads, ("y",), () if transposed else ("w",)),
    ]
    sizes = {"a": 7, "h": 5, "t": 100, "y": 1}
    if not transposed:
        del operators[2], sizes["t"]
    graph = Graph(
        operators=tuple(operators),
        tensors=(
            Tensor("x", (1,), "int8", False),
            *(Tensor(name, (size,), "int8", True) for name, size in sizes.items()),
        ),
        parameters=(Parameter("w", (100,), "int8", True),),
        inputs=("x",),
        outputs=("y",),
    )
    profile = profile_of(graph, [1.0] * len(operators), stash=False)
    return replace(profile, views=(View("t", "w"),) if transposed else ())


def backward_bytes(profile, inside):
    return backward_workspace_bytes(profile, frozenset(inside), frozenset(), (0, 0))


def test_the_gradient_of_a_tied_parameter_waits_for_its_first_reader():
    # The head's, which is a view, the embedding's, and their sum; that of a is used.
    assert backward_bytes(tied(), range(4)) == 100 + 100 + 100
    # No view: added up in place, while the gradient of a is there.
    assert backward_bytes(tied(transposed=False), range(3)) == 100 + 100 + 7
    # A third reader in between: view, its own and their sum, beside that of a.
    assert backward_bytes(tied(between=("w",)), range(4)) == 100 + 100 + 100 + 7


def test_the_gradient_of_a_tied_parameter_waits_for_no_other_stage():
    assert backward_bytes(tied(), [0]) == 100
    assert backward_bytes(tied(), [1, 2, 3]) == 1 + 5 + 100
    by_operator = operator_workspaces(tied())  # as in stages that do not hold all readers
    assert by_operator[0] == 100 + 7 and by_operator[1] == 7 + 5


def stopped(graph, *names):
    """A graph in which no gradient flows over some tensors."""
    tensors = (replace(t, gradient=t.gradient and t.name not in names) for t in graph.tensors)
    return replace(graph, tensors=tuple(tensors))


def test_an_operator_without_a_backward_makes_no_gradient():
    # x -> a, a -> s, (a, s) -> y.
    operators = [(("x",), ("a",)), (("a",), ("s",)), (("a", "s"), ("y",))]
    graph = graph_of(operators, {"a": 100, "s": 40, "y": 1})
    assert excess(graph, []) == 100 + 40 + 100 + 1
    assert excess(stopped(graph, "s"), []) == 1 + 100 + 1


def test_the_gradient_of_a_tied_parameter_waits_for_no_reader_without_a_backward():
    profile, v = tied(transposed=False), Parameter("v", (90,), "int8", True)
    embed, layer, head = profile.graph.operators
    graph = replace(
        profile.graph,
        operators=(embed, replace(layer, parameters=("v",)), head),
        parameters=(*profile.graph.parameters, v),
    )
    whole, early = (replace(profile, graph=one) for one in (graph, stopped(graph, "a")))
    # The table's from the head, beside v's and that of a; or else it is complete at once.
    assert backward_bytes(whole, range(3)) == max(100 + 90 + 7 + 5, 100 + 100 + 7)
    assert backward_bytes(early, range(3)) == 1 + 5 + 100


def test_solvers_count_each_gradient_as_a_tensor_of_its_own():
    profile = profile_of(JOIN, [1.0] * 5, stash=False)
    views = replace(profile, gradient_views=(View("b", "j"), View("c", "j")))
    assert operator_workspaces(views) == operator_workspaces(profile)


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (View("b", "x"), r"gradient_views\[0\].base: expected an operator's output, got 'x'"),
        (View("a", "j"), r"gradient_views\[0\].tensor: expected an input of 'op3', got 'a'"),
    ],
)
def test_a_gradient_is_a_view_of_that_of_what_its_operator_makes(view, message):
    profile = profile_of(JOIN, [1.0] * 5)
    with pytest.raises(ValueError, match=message):
        replace(profile, gradient_views=(view,))
    right = View("b", "j")
    with pytest.raises(ValueError, match="expected each pair once, got 'b' again"):
        replace(profile, gradient_views=(right, right))
