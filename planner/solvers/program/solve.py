"""Choice programs: one strategy per node, at the least cost within memory, with a bound.

**The program.** x_i is the strategy of node i, c_i its costs, M_uv those of an edge, u_i,p(x_i) the
bytes that it holds in its interval p:

    minimise    C(x) = sum_i c_i(x_i) + sum_(u,v) M_uv(x_u, x_v)
    subject to  U_t(x) = sum_i sum_(p: t in p) u_i,p(x_i) <= B        at every moment t

1.  *Whole numbers* (`core.py`). Costs are multiplied by 2^q and rounded down, with q such that the
    largest costs of all rows sum to less than 2^56. So all sums are exact in 64 bits, each is at
    most 2^q times what it stands for, and a bound of the core over 2^q is one of the program.
2.  *Moments* (`core.py`). If all that is held at t is held at t', U_t(x) <= U_t'(x) for all x:
    only the moments with maximal sets stay.
3.  *Reductions* (`reduce.py`, (r1) to (r5)), to a fixpoint. A strategy without an allowed partner
    is in no allowed assignment. If each strategy of v leaves u one strategy, every allowed x has
    x_u = f(x_v), so u can be written as part of v. In both cases all allowed assignments stay, with
    their costs and bytes. A dominated strategy can be exchanged for the one that dominates it in
    any assignment, at no more cost and bytes, so an optimum stays.
4.  *Bound* (`prices.py`, `kernels.py`). For prices lambda_t >= 0, L(lambda) = min_x C(x) +
    sum_t lambda_t (U_t(x) - B) <= C(x) for each x that fits. The minimum is bounded by any
    reparametrisation: terms a_uv(x_u), b_uv(x_v) are moved from edges to nodes, C stays as it is,
    and the sum of all rows' minima is a bound. TRW-S raises it. All of it is whole, and rounded
    against us, so the bound holds without any tolerance.
5.  *Prices* (`dual.py`). L is concave; each assignment x gives L(lambda) <= C(x) + sum_t lambda_t
    (U_t(x) - B). A cutting plane in a box takes the next prices. Only the highest peaks of these
    assignments have prices at all.
6.  *Fixing* (`fixing.py`). If the bound with x_i = s is above a known cost, s goes; what cheaper
    assignments there are, and the known one, stay. Reductions follow, without dominance.
7.  *Proof* (`proof.py`). What is small then goes to HiGHS, with the memory rows of the active
    moments; an optimum that does not fit adds rows. Its bound is in floating point, rounded down.
8.  *Elimination* (`elimination_kernels.py`). Without limit of memory, and where all tables are
    small, the elimination of all nodes is an optimum, and nothing else is done.
9.  *Search* (`search.py`). Conditioned elimination: some nodes keep their strategies, so that
    elimination of all others has small tables, which gives the best assignment beside these nodes.
    A new start takes prices around the best ones, and raises them where an assignment does not fit,
    until one does. Then blocks are improved; of what changes, each connected component is taken
    alone if not all of it fits.

Two processes work: one searches, the other one bounds, fixes, proves, and searches with other draws
where a proof is out of reach. They exchange bound and assignment after equal counts of work, so the
answer is the same on a busy machine; a limit of time ends both, and then it need not be.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from planner.artefacts.problem import Status
from planner.solvers.engines.watch import SearchWatch, interruptible
from planner.solvers.program.core import Core, Scale, core_of
from planner.solvers.program.dual import Climb
from planner.solvers.program.elimination_kernels import eliminated, entries_of, ordered
from planner.solvers.program.fixing import fixed
from planner.solvers.program.prices import Prices, true_cost
from planner.solvers.program.problem import Choice, ChoiceProgram, cost_of, peak_bytes
from planner.solvers.program.proof import Limits, nodes_within, proved
from planner.solvers.program.reduce import Reduced, reduced
from planner.solvers.program.search import ENTRIES, Searcher
from planner.support.arrays import Ints
from planner.support.forked import EndedError, Forked

LOGGER = logging.getLogger(__name__)

FIRST_WORK, ROUND_WORK = 10**8, 10**9
"""Entries that a process looks at until the first exchange, which double from one to the next, and
at most: 2 to 4 s of an ordinary core."""
FIX_WORK = ROUND_WORK // 2
"""For better prices after strategies were fixed."""
TINY = 3_000
"""Entries of a core that is proved at once, in less time than another process starts."""
WORK_PER_S = 2 * 10**8
"""Entries per second of the limit of work, half of what an ordinary core does: beside as many busy
programs, the work still ends before the time does."""
SHRUNK = 0.95
"""Fixing goes on as long as at most this share of strategies is left."""
MOST_COST = 2**58
"""In the core; no assignment costs as much."""
MOST_STEPS = 200
WHOLE_NODES, WHOLE_ENTRIES = 4_000, 1e6
"""Of a core whose nodes are all eliminated, and of its largest table, at most: an order of n nodes
takes n^2 bytes."""
REDUCE_WORK = 50
"""Entries that count for each one of the program, which is scaled and reduced first."""
MOST_WORK = 12
"""Of the limit, where first assignments, or a first bound, take more than their share."""
TABLE_SHARE, LEAST_ENTRIES = 1 / 8_000, 5e4
"""Of the work, for the largest table of an elimination: there are thousands of them in a step."""
CLIMB_SHARE = 0.2
"""Share of the work after which the prices are good enough for the search to begin."""
WORTH = 0.1
"""Strategies are fixed anew if the best cost has fallen by this share of its distance from the
bound since."""


class News(NamedTuple):
    """What one process tells the other one.

    Attributes:
        cost: of the best assignment, in the first core; MOST_COST without one.
        picks: of it; None without one.
        bound: in the first core.
        done: whether nothing is better than the best of both.
    """

    cost: int = MOST_COST
    picks: Ints | None = None
    bound: int = -(2**62)
    done: bool = False


class Enough(NamedTuple):
    """How near to its bound an assignment has to be.

    Attributes:
        gap: (cost - bound) / bound.
        offset: of costs in the first core.
    """

    gap: float = 0.0
    offset: int = 0

    def apart(self, bound: int) -> float:
        """By how much the cost may be above a bound, in the first core."""
        return max(0.0, self.gap * (bound + self.offset))

    def met(self, news: News) -> bool:
        """Whether it is as near."""
        known = news.picks is not None
        return known and news.cost - news.bound <= self.apart(news.bound)


class Half:
    """One process's part: a core that becomes smaller, its prices, and a search.

    Args:
        core: the first one.
        over: says whether to end.
        enough: its cost from which on no assignment is asked for.
        most: entries that are looked at at most, but for those of a step that has begun.

    Attributes:
        news: the best that is known, in the first core.
        needed: how near to the bound an assignment has to be.
    """

    def __init__(
        self, core: Core, seed: int, over: Callable[[], bool], enough: int, most: float
    ) -> None:
        self.news, self._seed = News(enough), seed
        self._before = 0  # work on larger cores, and of proofs
        self._entries = max(LEAST_ENTRIES, min(ENTRIES, TABLE_SHARE * most))
        self._over: Callable[[], bool] = lambda: over() or self.spent >= most
        self.core, self.needed = core, Enough()
        self._reduced = Reduced(core, 0, ())
        self._fixed_at = MOST_COST + 1
        self._tried = self._climbs = self._again = False
        self._search = Searcher(Prices(core), seed, self._over, self._entries)
        self._climb = Climb(self._search)

    def begin(self, work: int) -> None:
        """First prices, first assignments, and better prices, for some work."""
        self._climb.begin()
        self._settle(work)

    @property
    def enough(self) -> bool:
        """Whether what is known is good enough."""
        return self.news.done or self.needed.met(self.news)

    @property
    def spent(self) -> int:
        """Entries that were looked at so far."""
        return self._before + self._search.all_work

    def other(self, seed: int) -> None:
        """Goes on with other draws, and with better prices whenever there may be some."""
        self._seed, self._climbs = seed, True
        self._search = Searcher(self._search.prices, seed, self._over, self._entries)
        self._climb.search = self._search

    def hear(self, news: News) -> None:
        """Takes over what is better."""
        self.news = News(
            *(min((self.news[:2], news[:2]), key=lambda one: one[0])),
            max(self.news.bound, news.bound), self.news.done or news.done,
        )  # fmt: skip

    def work(self, work: int) -> None:
        """Better prices, if it climbs, and new starts, for some work."""
        self._tighten()
        spent = self._settle(work) if self._climbs and not self.news.done else 0
        begin = self._search.all_work - spent
        while self._search.all_work - begin < work and not self._over() and not self.enough:
            self._search.restart()
            self._settle_picks()

    def prove(self, left_s: Callable[[], float], work: int) -> None:
        """The proof by HiGHS, once, if the core is small enough for some work now."""
        self._tighten()
        nodes = nodes_within(self._search.core, work)
        if self.enough or self._tried or self.news.done or not nodes:
            return
        self._tried = True
        self._before += work  # at most
        most = self.news.cost - self._reduced.constant
        apart = self.needed.apart(self.news.bound)
        answer = proved(self._search.prices, most, left_s, Limits(nodes, apart))
        if answer.picks is not None:
            self._search.see(answer.picks)
            self._settle_picks()
        elif answer.done and self.news.picks is not None:
            return  # the best assignment is in the core: HiGHS is wrong
        bound = min(answer.bound + self._reduced.constant, self._fixed_at)
        self.hear(News(bound=bound, done=answer.done))

    def _settle(self, work: int) -> int:
        """Climbs to better prices for some work, and takes over what that brings; the work."""
        steps, begin = 0, self._search.all_work
        self._settle_climb()
        while not self._climb.done and steps < MOST_STEPS and not self._over():
            if self._search.all_work - begin > work or self.needed.met(self.news):
                break
            self._climb.step()
            self._settle_climb()
            steps += 1
        if self.news.bound >= self.news.cost:
            self.hear(News(done=True))
        return self._search.all_work - begin

    def _settle_climb(self) -> None:
        """Takes over what the climb has found."""
        self._settle_picks()
        bound = min(self._climb.bound + self._reduced.constant, self._fixed_at)
        self.hear(News(bound=bound))

    def _settle_picks(self) -> None:
        """Takes the search's best assignment over, if it is better."""
        search = self._search
        cost = search.cost + self._reduced.constant
        if search.picks is not None and cost < self.news.cost:
            self.hear(News(cost, self._reduced.expanded(search.picks)))

    def _tighten(self) -> None:
        """Fixes strategies as long as that brings much, if the best assignment is much better."""
        while self._worth_fixing() and not self.news.done and not self._over():
            before, self._again = len(self._search.core.cost), False
            self._fixed_at = self.news.cost
            smaller = fixed(self._search.prices, self.news.cost - self._reduced.constant)
            if smaller is None:
                self.hear(News(bound=self.news.cost, done=True))
                return
            prices = self._search.prices
            self._before += self._search.all_work
            self._reduced = self._reduced.then(smaller)
            if not smaller.core.num_nodes:
                self._before -= self._search.all_work
                self._last()
                return
            self._search = Searcher(Prices(smaller.core), self._seed, self._over, self._entries)
            self._search.prices.activate(prices.moments)
            self._search.prices.price = prices.price
            known = self._reduced.shrunk(self.news.picks) if self.news.picks is not None else None
            if known is not None:
                self._search.see(known)
            self._climb = Climb(self._search)
            self._climb.begin()
            self._settle(FIX_WORK if self._climbs else 0)
            if len(smaller.core.cost) < SHRUNK * before:
                self._again = True  # the same assignment may fix more

    def _worth_fixing(self) -> bool:
        """Whether the best cost is enough below the one at which strategies were fixed."""
        gained = self._fixed_at - self.news.cost
        return self._again or (gained > 0 and gained > WORTH * (self.news.cost - self.news.bound))

    def _last(self) -> None:
        """One assignment is left, and it fits."""
        picks = self._reduced.expanded(np.empty(0, np.int64))
        self.hear(News(self._reduced.constant, picks, self._reduced.constant, True))


