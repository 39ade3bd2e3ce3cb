"""Foreign graphs and cost models: dnn-partitioning's and Piper's problems, solved and compared.

Under a foreign model the objective is the model's own: the largest load of a device
(dnn-partitioning), or the largest stage time per sample (Piper). Iterations, bubbles and gaps are
the planner's own notions, and stay unknown. A profile of the planner can be looked at in these
models too, as a second opinion.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from planner.artefacts.formats.dnn_partitioning import DnnGraph, colocated, color_classes
from planner.artefacts.formats.piper import RECOMPUTED, PiperGraph
from planner.artefacts.options import Recompute
from planner.artefacts.problem import Problem, Status
from planner.artefacts.topology import too_many
from planner.costs.stage_memory import own_limit_bytes
from planner.solvers.dnn_partitioning import costs as dnn_partitioning
from planner.solvers.dnn_partitioning.placement import place
from planner.solvers.dnn_partitioning.solve import DEFAULT_MAX_DOWNSETS, DnnStage, split
from planner.solvers.engines.engine import Engine
from planner.solvers.piper import costs as piper
from planner.solvers.piper.equal import equal_stages
from planner.solvers.piper.solve import PiperOptions, PiperPlan, plan
from planner.support.brake import stopwatch
from planner.support.errors import OptionError
from planner.support.units import format_bytes, format_seconds

# Of the time, for the contiguous split from which a search for other placements starts.
SPLIT_SHARE = 0.2
# Of the time, for Piper's own search; the rest is for equal stages.
PIPER_SHARE = 0.8
# Piper's files have one time for both passes; this share of it is shown as the forward pass.
PIPER_FORWARD_SHARE = 1 / 3


class ForeignModel(StrEnum):
    """Whose cost model decides."""

    DNN_PARTITIONING = "dnn-partitioning"
    PIPER = "piper"


@dataclass(frozen=True, slots=True)
class ForeignOptions:
    """What overrides the file; None keeps the file's.

    Attributes:
        num_devices: k or K.
        memory_bytes: of each device.
        batch: samples per batch; Piper's.
        bandwidth_bytes_per_s: between devices; Piper's.
        recompute: whether layers may or must recompute their activations; Piper's.
        max_downsets: the most to look at; None leaves it to the solver.
        exact: whether to look at all.
        contiguous: whether stages must be differences of downsets; dnn-partitioning's.
        time_limit_s: of all searches together.
        seed: of that search; engine: who solves its programs, gurobi or else HiGHS.
    """

    num_devices: int | None = None
    memory_bytes: int | None = None
    batch: int | None = None
    bandwidth_bytes_per_s: float | None = None
    recompute: Recompute = Recompute.AUTO
    max_downsets: int | None = None
    exact: bool = False
    contiguous: bool = True
    time_limit_s: float = 10.0
    seed: int = 0
    engine: Engine | None = None


@dataclass(frozen=True, slots=True)
class ForeignStage:
    """One stage under a foreign model.

    Attributes:
        devices: numbers from 0; the host's CPUs come after the devices.
        operators: names, or ids where nodes have none.
        forward_s: of what the objective counts (a minibatch or a sample), on one replica.
        backward_s: of the same, on one replica.
        communication_s: what transfers and synchronisation add to the load.
        load_s: the stage's share of the objective: the largest is the bottleneck.
        memory_bytes: on each device.
        how: what else was chosen for it, in words.
    """

    devices: tuple[int, ...]
    operators: tuple[str, ...]
    forward_s: float
    backward_s: float
    communication_s: float
    load_s: float
    memory_bytes: float
    how: str


@dataclass(frozen=True, slots=True)
class ForeignRow:
    """What one solver came up with.

    Attributes:
        solver: its name.
        status: of its own space.
        stages: in topological order, or by their first operators where they are not contiguous;
            empty if it has no plan.
        reason: why it has none.
        solve_s: how long it took, without compiling.
        bound_s: nothing in its space has a smaller objective; None if it has no bound.
        reproducible: False where the clock cut the search.
    """

    solver: str
    status: Status
    stages: tuple[ForeignStage, ...]
    reason: str | None = None
    solve_s: float = 0.0
    bound_s: float | None = None
    reproducible: bool = True

    @property
    def bottleneck_s(self) -> float | None:
        """The objective; None without a plan."""
        return max((stage.load_s for stage in self.stages), default=None)


@dataclass(frozen=True, slots=True)
class ForeignComparison:
    """The rows of all solvers under one foreign model.

    Attributes:
        model: whose.
        rows: the exact solver's first.
        num_devices: that there are, the host's CPUs included.
        notes: what the user should know.
    """

    model: ForeignModel
    rows: tuple[ForeignRow, ...]
    num_devices: int
    notes: tuple[str, ...]

    @property
    def best(self) -> ForeignRow:
        """The row with the smallest objective, of equals the earlier one; the first if there is no
        plan.
        """
        planned = [row for row in self.rows if row.stages]
        return min(planned, key=lambda row: row.bottleneck_s or 0.0, default=self.rows[0])


def solve_foreign(graph: DnnGraph | PiperGraph, options: ForeignOptions) -> ForeignComparison:
    """Solves a foreign graph under its own cost model, exactly and by what its authors compare
    with.

    Raises:
        OptionError: if there are more devices than there may be.
    """
    cpus = graph.num_cpus if isinstance(graph, DnnGraph) else 0
    size = too_many((options.num_devices or graph.num_devices) + cpus, 0, 0)
    if size is not None:
        raise OptionError(f"{size}; give fewer with --gpus")
    match graph:
        case DnnGraph():
            return _solve_dnn(graph, options)
        case PiperGraph():
            return _solve_piper(graph, options)


def solve_profile(
    problem: Problem, model: ForeignModel, options: ForeignOptions
) -> ForeignComparison:
    """Solves a problem of the planner under a foreign cost model: equal devices, as fast as the
    slowest of the topology is for each operator, over its slowest path. (An option that overrides
    the number of devices has done so in the topology.)

    Raises:
        OptionError: if the reserve leaves no memory.
    """
    devices = range(len(problem.topology.devices))
    own = min(own_limit_bytes(problem, d) for d in devices)
    memory = own - problem.training.reserve
    if memory <= 0:
        raise OptionError(
            f"the reserve of {format_bytes(problem.training.reserve)} leaves nothing of"
            f" {format_bytes(own)} per device; give a smaller --reserve"
        )
    kept = replace(options, num_devices=None, memory_bytes=None)
    note = "the profile seen by another cost model: equal devices, the topology's slowest path"
    if model is ForeignModel.DNN_PARTITIONING:
        comparison = solve_foreign(
            dnn_partitioning.as_dnn_graph(problem, len(devices), memory), kept
        )
    else:
        samples = problem.num_microbatches * problem.profile.microbatch_size
        comparison = solve_foreign(
            piper.as_piper_graph(problem, len(devices), memory, samples), kept
        )
    return replace(comparison, notes=(note, *comparison.notes))


def _timed(solve: Callable[[], ForeignRow]) -> ForeignRow:
    took_s = stopwatch()
    return replace(solve(), solve_s=took_s())


# -------------------------------------------------------------------------------- dnn-partitioning


def _solve_dnn(graph: DnnGraph, options: ForeignOptions) -> ForeignComparison:
    count = options.num_devices or graph.num_devices
    memory = graph.memory_bytes if options.memory_bytes is None else options.memory_bytes
    most = None if options.exact else options.max_downsets or DEFAULT_MAX_DOWNSETS

    known: list[DnnStage] = []

    def exact() -> ForeignRow:
        share = 1.0 if options.contiguous else SPLIT_SHARE
        answer = split(graph, count, memory, most, share * options.time_limit_s)
        known.extend(answer.stages)
        stages = _dnn_stages(graph, answer.stages, count)
        reason = None
        if not stages:
            reason = (
                _late(options) if not answer.reproducible else _dnn_reason(graph, count, memory)
            )
        return ForeignRow(
            "dnn-partitioning",
            answer.status,
            stages,
            reason,
            bound_s=None if answer.reproducible or not stages else answer.bound_s,
            reproducible=answer.reproducible,
        )

    def single() -> ForeignRow:
        everything = range(len(graph.nodes))
        needed = dnn_partitioning.memory_bytes(graph, everything)
        if needed > memory or not all(node.supported for node in graph.nodes):
            return ForeignRow("single", Status.INFEASIBLE, (), _dnn_reason(graph, 1, memory))
        stages = _dnn_stages(graph, (DnnStage(tuple(everything), cpu=False),), count)
        return ForeignRow("single", Status.FEASIBLE, stages)

    notes = []
    if graph.num_cpus:
        notes.append(f"the host's CPUs count as devices from {count} on, as the file says")
    rows = [_timed(exact), _timed(single)]
    if not options.contiguous:
        row, said = _dnn_placement(graph, count, memory, known, options)
        rows.insert(0, row)
        notes += said
    return ForeignComparison(
        ForeignModel.DNN_PARTITIONING, tuple(rows), count + graph.num_cpus, tuple(notes)
    )


def _late(options: ForeignOptions) -> str:
    return (
        f"no plan by the end of {format_seconds(options.time_limit_s)}; give a larger"
        " --time-limit, or fewer --max-downsets"
    )


def _dnn_placement(
    graph: DnnGraph,
    count: int,
    memory: float,
    known: Sequence[DnnStage],
    options: ForeignOptions,
) -> tuple[ForeignRow, list[str]]:
    """The row of placements that need not be contiguous, and what to say of it."""
    took_s = stopwatch()
    limit_s = (1 - SPLIT_SHARE) * options.time_limit_s
    placement = place(graph, count, memory, known, limit_s, options.seed, options.engine)
    stages, bound_s = _dnn_stages(graph, placement.split.stages, count), placement.bound_s
    row = ForeignRow(
        "netsplit",
        placement.split.status,
        stages,
        None if stages else _dnn_reason(graph, count, memory, contiguous=False),
        took_s(),
        bound_s if stages and bound_s > 0 else None,
        placement.reproducible,
    )
    notes = [placement.note] if placement.note else []
    if row.bottleneck_s is not None and row.bound_s is not None:
        gap = max(0.0, row.bottleneck_s / row.bound_s - 1)
        notes.append(
            f"netsplit: no placement is below {format_seconds(row.bound_s)}, contiguous or not;"
            f" gap {gap:.2%}"
        )
    return row, notes


def _dnn_stages(
    graph: DnnGraph, stages: Sequence[DnnStage], num_devices: int
) -> tuple[ForeignStage, ...]:
    """The stages, priced; devices are numbered as they come."""
    priced = []
    for s, stage in enumerate(stages):
        earlier = sum(other.cpu == stage.cpu for other in stages[:s])
        load_s = dnn_partitioning.load_s(graph, stage.nodes, cpu=stage.cpu)
        forward_s, backward_s = (
            dnn_partitioning.compute_s(graph, stage.nodes, backward=which, cpu=stage.cpu)
            for which in (False, True)
        )
        names = tuple(graph.nodes[v].name or str(graph.nodes[v].id) for v in stage.nodes)
        priced.append(
            ForeignStage(
                devices=(num_devices + earlier if stage.cpu else earlier,),
                operators=names,
                forward_s=forward_s,
                backward_s=backward_s,
                communication_s=0.0
                if stage.cpu
                else dnn_partitioning.transfer_s(graph, stage.nodes),
                load_s=load_s,
                memory_bytes=dnn_partitioning.memory_bytes(graph, stage.nodes),
                how="on a CPU" if stage.cpu else "",
            )
        )
    return tuple(priced)


def _dnn_reason(
    graph: DnnGraph, num_devices: int, memory: float, *, contiguous: bool = True
) -> str:
    """Why there is no split, or no placement."""
    refused = [node for node in graph.nodes if not node.supported]
    if refused and (num_devices == 1 or not graph.num_cpus):
        return f"{refused[0].name or refused[0].id} runs on no device, and there is no CPU for it"
    limit = format_bytes(memory)
    needed = dnn_partitioning.memory_bytes(graph, range(len(graph.nodes)))
    together = colocated(graph).members if contiguous else color_classes(graph)
    largest = max(dnn_partitioning.memory_bytes(graph, nodes) for nodes in together)
    if largest > memory:
        what = f"nodes that share a device occupy {format_bytes(largest)}, the limit is {limit}"
    elif needed > num_devices * memory:
        what = f"the nodes occupy {format_bytes(needed)}, more than {num_devices} x {limit}"
    else:
        kind = "contiguous split" if contiguous else "placement"
        what = f"no {kind} has {num_devices} parts of at most {limit} each"
    return f"{what}; try more devices or --device-memory"


# -------------------------------------------------------------------------------- Piper


def _solve_piper(graph: PiperGraph, options: ForeignOptions) -> ForeignComparison:
    rate = options.bandwidth_bytes_per_s or graph.bandwidth_bytes_per_s
    memory = graph.memory_bytes if options.memory_bytes is None else options.memory_bytes
    asked = PiperOptions(
        num_devices=options.num_devices or graph.num_devices,
        memory_bytes=memory,
        bandwidth_bytes_per_s=rate,
        batch=options.batch or graph.batch,
        recompute=options.recompute,
    )
    if options.exact or options.max_downsets:
        asked = replace(asked, max_downsets=None if options.exact else options.max_downsets)

    def row(
        name: str, solver: Callable[[PiperGraph, PiperOptions, float], PiperPlan], share: float
    ) -> ForeignRow:
        piper_plan = solver(graph, asked, share * options.time_limit_s)
        stages, reason = _piper_stages(graph, asked, piper_plan), None
        if not stages:
            reason = _piper_reason(graph, asked) if piper_plan.in_time else _late(options)
        in_time = piper_plan.in_time
        return ForeignRow(name, piper_plan.status, stages, reason, reproducible=in_time)

    rows = (
        _timed(lambda: row("piper", plan, PIPER_SHARE)),
        _timed(lambda: row("2bw", equal_stages, 1 - PIPER_SHARE)),
    )
    note = "the file has one time for both passes; a third of it is shown as the forward pass"
    return ForeignComparison(ForeignModel.PIPER, rows, asked.num_devices, (note,))


def _piper_stages(
    graph: PiperGraph, options: PiperOptions, piper_plan: PiperPlan
) -> tuple[ForeignStage, ...]:
    """The stages, priced; devices are numbered as they come."""
    stages, first = [], 0
    for stage in piper_plan.stages:
        t, d = stage.tensor_parallel, stage.data_parallel
        tmpcs = [
            graph.nodes[v].tmpcs[str(t)][place]
            for v, place in zip(stage.layers, stage.tmpcs, strict=True)
        ]
        figures = piper.stage_figures(
            graph, stage.layers, tmpcs, options.batch, options.bandwidth_bytes_per_s
        )
        again = sum(tmpc.id == RECOMPUTED for tmpc in tmpcs)
        stages.append(
            ForeignStage(
                devices=tuple(range(first, first + t * d)),
                operators=tuple(
                    graph.nodes[v].name or str(graph.nodes[v].id) for v in stage.layers
                ),
                forward_s=figures.compute_s * PIPER_FORWARD_SHARE,
                backward_s=figures.compute_s * (1 - PIPER_FORWARD_SHARE),
                communication_s=figures.time_s(d) - figures.compute_s / d,
                load_s=figures.time_s(d),
                memory_bytes=figures.memory_bytes(d, stage.replicas_to_the_end),
                how=f"t {t}, d {d}, {again} of {len(tmpcs)} recomputed",
            )
        )
        first += t * d
    return tuple(stages)


def _piper_reason(graph: PiperGraph, options: PiperOptions) -> str:
    """Why there is no plan: a layer that never fits or has no way to run, or all together."""
    limit = format_bytes(options.memory_bytes)
    for node in graph.nodes:
        ways = [tmpc for tmpcs in node.tmpcs.values() for tmpc in tmpcs]
        least = min(
            (piper.memory_bytes(c.memory_a_bytes, c.memory_b_bytes, 1) for c in ways), default=None
        )
        name = node.name or str(node.id)
        if least is None:
            return f"layer {name} (id {node.id}) has no configuration"
        if least > options.memory_bytes:
            return (
                f"layer {name} (id {node.id}) needs at least {format_bytes(least)} per device,"
                f" the limit is {limit}; try more --device-memory"
            )
    recompute = "" if options.recompute is Recompute.AUTO else ", or --recompute auto"
    return (
        f"no way to cut the layers fits {options.num_devices} x {limit}; try more devices, more"
        f" --device-memory{recompute}"
    )
