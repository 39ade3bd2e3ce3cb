"""Segments of a stage that keep only what they read, and are run again in its backward
(`Stage.recomputed`), and those that keep their activations in the host's memory
(`Stage.offloaded`, `offload.py`).

A segment is a module of its own in that of its stage. Autograd records it as any other part, but
for each tensor that a backward will read it keeps an empty place. Before the first backward of the
segment all of it runs again, in the same modes and with the same random numbers, and fills them.

torch.utils.checkpoint does the same where a graph is run by one backward. A product in two parts
(`launcher/mesh/late_gradients.py`) has a graph of its own, with two, which read the same places.

An operator that a segment leaves out runs again, too, but for its products, below autograd: their
results are held on the device from the first run on and given back. So autograd reads inputs that
were made anew, and all that is cheap, such as conversions of type, is not held.
"""

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, copy_context
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from planner.artefacts.graph import Graph
from planner.artefacts.segments import offloaded_of, segments_of
from planner.artefacts.strategy import Stage
from planner.launcher.mesh.convert import Conversion, StartedCopy, finished
from planner.launcher.mesh.late_gradients import late_parameters
from planner.launcher.stash.offload import current_pass, given_again, kept, staying
from planner.operators.casting import WeightCast
from planner.operators.parts.calls import is_call
from planner.operators.running import running_again, runs_again
from planner.support.contexts import holding

_pass: ContextVar["_SegmentPass | None"] = ContextVar("segment pass", default=None)

_begins: ContextVar[tuple[Callable[[], None], ...]] = ContextVar("begins", default=())
"""What is done before the backward of the segment that runs here."""

_Precision = Callable[[], AbstractContextManager[object]]


class RecomputedSegment(nn.Module):
    """A segment that is run again in its backward.

    Args:
        body: its operators.
        precision: gives the context that they run in.
    """

    def __init__(self, body: fx.GraphModule, precision: _Precision = nullcontext) -> None:
        super().__init__()
        self.body, self._precision = body, precision

    def forward(self, *given: Any) -> Any:
        """What the operators make; without gradients nothing is kept."""
        if not torch.is_grad_enabled():
            return self.body(*given)
        context, waiting = copy_context(), list[Any]()

        def again(own: _SegmentPass) -> None:
            context.run(self._again, [given_again(one) for one in waiting], own)

        own = _SegmentPass(again)
        begins = *_begins.get(), own.run_again
        hooks = saved_tensors_hooks(own.empty_place, _filled)
        with holding(_pass, own), holding(_begins, begins), hooks:
            made = self.body(*given)
        waiting += map(kept, given)
        return made

    def _again(self, given: Sequence[Any], own: "_SegmentPass") -> None:
        # State has its new values already, and what is read of it is that of the first time.
        with torch.enable_grad(), running_again(), holding(_pass, own), self._precision():
            self.body(*given)


