"""A plan, its bottlenecks, and one iteration of it."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.api.files import (
    LOCAL,
    Inputs,
    find_profile,
    rate_of,
    read_inputs,
    read_plan_inputs,
)
from planner.api.models import check_model, read_model
from planner.api.topologies import changed_cluster, type_of
from planner.artefacts.options import Search, Training, WhatIf
from planner.planning.cost_models import (
    OF_PROFILES,
    PIPEDREAM,
    PLANNER,
    asked_solvers,
    check_cost_model,
    flags_of,
)
from planner.planning.plans import Plans, Simulation, simulated
from planner.solvers.registry import automatic, portfolio
from planner.support.age import countdown
from planner.support.errors import FileError, OptionError
from planner.support.reading import File, relative

if TYPE_CHECKING:
    from planner.artefacts.calibration import Calibration
    from planner.artefacts.plan import Plan
    from planner.artefacts.problem import Problem
    from planner.artefacts.profile import Profile
    from planner.artefacts.topology import Topology
    from planner.model.load import Model
    from planner.planning.choices import ContestAnswer
    from planner.planning.other_cost_models import ForeignComparison
    from planner.planning.refine import Measure, Wanted
    from planner.planning.sensitivity import Gain
    from planner.profilers.parts import MeasuredParts
    from planner.solvers.pipedream.costs import PipeDreamReport


def write_strategy(
    plan: "Plan",
    path: File,
    model: "File | Model | None" = None,
    *,
    profile: File | None = None,
) -> tuple[Path, ...]:
    """Writes a plan as strategy JSON, and beside it the model with the stage of every operator.

    Args:
        path: ends in .json; the annotated model has the same name and ends in .onnx.
        model: the plan's, read or not; None writes the strategy alone.
        profile: the file of the plan's profile, which the strategy then names for `simulate`.

    Returns:
        The files written, the strategy first.

    Raises:
        FileError: if a file cannot be written, or the model is not the plan's.
        OptionError: if the annotated model would replace a file that is none.
    """
    from planner.artefacts.files import plan_bytes, write_plan

    target = Path(path)
    # Paths become relative to the strategy here, and only here.
    if profile is not None:
        plan = replace(plan, profile_path=relative(Path(profile), target.parent))
    if model is None:
        write_plan(plan, target)
        return (target,)
    from planner.model.annotated import write_partition
    from planner.model.record import ANNOTATED_FILE
    from planner.support.outputs import check_outputs

    if isinstance(model, str | os.PathLike):
        model = read_model(model, dims=plan.dimensions)
    elif model.dimensions != plan.dimensions:
        model = read_model(model.path, dims=plan.dimensions)
    check_model(model, plan.model_hash, str(target))
    plan = replace(plan, model_path=relative(model.path, target.parent))
    partition = target.with_suffix(".onnx")
    # Its name is not the caller's, so it may be that of another file.
    check_outputs([(partition, ANNOTATED_FILE)], {"model": model.path})
    write_partition(model, plan, partition, {target: plan_bytes(plan)})
    return target, partition


def solve(
    profile: "File | Profile | Sequence[Profile] | Inputs",
    *,
    topology: "File | Topology" = "local.yaml",
    gpus: int | None = None,
    training: Training = Training(),
    search: Search = Search(),
    solvers: Sequence[str] | None = None,
    cost_model: str = "planner",
    what_if: WhatIf = WhatIf(),
    calibration: "bool | Calibration" = True,
    time_limit_s: float = 7.0,
    refine: bool = False,
    model: File | None = None,
    progress: Callable[[str], None] = lambda solver: None,
) -> Plans:
    """Strategies for a profiled model on some devices, and how good the best one is at least.

    Args:
        profile: of several sizes of the microbatch of one model, or those of a file, the best is
            chosen. `read_inputs` gives the profiles with the topology and the calibration.
        topology, gpus: see `read_topology`.
        training: how the model is trained.
        search: how strategies are searched for.
        solvers: keys of `SOLVERS`; None asks `portfolio()`.
        cost_model: "planner", or "pipedream", whose optimizer alone is asked then; its plan has
            the schedule pipedream.
        what_if: changes of the topology; the present one is planned for too.
        calibration: see `simulate`.
        time_limit_s: limit of work for all solvers together, in seconds of an ordinary core, so
            plans do not depend on how busy this machine is. The present and the changed topology
            get half each.
        refine: whether split operators of the best plan are measured at their local shapes, until
            no plan is better by these times. `Plans.refinement.into` gives the profiles with them.
        model: the ONNX file that is measured then, if it is not where the profile says.
        progress: called with the name of each solver before it starts.

    Raises:
        FileError: if a file is missing or malformed.
        OptionError: if options contradict each other, the profile or the topology.
        TopologyError: if the topology has fewer devices.
    """
    from planner.artefacts.profile import has_rules
    from planner.planning.portfolio import solve_by_pipedream_costs
    from planner.planning.problems import sized
    from planner.planning.refine import nothing
    from planner.planning.sizes import best_over_sizes

    if cost_model not in (PLANNER, PIPEDREAM):
        raise OptionError(f"unknown cost model {cost_model!r}; known: {PLANNER}, {PIPEDREAM}")
    check_cost_model(cost_model, training, search, solvers or (), refine=refine)
    if refine and what_if != WhatIf():
        raise OptionError(
            "--refine is for the topology as it is; drop --set, --drop and --add-host"
        )
    inputs = read_inputs(profile, topology=topology, gpus=gpus, calibration=calibration)
    obstacle, measure = None, None
    if refine:
        from planner.profilers.parts import obstacle as obstacle_of  # loads onnx

        obstacle = next(filter(None, map(obstacle_of, inputs.profiles)), None)
        if obstacle is None:
            measure = _measuring(inputs.profiles[-1], model, progress)
    profiles = sized(inputs.profiles, training)
    usual = portfolio(rules=has_rules(profiles[-1]))
    names = (PIPEDREAM,) if cost_model == PIPEDREAM else asked_solvers(solvers, usual, search)
    limit_s = time_limit_s if what_if == WhatIf() else time_limit_s / 2

    def planned(problems: "tuple[Problem, ...]") -> Plans:
        if cost_model == PIPEDREAM:
            progress(cost_model)
            return Plans(solve_by_pipedream_costs(problems[-1]), problems, cost_model)
        plans = best_over_sizes(problems, profiles, names, limit_s, progress, measure)
        return plans if obstacle is None else replace(plans, refinement=nothing(obstacle))

    present = _problems(inputs, profiles, training, search)
    if what_if == WhatIf():
        return planned(present)
    changed = changed_cluster(present[-1].topology, what_if)
    before = planned(present)
    after = planned(tuple(replace(one, topology=changed.topology) for one in present))
    rows = tuple(
        row if row.plan is None else replace(row, plan=replace(row.plan, what_if=what_if.words))
        for row in after.comparison.rows
    )
    comparison = replace(after.comparison, rows=rows)
    return replace(after, comparison=comparison, changes=changed.changes, before=before)


def _measuring(
    profile: "Profile", model: File | None, progress: Callable[[str], None]
) -> "Measure":
    """A function that measures parts of operators of a model.

    Args:
        profile: of the model.
        model: its ONNX file; None takes the profile's.
        progress: called before a measurement.

    Raises:
        FileError: if the file is not there.
    """
    place = model or profile.model_path
    if place is None or not Path(place).is_file():
        raise FileError(
            f"--refine: {place or 'the model'} is not there, and parts of its operators are"
            " measured; give it with --model FILE"
        )
    path = Path(place)

    def measure(profile: "Profile", wanted: "Wanted") -> "MeasuredParts":
        from planner.profilers.origin import profiled_model
        from planner.profilers.parts import measure_parts

        progress("measuring parts")
        return measure_parts(profiled_model(profile, path), profile, wanted)

    return measure


def compare(
    profile: "File | Profile | Sequence[Profile] | Inputs",
    *,
    topology: "File | Topology" = "local.yaml",
    gpus: int | None = None,
    training: Training = Training(),
    search: Search = Search(),
    solvers: Sequence[str] | None = None,
    what_if: WhatIf = WhatIf(),
    calibration: "bool | Calibration" = True,
    time_limit_s: float = 7.0,
    progress: Callable[[str], None] = lambda solver: None,
) -> Plans:
    """Every solver's strategy, also where an earlier one is nearly as good as possible.

    Args:
        profile: of several sizes of the microbatch, the largest is taken, or the training's.
        topology, gpus: see `read_topology`.
        training: how the model is trained.
        search: how strategies are searched for.
        solvers: keys of `SOLVERS`; None asks `automatic()`.
        what_if: changes of the topology, which alone is planned for then.
        calibration: see `simulate`.
        time_limit_s: limit of work for each solver, in seconds of an ordinary core.
        progress: called with the name of each solver before it starts.

    Raises:
        FileError: if a file is missing or malformed.
        OptionError: if options contradict each other, the profile or the topology.
        TopologyError: if the topology has fewer devices.
    """
    from planner.artefacts.profile import has_rules
    from planner.planning.portfolio import compare as compare_all

    inputs = read_inputs(profile, topology=topology, gpus=gpus, calibration=calibration)
    problem = _problem(inputs, training, search)
    changes: tuple[str, ...] = ()
    if what_if != WhatIf():
        changed = changed_cluster(problem.topology, what_if)
        problem, changes = replace(problem, topology=changed.topology), changed.changes
    names = asked_solvers(solvers, automatic(rules=has_rules(problem.profile)), search)
    comparison = compare_all(problem, names, time_limit_s, progress, full_time=True)
    return Plans(comparison, (problem,), changes=changes)


def solve_under(
    cost_model: str,
    profile: "File | Profile | Sequence[Profile]",
    *,
    topology: "File | Topology" = "local.yaml",
    gpus: int | None = None,
    training: Training = Training(),
    search: Search = Search(),
    bandwidth: float | str | None = None,
    time_limit_s: float = 7.0,
) -> "ForeignComparison":
    """Plans by another planner's cost model and its own solvers; no strategy comes of them.

    Args:
        cost_model: "dnn-partitioning" or "piper".
        profile: a file of that planner's, which brings its own devices, or any other profile, which
            is seen as equal devices over the topology's slowest path.
        topology: only for other profiles.
        gpus: number of devices, instead of the file's.
        training: `device_memory`, `global_batch` and `recompute` override the file's.
        search: how plans are searched for; without pins and own stages.
        bandwidth: between devices, instead of a Piper file's, in bytes per s or as text.
        time_limit_s: limit of processor time for all searches together.

    Raises:
        FileError: if a file is missing or malformed.
        OptionError: if options contradict each other or the cost model.
    """
    from planner.artefacts.formats.any import as_profiles, read_any
    from planner.artefacts.formats.dnn_partitioning import DnnGraph
    from planner.artefacts.formats.piper import PiperGraph
    from planner.artefacts.problem import switches_of
    from planner.planning.other_cost_models import (
        ForeignModel,
        ForeignOptions,
        solve_foreign,
        solve_profile,
    )
    from planner.solvers.netsplit.options import NetSplit

    if cost_model not in tuple(ForeignModel):
        raise OptionError(f"unknown cost model {cost_model!r}; known: {', '.join(ForeignModel)}")
    model = ForeignModel(cost_model)
    check_cost_model(cost_model, training, search, bandwidth=bandwidth)
    netsplit = switches_of(search, NetSplit)
    options = ForeignOptions(
        num_devices=gpus,
        memory_bytes=training.device_memory,
        batch=training.global_batch,
        bandwidth_bytes_per_s=rate_of(bandwidth),
        recompute=training.recompute,
        max_downsets=search.max_downsets,
        exact=search.exact,
        contiguous=netsplit.contiguous,
        time_limit_s=time_limit_s,
        seed=search.seed,
        engine=netsplit.engine,
    )
    if isinstance(profile, str | os.PathLike):
        path = find_profile(profile)
        content = read_any(path)
        kind = DnnGraph if model is ForeignModel.DNN_PARTITIONING else PiperGraph
        if isinstance(content, kind):
            given = flags_of(training, search)
            given |= {} if topology == LOCAL else {"topology": "--topology"}
            for name in sorted(given.keys() & OF_PROFILES[cost_model]):
                raise OptionError(
                    f"{given[name]} is for other profiles; {path} is a graph of {cost_model}, which"
                    " has devices, memory and times of its own"
                )
            return solve_foreign(content, options)
        profile = as_profiles(content, path)
    inputs = read_inputs(profile, topology=topology, gpus=gpus, calibration=False)
    problems = _problems(inputs, inputs.profiles, training, search)
    return solve_profile(problems[-1], model, options)


def solve_contest(
    problem: File, *, time_limit_s: float = 60.0, seed: int = 0, spent_s: float = 0.0
) -> "ContestAnswer":
    """Chooses a strategy per node of a problem of the iopddl contest, with a bound.

    Args:
        problem: the file, JSON or JSON in .gz.
        time_limit_s: limit of time on the wall, reading included; the work within is limited, too,
            so that the answer is the same on a busy machine.
        seed: of all draws.
        spent_s: time that has passed already.

    Raises:
        FileError: if the file is missing or malformed.
    """
    from planner.artefacts.formats.iopddl import read_contest
    from planner.planning.choices import solve_contest as solved

    left_s = countdown(time_limit_s - spent_s)
    return solved(read_contest(Path(problem)), Path(problem).name, time_limit_s, left_s, seed)


def sensitivity(plans: Plans) -> "tuple[Gain, ...]":
    """How much faster the best plan is if a kind of link or a type of device is twice as fast, the
    most first; nothing without a plan.
    """
    from planner.planning import sensitivity as gains

    if plans.best is None or plans.plan is None:
        return ()
    size = plans.best.microbatch_size
    problem = next(one for one in plans.problems if one.profile.microbatch_size == size)
    return gains.sensitivity(problem, plans.plan.strategy)


def pipedream_report(plans: Plans) -> "PipeDreamReport | None":
    """PipeDream's own figures of its plan for the largest microbatch; None if it has none."""
    from planner.solvers.pipedream.costs import PipeDreamReport

    reports = [row.report for row in plans.comparison.rows]
    own = [report for report in reports if isinstance(report, PipeDreamReport)]
    return own[-1] if own else None


