"""`measure`: a profile of what PyTorch really does on this machine.

1. Time the whole model, forward and backward, in one piece.
2. Go through the operators in order. Those that cost the same form a class (classes.py). The first
   one of each class is observed (stash, views, FLOPs) and timed alone (timing.py), unless the cache
   has it (cache.py); the others share its figures.
3. Time the whole model again, because a drift says that the machine was busy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from planner.errors import OperatorError
from planner.graph import Graph, main_dtype, parameters_by_name, retyped, tensors_by_name
from planner.model import Model
from planner.profilers.cache import Cache, Measured, cache_for, processor
from planner.profilers.classes import Flow, Surroundings, class_name, contiguous, surroundings
from planner.profilers.devices import (
    autocast_dtype,
    check_measuring,
    device_type,
    versions,
)
from planner.profilers.trust import (
    Conditions,
    busy,
    free_bytes,
    interval,
    training_bytes,
    warnings,
)
from planner.profiles import OperatorCost, Profile, Source, View, WholeStep

if TYPE_CHECKING:
    from torch import Tensor

    from planner.profilers.facts import Facts
    from planner.profilers.timing import Trial

PRECISION = 0.03
"""An operator is timed until the confidence interval of its median is that narrow."""


@dataclass(frozen=True, slots=True)
class Effort:
    """What a measurement took.

    Attributes:
        whole_s: time that the whole model was timed in, both times.
        operators_s: time that operators were observed and timed in.
        num_timed: operators that were timed.
        num_cached: classes of operators that the cache had.
        num_classes: classes altogether.
        kept: whether what was found is in the cache now.
        cache_problem: why not, if it could not be written.
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
    effort: Callable[[Effort], None] = lambda found: None,
) -> Profile:
    """Time every operator's forward and backward alone, and find out what it keeps.

    Args:
        model: with the batch of one microbatch.
        model_path: written into the profile, as is.
        device: "cpu", "cuda" or "cuda:N".
        threads: of the CPU; says nothing elsewhere.
        dtype: that floating-point work is done in where autocast allows it; the model's without.
        repetitions: least number of times that an operator is timed. One that takes less than
            0.5 ms is called several times in each.
        budget_s: time for each class of operators, after which it is left as uncertain as it is.
        seed: of the synthetic inputs.
        cached: whether to take what was measured before, and keep what is found.
        progress: called with operators done and to do.
        effort: called with what it took.

    Raises:
        OptionError: if the device is not there, a number is below 1, or the dtype is unknown.
        OperatorError: if an operator has no conversion.
    """
    import torch

    check_measuring(device, threads, repetitions)
    on_cpu = device == "cpu"
    name = processor() if on_cpu else torch.cuda.get_device_name(device)
    main = main_dtype(model.graph)
    amp = autocast_dtype(model.graph, dtype)
    held_threads = threads if on_cpu else None
    store = cache_for(name, held_threads, amp or main, torch.__version__) if cached else Cache(None)
    with_model = _Walk(model, device, amp, seed, (repetitions, budget_s), store)
    found = with_model.run(held_threads, progress)
    steps = [measured.repetitions for measured in found.operators]
    conditions = found.conditions
    profile = Profile(
        graph=found.graph,
        operators=tuple(map(_cost, [found.graph] * len(steps), range(len(steps)), found.operators)),
        views=_views(model.graph, found.operators),
        gradient_views=found.gradient_views,
        model_path=model_path,
        model_hash=model.hash,
        dimensions=dict(model.dimensions),
        microbatch_size=model.batch,
        dtype=amp or main,
        device_type=device_type(device),
        source=Source.MEASURED,
        threads=held_threads,
        repetitions=round(median(steps)),
        spread=round(median(measured.spread for measured in found.operators), 4),
        whole_step=found.whole_step,
        versions=versions(),
        engine="torch",
    )
    quiet_enough = not busy(profile, conditions)
    if quiet_enough:
        for key, measured in found.new.items():
            store.put(key, measured)
    effort(replace(found.effort, kept=quiet_enough and cached, cache_problem=store.problem))
    return replace(profile, warnings=warnings(profile, conditions))


