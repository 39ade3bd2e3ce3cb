"""An error of a rank with its rank, stage and action; and what was out of memory."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from traceback import extract_tb

import torch

from planner.artefacts.plan import DevicePrediction, Plan
from planner.launcher.failures.rank import current_rank, current_status
from planner.launcher.failures.status import ended_by_itself, where, who
from planner.launcher.failures.watch import used_bytes
from planner.support.errors import LaunchError, PlannerError
from planner.support.units import format_bytes

_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|not enough memory|out of memory|std::bad_alloc|_ALLOC_FAILED", re.I
)
"""What torch says in a `RuntimeError` where it got no memory: its allocators, CUDA, cuBLAS."""
_ASKED = re.compile(r"tried to allocate ([\d.]+ ?[KMGT]?i?B\b|\d+ bytes)", re.I)
_LEAST_CHANGE = 0.8
"""Of the predicted memory; the limit that is proposed for the next plan."""


def _stages_words(plan: Plan, device: int) -> str:
    """The stages of a device, such as "stage 1" or "stages 0 and 2"."""
    mine = [s for s, stage in enumerate(plan.strategy.stages) if device in stage.devices]
    if len(mine) == 1:
        return f"stage {mine[0]}"
    return f"stages {', '.join(map(str, mine[:-1]))} and {mine[-1]}"


def predicted(plan: Plan, device: int) -> DevicePrediction:
    """The prediction for a device of the plan."""
    (one,) = (one for one in plan.prediction.devices if one.device == device)
    return one


def introduce(plan: Plan, device: int, hang_timeout_s: float) -> None:
    """Writes into this rank's status who it is."""
    total_bytes = predicted(plan, device).memory.total_bytes
    current_status().describe(_stages_words(plan, device), total_bytes, hang_timeout_s)


def current_place() -> str:
    """This rank with its stages and its action, such as "rank 1 (stage 1) at 1F3 of step 5"."""
    return f"{_current_name()}{where(current_status().look())}"


def _current_name() -> str:
    """This rank with its stages, such as "rank 1 (stage 1)"; alone, its stages."""
    rank, status = current_rank(), current_status().look()
    if rank is None:
        return status.description or "this process"
    return who(rank.rank, status)


@contextmanager
def with_causes(plan: Plan, device: int) -> Iterator[None]:
    """Turns errors that are no message yet into one that names rank, stage and action.

    Args:
        device: of this rank, index into the topology.

    Raises:
        LaunchError: instead of what was raised inside, unless that is a message already. Nothing
            inside may end the process: `sys.exit` is an error of the code that calls it.
    """
    try:
        yield
    except SystemExit as end:
        frame = extract_tb(end.__traceback__)[-1]
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise LaunchError(
            f"{ended_by_itself(_current_name(), code, current_status().look())}: SystemExit: {end}"
            f" ({frame.filename}, line {frame.lineno})"
        ) from end
    except Exception as error:
        if (lack := out_of_memory(error)) is not None:
            raise LaunchError(_memory_message(predicted(plan, device), lack)) from error
        if isinstance(error, PlannerError):
            raise
        frame = extract_tb(error.__traceback__)[-1]
        raise LaunchError(
            f"{current_place()}: {type(error).__name__}: {error}"
            f" ({frame.filename}, line {frame.lineno})"
        ) from error


def out_of_memory(error: BaseException | None) -> BaseException | None:
    """The error, or the one that it was made from, that says that there was not enough memory."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return error
        if isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)):
            return error
        error = error.__cause__
    return None


def _memory_message(planned: DevicePrediction, error: BaseException) -> str:
    memory = planned.memory
    parts = ", ".join(
        f"{part.name.removesuffix('_bytes')} {format_bytes(getattr(memory, part.name))}"
        for part in fields(memory)
        if getattr(memory, part.name)
    )
    asked = _ASKED.search(str(error))
    more = f" when it asked for {_size(asked[1])} more" if asked else ""
    limit = format_bytes(_LEAST_CHANGE * memory.total_bytes)
    return (
        f"{current_place()}: out of memory on device {planned.device} ({planned.name}): "
        f"{_in_use()}{more}; predicted were {format_bytes(memory.total_bytes)} ({parts})\n"
        f'  plan with less: planner solve --device-memory "{limit}", with --recompute full, more '
        "--microbatches, a smaller microbatch, another --optimizer, or more devices"
    )


def _size(text: str) -> str:
    number, _, unit = text.partition(" ")
    return format_bytes(int(number)) if unit == "bytes" else text


def _in_use() -> str:
    """The memory that this process uses, and its peak."""
    if torch.cuda.is_available() and torch.cuda.memory_reserved():
        now, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        _, total = torch.cuda.mem_get_info()
        return f"{format_bytes(now)} in use (peak {format_bytes(peak)}, of {format_bytes(total)})"
    used, most = used_bytes(os.getpid()), format_bytes(peak_bytes())
    return f"{most} at its peak" if used is None else f"{format_bytes(used)} in use (peak {most})"


def peak_bytes() -> int:
    """The most memory that this process has used, on the CPU."""
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
