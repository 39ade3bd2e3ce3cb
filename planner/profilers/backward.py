"""Backward times as multiples of forward times, for engines that run a model but do not train it.

The ratio of an operator type is PyTorch's, from the measured profiles that ship with the planner;
for other types it is the ratio of FLOPs or of bytes moved.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from planner.artefacts.files import shipped
from planner.artefacts.formats.any import read_any_profiles
from planner.artefacts.graph import Graph, tensors_by_name
from planner.artefacts.profile import Profile, Source

if TYPE_CHECKING:
    from planner.profilers.facts import Facts

TORCH = ("", "torch")
"""Engines of profiles in which PyTorch was timed; files without one are older than the field."""

FLOPS_PER_BYTE = 5
"""An operator with more FLOPs per byte is bound by FLOPs. It is 90 GFLOP/s over 18 GB/s, the speeds
of the device type "cpu" in topologies/devices.yaml.
"""


@dataclass(frozen=True, slots=True)
class BackwardRatios:
    """Backward over forward time, by operator type.

    Attributes:
        by_type: ratio of all operators of a type in which PyTorch computes something.
        files: names of the profiles that the ratios are from.
    """

    by_type: Mapping[str, float]
    files: tuple[str, ...]


@lru_cache(maxsize=2)
def shipped_ratios(on_cpu: bool) -> BackwardRatios:
    """The ratios in the profiles that ship with the planner.

    Args:
        on_cpu: whether to take profiles measured on CPUs, or else those measured on other devices;
            without any of the wanted kind, all are taken.
    """
    by_file = {
        path.name: measured
        for path in sorted(shipped("profiles").glob("*.json"))
        if (measured := [p for p in read_any_profiles(path) if _is_measured(p)])
    }
    alike = {
        name: profiles
        for name, profiles in by_file.items()
        if (profiles[0].device_type == "cpu") == on_cpu
    } or by_file
    everything = [profile for profiles in alike.values() for profile in profiles]
    return BackwardRatios(ratios(everything), tuple(alike))


def _is_measured(profile: Profile) -> bool:
    return profile.source is Source.MEASURED and profile.engine in TORCH


def ratios(profiles: Sequence[Profile]) -> dict[str, float]:
    """Sum of backward times over sum of forward times, per operator type.

    Operators that no gradient reaches are left out. So are those that only make views: PyTorch does
    no work for them, but another engine may copy.
    """
    forward_s: defaultdict[str, float] = defaultdict(float)
    backward_s: defaultdict[str, float] = defaultdict(float)
    for profile in profiles:
        views = {view.tensor for view in profile.views}
        for operator, cost in zip(profile.graph.operators, profile.operators, strict=True):
            if cost.backward_s > 0 and not views.issuperset(operator.outputs):
                forward_s[operator.type] += cost.forward_s
                backward_s[operator.type] += cost.backward_s
    return {type_: backward_s[type_] / forward_s[type_] for type_ in sorted(forward_s)}


@dataclass(frozen=True, slots=True)
class BackwardEstimates:
    """Backward over forward time of the operators of one graph.

    Attributes:
        ratios: one per operator; 0 where no gradient reaches it.
        by_type: number of ratios that were taken from the operator's type.
        by_facts: number of ratios that were taken from FLOPs or bytes.
        types: types of the operators with ratios from FLOPs or bytes, each once.
        files: names of the profiles that the ratios of types are from.
    """

    ratios: tuple[float, ...]
    by_type: int
    by_facts: int
    types: tuple[str, ...]
    files: tuple[str, ...]


def estimates(graph: Graph, facts: "Sequence[Facts]", known: BackwardRatios) -> BackwardEstimates:
    """The backward time of each operator, as a multiple of its forward time.

    Args:
        graph: the graph.
        facts: one per operator.
        known: ratios of the types that were measured.
    """
    tensors = tensors_by_name(graph)
    own_ratios, by_type, by_facts = [], 0, []
    for operator, fact in zip(graph.operators, facts, strict=True):
        views = {view.tensor for view in fact.stash.views}
        if not any(tensors[name].gradient for name in operator.outputs):
            own_ratios.append(0.0)
        elif operator.type in known.by_type and not views.issuperset(operator.outputs):
            own_ratios.append(known.by_type[operator.type])
            by_type += 1
        else:
            own_ratios.append(_by_facts(fact))
            by_facts.append(operator.type)
    return BackwardEstimates(
        ratios=tuple(own_ratios),
        by_type=by_type,
        by_facts=len(by_facts),
        types=tuple(sorted(set(by_facts))),
        files=known.files,
    )


def _by_facts(fact: "Facts") -> float:
    """The ratio of FLOPs where the operator is bound by them, else of bytes. It is 1 for a view: an
    engine that copies it also copies its gradient back.
    """
    if not fact.bytes_moved:
        return 1.0
    if fact.flops > FLOPS_PER_BYTE * fact.bytes_moved:
        return fact.backward_flops / fact.flops
    return fact.backward_bytes / fact.bytes_moved
