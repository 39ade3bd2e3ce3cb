"""The cost models by which plans are chosen, and who takes which option: a cost model, and a solver
that is asked. Every other option that is given is refused, because it would be ignored.
"""

from collections.abc import Mapping, Sequence

from planner.artefacts.options import Search, Training, WhatIf
from planner.solvers.registry import SOLVERS, with_given
from planner.support.errors import OptionError
from planner.support.options import declared, given, typed_as

PLANNER, PIPEDREAM, DNN_PARTITIONING, PIPER = "planner", "pipedream", "dnn-partitioning", "piper"
IOPDDL = "iopddl"
COST_MODELS = (PLANNER, PIPEDREAM, DNN_PARTITIONING, PIPER, IOPDDL)
_OF_MODELS = COST_MODELS[:-1]
_OWN = (PLANNER, PIPEDREAM)

TAKEN_BY: Mapping[str, tuple[str, ...]] = {
    "solvers": _OWN,
    "model": _OWN,
    "output": _OWN,
    "calibration": _OWN,
    "sensitivity": _OWN,
    "refine": (PLANNER,),
    "bandwidth": (PIPER,),
    "set": _OWN,
    "drop": _OWN,
    "add_host": _OWN,
    "microbatches": (PLANNER, PIPEDREAM, PIPER),
    "microbatch_size": _OWN,
    "schedule": (PLANNER,),
    "--schedule pipedream": _OWN,
    "vertical_sync": _OWN,
    "objective": (PLANNER,),
    "recompute": (PLANNER, PIPEDREAM, PIPER),
    "offload": (PLANNER,),
    "--recompute selective": _OWN,
    "max_downsets": (PLANNER, DNN_PARTITIONING, PIPER),
    "exact": (PLANNER, DNN_PARTITIONING, PIPER),
    "seed": (PLANNER, DNN_PARTITIONING, IOPDDL),
    "profile": COST_MODELS,
    "time_limit_s": COST_MODELS,
    "cost_model": COST_MODELS,
    "pins": (PLANNER,),
    "engine": (PLANNER, DNN_PARTITIONING),
    "contiguous": (PLANNER, DNN_PARTITIONING),
}
"""The cost models that take an option, by its field or as it is typed. Another option of a solver
is for the cost models that ask the solver, and any other option for all that plan for a model.
"""
OF_PLACEMENTS = frozenset({"seed", "engine"})
"""Options that dnn-partitioning's cost model takes with --no-contiguous only."""
OF_PROFILES: Mapping[str, frozenset[str]] = {
    DNN_PARTITIONING: frozenset({"topology", "optimizer", "reserve", "global_batch"}),
    PIPER: frozenset({"topology", "optimizer", "reserve", "microbatches"}),
}
"""Options that a cost model does not take with a file of its own planner."""
ADVICE = {"bandwidth": "; give a --topology instead"}


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
    """Refuses options that a cost model would ignore.

    Args:
        cost_model: one of `COST_MODELS`.
        solvers: keys of `SOLVERS`; pipedream's cost model asks the solver pipedream alone.
        what_if, refine, bandwidth: see `planner.solve` and `planner.solve_under`.
        sensitivity: whether the bottlenecks of the plan are asked for.

    Raises:
        OptionError: if there are any, or the cost model is unknown.
    """
    others = {
        "solvers": bool(solvers),
        "refine": refine,
        "sensitivity": sensitivity,
        "bandwidth": bandwidth is not None,
    }
    flags = {name: f"--{name.removesuffix('s')}" for name, holds in others.items() if holds}
    check_model(cost_model, {**flags, **flags_of(training, search, what_if)})
    if cost_model == PIPEDREAM:
        if {*solvers} - {PIPEDREAM}:
            raise OptionError(
                "--cost-model pipedream asks only the solver pipedream; drop --solver"
            )
        check_solvers((PIPEDREAM,), flags_of(training, search))


def flags_of(training: Training, search: Search, what_if: WhatIf = WhatIf()) -> dict[str, str]:
    """The options that are not as by default, as they are typed, by their fields."""
    return {
        name: typed_as(declared(type(options))[name], value)
        for options in (training, search, what_if, *search.switches)
        for name, value in given(options).items()
        if name != "switches"
    }


def check_model(cost_model: str, flags: Mapping[str, str]) -> None:
    """Refuses options that a cost model does not take.

    Args:
        flags: the options that are given, as they are typed, by their fields.

    Raises:
        OptionError: if there are any, or the cost model is unknown.
    """
    if cost_model not in COST_MODELS:
        raise OptionError(f"unknown cost model {cost_model!r}; known: {', '.join(COST_MODELS)}")
    for name, flag in flags.items():
        models = TAKEN_BY.get(flag) or TAKEN_BY.get(name) or _models_of_own(name)
        if cost_model not in models:
            raise OptionError(
                f"{flag} is for --cost-model {' or '.join(models)}, not for {cost_model}"
                f"{ADVICE.get(name, '')}"
            )
        placed = flags.get("contiguous") == "--no-contiguous"
        if cost_model == DNN_PARTITIONING and name in OF_PLACEMENTS and not placed:
            raise OptionError(
                f"{flag} is for --cost-model planner, or for {cost_model} with --no-contiguous"
            )


def _models_of_own(name: str) -> tuple[str, ...]:
    """The cost models that ask a solver with an option of its own; for other options, all that
    plan for a model.
    """
    solvers = solvers_with(name)
    if not solvers:
        return _OF_MODELS
    return _OWN if PIPEDREAM in solvers else (PLANNER,)


def solvers_with(name: str) -> tuple[str, ...]:
    """The solvers that take an option, where not all do: one of their own, or of `Search`."""
    return tuple(
        solver
        for solver, entry in SOLVERS.items()
        if name in entry.searches or (entry.options is not None and name in declared(entry.options))
    )


def check_solvers(asked: Sequence[str], flags: Mapping[str, str]) -> None:
    """Refuses options of solvers that are not asked.

    Args:
        asked: keys of `SOLVERS`. A solver that is asked only where its own options are given is.
        flags: see `check_model`.

    Raises:
        OptionError: if there are any.
    """
    for name, flag in flags.items():
        solvers = solvers_with(name)
        if not solvers or {*solvers} & {*asked}:
            continue
        which = (
            f"the solver {solvers[0]}, which is not asked"
            if len(solvers) == 1
            else f"the solvers {' and '.join(solvers)}, neither of which is asked"
        )
        raise OptionError(f"{flag} is for {which}; add --solver {solvers[0]}")


def asked_solvers(
    solvers: Sequence[str] | None, usual: Sequence[str], search: Search
) -> tuple[str, ...]:
    """The solvers that are asked: those that are named; else the usual ones, and those that are
    asked because their own options are given.

    Args:
        solvers: keys of `SOLVERS`; None asks the usual ones.

    Raises:
        OptionError: if an option of another solver is given, or the list is empty.
    """
    if solvers is not None and not solvers:
        raise OptionError("solvers: expected at least one name, got none; leave it out to ask all")
    asked = with_given(tuple(usual), search) if solvers is None else tuple(solvers)
    check_solvers(asked, flags_of(Training(), search))
    return asked
