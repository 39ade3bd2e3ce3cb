"""The solvers: `Problem`, limit of work in s -> `Result`; a search may start from known strategies
too. All strategies are priced by the judge. A limit is in seconds of an ordinary core, which a
search converts into what it counts, so that its answer does not depend on how busy the machine is.

A new solver is a file with a function and an entry here, which says when it is asked and which
options of its own it has. The command line makes its options and help texts from the entries.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

from planner.solvers.manual import Manual
from planner.solvers.netsplit.options import NetSplit, Pesto
from planner.solvers.pipedream.options import PipeDream
from planner.solvers.sharded.options import Megatron, Zero
from planner.support.errors import OptionError
from planner.support.options import Options, declared

if TYPE_CHECKING:
    from planner.artefacts.options import Search
    from planner.artefacts.problem import Problem, Result
    from planner.artefacts.strategy import Strategy


MAX_PLACED_DEVICES = 128
"""Devices that single operators are placed on: with 1,000 operators the time limit is kept, and
tables of all pairs of devices for every tensor take 0.1 GB. Twice as many take four times as much.
"""


SHARES_DEVICES = "its devices run several stages"
SPLITS_OPERATORS = "it splits operators"

LONGEST_S = 1e7
"""The longest time limit, some months: searches convert it into numbers of moves."""


@dataclass(frozen=True, slots=True)
class Solver:
    """A solver, and when it is asked. Calling it solves a problem.

    Attributes:
        path: module and function. The module is imported at the first call, because engines and
            compilers take long to load.
        summary: one line for the user.
        options: the type of its own options (see `planner.support.options`), None if it has none.
            All fields have defaults. The command line has them all.
        searches: the fields of `Search` that it reads and others do not.
        in_portfolio: whether it is asked where no solver is named.
        always_asked: whether it is asked even if no work is left, because it takes next to none.
        improves: whether it has a first answer without work (a limit of 0), and a better one with
            more. Others are asked once.
        waits: whether it has no first answer, and is asked after others, which may have plans to
            beat; at once where all that are asked would wait.
        expected: the time of the plan that it may find, over that of the best plan so far.
        promise: module and function that tell instead the time of an iteration, in s, of a problem;
            "" for none.
        time_share: part of the time limit that it gets at most: below 1 for a search that uses all
            the time it is given.
        unreplicated: whether it searches long among strategies without replicas, and is asked only
            where one of these may be the best.
        has_threads: whether its engines keep threads, so that it runs in the first process only.
        needs_options: whether it is asked only where its own options are given, and then always.
        starts_from: the solvers whose strategies it starts from, besides those that are known;
            they are asked before it. None if its function takes no strategies to start from.
        max_devices: on more devices it has no answer.
        without_memory: the one of its own options under which it counts no memory; None if it
            always does.
        needs_rules: whether all that it has splits operators, so that it is asked only where the
            profile has rules for that, unless it is named.
        splits_samples: whether it splits the samples of a microbatch over devices, and is asked for
            microbatches with samples for all of them, too.
        wide: whether replicas with smaller microbatches are plans of its own, too, as meshes that
            split samples: it is asked first with a sample for each device of a host.
        is_scout: whether it is asked first at sizes of the microbatch that were not profiled: its
            answer takes little, and shows whether others are worth asking.
        synchronous: why it has no answer under an asynchronous schedule; "" if it may have one.
    """

    path: str
    summary: str
    options: type[Options] | None = None
    searches: tuple[str, ...] = ()
    in_portfolio: bool = False
    always_asked: bool = False
    improves: bool = False
    waits: bool = False
    expected: float = 1.1
    promise: str = ""
    time_share: float = 1.0
    unreplicated: bool = False
    has_threads: bool = False
    needs_options: bool = False
    starts_from: tuple[str, ...] | None = None
    max_devices: float = math.inf
    without_memory: str | None = None
    needs_rules: bool = False
    splits_samples: bool = False
    wide: bool = False
    is_scout: bool = False
    synchronous: str = ""

    def counts_memory(self, search: "Search") -> bool:
        """Whether a model that no devices can hold has no plan of this solver."""
        if self.without_memory is None:
            return True
        given = (own for own in search.switches if type(own) is self.options)
        return not any(getattr(own, self.without_memory) for own in given)

    def may_find_s(self, problem: "Problem", best_s: float) -> float:
        """About the time of an iteration of the plan that it may find, in s.

        Args:
            best_s: of the best plan so far.
        """
        if not self.promise:
            return self.expected * best_s
        promised: float = _named(self.promise)(problem)
        return promised

    def __call__(
        self,
        problem: "Problem",
        time_limit_s: float,
        known: "tuple[Strategy, ...]" = (),
        answers: "dict[str, Result] | None" = None,
    ) -> "Result":
        """The solver's answer.

        Args:
            time_limit_s: limit of work, for a search that would take more; at most `LONGEST_S`.
            known: strategies that fit, for a search to start from and to beat.
            answers: of other solvers to the same problem, by name. Those that this one starts from
                are asked where they are missing, and added.
        """
        num_devices = len(problem.topology.devices)
        if num_devices > self.max_devices:
            from planner.artefacts.problem import Result, Status

            reason = f"for at most {self.max_devices:,} devices, and there are {num_devices:,}"
            return Result(Status.UNKNOWN, None, reason=reason)
        schedule = problem.training.schedule
        if self.synchronous and schedule.is_asynchronous:
            from planner.artefacts.problem import Result, Status

            reason = f"{self.synchronous}, which --schedule {schedule.value} cannot do"
            return Result(Status.UNKNOWN, None, reason=reason)
        solve: Callable[..., Result] = _named(self.path)
        time_limit_s = min(time_limit_s, LONGEST_S)
        if self.starts_from is None:
            return solve(problem, time_limit_s)
        answers = {} if answers is None else answers
        for name in self.starts_from:
            if name not in answers:
                answers[name] = SOLVERS[name](problem, LONGEST_S, (), answers)
        strategies = (answers[name].strategy for name in self.starts_from)
        start = (*known, *(one for one in strategies if one is not None))
        return solve(problem, time_limit_s, start)


def _named(path: str) -> Any:
    """A function by its module and name. The module is imported at the first call."""
    module, _, function = path.partition(":")
    return getattr(import_module(module), function)


SOLVERS: Mapping[str, Solver] = {
    "single": Solver(
        "planner.solvers.baselines:single",
        "the whole model on one device",
        in_portfolio=True,
        always_asked=True,
    ),
    "data-parallel": Solver(
        "planner.solvers.baselines:data_parallel",
        "the whole model on every device",
        in_portfolio=True,
        always_asked=True,
        is_scout=True,
    ),
    "antichain": Solver(
        "planner.solvers.antichain.solve:solve",
        "the best pipeline with replicated stages, by dynamic programming over downsets",
        searches=("max_downsets", "exact"),
        in_portfolio=True,
        improves=True,
        starts_from=("single", "data-parallel", "even", "pipedream"),
    ),
    "even": Solver(
        "planner.solvers.baselines:even",
        "a pipeline whose stages have equally many layers",
        in_portfolio=True,
    ),
    "pipedream": Solver(
        "planner.solvers.pipedream.solve:solve",
        "PipeDream's optimizer, by its own cost model",
        PipeDream,
        in_portfolio=True,
    ),
    "zero": Solver(
        "planner.solvers.sharded.zero:solve",
        "ZeRO, data parallelism that keeps parts of the model",
        Zero,
        in_portfolio=True,
        splits_samples=True,
        is_scout=True,
    ),
    "megatron": Solver(
        "planner.solvers.sharded.megatron:solve",
        "Megatron-LM's grid of tensor, data and pipeline parallelism",
        Megatron,
        in_portfolio=True,
        improves=True,
        needs_rules=True,
        splits_samples=True,
    ),
    "intra-op": Solver(
        "planner.solvers.intra.solve:solve",
        "the best split of every operator on all devices, by a choice program",
        in_portfolio=True,
        waits=True,
        expected=1.0,
        time_share=0.4,
        starts_from=(),
        needs_rules=True,
        splits_samples=True,
        wide=True,
        synchronous=SPLITS_OPERATORS,
    ),
    "inter-op": Solver(
        "planner.solvers.intra.pipelines:solve",
        "pipelines whose stages are split as by intra-op",
        in_portfolio=True,
        waits=True,
        promise="planner.solvers.intra.pipelines:promised_s",
        time_share=0.4,
        starts_from=(),
        needs_rules=True,
        splits_samples=True,
        synchronous=SPLITS_OPERATORS,
    ),
    "heft": Solver(
        "planner.solvers.placement.heft:solve",
        "HEFT, a list schedule",
        max_devices=MAX_PLACED_DEVICES,
        synchronous=SHARES_DEVICES,
    ),
    "m-topo": Solver(
        "planner.solvers.placement.baechi:solve_m_topo",
        "Baechi's m-TOPO",
        max_devices=MAX_PLACED_DEVICES,
        synchronous=SHARES_DEVICES,
    ),
    "m-etf": Solver(
        "planner.solvers.placement.baechi:solve_m_etf",
        "Baechi's m-ETF",
        max_devices=MAX_PLACED_DEVICES,
        synchronous=SHARES_DEVICES,
    ),
    "m-sct": Solver(
        "planner.solvers.placement.baechi:solve_m_sct",
        "Baechi's m-SCT",
        max_devices=MAX_PLACED_DEVICES,
        synchronous=SHARES_DEVICES,
    ),
    "pesto": Solver(
        "planner.solvers.netsplit.pesto:solve",
        "Pesto's integer program, solved by constraints",
        Pesto,
        searches=("seed",),
        max_devices=MAX_PLACED_DEVICES,
        without_memory="pesto_printed",
        synchronous=SHARES_DEVICES,
    ),
    "netsplit": Solver(
        "planner.solvers.netsplit.solve:solve",
        "a device for every operator, by constraint programming",
        NetSplit,
        searches=("seed",),
        in_portfolio=True,
        improves=True,
        time_share=0.3,
        unreplicated=True,
        has_threads=True,
        starts_from=(),
        max_devices=MAX_PLACED_DEVICES,
        synchronous=SHARES_DEVICES,
    ),
    "expert": Solver(
        "planner.solvers.sharded.experts:expert",
        "Krizhevsky's rules for convolutions and products, Wu's for recurrent models",
        needs_rules=True,
    ),
    "heuristic": Solver(
        "planner.solvers.sharded.experts:heuristic",
        "every input and parameter cut along its longest dimension",
        needs_rules=True,
    ),
    "manual": Solver(
        "planner.solvers.manual:solve",
        "your own stages, from --cuts and --replicas",
        Manual,
        needs_options=True,
    ),
}


def portfolio(*, rules: bool = True) -> tuple[str, ...]:
    """The solvers that are asked where none is named; the others are there to compare with.

    Args:
        rules: with those that need rules by which operators are split.
    """
    return tuple(
        name for name, one in SOLVERS.items() if one.in_portfolio and (rules or not one.needs_rules)
    )


def automatic(*, rules: bool = True) -> tuple[str, ...]:
    """The solvers that need nothing from the user.

    Args:
        rules: with those that need rules by which operators are split.
    """
    return tuple(
        name
        for name, one in SOLVERS.items()
        if not one.needs_options and (rules or not one.needs_rules)
    )


def with_given(names: tuple[str, ...], search: "Search") -> tuple[str, ...]:
    """The names, and the solvers that are asked because their own options are given."""
    given = {type(own) for own in search.switches}
    return names + tuple(
        name
        for name, solver in SOLVERS.items()
        if solver.needs_options and solver.options in given and name not in names
    )


def own_options(values: Mapping[str, Any]) -> tuple[Options, ...]:
    """The solvers' own options, for `Search.switches`, without those that are as by default.

    Args:
        values: by the names of the fields; what is missing is as by default.

    Raises:
        OptionError: if a value is wrong, or no solver has an option of that name.
    """
    kinds = dict.fromkeys(one.options for one in SOLVERS.values() if one.options is not None)
    known = {name for kind in kinds for name in declared(kind)}
    for name in values:
        if name not in known:
            near = get_close_matches(name, known, n=1) if isinstance(name, str) else ()
            advice = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"
            raise OptionError(f"no solver has an option {name!r}; {advice}")
    made = (
        kind(**{name: values[name] for name in declared(kind) if name in values}) for kind in kinds
    )
    return tuple(own for own in made if own != type(own)())