def is_compiled() -> bool:
    """Whether the search is compiled for this version; if not, the first plan takes up to a minute
    longer.
    """
    from planner.support.jit import compiled_before

    return compiled_before()


def simulate(
    strategy: "File | Plan | Inputs",
    *,
    profile: "File | Profile | Sequence[Profile] | None" = None,
    topology: "File | Topology | None" = None,
    microbatches: int | None = None,
    device_memory: int | str | None = None,
    reserve: int | str = "1 GiB",
    what_if: WhatIf = WhatIf(),
    calibration: "bool | Calibration" = True,
) -> Simulation:
    """One iteration of a strategy.

    Args:
        strategy: a strategy file, or a plan; or it and all that follows, by `read_plan_inputs`.
        profile, topology: see `read_plan_inputs`.
        microbatches: per iteration; None takes the strategy's.
        device_memory, reserve: see `Training`.
        what_if: changes of the topology.
        calibration: corrections of times; True takes those beside the profile's file, if there are
            any, and False none.

    Raises:
        FileError: if a file is missing or malformed, or the profile or topology is not the
            strategy's.
        OptionError: if a change of the topology makes no sense.
    """
    from planner.planning.problems import problem_of_plan

    inputs = (
        strategy
        if isinstance(strategy, Inputs)
        else read_plan_inputs(strategy, profile=profile, topology=topology, calibration=calibration)
    )
    plan, (own,), place = inputs.plan, inputs.profiles, inputs.topology
    if plan is None:
        raise ValueError("expected the inputs of a strategy, got those of a search for one")
    if what_if != WhatIf():
        place = changed_cluster(place, what_if).topology
    needed, there = max(plan.ranks) + 1, len(place.devices)
    if there < needed:
        with_changes = f"; it was planned with {' '.join(plan.what_if)}" if plan.what_if else ""
        where = inputs.paths.get("topology", f"the topology {place.name}")
        raise FileError(f"{where}: has {there} devices, the strategy's need {needed}{with_changes}")
    sizes: dict[str, Any] = {"device_memory": device_memory, "reserve": reserve}
    training = Training(microbatches=microbatches, **sizes)
    kind = type_of(own, place)
    problem, result = problem_of_plan(plan, own, place, training, inputs.calibration, kind)
    return simulated(problem, plan.solver, result)


