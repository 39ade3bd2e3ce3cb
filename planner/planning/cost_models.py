"""The cost models by which plans are chosen, and the options that each of them has. Options of
other cost models are refused, because the solvers would ignore them.
"""

from collections.abc import Iterator, Mapping, Sequence

from planner.artefacts.options import Search, Training, WhatIf
from planner.solvers.netsplit.options import NetSplit
from planner.solvers.registry import SOLVERS
from planner.support.errors import OptionError
from planner.support.options import given

PLANNER, PIPEDREAM, DNN_PARTITIONING, PIPER = "planner", "pipedream", "dnn-partitioning", "piper"
COST_MODELS = (PLANNER, PIPEDREAM, DNN_PARTITIONING, PIPER)

ONLY_FOR: Mapping[str, tuple[str, ...]] = {
    "solver": (PLANNER, PIPEDREAM),
    "microbatch-size": (PLANNER, PIPEDREAM),
    "set": (PLANNER, PIPEDREAM),
    "drop": (PLANNER, PIPEDREAM),
    "add-host": (PLANNER, PIPEDREAM),
    "sensitivity": (PLANNER, PIPEDREAM),
    "refine": (PLANNER,),
    "pin": (PLANNER,),
    "schedule gpipe": (PLANNER, DNN_PARTITIONING, PIPER),
    "no-contiguous": (PLANNER, PIPEDREAM, DNN_PARTITIONING),
    "bandwidth": (PIPER,),
}
"""The cost models that an option is for; all others are for any of them."""
ADVICE = {"bandwidth": "give a --topology instead"}


def check_cost_model(
    cost_model: str,
    training: Training = Training(),
    search: Search = Search(),
    solvers: Sequence[str] = (),
    *,
    what_if: WhatIf = WhatIf(),
    refine: bool = False,
    sensitivity: bool = False,
    bandwidth: float | str | None = None,
) -> None:
    """Refuses options that the solvers under a cost model would ignore.

    Args:
        cost_model: one of `COST_MODELS`.
        solvers: keys of `SOLVERS`; pipedream's cost model asks the solver pipedream alone.
        what_if, refine, bandwidth: see `planner.solve` and `planner.solve_under`.
        sensitivity: whether the bottlenecks of the plan are asked for.

    Raises:
        OptionError: if there are any, or the cost model is unknown.
    """
    if cost_model not in COST_MODELS:
        raise OptionError(f"unknown cost model {cost_model!r}; known: {', '.join(COST_MODELS)}")
    conditions = {
        "solver": bool(solvers),
        "microbatch-size": training.microbatch_size is not None,
        "set": bool(what_if.set),
        "drop": bool(what_if.drop),
        "add-host": bool(what_if.add_host),
        "sensitivity": sensitivity,
        "refine": refine,
        "pin": bool(search.pins),
        "schedule gpipe": training.schedule == "gpipe",
        "no-contiguous": any(isinstance(o, NetSplit) and not o.contiguous for o in search.switches),
        "bandwidth": bandwidth is not None,
    }
    only_for = {name: ONLY_FOR[name] for name, holds in conditions.items() if holds}
    only_for |= dict.fromkeys(_options_of_optional_solvers(search), (PLANNER,))
    for name, models in only_for.items():
        if cost_model not in models:
            advice = f"; {ADVICE[name]}" if name in ADVICE else ""
            raise OptionError(
                f"--{name} is for --cost-model {' or '.join(models)}, not for {cost_model}{advice}"
            )
    if cost_model == PIPEDREAM and set(solvers) - {PIPEDREAM}:
        raise OptionError("--cost-model pipedream asks only the solver pipedream; drop --solver")


def _options_of_optional_solvers(search: Search) -> Iterator[str]:
    """The options given of solvers that are asked only where an option of theirs is given."""
    optional = {solver.options for solver in SOLVERS.values() if solver.needs_options}
    for options in search.switches:
        if type(options) in optional:
            yield from (name.replace("_", "-") for name in given(options))