def solve(
    program: ChoiceProgram,
    limit_s: float,
    left_s: Callable[[], float],
    seed: int = 0,
    most: float = math.inf,
    gap: float = 0.0,
) -> Choice:
    """The best assignment that is found, and a bound.

    Args:
        most: assignments that cost as much are not asked for. Where there are no others, that is
            the bound, and the status UNKNOWN.
        gap: (cost - bound) / bound that is good enough.
        limit_s: limit of work of each of two processes, in seconds of an ordinary core; of one, if
            that is less than both would share out first.
        left_s: tells the time that is left; what is known then is the answer.
        seed: of all draws.
    """
    watch = SearchWatch(LOGGER, 1.0)
    with interruptible(watch):

        def over() -> bool:
            return watch.interrupted or left_s() <= 0

        core, scale = core_of(program)
        first = reduced(core)
        work = REDUCE_WORK * len(core.matrix)
        if first is None:
            return Choice(Status.INFEASIBLE, None, math.inf, math.inf, work=work)
        if not first.core.num_nodes:
            news = News(0, np.empty(0, np.int64), 0, True)
        elif (known := _eliminated(first.core, limit_s if gap else math.inf)) is not None:
            news, more = known
            work += more
        else:
            enough = min(scale.core_cost(most) - first.constant, MOST_COST)
            half = Half(first.core, seed, over, enough, MOST_WORK * limit_s * WORK_PER_S)
            half.needed = Enough(gap, scale.constant + first.constant)
            news = _searched(half, limit_s, left_s, seed, over, _teller(scale, first))
            work += half.spent
        picks = None if news.picks is None else first.expanded(news.picks).tolist()
        if picks is None and news.done and most < math.inf:
            return Choice(Status.UNKNOWN, None, math.inf, most, not over(), work)
        found = choice_of(program, news, picks, scale, first.constant, not over())
        return replace(found, work=work)


