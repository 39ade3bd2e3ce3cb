"""`measure`: a profile of a model, measured with PyTorch on this machine.

1. Time the whole model, forward and backward, in one piece.
2. Go through the operators in order. Operators that cost the same form a class (classes.py). The
   first one of each class is observed (stash, views, FLOPs) and timed alone (timing.py), unless the
   cache has its class (cache.py); the others share its figures.
3. Time the whole model again: a drift means that the machine was busy.
4. If the machine was quiet and figures of the cache do not agree with the whole model of today, do
   all of that once more without them.
5. On a CPU, time the forward of every operator once more within passes of the whole model. Scale
   the operators' times to the whole model, forward and backward apart.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from time import perf_counter
from typing import TYPE_CHECKING

from planner.artefacts.graph import (
    Graph,
    loss_outputs,
    main_dtype,
    parameters_by_name,
    retyped,
    tensors_by_name,
)
from planner.artefacts.profile import LossCost, OperatorCost, Profile, Source, View, WholeStep
from planner.model.load import Model
from planner.profilers.cache import Cache, MeasuredClass, cache_for, processor
from planner.profilers.classes import (
    Surroundings,
    TensorLayout,
    class_name,
    contiguous,
    surroundings,
)
from planner.profilers.devices import (
    autocast_dtype,
    check_measuring,
    device_type,
    versions,
)
from planner.profilers.origin import model_fields
from planner.profilers.summary import summary
from planner.profilers.trust import (
    Conditions,
    agrees,
    busy,
    free_bytes,
    interval,
    training_bytes,
    warnings,
)
from planner.support.errors import OperatorError

if TYPE_CHECKING:
    from torch import Tensor

    from planner.profilers.facts import Facts
    from planner.profilers.losses import RunnableLoss
    from planner.profilers.timing import StepTimes, Trial
    from planner.profilers.unit import Unit

PRECISION = 0.03
"""An operator is timed until the confidence interval of its median is as narrow as this."""


@dataclass(frozen=True, slots=True)
class Effort:
    """The time that measuring took, and the share of the cache in it.

    Attributes:
        whole_s: time spent on timing the whole model, before and after.
        operators_s: time spent on observing and timing operators.
        num_timed: number of operators that were timed.
        num_cached: number of operator classes that the cache had.
        num_classes: number of all operator classes.
        kept: whether the measurements are in the cache now.
        cache_problem: the reason if the cache could not be written, else None.
    """

    whole_s: float
    operators_s: float
    num_timed: int
    num_cached: int
    num_classes: int
    kept: bool
    cache_problem: str | None


def measure(
    model: Model,
    *,
    model_path: str | None,
    device: str = "cpu",
    threads: int = 1,
    dtype: str | None = None,
    repetitions: int = 3,
    budget_s: float = 1.0,
    seed: int = 0,
    cached: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
    effort: Callable[[Effort], None] = lambda effort: None,
) -> Profile:
    """The profile of a model: every operator's forward and backward timed alone, and its stash.

    Args:
        model: the model, with the batch of one microbatch.
        model_path: path that is written into the profile, as it is.
        device: "cpu", "cuda" or "cuda:N".
        threads: number of CPU threads; ignored on other devices.
        dtype: type of floating-point work where autocast allows it; None takes the model's.
        repetitions: minimum number of timed runs per operator. An operator that takes less than
            0.5 ms is called several times in each.
        budget_s: time for each class of operators; when it is spent, the class keeps its
            uncertainty.
        seed: seed of the synthetic inputs.
        cached: whether to reuse measurements made on this machine, and to store new ones.
        progress: called with the number of operators done and of all.
        effort: called with the time that measuring took.

    Raises:
        OptionError: if the device is not there, a number is below 1, or the dtype is unknown.
        OperatorError: if an operator has no conversion.
    """
    import torch

    from planner.profilers.losses import measured_losses

    check_measuring(device, threads, repetitions)
    on_cpu = device == "cpu"
    machine = processor() if on_cpu else torch.cuda.get_device_name(device)
    shorter = autocast_dtype(model.graph, dtype)
    main = shorter or main_dtype(model.graph)
    held_threads = threads if on_cpu else None
    store = cache_for(machine, held_threads, main, torch.__version__) if cached else Cache(None)

    def timed(cache: Cache) -> tuple[_MeasuredModel, Profile]:
        timer = ModelTimer(model, device, shorter, seed, (repetitions, budget_s), cache)
        measured = timer.run(held_threads, progress)
        return measured, Profile(
            graph=measured.graph,
            operators=tuple(
                _cost(measured.graph, i, one) for i, one in enumerate(measured.operators)
            ),
            views=_views(model.graph, measured.operators),
            gradient_views=measured.gradient_views,
            **model_fields(model, model_path),
            dtype=main,
            device_type=device_type(device),
            source=Source.MEASURED,
            threads=held_threads,
            repetitions=round(median(one.repetitions for one in measured.operators)),
            spread=round(median(one.spread for one in measured.operators), 4),
            whole_step=measured.whole_step,
            versions=versions(),
            engine="torch",
        )

    measured, profile = timed(store)
    # Figures of a quiet day are better than those of a busy one, with which they do not agree.
    quiet_enough, earlier = not busy(profile, measured.conditions), measured.effort.num_cached
    if quiet_enough and earlier and not agrees(profile, store.ratio(_name(model))):
        before = measured.effort
        measured, profile = timed(Cache(None))
        measured = replace(measured, effort=_both(before, measured.effort))
        quiet_enough = not busy(profile, measured.conditions)
    # An entry of the cache outlives this run, so times of a busy machine must not get into it.
    if quiet_enough:
        for name, one in measured.new.items():
            store.put(name, one)
        if measured.new and (ratio := summary(profile).sum_per_whole) is not None:
            store.put_ratio(_name(model), ratio)
    effort(replace(measured.effort, kept=quiet_enough and cached, cache_problem=store.problem))
    reasons = warnings(profile, measured.conditions)
    if measured.in_step is not None:
        profile = _in_step(profile, measured.in_step)
        loss_costs, unknown = measured.in_step.losses, measured.in_step.missing
    else:
        loss_costs, unknown = measured_losses(
            profile.graph, device=device, threads=held_threads, seed=seed
        )
    return replace(profile, warnings=(*reasons, *unknown), loss_costs=loss_costs)


@dataclass(frozen=True, slots=True)
class _InStep:
    """Times within steps of the whole model.

    Attributes:
        forward_s, backward_s: of the whole step, means of before and after.
        losses: the losses behind it.
        missing: why some are left out, as sentences.
        forwards_s: forward times of the operators, equal for those of one class; None where they
            are only known alone.
    """

    forward_s: float
    backward_s: float
    losses: tuple[LossCost, ...]
    missing: tuple[str, ...]
    forwards_s: list[float] | None


def _in_step(profile: Profile, known: _InStep) -> Profile:
    """The profile with the times of its operators in a step instead of alone: their sums are those
    of the whole step, forward and backward apart.
    """
    assert profile.whole_step is not None
    alone_s = [[one.forward_s, one.backward_s] for one in profile.operators]
    sides = [list(side) for side in zip(*alone_s, strict=True)]
    scaled = [
        _scaled(known.forwards_s or sides[0], known.forward_s),
        _scaled(sides[1], known.backward_s),
    ]
    times = zip(profile.operators, *scaled, strict=True)
    return replace(
        profile,
        operators=tuple(replace(cost, forward_s=f, backward_s=b) for cost, f, b in times),
        whole_step=replace(profile.whole_step, alone_s=round(sum(map(sum, alone_s)), 9)),
    )


def _scaled(parts_s: list[float], whole_s: float) -> list[float]:
    """Times in the same proportions, with another sum; zeros as they are."""
    factor = whole_s / sum(parts_s) if any(parts_s) else 1.0
    return [round(factor * part_s, 9) for part_s in parts_s]


def _name(model: Model) -> str:
    """The name of a model's ratio in the cache."""
    trained = [one.name for one in model.graph.parameters if one.trainable]
    known = [model.hash, model.batch, sorted(model.dimensions.items()), trained]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def _both(before: Effort, again: Effort) -> Effort:
    """The effort of measuring twice."""
    return replace(
        again,
        whole_s=before.whole_s + again.whole_s,
        operators_s=before.operators_s + again.operators_s,
        num_timed=before.num_timed + again.num_timed,
    )