class OffloadedSegment(nn.Module):
    """A segment whose activations wait in the host's memory.

    Args:
        body: its operators, or the segment that is run again.
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, *given: Any) -> Any:
        """What the operators make."""
        own = current_pass()
        if own is None or not torch.is_grad_enabled():
            return self.body(*given)
        with own.segment() as copies, holding(_begins, (copies.ready,)):
            return self.body(*given)


class _SegmentPass:
    """One pass of a segment, from its forward to its backward.

    Attributes:
        held: results of products, until the segment has run again.

    Args:
        again: runs it again.
    """

    def __init__(self, again: Callable[["_SegmentPass"], None]) -> None:
        self.held: deque[Any] = deque()
        self._again: Callable[[_SegmentPass], None] | None = again
        # Autograd lets go of what it does not need any more.
        self._places: list[weakref.ref[_Place]] = []

    def empty_place(self, _: Tensor) -> "_Place":
        """A place for a tensor that a backward will read."""
        place = _Place(self)
        self._places.append(weakref.ref(place))
        return place

    def run_again(self) -> None:
        """Fills all places, once."""
        again, self._again = self._again, None
        if again is None:
            return
        todo = iter(self._places)

        def fill(tensor: Tensor) -> None:
            place = next(todo)()
            if place is not None:
                place.tensor = tensor.detach()

        with saved_tensors_hooks(fill, _never_read):
            again(self)
        assert not self.held, "both passes of a segment run the same products"
        assert next(todo, None) is None, "both passes of a segment keep the same tensors"


class _Place:
    """A tensor that is not there before its segment has run again."""

    def __init__(self, own: _SegmentPass) -> None:
        self.own = own
        self.tensor: Tensor | None = None


def _filled(place: _Place) -> Tensor:
    if place.tensor is None:
        place.own.run_again()
    assert place.tensor is not None, "both passes of a segment keep the same tensors"
    return place.tensor


def _never_read(_: object) -> Tensor:
    raise AssertionError("nothing goes back through a segment that is run again")


# ---- products that are not computed again

_aten = torch.ops.aten
_HELD = frozenset(
    {
        _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.mv, _aten.addmv, _aten.dot,
        _aten.convolution,
        _aten._scaled_dot_product_flash_attention_for_cpu,
        _aten._scaled_dot_product_flash_attention,
        _aten._scaled_dot_product_efficient_attention,
        _aten._scaled_dot_product_cudnn_attention,
        _aten._scaled_dot_product_fused_attention_overrideable,
    }
)  # fmt: skip
"""What products and attention take their time in."""


class _HoldingProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Holds the results of products in the first run of a segment, and gives them back in the same
    order in the second one.

    Args:
        held: by the pass.
    """

    def __init__(self, held: deque[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held = held

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Whether it is no one's that watches what runs, such as memory, for which queues wait
        (`launcher/mesh/queue.py`).
        """
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What the function makes."""
        if func.overloadpacket not in _HELD:
            return func(*args, **(kwargs or {}))
        if runs_again():
            return self._held.popleft()
        made = func(*args, **(kwargs or {}))
        staying(made)
        # The tensors themselves get nodes of autograd, which would hold all of the graph.
        self._held.append(tree_map_only(Tensor, Tensor.detach, made))
        return made


class KeptOperator(nn.Module):
    """An operator whose products are not computed again.

    Args:
        function: of the operator.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the operator makes."""
        own = _pass.get()
        if own is None:  # without gradients
            return self.function(*args, **kwargs)
        with _HoldingProducts(own.held):
            return self.function(*args, **kwargs)


# ---- nodes of a segment


def run_before(made: Any) -> None:
    """Lets the segment run again, or its activations come back, before the backward of what this is
    given.
    """
    begins = _begins.get()
    if not begins or runs_again():
        return

    def begin(_: object) -> None:
        for one in begins:
            one()

    for one in tree_leaves(made):
        if isinstance(one, Tensor) and one.grad_fn is not None:
            one.grad_fn.register_prehook(begin)


def begun(copy: StartedCopy, home: Tensor) -> StartedCopy:
    """A copy that was started before its segment began; anew where that is run again."""
    return copy.running.how(home) if runs_again() else copy


class StartedOnce(nn.Module):
    """A conversion whose readers are behind the segment in which it is started.

    Args:
        conversion: the same.
    """

    def __init__(self, conversion: Conversion) -> None:
        super().__init__()
        self._conversion = [conversion]  # held elsewhere, so no submodule

    def forward(self, tensor: Tensor) -> StartedCopy | None:
        """Starts to make the copy; does nothing where the segment is run again."""
        return None if runs_again() else self._conversion[0](tensor)


# ---- a stage's module with segments


def with_segments(
    module: fx.GraphModule, stage: Stage, graph: Graph, precision: _Precision = nullcontext
) -> fx.GraphModule:
    """A module with the segments of a stage as modules of their own; the module itself where there
    are none.

    Args:
        module: of the stage, with its conversions. It stays as it is, and holds the parameters.
        precision: gives the context that forward passes run in.
    """
    again, offloaded = segments_of(stage, graph), offloaded_of(stage, graph)
    segments = sorted({*again, *offloaded})
    if not segments:
        return module
    nodes = list(module.graph.nodes)
    calls = {node.meta["onnx_name"]: i for i, node in enumerate(nodes) if is_call(node)}
    places = [*(calls[name] for name in stage.operators), len(nodes) - 1]  # the output
    inside: dict[fx.Node, int] = {}
    for k, one in enumerate(segments):
        first = _begin(module, nodes, places[one.first])
        end = _behind(module, nodes, places[one.end])
        inside |= {node: k for node in nodes[first:end] if node.op != "get_attr"}
    last = {nodes[places[one.last]] for one in segments}
    kinds = [(one in again, one in offloaded) for one in segments]
    kept = {nodes[places[i]] for one in segments for i in one.kept}
    made = _Parting(module, inside, (last, kept), kinds, precision).outer()
    vars(made).update(input_names=module.input_names, output_names=module.output_names)
    return made


def _begin(module: fx.GraphModule, nodes: Sequence[fx.Node], at: int) -> int:
    """Of the nodes right before an operator, the first that ends what it reads."""
    while _ends(module, nodes[at - 1]):
        at -= 1
    return at


def _ends(module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":  # one without inputs waits for a gather that was started before
        called = module.get_submodule(str(node.target))
        return isinstance(called, WeightCast) or not node.all_input_nodes
    return node.op == "get_attr" or node.target in _ENDS


_ENDS = (finished, late_parameters, torch.detach)


def _behind(module: fx.GraphModule, nodes: Sequence[fx.Node], at: int) -> int:
    """Of the nodes right before an operator, the first that starts or ends what others read."""
    at = _begin(module, nodes, at)
    while nodes[at - 1].op == "get_attr" or _started_by(module, nodes[at - 1]) is not None:
        at -= 1
    return at


def _started_by(module: fx.GraphModule, node: fx.Node) -> Conversion | None:
    """The conversion that a node starts."""
    called = module.get_submodule(str(node.target)) if node.op == "call_module" else None
    return called if isinstance(called, Conversion) else None


class _Parting:
    """Puts the segments of a module into modules of their own.

    Args:
        inside: by node, the segment that it is in.
        marked: the operators before whose backwards segments are run again, or come back, and those
            that are not computed again.
        kinds: by segment, whether it is run again, and whether it is offloaded.
        precision: gives the context that segments run again in.
    """

    def __init__(
        self, module: fx.GraphModule, inside: Mapping[fx.Node, int],
        marked: tuple[Collection[fx.Node], Collection[fx.Node]],
        kinds: Sequence[tuple[bool, bool]], precision: _Precision,
    ) -> None:  # fmt: skip
        self._module, self._inside = module, inside
        self._last, self._kept = marked
        self._kinds, self._precision = kinds, precision
        self._staying = _staying(module)

    def outer(self) -> fx.GraphModule:
        """The module with them."""
        graph, root, nodes = fx.Graph(), dict[str, Any](), self._module.graph.nodes
        made: dict[fx.Node, fx.Node] = {}
        segments: dict[int, list[fx.Node]] = {}
        for node, k in self._inside.items():
            segments.setdefault(k, []).append(node)
        # What is held comes first: segments read it.
        for node in sorted(nodes, key=lambda node: node.op not in ("placeholder", "get_attr")):
            if node in made:
                continue
            if node in self._inside:
                k = self._inside[node]
                self._add(graph, root, made, (k, segments[k]))
                continue
            made[node] = graph.node_copy(node, made.__getitem__)
            _hold(root, self._module, node)
        return fx.GraphModule(root, graph, "Stage")

    def _add(
        self, graph: fx.Graph, root: dict[str, Any], made: dict[fx.Node, fx.Node],
        segment: tuple[int, Sequence[fx.Node]],
    ) -> None:  # fmt: skip
        """Adds a segment to the outer graph.

        Args:
            made: by node of the flat graph, that in the outer one.
            segment: its number and its nodes.
        """
        k, nodes = segment
        name, mine = f"segment_{k}", set(nodes)
        is_again, is_offloaded = self._kinds[k]
        used = [node for node in nodes if not mine.issuperset(self._users(node))]
        read = dict.fromkeys(one for node in nodes for one in node.all_input_nodes)
        read |= {one.all_input_nodes[0]: None for one in read if self._is_started(one)}
        given = [one for one in read if one not in mine]
        body = self._body(nodes, given, used)
        one = RecomputedSegment(body, self._precision) if is_again else body
        root[name] = OffloadedSegment(one) if is_offloaded else one
        result = graph.call_module(name, tuple(made[one] for one in given))
        made |= dict.fromkeys(nodes, result)  # for all but `used` only to be known
        for i, node in enumerate(used):
            made[node] = graph.call_function(getitem, (result, i))

    def _body(
        self, nodes: Sequence[fx.Node], given: Sequence[fx.Node], used: Sequence[fx.Node]
    ) -> fx.GraphModule:
        """The operators of a segment."""
        graph, root, mine = fx.Graph(), dict[str, Any](), set(nodes)
        made = {one: graph.placeholder(one.name) for one in given}
        for one in given:
            if one in self._staying:
                graph.call_function(staying, (made[one],))
        for one in self._module.graph.nodes:  # in the order in which they are started
            if one in given and self._is_started(one):
                made[one] = graph.call_function(begun, (made[one], made[one.all_input_nodes[0]]))
        for node in nodes:
            made[node] = graph.node_copy(node, made.__getitem__)
            _hold(root, self._module, node)
            if node in self._kept:
                _keep(root, made[node])
            if node in self._staying:
                graph.call_function(staying, (made[node],))
            conversion = _started_by(self._module, node)
            if conversion is not None and not mine.issuperset(node.users):
                root[str(node.target)] = StartedOnce(conversion)
            if node in self._last:
                graph.call_function(run_before, (made[node],))
        graph.output(tuple(made[node] for node in used))
        return fx.GraphModule(root, graph, "Segment")

    def _users(self, node: fx.Node) -> Iterator[fx.Node]:
        """Who reads what a node makes; also those who start to convert it anew."""
        for one in node.users:
            yield one
            if self._is_started(one):
                yield from one.users

    def _is_started(self, node: fx.Node) -> bool:
        return _started_by(self._module, node) is not None


def _staying(module: fx.GraphModule) -> frozenset[fx.Node]:
    """The nodes whose tensors stay on the device: what is made of parameters alone, and outputs."""
    of_data, found = set[fx.Node](), set[fx.Node]()
    for node in module.graph.nodes:
        if node.op == "output":
            found.update(node.all_input_nodes)
        elif node.op == "placeholder" or not of_data.isdisjoint(node.all_input_nodes):
            of_data.add(node)
        elif node.op != "get_attr":
            found.add(node)
    return frozenset(found)


def _keep(root: dict[str, Any], node: fx.Node) -> None:
    """Lets the operator that a node calls hold its products."""
    function: Any = root[str(node.target)] if node.op == "call_module" else node.target
    node.op, node.target = "call_module", f"kept_{node.name}"
    root[node.target] = KeptOperator(function)


def _hold(root: dict[str, Any], module: fx.GraphModule, node: fx.Node) -> None:
    """Puts what a node refers to among what a new module holds."""
    if node.op in ("call_module", "get_attr"):
        held: Any = module
        for part in str(node.target).split("."):
            held = getattr(held, part)
        root[str(node.target)] = held
