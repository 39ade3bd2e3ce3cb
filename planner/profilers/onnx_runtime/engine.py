"""`measure_onnxruntime`: a profile of a model that is run by ONNX Runtime on this machine.

Its profiler measures forward times. ONNX Runtime does not train, so backward times are estimated
from them, and the profile names the sources of the estimates. The stash is that of PyTorch, because
PyTorch trains.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import TYPE_CHECKING

from planner.artefacts.graph import main_dtype
from planner.artefacts.profile import Profile, Source
from planner.model.load import Model
from planner.model.modes import is_batch_norm, is_dropout, trains
from planner.profilers.backward import BackwardEstimates, estimates, shipped_ratios
from planner.profilers.devices import check_measuring, device_type, versions
from planner.profilers.onnx_runtime.runs import PROVIDERS, TRUNCATED_S, TimedRuns, place_of, run
from planner.profilers.origin import TimedOperator, profile_fields
from planner.profilers.reliability import interval
from planner.support.errors import OptionError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

LARGE_DIFFERENCE = 0.15
"""A larger difference between the sum of the kernels and a run in one piece is reported."""

BLOCKING = "CUDA_LAUNCH_BLOCKING"
"""An environment variable of CUDA; with 1, a launch lasts until its kernel is done."""

_is_blocking = False
"""Whether PyTorch has started CUDA within `_blocking_launches`."""

_MAX_TYPES = 6


def measure_onnxruntime(
    model: Model,
    *,
    model_path: str | None,
    provider: str = "cpu",
    threads: int = 1,
    repetitions: int = 10,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Profile:
    """The profile of a model: forward times of operators within runs of the whole model, backward
    times estimated. On a GPU, this process waits for each of its kernels from then on.

    Args:
        model: the model, with the batch of one microbatch.
        model_path: path that is written into the profile, as it is.
        provider: "cpu", "cuda" or "cuda:N".
        threads: number of CPU threads within an operator; ignored on other devices.
        repetitions: number of timed runs; their median counts.
        seed: seed of the synthetic inputs.
        progress: called with the number of runs done and of all.

    Raises:
        OptionError: if the device is not there, or a number is below 1.
        OperatorError: if an operator has no conversion to PyTorch, or ONNX Runtime does not run it.
    """
    from planner.operators import synthetic
    from planner.profilers.facts import facts
    from planner.profilers.losses import measured_losses

    graph, on_cpu = model.graph, provider == "cpu"
    with nullcontext() if on_cpu else _blocking_launches(provider):
        check_measuring(
            provider,
            threads,
            repetitions,
            "install PyTorch and onnxruntime-gpu for your CUDA driver",
        )
        known = facts(model)
        inputs = synthetic.inputs(model, seed=seed, microbatch=0)
        runs = run(
            model,
            {name: _array(value) for name, value in inputs.items()},
            device=provider,
            threads=threads,
            repetitions=repetitions,
            progress=progress,
        )
        loss_costs, unknown = measured_losses(
            graph, device=provider, threads=threads if on_cpu else None, seed=seed
        )
    estimated = estimates(graph, known, shipped_ratios(on_cpu))
    timed = [
        TimedOperator(
            fact.stash,
            fact.flops,
            fact.bytes_moved,
            forward_s=median(samples),
            backward_s=ratio * median(samples),
            interval=_interval(samples),
        )
        for fact, samples, ratio in zip(known, runs.samples, estimated.ratios, strict=True)
    ]
    return Profile(
        **profile_fields(model, model_path, graph, timed, known),
        dtype=main_dtype(graph),
        device_type=device_type(provider),
        source=Source.MEASURED,
        threads=threads if on_cpu else None,
        repetitions=repetitions,
        spread=round(median(map(_spread, filter(any, runs.samples))), 4),
        whole_step=None,
        versions=versions("onnxruntime"),
        engine=f"onnxruntime ({_who_ran(runs.providers)})",
        warnings=(
            *_run_warnings(runs, provider),
            *_mode_warning(model),
            _backward_warning(estimated),
            *unknown,
        ),
        loss_costs=loss_costs,
    )


@contextmanager
def _blocking_launches(device: str) -> Iterator[None]:
    """Within it, CUDA starts so that it waits for every kernel: the profiler reads the host's
    clock, so a launch has to last until its kernel is done. Afterwards the environment is as
    before, since child processes inherit it; CUDA, once started, goes on to wait in this process.
    """
    import torch

    global _is_blocking
    before = os.environ.get(BLOCKING)
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if started and before != "1" and not _is_blocking:
        raise OptionError(
            f"--engine onnxruntime --device {device}: expected to run before PyTorch uses CUDA,"
            f" because CUDA reads {BLOCKING} only when it starts; use a command of its own, or set"
            f" {BLOCKING}=1"
        )
    os.environ[BLOCKING] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[BLOCKING]
        else:
            os.environ[BLOCKING] = before
        if not started:
            _is_blocking = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _array(value: "Tensor") -> "np.ndarray":
    import ml_dtypes
    import torch

    if value.dtype == torch.bfloat16:
        return value.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return value.numpy()


def _spread(samples: tuple[float, ...]) -> float:
    return (max(samples) - min(samples)) / median(samples)


def _interval(samples: tuple[float, ...]) -> float:
    """Half the width of the confidence interval over the median, but at least the resolution of the
    profiler.

    >>> _interval((2.5e-6,) * 9)
    0.2
    """
    middle = median(samples)
    return max(interval(samples), round(TRUNCATED_S / middle, 4)) if middle else 0.0


def _who_ran(providers: Mapping[str, int]) -> str:
    """The execution providers that ran operators, the one with most operators first.

    >>> _who_ran({"CPUExecutionProvider": 7})
    'CPUExecutionProvider'
    >>> _who_ran({"CPUExecutionProvider": 1, "CUDAExecutionProvider": 7})
    '7 operators CUDAExecutionProvider, 1 CPUExecutionProvider'
    """
    if len(providers) == 1:
        return next(iter(providers))
    most_first = sorted(providers.items(), key=lambda item: (-item[1], item[0]))
    (name, count), *others = most_first
    return ", ".join((f"{count} operators {name}", *(f"{n} {other}" for other, n in others)))


def _run_warnings(runs: TimedRuns, device: str) -> Iterator[str]:
    """Reasons why the forward times may be wrong."""
    wanted = PROVIDERS[place_of(device)[0]]
    elsewhere = sum(n for name, n in runs.providers.items() if name != wanted)
    if elsewhere:
        yield (
            f"{elsewhere} operators ran on another provider than {wanted}, which has no kernel for"
            " them; their times include the copies to that provider and back"
        )
    if abs(runs.parts_per_whole - 1) > LARGE_DIFFERENCE:
        yield (
            "the forward times of the operators sum up to"
            f" {runs.parts_per_whole:.2f} of the time of the whole model in one piece: the machine"
            " was busy, or the operators are too short for ONNX Runtime's profiler, which counts"
            " microseconds"
        )


def _mode_warning(model: Model) -> Iterator[str]:
    """The operators that were timed in another mode than the model has them in."""
    moded = [node for node in model.nodes if is_batch_norm(node) or is_dropout(node)]
    if number := sum(trains(node, model.values) for node in moded):
        yield (
            f"{number} operators of the types BatchNormalization and Dropout were timed in"
            " evaluation mode, because ONNX Runtime does not train; use --engine torch"
        )


def _backward_warning(estimated: BackwardEstimates) -> str:
    text = (
        f"backward times are estimates, because ONNX Runtime does not train: {estimated.by_type}"
        " operators by PyTorch's ratio of backward to forward for their type in"
        f" {', '.join(estimated.files) or 'no profile'}"
    )
    if estimated.by_facts:
        text += f", {estimated.by_facts} by FLOPs or bytes moved ({_some(estimated.types)})"
    return text


def _some(names: tuple[str, ...]) -> str:
    more = len(names) - _MAX_TYPES
    shown = ", ".join(names[:_MAX_TYPES])
    return f"{shown} and {more} more types" if more > 0 else shown
