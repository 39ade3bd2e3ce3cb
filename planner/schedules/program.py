"""A strategy as one list of actions per device (`actions.py`)."""

from collections.abc import Sequence

from planner.artefacts.graph import Graph
from planner.artefacts.plan import StagePrediction
from planner.artefacts.strategy import Strategy, crossings, shares_devices
from planner.resharding.sums import gradient_sums
from planner.schedules import shared
from planner.schedules.actions import Lists, Program, encode
from planner.schedules.pipelines import (
    ListPattern,
    ListShape,
    assembled,
    row_tensors,
    rows_of,
    stage_blocks,
    sums_by_device,
)


def program(strategy: Strategy, graph: Graph, times: Sequence[StagePrediction] = ()) -> Program:
    """The action lists of one iteration; of an asynchronous schedule, those of a flow of M
    minibatches (`flows.py`).

    Args:
        strategy: sound, as `violations` says.
        times: of each stage, which decide the order of the stages of a device that runs several
            (`shared.py`); without them a stage counts as long as it has operators.
    """
    crossing = crossings(strategy, graph)
    sums = gradient_sums(strategy, graph)
    if shares_devices(strategy):
        return Program(Lists(encode(shared.lists(strategy, crossing, sums, times))), sums)
    rows, tails = rows_of(strategy), sums_by_device(sums)
    tensors, pieces = row_tensors(strategy, graph, crossing)
    known: dict[ListShape, ListPattern] = {}
    blocks = [
        stage_blocks(strategy, rows, r, tensors[r], len(tails.get(row.devices[0], ())), known)
        for r, row in enumerate(rows)
    ]
    code = assembled(blocks, tensors, tails, pieces)
    return Program(Lists(code), sums * num_rounds(strategy))


def num_rounds(strategy: Strategy) -> int:
    """How often each all-reduce comes: once, or, under an asynchronous schedule, once per round of
    the stage with the fewest replicas.
    """
    if not strategy.schedule.is_asynchronous:
        return 1
    return strategy.num_microbatches // min(stage.num_replicas for stage in strategy.stages)
