"""How long backward takes, from how long forward does.

For what can run a model but not train it: the ratio of an operator's type is that of PyTorch, in
the measured profiles that ship with the planner; else that of FLOPs or of bytes moved.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from planner.files import shipped
from planner.formats import read_any_profiles
from planner.graph import Graph, tensors_by_name
from planner.profiles import Profile, Source

if TYPE_CHECKING:
    from planner.profilers.facts import Facts

TORCH = ("", "torch")
"""Engines of profiles that PyTorch was timed for; files without one are older than the field."""

FLOPS_PER_BYTE = 5
"""From which on FLOPs take longer than bytes: of the device type "cpu" in topologies/devices.yaml,
90 GFLOP/s over 18 GB/s.
"""


@dataclass(frozen=True, slots=True)
class BackwardRatios:
    """Backward over forward time.

    Attributes:
        by_type: per operator type, of all operators that PyTorch computes something for.
        files: names of the profiles that it is from.
    """

    by_type: Mapping[str, float]
    files: tuple[str, ...]


@lru_cache(maxsize=2)
def shipped_ratios(on_cpu: bool) -> BackwardRatios:
    """The ratios in the profiles that ship with the planner.

    Args:
        on_cpu: whether those measured on CPUs count, or those on other devices; if there are none
            of a kind, those of the other.
    """
    found = {
        path.name: measured
        for path in sorted(shipped("profiles").glob("*.json"))
        if (measured := [p for p in read_any_profiles(path) if _is_measured(p)])
    }
    alike = {
        name: profiles
        for name, profiles in found.items()
        if (profiles[0].device_type == "cpu") == on_cpu
    } or found
    everything = [profile for profiles in alike.values() for profile in profiles]
    return BackwardRatios(ratios(everything), tuple(alike))


def _is_measured(profile: Profile) -> bool:
    return profile.source is Source.MEASURED and profile.engine in TORCH


def ratios(profiles: Sequence[Profile]) -> dict[str, float]:
    """Sum of backward over sum of forward times per operator type.

    Left out are operators that no gradient reaches, and those that only make views: PyTorch does
    nothing for them, which says nothing of an engine that copies.
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
    """Backward over forward of the operators of one graph.

    Attributes:
        ratios: one per operator; 0 where no gradient reaches it.
        by_type: how many are from their type.
        by_facts: how many are from FLOPs or bytes.
        types: of the latter, each once.
        files: the profiles that the former are from.
    """

    ratios: tuple[float, ...]
    by_type: int
    by_facts: int
    types: tuple[str, ...]
    files: tuple[str, ...]


def estimates(graph: Graph, facts: "Sequence[Facts]", known: BackwardRatios) -> BackwardEstimates:
    """What backward takes for each operator, as a multiple of its forward time.

    Args:
        facts: one per operator.
        known: of the types that were measured.
    """
    tensors = tensors_by_name(graph)
    found, by_type, by_facts = [], 0, []
    for operator, fact in zip(graph.operators, facts, strict=True):
        views = {view.tensor for view in fact.stash.views}
        if not any(tensors[name].gradient for name in operator.outputs):
            found.append(0.0)
        elif operator.type in known.by_type and not views.issuperset(operator.outputs):
            found.append(known.by_type[operator.type])
            by_type += 1
        else:
            found.append(_by_facts(fact))
            by_facts.append(operator.type)
    return BackwardEstimates(
        ratios=tuple(found),
        by_type=by_type,
        by_facts=len(by_facts),
        types=tuple(sorted(set(by_facts))),
        files=known.files,
    )


def _by_facts(fact: "Facts") -> float:
    """By FLOPs where these take the time, else by bytes; 1 for a view, because an engine that
    copies it copies its gradient back.
    """
    if not fact.bytes_moved:
        return 1.0
    if fact.flops > FLOPS_PER_BYTE * fact.bytes_moved:
        return fact.backward_flops / fact.flops
    return fact.backward_bytes / fact.bytes_moved
