"""`measure`: a profile of what PyTorch really does on this machine.

1. Observe every operator once, in order: stash, views, FLOPs, calls per measurement.
2. Time the whole model, forward and backward, in one piece.
3. Time steps that are taken apart, operator by operator (timing.py).
4. Time the whole model again, because a drift says that the machine was busy.
"""

import platform
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import TYPE_CHECKING

from planner import __version__
from planner.errors import OptionError
from planner.graph import FLOAT_DTYPES, Graph, Operator, parameters_by_name, tensors_by_name
from planner.model import Model
from planner.profile import OperatorCost, Profile, Source, WholeStep

if TYPE_CHECKING:
    from torch import Tensor

    from planner.profilers.stash import Stash
    from planner.profilers.timing import Bench, Calls

WHOLE_STEPS = 3
"""How often the whole model is timed before and after, after one warm-up each."""

DEVICE_TYPES: Mapping[str, str] = {
    "NVIDIA A100-SXM4-40GB": "A100-SXM4-40GB",
    "NVIDIA A100-SXM4-80GB": "A100-SXM4-80GB",
    "NVIDIA H100 80GB HBM3": "H100-SXM",
    "NVIDIA H200": "H200-SXM",
    "NVIDIA L4": "L4",
    "Tesla T4": "T4",
    "Tesla V100-SXM2-16GB": "V100-SXM2-16GB",
}
"""What CUDA calls a device, and what topologies call it."""


@dataclass(frozen=True, slots=True)
class _Observed:
    """What the first run of an operator says."""

    stash: "Stash"
    flops: int
    calls: "Calls"


@dataclass(frozen=True, slots=True)
class _Run:
    """Everything that was found out; `times` has forward and backward by operator, repetition."""

    observed: "list[_Observed]"
    times: list[tuple[tuple[float, float], ...]]
    whole_step: WholeStep