def _eliminated(core: Core, most_s: float) -> tuple[News, int] | None:
    """The best assignment, by the elimination of all nodes, and the entries that were looked at;
    None where memory is limited, or tables would be large.

    Args:
        most_s: the most work, in seconds of an ordinary core.
    """
    count = core.num_nodes
    if len(core.free) or count > WHOLE_NODES:
        return None
    order = ordered(core, np.arange(count), math.log(WHOLE_ENTRIES))
    if len(order.node) < count or entries_of(core, order) > most_s * WORK_PER_S:
        return None
    picks = np.zeros(count, np.int64)
    work = eliminated(core, core.cost, order, picks)
    cost = true_cost(core, picks)
    return News(cost, picks, cost, True) if cost < MOST_COST else News(done=True), work


def _teller(scale: Scale, first: Reduced) -> Callable[[News], None]:
    """Logs what is known, whenever it is better."""
    last = [News()]

    def tell(news: News) -> None:
        if (news.cost, -news.bound) < (last[0].cost, -last[0].bound):
            last[0] = news
            bound = float(scale.cost(news.bound + first.constant))
            if news.picks is None:
                LOGGER.info("no assignment yet, bound %.6g", bound)
                return
            cost = float(scale.cost(news.cost + first.constant))
            gap = f"{100 * (cost - bound) / bound:.3f} %" if bound > 0 else "unknown"
            LOGGER.info("cost %.9g, bound %.9g, gap %s", cost, bound, gap)

    return tell


