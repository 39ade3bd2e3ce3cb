"""The space of one stage on one view of its devices: strategies of operators, and how parameters,
and tensors from outside, may lie.

A *view* is a mesh of every replica and, where there are several replicas, one axis more: the
replicas, each of which has microbatches of its own (`resharding/over_replicas.py`). So data
parallelism, ZeRO and FSDP are points of the same space as tensor parallelism. Where parts are kept
over some of the replicas, such as those of a host (HSDP), the others are another axis, along which
nothing is in parts.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod

from planner.artefacts.graph import Operator, Parameter
from planner.artefacts.profile import Profile, SplitRule
from planner.artefacts.sharding import (
    CHUNKS,
    OWN,
    AxisRule,
    Rule,
    Spec,
    blocks_of,
    dim_of,
    local_shape,
    reads,
)
from planner.solvers.intra.policy import ANYTHING, Policy
from planner.solvers.sharded.rules import Named, holds, named, rule_beside, rules_of
from planner.support.memo import remembered

LEVELS = (0, 1, 2, 3)
"""Of what lies in parts: nothing, the optimizer's state, gradients, parameters, each with those
before it."""


@dataclass(frozen=True)
class View:
    """Devices as a mesh.

    Attributes:
        mesh: of each replica; the size of each axis is at least 2, or there is one of a device.
        replicas: their number.
        devices: replica by replica, each row-major.
        masks: what is allowed along each axis of the mesh; anything where there are none.
        over: the number of successive replicas that keep parts together; 0 for all.
    """

    mesh: tuple[int, ...]
    replicas: int
    devices: tuple[int, ...]
    masks: tuple[Policy, ...] = ()
    over: int = 0

    @property
    def policies(self) -> tuple[Policy, ...]:
        """What is allowed along each axis of the mesh."""
        return self.masks or (ANYTHING,) * len(self.mesh)

    @property
    def sharing(self) -> int:
        """The number of replicas that keep parts together."""
        return self.over or self.replicas

    @property
    def replica_axes(self) -> tuple[int, ...]:
        """The sizes of the axes of the replicas, the last one of those that keep parts together."""
        axes = self.replicas // self.sharing, self.sharing
        return tuple(size for size in axes if size > 1)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of all axes, those of the replicas the last ones."""
        return (*self.mesh, *self.replica_axes)

    @cached_property
    def group(self) -> tuple[int, ...]:
        """The devices row-major by `sizes`."""
        n = prod(self.mesh)
        return tuple(
            self.devices[r * n + i] for i in range(n) for r in range(self.replicas)
        )  # fmt: skip

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each replica."""
        n = prod(self.mesh)
        return tuple(self.devices[r * n : (r + 1) * n] for r in range(self.replicas))


@dataclass(frozen=True)
class Lies:
    """How a parameter lies.

    Attributes:
        spec: on the mesh.
        level: of `LEVELS`, over the replicas.
        along: the axis of the mesh along which it is in parts of a level, and the part; None for
            none.
        mesh_level: that level.
    """

    spec: Spec
    level: int = 0
    along: tuple[int, str] | None = None
    mesh_level: int = 0

    @property
    def highest(self) -> int:
        """The level of whatever it is in parts over."""
        return max(self.level, self.mesh_level)

    def at(self, least: int, replica_axes: int = 0) -> Spec:
        """The spec, with the replicas, of what is in parts from a level on.

        Args:
            least: 3 of the parameter, 2 of its gradient, 1 of the state.
            replica_axes: the number of axes of the replicas.
        """
        spec = list(self.spec)
        if self.along is not None and self.mesh_level >= least:
            spec[self.along[0]] = self.along[1]
        replicas = ["R"] * replica_axes
        if replicas and self.level >= least:
            replicas[-1] = CHUNKS
        return (*spec, *replicas)


@remembered(kept=64)
def allowed(profile: Profile, axis: Policy, size: int) -> tuple[tuple[SplitRule, ...], ...]:
    """Per operator, the rules along an axis that divide what they cut; that of running whole is the
    first.
    """
    return tuple(
        tuple(one for i, one in enumerate(some) if not i or axis.rule(v, one.rule))
        for v, some in enumerate(_holding(profile, size))
    )


@remembered
def _holding(profile: Profile, size: int) -> tuple[tuple[SplitRule, ...], ...]:
    """Per operator, the rules that hold along an axis, the same objects in all of a class."""
    operators, about, every = profile.graph.operators, named(profile.graph), rules_of(profile)
    found: list[tuple[SplitRule, ...]] = []
    for v, k in enumerate(classes(profile)):
        some = (
            one for i, one in enumerate(every[v]) if not i or holds(one, operators[v], about, size)
        )
        found.append(found[k] if k < v else tuple(some))
    return tuple(found)


def strategies(
    profile: Profile, v: int, view: View, axes: Sequence[Sequence[SplitRule]]
) -> tuple[Rule, ...]:
    """All rules of an operator on a mesh: products of those along each axis that go together.

    Args:
        axes: per axis, what is allowed. Where an operator must not run whole along an axis, that
            is so unless no product without it goes.
    """
    must = [
        some[1:] if len(some) > 1 and policy.must(v) else some
        for some, policy in zip(axes, view.policies, strict=True)
    ]
    return tuple(_products(profile, v, view.mesh, must)) or tuple(
        _products(profile, v, view.mesh, axes)
    )


def _products(
    profile: Profile, v: int, mesh: tuple[int, ...], every: Sequence[Sequence[SplitRule]]
) -> Iterator[Rule]:
    operator, about = profile.graph.operators[v], named(profile.graph)
    for axes in product(*every):
        rule = rule_beside([one.rule for one in axes])
        if rule is not None and _divides(rule, operator, about, mesh):
            yield rule


def _divides(
    rule: Rule, operator: Operator, about: Mapping[str, Named], mesh: tuple[int, ...]
) -> bool:  # fmt: skip
    """Whether the axes divide together what each of them divides."""
    if len(mesh) == 1:
        return True
    names, specs = (*reads(operator), *operator.outputs), (*rule.inputs, *rule.outputs)
    for name, spec in zip(names, specs, strict=True):
        try:
            local_shape(about[name].shape, spec, mesh)
        except ValueError:
            return False
    return True


def with_replicas(rule: Rule, operator: Operator, axes: int) -> Rule:
    """The rule with so many axes of replicas."""
    inputs = (*[OWN] * len(operator.inputs), *["R"] * len(operator.parameters))
    return Rule((*rule.axes, *axes * [AxisRule(inputs, (OWN,) * len(operator.outputs))]))


def lies_of(parameter: Parameter, wanted: Sequence[Spec], view: View) -> tuple[Lies, ...]:
    """How a parameter may lie: in parts over replicas, or, without these, along the mesh.

    Args:
        wanted: the specs that its readers may want on the mesh.
    """
    specs = _at_rest(parameter.name, wanted, view)
    shared, further = view.replicas > 1, all(one.further for one in view.policies)
    parts = further and parameter.trainable and parameter.shape
    levels = LEVELS if parts and shared else (0,)
    found = [Lies(spec, level) for spec in specs for level in levels]
    if parts and not shared:
        found += [
            Lies(spec, 0, along, level)
            for spec in specs
            for along in _cuts(parameter, spec, view)
            for level in LEVELS[1:]
        ]
    return tuple(found)


def _cuts(parameter: Parameter, spec: Spec, view: View) -> Iterator[tuple[int, str]]:
    """Axes along which a parameter lies whole, each with the first dimension that it can cut."""
    for axis, part in enumerate(spec):
        if part != "R" or any(blocks_of(one) > 1 for one in spec):
            continue
        later = {dim_of(one) for one in spec[axis + 1 :]}
        for dim in (d for d in range(len(parameter.shape)) if d not in later):
            cut = (*spec[:axis], f"S{dim}", *spec[axis + 1 :])
            try:
                local_shape(parameter.shape, cut, view.mesh)
            except ValueError:
                continue
            yield axis, f"S{dim}"
            break


def comes(name: str, wanted: Sequence[Spec], view: View) -> tuple[Spec, ...]:
    """How a tensor from outside may come, on the mesh: whole, or as a reader wants it."""
    return tuple(
        spec
        for spec in _at_rest(name, wanted, view)
        if all(
            part == "R" or name in policy.lies or policy.comes(name, part)
            for part, policy in zip(spec, view.policies, strict=True)
        )
    )


def _at_rest(name: str, wanted: Sequence[Spec], view: View) -> dict[Spec, None]:
    """Whole, and as readers want a parameter or a tensor from outside; along axes where its part is
    given, that.
    """
    given = [policy.lies.get(name) for policy in view.policies]
    whole = ("R",) * len(view.mesh)
    return dict.fromkeys(
        tuple(part if lies is None else lies for part, lies in zip(spec, given, strict=True))
        for spec in [whole, *wanted]
        if "P" not in spec
    )


Mask = tuple[frozenset[tuple[str, str]], ...]
"""Along each axis of a mesh, some conversions: the parts before and after."""


def part_pairs(old: Collection[Spec], new: Collection[Spec]) -> Mask:
    """Along each axis of a mesh, all conversions: the parts before and after, which differ.

    Args:
        old: how a tensor may lie.
        new: how it may be wanted.
    """
    return tuple(
        frozenset((one, other) for one in before for other in after if one != other)
        for before, after in zip(
            map(set, zip(*old, strict=True)), map(set, zip(*new, strict=True)), strict=True
        )
    )


def conversion_mask(name: str, pairs: Mask, view: View) -> Mask:
    """The conversions of a tensor that are not allowed.

    Args:
        pairs: all along each axis.
    """
    return tuple(
        frozenset(pair for pair in some if not policy.conversion(name, *pair))
        for some, policy in zip(pairs, view.policies, strict=False)
    )


def masked(mask: Mask, old: Spec, new: Spec) -> bool:
    """Whether a conversion is not allowed along an axis of the mesh."""
    return any(pair in some for some, pair in zip(mask, zip(old, new, strict=True), strict=False))


@remembered
def classes(profile: Profile) -> tuple[int, ...]:
    """Per operator, the first one that costs the same by each rule."""
    first: dict[object, int] = {}
    return tuple(first.setdefault(_class(profile, v), v) for v in range(len(profile.operators)))


def _class(profile: Profile, v: int) -> object:
    operator, cost, about = profile.graph.operators[v], profile.operators[v], named(profile.graph)
    return (
        operator.type,
        tuple(about[name] for name in (*reads(operator), *operator.outputs)),
        replace(cost, name="", stash_tensors=(), parts=()),
        tuple((one.part, one.forward, one.backward) for one in cost.parts),
    )
