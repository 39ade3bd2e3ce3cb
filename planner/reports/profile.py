"""Profiles as tables, as lines of text and as JSON."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from planner.artefacts.clocks import clocks_s
from planner.artefacts.graph import gradient_dtype
from planner.artefacts.growth import LEAST
from planner.artefacts.losses import Loss, loss_json, loss_lines, losses
from planner.artefacts.profile import BatchNorm
from planner.profilers.summary import SplitKind, edge_sizes, split_counts, summary
from planner.reports.tables import Column, Table, count, json_rows, percent, signed, table
from planner.support.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from planner.artefacts.graph import Parameter
    from planner.artefacts.growth import Growth
    from planner.artefacts.profile import Contention, Profile
    from planner.model.trainable import Choice
    from planner.profilers.analytic import RooflineFit
    from planner.profilers.compare import EngineComparison, EngineRow
    from planner.profilers.measured import Effort
    from planner.profilers.summary import TypeRow
    from planner.support.arrays import Floats


TYPE_COLUMNS: "tuple[Column[TypeRow], ...]" = (
    Column("type", lambda row: row.type, "operator", left=True),
    Column("count", lambda row: row.count, "count", gives_way=2),
    Column("", lambda row: row.time_s, "time", format_seconds),
    Column("", lambda row: row.forward_share, "of forward", percent),
    Column("", lambda row: row.backward_share, "of backward", percent),
    Column("", lambda row: row.backward_per_forward, "backward/forward", "{:.2f}".format,
           gives_way=1),
)  # fmt: skip
ENGINE_COLUMNS: "tuple[Column[EngineRow], ...]" = (
    Column("type", lambda row: row.type, "operator", left=True),
    Column("count", lambda row: row.count, "count", gives_way=1),
    Column("torch_s", lambda row: row.torch_s, "torch", format_seconds),
    Column("onnxruntime_s", lambda row: row.onnxruntime_s, "ONNX Runtime", format_seconds),
    Column("", lambda row: row.ratio, "ONNX Runtime/torch", "{:.2f}".format),
    Column("analytic_s", lambda row: row.analytic_s, "roofline", format_seconds, sparse=True),
)


def profile_table(profile: "Profile") -> Table:
    """Time per operator type."""
    return table("Time per operator type, one microbatch", summary(profile).rows, TYPE_COLUMNS)


def _types(profile: "Profile") -> str:
    """The type of the computation, and those of parameters and gradients where they are others."""
    if profile.parameter_dtype is None:
        return profile.dtype
    other = gradient_dtype(profile.graph)
    added = "" if other is None else f" and {other} gradients"
    return f"{profile.dtype} with {profile.parameter_dtype} parameters{added}"


def _batch_norm_lines(profile: "Profile") -> Iterator[str]:
    if norms := sum(o.type == "BatchNormalization" for o in profile.graph.operators):
        kind = {
            BatchNorm.TRAINING: "by the statistics of each microbatch",
            BatchNorm.FROZEN: "by running statistics, which stay as they are",
            BatchNorm.MIXED: "some by the statistics of each microbatch, some by running ones",
        }[profile.batch_norm]
        yield f"{count(norms, 'batch normalization')}: {kind}"


def _step_lines(profile: "Profile") -> Iterator[str]:
    """The operators beside the whole step, where that was measured."""
    times, whole = summary(profile), profile.whole_step
    if times.whole_s is not None and times.sum_per_whole and times.drift is not None:
        scaled = ", to which they are scaled" if whole and whole.alone_s is not None else ""
        yield (
            f"operators one by one take {format_seconds(times.sum_s)}, the whole step"
            f" {format_seconds(times.whole_s)}: ratio {times.sum_per_whole:.3f}{scaled};"
            f" drift of the whole step from before to after {signed(times.drift)};"
            f" {count(profile.repetitions, 'repetition')} per operator, which differ by"
            f" {percent(profile.spread)}"
        )


def profile_lines(profile: "Profile") -> tuple[str, ...]:
    """The contents of a profile, and the figures that show how reliable its times are."""
    parameters = profile.graph.parameters
    trained = [p for p in parameters if p.trainable]
    frozen = [p.name for p in parameters if not p.trainable]
    lines = [
        f"{count(len(profile.operators), 'operator')},"
        f" {format_bytes(sum(p.bytes for p in trained))} in"
        f" {count(len(trained), 'trainable parameter')}, microbatch of {profile.microbatch_size},"
        f" {_types(profile)}, {profile.source.value} on {profile.device_type} by"
        f" {profile.engine or 'an unknown engine'}",
        f"trained: {count(len(trained), 'tensor')}, {_elements(trained):,} elements;"
        f" not trained: {count(len(frozen), 'tensor')},"
        f" {_elements(p for p in parameters if not p.trainable):,} elements",
        f"trainable: {_patterns([p.name for p in trained])}",
        f"not trainable: {_patterns(frozen) or 'none'}",
        *loss_lines(_losses(profile), profile.graph.outputs if profile.model_hash else ()),
    ]
    lines += [*_batch_norm_lines(profile), *_step_lines(profile)]
    device_s, host_s = clocks_s(profile)
    if host_s.any():
        waits = ", and waits for each" if profile.launch_blocking else ""
        lines.append(_host_line(device_s, host_s) + waits)
    if profile.growth is not None:
        lines.append(_growth_line(profile.growth))
    if any(cost.rules for cost in profile.operators):
        lines.append(_splits_line(profile))
    if profile.loss_costs:
        forward_s, backward_s = _loss_times_s(profile)
        lines.append(
            f"losses add {format_seconds(forward_s)} forward and {format_seconds(backward_s)}"
            " backward to the stage that computes their inputs"
        )
    if profile.contention is not None:
        lines.append(_contention_line(profile.contention))
    return tuple(lines)


def _host_line(device_s: "Floats", host_s: "Floats") -> str:
    """The clock of the host beside that of the device."""
    sides = (
        f"{format_seconds(host)} {side} for {format_seconds(device)} of the device"
        for host, device, side in zip(
            host_s.sum(axis=1), device_s.sum(axis=1), ("forward", "backward"), strict=True
        )
    )
    return f"the host starts kernels in {' and '.join(sides)}"


def _growth_line(growth: "Growth") -> str:
    """The sizes of the microbatch that the profile is good for."""
    least = growth.least
    sizes = "any microbatch size" if least == 1 else f"any microbatch size from {least} on"
    return f"{sizes}: computed from kernels at {LEAST} and {LEAST + 1} samples"


def _splits_line(profile: "Profile") -> str:
    """The number of operators that can be split in each way."""
    kinds = ", ".join(
        f"{number} by {_SPLIT[kind]}" for kind, number in split_counts(profile).items()
    )
    whole = sum(not cost.rules for cost in profile.operators)
    return (
        f"splits of {count(len(profile.operators), 'operator')}: {kinds}; {whole} cannot be split"
    )


_SPLIT = {
    SplitKind.SAMPLE: "their first dimension",
    SplitKind.ATTRIBUTE: "another one",
    SplitKind.PARAMETER: "a parameter",
    SplitKind.REDUCTION: "a sum",
}


def _loss_times_s(profile: "Profile") -> tuple[float, float]:
    """Forward and backward time of all losses, in s."""
    known = profile.loss_costs
    return sum(one.forward_s for one in known), sum(one.backward_s for one in known)


def _contention_line(contention: "Contention") -> str:
    """How much processes that compute at the same time slow each other."""
    each = ", ".join(f"{n} of them {slow:.2f}x" for n, slow in contention.slowdown.items())
    turns = ", ".join(f"{n} of them {slow:.2f}x" for n, slow in (contention.turns or {}).items())
    return (
        f"processes that compute at the same time on {count(contention.cores, 'core')} slow each"
        f" other: {each}" + (f"; one that computes while others wait: {turns}" if turns else "")
    )


def _elements(parameters: "Iterable[Parameter]") -> int:
    return sum(math.prod(parameter.shape) for parameter in parameters)


def _losses(profile: "Profile") -> tuple[Loss, ...]:
    """The losses of a model; none of an imported profile, which says nothing about its outputs."""
    return losses(profile.graph) if profile.model_hash is not None else ()


def _patterns(names: Sequence[str]) -> str:
    """Names as text; those that differ only in numbers become one pattern.

    >>> _patterns(["h.0.weight", "h.1.weight", "wte"])
    'h.*.weight (2), wte'
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    return ", ".join(
        same[0] if len(same) == 1 else f"{pattern} ({len(same)})"
        for pattern, same in groups.items()
    )


