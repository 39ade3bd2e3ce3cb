"""Copies of float32 weights in the type of autocast, which products read. The launcher keeps one of
each weight (`operators/casting.py`) that lies on the device as it is read; copies of gathered
weights belong to a microbatch, as what was gathered does.
"""

from collections.abc import Iterator, Mapping
from math import prod

from planner.artefacts.graph import (
    ITEM_BYTES,
    Graph,
    Parameter,
    Tensor,
    parameters_by_name,
    tensors_by_name,
)
from planner.artefacts.operator_types import PRODUCTS
from planner.artefacts.profile import Profile
from planner.artefacts.strategy import Stage, indices_of
from planner.costs.mesh_memory import local_bytes
from planner.resharding.over_replicas import over_replicas
from planner.resharding.reshardings import reshardings
from planner.resharding.sent_types import SHORT_FLOATS
from planner.resharding.sums import parameter_specs
from planner.support.memo import remembered


@remembered
def cast_weights(profile: Profile) -> frozenset[str]:
    """The weights of which products read copies; none where the profile has these in the stash."""
    if not profile.casts_once:
        return frozenset()
    known = parameters_by_name(profile.graph)
    return frozenset(
        name
        for operator in profile.graph.operators
        if operator.type in PRODUCTS
        for name in operator.parameters
        if known[name].dtype == "float32"
    )


def short_copies(profile: Profile, v: int) -> Mapping[str, float]:
    """The tensors and parameters of which an operator keeps a copy in the type of autocast for its
    backward, and bytes of an element of that: as short as what it makes of all that it reads as
    float32, if they are within what it keeps besides.
    """
    operator, cost = profile.graph.operators[v], profile.operators[v]
    known = _known(profile.graph)
    made, others = known[operator.outputs[0]].dtype, {*cost.stash_tensors, *cast_weights(profile)}
    long = [
        known[name]
        for name in (*operator.inputs, *operator.parameters)
        if name not in others and known[name].dtype == "float32" and made in SHORT_FLOATS
    ]
    item_bytes = ITEM_BYTES[made]
    size = sum(prod(one.shape) * item_bytes for one in long)
    return {one.name: item_bytes for one in long} if size <= cost.stash_private_bytes else {}


def _known(graph: Graph) -> dict[str, Tensor | Parameter]:
    """Tensors and parameters by name."""
    return {**tensors_by_name(graph), **parameters_by_name(graph)}


def held_private_bytes(profile: Profile, v: int) -> int:
    """Of the bytes that an operator keeps for itself, those that are held where a segment is run
    again without it: copies of what it reads are made again.
    """
    if profile.graph.operators[v].type in PRODUCTS:
        return 0
    known = _known(profile.graph)
    copied = sum(prod(known[n].shape) * item for n, item in short_copies(profile, v).items())
    return profile.operators[v].stash_private_bytes - round(copied)


def cast_bytes(profile: Profile) -> Mapping[str, int]:
    """Bytes of the copies of whole weights, by weight."""
    known, share = parameters_by_name(profile.graph), cast_share(profile)
    return {name: round(share * known[name].bytes) for name in cast_weights(profile)}


def cast_share(profile: Profile) -> float:
    """Bytes of a copy over those of its weight."""
    return ITEM_BYTES[profile.dtype] / ITEM_BYTES["float32"]


def kept_casts(stage: Stage, profile: Profile) -> Mapping[str, int]:
    """Bytes of the copies that each device of a stage keeps, by weight."""
    own, graph = cast_weights(profile), profile.graph
    if not own:
        return {}
    shared = over_replicas(stage, graph)
    known, lies = parameters_by_name(graph), parameter_specs(shared, graph)
    return {
        name: round(
            cast_share(profile) * local_bytes(known[name], lies[name].parameter, shared.mesh)
        )
        for name in dict.fromkeys(_read_at_home(shared, profile))
        if name in own
    }


def _read_at_home(stage: Stage, profile: Profile) -> Iterator[str]:
    """The weights that a product of a stage reads as they lie."""
    graph = profile.graph
    copies = () if stage.sharding is None else reshardings(stage, graph)
    converted = {(one.tensor, reader) for one in copies for reader in one.readers}
    for v in indices_of(stage, graph):
        operator = graph.operators[v]
        if operator.type in PRODUCTS:
            yield from (n for n in operator.parameters if (n, operator.name) not in converted)