@dataclass(frozen=True, slots=True)
class _MeasuredModel:
    """All measurements of one model.

    Attributes:
        graph: the graph, with the element types that its tensors have under autocast.
        operators: the measured class of each operator.
        gradient_views: as `Profile.gradient_views`.
        new: the classes that the cache did not have, by name.
        whole_step: times of the whole model; None if it was too large to be timed.
        in_step: times within it.
        conditions: the state of the machine meanwhile.
        effort: the time that measuring took.
    """

    graph: Graph
    operators: list[MeasuredClass]
    gradient_views: tuple[View, ...]
    new: dict[str, MeasuredClass]
    whole_step: WholeStep | None
    in_step: _InStep | None
    conditions: Conditions
    effort: Effort


class ModelTimer:
    """The three steps of this module, over one model.

    Attributes:
        model, device, dtype, cache: as of `measure`.
        watch: the stopwatch.
        held: parameters by name; None if not all fit into memory.
        alive: values of the tensors that the next operator and those behind it read.
    """

    def __init__(
        self,
        model: Model,
        device: str,
        dtype: str | None,
        seed: int,
        effort: tuple[int, float],
        cache: Cache,
    ) -> None:
        import torch

        from planner.operators import check, synthetic
        from planner.profilers.timing import CACHES_BYTES, Stopwatch

        check(model)
        self.model, self.device, self.dtype, self.cache = model, device, dtype, cache
        self.repetitions, self.budget_s = effort
        self.seed = seed
        self.watch: Stopwatch = Stopwatch(device)
        size = CACHES_BYTES[device.partition(":")[0]] // 4
        self.scratch: Tensor = torch.zeros(size, device=device)
        # The parameters, if the whole model fits into memory; else each operator reads its own.
        self.held: dict[str, Tensor] | None = None
        # Values of the tensors that operators from `self.next` on read, and of no others: memory
        # is that of a forward pass without a stash. Operators that share a class with an earlier
        # one are skipped, so `self.next` lags behind until a new class needs its inputs.
        self.alive: dict[str, Tensor] = synthetic.inputs(
            model, seed=seed, microbatch=0, device=device
        )
        self.next = 0
        self.losses: tuple[RunnableLoss, ...] = ()
        self.last_use = {n: i for i, o in enumerate(model.graph.operators) for n in o.inputs}

    def run(self, threads: int | None, progress: Callable[[int, int], None]) -> _MeasuredModel:
        """Measures everything on a number of CPU threads; None leaves it as it is."""
        from planner.profilers.timing import quiet

        begin = perf_counter()
        with quiet(threads):
            time_whole = self._whole()
            steps = [time_whole()] if time_whole else []
            operators_begin = perf_counter()
            known = self._facts()
            operators, new, num_classes = self._operators(known, progress)
            operators_s = perf_counter() - operators_begin
            in_step = None
            if time_whole:
                steps.append(time_whole())
                in_step = self._in_step(steps, operators)
        all_s = perf_counter() - begin
        dtypes = {
            name: layout.dtype
            for operator, measured in zip(self.model.graph.operators, operators, strict=True)
            for name, layout in zip(operator.outputs, measured.outputs, strict=True)
        }
        graph = retyped(self.model.graph, dtypes)
        return _MeasuredModel(
            graph=graph,
            operators=operators,
            gradient_views=tuple(view for one in known for view in one.gradient_views),
            new=new,
            whole_step=WholeStep(*(round(one.model_s, 9) for one in steps)) if steps else None,
            in_step=in_step,
            conditions=Conditions(threads, self.watch.wall_s, self.watch.cpu_s, time_whole is None),
            effort=Effort(
                whole_s=all_s - operators_s,
                operators_s=operators_s,
                num_timed=len(new),
                num_cached=num_classes - len(new),
                num_classes=num_classes,
                kept=False,
                cache_problem=None,
            ),
        )

    def hold(self) -> bool:
        """Reads all parameters, if the whole model fits into memory; whether it does."""
        from planner.operators import parameters

        graph = self.model.graph
        if training_bytes(graph) > free_bytes(self.device):
            return False
        self.held = parameters(self.model, [p.name for p in graph.parameters], self.device)
        return True

    def _whole(self) -> "Callable[[], StepTimes] | None":
        """A function that times a step of the whole model in one piece; None if it does not fit."""
        import torch

        from planner.operators import input_names, output_names, to_torch
        from planner.operators.running import autocast, naming_failed_operator
        from planner.profilers.losses import runnable_losses
        from planner.profilers.timing import whole_step_s

        graph, device = self.model.graph, self.device
        if not self.hold():
            return None
        module = to_torch(self.model, values=self.held, device=device)
        # As in every step but the first, gradients are added to those that are there.
        for weight in module.parameters():
            weight.grad = torch.zeros_like(weight)
        everything = range(len(graph.operators))
        inputs = [self.alive[name] for name in input_names(graph, everything)]
        names = output_names(graph, everything)
        positions = [names.index(name) for name in loss_outputs(graph)]
        self.losses = runnable_losses(graph, device=device, seed=self.seed)

        def forward() -> "list[Tensor]":
            with autocast(device, self.dtype):
                outputs = module.forward(*inputs)
            return [outputs[position] for position in positions]

        def whole() -> "StepTimes":
            with naming_failed_operator(self.model, module):
                return whole_step_s(forward, [one.run for one in self.losses], self.watch)

        return whole

    def _in_step(self, steps: "Sequence[StepTimes]", operators: list[MeasuredClass]) -> _InStep:
        """What steps of the whole model say of its parts."""
        losses_s = [
            [fmean(side) for side in zip(*some, strict=True)]
            for some in zip(*(one.losses_s for one in steps), strict=True)
        ]
        return _InStep(
            forward_s=fmean(one.forward_s for one in steps),
            backward_s=fmean(one.backward_s for one in steps),
            losses=tuple(
                LossCost(one.output, *(round(time_s, 9) for time_s in taken_s))
                for one, taken_s in zip(self.losses, losses_s, strict=True)
                if not one.missing
            ),
            missing=tuple(one.missing for one in self.losses if one.missing),
            forwards_s=self._forwards_s(operators) if self.device == "cpu" else None,
        )

    def _forwards_s(self, operators: list[MeasuredClass]) -> list[float]:
        """Forward times of the operators within passes of the whole model, each the mean of those
        of its class.
        """
        from planner.operators import synthetic
        from planner.profilers.timing import forwards_s
        from planner.profilers.unit import unit

        units = [unit(self.model, i, self.device, self.held) for i in range(len(operators))]
        inputs = synthetic.inputs(self.model, seed=self.seed, microbatch=0, device=self.device)
        each_s = forwards_s(units, inputs, self.dtype, self.watch)
        of_class = defaultdict(list)
        for one, time_s in zip(operators, each_s, strict=True):
            of_class[id(one)].append(time_s)
        mean_s = {key: fmean(some) for key, some in of_class.items()}
        return [mean_s[id(one)] for one in operators]

    def _facts(self) -> tuple["Facts", ...]:
        """The facts about the operators; none if the shapes of one depend on numbers."""
        from planner.profilers.facts import facts

        try:
            return facts(self.model, self.dtype)
        except OperatorError:
            return ()

    def _operators(
        self, facts: Sequence["Facts"], progress: Callable[[int, int], None]
    ) -> tuple[list[MeasuredClass], dict[str, MeasuredClass], int]:
        """The measured class of each operator, the new classes by name, and the number of classes.

        Args:
            facts: the facts about the operators; without, a gradient lies as its tensor does.
            progress: called with the number of operators done and of all.
        """
        graph = self.model.graph
        tensors = tensors_by_name(graph)
        layouts = {n: contiguous(tensors[n].shape, tensors[n].dtype) for n in graph.inputs}
        known: dict[str, MeasuredClass] = {}
        new: dict[str, MeasuredClass] = {}
        operators = []
        around = surroundings(graph)
        if facts:
            around = tuple(
                replace(one, arriving=fact.arriving)
                for one, fact in zip(around, facts, strict=True)
            )
        for i, own in enumerate(around):
            name = class_name(self.model, i, layouts, own)
            if name not in known:
                cached = self.cache.get(name)
                if cached is None:
                    cached = new[name] = self._measured(i, own)
                known[name] = cached
            operators.append(known[name])
            # The class tells how the outputs lie, so that the classes of the operators that read
            # them are known without running anything.
            layouts.update(zip(graph.operators[i].outputs, known[name].outputs, strict=True))
            progress(i + 1, len(graph.operators))
        return operators, new, len(known)

    def _measured(self, operator: int, around: Surroundings) -> MeasuredClass:
        """Observes and times an operator, with the values that it reads."""
        from planner.profilers.unit import unit

        self.advance(operator)
        one = unit(self.model, operator, self.device, self.held)
        measured, outputs = self.timed(operator, one, self.alive, around)
        self._leave(operator, dict(zip(one.outputs, outputs, strict=True)))
        return measured

    def timed(
        self, operator: int, one: "Unit", values: "Mapping[str, Tensor]", around: Surroundings
    ) -> "tuple[MeasuredClass, tuple[Tensor, ...]]":
        """Observes and times an operator, or a part of it; its outputs are given, too.

        Args:
            operator: its index.
            one: the operator, or the part.
            values: that it reads, by name.
            around: its surroundings.
        """
        from planner.operators.running import autocast, naming_operator
        from planner.profilers.stash import observe
        from planner.profilers.timing import Trial

        leaves = one.leaves(values)
        with naming_operator(self.model, operator):
            with autocast(self.device, self.dtype):
                flops = _flops(lambda: one.forward(*leaves))
                outputs, stash = observe(one, values)
            trial = Trial(one, leaves, around, self.watch, self.dtype, self.scratch)
            samples = _samples(trial, self.repetitions, self.budget_s)
            workspace_bytes = trial.workspace_bytes()
        del trial
        totals = [forward_s + backward_s for forward_s, backward_s in samples]
        places = _places(self.model.graph, operator)
        made = dict(zip(one.outputs, outputs, strict=True))
        measured = MeasuredClass(
            forward_s=round(median(forward_s for forward_s, _ in samples), 9),
            backward_s=round(median(backward_s for _, backward_s in samples), 9),
            interval=interval(totals),
            spread=round((max(totals) - min(totals)) / median(totals), 4),
            repetitions=len(samples),
            flops=flops,
            workspace_bytes=workspace_bytes,
            kept=tuple(sorted(places.index(name) for name in stash.tensors)),
            private_bytes=stash.private_bytes,
            views=tuple((places.index(v.tensor), places.index(v.base)) for v in stash.views),
            outputs=tuple(
                layout(made[name]) for name in self.model.graph.operators[operator].outputs
            ),
        )
        return measured, outputs

    def advance(self, operator: int) -> None:
        """Runs the operators before this one that have not run yet, forward only."""
        from planner.operators.running import autocast, naming_operator
        from planner.profilers.unit import unit

        while self.next < operator:
            one = unit(self.model, self.next, self.device, self.held)
            with naming_operator(self.model, self.next), autocast(self.device, self.dtype):
                outputs = one.forward(*one.leaves(self.alive))
            self._leave(self.next, dict(zip(one.outputs, outputs, strict=True)))

    def _leave(self, operator: int, made: "Mapping[str, Tensor]") -> None:
        """Keeps the outputs of an operator until their last reader has run, and drops the rest."""
        one = self.model.graph.operators[operator]
        for name, value in made.items():
            self.alive[name] = value.detach().requires_grad_(value.requires_grad)
        for name in {*one.inputs, *one.outputs}:
            if self.last_use.get(name, -1) <= operator:
                self.alive.pop(name, None)
        self.next = operator + 1


