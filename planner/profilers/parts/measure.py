"""`measure_parts`: times of parts of operators at their local shapes, with PyTorch on this machine.

A part is timed as a whole operator is (`profilers/measured.py`), on the local parts of the values
that this reads in a forward pass of the model. Parts of operators of one class with the same local
shapes share one measurement. The whole operator is timed beside its part, and what counts is the
ratio of both: so the share fits times that were scaled to the whole step, and a machine that is
slower today does not make parts slower than wholes. Only where both are in the cache nothing is
timed.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from planner.artefacts.graph import Graph, parameters_by_name, tensors_by_name
from planner.artefacts.profile import OperatorCost, Part, PartTime, Profile, Source, is_computed
from planner.artefacts.sharding import local_shape, reads, rule_of
from planner.model.load import Model
from planner.profilers.cache import MeasuredClass
from planner.profilers.classes import GradientContext, class_name, surroundings
from planner.profilers.devices import device_type, gpu_names
from planner.profilers.measured import ModelTimer, layout, session
from planner.profilers.reliability import Conditions, signs_of_load

Wanted = Mapping[int, Collection[Part]]
"""Parts by index of the operator."""


@dataclass(frozen=True, slots=True)
class MeasuredParts:
    """A profile with times of parts.

    Attributes:
        profile: with the times that were wanted, and those that it had.
        num_timed: number of classes of parts that were timed.
        num_cached: number of classes of parts that the cache had.
        warnings: why the times may be wrong, as sentences.
    """

    profile: Profile
    num_timed: int
    num_cached: int
    warnings: tuple[str, ...] = ()


def device_for(kind: str) -> str | None:
    """A device of this machine that is of a type; None if there is none.

    Args:
        kind: name of the type in topologies.
    """
    if kind == "cpu":
        return "cpu"
    here = (f"cuda:{index}" for index in range(len(gpu_names())))
    return next((device for device in here if device_type(device) == kind), None)


def obstacle(profile: Profile) -> str | None:
    """Why no parts can be measured for a profile, in words; None if they can."""
    if is_computed(profile):
        return "the profile's times are computed, and those of parts from local FLOPs and bytes"
    if profile.source is not Source.MEASURED:
        return f"the profile's times are {profile.source.value}, not measured"
    if profile.engine not in ("", "torch"):
        return f"the profile was measured by {profile.engine}, and parts are by torch"
    if device_for(profile.device_type) is None:
        return f"the profile was measured on {profile.device_type}, which is not here"
    return None


def measure_parts(
    model: Model,
    profile: Profile,
    wanted: Wanted,
    *,
    repetitions: int = 3,
    budget_s: float = 1.0,
    seed: int = 0,
    cached: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> MeasuredParts:
    """The profile with times of parts of its operators.

    Args:
        model: the profile's.
        profile: one that was measured on a device of this machine (`obstacle`).
        wanted: the parts.
        repetitions, budget_s, seed, cached: as of `measured.measure`.
        progress: called with the number of parts done and of all.

    Raises:
        OperatorError: if an operator has no conversion.
        LaunchError: if an operator cannot run by the rule of its part.
    """
    from planner.profilers.facts import facts_if_shapes_are_known
    from planner.profilers.timing import quiet

    device = device_for(profile.device_type)
    if device is None or profile.source is not Source.MEASURED:
        raise ValueError("expected a profile that was measured on a device of this machine")
    here = session(model.graph, device, profile.threads, profile.dtype, cached=cached)
    model = replace(model, graph=replace(model.graph, parameters=profile.graph.parameters))
    timer = ModelTimer(model, here, repetitions, budget_s, seed)
    with quiet(here.threads):
        timer.hold()
        facts = facts_if_shapes_are_known(model, here.autocast)
        run = _Run(timer, surroundings(model.graph, facts))
        costs = list(profile.operators)
        todo = [(v, part) for v in sorted(wanted) for part in wanted[v]]
        for done, (v, part) in enumerate(todo, 1):
            costs[v] = _with_part(costs[v], part, run.shares(v, part))
            progress(done, len(todo))
    conditions = Conditions(here.threads, timer.watch.wall_s, timer.watch.cpu_s, too_big=False)
    # What the profile says of its own whole step is not of today.
    signs = signs_of_load(replace(profile, whole_step=None), conditions)
    if not signs:
        here.cache.put_all(run.new)
    return MeasuredParts(
        profile=replace(profile, operators=tuple(costs)),
        num_timed=run.num_timed,
        num_cached=len(run.known) - run.num_timed,
        warnings=signs,
    )


def _with_part(cost: OperatorCost, part: Part, shares: tuple[float, float]) -> OperatorCost:
    """The costs of an operator with the time of a part, in place of an older one."""
    others = [one for one in cost.parts if one.part != part]
    return replace(
        cost, parts=tuple(sorted((*others, PartTime(*part, *shares)), key=lambda one: one.part))
    )


class _Run:
    """The measurements of one run.

    Attributes:
        known: shares of forward and backward time, by the name of the part's class.
        new: whole operators and parts that the cache did not have, by the name of the class.
        num_timed: number of classes of parts that were timed.
    """

    def __init__(self, timer: ModelTimer, around: tuple[GradientContext, ...]) -> None:
        self.timer, self.around = timer, around
        self.known: dict[str, tuple[float, float]] = {}
        self.new: dict[str, MeasuredClass] = {}
        self.num_timed = 0

    def shares(self, v: int, part: Part) -> tuple[float, float]:
        """The shares of one part; those of an earlier operator before this one's."""
        timer = self.timer
        timer.advance(v)
        inputs = timer.model.graph.operators[v].inputs
        layouts = {name: layout(timer.alive[name]) for name in inputs}
        whole = class_name(timer.model, v, layouts, self.around[v])
        name = _part_name(whole, timer.model.graph, v, part)
        if name not in self.known:
            all_, own = timer.here.cache.get(whole), timer.here.cache.get(name)
            if all_ is None or own is None:
                all_, own = self._timed(v, part, (whole, name))
            self.known[name] = _shares(all_, own)
        return self.known[name]

    def _timed(
        self, v: int, part: Part, names: tuple[str, str]
    ) -> tuple[MeasuredClass, MeasuredClass]:
        """Times an operator and its part, and remembers both.

        Args:
            names: of the class of the operator and of that of the part.
        """
        from planner.profilers.parts.unit import local_strides, local_values, part_unit
        from planner.profilers.runnable import unit

        timer, around = self.timer, self.around[v]
        casts = timer.here.autocast is not None
        graph, device = timer.model.graph, timer.here.device
        whole, _ = timer.timed(
            v, unit(timer.model, v, device, timer.held, casts=casts), timer.alive, around
        )  # fmt: skip
        shapes = local_shapes(graph, v, part)
        arriving = {
            name: local_strides(strides, shapes[name]) for name, strides in around.arriving.items()
        }
        own, _ = timer.timed(
            v,
            part_unit(timer.model, v, part, device, timer.held, casts=casts),
            local_values(timer.model, v, part, timer.alive),
            replace(around, arriving=arriving),
        )
        self.num_timed += 1
        self.new |= dict(zip(names, (whole, own), strict=True))
        return whole, own


