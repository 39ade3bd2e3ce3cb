"""The choice program of a stage on a view, and what its nodes stand for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from planner.artefacts.sharding import Rule, Spec
from planner.solvers.intra.blocks import Block
from planner.solvers.intra.space import Lies, View
from planner.solvers.intra.stash import Span
from planner.solvers.program.problem import ChoiceProgram, Held
from planner.support.arrays import Floats


class Parts(NamedTuple):
    """Seconds of an iteration by what they are, or weights of these.

    Attributes:
        compute: of operators and of the optimizer's step.
        inside: collectives inside passes.
        sums: of gradients, which run beside the last backward.
        gathers: of parameters behind the step.
        forward: of `compute`, one forward of a replica, such as the first one.
        backward: of `compute`, one backward, such as the last one, without what runs again.
        unsure: collectives inside passes that a plan may do without.
        waits: of `inside`, conversions of what operators make, for which others wait.
    """

    compute: Any = 0.0
    inside: Any = 0.0
    sums: Any = 0.0
    gathers: Any = 0.0
    forward: Any = 0.0
    backward: Any = 0.0
    unsure: Any = 0.0
    waits: Any = 0.0

    def weighted(self, weights: "Parts") -> Any:
        """The weighted sum."""
        nothing = np.zeros(np.broadcast_shapes(*map(np.shape, self)))
        return sum((w * one for w, one in zip(weights, self, strict=True) if w), nothing)


@dataclass
class Built:
    """A program, and what its nodes stand for.

    Attributes:
        view: the devices.
        last: the last moment, at which a forward ends (`blocks.py`).
        node_s: per node, (k,) seconds of an iteration.
        edges: per edge, its nodes.
        edge_s: per edge, (k, l) seconds; inf where both do not go together.
        held: per node, (k,) bytes, all the time; None for none.
        stash: per node, what it holds for the backward.
        rules: per operator, the rules of its strategies, state by state of its block; operator v is
            node v.
        lies: by name, node and strategies of a parameter.
        inputs: by name, node and specs of a tensor from outside.
        blocks: those that may run again.
    """

    view: View
    last: int
    rules: list[tuple[Rule, ...]]
    node_s: list[Parts] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    edge_s: list[Parts] = field(default_factory=list)
    held: list[Floats | None] = field(default_factory=list)
    stash: list[tuple[Span, ...]] = field(default_factory=list)
    lies: dict[str, tuple[int, tuple[Lies, ...]]] = field(default_factory=dict)
    inputs: dict[str, tuple[int, tuple[Spec, ...]]] = field(default_factory=dict)
    blocks: tuple[Block, ...] = ()

    def state(self, block: Block, picks: Sequence[int]) -> int:
        """The state of a block in an answer: that of all its operators."""
        return picks[block.first] * len(block.segments) // len(self.rules[block.first])

    def node(
        self, seconds: Parts, bytes_: Floats | None = None, stash: Sequence[Span] = ()
    ) -> int:  # fmt: skip
        """Adds a node; its index.

        Args:
            bytes_: that it holds all the time.
            stash: what it holds for the backward.
        """
        self.node_s.append(seconds)
        self.held.append(bytes_)
        self.stash.append(tuple(stash))
        return len(self.node_s) - 1

    def edge(self, u: int, v: int, seconds: Parts) -> None:
        """Adds an edge, if it costs anything."""
        if any(np.any(one) for one in seconds):
            self.edges.append((u, v))
            self.edge_s.append(seconds)

    def seconds(self, picks: Sequence[int]) -> Parts:
        """Of an assignment."""
        nodes = [[part[k] if np.ndim(part) else part for part in one]
                 for one, k in zip(self.node_s, picks, strict=True)]  # fmt: skip
        edges = [[part[picks[u], picks[v]] if np.ndim(part) else part for part in one]
                 for (u, v), one in zip(self.edges, self.edge_s, strict=True)]  # fmt: skip
        return Parts(*np.sum(nodes + edges, axis=0).tolist())

    def program(
        self, weights: Parts, limit_bytes: int | None, *, kept: bool = True, flying: int = 1
    ) -> ChoiceProgram:
        """The program with weights.

        Args:
            kept: whether what is held for the backward counts.
            flying: microbatches that hold it, each as long as one does.
        """
        known: dict[int, Floats] = {}  # equal layers share their tables
        for one in (*self.node_s, *self.edge_s):
            if id(one) not in known:
                known[id(one)] = one.weighted(weights)
        return ChoiceProgram(
            tuple(known[id(one)] for one in self.node_s),
            tuple(self.edges),
            tuple(known[id(one)] for one in self.edge_s),
            tuple(self._held(node, flying if kept else 0) for node in range(len(self.node_s))),
            limit_bytes,
        )

    def _held(self, node: int, flying: int) -> tuple[Held, ...]:
        always = self.held[node]
        some = [one._replace(bytes=flying * one.bytes) for one in self.stash[node] if flying]
        if always is not None:
            some.append(Span(0, self.last, always))
        return tuple(
            Held(one.first, one.last, np.ceil(one.bytes).astype(np.int64))
            for one in some
            if one.bytes.any()
        )