@dataclass(frozen=True, slots=True)
class _Found:
    """All that a walk finds out; `new` has the classes that the cache did not."""

    graph: Graph
    operators: list[Measured]
    gradient_views: tuple[View, ...]
    new: dict[str, Measured]
    whole_step: WholeStep | None
    conditions: Conditions
    effort: Effort


class _Walk:
    """The three steps of this module, over one model."""

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
        # The parameters, where the whole model fits; else each operator reads its own.
        self.held: dict[str, Tensor] | None = None
        # Values of the tensors that operators from `self.next` on read.
        self.alive: dict[str, Tensor] = synthetic.inputs(
            model, seed=seed, microbatch=0, device=device
        )
        self.next = 0
        self.last_use = {n: i for i, o in enumerate(model.graph.operators) for n in o.inputs}

    def run(self, threads: int | None, progress: Callable[[int, int], None]) -> _Found:
        """Everything, on so many threads."""
        from planner.profilers.timing import quiet

        begin = perf_counter()
        with quiet(threads):
            whole, whole_s = self._whole(), []
            if whole:
                whole_s.append(whole())
            timed = perf_counter()
            known = self._facts()
            operators, new, num_classes = self._operators(known, progress)
            operators_s = perf_counter() - timed
            if whole:
                whole_s.append(whole())
        took_s = perf_counter() - begin
        made = zip(self.model.graph.operators, operators, strict=True)
        dtypes = {
            name: flow.dtype
            for operator, measured in made
            for name, flow in zip(operator.outputs, measured.outputs, strict=True)
        }
        graph = retyped(self.model.graph, dtypes)
        return _Found(
            graph=graph,
            operators=operators,
            gradient_views=tuple(view for one in known for view in one.gradient_views),
            new=new,
            whole_step=WholeStep(*(round(s, 9) for s in whole_s)) if whole_s else None,
            conditions=Conditions(threads, self.watch.wall_s, self.watch.cpu_s, whole is None),
            effort=Effort(
                took_s - operators_s,
                operators_s,
                len(new),
                num_classes - len(new),
                num_classes,
                kept=False,
                cache_problem=None,
            ),
        )

    def _whole(self) -> Callable[[], float] | None:
        """A function that times the whole model in one piece, in s; None if it does not fit."""
        import torch

        from planner.operators import (
            input_names,
            output_names,
            parameters,
            synthetic,
            to_torch,
        )
        from planner.operators.precision import autocast
        from planner.profilers.timing import whole_step_s

        graph, device = self.model.graph, self.device
        if training_bytes(graph) > free_bytes(device):
            return None
        self.held = parameters(self.model, [p.name for p in graph.parameters], device)
        module = to_torch(self.model, values=self.held, device=device)
        for weight in module.parameters():
            weight.grad = torch.zeros_like(weight)
        everything = range(len(graph.operators))
        inputs = [self.alive[name] for name in input_names(graph, everything)]
        position = output_names(graph, everything).index(graph.outputs[0])
        target = synthetic.target(
            self.model, loss="mse", seed=self.seed, microbatch=0, device=device
        )

        def forward() -> "Tensor":
            with autocast(device, self.dtype):
                output: Tensor = module(*inputs)[position]
            return output

        def whole() -> float:
            gradient = target.to(getattr(torch, self.dtype)) if self.dtype else target
            return whole_step_s(forward, gradient, self.watch)

        return whole

    def _facts(self) -> tuple["Facts", ...]:
        """What is known of operators beforehand; nothing where numbers decide what torch does."""
        from planner.profilers.facts import facts

        try:
            return facts(self.model, self.dtype)
        except OperatorError:
            return ()

    def _operators(
        self, facts: Sequence["Facts"], progress: Callable[[int, int], None]
    ) -> tuple[list[Measured], dict[str, Measured], int]:
        """What is found out about each operator, what of it is new, by class, and how many classes.

        Args:
            facts: of the operators, or nothing: gradients then lie as their tensors.
        """
        graph = self.model.graph
        tensors = tensors_by_name(graph)
        flows = {n: contiguous(tensors[n].shape, tensors[n].dtype) for n in graph.inputs}
        known: dict[str, Measured] = {}
        new: dict[str, Measured] = {}
        operators = []
        around = surroundings(graph)
        if facts:
            around = tuple(
                replace(one, arriving=fact.arriving)
                for one, fact in zip(around, facts, strict=True)
            )
        for i, own in enumerate(around):
            name = class_name(self.model, i, flows, own)
            if name not in known:
                had = self.cache.get(name)
                if had is None:
                    had = new[name] = self._measured(i, own)
                known[name] = had
            operators.append(known[name])
            flows.update(zip(graph.operators[i].outputs, known[name].outputs, strict=True))
            progress(i + 1, len(graph.operators))
        return operators, new, len(known)

    def _measured(self, operator: int, around: Surroundings) -> Measured:
        """Observe and time an operator, with the values that it gets."""
        from planner.operators.precision import autocast
        from planner.profilers.stash import observe
        from planner.profilers.timing import Trial
        from planner.profilers.unit import unit

        self._advance(operator)
        one = unit(self.model, operator, self.device, self.held)
        leaves = one.leaves(self.alive)
        with autocast(self.device, self.dtype):
            flops = _flops(lambda: one.forward(*leaves))
            outputs, stash = observe(one, self.alive)
        trial = Trial(one, leaves, around, self.watch, self.dtype, self.scratch)
        samples = _samples(trial, self.repetitions, self.budget_s)
        workspace_bytes = trial.workspace_bytes()
        del trial
        made = dict(zip(one.outputs, outputs, strict=True))
        self._leave(operator, made)
        totals = [forward_s + backward_s for forward_s, backward_s in samples]
        places = _places(self.model.graph, operator)
        return Measured(
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
                _flow(made[name]) for name in self.model.graph.operators[operator].outputs
            ),
        )

    def _advance(self, operator: int) -> None:
        """Compute the values that the operator gets."""
        from planner.operators.precision import autocast
        from planner.profilers.unit import unit

        while self.next < operator:
            one = unit(self.model, self.next, self.device, self.held)
            with autocast(self.device, self.dtype):
                outputs = one.forward(*one.leaves(self.alive))
            self._leave(self.next, dict(zip(one.outputs, outputs, strict=True)))

    def _leave(self, operator: int, made: "Mapping[str, Tensor]") -> None:
        """Keep what an operator has made for those that read it, and nothing else."""
        one = self.model.graph.operators[operator]
        for name, value in made.items():
            self.alive[name] = value.detach().requires_grad_(value.requires_grad)
        for name in {*one.inputs, *one.outputs}:
            if self.last_use.get(name, -1) <= operator:
                self.alive.pop(name, None)
        self.next = operator + 1


def _samples(trial: "Trial", least: int, budget_s: float) -> list[tuple[float, float]]:
    """Times of forward and backward until their median is sure or the budget is spent."""
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


def _flow(value: "Tensor") -> Flow:
    dtype = str(value.dtype).removeprefix("torch.")
    return Flow(tuple(value.shape), dtype, tuple(value.stride()), value.requires_grad)


def _places(graph: Graph, operator: int) -> tuple[str, ...]:
    """What places in a `Measured` stand for."""
    one = graph.operators[operator]
    return (*one.inputs, *one.outputs, *one.parameters)


def _cost(graph: Graph, index: int, measured: Measured) -> OperatorCost:
    """Figures of one operator."""
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


def _views(graph: Graph, operators: list[Measured]) -> tuple[View, ...]:
    return tuple(
        View(places[tensor], places[base])
        for i, measured in enumerate(operators)
        for places in [_places(graph, i)]
        for tensor, base in measured.views
    )