def _shares(whole: MeasuredClass, part: MeasuredClass) -> tuple[float, float]:
    """Shares of forward and backward time; 1 where the whole takes none."""
    times = ((part.forward_s, whole.forward_s), (part.backward_s, whole.backward_s))
    forward, backward = (round(own / all_, 4) if all_ > 0 else 1.0 for own, all_ in times)
    return forward, backward


def local_shapes(graph: Graph, v: int, part: Part) -> dict[str, tuple[int, ...]]:
    """The local shapes of what an operator reads and makes, by name."""
    mesh, rule = part[0], rule_of(part[1])
    own, tensors, parameters = (
        graph.operators[v], tensors_by_name(graph), parameters_by_name(graph)
    )  # fmt: skip
    names = (*reads(own), *own.outputs)
    return {
        name: local_shape((tensors.get(name) or parameters[name]).shape, spec, mesh)
        for name, spec in zip(names, (*rule.inputs, *rule.outputs), strict=True)
    }


def _part_name(whole: str, graph: Graph, v: int, part: Part) -> str:
    """The name of a class of parts: of operators of one class, at the same local shapes, with the
    same attributes divided.

    Args:
        whole: name of the operator's class.
    """
    own = graph.operators[v]
    shapes = local_shapes(graph, v, part)
    divided: dict[str, int] = {}
    for size, axis in zip(part[0], rule_of(part[1]).axes, strict=True):
        for word in axis.local:
            divided[word] = divided.get(word, 1) * size
    content = [whole, [shapes[n] for n in (*reads(own), *own.outputs)], divided]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
