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

import numpy as np

from planner.artefacts.clocks import clocks_s, pass_times_s
from planner.artefacts.graph import (
    Graph,
    View,
    loss_outputs,
    main_dtype,
    parameters_by_name,
    retyped,
    tensors_by_name,
)
from planner.artefacts.profile import (
    SHORT_PARAMETERS,
    LossCost,
    Profile,
    Source,
    WholeStep,
    with_times,
)
from planner.artefacts.weight_gradients import has_both_gradients
from planner.model.load import Model
from planner.profilers.cache import Cache, MeasuredClass, cache_for, processor
from planner.profilers.classes import (
    GradientContext,
    TensorLayout,
    class_name,
    contiguous,
    surroundings,
)
from planner.profilers.devices import (
    autocast_dtype,
    check_measuring,
    device_type,
    trained_in,
    versions,
)
from planner.profilers.origin import TimedOperator, profile_fields
from planner.profilers.reliability import (
    Conditions,
    cache_agrees,
    free_bytes,
    interval,
    signs_of_load,
    training_bytes,
    warnings,
)
from planner.profilers.summary import summary
from planner.support.repeat import repeat

if TYPE_CHECKING:
    from torch import Tensor

    from planner.profilers.facts import Facts
    from planner.profilers.losses import RunnableLoss
    from planner.profilers.runnable import RunnableOperator
    from planner.profilers.timing import HostTimes, OperatorTimer, PassTimes, StepTimes

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


@dataclass(frozen=True, slots=True)
class Session:
    """Where operators are timed, and the cache of those that were timed there.

    Attributes:
        device: "cpu", "cuda" or "cuda:N".
        threads: number of CPU threads; None on other devices.
        autocast: the type that autocast computes in; None without autocast.
        dtype: the type that operators compute in.
        cache: the cache.
    """

    device: str
    threads: int | None
    autocast: str | None
    dtype: str
    cache: Cache


def session(
    graph: Graph, device: str, threads: int | None, dtype: str | None, *, cached: bool
) -> Session:
    """The session on a device; its arguments are those of `measure`.

    Raises:
        OptionError: if the dtype is unknown.
    """
    import torch

    on_cpu, shorter = device == "cpu", autocast_dtype(graph, dtype)
    threads, main = threads if on_cpu else None, shorter or main_dtype(graph)
    machine = processor() if on_cpu else torch.cuda.get_device_name(device)
    store = cache_for(machine, threads, main, torch.__version__) if cached else Cache(None)
    return Session(device, threads, shorter, main, store)


