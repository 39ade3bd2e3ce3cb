"""Random plans of split operators, and what a mesh of threads makes of them."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import prod

import torch

from planner.artefacts.graph import parameters_by_name, tensors_by_name
from planner.artefacts.losses import losses
from planner.artefacts.plan import StagePrediction
from planner.artefacts.sharding import Sharding, local_shape, reads, rule_of, tiles
from planner.artefacts.strategy import KEEPABLE, Stage, crossings, used_devices
from planner.launcher.device_part import (
    StagePlace,
    local_parameters,
    stage_criteria,
    unreported_losses,
)
from planner.launcher.mesh.lines import queued
from planner.launcher.mesh.module import split_module
from planner.launcher.mesh.queue import INLINE, ThreadQueue
from planner.launcher.stage import StageModule
from planner.launcher.stash.segments import with_segments
from planner.operators import parameters, synthetic, to_torch
from planner.operators.convert import input_names, output_names
from planner.operators.losses import criterion
from planner.resharding.reshardings import homes
from planner.resharding.sums import coordinates
from tests.support.launch_worker import Case, make_plan
from tests.support.split_models import lines, whole_line
from tests.support.threads import on_all


def fits(shape, spec, mesh):
    try:
        tiles(shape, spec, mesh, 0)
    except ValueError:
        return False
    return True


def lines_for(model, operator, rules, size):
    """The rules of an operator for an axis of a size, the whole one first: those that were found,
    or those by hand.
    """
    if rules is None:
        return lines(model, operator)
    own = rules[model.graph.operators.index(operator)]
    found = [one.line for one in own if one.sizes is None or size in one.sizes]
    if operator.type == "BatchNormalization":  # running statistics are cut as the channels are
        found = [line.replace("S1,S0,S0,R,R->", "S1,S0,S0,S0,S0->") for line in found]
    return [whole_line(operator), *found]


def random_rule(model, operator, mesh, random, rules=None):
    """A rule that fits the sizes; attributes too, which are divided as their dimensions are."""
    described = {**tensors_by_name(model.graph), **parameters_by_name(model.graph)}
    candidates = [lines_for(model, operator, rules, size) for size in mesh]
    for _ in range(20):
        try:
            rule = rule_of([random.choice(some) for some in candidates])
        except ValueError:
            continue  # two cuts of one dimension, of blocks or where windows reach beyond one
        names = (*reads(operator), *operator.outputs)
        pairs = [*zip(names, (*rule.inputs, *rule.outputs), strict=True)]
        if all(fits(described[name].shape, spec, mesh) for name, spec in pairs):
            return rule
    return rule_of([some[0] for some in candidates])


def random_spec(shape, mesh, random, without=()):
    """A spec without summands that fits."""
    parts = ["R", *(f"S{d}" for d in range(len(shape)) if d not in without)]
    for _ in range(20):
        spec = tuple(random.choice(parts) for _ in mesh)
        if fits(shape, spec, mesh):
            return spec
    return ("R",) * len(mesh)


def statistics(model, operator, rule):
    """The specs of running statistics, which have to lie as their normalization reads them, and of
    other state, which is whole.
    """
    node = next(one for one in model.nodes if one.name == operator.name)
    if operator.type == "planner.NextState":
        return {node.inputs[1]: ("R",) * len(rule.outputs[0])}
    if operator.type != "BatchNormalization" or not node.attributes.get("training_mode"):
        return {}
    if node.attributes.get("always"):
        return {}
    read = dict(zip(reads(operator), rule.inputs, strict=True))
    return {name: read[name] for name in node.inputs[3:] if name in read}


def random_sharding(model, mesh, random, some=None, parameters=(), rules=None):
    """Every operator by a random rule, every leaf in a random spec.

    Args:
        some: the operators of a stage, by index; None for all.
        parameters: specs that parameters have to have, of (name, spec).
        rules: `SplitRule`s of every operator; None takes those by hand.
    """
    graph = model.graph
    chosen = range(len(graph.operators)) if some is None else some
    operators = [graph.operators[i] for i in chosen]
    tensors, held = tensors_by_name(graph), parameters_by_name(graph)
    names = dict.fromkeys(name for operator in operators for name in operator.parameters)
    without = {
        one.output.name: () if one.has_target else range(len(one.output.shape))
        for one in losses(graph)
    }
    chosen_rules = {one.name: random_rule(model, one, mesh, random, rules) for one in operators}
    fixed = dict(parameters)
    for one in operators:
        fixed |= statistics(model, one, chosen_rules[one.name])
    classes = {one.output.name: one.class_dim for one in losses(graph)}
    leaves = [
        {
            n: random_spec(tensors[n].shape, mesh, random, without.get(n, ()))
            for n in edge(graph, chosen)
        }
        for edge in (input_names, output_names)
    ]
    for name, spec in leaves[1].items():
        if spec.count(f"S{classes.get(name)}") > 1:  # classes are compared along one axis
            leaves[1][name] = ("R",) * len(mesh)
    return Sharding(
        mesh,
        chosen_rules,
        {name: random_spec(held[name].shape, mesh, random) for name in names} | fixed,
        *leaves,
    )


def cut_further(sharding, model, zero, random):
    """The same, with optimizer states (ZeRO-1), gradients too (ZeRO-2) or parameters (ZeRO-3) cut
    at random along axes where the parameter is whole.
    """
    lies, states = dict(sharding.parameters), {}
    for one in model.graph.parameters:
        if one.trainable and one.name in lies:
            spec = list(lies[one.name])
            for axis, part in enumerate(spec):
                dims = [d for d in range(len(one.shape)) if f"S{d}" not in spec[axis + 1 :]]
                if part == "R" and dims:
                    spec[axis] = f"S{random.choice(dims)}"
                    if not fits(one.shape, tuple(spec), sharding.mesh):
                        spec[axis] = "R"
            if tuple(spec) != lies[one.name]:
                states[one.name] = tuple(spec)
    if zero == 3:
        return replace(sharding, parameters={**lies, **states})
    return replace(sharding, states=states, gradients=states if zero == 2 else {})


def stage_of(model, sharding):
    names = tuple(operator.name for operator in model.graph.operators)
    return Stage(names, (tuple(range(prod(sharding.mesh))),), 1, False, sharding)


def plan_of(model, strategy, **changes):
    """A plan of any strategy, with ranks in another order than devices."""
    names = tuple(one.name for one in model.graph.operators)
    devices = used_devices(strategy)
    plan = make_plan(Case((1,)), model, [((0,), names)])
    one = plan.prediction.devices[0]
    prediction = replace(
        plan.prediction,
        stages=(StagePrediction(0.1, 0.2),) * len(strategy.stages),
        devices=tuple(replace(one, device=d, name=f"cpu{d}") for d in devices),
    )
    return replace(
        plan,
        strategy=strategy,
        ranks=(devices[-1], *devices[:-1]),
        crossings=crossings(strategy, model.graph),
        prediction=prediction,
        microbatch_size=model.batch,
        dtype="float64",
        **changes,
    )


def data(model, count=1):
    """Inputs and targets of microbatches."""
    (loss,) = losses(model.graph)
    return [
        (
            synthetic.inputs(model, seed=1, microbatch=m),
            synthetic.target(loss, seed=1, microbatch=m) if loss.has_target else None,
        )
        for m in range(count)
    ]


def alone(model, batches, wanted=()):
    """Loss, gradients of parameters, and those of float inputs, of one process."""
    values = parameters(model, [one.name for one in model.graph.parameters])
    module = to_torch(model, values=values)
    (loss,) = losses(model.graph)
    total = 0.0
    for inputs, target in batches:
        made = module(*(inputs[name] for name in module.input_names))
        output = made[module.output_names.index(loss.output.name)]
        total = total + mean_of(loss, output, target)
    total.backward()
    return total.item(), {n: v.grad for n, v in values.items() if v.requires_grad}


def mean_of(loss, output, target):
    """The loss of a microbatch alone."""
    value = criterion(loss)(output, target).value
    return value / (target != -100).sum() if loss.counts_targets else value


def local_run(model, stage, batches, mesh, recompute=False, *, begin=lambda values: None):
    """Loss told and local gradients on one device.

    Args:
        begin: is given the local parameters first.
    """
    torch.set_num_threads(1)
    sharding = stage.sharding
    if stage.prefetch is not None and mesh.queue is INLINE:
        mesh = queued(mesh, ThreadQueue())
    held = [one.name for one in model.graph.parameters]
    place = StagePlace(stage, 0, mesh, stage, mesh)
    values = local_parameters(model, held, place, "cpu")
    begin(values)
    module = split_module(model, stage, mesh, values, "cpu")
    some = losses(model.graph)
    runner = StageModule(
        module, model.graph, recompute, stage_criteria(some, place),
        unreported=unreported_losses(some, place),
        parted=partial(with_segments, stage=stage, graph=model.graph),
    )  # fmt: skip
    total = 0.0
    for m, (inputs, target) in enumerate(batches):
        local = {
            name: mesh.local_part(one, sharding.inputs.get(name, ("R",) * len(mesh.sizes)))
            for name, one in inputs.items()
        }
        goals = target_of(model, sharding, target, mesh)
        counted = {
            one.output.name: (target != -100).sum().item() if one.counts_targets else 1
            for one in some
        }
        total += runner.forward(m, local, goals, counted)[1].loss
        runner.backward(m, {})
    return total, {name: v.grad for name, v in values.items() if v.requires_grad}


def target_of(model, sharding, target, mesh):
    (loss,) = losses(model.graph)
    name = loss.output.name
    if loss.has_target and loss.class_dim is None:
        target = mesh.local_part(target, sharding.outputs.get(name, ("R",) * len(mesh.sizes)))
    return {name: target}


def random_segments(graph, random):
    """Segments of operators that are run again: about half of all, some behind each other, and
    about half of the products inside them kept.
    """
    names = tuple(one.name for one in graph.operators)
    kept = {one.name for one in graph.operators if one.type in KEEPABLE and random.random() < 0.5}
    ends = sorted(random.sample(range(len(names) + 1), min(len(names) + 1, random.choice((4, 8)))))
    parts = [names[a:b] for a, b in pairwise(ends)]
    some = [one for one in parts if random.random() < 0.7] or [names[: ends[0] + 1]]
    return tuple(
        tuple(name for i, name in enumerate(one) if i in (0, len(one) - 1) or name not in kept)
        for one in some
    )


def split(model, sharding, batches, recompute=False, prefetch=None, recomputed=()):
    """Loss, whole gradients, and how often each collective ran along each axis."""
    stage = replace(
        stage_of(model, sharding), prefetch=prefetch, recompute=recompute or bool(recomputed),
        recomputed=recomputed,
    )  # fmt: skip
    found, counts = on_all(
        sharding.mesh, lambda mesh: local_run(model, stage, batches, mesh, recompute)
    )
    home = homes(stage, model.graph)
    whole = {}
    for one in model.graph.parameters:
        if one.trainable:
            parts = [gradients[one.name] for _, gradients in found]
            whole[one.name] = together(parts, home[one.name].gradient, sharding.mesh, one.shape)
    return sum(told for told, _ in found), whole, counts


def together(parts, spec, mesh, shape):
    """The gradient that devices have together: the sum of summands, copies being equal."""
    whole = torch.zeros(shape, dtype=torch.float64)
    seen = {}
    for i, part in enumerate(parts):
        if part is None:
            part = torch.zeros(local_shape(shape, spec, mesh), dtype=torch.float64)
        key = tuple(x for x, part in zip(coordinates(i, mesh), spec, strict=True) if part != "R")
        if key in seen:
            torch.testing.assert_close(part, seen[key], rtol=1e-12, atol=1e-12)
            continue
        seen[key] = part
        box = tuple(slice(*ends) for ends in tiles(shape, spec, mesh, i)[0])
        whole[box] += part
    return whole


def error(found, expected):
    """The largest difference beside the largest number."""
    scale = expected.abs().max().clamp_min(1e-6)  # that of a bias of keys is zero in truth
    return ((found - expected).abs().max() / scale).item()
