"""Trace files -> the measured runs that a calibration is fitted to, with profile and topology."""

from collections.abc import Sequence
from pathlib import Path

from planner.errors import FileError, OptionError
from planner.files import artefact_hash
from planner.plan import Plan
from planner.problem import Optimizer, Options, Problem
from planner.profiles import Profile
from planner.topology import DeviceType, Topology, take
from planner.traces.calibrate import MeasuredRun
from planner.traces.read import read_trace


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
        FileError: if a trace is malformed or was not measured.
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
        runs.append(MeasuredRun(path.name, _problem(plan, profile, topology, device_types), plan,
                        trace.timeline))  # fmt: skip
    types = {one.problem.topology.devices[d].type for one in runs for d in one.plan.ranks}
    if len(types) > 1:
        raise OptionError(
            f"the runs are on {' and '.join(sorted(types))}; calibrate one type of device at a time"
        )
    return tuple(runs)


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
