"""Trace files -> the measured runs that a calibration is fitted to, with profile and topology."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from planner.artefacts.files import artefact_hash
from planner.artefacts.options import Optimizer
from planner.artefacts.plan import Plan
from planner.artefacts.problem import Options, Problem
from planner.artefacts.profile import Profile
from planner.artefacts.topology import DeviceType, Topology, take
from planner.resharding.checks import check_fits
from planner.schedules.actions import Compute, Receive, Send, text
from planner.schedules.program import program
from planner.simulator.traces.calibrate import MeasuredRun
from planner.simulator.traces.read import Trace, read_trace
from planner.support.errors import FileError, OptionError


def read_runs(
    traces: Sequence[Path],
    profiles: Sequence[Profile],
    topologies: Sequence[Topology],
    device_types: dict[str, DeviceType],
) -> tuple[MeasuredRun, ...]:
    """The runs in trace files.

    Args:
        profiles: profiles, among them that of each run.
        topologies: topologies, among them that of each run; a run may have used only the first
            devices of one.
        device_types: device types by name, to rescale profiles that were made on another type.

    Raises:
        FileError: if a trace is malformed, incomplete, or was not measured.
        OptionError: if the profile or topology of a run is not among those given, or runs were on
            devices of different types.
    """
    profile_by_hash = {artefact_hash(profile): profile for profile in profiles}
    topology_by_hash = {
        artefact_hash(part): part
        for topology in topologies
        for part in (
            topology,
            *(take(topology, n) for n in range(1, len(topology.devices))),
        )
    }
    runs = []
    for path in traces:
        trace = read_trace(path)
        plan = trace.plan
        if plan is None:
            raise FileError(
                f"{path}: expected a measured trace, this one was simulated; make one with:"
                " planner launch strategy.json --trace trace.json"
            )
        if plan.strategy.schedule.is_asynchronous:
            raise FileError(
                f"{path}: a trace of the schedule {plan.strategy.schedule.value} is a part of a run"
                " without gaps; calibrate from the run of a plan made with --schedule 1f1b"
            )
        profile = profile_by_hash.get(plan.profile_hash)
        topology = topology_by_hash.get(plan.topology_hash)
        if profile is None:
            raise OptionError(
                f"{path}: the run used the profile {plan.profile_hash[:12]} of {plan.model_path},"
                " which is not among the given ones; add it with --profile"
            )
        if topology is None:
            raise OptionError(
                f"{path}: the run used the topology {plan.topology}, {plan.topology_hash[:12]},"
                " which is not among the given ones; add it with --topology"
            )
        check_fits(plan, str(path), profile.graph)
        _check_complete(path, trace, profile)
        runs.append(MeasuredRun(path.name, _problem(plan, profile, topology, device_types), plan,
                        trace.timeline))  # fmt: skip
    types = {one.problem.topology.devices[d].type for one in runs for d in one.plan.ranks}
    if len(types) > 1:
        raise OptionError(
            f"the runs are on {' and '.join(sorted(types))}; calibrate one type of device at a time"
        )
    return tuple(runs)


def _check_complete(path: Path, trace: Trace, profile: Profile) -> None:
    """Whether a measured trace has every action and transfer of its plan once, and each computation
    takes time.

    Raises:
        FileError: if not.
    """
    plan, timeline = trace.plan, trace.timeline
    assert plan is not None, "a measured trace has a plan"
    due: Counter[tuple[int, str]] = Counter()
    lists = program(plan.strategy, profile.graph, plan.prediction.stages).lists
    for device, actions in lists.items():
        for action in actions:
            match action:
                case Receive(way, _, microbatch, tensor, source):
                    due[device, f"{tensor} ({way}{microbatch}) from {source}"] += 1
                case Send():
                    pass
                case _:
                    due[device, text(action)] += 1
    posting = (Send, Receive)
    events = (e for e in timeline.events if not isinstance(e.action, posting))
    made = Counter((e.device, text(e.action)) for e in events)
    made += Counter(
        (one.target, f"{one.tensor} ({one.direction}{one.microbatch}) from {one.source}")
        for one in timeline.transfers
    )
    for what, some in (("missing", due - made), ("too many", made - due)):
        if some:
            device, name = min(some)
            raise FileError(
                f"{path}: expected each action of its plan once, got {some.total()} {what}: {name}"
                f" on {trace.names.get(device, f'device {device}')}; measure it again with: planner"
                " launch strategy.json --trace trace.json"
            )
    empty = [e for e in timeline.events if isinstance(e.action, Compute) and e.end_s <= e.start_s]
    if empty:
        raise FileError(
            f"{path}: expected computations that take time, got {text(empty[0].action)} of"
            f" {empty[0].end_s - empty[0].start_s:g} s; measure it again"
        )


def _problem(
    plan: Plan, profile: Profile, topology: Topology, device_types: dict[str, DeviceType]
) -> Problem:
    own = {kind.name: kind for kind in topology.device_types}
    strategy = plan.strategy
    options = Options(
        strategy.num_microbatches,
        schedule=strategy.schedule,
        optimizer=Optimizer(plan.optimizer),
    )
    measured_on = (device_types | own).get(profile.device_type)
    return Problem(profile, topology, options, measured_on)
