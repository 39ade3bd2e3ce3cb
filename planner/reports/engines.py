"""Forward times of the same operators by several engines, as tables, lines of text and JSON."""

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from planner.reports.tables import Table, count
from planner.support.units import format_seconds

if TYPE_CHECKING:
    from planner.profilers.analytic import RooflineFit
    from planner.profilers.compare import EngineComparison, EngineRow


def compare_table(comparison: "EngineComparison") -> Table:
    """Forward time per operator type, by each engine."""
    columns = ("operator", ">count", ">torch", ">ONNX Runtime", ">ONNX Runtime/torch", ">roofline")
    rows = (*comparison.rows, comparison.total)
    table = Table(
        "Forward time per operator type by each engine, one microbatch",
        columns,
        tuple(map(_compare_cells, rows)),
        marked=len(rows) - 1,
        optional=(">count",),
    )
    return table if comparison.total.analytic_s is not None else table.without(">roofline")


def _compare_cells(row: "EngineRow") -> tuple[str, ...]:
    return (
        row.type,
        str(row.count),
        format_seconds(row.torch_s),
        format_seconds(row.onnxruntime_s),
        "" if row.ratio is None else f"{row.ratio:.2f}",
        "" if row.analytic_s is None else format_seconds(row.analytic_s),
    )


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
        "types": [
            {
                "type": row.type,
                "count": row.count,
                "torch_s": row.torch_s,
                "onnxruntime_s": row.onnxruntime_s,
                "analytic_s": row.analytic_s,
            }
            for row in comparison.rows
        ],
    }