def edges_line(profile: "Profile") -> str:
    """The sizes of the tensors that a cut would have to send."""
    sizes = edge_sizes(profile)
    if sizes is None:
        return "edges: none"
    tenth, half, most = map(format_bytes, sizes.quantiles)
    return (
        f"edges: {count(sizes.count, 'tensor')} between operators,"
        f" {format_bytes(sizes.total_bytes)} together; a tenth have up to {tenth}, half up to"
        f" {half}, nine tenths up to {most}; the largest has {format_bytes(sizes.largest_bytes)}"
        f" ({sizes.largest})"
    )


def effort_line(effort: "Effort") -> str:
    """The time that measuring took, and the number of operators that the cache had."""
    line = (
        f"{count(effort.num_classes, 'different operator')}: {effort.num_timed} timed in"
        f" {format_seconds(effort.operators_s)}, {effort.num_cached} reused from earlier profiles;"
        f" the whole model: {format_seconds(effort.whole_s)}"
    )
    if effort.cache_problem is not None:
        return f"{line}; not stored for later profiles: {effort.cache_problem}"
    return line if effort.kept or not effort.num_timed else f"{line}; not stored for later profiles"


def profile_json(profile: "Profile", path: str) -> dict[str, Any]:
    """The object that `profile --json` prints."""
    parameters, times = profile.graph.parameters, summary(profile)
    return {
        "profile": path,
        "model_hash": profile.model_hash,
        "num_operators": len(profile.operators),
        "microbatch_size": profile.microbatch_size,
        "any_microbatch_size": profile.growth is not None,
        "dimensions": profile.dimensions,
        "device_type": profile.device_type,
        "forward_s": sum(o.forward_s for o in profile.operators),
        "backward_s": sum(o.backward_s for o in profile.operators),
        "loss_forward_s": _loss_times_s(profile)[0],
        "loss_backward_s": _loss_times_s(profile)[1],
        "whole_s": times.whole_s,
        "drift": times.drift,
        "spread": profile.spread,
        "source": profile.source.value,
        "engine": profile.engine,
        "splits": {kind.value: number for kind, number in split_counts(profile).items()},
        "contention": None if profile.contention is None else profile.contention.slowdown,
        "batch_norm": profile.batch_norm.value,
        "parameter_dtype": profile.parameter_dtype,
        "gradient_dtype": gradient_dtype(profile.graph),
        "warnings": list(profile.warnings),
        "parameter_bytes": sum(p.bytes for p in parameters),
        "trainable": [p.name for p in parameters if p.trainable],
        "trained_elements": _elements(p for p in parameters if p.trainable),
        "frozen_elements": _elements(p for p in parameters if not p.trainable),
        "losses": loss_json(_losses(profile)),
    }