def measure(
    model: Model,
    *,
    model_path: str | None,
    device: str = "cpu",
    threads: int = 1,
    dtype: str | None = None,
    parameters: str | None = None,
    gradients: str | None = None,
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
        parameters, gradients: as of `devices.trained_in`.
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
    from planner.profilers.losses import measured_losses

    check_measuring(device, threads, repetitions)
    here = session(model.graph, device, threads, dtype, cached=cached)
    graph, parameter_dtype = trained_in(model.graph, here.autocast, parameters, gradients)
    model = replace(model, graph=graph)
    measured = ModelTimer(model, here, repetitions, budget_s, seed).run(progress)
    profile = _profile(model, model_path, here, measured)
    # Figures of a quiet day are better than those of a busy one, with which they do not agree.
    quiet_enough, earlier = (
        not signs_of_load(profile, measured.conditions),
        measured.effort.num_cached,
    )
    if quiet_enough and earlier and not cache_agrees(profile, here.cache.ratio(_name(model))):
        before = measured.effort
        fresh = replace(here, cache=Cache(None))
        measured = ModelTimer(model, fresh, repetitions, budget_s, seed).run(progress)
        measured = replace(measured, effort=_both(before, measured.effort))
        profile = _profile(model, model_path, here, measured)
        quiet_enough = not signs_of_load(profile, measured.conditions)
    # An entry of the cache outlives this run, so times of a busy machine must not get into it.
    if quiet_enough:
        here.cache.put_all(measured.new)
        if measured.new and (ratio := summary(profile).sum_per_whole) is not None:
            here.cache.put_ratio(_name(model), ratio)
    kept, problem = quiet_enough and cached, here.cache.problem
    effort(replace(measured.effort, kept=kept, cache_problem=problem))
    reasons = warnings(profile, measured.conditions)
    if measured.in_step is not None:
        profile = _scaled_to_step(profile, measured.in_step)
        loss_costs, unknown = measured.in_step.losses, measured.in_step.missing
    else:
        loss_costs, unknown = measured_losses(
            profile.graph, device=device, threads=here.threads, seed=seed
        )
    return replace(
        profile, warnings=(*reasons, *unknown), loss_costs=loss_costs,
        parameter_dtype=parameter_dtype,
        casts_once=here.autocast is not None,
    )  # fmt: skip


def _profile(
    model: Model, model_path: str | None, here: Session, measured: "_MeasuredModel"
) -> Profile:
    """The profile of the operators one by one, without losses and warnings."""
    graph = measured.graph
    operators = [_timed_operator(graph, v, one) for v, one in enumerate(measured.operators)]
    return Profile(
        **profile_fields(model, model_path, graph, operators, measured.facts),
        dtype=here.dtype,
        device_type=device_type(here.device),
        source=Source.MEASURED,
        threads=here.threads,
        repetitions=round(median(one.repetitions for one in measured.operators)),
        spread=round(median(one.spread for one in measured.operators), 4),
        whole_step=measured.whole_step,
        versions=versions(),
        engine="torch",
    )


def _timed_operator(graph: Graph, v: int, measured: MeasuredClass) -> TimedOperator:
    """The work and the times of an operator, from those of its class."""
    from planner.profilers.runnable import Stash

    places, tensors, parameters = (
        _places(graph, v),
        tensors_by_name(graph),
        parameters_by_name(graph),
    )
    return TimedOperator(
        Stash(
            tensors=tuple(places[at] for at in measured.kept),
            private_bytes=measured.private_bytes,
            views=tuple(View(places[tensor], places[base]) for tensor, base in measured.views),
        ),
        flops=measured.flops,
        bytes_moved=sum((tensors.get(name) or parameters[name]).bytes for name in places),
        forward_s=measured.forward_s,
        backward_s=measured.backward_s,
        workspace_bytes=measured.workspace_bytes,
        interval=measured.interval,
        backward_weight_s=measured.backward_weight_s,
        host_forward_s=measured.host_forward_s,
        host_backward_s=measured.host_backward_s,
    )


@dataclass(frozen=True, slots=True)
class _TimesInStep:
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


def _scaled_to_step(profile: Profile, known: _TimesInStep) -> Profile:
    """The profile with the times of its operators in a step instead of alone: its passes take as
    long as those of the whole step, forward and backward apart.
    """
    assert profile.whole_step is not None
    device_s, host_s = clocks_s(profile)
    alone_s = sum(pass_times_s(device_s, host_s))
    if known.forwards_s:
        device_s = np.array([known.forwards_s, device_s[1]])
    passes_s = np.array([pass_times_s(device_s, host_s)]).T
    whole_s = np.array([[known.forward_s], [known.backward_s]])
    factors = np.divide(whole_s, passes_s, out=np.ones_like(whole_s), where=passes_s > 0)
    in_step_s = [(factors * clock_s).round(9).T.tolist() for clock_s in (device_s, host_s)]
    return replace(
        profile,
        operators=tuple(
            with_times(cost, own_s[0], own_s[1], (started_s[0], started_s[1]))
            for cost, own_s, started_s in zip(profile.operators, *in_step_s, strict=True)
        ),
        whole_step=replace(profile.whole_step, alone_s=round(alone_s, 9)),
    )


def _name(model: Model) -> str:
    """The name of a model's ratio in the cache."""
    trained = [
        one.name if one.dtype != SHORT_PARAMETERS else f"{one.name} in {one.dtype}"
        for one in model.graph.parameters
        if one.trainable
    ]
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
        facts: the facts about each; none if the shapes of one depend on numbers.
        new: the classes that the cache did not have, by name.
        whole_step: times of the whole model; None if it was too large to be timed.
        in_step: times within it.
        conditions: the state of the machine meanwhile.
        effort: the time that measuring took.
    """

    graph: Graph
    operators: list[MeasuredClass]
    facts: "tuple[Facts, ...]"
    new: dict[str, MeasuredClass]
    whole_step: WholeStep | None
    in_step: _TimesInStep | None
    conditions: Conditions
    effort: Effort


class ModelTimer:
    """The steps of this module, over one model.

    Attributes:
        model, repetitions, budget_s, seed: as of `measure`.
        here: the session.
        watch: the stopwatch.
        held: parameters by name; None if not all fit into memory.
        alive: values of the tensors that the next operator and those behind it read.
    """

    def __init__(
        self, model: Model, here: Session, repetitions: int, budget_s: float, seed: int
    ) -> None:
        from planner.operators import check
        from planner.profilers.timing import Stopwatch

        check(model)
        self.model, self.here, self.seed = model, here, seed
        self.repetitions, self.budget_s = repetitions, budget_s
        self.watch: Stopwatch = Stopwatch(here.device)
        # The parameters, if the whole model fits into memory; else each operator reads its own.
        self.held: dict[str, Tensor] | None = None
        # Values of the tensors that operators from `self.next` on read, and of no others: memory
        # is that of a forward pass without a stash. Operators that share a class with an earlier
        # one are skipped, so `self.next` lags behind until a new class needs its inputs.
        self.alive: dict[str, Tensor] = self._inputs()
        self.next = 0
        self.losses: tuple[RunnableLoss, ...] = ()
        self.last_use = {n: i for i, o in enumerate(model.graph.operators) for n in o.inputs}

    def _inputs(self) -> "dict[str, Tensor]":
        """Synthetic inputs of the model, on the device."""
        from planner.operators import synthetic

        return synthetic.inputs(self.model, seed=self.seed, microbatch=0, device=self.here.device)

    def _unit(self, operator: int) -> "RunnableOperator":
        from planner.profilers.runnable import unit

        casts = self.here.autocast is not None
        return unit(self.model, operator, self.here.device, self.held, casts=casts)

    def run(self, progress: Callable[[int, int], None]) -> _MeasuredModel:
        """Measures everything on the session's number of CPU threads."""
        from planner.profilers.facts import facts_if_shapes_are_known
        from planner.profilers.timing import quiet

        begin = perf_counter()
        with quiet(self.here.threads):
            time_whole = self._whole()
            steps = [time_whole()] if time_whole else []
            operators_begin = perf_counter()
            facts = facts_if_shapes_are_known(self.model, self.here.autocast)
            operators, new, num_classes = self._operators(facts, progress)
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
        watch, threads = self.watch, self.here.threads
        return _MeasuredModel(
            graph=retyped(self.model.graph, dtypes),
            operators=operators,
            facts=facts,
            new=new,
            whole_step=WholeStep(*(round(one.model_s, 9) for one in steps)) if steps else None,
            in_step=in_step,
            conditions=Conditions(threads, watch.wall_s, watch.cpu_s, time_whole is None),
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
        if training_bytes(graph) > free_bytes(self.here.device):
            return False
        self.held = parameters(self.model, [p.name for p in graph.parameters], self.here.device)
        return True

    def _whole(self) -> "Callable[[], StepTimes] | None":
        """A function that times a step of the whole model in one piece; None if it does not fit."""
        import torch

        from planner.operators import input_names, output_names, to_torch
        from planner.operators.casting import cast_once
        from planner.operators.running import autocast, naming_failed_operator
        from planner.profilers.losses import runnable_losses
        from planner.profilers.timing import whole_step_s

        graph, device = self.model.graph, self.here.device
        if not self.hold():
            return None
        module = to_torch(self.model, values=self.held, device=device)
        if self.here.autocast is not None:
            cast_once(module, graph)
        # As in every step but the first, gradients are added to those that are there.
        for weight in module.parameters():
            weight.grad = torch.zeros_like(weight)
        everything = range(len(graph.operators))
        inputs = [self.alive[name] for name in input_names(graph, everything)]
        names = output_names(graph, everything)
        positions = [names.index(name) for name in loss_outputs(graph)]
        self.losses = runnable_losses(graph, device=device, seed=self.seed)

        def forward() -> "list[Tensor]":
            with autocast(device, self.here.autocast):
                outputs = module.forward(*inputs)
            return [outputs[position] for position in positions]

        def whole() -> "StepTimes":
            with naming_failed_operator(self.model, module):
                return whole_step_s(forward, [one.run for one in self.losses], self.watch)

        return whole

    def _in_step(
        self, steps: "Sequence[StepTimes]", operators: list[MeasuredClass]
    ) -> _TimesInStep:  # fmt: skip
        """What steps of the whole model say of its parts."""
        from planner.profilers.timing import combined

        step = combined(steps, fmean)
        return _TimesInStep(
            forward_s=step.forward_s,
            backward_s=step.backward_s,
            losses=tuple(
                LossCost(one.output, *(round(time_s, 9) for time_s in times_s))
                for one, times_s in zip(self.losses, step.losses_s, strict=True)
                if not one.missing
            ),
            missing=tuple(one.missing for one in self.losses if one.missing),
            forwards_s=self._forwards_s(operators) if self.here.device == "cpu" else None,
        )

    def _forwards_s(self, operators: list[MeasuredClass]) -> list[float]:
        """Forward times of the operators within passes of the whole model, each the mean of those
        of its class.
        """
        from planner.profilers.timing import forwards_s

        units = [self._unit(i) for i in range(len(operators))]
        each_s = forwards_s(units, self._inputs(), self.here.autocast, self.watch)
        of_class = defaultdict(list)
        for one, time_s in zip(operators, each_s, strict=True):
            of_class[id(one)].append(time_s)
        mean_s = {key: fmean(some) for key, some in of_class.items()}
        return [mean_s[id(one)] for one in operators]

    def _operators(
        self, facts: Sequence["Facts"], progress: Callable[[int, int], None]
    ) -> tuple[list[MeasuredClass], dict[str, MeasuredClass], int]:
        """The measured class of each operator, the new classes by name, and the number of classes.

        Args:
            facts: see `surroundings`.
            progress: called with the number of operators done and of all.
        """
        graph = self.model.graph
        tensors = tensors_by_name(graph)
        layouts = {n: contiguous(tensors[n].shape, tensors[n].dtype) for n in graph.inputs}
        known: dict[str, MeasuredClass] = {}
        new: dict[str, MeasuredClass] = {}
        operators = []
        for i, around in enumerate(surroundings(graph, facts)):
            name = class_name(self.model, i, layouts, around)
            if name not in known:
                cached = self.here.cache.get(name)
                if cached is None:
                    cached = new[name] = self._measured(i, around)
                known[name] = cached
            operators.append(known[name])
            # The class tells how the outputs lie, so that the classes of the operators that read
            # them are known without running anything.
            layouts.update(zip(graph.operators[i].outputs, known[name].outputs, strict=True))
            progress(i + 1, len(graph.operators))
        return operators, new, len(known)

    def _measured(self, operator: int, around: GradientContext) -> MeasuredClass:
        """Observes and times an operator, with the values that it reads."""
        self.advance(operator)
        one = self._unit(operator)
        measured, outputs = self.timed(operator, one, self.alive, around)
        self._leave(operator, dict(zip(one.outputs, outputs, strict=True)))
        return measured

    def timed(
        self,
        operator: int,
        one: "RunnableOperator",
        values: "Mapping[str, Tensor]",
        around: GradientContext,
    ) -> "tuple[MeasuredClass, tuple[Tensor, ...]]":
        """Observes and times an operator, or a part of it; its outputs are given, too.

        Args:
            operator: its index.
            one: the operator, or the part.
            values: that it reads, by name.
            around: its surroundings.
        """
        from planner.operators.running import autocast, naming_operator
        from planner.profilers.runnable import observe
        from planner.profilers.timing import OperatorTimer

        leaves = one.leaves(values)
        with naming_operator(self.model, operator):
            with autocast(self.here.device, self.here.autocast):
                flops = _flops(lambda: one.forward(*leaves))
                outputs, stash = observe(one, values)
            timer = OperatorTimer(
                one,
                leaves,
                around,
                self.watch,
                self.here.autocast,
                halves=has_both_gradients(self.model.graph, operator),
            )
            samples, host = _samples(timer, self.repetitions, self.budget_s)
            workspace_bytes = timer.workspace_bytes()
        del timer
        totals = [sample.total_s for sample in samples]
        of_weight_s = [sample.weight_s for sample in samples if sample.weight_s is not None]
        places = _places(self.model.graph, operator)
        made = dict(zip(one.outputs, outputs, strict=True))
        measured = MeasuredClass(
            forward_s=round(median(sample.forward_s for sample in samples), 9),
            backward_s=round(median(sample.backward_s for sample in samples), 9),
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
            backward_weight_s=round(median(of_weight_s), 9) if of_weight_s else None,
            host_forward_s=round(host.forward_s, 9),
            host_backward_s=round(host.backward_s, 9),
        )
        return measured, outputs

    def advance(self, operator: int) -> None:
        """Runs the operators before this one that have not run yet, forward only."""
        from planner.operators.running import autocast, naming_operator

        while self.next < operator:
            one = self._unit(self.next)
            with (
                naming_operator(self.model, self.next),
                autocast(self.here.device, self.here.autocast),
            ):
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


def _samples(
    timer: "OperatorTimer", least: int, budget_s: float
) -> "tuple[list[PassTimes], HostTimes]":
    """Times of forward and backward, until their median is precise or the budget is spent, and
    those of the host.
    """
    calls = timer.calls()
    host = timer.host_times(calls)
    samples = repeat(
        lambda: timer.sample(calls, host),
        least=least,
        budget_s=budget_s,
        precise=lambda samples: interval([one.total_s for one in samples]) <= PRECISION,
    )
    return samples, host


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
