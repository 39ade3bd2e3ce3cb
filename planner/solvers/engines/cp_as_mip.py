"""A model of OR-Tools CP-SAT as a mixed integer program (`mip.py`), with the same variables first.

Legend: l literals, 0 or 1; ~l = 1 - l; L(f) the least value of a linear form f within the limits of
its variables, which is what makes M as small as it can be.

    (c1) f >= c if all l:      f + (c - L(f)) sum of ~l >= c, and nothing where L(f) >= c;
         f <= c is -f >= -c                                                       `_add_if`
    (c2) some l:               sum of l >= 1; exactly one l: = 1          `_add_constraint`
    (c3) intervals a, b that are there if l_a, l_b do not overlap: with o, whether a is first,
         start_b - start_a >= length_a if o, l_a, l_b;
         start_a - start_b >= length_b if ~o, l_a, l_b.
         Intervals that start at the same two times have one o, wherever they meet; intervals of
         one start are never both there                                           `_add_apart`

Integer variables of more than two values become continuous: they are times, which stand only in
differences, so with all literals fixed some optimum has whole ones. Rows of literals alone, as of
memory in bytes, are divided by their largest coefficient, because 1e10 beside 1 is more than the
accuracy of the engines.

Source: OR-Tools, cp_model.proto; (c1) and (c3) are textbook big-M constraints.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from planner.solvers.engines.mip import Mip

UNLIMITED = 2**62
"""Limits of CP-SAT from here on are none."""


@dataclass(slots=True)
class _Form:
    """A linear form: terms and a constant."""

    terms: dict[int, float] = field(default_factory=dict)
    constant: float = 0.0

    def add(self, j: int, a: float) -> None:
        """Adds a x_j."""
        self.terms[j] = self.terms.get(j, 0.0) + a

    def add_literal(self, literal: int, a: float) -> None:
        """Adds a l; a negative number is the literal that is not of variable -1 - l."""
        if literal >= 0:
            self.add(literal, a)
        else:
            self.add(-1 - literal, -a)
            self.constant += a


def mip_of(cp: Any) -> Mip:
    """The program of a model that minimises, without its constant."""
    proto, mip = cp.proto, Mip()
    for variable in proto.variables:
        low, high = variable.domain[0], variable.domain[len(variable.domain) - 1]
        mip.variable(float(high), low=float(low), integer=high - low <= 1)
    starts: dict[tuple[str, str], int] = {}
    for one in proto.constraints:
        if one.has_no_overlap():
            intervals = [proto.constraints[k] for k in one.no_overlap.intervals]
            for first, second in combinations(intervals, 2):
                _add_apart(mip, first, second, starts)
        elif not one.has_interval():
            _add_constraint(mip, one)
    objective = zip(proto.objective.vars, proto.objective.coeffs, strict=True)
    mip.objective = {j: float(a) for j, a in objective}
    return mip


def _add_constraint(mip: Mip, one: Any) -> None:
    """(c1) and (c2)."""
    given = list(one.enforcement_literal)
    if one.has_linear():
        _add_linear(mip, one.linear, given)
    elif one.has_exactly_one():
        form = _sum(one.exactly_one.literals)
        mip.row(form.terms, 1.0 - form.constant, 1.0 - form.constant)
    elif one.has_bool_or():
        _add_if(mip, _sum(one.bool_or.literals), 1.0, given)
    elif one.has_bool_and():
        for literal in one.bool_and.literals:
            _add_if(mip, _sum([literal]), 1.0, given)
    else:
        raise ValueError(f"no row says what this constraint does: {one}")


def _sum(literals: Iterable[int]) -> _Form:
    form = _Form()
    for literal in literals:
        form.add_literal(literal, 1.0)
    return form


def _add_linear(mip: Mip, linear: Any, given: Sequence[int]) -> None:
    """Low <= f <= high, if all given literals hold."""
    form, low, high = _Form(), linear.domain[0], linear.domain[len(linear.domain) - 1]
    for j, a in zip(linear.vars, linear.coeffs, strict=True):
        form.add(j, float(a))
    if not given:
        of_literals = all(mip.integer[j] for j in form.terms)
        unit = max(map(abs, form.terms.values()), default=1.0) if of_literals else 1.0
        mip.row(
            {j: a / unit for j, a in form.terms.items()},
            low / unit if low > -UNLIMITED else -math.inf,
            high / unit if high < UNLIMITED else math.inf,
        )
        return
    if low > -UNLIMITED:
        _add_if(mip, form, float(low), given)
    if high < UNLIMITED:
        _add_if(mip, _Form({j: -a for j, a in form.terms.items()}), float(-high), given)


def _add_if(mip: Mip, form: _Form, least: float, given: Sequence[int]) -> None:
    """(c1)."""
    limits = (a * (mip.low[j] if a > 0 else mip.high[j]) for j, a in form.terms.items())
    short = least - form.constant - sum(limits)
    if short <= 0:
        return
    whole = _Form(dict(form.terms), form.constant + short * len(given))
    for literal in given:
        whole.add_literal(literal, -short)
    mip.row(whole.terms, low=least - whole.constant)


def _add_apart(mip: Mip, a: Any, b: Any, starts: dict[tuple[str, str], int]) -> None:
    """(c3).

    Args:
        a, b: constraints that are intervals of fixed size.
        starts: o by the starts of its intervals.
    """
    given = [*a.enforcement_literal, *b.enforcement_literal]
    first, second = (str(one.interval.start) for one in (a, b))
    if first == second:
        _add_if(mip, _Form(), 1.0, given)
        return
    if (second, first) in starts:
        a, b, first, second = b, a, second, first
    if (first, second) not in starts:
        starts[first, second] = mip.variable(integer=True)
    order = starts[first, second]
    for one, other, literal in ((a, b, order), (b, a, -1 - order)):
        form = _Form()
        for expression, sign in ((other.interval.start, 1.0), (one.interval.start, -1.0)):
            form.constant += sign * expression.offset
            for j, factor in zip(expression.vars, expression.coeffs, strict=True):
                form.add(j, sign * factor)
        _add_if(mip, form, float(one.interval.size.offset), [*given, literal])