def simulate_stages(
    profile: "File | Profile | Sequence[Profile] | Inputs",
    *,
    cuts: Sequence[str] = (),
    replicas: Sequence[int] = (),
    topology: "File | Topology" = "local.yaml",
    gpus: int | None = None,
    training: Training = Training(),
    what_if: WhatIf = WhatIf(),
    calibration: "bool | Calibration" = True,
) -> Simulation:
    """One iteration of your own stages.

    Args:
        profile: of several sizes of the microbatch, the largest is taken, or the training's.
        cuts: the last operator of each stage but the last.
        replicas: the number of devices of each stage; none gives one each.
        topology, gpus: see `read_topology`.
        training: how the model is trained.
        what_if: changes of the topology.
        calibration: see `simulate`.

    Raises:
        FileError: if a file is missing or malformed.
        OptionError: if an operator is unknown, or options contradict each other.
    """
    from planner.solvers.manual import Manual
    from planner.solvers.manual import solve as solve_stages

    inputs = read_inputs(profile, topology=topology, gpus=gpus, calibration=calibration)
    search = Search(switches=(Manual(tuple(cuts), tuple(replicas)),))
    problem = _problem(inputs, training, search)
    result = solve_stages(problem, 0.0)
    return simulated(_changed(problem, what_if), "manual", result)


def _problems(
    inputs: Inputs, profiles: "Sequence[Profile]", training: Training, search: Search
) -> "tuple[Problem, ...]":
    """A problem for each of some profiles whose size divides the samples of an iteration."""
    from planner.planning.problems import problems_for

    kind = type_of(profiles[-1], inputs.topology)
    return problems_for(profiles, inputs.topology, training, search, inputs.calibration, kind)


def _problem(inputs: Inputs, training: Training, search: Search) -> "Problem":
    """The problem for the size of the microbatch that is asked for, else for the largest."""
    from planner.planning.problems import sized

    (problem,) = _problems(inputs, sized(inputs.profiles, training)[-1:], training, search)
    return problem


def _changed(problem: "Problem", what_if: WhatIf) -> "Problem":
    """The problem on the changed topology."""
    if what_if == WhatIf():
        return problem
    return replace(problem, topology=changed_cluster(problem.topology, what_if).topology)
