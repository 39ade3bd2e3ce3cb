"""The choice program of a stage on a view, and what its nodes stand for."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from planner.artefacts.sharding import Rule, Spec
from planner.solvers.intra.space import Lies, View
from planner.solvers.program.problem import ChoiceProgram, Held
from planner.support.arrays import Floats


class Parts(NamedTuple):
    """Seconds of an iteration by what they are, or weights of these.

    Attributes:
        compute: of operators and of the optimizer's step.
        inside: collectives inside passes.
        sums: of gradients, which run beside the last backward.
        gathers: of parameters behind the step.
    """

    compute: Any = 0.0
    inside: Any = 0.0
    sums: Any = 0.0
    gathers: Any = 0.0

    def weighted(self, weights: "Parts") -> Any:
        """The weighted sum."""
        return sum(w * one for w, one in zip(weights, self, strict=True))


@dataclass
class Built:
    """A program, and what its nodes stand for.

    Attributes:
        view: the devices.
        again: whether forwards run again.
        node_s: per node, (k,) seconds of an iteration.
        edges: per edge, its nodes.
        edge_s: per edge, (k, l) seconds; inf where both do not go together.
        held: per node, (k,) bytes; None for none.
        kept: per node, what it holds besides unless that is made again.
        rules: per operator, its strategies; operator v is node v.
        lies: by name, node and strategies of a parameter.
        inputs: by name, node and specs of a tensor from outside.
    """

    view: View
    again: bool
    rules: list[tuple[Rule, ...]]
    node_s: list[Parts] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    edge_s: list[Parts] = field(default_factory=list)
    held: list[Floats | None] = field(default_factory=list)
    kept: list[Floats | None] = field(default_factory=list)
    lies: dict[str, tuple[int, tuple[Lies, ...]]] = field(default_factory=dict)
    inputs: dict[str, tuple[int, tuple[Spec, ...]]] = field(default_factory=dict)

    def node(
        self, seconds: Parts, bytes_: Floats | None = None, kept_bytes: Floats | None = None
    ) -> int:  # fmt: skip
        """Adds a node; its index.

        Args:
            bytes_: that it holds whatever the schedule.
            kept_bytes: that it holds unless they are made again.
        """
        self.node_s.append(seconds)
        self.held.append(bytes_)
        self.kept.append(kept_bytes)
        return len(self.node_s) - 1

    def edge(self, u: int, v: int, seconds: Parts) -> None:
        """Adds an edge, if it costs anything."""
        if any(np.any(one) for one in seconds):
            self.edges.append((u, v))
            self.edge_s.append(seconds)

    def program(
        self, weights: Parts, limit_bytes: int | None, kept: float = 1.0
    ) -> ChoiceProgram:  # fmt: skip
        """The program with weights.

        Args:
            kept: share that counts of what is held unless it is made again.
        """
        return ChoiceProgram(
            tuple(one.weighted(weights) for one in self.node_s),
            tuple(self.edges),
            tuple(one.weighted(weights) for one in self.edge_s),
            tuple((*_held(a), *_held(b, kept)) for a, b in zip(self.held, self.kept, strict=True)),
            limit_bytes,
        )


def _held(bytes_: Floats | None, share: float = 1.0) -> tuple[Held, ...]:
    """What a node holds, by its strategies."""
    if bytes_ is None or not share or not bytes_.any():
        return ()
    return (Held(0, 0, np.ceil(share * bytes_).astype(np.int64)),)