def choices_json(choices: "Mapping[str, Choice]") -> dict[str, Any]:
    """For each float initializer, whether it is trained, and why."""
    return {name: asdict(choice) for name, choice in choices.items()}


# ------------------------------------------------------- several engines beside each other


def compare_table(comparison: "EngineComparison") -> Table:
    """Forward time per operator type, by each engine."""
    rows = (*comparison.rows, comparison.total)
    title = "Forward time per operator type by each engine, one microbatch"
    return table(title, rows, ENGINE_COLUMNS, len(rows) - 1)


def compare_lines(comparison: "EngineComparison") -> tuple[str, ...]:
    """The rank correlations of the engines, and the operators on which they differ most."""
    ranks = [
        f"{text} {value:.3f}"
        for text, value in (
            (f"with {comparison.engine}", comparison.rank_correlation),
            ("with the roofline", comparison.analytic_rank_correlation),
        )
        if value is not None
    ]
    lines = [
        f"rank correlation of torch over {count(comparison.num_ranked, 'operator')} above 0.1 % of"
        f" the forward pass: {', '.join(ranks)}"
    ] * bool(ranks)
    lines += [
        f"{one.name} ({one.type}): {format_seconds(one.torch_s)} by torch,"
        f" {format_seconds(one.onnxruntime_s)} by ONNX Runtime"
        for one in comparison.worst
    ]
    return tuple(lines)


def fit_line(fit: "RooflineFit") -> str:
    """The speeds that were fitted to measured times, and the errors of the computed times."""
    return (
        f"the roofline was fitted to this model: {fit.peak_flops / 1e9:.3g} GFLOP/s and"
        f" {fit.memory_bandwidth_bytes_per_s / 1e9:.3g} GB/s; for forward and backward together the"
        f" rank correlation is {fit.rank_correlation:.3f}, half of the operators are off by up to"
        f" {math.expm1(fit.median_error):.0%}, nine tenths by up to {math.expm1(fit.p90_error):.0%}"
    )


def compare_json(comparison: "EngineComparison", fit: "RooflineFit") -> dict[str, Any]:
    """The object `compared` of `profile --json`."""
    return {
        "engine": comparison.engine,
        "rank_correlation": comparison.rank_correlation,
        "analytic_rank_correlation": comparison.analytic_rank_correlation,
        "fit": asdict(fit),
        "types": json_rows(comparison.rows, ENGINE_COLUMNS),
    }