def _samples(trial: "Trial", least: int, budget_s: float) -> list[tuple[float, float]]:
    """Times of forward and backward, until their median is precise or the budget is spent."""
    calls = trial.calls()
    begin = perf_counter()
    samples = [trial.sample(calls) for _ in range(least)]
    while (
        perf_counter() - begin < budget_s
        and interval([forward_s + backward_s for forward_s, backward_s in samples]) > PRECISION
    ):
        samples.append(trial.sample(calls))
    return samples


def _flops(run: Callable[[], object]) -> int:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def layout(value: "Tensor") -> TensorLayout:
    """How a tensor lies in memory."""
    dtype = str(value.dtype).removeprefix("torch.")
    return TensorLayout(tuple(value.shape), dtype, tuple(value.stride()), value.requires_grad)


def _places(graph: Graph, operator: int) -> tuple[str, ...]:
    """The tensors and parameters that places in a `MeasuredClass` stand for."""
    one = graph.operators[operator]
    return (*one.inputs, *one.outputs, *one.parameters)


def _cost(graph: Graph, index: int, measured: MeasuredClass) -> OperatorCost:
    """The costs of one operator."""
    operator, places = graph.operators[index], _places(graph, index)
    tensors, parameters = tensors_by_name(graph), parameters_by_name(graph)
    output_bytes = sum(tensors[name].bytes for name in operator.outputs)
    parameter_bytes = sum(parameters[name].bytes for name in operator.parameters)
    return OperatorCost(
        name=operator.name,
        forward_s=measured.forward_s,
        backward_s=measured.backward_s,
        output_bytes=output_bytes,
        parameter_bytes=parameter_bytes,
        flops=measured.flops,
        bytes_moved=(
            sum(tensors[name].bytes for name in operator.inputs) + parameter_bytes + output_bytes
        ),
        stash_tensors=tuple(places[at] for at in measured.kept),
        stash_private_bytes=measured.private_bytes,
        workspace_bytes=measured.workspace_bytes,
        interval=measured.interval,
    )


def _views(graph: Graph, operators: list[MeasuredClass]) -> tuple[View, ...]:
    return tuple(
        View(places[tensor], places[base])
        for i, measured in enumerate(operators)
        for places in [_places(graph, i)]
        for tensor, base in measured.views
    )
