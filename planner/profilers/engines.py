"""The engines that make profiles.

torch        forward and backward of each operator, measured on this machine
onnxruntime  forward measured on this machine, backward estimated
analytic     both computed from FLOPs and bytes, for any type in the device table
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from planner.artefacts.profile import Profile
from planner.clusters.yaml.read import shipped_device_type
from planner.model.load import Model
from planner.profilers.contention import contention_of, machine_contention
from planner.profilers.devices import check_measuring, device_type
from planner.profilers.measured import Effort, measure
from planner.profilers.options import Measuring, ProfileEngine
from planner.support.errors import OptionError

if TYPE_CHECKING:
    from planner.profilers.analytic import RooflineFit
    from planner.profilers.compare import EngineComparison


def engine_for(device: str, engine: str | None) -> ProfileEngine:
    """The engine for a device.

    Args:
        device: "cpu", "cuda", "cuda:N", or a type in the device table, which is not on this machine
            and so is computed.
        engine: name of the engine that the user asked for; None takes the one that fits the device.

    Raises:
        OptionError: if engine and device do not go together; an unknown type lists the known ones.
    """
    here = device == "cpu" or device.partition(":")[0] == "cuda"
    usual = ProfileEngine.TORCH if here else ProfileEngine.ANALYTIC
    chosen = ProfileEngine(engine) if engine else usual
    if chosen is ProfileEngine.ANALYTIC:
        shipped_device_type(device)
    elif not here:
        raise OptionError(
            f"--engine {chosen.value}: expected --device cpu, cuda or cuda:N, which can be measured"
            f" here, got {device!r}; omit --engine to compute a profile for a type of device"
        )
    return chosen


def profile_file(
    stem: str, device: str, engine: str | None, dtype: str | None, *,
    parameters: str | None = None, compiled: bool = False, fused_loss: bool = False,
    launch_blocking: bool = False,
) -> str:  # fmt: skip
    """The usual file name of a profile: the model's name alone, where it was measured by PyTorch on
    this CPU in float32.

    Args:
        stem: the model's name.
        device, engine, dtype, parameters, compiled, fused_loss, launch_blocking: as the user asked
            for them; see `engine_for` and `Measuring`.

    Raises:
        OptionError: if the device is not there.

    >>> profile_file("gpt2", "cpu", None, None), profile_file("gpt2", "T4", None, "bfloat16")
    ('gpt2.json', 'gpt2-T4-bfloat16.json')
    """
    usual = engine_for(device, None)
    if usual is not ProfileEngine.ANALYTIC:
        check_measuring(device, threads=1, repetitions=1)
        device = device_type(device)
    parts = [
        stem,
        *([] if device == "cpu" else [device]),
        *([] if dtype in (None, "float32") else [str(dtype)]),
        *([] if engine in (None, usual) else [str(engine)]),
        *([] if parameters in (None, "float32") else [f"{parameters}-parameters"]),
        *(["compiled"] if compiled else []),
        *(["fused-loss"] if fused_loss else []),
        *(["launch-blocking"] if launch_blocking else []),
    ]
    return "-".join(parts).replace("/", "-") + ".json"


def profile_with(
    engine: ProfileEngine,
    model: Model,
    model_path: str,
    how: Measuring,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
    effort: Callable[[Effort], None] = lambda effort: None,
    growth: bool = True,
) -> Profile:
    """A profile of the model by the engine.

    Args:
        engine: the engine.
        model: the model, with the batch of one microbatch.
        model_path: path that is written into the profile, as it is.
        how: how to measure, and on which device.
        progress: called with the number of measurements done and of all.
        effort: called with the time that measuring took, by the engine torch.
        growth: whether one that is computed is made good for any size of the microbatch.

    Raises:
        OptionError: if an option does not fit the engine or the device is not there.
        OperatorError: if an operator has no conversion.
    """
    from planner.profilers.rules import with_rules

    if engine is ProfileEngine.ANALYTIC:
        return _computed(model, model_path, how, growth=growth)
    for flag in ("compiled", "fused_loss", "launch_blocking"):
        if getattr(how, flag):
            raise OptionError(
                f"--{flag.replace('_', '-')} is for computed profiles; --engine {engine.value} runs"
                " operators alone"
            )
    profile = _measured(engine, model, model_path, how, progress=progress, effort=effort)
    profile = with_rules(profile, model, cached=how.cache)
    if how.device != "cpu" or not how.contention:
        return profile
    machine, warning = machine_contention(how.threads, cached=how.cache)
    return replace(
        profile,
        contention=None if machine is None else contention_of(profile, machine),
        warnings=(*profile.warnings, *filter(None, [warning])),
    )


def _computed(model: Model, model_path: str, how: Measuring, *, growth: bool) -> Profile:
    """The same by the engine that computes."""
    from planner.profilers.analytic import Computed, computed
    from planner.profilers.efficiencies import rates_of
    from planner.profilers.roofline.growth import with_growth
    from planner.profilers.rules import split_rules, with_rules

    kind = shipped_device_type(how.device)

    def compute(model: Model) -> Computed:
        return computed(
            model, model_path=model_path, kind=kind, dtype=how.dtype, parameters=how.parameters,
            gradients=how.gradients, compiled=how.compiled, fused_loss=how.fused_loss,
            launch_blocking=how.launch_blocking,
        )  # fmt: skip

    own = compute(model)
    profile = with_rules(own.profile, model, cached=how.cache)
    if not growth:
        return profile
    return with_growth(
        replace(own, profile=profile),
        model,
        rates_of(kind, own.profile.dtype, compiled=how.compiled),
        compute=compute,
        rules_of=partial(split_rules, cached=how.cache),
    )


def _measured(
    engine: ProfileEngine,
    model: Model,
    model_path: str,
    how: Measuring,
    *,
    progress: Callable[[int, int], None],
    effort: Callable[[Effort], None],
) -> Profile:
    """The same by an engine that measures, without contention."""
    repetitions = {} if how.repetitions is None else {"repetitions": how.repetitions}
    if engine is ProfileEngine.ONNXRUNTIME:
        from planner.profilers.onnx_runtime.engine import measure_onnxruntime

        for flag in ("dtype", "parameters", "gradients"):
            if getattr(how, flag) is None:
                continue
            raise OptionError(
                f"--{flag} is for --engine torch and analytic: ONNX Runtime computes in the types"
                " that the model is written in"
            )
        return measure_onnxruntime(
            model,
            model_path=model_path,
            provider=how.device,
            threads=how.threads,
            seed=how.seed,
            progress=progress,
            **repetitions,
        )
    return measure(
        model,
        model_path=model_path,
        device=how.device,
        threads=how.threads,
        dtype=how.dtype,
        parameters=how.parameters,
        gradients=how.gradients,
        budget_s=how.budget_s,
        seed=how.seed,
        cached=how.cache,
        progress=progress,
        effort=effort,
        **repetitions,
    )


def compare_with_others(
    model: Model,
    by_torch: Profile,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> "tuple[EngineComparison, RooflineFit]":
    """Forward times by PyTorch on this CPU beside those by ONNX Runtime and by the roofline.

    The CPU's speeds in the roofline are fitted to PyTorch's times.

    Args:
        model: the model.
        by_torch: its profile by PyTorch.
        seed: seed of the synthetic inputs.
        progress: called with the number of runs done and of all.
    """
    from planner.profilers.analytic import analytic, fit_constants
    from planner.profilers.compare import compare_engines
    from planner.profilers.facts import facts
    from planner.profilers.onnx_runtime.engine import measure_onnxruntime

    fit = fit_constants(facts(model), by_torch)
    kind = replace(
        shipped_device_type(by_torch.device_type),
        flops={"float32": fit.peak_flops, by_torch.dtype: fit.peak_flops},
        memory_bandwidth_bytes_per_s=fit.memory_bandwidth_bytes_per_s,
    )
    computed = analytic(model, model_path=by_torch.model_path, kind=kind, dtype=by_torch.dtype)
    by_onnxruntime = measure_onnxruntime(
        model,
        model_path=by_torch.model_path,
        threads=by_torch.threads or 1,
        seed=seed,
        progress=progress,
    )
    return compare_engines(by_torch, by_onnxruntime, computed), fit