def _searched(
    half: Half,
    limit_s: float,
    left_s: Callable[[], float],
    seed: int,
    over: Callable[[], bool],
    tell: Callable[[News], None],
) -> News:
    """What two processes find out about a core, each with a half of its own."""
    half.begin(int(CLIMB_SHARE * limit_s * WORK_PER_S))
    tell(half.news)
    left, work = int(limit_s * WORK_PER_S), FIRST_WORK
    if len(half.core.matrix) <= TINY and not half.enough:
        half.prove(left_s, left)
    if left < work and not half.enough:  # another process would take longer to start
        half.work(left)
        half.prove(left_s, left)
    if half.enough or left < work:
        return half.news
    asked: list[int] = []

    def beside(question: tuple[News, int, int]) -> News:
        """A round of the other process, which has its own copy of the half."""
        news, work, left = question
        if not asked:
            half.other(seed + 1)
        asked.append(work)
        half.hear(news)
        half.prove(left_s, left)
        half.work(work)
        return half.news

    with Forked(beside, cpu_limit_s=max(0, math.ceil(left_s())) + 60) as process:
        while left > 0 and not half.enough and not over():
            try:
                process.ask((half.news, work, left))
                half.work(work)
                tell(half.news)
                half.hear(process.answer(over))
            except EndedError:
                break
            tell(half.news)
            left, work = left - work, min(2 * work, ROUND_WORK)
    return half.news


def choice_of(
    program: ChoiceProgram,
    news: News,
    picks: Sequence[int] | None,
    scale: Scale,
    constant: int,
    in_time: bool,
) -> Choice:
    """The answer in the program's own costs, which the picks are priced with once more."""
    exact = scale.cost(news.bound + constant)
    bound: int | float = math.ceil(exact) if program.is_integer else float(exact)
    if news.bound <= -(2**61):
        bound = -math.inf
    if picks is None:
        status = Status.INFEASIBLE if news.done else Status.UNKNOWN
        bound = math.inf if news.done else bound
        return Choice(status, None, math.inf, bound, in_time or news.done)
    cost = cost_of(program, picks)
    assert program.limit_bytes is None or peak_bytes(program, picks) <= program.limit_bytes
    status = Status.OPTIMAL if news.done or cost <= bound else Status.FEASIBLE
    return Choice(status, tuple(picks), cost, min(bound, cost), in_time or news.done)