def measure(
    model: Model,
    *,
    model_path: str | None,
    device: str = "cpu",
    threads: int = 1,
    repetitions: int = 3,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Profile:
    """Time every operator's forward and backward alone, and find out what it keeps.

    Args:
        model: with the batch of one microbatch.
        model_path: written into the profile, as is.
        device: "cpu", "cuda" or "cuda:N".
        threads: of the CPU; says nothing elsewhere.
        repetitions: timed steps, of which the median counts. An operator that takes less than
            0.5 ms is called several times in each.
        seed: of the synthetic inputs.
        progress: called with operators done and to do, over all repetitions.

    Raises:
        OptionError: if the device is not there, or a number is below 1.
        OperatorError: if an operator has no conversion.
    """
    import torch

    on_cpu = _check(device, threads, repetitions)
    graph = model.graph
    steps = count(1)
    found = _run(
        model,
        device,
        threads if on_cpu else None,
        repetitions,
        seed,
        lambda: progress(next(steps), len(graph.operators) * (1 + repetitions)),
    )
    parts = zip(graph.operators, found.observed, found.times, strict=True)
    return Profile(
        graph=graph,
        operators=tuple(_cost(graph, *part) for part in parts),
        views=tuple(view for one in found.observed for view in one.stash.views),
        model_path=model_path,
        model_hash=model.hash,
        dimensions=dict(model.dimensions),
        microbatch_size=model.batch,
        dtype=_main_dtype(graph),
        device_type="cpu" if on_cpu else _device_type(torch.cuda.get_device_name(device)),
        source=Source.MEASURED,
        threads=threads if on_cpu else None,
        repetitions=repetitions,
        spread=round(median(map(_spread, found.times)), 4),
        whole_step=found.whole_step,
        versions=_versions(),
    )


def _run(
    model: Model,
    device: str,
    threads: int | None,
    repetitions: int,
    seed: int,
    tick: Callable[[], None],
) -> _Run:
    """The four steps of this module."""
    import torch

    from planner.operators import parameters, synthetic
    from planner.profilers.timing import Bench, quiet
    from planner.profilers.unit import units

    graph = model.graph
    with quiet(threads):
        held = parameters(model, [p.name for p in graph.parameters], device)
        trained = [p.name for p in graph.parameters if p.trainable]
        bench = Bench(
            units=units(model, held, device),
            gradients={name: torch.zeros_like(held[name]) for name in trained},
            output=graph.outputs[0],
            device=device,
        )
        values = synthetic.inputs(model, seed=seed, microbatch=0, device=device)
        observed = _observe(bench, values, tick)
        gradient = synthetic.target(model, loss="mse", seed=seed, microbatch=0, device=device)
        whole_s = _whole(model, bench, held, values, gradient)
        before_s = whole_s()
        calls = [one.calls for one in observed]
        times = [bench.repetition(values, gradient, calls, tick) for _ in range(repetitions)]
        after_s = whole_s()
    return _Run(
        observed=observed,
        times=list(zip(*times, strict=True)),
        whole_step=WholeStep(round(before_s, 9), round(after_s, 9)),
    )


def _whole(
    model: Model,
    bench: "Bench",
    held: "Mapping[str, Tensor]",
    values: "Mapping[str, Tensor]",
    gradient: "Tensor",
) -> Callable[[], float]:
    """A function that times the whole model in one piece, in s.

    Args:
        held: parameters by name; their gradients become those of the bench.
        values: inputs of the graph by name.
        gradient: of the output.
    """
    from planner.operators import input_names, output_names, to_torch
    from planner.profilers.timing import whole_step_s

    everything = range(len(model.graph.operators))
    module = to_torch(model, everything, held, bench.device)
    for name, total in bench.gradients.items():
        held[name].grad = total
    inputs = [values[name] for name in input_names(model.graph, everything)]
    position = output_names(model.graph, everything).index(bench.output)
    return lambda: whole_step_s(
        lambda: module(*inputs)[position], gradient, bench.device, WHOLE_STEPS
    )


def _check(device: str, threads: int, repetitions: int) -> bool:
    """Whether the device is the CPU, once it is sure that it is there."""
    import torch

    for option, value in (("--threads", threads), ("--repetitions", repetitions)):
        if value < 1:
            raise OptionError(f"{option}: expected 1 or more, got {value}")
    if device == "cpu":
        return True
    kind, _, index = device.partition(":")
    if kind != "cuda" or not (index or "0").isdecimal():
        raise OptionError(f"--device: expected cpu, cuda or cuda:N, got {device!r}")
    num_devices = torch.cuda.device_count()
    if int(index or 0) >= num_devices:
        raise OptionError(
            f"--device {device}: expected a CUDA device, PyTorch {torch.__version__} finds "
            f"{num_devices} of them here; use --device cpu, or install PyTorch for your CUDA driver"
        )
    return False


def _observe(
    bench: "Bench", inputs: "Mapping[str, Tensor]", tick: Callable[[], None]
) -> "list[_Observed]":
    """What the first run of every operator says, in order."""
    from planner.profilers.stash import observe

    alive = dict(inputs)
    found = []
    for i, unit in enumerate(bench.units):
        flops = _flops(lambda unit=unit: unit.forward(*unit.leaves(alive)))  # type: ignore[misc]
        outputs, stash = observe(unit, alive)
        found.append(_Observed(stash, flops, bench.calls(i, unit.leaves(alive))))
        alive.update(
            (name, value.detach().requires_grad_(value.requires_grad))
            for name, value in zip(unit.outputs, outputs, strict=True)
        )
        for name in {*unit.inputs, *unit.outputs}:
            if bench.last_use.get(name, -1) <= i:
                del alive[name]
        tick()
    return found


def _flops(run: Callable[[], object]) -> int:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def _cost(
    graph: Graph,
    operator: Operator,
    observed: _Observed,
    repeated: tuple[tuple[float, float], ...],
) -> OperatorCost:
    """Figures of one operator; `repeated` holds forward and backward times."""
    tensors, parameters = tensors_by_name(graph), parameters_by_name(graph)
    forwards, backwards = zip(*repeated, strict=True)
    output_bytes = sum(tensors[name].bytes for name in operator.outputs)
    parameter_bytes = sum(parameters[name].bytes for name in operator.parameters)
    return OperatorCost(
        name=operator.name,
        forward_s=round(median(forwards), 9),
        backward_s=round(median(backwards), 9),
        output_bytes=output_bytes,
        parameter_bytes=parameter_bytes,
        flops=observed.flops,
        bytes_moved=(
            sum(tensors[name].bytes for name in operator.inputs) + parameter_bytes + output_bytes
        ),
        stash_tensors=tuple(
            sorted(observed.stash.tensors, key=(*operator.inputs, *operator.outputs).index)
        ),
        stash_private_bytes=observed.stash.private_bytes,
    )


def _spread(repeated: tuple[tuple[float, float], ...]) -> float:
    totals = [forward_s + backward_s for forward_s, backward_s in repeated]
    return (max(totals) - min(totals)) / median(totals)


def _main_dtype(graph: Graph) -> str:
    """The float dtype of most parameter bytes; of most tensor bytes where there are none."""
    for held in (graph.parameters, graph.tensors):
        sizes: Counter[str] = Counter()
        for one in held:
            if one.dtype in FLOAT_DTYPES:
                sizes[one.dtype] += one.bytes
        if sizes:
            return sizes.most_common(1)[0][0]
    raise ValueError("a model without floats")


def _device_type(name: str) -> str:
    return DEVICE_TYPES.get(name, name.replace(" ", "-"))


def _versions() -> dict[str, str]:
    import onnx
    import torch

    return {
        "onnx": onnx.__version__,
        "planner": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
