"""How the parameters of a stage, their gradients and their state may lie, and what that costs."""

from collections.abc import Collection, Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from planner.artefacts.graph import ITEM_BYTES, Parameter
from planner.artefacts.operator_types import VIEW, facts
from planner.artefacts.sharding import CHUNKS, Spec, reads
from planner.costs.casts import cast_share, cast_weights
from planner.costs.stage_memory import parameter_bytes
from planner.costs.update import state_copies
from planner.resharding.reshardings import reads_back
from planner.resharding.sums import ParameterSpecs
from planner.solvers.intra.built import Parts
from planner.solvers.intra.prices import Prices
from planner.solvers.intra.reads import Asked, Ends, Read, Reader, copies_of, needs_of, shared_wants
from planner.solvers.intra.space import Lies, lies_of
from planner.support.arrays import Floats


class Home(NamedTuple):
    """How a parameter is at home.

    Attributes:
        lies: how it lies.
        summed: along each axis, whether a reader makes summands of its gradient; None where there
            is one reader, whose strategy says that.
    """

    lies: Lies
    summed: tuple[bool, ...] | None


class ParameterTables:
    """The tables of a parameter.

    Args:
        prices: on a view.
    """

    def __init__(self, prices: Prices) -> None:
        self.prices, self.view = prices, prices.view
        self.graph = prices.problem.profile.graph
        self.replica_axes = len(self.view.replica_axes)

    def of(
        self, one: Parameter, asked: Asked, wants: Sequence[Sequence[Ends]]
    ) -> tuple[tuple[Home, ...], tuple[Parts, Floats, Floats], Read]:
        """How a parameter may be at home, what that costs and takes, and what its readers cost.

        Args:
            wants: per reader, how it is wanted, by strategies.
        """
        n = len(self.view.mesh)
        lies = lies_of(one, [want.spec[:n] for some in wants for want in some], self.view)
        # Tied ones are few. Constants have a reader in each layer, which pays for itself. Readers
        # that want the same share a copy, so it is only sure that each pays its part of one.
        tied = one.trainable and len(asked) > 1
        homes = tuple(
            Home(lie, summed) for lie in lies for summed in (_sums(wants) if tied else (None,))
        )
        shared = shared_wants(wants) if tied else ()
        first = [[self._first_s(one, home, want) for want in shared] for home in homes]
        together = len({reader.segment for reader in asked}) == 1
        table = np.array(first).reshape(len(homes), len(shared))
        copies = copies_of(shared, table, together=together)
        direct = [
            self._reader(one, homes, (some, shared), (reader, 1.0 if tied else 1 / len(asked)))
            for some, reader in zip(wants, asked, strict=True)
        ]
        needs = [needs_of(copies, some) for some in wants]
        own = self._node(one, homes, {want.spec[:n] for some in wants for want in some})
        return homes, own, Read([*copies.values()], direct, needs)

    def _reader(
        self, one: Parameter, homes: Sequence[Home],
        wants: tuple[Sequence[Ends], Collection[Ends]], by: tuple[Reader, float],
    ) -> Parts:  # fmt: skip
        """(homes, wants) of what it costs that an operator reads it.

        Args:
            wants: by the operator's strategies, and those of shared copies.
            by: the operator, and the part of its own copy that it pays for sure.
        """
        (some, shared), (reader, sure) = wants, by
        each = [*zip(some, reader.runs, strict=True)]
        columns = list(dict.fromkeys(each))
        small = np.array([
            [self._reader_s(one, home, want, (reader, runs), sure=sure * (want not in shared))
             for want, runs in columns]
            for home in homes
        ])  # fmt: skip
        found = np.moveaxis(small[:, [columns.index(w) for w in each]], 2, 0)
        return Parts(*(part if part.any() else 0.0 for part in found))

    def _node(
        self, one: Parameter, homes: Sequence[Home], wanted: Collection[Spec]
    ) -> tuple[Parts, Floats, Floats]:
        """Its step, sums of its gradient if it is tied, gathers behind the step, and bytes that it,
        its gradient and its state take; and those of a copy in the type of autocast, where it lies
        as a reader may want it.
        """
        problem, item = self.prices.problem, ITEM_BYTES[one.dtype]
        state = state_copies(problem.profile.parameter_dtype, problem.training.optimizer)
        share = cast_share(problem.profile) * (one.name in cast_weights(problem.profile))
        n, rows = len(self.view.mesh), []
        for home in homes:
            lies, gradient, stepped = (
                home.lies.at(least, self.replica_axes) for least in (3, 2, 1)
            )
            size = parameter_bytes(one, ParameterSpecs(lies, gradient, stepped), self.view.sizes)
            rows.append((
                self.prices.step_s(size.state),
                0.0 if home.summed is None else self._sums_s(one, home.lies, home.summed),
                self.prices.once_s(one.shape, item, stepped, lies),
                size.parameter + size.gradient + state * size.state,
                share * size.parameter * (CHUNKS not in lies and lies[:n] in wanted),
            ))  # fmt: skip
        step_s, sum_s, gather_s, size, cast = np.array(rows).T
        return Parts(step_s, 0.0 * step_s, sum_s, gather_s), size, cast

    def _gradient(self, lies: Lies, summed: Sequence[bool]) -> Spec:
        """How the gradient of a parameter lies."""
        spec = lies.at(2, self.replica_axes)
        return tuple("P" if part == "R" and summand else part
                     for part, summand in zip(spec, summed, strict=True))  # fmt: skip

    def _sums_s(self, one: Parameter, lies: Lies, summed: Sequence[bool]) -> float:
        gradient, state = self._gradient(lies, summed), lies.at(1, self.replica_axes)
        return self.prices.once_s(one.shape, one.gradient_item_bytes, gradient, state)

    def _first_s(self, one: Parameter, home: Home, want: Ends) -> float:
        """To gather a parameter for forwards, and to bring its gradient home."""
        lies = home.lies.at(3, self.replica_axes)
        there = self.prices.gathered_s(one, lies, want.spec)
        back = 0.0
        if want.gradient is not None:
            gradient = self._gradient(home.lies, home.summed or _summed(want))
            back = self.prices.converted_s(
                one.shape, one.gradient_item_bytes, want.gradient, gradient
            )
        return self.prices.rounds * (want.forwards * there + back)

    def _reader_s(
        self, one: Parameter, home: Home, want: Ends, by: tuple[Reader, float], *, sure: float
    ) -> Parts:
        """What it costs in copies in a shorter type, in collectives inside passes, and once, that
        an operator reads a parameter.

        Args:
            by: the operator, and how often it is computed in a microbatch.
            sure: the part of a copy of its own that it pays for sure; 0 where it makes none.
        """
        (reader, runs) = by
        prices, made = self.prices, _summed(want)
        if home.summed is not None and any(
            here and not there for here, there in zip(made, home.summed, strict=True)
        ):
            return Parts(inf)
        lies = home.lies.at(3, self.replica_axes)
        normalizes = self.graph.operators[reader.operator].type == "BatchNormalization"
        if lies != want.spec and not one.trainable and (one.state or normalizes):
            return Parts(inf)  # what an operator gives another value lies as it is read
        first = self._first_s(one, home, want) if sure else 0.0
        flows = want.gradient is not None
        later = flows and want.segment < 0 and self._reads_again(one, reader)
        mine = flows and home.summed is None
        there = prices.gathered_s(one, lies, want.spec)
        gradient = self._gradient(home.lies, home.summed or made) if flows else None
        cast_s, added_s = self._computed_s(one, Ends(lies, gradient), want, reader)
        # Copies that are gathered in the shorter type are made once for all who share them.
        first_cast_s = cast_s * (sure if there and prices.sent_as(one) != one.dtype else 1.0)
        again = later and there > 0  # what a device has it does not gather again
        again_s = prices.rounds * later * there
        # Where the view is converted, that is read back instead.
        view = facts(self.graph.operators[reader.operator].type).moves is VIEW
        return Parts(
            compute=prices.rounds * (runs * first_cast_s + again * cast_s + added_s),
            inside=sure * first + (not view) * again_s,
            sums=self._sums_s(one, home.lies, made) if mine else 0.0,
            forward=first_cast_s,
            backward=again * cast_s + added_s,
            unsure=(1 - sure) * first + view * again_s,
        )

    def _computed_s(
        self, one: Parameter, home: Ends, want: Ends, reader: Reader
    ) -> tuple[float, float]:
        """Of a copy in a shorter type that an operator reads, and of its part of the sum of the
        gradients.
        """
        cast_s = added_s = 0.0
        if home[:2] != want[:2]:
            cast_s = self.prices.cast_s(one, reader.operator, home.spec, want.spec)
        if home.gradient is not None:
            added_s = self.prices.added_s(one, reader.operator, home.gradient)
        return cast_s, added_s

    def _reads_again(self, one: Parameter, reader: Reader) -> bool:
        """Whether the backward of an operator gathers a parameter again. Readers of a view read
        back. A segment that is run again keeps what it has gathered.
        """
        operator = self.graph.operators[reader.operator]
        bias = len(one.shape) == 1 and facts(operator.type).bias is not None
        return facts(operator.type).moves is VIEW or (
            not bias and reads_back(operator, {reads(operator)[reader.place]}, self.graph)
        )


def _summed(want: Ends) -> tuple[bool, ...]:
    """Along each axis, whether a reader makes summands of the gradient of what it wants."""
    return tuple(part == "P" for part in want.gradient or ("R",) * len(want.spec))


def _sums(wants: Sequence[Sequence[Ends]]) -> list[tuple[bool, ...]]:
    """All that `_summed` may be of several readers together."""
    found = {_summed(want) for want in wants[0]}
    for some in wants[1:]:
        found = {tuple(a or b for a, b in zip(one, _summed(want), strict=True))
                 for one in found for want in some}  # fmt: skip
    return sorted(found)
